/* Who holds and who needs which chunks, without naming each chunk for each rank.
 *
 * Equal parts of state are named once: a **set** is a column, a replica's OWNED part of one, or a tied copy, and lists
 * its **owners** (numbers the caller gives: ranks, members) with what they do with it. The ends of all runs of all sets
 * cut the model's chunks into **atoms**: every set contains an atom entirely or not at all. So the size is that of the
 * runs of the distinct sets, and replicas cost one entry each. Pure; one allocation per array, sizes follow from the
 * input alone. */
#ifndef MU_PLAN_SHARE_INDEX_H
#define MU_PLAN_SHARE_INDEX_H

#include "plan/reshard.h"

enum {
    MU_HAS_PARAMS = 1,
    MU_HAS_MOMENTS = 2,
    MU_HAS_COPY = 4, /* parameters to read only: no source for others */
    MU_NEEDS_PARAMS = 8,
    MU_NEEDS_MOMENTS = 16,
};

struct mu_share_entry {
    const struct mu_layout *layout; /* borrowed */
    enum mu_share share;            /* MU_SHARE_PARAMS, OWNED or COPY */
    struct mu_coords coords;        /* d is 0 unless OWNED */
    uint32_t owner, roles;
};

struct mu_share_index {
    const struct mu_model_spec *model;
    struct mu_share_entry *entries; /* by set, then owner; an owner once in a set */
    uint32_t entry_count, entry_room;

    uint32_t set_count;
    uint32_t *set_entries;       /* [set_count + 1]: first entry of each set */
    uint32_t *entry_sets;        /* [entry_count]: set of each entry */
    uint32_t *set_ranges;        /* [set_count + 1]: first range of each set */
    struct mu_chunk_run *ranges; /* runs of atoms of each set, ascending */
    uint32_t range_count, range_room;

    uint32_t atom_count;
    uint32_t *bounds;     /* [atom_count + 1]: first chunk of each atom, then the end of the last one */
    uint32_t *atom_first; /* [atom_count + 1]: where its sets begin in atom_sets */
    uint32_t *atom_sets;  /* numbers of the sets that contain it, ascending */
};

/* Room for `share_count` held shares and `need_count` ranks' needs. */
enum mu_status mu_share_index_init(struct mu_share_index *index, const struct mu_model_spec *model, size_t share_count,
                                   size_t need_count) MU_WARN_UNUSED;
void mu_share_index_fini(struct mu_share_index *index);

/* `layout` must stay where it is. A share of an idle rank is nothing. */
void mu_share_index_add_held(struct mu_share_index *index, const struct mu_held_share *share, uint32_t owner,
                             bool stale_copy);
void mu_share_index_add_need(struct mu_share_index *index, const struct mu_layout *layout, uint32_t rank,
                             uint32_t owner);
/* After the last one: sets and atoms. */
enum mu_status mu_share_index_build(struct mu_share_index *index) MU_WARN_UNUSED;

/* Entries of each owner, ascending: those of owner o are (*ret_entries)[(*ret_first)[o]] up to (*ret_first)[o + 1].
 * Both arrays are the caller's to free; NULL when memory runs out. */
enum mu_status mu_share_index_owners(const struct mu_share_index *index, uint32_t owner_count, uint32_t **ret_first,
                                     uint32_t **ret_entries) MU_WARN_UNUSED;

/* Elements of the chunks [first, first + count). */
uint64_t mu_share_index_elements(const struct mu_share_index *index, uint32_t first, uint32_t count);

/* Which chunks are held by whom among many holders, while holders are taken away one by one. */
struct mu_coverage {
    struct mu_share_index index;
    uint32_t *set_params, *set_moments;    /* [set]: holders left */
    uint32_t *atom_params, *atom_moments;  /* [atom]: sets with a holder left */
    uint32_t *owner_first, *owner_entries; /* [owner + 1], entries of each owner */
};

/* holders[count]; owner numbers are indices into it. They must stay where they are. */
enum mu_status mu_coverage_init(struct mu_coverage *coverage, const struct mu_model_spec *model,
                                const struct mu_reshard_holder *holders, uint32_t count) MU_WARN_UNUSED;
void mu_coverage_fini(struct mu_coverage *coverage);
/* Every chunk has a holder of its parameters and one of its moments. */
bool mu_coverage_complete(const struct mu_coverage *coverage);
/* Takes `owner` away, unless it is the last holder of something: then false, and nothing changes. */
bool mu_coverage_remove(struct mu_coverage *coverage, uint32_t owner);

#endif
