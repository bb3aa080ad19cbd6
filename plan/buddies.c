#include "plan/buddies.h"

#include <stdlib.h>
#include <string.h>

enum {
    EXCHANGES_RANKS_MAX = 128, /* more are not searched for exchanges: that takes the cube of their number */
    EXCHANGES_ROUNDS_MAX = 4,
};

/* Units of tp ranks one behind the other; those of a group are consecutive, too. */
struct places {
    struct mu_layout *layout;
    uint32_t working, unit_count, group_size;
    const bool *is_free;
    uint32_t *hosts, *domains, *order; /* [working] each, as they stand now */
};

struct score {
    uint32_t apart, far; /* buddies on other hosts, in other domains */
};

static bool is_better(struct score a, struct score b)
{
    return a.apart != b.apart ? a.apart > b.apart : a.far > b.far;
}

static struct score judge(struct places *places)
{
    struct score score = {0, 0};
    struct mu_layout *layout = places->layout;
    layout->buddy_shift = mu_layout_buddy_shift(layout, places->hosts, places->domains, &score.apart);
    for (uint32_t rank = 0; rank < places->working && layout->buddy_shift > 0; rank++)
        score.far += places->domains[rank] != places->domains[mu_layout_buddy(layout, rank)];
    return score;
}

static bool unit_is_free(const struct places *places, uint32_t unit)
{
    for (uint32_t t = 0, tp = places->layout->tp; t < tp; t++) {
        if (!places->is_free[unit * tp + t])
            return false;
    }
    return true;
}

static void exchange(struct places *places, uint32_t a, uint32_t b)
{
    uint32_t *all[] = {places->hosts, places->domains, places->order}, tp = places->layout->tp;
    for (uint32_t i = 0; i < 3; i++) {
        for (uint32_t t = 0; t < tp; t++) {
            uint32_t value = all[i][a * tp + t];
            all[i][a * tp + t] = all[i][b * tp + t];
            all[i][b * tp + t] = value;
        }
    }
}

static bool comes_before(const struct places *places, uint32_t a, uint32_t b)
{
    uint32_t x = a * places->layout->tp, y = b * places->layout->tp;
    return places->domains[x] != places->domains[y] ? places->domains[x] < places->domains[y]
                                                    : places->hosts[x] < places->hosts[y];
}

/* The free units of each group, by insertion, in the places that they have. With blocks of hosts and a shift of the
 * largest block's size nobody's buddy is in the own block, unless one has more than half of all. */
static void sort_groups(struct places *places)
{
    for (uint32_t unit = 0; unit < places->unit_count; unit++) {
        uint32_t first = unit / places->group_size * places->group_size, at = unit;
        for (uint32_t before = unit; before-- > first && unit_is_free(places, at);) {
            if (!unit_is_free(places, before))
                continue;
            if (!comes_before(places, at, before))
                break;
            exchange(places, at, before);
            at = before;
        }
    }
}

static bool are_alike(const struct places *places, uint32_t a, uint32_t b)
{
    size_t tp = places->layout->tp, bytes = tp * sizeof *places->hosts;
    return memcmp(places->hosts + a * tp, places->hosts + b * tp, bytes) == 0 &&
           memcmp(places->domains + a * tp, places->domains + b * tp, bytes) == 0;
}

/* True: one helped. */
static bool try_exchanges(struct places *places, struct score *score)
{
    bool helped = false;
    for (uint32_t a = 0; a < places->unit_count; a++) {
        uint32_t end = (a / places->group_size + 1) * places->group_size;
        for (uint32_t b = a + 1; b < end && unit_is_free(places, a); b++) {
            if (!unit_is_free(places, b) || are_alike(places, a, b))
                continue;
            exchange(places, a, b);
            struct score next = judge(places);
            if (is_better(next, *score)) {
                *score = next;
                helped = true;
            } else {
                exchange(places, a, b);
            }
        }
    }
    return helped;
}

static void search(struct places *places, uint32_t *given)
{
    uint32_t working = places->working;
    struct score score = judge(places);
    if (places->layout->buddy_shift == 0 || (score.apart == working && score.far == working))
        return;
    memcpy(given, places->hosts, 3 * (size_t)working * sizeof *given);
    sort_groups(places);
    struct score sorted = judge(places);
    if (is_better(sorted, score))
        score = sorted;
    else
        memcpy(places->hosts, given, 3 * (size_t)working * sizeof *given);
    bool few = working <= EXCHANGES_RANKS_MAX;
    for (uint32_t round = 0; round < EXCHANGES_ROUNDS_MAX && few && score.apart < working; round++) {
        if (!try_exchanges(places, &score))
            break;
    }
    (void)judge(places);
}

enum mu_status mu_buddies_place(struct mu_layout *layout, const uint32_t *hosts, const uint32_t *domains,
                                const bool *is_free, uint32_t *ret_order)
{
    uint32_t working = mu_layout_working(layout);
    uint32_t *block = malloc(6 * (size_t)working * sizeof *block);
    if (!block)
        return MU_ERR_NO_MEMORY;
    struct places places = {.layout = layout,
                            .working = working,
                            .unit_count = layout->dp * layout->pp,
                            .group_size = layout->dp > 1 ? layout->dp : layout->pp,
                            .is_free = is_free,
                            .hosts = block,
                            .domains = block + working,
                            .order = block + 2 * (size_t)working};
    memcpy(places.hosts, hosts, working * sizeof *hosts);
    memcpy(places.domains, domains, working * sizeof *domains);
    for (uint32_t rank = 0; rank < working; rank++)
        places.order[rank] = rank;
    search(&places, block + 3 * (size_t)working);
    memcpy(ret_order, places.order, working * sizeof *ret_order);
    free(block);
    return MU_OK;
}
