#include "proto/served.h"

/* The assembler takes the file in as it is. */
__asm__(".section .rodata\n"
        ".global mu_served_set\n"
        "mu_served_set: .incbin \"" MU_SERVED_SET "\"\n"
        "mu_served_set_end: .byte 0\n"
        ".previous\n");
extern const uint8_t mu_served_set_end[] __asm__("mu_served_set_end");

size_t mu_served_set_bytes(void)
{
    return (size_t)(mu_served_set_end - mu_served_set);
}
