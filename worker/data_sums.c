#include "worker/data_sums.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEY_WORDS = sizeof(struct mu_data_sums_key) / sizeof(uint64_t), HEADER_WORDS = 8, NAME_SIZE = 4096 };
static const uint64_t magic = 0x31534d5553554d00; /* "MUSUMS1": in the byte order of this machine */

struct mu_data_sums_key mu_data_sums_key_of(const struct stat *facts)
{
    return (struct mu_data_sums_key){
        .device = facts->st_dev,
        .inode = facts->st_ino,
        .size_bytes = (uint64_t)facts->st_size,
        .modified_ns = (uint64_t)facts->st_mtim.tv_sec * 1000000000u + (uint64_t)facts->st_mtim.tv_nsec,
        .changed_ns = (uint64_t)facts->st_ctim.tv_sec * 1000000000u + (uint64_t)facts->st_ctim.tv_nsec,
    };
}

/* DIR/.NAME.muster-sums: hidden, so that no glob for the data finds it. */
static bool name_of(const char *first, const char *suffix, char out[NAME_SIZE])
{
    const char *slash = strrchr(first, '/'), *base = slash ? slash + 1 : first;
    int length = snprintf(out, NAME_SIZE, "%.*s.%s.muster-sums%s", (int)(base - first), first, base, suffix);
    return length > 0 && length < NAME_SIZE;
}

/* The file is an array of words: header, keys, block sums, checksum of all before. */
static size_t words_of(const struct mu_data_sums *sums)
{
    return HEADER_WORDS + (size_t)sums->key_count * KEY_WORDS + (size_t)sums->block_count + 1;
}

static void fill_fixed(const struct mu_data_sums *sums, uint64_t *words)
{
    const uint64_t header[HEADER_WORDS] = {magic,
                                           sums->key_count,
                                           sums->width,
                                           sums->token_count,
                                           sums->block_count,
                                           sums->largest_token,
                                           sums->content.low,
                                           sums->content.high};
    memcpy(words, header, sizeof header);
    memcpy(words + HEADER_WORDS, sums->keys, sums->key_count * sizeof sums->keys[0]);
}

static bool read_all(int fd, void *into, size_t size)
{
    for (size_t have = 0; have < size;) {
        ssize_t n = pread(fd, (char *)into + have, size - have, (off_t)have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        have += (size_t)n;
    }
    return true;
}

static bool write_all(int fd, const void *from, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = write(fd, (const char *)from + done, size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

/* What is kept: the checksum first, then that it belongs to this data. */
static bool accept(struct mu_data_sums *sums, const uint64_t *words, uint64_t *expected)
{
    size_t count = words_of(sums), sums_at = HEADER_WORDS + (size_t)sums->key_count * KEY_WORDS;
    if (words[count - 1] != mu_xxh3_64(words, (count - 1) * sizeof *words, 0))
        return false;
    sums->largest_token = words[5];
    sums->content = (struct mu_hash128){.low = words[6], .high = words[7]};
    fill_fixed(sums, expected);
    if (memcmp(words, expected, sums_at * sizeof *words) != 0)
        return false;
    memcpy(sums->block_sums, words + sums_at, (size_t)sums->block_count * sizeof *words);
    return true;
}

bool mu_data_sums_read(const char *first, struct mu_data_sums *sums)
{
    char name[NAME_SIZE];
    struct stat facts;
    bool good = false;
    size_t size = words_of(sums) * sizeof(uint64_t);
    int fd = name_of(first, "", name) ? open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0)
        return false;
    uint64_t *words = malloc(2 * size); /* and what its fixed part should be */
    if (words && fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode) && (uint64_t)facts.st_size == size &&
        read_all(fd, words, size))
        good = accept(sums, words, words + words_of(sums));
    free(words);
    close(fd);
    return good;
}

void mu_data_sums_write(const char *first, const struct mu_data_sums *sums, uint64_t now_ns)
{
    char name[NAME_SIZE], temporary[NAME_SIZE];
    for (uint32_t i = 0; i < sums->key_count; i++)
        if (sums->keys[i].changed_ns + MU_DATA_SUMS_QUIET_NS > now_ns)
            return;
    size_t count = words_of(sums);
    uint64_t *words = malloc(count * sizeof *words);
    if (!words || !name_of(first, "", name) || !name_of(first, ".XXXXXX", temporary)) {
        free(words);
        return;
    }
    fill_fixed(sums, words);
    memcpy(words + HEADER_WORDS + (size_t)sums->key_count * KEY_WORDS, sums->block_sums,
           (size_t)sums->block_count * sizeof *words);
    words[count - 1] = mu_xxh3_64(words, (count - 1) * sizeof *words, 0);
    int fd = mkostemp(temporary, O_CLOEXEC);
    if (fd >= 0) {
        bool written = write_all(fd, words, count * sizeof *words) && fchmod(fd, 0644) == 0;
        written = close(fd) == 0 && written;
        if (!written || rename(temporary, name) != 0)
            unlink(temporary);
    }
    free(words);
}
