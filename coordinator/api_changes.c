#include "coordinator/api_changes.h"

#include "coordinator/api.h"

uint64_t api_expected(bool given, uint64_t revision)
{
    if (!given)
        return 0;
    return revision ? revision : MU_REVISION_NONE;
}

static void read_cancel(const Muster__V1__CancelJobRequest *request, struct api_change *out)
{
    *out = (struct api_change){.kind = MU_CE_CANCEL,
                               .field = "name",
                               .name = request->name,
                               .reason = request->reason,
                               .id = request->request_id,
                               .expected_revision = request->expected_revision};
}

static void read_drain(const Muster__V1__DrainWorkerRequest *request, struct api_change *out)
{
    *out = (struct api_change){.kind = MU_CE_DRAIN,
                               .field = "worker",
                               .name = request->worker,
                               .reason = request->reason,
                               .id = request->request_id,
                               .expected_revision =
                                   api_expected(request->optional_expected_revision_case, request->expected_revision)};
}

static void read_undrain(const Muster__V1__UndrainWorkerRequest *request, struct api_change *out)
{
    *out = (struct api_change){.kind = MU_CE_UNDRAIN,
                               .field = "worker",
                               .name = request->worker,
                               .id = request->request_id,
                               .expected_revision =
                                   api_expected(request->optional_expected_revision_case, request->expected_revision)};
}

static void read_checkpoint(const Muster__V1__TriggerCheckpointRequest *request, struct api_change *out)
{
    *out = (struct api_change){.kind = MU_CE_CHECKPOINT,
                               .field = "job",
                               .name = request->job,
                               .id = request->request_id,
                               .expected_revision = request->expected_revision};
}

static void read_scale(const Muster__V1__ScaleJobRequest *request, struct api_change *out)
{
    *out = (struct api_change){
        .kind = MU_CE_SCALE,
        .field = "job",
        .name = request->job,
        .id = request->request_id,
        .expected_revision = request->expected_revision,
        .workers = {request->min, request->max, request->optional_spares_case ? request->spares : UINT32_MAX}};
}

static void read_amendment(const Muster__V1__Amendment *amendment, struct api_change *out)
{
    out->has_amendment = amendment != NULL;
    if (amendment)
        mu_wire_amendment_from_pb(amendment, &out->amendment);
}

static void read_amend(const Muster__V1__AmendJobRequest *request, struct api_change *out)
{
    *out = (struct api_change){.kind = MU_CE_AMEND,
                               .field = "job",
                               .name = request->job,
                               .by = request->by,
                               .id = request->request_id,
                               .expected_revision = request->expected_revision};
    read_amendment(request->amendment, out);
}

static void read_branch(const Muster__V1__BranchJobRequest *request, struct api_change *out)
{
    *out = (struct api_change){.kind = MU_CE_BRANCH,
                               .field = "job",
                               .name = request->job,
                               .by = request->by,
                               .id = request->request_id,
                               .expected_revision = request->expected_revision,
                               .new_job = request->name,
                               .path = request->checkpoint_path,
                               .checkpoint = request->checkpoint,
                               .rebase = request->rebase,
                               .compute = (enum mu_compute)request->compute};
    read_amendment(request->amendment, out);
}

enum mu_status api_read_change(int method, const ProtobufCMessage *base, struct api_change *ret_change,
                               struct mu_error *err)
{
    switch (method) {
    case MU_METHOD_CANCEL_JOB:
        read_cancel((const Muster__V1__CancelJobRequest *)base, ret_change);
        break;
    case MU_METHOD_DRAIN_WORKER:
        read_drain((const Muster__V1__DrainWorkerRequest *)base, ret_change);
        break;
    case MU_METHOD_UNDRAIN_WORKER:
        read_undrain((const Muster__V1__UndrainWorkerRequest *)base, ret_change);
        break;
    case MU_METHOD_TRIGGER_CHECKPOINT:
        read_checkpoint((const Muster__V1__TriggerCheckpointRequest *)base, ret_change);
        break;
    case MU_METHOD_SCALE_JOB:
        read_scale((const Muster__V1__ScaleJobRequest *)base, ret_change);
        break;
    case MU_METHOD_AMEND_JOB:
        read_amend((const Muster__V1__AmendJobRequest *)base, ret_change);
        break;
    case MU_METHOD_BRANCH_JOB:
        read_branch((const Muster__V1__BranchJobRequest *)base, ret_change);
        break;
    default:
        return mu_fail(err, MU_ERR_INTERNAL, "method %d changes nothing", method);
    }
    if (ret_change->kind == MU_CE_AMEND && !ret_change->has_amendment)
        return mu_fail(err, MU_ERR_INVALID, "amendment: is missing: what is to be changed");
    return MU_OK;
}
