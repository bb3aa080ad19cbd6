#include "coordinator/snapshot.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char header[] = "muster snapshot 1\n";
enum { HEADER_BYTES = sizeof header - 1, PAIR_BYTES = 8, CHECKSUM_BYTES = 16, BATCH_BYTES = 8 << 20 };

static void put_u32(uint8_t *out, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        out[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t get_u32(const uint8_t *in)
{
    return in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

static void put_checksum(const uint8_t *data, size_t size_bytes, uint8_t out[CHECKSUM_BYTES])
{
    struct mu_hash128 hash = mu_xxh3_128(data, size_bytes);
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(hash.low >> (8 * i));
        out[8 + i] = (uint8_t)(hash.high >> (8 * i));
    }
}

/* ---- taking ---- */

struct take {
    uint8_t *bytes;
    size_t size, capacity;
    enum mu_status status;
};

static uint8_t *grow(struct take *take, size_t more)
{
    if (more > MU_SNAPSHOT_BYTES_MAX - take->size) {
        take->status = MU_ERR_LIMIT;
        return NULL;
    }
    if (take->size + more > take->capacity) {
        size_t capacity = 2 * (take->size + more);
        uint8_t *bytes = realloc(take->bytes, capacity);
        if (!bytes) {
            take->status = MU_ERR_NO_MEMORY;
            return NULL;
        }
        take->bytes = bytes;
        take->capacity = capacity;
    }
    take->size += more;
    return take->bytes + take->size - more;
}

static bool take_one(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    uint8_t *out = grow(arg, PAIR_BYTES + key_bytes + value_bytes);
    if (!out)
        return false;
    put_u32(out, (uint32_t)key_bytes);
    put_u32(out + 4, (uint32_t)value_bytes);
    memcpy(out + PAIR_BYTES, key, key_bytes);
    if (value_bytes)
        memcpy(out + PAIR_BYTES + key_bytes, value, value_bytes);
    return true;
}

enum mu_status mu_snapshot_take(struct mu_store *store, uint8_t **ret_bytes, size_t *ret_size_bytes,
                                struct mu_error *err)
{
    struct take take = {0};
    uint8_t *out = grow(&take, HEADER_BYTES);
    if (out) {
        memcpy(out, header, HEADER_BYTES);
        enum mu_status status = mu_store_scan(store, "", 0, NULL, 0, 0, take_one, &take, err);
        if (status) {
            free(take.bytes);
            return status;
        }
    }
    if (take.status == MU_OK && (out = grow(&take, PAIR_BYTES + CHECKSUM_BYTES))) {
        memset(out, 0, PAIR_BYTES);
        put_checksum(take.bytes, take.size - CHECKSUM_BYTES, out + PAIR_BYTES);
        *ret_bytes = take.bytes;
        *ret_size_bytes = take.size;
        return MU_OK;
    }
    free(take.bytes);
    return mu_fail(err, take.status, "snapshot: %s", take.status == MU_ERR_LIMIT ? "larger than 1 GiB" : "no memory");
}

/* ---- restoring ---- */

struct restore {
    struct mu_store *store;
    struct mu_store_batch batch;
    struct mu_wire_arena arena;
    uint64_t floor;  /* of the new epoch */
    uint64_t events; /* so far */
    struct mu_snapshot_report report;
};

static enum mu_status bad(struct mu_error *err, const char *what)
{
    return mu_fail(err, MU_ERR_CORRUPT, "snapshot: %s", what);
}

static enum mu_status flush(struct restore *restore, struct mu_error *err)
{
    enum mu_status status = mu_store_write(restore->store, &restore->batch, err);
    mu_store_batch_clear(&restore->batch);
    return status;
}

static enum mu_status put_pair(struct restore *restore, const void *key, size_t key_bytes, const void *value,
                               size_t value_bytes, struct mu_error *err)
{
    enum mu_status status = mu_store_batch_put(&restore->batch, key, key_bytes, value, value_bytes);
    if (status)
        return mu_fail(err, status, "snapshot: a record of %zu bytes does not fit into a batch", value_bytes);
    return restore->batch.size_bytes > BATCH_BYTES ? flush(restore, err) : MU_OK;
}

static enum mu_status put_record(struct restore *restore, const struct mu_record *record, struct mu_error *err)
{
    uint8_t key[MU_RECORD_KEY_SIZE];
    const void *value = NULL;
    size_t key_bytes = mu_record_key(record, key), value_bytes = 0;
    enum mu_status status = mu_record_encode(&restore->arena, record, &value, &value_bytes, err);
    restore->report.records++;
    return status ? status : put_pair(restore, key, key_bytes, value, value_bytes, err);
}

/* Its numbers become those of the epoch. */
static enum mu_status put_raised(struct restore *restore, const struct mu_record *from, struct mu_error *err)
{
    union {
        struct mu_job_record job;
        struct mu_generation_record generation;
        struct mu_event_record event;
    } to;
    struct mu_record record = *from;
    switch (from->kind) {
    case MU_RECORD_JOB:
        to.job = *from->job;
        to.job.generation = to.job.next_checkpoint = to.job.revision = restore->floor;
        to.job.command = (struct mu_command_record){.number = restore->floor};
        record.job = &to.job;
        break;
    case MU_RECORD_GENERATION: /* nobody ever steps in it */
        to.generation = *from->generation;
        to.generation.generation = to.generation.command_base = restore->floor;
        to.generation.go = false;
        record.generation = &to.generation;
        break;
    case MU_RECORD_EVENT: /* the history stays, in its order */
        to.event = *from->event;
        to.event.number = restore->floor + ++restore->events;
        record.event = &to.event;
        break;
    default:
        break;
    }
    return put_record(restore, &record, err);
}

static enum mu_status put_pairs(struct restore *restore, const uint8_t *at, const uint8_t *end, struct mu_error *err)
{
    while (end - at > PAIR_BYTES) {
        size_t key_bytes = get_u32(at), value_bytes = get_u32(at + 4);
        at += PAIR_BYTES;
        if (key_bytes == 0 || key_bytes > (size_t)(end - at) || value_bytes > (size_t)(end - at) - key_bytes)
            return bad(err, "a record does not end where it should");
        enum mu_status status = MU_OK;
        /* 'm': of the store itself, written anew. 'k': join tokens; used ones would be good again. */
        if (at[0] != 'm' && at[0] != MU_TOKEN_KEY_PREFIX[0]) {
            struct mu_record record;
            mu_wire_arena_reset(&restore->arena);
            status = mu_record_decode(&restore->arena, at, key_bytes, at + key_bytes, value_bytes, &record, err);
            if (status == MU_OK)
                status = put_raised(restore, &record, err);
        }
        if (status)
            return status;
        at += key_bytes + value_bytes;
    }
    return at + PAIR_BYTES == end && get_u32(at) == 0 && get_u32(at + 4) == 0 ? MU_OK : bad(err, "it has no end");
}

/* The value of a key of the store itself; NULL: absent. */
static const uint8_t *find_meta(const uint8_t *at, const uint8_t *end, const char *name, size_t *ret_bytes)
{
    while (end - at > PAIR_BYTES) {
        size_t key_bytes = get_u32(at), value_bytes = get_u32(at + 4);
        at += PAIR_BYTES;
        if (key_bytes > (size_t)(end - at) || value_bytes > (size_t)(end - at) - key_bytes)
            return NULL;
        *ret_bytes = value_bytes;
        if (key_bytes == strlen(name) && memcmp(at, name, key_bytes) == 0)
            return at + key_bytes;
        at += key_bytes + value_bytes;
    }
    return NULL;
}

static enum mu_status choose_epoch(const uint8_t *at, const uint8_t *end, uint64_t wanted, uint64_t *ret_epoch,
                                   struct mu_error *err)
{
    size_t value_bytes = 0;
    uint64_t before = 0;
    const uint8_t *value = find_meta(at, end, MU_FORMAT_KEY, &value_bytes);
    if (!value)
        return bad(err, "it is not of a coordinator's store");
    enum mu_status status = mu_records_check_format((const char *)value, value_bytes, err);
    if (status)
        return status;
    value = find_meta(at, end, MU_EPOCH_KEY, &value_bytes);
    if (value && !mu_records_read_epoch((const char *)value, value_bytes, &before))
        return bad(err, "its epoch is not a number");
    if (wanted == 0)
        wanted = before + 1;
    if (wanted <= before || wanted > MU_EPOCH_MAX)
        return mu_fail(err, MU_ERR_INVALID, "epoch %" PRIu64 " is not allowed: %" PRIu64 " (the snapshot's) + 1 to %d",
                       wanted, before, MU_EPOCH_MAX);
    *ret_epoch = wanted;
    return MU_OK;
}

static bool is_not_empty(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    (void)key, (void)key_bytes, (void)value, (void)value_bytes;
    *(bool *)arg = true;
    return false;
}

static enum mu_status judge(const uint8_t *bytes, size_t size_bytes, struct mu_store *store, struct mu_error *err)
{
    bool any = false;
    uint8_t checksum[CHECKSUM_BYTES];
    if (size_bytes < HEADER_BYTES + PAIR_BYTES + CHECKSUM_BYTES || memcmp(bytes, header, 16) != 0)
        return bad(err, "this is not one (it does not begin with 'muster snapshot')");
    if (memcmp(bytes, header, HEADER_BYTES) != 0)
        return bad(err, "its version is not one that this program reads (1); use the version that wrote it");
    put_checksum(bytes, size_bytes - CHECKSUM_BYTES, checksum);
    if (memcmp(checksum, bytes + size_bytes - CHECKSUM_BYTES, CHECKSUM_BYTES) != 0)
        return bad(err, "its checksum is wrong: it was cut off or changed");
    enum mu_status status = mu_store_scan(store, "", 0, NULL, 0, 1, is_not_empty, &any, err);
    if (status == MU_OK && any)
        status = mu_fail(err, MU_ERR_EXISTS, "the data directory holds records already: restore into a new one");
    return status;
}

static enum mu_status finish(struct restore *restore, uint64_t wall_us, struct mu_error *err)
{
    char text[24];
    struct mu_event_record event = {.number = restore->floor + ++restore->events,
                                    .wall_us = wall_us,
                                    .severity = MU_EVENT_WARNING,
                                    .kind = "store_restored"};
    snprintf(event.text, sizeof event.text,
             "the store was restored from a snapshot: epoch %" PRIu64 "; workers that are ahead of it come back with "
             "what they hold",
             restore->report.epoch);
    int length = snprintf(text, sizeof text, "%" PRIu64, restore->report.epoch);
    enum mu_status status = MU_OK;
    if ((status = put_record(restore, &(struct mu_record){.kind = MU_RECORD_EVENT, .event = &event}, err)) ||
        (status = put_pair(restore, MU_EPOCH_KEY, strlen(MU_EPOCH_KEY), text, (size_t)length, err)) ||
        (status = flush(restore, err)))
        return status;
    return mu_records_write_format(restore->store, err);
}

enum mu_status mu_snapshot_restore(const uint8_t *bytes, size_t size_bytes, uint64_t epoch, uint64_t wall_us,
                                   struct mu_store *store, struct mu_snapshot_report *ret_report, struct mu_error *err)
{
    struct restore restore = {.store = store};
    const uint8_t *at = bytes + HEADER_BYTES, *end = bytes + size_bytes - CHECKSUM_BYTES;
    enum mu_status status = judge(bytes, size_bytes, store, err);
    if (status == MU_OK)
        status = choose_epoch(at, end, epoch, &restore.report.epoch, err);
    if (status)
        return status;
    restore.floor = restore.report.epoch << MU_EPOCH_SHIFT;
    mu_store_batch_init(&restore.batch);
    mu_wire_arena_init(&restore.arena);
    if ((status = put_pairs(&restore, at, end, err)) == MU_OK)
        status = finish(&restore, wall_us, err);
    mu_store_batch_fini(&restore.batch);
    mu_wire_arena_fini(&restore.arena);
    if (status == MU_OK)
        *ret_report = restore.report;
    return status;
}
