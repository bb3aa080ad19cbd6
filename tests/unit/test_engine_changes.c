/* links: mu_engine mu_storage mu_plan */
#include "engine_testing.h"

#include "worker/engine_internal.h"

/* Jobs that change their layout on the way, in good order or cut short anywhere, give the same weights.
 * MU_TEST_ALL_LAYOUTS=1: many more of them. */

static uint8_t reference_sha[32];

static struct fleet *new_fleet(bool sharded)
{
    struct fleet *fleet = fleet_of(&small_gpt2);
    fleet->spec.parallel.optimizer_sharding = sharded;
    return fleet;
}

static int setup_reference(void **state)
{
    (void)state;
    struct fleet *fleet = new_fleet(false);
    worker_start_on_cpu(fleet);
    start(fleet, 1);
    if (wait_parked(fleet, reference_sha) != MU_PARK_FINISHED)
        return -1;
    fleet_free(fleet);
    return 0;
}

static uint32_t rounds(uint32_t few, uint32_t many)
{
    const char *text = getenv("MU_TEST_ALL_LAYOUTS");
    return text && text[0] == '1' ? many : few;
}

static void check_finished(struct fleet *fleet)
{
    uint8_t sha[32];
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    assert_memory_equal(sha, reference_sha, 32);
}

static void go(struct fleet *fleet)
{
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assert_int_equal(mu_engine_run(fleet->workers[fleet->ranks[rank]].engine, fleet->generation), MU_OK);
}

static void wait_prepared(struct fleet *fleet)
{
    for (uint32_t rank = 0; rank < fleet->world; rank++) {
        const struct mu_worker_event *event =
            next_event(&fleet->workers[fleet->ranks[rank]], 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED);
        if (event->kind != MU_WE_PREPARED)
            fail_msg("prepare of rank %u failed: %s", rank, event->parked.text);
    }
}

/* The members take the wanted layout and step until `stop`. */
static void run_until(struct fleet *fleet, uint32_t members, uint64_t stop)
{
    assign(fleet, members);
    wait_prepared(fleet);
    pthread_mutex_lock(&fleet->lock);
    fleet->command = (struct command){.number = fleet->command.number + 1, .not_before_step = stop, .park = true};
    pthread_mutex_unlock(&fleet->lock);
    go(fleet);
    assert_int_equal(wait_parked(fleet, NULL), MU_PARK_COMMAND);
    for (uint32_t rank = 0; rank < fleet->world; rank++) {
        struct mu_held held = held_of(&fleet->workers[fleet->ranks[rank]]);
        assert_int_equal(held.step, stop);
        assert_int_equal(held.has_state, !mu_layout_is_idle(&fleet->layout, rank));
        assert_int_equal(held.share_count, held.has_state);
        if (!held.has_state)
            continue;
        assert_false(held.shares[0].owned_only);
        assert_true(mu_layout_equal(&held.shares[0].layout, &fleet->layout));
        assert_int_equal(held.shares[0].rank, rank);
    }
}

static void abort_all(struct fleet *fleet)
{
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assert_int_equal(mu_engine_abort(fleet->workers[fleet->ranks[rank]].engine, fleet->generation), MU_OK);
}

static void start_workers(struct fleet *fleet, uint32_t count)
{
    while (fleet->count < count)
        worker_start(fleet);
}

/* ---- in good order ---- */

struct link {
    uint32_t tp, pp, dp, idle, members;
};

static void run_chain(bool sharded, const struct link *links, uint32_t count)
{
    struct fleet *fleet = new_fleet(sharded);
    start_workers(fleet, WORKERS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        want_layout(fleet, links[i].tp, links[i].pp, links[i].dp, links[i].idle);
        if (i + 1 < count)
            run_until(fleet, links[i].members, i + 1);
        else
            start(fleet, links[i].members);
    }
    check_finished(fleet);
    assert_true(fleet->moved_bytes > 0);
    fleet_free(fleet);
}

static void test_changes_chain_of_layouts_same_bits(void **state)
{
    (void)state;
    static const struct link chain[] = {{1, 1, 2, 0, 0x03}, {2, 2, 1, 0, 0x0f}, {4, 1, 2, 0, 0xff},
                                        {1, 3, 2, 1, 0xfe}, {2, 1, 3, 0, 0x3f}, {1, 2, 1, 0, 0x81}};
    run_chain(false, chain, 6);
    run_chain(true, chain, 6);
}

/* ---- memory ---- */

/* Marks the pages under the runs of one share; returns how many were not marked yet. */
static uint64_t mark_pages(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                           enum mu_share share, uint64_t page_elements, bool *pages)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint64_t marked = 0;
    uint32_t count = mu_layout_runs(model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++) {
        struct mu_chunk tail = mu_model_chunk(model, runs[i].first + runs[i].count - 1);
        uint64_t page = mu_model_chunk(model, runs[i].first).offset / page_elements;
        for (; page * page_elements < tail.offset + tail.size; page++) {
            marked += !pages[page];
            pages[page] = true;
        }
    }
    return marked;
}

static uint64_t page_bytes_of(const struct worker *worker)
{
    uint64_t device = worker->engine->device->page_bytes;
    return device ? device : (uint64_t)sysconf(_SC_PAGESIZE);
}

static void check_memory(struct fleet *fleet, uint32_t rank, uint64_t *ret_moment_bytes)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &fleet->spec.model);
    const struct worker *worker = &fleet->workers[fleet->ranks[rank]];
    uint64_t page_bytes = page_bytes_of(worker), pages = model.flat_size * sizeof(float) / page_bytes + 1;
    bool *marked = calloc(pages, 2 * sizeof *marked);
    assert_non_null(marked);
    uint64_t params = 0, moments = 0;
    static const enum mu_share held[] = {MU_SHARE_PARAMS, MU_SHARE_COPY, MU_SHARE_MIRROR},
                               updated[] = {MU_SHARE_MOMENTS, MU_SHARE_MIRROR};
    for (uint32_t i = 0; i < 3; i++)
        params += mark_pages(&model, &fleet->layout, rank, held[i], page_bytes / sizeof(float), marked);
    for (uint32_t i = 0; i < 2; i++)
        moments += mark_pages(&model, &fleet->layout, rank, updated[i], page_bytes / sizeof(float), marked + pages);
    free(marked);
    const struct engine_state *state = &worker->engine->job.state;
    assert_int_equal(mu_space_committed_bytes(state->spaces[0]), params * page_bytes);
    for (uint32_t i = 1; i < ENGINE_KINDS; i++)
        assert_int_equal(mu_space_committed_bytes(state->spaces[i]), moments * page_bytes);
    *ret_moment_bytes = moments * page_bytes;
}

/* The allocator's account of parameters and moments is what the layout says of the rank's share, to the page, after
 * every change of it. Of a sharded optimizer each of dp replicas has total / dp, within two chunks; with buddies twice
 * that. */
static void test_changes_memory_is_that_of_the_share(void **state)
{
    (void)state;
    static const struct {
        struct link link;
        uint32_t buddy_shift, copies;
    } chain[] = {{{2, 2, 2, 0, 0xff}, 0, 0}, {{1, 1, 1, 0, 0x01}, 0, 1}, {{1, 1, 2, 0, 0x03}, 0, 1},
                 {{1, 1, 4, 0, 0x0f}, 0, 1}, {{1, 1, 4, 0, 0x0f}, 1, 2}, {{1, 2, 2, 0, 0x0f}, 1, 0}};
    static const struct mu_model_config model = {.family = MU_FAMILY_GPT2,
                                                 .layers = LAYERS,
                                                 .heads = 4,
                                                 .channels = 192,
                                                 .context = 16,
                                                 .vocab = 259,
                                                 .slices = 4};
    struct fleet *fleet = fleet_of(&model);
    fleet->spec.parallel.optimizer_sharding = true;
    fleet->spec.parallel.redundancy = MU_REDUNDANCY_BUDDY;
    fleet->spec.steps = 1 + sizeof chain / sizeof *chain;
    start_workers(fleet, WORKERS_MAX);
    uint64_t whole = 0, chunk_bytes = MU_CHUNK_ELEMENTS * sizeof(float), page_bytes = page_bytes_of(&fleet->workers[0]);
    for (uint32_t i = 0; i < sizeof chain / sizeof *chain; i++) {
        const struct link *link = &chain[i].link;
        want_layout(fleet, link->tp, link->pp, link->dp, link->idle);
        fleet->wanted.buddy_shift = (uint16_t)chain[i].buddy_shift;
        run_until(fleet, link->members, i + 1);
        uint64_t sum = 0, bytes;
        for (uint32_t rank = 0; rank < fleet->world; rank++) {
            check_memory(fleet, rank, &bytes);
            sum += bytes;
            if (chain[i].copies && whole)
                assert_in_range(bytes, chain[i].copies * (whole / link->dp - 2 * chunk_bytes),
                                chain[i].copies * (whole / link->dp + 2 * chunk_bytes + 2 * page_bytes));
        }
        whole = i == 1 ? sum : whole;
        if (chain[i].copies)
            assert_in_range(sum, chain[i].copies * whole, chain[i].copies * (whole + link->dp * page_bytes));
    }
    fleet_free(fleet);
}

static void test_changes_idle_rank_is_the_only_source(void **state)
{
    (void)state;
    /* Whoever holds everything leaves; later nobody is left of the first ones. */
    static const struct link chain[] = {{1, 1, 1, 0, 0x80}, {2, 1, 2, 1, 0x8f}, {1, 4, 1, 4, 0xff}, {1, 1, 2, 0, 0x03}};
    run_chain(false, chain, 4);
    run_chain(true, chain, 4);
}

static void test_changes_prepared_share_counts_although_it_never_ran(void **state)
{
    (void)state;
    for (uint32_t sharded = 0; sharded < 2; sharded++) {
        struct fleet *fleet = new_fleet(sharded);
        start_workers(fleet, 4);
        want_layout(fleet, 2, 2, 1, 0);
        run_until(fleet, 0xf, 2);
        want_layout(fleet, 1, 1, 4, 0);
        assign(fleet, 0xf);
        wait_prepared(fleet);
        for (uint32_t i = 0; i < 4; i++)
            assert_int_equal(held_of(&fleet->workers[i]).share_count, 2);
        abort_all(fleet);
        wait_revoked(fleet);
        for (uint32_t i = 0; i < 4; i++) {
            struct mu_held held = held_of(&fleet->workers[i]);
            assert_int_equal(held.share_count, 2);
            assert_int_equal(held.shares[0].layout.tp, 2);
            assert_int_equal(held.shares[1].layout.dp, 4);
        }
        /* One of four is enough now, when each has all; else what was reported first is still there too. */
        uint64_t before = fleet->moved_bytes;
        want_layout(fleet, 1, 2, 2, 0);
        start(fleet, 0xf);
        assert_true(sharded || fleet->moved_bytes == before);
        check_finished(fleet);
        fleet_free(fleet);
    }
}

/* ---- cut short ---- */

static uint64_t slowest_us, revoked, within_10_ms;

/* Everybody is revoked at once. 10 ms until the last one has parked on a quiet machine; this one may be busy. */
static void revoke_all(struct fleet *fleet)
{
    uint64_t begin_us = mu_clock_mono_us();
    abort_all(fleet);
    wait_revoked(fleet);
    uint64_t took_us = mu_clock_mono_us() - begin_us;
    slowest_us = took_us > slowest_us ? took_us : slowest_us;
    within_10_ms += took_us < 10000;
    revoked++;
}

static void random_layout(struct fleet *fleet, uint64_t *seed, uint32_t members)
{
    for (;;) {
        uint32_t tp = 1u << mu_splitmix64(seed) % 3, pp = 1 + (uint32_t)(mu_splitmix64(seed) % 3),
                 dp = 1 + (uint32_t)(mu_splitmix64(seed) % 3);
        if (tp * pp * dp > members)
            continue;
        uint32_t idle = members - tp * pp * dp;
        want_layout(fleet, tp, pp, dp, mu_splitmix64(seed) % 2 ? idle : 0);
        return;
    }
}

/* Revoked again and again after a random time, then other layouts, sometimes without a worker or with a new one. */
static void run_torn(uint64_t seed, bool sharded)
{
    struct fleet *fleet = new_fleet(sharded);
    start_workers(fleet, 7);
    uint32_t members = 0x7f;
    for (uint32_t round = 0; round < 8; round++) {
        random_layout(fleet, &seed, (uint32_t)__builtin_popcount(members));
        assign(fleet, members);
        bool prepared = mu_splitmix64(&seed) % 4 != 0;
        if (prepared) {
            wait_prepared(fleet);
            go(fleet);
        }
        usleep((useconds_t)(mu_splitmix64(&seed) % (prepared ? 20000 : 3000)));
        revoke_all(fleet);
        if (round == 4) {
            worker_stop(fleet, 1);
            members &= ~2u;
            worker_start(fleet);
            members |= 0x80;
        }
    }
    random_layout(fleet, &seed, (uint32_t)__builtin_popcount(members));
    start(fleet, members);
    check_finished(fleet);
    fleet_free(fleet);
}

static void test_changes_torn_anywhere_same_bits(void **state)
{
    (void)state;
    uint32_t count = rounds(SANITIZED ? 1 : 3, 40);
    for (uint32_t i = 0; i < count; i++) {
        run_torn(100 + i, false);
        run_torn(500 + i, true);
    }
}

/* Like a coordinator with the real planner: workers come, leave in good order, die; everybody is revoked at any time.
 */
static void run_planned(uint64_t seed, bool sharded, uint32_t tp, uint32_t pp)
{
    struct fleet *fleet = new_fleet(sharded);
    fleet->planned = true;
    fleet->spec.parallel.tp = tp;
    fleet->spec.parallel.pp = pp;
    start_workers(fleet, 5);
    uint32_t members = 0x1f;
    for (uint32_t round = 0; round < 7; round++) {
        assign(fleet, members);
        if (mu_splitmix64(&seed) % 5 != 0) {
            wait_prepared(fleet);
            go(fleet);
            usleep((useconds_t)(mu_splitmix64(&seed) % 20000));
        }
        revoke_all(fleet);
        uint32_t event = (uint32_t)(mu_splitmix64(&seed) % 4), who = (uint32_t)(mu_splitmix64(&seed) % fleet->count);
        members &= ~fleet->leaving; /* they have given away what they held */
        fleet->leaving = 0;
        bool may_lose = (uint32_t)__builtin_popcount(members) > tp * pp && (members >> who & 1);
        if (event == 0 && may_lose) {
            worker_stop(fleet, who);
            members &= ~(1u << who);
        } else if (event == 1 && may_lose) {
            fleet->leaving = 1u << who;
        } else if (event == 2 && fleet->count < WORKERS_MAX) {
            members |= 1u << worker_start(fleet);
        }
    }
    members &= ~fleet->leaving;
    fleet->leaving = 0;
    start(fleet, members);
    check_finished(fleet);
    fleet_free(fleet);
}

static void test_changes_planned_same_bits(void **state)
{
    (void)state;
    static const uint32_t degrees[][2] = {{2, 2}, {1, 3}, {4, 1}, {1, 2}, {2, 1}, {1, 1}};
    uint32_t count = rounds(SANITIZED ? 3 : 6, 60);
    for (uint32_t i = 0; i < count; i++)
        run_planned(900 + i, (i / 6 + i) % 2, degrees[i % 6][0], degrees[i % 6][1]);
    print_message("%u revokes: %u answered within 10 ms, the slowest after %u us\n", (unsigned)revoked,
                  (unsigned)within_10_ms, (unsigned)slowest_us);
}

static void let_go(struct fleet *fleet)
{
    pthread_mutex_lock(&fleet->lock);
    fleet->holding = fleet->trigger_holds = false;
    fleet->trigger = TRIGGER_NONE;
    pthread_cond_broadcast(&fleet->changed);
    pthread_mutex_unlock(&fleet->lock);
}

/* Worker `index` stands still in its callback; a moment later everybody else waits for it. */
static void hold_and_start(struct fleet *fleet, enum trigger_point point, uint32_t index, uint32_t members)
{
    fleet->trigger_holds = true;
    set_trigger(fleet, point, index, 2);
    start(fleet, members);
    pthread_mutex_lock(&fleet->lock);
    while (!fleet->holding)
        pthread_cond_wait(&fleet->changed, &fleet->lock);
    pthread_mutex_unlock(&fleet->lock);
    for (uint32_t rank = 0; rank < fleet->world; rank++) {
        if (fleet->ranks[rank] == index)
            continue;
        uint64_t counter, deadline_us = mu_clock_mono_us() + PATIENCE_S * 1000000ull;
        for (bool waiting = false; !waiting && mu_clock_mono_us() < deadline_us; usleep(1000))
            mu_engine_progress(fleet->workers[fleet->ranks[rank]].engine, &counter, &waiting);
    }
    usleep(20000);
}

/* A worker may have parked already because another one was quicker to leave. */
static void wait_answer(struct worker *worker)
{
    enum mu_park_reason reason;
    do
        reason = next_event(worker, 1u << MU_WE_PARKED)->parked.reason;
    while (reason == MU_PARK_PEER);
    assert_int_equal(reason, MU_PARK_REVOKED);
}

/* All but the one that stands still must answer at once, whatever they wait for. */
static void check_abort_while_held(struct fleet *fleet, uint32_t held)
{
    uint64_t begin_us = mu_clock_mono_us();
    abort_all(fleet);
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        if (fleet->ranks[rank] != held)
            wait_answer(&fleet->workers[fleet->ranks[rank]]);
    assert_true(mu_clock_mono_us() - begin_us < 1000000); /* 10 ms on a quiet machine; this one may be busy */
    let_go(fleet);
    wait_answer(&fleet->workers[held]);
}

static void test_changes_abort_while_waiting_in_tensor_exchange_and_pipeline(void **state)
{
    (void)state;
    static const uint32_t layouts[][2] = {{2, 1}, {4, 1}, {1, 3}, {2, 2}, {2, 3}};
    for (uint32_t i = 0; i < 5; i++) {
        struct fleet *fleet = new_fleet(i % 2);
        uint32_t tp = layouts[i][0], pp = layouts[i][1], count = tp * pp, held = tp * (pp - 1);
        start_workers(fleet, count);
        want_layout(fleet, tp, pp, 1, 0);
        hold_and_start(fleet, TRIGGER_LEAF, held, (1u << count) - 1); /* leaves are reported by the last stage */
        check_abort_while_held(fleet, held);
        for (uint32_t k = 0; k < count; k++)
            assert_int_equal(held_of(&fleet->workers[k]).step, 0);
        want_layout(fleet, 1, 2, 1, 0);
        start(fleet, 3);
        check_finished(fleet);
        fleet_free(fleet);
    }
}

static void test_changes_abort_in_a_gather_leaves_owned_parts(void **state)
{
    (void)state;
    for (uint32_t pp = 1; pp <= 2; pp++) {
        struct fleet *fleet = new_fleet(true);
        uint32_t count = 3 * pp;
        start_workers(fleet, count);
        want_layout(fleet, 1, pp, 3, 0);
        hold_and_start(fleet, TRIGGER_APPLIED, 1, (1u << count) - 1);
        check_abort_while_held(fleet, 1);
        for (uint32_t i = 0; i < count; i++) {
            struct mu_held held = held_of(&fleet->workers[i]);
            assert_true(held.has_state);
            if (held.step == 1) { /* the abort came before its update: it rolls forward */
                assert_true(held.has_gradient && held.has_result && i != 1);
                continue;
            }
            assert_true(held.step == 2 && !held.has_gradient);
            bool column = i / 3 == 0; /* replicas of the one that stood still, itself among them */
            assert_true(held.shares[0].owned_only || !column);
        }
        /* Nothing is lost: every part is of one owner. */
        want_layout(fleet, 2, 1, 1, count - 2);
        run_until(fleet, (1u << count) - 1, 3);
        assert_int_equal(fleet->applied[1], count);
        want_layout(fleet, 1, 1, 2, 0);
        start(fleet, 3);
        check_finished(fleet);
        fleet_free(fleet);
    }
}

/* While the tied copy is on its way a replica of the last stage still has its whole column, and says so. */
static void test_changes_column_counts_while_the_tied_copy_is_missing(void **state)
{
    (void)state;
    struct fleet *fleet = new_fleet(false);
    start_workers(fleet, 4);
    want_layout(fleet, 1, 2, 2, 0);
    hold_and_start(fleet, TRIGGER_APPLIED, 0, 0xf);
    check_abort_while_held(fleet, 0);
    struct mu_held held = held_of(&fleet->workers[2]);
    assert_int_equal(held.step, 2);
    assert_true(held.shares[0].owned_only);
    assert_int_equal(held.shares[0].layout.dp, 1);
    assert_int_equal(held.shares[0].rank, 1);
    worker_stop(fleet, 1);
    worker_stop(fleet, 3);
    want_layout(fleet, 1, 2, 1, 0);
    start(fleet, 0x5);
    check_finished(fleet);
    assert_int_equal(fleet->applied[1], 4);
    fleet_free(fleet);
}

/* Some have applied the update, others only know that they can: they roll forward, each what it owns. */
static void test_changes_sharded_update_is_rolled_forward(void **state)
{
    (void)state;
    uint32_t rolled = 0;
    for (uint32_t i = 0; i < 500 && rolled < rounds(2, 12); i++) { /* a matter of microseconds: until it is met */
        struct fleet *fleet = new_fleet(true);
        start_workers(fleet, 6);
        want_layout(fleet, 1 + i % 2, 1, 3, 0);
        set_trigger(fleet, TRIGGER_APPLIED, i % 3, 1 + i % 4);
        start(fleet, i % 2 ? 0x3f : 0x07);
        wait_revoked(fleet);
        set_trigger(fleet, TRIGGER_NONE, 0, 0);
        if (i % 3 == 0)
            want_layout(fleet, 1, 1, 2, 0);
        else
            want_layout(fleet, 2, 2, 1, 0);
        start(fleet, i % 2 || i % 3 ? 0x3f : 0x07);
        check_finished(fleet);
        rolled += fleet->rolled_forward > 0;
        fleet_free(fleet);
    }
    assert_true(rolled > 0);
}

/* Bytes of what moves have brought to a worker whose engine stands still. */
static uint64_t arrived_bytes(const struct worker *worker)
{
    const struct engine_job *job = &worker->engine->job;
    uint64_t bytes = 0;
    for (uint32_t i = 0; job->arrived.where && i < job->model.chunk_count; i++) {
        uint64_t flats =
            (job->arrived.kinds[i] & MU_MOVE_PARAMS ? 1u : 0u) + (job->arrived.kinds[i] & MU_MOVE_MOMENTS ? 2u : 0u);
        bytes += flats * mu_model_chunk(&job->model, i).size * sizeof(float);
    }
    return bytes;
}

static uint64_t state_bytes(const struct mu_model_spec *model)
{
    uint64_t elements = 0;
    for (uint32_t i = 0; i < model->chunk_count; i++)
        elements += mu_model_chunk(model, i).size;
    return 3 * elements * sizeof(float);
}

/* Of two stages one is never sent; what has come of the other one is kept, and does not come again. */
static void test_changes_interrupted_transfer_goes_on_where_it_was(void **state)
{
    (void)state;
    struct fleet *fleet = new_fleet(false);
    start_workers(fleet, 3);
    want_layout(fleet, 1, 2, 1, 0);
    run_until(fleet, 3, 2);
    want_layout(fleet, 1, 1, 3, 0);
    fleet->silent = 1u << 1;
    uint64_t kept = 0;
    for (uint32_t wait_ms = 5; kept == 0 && wait_ms < PATIENCE_S * 1000; wait_ms *= 2) {
        assign(fleet, 7);
        usleep(wait_ms * 1000);
        abort_all(fleet);
        wait_revoked(fleet);
        kept = arrived_bytes(&fleet->workers[2]);
    }
    const struct engine_job *job = &fleet->workers[2].engine->job;
    uint64_t all = state_bytes(&job->model), received = 0;
    assert_true(kept > 0 && kept < all && job->arrived.step == 2 && !held_of(&fleet->workers[2]).has_state);
    fleet->silent = 0;
    assign(fleet, 7);
    wait_prepared(fleet);
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct mu_comm_traffic traffic;
        assert_int_equal(mu_comm_peer_traffic(fleet->workers[2].engine->now.group, rank, &traffic), MU_OK);
        received += traffic.bytes_received;
    }
    assert_true(received >= all - kept && received < all - kept + 256 * job->model.chunk_count); /* and checksums */
    go(fleet);
    check_finished(fleet);
    fleet_free(fleet);
}

/* ---- assignments that do not fit ---- */

static void expect_refusal(struct fleet *fleet, const struct mu_assign *assign, const char *why)
{
    struct worker *worker = &fleet->workers[0];
    assert_int_equal(mu_engine_prepare(worker->engine, ++fleet->generation, worker->incarnation, assign), MU_OK);
    const struct mu_worker_event *event = next_event(worker, 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED);
    assert_int_equal(event->kind, MU_WE_PARKED);
    assert_int_equal(event->parked.reason, MU_PARK_PREPARE);
    if (!strstr(event->parked.text, why))
        fail_msg("'%s' does not say '%s'", event->parked.text, why);
}

static void test_changes_moves_that_contradict_what_is_held_are_refused(void **state)
{
    (void)state;
    struct fleet *fleet = new_fleet(false);
    worker_start(fleet);
    struct mu_assign a = {.layout = make_layout(1, 1, 1, 0, false, LAYERS), .source = MU_SOURCE_PEER};
    expect_refusal(fleet, &a, "neither held nor copied");
    a.layout.tp = 8;
    expect_refusal(fleet, &a, "tp");
    a.layout = make_layout(1, 1, 1, 0, false, LAYERS);
    run_until(fleet, 1, 1);
    struct mu_move move = {.from = 1, .to = 0, .kinds = MU_MOVE_PARAMS, .run = {0, 1}};
    a.start_step = 1;
    a.source = MU_SOURCE_HELD;
    a.moves = &move;
    a.move_count = 1;
    expect_refusal(fleet, &a, "holds it");
    move.run = (struct mu_chunk_run){0, 100000};
    expect_refusal(fleet, &a, "the model has");
    move = (struct mu_move){.from = 0, .to = 1, .kinds = MU_MOVE_MOMENTS, .run = {0, 1}};
    a.source = MU_SOURCE_PEER;
    a.start_step = 3;
    expect_refusal(fleet, &a, "does not have it");
    /* What it holds is as it was. */
    start(fleet, 1);
    check_finished(fleet);
    fleet_free(fleet);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_changes_chain_of_layouts_same_bits),
        cmocka_unit_test(test_changes_memory_is_that_of_the_share),
        cmocka_unit_test(test_changes_idle_rank_is_the_only_source),
        cmocka_unit_test(test_changes_prepared_share_counts_although_it_never_ran),
        cmocka_unit_test(test_changes_torn_anywhere_same_bits),
        cmocka_unit_test(test_changes_planned_same_bits),
        cmocka_unit_test(test_changes_abort_while_waiting_in_tensor_exchange_and_pipeline),
        cmocka_unit_test(test_changes_abort_in_a_gather_leaves_owned_parts),
        cmocka_unit_test(test_changes_column_counts_while_the_tied_copy_is_missing),
        cmocka_unit_test(test_changes_sharded_update_is_rolled_forward),
        cmocka_unit_test(test_changes_interrupted_transfer_goes_on_where_it_was),
        cmocka_unit_test(test_changes_moves_that_contradict_what_is_held_are_refused),
    };
    return cmocka_run_group_tests(tests, setup_reference, NULL);
}
