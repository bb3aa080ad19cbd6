/* links: mu_storage mu_plan */
#include "storage_testing.h"

#include "common/rng.h"
#include "storage/job_json.h"
#include "storage/manifest.h"

static void spec_init(struct mu_model_spec *spec)
{
    const struct mu_model_config config = {
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 96, .context = 32, .vocab = 256};
    mu_model_spec_init(spec, &config);
}

static struct mu_manifest *manifest_for(const struct mu_model_spec *spec)
{
    struct mu_manifest *manifest = mu_manifest_new();
    assert_non_null(manifest);
    manifest->identity =
        (struct mu_checkpoint_identity){.job = "kjv", .seq = 12, .step = 1200, .generation = UINT64_MAX - 5};
    manifest->nonce = (struct mu_id){.high = 0xfeed, .low = 0xf00d};
    manifest->created_wall_us = 1790000000000000;
    strcpy(manifest->numeric_identity, "cpu-avx2-0123456789abcdef");
    assert_int_equal(mu_manifest_set_job_record(manifest, "{\"name\":\"kjv\",\"note\":\"\\\"quoted\\\" \\u00e9\"}"),
                     MU_OK);
    manifest->chunk_count = spec->chunk_count;
    return manifest;
}

/* `pieces` equal pieces, as a coordinator would list them. */
static struct mu_manifest *tiled_manifest(const struct mu_model_spec *spec, uint32_t pieces)
{
    struct mu_manifest *manifest = manifest_for(spec);
    for (uint32_t i = 0; i < pieces; i++) {
        uint32_t first, count;
        char name[64];
        snprintf(name, sizeof name, "piece-%05u.safetensors", i);
        mu_model_owned_chunks(spec, pieces, i, &first, &count);
        assert_int_equal(mu_manifest_add_chunks(manifest, spec, name, 1000 + i,
                                                (struct mu_hash128){.low = i, .high = 7}, first, count),
                         MU_OK);
    }
    return manifest;
}

static void test_encode_then_decode_gives_the_same(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    struct mu_manifest *again;
    struct mu_error err;
    char *text, *text_again;
    size_t size_bytes, size_again;
    spec_init(&spec);
    struct mu_manifest *manifest = tiled_manifest(&spec, 3);
    assert_ok(mu_manifest_encode(manifest, &text, &size_bytes, &err), &err);
    assert_int_equal(strlen(text), size_bytes);
    assert_ok(mu_manifest_decode(text, size_bytes, "test", &again, &err), &err);
    assert_string_equal(again->identity.job, "kjv");
    assert_true(again->identity.generation == UINT64_MAX - 5); /* all 64 bits */
    assert_true(mu_id_equal(again->nonce, manifest->nonce));
    assert_string_equal(again->job_record, manifest->job_record);
    assert_string_equal(again->numeric_identity, manifest->numeric_identity);
    assert_int_equal(again->piece_count, 3);
    assert_int_equal(again->pieces[2].xxh3.low, 2);
    assert_int_equal(again->pieces[1].entry_count, manifest->pieces[1].entry_count);
    assert_ok(mu_manifest_encode(again, &text_again, &size_again, &err), &err);
    assert_string_equal(text, text_again);
    free(text);
    free(text_again);
    mu_manifest_free(manifest);
    mu_manifest_free(again);
    mu_manifest_free(NULL);
}

static void test_every_flip_and_cut_is_found(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    struct mu_manifest *again;
    struct mu_error err;
    char *text;
    size_t size_bytes;
    spec_init(&spec);
    struct mu_manifest *manifest = tiled_manifest(&spec, 2);
    assert_ok(mu_manifest_encode(manifest, &text, &size_bytes, &err), &err);
    char *bad = malloc(size_bytes + 1);
    memcpy(bad, text, size_bytes);
    for (size_t bit = 0; bit < size_bytes * 8; bit++) {
        bad[bit / 8] = (char)(bad[bit / 8] ^ 1 << bit % 8);
        assert_int_equal(mu_manifest_decode(bad, size_bytes, "bad", &again, &err), MU_ERR_CORRUPT);
        assert_null(strchr(err.text, '\n'));
        bad[bit / 8] = text[bit / 8];
    }
    for (size_t length = 0; length < size_bytes; length++) {
        char *cut = malloc(length ? length : 1); /* exactly so long: a sanitizer sees a read beyond it */
        memcpy(cut, text, length);
        assert_int_equal(mu_manifest_decode(cut, length, "cut", &again, &err), MU_ERR_CORRUPT);
        free(cut);
    }
    bad[size_bytes] = '\n';
    assert_fails(mu_manifest_decode(bad, size_bytes + 1, "long", &again, &err), MU_ERR_CORRUPT, &err, "damaged or cut");
    free(bad);
    free(text);
    mu_manifest_free(manifest);
}

/* A hostile author can make the checksum right. So the fields are judged too: replace `from` by `to` and sign again. */
static enum mu_status decode_forged(const char *text, const char *from, const char *to, struct mu_error *err)
{
    const char *body = strchr(text, '\n') + 1, *at = strstr(body, from);
    assert_non_null(at);
    char *forged = malloc(strlen(text) + strlen(to) + 1);
    sprintf(forged, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    char *forged_body = strchr(forged, '\n') + 1, hash[33];
    struct mu_hash128 sum = mu_xxh3_128(forged_body, strlen(forged_body));
    snprintf(hash, sizeof hash, "%016llx%016llx", (unsigned long long)sum.high, (unsigned long long)sum.low);
    memcpy(strstr(forged, "\"xxh3\":\"") + 8, hash, 32);
    struct mu_manifest *manifest;
    enum mu_status status = mu_manifest_decode(forged, strlen(forged), "forged", &manifest, err);
    if (status == MU_OK)
        mu_manifest_free(manifest);
    free(forged);
    return status;
}

static void test_forged_fields_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to, *part;
    } cases[] = {
        {"\"job\":\"kjv\"", "\"job\":\"../kjv\"", "field job"},
        {"\"job\":\"kjv\"", "\"job\":5", "field job"},
        {"\"job\":\"kjv\",", "", "field manifest"},
        {"\"job\":\"kjv\"", "\"job\":\"kjv\",\"more\":1", "field manifest"},
        {"\"seq\":\"12\"", "\"seq\":\"012\"", "field seq"},
        {"\"seq\":\"12\"", "\"seq\":12", "field seq"},
        {"\"seq\":\"12\"", "\"seq\":\"18446744073709551616\"", "field seq"},
        {"\"step\":\"1200\"", "\"step\":\"-1\"", "field step"},
        {"feed", "FEED", "field nonce"},
        {"\"pieces\":[", "\"pieces\":7,\"x\":[", "field manifest"},
        {"piece-00000.safetensors", "../../etc/passwd", "field pieces[].file"},
        {"piece-00000.safetensors", "manifest.json", "field pieces[].file"},
        {"\"size_bytes\":\"1000\"", "\"size_bytes\":\"1e3\"", "field size_bytes"},
        {"\"cell\":0", "\"cell\":-1", "field cell"},
        {"\"cell\":0", "\"cell\":4294967296", "field cell"},
        {"/p/0-", "/q/0-", "tensor"},
        {"/p/0-", "/p/4294967295-", "tensor"},
        {"{\"tensor\"", "{\"x\":1,\"tensor\"", "tensor"},
        {"\"job_record\":\"", "\"job_record\":[],\"x\":\"", "field manifest"},
    };
    struct mu_model_spec spec;
    struct mu_error err;
    char *text;
    size_t size_bytes;
    spec_init(&spec);
    struct mu_manifest *manifest = tiled_manifest(&spec, 2);
    assert_ok(mu_manifest_encode(manifest, &text, &size_bytes, &err), &err);
    assert_ok(decode_forged(text, "\"step\":\"1200\"", "\"step\":\"1201\"", &err), &err); /* the forging itself works */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        enum mu_status status = decode_forged(text, cases[i].from, cases[i].to, &err);
        if (status != MU_ERR_CORRUPT || !strstr(err.text, cases[i].part) || strchr(err.text, '\n'))
            fail_msg("case %zu: %s '%s', wanted '%s'", i, mu_status_name(status), status ? err.text : "",
                     cases[i].part);
    }
    free(text);
    mu_manifest_free(manifest);
}

static void test_writer_refuses_what_the_reader_would(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    struct mu_error err;
    char *text;
    size_t size_bytes;
    spec_init(&spec);
    struct mu_manifest *manifest = manifest_for(&spec);
    assert_fails(mu_manifest_encode(manifest, &text, &size_bytes, &err), MU_ERR_CORRUPT, &err, "field pieces");
    assert_int_equal(mu_manifest_add_piece(manifest, "../x", 1, (struct mu_hash128){0, 0}), MU_ERR_INVALID);
    mu_manifest_free(manifest);
    manifest = tiled_manifest(&spec, 1);
    manifest->identity.job[0] = 0;
    assert_fails(mu_manifest_encode(manifest, &text, &size_bytes, &err), MU_ERR_CORRUPT, &err, "field job");
    mu_manifest_free(manifest);
}

static void test_tiling_holds_for_every_number_of_pieces(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    struct mu_error err;
    spec_init(&spec);
    for (uint32_t pieces = 1; pieces <= spec.chunk_count; pieces++) {
        struct mu_manifest *manifest = tiled_manifest(&spec, pieces);
        assert_ok(mu_manifest_check_tiling(manifest, &spec, &err), &err);
        assert_ok(mu_manifest_check_tiling(manifest, NULL, &err), &err);
        mu_manifest_free(manifest);
    }
}

static void test_tiling_names_the_first_gap_or_overlap(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    struct mu_error err;
    const struct mu_hash128 hash = {0, 0};
    char part[128];
    spec_init(&spec);
    uint32_t chunks = spec.chunk_count;
    struct mu_cell cell = mu_model_cell(&spec, mu_model_chunk(&spec, 2).cell);

    struct mu_manifest *manifest = manifest_for(&spec);
    assert_int_equal(mu_manifest_add_chunks(manifest, &spec, "a", 1, hash, 0, 2), MU_OK);
    assert_int_equal(mu_manifest_add_chunks(manifest, &spec, "b", 1, hash, 3, chunks - 3), MU_OK);
    snprintf(part, sizeof part, "chunk 2 (cell %s) of kind p is in no piece", cell.name);
    assert_fails(mu_manifest_check_tiling(manifest, &spec, &err), MU_ERR_CORRUPT, &err, part);
    assert_fails(mu_manifest_check_tiling(manifest, NULL, &err), MU_ERR_CORRUPT, &err,
                 "chunk 2 of kind p is in no piece");
    mu_manifest_free(manifest);

    manifest = manifest_for(&spec);
    assert_int_equal(mu_manifest_add_chunks(manifest, &spec, "a", 1, hash, 0, 3), MU_OK);
    assert_int_equal(mu_manifest_add_chunks(manifest, &spec, "b", 1, hash, 2, chunks - 2), MU_OK);
    assert_fails(mu_manifest_check_tiling(manifest, &spec, &err), MU_ERR_CORRUPT, &err,
                 "in two places: piece 'a' and piece 'b'");
    mu_manifest_free(manifest);

    manifest = manifest_for(&spec);
    assert_int_equal(mu_manifest_add_chunks(manifest, &spec, "a", 1, hash, 0, chunks - 1), MU_OK);
    snprintf(part, sizeof part, "chunk %u", chunks - 1);
    assert_fails(mu_manifest_check_tiling(manifest, &spec, &err), MU_ERR_CORRUPT, &err, part);
    mu_manifest_free(manifest);

    manifest = manifest_for(&spec);
    assert_fails(mu_manifest_check_tiling(manifest, &spec, &err), MU_ERR_CORRUPT, &err, "chunk 0");
    mu_manifest_free(manifest);
}

/* Takes one entry away, or bends it; each must be caught. */
static void test_tiling_catches_any_single_wrong_entry(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    struct mu_error err;
    spec_init(&spec);
    struct mu_manifest *manifest = tiled_manifest(&spec, 3);
    for (size_t i = 0; i < manifest->piece_count; i++) {
        struct mu_manifest_piece *piece = &manifest->pieces[i];
        for (size_t j = 0; j < piece->entry_count; j++) {
            struct mu_manifest_entry good = piece->entries[j], *entry = &piece->entries[j];
            for (int bend = 0; bend < 6; bend++) {
                entry->kind = bend == 0   ? (enum mu_piece_kind)((good.kind + 1) % 3)
                              : bend == 1 ? MU_PIECE_META
                                          : good.kind;
                entry->first_chunk += bend == 2;
                entry->chunk_count += bend == 3;
                entry->cell += bend == 4;
                if (bend == 5)
                    strcpy(entry->cell_name, "X.0");
                assert_int_equal(mu_manifest_check_tiling(manifest, &spec, &err), MU_ERR_CORRUPT);
                if (bend < 4)
                    assert_int_equal(mu_manifest_check_tiling(manifest, NULL, &err), MU_ERR_CORRUPT);
                *entry = good;
            }
        }
    }
    assert_ok(mu_manifest_check_tiling(manifest, &spec, &err), &err);
    manifest->chunk_count--;
    assert_fails(mu_manifest_check_tiling(manifest, &spec, &err), MU_ERR_CORRUPT, &err, "this job's model has");
    mu_manifest_free(manifest);
}

/* --- a whole checkpoint on disk --- */

enum { PIECES = 3 };

struct checkpoint {
    struct scratch scratch;
    char dir[512];
    struct mu_model_spec spec;
    float *flat[3];
};

static void checkpoint_init(struct checkpoint *checkpoint)
{
    checkpoint->scratch = scratch_make();
    path_join(checkpoint->dir, checkpoint->scratch.path, "c");
    assert_int_equal(mkdir(checkpoint->dir, 0755), 0);
    struct mu_model_spec *spec = &checkpoint->spec;
    spec_init(spec);
    uint64_t random = 17;
    for (int kind = 0; kind < 3; kind++) {
        checkpoint->flat[kind] = calloc(spec->flat_size, sizeof(float));
        for (uint32_t chunk = 0; chunk < spec->chunk_count; chunk++) {
            struct mu_chunk at = mu_model_chunk(spec, chunk);
            for (uint64_t i = 0; i < at.size; i++) /* the gaps between cells stay zero */
                checkpoint->flat[kind][at.offset + i] = (float)(mu_splitmix64(&random) >> 44);
        }
    }
    struct mu_manifest *manifest = manifest_for(spec);
    struct mu_error err;
    for (uint32_t i = 0; i < PIECES; i++) {
        uint32_t first, chunks;
        struct mu_piece_result result;
        char name[64];
        mu_model_owned_chunks(spec, PIECES, i, &first, &chunks);
        size_t count = mu_piece_entries_of_chunks(spec, first, chunks, NULL, NULL, NULL, NULL, 0);
        struct mu_piece_entry *entries = calloc(count, sizeof *entries);
        mu_piece_entries_of_chunks(spec, first, chunks, checkpoint->flat[0], checkpoint->flat[1], checkpoint->flat[2],
                                   entries, count);
        snprintf(name, sizeof name, "piece-%u.safetensors", i);
        assert_ok(mu_piece_write(checkpoint->dir, name, &manifest->identity, entries, count, NULL, &result, &err),
                  &err);
        assert_int_equal(mu_manifest_add_chunks(manifest, spec, name, result.size_bytes, result.xxh3, first, chunks),
                         MU_OK);
        free(entries);
    }
    assert_ok(mu_manifest_write(checkpoint->dir, manifest, &err), &err);
    assert_ok(mu_manifest_write(checkpoint->dir, manifest, &err), &err); /* rolling forward writes it again */
    assert_int_equal(count_files(checkpoint->dir), PIECES + 1);
    mu_manifest_free(manifest);
}

static void checkpoint_fini(struct checkpoint *checkpoint)
{
    for (int kind = 0; kind < 3; kind++)
        free(checkpoint->flat[kind]);
    scratch_remove(&checkpoint->scratch);
}

static void test_checkpoint_verifies_and_loads(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_checkpoint_report report;
    struct mu_manifest *manifest;
    struct mu_error err;
    checkpoint_init(&checkpoint);
    assert_ok(mu_checkpoint_verify(checkpoint.dir, &report, &err), &err);
    assert_int_equal(report.piece_count, PIECES);
    assert_int_equal(report.problem_count, 0);
    assert_int_equal(report.identity.step, 1200);
    assert_true(report.size_bytes > 3 * sizeof(float) * checkpoint.spec.parameter_count);

    assert_ok(mu_manifest_read(checkpoint.dir, &manifest, &err), &err);
    size_t bytes = checkpoint.spec.flat_size * sizeof(float);
    float *p = calloc(1, bytes), *m = calloc(1, bytes), *v = calloc(1, bytes);
    assert_ok(mu_checkpoint_load(checkpoint.dir, manifest, &checkpoint.spec, p, m, v, NULL, &err), &err);
    assert_memory_equal(p, checkpoint.flat[0], bytes);
    assert_memory_equal(m, checkpoint.flat[1], bytes);
    assert_memory_equal(v, checkpoint.flat[2], bytes);
    memset(p, 0, bytes);
    assert_ok(mu_checkpoint_load(checkpoint.dir, manifest, &checkpoint.spec, p, NULL, NULL, NULL, &err),
              &err); /* for inference */
    assert_memory_equal(p, checkpoint.flat[0], bytes);

    struct mu_model_spec other;
    const struct mu_model_config config = {
        .family = MU_FAMILY_GPT2, .layers = 3, .heads = 2, .channels = 96, .context = 32, .vocab = 256};
    mu_model_spec_init(&other, &config);
    assert_fails(mu_checkpoint_load(checkpoint.dir, manifest, &other, p, m, v, NULL, &err), MU_ERR_CORRUPT, &err,
                 "this job's model has");
    free(p);
    free(m);
    free(v);
    mu_manifest_free(manifest);
    checkpoint_fini(&checkpoint);
}

/* Random shares: every wanted chunk comes, no other byte of the destination changes. */
static void test_load_of_runs_touches_the_wanted_chunks_only(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_manifest *manifest;
    struct mu_error err;
    checkpoint_init(&checkpoint);
    const struct mu_model_spec *spec = &checkpoint.spec;
    assert_ok(mu_manifest_read(checkpoint.dir, &manifest, &err), &err);
    size_t bytes = spec->flat_size * sizeof(float);
    float *flats[3], *expected = malloc(bytes);
    for (int kind = 0; kind < 3; kind++)
        flats[kind] = malloc(bytes);
    uint64_t random = 3;
    for (int round = 0; round < 40; round++) {
        struct mu_chunk_run runs[2][64];
        struct mu_checkpoint_want want = {.flats = {flats[0], flats[1], flats[2]}};
        uint32_t counts[2] = {0, 0};
        for (int list = 0; list < 2; list++) {
            uint64_t mask = mu_splitmix64(&random) | (round % 2 ? mu_splitmix64(&random) : 0);
            for (uint32_t chunk = 0; chunk < spec->chunk_count; chunk++) {
                if (round > 0 && !(mask >> chunk % 64 & 1)) /* the first round wants everything */
                    continue;
                if (counts[list] > 0 &&
                    runs[list][counts[list] - 1].first + runs[list][counts[list] - 1].count == chunk)
                    runs[list][counts[list] - 1].count++;
                else
                    runs[list][counts[list]++] = (struct mu_chunk_run){chunk, 1};
            }
        }
        for (int kind = 0; kind < 3; kind++) {
            want.runs[kind] = runs[kind > 0];
            want.run_counts[kind] = counts[kind > 0];
            memset(flats[kind], 0x5a, bytes);
        }
        atomic_uint_least64_t progress = 0;
        assert_ok(mu_checkpoint_load_runs(checkpoint.dir, manifest, spec, &want, NULL, &progress, &err), &err);
        assert_true(counts[0] + counts[1] == 0 || atomic_load(&progress) > 0);
        for (int kind = 0; kind < 3; kind++) {
            memset(expected, 0x5a, bytes);
            for (uint32_t i = 0; i < want.run_counts[kind]; i++) {
                for (uint32_t k = 0; k < want.runs[kind][i].count; k++) {
                    struct mu_chunk chunk = mu_model_chunk(spec, want.runs[kind][i].first + k);
                    memcpy(expected + chunk.offset, checkpoint.flat[kind] + chunk.offset, chunk.size * sizeof(float));
                }
            }
            assert_memory_equal(flats[kind], expected, bytes);
        }
    }
    free(expected);
    for (int kind = 0; kind < 3; kind++)
        free(flats[kind]);
    mu_manifest_free(manifest);
    checkpoint_fini(&checkpoint);
}

/* A share does not need the files that hold nothing of it, and finds damage in what it reads. */
static void test_load_of_runs_opens_only_what_it_needs(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_manifest *manifest;
    struct mu_error err;
    char first_piece[512], last_piece[512];
    checkpoint_init(&checkpoint);
    const struct mu_model_spec *spec = &checkpoint.spec;
    path_join(first_piece, checkpoint.dir, "piece-0.safetensors");
    path_join(last_piece, checkpoint.dir, "piece-2.safetensors");
    assert_ok(mu_manifest_read(checkpoint.dir, &manifest, &err), &err);
    float *p = calloc(spec->flat_size, sizeof(float));
    struct mu_chunk_run one = {0, 1}, last = {spec->chunk_count - 1, 1};
    struct mu_checkpoint_want want = {.runs = {&one}, .run_counts = {1}, .flats = {p}};
    assert_int_equal(unlink(last_piece), 0);
    assert_ok(mu_checkpoint_load_runs(checkpoint.dir, manifest, spec, &want, NULL, NULL, &err), &err);
    want.runs[0] = &last;
    assert_fails(mu_checkpoint_load_runs(checkpoint.dir, manifest, spec, &want, NULL, NULL, &err), MU_ERR_NOT_FOUND,
                 &err, last_piece);
    want.runs[0] = &one;
    size_t size_bytes;
    uint8_t *bytes = file_read(first_piece, &size_bytes);
    bytes[size_bytes - 1] ^= 1; /* of the second moments: not read */
    file_write(first_piece, bytes, size_bytes);
    assert_ok(mu_checkpoint_load_runs(checkpoint.dir, manifest, spec, &want, NULL, NULL, &err), &err);
    size_t data = size_bytes;
    for (size_t i = 0; i < manifest->pieces[0].entry_count; i++) {
        const struct mu_manifest_entry *entry = &manifest->pieces[0].entries[i];
        for (uint32_t k = 0; k < entry->chunk_count; k++)
            data -= mu_model_chunk(spec, entry->first_chunk + k).size * sizeof(float);
    }
    bytes[data] ^= 1; /* of the first entry */
    file_write(first_piece, bytes, size_bytes);
    free(bytes);
    assert_fails(mu_checkpoint_load_runs(checkpoint.dir, manifest, spec, &want, NULL, NULL, &err), MU_ERR_CORRUPT, &err,
                 first_piece);
    free(p);
    mu_manifest_free(manifest);
    checkpoint_fini(&checkpoint);
}

static void test_verify_names_every_bad_piece(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_checkpoint_report report;
    struct mu_error err;
    char first[512], last[512];
    checkpoint_init(&checkpoint);
    path_join(first, checkpoint.dir, "piece-0.safetensors");
    path_join(last, checkpoint.dir, "piece-2.safetensors");
    size_t size_bytes;
    uint8_t *bytes = file_read(first, &size_bytes);
    bytes[size_bytes / 2] ^= 4;
    file_write(first, bytes, size_bytes);
    free(bytes);
    assert_int_equal(unlink(last), 0);
    assert_fails(mu_checkpoint_verify(checkpoint.dir, &report, &err), MU_ERR_CORRUPT, &err, first);
    assert_int_equal(report.bad_piece_count, 2);
    assert_int_equal(report.problem_count, 2);
    assert_non_null(strstr(report.problems[0].text, "checksum is"));
    assert_int_equal(report.problems[1].status, MU_ERR_NOT_FOUND);
    assert_non_null(strstr(report.problems[1].text, last));

    struct mu_manifest *manifest;
    assert_ok(mu_manifest_read(checkpoint.dir, &manifest, &err), &err);
    float *p = calloc(checkpoint.spec.flat_size, sizeof(float));
    float *m = calloc(checkpoint.spec.flat_size, sizeof(float)), *v = calloc(checkpoint.spec.flat_size, sizeof(float));
    assert_fails(mu_checkpoint_load(checkpoint.dir, manifest, &checkpoint.spec, p, m, v, NULL, &err), MU_ERR_CORRUPT,
                 &err, first);
    free(p);
    free(m);
    free(v);
    mu_manifest_free(manifest);
    checkpoint_fini(&checkpoint);
}

/* A manifest that is whole but tells another story than the files. */
static void test_verify_compares_the_entries_of_each_piece(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_manifest *manifest;
    struct mu_error err;
    checkpoint_init(&checkpoint);
    assert_ok(mu_manifest_read(checkpoint.dir, &manifest, &err), &err);
    /* Exchange the file names of two pieces: sizes and checksums no longer fit. */
    struct mu_manifest_piece *pieces = manifest->pieces;
    char name[MU_PIECE_FILE_NAME_SIZE];
    strcpy(name, pieces[0].file);
    strcpy(pieces[0].file, pieces[1].file);
    strcpy(pieces[1].file, name);
    assert_ok(mu_manifest_write(checkpoint.dir, manifest, &err), &err);
    assert_fails(mu_checkpoint_verify(checkpoint.dir, NULL, &err), MU_ERR_CORRUPT, &err, "expected");
    /* Also exchange sizes and checksums: the files are good in themselves, the tiling on paper is, but not together. */
    uint64_t size_bytes = pieces[0].size_bytes;
    struct mu_hash128 hash = pieces[0].xxh3;
    pieces[0].size_bytes = pieces[1].size_bytes, pieces[0].xxh3 = pieces[1].xxh3;
    pieces[1].size_bytes = size_bytes, pieces[1].xxh3 = hash;
    assert_ok(mu_manifest_write(checkpoint.dir, manifest, &err), &err);
    assert_fails(mu_checkpoint_verify(checkpoint.dir, NULL, &err), MU_ERR_CORRUPT, &err,
                 "is not what the manifest or the model says");
    mu_manifest_free(manifest);
    checkpoint_fini(&checkpoint);
}

/* Copies <from>/<name> into the directory `to`. */
static void copy_into(const char *to, const char *from, const char *name)
{
    char source[512], target[512];
    size_t size_bytes;
    path_join(source, from, name);
    path_join(target, to, name);
    uint8_t *bytes = file_read(source, &size_bytes);
    file_write(target, bytes, size_bytes);
    free(bytes);
}

/* Three hosts' directories: pieces 0 and 1, 1 and 2, and the manifest alone. */
static void test_verify_puts_the_copies_of_several_directories_together(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_checkpoint_report report;
    struct mu_error err;
    char second[512], third[512], path[512];
    checkpoint_init(&checkpoint);
    path_join(second, checkpoint.scratch.path, "second");
    path_join(third, checkpoint.scratch.path, "third");
    assert_int_equal(mkdir(second, 0755), 0);
    assert_int_equal(mkdir(third, 0755), 0);
    copy_into(second, checkpoint.dir, MU_MANIFEST_FILE);
    copy_into(third, checkpoint.dir, MU_MANIFEST_FILE);
    copy_into(second, checkpoint.dir, "piece-1.safetensors");
    copy_into(second, checkpoint.dir, "piece-2.safetensors");
    path_join(path, checkpoint.dir, "piece-2.safetensors");
    assert_int_equal(unlink(path), 0);
    const char *dirs[] = {checkpoint.dir, third, second};
    assert_ok(mu_checkpoint_verify_copies(dirs, 3, &report, &err), &err);
    assert_int_equal(report.piece_count, PIECES);
    assert_int_equal(report.bad_piece_count, 0);
    assert_int_equal(report.single_piece_count, 2);
    assert_int_equal(report.here_counts[0], 2);
    assert_int_equal(report.here_counts[1], 0);
    assert_int_equal(report.here_counts[2], 2);

    /* One host alone: the piece that it does not have is named. */
    assert_fails(mu_checkpoint_verify_copies(dirs, 2, &report, &err), MU_ERR_NOT_FOUND, &err, path);
    assert_int_equal(report.bad_piece_count, 1);
    assert_int_equal(report.here_counts[0], 2);

    /* A wrong copy is told although another one is right. */
    path_join(path, second, "piece-1.safetensors");
    size_t size_bytes;
    uint8_t *bytes = file_read(path, &size_bytes);
    bytes[size_bytes / 2] ^= 4;
    file_write(path, bytes, size_bytes);
    free(bytes);
    assert_fails(mu_checkpoint_verify_copies(dirs, 3, &report, &err), MU_ERR_CORRUPT, &err, path);
    assert_int_equal(report.problem_count, 1);
    assert_int_equal(report.bad_piece_count, 1);
    assert_int_equal(report.here_counts[2], 1);
    assert_int_equal(report.single_piece_count, 3);
    checkpoint_fini(&checkpoint);
}

static void test_verify_takes_directories_of_one_checkpoint_only(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_checkpoint_report report;
    struct mu_manifest *manifest;
    struct mu_error err;
    char other[512];
    checkpoint_init(&checkpoint);
    path_join(other, checkpoint.scratch.path, "other");
    assert_int_equal(mkdir(other, 0755), 0);
    assert_ok(mu_manifest_read(checkpoint.dir, &manifest, &err), &err);
    manifest->identity.step++;
    assert_ok(mu_manifest_write(other, manifest, &err), &err);
    mu_manifest_free(manifest);
    const char *dirs[] = {checkpoint.dir, other, checkpoint.scratch.path};
    assert_fails(mu_checkpoint_verify_copies(dirs, 2, &report, &err), MU_ERR_CONFLICT, &err, other);
    assert_int_equal(report.here_counts[0], PIECES); /* the rest is judged all the same */
    assert_int_equal(report.bad_piece_count, 0);
    dirs[1] = dirs[0];
    assert_fails(mu_checkpoint_verify_copies(dirs + 1, 2, NULL, &err), MU_ERR_NOT_FOUND, &err, MU_MANIFEST_FILE);
    assert_fails(mu_checkpoint_verify_copies(dirs, 0, NULL, &err), MU_ERR_LIMIT, &err, "1 to 1024");
    assert_fails(mu_checkpoint_verify_copies(dirs, MU_VERIFY_DIRS_MAX + 1, NULL, &err), MU_ERR_LIMIT, &err, "1025");
    checkpoint_fini(&checkpoint);
}

static void test_missing_or_damaged_manifest_is_told(void **state)
{
    (void)state;
    struct checkpoint checkpoint;
    struct mu_manifest *manifest;
    struct mu_error err;
    char path[512];
    checkpoint_init(&checkpoint);
    path_join(path, checkpoint.dir, MU_MANIFEST_FILE);
    assert_int_equal(truncate(path, 200), 0);
    assert_fails(mu_checkpoint_verify(checkpoint.dir, NULL, &err), MU_ERR_CORRUPT, &err, path);
    assert_int_equal(truncate(path, 0), 0);
    assert_fails(mu_manifest_read(checkpoint.dir, &manifest, &err), MU_ERR_CORRUPT, &err, "not a checkpoint manifest");
    assert_int_equal(truncate(path, (off_t)MU_MANIFEST_BYTES_MAX + 1), 0);
    assert_fails(mu_manifest_read(checkpoint.dir, &manifest, &err), MU_ERR_LIMIT, &err, path);
    assert_int_equal(unlink(path), 0);
    assert_fails(mu_manifest_read(checkpoint.dir, &manifest, &err), MU_ERR_NOT_FOUND, &err, path);
    checkpoint_fini(&checkpoint);
}

static void test_failed_publish_keeps_the_old_manifest(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_model_spec spec;
    struct mu_manifest *again;
    struct mu_error err;
    char dir[512];
    if (!mount_tmpfs(scratch.path, "size=64k")) {
        scratch_remove(&scratch);
        skip();
    }
    path_join(dir, scratch.path, "c");
    assert_int_equal(mkdir(dir, 0755), 0);
    spec_init(&spec);
    struct mu_manifest *manifest = tiled_manifest(&spec, 2);
    assert_ok(mu_manifest_write(dir, manifest, &err), &err);
    manifest->identity.step++;
    char *record = calloc(1, 100000);
    memset(record, 'x', 99999);
    assert_int_equal(mu_manifest_set_job_record(manifest, record), MU_OK);
    assert_fails(mu_manifest_write(dir, manifest, &err), MU_ERR_NO_SPACE, &err, "No space left");
    assert_int_equal(count_files(dir), 1);
    assert_ok(mu_manifest_read(dir, &again, &err), &err);
    assert_int_equal(again->identity.step, 1200);
    free(record);
    mu_manifest_free(again);
    mu_manifest_free(manifest);
    unmount(scratch.path);
    scratch_remove(&scratch);
}

/* ---- whether a job may start from it ---- */

static enum mu_status check_start(const struct mu_job_spec *of, const struct mu_model_config *model,
                                  struct mu_error *err)
{
    struct mu_manifest *manifest = mu_manifest_new();
    char *record = mu_job_spec_to_text(of);
    assert_non_null(manifest);
    assert_non_null(record);
    assert_int_equal(mu_manifest_set_job_record(manifest, record), MU_OK);
    enum mu_status status = mu_manifest_check_model(manifest, model, "/models/base", err);
    mu_manifest_free(manifest);
    free(record);
    return status;
}

static struct mu_job_spec start_spec(enum mu_model_family family)
{
    struct mu_job_spec s;
    mu_job_spec_init(&s);
    bool llama = family == MU_FAMILY_LLAMA;
    s.model = (struct mu_model_config){.family = family,
                                       .layers = 2,
                                       .heads = 4,
                                       .channels = 64,
                                       .context = 32,
                                       .vocab = 256,
                                       .hidden = llama ? 96 : 0,
                                       .slices = 2};
    mu_model_config_resolve(&s.model);
    strcpy(s.name, "base");
    strcpy(s.data.path, "/data");
    s.batch.sequences = s.batch.micro = 2;
    s.batch.length = 32;
    s.steps = 1;
    return s;
}

static void test_start_from_another_model_names_the_field(void **state)
{
    (void)state;
    struct mu_job_spec gpt2 = start_spec(MU_FAMILY_GPT2), llama = start_spec(MU_FAMILY_LLAMA);
    struct mu_model_config given;
    struct mu_error err;
#define REFUSED(of, change, text)                                                                                      \
    do {                                                                                                               \
        given = (of).model;                                                                                            \
        change;                                                                                                        \
        assert_fails(check_start(&(of), &given, &err), MU_ERR_INVALID, &err, text);                                    \
    } while (0)
    REFUSED(gpt2, given.layers = 3, "model.layers: value 3 is not allowed: 2");
    REFUSED(gpt2, given.heads = 8, "model.heads: value 8 is not allowed: 4");
    REFUSED(llama, given.kv_heads = 2, "model.kv_heads: value 2 is not allowed: 4");
    REFUSED(gpt2, given.channels = 32, "model.channels: value 32 is not allowed: 64");
    REFUSED(llama, given.hidden = 98, "model.hidden: value 98 is not allowed: 96");
    REFUSED(gpt2, given.vocab = 257, "model.vocab: value 257 is not allowed: 256");
    REFUSED(gpt2, given.context = 64, "model.context: value 64 is not allowed: 32");
    REFUSED(llama, given.rope_base = 5e5, "model.rope_base: value 500000 is not allowed: 10000");
    REFUSED(gpt2, given.slices = 1, "parallel.slices: value 1 is not allowed: 2");
    REFUSED(gpt2, given = llama.model, "model.family: value llama is not allowed: gpt2");
#undef REFUSED
    given = gpt2.model;
    given.dropout = 0.5f;
    assert_ok(check_start(&gpt2, &given, &err), &err);
    given = llama.model;
    given.context = 4096;
    assert_ok(check_start(&llama, &given, &err), &err);
    given.kv_heads = 0; /* not given: as many as heads */
    assert_ok(check_start(&llama, &given, &err), &err);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encode_then_decode_gives_the_same),
        cmocka_unit_test(test_start_from_another_model_names_the_field),
        cmocka_unit_test(test_every_flip_and_cut_is_found),
        cmocka_unit_test(test_forged_fields_are_refused_by_name),
        cmocka_unit_test(test_writer_refuses_what_the_reader_would),
        cmocka_unit_test(test_tiling_holds_for_every_number_of_pieces),
        cmocka_unit_test(test_tiling_names_the_first_gap_or_overlap),
        cmocka_unit_test(test_tiling_catches_any_single_wrong_entry),
        cmocka_unit_test(test_checkpoint_verifies_and_loads),
        cmocka_unit_test(test_load_of_runs_touches_the_wanted_chunks_only),
        cmocka_unit_test(test_load_of_runs_opens_only_what_it_needs),
        cmocka_unit_test(test_verify_names_every_bad_piece),
        cmocka_unit_test(test_verify_compares_the_entries_of_each_piece),
        cmocka_unit_test(test_verify_puts_the_copies_of_several_directories_together),
        cmocka_unit_test(test_verify_takes_directories_of_one_checkpoint_only),
        cmocka_unit_test(test_missing_or_damaged_manifest_is_told),
        cmocka_unit_test(test_failed_publish_keeps_the_old_manifest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
