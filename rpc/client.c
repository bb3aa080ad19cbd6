#include "rpc/client_internal.h"

#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>
#include <stdlib.h>
#include <string.h>

#include "rpc/bytes_internal.h"
#include "rpc/details.h"

struct mu_rpc_client_config mu_rpc_client_config_default(void)
{
    return (struct mu_rpc_client_config){
        .max_receive_bytes = (size_t)16 << 20,
        .max_send_queue_bytes = (size_t)8 << 20,
        .max_send_queue_messages = 1024,
        /* As long as the server's own patience with a new connection. Shorter, thousands that come at once (after a
         * restart of the coordinator) would give up before their turn and queue again behind the connections that they
         * had left: nobody would ever be served. */
        .connect_timeout_ms = 20000,
        .reconnect_ms = 100,
        .keepalive_time_ms = 10000,
        .keepalive_timeout_ms = 20000, /* likewise: a coordinator that greets thousands answers late */
    };
}

/* --- pool --- */

static void *poller_main(void *arg)
{
    struct client_poller *poller = arg;
    for (;;) {
        grpc_event event = grpc_completion_queue_next(poller->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        struct client_op *op = event.tag;
        mu_rpc_tag_fire(&op->tag);
        op->done(op, event.success != 0);
    }
}

enum mu_status mu_rpc_pool_new(unsigned pollers, struct mu_error *err, struct mu_rpc_pool **ret_pool)
{
    if (pollers < 1 || pollers > MU_RPC_CLIENT_POLLERS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "client pool: %u pollers; 1 to %d are allowed", pollers,
                       MU_RPC_CLIENT_POLLERS_MAX);
    struct mu_rpc_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return mu_fail(err, MU_ERR_NO_MEMORY, "client pool: out of memory");
    mu_rpc_runtime_acquire();
    for (unsigned i = 0; i < pollers; i++) {
        struct client_poller *poller = &pool->pollers[i];
        poller->cq = grpc_completion_queue_create_for_next(NULL);
        enum mu_status status = mu_rpc_thread_start(&poller->thread, poller_main, poller, err);
        if (status != MU_OK) {
            grpc_completion_queue_shutdown(poller->cq);
            grpc_completion_queue_destroy(poller->cq);
            mu_rpc_pool_free(pool);
            return status;
        }
        pool->poller_count++;
    }
    *ret_pool = pool;
    return MU_OK;
}

void mu_rpc_pool_free(struct mu_rpc_pool *pool)
{
    if (!pool)
        return;
    for (unsigned i = 0; i < pool->poller_count; i++)
        grpc_completion_queue_shutdown(pool->pollers[i].cq);
    for (unsigned i = 0; i < pool->poller_count; i++) {
        pthread_join(pool->pollers[i].thread, NULL);
        grpc_completion_queue_destroy(pool->pollers[i].cq);
    }
    mu_rpc_runtime_release();
    free(pool);
}

/* --- client --- */

static enum mu_status check_config(const struct mu_rpc_client_config *config, struct mu_error *err)
{
    if (config->header_count > MU_RPC_HEADERS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "client: %zu headers; at most %d are allowed", config->header_count,
                       MU_RPC_HEADERS_MAX);
    if (config->max_receive_bytes == 0 || config->max_send_queue_messages == 0 || config->connect_timeout_ms == 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "client: max_receive_bytes, max_send_queue_messages and connect_timeout_ms must be 1 or more");
    if (config->keepalive_time_ms == 0 || config->keepalive_timeout_ms == 0)
        return mu_fail(err, MU_ERR_INVALID, "client: keepalive_time_ms and keepalive_timeout_ms must be 1 or more");
    for (size_t i = 0; i < config->header_count; i++) {
        grpc_slice key = grpc_slice_from_static_string(config->headers[i].key);
        grpc_slice value = grpc_slice_from_static_string(config->headers[i].value);
        if (!grpc_header_key_is_legal(key) || !grpc_header_nonbin_value_is_legal(value))
            return mu_fail(err, MU_ERR_INVALID,
                           "client: header '%.60s' is not allowed: lower-case key, printable value",
                           config->headers[i].key);
    }
    return MU_OK;
}

static grpc_channel *create_channel(const struct mu_rpc_client_config *config, const struct mu_rpc_address *address,
                                    struct mu_rpc_tls *tls)
{
    struct mu_rpc_args args;
    mu_rpc_args_init(&args);
    mu_rpc_args_common(&args, config->max_receive_bytes);
    mu_rpc_args_keepalive(&args, config->keepalive_time_ms, config->keepalive_timeout_ms);
    /* One connection each: clients are independent of one another, and a load generator gets as many as it asks for. */
    mu_rpc_args_int(&args, GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    /* Retries are decided above. The core calls its connect timeout "min reconnect backoff". */
    mu_rpc_args_int(&args, GRPC_ARG_ENABLE_RETRIES, 0);
    mu_rpc_args_int(&args, GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, config->connect_timeout_ms);
    mu_rpc_args_int(&args, GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, config->reconnect_ms);
    mu_rpc_args_int(&args, GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, config->reconnect_ms);
    mu_rpc_args_int(&args, GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, config->reconnect_ms);
    /* A cluster's own traffic goes neither through a proxy of the environment nor by configuration found in DNS. */
    mu_rpc_args_int(&args, GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    mu_rpc_args_int(&args, GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
    char target[MU_RPC_TARGET_SIZE];
    mu_rpc_address_dial_target(address, target);
    grpc_channel_credentials *credentials = mu_rpc_channel_credentials(tls);
    grpc_channel *channel = grpc_channel_create(target, credentials, &args.args);
    grpc_channel_credentials_release(credentials);
    return channel;
}

enum mu_status mu_rpc_client_new(struct mu_rpc_pool *pool, const struct mu_rpc_client_config *config,
                                 struct mu_error *err, struct mu_rpc_client **ret_client)
{
    struct mu_rpc_address address;
    enum mu_status status = mu_rpc_address_parse(config->address, err, &address);
    if (status == MU_OK && address.kind != MU_RPC_ADDRESS_UNIX && address.port == 0)
        status = mu_fail(err, MU_ERR_INVALID, "address '%.200s': port 0 cannot be connected to", config->address);
    if (status == MU_OK)
        status = check_config(config, err);
    if (status != MU_OK)
        return status;
    struct mu_rpc_client *client = calloc(1, sizeof *client);
    if (!client)
        return mu_fail(err, MU_ERR_NO_MEMORY, "client: out of memory");
    client->config = *config;
    client->config.address = NULL;
    client->config.headers = NULL;
    if (mu_rpc_tls_wanted(&config->tls) &&
        (status = mu_rpc_tls_new(&config->tls, config->is_stranger, err, &client->tls)) != MU_OK) {
        free(client);
        return status;
    }
    pthread_mutex_init(&client->lock, NULL);
    mu_rpc_address_format(&address, client->address_text);
    client->poller = &pool->pollers[atomic_fetch_add(&pool->next_poller, 1) % pool->poller_count];
    client->address = address;
    client->channel = create_channel(config, &address, client->tls);
    client->header_count = config->header_count;
    for (size_t i = 0; i < config->header_count; i++) {
        client->headers[i].key = grpc_slice_from_copied_string(config->headers[i].key);
        client->headers[i].value = grpc_slice_from_copied_string(config->headers[i].value);
    }
    *ret_client = client;
    return MU_OK;
}

void mu_rpc_client_free(struct mu_rpc_client *client)
{
    if (!client)
        return;
    grpc_channel_destroy(client->channel);
    mu_rpc_tls_free(client->tls);
    pthread_mutex_destroy(&client->lock);
    for (size_t i = 0; i < client->header_count; i++) {
        grpc_slice_unref(client->headers[i].key);
        grpc_slice_unref(client->headers[i].value);
    }
    free(client);
}

const char *mu_rpc_client_address(const struct mu_rpc_client *client)
{
    return client->address_text;
}

/* --- parts of a call --- */

void mu_rpc_outcome_init(struct client_outcome *outcome)
{
    grpc_metadata_array_init(&outcome->initial);
    grpc_metadata_array_init(&outcome->trailing);
    outcome->code = GRPC_STATUS_UNKNOWN;
    outcome->details = grpc_empty_slice();
}

void mu_rpc_outcome_fini(struct client_outcome *outcome)
{
    grpc_metadata_array_destroy(&outcome->initial);
    grpc_metadata_array_destroy(&outcome->trailing);
    grpc_slice_unref(outcome->details);
}

enum mu_status mu_rpc_outcome_fail(const struct client_outcome *outcome, const char *address, const char *method,
                                   struct mu_error *err)
{
    char text[MU_ERROR_TEXT_SIZE];
    mu_rpc_slice_text(outcome->details, text, sizeof text);
    enum mu_status status = mu_rpc_fail(err, (enum mu_rpc_code)outcome->code, text, address, method);
    for (size_t i = 0; err && i < outcome->trailing.count; i++) {
        const grpc_metadata *pair = &outcome->trailing.metadata[i];
        if (grpc_slice_str_cmp(pair->key, MU_RPC_DETAILS_KEY) == 0)
            mu_rpc_details_decode(GRPC_SLICE_START_PTR(pair->value), GRPC_SLICE_LENGTH(pair->value), err);
    }
    return status;
}

/* Calls in progress keep the connection that they have. What cannot be read leaves the former credentials in use. */
static void refresh_tls(struct mu_rpc_client *client)
{
    struct mu_error ignored;
    bool has_changed = false;
    if (!client->tls || mu_rpc_tls_refresh(client->tls, &has_changed, &ignored) != MU_OK || !has_changed)
        return;
    grpc_channel_destroy(client->channel);
    client->channel = create_channel(&client->config, &client->address, client->tls);
}

uint64_t mu_rpc_client_certificate_end_s(struct mu_rpc_client *client)
{
    pthread_mutex_lock(&client->lock);
    refresh_tls(client);
    pthread_mutex_unlock(&client->lock);
    return client->tls ? mu_rpc_tls_end_s(client->tls) : 0;
}

grpc_call *mu_rpc_client_open(struct mu_rpc_client *client, const char *method, unsigned timeout_ms)
{
    gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    if (timeout_ms > 0)
        deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
    grpc_slice path = grpc_slice_from_copied_string(method);
    pthread_mutex_lock(&client->lock);
    refresh_tls(client);
    grpc_call *call = grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, client->poller->cq, path,
                                               NULL, deadline, NULL);
    pthread_mutex_unlock(&client->lock);
    grpc_slice_unref(path);
    return call;
}

grpc_op mu_rpc_client_op_headers(struct mu_rpc_client *client)
{
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    op.data.send_initial_metadata.count = client->header_count;
    op.data.send_initial_metadata.metadata = client->header_count > 0 ? client->headers : NULL;
    return op;
}

grpc_op mu_rpc_client_op_initial(struct client_outcome *outcome)
{
    grpc_op op = {.op = GRPC_OP_RECV_INITIAL_METADATA};
    op.data.recv_initial_metadata.recv_initial_metadata = &outcome->initial;
    return op;
}

grpc_op mu_rpc_client_op_status(struct client_outcome *outcome)
{
    grpc_op op = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    op.data.recv_status_on_client.trailing_metadata = &outcome->trailing;
    op.data.recv_status_on_client.status = &outcome->code;
    op.data.recv_status_on_client.status_details = &outcome->details;
    return op;
}

/* --- unary --- */

struct unary {
    struct client_op op; /* first: op -> unary */
    pthread_mutex_t lock;
    pthread_cond_t filled;
    bool done;
};

static void unary_done(struct client_op *op, bool ok)
{
    struct unary *unary = (struct unary *)op;
    (void)ok; /* the status says it */
    pthread_mutex_lock(&unary->lock);
    unary->done = true;
    pthread_cond_signal(&unary->filled);
    pthread_mutex_unlock(&unary->lock);
}

static void unary_wait(struct unary *unary)
{
    pthread_mutex_lock(&unary->lock);
    while (!unary->done)
        pthread_cond_wait(&unary->filled, &unary->lock);
    pthread_mutex_unlock(&unary->lock);
    pthread_cond_destroy(&unary->filled);
    pthread_mutex_destroy(&unary->lock);
}

enum mu_status mu_rpc_client_call(struct mu_rpc_client *client, const char *method, struct mu_rpc_bytes *request,
                                  unsigned timeout_ms, struct mu_error *err, struct mu_rpc_bytes **ret_reply)
{
    struct unary unary = {.op.done = unary_done, .lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER};
    struct client_outcome outcome;
    mu_rpc_outcome_init(&outcome);
    grpc_call *call = mu_rpc_client_open(client, method, timeout_ms > 0 ? timeout_ms : 1);
    grpc_byte_buffer *sending = mu_rpc_bytes_to_buffer(request), *received = NULL;
    grpc_op send = {.op = GRPC_OP_SEND_MESSAGE}, close = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
            recv = {.op = GRPC_OP_RECV_MESSAGE};
    send.data.send_message.send_message = sending;
    recv.data.recv_message.recv_message = &received;
    grpc_op ops[] = {mu_rpc_client_op_headers(client),   send, close,
                     mu_rpc_client_op_initial(&outcome), recv, mu_rpc_client_op_status(&outcome)};
    mu_rpc_start(call, ops, sizeof ops / sizeof ops[0], &unary.op.tag);
    unary_wait(&unary);

    enum mu_status status = MU_OK;
    if (outcome.code != GRPC_STATUS_OK) {
        status = mu_rpc_outcome_fail(&outcome, client->address_text, method, err);
    } else if (!received || !mu_rpc_buffer_is_plain(received)) {
        status =
            mu_fail(err, MU_ERR_INTERNAL, "%s answered %s with no message that can be read; is it a Muster server?",
                    client->address_text, method);
    } else {
        *ret_reply = mu_rpc_bytes_of_slice(mu_rpc_slice_of_buffer(received));
        received = NULL;
    }
    grpc_byte_buffer_destroy(received);
    grpc_byte_buffer_destroy(sending);
    grpc_call_unref(call);
    mu_rpc_outcome_fini(&outcome);
    return status;
}
