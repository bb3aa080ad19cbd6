/* Who is connected to a listener, and what each of them has cost that is not settled yet.
 *
 * What a client sends becomes a call or a message, or the gRPC core answers it (a ping, say); until then the core keeps
 * it, and (1.51) without an end: headers whose last frame never comes (CVE-2023-33953), messages that stop half way.
 * And the core keeps each call that has ended until what tells the peer so is written; while the peer takes nothing,
 * they grow in number. So a guest owes
 *
 *    bytes that came  -  bytes sent that were acknowledged  -  bytes of calls and messages told
 *    +  16 KiB for each call that was ended, since for five seconds the peer has taken too little to know of them
 *
 * by the kernel's counters, which know nothing of TLS, and never less than nothing. A guest that owes more than one may
 * is disconnected; so are those that owe most when all together owe too much. A thread looks at all of them once a
 * second (at those that are well once in eight), and at once when the process grows.
 *
 * The table is under the gate's lock, which its functions take unless they say that it is held. Internal to rpc/. */
#ifndef MU_RPC_GUESTS_H
#define MU_RPC_GUESTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <sys/socket.h>

#include "common/status.h"

enum { MU_RPC_GUEST_NONE = -1, MU_RPC_GUEST_HOST_SIZE = 48, MU_RPC_GUEST_CALL_BYTES = 16 << 10 };

struct mu_rpc_guests;

/* `lock`: the gate's. 0 in a limit: none; both 0: nothing is reckoned, and there is no thread. */
enum mu_status mu_rpc_guests_new(pthread_mutex_t *lock, size_t max_owed_bytes, size_t max_owed_bytes_in_all,
                                 struct mu_rpc_guests **ret_guests, struct mu_error *err) MU_WARN_UNUSED;
/* Lock not held. NULL is fine. */
void mu_rpc_guests_free(struct mu_rpc_guests *guests);

/* ---- for the gate, lock held ---- */

/* Whether `most` of the host that `from` is on are here (of IPv6, of its /64). Not for Unix sockets: never. */
bool mu_rpc_guests_crowded(struct mu_rpc_guests *guests, const struct sockaddr_storage *from, unsigned most);
/* Was accepted with that descriptor, which the core will close without a word. */
void mu_rpc_guests_add(struct mu_rpc_guests *guests, int fd, const struct sockaddr_storage *from);
void mu_rpc_guests_host(const struct sockaddr_storage *from, char out[MU_RPC_GUEST_HOST_SIZE]);
/* How many were disconnected for what they owed; the host of the last one, "" when there is none. */
uint64_t mu_rpc_guests_shown_out(const struct mu_rpc_guests *guests, char ret_host[MU_RPC_GUEST_HOST_SIZE]);

/* ---- lock not held ---- */

/* Reckons with all of them, and disconnects who owes too much. What the thread does by itself. */
void mu_rpc_guests_look(struct mu_rpc_guests *guests, uint64_t now_us);

/* ---- for calls ---- */

/* Who has this address, "192.0.2.1:4711" or "[2001:db8::1]:4711". MU_RPC_GUEST_NONE: nobody who is reckoned with. */
int mu_rpc_guests_find(struct mu_rpc_guests *guests, const char *peer);
/* So many bytes of his became a call or a message. Nothing happens to MU_RPC_GUEST_NONE, here and below. */
void mu_rpc_guests_told(struct mu_rpc_guests *guests, int guest, size_t bytes);
/* A call of his has ended on our side. */
void mu_rpc_guests_ended(struct mu_rpc_guests *guests, int guest);

#endif
