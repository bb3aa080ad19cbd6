/* links: mu_model mu_storage mu_plan */
#include "storage_testing.h"

#include "common/rng.h"
#include "kernels/pool.h"
#include "plan/model_spec.h"
#include "storage/interchange.h"
#include "storage/manifest.h"
#include "storage/safetensors.h"
#include "worker/model.h"

/* Two small models in Hugging Face's files, imported, against the logits that Hugging Face's own implementation
 * computes from the same files (transformers 4.46.3, FlaxGPT2LMHeadModel and FlaxLlamaForCausalLM, fp32). */

enum { L = 2, H = 4, KV = 2, C = 64, HD = C / H, F = 88, V = 70, CTX = 32, TOKENS = 9, TENSORS_MAX = 64 };

static const int32_t tokens[TOKENS] = {5, 17, 69, 3, 42, 42, 0, 7, 61};

struct files {
    struct mu_safetensors_tensor tensors[TENSORS_MAX];
    char names[TENSORS_MAX][128];
    size_t count;
    uint64_t random;
};

/* Uniform in [-0.3, 0.3) around `centre`, exact in fp32. */
static void add(struct files *files, uint64_t rows, uint64_t columns, float centre, const char *fmt, ...)
    MU_PRINTF(5, 6);
static void add(struct files *files, uint64_t rows, uint64_t columns, float centre, const char *fmt, ...)
{
    struct mu_safetensors_tensor *tensor = &files->tensors[files->count];
    va_list arguments;
    va_start(arguments, fmt);
    vsnprintf(files->names[files->count], sizeof files->names[0], fmt, arguments);
    va_end(arguments);
    uint64_t size = rows * (columns ? columns : 1);
    float *data = malloc(size * sizeof *data);
    for (uint64_t i = 0; i < size; i++)
        data[i] = centre + ((float)(mu_splitmix64(&files->random) >> 44) / 1048576.0f - 0.5f) * 0.6f;
    *tensor = (struct mu_safetensors_tensor){.name = files->names[files->count++],
                                             .dtype = MU_ST_F32,
                                             .rank = columns ? 2 : 1,
                                             .shape = {rows, columns},
                                             .data = data};
}

static void make_gpt2(struct files *files)
{
    add(files, V, C, 0, "transformer.wte.weight");
    add(files, CTX, C, 0, "transformer.wpe.weight");
    for (int i = 0; i < L; i++) {
        add(files, C, 0, 1, "transformer.h.%d.ln_1.weight", i);
        add(files, C, 0, 0, "transformer.h.%d.ln_1.bias", i);
        add(files, C, 3 * C, 0, "transformer.h.%d.attn.c_attn.weight", i);
        add(files, 3 * C, 0, 0, "transformer.h.%d.attn.c_attn.bias", i);
        add(files, C, C, 0, "transformer.h.%d.attn.c_proj.weight", i);
        add(files, C, 0, 0, "transformer.h.%d.attn.c_proj.bias", i);
        add(files, C, 0, 1, "transformer.h.%d.ln_2.weight", i);
        add(files, C, 0, 0, "transformer.h.%d.ln_2.bias", i);
        add(files, C, 4 * C, 0, "transformer.h.%d.mlp.c_fc.weight", i);
        add(files, 4 * C, 0, 0, "transformer.h.%d.mlp.c_fc.bias", i);
        add(files, 4 * C, C, 0, "transformer.h.%d.mlp.c_proj.weight", i);
        add(files, C, 0, 0, "transformer.h.%d.mlp.c_proj.bias", i);
    }
    add(files, C, 0, 1, "transformer.ln_f.weight");
    add(files, C, 0, 0, "transformer.ln_f.bias");
}

static void make_llama(struct files *files)
{
    add(files, V, C, 0, "model.embed_tokens.weight");
    for (int i = 0; i < L; i++) {
        add(files, C, 0, 1, "model.layers.%d.input_layernorm.weight", i);
        add(files, C, C, 0, "model.layers.%d.self_attn.q_proj.weight", i);
        add(files, KV * HD, C, 0, "model.layers.%d.self_attn.k_proj.weight", i);
        add(files, KV * HD, C, 0, "model.layers.%d.self_attn.v_proj.weight", i);
        add(files, C, C, 0, "model.layers.%d.self_attn.o_proj.weight", i);
        add(files, C, 0, 1, "model.layers.%d.post_attention_layernorm.weight", i);
        add(files, F, C, 0, "model.layers.%d.mlp.gate_proj.weight", i);
        add(files, F, C, 0, "model.layers.%d.mlp.up_proj.weight", i);
        add(files, C, F, 0, "model.layers.%d.mlp.down_proj.weight", i);
    }
    add(files, C, 0, 1, "model.norm.weight");
    add(files, V, C, 0, "lm_head.weight");
}

static const char gpt2_config[] =
    "{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":4,\"n_embd\":64,\"n_positions\":32,\"vocab_size\":70}";
static const char llama_config[] =
    "{\"model_type\":\"llama\",\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"hidden_size\":64,\"intermediate_size\":88,\"max_position_embeddings\":32,\"vocab_size\":70,"
    "\"rms_norm_eps\":1e-05,\"rope_theta\":10000.0,\"tie_word_embeddings\":false}";

static void write_files(const char *dir, bool is_llama)
{
    struct files *files = calloc(1, sizeof *files);
    struct mu_error err;
    char path[600];
    files->random = is_llama ? 11 : 10;
    if (is_llama)
        make_llama(files);
    else
        make_gpt2(files);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_ok(mu_safetensors_write(path, files->tensors, files->count, NULL, 0, &err), &err);
    snprintf(path, sizeof path, "%s/config.json", dir);
    file_write(path, is_llama ? llama_config : gpt2_config, strlen(is_llama ? llama_config : gpt2_config));
    for (size_t i = 0; i < files->count; i++)
        free((void *)(uintptr_t)files->tensors[i].data);
    free(files);
}

/* Of the token after the last one. */
static const float gpt2_logits[V] = {
    -0.305350f, -0.101169f, -1.294330f, -2.540450f, 0.912951f,  0.797771f,  0.084517f,  2.583869f, -0.742342f,
    1.641320f,  -0.001597f, 1.180975f,  0.287564f,  -1.273505f, 0.197698f,  1.003400f,  1.325521f, 0.809937f,
    0.259306f,  -0.535934f, -0.590711f, -0.197407f, 1.958322f,  -0.462409f, 0.658447f,  0.407871f, -0.520556f,
    -1.664485f, -0.450394f, 0.756483f,  0.473997f,  1.207319f,  -2.223043f, 2.611464f,  3.167726f, -1.697647f,
    2.110145f,  1.951223f,  3.961944f,  0.904533f,  0.609212f,  2.276710f,  -1.490483f, 1.200361f, -0.597233f,
    -1.037733f, -1.681993f, 0.167078f,  2.929866f,  2.509597f,  0.676689f,  1.104149f,  1.727810f, -1.057472f,
    0.248369f,  -0.871862f, 0.920213f,  0.586942f,  1.411668f,  1.009100f,  0.277742f,  1.502422f, -1.757163f,
    0.739961f,  -1.580373f, 0.113973f,  -0.256819f, -0.791049f, -1.116514f, -2.425359f};
static const float llama_logits[V] = {
    -1.569785f, 0.327660f,  -0.492604f, 0.488390f,  -1.046235f, -0.469417f, 0.480236f,  -0.801416f, -0.837639f,
    -1.368440f, 0.704885f,  -0.615574f, 0.487906f,  0.417057f,  1.702958f,  0.803427f,  -0.096038f, -0.503675f,
    2.799660f,  1.013007f,  1.861465f,  -0.138954f, 0.209538f,  -1.193412f, -0.216587f, -1.623715f, -1.828041f,
    0.043930f,  -1.041607f, 0.420968f,  -0.942950f, 1.706893f,  0.708327f,  -0.523157f, -0.895049f, 2.114627f,
    0.924595f,  0.464000f,  -0.443885f, -0.311166f, 2.617661f,  -0.370344f, 1.137904f,  0.592493f,  -0.513551f,
    2.223367f,  0.456282f,  -2.197970f, -0.498139f, -0.273729f, -1.416742f, 2.011746f,  0.732499f,  2.763170f,
    -1.014426f, -2.160274f, 0.165231f,  1.726709f,  -0.495050f, -0.129916f, -0.392408f, -1.751841f, 0.028982f,
    0.218390f,  1.373060f,  -0.431059f, 1.190708f,  -0.704585f, -2.080672f, 3.131093f};

static void compare(const struct mu_interchange_model *imported, const char *dir, const float *expected)
{
    struct mu_model_spec spec;
    struct mu_manifest *manifest;
    struct mu_error err;
    struct mu_pool *pool;
    struct mu_model *model;
    float logits[V];
    mu_model_spec_init(&spec, &imported->config);
    float *parameters = calloc(spec.flat_size, sizeof *parameters);
    assert_ok(mu_manifest_read(dir, &manifest, &err), &err);
    assert_ok(mu_checkpoint_load(dir, manifest, &spec, parameters, NULL, NULL, NULL, &err), &err);
    assert_ok(mu_pool_new(1, &err, &pool), &err);
    const struct mu_model_options options = {.micro = 1, .length = CTX, .forward_only = true};
    assert_ok(mu_model_new(&spec, &options, pool, &err, &model), &err);
    assert_ok(mu_model_logits_last(model, tokens, TOKENS, parameters, logits, &err), &err);
    for (int v = 0; v < V; v++) {
        if (!(logits[v] - expected[v] < 2e-5f && expected[v] - logits[v] < 2e-5f))
            fail_msg("slices %u, token %d: logit %.7f, expected %.7f", imported->config.slices, v, (double)logits[v],
                     (double)expected[v]);
    }
    mu_model_free(model);
    mu_pool_free(pool);
    mu_manifest_free(manifest);
    free(parameters);
}

static void check_family(bool is_llama, uint32_t most_slices)
{
    enum mu_interchange_format format = is_llama ? MU_INTERCHANGE_HF_LLAMA : MU_INTERCHANGE_HF_GPT2;
    struct scratch scratch = scratch_make();
    struct mu_interchange_model imported;
    struct mu_error err;
    write_files(scratch.path, is_llama);
    for (uint32_t slices = 1; slices <= most_slices; slices *= 2) {
        char name[16], out[512], again[512];
        snprintf(name, sizeof name, "out%u", slices);
        path_join(out, scratch.path, name);
        assert_ok(mu_interchange_import(scratch.path, format, slices, out, &imported, &err), &err);
        compare(&imported, out, is_llama ? llama_logits : gpt2_logits);
        /* Out to the other program and back, cut otherwise. */
        snprintf(name, sizeof name, "hf%u", slices);
        path_join(again, scratch.path, name);
        assert_ok(mu_interchange_export(out, format, again, &err), &err);
        snprintf(name, sizeof name, "back%u", slices);
        path_join(out, scratch.path, name);
        assert_ok(mu_interchange_import(again, format, most_slices / slices, out, &imported, &err), &err);
        compare(&imported, out, is_llama ? llama_logits : gpt2_logits);
    }
    scratch_remove(&scratch);
}

static void test_imported_gpt2_has_the_logits_of_transformers(void **state)
{
    (void)state;
    check_family(false, 4);
}

static void test_imported_llama_has_the_logits_of_transformers(void **state)
{
    (void)state;
    check_family(true, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_imported_gpt2_has_the_logits_of_transformers),
        cmocka_unit_test(test_imported_llama_has_the_logits_of_transformers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
