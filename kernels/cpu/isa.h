/* The inner loops, once per instruction set: what the drivers in this folder spread over the pool.
 *
 * Private to kernels/cpu. Each function works on a piece that one task owns, on the calling thread; all levels give the
 * same bits. Pieces are described where the drivers cut them. */
#ifndef MU_KERNELS_CPU_ISA_H
#define MU_KERNELS_CPU_ISA_H

#include "kernels/kernels.h"

enum {
    MU_GEMM_PANEL_ROWS = 8,     /* rows of C in one register block */
    MU_GEMM_PANEL_COLUMNS = 48, /* columns */
    MU_GEMM_GROUP_ROWS = 64,    /* rows of a transposed A packed at once */
    MU_GEMM_TILE_COLUMNS = 384, /* most columns of C in one task: eight panels, 384 KiB of packed B */
};

struct mu_tile {
    uint32_t row, rows, column, columns;
};

/* Slices multiplied in one pass over a tile: as many as fit a chunk, a power of two. */
static inline uint32_t mu_gemm_together(const struct mu_gemm *gemm)
{
    uint32_t together = 1;
    while (together < gemm->slices && 2 * (uint64_t)together * gemm->k <= MU_GEMM_CHUNK)
        together *= 2;
    return together;
}

struct mu_isa_ops {
    void (*gemm_tile)(const struct mu_gemm *gemm, const struct mu_tile *tile, const struct mu_lane *lane);
    void (*column_sum)(uint32_t rows, uint32_t columns, const float *a, size_t lda, bool accumulate, float *out);
    void (*dropout_factors)(const struct mu_dropout *site, uint32_t sequence, uint32_t token, uint32_t first,
                            uint32_t count, float *keep);
    void (*embedding_row)(uint32_t channels, const float *wte, const float *wpe, const float *keep, float *x);
    void (*multiply)(size_t size, const float *factor, float *x);
    /* `row` counts in the buffers; keep: dropout factors of the row, or NULL. */
    void (*norm_forward_row)(const struct mu_norm_forward *norm, uint32_t row, const float *keep);
    void (*rms_forward_row)(const struct mu_norm_forward *norm, uint32_t row, const float *keep);
    void (*rms_backward_row)(const struct mu_norm_backward *norm, uint32_t row, const float *keep, float *dweight);
    void (*norm_backward_row)(const struct mu_norm_backward *norm, uint32_t row, const float *keep, float *dweight,
                              float *dbias);
    void (*gelu_forward)(size_t size, const float *x, float *y);
    void (*gelu_backward)(size_t size, const float *x, const float *dy, float *dx);
    /* one row */
    void (*swiglu_forward)(uint32_t hidden, const float *gate_up, float *y);
    void (*swiglu_backward)(uint32_t hidden, const float *gate_up, const float *dy, float *d_gate_up);
    void (*rotary_row)(uint32_t heads, uint32_t head_channels, const float *cosines, const float *sines, bool inverse,
                       float *x);
    /* one query head; sequences of further slices follow those of the first */
    void (*attention_forward)(const struct mu_attention *attention, uint32_t sequence, uint32_t head,
                              const struct mu_lane *lane);
    /* one key and value head, with its query heads */
    void (*attention_backward)(const struct mu_attention *attention, uint32_t sequence, uint32_t kv_head,
                               const struct mu_lane *lane);
    double (*cross_entropy_row)(uint32_t vocab, float *logits, int32_t target, float scale, bool gradient);
    float (*row_max)(uint32_t size, const float *x);
    double (*exp_sum)(uint32_t size, float *x, float highest, bool store);
    void (*scale)(size_t size, float by, float *x);
    void (*add)(size_t size, float *into, const float *from);
    double (*square_sum)(size_t size, const float *g);
    void (*adamw)(const struct mu_adamw *adamw, size_t size, float *p, float *m, float *v, const float *g);
    void (*init_normal)(uint64_t seed, uint32_t tensor, uint64_t first, size_t size, float std, float *x);
};

/* The table in use. */
const struct mu_isa_ops *mu_isa_ops(void);

/* One line per function for each level; the prototypes of what the tables hold. */
#define MU_ISA_DECLARE(suffix)                                                                                         \
    void mu_gemm_tile_##suffix(const struct mu_gemm *gemm, const struct mu_tile *tile, const struct mu_lane *lane);    \
    void mu_attention_forward_##suffix(const struct mu_attention *attention, uint32_t sequence, uint32_t head,         \
                                       const struct mu_lane *lane);                                                    \
    void mu_attention_backward_##suffix(const struct mu_attention *attention, uint32_t sequence, uint32_t kv_head,     \
                                        const struct mu_lane *lane);                                                   \
    extern const struct mu_isa_ops mu_isa_ops_##suffix
MU_ISA_DECLARE(scalar);
MU_ISA_DECLARE(avx2);
MU_ISA_DECLARE(avx512);

#endif
