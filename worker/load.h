/* Loads one rank's share of the state from a checkpoint, whatever layout wrote it.
 *
 * Proves that the checkpoint is the one that is meant and that its pieces tile this model; opens the pieces that hold
 * something of the share, and of those reads and verifies what holds something of it. Only chunks of the share are
 * written to, and the gaps between them set to zero. Blocking; any thread. */
#ifndef MU_WORKER_LOAD_H
#define MU_WORKER_LOAD_H

#include <stdatomic.h>
#include <stdbool.h>

#include "plan/layout.h"
#include "plan/model_spec.h"
#include "plan/session.h"

struct mu_load_config {
    const char *dir;
    const char
        *job; /* what it must be: the job's name, the checkpoint's sequence number, its step; NULL: any checkpoint
                 of this model, for a job that starts from another one's parameters or from an import */
    uint64_t checkpoint, step;
    const char *sha256;              /* without `job`: of its manifest.json, in hexadecimal; NULL: any */
    const char *host;                /* with holders: the own one */
    const struct mu_holder *holders; /* of a checkpoint of kind local: what is not in `dir` comes from them; or NULL */
    uint32_t holder_count;
    const struct mu_model_spec *model;
    const struct mu_chunk_run *params, *moments; /* wanted: ascending, disjoint (mu_layout_runs) */
    uint32_t params_count, moments_count;        /* 0: nothing of that kind is read */
    float *flats[3];                             /* flat spaces of parameters, first and second moments */
    const atomic_bool *cancel;                   /* NULL: never */
    atomic_uint_least64_t *progress;             /* counts blocks read; NULL: nobody looks */
};

/* MU_ERR_CANCELLED, MU_ERR_NO_MEMORY, MU_ERR_UNAVAILABLE (a holder cannot be reached): not the checkpoint's fault. Any
 * other error: this checkpoint cannot be loaded here. After an error the share's contents are undefined. */
enum mu_status mu_load_checkpoint(const struct mu_load_config *config, struct mu_error *err) MU_WARN_UNUSED;

#endif
