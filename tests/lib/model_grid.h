/* A leaf of a small model computed by a grid of workers in one process: tensor groups are threads that copy each
 * other's blocks, stages follow each other inside a thread. Every worker has memory of its own in which everything that
 * is not its share is poison, so what a part reads or writes beyond its share shows. */
#ifndef MU_TESTS_LIB_MODEL_GRID_H
#define MU_TESTS_LIB_MODEL_GRID_H

#include "worker/model.h"

enum { MG_STAGES_MAX = 4, MG_RANKS_MAX = 4, MG_ACCUMULATE_MAX = 4 };

/* A leaf's data and the whole model's parameters; made by mg_leaf_new. */
struct mg_leaf {
    struct mu_model_spec spec;
    uint32_t micro, length, accumulate;
    float *params;
    int32_t *tokens, *targets; /* [accumulate, micro, length] */
    uint64_t *samples;         /* [accumulate, micro] */
};

struct mg_grid {
    uint32_t tp, pp;
    enum mu_recompute recompute;
    bool all_forward_first; /* one slot for each micro-batch: all forwards, then all backwards; else one slot */
};

struct mg_leaf mg_leaf_new(const struct mu_model_config *config, uint32_t micro, uint32_t length, uint32_t accumulate);
void mg_leaf_free(struct mg_leaf *leaf);
struct mu_micro_batch mg_batch(const struct mg_leaf *leaf, uint32_t index);

/* Gradients [flat_size] and the sum of losses. Fails the test when ranks disagree about a loss or a shared cell, when
 * memory outside a share was written, or when cells are not reported as worker/model.h says. The leaf is computed
 * twice on the same models; both must give the same bits. */
void mg_run(const struct mg_leaf *leaf, const struct mg_grid *grid, float *grads, double *ret_loss);
/* The same without a grid: mu_model_forward_backward. */
void mg_run_alone(const struct mg_leaf *leaf, struct mu_pool *pool, float *grads, double *ret_loss);
/* Evaluation of all micro-batches by the grid: sum of losses. */
double mg_evaluate(const struct mg_leaf *leaf, const struct mg_grid *grid);

/* The flat space of the same model with one slice, from that of `spec`. */
void mg_unslice(const struct mu_model_spec *spec, const float *flat, const struct mu_model_spec *whole, float *out);

#endif
