/* How long things took: counts by powers of two of a millisecond. Plain data, guarded by whoever owns it. */
#ifndef MU_COMMON_HISTOGRAM_H
#define MU_COMMON_HISTOGRAM_H

#include <stdint.h>

enum { MU_HISTOGRAM_BOUNDS = 14 }; /* 1 ms, 2 ms, ... 8.192 s */

struct mu_histogram {
    uint64_t counts[MU_HISTOGRAM_BOUNDS + 1]; /* of those up to each bound and above the one before; the last: more */
    uint64_t sum_us;
};

/* `count` things that took `us` each. */
static inline void mu_histogram_add_many(struct mu_histogram *histogram, uint64_t us, uint64_t count)
{
    int at = 0;
    while (at < MU_HISTOGRAM_BOUNDS && us > (UINT64_C(1000) << at))
        at++;
    histogram->counts[at] += count;
    histogram->sum_us += us * count;
}

static inline void mu_histogram_add(struct mu_histogram *histogram, uint64_t us)
{
    mu_histogram_add_many(histogram, us, 1);
}

#endif
