/* Coordinator -> worker. */
#include "proto/wire_pb.h"

#include <string.h>

_Static_assert(MUSTER__V1__REJECT_REASON__REJECT_REASON_VERSION == (int)MU_REJECT_VERSION + 1, "reject reason");
_Static_assert(MUSTER__V1__REJECT_REASON__REJECT_REASON_INVALID == (int)MU_REJECT_INVALID + 1, "reject reason");
_Static_assert(MUSTER__V1__STATE_SOURCE__STATE_SOURCE_HELD == (int)MU_SOURCE_HELD + 1, "source");
_Static_assert(MUSTER__V1__STATE_SOURCE__STATE_SOURCE_INIT == (int)MU_SOURCE_INIT + 1, "source");
_Static_assert(MUSTER__V1__COMMAND_KIND__COMMAND_KIND_PARK == (int)MU_COMMAND_PARK, "command");

/* ---- encode ---- */

struct parts {
    Muster__V1__CoordinatorMessage message;
    union {
        Muster__V1__Welcome welcome;
        Muster__V1__Reject reject;
        Muster__V1__Assign assign;
        Muster__V1__Go go;
        Muster__V1__Revoke revoke;
        Muster__V1__Command command;
        Muster__V1__PieceAck piece_ack;
        Muster__V1__Release release;
        Muster__V1__Feed feed;
        Muster__V1__Recall recall;
    };
    Muster__V1__Snapshot snapshot;
    Muster__V1__StepResult result;
    Muster__V1__Peer peers[MU_PEERS_MAX];
    Muster__V1__Peer *peer_pointers[MU_PEERS_MAX];
};

static enum mu_status no_memory(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "CoordinatorMessage: no memory");
}

static enum mu_status put_welcome(struct mu_wire_arena *arena, const struct mu_coord_message *message,
                                  struct parts *parts, struct mu_error *err)
{
    Muster__V1__Welcome *pb = &parts->welcome;
    muster__v1__welcome__init(pb);
    pb->job_uid = mu_wire_put_id(arena, message->welcome.job_uid);
    pb->heartbeat_ms = message->welcome.heartbeat_ms;
    pb->lost_ms = message->welcome.lost_ms;
    enum mu_status status = mu_wire_put_string(message->welcome.name, MU_WIRE_NAME, "Welcome.name",
                                               sizeof message->welcome.name, &pb->name, err);
    if (status == MU_OK && message->welcome.spec)
        status = mu_wire_spec_to_pb(arena, message->welcome.spec, &pb->spec, err);
    return status;
}

static enum mu_status put_peers(struct mu_wire_arena *arena, const struct mu_assign *assign, struct parts *parts,
                                struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < assign->peer_count && status == MU_OK; i++) {
        const struct mu_peer *peer = &assign->peers[i];
        Muster__V1__Peer *pb = &parts->peers[i];
        muster__v1__peer__init(pb);
        parts->peer_pointers[i] = pb;
        pb->rank = peer->rank;
        pb->incarnation = mu_wire_put_id(arena, peer->incarnation);
        status = mu_wire_put_string(peer->name, MU_WIRE_NAME, "Peer.name", MU_WORKER_NAME_SIZE, &pb->name, err);
        if (status == MU_OK)
            status =
                mu_wire_put_string(peer->address, MU_WIRE_TEXT, "Peer.address", MU_ADDRESS_SIZE, &pb->address, err);
    }
    return status;
}

static enum mu_status put_moves(struct mu_wire_arena *arena, const struct mu_assign *assign, Muster__V1__Assign *pb,
                                struct mu_error *err)
{
    if (assign->move_count == 0)
        return MU_OK;
    Muster__V1__Move *moves = mu_wire_arena_alloc(arena, sizeof *moves * assign->move_count);
    Muster__V1__Move **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * assign->move_count);
    if (!moves || !pointers)
        return no_memory(err);
    for (uint32_t i = 0; i < assign->move_count; i++) {
        const struct mu_move *move = &assign->moves[i];
        muster__v1__move__init(&moves[i]);
        moves[i].from = move->from;
        moves[i].to = move->to;
        moves[i].kinds = move->kinds;
        moves[i].first = move->run.first;
        moves[i].count = move->run.count;
        pointers[i] = &moves[i];
    }
    pb->n_moves = assign->move_count;
    pb->moves = pointers;
    return MU_OK;
}

static enum mu_status put_leaf_counts(struct mu_wire_arena *arena, const struct mu_assign *assign,
                                      Muster__V1__Assign *pb, struct mu_error *err)
{
    uint32_t *runs = mu_wire_arena_alloc(arena, 2 * MU_LEAF_RUNS_MAX * sizeof *runs), count = 0;
    if (!runs)
        return no_memory(err);
    for (uint32_t d = 0; d < assign->layout.dp; d++) {
        bool same = count > 0 && runs[2 * count - 1] == assign->leaf_counts[d];
        if (!same && count == MU_LEAF_RUNS_MAX)
            return mu_fail(err, MU_ERR_LIMIT, "Assign.leaf_runs: more than %d runs of equal leaf counts",
                           MU_LEAF_RUNS_MAX);
        if (!same) {
            runs[2 * count] = 0;
            runs[2 * count++ + 1] = assign->leaf_counts[d];
        }
        runs[2 * count - 2]++;
    }
    pb->n_leaf_runs = 2 * count;
    pb->leaf_runs = runs;
    return MU_OK;
}

static enum mu_status put_assign(struct mu_wire_arena *arena, const struct mu_assign *assign, struct parts *parts,
                                 struct mu_error *err)
{
    if (assign->peer_count > MU_PEERS_MAX || assign->move_count > MU_MOVES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "Assign: %u peers, %u moves: at most %d and %d", assign->peer_count,
                       assign->move_count, MU_PEERS_MAX, MU_MOVES_MAX);
    Muster__V1__Assign *pb = &parts->assign;
    muster__v1__assign__init(pb);
    pb->rank = assign->rank;
    pb->start_step = assign->start_step;
    pb->secret = (ProtobufCBinaryData){.len = sizeof assign->secret, .data = (uint8_t *)assign->secret};
    pb->n_peers = assign->peer_count;
    pb->peers = parts->peer_pointers;
    pb->source = (Muster__V1__StateSource)((int)assign->source + 1);
    if (assign->source == MU_SOURCE_ROLL_FORWARD) {
        mu_wire_result_to_pb(&assign->roll_forward, &parts->result);
        pb->roll_forward = &parts->result;
    }
    pb->checkpoint = assign->checkpoint;
    pb->command_base = assign->command_base;
    pb->nccl = assign->nccl;
    pb->newest_amendment = assign->amendments ? assign->amendments->newest : 0;
    enum mu_status status = MU_OK;
    if ((assign->leaf_counts && (status = put_leaf_counts(arena, assign, pb, err))) ||
        (status = mu_wire_layout_to_pb(arena, &assign->layout, "Assign.layout", &pb->layout, err)) ||
        (status = mu_wire_put_string(assign->checkpoint_dir, MU_WIRE_TEXT, "Assign.checkpoint_dir",
                                     sizeof assign->checkpoint_dir, &pb->checkpoint_dir, err)) ||
        (status = mu_wire_put_string(assign->checkpoint_job, MU_WIRE_NAME_EMPTY, "Assign.checkpoint_job",
                                     sizeof assign->checkpoint_job, &pb->checkpoint_job, err)) ||
        (status = put_moves(arena, assign, pb, err)) ||
        (status = mu_wire_amendments_to_pb(arena, assign->amendments, &pb->n_amendments, &pb->amendments, err)) ||
        (status =
             mu_wire_holders_to_pb(arena, assign->holders, assign->holder_count, &pb->n_holders, &pb->holders, err)))
        return status;
    return put_peers(arena, assign, parts, err);
}

static enum mu_status put_snapshot(struct mu_wire_arena *arena, const struct mu_snapshot *snapshot, struct parts *parts,
                                   struct mu_error *err)
{
    Muster__V1__Snapshot *pb = &parts->snapshot;
    muster__v1__snapshot__init(pb);
    pb->checkpoint = snapshot->checkpoint;
    pb->piece = snapshot->piece;
    enum mu_status status = mu_wire_layout_to_pb(arena, &snapshot->layout, "Snapshot.layout", &pb->layout, err);
    if (status)
        return status;
    return mu_wire_put_string(snapshot->dir, MU_WIRE_TEXT, "Snapshot.dir", sizeof snapshot->dir, &pb->dir, err);
}

static enum mu_status put_command(struct mu_wire_arena *arena, const struct mu_coord_message *message,
                                  struct parts *parts, struct mu_error *err)
{
    Muster__V1__Command *pb = &parts->command;
    muster__v1__command__init(pb);
    pb->number = message->command.number;
    pb->kind = (Muster__V1__CommandKind)message->command.kind;
    pb->not_before_step = message->command.not_before_step;
    pb->first_open = message->command.first_open;
    if (message->command.kind != MU_COMMAND_CHECKPOINT)
        return MU_OK;
    pb->snapshot = &parts->snapshot;
    return put_snapshot(arena, &message->command.snapshot, parts, err);
}

static enum mu_status put_feed(struct mu_wire_arena *arena, const struct mu_feed_order *feed, struct parts *parts,
                               struct mu_error *err)
{
    Muster__V1__Feed *pb = &parts->feed;
    muster__v1__feed__init(pb);
    pb->number = feed->number;
    pb->role = (Muster__V1__FeedRole)feed->role;
    pb->rank = feed->rank;
    pb->other = mu_wire_put_id(arena, feed->other);
    pb->secret = (ProtobufCBinaryData){.len = sizeof feed->secret, .data = (uint8_t *)feed->secret};
    pb->part = feed->part;
    pb->parts = feed->parts;
    pb->taker = feed->taker;
    pb->next_rank = feed->next_rank;
    pb->newest_amendment = feed->amendments ? feed->amendments->newest : 0;
    enum mu_status status = mu_wire_amendments_to_pb(arena, feed->amendments, &pb->n_amendments, &pb->amendments, err);
    if (status == MU_OK)
        status = mu_wire_layout_to_pb(arena, &feed->layout, "Feed.layout", &pb->layout, err);
    if (status == MU_OK)
        status = mu_wire_layout_to_pb(arena, &feed->next, "Feed.next", &pb->next, err);
    if (status)
        return status;
    return mu_wire_put_string(feed->address, MU_WIRE_TEXT, "Feed.address", sizeof feed->address, &pb->address, err);
}

static void put_recall(const struct mu_recall *recall, Muster__V1__Recall *pb)
{
    muster__v1__recall__init(pb);
    pb->number = recall->number;
    pb->flight_records = recall->flight_records;
    pb->threads = recall->threads;
    pb->log_lines = recall->log_lines;
    pb->log_after = recall->log_after;
}

static enum mu_status put_message(struct mu_wire_arena *arena, const struct mu_coord_message *message,
                                  struct parts *parts, struct mu_error *err)
{
    Muster__V1__CoordinatorMessage *pb = &parts->message;
    muster__v1__coordinator_message__init(pb);
    pb->generation = message->generation;
    switch (message->kind) {
    case MU_CM_WELCOME:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_WELCOME;
        pb->welcome = &parts->welcome;
        return put_welcome(arena, message, parts, err);
    case MU_CM_REJECT:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_REJECT;
        pb->reject = &parts->reject;
        muster__v1__reject__init(&parts->reject);
        parts->reject.reason = (Muster__V1__RejectReason)((int)message->reject.reason + 1);
        parts->reject.text = mu_wire_put_text(arena, message->reject.text, sizeof message->reject.text);
        return parts->reject.text ? MU_OK : no_memory(err);
    case MU_CM_ASSIGN:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_ASSIGN;
        pb->assign = &parts->assign;
        return put_assign(arena, &message->assign, parts, err);
    case MU_CM_GO:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_GO;
        pb->go = &parts->go;
        muster__v1__go__init(&parts->go);
        return MU_OK;
    case MU_CM_REVOKE:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_REVOKE;
        pb->revoke = &parts->revoke;
        muster__v1__revoke__init(&parts->revoke);
        return MU_OK;
    case MU_CM_COMMAND:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_COMMAND;
        pb->command = &parts->command;
        return put_command(arena, message, parts, err);
    case MU_CM_SNAPSHOT:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_SNAPSHOT;
        pb->snapshot = &parts->snapshot;
        return put_snapshot(arena, &message->snapshot, parts, err);
    case MU_CM_PIECE_ACK:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_PIECE_ACK;
        pb->piece_ack = &parts->piece_ack;
        muster__v1__piece_ack__init(&parts->piece_ack);
        parts->piece_ack.checkpoint = message->piece_ack.checkpoint;
        parts->piece_ack.piece = message->piece_ack.piece;
        return MU_OK;
    case MU_CM_RELEASE:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_RELEASE;
        pb->release = &parts->release;
        muster__v1__release__init(&parts->release);
        parts->release.exit_code = message->release.exit_code;
        parts->release.text = mu_wire_put_text(arena, message->release.text, sizeof message->release.text);
        return parts->release.text ? MU_OK : no_memory(err);
    case MU_CM_FEED:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_FEED;
        pb->feed = &parts->feed;
        return put_feed(arena, &message->feed, parts, err);
    case MU_CM_KEEP:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_KEEP;
        return mu_wire_keep_to_pb(arena, &message->keep, &pb->keep, err);
    case MU_CM_RECALL:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_RECALL;
        pb->recall = &parts->recall;
        put_recall(&message->recall, &parts->recall);
        return MU_OK;
    case MU_CM_PROBE:
        pb->kind_case = MUSTER__V1__COORDINATOR_MESSAGE__KIND_PROBE;
        return mu_wire_probe_to_pb(arena, &message->probe, &pb->probe, err);
    case MU_CM_COUNT:
        break;
    }
    return mu_fail(err, MU_ERR_INVALID, "CoordinatorMessage.kind: value %d is not allowed", (int)message->kind);
}

enum mu_status mu_wire_encode_coord(struct mu_wire_arena *arena, const struct mu_coord_message *message,
                                    const void **ret_data, size_t *ret_size_bytes, struct mu_error *err)
{
    struct parts parts;
    enum mu_status status = put_message(arena, message, &parts, err);
    if (status)
        return status;
    return mu_wire_pack(arena, &parts.message.base, MU_WIRE_COORD_BYTES_MAX, ret_data, ret_size_bytes, err);
}

/* ---- decode ---- */

static enum mu_status get_welcome(struct mu_wire_arena *arena, const Muster__V1__Welcome *pb,
                                  struct mu_coord_message *out, struct mu_error *err)
{
    enum mu_status status =
        mu_wire_get_string(pb->name, MU_WIRE_NAME, "Welcome.name", out->welcome.name, sizeof out->welcome.name, err);
    if (status == MU_OK)
        status = mu_wire_get_id(pb->job_uid, "Welcome.job_uid", &out->welcome.job_uid, err);
    if (status)
        return status;
    if (pb->heartbeat_ms == 0 || pb->lost_ms <= pb->heartbeat_ms)
        return mu_fail(err, MU_ERR_INVALID,
                       "Welcome.heartbeat_ms: value %u is not allowed: 1 to less than lost_ms (%u)", pb->heartbeat_ms,
                       pb->lost_ms);
    out->welcome.heartbeat_ms = pb->heartbeat_ms;
    out->welcome.lost_ms = pb->lost_ms;
    if (!pb->spec)
        return MU_OK;
    struct mu_job_spec *spec = mu_wire_arena_alloc(arena, sizeof *spec);
    if (!spec)
        return no_memory(err);
    out->welcome.spec = spec;
    return mu_wire_spec_from_pb(pb->spec, spec, err);
}

/* The counts lie in the arena, like all that was unpacked. */
static enum mu_status get_leaf_counts(struct mu_wire_arena *arena, const Muster__V1__Assign *pb, struct mu_assign *out,
                                      struct mu_error *err)
{
    uint64_t leaves = 0, replicas = 0;
    if (pb->n_leaf_runs == 0)
        return MU_OK;
    if (pb->n_leaf_runs % 2 != 0 || pb->n_leaf_runs > 2 * MU_LEAF_RUNS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "Assign.leaf_runs: %zu numbers are not allowed: pairs, at most %d",
                       pb->n_leaf_runs, MU_LEAF_RUNS_MAX);
    for (size_t i = 0; i < pb->n_leaf_runs; i += 2) {
        replicas += pb->leaf_runs[i];
        leaves += (uint64_t)pb->leaf_runs[i] * pb->leaf_runs[i + 1];
        if (pb->leaf_runs[i] == 0 || replicas > out->layout.dp || leaves > MU_LEAVES_MAX)
            return mu_fail(err, MU_ERR_INVALID,
                           "Assign.leaf_runs: run %zu of %u replicas with %u leaves is not allowed: %u replicas, "
                           "%d leaves at most",
                           i / 2, pb->leaf_runs[i], pb->leaf_runs[i + 1], out->layout.dp, MU_LEAVES_MAX);
    }
    if (replicas != out->layout.dp || leaves == 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "Assign.leaf_runs: %llu replicas with %llu leaves are not allowed: %u replicas, at least 1 leaf",
                       (unsigned long long)replicas, (unsigned long long)leaves, out->layout.dp);
    uint32_t *counts = mu_wire_arena_alloc(arena, replicas * sizeof *counts);
    if (!counts)
        return no_memory(err);
    out->leaf_counts = counts;
    for (size_t i = 0; i < pb->n_leaf_runs; i += 2) {
        for (uint32_t left = pb->leaf_runs[i]; left > 0; left--)
            *counts++ = pb->leaf_runs[i + 1];
    }
    return MU_OK;
}

static uint32_t world_of(const struct mu_layout *layout)
{
    return layout->tp * layout->pp * layout->dp + layout->idle;
}

/* Ascending ranks of the generation, without the own one. */
static enum mu_status get_peers(struct mu_wire_arena *arena, const Muster__V1__Assign *pb, struct mu_assign *out,
                                struct mu_error *err)
{
    if (pb->n_peers > MU_PEERS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "Assign.peers: %zu of them are not allowed: at most %d", pb->n_peers,
                       MU_PEERS_MAX);
    struct mu_peer *peers = mu_wire_arena_alloc(arena, sizeof *peers * pb->n_peers);
    if (!peers)
        return no_memory(err);
    for (uint32_t i = 0; i < pb->n_peers; i++) {
        const Muster__V1__Peer *peer = pb->peers[i];
        peers[i].rank = peer->rank;
        peers[i].name = peer->name;
        peers[i].address = peer->address;
        if (peer->rank >= world_of(&out->layout) || peer->rank == out->rank ||
            (i > 0 && peer->rank <= peers[i - 1].rank))
            return mu_fail(err, MU_ERR_INVALID,
                           "Peer.rank: rank %u is not allowed: ascending ranks below %u, not the own (%u)", peer->rank,
                           world_of(&out->layout), out->rank);
        enum mu_status status = mu_wire_get_id(peer->incarnation, "Peer.incarnation", &peers[i].incarnation, err);
        if (status)
            return status;
        if (!mu_wire_name_ok(peer->name, MU_WORKER_NAME_SIZE) || !mu_wire_text_ok(peer->address, MU_ADDRESS_SIZE))
            return mu_fail(err, MU_ERR_INVALID, "Peer: name or address of rank %u is not allowed", peer->rank);
    }
    out->peers = peers;
    out->peer_count = (uint32_t)pb->n_peers;
    return MU_OK;
}

static bool is_peer(const struct mu_assign *assign, uint32_t rank)
{
    uint32_t low = 0, high = assign->peer_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (assign->peers[middle].rank < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low < assign->peer_count && assign->peers[low].rank == rank;
}

/* After the peers: a move's other end must be one of them. */
static enum mu_status get_moves(struct mu_wire_arena *arena, const Muster__V1__Assign *pb, struct mu_assign *out,
                                struct mu_error *err)
{
    if (pb->n_moves > MU_MOVES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "Assign.moves: %zu of them are not allowed: at most %d", pb->n_moves,
                       MU_MOVES_MAX);
    if (pb->n_moves == 0)
        return MU_OK;
    struct mu_move *moves = mu_wire_arena_alloc(arena, sizeof *moves * pb->n_moves);
    if (!moves)
        return no_memory(err);
    for (uint32_t i = 0; i < pb->n_moves; i++) {
        const Muster__V1__Move *move = pb->moves[i];
        bool own = (move->from == out->rank) != (move->to == out->rank);
        if (!own || !is_peer(out, move->from == out->rank ? move->to : move->from))
            return mu_fail(err, MU_ERR_INVALID,
                           "Move: from rank %u to rank %u is not allowed: between the own rank (%u) and one of `peers`",
                           move->from, move->to, out->rank);
        if (move->kinds == 0 || move->kinds > (MU_MOVE_PARAMS | MU_MOVE_MOMENTS) || move->count == 0 ||
            move->first > UINT32_MAX - move->count)
            return mu_fail(err, MU_ERR_INVALID,
                           "Move: kinds %u of %u chunks from %u on is not allowed: kinds 1 to 3, at least one chunk",
                           move->kinds, move->count, move->first);
        moves[i] = (struct mu_move){.from = move->from,
                                    .to = move->to,
                                    .kinds = move->kinds,
                                    .run = {.first = move->first, .count = move->count}};
    }
    out->moves = moves;
    out->move_count = (uint32_t)pb->n_moves;
    return MU_OK;
}

static enum mu_status get_rank_and_layout(const Muster__V1__Assign *pb, struct mu_assign *out, struct mu_error *err)
{
    enum mu_status status = mu_wire_layout_from_pb(pb->layout, "Assign.layout", &out->layout, err);
    if (status)
        return status;
    if (pb->rank >= world_of(&out->layout))
        return mu_fail(err, MU_ERR_INVALID, "Assign.rank: value %u is not allowed: less than %u", pb->rank,
                       world_of(&out->layout));
    if (pb->secret.len != sizeof out->secret)
        return mu_fail(err, MU_ERR_INVALID, "Assign.secret: %zu bytes are not allowed: %zu", pb->secret.len,
                       sizeof out->secret);
    if (pb->start_step > MU_STEPS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "Assign.start_step: value %llu is not allowed: at most %llu",
                       (unsigned long long)pb->start_step, (unsigned long long)MU_STEPS_MAX);
    memcpy(out->secret, pb->secret.data, sizeof out->secret);
    out->rank = pb->rank;
    out->start_step = pb->start_step;
    return MU_OK;
}

static enum mu_status get_amendments(struct mu_wire_arena *arena, size_t count, Muster__V1__Amendment *const *pb,
                                     uint32_t newest, const struct mu_amendments **ret, struct mu_error *err)
{
    struct mu_amendments *amendments = mu_wire_arena_alloc(arena, sizeof *amendments);
    if (!amendments)
        return mu_fail(err, MU_ERR_NO_MEMORY, "amendments: no memory");
    *ret = amendments;
    return mu_wire_amendments_from_pb(count, pb, newest, amendments, err);
}

static enum mu_status get_assign(struct mu_wire_arena *arena, const Muster__V1__Assign *pb, struct mu_assign *out,
                                 struct mu_error *err)
{
    int source = 0;
    enum mu_status status = MU_OK;
    if ((status = get_rank_and_layout(pb, out, err)) ||
        (status = mu_wire_get_enum((int)pb->source, 1, MU_SOURCE_INIT + 1, "Assign.source", &source, err)) ||
        (status = get_leaf_counts(arena, pb, out, err)) || (status = get_peers(arena, pb, out, err)) ||
        (status = get_moves(arena, pb, out, err)) ||
        (status =
             get_amendments(arena, pb->n_amendments, pb->amendments, pb->newest_amendment, &out->amendments, err)) ||
        (status = mu_wire_holders_from_pb(arena, pb->n_holders, pb->holders, &out->holders, &out->holder_count, err)) ||
        (status = mu_wire_get_string(pb->checkpoint_dir, MU_WIRE_TEXT, "Assign.checkpoint_dir", out->checkpoint_dir,
                                     sizeof out->checkpoint_dir, err)) ||
        (status = mu_wire_get_string(pb->checkpoint_job, MU_WIRE_NAME_EMPTY, "Assign.checkpoint_job",
                                     out->checkpoint_job, sizeof out->checkpoint_job, err)))
        return status;
    out->source = (enum mu_state_source)(source - 1);
    if (out->source == MU_SOURCE_ROLL_FORWARD && !pb->roll_forward)
        return mu_fail(err, MU_ERR_INVALID, "Assign.roll_forward: is missing");
    if (out->source == MU_SOURCE_CHECKPOINT && out->checkpoint_dir[0] != '/')
        return mu_fail(err, MU_ERR_INVALID, "Assign.checkpoint_dir: '%s' is not allowed: an absolute path",
                       out->checkpoint_dir);
    bool alone = out->source == MU_SOURCE_CHECKPOINT || out->source == MU_SOURCE_INIT;
    if (alone && out->move_count > 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "Assign.moves: %u of them are not allowed: none where all start from a checkpoint or the seed",
                       out->move_count);
    mu_wire_result_from_pb(pb->roll_forward, &out->roll_forward);
    out->checkpoint = pb->checkpoint;
    out->command_base = pb->command_base;
    out->nccl = pb->nccl;
    return MU_OK;
}

static enum mu_status get_snapshot(const Muster__V1__Snapshot *pb, struct mu_snapshot *out, struct mu_error *err)
{
    if (!pb)
        return mu_fail(err, MU_ERR_INVALID, "Command.snapshot: is missing");
    enum mu_status status = MU_OK;
    if ((status = mu_wire_layout_from_pb(pb->layout, "Snapshot.layout", &out->layout, err)) ||
        (status = mu_wire_get_string(pb->dir, MU_WIRE_TEXT, "Snapshot.dir", out->dir, sizeof out->dir, err)))
        return status;
    uint32_t pieces = world_of(&out->layout) - out->layout.idle;
    if (pb->piece > pieces)
        return mu_fail(err, MU_ERR_INVALID, "Snapshot.piece: value %u is not allowed: at most %u", pb->piece, pieces);
    if (out->dir[0] != '/')
        return mu_fail(err, MU_ERR_INVALID, "Snapshot.dir: '%s' is not allowed: an absolute path", out->dir);
    out->checkpoint = pb->checkpoint;
    out->piece = pb->piece;
    return MU_OK;
}

static enum mu_status get_command(const Muster__V1__Command *pb, struct mu_coord_message *out, struct mu_error *err)
{
    int kind = 0;
    enum mu_status status =
        mu_wire_get_enum((int)pb->kind, MU_COMMAND_CHECKPOINT, MU_COMMAND_PARK, "Command.kind", &kind, err);
    if (status)
        return status;
    out->command.number = pb->number;
    out->command.kind = (enum mu_command_kind)kind;
    out->command.not_before_step = pb->not_before_step;
    out->command.first_open = pb->first_open;
    return kind == MU_COMMAND_CHECKPOINT ? get_snapshot(pb->snapshot, &out->command.snapshot, err) : MU_OK;
}

static enum mu_status get_feed_rank(uint32_t rank, const struct mu_layout *layout, const char *name,
                                    struct mu_error *err)
{
    uint32_t working = world_of(layout) - layout->idle;
    if (rank < working)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "%s: value %u is not allowed: the layout has %u working ranks", name, rank,
                   working);
}

static enum mu_status get_feed(struct mu_wire_arena *arena, const Muster__V1__Feed *pb, struct mu_feed_order *out,
                               struct mu_error *err)
{
    int role = 0;
    enum mu_status status = mu_wire_get_enum((int)pb->role, MU_FEED_GIVE, MU_FEED_TAKE, "Feed.role", &role, err);
    if (status)
        return status;
    if (!(pb->number & MU_FEED_BIT) || pb->number % MU_FEED_PARTS_MAX != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "Feed.number: value %llu is not allowed: the highest bit must be set, and it must be a multiple "
                       "of %d",
                       (unsigned long long)pb->number, (int)MU_FEED_PARTS_MAX);
    if (pb->part >= pb->parts || pb->parts > MU_FEED_PARTS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "Feed.part: value %u of %u is not allowed: there are 1 to %d", pb->part,
                       pb->parts, (int)MU_FEED_PARTS_MAX);
    *out = (struct mu_feed_order){.number = pb->number,
                                  .role = (enum mu_feed_role)role,
                                  .part = pb->part,
                                  .parts = pb->parts,
                                  .rank = pb->rank,
                                  .taker = pb->taker,
                                  .next_rank = pb->next_rank};
    if ((status =
             get_amendments(arena, pb->n_amendments, pb->amendments, pb->newest_amendment, &out->amendments, err)) ||
        (status = mu_wire_layout_from_pb(pb->layout, "Feed.layout", &out->layout, err)) ||
        (status = mu_wire_layout_from_pb(pb->next, "Feed.next", &out->next, err)) ||
        (status = mu_wire_get_id(pb->other, "Feed.other", &out->other, err)) ||
        (status =
             mu_wire_get_string(pb->address, MU_WIRE_TEXT, "Feed.address", out->address, sizeof out->address, err)) ||
        (status = get_feed_rank(pb->rank, &out->layout, "Feed.rank", err)) ||
        (status = get_feed_rank(pb->next_rank, &out->next, "Feed.next_rank", err)) ||
        (pb->taker != MU_LAYOUT_NOBODY && (status = get_feed_rank(pb->taker, &out->layout, "Feed.taker", err))))
        return status;
    if (pb->secret.len != sizeof out->secret)
        return mu_fail(err, MU_ERR_INVALID, "Feed.secret: %zu bytes are not allowed: 32", pb->secret.len);
    memcpy(out->secret, pb->secret.data, sizeof out->secret);
    return MU_OK;
}

static enum mu_status get_reject(const Muster__V1__Reject *pb, struct mu_coord_message *out, struct mu_error *err)
{
    int reason = 0;
    enum mu_status status = mu_wire_get_enum((int)pb->reason, 1, MU_REJECT_INVALID + 1, "Reject.reason", &reason, err);
    if (status)
        return status;
    out->reject.reason = (enum mu_reject_reason)(reason - 1);
    return mu_wire_get_string(pb->text, MU_WIRE_TEXT, "Reject.text", out->reject.text, sizeof out->reject.text, err);
}

static enum mu_status get_recall(const Muster__V1__Recall *pb, struct mu_recall *out, struct mu_error *err)
{
    if (pb->flight_records > MU_RECALL_RECORDS_MAX || pb->log_lines > MU_RECALL_LINES_MAX)
        return mu_fail(err, MU_ERR_LIMIT,
                       "Recall: %u flight records and %u log lines are not allowed: at most %d and %d",
                       pb->flight_records, pb->log_lines, MU_RECALL_RECORDS_MAX, MU_RECALL_LINES_MAX);
    *out = (struct mu_recall){.number = pb->number,
                              .flight_records = pb->flight_records,
                              .threads = pb->threads,
                              .log_lines = pb->log_lines,
                              .log_after = pb->log_after};
    return MU_OK;
}

static enum mu_status get_message(struct mu_wire_arena *arena, const Muster__V1__CoordinatorMessage *pb,
                                  struct mu_coord_message *out, struct mu_error *err)
{
    out->generation = pb->generation;
    switch (pb->kind_case) {
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_WELCOME:
        out->kind = MU_CM_WELCOME;
        return get_welcome(arena, pb->welcome, out, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_REJECT:
        out->kind = MU_CM_REJECT;
        return get_reject(pb->reject, out, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_ASSIGN:
        out->kind = MU_CM_ASSIGN;
        return get_assign(arena, pb->assign, &out->assign, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_GO:
        out->kind = MU_CM_GO;
        return MU_OK;
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_REVOKE:
        out->kind = MU_CM_REVOKE;
        return MU_OK;
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_COMMAND:
        out->kind = MU_CM_COMMAND;
        return get_command(pb->command, out, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_SNAPSHOT:
        out->kind = MU_CM_SNAPSHOT;
        return get_snapshot(pb->snapshot, &out->snapshot, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_PIECE_ACK:
        out->kind = MU_CM_PIECE_ACK;
        out->piece_ack.checkpoint = pb->piece_ack->checkpoint;
        out->piece_ack.piece = pb->piece_ack->piece;
        return MU_OK;
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_RELEASE:
        out->kind = MU_CM_RELEASE;
        out->release.exit_code = pb->release->exit_code;
        return mu_wire_get_string(pb->release->text, MU_WIRE_TEXT, "Release.text", out->release.text,
                                  sizeof out->release.text, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_FEED:
        out->kind = MU_CM_FEED;
        return get_feed(arena, pb->feed, &out->feed, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_KEEP:
        out->kind = MU_CM_KEEP;
        return mu_wire_keep_from_pb(arena, pb->keep, &out->keep, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_RECALL:
        out->kind = MU_CM_RECALL;
        return get_recall(pb->recall, &out->recall, err);
    case MUSTER__V1__COORDINATOR_MESSAGE__KIND_PROBE:
        out->kind = MU_CM_PROBE;
        return mu_wire_probe_from_pb(pb->probe, &out->probe, err);
    default:
        return mu_fail(err, MU_ERR_INVALID, "CoordinatorMessage: has no kind that this version knows");
    }
}

enum mu_status mu_wire_decode_coord(struct mu_wire_arena *arena, const void *data, size_t size_bytes,
                                    struct mu_coord_message *ret_message, struct mu_error *err)
{
    const ProtobufCMessage *unpacked = NULL;
    enum mu_status status = mu_wire_unpack(arena, &muster__v1__coordinator_message__descriptor, data, size_bytes,
                                           MU_WIRE_COORD_BYTES_MAX, &unpacked, err);
    if (status)
        return status;
    struct mu_coord_message message;
    memset(&message, 0, sizeof message);
    status = get_message(arena, (const Muster__V1__CoordinatorMessage *)unpacked, &message, err);
    if (status == MU_OK)
        *ret_message = message;
    return status;
}
