#include "cli/plan_question.h"

#include "cli/cli.h"
#include "cli/cluster_file.h"
#include "cli/job_file.h"

enum mu_status plan_question_read(const char *cluster_path, const char *job_path, struct plan_question *q,
                                  struct mu_job_spec *ret_spec, struct mu_error *err)
{
    enum mu_status status = mu_cluster_file_read(cluster_path, &q->cluster, err);
    if (status != MU_OK)
        return status;
    status = mu_job_file_read(job_path, ret_spec, err);
    if (status != MU_OK) {
        mu_cluster_fini(&q->cluster);
        return status;
    }
    q->model = (struct mu_forecast_model){
        .config = ret_spec->model, .sequences = ret_spec->batch.sequences, .length = ret_spec->batch.length};
    mu_forecast_rates_init(&q->rates);
    q->limits.bf16 = ret_spec->compute == MU_COMPUTE_BF16;
    return MU_OK;
}

void plan_question_fini(struct plan_question *q)
{
    mu_cluster_fini(&q->cluster);
}

bool plan_read_degrees(const char *command, const char *const texts[4], struct mu_search_limits *limits)
{
    static const char *const names[] = {"--tp", "--pp", "--dp", "--micro"};
    uint32_t *degrees[] = {&limits->tp, &limits->pp, &limits->dp, &limits->micro};
    uint64_t value;
    for (int i = 0; i < 4; i++) {
        if (!mu_cli_number(command, names[i], texts[i], 0, UINT32_MAX, &value))
            return false;
        *degrees[i] = (uint32_t)value;
    }
    return true;
}

void plan_site_fini(struct plan_site *site)
{
    mu_node_map_free(site->map);
    mu_topology_free(site->own);
}

enum mu_status plan_site_init(struct plan_site *site, const struct mu_cluster *c, struct mu_error *err)
{
    const struct mu_topology *t = c->topology;
    *site = (struct plan_site){.own = NULL};
    if (!t || t->present_count != c->nodes) {
        uint32_t per_switch[MU_FABRIC_LEVELS_MAX];
        for (uint32_t i = 0; i < c->level_count; i++)
            per_switch[i] = c->levels[i].nodes;
        t = site->own = mu_topology_regular(c->nodes, per_switch, c->level_count);
    }
    site->map = t ? mu_node_map_new(t) : NULL;
    if (site->map)
        return MU_OK;
    plan_site_fini(site);
    return mu_fail(err, MU_ERR_LIMIT, "%u nodes are too many for memory, or stand under more than %d switches",
                   c->nodes, MU_TOPOLOGY_SWITCHES_MAX);
}

enum mu_status plan_ask(const struct plan_question *q, struct mu_candidate *found, uint32_t top,
                        struct mu_search_result *ret_result, struct mu_error *err)
{
    struct plan_site site;
    uint32_t capacity = top > PLAN_PLACED_MIN ? top : PLAN_PLACED_MIN;
    enum mu_status status = mu_search(&q->model, &q->cluster, &q->rates, &q->limits, found, capacity, ret_result, err);
    if (status == MU_OK)
        status = plan_site_init(&site, &q->cluster, err);
    if (status != MU_OK)
        return status;
    status = mu_contention_rank(&q->model, &q->cluster, &q->rates, site.map, found, ret_result->count);
    plan_site_fini(&site);
    if (status != MU_OK)
        return mu_fail(err, status, "out of memory for the flows of %u nodes", q->cluster.nodes);
    ret_result->count = ret_result->count < top ? ret_result->count : top;
    return MU_OK;
}
