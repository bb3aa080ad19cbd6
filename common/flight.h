/* The flight recorder: what this process did last. A ring of the newest records in memory that any thread may write
 * and any thread may read while others write; when somebody hangs, it tells who entered which exchange and who did not.
 * On unless it is switched off: a record costs two atomic operations, five stores and a look at the clock. */
#ifndef MU_COMMON_FLIGHT_H
#define MU_COMMON_FLIGHT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MU_FLIGHT_RECORDS = 16384 }; /* kept; a power of two */

enum mu_flight_kind {
    MU_FLIGHT_NONE,
    /* Spans: they begin and end. `number` is the step, or the micro-batch within it. */
    MU_FLIGHT_STEP,
    MU_FLIGHT_DATA,
    MU_FLIGHT_FORWARD,
    MU_FLIGHT_BACKWARD,
    MU_FLIGHT_GATHER, /* waits for the parameters of the last update */
    MU_FLIGHT_REDUCE, /* waits for the rest of the gradient exchange */
    MU_FLIGHT_VOTE,   /* the step reduction */
    MU_FLIGHT_UPDATE,
    MU_FLIGHT_EVALUATE,
    MU_FLIGHT_SNAPSHOT,
    MU_FLIGHT_PREPARE, /* a generation: `number` */
    /* Exchanges with `peer`, a rank: from when it was posted until it is done. `number` is the exchange. */
    MU_FLIGHT_SEND,
    MU_FLIGHT_RECEIVE,
    /* Moments. */
    MU_FLIGHT_PARKED, /* ends every open span: `number` is the step */
    MU_FLIGHT_PEER_FAILED,
    MU_FLIGHT_KIND_COUNT
};

struct mu_flight_record {
    uint64_t at_us; /* mu_clock_mono_us */
    uint64_t number, bytes;
    uint32_t peer;
    uint16_t kind; /* enum mu_flight_kind */
    bool is_end;
};

/* "forward", "receive", ... ; "?" for a number that is none. */
const char *mu_flight_name(unsigned kind);
static inline bool mu_flight_is_exchange(unsigned kind)
{
    return kind == MU_FLIGHT_SEND || kind == MU_FLIGHT_RECEIVE;
}

void mu_flight_switch_off(void); /* before other threads start: nothing is recorded */
void mu_flight_note(enum mu_flight_kind kind, bool is_end, uint32_t peer, uint64_t number, uint64_t bytes);
static inline void mu_flight_begin(enum mu_flight_kind kind, uint64_t number)
{
    mu_flight_note(kind, false, 0, number, 0);
}
static inline void mu_flight_end(enum mu_flight_kind kind, uint64_t number)
{
    mu_flight_note(kind, true, 0, number, 0);
}

/* The number that the next record will have; the first one has 0. */
uint64_t mu_flight_next(void);
/* Copies what is still held of [from, to), oldest first, into out[capacity]; returns how many. Records that are being
 * overwritten meanwhile are left out, and so is one whose writer was held up while all others were written. */
size_t mu_flight_read(uint64_t from, uint64_t to, struct mu_flight_record *out, size_t capacity);

#endif
