/* What workers tell of themselves and their hosts (struct mu_vitals), kept with the stream that it came by and
 * forgotten with it. For people: no decision looks at it. Core thread. */
#ifndef MU_COORDINATOR_VITALS_H
#define MU_COORDINATOR_VITALS_H

#include "coordinator/sessions.h"
#include "proto/wire_pb.h"

/* How counters become rates and numbers units: the fields of VitalSigns, in their order. */
struct mu_vital_law {
    bool is_rate;
    double unit; /* of the worker's number */
};
extern const struct mu_vital_law mu_vital_laws[MU_VITAL_COUNT];
const char *mu_vital_name(enum mu_vital vital); /* of the field */

struct mu_vitals_heard {
    uint64_t at_us;
    struct mu_vitals newest;
    double signs[MU_VITAL_COUNT]; /* VitalSigns; NAN: a rate that takes a second report */
    struct mu_gpu_sample gpu[];   /* one, of those that have told of a GPU: newest.gpu */
};

/* By how much counters have grown since the report before. */
struct mu_vitals_news {
    uint64_t network_errors, gpu_xids, gpu_failures;
};

/* Keeps them in *heard, which is made with the first; without memory nothing is kept. */
struct mu_vitals_news mu_vitals_hear(struct mu_vitals_heard **heard, const struct mu_vitals *vitals, uint64_t now_us);

/* Of the worker whose stream that is. NULL: none has come (or `sessions` is NULL). */
const struct mu_vitals_heard *mu_vitals_of(struct mu_sessions *sessions, uint64_t session);

#endif
