#include "plan/topology.h"

#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "plan/text.h"

#define NONE MU_TOPOLOGY_NONE

/* ---- names ---- */

static uint32_t slot_of(const struct mu_name_table *table, const char *name, size_t length)
{
    uint32_t at = (uint32_t)mu_xxh3_64(name, length, 0) & (table->slot_count - 1);
    while (table->slots[at] != NONE) {
        const char *there = table->names[table->slots[at]];
        if (strncmp(there, name, length) == 0 && there[length] == 0)
            break;
        at = (at + 1) & (table->slot_count - 1);
    }
    return at;
}

static bool widen_slots(struct mu_name_table *table)
{
    uint32_t count = table->slot_count ? 2 * table->slot_count : 64;
    uint32_t *slots = malloc(count * sizeof *slots);
    if (!slots)
        return false;
    memset(slots, 0xff, count * sizeof *slots);
    free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    for (uint32_t i = 0; i < table->count; i++)
        slots[slot_of(table, table->names[i], strlen(table->names[i]))] = i;
    return true;
}

/* Room for one more name, and in `items` for one more item of the caller's. */
static bool make_room(struct mu_name_table *table, void **items, size_t item_size)
{
    if (2 * (table->count + 1) > table->slot_count && !widen_slots(table))
        return false;
    if (table->count < table->room)
        return true;
    uint32_t room = table->room ? 2 * table->room : 32;
    char **names = realloc(table->names, room * sizeof *names);
    if (!names)
        return false;
    table->names = names;
    void *grown = realloc(*items, room * item_size);
    if (!grown)
        return false;
    *items = grown;
    table->room = room;
    return true;
}

static void table_fini(struct mu_name_table *table)
{
    for (uint32_t i = 0; i < table->count; i++)
        free(table->names[i]);
    free(table->names);
    free(table->slots);
}

static enum mu_status check_name(const char *name, size_t length, uint32_t line, struct mu_error *err)
{
    if (length == 0)
        return mu_fail(err, MU_ERR_INVALID, "%u: an empty name is not allowed: 1 to %d characters", line,
                       MU_TOPOLOGY_NAME_SIZE - 1);
    if (length >= MU_TOPOLOGY_NAME_SIZE)
        return mu_fail(err, MU_ERR_INVALID, "%u: a name of %zu characters is not allowed: at most %d (it begins %.20s)",
                       line, length, MU_TOPOLOGY_NAME_SIZE - 1, name);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)name[i] <= ' ' || name[i] == 0x7f)
            return mu_fail(err, MU_ERR_INVALID, "%u: a blank or control character in a name is not allowed", line);
    return MU_OK;
}

/* Finds or adds; *ret_new says which. */
static enum mu_status intern(struct mu_name_table *table, const char *name, size_t length, uint32_t line, void **items,
                             size_t item_size, uint32_t most, uint32_t *ret_index, bool *ret_new, struct mu_error *err)
{
    enum mu_status status = check_name(name, length, line, err);
    if (status != MU_OK)
        return status;
    *ret_new = false;
    if (table->slot_count) {
        *ret_index = table->slots[slot_of(table, name, length)];
        if (*ret_index != NONE)
            return MU_OK;
    }
    if (table->count == most)
        return mu_fail(err, MU_ERR_LIMIT, "%u: more than %u names of one kind are not allowed; %.*s is one too many",
                       line, most, (int)length, name);
    char *copy = make_room(table, items, item_size) ? strndup(name, length) : NULL;
    if (!copy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "%u: out of memory after %u names", line, table->count);
    table->slots[slot_of(table, name, length)] = table->count;
    table->names[table->count] = copy;
    *ret_index = table->count++;
    *ret_new = true;
    return MU_OK;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

int mu_topology_compare_names(const char *a, const char *b)
{
    const char *whole_a = a, *whole_b = b;
    while (*a && *b) {
        if (is_digit(*a) && is_digit(*b)) {
            a += strspn(a, "0");
            b += strspn(b, "0");
            size_t m = strspn(a, "0123456789"), n = strspn(b, "0123456789");
            int order = m != n ? (m < n ? -1 : 1) : strncmp(a, b, m);
            if (order != 0)
                return order;
            a += m;
            b += n;
        } else if (*a != *b) {
            break;
        } else {
            a++;
            b++;
        }
    }
    int order = (unsigned char)*a - (unsigned char)*b;
    return order != 0 ? order : strcmp(whole_a, whole_b); /* n1 and n01 differ */
}

/* ---- building ---- */

struct mu_topology *mu_topology_new(void)
{
    return calloc(1, sizeof(struct mu_topology));
}

void mu_topology_free(struct mu_topology *t)
{
    if (!t)
        return;
    table_fini(&t->switch_names);
    table_fini(&t->node_names);
    free(t->switches);
    free(t->nodes);
    free(t);
}

enum mu_status mu_topology_switch_of(struct mu_topology *t, const char *name, size_t length, uint32_t line,
                                     uint32_t *ret_index, struct mu_error *err)
{
    bool is_new;
    enum mu_status status = intern(&t->switch_names, name, length, line, (void **)&t->switches, sizeof *t->switches,
                                   MU_TOPOLOGY_SWITCHES_MAX, ret_index, &is_new, err);
    if (status == MU_OK && is_new)
        t->switches[t->switch_count++] = (struct mu_topology_switch){.parent = NONE, .line = line};
    return status;
}

enum mu_status mu_topology_node_of(struct mu_topology *t, const char *name, size_t length, uint32_t line,
                                   uint32_t *ret_index, struct mu_error *err)
{
    bool is_new;
    enum mu_status status = intern(&t->node_names, name, length, line, (void **)&t->nodes, sizeof *t->nodes,
                                   MU_TOPOLOGY_NODES_MAX, ret_index, &is_new, err);
    if (status == MU_OK && is_new)
        t->nodes[t->node_count++] = (struct mu_topology_node){.parent = NONE, .line = line};
    return status;
}

uint32_t mu_topology_find_node(const struct mu_topology *t, const char *name)
{
    return t->node_names.slot_count ? t->node_names.slots[slot_of(&t->node_names, name, strlen(name))] : NONE;
}

enum mu_status mu_topology_put_node(struct mu_topology *t, uint32_t node, uint32_t parent, uint32_t line,
                                    struct mu_error *err)
{
    struct mu_topology_node *n = &t->nodes[node];
    if (n->parent != NONE && n->parent != parent)
        return mu_fail(err, MU_ERR_INVALID, "%u: node %s is under %s, but at line %u under %s; keep one of the two",
                       line, t->node_names.names[node], t->switch_names.names[parent], n->line,
                       t->switch_names.names[n->parent]);
    n->repeated = n->parent != NONE;
    n->line = n->repeated ? n->line : line;
    n->parent = parent;
    return MU_OK;
}

enum mu_status mu_topology_put_switch(struct mu_topology *t, uint32_t child, uint32_t parent, uint32_t line,
                                      struct mu_error *err)
{
    struct mu_topology_switch *s = &t->switches[child];
    if (s->parent != NONE && s->parent != parent)
        return mu_fail(err, MU_ERR_INVALID, "%u: switch %s is under %s, but also under %s; keep one of the two", line,
                       t->switch_names.names[child], t->switch_names.names[parent], t->switch_names.names[s->parent]);
    s->parent = parent;
    return MU_OK;
}

/* ---- notes ---- */

void mu_topology_note(struct mu_topology *t, const char *text)
{
    if (t->note_count == MU_TOPOLOGY_NOTES_MAX)
        return;
    struct mu_text note;
    mu_text_init(&note, t->notes[t->note_count++], MU_TOPOLOGY_NOTE_SIZE);
    mu_text_put(&note, text);
}

/* "COUNT <what> (a, b, c, ...)<meaning>". */
struct examples {
    char names[MU_TOPOLOGY_NOTE_SIZE / 2];
    struct mu_text text;
    uint32_t count;
};

enum { EXAMPLES_SHOWN = 3 };

static void add_example(struct examples *e, const char *name)
{
    if (e->count == 0)
        mu_text_init(&e->text, e->names, sizeof e->names);
    if (e->count < EXAMPLES_SHOWN) {
        mu_text_put(&e->text, e->count ? ", " : "");
        mu_text_put(&e->text, name);
    } else if (e->count == EXAMPLES_SHOWN) {
        mu_text_put(&e->text, ", ...");
    }
    e->count++;
}

static void note_examples(struct mu_topology *t, const struct examples *e, const char *one, const char *several,
                          const char *meaning)
{
    char line[MU_TOPOLOGY_NOTE_SIZE];
    struct mu_text text;
    if (e->count == 0)
        return;
    mu_text_init(&text, line, sizeof line);
    mu_text_put_uint(&text, e->count);
    mu_text_put(&text, e->count == 1 ? one : several);
    mu_text_put(&text, " (");
    mu_text_put(&text, e->names);
    mu_text_put(&text, ")");
    mu_text_put(&text, meaning);
    mu_topology_note(t, line);
}

/* ---- the nodes of the cluster ---- */

struct named {
    const char *name;
    uint32_t node;
};

static int compare_named(const void *a, const void *b)
{
    return mu_topology_compare_names(((const struct named *)a)->name, ((const struct named *)b)->name);
}

static enum mu_status drop_last(struct mu_topology *t, uint32_t present, struct mu_error *err)
{
    struct named *order = malloc(t->node_count * sizeof *order);
    uint32_t count = 0;
    if (!order)
        return mu_fail(err, MU_ERR_NO_MEMORY, "0: out of memory for %u nodes", t->node_count);
    for (uint32_t i = 0; i < t->node_count; i++)
        if (!t->nodes[i].absent)
            order[count++] = (struct named){t->node_names.names[i], i};
    if (count > present)
        qsort(order, count, sizeof *order, compare_named);
    for (uint32_t i = present; i < count; i++)
        t->nodes[order[i].node].absent = true;
    free(order);
    return MU_OK;
}

static enum mu_status add_nameless(struct mu_topology *t, struct mu_error *err)
{
    for (uint32_t number = 1;; number++) {
        char name[MU_TOPOLOGY_NAME_SIZE];
        struct mu_text text;
        uint32_t before = t->node_count, index;
        mu_text_init(&text, name, sizeof name);
        mu_text_put(&text, "unnamed-");
        mu_text_put_uint(&text, (uint64_t)before + number);
        enum mu_status status = mu_topology_node_of(t, name, text.length, 0, &index, err);
        if (status != MU_OK || t->node_count > before)
            return status;
    }
}

enum mu_status mu_topology_expect(struct mu_topology *t, uint32_t present, struct mu_error *err)
{
    uint32_t here = 0;
    for (uint32_t i = 0; i < t->node_count; i++)
        here += !t->nodes[i].absent;
    enum mu_status status = here > present ? drop_last(t, present, err) : MU_OK;
    for (; here < present && status == MU_OK; here++)
        status = add_nameless(t, err);
    return status;
}

/* ---- the whole ---- */

/* Levels from the leaves upward; a switch that is never reached is below itself. */
static enum mu_status find_levels(struct mu_topology *t, uint32_t *waiting, uint32_t *queue, struct mu_error *err)
{
    uint32_t head = 0, tail = 0;
    for (uint32_t i = 0; i < t->switch_count; i++)
        if (t->switches[i].parent != NONE)
            waiting[t->switches[i].parent]++;
    for (uint32_t i = 0; i < t->switch_count; i++)
        if (waiting[i] == 0)
            queue[tail++] = i;
    while (head < tail) {
        const struct mu_topology_switch *s = &t->switches[queue[head++]];
        if (s->parent == NONE)
            continue;
        struct mu_topology_switch *up = &t->switches[s->parent];
        up->level = s->level + 1 > up->level ? s->level + 1 : up->level;
        if (up->level >= MU_TOPOLOGY_LEVELS_MAX)
            return mu_fail(err, MU_ERR_LIMIT, "%u: switch %s stands on %u levels of others; at most %d are allowed",
                           up->line, t->switch_names.names[s->parent], up->level, MU_TOPOLOGY_LEVELS_MAX - 1);
        if (--waiting[s->parent] == 0)
            queue[tail++] = s->parent;
    }
    for (uint32_t i = 0; i < t->switch_count; i++)
        if (waiting[i] > 0)
            return mu_fail(err, MU_ERR_INVALID, "%u: switch %s is in a circle of switches that are below themselves",
                           t->switches[i].line, t->switch_names.names[i]);
    return MU_OK;
}

static void count_nodes(struct mu_topology *t)
{
    t->present_count = t->level_count = 0;
    for (uint32_t i = 0; i < t->node_count; i++) {
        t->present_count += !t->nodes[i].absent;
        for (uint32_t up = t->nodes[i].parent; up != NONE; up = t->switches[up].parent) {
            t->switches[up].nodes++;
            if (t->level_count <= t->switches[up].level)
                t->level_count = t->switches[up].level + 1;
        }
    }
}

static void note_nodes(struct mu_topology *t)
{
    struct examples absent = {.count = 0}, unknown = {.count = 0}, repeated = {.count = 0};
    for (uint32_t i = 0; i < t->node_count; i++) {
        if (t->nodes[i].repeated)
            add_example(&repeated, t->node_names.names[i]);
        if (t->nodes[i].absent)
            add_example(&absent, t->node_names.names[i]);
        else if (t->nodes[i].parent == NONE)
            add_example(&unknown, t->node_names.names[i]);
    }
    note_examples(t, &absent, " node of the topology", " nodes of the topology", ": not in the cluster, left out");
    note_examples(t, &repeated, " node", " nodes", ": named more than once, counted once");
    note_examples(t, &unknown, " node of the cluster", " nodes of the cluster",
                  ": under no switch, each taken as alone on one");
}

static void note_switches(struct mu_topology *t)
{
    struct examples roots = {.count = 0}, empty = {.count = 0};
    for (uint32_t i = 0; i < t->switch_count; i++) {
        const struct mu_topology_switch *s = &t->switches[i];
        if (s->nodes == 0)
            add_example(&empty, t->switch_names.names[i]);
        else if (s->parent == NONE)
            add_example(&roots, t->switch_names.names[i]);
    }
    if (roots.count > 1)
        note_examples(t, &roots, " root", " fabrics that nothing joins", ": taken as joined above their roots");
    note_examples(t, &empty, " switch", " switches", ": no node is below; ignored");
}

enum mu_status mu_topology_finish(struct mu_topology *t, struct mu_error *err)
{
    uint32_t *scratch = calloc(2 * (size_t)t->switch_count + 1, sizeof *scratch);
    if (!scratch)
        return mu_fail(err, MU_ERR_NO_MEMORY, "0: out of memory for %u switches", t->switch_count);
    enum mu_status status = find_levels(t, scratch, scratch + t->switch_count, err);
    free(scratch);
    if (status != MU_OK)
        return status;
    count_nodes(t);
    if (t->present_count == 0)
        return mu_fail(err, MU_ERR_INVALID, "0: no node is left: the topology names none that the cluster has");
    note_nodes(t);
    note_switches(t);
    return MU_OK;
}

/* ---- regular ones ---- */

static size_t put_name(const char *prefix, uint32_t level, uint32_t number, char out[MU_TOPOLOGY_NAME_SIZE])
{
    struct mu_text text;
    mu_text_init(&text, out, MU_TOPOLOGY_NAME_SIZE);
    mu_text_put(&text, prefix);
    if (level > 0) {
        mu_text_put_uint(&text, level);
        mu_text_put(&text, "-");
    }
    mu_text_put_uint(&text, number);
    return text.length;
}

/* Node `number` (from 0) and the switches above it, from the top; a switch is named by its first node. */
static enum mu_status add_regular(struct mu_topology *t, uint32_t number, const uint32_t *per_switch,
                                  uint32_t level_count)
{
    char name[MU_TOPOLOGY_NAME_SIZE];
    uint32_t node, above = NONE, first = 0;
    size_t length = put_name("node-", 0, number + 1, name);
    enum mu_status status = mu_topology_node_of(t, name, length, 0, &node, NULL);
    for (uint32_t level = level_count; level > 0 && status == MU_OK; level--) {
        uint32_t here;
        first += (number - first) / per_switch[level - 1] * per_switch[level - 1];
        length = put_name("switch-", level, first + 1, name);
        status = mu_topology_switch_of(t, name, length, 0, &here, NULL);
        if (status == MU_OK && above != NONE)
            status = mu_topology_put_switch(t, here, above, 0, NULL);
        above = here;
    }
    return status == MU_OK && above != NONE ? mu_topology_put_node(t, node, above, 0, NULL) : status;
}

struct mu_topology *mu_topology_regular(uint32_t nodes, const uint32_t *per_switch, uint32_t level_count)
{
    struct mu_topology *t = mu_topology_new();
    enum mu_status status = t ? MU_OK : MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < nodes && status == MU_OK; i++)
        status = add_regular(t, i, per_switch, level_count);
    if (status == MU_OK)
        status = mu_topology_finish(t, NULL);
    if (status == MU_OK)
        return t;
    mu_topology_free(t);
    return NULL;
}
