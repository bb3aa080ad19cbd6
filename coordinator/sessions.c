#include "coordinator/sessions.h"

#include <stdlib.h>

enum { NONE = UINT32_MAX, SLOT_BITS = 24 };
_Static_assert(MU_SESSIONS_MAX <= 1 << SLOT_BITS, "a slot fits into a session number");

struct list {
    uint32_t first, last;
};

struct mu_sessions {
    struct mu_session *slots;
    uint32_t capacity, used_high, free, count;
    struct list silent, heard; /* open ones, by whether they have said Hello; oldest first */
};

enum mu_status mu_sessions_new(uint32_t capacity, struct mu_sessions **ret_sessions, struct mu_error *err)
{
    MU_ASSERT(capacity > 0 && capacity <= MU_SESSIONS_MAX);
    struct mu_sessions *sessions = calloc(1, sizeof *sessions);
    if (sessions)
        sessions->slots = calloc(capacity, sizeof *sessions->slots);
    if (!sessions || !sessions->slots) {
        free(sessions);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a table of %u sessions", capacity);
    }
    sessions->capacity = capacity;
    sessions->free = NONE;
    sessions->silent = sessions->heard = (struct list){NONE, NONE};
    *ret_sessions = sessions;
    return MU_OK;
}

void mu_sessions_free(struct mu_sessions *sessions)
{
    if (!sessions)
        return;
    for (uint32_t slot = 0; slot < sessions->used_high; slot++)
        free(sessions->slots[slot].vitals);
    free(sessions->slots);
    free(sessions);
}

static void append(struct mu_sessions *sessions, struct list *list, uint32_t slot)
{
    struct mu_session *session = &sessions->slots[slot];
    session->next = NONE;
    session->previous = list->last;
    if (list->last != NONE)
        sessions->slots[list->last].next = slot;
    else
        list->first = slot;
    list->last = slot;
}

static void unlink_from(struct mu_sessions *sessions, struct list *list, uint32_t slot)
{
    const struct mu_session *session = &sessions->slots[slot];
    if (session->previous != NONE)
        sessions->slots[session->previous].next = session->next;
    else
        list->first = session->next;
    if (session->next != NONE)
        sessions->slots[session->next].previous = session->previous;
    else
        list->last = session->previous;
}

struct mu_session *mu_sessions_open(struct mu_sessions *sessions, struct mu_rpc_call *call, uint64_t now_us)
{
    uint32_t slot = sessions->free;
    if (slot != NONE)
        sessions->free = sessions->slots[slot].next;
    else if (sessions->used_high < sessions->capacity)
        slot = sessions->used_high++;
    else
        return NULL;
    struct mu_session *session = &sessions->slots[slot];
    uint32_t uses = session->uses + 1;
    *session = (struct mu_session){
        .number = (uint64_t)uses << SLOT_BITS | slot, .call = call, .opened_us = now_us, .uses = uses};
    append(sessions, &sessions->silent, slot);
    sessions->count++;
    return session;
}

struct mu_session *mu_sessions_find(struct mu_sessions *sessions, uint64_t number)
{
    uint64_t slot = number & ((1u << SLOT_BITS) - 1);
    if (number == 0 || slot >= sessions->used_high || sessions->slots[slot].number != number)
        return NULL;
    return &sessions->slots[slot];
}

void mu_sessions_close(struct mu_sessions *sessions, struct mu_session *session)
{
    uint32_t slot = (uint32_t)(session - sessions->slots);
    unlink_from(sessions, session->known ? &sessions->heard : &sessions->silent, slot);
    free(session->vitals);
    session->vitals = NULL;
    session->number = 0;
    session->call = NULL;
    session->next = sessions->free;
    sessions->free = slot;
    sessions->count--;
}

void mu_sessions_hello(struct mu_sessions *sessions, struct mu_session *session)
{
    if (session->known)
        return;
    uint32_t slot = (uint32_t)(session - sessions->slots);
    unlink_from(sessions, &sessions->silent, slot);
    session->known = true;
    append(sessions, &sessions->heard, slot);
}

static struct mu_session *at(struct mu_sessions *sessions, uint32_t slot)
{
    return slot == NONE ? NULL : &sessions->slots[slot];
}

struct mu_session *mu_sessions_oldest_silent(struct mu_sessions *sessions)
{
    return at(sessions, sessions->silent.first);
}

struct mu_session *mu_sessions_any(struct mu_sessions *sessions)
{
    struct mu_session *session = at(sessions, sessions->silent.first);
    return session ? session : at(sessions, sessions->heard.first);
}

uint32_t mu_sessions_count(const struct mu_sessions *sessions)
{
    return sessions->count;
}
