/* What one worker of a host does for its host's directory of checkpoints of kind local, by order of the coordinator
 * (plan/session.h, struct mu_keep_order): copy the pieces of the holder before, write manifests, re-read, remove. And
 * it gives the directory's files out to others (worker/files.h).
 *
 * A thread of its own works the orders off in the order in which they came; each is answered once, by `done` on that
 * thread. Done again an order changes nothing, so whoever is not sure gives it again. */
#ifndef MU_WORKER_KEEPER_H
#define MU_WORKER_KEEPER_H

#include "common/hash.h"
#include "common/status.h"
#include "plan/session.h"

enum { MU_KEEPER_ORDERS_MAX = 512, MU_KEEPER_CHECK_BYTES_PER_SECOND = 64 << 20 };

typedef void mu_keeper_done_fn(void *ctx, const struct mu_kept_report *report);

struct mu_keeper_config {
    const struct mu_job_spec *spec; /* copied */
    struct mu_hash128 numeric_identity;
    const char *host; /* as in Hello; copied */
    const char *ip;   /* literal, to give files out on */
    mu_keeper_done_fn *done;
    void *ctx;
};

struct mu_keeper;

enum mu_status mu_keeper_new(const struct mu_keeper_config *config, struct mu_keeper **ret_keeper,
                             struct mu_error *err) MU_WARN_UNUSED;
/* Ends what is under way, still removes what was ordered to be removed, answers nothing more. NULL is fine. */
void mu_keeper_free(struct mu_keeper *keeper);

/* Copies the order. MU_ERR_BUSY: too many wait; MU_ERR_NO_MEMORY. */
enum mu_status mu_keeper_order(struct mu_keeper *keeper, const struct mu_keep_order *order,
                               struct mu_error *err) MU_WARN_UNUSED;

/* The newest checkpoints of the job that are on this host's disk, by their nonces' lower halves. Returns how many. */
uint32_t mu_keeper_inventory(const struct mu_keeper *keeper, uint64_t ret_nonces[MU_INVENTORY_MAX]);

const char *mu_keeper_address(const struct mu_keeper *keeper);
const uint8_t *mu_keeper_secret(const struct mu_keeper *keeper);

#endif
