/* Why a request was refused, for programs: a stable word beside the line for people (struct mu_error). The words are
 * part of the protocol (docs/protocol.md); numbers are not, and stay inside the process. Pure. */
#ifndef MU_COMMON_REASON_H
#define MU_COMMON_REASON_H

#include <stdint.h>

enum mu_reason {
    MU_REASON_NONE, /* the status says it */
    MU_REASON_FIELD_INVALID,
    MU_REASON_JOB_UNKNOWN,
    MU_REASON_WORKER_UNKNOWN,
    MU_REASON_CHECKPOINT_UNKNOWN,
    MU_REASON_JOB_EXISTS,
    MU_REASON_JOB_OVER,
    MU_REASON_JOB_NOT_STEPPING,
    MU_REASON_CHECKPOINTS_OFF,
    MU_REASON_CHECKPOINT_UNDER_WAY,
    MU_REASON_REVISION_CHANGED,  /* value: the revision now */
    MU_REASON_REQUEST_ID_REUSED, /* the id belongs to a request that said something else */
    MU_REASON_EVENTS_COMPACTED,  /* value: after_event of the oldest events kept */
    MU_REASON_EVENTS_AHEAD,      /* value: number of the newest event */
    MU_REASON_WATCH_TOO_SLOW,    /* value: after_event to resume with */
    MU_REASON_STORE_FULL,
    MU_REASON_LIMIT_REACHED,
    MU_REASON_STOPPING, /* value: after_event to resume with; 0: not a watch */
    /* of the client alone, never on the wire */
    MU_REASON_CANNOT_CONNECT,  /* the request was not sent */
    MU_REASON_CONNECTION_LOST, /* it may have been carried out */
    MU_REASON_COUNT
};

/* "FIELD_INVALID"; NULL for MU_REASON_NONE. */
const char *mu_reason_name(enum mu_reason reason);
/* MU_REASON_NONE for a word that this version does not know. */
enum mu_reason mu_reason_find(const char *name);
/* What a program should do about it, in a few words; "" when the line for people says it all. */
const char *mu_reason_advice(enum mu_reason reason);
/* How long to wait before the same request may be repeated as it is; 0: repeating it does not help. */
uint32_t mu_reason_retry_ms(enum mu_reason reason);
/* What the value beside the reason is called ("revision", "after_event"); NULL: it has none. */
const char *mu_reason_value_name(enum mu_reason reason);

#endif
