/* The real coordinator core (coordinator/core) with workers that answer as muster-worker does, in virtual time: one
 * worker for each node, which carries all of its devices. Nothing is computed and nothing is sent; the caller says how
 * long things take and what fails. One thread; deterministic. */
#ifndef MU_SIMULATE_FLEET_H
#define MU_SIMULATE_FLEET_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/node_order.h"
#include "plan/plan.h"

enum { MU_FLEET_NODES_MAX = 4096 }; /* a checkpoint of the core has at most so many pieces */

struct mu_fleet;

/* What the job is doing. */
enum mu_fleet_state {
    MU_FLEET_CHANGING,  /* between two generations: the core waits for somebody or for time to pass */
    MU_FLEET_PREPARING, /* the members of a generation get ready: mu_fleet_prepared ends it */
    MU_FLEET_STEPPING,
    MU_FLEET_WAITING, /* too few workers */
    MU_FLEET_FAILED,
};

/* From where a generation has its state. */
enum mu_fleet_source { MU_FLEET_SEED, MU_FLEET_CHECKPOINT, MU_FLEET_MIRRORS, MU_FLEET_HOLDERS, MU_FLEET_SOURCES };

struct mu_fleet_generation {
    uint64_t start_step;
    struct mu_layout layout;
    uint32_t most_leaves; /* of a replica */
    enum mu_fleet_source source;
    double moved_bytes; /* between workers, all together */
    uint32_t receivers; /* to so many of them */
};

/* `names`: of the nodes, by index; `map`: what the core knows of them, or NULL. Both must stay. NULL: no memory. */
struct mu_fleet *mu_fleet_new(const char *const *names, uint32_t node_count, const struct mu_node_map *map);
void mu_fleet_free(struct mu_fleet *fleet);

/* MU_ERR_*: what the coordinator says of the job. */
enum mu_status mu_fleet_submit(struct mu_fleet *fleet, const struct mu_job_spec *spec,
                               struct mu_error *err) MU_WARN_UNUSED;

/* Time passes up to `now_us`; nobody counts it as lateness unless the core waits for it. */
void mu_fleet_advance(struct mu_fleet *fleet, uint64_t now_us);
/* When the core wants to be told that time has passed; while it is STEPPING and nothing has changed lately that is of
 * no use. */
uint64_t mu_fleet_deadline(const struct mu_fleet *fleet);

void mu_fleet_attach(struct mu_fleet *fleet, uint32_t node);
void mu_fleet_kill(struct mu_fleet *fleet, uint32_t node);            /* its stream is reset */
bool mu_fleet_is_member(const struct mu_fleet *fleet, uint32_t node); /* of the generation that runs or prepares */
uint32_t mu_fleet_rank(const struct mu_fleet *fleet, uint32_t node);  /* of a member */
uint32_t mu_fleet_attached(const struct mu_fleet *fleet);

/* Everybody who prepares is ready. */
void mu_fleet_prepared(struct mu_fleet *fleet);
/* STEPPING: all have done steps up to `step`. */
void mu_fleet_stepped(struct mu_fleet *fleet, uint64_t step);
/* STEPPING: a checkpoint at `step` is ordered, written, published and committed. False: the core gave it up. */
bool mu_fleet_checkpoint(struct mu_fleet *fleet, uint64_t step);

enum mu_fleet_state mu_fleet_state(const struct mu_fleet *fleet);
/* The newest one that was assigned. */
const struct mu_fleet_generation *mu_fleet_generation(const struct mu_fleet *fleet);
/* Generations that were assigned, messages that the core handled. */
uint64_t mu_fleet_generations(const struct mu_fleet *fleet);
uint64_t mu_fleet_messages(const struct mu_fleet *fleet);
/* Why it WAITS or has FAILED. */
const char *mu_fleet_text(const struct mu_fleet *fleet);

#endif
