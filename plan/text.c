#include "plan/text.h"

#include "common/status.h"

void mu_text_init(struct mu_text *text, char *buffer, size_t capacity_bytes)
{
    MU_ASSERT(capacity_bytes >= 1);
    *text = (struct mu_text){.data = buffer, .capacity = capacity_bytes};
    buffer[0] = 0;
}

static void put_char(struct mu_text *text, char c)
{
    if (text->length + 1 >= text->capacity)
        return;
    text->data[text->length++] = c;
    text->data[text->length] = 0;
}

void mu_text_put(struct mu_text *text, const char *string)
{
    for (; *string; string++)
        put_char(text, *string);
}

void mu_text_put_uint(struct mu_text *text, uint64_t value)
{
    char digits[20];
    int count = 0;
    do
        digits[count++] = (char)('0' + value % 10);
    while (value /= 10);
    while (count > 0)
        put_char(text, digits[--count]);
}

void mu_text_put_hex(struct mu_text *text, uint64_t value)
{
    for (int shift = 60; shift >= 0; shift -= 4)
        put_char(text, "0123456789abcdef"[value >> shift & 15]);
}
