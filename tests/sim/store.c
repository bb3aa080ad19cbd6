/* The records on disk. Everything here is durable: what is not yet synced waits in the coordinator node's queue. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

enum { EVENTS_KEPT = 64 };

struct mu_sim_store {
    struct mu_record **records; /* all kinds but events */
    uint32_t count, capacity;
    struct mu_record *events[EVENTS_KEPT]; /* by number; older ones are dropped, as the real shell does */
};

struct mu_sim_store *mu_sim_store_new(void)
{
    return mu_sim_alloc(sizeof(struct mu_sim_store));
}

void mu_sim_store_free(struct mu_sim_store *store)
{
    if (!store)
        return;
    for (uint32_t i = 0; i < store->count; i++)
        free(store->records[i]);
    for (uint32_t i = 0; i < EVENTS_KEPT; i++)
        free(store->events[i]);
    free(store->records);
    free(store);
}

static bool same_key(const struct mu_record *a, const struct mu_record *b)
{
    if (a->kind != b->kind)
        return false;
    switch (a->kind) {
    case MU_RECORD_JOB:
        return strcmp(a->job->spec.name, b->job->spec.name) == 0;
    case MU_RECORD_GENERATION:
        return strcmp(a->generation->job, b->generation->job) == 0;
    case MU_RECORD_CHECKPOINT:
        return a->checkpoint->number == b->checkpoint->number && strcmp(a->checkpoint->job, b->checkpoint->job) == 0;
    case MU_RECORD_WORKER:
        return strcmp(a->worker->name, b->worker->name) == 0;
    case MU_RECORD_TALLY:
        return strcmp(a->tally->job, b->tally->job) == 0;
    case MU_RECORD_DEATH:
        return a->death->number % MU_DEATHS_KEPT == b->death->number % MU_DEATHS_KEPT;
    case MU_RECORD_NODE:
        return strcmp(a->node->name, b->node->name) == 0;
    case MU_RECORD_REQUEST:
        return a->request->number % MU_REQUESTS_KEPT == b->request->number % MU_REQUESTS_KEPT;
    case MU_RECORD_EVENT:
        return a->event->number == b->event->number;
    case MU_RECORD_KIND_COUNT:
        break;
    }
    return false;
}

static struct mu_record **place(struct mu_sim_store *store, const struct mu_record *key)
{
    if (key->kind == MU_RECORD_EVENT)
        return &store->events[key->event->number % EVENTS_KEPT];
    for (uint32_t i = 0; i < store->count; i++) {
        if (same_key(store->records[i], key))
            return &store->records[i];
    }
    return NULL;
}

void mu_sim_store_put(struct mu_sim_store *store, struct mu_record *record)
{
    struct mu_record **at = place(store, record);
    if (!at) {
        store->records = mu_sim_grow(store->records, store->count, &store->capacity, sizeof *store->records);
        at = &store->records[store->count++];
        *at = NULL;
    }
    free(*at);
    *at = record;
}

void mu_sim_store_forget(struct mu_sim_store *store, const struct mu_record *key)
{
    struct mu_record **at = place(store, key);
    if (!at || !*at || !same_key(*at, key))
        return;
    free(*at);
    *at = NULL;
    if (key->kind != MU_RECORD_EVENT)
        *at = store->records[--store->count];
}

uint32_t mu_sim_store_count(const struct mu_sim_store *store)
{
    uint32_t count = store->count;
    for (uint32_t i = 0; i < EVENTS_KEPT; i++)
        count += store->events[i] != NULL;
    return count;
}

const struct mu_record *mu_sim_store_at(const struct mu_sim_store *store, uint32_t index)
{
    if (index < store->count)
        return store->records[index];
    index -= store->count;
    for (uint32_t i = 0; i < EVENTS_KEPT; i++) {
        if (store->events[i] && index-- == 0)
            return store->events[i];
    }
    return NULL;
}

const struct mu_record *mu_sim_store_find(const struct mu_sim_store *store, const struct mu_record *key)
{
    if (key->kind == MU_RECORD_EVENT) {
        const struct mu_record *event = store->events[key->event->number % EVENTS_KEPT];
        return event && same_key(event, key) ? event : NULL;
    }
    for (uint32_t i = 0; i < store->count; i++) {
        if (same_key(store->records[i], key))
            return store->records[i];
    }
    return NULL;
}
