/* cublasLt's matrix product by the definition: k in chunks of 256, each an fma chain from +0, the chunk sums added in
 * order. Columns first, as there. */
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/cudasim/runtime.h"

struct cublasLtContext {
    int device;
};

struct cublasLtMatmulDescOpaque {
    cublasComputeType_t compute;
    cudaDataType scale;
    cublasOperation_t transpose_a, transpose_b;
    cublasLtEpilogue_t epilogue;
    const void *bias;
    cudaDataType bias_type;
    void *aux;
    int64_t aux_ld, aux_stride, bias_stride;
    cudaDataType aux_type;
};

struct cublasLtMatrixLayoutOpaque {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld;
    int32_t batches;
    int64_t stride;
    cublasLtOrder_t order;
};

struct cublasLtMatmulPreferenceOpaque {
    uint64_t workspace_bytes;
};

namespace cudasim
{

enum { CHUNK = 256 };

static cublasStatus_t enter_blas(const char *function)
{
    if (const int code = injected(function, CUBLAS_STATUS_EXECUTION_FAILED))
        return static_cast<cublasStatus_t>(code);
    return CUBLAS_STATUS_SUCCESS;
}

static size_t bytes_of(cudaDataType type)
{
    return type == CUDA_R_64F ? 8 : type == CUDA_R_32F || type == CUDA_R_32I ? 4 : 2;
}

static float load(const void *from, cudaDataType type, size_t at)
{
    return type == CUDA_R_32F ? static_cast<const float *>(from)[at]
                              : static_cast<float>(static_cast<const __nv_bfloat16 *>(from)[at]);
}

static void store(void *to, cudaDataType type, size_t at, float value)
{
    if (type == CUDA_R_32F)
        static_cast<float *>(to)[at] = value;
    else
        static_cast<__nv_bfloat16 *>(to)[at] = value;
}

static size_t index_of(const cublasLtMatrixLayoutOpaque &m, uint64_t row, uint64_t column)
{
    const size_t ld = static_cast<size_t>(m.ld);
    return m.order == CUBLASLT_ORDER_COL ? column * ld + row : row * ld + column;
}

struct product {
    cublasLtMatmulDescOpaque desc;
    cublasLtMatrixLayoutOpaque a, b, c, d;
    const char *a_data, *b_data, *c_data;
    char *d_data;
    float alpha, beta;
    uint64_t m, n, k;
};

/* op(X)[rows, columns] of one batch as floats, row by row. */
static std::vector<float> unpack(const cublasLtMatrixLayoutOpaque &x, const char *data, cublasOperation_t op,
                                 uint64_t rows, uint64_t columns)
{
    std::vector<float> out(rows * columns);
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < columns; c++)
            out[r * columns + c] = load(data, x.type, op == CUBLAS_OP_N ? index_of(x, r, c) : index_of(x, c, r));
    return out;
}

static double gelu_gate(double x)
{
    return 1 / (1 + exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static double gelu_gradient(double x)
{
    const double gate = gelu_gate(x);
    return gate + x * gate * (1 - gate) * 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

static float finish(const product &p, int batch, uint64_t row, uint64_t column, float sum)
{
    const cublasLtMatmulDescOpaque &desc = p.desc;
    const int epilogue = desc.epilogue;
    if (epilogue & CUBLASLT_EPILOGUE_BIAS)
        sum += load(desc.bias, desc.bias_type, row + static_cast<size_t>(batch * desc.bias_stride));
    const size_t aux = static_cast<size_t>(batch * desc.aux_stride) + column * static_cast<size_t>(desc.aux_ld) + row;
    if (epilogue == CUBLASLT_EPILOGUE_DGELU)
        return static_cast<float>(sum * gelu_gradient(load(desc.aux, desc.aux_type, aux)));
    if (!(epilogue & CUBLASLT_EPILOGUE_GELU))
        return sum;
    if (epilogue & 128)
        store(desc.aux, desc.aux_type, aux, sum);
    return static_cast<float>(sum * gelu_gate(sum));
}

static void multiply(const product &p, int batch)
{
    const char *a = p.a_data + static_cast<size_t>(batch * p.a.stride) * bytes_of(p.a.type);
    const char *b = p.b_data + static_cast<size_t>(batch * p.b.stride) * bytes_of(p.b.type);
    const char *c = p.c_data + static_cast<size_t>(batch * p.c.stride) * bytes_of(p.c.type);
    char *d = p.d_data + static_cast<size_t>(batch * p.d.stride) * bytes_of(p.d.type);
    /* the rows of A^T and of op(B)^T: the inner loop runs over m, which lies contiguous */
    const std::vector<float> left =
        unpack(p.a, a, p.desc.transpose_a == CUBLAS_OP_N ? CUBLAS_OP_T : CUBLAS_OP_N, p.k, p.m);
    const std::vector<float> right = unpack(p.b, b, p.desc.transpose_b, p.k, p.n);
    std::vector<float> sum(p.m), part(p.m);
    for (uint64_t j = 0; j < p.n; j++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (uint64_t first = 0; first < p.k; first += CHUNK) {
            std::fill(part.begin(), part.end(), 0.0f);
            for (uint64_t i = first; i < std::min<uint64_t>(p.k, first + CHUNK); i++) {
                const float *row = &left[i * p.m], factor = right[i * p.n + j];
                for (uint64_t r = 0; r < p.m; r++)
                    part[r] = __builtin_fmaf(row[r], factor, part[r]);
            }
            for (uint64_t r = 0; r < p.m; r++)
                sum[r] = first == 0 ? part[r] : sum[r] + part[r];
        }
        for (uint64_t r = 0; r < p.m; r++) {
            float value = p.alpha == 1.0f ? sum[r] : p.alpha * sum[r];
            if (p.beta != 0.0f)
                value += p.beta * load(c, p.c.type, index_of(p.c, r, j));
            store(d, p.d.type, index_of(p.d, r, j), finish(p, batch, r, j, value));
        }
    }
}

static bool known_type(cudaDataType type)
{
    return type == CUDA_R_32F || type == CUDA_R_16BF;
}

static cublasStatus_t shape(product *p)
{
    const bool ta = p->desc.transpose_a != CUBLAS_OP_N, tb = p->desc.transpose_b != CUBLAS_OP_N;
    p->m = ta ? p->a.columns : p->a.rows;
    p->k = ta ? p->a.rows : p->a.columns;
    p->n = tb ? p->b.rows : p->b.columns;
    if ((tb ? p->b.columns : p->b.rows) != p->k || p->d.rows != p->m || p->d.columns != p->n || p->c.rows != p->m ||
        p->c.columns != p->n || p->a.batches != p->d.batches || p->b.batches != p->d.batches)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const cublasLtMatrixLayoutOpaque *x : {&p->a, &p->b, &p->c, &p->d}) {
        if (!known_type(x->type))
            return CUBLAS_STATUS_NOT_SUPPORTED;
        if (x->ld < static_cast<int64_t>(x->order == CUBLASLT_ORDER_COL ? x->rows : x->columns))
            return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (p->a.type != p->b.type || p->desc.scale != CUDA_R_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

static bool supported(cublasLtEpilogue_t e)
{
    return e == CUBLASLT_EPILOGUE_DEFAULT || e == CUBLASLT_EPILOGUE_BIAS || e == CUBLASLT_EPILOGUE_GELU ||
           e == CUBLASLT_EPILOGUE_GELU_BIAS || e == CUBLASLT_EPILOGUE_GELU_AUX ||
           e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || e == CUBLASLT_EPILOGUE_DGELU;
}

template <typename T> cublasStatus_t take(T *field, const void *value, size_t size)
{
    if (size != sizeof *field)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(field, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace cudasim

using namespace cudasim;

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "the GPU program failed to execute";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "the functionality requested is not supported";
    default:
        return "an internal operation failed";
    }
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    return cublasLtGetStatusString(status);
}

size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    if (const cublasStatus_t error = enter_blas("cublasLtCreate"))
        return error;
    if (device_count() == 0)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new cublasLtContext{device_here().index};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType scale)
{
    *desc = new cublasLtMatmulDescOpaque{};
    (*desc)->compute = compute;
    (*desc)->scale = scale;
    (*desc)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    /* what cublasLt takes for granted: the type of D, which is fp32 here unless it is said otherwise */
    (*desc)->bias_type = (*desc)->aux_type = CUDA_R_32F;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    delete desc;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size)
{
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return take(&d->transpose_a, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return take(&d->transpose_b, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return take(&d->epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return take(&d->bias, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return take(&d->bias_type, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE:
        return take(&d->bias_stride, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return take(&d->aux, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return take(&d->aux_ld, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE:
        return take(&d->aux_stride, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
        return take(&d->aux_type, value, size);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
        return CUBLAS_STATUS_SUCCESS;
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld)
{
    *layout = new cublasLtMatrixLayoutOpaque{type, rows, columns, ld, 1, 0, CUBLASLT_ORDER_COL};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t size)
{
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        return take(&l->order, value, size);
    case CUBLASLT_MATRIX_LAYOUT_LD:
        return take(&l->ld, value, size);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return take(&l->batches, value, size);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return take(&l->stride, value, size);
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    *preference = new cublasLtMatmulPreferenceOpaque{};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t size)
{
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return take(&p->workspace_bytes, value, size);
    return size == sizeof(uint32_t) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t, int requested,
                                              cublasLtMatmulHeuristicResult_t *results, int *ret_count)
{
    if (const cublasStatus_t error = enter_blas("cublasLtMatmulAlgoGetHeuristic"))
        return error;
    product p = {*desc, *a, *b, *c, *d, nullptr, nullptr, nullptr, nullptr, 1, 0, 0, 0, 0};
    *ret_count = 0;
    if (requested < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (const cublasStatus_t error = shape(&p))
        return error;
    if (!supported(desc->epilogue))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    memset(results, 0, sizeof *results);
    results->algo.data[0] = 66; /* an id like any other; no split of k */
    results->algo.data[2] = 1;
    *ret_count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void *value,
                                                    size_t size, size_t *ret_written)
{
    const size_t needed =
        attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID
            ? sizeof(uint16_t)
            : sizeof(uint32_t);
    const uint32_t word = attribute < 8 ? static_cast<uint32_t>(algo->data[attribute]) : 0;
    if (ret_written)
        *ret_written = needed;
    if (size == 0)
        return CUBLAS_STATUS_SUCCESS;
    if (size < needed)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, &word, needed);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, const void *value,
                                                    size_t size)
{
    uint32_t word = 0;
    if (size > sizeof word || attribute >= 8)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&word, value, size);
    algo->data[attribute] = word;
    return CUBLAS_STATUS_SUCCESS;
}

/* The bytes that a product touches lie in device memory. */
static bool reachable(const cublasLtMatrixLayoutOpaque &x, const void *data)
{
    const uint64_t lines = x.order == CUBLASLT_ORDER_COL ? x.columns : x.rows;
    const uint64_t line = x.order == CUBLASLT_ORDER_COL ? x.rows : x.columns;
    const uint64_t last = static_cast<uint64_t>(x.batches - 1) * static_cast<uint64_t>(x.stride);
    if (lines == 0 || line == 0)
        return true;
    return is_device_range(data, (last + (lines - 1) * static_cast<uint64_t>(x.ld) + line) * bytes_of(x.type));
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *, void *workspace,
                              size_t workspace_size, cudaStream_t stream)
{
    if (const cublasStatus_t error = enter_blas("cublasLtMatmul"))
        return error;
    product p = {*desc,
                 *a_layout,
                 *b_layout,
                 *c_layout,
                 *d_layout,
                 static_cast<const char *>(a),
                 static_cast<const char *>(b),
                 static_cast<const char *>(c),
                 static_cast<char *>(d),
                 *static_cast<const float *>(alpha),
                 *static_cast<const float *>(beta),
                 0,
                 0,
                 0};
    if (const cublasStatus_t error = shape(&p))
        return error;
    if (!supported(desc->epilogue))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const int epilogue = desc->epilogue;
    if (!handle || !reachable(p.a, a) || !reachable(p.b, b) || (p.beta != 0.0f && !reachable(p.c, c)) ||
        !reachable(p.d, d) || (workspace_size && !is_device_range(workspace, workspace_size)) ||
        ((epilogue & CUBLASLT_EPILOGUE_BIAS) && !is_device_range(desc->bias, p.m * bytes_of(desc->bias_type))) ||
        ((epilogue & 128) && (desc->aux_ld < static_cast<int64_t>(p.m) || !is_device_range(desc->aux, p.m))))
        return CUBLAS_STATUS_INVALID_VALUE;
    const cudaError_t error = enqueue(stream, [p] {
        for (int batch = 0; batch < p.d.batches; batch++)
            multiply(p, batch);
        return cudaSuccess;
    });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
