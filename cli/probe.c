/* `muster probe`: what this host can do, as `muster plan` wants to know it: matrix products with the kernels of the
 * CPU worker, memory, messages between two threads over a socket, a directory's writing and reading. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/probe_worker.h"
#include "common/clock.h"
#include "kernels/kernels.h"

enum {
    SIZES = 5,
    FIRST_SIZE = 64, /* of square products; each size is twice the one before */
    PRODUCT_US = 100000,
    MEMORY_BYTES = 64 << 20,
    MEMORY_ROUNDS = 6,
    BLOCK_BYTES = 1 << 20,
    LINK_BYTES = 256 << 20,
    PINGS = 2000,
    DISK_MIB_MAX = 65536,
};

struct probe {
    uint32_t threads, sizes[SIZES];
    double flops[SIZES], best_flops;
    double memory_rate, link_rate, hop_s, write_rate, read_rate;
    double memory_bytes;
    struct mu_probed_worker worker;
};

static double seconds_since(uint64_t begun_us)
{
    return (double)(mu_clock_mono_us() - begun_us) * 1e-6;
}

/* ---- products ---- */

/* The best of as many as fit into PRODUCT_US, two at least. */
static enum mu_status time_product(struct mu_pool *pool, uint32_t n, float *a, float *b, float *c, double *ret_flops)
{
    const struct mu_gemm gemm = {.m = n, .n = n, .k = n, .a = a, .b = b, .c = c, .lda = n, .ldb = n, .ldc = n};
    double best = 1e30;
    uint64_t begun_us = mu_clock_mono_us();
    for (uint32_t i = 0; i < 2 || mu_clock_mono_us() - begun_us < PRODUCT_US; i++) {
        uint32_t repeats = n < 256 ? 256 / n * 16 : 1; /* longer than the clock's grain */
        uint64_t from_us = mu_clock_mono_us();
        for (uint32_t k = 0; k < repeats; k++) {
            enum mu_status status = mu_kernel_gemm(pool, &gemm);
            if (status != MU_OK)
                return status;
        }
        double took_s = seconds_since(from_us) / repeats;
        best = took_s < best ? took_s : best;
    }
    *ret_flops = 2.0 * n * n * n / (best > 1e-9 ? best : 1e-9);
    return MU_OK;
}

static enum mu_status probe_products(struct probe *p, struct mu_error *err)
{
    size_t most = (size_t)FIRST_SIZE << (SIZES - 1), elements = most * most;
    struct mu_pool *pool = NULL;
    float *memory = malloc(3 * elements * sizeof *memory);
    enum mu_status status = memory ? mu_pool_new(p->threads, err, &pool) : mu_fail(err, MU_ERR_NO_MEMORY, "no memory");
    for (size_t i = 0; memory && i < 3 * elements; i++)
        memory[i] = (float)(i % 17) - 8;
    for (uint32_t i = 0; status == MU_OK && i < SIZES; i++) {
        p->sizes[i] = FIRST_SIZE << i;
        status = time_product(pool, p->sizes[i], memory, memory + elements, memory + 2 * elements, &p->flops[i]);
        p->best_flops = p->flops[i] > p->best_flops ? p->flops[i] : p->best_flops;
    }
    if (status == MU_OK)
        p->threads = mu_pool_threads(pool);
    mu_pool_free(pool);
    free(memory);
    return status;
}

/* ---- memory ---- */

static enum mu_status probe_memory(struct probe *p, struct mu_error *err)
{
    char *from = malloc(MEMORY_BYTES), *to = malloc(MEMORY_BYTES);
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    p->memory_bytes = pages > 0 && page_bytes > 0 ? (double)pages * (double)page_bytes : 0;
    for (int i = 0; from && to && i < MEMORY_ROUNDS; i++) {
        memset(from, i, MEMORY_BYTES); /* the first round also gets the pages */
        uint64_t begun_us = mu_clock_mono_us();
        memcpy(to, from, MEMORY_BYTES);
        double rate = 2.0 * MEMORY_BYTES / seconds_since(begun_us);
        p->memory_rate = i > 0 && to[MEMORY_BYTES / 2] == i && rate > p->memory_rate ? rate : p->memory_rate;
    }
    bool good = from && to;
    free(from);
    free(to);
    return good ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory");
}

/* ---- messages ---- */

static bool transfer(int fd, char *bytes, size_t size, bool sends)
{
    while (size > 0) {
        ssize_t done = sends ? send(fd, bytes, size, MSG_NOSIGNAL) : recv(fd, bytes, size, 0);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        bytes += done;
        size -= (size_t)done;
    }
    return true;
}

/* The other side: answers the pings, takes the blocks, answers once more. */
static void *answer(void *arg)
{
    int fd = *(int *)arg;
    char *block = malloc(BLOCK_BYTES), byte;
    bool good = block != NULL;
    for (int i = 0; good && i < PINGS; i++)
        good = transfer(fd, &byte, 1, false) && transfer(fd, &byte, 1, true);
    for (size_t i = 0; good && i < LINK_BYTES / BLOCK_BYTES; i++)
        good = transfer(fd, block, BLOCK_BYTES, false);
    if (!good || !transfer(fd, &byte, 1, true))
        shutdown(fd, SHUT_RDWR); /* whoever waits is told */
    free(block);
    return NULL;
}

static bool ask(struct probe *p, int fd)
{
    char *block = calloc(1, BLOCK_BYTES), byte = 1;
    bool good = block != NULL;
    uint64_t begun_us = mu_clock_mono_us();
    for (int i = 0; good && i < PINGS; i++)
        good = transfer(fd, &byte, 1, true) && transfer(fd, &byte, 1, false);
    p->hop_s = seconds_since(begun_us) / (2.0 * PINGS);
    begun_us = mu_clock_mono_us();
    for (size_t i = 0; good && i < LINK_BYTES / BLOCK_BYTES; i++)
        good = transfer(fd, block, BLOCK_BYTES, true);
    good = good && transfer(fd, &byte, 1, false);
    p->link_rate = LINK_BYTES / seconds_since(begun_us);
    free(block);
    return good;
}

static enum mu_status probe_link(struct probe *p, struct mu_error *err)
{
    int fds[2];
    pthread_t thread;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0)
        return mu_fail_errno(err, errno, "no pair of sockets");
    int reason = pthread_create(&thread, NULL, answer, &fds[1]);
    bool good = reason == 0 && ask(p, fds[0]);
    if (reason == 0 && !good)
        shutdown(fds[0], SHUT_RDWR);
    if (reason == 0)
        pthread_join(thread, NULL);
    close(fds[0]);
    close(fds[1]);
    if (reason)
        return mu_fail_errno(err, reason, "no second thread");
    return good ? MU_OK : mu_fail(err, MU_ERR_IO, "messages between two threads broke off");
}

/* ---- storage ---- */

static bool pass(int fd, char *block, uint64_t mib, bool writes)
{
    for (uint64_t i = 0; i < mib; i++)
        for (size_t done = 0; done < BLOCK_BYTES;) {
            ssize_t now =
                writes ? write(fd, block + done, BLOCK_BYTES - done) : read(fd, block + done, BLOCK_BYTES - done);
            if (now < 0 && errno == EINTR)
                continue;
            if (now == 0)
                errno = EIO; /* somebody cuts the file */
            if (now <= 0)
                return false;
            done += (size_t)now;
        }
    return true;
}

/* Written and synced; read again after the cache was asked to forget it. */
static enum mu_status probe_storage(struct probe *p, const char *dir, uint64_t mib, struct mu_error *err)
{
    char path[4096];
    if ((size_t)snprintf(path, sizeof path, "%s/.muster-probe-XXXXXX", dir) >= sizeof path)
        return mu_fail(err, MU_ERR_INVALID, "--dir is too long");
    int fd = mkstemp(path);
    if (fd < 0)
        return mu_fail_errno(err, errno, "%s: cannot write there", dir);
    unlink(path);
    char *block = malloc(BLOCK_BYTES);
    for (size_t i = 0; block && i < BLOCK_BYTES; i++)
        block[i] = (char)(i * 2654435761u >> 13); /* what file systems cannot make small */
    uint64_t begun_us = mu_clock_mono_us();
    bool good = block && pass(fd, block, mib, true) && fsync(fd) == 0;
    p->write_rate = (double)(mib << 20) / seconds_since(begun_us);
    good = good && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0 && lseek(fd, 0, SEEK_SET) == 0;
    begun_us = mu_clock_mono_us();
    good = good && pass(fd, block, mib, false);
    p->read_rate = (double)(mib << 20) / seconds_since(begun_us);
    enum mu_status status =
        good ? MU_OK : mu_fail_errno(err, errno, "%s: writing and reading %u MiB there", dir, (unsigned)mib);
    free(block);
    close(fd);
    return status;
}

/* ---- output ---- */

static void print_cluster(const struct probe *p)
{
    const struct mu_cost_rates *r = &p->worker.rates;
    printf(
        "# Measured by muster probe: one worker of %u thread%s. For muster plan; nic_rate is what processes on this "
        "host "
        "get.\n"
        "device: {per_node: 1, flops_bf16: %.3e, flops_fp32: %.3e, memory: %.3e, memory_rate: %.3e, link_rate: %.3e, "
        "nic_rate: %.3e, host_rate: %.3e}\n"
        "nodes: 1\n"
        "storage: {write_rate: %.3e, read_rate: %.3e}\n"
        "worker: {flops: %.4g, memory_rate: %.4g, rows_rate: %.4g, link_rate: %.4g, latency_s: %.4g, fixed_s: %.4g, "
        "slice_cost: %.4g}\n",
        p->threads, p->threads == 1 ? "" : "s", p->best_flops, p->best_flops, p->memory_bytes, p->memory_rate,
        p->link_rate, p->link_rate, p->memory_rate / 2, p->write_rate, p->read_rate, r->flops,
        r->memory_bytes_per_second, r->rows_bytes_per_second, r->link_bytes_per_second, r->latency_s, r->fixed_s,
        r->slice_cost);
    for (uint32_t i = 0; i < SIZES; i++)
        printf("# products of %u: %.3g GFLOP/s, %.0f %% of the best\n", p->sizes[i], p->flops[i] * 1e-9,
               100 * p->flops[i] / p->best_flops);
    printf("# one message between threads: %.1f us\n", p->hop_s * 1e6);
    printf("# worker: %u at a time, for musterd --rates; %.1f %% off on average for the %u micro-batches it was taken "
           "from\n",
           p->worker.workers, 100 * p->worker.apart, p->worker.samples);
}

static void print_json(const struct probe *p)
{
    json_t *products = json_array();
    for (uint32_t i = 0; i < SIZES; i++)
        json_array_append_new(products, json_pack("{s:i, s:f}", "size", (int)p->sizes[i], "flops", p->flops[i]));
    json_t *all =
        json_pack("{s:i, s:o, s:f, s:f, s:f, s:f, s:f, s:f}", "threads", (int)p->threads, "products", products,
                  "memory", p->memory_bytes, "memory_rate", p->memory_rate, "link_rate", p->link_rate,
                  "message_seconds", p->hop_s, "write_rate", p->write_rate, "read_rate", p->read_rate);
    const struct mu_cost_rates *r = &p->worker.rates;
    json_object_set_new(all, "worker",
                        json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "workers", (int)p->worker.workers,
                                  "flops", r->flops, "memory_rate", r->memory_bytes_per_second, "rows_rate",
                                  r->rows_bytes_per_second, "link_rate", r->link_bytes_per_second, "latency_s",
                                  r->latency_s, "fixed_s", r->fixed_s, "slice_cost", r->slice_cost, "mean_error",
                                  p->worker.apart));
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(all);
}

int mu_cmd_probe(struct mu_cli *cli, int argc, char **argv)
{
    const char *threads = "0", *dir = ".", *mib_text = "256", *workers = "1";
    const struct mu_cli_option options[] = {{"--threads", &threads, NULL},
                                            {"--dir", &dir, NULL},
                                            {"--mib", &mib_text, NULL},
                                            {"--workers", &workers, NULL}};
    struct probe p = {.threads = 0};
    struct mu_error err;
    uint64_t count, mib, crew;
    if (mu_cli_parse("probe", argc, argv, options, (int)(sizeof options / sizeof options[0]), 0, 0) < 0 ||
        !mu_cli_number("probe", "--threads", threads, 0, MU_POOL_THREADS_MAX, &count) ||
        !mu_cli_number("probe", "--mib", mib_text, 1, DISK_MIB_MAX, &mib) ||
        !mu_cli_number("probe", "--workers", workers, 1, MU_PROBE_WORKERS_MAX, &crew))
        return MU_EXIT_USAGE;
    p.threads = (uint32_t)count;
    if (probe_products(&p, &err) != MU_OK || probe_memory(&p, &err) != MU_OK || probe_link(&p, &err) != MU_OK ||
        probe_storage(&p, dir, mib, &err) != MU_OK ||
        mu_probe_worker((uint32_t)crew, p.threads, &p.worker, &err) != MU_OK)
        return mu_cli_fail(&err);
    (cli->json ? print_json : print_cluster)(&p);
    return MU_EXIT_OK;
}
