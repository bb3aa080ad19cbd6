#include "cli/hostlist.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGITS_MAX = 9, SHOWN_MAX = 60 };

struct walk {
    const char *text; /* of the whole, for messages */
    size_t length;
    uint32_t line, count;
    mu_hostlist_each *each;
    void *ctx;
    struct mu_error *err;
    char name[MU_HOSTLIST_NAME_SIZE];
};

static enum mu_status bad(const struct walk *w, const char *what)
{
    int shown = (int)(w->length < SHOWN_MAX ? w->length : SHOWN_MAX);
    return mu_fail(w->err, MU_ERR_INVALID, "%u: %.*s%s: %s; write a list like dev[0-5,7],other", w->line, shown,
                   w->text, w->length > SHOWN_MAX ? "..." : "", what);
}

/* One name or one number of a bracket goes behind the first `at` characters of the name. */
static enum mu_status put(struct walk *w, size_t at, const char *text, size_t length, size_t *ret_at)
{
    if (at + length >= sizeof w->name)
        return bad(w, "a name is too long");
    memcpy(w->name + at, text, length);
    *ret_at = at + length;
    return MU_OK;
}

static enum mu_status expand(struct walk *w, const char *rest, const char *end, size_t at);

/* Digits from *text; their value. */
static bool read_number(const char **text, const char *end, uint32_t *ret_value, size_t *ret_width)
{
    const char *begin = *text;
    uint32_t value = 0;
    while (*text < end && **text >= '0' && **text <= '9' && *text - begin < DIGITS_MAX)
        value = value * 10 + (uint32_t)(*(*text)++ - '0');
    *ret_value = value;
    *ret_width = (size_t)(*text - begin);
    return *ret_width > 0;
}

/* "0-5" or "7": each number, then what follows the bracket. */
static enum mu_status expand_range(struct walk *w, const char **inside, const char *close, const char *end, size_t at)
{
    uint32_t first, last;
    size_t width, last_width;
    if (!read_number(inside, close, &first, &width))
        return bad(w, "numbers are expected in brackets");
    last = first;
    if (*inside < close && **inside == '-') {
        ++*inside;
        if (!read_number(inside, close, &last, &last_width))
            return bad(w, "a range needs a second number");
    }
    if (last < first)
        return bad(w, "a range descends");
    if (last - first >= MU_HOSTLIST_NAMES_MAX)
        return mu_fail(w->err, MU_ERR_LIMIT, "%u: more than %d names in one list are not allowed", w->line,
                       MU_HOSTLIST_NAMES_MAX);
    for (uint32_t number = first; number <= last; number++) {
        char digits[16];
        size_t next = at;
        int length = snprintf(digits, sizeof digits, "%0*u", (int)width, number);
        enum mu_status status = put(w, at, digits, (size_t)length, &next);
        if (status == MU_OK)
            status = expand(w, close + 1, end, next);
        if (status != MU_OK)
            return status;
    }
    return MU_OK;
}

static enum mu_status expand_bracket(struct walk *w, const char *open, const char *end, size_t at)
{
    const char *close = memchr(open, ']', (size_t)(end - open)), *inside = open + 1;
    if (!close)
        return bad(w, "a bracket is not closed");
    for (;;) {
        enum mu_status status = expand_range(w, &inside, close, end, at);
        if (status != MU_OK)
            return status;
        if (inside == close)
            return MU_OK;
        if (*inside++ != ',')
            return bad(w, "numbers in brackets are divided by commas");
    }
}

/* One word without commas outside of brackets; recursion goes from bracket to bracket, each adds a character. */
static enum mu_status expand(struct walk *w, const char *rest, const char *end, size_t at)
{
    const char *open = memchr(rest, '[', (size_t)(end - rest)), *stop = open ? open : end;
    enum mu_status status = memchr(rest, ']', (size_t)(stop - rest)) ? bad(w, "a bracket is not opened")
                                                                     : put(w, at, rest, (size_t)(stop - rest), &at);
    if (status != MU_OK)
        return status;
    if (open)
        return expand_bracket(w, open, end, at);
    if (++w->count > MU_HOSTLIST_NAMES_MAX)
        return mu_fail(w->err, MU_ERR_LIMIT, "%u: more than %d names in one list are not allowed", w->line,
                       MU_HOSTLIST_NAMES_MAX);
    return w->each(w->ctx, w->name, at, w->err);
}

enum mu_status mu_hostlist_walk(const char *text, size_t length, uint32_t line, mu_hostlist_each *each, void *ctx,
                                struct mu_error *err)
{
    struct walk w = {.text = text, .length = length, .line = line, .each = each, .ctx = ctx, .err = err};
    const char *end = text + length, *begin = text;
    if (length == 0)
        return mu_fail(err, MU_ERR_INVALID, "%u: an empty list of names is not allowed", line);
    for (;;) {
        const char *stop = begin;
        for (bool inside = false; stop < end && (inside || *stop != ','); stop++)
            inside = *stop == '[' || (inside && *stop != ']');
        if (stop == begin)
            return bad(&w, "a name between commas is empty");
        enum mu_status status = expand(&w, begin, stop, 0);
        if (status != MU_OK || stop == end)
            return status;
        begin = stop + 1;
    }
}
