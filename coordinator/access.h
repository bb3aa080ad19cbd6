/* Who may call what, under mutual TLS: the URI "muster://ROLE/NAME" in the client's certificate names its role, each
 * method has the role it needs, and a file names those who are shut out although their certificate is valid.
 * Core thread only. */
#ifndef MU_COORDINATOR_ACCESS_H
#define MU_COORDINATOR_ACCESS_H

#include <stdbool.h>

#include "common/status.h"

struct mu_access;

/* deny_path: one identity a line ("muster://worker/w7"), '#' begins a comment; NULL: nobody is denied. Borrowed. */
enum mu_status mu_access_new(const char *deny_path, struct mu_access **ret_access, struct mu_error *err) MU_WARN_UNUSED;
void mu_access_free(struct mu_access *access); /* NULL is fine */

/* MU_OK, or MU_ERR_DENIED with the identity, its role and the role needed. */
enum mu_status mu_access_check(const struct mu_access *access, const char *identity, int method_id,
                               struct mu_error *err) MU_WARN_UNUSED;
bool mu_access_is_denied(const struct mu_access *access, const char *identity);

/* Reads the file again when it has changed. An error, told once per change, leaves the former list in force. */
enum mu_status mu_access_refresh(struct mu_access *access, bool *ret_changed, struct mu_error *err) MU_WARN_UNUSED;

#endif
