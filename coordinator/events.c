#include "coordinator/events.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/records.h"

struct slot {
    struct mu_rpc_bytes *bytes;
    char job[MU_JOB_NAME_SIZE];
};

struct watcher {
    struct mu_rpc_call *call;
    struct mu_watch_request request;
    uint64_t next_number; /* first event not yet looked at */
    bool blocked;         /* its stream is full */
    bool was_current;
    struct watcher *next, *previous;
};

struct mu_events {
    struct slot *slots; /* [capacity], by number modulo */
    uint32_t capacity;
    uint64_t newest; /* number; 0: none ever */
    uint64_t oldest; /* number of the oldest kept; newest + 1: none */
    struct watcher *watchers;
    uint32_t watcher_count;
};

enum mu_status mu_events_new(uint32_t capacity, struct mu_events **ret_events, struct mu_error *err)
{
    MU_ASSERT(capacity >= MU_EVENTS_KEPT_MIN && capacity <= MU_EVENTS_KEPT_MAX);
    struct mu_events *events = calloc(1, sizeof *events);
    if (events)
        events->slots = calloc(capacity, sizeof *events->slots);
    if (!events || !events->slots) {
        free(events);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to keep %u events", capacity);
    }
    events->capacity = capacity;
    events->oldest = 1;
    *ret_events = events;
    return MU_OK;
}

void mu_events_free(struct mu_events *events)
{
    if (!events)
        return;
    while (events->watchers) {
        struct watcher *watcher = events->watchers;
        events->watchers = watcher->next;
        free(watcher);
    }
    for (uint32_t i = 0; i < events->capacity; i++)
        mu_rpc_bytes_unref(events->slots[i].bytes);
    free(events->slots);
    free(events);
}

struct mu_rpc_bytes *mu_event_encode(struct mu_wire_arena *arena, const struct mu_event_record *event,
                                     struct mu_error *err)
{
    Muster__V1__WatchEventsResponse response = MUSTER__V1__WATCH_EVENTS_RESPONSE__INIT;
    Muster__V1__Event pb;
    const void *data = NULL;
    size_t size_bytes = 0;
    if (mu_event_to_pb(arena, event, &pb, err) != MU_OK)
        return NULL;
    response.event = &pb;
    if (mu_wire_pack(arena, &response.base, MU_WIRE_REPLY_BYTES_MAX, &data, &size_bytes, err) != MU_OK)
        return NULL;
    return mu_rpc_bytes_copy(data, size_bytes);
}

/* ---- watchers ---- */

/* Frees the watcher and ends its call: with OK when `err` is NULL. */
static void end_watch(struct mu_events *events, struct watcher *watcher, const struct mu_error *err)
{
    if (watcher->previous)
        watcher->previous->next = watcher->next;
    else
        events->watchers = watcher->next;
    if (watcher->next)
        watcher->next->previous = watcher->previous;
    events->watcher_count--;
    mu_rpc_call_set_user(watcher->call, NULL);
    if (err)
        mu_rpc_call_fail_error(watcher->call, err);
    else
        mu_rpc_call_finish(watcher->call, MU_RPC_OK, NULL);
    free(watcher);
}

static void cut_off(struct mu_events *events, struct watcher *watcher)
{
    struct mu_error err;
    uint64_t after = watcher->next_number - 1;
    mu_fail_for(&err, MU_ERR_LIMIT, MU_REASON_WATCH_TOO_SLOW, after,
                "this watcher reads too slowly and is %" PRIu64 " events behind: resume with after_event = %" PRIu64,
                events->newest - after, after);
    end_watch(events, watcher, &err);
}

static bool is_wanted(const struct mu_watch_request *request, const struct slot *slot)
{
    return request->job[0] == 0 || strcmp(request->job, slot->job) == 0;
}

/* Sends what there is, as far as the stream takes it. May end the watch. */
static void pump(struct mu_events *events, struct watcher *watcher)
{
    if (watcher->next_number < events->oldest) {
        cut_off(events, watcher);
        return;
    }
    while (!watcher->blocked && watcher->next_number <= events->newest) {
        const struct slot *slot = &events->slots[watcher->next_number % events->capacity];
        if (is_wanted(&watcher->request, slot)) {
            enum mu_status status = mu_rpc_call_send(watcher->call, slot->bytes);
            watcher->blocked = status == MU_ERR_LIMIT;
            if (status == MU_ERR_CANCELLED)
                return; /* CLOSED comes */
            if (watcher->blocked)
                break;
        }
        watcher->next_number++;
    }
    if (watcher->next_number > events->newest) {
        watcher->was_current = true;
        if (!watcher->request.follow)
            end_watch(events, watcher, NULL);
    } else if (watcher->was_current && events->newest - watcher->next_number >= MU_WATCH_LAG_MAX) {
        cut_off(events, watcher);
    }
}

void mu_events_add(struct mu_events *events, uint64_t number, const char *job, struct mu_rpc_bytes *bytes)
{
    MU_ASSERT(number > events->newest);
    if (number != events->newest + 1 || events->newest < events->oldest)
        events->oldest = number; /* the first one, or a gap: what is before it is not offered */
    events->newest = number;
    if (number - events->oldest >= events->capacity)
        events->oldest = number - events->capacity + 1;
    struct slot *slot = &events->slots[number % events->capacity];
    mu_rpc_bytes_unref(slot->bytes);
    slot->bytes = bytes;
    snprintf(slot->job, sizeof slot->job, "%s", job);
    for (struct watcher *watcher = events->watchers, *next; watcher; watcher = next) {
        next = watcher->next;
        pump(events, watcher);
    }
}

/* The number after which the newest `count` wanted events lie. */
static uint64_t before_newest(const struct mu_events *events, const struct mu_watch_request *request)
{
    uint64_t number = events->newest;
    for (uint32_t left = request->newest; number >= events->oldest && left > 0; number--)
        left -= is_wanted(request, &events->slots[number % events->capacity]);
    return number;
}

/* Events that do not exist any more, or not yet. */
static enum mu_status check_range(const struct mu_events *events, uint64_t after, struct mu_error *err)
{
    if (after > events->newest)
        return mu_fail_for(err, MU_ERR_INVALID, MU_REASON_EVENTS_AHEAD, events->newest,
                           "after_event: value %" PRIu64 " is not allowed: the newest event is %" PRIu64, after,
                           events->newest);
    if (after > 0 && after + 1 < events->oldest)
        return mu_fail_for(err, MU_ERR_INVALID, MU_REASON_EVENTS_COMPACTED, events->oldest - 1,
                           "events %" PRIu64 " to %" PRIu64
                           " are no longer kept: start again with after_event = %" PRIu64,
                           after + 1, events->oldest - 1, events->oldest - 1);
    return MU_OK;
}

void mu_events_watch(struct mu_events *events, struct mu_rpc_call *call, const struct mu_watch_request *request)
{
    struct mu_error err;
    if (check_range(events, request->after_event, &err) != MU_OK) {
        mu_rpc_call_fail_as(call, MU_RPC_OUT_OF_RANGE, &err);
        return;
    }
    struct watcher *watcher = calloc(1, sizeof *watcher);
    if (!watcher) {
        mu_rpc_call_finish(call, MU_RPC_RESOURCE_EXHAUSTED, "no memory for another watcher");
        return;
    }
    uint64_t after = request->after_event;
    if (after == 0)
        after = request->newest ? before_newest(events, request) : events->oldest - 1;
    *watcher = (struct watcher){.call = call, .request = *request, .next_number = after + 1, .next = events->watchers};
    if (events->watchers)
        events->watchers->previous = watcher;
    events->watchers = watcher;
    events->watcher_count++;
    mu_rpc_call_set_user(call, watcher);
    pump(events, watcher);
}

void mu_events_writable(struct mu_events *events, void *user)
{
    struct watcher *watcher = user;
    if (!watcher)
        return;
    watcher->blocked = false;
    pump(events, watcher);
}

void mu_events_closed(struct mu_events *events, void *user)
{
    if (user)
        end_watch(events, user, NULL);
}

void mu_events_end(struct mu_events *events)
{
    while (events->watchers) {
        struct mu_error err;
        uint64_t after = events->watchers->next_number - 1;
        mu_fail_for(&err, MU_ERR_UNAVAILABLE, MU_REASON_STOPPING, after,
                    "the coordinator is stopping: resume with after_event = %" PRIu64, after);
        end_watch(events, events->watchers, &err);
    }
}

uint64_t mu_events_oldest(const struct mu_events *events)
{
    return events->oldest;
}

uint32_t mu_events_watchers(const struct mu_events *events)
{
    return events->watcher_count;
}
