/* links: mu_state */
#include "storage_testing.h"

#include <pthread.h>

#include "common/rng.h"
#include "storage/catalog.h"
#include "storage/manifest.h"
#include "tests/lib/sanitized.h"
#include "worker/load.h"
#include "worker/snapshot.h"

/* ---- a state, and the layouts that hold it ---- */

enum { MODELS = 3, PATIENCE_S = 120 };

static const struct mu_model_config models[MODELS] = {
    {.family = MU_FAMILY_GPT2, .layers = 3, .heads = 4, .channels = 96, .context = 32, .vocab = 259, .slices = 1},
    {.family = MU_FAMILY_GPT2, .layers = 4, .heads = 4, .channels = 128, .context = 16, .vocab = 1030, .slices = 4},
    {.family = MU_FAMILY_LLAMA,
     .layers = 4,
     .heads = 4,
     .kv_heads = 2,
     .channels = 128,
     .hidden = 352,
     .context = 16,
     .vocab = 1030,
     .rope_base = 10000,
     .slices = 2},
};

static struct mu_layout layout_of(uint32_t tp, uint32_t pp, uint32_t dp, bool sharded, uint32_t layers)
{
    struct mu_layout layout = {.tp = tp, .pp = pp, .dp = dp, .sharded = sharded, .idle = 1};
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(p == pp ? layers : p * layers / pp);
    return layout;
}

struct fixture {
    struct scratch scratch;
    char dir[512];
    struct mu_model_spec model;
    float *truth[3];
    struct mu_pool *pool;
    struct mu_snapshots *snapshots;
    pthread_mutex_t lock;
    pthread_cond_t told;
    struct mu_piece_report report; /* the last one */
    uint64_t generation;
    uint32_t reports;
};

static void on_done(void *ctx, uint64_t generation, const struct mu_piece_report *report)
{
    struct fixture *f = ctx;
    pthread_mutex_lock(&f->lock);
    f->report = *report;
    f->generation = generation;
    f->reports++;
    pthread_cond_signal(&f->told);
    pthread_mutex_unlock(&f->lock);
}

static struct fixture *fixture_new(int model)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct mu_error err;
    char name[MU_CATALOG_NAME_SIZE];
    f->scratch = scratch_make();
    mu_catalog_name(5, 8, (struct mu_id){3, 4}, name);
    path_join(f->dir, f->scratch.path, name);
    mu_model_spec_init(&f->model, &models[model]);
    uint64_t random = 21;
    for (int kind = 0; kind < 3; kind++) {
        f->truth[kind] = calloc(f->model.flat_size, sizeof(float));
        for (uint32_t chunk = 0; chunk < f->model.chunk_count; chunk++) {
            struct mu_chunk at = mu_model_chunk(&f->model, chunk);
            for (uint64_t i = 0; i < at.size; i++)
                f->truth[kind][at.offset + i] = (float)(mu_splitmix64(&random) >> 44);
        }
    }
    assert_ok(mu_pool_new(2, &err, &f->pool), &err);
    assert_ok(mu_snapshots_new(NULL, on_done, f, &f->snapshots, &err), &err);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->told, NULL);
    return f;
}

static void fixture_free(struct fixture *f)
{
    mu_snapshots_free(f->snapshots);
    mu_pool_free(f->pool);
    for (int kind = 0; kind < 3; kind++)
        free(f->truth[kind]);
    scratch_remove(&f->scratch);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->told);
    free(f);
}

static struct mu_piece_report wait_report(struct fixture *f, uint32_t reports)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&f->lock);
    while (f->reports < reports) {
        if (pthread_cond_timedwait(&f->told, &f->lock, &until) != 0)
            fail_msg("no report in time");
    }
    struct mu_piece_report report = f->report;
    pthread_mutex_unlock(&f->lock);
    for (int i = 0; i < PATIENCE_S * 1000 && mu_snapshots_busy(f->snapshots); i++)
        usleep(1000);
    return report;
}

/* What a rank would have in memory: the truth where its share is, garbage elsewhere. */
static void fill_share(const struct fixture *f, const struct mu_held_share *share, float *const flats[3], uint8_t rest)
{
    static struct mu_chunk_run runs[MU_RUNS_MAX];
    for (int kind = 0; kind < 3; kind++) {
        enum mu_share which = kind > 0 ? MU_SHARE_MOMENTS : share->owned_only ? MU_SHARE_OWNED : MU_SHARE_PARAMS;
        memset(flats[kind], rest, f->model.flat_size * sizeof(float));
        uint32_t count = mu_layout_runs(&f->model, &share->layout, share->rank, which, runs);
        for (uint32_t i = 0; i < count; i++) {
            for (uint32_t k = 0; k < runs[i].count; k++) {
                struct mu_chunk at = mu_model_chunk(&f->model, runs[i].first + k);
                memcpy(flats[kind] + at.offset, f->truth[kind] + at.offset, at.size * sizeof(float));
            }
        }
    }
}

static void flats_new(const struct fixture *f, float *flats[3])
{
    for (int kind = 0; kind < 3; kind++)
        flats[kind] = malloc(f->model.flat_size * sizeof(float));
}

static void flats_free(float *flats[3])
{
    for (int kind = 0; kind < 3; kind++)
        free(flats[kind]);
}

static struct mu_snapshot_state state_of(const struct fixture *f, float *const flats[3],
                                         const struct mu_held_share *shares, uint32_t share_count)
{
    return (struct mu_snapshot_state){.model = &f->model,
                                      .params = flats[0],
                                      .m = flats[1],
                                      .v = flats[2],
                                      .shares = shares,
                                      .share_count = share_count,
                                      .job = "kjv",
                                      .step = 8,
                                      .generation = 2};
}

static struct mu_snapshot snapshot_of(const struct fixture *f, const struct mu_layout *layout, uint32_t piece)
{
    struct mu_snapshot snapshot = {.checkpoint = 5, .piece = piece, .layout = *layout};
    snprintf(snapshot.dir, sizeof snapshot.dir, "%s", f->dir);
    return snapshot;
}

static struct mu_manifest *new_manifest(const struct fixture *f)
{
    struct mu_manifest *manifest = mu_manifest_new();
    assert_non_null(manifest);
    strcpy(manifest->identity.job, "kjv");
    manifest->identity.seq = 5;
    manifest->identity.step = 8;
    manifest->identity.generation = 2;
    manifest->nonce = (struct mu_id){3, 4};
    manifest->chunk_count = f->model.chunk_count;
    strcpy(manifest->numeric_identity, "test");
    assert_int_equal(mu_manifest_set_job_record(manifest, "{}"), MU_OK);
    return manifest;
}

/* Every rank of the layout writes its piece from no more than its share; the manifest proves that they tile the model.
 */
static void write_checkpoint(struct fixture *f, const struct mu_layout *layout)
{
    struct mu_error err;
    float *flats[3];
    flats_new(f, flats);
    struct mu_manifest *manifest = new_manifest(f);
    struct mu_chunk_run *runs = calloc(MU_RUNS_MAX, sizeof *runs);
    for (uint32_t rank = 0; rank < mu_layout_working(layout); rank++) {
        /* After a sharded update parameters of others may still be on their way: owned ones are enough. */
        struct mu_held_share share = {.layout = *layout, .rank = rank, .owned_only = layout->sharded};
        fill_share(f, &share, flats, 0x77);
        struct mu_snapshot_state state = state_of(f, flats, &share, 1);
        struct mu_snapshot snapshot = snapshot_of(f, layout, rank);
        uint32_t before = f->reports;
        uint64_t bytes = mu_snapshots_piece_bytes(&f->model, layout, rank);
        uint64_t growth = mu_snapshots_growth_bytes(f->snapshots, bytes);
        assert_true(growth <= bytes);
        if (rank % 2 == 0) { /* the other ones grow in take */
            assert_ok(mu_snapshots_reserve(f->snapshots, bytes, &err), &err);
            assert_int_equal(mu_snapshots_growth_bytes(f->snapshots, bytes), 0);
        }
        mu_snapshots_take(f->snapshots, f->pool, &state, &snapshot);
        memset(flats[0], 0, f->model.flat_size * sizeof(float)); /* the copy is what is written */
        struct mu_piece_report report = wait_report(f, before + 1);
        if (report.status != MU_OK)
            fail_msg("piece %u: %s", rank, report.text);
        assert_true(report.piece == rank && report.checkpoint == 5 && report.step == 8 && f->generation == 2);
        uint32_t count = mu_layout_runs(&f->model, layout, rank, MU_SHARE_PRIMARY, runs);
        if (count == 0) {
            assert_true(bytes == 0 && report.size_bytes == 0 && report.file[0] == 0);
            continue;
        }
        assert_true(bytes > 0 && report.size_bytes > bytes);
        assert_int_equal(
            mu_manifest_add_runs(manifest, &f->model, report.file, report.size_bytes, report.checksum, runs, count),
            MU_OK);
    }
    assert_ok(mu_manifest_check_tiling(manifest, &f->model, &err), &err);
    assert_ok(mu_manifest_write(f->dir, manifest, &err), &err);
    assert_ok(mu_checkpoint_verify(f->dir, NULL, &err), &err);
    mu_manifest_free(manifest);
    free(runs);
    flats_free(flats);
}

static struct mu_load_config load_of(const struct fixture *f, float *const flats[3], const struct mu_chunk_run *params,
                                     uint32_t params_count, const struct mu_chunk_run *moments, uint32_t moments_count)
{
    return (struct mu_load_config){.dir = f->dir,
                                   .job = "kjv",
                                   .checkpoint = 5,
                                   .step = 8,
                                   .model = &f->model,
                                   .params = params,
                                   .moments = moments,
                                   .params_count = params_count,
                                   .moments_count = moments_count,
                                   .flats = {flats[0], flats[1], flats[2]}};
}

/* Elements of gaps that lie between two chunks of one run are zero after a load; the expectation gets them too. */
static void expect_zero_gaps(const struct fixture *f, const struct mu_chunk_run *runs, uint32_t count, float *flat)
{
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 1; k < runs[i].count; k++) {
            struct mu_chunk a = mu_model_chunk(&f->model, runs[i].first + k - 1),
                            b = mu_model_chunk(&f->model, runs[i].first + k);
            for (uint64_t at = a.offset + a.size; at < b.offset; at++)
                flat[at] = 0;
        }
    }
}

/* Every rank of another layout gets its share, and nothing else in memory changes. */
static void load_into(struct fixture *f, const struct mu_layout *layout)
{
    struct mu_error err;
    float *flats[3], *expected[3];
    flats_new(f, flats);
    flats_new(f, expected);
    struct mu_chunk_run *runs[2];
    for (int i = 0; i < 2; i++)
        runs[i] = calloc(MU_RUNS_MAX, sizeof *runs[i]);
    for (uint32_t rank = 0; rank < mu_layout_world(layout); rank++) {
        struct mu_held_share share = {.layout = *layout, .rank = rank};
        fill_share(f, &share, expected, 0x5a);
        uint32_t counts[2] = {mu_layout_runs(&f->model, layout, rank, MU_SHARE_PARAMS, runs[0]),
                              mu_layout_runs(&f->model, layout, rank, MU_SHARE_MOMENTS, runs[1])};
        for (int kind = 0; kind < 3; kind++) {
            expect_zero_gaps(f, runs[kind > 0], counts[kind > 0], expected[kind]);
            memset(flats[kind], 0x5a, f->model.flat_size * sizeof(float));
        }
        atomic_uint_least64_t progress = 0;
        struct mu_load_config config = load_of(f, flats, runs[0], counts[0], runs[1], counts[1]);
        config.progress = &progress;
        assert_ok(mu_load_checkpoint(&config, &err), &err);
        assert_true(counts[0] == 0 || atomic_load(&progress) > 0);
        for (int kind = 0; kind < 3; kind++)
            assert_memory_equal(flats[kind], expected[kind], f->model.flat_size * sizeof(float));
    }
    for (int i = 0; i < 2; i++)
        free(runs[i]);
    flats_free(flats);
    flats_free(expected);
}

/* ---- tests ---- */

static void test_checkpoint_of_any_layout_loads_into_any_other(void **state)
{
    (void)state;
    for (int model = 0; model < MODELS; model++) {
        uint32_t slices = models[model].slices, layers = models[model].layers;
        const struct mu_layout layouts[] = {
            layout_of(1, 1, 1, false, layers),
            layout_of(1, 1, 5, true, layers),
            layout_of(slices, 1, 2, false, layers),
            layout_of(slices, 2, 3, true, layers),
            layout_of(slices > 1 ? slices / 2 : 1, 3, 1, true, layers),
            layout_of(1, layers, 7, false, layers),
        };
        enum { LAYOUTS = sizeof layouts / sizeof layouts[0] };
        for (int from = 0; from < LAYOUTS; from++) {
            struct fixture *f = fixture_new(model);
            write_checkpoint(f, &layouts[from]);
            for (int to = SANITIZED ? (model + from) % 3 : 0; to < LAYOUTS; to += SANITIZED ? 4 : 1)
                load_into(f, &layouts[to]);
            fixture_free(f);
        }
    }
}

/* One worker in another layout holds everything: it can write the piece of any rank. */
static void test_piece_is_written_by_whoever_holds_its_chunks(void **state)
{
    (void)state;
    struct fixture *f = fixture_new(1);
    struct mu_layout wanted = layout_of(2, 2, 2, false, models[1].layers), held = layout_of(1, 1, 1, false, 4);
    struct mu_held_share share = {.layout = held, .rank = 0};
    struct mu_snapshot_state given = state_of(f, f->truth, &share, 1);
    struct mu_snapshot snapshot = snapshot_of(f, &wanted, 3);
    mu_snapshots_take(f->snapshots, f->pool, &given, &snapshot);
    struct mu_piece_report report = wait_report(f, 1);
    if (report.status != MU_OK)
        fail_msg("%s", report.text);
    assert_non_null(strstr(report.file, "piece-00003-of-00008-g2-"));
    fixture_free(f);
}

static void refuse(struct fixture *f, const struct mu_held_share *shares, uint32_t count,
                   const struct mu_layout *wanted, uint32_t piece, enum mu_status status, const char *needle)
{
    struct mu_snapshot_state given = state_of(f, f->truth, shares, count);
    struct mu_snapshot snapshot = snapshot_of(f, wanted, piece);
    uint32_t before = f->reports;
    mu_snapshots_take(f->snapshots, f->pool, &given, &snapshot);
    struct mu_piece_report report = wait_report(f, before + 1);
    if (report.status != status || !strstr(report.text, needle) || strchr(report.text, '\n'))
        fail_msg("got %s '%s', wanted %s with '%s'", mu_status_name(report.status), report.text, mu_status_name(status),
                 needle);
    assert_int_equal(access(f->dir, F_OK), -1); /* nothing was begun */
}

static void test_piece_that_the_shares_do_not_cover_is_refused(void **state)
{
    (void)state;
    struct fixture *f = fixture_new(1);
    uint32_t layers = models[1].layers;
    struct mu_layout all = layout_of(1, 1, 1, false, layers), stages = layout_of(1, 2, 1, false, layers),
                     sharded = layout_of(1, 1, 2, true, layers);
    struct mu_held_share share = {.layout = stages, .rank = 1};
    refuse(f, &share, 1, &all, 0, MU_ERR_NOT_FOUND, "needs the parameters of chunk 0,");
    refuse(f, NULL, 0, &all, 0, MU_ERR_NOT_FOUND, "needs the parameters of chunk 0,");
    share = (struct mu_held_share){.layout = sharded, .rank = 0}; /* all parameters, half of the moments */
    refuse(f, &share, 1, &all, 0, MU_ERR_NOT_FOUND, "needs the moments of chunk ");
    share.owned_only = true;
    refuse(f, &share, 1, &all, 0, MU_ERR_NOT_FOUND, "needs the parameters of chunk ");
    share = (struct mu_held_share){.layout = stages, .rank = 2}; /* idle */
    refuse(f, &share, 1, &all, 0, MU_ERR_NOT_FOUND, "chunk 0,");
    refuse(f, &share, 1, &stages, 2, MU_ERR_INVALID, "piece 2 of 2");
    struct mu_held_share many[MU_HELD_SHARES_MAX + 1];
    for (int i = 0; i < MU_HELD_SHARES_MAX + 1; i++)
        many[i] = share;
    refuse(f, many, MU_HELD_SHARES_MAX + 1, &all, 0, MU_ERR_INVALID, " shares");
    fixture_free(f);
}

/* A worker between two generations holds the shares of both: what neither has alone, they have together. */
static void test_two_shares_cover_a_piece_together(void **state)
{
    (void)state;
    struct fixture *f = fixture_new(1);
    uint32_t layers = models[1].layers;
    struct mu_layout all = layout_of(1, 1, 1, false, layers), stages = layout_of(1, 2, 1, false, layers);
    const struct mu_held_share shares[2] = {{.layout = stages, .rank = 1}, {.layout = stages, .rank = 0}};
    struct mu_snapshot_state given = state_of(f, f->truth, shares, 2);
    struct mu_snapshot snapshot = snapshot_of(f, &all, 0);
    mu_snapshots_take(f->snapshots, f->pool, &given, &snapshot);
    struct mu_piece_report report = wait_report(f, 1);
    if (report.status != MU_OK)
        fail_msg("%s", report.text);
    fixture_free(f);
}

static void test_cancelled_copy_is_told_and_the_next_one_works(void **state)
{
    (void)state;
    struct fixture *f = fixture_new(0);
    struct mu_layout all = layout_of(1, 1, 1, false, models[0].layers);
    struct mu_held_share share = {.layout = all, .rank = 0};
    atomic_bool cancel = true;
    mu_pool_set_cancel(f->pool, &cancel);
    refuse(f, &share, 1, &all, 0, MU_ERR_CANCELLED, "snapshot cancelled");
    cancel = false;
    write_checkpoint(f, &all);
    fixture_free(f);
}

static void test_abandoned_piece_is_not_reported(void **state)
{
    (void)state;
    struct fixture *f = fixture_new(0);
    struct mu_layout all = layout_of(1, 1, 1, false, models[0].layers);
    struct mu_held_share share = {.layout = all, .rank = 0};
    struct mu_snapshot_state given = state_of(f, f->truth, &share, 1);
    struct mu_snapshot snapshot = snapshot_of(f, &all, 0);
    uint32_t silent = 0;
    for (int i = 0; i < 500 && silent == 0; i++) { /* it may just have been written */
        uint32_t before = f->reports;
        mu_snapshots_take(f->snapshots, f->pool, &given, &snapshot);
        mu_snapshots_abandon(f->snapshots);
        for (int ms = 0; ms < PATIENCE_S * 1000 && mu_snapshots_busy(f->snapshots); ms++)
            usleep(1000);
        assert_false(mu_snapshots_busy(f->snapshots));
        silent += f->reports == before;
    }
    assert_true(silent > 0);
    fixture_free(f);
}

/* A job that begins with the parameters of any checkpoint: no moments are read, whoever's it is. */
static void test_load_of_parameters_alone_takes_any_checkpoint_of_the_model(void **state)
{
    (void)state;
    struct fixture *f = fixture_new(2);
    struct mu_layout all = layout_of(2, 2, 1, false, models[2].layers);
    struct mu_error err;
    float *flats[3];
    flats_new(f, flats);
    write_checkpoint(f, &all);
    struct mu_chunk_run run = {0, f->model.chunk_count};
    struct mu_load_config config = load_of(f, flats, &run, 1, NULL, 0);
    config.job = NULL;
    config.step = config.checkpoint = 77;
    for (int kind = 1; kind < 3; kind++)
        memset(flats[kind], 0x5a, f->model.flat_size * sizeof(float));
    assert_ok(mu_load_checkpoint(&config, &err), &err);
    assert_memory_equal(flats[0], f->truth[0], f->model.flat_size * sizeof(float));
    for (int kind = 1; kind < 3; kind++)
        for (uint64_t i = 0; i < f->model.flat_size; i++)
            assert_true(memcmp(&flats[kind][i], "\x5a\x5a\x5a\x5a", 4) == 0);
    flats_free(flats);
    fixture_free(f);
}

static void test_load_of_another_checkpoint_is_refused(void **state)
{
    (void)state;
    struct fixture *f = fixture_new(0);
    struct mu_layout all = layout_of(1, 1, 2, false, models[0].layers);
    struct mu_error err;
    float *flats[3];
    flats_new(f, flats);
    write_checkpoint(f, &all);
    struct mu_chunk_run run = {0, f->model.chunk_count};
    struct mu_load_config config = load_of(f, flats, &run, 1, &run, 1);
    assert_ok(mu_load_checkpoint(&config, &err), &err);
    config.step = 9;
    assert_fails(mu_load_checkpoint(&config, &err), MU_ERR_CORRUPT, &err,
                 "at step 8, not checkpoint 5 of job 'kjv' at step 9");
    config.step = 8;
    config.checkpoint = 6;
    assert_fails(mu_load_checkpoint(&config, &err), MU_ERR_CORRUPT, &err, "not checkpoint 6");
    config.checkpoint = 5;
    config.job = "other";
    assert_fails(mu_load_checkpoint(&config, &err), MU_ERR_CORRUPT, &err, "of job 'other'");
    config.job = "kjv";
    struct mu_model_spec other;
    mu_model_spec_init(&other, &models[1]);
    config.model = &other;
    config.params_count = config.moments_count = 0;
    assert_fails(mu_load_checkpoint(&config, &err), MU_ERR_CORRUPT, &err, "this job's model has");
    config = load_of(f, flats, &run, 1, &run, 1);
    atomic_bool cancel = true;
    config.cancel = &cancel;
    assert_fails(mu_load_checkpoint(&config, &err), MU_ERR_CANCELLED, &err, "aborted");
    config.cancel = NULL;
    char empty[512];
    path_join(empty, f->scratch.path, "empty");
    assert_int_equal(mkdir(empty, 0755), 0);
    config.dir = empty;
    assert_fails(mu_load_checkpoint(&config, &err), MU_ERR_NOT_FOUND, &err, empty);
    flats_free(flats);
    fixture_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checkpoint_of_any_layout_loads_into_any_other),
        cmocka_unit_test(test_piece_is_written_by_whoever_holds_its_chunks),
        cmocka_unit_test(test_piece_that_the_shares_do_not_cover_is_refused),
        cmocka_unit_test(test_two_shares_cover_a_piece_together),
        cmocka_unit_test(test_cancelled_copy_is_told_and_the_next_one_works),
        cmocka_unit_test(test_abandoned_piece_is_not_reported),
        cmocka_unit_test(test_load_of_parameters_alone_takes_any_checkpoint_of_the_model),
        cmocka_unit_test(test_load_of_another_checkpoint_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
