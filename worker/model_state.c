/* Initial parameters and updates: what is done to ranges of the flat space. */
#include "worker/model_internal.h"

/* ---- tensors of a cell ---- */

struct role_range {
    enum mu_role first, end;
};

static struct role_range roles_of(enum mu_cell_kind kind)
{
    switch (kind) {
    case MU_CELL_E:
    case MU_CELL_E_SHARED:
        return (struct role_range){MU_ROLE_WTE, MU_ROLE_NORM1_W};
    case MU_CELL_L:
    case MU_CELL_L_SHARED:
        return (struct role_range){MU_ROLE_NORM1_W, MU_ROLE_NORMF_W};
    case MU_CELL_F:
    case MU_CELL_F_SHARED:
        break;
    }
    return (struct role_range){MU_ROLE_NORMF_W, MU_ROLE_COUNT};
}

static bool is_in_cell(const struct mu_model_spec *spec, const struct mu_cell *cell, enum mu_role role)
{
    bool sliced = cell->kind == MU_CELL_E || cell->kind == MU_CELL_L || cell->kind == MU_CELL_F;
    return mu_model_has(&spec->config, role) && mu_model_is_sliced(role) == sliced;
}

/* Elements [first, last) of a tensor that lie in [offset, end) of the flat space; none when first >= last. */
struct overlap {
    uint64_t first, last;
};

static struct overlap overlap_of(const struct mu_tensor *tensor, uint64_t offset, uint64_t end)
{
    uint64_t tensor_end = tensor->offset + tensor->size, last = tensor_end < end ? tensor_end : end;
    return (struct overlap){offset > tensor->offset ? offset - tensor->offset : 0,
                            last > tensor->offset ? last - tensor->offset : 0};
}

/* ---- initial values ---- */

struct init_run {
    const struct mu_model_spec *spec;
    struct mu_pool *pool;
    uint64_t seed;
    float *params;
};

/* Number of the logical tensor, as if nothing were sliced: what the random numbers are drawn by. */
static uint32_t logical_number(const struct mu_model_config *config, uint32_t layer, enum mu_role role)
{
    uint32_t number = 0;
    for (enum mu_role before = 0; before < role; before++) {
        bool of_layer = before >= MU_ROLE_NORM1_W && before < MU_ROLE_NORMF_W;
        uint32_t times = !of_layer ? 1 : role >= MU_ROLE_NORMF_W ? config->layers : layer + 1;
        number += mu_model_has(config, before) ? times : 0;
    }
    if (role >= MU_ROLE_NORM1_W && role < MU_ROLE_NORMF_W) /* later ones of the layers before */
        for (enum mu_role after = role; after < MU_ROLE_NORMF_W; after++)
            number += mu_model_has(config, after) ? layer : 0;
    return number;
}

/* Elements from `at` on that lie in one piece in the logical tensor too. */
static uint64_t piece_at(const struct mu_tensor *t, uint64_t at)
{
    if (t->size == t->full_rows * t->full_columns)
        return t->size - at;
    uint64_t unit = t->axis == 0 ? t->columns : 1, along = t->axis == 0 ? at : at % t->columns, end = 0;
    for (uint32_t i = 0; i < t->parts; i++) {
        end += t->part_size[i] * unit;
        if (along < end)
            break;
    }
    return end - along;
}

static enum mu_status init_normal(const struct init_run *run, const struct mu_tensor *t, struct overlap range)
{
    uint32_t number = logical_number(&run->spec->config, t->layer, t->role);
    enum mu_status status = MU_OK;
    for (uint64_t at = range.first, count; at < range.last && status == MU_OK; at += count) {
        count = piece_at(t, at);
        if (count > range.last - at)
            count = range.last - at;
        status = mu_kernel_init_normal(run->pool, run->seed, number,
                                       mu_tensor_full_index(t, at / t->columns, at % t->columns), count,
                                       (float)t->init_std, run->params + t->offset + at);
    }
    return status;
}

/* Chunks [first, end) of a cell. */
static enum mu_status init_chunks(const struct init_run *run, const struct mu_cell *cell, uint32_t first, uint32_t end)
{
    uint64_t offset = cell->offset + (uint64_t)(first - cell->first_chunk) * MU_CHUNK_ELEMENTS,
             stop = cell->offset + (uint64_t)(end - cell->first_chunk) * MU_CHUNK_ELEMENTS;
    struct role_range roles = roles_of(cell->kind);
    enum mu_status status = MU_OK;
    for (enum mu_role role = roles.first; role < roles.end && status == MU_OK; role++) {
        if (!is_in_cell(run->spec, cell, role))
            continue;
        struct mu_tensor tensor = mu_model_role(run->spec, cell->layer, cell->slice, role);
        struct overlap range = overlap_of(&tensor, offset, stop);
        if (range.first >= range.last)
            continue;
        status = tensor.init == MU_INIT_NORMAL
                     ? init_normal(run, &tensor, range)
                     : mu_kernel_fill(run->pool, range.last - range.first, tensor.init == MU_INIT_ONE ? 1.0f : 0.0f,
                                      run->params + tensor.offset + range.first);
    }
    if (end == cell->first_chunk + cell->chunk_count) {
        uint64_t gap = (MU_CELL_ALIGN - cell->size % MU_CELL_ALIGN) % MU_CELL_ALIGN;
        if (status == MU_OK)
            status = mu_kernel_fill(run->pool, gap, 0.0f, run->params + cell->offset + cell->size);
    }
    return status;
}

enum mu_status mu_model_init_parameters(const struct mu_model_spec *spec, struct mu_pool *pool, uint64_t seed,
                                        const struct mu_chunk_run *runs, uint32_t run_count, float *params)
{
    const struct mu_chunk_run all = {0, spec->chunk_count};
    const struct init_run run = {spec, pool, seed, params};
    enum mu_status status = MU_OK;
    if (!runs) {
        runs = &all;
        run_count = 1;
    }
    for (uint32_t i = 0; i < run_count; i++) {
        uint32_t end = runs[i].first + runs[i].count;
        for (uint32_t chunk = runs[i].first, stop; chunk < end && status == MU_OK; chunk = stop) {
            struct mu_cell cell = mu_model_cell(spec, mu_model_chunk(spec, chunk).cell);
            stop = cell.first_chunk + cell.chunk_count < end ? cell.first_chunk + cell.chunk_count : end;
            status = init_chunks(&run, &cell, chunk, stop);
        }
    }
    return status;
}

/* ---- update ---- */

struct update_run {
    struct mu_pool *pool;
    struct mu_adamw decayed, plain;
    uint64_t offset, end;
    float *params, *m, *v;
    const float *grads;
};

static enum mu_status update_tensor(const struct update_run *run, const struct mu_tensor *tensor)
{
    struct overlap range = overlap_of(tensor, run->offset, run->end);
    if (range.first >= range.last)
        return MU_OK;
    uint64_t first = tensor->offset + range.first;
    return mu_kernel_adamw(run->pool, tensor->decay ? &run->decayed : &run->plain, range.last - range.first,
                           run->params + first, run->m + first, run->v + first, run->grads + first);
}

/* The last cell that begins at or before `offset`. */
static uint32_t cell_at(const struct mu_model_spec *spec, uint64_t offset)
{
    uint32_t low = 0, high = spec->cell_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (mu_model_cell(spec, middle).offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

enum mu_status mu_model_update(const struct mu_model_spec *spec, struct mu_pool *pool, const struct mu_adamw *adamw,
                               uint64_t offset, uint64_t size, float *params, float *m, float *v, const float *grads)
{
    MU_ASSERT(offset <= spec->flat_size && size <= spec->flat_size - offset);
    struct update_run run = {pool, *adamw, *adamw, offset, offset + size, params, m, v, grads};
    run.plain.weight_decay = 0.0f;
    enum mu_status status = MU_OK;
    for (uint32_t i = cell_at(spec, offset); i < spec->cell_count && status == MU_OK; i++) {
        struct mu_cell cell = mu_model_cell(spec, i);
        if (cell.offset >= run.end)
            break;
        struct role_range roles = roles_of(cell.kind);
        for (enum mu_role role = roles.first; role < roles.end && status == MU_OK; role++) {
            if (!is_in_cell(spec, &cell, role))
                continue;
            struct mu_tensor tensor = mu_model_role(spec, cell.layer, cell.slice, role);
            status = update_tensor(&run, &tensor);
        }
    }
    return status;
}
