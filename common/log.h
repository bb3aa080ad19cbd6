/* Structured logs, one logfmt line per record on standard error: ts=... level=... component=... msg="..." key=value ...
 * Thread-safe (one write(2) per line). Only shells call it. */
#ifndef MU_COMMON_LOG_H
#define MU_COMMON_LOG_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum mu_log_level { MU_LOG_DEBUG, MU_LOG_INFO, MU_LOG_WARN, MU_LOG_ERROR };

/* Sets the component name (static string) and the lowest level written. Call before threads start. */
void mu_log_init(const char *component, enum mu_log_level level);

/* `fmt` makes the message; `fields` is a preformatted "key=value ..." string or NULL. */
void mu_log(enum mu_log_level level, const char *fields, const char *fmt, ...) MU_PRINTF(3, 4);

/* The newest lines that were written. Numbers ascend by one. */
enum { MU_LOG_KEPT = 512, MU_LOG_LINE_SIZE = 480 };
struct mu_log_line {
    uint64_t number;             /* from 1 on */
    char text[MU_LOG_LINE_SIZE]; /* without its end of line; longer ones are cut */
};
/* Copies the newest lines with numbers greater than `after`, at most `capacity` of them, oldest first; returns how
 * many. */
size_t mu_log_recent(uint64_t after, struct mu_log_line *out, size_t capacity);

#define MU_LOGI(...) mu_log(MU_LOG_INFO, 0, __VA_ARGS__)
#define MU_LOGW(...) mu_log(MU_LOG_WARN, 0, __VA_ARGS__)
#define MU_LOGE(...) mu_log(MU_LOG_ERROR, 0, __VA_ARGS__)
#define MU_LOGD(...) mu_log(MU_LOG_DEBUG, 0, __VA_ARGS__)

#endif
