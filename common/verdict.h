/* Who holds the others up, from their flight records. Pure. */
#ifndef MU_COMMON_VERDICT_H
#define MU_COMMON_VERDICT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/flight.h"

enum { MU_STANDING_PEERS_MAX = 64 };

/* Where one rank stands at the end of its records. */
struct mu_standing {
    uint32_t rank;
    bool has_answered;
    bool is_waiting;                       /* for others: what is open is an exchange; else it computes */
    enum mu_flight_kind doing;             /* innermost span that is open; NONE: none */
    uint64_t number;                       /* of it */
    uint64_t step;                         /* UINT64_MAX: its records do not say */
    uint64_t last_us;                      /* its newest record, its own clock */
    uint32_t peers[MU_STANDING_PEERS_MAX]; /* ascending; whose messages have not come, or who has not taken its own */
    uint32_t peer_count;
};

/* Fills in everything but `rank`. Records oldest first; has_answered stays. */
void mu_standing_of(const struct mu_flight_record *records, size_t count, struct mu_standing *standing);

/* The ranks that others wait for and that wait for nobody themselves, or have not answered: into culprits[capacity],
 * by position in `standings`. Returns how many there are; 0: nobody waits, or all wait in a circle. */
size_t mu_verdict(const struct mu_standing *standings, size_t count, size_t *culprits, size_t capacity);

#endif
