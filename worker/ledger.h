/* --ledger: a line for each leaf that was computed and each update that was made, for tests of what a job has seen.
 * Written by the engine's thread. */
#ifndef MU_WORKER_LEDGER_H
#define MU_WORKER_LEDGER_H

#include <stdint.h>

#include "common/status.h"

/* Appends to the file. */
enum mu_status mu_ledger_open(const char *path, int *ret_fd, struct mu_error *err) MU_WARN_UNUSED;
void mu_ledger_leaf(int fd, uint64_t generation, uint64_t step, uint32_t leaf, uint64_t first_sequence, uint64_t count);
void mu_ledger_applied(int fd, uint64_t generation, uint64_t step);

#endif
