/* The model: options, workspace, and the calls. */
#include "worker/model.h"

#include <stdlib.h>
#include <string.h>

#include "worker/model_internal.h"

/* ---- options ---- */

static bool is_power_of_two(uint32_t value)
{
    return value > 0 && (value & (value - 1)) == 0;
}

/* Fills in what zero stands for. */
static struct mu_model_options completed(const struct mu_model_spec *spec, const struct mu_model_options *options)
{
    struct mu_model_options o = *options;
    if (o.part.layer_count == 0)
        o.part = (struct mu_model_part){
            .layer_count = spec->config.layers, .embedding = true, .head = true, .slice_count = spec->config.slices};
    if (o.recompute == 0 || o.forward_only)
        o.recompute = MU_RECOMPUTE_NONE;
    if (o.slots == 0 || o.forward_only)
        o.slots = 1;
    return o;
}

static struct model_dims dims_of(const struct mu_model_spec *spec, const struct mu_model_options *o)
{
    const struct mu_model_config *c = &spec->config;
    bool llama = c->family == MU_FAMILY_LLAMA;
    uint32_t total = c->slices, rows = o->micro * o->length;
    struct model_dims d = {.total_slices = total,
                           .slices = o->part.slice_count,
                           .ranks = o->tensor ? o->tensor->size : 1,
                           .rank = o->tensor ? o->tensor->rank : 0,
                           .rows = rows,
                           .channels = c->channels,
                           .head_channels = c->channels / c->heads,
                           .heads = c->heads / total,
                           .kv_heads = c->kv_heads / total,
                           .hidden = c->hidden / total,
                           .vocab = c->vocab,
                           .vocab_slice = mu_model_vocab_slice_rows(c),
                           .llama = llama,
                           .rms = llama,
                           .bias = mu_model_has(c, MU_ROLE_PROJ_B),
                           .tied = mu_model_is_tied(c),
                           .wpe = mu_model_has(c, MU_ROLE_WPE)};
    d.own = rows / d.ranks;
    d.qkv = (d.heads + 2 * d.kv_heads) * d.head_channels;
    d.attention = d.heads * d.head_channels;
    d.up = llama ? 2 * d.hidden : d.hidden;
    return d;
}

static enum mu_status check_shape(const struct mu_model_config *c, struct mu_error *err)
{
    bool llama = c->family == MU_FAMILY_LLAMA;
    uint32_t slices = c->slices;
    if ((!llama && c->family != MU_FAMILY_GPT2) || c->layers == 0 || c->heads == 0 || c->channels == 0 ||
        c->channels % c->heads || c->kv_heads == 0 || c->heads % c->kv_heads || c->hidden == 0 ||
        (llama && (c->channels / c->heads % 2 || !(c->rope_base > 0) || c->dropout > 0.0f)))
        return mu_fail(err, MU_ERR_INVALID,
                       "model: %u layers, %u heads (%u of keys), %u channels, MLP of %u is no shape of %s", c->layers,
                       c->heads, c->kv_heads, c->channels, c->hidden, llama ? "Llama" : "GPT-2");
    if (!is_power_of_two(slices) || slices > MU_SLICES_MAX || c->heads % slices || c->kv_heads % slices ||
        c->hidden % slices || (uint64_t)(slices - 1) * mu_model_vocab_slice_rows(c) >= c->vocab)
        return mu_fail(
            err, MU_ERR_INVALID,
            "model: %u slices are not allowed: a power of two up to %d that divides the heads and the MLP, and "
            "cuts the vocabulary into parts none of which is empty",
            slices, MU_SLICES_MAX);
    return MU_OK;
}

static enum mu_status check_part(const struct mu_model_spec *spec, const struct mu_model_options *o,
                                 struct mu_error *err)
{
    const struct mu_model_part *part = &o->part;
    const struct mu_tensor_group *group = o->tensor;
    uint32_t layers = spec->config.layers, slices = spec->config.slices;
    if (part->first_layer >= layers || part->layer_count > layers - part->first_layer ||
        part->embedding != (part->first_layer == 0) || part->head != (part->first_layer + part->layer_count == layers))
        return mu_fail(
            err, MU_ERR_INVALID,
            "model: %u layers from %u%s%s is no stage of %u layers: the embedding belongs to the first layer, "
            "the head to the last",
            part->layer_count, part->first_layer, part->embedding ? ", embedding" : "", part->head ? ", head" : "",
            layers);
    uint32_t ranks = group ? group->size : 1, rank = group ? group->rank : 0;
    if (ranks == 0 || part->slice_count == 0 || slices % part->slice_count || slices / part->slice_count != ranks ||
        rank >= ranks || part->first_slice != rank * part->slice_count)
        return mu_fail(err, MU_ERR_INVALID,
                       "model: %u slices from %u are not the share of rank %u of %u in a tensor group over %u slices",
                       part->slice_count, part->first_slice, rank, ranks, slices);
    return MU_OK;
}

static enum mu_status check_options(const struct mu_model_spec *spec, const struct mu_model_options *o,
                                    struct mu_error *err)
{
    const struct mu_model_config *c = &spec->config;
    enum mu_status status = check_shape(c, err);
    if (status == MU_OK)
        status = check_part(spec, o, err);
    if (status != MU_OK)
        return status;
    if (o->length == 0 || o->length > c->context)
        return mu_fail(err, MU_ERR_INVALID, "model: length %u is not allowed: 1 to the context, %u", o->length,
                       c->context);
    if (o->micro == 0 || o->micro > MU_MICRO_SEQUENCES_MAX || (uint64_t)o->micro * o->length > MU_MICRO_TOKENS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "model: micro %u is not allowed with length %u: 1 to %d sequences and at most %d tokens",
                       o->micro, o->length, MU_MICRO_SEQUENCES_MAX, MU_MICRO_TOKENS_MAX);
    if (!o->forward_only && (o->accumulate == 0 || o->accumulate > MU_ACCUMULATE_MAX))
        return mu_fail(err, MU_ERR_INVALID, "model: accumulate %u is not allowed: 1 to %d", o->accumulate,
                       MU_ACCUMULATE_MAX);
    uint32_t divisor = o->forward_only ? (o->tensor ? o->tensor->size : 1) : c->slices;
    if (o->micro * o->length % divisor)
        return mu_fail(
            err, MU_ERR_INVALID,
            "model: micro %u times length %u is not allowed: %u slices must divide the tokens of a micro-batch",
            o->micro, o->length, divisor);
    if (o->slots > MU_STAGES_MAX || o->recompute > MU_RECOMPUTE_FULL)
        return mu_fail(err, MU_ERR_INVALID, "model: %u slots, recomputation %d are not allowed: up to %d, and %d to %d",
                       o->slots, (int)o->recompute, MU_STAGES_MAX, MU_RECOMPUTE_NONE, MU_RECOMPUTE_FULL);
    uint32_t head = c->channels / c->heads;
    size_t padded = (size_t)(head + 15) / 16 * 16;
    size_t tokens = (size_t)(o->length + MU_ATTENTION_TILE - 1) / MU_ATTENTION_TILE * MU_ATTENTION_TILE;
    if (head > MU_ATTENTION_HEAD_MAX || tokens * padded > MU_ATTENTION_ELEMENTS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "model: %u channels per head with length %u is not supported: at most %d channels, and channels "
                       "times length "
                       "at most %d; use more heads or shorter sequences",
                       head, o->length, MU_ATTENTION_HEAD_MAX, MU_ATTENTION_ELEMENTS_MAX);
    return MU_OK;
}

/* ---- workspace ---- */

/* Runs over all buffers twice: to count bytes (arenas NULL), then to take them. */
struct planner {
    struct mu_arena *arena, *tables;
    size_t arena_bytes, table_bytes;
};

static void *place(struct planner *planner, size_t size_bytes)
{
    if (size_bytes == 0)
        return NULL;
    planner->arena_bytes += mu_arena_piece_bytes(size_bytes);
    return planner->arena ? mu_arena_take(planner->arena, size_bytes) : NULL;
}

/* What the host reads and writes. */
static void *place_table(struct planner *planner, size_t size_bytes)
{
    planner->table_bytes += mu_arena_piece_bytes(size_bytes);
    return planner->tables ? mu_arena_take(planner->tables, size_bytes) : NULL;
}

static float *place_floats(struct planner *planner, size_t count)
{
    return place(planner, count * sizeof(float));
}

/* What is computed again when something is dropped. */
static void place_norms_and_act(struct planner *planner, const struct model_dims *d, struct layer_state *s)
{
    s->norm1 = place_floats(planner, (size_t)d->own * d->channels);
    s->norm2 = place_floats(planner, (size_t)d->own * d->channels);
    s->act = place_floats(planner, (size_t)d->slices * d->rows * d->hidden);
}

static void place_kept(struct planner *planner, const struct model_dims *d, struct layer_state *s)
{
    size_t slices = d->slices, rows = d->rows, own = d->own;
    s->mean1 = place_floats(planner, d->rms ? 0 : own);
    s->rstd1 = place_floats(planner, own);
    s->qkv = place_floats(planner, slices * rows * d->qkv);
    s->lse = place_floats(planner, slices * rows * d->heads);
    s->attention = place_floats(planner, slices * rows * d->attention);
    s->x2 = place_floats(planner, own * d->channels);
    s->mean2 = place_floats(planner, d->rms ? 0 : own);
    s->rstd2 = place_floats(planner, own);
    s->up = place_floats(planner, slices * rows * d->up);
}

/* Activations of one slot. `shared` holds what all layers and slots have in common. */
static void place_slot(struct planner *planner, struct mu_model *m, const struct layer_state *shared,
                       struct slot_state *slot)
{
    const struct model_dims *d = &m->dims;
    const enum mu_recompute recompute = m->options.recompute;
    size_t own = d->own;
    struct layer_state *layers = place_table(planner, m->options.part.layer_count * sizeof *layers), layer = *shared;
    for (uint32_t i = 0; i < m->options.part.layer_count; i++) {
        if (i == 0 || !m->options.forward_only) {
            layer.x1 = place_floats(planner, own * d->channels);
            if (recompute == MU_RECOMPUTE_NONE)
                place_norms_and_act(planner, d, &layer);
            if (recompute != MU_RECOMPUTE_FULL)
                place_kept(planner, d, &layer);
        }
        if (layers)
            layers[i] = layer;
    }
    float *normf = shared->norm1;
    if (m->options.part.head) {
        struct slot_state last = {.layers = layers};
        last.xf = place_floats(planner, own * d->channels);
        last.normf = recompute == MU_RECOMPUTE_NONE ? place_floats(planner, own * d->channels) : normf;
        last.meanf = place_floats(planner, d->rms ? 0 : own);
        last.rstdf = place_floats(planner, own);
        *slot = last;
    } else {
        *slot = (struct slot_state){.layers = layers};
    }
}

static void place_activations(struct planner *planner, struct mu_model *m)
{
    struct layer_state shared = {0};
    if (m->options.recompute != MU_RECOMPUTE_NONE)
        place_norms_and_act(planner, &m->dims, &shared);
    if (m->options.recompute == MU_RECOMPUTE_FULL)
        place_kept(planner, &m->dims, &shared);
    struct slot_state *slots = place_table(planner, m->options.slots * sizeof *slots);
    for (uint32_t i = 0; i < m->options.slots; i++) {
        struct slot_state slot;
        place_slot(planner, m, &shared, &slot);
        if (slots)
            slots[i] = slot;
    }
    m->slots = slots;
}

static void place_head(struct planner *planner, struct mu_model *m)
{
    const struct model_dims *d = &m->dims;
    m->head_tokens = d->rows < MU_HEAD_TOKENS ? d->rows : MU_HEAD_TOKENS;
    m->logits_stride = ((size_t)d->vocab_slice + 15) / 16 * 16;
    m->logits = place_floats(planner, (size_t)d->slices * m->head_tokens * m->logits_stride);
    m->losses = place(planner, (size_t)d->ranks * d->rows * sizeof(double));
    if (d->total_slices == 1)
        return;
    m->highest = place_floats(planner, ((size_t)d->ranks + d->slices) * m->head_tokens);
    m->sums = place(planner, ((size_t)d->ranks + d->slices) * m->head_tokens * sizeof(double));
}

/* Sums over token slices, which outlive a micro-batch. */
static void place_sums(struct planner *planner, struct mu_model *m)
{
    const struct model_dims *d = &m->dims;
    size_t layer = m->map.layer_shared_size, final = m->options.part.head ? m->map.final_size : 0;
    if (d->total_slices == 1)
        return;
    m->layer_sums = place_floats(planner, m->options.part.layer_count * d->slices * layer);
    m->final_sums = place_floats(planner, d->slices * final);
    if (d->ranks > 1)
        m->shared_gather = place_floats(planner, d->ranks * (layer > final ? layer : final));
    if (!m->options.part.embedding || !d->wpe)
        return;
    uint32_t levels = 1;
    for (uint32_t s = d->slices; s > 1; s /= 2)
        levels++;
    if (d->ranks > 1 && levels < 2)
        levels = 2;
    m->position_sums = place_floats(planner, (size_t)levels * m->options.length * d->channels);
}

static void place_gradients(struct planner *planner, struct mu_model *m)
{
    const struct model_dims *d = &m->dims;
    size_t slices = d->slices, rows = d->rows, own = d->own, accumulate = m->options.accumulate;
    m->dbranch = place_floats(planner, m->spec.config.dropout > 0.0f ? own * d->channels : 0);
    m->dhidden = place_floats(planner, slices * rows * (d->hidden > d->attention ? d->hidden : d->attention));
    m->dqkv = place_floats(planner, slices * rows * d->qkv);
    m->norm_workspace = place_floats(planner, mu_kernel_norm_workspace(d->own / d->slices, d->channels));
    place_sums(planner, m);
    if (!m->options.part.embedding)
        return;
    m->dembedding = place_table(planner, accumulate * sizeof(float *));
    m->tokens = place(planner, accumulate * rows * sizeof(int32_t));
    m->samples = place(planner, accumulate * m->options.micro * sizeof(uint64_t));
    for (uint32_t i = 0; i < accumulate; i++) {
        float *buffer = place_floats(planner, own * d->channels);
        if (m->dembedding)
            m->dembedding[i] = buffer;
    }
}

/* The batch under way. */
static void place_inputs(struct planner *planner, struct mu_model *m)
{
    const struct model_dims *d = &m->dims;
    m->in_samples = place(planner, m->options.micro * sizeof *m->in_samples);
    if (m->options.part.head)
        m->in_targets = place(planner, d->rows * sizeof *m->in_targets);
    if (!m->options.part.embedding)
        return;
    m->in_tokens = place(planner, d->rows * sizeof *m->in_tokens);
    m->vocab = place_table(planner, d->slices * sizeof *m->vocab);
    if (d->ranks == 1)
        return;
    m->places = place(planner, d->own * sizeof *m->places);
    m->places_table = place_table(planner, d->own * sizeof *m->places_table);
}

static void place_all(struct planner *planner, struct mu_model *m)
{
    const struct model_dims *d = &m->dims;
    m->map.layer_slices = place_table(planner, m->options.part.layer_count * sizeof(uint64_t));
    m->map.layer_shared = place_table(planner, m->options.part.layer_count * sizeof(uint64_t));
    place_inputs(planner, m);
    place_activations(planner, m);
    m->full = place_floats(planner, (size_t)d->rows * d->channels);
    if (d->ranks > 1)
        m->received = place_floats(planner, (size_t)d->rows * d->channels);
    if (!m->options.part.head)
        m->row_scratch = place_floats(planner, 2 * (size_t)d->own);
    if (d->llama) {
        m->cosines = place_floats(planner, (size_t)m->options.length * (d->head_channels / 2));
        m->sines = place_floats(planner, (size_t)m->options.length * (d->head_channels / 2));
    }
    if (m->options.part.head)
        place_head(planner, m);
    if (!m->options.forward_only)
        place_gradients(planner, m);
}

/* ---- where the tensors are ---- */

static uint64_t cell_offset(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer, uint32_t slice)
{
    return mu_model_cell(spec, mu_model_cell_index(spec, kind, layer, slice)).offset;
}

static uint64_t cell_size(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer)
{
    return mu_model_cell(spec, mu_model_cell_index(spec, kind, layer, 0)).size;
}

/* Distance of neighbouring slices' cells. */
static uint64_t cell_stride(const struct mu_model_spec *spec, enum mu_cell_kind kind)
{
    if (spec->config.slices == 1)
        return 0;
    return cell_offset(spec, kind, 0, 1) - cell_offset(spec, kind, 0, 0);
}

static struct model_map map_of(const struct mu_model_spec *spec, const struct mu_model_options *o,
                               const struct model_dims *d)
{
    struct model_map map = {.layer_stride = cell_stride(spec, MU_CELL_L),
                            .layer_shared_size = cell_size(spec, MU_CELL_L_SHARED, 0),
                            .final_size = cell_size(spec, MU_CELL_F_SHARED, 0),
                            .wte = cell_offset(spec, MU_CELL_E, 0, o->part.first_slice),
                            .wte_stride = cell_stride(spec, MU_CELL_E),
                            .final = cell_offset(spec, MU_CELL_F_SHARED, 0, 0)};
    for (enum mu_role role = 0; role < MU_ROLE_COUNT; role++) {
        if (!mu_model_has(&spec->config, role))
            continue;
        struct mu_tensor tensor = mu_model_role(spec, 0, 0, role);
        map.role_at[role] = tensor.offset - mu_model_cell(spec, tensor.cell).offset;
    }
    if (d->wpe)
        map.wpe = cell_offset(spec, MU_CELL_E_SHARED, 0, 0) + map.role_at[MU_ROLE_WPE];
    map.head = d->tied ? map.wte : cell_offset(spec, MU_CELL_F, 0, o->part.first_slice);
    map.head_stride = d->tied ? map.wte_stride : cell_stride(spec, MU_CELL_F);
    return map;
}

static enum mu_status fill_rotary(struct mu_model *m)
{
    size_t size = (size_t)m->options.length * (m->dims.head_channels / 2);
    float *table = calloc(2 * size, sizeof *table);
    if (!table)
        return MU_ERR_NO_MEMORY;
    mu_kernel_rotary_table(m->options.length, m->dims.head_channels, m->spec.config.rope_base, table, table + size);
    enum mu_status status = mu_device_copy(m->device, m->cosines, table, size * sizeof *table);
    if (status == MU_OK)
        status = mu_device_copy(m->device, m->sines, table + size, size * sizeof *table);
    free(table);
    return status;
}

static enum mu_status fill_tables(struct mu_model *m)
{
    const struct mu_model_part *part = &m->options.part;
    for (uint32_t i = 0; i < part->layer_count; i++) {
        m->map.layer_slices[i] = cell_offset(&m->spec, MU_CELL_L, part->first_layer + i, part->first_slice);
        m->map.layer_shared[i] = cell_offset(&m->spec, MU_CELL_L_SHARED, part->first_layer + i, 0);
    }
    return m->dims.llama ? fill_rotary(m) : MU_OK;
}

static struct mu_model model_of(const struct mu_model_spec *spec, const struct mu_model_options *options)
{
    struct mu_model model = {.spec = *spec, .options = completed(spec, options)};
    model.dims = dims_of(spec, &model.options);
    model.map = map_of(spec, &model.options, &model.dims);
    return model;
}

size_t mu_model_workspace_bytes(const struct mu_model_spec *spec, const struct mu_model_options *options)
{
    struct mu_model model = model_of(spec, options);
    struct planner planner = {0};
    place_all(&planner, &model);
    return planner.arena_bytes + planner.table_bytes;
}

enum mu_status mu_model_new(const struct mu_model_spec *spec, const struct mu_model_options *options,
                            struct mu_pool *pool, struct mu_error *err, struct mu_model **ret_model)
{
    struct mu_model_options o = completed(spec, options);
    enum mu_status status = check_options(spec, &o, err);
    if (status != MU_OK)
        return status;
    struct mu_model *model = calloc(1, sizeof *model);
    if (!model)
        return mu_fail(err, MU_ERR_NO_MEMORY, "model: out of memory");
    *model = model_of(spec, &o);
    model->pool = pool;
    model->device = mu_pool_device(pool);
    struct planner sizes = {0}, planner = {0};
    place_all(&sizes, model);
    status = mu_arena_new_on(model->device, MU_MEMORY_DEVICE, sizes.arena_bytes, err, &model->arena);
    if (status == MU_OK)
        status = mu_arena_new(sizes.table_bytes, err, &model->tables);
    if (status != MU_OK) {
        (void)mu_error_prefix(err, "model workspace");
        mu_model_free(model);
        return status;
    }
    planner.arena = model->arena;
    planner.tables = model->tables;
    place_all(&planner, model);
    status = fill_tables(model);
    if (status != MU_OK) {
        mu_model_free(model);
        return mu_fail(err, status, "model: the table of positions cannot be filled");
    }
    *ret_model = model;
    return MU_OK;
}

void mu_model_free(struct mu_model *model)
{
    if (!model)
        return;
    mu_device_forget(model->device);
    mu_arena_free(model->arena);
    mu_arena_free(model->tables);
    free(model);
}

size_t mu_model_stream_elements(const struct mu_model *model)
{
    return (size_t)model->dims.own * model->dims.channels;
}
