/* Text that may be shown: UTF-8 without control characters. Pure. */
#ifndef MU_COMMON_UTF8_H
#define MU_COMMON_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Length of the well-formed UTF-8 sequence (Unicode 15, table 3-7) with which the `left` (1 or more) bytes at `p`
 * begin; 0 when there is none or it is a control character. */
size_t mu_utf8_clean(const uint8_t *p, size_t left);

#endif
