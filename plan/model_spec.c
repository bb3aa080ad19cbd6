#include "plan/model_spec.h"

#include "common/fmath.h"
#include "common/status.h"
#include "plan/text.h"

/* How a role's width along its sliced axis (or its rows, where it is not sliced) is counted. */
enum width { WIDTH_C, WIDTH_V, WIDTH_CONTEXT, WIDTH_QKV, WIDTH_UP, WIDTH_HIDDEN };

/* A tensor is a vector of its width, or a matrix with the width as rows or as columns and C on the other axis. */
enum shape { SHAPE_VECTOR, SHAPE_ROWS, SHAPE_COLUMNS };

struct role_info {
    const char *gpt2, *llama; /* names after "transformer[.h.<i>]." and "model[.layers.<i>]."; NULL: it has none */
    enum mu_cell_kind cell;
    enum shape shape;
    enum width width;
    enum mu_init_kind init;
    bool residual; /* projects into the residual stream */
};

/* In the order of enum mu_role. */
static const struct role_info roles[MU_ROLE_COUNT] = {
    [MU_ROLE_WTE] = {"wte.weight", "embed_tokens.weight", MU_CELL_E, SHAPE_ROWS, WIDTH_V, MU_INIT_NORMAL, false},
    [MU_ROLE_WPE] = {"wpe.weight", NULL, MU_CELL_E_SHARED, SHAPE_ROWS, WIDTH_CONTEXT, MU_INIT_NORMAL, false},
    [MU_ROLE_NORM1_W] = {"ln_1.weight", "input_layernorm.weight", MU_CELL_L_SHARED, SHAPE_VECTOR, WIDTH_C, MU_INIT_ONE,
                         false},
    [MU_ROLE_NORM1_B] = {"ln_1.bias", NULL, MU_CELL_L_SHARED, SHAPE_VECTOR, WIDTH_C, MU_INIT_ZERO, false},
    [MU_ROLE_QKV_W] = {"attn.c_attn.weight", "self_attn.qkv_proj.weight", MU_CELL_L, SHAPE_COLUMNS, WIDTH_QKV,
                       MU_INIT_NORMAL, false},
    [MU_ROLE_QKV_B] = {"attn.c_attn.bias", NULL, MU_CELL_L, SHAPE_VECTOR, WIDTH_QKV, MU_INIT_ZERO, false},
    [MU_ROLE_PROJ_W] = {"attn.c_proj.weight", "self_attn.o_proj.weight", MU_CELL_L, SHAPE_ROWS, WIDTH_C, MU_INIT_NORMAL,
                        true},
    [MU_ROLE_PROJ_B] = {"attn.c_proj.bias", NULL, MU_CELL_L_SHARED, SHAPE_VECTOR, WIDTH_C, MU_INIT_ZERO, false},
    [MU_ROLE_NORM2_W] = {"ln_2.weight", "post_attention_layernorm.weight", MU_CELL_L_SHARED, SHAPE_VECTOR, WIDTH_C,
                         MU_INIT_ONE, false},
    [MU_ROLE_NORM2_B] = {"ln_2.bias", NULL, MU_CELL_L_SHARED, SHAPE_VECTOR, WIDTH_C, MU_INIT_ZERO, false},
    [MU_ROLE_UP_W] = {"mlp.c_fc.weight", "mlp.gate_up_proj.weight", MU_CELL_L, SHAPE_COLUMNS, WIDTH_UP, MU_INIT_NORMAL,
                      false},
    [MU_ROLE_UP_B] = {"mlp.c_fc.bias", NULL, MU_CELL_L, SHAPE_VECTOR, WIDTH_UP, MU_INIT_ZERO, false},
    [MU_ROLE_DOWN_W] = {"mlp.c_proj.weight", "mlp.down_proj.weight", MU_CELL_L, SHAPE_ROWS, WIDTH_HIDDEN,
                        MU_INIT_NORMAL, true},
    [MU_ROLE_DOWN_B] = {"mlp.c_proj.bias", NULL, MU_CELL_L_SHARED, SHAPE_VECTOR, WIDTH_C, MU_INIT_ZERO, false},
    [MU_ROLE_NORMF_W] = {"ln_f.weight", "norm.weight", MU_CELL_F_SHARED, SHAPE_VECTOR, WIDTH_C, MU_INIT_ONE, false},
    [MU_ROLE_NORMF_B] = {"ln_f.bias", NULL, MU_CELL_F_SHARED, SHAPE_VECTOR, WIDTH_C, MU_INIT_ZERO, false},
    [MU_ROLE_HEAD_W] = {NULL, "lm_head.weight", MU_CELL_F, SHAPE_ROWS, WIDTH_V, MU_INIT_NORMAL, false},
};

/* initializer_range of both families. GPT-2 divides it by sqrt(2 layers) where a matrix projects into the residual
 * stream (Radford et al. 2019, section 2.3); Llama does not. */
static const double base_std = 0.02;

static const char *role_name(const struct mu_model_config *config, enum mu_role role)
{
    return config->family == MU_FAMILY_LLAMA ? roles[role].llama : roles[role].gpt2;
}

bool mu_model_has(const struct mu_model_config *config, enum mu_role role)
{
    MU_ASSERT((unsigned)role < MU_ROLE_COUNT);
    return role_name(config, role) != NULL;
}

static bool is_sliced_kind(enum mu_cell_kind kind)
{
    return kind == MU_CELL_E || kind == MU_CELL_L || kind == MU_CELL_F;
}

bool mu_model_is_sliced(enum mu_role role)
{
    MU_ASSERT((unsigned)role < MU_ROLE_COUNT);
    return is_sliced_kind(roles[role].cell);
}

bool mu_model_is_tied(const struct mu_model_config *config)
{
    return !mu_model_has(config, MU_ROLE_HEAD_W);
}

static uint32_t slices_of(const struct mu_model_config *config)
{
    return config->slices ? config->slices : 1;
}

uint32_t mu_model_vocab_slice_rows(const struct mu_model_config *config)
{
    uint32_t slices = slices_of(config);
    return (config->vocab + slices - 1) / slices;
}

/* Where the slice lies along the sliced axis of the logical tensor. */
struct span {
    uint32_t parts;
    uint64_t full, first[MU_TENSOR_PARTS_MAX], size[MU_TENSOR_PARTS_MAX];
};

static void add_part(struct span *span, uint64_t width, uint32_t slices, uint32_t slice)
{
    span->first[span->parts] = span->full + slice * (width / slices);
    span->size[span->parts++] = width / slices;
    span->full += width;
}

static struct span span_of(const struct mu_model_config *config, enum mu_role role, uint32_t slice)
{
    struct span span = {0};
    uint32_t slices = mu_model_is_sliced(role) ? config->slices : 1;
    uint64_t head_channels = config->channels / config->heads, rows = mu_model_vocab_slice_rows(config);
    switch (roles[role].width) {
    case WIDTH_C:
        add_part(&span, config->channels, slices, slice);
        break;
    case WIDTH_CONTEXT:
        add_part(&span, config->context, slices, slice);
        break;
    case WIDTH_V: /* not divisible: the last slice has what is left */
        span = (struct span){.parts = 1, .full = config->vocab, .first = {slice * rows}};
        span.size[0] = slice + 1 < slices ? rows : config->vocab - span.first[0];
        break;
    case WIDTH_QKV:
        add_part(&span, config->channels, slices, slice);
        add_part(&span, config->kv_heads * head_channels, slices, slice);
        add_part(&span, config->kv_heads * head_channels, slices, slice);
        break;
    case WIDTH_UP:
        add_part(&span, config->hidden, slices, slice);
        if (config->family == MU_FAMILY_LLAMA)
            add_part(&span, config->hidden, slices, slice);
        break;
    case WIDTH_HIDDEN:
        add_part(&span, config->hidden, slices, slice);
        break;
    }
    return span;
}

static uint64_t role_size(const struct mu_model_config *config, enum mu_role role, uint32_t slice)
{
    struct span span = span_of(config, role, slice);
    uint64_t width = 0;
    for (uint32_t i = 0; i < span.parts; i++)
        width += span.size[i];
    return roles[role].shape == SHAPE_VECTOR ? width : width * config->channels;
}

static uint64_t kind_size(const struct mu_model_config *config, enum mu_cell_kind kind, uint32_t slice)
{
    uint64_t size = 0;
    for (unsigned role = 0; role < MU_ROLE_COUNT; role++)
        if (roles[role].cell == kind && mu_model_has(config, role))
            size += role_size(config, role, slice);
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

/* The first `slice` cells of a kind. */
static struct mu_cell_place before_slice(const struct mu_cell_extent *extent, uint32_t slice)
{
    struct mu_cell_place p = {.cells = slice < extent->count ? slice : extent->count};
    uint32_t whole = p.cells == extent->count && p.cells > 0 ? p.cells - 1 : p.cells;
    p.chunks = whole * chunks_of(extent->size);
    p.flat = whole * aligned(extent->size);
    p.elements = whole * extent->size;
    if (whole < p.cells) {
        p.chunks += chunks_of(extent->last_size);
        p.flat += aligned(extent->last_size);
        p.elements += extent->last_size;
    }
    return p;
}

static void advance(struct mu_cell_place *p, struct mu_cell_place by, uint32_t times)
{
    p->cells += times * by.cells;
    p->chunks += times * by.chunks;
    p->flat += times * by.flat;
    p->elements += times * by.elements;
}

/* Where cell (kind, layer, slice) begins. */
static struct mu_cell_place place_of(const struct mu_model_spec *spec, unsigned kind, uint32_t layer, uint32_t slice)
{
    struct mu_cell_place p = spec->starts[kind];
    advance(&p, spec->layer, layer);
    advance(&p, before_slice(&spec->extents[kind], slice), 1);
    return p;
}

/* Where each kind begins, and where all ends. */
static void find_starts(struct mu_model_spec *spec)
{
    struct mu_cell_place p = {0};
    for (unsigned kind = 0; kind < MU_CELL_KINDS; kind++) {
        struct mu_cell_place whole = before_slice(&spec->extents[kind], spec->extents[kind].count);
        spec->starts[kind] = p;
        advance(&p, whole, 1);
        if (kind == MU_CELL_L || kind == MU_CELL_L_SHARED)
            advance(&spec->layer, whole, 1);
        if (kind == MU_CELL_L_SHARED)
            advance(&p, spec->layer, spec->config.layers - 1);
    }
    spec->starts[MU_CELL_KINDS] = p;
}

static bool is_layer_kind(enum mu_cell_kind kind)
{
    return kind == MU_CELL_L || kind == MU_CELL_L_SHARED;
}

/* Roles are grouped as cells are: before the layers, in a layer, after them. */
static enum mu_role group_end(enum mu_role role)
{
    return role <= MU_ROLE_WPE ? MU_ROLE_NORM1_W : role <= MU_ROLE_DOWN_B ? MU_ROLE_NORMF_W : MU_ROLE_COUNT;
}

static uint32_t role_tensors(const struct mu_model_config *config, enum mu_role role)
{
    if (!mu_model_has(config, role))
        return 0;
    return mu_model_is_sliced(role) ? config->slices : 1;
}

static uint32_t group_tensors(const struct mu_model_config *config, enum mu_role first)
{
    uint32_t count = 0;
    for (enum mu_role role = first; role < group_end(first); role++)
        count += role_tensors(config, role);
    return count;
}

void mu_model_spec_init(struct mu_model_spec *spec, const struct mu_model_config *config)
{
    MU_ASSERT(config->family == MU_FAMILY_GPT2 || config->family == MU_FAMILY_LLAMA);
    *spec = (struct mu_model_spec){.config = *config};
    mu_model_config_resolve(&spec->config);
    config = &spec->config;
    for (unsigned kind = 0; kind < MU_CELL_KINDS; kind++) {
        struct mu_cell_extent *e = &spec->extents[kind];
        e->size = kind_size(config, kind, 0);
        e->count = e->size == 0 ? 0 : is_sliced_kind(kind) ? config->slices : 1;
        e->last_size = e->count ? kind_size(config, kind, e->count - 1) : 0;
    }
    find_starts(spec);
    struct mu_cell_place end = spec->starts[MU_CELL_KINDS];
    spec->tensor_count = group_tensors(config, MU_ROLE_WTE) + config->layers * group_tensors(config, MU_ROLE_NORM1_W) +
                         group_tensors(config, MU_ROLE_NORMF_W);
    spec->cell_count = end.cells;
    spec->chunk_count = end.chunks;
    spec->parameter_count = end.elements;
    spec->flat_size = end.flat;
}

uint32_t mu_model_cell_index(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer, uint32_t slice)
{
    MU_ASSERT((unsigned)kind < MU_CELL_KINDS && slice < spec->extents[kind].count);
    MU_ASSERT(is_layer_kind(kind) ? layer < spec->config.layers : layer == 0);
    return place_of(spec, kind, layer, slice).cells;
}

uint32_t mu_model_first_chunk(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer, uint32_t slice)
{
    MU_ASSERT((unsigned)kind < MU_CELL_KINDS);
    MU_ASSERT(is_layer_kind(kind) ? layer < spec->config.layers : layer == 0);
    return place_of(spec, kind, layer, slice).chunks;
}

static struct mu_cell cell_of(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer, uint32_t slice)
{
    const struct mu_cell_extent *e = &spec->extents[kind];
    struct mu_cell_place p = place_of(spec, kind, layer, slice);
    struct mu_cell cell = {.kind = kind,
                           .layer = layer,
                           .slice = slice,
                           .offset = p.flat,
                           .size = slice + 1 < e->count ? e->size : e->last_size,
                           .first_chunk = p.chunks};
    cell.chunk_count = chunks_of(cell.size);
    struct mu_text name;
    mu_text_init(&name, cell.name, sizeof cell.name);
    mu_text_put(&name, is_layer_kind(kind) ? "L" : kind <= MU_CELL_E_SHARED ? "E" : "F");
    if (is_layer_kind(kind))
        mu_text_put_uint(&name, layer);
    mu_text_put(&name, is_sliced_kind(kind) ? "." : ".shared");
    if (is_sliced_kind(kind))
        mu_text_put_uint(&name, slice);
    return cell;
}

/* Number of a cell or chunk below the place? */
static bool below(uint32_t index, struct mu_cell_place place, bool by_chunk)
{
    return index < (by_chunk ? place.chunks : place.cells);
}

/* The kind (and layer) whose cells hold cell, or chunk, number `index`. */
static enum mu_cell_kind kind_at(const struct mu_model_spec *spec, uint32_t index, bool by_chunk, uint32_t *ret_layer)
{
    *ret_layer = 0;
    if (below(index, place_of(spec, MU_CELL_E_SHARED, 0, 0), by_chunk))
        return MU_CELL_E;
    struct mu_cell_place first = place_of(spec, MU_CELL_L, 0, 0), end = place_of(spec, MU_CELL_F, 0, 0);
    if (below(index, first, by_chunk))
        return MU_CELL_E_SHARED;
    if (!below(index, end, by_chunk))
        return below(index, place_of(spec, MU_CELL_F_SHARED, 0, 0), by_chunk) ? MU_CELL_F : MU_CELL_F_SHARED;
    uint32_t start = by_chunk ? first.chunks : first.cells, stop = by_chunk ? end.chunks : end.cells;
    *ret_layer = (index - start) / ((stop - start) / spec->config.layers);
    return below(index, place_of(spec, MU_CELL_L_SHARED, *ret_layer, 0), by_chunk) ? MU_CELL_L : MU_CELL_L_SHARED;
}

struct mu_cell mu_model_cell(const struct mu_model_spec *spec, uint32_t index)
{
    MU_ASSERT(index < spec->cell_count);
    uint32_t layer;
    enum mu_cell_kind kind = kind_at(spec, index, false, &layer);
    return cell_of(spec, kind, layer, index - place_of(spec, kind, layer, 0).cells);
}

/* The slice of `kind` in which chunk number `chunk` lies. */
static uint32_t slice_at(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer, uint32_t chunk)
{
    const struct mu_cell_extent *e = &spec->extents[kind];
    uint32_t slice = (chunk - place_of(spec, kind, layer, 0).chunks) / chunks_of(e->size);
    return slice < e->count ? slice : e->count - 1;
}

struct mu_chunk mu_model_chunk(const struct mu_model_spec *spec, uint32_t chunk)
{
    MU_ASSERT(chunk < spec->chunk_count);
    uint32_t layer;
    enum mu_cell_kind kind = kind_at(spec, chunk, true, &layer);
    uint32_t slice = slice_at(spec, kind, layer, chunk);
    const struct mu_cell_extent *e = &spec->extents[kind];
    struct mu_cell_place p = place_of(spec, kind, layer, slice);
    uint64_t start = (uint64_t)(chunk - p.chunks) * MU_CHUNK_ELEMENTS;
    uint64_t rest = (slice + 1 < e->count ? e->size : e->last_size) - start;
    return (struct mu_chunk){
        .cell = p.cells,
        .offset = p.flat + start,
        .size = rest < MU_CHUNK_ELEMENTS ? rest : MU_CHUNK_ELEMENTS,
    };
}

uint64_t mu_model_elements_before(const struct mu_model_spec *spec, uint32_t chunk)
{
    MU_ASSERT(chunk <= spec->chunk_count);
    if (chunk == spec->chunk_count)
        return spec->parameter_count;
    uint32_t layer;
    enum mu_cell_kind kind = kind_at(spec, chunk, true, &layer);
    struct mu_cell_place p = place_of(spec, kind, layer, slice_at(spec, kind, layer, chunk));
    return p.elements + (uint64_t)(chunk - p.chunks) * MU_CHUNK_ELEMENTS;
}

static void put_name(struct mu_tensor *tensor, const struct mu_model_config *config)
{
    bool llama = config->family == MU_FAMILY_LLAMA;
    struct mu_text name;
    mu_text_init(&name, tensor->name, sizeof tensor->name);
    if (tensor->role != MU_ROLE_HEAD_W)
        mu_text_put(&name, llama ? "model." : "transformer.");
    if (is_layer_kind(roles[tensor->role].cell)) {
        mu_text_put(&name, llama ? "layers." : "h.");
        mu_text_put_uint(&name, tensor->layer);
        mu_text_put(&name, ".");
    }
    mu_text_put(&name, role_name(config, tensor->role));
    if (config->slices > 1 && mu_model_is_sliced(tensor->role)) {
        mu_text_put(&name, "#");
        mu_text_put_uint(&name, tensor->slice);
    }
}

struct mu_tensor mu_model_role(const struct mu_model_spec *spec, uint32_t layer, uint32_t slice, enum mu_role role)
{
    const struct mu_model_config *config = &spec->config;
    MU_ASSERT(mu_model_has(config, role));
    const struct role_info *info = &roles[role];
    MU_ASSERT(is_layer_kind(info->cell) ? layer < config->layers : layer == 0);
    MU_ASSERT(mu_model_is_sliced(role) ? slice < config->slices : slice == 0);

    struct mu_cell_place cell = place_of(spec, info->cell, layer, slice);
    struct mu_tensor tensor = {
        .role = role, .layer = layer, .slice = slice, .cell = cell.cells, .offset = cell.flat, .init = info->init};
    for (enum mu_role before = 0; before < role; before++)
        if (roles[before].cell == info->cell && mu_model_has(config, before))
            tensor.offset += role_size(config, before, slice);
    struct span span = span_of(config, role, slice);
    uint64_t width = 0;
    tensor.parts = span.parts;
    for (uint32_t i = 0; i < span.parts; i++) {
        tensor.part_first[i] = span.first[i];
        tensor.part_size[i] = span.size[i];
        width += span.size[i];
    }
    tensor.axis = info->shape == SHAPE_COLUMNS;
    tensor.rows = info->shape == SHAPE_COLUMNS ? config->channels : width;
    tensor.full_rows = info->shape == SHAPE_COLUMNS ? config->channels : span.full;
    tensor.columns = info->shape == SHAPE_COLUMNS ? width : info->shape == SHAPE_ROWS ? config->channels : 1;
    tensor.full_columns = info->shape == SHAPE_COLUMNS ? span.full : tensor.columns;
    tensor.size = tensor.rows * tensor.columns;
    tensor.decay = info->shape != SHAPE_VECTOR;
    if (tensor.init == MU_INIT_NORMAL) {
        bool scaled = info->residual && config->family == MU_FAMILY_GPT2;
        tensor.init_std = scaled ? base_std / mu_fmath_sqrt(2.0 * config->layers) : base_std;
    }
    put_name(&tensor, config);
    return tensor;
}

struct mu_tensor mu_model_tensor(const struct mu_model_spec *spec, uint32_t index)
{
    MU_ASSERT(index < spec->tensor_count);
    const struct mu_model_config *config = &spec->config;
    uint32_t outer = group_tensors(config, MU_ROLE_WTE), inner = group_tensors(config, MU_ROLE_NORM1_W), layer = 0;
    enum mu_role role = MU_ROLE_WTE;
    if (index >= outer) {
        index -= outer;
        layer = index / inner;
        role = MU_ROLE_NORM1_W;
        index %= inner;
        if (layer >= config->layers) {
            index += (layer - config->layers) * inner;
            layer = 0;
            role = MU_ROLE_NORMF_W;
        }
    }
    for (; index >= role_tensors(config, role); role++)
        index -= role_tensors(config, role);
    return mu_model_role(spec, layer, index, role);
}

uint64_t mu_tensor_full_index(const struct mu_tensor *tensor, uint64_t row, uint64_t column)
{
    uint64_t *along = tensor->axis ? &column : &row;
    uint32_t part = 0;
    for (; *along >= tensor->part_size[part]; part++) {
        *along -= tensor->part_size[part];
        MU_ASSERT(part + 1 < tensor->parts);
    }
    *along += tensor->part_first[part];
    return row * tensor->full_columns + column;
}

void mu_model_owned_chunks(const struct mu_model_spec *spec, uint32_t world, uint32_t rank, uint32_t *ret_first,
                           uint32_t *ret_count)
{
    MU_ASSERT(rank < world);
    uint32_t base = spec->chunk_count / world, extra = spec->chunk_count % world;
    *ret_first = rank * base + (rank < extra ? rank : extra);
    *ret_count = base + (rank < extra ? 1 : 0);
}

double mu_model_flops_per_token(const struct mu_model_spec *spec, uint32_t length)
{
    const struct mu_model_config *config = &spec->config;
    double weights = (double)spec->parameter_count;
    if (!mu_model_is_tied(config))
        weights -= (double)config->vocab * config->channels;
    return 6.0 * weights + 12.0 * config->layers * config->channels * length;
}
