/* The picture of a simulated run. */
#ifndef MU_CLI_SIMULATE_H
#define MU_CLI_SIMULATE_H

#include "simulate/outlook.h"

/* Writes an SVG: working nodes over the days, and what became of the time. MU_ERR_IO and what open says. */
enum mu_status mu_simulate_picture(const char *path, const char *name, const struct mu_outlook *outlook, uint32_t nodes,
                                   double days, struct mu_error *err) MU_WARN_UNUSED;

#endif
