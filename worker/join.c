#include "worker/join.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "muster/v1/token.pb-c.h"
#include "plan/session.h"
#include "proto/wire_pb.h"
#include "rpc/certificate.h"
#include "rpc/client.h"

#define JOIN_METHOD "/muster.v1.TokenService/Join"
enum { TOKEN_SIZE = 256, CALL_MS = 10000, PAUSE_LEAST_MS = 100, PAUSE_MOST_MS = 2000, REPLY_BYTES_MAX = 64 << 10 };

/* ---- the token ---- */

static enum mu_status read_token_file(const char *path, char out[TOKEN_SIZE], struct mu_error *err)
{
    struct stat facts;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return mu_fail_errno(err, errno, "cannot read the join token in '%s'", path);
    bool is_open_to_others = fstat(fd, &facts) != 0 || (facts.st_mode & (S_IRWXG | S_IRWXO) & ~(mode_t)S_IRGRP);
    ssize_t got = is_open_to_others ? 0 : read(fd, out, TOKEN_SIZE - 1);
    int reason = errno;
    close(fd);
    if (is_open_to_others)
        return mu_fail(err, MU_ERR_DENIED, "others may read the join token in '%s': chmod 600 it", path);
    if (got < 0)
        return mu_fail_errno(err, reason, "cannot read the join token in '%s'", path);
    out[got] = 0;
    return MU_OK;
}

/* "" when there is none. The environment is not passed on. */
static enum mu_status read_token(const struct mu_join_config *config, char out[TOKEN_SIZE], struct mu_error *err)
{
    const char *given = getenv("MUSTER_JOIN_TOKEN");
    out[0] = 0;
    enum mu_status status = config->token_file ? read_token_file(config->token_file, out, err) : MU_OK;
    if (!config->token_file && given)
        snprintf(out, TOKEN_SIZE, "%s", given);
    unsetenv("MUSTER_JOIN_TOKEN");
    out[strcspn(out, " \t\r\n")] = 0;
    return status;
}

/* ---- what is there already ---- */

static bool has_certificate(const struct mu_rpc_tls_files *tls)
{
    struct mu_certificate_pair pair = {0};
    struct mu_error ignored;
    bool is_good = tls->cert && tls->key && mu_certificate_read_pair(tls->cert, tls->key, &pair, &ignored) == MU_OK &&
                   X509_cmp_current_time(X509_get0_notAfter(pair.cert)) > 0;
    mu_certificate_pair_free(&pair);
    return is_good;
}

/* The host's name as one of a worker: the first label, what is not allowed replaced. */
static void name_of_host(char out[MU_WORKER_NAME_SIZE])
{
    char host[MU_WORKER_NAME_SIZE] = "";
    if (gethostname(host, sizeof host - 1) != 0)
        host[0] = 0;
    host[strcspn(host, ".")] = 0;
    for (char *c = host; *c; c++) {
        if (*c >= 'A' && *c <= 'Z')
            *c = (char)(*c - 'A' + 'a');
        if (!strchr("abcdefghijklmnopqrstuvwxyz0123456789_-", *c))
            *c = '-';
    }
    snprintf(out, MU_WORKER_NAME_SIZE, "%s", mu_wire_name_ok(host, sizeof host) ? host : "worker");
}

/* ---- the call ---- */

static enum mu_status pack(struct mu_wire_arena *arena, char *token, char *name, uint8_t *der, size_t der_bytes,
                           struct mu_rpc_bytes **ret_request, struct mu_error *err)
{
    Muster__V1__JoinRequest request = MUSTER__V1__JOIN_REQUEST__INIT;
    const void *data;
    size_t size_bytes;
    request.token = token;
    request.worker = name;
    request.certificate_request = (ProtobufCBinaryData){.len = der_bytes, .data = der};
    enum mu_status status = mu_wire_pack(arena, &request.base, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, err);
    if (status == MU_OK)
        *ret_request = mu_rpc_bytes_copy(data, size_bytes);
    return status;
}

/* Asks until a coordinator answers. */
static enum mu_status ask(const struct mu_join_config *config, struct mu_rpc_client *client,
                          struct mu_rpc_bytes *request, struct mu_rpc_bytes **ret_reply, struct mu_error *err)
{
    uint64_t began_us = mu_clock_mono_us();
    bool is_told = false;
    for (unsigned pause_ms = PAUSE_LEAST_MS;; pause_ms = pause_ms < PAUSE_MOST_MS / 2 ? 2 * pause_ms : PAUSE_MOST_MS) {
        enum mu_status status = mu_rpc_client_call(client, JOIN_METHOD, request, CALL_MS, err, ret_reply);
        bool is_away = status == MU_ERR_UNAVAILABLE || status == MU_ERR_TIMEOUT;
        uint64_t spent_ms = (mu_clock_mono_us() - began_us) / 1000;
        if (!is_away || (config->give_up_ms > 0 && spent_ms >= config->give_up_ms))
            return status;
        if (!is_told)
            MU_LOGW("cannot join yet: %s", err->text);
        is_told = true;
        nanosleep(&(struct timespec){.tv_sec = pause_ms / 1000, .tv_nsec = pause_ms % 1000 * 1000000l}, NULL);
    }
}

/* The certificate in the answer must be for our key. */
static enum mu_status take(const struct mu_join_config *config, struct mu_wire_arena *arena, struct mu_rpc_bytes *reply,
                           EVP_PKEY *key, struct mu_error *err)
{
    const ProtobufCMessage *base;
    enum mu_status status = mu_wire_unpack(arena, &muster__v1__join_response__descriptor, mu_rpc_bytes_data(reply),
                                           mu_rpc_bytes_size(reply), REPLY_BYTES_MAX, &base, err);
    if (status)
        return status;
    const Muster__V1__JoinResponse *response = (const Muster__V1__JoinResponse *)base;
    struct mu_certificate_pair pair = {
        mu_certificate_from_pem((const char *)response->certificate.data, response->certificate.len), key};
    if (!pair.cert || X509_check_private_key(pair.cert, key) != 1)
        status = mu_fail(err, MU_ERR_INVALID, "the coordinator's answer holds no certificate for our key");
    else
        status = mu_certificate_write_pair(config->tls.cert, config->tls.key, &pair, err);
    X509_free(pair.cert);
    if (status == MU_OK)
        MU_LOGI("joined: the certificate of %s is in '%s'", response->identity, config->tls.cert);
    return status;
}

static enum mu_status exchange(const struct mu_join_config *config, struct mu_rpc_client *client, char *token,
                               struct mu_error *err)
{
    char name[MU_WORKER_NAME_SIZE];
    EVP_PKEY *key = mu_certificate_new_key();
    uint8_t *der = NULL;
    size_t der_bytes;
    struct mu_rpc_bytes *request = NULL, *reply = NULL;
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    name_of_host(name);
    if (config->name)
        snprintf(name, sizeof name, "%s", config->name);
    enum mu_status status = mu_certificate_ask(key, &der, &der_bytes, err);
    if (status == MU_OK)
        status = pack(&arena, token, name, der, der_bytes, &request, err);
    if (status == MU_OK)
        status = ask(config, client, request, &reply, err);
    if (status == MU_OK)
        status = take(config, &arena, reply, key, err);
    mu_rpc_bytes_unref(request);
    mu_rpc_bytes_unref(reply);
    mu_wire_arena_fini(&arena);
    EVP_PKEY_free(key);
    free(der);
    return status;
}

enum mu_status mu_join(const struct mu_join_config *config, struct mu_error *err)
{
    char token[TOKEN_SIZE];
    enum mu_status status = read_token(config, token, err);
    if (status || token[0] == 0 || has_certificate(&config->tls))
        return status;
    if (!config->tls.ca || !config->tls.cert || !config->tls.key)
        return mu_fail(err, MU_ERR_INVALID,
                       "a join token needs --tls-ca, which names the coordinator's CA, and --tls-cert and --tls-key, "
                       "where the worker's own certificate is to be written");
    struct mu_rpc_pool *pool = NULL;
    struct mu_rpc_client *client = NULL;
    struct mu_rpc_client_config rpc = mu_rpc_client_config_default();
    rpc.address = config->coordinator;
    rpc.tls = config->tls;
    rpc.is_stranger = true;
    rpc.max_receive_bytes = REPLY_BYTES_MAX;
    status = mu_rpc_pool_new(1, err, &pool);
    if (status == MU_OK)
        status = mu_rpc_client_new(pool, &rpc, err, &client);
    if (status == MU_OK)
        status = exchange(config, client, token, err);
    mu_rpc_client_free(client);
    mu_rpc_pool_free(pool);
    OPENSSL_cleanse(token, sizeof token);
    return status;
}
