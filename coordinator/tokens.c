#include "coordinator/tokens.h"

#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/log.h"
#include "coordinator/api.h"
#include "coordinator/records.h"
#include "muster/v1/token.pb-c.h"
#include "proto/wire_pb.h"
#include "rpc/certificate.h"

enum {
    ID_SIZE = MU_TOKEN_ID_SIZE,
    HASH_BYTES = MU_TOKEN_HASH_BYTES,
    ROLE_SIZE = 16,
    IDENTITY_SIZE = 512,
    RECORD_VERSION_JOIN = 1, /* of a join token; programs that know no other kind read this one */
    RECORD_VERSION = 2,
    VALUE_BYTES_MAX = 4096,
    REFUSAL_LOG_US = 1000000,
};

struct token {
    char id[ID_SIZE];
    char worker[MU_WORKER_NAME_SIZE], used_by[MU_WORKER_NAME_SIZE]; /* "": any, nobody */
    char created_by[IDENTITY_SIZE];
    bool is_reusable;
    bool reads; /* over HTTP; else it is exchanged for a certificate */
    uint64_t created_wall_us, expires_wall_us, used_wall_us;
    uint32_t used_count;
    uint8_t secret_hash[HASH_BYTES], key_hash[HASH_BYTES];
};

struct mu_tokens {
    struct mu_tokens_config config;
    struct mu_certificate_pair ca; /* empty: none */
    struct mu_readers *readers;
    struct mu_wire_arena arena;
    struct token list[MU_TOKENS_MAX]; /* the oldest first */
    size_t count;
    uint64_t refusal_logged_us;
};

static void sha256(const void *data, size_t size_bytes, uint8_t out[HASH_BYTES])
{
    struct mu_sha256 *sha = mu_sha256_new();
    mu_sha256_update(sha, data, size_bytes);
    mu_sha256_final_free(sha, out);
}

static struct token *find(struct mu_tokens *tokens, const char *id)
{
    for (size_t i = 0; i < tokens->count; i++)
        if (strcmp(tokens->list[i].id, id) == 0)
            return &tokens->list[i];
    return NULL;
}

static const char role_worker[] = "worker", role_viewer[] = "viewer";

/* ---- the store ---- */

static size_t key_of(const struct token *token, char out[sizeof MU_TOKEN_KEY_PREFIX + ID_SIZE])
{
    return (size_t)snprintf(out, sizeof MU_TOKEN_KEY_PREFIX + ID_SIZE, MU_TOKEN_KEY_PREFIX "%s", token->id);
}

static Muster__V1__Token *to_pb(struct mu_tokens *tokens, struct token *token)
{
    Muster__V1__Token *pb = mu_wire_arena_alloc(&tokens->arena, sizeof *pb);
    if (!pb)
        return NULL;
    muster__v1__token__init(pb);
    pb->id = token->id;
    pb->worker = token->worker;
    pb->reusable = token->is_reusable;
    pb->created_wall_us = token->created_wall_us;
    pb->expires_wall_us = token->expires_wall_us;
    pb->used_count = token->used_count;
    pb->used_by = token->used_by;
    pb->used_wall_us = token->used_wall_us;
    pb->created_by = token->created_by;
    pb->role = (char *)(uintptr_t)(token->reads ? role_viewer : role_worker);
    return pb;
}

static bool is_role(const char *role)
{
    return strcmp(role, role_worker) == 0 || strcmp(role, role_viewer) == 0;
}

static enum mu_status from_record(const Muster__V1__TokenRecord *pb, struct token *out, struct mu_error *err)
{
    const Muster__V1__Token *info = pb->info;
    enum mu_status status = MU_OK;
    *out = (struct token){0};
    if (pb->version == 0 || pb->version > RECORD_VERSION || !info || (info->role[0] && !is_role(info->role)))
        return mu_fail(err, MU_ERR_CORRUPT, "version %u is not one that this program reads (up to %d)", pb->version,
                       RECORD_VERSION);
    if ((status = mu_wire_get_string(info->id, MU_WIRE_NAME, "id", out->id, sizeof out->id, err)) ||
        (status =
             mu_wire_get_string(info->worker, MU_WIRE_NAME_EMPTY, "worker", out->worker, sizeof out->worker, err)) ||
        (status = mu_wire_get_string(info->used_by, MU_WIRE_NAME_EMPTY, "used_by", out->used_by, sizeof out->used_by,
                                     err)) ||
        (status = mu_wire_get_string(info->created_by, MU_WIRE_TEXT, "created_by", out->created_by,
                                     sizeof out->created_by, err)) ||
        (status = mu_wire_get_bytes32(pb->secret_sha256, "secret_sha256", out->secret_hash, err)) ||
        (status = mu_wire_get_bytes32(pb->key_sha256, "key_sha256", out->key_hash, err)))
        return status;
    out->is_reusable = info->reusable;
    out->reads = strcmp(info->role, role_viewer) == 0;
    out->created_wall_us = info->created_wall_us;
    out->expires_wall_us = info->expires_wall_us;
    out->used_count = info->used_count;
    out->used_wall_us = info->used_wall_us;
    return MU_OK;
}

static enum mu_status persist(struct mu_tokens *tokens, struct token *token, struct mu_error *err)
{
    char key[sizeof MU_TOKEN_KEY_PREFIX + ID_SIZE];
    Muster__V1__TokenRecord record = MUSTER__V1__TOKEN_RECORD__INIT;
    const void *value = NULL;
    size_t value_bytes = 0;
    record.version = token->reads ? RECORD_VERSION : RECORD_VERSION_JOIN;
    record.info = to_pb(tokens, token);
    record.secret_sha256 = mu_wire_put_bytes32(token->secret_hash);
    record.key_sha256 = mu_wire_put_bytes32(token->key_hash);
    enum mu_status status = mu_wire_pack(&tokens->arena, &record.base, VALUE_BYTES_MAX, &value, &value_bytes, err);
    return status ? status : mu_outbox_put(tokens->config.outbox, key, key_of(token, key), value, value_bytes, err);
}

static enum mu_status forget(struct mu_tokens *tokens, struct token *token, struct mu_error *err)
{
    char key[sizeof MU_TOKEN_KEY_PREFIX + ID_SIZE];
    enum mu_status status = mu_outbox_delete(tokens->config.outbox, key, key_of(token, key), err);
    if (status)
        return status;
    if (token->reads)
        mu_readers_remove(tokens->readers, token->id);
    size_t index = (size_t)(token - tokens->list);
    memmove(token, token + 1, (--tokens->count - index) * sizeof *token);
    OPENSSL_cleanse(&tokens->list[tokens->count], sizeof *token);
    return MU_OK;
}

/* Those whose time is over. */
static enum mu_status prune(struct mu_tokens *tokens, uint64_t wall_us, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (size_t i = tokens->count; i-- > 0 && status == MU_OK;)
        if (tokens->list[i].expires_wall_us <= wall_us)
            status = forget(tokens, &tokens->list[i], err);
    return status;
}

struct load {
    struct mu_tokens *tokens;
    enum mu_status status;
    struct mu_error *err;
};

static bool load_one(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    struct load *load = arg;
    struct mu_tokens *tokens = load->tokens;
    const ProtobufCMessage *pb = NULL;
    if (tokens->count == MU_TOKENS_MAX)
        return false;
    struct token *token = &tokens->list[tokens->count];
    mu_wire_arena_reset(&tokens->arena);
    load->status = mu_wire_unpack(&tokens->arena, &muster__v1__token_record__descriptor, value, value_bytes,
                                  VALUE_BYTES_MAX, &pb, load->err);
    if (load->status == MU_OK)
        load->status = from_record((const Muster__V1__TokenRecord *)pb, token, load->err);
    if (load->status) {
        mu_error_prefix(load->err, "data directory: the join token '%.*s' cannot be read", (int)key_bytes, key);
        return false;
    }
    if (token->reads)
        mu_readers_add(tokens->readers, token->id, token->secret_hash, token->expires_wall_us);
    tokens->count++;
    return true;
}

static int by_age(const void *a, const void *b)
{
    const struct token *left = a, *right = b;
    return left->created_wall_us < right->created_wall_us ? -1 : left->created_wall_us > right->created_wall_us;
}

enum mu_status mu_tokens_new(const struct mu_tokens_config *config, struct mu_tokens **ret_tokens, struct mu_error *err)
{
    struct mu_tokens *tokens = calloc(1, sizeof *tokens);
    if (!tokens)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for join tokens");
    tokens->config = *config;
    mu_wire_arena_init(&tokens->arena);
    tokens->readers = mu_readers_new();
    if (!tokens->readers) {
        mu_tokens_free(tokens);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for tokens");
    }
    struct load load = {.tokens = tokens, .err = err};
    enum mu_status status =
        config->ca_key ? mu_certificate_read_pair(config->ca_cert, config->ca_key, &tokens->ca, err) : MU_OK;
    if (status)
        mu_error_prefix(err, "--ca-key");
    else
        status = mu_store_scan(config->store, MU_TOKEN_KEY_PREFIX, strlen(MU_TOKEN_KEY_PREFIX), NULL, 0, 0, load_one,
                               &load, err);
    if (status == MU_OK)
        status = load.status;
    if (status) {
        mu_tokens_free(tokens);
        return status;
    }
    qsort(tokens->list, tokens->count, sizeof tokens->list[0], by_age);
    *ret_tokens = tokens;
    return MU_OK;
}

void mu_tokens_free(struct mu_tokens *tokens)
{
    if (!tokens)
        return;
    mu_certificate_pair_free(&tokens->ca);
    mu_readers_free(tokens->readers);
    mu_wire_arena_fini(&tokens->arena);
    OPENSSL_cleanse(tokens->list, sizeof tokens->list);
    free(tokens);
}

/* ---- what administrators ask for ---- */

static enum mu_status no_ca(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_CONFLICT,
                   "this coordinator gives no certificates: it runs without --ca-key (or without TLS)");
}

/* What the request asks for, as far as it may be asked. */
static enum mu_status take_request(const struct mu_tokens *tokens, const Muster__V1__CreateTokenRequest *request,
                                   struct token *token, struct mu_error *err)
{
    uint32_t valid_s = request->valid_s ? request->valid_s : MU_TOKEN_VALID_S_DEFAULT;
    if (request->role[0] && !is_role(request->role))
        return mu_fail(err, MU_ERR_INVALID, "role: only '%s' and '%s' are allowed", role_worker, role_viewer);
    token->reads = strcmp(request->role, role_viewer) == 0;
    token->is_reusable = request->reusable || token->reads;
    token->created_wall_us = mu_clock_wall_us();
    token->expires_wall_us = token->created_wall_us + valid_s * 1000000ull;
    if (token->reads && request->worker[0])
        return mu_fail(err, MU_ERR_INVALID, "worker: a token of the role %s is for no worker", role_viewer);
    if (!token->reads && !tokens->ca.key)
        return no_ca(err);
    if (valid_s > MU_TOKEN_VALID_S_MAX)
        return mu_fail(err, MU_ERR_INVALID, "valid_s: value %u is not allowed: at most %d", valid_s,
                       MU_TOKEN_VALID_S_MAX);
    return mu_wire_get_string(request->worker, MU_WIRE_NAME_EMPTY, "worker", token->worker, sizeof token->worker, err);
}

static enum mu_status create(struct mu_tokens *tokens, struct mu_rpc_call *call, const ProtobufCMessage *base,
                             const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    struct token token = {0};
    char *text = mu_wire_arena_alloc(&tokens->arena, MU_TOKEN_TEXT_SIZE);
    Muster__V1__CreateTokenResponse *response = mu_wire_arena_alloc(&tokens->arena, sizeof *response);
    enum mu_status status = take_request(tokens, (const Muster__V1__CreateTokenRequest *)base, &token, err);
    if (status || (status = prune(tokens, token.created_wall_us, err)))
        return status;
    if (tokens->count == MU_TOKENS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "there are %d tokens already: revoke some", MU_TOKENS_MAX);
    if (!text || !response)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a token");
    mu_token_text_make(token.id, text, token.secret_hash);
    snprintf(token.created_by, sizeof token.created_by, "%s", mu_rpc_call_identity(call));
    struct token *made = &tokens->list[tokens->count++];
    *made = token;
    if (made->reads)
        mu_readers_add(tokens->readers, made->id, made->secret_hash, made->expires_wall_us);
    muster__v1__create_token_response__init(response);
    response->token = text;
    response->info = to_pb(tokens, made);
    MU_LOGI("token %s of the role %s was made by %s", made->id, made->reads ? role_viewer : role_worker,
            made->created_by[0] ? made->created_by : "somebody without a certificate");
    *ret_reply = &response->base;
    return persist(tokens, made, err);
}

/* Uses over HTTP are counted where they happen, since the coordinator's start. */
static void count_uses(struct mu_tokens *tokens)
{
    for (size_t i = 0; i < tokens->count; i++) {
        struct token *token = &tokens->list[i];
        if (!token->reads)
            continue;
        struct mu_reader_use use = mu_readers_use(tokens->readers, token->id);
        token->used_count = use.count;
        token->used_wall_us = use.wall_us;
    }
}

static enum mu_status list(struct mu_tokens *tokens, struct mu_rpc_call *call, const ProtobufCMessage *base,
                           const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    (void)call, (void)base;
    Muster__V1__ListTokensResponse *response = mu_wire_arena_alloc(&tokens->arena, sizeof *response);
    enum mu_status status = prune(tokens, mu_clock_wall_us(), err);
    if (status)
        return status;
    Muster__V1__Token **list = mu_wire_arena_alloc(&tokens->arena, (tokens->count + 1) * sizeof *list);
    if (!response || !list)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
    count_uses(tokens);
    muster__v1__list_tokens_response__init(response);
    response->tokens = list;
    while (response->n_tokens < tokens->count) {
        list[response->n_tokens] = to_pb(tokens, &tokens->list[tokens->count - 1 - response->n_tokens]);
        response->n_tokens++;
    }
    *ret_reply = &response->base;
    return MU_OK;
}

static enum mu_status revoke(struct mu_tokens *tokens, struct mu_rpc_call *call, const ProtobufCMessage *base,
                             const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    char id[ID_SIZE];
    Muster__V1__RevokeTokenResponse *response = mu_wire_arena_alloc(&tokens->arena, sizeof *response);
    enum mu_status status =
        mu_wire_get_string(((const Muster__V1__RevokeTokenRequest *)base)->id, MU_WIRE_NAME, "id", id, sizeof id, err);
    if (status || (status = prune(tokens, mu_clock_wall_us(), err)))
        return status;
    struct token *token = find(tokens, id);
    if (!token)
        return mu_fail(err, MU_ERR_NOT_FOUND, "there is no token '%s' (see muster token ls)", id);
    if (!response)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
    muster__v1__revoke_token_response__init(response);
    *ret_reply = &response->base;
    MU_LOGI("token %s was revoked by %s", id, mu_rpc_call_identity(call));
    return forget(tokens, token, err);
}

/* ---- joining ---- */

/* The token that the text names, if the secret in it is right. NULL: whatever is wrong, strangers learn no more. */
static struct token *prove(struct mu_tokens *tokens, const char *text)
{
    char id[ID_SIZE];
    uint8_t hash[HASH_BYTES];
    if (!mu_token_text_read(text, id, hash))
        return NULL;
    struct token *token = find(tokens, id);
    return token && !token->reads && mu_token_hash_is(hash, token->secret_hash) ? token : NULL;
}

/* Whether the token is good for a certificate of `worker` for that key. */
static enum mu_status judge(const struct mu_tokens *tokens, const struct token *token, const char *worker,
                            const uint8_t key_hash[HASH_BYTES], struct mu_error *err)
{
    char identity[IDENTITY_SIZE];
    bool is_again = strcmp(token->used_by, worker) == 0 && memcmp(token->key_hash, key_hash, HASH_BYTES) == 0;
    snprintf(identity, sizeof identity, MU_CERTIFICATE_SCHEME "worker/%s", worker);
    if (token->expires_wall_us <= mu_clock_wall_us())
        return mu_fail(err, MU_ERR_DENIED, "the time of join token %s is over: ask for a new one", token->id);
    if (token->worker[0] && strcmp(token->worker, worker) != 0)
        return mu_fail(err, MU_ERR_DENIED, "join token %s is for the worker '%s', not for '%s'", token->id,
                       token->worker, worker);
    if (token->used_count > 0 && !token->is_reusable && !is_again)
        return mu_fail(err, MU_ERR_DENIED, "join token %s was used already, by the worker '%s': ask for a new one",
                       token->id, token->used_by);
    if (mu_access_is_denied(tokens->config.access, identity))
        return mu_fail(err, MU_ERR_DENIED, "%s is on the coordinator's list of denied identities", identity);
    return MU_OK;
}

static enum mu_status hash_key(EVP_PKEY *key, uint8_t out[HASH_BYTES])
{
    unsigned char *der = NULL;
    int size_bytes = i2d_PUBKEY(key, &der);
    if (size_bytes > 0)
        sha256(der, (size_t)size_bytes, out);
    OPENSSL_free(der);
    return size_bytes > 0 ? MU_OK : MU_ERR_NO_MEMORY;
}

/* The certificate, as PEM in the arena. */
static enum mu_status sign(struct mu_tokens *tokens, const char *worker, EVP_PKEY *key, ProtobufCBinaryData *ret_pem,
                           struct mu_error *err)
{
    const struct mu_certificate_subject subject = {
        .role = "worker", .name = worker, .valid_s = tokens->config.certificate_s, .is_renewable = true};
    X509 *cert = NULL;
    enum mu_status status = mu_certificate_sign(&subject, &tokens->ca, key, &cert, err);
    if (status)
        return status;
    char *pem = mu_certificate_to_pem(cert);
    X509_free(cert);
    size_t size_bytes = pem ? strlen(pem) : 0;
    void *copy = mu_wire_arena_alloc(&tokens->arena, size_bytes + 1);
    if (pem && copy)
        *ret_pem = (ProtobufCBinaryData){.len = size_bytes, .data = memcpy(copy, pem, size_bytes)};
    else
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a certificate");
    free(pem);
    return status;
}

static enum mu_status join(struct mu_tokens *tokens, struct mu_rpc_call *call, const ProtobufCMessage *base,
                           const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    const Muster__V1__JoinRequest *request = (const Muster__V1__JoinRequest *)base;
    char worker[MU_WORKER_NAME_SIZE];
    uint8_t key_hash[HASH_BYTES];
    EVP_PKEY *key = NULL;
    Muster__V1__JoinResponse *response = mu_wire_arena_alloc(&tokens->arena, sizeof *response);
    char *identity = mu_wire_arena_alloc(&tokens->arena, IDENTITY_SIZE);
    struct token *token = prove(tokens, request->token);
    if (!response || !identity)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a certificate");
    muster__v1__join_response__init(response);
    if (!token)
        return mu_fail(err, MU_ERR_DENIED,
                       "the join token is not one of this coordinator's: mistyped, or revoked, or over");
    enum mu_status status = mu_wire_get_string(request->worker[0] ? request->worker : token->worker, MU_WIRE_NAME,
                                               "worker", worker, sizeof worker, err);
    if (status == MU_OK)
        status =
            mu_certificate_read_request(request->certificate_request.data, request->certificate_request.len, &key, err);
    if (status)
        return status;
    if ((status = hash_key(key, key_hash)) == MU_OK && (status = judge(tokens, token, worker, key_hash, err)) == MU_OK)
        status = sign(tokens, worker, key, &response->certificate, err);
    EVP_PKEY_free(key);
    if (status)
        return status;
    snprintf(identity, IDENTITY_SIZE, MU_CERTIFICATE_SCHEME "worker/%s", worker);
    response->identity = identity;
    *ret_reply = &response->base;
    token->used_count++;
    token->used_wall_us = mu_clock_wall_us();
    memcpy(token->key_hash, key_hash, sizeof key_hash);
    snprintf(token->used_by, sizeof token->used_by, "%s", worker);
    MU_LOGI("the worker '%s' at %s was given a certificate for join token %s", worker, mu_rpc_call_peer(call),
            token->id);
    return persist(tokens, token, err);
}

/* ---- renewal ---- */

/* Whether the caller may have another certificate: only of those that were given here has somebody agreed to that. The
 * connection may be older than the end of the one that it was made with. */
static enum mu_status judge_shown(struct mu_rpc_call *call, struct mu_error *err)
{
    char *pem = mu_rpc_call_certificate(call);
    X509 *shown = pem ? mu_certificate_from_pem(pem, strlen(pem)) : NULL;
    enum mu_status status = MU_OK;
    if (!shown || X509_cmp_current_time(X509_get0_notAfter(shown)) <= 0)
        status = mu_fail(err, MU_ERR_CONFLICT, "the certificate of %s is over: join with a new token",
                         mu_rpc_call_identity(call));
    else if (!mu_certificate_is_renewable(shown))
        status = mu_fail(err, MU_ERR_CONFLICT,
                         "the certificate of %s was not given for a join token: it is replaced by who issued it",
                         mu_rpc_call_identity(call));
    X509_free(shown);
    free(pem);
    return status;
}

static enum mu_status renew(struct mu_tokens *tokens, struct mu_rpc_call *call, const ProtobufCMessage *base,
                            const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    const ProtobufCBinaryData *request = &((const Muster__V1__RenewRequest *)base)->certificate_request;
    const char *worker = mu_rpc_call_identity(call) + strlen(MU_CERTIFICATE_SCHEME "worker/"); /* see access.h */
    EVP_PKEY *key = NULL;
    Muster__V1__RenewResponse *response = mu_wire_arena_alloc(&tokens->arena, sizeof *response);
    if (!response)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a certificate");
    muster__v1__renew_response__init(response);
    enum mu_status status = judge_shown(call, err);
    if (status == MU_OK)
        status = mu_certificate_read_request(request->data, request->len, &key, err);
    if (status == MU_OK)
        status = sign(tokens, worker, key, &response->certificate, err);
    EVP_PKEY_free(key);
    if (status)
        return status;
    MU_LOGI("the worker '%s' at %s was given a new certificate for its former one", worker, mu_rpc_call_peer(call));
    *ret_reply = &response->base;
    return MU_OK;
}

/* ---- calls ---- */

struct mu_readers *mu_tokens_readers(struct mu_tokens *tokens)
{
    return tokens->readers;
}

struct held_answer {
    struct mu_outbox_item item;
    struct mu_rpc_call *call;
    struct mu_rpc_bytes *bytes;
};

static void run_answer(void *ctx, struct mu_outbox_item *item, bool drop)
{
    (void)ctx;
    struct held_answer *held = (struct held_answer *)item;
    if (!drop)
        mu_rpc_call_reply(held->call, held->bytes);
    mu_rpc_bytes_unref(held->bytes);
    free(held);
}

typedef enum mu_status handler_fn(struct mu_tokens *tokens, struct mu_rpc_call *call, const ProtobufCMessage *request,
                                  const ProtobufCMessage **ret_reply, struct mu_error *err);

static const struct handler {
    int method;
    const ProtobufCMessageDescriptor *request;
    handler_fn *handle;
    bool stores;   /* there must be room in the store */
    bool needs_ca; /* for a certificate; to make a join token, too */
} handlers[] = {
    {MU_METHOD_CREATE_TOKEN, &muster__v1__create_token_request__descriptor, create, true, false},
    {MU_METHOD_LIST_TOKENS, &muster__v1__list_tokens_request__descriptor, list, true,
     false}, /* forgets those that are over */
    {MU_METHOD_REVOKE_TOKEN, &muster__v1__revoke_token_request__descriptor, revoke, true, false},
    {MU_METHOD_JOIN, &muster__v1__join_request__descriptor, join, true, true},
    {MU_METHOD_RENEW, &muster__v1__renew_request__descriptor, renew, false, true},
};

static enum mu_status handle(struct mu_tokens *tokens, struct mu_rpc_call *call, const struct handler *handler,
                             const void *data, size_t size_bytes, struct mu_rpc_bytes **ret_bytes, struct mu_error *err)
{
    const ProtobufCMessage *request = NULL, *reply = NULL;
    const void *packed = NULL;
    size_t packed_bytes = 0;
    enum mu_status status =
        mu_wire_unpack(&tokens->arena, handler->request, data, size_bytes, MU_WIRE_REQUEST_BYTES_MAX, &request, err);
    if (status == MU_OK && handler->needs_ca && !tokens->ca.key)
        status = no_ca(err);
    if (status == MU_OK && handler->stores && (status = mu_store_check(tokens->config.store, err)) != MU_OK)
        mu_error_prefix(err, "refused, because it could not be stored");
    if (status == MU_OK)
        status = handler->handle(tokens, call, request, &reply, err);
    if (status == MU_OK)
        status = mu_wire_pack(&tokens->arena, reply, MU_WIRE_REPLY_BYTES_MAX, &packed, &packed_bytes, err);
    if (status == MU_OK)
        *ret_bytes = mu_rpc_bytes_copy(packed, packed_bytes);
    return status;
}

void mu_tokens_call(struct mu_tokens *tokens, struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    const struct handler *handler = handlers;
    while (handler->method != mu_rpc_call_method_id(call))
        handler++;
    struct mu_error err = {0};
    struct held_answer *held = calloc(1, sizeof *held);
    mu_wire_arena_reset(&tokens->arena);
    enum mu_status status = held ? handle(tokens, call, handler, data, size_bytes, &held->bytes, &err)
                                 : mu_fail(&err, MU_ERR_NO_MEMORY, "no memory for the answer");
    if (status == MU_OK) {
        held->call = call;
        mu_outbox_hold(tokens->config.outbox, &held->item, run_answer);
        return;
    }
    free(held);
    uint64_t now_us = mu_clock_mono_us();
    if (status == MU_ERR_DENIED && now_us - tokens->refusal_logged_us >= REFUSAL_LOG_US) {
        tokens->refusal_logged_us = now_us; /* they come as fast as a peer likes */
        MU_LOGW("call from %s refused: %s", mu_rpc_call_peer(call), err.text);
    }
    mu_rpc_call_fail_error(call, &err);
}
