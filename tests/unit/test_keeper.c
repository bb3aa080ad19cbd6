/* links: mu_state */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <ftw.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/log.h"
#include "storage/catalog.h"
#include "storage/commit.h"
#include "storage/manifest.h"
#include "worker/holder.h"
#include "worker/keeper.h"
#include "worker/load.h"

enum { HOSTS = 3, PIECES = 3 };
static const char *const HOST[HOSTS] = {"a", "b/x", "c"};

/* Three hosts in one folder; piece i was written by host i. */
struct fixture {
    char root[64], dir[MU_PATH_SIZE]; /* of the checkpoint, with %h */
    struct mu_job_spec spec;
    struct mu_model_spec model;
    float *state;
    struct mu_written_piece pieces[PIECES];
    struct mu_keeper *keepers[HOSTS];
    pthread_mutex_t lock;
    pthread_cond_t answered;
    struct mu_kept_report answers[HOSTS];
    uint32_t answer_counts[HOSTS];
};

struct side {
    struct fixture *f;
    uint32_t host;
};
static struct side sides[HOSTS];

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static void on_done(void *ctx, const struct mu_kept_report *report)
{
    const struct side *side = ctx;
    pthread_mutex_lock(&side->f->lock);
    side->f->answers[side->host] = *report;
    side->f->answer_counts[side->host]++;
    pthread_cond_signal(&side->f->answered);
    pthread_mutex_unlock(&side->f->lock);
}

static void path_on(const struct fixture *f, uint32_t host, const char *file, char *out, size_t size)
{
    char dir[MU_PATH_SIZE];
    assert_int_equal(mu_holder_path(f->dir, HOST[host], dir, NULL), MU_OK);
    snprintf(out, size, "%s/%s", dir, file);
}

static void write_piece(struct fixture *f, uint32_t number, const struct mu_layout *layout)
{
    struct mu_checkpoint_identity identity = {.job = "job", .seq = 4, .step = 42, .generation = 3};
    struct mu_piece_entry entries[64];
    struct mu_piece_result result;
    struct mu_error err;
    struct mu_chunk_run runs[MU_RUNS_MAX];
    char dir[MU_PATH_SIZE], suffix[MU_HOLDER_SUFFIX_SIZE];
    uint32_t run_count = mu_layout_runs(&f->model, layout, number, MU_SHARE_PRIMARY, runs);
    size_t entry_count = mu_piece_entries_of_runs(&f->model, runs, run_count, entries, 64);
    assert_true(entry_count > 0 && entry_count <= 64);
    for (size_t i = 0; i < entry_count; i++)
        entries[i].data = f->state + entries[i].offset;
    mu_holder_suffix(HOST[number], suffix);
    snprintf(f->pieces[number].file, sizeof f->pieces[number].file, "piece-%u%s.safetensors", number, suffix);
    assert_int_equal(mu_holder_path(f->dir, HOST[number], dir, &err), MU_OK);
    assert_int_equal(mu_checkpoint_make_dir(dir, "job", 4, &err), MU_OK);
    assert_int_equal(mu_piece_write(dir, f->pieces[number].file, &identity, entries, entry_count, NULL, &result, &err),
                     MU_OK);
    f->pieces[number].size_bytes = result.size_bytes;
    f->pieces[number].checksum = result.xxh3;
}

static struct mu_layout layout_of(void)
{
    struct mu_layout layout;
    memset(&layout, 0, sizeof layout);
    layout.tp = layout.pp = 1;
    layout.dp = PIECES;
    layout.stage_first[1] = 2;
    return layout;
}

static void set_up_with(struct fixture *f, bool data_tls)
{
    char name[MU_CATALOG_NAME_SIZE];
    struct mu_layout layout = layout_of();
    memset(f, 0, sizeof *f);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->answered, NULL);
    strcpy(f->root, "/tmp/muster-test-XXXXXX");
    assert_non_null(mkdtemp(f->root));
    mu_job_spec_init(&f->spec);
    strcpy(f->spec.name, "job");
    f->spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 64, .context = 32, .vocab = 300};
    f->spec.model.slices = 1;
    mu_model_config_resolve(&f->spec.model);
    strcpy(f->spec.data.path, "/data/text");
    f->spec.batch.sequences = 8, f->spec.batch.micro = 1, f->spec.batch.length = 32;
    f->spec.steps = 100;
    f->spec.data_tls = data_tls;
    f->spec.checkpoint.kind = MU_CHECKPOINT_LOCAL;
    snprintf(f->spec.checkpoint.path, sizeof f->spec.checkpoint.path, "%s/%%h", f->root);
    mu_model_spec_init(&f->model, &f->spec.model);
    f->state = calloc(f->model.flat_size, sizeof *f->state);
    for (size_t i = 0; i < f->model.flat_size; i++)
        f->state[i] = (float)i;
    mu_catalog_name(4, 40, (struct mu_id){7, 8}, name);
    snprintf(f->dir, sizeof f->dir, "%s/%%h/%s", f->root, name);
    for (uint32_t i = 0; i < PIECES; i++)
        write_piece(f, i, &layout);
    for (uint32_t i = 0; i < HOSTS; i++) {
        sides[i] = (struct side){f, i};
        struct mu_keeper_config config = {
            .spec = &f->spec, .host = HOST[i], .ip = "127.0.0.1", .done = on_done, .ctx = &sides[i]};
        assert_int_equal(mu_keeper_new(&config, &f->keepers[i], NULL), MU_OK);
    }
}

static void set_up(struct fixture *f)
{
    set_up_with(f, false);
}

static void stop_keeper(struct fixture *f, uint32_t host)
{
    mu_keeper_free(f->keepers[host]);
    f->keepers[host] = NULL;
}

static void tear_down(struct fixture *f)
{
    for (uint32_t i = 0; i < HOSTS; i++)
        mu_keeper_free(f->keepers[i]);
    free(f->state);
    nftw(f->root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static struct mu_holder holder(const struct fixture *f, uint32_t host)
{
    struct mu_holder holder = {0};
    strcpy(holder.host, HOST[host]);
    if (f->keepers[host]) {
        strcpy(holder.address, mu_keeper_address(f->keepers[host]));
        memcpy(holder.secret, mu_keeper_secret(f->keepers[host]), sizeof holder.secret);
    }
    return holder;
}

static struct mu_kept_report ask(struct fixture *f, uint32_t host, enum mu_keep_kind kind)
{
    struct mu_keep_order order = {.kind = kind,
                                  .checkpoint = 4,
                                  .before = holder(f, (host + HOSTS - 1) % HOSTS),
                                  .after = holder(f, (host + 1) % HOSTS),
                                  .step = 42,
                                  .generation = 3,
                                  .wall_us = 99,
                                  .layout = layout_of(),
                                  .piece_count = PIECES,
                                  .pieces = f->pieces};
    memcpy(order.dir, f->dir, sizeof order.dir);
    uint32_t before = f->answer_counts[host];
    assert_int_equal(mu_keeper_order(f->keepers[host], &order, NULL), MU_OK);
    pthread_mutex_lock(&f->lock);
    while (f->answer_counts[host] == before)
        pthread_cond_wait(&f->answered, &f->lock);
    struct mu_kept_report answer = f->answers[host];
    pthread_mutex_unlock(&f->lock);
    assert_int_equal(answer.kind, kind);
    assert_int_equal(answer.checkpoint, 4);
    return answer;
}

static void publish_all(struct fixture *f)
{
    for (uint32_t host = 0; host < HOSTS; host++) {
        struct mu_kept_report answer = ask(f, host, MU_KEEP_PUBLISH);
        assert_string_equal(answer.text, "");
        assert_int_equal(answer.status, MU_OK);
        assert_int_equal(answer.size_bytes, f->pieces[host].size_bytes);
    }
}

static bool is_there(const struct fixture *f, uint32_t host, const char *file)
{
    char path[MU_PATH_SIZE + 128];
    path_on(f, host, file, path, sizeof path);
    return access(path, F_OK) == 0;
}

static void flip(const struct fixture *f, uint32_t host, uint32_t piece)
{
    char path[MU_PATH_SIZE + 128];
    path_on(f, host, f->pieces[piece].file, path, sizeof path);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    fseek(file, -40, SEEK_END);
    int byte = fgetc(file);
    fseek(file, -1, SEEK_CUR);
    fputc(byte ^ 1, file);
    fclose(file);
}

/* ---- names ---- */

static void test_paths_and_names(void **state)
{
    (void)state;
    char path[MU_PATH_SIZE], suffix[MU_HOLDER_SUFFIX_SIZE], file[96];
    struct mu_error err;
    assert_int_equal(mu_holder_path("/disk/%h/job-%h", "n1", path, &err), MU_OK);
    assert_string_equal(path, "/disk/n1/job-n1");
    assert_int_equal(mu_holder_path("/disk/%h", "../x", path, &err), MU_OK);
    assert_string_equal(path, "/disk/.._x"); /* one part of the path, whatever the host is called */
    char longer[MU_PATH_SIZE] = "/%h";
    memset(longer + 3, 'x', sizeof longer - 4);
    assert_int_equal(mu_holder_path(longer, "a-host", path, &err), MU_ERR_LIMIT);
    mu_holder_suffix("n1", suffix);
    snprintf(file, sizeof file, "piece-1%s.safetensors", suffix);
    assert_true(mu_holder_of_file(file) == mu_host_id("n1"));
    assert_true(mu_host_id("n1") != mu_host_id("n2"));
    assert_int_equal(mu_holder_of_file("piece-00000-of-00001-g1-8d3fcdfe.safetensors"), 0);
    assert_int_equal(mu_holder_of_file("-h.safetensors"), 0);
}

/* ---- the service ---- */

static enum mu_status count_bytes(void *ctx, uint64_t size_bytes, const void *block, size_t block_bytes,
                                  struct mu_error *err)
{
    uint64_t *sum = ctx;
    (void)block, (void)size_bytes, (void)err;
    *sum += block_bytes;
    return MU_OK;
}

static void files_go_only_to_who_knows_the_secret(bool data_tls)
{
    struct fixture f;
    struct mu_error err;
    uint64_t bytes = 0;
    set_up_with(&f, data_tls);
    struct mu_holder from = holder(&f, 0);
    const char *name = strrchr(f.dir, '/') + 1;
    assert_int_equal(mu_files_fetch(&from, name, f.pieces[0].file, count_bytes, &bytes, NULL, &err), MU_OK);
    assert_int_equal(bytes, f.pieces[0].size_bytes);
    assert_int_equal(mu_files_fetch(&from, name, "piece-9.safetensors", count_bytes, &bytes, NULL, &err),
                     MU_ERR_NOT_FOUND);
    static const char *const hostile[][2] = {
        {"..", "passwd"}, {"", "x"}, {".", "manifest.json"}, {"0000000004-0000000040-x", "x"}};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(mu_files_fetch(&from, hostile[i][0], hostile[i][1], count_bytes, &bytes, NULL, &err),
                         MU_ERR_UNAVAILABLE);
    assert_int_equal(mu_files_fetch(&from, name, "../../x", count_bytes, &bytes, NULL, &err), MU_ERR_UNAVAILABLE);
    assert_int_equal(mu_files_fetch(&from, name, "owner", count_bytes, &bytes, NULL, &err),
                     MU_OK); /* a file of its own */
    from.secret[5] ^= 1;
    assert_int_equal(mu_files_fetch(&from, name, f.pieces[0].file, count_bytes, &bytes, NULL, &err),
                     MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(err.text, data_tls ? "Protocol error" : "denied"));
    from.address[0] = 0;
    assert_int_equal(mu_files_fetch(&from, name, f.pieces[0].file, count_bytes, &bytes, NULL, &err),
                     MU_ERR_UNAVAILABLE);
    from = holder(&f, 0);
    stop_keeper(&f, 0);
    assert_int_equal(mu_files_fetch(&from, name, f.pieces[0].file, count_bytes, &bytes, NULL, &err),
                     MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(err.text, data_tls ? "host a at tls:127.0.0.1:" : "host a at 127.0.0.1:"));
    tear_down(&f);
}

static void test_files_go_only_to_who_knows_the_secret_and_only_from_checkpoints(void **state)
{
    (void)state;
    files_go_only_to_who_knows_the_secret(false);
    files_go_only_to_who_knows_the_secret(true);
}

/* ---- orders ---- */

static void test_publish_copies_the_pieces_of_the_host_before(void **state)
{
    (void)state;
    struct fixture f;
    char first[MU_PATH_SIZE + 128], other[MU_PATH_SIZE + 128];
    uint64_t nonces[MU_INVENTORY_MAX];
    set_up(&f);
    assert_int_equal(mu_keeper_inventory(f.keepers[0], nonces), 0); /* no manifest yet */
    publish_all(&f);
    publish_all(&f); /* again: the same */
    for (uint32_t host = 0; host < HOSTS; host++) {
        assert_true(is_there(&f, host, f.pieces[host].file));
        assert_true(is_there(&f, host, f.pieces[(host + HOSTS - 1) % HOSTS].file));
        assert_false(is_there(&f, host, f.pieces[(host + 1) % HOSTS].file));
        assert_int_equal(mu_keeper_inventory(f.keepers[host], nonces), 1);
        assert_int_equal(nonces[0], 8);
    }
    /* the same manifest everywhere: the copies are of one checkpoint */
    const char *dirs[HOSTS] = {first, other, f.root};
    char third[MU_PATH_SIZE + 128];
    path_on(&f, 0, "", first, sizeof first);
    path_on(&f, 1, "", other, sizeof other);
    path_on(&f, 2, "", third, sizeof third);
    dirs[2] = third;
    struct mu_checkpoint_report report;
    struct mu_error err;
    assert_int_equal(mu_checkpoint_verify_copies(dirs, HOSTS, &report, &err), MU_OK);
    assert_int_equal(report.single_piece_count, 0);
    tear_down(&f);
}

static void test_publish_fails_without_the_host_before_and_on_a_wrong_piece(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    stop_keeper(&f, 0);
    struct mu_kept_report answer = ask(&f, 1, MU_KEEP_PUBLISH);
    assert_int_equal(answer.status, MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(answer.text, "cannot be fetched from host a"));
    assert_false(is_there(&f, 1, MU_MANIFEST_FILE));
    flip(&f, 1, 1); /* what b wrote is not what it reported: c sees it */
    answer = ask(&f, 2, MU_KEEP_PUBLISH);
    assert_int_equal(answer.status, MU_ERR_CORRUPT);
    assert_false(is_there(&f, 2, MU_MANIFEST_FILE));
    assert_false(is_there(&f, 2, f.pieces[1].file));
    tear_down(&f);
}

static void test_check_copies_again_what_is_damaged_or_gone(void **state)
{
    (void)state;
    struct fixture f;
    char dir[MU_PATH_SIZE];
    set_up(&f);
    publish_all(&f);
    flip(&f, 0, 0); /* its own: from b */
    flip(&f, 1, 0 + 1);
    assert_int_equal(ask(&f, 0, MU_KEEP_CHECK).status, MU_OK);
    assert_int_equal(ask(&f, 1, MU_KEEP_CHECK).status, MU_OK);
    assert_int_equal(mu_holder_path(f.dir, HOST[2], dir, NULL), MU_OK);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS); /* the whole disk of c */
    assert_int_equal(ask(&f, 2, MU_KEEP_CHECK).status, MU_OK);
    for (uint32_t host = 0; host < HOSTS; host++)
        assert_int_equal(ask(&f, host, MU_KEEP_CHECK).status, MU_OK);
    assert_true(is_there(&f, 2, MU_MANIFEST_FILE));
    assert_true(is_there(&f, 2, f.pieces[1].file) && is_there(&f, 2, f.pieces[2].file));
    flip(&f, 0, 0);
    flip(&f, 1, 0); /* both copies */
    struct mu_kept_report answer = ask(&f, 0, MU_KEEP_CHECK);
    assert_int_equal(answer.status, MU_ERR_CORRUPT);
    assert_non_null(strstr(answer.text, "and from host b/x"));
    flip(&f, 1, 0);
    flip(&f, 1, 1);
    stop_keeper(&f, 2); /* the other copy of b's piece cannot be reached: nothing is known of it */
    assert_int_equal(ask(&f, 1, MU_KEEP_CHECK).status, MU_ERR_UNAVAILABLE);
    tear_down(&f);
}

static void test_discard_removes_and_is_done_even_when_the_worker_leaves(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    publish_all(&f);
    assert_int_equal(ask(&f, 0, MU_KEEP_DISCARD).status, MU_OK);
    assert_int_equal(ask(&f, 0, MU_KEEP_DISCARD).status, MU_OK);
    assert_false(is_there(&f, 0, ""));
    struct mu_keep_order order = {.kind = MU_KEEP_DISCARD, .checkpoint = 4};
    memcpy(order.dir, f.dir, sizeof order.dir);
    assert_int_equal(mu_keeper_order(f.keepers[1], &order, NULL), MU_OK);
    stop_keeper(&f, 1);
    assert_false(is_there(&f, 1, ""));
    snprintf(order.dir, sizeof order.dir, "/tmp/elsewhere/%s", strrchr(f.dir, '/') + 1); /* not below its own root */
    uint32_t before = f.answer_counts[2];
    assert_int_equal(mu_keeper_order(f.keepers[2], &order, NULL), MU_OK);
    pthread_mutex_lock(&f.lock);
    while (f.answer_counts[2] == before)
        pthread_cond_wait(&f.answered, &f.lock);
    pthread_mutex_unlock(&f.lock);
    assert_int_equal(f.answers[2].status, MU_ERR_INVALID);
    tear_down(&f);
}

/* ---- loading ---- */

static enum mu_status load(const struct fixture *f, const char *host, struct mu_error *err)
{
    const struct mu_chunk_run all = {.first = 0, .count = f->model.chunk_count};
    struct mu_holder holders[HOSTS];
    char dir[MU_PATH_SIZE];
    float *flats[3];
    for (uint32_t i = 0; i < HOSTS; i++)
        holders[i] = holder(f, i);
    for (int k = 0; k < 3; k++)
        flats[k] = calloc(f->model.flat_size, sizeof *flats[k]);
    assert_int_equal(mu_holder_path(f->dir, host, dir, NULL), MU_OK);
    struct mu_load_config config = {.dir = dir,
                                    .job = "job",
                                    .checkpoint = 4,
                                    .step = 42,
                                    .host = host,
                                    .holders = holders,
                                    .holder_count = HOSTS,
                                    .model = &f->model,
                                    .params = &all,
                                    .moments = &all,
                                    .params_count = 1,
                                    .moments_count = 1,
                                    .flats = {flats[0], flats[1], flats[2]}};
    enum mu_status status = mu_load_checkpoint(&config, err);
    for (uint32_t cell = 0; cell < f->model.cell_count && status == MU_OK; cell++) {
        struct mu_cell at = mu_model_cell(&f->model, cell);
        for (int k = 0; k < 3; k++)
            assert_memory_equal(flats[k] + at.offset, f->state + at.offset, at.size * sizeof(float));
    }
    for (int k = 0; k < 3; k++)
        free(flats[k]);
    return status;
}

static void test_any_host_loads_with_one_gone_and_copies_damaged(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err;
    set_up(&f);
    publish_all(&f);
    assert_int_equal(load(&f, "a", &err), MU_OK);
    assert_int_equal(load(&f, "d", &err), MU_OK); /* which has nothing of it */
    flip(&f, 0, 0);
    flip(&f, 2, 2);
    assert_int_equal(load(&f, "a", &err), MU_OK);
    assert_int_equal(load(&f, "d", &err), MU_OK);
    flip(&f, 2, 2);
    stop_keeper(&f, 1);
    flip(&f, 0, 0);
    assert_int_equal(load(&f, "d", &err), MU_OK); /* a has 0 and 2, c has 2 and 1 */
    flip(&f, 0, 2);
    flip(&f, 2, 2);
    assert_int_equal(load(&f, "a", &err), MU_ERR_CORRUPT); /* no good copy of piece 2 is left */
    tear_down(&f);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    mu_log_init("test", MU_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths_and_names),
        cmocka_unit_test(test_files_go_only_to_who_knows_the_secret_and_only_from_checkpoints),
        cmocka_unit_test(test_publish_copies_the_pieces_of_the_host_before),
        cmocka_unit_test(test_publish_fails_without_the_host_before_and_on_a_wrong_piece),
        cmocka_unit_test(test_check_copies_again_what_is_damaged_or_gone),
        cmocka_unit_test(test_discard_removes_and_is_done_even_when_the_worker_leaves),
        cmocka_unit_test(test_any_host_loads_with_one_gone_and_copies_damaged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
