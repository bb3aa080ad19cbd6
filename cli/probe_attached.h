/* `muster probe` of attached workers: the coordinator has them measured; shown, and written as a cluster file for
 * `muster plan` and `musterd --rates`. */
#ifndef MU_CLI_PROBE_ATTACHED_H
#define MU_CLI_PROBE_ATTACHED_H

#include "cli/cli.h"
#include "plan/probe.h"

struct mu_probe_wish {
    const char *job; /* empty: of all jobs */
    bool quick;
    uint32_t storage_mib; /* 0: storage is not measured */
    const char *out;      /* the cluster file; NULL: none */
};

/* MU_EXIT_FAILURE also when something stands out. */
int mu_probe_attached(struct mu_cli *cli, const struct mu_probe_wish *wish);

/* The cluster file, at most MU_PROBE_FILE_SIZE bytes. NULL, and `err`: no worker of the probe has been measured. The
 * caller frees it. */
enum { MU_PROBE_FILE_SIZE = 64 << 10 };
char *mu_probe_cluster_file(const struct mu_probe_result *result, struct mu_error *err);

#endif
