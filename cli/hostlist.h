/* Slurm's lists of names: `dev[0-5,7]`, `rack[1-2]node[01-16],login`. Pure. */
#ifndef MU_CLI_HOSTLIST_H
#define MU_CLI_HOSTLIST_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum { MU_HOSTLIST_NAMES_MAX = 1 << 20, MU_HOSTLIST_NAME_SIZE = 256 };

/* Called for each name, in order; anything but MU_OK ends the walk. */
typedef enum mu_status mu_hostlist_each(void *ctx, const char *name, size_t length, struct mu_error *err);

/* MU_ERR_INVALID: "LINE: ..." (brackets that do not match, ranges that descend, nothing between commas);
 * MU_ERR_LIMIT: more than MU_HOSTLIST_NAMES_MAX names; else what `each` returned. */
enum mu_status mu_hostlist_walk(const char *text, size_t length, uint32_t line, mu_hostlist_each *each, void *ctx,
                                struct mu_error *err) MU_WARN_UNUSED;

#endif
