/* links: mu_data */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/rng.h"
#include "worker/data.h"

/* ---- a directory per test ---- */

struct place {
    char directory[64];
    char path[128];
};

static int place_setup(void **state)
{
    struct place *place = calloc(1, sizeof *place);
    snprintf(place->directory, sizeof place->directory, "/tmp/muster-test-data-XXXXXX");
    if (!mkdtemp(place->directory))
        return -1;
    *state = place;
    return 0;
}

static int place_teardown(void **state)
{
    struct place *place = *state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", place->directory);
    int result = system(command);
    free(place);
    return result;
}

static const char *path_in(struct place *place, const char *name)
{
    snprintf(place->path, sizeof place->path, "%s/%s", place->directory, name);
    return place->path;
}

static void write_file(struct place *place, const char *name, const void *data, size_t size)
{
    FILE *file = fopen(path_in(place, name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void write_shard(struct place *place, const char *name, uint32_t width, const uint32_t *tokens, uint32_t count,
                        uint32_t claimed)
{
    size_t size = 1024 + (size_t)count * width;
    uint8_t *file = calloc(1, size);
    uint32_t header[3] = {width == 2 ? 20240520u : 20240801u, width == 2 ? 1u : 7u, claimed};
    memcpy(file, header, sizeof header);
    for (uint32_t i = 0; i < count; i++)
        memcpy(file + 1024 + (size_t)i * width, &tokens[i], width);
    write_file(place, name, file, size);
    free(file);
}

static uint32_t *random_tokens(uint32_t count, uint32_t vocab, uint64_t seed)
{
    uint32_t *tokens = calloc(count, sizeof tokens[0]);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (uint32_t)(mu_splitmix64(&seed) % vocab);
    return tokens;
}

static struct mu_data *open_ok(const struct mu_data_config *config)
{
    struct mu_data *data = NULL;
    struct mu_error err = {0};
    if (mu_data_open(config, &data, &err) != MU_OK)
        fail_msg("mu_data_open: %s", err.text);
    return data;
}

static void open_fails(const struct mu_data_config *config, enum mu_status status, const char *const *needles)
{
    struct mu_data *data = NULL;
    struct mu_error err = {0};
    assert_int_equal(mu_data_open(config, &data, &err), status);
    assert_null(data);
    assert_null(strchr(err.text, '\n'));
    for (; *needles; needles++) {
        if (!strstr(err.text, *needles))
            fail_msg("\"%s\" does not say \"%s\"", err.text, *needles);
    }
}
#define NEEDLES(...) ((const char *const[]){__VA_ARGS__, NULL})

/* ---- the order of samples ---- */

static void test_order_over_an_epoch_uses_every_sample_once(void **state)
{
    (void)state;
    static const uint64_t counts[] = {1, 2, 7, 64, 1000, 4097};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        uint64_t count = counts[c];
        uint8_t *seen = malloc(count);
        uint64_t same_place = 0;
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            memset(seen, 0, count);
            for (uint64_t i = 0; i < count; i++) {
                uint64_t sample = mu_data_order(count, 42, epoch * count + i);
                assert_true(sample < count);
                assert_int_equal(seen[sample]++, 0);
                same_place += sample == mu_data_order(count, 42, (epoch + 1) * count + i);
            }
        }
        if (count >= 64) /* epochs are shuffled differently: about one fixed place per epoch is chance */
            assert_true(same_place < 20);
        free(seen);
    }
}

/* The ledger: whoever computes sequence g of the job gets one sample, and all sequences of an epoch together cover the
 * training part once. Every token here is unique, so the tokens themselves are the proof. */
static void test_sample_ledger_over_steps_covers_each_token_once_per_epoch(void **state)
{
    enum { TOKENS = 5000, LENGTH = 7, BATCH = 12 };
    uint32_t *tokens = calloc(TOKENS, sizeof tokens[0]);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i;
    write_shard(*state, "a.bin", 4, tokens, 1234, 1234);
    write_shard(*state, "b.bin", 4, tokens + 1234, TOKENS - 1234, TOKENS - 1234);
    struct mu_data_config config = {
        .path = path_in(*state, "*.bin"), .format = MU_TOKENS_LLMC, .vocab = TOKENS, .length = LENGTH, .holdout = 0.1};
    struct mu_data *data = open_ok(&config);
    struct mu_data_info info;
    mu_data_info(data, &info);
    assert_int_equal(info.token_count, TOKENS);
    assert_int_equal(info.holdout_tokens, 500);
    assert_int_equal(info.train_samples, 4499 / LENGTH);
    assert_int_equal(info.eval_samples, 499 / LENGTH);

    uint32_t *input_uses = calloc(TOKENS, sizeof input_uses[0]);
    uint64_t sequences = 2 * info.train_samples; /* two epochs, cut into steps of BATCH */
    for (uint64_t step = 0; step * BATCH < sequences; step++) {
        for (uint64_t s = 0; s < BATCH && step * BATCH + s < sequences; s++) {
            int32_t input[LENGTH], target[LENGTH];
            assert_int_equal(mu_data_sample(data, 99, step * BATCH + s, input, target, NULL), MU_OK);
            for (int i = 0; i < LENGTH; i++) {
                assert_int_equal(target[i], input[i] + 1);
                assert_int_equal(input[i], input[0] + i);
                input_uses[input[i]]++;
            }
        }
    }
    for (uint32_t i = 0; i < TOKENS; i++)
        assert_int_equal(input_uses[i], i < info.train_samples * LENGTH ? 2 : 0);
    free(input_uses);
    free(tokens);
    mu_data_close(data);
}

static void test_eval_samples_come_in_order_from_the_held_out_part(void **state)
{
    enum { TOKENS = 1000, LENGTH = 8 };
    uint32_t *tokens = calloc(TOKENS, sizeof tokens[0]);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i;
    write_shard(*state, "a.bin", 2, tokens, TOKENS, TOKENS);
    struct mu_data *data = open_ok(&(struct mu_data_config){.path = path_in(*state, "a.bin"),
                                                            .format = MU_TOKENS_LLMC,
                                                            .vocab = TOKENS,
                                                            .length = LENGTH,
                                                            .holdout = 0.25});
    struct mu_data_info info;
    mu_data_info(data, &info);
    assert_int_equal(info.eval_samples, 249 / LENGTH);
    for (uint64_t i = 0; i < info.eval_samples; i++) {
        int32_t input[LENGTH], target[LENGTH];
        assert_int_equal(mu_data_eval_sample(data, i, input, target, NULL), MU_OK);
        assert_int_equal(input[0], 750 + (int)i * LENGTH);
        assert_int_equal(target[LENGTH - 1], 750 + (int)(i + 1) * LENGTH);
    }
    free(tokens);
    mu_data_close(data);
}

/* ---- contents ---- */

static void test_bytes_samples_equal_the_file(void **state)
{
    enum { SIZE = 300000, LENGTH = 5000 }; /* samples straddle checksummed blocks, and SAMPLE_PART */
    uint8_t *text = malloc(SIZE);
    uint64_t seed = 5;
    for (size_t i = 0; i < SIZE; i++)
        text[i] = (uint8_t)mu_splitmix64(&seed);
    write_file(*state, "text", text, SIZE);
    struct mu_data *data = open_ok(&(struct mu_data_config){
        .path = path_in(*state, "text"), .format = MU_TOKENS_BYTES, .vocab = 256, .length = LENGTH});
    struct mu_data_info info;
    mu_data_info(data, &info);
    assert_int_equal(info.train_samples, (SIZE - 1) / LENGTH);
    assert_int_equal(info.eval_samples, 0);
    int32_t *input = malloc(LENGTH * sizeof *input), *target = malloc(LENGTH * sizeof *target);
    for (uint64_t g = 0; g < info.train_samples; g++) {
        assert_int_equal(mu_data_sample(data, 1, g, input, target, NULL), MU_OK);
        size_t first = (size_t)mu_data_order(info.train_samples, 1, g) * LENGTH;
        for (size_t i = 0; i < LENGTH; i++) {
            assert_int_equal(input[i], text[first + i]);
            assert_int_equal(target[i], text[first + i + 1]);
        }
    }
    free(input);
    free(target);
    free(text);
    mu_data_close(data);
}

static struct mu_hash128 content_of(const char *path, enum mu_token_format format)
{
    struct mu_data *data =
        open_ok(&(struct mu_data_config){.path = path, .format = format, .vocab = 65536, .length = 4});
    struct mu_data_info info;
    mu_data_info(data, &info);
    mu_data_close(data);
    return info.content;
}

static void test_content_hash_names_the_tokens_not_the_files(void **state)
{
    enum { TOKENS = 100000 };
    uint32_t *tokens = random_tokens(TOKENS, 256, 3);
    uint8_t *text = malloc(TOKENS);
    for (size_t i = 0; i < TOKENS; i++)
        text[i] = (uint8_t)tokens[i];
    write_shard(*state, "narrow_0.bin", 2, tokens, 40001, 40001);
    write_shard(*state, "narrow_1.bin", 2, tokens + 40001, TOKENS - 40001, TOKENS - 40001);
    write_shard(*state, "wide.bin", 4, tokens, TOKENS, TOKENS);
    write_file(*state, "text", text, TOKENS);
    struct mu_hash128 narrow = content_of(path_in(*state, "narrow_*.bin"), MU_TOKENS_LLMC);
    struct mu_hash128 wide = content_of(path_in(*state, "wide.bin"), MU_TOKENS_LLMC);
    struct mu_hash128 bytes = content_of(path_in(*state, "text"), MU_TOKENS_BYTES);
    assert_true(narrow.low == wide.low && narrow.high == wide.high);
    assert_true(narrow.low == bytes.low && narrow.high == bytes.high);
    text[TOKENS / 2] ^= 1;
    write_file(*state, "text", text, TOKENS);
    bytes = content_of(path_in(*state, "text"), MU_TOKENS_BYTES);
    assert_false(narrow.low == bytes.low || narrow.high == bytes.high);
    text[TOKENS / 2] ^= 1;
    write_file(*state, "text", text, TOKENS - 1);
    bytes = content_of(path_in(*state, "text"), MU_TOKENS_BYTES);
    assert_false(narrow.low == bytes.low || narrow.high == bytes.high);
    free(tokens);
    free(text);
}

static void test_sample_of_a_file_changed_in_use_is_refused(void **state)
{
    enum { SIZE = 200000, LENGTH = 100 };
    uint8_t *text = calloc(1, SIZE);
    write_file(*state, "text", text, SIZE);
    const char *path = path_in(*state, "text");
    struct mu_data *data = open_ok(&(struct mu_data_config){
        .path = path, .format = MU_TOKENS_BYTES, .vocab = 256, .length = LENGTH, .holdout = 0.5});
    int32_t input[LENGTH], target[LENGTH];
    struct mu_error err = {0};
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "x", 1, 150000), 1); /* third block */
    assert_int_equal(mu_data_eval_sample(data, 0, input, target, &err), MU_OK);
    assert_int_equal(mu_data_eval_sample(data, 499, input, target, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "changed while in use"));
    assert_int_equal(pwrite(fd, "", 1, 150000), 1);
    assert_int_equal(mu_data_eval_sample(data, 499, input, target, &err), MU_OK);
    assert_int_equal(ftruncate(fd, 140000), 0);
    assert_int_equal(mu_data_eval_sample(data, 499, input, target, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "truncated while in use"));
    close(fd);
    free(text);
    mu_data_close(data);
}

/* ---- what is refused ---- */

static void test_open_of_missing_or_irregular_files_is_refused(void **state)
{
    struct mu_data_config config = {
        .path = path_in(*state, "none"), .format = MU_TOKENS_BYTES, .vocab = 256, .length = 4};
    open_fails(&config, MU_ERR_NOT_FOUND, NEEDLES("none", "No such file"));
    config.format = MU_TOKENS_LLMC;
    open_fails(&config, MU_ERR_NOT_FOUND, NEEDLES("none", "no data file matches"));
    assert_int_equal(mkdir(path_in(*state, "dir"), 0700), 0);
    config.path = path_in(*state, "dir");
    config.format = MU_TOKENS_BYTES;
    open_fails(&config, MU_ERR_INVALID, NEEDLES("dir", "not a regular file"));
    assert_int_equal(mkfifo(path_in(*state, "pipe"), 0600), 0);
    config.path = path_in(*state, "pipe");
    open_fails(&config, MU_ERR_INVALID, NEEDLES("pipe", "not a regular file"));
}

static void test_open_of_short_data_is_refused_with_numbers(void **state)
{
    struct mu_data_config config = {.format = MU_TOKENS_BYTES, .vocab = 256, .length = 16};
    write_file(*state, "text", "", 0);
    config.path = path_in(*state, "text");
    open_fails(&config, MU_ERR_INVALID, NEEDLES("0 tokens leave 0", "needs 17"));
    write_file(*state, "text", "0123456789abcdef", 16);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("16 tokens leave 16", "needs 17"));
    write_file(*state, "text", "0123456789abcdefg", 17);
    struct mu_data *data = open_ok(&config);
    struct mu_data_info info;
    mu_data_info(data, &info);
    assert_int_equal(info.train_samples, 1);
    mu_data_close(data);
    config.holdout = 0.06; /* one token */
    open_fails(&config, MU_ERR_INVALID, NEEDLES("17 tokens leave 16", "0.06", "needs 17"));
    config.holdout = 0.51;
    open_fails(&config, MU_ERR_INVALID, NEEDLES("data.holdout", "0.51", "0 to 0.5"));
}

static void test_open_of_a_token_outside_the_vocabulary_is_refused_with_its_place(void **state)
{
    enum { TOKENS = 70000 };
    uint32_t *tokens = random_tokens(TOKENS, 100, 7);
    tokens[50000] = 100;
    write_shard(*state, "a.bin", 2, tokens, TOKENS, TOKENS);
    struct mu_data_config config = {
        .path = path_in(*state, "a.bin"), .format = MU_TOKENS_LLMC, .vocab = 100, .length = 4};
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "byte 101024 ", "token 50000)", "token 100,", "0 to 99"));
    config.vocab = 101;
    mu_data_close(open_ok(&config));
    write_file(*state, "text", "plain \xff text", 12);
    config =
        (struct mu_data_config){.path = path_in(*state, "text"), .format = MU_TOKENS_BYTES, .vocab = 128, .length = 4};
    open_fails(&config, MU_ERR_INVALID, NEEDLES("text", "byte 6 ", "token 255,", "0 to 127"));
    free(tokens);
}

static void test_open_of_a_malformed_shard_is_refused(void **state)
{
    uint32_t tokens[64] = {0};
    struct mu_data_config config = {
        .path = path_in(*state, "a.bin"), .format = MU_TOKENS_LLMC, .vocab = 100, .length = 4};
    write_shard(*state, "a.bin", 2, tokens, 64, 65);
    open_fails(&config, MU_ERR_CORRUPT, NEEDLES("a.bin", "1152 bytes", "65 tokens", "1154", "truncated"));
    write_shard(*state, "a.bin", 4, tokens, 64, 63);
    open_fails(&config, MU_ERR_CORRUPT, NEEDLES("a.bin", "1280 bytes", "63 tokens", "1276", "garbage"));
    write_shard(*state, "a.bin", 2, tokens, 64, 0);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "token count 0"));
    write_shard(*state, "a.bin", 2, tokens, 64, 0x80000000u);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "token count -2147483648"));
    write_file(*state, "a.bin", tokens, 64);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "64 bytes", "data.tokens: bytes"));
    uint32_t header[260] = {20240520, 2, 4};
    write_file(*state, "a.bin", header, 1024 + 8);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "version 2", "only 1"));
    header[0] = 20240521;
    write_file(*state, "a.bin", header, 1024 + 8);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "20240521", "20240520", "20240801"));
    write_shard(*state, "a.bin", 2, tokens, 64, 64);
    write_shard(*state, "b.bin", 4, tokens, 64, 64);
    config.path = path_in(*state, "*.bin");
    open_fails(&config, MU_ERR_INVALID, NEEDLES("b.bin", "32-bit", "a.bin", "16-bit"));
}

/* ---- Megatron data sets ---- */

/* NAME.bin and NAME.idx, sequences of odd lengths (also empty ones) and a document for each. */
static void write_megatron(struct place *place, const char *name, uint32_t width, const uint32_t *tokens,
                           uint32_t count)
{
    enum { SEQUENCES_MAX = 64 };
    uint8_t *bin = malloc((size_t)count * width + 1);
    for (uint32_t i = 0; i < count; i++)
        memcpy(bin + (size_t)i * width, &tokens[i], width);
    int32_t lengths[SEQUENCES_MAX];
    int64_t pointers[SEQUENCES_MAX], documents[SEQUENCES_MAX + 1] = {0};
    uint64_t sequences = 0, at = 0;
    for (uint32_t length = 0; at < count; length = length * 3 + 1) {
        uint32_t here = count - at < length ? (uint32_t)(count - at) : length;
        lengths[sequences] = (int32_t)here;
        pointers[sequences] = (int64_t)(at * width);
        at += here;
        sequences++;
        documents[sequences] = (int64_t)sequences;
    }
    uint8_t idx[34 + 12 * SEQUENCES_MAX + 8 * (SEQUENCES_MAX + 1)] = "MMIDIDX";
    uint64_t version = 1, boundaries = sequences + 1;
    size_t size = 34;
    memcpy(idx + 9, &version, 8);
    idx[17] = width == 2 ? 8 : 4;
    memcpy(idx + 18, &sequences, 8);
    memcpy(idx + 26, &boundaries, 8);
    memcpy(idx + size, lengths, sequences * 4);
    size += sequences * 4;
    memcpy(idx + size, pointers, sequences * 8);
    size += sequences * 8;
    memcpy(idx + size, documents, boundaries * 8);
    size += boundaries * 8;
    char file[64];
    snprintf(file, sizeof file, "%s.idx", name);
    write_file(place, file, idx, size);
    snprintf(file, sizeof file, "%s.bin", name);
    write_file(place, file, bin, (size_t)count * width);
    free(bin);
}

static void test_megatron_tokens_are_those_of_llmc_in_both_widths(void **state)
{
    enum { TOKENS = 100000, LENGTH = 1000 };
    uint32_t *tokens = random_tokens(TOKENS, 60000, 5);
    write_shard(*state, "reference", 4, tokens, TOKENS, TOKENS);
    write_megatron(*state, "wide", 4, tokens, TOKENS);
    write_megatron(*state, "narrow_0", 2, tokens, 40001);
    write_megatron(*state, "narrow_1", 2, tokens + 40001, TOKENS - 40001);
    const struct {
        const char *path;
        enum mu_token_format format;
    } sources[] = {
        {"reference", MU_TOKENS_LLMC}, {"wide.bin", MU_TOKENS_MEGATRON}, {"narrow_*.bin", MU_TOKENS_MEGATRON}};
    struct mu_data_info infos[3];
    int32_t samples[3][2][LENGTH];
    for (int i = 0; i < 3; i++) {
        struct mu_data *data = open_ok(&(struct mu_data_config){
            .path = path_in(*state, sources[i].path), .format = sources[i].format, .vocab = 60000, .length = LENGTH});
        mu_data_info(data, &infos[i]);
        assert_int_equal(mu_data_sample(data, 7, 40, samples[i][0], samples[i][1], NULL), MU_OK);
        mu_data_close(data);
        assert_int_equal(infos[i].token_count, TOKENS);
        assert_memory_equal(&infos[i].content, &infos[0].content, sizeof infos[0].content);
        assert_memory_equal(samples[i], samples[0], sizeof samples[0]);
    }
    free(tokens);
}

/* Writes `size` bytes at `offset` of a file. */
static void patch_file(struct place *place, const char *name, long offset, const void *bytes, size_t size)
{
    FILE *file = fopen(path_in(place, name), "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, offset, SEEK_SET), 0);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void test_open_of_a_malformed_megatron_set_is_refused(void **state)
{
    enum { TOKENS = 50 }; /* sequences of 0, 1, 4, 13, 32 tokens */
    uint32_t tokens[TOKENS] = {0};
    struct mu_data_config config = {.format = MU_TOKENS_MEGATRON, .vocab = 100, .length = 4};
    char path[128];
    snprintf(path, sizeof path, "%s", path_in(*state, "a.bin"));
    config.path = path;
    static const struct {
        long offset;
        uint64_t value;
        size_t size;
        enum mu_status status;
        const char *needle;
    } cases[] = {
        {0, 'X', 1, MU_ERR_INVALID, "no Megatron index"},
        {9, 2, 8, MU_ERR_INVALID, "version 2"},
        {17, 5, 1, MU_ERR_INVALID, "token type 5"},
        {17, 4, 1, MU_ERR_CORRUPT, "sequence"}, /* the other width: pointers do not fit */
        {18, 0, 8, MU_ERR_CORRUPT, "0 sequences"},
        {18, 6, 8, MU_ERR_CORRUPT, "6 sequences"},
        {18, UINT64_MAX, 8, MU_ERR_CORRUPT, "18446744073709551615 sequences"},
        {26, UINT64_MAX / 8 + 2, 8, MU_ERR_CORRUPT, "boundaries"},
        {34 + 4 * 4, UINT32_MAX, 4, MU_ERR_CORRUPT, "sequence 4 has -1 tokens"},
        {34 + 4 * 4, 33, 4, MU_ERR_CORRUPT, "sequence 4 has 33 tokens"},
        {34 + 4 * 4, 31, 4, MU_ERR_CORRUPT, "end at byte 98, but the tokens have 100"},
        {34 + 5 * 4 + 2 * 8, 4, 8, MU_ERR_CORRUPT, "sequence 2 has 4 tokens from byte 4 on"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_megatron(*state, "a", 2, tokens, TOKENS);
        mu_data_close(open_ok(&config));
        patch_file(*state, "a.idx", cases[i].offset, &cases[i].value, cases[i].size);
        open_fails(&config, cases[i].status, NEEDLES("a.idx", cases[i].needle));
    }
    write_megatron(*state, "a", 2, tokens, TOKENS);
    write_file(*state, "a.idx", tokens, 33);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.idx", "33 bytes"));
    assert_int_equal(unlink(path_in(*state, "a.idx")), 0);
    open_fails(&config, MU_ERR_NOT_FOUND, NEEDLES("a.idx", "a.bin"));
    write_megatron(*state, "a", 2, tokens, TOKENS);
    tokens[7] = UINT32_MAX; /* a negative token */
    write_megatron(*state, "a", 4, tokens, TOKENS);
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "byte 28 ", "token 4294967295"));
    write_file(*state, "a", tokens, sizeof tokens);
    snprintf(path, sizeof path, "%s", path_in(*state, "a"));
    open_fails(&config, MU_ERR_INVALID, NEEDLES("NAME.bin"));
}

/* ---- checksums that are kept ---- */

static bool is_there(const char *path)
{
    return access(path, F_OK) == 0;
}

static const char *sums_of(struct place *place, const char *name)
{
    char hidden[64];
    snprintf(hidden, sizeof hidden, ".%s.muster-sums", name);
    return path_in(place, hidden);
}

/* Puts a byte somewhere without changing the size; the times of the file follow, as for any writer. */
static void poke(const char *path, long at, uint8_t value)
{
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_equal(fputc(value, file), value);
    assert_int_equal(fclose(file), 0);
}

static void set_changed(struct place *place, const char *name, time_t when)
{
    const struct timespec times[2] = {{.tv_sec = when}, {.tv_sec = when}};
    char path[128];
    snprintf(path, sizeof path, "%s/%s", place->directory, name);
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* Until a change of the file just made is long enough ago for sums to be kept. */
static void wait_quiet(void)
{
    usleep(2100000);
}

static void test_kept_sums_give_the_same_and_save_the_reading(void **state)
{
    enum { TOKENS = 100000, VOCAB = 3000 };
    uint32_t *tokens = random_tokens(TOKENS, VOCAB, 3);
    char sums[128];
    write_shard(*state, "a.bin", 2, tokens, TOKENS, TOKENS);
    write_shard(*state, "b.bin", 2, tokens, TOKENS / 2, TOKENS / 2);
    strcpy(sums, sums_of(*state, "a.bin"));
    struct mu_data_config config = {
        .path = path_in(*state, "*.bin"), .format = MU_TOKENS_LLMC, .vocab = VOCAB, .length = 8};
    struct mu_data_info read, kept;
    struct mu_data *data = open_ok(&config);
    mu_data_info(data, &read);
    mu_data_close(data);
    assert_false(is_there(sums)); /* not asked for */
    config.keep_sums_from = 3 * TOKENS + 1;
    mu_data_close(open_ok(&config));
    assert_false(is_there(sums)); /* too small */
    config.keep_sums_from = 1;
    set_changed(*state, "a.bin", time(NULL) + 3600);
    mu_data_close(open_ok(&config));
    assert_false(is_there(sums)); /* not long enough ago */
    set_changed(*state, "a.bin", time(NULL));
    wait_quiet();
    mu_data_close(open_ok(&config));
    assert_true(is_there(sums));
    data = open_ok(&config);
    mu_data_info(data, &kept);
    assert_memory_equal(&kept, &read, sizeof read);
    int32_t own[8], targets[8];
    struct mu_error err;
    for (uint64_t i = 0; i < 50; i++)
        assert_int_equal(mu_data_sample(data, 1, i * 331, own, targets, &err), MU_OK);
    mu_data_close(data);
    /* A token out of range is still named with its place, which only reading can tell. */
    config.vocab = 100;
    open_fails(&config, MU_ERR_INVALID, NEEDLES("a.bin", "0 to 99"));
    /* It is really not read again: a forged hash is believed. */
    uint64_t words[64];
    FILE *file = fopen(sums, "r+b");
    assert_non_null(file);
    size_t count = fread(words, sizeof *words, 64, file);
    assert_true(count > 20 && count < 64);
    words[6] ^= 1;
    words[count - 1] = mu_xxh3_64(words, (count - 1) * sizeof *words, 0);
    rewind(file);
    assert_int_equal(fwrite(words, sizeof *words, count, file), count);
    assert_int_equal(fclose(file), 0);
    config.vocab = VOCAB;
    data = open_ok(&config);
    mu_data_info(data, &kept);
    assert_true(kept.content.low == (read.content.low ^ 1) && kept.content.high == read.content.high);
    mu_data_close(data);
    free(tokens);
}

/* A file of 300,000 bytes whose checksums are kept in `sums`; both paths have room for 128 characters. */
static struct mu_data_config text_with_sums(struct place *place, char *path, char *sums)
{
    enum { SIZE = 300000 };
    uint8_t *text = malloc(SIZE);
    memset(text, 'x', SIZE);
    write_file(place, "text", text, SIZE);
    free(text);
    strcpy(path, path_in(place, "text"));
    strcpy(sums, sums_of(place, "text"));
    return (struct mu_data_config){
        .path = path, .format = MU_TOKENS_BYTES, .vocab = 256, .length = 100, .keep_sums_from = 1};
}

static void test_kept_sums_of_a_changed_file_do_not_count(void **state)
{
    char path[128], sums[128];
    struct mu_data_config config = text_with_sums(*state, path, sums);
    wait_quiet();
    struct mu_data *data = open_ok(&config);
    struct mu_data_info before, after;
    mu_data_info(data, &before);
    mu_data_close(data);
    assert_true(is_there(sums));
    struct stat facts;
    assert_int_equal(stat(path, &facts), 0);
    poke(path, 200000, 'y');
    const struct timespec times[2] = {facts.st_atim, facts.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0),
                     0); /* who puts the time of modification back is noticed too */
    data = open_ok(&config);
    mu_data_info(data, &after);
    mu_data_close(data);
    assert_memory_not_equal(&before.content, &after.content, sizeof before.content);
    /* Changed while in use, with kept sums: the block check notices. */
    poke(path, 200000, 'x');
    wait_quiet();
    mu_data_close(open_ok(&config));
    data = open_ok(&config);
    mu_data_info(data, &after);
    assert_memory_equal(&before.content, &after.content, sizeof before.content);
    poke(path, 200000, 'z');
    int32_t tokens[100], targets[100];
    struct mu_error err = {0};
    enum mu_status status = MU_OK;
    for (uint64_t i = 0; i < after.train_samples && status == MU_OK; i++)
        status = mu_data_sample(data, 1, i, tokens, targets, &err);
    assert_int_equal(status, MU_ERR_CORRUPT);
    mu_data_close(data);
}

static void test_kept_sums_that_are_damaged_or_cannot_be_kept_do_no_harm(void **state)
{
    char path[128], sums[128];
    struct mu_data_config config = text_with_sums(*state, path, sums);
    struct mu_data_info before, after;
    wait_quiet();
    struct mu_data *data = open_ok(&config);
    mu_data_info(data, &before);
    mu_data_close(data);
    struct stat facts;
    assert_int_equal(stat(sums, &facts), 0);
    for (long at = 0; at < facts.st_size; at += 7) { /* every kind of word: header, key, sums, checksum */
        poke(sums, at, 0xa5);
        data = open_ok(&config);
        mu_data_info(data, &after);
        assert_memory_equal(&before, &after, sizeof before);
        mu_data_close(data);
    }
    assert_int_equal(truncate(sums, facts.st_size - 8), 0);
    mu_data_close(open_ok(&config));
    assert_int_equal(stat(sums, &facts), 0); /* written anew */
    assert_int_equal(unlink(sums), 0);
    assert_int_equal(mkdir(sums, 0755), 0); /* in the way: nothing can be kept */
    data = open_ok(&config);
    mu_data_info(data, &after);
    assert_memory_equal(&before, &after, sizeof before);
    mu_data_close(data);
    char command[256]; /* no temporary file is left */
    snprintf(command, sizeof command, "test $(ls -A '%s' | wc -l) = 2", ((struct place *)*state)->directory);
    assert_int_equal(system(command), 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, place_setup, place_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_order_over_an_epoch_uses_every_sample_once),
        TEST(test_sample_ledger_over_steps_covers_each_token_once_per_epoch),
        TEST(test_eval_samples_come_in_order_from_the_held_out_part),
        TEST(test_bytes_samples_equal_the_file),
        TEST(test_content_hash_names_the_tokens_not_the_files),
        TEST(test_sample_of_a_file_changed_in_use_is_refused),
        TEST(test_open_of_missing_or_irregular_files_is_refused),
        TEST(test_open_of_short_data_is_refused_with_numbers),
        TEST(test_open_of_a_token_outside_the_vocabulary_is_refused_with_its_place),
        TEST(test_open_of_a_malformed_shard_is_refused),
        TEST(test_megatron_tokens_are_those_of_llmc_in_both_widths),
        TEST(test_open_of_a_malformed_megatron_set_is_refused),
        TEST(test_kept_sums_give_the_same_and_save_the_reading),
        TEST(test_kept_sums_of_a_changed_file_do_not_count),
        TEST(test_kept_sums_that_are_damaged_or_cannot_be_kept_do_no_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
