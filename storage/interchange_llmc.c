/* llm.c's model files (github.com/karpathy/llm.c, train_gpt2.py write_model): 256 int32 of header ([0] magic, [1]
 * version, [2] context, [3] vocabulary, [4] layers, [5] heads, [6] channels, [7] vocabulary rounded up), then the
 * parameters, all layers of each kind together, matrices output x input. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "storage/file.h"
#include "storage/interchange_internal.h"

enum {
    MAGIC = 20240326,
    VERSION_F32 = 3,
    VERSION_BF16 = 5,
    HEADER_WORDS = 256,
    HEADER_BYTES = HEADER_WORDS * 4,
    VOCAB_ROUND = 128,
    DIRECTORY_SIZE = 4096,
};

static const struct {
    enum mu_role role;
    bool is_transposed;
} order[] = {
    {MU_ROLE_WTE, false},     {MU_ROLE_WPE, false},     {MU_ROLE_NORM1_W, false}, {MU_ROLE_NORM1_B, false},
    {MU_ROLE_QKV_W, true},    {MU_ROLE_QKV_B, false},   {MU_ROLE_PROJ_W, true},   {MU_ROLE_PROJ_B, false},
    {MU_ROLE_NORM2_W, false}, {MU_ROLE_NORM2_B, false}, {MU_ROLE_UP_W, true},     {MU_ROLE_UP_B, false},
    {MU_ROLE_DOWN_W, true},   {MU_ROLE_DOWN_B, false},  {MU_ROLE_NORMF_W, false}, {MU_ROLE_NORMF_B, false},
};
enum { ORDER_COUNT = sizeof order / sizeof order[0] };

static struct interchange_part part_of(const struct mu_model_spec *spec, int index, uint32_t layer)
{
    struct mu_tensor tensor = mu_model_role(spec, layer, 0, order[index].role);
    return (struct interchange_part){.role = order[index].role,
                                     .layer = layer,
                                     .rows = tensor.full_rows,
                                     .columns = tensor.full_columns,
                                     .is_transposed = order[index].is_transposed};
}

/* Elements in the file after the first `index` kinds; the padding of the vocabulary belongs to the first. */
static uint64_t elements_before(const struct mu_model_spec *spec, int index, uint64_t padded_vocab)
{
    uint64_t count = index > 0 ? (padded_vocab - spec->config.vocab) * spec->config.channels : 0;
    for (int i = 0; i < index; i++) {
        struct interchange_part part = part_of(spec, i, 0);
        count += interchange_part_elements(&part) * interchange_layers(&spec->config, order[i].role);
    }
    return count;
}

static enum mu_status read_header(int fd, const char *path, uint32_t slices, struct interchange_model *model,
                                  bool *ret_is_bf16, uint64_t *ret_padded_vocab, struct mu_error *err)
{
    int32_t header[HEADER_WORDS];
    enum mu_status status = mu_file_read_at(fd, path, 0, header, sizeof header, err);
    if (status != MU_OK)
        return status;
    if (header[0] != MAGIC)
        return mu_fail(err, MU_ERR_INVALID, "'%s': byte 0 holds magic number %" PRId32 ", a model of llm.c has %d",
                       path, header[0], (int)MAGIC);
    if (header[1] != VERSION_F32 && header[1] != VERSION_BF16)
        return mu_fail(err, MU_ERR_INVALID, "'%s': byte 4 holds version %" PRId32 "; %d (fp32) and %d (bf16) are known",
                       path, header[1], (int)VERSION_F32, (int)VERSION_BF16);
    for (int i = 2; i < 8; i++) {
        if (header[i] < 1)
            return mu_fail(err, MU_ERR_INVALID, "'%s': byte %d holds %" PRId32 ", which is not allowed: at least 1",
                           path, 4 * i, header[i]);
    }
    if (header[7] < header[3])
        return mu_fail(err, MU_ERR_INVALID,
                       "'%s': byte 28 holds a padded vocabulary of %" PRId32 ", less than the vocabulary of %" PRId32,
                       path, header[7], header[3]);
    struct mu_model_config config = {.family = MU_FAMILY_GPT2,
                                     .context = (uint32_t)header[2],
                                     .vocab = (uint32_t)header[3],
                                     .layers = (uint32_t)header[4],
                                     .heads = (uint32_t)header[5],
                                     .channels = (uint32_t)header[6],
                                     .slices = slices};
    *ret_is_bf16 = header[1] == VERSION_BF16;
    *ret_padded_vocab = (uint64_t)header[7];
    return interchange_model_new(model, &config, path, err);
}

static enum mu_status read_part(int fd, const char *path, uint64_t element, bool is_bf16,
                                const struct interchange_part *part, struct interchange_model *model,
                                struct mu_error *err)
{
    uint64_t count = interchange_part_elements(part);
    size_t width = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    float *data = malloc(count * sizeof *data);
    void *raw = is_bf16 ? malloc(count * width) : (void *)data;
    enum mu_status status = MU_OK;
    if (!data || !raw)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for %" PRIu64 " elements", path, count);
    if (status == MU_OK)
        status = mu_file_read_at(fd, path, HEADER_BYTES + element * width, raw, count * width, err);
    if (status == MU_OK && is_bf16)
        interchange_widen_bf16(raw, count, data);
    if (status == MU_OK)
        interchange_put(model, part, data);
    if (raw != data)
        free(raw);
    free(data);
    return status;
}

enum mu_status interchange_llmc_read(const char *path, uint32_t slices, struct interchange_model *model,
                                     struct mu_error *err)
{
    int fd;
    bool is_bf16;
    uint64_t file_bytes, padded_vocab;
    enum mu_status status = mu_file_open_regular(path, &fd, &file_bytes, err);
    if (status != MU_OK)
        return status;
    status = read_header(fd, path, slices, model, &is_bf16, &padded_vocab, err);
    if (status == MU_OK) {
        uint64_t wanted = HEADER_BYTES + elements_before(&model->spec, ORDER_COUNT, padded_vocab) * (is_bf16 ? 2 : 4);
        if (file_bytes != wanted)
            status = mu_fail(err, MU_ERR_CORRUPT, "'%s': has %" PRIu64 " bytes, but its header's model needs %" PRIu64,
                             path, file_bytes, wanted);
    }
    for (int i = 0; i < ORDER_COUNT && status == MU_OK; i++) {
        uint64_t element = elements_before(&model->spec, i, padded_vocab);
        uint32_t layers = interchange_layers(&model->spec.config, order[i].role);
        for (uint32_t layer = 0; layer < layers && status == MU_OK; layer++) {
            struct interchange_part part = part_of(&model->spec, i, layer);
            status = read_part(fd, path, element, is_bf16, &part, model, err);
            element += interchange_part_elements(&part);
        }
    }
    close(fd);
    return status;
}

enum mu_status interchange_llmc_write(const struct interchange_model *model, const char *path, struct mu_error *err)
{
    const struct mu_model_config *config = &model->spec.config;
    uint32_t padded = (config->vocab + VOCAB_ROUND - 1) / VOCAB_ROUND * VOCAB_ROUND;
    uint64_t elements = elements_before(&model->spec, ORDER_COUNT, padded);
    size_t size_bytes = HEADER_BYTES + (size_t)elements * sizeof(float);
    uint8_t *file = calloc(1, size_bytes);
    if (!file)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for %zu bytes", path, size_bytes);
    const int32_t header[] = {MAGIC,
                              VERSION_F32,
                              (int32_t)config->context,
                              (int32_t)config->vocab,
                              (int32_t)config->layers,
                              (int32_t)config->heads,
                              (int32_t)config->channels,
                              (int32_t)padded};
    memcpy(file, header, sizeof header);
    for (int i = 0; i < ORDER_COUNT; i++) {
        float *to = (float *)(void *)(file + HEADER_BYTES) + elements_before(&model->spec, i, padded);
        for (uint32_t layer = 0; layer < interchange_layers(config, order[i].role); layer++) {
            struct interchange_part part = part_of(&model->spec, i, layer);
            interchange_get(model, &part, to);
            to += interchange_part_elements(&part);
        }
    }
    char dir[DIRECTORY_SIZE];
    const char *slash = strrchr(path, '/');
    mu_file_parent(path, dir, sizeof dir);
    enum mu_status status = mu_file_make_dirs(dir, err);
    if (status == MU_OK)
        status = mu_file_publish(dir, slash ? slash + 1 : path, file, size_bytes, err);
    free(file);
    return status;
}
