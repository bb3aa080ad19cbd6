#include "worker/herald.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "proto/wire_pb.h"
#include "rpc/client.h"

#define METHOD "/muster.v1.WorkerService/ReportExit"

enum { CALL_TIMEOUT_MS = 5000 };

enum stage { IDLE, TOLD, ANSWERED, ENDING };

struct mu_herald {
    struct mu_herald_config config;
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    struct mu_wire_arena arena; /* the thread's */
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t told;
    enum stage stage;
    char worker[MU_WORKER_NAME_SIZE];
    struct mu_exit_letter letter;
    struct mu_exit_answer answer;
};

static enum mu_status pack(struct mu_herald *herald, const char *worker, const struct mu_exit_letter *letter,
                           struct mu_rpc_bytes **ret_bytes, struct mu_error *err)
{
    Muster__V1__ReportExitRequest request = MUSTER__V1__REPORT_EXIT_REQUEST__INIT;
    const void *data;
    size_t size_bytes;
    request.job = (char *)(uintptr_t)herald->config.job;
    request.worker = (char *)(uintptr_t)worker;
    request.host = mu_wire_put_text(&herald->arena, herald->config.host, MU_WORKER_NAME_SIZE);
    request.text = mu_wire_put_text(&herald->arena, letter->text, sizeof letter->text);
    request.incarnation = mu_wire_put_id(&herald->arena, letter->incarnation);
    request.pid = letter->pid;
    request.signal = letter->signal;
    request.exit_code = letter->code;
    request.again = letter->again;
    enum mu_status status =
        mu_wire_pack(&herald->arena, &request.base, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, err);
    if (status == MU_OK)
        *ret_bytes = mu_rpc_bytes_copy(data, size_bytes);
    return status;
}

static enum mu_status unpack(struct mu_herald *herald, const struct mu_rpc_bytes *reply,
                             struct mu_exit_answer *ret_answer, struct mu_error *err)
{
    const ProtobufCMessage *base = NULL;
    enum mu_status status =
        mu_wire_unpack(&herald->arena, &muster__v1__report_exit_response__descriptor, mu_rpc_bytes_data(reply),
                       mu_rpc_bytes_size(reply), MU_WIRE_REPLY_BYTES_MAX, &base, err);
    if (status)
        return status;
    const Muster__V1__ReportExitResponse *response = (const Muster__V1__ReportExitResponse *)base;
    /* A verdict of a later version is no grant. */
    ret_answer->verdict = response->verdict == MUSTER__V1__EXIT_VERDICT__EXIT_VERDICT_START_AGAIN ? MU_HERALD_START
                          : response->verdict == MUSTER__V1__EXIT_VERDICT__EXIT_VERDICT_STAY_AWAY ? MU_HERALD_STAY_AWAY
                                                                                                  : MU_HERALD_ASK_AGAIN;
    ret_answer->after_ms = response->after_ms;
    mu_wire_text_clean(response->text, ret_answer->text, sizeof ret_answer->text);
    return MU_OK;
}

static struct mu_exit_answer call(struct mu_herald *herald, const char *worker, const struct mu_exit_letter *letter)
{
    struct mu_exit_answer answer = {0};
    struct mu_error err = {0};
    struct mu_rpc_bytes *bytes = NULL, *reply = NULL;
    mu_wire_arena_reset(&herald->arena);
    enum mu_status status = pack(herald, worker, letter, &bytes, &err);
    if (status == MU_OK)
        status = mu_rpc_client_call(herald->client, METHOD, bytes, CALL_TIMEOUT_MS, &err, &reply);
    if (status == MU_OK)
        status = unpack(herald, reply, &answer, &err);
    mu_rpc_bytes_unref(bytes);
    mu_rpc_bytes_unref(reply);
    answer.failed = status != MU_OK;
    if (answer.failed)
        mu_wire_text_clean(err.text, answer.text, sizeof answer.text);
    return answer;
}

static void *run(void *arg)
{
    struct mu_herald *herald = arg;
    pthread_mutex_lock(&herald->lock);
    for (;;) {
        while (herald->stage != TOLD && herald->stage != ENDING)
            pthread_cond_wait(&herald->told, &herald->lock);
        if (herald->stage == ENDING)
            break;
        pthread_mutex_unlock(&herald->lock); /* worker and letter stay as they are until the answer is there */
        struct mu_exit_answer answer = call(herald, herald->worker, &herald->letter);
        pthread_mutex_lock(&herald->lock);
        if (herald->stage == ENDING)
            break;
        herald->answer = answer;
        herald->stage = ANSWERED;
        herald->config.answered(herald->config.ctx);
    }
    pthread_mutex_unlock(&herald->lock);
    return NULL;
}

enum mu_status mu_herald_new(const struct mu_herald_config *config, struct mu_herald **ret_herald, struct mu_error *err)
{
    struct mu_herald *herald = calloc(1, sizeof *herald);
    if (!herald)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the supervisor");
    herald->config = *config;
    mu_wire_arena_init(&herald->arena);
    pthread_mutex_init(&herald->lock, NULL);
    pthread_cond_init(&herald->told, NULL);
    struct mu_rpc_client_config client = mu_rpc_client_config_default();
    client.address = config->coordinator;
    client.tls = config->tls;
    enum mu_status status = mu_rpc_pool_new(1, err, &herald->pool);
    if (status == MU_OK)
        status = mu_rpc_client_new(herald->pool, &client, err, &herald->client);
    int reason = status == MU_OK ? pthread_create(&herald->thread, NULL, run, herald) : 0;
    if (reason)
        status = mu_fail_errno(err, reason, "cannot start a thread");
    if (status != MU_OK) {
        herald->stage = ENDING; /* there is no thread to wait for */
        mu_herald_free(herald);
        return status;
    }
    *ret_herald = herald;
    return MU_OK;
}

void mu_herald_free(struct mu_herald *herald)
{
    if (!herald)
        return;
    pthread_mutex_lock(&herald->lock);
    bool has_thread = herald->stage != ENDING;
    herald->stage = ENDING;
    pthread_cond_signal(&herald->told);
    pthread_mutex_unlock(&herald->lock);
    if (has_thread)
        pthread_join(herald->thread, NULL);
    mu_rpc_client_free(herald->client);
    mu_rpc_pool_free(herald->pool);
    mu_wire_arena_fini(&herald->arena);
    pthread_cond_destroy(&herald->told);
    pthread_mutex_destroy(&herald->lock);
    free(herald);
}

void mu_herald_tell(struct mu_herald *herald, const char *worker, const struct mu_exit_letter *letter)
{
    pthread_mutex_lock(&herald->lock);
    MU_ASSERT(herald->stage == IDLE);
    snprintf(herald->worker, sizeof herald->worker, "%s", worker);
    herald->letter = *letter;
    herald->stage = TOLD;
    pthread_cond_signal(&herald->told);
    pthread_mutex_unlock(&herald->lock);
}

bool mu_herald_answer(struct mu_herald *herald, struct mu_exit_answer *ret_answer)
{
    pthread_mutex_lock(&herald->lock);
    bool answered = herald->stage == ANSWERED;
    if (answered) {
        *ret_answer = herald->answer;
        herald->stage = IDLE;
    }
    pthread_mutex_unlock(&herald->lock);
    return answered;
}
