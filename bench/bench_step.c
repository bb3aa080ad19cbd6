/* Training step of GPT-2 124M on one worker against what dnnl_sgemm allows.
 *
 * usage: bench_step [--micro B] [--length T] [--threads N] [--steps K] [--layers L] [--accumulate A] [--slices S]
 *                   [--family gpt2|llama] [--recompute none|selective|full] [--floor yes|no]
 * Llama: the same channels, heads and vocabulary, and an MLP of 2048, so that a layer has as many weights and the step
 * as many operations in products; its head is a tensor of its own. A step is A micro-batches of forward and backward,
 * the gradient norm and AdamW. Prints phases, tokens per second (median of K steps after one for warming up), and the
 * floor: the time dnnl_sgemm (oneDNN, the same number of threads) needs for the model's matrix products alone, each
 * measured at its own shape. Attention, norms, softmax and the optimizer count against us. */
#include <dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "common/fmath.h"
#include "common/rng.h"
#include "kernels/arena.h"
#include "worker/model.h"

enum {
    STEPS_MAX = 1000,
    SGEMM_REPEATS = 5,
    VOCAB = 50257,
    CONTEXT = 1024,
    CHANNELS = 768,
    HEADS = 12,
    LLAMA_HIDDEN = 2048
};

struct settings {
    uint32_t micro, length, threads, steps, layers, accumulate, slices;
    uint32_t family, recompute, floor; /* enum mu_model_family, enum mu_recompute, floor_words */
};

/* Values that are words; a word's place is the value. */
static const char *const family_words[] = {"", "gpt2", "llama", NULL};
static const char *const recompute_words[] = {"", "none", "selective", "full", NULL};
static const char *const floor_words[] = {"no", "yes", NULL};
_Static_assert(MU_FAMILY_GPT2 == 1 && MU_FAMILY_LLAMA == 2 && MU_RECOMPUTE_NONE == 1 && MU_RECOMPUTE_SELECTIVE == 2 &&
                   MU_RECOMPUTE_FULL == 3,
               "places of words");

struct times {
    double forward, backward, norm, optimizer, total;
};

static void stop_if(bool failed, const char *what)
{
    if (!failed)
        return;
    fprintf(stderr, "bench_step: %s\n", what);
    exit(1);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds of the best of a few calls of dnnl_sgemm at one shape, on the given operands. */
static double sgemm_seconds(char ta, char tb, uint32_t m, uint32_t n, uint32_t k, float beta, const float *a,
                            const float *b, float *c)
{
    double best = 1e30;
    int64_t lda = ta == 'T' ? m : k, ldb = tb == 'T' ? k : n;
    for (int i = 0; i < SGEMM_REPEATS; i++) {
        double start = now_s();
        stop_if(dnnl_sgemm(ta, tb, m, n, k, 1.0f, a, lda, b, ldb, beta, c, n) != dnnl_success, "dnnl_sgemm failed");
        double seconds = now_s() - start;
        best = seconds < best ? seconds : best;
    }
    return best;
}

/* Forward, input gradient and weight gradient of one linear layer. */
static double linear_seconds(uint32_t rows, uint32_t in, uint32_t out, float *x, float *y, float *w, double *flops)
{
    *flops += 3.0 * 2.0 * rows * in * out;
    return sgemm_seconds('N', 'N', rows, out, in, 0.0f, x, w, y) +
           sgemm_seconds('N', 'T', rows, in, out, 0.0f, y, w, x) +
           sgemm_seconds('T', 'N', in, out, rows, 1.0f, x, y, w);
}

/* The same for the head, in pieces of MU_HEAD_TOKENS tokens as the model does it. */
static double head_seconds(uint32_t rows, float *x, float *y, float *w, double *flops)
{
    double seconds = 0;
    for (uint32_t row = 0; row < rows; row += MU_HEAD_TOKENS) {
        uint32_t piece = rows - row < MU_HEAD_TOKENS ? rows - row : MU_HEAD_TOKENS;
        *flops += 3.0 * 2.0 * piece * CHANNELS * VOCAB;
        seconds += sgemm_seconds('N', 'T', piece, VOCAB, CHANNELS, 0.0f, x, w, y) +
                   sgemm_seconds('N', 'N', piece, CHANNELS, VOCAB, 0.0f, y, w, x) +
                   sgemm_seconds('T', 'N', VOCAB, CHANNELS, piece, 1.0f, y, x, w);
    }
    return seconds;
}

static double floor_seconds(const struct settings *s, double *flops)
{
    uint32_t rows = s->micro * s->length;
    struct mu_arena *arena;
    size_t x = (size_t)rows * 2 * LLAMA_HIDDEN, w = (size_t)VOCAB * CHANNELS, y = (size_t)MU_HEAD_TOKENS * VOCAB;
    y = y > x ? y : x;
    stop_if(mu_arena_new((x + y + w) * sizeof(float) + 3 * MU_ARENA_ALIGN, NULL, &arena) != MU_OK, "out of memory");
    float *px = mu_arena_take(arena, x * sizeof(float)), *py = mu_arena_take(arena, y * sizeof(float)),
          *pw = mu_arena_take(arena, w * sizeof(float));
    *flops = 0;
    bool llama = s->family == MU_FAMILY_LLAMA;
    uint32_t up = llama ? 2 * LLAMA_HIDDEN : 4 * CHANNELS, down = llama ? LLAMA_HIDDEN : 4 * CHANNELS;
    double seconds = linear_seconds(rows, CHANNELS, 3 * CHANNELS, px, py, pw, flops) +
                     linear_seconds(rows, CHANNELS, CHANNELS, px, py, pw, flops) +
                     linear_seconds(rows, CHANNELS, up, px, py, pw, flops) +
                     linear_seconds(rows, down, CHANNELS, px, py, pw, flops);
    *flops *= s->layers;
    seconds = seconds * s->layers + head_seconds(rows, px, py, pw, flops);
    mu_arena_free(arena);
    *flops *= s->accumulate;
    return seconds * s->accumulate;
}

struct state {
    struct mu_model_spec spec;
    struct mu_pool *pool;
    struct mu_model *model;
    struct mu_arena *arena;
    float *params, *grads, *m, *v;
    int32_t *tokens;
};

static struct state prepare(const struct settings *s)
{
    struct state st = {0};
    struct mu_error err = {0};
    struct mu_model_config config = {.family = (enum mu_model_family)s->family,
                                     .layers = s->layers,
                                     .heads = HEADS,
                                     .channels = CHANNELS,
                                     .context = CONTEXT,
                                     .vocab = VOCAB,
                                     .hidden = s->family == MU_FAMILY_LLAMA ? LLAMA_HIDDEN : 0,
                                     .slices = s->slices};
    mu_model_config_resolve(&config);
    mu_model_spec_init(&st.spec, &config);
    size_t bytes = (size_t)st.spec.flat_size * sizeof(float), tokens = (size_t)s->micro * s->length + 1;
    struct mu_model_options options = {.micro = s->micro,
                                       .length = s->length,
                                       .accumulate = s->accumulate,
                                       .recompute = (enum mu_recompute)s->recompute};
    stop_if(mu_pool_new(s->threads, &err, &st.pool) != MU_OK, err.text);
    stop_if(mu_model_new(&st.spec, &options, st.pool, &err, &st.model) != MU_OK, err.text);
    stop_if(mu_arena_new(4 * bytes + tokens * sizeof(int32_t) + 5 * MU_ARENA_ALIGN, &err, &st.arena) != MU_OK,
            err.text);
    float **buffers[] = {&st.params, &st.grads, &st.m, &st.v};
    for (size_t i = 0; i < 4; i++)
        *buffers[i] = mu_arena_take(st.arena, bytes);
    st.tokens = mu_arena_take(st.arena, tokens * sizeof(int32_t));
    stop_if(mu_model_init_parameters(&st.spec, st.pool, 1, NULL, 0, st.params) != MU_OK, "initial parameters failed");
    uint64_t random = 1;
    for (size_t i = 0; i < tokens; i++)
        st.tokens[i] = (int32_t)(mu_splitmix64(&random) % VOCAB);
    return st;
}

static struct times step(const struct settings *s, struct state *st, uint64_t number, double *loss)
{
    struct times t = {0};
    double start = now_s();
    *loss = 0;
    for (uint32_t i = 0; i < s->accumulate; i++) {
        struct mu_micro_batch batch = {
            .tokens = st->tokens, .targets = st->tokens + 1, .index = i, .count = s->accumulate};
        uint64_t forward_ns, backward_ns;
        double sum = 0;
        batch.loss_divisor = (uint64_t)s->micro * s->length * s->accumulate;
        stop_if(mu_model_forward_backward(st->model, &batch, st->params, st->grads, &sum) != MU_OK, "step failed");
        mu_model_times(st->model, &forward_ns, &backward_ns);
        t.forward += 1e-9 * (double)forward_ns;
        t.backward += 1e-9 * (double)backward_ns;
        *loss += sum / (double)batch.loss_divisor;
    }
    double computed = now_s();
    struct mu_exact_sum squares;
    mu_exact_sum_init(&squares);
    stop_if(mu_kernel_square_sum(st->pool, (size_t)st->spec.flat_size, st->grads, &squares) != MU_OK, "norm failed");
    double norm = mu_fmath_sqrt(mu_exact_sum_round(&squares)), normed = now_s();
    struct mu_adamw adamw = mu_adamw_at(1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, norm, number);
    stop_if(mu_model_update(&st->spec, st->pool, &adamw, 0, st->spec.flat_size, st->params, st->m, st->v, st->grads) !=
                MU_OK,
            "update failed");
    double end = now_s();
    t.norm = normed - computed;
    t.optimizer = end - normed;
    t.total = end - start;
    return t;
}

static bool parse_value(const char *text, const char *const *words, uint32_t *ret_value)
{
    if (!words) {
        *ret_value = (uint32_t)strtoul(text, NULL, 10);
        return *ret_value > 0;
    }
    for (uint32_t i = 0; words[i]; i++) {
        if (words[i][0] && strcmp(words[i], text) == 0) {
            *ret_value = i;
            return true;
        }
    }
    return false;
}

static struct settings parse(int argc, char **argv)
{
    struct settings s = {.micro = 4,
                         .length = 256,
                         .threads = mu_pool_default_threads(),
                         .steps = 5,
                         .layers = 12,
                         .accumulate = 1,
                         .slices = 1,
                         .family = MU_FAMILY_GPT2,
                         .recompute = MU_RECOMPUTE_NONE,
                         .floor = 1};
    const struct {
        const char *name;
        uint32_t *value;
        const char *const *words; /* NULL: a number */
    } options[] = {{"--micro", &s.micro, NULL},
                   {"--length", &s.length, NULL},
                   {"--threads", &s.threads, NULL},
                   {"--steps", &s.steps, NULL},
                   {"--layers", &s.layers, NULL},
                   {"--accumulate", &s.accumulate, NULL},
                   {"--slices", &s.slices, NULL},
                   {"--family", &s.family, family_words},
                   {"--recompute", &s.recompute, recompute_words},
                   {"--floor", &s.floor, floor_words}};
    for (int i = 1; i < argc; i += 2) {
        bool known = false;
        for (size_t j = 0; i + 1 < argc && j < sizeof options / sizeof options[0]; j++) {
            if (strcmp(argv[i], options[j].name) == 0)
                known = parse_value(argv[i + 1], options[j].words, options[j].value);
        }
        stop_if(!known, "usage: bench_step [--micro B] [--length T] [--threads N] [--steps K] [--layers L] "
                        "[--accumulate A] [--slices S] [--family gpt2|llama] [--recompute none|selective|full] "
                        "[--floor yes|no]");
    }
    stop_if(s.steps > STEPS_MAX, "--steps: at most 1000");
    return s;
}

static void print_floor(const struct settings *s, double tokens, double median)
{
    double flops = 0, floor = floor_seconds(s, &flops);
    printf("  floor       %8.1f ms  (matrix products alone in dnnl_sgemm: %.1f GF/s, %.1f tokens/s)\n", 1e3 * floor,
           1e-9 * flops / floor, tokens / floor);
    printf("  of floor    %8.1f %%\n", 100 * floor / median);
}

int main(int argc, char **argv)
{
    struct settings s = parse(argc, argv);
    char threads[16];
    snprintf(threads, sizeof threads, "%u", s.threads);
    setenv("OMP_NUM_THREADS", threads, 1); /* before oneDNN starts its threads */
    struct state st = prepare(&s);
    double tokens = (double)s.micro * s.length * s.accumulate, totals[STEPS_MAX], loss = 0;
    struct times sum = {0};
    step(&s, &st, 1, &loss);
    double begin_cpu_s = cpu_s();
    for (uint32_t i = 0; i < s.steps; i++) {
        struct times t = step(&s, &st, i + 2, &loss);
        totals[i] = t.total;
        sum.forward += t.forward;
        sum.backward += t.backward;
        sum.norm += t.norm;
        sum.optimizer += t.optimizer;
    }
    double spent_cpu_s = cpu_s() - begin_cpu_s;
    qsort(totals, s.steps, sizeof totals[0], compare_doubles);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage); /* before the floor allocates its own operands */
    double median = totals[s.steps / 2], count = s.steps;
    printf("%s %.0fM parameters, %u slices, recompute %s, B%u x T%u x %u, fp32, %u threads, %s kernels\n",
           s.family == MU_FAMILY_LLAMA ? "Llama" : "GPT-2", (double)st.spec.parameter_count * 1e-6, s.slices,
           recompute_words[s.recompute], s.micro, s.length, s.accumulate, s.threads, mu_isa_name(mu_isa_active()));
    printf("  step        %8.1f ms  (median of %u; loss %.4f)\n", 1e3 * median, s.steps, loss);
    printf("  forward     %8.1f ms\n  backward    %8.1f ms\n  norm        %8.1f ms\n  optimizer   %8.1f ms\n",
           1e3 * sum.forward / count, 1e3 * sum.backward / count, 1e3 * sum.norm / count, 1e3 * sum.optimizer / count);
    printf("  processor   %8.1f ms  (time of all threads, a step)\n", 1e3 * spent_cpu_s / count);
    printf("  speed       %8.1f tokens/s\n", tokens / median);
    if (s.floor)
        print_floor(&s, tokens, median);
    printf("  peak memory %8.1f MiB\n", (double)usage.ru_maxrss / 1024);
    mu_model_free(st.model);
    mu_arena_free(st.arena);
    mu_pool_free(st.pool);
    return 0;
}
