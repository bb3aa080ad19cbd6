/* Counter-based randomness: Philox4x32-10 (Salmon et al., SC'11) and a keyed permutation without a table.
 * Pure functions; the key names a logical element, never a position in a buffer. */
#ifndef MU_COMMON_RNG_H
#define MU_COMMON_RNG_H

#include <stdint.h>

/* 10 rounds of Philox4x32: out = f(key, counter). */
void mu_philox4x32(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4]);

/* The image of `index` under a permutation of [0, count) chosen by (seed, epoch): a 6-round Feistel network over the
 * next even number of bits, cycle-walked into range. count >= 1, index < count. */
uint64_t mu_permute(uint64_t seed, uint64_t epoch, uint64_t index, uint64_t count);

/* splitmix64 step, for seeding of tests and jitter. */
uint64_t mu_splitmix64(uint64_t *state);

#endif
