/* Both cores together in one box: a real coordinator core with real worker cores, engines that answer at once, a store
 * in memory, messages that pass through the wire format. Time stands still unless a test moves it. */
#ifndef TESTS_CORE_TESTING_H
#define TESTS_CORE_TESTING_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/core/core.h"
#include "coordinator/records.h"
#include "proto/wire.h"
#include "worker/core/core.h"

enum { BOX_WORKERS_MAX = 16, BOX_ASSIGNS_MAX = 4096, BOX_TEXT_SIZE = 1 << 16 };

struct box_worker {
    struct mu_worker *core; /* NULL: not there */
    struct mu_id incarnation;
    uint64_t session; /* 0: no stream */
    bool cut;         /* new streams fail */
    /* the engine */
    struct mu_held held;
    struct mu_layout layout; /* of `generation` */
    uint64_t generation, start_step;
    uint32_t rank, leaves, moves_in, moves_out;
    enum mu_state_source source;
    bool prepared, running;
    bool hold_prepared;            /* does not answer PREPARE before it is told to */
    bool slow_to_park, is_parking; /* a revoked generation ends when the test says so */
    bool has_no_room;              /* cannot prepare any generation, for a reason of its own */
    bool hold_pieces;              /* nor snapshots */
    bool hangs;                    /* makes no progress, waits for nobody */
    uint32_t layer_us;             /* computes so long on a leaf in each of its layers; 0: 100 us in all */
    uint32_t leaf_us;              /* or so long on each of its leaves */
    struct mu_feed_order feed;     /* told to take */
    struct mu_probe_order probe;   /* told to measure last; kind 0: nothing, or to give up */
    uint32_t probes, probes_ended;
    bool hold_probes; /* does not answer */
    struct mu_snapshot taken;
    uint64_t taken_step;
    int exit_code; /* -1: has not left */
};

enum box_kind { BOX_TO_COORD, BOX_TO_WORKER, BOX_CONNECT, BOX_DISCONNECT, BOX_PLANNED, BOX_IO, BOX_ENGINE };

struct box_item {
    struct box_item *next;
    enum box_kind kind;
    uint32_t worker;
    uint64_t session, life; /* life: of the coordinator */
    uint8_t *bytes;
    size_t size_bytes;
    struct mu_plan *plan;
    uint64_t ticket;
    struct mu_coord_event io;
    struct mu_worker_event engine;
};

/* One Assign as it went out, to compare it with what goes out again. */
struct box_assign {
    uint64_t generation, hash;
    uint32_t rank;
};

struct box {
    bool feeds_work; /* takers answer only when the test says so */
    uint32_t feeds_given;
    double (*pair_rate)(uint32_t a, uint32_t b); /* what a pair measures; NULL: 1 GB/s */
    uint32_t leaves;                             /* of the job */
    uint64_t memory_bytes;                       /* of each worker added from now on; 0: it does not say */
    uint32_t nccl_version;                       /* likewise */
    const char *gpu;                             /* likewise; NULL: none */
    bool computes_bf16;                          /* likewise */
    uint32_t hosts; /* likewise: worker i is on host i modulo so many; 0: each has its own */
    struct mu_coord_config config;
    struct mu_coord *coord; /* NULL: not running */
    uint64_t life, now_us, next_session, next_id;
    struct mu_store *store;
    struct mu_wire_arena arena, out;
    struct box_worker workers[BOX_WORKERS_MAX];
    struct box_item *first, **last;
    uint32_t handled;
    struct box_assign assigns[BOX_ASSIGNS_MAX];
    uint32_t assign_count, assign_repeats;
    struct mu_reject_seen {
        enum mu_reject_reason reason;
        char text[MU_TEXT_SIZE];
        bool seen;
    } reject;
    uint64_t published; /* newest checkpoint whose manifest is on disk */
    uint64_t published_step;
    uint32_t deletes;
    enum mu_status publish_result, scrub_result;
    uint32_t scrubs;
    uint32_t step_us, copy_us; /* of each step, and of a copy for a checkpoint; 0: one millisecond, none */
    bool unfinite;             /* what a step says of itself */
    bool weights_unfinite;     /* what all ranks say at the end */
    bool fail_prepare;         /* everybody who is to start from a checkpoint, for a reason of his own */
    bool hold_scrubs;          /* re-reading takes for ever */
    char scrub_order[64];      /* numbers, "1 2 3 " */
    bool too_many_moves;       /* plans that move state move it in more pieces than an Assign can name */
    enum mu_status reply;
    enum mu_reason reply_reason;
    uint64_t reply_value;
    uint64_t reply_checkpoint;
    struct mu_coord_reply whole_reply; /* its text is in reply_text */
    char reply_text[MU_EVENT_TEXT_SIZE];
    char events[BOX_TEXT_SIZE]; /* "kind: text" lines */
    char name[MU_JOB_NAME_SIZE];
};

static void box_step(struct box *box, struct mu_coord_event *event);
static void box_engine(struct box *box, uint32_t index, struct mu_worker_event *event);

/* ---- the queue ---- */

static struct box_item *box_put(struct box *box, enum box_kind kind, uint32_t worker)
{
    struct box_item *item = calloc(1, sizeof *item);
    assert_non_null(item);
    item->kind = kind;
    item->worker = worker;
    item->life = box->life;
    *box->last = item;
    box->last = &item->next;
    return item;
}

static void box_put_bytes(struct box_item *item, const void *data, size_t size_bytes)
{
    item->bytes = malloc(size_bytes ? size_bytes : 1);
    assert_non_null(item->bytes);
    memcpy(item->bytes, data, size_bytes);
    item->size_bytes = size_bytes;
}

static void box_free_item(struct box_item *item)
{
    if (item->plan) {
        mu_plan_fini(item->plan);
        free(item->plan->ranks);
        free(item->plan->leaf_counts);
        free(item->plan);
    }
    free(item->bytes);
    free(item);
}

/* ---- the coordinator's actions ---- */

static struct box_worker *box_by_session(struct box *box, uint64_t session)
{
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        if (box->workers[i].core && box->workers[i].session == session)
            return &box->workers[i];
    }
    return NULL;
}

/* The same generation and rank must always be told the same. */
static void box_note_assign(struct box *box, uint64_t generation, uint32_t rank, const void *data, size_t size_bytes)
{
    uint64_t hash = mu_xxh3_64(data, size_bytes, 0);
    for (uint32_t i = 0; i < box->assign_count; i++) {
        struct box_assign *assign = &box->assigns[i];
        if (assign->generation == generation && assign->rank == rank) {
            assert_true(assign->hash == hash);
            box->assign_repeats++;
            return;
        }
    }
    assert_true(box->assign_count < BOX_ASSIGNS_MAX);
    box->assigns[box->assign_count++] = (struct box_assign){.generation = generation, .rank = rank, .hash = hash};
}

static void box_send(struct box *box, const struct mu_coord_action *action)
{
    const void *data = NULL;
    size_t size_bytes = 0;
    struct mu_error err;
    const struct mu_coord_message *message = action->send.message;
    if (message->kind == MU_CM_REJECT) {
        box->reject = (struct mu_reject_seen){.reason = message->reject.reason, .seen = true};
        memcpy(box->reject.text, message->reject.text, sizeof box->reject.text);
    }
    if (mu_wire_encode_coord(&box->out, message, &data, &size_bytes, &err) != MU_OK)
        fail_msg("%s", err.text);
    if (message->kind == MU_CM_ASSIGN)
        box_note_assign(box, message->generation, message->assign.rank, data, size_bytes);
    struct box_worker *worker = box_by_session(box, action->send.session);
    if (worker) {
        struct box_item *item = box_put(box, BOX_TO_WORKER, (uint32_t)(worker - box->workers));
        box_put_bytes(item, data, size_bytes);
        item->session = action->send.session;
    }
    mu_wire_arena_reset(&box->out);
}

static void box_persist(struct box *box, const struct mu_record *record, bool forget)
{
    struct mu_store_batch batch;
    uint8_t key[MU_RECORD_KEY_SIZE];
    const void *data = NULL;
    size_t size_bytes = 0, key_bytes = mu_record_key(record, key);
    struct mu_error err;
    mu_store_batch_init(&batch);
    if (forget)
        assert_int_equal(mu_store_batch_delete(&batch, key, key_bytes), MU_OK);
    else if (mu_record_encode(&box->out, record, &data, &size_bytes, &err) != MU_OK)
        fail_msg("%s", err.text);
    else
        assert_int_equal(mu_store_batch_put(&batch, key, key_bytes, data, size_bytes), MU_OK);
    assert_int_equal(mu_store_write(box->store, &batch, &err), MU_OK);
    mu_store_batch_fini(&batch);
    mu_wire_arena_reset(&box->out);
}

static void box_plan(struct box *box, const struct mu_coord_action *action)
{
    struct box_item *item = box_put(box, BOX_PLANNED, 0);
    item->ticket = action->plan.ticket;
    item->plan = calloc(1, sizeof *item->plan);
    item->plan->ranks = calloc(action->plan.input->member_count + 1, sizeof *item->plan->ranks);
    item->plan->leaf_counts = calloc(MU_COUNTED_REPLICAS_MAX, sizeof *item->plan->leaf_counts);
    mu_plan_make(action->plan.input, item->plan);
    struct mu_reshard *reshard = &item->plan->reshard;
    if (!box->too_many_moves || reshard->move_count == 0)
        return;
    struct mu_move move = reshard->moves[0];
    free(reshard->moves);
    reshard->move_count = MU_MOVES_MAX + 1;
    reshard->moves = calloc(reshard->move_count, sizeof move);
    for (uint32_t i = 0; i < reshard->move_count; i++)
        reshard->moves[i] = move;
}

static void box_io(struct box *box, const struct mu_coord_action *action)
{
    const struct mu_checkpoint_record *record = action->checkpoint_io.checkpoint;
    struct box_item *item = box_put(box, BOX_IO, 0);
    bool is_delete = action->kind == MU_CA_DELETE;
    item->io.kind = is_delete ? MU_CE_DELETED : MU_CE_PUBLISHED;
    memcpy(item->io.checkpoint_io.job, record->job, sizeof item->io.checkpoint_io.job);
    item->io.checkpoint_io.checkpoint = record->number;
    box->deletes += is_delete;
    if (is_delete)
        return;
    if (action->checkpoint_io.probe) {
        bool there = box->published == record->number;
        item->io.checkpoint_io.status = there ? MU_OK : MU_ERR_NOT_FOUND;
        item->io.checkpoint_io.step = box->published_step;
        return;
    }
    assert_int_equal(record->piece_count, mu_layout_working(&record->layout));
    item->io.checkpoint_io.status = box->publish_result;
    item->io.checkpoint_io.step = record->step;
    item->io.checkpoint_io.size_bytes = 1000;
    if (box->publish_result == MU_OK) {
        box->published = record->number;
        box->published_step = record->step;
    }
}

static void box_scrub(struct box *box, const struct mu_coord_action *action)
{
    const struct mu_checkpoint_record *record = action->checkpoint_io.checkpoint;
    assert_int_equal(record->state, MU_CKPT_COMMITTED);
    box->scrubs++;
    size_t length = strlen(box->scrub_order);
    snprintf(box->scrub_order + length, sizeof box->scrub_order - length, "%u ", (unsigned)record->number);
    if (box->hold_scrubs)
        return;
    struct box_item *item = box_put(box, BOX_IO, 0);
    item->io.kind = MU_CE_SCRUBBED;
    memcpy(item->io.checkpoint_io.job, record->job, sizeof item->io.checkpoint_io.job);
    item->io.checkpoint_io.checkpoint = record->number;
    item->io.checkpoint_io.status = box->scrub_result;
    item->io.checkpoint_io.text = "piece 0 has another checksum";
}

static void box_on_action(void *ctx, const struct mu_coord_action *action)
{
    struct box *box = ctx;
    switch (action->kind) {
    case MU_CA_SEND:
        box_send(box, action);
        break;
    case MU_CA_CLOSE: {
        struct box_worker *worker = box_by_session(box, action->close.session);
        if (worker)
            box_put(box, BOX_DISCONNECT, (uint32_t)(worker - box->workers))->session = action->close.session;
        break;
    }
    case MU_CA_PERSIST:
        box_persist(box, &action->record, false);
        break;
    case MU_CA_FORGET:
        box_persist(box, &action->record, true);
        break;
    case MU_CA_PLAN:
        box_plan(box, action);
        break;
    case MU_CA_PUBLISH:
    case MU_CA_DELETE:
        box_io(box, action);
        break;
    case MU_CA_SCRUB:
        box_scrub(box, action);
        break;
    case MU_CA_EVENT: {
        size_t length = strlen(box->events);
        snprintf(box->events + length, sizeof box->events - length, "%s: %s\n", action->event->kind,
                 action->event->text);
        break;
    }
    case MU_CA_EXAMINE:
        break;
    case MU_CA_REPLY:
        box->reply = action->reply.status;
        box->reply_reason = action->reply.reason;
        box->reply_value = action->reply.reason_value;
        box->reply_checkpoint = action->reply.checkpoint;
        box->whole_reply = action->reply;
        snprintf(box->reply_text, sizeof box->reply_text, "%s", action->reply.text ? action->reply.text : "");
        break;
    }
}

static struct mu_id box_id(struct box *box)
{
    return (struct mu_id){.high = 0x1234, .low = ++box->next_id};
}

static void box_step(struct box *box, struct mu_coord_event *event)
{
    const struct mu_coord_sink sink = {.emit = box_on_action, .ctx = box};
    if (!box->coord)
        return;
    event->now_us = box->now_us;
    event->wall_us = 1000 + box->now_us;
    event->random = box_id(box);
    mu_coord_step(box->coord, event, &sink);
}

static enum mu_status box_restore(void *arg, const struct mu_record *record, struct mu_error *err)
{
    struct box *box = arg;
    return mu_coord_restore(box->coord, record, err);
}

static void box_start_coord(struct box *box)
{
    const struct mu_coord_sink sink = {.emit = box_on_action, .ctx = box};
    struct mu_error err;
    box->life++;
    box->coord = mu_coord_new(&box->config);
    assert_non_null(box->coord);
    if (mu_records_load(box->store, box_restore, box, &err) != MU_OK)
        fail_msg("%s", err.text);
    mu_coord_start(box->coord, box->now_us, 1000 + box->now_us, &sink);
}

/* As kill -9: what was persisted is there, nothing else; every stream breaks. */
static inline void box_kill_coord(struct box *box)
{
    mu_coord_free(box->coord);
    box->coord = NULL;
    box->life++;
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        if (box->workers[i].core && box->workers[i].session)
            box_put(box, BOX_DISCONNECT, i)->session = box->workers[i].session;
    }
}

/* ---- the workers ---- */

static void box_engine_later(struct box *box, uint32_t index, const struct mu_worker_event *event)
{
    box_put(box, BOX_ENGINE, index)->engine = *event;
}

static struct mu_worker_event box_parked(const struct box_worker *worker, enum mu_park_reason reason)
{
    return (struct mu_worker_event){
        .kind = MU_WE_PARKED, .parked = {.generation = worker->generation, .held = worker->held, .reason = reason}};
}

/* What PREPARE comes to: the old share stays where it is of the same step, the new one comes beside it. */
static void box_prepared(struct box *box, uint32_t index)
{
    struct box_worker *worker = &box->workers[index];
    bool idle = mu_layout_is_idle(&worker->layout, worker->rank);
    struct mu_held_share own = {.layout = worker->layout, .rank = worker->rank}, old = worker->held.shares[0];
    bool keeps =
        worker->held.has_state && (worker->source == MU_SOURCE_HELD || worker->source == MU_SOURCE_ROLL_FORWARD);
    if (worker->source == MU_SOURCE_ROLL_FORWARD && old.layout.sharded)
        old.owned_only = true;
    struct mu_held held = {.step = worker->start_step};
    if (keeps)
        held.shares[held.share_count++] = old;
    if (!idle)
        held.shares[held.share_count++] = own;
    held.has_state = held.share_count > 0;
    worker->held = held;
    worker->prepared = true;
    struct mu_worker_event event = box_parked(worker, MU_PARK_NONE);
    event.kind = MU_WE_PREPARED;
    box_engine_later(box, index, &event);
}

static void box_run_generation(struct box_worker *worker)
{
    bool idle = mu_layout_is_idle(&worker->layout, worker->rank);
    worker->running = true;
    worker->held = (struct mu_held){.step = worker->start_step, .has_state = !idle, .share_count = !idle};
    if (!idle)
        worker->held.shares[0] = (struct mu_held_share){.layout = worker->layout, .rank = worker->rank};
}

static void box_piece(struct box *box, uint32_t index)
{
    struct box_worker *worker = &box->workers[index];
    struct mu_worker_event event = {.kind = MU_WE_PIECE};
    event.piece = (struct mu_piece_report){.checkpoint = worker->taken.checkpoint,
                                           .piece = worker->taken.piece,
                                           .step = worker->taken_step,
                                           .size_bytes = 10};
    snprintf(event.piece.file, sizeof event.piece.file, "piece-%u", worker->taken.piece);
    box_engine_later(box, index, &event);
}

static void box_take(struct box *box, uint32_t index, const struct mu_snapshot *snapshot)
{
    struct box_worker *worker = &box->workers[index];
    worker->taken = *snapshot;
    worker->taken_step = worker->held.step;
    if (!worker->hold_pieces)
        box_piece(box, index);
}

static void box_prepare(struct box *box, uint32_t index, const struct mu_worker_action *action)
{
    struct box_worker *worker = &box->workers[index];
    const struct mu_assign *assign = action->generation.assign;
    worker->generation = action->generation.generation;
    worker->layout = assign->layout;
    worker->rank = assign->rank;
    worker->start_step = assign->start_step;
    worker->source = assign->source;
    worker->leaves = 0;
    if (!mu_layout_is_idle(&assign->layout, assign->rank))
        mu_plan_leaf_range(box->leaves, assign->layout.dp, assign->leaf_counts,
                           mu_layout_coords(&assign->layout, assign->rank).d, &worker->leaves);
    worker->prepared = worker->running = false;
    worker->moves_in = worker->moves_out = 0;
    for (uint32_t i = 0; i < assign->move_count; i++) {
        worker->moves_in += assign->moves[i].to == assign->rank;
        worker->moves_out += assign->moves[i].from == assign->rank;
    }
    if (worker->has_no_room || (box->fail_prepare && assign->source == MU_SOURCE_CHECKPOINT)) {
        struct mu_worker_event parked = box_parked(worker, MU_PARK_PREPARE);
        strcpy(parked.parked.text, "the accelerator has no room");
        box_engine_later(box, index, &parked);
    } else if (!worker->hold_prepared) {
        box_prepared(box, index);
    }
}

struct box_turn {
    struct box *box;
    uint32_t index;
};

static void box_fed(struct box *box, uint32_t index, enum mu_feed_state state)
{
    const struct box_worker *worker = &box->workers[index];
    struct mu_worker_event event = {.kind = MU_WE_FED,
                                    .fed = {.number = worker->feed.number, .state = state, .held = worker->held}};
    box_engine_later(box, index, &event);
}

/* Fails at once, unless the test lets it go on. */
static void box_feed(struct box *box, uint32_t index, const struct mu_feed_order *order)
{
    if (order->role == MU_FEED_GIVE) {
        box->feeds_given++;
        return;
    }
    box->workers[index].feed = *order;
    if (!box->feeds_work)
        box_fed(box, index, MU_FEED_FAILED);
}

/* Who leads tells what it gets from the other one, by whose address it knows it. */
static void box_probe(struct box *box, uint32_t index, const struct mu_probe_order *order)
{
    struct box_worker *worker = &box->workers[index];
    struct mu_worker_event event = {.kind = MU_WE_PROBED, .probed = {.number = order->number, .kind = order->kind}};
    unsigned other = 0;
    worker->probe = *order;
    worker->probes += order->kind != 0;
    worker->probes_ended += order->kind == 0;
    if (order->kind == MU_PROBE_PAIR)
        assert_int_equal(sscanf(order->peers[0].address, "10.0.0.%u:4000", &other), 1);
    double rate = box->pair_rate ? box->pair_rate(index, other) : 1e9;
    event.probed.alone.flops[0] = event.probed.alone.memory_rate = event.probed.write_rate = 1e9;
    event.probed.pair = (struct mu_probe_pair){1e-5, rate, 1e9};
    if (order->kind != 0 && !worker->hold_probes)
        box_engine_later(box, index, &event);
}

static void box_worker_action(void *ctx, const struct mu_worker_action *action)
{
    const struct box_turn *turn = ctx;
    struct box *box = turn->box;
    struct box_worker *worker = &box->workers[turn->index];
    const void *data = NULL;
    size_t size_bytes = 0;
    struct mu_error err;
    struct mu_worker_event event = {0};
    switch (action->kind) {
    case MU_WA_CONNECT:
        box_put(box, BOX_CONNECT, turn->index);
        break;
    case MU_WA_DISCONNECT:
        if (worker->session)
            box_put(box, BOX_DISCONNECT, turn->index)->session = worker->session;
        break;
    case MU_WA_SEND: {
        if (mu_wire_encode_worker(&box->out, action->message, &data, &size_bytes, &err) != MU_OK)
            fail_msg("%s", err.text);
        struct box_item *item = box_put(box, BOX_TO_COORD, turn->index);
        box_put_bytes(item, data, size_bytes);
        item->session = worker->session;
        mu_wire_arena_reset(&box->out);
        break;
    }
    case MU_WA_LOAD_JOB:
        event.kind = MU_WE_JOB_LOADED;
        event.job_loaded.numeric_identity = (struct mu_hash128){.high = 1, .low = 2};
        event.job_loaded.data_hash = (struct mu_hash128){.high = 3, .low = 4};
        event.job_loaded.identity_parts.count = 1;
        strcpy(event.job_loaded.identity_parts.parts[0].name, "gemm");
        event.job_loaded.identity_parts.parts[0].hash = 77;
        box_engine_later(box, turn->index, &event);
        break;
    case MU_WA_PREPARE:
        box_prepare(box, turn->index, action);
        break;
    case MU_WA_RUN:
        box_run_generation(worker);
        break;
    case MU_WA_ABORT:
        worker->running = worker->prepared = false;
        worker->is_parking = worker->slow_to_park;
        event = box_parked(worker, MU_PARK_REVOKED);
        if (!worker->is_parking)
            box_engine_later(box, turn->index, &event);
        break;
    case MU_WA_SNAPSHOT:
        box_take(box, turn->index, &action->snapshot.snapshot);
        break;
    case MU_WA_PROBE:
        box_probe(box, turn->index, action->probe);
        break;
    case MU_WA_FEED:
        box_feed(box, turn->index, action->feed.order);
        break;
    case MU_WA_FORGET:
        worker->held = (struct mu_held){0};
        worker->running = worker->prepared = false;
        break;
    case MU_WA_EXIT:
        worker->exit_code = action->exit.code;
        break;
    case MU_WA_KEEP: /* no checkpoint here is of kind local */
        break;
    }
}

static void box_engine(struct box *box, uint32_t index, struct mu_worker_event *event)
{
    struct box_turn turn = {.box = box, .index = index};
    const struct mu_worker_sink sink = {.emit = box_worker_action, .ctx = &turn};
    if (!box->workers[index].core)
        return;
    event->now_us = box->now_us;
    event->random = box_id(box);
    mu_worker_step(box->workers[index].core, event, &sink);
}

static void box_add_worker(struct box *box, uint32_t index)
{
    struct box_worker *worker = &box->workers[index];
    struct mu_worker_config config;
    mu_worker_config_init(&config);
    snprintf(config.hello.job, sizeof config.hello.job, "%s", box->name);
    snprintf(config.hello.name, sizeof config.hello.name, "w%u", index);
    snprintf(config.hello.host, sizeof config.hello.host, "host%u", box->hosts ? index % box->hosts : index);
    snprintf(config.hello.address, sizeof config.hello.address, "10.0.0.%u:4000", index);
    strcpy(config.hello.backend, "cpu");
    config.hello.memory_bytes = box->memory_bytes;
    config.hello.nccl_version = box->nccl_version;
    config.hello.computes_bf16 = box->computes_bf16;
    snprintf(config.hello.gpu, sizeof config.hello.gpu, "%s", box->gpu ? box->gpu : "");
    config.incarnation = box_id(box);
    mu_worker_free(worker->core); /* of a process before it */
    *worker = (struct box_worker){.exit_code = -1, .incarnation = config.incarnation};
    worker->core = mu_worker_new(&config);
    box_engine(box, index, &(struct mu_worker_event){.kind = MU_WE_START});
}

/* kill -9 of the process. */
static inline void box_kill_worker(struct box *box, uint32_t index)
{
    struct box_worker *worker = &box->workers[index];
    uint64_t session = worker->session;
    mu_worker_free(worker->core);
    *worker = (struct box_worker){.exit_code = -1};
    if (session)
        box_step(box, &(struct mu_coord_event){.kind = MU_CE_DISCONNECTED,
                                               .disconnected = {.session = session, .reason = "stream reset"}});
}

/* ---- running ---- */

static void box_deliver(struct box *box, struct box_item *item)
{
    struct box_worker *worker = &box->workers[item->worker];
    struct mu_error err;
    if (item->kind == BOX_TO_COORD) {
        struct mu_worker_message message;
        if (!box->coord || item->life != box->life || item->session == 0)
            return;
        if (mu_wire_decode_worker(&box->arena, item->bytes, item->size_bytes, &message, &err) != MU_OK)
            fail_msg("%s", err.text);
        box_step(box, &(struct mu_coord_event){.kind = MU_CE_MESSAGE,
                                               .message = {.session = item->session, .message = &message}});
    } else if (item->kind == BOX_TO_WORKER) {
        struct mu_coord_message message;
        if (!worker->core || worker->session != item->session || item->life != box->life)
            return;
        if (mu_wire_decode_coord(&box->arena, item->bytes, item->size_bytes, &message, &err) != MU_OK)
            fail_msg("%s", err.text);
        box_engine(box, item->worker, &(struct mu_worker_event){.kind = MU_WE_MESSAGE, .message = &message});
    } else if (item->kind == BOX_CONNECT) {
        if (!worker->core)
            return;
        if (!box->coord || worker->cut) {
            box_engine(box, item->worker, &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "refused"});
            return;
        }
        worker->session = ++box->next_session;
        box_engine(box, item->worker, &(struct mu_worker_event){.kind = MU_WE_CONNECTED});
    } else if (item->kind == BOX_DISCONNECT) {
        if (!worker->core || worker->session != item->session)
            return;
        worker->session = 0;
        box_step(box, &(struct mu_coord_event){.kind = MU_CE_DISCONNECTED,
                                               .disconnected = {.session = item->session, .reason = "stream reset"}});
        box_engine(box, item->worker, &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "reset"});
    } else if (item->kind == BOX_ENGINE) {
        box_engine(box, item->worker, &item->engine);
    } else if (item->life == box->life && item->kind == BOX_IO) {
        box_step(box, &item->io);
    } else if (item->life == box->life) {
        static const uint8_t secret[32] = {9};
        box_step(box,
                 &(struct mu_coord_event){.kind = MU_CE_PLANNED,
                                          .planned = {.ticket = item->ticket, .plan = item->plan, .secret = secret}});
    }
}

static bool box_handle_one(struct box *box)
{
    struct box_item *item = box->first;
    if (!item)
        return false;
    box->first = item->next;
    if (!box->first)
        box->last = &box->first;
    box_deliver(box, item);
    box_free_item(item);
    mu_wire_arena_reset(&box->arena);
    box->handled++;
    return true;
}

/* Until nobody has anything to say at this instant. */
static void box_settle(struct box *box)
{
    uint32_t limit = box->handled + 100000;
    do {
        while (box_handle_one(box))
            assert_true(box->handled < limit);
        if (box->coord && mu_coord_next_deadline(box->coord) <= box->now_us)
            box_step(box, &(struct mu_coord_event){.kind = MU_CE_TICK});
    } while (box->first);
}

static void box_advance(struct box *box, uint32_t ms)
{
    for (uint32_t done = 0; done < ms; done += 10) {
        box->now_us += 10000;
        for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
            if (!box->workers[i].core || mu_worker_next_deadline(box->workers[i].core) > box->now_us)
                continue;
            struct mu_worker_event progress = {.kind = MU_WE_PROGRESS};
            progress.progress.waiting = !box->workers[i].hangs;
            box_engine(box, i, &progress);
            box_engine(box, i, &(struct mu_worker_event){.kind = MU_WE_TICK});
        }
        box_settle(box);
    }
}

static bool box_all_run(struct box *box)
{
    uint32_t running = 0, world = 0;
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        if (!box->workers[i].core || !box->workers[i].running)
            continue;
        running++;
        world = mu_layout_world(&box->workers[i].layout);
    }
    return running > 0 && running == world;
}

/* One training step of all who run, when all ranks do. */
static bool box_train(struct box *box, uint64_t steps)
{
    if (!box_all_run(box))
        return false;
    struct mu_step_result result = {.loss = 1, .grad_norm = 1, .finite = !box->unfinite, .command = UINT64_MAX};
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        struct box_worker *worker = &box->workers[i];
        if (!worker->running)
            continue;
        uint64_t vote = mu_worker_vote(worker->core, worker->generation);
        result.command = vote < result.command ? vote : result.command;
        result.step = worker->held.step;
    }
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        struct box_worker *worker = &box->workers[i];
        if (!worker->running)
            continue;
        bool idle = mu_layout_is_idle(&worker->layout, worker->rank);
        uint32_t stage = idle ? 0 : mu_layout_coords(&worker->layout, worker->rank).p;
        uint32_t layers = worker->layout.stage_first[stage + 1] - worker->layout.stage_first[stage];
        worker->held.step = result.step + 1;
        worker->held.has_result = true;
        worker->held.result = result;
        struct mu_boundary decision =
            mu_worker_boundary(worker->core, box->now_us, worker->generation, result.step + 1, &result);
        struct mu_worker_event step = {.kind = MU_WE_STEP};
        step.step = (struct mu_step_report){.steps_done = result.step + 1,
                                            .result = result,
                                            .step_count = 1,
                                            .leaf_count = idle ? 0 : 1,
                                            .tokens = 10,
                                            .total_us = (box->step_us ? box->step_us : 1000) +
                                                        (decision.take_snapshot ? box->copy_us : 0),
                                            .snapshot_us = decision.take_snapshot ? box->copy_us : 0,
                                            .forward_us = worker->layer_us ? worker->layer_us * layers : 100};
        if (worker->leaf_us) {
            step.step.leaf_count = worker->leaves;
            step.step.forward_us = worker->leaf_us * worker->leaves;
        }
        box_engine_later(box, i, &step);
        if (decision.take_snapshot)
            box_take(box, i, &decision.snapshot);
        bool finished = result.step + 1 == steps;
        if (!decision.park && !finished)
            continue;
        worker->running = false;
        struct mu_worker_event parked = box_parked(worker, finished ? MU_PARK_FINISHED : MU_PARK_COMMAND);
        memset(parked.parked.weights_sha256, finished && !idle && worker->rank == 0 ? 0xab : 0, 32);
        parked.parked.weights_unfinite = finished && box->weights_unfinite;
        box_engine_later(box, i, &parked);
    }
    box_settle(box);
    return true;
}

static inline struct mu_job_view box_view(struct box *box)
{
    struct mu_job_view view;
    assert_true(mu_coord_job_find(box->coord, box->name, &view));
    return view;
}

static inline bool box_said(const struct box *box, const char *text)
{
    return strstr(box->events, text) != NULL;
}

#include "core_life.h"

#endif
