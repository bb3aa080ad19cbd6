/* Workers: attaching, signs of life, losses, crash budgets. */
#include "coordinator/core/internal.h"

#include <string.h>

#include "plan/amend.h"

enum {
    SCAN_INTERVAL_US = 100000,
    PARK_LIMIT_US = 15000000,
    BACKLOG_LEASES_MAX = 10, /* a queue of re-attaching workers holds the leases of those behind it up so long */
};

struct job *job_of(struct mu_coord *coord, const struct worker *worker)
{
    return &coord->jobs[worker->job];
}

struct worker *member_at(struct mu_coord *coord, const struct job *job, uint32_t rank)
{
    return job->has_generation && rank < job->world && job->members[rank] != NONE ? &coord->workers[job->members[rank]]
                                                                                  : NULL;
}

/* Workers of a job in order of attaching; `after` NULL: the first one. */
struct worker *next_worker(struct mu_coord *coord, const struct job *job, const struct worker *after)
{
    uint32_t slot = after ? after->next : job->first_worker;
    return slot == NONE ? NULL : &coord->workers[slot];
}

static uint64_t name_key(const char *name)
{
    return mu_xxh3_64(name, strlen(name), 1) | 1;
}

struct worker *find_worker(struct mu_coord *coord, const char *name)
{
    uint32_t slot = map_get(&coord->by_name, name_key(name));
    if (slot == NONE || strcmp(coord->workers[slot].name, name) != 0)
        return NULL;
    return &coord->workers[slot];
}

struct mu_worker_record *find_worker_record(struct mu_coord *coord, const char *name)
{
    for (uint32_t i = 0; i < coord->worker_record_count; i++) {
        if (strcmp(coord->worker_records[i].name, name) == 0)
            return &coord->worker_records[i];
    }
    return NULL;
}

struct mu_worker_record *note_worker(struct mu_coord *coord, const char *name)
{
    struct mu_worker_record *record = find_worker_record(coord, name);
    if (record || coord->worker_record_count == WORKER_RECORDS_MAX)
        return record;
    record = &coord->worker_records[coord->worker_record_count++];
    memset(record, 0, sizeof *record);
    copy_text(record->name, sizeof record->name, name);
    return record;
}

static void choose_name(struct mu_coord *coord, char out[MU_WORKER_NAME_SIZE])
{
    do
        format_into(out, MU_WORKER_NAME_SIZE, "w%u", coord->next_auto_name++);
    while (map_get(&coord->by_name, name_key(out)) != NONE || find_worker_record(coord, out));
}

struct worker *add_worker(struct mu_coord *coord, struct job *job, const char *name, struct mu_id incarnation)
{
    uint32_t slot = coord->free_worker;
    if (slot != NONE)
        coord->free_worker = coord->workers[slot].next;
    else if (coord->worker_high < coord->config.max_workers)
        slot = coord->worker_high++;
    else
        return NULL;
    struct worker *worker = &coord->workers[slot];
    memset(worker, 0, offsetof(struct worker, timings));
    worker->timing_count = 0;
    worker->reason[0] = 0;
    worker->used = true;
    worker->job = (uint32_t)(job - coord->jobs);
    worker->rank = worker->accuser = NONE;
    worker->incarnation = incarnation;
    worker->seen_us = worker->progress_us = lease_now(coord);
    if (name[0])
        copy_text(worker->name, sizeof worker->name, name);
    else
        choose_name(coord, worker->name);
    map_put(&coord->by_name, name_key(worker->name), slot);
    worker->previous = job->last_worker;
    worker->next = NONE;
    if (job->last_worker != NONE)
        coord->workers[job->last_worker].next = slot;
    else
        job->first_worker = slot;
    job->last_worker = slot;
    job->worker_count++;
    return worker;
}

void count_ready(struct mu_coord *coord, struct worker *worker)
{
    bool counts = worker->used && worker->ready && !worker->lost && !worker->draining;
    struct job *job = job_of(coord, worker);
    job->ready_count = job->ready_count + counts - worker->counted;
    worker->counted = counts;
}

void free_worker(struct mu_coord *coord, struct worker *worker)
{
    struct job *job = job_of(coord, worker);
    uint32_t slot = (uint32_t)(worker - coord->workers);
    MU_ASSERT(worker->used);
    probe_left(coord, worker, worker->reason[0] ? worker->reason : "it left");
    node_left(coord, worker);
    goodput_left(coord, worker);
    if (worker->session)
        map_remove(&coord->by_session, worker->session);
    if (map_get(&coord->by_name, name_key(worker->name)) == slot)
        map_remove(&coord->by_name, name_key(worker->name));
    give_back_gpu(coord, worker);
    if (worker->previous != NONE)
        coord->workers[worker->previous].next = worker->next;
    else
        job->first_worker = worker->next;
    if (worker->next != NONE)
        coord->workers[worker->next].previous = worker->previous;
    else
        job->last_worker = worker->previous;
    job->worker_count--;
    if (worker->rank != NONE && worker->rank < job->world && job->members[worker->rank] == slot)
        job->members[worker->rank] = NONE;
    worker->used = false;
    count_ready(coord, worker);
    worker->next = coord->free_worker;
    coord->free_worker = slot;
}

/* A plan that is being made may count on it: then it is made again. */
static void free_spare(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    worker->lost = true;
    checkpoint_writer_lost(coord, job, worker);
    holder_lost(coord, job, worker);
    free_worker(coord, worker);
    if (job->phase == MU_JP_PLANNING)
        park_all(coord, job);
    feed_advance(coord, job, NULL);
}

/* ---- attaching ---- */

static void welcome(struct mu_coord *coord, struct worker *worker, const struct mu_hello *hello)
{
    const struct job *job = job_of(coord, worker);
    struct mu_coord_message message = {.kind = MU_CM_WELCOME};
    memcpy(message.welcome.name, worker->name, sizeof message.welcome.name);
    message.welcome.job_uid = job->record.uid;
    message.welcome.spec = mu_id_equal(hello->job_uid, job->record.uid) ? NULL : &job->record.spec;
    message.welcome.heartbeat_ms = coord->config.heartbeat_ms;
    message.welcome.lost_ms = coord->config.lost_ms;
    send_to(coord, worker, &message);
}

static bool claims_membership(const struct mu_hello *hello)
{
    return hello->status.generation > 0;
}

static struct worker *find_lost(struct mu_coord *coord, const struct job *job, struct mu_id incarnation)
{
    struct worker *worker = next_worker(coord, job, NULL);
    while (worker && !(worker->lost && mu_id_equal(worker->incarnation, incarnation)))
        worker = next_worker(coord, job, worker);
    return worker;
}

/* It was lost for what would come again, so the others go on without it, unless they lack what it holds. */
static bool is_spared(struct mu_coord *coord, const struct job *job, const struct mu_hello *hello)
{
    const struct mu_worker_record *record = hello->name[0] ? find_worker_record(coord, hello->name) : NULL;
    const struct worker *known = hello->name[0] ? find_worker(coord, hello->name) : NULL;
    bool is_here = known && !known->lost && mu_id_equal(known->incarnation, hello->incarnation);
    bool faulty = is_faulty(job, hello->incarnation, hello->name) || (record && record->quarantined);
    return faulty && !is_here &&
           others_are_whole(coord, job, find_lost(coord, job, hello->incarnation), hello->status.held.step);
}

/* It holds state that no generation has gone on without: worth more than any rule about who may attach. */
static bool holds_state(struct mu_coord *coord, const struct job *job, const struct mu_hello *hello)
{
    bool superseded = job->go && hello->status.generation != job->record.generation;
    bool worthless = hello->status.held.step == 0 && hello->status.phase == MU_PHASE_PARKED;
    bool other_era = hello->status.era != mu_amend_era(&job->record.spec.amendments);
    if (!claims_membership(hello) || superseded || !hello->status.held.has_state || worthless || other_era)
        return false;
    for (uint32_t i = 0; i < MU_HUNG_KEPT; i++) {
        if (mu_id_equal(job->hung[i], hello->incarnation))
            return false;
    }
    return !is_spared(coord, job, hello);
}

/* Drained, or quarantined: told so. One that was here when the drain was ordered is released, for it is done. */
static bool is_kept_out(struct mu_coord *coord, const struct job *job, uint64_t session, const struct mu_hello *hello)
{
    const struct mu_worker_record *record = hello->name[0] ? find_worker_record(coord, hello->name) : NULL;
    const struct mu_node_record *node = find_node(coord, hello->host);
    bool quarantined = record && record->quarantined, drained = record && record->draining;
    bool node_drained = node && node->order == MU_NODE_DRAIN;
    if (holds_state(coord, job, hello) || !(quarantined || drained || node_drained))
        return false;
    if (!quarantined && !mu_id_is_zero(hello->job_uid)) {
        struct mu_coord_message message = {.kind = MU_CM_RELEASE};
        copy_text(message.release.text, sizeof message.release.text, drained ? record->reason : node->reason);
        emit(coord, &(struct mu_coord_action){.kind = MU_CA_SEND, .send = {.session = session, .message = &message}});
    } else if (quarantined || drained) {
        reject(coord, session, MU_REJECT_QUARANTINED, "worker '%s' is %s (%s); lift it with: muster undrain %s",
               hello->name, quarantined ? "quarantined" : "drained", record->reason, hello->name);
    } else {
        reject(coord, session, MU_REJECT_QUARANTINED,
               "node '%s' is drained (%s, by %s); lift it with: muster node resume %s", node->name, node->reason,
               node->by, node->name);
    }
    return true;
}

static struct job *judge_hello(struct mu_coord *coord, uint64_t session, const struct mu_hello *hello)
{
    if (hello->protocol_version != MU_PROTOCOL_VERSION) {
        reject(
            coord, session, MU_REJECT_VERSION,
            "worker speaks protocol %u (muster %s), this coordinator speaks %u (muster %s): install the same version",
            hello->protocol_version, hello->software_version, MU_PROTOCOL_VERSION, MU_VERSION);
        return NULL;
    }
    struct job *job = find_job(coord, hello->job);
    if (!job) {
        reject(coord, session, MU_REJECT_NO_JOB, "no job '%s' here yet", hello->job);
        return NULL;
    }
    if (is_over(job)) {
        reject(coord, session, MU_REJECT_JOB_OVER, "job '%s' is over", hello->job);
        return NULL;
    }
    if (!mu_id_is_zero(hello->job_uid) && !mu_id_equal(hello->job_uid, job->record.uid)) {
        reject(coord, session, MU_REJECT_JOB_OVER, "job '%s' was replaced by a new job of that name", hello->job);
        return NULL;
    }
    if (hello->status.generation >
        job->record.generation) { /* nothing is told before it is recorded: so records are lost */
        reject(coord, session, MU_REJECT_BUSY,
               "worker '%s' stands in generation %llu, this coordinator has given no newer one than %llu: its data "
               "directory is an old copy; restore it with: muster snapshot restore --epoch",
               hello->name, (unsigned long long)hello->status.generation, (unsigned long long)job->record.generation);
        return NULL;
    }
    struct mu_error err;
    if (!shares_fit(job, &hello->status.held, &err)) {
        reject(coord, session, MU_REJECT_INVALID,
               "Hello.status: it holds a share of a layout that the job cannot have: %s", err.text);
        return NULL;
    }
    return !accept_compute(coord, job, hello, session) || is_kept_out(coord, job, session, hello) ? NULL : job;
}

/* A worker that was declared lost, but holds state: in its old slot while that is there, else as a spare. Another
 * process may have its name by now, then it gets a new one. */
static struct worker *take_back(struct mu_coord *coord, struct job *job, const struct mu_hello *hello)
{
    struct worker *worker = find_lost(coord, job, hello->incarnation);
    bool name_taken = hello->name[0] && find_worker(coord, hello->name) && find_worker(coord, hello->name) != worker;
    if (!worker) {
        worker = add_worker(coord, job, name_taken ? "" : hello->name, hello->incarnation);
        if (worker)
            worker->lost = true; /* until its Hello is taken in */
    } else if (name_taken) {
        choose_name(coord, worker->name);
        map_put(&coord->by_name, name_key(worker->name), (uint32_t)(worker - coord->workers));
    }
    return worker;
}

/* It parks and is planned with, at once where nobody else has what it holds. */
static void taken_back(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    uint64_t step = worker->status.held.step;
    bool only = !others_are_whole(coord, job, worker, step);
    event(coord, MU_EVENT_WARNING, "worker_returned", job, worker,
          "worker %s came back with %s step %llu: taken in again", worker->name,
          only ? "the only copy of" : "its state of", (unsigned long long)step);
    if (job->has_generation && job->phase != MU_JP_FINALIZING && (worker->rank != NONE || only))
        park_all(coord, job);
}

/* The worker that this Hello speaks for: known, or new; NULL after a rejection. */
static struct worker *identify(struct mu_coord *coord, struct job *job, uint64_t session, const struct mu_hello *hello)
{
    struct worker *known = hello->name[0] ? find_worker(coord, hello->name) : NULL;
    bool same = known && (mu_id_equal(known->incarnation, hello->incarnation) || MU_MUTANT(MU_MUT_IGNORE_INCARNATION));
    if (same && !known->lost && job_of(coord, known) == job) {
        if (known->session != session) { /* the old stream may be half open */
            map_remove(&coord->by_session, known->session);
            close_session(coord, known->session);
        }
        return known;
    }
    if (holds_state(coord, job, hello)) {
        struct worker *worker = take_back(coord, job, hello);
        if (!worker)
            reject(coord, session, MU_REJECT_BUSY, "the coordinator's worker table is full (%u): raise --max-workers",
                   coord->config.max_workers);
        return worker;
    }
    if (claims_membership(hello)) {
        coord->counters.fenced_messages[MU_FENCE_LOST]++;
        reject(coord, session, MU_REJECT_FENCED, "worker '%s' was declared lost%s%s; it must come back as a new one",
               hello->name, known && known->lost ? ": " : "", known && known->lost ? known->reason : "");
        return NULL;
    }
    bool may_return = known && (known->rank != NONE || known->status.held.has_state);
    if (known && !known->lost && (known->session != 0 || may_return)) {
        reject(coord, session, MU_REJECT_BUSY,
               "the name '%s' is in use by a %s worker on %s (pid %llu): choose another --name%s", hello->name,
               known->session ? "live" : "silent", known->host, (unsigned long long)known->pid,
               known->session ? "" : " or wait until it is declared lost");
        return NULL;
    }
    if (known && !known->lost)
        declare_lost(coord, known, "stream reset, and a new process attached under its name");
    struct worker *worker = add_worker(coord, job, hello->name, hello->incarnation);
    if (!worker)
        reject(coord, session, MU_REJECT_BUSY, "the coordinator's worker table is full (%u): raise --max-workers",
               coord->config.max_workers);
    return worker;
}

static void locate(const struct mu_coord *coord, struct worker *worker)
{
    struct mu_node_site site;
    bool known = coord->config.nodes && mu_node_site_of(coord->config.nodes, worker->host, &site);
    worker->place = known ? site.place : NONE;
    worker->domain = known ? site.domain : host_number(worker);
}

static void on_hello(struct mu_coord *coord, uint64_t session, const struct mu_hello *hello)
{
    struct job *job = judge_hello(coord, session, hello);
    if (!job)
        return;
    struct worker *worker = identify(coord, job, session, hello);
    if (!worker)
        return;
    bool was_known = worker->session != 0 || worker->rank != NONE, was_ready = worker->ready, was_lost = worker->lost;
    bool refused = !accept_gpu(coord, worker, hello, session);
    if (refused || (hello->prepared_job && !was_ready &&
                    (!accept_identity(coord, job, hello, session) || !accept_nccl(coord, job, hello, session)))) {
        if (worker->rank == NONE)
            free_worker(coord, worker);
        return;
    }
    bool fresh_stream = worker->session != session;
    if (fresh_stream) /* an order or an answer may be lost with the old one */
        probe_left(coord, worker, "its stream was opened anew");
    worker->session = session;
    worker->awaited = false;
    coord->last_attach_us = lease_now(coord);
    map_put(&coord->by_session, session, (uint32_t)(worker - coord->workers));
    memcpy(worker->host, hello->host, sizeof worker->host);
    memcpy(worker->address, hello->address, sizeof worker->address);
    memcpy(worker->files_address, hello->files_address, sizeof worker->files_address);
    memcpy(worker->files_secret, hello->files_secret, sizeof worker->files_secret);
    worker->host_id = mu_host_id(worker->host);
    locate(coord, worker);
    memcpy(worker->backend, hello->backend, sizeof worker->backend);
    worker->pid = hello->pid;
    worker->threads = hello->threads;
    worker->memory_bytes = hello->memory_bytes;
    worker->nccl_version = hello->nccl_version;
    worker->status = hello->status;
    void_state(job, worker);
    suspect_status(job, worker);
    feed_note_status(worker, fresh_stream);
    worker->suspect = false;
    if (!worker->draining)
        worker->reason[0] = 0;
    worker->ready = hello->prepared_job;
    worker->lost = false;
    const struct mu_worker_record *record = find_worker_record(coord, worker->name);
    if (record && record->draining && !worker->draining) { /* ordered before a restart of the coordinator */
        worker->draining = true;
        copy_text(worker->reason, sizeof worker->reason, record->reason);
    }
    bind_to_node(coord, worker);
    count_ready(coord, worker);
    worker->seen_us = worker->progress_us = lease_now(coord);
    if (fresh_stream)
        welcome(coord, worker, hello);
    if (!was_known)
        event(coord, MU_EVENT_INFO, "worker_attached", job, worker, "worker %s attached from %s (pid %llu, %u threads)",
              worker->name, worker->host, (unsigned long long)worker->pid, worker->threads);
    else if (fresh_stream)
        event(coord, MU_EVENT_INFO, "worker_reattached", job, worker, "worker %s re-attached", worker->name);
    if (was_lost)
        taken_back(coord, job, worker);
    if (fresh_stream)
        checkpoint_writer_back(coord, job, worker);
    note_inventory(job, worker, hello);
    holder_back(coord, job, worker);
    reconcile(coord, worker);
    if (worker->used && worker->draining && !worker->lost)
        settle(coord, job);
}

/* ---- signs of life ---- */

/* One status names one failed peer; a worker that saw several die tells of each in turn. */
static void note_accusation(struct mu_coord *coord, const struct worker *worker)
{
    const struct job *job = job_of(coord, worker);
    const struct mu_worker_status *status = &worker->status;
    struct worker *target =
        status->peer_failure == MU_PEER_FAILURE_NONE ? NULL : member_at(coord, job, status->peer_rank);
    if (target && target != worker && worker->rank != NONE && status->generation == job->record.generation)
        target->accuser = (uint32_t)(worker - coord->workers);
}

static void count_phases(struct mu_coord *coord, struct job *job, const struct mu_step_report *report)
{
    const uint64_t us[MU_STEP_PHASES] = {report->data_us,        report->forward_us, report->backward_us,
                                         report->communicate_us, report->wait_us,    report->optimizer_us,
                                         report->snapshot_us};
    if (report->step_count == 0)
        return;
    for (int i = 0; i < MU_STEP_PHASES; i++)
        mu_histogram_add_many(&job->step_phases.of[i], us[i] / report->step_count, report->step_count);
    job->step_phases.wall_us = coord->wall_us;
}

static void on_step(struct mu_coord *coord, struct worker *worker, const struct mu_step_report *report)
{
    struct job *job = job_of(coord, worker);
    if (worker->status.phase == MU_PHASE_RUNNING) { /* a report kept over a re-attach says less than its Hello did */
        holds_own_share(job, worker, report->steps_done);
        worker->status.held.has_result = true;
        worker->status.held.result = report->result;
    }
    worker->progress_us = lease_now(coord);
    worker->timings[worker->timing_count++ % MU_TIMINGS_KEPT] =
        (struct timing){.generation = job->record.generation, .rank = worker->rank, .report = *report};
    if (report->steps_done > job->steps_done || !job->has_result) {
        job->steps_done = report->steps_done;
        job->progress_us = lease_now(coord);
        job->result = report->result;
        job->has_result = true;
        suspect_result(coord, job);
    }
    if (worker->rank == 0 && report->total_us > 0 && report->step_count > 0) {
        double rate = (double)report->tokens / ((double)report->total_us * 1e-6);
        job->tokens_per_second = job->tokens_per_second > 0 ? 0.7 * job->tokens_per_second + 0.3 * rate : rate;
        job->seconds_per_step = (double)report->total_us * 1e-6 / report->step_count;
    }
    count_phases(coord, job, report);
    goodput_report(coord, job, worker, report);
    interval_report(coord, job, worker, report);
    prediction_report(coord, job, worker, report);
    speeds_report(coord, job, worker, report);
    if (job->phase == MU_JP_STEPPING)
        checkpoint_policy(coord, job);
}

static void on_eval(struct mu_coord *coord, struct worker *worker, const struct mu_eval_report *eval)
{
    struct job *job = job_of(coord, worker);
    if (eval->step <= job->eval_step)
        return; /* every rank may tell; results are keyed by step */
    job->eval_step = eval->step;
    job->eval_loss = eval->loss;
    event(coord, MU_EVENT_INFO, "evaluation", job, NULL, "evaluation at step %llu: loss %.4f",
          (unsigned long long)eval->step, eval->loss);
}

static void on_goodbye(struct mu_coord *coord, struct worker *worker, const char *reason)
{
    worker->leaving = true;
    if (worker->draining)
        return;
    event(coord, MU_EVENT_INFO, "worker_leaving", job_of(coord, worker), worker, "worker %s asks to leave (%s)",
          worker->name, reason);
    drain(coord, worker, reason);
}

void drain(struct mu_coord *coord, struct worker *worker, const char *reason)
{
    struct job *job = job_of(coord, worker);
    worker->draining = true;
    count_ready(coord, worker);
    copy_text(worker->reason, sizeof worker->reason, reason);
    if (worker->rank == NONE && is_still(worker))
        release_drained(coord, job, false);
    else
        settle(coord, job);
}

void on_worker_message(struct mu_coord *coord, uint64_t session, const struct mu_worker_message *message)
{
    if (message->kind == MU_WM_HELLO) {
        on_hello(coord, session, &message->hello);
        return;
    }
    uint32_t slot = map_get(&coord->by_session, session);
    if (slot == NONE) { /* fenced, rejected, or it never said Hello */
        coord->counters.fenced_messages[MU_FENCE_STREAM]++;
        close_session(coord, session);
        return;
    }
    struct worker *worker = &coord->workers[slot];
    struct job *job = job_of(coord, worker);
    worker->seen_us = lease_now(coord);
    worker->suspect = false;
    bool current = worker->rank != NONE && message->generation == job->record.generation && !is_rolled_back(job);
    switch (message->kind) {
    case MU_WM_HEARTBEAT:
        if (message->heartbeat.progress != worker->progress || message->heartbeat.waiting) {
            worker->progress = message->heartbeat.progress;
            worker->progress_us = lease_now(coord);
        }
        worker->waiting = message->heartbeat.waiting;
        break;
    case MU_WM_STATUS: {
        if (session == worker->assigned_session && message->status.generation < worker->assigned_generation &&
            !MU_MUTANT(MU_MUT_ACCEPT_STALE_PARK)) {
            coord->counters.fenced_messages[MU_FENCE_GENERATION]++; /* said before it got its Assign: what it holds may
                                                                       change by that */
            break;
        }
        struct mu_error err;
        if (!shares_fit(job, &message->status.held, &err)) {
            declare_lost(coord, worker, "it says that it holds a share of a layout that the job cannot have: %s",
                         err.text);
            break;
        }
        worker->status = message->status;
        void_state(job, worker);
        suspect_status(job, worker);
        feed_note_status(worker, false);
        note_accusation(coord, worker);
        worker->progress_us = lease_now(coord);
        reconcile(coord, worker);
        break;
    }
    case MU_WM_STEP:
        if (current)
            on_step(coord, worker, &message->step);
        else
            coord->counters.fenced_messages[MU_FENCE_GENERATION]++;
        break;
    case MU_WM_EVAL:
        if (current)
            on_eval(coord, worker, &message->eval);
        break;
    case MU_WM_PIECE:
        on_piece(coord, worker, &message->piece);
        break;
    case MU_WM_KEPT:
        on_kept(coord, worker, &message->kept);
        break;
    case MU_WM_PROBED:
        on_probed(coord, worker, &message->probed);
        break;
    case MU_WM_GOODBYE:
        on_goodbye(coord, worker, message->goodbye.reason);
        break;
    case MU_WM_HELLO:
    case MU_WM_COUNT:
        break;
    }
}

/* ---- losses ---- */

/* A member whose exchange with `worker` failed in this generation: the second witness of its death. */
static const struct worker *peer_witness(struct mu_coord *coord, const struct job *job, const struct worker *worker)
{
    const struct worker *accuser = worker->accuser == NONE ? NULL : &coord->workers[worker->accuser];
    bool valid =
        accuser && worker->rank != NONE && accuser->used && accuser->rank != NONE && job_of(coord, accuser) == job;
    return valid ? accuser : NULL;
}

void on_disconnected(struct mu_coord *coord, uint64_t session, enum mu_stream_end end, const char *reason)
{
    uint32_t slot = map_get(&coord->by_session, session);
    if (slot == NONE)
        return;
    struct worker *worker = &coord->workers[slot];
    struct job *job = job_of(coord, worker);
    map_remove(&coord->by_session, session);
    worker->session = 0;
    coord->counters.stream_losses[end]++;
    probe_left(coord, worker, reason);
    bool holds_nothing = worker->status.generation == 0; /* it may come back as it likes */
    if (worker->rank == NONE && (holds_nothing || worker->draining)) {
        event(coord, MU_EVENT_INFO, "worker_left", job, worker, "worker %s left (%s)", worker->name,
              worker->draining ? worker->reason : reason);
        free_spare(coord, job, worker);
        return;
    }
    if (is_over(job)) {
        free_worker(coord, worker);
        return;
    }
    worker->suspect = true;
    worker->suspect_until_us = lease_now(coord) + (uint64_t)coord->config.reattach_grace_ms * 1000;
    if (worker->suspect_until_us < coord->next_scan_us)
        coord->next_scan_us = worker->suspect_until_us;
    copy_text(worker->reason, sizeof worker->reason, reason);
    const struct worker *witness = peer_witness(coord, job, worker);
    if (witness)
        declare_lost(coord, worker, "%s, confirmed by peer %s", reason, witness->name);
    else if (worker->rank != NONE || job->phase == MU_JP_PLANNING)
        member_silent(coord, job, worker);
}

/* Before its stream is closed, if that is still open. The first loss of a generation tells of those that come with it;
 * who hangs is looked at each time. */
static void examine(struct mu_coord *coord, struct job *job, const struct worker *worker)
{
    if (worker->rank == NONE || !job->has_generation || is_over(job))
        return;
    job->examined = job->record.generation;
    emit(coord,
         &(struct mu_coord_action){.kind = MU_CA_EXAMINE,
                                   .examine = {.job = &job->record, .worker = worker->name, .step = job->steps_done}});
}

void declare_lost(struct mu_coord *coord, struct worker *worker, const char *fmt, ...)
{
    struct job *job = job_of(coord, worker);
    char why[MU_TEXT_SIZE];
    __builtin_va_list args;
    __builtin_va_start(args, fmt);
    __builtin_vsnprintf(why, sizeof why, fmt, args);
    __builtin_va_end(args);
    copy_text(worker->reason, sizeof worker->reason, why);
    if (job->examined < job->record.generation)
        examine(coord, job, worker);
    if (worker->session) {
        map_remove(&coord->by_session, worker->session);
        close_session(coord, worker->session);
        worker->session = 0;
    }
    worker->lost = true;
    count_ready(coord, worker);
    goodput_note(coord, worker);
    bool counted =
        worker->awaited && death_is_counted(coord, worker->incarnation); /* lost before the restart already */
    job->workers_lost += !counted;
    persist_tally(coord, job);
    event(coord, MU_EVENT_WARNING, "worker_lost", job, worker, "worker %s lost (%s)", worker->name, why);
    if (!worker->draining && !counted)
        count_death(coord, job, worker->name, worker->host, worker->incarnation, worker->reason);
    checkpoint_writer_lost(coord, job, worker);
    holder_lost(coord, job, worker);
    if (worker->rank != NONE)
        member_lost(coord, job, worker);
    else
        free_spare(coord, job, worker);
}

/* A running member that does not wait for anybody and still gets nowhere is the one who hangs; one that prepares or
 * parks must be done within its limit. For how long it has hung, and the limit. */
static bool is_hanging(const struct mu_coord *coord, const struct job *job, const struct worker *worker,
                       uint64_t *ret_since_us, uint64_t *ret_limit_us)
{
    if (worker->rank == NONE || !job->has_generation || worker->arrived)
        return false;
    uint64_t hang_us = (uint64_t)coord->config.hang_floor_ms * 1000,
             steps_us = (uint64_t)(job->seconds_per_step * 20e6);
    *ret_since_us = worker->progress_us;
    if (job->phase == MU_JP_STEPPING || (job->phase == MU_JP_PARKING && !job->revoked)) {
        /* also on the way to the boundary at which a command holds */
        if (worker->waiting)
            return false;
        *ret_limit_us = hang_us > steps_us ? hang_us : steps_us;
    } else if (job->phase == MU_JP_PREPARING) {
        *ret_limit_us = (uint64_t)coord->config.prepare_limit_ms * 1000;
    } else if (job->phase == MU_JP_PARKING) {
        *ret_since_us = job->phase_since_us;
        *ret_limit_us = PARK_LIMIT_US;
    } else {
        return false;
    }
    return lease_now(coord) - *ret_since_us > *ret_limit_us;
}

/* After a restart thousands come back at once and queue: while others still arrive, one who is missing may be behind
 * them. */
static uint64_t grace_until(const struct mu_coord *coord, const struct worker *worker)
{
    uint64_t until_us = worker->suspect_until_us;
    if (!worker->awaited)
        return until_us;
    uint64_t backlog_us = coord->last_attach_us + (uint64_t)coord->config.suspect_ms * 1000;
    uint64_t most_us = coord->started_us + BACKLOG_LEASES_MAX * (uint64_t)coord->config.lost_ms * 1000;
    backlog_us = backlog_us < most_us ? backlog_us : most_us;
    return backlog_us > until_us ? backlog_us : until_us;
}

static void check_lease(struct mu_coord *coord, struct worker *worker)
{
    struct job *job = job_of(coord, worker);
    uint64_t now = lease_now(coord), age_us = now - worker->seen_us, since_us, limit_us;
    if (worker->session == 0) {
        uint64_t until_us = grace_until(coord, worker);
        if (now >= until_us)
            declare_lost(coord, worker, "%s, not back within %.1f s", worker->reason,
                         coord->config.reattach_grace_ms * 1e-3);
        else if (until_us < coord->next_scan_us)
            coord->next_scan_us = until_us;
    } else if (age_us > (uint64_t)coord->config.lost_ms * 1000) {
        examine(coord, job, worker);
        declare_lost(coord, worker, "no sign of life for %.1f s, limit %.1f s", (double)age_us * 1e-6,
                     coord->config.lost_ms * 1e-3);
    } else if (is_hanging(coord, job, worker, &since_us, &limit_us)) {
        job->hung[job->hung_count++ % MU_HUNG_KEPT] = worker->incarnation;
        examine(coord, job, worker);
        declare_lost(coord, worker, "alive but no progress for %.1f s, limit %.1f s, at step %llu",
                     (double)(now - since_us) * 1e-6, (double)limit_us * 1e-6,
                     (unsigned long long)worker->status.held.step);
    } else if (age_us > (uint64_t)coord->config.suspect_ms * 1000 && !worker->suspect) {
        worker->suspect = true;
        event(coord, MU_EVENT_WARNING, "worker_suspect", job, worker,
              "worker %s is suspect: no sign of life for %.1f s; it is lost after %.1f s", worker->name,
              (double)age_us * 1e-6, coord->config.lost_ms * 1e-3);
    }
}

void scan_leases(struct mu_coord *coord)
{
    if (lease_now(coord) < coord->next_scan_us)
        return;
    coord->next_scan_us = lease_now(coord) + SCAN_INTERVAL_US;
    scan_nodes(coord);
    for (uint32_t slot = 0; slot < coord->worker_high; slot++) {
        struct worker *worker = &coord->workers[slot];
        if (worker->used && !worker->lost)
            check_lease(coord, worker);
    }
}
