/* The table of jobs, and their order by name. */
#include "coordinator/core/internal.h"

#include <string.h>

bool is_over(const struct job *job)
{
    return job->phase == MU_JP_OVER;
}

struct job *find_job(struct mu_coord *coord, const char *name)
{
    uint32_t low = 0, high = coord->job_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        struct job *job = &coord->jobs[coord->job_order[middle]];
        int order = strcmp(job->record.spec.name, name);
        if (order == 0)
            return job;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

void clear_job(struct job *job)
{
    drop_moves(job);
    for (uint32_t i = 0; i < job->checkpoint_count; i++)
        free_holders(&job->checkpoints[i].record);
    *job = (struct job){.used = true,
                        .first_worker = NONE,
                        .last_worker = NONE,
                        .members = job->members,
                        .plan_slots = job->plan_slots,
                        .pieces = job->pieces,
                        .piece_slots = job->piece_slots};
}

/* Puts the job's slot, which stands at the end or where its old name belonged, to where `name` belongs. */
void rename_job(struct mu_coord *coord, struct job *job, const char *name)
{
    uint32_t slot = (uint32_t)(job - coord->jobs), at = 0;
    while (coord->job_order[at] != slot)
        at++;
    memmove(&coord->job_order[at], &coord->job_order[at + 1], (coord->job_count - at - 1) * sizeof coord->job_order[0]);
    for (at = coord->job_count - 1; at > 0 && strcmp(coord->jobs[coord->job_order[at - 1]].record.spec.name, name) > 0;
         at--)
        coord->job_order[at] = coord->job_order[at - 1];
    coord->job_order[at] = slot;
    copy_text(job->record.spec.name, sizeof job->record.spec.name, name);
}

struct job *add_job(struct mu_coord *coord, const char *name)
{
    if (coord->job_count == coord->config.max_jobs)
        return NULL;
    struct job *job = &coord->jobs[coord->job_count];
    coord->job_order[coord->job_count] = coord->job_count;
    coord->job_count++;
    clear_job(job);
    rename_job(coord, job, name);
    return job;
}
