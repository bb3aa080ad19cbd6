/* links: mu_storage mu_plan */
#include "storage_testing.h"

#include <jansson.h>

#include "common/rng.h"
#include "plan/model_spec.h"
#include "storage/interchange.h"
#include "storage/interchange_internal.h"
#include "storage/manifest.h"
#include "storage/safetensors.h"

/* ---- other programs' files, made here without the product's names and orders ---- */

enum { TENSORS_MAX = 64 };

enum stored { AS_F32, AS_BF16, AS_F16 };

struct foreign {
    struct mu_safetensors_tensor tensors[TENSORS_MAX];
    char names[TENSORS_MAX][128];
    float *values[TENSORS_MAX]; /* as fp32 */
    size_t count;
};

static uint64_t elements_of(const struct mu_safetensors_tensor *tensor)
{
    return tensor->rank == 2 ? tensor->shape[0] * tensor->shape[1] : tensor->shape[0];
}

/* Values that 16 bits hold exactly, so that every type stores the same ones. */
static void add_tensor(struct foreign *f, const char *name, uint64_t rows, uint64_t columns, enum stored stored,
                       uint64_t *random)
{
    struct mu_safetensors_tensor *tensor = &f->tensors[f->count];
    snprintf(f->names[f->count], sizeof f->names[0], "%s", name);
    *tensor = (struct mu_safetensors_tensor){.name = f->names[f->count],
                                             .rank = columns ? 2 : 1,
                                             .shape = {rows, columns},
                                             .dtype = stored == AS_F32    ? MU_ST_F32
                                                      : stored == AS_BF16 ? MU_ST_BF16
                                                                          : MU_ST_F16};
    uint64_t count = elements_of(tensor);
    float *values = malloc(count * sizeof *values);
    uint16_t *raw = malloc(count * sizeof *raw);
    for (uint64_t i = 0; i < count; i++) {
        values[i] = ((float)(mu_splitmix64(random) % 255) - 127.0f) / 64.0f; /* 8 significant bits */
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        uint32_t exponent = bits >> 23 & 255;
        raw[i] = stored == AS_BF16 ? (uint16_t)(bits >> 16)
                                   : (uint16_t)(bits >> 16 & 0x8000) |
                                         (uint16_t)(exponent ? (exponent - 112) << 10 | (bits >> 13 & 1023) : 0);
    }
    tensor->data = stored == AS_F32 ? (void *)values : raw;
    if (stored == AS_F32)
        free(raw);
    f->values[f->count++] = values;
}

static void foreign_free(struct foreign *f)
{
    for (size_t i = 0; i < f->count; i++) {
        if (f->tensors[i].data != f->values[i])
            free((void *)(uintptr_t)f->tensors[i].data);
        free(f->values[i]);
    }
}

static const float *value_of(const struct foreign *f, const char *fmt, ...) MU_PRINTF(2, 3);
static const float *value_of(const struct foreign *f, const char *fmt, ...)
{
    char name[128];
    va_list arguments;
    va_start(arguments, fmt);
    vsnprintf(name, sizeof name, fmt, arguments);
    va_end(arguments);
    for (size_t i = 0; i < f->count; i++) {
        if (strcmp(f->names[i], name) == 0)
            return f->values[i];
    }
    fail_msg("the test has no tensor %s", name);
    return NULL;
}

/* Small odd models: 2 layers, 4 heads of 8 channels; Llama: 2 or 4 heads of keys and values. */
enum { L = 2, H = 4, HD = 8, C = H * HD, CTX = 12, F = 40 };

static void make_gpt2(struct foreign *f, uint32_t vocab, enum stored stored, const char *prefix)
{
    uint64_t random = 5;
    char name[128];
    memset(f, 0, sizeof *f);
#define ADD(rows, columns, ...)                                                                                        \
    (snprintf(name, sizeof name, __VA_ARGS__), add_tensor(f, name, rows, columns, stored, &random))
    ADD(vocab, C, "%swte.weight", prefix);
    ADD(CTX, C, "%swpe.weight", prefix);
    for (int i = 0; i < L; i++) {
        ADD(C, 0, "%sh.%d.ln_1.weight", prefix, i);
        ADD(C, 0, "%sh.%d.ln_1.bias", prefix, i);
        ADD(C, 3 * C, "%sh.%d.attn.c_attn.weight", prefix, i);
        ADD(3 * C, 0, "%sh.%d.attn.c_attn.bias", prefix, i);
        ADD(C, C, "%sh.%d.attn.c_proj.weight", prefix, i);
        ADD(C, 0, "%sh.%d.attn.c_proj.bias", prefix, i);
        ADD(C, 0, "%sh.%d.ln_2.weight", prefix, i);
        ADD(C, 0, "%sh.%d.ln_2.bias", prefix, i);
        ADD(C, 4 * C, "%sh.%d.mlp.c_fc.weight", prefix, i);
        ADD(4 * C, 0, "%sh.%d.mlp.c_fc.bias", prefix, i);
        ADD(4 * C, C, "%sh.%d.mlp.c_proj.weight", prefix, i);
        ADD(C, 0, "%sh.%d.mlp.c_proj.bias", prefix, i);
    }
    ADD(C, 0, "%sln_f.weight", prefix);
    ADD(C, 0, "%sln_f.bias", prefix);
}

static void make_llama(struct foreign *f, uint32_t vocab, uint32_t kv_heads, enum stored stored)
{
    uint64_t random = 6;
    char name[128];
    memset(f, 0, sizeof *f);
    ADD(vocab, C, "model.embed_tokens.weight");
    for (int i = 0; i < L; i++) {
        ADD(C, 0, "model.layers.%d.input_layernorm.weight", i);
        ADD(C, C, "model.layers.%d.self_attn.q_proj.weight", i);
        ADD(kv_heads * HD, C, "model.layers.%d.self_attn.k_proj.weight", i);
        ADD(kv_heads * HD, C, "model.layers.%d.self_attn.v_proj.weight", i);
        ADD(C, C, "model.layers.%d.self_attn.o_proj.weight", i);
        ADD(C, 0, "model.layers.%d.post_attention_layernorm.weight", i);
        ADD(F, C, "model.layers.%d.mlp.gate_proj.weight", i);
        ADD(F, C, "model.layers.%d.mlp.up_proj.weight", i);
        ADD(C, F, "model.layers.%d.mlp.down_proj.weight", i);
    }
    ADD(C, 0, "model.norm.weight");
    ADD(vocab, C, "lm_head.weight");
#undef ADD
}

#define GPT2_CONFIG                                                                                                    \
    "{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":4,\"n_embd\":32,\"n_positions\":12,\"vocab_size\":%u,"          \
    "\"activation_function\":\"gelu_new\",\"layer_norm_epsilon\":1e-05,\"n_inner\":null,\"extra\":{\"a\":[1]}}"
#define LLAMA_CONFIG                                                                                                   \
    "{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":%u,"          \
    "\"hidden_size\":32,\"intermediate_size\":40,\"max_position_embeddings\":12,\"vocab_size\":%u,"                    \
    "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"rope_theta\":500000.0,\"tie_word_embeddings\":false}"

struct place {
    struct scratch scratch;
    char hf[512], out[512], again[512], config[600], model[600];
};

static void place_init(struct place *place)
{
    place->scratch = scratch_make();
    path_join(place->hf, place->scratch.path, "hf");
    path_join(place->out, place->scratch.path, "out");
    path_join(place->again, place->scratch.path, "again");
    assert_int_equal(mkdir(place->hf, 0755), 0);
    snprintf(place->config, sizeof place->config, "%s/config.json", place->hf);
    snprintf(place->model, sizeof place->model, "%s/model.safetensors", place->hf);
}

static void place_fini(struct place *place)
{
    scratch_remove(&place->scratch);
}

static void remove_tree(const char *path)
{
    nftw(path, scratch_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void write_config(const struct place *place, const char *fmt, ...) MU_PRINTF(2, 3);
static void write_config(const struct place *place, const char *fmt, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, fmt);
    int length = vsnprintf(text, sizeof text, fmt, arguments);
    va_end(arguments);
    file_write(place->config, text, (size_t)length);
}

static void write_model(const struct place *place, struct foreign *f)
{
    struct mu_error err;
    assert_ok(mu_safetensors_write(place->model, f->tensors, f->count, NULL, 0, &err), &err);
}

/* ---- what the checkpoint holds ---- */

struct held {
    struct mu_model_spec spec;
    float *parameters;
};

static struct held load(const char *dir, const struct mu_interchange_model *model)
{
    struct held held;
    struct mu_error err;
    struct mu_manifest *manifest;
    assert_ok(mu_checkpoint_verify(dir, NULL, &err), &err);
    mu_model_spec_init(&held.spec, &model->config);
    assert_int_equal(held.spec.parameter_count, model->parameter_count);
    size_t bytes = held.spec.flat_size * sizeof(float);
    float *m = malloc(bytes), *v = malloc(bytes);
    held.parameters = calloc(1, bytes);
    memset(m, 1, bytes);
    memset(v, 1, bytes);
    assert_ok(mu_manifest_read(dir, &manifest, &err), &err);
    assert_int_equal(manifest->identity.step, 0);
    assert_ok(mu_checkpoint_load(dir, manifest, &held.spec, held.parameters, m, v, NULL, &err), &err);
    for (uint32_t chunk = 0; chunk < held.spec.chunk_count; chunk++) {
        struct mu_chunk at = mu_model_chunk(&held.spec, chunk);
        for (uint64_t i = 0; i < at.size; i++)
            assert_true(m[at.offset + i] == 0 && v[at.offset + i] == 0);
    }
    mu_manifest_free(manifest);
    free(m);
    free(v);
    return held;
}

static const float *role_at(const struct held *held, uint32_t layer, uint32_t slice, enum mu_role role)
{
    return held->parameters + mu_model_role(&held->spec, layer, slice, role).offset;
}

static void expect_rows(const struct held *held, enum mu_role role, const float *whole)
{
    uint32_t slices = held->spec.config.slices, vocab = held->spec.config.vocab, per = (vocab + slices - 1) / slices;
    for (uint32_t s = 0; s < slices; s++) {
        uint32_t rows = s == slices - 1 ? vocab - per * s : per;
        assert_memory_equal(role_at(held, 0, s, role), whole + (size_t)s * per * C, rows * C * sizeof(float));
    }
}

/* The definition of a slice, spelled out: slice s has heads [s H/T, (s+1) H/T) of q, and of k and v. */
static void expect_gpt2(const struct held *held, const struct foreign *f, const char *p)
{
    uint32_t slices = held->spec.config.slices, own = C / slices, up = 4 * C / slices;
    expect_rows(held, MU_ROLE_WTE, value_of(f, "%swte.weight", p));
    assert_memory_equal(role_at(held, 0, 0, MU_ROLE_WPE), value_of(f, "%swpe.weight", p), CTX * C * 4);
    assert_memory_equal(role_at(held, 0, 0, MU_ROLE_NORMF_B), value_of(f, "%sln_f.bias", p), C * 4);
    for (uint32_t i = 0; i < L; i++) {
        const float *qkv = value_of(f, "%sh.%u.attn.c_attn.weight", p, i),
                    *b = value_of(f, "%sh.%u.attn.c_attn.bias", p, i);
        const float *proj = value_of(f, "%sh.%u.attn.c_proj.weight", p, i),
                    *fc = value_of(f, "%sh.%u.mlp.c_fc.weight", p, i);
        const float *down = value_of(f, "%sh.%u.mlp.c_proj.weight", p, i);
        assert_memory_equal(role_at(held, i, 0, MU_ROLE_NORM2_W), value_of(f, "%sh.%u.ln_2.weight", p, i), C * 4);
        assert_memory_equal(role_at(held, i, 0, MU_ROLE_DOWN_B), value_of(f, "%sh.%u.mlp.c_proj.bias", p, i), C * 4);
        for (uint32_t s = 0; s < slices; s++) {
            for (uint32_t r = 0; r < C; r++) {
                for (uint32_t part = 0; part < 3; part++)
                    assert_memory_equal(role_at(held, i, s, MU_ROLE_QKV_W) + r * 3 * own + part * own,
                                        qkv + r * 3 * C + part * C + s * own, own * 4);
                assert_memory_equal(role_at(held, i, s, MU_ROLE_UP_W) + r * up, fc + r * 4 * C + s * up, up * 4);
            }
            for (uint32_t part = 0; part < 3; part++)
                assert_memory_equal(role_at(held, i, s, MU_ROLE_QKV_B) + part * own, b + part * C + s * own, own * 4);
            assert_memory_equal(role_at(held, i, s, MU_ROLE_PROJ_W), proj + s * own * C, own * C * 4);
            assert_memory_equal(role_at(held, i, s, MU_ROLE_DOWN_W), down + s * up * C, up * C * 4);
        }
    }
}

static void expect_llama(const struct held *held, const struct foreign *f, uint32_t kv_heads)
{
    uint32_t slices = held->spec.config.slices, q = C / slices, kv = kv_heads * HD / slices, h = F / slices;
    expect_rows(held, MU_ROLE_WTE, value_of(f, "model.embed_tokens.weight"));
    expect_rows(held, MU_ROLE_HEAD_W, value_of(f, "lm_head.weight"));
    assert_memory_equal(role_at(held, 0, 0, MU_ROLE_NORMF_W), value_of(f, "model.norm.weight"), C * 4);
    for (uint32_t i = 0; i < L; i++) {
        const float *qw = value_of(f, "model.layers.%u.self_attn.q_proj.weight", i);
        const float *kw = value_of(f, "model.layers.%u.self_attn.k_proj.weight", i);
        const float *vw = value_of(f, "model.layers.%u.self_attn.v_proj.weight", i);
        const float *ow = value_of(f, "model.layers.%u.self_attn.o_proj.weight", i);
        const float *gate = value_of(f, "model.layers.%u.mlp.gate_proj.weight", i);
        const float *up = value_of(f, "model.layers.%u.mlp.up_proj.weight", i);
        const float *down = value_of(f, "model.layers.%u.mlp.down_proj.weight", i);
        for (uint32_t s = 0; s < slices; s++) {
            const float *qkv = role_at(held, i, s, MU_ROLE_QKV_W), *wide = role_at(held, i, s, MU_ROLE_UP_W);
            const float *proj = role_at(held, i, s, MU_ROLE_PROJ_W), *narrow = role_at(held, i, s, MU_ROLE_DOWN_W);
            for (uint32_t r = 0; r < C; r++) { /* inputs; theirs are output x input */
                for (uint32_t j = 0; j < q; j++)
                    assert_true(qkv[r * (q + 2 * kv) + j] == qw[(s * q + j) * C + r]);
                for (uint32_t j = 0; j < kv; j++) {
                    assert_true(qkv[r * (q + 2 * kv) + q + j] == kw[(s * kv + j) * C + r]);
                    assert_true(qkv[r * (q + 2 * kv) + q + kv + j] == vw[(s * kv + j) * C + r]);
                }
                for (uint32_t j = 0; j < h; j++) {
                    assert_true(wide[r * 2 * h + j] == gate[(s * h + j) * C + r]);
                    assert_true(wide[r * 2 * h + h + j] == up[(s * h + j) * C + r]);
                    assert_true(narrow[j * C + r] == down[r * F + s * h + j]);
                }
                for (uint32_t j = 0; j < q; j++)
                    assert_true(proj[j * C + r] == ow[r * C + s * q + j]);
            }
        }
    }
}

/* Every tensor of the file, bit for bit, and no other. */
static void expect_file(const char *dir, const struct foreign *f, const char *prefix)
{
    struct mu_error err;
    struct mu_safetensors *file;
    char path[600];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_ok(mu_safetensors_open(path, &file, &err), &err);
    assert_int_equal(mu_safetensors_count(file), f->count);
    for (size_t i = 0; i < f->count; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s%s", prefix, f->names[i]);
        const struct mu_safetensors_tensor *tensor = mu_safetensors_find(file, name);
        if (!tensor)
            fail_msg("no tensor %s", name);
        assert_int_equal(tensor->rank, f->tensors[i].rank);
        assert_int_equal(tensor->dtype, MU_ST_F32);
        assert_memory_equal(tensor->shape, f->tensors[i].shape, tensor->rank * sizeof tensor->shape[0]);
        float *data = malloc(tensor->size_bytes);
        assert_ok(mu_safetensors_read(file, tensor, data, &err), &err);
        assert_memory_equal(data, f->values[i], tensor->size_bytes);
        free(data);
    }
    mu_safetensors_close(file);
}

/* ---- round trips ---- */

static void test_gpt2_imports_and_exports_every_value_in_its_place(void **state)
{
    (void)state;
    struct mu_error err;
    for (uint32_t slices = 1; slices <= 4; slices *= 2) {
        for (enum stored stored = AS_F32; stored <= AS_F16; stored++) {
            struct place place;
            struct foreign f;
            struct mu_interchange_model model;
            const char *prefix = stored == AS_BF16 ? "" : "transformer."; /* a base model, or one with its head */
            place_init(&place);
            make_gpt2(&f, 259, stored, prefix);
            write_config(&place, GPT2_CONFIG, 259);
            write_model(&place, &f);
            assert_ok(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, slices, place.out, &model, &err), &err);
            assert_int_equal(model.config.slices, slices);
            struct held held = load(place.out, &model);
            expect_gpt2(&held, &f, prefix);
            free(held.parameters);
            assert_ok(mu_interchange_export(place.out, MU_INTERCHANGE_HF_GPT2, place.again, &err), &err);
            expect_file(place.again, &f, stored == AS_BF16 ? "transformer." : "");
            remove_tree(place.out); /* what was exported imports again */
            assert_ok(mu_interchange_import(place.again, MU_INTERCHANGE_HF_GPT2, slices, place.out, &model, &err),
                      &err);
            held = load(place.out, &model);
            expect_gpt2(&held, &f, prefix);
            free(held.parameters);
            foreign_free(&f);
            place_fini(&place);
        }
    }
}

static void test_llama_imports_and_exports_every_value_in_its_place(void **state)
{
    (void)state;
    struct mu_error err;
    for (uint32_t slices = 1; slices <= 4; slices *= 2) {
        for (uint32_t kv_heads = 2; kv_heads <= 4; kv_heads += 2) {
            if (kv_heads < slices)
                continue;
            struct place place;
            struct foreign f;
            struct mu_interchange_model model;
            place_init(&place);
            make_llama(&f, 101, kv_heads, slices == 2 ? AS_BF16 : AS_F32);
            write_config(&place, LLAMA_CONFIG, kv_heads, 101);
            write_model(&place, &f);
            assert_ok(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_LLAMA, slices, place.out, &model, &err), &err);
            assert_true(model.config.rope_base == 500000.0 && model.config.kv_heads == kv_heads);
            struct held held = load(place.out, &model);
            expect_llama(&held, &f, kv_heads);
            free(held.parameters);
            assert_ok(mu_interchange_export(place.out, MU_INTERCHANGE_HF_LLAMA, place.again, &err), &err);
            expect_file(place.again, &f, "");
            remove_tree(place.out);
            assert_ok(mu_interchange_import(place.again, MU_INTERCHANGE_HF_LLAMA, slices, place.out, &model, &err),
                      &err);
            held = load(place.out, &model);
            assert_true(model.config.rope_base == 500000.0);
            expect_llama(&held, &f, kv_heads);
            free(held.parameters);
            assert_fails(mu_interchange_export(place.out, MU_INTERCHANGE_LLMC, place.again, &err), MU_ERR_INVALID, &err,
                         "export it as hf-llama");
            foreign_free(&f);
            place_fini(&place);
        }
    }
}

static void test_llama_with_a_tied_head_gets_it_from_the_embedding(void **state)
{
    (void)state;
    struct place place;
    struct foreign f;
    struct mu_error err;
    struct mu_interchange_model model;
    place_init(&place);
    make_llama(&f, 101, 2, AS_F32);
    write_config(&place, LLAMA_CONFIG, 2, 101);
    assert_int_equal(mu_safetensors_write(place.model, f.tensors, f.count - 1, NULL, 0, &err), MU_OK);
    assert_ok(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_LLAMA, 2, place.out, &model, &err), &err);
    struct held held = load(place.out, &model);
    expect_rows(&held, MU_ROLE_HEAD_W, value_of(&f, "model.embed_tokens.weight"));
    free(held.parameters);
    foreign_free(&f);
    place_fini(&place);
}

/* The llm.c file, spelled out from its definition. */
static uint8_t *make_llmc(const struct foreign *f, uint32_t vocab, uint32_t padded, bool is_bf16, size_t *ret_size)
{
    static const struct {
        const char *name;
        uint32_t rows, columns; /* as Hugging Face stores it; columns 0: a vector */
        bool is_matrix;
    } layered[] = {{"ln_1.weight", C, 0, 0},
                   {"ln_1.bias", C, 0, 0},
                   {"attn.c_attn.weight", C, 3 * C, 1},
                   {"attn.c_attn.bias", 3 * C, 0, 0},
                   {"attn.c_proj.weight", C, C, 1},
                   {"attn.c_proj.bias", C, 0, 0},
                   {"ln_2.weight", C, 0, 0},
                   {"ln_2.bias", C, 0, 0},
                   {"mlp.c_fc.weight", C, 4 * C, 1},
                   {"mlp.c_fc.bias", 4 * C, 0, 0},
                   {"mlp.c_proj.weight", 4 * C, C, 1},
                   {"mlp.c_proj.bias", C, 0, 0}};
    size_t most = 1024 + 4 * ((size_t)padded * C + CTX * C + L * (12 * C * C + 13 * C) + 2 * C);
    uint8_t *file = calloc(1, most), *raw;
    float *to = (float *)(void *)(file + 1024), *start = to;
    const int32_t header[] = {20240326, is_bf16 ? 5 : 3, CTX, (int32_t)vocab, L, H, C, (int32_t)padded};
    memcpy(file, header, sizeof header);
    memcpy(to, value_of(f, "transformer.wte.weight"), vocab * C * 4);
    to += padded * C;
    memcpy(to, value_of(f, "transformer.wpe.weight"), CTX * C * 4);
    to += CTX * C;
    for (size_t k = 0; k < sizeof layered / sizeof layered[0]; k++) {
        for (int i = 0; i < L; i++) {
            const float *from = value_of(f, "transformer.h.%d.%s", i, layered[k].name);
            uint32_t columns = layered[k].is_matrix ? layered[k].columns : 1;
            for (uint32_t c = 0; c < columns; c++) {
                for (uint32_t r = 0; r < layered[k].rows; r++)
                    *to++ = from[r * columns + c];
            }
        }
    }
    memcpy(to, value_of(f, "transformer.ln_f.weight"), C * 4);
    memcpy(to + C, value_of(f, "transformer.ln_f.bias"), C * 4);
    to += 2 * C;
    *ret_size = 1024 + (size_t)(to - start) * 4;
    assert_true(*ret_size == most);
    if (is_bf16) { /* the upper halves, packed; every value fits */
        raw = file + 1024;
        for (size_t i = 0; i < (size_t)(to - start); i++)
            memmove(raw + 2 * i, raw + 4 * i + 2, 2);
        *ret_size = 1024 + (size_t)(to - start) * 2;
    }
    return file;
}

static void test_llmc_files_import_and_export_bit_for_bit(void **state)
{
    (void)state;
    struct mu_error err;
    for (uint32_t slices = 1; slices <= 4; slices *= 2) {
        struct place place;
        struct foreign f;
        struct mu_interchange_model model;
        char path[600];
        size_t size, again_size;
        place_init(&place);
        make_gpt2(&f, 259, AS_F32, "transformer.");
        uint8_t *file = make_llmc(&f, 259, 384, slices == 2, &size);
        snprintf(path, sizeof path, "%s/model.bin", place.hf);
        file_write(path, file, size);
        assert_ok(mu_interchange_import(path, MU_INTERCHANGE_LLMC, slices, place.out, &model, &err), &err);
        struct held held = load(place.out, &model);
        assert_true(held.spec.config.vocab == 259 && held.spec.config.context == CTX);
        expect_gpt2(&held, &f, "transformer.");
        free(held.parameters);
        free(file);
        file = make_llmc(&f, 259, 384, false, &size); /* written as fp32 in any case */
        assert_ok(mu_interchange_export(place.out, MU_INTERCHANGE_LLMC, path, &err), &err);
        uint8_t *again = file_read(path, &again_size);
        assert_int_equal(again_size, size);
        assert_memory_equal(again, file, size);
        free(again);
        free(file);
        foreign_free(&f);
        place_fini(&place);
    }
}

static void test_shards_are_found_through_their_index(void **state)
{
    (void)state;
    struct place place;
    struct foreign f;
    struct mu_error err;
    struct mu_interchange_model model;
    char path[600];
    place_init(&place);
    make_gpt2(&f, 259, AS_F32, "transformer.");
    write_config(&place, GPT2_CONFIG, 259);
    json_t *map = json_object();
    size_t cut = f.count / 3;
    for (size_t i = 0; i < f.count; i++)
        json_object_set_new(
            map, f.names[i],
            json_string(i < cut ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors"));
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/model-0000%d-of-00002.safetensors", place.hf, i + 1);
        assert_ok(mu_safetensors_write(path, f.tensors + (i ? cut : 0), i ? f.count - cut : cut, NULL, 0, &err), &err);
    }
    json_t *index = json_pack("{s:{s:i}, s:O}", "metadata", "total_size", 1, "weight_map", map);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", place.hf);
    assert_int_equal(json_dump_file(index, path, 0), 0);
    assert_ok(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 2, place.out, &model, &err), &err);
    struct held held = load(place.out, &model);
    expect_gpt2(&held, &f, "transformer.");
    free(held.parameters);
    remove_tree(place.out);

    static const struct {
        const char *file, *needle;
        enum mu_status status;
    } cases[] = {
        {"../secret", "file name is not allowed", MU_ERR_CORRUPT},
        {"/etc/passwd", "file name is not allowed", MU_ERR_CORRUPT},
        {"model-00001-of-00002.safetensors", "although", MU_ERR_CORRUPT},
        {"missing.safetensors", "missing.safetensors", MU_ERR_NOT_FOUND},
        {"config.json", "config.json", MU_ERR_CORRUPT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_object_set_new(map, "transformer.ln_f.bias", json_string(cases[i].file));
        assert_int_equal(json_dump_file(index, path, 0), 0);
        assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), cases[i].status,
                     &err, cases[i].needle);
        assert_int_equal(access(place.out, F_OK), -1);
    }
    json_object_del(map, "transformer.ln_f.bias");
    assert_int_equal(json_dump_file(index, path, 0), 0);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_NOT_FOUND,
                 &err, "has no tensor transformer.ln_f.bias");
    file_write(path, "{\"weight_map\":[]}", 17);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_CORRUPT,
                 &err, "weight_map");
    json_decref(map);
    json_decref(index);
    foreign_free(&f);
    place_fini(&place);
}

/* ---- what is refused ---- */

static void refuse_config(const struct place *place, enum mu_interchange_format format, const char *config,
                          const char *from, const char *to, const char *needle)
{
    char text[1024];
    struct mu_error err;
    const char *at = strstr(config, from);
    assert_non_null(at);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - config), config, to, at + strlen(from));
    file_write(place->config, text, strlen(text));
    enum mu_status status = mu_interchange_import(place->hf, format, 4, place->out, NULL, &err);
    if (status == MU_OK || !strstr(err.text, needle) || !strstr(err.text, "config.json") || strchr(err.text, '\n'))
        fail_msg("'%s' for '%s': got %s '%s', wanted '%s'", to, from, mu_status_name(status), err.text, needle);
    assert_int_equal(access(place->out, F_OK), -1);
}

static void test_configs_that_mean_another_model_are_refused(void **state)
{
    (void)state;
    struct place place;
    struct foreign f;
    char config[1024];
    place_init(&place);
    make_gpt2(&f, 259, AS_F32, "transformer.");
    write_model(&place, &f);
    foreign_free(&f);
    snprintf(config, sizeof config, GPT2_CONFIG, 259);
    enum mu_interchange_format gpt2 = MU_INTERCHANGE_HF_GPT2, llama = MU_INTERCHANGE_HF_LLAMA;
    refuse_config(&place, gpt2, config, "\"gpt2\"", "\"opt\"", "model_type");
    refuse_config(&place, gpt2, config, "\"gpt2\"", "7", "model_type");
    refuse_config(&place, gpt2, config, "\"n_layer\":2", "\"n_layer\":\"2\"", "n_layer");
    refuse_config(&place, gpt2, config, "\"n_layer\":2", "\"n_layer\":0", "n_layer");
    refuse_config(&place, gpt2, config, "\"n_layer\":2", "\"n_layer\":-3", "n_layer");
    refuse_config(&place, gpt2, config, "\"n_layer\":2", "\"n_layer\":100000", "model.layers");
    refuse_config(&place, gpt2, config, "\"n_head\":4", "\"n_head\":3", "model.channels");
    refuse_config(&place, gpt2, config, "\"n_head\":4", "\"n_head\":2", "parallel.slices");
    refuse_config(&place, gpt2, config, "\"n_embd\":32", "\"n_embd\":2000000000", "model.channels");
    refuse_config(&place, gpt2, config, "\"vocab_size\":259,", "", "vocab_size");
    refuse_config(&place, gpt2, config, "gelu_new", "relu", "activation_function");
    refuse_config(&place, gpt2, config, "1e-05", "1e-06", "layer_norm_epsilon is 1e-06");
    refuse_config(&place, gpt2, config, "null", "100", "n_inner is 100");
    refuse_config(&place, gpt2, config, "\"extra\"", "\"tie_word_embeddings\":false,\"extra\"", "tie_word_embeddings");
    refuse_config(&place, gpt2, config, "\"extra\"", "\"scale_attn_weights\":0,\"extra\"", "scale_attn_weights");
    refuse_config(&place, gpt2, config, "{\"model", "{\"n_layer\":3,\"model", "JSON"); /* a key twice */
    refuse_config(&place, gpt2, config, "}}", "}", "JSON");
    snprintf(config, sizeof config, LLAMA_CONFIG, 2, 101);
    refuse_config(&place, llama, config, "\"num_key_value_heads\":2", "\"num_key_value_heads\":3", "model.kv_heads");
    refuse_config(&place, llama, config, "\"rms_norm_eps\":1e-05,", "", "rms_norm_eps is 1e-06");
    refuse_config(&place, llama, config, "silu", "gelu", "hidden_act");
    refuse_config(&place, llama, config, "500000.0", "\"x\"", "rope_theta");
    refuse_config(&place, llama, config, "\"hidden_act\"", "\"rope_scaling\":{\"type\":\"linear\"},\"hidden_act\"",
                  "rope_scaling");
    refuse_config(&place, llama, config, "\"hidden_act\"",
                  "\"rope_parameters\":{\"rope_type\":\"yarn\"},\"hidden_act\"", "rope_type");
    refuse_config(&place, llama, config, "\"hidden_act\"", "\"attention_bias\":true,\"hidden_act\"", "attention_bias");
    refuse_config(&place, llama, config, "\"hidden_act\"", "\"head_dim\":16,\"hidden_act\"", "head_dim is 16");
    place_fini(&place);
}

static void test_tensors_that_do_not_fit_are_refused_by_name(void **state)
{
    (void)state;
    struct place place;
    struct foreign f;
    struct mu_error err;
    place_init(&place);
    write_config(&place, GPT2_CONFIG, 259);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_NOT_FOUND,
                 &err, "neither");
    make_gpt2(&f, 259, AS_F32, "transformer.");
    struct mu_safetensors_tensor whole = f.tensors[4];
    f.tensors[4].shape[0] = 3 * C; /* transposed */
    f.tensors[4].shape[1] = C;
    write_model(&place, &f);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_INVALID,
                 &err, "tensor transformer.h.0.attn.c_attn.weight has not the shape");
    f.tensors[4] = whole;
    f.tensors[4].dtype = MU_ST_I32;
    write_model(&place, &f);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_INVALID,
                 &err, "is of type I32");
    f.tensors[4] = whole;
    strcpy(f.names[4], "transformer.h.0.attn.c_attn.weights");
    write_model(&place, &f);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_NOT_FOUND,
                 &err, "has no tensor transformer.h.0.attn.c_attn.weight");
    strcpy(f.names[4], "transformer.h.0.attn.c_attn.weight");
    write_model(&place, &f);
    size_t size;
    uint8_t *bytes = file_read(place.model, &size);
    file_write(place.model, bytes, size - 1);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_CORRUPT,
                 &err, place.model);
    free(bytes);
    /* A head of its own: the embedding's bits are fine, others are not. */
    uint64_t random = 77;
    f.tensors[f.count] = f.tensors[0];
    strcpy(f.names[f.count], "lm_head.weight");
    f.tensors[f.count].name = f.names[f.count];
    f.count++;
    write_model(&place, &f);
    assert_ok(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), &err);
    remove_tree(place.out);
    f.count--;
    add_tensor(&f, "lm_head.weight", 259, C, AS_F32, &random);
    write_model(&place, &f);
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.out, NULL, &err), MU_ERR_INVALID,
                 &err, "lm_head.weight differs");
    /* The place of the result must be free. */
    assert_fails(mu_interchange_import(place.hf, MU_INTERCHANGE_HF_GPT2, 1, place.hf, NULL, &err), MU_ERR_EXISTS, &err,
                 "not empty");
    foreign_free(&f);
    place_fini(&place);
}

static void test_malformed_llmc_files_are_refused(void **state)
{
    (void)state;
    struct place place;
    struct foreign f;
    struct mu_error err;
    size_t size;
    place_init(&place);
    make_gpt2(&f, 259, AS_F32, "transformer.");
    uint8_t *file = make_llmc(&f, 259, 384, false, &size);
    char path[600];
    snprintf(path, sizeof path, "%s/model.bin", place.hf);
    static const struct {
        int word;
        int32_t value;
        const char *needle;
    } cases[] = {{0, 20240520, "magic number 20240520"},
                 {1, 4, "version 4"},
                 {1, 5, "bytes, but its header's model needs"},
                 {2, 0, "byte 8 holds 0"},
                 {3, -1, "byte 12 holds -1"},
                 {3, 385, "less than the vocabulary"},
                 {4, INT32_MAX, "model.layers"},
                 {4, 3, "bytes, but its header's model needs"},
                 {5, 5, "model.channels"},
                 {6, INT32_MAX, "model.channels"},
                 {7, INT32_MAX, "bytes, but its header's model needs"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t before;
        memcpy(&before, file + 4 * cases[i].word, 4);
        memcpy(file + 4 * cases[i].word, &cases[i].value, 4);
        file_write(path, file, size);
        memcpy(file + 4 * cases[i].word, &before, 4);
        enum mu_status status = mu_interchange_import(path, MU_INTERCHANGE_LLMC, 1, place.out, NULL, &err);
        if (status == MU_OK || !strstr(err.text, cases[i].needle) || !strstr(err.text, path))
            fail_msg("word %d: got %s '%s', wanted '%s'", cases[i].word, mu_status_name(status), err.text,
                     cases[i].needle);
    }
    for (size_t cut = 0; cut <= 1028; cut += 257) {
        file_write(path, file, cut);
        assert_fails(mu_interchange_import(path, MU_INTERCHANGE_LLMC, 1, place.out, NULL, &err), MU_ERR_CORRUPT, &err,
                     path);
    }
    assert_int_equal(access(place.out, F_OK), -1);
    free(file);
    foreign_free(&f);
    place_fini(&place);
}

/* Against the compiler's own conversion, all patterns. */
static void test_sixteen_bit_values_are_widened_exactly(void **state)
{
    (void)state;
    for (uint32_t pattern = 0; pattern < 65536; pattern++) {
        uint16_t raw = (uint16_t)pattern;
        float got, expected;
        _Float16 half;
        uint32_t bits = pattern << 16, got_bits, expected_bits;
        memcpy(&half, &raw, 2);
        expected = (float)half;
        interchange_widen_f16(&raw, 1, &got);
        memcpy(&got_bits, &got, 4);
        memcpy(&expected_bits, &expected, 4);
        if (expected != expected)
            assert_true(got != got && (got_bits ^ expected_bits) >> 31 == 0);
        else
            assert_int_equal(got_bits, expected_bits);
        interchange_widen_bf16(&raw, 1, &got);
        memcpy(&got_bits, &got, 4);
        assert_int_equal(got_bits, bits);
    }
}

static void test_formats_have_names(void **state)
{
    (void)state;
    assert_int_equal(mu_interchange_format_named("hf-gpt2"), MU_INTERCHANGE_HF_GPT2);
    assert_int_equal(mu_interchange_format_named("hf-llama"), MU_INTERCHANGE_HF_LLAMA);
    assert_int_equal(mu_interchange_format_named("llm.c"), MU_INTERCHANGE_LLMC);
    assert_int_equal(mu_interchange_format_named("llmc"), MU_INTERCHANGE_COUNT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_imports_and_exports_every_value_in_its_place),
        cmocka_unit_test(test_llama_imports_and_exports_every_value_in_its_place),
        cmocka_unit_test(test_llama_with_a_tied_head_gets_it_from_the_embedding),
        cmocka_unit_test(test_llmc_files_import_and_export_bit_for_bit),
        cmocka_unit_test(test_shards_are_found_through_their_index),
        cmocka_unit_test(test_configs_that_mean_another_model_are_refused),
        cmocka_unit_test(test_tensors_that_do_not_fit_are_refused_by_name),
        cmocka_unit_test(test_malformed_llmc_files_are_refused),
        cmocka_unit_test(test_sixteen_bit_values_are_widened_exactly),
        cmocka_unit_test(test_formats_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
