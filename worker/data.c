#include "worker/data.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/rng.h"
#include "common/xxh3.h"
#include "worker/data_megatron.h"
#include "worker/data_sums.h"

/* llm.c's shards: 256 int32 of header ([0] magic, [1] version, [2] number of tokens), then the tokens
 * (github.com/karpathy/llm.c, dev/data/data_common.py). */
enum {
    LLMC_HEADER_SIZE = 1024,
    LLMC_MAGIC_16 = 20240520,
    LLMC_VERSION_16 = 1,
    LLMC_MAGIC_32 = 20240801,
    LLMC_VERSION_32 = 7,
    SAMPLE_PART = 4096, /* tokens taken from a block in one go */
};

struct shard {
    int fd;
    char *name;
    uint64_t first_token, token_count;
    uint64_t header_size; /* bytes before the first token */
    uint64_t first_block; /* of its checksums in block_sums */
    struct mu_data_sums_key key;
};

struct mu_data {
    struct shard *shards;
    uint32_t shard_count;
    uint32_t width; /* bytes of a stored token: 1, 2, 4 */
    uint32_t length;
    uint64_t *block_sums; /* XXH3-64 of every block of every shard's tokens */
    uint64_t block_count;
    struct mu_data_info info;
};

/* ---- reading ---- */

/* `offset` counts bytes of tokens, after the header. */
static enum mu_status read_exactly(const struct shard *shard, uint64_t offset, uint8_t *into, size_t size,
                                   struct mu_error *err)
{
    size_t have = 0;
    while (have < size) {
        ssize_t n = pread(shard->fd, into + have, size - have, (off_t)(shard->header_size + offset + have));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return mu_fail_errno(err, errno, "%s: cannot read at byte %" PRIu64, shard->name,
                                 shard->header_size + offset + have);
        if (n == 0)
            return mu_fail(err, MU_ERR_CORRUPT,
                           "%s: ends at byte %" PRIu64
                           " although it was longer when it was opened; it was truncated while in use: restore "
                           "it and start the worker again",
                           shard->name, shard->header_size + offset + have);
        have += (size_t)n;
    }
    return MU_OK;
}

static void widen(const uint8_t *raw, uint32_t width, size_t count, uint32_t *out)
{
    if (width == 1) {
        for (size_t i = 0; i < count; i++)
            out[i] = raw[i];
    } else if (width == 2) {
        for (size_t i = 0; i < count; i++)
            out[i] = (uint32_t)raw[2 * i] | (uint32_t)raw[2 * i + 1] << 8;
    } else {
        for (size_t i = 0; i < count; i++)
            out[i] = (uint32_t)raw[4 * i] | (uint32_t)raw[4 * i + 1] << 8 | (uint32_t)raw[4 * i + 2] << 16 |
                     (uint32_t)raw[4 * i + 3] << 24;
    }
}

static size_t block_size(const struct mu_data *data, const struct shard *shard, uint64_t block)
{
    uint64_t left = shard->token_count * data->width - block * MU_DATA_BLOCK_SIZE;
    return left < MU_DATA_BLOCK_SIZE ? (size_t)left : MU_DATA_BLOCK_SIZE;
}

/* ---- opening one file ---- */

static enum mu_status shard_header(const struct shard *shard, uint64_t file_size, uint32_t *ret_width,
                                   uint64_t *ret_count, struct mu_error *err)
{
    uint8_t raw[12];
    uint32_t header[3];
    if (file_size < LLMC_HEADER_SIZE)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: %" PRIu64
                       " bytes are no llm.c shard, its header alone has %d; for plain text set data.tokens: bytes",
                       shard->name, file_size, (int)LLMC_HEADER_SIZE);
    enum mu_status status = read_exactly(shard, 0, raw, sizeof raw, err);
    if (status != MU_OK)
        return status;
    widen(raw, 4, 3, header);
    bool narrow = header[0] == LLMC_MAGIC_16, wide = header[0] == LLMC_MAGIC_32;
    if (!narrow && !wide)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: byte 0 holds magic number %" PRIu32
                       ", an llm.c shard has %d (16-bit tokens) or %d (32-bit); for plain text set "
                       "data.tokens: bytes",
                       shard->name, header[0], (int)LLMC_MAGIC_16, (int)LLMC_MAGIC_32);
    uint32_t version = narrow ? LLMC_VERSION_16 : LLMC_VERSION_32;
    if (header[1] != version)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: byte 4 holds version %" PRIu32 ", only %" PRIu32 " is known for magic number %" PRIu32,
                       shard->name, header[1], version, header[0]);
    if (header[2] == 0 || header[2] > INT32_MAX)
        return mu_fail(err, MU_ERR_INVALID, "%s: byte 8 holds the token count %" PRId32 ", allowed are 1 to %d",
                       shard->name, (int32_t)header[2], INT32_MAX);
    uint32_t width = narrow ? 2 : 4;
    uint64_t wanted = LLMC_HEADER_SIZE + (uint64_t)header[2] * width;
    if (file_size != wanted)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "%s: has %" PRIu64 " bytes, but its header's %" PRIu32 " tokens of %" PRIu32
                       " bytes need %" PRIu64 "; it is %s",
                       shard->name, file_size, header[2], width, wanted,
                       file_size < wanted ? "truncated" : "followed by garbage");
    *ret_width = width;
    *ret_count = header[2];
    return MU_OK;
}

static enum mu_status shard_open(struct mu_data *data, const struct mu_data_config *config, const char *name,
                                 struct mu_error *err)
{
    struct shard *shard = &data->shards[data->shard_count];
    *shard = (struct shard){.fd = -1, .name = strdup(name)};
    data->shard_count++;
    if (!shard->name)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to open %s", name);
    shard->fd = open(name, O_RDONLY | O_CLOEXEC |
                               O_NONBLOCK); /* non-blocking: a pipe must not hang us; regular files do not care */
    if (shard->fd < 0) {
        if (errno == EMFILE)
            return mu_fail(err, MU_ERR_LIMIT,
                           "%s: %" PRIu32
                           " data files are open and no descriptor is left; raise ulimit -n, or use fewer shards",
                           name, data->shard_count - 1);
        return mu_fail_errno(err, errno, "%s: cannot open the data file", name);
    }
    struct stat facts;
    if (fstat(shard->fd, &facts) != 0)
        return mu_fail_errno(err, errno, "%s: cannot look at the data file", name);
    if (!S_ISREG(facts.st_mode))
        return mu_fail(err, MU_ERR_INVALID, "%s: is not a regular file; data.path must name %s", name,
                       config->format == MU_TOKENS_LLMC       ? "shards of llm.c"
                       : config->format == MU_TOKENS_MEGATRON ? "the .bin files of a Megatron data set"
                                                              : "one file");
    uint32_t width = 1;
    shard->key = mu_data_sums_key_of(&facts);
    shard->token_count = (uint64_t)facts.st_size;
    if (config->format == MU_TOKENS_LLMC) {
        enum mu_status status = shard_header(shard, (uint64_t)facts.st_size, &width, &shard->token_count, err);
        if (status != MU_OK)
            return status;
        shard->header_size = LLMC_HEADER_SIZE;
    } else if (config->format == MU_TOKENS_MEGATRON) {
        enum mu_status status = mu_data_megatron_index(name, (uint64_t)facts.st_size, &width, &shard->token_count, err);
        if (status != MU_OK)
            return status;
    }
    if (data->width && data->width != width)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: has %" PRIu32 "-bit tokens, but %s has %" PRIu32
                       "-bit ones; all shards of a job must be alike",
                       name, width * 8, data->shards[0].name, data->width * 8);
    data->width = width;
    return MU_OK;
}

/* ---- the one look at everything ---- */

struct scan {
    XXH3_state_t *content;
    uint8_t *raw;
    uint32_t *tokens;
    uint32_t largest;
};

static enum mu_status scan_block(struct mu_data *data, const struct shard *shard, uint64_t block, uint32_t vocab,
                                 struct scan *scan, struct mu_error *err)
{
    size_t size = block_size(data, shard, block), count = size / data->width;
    enum mu_status status = read_exactly(shard, block * MU_DATA_BLOCK_SIZE, scan->raw, size, err);
    if (status != MU_OK)
        return status;
    widen(scan->raw, data->width, count, scan->tokens);
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++)
        largest = scan->tokens[i] > largest ? scan->tokens[i] : largest;
    if (largest >= vocab) {
        size_t i = 0;
        while (scan->tokens[i] < vocab)
            i++;
        uint64_t at = shard->header_size + block * MU_DATA_BLOCK_SIZE + i * data->width;
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: byte %" PRIu64 " (token %" PRIu64 ") holds token %" PRIu32 ", but model.vocab %" PRIu32
                       " allows 0 to %" PRIu32,
                       shard->name, at, block * (MU_DATA_BLOCK_SIZE / data->width) + i, scan->tokens[i], vocab,
                       vocab - 1);
    }
    scan->largest = largest > scan->largest ? largest : scan->largest;
    XXH3_128bits_update(scan->content, scan->tokens, count * sizeof scan->tokens[0]);
    data->block_sums[shard->first_block + block] = mu_xxh3_64(scan->raw, size, 0);
    return MU_OK;
}

static uint64_t blocks_of(const struct mu_data *data, const struct shard *shard)
{
    return (shard->token_count * data->width + MU_DATA_BLOCK_SIZE - 1) / MU_DATA_BLOCK_SIZE;
}

/* Where the tokens and checksums of each shard begin. */
static enum mu_status place_shards(struct mu_data *data, struct mu_error *err)
{
    for (uint32_t i = 0; i < data->shard_count; i++) {
        struct shard *shard = &data->shards[i];
        shard->first_token = data->info.token_count;
        shard->first_block = data->block_count;
        data->info.token_count += shard->token_count;
        data->block_count += blocks_of(data, shard);
    }
    data->block_sums = malloc((data->block_count + 1) * sizeof data->block_sums[0]);
    return data->block_sums ? MU_OK
                            : mu_fail(err, MU_ERR_NO_MEMORY,
                                      "no memory for the checksums of %" PRIu64 " blocks of data", data->block_count);
}

static enum mu_status scan_shard(struct mu_data *data, struct shard *shard, uint32_t vocab, struct scan *scan,
                                 struct mu_error *err)
{
    uint64_t blocks = blocks_of(data, shard);
    (void)posix_fadvise(shard->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    for (uint64_t block = 0; block < blocks; block++) {
        enum mu_status status = scan_block(data, shard, block, vocab, scan, err);
        if (status != MU_OK)
            return status;
    }
    return MU_OK;
}

static enum mu_status scan_all(struct mu_data *data, uint32_t vocab, uint32_t *ret_largest, struct mu_error *err)
{
    struct scan scan = {
        .content = XXH3_createState(),
        .raw = malloc(MU_DATA_BLOCK_SIZE),
        .tokens = malloc(MU_DATA_BLOCK_SIZE * sizeof(uint32_t)),
    };
    enum mu_status status = MU_OK;
    if (!scan.content || !scan.raw || !scan.tokens) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory to read the data");
        goto out;
    }
    XXH3_128bits_reset(scan.content);
    for (uint32_t i = 0; status == MU_OK && i < data->shard_count; i++)
        status = scan_shard(data, &data->shards[i], vocab, &scan, err);
    if (status != MU_OK)
        goto out;
    XXH3_128bits_update(scan.content, &data->info.token_count, sizeof data->info.token_count);
    XXH128_hash_t hash = XXH3_128bits_digest(scan.content);
    data->info.content = (struct mu_hash128){.low = hash.low64, .high = hash.high64};
    *ret_largest = scan.largest;
out:
    XXH3_freeState(scan.content);
    free(scan.raw);
    free(scan.tokens);
    return status;
}

/* Are the files still what they were when they were opened? */
static bool is_unchanged(const struct mu_data *data)
{
    for (uint32_t i = 0; i < data->shard_count; i++) {
        struct stat facts;
        if (fstat(data->shards[i].fd, &facts) != 0)
            return false;
        struct mu_data_sums_key now = mu_data_sums_key_of(&facts);
        if (memcmp(&now, &data->shards[i].key, sizeof now) != 0)
            return false;
    }
    return true;
}

/* Reads everything, unless what an earlier reading found is kept. With a token out of range it is read, to say where.
 */
static enum mu_status scan_or_recall(struct mu_data *data, const struct mu_data_config *config, struct mu_error *err)
{
    struct mu_data_sums_key *keys = calloc((size_t)data->shard_count + 1, sizeof *keys);
    if (!keys)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %" PRIu32 " data files", data->shard_count);
    for (uint32_t i = 0; i < data->shard_count; i++)
        keys[i] = data->shards[i].key;
    struct mu_data_sums sums = {.keys = keys,
                                .key_count = data->shard_count,
                                .width = data->width,
                                .token_count = data->info.token_count,
                                .block_sums = data->block_sums,
                                .block_count = data->block_count};
    bool keep = config->keep_sums_from > 0 && data->info.token_count * data->width >= config->keep_sums_from;
    uint64_t now_ns = mu_clock_wall_us() * 1000;
    enum mu_status status = MU_OK;
    if (keep && mu_data_sums_read(data->shards[0].name, &sums) && sums.largest_token < config->vocab) {
        data->info.content = sums.content;
    } else {
        uint32_t largest = 0;
        status = scan_all(data, config->vocab, &largest, err);
        sums.largest_token = largest;
        sums.content = data->info.content;
        if (status == MU_OK && keep && is_unchanged(data))
            mu_data_sums_write(data->shards[0].name, &sums, now_ns);
    }
    for (uint32_t i = 0; i < data->shard_count; i++) /* samples come in permuted order: no read-ahead */
        (void)posix_fadvise(data->shards[i].fd, 0, 0, POSIX_FADV_RANDOM);
    free(keys);
    return status;
}

static enum mu_status divide(struct mu_data *data, const struct mu_data_config *config, struct mu_error *err)
{
    struct mu_data_info *info = &data->info;
    info->shard_count = data->shard_count;
    info->holdout_tokens = (uint64_t)(config->holdout * (double)info->token_count);
    info->train_tokens = info->token_count - info->holdout_tokens;
    if (info->train_tokens < (uint64_t)config->length + 1)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: %" PRIu64 " tokens leave %" PRIu64
                       " for training (data.holdout %g), but one sample needs %" PRIu32
                       " (batch.length + 1); give more data or a shorter batch.length",
                       config->path, info->token_count, info->train_tokens, config->holdout, config->length + 1);
    info->train_samples = (info->train_tokens - 1) / config->length;
    info->eval_samples = info->holdout_tokens ? (info->holdout_tokens - 1) / config->length : 0;
    return MU_OK;
}

/* ---- opening ---- */

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static enum mu_status open_shards(struct mu_data *data, const struct mu_data_config *config, char **names, size_t count,
                                  struct mu_error *err)
{
    if (count > MU_DATA_SHARDS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "%s: matches %zu files, at most %d are allowed", config->path, count,
                       (int)MU_DATA_SHARDS_MAX);
    data->shards = calloc(count, sizeof data->shards[0]);
    if (!data->shards)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu data files", count);
    enum mu_status status = MU_OK;
    for (size_t i = 0; status == MU_OK && i < count; i++)
        status = shard_open(data, config, names[i], err);
    return status;
}

static enum mu_status open_glob(struct mu_data *data, const struct mu_data_config *config, struct mu_error *err)
{
    glob_t found = {0};
    enum mu_status status;
    int result = glob(config->path, GLOB_NOSORT, NULL, &found);
    if (result == GLOB_NOMATCH || (result == 0 && found.gl_pathc == 0)) {
        status =
            mu_fail(err, MU_ERR_NOT_FOUND,
                    "%s: no data file matches; data.path is a file or a glob such as /data/train_*.bin", config->path);
    } else if (result != 0) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "%s: cannot expand the glob", config->path);
    } else {
        qsort(found.gl_pathv, found.gl_pathc, sizeof found.gl_pathv[0], by_bytes);
        status = open_shards(data, config, found.gl_pathv, found.gl_pathc, err);
    }
    globfree(&found);
    return status;
}

static enum mu_status config_check(const struct mu_data_config *config, struct mu_error *err)
{
    if (config->format != MU_TOKENS_BYTES && config->format != MU_TOKENS_LLMC && config->format != MU_TOKENS_MEGATRON)
        return mu_fail(err, MU_ERR_INVALID, "data.tokens: %d is not allowed; bytes, llmc or megatron",
                       (int)config->format);
    if (config->vocab == 0 || config->vocab > INT32_MAX)
        return mu_fail(err, MU_ERR_INVALID, "model.vocab: %" PRIu32 " is not allowed; 1 to %d", config->vocab,
                       INT32_MAX);
    if (config->length == 0 || config->length > MU_DATA_LENGTH_MAX)
        return mu_fail(err, MU_ERR_INVALID, "batch.length: %" PRIu32 " is not allowed; 1 to %d", config->length,
                       (int)MU_DATA_LENGTH_MAX);
    if (!(config->holdout >= 0 && config->holdout <= 0.5))
        return mu_fail(err, MU_ERR_INVALID, "data.holdout: %g is not allowed; 0 to 0.5", config->holdout);
    return MU_OK;
}

enum mu_status mu_data_open(const struct mu_data_config *config, struct mu_data **ret_data, struct mu_error *err)
{
    enum mu_status status = config_check(config, err);
    if (status != MU_OK)
        return status;
    struct mu_data *data = calloc(1, sizeof *data);
    if (!data)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the data source");
    data->length = config->length;
    if (config->format != MU_TOKENS_BYTES) {
        status = open_glob(data, config, err);
    } else {
        char *name = (char *)(uintptr_t)config->path; /* only read from */
        status = open_shards(data, config, &name, 1, err);
    }
    if (status == MU_OK)
        status = place_shards(data, err);
    if (status == MU_OK)
        status = scan_or_recall(data, config, err);
    if (status == MU_OK)
        status = divide(data, config, err);
    if (status != MU_OK) {
        mu_data_close(data);
        return status;
    }
    *ret_data = data;
    return MU_OK;
}

void mu_data_close(struct mu_data *data)
{
    if (!data)
        return;
    for (uint32_t i = 0; i < data->shard_count; i++) {
        if (data->shards[i].fd >= 0)
            close(data->shards[i].fd);
        free(data->shards[i].name);
    }
    free(data->shards);
    free(data->block_sums);
    free(data);
}

void mu_data_info(const struct mu_data *data, struct mu_data_info *ret_info)
{
    *ret_info = data->info;
}

/* ---- samples ---- */

uint64_t mu_data_order(uint64_t train_samples, uint64_t seed, uint64_t global_index)
{
    return mu_permute(seed, global_index / train_samples, global_index % train_samples, train_samples);
}

/* Reads the block that holds token `at` of the shard, compares it, and copies up to `count` tokens from there on. */
static enum mu_status read_from_block(const struct mu_data *data, const struct shard *shard, uint64_t at, size_t count,
                                      uint32_t *out, size_t *ret_count, struct mu_error *err)
{
    uint8_t raw[MU_DATA_BLOCK_SIZE];
    uint64_t block = at * data->width / MU_DATA_BLOCK_SIZE;
    size_t skip = (size_t)(at * data->width % MU_DATA_BLOCK_SIZE);
    size_t size = block_size(data, shard, block);
    enum mu_status status = read_exactly(shard, block * MU_DATA_BLOCK_SIZE, raw, size, err);
    if (status != MU_OK)
        return status;
    if (mu_xxh3_64(raw, size, 0) != data->block_sums[shard->first_block + block]) {
        uint64_t begin = shard->header_size + block * MU_DATA_BLOCK_SIZE;
        return mu_fail(err, MU_ERR_CORRUPT,
                       "%s: bytes %" PRIu64 " to %" PRIu64
                       " are not what they were when the worker started; the file was "
                       "changed while in use: restore it and start the worker again",
                       shard->name, begin, begin + size - 1);
    }
    size_t here = (size - skip) / data->width;
    *ret_count = here < count ? here : count;
    widen(raw + skip, data->width, *ret_count, out);
    return MU_OK;
}

static const struct shard *shard_of(const struct mu_data *data, uint64_t token)
{
    uint32_t low = 0, high = data->shard_count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (data->shards[middle].first_token <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return &data->shards[low];
}

static enum mu_status read_tokens(const struct mu_data *data, uint64_t first, int32_t *tokens, int32_t *targets,
                                  struct mu_error *err)
{
    size_t wanted = (size_t)data->length + 1, have = 0;
    uint32_t part[SAMPLE_PART];
    while (have < wanted) {
        const struct shard *shard = shard_of(data, first + have);
        size_t count = wanted - have < SAMPLE_PART ? wanted - have : SAMPLE_PART;
        enum mu_status status =
            read_from_block(data, shard, first + have - shard->first_token, count, part, &count, err);
        if (status != MU_OK)
            return status;
        for (size_t i = 0; i < count; i++) {
            if (have + i < data->length)
                tokens[have + i] = (int32_t)part[i];
            if (have + i > 0)
                targets[have + i - 1] = (int32_t)part[i];
        }
        have += count;
    }
    return MU_OK;
}

enum mu_status mu_data_sample(const struct mu_data *data, uint64_t seed, uint64_t global_index, int32_t *tokens,
                              int32_t *targets, struct mu_error *err)
{
    uint64_t sample = mu_data_order(data->info.train_samples, seed, global_index);
    return read_tokens(data, sample * data->length, tokens, targets, err);
}

enum mu_status mu_data_eval_sample(const struct mu_data *data, uint64_t index, int32_t *tokens, int32_t *targets,
                                   struct mu_error *err)
{
    MU_ASSERT(index < data->info.eval_samples);
    return read_tokens(data, data->info.train_tokens + index * data->length, tokens, targets, err);
}
