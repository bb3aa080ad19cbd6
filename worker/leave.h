/* A process that is told to end does so, whatever it is doing.
 *
 *    start --mu_leave_early--> options, joining, resolving names, opening a GPU: SIGTERM and SIGINT end it on the spot
 *          --SIGTERM and SIGINT blocked, read from a signalfd--> the main loop: it leaves in good order
 *          --mu_leave_within--> joining threads, freeing: what does not end in time is left to the kernel
 *
 * Main thread. */
#ifndef MU_WORKER_LEAVE_H
#define MU_WORKER_LEAVE_H

/* From now on, until they are blocked, SIGTERM and SIGINT end the process with exit code 0: it holds nothing yet that
 * anybody could miss. */
void mu_leave_early(void);

/* All is told and handed over: if the process has not ended after so many seconds, it ends with `code` without waiting
 * for what its threads are doing (reading a large file, a name server, a driver that hangs). */
void mu_leave_within(unsigned seconds, int code);

#endif
