/* Goodput: where the seconds of each worker went. Every microsecond from a worker's first Hello to the end of its job
 * is in exactly one class, so the classes of an account add up to wall time by construction.
 *
 * While a worker steps its time is UNREPORTED; each step report divides all of that by the phases it tells. (So what
 * lies between steps, or was reported to nobody while the coordinator was away, is taken to have gone like the steps
 * reported next.) Time that no report explains when stepping breaks off went into noticing the failure. Pure. */
#ifndef MU_COORDINATOR_CORE_GOODPUT_H
#define MU_COORDINATOR_CORE_GOODPUT_H

#include "plan/session.h"

enum mu_time_class {
    MU_TIME_USEFUL,        /* forward, backward, optimizer */
    MU_TIME_COMMUNICATION, /* exchanges that nothing was computed behind; also the least wait that any member had */
    MU_TIME_BUBBLE,        /* waits that the pipeline's schedule explains */
    MU_TIME_STRAGGLER,     /* waits beyond: for who is slower */
    MU_TIME_DATA,
    MU_TIME_CHECKPOINT, /* copies at boundaries, and the last checkpoint of the job */
    MU_TIME_REPLAYED,   /* steps that had been done before */
    MU_TIME_DETECT,     /* recovery: the step that broke off, until the loss was noticed */
    MU_TIME_PARK,       /* recovery: until everybody held still */
    MU_TIME_PLAN,       /* recovery: until the new generation was planned */
    MU_TIME_PREPARE,    /* recovery: connecting and moving state, until Go */
    MU_TIME_CHANGE,     /* planned changes of the generation: the same, for who joins, leaves or is slow */
    MU_TIME_WAITING,    /* the job waits for more workers */
    MU_TIME_STARTING,   /* loading the job, and its first generation until Go */
    MU_TIME_SPARE,      /* attached, without a rank that computes */
    MU_TIME_DOWN,       /* lost, and neither back nor replaced by one that attached later */
    MU_TIME_UNREPORTED, /* stepping, its report has not come yet */
    MU_TIME_CLASS_COUNT
};

/* "useful", "communication", ...: in metrics, messages and reports. */
extern const char *const mu_time_class_names[MU_TIME_CLASS_COUNT];
/* Lost is what is neither useful nor unreported. */
bool mu_time_class_is_lost(enum mu_time_class class);

/* Divides `us` as the report says; what comes out adds up to `us`. `bubble_us`: how much of the report's wait its
 * schedule explains; `floor_us`: how much of the rest every member has. `replayed`: how many of the report's steps had
 * been done before. A report that tells of no time makes all of it useful. */
void mu_goodput_split(const struct mu_step_report *report, uint64_t us, uint32_t replayed, uint64_t bubble_us,
                      uint64_t floor_us, uint64_t ret_us[MU_TIME_CLASS_COUNT]);

#endif
