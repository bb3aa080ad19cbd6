/* One call on the server's side.
 *
 *   armed --OP_ACCEPT--> accepted --> [bidi: no] the request comes --> [refused: finish] | CALL or OPENED
 *                                        |
 *       handle:      held ----------------+--- reply / fail / finish ---> ended
 *       core:        open --OP_CLOSE--> over
 *       reading:     OP_RECV pending --message--> MESSAGE, again --nothing--> recv_done
 *
 * The three run beside each other. CLOSED is told when the handle is held and either the core says over, or the peer
 * half-closed; for a bidi stream not before recv_done, so that MESSAGE never follows CLOSED. Memory goes when ended,
 * over and nothing is pending. */
#include "rpc/server_internal.h"

#include <grpc/byte_buffer.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "rpc/bytes_internal.h"
#include "rpc/details.h"

enum {
    PEER_SIZE = 320,
    IDENTITY_SIZE = 512,
    REFUSAL_SIZE = 640,
    DEADLINE_SLACK_US = 50000,
    HEAD_BYTES = 256, /* of a call's headers that are not among its metadata, and of frames */
    FRAME_BYTES = 64,
};

static const char compressed_text[] = "compressed messages are not accepted; send them with encoding identity";
static const char late_text[] = "it was over when this call's turn came: nothing was done";

static void init_op(struct rpc_op *op, enum op_kind kind, struct mu_rpc_call *call)
{
    op->kind = kind;
    op->call = call;
}

static bool has_priority(const struct mu_rpc_call *call)
{
    return call->method && call->method->class == MU_RPC_PRIORITY;
}

struct mu_rpc_call *mu_rpc_call_new(struct mu_rpc_server *server, const struct rpc_method *method,
                                    struct rpc_poller *poller)
{
    struct mu_rpc_call *call = calloc(1, sizeof *call);
    MU_ASSERT(call);
    call->server = server;
    call->method = method;
    call->poller = poller;
    call->guest = MU_RPC_GUEST_NONE;
    grpc_metadata_array_init(&call->headers);
    if (!method)
        grpc_call_details_init(&call->details);
    init_op(&call->accept, OP_ACCEPT, call);
    init_op(&call->close, OP_CLOSE, call);
    init_op(&call->headers_sent, OP_HEADERS, call);
    init_op(&call->recv, OP_RECV, call);
    init_op(&call->send, OP_SEND, call);
    init_op(&call->finish, OP_FINISH, call);
    call->trailer.value = grpc_empty_slice();
    const struct mu_rpc_server_config *config = &server->config;
    bool first = has_priority(call);
    mu_rpc_sendq_init(&call->queue, first ? config->max_send_queue_messages : config->max_ordinary_queue_messages,
                      first ? config->max_send_queue_bytes : config->max_ordinary_queue_bytes);
    call->next = server->calls;
    if (call->next)
        call->next->prev = call;
    server->calls = call;
    server->object_count++;
    return call;
}

/* It is no open call any more. */
static void discount(struct mu_rpc_call *call)
{
    struct mu_rpc_server *server = call->server;
    if (!call->counted)
        return;
    call->counted = false;
    (has_priority(call) ? &server->priority_count : &server->ordinary_count)[0]--;
}

static void free_call(struct mu_rpc_call *call)
{
    struct mu_rpc_server *server = call->server;
    mu_rpc_server_unlinger(call);
    discount(call);
    server->untaken_count -= call->untaken;
    if (call->client)
        mu_rpc_peers_close(server->peers, call->client);
    if (call->prev)
        call->prev->next = call->next;
    else
        server->calls = call->next;
    if (call->next)
        call->next->prev = call->prev;
    server->object_count--;
    mu_rpc_sendq_clear(&call->queue);
    grpc_byte_buffer_destroy(call->received);
    grpc_byte_buffer_destroy(call->sending);
    grpc_metadata_array_destroy(&call->headers);
    if (!call->method)
        grpc_call_details_destroy(&call->details);
    if (call->grpc)
        grpc_call_unref(call->grpc);
    grpc_slice_unref(call->trailer.value);
    free(call->text);
    free(call->peer);
    free(call->identity);
    free(call);
}

static void start(struct mu_rpc_call *call, struct rpc_op *op, const grpc_op *ops, size_t op_count)
{
    call->pending_count++;
    mu_rpc_start(call->grpc, ops, op_count, &op->tag);
}

static void release_if_done(struct mu_rpc_call *call)
{
    if (call->ended && call->pending_count == 0)
        free_call(call);
}

/* --- sending --- */

static grpc_op headers_op(struct mu_rpc_call *call)
{
    call->headers_out = true;
    return (grpc_op){.op = GRPC_OP_SEND_INITIAL_METADATA};
}

/* Tells a bidi client that its stream is accepted, before there is a message. */
static void send_headers(struct mu_rpc_call *call)
{
    grpc_op op = headers_op(call);
    op.data.send_initial_metadata.count = 1;
    op.data.send_initial_metadata.metadata = &call->server->open_mark;
    start(call, &call->headers_sent, &op, 1);
}

/* The status, with the reply of a unary call before it. */
static void send_finish(struct mu_rpc_call *call)
{
    grpc_op ops[3] = {0};
    size_t count = 0;
    if (!call->headers_out)
        ops[count++] = headers_op(call);
    if (call->sending) {
        ops[count].op = GRPC_OP_SEND_MESSAGE;
        ops[count++].data.send_message.send_message = call->sending;
    }
    ops[count].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[count].data.send_status_from_server.status = (grpc_status_code)call->code;
    if (call->text) {
        call->details_out = grpc_slice_from_static_string(call->text);
        ops[count].data.send_status_from_server.status_details = &call->details_out;
        ops[count].data.send_status_from_server.trailing_metadata = &call->trailer;
        ops[count].data.send_status_from_server.trailing_metadata_count = 1;
    }
    count++;
    start(call, &call->finish, ops, count);
}

static void send_next(struct mu_rpc_call *call)
{
    struct mu_rpc_bytes *message = mu_rpc_sendq_take(&call->queue);
    if (!message)
        return;
    grpc_op ops[2] = {0};
    size_t count = 0;
    if (!call->headers_out)
        ops[count++] = headers_op(call);
    call->sending = mu_rpc_bytes_to_buffer(message);
    mu_rpc_bytes_unref(message);
    mu_rpc_server_counts(call)->sent++;
    ops[count].op = GRPC_OP_SEND_MESSAGE;
    ops[count].data.send_message.send_message = call->sending;
    /* Another one is behind: let the core gather both into one write. The last of a queue always flushes. */
    if (call->queue.first)
        ops[count].flags = GRPC_WRITE_BUFFER_HINT;
    count++;
    start(call, &call->send, ops, count);
}

static void set_failure(struct mu_rpc_call *call, const struct mu_error *err)
{
    uint8_t details[MU_RPC_DETAILS_BYTES_MAX];
    size_t size_bytes = mu_rpc_details_encode(call->code, err, details);
    call->text = strdup(err->text);
    call->trailer.key = grpc_slice_from_static_string(MU_RPC_DETAILS_KEY);
    call->trailer.value = grpc_slice_from_copied_buffer((const char *)details, size_bytes);
}

static void count_end(const struct mu_rpc_call *call, enum mu_rpc_code code)
{
    struct mu_rpc_counts *counts = mu_rpc_server_counts(call);
    if ((unsigned)code < MU_RPC_CODE_COUNT)
        counts->ended[code]++;
    if (call->method->kind == MU_RPC_UNARY)
        mu_histogram_add(&counts->took, mu_clock_mono_us() - call->accepted_us);
}

/* `err` NULL: there is no more to say than the code. */
static void end(struct mu_rpc_call *call, enum mu_rpc_code code, const struct mu_error *err)
{
    MU_ASSERT(!call->ended);
    call->ended = true;
    if (call->method)
        count_end(call, call->over ? MU_RPC_CANCELLED : code);
    if (call->over) {
        mu_rpc_sendq_clear(&call->queue);
        release_if_done(call);
        return;
    }
    mu_rpc_guests_ended(call->server->guests, call->guest);
    call->code = code;
    if (err && err->text[0])
        set_failure(call, err);
    if (call->counted && !has_priority(call)) { /* whether the peer takes the rest is no matter of the others */
        discount(call);
        call->untaken = true;
        call->server->untaken_count++;
    }
    mu_rpc_server_linger(call);
    if (call->queue.count > 0)
        call->finish_queued = true;
    else
        send_finish(call);
}

static void end_with_text(struct mu_rpc_call *call, enum mu_rpc_code code, const char *text)
{
    struct mu_error err;
    mu_fail(&err, mu_rpc_status_of_code(code), "%s", text ? text : "");
    end(call, code, code == MU_RPC_OK ? NULL : &err);
}

void mu_rpc_call_reply(struct mu_rpc_call *call, struct mu_rpc_bytes *reply)
{
    MU_ASSERT(call->method->kind == MU_RPC_UNARY);
    if (!call->over) {
        call->sending = mu_rpc_bytes_to_buffer(reply);
        call->reply_bytes = mu_rpc_bytes_size(reply);
        mu_rpc_server_counts(call)->sent++;
    }
    end(call, MU_RPC_OK, NULL);
}

void mu_rpc_call_fail(struct mu_rpc_call *call, enum mu_rpc_code code, const char *text)
{
    MU_ASSERT(code != MU_RPC_OK);
    end_with_text(call, code, text);
}

void mu_rpc_call_fail_as(struct mu_rpc_call *call, enum mu_rpc_code code, const struct mu_error *err)
{
    MU_ASSERT(code != MU_RPC_OK);
    end(call, code, err);
}

void mu_rpc_call_fail_error(struct mu_rpc_call *call, const struct mu_error *err)
{
    mu_rpc_call_fail_as(call, mu_rpc_code_of_status(err->status), err);
}

void mu_rpc_call_finish(struct mu_rpc_call *call, enum mu_rpc_code code, const char *text)
{
    MU_ASSERT(call->method->kind != MU_RPC_UNARY);
    end_with_text(call, code, text);
}

enum mu_status mu_rpc_call_send(struct mu_rpc_call *call, struct mu_rpc_bytes *message)
{
    MU_ASSERT(!call->ended && call->method->kind != MU_RPC_UNARY);
    if (call->over)
        return MU_ERR_CANCELLED;
    enum mu_status status = mu_rpc_sendq_push(&call->queue, message);
    if (status == MU_OK)
        send_next(call);
    return status;
}

/* --- receiving --- */

static void start_recv(struct mu_rpc_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &call->received;
    start(call, &call->recv, &op, 1);
}

static void start_close(struct mu_rpc_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    op.data.recv_close_on_server.cancelled = &call->cancelled;
    start(call, &call->close, &op, 1);
}

static void fill_event(struct mu_rpc_call *call, enum mu_rpc_event_type type, struct mu_rpc_event *ret_event)
{
    *ret_event = (struct mu_rpc_event){
        .type = type, .method_id = call->method->id, .call = call, .user = call->user, .data = "", .size_bytes = 0};
}

/* Moves what was received into the event; it lives in the server until the next turn. */
static void fill_payload(struct mu_rpc_call *call, struct mu_rpc_event *ret_event)
{
    struct mu_rpc_server *server = call->server;
    server->payload = mu_rpc_slice_of_buffer(call->received);
    call->received = NULL;
    mu_rpc_server_counts(call)->received++;
    ret_event->size_bytes = GRPC_SLICE_LENGTH(server->payload);
    if (ret_event->size_bytes > 0)
        ret_event->data = GRPC_SLICE_START_PTR(server->payload);
}

static bool tell_closed(struct mu_rpc_call *call, enum mu_rpc_closed reason, struct mu_rpc_event *ret_event)
{
    if (call->ended || call->closed_told)
        return false;
    call->closed_told = true;
    fill_event(call, MU_RPC_EVENT_CLOSED, ret_event);
    ret_event->reason = reason;
    return true;
}

static enum mu_rpc_closed reason_when_over(const struct mu_rpc_call *call)
{
    if (call->recv_bad)
        return MU_RPC_CLOSED_BAD_MESSAGE;
    uint64_t deadline_us = mu_rpc_call_deadline_us(call);
    if (deadline_us == UINT64_MAX)
        return MU_RPC_CLOSED_CANCELLED;
    /* The client's own timer fires first and resets the stream: what it told us was rounded up and took time to arrive.
     */
    uint64_t span_us = deadline_us > call->accepted_us ? deadline_us - call->accepted_us : 0;
    uint64_t slack_us = DEADLINE_SLACK_US + span_us / 16;
    return mu_clock_mono_us() + slack_us >= deadline_us ? MU_RPC_CLOSED_DEADLINE : MU_RPC_CLOSED_CANCELLED;
}

/* When the core is through with a call whose request did not come: nobody was told of it. */
static void forget_request(struct mu_rpc_call *call)
{
    if (!call->over || !call->recv_done)
        return;
    call->ended = true;
    count_end(call, MU_RPC_CANCELLED);
}

static bool step_close(struct mu_rpc_call *call, struct mu_rpc_event *ret_event)
{
    call->over = true;
    if (call->cancelled) {
        call->finish_queued = false;
        mu_rpc_sendq_clear(&call->queue);
    }
    if (call->ended)
        return false;
    if (call->awaits_request) {
        forget_request(call);
        return false;
    }
    if (call->method->kind == MU_RPC_BIDI_STREAM && !call->recv_done)
        return false; /* told when reading ends, which it does now */
    return tell_closed(call, reason_when_over(call), ret_event);
}

/* No message will come any more, because there is none or because one could not be read. */
static bool recv_ended(struct mu_rpc_call *call, bool ok, struct mu_rpc_event *ret_event)
{
    call->recv_done = true;
    call->recv_bad = !ok && !call->over;
    if (call->over)
        return tell_closed(call, reason_when_over(call), ret_event);
    /* An orderly end of the peer's half; anything else is followed by OP_CLOSE, which then tells. */
    if (ok && !grpc_call_failed_before_recv_message(call->grpc))
        return tell_closed(call, MU_RPC_CLOSED_HALF, ret_event);
    return false;
}

/* Counts a question of the client. */
static bool may_ask(struct mu_rpc_call *call)
{
    struct mu_rpc_server *server = call->server;
    if (call->method->class != MU_RPC_QUESTION || server->config.max_questions_per_second == 0 ||
        mu_rpc_peers_ask(server->peers, call->client, mu_clock_mono_us()))
        return true;
    server->refusals.questions_of_peer++;
    return false;
}

static void drop_received(struct mu_rpc_call *call)
{
    grpc_byte_buffer_destroy(call->received);
    call->received = NULL;
}

/* The peer broke a rule of the stream: nothing further is read. */
static bool refuse_message(struct mu_rpc_call *call, grpc_status_code code, const char *text,
                           struct mu_rpc_event *ret_event)
{
    drop_received(call);
    grpc_call_cancel_with_status(call->grpc, code, text, NULL);
    return recv_ended(call, false, ret_event);
}

static bool step_recv(struct mu_rpc_call *call, bool ok, struct mu_rpc_event *ret_event)
{
    if (!ok || !call->received)
        return recv_ended(call, ok, ret_event);
    mu_rpc_guests_told(call->server->guests, call->guest, grpc_byte_buffer_length(call->received) + FRAME_BYTES);
    if (!mu_rpc_buffer_is_plain(call->received))
        return refuse_message(call, GRPC_STATUS_UNIMPLEMENTED, compressed_text, ret_event);
    if (!may_ask(call))
        return refuse_message(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "too many questions a second on this stream",
                              ret_event);
    bool wanted = !call->ended;
    if (wanted) {
        fill_event(call, MU_RPC_EVENT_MESSAGE, ret_event);
        fill_payload(call, ret_event);
    } else {
        drop_received(call); /* ended by us: what still comes is of no interest */
    }
    start_recv(call);
    return wanted;
}

static bool step_send(struct mu_rpc_call *call, struct mu_rpc_event *ret_event)
{
    grpc_byte_buffer_destroy(call->sending);
    call->sending = NULL;
    bool writable = mu_rpc_sendq_done(&call->queue);
    if (call->over)
        return false;
    send_next(call);
    if (call->finish_queued && call->queue.count == 0) {
        call->finish_queued = false;
        send_finish(call);
    }
    if (!writable || call->ended)
        return false;
    fill_event(call, MU_RPC_EVENT_WRITABLE, ret_event);
    return true;
}

/* The peer has taken it, or never will. */
static void drop_reply(struct mu_rpc_call *call)
{
    if (call->linger_until_us)
        call->server->linger_bytes -= call->reply_bytes;
    call->reply_bytes = 0;
    grpc_byte_buffer_destroy(call->sending);
    call->sending = NULL;
}

/* --- accepting --- */

/* Counts the call as one of its client's. False: `text` says why not. */
static bool admit_client(struct mu_rpc_call *call, char text[REFUSAL_SIZE])
{
    struct mu_rpc_server *server = call->server;
    char host[MU_RPC_PEER_NAME_SIZE];
    const char *name = mu_rpc_call_identity(call);
    if (!name[0]) {
        mu_rpc_peer_host(mu_rpc_call_peer(call), host);
        name = host;
    }
    call->client = mu_rpc_peers_open(server->peers, name);
    if (!call->client) {
        snprintf(text, REFUSAL_SIZE, "%s has %zu calls open here, and no client may have more: close some", name,
                 server->config.max_calls_per_peer);
        server->refusals.calls_of_peer++;
        return false;
    }
    if (may_ask(call))
        return true;
    snprintf(text, REFUSAL_SIZE, "%s asks more than %u times a second: ask less often, or watch events instead", name,
             server->config.max_questions_per_second);
    return false;
}

/* Whether there is room for the call. False: `text` says why not. */
static bool admit(struct mu_rpc_call *call, char text[REFUSAL_SIZE])
{
    struct mu_rpc_server *server = call->server;
    bool first = has_priority(call);
    size_t *count = first ? &server->priority_count : &server->ordinary_count;
    if (*count >= (first ? server->config.max_priority_calls : server->config.max_calls)) {
        snprintf(text, REFUSAL_SIZE, "too many open calls at the server; close some or try again later");
        server->refusals.calls++;
        return false;
    }
    ++*count;
    call->counted = true;
    return first || admit_client(call, text);
}

/* About what it took on the wire: headers may have been compressed, frames and TLS add some. */
static size_t bytes_of_headers(const struct mu_rpc_call *call)
{
    size_t bytes = HEAD_BYTES;
    for (size_t i = 0; i < call->headers.count; i++) {
        const grpc_metadata *header = &call->headers.metadata[i];
        bytes += GRPC_SLICE_LENGTH(header->key) + GRPC_SLICE_LENGTH(header->value);
    }
    return bytes;
}

static bool step_accept(struct mu_rpc_call *call, bool ok, struct mu_rpc_event *ret_event)
{
    struct mu_rpc_server *server = call->server;
    char text[REFUSAL_SIZE];
    if (!ok) { /* the server shuts down; nothing was accepted */
        call->grpc = NULL;
        call->ended = true;
        return false;
    }
    call->accepted = true;
    start_close(call);
    if (server->freeing) {
        mu_rpc_call_abandon(call);
        return false;
    }
    mu_rpc_server_arm(server, call->method, call->poller);
    call->guest = mu_rpc_guests_find(server->guests, mu_rpc_call_peer(call));
    mu_rpc_guests_told(server->guests, call->guest, bytes_of_headers(call));
    call->accepted_us = mu_clock_mono_us();
    if (call->method)
        mu_rpc_server_counts(call)->started++;
    if (!call->method) {
        end_with_text(call, MU_RPC_UNIMPLEMENTED, "this server does not know the method");
    } else if (mu_rpc_call_deadline_us(call) <= call->accepted_us) {
        end_with_text(call, MU_RPC_DEADLINE_EXCEEDED, late_text);
    } else if (call->method->kind != MU_RPC_BIDI_STREAM) {
        call->awaits_request = true;
        start_recv(call);
        mu_rpc_server_linger(call);
    } else if (!admit(call, text)) {
        end_with_text(call, MU_RPC_RESOURCE_EXHAUSTED, text);
    } else {
        send_headers(call);
        start_recv(call);
        fill_event(call, MU_RPC_EVENT_OPENED, ret_event);
        return true;
    }
    return false;
}

/* A call counts from when its request is there and its turn has come: those who send none keep nobody out. */
static bool step_request(struct mu_rpc_call *call, bool ok, struct mu_rpc_event *ret_event)
{
    struct mu_rpc_server *server = call->server;
    char text[REFUSAL_SIZE];
    call->recv_done = true;
    bool has_half_closed = ok && !grpc_call_failed_before_recv_message(call->grpc);
    if (call->ended || call->cut_off || (!call->received && (call->over || !has_half_closed))) {
        if (!call->ended)
            forget_request(call); /* or OP_CLOSE comes yet */
        return false;
    }
    call->awaits_request = false;
    mu_rpc_server_unlinger(call);
    call->accepted_us = mu_clock_mono_us();
    if (!call->received) {
        end_with_text(call, MU_RPC_INVALID_ARGUMENT, "the call carries no request message");
        return false;
    }
    mu_rpc_guests_told(server->guests, call->guest, grpc_byte_buffer_length(call->received) + FRAME_BYTES);
    if (call->over) {
        forget_request(call);
    } else if (mu_rpc_call_deadline_us(call) <= call->accepted_us) {
        end_with_text(call, MU_RPC_DEADLINE_EXCEEDED, late_text);
    } else if (!admit(call, text)) {
        end_with_text(call, MU_RPC_RESOURCE_EXHAUSTED, text);
    } else if (!mu_rpc_buffer_is_plain(call->received)) {
        end_with_text(call, MU_RPC_UNIMPLEMENTED, compressed_text);
    } else {
        fill_event(call, MU_RPC_EVENT_CALL, ret_event);
        fill_payload(call, ret_event);
        return true;
    }
    return false;
}

bool mu_rpc_call_step(struct mu_rpc_call *call, struct rpc_op *op, struct mu_rpc_event *ret_event)
{
    bool told = false;
    MU_ASSERT(call->pending_count > 0);
    call->pending_count--;
    switch (op->kind) {
    case OP_ACCEPT:
        told = step_accept(call, op->ok, ret_event);
        break;
    case OP_CLOSE:
        told = step_close(call, ret_event);
        break;
    case OP_RECV:
        told = call->awaits_request ? step_request(call, op->ok, ret_event) : step_recv(call, op->ok, ret_event);
        break;
    case OP_SEND:
        told = step_send(call, ret_event);
        break;
    case OP_FINISH:
        drop_reply(call);
        break;
    case OP_HEADERS:
    case OP_SHUTDOWN:
        break;
    }
    release_if_done(call);
    return told;
}

void mu_rpc_call_abandon(struct mu_rpc_call *call)
{
    if (!call->accepted) /* armed: the core owns its fields until OP_ACCEPT comes back */
        return;
    call->ended = true;
    call->finish_queued = false;
    grpc_call_cancel_with_status(call->grpc, GRPC_STATUS_UNAVAILABLE, "the server is shutting down", NULL);
    release_if_done(call);
}

/* --- facts about a call --- */

void mu_rpc_call_set_user(struct mu_rpc_call *call, void *user)
{
    call->user = user;
}

void *mu_rpc_call_user(const struct mu_rpc_call *call)
{
    return call->user;
}

int mu_rpc_call_method_id(const struct mu_rpc_call *call)
{
    return call->method->id;
}

const char *mu_rpc_call_peer(struct mu_rpc_call *call)
{
    if (!call->peer) {
        char text[PEER_SIZE];
        char *core_text = grpc_call_get_peer(call->grpc);
        mu_rpc_address_peer(core_text, text, sizeof text);
        gpr_free(core_text);
        call->peer = strdup(text);
        MU_ASSERT(call->peer);
    }
    return call->peer;
}

/* The first value of that property that begins with `prefix`. */
static const char *find_property(const grpc_auth_context *context, const char *name, const char *prefix)
{
    grpc_auth_property_iterator each = grpc_auth_context_find_properties_by_name(context, name);
    const grpc_auth_property *property;
    while ((property = grpc_auth_property_iterator_next(&each)))
        if (strncmp(property->value, prefix, strlen(prefix)) == 0 && strlen(property->value) == property->value_length)
            return property->value;
    return NULL;
}

const char *mu_rpc_call_identity(struct mu_rpc_call *call)
{
    if (call->identity)
        return call->identity;
    grpc_auth_context *context = call->server->tls ? grpc_call_auth_context(call->grpc) : NULL;
    char text[IDENTITY_SIZE] = "";
    const char *uri = context ? find_property(context, GRPC_PEER_URI_PROPERTY_NAME, "muster://") : NULL;
    const char *dns = context && !uri ? find_property(context, GRPC_PEER_DNS_PROPERTY_NAME, "") : NULL;
    if (uri && strlen(uri) < sizeof text) /* never cut: half a name is another name */
        snprintf(text, sizeof text, "%s", uri);
    else if (dns && strlen(dns) + 4 < sizeof text)
        snprintf(text, sizeof text, "dns:%s", dns);
    grpc_auth_context_release(context);
    call->identity = strdup(text);
    MU_ASSERT(call->identity);
    return call->identity;
}

bool mu_rpc_call_has_certificate(const struct mu_rpc_call *call)
{
    grpc_auth_context *context = call->server->tls ? grpc_call_auth_context(call->grpc) : NULL;
    bool has_one = context && grpc_auth_context_peer_is_authenticated(context);
    grpc_auth_context_release(context);
    return has_one;
}

char *mu_rpc_call_certificate(const struct mu_rpc_call *call)
{
    grpc_auth_context *context = call->server->tls ? grpc_call_auth_context(call->grpc) : NULL;
    const char *pem = context ? find_property(context, GRPC_X509_PEM_CERT_PROPERTY_NAME, "") : NULL;
    char *copy = pem ? strdup(pem) : NULL;
    grpc_auth_context_release(context);
    return copy;
}

uint64_t mu_rpc_call_deadline_us(const struct mu_rpc_call *call)
{
    gpr_timespec never = gpr_inf_future(call->deadline.clock_type);
    if (gpr_time_cmp(call->deadline, never) >= 0)
        return UINT64_MAX;
    gpr_timespec at = gpr_convert_clock_type(call->deadline, GPR_CLOCK_MONOTONIC);
    return at.tv_sec < 0 ? 0 : (uint64_t)at.tv_sec * 1000000u + (uint64_t)at.tv_nsec / 1000u;
}

bool mu_rpc_call_metadata(const struct mu_rpc_call *call, const char *key, const char **ret_value,
                          size_t *ret_size_bytes)
{
    for (size_t i = 0; i < call->headers.count; i++) {
        const grpc_metadata *header = &call->headers.metadata[i];
        if (grpc_slice_str_cmp(header->key, key) != 0)
            continue;
        *ret_value = (const char *)GRPC_SLICE_START_PTR(header->value);
        *ret_size_bytes = GRPC_SLICE_LENGTH(header->value);
        return true;
    }
    return false;
}

size_t mu_rpc_call_queued_messages(const struct mu_rpc_call *call)
{
    return call->queue.count;
}

size_t mu_rpc_call_queued_bytes(const struct mu_rpc_call *call)
{
    return call->queue.size_bytes;
}

const char *mu_rpc_closed_name(enum mu_rpc_closed reason)
{
    static const char *const names[] = {[MU_RPC_CLOSED_HALF] = "half-closed",
                                        [MU_RPC_CLOSED_CANCELLED] = "cancelled",
                                        [MU_RPC_CLOSED_DEADLINE] = "deadline",
                                        [MU_RPC_CLOSED_BAD_MESSAGE] = "bad message"};
    return (unsigned)reason < sizeof names / sizeof names[0] ? names[reason] : "unknown";
}
