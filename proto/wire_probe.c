/* Probes: orders, what was measured. */
#include "proto/wire_pb.h"

#include <string.h>

_Static_assert(MUSTER__V1__PROBE_KIND__PROBE_KIND_TOGETHER == (int)MU_PROBE_TOGETHER, "kind of a probe's step");

static const double MOST = 1e18; /* of a rate, bytes, seconds */

static enum mu_status no_memory(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to encode or decode a message about a probe");
}

/* ---- what was measured ---- */

enum mu_status mu_wire_probe_alone_to_pb(struct mu_wire_arena *arena, const struct mu_probe_alone *alone,
                                         Muster__V1__ProbeAlone **ret_pb, struct mu_error *err)
{
    Muster__V1__ProbeAlone *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    double *flops = mu_wire_arena_alloc(arena, sizeof alone->flops);
    if (!pb || !flops)
        return no_memory(err);
    muster__v1__probe_alone__init(pb);
    memcpy(flops, alone->flops, sizeof alone->flops);
    pb->n_flops = MU_PROBE_SIZES;
    pb->flops = flops;
    pb->memory_bytes = alone->memory_bytes;
    pb->memory_rate = alone->memory_rate;
    pb->to_host_rate = alone->to_host_rate;
    pb->to_device_rate = alone->to_device_rate;
    pb->product_rate = alone->rates.flops;
    pb->flat_rate = alone->rates.memory_bytes_per_second;
    pb->rows_rate = alone->rates.rows_bytes_per_second;
    pb->fixed_s = alone->rates.fixed_s;
    pb->slice_cost = alone->rates.slice_cost;
    pb->rates_apart = alone->rates_apart;
    *ret_pb = pb;
    return MU_OK;
}

static enum mu_status get_number(double value, const char *field, double *ret_value, struct mu_error *err)
{
    if (!(value >= 0 && value <= MOST))
        return mu_fail(err, MU_ERR_INVALID, "%s: value %g is not allowed: 0 to %g", field, value, MOST);
    *ret_value = value;
    return MU_OK;
}

struct number {
    double from, *to;
    const char *field;
};

static enum mu_status get_numbers(const struct number *numbers, size_t count, struct mu_error *err)
{
    for (size_t i = 0; i < count; i++) {
        enum mu_status status = get_number(numbers[i].from, numbers[i].field, numbers[i].to, err);
        if (status)
            return status;
    }
    return MU_OK;
}

enum mu_status mu_wire_probe_alone_from_pb(const Muster__V1__ProbeAlone *pb, struct mu_probe_alone *ret_alone,
                                           struct mu_error *err)
{
    *ret_alone = (struct mu_probe_alone){.memory_bytes = 0};
    struct mu_cost_rates *rates = &ret_alone->rates;
    const struct number numbers[] = {{pb->memory_bytes, &ret_alone->memory_bytes, "ProbeAlone.memory_bytes"},
                                     {pb->memory_rate, &ret_alone->memory_rate, "ProbeAlone.memory_rate"},
                                     {pb->to_host_rate, &ret_alone->to_host_rate, "ProbeAlone.to_host_rate"},
                                     {pb->to_device_rate, &ret_alone->to_device_rate, "ProbeAlone.to_device_rate"},
                                     {pb->product_rate, &rates->flops, "ProbeAlone.product_rate"},
                                     {pb->flat_rate, &rates->memory_bytes_per_second, "ProbeAlone.flat_rate"},
                                     {pb->rows_rate, &rates->rows_bytes_per_second, "ProbeAlone.rows_rate"},
                                     {pb->fixed_s, &rates->fixed_s, "ProbeAlone.fixed_s"},
                                     {pb->slice_cost, &rates->slice_cost, "ProbeAlone.slice_cost"},
                                     {pb->rates_apart, &ret_alone->rates_apart, "ProbeAlone.rates_apart"}};
    if (pb->n_flops != 0 && pb->n_flops != MU_PROBE_SIZES)
        return mu_fail(err, MU_ERR_INVALID, "ProbeAlone.flops: %zu of them are not allowed: none or %d", pb->n_flops,
                       MU_PROBE_SIZES);
    for (size_t i = 0; i < pb->n_flops; i++) {
        enum mu_status status = get_number(pb->flops[i], "ProbeAlone.flops", &ret_alone->flops[i], err);
        if (status)
            return status;
    }
    return get_numbers(numbers, sizeof numbers / sizeof numbers[0], err);
}

void mu_wire_probe_pair_to_pb(const struct mu_probe_pair *pair, Muster__V1__ProbePair *pb)
{
    muster__v1__probe_pair__init(pb);
    pb->round_trip_s = pair->round_trip_s;
    pb->out_rate = pair->out_rate;
    pb->in_rate = pair->in_rate;
}

enum mu_status mu_wire_probe_pair_from_pb(const Muster__V1__ProbePair *pb, struct mu_probe_pair *ret_pair,
                                          struct mu_error *err)
{
    const struct number numbers[] = {{pb->round_trip_s, &ret_pair->round_trip_s, "ProbePair.round_trip_s"},
                                     {pb->out_rate, &ret_pair->out_rate, "ProbePair.out_rate"},
                                     {pb->in_rate, &ret_pair->in_rate, "ProbePair.in_rate"}};
    return get_numbers(numbers, sizeof numbers / sizeof numbers[0], err);
}

/* ---- orders ---- */

enum mu_status mu_wire_probe_to_pb(struct mu_wire_arena *arena, const struct mu_probe_order *order,
                                   Muster__V1__ProbeOrder **ret_pb, struct mu_error *err)
{
    Muster__V1__ProbeOrder *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    Muster__V1__ProbePeer *peers = mu_wire_arena_alloc(arena, sizeof *peers * order->peer_count);
    Muster__V1__ProbePeer **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * order->peer_count);
    enum mu_status status = MU_OK;
    if (!pb || !peers || !pointers)
        return no_memory(err);
    muster__v1__probe_order__init(pb);
    pb->number = order->number;
    pb->kind = (Muster__V1__ProbeKind)order->kind;
    pb->limit_ms = order->limit_ms;
    pb->quick = order->quick;
    pb->bytes = order->bytes;
    pb->rank = order->rank;
    pb->world = order->world;
    pb->encrypted = order->encrypted;
    if (order->peer_count > 0)
        pb->secret = (ProtobufCBinaryData){.len = sizeof order->secret, .data = (uint8_t *)order->secret};
    for (uint32_t i = 0; i < order->peer_count && status == MU_OK; i++) {
        pointers[i] = &peers[i];
        muster__v1__probe_peer__init(&peers[i]);
        peers[i].rank = order->peers[i].rank;
        peers[i].incarnation = mu_wire_put_id(arena, order->peers[i].incarnation);
        status = mu_wire_put_string(order->peers[i].address, MU_WIRE_TEXT, "ProbePeer.address", MU_ADDRESS_SIZE,
                                    &peers[i].address, err);
    }
    pb->n_peers = order->peer_count;
    pb->peers = pointers;
    *ret_pb = pb;
    return status;
}

static enum mu_status get_peers(const Muster__V1__ProbeOrder *pb, struct mu_probe_order *out, struct mu_error *err)
{
    bool talks = out->kind == MU_PROBE_PAIR || out->kind == MU_PROBE_TOGETHER;
    uint32_t most = !talks ? 0 : out->kind == MU_PROBE_PAIR ? 1 : MU_PROBE_NEIGHBOURS_MAX;
    if (pb->n_peers > most || pb->n_peers < talks)
        return mu_fail(err, MU_ERR_INVALID, "ProbeOrder.peers: %zu of them are not allowed: %d to %u", pb->n_peers,
                       talks, most);
    if (pb->secret.len != (talks ? sizeof out->secret : 0))
        return mu_fail(err, MU_ERR_INVALID, "ProbeOrder.secret: %zu bytes are not allowed: 32 with peers, else none",
                       pb->secret.len);
    if (talks && (out->world < 2 || out->world > MU_PROBE_MEMBERS_MAX || out->rank >= out->world ||
                  (out->kind == MU_PROBE_PAIR && out->world != 2)))
        return mu_fail(err, MU_ERR_INVALID, "ProbeOrder.rank: value %u of %u is not allowed", out->rank, out->world);
    for (size_t i = 0; i < pb->n_peers; i++) {
        struct mu_probe_peer *peer = &out->peers[i];
        peer->rank = pb->peers[i]->rank;
        enum mu_status status =
            mu_wire_get_id(pb->peers[i]->incarnation, "ProbePeer.incarnation", &peer->incarnation, err);
        if (status == MU_OK)
            status = mu_wire_get_string(pb->peers[i]->address, MU_WIRE_TEXT, "ProbePeer.address", peer->address,
                                        sizeof peer->address, err);
        if (status)
            return status;
        if (peer->rank >= out->world || peer->rank == out->rank || (i > 0 && peer->rank <= out->peers[i - 1].rank))
            return mu_fail(err, MU_ERR_INVALID, "ProbePeer.rank: value %u is not allowed: others, ascending",
                           peer->rank);
    }
    if (talks)
        memcpy(out->secret, pb->secret.data, sizeof out->secret);
    out->peer_count = (uint32_t)pb->n_peers;
    return MU_OK;
}

enum mu_status mu_wire_probe_from_pb(const Muster__V1__ProbeOrder *pb, struct mu_probe_order *out, struct mu_error *err)
{
    int kind = 0;
    enum mu_status status = mu_wire_get_enum((int)pb->kind, 0, MU_PROBE_KIND_END - 1, "ProbeOrder.kind", &kind, err);
    if (status)
        return status;
    if (!(pb->number & MU_FEED_BIT))
        return mu_fail(err, MU_ERR_INVALID, "ProbeOrder.number: value %llu is not allowed: the highest bit must be set",
                       (unsigned long long)pb->number);
    if (pb->bytes > MU_PROBE_STORAGE_BYTES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "ProbeOrder.bytes: value %llu is not allowed: at most %llu",
                       (unsigned long long)pb->bytes, MU_PROBE_STORAGE_BYTES_MAX);
    *out = (struct mu_probe_order){.number = pb->number,
                                   .kind = (enum mu_probe_kind)kind,
                                   .limit_ms = pb->limit_ms,
                                   .quick = pb->quick,
                                   .bytes = pb->bytes,
                                   .rank = pb->rank,
                                   .world = pb->world,
                                   .encrypted = pb->encrypted};
    return get_peers(pb, out, err);
}

/* ---- answers ---- */

enum mu_status mu_wire_probed_to_pb(struct mu_wire_arena *arena, const struct mu_probe_report *report,
                                    Muster__V1__Probed **ret_pb, struct mu_error *err)
{
    Muster__V1__Probed *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__probed__init(pb);
    *ret_pb = pb;
    pb->number = report->number;
    pb->kind = (Muster__V1__ProbeKind)report->kind;
    pb->code = (Muster__V1__Code)report->status;
    pb->text = mu_wire_put_text(arena, report->text, sizeof report->text);
    pb->write_rate = report->write_rate;
    pb->read_rate = report->read_rate;
    pb->barrier_s = report->barrier_s;
    pb->ring_rate = report->ring_rate;
    if (!pb->text)
        return no_memory(err);
    if (report->kind == MU_PROBE_PAIR) {
        pb->pair = mu_wire_arena_alloc(arena, sizeof *pb->pair);
        if (!pb->pair)
            return no_memory(err);
        mu_wire_probe_pair_to_pb(&report->pair, pb->pair);
    }
    return report->kind == MU_PROBE_ALONE ? mu_wire_probe_alone_to_pb(arena, &report->alone, &pb->alone, err) : MU_OK;
}

enum mu_status mu_wire_probed_from_pb(const Muster__V1__Probed *pb, struct mu_probe_report *out, struct mu_error *err)
{
    const struct number numbers[] = {{pb->write_rate, &out->write_rate, "Probed.write_rate"},
                                     {pb->read_rate, &out->read_rate, "Probed.read_rate"},
                                     {pb->barrier_s, &out->barrier_s, "Probed.barrier_s"},
                                     {pb->ring_rate, &out->ring_rate, "Probed.ring_rate"}};
    int kind = 0, code = 0;
    enum mu_status status = MU_OK;
    out->number = pb->number;
    if ((status = mu_wire_get_enum((int)pb->kind, MU_PROBE_ALONE, MU_PROBE_KIND_END - 1, "Probed.kind", &kind, err)) ||
        (status = mu_wire_get_enum((int)pb->code, MU_OK, MU_STATUS_COUNT - 1, "Probed.code", &code, err)) ||
        (status = mu_wire_get_string(pb->text, MU_WIRE_TEXT, "Probed.text", out->text, sizeof out->text, err)) ||
        (status = get_numbers(numbers, sizeof numbers / sizeof numbers[0], err)) ||
        (pb->alone && (status = mu_wire_probe_alone_from_pb(pb->alone, &out->alone, err))) ||
        (pb->pair && (status = mu_wire_probe_pair_from_pb(pb->pair, &out->pair, err))))
        return status;
    out->kind = (enum mu_probe_kind)kind;
    out->status = (enum mu_status)code;
    const char *other = pb->alone && out->kind != MU_PROBE_ALONE ? "alone"
                        : pb->pair && out->kind != MU_PROBE_PAIR ? "pair"
                                                                 : NULL;
    if (other)
        return mu_fail(err, MU_ERR_INVALID, "Probed.%s: is not allowed with kind %d", other, kind);
    return MU_OK;
}
