#include "rpc/server_internal.h"

#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"

enum {
    ARMED_PER_METHOD = 16, /* calls that the core may hand over before the core thread has looked at the first */
    POLLER_BATCH = 64,     /* completed operations handed over at once */
    HANDSHAKE_TIMEOUT_MS =
        20000, /* a connection that does not say what it is; a thousand at once take a while on a busy machine */
    URGENT_RUN_MAX = 64, /* operations of PRIORITY calls in a row, while others wait */
};

struct mu_rpc_server_config mu_rpc_server_config_default(void)
{
    return (struct mu_rpc_server_config){
        .pollers = 1,
        .max_receive_bytes = (size_t)4 << 20,
        .max_memory_bytes = (size_t)1 << 30,
        .max_metadata_bytes = (size_t)16 << 10,
        .max_streams_per_connection = 256,
        .max_calls = 4096,
        .max_priority_calls = 32768,
        .max_send_queue_bytes = (size_t)8 << 20,
        .max_send_queue_messages = 1024,
        .max_ordinary_queue_bytes = (size_t)64 << 10,
        .max_ordinary_queue_messages = 64,
        .max_untaken_bytes = (size_t)128 << 20,
        .max_owed_bytes = (size_t)256 << 10,
        .max_owed_bytes_in_all = (size_t)128 << 20,
        .keepalive_time_s = 30,
        .keepalive_timeout_s = 10,
        .min_client_ping_ms = 5000,
        .max_connection_idle_ms = 600000,
        .linger_ms = 10000,
    };
}

/* --- pollers --- */

/* Also that a call with a request has come: until it is looked at, which is quick, it waits in the core, and any number
 * of others behind it. Its own turn comes later. */
static bool is_urgent(const struct rpc_op *op)
{
    const struct rpc_method *method = op->call ? op->call->method : NULL;
    return method &&
           (method->class == MU_RPC_PRIORITY || (op->kind == OP_ACCEPT && method->kind != MU_RPC_BIDI_STREAM));
}

/* Blocks for the first operation, then takes what else is ready without waiting, so that one hand-over (and at most one
 * wake-up of the core thread) serves them all. */
static void *poller_main(void *arg)
{
    struct rpc_poller *poller = arg;
    struct mu_rpc_list urgent, done;
    mu_rpc_list_init(&urgent);
    mu_rpc_list_init(&done);
    for (;;) {
        grpc_event event = grpc_completion_queue_next(poller->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        for (int count = 1; event.type == GRPC_OP_COMPLETE; count++) {
            struct rpc_op *op = event.tag;
            mu_rpc_tag_fire(&op->tag);
            op->ok = event.success != 0;
            mu_rpc_list_push(is_urgent(op) ? &urgent : &done, &op->node);
            if (count == POLLER_BATCH)
                break;
            event = grpc_completion_queue_next(poller->cq, gpr_inf_past(GPR_CLOCK_MONOTONIC), NULL);
        }
        mu_rpc_inbox_done(&poller->server->inbox, &urgent, &done);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
    }
}

/* --- accepting --- */

void mu_rpc_server_arm(struct mu_rpc_server *server, const struct rpc_method *method, struct rpc_poller *poller)
{
    struct mu_rpc_call *call = mu_rpc_call_new(server, method, poller);
    call->pending_count++;
    mu_rpc_tag_arm(&call->accept.tag);
    grpc_call_error error;
    if (method) {
        error = grpc_server_request_registered_call(server->grpc, method->registered, &call->grpc, &call->deadline,
                                                    &call->headers, NULL, poller->cq, poller->cq, &call->accept.tag);
    } else {
        error = grpc_server_request_call(server->grpc, &call->grpc, &call->details, &call->headers, poller->cq,
                                         poller->cq, &call->accept.tag);
    }
    MU_ASSERT(error == GRPC_CALL_OK);
}

static void arm_all(struct mu_rpc_server *server)
{
    for (unsigned p = 0; p < server->config.pollers; p++) {
        for (int i = 0; i < ARMED_PER_METHOD; i++) {
            for (size_t m = 0; m < server->method_count; m++)
                mu_rpc_server_arm(server, &server->methods[m], &server->pollers[p]);
            mu_rpc_server_arm(server, NULL, &server->pollers[p]);
        }
    }
}

/* --- making --- */

static enum mu_status check_config(const struct mu_rpc_server_config *config, struct mu_error *err)
{
    if (config->pollers < 1 || config->pollers > MU_RPC_POLLERS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "server: pollers is %u; 1 to %d are allowed", config->pollers,
                       MU_RPC_POLLERS_MAX);
    if (config->method_count > MU_RPC_METHODS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "server: %zu methods; at most %d are allowed", config->method_count,
                       MU_RPC_METHODS_MAX);
    if (config->max_receive_bytes == 0 || config->max_send_queue_messages == 0 ||
        config->max_ordinary_queue_messages == 0 || config->max_streams_per_connection == 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "server: max_receive_bytes, max_send_queue_messages, max_ordinary_queue_messages and "
                       "max_streams_per_connection must be 1 or more");
    if (config->max_memory_bytes < config->max_receive_bytes)
        return mu_fail(err, MU_ERR_INVALID,
                       "server: max_memory_bytes (%zu) must not be less than max_receive_bytes (%zu)",
                       config->max_memory_bytes, config->max_receive_bytes);
    if (config->keepalive_time_s == 0 || config->keepalive_timeout_s == 0)
        return mu_fail(err, MU_ERR_INVALID, "server: keepalive_time_s and keepalive_timeout_s must be 1 or more");
    return MU_OK;
}

/* The core looks at max_receive_bytes only when it has the whole message (1.51): a peer that announces 2 GiB and sends
 * them makes it buffer them all. The quota bounds that: over it, the core resets streams until there is room. */
static grpc_server *create_with_quota(struct mu_rpc_args *args, size_t max_memory_bytes)
{
    grpc_resource_quota *quota = grpc_resource_quota_create("muster-server");
    grpc_resource_quota_resize(quota, max_memory_bytes);
    mu_rpc_args_pointer(args, GRPC_ARG_RESOURCE_QUOTA, quota, grpc_resource_quota_arg_vtable());
    grpc_server *server = grpc_server_create(&args->args, NULL); /* takes its own reference */
    grpc_resource_quota_unref(quota);
    return server;
}

static grpc_server *create_grpc(const struct mu_rpc_server_config *config)
{
    struct mu_rpc_args args;
    mu_rpc_args_init(&args);
    mu_rpc_args_common(&args, config->max_receive_bytes);
    mu_rpc_args_keepalive(&args, INT_MAX, INT_MAX); /* the kernel does that, and for nothing: see gate.h */
    mu_rpc_args_int(&args, GRPC_ARG_ALLOW_REUSEPORT, 0);
    mu_rpc_args_int(&args, GRPC_ARG_MAX_METADATA_SIZE, config->max_metadata_bytes);
    mu_rpc_args_int(&args, GRPC_ARG_MAX_CONCURRENT_STREAMS, config->max_streams_per_connection);
    mu_rpc_args_int(&args, GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, config->min_client_ping_ms);
    mu_rpc_args_int(&args, GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, HANDSHAKE_TIMEOUT_MS);
    if (config->max_connection_idle_ms > 0)
        mu_rpc_args_int(&args, GRPC_ARG_MAX_CONNECTION_IDLE_MS, config->max_connection_idle_ms);
    return create_with_quota(&args, config->max_memory_bytes);
}

static enum mu_status register_methods(struct mu_rpc_server *server, struct mu_error *err)
{
    const struct mu_rpc_server_config *config = &server->config;
    server->methods = calloc(config->method_count + 1, sizeof *server->methods);
    MU_ASSERT(server->methods);
    for (size_t i = 0; i < config->method_count; i++) {
        const struct mu_rpc_method *from = &config->methods[i];
        struct rpc_method *method = &server->methods[i];
        *method =
            (struct rpc_method){.path = strdup(from->path), .kind = from->kind, .id = from->id, .class = from->class};
        server->method_count++;
        /* Not by READ_INITIAL_BYTE_BUFFER: calls whose request has not come would be known to the core alone, which
         * keeps any number of them, for ever. */
        method->registered = grpc_server_register_method(server->grpc, method->path, NULL, GRPC_SRM_PAYLOAD_NONE, 0);
        if (!method->registered)
            return mu_fail(err, MU_ERR_INVALID, "server: method %s is listed twice", from->path);
    }
    server->config.methods = NULL; /* the caller's table need not live on */
    return MU_OK;
}

static enum mu_status bind_port(struct mu_rpc_server *server, struct mu_error *err)
{
    enum mu_status status = mu_rpc_address_check_free(&server->address, err);
    if (status != MU_OK)
        return status;
    char target[MU_RPC_TARGET_SIZE];
    mu_rpc_address_format(&server->address, target);
    grpc_server_credentials *credentials = mu_rpc_server_credentials(server->tls, server->config.takes_strangers);
    int port = grpc_server_add_http2_port(server->grpc, target, credentials);
    grpc_server_credentials_release(credentials);
    if (port == 0)
        return mu_rpc_address_explain(&server->address, err);
    if (server->address.kind != MU_RPC_ADDRESS_UNIX)
        server->address.port = (uint16_t)port;
    mu_rpc_address_format(&server->address, server->address_text);
    status = mu_rpc_gate_open(&server->address, &server->config, &server->gate, err);
    if (status == MU_OK)
        server->guests = mu_rpc_gate_guests(server->gate);
    return status;
}

static enum mu_status start_pollers(struct mu_rpc_server *server, struct mu_error *err)
{
    for (unsigned i = 0; i < server->config.pollers; i++) {
        enum mu_status status = mu_rpc_thread_start(&server->pollers[i].thread, poller_main, &server->pollers[i], err);
        if (status != MU_OK)
            return status;
        server->poller_count++;
    }
    return MU_OK;
}

enum mu_status mu_rpc_server_new(const struct mu_rpc_server_config *config, struct mu_error *err,
                                 struct mu_rpc_server **ret_server)
{
    struct mu_rpc_address address;
    enum mu_status status = mu_rpc_address_parse(config->listen, err, &address);
    if (status == MU_OK)
        status = check_config(config, err);
    if (status != MU_OK)
        return status;
    struct mu_rpc_server *server = calloc(1, sizeof *server);
    if (!server)
        return mu_fail(err, MU_ERR_NO_MEMORY, "server: out of memory");
    server->config = *config;
    server->config.listen = NULL;
    if (mu_rpc_tls_wanted(&config->tls) && (status = mu_rpc_tls_new(&config->tls, false, err, &server->tls)) != MU_OK) {
        free(server);
        return status;
    }
    server->address = address;
    server->shutdown.kind = OP_SHUTDOWN;
    server->payload = grpc_empty_slice();
    server->open_mark.key = grpc_slice_from_static_string(MU_RPC_OPEN_MARK);
    server->open_mark.value = grpc_slice_from_static_string("1");
    mu_rpc_inbox_init(&server->inbox);
    mu_rpc_batch_init(&server->batch);
    server->peers = mu_rpc_peers_new(config->max_calls_per_peer, config->max_questions_per_second);
    MU_ASSERT(server->peers);

    mu_rpc_runtime_acquire();
    server->grpc = create_grpc(config);
    for (unsigned i = 0; i < config->pollers; i++) {
        server->pollers[i].server = server;
        server->pollers[i].cq = grpc_completion_queue_create_for_next(NULL);
        grpc_server_register_completion_queue(server->grpc, server->pollers[i].cq, NULL);
    }
    /* The port last: a core server with a listener can only be taken down through an orderly shutdown. */
    status = register_methods(server, err);
    if (status == MU_OK)
        status = start_pollers(server, err);
    if (status == MU_OK)
        status = bind_port(server, err);
    if (status != MU_OK) {
        mu_rpc_server_free(server);
        return status;
    }
    grpc_server_start(server->grpc);
    server->started = true;
    arm_all(server);
    *ret_server = server;
    return MU_OK;
}

uint16_t mu_rpc_server_port(const struct mu_rpc_server *server)
{
    return server->address.port;
}

const char *mu_rpc_server_address(const struct mu_rpc_server *server)
{
    return server->address_text;
}

struct mu_rpc_refusals mu_rpc_server_refusals(struct mu_rpc_server *server)
{
    struct mu_rpc_refusals refusals = server->refusals;
    mu_rpc_gate_refusals(server->gate, &refusals);
    return refusals;
}

size_t mu_rpc_server_call_count(const struct mu_rpc_server *server)
{
    return server->ordinary_count + server->priority_count + server->untaken_count;
}

/* --- calls whose peer does not send the request, or take the rest: one list, since all wait equally long --- */

void mu_rpc_server_linger(struct mu_rpc_call *call)
{
    struct mu_rpc_server *server = call->server;
    call->linger_until_us = mu_clock_mono_us() + (uint64_t)server->config.linger_ms * 1000u;
    call->linger_prev = server->linger_last;
    if (server->linger_last)
        server->linger_last->linger_next = call;
    else
        server->linger_first = call;
    server->linger_last = call;
    server->linger_count++;
    server->linger_bytes += call->reply_bytes;
}

void mu_rpc_server_unlinger(struct mu_rpc_call *call)
{
    struct mu_rpc_server *server = call->server;
    if (call->linger_until_us == 0)
        return;
    call->linger_until_us = 0;
    server->linger_count--;
    server->linger_bytes -= call->reply_bytes;
    if (call->linger_prev)
        call->linger_prev->linger_next = call->linger_next;
    else
        server->linger_first = call->linger_next;
    if (call->linger_next)
        call->linger_next->linger_prev = call->linger_prev;
    else
        server->linger_last = call->linger_prev;
    call->linger_prev = call->linger_next = NULL;
}

static bool are_too_many(const struct mu_rpc_server *server)
{
    return server->linger_count > server->config.max_calls || server->linger_bytes > server->config.max_untaken_bytes;
}

static void cut_off_lingerers(struct mu_rpc_server *server)
{
    struct mu_rpc_call *call = server->linger_first;
    if (!call)
        return;
    uint64_t now_us = mu_clock_mono_us();
    while ((call = server->linger_first) && (call->linger_until_us <= now_us || are_too_many(server))) {
        bool is_late = call->linger_until_us <= now_us;
        server->refusals.answers_untaken += call->ended && !is_late;
        server->refusals.requests_awaited += call->awaits_request;
        mu_rpc_server_unlinger(call);
        call->cut_off = true;
        if (call->ended)
            grpc_call_cancel_with_status(call->grpc, GRPC_STATUS_UNAVAILABLE, "the peer took too long to read", NULL);
        else
            grpc_call_cancel_with_status(call->grpc,
                                         is_late ? GRPC_STATUS_DEADLINE_EXCEEDED : GRPC_STATUS_RESOURCE_EXHAUSTED,
                                         is_late ? "the request, or its turn, took too long to come"
                                                 : "too many calls wait for their turn; try again later",
                                         NULL);
    }
}

enum mu_status mu_rpc_server_refresh_tls(struct mu_rpc_server *server, bool *ret_changed, struct mu_error *err)
{
    *ret_changed = false;
    return server->tls ? mu_rpc_tls_refresh(server->tls, ret_changed, err) : MU_OK;
}

struct mu_rpc_counts *mu_rpc_server_counts(const struct mu_rpc_call *call)
{
    return &call->server->methods[call->method - call->server->methods].counts;
}

bool mu_rpc_server_method(const struct mu_rpc_server *server, size_t index, const char **ret_path,
                          enum mu_rpc_kind *ret_kind, const struct mu_rpc_counts **ret_counts)
{
    if (index >= server->method_count)
        return false;
    *ret_path = server->methods[index].path;
    *ret_kind = server->methods[index].kind;
    *ret_counts = &server->methods[index].counts;
    return true;
}

uint64_t mu_rpc_server_certificate_end_s(const struct mu_rpc_server *server)
{
    return server->tls ? mu_rpc_tls_end_s(server->tls) : 0;
}

size_t mu_rpc_server_cut(struct mu_rpc_server *server, bool (*is_cut)(void *ctx, const char *identity), void *ctx,
                         const char *text)
{
    size_t count = 0;
    for (struct mu_rpc_call *call = server->calls; call; call = call->next) {
        if (!call->accepted || call->over || !is_cut(ctx, mu_rpc_call_identity(call)))
            continue;
        grpc_call_cancel_with_status(call->grpc, GRPC_STATUS_PERMISSION_DENIED, text, NULL);
        count++;
    }
    return count;
}

/* --- the turn of the core thread --- */

static bool step_op(struct mu_rpc_server *server, struct rpc_op *op, struct mu_rpc_event *ret_event)
{
    if (op->kind != OP_SHUTDOWN)
        return mu_rpc_call_step(op->call, op, ret_event);
    server->shut_down = true;
    return false;
}

/* Urgent ones first, also those that came since the batch was taken; but a stream of them does not keep the rest out
 * for ever. NULL: none waits. */
static struct mu_rpc_item *pop_done(struct mu_rpc_server *server)
{
    struct mu_rpc_batch *batch = &server->batch;
    if (!batch->urgent.first && atomic_load(&server->inbox.has_urgent))
        mu_rpc_inbox_take(&server->inbox, 0, batch);
    bool others_wait = batch->done.first || batch->posted.first;
    if (batch->urgent.first && (server->urgent_run < URGENT_RUN_MAX || !others_wait)) {
        server->urgent_run++;
        return mu_rpc_list_pop(&batch->urgent);
    }
    server->urgent_run = 0;
    return batch->posted.first ? NULL : mu_rpc_list_pop(&batch->done);
}

/* The next event of what was taken already; false when the batch is used up. */
static bool next_of_batch(struct mu_rpc_server *server, struct mu_rpc_event *ret_event)
{
    struct mu_rpc_item *item;
    while ((item = pop_done(server)) != NULL) {
        struct rpc_op *op = (struct rpc_op *)((char *)item - offsetof(struct rpc_op, node));
        if (step_op(server, op, ret_event))
            return true;
    }
    item = mu_rpc_list_pop(&server->batch.posted);
    if (item) {
        *ret_event = (struct mu_rpc_event){.type = MU_RPC_EVENT_ITEM, .item = item};
        return true;
    }
    if (server->batch.wake) {
        server->batch.wake = false;
        *ret_event = (struct mu_rpc_event){.type = MU_RPC_EVENT_WAKE};
        return true;
    }
    if (server->shut_down && !server->drained_told && mu_rpc_server_call_count(server) == 0) {
        server->drained_told = true;
        *ret_event = (struct mu_rpc_event){.type = MU_RPC_EVENT_DRAINED};
        return true;
    }
    return false;
}

static void drop_payload(struct mu_rpc_server *server)
{
    grpc_slice_unref(server->payload);
    server->payload = grpc_empty_slice();
}

bool mu_rpc_server_next(struct mu_rpc_server *server, uint64_t until_us, struct mu_rpc_event *ret_event)
{
    drop_payload(server);
    for (;;) {
        cut_off_lingerers(server); /* also while there is no end of work */
        if (next_of_batch(server, ret_event))
            return true;
        uint64_t wait_us = until_us;
        if (server->linger_first && server->linger_first->linger_until_us < wait_us)
            wait_us = server->linger_first->linger_until_us;
        if (!mu_rpc_inbox_take(&server->inbox, wait_us, &server->batch) && wait_us == until_us)
            return false;
    }
}

void mu_rpc_server_post(struct mu_rpc_server *server, struct mu_rpc_item *item)
{
    mu_rpc_inbox_post(&server->inbox, item);
}

void mu_rpc_server_wake(struct mu_rpc_server *server)
{
    mu_rpc_inbox_wake(&server->inbox);
}

/* --- the end --- */

void mu_rpc_server_drain(struct mu_rpc_server *server)
{
    MU_ASSERT(!server->draining);
    server->draining = true;
    mu_rpc_tag_arm(&server->shutdown.tag);
    grpc_server_shutdown_and_notify(server->grpc, server->pollers[0].cq, &server->shutdown.tag);
}

static void end_all_calls(struct mu_rpc_server *server)
{
    struct mu_rpc_event ignored;
    server->freeing = true;
    drop_payload(server);
    if (!server->draining)
        mu_rpc_server_drain(server);
    grpc_server_cancel_all_calls(server->grpc);
    for (struct mu_rpc_call *call = server->calls, *next; call; call = next) {
        next = call->next;
        mu_rpc_call_abandon(call);
    }
    while (!server->shut_down || server->object_count > 0) {
        while (next_of_batch(server, &ignored))
            drop_payload(server);
        if (!server->shut_down || server->object_count > 0)
            mu_rpc_inbox_take(&server->inbox, UINT64_MAX, &server->batch);
    }
}

void mu_rpc_server_free(struct mu_rpc_server *server)
{
    if (!server)
        return;
    if (server->started)
        end_all_calls(server);
    grpc_server_destroy(server->grpc);
    for (unsigned i = 0; i < server->config.pollers; i++)
        grpc_completion_queue_shutdown(server->pollers[i].cq);
    for (unsigned i = 0; i < server->poller_count; i++)
        pthread_join(server->pollers[i].thread, NULL);
    for (unsigned i = 0; i < server->config.pollers; i++)
        grpc_completion_queue_destroy(server->pollers[i].cq);
    mu_rpc_runtime_release();
    mu_rpc_gate_close(server->gate);
    mu_rpc_peers_free(server->peers);
    mu_rpc_tls_free(server->tls);
    for (size_t i = 0; i < server->method_count; i++)
        free(server->methods[i].path);
    free(server->methods);
    mu_rpc_inbox_fini(&server->inbox);
    free(server);
}
