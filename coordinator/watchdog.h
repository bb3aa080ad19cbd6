/* Notices that the RPC server accepts nobody any more.
 *
 * The gRPC C core (1.51) gives its listener up for good when accept(2) finds no file descriptor left: streams that are
 * open go on, new connections wait for ever, and nothing says so. rpc/gate.c keeps that from happening where the
 * library calls the C library's accept4 by name, as the shared one does. This is for all other cases. It looks from
 * time to time whether a descriptor can be had; once none could, it dials the server's own address (which also makes a
 * listener look that has overlooked somebody), and if nothing answers within MU_WATCHDOG_ANSWER_MS, the listener is
 * dead and the process must be started again.
 *
 * One thread; never blocks (but for resolving a name, in init). No clock: time is given. */
#ifndef MU_COORDINATOR_WATCHDOG_H
#define MU_COORDINATOR_WATCHDOG_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

enum { MU_WATCHDOG_LOOK_MS = 250, MU_WATCHDOG_ANSWER_MS = 30000 };

struct mu_watchdog {
    struct sockaddr_storage to;
    socklen_t to_size; /* 0: the address cannot be dialled (a Unix socket); it never barks then */
    int fd;            /* of the call to oneself; -1: none */
    bool suspicious;   /* a descriptor could not be had */
    bool greeted;
    uint64_t next_us, answer_until_us;
};

void mu_watchdog_init(struct mu_watchdog *watchdog, const char *address); /* as the server was bound: "host:port" */
void mu_watchdog_fini(struct mu_watchdog *watchdog);
/* Cheap before next_us. True: the listener is dead. */
bool mu_watchdog_look(struct mu_watchdog *watchdog, uint64_t now_us);

#endif
