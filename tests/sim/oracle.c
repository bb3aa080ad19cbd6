/* The undisturbed run, computed as far as it is asked for, and the invariants of generations, steps, held state and the
 * end. Records and checkpoints are judged in oracle_records.c. */
#include "tests/sim/oracle.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "plan/amend.h"

/* ---- the undisturbed run ---- */

static uint64_t mix(uint64_t a, uint64_t b)
{
    if (a == MU_SIM_NAN || b == MU_SIM_NAN)
        return MU_SIM_NAN;
    uint64_t z = a ^ (b + 0x9E3779B97F4A7C15u + (a << 6) + (a >> 2));
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

uint64_t mu_sim_hash_chunks(uint64_t before, const uint64_t *params, uint64_t chunks)
{
    for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
        if (chunks >> c & 1)
            before = mix(before, params[c]);
    }
    return before;
}

uint64_t mu_sim_hash_leaf(const struct mu_job_spec *spec, uint64_t model_hash, uint64_t step, uint32_t leaf)
{
    uint64_t position = mu_job_position(spec, step * spec->batch.sequences + leaf); /* a leaf is one sequence */
    return mix(mix(mix(spec->seed, position), leaf), model_hash);
}

uint64_t mu_sim_hash_pair(uint64_t left, uint64_t right)
{
    return mix(mix(0xadd, left), right);
}

/* By nature a step in 31 is not finite, but never so many in a row as condemn a checkpoint. */
struct mu_step_result mu_sim_step_result(uint64_t step, uint64_t gradient, uint64_t command)
{
    return (struct mu_step_result){.step = step,
                                   .loss = (double)(gradient >> 40),
                                   .grad_norm = (double)(gradient & 0xffffff),
                                   .command = command,
                                   .finite = gradient != MU_SIM_NAN &&
                                             (gradient % 31 != 0 || step % MU_SUSPECT_REPORTS == 0)};
}

void mu_sim_hash_initial(const struct mu_sim *sim, struct mu_sim_values *values)
{
    memset(values, 0, sizeof *values);
    for (uint32_t c = 0; c < sim->model.chunk_count; c++)
        values->params[c] = mix(sim->spec.seed, 1000 + c);
}

/* As an optimizer does: the moment of a chunk takes the gradient in, its parameters change by the moment. */
void mu_sim_hash_apply(struct mu_sim_values *values, struct mu_sim_mask what, uint64_t gradient,
                       const struct mu_step_result *result, const struct mu_job_spec *spec)
{
    const double rate = mu_job_learning_rate(spec, result->step);
    uint64_t terms;
    memcpy(&terms, &rate, sizeof terms);
    for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX && result->finite; c++) {
        if (what.moments >> c & 1)
            values->moments[c] = mix(values->moments[c], mix(mix(gradient ^ terms, c), (uint64_t)result->grad_norm));
        if (what.params >> c & 1)
            values->params[c] = mix(values->params[c], values->moments[c]);
    }
}

void mu_sim_hash_weights(const uint64_t *params, uint8_t out[32])
{
    for (uint64_t i = 0; i < 4; i++) {
        uint64_t word = mu_sim_hash_chunks(i, params, UINT64_MAX);
        memcpy(out + 8 * i, &word, sizeof word);
    }
}

static uint64_t sum_leaves(struct mu_sim *sim, uint64_t model_hash, uint64_t step, struct mu_tree_node node)
{
    if (node.count == 1)
        return mu_sim_hash_leaf(&sim->law, model_hash, step, node.first);
    struct mu_tree_node left, right;
    mu_tree_children(node, &left, &right);
    return mu_sim_hash_pair(sum_leaves(sim, model_hash, step, left), sum_leaves(sim, model_hash, step, right));
}

static void run_undisturbed(struct mu_sim *sim, uint64_t step)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    for (; oracle->known < step; oracle->known++) {
        const struct mu_sim_values *from = &oracle->values[oracle->known];
        uint64_t hash = mu_sim_hash_chunks(0, from->params, sim->all_chunks);
        hash = mu_sim_hash_chunks(hash, from->params, sim->tied_chunks);
        uint64_t gradient = sum_leaves(sim, hash, oracle->known, (struct mu_tree_node){0, sim->params.leaves});
        struct mu_step_result result = mu_sim_step_result(oracle->known, gradient, 0);
        oracle->gradients[oracle->known] = gradient;
        oracle->values[oracle->known + 1] = *from;
        mu_sim_hash_apply(&oracle->values[oracle->known + 1], (struct mu_sim_mask){sim->all_chunks, sim->all_chunks},
                          gradient, &result, &sim->law);
    }
}

const struct mu_sim_values *mu_sim_oracle_values(struct mu_sim *sim, uint64_t step)
{
    run_undisturbed(sim, step);
    return &sim->oracle->values[step];
}

uint64_t mu_sim_oracle_gradient(struct mu_sim *sim, uint64_t step)
{
    run_undisturbed(sim, step + 1);
    return sim->oracle->gradients[step];
}

void mu_sim_oracle_init(struct mu_sim *sim)
{
    struct mu_sim_oracle *oracle = sim->oracle = mu_sim_alloc(sizeof *oracle);
    oracle->values = mu_sim_alloc((2 * sim->spec.steps + 2) * sizeof *oracle->values);
    oracle->gradients = mu_sim_alloc((2 * sim->spec.steps + 2) * sizeof *oracle->gradients);
    oracle->pace.step_us = mu_sim_alloc((2 * sim->spec.steps + 2) * sizeof *oracle->pace.step_us);
    mu_sim_hash_initial(sim, &oracle->values[0]);
}

void mu_sim_oracle_fini(struct mu_sim *sim)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    if (!oracle)
        return;
    for (uint32_t i = 0; i < oracle->generation_count; i++)
        free(oracle->generations[i].ranks);
    for (uint32_t i = 0; i < oracle->generation_count; i++)
        free(oracle->generations[i].before);
    free(oracle->generations);
    free(oracle->ghosts);
    free(oracle->seen);
    free(oracle->values);
    free(oracle->gradients);
    free(oracle->pace.step_us);
    free(oracle->slow.offered);
    free(oracle);
}

/* ---- generations ---- */

struct mu_sim_generation *mu_sim_oracle_generation(struct mu_sim *sim, uint64_t number)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    for (uint32_t i = oracle->generation_count; i-- > 0;) {
        if (oracle->generations[i].number == number)
            return &oracle->generations[i];
    }
    return NULL;
}

static struct mu_sim_generation *generation_of(struct mu_sim *sim, uint32_t slot)
{
    return mu_sim_oracle_generation(sim, sim->workers[slot].engine.generation);
}

struct mu_sim_generation *mu_sim_oracle_add_generation(struct mu_sim *sim, uint64_t number,
                                                       const struct mu_layout *layout, const uint8_t secret[32])
{
    struct mu_sim_oracle *oracle = sim->oracle;
    oracle->generations = mu_sim_grow(oracle->generations, oracle->generation_count, &oracle->generation_capacity,
                                      sizeof *oracle->generations);
    struct mu_sim_generation *generation = &oracle->generations[oracle->generation_count++];
    memset(generation, 0, sizeof *generation);
    generation->number = number;
    generation->layout = *layout;
    generation->world = mu_layout_world(layout);
    memcpy(generation->secret, secret, 32);
    generation->ranks = mu_sim_alloc((generation->world + 1) * sizeof *generation->ranks);
    generation->before = mu_sim_alloc((sim->params.slots < 200 ? sim->params.slots : 1) * sizeof *generation->before);
    for (uint32_t slot = 0; slot < sim->params.slots && sim->params.slots < 200; slot++)
        if (!mu_sim_oracle_poisoned(sim, slot))
            generation->before[slot] = (struct mu_sim_ghost){.session = sim->workers[slot].session,
                                                             .held = sim->workers[slot].engine.held,
                                                             .era = mu_sim_oracle_era(sim, slot)};
    sim->stats.generations++;
    return generation;
}

/* An Assign leaves the coordinator. */
void mu_sim_oracle_assigned(struct mu_sim *sim, uint64_t number, const struct mu_assign *assign, uint32_t slot,
                            uint64_t life)
{
    struct mu_sim_generation *generation = mu_sim_oracle_generation(sim, number);
    if (!generation) {
        mu_sim_violate(sim, "generation %" PRIu64 " is assigned to worker %u before its record is durable", number,
                       slot);
        return;
    }
    if (memcmp(generation->secret, assign->secret, 32) != 0 || !mu_layout_equal(&generation->layout, &assign->layout) ||
        assign->rank >= generation->world) {
        mu_sim_violate(sim, "generation number %" PRIu64 " is used for two different generations", number);
        return;
    }
    if (number < sim->oracle->newest_assigned)
        mu_sim_violate(sim, "generation %" PRIu64 " is assigned after %" PRIu64, number, sim->oracle->newest_assigned);
    sim->oracle->newest_assigned = number;
    uint64_t committed = sim->oracle->committed_turn;
    if (assign->source == MU_SOURCE_INIT && committed && committed < sim->coord.judged_turn)
        mu_sim_violate(sim, "worker %u is told to start from the seed although a checkpoint was committed", slot);
    struct mu_sim_rank *rank = &generation->ranks[assign->rank];
    if (rank->assigned && (rank->slot != slot || rank->life != life) && rank->prepared)
        mu_sim_violate(sim, "rank %u of generation %" PRIu64 " is given to worker %u after worker %u had prepared it",
                       assign->rank, number, slot, rank->slot);
    rank->assigned = true;
    rank->slot = slot;
    rank->life = life;
}

/* A worker begins to prepare: what it is told about itself must be true. */
void mu_sim_oracle_prepare(struct mu_sim *sim, uint32_t slot, const struct mu_assign *assign)
{
    const struct mu_sim_engine *engine = &sim->workers[slot].engine;
    const struct mu_held *held = &engine->held;
    uint64_t start = assign->start_step;
    bool is_held = held->has_state && held->step == start, idle = !engine->working;
    struct mu_sim_union alone = {0};
    bool can_roll = held->has_state && held->has_gradient && held->step + 1 == start;
    if (start > mu_job_end(&sim->law))
        mu_sim_violate(sim, "a generation starts at step %" PRIu64 " of %" PRIu64, start, mu_job_end(&sim->law));
    mu_sim_union_add(&alone, held);
    uint64_t newest = 0;
    bool whole = mu_sim_union_newest(sim, &alone, &newest) && newest > start;
    free(alone.held);
    if (whole && held->step > start && !sim->oracle->restore_lost && !mu_sim_oracle_poisoned(sim, slot))
        mu_sim_violate(sim, "worker %u holds step %" PRIu64 " and is told to start at step %" PRIu64, slot, held->step,
                       start);
    if (assign->source == MU_SOURCE_HELD && !is_held)
        mu_sim_violate(sim, "worker %u is told to hold step %" PRIu64 ", it holds %s %" PRIu64, slot, start,
                       held->has_state ? "step" : "nothing, step", held->step);
    if (assign->source == MU_SOURCE_ROLL_FORWARD && (!can_roll || assign->roll_forward.step + 1 != start))
        mu_sim_violate(sim, "worker %u is told to roll forward to step %" PRIu64 " and cannot", slot, start);
    if (assign->source == MU_SOURCE_ROLL_FORWARD && can_roll && held->has_result && held->result.step == held->step &&
        (held->result.loss != assign->roll_forward.loss || held->result.finite != assign->roll_forward.finite))
        mu_sim_violate(sim, "worker %u rolls forward with another result than it has", slot);
    if (assign->source == MU_SOURCE_INIT && start != 0)
        mu_sim_violate(sim, "worker %u starts from the seed at step %" PRIu64, slot, start);
    if (engine->leaf_count == 0 && !idle)
        mu_sim_violate(sim, "rank %u of generation %" PRIu64 " has no leaf", assign->rank, engine->generation);
}

void mu_sim_oracle_prepared(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_generation *generation = generation_of(sim, slot);
    const struct mu_sim_engine *engine = &sim->workers[slot].engine;
    if (!generation || engine->rank >= generation->world)
        return;
    generation->ranks[engine->rank].prepared = true;
    if (!engine->working)
        return;
    if (!engine->held.has_state || engine->held.step != engine->assign->start_step)
        mu_sim_violate(sim, "worker %u is prepared at step %" PRIu64 " instead of %" PRIu64, slot, engine->held.step,
                       engine->assign->start_step);
    struct mu_sim_mask held = mu_sim_held_mask(sim, &engine->held, engine->held.step);
    if (!mu_sim_mask_covers(held, engine->share))
        mu_sim_violate(sim, "worker %u is prepared and does not hold its share of generation %" PRIu64, slot,
                       engine->generation);
}

void mu_sim_oracle_runs(struct mu_sim *sim, uint32_t slot, bool runs)
{
    struct mu_sim_generation *generation = generation_of(sim, slot);
    const struct mu_sim_engine *engine = &sim->workers[slot].engine;
    if (!generation || engine->rank >= generation->world) {
        if (runs)
            mu_sim_violate(sim, "worker %u steps in generation %" PRIu64 ", which no record knows", slot,
                           engine->generation);
        return;
    }
    struct mu_sim_rank *rank = &generation->ranks[engine->rank];
    if (!runs) {
        if (rank->running && rank->runner == slot)
            rank->running = false;
        return;
    }
    if (!generation->go)
        mu_sim_violate(sim, "worker %u steps in generation %" PRIu64 " before its Go is durable", slot,
                       generation->number);
    if (rank->running)
        mu_sim_violate(sim, "workers %u and %u are both rank %u of generation %" PRIu64, rank->runner, slot,
                       engine->rank, generation->number);
    rank->running = true;
    rank->runner = slot;
}

/* ---- steps ---- */

void mu_sim_oracle_tiles(struct mu_sim *sim, uint32_t slot, const struct mu_sim_root *roots, uint32_t count)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (roots[i].node.first != next) {
            mu_sim_violate(sim, "worker %u: leaf %u is %s in step %" PRIu64, slot,
                           roots[i].node.first < next ? roots[i].node.first : next,
                           roots[i].node.first < next ? "counted twice" : "missing",
                           sim->workers[slot].engine.held.step);
            return;
        }
        next += roots[i].node.count;
    }
    if (next != sim->params.leaves)
        mu_sim_violate(sim, "worker %u: the leaves of step %" PRIu64 " end at %u of %u", slot,
                       sim->workers[slot].engine.held.step, next, sim->params.leaves);
}

bool mu_sim_oracle_is_void(const struct mu_sim *sim, uint32_t era)
{
    return era != mu_amend_era(&sim->law.amendments);
}

uint32_t mu_sim_oracle_era(const struct mu_sim *sim, uint32_t slot)
{
    return mu_amend_era(&sim->workers[slot].engine.spec.amendments);
}

/* Of a generation that was given up: it goes on alone by the former record, and nobody will use what it makes. */
static bool is_superseded(const struct mu_sim *sim, uint32_t slot, uint64_t step)
{
    bool before = sim->workers[slot].engine.generation < sim->oracle->amended_generation;
    return (before && step > sim->oracle->amended_step) || mu_sim_oracle_is_void(sim, mu_sim_oracle_era(sim, slot));
}

/* What comes of values that are not finite is not, and nothing else is different. */
static bool is_right(const struct mu_sim *sim, uint64_t value, uint64_t right)
{
    return value == right || (value == MU_SIM_NAN && sim->stats.faults[MU_SIM_FAULT_POISON] > 0);
}

void mu_sim_oracle_reduced(struct mu_sim *sim, uint32_t slot, uint64_t step, uint64_t gradient)
{
    if (!is_superseded(sim, slot, step + 1) && !is_right(sim, gradient, mu_sim_oracle_gradient(sim, step)))
        mu_sim_violate(sim, "worker %u reduces step %" PRIu64 " to another gradient than the undisturbed run", slot,
                       step);
}

static bool same_result(const struct mu_step_result *a, const struct mu_step_result *b)
{
    return a->step == b->step && a->command == b->command && a->loss == b->loss && a->finite == b->finite;
}

/* The first rank that knows the result proves that everybody alive can roll forward. */
static void check_votes(struct mu_sim *sim, const struct mu_sim_generation *generation, uint64_t step)
{
    for (uint32_t r = 0; r < generation->world; r++) {
        const struct mu_sim_rank *rank = &generation->ranks[r];
        if (!rank->running)
            continue;
        const struct mu_sim_engine *engine = &sim->workers[rank->runner].engine;
        if (engine->generation != generation->number || !mu_sim_engine_running(engine) || !engine->working)
            continue;
        if (engine->held.step == step ? !engine->held.has_gradient : engine->held.step < step)
            mu_sim_violate(sim,
                           "step %" PRIu64 " of generation %" PRIu64 " is decided while rank %u has no gradient for it",
                           step, generation->number, r);
    }
}

/* Where nothing else goes wrong, nobody goes on for long with values that came with a checkpoint and are not finite. */
static void check_unfinite(struct mu_sim *sim, const struct mu_step_result *result)
{
    enum { HEARD_US = 3000000 }; /* reports and orders travel, records become durable */
    struct mu_sim_oracle *oracle = sim->oracle;
    uint64_t weights = 0;
    oracle->nan_steps = result->loss == mu_sim_step_result(0, MU_SIM_NAN, 0).loss ? oracle->nan_steps + 1 : 0;
    if (oracle->nan_steps == 0)
        oracle->nan_unheard = 0;
    if (oracle->nan_steps <= MU_SUSPECT_REPORTS + MU_SIM_UNHEARD + oracle->nan_unheard)
        oracle->nan_since_us = sim->now_us;
    for (int fault = 0; fault < MU_SIM_FAULT_COUNT; fault++)
        weights += sim->params.weight[fault];
    if (weights == sim->params.weight[MU_SIM_FAULT_POISON] && sim->now_us > oracle->nan_since_us + HEARD_US)
        mu_sim_violate(sim, "%" PRIu64 " steps in a row are not finite because of the checkpoint, and they go on",
                       oracle->nan_steps);
}

const struct mu_step_result *mu_sim_oracle_decision(struct mu_sim *sim, uint32_t slot, uint64_t step)
{
    const struct mu_sim_generation *generation = generation_of(sim, slot);
    const struct mu_sim_decision *decision = generation ? &generation->decisions[step & 1] : NULL;
    return decision && decision->set && decision->result.step == step ? &decision->result : NULL;
}

void mu_sim_oracle_decided(struct mu_sim *sim, uint32_t slot, const struct mu_step_result *result)
{
    struct mu_sim_generation *generation = generation_of(sim, slot);
    if (!generation)
        return;
    struct mu_sim_decision *decision = &generation->decisions[result->step & 1];
    if (!decision->set || decision->result.step != result->step) {
        *decision = (struct mu_sim_decision){.set = true, .result = *result};
        check_votes(sim, generation, result->step);
        mu_sim_pace_decided(sim, generation->number, result->step);
        mu_sim_slow_decided(sim, generation->number, result->step);
        check_unfinite(sim, result);
    } else if (!same_result(&decision->result, result)) {
        mu_sim_violate(sim,
                       "worker %u has another result of step %" PRIu64 " than its generation (command %" PRIu64
                       " and %" PRIu64 ")",
                       slot, result->step, result->command, decision->result.command);
    }
    if (result->step + 1 > sim->oracle->newest_step && !mu_sim_oracle_is_void(sim, mu_sim_oracle_era(sim, slot)))
        sim->oracle->newest_step = result->step + 1;
}

void mu_sim_oracle_boundary(struct mu_sim *sim, uint32_t slot, uint64_t steps_done, const struct mu_boundary *boundary)
{
    struct mu_sim_generation *generation = generation_of(sim, slot);
    if (!generation || sim->workers[slot].engine.generation != mu_worker_status(sim->workers[slot].core)->generation)
        return; /* fenced or reassigned meanwhile: its decision binds nobody */
    struct mu_sim_decision *decision = &generation->decisions[(steps_done - 1) & 1];
    if (!decision->set || decision->result.step + 1 != steps_done)
        return;
    uint64_t checkpoint = boundary->take_snapshot ? boundary->snapshot.checkpoint : 0;
    if (!sim->workers[slot].engine.working)
        checkpoint = decision->checkpoint; /* it executes the command and has nothing to write */
    if (!decision->boundary_set && sim->workers[slot].engine.working) {
        decision->boundary_set = true;
        decision->park = boundary->park;
        decision->checkpoint = checkpoint;
    } else if (decision->boundary_set && (decision->park != boundary->park || decision->checkpoint != checkpoint)) {
        mu_sim_violate(sim,
                       "at boundary %" PRIu64 " of generation %" PRIu64 " worker %u %s checkpoint %" PRIu64
                       ", others %s %" PRIu64,
                       steps_done, generation->number, slot, boundary->park ? "parks," : "goes on,", checkpoint,
                       decision->park ? "park," : "go on,", decision->checkpoint);
    }
}

/* ---- held state ---- */

static bool are_right(const struct mu_sim *sim, uint64_t chunks, const uint64_t *values, const uint64_t *right)
{
    for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
        if (chunks >> c & 1 && !is_right(sim, values[c], right[c]))
            return false;
    }
    return true;
}

bool mu_sim_oracle_values_right(struct mu_sim *sim, const struct mu_sim_values *values, uint64_t step)
{
    const struct mu_sim_values *right = mu_sim_oracle_values(sim, step);
    return are_right(sim, sim->all_chunks, values->params, right->params) &&
           are_right(sim, sim->all_chunks, values->moments, right->moments);
}

bool mu_sim_has_nan(const struct mu_sim_values *values, struct mu_sim_mask in)
{
    for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
        if ((in.params >> c & 1 && values->params[c] == MU_SIM_NAN) ||
            (in.moments >> c & 1 && values->moments[c] == MU_SIM_NAN))
            return true;
    }
    return false;
}

bool mu_sim_oracle_poisoned(const struct mu_sim *sim, uint32_t slot)
{
    const struct mu_sim_state *state = &sim->workers[slot].engine.state;
    return sim->stats.faults[MU_SIM_FAULT_POISON] > 0 && mu_sim_has_nan(&state->values, state->has);
}

void mu_sim_oracle_holds(struct mu_sim *sim, uint32_t slot)
{
    const struct mu_sim_engine *engine = &sim->workers[slot].engine;
    const struct mu_held *held = &engine->held;
    if ((held->share_count > 0) != held->has_state || held->share_count > MU_HELD_SHARES_MAX)
        mu_sim_violate(sim, "worker %u holds %u shares", slot, held->share_count);
    if (!held->has_state)
        return;
    if (is_superseded(sim, slot, held->step + held->has_gradient))
        return;
    if (held->step > mu_job_end(&sim->law)) {
        mu_sim_violate(sim, "worker %u holds step %" PRIu64 " of %" PRIu64, slot, held->step, mu_job_end(&sim->law));
        return;
    }
    const struct mu_sim_values *right = mu_sim_oracle_values(sim, held->step);
    struct mu_sim_mask says = mu_sim_held_mask(sim, held, held->step);
    if (!mu_sim_mask_covers(engine->state.has, says))
        mu_sim_violate(sim, "worker %u says that it holds chunks of step %" PRIu64 " that it does not have", slot,
                       held->step);
    if (!are_right(sim, says.params, engine->state.values.params, right->params) ||
        !are_right(sim, says.moments, engine->state.values.moments, right->moments))
        mu_sim_violate(sim, "worker %u: its state at step %" PRIu64 " differs from the undisturbed run's", slot,
                       held->step);
    uint64_t mirrored = mu_sim_share_chunks(sim, &held->shares[0].layout, held->shares[0].rank, MU_SHARE_MIRROR);
    if (held->has_gradient && held->has_state && mirrored &&
        !is_right(sim, engine->mirror_gradient, mu_sim_oracle_gradient(sim, held->step)))
        mu_sim_violate(sim,
                       "worker %u: the gradient of step %" PRIu64 " for what it mirrors differs from the right one",
                       slot, held->step);
    if (held->has_gradient && !is_right(sim, engine->gradient, mu_sim_oracle_gradient(sim, held->step)))
        mu_sim_violate(sim, "worker %u: its gradient of step %" PRIu64 " differs from the undisturbed run's", slot,
                       held->step);
}

void mu_sim_oracle_died(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    if (mu_sim_oracle_poisoned(sim, slot))
        return;
    oracle->ghosts = mu_sim_grow(oracle->ghosts, oracle->ghost_count, &oracle->ghost_capacity, sizeof *oracle->ghosts);
    oracle->ghosts[oracle->ghost_count++] = (struct mu_sim_ghost){
        sim->workers[slot].session, sim->now_us, sim->workers[slot].engine.held, mu_sim_oracle_era(sim, slot)};
}

bool mu_sim_oracle_attached(struct mu_sim *sim, uint32_t slot)
{
    enum { SETTLED_US = 8000000 }; /* its Hello has certainly been heard */
    const struct mu_sim_node *node = &sim->nodes[MU_SIM_NODE_WORKER + slot];
    const struct mu_sim_session *session = mu_sim_session(sim, sim->workers[slot].session);
    return node->alive && !node->stopped && session && session->coord_open && !session->cut &&
           session->opened_us + SETTLED_US < sim->now_us && !sim->workers[slot].engine.was_hung &&
           !sim->workers[slot].exited;
}

/* An order that was right when it was given may arrive when another holder has just died: the dead count for a while.
 */
static void gather_possible(struct mu_sim *sim, uint32_t but, struct mu_sim_union *u)
{
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        bool is_void = mu_sim_oracle_is_void(sim, mu_sim_oracle_era(sim, slot));
        if (slot != but && mu_sim_worker_alive(sim, slot) && !sim->workers[slot].exited && !is_void &&
            !mu_sim_oracle_poisoned(sim, slot))
            mu_sim_union_add(u, &sim->workers[slot].engine.held);
    }
    for (uint32_t i = sim->oracle->ghost_count; i-- > 0;) {
        const struct mu_sim_ghost *ghost = &sim->oracle->ghosts[i];
        const struct mu_sim_session *session = mu_sim_session(sim, ghost->session);
        bool counts = (session && session->coord_open) || sim->now_us < ghost->died_us + 8 * MU_SIM_S;
        if (counts && !mu_sim_oracle_is_void(sim, ghost->era))
            mu_sim_union_add(u, &ghost->held);
    }
}

/* Whatever step this worker and those who are certainly there can bring back together, can be brought back without what
 * it gives up; or it is in a checkpoint. */
void mu_sim_oracle_drops(struct mu_sim *sim, uint32_t slot, const struct mu_held *kept, const char *why)
{
    const struct mu_sim_engine *engine = &sim->workers[slot].engine;
    uint64_t before = 0, after = 0;
    if (strcmp(why, "forget") == 0)
        sim->stats.forgotten++;
    if (!engine->held.has_state || sim->params.slots >= 200 || mu_sim_oracle_job_over(sim) || engine->was_hung ||
        mu_sim_oracle_poisoned(sim, slot))
        return; /* what a hanging engine holds, nobody can have; it is not taken in again */
    if (engine->generation < sim->oracle->newest_go || mu_sim_oracle_is_void(sim, mu_sim_oracle_era(sim, slot)))
        return; /* a newer generation went on without it: its state is history */
    struct mu_sim_union certain = {0}, possible = {0};
    mu_sim_union_add(&certain, &engine->held);
    bool by_itself = strcmp(why, "prepared") == 0; /* nobody told it to: whoever lives counts */
    for (uint32_t other = 0; other < sim->params.slots; other++) {
        bool lives = mu_sim_worker_alive(sim, other) && !sim->nodes[MU_SIM_NODE_WORKER + other].stopped &&
                     !sim->workers[other].engine.was_hung;
        bool is_void = mu_sim_oracle_is_void(sim, mu_sim_oracle_era(sim, other));
        if (other != slot && !is_void && !mu_sim_oracle_poisoned(sim, other) &&
            (by_itself ? lives : mu_sim_oracle_attached(sim, other)))
            mu_sim_union_add(&certain, &sim->workers[other].engine.held);
    }
    bool has_before = mu_sim_union_newest(sim, &certain, &before);
    gather_possible(sim, slot, &possible);
    if (kept)
        mu_sim_union_add(&possible, kept);
    bool has_after = mu_sim_union_newest(sim, &possible, &after);
    free(certain.held);
    free(possible.held);
    uint64_t saved = mu_sim_oracle_committed_step(sim);
    bool lost = has_before && before > 0 && (!has_after || after < before) && saved < before;
    if (lost)
        mu_sim_violate(sim,
                       "worker %u drops the only copy of chunks of step %" PRIu64
                       " (%s) while the newest checkpoint is of step %" PRIu64,
                       slot, before, why, saved);
}

/* What a spare holds goes only to a newer generation that has come past it. (Past, or as far as it: what was loaded for
 * a generation that never went is not believed where the one before it was condemned.) */
void mu_sim_oracle_makes_room(struct mu_sim *sim, uint32_t slot, uint64_t generation)
{
    const struct mu_sim_engine *engine = &sim->workers[slot].engine;
    bool is_void = mu_sim_oracle_is_void(sim, mu_sim_oracle_era(sim, slot));
    if (mu_sim_oracle_poisoned(sim, slot))
        return;
    const struct mu_sim_generation *own = mu_sim_oracle_generation(sim, engine->generation);
    bool doubted = sim->stats.faults[MU_SIM_FAULT_POISON] > 0 && own && !own->go;
    uint64_t past = sim->oracle->newest_step + doubted;
    if (engine->generation >= generation || (engine->held.step >= past && !is_void))
        mu_sim_violate(sim,
                       "worker %u of generation %" PRIu64 " drops step %" PRIu64 " for a feed by generation %" PRIu64
                       ", which has come to step %" PRIu64,
                       slot, engine->generation, engine->held.step, generation, sim->oracle->newest_step);
    mu_sim_oracle_drops(sim, slot, NULL, "fed");
}

/* ---- the end ---- */

static const char *job_state_name(enum mu_job_state state)
{
    static const char *const names[] = {"pending", "running", "finished", "failed", "cancelled"};
    return state < MU_JOB_STATE_COUNT ? names[state] : "?";
}

static void describe(struct mu_sim *sim, char *out, size_t size)
{
    static const char *const phases[] = {"spare", "preparing", "prepared", "running", "parking", "parked"};
    struct mu_job_view view;
    size_t used = 0;
    out[0] = 0;
    if (mu_sim_coord_up(sim) && mu_coord_job_find(sim->coord.core, sim->spec.name, &view))
        used += (size_t)snprintf(out + used, size - used,
                                 "; coordinator: phase %d generation %" PRIu64 " world %u attached %u step %" PRIu64,
                                 (int)view.phase, view.generation, view.world, view.attached, view.steps_done);
    for (uint32_t slot = 0; slot < sim->params.slots && used + 60 < size; slot++) {
        if (!mu_sim_worker_alive(sim, slot))
            continue;
        const struct mu_worker_status *status = mu_worker_status(sim->workers[slot].core);
        used += (size_t)snprintf(out + used, size - used, "; w%u %s gen %" PRIu64 " step %" PRIu64 "%s", slot,
                                 phases[status->phase], status->generation, sim->workers[slot].engine.held.step,
                                 mu_worker_connected(sim->workers[slot].core) ? "" : " alone");
    }
}

void mu_sim_oracle_end(struct mu_sim *sim)
{
    const struct mu_sim_oracle *oracle = sim->oracle;
    char where[480];
    describe(sim, where, sizeof where);
    if (!mu_sim_oracle_job_over(sim) && sim->params.local && oracle->restore_lost)
        return; /* it waits for a disk to come back */
    if (!mu_sim_oracle_job_over(sim)) {
        mu_sim_violate(sim, "liveness: the job is %s after %" PRIu64 " s%s", job_state_name(oracle->state),
                       sim->now_us / MU_SIM_S, where);
        return;
    }
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        if (mu_sim_worker_alive(sim, slot))
            mu_sim_violate(sim, "liveness: worker %u is still there after the end of the job%s", slot, where);
    }
    bool ordered = sim->params.checkpoints && sim->params.steps > 3 * sim->params.checkpoint_every;
    if (sim->params.undisturbed && ordered && sim->stats.commits < 2)
        mu_sim_violate(sim,
                       "nothing was in the way, but only %" PRIu64 " checkpoint was committed in %" PRIu64 " steps",
                       sim->stats.commits, sim->params.steps);
    if (sim->params.undisturbed && (sim->stats.replayed || sim->stats.forgotten))
        mu_sim_violate(sim, "nothing was in the way, but %" PRIu64 " steps were replayed", sim->stats.replayed);
    if (sim->params.one_fault && sim->params.buddies && sim->stats.replayed)
        mu_sim_violate(sim, "one worker was lost, everything had a second holder, but %" PRIu64 " steps were replayed",
                       sim->stats.replayed);
    bool cancelled = oracle->state == MU_JOB_CANCELLED && mu_sim_client_cancelled(sim);
    bool failed = oracle->state == MU_JOB_FAILED && sim->params.may_fail && oracle->restore_lost;
    if (oracle->state != MU_JOB_FINISHED && !cancelled && !failed)
        mu_sim_violate(sim, "the job ended as %s%s", job_state_name(oracle->state), where);
}
