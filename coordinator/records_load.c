/* All records of a store, and whether it is one that this program may read. */
#include "coordinator/records.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char format_word[] = "muster ";

struct load {
    struct mu_wire_arena arena;
    mu_record_fn fn;
    void *arg;
    enum mu_status status;
    struct mu_error *err;
};

static bool load_one(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    struct load *load = arg;
    struct mu_record record;
    mu_wire_arena_reset(&load->arena);
    load->status = mu_record_decode(&load->arena, key, key_bytes, value, value_bytes, &record, load->err);
    if (load->status == MU_OK)
        load->status = load->fn(load->arg, &record, load->err);
    return load->status == MU_OK;
}

static bool count_one(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    (void)key, (void)key_bytes, (void)value, (void)value_bytes;
    *(bool *)arg = true;
    return false;
}

enum mu_status mu_records_check_format(const char *value, size_t value_bytes, struct mu_error *err)
{
    size_t word = sizeof format_word - 1;
    uint64_t version = 0;
    if (value_bytes > word && memcmp(value, format_word, word) == 0 &&
        mu_records_read_epoch(value + word, value_bytes - word, &version) && version >= 1 && version <= MU_STORE_FORMAT)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "data directory: its format is '%.*s', this program reads 'muster 1' to 'muster %d'; use the "
                   "version that wrote it",
                   (int)(value_bytes < 40 ? value_bytes : 40), value, MU_STORE_FORMAT);
}

bool mu_records_read_epoch(const char *value, size_t value_bytes, uint64_t *ret_epoch)
{
    uint64_t number = 0;
    for (size_t i = 0; i < value_bytes; i++) {
        if (value[i] < '0' || value[i] > '9' || i >= 18)
            return false;
        number = 10 * number + (uint64_t)(value[i] - '0');
    }
    *ret_epoch = number;
    return value_bytes > 0;
}

enum mu_status mu_records_write_format(struct mu_store *store, struct mu_error *err)
{
    char value[24];
    struct mu_store_batch batch;
    int length = snprintf(value, sizeof value, "%s%d", format_word, MU_STORE_FORMAT);
    mu_store_batch_init(&batch);
    enum mu_status status = mu_store_batch_put(&batch, MU_FORMAT_KEY, sizeof MU_FORMAT_KEY - 1, value, (size_t)length);
    if (status == MU_OK)
        status = mu_store_write(store, &batch, err);
    else
        mu_fail(err, status, "data directory: no memory");
    mu_store_batch_fini(&batch);
    return status;
}

/* The first open of an empty store writes the format; everything else must have one. An older one is raised: from then
 * on older programs, which do not know all records, refuse it. */
static enum mu_status check_format(struct mu_store *store, struct mu_error *err)
{
    uint8_t *value = NULL;
    size_t value_bytes = 0;
    enum mu_status status = mu_store_get(store, MU_FORMAT_KEY, sizeof MU_FORMAT_KEY - 1, &value, &value_bytes, err);
    if (status == MU_OK) {
        char own[24];
        int length = snprintf(own, sizeof own, "%s%d", format_word, MU_STORE_FORMAT);
        bool current = value_bytes == (size_t)length && memcmp(value, own, value_bytes) == 0;
        status = mu_records_check_format((const char *)value, value_bytes, err);
        free(value);
        return status || current ? status : mu_records_write_format(store, err);
    }
    if (status != MU_ERR_NOT_FOUND)
        return status;
    bool any = false;
    status = mu_store_scan(store, "", 0, NULL, 0, 1, count_one, &any, err);
    if (status)
        return status;
    if (any)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "data directory: it holds a database that is not a coordinator's; choose another directory");
    return mu_records_write_format(store, err);
}

enum mu_status mu_records_load(struct mu_store *store, mu_record_fn fn, void *arg, struct mu_error *err)
{
    enum mu_status status = check_format(store, err);
    struct load load = {.fn = fn, .arg = arg, .err = err};
    mu_wire_arena_init(&load.arena);
    for (int kind = 0; kind < MU_RECORD_KIND_COUNT && status == MU_OK; kind++) {
        status = mu_store_scan(store, mu_record_prefixes[kind], 2, NULL, 0, 0, load_one, &load, err);
        if (status == MU_OK)
            status = load.status;
    }
    mu_wire_arena_fini(&load.arena);
    return status;
}
