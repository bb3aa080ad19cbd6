#include "common/verdict.h"

#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 16 };

struct span {
    unsigned kind;
    uint64_t number;
};

/* ---- one rank ---- */

static void add_peer(struct mu_standing *standing, uint32_t peer)
{
    uint32_t at = 0;
    while (at < standing->peer_count && standing->peers[at] < peer)
        at++;
    if ((at < standing->peer_count && standing->peers[at] == peer) || standing->peer_count == MU_STANDING_PEERS_MAX)
        return;
    memmove(&standing->peers[at + 1], &standing->peers[at], (standing->peer_count - at) * sizeof standing->peers[0]);
    standing->peers[at] = peer;
    standing->peer_count++;
}

static int by_exchange(const void *a, const void *b)
{
    const struct mu_flight_record *x = *(const struct mu_flight_record *const *)a;
    const struct mu_flight_record *y = *(const struct mu_flight_record *const *)b;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    if (x->peer != y->peer)
        return x->peer < y->peer ? -1 : 1;
    if (x->number != y->number)
        return x->number < y->number ? -1 : 1;
    return x < y ? -1 : x > y; /* in the order in which they came */
}

/* An exchange whose newest record is its beginning is open. What a generation that has ended left open counts no more.
 */
static void find_open_exchanges(const struct mu_flight_record *records, size_t count, struct mu_standing *standing)
{
    const struct mu_flight_record **sorted = malloc((count + 1) * sizeof *sorted);
    size_t kept = 0;
    for (size_t i = 0; sorted && i < count; i++) {
        if (mu_flight_is_exchange(records[i].kind))
            sorted[kept++] = &records[i];
        if (records[i].kind == MU_FLIGHT_PARKED)
            kept = 0;
    }
    if (kept)
        qsort(sorted, kept, sizeof *sorted, by_exchange);
    for (size_t i = 0; i < kept; i++) {
        const struct mu_flight_record *now = sorted[i], *next = i + 1 < kept ? sorted[i + 1] : NULL;
        bool newest = !next || next->kind != now->kind || next->peer != now->peer || next->number != now->number;
        if (newest && !now->is_end)
            add_peer(standing, now->peer);
    }
    free(sorted);
}

static bool waits_in(unsigned kind)
{
    return kind == MU_FLIGHT_STEP || kind == MU_FLIGHT_GATHER || kind == MU_FLIGHT_REDUCE || kind == MU_FLIGHT_VOTE ||
           kind == MU_FLIGHT_EVALUATE;
}

void mu_standing_of(const struct mu_flight_record *records, size_t count, struct mu_standing *standing)
{
    struct span open[DEPTH_MAX];
    size_t depth = 0;
    standing->step = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        const struct mu_flight_record *record = &records[i];
        if (record->kind == MU_FLIGHT_STEP)
            standing->step = record->number;
        if (record->kind == MU_FLIGHT_PARKED)
            depth = 0;
        else if (record->kind >= MU_FLIGHT_SEND)
            continue;
        else if (!record->is_end && depth < DEPTH_MAX)
            open[depth++] = (struct span){record->kind, record->number};
        else if (record->is_end && depth > 0 && open[depth - 1].kind == record->kind)
            depth--;
    }
    find_open_exchanges(records, count, standing);
    standing->last_us = count ? records[count - 1].at_us : 0;
    standing->doing = depth ? (enum mu_flight_kind)open[depth - 1].kind : MU_FLIGHT_NONE;
    standing->number = depth ? open[depth - 1].number : 0;
    /* Within a layer's computation, too, whoever has just posted an exchange and done nothing since waits for it. */
    bool posted_last = count && mu_flight_is_exchange(records[count - 1].kind) && !records[count - 1].is_end;
    standing->is_waiting = depth > 0 && standing->peer_count > 0 && (waits_in(open[depth - 1].kind) || posted_last);
}

/* ---- all of them ---- */

static bool is_waited_for(const struct mu_standing *standings, size_t count, uint32_t rank)
{
    for (size_t i = 0; i < count; i++) {
        const struct mu_standing *standing = &standings[i];
        for (uint32_t k = 0; standing->has_answered && standing->is_waiting && k < standing->peer_count; k++)
            if (standing->peers[k] == rank)
                return true;
    }
    return false;
}

size_t mu_verdict(const struct mu_standing *standings, size_t count, size_t *culprits, size_t capacity)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        bool blocks = !standings[i].has_answered || !standings[i].is_waiting;
        if (!blocks || !is_waited_for(standings, count, standings[i].rank))
            continue;
        if (found < capacity)
            culprits[found] = i;
        found++;
    }
    return found;
}
