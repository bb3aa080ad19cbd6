/* Checksums of a data set that were computed once, kept in a file beside it: reading terabytes at every start takes
 * hours, and what was read then is compared block by block when it is used.
 *
 * They count only while every file is the one that was read: the same device, inode, size, and times of change to the
 * nanosecond. Nothing is kept of files that changed within MU_DATA_SUMS_QUIET_NS before they were read: a change in the
 * same tick of the clock would not show. All failures are silent: the data is then read again. Blocking; any thread;
 * several processes may read and write the same file. */
#ifndef MU_WORKER_DATA_SUMS_H
#define MU_WORKER_DATA_SUMS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "common/hash.h"

#define MU_DATA_SUMS_QUIET_NS 2000000000ull

struct mu_data_sums_key {
    uint64_t device, inode, size_bytes, modified_ns, changed_ns;
};
struct mu_data_sums_key mu_data_sums_key_of(const struct stat *facts);

struct mu_data_sums {
    const struct mu_data_sums_key *keys; /* of all files, in order */
    uint32_t key_count;
    uint64_t width, largest_token, token_count;
    struct mu_hash128 content;
    uint64_t *block_sums; /* [block_count], the caller's */
    uint64_t block_count;
};

/* Beside the file `first`, the first one of the set: fills largest_token, content and block_sums when what is kept
 * there belongs to the keys, width and numbers that are given. */
bool mu_data_sums_read(const char *first, struct mu_data_sums *sums);
/* `now_ns`: the wall clock when reading began. */
void mu_data_sums_write(const char *first, const struct mu_data_sums *sums, uint64_t now_ns);

#endif
