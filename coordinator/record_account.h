/* The record of where a worker's time went: a part of records.c. */
#ifndef MU_COORDINATOR_RECORD_ACCOUNT_H
#define MU_COORDINATOR_RECORD_ACCOUNT_H

#include "coordinator/records.h"

enum mu_status mu_account_record_put(struct mu_wire_arena *arena, const struct mu_account_record *account,
                                     Muster__V1__AccountRecord **ret_pb, struct mu_error *err);
enum mu_status mu_account_record_get(const Muster__V1__AccountRecord *pb, struct mu_account_record *out,
                                     struct mu_error *err);

#endif
