/* Matrix products: tiles of C on the pool.
 *
 * Why not a library: oneDNN and OpenBLAS change bits with threads, shapes and instruction sets, and would have to be
 * watched by self-tests with this code as the fallback anyway. This code gives the same bits on every
 * machine, so it is the only path; bench/bench_step.c measures how far it is from dnnl_sgemm. */
#include "kernels/kernels.h"

#include <string.h>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/isa.h"

enum {
    TILE_ROWS_MIN = 64,
    TILE_ROWS_MAX = 1024,
    TASKS_PER_THREAD = 3,    /* wanted, so that the last tasks of a product do not leave threads idle */
    COLUMN_SUM_COLUMNS = 64, /* columns of one task of a column sum */
};

enum {
    PACKED_FLOATS = (MU_GEMM_TILE_COLUMNS + MU_GEMM_GROUP_ROWS) * MU_GEMM_CHUNK,
    LEVEL_ROWS = (MU_LANE_SCRATCH_BYTES / (int)sizeof(float) - PACKED_FLOATS) / MU_GEMM_TILE_COLUMNS,
};
_Static_assert(LEVEL_ROWS >= 6 * TILE_ROWS_MIN && 1 << 6 == MU_GEMM_SLICES_MAX,
               "packed operands and the partial sums of slices fit the scratch of a lane");
_Static_assert(MU_GEMM_TILE_COLUMNS % MU_GEMM_PANEL_COLUMNS == 0, "tiles consist of whole panels");

struct gemm_run {
    const struct mu_gemm *gemm;
    const struct mu_isa_ops *ops;
    uint32_t tile_rows, tile_columns, tiles_down;
};

static uint32_t divide_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Tiles in a lane's scratch that the partial sums of slices need. */
static uint32_t stack_levels(const struct mu_gemm *g)
{
    uint32_t passes = g->slices / mu_gemm_together(g);
    return passes > 1 ? (uint32_t)__builtin_ctz(passes) : 0;
}

/* Tiles never show in the result, so they follow speed: tall ones pack B less often, many keep all threads busy. */
static struct gemm_run plan_tiles(const struct mu_gemm *g, uint32_t threads)
{
    struct gemm_run run = {.gemm = g, .ops = mu_isa_ops()};
    uint32_t panels = divide_up(g->n, MU_GEMM_PANEL_COLUMNS), panels_max = MU_GEMM_TILE_COLUMNS / MU_GEMM_PANEL_COLUMNS;
    uint32_t across = divide_up(panels, panels_max);
    run.tile_columns = divide_up(panels, across) * MU_GEMM_PANEL_COLUMNS;
    across = divide_up(g->n, run.tile_columns);
    run.tile_rows = TILE_ROWS_MAX;
    while (stack_levels(g) * run.tile_rows > LEVEL_ROWS)
        run.tile_rows /= 2;
    while (run.tile_rows > TILE_ROWS_MIN && divide_up(g->m, run.tile_rows) * across < threads * TASKS_PER_THREAD)
        run.tile_rows /= 2;
    run.tiles_down = divide_up(g->m, run.tile_rows);
    return run;
}

/* Tasks go down the rows first: neighbours share the columns of B in the shared cache. */
static void gemm_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct gemm_run *run = arg;
    const struct mu_gemm *g = run->gemm;
    struct mu_tile tile = {.row = task % run->tiles_down * run->tile_rows,
                           .column = task / run->tiles_down * run->tile_columns};
    tile.rows = min_u32(run->tile_rows, g->m - tile.row);
    tile.columns = min_u32(run->tile_columns, g->n - tile.column);
    run->ops->gemm_tile(g, &tile, lane);
}

enum mu_status mu_cpu_gemm(struct mu_pool *pool, const struct mu_gemm *gemm)
{
    MU_ASSERT(gemm->m > 0 && gemm->n > 0 && gemm->k > 0);
    MU_ASSERT(!gemm->accumulate || (gemm->epilogue == MU_EPILOGUE_NONE && gemm->slices <= 1));
    MU_ASSERT(gemm->slices <= MU_GEMM_SLICES_MAX && (gemm->slices & (gemm->slices - 1)) == 0 &&
              gemm->k_last <= gemm->k);
    MU_ASSERT((gemm->epilogue != MU_EPILOGUE_BIAS && gemm->epilogue != MU_EPILOGUE_BIAS_GELU) || gemm->bias);
    MU_ASSERT(gemm->epilogue != MU_EPILOGUE_BIAS_GELU || gemm->before);
    MU_ASSERT(gemm->epilogue != MU_EPILOGUE_GELU_GRAD || gemm->aux);
    struct gemm_run run = plan_tiles(gemm, mu_pool_threads(pool));
    return mu_pool_run(pool, run.tiles_down * divide_up(gemm->n, run.tile_columns), gemm_task, &run);
}

struct column_sum_run {
    const struct mu_isa_ops *ops;
    uint32_t rows, columns;
    const float *a;
    size_t lda;
    bool accumulate;
    float *out;
};

static void column_sum_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct column_sum_run *run = arg;
    uint32_t first = task * COLUMN_SUM_COLUMNS;
    run->ops->column_sum(run->rows, min_u32(COLUMN_SUM_COLUMNS, run->columns - first), run->a + first, run->lda,
                         run->accumulate, run->out + first);
}

enum mu_status mu_cpu_column_sum(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *a, size_t lda,
                                 bool accumulate, float *out)
{
    struct column_sum_run run = {mu_isa_ops(), rows, n, a, lda, accumulate, out};
    return mu_pool_run(pool, divide_up(n, COLUMN_SUM_COLUMNS), column_sum_task, &run);
}
