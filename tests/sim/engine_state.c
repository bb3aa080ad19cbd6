/* Hash engine: what it is made of: links and their frames, the job, snapshots, abort and forgetting. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "plan/amend.h"
#include "tests/sim/sim.h"

static struct mu_sim_engine *engine_of(struct mu_sim *sim, uint32_t slot)
{
    return &sim->workers[slot].engine;
}

static int32_t node_of(uint32_t slot)
{
    return MU_SIM_NODE_WORKER + (int32_t)slot;
}

/* ---- links ---- */

struct mu_sim_link_end *mu_sim_engine_link(struct mu_sim_engine *engine, uint32_t rank)
{
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (engine->links[i].rank == rank)
            return &engine->links[i];
    }
    return NULL;
}

static struct mu_sim_link_end *link_by_id(struct mu_sim_engine *engine, uint64_t id)
{
    for (uint32_t i = 0; id && i < engine->link_count; i++) {
        if (engine->links[i].id == id && engine->links[i].connected)
            return &engine->links[i];
    }
    return NULL;
}

void mu_sim_engine_free_links(struct mu_sim_link_end *links, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        for (int kind = 0; kind < MU_SIM_FRAME_KINDS; kind++) {
            free(links[i].kept[kind][0]);
            free(links[i].kept[kind][1]);
        }
    }
    free(links);
}

static void end_of_file(struct mu_sim *sim, struct mu_sim_event *event)
{
    mu_sim_engine_link_failed(sim, (uint32_t)(event->node - MU_SIM_NODE_WORKER), event->a,
                              (enum mu_peer_failure)event->b);
}

static void tell_peer(struct mu_sim *sim, const struct mu_sim_link_end *end, uint64_t at_us,
                      enum mu_peer_failure failure)
{
    const struct mu_sim_node *node = end->slot < sim->params.slots ? &sim->nodes[node_of(end->slot)] : NULL;
    if (node && node->alive && node->life == end->life)
        mu_sim_at(sim, at_us, node_of(end->slot), end_of_file, NULL, end->id, failure);
}

/* What was sent before arrives first. Not prompt: the host is gone, only a time-out tells. */
void mu_sim_engine_close_links(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *links, uint32_t count,
                               bool prompt)
{
    for (uint32_t i = 0; i < count; i++) {
        struct mu_sim_link_end *end = &links[i];
        if (!end->connected || end->dead)
            continue;
        uint64_t at_us = sim->now_us + mu_sim_delay(sim, prompt ? sim->params.net_us : 4 * MU_SIM_S);
        uint64_t open_us = mu_sim_net_open_at(sim, node_of(slot), node_of(end->slot));
        at_us = at_us > open_us ? at_us : open_us + 1;
        at_us = at_us > end->last_us ? at_us : end->last_us + 1;
        tell_peer(sim, end, at_us, prompt ? MU_PEER_FAILURE_EOF : MU_PEER_FAILURE_TIMEOUT);
    }
}

void mu_sim_engine_link_failed(struct mu_sim *sim, uint32_t slot, uint64_t link, enum mu_peer_failure failure)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *end = link_by_id(engine, link);
    if (mu_sim_feed_link_failed(sim, slot, link) || !end || end->dead)
        return;
    end->dead = true;
    end->failure = failure;
    /* A finished reduction needs no peer any more: the update is completed, the loss shows at the next step. */
    bool needs_peer =
        (engine->phase >= MU_SIM_PREPARING && engine->phase <= MU_SIM_VOTING) || engine->phase == MU_SIM_GATHERING;
    if (needs_peer && !engine->hung)
        mu_sim_engine_park(sim, slot, MU_PARK_PEER, end->rank, failure, 0, "connection lost");
}

bool mu_sim_engine_reset_link(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (!engine->link_count)
        return false;
    struct mu_sim_link_end *end = &engine->links[mu_sim_below(sim, engine->link_count)];
    if (!end->connected || end->dead)
        return false;
    mu_sim_trace(sim, "net  data connection w%u - w%u is reset", slot, end->slot);
    mu_sim_after(sim, mu_sim_delay(sim, sim->params.net_us), node_of(slot), end_of_file, NULL, end->id,
                 MU_PEER_FAILURE_RESET);
    tell_peer(sim, end, sim->now_us + mu_sim_delay(sim, sim->params.net_us), MU_PEER_FAILURE_RESET);
    return true;
}

/* ---- frames ---- */

struct mu_sim_frame *mu_sim_frame_new(const struct mu_sim *sim, uint32_t slot, enum mu_sim_frame_kind kind,
                                      uint32_t root_count, bool with_state)
{
    const struct mu_sim_engine *engine = &sim->workers[slot].engine;
    size_t head_bytes = sizeof(struct mu_sim_frame) + root_count * sizeof(struct mu_sim_root);
    struct mu_sim_frame *frame = mu_sim_alloc(head_bytes + (with_state ? sizeof *frame->state : 0));
    if (with_state)
        frame->state = (struct mu_sim_state *)((char *)frame + head_bytes);
    frame->kind = kind;
    frame->generation = engine->generation;
    frame->from_rank = engine->rank;
    frame->from_slot = slot;
    frame->step = engine->held.step;
    frame->root_count = root_count;
    return frame;
}

void mu_sim_engine_send(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end, struct mu_sim_frame *frame)
{
    frame->link = end->id;
    if (end->dead || !end->connected)
        free(frame);
    else
        mu_sim_net_frame(sim, slot, end->slot, end->life, end, frame);
}

static void keep(struct mu_sim_frame **place, struct mu_sim_event *event)
{
    free(*place);
    *place = event->payload;
    event->payload = NULL;
}

void mu_sim_engine_frame(struct mu_sim *sim, uint32_t slot, struct mu_sim_event *event)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    const struct mu_sim_frame *frame = event->payload;
    if (frame->kind == MU_SIM_FRAME_FEED) {
        mu_sim_feed_frame(sim, slot, frame);
        return;
    }
    bool shake = frame->kind == MU_SIM_FRAME_DIAL || frame->kind == MU_SIM_FRAME_ACCEPT;
    struct mu_sim_link_end *end = shake ? NULL : link_by_id(engine, frame->link);
    if (!shake && (!end || end->dead || frame->generation != engine->generation))
        return; /* of a connection that is no more */
    if (mu_sim_engine_prepare_frame(sim, slot, frame) || engine->phase == MU_SIM_PARKED)
        return;
    keep(&end->kept[frame->kind][frame->step & 1], event);
    engine->progress++;
    mu_sim_engine_pump(sim, slot);
}

/* ---- the job ---- */

static void job_loaded(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_worker_event out = {.kind = MU_WE_JOB_LOADED, .job_loaded = {.status = MU_OK, .text = ""}};
    out.job_loaded.numeric_identity = (struct mu_hash128){7, sim->workers[slot].stranger ? 1 : 0};
    out.job_loaded.data_hash = (struct mu_hash128){9, 0};
    static const uint8_t secret[32];
    out.job_loaded.files_secret = secret;
    if (sim->params.local) /* where its data plane listens, too: in this world an address is a process */
        out.job_loaded.files_address = mu_sim_worker_own_address(sim, slot);
    engine_of(sim, slot)->loaded = true;
    mu_sim_worker_post(sim, slot, &out);
}

void mu_sim_engine_amend(struct mu_sim *sim, uint32_t slot, const struct mu_amendments *amendments)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    uint32_t era = mu_amend_era(&engine->spec.amendments);
    engine->spec = sim->spec;
    if (amendments)
        engine->spec.amendments = *amendments;
    if (era == mu_amend_era(&engine->spec.amendments) || MU_MUTANT(MU_MUT_KEEP_VOID_STATE))
        return;
    engine->held = (struct mu_held){0}; /* the job was rolled back */
    engine->state.has = engine->arrived.has = (struct mu_sim_mask){0, 0};
}

void mu_sim_engine_load(struct mu_sim *sim, uint32_t slot, const struct mu_job_spec *spec)
{
    if (mu_job_spec_hash(spec) != mu_job_spec_hash(&sim->spec))
        mu_sim_violate(sim, "worker %u is given another job than was submitted", slot);
    mu_sim_after(sim, mu_sim_delay(sim, sim->params.load_us), node_of(slot), job_loaded, NULL, slot, 0);
}

/* ---- snapshots ---- */

static void post_piece(struct mu_sim *sim, uint32_t slot, const struct mu_sim_piece *piece, enum mu_status status,
                       const char *text)
{
    struct mu_worker_event out = {.kind = MU_WE_PIECE};
    uint64_t chunks = piece->state.has.params;
    out.piece.checkpoint = piece->checkpoint;
    out.piece.piece = piece->piece;
    out.piece.step = piece->step;
    out.piece.size_bytes = chunks ? 64 + 8u * (unsigned)__builtin_popcountll(chunks) : 0;
    if (chunks)
        out.piece.checksum = mu_sim_piece_checksum(piece);
    out.piece.write_us = sim->params.io_us;
    memcpy(out.piece.file, piece->file, sizeof out.piece.file);
    out.piece.status = status;
    if (status != MU_OK)
        snprintf(out.piece.text, sizeof out.piece.text, "%s: %s", piece->file, text);
    mu_sim_trace(sim, "w%u   piece %u/%u of checkpoint %" PRIu64 ", step %" PRIu64 ": %s %s", slot, piece->piece,
                 piece->piece_count, piece->checkpoint, piece->step, mu_status_name(status), text);
    mu_sim_worker_post(sim, slot, &out);
}

static void piece_written(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    const struct mu_sim_piece *piece = event->payload;
    enum mu_status status = mu_sim_files_write(sim, piece);
    if (!mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_PIECE))
        post_piece(sim, slot, piece, status, status == MU_OK ? "" : mu_status_name(status));
}

void mu_sim_engine_write_piece(struct mu_sim *sim, uint32_t slot, const struct mu_snapshot *snapshot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    uint64_t chunks = mu_sim_share_chunks(sim, &snapshot->layout, snapshot->piece, MU_SHARE_PRIMARY);
    struct mu_sim_mask primary = {chunks, chunks};
    struct mu_sim_piece *piece = mu_sim_alloc(sizeof *piece);
    mu_sim_local_path(snapshot->dir, sim->workers[slot].host, piece->dir);
    piece->checkpoint = snapshot->checkpoint;
    piece->piece = snapshot->piece;
    piece->piece_count = mu_layout_working(&snapshot->layout);
    piece->step = engine->held.step;
    piece->generation = engine->generation;
    int length = snprintf(piece->file, sizeof piece->file, "piece-%u-of-%u-step-%" PRIu64 "-%016" PRIx64, piece->piece,
                          piece->piece_count, piece->step, mu_worker_incarnation(sim->workers[slot].core).low);
    if (sim->params.local)
        snprintf(piece->file + length, sizeof piece->file - (size_t)length, "-h%u", sim->workers[slot].host);
    if (!mu_sim_mask_covers(mu_sim_held_mask(sim, &engine->held, piece->step), primary)) {
        mu_sim_violate(sim, "worker %u is told to write piece %u of checkpoint %" PRIu64 " and does not hold it", slot,
                       piece->piece, piece->checkpoint);
        post_piece(sim, slot, piece, MU_ERR_NOT_FOUND, "this worker does not hold all of the piece");
        free(piece);
        return;
    }
    if (chunks == 0) { /* more ranks than chunks: nothing to write */
        piece->file[0] = 0;
        post_piece(sim, slot, piece, MU_OK, "");
        free(piece);
        return;
    }
    mu_sim_state_take(&piece->state, &engine->state, primary);
    mu_sim_after(sim, mu_sim_delay(sim, sim->params.io_us), node_of(slot), piece_written, piece, slot, 0);
}

void mu_sim_engine_snapshot(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_snapshot *snapshot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->phase == MU_SIM_PARKED && engine->generation == generation)
        mu_sim_engine_write_piece(sim, slot, snapshot);
}

/* ---- the end: abort, forget ---- */

static void spoil_first_chunk(struct mu_sim_engine *engine)
{
    for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
        if (engine->updates.params >> c & 1) {
            engine->state.values.params[c]++;
            return;
        }
    }
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
            spoil_first_chunk(engine); /* its update has begun */
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

void mu_sim_engine_reset(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    mu_sim_engine_free_links(engine->links, engine->link_count);
    mu_sim_engine_free_links(engine->old_links, engine->old_link_count);
    free(engine->assign);
    free(engine->roots);
    memset(engine, 0, sizeof *engine);
}

void mu_sim_engine_forget(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_engine kept = *engine;
    mu_sim_oracle_runs(sim, slot, false);
    mu_sim_feed_close(sim, slot, false);
    mu_sim_engine_close_links(sim, slot, engine->links, engine->link_count, true);
    mu_sim_engine_close_links(sim, slot, engine->old_links, engine->old_link_count, true);
    mu_sim_engine_reset(sim, slot);
    engine->loaded = kept.loaded;
    engine->epoch = kept.epoch + 1;
    engine->progress = kept.progress + 1;
    engine->last_post_us = kept.last_post_us;
    engine->last_order_us = kept.last_order_us;
}
