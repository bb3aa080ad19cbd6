#include "plan/balance.h"

#include <stdlib.h>
#include <string.h>

#include "common/status.h"
#include "plan/plan.h"
#include "plan/text.h"
#include "plan/tree.h"

/* Slowest and fastest plausible leaf. A time outside is an error of measurement; the bounds also keep every quotient
 * below finite. */
#define SECONDS_MIN 1e-9
#define SECONDS_MAX 1e9

static bool is_measured(double seconds)
{
    return seconds >= SECONDS_MIN && seconds <= SECONDS_MAX;
}

static double fixed_of(const struct mu_balance_rank *rank)
{
    return rank->fixed_seconds >= 0.0 && rank->fixed_seconds <= SECONDS_MAX ? rank->fixed_seconds : 0.0;
}

/* Mean seconds per leaf of the measured ranks; 0 when there are none. */
static double mean_seconds(uint32_t world, const struct mu_balance_rank *ranks)
{
    double sum = 0.0;
    uint32_t measured = 0;
    for (uint32_t i = 0; i < world; i++) {
        if (is_measured(ranks[i].seconds_per_leaf)) {
            sum += ranks[i].seconds_per_leaf;
            measured++;
        }
    }
    return measured > 0 ? sum / measured : 0.0;
}

static double slope_of(const struct mu_balance_rank *rank, double mean)
{
    return is_measured(rank->seconds_per_leaf) ? rank->seconds_per_leaf : mean;
}

struct problem {
    uint32_t leaves, world;
    const struct mu_balance_rank *ranks;
    double mean;
    bool bounded; /* leaves_max holds */
};

/* Leaves that rank i finishes within `seconds`, at least one, at most all that the others leave over. */
static uint32_t count_within(const struct problem *p, uint32_t i, double seconds)
{
    uint32_t most = p->leaves - (p->world - 1), bound = p->ranks[i].leaves_max;
    if (p->bounded && bound > 0 && bound < most)
        most = bound;
    double count = (seconds - fixed_of(&p->ranks[i])) / slope_of(&p->ranks[i], p->mean);
    if (!(count >= 1.0))
        return 1;
    return count >= (double)most ? most : (uint32_t)count;
}

static uint64_t sum_within(const struct problem *p, double seconds)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < p->world; i++)
        sum += count_within(p, i, seconds);
    return sum;
}

static double from_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Non-negative doubles are ordered as their bits are: bisecting the bits ends at the smallest T itself after at most 64
 * halvings. Returns the bits of the smallest T with sum_within(T) >= leaves. */
static uint64_t smallest_time(const struct problem *p)
{
    const double ceiling = 1e19; /* > SECONDS_MAX * (leaves + 1) */
    uint64_t low = 0, high;      /* sum(low) < leaves <= sum(high) is kept, but for low = 0 */
    memcpy(&high, &ceiling, sizeof high);
    MU_ASSERT(sum_within(p, ceiling) >= p->leaves);
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (sum_within(p, from_bits(middle)) >= p->leaves)
            high = middle;
        else
            low = middle + 1;
    }
    return high;
}

static bool bounds_leave_room(uint32_t leaves, uint32_t world, const struct mu_balance_rank *ranks)
{
    uint64_t room = 0;
    for (uint32_t i = 0; i < world; i++)
        room += ranks[i].leaves_max > 0 ? ranks[i].leaves_max : leaves;
    return room >= leaves;
}

/* The counts at just below T, and what is missing given to the first ranks that gain at T. */
static void fill_plain(const struct problem *p, uint64_t time_bits, uint32_t *ret_counts)
{
    uint32_t missing = p->leaves;
    double before = from_bits(time_bits > 0 ? time_bits - 1 : 0);
    for (uint32_t i = 0; i < p->world; i++) {
        ret_counts[i] = count_within(p, i, before);
        MU_ASSERT(ret_counts[i] <= missing);
        missing -= ret_counts[i];
    }
    for (uint32_t i = 0; i < p->world && missing > 0; i++) {
        uint32_t gain = count_within(p, i, from_bits(time_bits)) - ret_counts[i];
        gain = gain < missing ? gain : missing;
        ret_counts[i] += gain;
        missing -= gain;
    }
    MU_ASSERT(missing == 0);
}

/* The multiple of the largest power of two in [low, high]. */
static uint32_t roundest(uint32_t low, uint32_t high)
{
    uint32_t best = high;
    for (uint32_t mask = 1; mask != 0 && mask <= high; mask <<= 1) {
        uint32_t candidate = high & ~(mask - 1);
        if (candidate < low)
            break;
        best = candidate;
    }
    return best;
}

/* Walks the ranks and ends each range at the roundest leaf that T still allows for this rank and all after it. Returns
 * the roots of all ranges; writes the counts when ret_counts is not NULL. */
static uint32_t fill_aligned(const struct problem *p, double seconds, uint32_t *ret_counts)
{
    uint64_t capacity_after = sum_within(p, seconds);
    uint32_t begin = 0, roots = 0;
    for (uint32_t i = 0; i < p->world; i++) {
        uint32_t most = count_within(p, i, seconds);
        capacity_after -= most;
        uint32_t ranks_after = p->world - 1 - i;
        uint64_t low = p->leaves > capacity_after ? p->leaves - capacity_after : 0;
        uint32_t high = begin + most;
        low = low > begin + 1u ? low : begin + 1u;
        high = high < p->leaves - ranks_after ? high : p->leaves - ranks_after;
        uint32_t end = ranks_after == 0 ? p->leaves : roundest((uint32_t)low, high);
        MU_ASSERT(end > begin && end - begin <= most);
        struct mu_tree_node nodes[MU_TREE_ROOTS_MAX];
        roots += mu_tree_roots(p->leaves, begin, end - begin, nodes);
        if (ret_counts)
            ret_counts[i] = end - begin;
        begin = end;
    }
    return roots;
}

void mu_balance_leaves(uint32_t leaves, uint32_t world, const struct mu_balance_rank *ranks, uint32_t *ret_counts)
{
    MU_ASSERT(world >= 1 && world <= leaves);
    struct problem p = {.leaves = leaves,
                        .world = world,
                        .ranks = ranks,
                        .mean = mean_seconds(world, ranks),
                        .bounded = bounds_leave_room(leaves, world, ranks)};
    if (p.mean == 0.0) {
        for (uint32_t i = 0; i < world; i++)
            mu_plan_leaf_range(leaves, world, NULL, i, &ret_counts[i]);
        return;
    }
    uint64_t time_bits = smallest_time(&p);
    fill_plain(&p, time_bits, ret_counts);
    if (fill_aligned(&p, from_bits(time_bits), NULL) < mu_balance_root_count(leaves, world, ret_counts))
        fill_aligned(&p, from_bits(time_bits), ret_counts);
}

uint32_t mu_balance_run_count(uint32_t world, const uint32_t *counts)
{
    uint32_t runs = 0;
    for (uint32_t i = 0; i < world; i++)
        runs += i == 0 || counts[i] != counts[i - 1];
    return runs;
}

void mu_balance_leaves_in_runs(uint32_t leaves, uint32_t world, const struct mu_balance_rank *ranks, uint32_t runs_max,
                               struct mu_balance_rank *blocks, uint32_t *ret_counts)
{
    double mean = mean_seconds(world, ranks);
    mu_balance_leaves(leaves, world, ranks, ret_counts);
    for (uint32_t block_count = runs_max / 2; mu_balance_run_count(world, ret_counts) > runs_max; block_count /= 2) {
        uint32_t size = block_count > 0 ? (world + block_count - 1) / block_count : world;
        for (uint32_t first = 0; first < world; first += size) {
            uint32_t end = world - first < size ? world : first + size;
            double slowest = 0;
            for (uint32_t i = first; i < end; i++)
                slowest = slope_of(&ranks[i], mean) > slowest ? slope_of(&ranks[i], mean) : slowest;
            for (uint32_t i = first; i < end; i++)
                blocks[i] = (struct mu_balance_rank){.seconds_per_leaf = block_count > 0 ? slowest : 0};
        }
        mu_balance_leaves(leaves, world, blocks, ret_counts); /* none measured: two runs at most */
    }
}

/* ---- by measured speeds ---- */

/* A speed that differs by less than this from the median is noise: the split is then the one with the fewest subtree
 * roots. */
static const double SPEED_NOISE = 0.15;

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double mu_balance_median(uint32_t count, double *seconds)
{
    uint32_t measured = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (seconds[i] > 0)
            seconds[measured++] = seconds[i];
    }
    if (measured == 0)
        return 0;
    qsort(seconds, measured, sizeof *seconds, compare_double);
    return seconds[(measured - 1) / 2];
}

void mu_balance_by_seconds(uint32_t leaves, uint32_t replicas, const double *seconds, uint32_t *ret_counts)
{
    struct mu_balance_rank speeds[MU_COUNTED_REPLICAS_MAX], blocks[MU_COUNTED_REPLICAS_MAX];
    double sorted[MU_COUNTED_REPLICAS_MAX];
    memcpy(sorted, seconds, replicas * sizeof *sorted);
    double median = mu_balance_median(replicas, sorted);
    for (uint32_t d = 0; d < replicas; d++) {
        double relative = median > 0 ? seconds[d] / median : 0;
        bool ordinary = !(relative > 0) || (relative > 1 - SPEED_NOISE && relative < 1 + SPEED_NOISE);
        speeds[d] = (struct mu_balance_rank){.seconds_per_leaf = ordinary ? 1 : relative};
    }
    mu_balance_leaves_in_runs(leaves, replicas, speeds, MU_LEAF_RUNS_MAX, blocks, ret_counts);
}

double mu_balance_step_seconds(uint32_t replicas, const double *seconds, const uint32_t *counts)
{
    double slowest = 0;
    for (uint32_t d = 0; d < replicas; d++)
        slowest = seconds[d] * counts[d] > slowest ? seconds[d] * counts[d] : slowest;
    return slowest;
}

double mu_balance_saved(uint32_t replicas, const double *seconds, const uint32_t *now, const uint32_t *next)
{
    double before = mu_balance_step_seconds(replicas, seconds, now);
    double saved = before - mu_balance_step_seconds(replicas, seconds, next);
    return saved * 100.0 >= before * MU_BALANCE_GAIN_MIN_PERCENT ? saved : 0.0;
}

uint32_t mu_balance_root_count(uint32_t leaves, uint32_t world, const uint32_t *counts)
{
    uint32_t roots = 0, first = 0;
    for (uint32_t i = 0; i < world; i++) {
        uint32_t count;
        if (counts)
            count = counts[i];
        else
            mu_plan_leaf_range(leaves, world, NULL, i, &count);
        struct mu_tree_node nodes[MU_TREE_ROOTS_MAX];
        roots += mu_tree_roots(leaves, first, count, nodes);
        first += count;
    }
    MU_ASSERT(first == leaves);
    return roots;
}

/* The number of leaves nearest to `leaves` (as a ratio) that gives every rank one whole aligned subtree: world times a
 * power of two. */
static uint32_t better_leaves(uint32_t leaves, uint32_t world)
{
    uint64_t below = world;
    while (below * 2 <= leaves)
        below *= 2;
    uint64_t above = below * 2;
    bool take_above = below < world || (uint64_t)leaves * leaves > below * above;
    if (above > MU_LEAVES_MAX)
        take_above = false;
    return (uint32_t)(take_above ? above : below);
}

static void put_percent(struct mu_text *text, uint64_t part, uint64_t whole)
{
    mu_text_put_uint(text, (100 * part + whole / 2) / whole);
    mu_text_put(text, " %");
}

bool mu_plan_leaf_warning(uint32_t leaves, uint32_t world, char *out, size_t size_bytes)
{
    MU_ASSERT(leaves >= 1 && world >= 1 && world <= leaves);
    struct mu_text text;
    mu_text_init(&text, out, size_bytes);
    uint64_t slots =
        (uint64_t)((leaves + world - 1) / world) * world; /* leaf times that all ranks take until the slowest is done */
    uint32_t roots = mu_balance_root_count(leaves, world, NULL);
    bool idle = (slots - leaves) * 20 > slots, traffic = world > 1 && (uint64_t)roots * 2 > (uint64_t)world * 3;
    if (!idle && !traffic)
        return false;
    mu_text_put_uint(&text, leaves);
    mu_text_put(&text, " leaves fit ");
    mu_text_put_uint(&text, world);
    mu_text_put(&text, " workers poorly: ");
    if (idle) {
        put_percent(&text, slots - leaves, slots);
        mu_text_put(&text, " of the compute time is waiting for the workers with one leaf more");
    }
    if (traffic) {
        uint64_t tenths = (10ull * roots + world / 2) / world;
        mu_text_put(&text, idle ? ", and " : "");
        mu_text_put(&text, "gradients travel as ");
        mu_text_put_uint(&text, tenths / 10);
        mu_text_put(&text, ".");
        mu_text_put_uint(&text, tenths % 10);
        mu_text_put(&text, " partial sums per worker instead of 1");
    }
    mu_text_put(&text, "; ");
    mu_text_put_uint(&text, better_leaves(leaves, world));
    mu_text_put(&text, " leaves would fit (batch.sequences / (micro * accumulate))");
    return true;
}
