/* Who may call what, under mutual TLS: the URI "muster://ROLE/NAME" in the client's certificate names its role, each
 * method has the role it needs, and a file names those who are shut out although their certificate is valid.
 * Core thread only. */
#ifndef MU_COORDINATOR_ACCESS_H
#define MU_COORDINATOR_ACCESS_H

#include <stdbool.h>

#include "common/status.h"
#include "plan/session.h"

struct mu_access;

/* deny_path: one identity a line ("muster://worker/w7"), '#' begins a comment; NULL: nobody is denied. Borrowed. */
enum mu_status mu_access_new(const char *deny_path, struct mu_access **ret_access, struct mu_error *err) MU_WARN_UNUSED;
void mu_access_free(struct mu_access *access); /* NULL is fine */

/* MU_OK, or MU_ERR_DENIED with the identity, its role and the role needed. Whoever shows no certificate may join
 * (coordinator/tokens.h), and nothing else. */
enum mu_status mu_access_check(const struct mu_access *access, const char *identity, bool has_certificate,
                               int method_id, struct mu_error *err) MU_WARN_UNUSED;
/* The name of a worker is bound to its certificate: muster://worker/h7 may attach as "h7", "h7-..." or "h7....". `name`
 * is what it calls itself; "" becomes such a name, made different by `random`. */
enum mu_status mu_access_bind_worker(const char *identity, uint64_t random, char name[MU_WORKER_NAME_SIZE],
                                     struct mu_error *err) MU_WARN_UNUSED;
bool mu_access_is_denied(const struct mu_access *access, const char *identity);

/* Reads the file again when it has changed. An error, told once per change, leaves the former list in force. */
enum mu_status mu_access_refresh(struct mu_access *access, bool *ret_changed, struct mu_error *err) MU_WARN_UNUSED;

#endif
