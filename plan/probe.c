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
