#include "cli/hosts.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { LINE_SIZE = 65536, DIGITS_MAX = 9 };

static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-:@";

static enum mu_status add(struct mu_hosts *hosts, const char *name, struct mu_error *err)
{
    if (hosts->count == MU_HOSTS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "more than %d hosts", MU_HOSTS_MAX);
    if (name[0] == 0 || strchr(".-:@", name[0]) || name[strspn(name, letters)] != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "host '%s' is not allowed: letters, digits, . - _ : @, with a letter or digit first", name);
    if ((hosts->count & (hosts->count - 1)) == 0) { /* full at each power of two */
        char **names = realloc(hosts->names, (hosts->count ? 2 * hosts->count : 1) * sizeof *names);
        if (!names)
            return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu hosts", hosts->count);
        hosts->names = names;
    }
    char *copy = strdup(name);
    if (!copy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu hosts", hosts->count);
    hosts->names[hosts->count++] = copy;
    return MU_OK;
}

/* "07" at *text: its value and how many digits it has, moving on behind them. */
static bool take_number(const char **text, unsigned long *ret_value, int *ret_digits)
{
    size_t digits = strspn(*text, "0123456789");
    if (digits == 0 || digits > DIGITS_MAX)
        return false;
    *ret_value = strtoul(*text, NULL, 10);
    *ret_digits = (int)digits;
    *text += digits;
    return true;
}

static enum mu_status expand(const char *head, const char *rest, struct mu_hosts *hosts, struct mu_error *err);

/* `ranges` stands behind "["; every number is put behind `head`, and the rest of the item is expanded. */
static enum mu_status expand_ranges(const char *head, const char *ranges, struct mu_hosts *hosts, struct mu_error *err)
{
    const char *close = strchr(ranges, ']'), *at = ranges;
    if (!close)
        return mu_fail(err, MU_ERR_INVALID, "'%s[%s' has no closing bracket", head, ranges);
    do {
        unsigned long first, last;
        int digits, ignored;
        if (!take_number(&at, &first, &digits))
            return mu_fail(err, MU_ERR_INVALID, "'[%s' is not allowed: numbers and ranges as in [01-16,20]", ranges);
        last = first;
        if (*at == '-' && (at++, !take_number(&at, &last, &ignored)))
            return mu_fail(err, MU_ERR_INVALID, "'[%s' is not allowed: numbers and ranges as in [01-16,20]", ranges);
        if (last < first || last - first >= MU_HOSTS_MAX)
            return mu_fail(err, MU_ERR_INVALID, "range %lu-%lu is not allowed: ascending, at most %d hosts", first,
                           last, MU_HOSTS_MAX);
        for (unsigned long number = first; number <= last; number++) {
            char longer[MU_HOST_SIZE];
            if (snprintf(longer, sizeof longer, "%s%0*lu", head, digits, number) >= MU_HOST_SIZE)
                return mu_fail(err, MU_ERR_INVALID, "a host's name is longer than %d characters", MU_HOST_SIZE - 1);
            enum mu_status status = expand(longer, close + 1, hosts, err);
            if (status)
                return status;
        }
    } while (*at == ',' && at++ < close);
    return at == close
               ? MU_OK
               : mu_fail(err, MU_ERR_INVALID, "'[%s' is not allowed: numbers and ranges as in [01-16,20]", ranges);
}

/* One item of a list, of which `head` is expanded already. */
static enum mu_status expand(const char *head, const char *rest, struct mu_hosts *hosts, struct mu_error *err)
{
    char longer[MU_HOST_SIZE];
    size_t plain = strcspn(rest, "[");
    if (snprintf(longer, sizeof longer, "%s%.*s", head, (int)(plain < MU_HOST_SIZE ? plain : MU_HOST_SIZE), rest) >=
        MU_HOST_SIZE)
        return mu_fail(err, MU_ERR_INVALID, "a host's name is longer than %d characters", MU_HOST_SIZE - 1);
    return rest[plain] == '[' ? expand_ranges(longer, rest + plain + 1, hosts, err) : add(hosts, longer, err);
}

/* The length of the item at `list`: to the next comma outside of brackets. */
static size_t item_length(const char *list)
{
    size_t length = 0;
    for (bool inside = false; list[length] && (inside || list[length] != ','); length++)
        inside = list[length] == '[' || (inside && list[length] != ']');
    return length;
}

enum mu_status mu_hosts_parse(const char *list, struct mu_hosts *hosts, struct mu_error *err)
{
    char item[4 * MU_HOST_SIZE];
    size_t before = hosts->count;
    enum mu_status status = MU_OK;
    for (const char *at = list; status == MU_OK; at++) {
        size_t length = item_length(at);
        if (length >= sizeof item) {
            status = mu_fail(err, MU_ERR_INVALID, "'%.40s...' is too long for one item of a list of hosts", at);
            break;
        }
        memcpy(item, at, length);
        item[length] = 0;
        status = expand("", item, hosts, err);
        at += length;
        if (*at == 0)
            break;
    }
    while (status != MU_OK && hosts->count > before)
        free(hosts->names[--hosts->count]);
    return status;
}

struct place {
    const char *name;
    size_t index;
};

static int by_name(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : x->index < y->index ? -1 : 1;
}

/* The first one of each name stays. */
static enum mu_status drop_repeated(struct mu_hosts *hosts, struct mu_error *err)
{
    struct place *places = malloc((hosts->count + 1) * sizeof *places);
    if (!places)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu hosts", hosts->count);
    for (size_t i = 0; i < hosts->count; i++)
        places[i] = (struct place){hosts->names[i], i};
    qsort(places, hosts->count, sizeof *places, by_name);
    for (size_t i = hosts->count; i-- > 1;) {
        if (strcmp(places[i].name, places[i - 1].name) != 0)
            continue;
        free(hosts->names[places[i].index]);
        hosts->names[places[i].index] = NULL;
    }
    free(places);
    size_t kept = 0;
    for (size_t i = 0; i < hosts->count; i++)
        if (hosts->names[i])
            hosts->names[kept++] = hosts->names[i];
    hosts->count = kept;
    return MU_OK;
}

static enum mu_status read_lines(FILE *file, const char *path, struct mu_hosts *hosts, struct mu_error *err)
{
    char *line = malloc(LINE_SIZE);
    enum mu_status status = line ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory to read '%s'", path);
    for (unsigned number = 1; status == MU_OK && fgets(line, LINE_SIZE, file); number++) {
        if (!strchr(line, '\n') && !feof(file))
            status = mu_fail(err, MU_ERR_INVALID, "the line is too long");
        char *list = line + strspn(line, " \t");
        list[strcspn(list, " \t\r\n#")] = 0;
        if (status == MU_OK && list[0])
            status = mu_hosts_parse(list, hosts, err);
        if (status)
            mu_error_prefix(err, "%s:%u", path, number);
    }
    if (status == MU_OK && ferror(file))
        status = mu_fail(err, MU_ERR_IO, "'%s' cannot be read to its end", path);
    free(line);
    return status;
}

enum mu_status mu_hosts_read(const char *file_or_list, struct mu_hosts *ret_hosts, struct mu_error *err)
{
    struct mu_hosts hosts = {0};
    struct stat st;
    bool is_file = strchr(file_or_list, '/') || stat(file_or_list, &st) == 0;
    FILE *file = is_file ? fopen(file_or_list, "re") : NULL;
    enum mu_status status = MU_OK;
    if (is_file && !file)
        return mu_fail_errno(err, errno, "cannot read the list of hosts '%s'", file_or_list);
    status = file ? read_lines(file, file_or_list, &hosts, err) : mu_hosts_parse(file_or_list, &hosts, err);
    if (file)
        fclose(file);
    if (status == MU_OK)
        status = drop_repeated(&hosts, err);
    if (status == MU_OK && hosts.count == 0)
        status = mu_fail(err, MU_ERR_INVALID, "'%s' names no hosts", file_or_list);
    if (status == MU_OK)
        *ret_hosts = hosts;
    else
        mu_hosts_fini(&hosts);
    return status;
}

void mu_hosts_fini(struct mu_hosts *hosts)
{
    for (size_t i = 0; i < hosts->count; i++)
        free(hosts->names[i]);
    free(hosts->names);
    *hosts = (struct mu_hosts){0};
}
