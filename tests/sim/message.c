/* Deep copies: everything that a message, record or plan input points to lies behind it in one block, so that free()
 * frees it. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

struct block {
    char *base;
    size_t used, size;
};

static size_t rounded(size_t size_bytes)
{
    return (size_bytes + 15) & ~(size_t)15;
}

static struct block block_new(size_t size_bytes)
{
    return (struct block){mu_sim_alloc(size_bytes), 0, size_bytes};
}

static void *block_put(struct block *block, const void *data, size_t size_bytes)
{
    void *at = block->base + block->used;
    MU_ASSERT(block->used + rounded(size_bytes) <= block->size);
    if (size_bytes)
        memcpy(at, data, size_bytes);
    block->used += rounded(size_bytes);
    return at;
}

struct mu_worker_message *mu_sim_copy_worker_message(const struct mu_worker_message *message)
{
    struct mu_worker_message *copy = mu_sim_alloc(sizeof *copy);
    *copy = *message;
    return copy;
}

/* ---- assignments and the coordinator's messages ---- */

static size_t assign_extra(const struct mu_assign *assign)
{
    size_t size = assign->leaf_counts ? rounded(assign->layout.dp * sizeof *assign->leaf_counts) : 0;
    size += rounded(assign->peer_count * sizeof *assign->peers);
    for (uint32_t i = 0; i < assign->peer_count; i++)
        size += rounded(strlen(assign->peers[i].name) + 1) + rounded(strlen(assign->peers[i].address) + 1);
    return size + rounded(assign->move_count * sizeof *assign->moves) +
           rounded(assign->holder_count * sizeof *assign->holders) +
           (assign->amendments ? rounded(sizeof *assign->amendments) : 0);
}

static void put_assign(struct block *block, struct mu_assign *copy)
{
    if (copy->leaf_counts)
        copy->leaf_counts = block_put(block, copy->leaf_counts, copy->layout.dp * sizeof *copy->leaf_counts);
    struct mu_peer *peers = block_put(block, copy->peers, copy->peer_count * sizeof *peers);
    for (uint32_t i = 0; i < copy->peer_count; i++) {
        peers[i].name = block_put(block, peers[i].name, strlen(peers[i].name) + 1);
        peers[i].address = block_put(block, peers[i].address, strlen(peers[i].address) + 1);
    }
    copy->peers = peers;
    copy->moves = block_put(block, copy->moves, copy->move_count * sizeof *copy->moves);
    if (copy->holder_count)
        copy->holders = block_put(block, copy->holders, copy->holder_count * sizeof *copy->holders);
    if (copy->amendments)
        copy->amendments = block_put(block, copy->amendments, sizeof *copy->amendments);
}

void *mu_sim_copy_assign(const struct mu_assign *assign, const void *head, size_t head_bytes,
                         struct mu_assign **ret_assign)
{
    struct block block = block_new(rounded(head_bytes) + rounded(sizeof *assign) + assign_extra(assign));
    block_put(&block, head, head_bytes);
    struct mu_assign *copy = block_put(&block, assign, sizeof *assign);
    put_assign(&block, copy);
    *ret_assign = copy;
    return block.base;
}

struct mu_coord_message *mu_sim_copy_coord_message(const struct mu_coord_message *message)
{
    size_t size = rounded(sizeof *message);
    bool with_spec = message->kind == MU_CM_WELCOME && message->welcome.spec;
    if (with_spec)
        size += rounded(sizeof *message->welcome.spec);
    if (message->kind == MU_CM_ASSIGN)
        size += assign_extra(&message->assign);
    if (message->kind == MU_CM_KEEP)
        size += rounded(message->keep.piece_count * sizeof *message->keep.pieces);
    bool feeds = message->kind == MU_CM_FEED && message->feed.amendments;
    if (feeds)
        size += rounded(sizeof *message->feed.amendments);
    struct block block = block_new(size);
    struct mu_coord_message *copy = block_put(&block, message, sizeof *message);
    if (with_spec)
        copy->welcome.spec = block_put(&block, message->welcome.spec, sizeof *message->welcome.spec);
    if (message->kind == MU_CM_ASSIGN)
        put_assign(&block, &copy->assign);
    if (feeds)
        copy->feed.amendments = block_put(&block, message->feed.amendments, sizeof *message->feed.amendments);
    if (message->kind == MU_CM_KEEP)
        copy->keep.pieces =
            block_put(&block, message->keep.pieces, message->keep.piece_count * sizeof *message->keep.pieces);
    return copy;
}

/* ---- records ---- */

static size_t record_size(const struct mu_record *record)
{
    switch (record->kind) {
    case MU_RECORD_JOB:
        return sizeof *record->job;
    case MU_RECORD_GENERATION:
        return rounded(sizeof *record->generation) + record->generation->world * sizeof *record->generation->members;
    case MU_RECORD_CHECKPOINT:
        return rounded(sizeof *record->checkpoint) +
               rounded(record->checkpoint->piece_count * sizeof *record->checkpoint->pieces) +
               record->checkpoint->holder_count * sizeof *record->checkpoint->holders;
    case MU_RECORD_WORKER:
        return sizeof *record->worker;
    case MU_RECORD_TALLY:
        return sizeof *record->tally;
    case MU_RECORD_DEATH:
        return sizeof *record->death;
    case MU_RECORD_NODE:
        return sizeof *record->node;
    case MU_RECORD_REQUEST:
        return sizeof *record->request;
    case MU_RECORD_ACCOUNT:
        return sizeof *record->account;
    case MU_RECORD_EVENT:
        return sizeof *record->event;
    case MU_RECORD_KIND_COUNT:
        break;
    }
    return 0;
}

struct mu_record *mu_sim_copy_record(const struct mu_record *record)
{
    struct block block = block_new(rounded(sizeof *record) + rounded(record_size(record)) + 32);
    struct mu_record *copy = block_put(&block, record, sizeof *record);
    switch (record->kind) {
    case MU_RECORD_JOB:
        copy->job = block_put(&block, record->job, sizeof *record->job);
        break;
    case MU_RECORD_GENERATION: {
        struct mu_generation_record *generation = block_put(&block, record->generation, sizeof *generation);
        generation->members = block_put(&block, generation->members, generation->world * sizeof *generation->members);
        copy->generation = generation;
        break;
    }
    case MU_RECORD_CHECKPOINT: {
        struct mu_checkpoint_record *checkpoint = block_put(&block, record->checkpoint, sizeof *checkpoint);
        checkpoint->pieces =
            block_put(&block, checkpoint->pieces, checkpoint->piece_count * sizeof *checkpoint->pieces);
        checkpoint->holders =
            block_put(&block, checkpoint->holders, checkpoint->holder_count * sizeof *checkpoint->holders);
        copy->checkpoint = checkpoint;
        break;
    }
    case MU_RECORD_WORKER:
        copy->worker = block_put(&block, record->worker, sizeof *record->worker);
        break;
    case MU_RECORD_TALLY:
        copy->tally = block_put(&block, record->tally, sizeof *record->tally);
        break;
    case MU_RECORD_DEATH:
        copy->death = block_put(&block, record->death, sizeof *record->death);
        break;
    case MU_RECORD_NODE:
        copy->node = block_put(&block, record->node, sizeof *record->node);
        break;
    case MU_RECORD_REQUEST:
        copy->request = block_put(&block, record->request, sizeof *record->request);
        break;
    case MU_RECORD_ACCOUNT:
        copy->account = block_put(&block, record->account, sizeof *record->account);
        break;
    case MU_RECORD_EVENT:
        copy->event = block_put(&block, record->event, sizeof *record->event);
        break;
    case MU_RECORD_KIND_COUNT:
        break;
    }
    return copy;
}

/* ---- planning ---- */

struct mu_plan_input *mu_sim_copy_plan_input(const struct mu_plan_input *input)
{
    struct block block = block_new(rounded(sizeof *input) + rounded(sizeof *input->spec) +
                                   rounded(input->member_count * sizeof *input->members) +
                                   rounded(input->bad_link_count * sizeof *input->bad_links));
    struct mu_plan_input *copy = block_put(&block, input, sizeof *input);
    copy->spec = block_put(&block, input->spec, sizeof *input->spec);
    copy->members = block_put(&block, input->members, input->member_count * sizeof *input->members);
    copy->bad_links = block_put(&block, input->bad_links, input->bad_link_count * sizeof *input->bad_links);
    return copy;
}
