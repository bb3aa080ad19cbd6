#include "worker/buddy.h"

#include <stdlib.h>

#include "common/fault.h"
#include "worker/exchange.h"

/* The cells of one layer (or pseudo-layer) that go one way: neighbours, one message. */
struct block {
    uint32_t first_cell, cell_count;
    uint32_t left; /* cells that are not complete yet */
    uint64_t offset, size;
    bool begun;
    struct mu_comm_request request;
};

struct flow {
    uint32_t peer, block_count;
    struct block *blocks; /* ascending */
};

struct mu_buddy {
    const struct mu_model_spec *model;
    struct mu_comm_group *group;
    uint64_t sequence;
    float *grads;
    struct flow in, out;
};

/* One replica adds nothing up among ranks: the numbers of complete sums are free. */
static uint64_t number_of(const struct mu_buddy *buddy, const struct block *block)
{
    return exchange_number(buddy->sequence, EXCHANGE_DOWN, block->first_cell);
}

static void add_cell(struct flow *flow, const struct mu_model_spec *model, uint32_t index)
{
    struct mu_cell cell = mu_model_cell(model, index);
    struct block *block = flow->block_count ? &flow->blocks[flow->block_count - 1] : NULL;
    if (block && block->first_cell + block->cell_count == index) {
        struct mu_cell before = mu_model_cell(model, index - 1);
        bool layers = (before.kind == MU_CELL_L || before.kind == MU_CELL_L_SHARED) &&
                      (cell.kind == MU_CELL_L || cell.kind == MU_CELL_L_SHARED);
        if ((layers && before.layer == cell.layer) || (!layers && before.kind == cell.kind)) {
            block->cell_count++;
            block->size = cell.offset + cell.size - block->offset;
            return;
        }
    }
    flow->blocks[flow->block_count++] =
        (struct block){.first_cell = index, .cell_count = 1, .offset = cell.offset, .size = cell.size};
}

/* The cells that `holder` mirrors of whom it guards. */
static enum mu_status fill_flow(struct flow *flow, const struct mu_buddy_config *config, uint32_t holder, uint32_t peer,
                                struct mu_error *err)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t run_count = mu_layout_runs(config->model, config->layout, holder, MU_SHARE_MIRROR, runs);
    flow->peer = peer;
    flow->blocks = calloc(config->model->cell_count, sizeof *flow->blocks);
    if (!flow->blocks)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the gradients of mirrors");
    for (uint32_t i = 0; i < run_count; i++) {
        uint32_t end = runs[i].first + runs[i].count;
        for (uint32_t chunk = runs[i].first; chunk < end;) {
            uint32_t cell = mu_model_chunk(config->model, chunk).cell;
            add_cell(flow, config->model, cell);
            chunk += mu_model_cell(config->model, cell).chunk_count;
        }
    }
    return MU_OK;
}

enum mu_status mu_buddy_new(const struct mu_buddy_config *config, struct mu_buddy **ret_buddy, struct mu_error *err)
{
    uint32_t buddy_rank = mu_layout_buddy(config->layout, config->rank);
    uint32_t guarded = mu_layout_guarded(config->layout, config->rank);
    MU_ASSERT(config->layout->dp == 1 && buddy_rank != MU_LAYOUT_NOBODY && guarded != MU_LAYOUT_NOBODY);
    struct mu_buddy *buddy = calloc(1, sizeof *buddy);
    if (!buddy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a mirror");
    buddy->model = config->model;
    buddy->group = config->group;
    enum mu_status status = fill_flow(&buddy->in, config, config->rank, guarded, err);
    if (status == MU_OK)
        status = fill_flow(&buddy->out, config, buddy_rank, buddy_rank, err);
    if (status != MU_OK) {
        mu_buddy_free(buddy);
        return status;
    }
    *ret_buddy = buddy;
    return MU_OK;
}

void mu_buddy_free(struct mu_buddy *buddy)
{
    if (!buddy)
        return;
    free(buddy->in.blocks);
    free(buddy->out.blocks);
    free(buddy);
}

static void reset(struct flow *flow)
{
    for (uint32_t i = 0; i < flow->block_count; i++) {
        flow->blocks[i].begun = false;
        flow->blocks[i].left = flow->blocks[i].cell_count;
    }
}

enum mu_status mu_buddy_begin(struct mu_buddy *buddy, uint64_t sequence, float *grads, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    buddy->sequence = sequence;
    buddy->grads = grads;
    reset(&buddy->in);
    reset(&buddy->out);
    for (uint32_t i = buddy->in.block_count; i-- > 0 && status == MU_OK;) { /* as they come: the last cells first */
        struct block *block = &buddy->in.blocks[i];
        status = mu_comm_recv(buddy->group, buddy->in.peer, number_of(buddy, block), grads + block->offset,
                              block->size * sizeof(float), &block->request, err);
        block->begun = status == MU_OK;
    }
    return status;
}

/* NULL: the cell is in none. */
static struct block *block_of(struct flow *flow, uint32_t cell)
{
    uint32_t low = 0, high = flow->block_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        struct block *block = &flow->blocks[middle];
        if (cell < block->first_cell)
            high = middle;
        else if (cell < block->first_cell + block->cell_count)
            return block;
        else
            low = middle + 1;
    }
    return NULL;
}

enum mu_status mu_buddy_send(struct mu_buddy *buddy, uint32_t cell, struct mu_error *err)
{
    struct block *block = block_of(&buddy->out, cell);
    if (!block)
        return MU_OK;
    MU_ASSERT(block->left > 0);
    if (--block->left > 0)
        return MU_OK;
    MU_FAULT("worker.buddy.send");
    enum mu_status status =
        mu_comm_send(buddy->group, buddy->out.peer, number_of(buddy, block), buddy->grads + block->offset,
                     block->size * sizeof(float), &block->request, err);
    block->begun = status == MU_OK;
    return status;
}

static enum mu_status wait_for(struct mu_buddy *buddy, struct flow *flow, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = flow->block_count; i-- > 0 && status == MU_OK;) {
        if (flow->blocks[i].begun)
            status = mu_comm_wait(buddy->group, &flow->blocks[i].request, MU_COMM_FOREVER, err);
    }
    return status;
}

enum mu_status mu_buddy_received(struct mu_buddy *buddy, struct mu_error *err)
{
    enum mu_status status = wait_for(buddy, &buddy->in, err);
    if (status == MU_OK)
        MU_FAULT("worker.buddy.received");
    return status;
}

enum mu_status mu_buddy_sent(struct mu_buddy *buddy, struct mu_error *err)
{
    return wait_for(buddy, &buddy->out, err);
}
