/* Operations of a transformer in fp32: the same bits on every machine. (What follows says how the CPU does it; on GPUs
 * the definitions are the same, see kernels/cuda/cuda.h.)
 *
 * The result of every operation is a function of its logical arguments alone: not of the number of threads, the
 * instruction set (AVX-512, AVX2, plain C), the alignment of buffers or the tile sizes. How:
 *   - all multiply-adds are explicit IEEE fma; the compiler contracts and reassociates nothing (-ffp-contract=off);
 *   - matrix product: the reduction is cut into chunks of MU_GEMM_CHUNK; each chunk is an fma chain from +0 in
 *     ascending k; chunk sums are added in ascending order (to the old value of C first, when accumulating);
 *   - row reductions use 16 virtual lanes (element i in lane i mod 16, ascending) folded 8-4-2-1;
 *   - column reductions over rows run in blocks of MU_GEMM_CHUNK rows: an addition chain from +0 per block, blocks
 *     added in order;
 *   - exp, log, sin and cos are fma polynomials of our own; division and square root are IEEE;
 *   - a sum over slices (tensor parallelism) follows the balanced binary tree over their power-of-two number.
 *
 * Row operations work on rows [first_row, first_row + rows) of a micro-batch, in buffers that start with row first_row;
 * row r is token r % length of sequence r / length. Only dropout and positions depend on where the rows lie.
 *
 * Matrices are row-major. Every function runs on `pool` (called by its owner), or on the device that
 * the pool is bound to, whose memory the arrays then lie in (kernels/cuda/cuda.h says which do), and returns MU_OK or
 * MU_ERR_CANCELLED (outputs are then undefined). No function allocates; scratch comes from the pool's lanes or from the
 * caller, as documented. Pointers need only be aligned for their type; 64 bytes are fastest. Buffers must not overlap
 * unless said so. */
#ifndef MU_KERNELS_KERNELS_H
#define MU_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/hash.h"
#include "common/status.h"
#include "kernels/exact_sum.h"
#include "kernels/pool.h"

enum {
    MU_GEMM_CHUNK = 256,                 /* part of the definition of every result: never change it */
    MU_NORM_ROWS = 64,                   /* rows in one partial sum of a norm's weight gradients; as above */
    MU_SOFTMAX_BLOCK = 1024,             /* columns in one partial sum of a row of the vocabulary; as above */
    MU_ATTENTION_TILE = 64,              /* queries and keys in one tile; part of the definition */
    MU_ATTENTION_HEAD_MAX = 256,         /* largest channels / heads */
    MU_ATTENTION_ELEMENTS_MAX = 1 << 18, /* largest length * (channels / heads), in whole tiles and lanes */
    MU_SERIAL_ELEMENTS = 16384,          /* element-wise work is spread over threads in pieces of this size */
};

/* ---- instruction set ---- */

enum mu_isa { MU_ISA_SCALAR = 0, MU_ISA_AVX2 = 1, MU_ISA_AVX512 = 2 };

/* The one in use: the best this CPU has, capped by MU_CPU_ISA=scalar|avx2|avx512 or DNNL_MAX_CPU_ISA=AVX2 or older. */
enum mu_isa mu_isa_active(void);
const char *mu_isa_name(enum mu_isa isa);
/* Switches (tests, benchmarks; no kernel may be running). MU_ERR_INVALID when this CPU lacks it. */
enum mu_status mu_isa_select(enum mu_isa isa, struct mu_error *err) MU_WARN_UNUSED;

/* ---- matrix product ---- */

enum mu_epilogue {
    MU_EPILOGUE_NONE,
    MU_EPILOGUE_BIAS,      /* C = AB + bias */
    MU_EPILOGUE_BIAS_GELU, /* before = AB + bias; C = gelu(before) */
    MU_EPILOGUE_GELU_GRAD, /* C = AB * gelu'(aux) */
};

enum { MU_GEMM_SLICES_MAX = 64 };

/* C[m,n] = op(A)[m,k] op(B)[k,n], or C += when `accumulate` (then without epilogue). op(X) is X, or its transpose when
 * flagged; lda, ldb, ldc, ldaux are the row strides, in elements, of the stored matrices.
 * With slices > 1 (a power of two) C = the sum over s of op(A_s) op(B_s), added by the balanced tree, with the bits of
 * `slices` products of their own: A_s = a + s * a_slice, B_s = b + s * b_slice (elements). The epilogue applies to the
 * sum; `accumulate` is not allowed. */
struct mu_gemm {
    uint32_t m, n, k;
    uint32_t slices; /* 0 and 1: one product; else k is each slice's */
    uint32_t k_last; /* the last slice's k when it is shorter; 0: k */
    size_t a_slice, b_slice;
    bool transpose_a; /* A is stored [k,m] */
    bool transpose_b; /* B is stored [n,k] */
    const float *a, *b;
    float *c;
    size_t lda, ldb, ldc;
    bool accumulate;
    enum mu_epilogue epilogue;
    const float *bias; /* [n] */
    float *before;     /* [m,n]: written by BIAS_GELU */
    const float *aux;  /* [m,n]: read by GELU_GRAD */
    size_t ldaux;      /* row stride of before or aux */
};

enum mu_status mu_kernel_gemm(struct mu_pool *pool, const struct mu_gemm *gemm) MU_WARN_UNUSED;

/* out[n] = (accumulate ? out : 0) + sum over rows of a[rows, n] (row stride lda). */
enum mu_status mu_kernel_column_sum(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *a, size_t lda,
                                    bool accumulate, float *out) MU_WARN_UNUSED;

/* ---- dropout ---- */

enum mu_dropout_op {
    MU_DROPOUT_EMBEDDING = 1,
    MU_DROPOUT_ATTENTION = 2,
    MU_DROPOUT_PROJECTION = 3,
    MU_DROPOUT_MLP = 4
};

/* A dropout site. The random number of element (sample, token, feature) is word (feature / 16) % 4 of Philox4x32-10
 * with key `key` and counter {feature / 64 * 16 + feature % 16, token, sample low, sample high}; the element is kept,
 * times `scale`, when the number is >= threshold. For attention, token is the query and feature is head * 2^20 + key
 * position. */
struct mu_dropout {
    uint32_t key[2];
    uint32_t threshold; /* 0 = no dropout: every element is kept and not scaled */
    float scale;
    const uint64_t *samples; /* sample number of each sequence */
};

/* key = first two words of Philox with key = seed and counter {step low, step high, layer * 256 + op, "drop"}. rate in
 * [0, 1). */
struct mu_dropout mu_dropout_site(uint64_t seed, uint64_t step, uint32_t layer, enum mu_dropout_op op, float rate,
                                  const uint64_t *samples);

/* Fills keep[count] with the factors (0 or scale) of features first .. first + count - 1 of (sequence, token). first %
 * 64 == 0. */
void mu_dropout_factors(const struct mu_dropout *site, uint32_t sequence, uint32_t token, uint32_t first,
                        uint32_t count, float *keep);

/* ---- rows: embedding, residual, norm ---- */

/* Some slices of a vocabulary table: slices[i] holds rows [(first_slice + i) * slice_rows, ...) of it, the table's last
 * slice perhaps fewer than slice_rows. */
struct mu_vocab_slices {
    const float *const *slices; /* [slice_count], each [slice_rows, channels] */
    uint32_t slice_rows, first_slice, slice_count;
    uint32_t vocab; /* rows of the whole table; every token must be below (asserted) */
};

/* x[row,:] = drop(table[tokens[row],:] + wpe[row % length,:]) for the rows whose token lies in the slices given; other
 * rows of x are left alone. tokens are those of the rows. wpe and drop may be NULL. */
enum mu_status mu_kernel_embedding_forward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                           uint32_t channels, const struct mu_vocab_slices *table,
                                           const int32_t *tokens, const float *wpe, const struct mu_dropout *drop,
                                           float *x) MU_WARN_UNUSED;

/* The backward pass in three parts. dx is multiplied by the dropout factors, in place (nothing happens without
 * dropout). */
enum mu_status mu_kernel_embedding_drop(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                        uint32_t channels, const struct mu_dropout *drop, float *dx) MU_WARN_UNUSED;
/* dtable[count, channels] = vocabulary rows [first, first + count): for each, the rows of dx[rows, channels] where it
 * occurs are added into it in ascending order; tokens outside are skipped. */
enum mu_status mu_kernel_embedding_backward(struct mu_pool *pool, uint32_t rows, uint32_t channels,
                                            const int32_t *tokens, const float *dx, uint32_t first, uint32_t count,
                                            float *dtable) MU_WARN_UNUSED;
/* dwpe[row % length,:] += dx[row,:], rows ascending. */
enum mu_status mu_kernel_position_backward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                           uint32_t channels, const float *dx, float *dwpe) MU_WARN_UNUSED;

/* residual_out = residual + drop(branch) (branch NULL: residual_out = residual and may be the same buffer), then per
 * row of `channels`, eps 1e-5, either layer norm: y = (residual_out - mean) * rstd * weight + bias, or with `rms`
 * (Zhang and Sennrich, arXiv 1910.07467): y = residual_out * rstd * weight, rstd = 1 / sqrt(mean square + eps); then
 * mean and bias are not looked at. mean and rstd (one per row) are kept for the backward pass. */
struct mu_norm_forward {
    uint32_t first_row, rows, length, channels;
    bool rms;
    const float *residual, *branch, *weight, *bias;
    const struct mu_dropout *drop; /* of the branch; may be NULL */
    float *residual_out, *y, *mean, *rstd;
};
enum mu_status mu_kernel_norm_forward(struct mu_pool *pool, const struct mu_norm_forward *norm) MU_WARN_UNUSED;

/* dresidual += d(norm)/d(residual) * dy; dweight and dbias are summed over these rows (blocks of 64, then a column sum
 * over blocks) and added into, or overwritten unless `accumulate`. If `dbranch` is not NULL it receives dresidual
 * (after the addition) times the dropout factors of the branch: the gradient of the branch that was added to the
 * residual before this norm. (drop NULL or without dropout: the factors are 1; pass dbranch = NULL and use dresidual
 * itself.) With `rms` mean and dbias are not looked at. workspace: mu_kernel_norm_workspace(rows, channels) floats. */
struct mu_norm_backward {
    uint32_t first_row, rows, length, channels;
    bool rms;
    const float *residual, *weight, *mean, *rstd; /* residual = residual_out of the forward pass */
    const float *dy;
    const struct mu_dropout *drop;
    bool accumulate;
    bool first; /* dresidual holds nothing yet: it is overwritten instead of added into */
    float *dresidual, *dbranch, *dweight, *dbias, *workspace;
};
size_t mu_kernel_norm_workspace(uint32_t rows, uint32_t channels);
enum mu_status mu_kernel_norm_backward(struct mu_pool *pool, const struct mu_norm_backward *norm) MU_WARN_UNUSED;

/* x[rows, n] += bias[n]: the bits of MU_EPILOGUE_BIAS, for sums that are complete only after a product. */
enum mu_status mu_kernel_bias_add(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *bias,
                                  float *x) MU_WARN_UNUSED;

/* ---- activations ---- */

/* y = gelu(x), tanh form: x / (1 + exp(-2 u)), u = sqrt(2/pi) (x + 0.044715 x^3). dx = dy * gelu'(x). */
enum mu_status mu_kernel_gelu_forward(struct mu_pool *pool, size_t size, const float *x, float *y) MU_WARN_UNUSED;
enum mu_status mu_kernel_gelu_backward(struct mu_pool *pool, size_t size, const float *x, const float *dy,
                                       float *dx) MU_WARN_UNUSED;

/* y[rows, hidden] = silu(gate) * up, silu(g) = g / (1 + exp(-g)), of gate_up[rows, 2 hidden]: gate | up in each row
 * (Shazeer, arXiv 2002.05202). */
enum mu_status mu_kernel_swiglu_forward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                        float *y) MU_WARN_UNUSED;
/* d_gate_up[rows, 2 hidden]; may be the same buffer as gate_up. */
enum mu_status mu_kernel_swiglu_backward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                         const float *dy, float *d_gate_up) MU_WARN_UNUSED;

/* ---- rotary positions (Su et al., arXiv 2104.09864) ---- */

/* cosines, sines[length, head_channels / 2] of token * base^(-2 i / head_channels): in double with common/fmath.h,
 * rounded once. head_channels is even. */
void mu_kernel_rotary_table(uint32_t length, uint32_t head_channels, double base, float *cosines, float *sines);

/* Rotates, in place, `heads` heads that lie side by side at the start of each row of x (row stride `stride`): the pairs
 * (i, i + head_channels / 2) of a head by the angle of the row's token; the convention of Hugging Face's rotate_half.
 * `inverse` turns back: the gradient. */
enum mu_status mu_kernel_rotary(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                uint32_t heads, uint32_t head_channels, size_t stride, const float *cosines,
                                const float *sines, bool inverse, float *x) MU_WARN_UNUSED;

/* ---- attention ---- */

/* Causal attention of `heads` query heads over `kv_heads` key and value heads (a divisor: query head h uses head h /
 * (heads / kv_heads)); all heads of a model or a slice of them. A row of qkv is q[heads * head_channels] | k[kv_heads *
 * head_channels] | v[kv_heads * head_channels], a row of out[heads * head_channels]. The [length, length] matrix never
 * exists: key tiles ascending, running maximum and sum. lse [sequences, heads, length] = log-sum-exp of each row, for
 * the backward pass. */
struct mu_attention {
    uint32_t sequences, length, heads, kv_heads, head_channels;
    uint32_t first_head; /* number of head 0 in the whole model: for dropout */
    uint32_t slices; /* 0 and 1: one; else the slices lie behind each other in all buffers, each with `heads` heads */
    const float *qkv;
    const struct mu_dropout *drop; /* of the probabilities; may be NULL */
    size_t qkv_stride, out_stride; /* floats between rows of qkv and dqkv, and of out and dout; 0: rows are dense */
    float *out, *lse;
    /* backward only: gradient of out, gradient of qkv (overwritten) */
    const float *dout;
    float *dqkv;
};
enum mu_status mu_kernel_attention_forward(struct mu_pool *pool, const struct mu_attention *attention) MU_WARN_UNUSED;
/* Recomputes the probabilities from lse. The gradient of a key or value tile is added up over its query heads, for each
 * over query tiles, both ascending. */
enum mu_status mu_kernel_attention_backward(struct mu_pool *pool, const struct mu_attention *attention) MU_WARN_UNUSED;

/* ---- loss ---- */

/* For each row of logits [rows, vocab] (stride ld): loss[row] = log-sum-exp - logit of the target, in double; then,
 * when `gradient`, logits become (softmax - onehot) * scale in place. A target of -1 is ignored: loss 0, gradient 0. */
enum mu_status mu_kernel_cross_entropy(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld, float *logits,
                                       const int32_t *targets, float scale, bool gradient, double *loss) MU_WARN_UNUSED;

/* The same over a vocabulary cut into slices, in three phases; each takes the logits of one slice, `vocab` columns of
 * which the first is vocabulary row `first`. Between the phases the values of all slices are joined. (With one slice
 * the bits are those of mu_kernel_cross_entropy.)
 *   1. highest[row] = the largest logit; joined by mu_kernel_join_max;
 *   2. sum[row] = sum of exp(logit - highest), joined by mu_kernel_join_sums; where the target lies in this slice,
 * loss[row] = highest - its logit (other rows are left alone: clear loss first); when `gradient`, the exponentials
 * replace the logits;
 *   3. where the target lies in this slice, loss[row] += ln(sum); when `gradient`, what phase 2 left becomes (exp / sum
 *      - onehot) * scale, zeros where the target is -1.
 * highest and sum of phases 2 and 3 are the joined ones, except sum of phase 2, which is this slice's own. */
enum mu_status mu_kernel_cross_entropy_max(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld,
                                           const float *logits, float *highest) MU_WARN_UNUSED;
enum mu_status mu_kernel_cross_entropy_sum(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                           size_t ld, float *logits, const int32_t *targets, const float *highest,
                                           bool gradient, double *sum, double *loss) MU_WARN_UNUSED;
enum mu_status mu_kernel_cross_entropy_gradient(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                                size_t ld, float *logits, const int32_t *targets, const double *sum,
                                                float scale, bool gradient, double *loss) MU_WARN_UNUSED;
/* highest, sums [slices, rows]: the maximum, and the sum by the balanced tree, over slices of each row; they end up in
 * the first `rows` elements, the rest is undefined. slices is a power of two. */
enum mu_status mu_kernel_join_max(struct mu_pool *pool, uint32_t slices, uint32_t rows, float *highest) MU_WARN_UNUSED;
enum mu_status mu_kernel_join_sums(struct mu_pool *pool, uint32_t slices, uint32_t rows, double *sums) MU_WARN_UNUSED;

/* ---- flat ranges: sums, norm, optimizer, initial values ---- */

/* into += from. The one addition of the summation tree. */
enum mu_status mu_kernel_add(struct mu_pool *pool, size_t size, float *into, const float *from) MU_WARN_UNUSED;

/* Adds the squares of g[0..size) to `sum`: blocks of MU_NORM_BLOCK elements counted from g (so g should be the start of
 * a chunk), each block in double with 16 virtual lanes, block sums added exactly: order-free over blocks, chunks and
 * ranks. */
enum mu_status mu_kernel_square_sum(struct mu_pool *pool, size_t size, const float *g,
                                    struct mu_exact_sum *sum) MU_WARN_UNUSED;

/* One AdamW update (Loshchilov and Hutter, arXiv 1711.05101), decoupled decay:
 *   g' = g * gradient_scale; m = beta1 m + (1 - beta1) g'; v = beta2 v + (1 - beta2) g'^2;
 *   p -= lr * (m * correction1 / (sqrt(v * correction2) + eps) + weight_decay * p). */
struct mu_adamw {
    float lr, beta1, beta2, eps, weight_decay;
    float rest1, rest2;             /* 1 - beta, rounded once */
    float correction1, correction2; /* 1 / (1 - beta^t), t counts from 1 */
    float gradient_scale;           /* clipping factor, 1 = none */
};
/* Fills the corrections for the update number `update` (from 1) in portable arithmetic. clip = 0: no clipping; else the
 * scale is min(1, clip / norm). */
struct mu_adamw mu_adamw_at(double lr, double beta1, double beta2, double eps, double weight_decay, double clip,
                            double norm, uint64_t update);
enum mu_status mu_kernel_adamw(struct mu_pool *pool, const struct mu_adamw *adamw, size_t size, float *p, float *m,
                               float *v, const float *g) MU_WARN_UNUSED;

/* x[i] = std * normal(seed, tensor, first + i): Box-Muller on Philox with key = seed. Element e = 64 j + 32 w + 16 h +
 * l (l < 16, h, w < 2) uses counter {(16 j + l) low word, high word, tensor, "init"}: words 2 w and 2 w + 1 give u1 in
 * (0, 1] and u2 in [0, 1); the value is sqrt(-2 ln u1) * (h ? sin : cos)(2 pi u2). */
enum mu_status mu_kernel_init_normal(struct mu_pool *pool, uint64_t seed, uint32_t tensor, uint64_t first, size_t size,
                                     float std, float *x) MU_WARN_UNUSED;
enum mu_status mu_kernel_fill(struct mu_pool *pool, size_t size, float value, float *x) MU_WARN_UNUSED;

/* ---- numeric identity ---- */

/* The shapes of a job that its kernels will see. Zero in the last four means GPT-2 without slices. */
struct mu_kernel_shapes {
    uint32_t sequences, length, channels, heads, vocab;
    uint32_t kv_heads, hidden, slices;
    bool llama; /* RMSNorm, rotary positions, grouped-query attention and SwiGLU are used */
};

enum { MU_IDENTITY_PARTS = 20 };

struct mu_kernel_identity {
    struct mu_hash128 total; /* over backend, dtype and all parts */
    uint32_t count;          /* parts in use: more for a job that uses more kernels */
    struct {
        const char *name; /* of the kernel, static */
        uint64_t hash;
    } parts[MU_IDENTITY_PARTS];
};

/* Runs a small battery (odd sizes and alignments, denormals, large and small values, the job's reduction lengths) and
 * hashes the results; the same job gives the same identity on every machine that computes the same bits. About 50 ms.
 */
enum mu_status mu_kernels_identity(struct mu_pool *pool, const struct mu_kernel_shapes *shapes, struct mu_error *err,
                                   struct mu_kernel_identity *ret_identity) MU_WARN_UNUSED;

#endif
