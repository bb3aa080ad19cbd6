/* The record of where a worker's time went: a part of records.c. */
#ifndef MU_COORDINATOR_RECORDS_ACCOUNT_H
#define MU_COORDINATOR_RECORDS_ACCOUNT_H

#include "coordinator/records.h"

enum mu_status record_put_account(struct mu_wire_arena *arena, const struct mu_account_record *account,
                                  Muster__V1__AccountRecord **ret_pb, struct mu_error *err);
enum mu_status record_get_account(const Muster__V1__AccountRecord *pb, struct mu_account_record *out,
                                  struct mu_error *err);

#endif
