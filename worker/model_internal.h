/* Inside the model: what its files share. See worker/model.h for what is computed and in which order.
 *
 *   model.c            options, workspace, the calls
 *   model_group.c      steps that see slices and the tensor group: products over slices, exchanges, shared sums
 *   model_layer.c      one layer, forward and backward
 *   model_embedding.c  the first stage's begin and end
 *   model_head.c       final norm, logits, loss
 *   model_state.c      initial parameters and updates (no struct mu_model)
 *
 * Words: n rows = tokens of a micro-batch; **own** rows are this rank's part of them in the residual stream (all
 * without a tensor group); local slices are the part's. Buffers "[slices][rows, width]" hold one dense matrix for each
 * local slice, one behind the other, so operations that do not mix rows take all slices as rows of one.
 *
 * Arrays lie on the device of the pool: the host copies them (model_copy), and looks at nothing but losses.
 *
 * A failure (cancelled, an exchange, the device) is kept in model->status; every step after it does nothing. */
#ifndef MU_WORKER_MODEL_INTERNAL_H
#define MU_WORKER_MODEL_INTERNAL_H

#include "kernels/arena.h"
#include "worker/model.h"

/* What the forward pass of one layer leaves for the backward pass. With recomputation buffers that are computed again
 * are one set for all layers. */
struct layer_state {
    float *x1, *norm1, *mean1, *rstd1; /* residual stream before attention, its norm [own, C]; per row */
    float *qkv, *lse, *attention; /* [slices][n, qkv], [slices][sequences, heads, length], [slices][n, attention] */
    float *x2, *norm2, *mean2, *rstd2; /* residual stream before the MLP */
    float *up, *act;                   /* [slices][n, up] before and [slices][n, hidden] after the activation */
};

struct slot_state {
    struct layer_state *layers; /* [layer_count] */
    float *xf, *normf, *meanf, *rstdf;
};

/* Widths of one slice, and how the work is cut. */
struct model_dims {
    uint32_t total_slices; /* T */
    uint32_t slices;       /* local */
    uint32_t ranks, rank;  /* of the tensor group; 1, 0 without */
    uint32_t rows, own;    /* n, n / ranks */
    uint32_t channels, head_channels;
    uint32_t heads, kv_heads;    /* of one slice */
    uint32_t qkv, attention;     /* floats in a row of one slice */
    uint32_t hidden, up;         /* up: hidden, or gate | up */
    uint32_t vocab, vocab_slice; /* all; rows of one slice (the last slice may have fewer) */
    bool llama, rms, bias, tied, wpe;
};

/* Where tensors lie in the flat space: the same for parameters and gradients. */
struct model_map {
    uint64_t role_at[MU_ROLE_COUNT];        /* from the start of its cell */
    uint64_t *layer_slices, *layer_shared;  /* [layer_count]: cell of the first local slice, shared cell */
    uint64_t layer_stride;                  /* from one slice's cell to the next one's */
    uint64_t layer_shared_size, final_size; /* elements */
    uint64_t wte, wte_stride, wpe;
    uint64_t head, head_stride; /* the head's matrix: wte when tied */
    uint64_t final;             /* F.shared */
};

struct mu_model {
    struct mu_model_spec spec;
    struct mu_model_options options;
    struct model_dims dims;
    struct model_map map;
    struct mu_pool *pool;
    struct mu_device *device; /* of the pool */
    struct mu_arena *arena;   /* arrays, on the device */
    struct mu_arena *tables;  /* of the host: slots, layers, and what else holds addresses */

    struct slot_state *slots;
    float *
        full; /* [n, C]: gathered rows, or a sum over slices; with a tensor group the latter's own rows in `received` */
    float *received;        /* [ranks][own, C] */
    float *logits;          /* [slices][head_tokens, logits_stride] */
    float *highest;         /* [ranks + slices][head_tokens] */
    double *sums;           /* the same */
    double *losses;         /* [ranks][n] */
    const float **vocab;    /* [slices]: wte's slices, for the look-up */
    float *cosines, *sines; /* rotary table */
    float *dbranch, *dhidden,
        *dqkv; /* [own, C] (dropout only), [slices][n, max(hidden, attention)], [slices][n, qkv] */
    float *norm_workspace, *row_scratch; /* row_scratch: [2][own] */
    float *layer_sums, *final_sums;      /* T > 1: [layer_count][slices][shared cell], [slices][F.shared] */
    float *shared_gather;                /* [ranks][the larger of the two] */
    float *position_sums;                /* T > 1: [levels][length, C] */
    float **dembedding;                  /* [accumulate][own, C]: gradient of the stream, kept to the leaf's end */
    int32_t *tokens;                     /* [accumulate][n], copies for the look-up's gradient */
    uint64_t *samples;                   /* [accumulate][micro] */
    int32_t *in_tokens, *in_targets;     /* [n]: the batch under way, where operations see it */
    uint64_t *in_samples;                /* [micro] */
    int32_t *places, *places_table;      /* [own]: rows of `received` with the look-ups of own tokens; on the host */
    uint32_t head_tokens, position_levels;
    size_t logits_stride;

    enum mu_status status; /* of the call in progress: after the first failure the rest is skipped */
    bool recordable;       /* the sequence that is being given */
    uint64_t forward_ns, backward_ns;
};

/* One call: the logical shape, and where the numbers are. */
struct pass {
    uint32_t sequences, length, rows;
    uint32_t first_row, own; /* own rows of the residual stream */
    const int32_t *tokens, *targets;
    const uint64_t *samples;
    const struct mu_micro_batch *batch;
    const struct slot_state *slot;
    const float *params;
    float *grads;    /* NULL: no gradient */
    bool accumulate; /* gradients are added into what earlier micro-batches of the leaf left */
    bool dropout;
};

/* The residual stream between two layers is x + drop(branch): the addition happens in the next norm. */
struct stream {
    const float *x, *branch; /* [own, C]; branch NULL: x alone */
};

static inline uint32_t model_first_slice(const struct mu_model *m)
{
    return m->options.part.first_slice;
}

/* Rows of vocabulary slice `slice` (of T). */
static inline uint32_t model_vocab_rows(const struct model_dims *d, uint32_t slice)
{
    uint32_t first = slice * d->vocab_slice;
    return d->vocab - first < d->vocab_slice ? d->vocab - first : d->vocab_slice;
}

/* ---- model_group.c ---- */

void model_product(struct mu_model *m, const struct mu_gemm *gemm);
void model_copy(struct mu_model *m, void *to, const void *from, size_t size_bytes);

/* All rows from everybody's own rows: the buffer itself without a tensor group, else in m->full. */
const float *model_gather(struct mu_model *m, const struct pass *p, const float *own);

/* m->full holds sums over the local slices, [n, C]: adds up those of all ranks by the tree and returns the own rows,
 * in m->full without a tensor group, else in m->received. */
float *model_scatter(struct mu_model *m, const struct pass *p);

/* Sum over all slices of a_s op(b_s), a_s [n, k] dense, + bias: own rows, as above. */
struct slice_sum {
    uint32_t k;
    const float *a;
    bool transpose_b;
    const float *b;
    size_t ldb, b_slice;
    const float *bias; /* may be NULL */
};
const float *model_slice_sum(struct mu_model *m, const struct pass *p, const struct slice_sum *sum);

/* The buffers of a shared cell's gradient: one for each own token slice, `size` apart; with T = 1 the cell itself. */
float *model_layer_sums(struct mu_model *m, const struct pass *p, uint32_t layer);
float *model_final_sums(struct mu_model *m, const struct pass *p);

/* Adds column sums of dy [own, C] to the bias at `at` in the sums of a shared cell of `size`. */
void model_bias_sums(struct mu_model *m, const struct pass *p, const float *dy, float *sums, uint64_t size,
                     uint64_t at);

/* Ends the leaf for a shared cell: the tree over all token slices, into the cell. Nothing unless it is the leaf's last
 * micro-batch. */
void model_finish_sums(struct mu_model *m, const struct pass *p, float *sums, uint64_t cell, uint64_t size);

/* buffer[0 .. size) = the tree over `count` buffers, `size` apart (the others are overwritten). */
void model_tree(struct mu_model *m, uint32_t count, size_t size, float *buffers);

/* Says that the gradient of a cell is complete, if it is. */
void model_report(const struct mu_model *m, const struct pass *p, enum mu_cell_kind kind, uint32_t layer,
                  uint32_t slice);
void model_report_slices(const struct mu_model *m, const struct pass *p, enum mu_cell_kind kind, uint32_t layer);
bool model_leaf_ends(const struct pass *p);

/* What micro-batch after micro-batch does with the same arrays, and a GPU therefore takes as a whole (recordings,
 * kernels/device.h): not with dropout, which is another one each time. `a`, `b`: what it depends on beside the slot,
 * the parameters, the gradients and the place of the micro-batch in its leaf.
 *
 *   if (!model_replayed(m, p, &sequence))
 *       do ... while (model_again(m)); */
struct model_sequence {
    enum { MODEL_FORWARD, MODEL_LAYER_BACKWARD, MODEL_HEAD } what;
    uint32_t layer;
    const void *a, *b;
};
bool model_replayed(struct mu_model *m, const struct pass *p, const struct model_sequence *sequence);
bool model_again(struct mu_model *m);

/* ---- model_layer.c ---- */

struct mu_dropout model_site(const struct mu_model *m, const struct pass *p, uint32_t layer, enum mu_dropout_op op);

/* One norm site: its tensors, and what it keeps. */
struct norm_site {
    const float *weight, *bias;
    float *x, *y, *mean, *rstd;
};
/* x = stream (branch dropped out by `drop`), y = norm(x). */
void model_norm(struct mu_model *m, const struct pass *p, struct stream in, const struct mu_dropout *drop,
                const struct norm_site *site);
/* dx += norm'(dy) (or = when `first`), weight gradients into `sums` of a shared cell of `size` at `at_w`, `at_b`;
 * returns the gradient of the branch that was added before this norm (drop NULL: dx). */
struct norm_gradient {
    const struct norm_site *site;
    const float *dy;
    const struct mu_dropout *drop;
    bool first;
    float *sums;
    uint64_t size, at_w, at_b;
};
const float *model_norm_backward(struct mu_model *m, const struct pass *p, const struct norm_gradient *g, float *dx);

/* `layer` counts from the part's first. `again`: only what backward needs is computed again, nothing is returned. */
struct stream model_layer_forward(struct mu_model *m, const struct pass *p, uint32_t layer, struct stream in,
                                  bool again);
const float *model_layer_backward(struct mu_model *m, const struct pass *p, uint32_t layer, const float *dbranch,
                                  float *dx);

/* ---- model_embedding.c ---- */

void model_embedding_forward(struct mu_model *m, const struct pass *p, float *x);
/* Micro-batches whose look-ups are kept, before this one. */
uint32_t model_kept(const struct mu_model *m, const struct pass *p);
void model_embedding_keep(struct mu_model *m, const struct pass *p);
void model_embedding_backward(struct mu_model *m, const struct pass *p);

/* ---- model_head.c ---- */

void model_final_norm(struct mu_model *m, const struct pass *p, struct stream in);
/* Logits and losses; with p->grads also the head's weight gradient, and the gradient of its input is returned (own
 * rows). */
const float *model_head(struct mu_model *m, const struct pass *p);
const float *model_final_backward(struct mu_model *m, const struct pass *p, const float *dnorm, float *dx);
double model_sum_losses(struct mu_model *m, const struct pass *p);
void model_last_logits(struct mu_model *m, const struct pass *p, float *logits);

uint64_t model_clock_ns(void);

#endif
