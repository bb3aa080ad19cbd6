/* Probes, as messages of the service. */
#include "coordinator/views.h"
#include "muster/v1/probe.pb-c.h"

_Static_assert(MUSTER__V1__PROBE_LINK_STATE__PROBE_LINK_STATE_FAILED == (int)MU_PROBE_LINK_FAILED + 1, "link");
_Static_assert(MUSTER__V1__PROBE_FINDING_KIND__PROBE_FINDING_KIND_LINK_SLOW == (int)MU_PROBE_SLOW_LINK + 1, "finding");

static enum mu_status no_memory(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
}

static enum mu_status put_workers(struct mu_wire_arena *arena, const struct mu_probe_result *result,
                                  Muster__V1__ReadProbeResponse *response, struct mu_error *err)
{
    Muster__V1__ProbeWorker *pb = mu_wire_arena_alloc(arena, sizeof *pb * result->member_count);
    response->workers = mu_wire_arena_alloc(arena, sizeof *response->workers * result->member_count);
    if (!pb || !response->workers)
        return no_memory(err);
    for (uint32_t i = 0; i < result->member_count; i++) {
        const struct mu_probe_member *member = &result->members[i];
        muster__v1__probe_worker__init(&pb[i]);
        response->workers[response->n_workers++] = &pb[i];
        pb[i].is_out = member->out;
        pb[i].write_rate = member->write_rate;
        pb[i].read_rate = member->read_rate;
        pb[i].barrier_s = member->barrier_s;
        pb[i].ring_rate = member->ring_rate;
        pb[i].name = mu_wire_put_text(arena, member->name, sizeof member->name);
        pb[i].host = mu_wire_put_text(arena, member->host, sizeof member->host);
        pb[i].job = mu_wire_put_text(arena, member->job, sizeof member->job);
        pb[i].backend = mu_wire_put_text(arena, member->backend, sizeof member->backend);
        pb[i].text = mu_wire_put_text(arena, member->text, sizeof member->text);
        if (!pb[i].name || !pb[i].host || !pb[i].job || !pb[i].backend || !pb[i].text)
            return no_memory(err);
        if (member->has_alone && mu_wire_probe_alone_to_pb(arena, &member->alone, &pb[i].alone, err) != MU_OK)
            return err->status;
    }
    return MU_OK;
}

static enum mu_status put_links(struct mu_wire_arena *arena, const struct mu_probe_result *result,
                                Muster__V1__ReadProbeResponse *response, struct mu_error *err)
{
    Muster__V1__ProbeLink *pb = mu_wire_arena_alloc(arena, sizeof *pb * result->link_count);
    Muster__V1__ProbePair *pairs = mu_wire_arena_alloc(arena, sizeof *pairs * result->link_count);
    response->links = mu_wire_arena_alloc(arena, sizeof *response->links * result->link_count);
    if (!pb || !pairs || !response->links)
        return no_memory(err);
    for (uint32_t i = 0; i < result->link_count; i++) {
        const struct mu_probe_link *link = &result->links[i];
        muster__v1__probe_link__init(&pb[i]);
        response->links[response->n_links++] = &pb[i];
        pb[i].a = link->a;
        pb[i].b = link->b;
        pb[i].state = (Muster__V1__ProbeLinkState)((int)link->state + 1);
        pb[i].text = mu_wire_put_text(arena, link->text, sizeof link->text);
        if (!pb[i].text)
            return no_memory(err);
        if (link->state != MU_PROBE_LINK_GOOD)
            continue;
        mu_wire_probe_pair_to_pb(&link->pair, &pairs[i]);
        pb[i].pair = &pairs[i];
    }
    return MU_OK;
}

static enum mu_status put_findings(struct mu_wire_arena *arena, const struct mu_probe_view *view,
                                   Muster__V1__ReadProbeResponse *response, struct mu_error *err)
{
    Muster__V1__ProbeFinding *pb = mu_wire_arena_alloc(arena, sizeof *pb * view->finding_count);
    response->findings = mu_wire_arena_alloc(arena, sizeof *response->findings * view->finding_count);
    if (!pb || !response->findings)
        return no_memory(err);
    for (uint32_t i = 0; i < view->finding_count; i++) {
        const struct mu_probe_finding *finding = &view->findings[i];
        muster__v1__probe_finding__init(&pb[i]);
        response->findings[response->n_findings++] = &pb[i];
        pb[i].kind = (Muster__V1__ProbeFindingKind)((int)finding->kind + 1);
        pb[i].a = finding->a;
        pb[i].b = finding->b;
        pb[i].share = finding->share;
        pb[i].text = mu_wire_put_text(arena, finding->text, sizeof finding->text);
        if (!pb[i].text)
            return no_memory(err);
    }
    return MU_OK;
}

Muster__V1__ReadProbeResponse *mu_view_probe(struct mu_wire_arena *arena, const struct mu_probe_view *view,
                                             struct mu_error *err)
{
    Muster__V1__ReadProbeResponse *response = mu_wire_arena_alloc(arena, sizeof *response);
    if (!response) {
        no_memory(err);
        return NULL;
    }
    muster__v1__read_probe_response__init(response);
    response->number = view->number;
    response->is_over = view->is_over;
    response->step = view->step;
    response->steps = view->steps;
    if (put_workers(arena, &view->result, response, err) || put_links(arena, &view->result, response, err) ||
        put_findings(arena, view, response, err))
        return NULL;
    return response;
}
