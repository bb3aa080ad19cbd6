#include "proto/standing.h"

#include <stdlib.h>

/* Of the first `count` records. */
static struct mu_standing standing_of(const Muster__V1__ReadRecallResponse *answer, size_t count)
{
    struct mu_standing standing = {.rank = answer->rank, .has_answered = answer->is_complete, .step = UINT64_MAX};
    struct mu_flight_record *records = malloc((count + 1) * sizeof *records);
    for (size_t i = 0; records && i < count; i++) {
        const Muster__V1__FlightRecord *from = answer->records[i];
        records[i] = (struct mu_flight_record){.at_us = from->at_us,
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

struct mu_standing mu_standing_of_answer(const Muster__V1__ReadRecallResponse *answer)
{
    return standing_of(answer, answer->n_records);
}

struct mu_standing mu_standing_before(const Muster__V1__ReadRecallResponse *answer, uint64_t until_us)
{
    size_t count = 0, broken = SIZE_MAX;
    for (; count < answer->n_records && answer->records[count]->at_us <= until_us; count++) {
        const Muster__V1__FlightRecord *record = answer->records[count];
        bool begins =
            !record->is_end && (record->kind == (int)MU_FLIGHT_STEP || record->kind == (int)MU_FLIGHT_PREPARE);
        bool breaks = record->kind == (int)MU_FLIGHT_PEER_FAILED || record->kind == (int)MU_FLIGHT_PARKED;
        if (begins)
            broken = SIZE_MAX;
        else if (breaks && broken == SIZE_MAX)
            broken = count;
    }
    return standing_of(answer, broken < count ? broken : count);
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
