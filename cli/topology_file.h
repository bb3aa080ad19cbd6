/* Topology files as people have them: Slurm's topology.conf (tree, block) and topology.yaml, topograph's JSON; NCCL's
 * XML and hwloc's for the inside of a node.
 *
 * Refusals are one line "FILE:LINE: ...". What is odd but usable is a note of the topology (plan/topology.h). */
#ifndef MU_CLI_TOPOLOGY_FILE_H
#define MU_CLI_TOPOLOGY_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "plan/cluster.h"
#include "plan/topology.h"

enum { MU_TOPOLOGY_FILE_SIZE_MAX = 64 << 20 }; /* bytes */

enum mu_topology_format { MU_TOPOLOGY_SLURM = 1, MU_TOPOLOGY_SLURM_YAML, MU_TOPOLOGY_TOPOGRAPH };

/* Reads a file into a new topology, not finished yet (mu_topology_finish). SLURM becomes SLURM_YAML for a name that
 * ends in .yaml or .yml. */
enum mu_status mu_topology_file_read(const char *path, enum mu_topology_format format,
                                     struct mu_topology **ret_topology, struct mu_error *err) MU_WARN_UNUSED;
/* A finished one, by the file's name: .json is topograph's, everything else Slurm's. */
enum mu_status mu_topology_file_load(const char *path, struct mu_topology **ret_topology,
                                     struct mu_error *err) MU_WARN_UNUSED;
/* The same for text in memory; `name` stands for FILE in messages. */
enum mu_status mu_topology_file_parse(const char *name, enum mu_topology_format format, const char *text,
                                      size_t size_bytes, struct mu_topology **ret_topology,
                                      struct mu_error *err) MU_WARN_UNUSED;

/* What NCCL_TOPO_DUMP_FILE, or hwloc's lstopo, says of a node. */
enum mu_node_format { MU_NODE_NCCL_XML = 1, MU_NODE_HWLOC_XML };
struct mu_node_file {
    uint32_t devices, islands; /* GPUs; groups of them that NVLink joins (as many as GPUs without NVLink) */
    uint32_t cards;            /* for the job's network; 0: not said */
    double link_bytes_per_second, nic_bytes_per_second, host_bytes_per_second; /* of the GPU with least; 0: not said */
};
enum mu_status mu_node_file_read(const char *path, enum mu_node_format format, struct mu_node_file *ret_node,
                                 struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_node_file_parse(const char *name, enum mu_node_format format, const char *text, size_t size_bytes,
                                  struct mu_node_file *ret_node, struct mu_error *err) MU_WARN_UNUSED;

/* The formats, one file each. Errors begin with "LINE: ". */
enum mu_status topology_read_slurm(struct mu_topology *t, const char *text, size_t size_bytes,
                                   struct mu_error *err) MU_WARN_UNUSED;
enum mu_status topology_read_slurm_yaml(struct mu_topology *t, const char *text, size_t size_bytes,
                                        struct mu_error *err) MU_WARN_UNUSED;
enum mu_status topology_read_topograph(struct mu_topology *t, const char *text, size_t size_bytes,
                                       struct mu_error *err) MU_WARN_UNUSED;
/* "LINE: text" in err becomes "FILE:LINE: text". Returns err->status. */
enum mu_status topology_located(const char *name, struct mu_error *err);
/* What the Slurm formats share: lists of names under a switch, and levels of blocks. */
enum mu_status topology_add_nodes(struct mu_topology *t, uint32_t parent, const char *list, size_t length,
                                  uint32_t line, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status topology_add_switches(struct mu_topology *t, uint32_t parent, const char *list, size_t length,
                                     uint32_t line, struct mu_error *err) MU_WARN_UNUSED;
/* A switch that is described here: a second description of the same name is refused. */
enum mu_status topology_describe(struct mu_topology *t, const char *kind, const char *name, size_t length,
                                 uint32_t line, uint32_t *ret_switch, struct mu_error *err) MU_WARN_UNUSED;
/* BlockSizes: after the first, each is a multiple of the one before; blocks in order are joined by so many. */
enum { TOPOLOGY_BLOCK_SIZES_MAX = 8 };
struct topology_block_sizes {
    uint32_t count, line, sizes[TOPOLOGY_BLOCK_SIZES_MAX];
};
enum mu_status topology_add_block_size(struct topology_block_sizes *sizes, const char *text, size_t length,
                                       uint32_t line, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status topology_join_blocks(struct mu_topology *t, const struct topology_block_sizes *sizes,
                                    struct mu_error *err) MU_WARN_UNUSED;

#endif
