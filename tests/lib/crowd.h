/* A coordinator's core with thousands of members of one job, without network or store:
 *
 *    crowd_new   crowd_join for each, twice (the second time they have prepared)   crowd_plan   crowd_assign
 *    crowd_go    then crowd_report and crowd_say   crowd_free */
#ifndef TESTS_LIB_CROWD_H
#define TESTS_LIB_CROWD_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "coordinator/core/core.h"

struct crowd {
    const char *job, *workers; /* their names; a worker's number is put behind */
    uint64_t first_session;    /* of worker 0; the others' follow */
    struct mu_coord *coord;
    uint64_t assigns, gos, most_peers, persists, generation;
    uint64_t ticket;
    struct mu_plan plan;
    bool planned;
};

static void crowd_on_action(void *ctx, const struct mu_coord_action *action)
{
    struct crowd *crowd = ctx;
    switch (action->kind) {
    case MU_CA_SEND:
        if (action->send.message->kind == MU_CM_ASSIGN) {
            const struct mu_assign *assign = &action->send.message->assign;
            crowd->assigns++;
            crowd->generation = action->send.message->generation;
            if (assign->peer_count > crowd->most_peers)
                crowd->most_peers = assign->peer_count;
        }
        crowd->gos += action->send.message->kind == MU_CM_GO;
        break;
    case MU_CA_PLAN:
        crowd->ticket = action->plan.ticket;
        mu_plan_make(action->plan.input, &crowd->plan);
        crowd->planned = true;
        break;
    case MU_CA_PERSIST:
        crowd->persists++;
        break;
    default:
        break;
    }
}

static void crowd_step(struct crowd *crowd, struct mu_coord_event *event)
{
    const struct mu_coord_sink sink = {.emit = crowd_on_action, .ctx = crowd};
    event->now_us = mu_clock_mono_us();
    event->wall_us = mu_clock_wall_us();
    event->random = mu_id_random();
    mu_coord_step(crowd->coord, event, &sink);
}

static void crowd_submit(struct crowd *crowd, uint32_t workers)
{
    struct mu_job_spec spec;
    mu_job_spec_init(&spec);
    snprintf(spec.name, sizeof spec.name, "%s", crowd->job);
    spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 64, .context = 64, .vocab = 256};
    strcpy(spec.data.path, "/data/text");
    spec.data.tokens = MU_TOKENS_BYTES;
    spec.batch.sequences = workers;
    spec.batch.micro = spec.batch.accumulate = 1;
    spec.batch.length = 64;
    spec.steps = 1000;
    spec.workers.min = spec.workers.max = workers;
    crowd_step(crowd, &(struct mu_coord_event){.kind = MU_CE_SUBMIT, .submit = {.cookie = 1, .spec = &spec}});
    if (mu_coord_job_count(crowd->coord) != 1) {
        fprintf(stderr, "the job was refused\n");
        exit(1);
    }
}

static void crowd_say(struct crowd *crowd, uint32_t worker, const struct mu_worker_message *message)
{
    crowd_step(crowd,
               &(struct mu_coord_event){.kind = MU_CE_MESSAGE,
                                        .message = {.session = crowd->first_session + worker, .message = message}});
}

static void crowd_send_status(struct crowd *crowd, uint32_t worker, enum mu_worker_phase phase)
{
    struct mu_worker_message message = {.kind = MU_WM_STATUS, .generation = crowd->generation};
    message.status.phase = phase;
    message.status.generation = crowd->generation;
    message.status.held.has_state = true;
    message.status.held.share_count = 1;
    message.status.held.shares[0] = (struct mu_held_share){.layout = crowd->plan.layout, .rank = worker};
    crowd_say(crowd, worker, &message);
}

static void crowd_join(struct crowd *crowd, uint32_t worker, bool prepared)
{
    struct mu_worker_message message = {.kind = MU_WM_HELLO};
    struct mu_hello *hello = &message.hello;
    hello->protocol_version = MU_PROTOCOL_VERSION;
    hello->incarnation = (struct mu_id){.high = 7, .low = worker + 1};
    snprintf(hello->job, sizeof hello->job, "%s", crowd->job);
    snprintf(hello->host, sizeof hello->host, "host%u", worker / 8);
    snprintf(hello->address, sizeof hello->address, "host%u;tcp:10.0.%u.%u:4000", worker / 8, worker / 256,
             worker % 256);
    snprintf(hello->name, sizeof hello->name, "%s%u", crowd->workers, worker);
    hello->prepared_job = prepared;
    crowd_say(crowd, worker, &message);
}

static void crowd_report(struct crowd *crowd, uint32_t worker, uint64_t step_number)
{
    struct mu_worker_message message = {.kind = MU_WM_STEP, .generation = crowd->generation};
    message.step = (struct mu_step_report){.steps_done = step_number,
                                           .result = {.step = step_number - 1, .loss = 1, .finite = true},
                                           .step_count = 1,
                                           .leaf_count = 1,
                                           .total_us = 1000000,
                                           .forward_us = 300000,
                                           .backward_us = 600000,
                                           .wait_us = 100000};
    crowd_say(crowd, worker, &message);
}

static void crowd_new(struct crowd *crowd, uint32_t workers)
{
    struct mu_coord_config config;
    const struct mu_coord_sink sink = {.emit = crowd_on_action, .ctx = crowd};
    mu_coord_config_init(&config);
    config.max_workers = config.max_members = workers;
    crowd->plan.ranks = calloc(workers, sizeof *crowd->plan.ranks);
    crowd->plan.leaf_counts = calloc(MU_COUNTED_REPLICAS_MAX, sizeof *crowd->plan.leaf_counts);
    crowd->coord = mu_coord_new(&config);
    mu_coord_start(crowd->coord, mu_clock_mono_us(), 0, &sink);
    crowd_submit(crowd, workers);
}

static void crowd_free(struct crowd *crowd)
{
    mu_coord_free(crowd->coord);
    mu_plan_fini(&crowd->plan);
    free(crowd->plan.ranks);
    free(crowd->plan.leaf_counts);
}

static void crowd_plan(struct crowd *crowd)
{
    crowd_step(crowd, &(struct mu_coord_event){.kind = MU_CE_TICK});
}

static void crowd_assign(struct crowd *crowd)
{
    uint8_t secret[32] = {0};
    crowd_step(crowd,
               &(struct mu_coord_event){.kind = MU_CE_PLANNED,
                                        .planned = {.ticket = crowd->ticket, .plan = &crowd->plan, .secret = secret}});
}

static void crowd_go(struct crowd *crowd, uint32_t workers)
{
    for (uint32_t w = 0; w < workers; w++)
        crowd_send_status(crowd, w, MU_PHASE_PREPARED);
}

#endif
