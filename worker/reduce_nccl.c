/* Gradients and updated parameters of a mesh between GPUs: what reduce.c and reduce_gather.c move over sockets, in
 * exchanges of NCCL.
 *
 * NCCL wants the same operations in the same order from all, so nothing happens as it becomes ready: all replicas go
 * through the segments of all owners together, a round with the next few of each owner at a time.
 *
 *   round:  everybody's roots to the owners -> owners add, in tree order -> sums to everybody (sharded: to the buddy)
 *
 * Everything is enqueued on the stream of the kernels, which orders it: staging memory is used again as soon as it was
 * added from. The host waits once, at the end, where it sees whether all of it is really done. */
#include "worker/reduce_internal.h"

#include <stdlib.h>

#include "common/fault.h"

enum { SUM_ROUND = 2, GATHER_ROUND = 8 }; /* segments of one owner in a round, at most */
_Static_assert((int)SUM_ROUND <= (int)MU_REDUCE_WINDOW_MIN, "a round's inputs fit into the window");
_Static_assert(2 * (MU_MESH_WORLD_MAX - 1) * MU_TREE_ROOTS_MAX <= MU_NCCL_MOVES_MAX, "a round of one fits");
_Static_assert(2 * (MU_MESH_WORLD_MAX - 1) * GATHER_ROUND <= MU_NCCL_MOVES_MAX, "a gather's round fits");

/* The next segments of every owner. */
struct round {
    uint32_t most; /* of one owner */
    uint32_t next[MU_MESH_WORLD_MAX];
    uint32_t segments[MU_MESH_WORLD_MAX * GATHER_ROUND], count;
    size_t move_count;
};

static enum mu_status begin(struct mu_reduce *reduce, struct round *round, uint32_t most, struct mu_error *err)
{
    *round = (struct round){.most = most};
    if (!reduce->moves && !(reduce->moves = calloc(MU_NCCL_MOVES_MAX, sizeof *reduce->moves)))
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for exchanges between %u GPUs", reduce->replicas);
    return MU_OK;
}

/* False: there are none. The same on all replicas. */
static bool next_round(const struct mu_reduce *reduce, struct round *round)
{
    round->count = 0;
    for (uint32_t owner = 0; owner < reduce->replicas; owner++) {
        for (uint32_t taken = 0; taken < round->most && round->next[owner] < reduce->segment_count;) {
            uint32_t segment = round->next[owner]++;
            if (reduce->segments[segment].owner != owner)
                continue;
            round->segments[round->count++] = segment;
            taken++;
        }
    }
    return round->count > 0;
}

static void move(struct mu_reduce *reduce, struct round *round, bool send, uint32_t peer, uint64_t exchange,
                 float *data, uint64_t size)
{
    MU_ASSERT(round->move_count < MU_NCCL_MOVES_MAX);
    reduce->moves[round->move_count++] = (struct mu_nccl_move){
        .peer = peer, .send = send, .exchange = exchange, .data = data, .size_bytes = size * sizeof *data};
}

static enum mu_status exchange(struct mu_reduce *reduce, struct round *round, struct mu_error *err)
{
    const struct mu_nccl_link *link = reduce->link;
    size_t count = round->move_count;
    round->move_count = 0;
    return link->ops->exchange(link->nccl, MU_NCCL_REPLICAS, reduce->moves, count, link->streams[MU_TRACK_MAIN], err);
}

static enum mu_status all_done(struct mu_reduce *reduce, struct mu_error *err)
{
    return reduce->link->ops->wait(reduce->link->nccl, reduce->link->streams[MU_TRACK_MAIN], MU_COMM_FOREVER, err);
}

/* ---- sums ---- */

/* The roots of this rank go to the owner, or those of the others come here. */
static void move_up(struct mu_reduce *reduce, struct round *round, const struct segment *segment, uint32_t turn)
{
    struct segment_counts counts = reduce_counts(reduce, segment);
    for (uint32_t i = 0; i < counts.inputs; i++) {
        const struct input *input = &reduce->inputs[i];
        move(reduce, round, false, input->peer, reduce_up_number(reduce, segment, input->number),
             reduce_storage(reduce, segment, reduce->input_storage[i], turn), segment->size);
    }
    for (uint32_t i = 0; i < counts.ups; i++)
        move(reduce, round, true, segment->owner, reduce_up_number(reduce, segment, i),
             reduce_storage(reduce, segment, i, 0), segment->size);
}

static void move_down(struct mu_reduce *reduce, struct round *round, const struct segment *segment)
{
    struct segment_counts counts = reduce_counts(reduce, segment);
    uint64_t number = reduce_down_number(reduce, segment);
    float *sum = reduce->stack[0] + segment->offset;
    for (uint32_t i = 0; i < counts.forwards; i++)
        move(reduce, round, true, reduce->scatter ? reduce->buddy : reduce->kin.children[i], number, sum,
             segment->size);
    if (counts.down)
        move(reduce, round, false, segment->owner, number, sum, segment->size);
}

static enum mu_status sum_round(struct mu_reduce *reduce, struct round *round, uint32_t *turn, struct mu_error *err)
{
    uint32_t first = *turn;
    for (uint32_t i = 0; i < round->count; i++) {
        const struct segment *segment = &reduce->segments[round->segments[i]];
        MU_ASSERT(segment->ready);
        move_up(reduce, round, segment, *turn);
        *turn += reduce_collects(reduce, segment);
    }
    MU_FAULT("worker.exchange.send");
    enum mu_status status = exchange(reduce, round, err);
    for (uint32_t i = first; i < *turn && status == MU_OK; i++)
        status = reduce_add(reduce, &reduce->segments[reduce->collected[i]], i, err);
    MU_FAULT("worker.exchange.partial");
    for (uint32_t i = 0; i < round->count; i++)
        move_down(reduce, round, &reduce->segments[round->segments[i]]);
    return status == MU_OK ? exchange(reduce, round, err) : status;
}

enum mu_status reduce_nccl_sum(struct mu_reduce *reduce, struct mu_error *err)
{
    struct round round;
    uint32_t turn = 0;
    enum mu_status status = begin(reduce, &round, reduce->replicas <= MU_MESH_WORLD_MAX / 2 ? SUM_ROUND : 1, err);
    while (status == MU_OK && next_round(reduce, &round))
        status = sum_round(reduce, &round, &turn, err);
    return status == MU_OK ? all_done(reduce, err) : status;
}

/* ---- the gather ---- */

static void move_part(struct mu_reduce *reduce, struct round *round, uint32_t index)
{
    const struct segment *segment = &reduce->segments[index];
    float *params = reduce->params + segment->offset;
    if (segment->owner != reduce->index) {
        if (segment->owner != reduce->guarded)
            move(reduce, round, false, segment->owner, index, params, segment->size);
        return;
    }
    for (uint32_t i = 0; i < reduce->replicas; i++)
        if (i != reduce->index && i != reduce->buddy)
            move(reduce, round, true, i, index, params, segment->size);
}

enum mu_status reduce_nccl_gather(struct mu_reduce *reduce, struct mu_error *err)
{
    struct round round;
    enum mu_status status = begin(reduce, &round, GATHER_ROUND, err);
    while (status == MU_OK && next_round(reduce, &round)) {
        for (uint32_t i = 0; i < round.count; i++)
            move_part(reduce, &round, round.segments[i]);
        MU_FAULT("worker.gather.send");
        status = exchange(reduce, &round, err);
    }
    return status == MU_OK ? all_done(reduce, err) : status;
}
