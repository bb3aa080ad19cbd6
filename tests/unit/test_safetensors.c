/* links: mu_storage mu_plan */
#include "storage_testing.h"

#include "common/rng.h"
#include "storage/safetensors.h"

static const float weights[6] = {1.5f, -2.0f, 0.0f, 3.25f, 1e-40f, 65504.0f};
static const uint16_t halves[2] = {0x3c00, 0xc000};

/* Builds a file from a header text and so many data bytes. */
static void write_raw(const char *path, const char *header, size_t data_bytes)
{
    size_t header_bytes = strlen(header);
    uint8_t *bytes = calloc(1, 8 + header_bytes + data_bytes + 1);
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)((uint64_t)header_bytes >> (8 * i));
    memcpy(bytes + 8, header, header_bytes);
    file_write(path, bytes, 8 + header_bytes + data_bytes);
    free(bytes);
}

static void write_sample(const char *path)
{
    struct mu_error err;
    struct mu_safetensors_tensor tensors[] = {
        {.name = "transformer.wte.weight", .dtype = MU_ST_F32, .rank = 2, .shape = {2, 3}, .data = weights},
        {.name = "nothing", .dtype = MU_ST_F64, .rank = 2, .shape = {0, 7}},
        {.name = "a\"b\\\xc3\xa9", .dtype = MU_ST_BF16, .rank = 1, .shape = {2}, .data = halves},
        {.name = "scalar", .dtype = MU_ST_F32, .rank = 0, .data = weights},
    };
    struct mu_safetensors_pair metadata[] = {{"step", "120"}, {"note", "l\"1\nl2"}};
    assert_ok(mu_safetensors_write(path, tensors, 4, metadata, 2, &err), &err);
    assert_int_equal(tensors[2].offset_bytes, 24);
    assert_int_equal(tensors[2].size_bytes, 4);
}

static void test_write_then_open_gives_the_same_tensors(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_safetensors *file;
    struct mu_error err;
    char path[512];
    path_join(path, scratch.path, "a.safetensors");
    write_sample(path);
    assert_int_equal(count_files(scratch.path), 1); /* no temporary file stays */
    assert_ok(mu_safetensors_open(path, &file, &err), &err);
    assert_int_equal(mu_safetensors_count(file), 4);
    assert_int_equal(mu_safetensors_data_start(file) % 8, 0);
    assert_string_equal(mu_safetensors_metadata(file, "format"), "pt");
    assert_string_equal(mu_safetensors_metadata(file, "note"), "l\"1\nl2");
    assert_null(mu_safetensors_metadata(file, "absent"));
    assert_int_equal(mu_safetensors_metadata_count(file), 3);
    assert_null(mu_safetensors_find(file, "absent"));
    const struct mu_safetensors_tensor *tensor = mu_safetensors_find(file, "transformer.wte.weight");
    assert_non_null(tensor);
    assert_int_equal(tensor->dtype, MU_ST_F32);
    assert_int_equal(tensor->rank, 2);
    assert_int_equal(tensor->shape[0], 2);
    assert_int_equal(tensor->shape[1], 3);
    float read[6];
    assert_ok(mu_safetensors_read(file, tensor, read, &err), &err);
    assert_memory_equal(read, weights, sizeof read);
    assert_non_null(mu_safetensors_find(file, "a\"b\\\xc3\xa9"));
    tensor = mu_safetensors_find(file, "scalar");
    assert_non_null(tensor);
    assert_int_equal(tensor->rank, 0);
    assert_int_equal(tensor->size_bytes, 4);
    assert_int_equal(mu_safetensors_find(file, "nothing")->size_bytes, 0);
    mu_safetensors_close(file);
    scratch_remove(&scratch);
}

static void test_write_refuses_what_readers_would(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char path[512], long_name[MU_SAFETENSORS_NAME_BYTES_MAX + 2];
    path_join(path, scratch.path, "a.safetensors");
    memset(long_name, 'n', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    const char *const bad_names[] = {"", "__metadata__", long_name};
    for (size_t i = 0; i < 3; i++) {
        struct mu_safetensors_tensor tensor = {
            .name = bad_names[i], .dtype = MU_ST_F32, .rank = 1, .shape = {1}, .data = weights};
        assert_fails(mu_safetensors_write(path, &tensor, 1, NULL, 0, &err), MU_ERR_INVALID, &err, "tensor name");
    }
    struct mu_safetensors_tensor twice[] = {
        {.name = "x", .dtype = MU_ST_F32, .rank = 1, .shape = {1}, .data = weights},
        {.name = "x", .dtype = MU_ST_F32, .rank = 1, .shape = {1}, .data = weights}};
    assert_fails(mu_safetensors_write(path, twice, 2, NULL, 0, &err), MU_ERR_INVALID, &err,
                 "two tensors are named 'x'");
    struct mu_safetensors_tensor not_utf8 = {
        .name = "\xff\xfe", .dtype = MU_ST_F32, .rank = 1, .shape = {1}, .data = weights};
    assert_fails(mu_safetensors_write(path, &not_utf8, 1, NULL, 0, &err), MU_ERR_INVALID, &err, "UTF-8");
    struct mu_safetensors_tensor huge = {
        .name = "x", .dtype = MU_ST_F64, .rank = 2, .shape = {1ull << 33, 1ull << 33}, .data = weights};
    assert_fails(mu_safetensors_write(path, &huge, 1, NULL, 0, &err), MU_ERR_LIMIT, &err, "does not fit");
    assert_int_equal(count_files(scratch.path), 0);
    scratch_remove(&scratch);
}

static void test_hostile_headers_give_one_clear_line(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *part;
    } cases[] = {
        {"[]", 0, "not a safetensors file"},
        {"{", 0, "not a safetensors file"},
        {"{\"a\":", 0, "not valid JSON"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[0,4]}}",
         4, "duplicate"},
        {"{\"a\":5}", 0, "must have dtype, shape and data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "must have dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4, "and nothing else"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype is unknown"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "a dimension is not"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "a dimension is not"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "too many dimensions"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", 4, "not valid JSON"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "outside the file"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "outside the file"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "outside the file"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[9223372036854775804,9223372036854775807]}}", 4,
         "outside the file"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "do not match its shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         "do not match its shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "a hole"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[2,6]}}",
         6, "overlap"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 9, "5 bytes after the last tensor"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "is not a string"},
        {"{\"__metadata__\":[]}", 0, "must be an object"},
        {"{\"\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "empty or too long"},
        {"{\"\\u001b[2J\":5}", 0, "'?[2J'"}, /* no escape sequence reaches a terminal */
    };
    struct scratch scratch = scratch_make();
    char path[512];
    path_join(path, scratch.path, "bad.safetensors");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mu_safetensors *file;
        struct mu_error err;
        write_raw(path, cases[i].header, cases[i].data_bytes);
        enum mu_status status = mu_safetensors_open(path, &file, &err);
        if (status != MU_ERR_CORRUPT || !strstr(err.text, cases[i].part) || !strstr(err.text, path) ||
            strchr(err.text, '\n'))
            fail_msg("case %zu: %s: '%s', wanted '%s'", i, mu_status_name(status), status ? err.text : "",
                     cases[i].part);
    }
    scratch_remove(&scratch);
}

static void test_hostile_lengths_and_files_give_one_clear_line(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_safetensors *file;
    struct mu_error err;
    char path[512];
    path_join(path, scratch.path, "bad.safetensors");
    assert_fails(mu_safetensors_open(path, &file, &err), MU_ERR_NOT_FOUND, &err, path);
    file_write(path, "12345", 5);
    assert_fails(mu_safetensors_open(path, &file, &err), MU_ERR_CORRUPT, &err, "only 5 bytes");
    file_write(path, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    assert_fails(mu_safetensors_open(path, &file, &err), MU_ERR_CORRUPT, &err,
                 "a header of 18446744073709551615 bytes");
    file_write(path, "\x03\0\0\0\0\0\0\0{}", 10);
    assert_fails(mu_safetensors_open(path, &file, &err), MU_ERR_CORRUPT, &err, "a header of 3 bytes");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not block */
    assert_fails(mu_safetensors_open(path, &file, &err), MU_ERR_INVALID, &err, "not a regular file");
    assert_fails(mu_safetensors_open(scratch.path, &file, &err), MU_ERR_INVALID, &err, "not a regular file");
    /* Three million empty arrays would cost the parser half a gigabyte. */
    size_t bytes = 9000000;
    char *header = malloc(bytes + 1);
    memcpy(header, "{\"a\":[", 6);
    for (size_t i = 6; i + 3 <= bytes; i += 3)
        memcpy(header + i, "[],", 3);
    header[bytes] = 0;
    assert_fails(mu_safetensors_parse(header, bytes, 0, "bomb", &file, &err), MU_ERR_LIMIT, &err, "JSON of");
    free(header);
    scratch_remove(&scratch);
}

static void test_damaged_files_never_do_harm(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    char path[512], bad_path[512];
    size_t size_bytes;
    struct mu_safetensors *file;
    struct mu_error err;
    path_join(path, scratch.path, "good.safetensors");
    path_join(bad_path, scratch.path, "bad.safetensors");
    write_sample(path);
    uint8_t *good = file_read(path, &size_bytes), *bad = malloc(size_bytes);
    for (size_t length = 0; length < size_bytes; length++) {
        file_write(bad_path, good, length);
        assert_int_equal(mu_safetensors_open(bad_path, &file, &err), MU_ERR_CORRUPT);
    }
    uint64_t random = 11;
    for (int round = 0; round < 3000; round++) {
        memcpy(bad, good, size_bytes);
        for (uint64_t flips = 1 + mu_splitmix64(&random) % 4; flips > 0; flips--)
            bad[mu_splitmix64(&random) % (size_bytes - 28)] ^= (uint8_t)(1u << (mu_splitmix64(&random) & 7));
        uint64_t header_bytes;
        memcpy(&header_bytes, bad, 8);
        if (header_bytes > size_bytes - 8)
            continue;
        /* Whether it is accepted is up to the change; what it then says must stay inside the file. */
        if (mu_safetensors_parse(bad + 8, header_bytes, size_bytes - 8 - header_bytes, "bad", &file, &err) == MU_OK) {
            for (size_t i = 0; i < mu_safetensors_count(file); i++) {
                const struct mu_safetensors_tensor *tensor = mu_safetensors_at(file, i);
                assert_true(mu_safetensors_data_start(file) + tensor->offset_bytes + tensor->size_bytes <= size_bytes);
            }
            mu_safetensors_close(file);
        } else {
            assert_null(strchr(err.text, '\n'));
        }
    }
    free(good);
    free(bad);
    scratch_remove(&scratch);
}

/* An independent reader and writer: by hand with struct and json, and the real package where it is installed. */
static const char interop[] =
    "import json, struct, sys\n"
    "src, dst = sys.argv[1:3]\n"
    "raw = open(src, 'rb').read()\n"
    "n, = struct.unpack('<Q', raw[:8])\n"
    "head, data = json.loads(raw[8:8 + n]), raw[8 + n:]\n"
    "meta = head.pop('__metadata__')\n"
    "assert meta == {'format': 'pt', 'step': '120', 'note': 'l\"1\\nl2'}, meta\n"
    "assert (8 + n) % 8 == 0\n"
    "t = head['transformer.wte.weight']\n"
    "assert t['dtype'] == 'F32' and t['shape'] == [2, 3], t\n"
    "b, e = t['data_offsets']\n"
    "assert struct.unpack('<6f', data[b:e])[:4] == (1.5, -2.0, 0.0, 3.25)\n"
    "assert head['a\"b\\\\\\u00e9']['dtype'] == 'BF16' and head['scalar']['shape'] == []\n"
    "assert max(t['data_offsets'][1] for t in head.values()) == len(data)\n"
    "try:\n"
    "    from safetensors import safe_open\n"
    "    import numpy\n"
    "except ImportError:\n"
    "    pass\n"
    "else:\n"
    "    with safe_open(src, 'np') as f:\n"
    "        assert f.get_tensor('transformer.wte.weight').tolist()[0] == [1.5, -2.0, 0.0]\n"
    "        assert f.metadata()['step'] == '120'\n"
    "    print('also read by the safetensors package')\n"
    "head = json.dumps({'x': {'dtype': 'F32', 'shape': [2], 'data_offsets': [8, 16]},\n"
    "                   'y': {'dtype': 'I64', 'shape': [], 'data_offsets': [0, 8]}}).encode()\n"
    "head += b' ' * (-len(head) % 8)\n"
    "open(dst, 'wb').write(struct.pack('<Q', len(head)) + head + struct.pack('<qff', -7, 0.5, 2.0))\n";

static void test_python_reads_ours_and_we_read_pythons(void **state)
{
    (void)state;
    if (system("python3 -c '' 2>/dev/null") != 0) {
        print_message("skipped: there is no python3 here\n");
        skip();
    }
    struct scratch scratch = scratch_make();
    struct mu_safetensors *file;
    struct mu_error err;
    char script[512], ours[512], theirs[512], command[2048];
    path_join(script, scratch.path, "interop.py");
    path_join(ours, scratch.path, "ours.safetensors");
    path_join(theirs, scratch.path, "theirs.safetensors");
    file_write(script, interop, sizeof interop - 1);
    write_sample(ours);
    snprintf(command, sizeof command, "python3 '%s' '%s' '%s'", script, ours, theirs);
    assert_int_equal(system(command), 0);
    assert_ok(mu_safetensors_open(theirs, &file, &err), &err);
    float x[2];
    int64_t y;
    assert_string_equal(mu_safetensors_at(file, 0)->name, "y"); /* in the order of the data */
    assert_ok(mu_safetensors_read(file, mu_safetensors_find(file, "x"), x, &err), &err);
    assert_ok(mu_safetensors_read(file, mu_safetensors_find(file, "y"), &y, &err), &err);
    assert_true(x[0] == 0.5f && x[1] == 2.0f && y == -7);
    assert_null(mu_safetensors_metadata(file, "format"));
    mu_safetensors_close(file);
    scratch_remove(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_write_then_open_gives_the_same_tensors),
        cmocka_unit_test(test_write_refuses_what_readers_would),
        cmocka_unit_test(test_hostile_headers_give_one_clear_line),
        cmocka_unit_test(test_hostile_lengths_and_files_give_one_clear_line),
        cmocka_unit_test(test_damaged_files_never_do_harm),
        cmocka_unit_test(test_python_reads_ours_and_we_read_pythons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
