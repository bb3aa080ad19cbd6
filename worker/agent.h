/* The shell of the worker: carries messages, timers and signals to the pure core, and the core's actions to the stream
 * and the engine.
 *
 *   main thread     signals, timers, heartbeats; frees what other threads may not
 *   RPC poller      messages of the coordinator                    \
 *   engine thread   vote, boundary, answers                         } step the core under one lock, and carry out its
 * actions writer thread   pieces written                                 /
 *
 * A worker that loses its coordinator goes on stepping; the core decides when to connect again. */
#ifndef MU_WORKER_AGENT_H
#define MU_WORKER_AGENT_H

#include <stdint.h>

#include "common/status.h"
#include "kernels/device.h"
#include "rpc/tls.h"

enum {
    MU_AGENT_EXIT_OK = 0,
    MU_AGENT_EXIT_FAILURE = 1,
    MU_AGENT_EXIT_USAGE = 2,
    MU_AGENT_EXIT_CANNOT_CONNECT = 3,
    MU_AGENT_EXIT_INTERRUPTED = 130, /* a second SIGINT */
    MU_AGENT_FLUSH_MS = 500,         /* before leaving: for the last messages to go out */
    MU_AGENT_STOP_S = 2,             /* then: for its threads to end */
};

struct mu_agent_config {
    const char *coordinator;     /* "host:port", "[::1]:port", "unix:/path" */
    struct mu_rpc_tls_files tls; /* none set: plaintext */
    const char *join_token_file; /* worker/join.h; NULL: none */
    const char *job;
    const char *name;                                      /* NULL: the coordinator chooses one */
    const char *data_addr, *route_to, *host_id, *unix_dir; /* NULL: defaults of worker/comm.h */
    int note_fd;                                           /* worker/notes.h; -1: nobody supervises it */
    const char *ledger;       /* file that receives a line for each leaf computed and update applied; NULL: none */
    struct mu_device *device; /* that computes; NULL: the host */
    uint32_t threads;         /* 0: the affinity mask; with a GPU, whose host has little to compute, one */
    uint64_t memory_bytes;    /* of the host, or the GPU, for the workers there together; 0: all of it */
    uint32_t give_up_ms;      /* 0: never */
    uint32_t vitals_every_ms; /* worker/vitals.h; 0: never */
    uint32_t backoff_min_ms, backoff_max_ms, step_report_ms, connect_timeout_ms; /* 0: defaults */
};

/* Runs until the core says exit; returns the exit code. SIGTERM, SIGINT: leave in good order. SIGUSR2:
 * its newest flight records and its threads go into the log. Blocks these signals in the calling thread, which must be
 * the only one. */
int mu_agent_run(const struct mu_agent_config *config);

#endif
