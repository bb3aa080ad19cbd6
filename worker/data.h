/* The token source: which tokens sample i is made of, and proof that they are the ones the job was submitted with.
 *
 * The data is one sequence of tokens, cut from the front: training part, then the held-out part. Training sample i is
 * tokens [i*T, i*T+T], T + 1 of them: inputs are the first T, targets the last T. The order of samples is a keyed
 * permutation per epoch, so the position in the data is the step number: nothing is stored, nothing is lost or
 * repeated.
 *
 * Files are read with pread, never mapped: a file that is truncated or changed while a job runs would otherwise end the
 * worker with SIGBUS or, worse, change bits silently. mu_data_open reads everything once: it checks every token,
 * computes the content hash, and keeps an XXH3-64 of every 64 KiB block (0.01 % of the data). Each later read checks
 * its blocks against that table, so a sample is either exactly what was hashed or one clear error. Cost: some 10-20 us
 * a sample from the page cache.
 *
 * Threads: an open source is immutable; any thread may read samples (each call uses 64 KiB of stack). */
#ifndef MU_WORKER_DATA_H
#define MU_WORKER_DATA_H

#include <stdint.h>

#include "common/hash.h"
#include "common/status.h"
#include "plan/job.h"

enum {
    MU_DATA_SHARDS_MAX = 4096,      /* files of one source; each stays open */
    MU_DATA_BLOCK_SIZE = 64 * 1024, /* bytes under one checksum */
    MU_DATA_LENGTH_MAX = 1 << 20,   /* tokens in a sample */
    MU_DATA_KEEP_SUMS = 64 << 20,   /* bytes from which workers keep the checksums of a set: a tenth of a second */
};

struct mu_data;

struct mu_data_config {
    const char *path; /* one file for MU_TOKENS_BYTES; else a glob, files in byte order of their names: shards of llm.c,
                         or the NAME.bin of Megatron data sets, each with its NAME.idx beside it */
    enum mu_token_format format;
    uint32_t vocab;          /* every token must be below it */
    uint32_t length;         /* T */
    double holdout;          /* [0, 0.5]: the last floor(holdout * tokens) tokens are held out */
    uint64_t keep_sums_from; /* bytes: of larger sets the checksums are kept beside the data, where the directory can be
                                written to (worker/data_sums.h); 0: never */
};

struct mu_data_info {
    uint64_t token_count, train_tokens, holdout_tokens;
    uint64_t train_samples; /* floor((train_tokens - 1) / T), at least 1 */
    uint64_t eval_samples;  /* floor((holdout_tokens - 1) / T), 0 when nothing is held out */
    uint32_t shard_count;
    struct mu_hash128 content; /* XXH3-128 of the tokens as little-endian uint32, then their number as uint64: does not
                                  depend on how they are split into files or how wide they are stored */
};

/* Opens, reads and checks all of it, or takes what was found when the very same files were read before. Errors name
 * file, position, value and what is allowed. */
enum mu_status mu_data_open(const struct mu_data_config *config, struct mu_data **ret_data,
                            struct mu_error *err) MU_WARN_UNUSED;
void mu_data_close(struct mu_data *data); /* NULL is fine */
void mu_data_info(const struct mu_data *data, struct mu_data_info *ret_info);

/* Sample number of the g-th sequence ever trained on: mu_permute(seed, g / N, g % N, N), N = train_samples. Pure. */
uint64_t mu_data_order(uint64_t train_samples, uint64_t seed, uint64_t global_index);

/* Tokens and targets (T each) of the g-th sequence: g = step * sequences + sequence within the step.
 * MU_ERR_CORRUPT: the file has changed since mu_data_open. */
enum mu_status mu_data_sample(const struct mu_data *data, uint64_t seed, uint64_t global_index, int32_t *tokens,
                              int32_t *targets, struct mu_error *err) MU_WARN_UNUSED;
/* The index-th held-out sample in data order; index < eval_samples. */
enum mu_status mu_data_eval_sample(const struct mu_data *data, uint64_t index, int32_t *tokens, int32_t *targets,
                                   struct mu_error *err) MU_WARN_UNUSED;

#endif
