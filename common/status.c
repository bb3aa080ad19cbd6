#include "common/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/utf8.h"

static const char *const status_names[MU_STATUS_COUNT] = {
    [MU_OK] = "ok",
    [MU_ERR_INVALID] = "invalid",
    [MU_ERR_NOT_FOUND] = "not_found",
    [MU_ERR_EXISTS] = "exists",
    [MU_ERR_BUSY] = "busy",
    [MU_ERR_NO_MEMORY] = "no_memory",
    [MU_ERR_NO_SPACE] = "no_space",
    [MU_ERR_IO] = "io",
    [MU_ERR_CORRUPT] = "corrupt",
    [MU_ERR_LIMIT] = "limit",
    [MU_ERR_STALE] = "stale",
    [MU_ERR_UNAVAILABLE] = "unavailable",
    [MU_ERR_TIMEOUT] = "timeout",
    [MU_ERR_CANCELLED] = "cancelled",
    [MU_ERR_DENIED] = "denied",
    [MU_ERR_CONFLICT] = "conflict",
    [MU_ERR_INTERNAL] = "internal",
};

const char *mu_status_name(enum mu_status status)
{
    return status >= 0 && status < MU_STATUS_COUNT ? status_names[status] : "unknown";
}

/* What is quoted in an error may come from anywhere: it does not reach a terminal or a log as it is. A character that
 * was cut off at the end goes. */
static void clean(char text[MU_ERROR_TEXT_SIZE])
{
    size_t left = strlen(text);
    bool is_full = left == MU_ERROR_TEXT_SIZE - 1;
    for (uint8_t *p = (uint8_t *)text; left > 0;) {
        size_t length = mu_utf8_clean(p, left);
        if (length == 0 && is_full && left < 4 && *p >= 0xc2) {
            *p = 0;
            return;
        }
        if (length == 0)
            *p = '?';
        p += length ? length : 1;
        left -= length ? length : 1;
    }
}

static void fill(struct mu_error *err, enum mu_status status, enum mu_reason reason, uint64_t value, const char *fmt,
                 va_list args)
{
    err->status = status;
    err->reason = reason;
    err->value = value;
    vsnprintf(err->text, sizeof err->text, fmt, args);
    clean(err->text);
}

enum mu_status mu_fail(struct mu_error *err, enum mu_status status, const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        fill(err, status, MU_REASON_NONE, 0, fmt, args);
        va_end(args);
    }
    return status;
}

enum mu_status mu_fail_for(struct mu_error *err, enum mu_status status, enum mu_reason reason, uint64_t value,
                           const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        fill(err, status, reason, value, fmt, args);
        va_end(args);
    }
    return status;
}

static enum mu_status status_of_errno(int errno_value)
{
    switch (errno_value) {
    case ENOSPC:
    case EDQUOT:
        return MU_ERR_NO_SPACE;
    case EEXIST:
        return MU_ERR_EXISTS;
    case ENOENT:
        return MU_ERR_NOT_FOUND;
    case EACCES:
    case EPERM:
    case EROFS:
        return MU_ERR_DENIED;
    case ENOMEM:
        return MU_ERR_NO_MEMORY;
    case EADDRINUSE:
        return MU_ERR_BUSY;
    default:
        return MU_ERR_IO;
    }
}

enum mu_status mu_fail_errno(struct mu_error *err, int errno_value, const char *fmt, ...)
{
    enum mu_status status = status_of_errno(errno_value);
    if (err) {
        va_list args;
        va_start(args, fmt);
        fill(err, status, MU_REASON_NONE, 0, fmt, args);
        va_end(args);
        size_t length = strlen(err->text);
        char reason[128];
        snprintf(err->text + length, sizeof err->text - length, ": %s", strerror_r(errno_value, reason, sizeof reason));
        clean(err->text);
    }
    return status;
}

enum mu_status mu_error_prefix(struct mu_error *err, const char *fmt, ...)
{
    if (!err)
        return MU_ERR_INTERNAL;
    char text[MU_ERROR_TEXT_SIZE];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    size_t length = strlen(text);
    snprintf(text + length, sizeof text - length, ": %.*s", (int)(sizeof text - length - 3), err->text);
    clean(text);
    memcpy(err->text, text, sizeof text);
    return err->status;
}

bool mu_error_field(const struct mu_error *err, char ret_field[MU_ERROR_FIELD_SIZE])
{
    size_t length = strspn(err->text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.[]");
    if (length == 0 || length >= MU_ERROR_FIELD_SIZE || strncmp(err->text + length, ": ", 2) != 0)
        return false;
    memcpy(ret_field, err->text, length);
    ret_field[length] = 0;
    return true;
}

void mu_assert_failed(const char *expr, const char *file, int line)
{
    fprintf(stderr, "muster: assertion failed at %s:%d: %s\n", file, line, expr);
    abort();
}
