#include "common/reason.h"

#include <stddef.h>
#include <string.h>

static const struct {
    const char *name, *advice, *value_name;
    uint32_t retry_ms;
} reasons[MU_REASON_COUNT] = {
    [MU_REASON_NONE] = {NULL, "", NULL, 0},
    [MU_REASON_FIELD_INVALID] = {"FIELD_INVALID", "correct the field", NULL, 0},
    [MU_REASON_JOB_UNKNOWN] = {"JOB_UNKNOWN", "list the jobs", NULL, 0},
    [MU_REASON_WORKER_UNKNOWN] = {"WORKER_UNKNOWN", "list the workers", NULL, 0},
    [MU_REASON_CHECKPOINT_UNKNOWN] = {"CHECKPOINT_UNKNOWN", "list the job's checkpoints", NULL, 0},
    [MU_REASON_JOB_EXISTS] = {"JOB_EXISTS", "choose another name, or cancel that job first", NULL, 0},
    [MU_REASON_JOB_OVER] = {"JOB_OVER", "", NULL, 0},
    [MU_REASON_JOB_NOT_STEPPING] = {"JOB_NOT_STEPPING", "repeat when the job's phase is STEPPING", NULL, 1000},
    [MU_REASON_CHECKPOINTS_OFF] = {"CHECKPOINTS_OFF", "submit the job with checkpoint.path", NULL, 0},
    [MU_REASON_CHECKPOINT_UNDER_WAY] = {"CHECKPOINT_UNDER_WAY", "repeat after checkpoint_committed or _failed", NULL,
                                        1000},
    [MU_REASON_REVISION_CHANGED] = {"REVISION_CHANGED", "read the job again and decide anew", "revision", 0},
    [MU_REASON_REQUEST_ID_REUSED] = {"REQUEST_ID_REUSED", "draw a new request_id for every change", NULL, 0},
    [MU_REASON_EVENTS_COMPACTED] = {"EVENTS_COMPACTED", "read the present state, then watch with after_event",
                                    "after_event", 0},
    [MU_REASON_EVENTS_AHEAD] = {"EVENTS_AHEAD", "this is another store than the one the number is from", "newest_event",
                                0},
    [MU_REASON_WATCH_TOO_SLOW] = {"WATCH_TOO_SLOW", "resume with after_event, and read faster", "after_event", 1},
    [MU_REASON_STORE_FULL] = {"STORE_FULL", "free space on the coordinator's disk", NULL, 5000},
    [MU_REASON_LIMIT_REACHED] = {"LIMIT_REACHED", "", NULL, 0},
    [MU_REASON_STOPPING] = {"STOPPING", "repeat; a change with the same request_id", "after_event", 200},
    [MU_REASON_CANNOT_CONNECT] = {"CANNOT_CONNECT", "check the address and that musterd runs there", NULL, 200},
    [MU_REASON_CONNECTION_LOST] = {"CONNECTION_LOST", "repeat; a change with the same request_id", NULL, 200},
};

const char *mu_reason_name(enum mu_reason reason)
{
    return reasons[reason].name;
}

enum mu_reason mu_reason_find(const char *name)
{
    for (int i = MU_REASON_NONE + 1; i < MU_REASON_COUNT; i++)
        if (strcmp(reasons[i].name, name) == 0)
            return (enum mu_reason)i;
    return MU_REASON_NONE;
}

const char *mu_reason_advice(enum mu_reason reason)
{
    return reasons[reason].advice;
}

uint32_t mu_reason_retry_ms(enum mu_reason reason)
{
    return reasons[reason].retry_ms;
}

const char *mu_reason_value_name(enum mu_reason reason)
{
    return reasons[reason].value_name;
}
