/* links: mu_plan */
#include "plan/feeding.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"
#include "plan/memory.h"

/* Against the definition, chunk by chunk. */

enum { LAYERS = 6, SLICES = 4, CASES = 4000 };

static uint64_t seed_state;

static uint32_t below(uint32_t bound)
{
    return (uint32_t)(mu_splitmix64(&seed_state) % bound);
}

static struct mu_model_spec some_model(void)
{
    struct mu_model_config config = {.family = below(2) ? MU_FAMILY_GPT2 : MU_FAMILY_LLAMA,
                                     .layers = LAYERS,
                                     .heads = 8,
                                     .channels = 256,
                                     .context = 128,
                                     .vocab = 4096,
                                     .hidden = 1024,
                                     .slices = SLICES};
    struct mu_model_spec model;
    mu_model_config_resolve(&config);
    mu_model_spec_init(&model, &config);
    return model;
}

static struct mu_layout some_layout(void)
{
    struct mu_layout layout = {.tp = 1u << below(3), .pp = 1 + below(LAYERS), .dp = 1 + below(6), .sharded = below(2)};
    if (below(20) == 0)
        layout.dp = 33 + below(40); /* shard groups */
    for (uint32_t p = 1; p <= layout.pp; p++) {
        uint32_t first = layout.stage_first[p - 1], spare = LAYERS - first - (layout.pp - p) - 1;
        layout.stage_first[p] = (uint16_t)(p == layout.pp ? LAYERS : first + 1 + below(spare + 1));
    }
    uint32_t group = mu_layout_buddy_group(&layout);
    layout.buddy_shift = group > 1 && below(3) == 0 ? 1 + below(group - 1) : 0;
    return layout;
}

/* Kinds of each chunk that a rank's share has. */
static void mark(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank, enum mu_share share,
                 uint32_t kinds, uint32_t *out)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t c = runs[i].first; c < runs[i].first + runs[i].count; c++)
            out[c] |= kinds;
}

static uint32_t *held_by(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank)
{
    uint32_t *out = calloc(model->chunk_count, sizeof *out);
    if (rank == MU_LAYOUT_NOBODY)
        return out;
    mark(model, layout, rank, MU_SHARE_PARAMS, MU_MOVE_PARAMS, out);
    mark(model, layout, rank, MU_SHARE_COPY, MU_MOVE_PARAMS, out);
    mark(model, layout, rank, MU_SHARE_MOMENTS, MU_MOVE_MOMENTS, out);
    mark(model, layout, rank, MU_SHARE_MIRROR, MU_MOVE_PARAMS | MU_MOVE_MOMENTS, out);
    return out;
}

/* Who gives moments makes the update; whoever has the parameters can give them. */
static void expect_giver(const struct mu_model_spec *model, const struct mu_feeding *feeding,
                         const struct mu_move *move)
{
    const struct mu_layout *from = feeding->from;
    uint32_t *has = calloc(model->chunk_count, sizeof *has);
    bool owner = from->sharded && move->kinds & MU_MOVE_MOMENTS;
    uint32_t wanted = mu_layout_coords(feeding->to, feeding->rank).d % from->dp;
    uint32_t replica = mu_layout_coords(from, move->from).d;
    struct mu_shard_group group = mu_layout_shard_group(from->dp, wanted);
    assert_true(move->from < mu_layout_working(from) && move->from != feeding->old_rank);
    assert_true(owner ? replica >= group.first && replica < group.first + group.count : replica == wanted);
    mark(model, from, move->from, owner ? MU_SHARE_OWNED : MU_SHARE_PARAMS, 1, has);
    for (uint32_t c = move->run.first; c < move->run.first + move->run.count; c++)
        assert_true(has[c]);
    free(has);
}

static void run_case(void)
{
    struct mu_model_spec model = some_model();
    struct mu_layout from = some_layout(), to = below(4) ? some_layout() : from;
    struct mu_feeding feeding = {.from = &from, .to = &to, .rank = below(mu_layout_working(&to))};
    feeding.old_rank = below(3) ? below(mu_layout_working(&from)) : MU_LAYOUT_NOBODY;
    uint32_t *has = held_by(&model, &from, feeding.old_rank), *wants = held_by(&model, &to, feeding.rank);
    uint32_t *gets = calloc(model.chunk_count, sizeof *gets), count;
    uint64_t floats = 0, beside = 0;
    struct mu_move *moves;
    assert_int_equal(mu_feeding_moves(&model, &feeding, &moves, &count), MU_OK);
    for (uint32_t i = 0; i < count; i++) {
        const struct mu_move *move = &moves[i];
        assert_true(i == 0 || move->from > moves[i - 1].from ||
                    (move->from == moves[i - 1].from && move->run.first > moves[i - 1].run.first));
        assert_true(move->to == feeding.rank && move->run.count > 0);
        expect_giver(&model, &feeding, move);
        for (uint32_t c = move->run.first; c < move->run.first + move->run.count; c++) {
            assert_int_equal(gets[c], 0); /* once, both kinds from one */
            gets[c] = move->kinds;
        }
    }
    for (uint32_t c = 0; c < model.chunk_count; c++) {
        assert_int_equal(gets[c], wants[c] & ~has[c]);
        uint64_t size = mu_model_chunk(&model, c).size;
        floats += size * ((gets[c] & MU_MOVE_MOMENTS ? 1u : 0u) + (gets[c] == MU_MOVE_MOMENTS ? 1u : 0u));
        beside += size * ((gets[c] & MU_MOVE_PARAMS ? 1u : 0u) + (gets[c] & MU_MOVE_MOMENTS ? 2u : 0u));
    }
    assert_int_equal(mu_memory_feed_bytes(&model, moves, count, false), floats * sizeof(float));
    assert_int_equal(mu_memory_feed_bytes(&model, moves, count, true), (floats + beside) * sizeof(float));
    free(moves);
    free(has);
    free(wants);
    free(gets);
}

static void test_feeding_any_two_layouts_gives_what_is_lacked_once(void **state)
{
    (void)state;
    seed_state = 20261202;
    for (int i = 0; i < CASES; i++)
        run_case();
}

static void test_feeding_same_share_gives_nothing(void **state)
{
    (void)state;
    seed_state = 7;
    for (int i = 0; i < 200; i++) {
        struct mu_model_spec model = some_model();
        struct mu_layout layout = some_layout();
        struct mu_move *moves;
        uint32_t count, rank = below(mu_layout_working(&layout));
        const struct mu_feeding feeding = {.from = &layout, .old_rank = rank, .to = &layout, .rank = rank};
        assert_int_equal(mu_feeding_moves(&model, &feeding, &moves, &count), MU_OK);
        assert_int_equal(count, 0);
        free(moves);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_feeding_any_two_layouts_gives_what_is_lacked_once),
        cmocka_unit_test(test_feeding_same_share_gives_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
