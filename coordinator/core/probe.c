/* Probes (plan/probe.h): workers without a rank are asked to measure, step by step.
 *
 *   begin --> ALONE --> STORAGE --> PAIR, PAIR, ... --> TOGETHER --> judged, told
 *
 * A step is over when all who were asked have answered or are out, or at its limit: who has not answered by then is
 * out. A probe decides nothing and hinders nobody: who gets a rank, or state for its next one, is out at once (what it
 * is told to do ends its measurement), and so is who shares a host with a worker that has a rank. Nothing of it is
 * recorded: with the coordinator it is gone, and a job that was to be measured before it begins is measured again. */
#include "coordinator/core/internal.h"

#include <stdlib.h>
#include <string.h>

enum {
    ALONE_MS = 120000,
    QUICK_MS = 60000,
    STORAGE_MS = 120000,
    PAIR_MS = 20000,
    TOGETHER_MS = 30000,
    GRACE_MS = 5000,        /* an answer is on its way for so long */
    RING_SHARE_US = 250000, /* what the slowest pair moves in so long goes around the ring each time */
    EVENTS_MAX = 8,         /* findings told as events of their own */
    STEP_BITS = 8,          /* numbers of orders: the step in the lowest ones */
};

/* A worker that is measured; the members of the result are in the same order. */
struct probe_seat {
    uint32_t slot;
    bool asked, answered;
    uint32_t link; /* of the PAIR step under way, when it leads; NONE */
};

static struct worker *worker_at(struct mu_coord *coord, uint32_t seat)
{
    return &coord->workers[coord->probe.seats[seat].slot];
}

/* ---- who ---- */

static bool has_work(struct mu_coord *coord, const struct worker *worker)
{
    const struct job *job = job_of(coord, worker);
    return worker->rank != NONE && !worker->lost && job->has_generation && job->phase != MU_JP_WAITING;
}

/* Hosts where somebody has a rank, who would be slowed: by their ids. Without memory, or while a member of whom only
 * the record is known may be anywhere: no host is known to be free of work. */
struct busy {
    struct map hosts;
    bool known;
};

static struct busy find_busy(struct mu_coord *coord)
{
    struct busy busy;
    busy.known = map_init(&busy.hosts, coord->config.max_workers);
    for (uint32_t slot = 0; slot < coord->worker_high && busy.known; slot++) {
        const struct worker *worker = &coord->workers[slot];
        if (!worker->used || !has_work(coord, worker))
            continue;
        busy.known = worker->host_id != 0;
        if (busy.known && map_get(&busy.hosts, worker->host_id) == NONE)
            map_put(&busy.hosts, worker->host_id, slot);
    }
    return busy;
}

static bool host_has_work(const struct busy *busy, const struct worker *worker)
{
    return !busy->known || map_get(&busy->hosts, worker->host_id) != NONE;
}

/* Has it nothing to do? (Cordoned ones too: that is how a mended host is looked at.) */
static bool is_free(struct mu_coord *coord, const struct worker *worker)
{
    enum mu_feed_state feed = worker->status.feed_state;
    return worker->used && worker->ready && !worker->lost && !worker->draining && worker->session != 0 &&
           worker->rank == NONE && is_still(worker) && feed != MU_FEED_FILLING && feed != MU_FEED_LIVE &&
           !is_over(job_of(coord, worker));
}

static int compare_seats(const struct worker *a, const struct worker *b)
{
    int by_host = strcmp(a->host, b->host);
    return by_host ? by_host : strcmp(a->name, b->name);
}

/* Down the heap of seats, the last in order at the top: there is no context for qsort. */
static void sift(const struct mu_coord *coord, uint32_t *slots, uint32_t at, uint32_t count)
{
    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && compare_seats(&coord->workers[slots[child]], &coord->workers[slots[child + 1]]) < 0)
            child++;
        if (compare_seats(&coord->workers[slots[at]], &coord->workers[slots[child]]) >= 0)
            return;
        uint32_t held = slots[at];
        slots[at] = slots[child];
        slots[child] = held;
    }
}

static void sort_slots(const struct mu_coord *coord, uint32_t *slots, uint32_t count)
{
    for (uint32_t i = count / 2; i > 0; i--)
        sift(coord, slots, i - 1, count);
    for (uint32_t end = count; end > 1; end--) {
        uint32_t held = slots[0];
        slots[0] = slots[end - 1];
        slots[end - 1] = held;
        sift(coord, slots, 0, end - 1);
    }
}

/* ---- steps ---- */

static enum mu_probe_kind kind_of(const struct probe *probe, uint32_t step)
{
    uint32_t count = probe->result.member_count;
    if (step == 0)
        return MU_PROBE_ALONE;
    step -= 1;
    if (probe->storage_bytes > 0 && step == 0)
        return MU_PROBE_STORAGE;
    step -= probe->storage_bytes > 0;
    return step < mu_probe_rounds(count) ? MU_PROBE_PAIR : MU_PROBE_TOGETHER;
}

static uint32_t steps_of(const struct probe *probe)
{
    uint32_t count = probe->result.member_count;
    return 1u + (probe->storage_bytes > 0) + mu_probe_rounds(count) + (count > 1);
}

static uint32_t round_of(const struct probe *probe)
{
    return probe->step - 1 - (probe->storage_bytes > 0);
}

static uint32_t limit_ms(const struct probe *probe)
{
    switch (kind_of(probe, probe->step)) {
    case MU_PROBE_ALONE:
        return probe->quick ? QUICK_MS : ALONE_MS;
    case MU_PROBE_STORAGE:
        return STORAGE_MS;
    case MU_PROBE_PAIR:
        return PAIR_MS;
    default:
        return TOGETHER_MS;
    }
}

static struct mu_coord_message order_of(const struct probe *probe)
{
    struct mu_coord_message message = {.kind = MU_CM_PROBE};
    struct mu_probe_order *order = &message.probe;
    order->number = probe->base + probe->step;
    order->kind = kind_of(probe, probe->step);
    order->limit_ms = limit_ms(probe);
    order->quick = probe->quick;
    order->encrypted = probe->encrypted;
    return message;
}

static void ask(struct mu_coord *coord, uint32_t seat, const struct mu_coord_message *message)
{
    coord->probe.seats[seat].asked = true;
    coord->probe.waiting++;
    send_to(coord, worker_at(coord, seat), message);
}

static void add_peer(struct mu_coord *coord, struct mu_probe_order *order, uint32_t rank, uint32_t seat)
{
    const struct worker *worker = worker_at(coord, seat);
    struct mu_probe_peer *peer = &order->peers[order->peer_count++];
    *peer = (struct mu_probe_peer){.rank = rank, .incarnation = worker->incarnation};
    memcpy(peer->address, worker->address, sizeof peer->address);
    memcpy(order->secret, coord->probe.secret, sizeof order->secret);
}

static void ask_all(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    struct mu_coord_message message = order_of(probe);
    if (message.probe.kind == MU_PROBE_STORAGE)
        message.probe.bytes = probe->storage_bytes;
    for (uint32_t i = 0; i < probe->result.member_count; i++)
        if (!probe->result.members[i].out)
            ask(coord, i, &message);
}

static void ask_pairs(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    const struct mu_probe_member *members = probe->result.members;
    uint32_t count = probe->result.member_count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t other = mu_probe_partner(count, round_of(probe), i);
        if (other <= i)
            continue;
        probe->seats[i].link = probe->result.link_count;
        probe->result.links[probe->result.link_count++] = (struct mu_probe_link){.a = i, .b = other};
        for (uint32_t side = 0; side < 2 && !members[i].out && !members[other].out; side++) {
            struct mu_coord_message message = order_of(probe);
            message.probe.rank = side;
            message.probe.world = 2;
            add_peer(coord, &message.probe, 1 - side, side ? i : other);
            ask(coord, side ? other : i, &message);
        }
    }
}

/* Bytes that the slowest pair moves in RING_SHARE_US; the worker has bounds of its own. */
static uint64_t ring_bytes(const struct mu_probe_result *result)
{
    double least = 0;
    for (uint32_t i = 0; i < result->link_count; i++) {
        const struct mu_probe_pair *pair = &result->links[i].pair;
        double rate = pair->out_rate < pair->in_rate ? pair->out_rate : pair->in_rate;
        if (result->links[i].state == MU_PROBE_LINK_GOOD && (least <= 0 || rate < least))
            least = rate;
    }
    double bytes = least * RING_SHARE_US * 1e-6;
    return bytes < 1e9 ? (uint64_t)bytes : 1000000000;
}

static void ask_together(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    uint32_t in[MU_PROBE_MEMBERS_MAX], count = 0, ranks[MU_PROBE_NEIGHBOURS_MAX];
    for (uint32_t i = 0; i < probe->result.member_count; i++)
        if (!probe->result.members[i].out)
            in[count++] = i;
    for (uint32_t rank = 0; rank < count && count > 1; rank++) {
        struct mu_coord_message message = order_of(probe);
        uint32_t peers = mu_probe_neighbours(count, rank, ranks);
        message.probe.rank = rank;
        message.probe.world = count;
        message.probe.bytes = ring_bytes(&probe->result);
        for (uint32_t i = 0; i < peers; i++)
            add_peer(coord, &message.probe, ranks[i], in[ranks[i]]);
        ask(coord, in[rank], &message);
    }
}

static void begin_step(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    probe->waiting = 0;
    for (uint32_t i = 0; i < probe->result.member_count; i++) {
        probe->seats[i].asked = probe->seats[i].answered = false;
        probe->seats[i].link = NONE;
    }
    enum mu_probe_kind kind = kind_of(probe, probe->step);
    if (kind == MU_PROBE_PAIR)
        ask_pairs(coord);
    else if (kind == MU_PROBE_TOGETHER)
        ask_together(coord);
    else
        ask_all(coord);
    probe->until_us = lease_now(coord) + (limit_ms(probe) + GRACE_MS) * 1000ull;
}

/* A pair of which one went is not the link's fault. */
static void end_step(struct probe *probe)
{
    for (uint32_t i = 0; i < probe->result.member_count; i++) {
        struct mu_probe_link *link = probe->seats[i].link == NONE ? NULL : &probe->result.links[probe->seats[i].link];
        if (link && (probe->result.members[link->a].out || probe->result.members[link->b].out) &&
            link->state == MU_PROBE_LINK_FAILED)
            link->state = MU_PROBE_LINK_UNKNOWN;
    }
}

/* ---- the end ---- */

static void let_go(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    for (uint32_t i = 0; i < probe->result.member_count; i++)
        if (!probe->result.members[i].out)
            worker_at(coord, i)->probe = 0;
    probe->is_running = false;
    probe->waiting = 0;
}

static void tell(struct mu_coord *coord, const struct job *job)
{
    struct probe *probe = &coord->probe;
    uint32_t hosts = 0, count = probe->result.member_count;
    for (uint32_t i = 0; i < count; i++)
        hosts += i == 0 || strcmp(probe->result.members[i].host, probe->result.members[i - 1].host) != 0;
    char found[32] = "nothing stands out";
    if (probe->finding_count > 0)
        format_into(found, sizeof found, "%u thing%s out", probe->finding_count,
                    probe->finding_count == 1 ? " stands" : "s stand");
    event(coord, probe->finding_count ? MU_EVENT_WARNING : MU_EVENT_INFO, "probe_finished", job, NULL,
          "probe %llu of %u worker%s on %u host%s, %u pair%s: %s", (unsigned long long)probe->number, count,
          count == 1 ? "" : "s", hosts, hosts == 1 ? "" : "s", probe->result.link_count,
          probe->result.link_count == 1 ? "" : "s", found);
    for (uint32_t i = 0; i < probe->finding_count && i < EVENTS_MAX; i++)
        event(coord, MU_EVENT_WARNING, "probe_found", job, NULL, "%s", probe->findings[i].text);
}

/* Those who wait for a probe of their own, or were to be measured by this one. */
static void wake_jobs(struct mu_coord *coord, struct job *measured)
{
    if (measured)
        measured->preflight_over = true;
    for (uint32_t i = 0; i < coord->job_count; i++) {
        struct job *job = &coord->jobs[i];
        if (job->used && job->phase == MU_JP_WAITING && job->record.preflight && job->record.state == MU_JOB_PENDING &&
            job->ready_count > 0)
            job->settle_until_us = lease_now(coord);
    }
}

static void finish(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    struct job *job = probe->job == NONE ? NULL : &coord->jobs[probe->job];
    if (job && !(job->used && mu_id_equal(job->record.uid, probe->job_uid)))
        job = NULL;
    let_go(coord);
    probe->step = steps_of(probe);
    if (mu_probe_judge(&probe->result, &probe->findings, &probe->finding_count) != MU_OK)
        event(coord, MU_EVENT_WARNING, "probe_finished", job, NULL, "probe %llu: no memory to look for what stands out",
              (unsigned long long)probe->number);
    else
        tell(coord, job);
    wake_jobs(coord, job);
}

/* Whoever is asked and has not answered keeps it waiting; after each event. */
void probe_go_on(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    while (probe->is_running && probe->waiting == 0) {
        end_step(probe);
        if (++probe->step < steps_of(probe))
            begin_step(coord);
        else
            finish(coord);
    }
}

/* ---- who leaves ---- */

static void put_out(struct mu_coord *coord, struct worker *worker, const char *why)
{
    struct probe *probe = &coord->probe;
    uint32_t seat = worker->probe - 1;
    struct mu_probe_member *member = &probe->result.members[seat];
    worker->probe = 0;
    member->out = true;
    format_into(member->text, sizeof member->text, "%s (step %u of %u)", why, probe->step + 1, steps_of(probe));
    if (probe->seats[seat].asked && !probe->seats[seat].answered)
        probe->waiting--;
}

void probe_left(struct mu_coord *coord, struct worker *worker, const char *why)
{
    if (worker->probe)
        put_out(coord, worker, why);
}

/* It is told to stop; who gets something else to do needs no telling. */
static void call_off(struct mu_coord *coord, struct worker *worker, const char *why)
{
    struct mu_coord_message message = {.kind = MU_CM_PROBE, .probe = {.number = coord->probe.base + coord->probe.step}};
    if (!worker->probe)
        return;
    put_out(coord, worker, why);
    send_to(coord, worker, &message);
}

void probe_gives_way(struct mu_coord *coord, const struct job *job)
{
    char taken[MU_PROBE_TEXT_SIZE], beside[MU_PROBE_TEXT_SIZE];
    struct probe *probe = &coord->probe;
    if (!probe->is_running)
        return;
    struct busy busy = find_busy(coord);
    format_into(taken, sizeof taken, "job %s gave it a rank", job->record.spec.name);
    format_into(beside, sizeof beside, "job %s gave its host work", job->record.spec.name);
    for (uint32_t rank = 0; rank < job->world; rank++)
        probe_left(coord, member_at(coord, job, rank), taken);
    for (uint32_t i = 0; i < probe->result.member_count; i++)
        if (!probe->result.members[i].out && host_has_work(&busy, worker_at(coord, i)))
            call_off(coord, worker_at(coord, i), beside);
    map_fini(&busy.hosts);
}

void probe_tick(struct mu_coord *coord)
{
    struct probe *probe = &coord->probe;
    if (!probe->is_running || lease_now(coord) < probe->until_us)
        return;
    for (uint32_t i = 0; i < probe->result.member_count; i++)
        if (probe->seats[i].asked && !probe->seats[i].answered && !probe->result.members[i].out)
            call_off(coord, worker_at(coord, i), "it did not answer in time");
}

/* ---- answers ---- */

static void note_failure(char text[MU_PROBE_TEXT_SIZE], const char *why)
{
    if (!text[0]) /* the first one says most */
        copy_text(text, MU_PROBE_TEXT_SIZE, why);
}

/* Of the two, the one who leads knows; the other one only that it failed. */
static void note_pair(struct probe *probe, uint32_t seat, const struct mu_probe_report *report)
{
    uint32_t other = mu_probe_partner(probe->result.member_count, round_of(probe), seat);
    bool leads = seat < other;
    struct mu_probe_link *link = &probe->result.links[probe->seats[leads ? seat : other].link];
    if (report->status != MU_OK) {
        link->state = MU_PROBE_LINK_FAILED;
        if (leads)
            copy_text(link->text, sizeof link->text, report->text);
        else
            note_failure(link->text, report->text);
    } else if (leads && link->state != MU_PROBE_LINK_FAILED) {
        link->state = MU_PROBE_LINK_GOOD;
        link->pair = report->pair;
    }
}

static void note_report(struct probe *probe, uint32_t seat, const struct mu_probe_report *report)
{
    struct mu_probe_member *member = &probe->result.members[seat];
    bool good = report->status == MU_OK;
    switch (report->kind) {
    case MU_PROBE_ALONE:
        member->has_alone = good;
        member->alone = report->alone;
        break;
    case MU_PROBE_STORAGE:
        member->write_rate = report->write_rate;
        member->read_rate = report->read_rate;
        break;
    case MU_PROBE_PAIR:
        note_pair(probe, seat, report);
        return;
    case MU_PROBE_TOGETHER:
        member->barrier_s = report->barrier_s;
        member->ring_rate = report->ring_rate;
        break;
    case MU_PROBE_KIND_END:
        return;
    }
    if (!good)
        note_failure(member->text, report->text);
}

void on_probed(struct mu_coord *coord, struct worker *worker, const struct mu_probe_report *report)
{
    struct probe *probe = &coord->probe;
    uint32_t seat = worker->probe - 1;
    if (!worker->probe || report->number != probe->base + probe->step || report->kind != kind_of(probe, probe->step) ||
        !probe->seats[seat].asked || probe->seats[seat].answered)
        return; /* too late */
    if (report->status == MU_ERR_CANCELLED || report->status == MU_ERR_CONFLICT) {
        put_out(coord, worker, report->text[0] ? report->text : "it has other work");
        return;
    }
    probe->seats[seat].answered = true;
    probe->waiting--;
    note_report(probe, seat, report);
}

/* ---- beginning ---- */

static void drop_result(struct probe *probe)
{
    free(probe->seats);
    free(probe->result.members);
    free(probe->result.links);
    free(probe->findings);
    probe->seats = NULL;
    probe->findings = NULL;
    probe->finding_count = 0;
    probe->result = (struct mu_probe_result){.member_count = 0};
}

void probe_fini(struct mu_coord *coord)
{
    drop_result(&coord->probe);
}

static bool allocate(struct probe *probe, uint32_t count)
{
    drop_result(probe);
    probe->seats = calloc(count, sizeof *probe->seats);
    probe->result.members = calloc(count, sizeof *probe->result.members);
    probe->result.links = calloc((size_t)mu_probe_rounds(count) * (count / 2) + 1, sizeof *probe->result.links);
    if (probe->seats && probe->result.members && probe->result.links)
        return true;
    drop_result(probe);
    return false;
}

static void seat(struct mu_coord *coord, uint32_t at, struct worker *worker)
{
    struct probe *probe = &coord->probe;
    struct mu_probe_member *member = &probe->result.members[at];
    const struct mu_job_spec *spec = &job_of(coord, worker)->record.spec;
    _Static_assert(sizeof member->name == sizeof worker->name && sizeof member->backend == sizeof worker->backend, "");
    probe->seats[at] = (struct probe_seat){.slot = (uint32_t)(worker - coord->workers), .link = NONE};
    memcpy(member->name, worker->name, sizeof member->name);
    memcpy(member->host, worker->host, sizeof member->host);
    memcpy(member->backend, worker->backend, sizeof member->backend);
    memcpy(member->job, spec->name, sizeof member->job);
    worker->probe = at + 1;
    probe->encrypted = probe->encrypted || spec->data_tls;
    probe->result.member_count = at + 1;
}

/* slots[count] are free. False: no memory. */
static bool begin(struct mu_coord *coord, uint32_t *slots, uint32_t count, const struct probe *wanted)
{
    struct probe *probe = &coord->probe;
    if (!allocate(probe, count))
        return false;
    probe->number++;
    probe->base = MU_FEED_BIT | (coord->random.low << STEP_BITS);
    probe->job = wanted->job;
    probe->job_uid = wanted->job_uid;
    probe->quick = wanted->quick;
    probe->storage_bytes = wanted->storage_bytes;
    memcpy(probe->secret, wanted->secret, sizeof probe->secret);
    probe->encrypted = false;
    probe->step = 0;
    sort_slots(coord, slots, count);
    for (uint32_t i = 0; i < count; i++)
        seat(coord, i, &coord->workers[slots[i]]);
    probe->is_running = true;
    event(coord, MU_EVENT_INFO, "probe_started", probe->job == NONE ? NULL : &coord->jobs[probe->job], NULL,
          "probe %llu of %u worker%s: products and memory%s%s", (unsigned long long)probe->number, count,
          count == 1 ? "" : "s", probe->storage_bytes ? ", storage" : "",
          count > 1 ? ", what pairs get between each other, and all together" : "");
    begin_step(coord);
    return true;
}

void on_probe(struct mu_coord *coord, const struct mu_coord_event *request)
{
    struct probe wanted = {.job = NONE, .quick = request->probe.quick, .storage_bytes = request->probe.storage_bytes};
    struct answer answer = {.reply.cookie = request->probe.cookie};
    const char *name = request->probe.job;
    const struct job *job = name[0] ? find_job(coord, name) : NULL;
    uint32_t slots[MU_PROBE_MEMBERS_MAX], count = 0, attached = 0;
    struct busy busy = find_busy(coord);
    memcpy(wanted.secret, request->probe.secret, sizeof wanted.secret);
    for (uint32_t slot = 0; slot < coord->worker_high; slot++) {
        struct worker *worker = &coord->workers[slot];
        if (!worker->used || (name[0] && job_of(coord, worker) != job))
            continue;
        attached += worker->session != 0;
        if (is_free(coord, worker) && !host_has_work(&busy, worker) && count++ < MU_PROBE_MEMBERS_MAX)
            slots[count - 1] = slot;
    }
    map_fini(&busy.hosts);
    if (name[0] && !job)
        refuse(&answer, MU_ERR_NOT_FOUND, MU_REASON_JOB_UNKNOWN, "no job '%s' (see: muster status)", name);
    else if (coord->probe.is_running)
        refuse(&answer, MU_ERR_CONFLICT, MU_REASON_NONE, "probe %llu is under way: wait for it",
               (unsigned long long)coord->probe.number);
    else if (count == 0)
        refuse(
            &answer, MU_ERR_CONFLICT, MU_REASON_NONE,
            "none of %u attached workers is free: a probe takes those that have loaded their job and have no rank, on "
            "hosts where nobody has one",
            attached);
    else if (count > MU_PROBE_MEMBERS_MAX)
        refuse(&answer, MU_ERR_LIMIT, MU_REASON_LIMIT_REACHED,
               "%u workers are free, at most %d are measured: name a job", count, MU_PROBE_MEMBERS_MAX);
    else if (!begin(coord, slots, count, &wanted))
        refuse(&answer, MU_ERR_NO_MEMORY, MU_REASON_NONE, "no memory to measure %u workers", count);
    answer.reply.probe = coord->probe.number;
    answer.reply.probed_workers = count;
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_REPLY, .reply = answer.reply});
}

/* ---- before a job begins ---- */

bool probe_first(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const uint8_t *secret)
{
    struct probe *probe = &coord->probe, wanted = {.job = (uint32_t)(job - coord->jobs), .quick = true};
    uint32_t slots[MU_PROBE_MEMBERS_MAX], count = 0, world = mu_layout_world(&plan->layout);
    char why[MU_TEXT_SIZE];
    if (!job->record.preflight || job->record.state != MU_JOB_PENDING || job->preflight_over)
        return false;
    struct busy busy = find_busy(coord);
    for (uint32_t rank = 0; rank < world && !probe->is_running; rank++) {
        uint32_t slot = job->plan_slots[plan->ranks[rank].member];
        struct worker *worker = &coord->workers[slot];
        if (is_free(coord, worker) && !host_has_work(&busy, worker) && count < MU_PROBE_MEMBERS_MAX)
            slots[count++] = slot;
    }
    map_fini(&busy.hosts);
    wanted.job_uid = job->record.uid;
    memcpy(wanted.secret, secret, sizeof wanted.secret);
    if (!probe->is_running && (count == 0 || !begin(coord, slots, count, &wanted))) {
        event(coord, MU_EVENT_WARNING, "probe_finished", job, NULL,
              "job %s begins without a probe: none of its workers is alone on its host", job->record.spec.name);
        job->preflight_over = true;
        return false;
    }
    format_into(why, sizeof why, "probe %llu is under way", (unsigned long long)probe->number);
    wait_for_workers(coord, job, why);
    return true;
}

/* ---- view ---- */

bool mu_coord_probe_view(const struct mu_coord *coord, uint64_t number, struct mu_probe_view *ret)
{
    const struct probe *probe = &coord->probe;
    if (probe->number == 0 || (number != 0 && number != probe->number))
        return false;
    *ret = (struct mu_probe_view){.number = probe->number,
                                  .is_over = !probe->is_running,
                                  .step = probe->step + probe->is_running,
                                  .steps = steps_of(probe),
                                  .result = probe->result,
                                  .findings = probe->findings,
                                  .finding_count = probe->finding_count};
    return true;
}
