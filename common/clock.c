#include "common/clock.h"

#include <stdio.h>
#include <time.h>

static uint64_t read_us(clockid_t id)
{
    struct timespec ts;
    clock_gettime(id, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

uint64_t mu_clock_mono_us(void)
{
    return read_us(CLOCK_MONOTONIC);
}

uint64_t mu_clock_wall_us(void)
{
    return read_us(CLOCK_REALTIME);
}

void mu_clock_format(uint64_t wall_us, char out[32])
{
    time_t seconds = (time_t)(wall_us / 1000000u);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t length = strftime(out, 32, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out + length, 32 - length, ".%03uZ", (unsigned)(wall_us / 1000u % 1000u));
}
