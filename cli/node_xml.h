/* What the readers of node files share (topology_nccl.c, topology_hwloc.c): a scanner of XML, which knows tags,
 * attributes and nesting and nothing more, and what a node is made of. Errors begin with "LINE: ". */
#ifndef MU_CLI_NODE_XML_H
#define MU_CLI_NODE_XML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli/topology_file.h"

enum { XML_DEPTH_MAX = 64, XML_VALUE_SIZE = 64 };

/* PCIe carries about so much of its signalling rate. */
#define NODE_PCIE_SHARE 0.8

struct xml {
    const char *at, *end;
    uint32_t line;
    struct mu_error *err;
    uint32_t depth;                           /* tags that are open around the one being seen */
    char open[XML_DEPTH_MAX][XML_VALUE_SIZE]; /* their names */
};

/* An opening tag, with the text up to the next tag. */
struct xml_tag {
    char name[XML_VALUE_SIZE];
    const char *attributes, *attributes_end, *text, *text_end;
    bool closing, empty;
};

/* Shows all opening tags of text that ends with a 0, whose outermost ones are called `root`. MU_ERR_INVALID: not XML,
 * or another root; MU_ERR_LIMIT: nested too deeply. */
enum mu_status xml_walk(struct xml *x, const char *root, enum mu_status (*see)(void *ctx, const struct xml_tag *tag),
                        void *ctx) MU_WARN_UNUSED;
enum mu_status xml_bad(const struct xml *x, const char *what, const char *value);
/* The value of an attribute, cut; "" when it is not there. */
void xml_attribute(const struct xml_tag *tag, const char *name, char out[XML_VALUE_SIZE]);
/* A number from `least` to 1e9; text behind it ("16.0 GT/s PCIe") does not matter. */
enum mu_status xml_number(const struct xml *x, const struct xml_tag *tag, const char *name, double least,
                          double *ret_value) MU_WARN_UNUSED;

/* ---- the node ---- */

struct node_gpu {
    char busid[XML_VALUE_SIZE];
    uint32_t island;                                     /* those that NVLink joins have the same */
    double link_bytes_per_second, host_bytes_per_second; /* NVLink, PCIe; 0: none, not said */
};
struct node_parts {
    struct node_gpu gpus[MU_NODE_DEVICES_MAX];
    uint32_t gpu_count, cards;
    double nic_bytes_per_second; /* all cards together; 0: not said */
};

/* One more GPU, on an island of its own; refuses two of the same bus id. */
enum mu_status node_add_gpu(struct node_parts *parts, const struct xml *x, const char *busid,
                            struct node_gpu **ret_gpu) MU_WARN_UNUSED;
void node_join(struct node_parts *parts, uint32_t gpu, uint32_t other);
/* At least one GPU. */
void node_sum_up(const struct node_parts *parts, struct mu_node_file *ret_node);

/* The formats. */
enum mu_status node_read_nccl(struct xml *x, struct node_parts *parts) MU_WARN_UNUSED;
enum mu_status node_read_hwloc(struct xml *x, struct node_parts *parts) MU_WARN_UNUSED;

#endif
