/* Computes one training step of a small model and writes its inputs and results for tests/e2e/check_step.py; then
 * trains a few steps from the same parameters, on the same batch, for its curve of losses.
 *
 * usage: dump_step FILE FAMILY LAYERS HEADS KV_HEADS CHANNELS HIDDEN CONTEXT VOCAB SLICES MICRO LENGTH ACCUMULATE
 *                  THREADS RECOMPUTE
 * FAMILY is 1 (GPT-2) or 2 (Llama), RECOMPUTE 1 to 3. The file: a text header of lines "key value ..." up to "data",
 * then tokens and targets (int32), and flat fp32 arrays: parameters, gradients, both moments before the update,
 * parameters after it; little-endian. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fmath.h"
#include "common/rng.h"
#include "worker/model.h"

enum { ARGUMENTS = 16, SEED = 1337, UPDATE = 3, CURVE_STEPS = 20 };

struct step {
    struct mu_model_spec spec;
    uint32_t micro, length, accumulate;
    struct mu_pool *pool;
    struct mu_model *model;
    int32_t *tokens, *targets;
    float *params, *grads, *m, *v, *updated;
    double loss_sum, norm;
    double curve[CURVE_STEPS]; /* mean loss before each update */
};

static void stop_if(bool failed, const char *what)
{
    if (!failed)
        return;
    fprintf(stderr, "dump_step: %s\n", what);
    exit(1);
}

static double uniform(uint64_t *state)
{
    return (double)(mu_splitmix64(state) >> 11) * 0x1p-52 - 1.0;
}

static void make_inputs(struct step *s)
{
    size_t flat = (size_t)s->spec.flat_size, tokens = (size_t)s->accumulate * s->micro * s->length;
    uint64_t state = SEED;
    s->tokens = calloc(tokens, sizeof *s->tokens);
    s->targets = calloc(tokens, sizeof *s->targets);
    float **buffers[] = {&s->params, &s->grads, &s->m, &s->v, &s->updated};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        stop_if(!(*buffers[i] = calloc(flat, sizeof(float))), "out of memory");
    stop_if(!s->tokens || !s->targets, "out of memory");
    stop_if(mu_model_init_parameters(&s->spec, s->pool, SEED, NULL, 0, s->params) != MU_OK,
            "initial parameters failed");
    for (uint32_t t = 0; t < s->spec.tensor_count; t++) {
        struct mu_tensor tensor = mu_model_tensor(&s->spec, t);
        for (uint64_t i = tensor.offset; i < tensor.offset + tensor.size; i++) {
            s->params[i] += (float)(0.1 * uniform(&state)); /* no zeros, no ones, larger gradients than at the start */
            s->m[i] = (float)(1e-3 * uniform(&state));
            double root =
                1e-3 * (1.0 + 0.5 * uniform(&state)); /* near 0 an update is as wrong as its gradient is small */
            s->v[i] = (float)(root * root);
        }
    }
    for (size_t i = 0; i < tokens; i++) {
        s->tokens[i] = (int32_t)(mu_splitmix64(&state) % s->spec.config.vocab);
        s->targets[i] = i % 7 == 3 ? -1 : (int32_t)(mu_splitmix64(&state) % s->spec.config.vocab);
    }
}

/* Gradients and gradient norm at s->updated; returns the sum of losses. */
static double compute(struct step *s)
{
    size_t flat = (size_t)s->spec.flat_size, tokens = (size_t)s->micro * s->length;
    double sum = 0;
    for (uint32_t i = 0; i < s->accumulate; i++) {
        struct mu_micro_batch batch = {.tokens = s->tokens + i * tokens, .targets = s->targets + i * tokens};
        batch.loss_divisor = s->accumulate * tokens;
        batch.index = i;
        batch.count = s->accumulate;
        double loss = 0;
        stop_if(mu_model_forward_backward(s->model, &batch, s->updated, s->grads, &loss) != MU_OK,
                "forward and backward failed");
        sum += loss;
    }
    struct mu_exact_sum squares;
    mu_exact_sum_init(&squares);
    stop_if(mu_kernel_square_sum(s->pool, flat, s->grads, &squares) != MU_OK, "norm failed");
    s->norm = mu_fmath_sqrt(mu_exact_sum_round(&squares));
    return sum;
}

static void update(struct step *s, float *m, float *v, double clip, uint64_t number)
{
    struct mu_adamw adamw = mu_adamw_at(1e-3, 0.9, 0.95, 1e-8, 0.1, clip, s->norm, number);
    stop_if(mu_model_update(&s->spec, s->pool, &adamw, 0, s->spec.flat_size, s->updated, m, v, s->grads) != MU_OK,
            "update failed");
}

/* The gradients are those of the last step afterwards, so this comes before the step that is written. */
static void train(struct step *s)
{
    size_t flat = (size_t)s->spec.flat_size;
    float *m = calloc(flat, sizeof *m), *v = calloc(flat, sizeof *v);
    stop_if(!m || !v, "out of memory");
    for (uint32_t i = 0; i < CURVE_STEPS; i++) {
        s->curve[i] = compute(s) / ((double)s->accumulate * s->micro * s->length);
        update(s, m, v, 1.0, i + 1);
    }
    free(m);
    free(v);
}

static void write_array(FILE *file, const void *data, size_t size, size_t count)
{
    stop_if(fwrite(data, size, count, file) != count, "cannot write");
}

static void write_header(FILE *file, const struct step *s)
{
    const struct mu_model_config *c = &s->spec.config;
    fprintf(file, "config %d %u %u %u %u %u %u %u %u\n", (int)c->family, c->layers, c->heads, c->kv_heads, c->channels,
            c->hidden, c->context, c->vocab, c->slices);
    fprintf(file, "rope_base %.17g\ncurve", c->rope_base);
    for (uint32_t i = 0; i < CURVE_STEPS; i++)
        fprintf(file, " %.17g", s->curve[i]);
    fprintf(file, "\n");
    fprintf(file, "batch %u %u %u\n", s->accumulate, s->micro, s->length);
    fprintf(file, "flat %llu\n", (unsigned long long)s->spec.flat_size);
    fprintf(file, "adamw 1e-3 0.9 0.95 1e-8 0.1 %.17g %d\n", s->norm / 2, UPDATE);
    for (uint32_t i = 0; i < s->spec.tensor_count; i++) {
        struct mu_tensor t = mu_model_tensor(&s->spec, i);
        fprintf(file, "tensor %s %llu %llu %llu %d %llu %llu %u", t.name, (unsigned long long)t.offset,
                (unsigned long long)t.rows, (unsigned long long)t.columns, t.decay, (unsigned long long)t.full_rows,
                (unsigned long long)t.full_columns, t.axis);
        for (uint32_t part = 0; part < t.parts; part++)
            fprintf(file, " %llu %llu", (unsigned long long)t.part_first[part], (unsigned long long)t.part_size[part]);
        fprintf(file, "\n");
    }
    fprintf(file, "loss %.17g\nnorm %.17g\ndata\n", s->loss_sum, s->norm);
}

static struct step step_of(const uint32_t numbers[ARGUMENTS])
{
    struct mu_model_config config = {.family = (enum mu_model_family)numbers[2],
                                     .layers = numbers[3],
                                     .heads = numbers[4],
                                     .kv_heads = numbers[5],
                                     .channels = numbers[6],
                                     .hidden = numbers[7],
                                     .context = numbers[8],
                                     .vocab = numbers[9],
                                     .slices = numbers[10]};
    struct step s = {.micro = numbers[11], .length = numbers[12], .accumulate = numbers[13]};
    struct mu_error err = {0};
    struct mu_model_options options = {
        .micro = s.micro, .length = s.length, .accumulate = s.accumulate, .recompute = (enum mu_recompute)numbers[15]};
    stop_if(config.family != MU_FAMILY_GPT2 && config.family != MU_FAMILY_LLAMA, "FAMILY must be 1 or 2");
    mu_model_spec_init(&s.spec, &config);
    stop_if(mu_pool_new(numbers[14], &err, &s.pool) != MU_OK, err.text);
    stop_if(mu_model_new(&s.spec, &options, s.pool, &err, &s.model) != MU_OK, err.text);
    make_inputs(&s);
    return s;
}

int main(int argc, char **argv)
{
    stop_if(argc != ARGUMENTS,
            "usage: dump_step FILE FAMILY LAYERS HEADS KV_HEADS CHANNELS HIDDEN CONTEXT VOCAB SLICES "
            "MICRO LENGTH ACCUMULATE THREADS RECOMPUTE");
    uint32_t numbers[ARGUMENTS] = {0};
    for (int i = 2; i < argc; i++)
        numbers[i] = (uint32_t)strtoul(argv[i], NULL, 10);
    struct step s = step_of(numbers);
    size_t flat = (size_t)s.spec.flat_size, tokens = (size_t)s.accumulate * s.micro * s.length;
    memcpy(s.updated, s.params, flat * sizeof(float));
    train(&s);
    memcpy(s.updated, s.params, flat * sizeof(float));
    s.loss_sum = compute(&s);
    FILE *file = fopen(argv[1], "wb");
    stop_if(!file, "cannot create the file");
    write_header(file, &s);
    write_array(file, s.tokens, sizeof(int32_t), tokens);
    write_array(file, s.targets, sizeof(int32_t), tokens);
    const float *arrays[] = {s.params, s.grads, s.m, s.v};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        write_array(file, arrays[i], sizeof(float), flat);
    update(&s, s.m, s.v, s.norm / 2, UPDATE);
    write_array(file, s.updated, sizeof(float), flat);
    stop_if(fclose(file) != 0, "cannot write");
    mu_model_free(s.model);
    mu_pool_free(s.pool);
    float *buffers[] = {s.params, s.grads, s.m, s.v, s.updated};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        free(buffers[i]);
    free(s.tokens);
    free(s.targets);
    return 0;
}
