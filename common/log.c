#include "common/log.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/utf8.h"

static const char *component_name = "muster";
static enum mu_log_level lowest_level = MU_LOG_INFO;
static bool is_json;

enum {
    JOB_SIZE = 64,
    WHERE_SIZE = 160,
    MESSAGE_SIZE = 1024,
    FIELDS_SIZE = 768,
    JSON_DIGITS = 15, /* of a number that every reader keeps exactly */
    LINE_SIZE = 6144, /* everything escaped fits */
};

static const char *const level_names[] = {
    [MU_LOG_DEBUG] = "debug", [MU_LOG_INFO] = "info", [MU_LOG_WARN] = "warn", [MU_LOG_ERROR] = "error"};

/* ---- what is kept ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static struct mu_log_line kept[MU_LOG_KEPT];             /* number n lies at n % MU_LOG_KEPT */
static uint64_t newest;
static char where[WHERE_SIZE]; /* fields of every line */
static struct {
    char job[JOB_SIZE];
    uint64_t generation;
    uint32_t rank;
} place;

static void keep(const char *line, size_t length)
{
    pthread_mutex_lock(&lock);
    struct mu_log_line *slot = &kept[++newest % MU_LOG_KEPT];
    slot->number = newest;
    snprintf(slot->text, sizeof slot->text, "%.*s", (int)length, line);
    pthread_mutex_unlock(&lock);
}

size_t mu_log_recent(uint64_t after, struct mu_log_line *out, size_t capacity)
{
    pthread_mutex_lock(&lock);
    uint64_t first = newest > MU_LOG_KEPT ? newest - MU_LOG_KEPT + 1 : 1;
    first = after >= first ? after + 1 : first;
    if (first <= newest && newest - first + 1 > capacity)
        first = newest - capacity + 1;
    size_t count = 0;
    for (uint64_t number = first; number <= newest && count < capacity; number++)
        out[count++] = kept[number % MU_LOG_KEPT];
    pthread_mutex_unlock(&lock);
    return count;
}

/* ---- writing ---- */

void mu_log_init(const char *component, enum mu_log_level level)
{
    component_name = component;
    lowest_level = level;
}

bool mu_log_level_of(const char *name, enum mu_log_level *ret_level)
{
    for (unsigned i = 0; i < sizeof level_names / sizeof level_names[0]; i++) {
        if (strcmp(name, level_names[i]) == 0) {
            *ret_level = (enum mu_log_level)i;
            return true;
        }
    }
    return false;
}

bool mu_log_choose_format(const char *name)
{
    is_json = strcmp(name, "json") == 0;
    return is_json || strcmp(name, "logfmt") == 0;
}

/* Under the lock. */
static void say_where(void)
{
    char job[JOB_SIZE + 8] = "", rank[64] = "";
    if (place.job[0])
        snprintf(job, sizeof job, " job=%s", place.job);
    if (place.generation)
        snprintf(rank, sizeof rank, " generation=%" PRIu64 " rank=%u", place.generation, place.rank);
    snprintf(where, sizeof where, "%s%s", job, rank);
}

void mu_log_set_job(const char *job)
{
    pthread_mutex_lock(&lock);
    snprintf(place.job, sizeof place.job, "%s", job);
    say_where();
    pthread_mutex_unlock(&lock);
}

void mu_log_set_rank(uint64_t generation, uint32_t rank)
{
    pthread_mutex_lock(&lock);
    place.generation = generation;
    place.rank = rank;
    say_where();
    pthread_mutex_unlock(&lock);
}

/* A message stays one line and one quoted value, in whatever encoding it came. */
static void clean(char *message)
{
    for (size_t left = strlen(message), length; left > 0; message += length, left -= length) {
        length = mu_utf8_clean((const uint8_t *)message, left);
        if (length == 0)
            *message = (unsigned char)*message < ' ' ? ' ' : '?';
        else if (*message == '"')
            *message = '\'';
        length = length ? length : 1;
    }
}

static char *put_json_text(char *at, const char *text, size_t length)
{
    *at++ = '"';
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '"' || text[i] == '\\')
            *at++ = '\\';
        *at++ = text[i];
    }
    *at++ = '"';
    return at;
}

/* " key=value key=value": numbers stay numbers. */
static char *put_json_fields(char *at, const char *fields)
{
    for (const char *key = fields + strspn(fields, " "); *key; key += strspn(key, " ")) {
        size_t key_length = strcspn(key, "= "), digits;
        const char *value = key + key_length + (key[key_length] == '=');
        size_t length = strcspn(value, " ");
        *at++ = ',';
        at = put_json_text(at, key, key_length);
        *at++ = ':';
        digits = strspn(value, "0123456789");
        if (length > 0 && digits == length && length <= JSON_DIGITS && (value[0] != '0' || length == 1)) {
            memcpy(at, value, length);
            at += length;
        } else {
            at = put_json_text(at, value, length);
        }
        key = value + length;
    }
    return at;
}

static size_t write_json(char line[LINE_SIZE], const char *ts, const char *level, const char *message,
                         const char *fields)
{
    char *at = line + snprintf(line, LINE_SIZE, "{\"ts\":\"%s\",\"level\":\"%s\",\"component\":", ts, level);
    at = put_json_text(at, component_name, strnlen(component_name, JOB_SIZE));
    memcpy(at, ",\"msg\":", 7);
    at = put_json_text(at + 7, message, strlen(message));
    at = put_json_fields(at, fields);
    memcpy(at, "}\n", 2);
    return (size_t)(at + 2 - line);
}

void mu_log(enum mu_log_level level, const char *fields, const char *fmt, ...)
{
    if (level < lowest_level)
        return;
    char ts[32], message[MESSAGE_SIZE], all[FIELDS_SIZE], line[LINE_SIZE];
    mu_clock_format(mu_clock_wall_us(), ts);
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    clean(message);
    pthread_mutex_lock(&lock);
    snprintf(all, sizeof all, "%s%s%s", where, fields ? " " : "", fields ? fields : "");
    pthread_mutex_unlock(&lock);
    int n = snprintf(line, sizeof line, "ts=%s level=%s component=%s msg=\"%s\"%s\n", ts, level_names[level],
                     component_name, message, all);
    size_t length = n < (int)sizeof line ? (size_t)n : sizeof line - 1;
    line[length - 1] = '\n';
    keep(line, length - 1);
    if (is_json)
        length = write_json(line, ts, level_names[level], message, all);
    ssize_t ignored = write(STDERR_FILENO, line, length);
    (void)ignored;
}
