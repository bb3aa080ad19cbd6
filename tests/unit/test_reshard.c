/* links: mu_plan */
#include "plan/reshard.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/rng.h"
#include "plan/model_spec.h"
#include "plan/session.h"
#include "plan/share_index.h"

enum { WORLD_MAX = 256, PARAMS = 0, MOMENTS = 1, SHARES = 2 };

static uint32_t below(uint64_t *seed, uint32_t bound)
{
    return (uint32_t)(mu_splitmix64(seed) % bound);
}

static struct mu_model_spec make_model(enum mu_model_family family, uint32_t layers, uint32_t slices)
{
    struct mu_model_config config = {.family = family,
                                     .layers = layers,
                                     .heads = 8,
                                     .channels = 256,
                                     .context = 128,
                                     .vocab = 4096,
                                     .hidden = 1024,
                                     .slices = slices};
    struct mu_model_spec model;
    mu_model_config_resolve(&config);
    mu_model_spec_init(&model, &config);
    return model;
}

static struct mu_layout make_layout(uint32_t layers, uint32_t tp, uint32_t pp, uint32_t dp, bool sharded)
{
    struct mu_layout layout = {.tp = tp, .pp = pp, .dp = dp, .sharded = sharded};
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(layers * p / pp);
    return layout;
}

/* A world, chunk by chunk: the slow and plain reference. */
struct world {
    struct mu_model_spec model;
    struct mu_layout layout;
    uint32_t size;
    struct mu_held_share shares[WORLD_MAX][SHARES];
    struct mu_reshard_holder holders[WORLD_MAX];
    bool *has[2], *copy, *needs[2]; /* [rank * chunks + chunk] */
    uint32_t *from[2], *sent[2];
    struct mu_reshard reshard;
};

static void mark(const struct world *w, const struct mu_layout *layout, uint32_t rank, enum mu_share share, bool *row)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(&w->model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < runs[i].count; k++)
            row[runs[i].first + k] = true;
    }
}

static void world_new(struct world *w, struct mu_model_spec model, struct mu_layout layout)
{
    memset(w, 0, sizeof *w);
    w->model = model;
    w->layout = layout;
    w->size = mu_layout_world(&layout);
    assert_true(w->size <= WORLD_MAX);
    size_t cells = (size_t)w->size * model.chunk_count;
    for (int kind = 0; kind < 2; kind++) {
        w->has[kind] = calloc(cells, sizeof(bool));
        w->needs[kind] = calloc(cells, sizeof(bool));
        w->from[kind] = malloc(cells * sizeof(uint32_t));
        w->sent[kind] = calloc(cells, sizeof(uint32_t));
        assert_true(w->has[kind] && w->needs[kind] && w->from[kind] && w->sent[kind]);
        memset(w->from[kind], 0xff, cells * sizeof(uint32_t));
    }
    w->copy = calloc(cells, sizeof(bool));
    assert_non_null(w->copy);
    for (uint32_t rank = 0; rank < w->size; rank++) {
        size_t row = (size_t)rank * model.chunk_count;
        w->holders[rank].shares = w->shares[rank];
        mark(w, &layout, rank, MU_SHARE_PARAMS, w->needs[PARAMS] + row);
        mark(w, &layout, rank, MU_SHARE_COPY, w->needs[PARAMS] + row);
        mark(w, &layout, rank, MU_SHARE_MOMENTS, w->needs[MOMENTS] + row);
        mark(w, &layout, rank, MU_SHARE_MIRROR, w->needs[PARAMS] + row);
        mark(w, &layout, rank, MU_SHARE_MIRROR, w->needs[MOMENTS] + row);
    }
}

static void world_free(struct world *w)
{
    for (int kind = 0; kind < 2; kind++) {
        free(w->has[kind]);
        free(w->needs[kind]);
        free(w->from[kind]);
        free(w->sent[kind]);
    }
    free(w->copy);
    mu_reshard_fini(&w->reshard);
}

static void hold(struct world *w, uint32_t rank, const struct mu_layout *layout, uint32_t old_rank, bool owned_only)
{
    size_t row = (size_t)rank * w->model.chunk_count;
    struct mu_reshard_holder *holder = &w->holders[rank];
    assert_true(holder->share_count < SHARES);
    w->shares[rank][holder->share_count++] =
        (struct mu_held_share){.layout = *layout, .rank = old_rank, .owned_only = owned_only};
    mark(w, layout, old_rank, owned_only ? MU_SHARE_OWNED : MU_SHARE_PARAMS, w->has[PARAMS] + row);
    mark(w, layout, old_rank, MU_SHARE_MOMENTS, w->has[MOMENTS] + row);
    mark(w, layout, old_rank, MU_SHARE_MIRROR, w->has[PARAMS] + row);
    mark(w, layout, old_rank, MU_SHARE_MIRROR, w->has[MOMENTS] + row);
    if (!owned_only && !holder->stale_copies)
        mark(w, layout, old_rank, MU_SHARE_COPY, w->copy + row);
}

static bool lacks(const struct world *w, int kind, size_t at)
{
    return w->needs[kind][at] && !w->has[kind][at] && !(kind == PARAMS && w->copy[at]);
}

static bool on_same_host(const struct world *w, uint32_t a, uint32_t b)
{
    return w->holders[a].host == w->holders[b].host;
}

/* What has to be: a source for all, and how many bytes. Returns the first chunk without a source, or UINT32_MAX. */
static uint32_t reference(const struct world *w, uint64_t *ret_bytes)
{
    uint32_t chunks = w->model.chunk_count, missing = UINT32_MAX;
    *ret_bytes = 0;
    for (int kind = 0; kind < 2; kind++) {
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            bool source = false, needed = false;
            for (uint32_t rank = 0; rank < w->size; rank++) {
                size_t at = (size_t)rank * chunks + chunk;
                source = source || w->has[kind][at];
                needed = needed || lacks(w, kind, at);
                if (lacks(w, kind, at))
                    *ret_bytes += mu_model_chunk(&w->model, chunk).size * sizeof(float) * (kind == PARAMS ? 1 : 2);
            }
            if (needed && !source && chunk < missing)
                missing = chunk;
        }
    }
    return missing;
}

static void replay(struct world *w)
{
    const struct mu_reshard *plan = &w->reshard;
    uint32_t chunks = w->model.chunk_count;
    for (uint32_t i = 0; i < plan->move_count; i++) {
        const struct mu_move *m = &plan->moves[i], *before = i ? m - 1 : NULL;
        assert_true(m->from < w->size && m->to < w->size && m->from != m->to);
        assert_true(m->kinds >= 1 && m->kinds <= 3 && m->run.count > 0 && m->run.first + m->run.count <= chunks);
        assert_true(!before || before->to < m->to || (before->to == m->to && before->run.first <= m->run.first));
        for (uint32_t k = 0; k < i; k++) { /* maximal */
            const struct mu_move *o = &plan->moves[k];
            assert_false(o->to == m->to && o->from == m->from && o->run.first == m->run.first &&
                         o->run.count == m->run.count);
            assert_false(o->to == m->to && o->from == m->from && o->kinds == m->kinds &&
                         o->run.first + o->run.count == m->run.first);
        }
        for (int kind = 0; kind < 2; kind++) {
            for (uint32_t k = 0; (m->kinds >> kind & 1) && k < m->run.count; k++) {
                size_t at = (size_t)m->to * chunks + m->run.first + k;
                assert_true(lacks(w, kind, at));
                assert_int_equal(w->from[kind][at], UINT32_MAX); /* once */
                w->from[kind][at] = m->from;
                uint32_t *sent = &w->sent[kind][(size_t)m->from * chunks + m->run.first + k];
                assert_true(++*sent <= MU_FAN_OUT);
            }
        }
    }
}

/* Every chunk that is lacking comes, from somebody who really has it or gets it, without circles; from the own host
 * where that has it, and once from outside to a host that has not. */
static void check_sources(struct world *w)
{
    uint32_t chunks = w->model.chunk_count;
    for (int kind = 0; kind < 2; kind++) {
        for (size_t at = 0; at < (size_t)w->size * chunks; at++) {
            assert_true(lacks(w, kind, at) == (w->from[kind][at] != UINT32_MAX));
            if (!lacks(w, kind, at))
                continue;
            uint32_t rank = (uint32_t)(at / chunks), chunk = (uint32_t)(at % chunks), holder = rank, hops = 0;
            do {
                holder = w->from[kind][(size_t)holder * chunks + chunk];
                assert_true(holder < w->size && ++hops <= w->size);
            } while (!w->has[kind][(size_t)holder * chunks + chunk]);
            uint32_t from = w->from[kind][at];
            bool local_holder = false;
            uint32_t entries = 0;
            for (uint32_t other = 0; other < w->size; other++) {
                size_t there = (size_t)other * chunks + chunk;
                if (!on_same_host(w, other, rank))
                    continue;
                local_holder = local_holder || w->has[kind][there];
                entries += lacks(w, kind, there) && !on_same_host(w, w->from[kind][there], rank);
            }
            assert_int_equal(entries, local_holder ? 0 : 1);
            assert_true(on_same_host(w, from, rank) || !local_holder);
        }
    }
}

static void check(struct world *w)
{
    uint64_t bytes;
    uint32_t missing = reference(w, &bytes);
    enum mu_status status = mu_reshard_plan(&w->model, &w->layout, w->holders, &w->reshard);
    assert_int_equal(status, missing == UINT32_MAX ? MU_OK : MU_ERR_NOT_FOUND);
    assert_int_equal(w->reshard.minimum_bytes, bytes);
    if (status) {
        assert_int_equal(w->reshard.missing_chunk, missing);
        assert_int_equal(w->reshard.move_count, 0);
        return;
    }
    assert_int_equal(w->reshard.bytes, bytes);
    replay(w);
    check_sources(w);
    struct mu_reshard again;
    assert_int_equal(mu_reshard_plan(&w->model, &w->layout, w->holders, &again), MU_OK);
    assert_int_equal(again.move_count, w->reshard.move_count);
    assert_memory_equal(again.moves, w->reshard.moves, again.move_count * sizeof *again.moves);
    mu_reshard_fini(&again);
}

static bool complete_by_reference(const struct world *w, const bool *without)
{
    for (uint32_t chunk = 0; chunk < w->model.chunk_count; chunk++) {
        bool params = false, moments = false;
        for (uint32_t rank = 0; rank < w->size; rank++) {
            size_t at = (size_t)rank * w->model.chunk_count + chunk;
            params = params || (w->has[PARAMS][at] && !(without && without[rank]));
            moments = moments || (w->has[MOMENTS][at] && !(without && without[rank]));
        }
        if (!params || !moments)
            return false;
    }
    return true;
}

/* Holders are taken away one by one, each only if the rest has everything. */
static void check_coverage(const struct world *w, uint64_t *seed)
{
    bool complete = complete_by_reference(w, NULL), without[WORLD_MAX] = {0};
    assert_true(mu_reshard_complete(&w->model, w->holders, w->size) == complete);
    if (!complete)
        return;
    struct mu_coverage coverage;
    assert_int_equal(mu_coverage_init(&coverage, &w->model, w->holders, w->size), MU_OK);
    for (uint32_t i = 0; i < w->size; i++) {
        uint32_t rank = below(seed, w->size);
        if (without[rank])
            continue;
        without[rank] = true;
        bool can_go = complete_by_reference(w, without);
        assert_true(mu_coverage_remove(&coverage, rank) == can_go);
        assert_true(mu_coverage_complete(&coverage));
        without[rank] = can_go;
    }
    mu_coverage_fini(&coverage);
}

static struct mu_layout random_layout(uint64_t *seed, uint32_t layers, uint32_t slices, bool sharded)
{
    struct mu_layout layout = {.tp = 1, .dp = 1 + below(seed, 5), .sharded = sharded, .idle = below(seed, 3)};
    while (layout.tp < slices && below(seed, 3) > 0)
        layout.tp *= 2;
    layout.pp = 1 + below(seed, layers < 4 ? layers : 4);
    layout.stage_first[layout.pp] = (uint16_t)layers;
    for (uint32_t p = 1; p < layout.pp; p++) { /* layers left for all stages after it */
        uint32_t first = layout.stage_first[p - 1] + 1u, last = layers - (layout.pp - p);
        layout.stage_first[p] = (uint16_t)(first + below(seed, last - first + 1));
    }
    if (below(seed, 2))
        layout.buddy_shift = below(seed, mu_layout_buddy_group(&layout));
    return layout;
}

static void test_any_mixture_of_shares_becomes_any_layout(void **state)
{
    (void)state;
    uint64_t seed = 2024;
    uint32_t planned = 0, missing = 0;
    for (int round = 0; round < 1500; round++) {
        uint32_t slices = 1u << below(&seed, 4), layers = 1 + below(&seed, 5), olds = 1 + below(&seed, 3);
        struct mu_model_spec model = make_model(round % 3 ? MU_FAMILY_GPT2 : MU_FAMILY_LLAMA, layers, slices);
        struct mu_layout old[3];
        bool sharded = below(&seed, 2);
        for (uint32_t i = 0; i < olds; i++)
            old[i] = random_layout(&seed, layers, slices, below(&seed, 8) ? sharded : !sharded);
        struct world w;
        world_new(&w, model, below(&seed, 4) ? random_layout(&seed, layers, slices, sharded) : old[0]);
        uint32_t holding = below(&seed, 4), owned = below(&seed, 8), hosts = 1 + below(&seed, w.size);
        for (uint32_t rank = 0; rank < w.size; rank++) {
            w.holders[rank].host = below(&seed, hosts);
            w.holders[rank].stale_copies = below(&seed, 4) == 0;
            for (uint32_t k = 0; k < SHARES && below(&seed, 8) < (holding ? 8 : 5); k++) {
                const struct mu_layout *layout = &old[below(&seed, olds)];
                bool in_place = below(&seed, 3) && rank < mu_layout_world(layout);
                hold(&w, rank, layout, in_place ? rank : below(&seed, mu_layout_world(layout)),
                     below(&seed, 8) < owned / 3);
            }
        }
        check(&w);
        check_coverage(&w, &seed);
        planned += w.reshard.move_count > 0;
        missing += reference(&w, &(uint64_t){0}) != UINT32_MAX;
        world_free(&w);
    }
    print_message("%u plans with moves, %u with something missing\n", planned, missing);
    assert_true(planned > 300 && missing > 100);
}

/* Any one member of a layout with mirrors may go: the others have everything, rolled forward or not. Without mirrors
 * they have not where one holds something alone. */
static void test_any_one_rank_is_lost_without_loss_when_it_has_a_buddy(void **state)
{
    (void)state;
    uint64_t seed = 77;
    uint32_t checked = 0, torn = 0;
    for (int round = 0; round < 600; round++) {
        uint32_t slices = 1u << below(&seed, 4), layers = 1 + below(&seed, 5);
        struct mu_model_spec model = make_model(round % 2 ? MU_FAMILY_GPT2 : MU_FAMILY_LLAMA, layers, slices);
        struct mu_layout layout = random_layout(&seed, layers, slices, below(&seed, 2));
        layout.idle = 0;
        uint32_t group = mu_layout_buddy_group(&layout), working = mu_layout_working(&layout);
        if (group == 1)
            continue;
        layout.buddy_shift = round % 4 ? 1 + below(&seed, group - 1) : 0;
        bool rolled = below(&seed, 2);
        for (uint32_t lost = 0; lost < working; lost++) {
            struct world w;
            world_new(&w, model, layout);
            for (uint32_t rank = 0; rank < working; rank++) {
                w.holders[rank].stale_copies = rolled;
                if (rank != lost)
                    hold(&w, rank, &layout, rank, rolled && layout.sharded);
            }
            bool whole = mu_reshard_complete(&model, w.holders, w.size);
            assert_true(whole || layout.buddy_shift == 0);
            torn += !whole;
            check(&w); /* the newcomer at the lost rank gets its share and its mirror */
            checked++;
            world_free(&w);
        }
    }
    assert_true(checked > 500 && torn > 100);
}

/* Where every buddy is on another host, any one host may go. */
static void test_any_one_host_is_lost_without_loss_when_buddies_are_apart(void **state)
{
    (void)state;
    uint64_t seed = 99;
    uint32_t checked = 0;
    for (int round = 0; round < 400; round++) {
        uint32_t slices = 1u << below(&seed, 3), layers = 1 + below(&seed, 5);
        struct mu_model_spec model = make_model(MU_FAMILY_GPT2, layers, slices);
        struct mu_layout layout = random_layout(&seed, layers, slices, below(&seed, 2));
        uint32_t working = mu_layout_working(&layout), host_of[WORLD_MAX], hosts = 2 + below(&seed, 3), apart;
        layout.idle = 0;
        for (uint32_t rank = 0; rank < working; rank++)
            host_of[rank] = round % 2 ? rank % hosts : rank * hosts / working;
        layout.buddy_shift = mu_layout_buddy_shift(&layout, host_of, host_of, &apart);
        if (layout.buddy_shift == 0 || apart < working)
            continue;
        for (uint32_t lost = 0; lost < hosts; lost++) {
            struct world w;
            world_new(&w, model, layout);
            for (uint32_t rank = 0; rank < working; rank++)
                if (host_of[rank] != lost)
                    hold(&w, rank, &layout, rank, layout.sharded);
            assert_true(mu_reshard_complete(&model, w.holders, w.size));
            world_free(&w);
            checked++;
        }
    }
    assert_true(checked > 100);
}

/* All of the old world alive, spread over the first ranks of the new one; then every chunk has a source. */
static void test_every_layout_becomes_every_other(void **state)
{
    (void)state;
    uint64_t seed = 7;
    for (int round = 0; round < 400; round++) {
        uint32_t slices = 1u << below(&seed, 4), layers = 2 + below(&seed, 4);
        bool sharded = round % 2;
        struct mu_model_spec model = make_model(round % 3 ? MU_FAMILY_GPT2 : MU_FAMILY_LLAMA, layers, slices);
        struct mu_layout old = random_layout(&seed, layers, slices, sharded),
                         new = random_layout(&seed, layers, slices, sharded);
        if (mu_layout_world(&new) < mu_layout_working(&old))
            new.idle += mu_layout_working(&old) - mu_layout_world(&new);
        struct world w;
        world_new(&w, model, new);
        for (uint32_t rank = 0; rank < w.size; rank++) {
            w.holders[rank].host = rank / 4;
            if (rank < mu_layout_working(&old))
                hold(&w, rank, &old, rank, round % 5 == 0);
        }
        assert_true(complete_by_reference(&w, NULL));
        check(&w);
        world_free(&w);
    }
}

static void test_nothing_moves_when_nothing_changes(void **state)
{
    (void)state;
    for (int sharded = 0; sharded < 2; sharded++) {
        struct world w;
        struct mu_layout layout = make_layout(4, 2, 2, 4, sharded);
        world_new(&w, make_model(MU_FAMILY_GPT2, 4, 4), layout);
        for (uint32_t rank = 0; rank < w.size; rank++)
            hold(&w, rank, &layout, rank, false);
        check(&w);
        assert_int_equal(w.reshard.bytes, 0);
        assert_int_equal(w.reshard.move_count, 0);
        world_free(&w);
    }
}

static void test_a_lost_replica_is_filled_from_the_others_evenly(void **state)
{
    (void)state;
    struct world w;
    struct mu_layout layout = make_layout(4, 1, 1, 4, false);
    world_new(&w, make_model(MU_FAMILY_GPT2, 4, 1), layout);
    for (uint32_t rank = 0; rank < 4; rank++) {
        w.holders[rank].host = rank;
        if (rank != 2)
            hold(&w, rank, &layout, rank, false);
    }
    check(&w);
    assert_int_equal(w.reshard.move_count, 3); /* a third from each */
    uint32_t chunks = w.model.chunk_count;
    for (uint32_t i = 0; i < 3; i++) {
        const struct mu_move *move = &w.reshard.moves[i];
        assert_int_equal(move->kinds, MU_MOVE_PARAMS | MU_MOVE_MOMENTS);
        assert_true(move->run.count == chunks / 3 || move->run.count == chunks / 3 + 1);
        assert_true(i == 0 || move->from != w.reshard.moves[i - 1].from);
    }
    world_free(&w);
}

static void test_as_many_receivers_as_sources_take_one_each(void **state)
{
    (void)state;
    struct world w;
    struct mu_layout layout = make_layout(4, 1, 1, 8, false);
    world_new(&w, make_model(MU_FAMILY_GPT2, 4, 1), layout);
    for (uint32_t rank = 0; rank < 8; rank++) {
        w.holders[rank].host = rank;
        if (rank < 4)
            hold(&w, rank, &layout, rank, false);
    }
    check(&w);
    assert_int_equal(w.reshard.move_count, 4);
    uint32_t senders = 0;
    for (uint32_t i = 0; i < 4; i++)
        senders |= 1u << w.reshard.moves[i].from;
    assert_int_equal(senders, 15);
    world_free(&w);
}

/* One holder, many joiners: nobody sends more than MU_FAN_OUT times, and the tree is not deep. */
static void test_receivers_pass_on_what_they_got(void **state)
{
    (void)state;
    struct world w;
    struct mu_layout layout = make_layout(2, 1, 1, 200, false);
    world_new(&w, make_model(MU_FAMILY_GPT2, 2, 1), layout);
    for (uint32_t rank = 0; rank < 200; rank++)
        w.holders[rank].host = rank;
    hold(&w, 77, &layout, 77, false);
    check(&w);
    assert_int_equal(w.reshard.move_count, 199);
    for (uint32_t rank = 0; rank < 200; rank++) {
        uint32_t at = rank, hops = 0;
        for (; at != 77; hops++)
            at = w.from[PARAMS][(size_t)at * w.model.chunk_count];
        assert_true(hops <= 10);
    }
    world_free(&w);
}

/* Few sources, many receivers, on few or many hosts: nobody sends too often, hosts get everything once. */
static void test_relays_between_and_inside_hosts(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (int round = 0; round < 300; round++) {
        struct world w;
        struct mu_layout layout = make_layout(2, 1, 1, 2 + below(&seed, 60), round % 4 == 0);
        layout.dp = layout.sharded && layout.dp > 32 ? 32 : layout.dp;
        world_new(&w, make_model(MU_FAMILY_LLAMA, 2, 1), layout);
        uint32_t hosts = 1 + below(&seed, layout.dp), holders = 1 + below(&seed, 3);
        struct mu_layout old = make_layout(2, 1, 1, 1, false);
        for (uint32_t rank = 0; rank < layout.dp; rank++)
            w.holders[rank].host = below(&seed, hosts);
        for (uint32_t i = 0; i < holders; i++) {
            uint32_t rank = below(&seed, layout.dp);
            if (w.holders[rank].share_count == 0)
                hold(&w, rank, &old, 0, false);
        }
        check(&w);
        world_free(&w);
    }
}

/* A new host of eight gets each chunk once over the network, whatever the number of sources. */
static void test_a_host_gets_a_chunk_once(void **state)
{
    (void)state;
    struct world w;
    struct mu_layout layout = make_layout(4, 1, 1, 16, false);
    world_new(&w, make_model(MU_FAMILY_GPT2, 4, 1), layout);
    for (uint32_t rank = 0; rank < 16; rank++) {
        w.holders[rank].host = rank / 8;
        if (rank < 3)
            hold(&w, rank, &layout, rank, false);
    }
    check(&w); /* check_sources counts the entries */
    uint64_t outside = 0;
    for (uint32_t i = 0; i < w.reshard.move_count; i++) {
        const struct mu_move *move = &w.reshard.moves[i];
        outside += on_same_host(&w, move->from, move->to) ? 0 : move->run.count;
    }
    assert_int_equal(outside, w.model.chunk_count);
    world_free(&w);
}

/* dp 2 x tp 2, one of four lost, becomes dp 3 x tp 1: three ranks, each keeps its half. */
static void test_two_by_two_becomes_three_by_one(void **state)
{
    (void)state;
    struct world w;
    struct mu_layout old = make_layout(4, 2, 1, 2, false), new = make_layout(4, 1, 1, 3, false);
    world_new(&w, make_model(MU_FAMILY_GPT2, 4, 2), new);
    hold(&w, 0, &old, 0, false);
    hold(&w, 1, &old, 1, false);
    hold(&w, 2, &old, 3, false); /* rank 2 = (t 0, d 1) is lost */
    check(&w);
    uint64_t whole = w.model.parameter_count * 12, t0 = mu_layout_elements(&w.model, &old, 0, MU_SHARE_PARAMS) * 12,
             t1 = mu_layout_elements(&w.model, &old, 1, MU_SHARE_PARAMS) * 12;
    assert_int_equal(w.reshard.bytes, (whole - t0) + 2 * (whole - t1));
    world_free(&w);
}

/* After a sharded roll-forward everybody has what it updated: one gather of parameters, no moments. */
static void test_owned_parameters_are_gathered(void **state)
{
    (void)state;
    struct world w;
    struct mu_layout layout = make_layout(4, 2, 1, 4, true);
    world_new(&w, make_model(MU_FAMILY_LLAMA, 4, 2), layout);
    uint64_t owned = 0, column = 0;
    for (uint32_t rank = 0; rank < w.size; rank++) {
        hold(&w, rank, &layout, rank, true);
        owned += mu_layout_elements(&w.model, &layout, rank, MU_SHARE_OWNED);
        column += mu_layout_elements(&w.model, &layout, rank, MU_SHARE_PARAMS);
    }
    check(&w);
    for (uint32_t i = 0; i < w.reshard.move_count; i++)
        assert_int_equal(w.reshard.moves[i].kinds, MU_MOVE_PARAMS);
    /* Shared cells may be owned by different replicas in the two columns; then less moves. */
    assert_true(w.reshard.bytes <= (column - owned) * 4 && w.reshard.bytes > (column - owned) * 4 * 9 / 10);
    world_free(&w);
}

static void test_a_tied_copy_is_needed_and_is_no_source(void **state)
{
    (void)state;
    struct mu_layout layout = make_layout(4, 2, 2, 1, false);
    for (int stale = 0; stale < 2; stale++) {
        struct world w;
        world_new(&w, make_model(MU_FAMILY_GPT2, 4, 2), layout);
        for (uint32_t rank = 0; rank < 4; rank++) {
            w.holders[rank].stale_copies = stale;
            hold(&w, rank, &layout, rank, false);
        }
        check(&w);
        uint64_t copies = mu_layout_elements(&w.model, &layout, 2, MU_SHARE_COPY) +
                          mu_layout_elements(&w.model, &layout, 3, MU_SHARE_COPY);
        assert_int_equal(w.reshard.bytes, stale ? copies * 4 : 0);
        world_free(&w);
    }
    struct world w; /* the first stage is lost: the copies on the last one do not replace it */
    world_new(&w, make_model(MU_FAMILY_GPT2, 4, 2), layout);
    for (uint32_t rank = 2; rank < 4; rank++)
        hold(&w, rank, &layout, rank, false);
    check(&w);
    assert_int_equal(w.reshard.missing_chunk, 0);
    assert_false(mu_reshard_complete(&w.model, w.holders, w.size));
    world_free(&w);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* 16,384 ranks, 128 layers, 8 slices. */
static void plan_large(const char *what, struct mu_layout old, struct mu_layout new, uint32_t lost, bool owned_only)
{
    struct mu_model_config config = {.family = MU_FAMILY_LLAMA,
                                     .layers = 128,
                                     .heads = 128,
                                     .kv_heads = 8,
                                     .channels = 16384,
                                     .context = 8192,
                                     .vocab = 128256,
                                     .hidden = 53248,
                                     .slices = 8};
    struct mu_model_spec model;
    mu_model_config_resolve(&config);
    mu_model_spec_init(&model, &config);
    uint32_t world = mu_layout_world(&new);
    struct mu_held_share *shares = calloc(world, sizeof *shares);
    struct mu_reshard_holder *holders = calloc(world, sizeof *holders);
    assert_true(shares && holders);
    for (uint32_t rank = 0; rank < world; rank++) {
        shares[rank] = (struct mu_held_share){.layout = old, .rank = rank, .owned_only = owned_only};
        holders[rank] = (struct mu_reshard_holder){
            .shares = &shares[rank], .share_count = rank != lost && rank < mu_layout_world(&old), .host = rank / 8};
    }
    struct mu_reshard reshard;
    double start = seconds_now();
    enum mu_status status = mu_reshard_plan(&model, &new, holders, &reshard);
    double seconds = seconds_now() - start;
    print_message("%s: %.3f s, %u moves, %.3f TB of %u chunks\n", what, seconds, reshard.move_count,
                  (double)reshard.bytes * 1e-12, model.chunk_count);
    assert_int_equal(status, MU_OK);
    assert_int_equal(reshard.bytes, reshard.minimum_bytes);
    uint32_t *partners = calloc(world, sizeof *partners), most = 0;
    assert_non_null(partners);
    for (uint32_t i = 0; i < reshard.move_count; i++) { /* moves come by receiver: sources of each */
        const struct mu_move *m = &reshard.moves[i];
        bool known = false;
        for (uint32_t k = i; k-- > 0 && reshard.moves[k].to == m->to && !known;)
            known = reshard.moves[k].from == m->from;
        partners[m->to] += !known;
        most = partners[m->to] > most ? partners[m->to] : most;
    }
    print_message("  at most %u sources for one rank\n", most);
    assert_true(most + MU_LAYOUT_NEIGHBOURS_MAX / 2 <= MU_PEERS_MAX);
    free(partners);
    free(shares);
    free(holders);
    mu_reshard_fini(&reshard);
}

static void test_large_worlds_are_planned_quickly(void **state)
{
    (void)state;
    plan_large("one of 16384 replaced", make_layout(128, 8, 16, 128, false), make_layout(128, 8, 16, 128, false), 777,
               false);
    plan_large("pp 16 to pp 8", make_layout(128, 8, 16, 128, false), make_layout(128, 8, 8, 256, false), UINT32_MAX,
               false);
    plan_large("tp 8 to tp 4, pp 16 to 32", make_layout(128, 8, 16, 128, false), make_layout(128, 4, 32, 128, false),
               UINT32_MAX, false);
    plan_large("tp 8, dp 2048 to 1024 x pp 2", make_layout(128, 8, 1, 2048, false), make_layout(128, 8, 2, 1024, false),
               UINT32_MAX, false);
    plan_large("sharded, pp 128 to 64", make_layout(128, 8, 128, 16, true), make_layout(128, 8, 64, 32, true),
               UINT32_MAX, false);
    plan_large("sharded, gather", make_layout(128, 8, 64, 32, true), make_layout(128, 8, 64, 32, true), UINT32_MAX,
               true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_mixture_of_shares_becomes_any_layout),
        cmocka_unit_test(test_any_one_rank_is_lost_without_loss_when_it_has_a_buddy),
        cmocka_unit_test(test_any_one_host_is_lost_without_loss_when_buddies_are_apart),
        cmocka_unit_test(test_every_layout_becomes_every_other),
        cmocka_unit_test(test_nothing_moves_when_nothing_changes),
        cmocka_unit_test(test_a_lost_replica_is_filled_from_the_others_evenly),
        cmocka_unit_test(test_as_many_receivers_as_sources_take_one_each),
        cmocka_unit_test(test_receivers_pass_on_what_they_got),
        cmocka_unit_test(test_relays_between_and_inside_hosts),
        cmocka_unit_test(test_a_host_gets_a_chunk_once),
        cmocka_unit_test(test_two_by_two_becomes_three_by_one),
        cmocka_unit_test(test_owned_parameters_are_gathered),
        cmocka_unit_test(test_a_tied_copy_is_needed_and_is_no_source),
        cmocka_unit_test(test_large_worlds_are_planned_quickly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
