/* Lists of hosts as Slurm and pdsh write them: "node[01-16,20],gpu[1-2]-ib", or a file of such lists. */
#ifndef MU_CLI_HOSTS_H
#define MU_CLI_HOSTS_H

#include <stddef.h>

#include "common/status.h"

enum { MU_HOSTS_MAX = 65536, MU_HOST_SIZE = 256 };

struct mu_hosts {
    char **names; /* in the order given, each once */
    size_t count;
};

/* Names are of letters, digits and . - _ : @ and begin with none of . - : @ (a program may take such a one for an
 * option). A range has as many digits as its first number: [08-11] is 08 09 10 11. On success they are added. */
enum mu_status mu_hosts_parse(const char *list, struct mu_hosts *hosts, struct mu_error *err) MU_WARN_UNUSED;
/* A file of that name, one list a line, with # for comments; if there is none, the list itself. */
enum mu_status mu_hosts_read(const char *file_or_list, struct mu_hosts *ret_hosts, struct mu_error *err) MU_WARN_UNUSED;
void mu_hosts_fini(struct mu_hosts *hosts);

#endif
