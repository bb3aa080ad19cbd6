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
    {.family = MU_FAMILY_GPT2, .layers = 3, .heads = 4, .channels = 36, .context = 7, .vocab = 257, .slices = 2},
    {.family = MU_FAMILY_GPT2, .layers = 2, .heads = 8, .channels = 512, .context = 1024, .vocab = 10001, .slices = 8},
    {.family = MU_FAMILY_LLAMA,
     .layers = 3,
     .heads = 6,
     .kv_heads = 2,
     .channels = 48,
     .hidden = 56,
     .context = 9,
     .vocab = 257},
    {.family = MU_FAMILY_LLAMA,
     .layers = 4,
     .heads = 16,
     .kv_heads = 4,
     .channels = 1024,
     .hidden = 2816,
     .context = 128,
     .vocab = 32003,
     .slices = 4},
    {.family = MU_FAMILY_LLAMA,
     .layers = 1,
     .heads = 64,
     .kv_heads = 64,
     .channels = 128,
     .hidden = 64,
     .context = 2,
     .vocab = 64,
     .slices = 64},
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
    enum mu_role role;
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
        {"transformer.wte.weight", 0, MU_ROLE_WTE, 50257, 768, "E.0", true, MU_INIT_NORMAL, 0.02},
        {"transformer.wpe.weight", 0, MU_ROLE_WPE, 1024, 768, "E.shared", true, MU_INIT_NORMAL, 0.02},
        {"transformer.h.0.ln_1.weight", 0, MU_ROLE_NORM1_W, 768, 1, "L0.shared", false, MU_INIT_ONE, 0},
        {"transformer.h.0.ln_1.bias", 0, MU_ROLE_NORM1_B, 768, 1, "L0.shared", false, MU_INIT_ZERO, 0},
        {"transformer.h.3.attn.c_attn.weight", 3, MU_ROLE_QKV_W, 768, 2304, "L3.0", true, MU_INIT_NORMAL, 0.02},
        {"transformer.h.3.attn.c_attn.bias", 3, MU_ROLE_QKV_B, 2304, 1, "L3.0", false, MU_INIT_ZERO, 0},
        {"transformer.h.3.attn.c_proj.weight", 3, MU_ROLE_PROJ_W, 768, 768, "L3.0", true, MU_INIT_NORMAL, residual},
        {"transformer.h.3.attn.c_proj.bias", 3, MU_ROLE_PROJ_B, 768, 1, "L3.shared", false, MU_INIT_ZERO, 0},
        {"transformer.h.7.ln_2.weight", 7, MU_ROLE_NORM2_W, 768, 1, "L7.shared", false, MU_INIT_ONE, 0},
        {"transformer.h.7.ln_2.bias", 7, MU_ROLE_NORM2_B, 768, 1, "L7.shared", false, MU_INIT_ZERO, 0},
        {"transformer.h.11.mlp.c_fc.weight", 11, MU_ROLE_UP_W, 768, 3072, "L11.0", true, MU_INIT_NORMAL, 0.02},
        {"transformer.h.11.mlp.c_fc.bias", 11, MU_ROLE_UP_B, 3072, 1, "L11.0", false, MU_INIT_ZERO, 0},
        {"transformer.h.11.mlp.c_proj.weight", 11, MU_ROLE_DOWN_W, 3072, 768, "L11.0", true, MU_INIT_NORMAL, residual},
        {"transformer.h.11.mlp.c_proj.bias", 11, MU_ROLE_DOWN_B, 768, 1, "L11.shared", false, MU_INIT_ZERO, 0},
        {"transformer.ln_f.weight", 0, MU_ROLE_NORMF_W, 768, 1, "F.shared", false, MU_INIT_ONE, 0},
        {"transformer.ln_f.bias", 0, MU_ROLE_NORMF_B, 768, 1, "F.shared", false, MU_INIT_ZERO, 0},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        const struct expected_tensor *e = &expected[i];
        struct mu_tensor t = mu_model_role(&spec, e->layer, 0, e->role);
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

/* The next tensor in index order is that of role, layer and slice; counts on. */
static void expect_next(const struct mu_model_spec *spec, uint32_t *index, uint32_t layer, enum mu_role role)
{
    if (!mu_model_has(&spec->config, role))
        return;
    uint32_t slices = mu_model_is_sliced(role) ? spec->config.slices : 1;
    for (uint32_t slice = 0; slice < slices; slice++) {
        struct mu_tensor got = mu_model_tensor(spec, (*index)++), want = mu_model_role(spec, layer, slice, role);
        assert_string_equal(got.name, want.name);
        assert_int_equal(got.offset, want.offset);
        assert_int_equal(got.role, role);
        assert_int_equal(got.layer, layer);
        assert_int_equal(got.slice, slice);
    }
}

static void test_model_spec_index_order_is_role_order(void **state)
{
    (void)state;
    for (int c = 0; c < CONFIG_COUNT; c++) {
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &configs[c]);
        uint32_t index = 0;
        for (enum mu_role role = MU_ROLE_WTE; role <= MU_ROLE_WPE; role++)
            expect_next(&spec, &index, 0, role);
        for (uint32_t layer = 0; layer < spec.config.layers; layer++)
            for (enum mu_role role = MU_ROLE_NORM1_W; role <= MU_ROLE_DOWN_B; role++)
                expect_next(&spec, &index, layer, role);
        for (enum mu_role role = MU_ROLE_NORMF_W; role <= MU_ROLE_HEAD_W; role++)
            expect_next(&spec, &index, 0, role);
        assert_int_equal(index, spec.tensor_count);
    }
}

/* Llama's parameters, counted from the papers' shapes: 7B has 6,738,415,616 (Touvron et al., arXiv 2302.13971, as
 * published), Llama 3 8B has 8,030,261,248 with grouped queries. Slices do not change the number. */
static void test_model_spec_llama_has_the_published_number_of_parameters(void **state)
{
    (void)state;
    struct mu_model_config seven = {.family = MU_FAMILY_LLAMA,
                                    .layers = 32,
                                    .heads = 32,
                                    .channels = 4096,
                                    .hidden = 11008,
                                    .context = 4096,
                                    .vocab = 32000};
    struct mu_model_config eight = {.family = MU_FAMILY_LLAMA,
                                    .layers = 32,
                                    .heads = 32,
                                    .kv_heads = 8,
                                    .channels = 4096,
                                    .hidden = 14336,
                                    .context = 8192,
                                    .vocab = 128256,
                                    .slices = 8};
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &seven);
    assert_int_equal(spec.parameter_count, 6738415616);
    assert_int_equal(spec.config.kv_heads, 32);
    assert_true(spec.config.rope_base == 10000);
    mu_model_spec_init(&spec, &eight);
    assert_int_equal(spec.parameter_count, 8030261248);
    double looked_up = 128256.0 * 4096;
    assert_true(mu_model_flops_per_token(&spec, 1024) == 6.0 * (8030261248.0 - looked_up) + 12.0 * 32 * 4096 * 1024);
}

struct expected_slice {
    uint32_t slice;
    enum mu_role role;
    const char *name, *cell;
    uint64_t rows, columns, full_rows, full_columns;
    uint32_t axis, parts;
    uint64_t first[MU_TENSOR_PARTS_MAX], size[MU_TENSOR_PARTS_MAX];
};

static void check_slices(const struct mu_model_spec *spec, uint32_t layer, const struct expected_slice *e, size_t count)
{
    for (; count > 0; count--, e++) {
        bool outer = e->role == MU_ROLE_WTE || e->role == MU_ROLE_HEAD_W || e->role == MU_ROLE_NORMF_W;
        struct mu_tensor t = mu_model_role(spec, outer ? 0 : layer, e->slice, e->role);
        assert_string_equal(t.name, e->name);
        assert_string_equal(mu_model_cell(spec, t.cell).name, e->cell);
        assert_int_equal(t.rows, e->rows);
        assert_int_equal(t.columns, e->columns);
        assert_int_equal(t.size, e->rows * e->columns);
        assert_int_equal(t.full_rows, e->full_rows);
        assert_int_equal(t.full_columns, e->full_columns);
        assert_int_equal(t.axis, e->axis);
        assert_int_equal(t.parts, e->parts);
        for (uint32_t i = 0; i < t.parts; i++) {
            assert_int_equal(t.part_first[i], e->first[i]);
            assert_int_equal(t.part_size[i], e->size[i]);
        }
    }
}

static void test_model_spec_slices_cut_heads_mlp_and_vocabulary(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(
        &spec,
        &(struct mu_model_config){
            .family = MU_FAMILY_GPT2, .layers = 2, .heads = 4, .channels = 32, .context = 8, .vocab = 10, .slices = 4});
    const struct expected_slice gpt2[] = {
        {0, MU_ROLE_WTE, "transformer.wte.weight#0", "E.0", 3, 32, 10, 32, 0, 1, {0}, {3}},
        {3, MU_ROLE_WTE, "transformer.wte.weight#3", "E.3", 1, 32, 10, 32, 0, 1, {9}, {1}},
        {1,
         MU_ROLE_QKV_W,
         "transformer.h.1.attn.c_attn.weight#1",
         "L1.1",
         32,
         24,
         32,
         96,
         1,
         3,
         {8, 40, 72},
         {8, 8, 8}},
        {3, MU_ROLE_QKV_B, "transformer.h.1.attn.c_attn.bias#3", "L1.3", 24, 1, 96, 1, 0, 3, {24, 56, 88}, {8, 8, 8}},
        {2, MU_ROLE_PROJ_W, "transformer.h.1.attn.c_proj.weight#2", "L1.2", 8, 32, 32, 32, 0, 1, {16}, {8}},
        {0, MU_ROLE_PROJ_B, "transformer.h.1.attn.c_proj.bias", "L1.shared", 32, 1, 32, 1, 0, 1, {0}, {32}},
        {1, MU_ROLE_UP_W, "transformer.h.1.mlp.c_fc.weight#1", "L1.1", 32, 32, 32, 128, 1, 1, {32}, {32}},
        {1, MU_ROLE_UP_B, "transformer.h.1.mlp.c_fc.bias#1", "L1.1", 32, 1, 128, 1, 0, 1, {32}, {32}},
        {3, MU_ROLE_DOWN_W, "transformer.h.1.mlp.c_proj.weight#3", "L1.3", 32, 32, 128, 32, 0, 1, {96}, {32}},
        {0, MU_ROLE_NORMF_W, "transformer.ln_f.weight", "F.shared", 32, 1, 32, 1, 0, 1, {0}, {32}},
    };
    check_slices(&spec, 1, gpt2, sizeof gpt2 / sizeof gpt2[0]);
    assert_int_equal(spec.cell_count, 4 + 1 + 2 * 5 + 1);
}

static void test_model_spec_slices_of_llama_keep_gate_and_up_together(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &(struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                                        .layers = 2,
                                                        .heads = 8,
                                                        .kv_heads = 2,
                                                        .channels = 32,
                                                        .hidden = 24,
                                                        .context = 8,
                                                        .vocab = 9,
                                                        .slices = 2});
    const struct expected_slice llama[] = {
        {1, MU_ROLE_WTE, "model.embed_tokens.weight#1", "E.1", 4, 32, 9, 32, 0, 1, {5}, {4}},
        {1,
         MU_ROLE_QKV_W,
         "model.layers.1.self_attn.qkv_proj.weight#1",
         "L1.1",
         32,
         24,
         32,
         48,
         1,
         3,
         {16, 36, 44},
         {16, 4, 4}},
        {0, MU_ROLE_PROJ_W, "model.layers.1.self_attn.o_proj.weight#0", "L1.0", 16, 32, 32, 32, 0, 1, {0}, {16}},
        {1, MU_ROLE_UP_W, "model.layers.1.mlp.gate_up_proj.weight#1", "L1.1", 32, 24, 32, 48, 1, 2, {12, 36}, {12, 12}},
        {1, MU_ROLE_DOWN_W, "model.layers.1.mlp.down_proj.weight#1", "L1.1", 12, 32, 24, 32, 0, 1, {12}, {12}},
        {0, MU_ROLE_NORM1_W, "model.layers.1.input_layernorm.weight", "L1.shared", 32, 1, 32, 1, 0, 1, {0}, {32}},
        {0,
         MU_ROLE_NORM2_W,
         "model.layers.1.post_attention_layernorm.weight",
         "L1.shared",
         32,
         1,
         32,
         1,
         0,
         1,
         {0},
         {32}},
        {0, MU_ROLE_NORMF_W, "model.norm.weight", "F.shared", 32, 1, 32, 1, 0, 1, {0}, {32}},
        {1, MU_ROLE_HEAD_W, "lm_head.weight#1", "F.1", 4, 32, 9, 32, 0, 1, {5}, {4}},
    };
    check_slices(&spec, 1, llama, sizeof llama / sizeof llama[0]);
    assert_int_equal(spec.cell_count, 2 + 2 * 3 + 2 + 1);
    assert_false(mu_model_is_tied(&spec.config));
    for (enum mu_role role = 0; role < MU_ROLE_COUNT; role++)
        assert_int_equal(mu_model_has(&spec.config, role), role != MU_ROLE_WPE && role != MU_ROLE_NORM1_B &&
                                                               role != MU_ROLE_QKV_B && role != MU_ROLE_PROJ_B &&
                                                               role != MU_ROLE_NORM2_B && role != MU_ROLE_UP_B &&
                                                               role != MU_ROLE_DOWN_B && role != MU_ROLE_NORMF_B);
}

/* Scattering all slices of a role into its logical tensor fills each place exactly once. */
static void test_model_spec_slices_tile_the_logical_tensor(void **state)
{
    (void)state;
    for (int c = 0; c < CONFIG_COUNT; c++) {
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &configs[c]);
        if (spec.parameter_count > 20000000)
            continue;
        for (enum mu_role role = 0; role < MU_ROLE_COUNT; role++) {
            if (!mu_model_has(&spec.config, role))
                continue;
            struct mu_tensor t = mu_model_role(&spec, 0, 0, role);
            uint64_t full = t.full_rows * t.full_columns, seen_count = 0;
            uint8_t *seen = calloc(full, 1);
            assert_non_null(seen);
            for (uint32_t s = 0; s < (mu_model_is_sliced(role) ? spec.config.slices : 1); s++) {
                t = mu_model_role(&spec, 0, s, role);
                assert_int_equal(t.full_rows * t.full_columns, full);
                for (uint64_t row = 0; row < t.rows; row++)
                    for (uint64_t column = 0; column < t.columns; column++) {
                        uint64_t at = mu_tensor_full_index(&t, row, column);
                        assert_true(at < full && !seen[at]);
                        seen[at] = 1;
                        seen_count++;
                    }
            }
            assert_int_equal(seen_count, full);
            free(seen);
        }
    }
}

static void test_model_spec_cells_are_found_by_kind(void **state)
{
    (void)state;
    for (int c = 0; c < CONFIG_COUNT; c++) {
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &configs[c]);
        uint64_t elements = 0;
        for (uint32_t i = 0; i < spec.cell_count; i++) {
            struct mu_cell cell = mu_model_cell(&spec, i);
            assert_int_equal(mu_model_cell_index(&spec, cell.kind, cell.layer, cell.slice), i);
            assert_int_equal(mu_model_first_chunk(&spec, cell.kind, cell.layer, cell.slice), cell.first_chunk);
            assert_int_equal(mu_model_first_chunk(&spec, cell.kind, cell.layer, cell.slice + 1),
                             cell.first_chunk + cell.chunk_count);
            for (uint32_t k = 0; k < cell.chunk_count; k++)
                assert_int_equal(mu_model_elements_before(&spec, cell.first_chunk + k),
                                 elements + (uint64_t)k * MU_CHUNK_ELEMENTS);
            elements += cell.size;
        }
        assert_int_equal(mu_model_elements_before(&spec, spec.chunk_count), elements);
        assert_int_equal(elements, spec.parameter_count);
    }
}

/* A GPT-2 in one slice lies where it always did: checkpoints of earlier versions depend on it. */
static void test_model_spec_one_slice_keeps_its_places(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &configs[3]);
    assert_int_equal(spec.flat_size, 389696);
    assert_int_equal(spec.chunk_count, 15);
    assert_int_equal(mu_model_tensor(&spec, 40).offset, 286208);
    mu_model_spec_init(&spec, &gpt2_124m);
    assert_int_equal(spec.chunk_count, 1922);
    assert_int_equal(mu_model_tensor(&spec, 100).offset, 96086784);
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
    struct mu_model_config wide = largest;
    wide.family = MU_FAMILY_LLAMA;
    wide.hidden = MU_HIDDEN_MAX;
    wide.slices = MU_SLICES_MAX;
    mu_model_spec_init(&spec, &wide);
    last = mu_model_chunk(&spec, spec.chunk_count - 1);
    assert_int_equal(last.cell, spec.cell_count - 1);
    assert_int_equal(last.offset + last.size, spec.flat_size);
    struct mu_cell head = mu_model_cell(&spec, spec.cell_count - 2);
    assert_string_equal(head.name, "F.63");
    assert_int_equal(head.size, (uint64_t)MU_VOCAB_MAX / 64 * MU_CHANNELS_MAX);
    assert_true((double)spec.chunk_count * MU_CHUNK_ELEMENTS >= (double)spec.parameter_count);
}

static void test_model_spec_bytes_and_flops(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &gpt2_124m);
    double expected = 6.0 * 124439808 + 12.0 * 12 * 768 * 1024;
    assert_true(mu_model_flops_per_token(&spec, 1024) == expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_spec_gpt2_124m_has_124439808_parameters),
        cmocka_unit_test(test_model_spec_tensors_are_those_of_hugging_face),
        cmocka_unit_test(test_model_spec_index_order_is_role_order),
        cmocka_unit_test(test_model_spec_llama_has_the_published_number_of_parameters),
        cmocka_unit_test(test_model_spec_slices_cut_heads_mlp_and_vocabulary),
        cmocka_unit_test(test_model_spec_slices_of_llama_keep_gate_and_up_together),
        cmocka_unit_test(test_model_spec_slices_tile_the_logical_tensor),
        cmocka_unit_test(test_model_spec_cells_are_found_by_kind),
        cmocka_unit_test(test_model_spec_one_slice_keeps_its_places),
        cmocka_unit_test(test_model_spec_tensors_tile_cells_and_cells_are_disjoint),
        cmocka_unit_test(test_model_spec_chunks_tile_cells),
        cmocka_unit_test(test_model_spec_owned_chunks_tile_and_balance),
        cmocka_unit_test(test_model_spec_largest_model_does_not_overflow),
        cmocka_unit_test(test_model_spec_bytes_and_flops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
