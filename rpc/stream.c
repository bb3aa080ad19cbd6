/* A stream on the client's side, and the reader on top of it.
 *
 *    opening --headers of the server--> open --status--> ended --nothing pending--> CLOSED told --freed by its owner-->
 * gone
 *
 * Everything the core completes arrives on one poller thread, so events of a stream are in order and never two at a
 * time. The lock guards what other threads touch: the send queue, the flags, the count of pending operations. No
 * callback runs under it. */
#include "rpc/client_internal.h"

#include <grpc/slice.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rpc/bytes_internal.h"
#include "rpc/sendq.h"

struct stream_op {
    struct client_op op; /* first */
    struct mu_rpc_stream *stream;
};

struct mu_rpc_stream {
    struct mu_rpc_client *client; /* not after `detached` */
    struct client_poller *poller;
    grpc_call *grpc;
    char *method;
    mu_rpc_stream_fn *fn;
    void *user;
    bool paced;

    struct stream_op opened, recv, send, half_close, status;
    struct client_outcome outcome;
    grpc_byte_buffer *received, *sending;

    pthread_mutex_t lock;
    pthread_cond_t quiet; /* no callback is running */
    struct mu_rpc_sendq queue;
    unsigned pending_count;
    bool closing;     /* no more sends: half-close asked for, or cancelled, or over */
    bool cancelled;   /* by us */
    bool half_closed; /* half-close is on the wire */
    bool over;        /* the status is here */
    bool recv_done;   /* no message will come any more */
    bool in_callback;
    bool opened_told, closed_told;
    bool detached;   /* mu_rpc_stream_free has begun: no callback any more */
    bool owner_gone; /* and is done with the memory */
};

static void start(struct mu_rpc_stream *stream, struct stream_op *op, const grpc_op *ops, size_t op_count)
{
    stream->pending_count++;
    mu_rpc_start(stream->grpc, ops, op_count, &op->op.tag);
}

static void destroy(struct mu_rpc_stream *stream)
{
    mu_rpc_sendq_clear(&stream->queue);
    grpc_byte_buffer_destroy(stream->received);
    grpc_byte_buffer_destroy(stream->sending);
    grpc_call_unref(stream->grpc);
    mu_rpc_outcome_fini(&stream->outcome);
    pthread_cond_destroy(&stream->quiet);
    pthread_mutex_destroy(&stream->lock);
    free(stream->method);
    free(stream);
}

/* --- callbacks (poller thread, lock held on entry and on return) --- */

static void tell(struct mu_rpc_stream *stream, const struct mu_rpc_stream_event *event)
{
    if (stream->detached)
        return;
    stream->in_callback = true;
    pthread_mutex_unlock(&stream->lock);
    stream->fn(stream->user, event);
    pthread_mutex_lock(&stream->lock);
    stream->in_callback = false;
    pthread_cond_broadcast(&stream->quiet);
}

static void tell_closed(struct mu_rpc_stream *stream)
{
    struct mu_error error;
    struct mu_rpc_stream_event event = {.type = MU_RPC_STREAM_CLOSED, .code = (enum mu_rpc_code)stream->outcome.code};
    stream->closed_told = true;
    if (stream->detached)
        return;
    if (event.code != MU_RPC_OK) {
        (void)mu_rpc_outcome_fail(&stream->outcome, stream->client->address_text, stream->method, &error);
        event.error = &error;
    }
    tell(stream, &event);
}

static void tell_opened(struct mu_rpc_stream *stream)
{
    struct mu_rpc_stream_event event = {.type = MU_RPC_STREAM_OPENED};
    if (stream->opened_told)
        return;
    stream->opened_told = true;
    tell(stream, &event);
}

/* Ends every step: tells CLOSED when all is in, frees what its owner has freed, unlocks. */
static void leave(struct mu_rpc_stream *stream)
{
    bool idle = stream->pending_count == 0 && stream->over;
    if (idle && stream->recv_done && !stream->closed_told)
        tell_closed(stream);
    bool last = idle && stream->owner_gone;
    pthread_mutex_unlock(&stream->lock);
    if (last)
        destroy(stream);
}

static struct mu_rpc_stream *enter(struct client_op *op)
{
    struct mu_rpc_stream *stream = ((struct stream_op *)op)->stream;
    pthread_mutex_lock(&stream->lock);
    stream->pending_count--;
    return stream;
}

/* --- operations --- */

static void start_recv(struct mu_rpc_stream *stream)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &stream->received;
    start(stream, &stream->recv, &op, 1);
}

static void send_next(struct mu_rpc_stream *stream)
{
    struct mu_rpc_bytes *message = mu_rpc_sendq_take(&stream->queue);
    if (message) {
        stream->sending = mu_rpc_bytes_to_buffer(message);
        mu_rpc_bytes_unref(message);
        grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};
        op.data.send_message.send_message = stream->sending;
        /* Another one is behind: let the core gather both into one write. The last of a queue always flushes. */
        if (stream->queue.first)
            op.flags = GRPC_WRITE_BUFFER_HINT;
        start(stream, &stream->send, &op, 1);
    } else if (stream->closing && !stream->cancelled && !stream->half_closed && stream->queue.count == 0) {
        stream->half_closed = true;
        grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
        start(stream, &stream->half_close, &op, 1);
    }
}

/* A stream that ends unaccepted has (empty) initial metadata too; the server's mark tells an accepted one. */
static bool is_marked(const grpc_metadata_array *initial)
{
    for (size_t i = 0; i < initial->count; i++)
        if (grpc_slice_str_cmp(initial->metadata[i].key, MU_RPC_OPEN_MARK) == 0)
            return true;
    return false;
}

static void opened_done(struct client_op *op, bool ok)
{
    struct mu_rpc_stream *stream = enter(op);
    if (ok && is_marked(&stream->outcome.initial))
        tell_opened(stream);
    leave(stream);
}

static void recv_done(struct client_op *op, bool ok)
{
    struct mu_rpc_stream *stream = enter(op);
    if (ok && stream->received && !mu_rpc_buffer_is_plain(stream->received)) {
        stream->recv_done = true;
        grpc_call_cancel_with_status(stream->grpc, GRPC_STATUS_INTERNAL, "the server sent a compressed message", NULL);
    } else if (ok && stream->received) {
        grpc_slice slice = mu_rpc_slice_of_buffer(stream->received);
        stream->received = NULL;
        struct mu_rpc_stream_event event = {
            .type = MU_RPC_STREAM_MESSAGE, .data = "", .size_bytes = GRPC_SLICE_LENGTH(slice)};
        if (event.size_bytes > 0)
            event.data = GRPC_SLICE_START_PTR(slice);
        tell_opened(stream); /* at the latest now, if the server does not mark */
        tell(stream, &event);
        grpc_slice_unref(slice);
        if (!stream->paced && !stream->detached)
            start_recv(stream);
    } else {
        stream->recv_done = true;
    }
    leave(stream);
}

static void send_done(struct client_op *op, bool ok)
{
    struct mu_rpc_stream *stream = enter(op);
    (void)ok; /* the status says it */
    grpc_byte_buffer_destroy(stream->sending);
    stream->sending = NULL;
    bool writable = mu_rpc_sendq_done(&stream->queue);
    if (!stream->over) {
        send_next(stream);
        if (writable && !stream->closing) {
            struct mu_rpc_stream_event event = {.type = MU_RPC_STREAM_WRITABLE};
            tell(stream, &event);
        }
    }
    leave(stream);
}

static void half_close_done(struct client_op *op, bool ok)
{
    (void)ok;
    leave(enter(op));
}

static void status_done(struct client_op *op, bool ok)
{
    struct mu_rpc_stream *stream = enter(op);
    (void)ok;
    stream->over = true;
    stream->closing = true;
    mu_rpc_sendq_clear(&stream->queue);
    leave(stream);
}

/* --- for the owner --- */

static struct mu_rpc_stream *make(struct mu_rpc_client *client, const char *method, mu_rpc_stream_fn *fn, void *user,
                                  bool paced)
{
    struct mu_rpc_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    stream->method = strdup(method);
    if (!stream->method) {
        free(stream);
        return NULL;
    }
    stream->client = client;
    stream->poller = client->poller;
    stream->fn = fn;
    stream->user = user;
    stream->paced = paced;
    stream->opened = (struct stream_op){.op.done = opened_done, .stream = stream};
    stream->recv = (struct stream_op){.op.done = recv_done, .stream = stream};
    stream->send = (struct stream_op){.op.done = send_done, .stream = stream};
    stream->half_close = (struct stream_op){.op.done = half_close_done, .stream = stream};
    stream->status = (struct stream_op){.op.done = status_done, .stream = stream};
    mu_rpc_outcome_init(&stream->outcome);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->quiet, NULL);
    mu_rpc_sendq_init(&stream->queue, client->config.max_send_queue_messages, client->config.max_send_queue_bytes);
    stream->grpc = mu_rpc_client_open(client, method, 0);
    return stream;
}

static enum mu_status open_stream(struct mu_rpc_client *client, const char *method, mu_rpc_stream_fn *fn, void *user,
                                  bool paced, struct mu_error *err, struct mu_rpc_stream **ret_stream)
{
    struct mu_rpc_stream *stream = make(client, method, fn, user, paced);
    if (!stream)
        return mu_fail(err, MU_ERR_NO_MEMORY, "stream %s: out of memory", method);
    pthread_mutex_lock(&stream->lock);
    grpc_op status = mu_rpc_client_op_status(&stream->outcome);
    start(stream, &stream->status, &status, 1);
    grpc_op headers[] = {mu_rpc_client_op_headers(client), mu_rpc_client_op_initial(&stream->outcome)};
    start(stream, &stream->opened, headers, 2);
    start_recv(stream);
    *ret_stream = stream; /* callbacks take the lock first: they find it set */
    pthread_mutex_unlock(&stream->lock);
    return MU_OK;
}

enum mu_status mu_rpc_stream_new(struct mu_rpc_client *client, const char *method, mu_rpc_stream_fn *fn, void *user,
                                 struct mu_error *err, struct mu_rpc_stream **ret_stream)
{
    return open_stream(client, method, fn, user, false, err, ret_stream);
}

enum mu_status mu_rpc_stream_send(struct mu_rpc_stream *stream, struct mu_rpc_bytes *message)
{
    pthread_mutex_lock(&stream->lock);
    enum mu_status status = stream->closing ? MU_ERR_CANCELLED : mu_rpc_sendq_push(&stream->queue, message);
    if (status == MU_OK)
        send_next(stream);
    pthread_mutex_unlock(&stream->lock);
    return status;
}

void mu_rpc_stream_close_send(struct mu_rpc_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    if (!stream->closing) {
        stream->closing = true;
        send_next(stream);
    }
    pthread_mutex_unlock(&stream->lock);
}

static void cancel_locked(struct mu_rpc_stream *stream)
{
    stream->closing = true;
    if (stream->cancelled || stream->over)
        return;
    stream->cancelled = true;
    mu_rpc_sendq_clear(&stream->queue);
    grpc_call_cancel(stream->grpc, NULL);
}

void mu_rpc_stream_cancel(struct mu_rpc_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    cancel_locked(stream);
    pthread_mutex_unlock(&stream->lock);
}

void mu_rpc_stream_free(struct mu_rpc_stream *stream)
{
    if (!stream)
        return;
    pthread_mutex_lock(&stream->lock);
    stream->detached = true;
    cancel_locked(stream);
    if (!pthread_equal(pthread_self(), stream->poller->thread))
        while (stream->in_callback)
            pthread_cond_wait(&stream->quiet, &stream->lock);
    stream->owner_gone = true;
    bool last = stream->pending_count == 0 && stream->over && !stream->in_callback;
    pthread_mutex_unlock(&stream->lock);
    if (last)
        destroy(stream);
}

/* --- reader: a paced stream, a few messages read ahead, and a wait --- */

enum { READ_AHEAD = 64, READ_AHEAD_BYTES = 1 << 20 };

struct mu_rpc_reader {
    struct mu_rpc_stream *stream;
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct mu_rpc_bytes *messages[READ_AHEAD]; /* ring: came, not yet taken */
    size_t first, count, size_bytes;
    bool stalled; /* the ring is full: the next message has not been asked for */
    bool ended, cancelled;
    enum mu_status status; /* when ended */
    struct mu_error error;
};

static void read_more(struct mu_rpc_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    start_recv(stream);
    pthread_mutex_unlock(&stream->lock);
}

static void reader_event(void *user, const struct mu_rpc_stream_event *event)
{
    struct mu_rpc_reader *reader = user;
    bool more = false;
    pthread_mutex_lock(&reader->lock);
    if (event->type == MU_RPC_STREAM_MESSAGE) {
        MU_ASSERT(reader->count < READ_AHEAD);
        reader->messages[(reader->first + reader->count++) % READ_AHEAD] =
            mu_rpc_bytes_copy(event->data, event->size_bytes);
        reader->size_bytes += event->size_bytes;
        more = reader->count < READ_AHEAD && reader->size_bytes < READ_AHEAD_BYTES;
        reader->stalled = !more;
    } else if (event->type == MU_RPC_STREAM_CLOSED) {
        reader->ended = true;
        reader->status = event->error ? event->error->status : MU_OK;
        if (event->error)
            reader->error = *event->error;
        /* MU_ERR_TIMEOUT is kept for a wait that is over; this is the end. */
        if (reader->status == MU_ERR_TIMEOUT)
            reader->status = reader->error.status = MU_ERR_UNAVAILABLE;
    }
    pthread_cond_signal(&reader->filled);
    pthread_mutex_unlock(&reader->lock);
    if (more)
        read_more(reader->stream);
}

/* Lock held. Sets *ret_more when there is room to ask for more again. */
static struct mu_rpc_bytes *reader_take(struct mu_rpc_reader *reader, bool *ret_more)
{
    struct mu_rpc_bytes *message = reader->messages[reader->first];
    reader->first = (reader->first + 1) % READ_AHEAD;
    reader->count--;
    reader->size_bytes -= mu_rpc_bytes_size(message);
    *ret_more = reader->stalled && reader->count <= READ_AHEAD / 2 && reader->size_bytes <= READ_AHEAD_BYTES / 2;
    if (*ret_more)
        reader->stalled = false;
    return message;
}

static void free_reader(struct mu_rpc_reader *reader)
{
    mu_rpc_stream_free(reader->stream);
    while (reader->count > 0) {
        bool ignored;
        mu_rpc_bytes_unref(reader_take(reader, &ignored));
    }
    pthread_cond_destroy(&reader->filled);
    pthread_mutex_destroy(&reader->lock);
    free(reader);
}

enum mu_status mu_rpc_reader_new(struct mu_rpc_client *client, const char *method, struct mu_rpc_bytes *request,
                                 struct mu_error *err, struct mu_rpc_reader **ret_reader)
{
    struct mu_rpc_reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return mu_fail(err, MU_ERR_NO_MEMORY, "stream %s: out of memory", method);
    pthread_mutex_init(&reader->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&reader->filled, &attr);
    pthread_condattr_destroy(&attr);
    enum mu_status status = open_stream(client, method, reader_event, reader, true, err, &reader->stream);
    if (status != MU_OK) {
        free_reader(reader);
        return status;
    }
    /* Refused only if the call has failed already, which mu_rpc_reader_next will say. */
    enum mu_status sent = mu_rpc_stream_send(reader->stream, request);
    (void)sent;
    mu_rpc_stream_close_send(reader->stream);
    *ret_reader = reader;
    return MU_OK;
}

static struct timespec in_ms(int timeout_ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    return until;
}

enum mu_status mu_rpc_reader_next(struct mu_rpc_reader *reader, int timeout_ms, struct mu_error *err,
                                  struct mu_rpc_bytes **ret_message)
{
    struct timespec until = in_ms(timeout_ms > 0 ? timeout_ms : 0);
    enum mu_status status = MU_OK;
    struct mu_rpc_bytes *message = NULL;
    bool late = false, more = false;
    pthread_mutex_lock(&reader->lock);
    while (reader->count == 0 && !reader->ended && !reader->cancelled && !late) {
        if (timeout_ms < 0)
            pthread_cond_wait(&reader->filled, &reader->lock);
        else
            late = pthread_cond_timedwait(&reader->filled, &reader->lock, &until) != 0;
    }
    if (reader->cancelled) {
        status = mu_fail(err, MU_ERR_CANCELLED, "reading was cancelled");
    } else if (reader->count > 0) {
        message = reader_take(reader, &more);
    } else if (!reader->ended) {
        status = mu_fail(err, MU_ERR_TIMEOUT, "no message within %d ms", timeout_ms);
    } else if (reader->status != MU_OK) {
        status = mu_fail(err, reader->status, "%s", reader->error.text);
    }
    pthread_mutex_unlock(&reader->lock);
    if (more)
        read_more(reader->stream);
    if (status == MU_OK)
        *ret_message = message;
    return status;
}

void mu_rpc_reader_cancel(struct mu_rpc_reader *reader)
{
    pthread_mutex_lock(&reader->lock);
    reader->cancelled = true;
    pthread_cond_broadcast(&reader->filled);
    pthread_mutex_unlock(&reader->lock);
    mu_rpc_stream_cancel(reader->stream);
}

void mu_rpc_reader_free(struct mu_rpc_reader *reader)
{
    if (reader)
        free_reader(reader);
}
