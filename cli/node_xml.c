#include "cli/node_xml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum mu_status xml_bad(const struct xml *x, const char *what, const char *value)
{
    return mu_fail(x->err, MU_ERR_INVALID, "%u: %s%.60s", x->line, what, value);
}

/* ---- tags ---- */

static void skip_to(struct xml *x, const char *at)
{
    for (; x->at < at; x->at++)
        x->line += *x->at == '\n';
}

/* The next tag; *ret_found false at the end of the text. Comments and declarations are skipped. */
static enum mu_status next_tag(struct xml *x, struct xml_tag *tag, bool *ret_found)
{
    for (;;) {
        const char *open = memchr(x->at, '<', (size_t)(x->end - x->at));
        *ret_found = open != NULL;
        if (!open)
            return MU_OK;
        skip_to(x, open);
        bool comment = strncmp(open, "<!--", 4) == 0;
        const char *close = comment ? strstr(open, "-->") : strchr(open, '>');
        if (!close)
            return xml_bad(x, "not XML: a tag or comment does not end", "");
        if (open[1] == '!' || open[1] == '?') {
            skip_to(x, close + (comment ? 3 : 1));
            continue;
        }
        tag->closing = open[1] == '/';
        const char *name = open + 1 + tag->closing;
        size_t length = strcspn(name, " \t\r\n/>");
        if (length == 0 || length >= sizeof tag->name)
            return xml_bad(x, "not XML: a tag without a name, or with a very long one", "");
        memcpy(tag->name, name, length);
        tag->name[length] = 0;
        tag->empty = close[-1] == '/';
        tag->attributes = name + length;
        tag->attributes_end = close;
        tag->text = close + 1;
        tag->text_end = tag->text + strcspn(tag->text, "<");
        skip_to(x, close + 1);
        return MU_OK;
    }
}

void xml_attribute(const struct xml_tag *tag, const char *name, char out[XML_VALUE_SIZE])
{
    size_t length = strlen(name);
    out[0] = 0;
    for (const char *at = tag->attributes; at + length + 2 < tag->attributes_end; at++) {
        if (!strchr(" \t\r\n", *at) || strncmp(at + 1, name, length) != 0 || strncmp(at + 1 + length, "=\"", 2) != 0)
            continue;
        const char *begin = at + length + 3;
        size_t size = strcspn(begin, "\"");
        size = size < XML_VALUE_SIZE ? size : XML_VALUE_SIZE - 1;
        memcpy(out, begin, size);
        out[size] = 0;
        return;
    }
}

enum mu_status xml_number(const struct xml *x, const struct xml_tag *tag, const char *name, double least,
                          double *ret_value)
{
    char text[XML_VALUE_SIZE], *end, what[2 * XML_VALUE_SIZE];
    xml_attribute(tag, name, text);
    double value = strtod(text, &end);
    if (end == text || !(value >= least && value <= 1e9)) {
        snprintf(what, sizeof what, "%s: %s of the value ", tag->name, name);
        return xml_bad(x, what, text[0] ? text : "(missing)");
    }
    *ret_value = value;
    return MU_OK;
}

static enum mu_status take(struct xml *x, const struct xml_tag *tag, const char *root,
                           enum mu_status (*see)(void *ctx, const struct xml_tag *tag), void *ctx)
{
    char wanted[2 * XML_VALUE_SIZE];
    if (tag->closing) {
        if (x->depth == 0 || strcmp(x->open[x->depth - 1], tag->name) != 0)
            return xml_bad(x, "not XML: nothing is open that this closes: ", tag->name);
        x->depth--;
        return MU_OK;
    }
    if (x->depth == XML_DEPTH_MAX)
        return mu_fail(x->err, MU_ERR_LIMIT, "%u: more than %d tags inside each other", x->line, XML_DEPTH_MAX);
    if (x->depth == 0 && strcmp(tag->name, root) != 0) {
        snprintf(wanted, sizeof wanted, "<%s> is expected, not ", root);
        return xml_bad(x, wanted, tag->name);
    }
    memcpy(x->open[x->depth], tag->name, sizeof tag->name);
    enum mu_status status = see(ctx, tag);
    x->depth += !tag->empty;
    return status;
}

enum mu_status xml_walk(struct xml *x, const char *root, enum mu_status (*see)(void *ctx, const struct xml_tag *tag),
                        void *ctx)
{
    struct xml_tag tag;
    bool found;
    enum mu_status status;
    while ((status = next_tag(x, &tag, &found)) == MU_OK && found)
        if ((status = take(x, &tag, root, see, ctx)) != MU_OK)
            return status;
    if (status == MU_OK && x->depth > 0)
        return xml_bad(x, "not XML: this is not closed: ", x->open[x->depth - 1]);
    return status;
}

/* ---- the node ---- */

enum mu_status node_add_gpu(struct node_parts *parts, const struct xml *x, const char *busid, struct node_gpu **ret_gpu)
{
    if (parts->gpu_count == MU_NODE_DEVICES_MAX)
        return mu_fail(x->err, MU_ERR_LIMIT, "%u: more than %d GPUs are not allowed", x->line, MU_NODE_DEVICES_MAX);
    for (uint32_t i = 0; i < parts->gpu_count; i++)
        if (busid[0] && strcmp(parts->gpus[i].busid, busid) == 0)
            return xml_bad(x, "two GPUs have the busid ", busid);
    struct node_gpu *gpu = &parts->gpus[parts->gpu_count];
    *gpu = (struct node_gpu){.island = parts->gpu_count++};
    snprintf(gpu->busid, sizeof gpu->busid, "%s", busid);
    *ret_gpu = gpu;
    return MU_OK;
}

void node_join(struct node_parts *parts, uint32_t gpu, uint32_t other)
{
    uint32_t from = parts->gpus[gpu].island, to = parts->gpus[other].island;
    for (uint32_t i = 0; i < parts->gpu_count; i++)
        if (parts->gpus[i].island == from)
            parts->gpus[i].island = to;
}

void node_sum_up(const struct node_parts *parts, struct mu_node_file *ret_node)
{
    struct mu_node_file node = {.devices = parts->gpu_count,
                                .cards = parts->cards,
                                .nic_bytes_per_second = parts->nic_bytes_per_second / parts->gpu_count};
    bool seen[MU_NODE_DEVICES_MAX] = {false};
    for (uint32_t i = 0; i < parts->gpu_count; i++) {
        const struct node_gpu *gpu = &parts->gpus[i];
        node.islands += !seen[gpu->island];
        seen[gpu->island] = true;
        double link = gpu->link_bytes_per_second > 0 ? gpu->link_bytes_per_second
                                                     : gpu->host_bytes_per_second; /* without NVLink over PCIe */
        if (i == 0 || link < node.link_bytes_per_second)
            node.link_bytes_per_second = link;
        if (i == 0 || gpu->host_bytes_per_second < node.host_bytes_per_second)
            node.host_bytes_per_second = gpu->host_bytes_per_second;
    }
    *ret_node = node;
}

enum mu_status mu_node_file_parse(const char *name, enum mu_node_format format, const char *text, size_t size_bytes,
                                  struct mu_node_file *ret_node, struct mu_error *err)
{
    struct mu_error own;
    struct xml x = {.line = 1, .err = err ? err : &own};
    struct node_parts *parts = calloc(1, sizeof *parts);
    char *copy = malloc(size_bytes + 1); /* ends with a 0 */
    enum mu_status status = parts && copy ? MU_OK : mu_fail(x.err, MU_ERR_NO_MEMORY, "0: out of memory");
    if (status == MU_OK) {
        memcpy(copy, text, size_bytes);
        copy[size_bytes] = 0;
        x.at = copy;
        x.end = copy + size_bytes;
        status = memchr(copy, 0, size_bytes)  ? xml_bad(&x, "zero bytes are not allowed", "")
                 : format == MU_NODE_NCCL_XML ? node_read_nccl(&x, parts)
                                              : node_read_hwloc(&x, parts);
    }
    if (status == MU_OK)
        node_sum_up(parts, ret_node);
    free(copy);
    free(parts);
    return status == MU_OK ? MU_OK : topology_located(name, x.err);
}
