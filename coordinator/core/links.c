/* The blame graph: links that failed between two living workers. A pair with a bad link is not put into one generation
 * until its time is up (doubling with each failure); the planner leaves out the smallest set that explains the
 * failures. Beside it those who failed by themselves: others do not wait for them. */
#include "coordinator/core/internal.h"

#include <string.h>

/* ---- faults of one worker ---- */

void note_fault(struct job *job, const struct worker *worker)
{
    struct fault *fault = &job->faults[job->fault_count++ % FAULTS_KEPT];
    fault->incarnation = worker->incarnation;
    copy_text(fault->name, sizeof fault->name, worker->name);
}

static bool is_of(const struct fault *fault, struct mu_id incarnation, const char *name)
{
    return fault->name[0] && (mu_id_equal(fault->incarnation, incarnation) || strcmp(fault->name, name) == 0);
}

void forget_fault(struct job *job, const struct worker *worker)
{
    for (uint32_t i = 0; i < FAULTS_KEPT; i++) {
        if (is_of(&job->faults[i], worker->incarnation, worker->name))
            job->faults[i] = (struct fault){.name = ""};
    }
}

bool is_faulty(const struct job *job, struct mu_id incarnation, const char *name)
{
    for (uint32_t i = 0; i < FAULTS_KEPT; i++) {
        if (is_of(&job->faults[i], incarnation, name))
            return true;
    }
    return false;
}

/* ---- links ---- */

static bool is_isolated(const struct mu_coord *coord, const struct job *job, const struct worker *worker)
{
    for (uint32_t i = 0; i < job->bad_link_count; i++) {
        const struct bad_link *link = &job->bad_links[i];
        if (lease_now(coord) < link->until_us &&
            (mu_id_equal(link->a, worker->incarnation) || mu_id_equal(link->b, worker->incarnation)))
            return true;
    }
    return false;
}

uint32_t count_isolated_spares(struct mu_coord *coord, const struct job *job)
{
    uint32_t count = 0;
    for (struct worker *w = job->bad_link_count ? next_worker(coord, job, NULL) : NULL; w;
         w = next_worker(coord, job, w))
        count += w->rank == NONE && may_take_part(w) && is_isolated(coord, job, w);
    return count;
}

static void note_bad_link(struct mu_coord *coord, struct job *job, const struct worker *reporter,
                          const struct worker *target)
{
    struct bad_link *link = NULL;
    for (uint32_t i = 0; i < job->bad_link_count && !link; i++) {
        struct bad_link *known = &job->bad_links[i];
        if ((mu_id_equal(known->a, reporter->incarnation) && mu_id_equal(known->b, target->incarnation)) ||
            (mu_id_equal(known->b, reporter->incarnation) && mu_id_equal(known->a, target->incarnation)))
            link = known;
    }
    if (link && lease_now(coord) < link->until_us)
        return; /* both ends tell of the same failure */
    if (!link) {
        if (job->bad_link_count == MU_BAD_LINKS_MAX)
            memmove(&job->bad_links[0], &job->bad_links[1], sizeof job->bad_links[0] * --job->bad_link_count);
        link = &job->bad_links[job->bad_link_count++];
        *link = (struct bad_link){.a = reporter->incarnation, .b = target->incarnation};
    }
    uint64_t retry_us = (uint64_t)coord->config.link_retry_ms * 1000 << (link->failures < 6 ? link->failures : 6);
    link->failures++;
    link->until_us = lease_now(coord) + retry_us;
    char text[MU_EVENT_TEXT_SIZE], more[MU_EVENT_TEXT_SIZE];
    format_into(text, sizeof text, "exchange between living workers %s and %s failed: not used together for %.0f s",
                reporter->name, target->name, (double)retry_us * 1e-6);
    for (int i = 0; i < 2; i++) { /* each end knows its own side */
        const struct worker *told = i == 0 ? reporter : target, *other = i == 0 ? target : reporter;
        if (told->status.peer_failure == MU_PEER_FAILURE_NONE || told->status.peer_rank != other->rank)
            continue;
        format_into(more, sizeof more, "%s; %s: %s", text, told->name, told->status.text);
        copy_text(text, sizeof text, more);
    }
    event(coord, MU_EVENT_WARNING, "link_failed", job, reporter, "%s", text);
}

static const char *peer_failure_name(enum mu_peer_failure failure)
{
    switch (failure) {
    case MU_PEER_FAILURE_RESET:
        return "connection reset";
    case MU_PEER_FAILURE_EOF:
        return "connection closed";
    case MU_PEER_FAILURE_TIMEOUT:
        return "timed out";
    case MU_PEER_FAILURE_PROTOCOL:
        return "protocol error";
    default:
        return "failed";
    }
}

/* `worker` parked because of `status.peer_rank`: either that one is dead (a stream that is gone as well makes two
 * witnesses), or the link between them is bad; which one shows when everybody has parked. */
void judge_peer(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    struct worker *target = member_at(coord, job, worker->status.peer_rank);
    if (!target || target->lost || target == worker)
        return;
    char text[MU_TEXT_SIZE];
    if (target->session == 0) {
        declare_lost(coord, target, "%s, confirmed by peer %s", target->reason[0] ? target->reason : "stream reset",
                     worker->name);
        return;
    }
    format_into(text, sizeof text, "worker %s: exchange with %s: %s", worker->name, target->name,
                peer_failure_name(worker->status.peer_failure));
    if (target->status.phase == MU_PHASE_PARKED && target->status.generation == job->record.generation)
        note_bad_link(coord, job, worker, target);
    else
        note_break(coord, job, text);
}

/* After everyone has parked: those named as failed peers but alive have a bad link to who named them. */
void judge_links(struct mu_coord *coord, struct job *job)
{
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker || worker->lost || worker->status.generation != job->record.generation ||
            worker->status.peer_failure == MU_PEER_FAILURE_NONE)
            continue;
        const struct worker *target = member_at(coord, job, worker->status.peer_rank);
        if (target && target != worker && !target->lost && target->session != 0)
            note_bad_link(coord, job, worker, target);
    }
}
