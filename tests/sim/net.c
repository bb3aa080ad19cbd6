/* Streams between workers and the coordinator (one FIFO each way, broken at any time, seen late or never), frames
 * between workers, and partitions (one way, until a known time). */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

#define KEEPALIVE_US    (5 * MU_SIM_S)  /* a stream that moves nothing for so long is given up */
#define USER_TIMEOUT_US (4 * MU_SIM_S)  /* the same for a data-plane connection */
#define BLIND_US        (40 * MU_SIM_S) /* a side that does not see the end of a stream learns it so much later */

static int32_t node_of(uint32_t slot)
{
    return MU_SIM_NODE_WORKER + (int32_t)slot;
}

struct mu_sim_session *mu_sim_session(struct mu_sim *sim, uint64_t number)
{
    return number >= 1 && number <= sim->session_count ? &sim->sessions[number - 1] : NULL;
}

/* ---- partitions ---- */

uint64_t mu_sim_net_open_at(const struct mu_sim *sim, int32_t from, int32_t to)
{
    uint64_t open_us = sim->now_us;
    for (uint32_t i = 0; i < sim->partition_count; i++) {
        const struct mu_sim_partition *p = &sim->partitions[i];
        if (p->from == from && p->to == to && p->until_us > open_us)
            open_us = p->until_us;
    }
    return open_us;
}

void mu_sim_net_heal(struct mu_sim *sim)
{
    sim->partition_count = 0;
}

/* ---- the ends of a session ---- */

static void coord_loses(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_session *session = mu_sim_session(sim, event->a);
    if (!session->coord_open)
        return;
    session->coord_open = false;
    session->cut = true;
    mu_sim_trace(sim, "net  s%llu lost for the coordinator", (unsigned long long)event->a);
    mu_sim_coord_event(
        sim, &(struct mu_coord_event){.kind = MU_CE_DISCONNECTED,
                                      .disconnected = {event->a, event->b ? "stream reset" : "closed by peer"}});
}

static void worker_loses(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_session *session = mu_sim_session(sim, event->a);
    struct mu_sim_worker *worker = &sim->workers[session->slot];
    bool current = session->worker_open && worker->session == event->a;
    session->worker_open = false; /* it may not have been told yet that it was open */
    if (!current)
        return;
    worker->session = 0;
    mu_sim_trace(sim, "net  s%llu lost for w%u", (unsigned long long)event->a, session->slot);
    mu_sim_worker_event(sim, session->slot,
                        &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "stream reset"});
}

static void tell_coord(struct mu_sim *sim, uint64_t number, uint64_t at_us, bool reset)
{
    struct mu_sim_session *session = mu_sim_session(sim, number);
    const struct mu_sim_node *node = &sim->nodes[MU_SIM_NODE_COORDINATOR];
    if (session->coord_open && node->alive && node->life == session->coord_life)
        mu_sim_at(sim, at_us, MU_SIM_NODE_COORDINATOR, coord_loses, NULL, number, reset);
}

static void tell_worker(struct mu_sim *sim, uint64_t number, uint64_t at_us)
{
    struct mu_sim_session *session = mu_sim_session(sim, number);
    const struct mu_sim_node *node = &sim->nodes[node_of(session->slot)];
    if (session->worker_open && node->alive && node->life == session->worker_life)
        mu_sim_at(sim, at_us, node_of(session->slot), worker_loses, NULL, number, 0);
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

void mu_sim_net_lose(struct mu_sim *sim, uint64_t number, enum mu_sim_loss loss)
{
    struct mu_sim_session *session = mu_sim_session(sim, number);
    if (!session || session->cut)
        return;
    mu_sim_trace(sim, "net  s%llu (w%u) breaks, kind %d", (unsigned long long)number, session->slot, (int)loss);
    session->cut = true;
    uint64_t soon_us = sim->now_us + mu_sim_delay(sim, sim->params.stream_us);
    uint64_t other_us = sim->now_us + mu_sim_delay(sim, sim->params.stream_us);
    if (loss == MU_SIM_LOSS_COORD_BLIND)
        other_us += BLIND_US;
    if (loss == MU_SIM_LOSS_WORKER_LATE)
        soon_us += mu_sim_between(sim, MU_SIM_S / 2, 5 * MU_SIM_S);
    tell_worker(sim, number, soon_us);
    tell_coord(sim, number, other_us, true);
}

static void keepalive(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_session *session = mu_sim_session(sim, event->a);
    if (!session->cut)
        mu_sim_net_lose(sim, event->a, mu_sim_below(sim, 2) ? MU_SIM_LOSS_PROMPT : MU_SIM_LOSS_COORD_BLIND);
}

void mu_sim_net_cut(struct mu_sim *sim, int32_t from, int32_t to, uint64_t duration_us)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < sim->partition_count; i++) {
        if (sim->partitions[i].until_us > sim->now_us)
            sim->partitions[kept++] = sim->partitions[i];
    }
    sim->partition_count = kept;
    sim->partitions = mu_sim_grow(sim->partitions, kept, &sim->partition_capacity, sizeof *sim->partitions);
    sim->partitions[sim->partition_count++] = (struct mu_sim_partition){sim->now_us + duration_us, from, to};
    int32_t worker = from == MU_SIM_NODE_COORDINATOR ? to : from;
    uint64_t session = sim->workers[worker - MU_SIM_NODE_WORKER].session;
    if ((from == MU_SIM_NODE_COORDINATOR || to == MU_SIM_NODE_COORDINATOR) && session && duration_us > KEEPALIVE_US)
        mu_sim_after(sim, mu_sim_delay(sim, KEEPALIVE_US), MU_SIM_NODE_NONE, keepalive, NULL, session, 0);
}

/* ---- connecting ---- */

static void refused(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    if (sim->workers[slot].connect_attempt == event->b)
        mu_sim_worker_event(sim, slot,
                            &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "connection refused"});
}

static void connected(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_session *session = mu_sim_session(sim, event->a);
    struct mu_sim_worker *worker = &sim->workers[session->slot];
    if (worker->connect_attempt != event->b)
        return;
    if (!session->worker_open) {
        mu_sim_worker_event(sim, session->slot,
                            &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "stream reset"});
        return;
    }
    worker->session = event->a;
    mu_sim_worker_event(sim, session->slot, &(struct mu_worker_event){.kind = MU_WE_CONNECTED});
}

static void arrives(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_node *coord = &sim->nodes[MU_SIM_NODE_COORDINATOR];
    if (sim->workers[slot].connect_attempt != event->b)
        return;
    uint64_t open_us = later(mu_sim_net_open_at(sim, node_of(slot), MU_SIM_NODE_COORDINATOR),
                             mu_sim_net_open_at(sim, MU_SIM_NODE_COORDINATOR, node_of(slot)));
    if (open_us > sim->now_us) {
        mu_sim_after(sim, mu_sim_delay(sim, MU_SIM_S), node_of(slot), refused, NULL, slot, event->b);
        return;
    }
    if (!coord->alive || mu_sim_chance(sim, sim->faults_over ? 0 : sim->params.connect_fail_ppm)) {
        mu_sim_after(sim, mu_sim_delay(sim, sim->params.stream_us), node_of(slot), refused, NULL, slot, event->b);
        return;
    }
    if (sim->session_count == sim->session_capacity) {
        sim->session_capacity = sim->session_capacity ? 2 * sim->session_capacity : 64;
        struct mu_sim_session *grown = mu_sim_alloc(sim->session_capacity * sizeof *grown);
        if (sim->session_count)
            memcpy(grown, sim->sessions, sim->session_count * sizeof *grown);
        free(sim->sessions);
        sim->sessions = grown;
    }
    sim->sessions[sim->session_count++] = (struct mu_sim_session){.slot = slot,
                                                                  .worker_life = sim->nodes[node_of(slot)].life,
                                                                  .coord_life = coord->life,
                                                                  .opened_us = sim->now_us,
                                                                  .coord_open = true,
                                                                  .worker_open = true};
    mu_sim_after(sim, mu_sim_delay(sim, sim->params.stream_us), node_of(slot), connected, NULL, sim->session_count,
                 event->b);
}

void mu_sim_net_connect(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_worker *worker = &sim->workers[slot];
    mu_sim_net_disconnect(sim, slot);
    worker->connect_attempt++;
    mu_sim_after(sim, mu_sim_delay(sim, sim->params.stream_us), node_of(slot), arrives, NULL, slot,
                 worker->connect_attempt);
}

void mu_sim_net_disconnect(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_worker *worker = &sim->workers[slot];
    uint64_t number = worker->session;
    worker->connect_attempt++;
    worker->session = 0;
    if (!number)
        return;
    struct mu_sim_session *session = mu_sim_session(sim, number);
    session->worker_open = false;
    if (!session->cut)
        tell_coord(sim, number, later(session->last_up_us + 1, sim->now_us + mu_sim_delay(sim, sim->params.stream_us)),
                   false);
}

/* ---- messages ---- */

static void up_arrives(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_session *session = mu_sim_session(sim, event->a);
    if (session->cut || !session->coord_open)
        return;
    mu_sim_coord_event(sim, &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {event->a, event->payload}});
}

void mu_sim_net_up(struct mu_sim *sim, uint32_t slot, const struct mu_worker_message *message)
{
    uint64_t number = sim->workers[slot].session;
    struct mu_sim_session *session = mu_sim_session(sim, number);
    const struct mu_sim_node *coord = &sim->nodes[MU_SIM_NODE_COORDINATOR];
    if (!session || session->cut || !coord->alive || coord->life != session->coord_life)
        return;
    uint64_t open_us = mu_sim_net_open_at(sim, node_of(slot), MU_SIM_NODE_COORDINATOR);
    session->last_up_us = later(session->last_up_us + 1, open_us + mu_sim_delay(sim, sim->params.stream_us));
    struct mu_worker_message *copy = mu_sim_copy_worker_message(message);
    if (message->kind == MU_WM_HELLO && message->hello.files_address[0])
        mu_sim_local_inventory(sim, sim->workers[slot].host, &copy->hello);
    mu_sim_at(sim, session->last_up_us, MU_SIM_NODE_COORDINATOR, up_arrives, copy, number, 0);
}

static void down_arrives(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_session *session = mu_sim_session(sim, event->a);
    if (session->cut || !session->worker_open || sim->workers[session->slot].session != event->a)
        return;
    mu_sim_worker_event(sim, session->slot,
                        &(struct mu_worker_event){.kind = MU_WE_MESSAGE, .message = event->payload});
}

void mu_sim_net_down(struct mu_sim *sim, uint64_t number, const struct mu_coord_message *message)
{
    struct mu_sim_session *session = mu_sim_session(sim, number);
    if (!session || session->cut || !session->coord_open || !session->worker_open)
        return;
    const struct mu_sim_node *node = &sim->nodes[node_of(session->slot)];
    if (!node->alive || node->life != session->worker_life)
        return;
    uint64_t open_us = mu_sim_net_open_at(sim, MU_SIM_NODE_COORDINATOR, node_of(session->slot));
    session->last_down_us = later(session->last_down_us + 1, open_us + mu_sim_delay(sim, sim->params.stream_us));
    mu_sim_at(sim, session->last_down_us, node_of(session->slot), down_arrives, mu_sim_copy_coord_message(message),
              number, 0);
}

void mu_sim_net_close(struct mu_sim *sim, uint64_t number)
{
    struct mu_sim_session *session = mu_sim_session(sim, number);
    if (!session || !session->coord_open)
        return;
    if (!session->cut)
        tell_worker(sim, number,
                    later(session->last_down_us + 1, sim->now_us + mu_sim_delay(sim, sim->params.stream_us)));
    /* Whether the server library reports the end of a stream that was ended here is not part of the contract: both
     * happen. */
    if (mu_sim_below(sim, 2))
        tell_coord(sim, number, sim->now_us + mu_sim_delay(sim, sim->params.stream_us), false);
    else
        session->coord_open = false;
}

/* ---- deaths ---- */

void mu_sim_net_worker_died(struct mu_sim *sim, uint32_t slot, bool vanished)
{
    uint64_t number = sim->workers[slot].session;
    sim->workers[slot].session = 0;
    struct mu_sim_session *session = mu_sim_session(sim, number);
    if (!session)
        return;
    session->worker_open = false;
    if (session->cut)
        return;
    uint64_t at_us = later(session->last_up_us + 1, sim->now_us + mu_sim_delay(sim, sim->params.stream_us));
    if (vanished || mu_sim_below(sim, 2))
        session->cut = true; /* a reset discards what has not been read */
    tell_coord(sim, number, vanished ? at_us + BLIND_US : at_us, true);
}

void mu_sim_net_coordinator_died(struct mu_sim *sim, bool vanished)
{
    for (uint64_t number = 1; number <= sim->session_count; number++) {
        struct mu_sim_session *session = mu_sim_session(sim, number);
        if (!session->coord_open)
            continue;
        session->coord_open = false;
        if (session->cut)
            continue;
        uint64_t at_us = later(session->last_down_us + 1, sim->now_us + mu_sim_delay(sim, sim->params.stream_us));
        if (vanished)
            at_us += mu_sim_between(sim, MU_SIM_S, 12 * MU_SIM_S);
        tell_worker(sim, number, at_us); /* after what was sent before: it may still arrive */
    }
}

/* ---- data plane ---- */

static void link_fails(struct mu_sim *sim, struct mu_sim_event *event)
{
    mu_sim_engine_link_failed(sim, (uint32_t)(event->node - MU_SIM_NODE_WORKER), event->a,
                              (enum mu_peer_failure)event->b);
}

static void frame_arrives(struct mu_sim *sim, struct mu_sim_event *event)
{
    mu_sim_engine_frame(sim, (uint32_t)(event->node - MU_SIM_NODE_WORKER), event);
}

void mu_sim_net_frame(struct mu_sim *sim, uint32_t from, uint32_t to, uint64_t to_life, struct mu_sim_link_end *end,
                      struct mu_sim_frame *frame)
{
    const struct mu_sim_node *node = to < sim->params.slots ? &sim->nodes[node_of(to)] : NULL;
    if (!node || !node->alive || node->life != to_life) {
        free(frame);
        return;
    }
    uint64_t open_us = mu_sim_net_open_at(sim, node_of(from), node_of(to));
    uint64_t acks_us = mu_sim_net_open_at(sim, node_of(to), node_of(from));
    if (!end && later(open_us, acks_us) > sim->now_us) { /* a connection cannot be made */
        free(frame);
        return;
    }
    if (end && later(open_us, acks_us) > sim->now_us + USER_TIMEOUT_US) {
        uint64_t at_us = sim->now_us + mu_sim_delay(sim, USER_TIMEOUT_US);
        mu_sim_at(sim, at_us, node_of(from), link_fails, NULL, frame->link, MU_PEER_FAILURE_TIMEOUT);
        mu_sim_at(sim, at_us + mu_sim_delay(sim, MU_SIM_S), node_of(to), link_fails, NULL, frame->link,
                  MU_PEER_FAILURE_RESET);
        if (open_us > sim->now_us) {
            free(frame);
            return;
        }
    }
    uint64_t at_us = open_us + mu_sim_delay(sim, sim->params.net_us);
    if (end)
        at_us = end->last_us = later(end->last_us + 1, at_us);
    mu_sim_at(sim, at_us, node_of(to), frame_arrives, frame, 0, 0);
}
