#include "common/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"

static const char *component_name = "muster";
static enum mu_log_level lowest_level = MU_LOG_INFO;

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
    ssize_t ignored = write(STDERR_FILENO, line, length);
    (void)ignored;
}
