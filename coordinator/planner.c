#include "coordinator/planner.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "common/queue.h"

/* A plan to make, with its input in one allocation behind it. */
struct task {
    struct mu_planned *planned; /* NULL: end of the thread */
    struct mu_plan_input input;
    struct mu_job_spec spec;
};

struct mu_planner {
    struct mu_rpc_server *server;
    struct mu_queue *queue;
    pthread_t thread;
};

static void fill_random(uint8_t *out, size_t size_bytes)
{
    size_t done = 0;
    while (done < size_bytes) {
        ssize_t got = getrandom(out + done, size_bytes - done, 0);
        MU_ASSERT(got > 0 || errno == EINTR);
        if (got > 0)
            done += (size_t)got;
    }
}

static void *planner_thread(void *arg)
{
    struct mu_planner *planner = arg;
    for (;;) {
        struct task *task = mu_queue_pop(planner->queue, -1);
        struct mu_planned *planned = task->planned;
        if (planned) {
            mu_plan_make(&task->input, &planned->plan);
            fill_random(planned->secret, sizeof planned->secret);
            mu_rpc_server_post(planner->server, &planned->posted.item);
        }
        free(task);
        if (!planned)
            return NULL;
    }
}

enum mu_status mu_planner_new(struct mu_rpc_server *server, struct mu_planner **ret_planner, struct mu_error *err)
{
    struct mu_planner *planner = calloc(1, sizeof *planner);
    if (!planner)
        return mu_fail(err, MU_ERR_NO_MEMORY, "planner: no memory");
    planner->server = server;
    planner->queue = mu_queue_new(MU_PLANNER_QUEUE_MAX);
    enum mu_status status = MU_OK;
    if (!planner->queue)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "planner: no memory or file descriptor for its queue");
    else {
        int reason = pthread_create(&planner->thread, NULL, planner_thread, planner);
        if (reason)
            status = mu_fail_errno(err, reason, "planner: cannot start its thread");
    }
    if (status) {
        mu_queue_free(planner->queue);
        free(planner);
        return status;
    }
    *ret_planner = planner;
    return MU_OK;
}

static struct mu_planned *new_planned(uint64_t ticket, uint32_t member_count)
{
    struct mu_planned *planned = calloc(1, sizeof *planned);
    if (!planned)
        return NULL;
    planned->posted.kind = MU_POSTED_PLANNED;
    planned->ticket = ticket;
    planned->plan.ranks = calloc(member_count ? member_count : 1, sizeof *planned->plan.ranks);
    planned->plan.leaf_counts = calloc(MU_COUNTED_REPLICAS_MAX, sizeof *planned->plan.leaf_counts);
    if (!planned->plan.ranks || !planned->plan.leaf_counts) {
        free(planned->plan.ranks);
        free(planned->plan.leaf_counts);
        free(planned);
        return NULL;
    }
    return planned;
}

void mu_planned_free(struct mu_planned *planned)
{
    if (!planned)
        return;
    mu_plan_fini(&planned->plan);
    free(planned->plan.ranks);
    free(planned->plan.leaf_counts);
    free(planned);
}

enum mu_status mu_planner_submit(struct mu_planner *planner, uint64_t ticket, const struct mu_plan_input *input,
                                 struct mu_error *err)
{
    size_t members_bytes = input->member_count * sizeof *input->members;
    size_t links_bytes = input->bad_link_count * sizeof *input->bad_links;
    size_t head_bytes = (sizeof(struct task) + 15) & ~(size_t)15;
    struct task *task = malloc(head_bytes + members_bytes + links_bytes);
    struct mu_planned *planned = new_planned(ticket, input->member_count);
    if (!task || !planned) {
        free(task);
        mu_planned_free(planned);
        return mu_fail(err, MU_ERR_NO_MEMORY, "planner: no memory for a plan over %u members", input->member_count);
    }
    task->planned = planned;
    task->input = *input;
    task->spec = *input->spec;
    task->input.spec = &task->spec;
    uint8_t *behind = (uint8_t *)task + head_bytes;
    if (members_bytes)
        memcpy(behind, input->members, members_bytes);
    if (links_bytes)
        memcpy(behind + members_bytes, input->bad_links, links_bytes);
    task->input.members = (const struct mu_plan_member *)behind;
    task->input.bad_links = (const struct mu_plan_link *)(behind + members_bytes);
    mu_queue_push_wait(planner->queue, task);
    return MU_OK;
}

void mu_planner_free(struct mu_planner *planner)
{
    if (!planner)
        return;
    for (;;) {
        struct task *task = mu_queue_pop(planner->queue, 0);
        if (!task)
            break;
        mu_planned_free(task->planned);
        free(task);
    }
    struct task *end = calloc(1, sizeof *end);
    MU_ASSERT(end);
    mu_queue_push_wait(planner->queue, end);
    pthread_join(planner->thread, NULL);
    mu_queue_free(planner->queue);
    free(planner);
}
