#include "plan/placement.h"

#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "plan/share_index.h"

#define NONE UINT32_MAX

/* Members that hold exactly the same have the same profile. */
struct profiled {
    uint64_t hash;
    uint32_t member;
};

struct match {
    uint64_t bytes; /* that a member of the profile has of the column */
    uint32_t profile, column;
    uint32_t preferred; /* first member of the profile */
};

/* A member that waits for its rank. */
struct waiting {
    uint32_t stage, host, member;
};

/* Members of one host that wait, side by side. */
struct bucket {
    uint32_t host, next, end;
    uint32_t preferred; /* the first of them */
};

struct placer {
    const struct mu_layout *layout;
    const struct mu_reshard_holder *members;
    const bool *in;
    uint32_t count, columns;
    uint32_t *out; /* [working]: member of each rank, or NONE */
    struct mu_share_index index;
    uint32_t *owner_first, *owner_entries;
    uint32_t *column;       /* [count]: chosen column, or NONE */
    uint32_t *room;         /* [columns] */
    uint32_t *column_set;   /* [sets]: the column that it is, or whose tied copy; or NONE */
    uint8_t *atom_roles;    /* [atoms]: what the present profile has */
    uint32_t *atom_list;    /* [atoms] */
    uint64_t *column_bytes; /* [columns] */
    uint32_t *column_list;  /* [columns] */
    struct profiled *profiled;
    uint32_t profile_count;
    uint32_t *profile_first; /* [profiles + 1] in profiled */
    struct match *matches;
    size_t match_count, match_room;
    uint32_t *replica;                   /* [count]: chosen replica, or NONE */
    uint32_t *taken;                     /* [dp * pp]: ranks taken in each tensor group */
    uint32_t *free_replica;              /* [columns]: none below is free */
    uint32_t *empty_group;               /* [pp]: no tensor group of the stage below is empty */
    struct waiting *waiting;             /* [count] */
    struct bucket *buckets;              /* [count] */
    uint32_t bucket_count, first_bucket; /* none below has members left */
    uint32_t *recent;                    /* [count]: replicas of the stage in which a host takes part */
};

static int order_of(uint64_t a, uint64_t b)
{
    return a < b ? -1 : a > b;
}

static uint32_t rank_of(const struct placer *p, uint32_t column, uint32_t d)
{
    return mu_layout_rank(p->layout,
                          (struct mu_coords){.t = column % p->layout->tp, .d = d, .p = column / p->layout->tp});
}

/* 1. Columns */

static int compare_profiled(const void *a, const void *b)
{
    const struct profiled *x = a, *y = b;
    return x->hash != y->hash ? order_of(x->hash, y->hash) : order_of(x->member, y->member);
}

static uint64_t profile_hash(const struct placer *p, uint32_t member)
{
    uint64_t hash = 1;
    for (uint32_t i = p->owner_first[member]; i < p->owner_first[member + 1]; i++) {
        uint32_t entry = p->owner_entries[i];
        const uint32_t key[] = {p->index.entry_sets[entry], p->index.entries[entry].roles};
        hash = mu_xxh3_64(key, sizeof key, hash);
    }
    return hash;
}

static void find_profiles(struct placer *p)
{
    uint32_t holders = 0;
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->in[i] && p->owner_first[i] < p->owner_first[i + 1])
            p->profiled[holders++] = (struct profiled){profile_hash(p, i), i};
    }
    if (holders)
        qsort(p->profiled, holders, sizeof *p->profiled, compare_profiled);
    for (uint32_t i = 0; i < holders; i++) {
        if (i == 0 || p->profiled[i - 1].hash != p->profiled[i].hash)
            p->profile_first[p->profile_count++] = i;
    }
    p->profile_first[p->profile_count] = holders;
}

/* What a member has, atom by atom. Returns how many atoms it has something of. */
static uint32_t mark_atoms(struct placer *p, uint32_t member)
{
    const struct mu_share_index *index = &p->index;
    uint32_t count = 0;
    for (uint32_t i = p->owner_first[member]; i < p->owner_first[member + 1]; i++) {
        uint32_t entry = p->owner_entries[i], set = index->entry_sets[entry];
        uint32_t roles = index->entries[entry].roles;
        for (uint32_t r = index->set_ranges[set]; r < index->set_ranges[set + 1]; r++) {
            for (uint32_t k = 0; k < index->ranges[r].count; k++) {
                uint32_t atom = index->ranges[r].first + k;
                if (p->atom_roles[atom] == 0)
                    p->atom_list[count++] = atom;
                p->atom_roles[atom] |= (uint8_t)roles;
            }
        }
    }
    return count;
}

static bool add_match(struct placer *p, struct match match)
{
    if (p->match_count == p->match_room) {
        size_t room = 2 * p->match_room + 1024;
        struct match *more = realloc(p->matches, room * sizeof *more);
        if (!more)
            return false;
        p->matches = more;
        p->match_room = room;
    }
    p->matches[p->match_count++] = match;
    return true;
}

/* Bytes of an element that a member with `roles` need not receive for a column that has it in `share`. */
static uint32_t bytes_saved(uint32_t roles, enum mu_share share)
{
    if (share == MU_SHARE_COPY)
        return roles & (MU_HAS_PARAMS | MU_HAS_COPY) ? sizeof(float) : 0;
    return (roles & MU_HAS_PARAMS ? sizeof(float) : 0) + (roles & MU_HAS_MOMENTS ? 2 * sizeof(float) : 0);
}

static bool match_profile(struct placer *p, uint32_t profile)
{
    const struct mu_share_index *index = &p->index;
    uint32_t member = p->profiled[p->profile_first[profile]].member;
    uint32_t atoms = mark_atoms(p, member), columns = 0;
    for (uint32_t i = 0; i < atoms; i++) {
        uint32_t atom = p->atom_list[i], first = index->bounds[atom], roles = p->atom_roles[atom];
        uint64_t elements = mu_share_index_elements(index, first, index->bounds[atom + 1] - first);
        p->atom_roles[atom] = 0;
        for (uint32_t k = index->atom_first[atom]; k < index->atom_first[atom + 1]; k++) {
            uint32_t set = index->atom_sets[k], column = p->column_set[set];
            uint32_t saved = column == NONE ? 0 : bytes_saved(roles, index->entries[index->set_entries[set]].share);
            if (saved == 0)
                continue;
            if (p->column_bytes[column] == 0)
                p->column_list[columns++] = column;
            p->column_bytes[column] += elements * saved;
        }
    }
    bool good = true;
    for (uint32_t i = 0; i < columns; i++) {
        uint32_t column = p->column_list[i];
        good = good && add_match(p, (struct match){p->column_bytes[column], profile, column, member});
        p->column_bytes[column] = 0;
    }
    return good;
}

/* Larger ones first, then the profile whose first member is preferred. */
static int compare_matches(const void *a, const void *b)
{
    const struct match *x = a, *y = b;
    if (x->bytes != y->bytes)
        return order_of(y->bytes, x->bytes);
    return x->preferred != y->preferred ? order_of(x->preferred, y->preferred) : order_of(x->column, y->column);
}

/* Matches of one profile that are equally good: its members in turn, to the column with most room. */
static void take_matches(struct placer *p, const struct match *matches, size_t count)
{
    uint32_t profile = matches[0].profile;
    for (uint32_t i = p->profile_first[profile]; i < p->profile_first[profile + 1]; i++) {
        uint32_t member = p->profiled[i].member, best = NONE;
        for (size_t k = 0; k < count && p->column[member] == NONE; k++) {
            uint32_t column = matches[k].column;
            if (p->room[column] > 0 && (best == NONE || p->room[column] > p->room[best]))
                best = column;
        }
        if (best != NONE) {
            p->column[member] = best;
            p->room[best]--;
        }
    }
}

static enum mu_status choose_columns(struct placer *p)
{
    find_profiles(p);
    for (uint32_t profile = 0; profile < p->profile_count; profile++) {
        if (!match_profile(p, profile))
            return MU_ERR_NO_MEMORY;
    }
    if (p->match_count)
        qsort(p->matches, p->match_count, sizeof *p->matches, compare_matches);
    for (size_t first = 0, end; first < p->match_count; first = end) {
        const struct match *match = &p->matches[first];
        for (end = first + 1; end < p->match_count; end++) {
            if (p->matches[end].bytes != match->bytes || p->matches[end].profile != match->profile)
                break;
        }
        take_matches(p, match, end - first);
    }
    return MU_OK;
}

/* 2. Replicas */

static bool is_free(const struct placer *p, uint32_t column, uint32_t d)
{
    return p->out[rank_of(p, column, d)] == NONE;
}

static void take(struct placer *p, uint32_t rank, uint32_t member)
{
    MU_ASSERT(p->out[rank] == NONE);
    p->out[rank] = member;
    p->taken[rank / p->layout->tp]++;
}

static void take_replica(struct placer *p, uint32_t member, uint32_t d)
{
    take(p, rank_of(p, p->column[member], d), member);
    p->replica[member] = d;
}

/* The replica number that a member would like in its column: its old one, or in a sharded layout of another width the
 * one that owns about the same part. NONE: it never had this column. */
static uint32_t wanted_replica(const struct placer *p, uint32_t member)
{
    const struct mu_layout *layout = p->layout;
    for (uint32_t k = 0; k < p->members[member].share_count; k++) {
        const struct mu_held_share *share = &p->members[member].shares[k];
        if (mu_layout_is_idle(&share->layout, share->rank) || share->layout.tp != layout->tp)
            continue;
        struct mu_coords old = mu_layout_coords(&share->layout, share->rank);
        uint32_t stage = p->column[member] / layout->tp;
        if (old.t != p->column[member] % layout->tp || share->layout.stage_first[old.p] != layout->stage_first[stage] ||
            share->layout.stage_first[old.p + 1] != layout->stage_first[stage + 1])
            continue;
        if (layout->sharded && share->layout.dp != layout->dp)
            return (uint32_t)((2ull * old.d + 1) * layout->dp / (2ull * share->layout.dp));
        return old.d < layout->dp ? old.d : NONE;
    }
    return NONE;
}

static void keep_replicas(struct placer *p)
{
    for (uint32_t i = 0; i < p->count; i++) {
        uint32_t d = p->column[i] == NONE ? NONE : wanted_replica(p, i);
        if (d != NONE && is_free(p, p->column[i], d))
            take_replica(p, i, d);
    }
}

static int compare_waiting(const void *a, const void *b)
{
    const struct waiting *x = a, *y = b;
    if (x->stage != y->stage)
        return order_of(x->stage, y->stage);
    return x->host != y->host ? order_of(x->host, y->host) : order_of(x->member, y->member);
}

/* A replica where the member's host takes part, else the first empty tensor group, else any. */
static uint32_t find_replica(struct placer *p, uint32_t column, uint32_t recent_count)
{
    uint32_t stage = column / p->layout->tp, dp = p->layout->dp, *empty = &p->empty_group[stage];
    for (uint32_t i = 0; i < recent_count; i++) {
        if (is_free(p, column, p->recent[i]))
            return p->recent[i];
    }
    while (*empty < dp && p->taken[stage * dp + *empty] > 0)
        ++*empty;
    if (*empty < dp && p->layout->tp > 1)
        return *empty;
    while (!is_free(p, column, p->free_replica[column]))
        p->free_replica[column]++;
    return p->free_replica[column];
}

/* Members that have a column but not their old replica there, host by host within each stage. */
static void find_replicas(struct placer *p)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->column[i] != NONE)
            p->waiting[count++] = (struct waiting){p->column[i] / p->layout->tp, p->members[i].host, i};
    }
    if (count)
        qsort(p->waiting, count, sizeof *p->waiting, compare_waiting);
    for (uint32_t first = 0, end; first < count; first = end) {
        const struct waiting *head = &p->waiting[first];
        uint32_t recent = 0;
        for (end = first; end < count && p->waiting[end].stage == head->stage && p->waiting[end].host == head->host;
             end++) {
            if (p->replica[p->waiting[end].member] != NONE)
                p->recent[recent++] = p->replica[p->waiting[end].member];
        }
        for (uint32_t i = first; i < end; i++) {
            uint32_t member = p->waiting[i].member;
            if (p->replica[member] != NONE)
                continue;
            take_replica(p, member, find_replica(p, p->column[member], recent));
            p->recent[recent++] = p->replica[member];
        }
    }
}

/* 3. The others */

static int compare_buckets(const void *a, const void *b)
{
    return order_of(((const struct bucket *)a)->preferred, ((const struct bucket *)b)->preferred);
}

/* The first `count` waiting members by host; hosts in order of their most preferred member. */
static void fill_buckets(struct placer *p, uint32_t count)
{
    qsort(p->waiting, count, sizeof *p->waiting, compare_waiting);
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || p->waiting[i - 1].host != p->waiting[i].host)
            p->buckets[p->bucket_count++] = (struct bucket){p->waiting[i].host, i, i, p->waiting[i].member};
        p->buckets[p->bucket_count - 1].end = i + 1;
    }
    qsort(p->buckets, p->bucket_count, sizeof *p->buckets, compare_buckets);
}

static uint32_t left_in(const struct bucket *bucket)
{
    return bucket->end - bucket->next;
}

static bool takes_part(const struct placer *p, uint32_t host, uint32_t group)
{
    for (uint32_t t = 0; t < p->layout->tp; t++) {
        uint32_t member = p->out[group * p->layout->tp + t];
        if (member != NONE && p->members[member].host == host)
            return true;
    }
    return false;
}

/* From which host the free ranks of a tensor group are filled: one that takes part in it already, the first that can
 * fill it alone, the one that has most. */
static struct bucket *choose_bucket(struct placer *p, uint32_t group)
{
    uint32_t free_ranks = p->layout->tp - p->taken[group];
    while (left_in(&p->buckets[p->first_bucket]) == 0)
        p->first_bucket++;
    struct bucket *end = p->buckets + p->bucket_count, *most = &p->buckets[p->first_bucket];
    for (struct bucket *b = most; b < end && p->taken[group] > 0; b++) {
        if (left_in(b) > 0 && takes_part(p, b->host, group))
            return b;
    }
    for (struct bucket *b = most; b < end; b++) {
        if (left_in(b) >= free_ranks)
            return b;
        if (left_in(b) > left_in(most))
            most = b;
    }
    return most;
}

static void place_others(struct placer *p)
{
    uint32_t working = mu_layout_working(p->layout), tp = p->layout->tp, free_ranks = 0, count = 0;
    for (uint32_t rank = 0; rank < working; rank++)
        free_ranks += p->out[rank] == NONE;
    for (uint32_t i = 0; i < p->count; i++) { /* without tensor groups hosts do not matter */
        if (p->in[i] && p->column[i] == NONE && (tp > 1 || count < free_ranks))
            p->waiting[count++] = (struct waiting){0, tp > 1 ? p->members[i].host : 0, i};
    }
    MU_ASSERT(count >= free_ranks);
    if (free_ranks == 0)
        return;
    fill_buckets(p, count);
    for (uint32_t group = 0; group < working / tp; group++) {
        struct bucket *from = NULL;
        for (uint32_t t = 0; t < tp; t++) {
            if (p->out[group * tp + t] != NONE)
                continue;
            if (!from || left_in(from) == 0)
                from = choose_bucket(p, group);
            take(p, group * tp + t, p->waiting[from->next++].member);
        }
    }
}

static enum mu_status place_all(struct placer *p)
{
    const struct mu_layout *layout = p->layout;
    for (uint32_t i = 0; i < p->count; i++) {
        for (uint32_t k = 0; p->in[i] && k < p->members[i].share_count; k++)
            mu_share_index_add_held(&p->index, &p->members[i].shares[k], i, p->members[i].stale_copies);
    }
    for (uint32_t column = 0; column < p->columns; column++)
        mu_share_index_add_need(&p->index, layout, rank_of(p, column, 0), p->count + column);
    enum mu_status status = mu_share_index_build(&p->index);
    if (!status)
        status = mu_share_index_owners(&p->index, p->count + p->columns, &p->owner_first, &p->owner_entries);
    if (status)
        return status;
    p->column_set = malloc(p->index.set_count * sizeof *p->column_set);
    p->atom_roles = calloc(p->index.atom_count, sizeof *p->atom_roles);
    p->atom_list = calloc(p->index.atom_count, sizeof *p->atom_list);
    if (!p->column_set || !p->atom_roles || !p->atom_list)
        return MU_ERR_NO_MEMORY;
    memset(p->column_set, 0xff, p->index.set_count * sizeof *p->column_set);
    for (uint32_t i = 0; i < p->index.entry_count; i++) {
        const struct mu_share_entry *entry = &p->index.entries[i];
        if (entry->owner >= p->count && entry->share != MU_SHARE_OWNED)
            p->column_set[p->index.entry_sets[i]] = entry->owner - p->count;
    }
    status = choose_columns(p);
    if (status)
        return status;
    keep_replicas(p);
    find_replicas(p);
    place_others(p);
    return MU_OK;
}

static bool prepare(struct placer *p)
{
    size_t count = p->count, columns = p->columns;
    p->column = malloc(count * sizeof *p->column);
    p->room = calloc(columns, sizeof *p->room);
    p->column_bytes = calloc(columns, sizeof *p->column_bytes);
    p->column_list = calloc(columns, sizeof *p->column_list);
    p->profiled = calloc(count, sizeof *p->profiled);
    p->profile_first = calloc(count + 1, sizeof *p->profile_first);
    p->replica = malloc(count * sizeof *p->replica);
    p->taken = calloc((size_t)p->layout->dp * p->layout->pp, sizeof *p->taken);
    p->free_replica = calloc(columns, sizeof *p->free_replica);
    p->empty_group = calloc(p->layout->pp, sizeof *p->empty_group);
    p->waiting = calloc(count, sizeof *p->waiting);
    p->buckets = calloc(count, sizeof *p->buckets);
    p->recent = calloc(count, sizeof *p->recent);
    if (!p->column || !p->room || !p->column_bytes || !p->column_list || !p->profiled || !p->profile_first ||
        !p->replica || !p->taken || !p->free_replica || !p->empty_group || !p->waiting || !p->buckets || !p->recent)
        return false;
    memset(p->column, 0xff, count * sizeof *p->column);
    memset(p->replica, 0xff, count * sizeof *p->replica);
    memset(p->out, 0xff, mu_layout_working(p->layout) * sizeof *p->out);
    for (size_t i = 0; i < columns; i++)
        p->room[i] = p->layout->dp;
    return true;
}

static void fini(struct placer *p)
{
    mu_share_index_fini(&p->index);
    free(p->owner_first);
    free(p->owner_entries);
    free(p->column);
    free(p->room);
    free(p->column_set);
    free(p->atom_roles);
    free(p->atom_list);
    free(p->column_bytes);
    free(p->column_list);
    free(p->profiled);
    free(p->profile_first);
    free(p->matches);
    free(p->replica);
    free(p->taken);
    free(p->free_replica);
    free(p->empty_group);
    free(p->waiting);
    free(p->buckets);
    free(p->recent);
}

enum mu_status mu_placement_make(const struct mu_model_spec *model, const struct mu_layout *layout,
                                 const struct mu_reshard_holder *members, const bool *in, uint32_t count,
                                 uint32_t *ret_members)
{
    uint32_t columns = layout->tp * layout->pp, candidates = 0;
    size_t shares = 0;
    for (uint32_t i = 0; i < count; i++) {
        shares += in[i] ? members[i].share_count : 0;
        candidates += in[i];
    }
    MU_ASSERT(candidates >= mu_layout_working(layout));
    if (columns == 1 && !layout->sharded && candidates == layout->dp) { /* any rank suits anybody */
        for (uint32_t i = 0, rank = 0; i < count; i++) {
            if (in[i])
                ret_members[rank++] = i;
        }
        return MU_OK;
    }
    struct placer p = {
        .layout = layout, .members = members, .in = in, .count = count, .columns = columns, .out = ret_members};
    enum mu_status status = mu_share_index_init(&p.index, model, shares, columns);
    if (status)
        return status;
    status = prepare(&p) ? place_all(&p) : MU_ERR_NO_MEMORY;
    fini(&p);
    return status;
}
