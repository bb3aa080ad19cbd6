/* Time. `mono_us` decides everything (only the receiver's monotonic clock counts); wall time is for display.
 * Thread-safe. */
#ifndef MU_COMMON_CLOCK_H
#define MU_COMMON_CLOCK_H

#include <stdint.h>

uint64_t mu_clock_mono_us(void); /* CLOCK_MONOTONIC, microseconds */
uint64_t mu_clock_wall_us(void); /* CLOCK_REALTIME, microseconds since 1970 */

/* "2026-12-01T21:04:05.123Z" into out (at least 25 bytes). */
void mu_clock_format(uint64_t wall_us, char out[32]);

#endif
