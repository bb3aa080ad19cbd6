/* The battery of the numeric identity (mu_kernels_identity in kernels.h), for any backend: it fills buffers, runs the
 * operations of a pool on them and hashes what comes out. Backends say where the buffers lie. */
#ifndef MU_KERNELS_IDENTITY_H
#define MU_KERNELS_IDENTITY_H

#include "kernels/kernels.h"

/* Memory that both the host and the kernels of the pool can use. */
struct mu_identity_place {
    void *ctx;
    void *(*alloc)(void *ctx, size_t size_bytes); /* zeroed; NULL when there is none */
    void (*free)(void *ctx, void *memory);
    enum mu_status (*wait)(void *ctx); /* until the kernels have done what they were told; NULL: they always have */
    const char *text; /* what distinguishes the bits beyond the results; at least the definitions' version */
};

enum mu_status mu_identity_run(struct mu_pool *pool, const struct mu_kernel_shapes *shapes,
                               const struct mu_identity_place *place, struct mu_error *err,
                               struct mu_kernel_identity *ret_identity) MU_WARN_UNUSED;

#endif
