/* Checkpoints: intent -> pieces -> manifest -> committed -> deleted.
 *
 *   (none) --order--> INTENT --all written, manifest on disk--> COMMITTED --retention--> DELETING --gone--> (none)
 *                       |writer lost, piece failed, cancelled     |cannot be loaded, re-read and found wrong
 *                       +-----------------> DELETING              +--> BAD
 *
 * Piece reports are acknowledged only when the checkpoint is committed or given up: until then the writers keep and
 * repeat them, so a restart of the coordinator loses none. One intent per job at a time. */
#include "coordinator/core/internal.h"

#include <string.h>

#include "plan/retention.h"

struct checkpoint *find_checkpoint(struct job *job, uint64_t number)
{
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        if (job->checkpoints[i].record.number == number)
            return &job->checkpoints[i];
    }
    return NULL;
}

const struct checkpoint *newest_committed(const struct job *job)
{
    for (uint32_t i = job->checkpoint_count; i-- > 0;) {
        if (job->checkpoints[i].record.state == MU_CKPT_COMMITTED)
            return &job->checkpoints[i];
    }
    return NULL;
}

static void remove_checkpoint(struct job *job, struct checkpoint *checkpoint)
{
    free_holders(&checkpoint->record);
    size_t index = (size_t)(checkpoint - job->checkpoints);
    memmove(checkpoint, checkpoint + 1, (--job->checkpoint_count - index) * sizeof *checkpoint);
}

void forget_checkpoint(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_FORGET,
                                          .record = {.kind = MU_RECORD_CHECKPOINT, .checkpoint = &checkpoint->record}});
    remove_checkpoint(job, checkpoint);
}

static void emit_io(struct mu_coord *coord, const struct job *job, enum mu_coord_action_kind kind,
                    const struct mu_checkpoint_record *record, bool probe)
{
    emit(coord, &(struct mu_coord_action){
                    .kind = kind, .checkpoint_io = {.job = &job->record, .checkpoint = record, .probe = probe}});
}

static void publish(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    job->publishing = true;
    if (is_local(job))
        keep(coord, job, checkpoint, MU_KEEP_PUBLISH);
    else
        emit_io(coord, job, MU_CA_PUBLISH, &checkpoint->record, false);
}

static void delete_files(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    if (is_local(job))
        keep(coord, job, checkpoint, MU_KEEP_DISCARD);
    else
        emit_io(coord, job, MU_CA_DELETE, &checkpoint->record, false);
}

/* ---- ordering ---- */

static struct mu_snapshot snapshot_of(const struct checkpoint *checkpoint, uint32_t piece)
{
    struct mu_snapshot snapshot = {
        .checkpoint = checkpoint->record.number, .piece = piece, .layout = checkpoint->record.layout};
    memcpy(snapshot.dir, checkpoint->record.dir, sizeof snapshot.dir);
    return snapshot;
}

/* Everybody who has the newest command has the same set of open ones: those from here on. */
uint64_t first_open_command(const struct job *job)
{
    uint64_t first = job->record.command.open ? job->record.command.number : job->record.command.number + 1;
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        const struct mu_checkpoint_record *record = &job->checkpoints[i].record;
        if (record->number == job->intent && record->command && record->generation == job->record.generation &&
            record->command < first)
            first = record->command;
    }
    return first;
}

/* Ordered by Snapshot, of a parked worker, and not by a command: piece_count (none) counts as the record says. */
static bool by_snapshot(const struct job *job, const struct mu_checkpoint_record *record, uint32_t piece)
{
    return record->command == 0 || (piece < record->piece_count && job->pieces[piece].reassigned);
}

static void send_order(struct mu_coord *coord, const struct job *job, const struct checkpoint *checkpoint,
                       const struct worker *worker, uint32_t piece)
{
    struct mu_coord_message message = {.generation = job->record.generation};
    if (!by_snapshot(job, &checkpoint->record, piece)) {
        message.kind = MU_CM_COMMAND;
        message.command.number = checkpoint->record.command;
        message.command.kind = MU_COMMAND_CHECKPOINT;
        message.command.not_before_step = checkpoint->record.not_before_step;
        message.command.first_open = first_open_command(job);
        message.command.snapshot = snapshot_of(checkpoint, piece);
    } else {
        message.kind = MU_CM_SNAPSHOT;
        message.generation = worker->status.generation; /* where it is parked */
        message.snapshot = snapshot_of(checkpoint, piece);
    }
    send_to(coord, worker, &message);
}

static void add_writer(const struct mu_coord *coord, struct job *job, const struct worker *worker, uint32_t index)
{
    struct mu_piece_record *piece = &job->pieces[index];
    memset(piece, 0, sizeof *piece);
    piece->writer = worker->incarnation;
    memcpy(piece->writer_name, worker->name, sizeof piece->writer_name);
    job->piece_slots[index] = (uint32_t)(worker - coord->workers);
}

/* The layout of pieces for `replicas` writers in each column of `base`. False: too many pieces. */
static bool piece_layout(const struct mu_layout *base, uint32_t replicas, struct mu_layout *ret)
{
    uint32_t columns = base->tp * base->pp;
    *ret = *base;
    ret->idle = ret->buddy_shift = 0; /* each piece has one writer */
    if (columns > MU_PIECES_MAX)
        return false;
    uint32_t most = MU_PIECES_MAX / columns;
    ret->dp = replicas < most ? replicas : most;
    return ret->dp > 0 && (!base->sharded || ret->dp == base->dp); /* moments that only their owners have */
}

/* Every working rank writes its part (where there are very many replicas, the first ones write larger parts). */
static uint32_t choose_members(struct mu_coord *coord, struct job *job, struct mu_layout *ret_layout)
{
    if (!piece_layout(&job->layout, job->layout.dp, ret_layout))
        return 0;
    uint32_t count = mu_layout_working(ret_layout);
    for (uint32_t piece = 0; piece < count; piece++) {
        uint32_t rank = mu_layout_rank(&job->layout, mu_layout_coords(ret_layout, piece));
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker || worker->lost)
            return 0;
        add_writer(coord, job, worker, piece);
    }
    return count;
}

/* The first share of `step` that the worker has in the columns of `base`; NULL: none. */
static const struct mu_held_share *share_of(const struct worker *worker, const struct mu_layout *base, uint64_t step)
{
    const struct mu_held *held = &worker->status.held;
    if (worker->lost || worker->session == 0 || worker->status.phase != MU_PHASE_PARKED || !held->has_state ||
        held->step != step)
        return NULL;
    for (uint32_t i = 0; i < held->share_count; i++) {
        const struct mu_held_share *share = &held->shares[i];
        bool fits = same_columns(&share->layout, base) && share->layout.sharded == base->sharded &&
                    (!base->sharded || share->layout.dp == base->dp);
        if (fits && !share->owned_only)
            return share;
    }
    return NULL;
}

/* Writers for a layout in whose columns parked workers hold that step: each of them writes one piece. */
static uint32_t choose_parked_in(struct mu_coord *coord, struct job *job, const struct mu_layout *base, uint64_t step,
                                 struct mu_layout *ret_layout)
{
    uint32_t columns = base->tp * base->pp, fewest = UINT32_MAX;
    uint32_t *counts = coord->column_holders;
    memset(counts, 0, columns * sizeof *counts);
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        const struct mu_held_share *share = share_of(w, base, step);
        if (share) {
            struct mu_coords at = mu_layout_coords(&share->layout, share->rank);
            counts[at.p * base->tp + at.t]++;
        }
    }
    for (uint32_t column = 0; column < columns; column++)
        fewest = counts[column] < fewest ? counts[column] : fewest;
    uint32_t replicas = base->sharded ? base->dp : fewest < job->leaves ? fewest : job->leaves;
    if (fewest == 0 || fewest < (base->sharded ? base->dp : 1) || !piece_layout(base, replicas, ret_layout))
        return 0;
    uint32_t count = mu_layout_working(ret_layout), chosen = 0;
    memset(job->pieces, 0, count * sizeof job->pieces[0]);
    memset(counts, 0, columns * sizeof *counts);
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        const struct mu_held_share *share = share_of(w, base, step);
        if (!share)
            continue;
        struct mu_coords at = mu_layout_coords(&share->layout, share->rank);
        if (!base->sharded)
            at.d = counts[at.p * base->tp + at.t]++; /* any replica of the column will do */
        if (at.d >= ret_layout->dp)
            continue;
        uint32_t piece = mu_layout_rank(ret_layout, at);
        chosen += mu_id_is_zero(job->pieces[piece].writer);
        add_writer(coord, job, w, piece);
    }
    return chosen == count ? count : 0;
}

/* Who is parked with `step`, in the layout of any of them that is whole: a generation that failed while it was prepared
 * leaves shares of two. */
static uint32_t choose_parked(struct mu_coord *coord, struct job *job, uint64_t step, struct mu_layout *ret_layout)
{
    enum { LAYOUTS_TRIED = 8 };
    struct mu_layout tried[LAYOUTS_TRIED];
    uint32_t tried_count = 0;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        const struct mu_held *held = &w->status.held;
        for (uint32_t i = 0; held->has_state && held->step == step && i < held->share_count; i++) {
            const struct mu_layout *base = &held->shares[i].layout;
            uint32_t at = 0;
            while (at < tried_count && !mu_layout_equal(&tried[at], base))
                at++;
            if (at < tried_count || tried_count == LAYOUTS_TRIED)
                continue;
            tried[tried_count++] = *base;
            uint32_t count = choose_parked_in(coord, job, base, step, ret_layout);
            if (count)
                return count;
        }
    }
    return 0;
}

/* Which piece it has still to write; piece_count: none. */
static uint32_t open_piece_of(const struct job *job, const struct mu_checkpoint_record *record,
                              const struct worker *worker)
{
    uint32_t piece = 0;
    while (piece < record->piece_count &&
           (job->pieces[piece].done || !mu_id_equal(job->pieces[piece].writer, worker->incarnation)))
        piece++;
    return piece;
}

static bool may_order(const struct job *job)
{
    return job->record.spec.checkpoint.path[0] && job->intent == 0 && job->checkpoint_count < MU_CHECKPOINTS_MAX;
}

bool can_order_parked(struct mu_coord *coord, struct job *job, uint64_t step)
{
    struct mu_layout layout;
    return may_order(job) && choose_parked(coord, job, step, &layout) > 0;
}

uint64_t order_checkpoint(struct mu_coord *coord, struct job *job, uint64_t not_before_step, bool parked)
{
    struct mu_layout layout;
    if (!may_order(job))
        return 0;
    uint32_t writers =
        parked ? choose_parked(coord, job, not_before_step, &layout) : choose_members(coord, job, &layout);
    if (writers == 0)
        return 0;
    struct checkpoint *checkpoint = &job->checkpoints[job->checkpoint_count];
    struct mu_checkpoint_record *record = &checkpoint->record;
    memset(checkpoint, 0, sizeof *checkpoint);
    if (is_local(job) && !holders_of_writers(coord, job, checkpoint, writers))
        return 0;
    job->checkpoint_count++;
    record->job_uid = job->record.uid;
    memcpy(record->job, job->record.spec.name, sizeof record->job);
    record->number = ++job->record.next_checkpoint;
    record->nonce = coord->random;
    record->generation = job->record.generation;
    if (!parked && !MU_MUTANT(MU_MUT_REUSE_COMMAND_NUMBER))
        job->record.command.number++;
    record->command = parked ? 0 : job->record.command.number;
    record->not_before_step = not_before_step;
    record->state = MU_CKPT_INTENT;
    record->ordered_wall_us = coord->wall_us;
    record->attempt = job->checkpoint_attempt;
    record->layout = layout;
    record->piece_count = writers;
    record->pieces = job->pieces;
    uint64_t step = not_before_step ? not_before_step : job->steps_done; /* on request: soon after this one */
    format_into(record->dir, sizeof record->dir, "%s/%010llu-%010llu-%016llx%016llx", job->record.spec.checkpoint.path,
                (unsigned long long)record->number, (unsigned long long)step, (unsigned long long)record->nonce.high,
                (unsigned long long)record->nonce.low);
    job->intent = record->number;
    job->pieces_done = 0;
    job->publishing = job->untaken = false;
    job->checkpoint_wanted = false;
    job->checkpoint_attempt = 0;
    interval_ordered(coord, job);
    persist_job(coord, job);
    persist_tally(coord, job);
    persist_checkpoint(coord, record);
    for (uint32_t piece = 0; piece < writers; piece++)
        send_order(coord, job, checkpoint, &coord->workers[job->piece_slots[piece]], piece);
    for (uint32_t rank = 0; !parked && rank < job->world; rank++) { /* no piece, but its vote must know the command */
        bool writes = !mu_layout_is_idle(&job->layout, rank) && mu_layout_coords(&job->layout, rank).d < layout.dp;
        if (!writes)
            send_order(coord, job, checkpoint, member_at(coord, job, rank), writers);
    }
    return record->number;
}

void checkpoint_policy(struct mu_coord *coord, struct job *job)
{
    const struct mu_job_spec *spec = &job->record.spec;
    if (job->phase != MU_JP_STEPPING || job->intent || spec->checkpoint.path[0] == 0 || job->arrived > 0)
        return;
    if (job->checkpoint_wanted) {
        order_checkpoint(coord, job, 0, false);
        return;
    }
    const uint64_t every = interval_steps(job);
    if (every == 0)
        return;
    if (interval_is_auto(job))
        job->next_due_step = interval_due(job);
    else if (job->next_due_step <= job->steps_done)
        job->next_due_step = (job->steps_done / every + 1) * every;
    uint64_t due = job->next_due_step;
    /* Ordered a little ahead, so that every rank has the command before the boundary at which it is due. */
    uint64_t lead = 2 + (job->seconds_per_step > 0 ? (uint64_t)(0.3 / job->seconds_per_step) : 0);
    if (due >= mu_job_end(spec) || job->steps_done + lead < due)
        return; /* the last one is taken when all are parked at the end */
    if (!order_checkpoint(coord, job, due, false))
        event(
            coord, MU_EVENT_ERROR, "checkpoint_failed", job, NULL,
            "no checkpoint can be ordered for step %llu: too many are kept (%u), or the layout has more than %d pieces",
            (unsigned long long)due, job->checkpoint_count, MU_PIECES_MAX);
    job->next_due_step = due + every;
    job->interval.base = due;
}

void resend_checkpoint(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    struct checkpoint *checkpoint = job->intent ? find_checkpoint(job, job->intent) : NULL;
    if (!checkpoint)
        return;
    const struct mu_checkpoint_record *record = &checkpoint->record;
    uint32_t piece = open_piece_of(job, record, worker);
    bool wanted =
        by_snapshot(job, record, piece)
            ? piece < record->piece_count && worker->status.phase == MU_PHASE_PARKED
            : record->generation == job->record.generation && worker->status.command_received < record->command;
    if (wanted)
        send_order(coord, job, checkpoint, worker, piece);
}

/* ---- giving up ---- */

static void acknowledge(struct mu_coord *coord, const struct worker *worker, uint64_t number, uint32_t piece)
{
    struct mu_coord_message message = {.kind = MU_CM_PIECE_ACK};
    message.piece_ack.checkpoint = number;
    message.piece_ack.piece = piece;
    send_to(coord, worker, &message);
}

static void acknowledge_all(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record)
{
    for (uint32_t piece = 0; piece < record->piece_count; piece++) {
        uint32_t slot = job->piece_slots[piece];
        if (slot != NONE && coord->workers[slot].used &&
            mu_id_equal(coord->workers[slot].incarnation, job->pieces[piece].writer))
            acknowledge(coord, &coord->workers[slot], record->number, piece);
    }
}

/* What is not an intent fits any layout. */
static void forget_pieces(struct mu_checkpoint_record *record)
{
    record->pieces = NULL;
    record->piece_count = record->attempt = 0;
    memset(&record->layout, 0, sizeof record->layout);
}

void start_deleting(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    MU_ASSERT(!checkpoint->record.owner[0]); /* only read */
    checkpoint->record.state = MU_CKPT_DELETING;
    forget_pieces(&checkpoint->record);
    if (!MU_MUTANT(MU_MUT_DELETE_WITHOUT_RECORD))
        persist_checkpoint(coord, &checkpoint->record);
    delete_files(coord, job, checkpoint);
}

/* `again`: it is through no fault of the checkpoint's own; order it again at once, but not for ever: what keeps taking
 * the writers away is then told as an error, and the next one comes when the policy says. */
void abandon_checkpoint(struct mu_coord *coord, struct job *job, const char *text, bool again)
{
    struct checkpoint *checkpoint = find_checkpoint(job, job->intent);
    uint32_t attempt = checkpoint ? checkpoint->record.attempt + 1 : 1;
    bool too_often = again && attempt >= MU_CHECKPOINT_ATTEMPTS_MAX;
    again = again && !too_often;
    job->intent = 0;
    job->publishing = job->untaken = false;
    job->checkpoint_wanted = job->checkpoint_wanted || again;
    job->checkpoint_attempt = again ? attempt : 0;
    if (again)
        job->checkpoint_retry_us = 0;
    else
        job->checkpoint_failures++;
    if (!checkpoint)
        return;
    char often[48] = "";
    if (too_often)
        format_into(often, sizeof often, "; %u in a row, the next one by the policy", attempt);
    event(coord, again ? MU_EVENT_WARNING : MU_EVENT_ERROR, "checkpoint_failed", job, NULL,
          "checkpoint %llu given up: %s%s%s", (unsigned long long)checkpoint->record.number, text,
          again ? "; ordered again" : "", often);
    acknowledge_all(coord, job, &checkpoint->record);
    start_deleting(coord, job, checkpoint);
}

/* The boundary of the snapshot, as far as it is known. */
static uint64_t snapshot_step(const struct mu_checkpoint_record *record)
{
    return record->command ? record->step : record->not_before_step;
}

static bool writer_is_there(const struct mu_coord *coord, const struct job *job, uint32_t piece)
{
    uint32_t slot = job->piece_slots[piece];
    const struct worker *writer = slot == NONE ? NULL : &coord->workers[slot];
    return writer && writer->used && !writer->lost && mu_id_equal(writer->incarnation, job->pieces[piece].writer);
}

/* Whoever is parked at the snapshot's boundary with the same chunks, and has no piece of it to write, takes a lost
 * writer's piece over. False: nobody can. */
static bool reassign(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint, uint32_t piece)
{
    struct mu_checkpoint_record *record = &checkpoint->record;
    uint64_t step = snapshot_step(record);
    for (struct worker *w = step ? next_worker(coord, job, NULL) : NULL; w; w = next_worker(coord, job, w)) {
        if (!holds_piece(w, &record->layout, piece, step) || open_piece_of(job, record, w) < record->piece_count ||
            (is_local(job) && !add_holder(record, w->host)))
            continue;
        event(coord, MU_EVENT_INFO, "piece_reassigned", job, w,
              "piece %u of checkpoint %llu is written by worker %s: its writer %s was lost", piece,
              (unsigned long long)record->number, w->name, job->pieces[piece].writer_name);
        add_writer(coord, job, w, piece);
        job->pieces[piece].reassigned = true;
        persist_checkpoint(coord, record);
        send_order(coord, job, checkpoint, w, piece);
        return true;
    }
    return false;
}

/* Members that still move may turn out to be at the boundary: then it is judged when they are parked. */
void checkpoint_writer_lost(struct mu_coord *coord, struct job *job, const struct worker *worker)
{
    struct checkpoint *checkpoint = job->intent && !job->publishing ? find_checkpoint(job, job->intent) : NULL;
    if (!checkpoint)
        return;
    bool moving = job->phase == MU_JP_PREPARING || job->phase == MU_JP_STEPPING || job->phase == MU_JP_PARKING;
    bool later = moving && worker->rank != NONE && snapshot_step(&checkpoint->record) > 0;
    for (uint32_t piece = 0; piece < checkpoint->record.piece_count; piece++) {
        bool hit = mu_id_equal(job->pieces[piece].writer, worker->incarnation) && !job->pieces[piece].done;
        if (!hit || reassign(coord, job, checkpoint, piece) || later)
            continue;
        char text[MU_TEXT_SIZE];
        format_into(text, sizeof text, "worker %s was lost before its piece was written", worker->name);
        abandon_checkpoint(coord, job, text, true);
        return;
    }
}

static void not_taken(struct mu_coord *coord, struct job *job)
{
    if (job->publishing)
        job->untaken = true; /* a probe is out: only a manifest that is there already can save it */
    else
        abandon_checkpoint(coord, job, "the generation ended before every rank took its snapshot", true);
}

/* A writer has a new stream: the order may have been lost with the old one. */
void checkpoint_writer_back(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    const struct checkpoint *checkpoint = job->intent ? find_checkpoint(job, job->intent) : NULL;
    const struct mu_checkpoint_record *record = checkpoint ? &checkpoint->record : NULL;
    uint32_t piece = record ? open_piece_of(job, record, worker) : 0;
    if (!record || piece == record->piece_count)
        return;
    bool taken = worker->status.checkpoint_taken >= record->number && !job->pieces[piece].reassigned;
    if (taken)
        return;
    if (by_snapshot(job, record, piece) && worker->status.phase == MU_PHASE_PARKED)
        resend_checkpoint(coord, job, worker); /* one that it has taken it does not take again */
    else if (by_snapshot(job, record, piece) || record->generation != job->record.generation)
        not_taken(coord, job); /* it went on without having heard of it */
}

/* A rank that was revoked before the boundary (and will roll forward) took none. */
static bool all_taken(const struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record)
{
    for (uint32_t piece = 0; piece < record->piece_count; piece++) {
        bool taken = writer_is_there(coord, job, piece) &&
                     (job->pieces[piece].reassigned ||
                      coord->workers[job->piece_slots[piece]].status.checkpoint_taken >= record->number);
        if (!job->pieces[piece].done && !taken)
            return false;
    }
    return true;
}

/* All are parked: give up what can no longer become complete, repeat what the parked may not have heard. */
void checkpoint_after_park(struct mu_coord *coord, struct job *job)
{
    struct checkpoint *checkpoint = job->intent ? find_checkpoint(job, job->intent) : NULL;
    if (!checkpoint)
        return;
    const struct mu_checkpoint_record *record = &checkpoint->record;
    for (uint32_t piece = 0; piece < record->piece_count && !job->publishing; piece++) {
        if (job->pieces[piece].done || writer_is_there(coord, job, piece) || reassign(coord, job, checkpoint, piece))
            continue;
        char text[MU_TEXT_SIZE];
        format_into(text, sizeof text, "worker %s was lost before its piece was written, and nobody else holds it",
                    job->pieces[piece].writer_name);
        abandon_checkpoint(coord, job, text, true);
        return;
    }
    if (record->command && !all_taken(coord, job, record)) {
        not_taken(coord, job);
        return;
    }
    for (uint32_t piece = 0; piece < record->piece_count;
         piece++) { /* ordered of the parked, perhaps before a restart */
        if (!job->pieces[piece].done && by_snapshot(job, record, piece) && job->piece_slots[piece] != NONE)
            resend_checkpoint(coord, job, &coord->workers[job->piece_slots[piece]]);
    }
}

/* ---- pieces and commit ---- */

static bool all_done(const struct job *job, const struct mu_checkpoint_record *record)
{
    uint32_t missing = record->piece_count - job->pieces_done;
    return missing == 0 || (MU_MUTANT(MU_MUT_COMMIT_MISSING_PIECE) && missing == 1);
}

void on_piece(struct mu_coord *coord, struct worker *worker, const struct mu_piece_report *report)
{
    struct job *job = job_of(coord, worker);
    struct checkpoint *checkpoint = job->intent == report->checkpoint ? find_checkpoint(job, job->intent) : NULL;
    struct mu_piece_record *piece =
        checkpoint && report->piece < checkpoint->record.piece_count ? &job->pieces[report->piece] : NULL;
    if (!piece || !mu_id_equal(piece->writer, worker->incarnation)) {
        acknowledge(coord, worker, report->checkpoint,
                    report->piece); /* of one that is committed, given up, or never was */
        return;
    }
    if (piece->done)
        return;
    if (report->status != MU_OK) {
        char text[MU_EVENT_TEXT_SIZE];
        format_into(text, sizeof text, "worker %s: %s", worker->name, report->text);
        abandon_checkpoint(coord, job, text, false);
        return;
    }
    if (job->pieces_done > 0 && checkpoint->record.step != report->step) {
        abandon_checkpoint(coord, job, "ranks took their snapshots at different steps", true);
        return;
    }
    checkpoint->record.step = report->step;
    piece->done = true;
    job->pieces_done++;
    piece->size_bytes = report->size_bytes;
    piece->checksum = report->checksum;
    memcpy(piece->file, report->file, sizeof piece->file);
    job->piece_slots[report->piece] = (uint32_t)(worker - coord->workers);
    if (MU_MUTANT(MU_MUT_ACK_BEFORE_DURABLE))
        acknowledge(coord, worker, report->checkpoint, report->piece);
    if (!job->publishing && all_done(job, &checkpoint->record))
        publish(coord, job, checkpoint);
}

static const struct checkpoint *newest_verified(const struct job *job)
{
    for (uint32_t i = job->checkpoint_count; i-- > 0;) {
        const struct mu_checkpoint_record *record = &job->checkpoints[i].record;
        if (record->state == MU_CKPT_COMMITTED && record->verified)
            return &job->checkpoints[i];
    }
    return NULL;
}

/* Its own, until the policy says otherwise. */
static bool is_kept(const struct checkpoint *checkpoint)
{
    enum mu_checkpoint_state state = checkpoint->record.state;
    return (state == MU_CKPT_COMMITTED || state == MU_CKPT_BAD) && !checkpoint->record.owner[0];
}

/* Whatever the policy keeps, there must be room for the next ones: the oldest goes, loudly, but never the last verified
 * one. */
static void make_room(struct mu_coord *coord, struct job *job)
{
    enum { ROOM = 16 };
    uint32_t kept = 0;
    for (uint32_t i = 0; i < job->checkpoint_count; i++)
        kept += is_kept(&job->checkpoints[i]);
    for (uint32_t i = 0; i < job->checkpoint_count && kept > MU_CHECKPOINTS_MAX - ROOM; i++) {
        struct checkpoint *checkpoint = &job->checkpoints[i];
        if (!is_kept(checkpoint) || is_borrowed(coord, checkpoint) || checkpoint == newest_verified(job))
            continue;
        event(coord, MU_EVENT_WARNING, "checkpoint_dropped", job, NULL,
              "checkpoint %llu at step %llu is deleted though the job file keeps it: a job has at most %d",
              (unsigned long long)checkpoint->record.number, (unsigned long long)checkpoint->record.step,
              MU_CHECKPOINTS_MAX - ROOM);
        start_deleting(coord, job, checkpoint);
        kept--;
    }
}

void retain_checkpoints(struct mu_coord *coord, struct job *job)
{
    struct mu_checkpoint_info list[MU_CHECKPOINTS_MAX];
    uint32_t index[MU_CHECKPOINTS_MAX];
    size_t count = 0, chosen[MU_CHECKPOINTS_MAX];
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        const struct checkpoint *checkpoint = &job->checkpoints[i];
        if (!is_kept(checkpoint))
            continue;
        index[count] = i;
        uint64_t seq = checkpoint->record.number;
        list[count++] = (struct mu_checkpoint_info){.seq = MU_MUTANT(MU_MUT_RETENTION_DELETES_NEWEST) ? ~seq : seq,
                                                    .step = checkpoint->record.step,
                                                    .pinned = is_borrowed(coord, checkpoint),
                                                    .verified = checkpoint->record.verified,
                                                    .quarantined = checkpoint->record.state == MU_CKPT_BAD};
    }
    const struct mu_job_terms terms = terms_now(job);
    if (job->suspect && !MU_MUTANT(MU_MUT_RETAIN_SUSPECT))
        count = 0; /* what is newer may turn out to be worth nothing */
    const struct mu_retention_policy policy = {.keep = terms.keep, .keep_every = terms.keep_every, .keep_verified = 1};
    size_t chosen_count = mu_retention_select(list, count, &policy, chosen);
    for (size_t i = 0; i < chosen_count; i++)
        start_deleting(coord, job, &job->checkpoints[index[chosen[i]]]);
    make_room(coord, job);
}

static void commit(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint, uint64_t step,
                   uint64_t size_bytes)
{
    struct mu_checkpoint_record *record = &checkpoint->record;
    record->state = MU_CKPT_COMMITTED;
    record->step = step;
    record->size_bytes = size_bytes;
    record->wall_us = coord->wall_us;
    job->record.checkpoint_seen = true;
    job->checkpoint_failures = job->checkpoint_attempt = 0;
    if (job->record.steps_done < step)
        job->record.steps_done = step;
    record->attempt = 0;
    memset(&record->layout, 0, sizeof record->layout);
    persist_job(coord, job);
    persist_checkpoint(coord, record);
    acknowledge_all(coord, job, record);
    forget_pieces(record); /* the manifest has them from here on */
    event(coord, MU_EVENT_INFO, "checkpoint_committed", job, NULL, "checkpoint %llu committed at step %llu (%.1f MB)",
          (unsigned long long)record->number, (unsigned long long)step, (double)size_bytes * 1e-6);
    job->intent = 0;
    job->publishing = false;
    interval_committed(coord, job);
    return_borrowed(coord, job);
    retain_checkpoints(coord, job);
    scrub_next(coord);
    job_tick(coord, job);
}

/* After a restart nothing is on disk yet: the writers will report, unless one of them is not there any more. */
static void after_probe(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    const struct mu_checkpoint_record *record = &checkpoint->record;
    for (uint32_t piece = 0; piece < record->piece_count; piece++) {
        if (!writer_is_there(coord, job, piece) && !job->pieces[piece].done) {
            abandon_checkpoint(coord, job, "its writers did not survive", true);
            return;
        }
    }
    if (job->untaken) {
        abandon_checkpoint(coord, job, "the generation ended before every rank took its snapshot", true);
        return;
    }
    if (all_done(job, record))
        publish(coord, job, checkpoint);
}

void on_published(struct mu_coord *coord, struct job *job, uint64_t number, enum mu_status status, uint64_t step,
                  uint64_t size_bytes, const char *text)
{
    struct checkpoint *checkpoint = find_checkpoint(job, number);
    if (number != job->intent || !checkpoint || !job->publishing)
        return; /* given up meanwhile */
    if (status == MU_OK) {
        commit(coord, job, checkpoint, step, size_bytes);
    } else if (!all_done(job, &checkpoint->record)) { /* a probe */
        job->publishing = false;
        after_probe(coord, job, checkpoint);
    } else {
        abandon_checkpoint(coord, job, text ? text : mu_status_name(status), false);
    }
}

void on_deleted(struct mu_coord *coord, struct job *job, uint64_t number, enum mu_status status, const char *text)
{
    struct checkpoint *checkpoint = find_checkpoint(job, number);
    if (!checkpoint || checkpoint->record.state != MU_CKPT_DELETING)
        return;
    if (status != MU_OK && status != MU_ERR_NOT_FOUND) {
        event(coord, MU_EVENT_WARNING, "checkpoint_delete_failed", job, NULL,
              "checkpoint %llu could not be deleted: %s", (unsigned long long)number,
              text ? text : mu_status_name(status));
    }
    forget_checkpoint(coord, job, checkpoint);
}

void mark_checkpoint_bad(struct mu_coord *coord, struct job *job, uint64_t number, const char *text)
{
    struct checkpoint *checkpoint = find_checkpoint(job, number);
    if (!checkpoint || checkpoint->record.state != MU_CKPT_COMMITTED)
        return;
    checkpoint->record.state = MU_CKPT_BAD;
    checkpoint->record.verified = false;
    copy_text(checkpoint->record.text, sizeof checkpoint->record.text, text);
    persist_checkpoint(coord, &checkpoint->record);
    const struct checkpoint *newest = newest_committed(job);
    bool newer = newest && newest->record.number > number;
    event(coord, MU_EVENT_ERROR, "checkpoint_bad", job, NULL, "checkpoint %llu is bad (%s); %s",
          (unsigned long long)number, text, newer ? "newer ones are not affected" : "an older one takes its place");
}

/* What a file system holds of an open intent. (Of a local one nobody is there to ask yet: its writers report again.) */
static void probe(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    const struct mu_checkpoint_record *record = &checkpoint->record;
    job->intent = record->number;
    job->pieces_done = 0;
    job->publishing = true;
    for (uint32_t piece = 0; piece < record->piece_count; piece++) {
        const struct worker *writer = find_worker(coord, job->pieces[piece].writer_name);
        bool same = writer && mu_id_equal(writer->incarnation, job->pieces[piece].writer);
        job->piece_slots[piece] = same ? (uint32_t)(writer - coord->workers) : NONE;
        job->pieces[piece].done = false;
    }
    if (is_local(job))
        on_published(coord, job, record->number, MU_ERR_NOT_FOUND, 0, 0, NULL);
    else
        emit_io(coord, job, MU_CA_PUBLISH, record, true);
}

void probe_intents(struct mu_coord *coord, struct job *job)
{
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        struct checkpoint *checkpoint = &job->checkpoints[i];
        if (checkpoint->record.state == MU_CKPT_DELETING)
            delete_files(coord, job, checkpoint);
        else if (checkpoint->record.state == MU_CKPT_INTENT && is_over(job))
            start_deleting(coord, job, checkpoint);
        else if (checkpoint->record.state == MU_CKPT_INTENT)
            probe(coord, job, checkpoint);
    }
    delete_void(coord, job);
}
