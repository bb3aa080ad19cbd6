/* A probe of a cluster's workers: what each can do by itself, what pairs of them get over the data plane, and what all
 * get at the same time. Who measures with whom and when, and whose numbers stand out. Pure.
 *
 *   ALONE     each worker by itself, all at once: products, memory, copies to and from its GPU, the rates of the model
 *             of costs
 *   STORAGE   all at once write and read in their jobs' directories of checkpoints
 *   PAIR      rounds of disjoint pairs: round trip, and bytes each way in turn
 *   TOGETHER  all in a ring: a message through all of them and back, and each to the next one at the same time */
#ifndef MU_PLAN_PROBE_H
#define MU_PLAN_PROBE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"
#include "plan/cost.h"

enum {
    MU_PROBE_MEMBERS_MAX = 1024,
    MU_PROBE_ALL_PAIRS_MAX = 16, /* so many workers are measured in all pairs; more in 2 ceil(log2 n) rounds */
    MU_PROBE_NEIGHBOURS_MAX = 20,
    MU_PROBE_SIZES = 5,       /* of square products, ... */
    MU_PROBE_SIZE_FIRST = 64, /* ... each twice the one before */
    MU_PROBE_TEXT_SIZE = 128,
    MU_PROBE_FINDING_SIZE = 400,
    MU_PROBE_NAME_SIZE = 64,
};
#define MU_PROBE_STORAGE_BYTES_MAX (64ull << 30) /* of one worker */

enum mu_probe_kind { MU_PROBE_ALONE = 1, MU_PROBE_STORAGE, MU_PROBE_PAIR, MU_PROBE_TOGETHER, MU_PROBE_KIND_END };

/* Of one worker by itself; rates in bytes per second. 0: not measured. */
struct mu_probe_alone {
    double flops[MU_PROBE_SIZES];        /* of products of MU_PROBE_SIZE_FIRST << i */
    double memory_bytes;                 /* of the host; of a GPU, its own */
    double memory_rate;                  /* read and written together, of that memory */
    double to_host_rate, to_device_rate; /* of a GPU, from and to pinned memory */
    struct mu_cost_rates rates;          /* flops 0: not measured. Its link and latency are not */
    double rates_apart;                  /* mean relative error of `rates` on what they come from */
};

/* Between two, as the lower of them sees it. */
struct mu_probe_pair {
    double round_trip_s, out_rate, in_rate;
};

/* The largest of `flops`. */
double mu_probe_flops(const struct mu_probe_alone *alone);

/* ---- rounds ---- */

/* Rounds of PAIR for so many workers: each has one partner at most in each round, no pair comes twice, and up to
 * MU_PROBE_ALL_PAIRS_MAX workers all pairs come. */
uint32_t mu_probe_rounds(uint32_t workers);
/* Whom worker i measures with; i itself: nobody. */
uint32_t mu_probe_partner(uint32_t workers, uint32_t round, uint32_t i);
/* TOGETHER: whom rank i of so many is connected to: those 1, 2, 4, ... further and before, ascending. Returns how many.
 */
uint32_t mu_probe_neighbours(uint32_t workers, uint32_t i, uint32_t ret_ranks[MU_PROBE_NEIGHBOURS_MAX]);

/* ---- what came of it ---- */

struct mu_probe_member {
    char name[MU_PROBE_NAME_SIZE], host[MU_PROBE_NAME_SIZE], backend[16], job[MU_PROBE_NAME_SIZE];
    bool out;                      /* it did not take part to the end: `text` */
    char text[MU_PROBE_TEXT_SIZE]; /* what was not measured, and why; else empty */
    bool has_alone;
    struct mu_probe_alone alone;
    double write_rate, read_rate; /* 0: not measured */
    double barrier_s, ring_rate;  /* all together; 0: not measured */
};

enum mu_probe_link_state {
    MU_PROBE_LINK_UNKNOWN, /* one of the two was out by then */
    MU_PROBE_LINK_GOOD,
    MU_PROBE_LINK_FAILED, /* `text` says how */
};

struct mu_probe_link {
    uint32_t a, b; /* a < b */
    enum mu_probe_link_state state;
    struct mu_probe_pair pair;
    char text[MU_PROBE_TEXT_SIZE];
};

struct mu_probe_result {
    uint32_t member_count, link_count;
    struct mu_probe_member *members;
    struct mu_probe_link *links;
};

/* ---- whose numbers stand out ---- */

enum mu_probe_finding_kind {
    MU_PROBE_OUT,         /* a worker did not take part to the end */
    MU_PROBE_BROKEN,      /* a link between two that are well */
    MU_PROBE_SLOW_WORKER, /* by itself, or on its links as a whole */
    MU_PROBE_SLOW_LINK,   /* slower than what both of its ends get elsewhere */
};

struct mu_probe_finding {
    enum mu_probe_finding_kind kind;
    uint32_t a, b;                    /* members; a worker's: b = a */
    double share;                     /* of what is usual, 0 to 1; 0 for OUT and BROKEN */
    char text[MU_PROBE_FINDING_SIZE]; /* one line for people */
};

/* What stands out: OUT and BROKEN first, then by share, the smallest first. A number stands out when it is below the
 * median of its kind by more than a fifth (a round trip: when it is more than twice as long) and by more than three
 * times 1.4826 times the median deviation (more where there are few), both taken on logarithms: so where all numbers
 * scatter, none does. Products
 * and memory are compared among workers of one backend, links inside a host among each other. What a worker gets on its
 * links as a whole is their upper quartile, so one slow link does not make two slow workers, and a slow worker no slow
 * links: those are compared with what the slower of their ends gets as a whole. Fewer than three numbers are not
 * compared.
 * *ret_findings is the caller's to free; NULL when *ret_count is 0. MU_ERR_NO_MEMORY. */
enum mu_status mu_probe_judge(const struct mu_probe_result *result, struct mu_probe_finding **ret_findings,
                              uint32_t *ret_count) MU_WARN_UNUSED;

/* Middle one of the numbers above 0 (the lower of two); 0: there is none. Sorts them. */
double mu_probe_median(double *values, uint32_t count);

#endif
