/* Slurm's topology.conf: lines of KEY=VALUE words, a tree
 *   SwitchName=s0 Nodes=dev[0-5]
 *   SwitchName=s3 Switches=s[0-2]
 * or blocks
 *   BlockName=b1 Nodes=node[1-32]
 *   BlockSizes=30,120 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cli/hostlist.h"
#include "cli/topology_file.h"

/* ---- shared with topology.yaml ---- */

struct under {
    struct mu_topology *topology;
    uint32_t parent, line;
};

static enum mu_status add_node(void *ctx, const char *name, size_t length, struct mu_error *err)
{
    struct under *u = ctx;
    uint32_t node;
    enum mu_status status = mu_topology_node_of(u->topology, name, length, u->line, &node, err);
    return status == MU_OK ? mu_topology_put_node(u->topology, node, u->parent, u->line, err) : status;
}

static enum mu_status add_switch(void *ctx, const char *name, size_t length, struct mu_error *err)
{
    struct under *u = ctx;
    uint32_t child;
    enum mu_status status = mu_topology_switch_of(u->topology, name, length, u->line, &child, err);
    return status == MU_OK ? mu_topology_put_switch(u->topology, child, u->parent, u->line, err) : status;
}

enum mu_status topology_add_nodes(struct mu_topology *t, uint32_t parent, const char *list, size_t length,
                                  uint32_t line, struct mu_error *err)
{
    struct under u = {t, parent, line};
    return mu_hostlist_walk(list, length, line, add_node, &u, err);
}

enum mu_status topology_add_switches(struct mu_topology *t, uint32_t parent, const char *list, size_t length,
                                     uint32_t line, struct mu_error *err)
{
    struct under u = {t, parent, line};
    return mu_hostlist_walk(list, length, line, add_switch, &u, err);
}

enum mu_status topology_describe(struct mu_topology *t, const char *kind, const char *name, size_t length,
                                 uint32_t line, uint32_t *ret_switch, struct mu_error *err)
{
    enum mu_status status = mu_topology_switch_of(t, name, length, line, ret_switch, err);
    if (status != MU_OK)
        return status;
    struct mu_topology_switch *s = &t->switches[*ret_switch];
    if (s->described)
        return mu_fail(err, MU_ERR_INVALID, "%u: %s %.*s is described twice, first at line %u; keep one of the two",
                       line, kind, (int)length, name, s->line);
    s->described = true;
    s->line = line;
    return MU_OK;
}

enum mu_status topology_add_block_size(struct topology_block_sizes *sizes, const char *text, size_t length,
                                       uint32_t line, struct mu_error *err)
{
    char digits[16] = "";
    if (length > 0 && length < 10 && strspn(text, "0123456789") >= length)
        memcpy(digits, text, length);
    uint32_t value = (uint32_t)strtoul(digits, NULL, 10);
    if (value == 0)
        return mu_fail(err, MU_ERR_INVALID, "%u: a block size of %.*s is not allowed: whole numbers of at least 1",
                       line, (int)(length < 20 ? length : 20), text);
    if (sizes->count == TOPOLOGY_BLOCK_SIZES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "%u: more than %d block sizes are not allowed", line,
                       TOPOLOGY_BLOCK_SIZES_MAX);
    uint32_t before = sizes->count ? sizes->sizes[sizes->count - 1] : 0;
    if (before && (value <= before || value % before != 0))
        return mu_fail(err, MU_ERR_INVALID, "%u: a block size of %u after %u is not allowed: a multiple of it, larger",
                       line, value, before);
    sizes->line = line;
    sizes->sizes[sizes->count++] = value;
    return MU_OK;
}

/* `count` switches from `first` on get parents, `each` of them one. The parents follow behind the last switch. */
static enum mu_status join(struct mu_topology *t, uint32_t first, uint32_t count, uint32_t each, uint32_t line,
                           struct mu_error *err)
{
    for (uint32_t i = 0; i < count; i += each) {
        uint32_t last = i + each < count ? i + each - 1 : count - 1, parent;
        char name[2 * MU_TOPOLOGY_NAME_SIZE + 2];
        int length = snprintf(name, sizeof name, "%.29s..%.29s", t->switch_names.names[first + i],
                              t->switch_names.names[first + last]);
        enum mu_status status = mu_topology_switch_of(t, name, (size_t)length, line, &parent, err);
        for (uint32_t k = i; k <= last && status == MU_OK; k++)
            status = mu_topology_put_switch(t, first + k, parent, line, err);
        if (status != MU_OK)
            return status;
    }
    return MU_OK;
}

enum mu_status topology_join_blocks(struct mu_topology *t, const struct topology_block_sizes *sizes,
                                    struct mu_error *err)
{
    uint32_t first = 0;
    for (uint32_t i = 1; i < sizes->count; i++) {
        uint32_t end = t->switch_count, each = sizes->sizes[i] / sizes->sizes[i - 1];
        enum mu_status status = join(t, first, end - first, each, sizes->line, err);
        if (status != MU_OK)
            return status;
        first = end;
    }
    return MU_OK;
}

/* ---- lines ---- */

struct word {
    const char *key, *value;
    size_t key_length, value_length;
};

static bool key_is(const struct word *w, const char *name)
{
    return strlen(name) == w->key_length && strncasecmp(w->key, name, w->key_length) == 0;
}

struct reading {
    struct mu_topology *topology;
    struct topology_block_sizes sizes;
    uint32_t line, first_tree_line, first_block_line;
    bool link_speed_seen;
    struct mu_error *err;
};

static enum mu_status read_link_speed(struct reading *r, const struct word *w)
{
    char text[32] = "", *end;
    memcpy(text, w->value, w->value_length < sizeof text ? w->value_length : sizeof text - 1);
    double value = strtod(text, &end);
    if (end == text || !(value > 0 && value < 1e18))
        return mu_fail(r->err, MU_ERR_INVALID, "%u: LinkSpeed=%s is not allowed: a number above 0", r->line, text);
    if (!r->link_speed_seen)
        mu_topology_note(r->topology, "LinkSpeed is not read (it has no unit): fabric.oversubscription says it");
    r->link_speed_seen = true;
    return MU_OK;
}

static enum mu_status read_block_sizes(struct reading *r, const struct word *w)
{
    if (r->sizes.count > 0)
        return mu_fail(r->err, MU_ERR_INVALID, "%u: BlockSizes is given twice, first at line %u; keep one of the two",
                       r->line, r->sizes.line);
    for (size_t at = 0; at <= w->value_length;) {
        const char *begin = w->value + at, *comma = memchr(begin, ',', w->value_length - at);
        size_t length = comma ? (size_t)(comma - begin) : w->value_length - at;
        enum mu_status status = topology_add_block_size(&r->sizes, begin, length, r->line, r->err);
        if (status != MU_OK)
            return status;
        at += length + 1;
    }
    return MU_OK;
}

/* The first word of a line: what it describes. */
static enum mu_status read_head(struct reading *r, const struct word *w, uint32_t *ret_switch)
{
    bool tree = key_is(w, "SwitchName"), block = key_is(w, "BlockName");
    if (!tree && !block)
        return mu_fail(r->err, MU_ERR_INVALID,
                       "%u: %.*s is not allowed here: a line begins with SwitchName, BlockName or BlockSizes", r->line,
                       (int)(w->key_length < 40 ? w->key_length : 40), w->key);
    uint32_t *first = tree ? &r->first_tree_line : &r->first_block_line,
             other = tree ? r->first_block_line : r->first_tree_line;
    *first = *first ? *first : r->line;
    if (other)
        return mu_fail(r->err, MU_ERR_INVALID, "%u: switches and blocks in one file are not allowed: line %u has %s",
                       r->line, other, tree ? "BlockName" : "SwitchName");
    return topology_describe(r->topology, tree ? "switch" : "block", w->value, w->value_length, r->line, ret_switch,
                             r->err);
}

static enum mu_status read_tail(struct reading *r, const struct word *w, uint32_t parent)
{
    if (key_is(w, "Nodes"))
        return topology_add_nodes(r->topology, parent, w->value, w->value_length, r->line, r->err);
    if (key_is(w, "Switches") && r->first_tree_line)
        return topology_add_switches(r->topology, parent, w->value, w->value_length, r->line, r->err);
    if (key_is(w, "LinkSpeed"))
        return read_link_speed(r, w);
    return mu_fail(r->err, MU_ERR_INVALID, "%u: %.*s is not allowed here: Nodes, Switches or LinkSpeed", r->line,
                   (int)(w->key_length < 40 ? w->key_length : 40), w->key);
}

/* The next KEY=VALUE of the line; false at its end. A backslash before the line's end joins two lines. */
static bool next_word(struct reading *r, const char **at, const char *end, struct word *ret_word)
{
    for (;; ++*at) {
        if (*at + 1 < end && **at == '\\' && ((*at)[1] == '\n' || (*at)[1] == '\r')) {
            *at += (*at)[1] == '\r' && *at + 2 < end && (*at)[2] == '\n';
            ++*at;
            r->line++;
        } else if (*at == end || !strchr(" \t\r", **at)) {
            break;
        }
    }
    if (*at == end || **at == '\n' || **at == '#')
        return false;
    const char *begin = *at, *equals = NULL;
    for (; *at < end && !memchr(" \t\r\n#\\", **at, 6); ++*at)
        equals = **at == '=' && !equals ? *at : equals;
    *ret_word = (struct word){begin, equals ? equals + 1 : NULL, (size_t)((equals ? equals : *at) - begin),
                              equals ? (size_t)(*at - equals - 1) : 0};
    return true;
}

static enum mu_status read_line(struct reading *r, const char **at, const char *end)
{
    struct word w;
    uint32_t here = MU_TOPOLOGY_NONE;
    bool sizes = false;
    for (bool first = true; next_word(r, at, end, &w); first = false) {
        enum mu_status status;
        if (!w.value || w.key_length == 0)
            return mu_fail(r->err, MU_ERR_INVALID, "%u: %.*s is not allowed: words are KEY=VALUE", r->line,
                           (int)(w.key_length < 40 ? w.key_length : 40), w.key);
        if (first && key_is(&w, "BlockSizes")) {
            status = read_block_sizes(r, &w);
            sizes = true;
        } else if (sizes) {
            status = mu_fail(r->err, MU_ERR_INVALID, "%u: BlockSizes stands alone on its line", r->line);
        } else {
            status = first ? read_head(r, &w, &here) : read_tail(r, &w, here);
        }
        if (status != MU_OK)
            return status;
    }
    while (*at < end && **at != '\n')
        ++*at;
    *at += *at < end;
    return MU_OK;
}

enum mu_status topology_read_slurm(struct mu_topology *t, const char *text, size_t size_bytes, struct mu_error *err)
{
    struct reading r = {.topology = t, .err = err};
    const char *at = text, *end = text + size_bytes;
    while (at < end) {
        r.line++;
        enum mu_status status = read_line(&r, &at, end);
        if (status != MU_OK)
            return status;
    }
    if (t->switch_count == 0)
        return mu_fail(err, MU_ERR_INVALID, "%u: no switch and no block is described", r.line);
    if (r.sizes.count > 0 && !r.first_block_line)
        return mu_fail(err, MU_ERR_INVALID, "%u: BlockSizes without a block", r.sizes.line);
    return topology_join_blocks(t, &r.sizes, err);
}
