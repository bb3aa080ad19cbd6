/* Hugging Face directories: config.json, model.safetensors (or shards and their index). */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "storage/file.h"
#include "storage/interchange_internal.h"
#include "storage/json_load.h"
#include "storage/piece_format.h"
#include "storage/safetensors.h"

enum {
    JSON_BYTES_MAX = 64 << 20,
    PATH_BYTES_MAX = 4096,
    NAME_SIZE = 128,
    PARTS_MAX = 3, /* foreign tensors of one role: q, k, v */
    SHARDS_MAX = 4096,
    FILE_NAME_MAX = 96,
};
#define CONFIG_FILE "config.json"
#define MODEL_FILE  "model.safetensors"
#define INDEX_FILE  "model.safetensors.index.json"
static const double norm_epsilon = 1e-5; /* of the kernels */

/* ---- names ---- */

struct named_part {
    char name[NAME_SIZE];
    struct interchange_part part;
};

static const char *const gpt2_names[MU_ROLE_COUNT] = {
    [MU_ROLE_WTE] = "wte.weight",
    [MU_ROLE_WPE] = "wpe.weight",
    [MU_ROLE_NORM1_W] = "ln_1.weight",
    [MU_ROLE_NORM1_B] = "ln_1.bias",
    [MU_ROLE_QKV_W] = "attn.c_attn.weight",
    [MU_ROLE_QKV_B] = "attn.c_attn.bias",
    [MU_ROLE_PROJ_W] = "attn.c_proj.weight",
    [MU_ROLE_PROJ_B] = "attn.c_proj.bias",
    [MU_ROLE_NORM2_W] = "ln_2.weight",
    [MU_ROLE_NORM2_B] = "ln_2.bias",
    [MU_ROLE_UP_W] = "mlp.c_fc.weight",
    [MU_ROLE_UP_B] = "mlp.c_fc.bias",
    [MU_ROLE_DOWN_W] = "mlp.c_proj.weight",
    [MU_ROLE_DOWN_B] = "mlp.c_proj.bias",
    [MU_ROLE_NORMF_W] = "ln_f.weight",
    [MU_ROLE_NORMF_B] = "ln_f.bias",
};

static const struct {
    const char *names[PARTS_MAX];
    bool is_transposed;
} llama_names[MU_ROLE_COUNT] = {
    [MU_ROLE_WTE] = {{"model.embed_tokens.weight"}, false},
    [MU_ROLE_NORM1_W] = {{"input_layernorm.weight"}, false},
    [MU_ROLE_QKV_W] = {{"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}, true},
    [MU_ROLE_PROJ_W] = {{"self_attn.o_proj.weight"}, true},
    [MU_ROLE_NORM2_W] = {{"post_attention_layernorm.weight"}, false},
    [MU_ROLE_UP_W] = {{"mlp.gate_proj.weight", "mlp.up_proj.weight"}, true},
    [MU_ROLE_DOWN_W] = {{"mlp.down_proj.weight"}, true},
    [MU_ROLE_NORMF_W] = {{"model.norm.weight"}, false},
    [MU_ROLE_HEAD_W] = {{"lm_head.weight"}, false},
};

/* Columns of the logical tensor that part `index` of a fused one takes. */
static uint64_t part_columns(const struct mu_model_config *config, enum mu_role role, uint32_t index,
                             uint64_t all_columns)
{
    if (config->family == MU_FAMILY_LLAMA && role == MU_ROLE_QKV_W)
        return (uint64_t)config->channels / config->heads * (index == 0 ? config->heads : config->kv_heads);
    if (config->family == MU_FAMILY_LLAMA && role == MU_ROLE_UP_W)
        return config->hidden;
    return all_columns;
}

/* The foreign tensors of a role; returns how many. */
static uint32_t parts_of(const struct mu_model_spec *spec, enum mu_role role, uint32_t layer,
                         struct named_part parts[PARTS_MAX])
{
    const struct mu_model_config *config = &spec->config;
    bool is_llama = config->family == MU_FAMILY_LLAMA;
    struct mu_tensor tensor = mu_model_role(spec, layer, 0, role);
    uint64_t first = 0;
    uint32_t count = 0;
    while (count < PARTS_MAX && (is_llama ? llama_names[role].names[count] : count == 0 ? gpt2_names[role] : NULL)) {
        const char *name = is_llama ? llama_names[role].names[count] : gpt2_names[role];
        struct named_part *named = &parts[count];
        named->part = (struct interchange_part){.role = role,
                                                .layer = layer,
                                                .rows = tensor.full_rows,
                                                .first = first,
                                                .columns = part_columns(config, role, count, tensor.full_columns),
                                                .is_transposed = is_llama && llama_names[role].is_transposed};
        if (interchange_is_layered(role))
            snprintf(named->name, sizeof named->name, "%s.%" PRIu32 ".%s", is_llama ? "model.layers" : "transformer.h",
                     layer, name);
        else
            snprintf(named->name, sizeof named->name, "%s%s", is_llama ? "" : "transformer.", name);
        first += named->part.columns;
        count++;
    }
    MU_ASSERT(first == tensor.full_columns);
    return count;
}

/* Shape in the foreign file; a vector has one dimension. Returns the rank. */
static uint32_t shape_of(const struct interchange_part *part, uint64_t shape[2])
{
    shape[0] = part->is_transposed ? part->columns : part->rows;
    shape[1] = part->is_transposed ? part->rows : part->columns;
    bool is_vector = part->role != MU_ROLE_WTE && part->role != MU_ROLE_WPE && part->role != MU_ROLE_HEAD_W &&
                     part->role != MU_ROLE_QKV_W && part->role != MU_ROLE_PROJ_W && part->role != MU_ROLE_UP_W &&
                     part->role != MU_ROLE_DOWN_W;
    return is_vector ? 1 : 2;
}

/* ---- config.json ---- */

struct config_reader {
    const json_t *root;
    const char *path;
    struct mu_error *err;
};

static enum mu_status get_u32(const struct config_reader *reader, const char *key, const char *other_key,
                              uint32_t otherwise, uint32_t *ret_value)
{
    const json_t *value = json_object_get(reader->root, key);
    if (!value && other_key)
        value = json_object_get(reader->root, other_key);
    if ((!value || json_is_null(value)) && otherwise > 0) {
        *ret_value = otherwise;
        return MU_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < 1 || json_integer_value(value) > INT32_MAX)
        return mu_fail(reader->err, MU_ERR_INVALID, "'%s': %s is missing or not a number from 1 to %d", reader->path,
                       key, INT32_MAX);
    *ret_value = (uint32_t)json_integer_value(value);
    return MU_OK;
}

/* A setting that this program knows only with one value, which is also what its absence means. */
static enum mu_status need_text(const struct config_reader *reader, const char *key, const char *wanted)
{
    const json_t *value = json_object_get(reader->root, key);
    if (!value || json_is_null(value) || (json_is_string(value) && strcmp(json_string_value(value), wanted) == 0))
        return MU_OK;
    return mu_fail(reader->err, MU_ERR_INVALID, "'%s': %s is not '%s', the only one known here", reader->path, key,
                   wanted);
}

static enum mu_status need_bool(const struct config_reader *reader, const char *key, bool wanted)
{
    const json_t *value = json_object_get(reader->root, key);
    if (!value || json_is_null(value) || (json_is_boolean(value) && json_is_true(value) == wanted))
        return MU_OK;
    return mu_fail(reader->err, MU_ERR_INVALID, "'%s': %s is not %s, the only one known here", reader->path, key,
                   wanted ? "true" : "false");
}

static enum mu_status need_null(const struct config_reader *reader, const char *key)
{
    const json_t *value = json_object_get(reader->root, key);
    if (!value || json_is_null(value))
        return MU_OK;
    return mu_fail(reader->err, MU_ERR_INVALID, "'%s': %s is set; models with it are not known here", reader->path,
                   key);
}

static enum mu_status need_epsilon(const struct config_reader *reader, const char *key, double otherwise)
{
    const json_t *value = json_object_get(reader->root, key);
    double actual = value && !json_is_null(value) ? json_number_value(value) : otherwise;
    if (actual == norm_epsilon)
        return MU_OK;
    return mu_fail(reader->err, MU_ERR_INVALID, "'%s': %s is %g; only %g is known here", reader->path, key, actual,
                   norm_epsilon);
}

static enum mu_status read_gpt2_config(const struct config_reader *reader, struct mu_model_config *config)
{
    uint32_t inner;
    enum mu_status status;
    if ((status = get_u32(reader, "n_layer", "num_hidden_layers", 0, &config->layers)) ||
        (status = get_u32(reader, "n_head", "num_attention_heads", 0, &config->heads)) ||
        (status = get_u32(reader, "n_embd", "hidden_size", 0, &config->channels)) ||
        (status = get_u32(reader, "n_positions", "n_ctx", 0, &config->context)) ||
        (status = get_u32(reader, "vocab_size", NULL, 0, &config->vocab)) ||
        (status = need_text(reader, "activation_function", "gelu_new")) ||
        (status = need_epsilon(reader, "layer_norm_epsilon", norm_epsilon)) ||
        (status = need_bool(reader, "scale_attn_weights", true)) ||
        (status = need_bool(reader, "scale_attn_by_inverse_layer_idx", false)) ||
        (status = need_bool(reader, "add_cross_attention", false)) ||
        (status = need_bool(reader, "tie_word_embeddings", true)))
        return status;
    uint32_t expected = config->channels <= MU_CHANNELS_MAX ? 4 * config->channels : 1;
    status = get_u32(reader, "n_inner", NULL, expected, &inner);
    if (status == MU_OK && inner != expected)
        status = mu_fail(reader->err, MU_ERR_INVALID, "'%s': n_inner is %" PRIu32 "; only 4 n_embd is known here",
                         reader->path, inner);
    return status;
}

static enum mu_status read_rope(const struct config_reader *reader, struct mu_model_config *config)
{
    const json_t *base = json_object_get(reader->root, "rope_theta");
    const json_t *rope = json_object_get(reader->root, "rope_parameters"); /* where newer versions have it */
    if (json_is_object(rope)) {
        const char *type = json_string_value(json_object_get(rope, "rope_type"));
        if (type && strcmp(type, "default") != 0)
            return mu_fail(reader->err, MU_ERR_INVALID,
                           "'%s': rope_parameters.rope_type is not 'default', the only one known here", reader->path);
        base = json_object_get(rope, "rope_theta");
    }
    config->rope_base = 10000;
    if (base && !json_is_null(base))
        config->rope_base = json_number_value(base); /* 0 when it is no number: judged with the model */
    if (config->rope_base <= 1)
        return mu_fail(reader->err, MU_ERR_INVALID, "'%s': rope_theta is not a number above 1", reader->path);
    return need_null(reader, "rope_scaling");
}

static enum mu_status read_llama_config(const struct config_reader *reader, struct mu_model_config *config)
{
    uint32_t head_channels;
    enum mu_status status;
    if ((status = get_u32(reader, "num_hidden_layers", NULL, 0, &config->layers)) ||
        (status = get_u32(reader, "num_attention_heads", NULL, 0, &config->heads)) ||
        (status = get_u32(reader, "num_key_value_heads", NULL, config->heads, &config->kv_heads)) ||
        (status = get_u32(reader, "hidden_size", NULL, 0, &config->channels)) ||
        (status = get_u32(reader, "intermediate_size", NULL, 0, &config->hidden)) ||
        (status = get_u32(reader, "max_position_embeddings", NULL, 0, &config->context)) ||
        (status = get_u32(reader, "vocab_size", NULL, 0, &config->vocab)) ||
        (status = need_text(reader, "hidden_act", "silu")) ||
        (status = need_epsilon(reader, "rms_norm_eps", 1e-6 /* theirs */)) ||
        (status = need_bool(reader, "attention_bias", false)) || (status = need_bool(reader, "mlp_bias", false)) ||
        (status = read_rope(reader, config)))
        return status;
    uint32_t expected = config->channels / config->heads;
    status = get_u32(reader, "head_dim", NULL, expected ? expected : 1, &head_channels);
    if (status == MU_OK && head_channels != expected)
        status =
            mu_fail(reader->err, MU_ERR_INVALID,
                    "'%s': head_dim is %" PRIu32 "; only hidden_size / num_attention_heads (%" PRIu32 ") is known here",
                    reader->path, head_channels, expected);
    return status;
}

static enum mu_status load_json(const char *dir, const char *file, char path[PATH_BYTES_MAX], json_t **ret_root,
                                struct mu_error *err)
{
    char *text;
    size_t size_bytes;
    if ((size_t)snprintf(path, PATH_BYTES_MAX, "%s/%s", dir, file) >= PATH_BYTES_MAX)
        return mu_fail(err, MU_ERR_INVALID, "a directory path of %zu bytes is not allowed", strlen(dir));
    enum mu_status status = mu_file_read_all(path, JSON_BYTES_MAX, &text, &size_bytes, err);
    if (status != MU_OK)
        return status;
    status = mu_json_load(text, size_bytes, path, ret_root, err);
    free(text);
    return status;
}

static enum mu_status read_config(const char *dir, enum mu_model_family family, struct mu_model_config *config,
                                  char path[PATH_BYTES_MAX], struct mu_error *err)
{
    json_t *root;
    enum mu_status status = load_json(dir, CONFIG_FILE, path, &root, err);
    if (status != MU_OK)
        return status;
    struct config_reader reader = {.root = root, .path = path, .err = err};
    const char *type = json_string_value(json_object_get(root, "model_type"));
    const char *wanted = family == MU_FAMILY_GPT2 ? "gpt2" : "llama";
    config->family = family;
    if (!type || strcmp(type, wanted) != 0)
        status = mu_fail(err, MU_ERR_INVALID, "'%s': model_type is not '%s'; import it as what it is", path, wanted);
    else
        status = family == MU_FAMILY_GPT2 ? read_gpt2_config(&reader, config) : read_llama_config(&reader, config);
    json_decref(root);
    return status;
}

/* ---- the tensors of a directory ---- */

struct shard {
    char name[FILE_NAME_MAX];
    struct mu_safetensors *file;
};

struct source {
    const char *dir;
    json_t *index;        /* NULL: one file */
    json_t *map;          /* of index: tensor name -> file name */
    struct shard *shards; /* opened so far */
    uint32_t shard_count;
};

static void source_close(struct source *source)
{
    for (uint32_t i = 0; i < source->shard_count; i++)
        mu_safetensors_close(source->shards[i].file);
    free(source->shards);
    json_decref(source->index);
}

static enum mu_status source_open(const char *dir, struct source *source, struct mu_error *err)
{
    char path[PATH_BYTES_MAX];
    struct stat st;
    *source = (struct source){.dir = dir, .shards = calloc(SHARDS_MAX, sizeof *source->shards)};
    if (!source->shards)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the files of '%s'", dir);
    snprintf(path, sizeof path, "%s/" MODEL_FILE, dir);
    if (stat(path, &st) == 0)
        return MU_OK;
    enum mu_status status = load_json(dir, INDEX_FILE, path, &source->index, err);
    if (status == MU_ERR_NOT_FOUND)
        return mu_fail(err, MU_ERR_NOT_FOUND, "'%s' has neither " MODEL_FILE " nor " INDEX_FILE, dir);
    if (status != MU_OK)
        return status;
    source->map = json_object_get(source->index, "weight_map");
    if (!json_is_object(source->map))
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': weight_map is missing or no object", path);
    return MU_OK;
}

static enum mu_status open_shard(struct source *source, const char *name, struct mu_safetensors **ret_file,
                                 struct mu_error *err)
{
    char path[PATH_BYTES_MAX];
    for (uint32_t i = 0; i < source->shard_count; i++) {
        if (strcmp(source->shards[i].name, name) == 0) {
            *ret_file = source->shards[i].file;
            return MU_OK;
        }
    }
    if (!mu_piece_file_name_is_valid(name)) /* it comes from a file: never a path */
        return mu_fail(err, MU_ERR_CORRUPT,
                       "'%s/" INDEX_FILE "': a file name is not allowed: letters, digits, . _ - only", source->dir);
    if (source->shard_count == SHARDS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "'%s/" INDEX_FILE "': more than %d files are not allowed", source->dir,
                       SHARDS_MAX);
    snprintf(path, sizeof path, "%s/%s", source->dir, name);
    struct shard *shard = &source->shards[source->shard_count];
    enum mu_status status = mu_safetensors_open(path, &shard->file, err);
    if (status != MU_OK)
        return status;
    snprintf(shard->name, sizeof shard->name, "%s", name);
    source->shard_count++;
    *ret_file = shard->file;
    return MU_OK;
}

/* *ret_tensor is NULL when there is none of that name. */
static enum mu_status find(struct source *source, const char *name, struct mu_safetensors **ret_file,
                           const struct mu_safetensors_tensor **ret_tensor, struct mu_error *err)
{
    const char *file_name = source->map ? json_string_value(json_object_get(source->map, name)) : MODEL_FILE;
    *ret_tensor = NULL;
    if (!file_name)
        return MU_OK;
    enum mu_status status = open_shard(source, file_name, ret_file, err);
    if (status != MU_OK)
        return status;
    *ret_tensor = mu_safetensors_find(*ret_file, name);
    if (!*ret_tensor && source->map)
        return mu_fail(err, MU_ERR_CORRUPT, "'%s/%s': has no tensor %s, although " INDEX_FILE " says so", source->dir,
                       file_name, name);
    return MU_OK;
}

static enum mu_status check_tensor(const struct source *source, const struct mu_safetensors_tensor *tensor,
                                   const struct interchange_part *part, struct mu_error *err)
{
    uint64_t shape[2];
    uint32_t rank = shape_of(part, shape);
    bool fits = tensor->rank == rank;
    for (uint32_t i = 0; i < rank && fits; i++)
        fits = tensor->shape[i] == shape[i];
    if (!fits)
        return mu_fail(err, MU_ERR_INVALID,
                       "'%s': tensor %s has not the shape that " CONFIG_FILE " asks for: %" PRIu64 " x %" PRIu64,
                       source->dir, tensor->name, shape[0], rank == 2 ? shape[1] : 1);
    if (tensor->dtype != MU_ST_F32 && tensor->dtype != MU_ST_BF16 && tensor->dtype != MU_ST_F16)
        return mu_fail(err, MU_ERR_INVALID, "'%s': tensor %s is of type %s; F32, BF16 and F16 are known here",
                       source->dir, tensor->name, mu_safetensors_dtype_name(tensor->dtype));
    return MU_OK;
}

/* The tensor as fp32, from malloc. */
static enum mu_status read_tensor(const struct source *source, struct mu_safetensors *file,
                                  const struct mu_safetensors_tensor *tensor, const struct interchange_part *part,
                                  float **ret_data, struct mu_error *err)
{
    enum mu_status status = check_tensor(source, tensor, part, err);
    if (status != MU_OK)
        return status;
    uint64_t count = interchange_part_elements(part);
    float *data = malloc(count * sizeof *data);
    void *raw = tensor->dtype == MU_ST_F32 ? (void *)data : malloc(tensor->size_bytes);
    if (!data || !raw)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for tensor %s", source->dir, tensor->name);
    if (status == MU_OK)
        status = mu_safetensors_read(file, tensor, raw, err);
    if (status == MU_OK && tensor->dtype == MU_ST_BF16)
        interchange_widen_bf16(raw, count, data);
    else if (status == MU_OK && tensor->dtype == MU_ST_F16)
        interchange_widen_f16(raw, count, data);
    if (raw != data)
        free(raw);
    if (status != MU_OK) {
        free(data);
        return status;
    }
    *ret_data = data;
    return MU_OK;
}

/* Base models are saved without the prefix of the whole. */
static const char *without_prefix(const char *name, enum mu_model_family family)
{
    const char *prefix = family == MU_FAMILY_GPT2 ? "transformer." : "model.";
    return strncmp(name, prefix, strlen(prefix)) == 0 ? name + strlen(prefix) : name;
}

static enum mu_status find_part(struct source *source, const struct named_part *named, enum mu_model_family family,
                                struct mu_safetensors **ret_file, const struct mu_safetensors_tensor **ret_tensor,
                                struct mu_error *err)
{
    enum mu_status status = find(source, named->name, ret_file, ret_tensor, err);
    if (status == MU_OK && !*ret_tensor)
        status = find(source, without_prefix(named->name, family), ret_file, ret_tensor, err);
    if (status != MU_OK || *ret_tensor || named->part.role != MU_ROLE_HEAD_W)
        return status;
    struct named_part embedding = *named; /* a tied head is not stored */
    snprintf(embedding.name, sizeof embedding.name, "%s", llama_names[MU_ROLE_WTE].names[0]);
    embedding.part.role = MU_ROLE_WTE;
    return find_part(source, &embedding, family, ret_file, ret_tensor, err);
}

static enum mu_status read_part(struct source *source, const struct named_part *named, struct interchange_model *model,
                                struct mu_error *err)
{
    struct mu_safetensors *file;
    const struct mu_safetensors_tensor *tensor;
    float *data;
    enum mu_status status = find_part(source, named, model->spec.config.family, &file, &tensor, err);
    if (status == MU_OK && !tensor)
        status = mu_fail(err, MU_ERR_NOT_FOUND, "'%s': has no tensor %s", source->dir, named->name);
    if (status == MU_OK)
        status = read_tensor(source, file, tensor, &named->part, &data, err);
    if (status != MU_OK)
        return status;
    interchange_put(model, &named->part, data);
    free(data);
    return MU_OK;
}

/* GPT-2's head is the embedding: a head of its own that differs would be lost silently. */
static enum mu_status check_tied(struct source *source, const struct interchange_model *model, struct mu_error *err)
{
    struct mu_safetensors *file;
    const struct mu_safetensors_tensor *tensor;
    struct named_part parts[PARTS_MAX];
    parts_of(&model->spec, MU_ROLE_WTE, 0, parts);
    enum mu_status status = find(source, "lm_head.weight", &file, &tensor, err);
    if (status != MU_OK || !tensor)
        return status;
    float *head, *embedding = malloc(interchange_part_elements(&parts[0].part) * sizeof *embedding);
    if (!embedding)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for tensor lm_head.weight", source->dir);
    status = read_tensor(source, file, tensor, &parts[0].part, &head, err);
    if (status == MU_OK) {
        interchange_get(model, &parts[0].part, embedding);
        if (memcmp(head, embedding, interchange_part_elements(&parts[0].part) * sizeof *head) != 0)
            status = mu_fail(err, MU_ERR_INVALID,
                             "'%s': lm_head.weight differs from the embedding; a gpt2 with a head of its own is not "
                             "known here",
                             source->dir);
        free(head);
    }
    free(embedding);
    return status;
}

enum mu_status interchange_hf_read(const char *dir, enum mu_model_family family, uint32_t slices,
                                   struct interchange_model *model, struct mu_error *err)
{
    char path[PATH_BYTES_MAX];
    struct mu_model_config config = {.slices = slices};
    struct source source = {.dir = dir};
    enum mu_status status = read_config(dir, family, &config, path, err);
    if (status == MU_OK)
        status = source_open(dir, &source, err);
    if (status == MU_OK)
        status = interchange_model_new(model, &config, path, err);
    for (int role = 0; role < MU_ROLE_COUNT && status == MU_OK; role++) {
        if (!mu_model_has(&model->spec.config, (enum mu_role)role))
            continue;
        uint32_t layers = interchange_layers(&model->spec.config, (enum mu_role)role);
        for (uint32_t layer = 0; layer < layers && status == MU_OK; layer++) {
            struct named_part parts[PARTS_MAX];
            uint32_t count = parts_of(&model->spec, (enum mu_role)role, layer, parts);
            for (uint32_t i = 0; i < count && status == MU_OK; i++)
                status = read_part(&source, &parts[i], model, err);
        }
    }
    if (status == MU_OK && family == MU_FAMILY_GPT2)
        status = check_tied(&source, model, err);
    source_close(&source);
    return status;
}

/* ---- writing ---- */

static json_t *config_json(const struct mu_model_config *c)
{
    if (c->family == MU_FAMILY_GPT2)
        return json_pack("{s:s, s:[s], s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:f, s:b, s:s, s:f, s:f, s:f}", "model_type",
                         "gpt2", "architectures", "GPT2LMHeadModel", "n_layer", (int)c->layers, "n_head", (int)c->heads,
                         "n_embd", (int)c->channels, "n_positions", (int)c->context, "n_ctx", (int)c->context,
                         "vocab_size", (int)c->vocab, "activation_function", "gelu_new", "layer_norm_epsilon",
                         norm_epsilon, "tie_word_embeddings", 1, "torch_dtype", "float32", "attn_pdrop",
                         (double)c->dropout, "embd_pdrop", (double)c->dropout, "resid_pdrop", (double)c->dropout);
    return json_pack("{s:s, s:[s], s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:f, s:f, s:b, s:b, s:b, s:s}", "model_type",
                     "llama", "architectures", "LlamaForCausalLM", "num_hidden_layers", (int)c->layers,
                     "num_attention_heads", (int)c->heads, "num_key_value_heads", (int)c->kv_heads, "hidden_size",
                     (int)c->channels, "intermediate_size", (int)c->hidden, "max_position_embeddings", (int)c->context,
                     "vocab_size", (int)c->vocab, "hidden_act", "silu", "rms_norm_eps", norm_epsilon, "rope_theta",
                     c->rope_base, "attention_bias", 0, "mlp_bias", 0, "tie_word_embeddings", 0, "torch_dtype",
                     "float32");
}

static enum mu_status write_config(const struct interchange_model *model, const char *dir, struct mu_error *err)
{
    json_t *root = config_json(&model->spec.config);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for " CONFIG_FILE, dir);
    enum mu_status status = mu_file_publish(dir, CONFIG_FILE, text, strlen(text), err);
    free(text);
    return status;
}

/* All foreign tensors of the model, in order; the tensors point into `names` and `data`. With NULL only counted. */
static size_t gather(const struct interchange_model *model, struct mu_safetensors_tensor *tensors,
                     char (*names)[NAME_SIZE], float *data)
{
    size_t count = 0;
    for (int role = 0; role < MU_ROLE_COUNT; role++) {
        if (!mu_model_has(&model->spec.config, (enum mu_role)role))
            continue;
        uint32_t layers = interchange_layers(&model->spec.config, (enum mu_role)role);
        for (uint32_t layer = 0; layer < layers; layer++) {
            struct named_part parts[PARTS_MAX];
            uint32_t part_count = parts_of(&model->spec, (enum mu_role)role, layer, parts);
            for (uint32_t i = 0; i < part_count; i++, count++) {
                if (!tensors)
                    continue;
                struct mu_safetensors_tensor *tensor = &tensors[count];
                memcpy(names[count], parts[i].name, NAME_SIZE);
                *tensor = (struct mu_safetensors_tensor){.name = names[count], .dtype = MU_ST_F32, .data = data};
                tensor->rank = shape_of(&parts[i].part, tensor->shape);
                interchange_get(model, &parts[i].part, data);
                data += interchange_part_elements(&parts[i].part);
            }
        }
    }
    return count;
}

enum mu_status interchange_hf_write(const struct interchange_model *model, const char *dir, struct mu_error *err)
{
    char path[PATH_BYTES_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/" MODEL_FILE, dir) >= sizeof path)
        return mu_fail(err, MU_ERR_INVALID, "a directory path of %zu bytes is not allowed", strlen(dir));
    size_t count = gather(model, NULL, NULL, NULL);
    struct mu_safetensors_tensor *tensors = calloc(count, sizeof *tensors);
    char(*names)[NAME_SIZE] = calloc(count, sizeof *names);
    float *data = malloc(model->spec.parameter_count * sizeof *data);
    enum mu_status status = MU_OK;
    if (!tensors || !names || !data)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for %.1f GB of tensors", dir,
                         (double)model->spec.parameter_count * 4e-9);
    if (status == MU_OK) {
        gather(model, tensors, names, data);
        status = mu_file_make_dirs(dir, err);
    }
    if (status == MU_OK)
        status = mu_safetensors_write(path, tensors, count, NULL, 0, err);
    if (status == MU_OK)
        status = write_config(model, dir, err);
    free(tensors);
    free(names);
    free(data);
    return status;
}
