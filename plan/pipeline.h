/* The order of work of one pipeline stage: one forward, one backward (PipeDream-flush; Narayanan et al., arXiv
 * 2104.04473).
 *
 * Stage r of p, m micro-batches, w = min(p - r - 1, m): w times (receive activation, forward, send); m - w times
 * (forward of the next, backward of the oldest); w times (receive gradient, backward, send). At most w + 1
 * micro-batches are held. Pure. */
#ifndef MU_PLAN_PIPELINE_H
#define MU_PLAN_PIPELINE_H

#include <stdbool.h>
#include <stdint.h>

struct mu_pipeline_op {
    bool backward;
    uint32_t micro; /* 0 .. m - 1; slot = micro % mu_pipeline_slots */
};

/* Micro-batches whose activations are held at once. */
uint32_t mu_pipeline_slots(uint32_t stages, uint32_t stage, uint32_t micros);
/* Operation `index` of 2 m. */
struct mu_pipeline_op mu_pipeline_op_at(uint32_t stages, uint32_t stage, uint32_t micros, uint32_t index);

#endif
