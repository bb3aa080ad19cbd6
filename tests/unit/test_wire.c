/* links: mu_wire mu_plan */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/rng.h"
#include "proto/wire_pb.h"

enum { ROUNDS = 400, MUTATIONS = 30000 };

/* ---- random values ---- */

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

static void some_status(struct mu_worker_status *status)
{
    status->phase = (enum mu_worker_phase)below(MU_PHASE_COUNT);
    status->generation = any();
    status->rank = below(MU_WORKERS_MAX);
    status->held.has_state = flip();
    status->held.has_gradient = flip();
    status->held.has_result = flip();
    status->held.step = some_step();
    if (status->held.has_result)
        some_result(&status->held.result);
    status->command_received = any();
    status->command_executed = any();
    status->park_reason = (enum mu_park_reason)below(MU_PARK_ENGINE + 1);
    status->peer_rank = below(MU_WORKERS_MAX);
    status->peer_failure = (enum mu_peer_failure)below(MU_PEER_FAILURE_PROTOCOL + 1);
    status->bad_checkpoint = any();
    some_text(status->text, sizeof status->text);
    for (int i = 0; i < 32; i++)
        status->weights_sha256[i] = (uint8_t)any();
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
    strcpy(hello->backend, flip() ? "cpu" : "cuda-12_4");
    hello->pid = any();
    hello->threads = (uint32_t)any();
    hello->memory_bytes = any();
    hello->prepared_job = flip();
    if (flip())
        hello->job_uid = some_id();
    hello->numeric_identity = some_hash();
    hello->data_hash = some_hash();
    some_status(&hello->status);
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
    spec->workers.max = 1 + below(MU_WORKERS_MAX);
    spec->workers.spares = below(3);
    some_path(spec->checkpoint.path, sizeof spec->checkpoint.path);
    spec->checkpoint.every = 10;
    spec->checkpoint.keep = 1 + below(9);
    spec->checkpoint.keep_every = 10 * below(5);
    spec->eval.every = 7;
    spec->eval.sequences = 5;
    spec->numerics = MU_NUMERICS_EXACT;
    spec->seed = flip() ? 0 : any();
}

/* What a coordinator message may point to. */
struct pointed {
    struct mu_job_spec spec;
    struct mu_peer peers[MU_NEIGHBOURS_MAX];
    char names[MU_NEIGHBOURS_MAX][MU_WORKER_NAME_SIZE], addresses[MU_NEIGHBOURS_MAX][MU_ADDRESS_SIZE];
    uint32_t serve[MU_NEIGHBOURS_MAX], counts[MU_COUNTED_WORLD_MAX];
};

static void some_snapshot(struct mu_snapshot *snapshot)
{
    snapshot->checkpoint = any();
    snapshot->piece_count = 1 + below(1024);
    snapshot->piece = below(snapshot->piece_count + 1);
    some_path(snapshot->dir, sizeof snapshot->dir);
}

static void some_assign(struct mu_assign *assign, struct pointed *pointed)
{
    assign->world = 40 + below(MU_COUNTED_WORLD_MAX - 40);
    assign->rank = below(assign->world);
    assign->start_step = some_step();
    for (int i = 0; i < 32; i++)
        assign->secret[i] = (uint8_t)any();
    assign->mesh = flip();
    if (flip()) {
        for (uint32_t i = 0; i < assign->world; i++)
            pointed->counts[i] = 1 + below(60);
        assign->leaf_counts = pointed->counts;
    }
    assign->peer_count = below(MU_NEIGHBOURS_MAX + 1);
    for (uint32_t i = 0, rank = 0; i < assign->peer_count; i++, rank++) {
        rank += rank == assign->rank;
        some_name(pointed->names[i], MU_WORKER_NAME_SIZE);
        some_text(pointed->addresses[i], MU_ADDRESS_SIZE);
        pointed->peers[i] = (struct mu_peer){
            .rank = rank, .incarnation = some_id(), .name = pointed->names[i], .address = pointed->addresses[i]};
    }
    assign->peers = pointed->peers;
    assign->serve_count = below(assign->peer_count + 1);
    for (uint32_t i = 0; i < assign->serve_count; i++)
        pointed->serve[i] = pointed->peers[i].rank;
    assign->serve_ranks = pointed->serve;
    assign->source = (enum mu_state_source)below(MU_SOURCE_INIT + 1);
    assign->source_rank = assign->rank == 0 ? 1 : 0;
    if (assign->source == MU_SOURCE_ROLL_FORWARD)
        some_result(&assign->roll_forward);
    assign->checkpoint = any();
    some_path(assign->checkpoint_dir, sizeof assign->checkpoint_dir);
    assign->command_base = any();
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
    case MU_CM_COUNT:
        break;
    }
}

/* ---- comparing ---- */

static bool same_spec(const struct mu_job_spec *a, const struct mu_job_spec *b)
{
    return strcmp(a->name, b->name) == 0 && memcmp(&a->model, &b->model, sizeof a->model) == 0 &&
           strcmp(a->data.path, b->data.path) == 0 && a->data.tokens == b->data.tokens &&
           a->data.holdout == b->data.holdout && memcmp(&a->batch, &b->batch, sizeof a->batch) == 0 &&
           a->steps == b->steps && memcmp(&a->optimizer, &b->optimizer, sizeof a->optimizer) == 0 &&
           memcmp(&a->workers, &b->workers, sizeof a->workers) == 0 &&
           strcmp(a->checkpoint.path, b->checkpoint.path) == 0 && a->checkpoint.kind == b->checkpoint.kind &&
           a->checkpoint.every == b->checkpoint.every && a->checkpoint.keep == b->checkpoint.keep &&
           a->checkpoint.keep_every == b->checkpoint.keep_every && a->eval.every == b->eval.every &&
           a->eval.sequences == b->eval.sequences && a->numerics == b->numerics && a->seed == b->seed;
}

/* Compares and forgets what is pointed to, so that the rest can be compared as bytes. */
static void compare_pointers(struct mu_coord_message *a, struct mu_coord_message *b)
{
    if (a->kind == MU_CM_WELCOME) {
        assert_int_equal(a->welcome.spec != NULL, b->welcome.spec != NULL);
        if (a->welcome.spec)
            assert_true(same_spec(a->welcome.spec, b->welcome.spec));
        a->welcome.spec = b->welcome.spec = NULL;
    }
    if (a->kind != MU_CM_ASSIGN)
        return;
    struct mu_assign *x = &a->assign, *y = &b->assign;
    assert_int_equal(x->leaf_counts != NULL, y->leaf_counts != NULL);
    if (x->leaf_counts)
        assert_memory_equal(x->leaf_counts, y->leaf_counts, x->world * sizeof *x->leaf_counts);
    assert_int_equal(x->peer_count, y->peer_count);
    for (uint32_t i = 0; i < x->peer_count; i++) {
        assert_int_equal(x->peers[i].rank, y->peers[i].rank);
        assert_true(mu_id_equal(x->peers[i].incarnation, y->peers[i].incarnation));
        assert_string_equal(x->peers[i].name, y->peers[i].name);
        assert_string_equal(x->peers[i].address, y->peers[i].address);
    }
    assert_int_equal(x->serve_count, y->serve_count);
    if (x->serve_count)
        assert_memory_equal(x->serve_ranks, y->serve_ranks, x->serve_count * sizeof *x->serve_ranks);
    x->leaf_counts = y->leaf_counts = NULL;
    x->peers = y->peers = NULL;
    x->serve_ranks = y->serve_ranks = NULL;
}

/* ---- round trips ---- */

static void test_worker_message_of_every_kind_survives_round_trip(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    mu_wire_arena_init(&arena);
    for (int round = 0; round < ROUNDS; round++) {
        for (int kind = 0; kind < MU_WM_COUNT; kind++) {
            struct mu_worker_message message, decoded;
            const void *data = NULL;
            size_t size_bytes = 0;
            some_worker_message(&message, (enum mu_worker_message_kind)kind);
            memset(&decoded, 0, sizeof decoded);
            assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_OK);
            assert_int_equal(mu_wire_decode_worker(&arena, data, size_bytes, &decoded, &err), MU_OK);
            assert_memory_equal(&message, &decoded, sizeof message);
            mu_wire_arena_reset(&arena);
        }
    }
    mu_wire_arena_fini(&arena);
}

static void test_coordinator_message_of_every_kind_survives_round_trip(void **state)
{
    (void)state;
    static struct pointed pointed;
    struct mu_wire_arena arena;
    struct mu_error err;
    mu_wire_arena_init(&arena);
    for (int round = 0; round < ROUNDS; round++) {
        for (int kind = 0; kind < MU_CM_COUNT; kind++) {
            struct mu_coord_message message, decoded;
            const void *data = NULL;
            size_t size_bytes = 0;
            some_coord_message(&message, &pointed, (enum mu_coord_message_kind)kind);
            assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
            assert_int_equal(mu_wire_decode_coord(&arena, data, size_bytes, &decoded, &err), MU_OK);
            compare_pointers(&message, &decoded);
            assert_memory_equal(&message, &decoded, sizeof message);
            mu_wire_arena_reset(&arena);
        }
    }
    mu_wire_arena_fini(&arena);
}

static void test_largest_assign_fits_its_limit(void **state)
{
    (void)state;
    static struct pointed pointed;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_coord_message message = {.kind = MU_CM_ASSIGN, .generation = UINT64_MAX};
    struct mu_assign *assign = &message.assign;
    mu_wire_arena_init(&arena);
    assign->world = MU_COUNTED_WORLD_MAX;
    assign->rank = MU_COUNTED_WORLD_MAX - 1;
    assign->leaf_counts = pointed.counts;
    for (int i = 0; i < MU_COUNTED_WORLD_MAX; i++)
        pointed.counts[i] = 64;
    assign->peers = pointed.peers;
    assign->peer_count = MU_NEIGHBOURS_MAX;
    for (uint32_t i = 0; i < MU_NEIGHBOURS_MAX; i++) {
        memset(pointed.names[i], 'a', MU_WORKER_NAME_SIZE - 1);
        memset(pointed.addresses[i], 'a', MU_ADDRESS_SIZE - 1);
        pointed.peers[i] = (struct mu_peer){
            .rank = i, .incarnation = some_id(), .name = pointed.names[i], .address = pointed.addresses[i]};
    }
    const void *data = NULL;
    size_t size_bytes = 0;
    assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
    assert_true(size_bytes < MU_WIRE_COORD_BYTES_MAX);
    mu_wire_arena_fini(&arena);
}

static void test_spec_with_absent_fields_gets_defaults(void **state)
{
    (void)state;
    struct mu_error err;
    struct mu_job_spec spec;
    Muster__V1__JobSpec pb = MUSTER__V1__JOB_SPEC__INIT;
    Muster__V1__ModelSpec model = MUSTER__V1__MODEL_SPEC__INIT;
    Muster__V1__DataSpec data = MUSTER__V1__DATA_SPEC__INIT;
    Muster__V1__BatchSpec batch = MUSTER__V1__BATCH_SPEC__INIT;
    Muster__V1__OptimizerSpec optimizer = MUSTER__V1__OPTIMIZER_SPEC__INIT;
    pb.name = "small";
    pb.model = &model;
    pb.data = &data;
    pb.batch = &batch;
    pb.steps = 10;
    model.layers = 2, model.heads = 2, model.channels = 32, model.context = 16, model.vocab = 256;
    data.path = "/data/text";
    batch.sequences = 8, batch.micro = 2;
    assert_int_equal(mu_wire_spec_from_pb(&pb, &spec, &err), MU_OK);
    struct mu_job_spec defaults;
    mu_job_spec_init(&defaults);
    assert_int_equal(spec.batch.length, 16);
    assert_int_equal(spec.batch.accumulate, 1);
    assert_true(spec.seed == defaults.seed && spec.optimizer.clip == defaults.optimizer.clip);
    assert_true(spec.optimizer.beta1 == defaults.optimizer.beta1 && spec.workers.max == defaults.workers.max);
    assert_int_equal(spec.model.family, MU_FAMILY_GPT2);
    pb.optimizer = &optimizer; /* given zeros differ from absent ones */
    optimizer.optional_clip_case = MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_CLIP_CLIP;
    pb.optional_seed_case = MUSTER__V1__JOB_SPEC__OPTIONAL_SEED_SEED;
    assert_int_equal(mu_wire_spec_from_pb(&pb, &spec, &err), MU_OK);
    assert_true(spec.optimizer.clip == 0 && spec.seed == 0 && spec.optimizer.beta2 == defaults.optimizer.beta2);
    batch.sequences = 7;
    assert_int_equal(mu_wire_spec_from_pb(&pb, &spec, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "batch.sequences"));
}

/* ---- refusals ---- */

static enum mu_status decode_hello_with(Muster__V1__Hello *hello, struct mu_error *err)
{
    struct mu_wire_arena arena;
    Muster__V1__WorkerMessage pb = MUSTER__V1__WORKER_MESSAGE__INIT;
    struct mu_worker_message decoded;
    const void *data = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    pb.kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_HELLO;
    pb.hello = hello;
    assert_int_equal(mu_wire_pack(&arena, &pb.base, 1 << 20, &data, &size_bytes, err), MU_OK);
    *err = (struct mu_error){0};
    enum mu_status status = mu_wire_decode_worker(&arena, data, size_bytes, &decoded, err);
    mu_wire_arena_fini(&arena);
    return status;
}

struct good_hello {
    Muster__V1__Hello hello;
    Muster__V1__WorkerStatus status;
    uint8_t incarnation[16];
};

static void make_good_hello(struct good_hello *good)
{
    muster__v1__hello__init(&good->hello);
    muster__v1__worker_status__init(&good->status);
    memset(good->incarnation, 7, sizeof good->incarnation);
    good->status.phase = MUSTER__V1__WORKER_PHASE__WORKER_PHASE_SPARE;
    good->hello.protocol_version = MU_PROTOCOL_VERSION;
    good->hello.incarnation = (ProtobufCBinaryData){.len = 16, .data = good->incarnation};
    good->hello.job = "kjv";
    good->hello.status = &good->status;
}

static void expect_refused(struct good_hello *good, const char *field)
{
    struct mu_error err;
    assert_int_equal(decode_hello_with(&good->hello, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, field));
    assert_null(strchr(err.text, '\n'));
    make_good_hello(good);
}

static void test_hello_with_bad_field_is_refused_by_name(void **state)
{
    (void)state;
    struct good_hello good;
    struct mu_error err;
    char longer[400];
    memset(longer, 'a', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    make_good_hello(&good);
    assert_int_equal(decode_hello_with(&good.hello, &err), MU_OK);
    good.hello.job = "Kjv";
    expect_refused(&good, "Hello.job");
    good.hello.job = "";
    expect_refused(&good, "Hello.job");
    good.hello.name = "-x";
    expect_refused(&good, "Hello.name");
    good.hello.name = longer;
    expect_refused(&good, "Hello.name");
    good.hello.host = longer;
    expect_refused(&good, "Hello.host");
    good.hello.address = longer;
    expect_refused(&good, "Hello.address");
    good.hello.host = "a\nb";
    expect_refused(&good, "Hello.host");
    good.hello.host = "\xc0\xaf";
    expect_refused(&good, "Hello.host");
    good.hello.host = "\xed\xa0\x80";
    expect_refused(&good, "Hello.host");
    good.hello.host = "\xc2\x85";
    expect_refused(&good, "Hello.host");
    good.hello.host = "cut \xe2\x82";
    expect_refused(&good, "Hello.host");
    good.hello.backend = "CPU";
    expect_refused(&good, "Hello.backend");
    good.hello.incarnation.len = 15;
    expect_refused(&good, "Hello.incarnation");
    good.hello.incarnation.len = 0;
    expect_refused(&good, "Hello.incarnation");
    good.hello.status = NULL;
    expect_refused(&good, "Hello.status");
    good.status.phase = (Muster__V1__WorkerPhase)7;
    expect_refused(&good, "WorkerStatus.phase");
    good.status.phase = (Muster__V1__WorkerPhase)0;
    expect_refused(&good, "WorkerStatus.phase");
    good.status.rank = MU_WORKERS_MAX;
    expect_refused(&good, "WorkerStatus.rank");
    good.status.park_reason = (Muster__V1__ParkReason)99;
    expect_refused(&good, "WorkerStatus.park_reason");
}

static void test_hello_of_other_protocol_version_is_decoded_as_far_as_the_version(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_worker_message decoded;
    mu_wire_arena_init(&arena);
    /* hello {protocol_version: 9, status {phase: 77}}: what version 9 may look like */
    static const uint8_t bytes[] = {0x12, 0x07, 0x08, 0x09, 0x82, 0x01, 0x02, 0x08, 0x4d};
    assert_int_equal(mu_wire_decode_worker(&arena, bytes, sizeof bytes, &decoded, &err), MU_OK);
    assert_int_equal(decoded.hello.protocol_version, 9);
    mu_wire_arena_fini(&arena);
}

static void refuse_bytes(const void *bytes, size_t size_bytes, enum mu_status wanted, const char *text)
{
    struct mu_wire_arena arena;
    struct mu_error err = {0};
    struct mu_worker_message decoded;
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_wire_decode_worker(&arena, bytes, size_bytes, &decoded, &err), wanted);
    assert_non_null(strstr(err.text, text));
    mu_wire_arena_fini(&arena);
}

static void test_malformed_bytes_are_refused(void **state)
{
    (void)state;
    static const uint8_t embedded_nul[] = {0x12, 0x05, 0x22, 0x03, 'a', 0, 'b'}; /* hello.job = "a\0b" */
    static const uint8_t cut[] = {0x12, 0x05, 0x22};                             /* length beyond the end */
    static const uint8_t group[] = {0x0b, 0x0c};                                 /* wire types 3 and 4 */
    static const uint8_t wrong_type[] = {0x0a, 0x01, 'x'};                       /* generation as bytes */
    static const uint8_t twice[] = {0x08, 0x01, 0x08, 0x02};                     /* generation twice */
    static const uint8_t endless[] = {0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const uint8_t field_zero[] = {0x00, 0x00};
    static const uint8_t huge[] = {0x12, 0xff, 0xff, 0xff, 0xff, 0xff,
                                   0xff, 0xff, 0xff, 0xff, 0x01}; /* length 2^64 - 1 */
    refuse_bytes(embedded_nul, sizeof embedded_nul, MU_ERR_INVALID, "Hello.job");
    refuse_bytes(cut, sizeof cut, MU_ERR_INVALID, "WorkerMessage");
    refuse_bytes(group, sizeof group, MU_ERR_INVALID, "WorkerMessage");
    refuse_bytes(wrong_type, sizeof wrong_type, MU_ERR_INVALID, "WorkerMessage.generation");
    refuse_bytes(twice, sizeof twice, MU_ERR_INVALID, "twice");
    refuse_bytes(endless, sizeof endless, MU_ERR_INVALID, "WorkerMessage");
    refuse_bytes(field_zero, sizeof field_zero, MU_ERR_INVALID, "WorkerMessage");
    refuse_bytes(huge, sizeof huge, MU_ERR_INVALID, "WorkerMessage");
    refuse_bytes("", 0, MU_ERR_INVALID, "no kind");
}

static void test_flood_of_unknown_fields_and_oversize_are_refused(void **state)
{
    (void)state;
    static uint8_t bytes[MU_WIRE_WORKER_BYTES_MAX + 1];
    for (size_t i = 0; i + 1 < sizeof bytes; i += 2)
        bytes[i] = 0x78, bytes[i + 1] = 0x01; /* field 15 */
    refuse_bytes(bytes, MU_WIRE_WORKER_BYTES_MAX, MU_ERR_LIMIT, "does not know");
    refuse_bytes(bytes, sizeof bytes, MU_ERR_LIMIT, "at most");
}

static void test_some_unknown_fields_of_a_later_version_are_accepted(void **state)
{
    (void)state;
    static const uint8_t bytes[] = {0x08, 0x05, 0x78, 0x01, 0x1a,
                                    0x04, 0x08, 0x03, 0x10, 0x04}; /* heartbeat + field 15 */
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_worker_message decoded;
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_wire_decode_worker(&arena, bytes, sizeof bytes, &decoded, &err), MU_OK);
    assert_int_equal(decoded.kind, MU_WM_HEARTBEAT);
    assert_int_equal(decoded.generation, 5);
    assert_int_equal(decoded.heartbeat.phase, MU_PHASE_RUNNING);
    mu_wire_arena_fini(&arena);
}

static void test_free_text_is_cleaned_when_encoded_and_names_are_not(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_worker_message message = {.kind = MU_WM_GOODBYE}, decoded;
    const void *data = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    strcpy(message.goodbye.reason, "line 1\nline 2 \xff \xc3\xa4");
    assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_wire_decode_worker(&arena, data, size_bytes, &decoded, &err), MU_OK);
    assert_string_equal(decoded.goodbye.reason, "line 1?line 2 ? \xc3\xa4");
    some_worker_message(&message, MU_WM_HELLO);
    strcpy(message.hello.job, "Not A Name");
    assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "Hello.job"));
    char small[8];
    mu_wire_text_clean("abc\xf0\x9f\x9a\x80", small, 7); /* a character that does not fit is left out whole */
    assert_string_equal(small, "abc");
    mu_wire_arena_fini(&arena);
}

static void test_coordinator_message_out_of_range_is_refused(void **state)
{
    (void)state;
    static struct pointed pointed;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_coord_message message, decoded;
    const void *data = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    for (int fault = 0; fault < 7; fault++) {
        some_coord_message(&message, &pointed, MU_CM_ASSIGN);
        struct mu_assign *assign = &message.assign;
        assign->rank = 5;
        assign->peers = pointed.peers;
        assign->peer_count = 2;
        assign->serve_count = 0;
        assign->source = MU_SOURCE_HELD;
        for (uint32_t i = 0; i < 2; i++)
            pointed.peers[i] = (struct mu_peer){.rank = i, .incarnation = some_id(), .name = "w", .address = "a"};
        const char *text = "Peer.rank";
        if (fault == 0)
            pointed.peers[1].rank = 0; /* not ascending */
        else if (fault == 1)
            pointed.peers[1].rank = assign->world;
        else if (fault == 2)
            pointed.peers[1].rank = 5; /* itself */
        else if (fault == 3)
            assign->rank = assign->world, text = "rank";
        else if (fault == 4)
            assign->source = (enum mu_state_source)9, text = "Assign.source";
        else if (fault == 5)
            assign->source = MU_SOURCE_CHECKPOINT, strcpy(assign->checkpoint_dir, "relative"), text = "checkpoint_dir";
        else
            assign->start_step = MU_STEPS_MAX + 1, text = "start_step";
        assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
        assert_int_equal(mu_wire_decode_coord(&arena, data, size_bytes, &decoded, &err), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, text));
        mu_wire_arena_reset(&arena);
    }
    mu_wire_arena_fini(&arena);
}

/* ---- mutations ---- */

static size_t mutate(uint8_t *bytes, size_t size_bytes, size_t capacity)
{
    for (uint32_t times = 1 + below(4); times > 0 && size_bytes > 0; times--) {
        uint32_t at = below((uint32_t)size_bytes);
        switch (below(6)) {
        case 0:
            bytes[at] ^= (uint8_t)(1u << below(8));
            break;
        case 1:
            bytes[at] = (uint8_t)any();
            break;
        case 2:
            size_bytes = at;
            break;
        case 3:
            if (size_bytes < capacity) {
                memmove(bytes + at + 1, bytes + at, size_bytes - at);
                bytes[at] = (uint8_t)any();
                size_bytes++;
            }
            break;
        case 4:
            memmove(bytes + at, bytes + at + 1, size_bytes - at - 1);
            size_bytes--;
            break;
        default: { /* a slice is repeated at the end */
            size_t length = 1 + below((uint32_t)(size_bytes - at));
            if (size_bytes + length <= capacity) {
                memmove(bytes + size_bytes, bytes + at, length);
                size_bytes += length;
            }
        }
        }
    }
    return size_bytes;
}

/* A mutated message is refused with one clean line, or decodes to something that can be encoded and decoded again. */
static void test_mutated_worker_messages_are_refused_or_consistent(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    uint8_t bytes[MU_WIRE_WORKER_BYTES_MAX];
    unsigned accepted = 0, refused = 0;
    mu_wire_arena_init(&arena);
    for (int i = 0; i < MUTATIONS; i++) {
        struct mu_worker_message message, decoded, again;
        struct mu_error err = {0};
        const void *data = NULL;
        size_t size_bytes = 0;
        some_worker_message(&message, (enum mu_worker_message_kind)below(MU_WM_COUNT));
        assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_OK);
        memcpy(bytes, data, size_bytes);
        size_bytes = mutate(bytes, size_bytes, sizeof bytes);
        uint8_t *exact = malloc(size_bytes ? size_bytes : 1); /* so that a read beyond the end is seen */
        memcpy(exact, bytes, size_bytes);
        memset(&decoded, 0, sizeof decoded);
        if (mu_wire_decode_worker(&arena, exact, size_bytes, &decoded, &err) == MU_OK) {
            accepted++;
            if (decoded.kind != MU_WM_HELLO || decoded.hello.protocol_version == MU_PROTOCOL_VERSION) {
                assert_int_equal(mu_wire_encode_worker(&arena, &decoded, &data, &size_bytes, &err), MU_OK);
                memset(&again, 0, sizeof again);
                assert_int_equal(mu_wire_decode_worker(&arena, data, size_bytes, &again, &err), MU_OK);
                assert_memory_equal(&decoded, &again, sizeof again);
            }
        } else {
            refused++;
            assert_true(err.text[0] && mu_wire_text_ok(err.text, sizeof err.text));
        }
        free(exact);
        mu_wire_arena_reset(&arena);
    }
    assert_true(accepted > MUTATIONS / 100 && refused > MUTATIONS / 10);
    mu_wire_arena_fini(&arena);
}

static void test_mutated_coordinator_messages_are_refused_or_consistent(void **state)
{
    (void)state;
    static struct pointed pointed;
    static uint8_t bytes[MU_WIRE_COORD_BYTES_MAX];
    struct mu_wire_arena arena;
    unsigned accepted = 0, refused = 0;
    mu_wire_arena_init(&arena);
    for (int i = 0; i < MUTATIONS / 3; i++) {
        struct mu_coord_message message, decoded, again;
        struct mu_error err = {0};
        const void *data = NULL;
        size_t size_bytes = 0;
        some_coord_message(&message, &pointed, (enum mu_coord_message_kind)below(MU_CM_COUNT));
        assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
        memcpy(bytes, data, size_bytes);
        size_bytes = mutate(bytes, size_bytes, sizeof bytes);
        uint8_t *exact = malloc(size_bytes ? size_bytes : 1);
        memcpy(exact, bytes, size_bytes);
        if (mu_wire_decode_coord(&arena, exact, size_bytes, &decoded, &err) == MU_OK) {
            accepted++;
            assert_int_equal(mu_wire_encode_coord(&arena, &decoded, &data, &size_bytes, &err), MU_OK);
            assert_int_equal(mu_wire_decode_coord(&arena, data, size_bytes, &again, &err), MU_OK);
        } else {
            refused++;
            assert_true(err.text[0] && mu_wire_text_ok(err.text, sizeof err.text));
        }
        free(exact);
        mu_wire_arena_reset(&arena);
    }
    assert_true(accepted > 100 && refused > 100);
    mu_wire_arena_fini(&arena);
}

static void test_arena_keeps_its_memory_between_messages(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    for (int i = 0; i < 3; i++) { /* grows to what one round needs */
        for (int j = 0; j < 5; j++)
            assert_non_null(mu_wire_arena_alloc(&arena, 50000));
        mu_wire_arena_reset(&arena);
    }
    const char *first = mu_wire_arena_alloc(&arena, 50000);
    for (int j = 1; j < 5; j++) {
        const char *next = mu_wire_arena_alloc(&arena, 50000);
        assert_true(next > first && next < first + 5 * 50016); /* all in one block */
    }
    mu_wire_arena_reset(&arena);
    assert_ptr_equal(mu_wire_arena_alloc(&arena, 1), first);
    mu_wire_arena_fini(&arena);
}

int main(void)
{
    seed_state = 20261201;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worker_message_of_every_kind_survives_round_trip),
        cmocka_unit_test(test_coordinator_message_of_every_kind_survives_round_trip),
        cmocka_unit_test(test_largest_assign_fits_its_limit),
        cmocka_unit_test(test_spec_with_absent_fields_gets_defaults),
        cmocka_unit_test(test_hello_with_bad_field_is_refused_by_name),
        cmocka_unit_test(test_hello_of_other_protocol_version_is_decoded_as_far_as_the_version),
        cmocka_unit_test(test_malformed_bytes_are_refused),
        cmocka_unit_test(test_flood_of_unknown_fields_and_oversize_are_refused),
        cmocka_unit_test(test_some_unknown_fields_of_a_later_version_are_accepted),
        cmocka_unit_test(test_free_text_is_cleaned_when_encoded_and_names_are_not),
        cmocka_unit_test(test_coordinator_message_out_of_range_is_refused),
        cmocka_unit_test(test_mutated_worker_messages_are_refused_or_consistent),
        cmocka_unit_test(test_mutated_coordinator_messages_are_refused_or_consistent),
        cmocka_unit_test(test_arena_keeps_its_memory_between_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
