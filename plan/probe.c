#include "plan/probe.h"

double mu_probe_flops(const struct mu_probe_alone *alone)
{
    double most = 0;
    for (int i = 0; i < MU_PROBE_SIZES; i++)
        most = alone->flops[i] > most ? alone->flops[i] : most;
    return most;
}

/* A round-robin tournament by the circle method: with an odd number of places i meets round - i modulo that number, and
 * whoever would meet himself rests, or meets the one more there is when the number of workers is even. */
static uint32_t places(uint32_t workers)
{
    return workers % 2 ? workers : workers - 1;
}

uint32_t mu_probe_rounds(uint32_t workers)
{
    uint32_t levels = 0;
    if (workers < 2)
        return 0;
    if (workers <= MU_PROBE_ALL_PAIRS_MAX)
        return places(workers);
    while ((1u << levels) < workers)
        levels++;
    return 2 * levels;
}

uint32_t mu_probe_partner(uint32_t workers, uint32_t round, uint32_t i)
{
    uint32_t circle = places(workers), rounds = mu_probe_rounds(workers);
    MU_ASSERT(round < rounds && i < workers);
    uint32_t place = (uint32_t)((uint64_t)round * circle / rounds); /* of the tournament's rounds, evenly apart */
    if (i == circle)                                                /* the one more: whoever would meet himself */
        return (uint32_t)((uint64_t)place * ((circle + 1) / 2) % circle);
    uint32_t other = (place + circle - i) % circle;
    return other == i && circle < workers ? circle : other;
}

uint32_t mu_probe_neighbours(uint32_t workers, uint32_t i, uint32_t ret_ranks[MU_PROBE_NEIGHBOURS_MAX])
{
    uint32_t count = 0;
    MU_ASSERT(i < workers && workers <= MU_PROBE_MEMBERS_MAX);
    for (uint32_t far = 1; far < workers; far *= 2) {
        const uint32_t both[2] = {(i + far) % workers, (i + workers - far) % workers};
        for (int k = 0; k < 2; k++) {
            uint32_t at = 0, known = 0;
            while (at < count && ret_ranks[at] < both[k])
                at++;
            known = at < count && ret_ranks[at] == both[k];
            for (uint32_t move = count; !known && move > at; move--)
                ret_ranks[move] = ret_ranks[move - 1];
            ret_ranks[at] = both[k];
            count += !known;
        }
    }
    return count;
}
