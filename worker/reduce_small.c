#include "worker/reduce_internal.h"

#include <string.h>

static void push_node(struct mu_small *small, uint32_t leaves, struct mu_tree_node node, double value)
{
    MU_ASSERT(small->root_count < MU_TREE_ROOTS_MAX);
    small->nodes[small->root_count] = node;
    small->roots[small->root_count++] = value;
    while (small->root_count > 1) {
        uint32_t high = small->root_count - 1, low = high - 1;
        if (!reduce_siblings(leaves, small->nodes[low], small->nodes[high]))
            break;
        small->nodes[low].count += small->nodes[high].count;
        small->roots[low] += small->roots[high];
        small->root_count--;
    }
}

void mu_small_init(struct mu_small *small)
{
    memset(small, 0, sizeof *small);
    mu_exact_sum_init(&small->squares);
    small->command = UINT64_MAX;
}

void mu_small_push(struct mu_small *small, uint32_t leaves, uint32_t first, uint32_t leaf, double value)
{
    MU_ASSERT(leaf >= first && leaf < leaves);
    push_node(small, leaves, (struct mu_tree_node){leaf, 1}, value);
}

/* As on the wire: little-endian, no padding. */
struct packed {
    uint64_t sequence, command;
    uint32_t kind, root_count;
    uint8_t squares[MU_EXACT_SUM_BYTES];
    uint32_t unfinite;
    uint8_t digest[MU_DIGEST_SIZE];
    struct mu_tree_node nodes[MU_TREE_ROOTS_MAX];
    double roots[MU_TREE_ROOTS_MAX];
};

_Static_assert(sizeof(struct packed) == SMALL_BYTES && (int)SMALL_BYTES <= (int)MU_COMM_EAGER_SIZE, "one small frame");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "messages are little-endian structs");

static void pack(uint64_t sequence, enum mu_small_kind kind, const struct mu_small *small, uint8_t out[SMALL_BYTES])
{
    struct packed packed = {.sequence = sequence,
                            .command = small->command,
                            .kind = kind,
                            .root_count = small->root_count,
                            .unfinite = small->unfinite};
    mu_exact_sum_pack(&small->squares, packed.squares);
    memcpy(packed.digest, small->digest, sizeof packed.digest);
    memcpy(packed.nodes, small->nodes, small->root_count * sizeof packed.nodes[0]);
    memcpy(packed.roots, small->roots, small->root_count * sizeof packed.roots[0]);
    memcpy(out, &packed, sizeof packed);
}

/* Adds a message to `into`: the roots continue where those of `into` end. */
static enum mu_status merge(uint64_t sequence, enum mu_small_kind kind, uint32_t leaves, uint32_t peer,
                            const uint8_t *bytes, struct mu_small *into, struct mu_error *err)
{
    struct packed packed;
    memcpy(&packed, bytes, sizeof packed);
    struct mu_exact_sum squares;
    if (packed.sequence != sequence || packed.kind != kind || packed.root_count > MU_TREE_ROOTS_MAX ||
        mu_exact_sum_unpack(packed.squares, &squares) != MU_OK)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "vote of rank %u is not one of step %llu of this generation (it says %llu, kind %u, %u roots)",
                       peer, (unsigned long long)sequence, (unsigned long long)packed.sequence, packed.kind,
                       packed.root_count);
    uint32_t next = into->root_count > 0
                        ? into->nodes[into->root_count - 1].first + into->nodes[into->root_count - 1].count
                        : UINT32_MAX;
    for (uint32_t i = 0; i < packed.root_count; i++) {
        struct mu_tree_node node = packed.nodes[i];
        if (node.count == 0 || !mu_tree_is_node(leaves, node) || (next != UINT32_MAX && node.first != next) ||
            into->root_count == MU_TREE_ROOTS_MAX)
            return mu_fail(err, MU_ERR_CORRUPT, "vote of rank %u: leaves %u+%u are not the next subtree of %u leaves",
                           peer, node.first, node.count, leaves);
        push_node(into, leaves, node, packed.roots[i]);
        next = node.first + node.count;
    }
    mu_exact_sum_merge(&into->squares, &squares);
    for (size_t i = 0; i < sizeof packed.digest; i++)
        into->digest[i] |= packed.digest[i];
    into->unfinite = into->unfinite || packed.unfinite;
    if (packed.command < into->command)
        into->command = packed.command;
    return MU_OK;
}

static enum exchange_kind exchange_of(enum mu_small_kind kind, bool down)
{
    switch (kind) {
    case MU_SMALL_VOTE:
        return down ? EXCHANGE_VOTE_DOWN : EXCHANGE_VOTE_UP;
    case MU_SMALL_EVAL:
        return down ? EXCHANGE_EVAL_DOWN : EXCHANGE_EVAL_UP;
    case MU_SMALL_END:
        break;
    }
    return down ? EXCHANGE_END_DOWN : EXCHANGE_END_UP;
}

/* One small message to or from each of `ranks`; waits for them. A NULL `out` or `in` leaves that direction out. */
struct round {
    uint64_t number;
    const uint32_t *ranks;
    uint32_t rank_count;
    const uint8_t *out;
    uint8_t (*in)[SMALL_BYTES];
};

static enum mu_status run_round(struct mu_reduce *reduce, const struct round *round, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    struct mu_comm_request *receives = reduce->small_requests, *sends = receives + round->rank_count;
    for (uint32_t i = 0; i < round->rank_count && status == MU_OK; i++) {
        if (round->in)
            status = mu_comm_recv(reduce->group, round->ranks[i], round->number, round->in[i], SMALL_BYTES,
                                  &receives[i], err);
        if (round->out && status == MU_OK)
            status =
                mu_comm_send(reduce->group, round->ranks[i], round->number, round->out, SMALL_BYTES, &sends[i], err);
    }
    for (uint32_t i = 0; i < round->rank_count && status == MU_OK; i++) {
        if (round->out)
            status = mu_comm_wait(reduce->group, &sends[i], MU_COMM_FOREVER, err);
        if (round->in && status == MU_OK)
            status = mu_comm_wait(reduce->group, &receives[i], MU_COMM_FOREVER, err);
    }
    return status;
}

/* Ranks ascending, this one among the neighbours; `own` is merged from its packed form too, so that all take the same
 * way. */
static enum mu_status merge_all(struct mu_reduce *reduce, uint64_t sequence, enum mu_small_kind kind, uint32_t leaves,
                                struct mu_small *total, struct mu_error *err)
{
    mu_small_init(total);
    enum mu_status status = MU_OK;
    bool self_done = false;
    for (uint32_t i = 0; i <= reduce->world_kin.child_count && status == MU_OK; i++) {
        if (!self_done && (i == reduce->world_kin.child_count || reduce->world_kin.children[i] > reduce->rank)) {
            status = merge(sequence, kind, leaves, reduce->rank, reduce->small_up, total, err);
            self_done = true;
        }
        if (i < reduce->world_kin.child_count && status == MU_OK)
            status = merge(sequence, kind, leaves, reduce->world_kin.children[i], reduce->small_in[i], total, err);
    }
    return status;
}

static enum mu_status reduce_along_tree(struct mu_reduce *reduce, uint64_t sequence, enum mu_small_kind kind,
                                        uint32_t leaves, struct mu_small *total, struct mu_error *err)
{
    uint32_t parent = (uint32_t)reduce->world_kin.parent;
    bool root = reduce->world_kin.parent == REDUCE_NOBODY;
    struct round from_children = {exchange_number(sequence, exchange_of(kind, false), 0), reduce->world_kin.children,
                                  reduce->world_kin.child_count, NULL, reduce->small_in};
    enum mu_status status = run_round(reduce, &from_children, err);
    if (status == MU_OK)
        status = merge_all(reduce, sequence, kind, leaves, total, err);
    if (status != MU_OK)
        return status;
    pack(sequence, kind, total, reduce->small_down);
    uint64_t down = exchange_number(sequence, exchange_of(kind, true), 0);
    if (!root) {
        status = run_round(reduce, &(struct round){from_children.number, &parent, 1, reduce->small_down, NULL}, err);
        if (status == MU_OK)
            status = run_round(reduce, &(struct round){down, &parent, 1, NULL, &reduce->small_down}, err);
        mu_small_init(total);
        if (status == MU_OK)
            status = merge(sequence, kind, leaves, parent, reduce->small_down, total, err);
    }
    if (status == MU_OK)
        status = run_round(
            reduce,
            &(struct round){down, reduce->world_kin.children, reduce->world_kin.child_count, reduce->small_down, NULL},
            err);
    return status;
}

enum mu_status mu_reduce_small(struct mu_reduce *reduce, uint64_t sequence, enum mu_small_kind kind, uint32_t leaves,
                               const struct mu_small *own, struct mu_small *ret_total, struct mu_error *err)
{
    struct mu_small total;
    const struct mu_nccl_link *link = mu_nccl_link_open(reduce->link);
    enum mu_status status = link ? link->ops->progress(link->nccl, err) : MU_OK;
    if (status != MU_OK)
        return status; /* what this rank computed with is not what the others sent */
    pack(sequence, kind, own, reduce->small_up);
    if (reduce->world_kin.mesh) {
        struct round all = {exchange_number(sequence, exchange_of(kind, false), 0), reduce->world_kin.children,
                            reduce->world_kin.child_count, reduce->small_up, reduce->small_in};
        status = run_round(reduce, &all, err);
        if (status == MU_OK)
            status = merge_all(reduce, sequence, kind, leaves, &total, err);
    } else {
        status = reduce_along_tree(reduce, sequence, kind, leaves, &total, err);
    }
    if (status != MU_OK)
        return status;
    bool whole = leaves == 0 ? total.root_count == 0
                             : total.root_count == 1 && total.nodes[0].first == 0 && total.nodes[0].count == leaves;
    if (!whole)
        return mu_fail(err, MU_ERR_CORRUPT, "votes of %u ranks do not cover all %u leaves", reduce->world, leaves);
    *ret_total = total;
    return MU_OK;
}
