#include "worker/transfer.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"

enum {
    KINDS = 2,     /* parameters; both moments */
    PARTS_MAX = 2, /* flat spaces of one kind */
    WINDOW = 16,   /* items of a stream that have requests: at most 3 * 16 small messages run ahead of a large one */
    MESSAGE_BITS = 2,
    LOOK_AGAIN_US = 1000, /* while one stream is waited for, the others are looked at so often */
};
#define ASKED      (1ull << 62) /* the exchange before all items */
#define SEAL_MAGIC 0x324556454d554dull

static const struct {
    uint32_t bit, first_flat, parts;
    const char *name;
} kinds[KINDS] = {{MU_MOVE_PARAMS, 0, 1, "parameters"}, {MU_MOVE_MOMENTS, 1, 2, "moments"}};

/* As on the wire; goes after the parts. */
struct seal {
    uint64_t magic, step;
    uint32_t chunk, kind;
    struct mu_hash128 hashes[PARTS_MAX];
};
_Static_assert(sizeof(struct seal) == 24 + 16 * PARTS_MAX && sizeof(struct seal) <= MU_COMM_EAGER_SIZE,
               "one small frame without gaps");
_Static_assert(WINDOW *(1 + PARTS_MAX) < MU_COMM_EAGER_HELD, "what overtakes a large part never stops the connection");

/* One chunk of one kind under way. */
struct item {
    uint32_t chunk, kind;
    bool kept; /* the receiver has it: no parts */
    struct seal seal;
    struct mu_hash128 moved[PARTS_MAX]; /* of the parts as they came or went */
    struct mu_comm_request parts[PARTS_MAX], sealed;
};

/* Runs of one kind in one stream, ascending. */
struct queue {
    const struct mu_chunk_run *runs;
    uint32_t run_count;
    uint32_t run, chunk_in_run; /* the next one */
};

/* Everything between this rank and one other, one way, in ascending order of (chunk, kind). */
struct stream {
    uint32_t peer;
    bool incoming;
    struct queue queues[KINDS];
    uint64_t total, posted, sealed, finished; /* items */
    uint8_t *kept;                            /* a bit for each of them, in order: the receiver has it already */
    struct mu_comm_request asked;             /* `kept` on its way from the receiver to the sender */
    struct item items[WINDOW];
};

struct mu_transfer {
    struct mu_transfer_config config;
    struct stream *streams;
    uint32_t stream_count;
    struct mu_chunk_run *runs; /* of all queues */
    uint8_t *pending;          /* [chunks]: bit 1 << kind while it is still to be received */
};

/* ---- who moves what ---- */

/* One move, one kind. */
struct part {
    uint32_t peer, kind;
    bool incoming;
    struct mu_chunk_run run;
};

static int by_stream(const void *a, const void *b)
{
    const struct part *x = a, *y = b;
    if (x->incoming != y->incoming)
        return x->incoming ? -1 : 1;
    if (x->peer != y->peer)
        return x->peer < y->peer ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    return x->run.first < y->run.first ? -1 : x->run.first > y->run.first;
}

static enum mu_status check_move(const struct mu_transfer_config *config, const struct mu_move *move,
                                 struct mu_error *err)
{
    uint32_t chunks = config->model->chunk_count;
    if (move->from == move->to || move->kinds == 0 || (move->kinds & ~(uint32_t)(MU_MOVE_PARAMS | MU_MOVE_MOMENTS)) ||
        move->run.count == 0 || move->run.first >= chunks || move->run.count > chunks - move->run.first)
        return mu_fail(err, MU_ERR_INVALID,
                       "a move of kinds %u of %u chunks from chunk %u on, from rank %u to rank %u, is not allowed: the "
                       "model has %u chunks",
                       move->kinds, move->run.count, move->run.first, move->from, move->to, chunks);
    if (!config->group)
        return mu_fail(err, MU_ERR_INVALID, "a move from rank %u to rank %u is not allowed: this rank is alone",
                       move->from, move->to);
    return MU_OK;
}

/* The moves of this rank, kind by kind, in order of streams. */
static enum mu_status list_parts(const struct mu_transfer_config *config, struct part **ret_parts, size_t *ret_count,
                                 struct mu_error *err)
{
    struct part *parts = calloc((size_t)config->move_count * KINDS + 1, sizeof *parts);
    size_t count = 0;
    enum mu_status status =
        parts ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u moves of state", config->move_count);
    for (uint32_t i = 0; i < config->move_count && status == MU_OK; i++) {
        const struct mu_move *move = &config->moves[i];
        if (move->from != config->rank && move->to != config->rank)
            continue;
        status = check_move(config, move, err);
        bool incoming = move->to == config->rank;
        for (uint32_t kind = 0; kind < KINDS && status == MU_OK; kind++) {
            if (move->kinds & kinds[kind].bit)
                parts[count++] = (struct part){
                    .peer = incoming ? move->from : move->to, .kind = kind, .incoming = incoming, .run = move->run};
        }
    }
    if (status != MU_OK) {
        free(parts);
        return status;
    }
    qsort(parts, count, sizeof *parts, by_stream);
    *ret_parts = parts;
    *ret_count = count;
    return MU_OK;
}

static enum mu_status expect_run(struct mu_transfer *t, const struct part *part, struct mu_error *err)
{
    uint8_t bit = (uint8_t)(1u << part->kind);
    for (uint32_t i = 0; i < part->run.count; i++) {
        uint8_t *pending = &t->pending[part->run.first + i];
        if (*pending & bit)
            return mu_fail(err, MU_ERR_INVALID, "chunk %u (%s) would come twice, the second time from rank %u",
                           part->run.first + i, kinds[part->kind].name, part->peer);
        *pending |= bit;
    }
    return MU_OK;
}

static bool same_stream(const struct part *a, const struct part *b)
{
    return a->incoming == b->incoming && a->peer == b->peer;
}

static enum mu_status make_streams(struct mu_transfer *t, const struct part *parts, size_t count, struct mu_error *err)
{
    uint32_t stream_count = 0;
    for (size_t i = 0; i < count; i++)
        stream_count += i == 0 || !same_stream(&parts[i - 1], &parts[i]);
    t->streams = calloc(stream_count + 1u, sizeof *t->streams);
    t->runs = calloc(count + 1, sizeof *t->runs);
    t->pending = calloc(t->config.model->chunk_count + 1u, 1);
    if (!t->streams || !t->runs || !t->pending)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to move state between %u pairs of ranks", stream_count);
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < count && status == MU_OK; i++) {
        const struct part *part = &parts[i], *before = i > 0 ? part - 1 : NULL;
        bool is_new = !before || !same_stream(before, part);
        t->stream_count += is_new;
        struct stream *stream = &t->streams[t->stream_count - 1];
        struct queue *queue = &stream->queues[part->kind];
        stream->peer = part->peer;
        stream->incoming = part->incoming;
        stream->total += part->run.count;
        t->runs[i] = part->run;
        if (queue->run_count++ == 0)
            queue->runs = &t->runs[i];
        else if (part->run.first - before->run.first < before->run.count)
            status = mu_fail(err, MU_ERR_INVALID, "chunk %u (%s) would move twice between this rank and rank %u",
                             part->run.first, kinds[part->kind].name, part->peer);
        if (status == MU_OK && part->incoming)
            status = expect_run(t, part, err);
    }
    return status;
}

enum mu_status mu_transfer_new(const struct mu_transfer_config *config, struct mu_transfer **ret_transfer,
                               struct mu_error *err)
{
    struct part *parts;
    size_t count;
    enum mu_status status = list_parts(config, &parts, &count, err);
    if (status != MU_OK)
        return status;
    struct mu_transfer *t = calloc(1, sizeof *t);
    if (t) {
        t->config = *config;
        status = make_streams(t, parts, count, err);
    } else {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory to move state");
    }
    free(parts);
    if (status != MU_OK) {
        mu_transfer_free(t);
        return status;
    }
    *ret_transfer = t;
    return MU_OK;
}

void mu_transfer_free(struct mu_transfer *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; t->streams && i < t->stream_count; i++)
        free(t->streams[i].kept);
    free(t->streams);
    free(t->runs);
    free(t->pending);
    free(t);
}

/* ---- what has come before ---- */

static size_t kept_bytes(const struct stream *stream)
{
    return (size_t)((stream->total + 7) / 8);
}

static bool is_kept(const struct stream *stream, uint64_t index)
{
    return stream->kept[index / 8] >> index % 8 & 1;
}

static bool queue_peek(const struct queue *queue, uint32_t *ret_chunk)
{
    if (queue->run == queue->run_count)
        return false;
    *ret_chunk = queue->runs[queue->run].first + queue->chunk_in_run;
    return true;
}

/* The stream's next item; there is one while posted < total. */
static void stream_peek(const struct stream *stream, uint32_t *ret_chunk, uint32_t *ret_kind)
{
    uint32_t chunks[KINDS];
    bool any = false;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        if (queue_peek(&stream->queues[kind], &chunks[kind]) && (!any || chunks[kind] < *ret_chunk)) {
            any = true;
            *ret_chunk = chunks[kind];
            *ret_kind = kind;
        }
    }
    MU_ASSERT(any);
}

static void queue_pop(struct queue *queue)
{
    if (++queue->chunk_in_run == queue->runs[queue->run].count) {
        queue->run++;
        queue->chunk_in_run = 0;
    }
}

/* The receiver goes through the stream once, before it begins. */
static void list_kept(const struct mu_transfer *t, struct stream *stream)
{
    struct queue queues[KINDS];
    memcpy(queues, stream->queues, sizeof queues);
    for (uint64_t index = 0; index < stream->total; index++) {
        uint32_t chunk = 0, kind = 0;
        stream_peek(stream, &chunk, &kind);
        queue_pop(&stream->queues[kind]);
        if (t->config.arrived && t->config.arrived[chunk] & kinds[kind].bit)
            stream->kept[index / 8] = (uint8_t)(stream->kept[index / 8] | 1u << index % 8);
    }
    memcpy(stream->queues, queues, sizeof queues);
}

static enum mu_status ask(struct mu_transfer *t, struct stream *stream, struct mu_error *err)
{
    stream->kept = calloc(1, kept_bytes(stream) + 1);
    if (!stream->kept)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to move state");
    if (!stream->incoming)
        return mu_comm_recv(t->config.group, stream->peer, MU_TRANSFER_EXCHANGES | ASKED, stream->kept,
                            kept_bytes(stream), &stream->asked, err);
    list_kept(t, stream);
    return mu_comm_send(t->config.group, stream->peer, MU_TRANSFER_EXCHANGES | ASKED, stream->kept, kept_bytes(stream),
                        &stream->asked, err);
}

/* ---- items ---- */

static float *part_data(const struct mu_transfer *t, const struct item *item, uint32_t part, size_t *ret_size_bytes)
{
    struct mu_chunk chunk = mu_model_chunk(t->config.model, item->chunk);
    *ret_size_bytes = chunk.size * sizeof(float);
    return t->config.flats[kinds[item->kind].first_flat + part] + chunk.offset;
}

static uint64_t number(uint64_t index, uint32_t message)
{
    return MU_TRANSFER_EXCHANGES | index << MESSAGE_BITS | message;
}

/* That travel. */
static uint32_t parts_of(const struct item *item)
{
    return item->kept ? 0 : kinds[item->kind].parts;
}

/* Of a part as it moved, or as it lies here. */
static enum mu_status part_hash(const struct mu_transfer *t, const struct item *item, uint32_t part,
                                struct mu_hash128 *ret_hash, struct mu_error *err)
{
    size_t size_bytes;
    const void *view = NULL;
    if (part < parts_of(item) && !item->parts[part].far) {
        *ret_hash = item->moved[part];
        return MU_OK;
    }
    const float *data = part_data(t, item, part, &size_bytes);
    enum mu_status status = mu_device_read(t->config.device, data, size_bytes, &view);
    if (status != MU_OK)
        return mu_fail(err, status, "%s", mu_device_trouble(t->config.device));
    *ret_hash = mu_xxh3_128(view, size_bytes);
    return MU_OK;
}

/* Requests for the parts of the stream's next item, and for the seal of one that comes. */
static enum mu_status post_item(struct mu_transfer *t, struct stream *stream, struct mu_error *err)
{
    struct mu_comm_group *group = t->config.group;
    uint64_t index = stream->posted++;
    struct item *item = &stream->items[index % WINDOW];
    enum mu_status status = MU_OK;
    stream_peek(stream, &item->chunk, &item->kind);
    queue_pop(&stream->queues[item->kind]);
    item->kept = is_kept(stream, index);
    for (uint32_t part = 0; part < parts_of(item) && status == MU_OK; part++) {
        size_t size_bytes;
        float *data = part_data(t, item, part, &size_bytes);
        struct mu_comm_request *request = &item->parts[part];
        status = stream->incoming
                     ? mu_comm_recv(group, stream->peer, number(index, 1 + part), data, size_bytes, request, err)
                     : mu_comm_send(group, stream->peer, number(index, 1 + part), data, size_bytes, request, err);
        if (status == MU_OK && !request->far)
            mu_comm_hash(request, &item->moved[part]);
    }
    if (status == MU_OK && stream->incoming) {
        stream->sealed++;
        status =
            mu_comm_recv(group, stream->peer, number(index, 0), &item->seal, sizeof item->seal, &item->sealed, err);
    }
    return status;
}

/* The seal of an item whose parts have gone. */
static enum mu_status send_seal(struct mu_transfer *t, struct stream *stream, struct item *item, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    item->seal = (struct seal){.magic = SEAL_MAGIC, .step = t->config.step, .chunk = item->chunk, .kind = item->kind};
    for (uint32_t part = 0; part < kinds[item->kind].parts && status == MU_OK; part++)
        status = part_hash(t, item, part, &item->seal.hashes[part], err);
    return status == MU_OK ? mu_comm_send(t->config.group, stream->peer, number(stream->sealed++, 0), &item->seal,
                                          sizeof item->seal, &item->sealed, err)
                           : status;
}

/* The first request of the item's parts that is not done; NULL: all are. */
static const struct mu_comm_request *part_missing(const struct item *item)
{
    for (uint32_t i = 0; i < parts_of(item); i++) {
        if (!mu_comm_done(&item->parts[i]))
            return &item->parts[i];
    }
    return NULL;
}

/* The first request that the stream's oldest item waits for; NULL: for none, or there is no such item. */
static const struct mu_comm_request *stream_missing(const struct stream *stream)
{
    if (stream->finished == stream->posted)
        return NULL;
    const struct item *item = &stream->items[stream->finished % WINDOW];
    const struct mu_comm_request *part = part_missing(item);
    bool is_sealed = stream->finished < stream->sealed;
    return part || !is_sealed || mu_comm_done(&item->sealed) ? part : &item->sealed;
}

static enum mu_status verify_item(const struct mu_transfer *t, const struct stream *stream, const struct item *item,
                                  struct mu_error *err)
{
    const struct seal *seal = &item->seal;
    if (seal->magic != SEAL_MAGIC || seal->step != t->config.step || seal->chunk != item->chunk ||
        seal->kind != item->kind)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "rank %u serves chunk %u (kind %u) of step %llu where chunk %u (kind %u) of step %llu is wanted",
                       stream->peer, seal->chunk, seal->kind, (unsigned long long)seal->step, item->chunk, item->kind,
                       (unsigned long long)t->config.step);
    for (uint32_t part = 0; part < kinds[item->kind].parts; part++) {
        struct mu_hash128 hash = {0}, expected = seal->hashes[part];
        enum mu_status status = part_hash(t, item, part, &hash, err);
        if (status != MU_OK)
            return status;
        if (hash.low != expected.low || hash.high != expected.high)
            return mu_fail(err, MU_ERR_CORRUPT, "state from rank %u: chunk %u (%s) does not match its checksum",
                           stream->peer, item->chunk, kinds[item->kind].name);
    }
    return MU_OK;
}

/* From here on the chunk can go on to others. One that does not match has not arrived, whatever was believed. */
static enum mu_status accept_item(struct mu_transfer *t, const struct stream *stream, const struct item *item,
                                  struct mu_error *err)
{
    uint8_t none = 0, *arrived = t->config.arrived ? &t->config.arrived[item->chunk] : &none;
    enum mu_status status = verify_item(t, stream, item, err);
    *arrived &= (uint8_t)~kinds[item->kind].bit;
    if (status != MU_OK)
        return status;
    *arrived |= (uint8_t)kinds[item->kind].bit;
    t->pending[item->chunk] &= (uint8_t) ~(1u << item->kind);
    return MU_OK;
}

/* ---- the run ---- */

/* Finishes, seals and posts whatever the stream can; *moved if that was anything. */
static enum mu_status turn(struct mu_transfer *t, struct stream *stream, bool *moved, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    while (status == MU_OK && stream->sealed < stream->posted) {
        struct item *item = &stream->items[stream->sealed % WINDOW];
        if (part_missing(item))
            break;
        status = send_seal(t, stream, item, err);
        *moved = true;
    }
    while (status == MU_OK && stream->finished < stream->sealed && !stream_missing(stream)) {
        if (stream->incoming)
            status = accept_item(t, stream, &stream->items[stream->finished % WINDOW], err);
        stream->finished++;
        atomic_fetch_add_explicit(t->config.progress, 1, memory_order_relaxed);
        *moved = true;
    }
    bool begun = stream->incoming || mu_comm_done(&stream->asked);
    while (begun && status == MU_OK && stream->posted < stream->total && stream->posted - stream->finished < WINDOW) {
        uint32_t chunk = 0, kind = 0;
        stream_peek(stream, &chunk, &kind);
        if (!stream->incoming && t->pending[chunk] & 1u << kind)
            break; /* it comes from somebody else first */
        status = post_item(t, stream, err);
        *moved = true;
    }
    return status;
}

/* Sleeps until the oldest request of some stream is done, but not for long: any other may be the one that lets things
 * go on. */
static enum mu_status wait_some(struct mu_transfer *t, struct mu_error *err)
{
    const struct mu_comm_request *missing = NULL;
    for (uint32_t i = 0; i < t->stream_count && !missing; i++) { /* incoming streams come first */
        const struct stream *stream = &t->streams[i];
        missing = stream_missing(stream);
        if (!missing && !mu_comm_done(&stream->asked))
            missing = &stream->asked;
    }
    MU_ASSERT(missing);
    enum mu_status status = mu_comm_wait(t->config.group, missing, mu_clock_mono_us() + LOOK_AGAIN_US, err);
    return status == MU_ERR_TIMEOUT ? MU_OK : status;
}

enum mu_status mu_transfer_run(struct mu_transfer *t, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < t->stream_count && status == MU_OK; i++)
        status = ask(t, &t->streams[i], err);
    for (bool open = t->stream_count > 0; open && status == MU_OK;) {
        bool moved = false;
        open = false;
        for (uint32_t i = 0; i < t->stream_count && status == MU_OK; i++) {
            struct stream *stream = &t->streams[i];
            if (stream->finished == stream->total)
                continue;
            status = turn(t, stream, &moved, err);
            open |= stream->finished < stream->total;
        }
        if (status == MU_OK && open)
            status = moved ? mu_comm_group_progress(t->config.group, err) : wait_some(t, err);
    }
    return status;
}
