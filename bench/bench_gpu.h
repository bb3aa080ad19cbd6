/* What bench_gpu measures, and how it is told: see bench_gpu.c. */
#ifndef MU_BENCH_GPU_H
#define MU_BENCH_GPU_H

#include <stdio.h>

#include "kernels/device.h"
#include "kernels/pool.h"
#include "worker/model.h"

struct bench_settings {
    const char *name;
    uint32_t layers, heads, channels, vocab, length, micro, accumulate, steps, repeats, copy_mib;
    bool bf16;
};

/* A model on a GPU, ready to step. All but tokens is device memory; the arrays of the model's size may be scribbled on
 * by whoever measures after the last step. */
struct bench_state {
    struct mu_device *device;
    struct mu_pool *pool;
    struct mu_model_spec spec;
    struct mu_model *model;
    float *params, *grads, *m, *v;
    int32_t *tokens;        /* host */
    double copy_rate, peak; /* measured bytes/s, read and written together; FLOP/s of the data sheet, 0: not known */
    const char *peak_of;    /* the data sheet's name */
    FILE *rows, *json;      /* for the table: what, measured, remark, by tabs; objects, each with a comma before it */
};

void bench_stop_if(bool failed, const char *what);
double bench_now_s(void);
void *bench_memory(const struct bench_state *st, size_t size_bytes);
void bench_wait(const struct bench_state *st);

/* Each kernel of a step at the model's shapes, beside what it must move and compute at least. step_s: of a whole one.
 */
void bench_kernels(const struct bench_settings *s, struct bench_state *st, double step_s);

#endif
