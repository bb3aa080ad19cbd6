#include "kernels/cuda/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SCRATCH_BYTES_MAX = 32 << 20 };

size_t mu_cuda_plan_scratch(const struct mu_cuda *cuda)
{
    size_t share = cuda->workspace_bytes / 8 / 256 * 256;
    return share < SCRATCH_BYTES_MAX ? share : (size_t)SCRATCH_BYTES_MAX;
}

enum mu_status mu_cuda_blas_status(struct mu_cuda *cuda, const char *what, cublasStatus_t status)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return MU_OK;
    return mu_fail(cuda->error.status == MU_OK ? &cuda->error : NULL,
                   status == CUBLAS_STATUS_ALLOC_FAILED ? MU_ERR_NO_MEMORY : MU_ERR_IO, "GPU %d, %s: %s", cuda->device,
                   what, cublasLtGetStatusString(status));
}

enum mu_status mu_cuda_plans_init(struct mu_cuda *cuda, struct mu_error *err)
{
    cublasStatus_t status = cublasLtCreate(&cuda->blas);
    if (status != CUBLAS_STATUS_SUCCESS)
        return mu_fail(err, MU_ERR_UNAVAILABLE, "GPU %d: cublasLt: %s", cuda->device, cublasLtGetStatusString(status));
    cuda->plans = (struct mu_cuda_plan *)calloc(MU_CUDA_PLANS_MAX, sizeof *cuda->plans);
    if (!cuda->plans)
        return mu_fail(err, MU_ERR_NO_MEMORY, "GPU %d: out of host memory", cuda->device);
    return MU_OK;
}

static void forget(struct mu_cuda_plan *plan)
{
    if (plan->desc)
        (void)cublasLtMatmulDescDestroy(plan->desc);
    cublasLtMatrixLayout_t layouts[] = {plan->a, plan->b, plan->c};
    for (cublasLtMatrixLayout_t layout : layouts)
        if (layout)
            (void)cublasLtMatrixLayoutDestroy(layout);
    *plan = {};
}

void mu_cuda_plans_fini(struct mu_cuda *cuda)
{
    for (uint32_t i = 0; cuda->plans && i < MU_CUDA_PLANS_MAX; i++)
        forget(&cuda->plans[i]);
    free(cuda->plans);
    if (cuda->blas)
        (void)cublasLtDestroy(cuda->blas);
    cuda->plans = NULL;
    cuda->blas = NULL;
}

template <typename T>
static void set(cublasStatus_t *status, cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T value)
{
    if (*status == CUBLAS_STATUS_SUCCESS)
        *status = cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value);
}

static cublasLtEpilogue_t epilogue_of(uint32_t epilogue)
{
    switch ((enum mu_epilogue)epilogue) {
    case MU_EPILOGUE_BIAS:
        return CUBLASLT_EPILOGUE_BIAS;
    case MU_EPILOGUE_BIAS_GELU:
        return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case MU_EPILOGUE_GELU_GRAD:
        return CUBLASLT_EPILOGUE_DGELU;
    default:
        return CUBLASLT_EPILOGUE_DEFAULT;
    }
}

/* cublasLt sees columns first: a row-major matrix is its own transpose there. So C^T = op(B)^T op(A)^T: our B is its A.
 */
static cublasStatus_t describe(struct mu_cuda_plan *plan)
{
    const struct plan_key *key = &plan->key;
    cublasStatus_t status = cublasLtMatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    set(&status, plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, key->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(&status, plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, key->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&plan->a, CUDA_R_16BF, key->transpose_b ? key->k : key->n,
                                            key->transpose_b ? key->n : key->k, key->ldb);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&plan->b, CUDA_R_16BF, key->transpose_a ? key->m : key->k,
                                            key->transpose_a ? key->k : key->m, key->lda);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&plan->c, CUDA_R_32F, key->n, key->m, (int64_t)key->ldc);
    return status;
}

static cublasStatus_t prefer(const struct mu_cuda *cuda, const struct plan_key *key,
                             cublasLtMatmulPreference_t preference)
{
    const size_t scratch = mu_cuda_plan_scratch(cuda);
    const uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                                 &scratch, sizeof scratch);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &no_reduction, sizeof no_reduction);
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t bytes;
    } alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 16},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 16},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key->aligned ? 16u : 4u},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key->aligned ? 16u : 4u},
    };
    for (size_t i = 0; i < sizeof alignments / sizeof alignments[0] && status == CUBLAS_STATUS_SUCCESS; i++)
        status = cublasLtMatmulPreferenceSetAttribute(preference, alignments[i].attribute, &alignments[i].bytes,
                                                      sizeof alignments[i].bytes);
    return status;
}

/* Asks for an algorithm with the epilogue, or without where there is none with it. */
static cublasStatus_t choose(struct mu_cuda *cuda, struct mu_cuda_plan *plan)
{
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulHeuristicResult_t result;
    if (status == CUBLAS_STATUS_SUCCESS)
        status = prefer(cuda, &plan->key, preference);
    const uint32_t epilogues[] = {plan->key.epilogue, MU_EPILOGUE_NONE};
    int found = 0;
    memset(&result, 0, sizeof result);
    for (size_t i = 0; i < 2 && status == CUBLAS_STATUS_SUCCESS && found == 0; i++) {
        const bool aux = epilogues[i] == MU_EPILOGUE_BIAS_GELU || epilogues[i] == MU_EPILOGUE_GELU_GRAD;
        set(&status, plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(epilogues[i]));
        if (aux)
            set(&status, plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)plan->key.ldaux);
        if (status != CUBLAS_STATUS_SUCCESS)
            break;
        status = cublasLtMatmulAlgoGetHeuristic(cuda->blas, plan->desc, plan->a, plan->b, plan->c, plan->c, preference,
                                                1, &result, &found);
        if (status == CUBLAS_STATUS_NOT_SUPPORTED && i == 0)
            status = CUBLAS_STATUS_SUCCESS;
        plan->fused = i == 0;
    }
    if (preference)
        (void)cublasLtMatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_SUCCESS && found == 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    plan->algo = result.algo;
    return status;
}

enum mu_status mu_cuda_plan_for(struct mu_cuda *cuda, const struct plan_key *key, struct mu_cuda_plan **ret_plan)
{
    for (uint32_t i = 0; i < MU_CUDA_PLANS_MAX; i++)
        if (memcmp(&cuda->plans[i].key, key, sizeof *key) == 0) {
            *ret_plan = &cuda->plans[i];
            return MU_OK;
        }
    struct mu_cuda_plan *plan = &cuda->plans[cuda->plan_count++ % MU_CUDA_PLANS_MAX]; /* the oldest makes room */
    forget(plan);
    plan->key = *key;
    cublasStatus_t status = describe(plan);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = choose(cuda, plan);
    if (status != CUBLAS_STATUS_SUCCESS) {
        forget(plan);
        return mu_cuda_blas_status(cuda, "choosing a matrix product", status);
    }
    *ret_plan = plan;
    return MU_OK;
}

/* ---- numeric identity ---- */

/* What cublasLt will run, as numbers. */
static enum mu_status hash_algorithm(struct mu_cuda *cuda, const struct mu_cuda_plan *plan, uint64_t *hash)
{
    static const cublasLtMatmulAlgoConfigAttributes_t attributes[] = {
        CUBLASLT_ALGO_CONFIG_ID,
        CUBLASLT_ALGO_CONFIG_TILE_ID,
        CUBLASLT_ALGO_CONFIG_STAGES_ID,
        CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
        CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
        CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
        CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
    };
    enum { COUNT = sizeof attributes / sizeof attributes[0] };
    uint32_t words[COUNT + 1] = {};
    for (size_t i = 0; i < COUNT; i++) {
        size_t written = 0;
        cublasStatus_t status =
            cublasLtMatmulAlgoConfigGetAttribute(&plan->algo, attributes[i], &words[i], sizeof words[i], &written);
        if (status != CUBLAS_STATUS_SUCCESS)
            return mu_cuda_blas_status(cuda, "asking for an algorithm's settings", status);
    }
    words[COUNT] = plan->fused;
    *hash = mu_xxh3_64(words, sizeof words, *hash);
    return MU_OK;
}

/* A linear layer of `in` to `out` channels: its forward product and the two of its backward pass. */
static enum mu_status hash_layer(struct mu_cuda *cuda, uint32_t rows, uint32_t in, uint32_t out,
                                 enum mu_epilogue epilogue, uint64_t *hash)
{
    const struct {
        uint32_t m, n, k;
        bool transpose_a, transpose_b, accumulate;
    } products[] = {
        {rows, out, in, false, false, false}, {rows, in, out, false, true, false}, {in, out, rows, true, false, true}};
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < 3 && status == MU_OK; i++) {
        struct plan_key key = {};
        struct mu_cuda_plan *plan;
        key.m = products[i].m;
        key.n = products[i].n;
        key.k = products[i].k;
        key.lda = ((products[i].transpose_a ? key.m : key.k) + 7) & ~7u;
        key.ldb = ((products[i].transpose_b ? key.k : key.n) + 7) & ~7u;
        key.ldc = key.n;
        key.transpose_a = products[i].transpose_a;
        key.transpose_b = products[i].transpose_b;
        key.accumulate = products[i].accumulate;
        key.epilogue = i == 0 ? epilogue : MU_EPILOGUE_NONE;
        key.ldaux = key.epilogue == MU_EPILOGUE_BIAS_GELU ? key.n : 0;
        key.aligned = key.n % 4 == 0;
        status = mu_cuda_plan_for(cuda, &key, &plan);
        if (status == MU_OK)
            status = hash_algorithm(cuda, plan, hash);
    }
    return status;
}

enum mu_status mu_cuda_plans_hash(struct mu_cuda *cuda, const struct mu_kernel_shapes *shapes, uint64_t *ret_hash)
{
    const uint32_t slices = shapes->slices ? shapes->slices : 1, rows = shapes->sequences * shapes->length;
    const uint32_t kv = shapes->kv_heads ? shapes->kv_heads : shapes->heads, head = shapes->channels / shapes->heads;
    const uint32_t hidden = shapes->hidden ? shapes->hidden : 4 * shapes->channels;
    const uint32_t qkv = (shapes->heads + 2 * kv) / slices * head, attention = shapes->channels / slices;
    const enum mu_epilogue bias = shapes->llama ? MU_EPILOGUE_NONE : MU_EPILOGUE_BIAS,
                           gelu = shapes->llama ? MU_EPILOGUE_NONE : MU_EPILOGUE_BIAS_GELU;
    uint64_t hash = 0;
    enum mu_status status = hash_layer(cuda, rows, shapes->channels, qkv, bias, &hash);
    if (status == MU_OK)
        status = hash_layer(cuda, rows, attention, shapes->channels, bias, &hash);
    if (status == MU_OK)
        status = hash_layer(cuda, rows, shapes->channels, (shapes->llama ? 2 : 1) * hidden / slices, gelu, &hash);
    if (status == MU_OK)
        status = hash_layer(cuda, rows, hidden / slices, shapes->channels, bias, &hash);
    if (status == MU_OK)
        *ret_hash = hash;
    return status;
}

void mu_cuda_plans_text(const struct mu_cuda *cuda, uint64_t hash, char *text, size_t size)
{
    int major = 0, minor = 0;
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device);
    (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, cuda->device);
    (void)snprintf(text, size, "cuda sm_%d%d bf16 1 cublasLt %zu algorithms %016llx", major, minor,
                   cublasLtGetVersion(), (unsigned long long)hash);
}
