/* An encrypted connection between two workers: TLS 1.3 over a connected socket, by a key that both have (PSK with
 * ephemeral Diffie-Hellman: who learns the key later cannot read what was recorded). There are no certificates; whoever
 * does not have the key gets no further than the hand-shake. Where the kernel and OpenSSL offer it, the kernel
 * encrypts (kernel TLS).
 *
 * Functions behave as sendmsg and readv do on a non-blocking socket, and end-of-file is what the socket says: whoever
 * must know that nothing was cut off says goodbye himself. One thread at a time. The process ignores SIGPIPE. */
#ifndef MU_WORKER_SECURE_H
#define MU_WORKER_SECURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "common/status.h"

enum { MU_SECURE_KEY_SIZE = 32 };

struct mu_secure;

/* One end accepts, the other does not. The socket stays the caller's. NULL: no memory. */
struct mu_secure *mu_secure_new(int fd, bool accepts, const uint8_t key[MU_SECURE_KEY_SIZE]);
void mu_secure_free(struct mu_secure *secure); /* says nothing to the other end; NULL is fine */

/* The hand-shake. 0: it is done. EAGAIN: again when something can be read or written. Else it is broken: 0 < errno;
 * ECONNRESET when the other end has closed, EPROTO when it does not have the key or speaks something else. */
int mu_secure_shake(struct mu_secure *secure);

/* Bytes taken, or -1 and errno. After EAGAIN only the same bytes (and more behind them) may follow. */
ssize_t mu_secure_send(struct mu_secure *secure, const struct iovec *iov, size_t count);
/* A record is half sent. */
bool mu_secure_is_midway(const struct mu_secure *secure);
/* Bytes placed, 0 at the end, or -1 and errno (EBADMSG: not what the other end sent). Less than there is room for does
 * not mean that there is no more: only EAGAIN does. */
ssize_t mu_secure_receive(struct mu_secure *secure, const struct iovec *iov, size_t count);

/* Who encrypts, for a log: "kernel TLS: sends", ... */
const char *mu_secure_kernel(const struct mu_secure *secure);

/* For tests: a new key after so many bytes instead of 64 GiB. */
void mu_secure_set_rekey(struct mu_secure *secure, uint64_t bytes);

#endif
