/* Status codes and error messages.
 *
 * Every function that can fail returns `enum mu_status`; one that can fail for a reason a person must read also takes a
 * `struct mu_error *` (which may be NULL) and fills it with one line: what failed, where, the value, what is allowed,
 * what to do. Libraries return; only shells (main programs) log or exit. No ownership, no threads. */
#ifndef MU_COMMON_STATUS_H
#define MU_COMMON_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/reason.h"

#define MU_WARN_UNUSED        __attribute__((warn_unused_result))
#define MU_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))

enum mu_status {
    MU_OK = 0,
    MU_ERR_INVALID,     /* an argument, field or file content is outside what is allowed */
    MU_ERR_NOT_FOUND,   /* the named thing does not exist */
    MU_ERR_EXISTS,      /* the named thing exists already */
    MU_ERR_BUSY,        /* held by somebody else (lock, port) or a bounded queue is full */
    MU_ERR_NO_MEMORY,   /* an allocation or a memory budget failed */
    MU_ERR_NO_SPACE,    /* a file system is full or below its reserve */
    MU_ERR_IO,          /* the operating system refused a read, write, sync, ... */
    MU_ERR_CORRUPT,     /* bytes do not match their checksum or their format */
    MU_ERR_LIMIT,       /* a named limit would be exceeded */
    MU_ERR_STALE,       /* an older generation or incarnation: fenced */
    MU_ERR_UNAVAILABLE, /* a peer or service cannot be reached */
    MU_ERR_TIMEOUT,     /* a deadline passed */
    MU_ERR_CANCELLED,   /* aborted on request */
    MU_ERR_DENIED,      /* not permitted to this caller */
    MU_ERR_CONFLICT,    /* the state does not permit the request now */
    MU_ERR_INTERNAL,    /* a fault of this program */
    MU_STATUS_COUNT
};

enum { MU_ERROR_TEXT_SIZE = 512 };

struct mu_error {
    enum mu_status status;
    enum mu_reason reason; /* for programs; mostly MU_REASON_NONE */
    uint64_t value;        /* what mu_reason_value_name says */
    char text[MU_ERROR_TEXT_SIZE];
};

/* Short stable name, e.g. "not_found". Never NULL. */
const char *mu_status_name(enum mu_status status);

/* Fills `err` (if not NULL) with `status` and the formatted line, and returns `status`. Whatever is quoted in it
 * becomes UTF-8 without control characters ('?' in their place), so that it stays one line. */
enum mu_status mu_fail(struct mu_error *err, enum mu_status status, const char *fmt, ...) MU_PRINTF(3, 4);

/* As mu_fail, with a reason for programs and its value. */
enum mu_status mu_fail_for(struct mu_error *err, enum mu_status status, enum mu_reason reason, uint64_t value,
                           const char *fmt, ...) MU_PRINTF(5, 6);

/* As mu_fail, with ": " and the text of `errno_value` appended; maps ENOSPC/EDQUOT, EEXIST, ENOENT, EACCES, ENOMEM to
 * their status. */
enum mu_status mu_fail_errno(struct mu_error *err, int errno_value, const char *fmt, ...) MU_PRINTF(3, 4);

/* Puts "prefix: " before the text of `err` (context added on the way up) and returns err->status. */
enum mu_status mu_error_prefix(struct mu_error *err, const char *fmt, ...) MU_PRINTF(2, 3);

/* A line about a field begins with it ("batch.micro: value 3 is not allowed: ..."): true, and the field. */
enum { MU_ERROR_FIELD_SIZE = 64 };
bool mu_error_field(const struct mu_error *err, char ret_field[MU_ERROR_FIELD_SIZE]);

/* Programmer errors only; stays on in release. */
void mu_assert_failed(const char *expr, const char *file, int line) __attribute__((noreturn));
#define MU_ASSERT(expr) ((expr) ? (void)0 : mu_assert_failed(#expr, __FILE__, __LINE__))

#endif
