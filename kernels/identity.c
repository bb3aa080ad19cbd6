/* The numeric identity: hashes of what every kernel computes on inputs that are likely to tell two machines apart. */
#include "kernels/identity.h"

#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "kernels/device.h"

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

/* Small arrays that kernels read and write. */
struct small {
    int32_t tokens[SEQUENCES * LOOKUP_LENGTH], targets[VOCAB_ROWS];
    uint64_t samples[SEQUENCES];
    double loss[VOCAB_ROWS];
};

/* Buffers of the battery, one block. */
struct battery {
    struct mu_pool *pool;
    const struct mu_identity_place *place;
    enum mu_status waited; /* what went wrong while the kernels were waited for */
    struct small *small;
    struct mu_kernel_shapes shapes;
    uint32_t tokens, head; /* attention: tokens of a sequence, channels of a head */
    uint32_t group;        /* query heads of a key and value head */
    float *a, *b, *c, *d, *e, *f;
    size_t size; /* floats in each */
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

/* Before the host reads what kernels wrote. */
static void wait(struct battery *t)
{
    enum mu_status status = t->place->wait ? t->place->wait(t->place->ctx) : MU_OK;
    if (t->waited == MU_OK)
        t->waited = status;
}

/* Hash of what kernels wrote. */
static uint64_t hash(struct battery *t, const void *data, size_t size_bytes, uint64_t seed)
{
    wait(t);
    return mu_xxh3_64(data, size_bytes, seed);
}

static void record(struct battery *t, const char *name, const void *data, size_t size_bytes, uint64_t seed)
{
    wait(t);
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

/* A product in slices, the last one shorter. */
static enum mu_status sliced_product(struct battery *t)
{
    uint32_t slices = t->shapes.slices, k = (t->shapes.hidden + slices - 1) / slices;
    fill(t->a, (size_t)ROWS * k * slices + MISALIGN, 31, true);
    fill(t->b, (size_t)COLUMNS * k * slices + MISALIGN, 32, true);
    struct mu_gemm g = {.m = ROWS, .n = COLUMNS, .k = k, .slices = slices, .k_last = k - k / 2};
    g.a = t->a + MISALIGN;
    g.b = t->b + MISALIGN;
    g.a_slice = k;
    g.b_slice = (size_t)k * COLUMNS;
    g.c = t->c;
    g.lda = (size_t)k * slices;
    g.ldb = g.ldc = COLUMNS;
    g.epilogue = MU_EPILOGUE_BIAS;
    g.bias = t->b;
    enum mu_status status = mu_kernel_gemm(t->pool, &g);
    record(t, "gemm_slices", t->c, (size_t)ROWS * COLUMNS * sizeof(float), 0);
    return status;
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
    t->small->samples[0] = 0x123456789abcdefu;
    struct mu_dropout drop = mu_dropout_site(7, 8, 9, MU_DROPOUT_MLP, 0.25f, t->small->samples);
    struct mu_norm_forward forward = {
        .rows = ROWS, .length = ROWS, .channels = channels, .residual = t->a, .branch = t->b};
    forward.weight = forward.bias = t->c;
    forward.drop = &drop;
    forward.residual_out = t->d;
    forward.y = t->e;
    forward.mean = mean;
    forward.rstd = rstd;
    enum mu_status status = mu_kernel_norm_forward(t->pool, &forward);
    if (status != MU_OK)
        return status;
    record(t, "norm_forward", t->e, size * sizeof(float), hash(t, t->d, size * sizeof(float), 0));
    fill(t->b, size, 5, false); /* gradients */
    struct mu_norm_backward backward = {
        .rows = ROWS, .length = ROWS, .channels = channels, .residual = t->d, .weight = t->c};
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
    record(t, "norm_backward", t->a, size * sizeof(float), hash(t, dweight, 2 * channels * sizeof(float), 0));
    fill(t->a, RANGE, 10, true);
    status = mu_kernel_gelu_backward(t->pool, RANGE, t->a, t->b, t->c);
    record(t, "gelu", t->c, RANGE * sizeof(float), 0);
    return status;
}

static enum mu_status lookup(struct battery *t)
{
    static const int32_t token_numbers[SEQUENCES * LOOKUP_LENGTH] = {0, 1, 1, 2, 0, 1, 1, 1, 2, 0};
    static const uint64_t sample_numbers[SEQUENCES] = {1, 0xfedcba9876543210u};
    const int32_t *tokens = memcpy(t->small->tokens, token_numbers, sizeof token_numbers);
    uint32_t channels = t->shapes.channels;
    struct mu_dropout drop = mu_dropout_site(20, 21, 0, MU_DROPOUT_EMBEDDING, 0.5f,
                                             memcpy(t->small->samples, sample_numbers, sizeof sample_numbers));
    size_t table = (size_t)LOOKUP_VOCAB * channels, size = (size_t)SEQUENCES * LOOKUP_LENGTH * channels;
    fill(t->a, table, 22, true);
    fill(t->b, (size_t)LOOKUP_LENGTH * channels, 23, true);
    const uint32_t count = SEQUENCES * LOOKUP_LENGTH;
    const float *const slices[] = {t->a};
    const struct mu_vocab_slices whole = {slices, LOOKUP_VOCAB, 0, 1, LOOKUP_VOCAB};
    enum mu_status status =
        mu_kernel_embedding_forward(t->pool, 0, count, LOOKUP_LENGTH, channels, &whole, tokens, t->b, &drop, t->c);
    if (status != MU_OK)
        return status;
    uint64_t forward = hash(t, t->c, size * sizeof(float), 0);
    status = mu_kernel_embedding_drop(t->pool, 0, count, LOOKUP_LENGTH, channels, &drop, t->c);
    if (status == MU_OK)
        status = mu_kernel_embedding_backward(t->pool, count, channels, tokens, t->c, 0, LOOKUP_VOCAB, t->a);
    if (status == MU_OK)
        status = mu_kernel_position_backward(t->pool, 0, count, LOOKUP_LENGTH, channels, t->c, t->b);
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
        .sequences = 1, .length = t->tokens, .heads = 1, .kv_heads = 1, .head_channels = channels, .qkv = t->a};
    at.out = t->c;
    at.lse = t->f;
    at.dout = t->b;
    at.dqkv = t->d;
    enum mu_status status = mu_kernel_attention_forward(t->pool, &at);
    if (status == MU_OK)
        status = mu_kernel_attention_backward(t->pool, &at);
    record(t, "attention", t->d, 3 * size * sizeof(float), hash(t, t->c, size * sizeof(float), 0));
    return status;
}

/* The first, the last and an ignored one. */
static const int32_t *some_targets(struct battery *t)
{
    const int32_t targets[VOCAB_ROWS] = {0, (int32_t)t->shapes.vocab - 1, -1};
    return memcpy(t->small->targets, targets, sizeof targets);
}

static enum mu_status loss(struct battery *t)
{
    const int32_t *targets = some_targets(t);
    size_t size = (size_t)VOCAB_ROWS * t->shapes.vocab;
    fill(t->a, size, 13, false);
    for (size_t i = 0; i < size; i++)
        t->a[i] *= 10.0f;
    enum mu_status status = mu_kernel_cross_entropy(t->pool, VOCAB_ROWS, t->shapes.vocab, t->shapes.vocab, t->a,
                                                    targets, 0.125f, true, t->small->loss);
    record(t, "cross_entropy", t->a, size * sizeof(float), hash(t, t->small->loss, sizeof t->small->loss, 0));
    return status;
}

static enum mu_status sliced_loss(struct battery *t)
{
    const int32_t *targets = some_targets(t);
    uint32_t slices = t->shapes.slices, width = (t->shapes.vocab + slices - 1) / slices;
    size_t each = (size_t)VOCAB_ROWS * width;
    double *sums = (double *)t->d, *loss = memset(t->small->loss, 0, sizeof t->small->loss);
    enum mu_status status = MU_OK;
    fill(t->a, each * slices, 33, false);
    for (uint32_t s = 0; s < slices && status == MU_OK; s++)
        status = mu_kernel_cross_entropy_max(t->pool, VOCAB_ROWS, width, width, t->a + s * each, t->c + s * VOCAB_ROWS);
    if (status == MU_OK)
        status = mu_kernel_join_max(t->pool, slices, VOCAB_ROWS, t->c);
    for (uint32_t s = 0; s < slices && status == MU_OK; s++)
        status = mu_kernel_cross_entropy_sum(t->pool, VOCAB_ROWS, s * width, width, width, t->a + s * each, targets,
                                             t->c, true, sums + s * VOCAB_ROWS, loss);
    if (status == MU_OK)
        status = mu_kernel_join_sums(t->pool, slices, VOCAB_ROWS, sums);
    for (uint32_t s = 0; s < slices && status == MU_OK; s++)
        status = mu_kernel_cross_entropy_gradient(t->pool, VOCAB_ROWS, s * width, width, width, t->a + s * each,
                                                  targets, sums, 0.125f, true, loss);
    record(t, "cross_entropy_slices", t->a, each * slices * sizeof(float), hash(t, loss, sizeof t->small->loss, 0));
    return status;
}

static enum mu_status rms_norm(struct battery *t)
{
    uint32_t channels = t->shapes.channels;
    size_t size = (size_t)ROWS * channels;
    float *rstd = t->f, *dweight = rstd + ROWS, *workspace = dweight + channels;
    fill(t->a, size, 34, false);
    fill(t->b, size, 35, true);
    fill(t->c, channels, 36, false);
    struct mu_norm_forward forward = {
        .rows = ROWS, .length = ROWS, .channels = channels, .rms = true, .residual = t->a, .branch = t->b};
    forward.weight = t->c;
    forward.residual_out = t->d;
    forward.y = t->e;
    forward.rstd = rstd;
    enum mu_status status = mu_kernel_norm_forward(t->pool, &forward);
    if (status != MU_OK)
        return status;
    uint64_t seed = hash(t, t->e, size * sizeof(float), 0);
    fill(t->b, size, 35, false); /* gradients */
    struct mu_norm_backward backward = {
        .rows = ROWS, .length = ROWS, .channels = channels, .rms = true, .residual = t->d, .weight = t->c};
    backward.rstd = rstd;
    backward.dy = t->b;
    backward.first = true;
    backward.dresidual = t->a;
    backward.dweight = dweight;
    backward.workspace = workspace;
    status = mu_kernel_norm_backward(t->pool, &backward);
    record(t, "rms_norm", t->a, size * sizeof(float), hash(t, dweight, channels * sizeof(float), seed));
    return status;
}

static enum mu_status swiglu(struct battery *t)
{
    size_t size = (size_t)VOCAB_ROWS * t->shapes.hidden;
    fill(t->a, 2 * size, 37, true);
    fill(t->b, size, 38, false);
    enum mu_status status = mu_kernel_swiglu_forward(t->pool, VOCAB_ROWS, t->shapes.hidden, t->a, t->c);
    if (status == MU_OK)
        status = mu_kernel_swiglu_backward(t->pool, VOCAB_ROWS, t->shapes.hidden, t->a, t->b, t->d);
    record(t, "swiglu", t->d, 2 * size * sizeof(float), hash(t, t->c, size * sizeof(float), 0));
    return status;
}

/* One key and value head with its query heads, rotated. */
static enum mu_status grouped_attention(struct battery *t)
{
    uint32_t heads = t->group, channels = t->head;
    size_t row = (size_t)(heads + 2) * channels, size = t->tokens * row, out = (size_t)t->tokens * heads * channels;
    fill(t->a, size, 39, false);
    fill(t->b, out, 40, false);
    float *cosines = t->e, *sines = t->e + (size_t)t->tokens * (channels / 2);
    mu_kernel_rotary_table(t->tokens, channels, 10000.0, cosines, sines);
    enum mu_status status =
        mu_kernel_rotary(t->pool, 0, t->tokens, t->tokens, heads + 1, channels, row, cosines, sines, false, t->a);
    if (status != MU_OK)
        return status;
    record(t, "rotary", t->a, size * sizeof(float), 0);
    struct mu_attention at = {.sequences = 1, .length = t->tokens, .heads = heads, .kv_heads = 1, .qkv = t->a};
    at.head_channels = channels;
    at.out = t->c;
    at.lse = t->f;
    at.dout = t->b;
    at.dqkv = t->d;
    status = mu_kernel_attention_forward(t->pool, &at);
    if (status == MU_OK)
        status = mu_kernel_attention_backward(t->pool, &at);
    record(t, "attention_grouped", t->d, size * sizeof(float), hash(t, t->c, out * sizeof(float), 0));
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
    record(t, "adamw", t->d, RANGE * sizeof(float), hash(t, t->c, RANGE * sizeof(float), 0));
    status = mu_kernel_init_normal(t->pool, 18, 19, 20, RANGE, 0.02f, t->a);
    record(t, "init_normal", t->a, RANGE * sizeof(float), 0);
    return status;
}

static size_t battery_floats(const struct battery *t)
{
    const struct mu_kernel_shapes *s = &t->shapes;
    size_t sizes[] = {(size_t)COLUMNS * 4 * s->channels + MISALIGN,
                      (size_t)COLUMNS * (s->hidden + s->slices) + MISALIGN,
                      (size_t)VOCAB_ROWS * (s->vocab + s->slices),
                      2 * (size_t)VOCAB_ROWS * s->hidden,
                      (size_t)(t->group + 2) * t->tokens * t->head,
                      RANGE,
                      (size_t)ROWS * s->channels + 4 * (size_t)s->channels + 2 * ROWS};
    size_t largest = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        largest = sizes[i] > largest ? sizes[i] : largest;
    return (largest + 63) / 64 * 64;
}

static struct battery battery_of(const struct mu_kernel_shapes *shapes)
{
    struct battery t = {.shapes = *shapes, .group = 1};
    MU_ASSERT(shapes->channels > 0 && shapes->heads > 0 && shapes->vocab > 0 && shapes->length > 0);
    if (shapes->hidden == 0)
        t.shapes.hidden = 4 * shapes->channels;
    if (shapes->slices == 0)
        t.shapes.slices = 1;
    if (shapes->llama && shapes->kv_heads > 0)
        t.group = shapes->heads / shapes->kv_heads;
    t.tokens = shapes->length < TOKENS_MAX ? shapes->length : TOKENS_MAX;
    t.head = shapes->channels / shapes->heads;
    t.size = battery_floats(&t);
    return t;
}

/* The parts that every job has come first: a job keeps its identity when others learn to use more kernels. */
static enum mu_status run_parts(struct battery *t)
{
    const struct {
        enum mu_status (*run)(struct battery *);
        bool wanted;
    } parts[] = {
        {products, true},
        {rows, true},
        {lookup, true},
        {attention, true},
        {loss, true},
        {ranges, true},
        {sliced_product, t->shapes.slices > 1},
        {sliced_loss, t->shapes.slices > 1},
        {rms_norm, t->shapes.llama},
        {swiglu, t->shapes.llama},
        {grouped_attention, t->shapes.llama},
    };
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0] && status == MU_OK; i++)
        if (parts[i].wanted)
            status = parts[i].run(t);
    return status;
}

enum mu_status mu_identity_run(struct mu_pool *pool, const struct mu_kernel_shapes *shapes,
                               const struct mu_identity_place *place, struct mu_error *err,
                               struct mu_kernel_identity *ret_identity)
{
    struct mu_kernel_identity identity = {0};
    struct battery t = battery_of(shapes);
    size_t bytes = sizeof *t.small + 6 * t.size * sizeof(float);
    t.pool = pool;
    t.place = place;
    t.identity = &identity;
    float *block = place->alloc(place->ctx, bytes);
    if (!block)
        return mu_fail(err, MU_ERR_NO_MEMORY, "numeric identity: no %zu KiB of host memory", bytes >> 10);
    float **buffers[] = {&t.a, &t.b, &t.c, &t.d, &t.e, &t.f};
    for (size_t i = 0; i < 6; i++)
        *buffers[i] = block + i * t.size;
    t.small = (struct small *)(block + 6 * t.size);
    enum mu_status status = run_parts(&t);
    place->free(place->ctx, block);
    if (status == MU_OK)
        status = t.waited;
    if (status != MU_OK)
        return mu_fail(err, status, "numeric identity: %s",
                       status == MU_ERR_CANCELLED ? "cancelled" : "the device failed");
    /* The total does not depend on where the names lie. */
    uint64_t words[MU_IDENTITY_PARTS + 1] = {0};
    for (uint32_t i = 0; i < t.count; i++)
        words[i] = identity.parts[i].hash ^ mu_xxh3_64(identity.parts[i].name, strlen(identity.parts[i].name), 0);
    words[t.count] = mu_xxh3_64(place->text, strlen(place->text) + 1, 0);
    identity.total = mu_xxh3_128(words, (t.count + 1) * sizeof words[0]);
    identity.count = t.count;
    *ret_identity = identity;
    return MU_OK;
}

static void *host_alloc(void *ctx, size_t size_bytes)
{
    (void)ctx;
    return calloc(1, size_bytes);
}

static void host_free(void *ctx, void *memory)
{
    (void)ctx;
    free(memory);
}

enum mu_status mu_kernels_identity(struct mu_pool *pool, const struct mu_kernel_shapes *shapes, struct mu_error *err,
                                   struct mu_kernel_identity *ret_identity)
{
    const struct mu_device *device = mu_pool_device(pool);
    if (device->ops->identity)
        return device->ops->identity(pool, shapes, err, ret_identity);
    /* the last number: version of the definitions in kernels.h */
    const struct mu_identity_place place = {.alloc = host_alloc, .free = host_free, .text = "cpu fp32 exact 1"};
    return mu_identity_run(pool, shapes, &place, err, ret_identity);
}
