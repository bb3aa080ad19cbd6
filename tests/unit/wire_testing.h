/* Random values of every message kind of the workers' stream, for tests of the wire format. */
#ifndef TESTS_WIRE_TESTING_H
#define TESTS_WIRE_TESTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/rng.h"
#include "proto/wire.h"

static uint64_t seed_state;

static uint64_t any(void)
{
    return mu_splitmix64(&seed_state);
}

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(any() % limit);
}

static bool flip(void)
{
    return any() & 1;
}

static uint64_t some_step(void)
{
    return any() % (MU_STEPS_MAX + 1);
}

static double some_real(void)
{
    return (double)(int64_t)any() * 1e-12;
}

static struct mu_id some_id(void)
{
    return (struct mu_id){.high = any(), .low = any() | 1};
}

static struct mu_hash128 some_hash(void)
{
    return (struct mu_hash128){.low = any() | 1, .high = any()};
}

static void some_name(char *out, size_t capacity)
{
    static const char first[] = "abcdefghijklmnopqrstuvwxyz0123456789",
                      others[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t length = 1 + below((uint32_t)capacity - 1);
    out[0] = first[below(sizeof first - 1)];
    for (size_t i = 1; i < length; i++)
        out[i] = others[below(sizeof others - 1)];
    out[length] = 0;
}

/* UTF-8 with characters of 1 to 4 bytes, up to the full capacity. */
static void some_text(char *out, size_t capacity)
{
    static const char *const pieces[] = {"a", " ", "~", "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x9a\x80", "Z", "0"};
    size_t used = 0, wanted = below((uint32_t)capacity);
    while (used < wanted) {
        const char *piece = pieces[below(8)];
        size_t length = strlen(piece);
        if (used + length >= capacity)
            break;
        memcpy(out + used, piece, length);
        used += length;
    }
    out[used] = 0;
}

static void some_path(char *out, size_t capacity)
{
    out[0] = '/';
    some_text(out + 1, capacity - 1);
}

static void some_result(struct mu_step_result *result)
{
    result->step = some_step();
    result->loss = some_real();
    result->grad_norm = some_real();
    result->command = any();
    result->finite = flip();
}

/* Any layout that a job could have. */
static void some_layout(struct mu_layout *layout)
{
    memset(layout, 0, sizeof *layout);
    layout->tp = 1u << below(5);
    layout->pp = 1 + below(MU_STAGES_MAX);
    layout->sharded = flip();
    layout->dp = 1 + below(MU_WORKERS_MAX / (layout->tp * layout->pp));
    layout->idle = layout->tp * layout->pp * layout->dp + 3 <= MU_WORKERS_MAX ? below(4) : 0;
    for (uint32_t stage = 0; stage < layout->pp; stage++) /* at most 4 MU_STAGES_MAX = MU_LAYERS_MAX */
        layout->stage_first[stage + 1] = (uint16_t)(layout->stage_first[stage] + 1 + below(4));
    layout->buddy_shift = below(mu_layout_buddy_group(layout));
}

static void some_held(struct mu_held *held)
{
    held->has_state = flip();
    held->has_gradient = flip();
    held->has_result = flip();
    held->step = some_step();
    if (held->has_result)
        some_result(&held->result);
    held->share_count = held->has_state ? 1 + below(MU_HELD_SHARES_MAX) : 0;
    for (uint32_t i = 0; i < held->share_count; i++) {
        some_layout(&held->shares[i].layout);
        held->shares[i].rank = below(held->shares[i].layout.tp * held->shares[i].layout.pp * held->shares[i].layout.dp);
        held->shares[i].owned_only = flip();
    }
}

static void some_identity(struct mu_identity_parts *parts)
{
    parts->count = below(MU_IDENTITY_PARTS_MAX + 1);
    for (uint32_t i = 0; i < parts->count; i++) {
        parts->parts[i].hash = any();
        memset(parts->parts[i].name, 'a' + (int)i, 1 + below(MU_IDENTITY_NAME_SIZE - 1));
    }
}

static void some_status(struct mu_worker_status *status)
{
    status->phase = (enum mu_worker_phase)below(MU_PHASE_COUNT);
    status->generation = any();
    status->rank = below(MU_WORKERS_MAX);
    some_held(&status->held);
    status->command_received = any();
    status->command_executed = any();
    status->checkpoint_taken = any();
    status->era = (uint32_t)any();
    status->park_reason = (enum mu_park_reason)below(MU_PARK_ENGINE + 1);
    status->peer_rank = below(MU_WORKERS_MAX);
    status->peer_failure = (enum mu_peer_failure)below(MU_PEER_FAILURE_PROTOCOL + 1);
    status->bad_checkpoint = any();
    status->feed = any();
    status->fed_by = any();
    status->feed_state = (enum mu_feed_state)below(MU_FEED_FAILED + 1);
    some_text(status->text, sizeof status->text);
    for (int i = 0; i < 32; i++)
        status->weights_sha256[i] = (uint8_t)any();
    status->weights_unfinite = any() & 1;
}

/* Of an address; without one there is none. */
static void some_secret(const char *address, uint8_t secret[32])
{
    for (int i = 0; i < 32 && address[0]; i++)
        secret[i] = (uint8_t)(1 + any() % 255);
}

static void some_hello(struct mu_hello *hello)
{
    hello->protocol_version = MU_PROTOCOL_VERSION;
    hello->incarnation = some_id();
    some_text(hello->software_version, sizeof hello->software_version);
    some_name(hello->job, sizeof hello->job);
    if (flip())
        some_name(hello->name, sizeof hello->name);
    some_text(hello->host, sizeof hello->host);
    some_text(hello->address, sizeof hello->address);
    if (flip()) {
        some_text(hello->files_address, sizeof hello->files_address);
        some_secret(hello->files_address, hello->files_secret);
        hello->inventory_count = below(MU_INVENTORY_MAX + 1);
        for (uint32_t i = 0; i < hello->inventory_count; i++)
            hello->inventory[i] = any();
    }
    strcpy(hello->backend, flip() ? "cpu" : "cuda-12_4");
    hello->pid = any();
    hello->threads = (uint32_t)any();
    hello->memory_bytes = any();
    hello->nccl_version = (uint32_t)any();
    hello->computes_bf16 = flip();
    hello->prepared_job = flip();
    if (flip())
        hello->job_uid = some_id();
    hello->numeric_identity = some_hash();
    some_identity(&hello->identity_parts);
    hello->data_hash = some_hash();
    some_status(&hello->status);
}

static double some_rate(void)
{
    return (double)(any() >> 8);
}

static void some_probed(struct mu_probe_report *report)
{
    report->number = any();
    report->kind = (enum mu_probe_kind)(1 + below(MU_PROBE_KIND_END - 1));
    report->status = (enum mu_status)below(MU_STATUS_COUNT);
    some_text(report->text, sizeof report->text);
    report->write_rate = some_rate();
    report->read_rate = some_rate();
    report->barrier_s = some_rate();
    report->ring_rate = some_rate();
    if (report->kind == MU_PROBE_PAIR)
        report->pair = (struct mu_probe_pair){some_rate(), some_rate(), some_rate()};
    if (report->kind != MU_PROBE_ALONE)
        return;
    for (int i = 0; i < MU_PROBE_SIZES; i++)
        report->alone.flops[i] = some_rate();
    report->alone.memory_bytes = some_rate();
    report->alone.memory_rate = some_rate();
    report->alone.to_host_rate = some_rate();
    report->alone.to_device_rate = some_rate();
    report->alone.rates_apart = some_rate();
    report->alone.rates = (struct mu_cost_rates){.flops = some_rate(),
                                                 .memory_bytes_per_second = some_rate(),
                                                 .rows_bytes_per_second = some_rate(),
                                                 .fixed_s = some_rate(),
                                                 .slice_cost = some_rate()};
}

static void some_worker_message(struct mu_worker_message *message, enum mu_worker_message_kind kind)
{
    memset(message, 0, sizeof *message);
    message->kind = kind;
    message->generation = any();
    switch (kind) {
    case MU_WM_HELLO:
        some_hello(&message->hello);
        break;
    case MU_WM_HEARTBEAT:
        message->heartbeat.progress = any();
        message->heartbeat.phase = (enum mu_worker_phase)below(MU_PHASE_COUNT);
        message->heartbeat.step = some_step();
        message->heartbeat.waiting = flip();
        break;
    case MU_WM_STATUS:
        some_status(&message->status);
        break;
    case MU_WM_STEP:
        some_result(&message->step.result);
        message->step.steps_done = some_step();
        message->step.step_count = (uint32_t)any();
        message->step.leaf_count = (uint32_t)any();
        message->step.tokens = any();
        for (uint64_t *us = &message->step.total_us; us <= &message->step.snapshot_us; us++)
            *us = any();
        for (uint32_t *us = &message->step.tensor_us; us <= &message->step.vote_us; us++)
            *us = (uint32_t)any();
        break;
    case MU_WM_PIECE:
        message->piece.checkpoint = any();
        message->piece.piece = below(MU_WORKERS_MAX);
        message->piece.step = some_step();
        message->piece.status = (enum mu_status)below(MU_STATUS_COUNT);
        message->piece.size_bytes = any();
        message->piece.checksum = some_hash();
        message->piece.stall_us = any();
        message->piece.write_us = any();
        some_name(message->piece.file, sizeof message->piece.file);
        some_text(message->piece.text, sizeof message->piece.text);
        break;
    case MU_WM_EVAL:
        message->eval.step = some_step();
        message->eval.loss = some_real();
        break;
    case MU_WM_GOODBYE:
        some_text(message->goodbye.reason, sizeof message->goodbye.reason);
        break;
    case MU_WM_KEPT:
        message->kept.kind = (enum mu_keep_kind)(1 + below(MU_KEEP_KIND_END - 1));
        message->kept.checkpoint = any();
        message->kept.status = (enum mu_status)below(MU_STATUS_COUNT);
        message->kept.size_bytes = any();
        some_text(message->kept.text, sizeof message->kept.text);
        break;
    case MU_WM_PROBED:
        some_probed(&message->probed);
        break;
    case MU_WM_COUNT:
        break;
    }
}

static void good_spec(struct mu_job_spec *spec)
{
    memset(spec, 0, sizeof *spec);
    mu_job_spec_init(spec);
    strcpy(spec->name, "kjv");
    spec->model.layers = 1 + below(12);
    spec->model.heads = 1 + below(8);
    spec->model.channels = spec->model.heads * 16;
    spec->model.context = 64 + below(64);
    spec->model.vocab = 256;
    spec->model.dropout = (float)below(100) / 128.0f;
    mu_model_config_resolve(&spec->model);
    some_path(spec->data.path, sizeof spec->data.path);
    spec->data.holdout = (double)(1 + below(100)) / 256.0;
    spec->batch.micro = 1 + below(4);
    spec->batch.accumulate = 1 + below(4);
    spec->batch.sequences = spec->batch.micro * spec->batch.accumulate * (1 + below(64));
    spec->batch.length = 32 + below(32);
    spec->steps = 100 + below(100000);
    spec->optimizer.lr = 1e-3 * (1 + below(10));
    spec->optimizer.min_lr = flip() ? 0 : 1e-4;
    spec->optimizer.warmup = below(100);
    spec->optimizer.beta1 = flip() ? 0 : 0.9;
    spec->optimizer.beta2 = (double)below(1000) / 1024.0;
    spec->optimizer.weight_decay = flip() ? 0 : 0.1;
    spec->optimizer.clip = flip() ? 0 : 2.5;
    spec->parallel.pp = below(2);
    spec->parallel.optimizer_sharding = flip();
    spec->parallel.recompute = (enum mu_recompute)(MU_RECOMPUTE_NONE + below(3));
    spec->workers.max = 1 + below(MU_WORKERS_MAX);
    spec->workers.spares = below(3);
    some_path(spec->checkpoint.path, sizeof spec->checkpoint.path);
    bool every_auto = below(4) == 0;
    spec->checkpoint.every = every_auto ? MU_EVERY_AUTO : 10;
    spec->checkpoint.keep = 1 + below(9);
    spec->checkpoint.keep_every = every_auto ? 0 : 10 * below(5);
    spec->eval.every = 7;
    spec->eval.sequences = 5;
    spec->numerics = MU_NUMERICS_EXACT;
    spec->compute = flip() ? MU_COMPUTE_BF16 : MU_COMPUTE_FP32;
    spec->data_tls = flip();
    spec->seed = flip() ? 0 : any();
}

/* What a coordinator message may point to. */
struct pointed {
    struct mu_job_spec spec;
    struct mu_peer peers[MU_PEERS_MAX];
    char names[MU_PEERS_MAX][MU_WORKER_NAME_SIZE], addresses[MU_PEERS_MAX][MU_ADDRESS_SIZE];
    uint32_t counts[MU_COUNTED_REPLICAS_MAX];
    struct mu_amendments amendments;
    struct mu_move moves[MU_MOVES_MAX];
    struct mu_holder holders[MU_HOLDERS_MAX];
    struct mu_written_piece *pieces; /* of some_keep; from malloc */
};

static void some_snapshot(struct mu_snapshot *snapshot)
{
    snapshot->checkpoint = any();
    some_layout(&snapshot->layout);
    snapshot->piece = below(snapshot->layout.tp * snapshot->layout.pp * snapshot->layout.dp + 1);
    some_path(snapshot->dir, sizeof snapshot->dir);
}

static void some_peers(struct mu_assign *assign, struct pointed *pointed, uint32_t world)
{
    uint32_t most = world - 1 < MU_PEERS_MAX ? world - 1 : MU_PEERS_MAX;
    assign->peer_count = below(most + 1);
    for (uint32_t i = 0, rank = 0; i < assign->peer_count; i++, rank++) {
        rank += rank == assign->rank;
        some_name(pointed->names[i], MU_WORKER_NAME_SIZE);
        some_text(pointed->addresses[i], MU_ADDRESS_SIZE);
        pointed->peers[i] = (struct mu_peer){
            .rank = rank, .incarnation = some_id(), .name = pointed->names[i], .address = pointed->addresses[i]};
    }
    assign->peers = pointed->peers;
}

static void some_moves(struct mu_assign *assign, struct pointed *pointed)
{
    bool alone = assign->source == MU_SOURCE_CHECKPOINT || assign->source == MU_SOURCE_INIT;
    assign->move_count = alone || assign->peer_count == 0 ? 0 : below(40);
    for (uint32_t i = 0; i < assign->move_count; i++) {
        uint32_t other = pointed->peers[below(assign->peer_count)].rank;
        bool out = flip();
        pointed->moves[i] = (struct mu_move){.from = out ? assign->rank : other,
                                             .to = out ? other : assign->rank,
                                             .kinds = 1 + below(3),
                                             .run = {.first = below(1u << 30), .count = 1 + below(1u << 20)}};
    }
    assign->moves = assign->move_count ? pointed->moves : NULL;
}

/* What is left over joins the last run. */
static void bound_runs(uint32_t *counts, uint32_t replicas)
{
    for (uint32_t i = 1, runs = 1; i < replicas; i++) {
        if (runs == MU_LEAF_RUNS_MAX)
            counts[i] = counts[i - 1];
        runs += counts[i] != counts[i - 1];
    }
}

static void some_holder(struct mu_holder *holder)
{
    memset(holder, 0, sizeof *holder);
    some_text(holder->host, sizeof holder->host);
    if (flip())
        some_text(holder->address, sizeof holder->address);
    some_secret(holder->address, holder->secret);
}

static void some_keep(struct mu_keep_order *keep, struct pointed *pointed)
{
    keep->kind = (enum mu_keep_kind)(1 + below(MU_KEEP_KIND_END - 1));
    keep->checkpoint = any();
    some_path(keep->dir, sizeof keep->dir);
    some_holder(&keep->before);
    some_holder(&keep->after);
    if (keep->kind != MU_KEEP_PUBLISH)
        return;
    keep->step = some_step();
    keep->generation = any();
    keep->wall_us = any();
    do
        some_layout(&keep->layout);
    while (mu_layout_working(&keep->layout) > 600);
    keep->piece_count = mu_layout_working(&keep->layout);
    free(pointed->pieces);
    pointed->pieces = calloc(keep->piece_count, sizeof *pointed->pieces);
    for (uint32_t i = 0; i < keep->piece_count; i++) {
        pointed->pieces[i].size_bytes = any();
        pointed->pieces[i].checksum = some_hash();
        if (flip())
            some_name(pointed->pieces[i].file, 60);
    }
    keep->pieces = pointed->pieces;
}

/* Every field now and then. */
static void some_amendments(struct mu_amendments *all)
{
    memset(all, 0, sizeof *all);
    all->count = (uint32_t)below(4);
    all->newest = all->count;
    for (uint32_t i = 0; i < all->count; i++) {
        struct mu_amendment *one = &all->list[i];
        one->version = i + 1;
        one->fields = (uint32_t)below(MU_AMEND_ALL + 1);
        one->at_step = 10 * i + (uint64_t)below(10);
        one->settled = flip();
        one->terms.lr = one->fields & MU_AMEND_LR ? 0.5 : 0;
        one->terms.min_lr = one->fields & MU_AMEND_MIN_LR && flip() ? 0.25 : 0;
        one->terms.warmup = one->fields & MU_AMEND_WARMUP ? (uint64_t)below(9) : 0;
        one->terms.steps = one->fields & MU_AMEND_STEPS ? 1 + (uint64_t)below(900) : 0;
        one->terms.every = one->fields & MU_AMEND_EVERY ? (flip() ? MU_EVERY_AUTO : (uint64_t)below(9)) : 0;
        one->terms.keep = one->fields & MU_AMEND_KEEP ? 1 + (uint32_t)below(9) : 0;
        one->terms.keep_every = one->fields & MU_AMEND_KEEP_EVERY ? (uint64_t)below(9) : 0;
        one->skip_first = one->fields & MU_AMEND_SKIP ? 100 * i + (uint64_t)below(50) : 0;
        one->skip_count = one->fields & MU_AMEND_SKIP ? 1 + (uint64_t)below(50) : 0;
        if (!(one->fields & MU_AMEND_ROLL_BACK))
            continue;
        one->back.checkpoint = 1 + (uint64_t)below(50);
        one->back.void_before = one->back.checkpoint + 1 + (uint64_t)below(50);
        one->back.from_step = (uint64_t)below(900);
    }
}

static void some_assign(struct mu_assign *assign, struct pointed *pointed)
{
    assign->holder_count = below(4) ? 0 : below(300);
    for (uint32_t i = 0; i < assign->holder_count; i++)
        some_holder(&pointed->holders[i]);
    assign->holders = assign->holder_count ? pointed->holders : NULL;
    some_layout(&assign->layout);
    uint32_t world = assign->layout.tp * assign->layout.pp * assign->layout.dp + assign->layout.idle;
    assign->rank = below(world);
    assign->start_step = some_step();
    for (int i = 0; i < 32; i++)
        assign->secret[i] = (uint8_t)any();
    if (flip() && assign->layout.dp <= MU_COUNTED_REPLICAS_MAX) {
        for (uint32_t i = 0; i < assign->layout.dp; i++)
            pointed->counts[i] = i > 0 && below(assign->layout.dp) >= 30 ? pointed->counts[i - 1] : 1 + below(60);
        bound_runs(pointed->counts, assign->layout.dp);
        assign->leaf_counts = pointed->counts;
    }
    assign->source = (enum mu_state_source)below(MU_SOURCE_INIT + 1);
    some_peers(assign, pointed, world);
    some_moves(assign, pointed);
    if (assign->source == MU_SOURCE_ROLL_FORWARD)
        some_result(&assign->roll_forward);
    assign->checkpoint = any();
    some_path(assign->checkpoint_dir, sizeof assign->checkpoint_dir);
    if (flip())
        some_name(assign->checkpoint_job, sizeof assign->checkpoint_job);
    assign->command_base = any();
    assign->nccl = any() % 2;
    some_amendments(&pointed->amendments);
    assign->amendments = &pointed->amendments;
}

/* What they point to, which then counts as compared. */
static inline void compare_assigns(struct mu_assign *x, struct mu_assign *y)
{
    assert_int_equal(x->leaf_counts != NULL, y->leaf_counts != NULL);
    if (x->leaf_counts)
        assert_memory_equal(x->leaf_counts, y->leaf_counts, x->layout.dp * sizeof *x->leaf_counts);
    assert_int_equal(x->peer_count, y->peer_count);
    for (uint32_t i = 0; i < x->peer_count; i++) {
        assert_int_equal(x->peers[i].rank, y->peers[i].rank);
        assert_true(mu_id_equal(x->peers[i].incarnation, y->peers[i].incarnation));
        assert_string_equal(x->peers[i].name, y->peers[i].name);
        assert_string_equal(x->peers[i].address, y->peers[i].address);
    }
    assert_int_equal(x->move_count, y->move_count);
    if (x->move_count)
        assert_memory_equal(x->moves, y->moves, x->move_count * sizeof *x->moves);
    assert_int_equal(x->holder_count, y->holder_count);
    if (x->holder_count)
        assert_memory_equal(x->holders, y->holders, x->holder_count * sizeof *x->holders);
    x->holders = y->holders = NULL;
    x->leaf_counts = y->leaf_counts = NULL;
    x->peers = y->peers = NULL;
    x->moves = y->moves = NULL;
    assert_memory_equal(x->amendments, y->amendments, sizeof *x->amendments);
    x->amendments = y->amendments = NULL;
}

static void some_feed(struct mu_feed_order *feed, struct pointed *pointed)
{
    some_amendments(&pointed->amendments);
    feed->amendments = &pointed->amendments;
    feed->number = (any() | MU_FEED_BIT) / MU_FEED_PARTS_MAX * MU_FEED_PARTS_MAX;
    feed->role = flip() ? MU_FEED_GIVE : MU_FEED_TAKE;
    some_layout(&feed->layout);
    feed->rank = below(feed->layout.tp * feed->layout.pp * feed->layout.dp);
    feed->taker = flip() ? MU_LAYOUT_NOBODY : below(feed->layout.tp * feed->layout.pp * feed->layout.dp);
    some_layout(&feed->next);
    feed->next_rank = below(feed->next.tp * feed->next.pp * feed->next.dp);
    feed->parts = 1 + below(MU_FEED_PARTS_MAX);
    feed->part = below(feed->parts);
    feed->other = some_id();
    some_text(feed->address, sizeof feed->address);
    for (int i = 0; i < 32; i++)
        feed->secret[i] = (uint8_t)any();
}

static void some_probe(struct mu_probe_order *order)
{
    order->number = any() | MU_FEED_BIT;
    order->kind = (enum mu_probe_kind)below(MU_PROBE_KIND_END);
    order->limit_ms = (uint32_t)any();
    order->quick = flip();
    order->bytes = any() % (MU_PROBE_STORAGE_BYTES_MAX + 1);
    order->encrypted = flip();
    if (order->kind != MU_PROBE_PAIR && order->kind != MU_PROBE_TOGETHER)
        return;
    order->world = order->kind == MU_PROBE_PAIR ? 2 : 2 + below(MU_PROBE_MEMBERS_MAX - 1);
    order->rank = below(order->world);
    for (size_t i = 0; i < sizeof order->secret; i++)
        order->secret[i] = (uint8_t)any();
    for (uint32_t rank = 0; rank < order->world && order->peer_count < MU_PROBE_NEIGHBOURS_MAX; rank++) {
        if (rank == order->rank || (order->peer_count > 0 && flip()))
            continue;
        struct mu_probe_peer *peer = &order->peers[order->peer_count++];
        peer->rank = rank;
        peer->incarnation = some_id();
        some_text(peer->address, sizeof peer->address);
    }
}

static void some_coord_message(struct mu_coord_message *message, struct pointed *pointed,
                               enum mu_coord_message_kind kind)
{
    memset(message, 0, sizeof *message);
    message->kind = kind;
    message->generation = any();
    switch (kind) {
    case MU_CM_WELCOME:
        some_name(message->welcome.name, sizeof message->welcome.name);
        message->welcome.job_uid = some_id();
        if (flip()) {
            do
                good_spec(&pointed->spec);
            while (mu_job_spec_check(&pointed->spec, NULL) != MU_OK);
            some_amendments(&pointed->spec.amendments);
            message->welcome.spec = &pointed->spec;
        }
        message->welcome.heartbeat_ms = 1 + below(1000);
        message->welcome.lost_ms = 2000 + below(1000);
        break;
    case MU_CM_REJECT:
        message->reject.reason = (enum mu_reject_reason)below(MU_REJECT_INVALID + 1);
        some_text(message->reject.text, sizeof message->reject.text);
        break;
    case MU_CM_ASSIGN:
        some_assign(&message->assign, pointed);
        break;
    case MU_CM_GO:
    case MU_CM_REVOKE:
        break;
    case MU_CM_COMMAND:
        message->command.number = any();
        message->command.kind = flip() ? MU_COMMAND_CHECKPOINT : MU_COMMAND_PARK;
        message->command.not_before_step = any();
        message->command.first_open = any();
        if (message->command.kind == MU_COMMAND_CHECKPOINT)
            some_snapshot(&message->command.snapshot);
        break;
    case MU_CM_SNAPSHOT:
        some_snapshot(&message->snapshot);
        break;
    case MU_CM_PIECE_ACK:
        message->piece_ack.checkpoint = any();
        message->piece_ack.piece = (uint32_t)any();
        break;
    case MU_CM_RELEASE:
        message->release.exit_code = (uint32_t)any();
        some_text(message->release.text, sizeof message->release.text);
        break;
    case MU_CM_FEED:
        some_feed(&message->feed, pointed);
        break;
    case MU_CM_KEEP:
        some_keep(&message->keep, pointed);
        break;
    case MU_CM_RECALL:
        message->recall = (struct mu_recall){.number = any(),
                                             .flight_records = (uint32_t)any() % (MU_RECALL_RECORDS_MAX + 1),
                                             .threads = any() & 1,
                                             .log_lines = (uint32_t)any() % (MU_RECALL_LINES_MAX + 1),
                                             .log_after = any()};
        break;
    case MU_CM_PROBE:
        some_probe(&message->probe);
        break;
    case MU_CM_COUNT:
        break;
    }
}

#endif
