/* One tile of a matrix product: packing, register kernel, epilogue. Compiled once per instruction set.
 *
 *   for each pass (a chunk of at most 256 k):  B block [256, <= 384] packed into the lane's scratch (stays in L2)
 *     for each group of 64 rows of C:          A^T block packed too when A is stored transposed; else rows of A are
 * read in place for each panel of 8 rows:              A panel [8, 256], 8 KiB (stays in L1) for each panel of 48
 * columns:        8 x 48 block in registers, fma over k from 0; then added to and stored epilogue over the tile
 *
 * With one slice the block is added to C. With several, partial sums of the slices form a stack, as in a binary
 * counter: level 0 is C itself, the others are tiles in the scratch. The block of the last chunk of slice s is added to
 * what the slice has so far, then to one level per trailing one of s from the top down, and stored where the last of
 * those was: the balanced tree, at the price of one load and store of C more per pass than it has anyway. Slices so
 * short that several fit a chunk are taken together in one pass, the lower part of the stack being a few blocks in L1.
 *
 * This is the definition of the product in kernels.h itself, so no tile size, edge or instruction set shows in the
 * bits. */
#include "kernels/cpu/isa.h"

#include "kernels/cpu/transpose.h"

enum { PR = MU_GEMM_PANEL_ROWS, PC = MU_GEMM_PANEL_COLUMNS, GROUPS = PC / VL, GROUP_ROWS = MU_GEMM_GROUP_ROWS };
enum {
    PREFETCH_ROWS = 12,
    LEVELS_MAX = 6, /* log2 of MU_GEMM_SLICES_MAX: of the stack above C, and of its part in L1 */
    ADDENDS_MAX = 2 * LEVELS_MAX + 1,
};
_Static_assert(1 << LEVELS_MAX == MU_GEMM_SLICES_MAX, "the stack holds the tree");

/* What one pass over the tile multiplies: k values k0 .. of one slice, or several whole slices. */
struct pass {
    uint32_t first, slices;
    uint32_t k0, pitch; /* pitch: k values of a slice in packed operands; the last slice may have fewer */
    bool whole;         /* the slices end in this pass */
};

static uint32_t slices_of(const struct mu_gemm *g)
{
    return g->slices > 1 ? g->slices : 1;
}

/* k values of slice `s` in the pass. */
static uint32_t count_of(const struct mu_gemm *g, const struct pass *p, uint32_t s)
{
    uint32_t k = s + 1 == slices_of(g) && g->k_last ? g->k_last : g->k, left = k - p->k0;
    return left < MU_GEMM_CHUNK ? left : MU_GEMM_CHUNK;
}

/* ---- packing ---- */

/* A stored [k, m]: panels out[panel][pitch][8] of rows row .. row + rows - 1, `count` values of k; missing rows are
 * zero. */
static void pack_a(const struct mu_gemm *g, const struct pass *p, uint32_t s, uint32_t row, uint32_t rows, float *out)
{
    const float *a = g->a + s * g->a_slice + (size_t)p->k0 * g->lda + row;
    uint32_t whole = rows / PR * PR, count = count_of(g, p, s);
    for (uint32_t k = 0; k < count; k++, a += g->lda) {
        float *to = out + (size_t)k * PR;
        for (uint32_t i = 0; i < rows; i += VL) /* rows of k lie pages apart: the hardware does not see the pattern */
            __builtin_prefetch(a + PREFETCH_ROWS * g->lda + i);
        for (uint32_t i = 0; i < whole; i += PR, to += (size_t)p->pitch * PR)
            memcpy(to, a + i, PR * sizeof(float));
        for (uint32_t i = whole; i < (rows + PR - 1) / PR * PR; i++)
            to[i - whole] = i < rows ? a[i] : 0.0f;
    }
}

/* One panel: out[k][48] = columns column .. column + 47 of op(B), `count` values of k from b's first; missing columns
 * are zero. */
static void pack_panel(const struct mu_gemm *g, const float *b, uint32_t column, uint32_t columns, uint32_t count,
                       float *out)
{
    if (g->transpose_b) {
        for (uint32_t j = 0; j < PC; j += 8) {
            uint32_t rows = j >= columns ? 0 : columns - j < 8 ? columns - j : 8;
            const float *from = b + (size_t)(rows ? column + j : column) * g->ldb;
            for (uint32_t k = 0; k < count; k += 8)
                transpose_8x8(from + k, g->ldb, rows, count - k < 8 ? count - k : 8, out + (size_t)k * PC + j, PC);
        }
        return;
    }
    b += column;
    for (uint32_t k = 0; k < count; k++, b += g->ldb, out += PC)
        for (uint32_t j = 0; j < PC; j += VL) {
            uint32_t left = j >= columns ? 0 : columns - j;
            v_store(out + j, left >= VL ? v_load(b + j) : left ? v_load_n(b + j, left) : v_zero());
        }
}

/* All panels of a tile: out[panel][slice][pitch][48]. */
static void pack_b(const struct mu_gemm *g, const struct pass *p, const struct mu_tile *tile, float *out)
{
    for (uint32_t j = 0; j < tile->columns; j += PC)
        for (uint32_t s = p->first; s < p->first + p->slices; s++, out += (size_t)p->pitch * PC) {
            const float *b = g->b + s * g->b_slice + (size_t)p->k0 * (g->transpose_b ? 1 : g->ldb);
            pack_panel(g, b, tile->column + j, tile->columns - j < PC ? tile->columns - j : PC, count_of(g, p, s), out);
        }
}

/* ---- register kernel ---- */

/* Where the 8 rows of A are: row[i][k * step], step 1 (in place) or 8 (packed). */
struct rows_of_a {
    const float *row[PR];
};

/* A place of 8 x 48 values. */
struct place {
    float *at;
    size_t ld;
};

/* What happens to a finished block: the places are added to it, in order, and the sum is stored. */
struct block_end {
    uint32_t count;
    struct place add[ADDENDS_MAX], to;
};

/* Block = sum over k of a[8][k] b[k][48], a chain of fma from +0 per element; `offset` applies to all rows of A. */
#if MU_ISA_LEVEL == 2
MU_INLINE void block_kernel(uint32_t count, const struct rows_of_a *a, size_t offset, const size_t step, const float *b,
                            const struct block_end *end)
{
    __m512 acc[PR][GROUPS];
    const float *row[PR];
    for (int i = 0; i < PR; i++) {
        row[i] = a->row[i] + offset;
        for (int j = 0; j < GROUPS; j++)
            acc[i][j] = _mm512_setzero_ps();
    }
    for (size_t k = 0; k < count; k++, b += PC) {
        __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + VL), b2 = _mm512_loadu_ps(b + 2 * VL);
#pragma GCC unroll 8
        for (int i = 0; i < PR; i++) {
            __m512 ai = _mm512_set1_ps(row[i][k * step]);
            acc[i][0] = _mm512_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(ai, b1, acc[i][1]);
            acc[i][2] = _mm512_fmadd_ps(ai, b2, acc[i][2]);
        }
    }
    for (uint32_t n = 0; n < end->count; n++) {
        const float *c = end->add[n].at;
#pragma GCC unroll 8
        for (int i = 0; i < PR; i++, c += end->add[n].ld)
#pragma GCC unroll 3
            for (int j = 0; j < GROUPS; j++)
                acc[i][j] = _mm512_add_ps(_mm512_loadu_ps(c + j * VL), acc[i][j]);
    }
    float *c = end->to.at;
    for (int i = 0; i < PR; i++, c += end->to.ld)
        for (int j = 0; j < GROUPS; j++)
            _mm512_storeu_ps(c + j * VL, acc[i][j]);
}
#elif MU_ISA_LEVEL == 1
/* 4 x 24, at (row, column) of the block: sixteen registers hold twelve sums. */
MU_INLINE void quarter_kernel(uint32_t count, const float *const *a, size_t offset, const size_t step, const float *b,
                              const struct block_end *end, uint32_t row, uint32_t column)
{
    __m256 acc[4][3];
    const float *rows[4];
    for (int i = 0; i < 4; i++) {
        rows[i] = a[i] + offset;
        for (int j = 0; j < 3; j++)
            acc[i][j] = _mm256_setzero_ps();
    }
    for (size_t k = 0; k < count; k++, b += PC) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8), b2 = _mm256_loadu_ps(b + 16);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256 ai = _mm256_broadcast_ss(rows[i] + k * step);
            acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
            acc[i][2] = _mm256_fmadd_ps(ai, b2, acc[i][2]);
        }
    }
    for (uint32_t n = 0; n < end->count; n++) {
        const float *c = end->add[n].at + row * end->add[n].ld + column;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, c += end->add[n].ld)
#pragma GCC unroll 3
            for (int j = 0; j < 3; j++)
                acc[i][j] = _mm256_add_ps(_mm256_loadu_ps(c + j * 8), acc[i][j]);
    }
    float *c = end->to.at + row * end->to.ld + column;
    for (int i = 0; i < 4; i++, c += end->to.ld)
        for (int j = 0; j < 3; j++)
            _mm256_storeu_ps(c + j * 8, acc[i][j]);
}

MU_INLINE void block_kernel(uint32_t count, const struct rows_of_a *a, size_t offset, const size_t step, const float *b,
                            const struct block_end *end)
{
    for (uint32_t j = 0; j < PC; j += PC / 2)
        for (uint32_t i = 0; i < PR; i += PR / 2)
            quarter_kernel(count, a->row + i, offset, step, b + j, end, i, j);
}
#else
MU_INLINE void block_kernel(uint32_t count, const struct rows_of_a *a, size_t offset, const size_t step, const float *b,
                            const struct block_end *end)
{
    float acc[PR][PC] = {{0}};
    for (size_t k = 0; k < count; k++, b += PC)
        for (uint32_t i = 0; i < PR; i++)
            for (uint32_t j = 0; j < PC; j++)
                acc[i][j] = fmaf(a->row[i][offset + k * step], b[j], acc[i][j]);
    for (uint32_t n = 0; n < end->count; n++)
        for (uint32_t i = 0; i < PR; i++)
            for (uint32_t j = 0; j < PC; j++)
                acc[i][j] = end->add[n].at[i * end->add[n].ld + j] + acc[i][j];
    for (uint32_t i = 0; i < PR; i++)
        for (uint32_t j = 0; j < PC; j++)
            end->to.at[i * end->to.ld + j] = acc[i][j];
}
#endif

typedef void block_fn(uint32_t count, const struct rows_of_a *a, size_t offset, const float *b,
                      const struct block_end *end);

static void block_in_place(uint32_t count, const struct rows_of_a *a, size_t offset, const float *b,
                           const struct block_end *end)
{
    block_kernel(count, a, offset, 1, b, end);
}

static void block_packed(uint32_t count, const struct rows_of_a *a, size_t offset, const float *b,
                         const struct block_end *end)
{
    block_kernel(count, a, offset, PR, b, end);
}

/* A block at the edge of C goes through a full-size buffer. */
static void edge_block(block_fn *block, uint32_t count, const struct rows_of_a *a, size_t offset, const float *b,
                       const struct block_end *end, uint32_t rows, uint32_t columns)
{
    _Alignas(64) float whole[PR * PC];
    block(count, a, offset, b, &(struct block_end){.to = {whole, PC}});
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t j = 0; j < columns; j++) {
            float x = whole[i * PC + j];
            for (uint32_t n = 0; n < end->count; n++)
                x = end->add[n].at[i * end->add[n].ld + j] + x;
            end->to.at[i * end->to.ld + j] = x;
        }
}

/* ---- epilogue ---- */

static void epilogue(const struct mu_gemm *g, uint32_t row, uint32_t rows, uint32_t column, uint32_t columns)
{
    for (uint32_t i = row; i < row + rows; i++)
        for (uint32_t j = column; j < column + columns; j += VL) {
            uint32_t n = column + columns - j < VL ? column + columns - j : VL;
            float *c = g->c + (size_t)i * g->ldc + j;
            vf x = v_load_n(c, n);
            if (g->epilogue == MU_EPILOGUE_GELU_GRAD)
                x = v_mul(x, v_gelu_grad(v_load_n(g->aux + (size_t)i * g->ldaux + j, n)));
            else
                x = v_add(x, v_load_n(g->bias + j, n));
            if (g->epilogue == MU_EPILOGUE_BIAS_GELU) {
                v_store_n(g->before + (size_t)i * g->ldaux + j, x, n);
                x = v_gelu(x);
            }
            v_store_n(c, x, n);
        }
}

/* ---- tile ---- */

struct tile_run {
    const struct mu_gemm *g;
    const struct mu_tile *tile;
    float *packed_a; /* [slice of the pass][panel][pitch][8] */
    float *packed_b; /* [panel][slice of the pass][pitch][48] */
    float *levels;   /* [levels][rows][columns in whole panels]: the stack above C */
    size_t level_columns;
    uint32_t together; /* slices of a pass: a power of two */
};

static uint32_t trailing_ones(uint32_t x)
{
    return (uint32_t)__builtin_ctz(~x);
}

/* Level `level` of the stack, at a block of the tile. */
static struct place level_place(const struct tile_run *run, uint32_t level, uint32_t row, uint32_t column)
{
    const struct mu_gemm *g = run->g;
    if (level == 0)
        return (struct place){g->c + (size_t)(run->tile->row + row) * g->ldc + run->tile->column + column, g->ldc};
    float *base = run->levels + (size_t)(level - 1) * run->tile->rows * run->level_columns;
    return (struct place){base + row * run->level_columns + column, run->level_columns};
}

/* Appends what the pass adds to the block at (row, column) of the tile, and where the sum goes. */
static void end_pass(const struct tile_run *run, const struct pass *p, uint32_t row, uint32_t column,
                     struct block_end *end)
{
    uint32_t number = p->first / run->together, depth = (uint32_t)__builtin_popcount(number);
    uint32_t carries = p->whole ? trailing_ones(number) : 0;
    if (p->k0 > 0 || run->g->accumulate)
        end->add[end->count++] = level_place(run, depth, row, column);
    for (uint32_t i = 1; i <= carries; i++)
        end->add[end->count++] = level_place(run, depth - i, row, column);
    end->to = level_place(run, depth - carries, row, column);
}

/* The same inside a pass of several slices, for its slice `s` but the last: the stack is `blocks` full-size blocks. */
static void end_slice(float blocks[][PR * PC], uint32_t s, struct block_end *end)
{
    uint32_t depth = (uint32_t)__builtin_popcount(s), carries = trailing_ones(s);
    for (uint32_t i = 1; i <= carries; i++)
        end->add[end->count++] = (struct place){blocks[depth - i], PC};
    end->to = (struct place){blocks[depth - carries], PC};
}

/* Brings to L1 what the end of the pass touches, while the pass is computed. */
static void prefetch_end(const struct block_end *end)
{
    for (uint32_t n = 0; n <= end->count; n++) {
        const struct place *p = n < end->count ? &end->add[n] : &end->to;
        if (n < end->count && p->at == end->to.at)
            continue;
        for (uint32_t i = 0; i < PR; i++)
            for (uint32_t j = 0; j < PC; j += VL)
                __builtin_prefetch(p->at + i * p->ld + j);
    }
}

/* One panel of rows, one panel of columns: all slices of the pass. */
static void panel_block(const struct tile_run *run, const struct pass *p, uint32_t row, uint32_t column,
                        const struct rows_of_a *a, const float *packed_b)
{
    const struct mu_gemm *g = run->g;
    _Alignas(64) float blocks[LEVELS_MAX][PR * PC];
    struct block_end last, inner;
    uint32_t rows = run->tile->rows - row < PR ? run->tile->rows - row : PR,
             columns = run->tile->columns - column < PC ? run->tile->columns - column : PC, s = 0;
    size_t stride = g->transpose_a ? (size_t)GROUP_ROWS * p->pitch : g->a_slice;
    block_fn *block = g->transpose_a ? block_packed : block_in_place;
    last.count = 0;
    for (uint32_t i = trailing_ones(p->slices - 1); i-- > 0;) /* the last slice: all that the pass has stacked */
        last.add[last.count++] = (struct place){blocks[i], PC};
    end_pass(run, p, row, column, &last);
    if (rows == PR && columns == PC)
        prefetch_end(&last);
    for (; s + 1 < p->slices; s++, packed_b += (size_t)p->pitch * PC) {
        inner.count = 0;
        end_slice(blocks, s, &inner);
        block(count_of(g, p, p->first + s), a, s * stride, packed_b, &inner);
    }
    if (rows == PR && columns == PC)
        block(count_of(g, p, p->first + s), a, s * stride, packed_b, &last);
    else
        edge_block(block, count_of(g, p, p->first + s), a, s * stride, packed_b, &last, rows, columns);
}

static void row_panel(const struct tile_run *run, const struct pass *p, uint32_t row)
{
    const struct mu_gemm *g = run->g;
    const struct mu_tile *tile = run->tile;
    uint32_t rows = tile->rows - row < PR ? tile->rows - row : PR;
    const float *packed_a = run->packed_a + (size_t)(row % GROUP_ROWS) * p->pitch;
    const float *in_place = g->a + p->first * g->a_slice + (size_t)(tile->row + row) * g->lda + p->k0;
    struct rows_of_a a;
    for (uint32_t i = 0; i < PR; i++) /* beyond the edge: any valid row, the result is not used */
        a.row[i] = g->transpose_a ? packed_a + i : in_place + (i < rows ? i : 0) * g->lda;
    for (uint32_t j = 0; j < tile->columns; j += PC)
        panel_block(run, p, row, j, &a, run->packed_b + (size_t)j * p->slices * p->pitch);
    if (g->epilogue != MU_EPILOGUE_NONE && p->whole && p->first + p->slices == slices_of(g))
        epilogue(g, tile->row + row, rows, tile->column, tile->columns);
}

static void run_pass(const struct tile_run *run, const struct pass *p)
{
    const struct mu_tile *tile = run->tile;
    pack_b(run->g, p, tile, run->packed_b);
    for (uint32_t i = 0; i < tile->rows; i += PR) {
        uint32_t rows = tile->rows - i < GROUP_ROWS ? tile->rows - i : GROUP_ROWS;
        if (run->g->transpose_a && i % GROUP_ROWS == 0)
            for (uint32_t s = 0; s < p->slices; s++)
                pack_a(run->g, p, p->first + s, tile->row + i, rows, run->packed_a + (size_t)s * GROUP_ROWS * p->pitch);
        row_panel(run, p, i);
    }
}

void MU_ISA_FN(mu_gemm_tile)(const struct mu_gemm *g, const struct mu_tile *tile, const struct mu_lane *lane)
{
    struct tile_run run = {.g = g, .tile = tile, .packed_a = lane->scratch, .together = mu_gemm_together(g)};
    run.packed_b = run.packed_a + MU_GEMM_CHUNK * GROUP_ROWS;
    run.levels = run.packed_b + MU_GEMM_CHUNK * MU_GEMM_TILE_COLUMNS;
    run.level_columns = (size_t)(tile->columns + PC - 1) / PC * PC;
    for (uint32_t s = 0; s < slices_of(g); s += run.together) {
        struct pass p = {.first = s, .slices = run.together};
        uint32_t k = s + 1 == slices_of(g) && g->k_last ? g->k_last : g->k;
        for (; p.k0 < k; p.k0 += MU_GEMM_CHUNK) {
            if (mu_lane_pause(lane))
                return;
            p.pitch = k - p.k0 < MU_GEMM_CHUNK ? k - p.k0 : MU_GEMM_CHUNK;
            p.whole = k - p.k0 <= MU_GEMM_CHUNK;
            run_pass(&run, &p);
        }
    }
}
