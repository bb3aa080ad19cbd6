/* Computes one training step of a small GPT-2 and writes its inputs and results for tests/e2e/check_step.py.
 *
 * usage: dump_step FILE LAYERS HEADS CHANNELS CONTEXT VOCAB MICRO LENGTH ACCUMULATE THREADS
 * The file: a text header of lines "key value ..." up to "data", then tokens and targets (int32), and flat fp32
 * arrays: parameters, gradients, both moments before the update, parameters after it; little-endian. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fmath.h"
#include "common/rng.h"
#include "worker/model.h"

enum { ARGUMENTS = 11, SEED = 1337, UPDATE = 3 };

struct step {
    struct mu_model_spec spec;
    uint32_t micro, length, accumulate;
    struct mu_pool *pool;
    struct mu_model *model;
    int32_t *tokens, *targets;
    float *params, *grads, *m, *v, *updated;
    double loss_sum, norm;
    struct mu_adamw adamw;
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
    stop_if(mu_model_init_parameters(&s->spec, s->pool, SEED, s->params) != MU_OK, "initial parameters failed");
    for (uint32_t t = 0; t < s->spec.tensor_count; t++) {
        struct mu_tensor tensor = mu_model_tensor(&s->spec, t);
        for (uint64_t i = tensor.offset; i < tensor.offset + tensor.size; i++) {
            s->params[i] += (float)(0.1 * uniform(&state)); /* no zeros, no ones, larger gradients than at the start */
            s->m[i] = (float)(1e-3 * uniform(&state));
            double root = 1e-3 * uniform(&state);
            s->v[i] = (float)(root * root);
        }
    }
    for (size_t i = 0; i < tokens; i++) {
        s->tokens[i] = (int32_t)(mu_splitmix64(&state) % s->spec.config.vocab);
        s->targets[i] = i % 7 == 3 ? -1 : (int32_t)(mu_splitmix64(&state) % s->spec.config.vocab);
    }
}

static void compute(struct step *s)
{
    size_t flat = (size_t)s->spec.flat_size, tokens = (size_t)s->micro * s->length;
    for (uint32_t i = 0; i < s->accumulate; i++) {
        struct mu_micro_batch batch = {.tokens = s->tokens + i * tokens, .targets = s->targets + i * tokens};
        batch.loss_divisor = s->accumulate * tokens;
        batch.index = i;
        batch.count = s->accumulate;
        double loss = 0;
        stop_if(mu_model_forward_backward(s->model, &batch, s->params, s->grads, &loss) != MU_OK,
                "forward and backward failed");
        s->loss_sum += loss;
    }
    struct mu_exact_sum squares;
    mu_exact_sum_init(&squares);
    stop_if(mu_kernel_square_sum(s->pool, flat, s->grads, &squares) != MU_OK, "norm failed");
    s->norm = mu_fmath_sqrt(mu_exact_sum_round(&squares));
    s->adamw = mu_adamw_at(1e-3, 0.9, 0.95, 1e-8, 0.1, s->norm / 2, s->norm, UPDATE);
    memcpy(s->updated, s->params, flat * sizeof(float));
}

static void write_array(FILE *file, const void *data, size_t size, size_t count)
{
    stop_if(fwrite(data, size, count, file) != count, "cannot write");
}

static void write_header(FILE *file, const struct step *s)
{
    const struct mu_model_config *c = &s->spec.config;
    fprintf(file, "config %u %u %u %u %u\n", c->layers, c->heads, c->channels, c->context, c->vocab);
    fprintf(file, "batch %u %u %u\n", s->accumulate, s->micro, s->length);
    fprintf(file, "flat %llu\n", (unsigned long long)s->spec.flat_size);
    fprintf(file, "adamw 1e-3 0.9 0.95 1e-8 0.1 %.17g %d\n", s->norm / 2, UPDATE);
    for (uint32_t i = 0; i < s->spec.tensor_count; i++) {
        struct mu_tensor t = mu_model_tensor(&s->spec, i);
        fprintf(file, "tensor %s %llu %llu %llu %d\n", t.name, (unsigned long long)t.offset, (unsigned long long)t.rows,
                (unsigned long long)t.columns, t.decay);
    }
    fprintf(file, "loss %.17g\nnorm %.17g\ndata\n", s->loss_sum, s->norm);
}

int main(int argc, char **argv)
{
    stop_if(argc != ARGUMENTS,
            "usage: dump_step FILE LAYERS HEADS CHANNELS CONTEXT VOCAB MICRO LENGTH ACCUMULATE THREADS");
    uint32_t numbers[ARGUMENTS] = {0};
    for (int i = 2; i < argc; i++)
        numbers[i] = (uint32_t)strtoul(argv[i], NULL, 10);
    struct mu_model_config config = {MU_FAMILY_GPT2, numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], 0.0f};
    struct step s = {.micro = numbers[7], .length = numbers[8], .accumulate = numbers[9]};
    struct mu_error err = {0};
    mu_model_spec_init(&s.spec, &config);
    stop_if(mu_pool_new(numbers[10], &err, &s.pool) != MU_OK, err.text);
    struct mu_model_options options = {.micro = s.micro, .length = s.length, .accumulate = s.accumulate};
    stop_if(mu_model_new(&s.spec, &options, s.pool, &err, &s.model) != MU_OK, err.text);
    make_inputs(&s);
    size_t flat = (size_t)s.spec.flat_size, tokens = (size_t)s.accumulate * s.micro * s.length;
    compute(&s);
    FILE *file = fopen(argv[1], "wb");
    stop_if(!file, "cannot create the file");
    write_header(file, &s);
    write_array(file, s.tokens, sizeof(int32_t), tokens);
    write_array(file, s.targets, sizeof(int32_t), tokens);
    const float *arrays[] = {s.params, s.grads, s.m, s.v};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        write_array(file, arrays[i], sizeof(float), flat);
    stop_if(mu_model_update(&s.spec, s.pool, &s.adamw, 0, flat, s.updated, s.m, s.v, s.grads) != MU_OK,
            "update failed");
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
