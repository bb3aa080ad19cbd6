/* In place of mu_layout_choose, in histories that are `restless`: the linker puts this before the real one. Whatever a
 * cost model might choose some day, the rest must live with: any degrees that are possible, stages of any sizes,
 * another layout after every change. The choice follows from the seed, the old layout and the number of workers. */
#include "plan/cost.h"
#include "tests/sim/sim.h"

static uint64_t restless_seed; /* 0: the planner's own choice */

enum mu_status __real_mu_layout_choose(const struct mu_job_spec *spec, const struct mu_cost_rates *rates,
                                       uint32_t workers, uint64_t memory_bytes, uint32_t threads,
                                       const struct mu_layout *old, struct mu_layout *ret_layout, char *text,
                                       size_t text_size);
enum mu_status __wrap_mu_layout_choose(const struct mu_job_spec *spec, const struct mu_cost_rates *rates,
                                       uint32_t workers, uint64_t memory_bytes, uint32_t threads,
                                       const struct mu_layout *old, struct mu_layout *ret_layout, char *text,
                                       size_t text_size);

void mu_sim_choose_init(const struct mu_sim *sim)
{
    restless_seed = sim->params.restless ? sim->seed + 1 : 0;
}

static uint64_t draw(uint64_t *state, uint64_t count)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % count;
}

/* Stages of any sizes, none empty. */
static void draw_stages(uint64_t *state, struct mu_layout *layout, uint32_t layers)
{
    uint32_t first = 0;
    for (uint32_t p = 0; p < layout->pp; p++) {
        layout->stage_first[p] = (uint16_t)first;
        uint32_t spare = layers - first - (layout->pp - p); /* beyond one layer for each that is left */
        first += 1 + (uint32_t)draw(state, spare + 1);
    }
    layout->stage_first[layout->pp] = (uint16_t)layers;
}

static bool draw_layout(uint64_t *state, const struct mu_job_spec *spec, uint32_t workers, struct mu_layout *layout)
{
    uint32_t tp = spec->parallel.tp ? spec->parallel.tp : 1u << draw(state, 3);
    uint32_t pp = spec->parallel.pp ? spec->parallel.pp : 1 + (uint32_t)draw(state, spec->model.layers);
    uint32_t most = workers / (tp * pp), leaves = mu_job_leaves(spec);
    if (spec->model.slices % tp != 0 || most == 0)
        return false;
    most = most < leaves ? most : leaves;
    uint32_t dp = spec->parallel.dp ? spec->parallel.dp : most - (most > 1 && draw(state, 4) == 0);
    if (dp > most || tp * pp * dp < spec->workers.min)
        return false;
    *layout = (struct mu_layout){.tp = tp, .pp = pp, .dp = dp, .sharded = spec->parallel.optimizer_sharding};
    draw_stages(state, layout, spec->model.layers);
    return true;
}

enum mu_status __wrap_mu_layout_choose(const struct mu_job_spec *spec, const struct mu_cost_rates *rates,
                                       uint32_t workers, uint64_t memory_bytes, uint32_t threads,
                                       const struct mu_layout *old, struct mu_layout *ret_layout, char *text,
                                       size_t text_size)
{
    uint64_t state = restless_seed * 0x9E3779B97F4A7C15u + workers;
    for (uint32_t p = 0; old && p <= old->pp; p++)
        state = state * 31 + old->stage_first[p] + ((uint64_t)old->tp << 20) + ((uint64_t)old->dp << 40);
    for (int tries = 0; restless_seed && tries < 20; tries++) {
        if (draw_layout(&state, spec, workers, ret_layout)) {
            text[0] = 0;
            return MU_OK;
        }
    }
    return __real_mu_layout_choose(spec, rates, workers, memory_bytes, threads, old, ret_layout, text, text_size);
}
