#include "tests/lib/reference_llama.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct run {
    const struct mu_model_spec *spec;
    const double *params;
    uint32_t length, channels, heads, kv_heads, size; /* size: channels of a head */
    bool llama;
};

static const double *tensor(const struct run *r, uint32_t layer, enum mu_role role)
{
    return mu_model_has(&r->spec->config, role) ? r->params + mu_model_role(r->spec, layer, 0, role).offset : NULL;
}

static double *room(size_t count)
{
    double *x = calloc(count, sizeof *x);
    assert(x);
    return x;
}

/* y[length, out] = x[length, in] w[in, out] (+ b) */
static void linear(const struct run *r, uint32_t in, uint32_t out, const double *x, const double *w, const double *b,
                   double *y)
{
    for (uint32_t t = 0; t < r->length; t++)
        for (uint32_t j = 0; j < out; j++) {
            double sum = b ? b[j] : 0.0;
            for (uint32_t i = 0; i < in; i++)
                sum += x[(size_t)t * in + i] * w[(size_t)i * out + j];
            y[(size_t)t * out + j] = sum;
        }
}

static void norm(const struct run *r, const double *x, const double *w, const double *b, double *y)
{
    for (uint32_t t = 0; t < r->length; t++, x += r->channels, y += r->channels) {
        double mean = 0, square = 0;
        for (uint32_t i = 0; i < r->channels && !r->llama; i++)
            mean += x[i] / r->channels;
        for (uint32_t i = 0; i < r->channels; i++)
            square += (x[i] - mean) * (x[i] - mean) / r->channels;
        for (uint32_t i = 0; i < r->channels; i++)
            y[i] = (x[i] - mean) / sqrt(square + 1e-5) * w[i] + (b ? b[i] : 0.0);
    }
}

/* Angle of Llama's rotary positions: element i of a head turns with element i + size / 2. */
static void rotate(const struct run *r, uint32_t token, double *head)
{
    uint32_t half = r->size / 2;
    for (uint32_t i = 0; i < half; i++) {
        double angle = token * pow(r->spec->config.rope_base, -2.0 * i / r->size), a = head[i], b = head[i + half];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + half] = b * cos(angle) + a * sin(angle);
    }
}

static void attend(const struct run *r, const double *q, const double *k, const double *v, size_t stride,
                   uint32_t token, double *out)
{
    double *p = room(token + 1), highest = -INFINITY, sum = 0;
    for (uint32_t j = 0; j <= token; j++) {
        for (uint32_t i = 0; i < r->size; i++)
            p[j] += q[i] * k[j * stride + i] / sqrt(r->size);
        highest = fmax(highest, p[j]);
    }
    for (uint32_t j = 0; j <= token; j++)
        sum += p[j] = exp(p[j] - highest);
    for (uint32_t j = 0; j <= token; j++)
        for (uint32_t i = 0; i < r->size; i++)
            out[i] += p[j] / sum * v[j * stride + i];
    free(p);
}

static void attention(const struct run *r, uint32_t layer, double *x)
{
    uint32_t kv = r->kv_heads * r->size, width = r->channels + 2 * kv;
    double *y = room((size_t)r->length * r->channels), *qkv = room((size_t)r->length * width),
           *out = room((size_t)r->length * r->channels);
    norm(r, x, tensor(r, layer, MU_ROLE_NORM1_W), tensor(r, layer, MU_ROLE_NORM1_B), y);
    linear(r, r->channels, width, y, tensor(r, layer, MU_ROLE_QKV_W), tensor(r, layer, MU_ROLE_QKV_B), qkv);
    for (uint32_t t = 0; r->llama && t < r->length; t++)
        for (uint32_t h = 0; h < r->heads + r->kv_heads; h++)
            rotate(r, t, qkv + (size_t)t * width + (size_t)h * r->size);
    for (uint32_t t = 0; t < r->length; t++)
        for (uint32_t h = 0; h < r->heads; h++) {
            uint32_t of_kv = h / (r->heads / r->kv_heads) * r->size;
            attend(r, qkv + (size_t)t * width + (size_t)h * r->size, qkv + r->channels + of_kv,
                   qkv + r->channels + kv + of_kv, width, t, out + (size_t)t * r->channels + (size_t)h * r->size);
        }
    linear(r, r->channels, r->channels, out, tensor(r, layer, MU_ROLE_PROJ_W), tensor(r, layer, MU_ROLE_PROJ_B), y);
    for (size_t i = 0; i < (size_t)r->length * r->channels; i++)
        x[i] += y[i];
    free(y);
    free(qkv);
    free(out);
}

static double activation(const struct run *r, const double *up, uint32_t hidden, uint32_t i)
{
    double x = up[i];
    if (r->llama)
        return x / (1.0 + exp(-x)) * up[hidden + i];
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void mlp(const struct run *r, uint32_t layer, double *x)
{
    uint32_t hidden = r->spec->config.hidden, width = r->llama ? 2 * hidden : hidden;
    double *y = room((size_t)r->length * r->channels), *up = room((size_t)r->length * width),
           *act = room((size_t)r->length * hidden);
    norm(r, x, tensor(r, layer, MU_ROLE_NORM2_W), tensor(r, layer, MU_ROLE_NORM2_B), y);
    linear(r, r->channels, width, y, tensor(r, layer, MU_ROLE_UP_W), tensor(r, layer, MU_ROLE_UP_B), up);
    for (uint32_t t = 0; t < r->length; t++)
        for (uint32_t i = 0; i < hidden; i++)
            act[(size_t)t * hidden + i] = activation(r, up + (size_t)t * width, hidden, i);
    linear(r, hidden, r->channels, act, tensor(r, layer, MU_ROLE_DOWN_W), tensor(r, layer, MU_ROLE_DOWN_B), y);
    for (size_t i = 0; i < (size_t)r->length * r->channels; i++)
        x[i] += y[i];
    free(y);
    free(up);
    free(act);
}

static double token_loss(const struct run *r, const double *x, int32_t target)
{
    const double *table = tensor(r, 0, r->llama ? MU_ROLE_HEAD_W : MU_ROLE_WTE);
    uint32_t vocab = r->spec->config.vocab;
    double highest = -INFINITY, sum = 0, *logits = room(vocab), loss;
    for (uint32_t v = 0; v < vocab; v++) {
        for (uint32_t i = 0; i < r->channels; i++)
            logits[v] += x[i] * table[(size_t)v * r->channels + i];
        highest = fmax(highest, logits[v]);
    }
    for (uint32_t v = 0; v < vocab; v++)
        sum += exp(logits[v] - highest);
    loss = log(sum) + highest - logits[target];
    free(logits);
    return loss;
}

static double sequence_loss(const struct run *r, const int32_t *tokens, const int32_t *targets)
{
    double *x = room((size_t)r->length * r->channels), *y = room((size_t)r->length * r->channels), loss = 0;
    const double *wte = tensor(r, 0, MU_ROLE_WTE), *wpe = tensor(r, 0, MU_ROLE_WPE);
    for (uint32_t t = 0; t < r->length; t++)
        for (uint32_t i = 0; i < r->channels; i++)
            x[(size_t)t * r->channels + i] =
                wte[(size_t)tokens[t] * r->channels + i] + (wpe ? wpe[(size_t)t * r->channels + i] : 0.0);
    for (uint32_t layer = 0; layer < r->spec->config.layers; layer++) {
        attention(r, layer, x);
        mlp(r, layer, x);
    }
    norm(r, x, tensor(r, 0, MU_ROLE_NORMF_W), tensor(r, 0, MU_ROLE_NORMF_B), y);
    for (uint32_t t = 0; t < r->length; t++)
        if (targets[t] >= 0)
            loss += token_loss(r, y + (size_t)t * r->channels, targets[t]);
    free(x);
    free(y);
    return loss;
}

double ref_model_loss(const struct mu_model_spec *spec, const double *params, const struct ref_sequences *data)
{
    const struct mu_model_config *c = &spec->config;
    assert(c->slices == 1);
    struct run r = {.spec = spec,
                    .params = params,
                    .length = data->length,
                    .channels = c->channels,
                    .heads = c->heads,
                    .kv_heads = c->kv_heads,
                    .size = c->channels / c->heads,
                    .llama = c->family == MU_FAMILY_LLAMA};
    double loss = 0;
    for (uint32_t s = 0; s < data->sequences; s++)
        loss += sequence_loss(&r, data->tokens + (size_t)s * data->length, data->targets + (size_t)s * data->length);
    return loss;
}
