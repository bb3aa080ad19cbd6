/* Tells the service manager how this process does, as sd_notify(3) does: a datagram to the socket that $NOTIFY_SOCKET
 * names. Without one (not a service of Type=notify) everything here does nothing. Only shells call it; call
 * mu_notify_init before threads start, the rest from one thread at a time. */
#ifndef MU_COMMON_NOTIFY_H
#define MU_COMMON_NOTIFY_H

#include <stdint.h>

#include "common/status.h"

/* Takes $NOTIFY_SOCKET, $WATCHDOG_USEC and $WATCHDOG_PID out of the environment: children are not the service. */
void mu_notify_init(void);

/* "READY=1", "STOPPING=1", "STATUS=..."; several, separated by newlines. */
void mu_notify(const char *fmt, ...) MU_PRINTF(1, 2);

/* The main loop comes round: the manager hears of it if it is time to (twice in each watchdog period). Returns when the
 * loop must come round again at the latest; UINT64_MAX: there is no watchdog. */
uint64_t mu_notify_alive(uint64_t now_us);

#endif
