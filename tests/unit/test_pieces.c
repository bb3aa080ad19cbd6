/* links: mu_storage mu_plan */
#include "pieces_testing.h"

#include "storage/safetensors.h"

/* Gathers the entries into flat spaces; skips every second one when told to, and with `holes` every second chunk of the
 * others. */
struct gathered {
    const struct mu_model_spec *spec;
    float *flat[3];
    size_t count;
    bool skip_odd, holes;
};

static bool gather_wants(void *arg, const struct mu_piece_entry *entry)
{
    struct gathered *gathered = arg;
    assert_true(mu_piece_entry_fits(entry, gathered->spec));
    size_t index = gathered->count++;
    return !(gathered->skip_odd && index % 2);
}

static float *gather_place(void *arg, const struct mu_piece_entry *entry, uint64_t first, uint64_t *count)
{
    struct gathered *gathered = arg;
    assert_true(first<entry->size && * count> 0 && *count <= entry->size - first);
    if (gathered->holes) {
        uint64_t left = MU_CHUNK_ELEMENTS - first % MU_CHUNK_ELEMENTS;
        *count = *count < left ? *count : left;
        if (first / MU_CHUNK_ELEMENTS % 2)
            return NULL;
    }
    return gathered->flat[entry->kind] + entry->offset + first;
}

static void gathered_init(struct gathered *gathered, const struct mu_model_spec *spec)
{
    *gathered = (struct gathered){.spec = spec};
    for (int kind = 0; kind < 3; kind++)
        gathered->flat[kind] = calloc(spec->flat_size, sizeof(float));
}

static void gathered_fini(struct gathered *gathered)
{
    for (int kind = 0; kind < 3; kind++)
        free(gathered->flat[kind]);
}

static void test_entries_cover_the_chunks_once_per_kind(void **state)
{
    (void)state;
    struct model model;
    model_init(&model);
    for (uint32_t pieces = 1; pieces <= model.spec.chunk_count; pieces++) {
        uint64_t elements[3] = {0};
        for (uint32_t piece = 0; piece < pieces; piece++) {
            uint32_t first, chunks;
            size_t count;
            mu_model_owned_chunks(&model.spec, pieces, piece, &first, &chunks);
            struct mu_piece_entry *entries = entries_of(&model, first, chunks, &count);
            for (size_t i = 0; i < count; i++) {
                assert_true(mu_piece_entry_fits(&entries[i], &model.spec));
                assert_ptr_equal(entries[i].data, model.flat[entries[i].kind] + entries[i].offset);
                elements[entries[i].kind] += entries[i].size;
            }
            free(entries);
        }
        for (int kind = 0; kind < 3; kind++)
            assert_int_equal(elements[kind], model.spec.parameter_count);
    }
    model_fini(&model);
}

static void test_entry_that_is_not_the_models_does_not_fit(void **state)
{
    (void)state;
    struct model model;
    size_t count;
    model_init(&model);
    struct mu_piece_entry *entries = entries_of(&model, 0, model.spec.chunk_count, &count), bad;
    assert_true(mu_piece_entry_fits(&entries[1], &model.spec));
    bad = entries[1], bad.offset++;
    assert_false(mu_piece_entry_fits(&bad, &model.spec));
    bad = entries[1], bad.size--;
    assert_false(mu_piece_entry_fits(&bad, &model.spec));
    bad = entries[1], bad.cell = model.spec.cell_count;
    assert_false(mu_piece_entry_fits(&bad, &model.spec));
    bad = entries[1], bad.cell++;
    assert_false(mu_piece_entry_fits(&bad, &model.spec));
    bad = entries[1], bad.chunk_count = UINT32_MAX;
    assert_false(mu_piece_entry_fits(&bad, &model.spec));
    bad = entries[1], bad.first_chunk = UINT32_MAX;
    assert_false(mu_piece_entry_fits(&bad, &model.spec));
    bad = entries[1], bad.kind = MU_PIECE_META;
    assert_false(mu_piece_entry_fits(&bad, &model.spec));
    free(entries);
    model_fini(&model);
}

static void test_written_piece_reads_back_bit_for_bit(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct gathered gathered;
    struct mu_checkpoint_identity read;
    struct mu_error err;
    model_init(&model);
    gathered_init(&gathered, &model.spec);
    struct written written = write_piece(&model, scratch.path);
    assert_int_equal(count_files(scratch.path), 1);

    struct mu_piece_expected expected = {
        .size_bytes = written.result.size_bytes, .xxh3 = written.result.xxh3, .identity = &identity};
    struct mu_piece_read_options options = {
        .wants = gather_wants, .place = gather_place, .arg = &gathered, .expected = &expected};
    assert_ok(mu_piece_read(written.path, &options, &read, &err), &err);
    assert_string_equal(read.job, "kjv");
    assert_true(read.seq == 12 && read.step == 1200 && read.generation == identity.generation);
    assert_int_equal(gathered.count, written.count);
    for (size_t i = 0; i < written.count; i++)
        assert_memory_equal(gathered.flat[written.entries[i].kind] + written.entries[i].offset, written.entries[i].data,
                            written.entries[i].size * sizeof(float));
    assert_ok(mu_piece_read(written.path, &(struct mu_piece_read_options){.expected = NULL}, NULL, &err), &err);

    size_t size_bytes;
    uint8_t *bytes = file_read(written.path, &size_bytes);
    struct mu_hash128 whole = mu_xxh3_128(bytes, size_bytes);
    assert_int_equal(size_bytes, written.result.size_bytes);
    assert_true(whole.low == written.result.xxh3.low && whole.high == written.result.xxh3.high);
    free(bytes);
    free(written.entries);
    gathered_fini(&gathered);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_piece_is_a_plain_safetensors_file(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct mu_safetensors *file;
    struct mu_error err;
    model_init(&model);
    struct written written = write_piece(&model, scratch.path);
    assert_ok(mu_safetensors_open(written.path, &file, &err), &err);
    assert_int_equal(mu_safetensors_data_start(file) % MU_PIECE_DATA_ALIGN_BYTES, 0);
    assert_string_equal(mu_safetensors_metadata(file, "format"), "pt");
    assert_string_equal(mu_safetensors_metadata(file, "muster.job"), "kjv");
    assert_string_equal(mu_safetensors_metadata(file, "muster.step"), "1200");
    const struct mu_piece_entry *entry = &written.entries[written.count - 1];
    char name[MU_PIECE_TENSOR_NAME_SIZE], wanted[128];
    mu_piece_tensor_name(entry, name);
    snprintf(wanted, sizeof wanted, "%s/v/%u-%u", entry->cell_name, entry->first_chunk,
             entry->first_chunk + entry->chunk_count - 1);
    assert_string_equal(name, wanted);
    const struct mu_safetensors_tensor *tensor = mu_safetensors_find(file, name);
    assert_non_null(tensor);
    assert_int_equal(tensor->dtype, MU_ST_F32);
    assert_int_equal(tensor->shape[0], entry->size);
    mu_safetensors_close(file);

    struct mu_piece_entry *listed;
    struct mu_checkpoint_identity read;
    size_t count;
    assert_ok(mu_piece_list(written.path, &read, &listed, &count, &err), &err);
    assert_int_equal(count, written.count);
    for (size_t i = 0; i < count; i++) {
        assert_string_equal(listed[i].cell_name, written.entries[i].cell_name);
        assert_int_equal(listed[i].offset, written.entries[i].offset);
        assert_int_equal(listed[i].xxh3.low, written.entries[i].xxh3.low);
    }
    free(listed);
    free(written.entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_partial_read_touches_only_what_is_wanted(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct gathered gathered;
    struct mu_error err;
    model_init(&model);
    struct written written = write_piece(&model, scratch.path);
    struct mu_piece_expected expected = {.size_bytes = written.result.size_bytes, .xxh3 = written.result.xxh3};
    /* Damage the last entry, which a partial reader of the even ones does not want. */
    assert_int_equal(written.count % 2, 0);
    size_t size_bytes;
    uint8_t *bytes = file_read(written.path, &size_bytes);
    bytes[size_bytes - 1] ^= 1;
    file_write(written.path, bytes, size_bytes);
    free(bytes);

    gathered_init(&gathered, &model.spec);
    gathered.skip_odd = true;
    struct mu_piece_read_options options = {
        .wants = gather_wants, .place = gather_place, .arg = &gathered, .expected = &expected, .partial = true};
    assert_ok(mu_piece_read(written.path, &options, NULL, &err), &err);
    for (size_t i = 0; i < written.count; i++) {
        const struct mu_piece_entry *entry = &written.entries[i];
        const float *got = gathered.flat[entry->kind] + entry->offset;
        if (i % 2 == 0)
            assert_memory_equal(got, entry->data, entry->size * sizeof(float));
        else
            assert_true(got[0] == 0.0f && got[entry->size - 1] == 0.0f);
    }
    gathered.count = 0;
    options.partial = false; /* the whole file is judged even if an entry is skipped */
    assert_fails(mu_piece_read(written.path, &options, NULL, &err), MU_ERR_CORRUPT, &err, "checksum is");
    gathered_fini(&gathered);
    free(written.entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_damage_is_always_found_and_named(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    float data[2][300];
    uint64_t random = 21;
    char path[512];
    for (size_t i = 0; i < 600; i++)
        data[i / 300][i % 300] = (float)i;
    struct mu_piece_entry entries[] = {
        {.kind = MU_PIECE_PARAMETERS,
         .cell = 3,
         .cell_name = "L3.0",
         .first_chunk = 12,
         .chunk_count = 4,
         .offset = 77,
         .size = 300,
         .data = data[0]},
        {.kind = MU_PIECE_MOMENT1,
         .cell = 3,
         .cell_name = "L3.0",
         .first_chunk = 12,
         .chunk_count = 4,
         .offset = 77,
         .size = 300,
         .data = data[1]},
    };
    assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, 2, NULL, &result, &err), &err);
    path_join(path, scratch.path, "p");
    size_t size_bytes;
    uint8_t *bytes = file_read(path, &size_bytes);
    struct mu_piece_expected expected = {.size_bytes = result.size_bytes, .xxh3 = result.xxh3, .identity = &identity};
    struct mu_piece_read_options options = {.expected = &expected}, alone = {.expected = NULL};

    for (int round = 0; round < 600; round++) {
        size_t at = mu_splitmix64(&random) % size_bytes;
        uint8_t bit = (uint8_t)(1u << (mu_splitmix64(&random) & 7));
        bytes[at] ^= bit;
        file_write(path, bytes, size_bytes);
        enum mu_status status = mu_piece_read(path, &options, NULL, &err);
        assert_true(status != MU_OK && strstr(err.text, path) && !strchr(err.text, '\n'));
        if (at >= MU_PIECE_DATA_ALIGN_BYTES) /* data: found by the file's own checksum too, and the entry is named */
            assert_fails(mu_piece_read(path, &alone, NULL, &err), MU_ERR_CORRUPT, &err,
                         at < MU_PIECE_DATA_ALIGN_BYTES + sizeof data[0] ? "entry L3.0/p/12-15: checksum is"
                                                                         : "entry L3.0/m/12-15: checksum is");
        bytes[at] ^= bit;
    }
    /* What neither the index nor an entry vouches for: only the checksum of the whole file can find it. */
    char *format = strstr((char *)bytes + 8, "\"pt\"");
    assert_non_null(format);
    format[1] = 'q';
    file_write(path, bytes, size_bytes);
    assert_ok(mu_piece_read(path, &alone, NULL, &err), &err);
    assert_fails(mu_piece_read(path, &options, NULL, &err), MU_ERR_CORRUPT, &err, "checksum of the file is");
    format[1] = 'p';
    for (int round = 0; round < 100; round++) {
        file_write(path, bytes, mu_splitmix64(&random) % size_bytes);
        assert_fails(mu_piece_read(path, &options, NULL, &err), MU_ERR_CORRUPT, &err, "size is");
        assert_int_equal(mu_piece_read(path, &alone, NULL, &err), MU_ERR_CORRUPT);
    }
    free(bytes);
    scratch_remove(&scratch);
}

/* Every character of the index, replaced: offsets, cells and names that a file alone must vouch for. */
static void test_index_checksum_finds_every_changed_number(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    float data[8] = {0};
    char path[512];
    struct mu_piece_entry entry = {.kind = MU_PIECE_MOMENT2,
                                   .cell = 41,
                                   .cell_name = "L20.shared",
                                   .first_chunk = 120,
                                   .chunk_count = 3,
                                   .offset = 7700,
                                   .size = 8,
                                   .data = data};
    assert_ok(mu_piece_write(scratch.path, "p", &identity, &entry, 1, NULL, &result, &err), &err);
    path_join(path, scratch.path, "p");
    size_t size_bytes;
    uint8_t *bytes = file_read(path, &size_bytes);
    char *header = (char *)bytes + 8;
    header[MU_PIECE_DATA_ALIGN_BYTES - 9] = 0;
    size_t changed = 0;
    for (char *at = header; *at; at++) {
        if (*at < '0' || *at > '9')
            continue;
        char old = *at;
        *at = old == '9' ? '8' : (char)(old + 1);
        header[MU_PIECE_DATA_ALIGN_BYTES - 9] = ' ';
        file_write(path, bytes, size_bytes);
        header[MU_PIECE_DATA_ALIGN_BYTES - 9] = 0;
        if (mu_piece_read(path, &(struct mu_piece_read_options){.expected = NULL}, NULL, &err) == MU_OK)
            fail_msg("a changed digit at byte %d is not found: ...%.20s", (int)(at - header), at);
        *at = old;
        changed++;
    }
    assert_true(changed > 60);
    free(bytes);
    scratch_remove(&scratch);
}

static void test_piece_of_another_checkpoint_is_refused(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct model model;
    model_init(&model);
    struct written written = write_piece(&model, scratch.path);
    struct mu_checkpoint_identity other = identity;
    struct mu_piece_expected expected = {
        .size_bytes = written.result.size_bytes, .xxh3 = written.result.xxh3, .identity = &other};
    struct mu_piece_read_options options = {.expected = &expected};
    other.generation = 1; /* a snapshot of a step is valid whoever made it */
    assert_ok(mu_piece_read(written.path, &options, NULL, &err), &err);
    other.step++;
    assert_fails(mu_piece_read(written.path, &options, NULL, &err), MU_ERR_CORRUPT, &err,
                 "step 1200; expected job kjv, checkpoint 12, step 1201");
    other = identity;
    other.seq--;
    assert_fails(mu_piece_read(written.path, &options, NULL, &err), MU_ERR_CORRUPT, &err,
                 "expected job kjv, checkpoint 11");
    strcpy(other.job, "web");
    assert_fails(mu_piece_read(written.path, &options, NULL, &err), MU_ERR_CORRUPT, &err, "expected job web");
    free(written.entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_part_of_an_entry_goes_to_its_place_and_the_rest_is_verified(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct gathered gathered;
    struct mu_error err;
    model_init(&model);
    struct written written = write_piece(&model, scratch.path);
    gathered_init(&gathered, &model.spec);
    gathered.holes = true;
    struct mu_piece_expected expected = {.size_bytes = written.result.size_bytes, .xxh3 = written.result.xxh3};
    atomic_uint_least64_t progress = 0;
    struct mu_piece_read_options options = {
        .wants = gather_wants, .place = gather_place, .arg = &gathered, .expected = &expected, .progress = &progress};
    assert_ok(mu_piece_read(written.path, &options, NULL, &err), &err);
    uint64_t blocks = 0, holes = 0;
    for (size_t i = 0; i < written.count; i++) {
        const struct mu_piece_entry *entry = &written.entries[i];
        const float *got = gathered.flat[entry->kind] + entry->offset;
        for (uint64_t first = 0; first < entry->size; first += MU_CHUNK_ELEMENTS, blocks++) {
            uint64_t size = entry->size - first < MU_CHUNK_ELEMENTS ? entry->size - first : MU_CHUNK_ELEMENTS;
            bool is_hole = first / MU_CHUNK_ELEMENTS % 2;
            holes += is_hole;
            for (uint64_t k = 0; k < size; k++)
                assert_true(memcmp(&got[first + k], is_hole ? &(float){0} : &entry->data[first + k], 4) == 0);
        }
    }
    assert_true(holes > 0);
    assert_int_equal(atomic_load(&progress), blocks);
    /* A hole is verified like the rest. */
    size_t size_bytes;
    uint8_t *bytes = file_read(written.path, &size_bytes);
    size_t at = size_bytes, large = 0;
    for (size_t i = 0; i < written.count; i++)
        at -= written.entries[i].size * sizeof(float);
    for (; written.entries[large].size <= MU_CHUNK_ELEMENTS + 1; large++)
        at += written.entries[large].size * sizeof(float);
    bytes[at + MU_CHUNK_ELEMENTS * sizeof(float) + 4] ^= 1;
    file_write(written.path, bytes, size_bytes);
    free(bytes);
    options.partial = true;
    assert_fails(mu_piece_read(written.path, &options, NULL, &err), MU_ERR_CORRUPT, &err, "checksum is");
    gathered_fini(&gathered);
    free(written.entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_runs_are_found_by_any_chunk(void **state)
{
    (void)state;
    static const struct mu_chunk_run runs[] = {{2, 3}, {5, 1}, {9, 4}};
    static const bool in[] = {0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0};
    static const uint32_t ends[] = {2, 2, 5, 5, 5, 6, 9, 9, 9, 13, 13, 13, 13, UINT32_MAX, UINT32_MAX};
    uint32_t end;
    for (uint32_t chunk = 0; chunk < sizeof in; chunk++) {
        assert_int_equal(mu_runs_have(runs, 3, chunk, &end), in[chunk]);
        assert_int_equal(end, ends[chunk]);
    }
    assert_false(mu_runs_have(NULL, 0, 7, &end));
    assert_int_equal(end, UINT32_MAX);
}

static void test_entries_of_runs_are_those_of_each_run_kind_by_kind(void **state)
{
    (void)state;
    struct model model;
    model_init(&model);
    uint32_t chunks = model.spec.chunk_count;
    assert_true(chunks >= 6);
    const struct mu_chunk_run runs[] = {{0, 1}, {2, 2}, {chunks - 1, 1}};
    size_t count = mu_piece_entries_of_runs(&model.spec, runs, 3, NULL, 0), at = 0;
    struct mu_piece_entry entries[64], one[64];
    assert_true(count > 0 && count <= 64);
    assert_int_equal(mu_piece_entries_of_runs(&model.spec, runs, 3, entries, 64), count);
    for (int kind = 0; kind < 3; kind++) {
        for (int i = 0; i < 3; i++) {
            size_t of_run =
                mu_piece_entries_of_chunks(&model.spec, runs[i].first, runs[i].count, NULL, NULL, NULL, one, 64);
            for (size_t k = of_run / 3 * (size_t)kind; k < of_run / 3 * (size_t)(kind + 1); k++, at++)
                assert_memory_equal(&entries[at], &one[k], sizeof one[k]);
        }
    }
    assert_int_equal(at, count);
    model_fini(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_entries_cover_the_chunks_once_per_kind),
        cmocka_unit_test(test_entry_that_is_not_the_models_does_not_fit),
        cmocka_unit_test(test_written_piece_reads_back_bit_for_bit),
        cmocka_unit_test(test_piece_is_a_plain_safetensors_file),
        cmocka_unit_test(test_partial_read_touches_only_what_is_wanted),
        cmocka_unit_test(test_part_of_an_entry_goes_to_its_place_and_the_rest_is_verified),
        cmocka_unit_test(test_runs_are_found_by_any_chunk),
        cmocka_unit_test(test_entries_of_runs_are_those_of_each_run_kind_by_kind),
        cmocka_unit_test(test_damage_is_always_found_and_named),
        cmocka_unit_test(test_index_checksum_finds_every_changed_number),
        cmocka_unit_test(test_piece_of_another_checkpoint_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
