/* Puts this process into the background, so that a shell, or ssh, can go on when it is known whether that went well. */
#ifndef MU_WORKER_DETACH_H
#define MU_WORKER_DETACH_H

#include <stdbool.h>
#include <stddef.h>

#include "common/status.h"

/* Output goes to the end of `log`, whose folder is made when absent. True: this is the process in the background, in a
 * session of its own, and must write one line to *ret_ready_fd once it works, empty when it does. False: this is the
 * one that was called, it has waited for that line and printed it; *ret_code is its exit code. Before any thread. */
bool mu_detach(const char *log, int *ret_ready_fd, int *ret_code);

/* "$XDG_STATE_HOME/muster/NAME.log", or below ~/.local/state; false: it does not fit, or there is no home. */
bool mu_detach_default_log(const char *name, char *out, size_t size);

#endif
