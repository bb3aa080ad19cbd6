/* What the threads of this process are doing: what the kernel says of each, and its call stack. Each is asked by a
 * signal of its own and answers from its handler, so one that runs or waits answers at once; one that blocks the
 * signal, or that the kernel does not let go, does not, and that is told instead. */
#ifndef MU_WORKER_STACKS_H
#define MU_WORKER_STACKS_H

#include <stddef.h>

enum {
    MU_STACKS_THREADS_MAX = 512,
    MU_STACKS_LINE_SIZE = 768,
    MU_STACKS_WAIT_MS = 300, /* threads have so long to answer, all of them together */
};

/* Before other threads start, once. Without it (or where the signal is taken) there are no stacks. */
void mu_stacks_init(void);

/* A line for each thread, the caller's own among them, in the order of their ids:
 *
 *     1234 name: S in futex_wait_queue, system call 202, 1234 ms of processor time; write < put_line < run
 *
 * State, place in the kernel ("in ..." if it waits there) and system call are those of proc(5); then the functions that
 * it is in, innermost first: their names, or the module and the offset in it (for addr2line). All are asked at once:
 * what they do belongs to one moment. Returns how many there are, at most `capacity` and MU_STACKS_THREADS_MAX. */
size_t mu_stacks_describe(char (*lines)[MU_STACKS_LINE_SIZE], size_t capacity);

#endif
