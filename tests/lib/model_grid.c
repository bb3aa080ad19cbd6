#include "tests/lib/model_grid.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/hash.h"
#include "common/rng.h"
#include "tests/lib/kernel_testing.h"

enum { CELLS_MAX = 256 };

enum { POISON = 0xff /* every byte of it: a NaN */ };

/* ---- the leaf ---- */

struct mg_leaf mg_leaf_new(const struct mu_model_config *config, uint32_t micro, uint32_t length, uint32_t accumulate)
{
    struct mg_leaf leaf = {.micro = micro, .length = length, .accumulate = accumulate};
    size_t tokens = (size_t)accumulate * micro * length;
    struct mu_model_config single = *config;
    struct mu_model_spec whole;
    single.slices = 1;
    mu_model_spec_init(&leaf.spec, config);
    mu_model_spec_init(&whole, &single);
    leaf.params = kt_alloc(leaf.spec.flat_size, sizeof *leaf.params);
    assert_int_equal(mu_model_init_parameters(&leaf.spec, kt_pool(0), 1, NULL, 0, leaf.params), MU_OK);
    for (uint32_t i = 0; i < leaf.spec.tensor_count; i++) { /* no zeros and ones; the same values whatever the slices */
        struct mu_tensor t = mu_model_tensor(&leaf.spec, i);
        for (uint64_t j = 0; j < t.size; j++) {
            uint64_t random =
                mu_tensor_full_index(&t, j / t.columns, j % t.columns) + t.role * 1000003u + t.layer * 100000007u;
            leaf.params[t.offset + j] += 0.1f * (float)((int64_t)(mu_splitmix64(&random) >> 40) - (1 << 23)) * 0x1p-23f;
        }
    }
    leaf.tokens = kt_alloc(tokens, sizeof *leaf.tokens);
    leaf.targets = kt_alloc(tokens, sizeof *leaf.targets);
    leaf.samples = kt_alloc((size_t)accumulate * micro, sizeof *leaf.samples);
    uint64_t random = 2;
    for (size_t i = 0; i < tokens; i++) {
        leaf.tokens[i] = (int32_t)(mu_splitmix64(&random) % config->vocab);
        leaf.targets[i] = i % 11 == 5 ? -1 : (int32_t)(mu_splitmix64(&random) % config->vocab);
    }
    for (uint32_t i = 0; i < accumulate * micro; i++)
        leaf.samples[i] = 1000 + 7 * i;
    return leaf;
}

void mg_leaf_free(struct mg_leaf *leaf)
{
    free(leaf->params);
    free(leaf->tokens);
    free(leaf->targets);
    free(leaf->samples);
}

struct mu_micro_batch mg_batch(const struct mg_leaf *leaf, uint32_t index)
{
    size_t tokens = (size_t)leaf->micro * leaf->length;
    return (struct mu_micro_batch){.tokens = leaf->tokens + index * tokens,
                                   .targets = leaf->targets + index * tokens,
                                   .samples = leaf->samples + (size_t)index * leaf->micro,
                                   .seed = 9,
                                   .step = 5,
                                   .loss_divisor = leaf->accumulate * tokens,
                                   .index = index,
                                   .count = leaf->accumulate};
}

void mg_unslice(const struct mu_model_spec *spec, const float *flat, const struct mu_model_spec *whole, float *out)
{
    memset(out, 0, whole->flat_size * sizeof *out);
    for (uint32_t i = 0; i < spec->tensor_count; i++) {
        struct mu_tensor t = mu_model_tensor(spec, i), to = mu_model_role(whole, t.layer, 0, t.role);
        assert_true(to.rows == t.full_rows && to.columns == t.full_columns);
        for (uint64_t j = 0; j < t.size; j++)
            out[to.offset + mu_tensor_full_index(&t, j / t.columns, j % t.columns)] = flat[t.offset + j];
    }
}

/* ---- tensor group ---- */

struct group {
    uint32_t size;
    pthread_barrier_t barrier;
    const char *blocks[MG_RANKS_MAX];
};

struct group_end {
    struct group *group;
    uint32_t rank;
};

static enum mu_status all_gather(void *ctx, void *blocks, size_t block_bytes)
{
    const struct group_end *end = ctx;
    struct group *g = end->group;
    g->blocks[end->rank] = blocks;
    pthread_barrier_wait(&g->barrier);
    for (uint32_t r = 0; r < g->size; r++)
        if (r != end->rank)
            memcpy((char *)blocks + r * block_bytes, g->blocks[r] + r * block_bytes, block_bytes);
    pthread_barrier_wait(&g->barrier);
    return MU_OK;
}

static enum mu_status all_to_all(void *ctx, const void *send, void *recv, size_t block_bytes)
{
    const struct group_end *end = ctx;
    struct group *g = end->group;
    g->blocks[end->rank] = send;
    pthread_barrier_wait(&g->barrier);
    for (uint32_t r = 0; r < g->size; r++)
        memcpy((char *)recv + r * block_bytes, g->blocks[r] + end->rank * block_bytes, block_bytes);
    pthread_barrier_wait(&g->barrier);
    return MU_OK;
}

/* ---- one worker: a stage of one tensor rank ---- */

/* Pools of one thread, one for each tensor rank; kept until the process ends. */
static struct mu_pool *pool_of(uint32_t rank)
{
    static struct mu_pool *pools[MG_RANKS_MAX];
    if (!pools[rank])
        assert_int_equal(mu_pool_new(1, NULL, &pools[rank]), MU_OK);
    return pools[rank];
}

struct column; /* all stages of a tensor rank */

struct worker {
    struct column *column;
    uint32_t stage;
    struct mu_model_part part;
    struct mu_model *model;
    float *params, *grads;
    enum { FOREIGN, OWN, COPY } has[CELLS_MAX]; /* COPY: the tied embedding's slices on the last stage */
    uint32_t cells[CELLS_MAX], cell_count;
    uint64_t hashes[CELLS_MAX];
};

struct column {
    const struct mg_leaf *leaf;
    const struct mg_grid *grid;
    struct group_end end;
    struct mu_tensor_group tensor;
    struct worker workers[MG_STAGES_MAX];
    float *streams[MG_STAGES_MAX + 1][MG_ACCUMULATE_MAX]; /* what enters stage p, and its gradient later */
    float *message;                                       /* the head chain on its way to the first stage */
    bool message_sent, evaluate, misused;
    double loss;
};

static bool is_tied_apart(const struct column *c)
{
    return c->grid->pp > 1 && mu_model_is_tied(&c->leaf->spec.config);
}

static bool in_part(const struct mu_model_part *part, const struct mu_cell *cell)
{
    bool slice = cell->slice >= part->first_slice && cell->slice < part->first_slice + part->slice_count;
    switch (cell->kind) {
    case MU_CELL_E:
        return part->embedding && slice;
    case MU_CELL_E_SHARED:
        return part->embedding;
    case MU_CELL_L:
        return slice && cell->layer >= part->first_layer && cell->layer < part->first_layer + part->layer_count;
    case MU_CELL_L_SHARED:
        return cell->layer >= part->first_layer && cell->layer < part->first_layer + part->layer_count;
    case MU_CELL_F:
        return part->head && slice;
    case MU_CELL_F_SHARED:
        break;
    }
    return part->head;
}

static void copy_chain(const struct worker *w, const float *from, float *to)
{
    const struct mu_model_spec *spec = &w->column->leaf->spec;
    for (uint32_t s = 0; s < w->part.slice_count; s++) {
        struct mu_cell cell = mu_model_cell(spec, mu_model_cell_index(spec, MU_CELL_E, 0, w->part.first_slice + s));
        memcpy(to + cell.offset, from + cell.offset, cell.size * sizeof *to);
    }
}

static void cell_done(void *ctx, uint32_t index)
{
    struct worker *w = ctx;
    struct mu_cell cell = mu_model_cell(&w->column->leaf->spec, index);
    if (w->cell_count < CELLS_MAX) {
        w->cells[w->cell_count] = index;
        w->hashes[w->cell_count] = mu_xxh3_64(w->grads + cell.offset, cell.size * sizeof(float), 0);
    }
    w->cell_count++;
}

/* The chain leaves; what stays behind is of no use to anybody. */
static void head_done(void *ctx)
{
    struct worker *w = ctx;
    if (!is_tied_apart(w->column) || !w->part.head || w->column->message_sent)
        w->column->misused = true;
    copy_chain(w, w->grads, w->column->message);
    for (uint32_t i = 0; i < w->column->leaf->spec.cell_count; i++) {
        struct mu_cell cell = mu_model_cell(&w->column->leaf->spec, i);
        if (w->has[i] == COPY)
            memset(w->grads + cell.offset, POISON, cell.size * sizeof *w->grads);
    }
    w->column->message_sent = true;
}

static enum mu_status embedding_ready(void *ctx)
{
    struct worker *w = ctx;
    if (!w->column->message_sent || !w->part.embedding)
        return MU_ERR_CONFLICT;
    w->column->message_sent = false;
    copy_chain(w, w->column->message, w->grads);
    return MU_OK;
}

static void worker_new(struct worker *w, struct column *c, uint32_t stage)
{
    const struct mg_leaf *leaf = c->leaf;
    const struct mg_grid *grid = c->grid;
    const struct mu_model_spec *spec = &leaf->spec;
    uint32_t layers = spec->config.layers, slices = spec->config.slices / grid->tp, first = layers * stage / grid->pp;
    *w = (struct worker){.column = c,
                         .stage = stage,
                         .part = {.first_layer = first,
                                  .layer_count = layers * (stage + 1) / grid->pp - first,
                                  .embedding = stage == 0,
                                  .head = stage == grid->pp - 1,
                                  .first_slice = c->end.rank * slices,
                                  .slice_count = slices}};
    struct mu_model_options options = {.micro = leaf->micro,
                                       .length = leaf->length,
                                       .accumulate = leaf->accumulate,
                                       .forward_only = c->evaluate,
                                       .part = w->part,
                                       .recompute = grid->recompute,
                                       .slots = grid->all_forward_first ? leaf->accumulate : 1,
                                       .tensor = grid->tp > 1 ? &c->tensor : NULL};
    struct mu_error err = {0};
    if (mu_model_new(spec, &options, pool_of(c->end.rank), &err, &w->model) != MU_OK)
        fail_msg("%s", err.text);
    w->params = kt_alloc(spec->flat_size, sizeof *w->params);
    w->grads = kt_alloc(spec->flat_size, sizeof *w->grads);
    memset(w->params, POISON, spec->flat_size * sizeof *w->params);
    memset(w->grads, POISON, spec->flat_size * sizeof *w->grads);
    assert_true(spec->cell_count <= CELLS_MAX);
    for (uint32_t i = 0; i < spec->cell_count; i++) {
        struct mu_cell cell = mu_model_cell(spec, i);
        bool own = in_part(&w->part, &cell), copy = false;
        if (!own && is_tied_apart(c) && w->part.head && cell.kind == MU_CELL_E)
            copy = cell.slice >= w->part.first_slice && cell.slice < w->part.first_slice + w->part.slice_count;
        if (!own && !copy)
            continue;
        w->has[i] = own ? OWN : COPY;
        memcpy(w->params + cell.offset, leaf->params + cell.offset, cell.size * sizeof *w->params);
    }
}

static void worker_free(struct worker *w)
{
    mu_model_free(w->model);
    free(w->params);
    free(w->grads);
}

/* ---- the passes of a tensor rank: its thread ---- */

static struct mu_micro_batch batch_of(struct worker *w, uint32_t index)
{
    struct mu_micro_batch batch = mg_batch(w->column->leaf, index);
    batch.hooks_ctx = w;
    batch.cell_done = cell_done;
    batch.head_done = head_done;
    batch.embedding_ready = embedding_ready;
    if (!w->part.embedding)
        batch.tokens = NULL;
    if (!w->part.head)
        batch.targets = NULL;
    return batch;
}

static bool forward(struct column *c, uint32_t stage, uint32_t index)
{
    struct worker *w = &c->workers[stage];
    struct mu_micro_batch batch = batch_of(w, index);
    return mu_model_forward(w->model, &batch, c->grid->all_forward_first ? index : 0, w->params,
                            stage ? c->streams[stage][index] : NULL,
                            w->part.head ? NULL : c->streams[stage + 1][index]) == MU_OK;
}

/* The gradient takes the place of the stream. */
static bool backward(struct column *c, uint32_t stage, uint32_t index)
{
    struct worker *w = &c->workers[stage];
    struct mu_micro_batch batch = batch_of(w, index);
    double loss = -1;
    bool ok = mu_model_backward(w->model, &batch, c->grid->all_forward_first ? index : 0, w->params, w->grads,
                                w->part.head ? NULL : c->streams[stage + 1][index],
                                stage ? c->streams[stage][index] : NULL, &loss) == MU_OK;
    c->loss += loss;
    return ok;
}

static bool run_leaf(struct column *c)
{
    uint32_t count = c->leaf->accumulate, stages = c->grid->pp;
    bool ok = true;
    c->loss = 0;
    for (uint32_t i = 0; i < count && c->grid->all_forward_first; i++)
        for (uint32_t p = 0; p < stages && ok; p++)
            ok = forward(c, p, i);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t p = 0; p < stages && ok && !c->grid->all_forward_first; p++)
            ok = forward(c, p, i);
        for (uint32_t p = stages; p-- > 0 && ok;)
            ok = backward(c, p, i);
    }
    return ok;
}

static bool evaluate(struct column *c)
{
    bool ok = true;
    for (uint32_t i = 0; i < c->leaf->accumulate; i++)
        for (uint32_t p = 0; p < c->grid->pp && ok; p++) {
            struct worker *w = &c->workers[p];
            struct mu_micro_batch batch = batch_of(w, i);
            double loss = -1;
            batch.samples = NULL;
            ok = mu_model_loss(w->model, &batch, w->params, p ? c->streams[p][i] : NULL,
                               w->part.head ? NULL : c->streams[p + 1][i], &loss) == MU_OK;
            c->loss += loss;
        }
    return ok;
}

struct thread {
    struct column *column;
    bool ok;
};

static void *run_thread(void *arg)
{
    struct thread *t = arg;
    t->ok = t->column->evaluate ? evaluate(t->column) : run_leaf(t->column);
    return NULL;
}

/* ---- the grid ---- */

struct grid_run {
    const struct mg_leaf *leaf;
    const struct mg_grid *grid;
    struct group group;
    struct column columns[MG_RANKS_MAX];
};

static void column_new(struct grid_run *run, uint32_t rank, bool evaluate_only)
{
    struct column *c = &run->columns[rank];
    *c = (struct column){.leaf = run->leaf, .grid = run->grid, .evaluate = evaluate_only, .end = {&run->group, rank}};
    c->tensor = (struct mu_tensor_group){
        .ctx = &c->end, .size = run->grid->tp, .rank = rank, .all_gather = all_gather, .all_to_all = all_to_all};
    c->message = kt_alloc(run->leaf->spec.flat_size, sizeof *c->message);
    for (uint32_t p = 0; p < run->grid->pp; p++)
        worker_new(&c->workers[p], c, p);
    size_t stream = mu_model_stream_elements(c->workers[0].model);
    for (uint32_t p = 1; p < run->grid->pp; p++)
        for (uint32_t i = 0; i < run->leaf->accumulate; i++)
            c->streams[p][i] = kt_alloc(stream, sizeof(float));
}

static void column_free(struct column *c)
{
    for (uint32_t p = 0; p < c->grid->pp; p++) {
        worker_free(&c->workers[p]);
        for (uint32_t i = 0; p > 0 && i < c->leaf->accumulate; i++)
            free(c->streams[p][i]);
    }
    free(c->message);
}

static struct grid_run *grid_new(const struct mg_leaf *leaf, const struct mg_grid *grid, bool evaluate_only)
{
    struct grid_run *run = kt_alloc(1, sizeof *run);
    assert_true(grid->tp <= MG_RANKS_MAX && grid->pp <= MG_STAGES_MAX && leaf->accumulate <= MG_ACCUMULATE_MAX);
    run->leaf = leaf;
    run->grid = grid;
    run->group.size = grid->tp;
    pthread_barrier_init(&run->group.barrier, NULL, grid->tp);
    for (uint32_t t = 0; t < grid->tp; t++)
        column_new(run, t, evaluate_only);
    return run;
}

static void grid_free(struct grid_run *run)
{
    for (uint32_t t = 0; t < run->grid->tp; t++)
        column_free(&run->columns[t]);
    pthread_barrier_destroy(&run->group.barrier);
    free(run);
}

static double grid_go(struct grid_run *run)
{
    pthread_t threads[MG_RANKS_MAX];
    struct thread args[MG_RANKS_MAX];
    for (uint32_t t = 0; t < run->grid->tp; t++) {
        args[t] = (struct thread){.column = &run->columns[t]};
        assert_int_equal(pthread_create(&threads[t], NULL, run_thread, &args[t]), 0);
    }
    for (uint32_t t = 0; t < run->grid->tp; t++)
        pthread_join(threads[t], NULL);
    for (uint32_t t = 0; t < run->grid->tp; t++) {
        assert_true(args[t].ok && !run->columns[t].misused);
        assert_true(run->columns[t].loss == run->columns[0].loss);
    }
    return run->columns[0].loss;
}

/* Cells of a worker in the order in which they must be reported. */
static uint32_t expected_cells(const struct worker *w, uint32_t out[CELLS_MAX])
{
    const struct mu_model_spec *spec = &w->column->leaf->spec;
    const struct mu_model_part *part = &w->part;
    uint32_t count = 0, end = part->first_slice + part->slice_count;
    for (uint32_t s = part->first_slice; part->head && !mu_model_is_tied(&spec->config) && s < end; s++)
        out[count++] = mu_model_cell_index(spec, MU_CELL_F, 0, s);
    if (part->head)
        out[count++] = mu_model_cell_index(spec, MU_CELL_F_SHARED, 0, 0);
    for (uint32_t i = part->layer_count; i-- > 0;) {
        for (uint32_t s = part->first_slice; s < end; s++)
            out[count++] = mu_model_cell_index(spec, MU_CELL_L, part->first_layer + i, s);
        out[count++] = mu_model_cell_index(spec, MU_CELL_L_SHARED, part->first_layer + i, 0);
    }
    if (part->embedding && mu_model_has(&spec->config, MU_ROLE_WPE))
        out[count++] = mu_model_cell_index(spec, MU_CELL_E_SHARED, 0, 0);
    for (uint32_t s = part->first_slice; part->embedding && s < end; s++)
        out[count++] = mu_model_cell_index(spec, MU_CELL_E, 0, s);
    return count;
}

static bool is_poison(const float *x, uint64_t size)
{
    const unsigned char *bytes = (const unsigned char *)x;
    return size == 0 || (bytes[0] == POISON && memcmp(bytes, bytes + 1, size * sizeof *x - 1) == 0);
}

static void check_worker(struct worker *w)
{
    const struct mu_model_spec *spec = &w->column->leaf->spec;
    uint32_t expected[CELLS_MAX], count = expected_cells(w, expected);
    assert_int_equal(w->cell_count, count);
    for (uint32_t i = 0; i < count; i++) {
        struct mu_cell cell = mu_model_cell(spec, expected[i]);
        if (w->cells[i] != expected[i])
            fail_msg("stage %u reported cell %u in place of %s", w->stage, w->cells[i], cell.name);
        assert_true(w->hashes[i] == mu_xxh3_64(w->grads + cell.offset, cell.size * sizeof(float), 0));
    }
    w->cell_count = 0;
    for (uint32_t i = 0; i < spec->cell_count; i++) { /* a cell with the gap behind it */
        struct mu_cell cell = mu_model_cell(spec, i);
        uint64_t end = i + 1 < spec->cell_count ? mu_model_cell(spec, i + 1).offset : spec->flat_size;
        uint64_t first = cell.offset + (w->has[i] == FOREIGN ? 0 : cell.size);
        if (!is_poison(w->grads + first, end - first))
            fail_msg("stage %u wrote to cell %s or behind it, which is not its own", w->stage, cell.name);
    }
}

/* Own cells of all workers in one buffer; shared cells must be the same everywhere. */
static void collect(const struct grid_run *run, float *grads)
{
    memset(grads, 0, run->leaf->spec.flat_size * sizeof *grads);
    for (uint32_t t = 0; t < run->grid->tp; t++)
        for (uint32_t p = 0; p < run->grid->pp; p++) {
            const struct worker *w = &run->columns[t].workers[p];
            for (uint32_t i = 0; i < run->leaf->spec.cell_count; i++) {
                struct mu_cell cell = mu_model_cell(&run->leaf->spec, i);
                if (!in_part(&w->part, &cell))
                    continue;
                bool shared =
                    cell.kind == MU_CELL_E_SHARED || cell.kind == MU_CELL_L_SHARED || cell.kind == MU_CELL_F_SHARED;
                if (t > 0 && shared)
                    assert_memory_equal(grads + cell.offset, w->grads + cell.offset, cell.size * sizeof *grads);
                memcpy(grads + cell.offset, w->grads + cell.offset, cell.size * sizeof *grads);
            }
        }
}

void mg_run(const struct mg_leaf *leaf, const struct mg_grid *grid, float *grads, double *ret_loss)
{
    struct grid_run *run = grid_new(leaf, grid, false);
    float *first = kt_alloc(leaf->spec.flat_size, sizeof *first);
    double loss = grid_go(run);
    for (uint32_t again = 0; again < 2; again++) {
        if (again)
            *ret_loss = grid_go(run);
        for (uint32_t t = 0; t < grid->tp; t++)
            for (uint32_t p = 0; p < grid->pp; p++)
                check_worker(&run->columns[t].workers[p]);
        collect(run, again ? grads : first);
    }
    assert_true(loss == *ret_loss);
    assert_memory_equal(first, grads, leaf->spec.flat_size * sizeof *grads);
    free(first);
    grid_free(run);
}

double mg_evaluate(const struct mg_leaf *leaf, const struct mg_grid *grid)
{
    struct grid_run *run = grid_new(leaf, grid, true);
    double loss = grid_go(run);
    grid_free(run);
    return loss;
}

void mg_run_alone(const struct mg_leaf *leaf, struct mu_pool *pool, float *grads, double *ret_loss)
{
    struct mu_model_options options = {.micro = leaf->micro, .length = leaf->length, .accumulate = leaf->accumulate};
    struct mu_error err = {0};
    struct mu_model *model = NULL;
    if (mu_model_new(&leaf->spec, &options, pool, &err, &model) != MU_OK)
        fail_msg("%s", err.text);
    memset(grads, 0, leaf->spec.flat_size * sizeof *grads);
    *ret_loss = 0;
    for (uint32_t i = 0; i < leaf->accumulate; i++) {
        struct mu_micro_batch batch = mg_batch(leaf, i);
        double loss;
        assert_int_equal(mu_model_forward_backward(model, &batch, leaf->params, grads, &loss), MU_OK);
        *ret_loss += loss;
    }
    mu_model_free(model);
}
