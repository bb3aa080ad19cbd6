/* A coordinator of the benchmark's own: a child process with its store in a temporary directory, asked through its
 * service. One thread. */
#ifndef MU_BENCH_ATTACH_MUSTERD_H
#define MU_BENCH_ATTACH_MUSTERD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "plan/job.h"
#include "proto/wire_pb.h"
#include "rpc/client.h"

struct musterd {
    char program[512];
    char dir[256];    /* store, log; removed at the end */
    char address[64]; /* the same after a restart */
    char http[64];    /* likewise */
    uint32_t max_workers;
    uint32_t heartbeat_ms; /* 0: musterd's own default */
    pid_t pid;             /* 0: not running */
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    struct mu_wire_arena arena;
};

enum mu_status musterd_make_dir(struct musterd *musterd, struct mu_error *err) MU_WARN_UNUSED;
/* Starts it (the first time on a free port) and waits until it serves. */
enum mu_status musterd_start(struct musterd *musterd, struct mu_error *err) MU_WARN_UNUSED;
void musterd_kill(struct musterd *musterd); /* SIGKILL, waits for its end */
void musterd_end(struct musterd *musterd);  /* also the directory */

void musterd_show_log(const struct musterd *musterd, int lines); /* its last words, to standard error */

double musterd_cpu_s(const struct musterd *musterd);       /* user and system time used so far */
uint64_t musterd_rss_bytes(const struct musterd *musterd); /* resident memory now */

/* Gets /metrics: how long it took, and its length. */
enum mu_status musterd_scrape(const struct musterd *musterd, double *ret_seconds, size_t *ret_bytes,
                              struct mu_error *err) MU_WARN_UNUSED;

enum mu_status musterd_submit(struct musterd *musterd, const struct mu_job_spec *spec,
                              struct mu_error *err) MU_WARN_UNUSED;
/* Valid until the next call. */
enum mu_status musterd_get_job(struct musterd *musterd, const char *name, const Muster__V1__Job **ret_job,
                               struct mu_error *err) MU_WARN_UNUSED;

#endif
