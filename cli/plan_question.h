/* What `muster plan` and `muster simulate` ask of plan/: which layouts, on which nodes. */
#ifndef MU_CLI_PLAN_QUESTION_H
#define MU_CLI_PLAN_QUESTION_H

#include "plan/contention.h"

enum {
    PLAN_TOP_MAX = 100,
    PLAN_PLACED_MIN = 8, /* so many of the best by the closed form are placed and ranked again */
};

struct plan_question {
    struct mu_forecast_model model;
    struct mu_cluster cluster;
    struct mu_search_limits limits;
    struct mu_forecast_rates rates;
};

/* Reads both files; `limits` stay as they are. plan_question_fini. */
enum mu_status plan_question_read(const char *cluster_path, const char *job_path, struct plan_question *q,
                                  struct mu_job_spec *ret_spec, struct mu_error *err) MU_WARN_UNUSED;
void plan_question_fini(struct plan_question *q);

/* --tp, --pp, --dp, --micro; prints what is wrong. */
bool plan_read_degrees(const char *command, const char *const texts[4], struct mu_search_limits *limits);

/* The topology that candidates are placed on: the file's, or a regular one of the cluster's levels. */
struct plan_site {
    struct mu_topology *own;
    struct mu_node_map *map;
};
enum mu_status plan_site_init(struct plan_site *site, const struct mu_cluster *c, struct mu_error *err) MU_WARN_UNUSED;
void plan_site_fini(struct plan_site *site);

/* The best layouts by the closed form, placed on the topology and ranked again. found[PLAN_TOP_MAX]. */
enum mu_status plan_ask(const struct plan_question *q, struct mu_candidate *found, uint32_t top,
                        struct mu_search_result *ret_result, struct mu_error *err) MU_WARN_UNUSED;

#endif
