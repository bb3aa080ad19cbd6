/* Named fault points: `MU_FAULT("worker.vote.before")`. Compiled out unless MU_FAULTS is defined.
 *
 * With MU_FAULTS, the environment variable MU_FAULT_AT="name[:hit][,action[=ms]]" arms one point: at its hit-th passage
 * (default 1) the process raises SIGKILL (action `kill`, the default), SIGSTOP (`stop`), or sleeps (`sleep=ms`). Each
 * armed passage appends a line to the file named by MU_FAULT_LOG, so that a test knows that the point was reached.
 * scripts/fault-points lists all names. */
#ifndef MU_COMMON_FAULT_H
#define MU_COMMON_FAULT_H

#ifdef MU_FAULTS
void mu_fault_reached(const char *name);
#define MU_FAULT(name) mu_fault_reached(name)
#else
#define MU_FAULT(name) ((void)0)
#endif

#endif
