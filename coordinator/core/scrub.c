/* The scrubber: committed checkpoints are re-read, one at a time over all jobs, so that a bad one is found before it is
 * needed. Those that nobody has read since they were written come first, the oldest of them first; then, long after,
 * all again. `verified` has two causes only: a re-read, and a generation whose ranks together loaded every byte. */
#include "coordinator/core/internal.h"

#include <string.h>

enum { RETRY_US = 600000000 }; /* one that could not be read: nothing is known about it */

static uint64_t again_us(const struct mu_coord *coord)
{
    return lease_now(coord) + (uint64_t)coord->config.scrub_again_s * 1000000;
}

void note_verified(struct mu_coord *coord, struct checkpoint *checkpoint)
{
    checkpoint->scrub_due_us = again_us(coord);
    checkpoint->unreadable = false;
    if (checkpoint->record.verified)
        return;
    checkpoint->record.verified = true;
    persist_checkpoint(coord, &checkpoint->record);
}

static bool comes_first(const struct checkpoint *a, const struct checkpoint *b)
{
    if (a->record.verified != b->record.verified)
        return b->record.verified;
    return a->scrub_due_us < b->scrub_due_us;
}

/* Of kind local: a worker is there to read on each of its hosts, and nothing else is to be done to it. */
static bool can_read(struct mu_coord *coord, const struct job *job, const struct checkpoint *checkpoint)
{
    return !is_local(job) ||
           (!is_over(job) && checkpoint->keeping == 0 && all_holders_here(coord, job, &checkpoint->record));
}

void scrub_next(struct mu_coord *coord)
{
    struct job *found_in = NULL;
    struct checkpoint *found = NULL;
    if (coord->scrub_number)
        return; /* one is being read */
    coord->scrub_next_us = UINT64_MAX;
    for (uint32_t i = 0; i < coord->job_count; i++) {
        struct job *job = &coord->jobs[coord->job_order[i]];
        for (uint32_t k = 0; k < job->checkpoint_count; k++) {
            struct checkpoint *checkpoint = &job->checkpoints[k];
            if (checkpoint->record.state != MU_CKPT_COMMITTED || checkpoint->record.owner[0] ||
                !can_read(coord, job, checkpoint))
                continue;
            if (checkpoint->scrub_due_us > lease_now(coord)) {
                if (checkpoint->scrub_due_us < coord->scrub_next_us)
                    coord->scrub_next_us = checkpoint->scrub_due_us;
            } else if (!found || comes_first(checkpoint, found)) {
                found = checkpoint;
                found_in = job;
            }
        }
    }
    if (!found)
        return;
    coord->scrub_job = found_in->record.uid;
    coord->scrub_number = found->record.number;
    if (is_local(found_in)) {
        keep(coord, found_in, found, MU_KEEP_CHECK);
        return;
    }
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_SCRUB,
                                          .checkpoint_io = {.job = &found_in->record, .checkpoint = &found->record}});
}

/* After a restart: what was verified before counts as read just now. */
void scrub_start(struct mu_coord *coord)
{
    for (uint32_t i = 0; i < coord->job_count; i++) {
        struct job *job = &coord->jobs[i];
        for (uint32_t k = 0; k < job->checkpoint_count; k++) {
            if (job->checkpoints[k].record.verified)
                job->checkpoints[k].scrub_due_us = again_us(coord);
        }
    }
    scrub_next(coord);
}

static void found_bad(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint, const char *text)
{
    uint64_t number = checkpoint->record.number;
    bool newest = newest_committed(job) == checkpoint;
    char why[MU_TEXT_SIZE];
    format_into(why, sizeof why, "found by re-reading it: %s", text);
    mark_checkpoint_bad(coord, job, number, why);
    if (newest && job->phase == MU_JP_STEPPING)
        job->checkpoint_wanted = true; /* do not go on with an older one than the job file asks for */
}

void on_scrubbed(struct mu_coord *coord, struct job *job, uint64_t number, enum mu_status status, const char *text)
{
    bool same = job && number == coord->scrub_number && mu_id_equal(job->record.uid, coord->scrub_job);
    struct checkpoint *checkpoint = same ? find_checkpoint(job, number) : NULL;
    coord->scrub_number = 0;
    if (checkpoint && checkpoint->record.state == MU_CKPT_COMMITTED) {
        if (status == MU_OK) {
            bool first = !checkpoint->record.verified;
            note_verified(coord, checkpoint);
            if (first)
                retain_checkpoints(coord, job); /* an older one may have been kept for being the last verified */
        } else if (status == MU_ERR_CORRUPT) {
            found_bad(coord, job, checkpoint, text ? text : mu_status_name(status));
        } else {
            checkpoint->scrub_due_us = lease_now(coord) + RETRY_US;
            if (status != MU_ERR_BUSY && !checkpoint->unreadable)
                event(coord, MU_EVENT_WARNING, "checkpoint_unreadable", job, NULL,
                      "checkpoint %llu could not be re-read, which says nothing about it; tried again in %d s: %s",
                      (unsigned long long)number, RETRY_US / 1000000, text ? text : mu_status_name(status));
            checkpoint->unreadable = status != MU_ERR_BUSY; /* told once: its directory may be gone for good */
        }
    }
    scrub_next(coord);
}
