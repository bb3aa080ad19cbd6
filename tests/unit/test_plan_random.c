/* links: mu_plan */
#include "tests/unit/plan_testing.h"

/* What a member has of a step, chunk by chunk: the plain reference. */
enum { CHUNKS_MAX = 256 };
struct marks {
    bool params[CHUNKS_MAX], moments[CHUNKS_MAX], copy[CHUNKS_MAX];
};

static void mark(const struct fixture *f, const struct mu_layout *layout, uint32_t rank, enum mu_share share, bool *out)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(&f->model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < runs[i].count; k++)
            out[runs[i].first + k] = true;
    }
}

static void mark_member(const struct fixture *f, uint32_t member, uint64_t step, bool known_result, struct marks *out)
{
    const struct mu_held *held = &f->members[member].held;
    memset(out, 0, sizeof *out);
    bool rolls = held->has_state && held->has_gradient && held->step + 1 == step && known_result;
    if (!held->has_state || (held->step != step && !rolls))
        return;
    for (uint32_t k = 0; k < (rolls ? 1 : held->share_count); k++) {
        const struct mu_held_share *share = &held->shares[k];
        bool owned = share->owned_only || (rolls && share->layout.sharded);
        mark(f, &share->layout, share->rank, owned ? MU_SHARE_OWNED : MU_SHARE_PARAMS, out->params);
        mark(f, &share->layout, share->rank, MU_SHARE_MOMENTS, out->moments);
        if (!owned && !rolls)
            mark(f, &share->layout, share->rank, MU_SHARE_COPY, out->copy);
    }
}

static bool whole_without(const struct fixture *f, const struct marks *marks, uint32_t without)
{
    for (uint32_t chunk = 0; chunk < f->model.chunk_count; chunk++) {
        bool params = false, moments = false;
        for (uint32_t i = 0; i < f->input.member_count; i++) {
            params = params || (i != without && marks[i].params[chunk]);
            moments = moments || (i != without && marks[i].moments[chunk]);
        }
        if (!params || !moments)
            return false;
    }
    return true;
}

static uint64_t bytes_to_receive(const struct fixture *f, const struct marks *has, uint32_t rank)
{
    struct marks needs = {0};
    uint64_t bytes = 0;
    mark(f, &f->plan.layout, rank, MU_SHARE_PARAMS, needs.params);
    mark(f, &f->plan.layout, rank, MU_SHARE_COPY, needs.params);
    mark(f, &f->plan.layout, rank, MU_SHARE_MOMENTS, needs.moments);
    for (uint32_t chunk = 0; chunk < f->model.chunk_count; chunk++) {
        uint64_t size = 4 * mu_model_chunk(&f->model, chunk).size;
        bytes += (needs.params[chunk] && !has->params[chunk] && !has->copy[chunk] ? size : 0) +
                 (needs.moments[chunk] && !has->moments[chunk] ? 2 * size : 0);
    }
    return bytes;
}

/* Fewest bytes over all ways to give the working ranks to members that do not leave. */
static uint64_t best_assignment(const struct fixture *f, const struct marks *marks)
{
    uint32_t count = f->input.member_count, working = mu_layout_working(&f->plan.layout);
    uint64_t *best = malloc(sizeof *best << count), least = UINT64_MAX;
    assert_non_null(best);
    for (uint32_t set = 0; set < 1u << count; set++)
        best[set] = set == 0 ? 0 : UINT64_MAX;
    for (uint32_t set = 0; set < 1u << count; set++) {
        uint32_t rank = (uint32_t)__builtin_popcount(set);
        if (best[set] == UINT64_MAX)
            continue;
        if (rank == working) {
            least = best[set] < least ? best[set] : least;
            continue;
        }
        for (uint32_t i = 0; i < count; i++) {
            if ((set >> i & 1) || f->members[i].leaving)
                continue;
            uint64_t bytes = best[set] + bytes_to_receive(f, &marks[i], rank);
            if (bytes < best[set | 1u << i])
                best[set | 1u << i] = bytes;
        }
    }
    free(best);
    return least;
}

/* The newest step that the members have together, by trying all. Returns false when there is none at or above the
 * checkpoint. */
static bool reference_start(const struct fixture *f, struct marks *marks, uint64_t *ret_step)
{
    for (uint64_t step = 20; step > 0; step--) {
        bool known = false;
        if (f->input.checkpoint && step < f->input.checkpoint_step)
            return false;
        for (uint32_t i = 0; i < f->input.member_count; i++)
            known = known || (f->members[i].held.has_result && f->members[i].held.result.step == step - 1);
        for (uint32_t i = 0; i < f->input.member_count; i++)
            mark_member(f, i, step, known, &marks[i]);
        if (whole_without(f, marks, UINT32_MAX)) {
            *ret_step = step;
            return true;
        }
    }
    return false;
}

static struct mu_held random_held(uint64_t *seed, const struct mu_layout *old, uint32_t rank)
{
    struct mu_held held = at_rank(10 + mu_splitmix64(seed) % 2, old, rank);
    if (held.step == 10) {
        held.has_gradient = mu_splitmix64(seed) % 4 > 0;
        held.has_result = mu_splitmix64(seed) % 2;
        held.result = result_of(mu_splitmix64(seed) % 2 ? 10 : 9);
    } else {
        held.shares[0].owned_only = old->sharded && mu_splitmix64(seed) % 2;
    }
    if (mu_splitmix64(seed) % 4 == 0) { /* prepared for a generation that never ran */
        struct mu_layout next = make_layout(1u << mu_splitmix64(seed) % 2, 1, 2, old->sharded);
        held.shares[held.share_count++] =
            (struct mu_held_share){.layout = next, .rank = (uint32_t)(mu_splitmix64(seed) % mu_layout_working(&next))};
    }
    return held;
}

static void random_input(struct fixture *f, uint64_t *seed, int round)
{
    uint32_t count = 1 + (uint32_t)(mu_splitmix64(seed) % 10);
    bool sharded = round % 3 == 0;
    setup(f, count, 64, 1, 64);
    f->spec.parallel.tp = 1u << mu_splitmix64(seed) % 2;
    f->spec.parallel.pp = 1 + (uint32_t)(mu_splitmix64(seed) % 2);
    f->spec.parallel.optimizer_sharding = sharded;
    f->spec.workers.max = 4 + (uint32_t)(mu_splitmix64(seed) % 7);
    f->spec.workers.spares = (uint32_t)(mu_splitmix64(seed) % 2);
    struct mu_layout old = make_layout(f->spec.parallel.tp, f->spec.parallel.pp, 1, sharded);
    if (round % 2)
        old = make_layout(1u << mu_splitmix64(seed) % 3, 1 + (uint32_t)(mu_splitmix64(seed) % 2), 1, sharded);
    old.dp = 1 + (uint32_t)(mu_splitmix64(seed) % 3);
    f->input.has_old_layout = true;
    f->input.old_layout = old;
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        next += mu_splitmix64(seed) % 8 == 0; /* lost */
        f->members[i].host = (uint32_t)(mu_splitmix64(seed) % 4);
        f->members[i].leaving = mu_splitmix64(seed) % 8 == 0;
        if (next < mu_layout_working(&old) && mu_splitmix64(seed) % 8)
            f->members[i].held = random_held(seed, &old, next++);
    }
    if (mu_splitmix64(seed) % 2) {
        f->input.checkpoint = 3;
        f->input.checkpoint_step = 9 + mu_splitmix64(seed) % 3;
    }
}

static void check_ranks(const struct fixture *f, const struct marks *marks, bool from_members)
{
    bool used[MEMBERS] = {0};
    uint32_t working = mu_layout_working(&f->plan.layout), wanted, eligible = 0;
    for (uint32_t i = 0; i < f->input.member_count; i++)
        eligible += !f->members[i].leaving;
    wanted = mu_plan_wanted(&f->spec, eligible - f->plan.left_out);
    assert_true(working <= wanted && working % (f->spec.parallel.tp * f->spec.parallel.pp) == 0);
    for (uint32_t rank = 0; rank < mu_layout_world(&f->plan.layout); rank++) {
        uint32_t member = f->ranks[rank].member;
        assert_false(used[member]);
        used[member] = true;
        if (rank < working)
            assert_false(f->members[member].leaving);
        else
            assert_true(from_members); /* only to copy from */
    }
    for (uint32_t i = 0; from_members && i < f->input.member_count; i++) {
        if (!whole_without(f, marks, i))
            assert_true(used[i]);
    }
}

static void test_random_histories(void **state)
{
    (void)state;
    uint64_t seed = 99, moved = 0, least = 0;
    uint32_t held = 0, elsewhere = 0, nothing = 0, idle = 0, worse = 0;
    static struct marks marks[MEMBERS];
    for (int round = 0; round < 3000; round++) {
        struct fixture f;
        random_input(&f, &seed, round);
        f.input.may_initialise = false;
        make(&f);
        uint64_t step = 0;
        bool from_members = reference_start(&f, marks, &step);
        if (f.plan.status == MU_ERR_UNAVAILABLE) {
            uint32_t eligible = 0;
            for (uint32_t i = 0; i < f.input.member_count; i++)
                eligible += !f.members[i].leaving;
            assert_true(mu_plan_wanted(&f.spec, eligible) < f.spec.parallel.tp * f.spec.parallel.pp);
            assert_true(f.plan.text[0]);
            continue;
        }
        assert_int_equal(f.plan.status, from_members || f.input.checkpoint ? MU_OK : MU_ERR_NOT_FOUND);
        if (f.plan.status) {
            nothing++;
            continue;
        }
        assert_int_equal(f.plan.start_step, from_members ? step : f.input.checkpoint_step);
        check_ranks(&f, marks, from_members);
        held += from_members;
        elsewhere += !from_members;
        idle += f.plan.layout.idle > 0;
        if (from_members) {
            uint64_t bytes = 0;
            for (uint32_t rank = 0; rank < mu_layout_working(&f.plan.layout); rank++)
                bytes += bytes_to_receive(&f, &marks[f.ranks[rank].member], rank);
            assert_int_equal(f.plan.reshard.bytes, bytes);
            assert_int_equal(f.plan.reshard.minimum_bytes, bytes);
            uint64_t best = best_assignment(&f, marks);
            assert_true(best <= bytes);
            worse += best < bytes;
            moved += bytes;
            least += best;
        }
        teardown(&f);
    }
    print_message("%u from members (%u with idle ranks, %u not the best placement, %.3f of the least bytes), %u from "
                  "checkpoints, %u from nowhere\n",
                  held, idle, worse, (double)moved / (double)least, elsewhere, nothing);
    assert_true(held > 500 && elsewhere > 100 && nothing > 100 && idle > 50);
    assert_true((double)moved < 1.05 * (double)least);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* What is asked of the heap; not counted under sanitizers, which have their own. */
static size_t asked_for;

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *block, size_t size);

void *malloc(size_t size)
{
    asked_for += size;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    asked_for += count * size;
    return __libc_calloc(count, size);
}

void *realloc(void *block, size_t size)
{
    asked_for += size;
    return __libc_realloc(block, size);
}
#endif

/* Twice: the plan is the same, and so is the memory that it takes. */
static void plan_large(const char *what, struct mu_layout old, uint32_t tp, uint32_t pp, uint32_t lost)
{
    enum { LARGE = 16384, LARGE_MEMORY = 1 << 28 };
    struct fixture f;
    setup(&f, 0, LARGE, 1, LARGE);
    f.spec.model = (struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                            .layers = 128,
                                            .heads = 128,
                                            .kv_heads = 8,
                                            .channels = 16384,
                                            .context = 8192,
                                            .vocab = 128256,
                                            .hidden = 53248,
                                            .slices = 8};
    mu_model_config_resolve(&f.spec.model);
    f.spec.parallel.tp = tp;
    f.spec.parallel.pp = pp;
    f.spec.parallel.optimizer_sharding = old.sharded;
    f.spec.parallel.redundancy = strstr(what, "buddies") ? MU_REDUNDANCY_BUDDY : MU_REDUNDANCY_NONE;
    old.buddy_shift = f.spec.parallel.redundancy == MU_REDUNDANCY_BUDDY;
    f.input.may_initialise = false;
    f.input.has_old_layout = true;
    f.input.old_layout = old;
    struct mu_plan_member *members = calloc(LARGE, sizeof *members);
    f.plan.ranks = calloc(LARGE, sizeof *f.plan.ranks);
    assert_true(members && f.plan.ranks);
    for (uint32_t i = 0; i < LARGE; i++) {
        members[i].host = i / 8;
        if (i != lost)
            members[i].held = at_rank(10, &old, i);
    }
    f.input.members = members;
    f.input.member_count = LARGE;
    size_t memory[2];
    uint64_t bytes[2];
    double seconds = 0;
    for (int round = 0; round < 2; round++) {
        mu_plan_fini(&f.plan);
        asked_for = 0;
        double start = seconds_now();
        mu_plan_make(&f.input, &f.plan);
        seconds = round == 0 || seconds_now() - start < seconds ? seconds_now() - start : seconds;
        memory[round] = asked_for;
        bytes[round] = f.plan.reshard.bytes;
        assert_int_equal(f.plan.status, MU_OK);
        assert_int_equal(f.plan.start_step, 10);
    }
    print_message("%s: %.3f s, %.1f MB of memory, tp %u x pp %u x dp %u, %u moves, %.3f TB\n", what, seconds,
                  (double)memory[0] * 1e-6, f.plan.layout.tp, f.plan.layout.pp, f.plan.layout.dp,
                  f.plan.reshard.move_count, (double)f.plan.reshard.bytes * 1e-12);
    assert_int_equal(memory[0], memory[1]);
    assert_int_equal(bytes[0], bytes[1]);
    assert_true(memory[0] < LARGE_MEMORY);
    teardown(&f);
    free(members);
    free(f.plan.ranks);
}

static struct mu_layout large_layout(uint32_t tp, uint32_t pp, uint32_t dp, bool sharded)
{
    struct mu_layout layout = {.tp = tp, .pp = pp, .dp = dp, .sharded = sharded};
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(128 * p / pp);
    return layout;
}

static void test_large_worlds_are_planned_quickly(void **state)
{
    (void)state;
    plan_large("16384 as they are", large_layout(8, 16, 128, false), 8, 16, UINT32_MAX);
    plan_large("one replaced", large_layout(8, 16, 128, false), 8, 16, 4711);
    plan_large("pp 16 to 8", large_layout(8, 16, 128, false), 8, 8, 4711);
    plan_large("tp 8 to 4, pp 16 to 32", large_layout(8, 16, 128, false), 4, 32, 4711);
    plan_large("pp 1, as they are", large_layout(8, 1, 2048, false), 8, 1, 4711);
    plan_large("sharded, as they are", large_layout(8, 64, 32, true), 8, 64, UINT32_MAX);
    plan_large("sharded, pp 64 to 128", large_layout(8, 64, 32, true), 8, 128, UINT32_MAX);
    plan_large("sharded, one replaced, with buddies", large_layout(8, 64, 32, true), 8, 64, 4711);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_histories),
        cmocka_unit_test(test_large_worlds_are_planned_quickly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
