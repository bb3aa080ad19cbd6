/* links: mu_coordinator */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/rng.h"
#include "coordinator/records.h"

enum { MEMBERS = 3, PIECES = 4, HOLDERS = 3, MUTATIONS = 20000 };

struct samples {
    struct mu_job_record job;
    struct mu_member_record members[MEMBERS];
    struct mu_generation_record generation;
    struct mu_piece_record pieces[PIECES];
    struct mu_holder_record holders[HOLDERS];
    struct mu_checkpoint_record checkpoint;
    struct mu_worker_record worker;
    struct mu_tally_record tally;
    struct mu_account_record account;
    struct mu_death_record death;
    struct mu_node_record node;
    struct mu_request_record request;
    struct mu_event_record event;
};

static struct samples samples;

static void make_job(struct mu_job_record *job)
{
    mu_job_spec_init(&job->spec);
    strcpy(job->spec.name, "kjv");
    job->spec.model = (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                               .layers = 2,
                                               .heads = 2,
                                               .channels = 32,
                                               .context = 16,
                                               .vocab = 256,
                                               .dropout = 0.25f};
    mu_model_config_resolve(&job->spec.model);
    strcpy(job->spec.data.path, "/data/k\xc3\xb6nig.txt");
    job->spec.batch.sequences = 16, job->spec.batch.micro = 2, job->spec.batch.length = 16;
    job->spec.steps = 1000;
    strcpy(job->spec.checkpoint.path, "/ckpt");
    job->uid = (struct mu_id){0x0123456789abcdef, 0xfedcba9876543210};
    job->revision = 41;
    job->submitted_workers = (struct mu_worker_policy){2, 7, 1};
    job->state = MU_JOB_RUNNING;
    job->generation = UINT64_MAX - 5;
    job->next_checkpoint = 7;
    job->checkpoint_seen = job->preflight = true;
    job->command =
        (struct mu_command_record){.number = 9, .kind = MU_COMMAND_PARK, .not_before_step = 77, .open = true};
    job->steps_done = 123;
    job->created_wall_us = 1700000000000000;
    job->ended_wall_us = 1700000000000001;
    memset(job->weights_sha256, 0xa5, sizeof job->weights_sha256);
    job->identity_set = true;
    job->numeric_identity = (struct mu_hash128){1, 2};
    job->data_hash = (struct mu_hash128){3, 4};
    job->identity_parts.count = 2;
    strcpy(job->identity_parts.parts[0].name, "gemm");
    job->identity_parts.parts[0].hash = UINT64_MAX;
    strcpy(job->identity_parts.parts[1].name, "cross_entropy");
    strcpy(job->text, "why");
    strcpy(job->origin.job, "before");
    job->origin.uid = (struct mu_id){0x77, UINT64_MAX};
    job->origin.checkpoint = 3, job->origin.step = 300;
    job->origin.rebased = true;
    job->origin.rebased_from = (struct mu_hash128){5, UINT64_MAX - 6};
    strcpy(job->origin.rebased_by, "operator anna");
}

static void make_samples(void)
{
    memset(&samples, 0, sizeof samples);
    struct mu_job_record *job = &samples.job;
    make_job(job);
    for (uint32_t i = 0; i < MEMBERS; i++) {
        strcpy(samples.members[i].name, i == 0 ? "w0" : i == 1 ? "host-7.a" : "w2");
        samples.members[i].incarnation = (struct mu_id){i + 1, 99};
        strcpy(samples.members[i].address, "10.0.0.1:4711");
        samples.members[i].leaf_count = i + 2;
    }
    samples.generation = (struct mu_generation_record){.job_uid = job->uid,
                                                       .job = "kjv",
                                                       .generation = 12,
                                                       .go = true,
                                                       .equal_leaves = false,
                                                       .start_step = 100,
                                                       .command_base = 8,
                                                       .world = MEMBERS,
                                                       .members = samples.members};
    samples.generation.layout.tp = samples.generation.layout.dp = samples.generation.layout.idle = 1;
    samples.generation.layout.pp = 2;
    samples.generation.layout.sharded = true;
    samples.generation.layout.stage_first[1] = 1;
    samples.generation.layout.stage_first[2] = 2;
    memset(samples.generation.secret, 0x5a, 32);

    for (uint32_t i = 0; i < PIECES; i++) {
        samples.pieces[i].writer = (struct mu_id){i + 1, 98};
        strcpy(samples.pieces[i].writer_name, "w1");
        samples.pieces[i].done = i % 2;
        samples.pieces[i].reassigned = i == 2;
        samples.pieces[i].size_bytes = 1000 * i;
        samples.pieces[i].checksum = (struct mu_hash128){i, i + 1};
        strcpy(samples.pieces[i].file, "piece-00001-of-00004.safetensors");
    }
    samples.checkpoint = (struct mu_checkpoint_record){.verified = true,
                                                       .job_uid = job->uid,
                                                       .job = "kjv",
                                                       .number = 6,
                                                       .nonce = {55, 66},
                                                       .step = 120,
                                                       .generation = 12,
                                                       .command = 9,
                                                       .not_before_step = 118,
                                                       .state = MU_CKPT_COMMITTED,
                                                       .ordered_wall_us = 4,
                                                       .wall_us = 5,
                                                       .size_bytes = 123456789012,
                                                       .dir = "/ckpt/x",
                                                       .text = "bad because",
                                                       .attempt = 2,
                                                       .piece_count = PIECES,
                                                       .pieces = samples.pieces};
    samples.checkpoint.holders = samples.holders;
    samples.checkpoint.holder_count = HOLDERS;
    for (uint32_t i = 0; i < HOLDERS; i++)
        snprintf(samples.holders[i].host, sizeof samples.holders[i].host, "host-%u", i);
    samples.checkpoint.layout.tp = 2;
    samples.checkpoint.layout.pp = 1;
    samples.checkpoint.layout.dp = 2;
    samples.checkpoint.layout.stage_first[1] = 2;
    samples.worker = (struct mu_worker_record){
        .name = "w9", .quarantined = true, .draining = true, .reason = "crashed 6 times", .host = "node7"};
    samples.checkpoint.unprepared = 2;
    samples.checkpoint.failed_generation = 11;
    samples.tally = (struct mu_tally_record){
        .job_uid = {5, 6},
        .job = "kjv",
        .workers_lost = 7,
        .generations = 9,
        .replayed_steps = 31,
        .replay_until = 130,
        .suspect = 3,
        .suspect_step = 100,
        .unfinite_reports = 4,
        .interval = {120, 110, 900, 123456789, 0.25, 1.5, 3600, 0.125, -0.5, 0.75, "120 s; one delays by 0.250 s"},
        .prediction_told = 11,
        .hung_count = 2,
        .hung = {{1, 2}, {3, 4}},
        .demoted_count = MU_DEMOTED_KEPT};
    for (uint64_t i = 0; i < MU_DEMOTED_KEPT; i++)
        samples.tally.demoted[i] = (struct mu_id){i + 1, i};
    samples.node = (struct mu_node_record){.name = "Node 7",
                                           .order = MU_NODE_DRAIN,
                                           .reason = "new fan",
                                           .by = "muster://operator/alice",
                                           .since_wall_us = 5,
                                           .deadline_wall_us = 6};
    samples.death =
        (struct mu_death_record){.number = 4100, .name_hash = 0xabcdef01, .wall_us = 1234567, .incarnation = {7, 8}};
    samples.request = (struct mu_request_record){
        .number = 4097, .id = {9, 8}, .body = {7, 6}, .job_uid = {5, 4}, .checkpoint = 12, .existed = true};
    samples.account = (struct mu_account_record){.job_uid = {5, 6},
                                                 .job = "kjv",
                                                 .worker = "w2",
                                                 .open = true,
                                                 .now = MU_TIME_DOWN,
                                                 .began_wall_us = 11,
                                                 .wall_us = 2000000,
                                                 .mono_us = 77};
    for (uint64_t i = 0; i < MU_TIME_CLASS_COUNT; i++)
        samples.account.us[i] = i * i << 30;
    samples.event = (struct mu_event_record){.number = 42,
                                             .wall_us = 17,
                                             .severity = MU_EVENT_WARNING,
                                             .kind = "worker_lost",
                                             .job = "kjv",
                                             .worker = "w2",
                                             .generation = 12,
                                             .step = 118,
                                             .text = "worker w2 lost"};
}

static struct mu_record record_of(enum mu_record_kind kind)
{
    struct mu_record record = {.kind = kind};
    switch (kind) {
    case MU_RECORD_JOB:
        record.job = &samples.job;
        break;
    case MU_RECORD_GENERATION:
        record.generation = &samples.generation;
        break;
    case MU_RECORD_CHECKPOINT:
        record.checkpoint = &samples.checkpoint;
        break;
    case MU_RECORD_WORKER:
        record.worker = &samples.worker;
        break;
    case MU_RECORD_TALLY:
        record.tally = &samples.tally;
        break;
    case MU_RECORD_DEATH:
        record.death = &samples.death;
        break;
    case MU_RECORD_NODE:
        record.node = &samples.node;
        break;
    case MU_RECORD_REQUEST:
        record.request = &samples.request;
        break;
    case MU_RECORD_ACCOUNT:
        record.account = &samples.account;
        break;
    case MU_RECORD_EVENT:
        record.event = &samples.event;
        break;
    case MU_RECORD_KIND_COUNT:
        break;
    }
    return record;
}

static void expect_same(const struct mu_record *record)
{
    switch (record->kind) {
    case MU_RECORD_JOB:
        assert_memory_equal(record->job, &samples.job, sizeof samples.job);
        break;
    case MU_RECORD_GENERATION: {
        struct mu_generation_record copy = *record->generation;
        assert_memory_equal(copy.members, samples.members, sizeof samples.members);
        copy.members = samples.members;
        assert_memory_equal(&copy, &samples.generation, sizeof copy);
        break;
    }
    case MU_RECORD_CHECKPOINT: {
        struct mu_checkpoint_record copy = *record->checkpoint;
        assert_memory_equal(copy.pieces, samples.pieces, sizeof samples.pieces);
        copy.pieces = samples.pieces;
        assert_int_equal(copy.holder_count, HOLDERS);
        for (uint32_t i = 0; i < HOLDERS; i++)
            assert_string_equal(copy.holders[i].host, samples.holders[i].host);
        copy.holders = samples.holders;
        assert_memory_equal(&copy, &samples.checkpoint, sizeof copy);
        break;
    }
    case MU_RECORD_WORKER:
        assert_memory_equal(record->worker, &samples.worker, sizeof samples.worker);
        break;
    case MU_RECORD_TALLY:
        assert_memory_equal(record->tally, &samples.tally, sizeof samples.tally);
        break;
    case MU_RECORD_DEATH:
        assert_memory_equal(record->death, &samples.death, sizeof samples.death);
        break;
    case MU_RECORD_NODE:
        assert_memory_equal(record->node, &samples.node, sizeof samples.node);
        break;
    case MU_RECORD_REQUEST:
        assert_memory_equal(record->request, &samples.request, sizeof samples.request);
        break;
    case MU_RECORD_ACCOUNT:
        assert_memory_equal(record->account, &samples.account, sizeof samples.account);
        break;
    case MU_RECORD_EVENT:
        assert_memory_equal(record->event, &samples.event, sizeof samples.event);
        break;
    case MU_RECORD_KIND_COUNT:
        fail();
    }
}

/* ---- store ---- */

static void put(struct mu_store *store, const struct mu_record *record)
{
    struct mu_wire_arena arena;
    struct mu_store_batch batch;
    struct mu_error err;
    uint8_t key[MU_RECORD_KEY_SIZE];
    const void *data = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    mu_store_batch_init(&batch);
    assert_int_equal(mu_record_encode(&arena, record, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_store_batch_put(&batch, key, mu_record_key(record, key), data, size_bytes), MU_OK);
    assert_int_equal(mu_store_write(store, &batch, &err), MU_OK);
    mu_store_batch_fini(&batch);
    mu_wire_arena_fini(&arena);
}

static void put_raw(struct mu_store *store, const char *key, const void *data, size_t size_bytes)
{
    struct mu_store_batch batch;
    struct mu_error err;
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, key, strlen(key), data, size_bytes), MU_OK);
    assert_int_equal(mu_store_write(store, &batch, &err), MU_OK);
    mu_store_batch_fini(&batch);
}

struct seen {
    unsigned count;
    enum mu_record_kind kinds[64];
    uint64_t numbers[64];
    bool compare;
};

static enum mu_status note(void *arg, const struct mu_record *record, struct mu_error *err)
{
    struct seen *seen = arg;
    (void)err;
    assert_true(seen->count < 64);
    seen->kinds[seen->count] = record->kind;
    seen->numbers[seen->count++] = record->kind == MU_RECORD_EVENT        ? record->event->number
                                   : record->kind == MU_RECORD_CHECKPOINT ? record->checkpoint->number
                                                                          : 0;
    if (seen->compare)
        expect_same(record);
    return MU_OK;
}

static void test_every_kind_survives_the_store_jobs_first(void **state)
{
    (void)state;
    struct mu_store *store = mu_store_memory_new();
    struct mu_error err;
    struct seen seen = {.compare = true};
    make_samples();
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_OK); /* marks it as ours */
    assert_int_equal(seen.count, 0);
    for (int kind = MU_RECORD_KIND_COUNT - 1; kind >= 0; kind--) {
        struct mu_record record = record_of((enum mu_record_kind)kind);
        put(store, &record);
    }
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_OK);
    assert_int_equal(seen.count, MU_RECORD_KIND_COUNT);
    for (unsigned i = 0; i < seen.count; i++)
        assert_int_equal(seen.kinds[i], i);
    mu_store_free(store);
}

static void test_numbers_come_back_in_order(void **state)
{
    (void)state;
    static const uint64_t numbers[] = {1, 2, 255, 256, 65535, 65536, 1ull << 40, UINT64_MAX};
    struct mu_store *store = mu_store_memory_new();
    struct mu_error err;
    struct seen seen = {0};
    make_samples();
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_OK);
    for (size_t i = sizeof numbers / sizeof numbers[0]; i-- > 0;) {
        samples.event.number = numbers[i];
        struct mu_record record = record_of(MU_RECORD_EVENT);
        put(store, &record);
        samples.checkpoint.number = numbers[i];
        record = record_of(MU_RECORD_CHECKPOINT);
        put(store, &record);
    }
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_OK);
    assert_int_equal(seen.count, 16);
    for (size_t i = 0; i < 8; i++) {
        assert_true(seen.numbers[i] == numbers[i]);
        assert_true(seen.numbers[8 + i] == numbers[i]);
    }
    mu_store_free(store);
}

static void test_foreign_or_newer_database_is_refused(void **state)
{
    (void)state;
    struct mu_error err;
    struct seen seen = {0};
    struct mu_store *store = mu_store_memory_new();
    put_raw(store, "something", "else", 4);
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "not a coordinator's"));
    mu_store_free(store);
    store = mu_store_memory_new();
    put_raw(store, "m/format", "muster 6", 8);
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_ERR_CORRUPT);
    assert_string_equal(err.text, "data directory: its format is 'muster 6', this program reads 'muster 1' to "
                                  "'muster 5'; use the version that wrote it");
    mu_store_free(store);
}

/* From then on, programs that do not know its new records refuse it. */
static void test_older_store_is_read_and_raised(void **state)
{
    (void)state;
    struct mu_error err;
    struct seen seen = {0};
    struct mu_store *store = mu_store_memory_new();
    uint8_t *value = NULL;
    size_t value_bytes = 0;
    make_samples();
    put_raw(store, "m/format", "muster 1", 8);
    struct mu_record record = record_of(MU_RECORD_JOB);
    put(store, &record);
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_OK);
    assert_int_equal(seen.count, 1);
    assert_int_equal(mu_store_get(store, "m/format", 8, &value, &value_bytes, &err), MU_OK);
    assert_int_equal(value_bytes, 8);
    assert_memory_equal(value, "muster 5", 8);
    free(value);
    mu_store_free(store);
}

static void test_damaged_record_is_named_by_its_key(void **state)
{
    (void)state;
    struct mu_error err;
    struct seen seen = {0};
    struct mu_store *store = mu_store_memory_new();
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_OK);
    put_raw(store, "j/kjv", "\x08\x01\x12\x7f", 4);
    assert_int_equal(mu_records_load(store, note, &seen, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "j/kjv"));
    mu_store_free(store);
}

static void test_record_under_another_key_is_refused(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_record record, decoded;
    uint8_t key[MU_RECORD_KEY_SIZE];
    const void *data = NULL;
    size_t size_bytes = 0;
    make_samples();
    mu_wire_arena_init(&arena);
    record = record_of(MU_RECORD_WORKER);
    size_t key_bytes = mu_record_key(&record, key);
    assert_int_equal(mu_record_encode(&arena, &record, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_record_decode(&arena, key, key_bytes, data, size_bytes, &decoded, &err), MU_OK);
    key[key_bytes - 1] = '8';
    assert_int_equal(mu_record_decode(&arena, key, key_bytes, data, size_bytes, &decoded, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "another key"));
    mu_wire_arena_fini(&arena);
}

static void test_newer_record_version_is_refused(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_record decoded;
    static const uint8_t newer[] = {0x08, 0x02, 0x2a, 0x04, 0x0a, 0x02, 'w', '9'};
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_record_decode(&arena, "w/w9", 4, newer, sizeof newer, &decoded, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "version 2"));
    mu_wire_arena_fini(&arena);
}

static void test_mutated_records_are_refused_or_consistent(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    uint64_t seed = 7;
    unsigned refused = 0;
    make_samples();
    mu_wire_arena_init(&arena);
    for (int i = 0; i < MUTATIONS; i++) {
        struct mu_error err = {0};
        struct mu_record record = record_of((enum mu_record_kind)(i % MU_RECORD_KIND_COUNT)), decoded;
        uint8_t key[MU_RECORD_KEY_SIZE];
        const void *data = NULL;
        size_t size_bytes = 0, key_bytes = mu_record_key(&record, key);
        assert_int_equal(mu_record_encode(&arena, &record, &data, &size_bytes, &err), MU_OK);
        size_t kept_bytes = mu_splitmix64(&seed) % 4 ? size_bytes : (size_t)(mu_splitmix64(&seed) % size_bytes);
        uint8_t *copy = malloc(kept_bytes + 1);
        memcpy(copy, data, kept_bytes);
        if (kept_bytes)
            copy[mu_splitmix64(&seed) % kept_bytes] = (uint8_t)mu_splitmix64(&seed);
        if (mu_record_decode(&arena, key, key_bytes, copy, kept_bytes, &decoded, &err) == MU_OK)
            assert_int_equal(mu_record_encode(&arena, &decoded, &data, &size_bytes, &err), MU_OK);
        else
            refused++, assert_true(err.text[0] && mu_wire_text_ok(err.text, sizeof err.text));
        free(copy);
        mu_wire_arena_reset(&arena);
    }
    assert_true(refused > MUTATIONS / 10);
    mu_wire_arena_fini(&arena);
}

/* A generation as it was written before there were layouts: no layout, and `mesh` in field 5. */
static void test_record_without_layout_is_read(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_record decoded;
    static const uint8_t old[] = {0x08, 0x01, 0x1a, 0x18, 0x12, 0x03, 'k',  'j',  'v',  0x18, 0x07, 0x28, 0x01, 0x52,
                                  0x06, 0x0a, 0x02, 'w',  '0',  0x20, 0x03, 0x52, 0x05, 0x0a, 0x03, 'w',  '1',  '0'};
    mu_wire_arena_init(&arena);
    if (mu_record_decode(&arena, "g/kjv", 5, old, sizeof old, &decoded, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_int_equal(decoded.generation->world, 2);
    assert_int_equal(decoded.generation->generation, 7);
    assert_int_equal(decoded.generation->layout.dp, 0); /* for the core to fill in */
    assert_int_equal(decoded.generation->members[0].leaf_count, 3);
    mu_wire_arena_fini(&arena);
}

static void test_generation_whose_members_do_not_fit_its_layout_is_refused(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_record record, decoded;
    uint8_t key[MU_RECORD_KEY_SIZE];
    const void *data = NULL;
    size_t size_bytes = 0;
    make_samples();
    samples.generation.layout.idle = 2;
    mu_wire_arena_init(&arena);
    record = record_of(MU_RECORD_GENERATION);
    size_t key_bytes = mu_record_key(&record, key);
    assert_int_equal(mu_record_encode(&arena, &record, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_record_decode(&arena, key, key_bytes, data, size_bytes, &decoded, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "GenerationRecord.members"));
    mu_wire_arena_fini(&arena);
}

static void test_large_generation_fits_a_value(void **state)
{
    (void)state;
    enum { WORLD = 16384 };
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_record decoded;
    uint8_t key[MU_RECORD_KEY_SIZE];
    const void *data = NULL;
    size_t size_bytes = 0;
    make_samples();
    struct mu_member_record *members = calloc(WORLD, sizeof *members);
    for (uint32_t i = 0; i < WORLD; i++) {
        members[i] = samples.members[1];
        members[i].incarnation.high = i + 1;
    }
    samples.generation.world = WORLD;
    samples.generation.layout.pp = 1;
    samples.generation.layout.tp = 2;
    samples.generation.layout.dp = WORLD / 2;
    samples.generation.layout.sharded = false;
    samples.generation.layout.idle = 0;
    samples.generation.members = members;
    struct mu_record record = record_of(MU_RECORD_GENERATION);
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_record_encode(&arena, &record, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_record_decode(&arena, key, mu_record_key(&record, key), data, size_bytes, &decoded, &err),
                     MU_OK);
    assert_int_equal(decoded.generation->world, WORLD);
    assert_memory_equal(decoded.generation->members, members, WORLD * sizeof *members);
    mu_wire_arena_fini(&arena);
    free(members);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_kind_survives_the_store_jobs_first),
        cmocka_unit_test(test_numbers_come_back_in_order),
        cmocka_unit_test(test_foreign_or_newer_database_is_refused),
        cmocka_unit_test(test_older_store_is_read_and_raised),
        cmocka_unit_test(test_damaged_record_is_named_by_its_key),
        cmocka_unit_test(test_record_under_another_key_is_refused),
        cmocka_unit_test(test_newer_record_version_is_refused),
        cmocka_unit_test(test_mutated_records_are_refused_or_consistent),
        cmocka_unit_test(test_record_without_layout_is_read),
        cmocka_unit_test(test_generation_whose_members_do_not_fit_its_layout_is_refused),
        cmocka_unit_test(test_large_generation_fits_a_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
