/* bench_comm [--ranks N] [--tcp | --tls | --unix]: all-to-all between N processes of this machine through the socket
 * data plane.
 *
 * One all-to-all of S bytes per rank is what a reduce-scatter of a buffer of S bytes moves: every rank sends S / N
 * bytes to each of the others and receives as much. "GB/s" is what all ranks together receive. The rate of one memcpy
 * stream is measured in the same run: every byte is copied into the kernel and out again, so half of it is the bound
 * for one core. */
#include <pthread.h>
#include <stdbool.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "worker/comm.h"

enum { RANKS_MAX = 16, SIZES = 3, ROUNDS_MAX = 2000, DEADLINE_US = 60 * 1000000 };

static const struct {
    size_t size; /* bytes per rank; 8: to each peer */
    uint32_t rounds;
} runs[SIZES] = {{8, ROUNDS_MAX}, {1 << 20, 300}, {64 << 20, 12}};

enum transport { OVER_UNIX, OVER_TCP, OVER_TLS, TRANSPORTS };
static const char *const names[TRANSPORTS] = {"unix", "tcp", "tls"};

struct shared {
    pthread_barrier_t barrier;
    char addresses[RANKS_MAX][MU_COMM_ADDRESS_SIZE];
    uint32_t round_us[SIZES][ROUNDS_MAX]; /* written by rank 0 */
    uint64_t total_us[SIZES];
    uint64_t connect_us;
};

static void must(enum mu_status status, const struct mu_error *err, const char *what)
{
    if (status != MU_OK) {
        fprintf(stderr, "bench_comm: %s: %s\n", what, err->text);
        _exit(1);
    }
}

static struct mu_comm_group *connect_rank(struct mu_comm *comm, const struct shared *shared, uint32_t rank,
                                          uint32_t ranks, bool encrypted)
{
    struct mu_comm_peer peers[RANKS_MAX];
    size_t count = 0;
    for (uint32_t i = 0; i < ranks; i++) {
        if (i != rank)
            peers[count++] =
                (struct mu_comm_peer){.rank = i, .incarnation = {.low = i + 1}, .address = shared->addresses[i]};
    }
    struct mu_comm_group_config config = {.generation = 1,
                                          .rank = rank,
                                          .world = ranks,
                                          .incarnation = {.low = rank + 1},
                                          .peers = peers,
                                          .peer_count = count,
                                          .encrypted = encrypted,
                                          .secret = "bench"};
    struct mu_comm_group *group = NULL;
    struct mu_error err = {0};
    uint64_t deadline_us = mu_clock_mono_us() + DEADLINE_US;
    must(mu_comm_open(comm, &config, deadline_us, &group, &err), &err, "open");
    must(mu_comm_wait_ready(group, deadline_us, &err), &err, "connect");
    return group;
}

static void all_to_all(struct mu_comm_group *group, uint32_t rank, uint32_t ranks, uint64_t exchange,
                       const uint8_t *from, uint8_t *to, size_t part)
{
    struct mu_comm_request requests[2 * RANKS_MAX];
    struct mu_error err = {0};
    size_t count = 0;
    for (uint32_t step = 1; step < ranks; step++) {
        uint32_t peer = (rank + step) % ranks;
        must(mu_comm_recv(group, peer, exchange, to + peer * part, part, &requests[count++], &err), &err, "receive");
    }
    for (uint32_t step = 1; step < ranks; step++) {
        uint32_t peer = (rank + step) % ranks;
        must(mu_comm_send(group, peer, exchange, from + peer * part, part, &requests[count++], &err), &err, "send");
    }
    must(mu_comm_wait_all(group, mu_clock_mono_us() + DEADLINE_US, &err), &err, "all-to-all");
}

static void run_rank(struct shared *shared, uint32_t rank, uint32_t ranks, enum transport transport)
{
    struct mu_comm *comm = NULL;
    struct mu_error err = {0};
    char host_id[16];
    size_t largest = runs[SIZES - 1].size;
    uint8_t *from = malloc(largest), *to = malloc(largest);
    if (!from || !to)
        _exit(1);
    memset(from, (int)rank, largest);
    memset(to, 0xff, largest);
    snprintf(host_id, sizeof host_id, "bench-%u", transport == OVER_UNIX ? 0 : rank);
    must(mu_comm_new(&(struct mu_comm_config){.host_id = host_id}, &comm, &err), &err, "listen");
    snprintf(shared->addresses[rank], MU_COMM_ADDRESS_SIZE, "%s", mu_comm_address(comm));
    pthread_barrier_wait(&shared->barrier);
    uint64_t begin_us = mu_clock_mono_us();
    struct mu_comm_group *group = connect_rank(comm, shared, rank, ranks, transport == OVER_TLS);
    if (rank == 0)
        shared->connect_us = mu_clock_mono_us() - begin_us;
    uint64_t exchange = 1;
    for (size_t run = 0; run < SIZES; run++) {
        size_t part = runs[run].size == 8 ? 8 : runs[run].size / ranks;
        for (uint32_t i = 0; i < 3; i++)
            all_to_all(group, rank, ranks, exchange++, from, to, part);
        uint64_t start_us = mu_clock_mono_us(), last_us = start_us;
        for (uint32_t i = 0; i < runs[run].rounds; i++) {
            all_to_all(group, rank, ranks, exchange++, from, to, part);
            uint64_t now_us = mu_clock_mono_us();
            if (rank == 0)
                shared->round_us[run][i] = (uint32_t)(now_us - last_us);
            last_us = now_us;
        }
        if (rank == 0)
            shared->total_us[run] = last_us - start_us;
    }
    mu_comm_free(comm);
    free(from);
    free(to);
}

static double memcpy_rate(void)
{
    enum { SIZE = 64 << 20, ROUNDS = 8 };
    uint8_t *from = malloc(SIZE), *to = malloc(SIZE);
    if (!from || !to)
        _exit(1);
    memset(from, 1, SIZE);
    memset(to, 2, SIZE);
    uint64_t begin_us = mu_clock_mono_us();
    for (int i = 0; i < ROUNDS; i++) {
        memcpy(to, from, SIZE);
        __asm__ volatile("" : : "r"(to) : "memory");
    }
    double rate = (double)SIZE * ROUNDS / (double)(mu_clock_mono_us() - begin_us) / 1e3;
    free(from);
    free(to);
    return rate;
}

static int by_value(const void *a, const void *b)
{
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

static int measure(uint32_t ranks, enum transport transport, double copy_rate)
{
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, ranks);
    pid_t children[RANKS_MAX];
    int failed = 0;
    for (uint32_t i = 0; i < ranks; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* a benchmark that is killed leaves nothing */
            run_rank(shared, i, ranks, transport);
            _exit(0);
        }
    }
    for (uint32_t i = 0; i < ranks; i++) {
        int status = 1;
        waitpid(children[i], &status, 0);
        failed |= status;
    }
    if (!failed) {
        printf("%-5s %u ranks: connected in %llu us\n", names[transport], ranks,
               (unsigned long long)shared->connect_us);
        for (size_t run = 0; run < SIZES; run++) {
            size_t part = runs[run].size == 8 ? 8 : runs[run].size / ranks;
            double seconds = (double)shared->total_us[run] / runs[run].rounds / 1e6;
            double rate = (double)part * ranks * (ranks - 1) / seconds / 1e9;
            qsort(shared->round_us[run], runs[run].rounds, sizeof shared->round_us[run][0], by_value);
            printf("  %8zu bytes %-8s median %7u us  mean %9.1f us  %7.3f GB/s  %5.2f of memcpy (%.2f GB/s)\n",
                   runs[run].size, runs[run].size == 8 ? "to each" : "per rank",
                   shared->round_us[run][runs[run].rounds / 2], seconds * 1e6, rate, rate / copy_rate, copy_rate);
        }
    }
    munmap(shared, sizeof *shared);
    return failed != 0;
}

int main(int argc, char **argv)
{
    uint32_t ranks = 4;
    enum transport only = TRANSPORTS; /* all of them */
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--ranks") == 0 && i + 1 < argc)
            ranks = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--unix") == 0)
            only = OVER_UNIX;
        else if (strcmp(argv[i], "--tcp") == 0)
            only = OVER_TCP;
        else if (strcmp(argv[i], "--tls") == 0)
            only = OVER_TLS;
        else
            ranks = 0;
    }
    if (ranks < 2 || ranks > RANKS_MAX) {
        fprintf(stderr, "usage: bench_comm [--ranks 2..%d] [--tcp | --tls | --unix]\n", (int)RANKS_MAX);
        return 2;
    }
    double copy_rate = memcpy_rate();
    int failed = 0;
    for (enum transport transport = OVER_UNIX; transport < TRANSPORTS; transport++)
        if (only == TRANSPORTS || only == transport)
            failed |= measure(ranks, transport, copy_rate);
    return failed;
}
