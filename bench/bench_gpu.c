/* Training step of a GPT-2 on one GPU: tokens per second, MFU, each kernel over its floor, and the copy of a
 * checkpoint.
 *
 * usage: bench_gpu [--name N] [--layers L] [--heads H] [--channels C] [--vocab V] [--length T] [--micro B]
 *                  [--accumulate A] [--steps K] [--repeats R] [--copy-mib M] [--type bf16|fp32] [--out FOLDER]
 *
 * A step is A micro-batches of forward and backward, the gradient norm and AdamW, through the model and the kernels
 * that workers train with; exchanges, data and checkpoints are not in it. Times are of the host's clock around work
 * that was waited for; median of K steps after two for warming up. --micro is halved until the activations fit.
 *
 * MFU is tokens per second times (6 N + 12 L C T) (Chowdhery et al., arXiv 2204.02311, appendix B; N without positions)
 * over the dense rate of the GPU's data sheet. A kernel's floor is the larger of its bytes over the rate of a copy on
 * the device, measured here, and its FLOPs over the data sheet's rate (kernels/cuda/cost.h says what is counted).
 * --out: writes FOLDER/rows (for a table, by tabs) and FOLDER/json (objects); else rows go to the standard output. */
#include "bench/bench_gpu.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/fmath.h"
#include "common/rng.h"
#include "plan/cluster.h"

enum { STEPS_MAX = 1000, WARM_STEPS = 2, MIB = 1 << 20 };

void bench_stop_if(bool failed, const char *what)
{
    if (!failed)
        return;
    fprintf(stderr, "bench_gpu: %s\n", what);
    exit(1);
}

double bench_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void *bench_memory(const struct bench_state *st, size_t size_bytes)
{
    struct mu_error err = {0};
    void *memory;
    bench_stop_if(mu_device_allocate(st->device, MU_MEMORY_DEVICE, size_bytes, &err, &memory) != MU_OK, err.text);
    return memory;
}

void bench_wait(const struct bench_state *st)
{
    bench_stop_if(mu_pool_wait(st->pool) != MU_OK, mu_device_trouble(st->device));
}

/* ---- the machine ---- */

/* By what the driver calls it; others than these boards have other rates. */
static void find_peak(struct bench_state *st)
{
    static const char *const boards[][2] = {{"A100-SXM4-80GB", "a100-80g"},
                                            {"H100 80GB HBM3", "h100-sxm"},
                                            {"NVIDIA H200", "h200-sxm"},
                                            {"NVIDIA B200", "b200-sxm"}};
    struct cudaDeviceProp properties;
    bench_stop_if(cudaGetDeviceProperties(&properties, 0) != cudaSuccess, "the GPU does not say what it is");
    for (size_t i = 0; i < sizeof boards / sizeof boards[0]; i++) {
        if (!strstr(properties.name, boards[i][0]) || strstr(properties.name, "NVL"))
            continue;
        st->peak_of = boards[i][1];
        st->peak = mu_device_type_named(st->peak_of)->flops_bf16;
    }
}

static void measure_copy(const struct bench_settings *s, struct bench_state *st)
{
    size_t bytes = (size_t)s->copy_mib * MIB;
    void *from = bench_memory(st, bytes), *to = bench_memory(st, bytes);
    double best = 0;
    for (uint32_t i = 0; i < s->repeats + 1; i++) {
        double start = bench_now_s();
        bench_stop_if(mu_device_copy(st->device, to, from, bytes) != MU_OK, mu_device_trouble(st->device));
        bench_wait(st);
        double rate = 2 * (double)bytes / (bench_now_s() - start);
        best = rate > best ? rate : best;
    }
    st->copy_rate = best;
    mu_device_release(st->device, MU_MEMORY_DEVICE, from, bytes);
    mu_device_release(st->device, MU_MEMORY_DEVICE, to, bytes);
    fprintf(st->rows, "%s copy\t%.0f GB/s\ton the device, read and written: what memory-bound floors are of\n", s->name,
            best * 1e-9);
    fprintf(st->json, ",{\"measure\":\"copy\",\"model\":\"%s\",\"bytes_per_second\":%.6g}", s->name, best);
}

/* ---- the model ---- */

static void make_model(struct bench_settings *s, struct bench_state *st)
{
    struct mu_error err = {0};
    struct mu_model_config config = {.family = MU_FAMILY_GPT2,
                                     .layers = s->layers,
                                     .heads = s->heads,
                                     .channels = s->channels,
                                     .context = s->length,
                                     .vocab = s->vocab,
                                     .slices = 1};
    enum mu_status status;
    mu_model_config_resolve(&config);
    mu_model_spec_init(&st->spec, &config);
    size_t bytes = (size_t)st->spec.flat_size * sizeof(float);
    float **flats[] = {&st->params, &st->grads, &st->m, &st->v};
    for (size_t i = 0; i < 4; i++)
        *flats[i] = bench_memory(st, bytes);
    for (;; s->micro /= 2) {
        struct mu_model_options options = {.micro = s->micro, .length = s->length, .accumulate = s->accumulate};
        status = mu_model_new(&st->spec, &options, st->pool, &err, &st->model);
        if (status != MU_ERR_NO_MEMORY || s->micro == 1)
            break;
    }
    bench_stop_if(status != MU_OK, err.text);
    bench_stop_if(mu_model_init_parameters(&st->spec, st->pool, 1, NULL, 0, st->params) != MU_OK, "no parameters");
    size_t tokens = (size_t)s->micro * s->length + 1;
    st->tokens = malloc(tokens * sizeof *st->tokens);
    bench_stop_if(!st->tokens, "out of memory");
    uint64_t random = 1;
    for (size_t i = 0; i < tokens; i++)
        st->tokens[i] = (int32_t)(mu_splitmix64(&random) % s->vocab);
}

static double step(const struct bench_settings *s, struct bench_state *st, uint64_t number, double *ret_loss)
{
    double start = bench_now_s(), loss = 0;
    for (uint32_t i = 0; i < s->accumulate; i++) {
        struct mu_micro_batch batch = {
            .tokens = st->tokens, .targets = st->tokens + 1, .index = i, .count = s->accumulate};
        double sum = 0;
        batch.loss_divisor = (uint64_t)s->micro * s->length * s->accumulate;
        bench_stop_if(mu_model_forward_backward(st->model, &batch, st->params, st->grads, &sum) != MU_OK,
                      "the step failed");
        loss += sum / (double)batch.loss_divisor;
    }
    struct mu_exact_sum squares;
    mu_exact_sum_init(&squares);
    bench_stop_if(mu_kernel_square_sum(st->pool, (size_t)st->spec.flat_size, st->grads, &squares) != MU_OK,
                  "the norm failed");
    struct mu_adamw adamw =
        mu_adamw_at(1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, mu_fmath_sqrt(mu_exact_sum_round(&squares)), number);
    bench_stop_if(mu_model_update(&st->spec, st->pool, &adamw, 0, st->spec.flat_size, st->params, st->m, st->v,
                                  st->grads) != MU_OK,
                  "the update failed");
    bench_wait(st);
    *ret_loss = loss;
    return bench_now_s() - start;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double measure_steps(const struct bench_settings *s, struct bench_state *st)
{
    double seconds[STEPS_MAX], loss = 0, first = 0;
    for (uint32_t i = 0; i < WARM_STEPS; i++)
        step(s, st, i + 1, i == 0 ? &first : &loss);
    for (uint32_t i = 0; i < s->steps; i++)
        seconds[i] = step(s, st, i + WARM_STEPS + 1, &loss);
    bench_stop_if(!(loss < first), "the loss does not fall: what was timed is no training");
    qsort(seconds, s->steps, sizeof seconds[0], compare_doubles);
    double median = seconds[s->steps / 2], tokens = (double)s->micro * s->length * s->accumulate;
    double counted = (double)st->spec.parameter_count - (double)s->length * s->channels;
    double flops = tokens * (6 * counted + 12.0 * s->layers * s->channels * s->length), mfu = flops / median / st->peak;
    char utilisation[64] = "MFU not known: no data sheet of this GPU", number[32] = "null";
    if (st->peak > 0) {
        snprintf(utilisation, sizeof utilisation, "MFU %.1f %% of %s", 100 * mfu, st->peak_of);
        snprintf(number, sizeof number, "%.4f", mfu);
    }
    fprintf(st->rows, "%s step\t%.2f ms\t%.0f tokens/s, %s; B%u x T%u x %u, %s, loss %.3f\n", s->name, 1e3 * median,
            tokens / median, utilisation, s->micro, s->length, s->accumulate, s->bf16 ? "bf16" : "fp32", loss);
    fprintf(st->json,
            ",{\"measure\":\"step\",\"model\":\"%s\",\"parameters\":%llu,\"micro\":%u,\"length\":%u,\"accumulate\":%u,"
            "\"type\":\"%s\",\"step_s\":%.6g,\"tokens_per_second\":%.6g,\"mfu\":%s,\"loss\":%.6g}",
            s->name, (unsigned long long)st->spec.parameter_count, s->micro, s->length, s->accumulate,
            s->bf16 ? "bf16" : "fp32", median, tokens / median, number, loss);
    return median;
}

/* What a checkpoint holds a step up for: parameters and moments go into pinned memory of the host, as in
 * worker/snapshot.c. */
static void measure_snapshot(const struct bench_settings *s, struct bench_state *st)
{
    struct mu_error err = {0};
    size_t bytes = (size_t)st->spec.flat_size * sizeof(float);
    const float *flats[] = {st->params, st->m, st->v};
    void *pinned;
    double best = 1e30;
    if (mu_device_allocate(st->device, MU_MEMORY_PINNED, 3 * bytes, &err, &pinned) != MU_OK) {
        fprintf(st->rows, "%s checkpoint\tnot measured\t%s\n", s->name, err.text);
        return;
    }
    for (int repeat = 0; repeat < 2; repeat++) {
        double start = bench_now_s();
        for (int i = 0; i < 3; i++)
            bench_stop_if(mu_device_copy(st->device, (char *)pinned + (size_t)i * bytes, flats[i], bytes) != MU_OK,
                          mu_device_trouble(st->device));
        bench_wait(st);
        double seconds = bench_now_s() - start;
        best = seconds < best ? seconds : best;
    }
    mu_device_release(st->device, MU_MEMORY_PINNED, pinned, 3 * bytes);
    fprintf(st->rows, "%s checkpoint\t%.2f ms\tstall: the copy of %.2f GB to the host, %.1f GB/s\n", s->name,
            1e3 * best, 3e-9 * (double)bytes, 3e-9 * (double)bytes / best);
    fprintf(st->json, ",{\"measure\":\"checkpoint_stall\",\"model\":\"%s\",\"seconds\":%.6g,\"bytes\":%zu}", s->name,
            best, 3 * bytes);
}

/* ---- options ---- */

static FILE *open_in(const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    bench_stop_if(!file, "--out: cannot write there");
    return file;
}

static void parse(int argc, char **argv, struct bench_settings *s, struct bench_state *st)
{
    const struct {
        const char *name;
        uint32_t *value;
    } numbers[] = {{"--layers", &s->layers},         {"--heads", &s->heads},   {"--channels", &s->channels},
                   {"--vocab", &s->vocab},           {"--length", &s->length}, {"--micro", &s->micro},
                   {"--accumulate", &s->accumulate}, {"--steps", &s->steps},   {"--repeats", &s->repeats},
                   {"--copy-mib", &s->copy_mib}};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        bool known = value[0] && (strcmp(argv[i], "--name") == 0 || strcmp(argv[i], "--out") == 0);
        if (known && argv[i][2] == 'n') {
            s->name = value;
        } else if (known) {
            st->rows = open_in(value, "rows");
            st->json = open_in(value, "json");
        } else if (strcmp(argv[i], "--type") == 0) {
            s->bf16 = strcmp(value, "bf16") == 0;
            known = s->bf16 || strcmp(value, "fp32") == 0;
        }
        for (size_t j = 0; j < sizeof numbers / sizeof numbers[0] && !known; j++) {
            if (strcmp(argv[i], numbers[j].name) != 0)
                continue;
            *numbers[j].value = (uint32_t)strtoul(value, NULL, 10);
            known = *numbers[j].value > 0;
        }
        bench_stop_if(!known, "usage: bench_gpu [--name N] [--layers L] [--heads H] [--channels C] [--vocab V] "
                              "[--length T] [--micro B] [--accumulate A] [--steps K] [--repeats R] [--copy-mib M] "
                              "[--type bf16|fp32] [--out FOLDER]");
    }
    bench_stop_if(s->steps > STEPS_MAX, "--steps: at most 1000");
    bench_stop_if(s->channels % s->heads > 0, "--channels: a multiple of --heads");
}

int main(int argc, char **argv)
{
    struct bench_settings s = {.name = "gpt2-124m",
                               .layers = 12,
                               .heads = 12,
                               .channels = 768,
                               .vocab = 50257,
                               .length = 1024,
                               .micro = 32,
                               .accumulate = 4,
                               .steps = 9,
                               .repeats = 10,
                               .copy_mib = 1024,
                               .bf16 = true};
    struct bench_state st = {.rows = stdout, .json = NULL};
    struct mu_error err = {0};
    parse(argc, argv, &s, &st);
    if (!st.json)
        bench_stop_if(!(st.json = fopen("/dev/null", "w")), "no /dev/null");
    bench_stop_if(mu_device_open_cuda(0, 0, &err, &st.device) != MU_OK, err.text);
    bench_stop_if(mu_device_compute(st.device, s.bf16 ? MU_DTYPE_BF16 : MU_DTYPE_FP32, &err) != MU_OK, err.text);
    bench_stop_if(mu_pool_new(1, &err, &st.pool) != MU_OK, err.text);
    mu_pool_bind(st.pool, st.device);
    find_peak(&st);
    measure_copy(&s, &st);
    make_model(&s, &st);
    double step_s = measure_steps(&s, &st);
    measure_snapshot(&s, &st);
    mu_model_free(st.model);
    bench_kernels(&s, &st, step_s);
    free(st.tokens);
    size_t bytes = (size_t)st.spec.flat_size * sizeof(float);
    float *flats[] = {st.params, st.grads, st.m, st.v};
    for (size_t i = 0; i < 4; i++)
        mu_device_release(st.device, MU_MEMORY_DEVICE, flats[i], bytes);
    mu_pool_free(st.pool);
    mu_device_close(st.device);
    bool written = fflush(st.rows) == 0 && fflush(st.json) == 0;
    bench_stop_if(!written, "the results cannot be written");
    return 0;
}
