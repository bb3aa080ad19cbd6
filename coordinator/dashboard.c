#include "coordinator/dashboard.h"

/* The assembler takes the file in as it is. */
__asm__(".section .rodata\n"
        ".global mu_dashboard\n"
        "mu_dashboard: .incbin \"" MU_DASHBOARD "\"\n"
        "mu_dashboard_end: .byte 0\n"
        ".previous\n");
extern const char mu_dashboard_end[] __asm__("mu_dashboard_end");

size_t mu_dashboard_size(void)
{
    return (size_t)(mu_dashboard_end - mu_dashboard);
}
