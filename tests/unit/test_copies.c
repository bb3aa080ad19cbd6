/* links: mu_plan */
#include "plan/copies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { RANKS_MAX = 512 };

static uint64_t state_of_random = 99;

static uint32_t random_below(uint32_t bound)
{
    state_of_random = state_of_random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state_of_random >> 33) % bound);
}

/* A layout of a small model of 4 layers and 4 slices, with or without sharding, with buddies where it may have them. */
static void random_layout(struct mu_model_spec *model, struct mu_layout *layout, uint32_t *hosts)
{
    struct mu_model_config config = {.family = MU_FAMILY_GPT2,
                                     .layers = 4,
                                     .heads = 4,
                                     .channels = 16 * (1 + random_below(20)),
                                     .context = 64,
                                     .vocab = 256,
                                     .slices = 4};
    mu_model_spec_init(model, &config);
    uint32_t pp = 1 + random_below(4);
    *layout = (struct mu_layout){.tp = 1u << random_below(3),
                                 .pp = pp,
                                 .dp = 1 + random_below(6),
                                 .idle = random_below(3),
                                 .sharded = random_below(2)};
    for (uint32_t p = 0; p < pp; p++)
        layout->stage_first[p + 1] = (uint16_t)(p + 1 == pp ? 4 : p + 1);
    uint32_t working = mu_layout_working(layout), host_count = 1 + random_below(5), apart;
    for (uint32_t rank = 0; rank < working; rank++)
        hosts[rank] = random_below(host_count);
    if (random_below(2))
        layout->buddy_shift = mu_layout_buddy_shift(layout, hosts, &apart);
}

static void mark(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank, enum mu_share share,
                 uint8_t *map)
{
    static struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++)
        memset(map + runs[i].first, 1, runs[i].count);
}

/* Parameters and moments of every chunk of the piece: what `rank` steps itself, and what it mirrors. */
static bool can_write(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank, uint32_t piece)
{
    uint8_t *wanted = calloc(model->chunk_count, 1), *params = calloc(model->chunk_count, 1),
            *moments = calloc(model->chunk_count, 1);
    assert_true(wanted && params && moments);
    mark(model, layout, piece, MU_SHARE_PRIMARY, wanted);
    mark(model, layout, rank, MU_SHARE_PARAMS, params);
    mark(model, layout, rank, MU_SHARE_MOMENTS, moments);
    if (layout->buddy_shift) {
        mark(model, layout, rank, MU_SHARE_MIRROR, params);
        mark(model, layout, rank, MU_SHARE_MIRROR, moments);
    }
    bool can = true;
    for (uint32_t c = 0; c < model->chunk_count; c++)
        can = can && (!wanted[c] || (params[c] && moments[c]));
    free(wanted);
    free(params);
    free(moments);
    return can;
}

static bool has_slices(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t piece)
{
    uint8_t *map = calloc(model->chunk_count, 1);
    assert_non_null(map);
    mark(model, layout, piece, MU_SHARE_PRIMARY, map);
    bool has = false;
    for (uint32_t c = 0; c < model->chunk_count; c++) {
        enum mu_cell_kind kind = mu_model_cell(model, mu_model_chunk(model, c).cell).kind;
        has = has || (map[c] && (kind == MU_CELL_E || kind == MU_CELL_L || kind == MU_CELL_F));
    }
    free(map);
    return has;
}

/* Against the shares themselves: who is chosen holds the piece and is elsewhere; where nobody is chosen, no rank on
 * another host holds it. */
static void test_copies_are_written_by_holders_on_other_hosts(void **state)
{
    (void)state;
    static uint32_t hosts[RANKS_MAX], writers[RANKS_MAX], copies[RANKS_MAX], counted[RANKS_MAX];
    uint32_t with = 0, checked = 0;
    for (int round = 0; round < 300; round++) {
        struct mu_model_spec model;
        struct mu_layout layout;
        random_layout(&model, &layout, hosts);
        uint32_t working = mu_layout_working(&layout), count = 0;
        memset(counted, 0, sizeof counted);
        uint32_t told = mu_copies_plan(&layout, hosts, writers, copies);
        for (uint32_t piece = 0; piece < working; piece++) {
            uint32_t writer = writers[piece];
            if (writer != MU_LAYOUT_NOBODY) {
                assert_true(writer < working);
                assert_int_not_equal(hosts[writer], hosts[piece]);
                assert_true(can_write(&model, &layout, writer, piece));
                counted[writer]++;
                count++;
                continue;
            }
            if (!has_slices(&model, &layout, piece))
                continue; /* nothing, or what every tensor rank of the stage holds alike */
            checked++;
            for (uint32_t rank = 0; rank < working; rank++)
                assert_true(hosts[rank] == hosts[piece] || !can_write(&model, &layout, rank, piece));
        }
        with += count;
        assert_int_equal(told, count);
        assert_memory_equal(counted, copies, working * sizeof *copies);
    }
    assert_true(with > 1000 && checked > 1000);
}

/* As many replicas on each host: everybody writes one copy, none two. */
static void test_copies_are_spread_evenly_over_equal_hosts(void **state)
{
    (void)state;
    static uint32_t hosts[RANKS_MAX], writers[RANKS_MAX], copies[RANKS_MAX];
    for (uint32_t host_count = 2; host_count <= 4; host_count++) {
        for (uint32_t each = 1; each <= 8; each++) {
            for (int blocks = 0; blocks < 2; blocks++) {
                struct mu_layout layout;
                mu_layout_init(&layout, host_count * each, 4);
                for (uint32_t rank = 0; rank < layout.dp; rank++)
                    hosts[rank] = blocks ? rank / each : rank % host_count;
                assert_int_equal(mu_copies_plan(&layout, hosts, writers, copies), layout.dp);
                for (uint32_t rank = 0; rank < layout.dp; rank++)
                    assert_int_equal(copies[rank], 1);
            }
        }
    }
}

static void test_one_host_has_one_copy(void **state)
{
    (void)state;
    struct mu_layout layout;
    uint32_t hosts[4] = {7, 7, 7, 7}, writers[4], copies[4];
    mu_layout_init(&layout, 4, 4);
    assert_int_equal(mu_copies_plan(&layout, hosts, writers, copies), 0);
    for (uint32_t rank = 0; rank < 4; rank++) {
        assert_int_equal(writers[rank], MU_LAYOUT_NOBODY);
        assert_int_equal(copies[rank], 0);
    }
    hosts[3] = 8; /* all others write there, and one of them its copy */
    assert_int_equal(mu_copies_plan(&layout, hosts, writers, copies), 4);
    assert_int_equal(copies[3], 3);
    assert_int_equal(writers[3], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies_are_written_by_holders_on_other_hosts),
        cmocka_unit_test(test_copies_are_spread_evenly_over_equal_hosts),
        cmocka_unit_test(test_one_host_has_one_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
