/* Reads a cluster file (YAML, docs/planning.md) and the topology files that it names into a cluster, which
 * mu_cluster_fini ends; refuses as cli/job_file.h does, with file and line. */
#ifndef MU_CLI_CLUSTER_FILE_H
#define MU_CLI_CLUSTER_FILE_H

#include <stddef.h>

#include "plan/cluster.h"

enum { MU_CLUSTER_FILE_SIZE_MAX = 64 * 1024 }; /* bytes */

enum mu_status mu_cluster_file_read(const char *path, struct mu_cluster *ret_cluster,
                                    struct mu_error *err) MU_WARN_UNUSED;
/* The same for text in memory; `name` stands for FILE in messages, paths start in `directory` (absolute). */
enum mu_status mu_cluster_file_parse(const char *name, const char *directory, const void *text, size_t size_bytes,
                                     struct mu_cluster *ret_cluster, struct mu_error *err) MU_WARN_UNUSED;

#endif
