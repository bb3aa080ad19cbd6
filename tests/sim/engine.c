/* Hash engine, stepping: forward and backward, exchange, vote, update, gather, boundary. It follows the commit of a
 * step (docs/architecture.md):
 *
 *   COMPUTING --time is up--> FORWARDING --stage's hash--> BACKWARDING --model's hash--> REDUCING --whole gradient-->
 *   VOTING --all votes--> OPTIMIZING --applied, boundary--> GATHERING --others' parameters--> COMPUTING
 *   snapshot: STALLED for a moment; any --failure, abort, park command, last step--> PARKED
 *
 * Forward: the tensor group shows each other its parameters, the hash of all chunks up to here goes from stage to
 * stage; the last stage's, with the copy of the tied embedding on top, is the hash of the model and comes back the same
 * way. It does not depend on the layout. A leaf's gradient is a hash of it; replicas add leaves up along the fixed
 * tree. Mesh: everybody sends its subtree roots, or its vote, to everybody. Tree: roots and votes go up and are merged
 * on the way, sum and result go down. Idle ranks only vote. */
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
    bool exchanges = engine->phase >= MU_SIM_FORWARDING && engine->phase <= MU_SIM_VOTING;
    return !engine->hung && (exchanges || engine->phase == MU_SIM_GATHERING || engine->phase == MU_SIM_PREPARING);
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
        return mu_sim_hash_leaf(&engine->spec, engine->model_hash, engine->held.step, node.first);
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
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_ROOTS, engine->root_count, false);
    memcpy(frame->roots, engine->roots, engine->root_count * sizeof *engine->roots);
    mu_sim_engine_send(sim, slot, end, frame);
}

static void send_value(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end, enum mu_sim_frame_kind kind,
                       uint64_t hash, uint64_t command)
{
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, kind, 0, false);
    frame->hash = hash;
    frame->command = command;
    mu_sim_engine_send(sim, slot, end, frame);
}

/* The link to a peer of this role; NULL: there is none. */
static struct mu_sim_link_end *link_of(struct mu_sim_engine *engine, uint32_t role)
{
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (engine->links[i].roles & role)
            return &engine->links[i];
    }
    return NULL;
}

static void send_value_to_all(struct mu_sim *sim, uint32_t slot, uint32_t roles, enum mu_sim_frame_kind kind,
                              uint64_t hash, uint64_t command)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (engine->links[i].roles & roles)
            send_value(sim, slot, &engine->links[i], kind, hash, command);
    }
}

/* Parameters of `chunks`, as they are now. */
static void send_params(struct mu_sim *sim, uint32_t slot, uint32_t roles, enum mu_sim_frame_kind kind,
                        const struct mu_sim_state *from, uint64_t chunks)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (!(engine->links[i].roles & roles))
            continue;
        struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, kind, 0, true);
        mu_sim_state_take(frame->state, from, (struct mu_sim_mask){chunks, 0});
        mu_sim_engine_send(sim, slot, &engine->links[i], frame);
    }
}

static void cast_vote(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->vote = mu_worker_vote(sim->workers[slot].core, engine->generation);
    send_value_to_all(sim, slot, MU_SIM_ROLE_WORLD_MESH, MU_SIM_FRAME_VOTE, 0, engine->vote);
}

/* ---- forward and backward ---- */

static struct mu_sim_frame *at_hand(const struct mu_sim_engine *engine, const struct mu_sim_link_end *end,
                                    enum mu_sim_frame_kind kind)
{
    struct mu_sim_frame *frame = end->kept[kind][engine->held.step & 1];
    return frame && frame->step == engine->held.step ? frame : NULL;
}

/* From every peer of these roles. */
static bool have_all(const struct mu_sim_engine *engine, uint32_t roles, enum mu_sim_frame_kind kind)
{
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (engine->links[i].roles & roles && !at_hand(engine, &engine->links[i], kind))
            return false;
    }
    return true;
}

/* Parameters that this rank reads: its share, and on the last stage its copy of the tied embedding. */
static struct mu_sim_state own_params(const struct mu_sim_engine *engine)
{
    struct mu_sim_state own = {.has = {0, 0}};
    mu_sim_state_take(&own, &engine->state, (struct mu_sim_mask){engine->wants.params, 0});
    return own;
}

/* Those of the whole stage. A chunk that nobody has shown stays 0, and the gradient shows it. */
static struct mu_sim_state stage_params(const struct mu_sim_engine *engine)
{
    struct mu_sim_state stage = own_params(engine);
    for (uint32_t i = 0; i < engine->link_count; i++) {
        const struct mu_sim_frame *frame = engine->links[i].roles & MU_SIM_ROLE_TENSOR
                                               ? at_hand(engine, &engine->links[i], MU_SIM_FRAME_TENSOR)
                                               : NULL;
        uint64_t news = frame ? frame->state->has.params & ~stage.has.params : 0;
        if (frame)
            mu_sim_state_take(&stage, frame->state, (struct mu_sim_mask){news, 0});
    }
    return stage;
}

static bool forward(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    const struct mu_layout *layout = &engine->assign->layout;
    struct mu_sim_link_end *previous = link_of(engine, MU_SIM_ROLE_PREVIOUS);
    if (!have_all(engine, MU_SIM_ROLE_TENSOR, MU_SIM_FRAME_TENSOR) ||
        !have_all(engine, MU_SIM_ROLE_PREVIOUS, MU_SIM_FRAME_FORWARD))
        return false;
    struct mu_sim_state stage = stage_params(engine);
    uint64_t before = previous ? at_hand(engine, previous, MU_SIM_FRAME_FORWARD)->hash : 0;
    uint64_t hash = mu_sim_hash_chunks(before, stage.values.params, engine->stage_chunks);
    if (engine->at.p + 1 == layout->pp)
        hash = mu_sim_hash_chunks(hash, stage.values.params, sim->tied_chunks);
    engine->model_hash = hash;
    send_value_to_all(sim, slot, MU_SIM_ROLE_NEXT, MU_SIM_FRAME_FORWARD, hash, 0);
    send_value_to_all(sim, slot, MU_SIM_ROLE_FIRST, MU_SIM_FRAME_TIED, hash, 0);
    if (MU_MUTANT(MU_MUT_VOTE_BEFORE_STAGE) && engine->at.p > 0)
        cast_vote(sim, slot);
    return true;
}

static bool backward(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *next = link_of(engine, MU_SIM_ROLE_NEXT);
    if (!have_all(engine, MU_SIM_ROLE_NEXT, MU_SIM_FRAME_BACKWARD) ||
        !have_all(engine, MU_SIM_ROLE_LAST, MU_SIM_FRAME_TIED))
        return false;
    if (next)
        engine->model_hash = at_hand(engine, next, MU_SIM_FRAME_BACKWARD)->hash;
    send_value_to_all(sim, slot, MU_SIM_ROLE_PREVIOUS, MU_SIM_FRAME_BACKWARD, engine->model_hash, 0);
    return true;
}

/* Own leaves are done. False: killed at this point. */
static bool add_leaves(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_tree_node nodes[MU_TREE_ROOTS_MAX];
    uint32_t count =
        engine->leaf_count ? mu_tree_roots(sim->params.leaves, engine->first_leaf, engine->leaf_count, nodes) : 0;
    for (uint32_t i = 0; i < count; i++)
        push_root(engine, (struct mu_sim_root){nodes[i], hash_node(sim, engine, nodes[i])});
    engine->phase = MU_SIM_REDUCING;
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_EXCHANGE))
        return false;
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (engine->links[i].roles & MU_SIM_ROLE_REPLICA_MESH)
            send_roots(sim, slot, &engine->links[i]);
    }
    if (MU_MUTANT(MU_MUT_VOTE_BEFORE_GRADIENT))
        cast_vote(sim, slot);
    return true;
}

static void computed(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (not_now(sim, event))
        return;
    if (--engine->leaves_left > 0) { /* each one is a sign of progress */
        later(sim, slot, engine->leaf_us, computed);
        return;
    }
    engine->phase = MU_SIM_FORWARDING;
    struct mu_sim_state own = own_params(engine);
    send_params(sim, slot, MU_SIM_ROLE_TENSOR, MU_SIM_FRAME_TENSOR, &own, own.has.params);
    mu_sim_engine_pump(sim, slot);
}

static void idle(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    if (not_now(sim, event))
        return;
    engine_of(sim, slot)->phase = MU_SIM_VOTING;
    cast_vote(sim, slot);
    mu_sim_engine_pump(sim, slot);
}

/* What this rank answers for, and what those with one of the roles have shown it. */
static struct mu_sim_state final_params(struct mu_sim *sim, const struct mu_sim_engine *engine, uint32_t roles)
{
    struct mu_sim_state all = {.has = {0, 0}};
    uint64_t primary = mu_sim_share_chunks(sim, &engine->assign->layout, engine->rank, MU_SHARE_PRIMARY);
    mu_sim_state_take(&all, &engine->state, (struct mu_sim_mask){primary, 0});
    for (uint32_t i = 0; i < engine->link_count; i++) {
        const struct mu_sim_frame *frame =
            engine->links[i].roles & roles ? at_hand(engine, &engine->links[i], MU_SIM_FRAME_FINAL) : NULL;
        if (frame)
            mu_sim_state_take(&all, frame->state, frame->state->has);
    }
    return all;
}

static void send_final(struct mu_sim *sim, uint32_t slot, uint32_t from_roles, uint32_t to_roles)
{
    struct mu_sim_state all = final_params(sim, engine_of(sim, slot), from_roles);
    send_params(sim, slot, to_roles, MU_SIM_FRAME_FINAL, &all, all.has.params);
}

/* After the last step: ranks show each other what nobody holds alone, in a mesh or up and down the tree. False: not all
 * of it is here yet. */
static bool collect_final(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    const struct mu_layout *layout = &engine->assign->layout;
    if (layout->tp * layout->pp == 1 && layout->idle == 0)
        return true;
    if (!have_all(engine, MU_SIM_ROLE_WORLD_DOWN, MU_SIM_FRAME_FINAL))
        return false;
    if (!engine->final_sent)
        send_final(sim, slot, MU_SIM_ROLE_WORLD_DOWN, MU_SIM_ROLE_WORLD_MESH | MU_SIM_ROLE_WORLD_UP);
    engine->final_sent = true;
    if (!have_all(engine, MU_SIM_ROLE_WORLD_MESH | MU_SIM_ROLE_WORLD_UP, MU_SIM_FRAME_FINAL))
        return false;
    send_final(sim, slot, MU_SIM_ROLE_WORLD_DOWN | MU_SIM_ROLE_WORLD_UP, MU_SIM_ROLE_WORLD_DOWN);
    return true;
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
    if (!engine->gathered) { /* of the update before */
        engine->phase = MU_SIM_GATHERING;
        mu_sim_engine_pump(sim, slot);
        return;
    }
    if (engine->park_wanted) {
        mu_sim_engine_park(sim, slot, MU_PARK_COMMAND, 0, MU_PEER_FAILURE_NONE, 0, "");
        return;
    }
    if (engine->held.step >= mu_job_end(&engine->spec)) {
        if (!collect_final(sim, slot)) {
            engine->phase = MU_SIM_GATHERING;
            return;
        }
        mu_sim_engine_park(sim, slot, MU_PARK_FINISHED, 0, MU_PEER_FAILURE_NONE, 0, "");
        return;
    }
    mu_sim_feed_chunks(sim, slot);
    if (!mu_sim_worker_alive(sim, slot))
        return;
    engine->phase = MU_SIM_COMPUTING;
    engine->held.has_gradient = false; /* the next backward overwrites it */
    engine->root_count = 0;
    engine->sum_sent = engine->reduced = engine->vote_sent = false;
    engine->step_started_us = sim->now_us;
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_FORWARD))
        return;
    const struct mu_layout *layout = &engine->assign->layout;
    uint64_t compute_us = sim->params.leaf_us * engine->leaf_count * sim->workers[slot].speed_percent / 100;
    if (engine->working) {
        engine->leaves_left = engine->leaf_count;
        engine->leaf_us = mu_sim_delay(sim, compute_us / (layout->tp * layout->pp)) / engine->leaf_count;
        later(sim, slot, engine->leaf_us, computed);
    } else {
        later(sim, slot, 1, idle);
    }
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

static void append_link_roots(struct mu_sim_engine *engine, const struct mu_sim_link_end *end, struct mu_sim_root *out,
                              uint32_t *count)
{
    const struct mu_sim_frame *frame = at_hand(engine, end, MU_SIM_FRAME_ROOTS);
    memcpy(out + *count, frame->roots, frame->root_count * sizeof *out);
    *count += frame->root_count;
}

/* Roots of all replicas in order of their leaves; own ones between those of lower and of higher ranks. */
static struct mu_sim_root *collect_roots(struct mu_sim_engine *engine, uint32_t *ret_count)
{
    uint32_t total = engine->root_count, count = 0;
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (engine->links[i].roles & MU_SIM_ROLE_REPLICA_MESH)
            total += at_hand(engine, &engine->links[i], MU_SIM_FRAME_ROOTS)->root_count;
    }
    struct mu_sim_root *all = mu_sim_alloc((total + 1) * sizeof *all);
    bool own_done = false;
    for (uint32_t i = 0; i <= engine->link_count; i++) {
        if (!own_done && (i == engine->link_count || engine->links[i].rank > engine->rank)) {
            memcpy(all + count, engine->roots, engine->root_count * sizeof *all);
            count += engine->root_count;
            own_done = true;
        }
        if (i < engine->link_count && engine->links[i].roles & MU_SIM_ROLE_REPLICA_MESH)
            append_link_roots(engine, &engine->links[i], all, &count);
    }
    *ret_count = count;
    return all;
}

static bool reduce_mesh(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    uint32_t count;
    if (!have_all(engine, MU_SIM_ROLE_REPLICA_MESH, MU_SIM_FRAME_ROOTS))
        return false;
    struct mu_sim_root *all = collect_roots(engine, &count);
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
    struct mu_sim_link_end *up = link_of(engine, MU_SIM_ROLE_REPLICA_UP);
    if (!engine->sum_sent) {
        if (!have_all(engine, MU_SIM_ROLE_REPLICA_DOWN, MU_SIM_FRAME_ROOTS))
            return false;
        for (uint32_t i = 0; i < engine->link_count; i++) {
            const struct mu_sim_frame *frame = engine->links[i].roles & MU_SIM_ROLE_REPLICA_DOWN
                                                   ? at_hand(engine, &engine->links[i], MU_SIM_FRAME_ROOTS)
                                                   : NULL;
            for (uint32_t k = 0; frame && k < frame->root_count; k++)
                merge_root(sim, engine, frame->roots[k]);
        }
        engine->sum_sent = true;
        if (up)
            send_roots(sim, slot, up);
        else
            mu_sim_oracle_tiles(sim, slot, engine->roots, engine->root_count);
    }
    const struct mu_sim_frame *sum = up ? at_hand(engine, up, MU_SIM_FRAME_SUM) : NULL;
    if (up && !sum)
        return false;
    engine->gradient = up ? sum->hash : engine->roots[0].hash;
    send_value_to_all(sim, slot, MU_SIM_ROLE_REPLICA_DOWN, MU_SIM_FRAME_SUM, engine->gradient, 0);
    return true;
}

static bool reduce(struct mu_sim *sim, uint32_t slot)
{
    return engine_of(sim, slot)->assign->layout.dp <= MU_MESH_WORLD_MAX ? reduce_mesh(sim, slot)
                                                                        : reduce_tree(sim, slot);
}

/* The own gradient is whole: the buddy gets it too. False: that of the guarded rank is not here yet. */
static bool mirror(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *guarded = link_of(engine, MU_SIM_ROLE_GUARDED);
    if (!engine->reduced)
        send_value_to_all(sim, slot, MU_SIM_ROLE_BUDDY, MU_SIM_FRAME_MIRROR, engine->gradient, 0);
    engine->reduced = true;
    const struct mu_sim_frame *frame = guarded ? at_hand(engine, guarded, MU_SIM_FRAME_MIRROR) : NULL;
    if (frame)
        engine->mirror_gradient = frame->hash;
    return frame || !guarded || MU_MUTANT(MU_MUT_VOTE_BEFORE_MIRROR);
}

/* ---- vote ---- */

static bool tally(struct mu_sim *sim, uint32_t slot, uint64_t *ret_command)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *up = link_of(engine, MU_SIM_ROLE_WORLD_UP);
    uint32_t voters = MU_SIM_ROLE_WORLD_MESH | MU_SIM_ROLE_WORLD_DOWN;
    if (!engine->vote_sent) {
        if (!have_all(engine, voters, MU_SIM_FRAME_VOTE))
            return false;
        for (uint32_t i = 0; i < engine->link_count; i++) {
            if (!(engine->links[i].roles & voters))
                continue;
            uint64_t vote = at_hand(engine, &engine->links[i], MU_SIM_FRAME_VOTE)->command;
            bool better = MU_MUTANT(MU_MUT_VOTE_NEWEST) ? vote > engine->vote : vote < engine->vote;
            engine->vote = better ? vote : engine->vote;
        }
        engine->vote_sent = true;
        if (up)
            send_value(sim, slot, up, MU_SIM_FRAME_VOTE, 0, engine->vote);
    }
    const struct mu_sim_frame *result = up ? at_hand(engine, up, MU_SIM_FRAME_RESULT) : NULL;
    if (up && !result)
        return false;
    *ret_command = up ? result->command : engine->vote;
    send_value_to_all(sim, slot, MU_SIM_ROLE_WORLD_DOWN, MU_SIM_FRAME_RESULT, 0, *ret_command);
    return true;
}

/* ---- update and boundary ---- */

/* A replica that lacks only the copy of the tied embedding has what a single replica would own: owned_only says no more
 * then than is true. Where the job gives dp it says less. */
static void say_owned(const struct mu_sim *sim, struct mu_held_share *share)
{
    share->owned_only = true;
    if (share->layout.sharded || sim->spec.parallel.dp)
        return;
    struct mu_coords at = mu_layout_coords(&share->layout, share->rank);
    at.d = 0;
    share->layout.dp = 1;
    share->layout.idle = 0;
    share->rank = mu_layout_rank(&share->layout, at);
}

void mu_sim_engine_apply(struct mu_sim *sim, uint32_t slot, const struct mu_step_result *result)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_held_share *share = &engine->held.shares[0];
    if (engine->held.has_state) {
        struct mu_sim_mask updates = mu_sim_update_mask(sim, &share->layout, share->rank);
        struct mu_sim_mask all = mu_sim_share_mask(sim, &share->layout, share->rank);
        all.params |= mu_sim_share_chunks(sim, &share->layout, share->rank, MU_SHARE_COPY);
        uint64_t mirrored = mu_sim_share_chunks(sim, &share->layout, share->rank, MU_SHARE_MIRROR);
        struct mu_sim_mask own = {updates.params & ~mirrored, updates.moments & ~mirrored};
        mu_sim_hash_apply(&engine->state.values, own, engine->gradient, result, &engine->spec);
        if (!MU_MUTANT(MU_MUT_MIRROR_STALE))
            mu_sim_hash_apply(&engine->state.values, (struct mu_sim_mask){mirrored, mirrored}, engine->mirror_gradient,
                              result, &engine->spec);
        engine->state.has = updates; /* whatever else it had is of the step before */
        engine->held.share_count = 1;
        if (!mu_sim_mask_covers(updates, all))
            say_owned(sim, share);
    }
    engine->held.step++;
    engine->held.has_gradient = false;
    engine->held.has_result = true;
    engine->held.result = *result;
    sim->stats.steps_applied++;
    mu_sim_oracle_holds(sim, slot);
}

static uint64_t missing_params(const struct mu_sim_engine *engine, uint64_t of)
{
    return of & ~engine->state.has.params;
}

/* Parameters that others have updated, and the tied embedding from the first stage. False: not all are here yet. */
static bool gather(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < engine->link_count; i++) {
        uint32_t roles = engine->links[i].roles;
        const struct mu_sim_frame *own =
            roles & MU_SIM_ROLE_GATHER ? at_hand(engine, &engine->links[i], MU_SIM_FRAME_GATHER) : NULL;
        const struct mu_sim_frame *copy =
            roles & MU_SIM_ROLE_FIRST ? at_hand(engine, &engine->links[i], MU_SIM_FRAME_COPY) : NULL;
        struct mu_sim_mask news = own ? own->state->has : (struct mu_sim_mask){0, 0};
        news.params &= ~engine->mirror; /* updated here */
        if (own)
            mu_sim_state_take(&engine->state, own->state, news);
        if (copy)
            mu_sim_state_take(&engine->state, copy->state, copy->state->has);
    }
    if (MU_MUTANT(MU_MUT_GATHER_INCOMPLETE))
        engine->state.has.params |= engine->share.params;
    if (missing_params(engine, engine->share.params))
        return false;
    if (!engine->copy_sent) {
        engine->copy_sent = true;
        send_params(sim, slot, MU_SIM_ROLE_LAST, MU_SIM_FRAME_COPY, &engine->state,
                    engine->share.params & sim->tied_chunks);
    }
    if (MU_MUTANT(MU_MUT_KEEP_STALE_COPY))
        engine->state.has.params |= engine->wants.params;
    if (missing_params(engine, engine->wants.params))
        return false;
    if (engine->held.shares[0].owned_only) {
        engine->held.shares[0] = (struct mu_held_share){.layout = engine->assign->layout, .rank = engine->assign->rank};
        mu_sim_oracle_holds(sim, slot);
    }
    engine->gathered = true;
    return true;
}

static void start_gather(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->copy_sent = false;
    engine->gathered = !engine->working; /* asked again before the next step */
    if (!engine->working)
        return;
    if (missing_params(engine, engine->share.params))
        send_params(sim, slot, MU_SIM_ROLE_GATHER, MU_SIM_FRAME_GATHER, &engine->state,
                    engine->updates.params & ~engine->mirror);
    (void)gather(sim, slot);
}

static void post_reports(struct mu_sim *sim, uint32_t slot, uint64_t stall_us)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_worker_event event = {.kind = MU_WE_STEP};
    /* A whole leaf is as long whatever the layout: a stage takes its part of it. Restless histories have stages of any
     * sizes anyway, and say nothing. */
    const struct mu_layout *layout = &engine->assign->layout;
    uint32_t stage = engine->leaf_count ? mu_layout_coords(layout, engine->assign->rank).p : 0;
    uint64_t layers = layout->stage_first[stage + 1] - layout->stage_first[stage];
    uint64_t stage_us = sim->params.leaf_us * sim->workers[slot].speed_percent / 100 * layers / sim->spec.model.layers;
    event.step = (struct mu_step_report){.steps_done = engine->held.step,
                                         .result = engine->held.result,
                                         .step_count = 1,
                                         .leaf_count = engine->leaf_count,
                                         .tokens = sim->params.leaves * 8,
                                         .total_us = sim->now_us - engine->step_started_us + stall_us,
                                         .snapshot_us = stall_us,
                                         .forward_us = sim->params.restless ? 0 : engine->leaf_count * stage_us};
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
    start_gather(sim, slot);
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_BOUNDARY))
        return;
    struct mu_boundary boundary = mu_worker_boundary(sim->workers[slot].core, mu_sim_mono(sim, node_of(slot)),
                                                     engine->generation, engine->held.step, &result);
    mu_sim_oracle_boundary(sim, slot, engine->held.step, &boundary);
    post_reports(sim, slot, boundary.take_snapshot && sim->params.every_auto ? sim->params.stall_us : 0);
    if (boundary.take_snapshot) {
        mu_sim_engine_write_piece(sim, slot, &boundary.snapshot);
        if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_SNAPSHOT))
            return;
    }
    if (boundary.park && engine->gathered) {
        mu_sim_engine_park(sim, slot, MU_PARK_COMMAND, 0, MU_PEER_FAILURE_NONE, 0, "");
        return;
    }
    engine->park_wanted = boundary.park;
    engine->phase = MU_SIM_STALLED;
    if (boundary.take_snapshot && sim->params.every_auto)
        later(sim, slot, sim->params.stall_us, snapshot_copied);
    else if (boundary.take_snapshot)
        later(sim, slot, mu_sim_delay(sim, sim->params.stall_us), snapshot_copied);
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
    if (!MU_MUTANT(MU_MUT_VOTE_BEFORE_GRADIENT) && !(MU_MUTANT(MU_MUT_VOTE_BEFORE_STAGE) && engine->at.p > 0))
        cast_vote(sim, slot);
}

/* An idle rank has no gradient: it is told the result, by peers of which some may be further by now. */
static struct mu_step_result result_of(struct mu_sim *sim, uint32_t slot, uint64_t command)
{
    const struct mu_sim_engine *engine = engine_of(sim, slot);
    uint64_t step = engine->held.step, gradient = engine->gradient;
    const struct mu_step_result *known = engine->working ? NULL : mu_sim_oracle_decision(sim, slot, step);
    if (known)
        return *known;
    for (uint32_t other = 0; other < sim->params.slots && !engine->working; other++) {
        const struct mu_sim_engine *peer = &sim->workers[other].engine;
        if (peer->generation == engine->generation && peer->working && peer->held.has_gradient &&
            peer->held.step == step)
            gradient = peer->gradient; /* which may be one that is not finite */
    }
    return mu_sim_step_result(step, gradient, command);
}

static void decided(struct mu_sim *sim, uint32_t slot, uint64_t command)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->held.result = result_of(sim, slot, command);
    engine->held.has_result = true;
    engine->phase = MU_SIM_OPTIMIZING;
    engine->progress++;
    mu_sim_oracle_decided(sim, slot, &engine->held.result);
    if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_AFTER_VOTE))
        return;
    mu_sim_feed_update(sim, slot);
    later(sim, slot, engine->working ? mu_sim_delay(sim, sim->params.optimizer_us) : 1, optimized);
}

void mu_sim_engine_pump(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->hung)
        return;
    if (engine->phase == MU_SIM_GATHERING && (engine->gathered || gather(sim, slot)))
        start_step(sim, slot);
    if (engine->phase == MU_SIM_FORWARDING && forward(sim, slot))
        engine->phase = MU_SIM_BACKWARDING;
    if (engine->phase == MU_SIM_BACKWARDING && (!backward(sim, slot) || !add_leaves(sim, slot)))
        return;
    if (engine->phase == MU_SIM_REDUCING) {
        if ((!engine->reduced && !reduce(sim, slot)) || sim->failed || !mirror(sim, slot))
            return;
        if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_BEFORE_VOTE))
            return;
        enter_vote(sim, slot);
    }
    uint64_t command = 0;
    if (engine->phase == MU_SIM_VOTING && tally(sim, slot, &command))
        decided(sim, slot, command);
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
    mu_sim_engine_keep_share(sim, slot);
    engine->park_wanted = engine->final_sent = false;
    engine->gathered = true;
    engine->phase = MU_SIM_STALLED;
    if (!mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_RUN))
        start_step(sim, slot);
}

/* Of the whole model, where this rank knows it. */
static void hash_weights(struct mu_sim *sim, struct mu_sim_engine *engine, uint8_t out[32], bool *ret_unfinite)
{
    struct mu_sim_state all = {.has = {0, 0}};
    mu_sim_state_take(&all, &engine->state, (struct mu_sim_mask){engine->share.params, 0});
    for (uint32_t i = 0; i < engine->link_count; i++) {
        const struct mu_sim_frame *frame = at_hand(engine, &engine->links[i], MU_SIM_FRAME_FINAL);
        if (frame)
            mu_sim_state_take(&all, frame->state, frame->state->has);
    }
    *ret_unfinite = mu_sim_has_nan(&all.values, all.has);
    if (all.has.params == sim->all_chunks)
        mu_sim_hash_weights(all.values.params, out);
}

void mu_sim_engine_park(struct mu_sim *sim, uint32_t slot, enum mu_park_reason reason, uint32_t peer_rank,
                        enum mu_peer_failure failure, uint64_t bad_checkpoint, const char *text)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->epoch++;
    engine->phase = MU_SIM_PARKED;
    engine->progress++;
    mu_sim_feed_close(sim, slot, reason == MU_PARK_COMMAND);
    mu_sim_oracle_runs(sim, slot, false);
    mu_sim_oracle_holds(sim, slot);
    struct mu_parked *parked = &engine->parked;
    *parked = (struct mu_parked){.generation = engine->generation,
                                 .held = engine->held,
                                 .reason = reason,
                                 .peer_rank = peer_rank,
                                 .peer_failure = failure,
                                 .bad_checkpoint = bad_checkpoint};
    snprintf(parked->text, sizeof parked->text, "%s", text);
    if (reason == MU_PARK_FINISHED)
        hash_weights(sim, engine, parked->weights_sha256, &parked->weights_unfinite);
    mu_sim_trace(sim, "w%u   parks, reason %d, step %llu%s", slot, (int)reason, (unsigned long long)engine->held.step,
                 engine->held.has_gradient ? " with gradient" : "");
    mu_sim_worker_post(sim, slot, &(struct mu_worker_event){.kind = MU_WE_PARKED, .parked = *parked});
    mu_sim_feed_parked(sim, slot, reason == MU_PARK_COMMAND);
    (void)mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_PARKED);
}
