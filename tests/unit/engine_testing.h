/* Engines in one process and the smallest possible coordinator for them: it starts any layout it is told to, from the
 * newest step that the workers hold together, moves planned by plan/reshard.h; it hands out assignments and waits for
 * answers. Included by one file per executable.
 *
 * With MU_TEST_CUDA workers compute on an emulated GPU, each with a context of its own, but for those that are started
 * with worker_start_on_cpu: references come from the CPU. */
#ifndef MU_TESTS_ENGINE_TESTING_H
#define MU_TESTS_ENGINE_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/rng.h"
#include "plan/layout.h"
#include "plan/plan.h"
#include "plan/reshard.h"
#include "storage/manifest.h"
#include "tests/lib/sanitized.h"
#include "worker/engine.h"

enum { WORKERS_MAX = 8, EVENTS_MAX = 4096, LEDGER_MAX = 8192, PATIENCE_S = 120, LAYERS = 4 };

/* What most of them train: small, and still every kind of column that a layout divides. */
static const struct mu_model_config small_gpt2 = {.family = MU_FAMILY_GPT2,
                                                  .layers = LAYERS,
                                                  .heads = 4,
                                                  .channels = 32,
                                                  .context = 16,
                                                  .vocab = 259,
                                                  .dropout = 0.1f,
                                                  .slices = 4};

/* When a point of some worker is reached for the `hit`-th time, every worker's generation is aborted: a revoke at that
 * instant. */
enum trigger_point { TRIGGER_NONE, TRIGGER_LEAF, TRIGGER_VOTE, TRIGGER_APPLIED, TRIGGER_BOUNDARY };

struct ledger_line {
    uint64_t generation, step, first;
    uint32_t leaf, count;
};

struct fleet;

struct worker {
    struct fleet *fleet;
    uint32_t index;
    struct mu_engine *engine;
    struct mu_device *device; /* NULL: the CPU */
    struct mu_id incarnation;
    struct mu_worker_event *events; /* [EVENTS_MAX] */
    uint32_t event_count, seen;
    char text[MU_ERROR_TEXT_SIZE]; /* of the last JOB_LOADED */
    struct mu_held held;
    uint64_t executed; /* newest command executed */
    uint64_t steps_posted;
};

struct command {
    uint64_t number, not_before_step;
    bool park, snapshot;
    uint64_t checkpoint;
    uint32_t pieces;
    char dir[MU_PATH_SIZE];
};

struct fleet {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct mu_job_spec spec;
    char dir[64];
    uint32_t threads;
    struct worker workers[WORKERS_MAX];
    uint32_t count; /* workers ever started; engine NULL: gone */

    uint64_t generation;
    uint32_t ranks[WORKERS_MAX], world; /* worker of each rank of this generation */
    const uint32_t *leaf_counts;
    struct mu_layout layout, wanted; /* of this generation; of the next one, dp 0: all members are replicas */
    bool planned;                    /* layouts by the planner, not the wanted one */
    uint32_t leaving;                /* workers that are to be idle at most; planned only */
    uint32_t silent;                 /* ranks that are not told what to send: who waits for it waits in vain */
    uint32_t rolled_forward;         /* ranks that were told to, so far */
    uint64_t moved_bytes;            /* planned, so far */
    uint64_t checkpoint, checkpoint_step;
    char checkpoint_dir[MU_PATH_SIZE];
    struct command command;

    enum trigger_point trigger;
    bool trigger_holds; /* instead of aborting everybody the worker stands still until it is let go */
    bool holding;
    uint32_t trigger_worker;
    atomic_uint trigger_hits;
    bool triggered;

    struct ledger_line ledger[LEDGER_MAX];
    uint32_t ledger_count;
    double eval_loss[64];
    uint32_t applied[64];    /* per step, how often by any worker */
    double loss[64];         /* per step, as the first worker that reported it */
    uint32_t unfinite_count; /* ranks that have finished with weights that are not finite */
};

/* ---- callbacks: engine and writer threads ---- */

static inline void pull_trigger(struct worker *worker, enum trigger_point point)
{
    struct fleet *fleet = worker->fleet;
    pthread_mutex_lock(&fleet->lock);
    bool fire = fleet->trigger == point && fleet->trigger_worker == worker->index && !fleet->triggered &&
                atomic_fetch_sub(&fleet->trigger_hits, 1) == 1;
    if (fire) {
        fleet->triggered = true;
        fleet->holding = fleet->trigger_holds;
        pthread_cond_broadcast(&fleet->changed);
        for (uint32_t rank = 0; !fleet->holding && rank < fleet->world; rank++)
            if (mu_engine_abort(fleet->workers[fleet->ranks[rank]].engine, fleet->generation) != MU_OK)
                abort();
        while (fleet->holding)
            pthread_cond_wait(&fleet->changed, &fleet->lock);
    }
    pthread_mutex_unlock(&fleet->lock);
}

static inline void on_post(void *ctx, const struct mu_worker_event *event)
{
    struct worker *worker = ctx;
    struct fleet *fleet = worker->fleet;
    pthread_mutex_lock(&fleet->lock);
    if (worker->event_count == EVENTS_MAX)
        abort();
    worker->events[worker->event_count++] = *event;
    if (event->kind == MU_WE_PARKED || event->kind == MU_WE_PREPARED)
        worker->held = event->parked.held;
    if (event->kind == MU_WE_FED && event->fed.state == MU_FEED_WHOLE)
        worker->held = event->fed.held;
    if (event->kind == MU_WE_JOB_LOADED)
        snprintf(worker->text, sizeof worker->text, "%s", event->job_loaded.text);
    if (event->kind == MU_WE_EVAL)
        fleet->eval_loss[event->eval.step % 64] = event->eval.loss;
    if (event->kind == MU_WE_STEP)
        fleet->loss[event->step.result.step % 64] = event->step.result.loss;
    pthread_cond_broadcast(&fleet->changed);
    pthread_mutex_unlock(&fleet->lock);
}

static inline uint64_t on_vote(void *ctx, uint64_t generation)
{
    struct worker *worker = ctx;
    (void)generation;
    pull_trigger(worker, TRIGGER_VOTE);
    pthread_mutex_lock(&worker->fleet->lock);
    uint64_t number = worker->fleet->command.number;
    pthread_mutex_unlock(&worker->fleet->lock);
    return number;
}

static inline struct mu_boundary on_boundary(void *ctx, uint64_t generation, uint64_t steps_done,
                                             const struct mu_step_result *result)
{
    struct worker *worker = ctx;
    struct mu_boundary decision = {.park = false};
    (void)generation;
    pthread_mutex_lock(&worker->fleet->lock);
    const struct command *command = &worker->fleet->command;
    if (command->number > worker->executed && result->command >= command->number &&
        steps_done >= command->not_before_step) {
        worker->executed = command->number;
        decision.park = command->park;
        for (uint32_t rank = 0; command->snapshot && rank < command->pieces; rank++) {
            if (worker->fleet->ranks[rank] != worker->index)
                continue;
            decision.take_snapshot = true;
            decision.snapshot =
                (struct mu_snapshot){.checkpoint = command->checkpoint, .piece = rank, .layout = worker->fleet->layout};
            snprintf(decision.snapshot.dir, sizeof decision.snapshot.dir, "%s", command->dir);
        }
    }
    pthread_mutex_unlock(&worker->fleet->lock);
    pull_trigger(worker, TRIGGER_BOUNDARY);
    return decision;
}

static inline void on_leaf(void *ctx, uint64_t generation, uint64_t step, uint32_t leaf, uint64_t first, uint64_t count)
{
    struct worker *worker = ctx;
    struct fleet *fleet = worker->fleet;
    pthread_mutex_lock(&fleet->lock);
    if (fleet->ledger_count == LEDGER_MAX)
        abort();
    fleet->ledger[fleet->ledger_count++] = (struct ledger_line){generation, step, first, leaf, (uint32_t)count};
    pthread_mutex_unlock(&fleet->lock);
    pull_trigger(worker, TRIGGER_LEAF);
}

static inline void on_applied(void *ctx, uint64_t generation, uint64_t step)
{
    struct worker *worker = ctx;
    (void)generation;
    pthread_mutex_lock(&worker->fleet->lock);
    worker->fleet->applied[step % 64]++;
    pthread_mutex_unlock(&worker->fleet->lock);
    pull_trigger(worker, TRIGGER_APPLIED);
}

/* ---- the fleet: the test's thread ---- */

static inline void write_text(const char *path, size_t size_bytes)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    uint64_t state = 7;
    for (size_t i = 0; i < size_bytes; i++)
        assert_int_not_equal(fputc("the quick brown fox. "[mu_splitmix64(&state) % 21], file), EOF);
    assert_int_equal(fclose(file), 0);
}

/* 7 leaves of 2 micro-batches of 1 sequence; two layers; dropout, so that sample numbers matter. `model` NULL: a small
 * GPT-2 without slices. */
static inline struct fleet *fleet_of(const struct mu_model_config *model)
{
    struct fleet *fleet = calloc(1, sizeof *fleet);
    assert_non_null(fleet);
    pthread_mutex_init(&fleet->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&fleet->changed, &attr);
    pthread_condattr_destroy(&attr);
    snprintf(fleet->dir, sizeof fleet->dir, "/tmp/mu-engine-XXXXXX");
    assert_non_null(mkdtemp(fleet->dir));
    fleet->threads = 1;
    struct mu_job_spec *spec = &fleet->spec;
    mu_job_spec_init(spec);
    snprintf(spec->name, sizeof spec->name, "tiny");
    spec->model = (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                           .layers = 2,
                                           .heads = 2,
                                           .channels = 32,
                                           .context = 16,
                                           .vocab = 256,
                                           .dropout = 0.1f,
                                           .slices = 1};
    if (model)
        spec->model = *model;
    snprintf(spec->data.path, sizeof spec->data.path, "%s/text", fleet->dir);
    write_text(spec->data.path, 6000);
    spec->data.holdout = 0.1;
    spec->batch.sequences = 14;
    spec->batch.micro = 1;
    spec->batch.accumulate = 2;
    spec->batch.length = 16;
    spec->steps = 6;
    spec->optimizer.warmup = 2;
    spec->eval.every = 4;
    spec->eval.sequences = 9;
    struct mu_error err;
    if (mu_job_spec_check(spec, &err) != MU_OK)
        fail_msg("%s", err.text);
    return fleet;
}

static inline struct fleet *fleet_new(void)
{
    return fleet_of(NULL);
}

static inline void remove_tree(const char *dir)
{
    char line[256];
    snprintf(line, sizeof line, "rm -rf '%s'", dir);
    assert_int_equal(system(line), 0);
}

static inline void worker_stop(struct fleet *fleet, uint32_t index)
{
    struct worker *worker = &fleet->workers[index];
    mu_engine_free(worker->engine);
    mu_device_close(worker->device);
    worker->engine = NULL;
    worker->device = NULL;
}

static inline void fleet_free(struct fleet *fleet)
{
    for (uint32_t i = 0; i < fleet->count; i++) {
        worker_stop(fleet, i);
        free(fleet->workers[i].events);
    }
    remove_tree(fleet->dir);
    pthread_cond_destroy(&fleet->changed);
    pthread_mutex_destroy(&fleet->lock);
    free(fleet);
}

/* Somebody else's trouble may be why nothing happens here. */
static inline void print_troubles(const struct fleet *fleet)
{
    for (uint32_t i = 0; i < fleet->count; i++) {
        const struct worker *worker = &fleet->workers[i];
        const struct mu_worker_event *last = worker->event_count ? &worker->events[worker->event_count - 1] : NULL;
        if (last && last->kind == MU_WE_PARKED && last->parked.text[0])
            print_error("worker %u parked in generation %d: %s\n", i, (int)last->parked.generation, last->parked.text);
    }
}

/* The next event of the worker among `kinds` (a bit set); others are passed over. NULL: none within PATIENCE_S. */
static inline const struct mu_worker_event *next_event(struct worker *worker, uint32_t kinds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += PATIENCE_S;
    const struct mu_worker_event *found = NULL;
    pthread_mutex_lock(&worker->fleet->lock);
    for (;;) {
        while (!found && worker->seen < worker->event_count) {
            const struct mu_worker_event *event = &worker->events[worker->seen++];
            bool stale = event->kind == MU_WE_PARKED && event->parked.generation < worker->fleet->generation;
            if ((kinds >> event->kind & 1) && !stale) /* an abort is answered once more by who has parked by itself */
                found = event;
        }
        if (found || pthread_cond_timedwait(&worker->fleet->changed, &worker->fleet->lock, &until) != 0)
            break;
    }
    if (!found)
        print_troubles(worker->fleet);
    pthread_mutex_unlock(&worker->fleet->lock);
    if (!found)
        fail_msg("worker %u: nothing happened (events wanted: %x)", worker->index, kinds);
    return found;
}

/* What the worker holds by its last word; a late answer to an abort may be about to repeat it. */
static inline struct mu_held held_of(struct worker *worker)
{
    pthread_mutex_lock(&worker->fleet->lock);
    struct mu_held held = worker->held;
    pthread_mutex_unlock(&worker->fleet->lock);
    return held;
}

static inline void forget_held(struct worker *worker)
{
    pthread_mutex_lock(&worker->fleet->lock);
    worker->held = (struct mu_held){.has_state = false};
    pthread_mutex_unlock(&worker->fleet->lock);
}

/* TRIGGER_NONE disarms. */
static inline void set_trigger(struct fleet *fleet, enum trigger_point point, uint32_t worker, uint32_t hits)
{
    pthread_mutex_lock(&fleet->lock);
    fleet->triggered = false;
    fleet->trigger = point;
    fleet->trigger_worker = worker;
    atomic_store(&fleet->trigger_hits, hits);
    pthread_mutex_unlock(&fleet->lock);
}

static inline uint32_t worker_start_with(struct fleet *fleet, struct mu_device *device)
{
    uint32_t index = fleet->count++;
    struct worker *worker = &fleet->workers[index];
    *worker = (struct worker){.fleet = fleet, .index = index, .device = device, .incarnation = mu_id_random()};
    worker->events = calloc(EVENTS_MAX, sizeof *worker->events);
    assert_non_null(worker->events);
    struct mu_engine_config config = {.threads = fleet->threads,
                                      .device = device,
                                      .host_id = "host",
                                      .callbacks = {.ctx = worker,
                                                    .post = on_post,
                                                    .vote = on_vote,
                                                    .boundary = on_boundary,
                                                    .leaf = on_leaf,
                                                    .applied = on_applied}};
    struct mu_error err;
    if (mu_engine_new(&config, &worker->engine, &err) != MU_OK)
        fail_msg("engine: %s", err.text);
    assert_int_equal(mu_engine_load(worker->engine, &fleet->spec, (struct mu_id){1, 1}), MU_OK);
    const struct mu_worker_event *event = next_event(worker, 1u << MU_WE_JOB_LOADED);
    if (event->job_loaded.status != MU_OK)
        fail_msg("load: %s", worker->text);
    return index;
}

static inline uint32_t worker_start_on_cpu(struct fleet *fleet)
{
    return worker_start_with(fleet, NULL);
}

static inline uint32_t worker_start(struct fleet *fleet)
{
    struct mu_device *device = NULL;
#ifdef MU_TEST_CUDA
    enum { WORKSPACE_BYTES = 4 << 20 };
    struct mu_error err;
    if (mu_device_open_cuda(0, WORKSPACE_BYTES, &err, &device) != MU_OK)
        fail_msg("%s", err.text);
#endif
    return worker_start_with(fleet, device);
}

/* ---- the coordinator ---- */

static inline struct mu_layout make_layout(uint32_t tp, uint32_t pp, uint32_t dp, uint32_t idle, bool sharded,
                                           uint32_t layers)
{
    struct mu_layout layout;
    mu_layout_init(&layout, dp, layers);
    layout.tp = tp;
    layout.pp = pp;
    layout.idle = idle;
    layout.sharded = sharded;
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(p * layers / pp);
    return layout;
}

/* The next generations' layout; dp 0: tp = pp = 1, all members. */
static inline void want_layout(struct fleet *fleet, uint32_t tp, uint32_t pp, uint32_t dp, uint32_t idle)
{
    bool sharded = fleet->spec.parallel.optimizer_sharding;
    fleet->wanted = make_layout(tp, pp, dp, idle, sharded, fleet->spec.model.layers);
}

/* Where a generation starts, and what each of its ranks has of that. */
struct beginning {
    uint64_t step;
    enum mu_state_source source[WORKERS_MAX];
    struct mu_step_result result;
    struct mu_held held[WORKERS_MAX];
    struct mu_reshard_holder holders[WORKERS_MAX];
};

static inline bool find_result(const struct beginning *begin, uint32_t world, uint64_t step,
                               struct mu_step_result *ret_result)
{
    for (uint32_t rank = 0; rank < world; rank++) {
        const struct mu_held *held = &begin->held[rank];
        if (held->has_result && held->result.step == step) {
            *ret_result = held->result;
            return true;
        }
    }
    return false;
}

/* Do the members together have `step`, some of them after one update? */
static inline bool can_begin(const struct mu_model_spec *model, struct beginning *begin, uint32_t world, uint64_t step)
{
    bool known = step > 0 && find_result(begin, world, step - 1, &begin->result);
    begin->step = step;
    for (uint32_t rank = 0; rank < world; rank++) {
        struct mu_held *held = &begin->held[rank];
        begin->source[rank] = MU_SOURCE_PEER;
        begin->holders[rank] = (struct mu_reshard_holder){.shares = held->shares, .host = rank % 2};
        if (held->has_state && held->step == step) {
            begin->source[rank] = MU_SOURCE_HELD;
            begin->holders[rank].share_count = held->share_count;
        } else if (held->has_state && held->step + 1 == step && held->has_gradient && known) {
            begin->source[rank] = MU_SOURCE_ROLL_FORWARD;
            begin->holders[rank].share_count = 1;
            begin->holders[rank].stale_copies = true;
        }
    }
    return mu_reshard_complete(model, begin->holders, world);
}

/* After a sharded update only the owned parameters are of the new step. */
static inline void note_updates(struct fleet *fleet, struct beginning *begin, uint32_t world)
{
    for (uint32_t rank = 0; rank < world; rank++) {
        if (begin->source[rank] != MU_SOURCE_ROLL_FORWARD)
            continue;
        struct mu_held_share *share = &begin->held[rank].shares[0];
        share->owned_only =
            share->owned_only || (share->layout.sharded && share->layout.dp > 1 && begin->result.finite);
        fleet->rolled_forward++;
    }
}

static inline void choose_beginning(struct fleet *fleet, const struct mu_model_spec *model, struct beginning *begin,
                                    const uint32_t *workers, uint32_t world)
{
    uint64_t newest = 0;
    bool any = false;
    for (uint32_t rank = 0; rank < world; rank++) {
        begin->held[rank] = held_of(&fleet->workers[workers[rank]]);
        const struct mu_held *held = &begin->held[rank];
        any = any || held->has_state;
        if (held->has_state && held->step + 1 > newest)
            newest = held->step + 1;
    }
    for (uint64_t step = newest; any; step--) {
        if (can_begin(model, begin, world, step)) {
            note_updates(fleet, begin, world);
            return;
        }
        if (step == 0)
            break;
    }
    begin->step = fleet->checkpoint ? fleet->checkpoint_step : 0;
    for (uint32_t rank = 0; rank < world; rank++)
        begin->source[rank] = fleet->checkpoint ? MU_SOURCE_CHECKPOINT : MU_SOURCE_INIT;
}

/* Neighbours, and partners of moves; ascending. */
static inline uint32_t peers_of(struct fleet *fleet, const struct mu_model_spec *model, uint32_t rank,
                                const struct mu_move *moves, uint32_t move_count, struct mu_peer *out)
{
    bool wanted[WORKERS_MAX] = {false};
    uint32_t neighbours[MU_LAYOUT_NEIGHBOURS_MAX], count = 0;
    uint32_t neighbour_count = mu_layout_neighbours(model, &fleet->layout, rank, neighbours);
    for (uint32_t i = 0; i < neighbour_count; i++)
        wanted[neighbours[i]] = true;
    for (uint32_t i = 0; i < move_count; i++)
        wanted[moves[i].from == rank ? moves[i].to : moves[i].from] = true;
    for (uint32_t other = 0; other < fleet->world; other++) {
        struct worker *peer = &fleet->workers[fleet->ranks[other]];
        if (wanted[other] && other != rank)
            out[count++] = (struct mu_peer){other, peer->incarnation, "peer", mu_engine_address(peer->engine)};
    }
    return count;
}

static inline void assign_rank(struct fleet *fleet, const struct mu_model_spec *model, const struct beginning *begin,
                               const struct mu_reshard *reshard, const uint32_t *leaf_counts, uint32_t rank)
{
    struct mu_peer peers[WORKERS_MAX];
    struct worker *worker = &fleet->workers[fleet->ranks[rank]];
    struct mu_move *moves = calloc(reshard->move_count + 1, sizeof *moves);
    struct mu_assign a = {.layout = fleet->layout,
                          .rank = rank,
                          .start_step = begin->step,
                          .leaf_counts = leaf_counts,
                          .peers = peers,
                          .source = begin->source[rank],
                          .moves = moves,
                          .roll_forward = begin->result,
                          .checkpoint = fleet->checkpoint};
    assert_non_null(moves);
    for (uint32_t i = 0; i < reshard->move_count; i++)
        if (reshard->moves[i].to == rank || (reshard->moves[i].from == rank && !(fleet->silent >> rank & 1)))
            moves[a.move_count++] = reshard->moves[i];
    a.peer_count = peers_of(fleet, model, rank, moves, a.move_count, peers);
    snprintf(a.checkpoint_dir, sizeof a.checkpoint_dir, "%s", fleet->checkpoint_dir);
    memset(a.secret, 42, sizeof a.secret);
    worker->executed = fleet->command.number;
    assert_int_equal(mu_engine_prepare(worker->engine, fleet->generation, worker->incarnation, &a), MU_OK);
    free(moves);
}

/* What the coordinator decides about a generation. */
struct decision {
    struct mu_layout layout;
    uint32_t ranks[WORKERS_MAX]; /* worker of each rank */
    struct beginning begin;
    struct mu_reshard reshard;
    uint32_t leaf_counts[WORKERS_MAX];
};

/* The wanted layout, ranks in order of workers. */
static inline void decide(struct fleet *fleet, const struct mu_model_spec *model, const uint32_t *indices,
                          uint32_t count, struct decision *out)
{
    uint32_t leaves = mu_job_leaves(&fleet->spec);
    out->layout = fleet->wanted;
    if (out->layout.dp == 0)
        out->layout = make_layout(1, 1, count < leaves ? count : leaves, 0, fleet->spec.parallel.optimizer_sharding,
                                  fleet->spec.model.layers);
    struct mu_error err;
    if (mu_layout_check(&out->layout, &fleet->spec, &err) != MU_OK)
        fail_msg("layout: %s", err.text);
    uint32_t world = mu_layout_world(&out->layout);
    assert_true(world <= count);
    memcpy(out->ranks, indices, count * sizeof *indices);
    for (uint32_t d = 0; d < out->layout.dp; d++) {
        mu_plan_leaf_range(leaves, out->layout.dp, NULL, d, &out->leaf_counts[d]);
        if (fleet->leaf_counts)
            out->leaf_counts[d] = fleet->leaf_counts[d];
    }
    choose_beginning(fleet, model, &out->begin, out->ranks, world);
    bool made = out->begin.source[0] == MU_SOURCE_INIT || out->begin.source[0] == MU_SOURCE_CHECKPOINT;
    if (!made && mu_reshard_plan(model, &out->layout, out->begin.holders, &out->reshard) != MU_OK)
        fail_msg("no source for chunk %u", out->reshard.missing_chunk);
}

/* As the planner says. */
static inline void decide_by_plan(struct fleet *fleet, const uint32_t *indices, uint32_t count, struct decision *out)
{
    struct mu_plan_member members[WORKERS_MAX];
    struct mu_plan_rank ranks[WORKERS_MAX];
    static uint32_t leaf_counts[MU_COUNTED_REPLICAS_MAX];
    for (uint32_t i = 0; i < count; i++)
        members[i] = (struct mu_plan_member){.held = held_of(&fleet->workers[indices[i]]),
                                             .old_rank = UINT32_MAX,
                                             .host = i % 2,
                                             .leaving = fleet->leaving >> indices[i] & 1};
    struct mu_plan_input input = {.spec = &fleet->spec,
                                  .members = members,
                                  .member_count = count,
                                  .checkpoint = fleet->checkpoint,
                                  .checkpoint_step = fleet->checkpoint_step,
                                  .may_initialise = fleet->checkpoint == 0,
                                  .has_old_layout = fleet->generation > 0,
                                  .old_layout = fleet->layout};
    struct mu_plan plan = {.ranks = ranks, .leaf_counts = leaf_counts};
    mu_plan_make(&input, &plan);
    if (plan.status != MU_OK)
        fail_msg("plan: %s", plan.text);
    out->layout = plan.layout;
    out->begin.step = plan.start_step;
    out->begin.result = plan.roll_forward;
    out->reshard = plan.reshard; /* freed by the caller */
    for (uint32_t rank = 0; rank < mu_layout_world(&plan.layout); rank++) {
        out->ranks[rank] = indices[ranks[rank].member];
        out->begin.source[rank] = ranks[rank].source;
        fleet->rolled_forward += ranks[rank].source == MU_SOURCE_ROLL_FORWARD;
    }
    for (uint32_t d = 0; d < plan.layout.dp; d++)
        mu_plan_leaf_range(mu_job_leaves(&fleet->spec), plan.layout.dp, plan.equal_leaves ? NULL : leaf_counts, d,
                           &out->leaf_counts[d]);
}

/* Assigns a new generation to the workers whose bits are set, lowest first, by what they hold. */
static inline void assign(struct fleet *fleet, uint32_t members)
{
    struct mu_model_spec model;
    struct decision decision = {0};
    uint32_t indices[WORKERS_MAX], count = 0;
    for (uint32_t i = 0; i < fleet->count; i++)
        if (members >> i & 1)
            indices[count++] = i;
    mu_model_spec_init(&model, &fleet->spec.model);
    if (fleet->planned)
        decide_by_plan(fleet, indices, count, &decision);
    else
        decide(fleet, &model, indices, count, &decision);
    pthread_mutex_lock(&fleet->lock);
    fleet->generation++;
    fleet->layout = decision.layout;
    fleet->world = mu_layout_world(&decision.layout);
    memcpy(fleet->ranks, decision.ranks, sizeof decision.ranks);
    fleet->moved_bytes += decision.reshard.bytes;
    pthread_mutex_unlock(&fleet->lock);
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assign_rank(fleet, &model, &decision.begin, &decision.reshard, decision.leaf_counts, rank);
    mu_reshard_fini(&decision.reshard);
}

/* Assigns, waits until all are prepared, says go. */
static inline void start(struct fleet *fleet, uint32_t members)
{
    assign(fleet, members);
    for (uint32_t rank = 0; rank < fleet->world; rank++) {
        const struct mu_worker_event *event =
            next_event(&fleet->workers[fleet->ranks[rank]], 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED);
        if (event->kind != MU_WE_PREPARED)
            fail_msg("prepare of rank %u failed: %s", rank, event->parked.text);
    }
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assert_int_equal(mu_engine_run(fleet->workers[fleet->ranks[rank]].engine, fleet->generation), MU_OK);
}

/* Waits until every rank is parked; returns the reason of the last one (all ranks have the same unless it failed). */
static inline enum mu_park_reason wait_parked(struct fleet *fleet, uint8_t ret_sha[32])
{
    enum mu_park_reason reason = MU_PARK_NONE;
    for (uint32_t rank = 0; rank < fleet->world; rank++) {
        const struct mu_worker_event *event = next_event(&fleet->workers[fleet->ranks[rank]], 1u << MU_WE_PARKED);
        if (event->parked.generation != fleet->generation)
            fail_msg("parked in generation %d", (int)event->parked.generation);
        if (rank > 0 && reason == MU_PARK_FINISHED && event->parked.reason == MU_PARK_FINISHED && ret_sha)
            assert_memory_equal(ret_sha, event->parked.weights_sha256, 32);
        if (event->parked.reason == MU_PARK_ENGINE || event->parked.reason == MU_PARK_PREPARE)
            fail_msg("rank %u: %s", rank, event->parked.text);
        if (event->parked.reason == MU_PARK_FINISHED && ret_sha)
            memcpy(ret_sha, event->parked.weights_sha256, 32);
        reason = event->parked.reason;
        fleet->unfinite_count += event->parked.weights_unfinite;
    }
    return reason;
}

/* After a trigger: waits until every rank has answered the abort, also those that had parked by themselves before. */
static inline void wait_revoked(struct fleet *fleet)
{
    for (uint32_t rank = 0; rank < fleet->world; rank++) {
        const struct mu_worker_event *event;
        do {
            event = next_event(&fleet->workers[fleet->ranks[rank]], 1u << MU_WE_PARKED);
            if (event->parked.reason == MU_PARK_ENGINE || event->parked.reason == MU_PARK_PREPARE)
                fail_msg("rank %u: %s", rank, event->parked.text);
        } while (event->parked.reason != MU_PARK_REVOKED);
        assert_int_equal(event->parked.generation, fleet->generation);
    }
}

#endif
