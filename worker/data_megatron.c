#include "worker/data_megatron.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MAGIC_SIZE = 9,
    HEADER_SIZE = MAGIC_SIZE + 8 + 1 + 8 + 8,
    VERSION = 1,
    TYPE_INT32 = 4,
    TYPE_UINT16 = 8,
    LENGTH_SIZE = 4,
    POINTER_SIZE = 8,
    PART = 4096, /* sequences judged in one go */
    NAME_MAX_SIZE = 4096,
};
#define MAGIC "MMIDIDX\0\0"

struct index {
    char name[NAME_MAX_SIZE];
    int fd;
    uint64_t file_bytes, bin_bytes;
    uint32_t width;
    uint64_t sequences, boundaries;
};

static uint64_t little(const uint8_t *raw, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;)
        value = value << 8 | raw[i];
    return value;
}

static enum mu_status read_at(const struct index *index, uint64_t offset, uint8_t *into, size_t size,
                              struct mu_error *err)
{
    for (size_t have = 0; have < size;) {
        ssize_t n = pread(index->fd, into + have, size - have, (off_t)(offset + have));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return mu_fail_errno(err, errno, "%s: cannot read at byte %" PRIu64, index->name, offset + have);
        if (n == 0)
            return mu_fail(err, MU_ERR_CORRUPT, "%s: ends at byte %" PRIu64 ", it is truncated", index->name,
                           offset + have);
        have += (size_t)n;
    }
    return MU_OK;
}

static enum mu_status open_index(struct index *index, const char *bin_name, struct mu_error *err)
{
    size_t stem = strlen(bin_name);
    if (stem < 4 || strcmp(bin_name + stem - 4, ".bin") != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: the tokens of a Megatron data set are in a file NAME.bin, with NAME.idx beside it",
                       bin_name);
    stem -= 4;
    if (stem + 5 > sizeof index->name)
        return mu_fail(err, MU_ERR_INVALID, "a data file name of %zu bytes is not allowed", stem + 4);
    snprintf(index->name, sizeof index->name, "%.*s.idx", (int)stem, bin_name);
    index->fd = open(index->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (index->fd < 0)
        return mu_fail_errno(err, errno, "%s: cannot open the index of %s", index->name, bin_name);
    struct stat facts;
    if (fstat(index->fd, &facts) != 0)
        return mu_fail_errno(err, errno, "%s: cannot look at the index", index->name);
    if (!S_ISREG(facts.st_mode))
        return mu_fail(err, MU_ERR_INVALID, "%s: is not a regular file", index->name);
    index->file_bytes = (uint64_t)facts.st_size;
    return MU_OK;
}

static enum mu_status read_header(struct index *index, struct mu_error *err)
{
    uint8_t raw[HEADER_SIZE];
    if (index->file_bytes < HEADER_SIZE)
        return mu_fail(err, MU_ERR_INVALID, "%s: %" PRIu64 " bytes are no Megatron index, its header alone has %d",
                       index->name, index->file_bytes, (int)HEADER_SIZE);
    enum mu_status status = read_at(index, 0, raw, sizeof raw, err);
    if (status != MU_OK)
        return status;
    if (memcmp(raw, MAGIC, MAGIC_SIZE) != 0)
        return mu_fail(err, MU_ERR_INVALID, "%s: does not begin with MMIDIDX, it is no Megatron index", index->name);
    uint64_t version = little(raw + MAGIC_SIZE, 8), most = index->file_bytes / LENGTH_SIZE;
    uint8_t type = raw[MAGIC_SIZE + 8];
    index->sequences = little(raw + MAGIC_SIZE + 9, 8);
    index->boundaries = little(raw + MAGIC_SIZE + 17, 8);
    if (version != VERSION)
        return mu_fail(err, MU_ERR_INVALID, "%s: byte %d holds version %" PRIu64 ", only %d is known", index->name,
                       (int)MAGIC_SIZE, version, (int)VERSION);
    if (type != TYPE_INT32 && type != TYPE_UINT16)
        return mu_fail(
            err, MU_ERR_INVALID,
            "%s: byte %d holds token type %u, allowed are %d (int32) and %d (uint16); write the data set anew "
            "with one of them",
            index->name, (int)MAGIC_SIZE + 8, type, (int)TYPE_INT32, (int)TYPE_UINT16);
    index->width = type == TYPE_UINT16 ? 2 : 4;
    uint64_t wanted = HEADER_SIZE;
    if (index->sequences <= most && index->boundaries <= most)
        wanted += index->sequences * (LENGTH_SIZE + POINTER_SIZE) + index->boundaries * POINTER_SIZE;
    if (index->sequences == 0 || index->file_bytes != wanted)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "%s: has %" PRIu64 " bytes, which do not fit its header's %" PRIu64 " sequences and %" PRIu64
                       " document boundaries; it is damaged, or has parts that are not known here",
                       index->name, index->file_bytes, index->sequences, index->boundaries);
    return MU_OK;
}

/* Sequences [first, first + count): lengths and where they begin. *at is where the next one must begin. */
static enum mu_status check_part(const struct index *index, uint64_t first, size_t count, uint64_t *at,
                                 struct mu_error *err)
{
    uint8_t lengths[PART * LENGTH_SIZE], pointers[PART * POINTER_SIZE];
    uint64_t pointers_at = HEADER_SIZE + index->sequences * LENGTH_SIZE;
    enum mu_status status = read_at(index, HEADER_SIZE + first * LENGTH_SIZE, lengths, count * LENGTH_SIZE, err);
    if (status == MU_OK)
        status = read_at(index, pointers_at + first * POINTER_SIZE, pointers, count * POINTER_SIZE, err);
    for (size_t i = 0; i < count && status == MU_OK; i++) {
        uint64_t length = little(lengths + i * LENGTH_SIZE, LENGTH_SIZE);
        uint64_t begin = little(pointers + i * POINTER_SIZE, POINTER_SIZE);
        if (length > INT32_MAX || begin != *at || length > (index->bin_bytes - *at) / index->width)
            return mu_fail(err, MU_ERR_CORRUPT,
                           "%s: sequence %" PRIu64 " has %" PRId32 " tokens from byte %" PRIu64 " on, but the %" PRIu64
                           " bytes of tokens must follow each other and go on at byte %" PRIu64,
                           index->name, first + i, (int32_t)(uint32_t)length, begin, index->bin_bytes, *at);
        *at += length * index->width;
    }
    return status;
}

static enum mu_status check_sequences(const struct index *index, struct mu_error *err)
{
    uint64_t at = 0;
    for (uint64_t first = 0; first < index->sequences; first += PART) {
        uint64_t left = index->sequences - first;
        enum mu_status status = check_part(index, first, left < PART ? (size_t)left : PART, &at, err);
        if (status != MU_OK)
            return status;
    }
    if (at == index->bin_bytes)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "%s: its sequences end at byte %" PRIu64 ", but the tokens have %" PRIu64
                   " bytes; index and tokens do not belong together",
                   index->name, at, index->bin_bytes);
}

enum mu_status mu_data_megatron_index(const char *bin_name, uint64_t bin_bytes, uint32_t *ret_width,
                                      uint64_t *ret_count, struct mu_error *err)
{
    struct index *index = calloc(1, sizeof *index);
    if (!index)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to read the index of %s", bin_name);
    index->fd = -1;
    index->bin_bytes = bin_bytes;
    enum mu_status status = open_index(index, bin_name, err);
    if (status == MU_OK)
        status = read_header(index, err);
    if (status == MU_OK)
        status = check_sequences(index, err);
    if (status == MU_OK) {
        *ret_width = index->width;
        *ret_count = bin_bytes / index->width;
    }
    if (index->fd >= 0)
        close(index->fd);
    free(index);
    return status;
}
