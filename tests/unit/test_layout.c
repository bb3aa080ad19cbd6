/* links: mu_plan */
#include "plan/layout.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static uint64_t state_of_random = 12345;

static uint32_t random_below(uint32_t bound)
{
    state_of_random = state_of_random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state_of_random >> 33) % bound);
}

/* A random small model whose slices need not be even in the vocabulary, and a grid for it. */
static void random_grid(struct mu_model_spec *model, struct mu_layout *layout)
{
    uint32_t slices = 1u << random_below(4);
    struct mu_model_config config = {.family = random_below(2) ? MU_FAMILY_GPT2 : MU_FAMILY_LLAMA,
                                     .layers = 1 + random_below(9),
                                     .heads = 8,
                                     .channels = 8 * (1 + random_below(40)),
                                     .context = 1 + random_below(500),
                                     .vocab = 64 + random_below(3000),
                                     .slices = slices};
    config.hidden = config.family == MU_FAMILY_LLAMA ? 8 * (1 + random_below(200)) : 0;
    mu_model_spec_init(model, &config);
    uint32_t pp = 1 + random_below(config.layers < 4 ? config.layers : 4);
    *layout = (struct mu_layout){.tp = slices >> random_below(1 + (uint32_t)__builtin_ctz(slices)),
                                 .pp = pp,
                                 .dp = 1 + random_below(6),
                                 .idle = random_below(3),
                                 .sharded = random_below(2)};
    /* Unequal stages: each one layer, the others given out at random. */
    uint32_t sizes[4] = {1, 1, 1, 1};
    for (uint32_t left = config.layers - pp; left > 0; left--)
        sizes[random_below(pp)]++;
    for (uint32_t p = 0; p < pp; p++)
        layout->stage_first[p + 1] = (uint16_t)(layout->stage_first[p] + sizes[p]);
}

/* Which chunks a share has, as a bitmap; also checks that its runs are ascending, maximal, disjoint. */
static uint32_t mark(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                     enum mu_share share, uint8_t *map)
{
    static struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(model, layout, rank, share, runs), chunks = 0;
    assert_int_equal(count, mu_layout_runs(model, layout, rank, share, NULL));
    memset(map, 0, model->chunk_count);
    uint64_t elements = 0;
    for (uint32_t i = 0; i < count; i++) {
        assert_true(runs[i].count > 0 && runs[i].first + runs[i].count <= model->chunk_count);
        assert_true(i == 0 || runs[i].first > runs[i - 1].first + runs[i - 1].count);
        for (uint32_t k = 0; k < runs[i].count; k++) {
            map[runs[i].first + k] = 1;
            elements += mu_model_chunk(model, runs[i].first + k).size;
        }
        chunks += runs[i].count;
    }
    assert_int_equal(elements, mu_layout_elements(model, layout, rank, share));
    return chunks;
}

/* Does the definition put this cell into the column of (p, t)? */
static bool in_column(const struct mu_model_spec *model, const struct mu_layout *layout, const struct mu_cell *cell,
                      struct mu_coords at)
{
    uint32_t each = model->config.slices / layout->tp;
    bool slice = cell->slice / each == at.t;
    switch (cell->kind) {
    case MU_CELL_E:
        return slice && at.p == 0;
    case MU_CELL_E_SHARED:
        return at.p == 0;
    case MU_CELL_L:
    case MU_CELL_L_SHARED:
        return (slice || cell->kind == MU_CELL_L_SHARED) && cell->layer >= layout->stage_first[at.p] &&
               cell->layer < layout->stage_first[at.p + 1];
    case MU_CELL_F:
        return slice && at.p + 1 == layout->pp;
    case MU_CELL_F_SHARED:
        return at.p + 1 == layout->pp;
    }
    return false;
}

static bool is_shared(enum mu_cell_kind kind)
{
    return kind == MU_CELL_E_SHARED || kind == MU_CELL_L_SHARED || kind == MU_CELL_F_SHARED;
}

static void test_layout_shares_follow_the_definition(void **state)
{
    (void)state;
    for (int round = 0; round < 300; round++) {
        struct mu_model_spec model;
        struct mu_layout layout;
        random_grid(&model, &layout);
        uint8_t *map = malloc(model.chunk_count), *owned = malloc(model.chunk_count);
        uint8_t *primary = malloc(model.chunk_count);
        uint32_t *primary_owners = calloc(model.chunk_count, sizeof *primary_owners);
        uint32_t *column_owners = calloc(model.chunk_count * layout.tp * layout.pp, sizeof *column_owners);
        assert_true(map && owned && primary && primary_owners && column_owners);
        for (uint32_t rank = 0; rank < mu_layout_working(&layout); rank++) {
            struct mu_coords at = mu_layout_coords(&layout, rank);
            uint32_t *owners = column_owners + (at.p * layout.tp + at.t) * model.chunk_count;
            uint32_t column = mark(&model, &layout, rank, MU_SHARE_PARAMS, map);
            uint32_t own = mark(&model, &layout, rank, MU_SHARE_OWNED, owned);
            assert_true(own == column / layout.dp || own == column / layout.dp + 1);
            mark(&model, &layout, rank, MU_SHARE_PRIMARY, primary);
            for (uint32_t c = 0; c < model.chunk_count; c++) {
                struct mu_cell cell = mu_model_cell(&model, mu_model_chunk(&model, c).cell);
                assert_int_equal(map[c], in_column(&model, &layout, &cell, at));
                assert_true(map[c] || !owned[c]);
                assert_int_equal(primary[c], owned[c] && (!is_shared(cell.kind) || at.t == 0));
                primary_owners[c] += primary[c];
                owners[c] += owned[c];
            }
            mark(&model, &layout, rank, MU_SHARE_MOMENTS, primary);
            assert_memory_equal(primary, layout.sharded ? owned : map, model.chunk_count);
            mark(&model, &layout, rank, MU_SHARE_COPY, primary);
            bool copies = mu_model_is_tied(&model.config) && layout.pp > 1 && at.p + 1 == layout.pp;
            for (uint32_t c = 0; c < model.chunk_count; c++) {
                struct mu_cell cell = mu_model_cell(&model, mu_model_chunk(&model, c).cell);
                struct mu_coords first = {.t = at.t};
                assert_int_equal(primary[c],
                                 copies && cell.kind == MU_CELL_E && in_column(&model, &layout, &cell, first));
            }
        }
        for (uint32_t c = 0; c < model.chunk_count; c++) {
            assert_int_equal(primary_owners[c], 1);
            struct mu_cell cell = mu_model_cell(&model, mu_model_chunk(&model, c).cell);
            for (uint32_t k = 0; k < layout.tp * layout.pp; k++) {
                struct mu_coords at = {.t = k % layout.tp, .p = k / layout.tp};
                assert_int_equal(column_owners[k * model.chunk_count + c], in_column(&model, &layout, &cell, at));
            }
        }
        for (uint32_t rank = mu_layout_working(&layout); rank < mu_layout_world(&layout); rank++) {
            assert_true(mu_layout_is_idle(&layout, rank));
            assert_int_equal(mu_layout_runs(&model, &layout, rank, MU_SHARE_PARAMS, NULL), 0);
            assert_int_equal(mu_layout_elements(&model, &layout, rank, MU_SHARE_PRIMARY), 0);
        }
        free(map);
        free(owned);
        free(primary);
        free(primary_owners);
        free(column_owners);
    }
}

/* Everybody guards one and is guarded by one; a mirror is what the guarded rank updates, without what the buddy updates
 * for itself; between them the groups leave nothing with one holder. */
static void test_layout_mirrors_follow_the_definition(void **state)
{
    (void)state;
    for (int round = 0; round < 200; round++) {
        struct mu_model_spec model;
        struct mu_layout layout;
        random_grid(&model, &layout);
        uint32_t working = mu_layout_working(&layout), group = mu_layout_buddy_group(&layout);
        assert_int_equal(group, layout.dp == 1 ? working : layout.sharded ? layout.dp : 1);
        layout.buddy_shift = random_below(group);
        uint8_t *guarded = malloc(model.chunk_count), *own = malloc(model.chunk_count),
                *mirror = malloc(model.chunk_count);
        uint32_t *holders = calloc(model.chunk_count, sizeof *holders);
        assert_true(guarded && own && mirror && holders);
        for (uint32_t rank = 0; rank < mu_layout_world(&layout); rank++) {
            uint32_t mine = mu_layout_guarded(&layout, rank),
                     chunks = mark(&model, &layout, rank, MU_SHARE_MIRROR, mirror);
            if (layout.buddy_shift == 0 || rank >= working) {
                assert_int_equal(mine, MU_LAYOUT_NOBODY);
                assert_int_equal(mu_layout_buddy(&layout, rank), MU_LAYOUT_NOBODY);
                assert_int_equal(chunks, 0);
                continue;
            }
            assert_true(mine < working && mine != rank);
            assert_int_equal(mu_layout_buddy(&layout, mine), rank);
            struct mu_coords a = mu_layout_coords(&layout, rank), b = mu_layout_coords(&layout, mine);
            assert_true(layout.dp == 1 || (a.t == b.t && a.p == b.p));
            mark(&model, &layout, mine, MU_SHARE_OWNED, guarded);
            mark(&model, &layout, rank, layout.sharded ? MU_SHARE_OWNED : MU_SHARE_PARAMS, own);
            for (uint32_t c = 0; c < model.chunk_count; c++) {
                assert_int_equal(mirror[c], guarded[c] && !own[c]);
                holders[c] += mirror[c] + own[c];
            }
        }
        for (uint32_t c = 0; c < model.chunk_count && layout.buddy_shift > 0; c++)
            assert_true(holders[c] >= 2);
        free(guarded);
        free(own);
        free(mirror);
        free(holders);
    }
}

static void test_layout_buddies_are_on_other_hosts_where_a_shift_allows(void **state)
{
    (void)state;
    uint32_t apart;
    /* Hosts side by side, or in turn: the shift finds another host for everybody. */
    static const uint32_t cases[][8] = {
        {1, 1, 2, 2, 3, 3}, {1, 2, 3, 1, 2, 3}, {1, 2, 2, 1, 3, 3}, {1, 1, 1, 2, 2, 2}, {1, 2, 1, 2, 1, 2}};
    struct mu_layout layout = {.tp = 1, .pp = 1, .dp = 6, .sharded = true, .stage_first = {0, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        layout.buddy_shift = mu_layout_buddy_shift(&layout, cases[i], cases[i], &apart);
        assert_int_equal(apart, 6);
        for (uint32_t rank = 0; rank < 6; rank++)
            assert_int_not_equal(cases[i][rank], cases[i][mu_layout_buddy(&layout, rank)]);
    }
    /* Of the shifts that find another host, one that finds another switch; hosts come before switches. */
    static const uint32_t hosts[8] = {1, 2, 3, 4, 5, 6}, switches[8] = {1, 1, 1, 2, 2, 2},
                          thirds[8] = {1, 2, 3, 1, 2, 3}, halves[8] = {1, 1, 2, 1, 1, 2};
    assert_int_equal(mu_layout_buddy_shift(&layout, hosts, switches, &apart), 3);
    assert_int_equal(apart, 6);
    assert_int_equal(mu_layout_buddy_shift(&layout, thirds, switches, &apart), 2);
    assert_int_equal(apart, 6);
    assert_int_equal(mu_layout_buddy_shift(&layout, thirds, halves, &apart), 1);
    /* One host: the next one. More than half of all on one host: as many as can be. */
    static const uint32_t one[8] = {4, 4, 4, 4, 4, 4, 4, 4}, most[8] = {1, 1, 1, 1, 2, 1};
    assert_int_equal(mu_layout_buddy_shift(&layout, one, one, &apart), 1);
    assert_int_equal(apart, 0);
    assert_int_equal(mu_layout_buddy_shift(&layout, most, most, &apart), 1);
    assert_int_equal(apart, 2);
    /* dp = 1: all ranks are one group; no group: no buddies. */
    layout = (struct mu_layout){.tp = 2, .pp = 2, .dp = 1, .stage_first = {0, 3, 6}};
    static const uint32_t pairs[4] = {1, 1, 2, 2};
    assert_int_equal(mu_layout_buddy_shift(&layout, pairs, pairs, &apart), 2);
    assert_int_equal(apart, 4);
    layout.dp = 2;
    assert_int_equal(mu_layout_buddy_shift(&layout, one, one, &apart), 0);
    layout = (struct mu_layout){.tp = 1, .pp = 1, .dp = 1, .sharded = true, .stage_first = {0, 6}};
    assert_int_equal(mu_layout_buddy_shift(&layout, one, one, &apart), 0);
}

/* Random topologies: the shift is the best of all; and where hosts of any sizes stand side by side, none with more than
 * half of the ranks, any one of them may vanish: whatever it held has another holder. */
static void test_layout_any_one_host_may_vanish_where_none_has_more_than_half(void **state)
{
    (void)state;
    uint32_t covered = 0;
    for (uint32_t round = 0; round < 2000; round++) {
        uint32_t ranks = 2 + random_below(15), hosts[16], shuffled[16], apart, largest = 0;
        struct mu_layout layout = {.tp = 1, .pp = 1, .dp = ranks, .sharded = true, .stage_first = {0, 6}};
        for (uint32_t rank = 0, host = 0; rank < ranks; host++) {
            uint32_t size = 1 + random_below(ranks - rank < 6 ? ranks - rank : 6);
            largest = size > largest ? size : largest;
            for (uint32_t i = 0; i < size; i++)
                hosts[rank++] = host;
        }
        layout.buddy_shift = mu_layout_buddy_shift(&layout, hosts, hosts, &apart);
        for (uint32_t rank = 0; rank < ranks && 2 * largest <= ranks; rank++)
            assert_int_not_equal(hosts[rank], hosts[mu_layout_buddy(&layout, rank)]);
        covered += 2 * largest <= ranks;
        for (uint32_t rank = 0; rank < ranks; rank++) /* anywhere: some shift may be the best and not suffice */
            shuffled[rank] = hosts[random_below(ranks)];
        uint32_t best = 0;
        for (uint32_t shift = 1; shift < ranks; shift++) {
            uint32_t count = 0;
            for (uint32_t rank = 0; rank < ranks; rank++)
                count += shuffled[rank] != shuffled[(rank + shift) % ranks];
            best = count > best ? count : best;
        }
        layout.buddy_shift = mu_layout_buddy_shift(&layout, shuffled, shuffled, &apart);
        assert_int_equal(apart, best);
    }
    assert_true(covered > 500);
}

static void test_layout_data_parallel_shares_are_those_of_equal_chunks(void **state)
{
    (void)state;
    const struct mu_model_config config = {
        .family = MU_FAMILY_GPT2, .layers = 12, .heads = 12, .channels = 768, .context = 1024, .vocab = 50257};
    struct mu_model_spec model;
    mu_model_spec_init(&model, &config);
    for (uint32_t dp = 1; dp < 40; dp++) {
        struct mu_layout layout;
        mu_layout_init(&layout, dp, config.layers);
        for (uint32_t rank = 0; rank < dp; rank++) {
            struct mu_chunk_run run;
            uint32_t first, count;
            mu_model_owned_chunks(&model, dp, rank, &first, &count);
            assert_int_equal(mu_layout_runs(&model, &layout, rank, MU_SHARE_PRIMARY, &run), 1);
            assert_int_equal(run.first, first);
            assert_int_equal(run.count, count);
            assert_int_equal(mu_layout_runs(&model, &layout, rank, MU_SHARE_PARAMS, &run), 1);
            assert_int_equal(run.count, model.chunk_count);
        }
    }
}

static void test_layout_largest_share_fits_its_runs(void **state)
{
    (void)state;
    const struct mu_model_config config = {.family = MU_FAMILY_LLAMA,
                                           .layers = MU_LAYERS_MAX,
                                           .heads = 64,
                                           .channels = 64,
                                           .hidden = 64,
                                           .context = 4,
                                           .vocab = 64,
                                           .slices = 64};
    struct mu_model_spec model;
    mu_model_spec_init(&model, &config);
    struct mu_layout layout;
    mu_layout_init(&layout, 1, MU_LAYERS_MAX);
    layout.tp = 64;
    struct mu_chunk_run *runs = calloc(MU_RUNS_MAX, sizeof *runs);
    assert_non_null(runs);
    uint32_t count = mu_layout_runs(&model, &layout, 30, MU_SHARE_PARAMS, runs);
    assert_int_equal(count, 1 + 2 * MU_LAYERS_MAX + 2); /* E.30, then slice and shared of each layer, F.30, F.shared */
    assert_int_equal(runs[0].first, 30);
    assert_int_equal(runs[1].first, 64 + 30);
    assert_int_equal(runs[count - 1].first, model.chunk_count - 1);
    assert_int_equal(mu_layout_runs(&model, &layout, 63, MU_SHARE_PARAMS, NULL), 1 + MU_LAYERS_MAX + 1);
    free(runs);
}

static void test_layout_ranks_and_coordinates_agree(void **state)
{
    (void)state;
    struct mu_layout layout = {.tp = 4, .pp = 3, .dp = 5, .idle = 2, .stage_first = {0, 1, 2, 3}};
    assert_int_equal(mu_layout_working(&layout), 60);
    assert_int_equal(mu_layout_world(&layout), 62);
    uint32_t rank = 0;
    for (uint32_t p = 0; p < 3; p++)
        for (uint32_t d = 0; d < 5; d++)
            for (uint32_t t = 0; t < 4; t++, rank++) {
                struct mu_coords at = mu_layout_coords(&layout, rank);
                assert_int_equal(at.t, t);
                assert_int_equal(at.d, d);
                assert_int_equal(at.p, p);
                assert_int_equal(mu_layout_rank(&layout, at), rank);
                assert_false(mu_layout_is_idle(&layout, rank));
            }
    assert_true(mu_layout_is_idle(&layout, 60) && mu_layout_is_idle(&layout, 61));
}

static bool has(const uint32_t *list, uint32_t count, uint32_t rank)
{
    for (uint32_t i = 0; i < count; i++)
        if (list[i] == rank)
            return true;
    return false;
}

static void test_layout_neighbours_are_mutual_and_reach_what_is_needed(void **state)
{
    (void)state;
    const struct mu_layout grids[] = {
        {.tp = 2, .pp = 2, .dp = 3, .idle = 1, .stage_first = {0, 2, 4}},
        {.tp = 4, .pp = 4, .dp = 5, .idle = 2, .stage_first = {0, 1, 2, 3, 4}},
        {.tp = 1, .pp = 1, .dp = 77, .stage_first = {0, 4}},
        {.tp = 64, .pp = 2, .dp = 40, .idle = 3, .stage_first = {0, 3, 4}},
        {.tp = 2, .pp = 1, .dp = 32, .stage_first = {0, 4}},
    };
    for (size_t g = 0; g < 2 * sizeof grids / sizeof grids[0]; g++) {
        const struct mu_layout *layout = &grids[g / 2];
        const struct mu_model_config config = {.family = g % 2 ? MU_FAMILY_LLAMA : MU_FAMILY_GPT2,
                                               .layers = 4,
                                               .heads = 64,
                                               .channels = 128,
                                               .hidden = 512,
                                               .context = 8,
                                               .vocab = 64,
                                               .slices = 64};
        struct mu_model_spec model;
        mu_model_spec_init(&model, &config);
        uint32_t world = mu_layout_world(layout), working = mu_layout_working(layout);
        uint32_t(*lists)[MU_LAYOUT_NEIGHBOURS_MAX] = calloc(world, sizeof *lists), *counts = calloc(world, 4);
        assert_true(lists && counts);
        for (uint32_t rank = 0; rank < world; rank++) {
            counts[rank] = mu_layout_neighbours(&model, layout, rank, lists[rank]);
            for (uint32_t i = 0; i < counts[rank]; i++)
                assert_true(lists[rank][i] < world && lists[rank][i] != rank &&
                            (i == 0 || lists[rank][i] > lists[rank][i - 1]));
        }
        for (uint32_t rank = 0; rank < world; rank++) {
            for (uint32_t i = 0; i < counts[rank]; i++)
                assert_true(has(lists[lists[rank][i]], counts[lists[rank][i]], rank));
            if (world <= MU_MESH_WORLD_MAX)
                assert_int_equal(counts[rank], world - 1);
            else if (rank > 0)
                assert_true(has(lists[rank], counts[rank], rank & (rank - 1)));
            if (rank >= working)
                continue;
            struct mu_coords at = mu_layout_coords(layout, rank), other = at;
            for (other.t = 0; other.t < layout->tp; other.t++)
                assert_true(other.t == at.t || has(lists[rank], counts[rank], mu_layout_rank(layout, other)));
            other = at;
            for (other.d = 0; other.d < layout->dp && layout->dp <= MU_MESH_WORLD_MAX; other.d++)
                assert_true(other.d == at.d || has(lists[rank], counts[rank], mu_layout_rank(layout, other)));
            other = at;
            if (++other.p < layout->pp)
                assert_true(has(lists[rank], counts[rank], mu_layout_rank(layout, other)));
            other.p = layout->pp - 1;
            if (at.p == 0 && layout->pp > 1 && mu_model_is_tied(&model.config))
                assert_true(has(lists[rank], counts[rank], mu_layout_rank(layout, other)));
        }
        free(lists);
        free(counts);
    }
}

/* Every member but 0 has a parent that has it as a child; all hang together, at most 32 levels deep. */
static void test_layout_binomial_is_a_tree(void **state)
{
    (void)state;
    const uint32_t sizes[] = {1, 2, 3, 7, 8, 33, 100, 1024, 65536};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        uint32_t edges = 0;
        for (uint32_t index = 0; index < sizes[s]; index++) {
            uint32_t out[33], theirs[33], count = mu_layout_binomial(sizes[s], index, out);
            for (uint32_t i = 0; i < count; i++) {
                assert_true(out[i] < sizes[s] && out[i] != index && (i == 0 || out[i] > out[i - 1]));
                if (index > 0 && i == 0)
                    assert_true(out[0] < index);
                else
                    assert_true(out[i] > index);
                assert_true(has(theirs, mu_layout_binomial(sizes[s], out[i], theirs), index));
            }
            edges += count;
        }
        assert_int_equal(edges, 2 * (sizes[s] - 1));
    }
    uint32_t out[33];
    assert_int_equal(mu_layout_binomial(UINT32_MAX, 0, out), 32);
    assert_int_equal(mu_layout_binomial(UINT32_MAX, 1u << 31, out), 32);
}

static struct mu_job_spec job(void)
{
    struct mu_job_spec s;
    mu_job_spec_init(&s);
    s.model.layers = 6;
    s.model.heads = 8;
    s.model.channels = 64;
    s.model.slices = 4;
    s.batch.sequences = 40;
    s.batch.micro = 1;
    return s;
}

static void refused(const struct mu_job_spec *spec, struct mu_layout layout, const char *text)
{
    struct mu_error err = {0};
    assert_int_equal(mu_layout_check(&layout, spec, &err), MU_ERR_INVALID);
    if (!strstr(err.text, text))
        fail_msg("'%s' lacks '%s'", err.text, text);
}

static void test_layout_check_names_what_is_wrong(void **state)
{
    (void)state;
    struct mu_job_spec s = job();
    const struct mu_layout good = {.tp = 2, .pp = 3, .dp = 5, .stage_first = {0, 1, 3, 6}};
    struct mu_error err = {0};
    assert_int_equal(mu_layout_check(&good, &s, &err), MU_OK);
#define BAD(change, text)                                                                                              \
    do {                                                                                                               \
        struct mu_layout l = good;                                                                                     \
        change;                                                                                                        \
        refused(&s, l, text);                                                                                          \
    } while (0)
    BAD(l.tp = 0, "layout.tp: value 0");
    BAD(l.tp = 8, "layout.tp: value 8 is not allowed: 1 to 4");
    BAD(l.tp = 3, "a divisor of the job's 4 slices");
    BAD(l.pp = 0, "layout.pp: value 0");
    BAD(l.pp = 7, "layout.pp: value 7 is not allowed: 1 to 6");
    BAD(l.pp = UINT32_MAX, "layout.pp");
    BAD(l.dp = 0, "layout.dp: value 0");
    BAD(l.dp = 41, "layout.dp: value 41 is not allowed: 1 to 40");
    BAD(l.stage_first[1] = 0, "stage 0 is not allowed to be empty");
    BAD(l.stage_first[2] = 7, "stage 2 is not allowed to be empty");
    BAD(l.stage_first[3] = 7, "stages from layer 0 to 7");
    BAD((l.stage_first[0] = 1, l.stage_first[1] = 2), "stages from layer 1 to 6");
    BAD(l.sharded = true, "layout.sharded: value 1");
    BAD(l.idle = MU_WORKERS_MAX, "65566 ranks");
    s.parallel.tp = 1;
    BAD((void)l, "the job sets parallel.tp to 1");
    s = job();
    s.parallel.optimizer_sharding = true;
    BAD((l.sharded = true, l.dp = 41), "layout.dp: value 41 is not allowed: 1 to 40");
    struct mu_layout sharded = good;
    sharded.sharded = true;
    assert_int_equal(mu_layout_check(&sharded, &s, &err), MU_OK);
    assert_false(mu_layout_equal(&good, &sharded));
    struct mu_layout other = good;
    other.stage_first[20] = 9; /* beyond what is in use */
    assert_true(mu_layout_equal(&good, &other));
    other.stage_first[1] = 2;
    assert_false(mu_layout_equal(&good, &other));
}

/* Groups tile the replicas, are at most a mesh, differ by one at most; each has every moment of a column once; the
 * first one answers for them; a replica knows its whole group. */
static void test_layout_shard_groups_own_everything_each(void **state)
{
    (void)state;
    for (uint32_t dp = 1; dp < 300; dp++) {
        struct mu_shard_group first = mu_layout_shard_group(dp, 0);
        uint32_t next = 0;
        while (next < dp) {
            struct mu_shard_group group = mu_layout_shard_group(dp, next);
            assert_int_equal(group.first, next);
            assert_true(group.count <= MU_MESH_WORLD_MAX && group.count <= first.count &&
                        group.count + 1 >= first.count);
            for (uint32_t d = group.first; d < group.first + group.count; d++)
                assert_memory_equal(&group, &(struct mu_shard_group[]){mu_layout_shard_group(dp, d)}[0], sizeof group);
            next += group.count;
        }
        assert_int_equal(next, dp);
        assert_true(dp > MU_MESH_WORLD_MAX || first.count == dp);
    }
    struct mu_job_spec s = job();
    struct mu_model_spec model;
    mu_model_spec_init(&model, &s.model);
    for (uint32_t dp = 33; dp <= 97; dp += 16) {
        struct mu_layout layout = {.tp = 2, .pp = 2, .dp = dp, .sharded = true, .stage_first = {0, 2, 6}};
        assert_int_equal(mu_layout_buddy_group(&layout), 1);
        uint64_t primary = 0, elements = mu_model_elements_before(&model, model.chunk_count);
        for (uint32_t first = 0; first < dp;) {
            struct mu_shard_group group = mu_layout_shard_group(dp, first);
            for (uint32_t column = 0; column < 4; column++) {
                uint64_t owned = 0;
                for (uint32_t d = first; d < first + group.count; d++) {
                    uint32_t rank = mu_layout_rank(&layout, (struct mu_coords){column % 2, d, column / 2});
                    uint64_t own = mu_layout_elements(&model, &layout, rank, MU_SHARE_PRIMARY);
                    owned += mu_layout_elements(&model, &layout, rank, MU_SHARE_MOMENTS);
                    primary += own;
                    assert_true(first == 0 || own == 0);
                    uint32_t out[MU_LAYOUT_NEIGHBOURS_MAX], known = 0;
                    uint32_t count = mu_layout_neighbours(&model, &layout, rank, out);
                    for (uint32_t i = 0; i < count; i++) {
                        struct mu_coords at = mu_layout_coords(&layout, out[i]);
                        known +=
                            at.t == column % 2 && at.p == column / 2 && at.d >= first && at.d < first + group.count;
                    }
                    assert_int_equal(known, group.count - 1);
                }
                uint32_t rank = mu_layout_rank(&layout, (struct mu_coords){column % 2, first, column / 2});
                assert_int_equal(owned, mu_layout_elements(&model, &layout, rank, MU_SHARE_PARAMS));
            }
            first += group.count;
        }
        assert_int_equal(primary, elements);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout_shares_follow_the_definition),
        cmocka_unit_test(test_layout_mirrors_follow_the_definition),
        cmocka_unit_test(test_layout_shard_groups_own_everything_each),
        cmocka_unit_test(test_layout_buddies_are_on_other_hosts_where_a_shift_allows),
        cmocka_unit_test(test_layout_any_one_host_may_vanish_where_none_has_more_than_half),
        cmocka_unit_test(test_layout_data_parallel_shares_are_those_of_equal_chunks),
        cmocka_unit_test(test_layout_largest_share_fits_its_runs),
        cmocka_unit_test(test_layout_ranks_and_coordinates_agree),
        cmocka_unit_test(test_layout_neighbours_are_mutual_and_reach_what_is_needed),
        cmocka_unit_test(test_layout_binomial_is_a_tree),
        cmocka_unit_test(test_layout_check_names_what_is_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
