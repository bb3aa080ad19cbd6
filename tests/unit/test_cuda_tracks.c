/* links: mu_cuda_kernels_sim mu_kernels */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <time.h>

#include "common/clock.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"

/* Tracks of an emulated GPU: one waits for another one exactly where it is told to, and the time of work is that of
 * work, not of waiting. */
enum { FLOATS = 1000, POINT = 3, HOLD_US = 20000 };

/* What a track is kept busy with until the test lets it go. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
};

struct gpu {
    struct mu_cuda cuda;
    struct mu_pool *pool;
    struct gate gate;
    float *one, *two; /* device */
    float host[FLOATS];
};

static void stand_at(void *arg)
{
    struct gate *gate = arg;
    pthread_mutex_lock(&gate->lock);
    while (!gate->open)
        pthread_cond_wait(&gate->changed, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

static void open_gate(struct gate *gate)
{
    pthread_mutex_lock(&gate->lock);
    gate->open = true;
    pthread_cond_broadcast(&gate->changed);
    pthread_mutex_unlock(&gate->lock);
}

static float *numbers(struct gpu *gpu, float value)
{
    void *memory = NULL;
    struct mu_error err;
    assert_int_equal(mu_device_allocate(&gpu->cuda.base, MU_MEMORY_DEVICE, sizeof gpu->host, &err, &memory), MU_OK);
    for (size_t i = 0; i < FLOATS; i++)
        gpu->host[i] = value;
    assert_int_equal(mu_device_copy(&gpu->cuda.base, memory, gpu->host, sizeof gpu->host), MU_OK);
    return memory;
}

static int begin(void **state)
{
    static struct gpu gpu;
    struct mu_error err;
    gpu = (struct gpu){.gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false}};
    assert_int_equal(mu_cuda_init(&gpu.cuda, 0, MU_DTYPE_FP32, 1 << 20, &err), MU_OK);
    assert_int_equal(mu_pool_new(1, &err, &gpu.pool), MU_OK);
    mu_pool_bind(gpu.pool, &gpu.cuda.base);
    gpu.one = numbers(&gpu, 1);
    gpu.two = numbers(&gpu, 2);
    *state = &gpu;
    return 0;
}

static int end(void **state)
{
    struct gpu *gpu = *state;
    mu_device_release(&gpu->cuda.base, MU_MEMORY_DEVICE, gpu->one, sizeof gpu->host);
    mu_device_release(&gpu->cuda.base, MU_MEMORY_DEVICE, gpu->two, sizeof gpu->host);
    mu_pool_free(gpu->pool);
    mu_cuda_fini(&gpu->cuda);
    return 0;
}

static void hold(struct gpu *gpu, enum mu_track track)
{
    assert_int_equal(cudaLaunchHostFunc(gpu->cuda.tracks[track], stand_at, &gpu->gate), cudaSuccess);
}

static void add(struct gpu *gpu, enum mu_track track, float *into, const float *from)
{
    mu_device_use(&gpu->cuda.base, track);
    assert_int_equal(mu_kernel_add(gpu->pool, FLOATS, into, from), MU_OK);
    mu_device_use(&gpu->cuda.base, MU_TRACK_MAIN);
}

static void expect(struct gpu *gpu, const float *device, float value)
{
    assert_int_equal(mu_pool_wait(gpu->pool), MU_OK);
    assert_int_equal(mu_device_move(&gpu->cuda.base, gpu->host, device, sizeof gpu->host), MU_OK);
    for (size_t i = 0; i < FLOATS; i++)
        assert_true(gpu->host[i] == value);
}

static void test_a_track_waits_for_a_point_and_no_other_one_does(void **state)
{
    struct gpu *gpu = *state;
    struct mu_device *device = &gpu->cuda.base;
    mu_device_follow(device, MU_TRACK_MAIN, POINT); /* never signalled: no wait */
    expect(gpu, gpu->one, 1);
    mu_device_signal(device, MU_TRACK_MAIN, POINT);
    mu_device_follow(device, MU_TRACK_STAGES, POINT);
    hold(gpu, MU_TRACK_STAGES);
    add(gpu, MU_TRACK_STAGES, gpu->one, gpu->two); /* 5: what two is by then */
    add(gpu, MU_TRACK_MAIN, gpu->two, gpu->two);   /* 4, now: main waits for nothing */
    expect(gpu, gpu->two, 4);
    assert_int_equal(cudaStreamQuery(gpu->cuda.tracks[MU_TRACK_STAGES]), cudaErrorNotReady);
    mu_device_signal(device, MU_TRACK_STAGES, POINT);
    mu_device_follow(device, MU_TRACK_MAIN, POINT);
    add(gpu, MU_TRACK_MAIN, gpu->two, gpu->one); /* 9 */
    uint64_t mark = mu_device_mark(device);
    assert_int_equal(mu_device_passed(device, mark), MU_ERR_BUSY);
    open_gate(&gpu->gate);
    expect(gpu, gpu->two, 9);
}

static void nap(uint64_t us)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)us * 1000}, NULL);
}

/* The gate stays closed for HOLD_US at least: inside a span this counts, before one it does not. */
static void test_time_is_that_of_work_and_not_of_waiting(void **state)
{
    struct gpu *gpu = *state;
    struct mu_device *device = &gpu->cuda.base;
    uint64_t us[MU_WORKS];
    hold(gpu, MU_TRACK_STAGES);
    mu_device_signal(device, MU_TRACK_STAGES, POINT);
    mu_device_span_begin(device, MU_WORK_FORWARD);
    add(gpu, MU_TRACK_MAIN, gpu->one, gpu->one);
    mu_device_follow(device, MU_TRACK_MAIN, POINT);
    mu_device_span_end(device, MU_WORK_FORWARD);
    mu_device_span_begin(device, MU_WORK_BACKWARD);
    add(gpu, MU_TRACK_MAIN, gpu->one, gpu->one);
    mu_device_span_end(device, MU_WORK_BACKWARD);
    /* The track has come to the span's begin: what it waits for from now on is in it. */
    while (cudaEventQuery(gpu->cuda.span_ends[0]) != cudaSuccess)
        nap(100);
    nap(HOLD_US);
    uint64_t opened_us = mu_clock_mono_us();
    open_gate(&gpu->gate);
    expect(gpu, gpu->one, 4);
    uint64_t rest_us = mu_clock_mono_us() - opened_us;
    mu_device_spent_us(device, us);
    assert_true(us[MU_WORK_FORWARD] >= HOLD_US);
    assert_true(us[MU_WORK_BACKWARD] <= rest_us);
    mu_device_spent_us(device, us);
    assert_true(us[MU_WORK_FORWARD] == 0 && us[MU_WORK_BACKWARD] == 0);
}

static void test_more_spans_than_are_measured_count_as_the_others(void **state)
{
    struct gpu *gpu = *state;
    struct mu_device *device = &gpu->cuda.base;
    uint64_t begun_us = mu_clock_mono_us(), us[MU_WORKS];
    for (uint32_t i = 0; i < 2 * MU_DEVICE_SPANS; i++) {
        mu_device_span_begin(device, MU_WORK_FORWARD);
        mu_device_span_end(device, MU_WORK_FORWARD);
    }
    expect(gpu, gpu->one, 1);
    uint64_t spent_us = mu_clock_mono_us() - begun_us;
    mu_device_spent_us(device, us);
    assert_true(us[MU_WORK_FORWARD] <= 2 * spent_us && us[MU_WORK_BACKWARD] == 0);
    mu_device_span_begin(device, MU_WORK_BACKWARD); /* measured again */
    add(gpu, MU_TRACK_MAIN, gpu->one, gpu->one);
    mu_device_span_end(device, MU_WORK_BACKWARD);
    expect(gpu, gpu->one, 2);
    mu_device_spent_us(device, us);
    assert_true(us[MU_WORK_FORWARD] == 0 && us[MU_WORK_BACKWARD] > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_track_waits_for_a_point_and_no_other_one_does, begin, end),
        cmocka_unit_test_setup_teardown(test_time_is_that_of_work_and_not_of_waiting, begin, end),
        cmocka_unit_test_setup_teardown(test_more_spans_than_are_measured_count_as_the_others, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
