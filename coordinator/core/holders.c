/* Checkpoints of kind local: each host has a directory of its own, and of each piece two hosts have a file.
 *
 * The holders of a checkpoint are the hosts of its writers, in a ring: each has the pieces of its own workers and a
 * copy of those of the holder before it. So the checkpoint can be read while of no two neighbours in the ring both are
 * gone. What the coordinator's own file system does for a shared directory (publish, re-read, delete), one worker of
 * each holder does here by order. An order is out until all holders have answered; it goes again to whoever is there
 * when a worker is lost or comes back, and done again it changes nothing. */
#include "coordinator/core/internal.h"

#include <stdlib.h>
#include <string.h>

enum { UNREACHABLE_US = 30000000 }; /* so long the hosts of the newest one are waited for before an older one serves */

bool is_local(const struct job *job)
{
    return job->record.spec.checkpoint.kind == MU_CHECKPOINT_LOCAL;
}

/* ---- who holds ---- */

static uint32_t find_holder(const struct mu_checkpoint_record *record, uint64_t host_id)
{
    for (uint32_t i = 0; i < record->holder_count; i++) {
        if (record->holders[i].host_id == host_id)
            return i;
    }
    return NONE;
}

bool add_holder(struct mu_checkpoint_record *record, const char *host)
{
    uint64_t host_id = mu_host_id(host);
    if (find_holder(record, host_id) != NONE)
        return true;
    uint32_t count = record->holder_count;
    bool full = (count & (count - 1)) == 0; /* room is a power of two */
    if (count == MU_HOLDERS_MAX)
        return false;
    if (full) {
        struct mu_holder_record *more = realloc(record->holders, (count ? 2 * count : 1) * sizeof *more);
        if (!more)
            return false;
        record->holders = more;
    }
    struct mu_holder_record *holder = &record->holders[record->holder_count++];
    *holder = (struct mu_holder_record){.host_id = host_id, .keeper = NONE, .asked = NONE};
    copy_text(holder->host, sizeof holder->host, host);
    return true;
}

bool holders_of_writers(struct mu_coord *coord, const struct job *job, struct checkpoint *checkpoint, uint32_t writers)
{
    for (uint32_t piece = 0; piece < writers; piece++) {
        if (!add_holder(&checkpoint->record, coord->workers[job->piece_slots[piece]].host)) {
            free_holders(&checkpoint->record);
            return false;
        }
    }
    return true;
}

void free_holders(struct mu_checkpoint_record *record)
{
    free(record->holders);
    record->holders = NULL;
    record->holder_count = 0;
}

static bool has(const struct mu_hello *hello, uint64_t nonce_low)
{
    uint32_t i = 0;
    while (i < hello->inventory_count && hello->inventory[i] != nonce_low)
        i++;
    return i < hello->inventory_count;
}

/* A disk may have been lost while its host was away. (What a Hello says may be older than what was published
 * meanwhile: then a re-read puts it right.) */
void note_inventory(struct job *job, const struct worker *worker, const struct mu_hello *hello)
{
    for (uint32_t i = 0; i < job->checkpoint_count && worker->files_address[0]; i++) {
        struct mu_checkpoint_record *record = &job->checkpoints[i].record;
        uint32_t index = record->state == MU_CKPT_COMMITTED ? find_holder(record, worker->host_id) : NONE;
        if (index != NONE)
            record->holders[index].missing = !has(hello, record->nonce.low);
    }
}

static bool keeps(const struct mu_coord *coord, const struct job *job, const struct worker *worker, uint64_t host_id)
{
    return worker->used && &coord->jobs[worker->job] == job && worker->host_id == host_id && worker->session &&
           !worker->lost && worker->files_address[0];
}

/* A worker of that host that answers and gives out files; NULL: none. The last one found is asked first: a list of
 * holders goes to every rank. */
static const struct worker *keeper_of(struct mu_coord *coord, const struct job *job, struct mu_holder_record *holder)
{
    if (holder->keeper != NONE && keeps(coord, job, &coord->workers[holder->keeper], holder->host_id))
        return &coord->workers[holder->keeper];
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (keeps(coord, job, w, holder->host_id)) {
            holder->keeper = (uint32_t)(w - coord->workers);
            return w;
        }
    }
    return NULL;
}

/* One that may still come back, if none is there. */
static bool may_return(struct mu_coord *coord, const struct job *job, uint64_t host_id)
{
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (w->host_id == host_id && !w->lost)
            return true;
    }
    return false;
}

static struct mu_holder holder_at(struct mu_coord *coord, const struct job *job, struct mu_holder_record *record)
{
    const struct worker *keeper = keeper_of(coord, job, record);
    struct mu_holder holder = {0};
    memcpy(holder.host, record->host, sizeof holder.host);
    if (keeper) {
        memcpy(holder.address, keeper->files_address, sizeof holder.address);
        memcpy(holder.secret, keeper->files_secret, sizeof holder.secret);
    }
    return holder;
}

/* ---- orders ---- */

static void ask(struct mu_coord *coord, const struct job *job, struct checkpoint *checkpoint, uint32_t index)
{
    const struct mu_checkpoint_record *record = &checkpoint->record;
    struct mu_holder_record *holder = &record->holders[index];
    const struct worker *keeper = keeper_of(coord, job, holder);
    uint32_t count = record->holder_count;
    holder->asked = keeper ? (uint32_t)(keeper - coord->workers) : NONE;
    if (!keeper)
        return;
    struct mu_coord_message message = {.kind = MU_CM_KEEP};
    struct mu_keep_order *order = &message.keep;
    order->kind = checkpoint->keeping;
    order->checkpoint = record->number;
    memcpy(order->dir, record->dir, sizeof order->dir);
    order->before = holder_at(coord, job, &record->holders[(index + count - 1) % count]);
    order->after = holder_at(coord, job, &record->holders[(index + 1) % count]);
    if (order->kind == MU_KEEP_PUBLISH) {
        order->step = record->step;
        order->generation = record->generation;
        order->wall_us = record->wall_us;
        order->layout = record->layout;
        order->piece_count = record->piece_count;
        order->pieces = coord->written;
        for (uint32_t i = 0; i < record->piece_count; i++)
            coord->written[i] = mu_written_piece(&job->pieces[i]);
    }
    send_to(coord, keeper, &message);
}

/* Where all writers are on one host, any other one that is there gives a second copy. */
static void add_second_host(struct mu_coord *coord, const struct job *job, struct mu_checkpoint_record *record)
{
    for (const struct worker *w = next_worker(coord, job, NULL); w && record->holder_count == 1;
         w = next_worker(coord, job, w)) {
        if (w->session && !w->lost && w->files_address[0])
            add_holder(record, w->host); /* without memory for it: one copy */
    }
}

static bool is_missing(struct mu_coord *coord, const struct job *job, const struct checkpoint *checkpoint)
{
    for (uint32_t i = 0; i < checkpoint->record.holder_count; i++) {
        const struct mu_holder_record *holder = &checkpoint->record.holders[i];
        if (!holder->done && holder->asked == NONE && !may_return(coord, job, holder->host_id))
            return true;
    }
    return false;
}

/* Looked at for the scrubber, or because it is needed and not all of its hosts are there. */
static void checked(struct mu_coord *coord, struct job *job, uint64_t number, enum mu_status status, const char *text)
{
    if (number == coord->scrub_number && mu_id_equal(job->record.uid, coord->scrub_job))
        on_scrubbed(coord, job, number, status, text);
    else if (status == MU_ERR_CORRUPT)
        mark_checkpoint_bad(coord, job, number, text);
}

/* A holder that nobody is left of: what cannot be done without it ends. */
static void judge_missing(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    char text[MU_TEXT_SIZE], hosts[160];
    if (checkpoint->keeping == MU_KEEP_DISCARD || !is_missing(coord, job, checkpoint))
        return; /* a directory is removed when one of its host's workers comes */
    describe_missing(coord, job, &checkpoint->record, hosts, sizeof hosts);
    format_into(text, sizeof text, "a part of it is on a host without a worker: %s", hosts);
    bool publish = checkpoint->keeping == MU_KEEP_PUBLISH;
    checkpoint->keeping = 0;
    if (publish)
        abandon_checkpoint(coord, job, text, true);
    else
        checked(coord, job, checkpoint->record.number, MU_ERR_BUSY, text);
}

void keep(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint, enum mu_keep_kind kind)
{
    struct mu_checkpoint_record *record = &checkpoint->record;
    checkpoint->keeping = kind;
    if (kind == MU_KEEP_PUBLISH) {
        record->wall_us = coord->wall_us;
        if (record->holder_count == 1) {
            add_second_host(coord, job, record);
            persist_checkpoint(coord, record);
        }
    }
    for (uint32_t i = 0; i < record->holder_count; i++) {
        record->holders[i].done = false;
        ask(coord, job, checkpoint, i);
    }
    judge_missing(coord, job, checkpoint);
}

static void all_kept(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint)
{
    const struct mu_checkpoint_record *record = &checkpoint->record;
    enum mu_keep_kind kind = checkpoint->keeping;
    uint64_t size_bytes = 0;
    for (uint32_t i = 0; i < record->holder_count; i++) {
        size_bytes += record->holders[i].size_bytes;
        if (!record->holders[i].done && !MU_MUTANT(MU_MUT_COMMIT_ONE_COPY))
            return;
    }
    checkpoint->keeping = 0;
    if (kind == MU_KEEP_PUBLISH) {
        if (record->holder_count == 1)
            event(coord, MU_EVENT_WARNING, "checkpoint_single_copy", job, NULL,
                  "checkpoint %llu has one copy only: all workers are on host %s; it is lost with that host",
                  (unsigned long long)record->number, record->holders[0].host);
        on_published(coord, job, record->number, MU_OK, record->step, size_bytes, NULL);
    } else if (kind == MU_KEEP_CHECK) {
        checked(coord, job, record->number, MU_OK, NULL);
    } else {
        on_deleted(coord, job, record->number, MU_OK, NULL);
        if (job->phase == MU_JP_FINALIZING)
            job_tick(coord, job);
    }
}

void on_kept(struct mu_coord *coord, struct worker *worker, const struct mu_kept_report *report)
{
    struct job *job = job_of(coord, worker);
    struct checkpoint *checkpoint = find_checkpoint(job, report->checkpoint);
    uint32_t index =
        checkpoint && checkpoint->keeping == report->kind ? find_holder(&checkpoint->record, worker->host_id) : NONE;
    if (index == NONE || checkpoint->record.holders[index].done)
        return; /* given up meanwhile, or said twice */
    struct mu_holder_record *holder = &checkpoint->record.holders[index];
    char text[MU_EVENT_TEXT_SIZE];
    if (report->status == MU_OK)
        holder->missing = false;
    format_into(text, sizeof text, "worker %s on %s: %s", worker->name, worker->host, report->text);
    if (report->status != MU_OK && report->kind != MU_KEEP_DISCARD) {
        checkpoint->keeping = 0;
        if (report->kind == MU_KEEP_PUBLISH && report->status == MU_ERR_UNAVAILABLE)
            abandon_checkpoint(coord, job, text, true); /* the other host went away */
        else if (report->kind == MU_KEEP_PUBLISH)
            on_published(coord, job, report->checkpoint, report->status, 0, 0, text);
        else
            checked(coord, job, report->checkpoint, report->status, text);
        return;
    }
    if (report->status != MU_OK)
        event(coord, MU_EVENT_WARNING, "checkpoint_delete_failed", job, worker,
              "checkpoint %llu could not be deleted: %s", (unsigned long long)report->checkpoint, text);
    holder->done = true;
    holder->size_bytes = report->size_bytes;
    all_kept(coord, job, checkpoint);
}

/* ---- workers come and go ---- */

/* The order or its answer may have been lost with the old stream, or nobody was there. */
void holder_back(struct mu_coord *coord, struct job *job, const struct worker *worker)
{
    uint32_t slot = (uint32_t)(worker - coord->workers);
    for (uint32_t i = 0; i < job->checkpoint_count && worker->files_address[0]; i++) {
        struct checkpoint *checkpoint = &job->checkpoints[i];
        uint32_t index = checkpoint->keeping ? find_holder(&checkpoint->record, worker->host_id) : NONE;
        if (index == NONE || checkpoint->record.holders[index].done)
            continue;
        uint32_t asked = checkpoint->record.holders[index].asked;
        if (asked == NONE || asked == slot)
            ask(coord, job, checkpoint, index);
    }
}

void holder_lost(struct mu_coord *coord, struct job *job, const struct worker *worker)
{
    uint32_t slot = (uint32_t)(worker - coord->workers);
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        struct checkpoint *checkpoint = &job->checkpoints[i];
        uint32_t index = checkpoint->keeping ? find_holder(&checkpoint->record, worker->host_id) : NONE;
        if (index == NONE || checkpoint->record.holders[index].done)
            continue;
        if (checkpoint->record.holders[index].asked == slot)
            ask(coord, job, checkpoint, index);
        judge_missing(coord, job, checkpoint);
    }
    const struct checkpoint *start = job->phase == MU_JP_PREPARING ? find_checkpoint(job, job->plan_checkpoint) : NULL;
    if (start && is_local(job) && !is_reachable(coord, job, &start->record))
        park_all(coord, job); /* who loads it would wait for what nobody gives out any more */
}

bool discards_pending(const struct job *job)
{
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        const struct checkpoint *checkpoint = &job->checkpoints[i];
        for (uint32_t k = 0; checkpoint->keeping == MU_KEEP_DISCARD && k < checkpoint->record.holder_count; k++) {
            if (!checkpoint->record.holders[k].done && checkpoint->record.holders[k].asked != NONE)
                return true;
        }
    }
    return false;
}

/* ---- loading ---- */

bool all_holders_here(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record)
{
    uint32_t here = 0;
    for (uint32_t i = 0; i < record->holder_count; i++)
        here += keeper_of(coord, job, &record->holders[i]) != NULL;
    return here == record->holder_count;
}

bool is_reachable(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record)
{
    bool first = true, before = true;
    for (uint32_t i = 0; i < record->holder_count; i++) {
        bool here = !record->holders[i].missing && keeper_of(coord, job, &record->holders[i]) != NULL;
        if (!here && !before)
            return false;
        before = here;
        first = i == 0 ? here : first;
    }
    return record->holder_count > 0 && (first || before);
}

void describe_missing(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record,
                      char *out, size_t size)
{
    size_t used = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < record->holder_count; i++) {
        bool here = keeper_of(coord, job, &record->holders[i]) != NULL;
        if (here && !record->holders[i].missing)
            continue;
        if (used + sizeof record->holders[i].host + 40 > size) {
            format_into(out + used, size - used, ", ...");
            return;
        }
        format_into(out + used, size - used, here ? "%sthe disk of host %s has lost it" : "%shost %s is not there",
                    used ? ", " : "", record->holders[i].host);
        used += strlen(out + used);
    }
}

const struct checkpoint *usable_checkpoint(struct mu_coord *coord, struct job *job)
{
    const struct checkpoint *newest = newest_committed(job);
    if (!newest || !is_local(job) || is_reachable(coord, job, &newest->record)) {
        job->unreachable_us = 0;
        return newest;
    }
    if (job->unreachable_us == 0) {
        struct checkpoint *checkpoint = find_checkpoint(job, newest->record.number);
        job->unreachable_us = lease_now(coord);
        if (checkpoint->keeping == 0) /* who is there looks, and copies what it can */
            keep(coord, job, checkpoint, MU_KEEP_CHECK);
    }
    if (lease_now(coord) - job->unreachable_us < UNREACHABLE_US)
        return NULL;
    for (uint32_t i = job->checkpoint_count; i-- > 0;) {
        const struct mu_checkpoint_record *record = &job->checkpoints[i].record;
        if (record->state == MU_CKPT_COMMITTED && is_reachable(coord, job, record))
            return &job->checkpoints[i];
    }
    return NULL;
}

void list_holders(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record,
                  struct mu_assign *assign)
{
    for (uint32_t i = 0; i < record->holder_count; i++)
        coord->assign_holders[i] = holder_at(coord, job, &record->holders[i]);
    assign->holders = record->holder_count ? coord->assign_holders : NULL;
    assign->holder_count = record->holder_count;
}
