/* Slurm's topology.yaml: a list of topologies, of which the default one (else the first) is read:
 *   - topology: topo1
 *     cluster_default: true
 *     tree:
 *       switches:
 *         - {switch: s0, nodes: "dev[0-5]"}
 *         - {switch: s3, children: "s[0-2]"}
 *   - topology: topo2
 *     block:
 *       block_sizes: [4, 16]
 *       blocks:
 *         - {block: b1, nodes: "node[1-4]"} */
#include <stdbool.h>
#include <string.h>
#include <yaml.h>

#include "cli/topology_file.h"

struct reading {
    struct mu_topology *topology;
    yaml_document_t document;
    struct mu_error *err;
};

static uint32_t line_of(const yaml_node_t *node)
{
    return (uint32_t)node->start_mark.line + 1;
}

static bool text_is(const yaml_node_t *node, const char *text)
{
    return node->type == YAML_SCALAR_NODE && strcmp((const char *)node->data.scalar.value, text) == 0;
}

/* The value of a key; NULL when the node is no mapping or has no such key. */
static yaml_node_t *value_of(struct reading *r, const yaml_node_t *node, const char *key)
{
    if (!node || node->type != YAML_MAPPING_NODE)
        return NULL;
    for (const yaml_node_pair_t *p = node->data.mapping.pairs.start; p < node->data.mapping.pairs.top; p++)
        if (text_is(yaml_document_get_node(&r->document, p->key), key))
            return yaml_document_get_node(&r->document, p->value);
    return NULL;
}

static enum mu_status expect(struct reading *r, const yaml_node_t *node, yaml_node_type_t type, const char *what)
{
    if (node->type == type)
        return MU_OK;
    return mu_fail(r->err, MU_ERR_INVALID, "%u: %s is expected here", line_of(node), what);
}

/* ---- one switch or block ---- */

typedef enum mu_status add_list(struct mu_topology *t, uint32_t parent, const char *list, size_t length, uint32_t line,
                                struct mu_error *err);

static enum mu_status read_list(struct reading *r, const yaml_node_t *entry, const char *key, uint32_t here,
                                add_list *add)
{
    const yaml_node_t *value = value_of(r, entry, key);
    enum mu_status status = value ? expect(r, value, YAML_SCALAR_NODE, "a list of names in one text") : MU_OK;
    if (status != MU_OK || !value)
        return status;
    return add(r->topology, here, (const char *)value->data.scalar.value, value->data.scalar.length, line_of(value),
               r->err);
}

static enum mu_status read_entry(struct reading *r, const yaml_node_t *entry, const char *kind)
{
    const yaml_node_t *name = value_of(r, entry, kind);
    uint32_t here;
    if (!name || name->type != YAML_SCALAR_NODE)
        return mu_fail(r->err, MU_ERR_INVALID, "%u: an entry with %s: NAME is expected here", line_of(entry), kind);
    enum mu_status status = topology_describe(r->topology, kind, (const char *)name->data.scalar.value,
                                              name->data.scalar.length, line_of(name), &here, r->err);
    if (status == MU_OK)
        status = read_list(r, entry, "nodes", here, topology_add_nodes);
    return status == MU_OK ? read_list(r, entry, "children", here, topology_add_switches) : status;
}

static enum mu_status read_entries(struct reading *r, const yaml_node_t *group, const char *list, const char *kind)
{
    const yaml_node_t *entries = value_of(r, group, list);
    if (!entries)
        return mu_fail(r->err, MU_ERR_INVALID, "%u: %s: is missing here", line_of(group), list);
    enum mu_status status = expect(r, entries, YAML_SEQUENCE_NODE, "a list");
    if (status != MU_OK)
        return status;
    for (const yaml_node_item_t *i = entries->data.sequence.items.start;
         i < entries->data.sequence.items.top && status == MU_OK; i++)
        status = read_entry(r, yaml_document_get_node(&r->document, *i), kind);
    return status;
}

static enum mu_status read_blocks(struct reading *r, const yaml_node_t *block)
{
    struct topology_block_sizes sizes = {.count = 0};
    const yaml_node_t *list = value_of(r, block, "block_sizes");
    enum mu_status status = read_entries(r, block, "blocks", "block");
    if (status != MU_OK || !list)
        return status;
    status = expect(r, list, YAML_SEQUENCE_NODE, "a list of numbers");
    for (const yaml_node_item_t *i = list->data.sequence.items.start;
         status == MU_OK && i < list->data.sequence.items.top; i++) {
        const yaml_node_t *size = yaml_document_get_node(&r->document, *i);
        status = expect(r, size, YAML_SCALAR_NODE, "a number");
        if (status == MU_OK)
            status = topology_add_block_size(&sizes, (const char *)size->data.scalar.value, size->data.scalar.length,
                                             line_of(size), r->err);
    }
    return status == MU_OK ? topology_join_blocks(r->topology, &sizes, r->err) : status;
}

/* ---- the document ---- */

static const yaml_node_t *choose(struct reading *r, const yaml_node_t *list)
{
    const yaml_node_t *first = NULL;
    for (const yaml_node_item_t *i = list->data.sequence.items.start; i < list->data.sequence.items.top; i++) {
        const yaml_node_t *entry = yaml_document_get_node(&r->document, *i);
        const yaml_node_t *is_default = value_of(r, entry, "cluster_default");
        if (is_default && text_is(is_default, "true"))
            return entry;
        first = first ? first : entry;
    }
    return first;
}

static enum mu_status read_document(struct reading *r)
{
    const yaml_node_t *root = yaml_document_get_root_node(&r->document);
    if (!root)
        return mu_fail(r->err, MU_ERR_INVALID, "1: empty; a list of topologies is expected");
    enum mu_status status = expect(r, root, YAML_SEQUENCE_NODE, "a list of topologies");
    const yaml_node_t *chosen = status == MU_OK ? choose(r, root) : NULL;
    if (status != MU_OK)
        return status;
    const yaml_node_t *tree = value_of(r, chosen, "tree"), *block = value_of(r, chosen, "block");
    if (!chosen || (!tree && !block))
        return mu_fail(r->err, MU_ERR_INVALID, "%u: a topology with tree: or block: is expected here",
                       line_of(chosen ? chosen : root));
    if (tree && block)
        return mu_fail(r->err, MU_ERR_INVALID, "%u: tree and block in one topology are not allowed", line_of(block));
    return tree ? read_entries(r, tree, "switches", "switch") : read_blocks(r, block);
}

enum mu_status topology_read_slurm_yaml(struct mu_topology *t, const char *text, size_t size_bytes,
                                        struct mu_error *err)
{
    struct reading r = {.topology = t, .err = err};
    yaml_parser_t parser;
    enum mu_status status;
    if (!yaml_parser_initialize(&parser))
        return mu_fail(err, MU_ERR_NO_MEMORY, "0: out of memory");
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, size_bytes);
    if (yaml_parser_load(&parser, &r.document)) {
        status = read_document(&r);
        yaml_document_delete(&r.document);
    } else {
        status = mu_fail(err, MU_ERR_INVALID, "%u: not YAML: %s", (unsigned)parser.problem_mark.line + 1,
                         parser.problem ? parser.problem : "unreadable");
    }
    yaml_parser_delete(&parser);
    return status;
}
