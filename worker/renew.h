/* A worker that was given its certificate for a join token gets another one before it is over: a thread looks at the
 * file, asks the coordinator when two thirds of its life are over, and writes what it is given over the file. The key
 * stays, so that a single file changes: whoever reads the pair, or a crash, finds one that fits together. Streams that
 * exist are not touched; the next connection shows the new one. */
#ifndef MU_WORKER_RENEW_H
#define MU_WORKER_RENEW_H

#include <stdint.h>

#include "common/status.h"
#include "rpc/tls.h"

struct mu_renewer_config {
    const char *coordinator;
    struct mu_rpc_tls_files tls;
};

struct mu_renewer;
/* *ret_renewer is NULL where there is nothing to renew: no TLS, or a certificate that somebody issued, who replaces it.
 * Strings are borrowed. */
enum mu_status mu_renewer_new(const struct mu_renewer_config *config, struct mu_renewer **ret_renewer,
                              struct mu_error *err) MU_WARN_UNUSED;
void mu_renewer_free(struct mu_renewer *renewer); /* waits for the call in progress; NULL is fine */

/* When to ask for a successor of what is valid from `begin_us` to `end_us`: after two thirds of its life and up to a
 * twelfth more, so that workers who joined together do not come together. dice: 0 to 1. */
uint64_t mu_renewer_due_us(uint64_t begin_us, uint64_t end_us, double dice);
/* How long to wait after so many failures in a row: from a second, twice as long each time, at most five minutes and a
 * 24th of the certificate's life (so that six tries or more are left), and of that half to all. */
uint64_t mu_renewer_pause_us(unsigned failures, uint64_t life_us, double dice);

#endif
