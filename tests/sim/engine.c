/* Hash engine, stepping: leaves, exchange, vote, update, boundary. It follows the commit of a step
 * (docs/architecture.md):
 *
 *   COMPUTING --leaves done--> REDUCING --whole gradient--> VOTING --all votes--> OPTIMIZING --applied, boundary-->
 * COMPUTING |snapshot: STALLED for a moment any --failure, abort, park command, last step--> PARKED
 *
 * Mesh: everybody sends its subtree roots and its vote to everybody. Tree: roots and votes go up and are merged on the
 * way, sum and result go down. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

static struct mu_sim_engine *engine_of(struct mu_sim *sim, uint32_t slot)
{
    return &sim->workers[slot].engine;
}

static int32_t node_of(uint32_t slot)
{
    return MU_SIM_NODE_WORKER + (int32_t)slot;
}

bool mu_sim_engine_waiting(const struct mu_sim_engine *engine)
{
    return !engine->hung &&
           (engine->phase == MU_SIM_REDUCING || engine->phase == MU_SIM_VOTING || engine->phase == MU_SIM_PREPARING);
}

bool mu_sim_engine_running(const struct mu_sim_engine *engine)
{
    return engine->phase >= MU_SIM_COMPUTING && engine->phase <= MU_SIM_STALLED;
}

/* Schedules a continuation of this engine's current work; dropped when the work is given up. */
static void later(struct mu_sim *sim, uint32_t slot, uint64_t delay_us, mu_sim_fire fire)
{
    mu_sim_after(sim, delay_us, node_of(slot), fire, NULL, slot, engine_of(sim, slot)->epoch);
}

/* True: this continuation is stale, or must wait because the engine hangs. */
static bool not_now(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_engine *engine = engine_of(sim, (uint32_t)event->a);
    if (event->b != engine->epoch)
        return true;
    if (engine->hung) {
        later(sim, (uint32_t)event->a, 200 * MU_SIM_MS, event->fire);
        return true;
    }
    engine->progress++;
    return false;
}

/* ---- leaves ---- */

static uint64_t hash_node(struct mu_sim *sim, const struct mu_sim_engine *engine, struct mu_tree_node node)
{
    if (node.count == 1)
        return mu_sim_hash_leaf(sim, engine->values, engine->held.step, node.first);
    struct mu_tree_node left, right;
    mu_tree_children(node, &left, &right);
    return mu_sim_hash_pair(hash_node(sim, engine, left), hash_node(sim, engine, right));
}

static void push_root(struct mu_sim_engine *engine, struct mu_sim_root root)
{
    engine->roots = mu_sim_grow(engine->roots, engine->root_count, &engine->root_capacity, sizeof *engine->roots);
    engine->roots[engine->root_count++] = root;
}

static void send_roots(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_ROOTS, engine->root_count);
    memcpy(frame->roots, engine->roots, engine->root_count * sizeof *engine->roots);
    mu_sim_engine_send(sim, slot, end, frame);
}

static void send_value(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end, enum mu_sim_frame_kind kind,
                       uint64_t hash, uint64_t command)
{
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, kind, 0);
    frame->hash = hash;
    frame->command = command;
    mu_sim_engine_send(sim, slot, end, frame);
}

/* The parent is the only neighbour below a rank of the tree. */
static struct mu_sim_link_end *parent(struct mu_sim_engine *engine)
{
    return !engine->mesh && engine->link_count && engine->links[0].rank < engine->rank ? &engine->links[0] : NULL;
}

static bool is_child(const struct mu_sim_engine *engine, const struct mu_sim_link_end *end)
{
    return end->rank > engine->rank;
}

static void cast_vote(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->vote = mu_worker_vote(sim->workers[slot].core, engine->generation);
    if (!engine->mesh)
        return;
    for (uint32_t i = 0; i < engine->link_count; i++)
        send_value(sim, slot, &engine->links[i], MU_SIM_FRAME_VOTE, 0, engine->vote);
}

static void computed(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (not_now(sim, event))
        return;
    struct mu_tree_node nodes[MU_TREE_ROOTS_MAX];
    uint32_t count =
        engine->leaf_count ? mu_tree_roots(sim->params.leaves, engine->first_leaf, engine->leaf_count, nodes) : 0;
    for (uint32_t i = 0; i < count; i++)
        push_root(engine, (struct mu_sim_root){nodes[i], hash_node(sim, engine, nodes[i])});
    engine->phase = MU_SIM_REDUCING;
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_EXCHANGE))
        return;
    for (uint32_t i = 0; engine->mesh && i < engine->link_count; i++)
        send_roots(sim, slot, &engine->links[i]);
    if (MU_MUTANT(MU_MUT_VOTE_BEFORE_GRADIENT) && engine->mesh)
        cast_vote(sim, slot);
    mu_sim_engine_pump(sim, slot);
}

static void start_step(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (engine->links[i].dead) {
            mu_sim_engine_park(sim, slot, MU_PARK_PEER, engine->links[i].rank, engine->links[i].failure, 0,
                               "connection lost");
            return;
        }
    }
    if (engine->held.step >= sim->spec.steps) {
        mu_sim_engine_park(sim, slot, MU_PARK_FINISHED, 0, MU_PEER_FAILURE_NONE, 0, "");
        return;
    }
    engine->phase = MU_SIM_COMPUTING;
    engine->held.has_gradient = false; /* the next backward overwrites it */
    engine->root_count = 0;
    engine->sum_sent = engine->vote_sent = false;
    engine->step_started_us = sim->now_us;
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_FORWARD))
        return;
    uint64_t compute_us = sim->params.leaf_us * engine->leaf_count * sim->workers[slot].speed_percent / 100;
    later(sim, slot, mu_sim_delay(sim, compute_us), computed);
}

/* ---- exchange ---- */

/* Adds a root at the right end and merges while the last two are the halves of one node. */
static void merge_root(struct mu_sim *sim, struct mu_sim_engine *engine, struct mu_sim_root root)
{
    push_root(engine, root);
    while (engine->root_count >= 2) {
        struct mu_sim_root *left = &engine->roots[engine->root_count - 2], *right = left + 1;
        struct mu_tree_node up = mu_tree_parent(sim->params.leaves, left->node), l, r;
        mu_tree_children(up, &l, &r);
        if (l.first != left->node.first || l.count != left->node.count || r.first != right->node.first ||
            r.count != right->node.count)
            return;
        *left = (struct mu_sim_root){up, mu_sim_hash_pair(left->hash, right->hash)};
        engine->root_count--;
    }
}

static struct mu_sim_frame *at_hand(const struct mu_sim_engine *engine, struct mu_sim_frame *frame)
{
    return frame && frame->step == engine->held.step ? frame : NULL;
}

static bool have_all(const struct mu_sim_engine *engine, bool votes, bool children_only)
{
    uint64_t parity = engine->held.step & 1;
    for (uint32_t i = 0; i < engine->link_count; i++) {
        const struct mu_sim_link_end *end = &engine->links[i];
        if (children_only && !is_child(engine, end))
            continue;
        if (!at_hand(engine, votes ? end->votes[parity] : end->roots[parity]))
            return false;
    }
    return true;
}

static void append_link_roots(struct mu_sim_engine *engine, const struct mu_sim_link_end *end, struct mu_sim_root *out,
                              uint32_t *count)
{
    const struct mu_sim_frame *frame = end->roots[engine->held.step & 1];
    memcpy(out + *count, frame->roots, frame->root_count * sizeof *out);
    *count += frame->root_count;
}

static bool reduce_mesh(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (!have_all(engine, false, false))
        return false;
    uint32_t total = engine->root_count, count = 0;
    for (uint32_t i = 0; i < engine->link_count; i++)
        total += engine->links[i].roots[engine->held.step & 1]->root_count;
    struct mu_sim_root *all = mu_sim_alloc((total + 1) * sizeof *all);
    bool own_done = false;
    for (uint32_t i = 0; i <= engine->link_count; i++) {
        if (!own_done && (i == engine->link_count || engine->links[i].rank > engine->rank)) {
            memcpy(all + count, engine->roots, engine->root_count * sizeof *all);
            count += engine->root_count;
            own_done = true;
        }
        if (i < engine->link_count)
            append_link_roots(engine, &engine->links[i], all, &count);
    }
    mu_sim_oracle_tiles(sim, slot, all, count);
    if (!sim->failed) {
        struct mu_tree_node *nodes = mu_sim_alloc((count + 1) * sizeof *nodes);
        struct mu_tree_add *adds = mu_sim_alloc((count + 1) * sizeof *adds);
        for (uint32_t i = 0; i < count; i++)
            nodes[i] = all[i].node;
        uint32_t add_count = mu_tree_schedule(sim->params.leaves, nodes, count, adds);
        for (uint32_t i = 0; i < add_count; i++)
            all[adds[i].into].hash = mu_sim_hash_pair(all[adds[i].into].hash, all[adds[i].from].hash);
        engine->gradient = all[0].hash;
        free(nodes);
        free(adds);
    }
    free(all);
    return true;
}

static bool reduce_tree(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *up = parent(engine);
    if (!engine->sum_sent) {
        if (!have_all(engine, false, true))
            return false;
        for (uint32_t i = 0; i < engine->link_count; i++) {
            const struct mu_sim_frame *frame = engine->links[i].roots[engine->held.step & 1];
            for (uint32_t k = 0; is_child(engine, &engine->links[i]) && k < frame->root_count; k++)
                merge_root(sim, engine, frame->roots[k]);
        }
        engine->sum_sent = true;
        if (up)
            send_roots(sim, slot, up);
        else
            mu_sim_oracle_tiles(sim, slot, engine->roots, engine->root_count);
    }
    if (up && !at_hand(engine, up->sum))
        return false;
    engine->gradient = up ? up->sum->hash : engine->roots[0].hash;
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (is_child(engine, &engine->links[i]))
            send_value(sim, slot, &engine->links[i], MU_SIM_FRAME_SUM, engine->gradient, 0);
    }
    return true;
}

/* ---- vote ---- */

static bool tally(struct mu_sim *sim, uint32_t slot, uint64_t *ret_command)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *up = parent(engine);
    if (!engine->vote_sent) {
        if (!have_all(engine, true, !engine->mesh))
            return false;
        for (uint32_t i = 0; i < engine->link_count; i++) {
            if (!engine->mesh && !is_child(engine, &engine->links[i]))
                continue;
            uint64_t vote = engine->links[i].votes[engine->held.step & 1]->command;
            bool better = MU_MUTANT(MU_MUT_VOTE_NEWEST) ? vote > engine->vote : vote < engine->vote;
            engine->vote = better ? vote : engine->vote;
        }
        engine->vote_sent = true;
        if (up)
            send_value(sim, slot, up, MU_SIM_FRAME_VOTE, 0, engine->vote);
    }
    if (up && !at_hand(engine, up->result))
        return false;
    *ret_command = up ? up->result->command : engine->vote;
    for (uint32_t i = 0; !engine->mesh && i < engine->link_count; i++) {
        if (is_child(engine, &engine->links[i]))
            send_value(sim, slot, &engine->links[i], MU_SIM_FRAME_RESULT, 0, *ret_command);
    }
    return true;
}

/* ---- update and boundary ---- */

void mu_sim_engine_apply(struct mu_sim *sim, uint32_t slot, const struct mu_step_result *result)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    mu_sim_hash_apply(engine->values, engine->gradient, result);
    engine->held.step++;
    engine->held.has_gradient = false;
    engine->held.has_result = true;
    engine->held.result = *result;
    sim->stats.steps_applied++;
    mu_sim_oracle_holds(sim, slot);
}

static void post_reports(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_worker_event event = {.kind = MU_WE_STEP};
    event.step = (struct mu_step_report){.steps_done = engine->held.step,
                                         .result = engine->held.result,
                                         .step_count = 1,
                                         .leaf_count = engine->leaf_count,
                                         .tokens = sim->params.leaves * 8,
                                         .total_us = sim->now_us - engine->step_started_us,
                                         .forward_us = engine->leaf_count * sim->params.leaf_us};
    mu_sim_worker_post(sim, slot, &event);
    if (sim->spec.eval.every && engine->held.step % sim->spec.eval.every == 0)
        mu_sim_worker_post(sim, slot, &(struct mu_worker_event){.kind = MU_WE_EVAL, .eval = {engine->held.step, 1.0}});
}

static void snapshot_copied(struct mu_sim *sim, struct mu_sim_event *event)
{
    if (!not_now(sim, event))
        start_step(sim, (uint32_t)event->a);
}

static void optimized(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (not_now(sim, event) || mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_OPTIMIZER))
        return;
    struct mu_step_result result = engine->held.result;
    mu_sim_engine_apply(sim, slot, &result);
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_BOUNDARY))
        return;
    struct mu_boundary boundary = mu_worker_boundary(sim->workers[slot].core, mu_sim_mono(sim, node_of(slot)),
                                                     engine->generation, engine->held.step, &result);
    mu_sim_oracle_boundary(sim, slot, engine->held.step, &boundary);
    post_reports(sim, slot);
    if (boundary.take_snapshot) {
        mu_sim_engine_write_piece(sim, slot, &boundary.snapshot);
        if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_SNAPSHOT))
            return;
    }
    if (boundary.park) {
        mu_sim_engine_park(sim, slot, MU_PARK_COMMAND, 0, MU_PEER_FAILURE_NONE, 0, "");
        return;
    }
    engine->phase = MU_SIM_STALLED;
    if (boundary.take_snapshot)
        later(sim, slot, mu_sim_delay(sim, 2 * MU_SIM_MS), snapshot_copied);
    else
        start_step(sim, slot);
}

static void enter_vote(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->held.has_gradient = true;
    /* A result of the last update is not one of this gradient: from here on only the pair (gradient, its result)
     * counts. */
    mu_sim_oracle_holds(sim, slot);
    mu_sim_oracle_reduced(sim, slot, engine->held.step, engine->gradient);
    engine->phase = MU_SIM_VOTING;
    if (!MU_MUTANT(MU_MUT_VOTE_BEFORE_GRADIENT) || !engine->mesh)
        cast_vote(sim, slot);
}

void mu_sim_engine_pump(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->hung)
        return;
    if (engine->phase == MU_SIM_REDUCING) {
        if (!(engine->mesh ? reduce_mesh(sim, slot) : reduce_tree(sim, slot)) || sim->failed)
            return;
        if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_BEFORE_VOTE))
            return;
        enter_vote(sim, slot);
    }
    uint64_t command = 0;
    if (engine->phase != MU_SIM_VOTING || !tally(sim, slot, &command))
        return;
    engine->held.result = mu_sim_step_result(engine->held.step, engine->gradient, command);
    engine->held.has_result = true;
    engine->phase = MU_SIM_OPTIMIZING;
    engine->progress++;
    mu_sim_oracle_decided(sim, slot, &engine->held.result);
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_AFTER_VOTE))
        return;
    later(sim, slot, mu_sim_delay(sim, sim->params.optimizer_us), optimized);
}

/* ---- orders ---- */

void mu_sim_engine_run(struct mu_sim *sim, uint32_t slot, uint64_t generation)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->generation != generation || engine->phase != MU_SIM_PREPARED)
        return; /* a peer failed meanwhile, the agent will hear of it */
    mu_sim_engine_close_links(sim, slot, engine->old_links, engine->old_link_count, true);
    mu_sim_engine_free_links(engine->old_links, engine->old_link_count);
    engine->old_links = NULL;
    engine->old_link_count = 0;
    engine->ran = true;
    mu_sim_oracle_runs(sim, slot, true);
    engine->phase = MU_SIM_STALLED;
    if (!mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_RUN))
        start_step(sim, slot);
}

static void aborted(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->generation != event->b)
        return;
    if (engine->hung) {
        mu_sim_after(sim, 200 * MU_SIM_MS, node_of(slot), aborted, NULL, slot, event->b);
        return;
    }
    if (engine->phase == MU_SIM_PARKED) {
        mu_sim_worker_post(sim, slot, &(struct mu_worker_event){.kind = MU_WE_PARKED, .parked = engine->parked});
        return;
    }
    if (engine->phase == MU_SIM_OPTIMIZING) {
        struct mu_step_result result = engine->held.result;
        if (MU_MUTANT(MU_MUT_PARK_MID_STEP))
            engine->values[0]++;       /* the update of the first chunk has begun */
        else if (mu_sim_below(sim, 2)) /* the update is finished first */
            mu_sim_engine_apply(sim, slot, &result);
    }
    mu_sim_engine_park(sim, slot, MU_PARK_REVOKED, 0, MU_PEER_FAILURE_NONE, 0, "");
}

void mu_sim_engine_abort(struct mu_sim *sim, uint32_t slot, uint64_t generation)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->generation != generation) { /* never prepared it: holds what it held */
        struct mu_worker_event event = {.kind = MU_WE_PARKED,
                                        .parked = {.generation = generation, .reason = MU_PARK_REVOKED}};
        event.parked.held = engine->held;
        mu_sim_worker_post(sim, slot, &event);
        return;
    }
    mu_sim_after(sim, 1 + mu_sim_below(sim, 10 * MU_SIM_MS), node_of(slot), aborted, NULL, slot, generation);
}

void mu_sim_engine_park(struct mu_sim *sim, uint32_t slot, enum mu_park_reason reason, uint32_t peer_rank,
                        enum mu_peer_failure failure, uint64_t bad_checkpoint, const char *text)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->epoch++;
    engine->phase = MU_SIM_PARKED;
    engine->progress++;
    mu_sim_oracle_runs(sim, slot, false);
    mu_sim_oracle_holds(sim, slot);
    struct mu_parked *parked = &engine->parked;
    memset(parked, 0, sizeof *parked);
    parked->generation = engine->generation;
    parked->held = engine->held;
    parked->reason = reason;
    parked->peer_rank = peer_rank;
    parked->peer_failure = failure;
    parked->bad_checkpoint = bad_checkpoint;
    snprintf(parked->text, sizeof parked->text, "%s", text);
    if (reason == MU_PARK_FINISHED)
        mu_sim_hash_weights(engine->values, parked->weights_sha256);
    mu_sim_trace(sim, "w%u   parks, reason %d, step %llu%s", slot, (int)reason, (unsigned long long)engine->held.step,
                 engine->held.has_gradient ? " with gradient" : "");
    mu_sim_worker_post(sim, slot, &(struct mu_worker_event){.kind = MU_WE_PARKED, .parked = *parked});
    (void)mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_PARKED);
}
