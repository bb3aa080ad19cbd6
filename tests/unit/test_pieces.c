/* links: mu_storage mu_plan */
#include "storage_testing.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "common/rng.h"
#include "storage/pieces.h"
#include "storage/safetensors.h"

/* This program's own fsync and renameat stand before the C library's: they fail on demand. */
static int fsync_fails_at, rename_fails;
static int fsync_calls;

int fsync(int fd)
{
    fsync_calls++;
    if (fsync_fails_at == fsync_calls) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

/* How pwrite behaves on descriptors with O_DIRECT, and how many bytes went over them from `watched`. */
static enum { DIRECT_WORKS, DIRECT_REFUSED, DIRECT_SHORT, DIRECT_FAILS } direct_quirk;
static const uint8_t *watched;
static size_t watched_size, direct_bytes, unstaged_bytes;

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    if (fcntl(fd, F_GETFL) & O_DIRECT) {
        if (direct_quirk == DIRECT_REFUSED || direct_quirk == DIRECT_FAILS) {
            errno = direct_quirk == DIRECT_FAILS ? EIO : EINVAL;
            return -1;
        }
        if ((uintptr_t)data % 512 || size % 512 || offset % 512) {
            errno = EINVAL;
            return -1;
        }
        direct_bytes += size;
        if ((const uint8_t *)data >= watched && (const uint8_t *)data < watched + watched_size)
            unstaged_bytes += size;
    }
    if (direct_quirk == DIRECT_SHORT && size > 5000)
        size = 5000 - (size_t)(offset / 4096 % 7);
    return (ssize_t)syscall(SYS_pwrite64, fd, data, size, offset);
}

int renameat(int old_dir, const char *old_name, int new_dir, const char *new_name)
{
    if (rename_fails) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_renameat2, old_dir, old_name, new_dir, new_name, 0);
}

static const struct mu_checkpoint_identity identity = {
    .job = "kjv", .seq = 12, .step = 1200, .generation = (7ull << 40) + 3};

struct model {
    struct mu_model_spec spec;
    float *flat[3];
};

static void model_init(struct model *model)
{
    const struct mu_model_config config = {
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 96, .context = 32, .vocab = 256};
    mu_model_spec_init(&model->spec, &config);
    assert_true(model->spec.chunk_count > model->spec.cell_count); /* some cell has several chunks */
    uint64_t random = 5;
    for (int kind = 0; kind < 3; kind++) {
        model->flat[kind] = calloc(model->spec.flat_size, sizeof(float));
        for (uint64_t i = 0; i < model->spec.flat_size; i++)
            model->flat[kind][i] = (float)(mu_splitmix64(&random) >> 40) * 1e-3f;
    }
}

static void model_fini(struct model *model)
{
    for (int kind = 0; kind < 3; kind++)
        free(model->flat[kind]);
}

struct written {
    struct mu_piece_entry *entries;
    size_t count;
    struct mu_piece_result result;
    char path[512];
};

static struct mu_piece_entry *entries_of(const struct model *model, uint32_t first, uint32_t chunks, size_t *ret_count)
{
    size_t count = mu_piece_entries_of_chunks(&model->spec, first, chunks, NULL, NULL, NULL, NULL, 0);
    struct mu_piece_entry *entries = calloc(count, sizeof *entries);
    assert_int_equal(mu_piece_entries_of_chunks(&model->spec, first, chunks, model->flat[0], model->flat[1],
                                                model->flat[2], entries, count),
                     count);
    *ret_count = count;
    return entries;
}

static struct written write_piece(const struct model *model, const char *dir)
{
    struct written written;
    struct mu_error err;
    written.entries = entries_of(model, 1, model->spec.chunk_count - 1, &written.count);
    assert_ok(mu_piece_write(dir, "piece-1.safetensors", &identity, written.entries, written.count, NULL,
                             &written.result, &err),
              &err);
    path_join(written.path, dir, "piece-1.safetensors");
    return written;
}

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

/* Larger than several blocks, with odd sizes, so that the staged and the direct path of the writer meet. */
static void test_entries_across_blocks_read_back(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    char path[512];
    static const size_t sizes[] = {1, 5u << 20, 1000003, 3, (2u << 20) - 1, 2u << 20};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    struct mu_piece_entry entries[COUNT];
    uint64_t random = 9;
    for (size_t i = 0; i < COUNT; i++) {
        uint32_t *data = malloc(sizes[i] * sizeof *data);
        for (size_t j = 0; j < sizes[i]; j++)
            data[j] = (uint32_t)mu_splitmix64(&random);
        entries[i] = (struct mu_piece_entry){.kind = MU_PIECE_META,
                                             .cell_name = "state",
                                             .first_chunk = (uint32_t)i,
                                             .chunk_count = 1,
                                             .size = sizes[i],
                                             .data = (const float *)data};
    }
    assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, COUNT, NULL, &result, &err), &err);
    path_join(path, scratch.path, "p");
    struct mu_piece_expected expected = {.size_bytes = result.size_bytes, .xxh3 = result.xxh3};
    assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = &expected}, NULL, &err), &err);
    size_t size_bytes;
    uint8_t *bytes = file_read(path, &size_bytes);
    size_t at = size_bytes;
    for (size_t i = COUNT; i-- > 0;) {
        at -= sizes[i] * sizeof(float);
        assert_memory_equal(bytes + at, entries[i].data, sizes[i] * sizeof(float));
        free((void *)entries[i].data);
    }
    assert_int_equal(at % MU_PIECE_DATA_ALIGN_BYTES, 0);
    free(bytes);
    scratch_remove(&scratch);
}

/* Entries that lie side by side from a page on, as a snapshot has them: their whole pages go to the disk from where
 * they are; where the file system refuses, or takes only a part, the file comes out the same. */
static void test_packed_entries_are_written_directly_or_else_all_the_same(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result first, again;
    static const size_t sizes[] = {3, 5u << 20, 1000003, (2u << 20) - 1, 77};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    struct mu_piece_entry entries[COUNT];
    size_t total = 0;
    for (size_t i = 0; i < COUNT; i++)
        total += sizes[i];
    uint32_t *data;
    assert_int_equal(posix_memalign((void **)&data, 4096, total * sizeof *data), 0);
    uint64_t random = 19;
    for (size_t i = 0; i < total; i++)
        data[i] = (uint32_t)mu_splitmix64(&random);
    for (size_t i = 0, at = 0; i < COUNT; at += sizes[i++])
        entries[i] = (struct mu_piece_entry){.kind = MU_PIECE_META,
                                             .cell_name = "state",
                                             .first_chunk = (uint32_t)i,
                                             .chunk_count = 1,
                                             .size = sizes[i],
                                             .data = (const float *)data + at};
    watched = (const uint8_t *)data;
    watched_size = total * sizeof *data;
    direct_bytes = unstaged_bytes = 0;
    assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, COUNT, NULL, &first, &err), &err);
    if (direct_bytes == 0)
        print_message("no direct output on this file system\n");
    else
        assert_true(unstaged_bytes > watched_size - 4096 && unstaged_bytes <= watched_size);
    for (direct_quirk = DIRECT_REFUSED; direct_quirk <= DIRECT_SHORT; direct_quirk++) {
        assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, COUNT, NULL, &again, &err), &err);
        assert_true(again.xxh3.low == first.xxh3.low && again.xxh3.high == first.xxh3.high);
        char path[512];
        path_join(path, scratch.path, "p");
        struct mu_piece_expected expected = {.size_bytes = again.size_bytes, .xxh3 = again.xxh3};
        assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = &expected}, NULL, &err), &err);
    }
    direct_quirk = DIRECT_FAILS;
    if (direct_bytes > 0)
        assert_fails(mu_piece_write(scratch.path, "q", &identity, entries, COUNT, NULL, &again, &err), MU_ERR_IO, &err,
                     "cannot write at byte");
    direct_quirk = DIRECT_WORKS;
    watched = NULL;
    assert_int_equal(count_files(scratch.path), 1);
    free(data);
    scratch_remove(&scratch);
}

static void test_large_piece_on_a_file_system_without_direct_output(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    if (!mount_tmpfs(scratch.path, "size=64m")) {
        scratch_remove(&scratch);
        skip();
    }
    size_t size = 5u << 20;
    float *data = calloc(size, sizeof *data);
    for (size_t i = 0; i < size; i++)
        data[i] = (float)i;
    struct mu_piece_entry entry = {
        .kind = MU_PIECE_META, .cell_name = "E.0", .first_chunk = 0, .chunk_count = 1, .size = size, .data = data};
    assert_ok(mu_piece_write(scratch.path, "p", &identity, &entry, 1, NULL, &result, &err), &err);
    char path[512];
    path_join(path, scratch.path, "p");
    struct mu_piece_expected expected = {.size_bytes = result.size_bytes, .xxh3 = result.xxh3};
    assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = &expected}, NULL, &err), &err);
    free(data);
    unmount(scratch.path);
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

static void test_bad_arguments_are_refused_before_anything_is_written(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    float data[4] = {1};
    struct mu_piece_entry good = {.kind = MU_PIECE_META,
                                  .cell_name = "E.0",
                                  .first_chunk = 0,
                                  .chunk_count = 1,
                                  .size = 4,
                                  .data = data},
                          bad;
    static const char *const names[] = {"", ".", "..", "../p", "a/b", ".hidden", "a b", "\xff"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        assert_fails(mu_piece_write(scratch.path, names[i], &identity, &good, 1, NULL, &result, &err), MU_ERR_INVALID,
                     &err, "piece name");
    struct mu_checkpoint_identity no_job = {.job = ""};
    assert_fails(mu_piece_write(scratch.path, "p", &no_job, &good, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "job name");
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &good, 0, NULL, &result, &err), MU_ERR_LIMIT, &err,
                 "0 entries");
    bad = good, bad.data = NULL;
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &bad, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "entry 0");
    bad = good, strcpy(bad.cell_name, "a/b");
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &bad, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "entry 0");
    bad = good, bad.chunk_count = 0;
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &bad, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "entry 0");
    struct mu_piece_entry twice[] = {good, good};
    assert_fails(mu_piece_write(scratch.path, "p", &identity, twice, 2, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "two tensors");
    assert_int_equal(count_files(scratch.path), 0);
    scratch_remove(&scratch);
}

static void test_failed_sync_or_rename_leaves_no_file(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct mu_error err;
    struct mu_piece_result result;
    size_t count;
    model_init(&model);
    struct mu_piece_entry *entries = entries_of(&model, 0, model.spec.chunk_count, &count);
    for (int at = 1; at <= 2; at++) { /* of the file, of the directory */
        fsync_calls = 0;
        fsync_fails_at = at;
        assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_IO, &err,
                     "fsync failed");
        assert_int_equal(fsync_calls, at); /* never tried again on the same file */
        assert_int_equal(count_files(scratch.path), 0);
    }
    fsync_fails_at = 0;
    rename_fails = 1;
    assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_IO, &err,
                 "cannot rename");
    assert_int_equal(count_files(scratch.path), 0);
    rename_fails = 0;
    assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err),
              &err); /* again, from memory */
    assert_int_equal(count_files(scratch.path), 1);
    free(entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_full_disk_is_told_early_and_leaves_no_file(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct mu_error err;
    struct mu_piece_result result;
    size_t count;
    if (!mount_tmpfs(scratch.path, "size=1m")) {
        scratch_remove(&scratch);
        skip();
    }
    model_init(&model);
    struct mu_piece_entry *entries = entries_of(&model, 0, model.spec.chunk_count, &count);
    assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_NO_SPACE,
                 &err, "cannot allocate");
    assert_non_null(strstr(err.text, "No space left on device"));
    assert_int_equal(count_files(scratch.path), 0);
    make_read_only(scratch.path);
    assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_DENIED, &err,
                 "Read-only file system");
    unmount(scratch.path);
    free(entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_impossible_directories_are_told(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    float data[4] = {1};
    char path[512];
    struct mu_piece_entry entry = {
        .kind = MU_PIECE_META, .cell_name = "E.0", .first_chunk = 0, .chunk_count = 1, .size = 4, .data = data};
    path_join(path, scratch.path, "file");
    file_write(path, "x", 1);
    assert_fails(mu_piece_write(path, "p", &identity, &entry, 1, NULL, &result, &err), MU_ERR_IO, &err,
                 "Not a directory");
    path_join(path, scratch.path, "absent");
    assert_fails(mu_piece_write(path, "p", &identity, &entry, 1, NULL, &result, &err), MU_ERR_NOT_FOUND, &err, path);
    scratch_remove(&scratch);
}

#ifdef MU_FAULTS
/* Killed at each named point: under the piece's name there is either nothing or a whole file, and a later write
 * succeeds. */
static void test_kill_at_every_fault_point_publishes_nothing_partial(void **state)
{
    (void)state;
    static const char *const points[] = {"worker.piece.open", "worker.piece.write", "worker.piece.fsync",
                                         "worker.piece.rename", "worker.piece.dirsync"};
    struct model model;
    size_t count;
    model_init(&model);
    struct mu_piece_entry *entries = entries_of(&model, 0, model.spec.chunk_count, &count);
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        struct scratch scratch = scratch_make();
        struct mu_piece_result result;
        struct mu_error err;
        char path[512];
        int how;
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            setenv("MU_FAULT_AT", points[i], 1);
            _exit(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, NULL) != MU_OK);
        }
        assert_int_equal(waitpid(pid, &how, 0), pid);
        assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL); /* the point was reached */
        path_join(path, scratch.path, "p");
        bool is_there = access(path, F_OK) == 0;
        assert_int_equal(is_there, i == 4);
        if (is_there)
            assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = NULL}, NULL, &err), &err);
        assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), &err);
        assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = NULL}, NULL, &err), &err);
        scratch_remove(&scratch);
    }
    free(entries);
    model_fini(&model);
}
#endif

static void *set_flag(void *arg)
{
    atomic_store((atomic_bool *)arg, true);
    return NULL;
}

static void test_abort_ends_a_throttled_write_and_leaves_no_file(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    atomic_bool abort_flag = false;
    size_t size = 3 * MU_PIECE_BLOCK_BYTES / sizeof(float);
    float *data = calloc(size, sizeof *data);
    struct mu_piece_entry entry = {
        .kind = MU_PIECE_META, .cell_name = "E.0", .first_chunk = 0, .chunk_count = 1, .size = size, .data = data};
    /* At a byte a second the second block would wait for three months. */
    struct mu_piece_write_options options = {.abort = &abort_flag, .throttle_bytes_per_s = 1};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, set_flag, &abort_flag), 0);
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &entry, 1, &options, &result, &err), MU_ERR_CANCELLED,
                 &err, "aborted on request");
    pthread_join(thread, NULL);
    assert_int_equal(count_files(scratch.path), 0);
    atomic_store(&abort_flag, false);
    options.throttle_bytes_per_s = 1ull << 28; /* 24 MiB: at least 62 ms for the first two blocks */
    assert_ok(mu_piece_write(scratch.path, "p", &identity, &entry, 1, &options, &result, &err), &err);
    assert_true(result.write_us >= 62000);
    char path[512];
    path_join(path, scratch.path, "p");
    atomic_store(&abort_flag, true);
    assert_fails(mu_piece_read(path, &(struct mu_piece_read_options){.abort = &abort_flag}, NULL, &err),
                 MU_ERR_CANCELLED, &err, path);
    free(data);
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
        cmocka_unit_test(test_entries_across_blocks_read_back),
        cmocka_unit_test(test_packed_entries_are_written_directly_or_else_all_the_same),
        cmocka_unit_test(test_large_piece_on_a_file_system_without_direct_output),
        cmocka_unit_test(test_partial_read_touches_only_what_is_wanted),
        cmocka_unit_test(test_part_of_an_entry_goes_to_its_place_and_the_rest_is_verified),
        cmocka_unit_test(test_runs_are_found_by_any_chunk),
        cmocka_unit_test(test_entries_of_runs_are_those_of_each_run_kind_by_kind),
        cmocka_unit_test(test_damage_is_always_found_and_named),
        cmocka_unit_test(test_index_checksum_finds_every_changed_number),
        cmocka_unit_test(test_piece_of_another_checkpoint_is_refused),
        cmocka_unit_test(test_bad_arguments_are_refused_before_anything_is_written),
        cmocka_unit_test(test_failed_sync_or_rename_leaves_no_file),
        cmocka_unit_test(test_full_disk_is_told_early_and_leaves_no_file),
        cmocka_unit_test(test_impossible_directories_are_told),
#ifdef MU_FAULTS
        cmocka_unit_test(test_kill_at_every_fault_point_publishes_nothing_partial),
#endif
        cmocka_unit_test(test_abort_ends_a_throttled_write_and_leaves_no_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
