/* The page at /: dashboard/index.html, put into the program when it is built. */
#ifndef MU_COORDINATOR_DASHBOARD_H
#define MU_COORDINATOR_DASHBOARD_H

#include <stddef.h>

extern const char mu_dashboard[];
size_t mu_dashboard_size(void);

#endif
