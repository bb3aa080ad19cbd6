/* What the threads of this process are executing: their call stacks. Each is asked by a signal of its own and answers
 * from its handler, so one that runs or waits answers at once; one that the kernel does not let go does not. */
#ifndef MU_WORKER_STACKS_H
#define MU_WORKER_STACKS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Before other threads start, once. Without it (or where the signal is taken) there are no stacks. */
void mu_stacks_init(void);

struct mu_stack; /* the answer of one thread */

/* Asks it. NULL: there is no such thread, or too many are asked. */
struct mu_stack *mu_stack_ask(pid_t tid);
/* Waits for the answer until `until_us` (monotonic) and lets go of it. "f < g < h", innermost first, into out[size]:
 * names of functions, or the module and the offset in it (for addr2line). "": it has not answered. */
void mu_stack_take(struct mu_stack *stack, uint64_t until_us, char *out, size_t size);

#endif
