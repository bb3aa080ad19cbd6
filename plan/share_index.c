#include "plan/share_index.h"

#include <stdlib.h>
#include <string.h>

#include "common/mutant.h"

enum { ENTRIES_PER_SHARE = 4 };

static void *new_array(size_t count, size_t size_bytes)
{
    return calloc(count ? count : 1, size_bytes);
}

enum mu_status mu_share_index_init(struct mu_share_index *index, const struct mu_model_spec *model, size_t share_count,
                                   size_t need_count)
{
    *index = (struct mu_share_index){.model = model};
    size_t room = (share_count + need_count) * ENTRIES_PER_SHARE;
    MU_ASSERT(room <= UINT32_MAX);
    index->entry_room = (uint32_t)room;
    index->entries = new_array(room, sizeof *index->entries);
    return index->entries ? MU_OK : MU_ERR_NO_MEMORY;
}

void mu_share_index_fini(struct mu_share_index *index)
{
    free(index->entries);
    free(index->set_entries);
    free(index->entry_sets);
    free(index->set_ranges);
    free(index->ranges);
    free(index->bounds);
    free(index->atom_first);
    free(index->atom_sets);
    *index = (struct mu_share_index){0};
}

static void add_entry(struct mu_share_index *index, const struct mu_layout *layout, enum mu_share share, uint32_t rank,
                      uint32_t owner, uint32_t roles)
{
    struct mu_coords coords = mu_layout_coords(layout, rank);
    if (share != MU_SHARE_OWNED)
        coords.d = 0;
    MU_ASSERT(index->entry_count < index->entry_room);
    index->entries[index->entry_count++] = (struct mu_share_entry){layout, share, coords, owner, roles};
}

static bool has_copy(const struct mu_share_index *index, const struct mu_layout *layout, uint32_t rank)
{
    return layout->pp > 1 && mu_layout_coords(layout, rank).p == layout->pp - 1 &&
           mu_layout_runs(index->model, layout, rank, MU_SHARE_COPY, NULL) > 0;
}

/* Of what the rank guards it has, or needs, everything. What its own stage shares is among that, and is there anyhow.
 */
static void add_mirror(struct mu_share_index *index, const struct mu_layout *layout, uint32_t rank, uint32_t owner,
                       uint32_t roles)
{
    uint32_t guarded = mu_layout_guarded(layout, rank);
    if (guarded != MU_LAYOUT_NOBODY)
        add_entry(index, layout, layout->dp == 1 ? MU_SHARE_PARAMS : MU_SHARE_OWNED, guarded, owner, roles);
}

void mu_share_index_add_held(struct mu_share_index *index, const struct mu_held_share *share, uint32_t owner,
                             bool stale_copy)
{
    const struct mu_layout *layout = &share->layout;
    uint32_t rank = share->rank;
    if (mu_layout_is_idle(layout, rank))
        return;
    enum mu_share params = share->owned_only ? MU_SHARE_OWNED : MU_SHARE_PARAMS;
    enum mu_share moments = layout->sharded ? MU_SHARE_OWNED : MU_SHARE_PARAMS;
    if (params == moments) {
        add_entry(index, layout, params, rank, owner, MU_HAS_PARAMS | MU_HAS_MOMENTS);
    } else {
        add_entry(index, layout, params, rank, owner, MU_HAS_PARAMS);
        add_entry(index, layout, moments, rank, owner, MU_HAS_MOMENTS);
    }
    if (!share->owned_only && !stale_copy && has_copy(index, layout, rank))
        add_entry(index, layout, MU_SHARE_COPY, rank, owner, MU_HAS_COPY);
    if (!MU_MUTANT(MU_MUT_FORGET_MIRRORS))
        add_mirror(index, layout, rank, owner, MU_HAS_PARAMS | MU_HAS_MOMENTS);
}

void mu_share_index_add_need(struct mu_share_index *index, const struct mu_layout *layout, uint32_t rank,
                             uint32_t owner)
{
    if (mu_layout_is_idle(layout, rank))
        return;
    if (layout->sharded) {
        add_entry(index, layout, MU_SHARE_PARAMS, rank, owner, MU_NEEDS_PARAMS);
        add_entry(index, layout, MU_SHARE_OWNED, rank, owner, MU_NEEDS_MOMENTS);
    } else {
        add_entry(index, layout, MU_SHARE_PARAMS, rank, owner, MU_NEEDS_PARAMS | MU_NEEDS_MOMENTS);
    }
    if (has_copy(index, layout, rank))
        add_entry(index, layout, MU_SHARE_COPY, rank, owner, MU_NEEDS_PARAMS);
    add_mirror(index, layout, rank, owner, MU_NEEDS_PARAMS | MU_NEEDS_MOMENTS);
}

static int order_of(uint32_t a, uint32_t b)
{
    return a < b ? -1 : a > b;
}

/* The same set: the same chunks, whatever dp and idle ranks say (unless they decide who owns what). */
static int compare_sets(const struct mu_share_entry *a, const struct mu_share_entry *b)
{
    const uint32_t x[] = {a->share, a->layout->tp, a->layout->pp, a->coords.p, a->coords.t, a->coords.d},
                   y[] = {b->share, b->layout->tp, b->layout->pp, b->coords.p, b->coords.t, b->coords.d};
    for (size_t i = 0; i < sizeof x / sizeof x[0]; i++) {
        if (x[i] != y[i])
            return order_of(x[i], y[i]);
    }
    if (a->share == MU_SHARE_OWNED && a->layout->dp != b->layout->dp)
        return order_of(a->layout->dp, b->layout->dp);
    /* Of the stages only its own one matters; a tied copy is the same for all. */
    for (uint32_t p = a->coords.p; a->share != MU_SHARE_COPY && p <= a->coords.p + 1; p++) {
        if (a->layout->stage_first[p] != b->layout->stage_first[p])
            return order_of(a->layout->stage_first[p], b->layout->stage_first[p]);
    }
    return 0;
}

static int compare_entries(const void *a, const void *b)
{
    const struct mu_share_entry *x = a, *y = b;
    int order = compare_sets(x, y);
    if (order == 0)
        order = order_of(x->owner, y->owner);
    return order ? order : order_of(x->roles, y->roles);
}

static int compare_u32(const void *a, const void *b)
{
    return order_of(*(const uint32_t *)a, *(const uint32_t *)b);
}

static enum mu_status find_sets(struct mu_share_index *index)
{
    uint32_t kept = 0;
    if (index->entry_count)
        qsort(index->entries, index->entry_count, sizeof *index->entries, compare_entries);
    for (uint32_t i = 0; i < index->entry_count; i++) { /* one entry for each owner of a set */
        struct mu_share_entry *last = kept ? &index->entries[kept - 1] : NULL;
        bool same_set = last && compare_sets(last, &index->entries[i]) == 0;
        if (same_set && last->owner == index->entries[i].owner) {
            last->roles |= index->entries[i].roles;
        } else {
            index->set_count += !same_set;
            index->entries[kept++] = index->entries[i];
        }
    }
    index->entry_count = kept;
    index->set_entries = new_array(index->set_count + 1u, sizeof *index->set_entries);
    index->set_ranges = new_array(index->set_count + 1u, sizeof *index->set_ranges);
    index->entry_sets = new_array(kept, sizeof *index->entry_sets);
    if (!index->set_entries || !index->set_ranges || !index->entry_sets)
        return MU_ERR_NO_MEMORY;
    uint32_t set = 0;
    for (uint32_t i = 0; i < kept; i++) {
        if (i == 0 || compare_sets(&index->entries[i - 1], &index->entries[i]) != 0)
            index->set_entries[set++] = i;
        index->entry_sets[i] = set - 1;
    }
    index->set_entries[set] = kept;
    return MU_OK;
}

/* Each set's runs of chunks. */
static enum mu_status find_runs(struct mu_share_index *index)
{
    for (uint32_t set = 0; set < index->set_count; set++) {
        if (index->range_room - index->range_count < MU_RUNS_MAX) {
            uint32_t room = index->range_room * 2 + MU_RUNS_MAX;
            struct mu_chunk_run *more = realloc(index->ranges, room * sizeof *more);
            if (!more)
                return MU_ERR_NO_MEMORY;
            index->ranges = more;
            index->range_room = room;
        }
        const struct mu_share_entry *entry = &index->entries[index->set_entries[set]];
        index->set_ranges[set] = index->range_count;
        index->range_count += mu_layout_runs(index->model, entry->layout, mu_layout_rank(entry->layout, entry->coords),
                                             entry->share, index->ranges + index->range_count);
    }
    index->set_ranges[index->set_count] = index->range_count;
    return MU_OK;
}

static enum mu_status find_bounds(struct mu_share_index *index)
{
    uint32_t count = 0, kept = 0;
    index->bounds = new_array(2 * (size_t)index->range_count + 2, sizeof *index->bounds);
    if (!index->bounds)
        return MU_ERR_NO_MEMORY;
    index->bounds[count++] = 0;
    index->bounds[count++] = index->model->chunk_count;
    for (uint32_t i = 0; i < index->range_count; i++) {
        index->bounds[count++] = index->ranges[i].first;
        index->bounds[count++] = index->ranges[i].first + index->ranges[i].count;
    }
    qsort(index->bounds, count, sizeof *index->bounds, compare_u32);
    for (uint32_t i = 0; i < count; i++) {
        if (kept == 0 || index->bounds[kept - 1] != index->bounds[i])
            index->bounds[kept++] = index->bounds[i];
    }
    MU_ASSERT(kept >= 2 && index->bounds[kept - 1] == index->model->chunk_count);
    index->atom_count = kept - 1;
    return MU_OK;
}

static uint32_t atom_at(const struct mu_share_index *index, uint32_t chunk)
{
    uint32_t low = 0, high = index->atom_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (index->bounds[middle] < chunk)
            low = middle + 1;
        else
            high = middle;
    }
    MU_ASSERT(index->bounds[low] == chunk);
    return low;
}

/* Runs of chunks become runs of atoms, and each atom learns its sets. */
static enum mu_status find_atoms(struct mu_share_index *index)
{
    uint32_t *first = index->atom_first = new_array(index->atom_count + 2u, sizeof *index->atom_first);
    if (!first)
        return MU_ERR_NO_MEMORY;
    size_t total = 0;
    for (uint32_t i = 0; i < index->range_count; i++) {
        struct mu_chunk_run *run = &index->ranges[i];
        uint32_t begin = atom_at(index, run->first), end = atom_at(index, run->first + run->count);
        *run = (struct mu_chunk_run){begin, end - begin};
        total += end - begin;
        for (uint32_t atom = begin; atom < end; atom++)
            first[atom + 2]++;
    }
    index->atom_sets = total <= UINT32_MAX ? new_array(total, sizeof *index->atom_sets) : NULL;
    if (!index->atom_sets)
        return MU_ERR_NO_MEMORY;
    for (uint32_t atom = 0; atom < index->atom_count; atom++)
        first[atom + 2] += first[atom + 1];
    for (uint32_t set = 0; set < index->set_count; set++) {
        for (uint32_t i = index->set_ranges[set]; i < index->set_ranges[set + 1]; i++) {
            for (uint32_t k = 0; k < index->ranges[i].count; k++)
                index->atom_sets[first[index->ranges[i].first + k + 1]++] = set;
        }
    }
    return MU_OK;
}

enum mu_status mu_share_index_build(struct mu_share_index *index)
{
    enum mu_status status = find_sets(index);
    if (!status)
        status = find_runs(index);
    if (!status)
        status = find_bounds(index);
    return status ? status : find_atoms(index);
}

enum mu_status mu_share_index_owners(const struct mu_share_index *index, uint32_t owner_count, uint32_t **ret_first,
                                     uint32_t **ret_entries)
{
    uint32_t *first = *ret_first = new_array(owner_count + 2u, sizeof *first);
    uint32_t *entries = *ret_entries = new_array(index->entry_count, sizeof *entries);
    if (!first || !entries)
        return MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < index->entry_count; i++)
        first[index->entries[i].owner + 2]++;
    for (uint32_t owner = 0; owner < owner_count; owner++)
        first[owner + 2] += first[owner + 1];
    for (uint32_t i = 0; i < index->entry_count; i++)
        entries[first[index->entries[i].owner + 1]++] = i;
    return MU_OK;
}

uint64_t mu_share_index_elements(const struct mu_share_index *index, uint32_t first, uint32_t count)
{
    return mu_model_elements_before(index->model, first + count) - mu_model_elements_before(index->model, first);
}

/* Coverage */

/* The atoms of `set` gain (1) or lose (-1) a set with a holder. Returns how many are left without any. */
static uint32_t change_atoms(const struct mu_share_index *index, uint32_t set, int change, uint32_t *atoms)
{
    uint32_t bare = 0;
    for (uint32_t i = index->set_ranges[set]; i < index->set_ranges[set + 1]; i++) {
        for (uint32_t k = 0; k < index->ranges[i].count; k++) {
            uint32_t *count = &atoms[index->ranges[i].first + k];
            *count = change > 0 ? *count + 1 : *count - 1;
            bare += *count == 0;
        }
    }
    return bare;
}

static uint32_t change_entry(struct mu_coverage *coverage, uint32_t entry, int change)
{
    const struct mu_share_index *index = &coverage->index;
    uint32_t set = index->entry_sets[entry], bare = 0;
    uint32_t *sets[] = {coverage->set_params, coverage->set_moments},
             *atoms[] = {coverage->atom_params, coverage->atom_moments};
    for (uint32_t kind = 0; kind < 2; kind++) {
        if (!(index->entries[entry].roles & (kind == 0 ? MU_HAS_PARAMS : MU_HAS_MOMENTS)))
            continue;
        uint32_t *alive = &sets[kind][set];
        bool turns = change > 0 ? *alive == 0 : *alive == 1;
        *alive = change > 0 ? *alive + 1 : *alive - 1;
        if (turns)
            bare += change_atoms(index, set, change, atoms[kind]);
    }
    return bare;
}

static enum mu_status fill_coverage(struct mu_coverage *coverage, const struct mu_reshard_holder *holders,
                                    uint32_t count)
{
    struct mu_share_index *index = &coverage->index;
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < holders[i].share_count; k++)
            mu_share_index_add_held(index, &holders[i].shares[k], i, true);
    }
    enum mu_status status = mu_share_index_build(index);
    if (!status)
        status = mu_share_index_owners(index, count, &coverage->owner_first, &coverage->owner_entries);
    if (status)
        return status;
    coverage->set_params = new_array(index->set_count, sizeof(uint32_t));
    coverage->set_moments = new_array(index->set_count, sizeof(uint32_t));
    coverage->atom_params = new_array(index->atom_count, sizeof(uint32_t));
    coverage->atom_moments = new_array(index->atom_count, sizeof(uint32_t));
    if (!coverage->set_params || !coverage->set_moments || !coverage->atom_params || !coverage->atom_moments)
        return MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < index->entry_count; i++)
        change_entry(coverage, i, 1);
    return MU_OK;
}

enum mu_status mu_coverage_init(struct mu_coverage *coverage, const struct mu_model_spec *model,
                                const struct mu_reshard_holder *holders, uint32_t count)
{
    *coverage = (struct mu_coverage){0};
    size_t shares = 0;
    for (uint32_t i = 0; i < count; i++)
        shares += holders[i].share_count;
    enum mu_status status = mu_share_index_init(&coverage->index, model, shares, 0);
    if (status)
        return status;
    status = fill_coverage(coverage, holders, count);
    if (status)
        mu_coverage_fini(coverage);
    return status;
}

void mu_coverage_fini(struct mu_coverage *coverage)
{
    mu_share_index_fini(&coverage->index);
    free(coverage->set_params);
    free(coverage->set_moments);
    free(coverage->atom_params);
    free(coverage->atom_moments);
    free(coverage->owner_first);
    free(coverage->owner_entries);
    *coverage = (struct mu_coverage){0};
}

bool mu_coverage_complete(const struct mu_coverage *coverage)
{
    for (uint32_t atom = 0; atom < coverage->index.atom_count; atom++) {
        if (coverage->atom_params[atom] == 0 || coverage->atom_moments[atom] == 0)
            return false;
    }
    return true;
}

bool mu_coverage_remove(struct mu_coverage *coverage, uint32_t owner)
{
    uint32_t first = coverage->owner_first[owner], end = coverage->owner_first[owner + 1], bare = 0;
    for (uint32_t i = first; i < end; i++)
        bare += change_entry(coverage, coverage->owner_entries[i], -1);
    for (uint32_t i = first; bare > 0 && i < end; i++)
        change_entry(coverage, coverage->owner_entries[i], 1);
    return bare == 0;
}
