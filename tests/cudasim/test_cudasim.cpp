/* The emulation itself: it computes what CUDA would, and finds what it is meant to find. */
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
extern "C" {
#include <cmocka.h>
}

#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cudasim/control.h>

#include "kernels/cuda/launch.h"

#define OK(call) assert_int_equal(call, cudaSuccess)

static void sync(cudaStream_t stream)
{
    OK(cudaStreamSynchronize(stream));
}

static cudaStream_t new_stream()
{
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static float *new_floats(size_t count)
{
    float *p;
    OK(cudaMalloc(&p, count * sizeof *p));
    return p;
}

static std::vector<float> fetch(const float *from, size_t count)
{
    std::vector<float> host(count);
    OK(cudaMemcpy(host.data(), from, count * sizeof(float), cudaMemcpyDeviceToHost));
    return host;
}

/* Runs `body` in a process of its own; whether it ended by a signal or an error, after having said `text`. */
template <typename F> static bool dies_saying(const char *text, F body)
{
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], 2);
        close(pipes[0]);
        alarm(300); /* what hangs does not end by itself */
        for (const int fault : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL})
            signal(fault, SIG_DFL); /* cmocka's handlers would go on with the next test, in this process */
        body();
        _exit(0);
    }
    close(pipes[1]);
    std::string said;
    char buffer[4096];
    for (ssize_t n; (n = read(pipes[0], buffer, sizeof buffer)) > 0;)
        said.append(buffer, static_cast<size_t>(n));
    close(pipes[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    const bool found = status != 0 && said.find(text) != std::string::npos;
    if (!found)
        fprintf(stderr, "expected '%s', got status %d: %s\n", text, status, said.c_str());
    return found;
}

/* ---- execution ---- */

/* A row per block: warps by shuffles, the block through shared memory. */
static __global__ void norm_kernel(int columns, const float *x, float *y)
{
    __shared__ float of_warp[2][8];
    const float *row = x + blockIdx.x * (size_t)columns;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float sum = 0.0f, square = 0.0f;
    for (int i = (int)threadIdx.x; i < columns; i += (int)blockDim.x) {
        sum += row[i];
        square += row[i] * row[i];
    }
    for (int half = 16; half > 0; half /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, half);
        square += __shfl_xor_sync(0xffffffffu, square, half);
    }
    if (lane == 0) {
        of_warp[0][warp] = sum;
        of_warp[1][warp] = square;
    }
    __syncthreads();
    sum = square = 0.0f;
    for (unsigned w = 0; w < warps; w++) {
        sum += of_warp[0][w];
        square += of_warp[1][w];
    }
    const float mean = sum / (float)columns, rstd = 1.0f / sqrtf(square / (float)columns - mean * mean + 1e-5f);
    for (int i = (int)threadIdx.x; i < columns; i += (int)blockDim.x)
        y[blockIdx.x * (size_t)columns + i] = (row[i] - mean) * rstd;
}

static void test_layer_norm_by_shuffles_matches_double(void **)
{
    enum { ROWS = 37, COLUMNS = 201 };
    cudaStream_t stream = new_stream();
    float *host, *x = new_floats(ROWS * COLUMNS), *y = new_floats(ROWS * COLUMNS);
    OK(cudaMallocHost(&host, ROWS * COLUMNS * sizeof *host));
    for (int i = 0; i < ROWS * COLUMNS; i++)
        host[i] = (float)((i * 2654435761u >> 16) % 1000) / 100.0f;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        cudasim_seed(seed);
        OK(cudaMemcpyAsync(x, host, ROWS * COLUMNS * sizeof *host, cudaMemcpyHostToDevice, stream));
        MU_LAUNCH(norm_kernel, dim3(ROWS), dim3(256), 0, stream, COLUMNS, x, y);
        sync(stream);
        const std::vector<float> got = fetch(y, ROWS * COLUMNS);
        for (int r = 0; r < ROWS; r++) {
            double sum = 0, square = 0;
            for (int i = 0; i < COLUMNS; i++) {
                sum += host[r * COLUMNS + i];
                square += (double)host[r * COLUMNS + i] * host[r * COLUMNS + i];
            }
            const double mean = sum / COLUMNS, rstd = 1 / sqrt(square / COLUMNS - mean * mean + 1e-5);
            for (int i = 0; i < COLUMNS; i++)
                assert_true(fabs(got[(size_t)(r * COLUMNS + i)] - (host[r * COLUMNS + i] - mean) * rstd) < 1e-4);
        }
    }
    OK(cudaFree(x));
    OK(cudaFree(y));
    OK(cudaFreeHost(host));
    OK(cudaStreamDestroy(stream));
}

static __global__ void collectives_kernel(unsigned *out)
{
    MU_DYNAMIC_SHARED(unsigned, values);
    const unsigned i = threadIdx.x, lane = i % 32;
    out += i * 8;
    out[0] = __shfl_down_sync(0xffffffffu, i, 3, 8);
    out[1] = __shfl_up_sync(0xffffffffu, i, 2);
    out[2] = (unsigned)__shfl_sync(0xffffffffu, (uint64_t)i << 33, 5, 16) +
             (unsigned)(__shfl_sync(0xffffffffu, (uint64_t)i << 33, 5, 16) >> 33);
    out[3] = __ballot_sync(0xffffffffu, lane % 3 == 0);
    out[4] = (unsigned)__any_sync(0xffffffffu, i == 40) * 2 + (unsigned)__all_sync(0xffffffffu, i < 32);
    out[5] = (unsigned)__syncthreads_count(i % 5 == 0) * 4 + (unsigned)__syncthreads_or(i == 7) * 2 +
             (unsigned)__syncthreads_and(i < 63);
    if (lane < 16) /* half warps may meet by themselves */
        out[6] = __shfl_xor_sync(0x0000ffffu, i, 1);
    else
        out[6] = __shfl_xor_sync(0xffff0000u, i, 2);
    values[i] = i;
    __syncthreads();
    out[7] = values[63 - i];
}

static void test_collectives_match_their_definition(void **)
{
    cudaStream_t stream = new_stream();
    unsigned *out, host[64][8];
    OK(cudaMalloc(&out, sizeof host));
    MU_LAUNCH(collectives_kernel, dim3(1), dim3(64), 64 * sizeof(unsigned), stream, out);
    OK(cudaGetLastError());
    sync(stream);
    OK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < 64; i++) {
        assert_int_equal(host[i][0], i % 8 + 3 < 8 ? i + 3 : i);
        assert_int_equal(host[i][1], i % 32 >= 2 ? i - 2 : i);
        assert_int_equal(host[i][2], i / 16 * 16 + 5);
        assert_int_equal(host[i][3], 0x49249249u);
        assert_int_equal(host[i][4], i < 32 ? 1 : 2);
        assert_int_equal(host[i][5], 13 * 4 + 2);
        assert_int_equal(host[i][6], i % 32 < 16 ? (i ^ 1) : (i ^ 2));
        assert_int_equal(host[i][7], 63 - i);
    }
    OK(cudaFree(out));
    OK(cudaStreamDestroy(stream));
}

static void test_bf16_rounds_to_nearest_even(void **)
{
    assert_int_equal(__bfloat16_as_ushort(__float2bfloat16(1.0f)), 0x3f80);
    assert_int_equal(__bfloat16_as_ushort(__float2bfloat16(__uint_as_float(0x3f808000u))), 0x3f80);
    assert_int_equal(__bfloat16_as_ushort(__float2bfloat16(__uint_as_float(0x3f818000u))), 0x3f82);
    assert_int_equal(__bfloat16_as_ushort(__float2bfloat16(__uint_as_float(0x3f808001u))), 0x3f81);
    assert_int_equal(__bfloat16_as_ushort(__float2bfloat16(-INFINITY)), 0xff80);
    assert_int_equal(__bfloat16_as_ushort(__float2bfloat16(NAN)), 0x7fff);
}

/* ---- what it finds ---- */

static __global__ void reverse_kernel(float *x, bool wait)
{
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    if (wait)
        __syncthreads();
    x[threadIdx.x] = tile[63 - threadIdx.x];
}

static void test_missing_barrier_shows_in_the_result(void **)
{
    cudaStream_t stream = new_stream();
    float host[64], *x = new_floats(64);
    for (int i = 0; i < 64; i++)
        host[i] = (float)i;
    for (int wait = 0; wait < 2; wait++) {
        OK(cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice));
        MU_LAUNCH(reverse_kernel, dim3(1), dim3(64), 0, stream, x, wait != 0);
        sync(stream);
        int wrong = 0;
        const std::vector<float> got = fetch(x, 64);
        for (int i = 0; i < 64; i++)
            wrong += !(got[(size_t)i] == (float)(63 - i));
        if (wait)
            assert_int_equal(wrong, 0);
        else
            assert_true(wrong > 0);
    }
    OK(cudaFree(x));
    OK(cudaStreamDestroy(stream));
}

static __global__ void leave_kernel()
{
    if (threadIdx.x == 3)
        return;
    __syncthreads();
}
static __global__ void masks_kernel(unsigned *out)
{
    out[threadIdx.x] = __ballot_sync(threadIdx.x % 31 == 0 ? 0xffffffffu : 0x7fffffffu, 1);
}
static __global__ void lonely_kernel()
{
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __syncthreads();
}

template <typename... P> static void run_to_death(void (*kernel)(P...), P... arguments)
{
    cudaStream_t stream = new_stream();
    MU_LAUNCH(kernel, dim3(2), dim3(64), 0, stream, arguments...);
    sync(stream);
}

static void test_divergence_is_reported(void **)
{
    assert_true(dies_saying("__syncthreads", [] { run_to_death(leave_kernel); }));
    assert_true(dies_saying("other masks", [] {
        unsigned *out;
        OK(cudaMalloc(&out, 256));
        run_to_death(masks_kernel, out);
    }));
    assert_true(dies_saying("wait for each other for ever", [] { run_to_death(lonely_kernel); }));
}

static __global__ void fill_kernel(float *x, size_t count, float value)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < count)
        x[i] = value;
}

static void fill(float *x, size_t count, float value, cudaStream_t stream)
{
    MU_LAUNCH(fill_kernel, dim3((unsigned)((count + 127) / 128)), dim3(128), 0, stream, x, count, value);
    OK(cudaGetLastError());
}

/* Reading a result without waiting for it goes wrong, sooner or later. */
static void test_missing_synchronisation_shows_in_the_result(void **)
{
#ifdef __SANITIZE_THREAD__
    skip(); /* it is a race, and would be reported as one */
#endif
    cudaStream_t one = new_stream(), two = new_stream();
    cudaEvent_t event;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    float *host, *x = new_floats(1000), *y = new_floats(1000);
    OK(cudaMallocHost(&host, 1000 * sizeof *host));
    int wrong_host = 0, wrong_streams = 0;
    for (int round = 0; round < 10000 && (wrong_host == 0 || wrong_streams == 0); round++) {
        const float value = (float)(round + 1);
        fill(x, 1000, value, one);
        OK(cudaMemcpyAsync(host, x, 1000 * sizeof *host, cudaMemcpyDeviceToHost, one));
        float seen;
        memcpy(&seen, host + 999, sizeof seen); /* too early */
        wrong_host += seen != value;
        sync(one);
        assert_true(host[999] == value);

        fill(x, 1000, -value, one);
        OK(cudaMemcpyAsync(y, x, 1000 * sizeof *y, cudaMemcpyDeviceToDevice, two)); /* does not wait for `one` */
        sync(two);
        wrong_streams += fetch(y, 1000)[999] != -value;
        OK(cudaEventRecord(event, one));
        OK(cudaStreamWaitEvent(two, event));
        OK(cudaMemcpyAsync(y, x, 1000 * sizeof *y, cudaMemcpyDeviceToDevice, two));
        sync(two);
        assert_true(fetch(y, 1000)[999] == -value);
    }
    assert_true(wrong_host > 0 && wrong_streams > 0);
    OK(cudaFree(x));
    OK(cudaFree(y));
    OK(cudaFreeHost(host));
    OK(cudaEventDestroy(event));
    assert_int_equal(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
    OK(cudaStreamDestroy(one));
    OK(cudaStreamDestroy(two));
    assert_int_equal(cudaStreamQuery(two), cudaErrorInvalidResourceHandle);
    (void)cudaGetLastError();
}

static void test_fresh_memory_is_poison(void **)
{
    for (size_t count : {10u, 3u << 20}) {
        float *x = new_floats(count);
        const std::vector<float> got = fetch(x, count);
        assert_true(std::isnan(got.front()) && std::isnan(got.back()));
        OK(cudaFree(x));
    }
    assert_int_equal(cudasim_device_bytes(0), 0);
}

/* Code of the host must not touch device memory. (Like all that die, before this process has threads.) */
static void test_host_that_touches_device_memory_dies(void **)
{
    static constexpr size_t count = 1 << 20;
    assert_true(dies_saying("code of the host touches device memory", [] {
        float *x = new_floats(count);
        cudaStream_t stream = new_stream();
        fill(x, count, 1.0f, stream);
        OK(cudaStreamSynchronize(stream));
        x[3] = 2.0f;
    }));
    assert_true(dies_saying("code of the host touches device memory: byte 400 ", [] {
        OK(cudaSetDevice(0));
        float *x = new_floats(count);
        volatile float y = x[100];
        (void)y;
    }));
}

static void test_access_out_of_bounds_dies(void **)
{
#if defined(__SANITIZE_ADDRESS__)
    const char *small = "AddressSanitizer";
    assert_true(dies_saying(small, [] {
        float *x = new_floats(100);
        fill(x, 101, 1.0f, nullptr);
        OK(cudaDeviceSynchronize());
    }));
    assert_true(dies_saying("AddressSanitizer", [] {
        float *x = new_floats((1 << 20) + 3);
        fill(x, (1 << 20) + 4, 1.0f, nullptr);
        OK(cudaDeviceSynchronize());
    }));
#endif
    float *x = new_floats(100), host[101] = {0};
    assert_int_equal(cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    OK(cudaFree(x));
    assert_int_equal(cudaFree(x), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
}

/* ---- graphs, errors, virtual memory ---- */

static void test_graph_replays_captured_streams(void **)
{
    cudaStream_t one = new_stream(), two = new_stream();
    cudaEvent_t fork, join;
    OK(cudaEventCreate(&fork));
    OK(cudaEventCreate(&join));
    float *x = new_floats(64), *y = new_floats(64);
    OK(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal));
    fill(x, 64, 1.0f, one);
    OK(cudaEventRecord(fork, one));
    OK(cudaStreamWaitEvent(two, fork));
    OK(cudaMemcpyAsync(y, x, 64 * sizeof *y, cudaMemcpyDeviceToDevice, two));
    OK(cudaEventRecord(join, two));
    OK(cudaStreamWaitEvent(one, join));
    fill(x, 64, 2.0f, one);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamEndCapture(one, &graph));
    OK(cudaGraphInstantiate(&exec, graph));
    OK(cudaGraphDestroy(graph));
    assert_true(std::isnan(fetch(x, 64)[0])); /* nothing ran yet */
    for (int i = 0; i < 5; i++) {
        OK(cudaMemset(y, 0, 64 * sizeof *y));
        OK(cudaGraphLaunch(exec, one));
        sync(one);
        assert_true(fetch(y, 64)[63] == 1.0f && fetch(x, 64)[63] == 2.0f);
    }
    OK(cudaGraphExecDestroy(exec));

    OK(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal));
    assert_int_equal(cudaStreamSynchronize(one), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(one, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    OK(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal));
    OK(cudaEventRecord(fork, one));
    OK(cudaStreamWaitEvent(two, fork));
    fill(x, 64, 3.0f, two); /* never joined */
    assert_int_equal(cudaStreamEndCapture(one, &graph), cudaErrorStreamCaptureUnjoined);
    (void)cudaGetLastError();
    OK(cudaFree(x));
    OK(cudaFree(y));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(join));
    OK(cudaStreamDestroy(one));
    OK(cudaStreamDestroy(two));
}

static void test_injected_errors_come_when_ordered(void **)
{
    void *p;
    cudasim_fail("cudaMalloc", 2, 0);
    OK(cudaMalloc(&p, 16));
    OK(cudaFree(p));
    assert_int_equal(cudaMalloc(&p, 16), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    assert_int_equal(cudaMalloc(&p, (size_t)1 << 45), cudaErrorMemoryAllocation);
    (void)cudaGetLastError();

    float *x = new_floats(64);
    cudasim_fail("kernel", 1, cudaErrorECCUncorrectable);
    fill(x, 64, 1.0f, nullptr); /* the launch itself is fine */
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorECCUncorrectable);
    assert_int_equal(cudaMalloc(&p, 16), cudaErrorECCUncorrectable);
    assert_int_equal(cudaGetLastError(), cudaErrorECCUncorrectable);
    assert_int_equal(cudaGetLastError(), cudaErrorECCUncorrectable); /* it stays */
    OK(cudaDeviceReset());
    OK(cudaFree(x));

    MU_LAUNCH(fill_kernel, dim3(1), dim3(2048), 0, nullptr, x, (size_t)0, 1.0f);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    MU_LAUNCH(fill_kernel, dim3(1), dim3(32), 100 << 10, nullptr, x, (size_t)0, 1.0f);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(fill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
    MU_LAUNCH(fill_kernel, dim3(1), dim3(32), 100 << 10, nullptr, x, (size_t)0, 1.0f);
    OK(cudaGetLastError());
    OK(cudaDeviceSynchronize());
}

static void test_virtual_memory_grows_in_place(void **)
{
    const size_t piece = 2 << 20;
    const CUmemAllocationProp prop = {
        CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_NONE, {CU_MEM_LOCATION_TYPE_DEVICE, 0}, nullptr, {}};
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at;
    assert_int_equal(cuMemAddressReserve(&at, 4 * piece, 0, 0, 0), CUDA_SUCCESS);
    for (size_t i = 0; i < 2; i++) {
        CUmemGenericAllocationHandle handle;
        assert_int_equal(cuMemCreate(&handle, piece, &prop, 0), CUDA_SUCCESS);
        assert_int_equal(cuMemMap(at + i * piece, piece, 0, handle, 0), CUDA_SUCCESS);
        assert_int_equal(cuMemSetAccess(at + i * piece, piece, &access, 1), CUDA_SUCCESS);
        assert_int_equal(cuMemRelease(handle), CUDA_SUCCESS);
    }
    float *x = reinterpret_cast<float *>(at);
    const size_t count = 2 * piece / sizeof *x;
    assert_true(std::isnan(fetch(x, count)[count - 1]));
    fill(x, count, 7.0f, nullptr);
    OK(cudaDeviceSynchronize());
    assert_true(fetch(x, count)[count - 1] == 7.0f);
    assert_int_equal(cudasim_device_bytes(0), 2 * piece);
    assert_int_equal(cuMemAddressFree(at, 4 * piece), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(cuMemUnmap(at, 2 * piece), CUDA_SUCCESS);
    assert_int_equal(cudasim_device_bytes(0), 0);
    assert_int_equal(cuMemAddressFree(at, 4 * piece), CUDA_SUCCESS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* first those that fork: a child has no threads of streams */
        cmocka_unit_test(test_divergence_is_reported),
        cmocka_unit_test(test_host_that_touches_device_memory_dies),
        cmocka_unit_test(test_access_out_of_bounds_dies),
        cmocka_unit_test(test_layer_norm_by_shuffles_matches_double),
        cmocka_unit_test(test_collectives_match_their_definition),
        cmocka_unit_test(test_bf16_rounds_to_nearest_even),
        cmocka_unit_test(test_missing_barrier_shows_in_the_result),
        cmocka_unit_test(test_missing_synchronisation_shows_in_the_result),
        cmocka_unit_test(test_fresh_memory_is_poison),
        cmocka_unit_test(test_graph_replays_captured_streams),
        cmocka_unit_test(test_injected_errors_come_when_ordered),
        cmocka_unit_test(test_virtual_memory_grows_in_place),
    };
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
