/* What a worker measures for a probe (plan/probe.h), with its own pool, kernels, model and data plane; also of `muster
 * probe` on one host. Whoever calls owns the pool, and the comm where there is one.
 *
 * Everything takes about as long as it says and looks at `stop` in between, several times a second: true ends it with
 * MU_ERR_CANCELLED. What it allocates it gives back, at most 200 MiB at a time. */
#ifndef MU_WORKER_MEASURE_H
#define MU_WORKER_MEASURE_H

#include "kernels/pool.h"
#include "plan/probe.h"
#include "worker/comm.h"

struct mu_measure {
    struct mu_pool *pool;    /* NULL: for what needs none */
    bool (*stop)(void *ctx); /* NULL: never */
    void *ctx;
    uint64_t deadline_us; /* mu_clock_mono_us: MU_ERR_TIMEOUT then */
};

/* MU_OK, MU_ERR_CANCELLED or MU_ERR_TIMEOUT. */
enum mu_status mu_measure_goes_on(const struct mu_measure *m, struct mu_error *err) MU_WARN_UNUSED;

/* Products (of sizes that take a second at most, the others stay 0), memory, copies from and to a GPU: 1 s. */
enum mu_status mu_measure_device(const struct mu_measure *m, struct mu_probe_alone *out,
                                 struct mu_error *err) MU_WARN_UNUSED;

/* ---- measure_model.c: micro-batches of several shapes through the model, sums and updates: about 3 s ---- */

enum { MU_MEASURE_SAMPLES = 18 };
struct mu_measured_model {
    double seconds[MU_MEASURE_SAMPLES]; /* median of a micro-batch, forward and backward */
    double flat_rate;                   /* bytes per second of sums and updates */
};
/* `meet` (NULL: nothing) is called before each of them, also after a failure, MU_MEASURE_SAMPLES + 1 times in all:
 * whoever measures beside this one begins at the same time. */
enum mu_status mu_measure_model(const struct mu_measure *m, void (*meet)(void *ctx), void *meet_ctx,
                                struct mu_measured_model *out, struct mu_error *err) MU_WARN_UNUSED;
/* Rates that explain it; how far they are off on average. Their link and latency are the default ones. */
double mu_measured_rates(const struct mu_measured_model *measured, struct mu_cost_rates *ret_rates);

/* ---- measure_storage.c ---- */

/* Writes so many MiB to a file of its own in `dir` (`make`: which is made if need be), syncs it, and reads it again
 * after the cache was asked to forget it; bytes per second. On a thread of its own: what does not come back from the
 * disk is left there. */
enum mu_status mu_measure_storage(const struct mu_measure *m, const char *dir, bool make, uint64_t mib,
                                  double *ret_write_rate, double *ret_read_rate, struct mu_error *err) MU_WARN_UNUSED;

/* ---- measure_links.c: over a group that all of them open, and that is closed again ---- */

/* Rank 0 and rank 1: round trips, then bytes each way in turn, more of them until it takes 60 ms. The first ones are
 * compared with what was sent: MU_ERR_CORRUPT. Rank 0 leads and takes the time: *out is its alone. Failures of the
 * connection: MU_ERR_UNAVAILABLE, as of struct mu_comm_group. */
enum mu_status mu_measure_pair(const struct mu_measure *m, struct mu_comm *comm,
                               const struct mu_comm_group_config *config, struct mu_probe_pair *out,
                               struct mu_error *err) MU_WARN_UNUSED;
/* All, each connected to its mu_probe_neighbours: a barrier of small messages, again and again; then `bytes` to the
 * next rank and from the one before, at the same time. Seconds of a barrier; bytes per second received. */
enum mu_status mu_measure_together(const struct mu_measure *m, struct mu_comm *comm,
                                   const struct mu_comm_group_config *config, uint64_t bytes, double *ret_seconds,
                                   double *ret_rate, struct mu_error *err) MU_WARN_UNUSED;

#endif
