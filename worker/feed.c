#include "worker/feed.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"

enum {
    GIVER = 0, /* ranks of the connection */
    TAKER = 1,
    FLATS = 3,
    WINDOW = 16,   /* items under way */
    STRIDE = 4096, /* exchange numbers of one item: its note, then what belongs to it */
};
#define NOTE_MAGIC 0x444545464d554dull

enum note_kind { NOTE_CHUNK = 1, NOTE_UPDATE, NOTE_END };

/* As on the wire: goes before what belongs to the item. Made by `note_of`, which leaves no gap undefined. */
struct note {
    uint64_t magic, step;
    uint32_t kind, count;            /* CHUNK: how many came before it; else: how many there are */
    struct mu_step_result result;    /* UPDATE */
    struct mu_hash128 hashes[FLATS]; /* CHUNK */
};
_Static_assert(sizeof(struct note) <= MU_COMM_EAGER_SIZE, "one small message");

struct item {
    struct note note;
    struct mu_comm_request requests[1 + FLATS]; /* the note's, then those of a chunk */
    bool posted;                                /* taker: what belongs to it is asked for */
};

struct mu_feed {
    struct mu_feed_config config;
    uint64_t number;
    struct mu_comm_group *group;
    uint32_t chunk_count; /* of the share */
    uint32_t run, in_run; /* the next chunk: its run, and how many of the run came before */
    uint32_t count;       /* chunks sent; received and verified */
    uint32_t asked;       /* taker: chunks asked for */
    uint64_t first, next; /* items: not yet finished, not yet begun */
    uint64_t step;        /* taker: of the chunks that are here */
    bool gradient_out;    /* giver: requests of the last update may be under way */
    struct item items[WINDOW];
    struct mu_comm_request *ranges; /* [run_count]: the gradient of an update */
};

static struct item *item_at(struct mu_feed *feed, uint64_t index)
{
    return &feed->items[index % WINDOW];
}

static enum mu_status open_group(struct mu_feed *feed, struct mu_error *err)
{
    const struct mu_feed_config *config = &feed->config;
    bool give = config->order->role == MU_FEED_GIVE;
    struct mu_comm_peer peer = {
        .rank = give ? TAKER : GIVER, .incarnation = config->order->other, .address = config->order->address};
    struct mu_comm_group_config group = {.generation = feed->number,
                                         .rank = give ? GIVER : TAKER,
                                         .world = 2,
                                         .incarnation = config->incarnation,
                                         .peers = &peer,
                                         .peer_count = 1};
    memcpy(group.secret, config->order->secret, sizeof group.secret);
    return mu_comm_open(config->comm, &group, config->deadline_us, &feed->group, err);
}

enum mu_status mu_feed_new(const struct mu_feed_config *config, struct mu_feed **ret_feed, struct mu_error *err)
{
    MU_ASSERT(config->run_count < STRIDE && config->order->number & MU_COMM_ASIDE);
    struct mu_feed *feed = calloc(1, sizeof *feed);
    if (!feed || !(feed->ranges = calloc(config->run_count + 1u, sizeof *feed->ranges))) {
        free(feed);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to feed %u runs of chunks", config->run_count);
    }
    feed->config = *config;
    feed->number = config->order->number;
    for (uint32_t i = 0; i < config->run_count; i++)
        feed->chunk_count += config->runs[i].count;
    enum mu_status status = open_group(feed, err);
    feed->config.order = NULL; /* the caller's */
    if (status != MU_OK) {
        mu_feed_free(feed);
        return status;
    }
    *ret_feed = feed;
    return MU_OK;
}

void mu_feed_free(struct mu_feed *feed)
{
    if (!feed)
        return;
    mu_comm_group_close(feed->group);
    free(feed->ranges);
    free(feed);
}

/* The next chunk of the share, in order. */
static struct mu_chunk step_chunk(struct mu_feed *feed)
{
    const struct mu_chunk_run *run = &feed->config.runs[feed->run];
    struct mu_chunk chunk = mu_model_chunk(feed->config.model, run->first + feed->in_run);
    if (++feed->in_run == run->count) {
        feed->run++;
        feed->in_run = 0;
    }
    return chunk;
}

bool mu_feed_range(const struct mu_feed *feed, uint32_t index, uint64_t *ret_offset, uint64_t *ret_size)
{
    uint32_t before = 0;
    for (uint32_t i = 0; i < index && i < feed->config.run_count; i++)
        before += feed->config.runs[i].count;
    if (index >= feed->config.run_count || before >= feed->count)
        return false;
    const struct mu_chunk_run *run = &feed->config.runs[index];
    uint32_t here = feed->count - before < run->count ? feed->count - before : run->count;
    struct mu_chunk head = mu_model_chunk(feed->config.model, run->first);
    struct mu_chunk tail = mu_model_chunk(feed->config.model, run->first + here - 1);
    *ret_offset = head.offset;
    *ret_size = tail.offset + tail.size - head.offset;
    return true;
}

/* ---- giver ---- */

static void note_of(struct item *item, enum note_kind kind, uint64_t step, uint32_t count)
{
    memset(item, 0, sizeof *item);
    item->note.magic = NOTE_MAGIC;
    item->note.kind = kind;
    item->note.step = step;
    item->note.count = count;
}

static enum mu_status send_note(struct mu_feed *feed, struct item *item, struct mu_error *err)
{
    return mu_comm_send(feed->group, TAKER, feed->next * STRIDE, &item->note, sizeof item->note, &item->requests[0],
                        err);
}

static bool has_left(const struct item *item)
{
    uint32_t requests = item->note.kind == NOTE_CHUNK ? 1 + FLATS : 1;
    for (uint32_t i = 0; i < requests; i++) {
        if (!mu_comm_done(&item->requests[i]))
            return false;
    }
    return true;
}

static bool has_room(struct mu_feed *feed)
{
    while (feed->first < feed->next && has_left(item_at(feed, feed->first)))
        feed->first++;
    return feed->next - feed->first < WINDOW;
}

static enum mu_status hash_chunk(const struct mu_feed *feed, uint32_t flat, const struct mu_chunk *chunk,
                                 struct mu_hash128 *ret_hash, struct mu_error *err)
{
    const void *view = NULL;
    size_t size_bytes = chunk->size * sizeof(float);
    enum mu_status status =
        mu_device_peek(feed->config.device, feed->config.flats[flat] + chunk->offset, size_bytes, &view);
    if (status != MU_OK)
        return mu_fail(err, status, "%s", mu_device_trouble(feed->config.device));
    *ret_hash = mu_xxh3_128(view, size_bytes);
    return MU_OK;
}

static enum mu_status send_chunk(struct mu_feed *feed, uint64_t step, struct mu_error *err)
{
    struct item *item = item_at(feed, feed->next);
    struct mu_chunk chunk = step_chunk(feed);
    size_t size_bytes = chunk.size * sizeof(float);
    note_of(item, NOTE_CHUNK, step, feed->count);
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < FLATS && status == MU_OK; i++)
        status = hash_chunk(feed, i, &chunk, &item->note.hashes[i], err);
    if (status == MU_OK)
        status = send_note(feed, item, err);
    for (uint32_t i = 0; i < FLATS && status == MU_OK; i++)
        status = mu_comm_send(feed->group, TAKER, feed->next * STRIDE + 1 + i, feed->config.flats[i] + chunk.offset,
                              size_bytes, &item->requests[1 + i], err);
    feed->next++;
    feed->count++;
    return status;
}

enum mu_status mu_feed_pump(struct mu_feed *feed, uint64_t step, struct mu_error *err)
{
    enum mu_status status = mu_comm_group_progress(feed->group, err);
    if (!mu_comm_group_ready(feed->group))
        return status;
    while (status == MU_OK && feed->count < feed->chunk_count && has_room(feed))
        status = send_chunk(feed, step, err);
    return status;
}

static uint64_t patience_us(void)
{
    return mu_clock_mono_us() + MU_FEED_PATIENCE_MS * 1000ull;
}

/* Until every item has left; then there is room for more. */
static enum mu_status flush(struct mu_feed *feed, struct mu_error *err)
{
    uint64_t until_us = patience_us();
    enum mu_status status = MU_OK;
    for (; feed->first < feed->next && status == MU_OK; feed->first++) {
        struct item *item = item_at(feed, feed->first);
        uint32_t requests = item->note.kind == NOTE_CHUNK ? 1 + FLATS : 1;
        for (uint32_t i = 0; i < requests && status == MU_OK; i++)
            status = mu_comm_wait(feed->group, &item->requests[i], until_us, err);
    }
    return status;
}

enum mu_status mu_feed_update(struct mu_feed *feed, const struct mu_step_result *result, struct mu_error *err)
{
    enum mu_status status = flush(feed, err);
    if (status != MU_OK || feed->count == 0)
        return status;
    struct item *item = item_at(feed, feed->next);
    note_of(item, NOTE_UPDATE, result->step, feed->count);
    item->note.result.step = result->step;
    item->note.result.loss = result->loss;
    item->note.result.grad_norm = result->grad_norm;
    item->note.result.command = result->command;
    item->note.result.finite = result->finite;
    status = send_note(feed, item, err);
    uint64_t offset, size;
    for (uint32_t i = 0; status == MU_OK && result->finite && mu_feed_range(feed, i, &offset, &size); i++) {
        feed->gradient_out = true;
        status = mu_comm_send(feed->group, TAKER, feed->next * STRIDE + 1 + i, feed->config.gradient + offset,
                              size * sizeof(float), &feed->ranges[i], err);
    }
    feed->next++;
    return status;
}

enum mu_status mu_feed_drain(struct mu_feed *feed, struct mu_error *err)
{
    uint64_t offset, size, until_us = patience_us();
    enum mu_status status = MU_OK;
    if (!feed->gradient_out)
        return MU_OK;
    feed->gradient_out = false;
    /* Chunks that were sent since do not belong to it: their ranges' requests are long since done, or were never. */
    for (uint32_t i = 0; status == MU_OK && mu_feed_range(feed, i, &offset, &size); i++) {
        if (feed->ranges[i].group)
            status = mu_comm_wait(feed->group, &feed->ranges[i], until_us, err);
    }
    return status;
}

enum mu_status mu_feed_end(struct mu_feed *feed, uint64_t step, struct mu_error *err)
{
    enum mu_status status = flush(feed, err);
    if (status != MU_OK)
        return status;
    struct item *item = item_at(feed, feed->next);
    note_of(item, NOTE_END, step, feed->count);
    status = send_note(feed, item, err);
    feed->next++;
    return status == MU_OK ? mu_comm_group_progress(feed->group, err) : status; /* who parks sleeps next */
}

/* ---- taker ---- */

static enum mu_status out_of_order(const struct mu_feed *feed, const struct note *note, struct mu_error *err)
{
    return mu_fail(err, MU_ERR_CORRUPT,
                   "item %llu of a feed (kind %u, step %llu, %u chunks) does not follow from what came before: step "
                   "%llu, %u chunks of %u",
                   (unsigned long long)feed->first, note->kind, (unsigned long long)note->step, note->count,
                   (unsigned long long)feed->step, feed->count, feed->chunk_count);
}

/* Receives of notes run ahead of everything else. */
static enum mu_status ask_for_notes(struct mu_feed *feed, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    while (feed->next - feed->first < WINDOW && status == MU_OK) {
        struct item *item = item_at(feed, feed->next);
        memset(item, 0, sizeof *item);
        status = mu_comm_recv(feed->group, GIVER, feed->next * STRIDE, &item->note, sizeof item->note,
                              &item->requests[0], err);
        feed->next++;
    }
    return status;
}

/* Chunks lie beside each other: as many as have been announced come at once, up to the next update. */
static enum mu_status ask_for_chunks(struct mu_feed *feed, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint64_t k = feed->first; k < feed->next && status == MU_OK; k++) {
        struct item *item = item_at(feed, k);
        if (!mu_comm_done(&item->requests[0]))
            break;
        if (item->note.magic != NOTE_MAGIC)
            return out_of_order(feed, &item->note, err);
        if (item->note.kind != NOTE_CHUNK || item->posted)
            continue;
        if (item->note.count != feed->asked || feed->asked == feed->chunk_count)
            return out_of_order(feed, &item->note, err);
        struct mu_chunk chunk = step_chunk(feed);
        for (uint32_t i = 0; i < FLATS && status == MU_OK; i++)
            status = mu_comm_recv(feed->group, GIVER, k * STRIDE + 1 + i, feed->config.flats[i] + chunk.offset,
                                  chunk.size * sizeof(float), &item->requests[1 + i], err);
        item->posted = true;
        feed->asked++;
    }
    return status;
}

static struct mu_chunk chunk_number(const struct mu_feed *feed, uint32_t index)
{
    const struct mu_chunk_run *run = feed->config.runs;
    for (; index >= run->count; run++)
        index -= run->count;
    return mu_model_chunk(feed->config.model, run->first + index);
}

static enum mu_status take_chunk(struct mu_feed *feed, struct item *item, enum mu_feed_event *ret_event,
                                 struct mu_error *err)
{
    if (!has_left(item))
        return MU_OK;
    if (feed->count == 0)
        feed->step = item->note.step;
    if (item->note.step != feed->step)
        return out_of_order(feed, &item->note, err);
    struct mu_chunk chunk = chunk_number(feed, feed->count);
    for (uint32_t i = 0; i < FLATS; i++) {
        struct mu_hash128 hash;
        enum mu_status status = hash_chunk(feed, i, &chunk, &hash, err);
        if (status != MU_OK)
            return status;
        if (memcmp(&hash, &item->note.hashes[i], sizeof hash) != 0)
            return mu_fail(err, MU_ERR_CORRUPT, "chunk %u of a feed does not match its checksum", feed->count);
    }
    feed->count++;
    feed->first++;
    *ret_event = feed->count == feed->chunk_count ? MU_FEED_EV_LIVE : MU_FEED_EV_CHUNK;
    return MU_OK;
}

/* The gradient buffer is free once the update before is made: only the first item is looked at. */
static enum mu_status take_update(struct mu_feed *feed, struct item *item, enum mu_feed_event *ret_event,
                                  struct mu_error *err)
{
    uint64_t offset, size;
    enum mu_status status = MU_OK;
    if (item->note.step != feed->step || item->note.result.step != feed->step || item->note.count != feed->count)
        return out_of_order(feed, &item->note, err);
    for (uint32_t i = 0; !item->posted && item->note.result.finite && mu_feed_range(feed, i, &offset, &size); i++) {
        status = mu_comm_recv(feed->group, GIVER, feed->first * STRIDE + 1 + i, feed->config.gradient + offset,
                              size * sizeof(float), &feed->ranges[i], err);
        if (status != MU_OK)
            return status;
    }
    item->posted = true;
    for (uint32_t i = 0; item->note.result.finite && mu_feed_range(feed, i, &offset, &size); i++) {
        if (!mu_comm_done(&feed->ranges[i]))
            return MU_OK;
    }
    *ret_event = MU_FEED_EV_UPDATE;
    return MU_OK;
}

enum mu_status mu_feed_take(struct mu_feed *feed, enum mu_feed_event *ret_event, struct mu_step_result *ret_result,
                            struct mu_error *err)
{
    *ret_event = MU_FEED_EV_NONE;
    enum mu_status status = ask_for_notes(feed, err);
    if (status == MU_OK)
        status = ask_for_chunks(feed, err);
    struct item *item = item_at(feed, feed->first);
    if (status != MU_OK)
        return status;
    if (mu_comm_done(&item->requests[0])) {
        *ret_result = item->note.result;
        switch (item->note.kind) {
        case NOTE_CHUNK:
            status = take_chunk(feed, item, ret_event, err);
            break;
        case NOTE_UPDATE:
            status = take_update(feed, item, ret_event, err);
            break;
        case NOTE_END:
            if (item->note.step != feed->step || item->note.count != feed->chunk_count ||
                feed->count != feed->chunk_count)
                return out_of_order(feed, &item->note, err);
            ret_result->step = feed->step;
            *ret_event = MU_FEED_EV_END;
            return MU_OK;
        default:
            return out_of_order(feed, &item->note, err);
        }
    }
    if (status == MU_OK && *ret_event == MU_FEED_EV_NONE)
        status = mu_comm_group_progress(feed->group, err);
    return status;
}

void mu_feed_applied(struct mu_feed *feed)
{
    feed->step++;
    feed->first++;
}
