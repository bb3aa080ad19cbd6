/* The numeric identity: hashes of what every kernel computes on inputs that are likely to tell two machines apart. */
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

#include "common/rng.h"

enum {
    ROWS = 19,        /* odd, more than two register panels */
    COLUMNS = 53,     /* more than one panel */
    TOKENS_MAX = 131, /* more than two attention tiles */
    SEQUENCES = 2,    /* of the embedding look-up */
    LOOKUP_LENGTH = 5,
    LOOKUP_VOCAB = 3,
    RANGE = 4096 + 37, /* more than one block of the gradient norm */
    MISALIGN = 1,      /* floats off alignment */
    VOCAB_ROWS = 3,
    INPUT_SPREAD = 40, /* exponents of unusual inputs: 2^-40 .. 2^40 around 1 */
};

/* Buffers of the battery, one block. */
struct battery {
    struct mu_pool *pool;
    struct mu_kernel_shapes shapes;
    uint32_t tokens, head; /* attention: tokens of a sequence, channels of a head */
    float *a, *b, *c, *d, *e, *f;
    size_t size; /* floats in each */
    double loss[VOCAB_ROWS];
    struct mu_kernel_identity *identity;
    uint32_t count;
};

/* Mostly values around 1, some large, small and denormal ones; no infinities. */
static void fill(float *x, size_t size, uint64_t seed, bool wild)
{
    uint64_t state = seed;
    for (size_t i = 0; i < size; i++) {
        uint64_t random = mu_splitmix64(&state);
        float value = (float)((int64_t)(random >> 40) - (1 << 23)) * 0x1p-23f;
        uint32_t kind = (uint32_t)random & 63;
        if (wild && kind < 4) {
            uint32_t exponent = 127 - INPUT_SPREAD + (uint32_t)(random >> 8) % (2 * INPUT_SPREAD),
                     bits = exponent << 23;
            float power;
            memcpy(&power, &bits, sizeof power);
            value *= power;
        } else if (wild && kind == 4) {
            value *= 0x1p-130f; /* denormal */
        } else if (wild && kind == 5) {
            value = random & 64 ? 0.0f : -0.0f;
        }
        x[i] = value;
    }
}

static void record(struct battery *t, const char *name, const void *data, size_t size_bytes, uint64_t seed)
{
    MU_ASSERT(t->count < MU_IDENTITY_PARTS);
    t->identity->parts[t->count].name = name;
    t->identity->parts[t->count].hash = mu_xxh3_64(data, size_bytes, seed);
    t->count++;
}

static enum mu_status products(struct battery *t)
{
    static const char *const names[] = {"gemm", "gemm_transposed_b", "gemm_transposed_a"};
    uint32_t k = 4 * t->shapes.channels;
    fill(t->a, (size_t)ROWS * k + MISALIGN, 1, true);
    fill(t->b, (size_t)COLUMNS * k + MISALIGN, 2, true);
    for (int i = 0; i < 3; i++) {
        fill(t->c, ROWS * COLUMNS, 3, true);
        struct mu_gemm g = {.m = ROWS, .n = COLUMNS, .k = k, .transpose_a = i == 2, .transpose_b = i == 1};
        g.a = t->a + MISALIGN;
        g.b = t->b + MISALIGN;
        g.c = t->c;
        g.lda = g.transpose_a ? ROWS : k;
        g.ldb = g.transpose_b ? k : COLUMNS;
        g.ldc = g.ldaux = COLUMNS;
        g.accumulate = i == 2;
        g.epilogue = i == 0 ? MU_EPILOGUE_BIAS_GELU : MU_EPILOGUE_NONE;
        g.bias = t->b;
        g.before = t->d;
        enum mu_status status = mu_kernel_gemm(t->pool, &g);
        if (status != MU_OK)
            return status;
        record(t, names[i], t->c, (size_t)ROWS * COLUMNS * sizeof(float), 0);
    }
    return MU_OK;
}

static enum mu_status rows(struct battery *t)
{
    uint32_t channels = t->shapes.channels;
    size_t size = (size_t)ROWS * channels;
    float *mean = t->f, *rstd = t->f + ROWS, *dweight = rstd + ROWS, *dbias = dweight + channels,
          *workspace = dbias + channels;
    fill(t->a, size, 4, false);
    fill(t->b, size, 5, true);
    fill(t->c, channels, 6, false);
    uint64_t samples[1] = {0x123456789abcdefu};
    struct mu_dropout drop = mu_dropout_site(7, 8, 9, MU_DROPOUT_MLP, 0.25f, samples);
    struct mu_norm_forward forward = {
        .sequences = 1, .length = ROWS, .channels = channels, .residual = t->a, .branch = t->b};
    forward.weight = forward.bias = t->c;
    forward.drop = &drop;
    forward.residual_out = t->d;
    forward.y = t->e;
    forward.mean = mean;
    forward.rstd = rstd;
    enum mu_status status = mu_kernel_norm_forward(t->pool, &forward);
    if (status != MU_OK)
        return status;
    record(t, "norm_forward", t->e, size * sizeof(float), mu_xxh3_64(t->d, size * sizeof(float), 0));
    fill(t->b, size, 5, false); /* gradients */
    struct mu_norm_backward backward = {
        .sequences = 1, .length = ROWS, .channels = channels, .residual = t->d, .weight = t->c};
    backward.mean = mean;
    backward.rstd = rstd;
    backward.dy = t->b;
    backward.first = true;
    backward.dresidual = t->a;
    backward.dweight = dweight;
    backward.dbias = dbias;
    backward.workspace = workspace;
    status = mu_kernel_norm_backward(t->pool, &backward);
    if (status != MU_OK)
        return status;
    record(t, "norm_backward", t->a, size * sizeof(float), mu_xxh3_64(dweight, 2 * channels * sizeof(float), 0));
    fill(t->a, RANGE, 10, true);
    status = mu_kernel_gelu_backward(t->pool, RANGE, t->a, t->b, t->c);
    record(t, "gelu", t->c, RANGE * sizeof(float), 0);
    return status;
}

static enum mu_status lookup(struct battery *t)
{
    const int32_t tokens[SEQUENCES * LOOKUP_LENGTH] = {0, 1, 1, 2, 0, 1, 1, 1, 2, 0};
    const uint64_t samples[SEQUENCES] = {1, 0xfedcba9876543210u};
    uint32_t channels = t->shapes.channels;
    struct mu_dropout drop = mu_dropout_site(20, 21, 0, MU_DROPOUT_EMBEDDING, 0.5f, samples);
    size_t table = (size_t)LOOKUP_VOCAB * channels, size = (size_t)SEQUENCES * LOOKUP_LENGTH * channels;
    fill(t->a, table, 22, true);
    fill(t->b, (size_t)LOOKUP_LENGTH * channels, 23, true);
    enum mu_status status = mu_kernel_embedding_forward(t->pool, SEQUENCES, LOOKUP_LENGTH, channels, LOOKUP_VOCAB,
                                                        tokens, t->a, t->b, &drop, t->c);
    if (status != MU_OK)
        return status;
    uint64_t forward = mu_xxh3_64(t->c, size * sizeof(float), 0);
    status = mu_kernel_embedding_backward(t->pool, SEQUENCES, LOOKUP_LENGTH, channels, tokens, &drop, t->c, t->a, t->b);
    record(t, "embedding", t->a, table * sizeof(float), forward);
    return status;
}

static enum mu_status attention(struct battery *t)
{
    uint32_t channels = t->head;
    size_t size = (size_t)t->tokens * channels;
    fill(t->a, 3 * size, 11, false);
    fill(t->b, size, 12, false);
    struct mu_attention at = {
        .sequences = 1, .length = t->tokens, .heads = 1, .channels = channels, .qkv = t->a, .out = t->c};
    at.lse = t->f;
    at.dout = t->b;
    at.dqkv = t->d;
    enum mu_status status = mu_kernel_attention_forward(t->pool, &at);
    if (status == MU_OK)
        status = mu_kernel_attention_backward(t->pool, &at);
    record(t, "attention", t->d, 3 * size * sizeof(float), mu_xxh3_64(t->c, size * sizeof(float), 0));
    return status;
}

static enum mu_status loss(struct battery *t)
{
    const int32_t targets[VOCAB_ROWS] = {0, (int32_t)t->shapes.vocab - 1, -1};
    size_t size = (size_t)VOCAB_ROWS * t->shapes.vocab;
    fill(t->a, size, 13, false);
    for (size_t i = 0; i < size; i++)
        t->a[i] *= 10.0f;
    enum mu_status status = mu_kernel_cross_entropy(t->pool, VOCAB_ROWS, t->shapes.vocab, t->shapes.vocab, t->a,
                                                    targets, 0.125f, true, t->loss);
    record(t, "cross_entropy", t->a, size * sizeof(float), mu_xxh3_64(t->loss, sizeof t->loss, 0));
    return status;
}

static enum mu_status ranges(struct battery *t)
{
    fill(t->a, RANGE, 14, true);
    fill(t->b, RANGE, 15, false);
    fill(t->c, RANGE, 16, false);
    for (size_t i = 0; i < RANGE; i++)
        t->c[i] *= t->c[i];
    struct mu_exact_sum sum;
    uint8_t packed[MU_EXACT_SUM_BYTES];
    mu_exact_sum_init(&sum);
    enum mu_status status = mu_kernel_square_sum(t->pool, RANGE, t->a, &sum);
    if (status != MU_OK)
        return status;
    mu_exact_sum_pack(&sum, packed);
    record(t, "square_sum", packed, sizeof packed, 0);
    struct mu_adamw adamw = mu_adamw_at(1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, mu_exact_sum_round(&sum), 3);
    fill(t->d, RANGE, 17, false);
    status = mu_kernel_adamw(t->pool, &adamw, RANGE, t->d, t->b, t->c, t->a);
    if (status != MU_OK)
        return status;
    record(t, "adamw", t->d, RANGE * sizeof(float), mu_xxh3_64(t->c, RANGE * sizeof(float), 0));
    status = mu_kernel_init_normal(t->pool, 18, 19, 20, RANGE, 0.02f, t->a);
    record(t, "init_normal", t->a, RANGE * sizeof(float), 0);
    return status;
}

static size_t battery_floats(const struct battery *t)
{
    size_t sizes[] = {(size_t)COLUMNS * 4 * t->shapes.channels + MISALIGN, (size_t)VOCAB_ROWS * t->shapes.vocab,
                      3 * (size_t)t->tokens * t->head, RANGE,
                      (size_t)ROWS * t->shapes.channels + 4 * (size_t)t->shapes.channels + 2 * ROWS};
    size_t largest = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        largest = sizes[i] > largest ? sizes[i] : largest;
    return (largest + 63) / 64 * 64;
}

enum mu_status mu_kernels_identity(struct mu_pool *pool, const struct mu_kernel_shapes *shapes, struct mu_error *err,
                                   struct mu_kernel_identity *ret_identity)
{
    struct mu_kernel_identity identity = {0};
    struct battery t = {.pool = pool, .shapes = *shapes, .identity = &identity};
    MU_ASSERT(shapes->channels > 0 && shapes->heads > 0 && shapes->vocab > 0 && shapes->length > 0);
    t.tokens = shapes->length < TOKENS_MAX ? shapes->length : TOKENS_MAX;
    t.head = shapes->channels / shapes->heads;
    t.size = battery_floats(&t);
    float *block = calloc(6 * t.size, sizeof(float));
    if (!block)
        return mu_fail(err, MU_ERR_NO_MEMORY, "numeric identity: out of memory (%zu MiB)",
                       6 * t.size * sizeof(float) >> 20);
    float **buffers[] = {&t.a, &t.b, &t.c, &t.d, &t.e, &t.f};
    for (size_t i = 0; i < 6; i++)
        *buffers[i] = block + i * t.size;
    enum mu_status (*const parts[])(struct battery *) = {products, rows, lookup, attention, loss, ranges};
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0] && status == MU_OK; i++)
        status = parts[i](&t);
    free(block);
    if (status != MU_OK)
        return mu_fail(err, status, "numeric identity: cancelled");
    /* The total does not depend on where the names lie. */
    uint64_t words[MU_IDENTITY_PARTS + 1] = {0};
    for (uint32_t i = 0; i < t.count; i++)
        words[i] = identity.parts[i].hash ^ mu_xxh3_64(identity.parts[i].name, strlen(identity.parts[i].name), 0);
    static const char backend[] = "cpu fp32 exact 1"; /* the last number: version of the definitions in kernels.h */
    words[MU_IDENTITY_PARTS] = mu_xxh3_64(backend, sizeof backend, 0);
    identity.total = mu_xxh3_128(words, sizeof words);
    identity.count = t.count;
    *ret_identity = identity;
    return MU_OK;
}
