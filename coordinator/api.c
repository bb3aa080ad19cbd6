#include "coordinator/api_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "coordinator/api_changes.h"
#include "coordinator/nodes.h"
#include "coordinator/snapshot.h"
#include "coordinator/views.h"

enum { SNAPSHOT_PAGE_BYTES = 2 << 20 };

/* An answer on its way through the outbox. */
struct answer {
    struct mu_outbox_item item;
    struct mu_rpc_call *call;
    struct mu_rpc_bytes *bytes; /* NULL: the call fails */
    struct mu_error err;
};

/* A request that the core has not answered yet, or whose answer is not built yet. */
struct pending {
    struct pending *next;
    uint64_t cookie;
    int method;
    char name[MU_JOB_NAME_SIZE]; /* SUBMIT, SCALE, AMEND, BRANCH: of the job that is answered with */
    struct answer *answer;
    bool replied;
    struct mu_coord_reply reply; /* without its text */
    char text[MU_TEXT_SIZE];     /* EXITED */
};

struct mu_api {
    struct mu_api_config config;
    struct mu_wire_arena arena;
    const void *request; /* being handled, as it came */
    size_t request_bytes;
    struct pending *pending;
    uint64_t last_cookie;
    bool any_replied;
    uint64_t snapshot; /* number of the newest one, of which pages are still wanted */
    uint8_t *snapshot_bytes;
    size_t snapshot_size;
    struct answer *asked;
};

enum mu_status mu_api_new(const struct mu_api_config *config, struct mu_api **ret_api, struct mu_error *err)
{
    struct mu_api *api = calloc(1, sizeof *api);
    if (!api)
        return mu_fail(err, MU_ERR_NO_MEMORY, "api: no memory");
    api->config = *config;
    mu_wire_arena_init(&api->arena);
    *ret_api = api;
    return MU_OK;
}

void mu_api_free(struct mu_api *api)
{
    if (!api)
        return;
    while (api->pending) {
        struct pending *pending = api->pending;
        api->pending = pending->next;
        if (pending->answer)
            mu_rpc_bytes_unref(pending->answer->bytes);
        free(pending->answer);
        free(pending);
    }
    mu_wire_arena_fini(&api->arena);
    free(api->snapshot_bytes);
    free(api);
}

/* ---- answers ---- */

static void run_answer(void *ctx, struct mu_outbox_item *item, bool drop)
{
    (void)ctx;
    struct answer *answer = (struct answer *)item;
    if (!drop && answer->bytes)
        mu_rpc_call_reply(answer->call, answer->bytes);
    else if (!drop)
        mu_rpc_call_fail_error(answer->call, &answer->err);
    mu_rpc_bytes_unref(answer->bytes);
    free(answer);
}

static struct answer *new_answer(struct mu_rpc_call *call)
{
    struct answer *answer = calloc(1, sizeof *answer);
    if (answer)
        answer->call = call;
    else
        mu_rpc_call_fail(call, MU_RPC_RESOURCE_EXHAUSTED, "no memory for the answer");
    return answer;
}

static void fail_call(struct mu_api *api, struct mu_rpc_call *call, const struct mu_error *err)
{
    struct answer *answer = new_answer(call);
    if (!answer)
        return;
    answer->err = *err;
    mu_outbox_hold_answer(api->config.outbox, &answer->item, run_answer);
}

/* Packs `message` into the answer, or its failure. */
static void fill_answer(struct mu_api *api, struct answer *answer, const ProtobufCMessage *message)
{
    const void *data = NULL;
    size_t size_bytes = 0;
    if (mu_wire_pack(&api->arena, message, MU_WIRE_REPLY_BYTES_MAX, &data, &size_bytes, &answer->err) == MU_OK)
        answer->bytes = mu_rpc_bytes_copy(data, size_bytes);
}

/* `call` NULL: to mu_api_ask. */
static void answer_call(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *message)
{
    if (!call) {
        fill_answer(api, api->asked, message);
        return;
    }
    struct answer *answer = new_answer(call);
    if (!answer)
        return;
    fill_answer(api, answer, message);
    mu_outbox_hold_answer(api->config.outbox, &answer->item, run_answer);
}

/* ---- parts of requests ---- */

static enum mu_status get_name(const char *pb, const char *field, char *out, struct mu_error *err)
{
    return mu_wire_get_string(pb, MU_WIRE_NAME, field, out, MU_JOB_NAME_SIZE, err);
}

static enum mu_status find_job(struct mu_api *api, const char *pb, const char *field, struct mu_job_view **ret_view,
                               struct mu_error *err)
{
    char name[MU_JOB_NAME_SIZE];
    enum mu_status status = get_name(pb, field, name, err);
    if (status)
        return status;
    struct mu_job_view *view = mu_wire_arena_alloc(&api->arena, sizeof *view);
    if (!view)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
    if (!mu_coord_job_find(api->config.coord, name, view))
        return mu_fail_for(err, MU_ERR_NOT_FOUND, MU_REASON_JOB_UNKNOWN, 0, "there is no job '%s'", name);
    *ret_view = view;
    return MU_OK;
}

/* ---- questions ---- */

static enum mu_status get_job(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                              struct mu_error *err)
{
    struct mu_job_view *view = NULL;
    enum mu_status status = find_job(api, ((const Muster__V1__GetJobRequest *)base)->name, "name", &view, err);
    if (status)
        return status;
    Muster__V1__GetJobResponse response = MUSTER__V1__GET_JOB_RESPONSE__INIT;
    response.job = mu_view_job(&api->arena, view, err);
    if (!response.job)
        return err->status;
    answer_call(api, call, &response.base);
    return MU_OK;
}

static enum mu_status list_jobs(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                struct mu_error *err)
{
    const Muster__V1__ListJobsRequest *request = (const Muster__V1__ListJobsRequest *)base;
    Muster__V1__ListJobsResponse response = MUSTER__V1__LIST_JOBS_RESPONSE__INIT;
    uint32_t limit = api_page_size(request->page_size), count = mu_coord_job_count(api->config.coord);
    char after[MU_JOB_NAME_SIZE];
    enum mu_status status =
        mu_wire_get_string(request->page_token, MU_WIRE_NAME_EMPTY, "page_token", after, sizeof after, err);
    if (status)
        return status;
    response.jobs = mu_wire_arena_alloc(&api->arena, sizeof *response.jobs * (limit < count ? limit : count));
    struct mu_job_view *view = NULL;
    for (uint32_t i = 0; response.jobs && i < count; i++) {
        if (!view && !(view = mu_wire_arena_alloc(&api->arena, sizeof *view)))
            break;
        if (!mu_coord_job_view(api->config.coord, i, view) || strcmp(view->record.spec.name, after) <= 0)
            continue;
        if (response.n_jobs == limit) {
            response.next_page_token = response.jobs[limit - 1]->name;
            break;
        }
        response.jobs[response.n_jobs] = mu_view_job(&api->arena, view, err);
        if (!response.jobs[response.n_jobs])
            return err->status;
        response.n_jobs++;
        view = NULL; /* the message borrows it */
    }
    answer_call(api, call, &response.base);
    return MU_OK;
}

static enum mu_status list_workers(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                   struct mu_error *err)
{
    const Muster__V1__ListWorkersRequest *request = (const Muster__V1__ListWorkersRequest *)base;
    Muster__V1__ListWorkersResponse response = MUSTER__V1__LIST_WORKERS_RESPONSE__INIT;
    uint32_t limit = api_page_size(request->page_size), slots = mu_coord_worker_slots(api->config.coord);
    struct mu_job_view *job = NULL;
    uint64_t slot = 0;
    enum mu_status status = request->job[0] ? find_job(api, request->job, "job", &job, err) : MU_OK;
    if (status || (status = api_get_token(request->page_token, &slot, err)))
        return status;
    response.workers = mu_wire_arena_alloc(&api->arena, sizeof *response.workers * limit);
    struct mu_worker_view *view = NULL;
    for (; response.workers && slot < slots; slot++) {
        if (!view && !(view = mu_wire_arena_alloc(&api->arena, sizeof *view)))
            break;
        if (!mu_coord_worker_view(api->config.coord, (uint32_t)slot, view) ||
            (job && strcmp(job->record.spec.name, view->job) != 0) ||
            (request->worker[0] && strcmp(request->worker, view->name) != 0))
            continue;
        if (response.n_workers == limit) {
            response.next_page_token = api_put_token(&api->arena, slot);
            break;
        }
        response.workers[response.n_workers] = mu_view_worker(&api->arena, view, err);
        if (!response.workers[response.n_workers] ||
            (request->worker[0] && mu_view_vitals(&api->arena, api->config.coord, api->config.sessions, view,
                                                  response.workers[response.n_workers], err) != MU_OK))
            return err->status;
        response.n_workers++;
        view = NULL;
    }
    answer_call(api, call, &response.base);
    return MU_OK;
}

/* The token is the last name given; a node's name may be any text. */
static enum mu_status list_nodes(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                 struct mu_error *err)
{
    const Muster__V1__ListNodesRequest *request = (const Muster__V1__ListNodesRequest *)base;
    Muster__V1__ListNodesResponse response = MUSTER__V1__LIST_NODES_RESPONSE__INIT;
    size_t count = 0, first = 0, limit = api_page_size(request->page_size);
    enum mu_status status = mu_nodes_list(&api->arena, api->config.coord, &response.nodes, &count, err);
    if (status)
        return status;
    while (first < count && strcmp(response.nodes[first]->name, request->page_token) <= 0)
        first++;
    response.nodes += first;
    response.n_nodes = count - first < limit ? count - first : limit;
    if (first + response.n_nodes < count)
        response.next_page_token = response.nodes[limit - 1]->name;
    answer_call(api, call, &response.base);
    return MU_OK;
}

static enum mu_status list_checkpoints(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                       struct mu_error *err)
{
    const Muster__V1__ListCheckpointsRequest *request = (const Muster__V1__ListCheckpointsRequest *)base;
    Muster__V1__ListCheckpointsResponse response = MUSTER__V1__LIST_CHECKPOINTS_RESPONSE__INIT;
    uint32_t limit = api_page_size(request->page_size);
    struct mu_job_view *job = NULL;
    uint64_t after = 0;
    enum mu_status status = find_job(api, request->job, "job", &job, err);
    if (status == MU_OK)
        status = api_get_token(request->page_token, &after, err);
    if (status)
        return status;
    response.checkpoints = mu_wire_arena_alloc(&api->arena, sizeof *response.checkpoints * limit);
    struct mu_checkpoint_record *record = NULL;
    for (uint32_t i = 0; response.checkpoints; i++) {
        if (!record && !(record = mu_wire_arena_alloc(&api->arena, sizeof *record)))
            break;
        if (!mu_coord_checkpoint_view(api->config.coord, job->record.spec.name, i, record))
            break;
        if (record->number <= after)
            continue;
        if (response.n_checkpoints == limit) {
            response.next_page_token = api_put_token(&api->arena, response.checkpoints[limit - 1]->number);
            break;
        }
        response.checkpoints[response.n_checkpoints] = mu_view_checkpoint(&api->arena, record, err);
        if (!response.checkpoints[response.n_checkpoints])
            return err->status;
        response.checkpoints[response.n_checkpoints]->borrowers = mu_coord_borrowers(api->config.coord, record);
        response.n_checkpoints++;
        record = NULL;
    }
    answer_call(api, call, &response.base);
    return MU_OK;
}

static enum mu_status get_timings(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                  struct mu_error *err)
{
    const Muster__V1__GetTimingsRequest *request = (const Muster__V1__GetTimingsRequest *)base;
    Muster__V1__GetTimingsResponse response = MUSTER__V1__GET_TIMINGS_RESPONSE__INIT;
    uint32_t limit = api_page_size(request->page_size), slots = mu_coord_worker_slots(api->config.coord);
    uint32_t per_worker = request->per_worker == 0 ? 1 : request->per_worker;
    char worker[MU_WORKER_NAME_SIZE];
    struct mu_job_view *job = NULL;
    uint64_t slot = 0;
    bool is_there = false;
    enum mu_status status = MU_OK;
    if ((status = find_job(api, request->job, "job", &job, err)) ||
        (status = mu_wire_get_string(request->worker, MU_WIRE_NAME_EMPTY, "worker", worker, sizeof worker, err)) ||
        (status = api_get_token(request->page_token, &slot, err)))
        return status;
    if (per_worker > MU_TIMINGS_KEPT)
        return mu_fail(err, MU_ERR_INVALID, "per_worker: value %u is not allowed: at most %d", per_worker,
                       MU_TIMINGS_KEPT);
    struct mu_worker_view *view = mu_wire_arena_alloc(&api->arena, sizeof *view);
    response.timings = mu_wire_arena_alloc(&api->arena, sizeof *response.timings * (limit + per_worker));
    for (; view && response.timings && slot < slots; slot++) {
        if (!mu_coord_worker_view(api->config.coord, (uint32_t)slot, view) ||
            strcmp(view->job, job->record.spec.name) != 0 || (worker[0] && strcmp(worker, view->name) != 0))
            continue;
        if (response.n_timings >= limit) {
            response.next_page_token = api_put_token(&api->arena, slot);
            break;
        }
        is_there = true;
        if (!api_add_timings(&api->arena, api->config.coord, (uint32_t)slot, per_worker, &response, err))
            break;
    }
    if (worker[0] && !is_there)
        return mu_fail_for(err, MU_ERR_NOT_FOUND, MU_REASON_WORKER_UNKNOWN, 0, "job '%s' has no worker '%s'",
                           job->record.spec.name, worker);
    answer_call(api, call, &response.base);
    return MU_OK;
}

static enum mu_status get_goodput(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                  struct mu_error *err)
{
    const Muster__V1__GetGoodputRequest *request = (const Muster__V1__GetGoodputRequest *)base;
    struct mu_job_view *job = NULL;
    uint64_t slot = 0;
    enum mu_status status = find_job(api, request->job, "job", &job, err);
    if (status == MU_OK)
        status = api_get_token(request->page_token, &slot, err);
    if (status)
        return status;
    Muster__V1__GetGoodputResponse *response = mu_view_goodput(&api->arena, api->config.coord, job, mu_clock_mono_us(),
                                                               api_page_size(request->page_size), &slot, err);
    if (!response)
        return err->status;
    if (slot)
        response->next_page_token = api_put_token(&api->arena, slot);
    answer_call(api, call, &response->base);
    return MU_OK;
}

static enum mu_status read_probe(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                 struct mu_error *err)
{
    uint64_t number = ((const Muster__V1__ReadProbeRequest *)base)->number;
    struct mu_probe_view view;
    if (!mu_coord_probe_view(api->config.coord, number, &view))
        return number
                   ? mu_fail(err, MU_ERR_NOT_FOUND, "probe %llu is not known: only the newest one is, since the start",
                             (unsigned long long)number)
                   : mu_fail(err, MU_ERR_NOT_FOUND, "no probe was made since the coordinator's start");
    Muster__V1__ReadProbeResponse *response = mu_view_probe(&api->arena, &view, err);
    if (!response)
        return err->status;
    answer_call(api, call, &response->base);
    return MU_OK;
}

/* The events of the list are durable, so this needs no hold. */
static enum mu_status watch_events(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                   struct mu_error *err)
{
    const Muster__V1__WatchEventsRequest *request = (const Muster__V1__WatchEventsRequest *)base;
    struct mu_watch_request watch = {
        .after_event = request->after_event, .follow = request->follow, .newest = request->newest};
    enum mu_status status =
        mu_wire_get_string(request->job, MU_WIRE_NAME_EMPTY, "job", watch.job, sizeof watch.job, err);
    if (status == MU_OK)
        mu_events_watch(api->config.events, call, &watch);
    return status;
}

static void drop_snapshot(struct mu_api *api)
{
    free(api->snapshot_bytes);
    api->snapshot_bytes = NULL;
    api->snapshot_size = 0;
}

static enum mu_status save_snapshot(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                    struct mu_error *err)
{
    const Muster__V1__SaveSnapshotRequest *request = (const Muster__V1__SaveSnapshotRequest *)base;
    Muster__V1__SaveSnapshotResponse response = MUSTER__V1__SAVE_SNAPSHOT_RESPONSE__INIT;
    if (api->config.is_volatile)
        return mu_fail(err, MU_ERR_CONFLICT, "this coordinator keeps its records in memory: there is nothing to save");
    if (request->snapshot == 0) {
        drop_snapshot(api);
        enum mu_status status = mu_snapshot_take(api->config.store, &api->snapshot_bytes, &api->snapshot_size, err);
        if (status)
            return status;
        api->snapshot++;
    }
    uint64_t offset = request->snapshot ? request->offset : 0;
    if ((request->snapshot && request->snapshot != api->snapshot) || offset >= api->snapshot_size)
        return mu_fail(err, MU_ERR_CONFLICT, "another snapshot was begun, or the coordinator restarted: begin again");
    size_t left = api->snapshot_size - (size_t)offset;
    response.snapshot = api->snapshot;
    response.size_bytes = api->snapshot_size;
    response.data.data = api->snapshot_bytes + offset;
    response.data.len = left < SNAPSHOT_PAGE_BYTES ? left : SNAPSHOT_PAGE_BYTES;
    answer_call(api, call, &response.base);
    if (response.data.len == left)
        drop_snapshot(api);
    return MU_OK;
}

/* ---- changes ---- */

/* What makes a request the same one when it comes again: its id, its method, and every byte of it. */
static enum mu_status read_once(const struct mu_api *api, int method, ProtobufCBinaryData id,
                                struct mu_coord_once *ret_once, struct mu_error *err)
{
    const char *path = mu_api_methods[method].path;
    ret_once->body = mu_xxh3_128(api->request, api->request_bytes);
    ret_once->body.low ^= mu_xxh3_64(path, strlen(path), 0);
    return mu_wire_get_id(id, "request_id", &ret_once->id, err);
}

/* Refuses at the door what could not be stored. */
static enum mu_status begin(struct mu_api *api, struct mu_rpc_call *call, const char *name, ProtobufCBinaryData id,
                            struct mu_coord_event *event, uint64_t *ret_cookie, struct mu_error *err)
{
    int method = mu_rpc_call_method_id(call);
    enum mu_status status = read_once(api, method, id, &event->once, err);
    if (status)
        return status;
    status = mu_store_check(api->config.store, err);
    if (status) {
        mu_error_prefix(err, "refused, because it could not be stored (running jobs go on)");
        err->reason = MU_REASON_STORE_FULL;
        return status;
    }
    struct pending *pending = calloc(1, sizeof *pending);
    struct answer *answer = calloc(1, sizeof *answer);
    if (!pending || !answer) {
        free(pending);
        free(answer);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the request");
    }
    answer->call = call;
    *pending = (struct pending){.next = api->pending, .cookie = ++api->last_cookie, .method = method, .answer = answer};
    snprintf(pending->name, sizeof pending->name, "%s", name);
    api->pending = pending;
    *ret_cookie = pending->cookie;
    return MU_OK;
}

static enum mu_status submit_job(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                 struct mu_error *err)
{
    const Muster__V1__SubmitJobRequest *request = (const Muster__V1__SubmitJobRequest *)base;
    struct mu_job_spec spec;
    struct mu_coord_event event = {.kind = MU_CE_SUBMIT, .expected_revision = request->expected_revision};
    enum mu_status status = mu_wire_spec_from_pb(request->spec, &spec, err);
    if (status == MU_OK)
        status = begin(api, call, spec.name, request->request_id, &event, &event.submit.cookie, err);
    if (status)
        return status;
    event.submit.spec = &spec;
    event.submit.preflight = request->preflight;
    api->config.step(api->config.ctx, &event);
    return MU_OK;
}

/* Who it was: as the certificate says, else as the caller does. */
static enum mu_status get_who(struct mu_rpc_call *call, const char *told, char who[MU_TEXT_SIZE], struct mu_error *err)
{
    const char *identity = mu_rpc_call_identity(call), *by = identity[0] ? identity : told;
    return mu_wire_get_string(by && by[0] ? by : "?", MU_WIRE_TEXT, "by", who, MU_TEXT_SIZE, err);
}

static enum mu_status or_empty(const char *pb, enum mu_wire_string kind, const char *field, char *out, size_t size,
                               struct mu_error *err)
{
    return mu_wire_get_string(pb ? pb : "", kind, field, out, size, err);
}

/* Of one job or worker. */
static enum mu_status make_change(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                  struct mu_error *err)
{
    char name[MU_JOB_NAME_SIZE], new_job[MU_JOB_NAME_SIZE] = "", reason[MU_TEXT_SIZE], who[MU_TEXT_SIZE];
    char path[MU_PATH_SIZE];
    struct api_change change;
    enum mu_status status = api_read_change(mu_rpc_call_method_id(call), base, &change, err);
    if (status)
        return status;
    bool branches = change.kind == MU_CE_BRANCH;
    struct mu_coord_event event = {.kind = change.kind,
                                   .expected_revision = change.expected_revision,
                                   .request = {.job = name, /* or .worker: the kind says which of them it is */
                                               .worker = name,
                                               .reason = reason,
                                               .by = who,
                                               .workers = change.workers,
                                               .amendment = change.has_amendment ? &change.amendment : NULL,
                                               .new_job = new_job,
                                               .path = path,
                                               .checkpoint = change.checkpoint,
                                               .rebase = change.rebase,
                                               .compute = change.compute}};
    const char *why = change.reason && change.reason[0] ? change.reason : "by request";
    if ((status = get_name(change.name, change.field, name, err)) ||
        (branches && (status = get_name(change.new_job, "name", new_job, err))) ||
        (status = mu_wire_get_string(why, MU_WIRE_TEXT, "reason", reason, sizeof reason, err)) ||
        (status = or_empty(change.path, MU_WIRE_TEXT, "checkpoint_path", path, sizeof path, err)) ||
        (status = get_who(call, change.by, who, err)) ||
        (status = begin(api, call, branches ? new_job : name, change.id, &event, &event.request.cookie, err)))
        return status;
    api->config.step(api->config.ctx, &event);
    return MU_OK;
}

static enum mu_status order_node(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                 struct mu_error *err)
{
    const Muster__V1__OrderNodeRequest *request = (const Muster__V1__OrderNodeRequest *)base;
    char name[MU_WORKER_NAME_SIZE], reason[MU_TEXT_SIZE], who[MU_TEXT_SIZE];
    int order = 0;
    struct mu_coord_event event = {
        .kind = MU_CE_NODE,
        .expected_revision = api_expected(request->optional_expected_revision_case, request->expected_revision),
        .request = {.node = name, .reason = reason, .by = who, .deadline_us = request->deadline_s * 1000000ull}};
    enum mu_status status;
    if ((status = mu_wire_get_string(request->node, MU_WIRE_TEXT, "node", name, sizeof name, err)) ||
        (status = mu_wire_get_enum((int)request->order, 1, MU_NODE_ORDER_COUNT, "order", &order, err)) ||
        (status = mu_wire_get_string(request->reason, MU_WIRE_TEXT, "reason", reason, sizeof reason, err)) ||
        (status = get_who(call, request->by, who, err)))
        return status;
    event.request.order = (enum mu_node_order)(order - 1);
    if (!name[0])
        return mu_fail(err, MU_ERR_INVALID, "node: is missing: the name of a host as in ListNodes");
    if (event.request.order != MU_NODE_RESUME && !reason[0])
        return mu_fail(err, MU_ERR_INVALID, "reason: is missing: whoever finds the node so wants to know why");
    status = begin(api, call, "", request->request_id, &event, &event.request.cookie, err);
    if (status == MU_OK)
        api->config.step(api->config.ctx, &event);
    return status;
}

static enum mu_status probe(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                            struct mu_error *err)
{
    const Muster__V1__ProbeRequest *request = (const Muster__V1__ProbeRequest *)base;
    const struct mu_id secret[2] = {mu_id_random(), mu_id_random()};
    char job[MU_JOB_NAME_SIZE];
    struct mu_coord_event event = {.kind = MU_CE_PROBE,
                                   .probe = {.job = job,
                                             .quick = request->quick,
                                             .storage_bytes = (uint64_t)request->storage_mib << 20,
                                             .secret = (const uint8_t *)secret}};
    if (event.probe.storage_bytes > MU_PROBE_STORAGE_BYTES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "storage_mib: value %u is not allowed: at most %llu", request->storage_mib,
                       MU_PROBE_STORAGE_BYTES_MAX >> 20);
    enum mu_status status = or_empty(request->job, MU_WIRE_NAME_EMPTY, "job", job, sizeof job, err);
    if (status == MU_OK)
        status = begin(api, call, job, (ProtobufCBinaryData){0}, &event, &event.probe.cookie, err);
    if (status == MU_OK)
        api->config.step(api->config.ctx, &event);
    return status;
}

static enum mu_status report_exit(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *base,
                                  struct mu_error *err)
{
    const Muster__V1__ReportExitRequest *request = (const Muster__V1__ReportExitRequest *)base;
    char job[MU_JOB_NAME_SIZE], worker[MU_WORKER_NAME_SIZE], host[MU_WORKER_NAME_SIZE], text[MU_TEXT_SIZE];
    struct mu_coord_event event = {.kind = MU_CE_EXITED,
                                   .exited.exit = {.job = job,
                                                   .worker = worker,
                                                   .host = host,
                                                   .pid = request->pid,
                                                   .signal = request->signal,
                                                   .code = request->exit_code,
                                                   .again = request->again,
                                                   .text = text}};
    enum mu_status status;
    if ((status = get_name(request->job, "job", job, err)) ||
        (status = mu_wire_get_string(request->worker, MU_WIRE_NAME, "worker", worker, sizeof worker, err)) ||
        (status = mu_wire_get_string(request->host, MU_WIRE_TEXT, "host", host, sizeof host, err)) ||
        (status = mu_wire_get_string(request->text, MU_WIRE_TEXT, "text", text, sizeof text, err)) ||
        (status = mu_wire_get_id(request->incarnation, "incarnation", &event.exited.exit.incarnation, err)) ||
        (status = begin(api, call, job, (ProtobufCBinaryData){0}, &event, &event.exited.cookie, err)))
        return status;
    api->config.step(api->config.ctx, &event);
    return MU_OK;
}

/* ---- replies ---- */

void mu_api_reply(struct mu_api *api, const struct mu_coord_action *action)
{
    struct pending *pending = api->pending;
    while (pending && pending->cookie != action->reply.cookie)
        pending = pending->next;
    if (!pending || pending->replied)
        return;
    pending->replied = true;
    api->any_replied = true;
    pending->reply = action->reply;
    snprintf(pending->text, sizeof pending->text, "%s", action->reply.text ? action->reply.text : "");
    if (action->reply.status != MU_OK)
        mu_fail_for(&pending->answer->err, action->reply.status, action->reply.reason, action->reply.reason_value, "%s",
                    action->reply.text ? action->reply.text : mu_status_name(action->reply.status));
    /* It takes its place in the line now; what it says is filled in before anything can be released. */
    mu_outbox_hold(api->config.outbox, &pending->answer->item, run_answer);
}

/* The job as it is now; if another one has taken its name since, the little that is known of it. NULL: the answer holds
 * the error. `view` is filled in the first case. */
static Muster__V1__Job *build_job(struct mu_api *api, const struct pending *pending, struct mu_job_view **ret_view)
{
    struct mu_error *err = &pending->answer->err;
    struct mu_job_view *view = mu_wire_arena_alloc(&api->arena, sizeof *view);
    Muster__V1__Job *job = mu_wire_arena_alloc(&api->arena, sizeof *job);
    *ret_view = NULL;
    if (!view || !job) {
        mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
        return NULL;
    }
    if (mu_coord_job_find(api->config.coord, pending->name, view) &&
        mu_id_equal(view->record.uid, pending->reply.job_uid)) {
        *ret_view = view;
        return mu_view_job(&api->arena, view, err);
    }
    muster__v1__job__init(job);
    job->name = (char *)(uintptr_t)pending->name;
    job->uid = mu_wire_put_id(&api->arena, pending->reply.job_uid);
    return job;
}

static void build_submitted(struct mu_api *api, const struct pending *pending)
{
    Muster__V1__SubmitJobResponse response = MUSTER__V1__SUBMIT_JOB_RESPONSE__INIT;
    struct mu_job_view *view;
    response.existed = pending->reply.existed;
    response.job = build_job(api, pending, &view);
    if (response.job && view)
        response.estimate = mu_view_estimate(&api->arena, &view->record.spec, &pending->answer->err);
    if (response.job && (!view || response.estimate))
        fill_answer(api, pending->answer, &response.base);
}

/* An AmendJobResponse and a BranchJobResponse look the same. */
static void build_changed(struct mu_api *api, const struct pending *pending)
{
    Muster__V1__ScaleJobResponse response = MUSTER__V1__SCALE_JOB_RESPONSE__INIT;
    struct mu_job_view *view;
    response.job = build_job(api, pending, &view);
    if (response.job)
        fill_answer(api, pending->answer, &response.base);
}

static void build_reply(struct mu_api *api, const struct pending *pending)
{
    struct answer *answer = pending->answer;
    if (pending->method == MU_METHOD_SUBMIT_JOB) {
        build_submitted(api, pending);
    } else if (pending->method == MU_METHOD_SCALE_JOB || pending->method == MU_METHOD_AMEND_JOB ||
               pending->method == MU_METHOD_BRANCH_JOB) {
        build_changed(api, pending);
    } else if (pending->method == MU_METHOD_TRIGGER_CHECKPOINT) {
        Muster__V1__TriggerCheckpointResponse response = MUSTER__V1__TRIGGER_CHECKPOINT_RESPONSE__INIT;
        response.number = pending->reply.checkpoint;
        fill_answer(api, answer, &response.base);
    } else if (pending->method == MU_METHOD_PROBE) {
        Muster__V1__ProbeResponse response = MUSTER__V1__PROBE_RESPONSE__INIT;
        response.number = pending->reply.probe;
        response.workers = pending->reply.probed_workers;
        fill_answer(api, answer, &response.base);
    } else if (pending->method == MU_METHOD_REPORT_EXIT) {
        Muster__V1__ReportExitResponse response = MUSTER__V1__REPORT_EXIT_RESPONSE__INIT;
        response.verdict =
            pending->reply.verdict == MU_EXIT_START_AGAIN ? MUSTER__V1__EXIT_VERDICT__EXIT_VERDICT_START_AGAIN
            : pending->reply.verdict == MU_EXIT_ASK_AGAIN ? MUSTER__V1__EXIT_VERDICT__EXIT_VERDICT_ASK_AGAIN
                                                          : MUSTER__V1__EXIT_VERDICT__EXIT_VERDICT_STAY_AWAY;
        response.after_ms = pending->reply.after_ms;
        response.text = mu_wire_put_text(&api->arena, pending->text, sizeof pending->text);
        fill_answer(api, answer, &response.base);
    } else {
        Muster__V1__CancelJobResponse response = MUSTER__V1__CANCEL_JOB_RESPONSE__INIT; /* the others are empty too */
        fill_answer(api, answer, &response.base);
    }
}

void mu_api_after_step(struct mu_api *api)
{
    if (!api->any_replied)
        return;
    api->any_replied = false;
    for (struct pending **link = &api->pending; *link;) {
        struct pending *pending = *link;
        if (!pending->replied) {
            link = &pending->next;
            continue;
        }
        if (pending->answer->err.status == MU_OK)
            build_reply(api, pending);
        *link = pending->next;
        free(pending);
    }
}

/* ---- dispatch ---- */

typedef enum mu_status handler_fn(struct mu_api *api, struct mu_rpc_call *call, const ProtobufCMessage *request,
                                  struct mu_error *err);
static const struct {
    const ProtobufCMessageDescriptor *request;
    handler_fn *handle;
} handlers[MU_METHOD_API_COUNT] = {
    [MU_METHOD_SUBMIT_JOB] = {&muster__v1__submit_job_request__descriptor, submit_job},
    [MU_METHOD_GET_JOB] = {&muster__v1__get_job_request__descriptor, get_job},
    [MU_METHOD_LIST_JOBS] = {&muster__v1__list_jobs_request__descriptor, list_jobs},
    [MU_METHOD_CANCEL_JOB] = {&muster__v1__cancel_job_request__descriptor, make_change},
    [MU_METHOD_LIST_WORKERS] = {&muster__v1__list_workers_request__descriptor, list_workers},
    [MU_METHOD_DRAIN_WORKER] = {&muster__v1__drain_worker_request__descriptor, make_change},
    [MU_METHOD_UNDRAIN_WORKER] = {&muster__v1__undrain_worker_request__descriptor, make_change},
    [MU_METHOD_TRIGGER_CHECKPOINT] = {&muster__v1__trigger_checkpoint_request__descriptor, make_change},
    [MU_METHOD_LIST_CHECKPOINTS] = {&muster__v1__list_checkpoints_request__descriptor, list_checkpoints},
    [MU_METHOD_GET_TIMINGS] = {&muster__v1__get_timings_request__descriptor, get_timings},
    [MU_METHOD_GET_GOODPUT] = {&muster__v1__get_goodput_request__descriptor, get_goodput},
    [MU_METHOD_WATCH_EVENTS] = {&muster__v1__watch_events_request__descriptor, watch_events},
    [MU_METHOD_SAVE_SNAPSHOT] = {&muster__v1__save_snapshot_request__descriptor, save_snapshot},
    [MU_METHOD_LIST_NODES] = {&muster__v1__list_nodes_request__descriptor, list_nodes},
    [MU_METHOD_ORDER_NODE] = {&muster__v1__order_node_request__descriptor, order_node},
    [MU_METHOD_REPORT_EXIT] = {&muster__v1__report_exit_request__descriptor, report_exit},
    [MU_METHOD_SCALE_JOB] = {&muster__v1__scale_job_request__descriptor, make_change},
    [MU_METHOD_AMEND_JOB] = {&muster__v1__amend_job_request__descriptor, make_change},
    [MU_METHOD_PROBE] = {&muster__v1__probe_request__descriptor, probe},
    [MU_METHOD_READ_PROBE] = {&muster__v1__read_probe_request__descriptor, read_probe},
    [MU_METHOD_BRANCH_JOB] = {&muster__v1__branch_job_request__descriptor, make_change},
};

void mu_api_call(struct mu_api *api, struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    int method = mu_rpc_call_method_id(call);
    MU_ASSERT(method > MU_METHOD_ATTACH && method < MU_METHOD_API_COUNT);
    mu_wire_arena_reset(&api->arena);
    api->request = data;
    api->request_bytes = size_bytes;
    struct mu_error err = {0};
    const ProtobufCMessage *request = NULL;
    enum mu_status status = mu_wire_unpack(&api->arena, handlers[method].request, data, size_bytes,
                                           MU_WIRE_REQUEST_BYTES_MAX, &request, &err);
    if (status == MU_OK)
        status = handlers[method].handle(api, call, request, &err);
    if (status != MU_OK)
        fail_call(api, call, &err);
}

enum mu_status mu_api_ask(struct mu_api *api, int method, const void *data, size_t size_bytes,
                          struct mu_rpc_bytes **ret_reply, struct mu_error *err)
{
    struct answer answer = {0};
    const ProtobufCMessage *request = NULL;
    mu_wire_arena_reset(&api->arena);
    api->asked = &answer;
    enum mu_status status = mu_wire_unpack(&api->arena, handlers[method].request, data, size_bytes,
                                           MU_WIRE_REQUEST_BYTES_MAX, &request, err);
    if (status == MU_OK)
        status = handlers[method].handle(api, NULL, request, err);
    api->asked = NULL;
    if (status != MU_OK)
        return status;
    if (!answer.bytes) {
        *err = answer.err;
        return err->status ? err->status : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
    }
    *ret_reply = answer.bytes;
    return MU_OK;
}
