#include "cli/event_stream.h"

#include <time.h>

#include "common/clock.h"

enum { CONNECTING_MS = 5000 }; /* longer than any attempt to connect takes */

void mu_event_stream_init(struct mu_event_stream *stream)
{
    *stream =
        (struct mu_event_stream){.request = MUSTER__V1__WATCH_EVENTS_REQUEST__INIT, .lock = PTHREAD_MUTEX_INITIALIZER};
}

static void interrupt(struct mu_event_stream *stream, bool *flag)
{
    pthread_mutex_lock(&stream->lock);
    *flag = true;
    if (stream->reader)
        mu_rpc_reader_cancel(stream->reader);
    pthread_mutex_unlock(&stream->lock);
}

void mu_event_stream_finish(struct mu_event_stream *stream)
{
    interrupt(stream, &stream->finishing);
}

void mu_event_stream_stop(struct mu_event_stream *stream)
{
    interrupt(stream, &stream->stopped);
}

static enum mu_status open_reader(struct mu_event_stream *stream, struct mu_rpc_reader **ret_reader, bool *ret_follows,
                                  struct mu_error *err)
{
    Muster__V1__WatchEventsRequest request = stream->request;
    pthread_mutex_lock(&stream->lock);
    request.follow = request.follow && !stream->finishing;
    enum mu_status status = stream->stopped ? mu_fail(err, MU_ERR_CANCELLED, "stopped")
                                            : mu_cli_watch_events(stream->cli, &request, ret_reader, err);
    if (status == MU_OK)
        stream->reader = *ret_reader;
    pthread_mutex_unlock(&stream->lock);
    *ret_follows = request.follow;
    return status;
}

static enum mu_status show_next(struct mu_event_stream *stream, struct mu_rpc_reader *reader,
                                struct mu_wire_arena *arena, bool *ret_ended, struct mu_error *err)
{
    struct mu_rpc_bytes *bytes = NULL;
    const ProtobufCMessage *message;
    enum mu_status status = mu_rpc_reader_next(reader, -1, err, &bytes);
    *ret_ended = status == MU_OK && !bytes;
    if (status != MU_OK || !bytes)
        return status;
    mu_wire_arena_reset(arena);
    status = mu_wire_unpack(arena, &muster__v1__watch_events_response__descriptor, mu_rpc_bytes_data(bytes),
                            mu_rpc_bytes_size(bytes), MU_WIRE_REPLY_BYTES_MAX, &message, err);
    const Muster__V1__Event *event = status == MU_OK ? ((const Muster__V1__WatchEventsResponse *)message)->event : NULL;
    if (event) {
        stream->show(stream->ctx, event);
        stream->request.after_event = event->number;
        stream->request.newest = 0; /* from here on all, also when the stream breaks */
    }
    mu_rpc_bytes_unref(bytes);
    return status;
}

/* One stream. MU_OK with *ret_done: everything asked for was shown. *ret_contact: a coordinator was there. */
static enum mu_status read_once(struct mu_event_stream *stream, struct mu_wire_arena *arena, bool *ret_contact,
                                bool *ret_done, struct mu_error *err)
{
    struct mu_rpc_reader *reader = NULL;
    bool follows = false, ended = false;
    uint64_t start_us = mu_clock_mono_us(), last_event = stream->request.after_event;
    enum mu_status status = open_reader(stream, &reader, &follows, err);
    while (status == MU_OK && !ended)
        status = show_next(stream, reader, arena, &ended, err);
    pthread_mutex_lock(&stream->lock);
    stream->reader = NULL;
    *ret_done = stream->stopped || (ended && !follows);
    bool restart = stream->finishing && follows; /* cancelled, to be read to its present end */
    pthread_mutex_unlock(&stream->lock);
    mu_rpc_reader_free(reader);
    *ret_contact = ended || stream->request.after_event != last_event ||
                   mu_clock_mono_us() - start_us > CONNECTING_MS * 1000ull; /* that long it was open, and silent */
    return restart && status == MU_ERR_CANCELLED ? MU_OK : status;
}

/* Away, restarting, or cut off because this program was slow: all that is needed is to go on after the last event. */
static bool is_passing(enum mu_status status)
{
    return status == MU_ERR_UNAVAILABLE || status == MU_ERR_TIMEOUT || status == MU_ERR_LIMIT;
}

enum mu_status mu_event_stream_run(struct mu_event_stream *stream, struct mu_error *err)
{
    struct mu_wire_arena arena;
    uint64_t heard_us = mu_clock_mono_us();
    bool contact = false, done = false;
    enum mu_status status = MU_OK;
    mu_wire_arena_init(&arena);
    while (!done) {
        status = read_once(stream, &arena, &contact, &done, err);
        if (done || status == MU_OK)
            continue;
        if (contact)
            heard_us = mu_clock_mono_us();
        bool patient = mu_clock_mono_us() - heard_us < MU_EVENT_STREAM_GIVE_UP_MS * 1000ull;
        if (!stream->request.follow || !is_passing(status) || !patient)
            break;
        nanosleep(&(struct timespec){.tv_nsec = MU_EVENT_STREAM_RETRY_MS * 1000000l}, NULL);
    }
    mu_wire_arena_fini(&arena);
    return done ? MU_OK : status;
}
