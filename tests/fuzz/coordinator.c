#include "tests/fuzz/coordinator.h"

#include <stdio.h>

#include "coordinator/records.h"

void fuzz_job(struct mu_job_spec *spec)
{
    mu_job_spec_init(spec);
    strcpy(spec->name, "tiny");
    spec->model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 4, .heads = 4, .channels = 64, .context = 16, .vocab = 256, .slices = 2};
    mu_model_config_resolve(&spec->model);
    strcpy(spec->data.path, "/data/text");
    spec->batch.sequences = 8, spec->batch.micro = 1, spec->batch.length = 16;
    spec->steps = 12;
    strcpy(spec->checkpoint.path, "/ckpt");
    spec->checkpoint.every = 5;
    spec->eval.every = 4, spec->eval.sequences = 2;
    spec->data.holdout = 0.1;
    spec->workers.min = 1, spec->workers.max = 8;
    struct mu_error err = {0};
    enum mu_status status = mu_job_spec_check(spec, &err);
    MU_ASSERT(status == MU_OK);
}

struct mu_coord_config fuzz_coordinator_config(void)
{
    struct mu_coord_config config;
    mu_coord_config_init(&config);
    config.max_jobs = 2;
    config.max_workers = config.max_members = 8;
    config.settle_ms = 0;
    return config;
}

/* ---- what the core emits ---- */

static void judge_record(struct fuzz_coordinator *coordinator, const struct mu_record *record, bool is_deleted)
{
    uint8_t key[MU_RECORD_KEY_SIZE];
    size_t key_bytes = mu_record_key(record, key), value_bytes = 0;
    const void *value = "";
    struct mu_error err = {0};
    struct mu_record again;
    struct mu_store_batch batch;
    mu_store_batch_init(&batch);
    enum mu_status status = MU_OK;
    if (is_deleted) {
        status = mu_store_batch_delete(&batch, key, key_bytes);
    } else {
        status = mu_record_encode(&coordinator->arena, record, &value, &value_bytes, &err);
        MU_ASSERT(status == MU_OK);
        status = mu_record_decode(&coordinator->arena, key, key_bytes, value, value_bytes, &again, &err);
        MU_ASSERT(status == MU_OK);
        status = mu_store_batch_put(&batch, key, key_bytes, value, value_bytes);
    }
    MU_ASSERT(status == MU_OK);
    status = mu_store_write(coordinator->store, &batch, &err);
    MU_ASSERT(status == MU_OK);
    mu_store_batch_fini(&batch);
}

static void judge_message(struct fuzz_coordinator *coordinator, const struct mu_coord_message *message)
{
    const void *data;
    size_t size_bytes;
    struct mu_error err = {0};
    struct mu_coord_message again;
    enum mu_status status = mu_wire_encode_coord(&coordinator->arena, message, &data, &size_bytes, &err);
    MU_ASSERT(status == MU_OK);
    status = mu_wire_decode_coord(&coordinator->arena, data, size_bytes, &again, &err);
    MU_ASSERT(status == MU_OK);
}

static void make_plan(struct fuzz_coordinator *coordinator, const struct mu_coord_action *action)
{
    for (unsigned i = 0; i < FUZZ_PLANS_MAX; i++) {
        struct fuzz_plan *made = &coordinator->plans[i];
        if (made->is_made)
            continue;
        uint32_t members = action->plan.input->member_count;
        *made = (struct fuzz_plan){.ticket = action->plan.ticket, .is_made = true};
        made->plan.ranks = calloc(members ? members : 1, sizeof *made->plan.ranks);
        made->plan.leaf_counts = calloc(MU_COUNTED_REPLICAS_MAX, sizeof *made->plan.leaf_counts);
        MU_ASSERT(made->plan.ranks && made->plan.leaf_counts);
        mu_plan_make(action->plan.input, &made->plan);
        return;
    }
}

static void free_plan(struct fuzz_plan *made)
{
    mu_plan_fini(&made->plan);
    free(made->plan.ranks);
    free(made->plan.leaf_counts);
    made->is_made = false;
}

static void answer_io(struct fuzz_coordinator *coordinator, const struct mu_coord_action *action)
{
    if (coordinator->answer_count == FUZZ_ANSWERS_MAX)
        return; /* a disk that never answers */
    const struct mu_checkpoint_record *checkpoint = action->checkpoint_io.checkpoint;
    struct mu_coord_event *event = &coordinator->answers[coordinator->answer_count++];
    *event = (struct mu_coord_event){.kind = action->kind == MU_CA_PUBLISH  ? MU_CE_PUBLISHED
                                             : action->kind == MU_CA_DELETE ? MU_CE_DELETED
                                                                            : MU_CE_SCRUBBED};
    snprintf(event->checkpoint_io.job, sizeof event->checkpoint_io.job, "%s", checkpoint->job);
    event->checkpoint_io.checkpoint = checkpoint->number;
    event->checkpoint_io.step = checkpoint->step;
    event->checkpoint_io.size_bytes = 1000;
    if (action->kind == MU_CA_PUBLISH && action->checkpoint_io.probe) {
        event->checkpoint_io.status = MU_ERR_NOT_FOUND;
        event->checkpoint_io.text = "there is no manifest";
    }
}

static void on_action(void *ctx, const struct mu_coord_action *action)
{
    struct fuzz_coordinator *coordinator = ctx;
    mu_wire_arena_reset(&coordinator->arena);
    switch (action->kind) {
    case MU_CA_SEND:
        judge_message(coordinator, action->send.message);
        break;
    case MU_CA_PERSIST:
    case MU_CA_FORGET:
        judge_record(coordinator, &action->record, action->kind == MU_CA_FORGET);
        break;
    case MU_CA_PLAN:
        make_plan(coordinator, action);
        break;
    case MU_CA_PUBLISH:
    case MU_CA_DELETE:
    case MU_CA_SCRUB:
        answer_io(coordinator, action);
        break;
    case MU_CA_CLOSE:
    case MU_CA_EVENT:
    case MU_CA_REPLY:
    case MU_CA_EXAMINE:
        break;
    }
    if (coordinator->also)
        coordinator->also(coordinator->also_ctx, action);
}

/* ---- stepping ---- */

static void step_once(struct fuzz_coordinator *coordinator, struct mu_coord_event *event)
{
    coordinator->now_us += 100;
    event->now_us = coordinator->now_us;
    event->wall_us = 1700000000000000 + coordinator->now_us;
    event->random = (struct mu_id){.high = 7, .low = ++coordinator->random};
    mu_coord_step(coordinator->core, event, &coordinator->sink);
}

/* A step may order more: a few rounds, then the rest waits for the next step. */
static void give_answers(struct fuzz_coordinator *coordinator)
{
    static const uint8_t secret[32] = {1, 2, 3};
    for (unsigned round = 0; round < 4; round++) {
        for (unsigned i = 0; i < FUZZ_PLANS_MAX; i++) {
            struct fuzz_plan made = coordinator->plans[i];
            if (!made.is_made)
                continue;
            coordinator->plans[i].is_made = false;
            struct mu_coord_event event = {.kind = MU_CE_PLANNED};
            event.planned.ticket = made.ticket;
            event.planned.plan = &made.plan;
            event.planned.secret = secret;
            step_once(coordinator, &event);
            free_plan(&made);
        }
        struct mu_coord_event answers[FUZZ_ANSWERS_MAX];
        unsigned count = coordinator->answer_count;
        memcpy(answers, coordinator->answers, count * sizeof *answers);
        coordinator->answer_count = 0;
        for (unsigned i = 0; i < count; i++)
            step_once(coordinator, &answers[i]);
    }
}

void fuzz_coordinator_step(struct fuzz_coordinator *coordinator, struct mu_coord_event *event)
{
    step_once(coordinator, event);
    give_answers(coordinator);
}

void fuzz_coordinator_pass(struct fuzz_coordinator *coordinator, uint64_t us)
{
    coordinator->now_us += us;
    fuzz_coordinator_step(coordinator, &(struct mu_coord_event){.kind = MU_CE_TICK});
}

void fuzz_coordinator_submit(struct fuzz_coordinator *coordinator, const char *job)
{
    static struct mu_job_spec spec;
    fuzz_job(&spec);
    snprintf(spec.name, sizeof spec.name, "%s", job);
    bool probed = strcmp(job, "probed") == 0;
    spec.workers.min = probed ? 2 : 1; /* a pair */
    struct mu_coord_event event = {.kind = MU_CE_SUBMIT};
    event.submit.cookie = 1;
    event.submit.spec = &spec;
    event.submit.preflight = probed;
    fuzz_coordinator_step(coordinator, &event);
}

static enum mu_status restore_one(void *arg, const struct mu_record *record, struct mu_error *err)
{
    return mu_coord_restore(arg, record, err);
}

bool fuzz_coordinator_init(struct fuzz_coordinator *coordinator, struct mu_store *store, struct mu_error *err)
{
    struct mu_coord_config config = fuzz_coordinator_config();
    *coordinator =
        (struct fuzz_coordinator){.core = mu_coord_new(&config), .store = store, .now_us = 1000000, .random = 100};
    coordinator->sink = (struct mu_coord_sink){.emit = on_action, .ctx = coordinator};
    mu_wire_arena_init(&coordinator->arena);
    MU_ASSERT(coordinator->core && store);
    enum mu_status status = mu_records_load(store, restore_one, coordinator->core, err);
    fuzz_judge(status, err);
    if (status != MU_OK)
        return false;
    mu_coord_start(coordinator->core, coordinator->now_us, 1700000000000000, &coordinator->sink);
    give_answers(coordinator);
    return true;
}

void fuzz_coordinator_fini(struct fuzz_coordinator *coordinator)
{
    for (unsigned i = 0; i < FUZZ_PLANS_MAX; i++)
        if (coordinator->plans[i].is_made)
            free_plan(&coordinator->plans[i]);
    mu_coord_free(coordinator->core);
    mu_store_free(coordinator->store);
    mu_wire_arena_fini(&coordinator->arena);
}

void fuzz_coordinator_check_restart(struct fuzz_coordinator *coordinator)
{
    struct fuzz_coordinator next;
    struct mu_error err = {0};
    bool is_restored = fuzz_coordinator_init(&next, coordinator->store, &err);
    if (!is_restored)
        fprintf(stderr, "what was stored cannot be restored: %s\n", err.text);
    MU_ASSERT(is_restored);
    next.store = NULL; /* the former one's */
    fuzz_coordinator_fini(&next);
}
