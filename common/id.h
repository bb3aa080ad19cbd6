/* Random 128-bit identities (incarnations, request ids, checkpoint nonces). */
#ifndef MU_COMMON_ID_H
#define MU_COMMON_ID_H

#include <stdbool.h>
#include <stdint.h>

struct mu_id {
    uint64_t high, low;
};

struct mu_id mu_id_random(void); /* getrandom(2); thread-safe */

static inline bool mu_id_equal(struct mu_id a, struct mu_id b)
{
    return a.high == b.high && a.low == b.low;
}

static inline bool mu_id_is_zero(struct mu_id id)
{
    return id.high == 0 && id.low == 0;
}

#endif
