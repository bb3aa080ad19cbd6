#include "kernels/cuda/cost.h"

static double fp32(double elements)
{
    return elements * (double)sizeof(float);
}

struct mu_cuda_cost mu_cuda_cost_gemm(const struct mu_gemm *g, enum mu_dtype dtype)
{
    const double slices = g->slices > 1 ? (double)g->slices : 1.0, k = slices * (double)g->k, m = (double)g->m,
                 n = (double)g->n;
    const double operands = m * k + k * n,
                 beside = g->epilogue == MU_EPILOGUE_BIAS_GELU || g->epilogue == MU_EPILOGUE_GELU_GRAD;
    struct mu_cuda_cost cost = {.kernel = "gemm", .flops = 2.0 * m * n * k};
    cost.bytes = operands * (dtype == MU_DTYPE_BF16 ? 8.0 : 4.0) + fp32(m * n * (1.0 + beside + g->accumulate));
    return cost;
}

struct mu_cuda_cost mu_cuda_cost_attention(const struct mu_attention *at, bool backward)
{
    const double slices = at->slices ? (double)at->slices : 1.0, length = (double)at->length;
    const double tokens = slices * (double)at->sequences * length, head = (double)at->head_channels;
    const double qkv = tokens * (double)(at->heads + 2 * at->kv_heads) * head, out = tokens * (double)at->heads * head;
    struct mu_cuda_cost cost = {.kernel = backward ? "attention_backward" : "attention_forward"};
    cost.flops = (backward ? 7.0 : 2.0) * tokens * length * (double)at->heads * head;
    cost.bytes = fp32(backward ? 2.0 * qkv + 2.0 * out : qkv + out);
    return cost;
}

struct mu_cuda_cost mu_cuda_cost_norm_forward(const struct mu_norm_forward *norm)
{
    const double size = (double)norm->rows * (double)norm->channels;
    const bool copied = norm->branch || norm->residual_out != norm->residual;
    return (struct mu_cuda_cost){.kernel = "norm_forward",
                                 .bytes = fp32(size * (2.0 + (norm->branch != NULL) + copied))};
}

struct mu_cuda_cost mu_cuda_cost_norm_backward(const struct mu_norm_backward *norm)
{
    const double size = (double)norm->rows * (double)norm->channels;
    return (struct mu_cuda_cost){.kernel = "norm_backward",
                                 .bytes = fp32(size * (5.0 + !norm->first + (norm->dbranch != NULL)))};
}

struct mu_cuda_cost mu_cuda_cost_cross_entropy(uint32_t rows, uint32_t vocab, bool gradient)
{
    return (struct mu_cuda_cost){.kernel = "cross_entropy",
                                 .bytes = fp32((double)rows * (double)vocab * (gradient ? 2.0 : 1.0))};
}

struct mu_cuda_cost mu_cuda_cost_embedding_forward(uint32_t rows, uint32_t channels, bool positions)
{
    return (struct mu_cuda_cost){.kernel = "embedding_forward",
                                 .bytes = fp32((double)rows * (double)channels * (positions ? 3.0 : 2.0))};
}

struct mu_cuda_cost mu_cuda_cost_embedding_backward(uint32_t rows, uint32_t channels, uint32_t distinct)
{
    return (struct mu_cuda_cost){.kernel = "embedding_backward",
                                 .bytes = fp32(((double)rows + 2.0 * (double)distinct) * (double)channels)};
}

struct mu_cuda_cost mu_cuda_cost_stream(enum mu_cuda_stream_op op, size_t elements)
{
    static const struct {
        const char *kernel;
        double floats; /* moved for each element */
    } ops[MU_CUDA_STREAM_COUNT] = {
        [MU_CUDA_STREAM_FILL] = {"fill", 1},
        [MU_CUDA_STREAM_ADD] = {"add", 3},
        [MU_CUDA_STREAM_GELU_FORWARD] = {"gelu_forward", 2},
        [MU_CUDA_STREAM_GELU_BACKWARD] = {"gelu_backward", 3},
        [MU_CUDA_STREAM_SWIGLU_FORWARD] = {"swiglu_forward", 3},
        [MU_CUDA_STREAM_SWIGLU_BACKWARD] = {"swiglu_backward", 5},
        [MU_CUDA_STREAM_BIAS_ADD] = {"bias_add", 2},
        [MU_CUDA_STREAM_ROTARY] = {"rotary", 2},
        [MU_CUDA_STREAM_COLUMN_SUM] = {"column_sum", 1},
        [MU_CUDA_STREAM_SQUARE_SUM] = {"square_sum", 1},
        [MU_CUDA_STREAM_ADAMW] = {"adamw", 7},
    };
    MU_ASSERT(op < MU_CUDA_STREAM_COUNT);
    return (struct mu_cuda_cost){.kernel = ops[op].kernel, .bytes = fp32(ops[op].floats * (double)elements)};
}
