#include "worker/transfer.h"

#include <stdlib.h>
#include <string.h>

#include "common/hash.h"

enum {
    KINDS = 3,
    BLOCK_CHUNKS = 32,
    BLOCK_MESSAGES = KINDS * BLOCK_CHUNKS + 1, /* the last one is the table of checksums */
    WINDOW = 3,                                /* blocks that have requests */
    MESSAGE_BITS = 7,
    EXCHANGE_STATE = 7 << 27, /* apart from the numbers of worker/reduce: kind 7 of sequence 0 */
};
#define TABLE_MAGIC 0x4b4c4253544d554dull

_Static_assert(BLOCK_MESSAGES <= 1 << MESSAGE_BITS, "a message's number fits");

/* As on the wire. */
struct table {
    uint64_t magic, step;
    uint32_t block, chunk_count;
    struct mu_hash128 hashes[BLOCK_CHUNKS][KINDS];
};
_Static_assert(sizeof(struct table) <= MU_COMM_EAGER_SIZE && sizeof(struct table) == 24 + 16 * BLOCK_CHUNKS * KINDS,
               "one small frame");

struct block {
    struct table table;
    struct mu_comm_request receives[BLOCK_MESSAGES];
    struct mu_comm_request *sends; /* [serve_count][BLOCK_MESSAGES] */
};

struct mu_transfer {
    struct mu_transfer_config config;
    uint32_t block_count;
    struct block blocks[WINDOW];
};

static uint64_t number(uint32_t block, uint32_t message)
{
    return (uint64_t)EXCHANGE_STATE | (uint64_t)block << MESSAGE_BITS | message;
}

static uint32_t chunks_in(const struct mu_transfer *t, uint32_t block)
{
    uint32_t left = t->config.model->chunk_count - block * BLOCK_CHUNKS;
    return left < BLOCK_CHUNKS ? left : BLOCK_CHUNKS;
}

/* Message `kind * chunks + i` of a block: where its floats are. */
static float *message_data(const struct mu_transfer *t, uint32_t block, uint32_t message, size_t *ret_size_bytes)
{
    uint32_t chunks = chunks_in(t, block);
    struct mu_chunk chunk = mu_model_chunk(t->config.model, block * BLOCK_CHUNKS + message % chunks);
    *ret_size_bytes = chunk.size * sizeof(float);
    return t->config.flats[message / chunks] + chunk.offset;
}

static enum mu_status post_receives(struct mu_transfer *t, uint32_t b, struct mu_error *err)
{
    struct block *block = &t->blocks[b % WINDOW];
    uint32_t count = KINDS * chunks_in(t, b), from = t->config.source_rank;
    enum mu_status status = mu_comm_recv(t->config.group, from, number(b, BLOCK_MESSAGES - 1), &block->table,
                                         sizeof block->table, &block->receives[BLOCK_MESSAGES - 1], err);
    for (uint32_t i = 0; i < count && status == MU_OK; i++) {
        size_t size_bytes;
        float *into = message_data(t, b, i, &size_bytes);
        status = mu_comm_recv(t->config.group, from, number(b, i), into, size_bytes, &block->receives[i], err);
    }
    return status;
}

static enum mu_status check_table(const struct mu_transfer *t, uint32_t b, struct mu_error *err)
{
    const struct table *table = &t->blocks[b % WINDOW].table;
    if (table->magic == TABLE_MAGIC && table->step == t->config.step && table->block == b &&
        table->chunk_count == chunks_in(t, b))
        return MU_OK;
    return mu_fail(
        err, MU_ERR_CORRUPT, "rank %u serves block %u of the state of step %llu where block %u of step %llu is wanted",
        t->config.source_rank, table->block, (unsigned long long)table->step, b, (unsigned long long)t->config.step);
}

static enum mu_status receive_block(struct mu_transfer *t, uint32_t b, struct mu_error *err)
{
    struct block *block = &t->blocks[b % WINDOW];
    uint32_t chunks = chunks_in(t, b);
    enum mu_status status = mu_comm_wait(t->config.group, &block->receives[BLOCK_MESSAGES - 1], MU_COMM_FOREVER, err);
    if (status == MU_OK)
        status = check_table(t, b, err);
    for (uint32_t i = 0; i < KINDS * chunks && status == MU_OK; i++) {
        status = mu_comm_wait(t->config.group, &block->receives[i], MU_COMM_FOREVER, err);
        if (status != MU_OK)
            break;
        size_t size_bytes;
        const float *data = message_data(t, b, i, &size_bytes);
        struct mu_hash128 hash = mu_xxh3_128(data, size_bytes), expected = block->table.hashes[i % chunks][i / chunks];
        if (hash.low != expected.low || hash.high != expected.high)
            status = mu_fail(err, MU_ERR_CORRUPT, "state from rank %u: chunk %u does not match its checksum",
                             t->config.source_rank, b * BLOCK_CHUNKS + i % chunks);
    }
    return status;
}

static void fill_table(struct mu_transfer *t, uint32_t b)
{
    struct table *table = &t->blocks[b % WINDOW].table;
    uint32_t chunks = chunks_in(t, b);
    memset(table, 0, sizeof *table);
    table->magic = TABLE_MAGIC;
    table->step = t->config.step;
    table->block = b;
    table->chunk_count = chunks;
    for (uint32_t i = 0; i < KINDS * chunks; i++) {
        size_t size_bytes;
        const float *data = message_data(t, b, i, &size_bytes);
        table->hashes[i % chunks][i / chunks] = mu_xxh3_128(data, size_bytes);
    }
}

static enum mu_status post_sends(struct mu_transfer *t, uint32_t b, struct mu_error *err)
{
    struct block *block = &t->blocks[b % WINDOW];
    uint32_t count = KINDS * chunks_in(t, b);
    enum mu_status status = MU_OK;
    for (uint32_t k = 0; k < t->config.serve_count && status == MU_OK; k++) {
        struct mu_comm_request *requests = &block->sends[k * BLOCK_MESSAGES];
        uint32_t to = t->config.serve_ranks[k];
        status = mu_comm_send(t->config.group, to, number(b, BLOCK_MESSAGES - 1), &block->table, sizeof block->table,
                              &requests[BLOCK_MESSAGES - 1], err);
        for (uint32_t i = 0; i < count && status == MU_OK; i++) {
            size_t size_bytes;
            const float *data = message_data(t, b, i, &size_bytes);
            status = mu_comm_send(t->config.group, to, number(b, i), data, size_bytes, &requests[i], err);
        }
    }
    return status;
}

static enum mu_status wait_sends(struct mu_transfer *t, uint32_t b, struct mu_error *err)
{
    struct block *block = &t->blocks[b % WINDOW];
    uint32_t count = KINDS * chunks_in(t, b);
    enum mu_status status = MU_OK;
    for (uint32_t k = 0; k < t->config.serve_count && status == MU_OK; k++) {
        struct mu_comm_request *requests = &block->sends[k * BLOCK_MESSAGES];
        status = mu_comm_wait(t->config.group, &requests[BLOCK_MESSAGES - 1], MU_COMM_FOREVER, err);
        for (uint32_t i = 0; i < count && status == MU_OK; i++)
            status = mu_comm_wait(t->config.group, &requests[i], MU_COMM_FOREVER, err);
    }
    return status;
}

/* Receives of a block are posted one block ahead, into a slot whose sends are over. */
enum mu_status mu_transfer_run(struct mu_transfer *t, struct mu_error *err)
{
    bool receive = t->config.receive;
    if (!receive && t->config.serve_count == 0)
        return MU_OK;
    enum mu_status status = receive ? post_receives(t, 0, err) : MU_OK;
    for (uint32_t b = 0; b < t->block_count && status == MU_OK; b++) {
        if (b + 1 >= WINDOW)
            status = wait_sends(t, b + 1 - WINDOW, err);
        if (status == MU_OK && receive && b + 1 < t->block_count)
            status = post_receives(t, b + 1, err);
        if (status != MU_OK)
            break;
        if (receive)
            status = receive_block(t, b, err);
        else
            fill_table(t, b);
        if (status == MU_OK)
            status = post_sends(t, b, err);
        atomic_fetch_add_explicit(t->config.progress, 1, memory_order_relaxed);
    }
    for (uint32_t b = t->block_count > WINDOW - 1 ? t->block_count - (WINDOW - 1) : 0;
         b < t->block_count && status == MU_OK; b++)
        status = wait_sends(t, b, err);
    return status;
}

enum mu_status mu_transfer_new(const struct mu_transfer_config *config, struct mu_transfer **ret_transfer,
                               struct mu_error *err)
{
    struct mu_transfer *t = calloc(1, sizeof *t);
    if (!t)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to move the state");
    t->config = *config;
    t->block_count = (config->model->chunk_count + BLOCK_CHUNKS - 1) / BLOCK_CHUNKS;
    MU_ASSERT(t->block_count < 1u << (27 - MESSAGE_BITS));
    for (uint32_t i = 0; i < WINDOW; i++) {
        t->blocks[i].sends = calloc((size_t)config->serve_count * BLOCK_MESSAGES + 1, sizeof(struct mu_comm_request));
        if (!t->blocks[i].sends) {
            mu_transfer_free(t);
            return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to move the state to %u ranks", config->serve_count);
        }
    }
    *ret_transfer = t;
    return MU_OK;
}

void mu_transfer_free(struct mu_transfer *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; i < WINDOW; i++)
        free(t->blocks[i].sends);
    free(t);
}
