/* Over two ranks one leads: it says what comes next, and takes the time.
 *
 *   leader                     follower
 *     PING n       ------->
 *     8 bytes      <------>      n times
 *     OUT b        ------->      b bytes, then an answer of 8 bytes: how they arrived
 *     IN b         ------->      b bytes the other way
 *     END          ------->
 *
 * Exchange numbers ascend on both sides alike. Large messages are of at most PIECE_BYTES, all of a burst posted at
 * once: the same buffer for all, since nobody looks at it, but for the first burst each way, whose hash is compared. */
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/rng.h"
#include "worker/measure.h"

enum {
    LOOK_US = 20000, /* waits are so long at most before `stop` is looked at */
    PINGS = 200,
    PINGS_US = 100000, /* or so long */
    PIECE_BYTES = 4 << 20,
    BURST_FIRST_BYTES = 256 << 10,
    BURST_PIECES_MAX = 64,
    BURST_US = 60000, /* the first burst that takes so long counts */
    BARRIERS = 20,
    RING_ROUNDS = 4,
};

enum op { OP_END, OP_PING, OP_OUT, OP_IN, OP_COUNT };
struct order {
    uint64_t op, amount; /* pings, bytes */
};

struct talk {
    const struct mu_measure *m;
    struct mu_comm_group *group;
    struct mu_error *err;
    uint32_t peer;
    uint64_t exchange;
    uint8_t *sent, *received;
    struct mu_hash128 hash; /* of `sent`, the same on both sides */
    struct mu_comm_request requests[BURST_PIECES_MAX];
    struct mu_hash128 hashes[BURST_PIECES_MAX];
};

/* ---- waiting ---- */

/* NULL: for everything of the group. */
static enum mu_status await(struct talk *talk, const struct mu_comm_request *request)
{
    for (;;) {
        uint64_t until_us = mu_clock_mono_us() + LOOK_US;
        enum mu_status status = request ? mu_comm_wait(talk->group, request, until_us, talk->err)
                                        : mu_comm_wait_all(talk->group, until_us, talk->err);
        if (status != MU_ERR_TIMEOUT)
            return status;
        status = mu_measure_goes_on(talk->m, talk->err);
        if (status != MU_OK)
            return status;
    }
}

static enum mu_status say(struct talk *talk, const void *data, size_t size)
{
    struct mu_comm_request *request = &talk->requests[0];
    enum mu_status status = mu_comm_send(talk->group, talk->peer, ++talk->exchange, data, size, request, talk->err);
    return status == MU_OK ? await(talk, request) : status;
}

static enum mu_status hear(struct talk *talk, void *data, size_t size)
{
    struct mu_comm_request *request = &talk->requests[0];
    enum mu_status status = mu_comm_recv(talk->group, talk->peer, ++talk->exchange, data, size, request, talk->err);
    return status == MU_OK ? await(talk, request) : status;
}

/* ---- bursts ---- */

static bool is_first(uint64_t bytes)
{
    return bytes == BURST_FIRST_BYTES;
}

static enum mu_status send_burst(struct talk *talk, uint64_t bytes)
{
    enum mu_status status = MU_OK;
    uint32_t count = 0;
    for (uint64_t left = bytes; left > 0 && status == MU_OK; count++) {
        size_t size = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
        left -= size;
        status = mu_comm_send(talk->group, talk->peer, ++talk->exchange, talk->sent, size, &talk->requests[count],
                              talk->err);
    }
    return status == MU_OK ? await(talk, NULL) : status;
}

/* Posts all of it; `done` follows. */
static enum mu_status post_burst(struct talk *talk, uint64_t bytes)
{
    enum mu_status status = MU_OK;
    uint32_t count = 0;
    for (uint64_t left = bytes; left > 0 && status == MU_OK; count++) {
        size_t size = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
        left -= size;
        status = mu_comm_recv(talk->group, talk->peer, ++talk->exchange, talk->received, size, &talk->requests[count],
                              talk->err);
        if (status == MU_OK && is_first(bytes))
            mu_comm_hash(&talk->requests[count], &talk->hashes[count]);
    }
    return status;
}

static bool arrived_whole(const struct talk *talk, uint64_t bytes)
{
    return !is_first(bytes) || (talk->hashes[0].low == talk->hash.low && talk->hashes[0].high == talk->hash.high);
}

static enum mu_status changed(struct talk *talk, const char *which)
{
    return mu_fail(talk->err, MU_ERR_CORRUPT, "bytes change on the way %s", which);
}

/* ---- who leads ---- */

static enum mu_status lead_pings(struct talk *talk, double *ret_round_trip_s)
{
    double all[PINGS];
    uint64_t begun_us = mu_clock_mono_us(), word = 0;
    uint32_t count = 0;
    enum mu_status status = MU_OK;
    while (status == MU_OK && count < PINGS && (count < 3 || mu_clock_mono_us() - begun_us < PINGS_US)) {
        uint64_t from_us = mu_clock_mono_us();
        const struct order order = {.op = OP_PING, .amount = 4}; /* several: longer than the clock's grain */
        status = say(talk, &order, sizeof order);
        for (uint64_t i = 0; i < order.amount && status == MU_OK; i++) {
            status = say(talk, &word, sizeof word);
            if (status == MU_OK)
                status = hear(talk, &word, sizeof word);
        }
        all[count++] = (double)(mu_clock_mono_us() - from_us) * 1e-6 / (double)order.amount;
    }
    *ret_round_trip_s = mu_probe_median(all, count);
    return status;
}

static enum mu_status lead_burst(struct talk *talk, enum op op, uint64_t bytes)
{
    const struct order order = {.op = op, .amount = bytes};
    uint64_t word = 0;
    enum mu_status status = say(talk, &order, sizeof order);
    if (status == MU_OK && op == OP_OUT) {
        status = send_burst(talk, bytes);
        if (status == MU_OK)
            status = hear(talk, &word, sizeof word);
        return status == MU_OK && word != 1 ? changed(talk, "there") : status;
    }
    if (status == MU_OK)
        status = post_burst(talk, bytes);
    if (status == MU_OK)
        status = await(talk, NULL);
    return status == MU_OK && !arrived_whole(talk, bytes) ? changed(talk, "back") : status;
}

/* More and more, until it takes long enough that the round trip in it does not matter much; that is taken away. */
static enum mu_status lead_bursts(struct talk *talk, enum op op, double round_trip_s, double *ret_rate)
{
    for (uint64_t bytes = BURST_FIRST_BYTES;; bytes *= 4) {
        uint64_t from_us = mu_clock_mono_us();
        enum mu_status status = lead_burst(talk, op, bytes);
        if (status != MU_OK)
            return status;
        uint64_t took_us = mu_clock_mono_us() - from_us + 1;
        double seconds = (double)took_us * 1e-6;
        *ret_rate = (double)bytes / (seconds > 2 * round_trip_s ? seconds - round_trip_s : seconds);
        if (took_us >= BURST_US || bytes >= (uint64_t)PIECE_BYTES * BURST_PIECES_MAX)
            return MU_OK;
    }
}

static enum mu_status lead(struct talk *talk, struct mu_probe_pair *out)
{
    const struct order end = {.op = OP_END};
    enum mu_status status = lead_pings(talk, &out->round_trip_s);
    if (status == MU_OK)
        status = lead_bursts(talk, OP_OUT, out->round_trip_s, &out->out_rate);
    if (status == MU_OK)
        status = lead_bursts(talk, OP_IN, out->round_trip_s, &out->in_rate);
    return status == MU_OK ? say(talk, &end, sizeof end) : status;
}

/* ---- who follows ---- */

static enum mu_status follow_pings(struct talk *talk, uint64_t count)
{
    enum mu_status status = MU_OK;
    uint64_t word;
    for (uint64_t i = 0; i < count && status == MU_OK; i++) {
        status = hear(talk, &word, sizeof word);
        if (status == MU_OK)
            status = say(talk, &word, sizeof word);
    }
    return status;
}

static enum mu_status follow_out(struct talk *talk, uint64_t bytes)
{
    enum mu_status status = post_burst(talk, bytes);
    if (status == MU_OK)
        status = await(talk, NULL);
    uint64_t word = arrived_whole(talk, bytes);
    return status == MU_OK ? say(talk, &word, sizeof word) : status;
}

static enum mu_status follow(struct talk *talk)
{
    struct order order = {.op = OP_PING};
    enum mu_status status = MU_OK;
    while (status == MU_OK && order.op != OP_END) {
        status = hear(talk, &order, sizeof order);
        if (status != MU_OK)
            return status;
        if (order.op >= OP_COUNT || order.amount > (uint64_t)PIECE_BYTES * BURST_PIECES_MAX)
            return mu_fail(talk->err, MU_ERR_INVALID, "the other side speaks another protocol");
        if (order.op == OP_PING)
            status = follow_pings(talk, order.amount);
        else if (order.op == OP_OUT)
            status = follow_out(talk, order.amount);
        else if (order.op == OP_IN)
            status = send_burst(talk, order.amount);
    }
    return status;
}

/* ---- all together ---- */

/* Nobody leaves before all have come: in step k each tells the one 2^k further, and hears of the one 2^k before. */
static enum mu_status barrier(struct talk *talk, uint32_t rank, uint32_t world)
{
    static const uint64_t word = 1;
    uint64_t heard;
    enum mu_status status = MU_OK;
    for (uint32_t far = 1; far < world && status == MU_OK; far *= 2) {
        talk->exchange++;
        status = mu_comm_recv(talk->group, (rank + world - far) % world, talk->exchange, &heard, sizeof heard,
                              &talk->requests[0], talk->err);
        if (status == MU_OK)
            status = mu_comm_send(talk->group, (rank + far) % world, talk->exchange, &word, sizeof word,
                                  &talk->requests[1], talk->err);
        if (status == MU_OK)
            status = await(talk, NULL);
    }
    return status;
}

static enum mu_status barriers(struct talk *talk, uint32_t rank, uint32_t world, double *ret_seconds)
{
    double all[BARRIERS];
    enum mu_status status = barrier(talk, rank, world); /* whoever came first has waited in it */
    for (uint32_t i = 0; i < BARRIERS && status == MU_OK; i++) {
        uint64_t from_us = mu_clock_mono_us();
        status = barrier(talk, rank, world);
        all[i] = (double)(mu_clock_mono_us() - from_us + 1) * 1e-6;
    }
    if (status == MU_OK)
        *ret_seconds = mu_probe_median(all, BARRIERS);
    return status;
}

/* To the next, from the one before: half of the requests each. */
static enum mu_status turn(struct talk *talk, uint32_t rank, uint32_t world, uint64_t bytes)
{
    uint32_t next = (rank + 1) % world, before = (rank + world - 1) % world, count = 0;
    enum mu_status status = MU_OK;
    for (uint64_t left = bytes; left > 0 && status == MU_OK; count += 2) {
        size_t size = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
        left -= size;
        talk->exchange++;
        status =
            mu_comm_recv(talk->group, before, talk->exchange, talk->received, size, &talk->requests[count], talk->err);
        if (status == MU_OK)
            status = mu_comm_send(talk->group, next, talk->exchange, talk->sent, size, &talk->requests[count + 1],
                                  talk->err);
    }
    return status == MU_OK ? await(talk, NULL) : status;
}

static enum mu_status ring(struct talk *talk, uint32_t rank, uint32_t world, uint64_t bytes, double *ret_rate)
{
    uint64_t most = (uint64_t)PIECE_BYTES * (BURST_PIECES_MAX / 2);
    bytes = bytes < BURST_FIRST_BYTES ? BURST_FIRST_BYTES : bytes > most ? most : bytes;
    enum mu_status status = barrier(talk, rank, world);
    uint64_t from_us = mu_clock_mono_us();
    for (uint32_t i = 0; i < RING_ROUNDS && status == MU_OK; i++)
        status = turn(talk, rank, world, bytes);
    double seconds = (double)(mu_clock_mono_us() - from_us + 1) * 1e-6;
    if (status == MU_OK)
        *ret_rate = RING_ROUNDS * (double)bytes / seconds;
    return status == MU_OK ? barrier(talk, rank, world) : status; /* nobody leaves while others still want something */
}

/* ---- opening, closing ---- */

static struct talk *talk_new(const struct mu_measure *m, struct mu_error *err)
{
    struct talk *talk = calloc(1, sizeof *talk);
    uint8_t *bytes = malloc(2 * (size_t)PIECE_BYTES);
    if (!talk || !bytes) {
        free(talk);
        free(bytes);
        mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %d MiB of messages", 2 * PIECE_BYTES >> 20);
        return NULL;
    }
    *talk = (struct talk){.m = m, .err = err, .sent = bytes, .received = bytes + PIECE_BYTES};
    uint64_t random = 1;
    for (size_t i = 0; i < PIECE_BYTES; i += sizeof random) {
        uint64_t word = mu_splitmix64(&random);
        memcpy(bytes + i, &word, sizeof word);
    }
    memset(talk->received, 0, PIECE_BYTES);
    talk->hash = mu_xxh3_128(talk->sent, BURST_FIRST_BYTES);
    return talk;
}

static enum mu_status connect_all(struct talk *talk, struct mu_comm *comm, const struct mu_comm_group_config *config)
{
    enum mu_status status = mu_comm_open(comm, config, talk->m->deadline_us, &talk->group, talk->err);
    while (status == MU_OK) {
        status = mu_comm_wait_ready(talk->group, mu_clock_mono_us() + LOOK_US, talk->err);
        if (status != MU_ERR_TIMEOUT)
            break;
        status = mu_measure_goes_on(talk->m, talk->err);
    }
    return status;
}

/* Requests and buffers may go once the group has forgotten them. */
static void talk_free(struct talk *talk)
{
    mu_comm_group_close(talk->group);
    free(talk->sent);
    free(talk);
}

enum mu_status mu_measure_pair(const struct mu_measure *m, struct mu_comm *comm,
                               const struct mu_comm_group_config *config, struct mu_probe_pair *out,
                               struct mu_error *err)
{
    struct talk *talk = talk_new(m, err);
    if (!talk)
        return MU_ERR_NO_MEMORY;
    talk->peer = 1 - config->rank;
    enum mu_status status = connect_all(talk, comm, config);
    if (status == MU_OK)
        status = config->rank == 0 ? lead(talk, out) : follow(talk);
    talk_free(talk);
    return status;
}

enum mu_status mu_measure_together(const struct mu_measure *m, struct mu_comm *comm,
                                   const struct mu_comm_group_config *config, uint64_t bytes, double *ret_seconds,
                                   double *ret_rate, struct mu_error *err)
{
    struct talk *talk = talk_new(m, err);
    if (!talk)
        return MU_ERR_NO_MEMORY;
    enum mu_status status = connect_all(talk, comm, config);
    if (status == MU_OK)
        status = barriers(talk, config->rank, config->world, ret_seconds);
    if (status == MU_OK)
        status = ring(talk, config->rank, config->world, bytes, ret_rate);
    talk_free(talk);
    return status;
}
