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

enum note_kind { NOTE_CHUNK = 1, NOTE_UPDATE, NOTE_PARAMS, NOTE_END };

/* As on the wire: goes before what belongs to the item. Made by `note_of`, which leaves no gap undefined. */
struct note {
    uint64_t magic, step;
    uint32_t kind, count;            /* CHUNK: how many came before it; else: how many there are */
    struct mu_step_result result;    /* UPDATE */
    struct mu_hash128 hashes[FLATS]; /* CHUNK */
};
_Static_assert(sizeof(struct note) <= MU_COMM_EAGER_SIZE, "one small message");

/* The next chunk's place in the list of moves. */
struct place {
    uint32_t move, in_run;
};

struct item {
    struct note note;
    uint32_t kinds;                             /* CHUNK */
    struct mu_chunk chunk;                      /* CHUNK */
    struct mu_comm_request requests[1 + FLATS]; /* the note's, then those of a chunk */
    bool posted;                                /* taker: what belongs to it is asked for */
};

struct mu_feed {
    struct mu_feed_config config;
    uint64_t number, turns;
    struct mu_comm_group *group;
    uint32_t chunk_count;          /* of all moves */
    struct place place;            /* of the next chunk to send, or to ask for */
    uint32_t count;                /* chunks sent; received and verified */
    uint32_t asked;                /* taker: chunks asked for */
    uint64_t first, next;          /* items: not yet finished, not yet begun */
    uint64_t step;                 /* taker: of the chunks that are here */
    bool owed;                     /* new parameters are, since the last update */
    bool gradient_out, params_out; /* giver: requests of the last update may be under way */
    struct item items[WINDOW];
    struct mu_comm_request *ranges; /* [move_count]: what an update changes: the gradient, or the parameters */
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
                                         .peer_count = 1,
                                         .encrypted = config->encrypted};
    memcpy(group.secret, config->order->secret, sizeof group.secret);
    return mu_comm_open(config->comm, &group, config->deadline_us, &feed->group, err);
}

enum mu_status mu_feed_new(const struct mu_feed_config *config, struct mu_feed **ret_feed, struct mu_error *err)
{
    MU_ASSERT(config->order->number & MU_COMM_ASIDE);
    struct mu_feed *feed = calloc(1, sizeof *feed);
    if (!feed || !(feed->ranges = calloc(config->move_count + 1u, sizeof *feed->ranges))) {
        free(feed);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to feed %u runs of chunks", config->move_count);
    }
    feed->config = *config;
    feed->number = config->order->number + config->order->part;
    for (uint32_t i = 0; i < config->move_count; i++)
        feed->chunk_count += config->moves[i].run.count;
    enum mu_status status = config->move_count + 1 < STRIDE
                                ? open_group(feed, err)
                                : mu_fail(err, MU_ERR_LIMIT, "%u runs of chunks are more than a feed can have: %d",
                                          config->move_count, STRIDE - 2);
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

/* The next chunk, in order, and how it is fed. */
static void step_chunk(struct mu_feed *feed, struct item *item)
{
    const struct mu_move *move = &feed->config.moves[feed->place.move];
    item->chunk = mu_model_chunk(feed->config.model, move->run.first + feed->place.in_run);
    item->kinds = move->kinds;
    if (++feed->place.in_run == move->run.count) {
        feed->place.move++;
        feed->place.in_run = 0;
    }
}

static bool is_fed(const struct item *item, uint32_t flat)
{
    return item->kinds & (flat == 0 ? MU_MOVE_PARAMS : MU_MOVE_MOMENTS);
}

bool mu_feed_range(const struct mu_feed *feed, uint32_t index, struct mu_feed_range *ret_range)
{
    uint32_t before = 0;
    for (uint32_t i = 0; i < index && i < feed->config.move_count; i++)
        before += feed->config.moves[i].run.count;
    if (index >= feed->config.move_count || before >= feed->count)
        return false;
    const struct mu_chunk_run *run = &feed->config.moves[index].run;
    uint32_t here = feed->count - before < run->count ? feed->count - before : run->count;
    struct mu_chunk head = mu_model_chunk(feed->config.model, run->first);
    struct mu_chunk tail = mu_model_chunk(feed->config.model, run->first + here - 1);
    *ret_range =
        (struct mu_feed_range){feed->config.moves[index].kinds, head.offset, tail.offset + tail.size - head.offset};
    return true;
}

uint64_t mu_feed_turns(const struct mu_feed *feed)
{
    return feed->turns;
}

/* The next range from *index on that an update changes by its gradient (`replayed`), or as parameters. */
static bool next_range(const struct mu_feed *feed, bool replayed, uint32_t *index, struct mu_feed_range *ret_range)
{
    for (; mu_feed_range(feed, *index, ret_range); ++*index) {
        if (replayed == ((ret_range->kinds & MU_MOVE_MOMENTS) != 0))
            return true;
    }
    return false;
}

/* Something is fed without moments, and an update has changed it. */
static bool owes_params(const struct mu_feed *feed, bool finite)
{
    struct mu_feed_range range;
    return finite && next_range(feed, false, &(uint32_t){0}, &range);
}

static uint64_t exchange_of(uint64_t item, uint32_t index)
{
    return item * STRIDE + 1 + index;
}

/* All ranges of that kind have moved. */
static bool ranges_done(const struct mu_feed *feed, bool replayed)
{
    struct mu_feed_range range;
    for (uint32_t i = 0; next_range(feed, replayed, &i, &range); i++) {
        if (!mu_comm_done(&feed->ranges[i]))
            return false;
    }
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
    feed->turns++;
    return mu_comm_send(feed->group, TAKER, feed->next * STRIDE, &item->note, sizeof item->note, &item->requests[0],
                        err);
}

/* The item's first request that is not done; NULL: all are. */
static const struct mu_comm_request *item_missing(const struct item *item)
{
    if (!mu_comm_done(&item->requests[0]))
        return &item->requests[0];
    for (uint32_t i = 0; i < FLATS && item->note.kind == NOTE_CHUNK; i++) {
        if (is_fed(item, i) && !mu_comm_done(&item->requests[1 + i]))
            return &item->requests[1 + i];
    }
    return NULL;
}

static bool has_room(struct mu_feed *feed)
{
    while (feed->first < feed->next && !item_missing(item_at(feed, feed->first)))
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
    note_of(item, NOTE_CHUNK, step, feed->count);
    step_chunk(feed, item);
    size_t size_bytes = item->chunk.size * sizeof(float);
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < FLATS && status == MU_OK; i++)
        if (is_fed(item, i))
            status = hash_chunk(feed, i, &item->chunk, &item->note.hashes[i], err);
    if (status == MU_OK)
        status = send_note(feed, item, err);
    for (uint32_t i = 0; i < FLATS && status == MU_OK; i++)
        if (is_fed(item, i))
            status = mu_comm_send(feed->group, TAKER, exchange_of(feed->next, i),
                                  feed->config.flats[i] + item->chunk.offset, size_bytes, &item->requests[1 + i], err);
    feed->next++;
    feed->count++;
    return status;
}

enum mu_status mu_feed_pump(struct mu_feed *feed, uint64_t step, struct mu_error *err)
{
    enum mu_status status = mu_comm_group_progress(feed->group, err);
    if (!mu_comm_group_ready(feed->group) || feed->owed)
        return status;
    while (status == MU_OK && feed->count < feed->chunk_count && has_room(feed))
        status = send_chunk(feed, step, err);
    return status;
}

static uint64_t patience_us(void)
{
    return mu_clock_mono_us() + MU_FEED_PATIENCE_MS * 1000ull;
}

/* Ranges that were never sent have no group: chunks that were sent since do not belong to the update. */
static enum mu_status wait_ranges(struct mu_feed *feed, bool replayed, bool *out, struct mu_error *err)
{
    struct mu_feed_range range;
    uint64_t until_us = patience_us();
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; *out && status == MU_OK && next_range(feed, replayed, &i, &range); i++) {
        if (feed->ranges[i].group)
            status = mu_comm_wait(feed->group, &feed->ranges[i], until_us, err);
    }
    *out = false;
    return status;
}

/* Until every item has left; then there is room for more. */
static enum mu_status flush(struct mu_feed *feed, struct mu_error *err)
{
    uint64_t until_us = patience_us();
    enum mu_status status = MU_OK;
    for (const struct mu_comm_request *missing; feed->first < feed->next && status == MU_OK;) {
        if ((missing = item_missing(item_at(feed, feed->first))))
            status = mu_comm_wait(feed->group, missing, until_us, err);
        else
            feed->first++;
    }
    return status == MU_OK ? wait_ranges(feed, false, &feed->params_out, err) : status;
}

static enum mu_status send_ranges(struct mu_feed *feed, const float *from, bool replayed, bool *out,
                                  struct mu_error *err)
{
    struct mu_feed_range range;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; status == MU_OK && next_range(feed, replayed, &i, &range); i++) {
        *out = true;
        status = mu_comm_send(feed->group, TAKER, exchange_of(feed->next, i), from + range.offset,
                              range.size * sizeof(float), &feed->ranges[i], err);
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
    if (status == MU_OK && result->finite)
        status = send_ranges(feed, feed->config.gradient, true, &feed->gradient_out, err);
    feed->owed = owes_params(feed, result->finite);
    feed->step = result->step + 1;
    feed->next++;
    return status;
}

enum mu_status mu_feed_params(struct mu_feed *feed, struct mu_error *err)
{
    if (!feed->owed)
        return MU_OK;
    struct item *item = item_at(feed, feed->next);
    note_of(item, NOTE_PARAMS, feed->step, feed->count);
    enum mu_status status = send_note(feed, item, err);
    if (status == MU_OK)
        status = send_ranges(feed, feed->config.flats[0], false, &feed->params_out, err);
    feed->owed = false;
    feed->next++;
    return status;
}

enum mu_status mu_feed_drain(struct mu_feed *feed, struct mu_error *err)
{
    return wait_ranges(feed, true, &feed->gradient_out, err);
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
        feed->turns++;
    }
    return status;
}

static enum mu_status ask_for_chunk(struct mu_feed *feed, uint64_t index, struct item *item, struct mu_error *err)
{
    const struct mu_feed_config *config = &feed->config;
    step_chunk(feed, item);
    enum mu_status status =
        config->reserve ? config->reserve(config->reserve_ctx, &item->chunk, item->kinds, err) : MU_OK;
    for (uint32_t i = 0; i < FLATS && status == MU_OK; i++)
        if (is_fed(item, i))
            status = mu_comm_recv(feed->group, GIVER, exchange_of(index, i), config->flats[i] + item->chunk.offset,
                                  item->chunk.size * sizeof(float), &item->requests[1 + i], err);
    item->posted = true;
    feed->asked++;
    feed->turns++;
    return status;
}

/* Chunks lie beside each other: as many as have been announced come at once, also those beyond the next update. */
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
        status = ask_for_chunk(feed, k, item, err);
    }
    return status;
}

static void finish_item(struct mu_feed *feed)
{
    feed->first++;
    feed->turns++;
}

static enum mu_status take_chunk(struct mu_feed *feed, struct item *item, enum mu_feed_event *ret_event,
                                 struct mu_error *err)
{
    if (item_missing(item))
        return MU_OK;
    if (feed->count == 0)
        feed->step = item->note.step;
    if (item->note.step != feed->step || feed->owed)
        return out_of_order(feed, &item->note, err);
    for (uint32_t i = 0; i < FLATS; i++) {
        struct mu_hash128 hash;
        enum mu_status status = is_fed(item, i) ? hash_chunk(feed, i, &item->chunk, &hash, err) : MU_OK;
        if (status != MU_OK)
            return status;
        if (!is_fed(item, i))
            continue;
        if (memcmp(&hash, &item->note.hashes[i], sizeof hash) != 0)
            return mu_fail(err, MU_ERR_CORRUPT, "chunk %u of a feed does not match its checksum", feed->count);
    }
    feed->count++;
    finish_item(feed);
    *ret_event = feed->count == feed->chunk_count ? MU_FEED_EV_LIVE : MU_FEED_EV_MORE;
    return MU_OK;
}

/* Only the first item is looked at: the gradient buffer is free once the update before is made. */
static enum mu_status ask_for_ranges(struct mu_feed *feed, struct item *item, float *into, bool replayed,
                                     struct mu_error *err)
{
    struct mu_feed_range range;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; !item->posted && status == MU_OK && next_range(feed, replayed, &i, &range); i++) {
        feed->turns++;
        status = mu_comm_recv(feed->group, GIVER, exchange_of(feed->first, i), into + range.offset,
                              range.size * sizeof(float), &feed->ranges[i], err);
    }
    item->posted = true;
    return status;
}

static enum mu_status take_update(struct mu_feed *feed, struct item *item, enum mu_feed_event *ret_event,
                                  struct mu_error *err)
{
    bool finite = item->note.result.finite;
    if (item->note.step != feed->step || item->note.result.step != feed->step || item->note.count != feed->count ||
        feed->owed)
        return out_of_order(feed, &item->note, err);
    enum mu_status status = finite ? ask_for_ranges(feed, item, feed->config.gradient, true, err) : MU_OK;
    if (status == MU_OK && (!finite || ranges_done(feed, true)))
        *ret_event = MU_FEED_EV_UPDATE;
    return status;
}

static enum mu_status take_params(struct mu_feed *feed, struct item *item, enum mu_feed_event *ret_event,
                                  struct mu_error *err)
{
    if (!feed->owed || item->note.step != feed->step || item->note.count != feed->count)
        return out_of_order(feed, &item->note, err);
    enum mu_status status = ask_for_ranges(feed, item, feed->config.flats[0], false, err);
    if (status != MU_OK || !ranges_done(feed, false))
        return status;
    feed->owed = false;
    finish_item(feed);
    *ret_event = MU_FEED_EV_MORE;
    return MU_OK;
}

static enum mu_status take_end(struct mu_feed *feed, struct item *item, enum mu_feed_event *ret_event,
                               struct mu_step_result *ret_result, struct mu_error *err)
{
    if (item->note.step != feed->step || feed->owed || item->note.count != feed->chunk_count ||
        feed->count != feed->chunk_count)
        return out_of_order(feed, &item->note, err);
    ret_result->step = feed->step;
    *ret_event = MU_FEED_EV_END;
    return MU_OK;
}

static enum mu_status take_item(struct mu_feed *feed, struct item *item, enum mu_feed_event *ret_event,
                                struct mu_step_result *ret_result, struct mu_error *err)
{
    *ret_result = item->note.result;
    switch (item->note.kind) {
    case NOTE_CHUNK:
        return take_chunk(feed, item, ret_event, err);
    case NOTE_UPDATE:
        return take_update(feed, item, ret_event, err);
    case NOTE_PARAMS:
        return take_params(feed, item, ret_event, err);
    case NOTE_END:
        return take_end(feed, item, ret_event, ret_result, err);
    default:
        return out_of_order(feed, &item->note, err);
    }
}

enum mu_status mu_feed_take(struct mu_feed *feed, enum mu_feed_event *ret_event, struct mu_step_result *ret_result,
                            struct mu_error *err)
{
    *ret_event = MU_FEED_EV_NONE;
    enum mu_status status = ask_for_notes(feed, err);
    if (status == MU_OK)
        status = ask_for_chunks(feed, err);
    struct item *item = item_at(feed, feed->first);
    if (status == MU_OK && mu_comm_done(&item->requests[0]))
        status = take_item(feed, item, ret_event, ret_result, err);
    if (status == MU_OK && *ret_event == MU_FEED_EV_NONE)
        status = mu_comm_group_progress(feed->group, err);
    return status;
}

void mu_feed_applied(struct mu_feed *feed)
{
    feed->owed = owes_params(feed, item_at(feed, feed->first)->note.result.finite);
    feed->step++;
    finish_item(feed);
}
