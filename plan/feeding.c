#include "plan/feeding.h"

#include <stdlib.h>
#include <string.h>

#include "common/mutant.h"

/* Chunks: ascending runs, disjoint. */
struct set {
    struct mu_chunk_run *runs;
    uint32_t count, room;
};

struct list {
    struct mu_move *moves;
    uint32_t count, room;
};

struct feeder {
    const struct mu_model_spec *model;
    const struct mu_feeding *feeding;
    struct mu_coords at; /* the taker's, in the next layout */
    struct list list;
    bool no_memory;
};

/* ---- sets ---- */

static void push(struct feeder *f, struct set *set, uint32_t first, uint32_t end)
{
    if (first >= end)
        return;
    struct mu_chunk_run *last = set->count ? &set->runs[set->count - 1] : NULL;
    if (last && last->first + last->count == first) {
        last->count += end - first;
        return;
    }
    if (set->count == set->room) {
        uint32_t room = 2 * set->room + 64;
        struct mu_chunk_run *more = realloc(set->runs, room * sizeof *more);
        if (!more) {
            f->no_memory = true;
            return;
        }
        set->runs = more;
        set->room = room;
    }
    set->runs[set->count++] = (struct mu_chunk_run){first, end - first};
}

enum which { IN_BOTH, NOT_IN_SECOND, IN_EITHER };

/* Walks over the stretches between all bounds of the two sets. */
static struct set combine(struct feeder *f, const struct set *a, const struct set *b, enum which which)
{
    struct set out = {0};
    uint32_t i = 0, k = 0, at = 0;
    while (i < a->count || k < b->count) {
        uint32_t next = UINT32_MAX;
        bool in_a = i < a->count && a->runs[i].first <= at, in_b = k < b->count && b->runs[k].first <= at;
        if (i < a->count)
            next = in_a ? a->runs[i].first + a->runs[i].count : a->runs[i].first;
        if (k < b->count) {
            uint32_t bound = in_b ? b->runs[k].first + b->runs[k].count : b->runs[k].first;
            next = bound < next ? bound : next;
        }
        if (which == IN_BOTH ? in_a && in_b : which == NOT_IN_SECOND ? in_a && !in_b : in_a || in_b)
            push(f, &out, at, next);
        at = next;
        i += in_a && a->runs[i].first + a->runs[i].count == at;
        k += in_b && b->runs[k].first + b->runs[k].count == at;
    }
    return out;
}

/* *set takes the place of what it was. */
static void become(struct set *set, struct set other)
{
    free(set->runs);
    *set = other;
}

static struct set share_of(struct feeder *f, const struct mu_layout *layout, uint32_t rank, enum mu_share share)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    struct set set = {0};
    uint32_t count = mu_layout_runs(f->model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++)
        push(f, &set, runs[i].first, runs[i].first + runs[i].count);
    return set;
}

/* What a rank has of a kind; with the tied copy, which is parameters to read. */
static struct set held_by(struct feeder *f, const struct mu_layout *layout, uint32_t rank, bool moments)
{
    struct set all = {0};
    if (rank == MU_LAYOUT_NOBODY)
        return all;
    const enum mu_share shares[] = {moments ? MU_SHARE_MOMENTS : MU_SHARE_PARAMS, MU_SHARE_MIRROR, MU_SHARE_COPY};
    for (uint32_t i = 0; i < (moments ? 2 : 3); i++) {
        struct set one = share_of(f, layout, rank, shares[i]);
        become(&all, combine(f, &all, &one, IN_EITHER));
        free(one.runs);
    }
    return all;
}

static struct set lacked(struct feeder *f, bool moments)
{
    const struct mu_feeding *feeding = f->feeding;
    struct set wanted = held_by(f, feeding->to, feeding->rank, moments);
    struct set held = held_by(f, feeding->from, feeding->old_rank, moments);
    become(&wanted, combine(f, &wanted, &held, NOT_IN_SECOND));
    free(held.runs);
    return wanted;
}

/* ---- who gives ---- */

static void add_moves(struct feeder *f, uint32_t from, uint32_t kinds, const struct set *chunks)
{
    struct list *list = &f->list;
    for (uint32_t i = 0; i < chunks->count; i++) {
        if (list->count == list->room) {
            uint32_t room = 2 * list->room + 64;
            struct mu_move *more = realloc(list->moves, room * sizeof *more);
            if (!more) {
                f->no_memory = true;
                return;
            }
            list->moves = more;
            list->room = room;
        }
        list->moves[list->count++] = (struct mu_move){from, f->feeding->rank, kinds, chunks->runs[i]};
    }
}

/* Whatever the rank has of the rest. */
static void give(struct feeder *f, uint32_t from, enum mu_share share, uint32_t kinds, struct set *rest)
{
    struct set has = share_of(f, f->feeding->from, from, share);
    struct set given = combine(f, rest, &has, IN_BOTH);
    if (given.count) {
        add_moves(f, from, kinds, &given);
        become(rest, combine(f, rest, &has, NOT_IN_SECOND));
    }
    free(has.runs);
    free(given.runs);
}

/* Chunks of stage p and slices t. */
static void give_column(struct feeder *f, uint32_t t, uint32_t p, uint32_t kinds, struct set *rest)
{
    const struct mu_layout *from = f->feeding->from;
    struct mu_coords at = {.t = t, .d = f->at.d % from->dp, .p = p};
    if (!from->sharded || !(kinds & MU_MOVE_MOMENTS) || MU_MUTANT(MU_MUT_FEED_FROM_ANYONE)) {
        give(f, mu_layout_rank(from, at), MU_SHARE_PARAMS, kinds, rest);
        return;
    }
    struct mu_shard_group group = mu_layout_shard_group(from->dp, at.d);
    for (at.d = group.first; at.d < group.first + group.count && rest->count; at.d++)
        give(f, mu_layout_rank(from, at), MU_SHARE_OWNED, kinds, rest);
}

/* Does the stage have anything of the rest? The chunks of a stage lie side by side. */
static bool touches(struct feeder *f, uint32_t p, const struct set *rest)
{
    const struct mu_layout *from = f->feeding->from;
    struct set low = share_of(f, from, mu_layout_rank(from, (struct mu_coords){.t = 0, .p = p}), MU_SHARE_PARAMS);
    struct set high =
        share_of(f, from, mu_layout_rank(from, (struct mu_coords){.t = from->tp - 1, .p = p}), MU_SHARE_PARAMS);
    bool any = false;
    if (low.count && high.count) {
        uint32_t begin = low.runs[0].first;
        uint32_t end = high.runs[high.count - 1].first + high.runs[high.count - 1].count;
        for (uint32_t i = 0; i < rest->count && !any; i++)
            any = rest->runs[i].first < end && rest->runs[i].first + rest->runs[i].count > begin;
    }
    free(low.runs);
    free(high.runs);
    return any;
}

/* What every t of a stage has comes from the one that has the taker's slices too. */
static void give_all(struct feeder *f, uint32_t kinds, struct set *rest)
{
    const struct mu_layout *from = f->feeding->from;
    uint32_t like = f->at.t * from->tp / f->feeding->to->tp;
    for (uint32_t p = 0; p < from->pp && rest->count; p++) {
        if (!touches(f, p, rest))
            continue;
        give_column(f, like, p, kinds, rest);
        for (uint32_t t = 0; t < from->tp && rest->count; t++)
            give_column(f, t, p, kinds, rest);
    }
    MU_ASSERT(rest->count == 0 || f->no_memory);
}

static int by_giver(const void *a, const void *b)
{
    const struct mu_move *x = a, *y = b;
    if (x->from != y->from)
        return x->from < y->from ? -1 : 1;
    return x->run.first < y->run.first ? -1 : x->run.first > y->run.first;
}

enum mu_status mu_feeding_moves(const struct mu_model_spec *model, const struct mu_feeding *feeding,
                                struct mu_move **ret_moves, uint32_t *ret_count)
{
    struct feeder f = {.model = model, .feeding = feeding, .at = mu_layout_coords(feeding->to, feeding->rank)};
    struct set params = lacked(&f, false), moments = lacked(&f, true);
    struct set parts[] = {combine(&f, &params, &moments, IN_BOTH), combine(&f, &moments, &params, NOT_IN_SECOND),
                          combine(&f, &params, &moments, NOT_IN_SECOND)};
    static const uint32_t kinds[] = {MU_MOVE_PARAMS | MU_MOVE_MOMENTS, MU_MOVE_MOMENTS, MU_MOVE_PARAMS};
    for (uint32_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        give_all(&f, kinds[i], &parts[i]);
        free(parts[i].runs);
    }
    free(params.runs);
    free(moments.runs);
    if (f.no_memory) {
        free(f.list.moves);
        return MU_ERR_NO_MEMORY;
    }
    if (f.list.count)
        qsort(f.list.moves, f.list.count, sizeof *f.list.moves, by_giver);
    *ret_moves = f.list.moves;
    *ret_count = f.list.count;
    return MU_OK;
}
