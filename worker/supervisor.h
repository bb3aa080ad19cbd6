/* One worker process for each slot of this host: starts them, waits for them, tells the coordinator how they ended, and
 * starts those again that the coordinator grants (proto: WorkerService.ReportExit).
 *
 *                       +------- granted, after a pause -------+
 *                       v                                      |
 *     start -------> RUNNING --it ended--> TELLING --answer----+----> HELD (drained, quarantined) --+
 *                                             ^                |                                    |
 *                                             +--- asks again -|------------------------------------+
 *                                                              +----> OVER
 *
 * Nothing is left behind: each child has its own process group, which is killed when the child has ended; it gets
 * SIGKILL should the supervisor die, however; the first SIGTERM or SIGINT is passed on, the second one kills.
 *
 *   main thread   children, signals, the service manager's watchdog; forks (a child's death signal is tied to the
 *                 thread that started it)
 *   herald        the calls to the coordinator, one at a time
 *   renewer       the certificate that the workers share (worker/renew.h) */
#ifndef MU_WORKER_SUPERVISOR_H
#define MU_WORKER_SUPERVISOR_H

#include <stdint.h>

#include "common/status.h"
#include "rpc/tls.h"

enum { MU_SLOTS_MAX = 256 };

struct mu_supervisor_config {
    const char *coordinator;
    struct mu_rpc_tls_files tls;
    const char *job, *host;
    const char *name;    /* of slot i: NAME-cpu<i>, or NAME-cuda<i> */
    bool gpus;           /* slot i computes on GPU i */
    uint32_t slots;      /* 1..MU_SLOTS_MAX */
    char *const *words;  /* options that every worker gets; ends with NULL */
    uint32_t give_up_ms; /* without an answer of the coordinator; 0: never */
    int ready_fd;        /* -1, or: one line is written there, "" once all are attached, else why that cannot be */
    uint32_t ready_ms;   /* with ready_fd: then they must be attached, or all end */
};

/* Returns an exit code of worker/agent.h: of the first worker that ended with one that is not 0. Must be called by a
 * process of one thread. */
int mu_supervise(const struct mu_supervisor_config *config);

#endif
