/* The SHA-256 of the weights: over all cells in flat order, so a function of the job alone, although each rank holds a
 * part of them.
 *
 * The hash goes to the weights: whoever holds the next cells takes its state over, 108 bytes, from the one before it.
 *
 *   one column       every rank has all cells and hashes them by itself
 *   several          replica 0 of each column takes part in a chain of ranks: slices of a layer in the order of their
 *                    tensor index, then index 0 with what the layer shares, then the next layer. Each is connected to
 *                    the next (tensor neighbours; stages at index 0). Then the last one's result goes to everybody. */
#include "worker/engine_internal.h"

#include <stdlib.h>
#include <string.h>
#define OPENSSL_SUPPRESS_DEPRECATED /* SHA256_CTX: the EVP interface has no way to take a state out */
#include <openssl/sha.h>

#include "common/fault.h"
#include "worker/exchange.h"

/* As on the wire: little-endian, no padding. */
struct digest_state {
    uint32_t h[8], length_low, length_high, buffered, reserved;
    uint8_t data[SHA_CBLOCK];
};
_Static_assert(sizeof(struct digest_state) == 112, "no padding on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the SHA-256 of the weights is over little-endian floats");

static void pack(const SHA256_CTX *sha, struct digest_state *out)
{
    memset(out, 0, sizeof *out);
    memcpy(out->h, sha->h, sizeof out->h);
    out->length_low = sha->Nl;
    out->length_high = sha->Nh;
    out->buffered = sha->num;
    memcpy(out->data, sha->data, sizeof out->data);
}

static enum mu_status unpack(const struct digest_state *in, SHA256_CTX *sha, struct mu_error *err)
{
    if (in->buffered >= SHA_CBLOCK)
        return mu_fail(err, MU_ERR_CORRUPT, "the hash of the weights that a peer passed on is not one");
    SHA256_Init(sha);
    memcpy(sha->h, in->h, sizeof in->h);
    sha->Nl = in->length_low;
    sha->Nh = in->length_high;
    sha->num = in->buffered;
    memcpy(sha->data, in->data, sizeof in->data);
    return MU_OK;
}

/* Who hashes a cell: of replica 0 when there are several columns, else this rank. */
static uint32_t hasher(const struct mu_engine *engine, uint32_t index)
{
    const struct engine_generation *now = &engine->now;
    const struct mu_layout *layout = &now->layout;
    const struct mu_model_spec *model = &engine->job.model;
    if (layout->tp * layout->pp == 1 && layout->idle == 0)
        return now->rank;
    struct mu_cell cell = mu_model_cell(model, index);
    struct mu_coords at = {0};
    bool sliced = cell.kind == MU_CELL_E || cell.kind == MU_CELL_L || cell.kind == MU_CELL_F;
    if (sliced)
        at.t = cell.slice / (model->config.slices / layout->tp);
    if (cell.kind == MU_CELL_F || cell.kind == MU_CELL_F_SHARED)
        at.p = layout->pp - 1;
    if (cell.kind == MU_CELL_L || cell.kind == MU_CELL_L_SHARED)
        while (cell.layer >= layout->stage_first[at.p + 1])
            at.p++;
    return mu_layout_rank(layout, at);
}

/* Exponents of ones only: infinite, or not a number. */
static bool all_finite(const uint32_t *words, size_t count)
{
    const uint32_t exponent = 0x7f800000;
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++)
        found |= (words[i] & exponent) == exponent;
    return !found;
}

static enum mu_status hash_cell(struct mu_engine *engine, uint32_t index, SHA256_CTX *sha, bool *finite,
                                struct mu_error *err)
{
    struct mu_cell cell = mu_model_cell(&engine->job.model, index);
    const uint8_t *bytes = (const uint8_t *)(engine->job.state.flats[0] + cell.offset);
    size_t left = cell.size * sizeof(float);
    while (left > 0) {
        size_t stretch = left < MU_DEVICE_READ_MAX ? left : MU_DEVICE_READ_MAX;
        const void *view = NULL;
        enum mu_status status = mu_device_read(engine->device, bytes, stretch, &view);
        if (status != MU_OK)
            return engine_model_failed(engine, status, "hash of the weights", err);
        SHA256_Update(sha, view, stretch);
        *finite = *finite && all_finite(view, stretch / sizeof(uint32_t));
        bytes += stretch;
        left -= stretch;
        mu_pool_poll(engine->pool);
        if (atomic_load(&engine->cancel))
            return mu_fail(err, MU_ERR_CANCELLED, "hash of the weights cancelled");
    }
    return MU_OK;
}

static enum mu_status wait_for(struct mu_engine *engine, const struct mu_comm_request *request, struct mu_error *err)
{
    engine_set_waiting(engine, true);
    enum mu_status status = mu_comm_wait(engine->now.group, request, MU_COMM_FOREVER, err);
    engine_set_waiting(engine, false);
    return status;
}

/* Stays with the generation: a message that never comes is forgotten when its connections are closed. */
struct engine_digest {
    struct digest_state state;
    struct mu_comm_request request;
};

static enum mu_status take_over(struct mu_engine *engine, uint32_t index, uint32_t from, SHA256_CTX *sha,
                                struct mu_error *err)
{
    struct engine_digest *digest = engine->now.digest;
    enum mu_status status = mu_comm_recv(engine->now.group, from, exchange_number(0, EXCHANGE_DIGEST, index),
                                         &digest->state, sizeof digest->state, &digest->request, err);
    if (status == MU_OK)
        status = wait_for(engine, &digest->request, err);
    return status == MU_OK ? unpack(&digest->state, sha, err) : status;
}

static enum mu_status hand_over(struct mu_engine *engine, uint32_t index, uint32_t to, const SHA256_CTX *sha,
                                struct mu_error *err)
{
    struct engine_digest *digest = engine->now.digest;
    pack(sha, &digest->state);
    enum mu_status status = mu_comm_send(engine->now.group, to, exchange_number(0, EXCHANGE_DIGEST, index),
                                         &digest->state, sizeof digest->state, &digest->request, err);
    return status == MU_OK ? wait_for(engine, &digest->request, err) : status;
}

/* Own cells; *ret_last: this rank hashed the last one. */
static enum mu_status hash_own(struct mu_engine *engine, SHA256_CTX *sha, bool *ret_last, bool *ret_finite,
                               struct mu_error *err)
{
    uint32_t cells = engine->job.model.cell_count, rank = engine->now.rank, before = hasher(engine, 0);
    enum mu_status status = MU_OK;
    *ret_last = false;
    *ret_finite = true;
    SHA256_Init(sha);
    for (uint32_t i = 0, who = before; i < cells && status == MU_OK; i++) {
        uint32_t after = i + 1 < cells ? hasher(engine, i + 1) : who;
        if (who == rank && before != rank)
            status = take_over(engine, i, before, sha, err);
        if (who == rank && status == MU_OK)
            status = hash_cell(engine, i, sha, ret_finite, err);
        if (who == rank && after != rank && status == MU_OK)
            status = hand_over(engine, i + 1, after, sha, err);
        *ret_last = who == rank;
        before = who;
        who = after;
    }
    return status;
}

enum mu_status engine_weights_sha256(struct mu_engine *engine, uint8_t ret_sha256[32], bool *ret_finite,
                                     struct mu_error *err)
{
    const struct engine_generation *now = &engine->now;
    struct mu_small own, total;
    SHA256_CTX sha;
    bool last;
    mu_small_init(&own);
    if (!engine->now.digest)
        engine->now.digest = calloc(1, sizeof *engine->now.digest);
    if (!engine->now.digest)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the hash of the weights");
    enum mu_status status = hash_own(engine, &sha, &last, ret_finite, err);
    if (status != MU_OK)
        return status;
    if (last)
        SHA256_Final(own.digest, &sha);
    MU_FAULT("worker.digest");
    if (now->layout.tp * now->layout.pp == 1 && now->layout.idle == 0) {
        memcpy(ret_sha256, own.digest, sizeof own.digest);
        return MU_OK;
    }
    own.unfinite = !*ret_finite;
    engine_set_waiting(engine, true);
    status = mu_reduce_small(now->reduce, engine->held.step - now->start_step, MU_SMALL_END, 0, &own, &total, err);
    engine_set_waiting(engine, false);
    if (status != MU_OK)
        return status;
    memcpy(ret_sha256, total.digest, sizeof total.digest);
    *ret_finite = !total.unfinite;
    return MU_OK;
}
