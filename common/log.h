/* Structured logs on standard error, a line per record: ts=... level=... component=... msg="..." key=value ...
 * (logfmt), or the same as a JSON object. Thread-safe (one write(2) per line). Only shells call it. */
#ifndef MU_COMMON_LOG_H
#define MU_COMMON_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum mu_log_level { MU_LOG_DEBUG, MU_LOG_INFO, MU_LOG_WARN, MU_LOG_ERROR };

/* Sets the component name (static string) and the lowest level written. Call before threads start. */
void mu_log_init(const char *component, enum mu_log_level level);
bool mu_log_level_of(const char *name, enum mu_log_level *ret_level); /* "debug", ...; false: it is none */
/* "logfmt", which is the default, or "json"; false: something else. Likewise before threads start. */
bool mu_log_choose_format(const char *name);

/* Every line from now on says `job`, `generation` and `rank`. Empty, 0: it does not, and without a generation there is
 * no rank. Any thread. */
void mu_log_set_job(const char *job);
void mu_log_set_rank(uint64_t generation, uint32_t rank);

/* `fmt` makes the message; `fields` is a preformatted "key=value ..." string or NULL. */
void mu_log(enum mu_log_level level, const char *fields, const char *fmt, ...) MU_PRINTF(3, 4);

/* The newest lines that were written, in logfmt. Numbers ascend by one. */
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
