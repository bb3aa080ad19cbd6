/* The event stream as its readers want it: every event once, in order, over restarts of the coordinator and over its
 * cutting off who reads too slowly. One thread runs it; any thread may finish or stop it. */
#ifndef MU_CLI_EVENT_STREAM_H
#define MU_CLI_EVENT_STREAM_H

#include <pthread.h>

#include "cli/cli.h"

enum { MU_EVENT_STREAM_RETRY_MS = 200, MU_EVENT_STREAM_GIVE_UP_MS = 60000 };

struct mu_event_stream {
    /* Set by the caller. */
    struct mu_cli *cli;                     /* connected: a first failure counts as the coordinator being away */
    Muster__V1__WatchEventsRequest request; /* strings are borrowed; after_event moves on with what was shown */
    void (*show)(void *ctx, const Muster__V1__Event *event);
    void *ctx;
    /* Private; start from zeros, by mu_event_stream_init. */
    pthread_mutex_t lock;
    struct mu_rpc_reader *reader;
    bool finishing, stopped;
};

void mu_event_stream_init(struct mu_event_stream *stream);
/* Shows events until the end: of past ones (without `follow`), or after mu_event_stream_finish or _stop. An error that
 * waiting does not mend, or a coordinator that stays away, ends it too. */
enum mu_status mu_event_stream_run(struct mu_event_stream *stream, struct mu_error *err) MU_WARN_UNUSED;
/* What has happened up to now is still shown, then the run ends. */
void mu_event_stream_finish(struct mu_event_stream *stream);
/* The run ends now. */
void mu_event_stream_stop(struct mu_event_stream *stream);

#endif
