/* topograph's JSON: {"instances": [{"id": "I21", "network_layers": ["leaf-a", "spine-a"],
 *                                   "labels": {"accelerator.topograph.run/domain": "nvl-1"}}]}
 * Layers stand closest first. An NVLink domain becomes a level below them where all of it hangs under one switch. */
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/topology_file.h"

#define DOMAIN_LABEL "accelerator.topograph.run/domain"

struct reading {
    struct mu_topology *topology;
    const char *text, *at; /* ids stand in the file in the order of the instances: where the last one was found */
    uint32_t line;         /* of `at` */
    struct mu_error *err;
};

/* Jansson keeps no lines: the line where the next id stands, searched onward. */
static void find_line(struct reading *r, const char *id)
{
    char quoted[MU_TOPOLOGY_NAME_SIZE + 2];
    int length = snprintf(quoted, sizeof quoted, "\"%s\"", id);
    const char *found = length < (int)sizeof quoted ? strstr(r->at, quoted) : NULL;
    if (!found)
        return;
    for (; r->at < found; r->at++)
        r->line += *r->at == '\n';
    r->at = found + 1;
}

static enum mu_status bad(struct reading *r, const char *what)
{
    return mu_fail(r->err, MU_ERR_INVALID, "%u: %s", r->line, what);
}

/* Switches from the closest upward. */
static enum mu_status read_layers(struct reading *r, json_t *layers, uint32_t node, uint32_t *ret_leaf)
{
    uint32_t below = MU_TOPOLOGY_NONE;
    *ret_leaf = MU_TOPOLOGY_NONE;
    for (size_t i = 0; i < json_array_size(layers); i++) {
        const char *name = json_string_value(json_array_get(layers, i));
        uint32_t here;
        if (!name)
            return bad(r, "network_layers: a list of names is expected");
        enum mu_status status = mu_topology_switch_of(r->topology, name, strlen(name), r->line, &here, r->err);
        if (status == MU_OK)
            status = i == 0 ? mu_topology_put_node(r->topology, node, here, r->line, r->err)
                            : mu_topology_put_switch(r->topology, below, here, r->line, r->err);
        if (status != MU_OK)
            return status;
        if (here == below)
            return bad(r, "network_layers: a switch cannot be below itself");
        below = here;
        *ret_leaf = i == 0 ? here : *ret_leaf;
    }
    return MU_OK;
}

static enum mu_status read_instance(struct reading *r, json_t *instance)
{
    const char *id = json_string_value(json_object_get(instance, "id"));
    json_t *layers = json_object_get(instance, "network_layers");
    uint32_t node, leaf, before = r->topology->node_count;
    if (!id)
        return bad(r, "an instance without \"id\": \"NAME\" is not allowed");
    find_line(r, id);
    enum mu_status status = mu_topology_node_of(r->topology, id, strlen(id), r->line, &node, r->err);
    if (status != MU_OK)
        return status;
    if (r->topology->node_count == before)
        return mu_fail(r->err, MU_ERR_INVALID, "%u: instance %s is there twice, first at line %u; keep one of the two",
                       r->line, id, r->topology->nodes[node].line);
    if (layers && !json_is_array(layers))
        return bad(r, "network_layers: a list of names is expected");
    return layers ? read_layers(r, layers, node, &leaf) : MU_OK;
}

/* ---- NVLink domains ---- */

struct domain {
    const char *name;
    uint32_t node, leaf;
};

static int compare_domains(const void *a, const void *b)
{
    const struct domain *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : x->node < y->node ? -1 : x->node > y->node;
}

/* All of a domain under one switch: the domain goes between. */
static enum mu_status put_domain(struct reading *r, const struct domain *d, uint32_t count, uint32_t *split)
{
    char name[MU_TOPOLOGY_NAME_SIZE + 16];
    uint32_t here;
    if (count < 2)
        return MU_OK;
    for (uint32_t i = 0; i < count; i++)
        if (d[i].leaf != d[0].leaf) {
            ++*split;
            return MU_OK;
        }
    int length = snprintf(name, sizeof name, "domain:%s", d->name);
    enum mu_status status = mu_topology_switch_of(r->topology, name, (size_t)length, 0, &here, r->err);
    if (status == MU_OK && d->leaf != MU_TOPOLOGY_NONE)
        status = mu_topology_put_switch(r->topology, here, d->leaf, 0, r->err);
    for (uint32_t i = 0; i < count && status == MU_OK; i++)
        r->topology->nodes[d[i].node].parent = here;
    return status;
}

static enum mu_status read_domains(struct reading *r, json_t *instances)
{
    size_t count = 0, total = json_array_size(instances);
    struct domain *list = calloc(total + 1, sizeof *list);
    uint32_t split = 0;
    enum mu_status status = MU_OK;
    if (!list)
        return mu_fail(r->err, MU_ERR_NO_MEMORY, "0: out of memory for %zu instances", total);
    for (size_t i = 0; i < total; i++) {
        json_t *labels = json_object_get(json_array_get(instances, i), "labels");
        const char *name = json_string_value(json_object_get(labels, DOMAIN_LABEL));
        if (name)
            list[count++] = (struct domain){name, (uint32_t)i, r->topology->nodes[i].parent};
    }
    qsort(list, count, sizeof *list, compare_domains);
    for (size_t first = 0, end; first < count && status == MU_OK; first = end) {
        for (end = first + 1; end < count && strcmp(list[end].name, list[first].name) == 0; end++)
            ;
        status = put_domain(r, &list[first], (uint32_t)(end - first), &split);
    }
    free(list);
    if (split > 0)
        mu_topology_note(r->topology, "NVLink domains that lie under several switches are not looked at");
    return status;
}

enum mu_status topology_read_topograph(struct mu_topology *t, const char *text, size_t size_bytes, struct mu_error *err)
{
    struct reading r = {.topology = t, .text = text, .at = text, .line = 1, .err = err};
    json_error_t why;
    json_t *root = json_loadb(text, size_bytes, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        return mu_fail(err, MU_ERR_INVALID, "%d: not JSON: %s", why.line > 0 ? why.line : 1, why.text);
    json_t *instances = json_object_get(root, "instances");
    enum mu_status status = MU_OK;
    if (!json_is_array(instances))
        status = bad(&r, "{\"instances\": [...]} is expected");
    for (size_t i = 0; status == MU_OK && i < json_array_size(instances); i++)
        status = read_instance(&r, json_array_get(instances, i));
    if (status == MU_OK)
        status = read_domains(&r, instances);
    json_decref(root);
    return status;
}
