/* Inputs of plans: members of one job, what they hold, in which layout. Included by the tests of plan/plan.h. */
#ifndef MU_TESTS_PLAN_TESTING_H
#define MU_TESTS_PLAN_TESTING_H

#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/rng.h"
#include "plan/memory.h"
#include "plan/model_spec.h"

enum { MEMBERS = 100, NOBODY = -1 };

static inline struct mu_job_spec make_spec(uint32_t leaves, uint32_t min, uint32_t max, uint32_t spares)
{
    struct mu_job_spec spec;
    mu_job_spec_init(&spec);
    spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 4, .heads = 8, .channels = 256, .context = 64, .vocab = 2048, .slices = 4};
    mu_model_config_resolve(&spec.model);
    spec.batch.sequences = leaves;
    spec.batch.length = 64;
    spec.batch.micro = spec.batch.accumulate = 1;
    spec.parallel.tp = spec.parallel.pp = 1;
    spec.workers.min = min;
    spec.workers.max = max;
    spec.workers.spares = spares;
    return spec;
}

struct fixture {
    struct mu_job_spec spec;
    struct mu_model_spec model;
    struct mu_plan_member members[MEMBERS];
    struct mu_plan_rank ranks[MEMBERS];
    uint32_t leaf_counts[MU_COUNTED_REPLICAS_MAX];
    struct mu_plan_input input;
    struct mu_plan plan;
};

static inline void setup(struct fixture *f, uint32_t members, uint32_t leaves, uint32_t min, uint32_t max)
{
    memset(f, 0, sizeof *f);
    f->spec = make_spec(leaves, min, max, 0);
    mu_model_spec_init(&f->model, &f->spec.model);
    f->input = (struct mu_plan_input){
        .spec = &f->spec, .members = f->members, .member_count = members, .may_initialise = true};
    f->plan.ranks = f->ranks;
    f->plan.leaf_counts = f->leaf_counts;
    for (uint32_t i = 0; i < members; i++)
        f->members[i].old_rank = UINT32_MAX;
}

static inline void make(struct fixture *f)
{
    mu_plan_fini(&f->plan);
    mu_plan_make(&f->input, &f->plan);
}

static inline void teardown(struct fixture *f)
{
    mu_plan_fini(&f->plan);
}

/* Where a member went, or UINT32_MAX. */
static inline uint32_t rank_of_member(const struct fixture *f, uint32_t member)
{
    for (uint32_t rank = 0; rank < mu_layout_world(&f->plan.layout); rank++) {
        if (f->ranks[rank].member == member)
            return rank;
    }
    return UINT32_MAX;
}

static inline struct mu_step_result result_of(uint64_t step)
{
    return (struct mu_step_result){.step = step, .loss = 2.5, .grad_norm = 0.5 + (double)step, .finite = true};
}

/* At boundary `step`, with the result of the update that led there, everything held as one of one or more replicas. */
static inline struct mu_held at(uint64_t step)
{
    struct mu_held held = {.has_state = true, .step = step, .share_count = 1};
    mu_layout_init(&held.shares[0].layout, 1, 4);
    if (step > 0) {
        held.has_result = true;
        held.result = result_of(step - 1);
    }
    return held;
}

static inline struct mu_layout make_layout(uint32_t tp, uint32_t pp, uint32_t dp, bool sharded)
{
    struct mu_layout layout = {.tp = tp, .pp = pp, .dp = dp, .sharded = sharded};
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(4 * p / pp);
    return layout;
}

static inline struct mu_held at_rank(uint64_t step, const struct mu_layout *layout, uint32_t rank)
{
    struct mu_held held = at(step);
    held.shares[0] = (struct mu_held_share){.layout = *layout, .rank = rank};
    return held;
}

/* A job of this layout whose ranks lists[r] (members in order, NOBODY = lost) hold `step`. */
static inline void setup_layout(struct fixture *f, const struct mu_layout *layout, uint64_t step, const int *ranks,
                                uint32_t members)
{
    setup(f, members, 64, 1, 64);
    f->spec.parallel.tp = layout->tp;
    f->spec.parallel.pp = layout->pp;
    f->spec.parallel.optimizer_sharding = layout->sharded;
    f->input.has_old_layout = true;
    f->input.old_layout = *layout;
    f->input.may_initialise = false;
    for (uint32_t i = 0; i < members; i++) {
        if (ranks[i] == NOBODY)
            continue;
        f->members[i].held = at_rank(step, layout, (uint32_t)ranks[i]);
        f->members[i].old_rank = (uint32_t)ranks[i];
    }
}

#endif
