/* Text from a checkpoint's files: no coordinator is needed. */
#include "cli/cli.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "kernels/pool.h"
#include "plan/model_spec.h"
#include "storage/job_json.h"
#include "storage/manifest.h"
#include "worker/model.h"

struct generator {
    struct mu_job_spec job;
    struct mu_model_spec spec;
    struct mu_manifest *manifest;
    struct mu_pool *pool;
    struct mu_model *model;
    float *parameters, *logits;
    int32_t *tokens; /* [context], the window the model sees */
    uint32_t token_count;
    double temperature;
    uint64_t top, seed;
};

static enum mu_status load(struct generator *g, const char *dir, struct mu_error *err)
{
    enum mu_status status = mu_manifest_read(dir, &g->manifest, err);
    if (status == MU_OK)
        status = mu_job_spec_from_text(g->manifest->job_record, strlen(g->manifest->job_record), dir, &g->job, err);
    if (status != MU_OK)
        return status;
    mu_model_spec_init(&g->spec, &g->job.model);
    g->parameters = calloc(g->spec.flat_size, sizeof(float));
    g->logits = calloc(g->spec.config.vocab, sizeof(float));
    g->tokens = calloc(g->spec.config.context, sizeof(int32_t));
    if (!g->parameters || !g->logits || !g->tokens)
        return mu_fail(err, MU_ERR_NO_MEMORY, "%s: its model needs %.1f GB of memory", dir,
                       (double)g->spec.flat_size * 4e-9);
    status = mu_checkpoint_load(dir, g->manifest, &g->spec, g->parameters, NULL, NULL, NULL, err);
    if (status != MU_OK)
        return status;
    status = mu_pool_new(0, err, &g->pool);
    if (status != MU_OK)
        return status;
    const struct mu_model_options options = {
        .micro = 1, .length = g->spec.config.context, .accumulate = 1, .forward_only = true};
    return mu_model_new(&g->spec, &options, g->pool, err, &g->model);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Samples from softmax(logits / temperature) over the `top` likeliest tokens; number `index` of the sequence fixes the
 * random draw. */
static int32_t sample(struct generator *g, uint64_t index)
{
    uint32_t vocab = g->spec.config.vocab;
    int32_t best = 0;
    for (uint32_t v = 1; v < vocab; v++) {
        if (g->logits[v] > g->logits[best])
            best = (int32_t)v;
    }
    if (g->temperature <= 0)
        return best;
    float floor_logit = -INFINITY;
    if (g->top < vocab) {
        float *sorted = malloc(vocab * sizeof sorted[0]);
        MU_ASSERT(sorted);
        memcpy(sorted, g->logits, vocab * sizeof sorted[0]);
        qsort(sorted, vocab, sizeof sorted[0], by_value);
        floor_logit = sorted[g->top - 1];
        free(sorted);
    }
    double sum = 0, draw;
    for (uint32_t v = 0; v < vocab; v++) {
        if (g->logits[v] >= floor_logit)
            sum += exp((double)(g->logits[v] - g->logits[best]) / g->temperature);
    }
    uint32_t key[2] = {(uint32_t)g->seed, (uint32_t)(g->seed >> 32)},
             counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), 0x67656eu, 0}, random[4];
    mu_philox4x32(key, counter, random);
    draw = ((double)random[0] + 0.5) / 4294967296.0 * sum;
    for (uint32_t v = 0; v < vocab; v++) {
        if (g->logits[v] < floor_logit)
            continue;
        draw -= exp((double)(g->logits[v] - g->logits[best]) / g->temperature);
        if (draw <= 0)
            return (int32_t)v;
    }
    return best;
}

static void append(struct generator *g, int32_t token)
{
    if (g->token_count == g->spec.config.context) { /* the window slides */
        memmove(g->tokens, g->tokens + 1, (g->token_count - 1) * sizeof g->tokens[0]);
        g->token_count--;
    }
    g->tokens[g->token_count++] = token;
}

static void show(const struct generator *g, int32_t token)
{
    if (g->job.data.tokens == MU_TOKENS_BYTES)
        putchar(token < 256 ? token : '?');
    else
        printf("%d ", token);
}

static enum mu_status generate(struct generator *g, const char *prompt, uint64_t count, struct mu_error *err)
{
    if (g->job.data.tokens == MU_TOKENS_BYTES) {
        for (const char *c = prompt[0] ? prompt : "\n"; *c; c++)
            append(g, (unsigned char)*c);
        printf("%s", prompt);
    } else { /* token numbers */
        char *end = (char *)(uintptr_t)prompt;
        for (const char *at = prompt; *at; at = end) {
            unsigned long token = strtoul(at, &end, 10);
            if (end == at || token >= g->spec.config.vocab)
                return mu_fail(err, MU_ERR_INVALID,
                               "--prompt '%s' is not allowed: this model's tokens are numbers from 0 to %u", prompt,
                               g->spec.config.vocab - 1);
            append(g, (int32_t)token);
            show(g, (int32_t)token);
            end += strspn(end, " ,");
        }
        if (g->token_count == 0)
            append(g, 0);
    }
    for (uint64_t i = 0; i < count; i++) {
        enum mu_status status =
            mu_model_logits_last(g->model, g->tokens, g->token_count, g->parameters, g->logits, err);
        if (status != MU_OK)
            return status;
        int32_t token = sample(g, i);
        append(g, token);
        show(g, token);
        fflush(stdout);
    }
    putchar('\n');
    return MU_OK;
}

int mu_cmd_generate(struct mu_cli *cli, int argc, char **argv)
{
    (void)cli;
    const char *dir = NULL, *prompt = "", *tokens = "256", *temperature = "0.8", *top = "40", *seed = "1";
    const struct mu_cli_option options[] = {{"--checkpoint", &dir, NULL}, {"--prompt", &prompt, NULL},
                                            {"--tokens", &tokens, NULL},  {"--temperature", &temperature, NULL},
                                            {"--top-k", &top, NULL},      {"--seed", &seed, NULL}};
    struct generator g = {0};
    struct mu_error err;
    uint64_t count;
    char *end;
    if (mu_cli_parse("generate", argc, argv, options, (int)(sizeof options / sizeof options[0]), 0, 0) < 0)
        return MU_EXIT_USAGE;
    if (!dir)
        return mu_cli_usage("generate", "--checkpoint DIR is required (see: muster checkpoints JOB)");
    if (!mu_cli_number("generate", "--tokens", tokens, 1, 1000000, &count) ||
        !mu_cli_number("generate", "--top-k", top, 1, UINT32_MAX, &g.top) ||
        !mu_cli_number("generate", "--seed", seed, 0, UINT64_MAX, &g.seed))
        return MU_EXIT_USAGE;
    g.temperature = strtod(temperature, &end);
    if (end == temperature || *end || !(g.temperature >= 0 && g.temperature <= 100))
        return mu_cli_usage("generate", "--temperature '%s' is not allowed: 0 (always the likeliest token) to 100",
                            temperature);
    enum mu_status status = load(&g, dir, &err);
    if (status == MU_OK)
        status = generate(&g, prompt, count, &err);
    mu_model_free(g.model);
    mu_pool_free(g.pool);
    mu_manifest_free(g.manifest);
    free(g.parameters);
    free(g.logits);
    free(g.tokens);
    return status == MU_OK ? MU_EXIT_OK : mu_cli_fail(&err);
}
