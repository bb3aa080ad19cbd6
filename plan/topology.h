/* Which node hangs under which switch: a forest, built up from what a topology file says (cli/topology_file.h) or from
 * the sizes in cluster.yaml.
 *
 * What people have is tolerated and said in `notes`: nodes that the file names and the cluster lacks, nodes that no
 * switch is known of, nodes named twice at one place, switches without anything below them, several roots. What
 * contradicts itself is refused: a node or switch under two switches, a circle, more levels or names than a cluster
 * has. An error text begins with the line of the file, "LINE: ...", where one is to blame. Heap, owned by the caller;
 * one thread while it is built, then read-only. Pure. */
#ifndef MU_PLAN_TOPOLOGY_H
#define MU_PLAN_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

#define MU_TOPOLOGY_NONE UINT32_MAX

enum {
    MU_TOPOLOGY_NAME_SIZE = 64, /* with the terminating 0 */
    MU_TOPOLOGY_SWITCHES_MAX = 1 << 16,
    MU_TOPOLOGY_NODES_MAX = 1 << 20,
    MU_TOPOLOGY_LEVELS_MAX = 4,
    MU_TOPOLOGY_NOTES_MAX = 8,
    MU_TOPOLOGY_NOTE_SIZE = 240,
};

struct mu_topology_switch {
    uint32_t parent; /* MU_TOPOLOGY_NONE: a root */
    uint32_t level;  /* 0: no switch below; of `parent` it is higher */
    uint32_t nodes;  /* below, the absent ones too: that is how many cables there are */
    uint32_t line;   /* where it is described, else first named; 0: made here */
    bool described;
};

struct mu_topology_node {
    uint32_t parent; /* MU_TOPOLOGY_NONE: not known */
    uint32_t line;
    bool absent;   /* named by the file, not part of the cluster */
    bool repeated; /* named more than once at its place */
};

/* Names in order of appearance, each once. */
struct mu_name_table {
    char **names;
    uint32_t *slots;
    uint32_t count, room, slot_count;
};

struct mu_topology {
    struct mu_topology_switch *switches;
    struct mu_topology_node *nodes;
    struct mu_name_table switch_names, node_names; /* by index of the above */
    uint32_t switch_count, node_count;
    uint32_t present_count; /* nodes without the absent ones */
    uint32_t level_count;
    uint32_t note_count;
    char notes[MU_TOPOLOGY_NOTES_MAX][MU_TOPOLOGY_NOTE_SIZE];
};

struct mu_topology *mu_topology_new(void); /* NULL: no memory */
void mu_topology_free(struct mu_topology *topology);

/* Finds the name or adds it. A name is 1 to 63 bytes without blanks and control characters. MU_ERR_INVALID,
 * MU_ERR_LIMIT, MU_ERR_NO_MEMORY. */
enum mu_status mu_topology_switch_of(struct mu_topology *t, const char *name, size_t length, uint32_t line,
                                     uint32_t *ret_index, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_topology_node_of(struct mu_topology *t, const char *name, size_t length, uint32_t line,
                                   uint32_t *ret_index, struct mu_error *err) MU_WARN_UNUSED;
/* Index of a node, MU_TOPOLOGY_NONE when it is not named. */
uint32_t mu_topology_find_node(const struct mu_topology *t, const char *name);

/* Puts one below another; once more at the same place is fine, anywhere else is refused. */
enum mu_status mu_topology_put_node(struct mu_topology *t, uint32_t node, uint32_t parent, uint32_t line,
                                    struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_topology_put_switch(struct mu_topology *t, uint32_t child, uint32_t parent, uint32_t line,
                                      struct mu_error *err) MU_WARN_UNUSED;

/* A line for people; what does not fit is dropped. Words are joined, `list` (may be NULL) are a few examples. */
void mu_topology_note(struct mu_topology *t, const char *text);

/* The cluster has `present` nodes: the last ones by name are absent, or nameless ones are added that no switch is known
 * of. */
enum mu_status mu_topology_expect(struct mu_topology *t, uint32_t present, struct mu_error *err) MU_WARN_UNUSED;
/* Judges the whole and fills levels and counts; nothing is added afterwards. */
enum mu_status mu_topology_finish(struct mu_topology *t, struct mu_error *err) MU_WARN_UNUSED;

/* Nodes "node-1" ... under switches of per_switch[i] nodes at level i, ascending, in order; finished. NULL: no memory,
 * or more switches than MU_TOPOLOGY_SWITCHES_MAX. */
struct mu_topology *mu_topology_regular(uint32_t nodes, const uint32_t *per_switch, uint32_t level_count);

/* Names as people sort them: runs of digits by value, "n2" before "n10". */
int mu_topology_compare_names(const char *a, const char *b);

#endif
