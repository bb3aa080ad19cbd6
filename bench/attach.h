/* bench_attach: what its processes share.
 *
 *   driver (bench_attach.c)     starts musterd and the clients, submits, measures, kills and restarts musterd
 *   clients (attach_workers.c)  hundreds of workers each: the real worker core and RPC client, an engine that only
 * pretends idlers (attach_idle.c)      connections that say nothing, or HTTP/2's greeting and then nothing
 *
 * Clients are the same executable, started anew (`--client FD INDEX`), with the shared memory as an inherited
 * descriptor. All counters are sums over the clients. */
#ifndef MU_BENCH_ATTACH_H
#define MU_BENCH_ATTACH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "plan/session.h"

enum {
    MU_ATTACH_WORKERS_MAX = 20000,
    MU_ATTACH_IDLE_MAX = 25000,
    MU_ATTACH_PROCESSES_MAX = 32,
    MU_ATTACH_REJECTS = MU_REJECT_INVALID + 1,
};

struct attach_shared {
    char address[64];
    char job[MU_JOB_NAME_SIZE];
    uint32_t workers, processes; /* process i has workers i, i + processes, ... */
    uint32_t idle, idle_processes;
    uint32_t step_us;              /* all members make a step at the same instants, as a synchronous job does */
    atomic_bool start, start_idle; /* clients, idlers connect from now on */
    atomic_bool stop;
    atomic_bool tell_vitals; /* each worker tells its vital signs with its next message */

    atomic_uint ready;                          /* processes that wait for `start` */
    atomic_uint attached, running;              /* now: workers with an accepted stream; members that step */
    atomic_ullong welcomes, runs;               /* times that a worker became attached, began to step */
    atomic_ullong last_welcome_us, last_run_us; /* monotonic */
    atomic_ullong breaks;                       /* streams that ended while attached */
    atomic_ullong failed_connects;              /* that ended before */
    char trouble[MU_ATTACH_PROCESSES_MAX][160]; /* why the newest attempt failed; for people */
    atomic_ullong rejects[MU_ATTACH_REJECTS];
    atomic_ullong forgets, exits; /* fenced; left */
    atomic_ullong messages, step_reports;
    atomic_uint vitals_told;
    atomic_ullong assigns, assign_bytes, assign_bytes_max;
    atomic_uint idle_open;                               /* now */
    atomic_ullong idle_opened, idle_closed, idle_failed; /* made; ended by the server; refused */
};

/* Roles: run until shared->stop, return the exit code of the process. */
int attach_workers_main(struct attach_shared *shared, uint32_t process);
int attach_idle_main(struct attach_shared *shared, uint32_t process);

#endif
