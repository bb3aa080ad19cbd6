/* Tokens: what has no certificate shows one. Join tokens (role worker) are exchanged for certificates of workers,
 * signed with the CA's key, which the certificates follow that replace those; tokens of the role viewer are for reading
 * over HTTP (readers.h), until their time is over or they are revoked.
 *
 *    CREATED --Join--> used up (reusable, viewer: CREATED) --time is over, revoked--> forgotten
 *
 * A token (token_text.h) is told once and never kept: the store ("k/<id>") has the SHA-256 of its secret, which is
 * compared in constant time. Its use is on stable storage before the certificate is handed out, so that no
 * crash makes it good again; whoever asks again for the same key is answered again, since that gives nothing to anybody
 * else. Restored snapshots have no tokens. Core thread only. */
#ifndef MU_COORDINATOR_TOKENS_H
#define MU_COORDINATOR_TOKENS_H

#include "coordinator/access.h"
#include "coordinator/outbox.h"
#include "coordinator/readers.h"
#include "rpc/server.h"
#include "storage/store.h"

enum {
    MU_TOKENS_MAX = MU_READERS_MAX,
    MU_TOKEN_VALID_S_DEFAULT = 3600,
    MU_TOKEN_VALID_S_MAX = 366 * 86400,
    MU_TOKEN_CERTIFICATE_S_DEFAULT = 90 * 86400,
    MU_TOKEN_CERTIFICATE_S_MAX = 3660 * 86400,
};

struct mu_tokens_config {
    struct mu_store *store;
    struct mu_outbox *outbox;
    const struct mu_access *access; /* the denied get no certificate */
    const char *ca_cert, *ca_key;   /* ca_key NULL: there are tokens for reading only */
    uint32_t certificate_s;         /* life of the certificates */
};

struct mu_tokens;
/* Reads the key of the CA and the tokens that are stored. */
enum mu_status mu_tokens_new(const struct mu_tokens_config *config, struct mu_tokens **ret_tokens,
                             struct mu_error *err) MU_WARN_UNUSED;
void mu_tokens_free(struct mu_tokens *tokens); /* NULL is fine */

/* Those of the role viewer; lives as long as `tokens`. */
struct mu_readers *mu_tokens_readers(struct mu_tokens *tokens);

/* A CALL event of CREATE_TOKEN, LIST_TOKENS, REVOKE_TOKEN, JOIN or RENEW. */
void mu_tokens_call(struct mu_tokens *tokens, struct mu_rpc_call *call, const void *data, size_t size_bytes);

#endif
