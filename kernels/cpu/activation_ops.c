/* Drivers of the element-wise operations on rows: row biases, SwiGLU, rotary positions. */
#include "kernels/kernels.h"

#include "common/fmath.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/isa.h"

enum row_op { ROW_BIAS, ROW_SWIGLU_FORWARD, ROW_SWIGLU_BACKWARD, ROW_ROTARY };

struct row_run {
    const struct mu_isa_ops *ops;
    enum row_op op;
    uint32_t rows, of_task; /* rows in all, rows of one task */
    uint32_t width;         /* of the bias or the MLP */
    const float *in, *in2;
    float *out;
    /* rotary */
    uint32_t first_row, length, heads, head_channels;
    size_t stride;
    const float *cosines, *sines;
    bool inverse;
};

static void one_row(const struct row_run *r, uint32_t row)
{
    const size_t width = r->width, half = r->head_channels / 2;
    const size_t token = r->length ? (r->first_row + row) % r->length : 0;
    switch (r->op) {
    case ROW_BIAS:
        r->ops->add(width, r->out + row * width, r->in);
        break;
    case ROW_SWIGLU_FORWARD:
        r->ops->swiglu_forward(r->width, r->in + row * 2 * width, r->out + row * width);
        break;
    case ROW_SWIGLU_BACKWARD:
        r->ops->swiglu_backward(r->width, r->in + row * 2 * width, r->in2 + row * width, r->out + row * 2 * width);
        break;
    case ROW_ROTARY:
        r->ops->rotary_row(r->heads, r->head_channels, r->cosines + token * half, r->sines + token * half, r->inverse,
                           r->out + row * r->stride);
        break;
    }
}

static void row_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct row_run *r = arg;
    uint32_t first = task * r->of_task, end = r->rows - first < r->of_task ? r->rows : first + r->of_task;
    for (uint32_t row = first; row < end; row++)
        one_row(r, row);
}

/* `elements` in a row: decides how many rows make a task. */
static enum mu_status run_rows(struct mu_pool *pool, struct row_run *run, uint32_t elements)
{
    run->ops = mu_isa_ops();
    run->of_task = elements >= MU_SERIAL_ELEMENTS ? 1 : MU_SERIAL_ELEMENTS / (elements ? elements : 1);
    uint32_t tasks = run->rows / run->of_task + (run->rows % run->of_task ? 1 : 0);
    return mu_pool_run(pool, tasks, row_task, run);
}

enum mu_status mu_cpu_bias_add(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *bias, float *x)
{
    return run_rows(pool, &(struct row_run){.op = ROW_BIAS, .rows = rows, .width = n, .in = bias, .out = x}, n);
}

enum mu_status mu_cpu_swiglu_forward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                     float *y)
{
    return run_rows(pool,
                    &(struct row_run){.op = ROW_SWIGLU_FORWARD, .rows = rows, .width = hidden, .in = gate_up, .out = y},
                    hidden);
}

enum mu_status mu_cpu_swiglu_backward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                      const float *dy, float *d_gate_up)
{
    struct row_run run = {.op = ROW_SWIGLU_BACKWARD, .rows = rows, .width = hidden, .in = gate_up, .in2 = dy};
    run.out = d_gate_up;
    return run_rows(pool, &run, hidden);
}

void mu_kernel_rotary_table(uint32_t length, uint32_t head_channels, double base, float *cosines, float *sines)
{
    MU_ASSERT(head_channels % 2 == 0);
    uint32_t half = head_channels / 2;
    for (uint32_t i = 0; i < half; i++) {
        double frequency = mu_fmath_pow(base, -2.0 * (double)i / (double)head_channels);
        for (uint32_t token = 0; token < length; token++) {
            double angle = (double)token * frequency;
            cosines[(size_t)token * half + i] = (float)mu_fmath_cos(angle);
            sines[(size_t)token * half + i] = (float)mu_fmath_sin(angle);
        }
    }
}

enum mu_status mu_cpu_rotary(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length, uint32_t heads,
                             uint32_t head_channels, size_t stride, const float *cosines, const float *sines,
                             bool inverse, float *x)
{
    MU_ASSERT(head_channels % 2 == 0 && stride >= (size_t)heads * head_channels);
    struct row_run run = {.op = ROW_ROTARY, .rows = rows, .first_row = first_row, .length = length, .heads = heads};
    run.head_channels = head_channels;
    run.stride = stride;
    run.cosines = cosines;
    run.sines = sines;
    run.inverse = inverse;
    run.out = x;
    return run_rows(pool, &run, heads * head_channels);
}
