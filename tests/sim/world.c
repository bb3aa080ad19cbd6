#include "tests/sim/sim.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "common/rng.h"

uint32_t mu_sim_override_workers;
uint64_t mu_sim_override_steps;

enum { EVENTS_MAX = 40 * 1000 * 1000 }; /* of one history: more is an endless loop */

void *mu_sim_alloc(size_t size_bytes)
{
    void *block = calloc(1, size_bytes);
    if (!block) {
        fprintf(stderr, "sim: out of memory (%zu bytes)\n", size_bytes);
        exit(2);
    }
    return block;
}

void *mu_sim_grow(void *array, uint32_t count, uint32_t *capacity, size_t item_bytes)
{
    if (count < *capacity)
        return array;
    uint32_t grown = *capacity ? 2 * *capacity : 16;
    void *block = realloc(array, grown * item_bytes);
    if (!block) {
        fprintf(stderr, "sim: out of memory (%zu bytes)\n", grown * item_bytes);
        exit(2);
    }
    memset((char *)block + *capacity * item_bytes, 0, (grown - *capacity) * item_bytes);
    *capacity = grown;
    return block;
}

/* ---- randomness ---- */

uint64_t mu_sim_random(struct mu_sim *sim)
{
    return mu_splitmix64(&sim->rng);
}

uint64_t mu_sim_below(struct mu_sim *sim, uint64_t count)
{
    return count ? mu_sim_random(sim) % count : 0;
}

uint64_t mu_sim_between(struct mu_sim *sim, uint64_t low, uint64_t high)
{
    return low + mu_sim_below(sim, high - low + 1);
}

bool mu_sim_chance(struct mu_sim *sim, uint32_t ppm)
{
    return ppm != 0 && mu_sim_below(sim, 1000000) < ppm;
}

uint64_t mu_sim_delay(struct mu_sim *sim, uint64_t typical_us)
{
    uint64_t delay_us = typical_us / 2 + mu_sim_below(sim, typical_us + 1);
    if (mu_sim_below(sim, 32) == 0)
        delay_us *= 1 + mu_sim_below(sim, 10);
    return delay_us ? delay_us : 1;
}

struct mu_id mu_sim_id(struct mu_sim *sim)
{
    struct mu_id id = {mu_sim_random(sim), mu_sim_random(sim)};
    return id;
}

/* ---- trace and violations ---- */

void mu_sim_trace(struct mu_sim *sim, const char *fmt, ...)
{
    if (!sim->trace)
        return;
    va_list args;
    printf("%12.6f ", (double)sim->now_us / 1e6);
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    putchar('\n');
}

void mu_sim_violate(struct mu_sim *sim, const char *fmt, ...)
{
    if (sim->failed)
        return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(sim->failure, sizeof sim->failure, fmt, args);
    va_end(args);
    sim->failed = true;
    mu_sim_trace(sim, "VIOLATION %s", sim->failure);
}

/* ---- event heap ---- */

static bool earlier(const struct mu_sim_event *a, const struct mu_sim_event *b)
{
    return a->at_us != b->at_us ? a->at_us < b->at_us : a->order < b->order;
}

static void heap_push(struct mu_sim *sim, struct mu_sim_event *event)
{
    sim->heap = mu_sim_grow(sim->heap, sim->heap_count, &sim->heap_capacity, sizeof *sim->heap);
    uint32_t at = sim->heap_count++;
    while (at > 0) {
        uint32_t parent = (at - 1) / 2;
        if (!earlier(event, sim->heap[parent]))
            break;
        sim->heap[at] = sim->heap[parent];
        at = parent;
    }
    sim->heap[at] = event;
}

static struct mu_sim_event *heap_pop(struct mu_sim *sim)
{
    struct mu_sim_event *top = sim->heap[0];
    struct mu_sim_event *last = sim->heap[--sim->heap_count];
    uint32_t at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= sim->heap_count)
            break;
        if (child + 1 < sim->heap_count && earlier(sim->heap[child + 1], sim->heap[child]))
            child++;
        if (!earlier(sim->heap[child], last))
            break;
        sim->heap[at] = sim->heap[child];
        at = child;
    }
    if (sim->heap_count > 0)
        sim->heap[at] = last;
    return top;
}

void mu_sim_at(struct mu_sim *sim, uint64_t at_us, int32_t node, mu_sim_fire fire, void *payload, uint64_t a,
               uint64_t b)
{
    struct mu_sim_event *event = mu_sim_alloc(sizeof *event);
    event->at_us = at_us < sim->now_us ? sim->now_us : at_us;
    event->order = sim->next_order++;
    event->fire = fire;
    event->payload = payload;
    event->node = node;
    event->life = node >= 0 ? sim->nodes[node].life : 0;
    event->a = a;
    event->b = b;
    heap_push(sim, event);
}

void mu_sim_after(struct mu_sim *sim, uint64_t delay_us, int32_t node, mu_sim_fire fire, void *payload, uint64_t a,
                  uint64_t b)
{
    mu_sim_at(sim, sim->now_us + delay_us, node, fire, payload, a, b);
}

static void free_event(struct mu_sim_event *event)
{
    free(event->payload);
    free(event);
}

/* ---- nodes ---- */

uint64_t mu_sim_mono(const struct mu_sim *sim, int32_t node)
{
    const struct mu_sim_node *n = &sim->nodes[node];
    int64_t drift_us = (int64_t)(sim->now_us / 1000) * n->clock_ppm / 1000;
    return n->clock_offset_us + sim->now_us + (uint64_t)drift_us;
}

uint64_t mu_sim_true_time(const struct mu_sim *sim, int32_t node, uint64_t mono_us)
{
    if (mono_us == MU_SIM_NEVER)
        return MU_SIM_NEVER;
    uint64_t now_mono_us = mu_sim_mono(sim, node);
    if (mono_us <= now_mono_us)
        return sim->now_us;
    uint64_t wait_us = mono_us - now_mono_us;
    if (wait_us > 3600 * MU_SIM_S) /* far beyond the end of any history */
        return MU_SIM_NEVER;
    int64_t rate = 1000000 + sim->nodes[node].clock_ppm;
    return sim->now_us + wait_us * 1000000 / (uint64_t)rate + 2;
}

static void clear_backlog(struct mu_sim_node *node)
{
    for (uint32_t i = 0; i < node->backlog_count; i++)
        free_event(node->backlog[i]);
    node->backlog_count = 0;
}

void mu_sim_node_start(struct mu_sim *sim, int32_t node)
{
    struct mu_sim_node *n = &sim->nodes[node];
    n->life++;
    n->alive = true;
    n->stopped = false;
    n->tick_at_us = MU_SIM_NEVER;
}

void mu_sim_node_end(struct mu_sim *sim, int32_t node)
{
    sim->nodes[node].alive = false;
    sim->nodes[node].stopped = false;
    clear_backlog(&sim->nodes[node]);
}

void mu_sim_node_stop(struct mu_sim *sim, int32_t node)
{
    sim->nodes[node].stopped = true;
}

static void fire(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_node *node = event->node >= 0 ? &sim->nodes[event->node] : NULL;
    if (node && (!node->alive || node->life != event->life)) {
        free_event(event);
        return;
    }
    if (node && node->stopped) {
        node->backlog = mu_sim_grow(node->backlog, node->backlog_count, &node->backlog_capacity, sizeof *node->backlog);
        node->backlog[node->backlog_count++] = event;
        return;
    }
    sim->stats.events++;
    event->fire(sim, event);
    free_event(event);
}

/* What arrived meanwhile comes at once and in order, before anything that arrives from now on. */
void mu_sim_node_continue(struct mu_sim *sim, int32_t node)
{
    struct mu_sim_node *n = &sim->nodes[node];
    if (!n->alive || !n->stopped)
        return;
    n->stopped = false;
    n->draining_backlog = true;
    struct mu_sim_event **backlog = n->backlog;
    uint32_t count = n->backlog_count;
    n->backlog = NULL;
    n->backlog_count = n->backlog_capacity = 0;
    for (uint32_t i = 0; i < count; i++)
        fire(sim, backlog[i]); /* drops them when the node dies on the way; keeps them when it is stopped again */
    free(backlog);
    n->draining_backlog = false;
}

/* ---- a history ---- */

static void random_clock(struct mu_sim *sim, struct mu_sim_node *node)
{
    node->clock_offset_us = MU_SIM_S + mu_sim_below(sim, 1000 * MU_SIM_S);
    uint64_t ppm = sim->params.clock_ppm;
    node->clock_ppm = (int64_t)mu_sim_below(sim, 2 * ppm + 1) - (int64_t)ppm;
    node->tick_at_us = MU_SIM_NEVER;
}

static void fill_spec(struct mu_sim *sim)
{
    const struct mu_sim_params *p = &sim->params;
    struct mu_job_spec *spec = &sim->spec;
    mu_job_spec_init(spec);
    strcpy(spec->name, "sim");
    spec->model = (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                           .layers = p->layers,
                                           .heads = p->slices,
                                           .channels = p->channels,
                                           .context = 8,
                                           .vocab = p->vocab,
                                           .slices = p->slices};
    mu_model_config_resolve(&spec->model);
    spec->parallel.tp = p->tp;
    spec->parallel.pp = p->pp;
    spec->parallel.dp = p->dp;
    spec->parallel.optimizer_sharding = p->sharded;
    spec->parallel.redundancy = p->buddies ? MU_REDUNDANCY_BUDDY : MU_REDUNDANCY_NONE;
    strcpy(spec->data.path, "/data/sim.txt");
    spec->batch.sequences = p->leaves;
    spec->batch.micro = 1;
    spec->batch.length = 8;
    spec->steps = p->steps;
    spec->workers.min = p->min_workers;
    spec->workers.max = p->max_workers;
    spec->workers.spares = p->spares;
    if (p->checkpoints)
        strcpy(spec->checkpoint.path, sim->params.local ? "/disk-%h/sim" : "/ckpt/sim");
    spec->checkpoint.kind = sim->params.local ? MU_CHECKPOINT_LOCAL : MU_CHECKPOINT_SHARED;
    spec->checkpoint.every = !p->checkpoints ? 0 : p->every_auto ? MU_EVERY_AUTO : p->checkpoint_every;
    spec->checkpoint.keep = (uint32_t)p->keep;
    spec->checkpoint.keep_every = p->keep_every;
    spec->eval.every = p->eval_every;
    spec->eval.sequences = p->eval_every ? 1 : 0;
    spec->data.holdout = p->eval_every ? 0.1 : 0.0;
    spec->seed = sim->seed;
    struct mu_error err;
    if (mu_job_spec_check(spec, &err) != MU_OK)
        mu_sim_violate(sim, "the simulator's own job is refused: %s", err.text);
    sim->law = *spec;
    mu_model_spec_init(&sim->model, &spec->model);
    MU_ASSERT(sim->model.chunk_count < MU_SIM_CHUNKS_MAX);
    sim->all_chunks = (UINT64_C(1) << sim->model.chunk_count) - 1;
    uint32_t tied_end = mu_model_first_chunk(&sim->model, MU_CELL_E, 0, p->slices);
    sim->tied_chunks = mu_model_is_tied(&spec->model) ? (UINT64_C(1) << tied_end) - 1 : 0;
}

static void override(struct mu_sim_params *params)
{
    if (mu_sim_override_steps)
        params->steps = mu_sim_override_steps;
    if (!mu_sim_override_workers)
        return;
    params->slots = mu_sim_override_workers + (params->slots - params->workers);
    params->workers = mu_sim_override_workers;
    params->min_workers = params->min_workers > params->workers ? params->workers : params->min_workers;
    params->leaves = params->leaves > params->slots ? params->leaves : params->slots;
}

void mu_sim_init(struct mu_sim *sim, uint64_t seed, const struct mu_sim_profile *profile, bool trace)
{
    memset(sim, 0, sizeof *sim);
    sim->seed = seed;
    uint64_t start = seed ^ 0x5EED5EED5EED5EEDu; /* scrambled: the streams of neighbouring seeds must not overlap */
    sim->rng = mu_splitmix64(&start);
    sim->profile = profile;
    sim->trace = trace;
    profile->fill(sim, &sim->params);
    override(&sim->params);
    MU_ASSERT(sim->params.workers <= sim->params.slots);
    mu_sim_choose_init(sim);
    fill_spec(sim);
    mu_coord_config_init(&sim->coord_config);
    sim->coord_config.max_jobs = 2;
    sim->coord_config.max_workers = sim->params.slots * 2 + 16;
    sim->coord_config.max_members = sim->params.slots + 8;
    if (sim->params.crash_limit)
        sim->coord_config.crash_limit = sim->params.crash_limit;
    if (sim->params.rebalance_ms)
        sim->coord_config.rebalance_ms = sim->params.rebalance_ms;
    sim->nodes = mu_sim_alloc((1 + (size_t)sim->params.slots) * sizeof *sim->nodes);
    sim->workers = mu_sim_alloc(sim->params.slots * sizeof *sim->workers);
    for (uint32_t i = 0; i < 1 + sim->params.slots; i++)
        random_clock(sim, &sim->nodes[i]);
    sim->store = mu_sim_store_new();
    mu_sim_oracle_init(sim);
    mu_sim_client_init(sim);
    mu_sim_coord_start(sim);
    for (uint32_t slot = 0; slot < sim->params.workers; slot++)
        mu_sim_worker_restart_later(sim, slot);
    mu_sim_faults_init(sim);
}

void mu_sim_run(struct mu_sim *sim)
{
    while (!sim->failed && !sim->finished && sim->heap_count > 0) {
        struct mu_sim_event *event = heap_pop(sim);
        if (event->at_us > sim->params.horizon_us) {
            free_event(event);
            break;
        }
        sim->now_us = event->at_us;
        fire(sim, event);
        if (sim->stats.events > EVENTS_MAX)
            mu_sim_violate(sim, "more than %d events: something loops without end", EVENTS_MAX);
    }
    sim->stats.virtual_us = sim->now_us;
    sim->stats.histories = 1;
    if (!sim->failed)
        mu_sim_oracle_end(sim);
}

void mu_sim_fini(struct mu_sim *sim)
{
    mu_sim_coord_fini(sim);
    mu_sim_worker_fini(sim);
    mu_sim_client_fini(sim);
    mu_sim_oracle_fini(sim);
    mu_sim_store_free(sim->store);
    mu_sim_files_free(&sim->files);
    while (sim->heap_count > 0)
        free_event(heap_pop(sim));
    for (uint32_t i = 0; i < 1 + sim->params.slots; i++) {
        clear_backlog(&sim->nodes[i]);
        free(sim->nodes[i].backlog);
    }
    free(sim->heap);
    free(sim->nodes);
    free(sim->workers);
    free(sim->sessions);
    free(sim->partitions);
}
