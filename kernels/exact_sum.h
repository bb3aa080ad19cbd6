/* Exact sum of doubles: an integer wide enough for every finite double (a superaccumulator, Kulisch).
 *
 * The sum is exact, so it depends neither on the order of additions nor on how they were spread over threads and ranks;
 * it is rounded once, at the end, to nearest even. Infinities and NaNs are remembered, not added. Fixed size, no
 * pointers, no heap; an object belongs to one thread at a time. */
#ifndef MU_KERNELS_EXACT_SUM_H
#define MU_KERNELS_EXACT_SUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum {
    /* Digits of 32 bits; digit 0 has weight 2^-1074. 2098 bits hold every double, 78 more leave room for 2^77 of them.
     */
    MU_EXACT_SUM_DIGITS = 68,
    MU_EXACT_SUM_BYTES = MU_EXACT_SUM_DIGITS * 4 + 4, /* serialised: digits little-endian, then flags */
};

struct mu_exact_sum {
    int64_t digits[MU_EXACT_SUM_DIGITS]; /* value = sum of digits[i] * 2^(32 i - 1074); between adds a digit may exceed
                                            32 bits */
    uint32_t pending;                    /* additions since the digits were last carried */
    uint32_t flags;                      /* MU_EXACT_NAN, ... seen */
};

enum { MU_EXACT_NAN = 1, MU_EXACT_PLUS_INF = 2, MU_EXACT_MINUS_INF = 4 };

void mu_exact_sum_init(struct mu_exact_sum *sum);
void mu_exact_sum_add(struct mu_exact_sum *sum, double value);
/* sum += other. */
void mu_exact_sum_merge(struct mu_exact_sum *sum, const struct mu_exact_sum *other);
/* Correctly rounded (nearest even); +-infinity or NaN if such values (or both infinities) were added, or the sum
 * overflows. */
double mu_exact_sum_round(const struct mu_exact_sum *sum);
/* No infinity or NaN was added. */
bool mu_exact_sum_finite(const struct mu_exact_sum *sum);

/* Canonical bytes: equal sums give equal bytes on every machine. */
void mu_exact_sum_pack(const struct mu_exact_sum *sum, uint8_t out[MU_EXACT_SUM_BYTES]);
/* MU_ERR_CORRUPT when the bytes are not a canonical sum. */
enum mu_status mu_exact_sum_unpack(const uint8_t bytes[MU_EXACT_SUM_BYTES],
                                   struct mu_exact_sum *ret_sum) MU_WARN_UNUSED;

#endif
