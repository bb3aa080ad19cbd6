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

#include "proto/wire_pb.h"
#include "wire_testing.h"
#include "plan/balance.h"

enum { ASSIGN_BYTES = 1024 };

enum { ROUNDS = 400 };

/* ---- comparing ---- */

static bool same_spec(const struct mu_job_spec *a, const struct mu_job_spec *b)
{
    return strcmp(a->name, b->name) == 0 && memcmp(&a->model, &b->model, sizeof a->model) == 0 &&
           strcmp(a->data.path, b->data.path) == 0 && a->data.tokens == b->data.tokens &&
           a->data.holdout == b->data.holdout && memcmp(&a->batch, &b->batch, sizeof a->batch) == 0 &&
           a->steps == b->steps && memcmp(&a->optimizer, &b->optimizer, sizeof a->optimizer) == 0 &&
           memcmp(&a->parallel, &b->parallel, sizeof a->parallel) == 0 &&
           memcmp(&a->workers, &b->workers, sizeof a->workers) == 0 &&
           strcmp(a->checkpoint.path, b->checkpoint.path) == 0 && a->checkpoint.kind == b->checkpoint.kind &&
           a->checkpoint.every == b->checkpoint.every && a->checkpoint.keep == b->checkpoint.keep &&
           a->checkpoint.keep_every == b->checkpoint.keep_every && a->eval.every == b->eval.every &&
           a->eval.sequences == b->eval.sequences && a->numerics == b->numerics && a->compute == b->compute &&
           a->seed == b->seed;
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
    if (a->kind == MU_CM_KEEP) {
        assert_int_equal(a->keep.piece_count, b->keep.piece_count);
        if (a->keep.piece_count)
            assert_memory_equal(a->keep.pieces, b->keep.pieces, a->keep.piece_count * sizeof *a->keep.pieces);
        a->keep.pieces = b->keep.pieces = NULL;
    }
    if (a->kind == MU_CM_FEED) {
        assert_memory_equal(a->feed.amendments, b->feed.amendments, sizeof *a->feed.amendments);
        a->feed.amendments = b->feed.amendments = NULL;
    }
    if (a->kind != MU_CM_ASSIGN)
        return;
    compare_assigns(&a->assign, &b->assign);
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

/* As many pieces as there may be, with names as long as workers give them. */
static void test_largest_keep_fits_its_limit(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_coord_message message = {.kind = MU_CM_KEEP}, decoded;
    struct mu_keep_order *keep = &message.keep;
    struct mu_written_piece *pieces = calloc(4096, sizeof *pieces);
    const void *data = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    keep->kind = MU_KEEP_PUBLISH;
    memset(keep->dir, '/', sizeof keep->dir - 1);
    keep->layout.tp = keep->layout.pp = 1;
    keep->layout.dp = keep->piece_count = 4096;
    keep->layout.stage_first[1] = 1;
    keep->pieces = pieces;
    for (uint32_t i = 0; i < keep->piece_count; i++) {
        pieces[i].size_bytes = 1ull << 40;
        pieces[i].checksum = (struct mu_hash128){UINT64_MAX, i};
        snprintf(pieces[i].file, sizeof pieces[i].file, "piece-%05u-of-%05u-g%016llx-%08x-h%016llx.safetensors", i,
                 4096u, UINT64_MAX + 0ull, UINT32_MAX, UINT64_MAX + 0ull);
    }
    assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_wire_decode_coord(&arena, data, size_bytes, &decoded, &err), MU_OK);
    assert_memory_equal(decoded.keep.pieces, pieces, 4096 * sizeof *pieces);
    mu_wire_arena_fini(&arena);
    free(pieces);
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
    some_layout(&assign->layout);
    assign->layout.tp = 1;
    assign->layout.pp = MU_STAGES_MAX / 2;
    assign->layout.dp = MU_COUNTED_REPLICAS_MAX;
    assign->layout.sharded = false;
    assign->layout.idle = assign->layout.buddy_shift = 0;
    for (uint16_t stage = 0; stage <= MU_STAGES_MAX / 2; stage++)
        assign->layout.stage_first[stage] = (uint16_t)(stage * 8);
    assign->rank = MU_COUNTED_REPLICAS_MAX * MU_STAGES_MAX / 2 - 1;
    assign->leaf_counts = pointed.counts;
    for (int i = 0; i < MU_COUNTED_REPLICAS_MAX; i++)
        pointed.counts[i] = 64;
    assign->peers = pointed.peers;
    assign->peer_count = MU_PEERS_MAX;
    for (uint32_t i = 0; i < MU_PEERS_MAX; i++) {
        memset(pointed.names[i], 'a', MU_WORKER_NAME_SIZE - 1);
        memset(pointed.addresses[i], 'a', MU_ADDRESS_SIZE - 1);
        pointed.peers[i] = (struct mu_peer){
            .rank = i + 60000, .incarnation = some_id(), .name = pointed.names[i], .address = pointed.addresses[i]};
    }
    assign->moves = pointed.moves;
    assign->move_count = MU_MOVES_MAX;
    for (uint32_t i = 0; i < MU_MOVES_MAX; i++)
        pointed.moves[i] = (struct mu_move){.from = assign->rank,
                                            .to = 60000 + i % MU_PEERS_MAX,
                                            .kinds = 3,
                                            .run = {.first = 1u << 30, .count = 1u << 30}};
    struct mu_coord_message decoded;
    const void *data = NULL;
    size_t size_bytes = 0;
    assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
    assert_true(size_bytes < MU_WIRE_COORD_BYTES_MAX);
    assert_int_equal(mu_wire_decode_coord(&arena, data, size_bytes, &decoded, &err), MU_OK);
    assert_int_equal(decoded.assign.move_count, MU_MOVES_MAX);
    mu_wire_arena_fini(&arena);
}

/* The Assign of each rank of a job whose workers all differ in speed, of which only the neighbours can differ. */
static size_t largest_assign(uint32_t workers)
{
    static uint32_t counts[MU_COUNTED_REPLICAS_MAX], ranks[MU_PEERS_MAX];
    static struct mu_balance_rank speeds[MU_COUNTED_REPLICAS_MAX], blocks[MU_COUNTED_REPLICAS_MAX];
    static struct mu_peer peers[MU_PEERS_MAX];
    struct mu_model_spec model;
    struct mu_job_spec spec;
    struct mu_wire_arena arena;
    struct mu_error err;
    size_t most = 0, size_bytes = 0;
    const void *data = NULL;
    mu_job_spec_init(&spec);
    spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 4, .heads = 8, .channels = 256, .context = 64, .vocab = 2048, .slices = 1};
    mu_model_config_resolve(&spec.model);
    mu_model_spec_init(&model, &spec.model);
    mu_wire_arena_init(&arena);
    for (uint32_t i = 0; i < workers && workers <= MU_COUNTED_REPLICAS_MAX; i++)
        speeds[i].seconds_per_leaf = 1 + (double)(i * 7919 % workers) / workers;
    if (workers <= MU_COUNTED_REPLICAS_MAX)
        mu_balance_leaves_in_runs(16 * workers, workers, speeds, MU_LEAF_RUNS_MAX, blocks, counts);
    for (uint32_t rank = 0; rank < workers; rank += 1 + workers / 500) {
        struct mu_coord_message message = {.kind = MU_CM_ASSIGN, .generation = 1000};
        struct mu_assign *assign = &message.assign;
        mu_layout_init(&assign->layout, workers, spec.model.layers);
        assign->rank = rank;
        assign->leaf_counts = workers <= MU_COUNTED_REPLICAS_MAX ? counts : NULL;
        assign->peer_count = mu_layout_neighbours(&model, &assign->layout, rank, ranks);
        assign->peers = peers;
        for (uint32_t i = 0; i < assign->peer_count; i++)
            peers[i] = (struct mu_peer){ranks[i], {1, rank}, "host-0000001", "10.100.100.100:40000"};
        assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
        most = size_bytes > most ? size_bytes : most;
        mu_wire_arena_reset(&arena);
    }
    mu_wire_arena_fini(&arena);
    return most;
}

static void test_assign_does_not_grow_with_the_number_of_workers(void **state)
{
    (void)state;
    const uint32_t worlds[] = {16, 1024, 16384};
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        size_t most = largest_assign(worlds[i]);
        print_message("%u workers: an Assign has at most %zu bytes\n", worlds[i], most);
        assert_in_range(most, 1, ASSIGN_BYTES);
    }
}

static void test_more_runs_of_leaf_counts_than_can_be_told_are_refused(void **state)
{
    (void)state;
    uint32_t counts[MU_LEAF_RUNS_MAX + 1];
    struct mu_coord_message message = {.kind = MU_CM_ASSIGN, .generation = 1};
    struct mu_wire_arena arena;
    struct mu_error err;
    const void *data = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    for (uint32_t i = 0; i < MU_LEAF_RUNS_MAX + 1; i++)
        counts[i] = 1 + i % 2;
    mu_layout_init(&message.assign.layout, MU_LEAF_RUNS_MAX, 2);
    message.assign.leaf_counts = counts;
    assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
    mu_layout_init(&message.assign.layout, MU_LEAF_RUNS_MAX + 1, 2);
    assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_ERR_LIMIT);
    assert_string_equal(err.text, "Assign.leaf_runs: more than 64 runs of equal leaf counts");
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
    assert_int_equal(spec.model.kv_heads, 2);
    assert_int_equal(spec.model.hidden, 4 * 32);
    assert_int_equal(spec.model.slices, 1);
    assert_true(spec.model.rope_base == 0);
    assert_int_equal(spec.parallel.tp + spec.parallel.pp + spec.parallel.dp, 0);
    assert_false(spec.parallel.optimizer_sharding);
    assert_int_equal(spec.parallel.recompute, MU_RECOMPUTE_NONE);
    assert_int_equal(spec.parallel.redundancy, MU_REDUNDANCY_NONE);
    pb.optimizer = &optimizer; /* given zeros differ from absent ones */
    optimizer.optional_clip_case = MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_CLIP_CLIP;
    pb.optional_seed_case = MUSTER__V1__JOB_SPEC__OPTIONAL_SEED_SEED;
    assert_int_equal(mu_wire_spec_from_pb(&pb, &spec, &err), MU_OK);
    assert_true(spec.optimizer.clip == 0 && spec.seed == 0 && spec.optimizer.beta2 == defaults.optimizer.beta2);
    batch.sequences = 7;
    assert_int_equal(mu_wire_spec_from_pb(&pb, &spec, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "batch.sequences"));
}

static void test_spec_of_llama_comes_through(void **state)
{
    (void)state;
    struct mu_error err = {0};
    struct mu_job_spec spec, back;
    good_spec(&spec);
    spec.data.tokens = MU_TOKENS_MEGATRON;
    strcpy(spec.init.path, "/models/llama");
    strcpy(spec.init.sha256, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef");
    spec.model = (struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                          .layers = 5,
                                          .heads = 8,
                                          .kv_heads = 4,
                                          .channels = 64,
                                          .hidden = 172,
                                          .context = 64,
                                          .vocab = 999,
                                          .rope_base = 5e5,
                                          .slices = 4};
    spec.batch.micro = 4;
    spec.batch.sequences = 4 * spec.batch.accumulate * 8;
    spec.workers.min = 1;
    spec.workers.max = 64;
    spec.parallel.tp = 2;
    spec.parallel.pp = 3;
    spec.parallel.dp = 8;
    spec.parallel.optimizer_sharding = true;
    spec.parallel.recompute = MU_RECOMPUTE_FULL;
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    Muster__V1__JobSpec *pb;
    assert_int_equal(mu_wire_spec_to_pb(&arena, &spec, &pb, &err), MU_OK);
    memset(&back, 0, sizeof back);
    if (mu_wire_spec_from_pb(pb, &back, &err))
        fail_msg("%s", err.text);
    assert_true(same_spec(&spec, &back));
    pb->init->sha256[0] = 'x';
    assert_int_equal(mu_wire_spec_from_pb(pb, &back, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "init.sha256"));
    pb->init->sha256[0] = '0';
    pb->parallel->recompute = (Muster__V1__Recompute)9;
    assert_int_equal(mu_wire_spec_from_pb(pb, &back, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "parallel.recompute"));
    pb->parallel->recompute = MUSTER__V1__RECOMPUTE__RECOMPUTE_NONE;
    pb->parallel->redundancy = (Muster__V1__Redundancy)9;
    assert_int_equal(mu_wire_spec_from_pb(pb, &back, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "parallel.redundancy"));
    mu_wire_arena_fini(&arena);
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
    for (int fault = 0; fault < 14; fault++) {
        do
            some_coord_message(&message, &pointed, MU_CM_ASSIGN);
        while (message.assign.layout.tp * message.assign.layout.pp * message.assign.layout.dp < 8);
        struct mu_assign *assign = &message.assign;
        uint32_t world = assign->layout.tp * assign->layout.pp * assign->layout.dp + assign->layout.idle;
        assign->rank = 5;
        assign->peers = pointed.peers;
        assign->peer_count = 2;
        assign->moves = pointed.moves;
        assign->move_count = 1;
        pointed.moves[0] = (struct mu_move){.from = 5, .to = 1, .kinds = 3, .run = {.first = 7, .count = 2}};
        assign->source = MU_SOURCE_HELD;
        for (uint32_t i = 0; i < 2; i++)
            pointed.peers[i] = (struct mu_peer){.rank = i, .incarnation = some_id(), .name = "w", .address = "a"};
        const char *text = "Peer.rank";
        if (fault == 0)
            pointed.peers[1].rank = 0; /* not ascending */
        else if (fault == 1)
            pointed.peers[1].rank = world;
        else if (fault == 2)
            pointed.peers[1].rank = 5; /* itself */
        else if (fault == 3)
            assign->rank = world, text = "Assign.rank";
        else if (fault == 4)
            assign->source = (enum mu_state_source)9, text = "Assign.source";
        else if (fault == 5)
            assign->source = MU_SOURCE_CHECKPOINT, strcpy(assign->checkpoint_dir, "relative"), text = "checkpoint_dir";
        else if (fault == 6)
            assign->start_step = MU_STEPS_MAX + 1, text = "start_step";
        else if (fault == 7)
            pointed.moves[0].to = 2, text = "Move"; /* not a peer */
        else if (fault == 8)
            pointed.moves[0].from = 0, text = "Move"; /* between others */
        else if (fault == 9)
            pointed.moves[0].to = 5, text = "Move"; /* to itself */
        else if (fault == 10)
            pointed.moves[0].kinds = 4, text = "Move";
        else if (fault == 11)
            pointed.moves[0].run.count = 0, text = "Move";
        else if (fault == 12)
            pointed.moves[0].run = (struct mu_chunk_run){.first = UINT32_MAX, .count = 1}, text = "Move";
        else
            assign->source = MU_SOURCE_INIT, text = "Assign.moves";
        assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
        assert_int_equal(mu_wire_decode_coord(&arena, data, size_bytes, &decoded, &err), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, text));
        mu_wire_arena_reset(&arena);
    }
    mu_wire_arena_fini(&arena);
}

static void damage_layout(Muster__V1__Layout *pb, uint32_t *firsts, int fault)
{
    switch (fault) {
    case 0:
        pb->tp = 0;
        break;
    case 1:
        pb->tp = 3;
        break;
    case 2:
        pb->tp = 128;
        break;
    case 3:
        pb->pp = 0, pb->n_stage_first = 1;
        break;
    case 4:
        pb->pp = UINT32_MAX; /* pp + 1 must not wrap to what is there */
        pb->n_stage_first = 0;
        break;
    case 5:
        pb->dp = 0;
        break;
    case 6:
        pb->dp = UINT32_MAX;
        break;
    case 7:
        pb->idle = UINT32_MAX;
        break;
    case 8:
        pb->sharded = true, pb->buddy_shift = 1, pb->dp = MU_MESH_WORLD_MAX + 1; /* nobody need be guarded */
        break;
    case 9:
        pb->n_stage_first--;
        break;
    case 10:
        firsts[0] = 1;
        break;
    case 11:
        firsts[1] = firsts[2];
        break;
    default:
        firsts[pb->pp] = 65536 + 1; /* would be 1 in 16 bits */
        break;
    }
}

/* Layouts that no job can have are refused on the way out and on the way in, wherever they stand. */
static void test_hostile_layouts_are_refused(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_layout good, layout;
    Muster__V1__Layout *pb = NULL;
    mu_wire_arena_init(&arena);
    do
        some_layout(&good);
    while (good.pp < 2);
    assert_int_equal(mu_wire_layout_to_pb(&arena, &good, "X.layout", &pb, &err), MU_OK);
    assert_int_equal(mu_wire_layout_from_pb(pb, "X.layout", &layout, &err), MU_OK);
    assert_memory_equal(&good, &layout, sizeof good);
    assert_int_equal(mu_wire_layout_from_pb(NULL, "X.layout", &layout, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "X.layout"));
    Muster__V1__Layout faulty;
    uint32_t firsts[MU_STAGES_MAX + 2];
    for (int fault = 0; fault < 13; fault++) {
        faulty = *pb;
        memcpy(firsts, pb->stage_first, pb->n_stage_first * sizeof *firsts);
        faulty.stage_first = firsts;
        damage_layout(&faulty, firsts, fault);
        assert_int_equal(mu_wire_layout_from_pb(&faulty, "X.layout", &layout, &err), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, "X.layout"));
    }
    layout = good;
    layout.tp = 6;
    assert_int_equal(mu_wire_layout_to_pb(&arena, &layout, "X.layout", &pb, &err), MU_ERR_INVALID);
    layout = good;
    layout.pp = MU_STAGES_MAX + 1;
    assert_int_equal(mu_wire_layout_to_pb(&arena, &layout, "X.layout", &pb, &err), MU_ERR_INVALID);
    mu_wire_arena_fini(&arena);
}

static void test_held_shares_must_agree_with_the_state(void **state)
{
    (void)state;
    struct good_hello good;
    Muster__V1__Held held = MUSTER__V1__HELD__INIT;
    Muster__V1__HeldShare shares[MU_HELD_SHARES_MAX + 1], *pointers[MU_HELD_SHARES_MAX + 1];
    Muster__V1__Layout layout = MUSTER__V1__LAYOUT__INIT;
    Muster__V1__IdentityPart part = MUSTER__V1__IDENTITY_PART__INIT, *parts[MU_IDENTITY_PARTS_MAX + 1];
    uint32_t firsts[] = {0, 2};
    struct mu_error err;
    layout.tp = layout.pp = 1, layout.dp = 4;
    layout.n_stage_first = 2, layout.stage_first = firsts;
    for (int i = 0; i <= MU_HELD_SHARES_MAX; i++) {
        pointers[i] = &shares[i];
        muster__v1__held_share__init(&shares[i]);
        shares[i].layout = &layout;
        shares[i].rank = 3;
    }
    make_good_hello(&good);
    held.has_state = true;
    held.n_shares = MU_HELD_SHARES_MAX, held.shares = pointers;
    good.status.held = &held;
    assert_int_equal(decode_hello_with(&good.hello, &err), MU_OK);
    held.n_shares = MU_HELD_SHARES_MAX + 1;
    expect_refused(&good, "Held.shares");
    good.status.held = &held;
    held.n_shares = 0;
    expect_refused(&good, "Held.shares");
    good.status.held = &held;
    held.has_state = false, held.n_shares = 1;
    expect_refused(&good, "Held.shares");
    good.status.held = &held;
    held.has_state = true, shares[0].rank = 4;
    expect_refused(&good, "HeldShare.rank");
    good.status.held = &held;
    shares[0].rank = 3, shares[0].layout = NULL;
    expect_refused(&good, "HeldShare.layout");
    for (size_t i = 0; i <= MU_IDENTITY_PARTS_MAX; i++)
        parts[i] = &part;
    part.kernel = "Gemm";
    good.hello.n_identity_parts = 1, good.hello.identity_parts = parts;
    expect_refused(&good, "IdentityPart.kernel");
    part.kernel = "a_name_of_24_characters_";
    good.hello.n_identity_parts = 1, good.hello.identity_parts = parts;
    expect_refused(&good, "IdentityPart.kernel");
    part.kernel = "gemm";
    good.hello.n_identity_parts = MU_IDENTITY_PARTS_MAX + 1, good.hello.identity_parts = parts;
    assert_int_equal(decode_hello_with(&good.hello, &err), MU_ERR_LIMIT);
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
        cmocka_unit_test(test_largest_keep_fits_its_limit),
        cmocka_unit_test(test_largest_assign_fits_its_limit),
        cmocka_unit_test(test_assign_does_not_grow_with_the_number_of_workers),
        cmocka_unit_test(test_more_runs_of_leaf_counts_than_can_be_told_are_refused),
        cmocka_unit_test(test_spec_with_absent_fields_gets_defaults),
        cmocka_unit_test(test_spec_of_llama_comes_through),
        cmocka_unit_test(test_hello_with_bad_field_is_refused_by_name),
        cmocka_unit_test(test_hello_of_other_protocol_version_is_decoded_as_far_as_the_version),
        cmocka_unit_test(test_malformed_bytes_are_refused),
        cmocka_unit_test(test_flood_of_unknown_fields_and_oversize_are_refused),
        cmocka_unit_test(test_some_unknown_fields_of_a_later_version_are_accepted),
        cmocka_unit_test(test_free_text_is_cleaned_when_encoded_and_names_are_not),
        cmocka_unit_test(test_coordinator_message_out_of_range_is_refused),
        cmocka_unit_test(test_hostile_layouts_are_refused),
        cmocka_unit_test(test_held_shares_must_agree_with_the_state),
        cmocka_unit_test(test_arena_keeps_its_memory_between_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
