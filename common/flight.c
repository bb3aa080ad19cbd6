#include "common/flight.h"

#include <stdatomic.h>

#include "common/clock.h"

/* `ticket` is the record's number plus one while the other fields are of it, BUSY while they are being written: only
 * who has made it BUSY writes. Each field is stored with release and read with acquire, so who sees a new field sees
 * that the former ticket is gone. */
struct slot {
    atomic_uint_fast64_t ticket, at_us, number, bytes, rest;
};

#define BUSY UINT64_MAX

static struct slot ring[MU_FLIGHT_RECORDS];
static atomic_uint_fast64_t next;
static bool is_off;

static const char *const names[MU_FLIGHT_KIND_COUNT] = {
    "?",      "step",     "data",     "forward", "backward", "gather",  "reduce", "vote",
    "update", "evaluate", "snapshot", "prepare", "send",     "receive", "parked", "peer_failed"};

const char *mu_flight_name(unsigned kind)
{
    return names[kind < MU_FLIGHT_KIND_COUNT ? kind : MU_FLIGHT_NONE];
}

void mu_flight_switch_off(void)
{
    is_off = true;
}

void mu_flight_note(enum mu_flight_kind kind, bool is_end, uint32_t peer, uint64_t number, uint64_t bytes)
{
    if (is_off)
        return;
    uint64_t at = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed);
    struct slot *slot = &ring[at % MU_FLIGHT_RECORDS];
    uint64_t before = atomic_load_explicit(&slot->ticket, memory_order_relaxed);
    /* Somebody has been writing here for a whole round, or was overtaken by one: this record is lost. */
    if (before > at || !atomic_compare_exchange_strong_explicit(&slot->ticket, &before, BUSY, memory_order_acquire,
                                                                memory_order_relaxed))
        return;
    atomic_store_explicit(&slot->at_us, mu_clock_mono_us(), memory_order_release);
    atomic_store_explicit(&slot->number, number, memory_order_release);
    atomic_store_explicit(&slot->bytes, bytes, memory_order_release);
    atomic_store_explicit(&slot->rest, (uint64_t)peer << 32 | (uint64_t)kind << 1 | is_end, memory_order_release);
    atomic_store_explicit(&slot->ticket, at + 1, memory_order_release);
}

uint64_t mu_flight_next(void)
{
    return atomic_load_explicit(&next, memory_order_acquire);
}

static bool read_one(uint64_t at, struct mu_flight_record *out)
{
    struct slot *slot = &ring[at % MU_FLIGHT_RECORDS];
    if (atomic_load_explicit(&slot->ticket, memory_order_acquire) != at + 1)
        return false;
    out->at_us = atomic_load_explicit(&slot->at_us, memory_order_acquire);
    out->number = atomic_load_explicit(&slot->number, memory_order_acquire);
    out->bytes = atomic_load_explicit(&slot->bytes, memory_order_acquire);
    uint64_t rest = atomic_load_explicit(&slot->rest, memory_order_acquire);
    out->peer = (uint32_t)(rest >> 32);
    out->kind = (uint16_t)(rest >> 1 & 0x7fff);
    out->is_end = rest & 1;
    return atomic_load_explicit(&slot->ticket, memory_order_relaxed) == at + 1;
}

size_t mu_flight_read(uint64_t from, uint64_t to, struct mu_flight_record *out, size_t capacity)
{
    uint64_t end = mu_flight_next(), oldest = end > MU_FLIGHT_RECORDS ? end - MU_FLIGHT_RECORDS : 0;
    size_t count = 0;
    to = to < end ? to : end;
    for (uint64_t at = from > oldest ? from : oldest; at < to && count < capacity; at++)
        count += read_one(at, &out[count]);
    return count;
}
