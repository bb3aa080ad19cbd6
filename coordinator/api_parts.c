#include "coordinator/api_parts.h"

#include <stdio.h>
#include <string.h>

#define SERVICE "/muster.v1.MusterService/"
const struct mu_rpc_method mu_api_methods[MU_METHOD_COUNT] = {
    {"/muster.v1.WorkerService/Attach", MU_RPC_BIDI_STREAM, MU_METHOD_ATTACH, MU_RPC_PRIORITY},
    {SERVICE "SubmitJob", MU_RPC_UNARY, MU_METHOD_SUBMIT_JOB, MU_RPC_CHANGE},
    {SERVICE "GetJob", MU_RPC_UNARY, MU_METHOD_GET_JOB, MU_RPC_QUESTION},
    {SERVICE "ListJobs", MU_RPC_UNARY, MU_METHOD_LIST_JOBS, MU_RPC_QUESTION},
    {SERVICE "CancelJob", MU_RPC_UNARY, MU_METHOD_CANCEL_JOB, MU_RPC_CHANGE},
    {SERVICE "ListWorkers", MU_RPC_UNARY, MU_METHOD_LIST_WORKERS, MU_RPC_QUESTION},
    {SERVICE "DrainWorker", MU_RPC_UNARY, MU_METHOD_DRAIN_WORKER, MU_RPC_CHANGE},
    {SERVICE "UndrainWorker", MU_RPC_UNARY, MU_METHOD_UNDRAIN_WORKER, MU_RPC_CHANGE},
    {SERVICE "TriggerCheckpoint", MU_RPC_UNARY, MU_METHOD_TRIGGER_CHECKPOINT, MU_RPC_CHANGE},
    {SERVICE "ListCheckpoints", MU_RPC_UNARY, MU_METHOD_LIST_CHECKPOINTS, MU_RPC_QUESTION},
    {SERVICE "GetTimings", MU_RPC_UNARY, MU_METHOD_GET_TIMINGS, MU_RPC_QUESTION},
    {SERVICE "GetGoodput", MU_RPC_UNARY, MU_METHOD_GET_GOODPUT, MU_RPC_QUESTION},
    {SERVICE "WatchEvents", MU_RPC_SERVER_STREAM, MU_METHOD_WATCH_EVENTS, MU_RPC_QUESTION},
    {SERVICE "SaveSnapshot", MU_RPC_UNARY, MU_METHOD_SAVE_SNAPSHOT, MU_RPC_QUESTION},
    {"/muster.v1.WorkerService/ReportExit", MU_RPC_UNARY, MU_METHOD_REPORT_EXIT, MU_RPC_PRIORITY},
    {SERVICE "ListNodes", MU_RPC_UNARY, MU_METHOD_LIST_NODES, MU_RPC_QUESTION},
    {SERVICE "OrderNode", MU_RPC_UNARY, MU_METHOD_ORDER_NODE, MU_RPC_CHANGE},
    {SERVICE "ScaleJob", MU_RPC_UNARY, MU_METHOD_SCALE_JOB, MU_RPC_CHANGE},
    {SERVICE "AmendJob", MU_RPC_UNARY, MU_METHOD_AMEND_JOB, MU_RPC_CHANGE},
    {SERVICE "BranchJob", MU_RPC_UNARY, MU_METHOD_BRANCH_JOB, MU_RPC_CHANGE},
    {"/muster.v1.ProbeService/Probe", MU_RPC_UNARY, MU_METHOD_PROBE, MU_RPC_CHANGE},
    {"/muster.v1.ProbeService/ReadProbe", MU_RPC_UNARY, MU_METHOD_READ_PROBE, MU_RPC_QUESTION},
    {"/grpc.health.v1.Health/Check", MU_RPC_UNARY, MU_METHOD_HEALTH_CHECK, MU_RPC_QUESTION},
    {"/grpc.health.v1.Health/Watch", MU_RPC_SERVER_STREAM, MU_METHOD_HEALTH_WATCH, MU_RPC_QUESTION},
    {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", MU_RPC_BIDI_STREAM, MU_METHOD_REFLECTION,
     MU_RPC_QUESTION},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", MU_RPC_BIDI_STREAM, MU_METHOD_REFLECTION_ALPHA,
     MU_RPC_QUESTION},
    {"/muster.v1.TokenService/CreateToken", MU_RPC_UNARY, MU_METHOD_CREATE_TOKEN, MU_RPC_CHANGE},
    {"/muster.v1.TokenService/ListTokens", MU_RPC_UNARY, MU_METHOD_LIST_TOKENS, MU_RPC_QUESTION},
    {"/muster.v1.TokenService/RevokeToken", MU_RPC_UNARY, MU_METHOD_REVOKE_TOKEN, MU_RPC_CHANGE},
    {"/muster.v1.TokenService/Join", MU_RPC_UNARY, MU_METHOD_JOIN, MU_RPC_QUESTION}, /* strangers call it */
    {"/muster.v1.TokenService/Renew", MU_RPC_UNARY, MU_METHOD_RENEW, MU_RPC_QUESTION},
    {"/muster.v1.DiagnosticService/Recall", MU_RPC_UNARY, MU_METHOD_RECALL, MU_RPC_QUESTION},
    {"/muster.v1.DiagnosticService/ReadRecall", MU_RPC_UNARY, MU_METHOD_READ_RECALL, MU_RPC_QUESTION},
    {"/muster.v1.DiagnosticService/Recollect", MU_RPC_UNARY, MU_METHOD_RECOLLECT, MU_RPC_CHANGE},
    {"/muster.v1.DiagnosticService/ListHangReports", MU_RPC_UNARY, MU_METHOD_LIST_HANG_REPORTS, MU_RPC_QUESTION},
    {"/muster.v1.DiagnosticService/GetHangReport", MU_RPC_UNARY, MU_METHOD_GET_HANG_REPORT, MU_RPC_QUESTION},
    {"/muster.v1.DiagnosticService/ReadCoordinator", MU_RPC_UNARY, MU_METHOD_READ_COORDINATOR, MU_RPC_QUESTION},
};

uint32_t api_page_size(uint32_t asked)
{
    return asked == 0 ? MU_API_PAGE_DEFAULT : asked < MU_API_PAGE_MAX ? asked : MU_API_PAGE_MAX;
}

enum mu_status api_get_token(const char *token, uint64_t *ret_value, struct mu_error *err)
{
    uint64_t value = 0;
    size_t length = strlen(token);
    bool good = length <= 18;
    for (size_t i = 0; good && i < length; i++) {
        good = token[i] >= '0' && token[i] <= '9';
        value = value * 10 + (uint64_t)(token[i] - '0');
    }
    if (!good)
        return mu_fail(err, MU_ERR_INVALID,
                       "page_token: '%.40s' is not one of this list; use next_page_token as it was given", token);
    *ret_value = value;
    return MU_OK;
}

char *api_put_token(struct mu_wire_arena *arena, uint64_t value)
{
    char *token = mu_wire_arena_alloc(arena, 24);
    if (token)
        snprintf(token, 24, "%llu", (unsigned long long)value);
    return token;
}

bool api_add_timings(struct mu_wire_arena *arena, const struct mu_coord *coord, uint32_t slot, uint32_t per_worker,
                     Muster__V1__GetTimingsResponse *response, struct mu_error *err)
{
    for (uint32_t back = 0; back < per_worker; back++) {
        struct mu_timing_view *view = mu_wire_arena_alloc(arena, sizeof *view);
        if (!view)
            return false;
        if (!mu_coord_timing_view(coord, slot, back, view))
            break;
        Muster__V1__Timing *timing = mu_view_timing(arena, view, err);
        if (!timing)
            return false;
        response->timings[response->n_timings++] = timing;
    }
    return true;
}

void api_answer_now(struct mu_wire_arena *arena, struct mu_rpc_call *call, enum mu_status status,
                    const ProtobufCMessage *reply, struct mu_error *err)
{
    const void *packed = NULL;
    size_t packed_bytes = 0;
    if (status == MU_OK)
        status = mu_wire_pack(arena, reply, MU_WIRE_REPLY_BYTES_MAX, &packed, &packed_bytes, err);
    if (status != MU_OK) {
        mu_rpc_call_fail_error(call, err);
        return;
    }
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(packed, packed_bytes);
    mu_rpc_call_reply(call, bytes);
    mu_rpc_bytes_unref(bytes);
}
