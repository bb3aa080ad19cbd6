#include "common/utf8.h"

size_t mu_utf8_clean(const uint8_t *p, size_t left)
{
    uint8_t c = p[0];
    if (c < 0x80)
        return c >= 0x20 && c != 0x7f;
    size_t length = c >= 0xc2 && c <= 0xdf ? 2 : c >= 0xe0 && c <= 0xef ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
    if (length == 0 || left < length)
        return 0;
    uint8_t low = 0x80, high = 0xbf;
    if (c == 0xc2)
        low = 0xa0; /* U+0080 to U+009F are control characters */
    else if (c == 0xe0)
        low = 0xa0;
    else if (c == 0xed)
        high = 0x9f;
    else if (c == 0xf0)
        low = 0x90;
    else if (c == 0xf4)
        high = 0x8f;
    if (p[1] < low || p[1] > high)
        return 0;
    for (size_t i = 2; i < length; i++) {
        if (p[i] < 0x80 || p[i] > 0xbf)
            return 0;
    }
    return length;
}
