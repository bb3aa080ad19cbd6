/* A run of weeks before it is started: the coordinator's core (simulate/fleet.h) on nodes that fail and are repaired,
 * with the forecast of a step (plan/forecast.h) as clock.
 *
 * One worker for a node. Between two events the job steps, and time is skipped: whole steps, and after every so many of
 * them a checkpoint, which delays by its stall and is committed when it is written. Of these only the newest is taken
 * through the core, when something happens next; losses, spares, plans, generations, sources of state and growth are
 * all the core's doing. Pure, deterministic by seed. */
#ifndef MU_SIMULATE_OUTLOOK_H
#define MU_SIMULATE_OUTLOOK_H

#include "plan/search.h"
#include "simulate/fleet.h"

/* What becomes of the time. */
enum mu_outlook_class {
    MU_OUTLOOK_PROGRESS,    /* steps that count, at the speed of all nodes */
    MU_OUTLOOK_LOST,        /* steps that are done again, and parts of steps */
    MU_OUTLOOK_DETECTION,   /* from a failure until the members have parked */
    MU_OUTLOOK_RESTART,     /* restart_s, and changes that were planned */
    MU_OUTLOOK_LOADING,     /* of state */
    MU_OUTLOOK_CHECKPOINTS, /* their stalls */
    MU_OUTLOOK_FEWER,       /* what steps take longer on fewer nodes */
    MU_OUTLOOK_WAITING,     /* for nodes: too few */
    MU_OUTLOOK_CLASSES,
};
extern const char *const mu_outlook_class_names[MU_OUTLOOK_CLASSES];
extern const char *const mu_outlook_source_names[MU_FLEET_SOURCES];

struct mu_outlook_question {
    const struct mu_cluster *cluster;
    const struct mu_node_map *map;  /* of the cluster: the core knows it, and a switch takes its nodes down */
    const struct mu_job_spec *spec; /* what survives a loss is its business: sharding, redundancy, checkpoints */
    const struct mu_forecast_model *model;
    const struct mu_candidate *candidate; /* mu_outlook_check */
    double days;
    uint64_t seed;
};

/* A moment at which the number of working nodes changed. */
struct mu_outlook_point {
    double day;
    uint32_t nodes; /* 0: nothing steps */
};

struct mu_outlook {
    double seconds[MU_OUTLOOK_CLASSES]; /* sum: days */
    double goodput;                     /* share of PROGRESS */
    double step_s, interval_s, stall_s; /* with all nodes */
    uint64_t interval_steps;
    uint32_t nodes_lost, interruptions; /* interruptions: losses of working nodes that stopped the job */
    uint32_t recoveries[MU_FLEET_SOURCES], planned_changes;
    uint64_t steps, generations, messages; /* messages: events that the core handled */
    struct mu_outlook_point *points;       /* mu_outlook_fini */
    uint32_t point_count, point_room;
    bool failed; /* the job ended: `text` */
    double failed_day;
    char text[MU_TEXT_SIZE];
};

/* Nodes that a candidate works on. MU_ERR_INVALID, MU_ERR_LIMIT: a candidate that the core cannot be given: tensor
 * groups on several nodes, stages that share a node, more than MU_FLEET_NODES_MAX nodes. */
enum mu_status mu_outlook_check(const struct mu_cluster *cluster, const struct mu_forecast_model *model,
                                const struct mu_candidate *candidate, uint32_t *ret_nodes,
                                struct mu_error *err) MU_WARN_UNUSED;

/* MU_ERR_NO_MEMORY, or what the core says of the job. A job that fails on the way is an answer. */
enum mu_status mu_outlook_run(const struct mu_outlook_question *question, struct mu_outlook *ret_outlook,
                              struct mu_error *err) MU_WARN_UNUSED;
void mu_outlook_fini(struct mu_outlook *outlook);

#endif
