/* What requests ask to be changed of one job or worker, taken out of their messages. Pure but for what it borrows. */
#ifndef MU_COORDINATOR_API_CHANGES_H
#define MU_COORDINATOR_API_CHANGES_H

#include "coordinator/core/core.h"
#include "proto/wire_pb.h"

/* Texts are as they came: to be judged. NULL or empty: not given. */
struct api_change {
    enum mu_coord_event_kind kind;
    const char *field, *name; /* which job or worker, and what its name is called in the message */
    const char *reason, *by;
    ProtobufCBinaryData id;
    uint64_t expected_revision;
    struct mu_worker_policy workers; /* SCALE */
    bool has_amendment;
    struct mu_amendment amendment; /* AMEND, BRANCH */
    const char *new_job, *path;    /* BRANCH */
    uint64_t checkpoint;           /* BRANCH */
    bool rebase;                   /* BRANCH */
    enum mu_compute compute;       /* BRANCH */
};

/* Of a worker or node, where 0 is a revision, too. */
uint64_t api_expected(bool given, uint64_t revision);
enum mu_status api_read_change(int method, const ProtobufCMessage *base, struct api_change *ret_change,
                               struct mu_error *err) MU_WARN_UNUSED;

#endif
