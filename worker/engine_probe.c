/* Measurements for a probe (plan/probe.h), between two commands: whatever else is commanded ends one at once. They use
 * the engine's own pool, device and data plane, over connections of their own beside those of generations, and touch
 * nothing that is held. */
#include "worker/engine_internal.h"

#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "worker/holder.h"
#include "worker/measure.h"

enum { STORAGE_MIB_SHIFT = 20 };

static bool has_other_work(void *ctx)
{
    struct mu_engine *engine = ctx;
    pthread_mutex_lock(&engine->stop_lock);
    bool stopping = engine->stopping;
    pthread_mutex_unlock(&engine->stop_lock);
    return stopping || mu_queue_count(engine->mailbox) > 0;
}

static enum mu_status alone(const struct mu_measure *m, const struct mu_probe_order *order, struct mu_probe_alone *out,
                            struct mu_error *err)
{
    struct mu_measured_model measured;
    enum mu_status status = mu_measure_device(m, out, err);
    if (status != MU_OK || order->quick)
        return status;
    status = mu_measure_model(m, NULL, NULL, &measured, err);
    if (status == MU_OK)
        out->rates_apart = mu_measured_rates(&measured, &out->rates);
    return status;
}

static enum mu_status storage(const struct mu_engine *engine, const struct mu_measure *m,
                              const struct mu_probe_order *order, struct mu_probe_report *report, struct mu_error *err)
{
    char path[MU_PATH_SIZE];
    if (engine->phase == ENGINE_EMPTY || !engine->job.spec.checkpoint.path[0])
        return mu_fail(err, MU_ERR_NOT_FOUND, "its job has no checkpoint.path");
    enum mu_status status = mu_holder_path(engine->job.spec.checkpoint.path, engine->host, path, err);
    if (status != MU_OK)
        return status;
    return mu_measure_storage(m, path, true, order->bytes >> STORAGE_MIB_SHIFT, &report->write_rate, &report->read_rate,
                              err);
}

static enum mu_status links(const struct mu_engine *engine, const struct mu_measure *m, struct mu_id incarnation,
                            const struct mu_probe_order *order, struct mu_probe_report *report, struct mu_error *err)
{
    struct mu_comm_peer peers[MU_PROBE_NEIGHBOURS_MAX];
    struct mu_comm_group_config config = {.generation = order->number,
                                          .rank = order->rank,
                                          .world = order->world,
                                          .incarnation = incarnation,
                                          .peers = peers,
                                          .peer_count = order->peer_count,
                                          .encrypted = order->encrypted};
    _Static_assert(sizeof config.secret == sizeof order->secret, "secret");
    memcpy(config.secret, order->secret, sizeof config.secret);
    for (uint32_t i = 0; i < order->peer_count; i++)
        peers[i] = (struct mu_comm_peer){.rank = order->peers[i].rank,
                                         .incarnation = order->peers[i].incarnation,
                                         .address = order->peers[i].address};
    if (order->kind == MU_PROBE_PAIR)
        return mu_measure_pair(m, engine->comm, &config, &report->pair, err);
    return mu_measure_together(m, engine->comm, &config, order->bytes, &report->barrier_s, &report->ring_rate, err);
}

static enum mu_status measure(struct mu_engine *engine, struct mu_id incarnation, const struct mu_probe_order *order,
                              struct mu_probe_report *report, struct mu_error *err)
{
    const struct mu_measure m = {.pool = engine->pool,
                                 .stop = has_other_work,
                                 .ctx = engine,
                                 .deadline_us = mu_clock_mono_us() + order->limit_ms * 1000ull};
    if (engine->phase == ENGINE_PREPARED || engine->take.given.order.number)
        return mu_fail(err, MU_ERR_CONFLICT, "it prepares for its next rank");
    if (order->kind == MU_PROBE_ALONE)
        return alone(&m, order, &report->alone, err);
    if (order->kind == MU_PROBE_STORAGE)
        return storage(engine, &m, order, report, err);
    return links(engine, &m, incarnation, order, report, err);
}

void engine_probe(struct mu_engine *engine, struct mu_id incarnation, const struct mu_probe_order *order)
{
    struct mu_worker_event event = {.kind = MU_WE_PROBED, .probed = {.number = order->number, .kind = order->kind}};
    struct mu_error err = {0};
    if (order->kind == 0)
        return;                             /* that it came was enough */
    mu_pool_set_cancel(engine->pool, NULL); /* the flag is that of the last generation */
    event.probed.status = measure(engine, incarnation, order, &event.probed, &err);
    engine_set_cancellable(engine, true);
    if (event.probed.status != MU_OK)
        snprintf(event.probed.text, sizeof event.probed.text, "%.*s", (int)sizeof event.probed.text - 1, err.text);
    engine_post(engine, &event);
}
