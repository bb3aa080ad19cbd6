/* A bounded text builder without stdio, for names and canonical texts inside plan/. Text that does not fit is cut; the
 * result is always terminated. Pure; the buffer belongs to the caller. */
#ifndef MU_PLAN_TEXT_H
#define MU_PLAN_TEXT_H

#include <stddef.h>
#include <stdint.h>

struct mu_text {
    char *data;
    size_t capacity, length; /* bytes; length excludes the terminating 0 */
};

void mu_text_init(struct mu_text *text, char *buffer, size_t capacity_bytes);
void mu_text_put(struct mu_text *text, const char *string);
void mu_text_put_uint(struct mu_text *text, uint64_t value); /* decimal */
void mu_text_put_hex(struct mu_text *text, uint64_t value);  /* 16 lower-case digits */

#endif
