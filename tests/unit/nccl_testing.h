/* Ranks of a GPU job as processes, each with an emulated GPU of its own: shared by the tests of comm_nccl. A rank is
 * forked before anything of the emulation has begun; what it checks ends it with a line, and the test with it. Included
 * by one file per executable. */
#ifndef MU_TESTS_NCCL_TESTING_H
#define MU_TESTS_NCCL_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/rng.h"
#include "cudasim/control.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kernels.h"
#include "worker/comm_nccl.h"

enum { RANKS_MAX = 4, MARKS_MAX = 32, PATIENCE_US = 120 * 1000000, WORKSPACE_BYTES = 1 << 20 };

/* Memory of all ranks of a test. */
struct meeting_point {
    char addresses[RANKS_MAX][MU_COMM_ADDRESS_SIZE];
    struct mu_id incarnations[RANKS_MAX];
    atomic_uint marks[MARKS_MAX]; /* how many ranks have come to each */
};

struct rank {
    uint32_t rank, world;
    struct meeting_point *point;
    struct mu_comm *comm;
    struct mu_comm_group *group;
    struct mu_nccl_meeting *meeting;
    struct mu_nccl *nccl;
    struct mu_cuda cuda;
    struct mu_pool *gpu, *cpu;
    uint64_t exchanges;
    uint32_t ranks_per_id;
    uint64_t stall_us;
    uint32_t waits, waiting; /* how often it began to wait for a peer, and whether it does */
    uint32_t tensor_ranks[RANKS_MAX], replica_ranks[RANKS_MAX], tied_ranks[2];
};

typedef void rank_fn(struct rank *r);

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %u, %s:%d: %s\n", r->rank, __FILE__, __LINE__, #condition);                          \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define CHECK_STATUS(call, expected)                                                                                   \
    do {                                                                                                               \
        struct mu_error check_err = {0};                                                                               \
        struct mu_error *err = &check_err;                                                                             \
        enum mu_status check_status = (call);                                                                          \
        if (check_status != (expected)) {                                                                              \
            fprintf(stderr, "rank %u, %s:%d: %s: %s, not %s: %s\n", r->rank, __FILE__, __LINE__, #call,                \
                    mu_status_name(check_status), mu_status_name(expected), check_err.text);                           \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define OK(call) CHECK_STATUS(call, MU_OK)

static inline void expect_text(const struct rank *r, const struct mu_error *err, const char *needle)
{
    if (strstr(err->text, needle) && !strchr(err->text, '\n'))
        return;
    fprintf(stderr, "rank %u: \"%s\" is no single line that says \"%s\"\n", r->rank, err->text, needle);
    _exit(1);
}

static inline uint64_t soon(void)
{
    return mu_clock_mono_us() + PATIENCE_US;
}

static inline void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

/* Waits until so many ranks have come to a mark; come comes first. */
static inline void await(const struct rank *r, uint32_t mark, uint32_t count)
{
    for (uint64_t deadline_us = soon(); atomic_load(&r->point->marks[mark]) < count; nap())
        CHECK(mu_clock_mono_us() < deadline_us);
}
static inline void come(const struct rank *r, uint32_t mark)
{
    atomic_fetch_add(&r->point->marks[mark], 1);
}

/* ---- a rank's life ---- */

static inline void rank_connect(struct rank *r, uint64_t generation)
{
    struct mu_comm_peer peers[RANKS_MAX];
    size_t count = 0;
    OK(mu_comm_new(&(struct mu_comm_config){0}, &r->comm, err));
    memcpy(r->point->addresses[r->rank], mu_comm_address(r->comm), strlen(mu_comm_address(r->comm)) + 1);
    r->point->incarnations[r->rank] = mu_id_random();
    come(r, 0);
    await(r, 0, r->world);
    for (uint32_t i = 0; i < r->world; i++)
        if (i != r->rank)
            peers[count++] = (struct mu_comm_peer){
                .rank = i, .incarnation = r->point->incarnations[i], .address = r->point->addresses[i]};
    struct mu_comm_group_config config = {.generation = generation,
                                          .rank = r->rank,
                                          .world = r->world,
                                          .incarnation = r->point->incarnations[r->rank],
                                          .peers = peers,
                                          .peer_count = count,
                                          .secret = "the secret of this generation.."};
    OK(mu_comm_open(r->comm, &config, soon(), &r->group, err));
    OK(mu_comm_wait_ready(r->group, soon(), err));
}

static inline void rank_begin(struct rank *r)
{
    char devices[64];
    snprintf(devices, sizeof devices, "%u:Emulated GPU:9.0:256:4", r->world);
    setenv("CUDASIM_DEVICES", devices, 1);
    cudasim_seed(7 + r->rank);
    OK(mu_cuda_init(&r->cuda, (int)r->rank, MU_DTYPE_FP32, WORKSPACE_BYTES, err));
    OK(mu_pool_new(1, err, &r->gpu));
    OK(mu_pool_new(1, err, &r->cpu));
    mu_pool_bind(r->gpu, &r->cuda.base);
}

static inline void count_waits(void *ctx, bool waiting)
{
    struct rank *r = ctx;
    r->waits += waiting && !r->waiting;
    r->waiting = waiting;
}

/* World 4 is a grid: tensor groups {0, 1} and {2, 3}, replicas {0, 2} and {1, 3}, everybody is a stage of its own, 0
 * and 3 have something tied.
 * Others have one tensor group of all, and no replicas. */
static inline struct mu_nccl_config rank_config(struct rank *r)
{
    static const struct mu_nccl_peer peers[] = {{0, "host-a"}, {1, "host-b"}, {2, "host-c"}, {3, "host-d"}};
    struct mu_nccl_config config = {
        .group = r->world > 1 ? r->group : NULL, .rank = r->rank, .world = r->world, .peers = peers, .peer_count = 4};
    config.stall_us = r->stall_us;
    config.waiting = count_waits;
    config.waiting_ctx = r;
    config.ids = mu_nccl_meeting_ids(r->meeting, &config.id_count);
    bool grid = r->world == 4;
    uint32_t size = grid ? 2 : r->world, index = grid ? r->rank % 2 : r->rank;
    for (uint32_t i = 0; i < size; i++)
        r->tensor_ranks[i] = r->rank - index + i;
    config.scopes[MU_NCCL_TENSOR] = (struct mu_nccl_members){r->tensor_ranks, size, index};
    if (!grid)
        return config;
    for (uint32_t i = 0; i < 2; i++)
        r->replica_ranks[i] = r->rank % 2 + 2 * i;
    config.scopes[MU_NCCL_REPLICAS] = (struct mu_nccl_members){r->replica_ranks, 2, r->rank / 2};
    config.scopes[MU_NCCL_STAGES] = (struct mu_nccl_members){&r->rank, 1, 0};
    bool tied = r->rank == 0 || r->rank == 3;
    r->tied_ranks[0] = tied ? 0 : r->rank;
    r->tied_ranks[1] = 3;
    config.scopes[MU_NCCL_TIED] = (struct mu_nccl_members){r->tied_ranks, tied ? 2 : 1, r->rank == 3};
    return config;
}

static inline void rank_meet(struct rank *r)
{
    static const char *const hosts[] = {"host-a", "host-b", "host-c", "host-d"};
    struct mu_nccl_meeting_config config = {.group = r->group, .rank = r->rank, .world = r->world};
    config.host = hosts[r->rank];
    config.ranks_per_id = r->ranks_per_id;
    OK(mu_nccl_meeting_new(&config, &r->meeting, err));
}

static inline void rank_open(struct rank *r)
{
    rank_begin(r);
    rank_connect(r, 1);
    rank_meet(r);
    OK(mu_nccl_meeting_run(r->meeting, soon(), err));
    struct mu_nccl_config config = rank_config(r);
    OK(mu_nccl_open(&config, soon(), &r->nccl, err));
}

static inline void rank_end(struct rank *r)
{
    mu_nccl_free(r->nccl);
    mu_comm_group_close(r->group);
    mu_nccl_meeting_free(r->meeting);
    mu_pool_free(r->gpu);
    mu_pool_free(r->cpu);
    mu_cuda_fini(&r->cuda);
    mu_comm_free(r->comm);
}

/* ---- all ranks ---- */

static inline pid_t rank_fork(struct meeting_point *point, uint32_t rank, uint32_t world, rank_fn *fn)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct rank *r = calloc(1, sizeof *r);
    *r = (struct rank){.rank = rank, .world = world, .point = point, .exchanges = 1000};
    fn(r);
    free(r);
    _exit(0);
}

/* Forks the ranks and waits for them; `killed`: the one that a signal ends, or -1. How many ended otherwise than they
 * should; with the first of them all are ended. */
static inline uint32_t count_bad_ranks(uint32_t world, int killed, rank_fn *fn)
{
    struct meeting_point *point = mmap(NULL, sizeof *point, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[RANKS_MAX];
    uint32_t bad = 0, left = world;
    assert_ptr_not_equal(point, MAP_FAILED);
    for (uint32_t i = 0; i < world; i++) {
        pids[i] = rank_fork(point, i, world, fn);
        assert_true(pids[i] > 0);
    }
    for (uint64_t deadline_us = soon() + PATIENCE_US; left > 0; nap()) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (mu_clock_mono_us() > deadline_us || bad > 0)
            for (uint32_t i = 0; i < world; i++)
                if (pids[i] > 0)
                    kill(pids[i], SIGKILL);
        for (uint32_t i = 0; i < world && pid > 0; i++) {
            if (pids[i] != pid)
                continue;
            bool expected = killed == (int)i ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0;
            bad += !expected;
            pids[i] = 0;
            left--;
        }
    }
    munmap(point, sizeof *point);
    return bad;
}

static inline void run_ranks(uint32_t world, int killed, rank_fn *fn)
{
    uint32_t bad = count_bad_ranks(world, killed, fn);
    if (bad > 0)
        fail_msg("%u of %u ranks failed", bad, world);
}

/* ---- what the sockets bring ---- */

/* out[size][bytes]: what each of the ranks has in `own`. */
static inline void socket_gather(struct rank *r, const uint32_t *ranks, uint32_t size, uint32_t index, const void *own,
                                 size_t bytes, void *out)
{
    struct mu_comm_request requests[2 * RANKS_MAX];
    uint64_t number = r->exchanges++;
    memcpy((char *)out + index * bytes, own, bytes);
    for (uint32_t i = 0; i < size; i++) {
        if (i == index)
            continue;
        OK(mu_comm_recv(r->group, ranks[i], number, (char *)out + i * bytes, bytes, &requests[2 * i], err));
        OK(mu_comm_send(r->group, ranks[i], number, own, bytes, &requests[2 * i + 1], err));
    }
    if (size > 1)
        OK(mu_comm_wait_all(r->group, soon(), err));
}

/* ---- device memory ---- */

static inline void *to_device(struct rank *r, const void *host, size_t bytes)
{
    void *device = NULL;
    CHECK(cudaMalloc(&device, bytes + 1) == cudaSuccess);
    if (host && bytes > 0) {
        CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, r->cuda.stream) == cudaSuccess);
    }
    return device;
}

/* Waits, compares, frees. */
static inline void expect_device(struct rank *r, void *device, const void *expected, size_t bytes)
{
    char *host = malloc(bytes + 1);
    OK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), err));
    CHECK(bytes == 0 || cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(memcmp(host, expected, bytes) == 0);
    CHECK(cudaFree(device) == cudaSuccess);
    free(host);
}

static inline void fill(void *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++)
        ((uint8_t *)data)[i] = (uint8_t)mu_splitmix64(&seed);
}

static inline void fill_floats(float *data, size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t word = mu_splitmix64(&seed);
        data[i] = (float)((int64_t)word >> 11) * 0x1p-52f * (word % 7 == 0 ? 1e-6f : 1.0f);
    }
}

#endif
