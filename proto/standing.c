#include "proto/standing.h"

#include <stdlib.h>

struct mu_standing mu_standing_of_answer(const Muster__V1__ReadRecallResponse *answer, uint64_t until_us)
{
    struct mu_standing standing = {.rank = answer->rank, .has_answered = answer->is_complete, .step = UINT64_MAX};
    struct mu_flight_record *records = malloc((answer->n_records + 1) * sizeof *records);
    size_t count = 0;
    while (records && count < answer->n_records && answer->records[count]->at_us <= until_us) {
        const Muster__V1__FlightRecord *from = answer->records[count];
        records[count++] = (struct mu_flight_record){.at_us = from->at_us,
                                                     .number = from->number,
                                                     .bytes = from->bytes,
                                                     .peer = from->peer,
                                                     .kind = (uint16_t)from->kind, /* the numbers are the same */
                                                     .is_end = from->is_end};
    }
    if (records)
        mu_standing_of(records, count, &standing);
    free(records);
    return standing;
}

Muster__V1__Standing mu_standing_shown(const struct mu_standing *standing)
{
    Muster__V1__Standing pb = MUSTER__V1__STANDING__INIT;
    pb.rank = standing->rank;
    pb.has_answered = standing->has_answered;
    pb.doing = (Muster__V1__FlightKind)standing->doing;
    pb.number = standing->number;
    pb.has_step = standing->has_answered && standing->step != UINT64_MAX;
    pb.step = pb.has_step ? standing->step : 0;
    pb.n_waits_for = standing->is_waiting ? standing->peer_count : 0;
    pb.waits_for = (uint32_t *)(uintptr_t)standing->peers;
    return pb;
}
