/* What the HTTP listener's thread asks of the core thread, which answers between two steps: the page of metrics, a
 * method of the service, or the newest events.
 *
 * Shared by both threads: the asker may give up, the core answers or drops, and whoever comes last frees it. */
#ifndef MU_COORDINATOR_QUESTION_H
#define MU_COORDINATOR_QUESTION_H

#include "coordinator/api.h"
#include "coordinator/posted.h"
#include "coordinator/sessions.h"
#include "coordinator/stats.h"

enum { MU_QUESTION_EVENTS_MAX = 500 };

enum mu_question_kind { MU_ASK_METRICS, MU_ASK_METHOD, MU_ASK_EVENTS };

struct mu_question; /* posted as MU_POSTED_QUESTION */

struct mu_question_answer {
    struct mu_error err;
    char *page; /* METRICS; from malloc */
    size_t page_size;
    bool may_write;                                      /* METRICS: the store takes changes */
    struct mu_rpc_bytes *reply;                          /* METHOD: the packed response */
    struct mu_rpc_bytes *events[MU_QUESTION_EVENTS_MAX]; /* EVENTS: packed WatchEventsResponses, oldest first */
    uint32_t event_count;
};

/* Listener's thread. `data`: the packed request of `method` (copied), as WatchEventsRequest for EVENTS. Waits for the
 * answer until `until_us` (monotonic); NULL: none came, or there was no memory. */
struct mu_question *mu_question_ask(struct mu_rpc_server *server, enum mu_question_kind kind, int method,
                                    const void *data, size_t size_bytes, uint64_t until_us);
struct mu_question_answer *mu_question_answer_of(struct mu_question *question);
void mu_question_free(struct mu_question *question); /* of one that was answered */

/* Core thread: from its answers' sources. */
struct mu_question_sources {
    const struct mu_coord *coord;
    struct mu_api *api;
    const struct mu_events *events;
    struct mu_outbox *outbox;
    struct mu_rpc_server *server;
    struct mu_sessions *sessions;
    const struct mu_stats *stats;
    uint32_t worker_series; /* METRICS: numbers of single workers, up to so many of them */
    bool may_write;
};
void mu_question_answer(struct mu_question *question, const struct mu_question_sources *sources);
void mu_question_drop(struct mu_question *question);

#endif
