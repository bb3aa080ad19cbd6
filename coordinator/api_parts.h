/* Parts of api.c and of other services: pages of lists, answers. The table of methods (api.h) is beside them. */
#ifndef MU_COORDINATOR_API_PARTS_H
#define MU_COORDINATOR_API_PARTS_H

#include "coordinator/api.h"
#include "coordinator/views.h"

uint32_t api_page_size(uint32_t asked);
/* A token that is a decimal number; empty is 0. */
enum mu_status api_get_token(const char *token, uint64_t *ret_value, struct mu_error *err) MU_WARN_UNUSED;
char *api_put_token(struct mu_wire_arena *arena, uint64_t value); /* NULL: no memory */
/* Adds the newest timings of one worker. False: no memory. */
bool api_add_timings(struct mu_wire_arena *arena, const struct mu_coord *coord, uint32_t slot, uint32_t per_worker,
                     Muster__V1__GetTimingsResponse *response, struct mu_error *err);

/* Ends a call whose answer rests on nothing that has to be durable first: with `reply`, or (status) with the error. */
void api_answer_now(struct mu_wire_arena *arena, struct mu_rpc_call *call, enum mu_status status,
                    const ProtobufCMessage *reply, struct mu_error *err);

#endif
