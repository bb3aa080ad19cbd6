/* links: mu_plan */
#include "plan/model_spec.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const struct mu_model_config gpt2_124m = {
    .family = MU_FAMILY_GPT2, .layers = 12, .heads = 12, .channels = 768, .context = 1024, .vocab = 50257};

/* Shapes chosen so that cells are smaller than, equal to and larger than chunks, and not multiples of the alignment. */
static const struct mu_model_config configs[] = {
    {.family = MU_FAMILY_GPT2, .layers = 1, .heads = 1, .channels = 1, .context = 1, .vocab = 2},
    {.family = MU_FAMILY_GPT2, .layers = 3, .heads = 3, .channels = 33, .context = 7, .vocab = 257},
    {.family = MU_FAMILY_GPT2, .layers = 2, .heads = 4, .channels = 256, .context = 256, .vocab = 256},
    {.family = MU_FAMILY_GPT2, .layers = 5, .heads = 5, .channels = 65, .context = 1009, .vocab = 1010},
    {.family = MU_FAMILY_GPT2, .layers = 12, .heads = 12, .channels = 768, .context = 1024, .vocab = 50257},
};
enum { CONFIG_COUNT = sizeof configs / sizeof configs[0] };

static void test_model_spec_gpt2_124m_has_124439808_parameters(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &gpt2_124m);
    assert_int_equal(spec.parameter_count, 124439808);
    assert_int_equal(spec.tensor_count, 148);
    assert_int_equal(spec.cell_count, 27);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < spec.tensor_count; i++)
        sum += mu_model_tensor(&spec, i).size;
    assert_int_equal(sum, spec.parameter_count);
    assert_true(spec.flat_size >= sum && spec.flat_size % MU_CELL_ALIGN == 0);
}

struct expected_tensor {
    const char *name;
    uint32_t layer;
    enum mu_gpt2_role role;
    uint64_t rows, columns;
    const char *cell;
    bool decay;
    enum mu_init_kind init;
    double std;
};

static void test_model_spec_tensors_are_those_of_hugging_face(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &gpt2_124m);
    const double residual = 0.02 / sqrt(24.0);
    const struct expected_tensor expected[] = {
        {"transformer.wte.weight", 0, MU_GPT2_WTE, 50257, 768, "E.0", true, MU_INIT_NORMAL, 0.02},
        {"transformer.wpe.weight", 0, MU_GPT2_WPE, 1024, 768, "E.shared", true, MU_INIT_NORMAL, 0.02},
        {"transformer.h.0.ln_1.weight", 0, MU_GPT2_LN1_W, 768, 1, "L0.shared", false, MU_INIT_ONE, 0},
        {"transformer.h.0.ln_1.bias", 0, MU_GPT2_LN1_B, 768, 1, "L0.shared", false, MU_INIT_ZERO, 0},
        {"transformer.h.3.attn.c_attn.weight", 3, MU_GPT2_QKV_W, 768, 2304, "L3.0", true, MU_INIT_NORMAL, 0.02},
        {"transformer.h.3.attn.c_attn.bias", 3, MU_GPT2_QKV_B, 2304, 1, "L3.0", false, MU_INIT_ZERO, 0},
        {"transformer.h.3.attn.c_proj.weight", 3, MU_GPT2_PROJ_W, 768, 768, "L3.0", true, MU_INIT_NORMAL, residual},
        {"transformer.h.3.attn.c_proj.bias", 3, MU_GPT2_PROJ_B, 768, 1, "L3.shared", false, MU_INIT_ZERO, 0},
        {"transformer.h.7.ln_2.weight", 7, MU_GPT2_LN2_W, 768, 1, "L7.shared", false, MU_INIT_ONE, 0},
        {"transformer.h.7.ln_2.bias", 7, MU_GPT2_LN2_B, 768, 1, "L7.shared", false, MU_INIT_ZERO, 0},
        {"transformer.h.11.mlp.c_fc.weight", 11, MU_GPT2_FC_W, 768, 3072, "L11.0", true, MU_INIT_NORMAL, 0.02},
        {"transformer.h.11.mlp.c_fc.bias", 11, MU_GPT2_FC_B, 3072, 1, "L11.0", false, MU_INIT_ZERO, 0},
        {"transformer.h.11.mlp.c_proj.weight", 11, MU_GPT2_FCPROJ_W, 3072, 768, "L11.0", true, MU_INIT_NORMAL,
         residual},
        {"transformer.h.11.mlp.c_proj.bias", 11, MU_GPT2_FCPROJ_B, 768, 1, "L11.shared", false, MU_INIT_ZERO, 0},
        {"transformer.ln_f.weight", 0, MU_GPT2_LNF_W, 768, 1, "F.shared", false, MU_INIT_ONE, 0},
        {"transformer.ln_f.bias", 0, MU_GPT2_LNF_B, 768, 1, "F.shared", false, MU_INIT_ZERO, 0},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        const struct expected_tensor *e = &expected[i];
        struct mu_tensor t = mu_gpt2_tensor(&spec, e->layer, e->role);
        assert_string_equal(t.name, e->name);
        assert_int_equal(t.rows, e->rows);
        assert_int_equal(t.columns, e->columns);
        assert_int_equal(t.size, e->rows * e->columns);
        assert_string_equal(mu_model_cell(&spec, t.cell).name, e->cell);
        assert_int_equal(t.decay, e->decay);
        assert_int_equal(t.init, e->init);
        assert_true(t.init_std == e->std);
    }
}

static void test_model_spec_index_order_is_role_order(void **state)
{
    (void)state;
    for (int c = 0; c < CONFIG_COUNT; c++) {
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &configs[c]);
        uint32_t index = 0;
        for (enum mu_gpt2_role role = MU_GPT2_WTE; role <= MU_GPT2_WPE; role++)
            assert_string_equal(mu_model_tensor(&spec, index++).name, mu_gpt2_tensor(&spec, 0, role).name);
        for (uint32_t layer = 0; layer < spec.config.layers; layer++)
            for (enum mu_gpt2_role role = MU_GPT2_LN1_W; role <= MU_GPT2_FCPROJ_B; role++)
                assert_string_equal(mu_model_tensor(&spec, index++).name, mu_gpt2_tensor(&spec, layer, role).name);
        for (enum mu_gpt2_role role = MU_GPT2_LNF_W; role <= MU_GPT2_LNF_B; role++)
            assert_string_equal(mu_model_tensor(&spec, index++).name, mu_gpt2_tensor(&spec, 0, role).name);
        assert_int_equal(index, spec.tensor_count);
    }
}

/* Every element of the flat space belongs to at most one tensor; tensors fill their cells exactly; only gaps belong to
 * nobody. */
static void test_model_spec_tensors_tile_cells_and_cells_are_disjoint(void **state)
{
    (void)state;
    for (int c = 0; c < CONFIG_COUNT; c++) {
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &configs[c]);
        uint64_t end = 0, *filled = calloc(spec.cell_count, sizeof *filled);
        assert_non_null(filled);
        for (uint32_t i = 0; i < spec.tensor_count; i++) {
            struct mu_tensor tensor = mu_model_tensor(&spec, i);
            struct mu_cell cell = mu_model_cell(&spec, tensor.cell);
            assert_int_equal(tensor.offset, cell.offset + filled[tensor.cell]); /* packed, in index order */
            filled[tensor.cell] += tensor.size;
            assert_true(filled[tensor.cell] <= cell.size);
        }
        for (uint32_t i = 0; i < spec.cell_count; i++) {
            struct mu_cell cell = mu_model_cell(&spec, i);
            assert_int_equal(filled[i], cell.size);
            assert_int_equal(cell.offset % MU_CELL_ALIGN, 0);
            assert_true(cell.offset >= end && cell.offset - end < MU_CELL_ALIGN);
            end = cell.offset + cell.size;
        }
        assert_true(spec.flat_size >= end && spec.flat_size - end < MU_CELL_ALIGN);
        free(filled);
    }
}

static void test_model_spec_chunks_tile_cells(void **state)
{
    (void)state;
    for (int c = 0; c < CONFIG_COUNT; c++) {
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &configs[c]);
        uint32_t next = 0;
        for (uint32_t i = 0; i < spec.cell_count; i++) {
            struct mu_cell cell = mu_model_cell(&spec, i);
            assert_int_equal(cell.first_chunk, next);
            uint64_t offset = cell.offset;
            for (uint32_t k = 0; k < cell.chunk_count; k++) {
                struct mu_chunk chunk = mu_model_chunk(&spec, next++);
                assert_int_equal(chunk.cell, i);
                assert_int_equal(chunk.offset, offset);
                assert_true(chunk.size >= 1 && chunk.size <= MU_CHUNK_ELEMENTS);
                assert_true(chunk.size == MU_CHUNK_ELEMENTS || k + 1 == cell.chunk_count);
                offset += chunk.size;
            }
            assert_int_equal(offset, cell.offset + cell.size);
        }
        assert_int_equal(next, spec.chunk_count);
    }
}

static void test_model_spec_owned_chunks_tile_and_balance(void **state)
{
    (void)state;
    for (int c = 0; c < CONFIG_COUNT; c++) {
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &configs[c]);
        for (uint32_t world = 1; world <= 40; world++) {
            uint32_t next = 0, least = UINT32_MAX, most = 0;
            for (uint32_t rank = 0; rank < world; rank++) {
                uint32_t first, count;
                mu_model_owned_chunks(&spec, world, rank, &first, &count);
                assert_int_equal(first, next);
                next += count;
                least = count < least ? count : least;
                most = count > most ? count : most;
            }
            assert_int_equal(next, spec.chunk_count);
            assert_true(most - least <= 1);
        }
    }
}

static void test_model_spec_largest_model_does_not_overflow(void **state)
{
    (void)state;
    const struct mu_model_config largest = {.family = MU_FAMILY_GPT2,
                                            .layers = MU_LAYERS_MAX,
                                            .heads = MU_HEADS_MAX,
                                            .channels = MU_CHANNELS_MAX,
                                            .context = MU_CONTEXT_MAX,
                                            .vocab = MU_VOCAB_MAX};
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &largest);
    struct mu_chunk last = mu_model_chunk(&spec, spec.chunk_count - 1);
    assert_int_equal(last.cell, spec.cell_count - 1);
    assert_int_equal(last.offset + last.size, spec.flat_size);
    assert_string_equal(mu_model_tensor(&spec, spec.tensor_count - 3).name, "transformer.h.511.mlp.c_proj.bias");
}

static void test_model_spec_bytes_and_flops(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &gpt2_124m);
    assert_int_equal(mu_model_state_bytes(&spec, 0), spec.flat_size * 16);
    assert_int_equal(mu_model_state_bytes(&spec, 3), spec.flat_size * 28);
    double expected = 6.0 * 124439808 + 12.0 * 12 * 768 * 1024;
    assert_true(mu_model_flops_per_token(&spec, 1024) == expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_spec_gpt2_124m_has_124439808_parameters),
        cmocka_unit_test(test_model_spec_tensors_are_those_of_hugging_face),
        cmocka_unit_test(test_model_spec_index_order_is_role_order),
        cmocka_unit_test(test_model_spec_tensors_tile_cells_and_cells_are_disjoint),
        cmocka_unit_test(test_model_spec_chunks_tile_cells),
        cmocka_unit_test(test_model_spec_owned_chunks_tile_and_balance),
        cmocka_unit_test(test_model_spec_largest_model_does_not_overflow),
        cmocka_unit_test(test_model_spec_bytes_and_flops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
