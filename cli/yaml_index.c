#include "cli/yaml_index.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <yaml.h>

/* One open mapping or sequence. */
struct level {
    bool is_sequence;
    bool want_value;    /* mapping: a key has been read */
    uint32_t entry;     /* sequence: number of the next entry */
    size_t path_length; /* of the container itself */
};

struct walk {
    struct mu_yaml_index *index;
    struct level levels[MU_YAML_DEPTH_MAX];
    uint32_t depth, document_count;
    char path[MU_YAML_PATH_SIZE];
    size_t path_length;
};

static void path_append(struct walk *walk, size_t from, const char *text)
{
    size_t room = sizeof walk->path - from;
    int wrote = snprintf(walk->path + from, room, "%s", text);
    walk->path_length = from + ((size_t)wrote < room ? (size_t)wrote : room - 1);
}

static enum mu_status add_position(struct walk *walk, uint32_t line, struct mu_error *err)
{
    struct mu_yaml_index *index = walk->index;
    if (index->count == MU_YAML_KEYS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "%u: more than %d keys; a job file has fewer than 60: remove what is not needed", line,
                       MU_YAML_KEYS_MAX);
    memcpy(index->keys[index->count].path, walk->path, walk->path_length + 1);
    index->keys[index->count++].line = line;
    return MU_OK;
}

/* A scalar, mapping or sequence starts: where in the parent does it stand? `key` is the text when it is a scalar. */
static enum mu_status enter_node(struct walk *walk, const char *key, uint32_t line, struct mu_error *err)
{
    if (walk->depth == 0)
        return MU_OK;
    struct level *parent = &walk->levels[walk->depth - 1];
    if (parent->is_sequence) {
        char entry[16];
        snprintf(entry, sizeof entry, "[%u]", parent->entry++);
        path_append(walk, parent->path_length, entry);
        return add_position(walk, line, err);
    }
    if (parent->want_value) {
        parent->want_value = false;
        return MU_OK;
    }
    if (!key)
        return mu_fail(err, MU_ERR_INVALID, "%u: a key must be a plain name, not a list or a group; write name: value",
                       line);
    size_t from = parent->path_length;
    if (from > 0) {
        path_append(walk, from, ".");
        from = walk->path_length;
    }
    path_append(walk, from, key);
    parent->want_value = true;
    return add_position(walk, line, err);
}

static enum mu_status open_container(struct walk *walk, bool is_sequence, uint32_t line, struct mu_error *err)
{
    enum mu_status status = enter_node(walk, NULL, line, err);
    if (status)
        return status;
    if (walk->depth == MU_YAML_DEPTH_MAX)
        return mu_fail(err, MU_ERR_INVALID, "%u: nested more than %d deep; a job file has groups of fields, not deeper",
                       line, MU_YAML_DEPTH_MAX);
    walk->levels[walk->depth] = (struct level){.is_sequence = is_sequence, .path_length = walk->path_length};
    walk->depth++;
    return MU_OK;
}

static enum mu_status refuse_decoration(const yaml_char_t *anchor, const yaml_char_t *tag, uint32_t line,
                                        struct mu_error *err)
{
    if (anchor)
        return mu_fail(err, MU_ERR_INVALID, "%u: anchors and aliases (& and *) are not allowed; write the value out",
                       line);
    if (tag)
        return mu_fail(err, MU_ERR_INVALID,
                       "%u: tags (!) are not allowed; write the value alone, in quotes if it begins with !", line);
    return MU_OK;
}

static enum mu_status handle_event(struct walk *walk, const yaml_event_t *event, struct mu_error *err)
{
    uint32_t line = (uint32_t)event->start_mark.line + 1;
    enum mu_status status = MU_OK;
    switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
        if (++walk->document_count > 1)
            return mu_fail(err, MU_ERR_INVALID, "%u: a second document begins; one file holds one job: split it at ---",
                           line);
        return MU_OK;
    case YAML_ALIAS_EVENT:
        return refuse_decoration(event->data.alias.anchor, NULL, line, err);
    case YAML_SCALAR_EVENT:
        status = refuse_decoration(event->data.scalar.anchor, event->data.scalar.tag, line, err);
        return status ? status : enter_node(walk, (const char *)event->data.scalar.value, line, err);
    case YAML_SEQUENCE_START_EVENT:
        status = refuse_decoration(event->data.sequence_start.anchor, event->data.sequence_start.tag, line, err);
        return status ? status : open_container(walk, true, line, err);
    case YAML_MAPPING_START_EVENT:
        status = refuse_decoration(event->data.mapping_start.anchor, event->data.mapping_start.tag, line, err);
        return status ? status : open_container(walk, false, line, err);
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
        walk->depth--;
        return MU_OK;
    default:
        return MU_OK;
    }
}

static enum mu_status syntax_error(const yaml_parser_t *parser, struct mu_error *err)
{
    if (parser->error == YAML_MEMORY_ERROR)
        return mu_fail(err, MU_ERR_NO_MEMORY, "1: out of memory");
    const char *problem = parser->problem ? parser->problem : "unknown problem";
    if (parser->error == YAML_READER_ERROR)
        return mu_fail(err, MU_ERR_INVALID, "1: not text: %s at byte %zu; a job file is YAML in UTF-8", problem,
                       parser->problem_offset);
    return mu_fail(err, MU_ERR_INVALID,
                   "%zu: not valid YAML: %s%s%s at column %zu; check quotes, brackets and indentation",
                   parser->problem_mark.line + 1, parser->context ? parser->context : "", parser->context ? ", " : "",
                   problem, parser->problem_mark.column + 1);
}

enum mu_status mu_yaml_index_build(const void *text, size_t size_bytes, struct mu_yaml_index *ret_index,
                                   struct mu_error *err)
{
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser))
        return mu_fail(err, MU_ERR_NO_MEMORY, "1: out of memory");
    yaml_parser_set_input_string(&parser, text, size_bytes);
    ret_index->count = 0;
    struct walk walk = {.index = ret_index};
    enum mu_status status = MU_OK;
    bool more = true;
    while (more && status == MU_OK) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            status = syntax_error(&parser, err);
            break;
        }
        more = event.type != YAML_STREAM_END_EVENT;
        status = handle_event(&walk, &event, err);
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return status;
}

uint32_t mu_yaml_index_first_line(const struct mu_yaml_index *index, const char *path)
{
    for (uint32_t i = 0; i < index->count; i++)
        if (strcmp(index->keys[i].path, path) == 0)
            return index->keys[i].line;
    return 0;
}

uint32_t mu_yaml_index_line(const struct mu_yaml_index *index, const char *path)
{
    char ancestor[MU_YAML_PATH_SIZE];
    snprintf(ancestor, sizeof ancestor, "%s", path);
    for (;;) {
        for (uint32_t i = index->count; i-- > 0;)
            if (strcmp(index->keys[i].path, ancestor) == 0)
                return index->keys[i].line;
        size_t cut = strlen(ancestor);
        while (cut > 0 && ancestor[cut] != '.' && ancestor[cut] != '[')
            cut--;
        if (cut == 0)
            return 0;
        ancestor[cut] = 0;
    }
}
