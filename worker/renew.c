#include "worker/renew.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/id.h"
#include "common/log.h"
#include "muster/v1/token.pb-c.h"
#include "proto/wire_pb.h"
#include "rpc/certificate.h"
#include "rpc/client.h"

#define RENEW_METHOD "/muster.v1.TokenService/Renew"
enum { CALL_MS = 5000, REPLY_BYTES_MAX = 64 << 10 };
#define LEAST_PAUSE_US UINT64_C(1000000)
#define MOST_PAUSE_US  UINT64_C(300000000)

struct mu_renewer {
    struct mu_renewer_config config;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    bool ending;
};

/* ---- when ---- */

uint64_t mu_renewer_due_us(uint64_t begin_us, uint64_t end_us, double dice)
{
    uint64_t life_us = end_us > begin_us ? end_us - begin_us : 0;
    return begin_us + life_us / 3 * 2 + (uint64_t)((double)life_us / 12 * dice);
}

uint64_t mu_renewer_pause_us(unsigned failures, uint64_t life_us, double dice)
{
    uint64_t most_us = life_us / 24 < MOST_PAUSE_US ? life_us / 24 : MOST_PAUSE_US, pause_us = LEAST_PAUSE_US;
    for (unsigned i = 1; i < failures && pause_us < most_us; i++)
        pause_us *= 2;
    if (pause_us > most_us)
        pause_us = most_us > LEAST_PAUSE_US ? most_us : LEAST_PAUSE_US;
    return pause_us / 2 + (uint64_t)((double)pause_us / 2 * dice);
}

static double roll(void)
{
    return (double)(mu_id_random().low >> 11) * 0x1p-53;
}

/* ---- asking ---- */

static enum mu_status call(const struct mu_renewer_config *config, struct mu_rpc_bytes *request,
                           struct mu_rpc_bytes **ret_reply, struct mu_error *err)
{
    struct mu_rpc_pool *pool = NULL;
    struct mu_rpc_client *client = NULL;
    struct mu_rpc_client_config rpc = mu_rpc_client_config_default();
    rpc.address = config->coordinator;
    rpc.tls = config->tls;
    rpc.max_receive_bytes = REPLY_BYTES_MAX;
    enum mu_status status = mu_rpc_pool_new(1, err, &pool);
    if (status == MU_OK)
        status = mu_rpc_client_new(pool, &rpc, err, &client);
    if (status == MU_OK)
        status = mu_rpc_client_call(client, RENEW_METHOD, request, CALL_MS, err, ret_reply);
    mu_rpc_client_free(client);
    mu_rpc_pool_free(pool);
    return status;
}

static enum mu_status pack(struct mu_wire_arena *arena, EVP_PKEY *key, struct mu_rpc_bytes **ret_bytes,
                           struct mu_error *err)
{
    Muster__V1__RenewRequest request = MUSTER__V1__RENEW_REQUEST__INIT;
    const void *data;
    size_t size_bytes;
    enum mu_status status =
        mu_certificate_ask(key, &request.certificate_request.data, &request.certificate_request.len, err);
    if (status == MU_OK)
        status = mu_wire_pack(arena, &request.base, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, err);
    if (status == MU_OK)
        *ret_bytes = mu_rpc_bytes_copy(data, size_bytes);
    free(request.certificate_request.data);
    return status;
}

/* The certificate in the answer must be for our key. */
static enum mu_status take(const struct mu_renewer_config *config, struct mu_wire_arena *arena,
                           const struct mu_rpc_bytes *reply, EVP_PKEY *key, struct mu_error *err)
{
    const ProtobufCMessage *base;
    enum mu_status status = mu_wire_unpack(arena, &muster__v1__renew_response__descriptor, mu_rpc_bytes_data(reply),
                                           mu_rpc_bytes_size(reply), REPLY_BYTES_MAX, &base, err);
    if (status)
        return status;
    const ProtobufCBinaryData *pem = &((const Muster__V1__RenewResponse *)base)->certificate;
    X509 *cert = mu_certificate_from_pem((const char *)pem->data, pem->len);
    if (cert && X509_check_private_key(cert, key) == 1)
        status = mu_certificate_write(config->tls.cert, cert, err);
    else
        status = mu_fail(err, MU_ERR_INVALID, "the coordinator's answer holds no certificate for our key");
    X509_free(cert);
    return status;
}

static enum mu_status renew(const struct mu_renewer_config *config, EVP_PKEY *key, struct mu_error *err)
{
    struct mu_rpc_bytes *request = NULL, *reply = NULL;
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    enum mu_status status = pack(&arena, key, &request, err);
    if (status == MU_OK)
        status = call(config, request, &reply, err);
    if (status == MU_OK)
        status = take(config, &arena, reply, key, err);
    mu_rpc_bytes_unref(request);
    mu_rpc_bytes_unref(reply);
    mu_wire_arena_fini(&arena);
    return status;
}

/* ---- the thread ---- */

/* By the wall clock, which certificates go by; also when that is set meanwhile. False: it is time to end. */
static bool wait_until(struct mu_renewer *renewer, uint64_t wall_us)
{
    const struct timespec until = {.tv_sec = (time_t)(wall_us / 1000000), .tv_nsec = (long)(wall_us % 1000000) * 1000};
    pthread_mutex_lock(&renewer->lock);
    while (!renewer->ending && pthread_cond_timedwait(&renewer->changed, &renewer->lock, &until) != ETIMEDOUT)
        ;
    bool goes_on = !renewer->ending;
    pthread_mutex_unlock(&renewer->lock);
    return goes_on;
}

/* What somebody else has put there, a sibling or an operator, counts. */
static enum mu_status look(const struct mu_renewer *renewer, struct mu_certificate_pair *ret_pair,
                           uint64_t *ret_begin_us, uint64_t *ret_end_us, struct mu_error *err)
{
    const struct mu_rpc_tls_files *tls = &renewer->config.tls;
    int64_t begin_s, end_s;
    enum mu_status status = mu_certificate_read_pair(tls->cert, tls->key, ret_pair, err);
    if (status)
        return status;
    mu_certificate_span(ret_pair->cert, &begin_s, &end_s);
    *ret_begin_us = (uint64_t)begin_s * 1000000;
    *ret_end_us = (uint64_t)end_s * 1000000;
    return MU_OK;
}

static void tell_trouble(const struct mu_renewer *renewer, const struct mu_error *err, uint64_t end_us)
{
    uint64_t now_us = mu_clock_wall_us();
    if (end_us > now_us)
        MU_LOGW("the certificate in '%s', good for %llu more seconds, cannot be renewed: %s; tried again",
                renewer->config.tls.cert, (unsigned long long)((end_us - now_us) / 1000000), err->text);
    else
        MU_LOGE("the certificate in '%s' could not be renewed in time: %s; what is connected stays so, but join with a "
                "new token before that breaks",
                renewer->config.tls.cert, err->text);
}

/* One look, one try if it is time. Returns when to come again. */
static uint64_t turn(struct mu_renewer *renewer, double dice, unsigned *failures, struct mu_error *told)
{
    struct mu_certificate_pair pair = {0};
    struct mu_error err = {0};
    uint64_t begin_us = 0, end_us = 0, due_us = 0;
    enum mu_status status = look(renewer, &pair, &begin_us, &end_us, &err);
    if (status == MU_OK && (due_us = mu_renewer_due_us(begin_us, end_us, dice)) <= mu_clock_wall_us()) {
        status = renew(&renewer->config, pair.key, &err);
        due_us = mu_clock_wall_us() + (end_us - begin_us) / 3; /* not at once, although our clock may be ahead */
        if (status == MU_OK)
            MU_LOGI("the certificate in '%s' was renewed", renewer->config.tls.cert);
    }
    mu_certificate_pair_free(&pair);
    if (status == MU_OK) {
        *failures = 0;
        told->text[0] = 0;
        return due_us;
    }
    if (strcmp(told->text, err.text) != 0) /* each reason once in a row */
        tell_trouble(renewer, &err, end_us);
    *told = err;
    return mu_clock_wall_us() + mu_renewer_pause_us(++*failures, end_us - begin_us, roll());
}

static void *run(void *arg)
{
    struct mu_renewer *renewer = arg;
    struct mu_error told = {0};
    unsigned failures = 0;
    double dice = roll();
    pthread_setname_np(pthread_self(), "renewer");
    while (wait_until(renewer, turn(renewer, dice, &failures, &told)))
        ;
    return NULL;
}

/* ---- life ---- */

enum mu_status mu_renewer_new(const struct mu_renewer_config *config, struct mu_renewer **ret_renewer,
                              struct mu_error *err)
{
    struct mu_certificate_pair pair = {0};
    struct mu_error ignored; /* the client tells it better */
    bool is_ours = config->tls.cert && config->tls.key &&
                   mu_certificate_read_pair(config->tls.cert, config->tls.key, &pair, &ignored) == MU_OK &&
                   mu_certificate_is_renewable(pair.cert);
    mu_certificate_pair_free(&pair);
    *ret_renewer = NULL;
    if (!is_ours)
        return MU_OK;
    struct mu_renewer *renewer = calloc(1, sizeof *renewer);
    if (!renewer)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the renewal of the certificate");
    renewer->config = *config;
    pthread_mutex_init(&renewer->lock, NULL);
    pthread_cond_init(&renewer->changed, NULL);
    int reason = pthread_create(&renewer->thread, NULL, run, renewer);
    if (reason) {
        free(renewer);
        return mu_fail_errno(err, reason, "cannot start a thread");
    }
    *ret_renewer = renewer;
    return MU_OK;
}

void mu_renewer_free(struct mu_renewer *renewer)
{
    if (!renewer)
        return;
    pthread_mutex_lock(&renewer->lock);
    renewer->ending = true;
    pthread_cond_signal(&renewer->changed);
    pthread_mutex_unlock(&renewer->lock);
    pthread_join(renewer->thread, NULL);
    pthread_cond_destroy(&renewer->changed);
    pthread_mutex_destroy(&renewer->lock);
    free(renewer);
}
