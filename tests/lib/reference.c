#include "tests/lib/reference.h"

#include <math.h>
#include <string.h>

void ref_gemm(const struct ref_gemm *s, const double *a, const double *b, bool accumulate, double *c)
{
    for (uint32_t i = 0; i < s->m; i++)
        for (uint32_t j = 0; j < s->n; j++) {
            double sum = accumulate ? c[(size_t)i * s->n + j] : 0.0;
            for (uint32_t k = 0; k < s->k; k++)
                sum += a[s->transpose_a ? (size_t)k * s->m + i : (size_t)i * s->k + k] *
                       b[s->transpose_b ? (size_t)j * s->k + k : (size_t)k * s->n + j];
            c[(size_t)i * s->n + j] = sum;
        }
}

static double gelu_inner(double x)
{
    return sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
}

double ref_gelu(double x)
{
    return 0.5 * x * (1.0 + tanh(gelu_inner(x)));
}

double ref_gelu_grad(double x)
{
    double t = tanh(gelu_inner(x));
    return 0.5 * (1.0 + t) +
           0.5 * x * (1.0 - t * t) * sqrt(2.0 / 3.14159265358979323846) * (1.0 + 3.0 * 0.044715 * x * x);
}

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

void ref_swiglu_forward(uint32_t rows, uint32_t hidden, const double *gate_up, double *y)
{
    for (size_t row = 0; row < rows; row++, gate_up += 2 * (size_t)hidden)
        for (uint32_t i = 0; i < hidden; i++)
            y[row * hidden + i] = gate_up[i] * sigmoid(gate_up[i]) * gate_up[hidden + i];
}

void ref_swiglu_backward(uint32_t rows, uint32_t hidden, const double *gate_up, const double *dy, double *d_gate_up)
{
    for (size_t row = 0; row < rows; row++, gate_up += 2 * (size_t)hidden, d_gate_up += 2 * (size_t)hidden)
        for (uint32_t i = 0; i < hidden; i++) {
            double g = gate_up[i], s = sigmoid(g), d = dy[row * hidden + i];
            d_gate_up[i] = d * gate_up[hidden + i] * (s + g * s * (1.0 - s));
            d_gate_up[hidden + i] = d * g * s;
        }
}

void ref_rotary(uint32_t first_row, uint32_t rows, uint32_t length, uint32_t heads, uint32_t head_channels, double base,
                bool inverse, double *x)
{
    uint32_t half = head_channels / 2;
    for (size_t row = 0; row < rows; row++)
        for (uint32_t h = 0; h < heads; h++, x += head_channels)
            for (uint32_t i = 0; i < half; i++) {
                double angle = (double)((first_row + row) % length) * pow(base, -2.0 * i / head_channels);
                double c = cos(angle), s = inverse ? -sin(angle) : sin(angle), a = x[i], b = x[i + half];
                x[i] = a * c - b * s;
                x[i + half] = b * c + a * s;
            }
}

static void row_moments(const struct ref_norm *n, const double *x, double *mean, double *rstd)
{
    double sum = 0, squares = 0;
    const uint32_t channels = n->channels;
    for (uint32_t i = 0; i < channels; i++)
        sum += x[i];
    *mean = n->rms ? 0.0 : sum / channels;
    for (uint32_t i = 0; i < channels; i++)
        squares += (x[i] - *mean) * (x[i] - *mean);
    *rstd = 1.0 / sqrt(squares / channels + 1e-5);
}

static double stream(const struct ref_norm *n, size_t at)
{
    return n->residual[at] + (n->branch ? n->branch[at] * (n->keep ? n->keep[at] : 1.0) : 0.0);
}

void ref_norm_forward(const struct ref_norm *n, double *residual_out, double *y)
{
    for (uint32_t row = 0; row < n->rows; row++) {
        size_t first = (size_t)row * n->channels;
        double mean, rstd;
        for (uint32_t i = 0; i < n->channels; i++)
            residual_out[first + i] = stream(n, first + i);
        row_moments(n, residual_out + first, &mean, &rstd);
        for (uint32_t i = 0; i < n->channels; i++)
            y[first + i] = (residual_out[first + i] - mean) * rstd * n->weight[i] + (n->rms ? 0.0 : n->bias[i]);
    }
}

void ref_norm_backward(const struct ref_norm *n, const double *dy, const double *dstream, double *dresidual,
                       double *dbranch, double *dweight, double *dbias)
{
    memset(dweight, 0, n->channels * sizeof(double));
    if (!n->rms)
        memset(dbias, 0, n->channels * sizeof(double));
    for (uint32_t row = 0; row < n->rows; row++) {
        size_t first = (size_t)row * n->channels;
        double mean, rstd, sum = 0, sum_normal = 0;
        for (uint32_t i = 0; i < n->channels; i++)
            dresidual[first + i] = stream(n, first + i);
        row_moments(n, dresidual + first, &mean, &rstd);
        for (uint32_t i = 0; i < n->channels; i++) {
            double normal = (dresidual[first + i] - mean) * rstd, g = dy[first + i];
            dweight[i] += g * normal;
            if (!n->rms) {
                dbias[i] += g;
                sum += g * n->weight[i];
            }
            sum_normal += g * n->weight[i] * normal;
        }
        for (uint32_t i = 0; i < n->channels; i++) {
            double normal = (dresidual[first + i] - mean) * rstd;
            double d = rstd * (dy[first + i] * n->weight[i] - sum / n->channels - normal * sum_normal / n->channels);
            dresidual[first + i] = d + (dstream ? dstream[first + i] : 0.0);
            if (dbranch)
                dbranch[first + i] = dresidual[first + i] * (n->keep ? n->keep[first + i] : 1.0);
        }
    }
}

/* q, k or v (part 0, 1, 2) of one token and query head. */
static size_t qkv_at(const struct ref_attention *at, uint32_t sequence, uint32_t token, uint32_t part, uint32_t head)
{
    uint32_t group = at->heads / at->kv_heads;
    uint32_t column = part == 0 ? head : at->heads + (part - 1) * at->kv_heads + head / group;
    return (((size_t)sequence * at->length + token) * (at->heads + 2 * at->kv_heads) + column) * at->head_channels;
}

static void attention_row(const struct ref_attention *at, uint32_t s, uint32_t h, uint32_t i, double *p, double *lse)
{
    uint32_t size = at->head_channels;
    const double *q = at->qkv + qkv_at(at, s, i, 0, h);
    double highest = -INFINITY, sum = 0;
    for (uint32_t j = 0; j <= i; j++) {
        const double *k = at->qkv + qkv_at(at, s, j, 1, h);
        p[j] = 0;
        for (uint32_t c = 0; c < size; c++)
            p[j] += q[c] * k[c] / sqrt(size);
        highest = fmax(highest, p[j]);
    }
    for (uint32_t j = 0; j < at->length; j++) {
        p[j] = j <= i ? exp(p[j] - highest) : 0.0;
        sum += p[j];
    }
    for (uint32_t j = 0; j <= i; j++)
        p[j] /= sum;
    *lse = highest + log(sum);
}

void ref_attention_forward(const struct ref_attention *at, double *out, double *lse, double *probabilities)
{
    uint32_t size = at->head_channels;
    for (uint32_t s = 0; s < at->sequences; s++)
        for (uint32_t h = 0; h < at->heads; h++)
            for (uint32_t i = 0; i < at->length; i++) {
                size_t row = ((size_t)s * at->heads + h) * at->length + i;
                double *p = probabilities + row * at->length;
                double *o = out + (((size_t)s * at->length + i) * at->heads + h) * size;
                attention_row(at, s, h, i, p, lse + row);
                memset(o, 0, size * sizeof(double));
                for (uint32_t j = 0; j <= i; j++)
                    for (uint32_t c = 0; c < size; c++)
                        o[c] += p[j] * (at->keep ? at->keep[row * at->length + j] : 1.0) *
                                at->qkv[qkv_at(at, s, j, 2, h) + c];
            }
}

void ref_attention_backward(const struct ref_attention *at, const double *probabilities, const double *dout,
                            double *dqkv)
{
    uint32_t size = at->head_channels;
    memset(dqkv, 0, (size_t)at->sequences * at->length * (at->heads + 2 * at->kv_heads) * size * sizeof(double));
    for (uint32_t s = 0; s < at->sequences; s++)
        for (uint32_t h = 0; h < at->heads; h++)
            for (uint32_t i = 0; i < at->length; i++) {
                size_t row = ((size_t)s * at->heads + h) * at->length + i;
                const double *p = probabilities + row * at->length,
                             *keep = at->keep ? at->keep + row * at->length : NULL;
                const double *d = dout + (((size_t)s * at->length + i) * at->heads + h) * size;
                double total = 0; /* sum of p * dp */
                for (uint32_t pass = 0; pass < 2; pass++)
                    for (uint32_t j = 0; j <= i; j++) {
                        size_t q = qkv_at(at, s, i, 0, h), k = qkv_at(at, s, j, 1, h), v = qkv_at(at, s, j, 2, h);
                        double factor = keep ? keep[j] : 1.0, dp = 0;
                        for (uint32_t c = 0; c < size; c++)
                            dp += d[c] * at->qkv[v + c] * factor;
                        if (pass == 0) {
                            total += p[j] * dp;
                            continue;
                        }
                        double ds = p[j] * (dp - total) / sqrt(size);
                        for (uint32_t c = 0; c < size; c++) {
                            dqkv[q + c] += ds * at->qkv[k + c];
                            dqkv[k + c] += ds * at->qkv[q + c];
                            dqkv[v + c] += p[j] * factor * d[c];
                        }
                    }
            }
}

void ref_cross_entropy(uint32_t rows, uint32_t vocab, const double *logits, const int32_t *targets, double scale,
                       double *loss, double *dlogits)
{
    for (uint32_t row = 0; row < rows; row++) {
        const double *x = logits + (size_t)row * vocab;
        double highest = -INFINITY, sum = 0;
        for (uint32_t i = 0; i < vocab; i++)
            highest = fmax(highest, x[i]);
        for (uint32_t i = 0; i < vocab; i++)
            sum += exp(x[i] - highest);
        bool counted = targets[row] >= 0;
        loss[row] = counted ? highest + log(sum) - x[targets[row]] : 0.0;
        for (uint32_t i = 0; dlogits && i < vocab; i++)
            dlogits[(size_t)row * vocab + i] =
                counted ? (exp(x[i] - highest) / sum - ((uint32_t)targets[row] == i ? 1.0 : 0.0)) * scale : 0.0;
    }
}

void ref_embedding_forward(const struct ref_embedding *e, const double *wte, const double *wpe, double *x)
{
    for (size_t row = 0; row < (size_t)e->sequences * e->length; row++)
        for (uint32_t i = 0; i < e->channels; i++)
            x[row * e->channels + i] =
                (wte[(size_t)e->tokens[row] * e->channels + i] + wpe[row % e->length * e->channels + i]) *
                (e->keep ? e->keep[row * e->channels + i] : 1.0);
}

void ref_embedding_backward(const struct ref_embedding *e, const double *dx, double *dwte, double *dwpe)
{
    memset(dwte, 0, (size_t)e->vocab * e->channels * sizeof(double));
    memset(dwpe, 0, (size_t)e->length * e->channels * sizeof(double));
    for (size_t row = 0; row < (size_t)e->sequences * e->length; row++)
        for (uint32_t i = 0; i < e->channels; i++) {
            double d = dx[row * e->channels + i] * (e->keep ? e->keep[row * e->channels + i] : 1.0);
            dwte[(size_t)e->tokens[row] * e->channels + i] += d;
            dwpe[row % e->length * e->channels + i] += d;
        }
}

void ref_adamw(const struct ref_adamw *a, size_t size, double *p, double *m, double *v, const double *g)
{
    for (size_t i = 0; i < size; i++) {
        double gradient = g[i] * a->gradient_scale;
        m[i] = a->beta1 * m[i] + (1.0 - a->beta1) * gradient;
        v[i] = a->beta2 * v[i] + (1.0 - a->beta2) * gradient * gradient;
        double m_hat = m[i] / (1.0 - pow(a->beta1, (double)a->update)),
               v_hat = v[i] / (1.0 - pow(a->beta2, (double)a->update));
        p[i] -= a->lr * (m_hat / (sqrt(v_hat) + a->eps) + a->weight_decay * p[i]);
    }
}
