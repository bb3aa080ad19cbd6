/* What the data plane has moved, for people: counters that the engine's thread copies out between two steps, for
 * whoever tells them (worker/vitals.h). */
#include <string.h>

#include "common/clock.h"
#include "worker/engine_internal.h"

enum { LOOK_US = 1000000, STALE_US = 60 * LOOK_US };

static uint64_t moved(const struct mu_comm_traffic *traffic)
{
    return traffic->bytes_sent + traffic->bytes_received;
}

static struct mu_vital_link link_of(const struct mu_comm_traffic *now, const struct mu_comm_traffic *before,
                                    uint64_t apart_us)
{
    double per_second = 1e6 / (double)apart_us;
    return (struct mu_vital_link){
        .rank = now->rank,
        .received_bytes_per_second = (uint64_t)((double)(now->bytes_received - before->bytes_received) * per_second),
        .sent_bytes_per_second = (uint64_t)((double)(now->bytes_sent - before->bytes_sent) * per_second),
        .wait_ppm = (uint64_t)((double)(now->wait_us - before->wait_us) * per_second),
        .latency_us = now->latency_us,
        .retransmits = now->retransmits};
}

/* The busiest links, most bytes first: `before` holds the counters of the same peers. */
static uint32_t busiest(const struct engine_traffic *traffic, const struct mu_comm_traffic *now, size_t count,
                        uint64_t apart_us, struct mu_vital_link out[MU_VITAL_LINKS_MAX])
{
    uint64_t bytes[MU_VITAL_LINKS_MAX];
    uint32_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t own = moved(&now[i]) - moved(&traffic->peers[i]);
        uint32_t at = kept;
        while (at > 0 && bytes[at - 1] < own)
            at--;
        if (at == MU_VITAL_LINKS_MAX)
            continue;
        uint32_t after = (kept < MU_VITAL_LINKS_MAX ? kept : MU_VITAL_LINKS_MAX - 1) - at;
        memmove(&bytes[at + 1], &bytes[at], after * sizeof bytes[0]);
        memmove(&out[at + 1], &out[at], after * sizeof out[0]);
        bytes[at] = own;
        out[at] = link_of(&now[i], &traffic->peers[i], apart_us);
        kept += kept < MU_VITAL_LINKS_MAX;
    }
    return kept;
}

void engine_traffic_look(struct mu_engine *engine)
{
    struct engine_traffic *traffic = &engine->traffic;
    uint64_t now_us = mu_clock_mono_us(), apart_us = now_us - traffic->looked_us;
    if (apart_us < LOOK_US)
        return;
    struct mu_comm_traffic peers[MU_PEERS_MAX];
    struct mu_vital_link links[MU_VITAL_LINKS_MAX];
    struct mu_comm_stats stats;
    size_t count = engine->now.group ? mu_comm_group_traffic(engine->now.group, peers, MU_PEERS_MAX) : 0;
    bool same = traffic->generation == engine->now.generation && traffic->peer_count == count;
    uint32_t link_count = same ? busiest(traffic, peers, count, apart_us, links) : 0;
    mu_comm_stats(engine->comm, &stats);
    memcpy(traffic->peers, peers, count * sizeof peers[0]);
    traffic->peer_count = count;
    traffic->generation = engine->now.generation;
    traffic->looked_us = now_us;
    pthread_mutex_lock(&traffic->lock);
    traffic->made_us = now_us;
    traffic->totals = stats;
    memcpy(traffic->links, links, link_count * sizeof links[0]);
    traffic->link_count = link_count;
    pthread_mutex_unlock(&traffic->lock);
}

void mu_engine_traffic(void *arg, struct mu_vitals *vitals)
{
    struct mu_engine *engine = arg;
    struct engine_traffic *traffic = &engine->traffic;
    uint64_t *values = vitals->values;
    pthread_mutex_lock(&traffic->lock);
    values[MU_VITAL_PLANE_RECEIVED_BYTES] = traffic->totals.bytes_received;
    values[MU_VITAL_PLANE_SENT_BYTES] = traffic->totals.bytes_sent;
    values[MU_VITAL_PLANE_WAIT_US] = traffic->totals.wait_us;
    values[MU_VITAL_LATENCY_US] = 0;
    bool is_stale = mu_clock_mono_us() - traffic->made_us > STALE_US; /* an engine that stands still moves nothing */
    vitals->link_count = is_stale ? 0 : traffic->link_count;
    memcpy(vitals->links, traffic->links, sizeof vitals->links);
    pthread_mutex_unlock(&traffic->lock);
    for (uint32_t i = 0; i < vitals->link_count; i++) {
        if (vitals->links[i].latency_us > values[MU_VITAL_LATENCY_US])
            values[MU_VITAL_LATENCY_US] = vitals->links[i].latency_us;
    }
}
