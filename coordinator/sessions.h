/* The workers' streams: a table with O(1) look-up by session number. A number is a slot and how often that was used, so
 * it never comes again. Core thread only. The table is allocated once. */
#ifndef MU_COORDINATOR_SESSIONS_H
#define MU_COORDINATOR_SESSIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"
#include "plan/session.h"
#include "rpc/server.h"

enum { MU_SESSIONS_MAX = 1 << 20 };

struct mu_session {
    uint64_t number; /* 0: the slot is free */
    struct mu_rpc_call *call;
    uint64_t opened_us;
    char name[MU_WORKER_NAME_SIZE]; /* under TLS: the one that its certificate permits; "": not known yet */
    struct mu_vitals_heard *vitals; /* vitals.h; NULL: none came */
    bool known;                     /* it has said Hello: the core has heard of it */
    bool closing; /* the core has closed it, what it says now is not heard; or it broke and the core has been told */
    uint32_t uses, next, previous;
};

struct mu_sessions;

enum mu_status mu_sessions_new(uint32_t capacity, struct mu_sessions **ret_sessions,
                               struct mu_error *err) MU_WARN_UNUSED;
void mu_sessions_free(struct mu_sessions *sessions); /* NULL is fine */

/* NULL when the table is full. It has not said Hello. */
struct mu_session *mu_sessions_open(struct mu_sessions *sessions, struct mu_rpc_call *call, uint64_t now_us);
struct mu_session *mu_sessions_find(struct mu_sessions *sessions, uint64_t number); /* NULL: gone */
void mu_sessions_close(struct mu_sessions *sessions, struct mu_session *session);
void mu_sessions_hello(struct mu_sessions *sessions, struct mu_session *session);
/* The one that has been silent for longest since it opened; NULL: none waits. */
struct mu_session *mu_sessions_oldest_silent(struct mu_sessions *sessions);
/* Any open one, NULL when there is none: to end all. */
struct mu_session *mu_sessions_any(struct mu_sessions *sessions);
uint32_t mu_sessions_count(const struct mu_sessions *sessions);

#endif
