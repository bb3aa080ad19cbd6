#include "worker/secure.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* AES-GCM is safe for 2^24.5 records of one key (RFC 8446, 5.5): another key after 2^22. Where the kernel sends, the
 * key stays: it knows no other, and far beyond that limit nothing can be done in practice. */
#define REKEY_BYTES (UINT64_C(1) << 36)
#define IDENTITY    "muster"
enum { RECORD_SIZE = 16384, READ_AHEAD_SIZE = 65536 };

struct mu_secure {
    SSL *ssl;
    bool accepts, midway;
    uint64_t sent_bytes, rekey_bytes; /* since the key, and until the next */
    SSL_SESSION *session;             /* that stands for the key */
    uint8_t gathered[RECORD_SIZE];    /* small parts, for one record */
};

/* ---- the key ---- */

static const unsigned char aes_128_gcm_sha256[2] = {0x13, 0x01};

/* The accepting end: whatever name the other one gives the key, there is one. */
static int find_session(SSL *ssl, const unsigned char *identity, size_t identity_bytes, SSL_SESSION **ret_session)
{
    struct mu_secure *secure = SSL_get_app_data(ssl);
    bool is_ours = identity_bytes == strlen(IDENTITY) && memcmp(identity, IDENTITY, identity_bytes) == 0;
    *ret_session = is_ours && SSL_SESSION_up_ref(secure->session) ? secure->session : NULL;
    return 1;
}

static int use_session(SSL *ssl, const EVP_MD *digest, const unsigned char **ret_identity, size_t *ret_identity_bytes,
                       SSL_SESSION **ret_session)
{
    struct mu_secure *secure = SSL_get_app_data(ssl);
    bool fits = !digest || EVP_MD_get_type(digest) == NID_sha256;
    *ret_identity = (const unsigned char *)IDENTITY;
    *ret_identity_bytes = strlen(IDENTITY);
    *ret_session = fits && SSL_SESSION_up_ref(secure->session) ? secure->session : NULL;
    return fits;
}

static SSL_SESSION *session_of(SSL *ssl, const uint8_t key[MU_SECURE_KEY_SIZE])
{
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, aes_128_gcm_sha256);
    SSL_SESSION *session = SSL_SESSION_new();
    if (session && cipher && SSL_SESSION_set1_master_key(session, key, MU_SECURE_KEY_SIZE) == 1 &&
        SSL_SESSION_set_cipher(session, cipher) == 1 && SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1)
        return session;
    SSL_SESSION_free(session);
    return NULL;
}

/* ---- life ---- */

static SSL_CTX *context; /* of all connections; NULL: no memory */

/* Nothing but the key is good: there are no certificates, and no ticket outlives the connection. */
static void make_context(void)
{
    SSL_CTX *made = SSL_CTX_new(TLS_method());
    if (!made || SSL_CTX_set_min_proto_version(made, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256") != 1 || SSL_CTX_set_num_tickets(made, 0) != 1) {
        SSL_CTX_free(made);
        return;
    }
    SSL_CTX_set_options(made, SSL_OP_ENABLE_KTLS | SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_NO_COMPRESSION);
    SSL_CTX_clear_options(made, SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
    SSL_CTX_set_mode(made, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_read_ahead(made, 1);
    SSL_CTX_set_default_read_buffer_len(made, READ_AHEAD_SIZE);
    SSL_CTX_set_psk_find_session_callback(made, find_session);
    SSL_CTX_set_psk_use_session_callback(made, use_session);
    context = made;
}

struct mu_secure *mu_secure_new(int fd, bool accepts, const uint8_t key[MU_SECURE_KEY_SIZE])
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_context);
    struct mu_secure *secure = context ? calloc(1, sizeof *secure) : NULL;
    if (!secure)
        return NULL;
    secure->accepts = accepts;
    secure->rekey_bytes = REKEY_BYTES;
    secure->ssl = SSL_new(context);
    secure->session = secure->ssl ? session_of(secure->ssl, key) : NULL;
    if (!secure->session || SSL_set_app_data(secure->ssl, secure) != 1 || SSL_set_fd(secure->ssl, fd) != 1) {
        ERR_clear_error();
        mu_secure_free(secure);
        return NULL;
    }
    if (accepts) {
        SSL_set_accept_state(secure->ssl);
    } else {
        SSL_set_connect_state(secure->ssl);
        SSL_set_verify(secure->ssl, SSL_VERIFY_PEER, NULL); /* a certificate will not do */
    }
    return secure;
}

void mu_secure_free(struct mu_secure *secure)
{
    if (!secure)
        return;
    SSL_free(secure->ssl); /* the BIO made by SSL_set_fd does not close */
    SSL_SESSION_free(secure->session);
    free(secure);
}

/* ---- moving ---- */

/* What a call's result means, as the system's own calls say it. */
static ssize_t outcome(const struct mu_secure *secure, int result)
{
    int reason = errno;
    switch (SSL_get_error(secure->ssl, result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
        errno = EAGAIN;
        return -1;
    case SSL_ERROR_ZERO_RETURN:
        return 0;
    case SSL_ERROR_SYSCALL:
        errno = reason;
        return reason ? -1 : 0;
    default:
        errno = EBADMSG;
        return -1;
    }
}

int mu_secure_shake(struct mu_secure *secure)
{
    ERR_clear_error();
    errno = 0;
    int result = SSL_do_handshake(secure->ssl);
    if (result == 1)
        return SSL_session_reused(secure->ssl) ? 0 : EPROTO; /* by the key, not otherwise */
    if (outcome(secure, result) == 0)
        return ECONNRESET;
    int reason = errno;
    ERR_clear_error();
    return reason == EBADMSG ? EPROTO : reason;
}

/* A large part as it stands, small ones together. The same again after EAGAIN, since nothing was taken. */
static const void *gather(struct mu_secure *secure, const struct iovec *iov, size_t count, size_t *ret_size)
{
    *ret_size = iov[0].iov_len;
    if (count == 1 || iov[0].iov_len >= RECORD_SIZE)
        return iov[0].iov_base;
    size_t size = 0;
    for (size_t i = 0; i < count && size < RECORD_SIZE; i++) {
        size_t part = iov[i].iov_len < RECORD_SIZE - size ? iov[i].iov_len : RECORD_SIZE - size;
        memcpy(secure->gathered + size, iov[i].iov_base, part);
        size += part;
    }
    *ret_size = size;
    return secure->gathered;
}

ssize_t mu_secure_send(struct mu_secure *secure, const struct iovec *iov, size_t count)
{
    size_t size, sent = 0;
    ERR_clear_error();
    errno = 0;
    if (secure->sent_bytes >= secure->rekey_bytes && !secure->midway && !BIO_get_ktls_send(SSL_get_wbio(secure->ssl))) {
        SSL_key_update(secure->ssl, SSL_KEY_UPDATE_NOT_REQUESTED);
        secure->sent_bytes = 0;
    }
    const void *data = gather(secure, iov, count, &size);
    int result = SSL_write_ex(secure->ssl, data, size, &sent);
    if (result == 1) {
        secure->midway = false;
        secure->sent_bytes += sent;
        return (ssize_t)sent;
    }
    if (outcome(secure, result) == 0)
        errno = EPIPE;
    secure->midway = errno == EAGAIN;
    return -1;
}

bool mu_secure_is_midway(const struct mu_secure *secure)
{
    return secure->midway;
}

ssize_t mu_secure_receive(struct mu_secure *secure, const struct iovec *iov, size_t count)
{
    ssize_t total = 0;
    for (size_t i = 0; i < count; i++) {
        size_t got = 0;
        if (iov[i].iov_len == 0)
            continue;
        ERR_clear_error();
        errno = 0;
        int result = SSL_read_ex(secure->ssl, iov[i].iov_base, iov[i].iov_len, &got);
        if (result != 1) {
            if (total > 0)
                return total; /* the reason comes again */
            return outcome(secure, result);
        }
        total += (ssize_t)got;
        if (got < iov[i].iov_len)
            break;
    }
    return total;
}

const char *mu_secure_kernel(const struct mu_secure *secure)
{
    bool sends = BIO_get_ktls_send(SSL_get_wbio(secure->ssl)), receives = BIO_get_ktls_recv(SSL_get_rbio(secure->ssl));
    return sends && receives ? "sends and receives" : sends ? "sends" : receives ? "receives" : "not in use";
}

void mu_secure_set_rekey(struct mu_secure *secure, uint64_t bytes)
{
    secure->rekey_bytes = bytes;
}
