#include "common/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"

static const char *component_name = "muster";
static enum mu_log_level lowest_level = MU_LOG_INFO;

/* ---- what is kept ---- */

static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static struct mu_log_line kept[MU_LOG_KEPT]; /* number n lies at n % MU_LOG_KEPT */
static uint64_t newest;

static void keep(const char *line, size_t length)
{
    pthread_mutex_lock(&kept_lock);
    struct mu_log_line *slot = &kept[++newest % MU_LOG_KEPT];
    slot->number = newest;
    snprintf(slot->text, sizeof slot->text, "%.*s", (int)length, line);
    pthread_mutex_unlock(&kept_lock);
}

size_t mu_log_recent(uint64_t after, struct mu_log_line *out, size_t capacity)
{
    pthread_mutex_lock(&kept_lock);
    uint64_t first = newest > MU_LOG_KEPT ? newest - MU_LOG_KEPT + 1 : 1;
    first = after >= first ? after + 1 : first;
    if (first <= newest && newest - first + 1 > capacity)
        first = newest - capacity + 1;
    size_t count = 0;
    for (uint64_t number = first; number <= newest && count < capacity; number++)
        out[count++] = kept[number % MU_LOG_KEPT];
    pthread_mutex_unlock(&kept_lock);
    return count;
}

/* ---- writing ---- */

void mu_log_init(const char *component, enum mu_log_level level)
{
    component_name = component;
    lowest_level = level;
}

void mu_log(enum mu_log_level level, const char *fields, const char *fmt, ...)
{
    static const char *const names[] = {"debug", "info", "warn", "error"};
    if (level < lowest_level)
        return;
    char ts[32], message[1024], line[2048];
    mu_clock_format(mu_clock_wall_us(), ts);
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    for (char *c = message; *c; c++) { /* a message stays one line and one quoted value */
        if (*c == '"')
            *c = '\'';
        else if ((unsigned char)*c < ' ')
            *c = ' ';
    }
    int n = snprintf(line, sizeof line, "ts=%s level=%s component=%s msg=\"%s\"%s%s\n", ts, names[level],
                     component_name, message, fields ? " " : "", fields ? fields : "");
    size_t length = n < (int)sizeof line ? (size_t)n : sizeof line - 1;
    line[length - 1] = '\n';
    keep(line, length - 1);
    ssize_t ignored = write(STDERR_FILENO, line, length);
    (void)ignored;
}
