#include "storage/json_load.h"

#include <stdbool.h>

static size_t count_marks(const char *text, size_t size_bytes)
{
    size_t marks = 0;
    bool in_string = false;
    for (size_t i = 0; i < size_bytes; i++) {
        char c = text[i];
        if (in_string && c == '\\')
            i++;
        else if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == ',' || c == '[' || c == '{'))
            marks++;
    }
    return marks;
}

/* The parser quotes the text in its messages: a hostile file must not write to a terminal. */
static void make_printable(char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || (unsigned char)*text >= 127)
            *text = '?';
}

enum mu_status mu_json_load(const char *text, size_t size_bytes, const char *what, json_t **ret_root,
                            struct mu_error *err)
{
    size_t marks = count_marks(text, size_bytes);
    if (marks > MU_JSON_MARKS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "'%s': JSON of %zu values is not allowed: at most %d", what, marks,
                       MU_JSON_MARKS_MAX);
    json_error_t problem;
    json_t *root = json_loadb(text, size_bytes, JSON_REJECT_DUPLICATES, &problem);
    if (!root) {
        make_printable(problem.text);
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': not valid JSON at line %d, byte %d: %.120s", what, problem.line,
                       problem.position, problem.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': not a JSON object", what);
    }
    *ret_root = root;
    return MU_OK;
}
