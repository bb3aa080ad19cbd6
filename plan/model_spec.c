#include "plan/model_spec.h"

#include "common/fmath.h"
#include "common/status.h"
#include "plan/text.h"

enum {
    EMBEDDING_TENSORS = 2, /* wte, wpe: indices 0 and 1 */
    LAYER_TENSORS = 12,
    FINAL_TENSORS = 2,
    EMBEDDING_CELLS = 2, /* E.0, E.shared: indices 0 and 1 */
    LAYER_CELLS = 2,     /* L<i>.0, L<i>.shared */
    FINAL_CELLS = 1,
    CELL_KINDS = EMBEDDING_CELLS + LAYER_CELLS + FINAL_CELLS,
};

/* Kinds of cells: what does not depend on the layer number. */
enum cell_kind { CELL_E, CELL_E_SHARED, CELL_L, CELL_L_SHARED, CELL_F_SHARED };

/* A dimension as a multiple of one of the model's numbers. */
enum dim_base { DIM_ONE, DIM_C, DIM_V, DIM_T };

struct role_info {
    const char *name; /* the part after "transformer." or "transformer.h.<i>." */
    enum cell_kind cell;
    enum dim_base rows_base;
    uint32_t rows_factor;
    enum dim_base columns_base;
    uint32_t columns_factor;
    enum mu_init_kind init;
    bool residual; /* projects into the residual stream: standard deviation divided by sqrt(2 layers) */
};

/* Indexed by enum mu_gpt2_role, which is also the index order of the tensors of one layer. */
static const struct role_info roles[] = {
    [MU_GPT2_WTE] = {"wte.weight", CELL_E, DIM_V, 1, DIM_C, 1, MU_INIT_NORMAL, false},
    [MU_GPT2_WPE] = {"wpe.weight", CELL_E_SHARED, DIM_T, 1, DIM_C, 1, MU_INIT_NORMAL, false},
    [MU_GPT2_LN1_W] = {"ln_1.weight", CELL_L_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ONE, false},
    [MU_GPT2_LN1_B] = {"ln_1.bias", CELL_L_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ZERO, false},
    [MU_GPT2_QKV_W] = {"attn.c_attn.weight", CELL_L, DIM_C, 1, DIM_C, 3, MU_INIT_NORMAL, false},
    [MU_GPT2_QKV_B] = {"attn.c_attn.bias", CELL_L, DIM_C, 3, DIM_ONE, 1, MU_INIT_ZERO, false},
    [MU_GPT2_PROJ_W] = {"attn.c_proj.weight", CELL_L, DIM_C, 1, DIM_C, 1, MU_INIT_NORMAL, true},
    [MU_GPT2_PROJ_B] = {"attn.c_proj.bias", CELL_L_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ZERO, false},
    [MU_GPT2_LN2_W] = {"ln_2.weight", CELL_L_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ONE, false},
    [MU_GPT2_LN2_B] = {"ln_2.bias", CELL_L_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ZERO, false},
    [MU_GPT2_FC_W] = {"mlp.c_fc.weight", CELL_L, DIM_C, 1, DIM_C, 4, MU_INIT_NORMAL, false},
    [MU_GPT2_FC_B] = {"mlp.c_fc.bias", CELL_L, DIM_C, 4, DIM_ONE, 1, MU_INIT_ZERO, false},
    [MU_GPT2_FCPROJ_W] = {"mlp.c_proj.weight", CELL_L, DIM_C, 4, DIM_C, 1, MU_INIT_NORMAL, true},
    [MU_GPT2_FCPROJ_B] = {"mlp.c_proj.bias", CELL_L_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ZERO, false},
    [MU_GPT2_LNF_W] = {"ln_f.weight", CELL_F_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ONE, false},
    [MU_GPT2_LNF_B] = {"ln_f.bias", CELL_F_SHARED, DIM_C, 1, DIM_ONE, 1, MU_INIT_ZERO, false},
};

enum { ROLE_COUNT = sizeof roles / sizeof roles[0] };

static const double base_std = 0.02; /* GPT-2's initializer_range */

static uint64_t dimension(const struct mu_model_config *config, enum dim_base base, uint32_t factor)
{
    switch (base) {
    case DIM_C:
        return (uint64_t)config->channels * factor;
    case DIM_V:
        return config->vocab;
    case DIM_T:
        return config->context;
    case DIM_ONE:
        break;
    }
    return factor;
}

static uint64_t role_rows(const struct mu_model_config *config, enum mu_gpt2_role role)
{
    return dimension(config, roles[role].rows_base, roles[role].rows_factor);
}

static uint64_t role_columns(const struct mu_model_config *config, enum mu_gpt2_role role)
{
    return dimension(config, roles[role].columns_base, roles[role].columns_factor);
}

static uint64_t kind_size(const struct mu_model_config *config, enum cell_kind kind)
{
    uint64_t size = 0;
    for (unsigned role = 0; role < ROLE_COUNT; role++)
        if (roles[role].cell == kind)
            size += role_rows(config, role) * role_columns(config, role);
    return size;
}

static uint64_t aligned(uint64_t elements)
{
    return (elements + MU_CELL_ALIGN - 1) / MU_CELL_ALIGN * MU_CELL_ALIGN;
}

static uint32_t chunks_of(uint64_t elements)
{
    return (uint32_t)((elements + MU_CHUNK_ELEMENTS - 1) / MU_CHUNK_ELEMENTS);
}

/* What the embedding, each layer and the end occupy, so that every position is a closed form of the layer number. */
struct extent {
    uint64_t size[CELL_KINDS];
    uint64_t embedding_flat, layer_flat; /* elements with the gaps */
    uint32_t embedding_chunks, layer_chunks;
};

static struct extent extent_of(const struct mu_model_config *config)
{
    struct extent e;
    for (unsigned kind = 0; kind < CELL_KINDS; kind++)
        e.size[kind] = kind_size(config, kind);
    e.embedding_flat = aligned(e.size[CELL_E]) + aligned(e.size[CELL_E_SHARED]);
    e.layer_flat = aligned(e.size[CELL_L]) + aligned(e.size[CELL_L_SHARED]);
    e.embedding_chunks = chunks_of(e.size[CELL_E]) + chunks_of(e.size[CELL_E_SHARED]);
    e.layer_chunks = chunks_of(e.size[CELL_L]) + chunks_of(e.size[CELL_L_SHARED]);
    return e;
}

void mu_model_spec_init(struct mu_model_spec *spec, const struct mu_model_config *config)
{
    MU_ASSERT(config->family == MU_FAMILY_GPT2);
    struct extent e = extent_of(config);
    uint64_t layers = config->layers;
    *spec = (struct mu_model_spec){
        .config = *config,
        .tensor_count = EMBEDDING_TENSORS + LAYER_TENSORS * config->layers + FINAL_TENSORS,
        .cell_count = EMBEDDING_CELLS + LAYER_CELLS * config->layers + FINAL_CELLS,
        .chunk_count = e.embedding_chunks + e.layer_chunks * config->layers + chunks_of(e.size[CELL_F_SHARED]),
        .parameter_count = e.size[CELL_E] + e.size[CELL_E_SHARED] + layers * (e.size[CELL_L] + e.size[CELL_L_SHARED]) +
                           e.size[CELL_F_SHARED],
        .flat_size = e.embedding_flat + layers * e.layer_flat + aligned(e.size[CELL_F_SHARED]),
    };
}

static enum cell_kind kind_of_cell(const struct mu_model_spec *spec, uint32_t cell, uint32_t *ret_layer)
{
    *ret_layer = 0;
    if (cell < EMBEDDING_CELLS)
        return cell == 0 ? CELL_E : CELL_E_SHARED;
    if (cell == spec->cell_count - 1)
        return CELL_F_SHARED;
    *ret_layer = (cell - EMBEDDING_CELLS) / LAYER_CELLS;
    return (cell - EMBEDDING_CELLS) % LAYER_CELLS == 0 ? CELL_L : CELL_L_SHARED;
}

struct mu_cell mu_model_cell(const struct mu_model_spec *spec, uint32_t index)
{
    MU_ASSERT(index < spec->cell_count);
    struct extent e = extent_of(&spec->config);
    uint32_t layer;
    enum cell_kind kind = kind_of_cell(spec, index, &layer);
    struct mu_cell cell = {.size = e.size[kind], .chunk_count = chunks_of(e.size[kind])};
    struct mu_text name;
    mu_text_init(&name, cell.name, sizeof cell.name);
    if (kind == CELL_E || kind == CELL_E_SHARED) {
        mu_text_put(&name, "E");
    } else if (kind == CELL_F_SHARED) {
        mu_text_put(&name, "F");
        cell.offset = e.embedding_flat + spec->config.layers * e.layer_flat;
        cell.first_chunk = e.embedding_chunks + spec->config.layers * e.layer_chunks;
    } else {
        mu_text_put(&name, "L");
        mu_text_put_uint(&name, layer);
        cell.offset = e.embedding_flat + layer * e.layer_flat;
        cell.first_chunk = e.embedding_chunks + layer * e.layer_chunks;
    }
    if (kind == CELL_E_SHARED || kind == CELL_L_SHARED) { /* the second cell of its pair */
        uint64_t sibling_size = e.size[kind == CELL_E_SHARED ? CELL_E : CELL_L];
        cell.offset += aligned(sibling_size);
        cell.first_chunk += chunks_of(sibling_size);
    }
    mu_text_put(&name, kind == CELL_E || kind == CELL_L ? ".0" : ".shared");
    return cell;
}

static uint32_t cell_of_role(const struct mu_model_spec *spec, uint32_t layer, enum mu_gpt2_role role)
{
    switch (roles[role].cell) {
    case CELL_E:
        return 0;
    case CELL_E_SHARED:
        return 1;
    case CELL_L:
        return EMBEDDING_CELLS + LAYER_CELLS * layer;
    case CELL_L_SHARED:
        return EMBEDDING_CELLS + LAYER_CELLS * layer + 1;
    case CELL_F_SHARED:
        break;
    }
    return spec->cell_count - 1;
}

struct mu_tensor mu_gpt2_tensor(const struct mu_model_spec *spec, uint32_t layer, enum mu_gpt2_role role)
{
    const struct mu_model_config *config = &spec->config;
    MU_ASSERT((unsigned)role < ROLE_COUNT);
    bool per_layer = roles[role].cell == CELL_L || roles[role].cell == CELL_L_SHARED;
    MU_ASSERT(per_layer ? layer < config->layers : layer == 0);

    struct mu_tensor tensor = {
        .cell = cell_of_role(spec, layer, role),
        .rows = role_rows(config, role),
        .columns = role_columns(config, role),
        .init = roles[role].init,
    };
    tensor.size = tensor.rows * tensor.columns;
    tensor.decay = roles[role].columns_base != DIM_ONE;
    if (tensor.init == MU_INIT_NORMAL)
        tensor.init_std = roles[role].residual ? base_std / mu_fmath_sqrt(2.0 * config->layers) : base_std;
    tensor.offset = mu_model_cell(spec, tensor.cell).offset;
    for (unsigned before = 0; before < role; before++)
        if (roles[before].cell == roles[role].cell)
            tensor.offset += role_rows(config, before) * role_columns(config, before);

    struct mu_text name;
    mu_text_init(&name, tensor.name, sizeof tensor.name);
    mu_text_put(&name, "transformer.");
    if (per_layer) {
        mu_text_put(&name, "h.");
        mu_text_put_uint(&name, layer);
        mu_text_put(&name, ".");
    }
    mu_text_put(&name, roles[role].name);
    return tensor;
}

struct mu_tensor mu_model_tensor(const struct mu_model_spec *spec, uint32_t index)
{
    MU_ASSERT(index < spec->tensor_count);
    if (index < EMBEDDING_TENSORS)
        return mu_gpt2_tensor(spec, 0, MU_GPT2_WTE + index);
    uint32_t final_first = spec->tensor_count - FINAL_TENSORS;
    if (index >= final_first)
        return mu_gpt2_tensor(spec, 0, MU_GPT2_LNF_W + (index - final_first));
    index -= EMBEDDING_TENSORS;
    return mu_gpt2_tensor(spec, index / LAYER_TENSORS, MU_GPT2_LN1_W + index % LAYER_TENSORS);
}

struct mu_chunk mu_model_chunk(const struct mu_model_spec *spec, uint32_t chunk)
{
    MU_ASSERT(chunk < spec->chunk_count);
    struct extent e = extent_of(&spec->config);
    uint32_t cell_index;
    if (chunk < e.embedding_chunks) {
        cell_index = chunk < chunks_of(e.size[CELL_E]) ? 0 : 1;
    } else {
        uint32_t layer = (chunk - e.embedding_chunks) / e.layer_chunks;
        uint32_t within = (chunk - e.embedding_chunks) % e.layer_chunks;
        if (layer >= spec->config.layers)
            cell_index = spec->cell_count - 1;
        else
            cell_index = EMBEDDING_CELLS + LAYER_CELLS * layer + (within < chunks_of(e.size[CELL_L]) ? 0 : 1);
    }
    struct mu_cell cell = mu_model_cell(spec, cell_index);
    uint64_t start = (uint64_t)(chunk - cell.first_chunk) * MU_CHUNK_ELEMENTS;
    uint64_t rest = cell.size - start;
    return (struct mu_chunk){
        .cell = cell_index,
        .offset = cell.offset + start,
        .size = rest < MU_CHUNK_ELEMENTS ? rest : MU_CHUNK_ELEMENTS,
    };
}

void mu_model_owned_chunks(const struct mu_model_spec *spec, uint32_t world, uint32_t rank, uint32_t *ret_first,
                           uint32_t *ret_count)
{
    MU_ASSERT(rank < world);
    uint32_t base = spec->chunk_count / world, extra = spec->chunk_count % world;
    *ret_first = rank * base + (rank < extra ? rank : extra);
    *ret_count = base + (rank < extra ? 1 : 0);
}

uint64_t mu_model_state_bytes(const struct mu_model_spec *spec, uint32_t leaf_buffers)
{
    return (4 + (uint64_t)leaf_buffers) * spec->flat_size * sizeof(float);
}

double mu_model_flops_per_token(const struct mu_model_spec *spec, uint32_t length)
{
    const struct mu_model_config *config = &spec->config;
    return 6.0 * (double)spec->parameter_count + 12.0 * config->layers * config->channels * length;
}
