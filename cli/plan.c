/* `muster plan cluster.yaml job.yaml`: which layout, how fast, what failures cost; before anything runs. No
 * coordinator. */
#include "cli/cli.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/measured.h"

/* Mean error against published runs, untuned (tests/unit/test_forecast.c): what a forecast may be off by. */
#define FORECAST_ERROR 0.12

/* ---- --what-if name=value,... ---- */

struct change {
    const char *name;
    double most; /* of a whole number; 0: any number, judged with the cluster */
    void (*apply)(struct plan_question *q, double value);
};

static void change_oversubscription(struct plan_question *q, double value)
{
    if (q->cluster.level_count == 0)
        q->cluster.levels[q->cluster.level_count++].nodes = 1;
    q->cluster.levels[0].oversubscription = value;
}
static void change_link_loss(struct plan_question *q, double value)
{
    if (q->cluster.level_count == 0)
        q->cluster.levels[q->cluster.level_count++] = (struct mu_fabric_level){1, 1};
    double left = value >= 0 ? 1 - value : 0; /* what is no share is refused with the cluster */
    q->cluster.levels[0].oversubscription /= left > 0 ? left : 0;
}
static void change_slow_device(struct plan_question *q, double value)
{
    q->cluster.slow_device = value;
}
static void change_nodes(struct plan_question *q, double value)
{
    q->cluster.nodes = (uint32_t)value;
}
static void change_spares(struct plan_question *q, double value)
{
    q->cluster.spare_nodes = (uint32_t)value;
}
static void change_nic(struct plan_question *q, double value)
{
    q->cluster.device.nic_bytes_per_second = value;
}
static void change_flops(struct plan_question *q, double value)
{
    q->cluster.device.flops_bf16 = value;
}
static void change_memory(struct plan_question *q, double value)
{
    q->cluster.device.memory_bytes = value;
}
static void change_mtbf(struct plan_question *q, double value)
{
    q->cluster.device_mtbf_hours = value;
}
static void change_restart(struct plan_question *q, double value)
{
    q->cluster.restart_s = value;
}
static void change_batch(struct plan_question *q, double value)
{
    q->model.sequences = (uint32_t)value;
}
static void change_storage(struct plan_question *q, double value)
{
    q->cluster.storage_write_bytes_per_second = q->cluster.storage_read_bytes_per_second = value;
}

static const struct change changes[] = {{"oversubscription", 0, change_oversubscription},
                                        {"link_loss", 0, change_link_loss},
                                        {"slow_device", 0, change_slow_device},
                                        {"nodes", MU_CLUSTER_NODES_MAX, change_nodes},
                                        {"spare_nodes", MU_CLUSTER_NODES_MAX, change_spares},
                                        {"nic_rate", 0, change_nic},
                                        {"flops_bf16", 0, change_flops},
                                        {"memory", 0, change_memory},
                                        {"device_mtbf_hours", 0, change_mtbf},
                                        {"restart_s", 0, change_restart},
                                        {"storage_rate", 0, change_storage},
                                        {"batch", MU_SEQUENCES_MAX, change_batch}};

static int bad_change(const char *item)
{
    char known[256] = "";
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", changes[i].name);
    return mu_cli_usage("plan", "--what-if '%s' is not allowed: NAME=NUMBER[,NAME=NUMBER...], NAME one of %s", item,
                        known);
}

static const struct change *change_named(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++)
        if (strlen(changes[i].name) == length && strncmp(changes[i].name, name, length) == 0)
            return &changes[i];
    return NULL;
}

/* Applies "name=value" to a copy of the question. */
static int apply_change(const char *item, struct plan_question *q)
{
    struct mu_error err;
    const char *equals = strchr(item, '=');
    const struct change *change = equals ? change_named(item, (size_t)(equals - item)) : NULL;
    char *end = NULL;
    double value = equals ? strtod(equals + 1, &end) : 0;
    if (!change || end == equals + 1 || *end)
        return bad_change(item);
    if (change->most > 0 && !(value >= 0 && value <= change->most && value == (double)(uint64_t)value))
        return mu_cli_usage("plan", "--what-if '%s' is not allowed: a whole number, 0 to %.0f", item, change->most);
    change->apply(q, value);
    if (q->model.sequences == 0)
        return mu_cli_usage("plan", "--what-if '%s' is not allowed: at least 1", item);
    return mu_cluster_check(&q->cluster, &err) == MU_OK ? MU_EXIT_OK : mu_cli_fail(&err);
}

/* ---- output ---- */

static const char *recompute_name(enum mu_recompute recompute)
{
    return recompute == MU_RECOMPUTE_FULL ? "full" : recompute == MU_RECOMPUTE_SELECTIVE ? "selective" : "none";
}

static void heading(struct mu_cli_table *table)
{
    static const char *const names[] = {"TP",     "PP",     "DP",       "MICRO",   "RECOMPUTE",  "STEP",      "MFU",
                                        "MEMORY", "BUBBLE", "EXCHANGE", "GOODPUT", "TOKENS/DAY", "BOTTLENECK"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        mu_cli_table_add(table, "%s", names[i]);
}

enum { COLUMNS = 13, CHANGE_COLUMNS = 6 };

static void add_row(struct mu_cli_table *table, const struct mu_candidate *c)
{
    const struct mu_forecast *f = &c->forecast;
    char tokens[16];
    mu_cli_count(c->tokens_per_day, tokens);
    mu_cli_table_add(table, "%u", c->plan.tp);
    mu_cli_table_add(table, "%u", c->plan.pp);
    mu_cli_table_add(table, "%u", c->plan.dp);
    mu_cli_table_add(table, "%u", c->plan.micro);
    mu_cli_table_add(table, "%s", recompute_name(c->plan.recompute));
    mu_cli_table_add(table, "%.3g-%.3g s", f->step_s * (1 - FORECAST_ERROR), f->cautious_s * (1 + FORECAST_ERROR));
    mu_cli_table_add(table, "%.1f %%", 100 * f->mfu);
    mu_cli_table_add(table, "%.1f GB", f->memory_bytes * 1e-9);
    mu_cli_table_add(table, "%.1f %%", 100 * f->bubble_s / f->step_s);
    mu_cli_table_add(table, "%.1f %%", 100 * (f->tensor_s + f->pipeline_s + f->data_s + f->tied_s) / f->step_s);
    mu_cli_table_add(table, "%.1f %%", 100 * c->goodput.share);
    mu_cli_table_add(table, "%s", tokens);
    mu_cli_table_add(table, "%s", f->bottleneck);
}

static json_t *candidate_json(const struct mu_candidate *c)
{
    const struct mu_forecast *f = &c->forecast;
    const struct mu_goodput *g = &c->goodput;
    return json_pack(
        "{s:i, s:i, s:i, s:i, s:s, s:b, s:b, s:f, s:f, s:f, s:f, s:f, s:s, s:{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, "
        "s:f, "
        "s:f, s:f}, s:{s:f, s:f, s:f, s:f, s:f}, s:{s:f, s:f, s:f, s:f, s:f, s:f}}",
        "tp", (int)c->plan.tp, "pp", (int)c->plan.pp, "dp", (int)c->plan.dp, "micro", (int)c->plan.micro, "recompute",
        recompute_name(c->plan.recompute), "sequence_parallel", c->plan.sequence_parallel, "optimizer_sharding",
        c->plan.sharded, "step_seconds", f->step_s, "step_seconds_low", f->step_s * (1 - FORECAST_ERROR),
        "step_seconds_high", f->cautious_s * (1 + FORECAST_ERROR), "mfu", f->mfu, "tokens_per_day", c->tokens_per_day,
        "bottleneck", f->bottleneck, "seconds", "products", f->compute_s, "attention", f->attention_s, "rows",
        f->rows_s, "recomputation", f->recompute_s, "head", f->head_s, "tensor_exchange", f->tensor_s, "stage_exchange",
        f->pipeline_s, "bubble", f->bubble_s, "data_exchange", f->data_s, "update", f->update_s, "tied_embedding",
        f->tied_s, "bytes", "parameters", f->parameter_bytes, "gradients", f->gradient_bytes, "optimizer",
        f->optimizer_bytes, "activations", f->activation_bytes, "total", f->memory_bytes, "goodput", "share", g->share,
        "mtbf_seconds", g->mtbf_s, "checkpoint_interval_seconds", g->interval_s, "checkpoint_stall_seconds", g->stall_s,
        "checkpoint_write_seconds", g->write_s, "restart_seconds", g->restart_s);
}

static void say_notes(const struct plan_question *q, const struct mu_candidate *best)
{
    const struct mu_goodput *g = &best->goodput;
    printf(
        "\n%s: %u nodes of %u %s, %u spare; a failure every %.3g h; checkpoints every %.0f s (stall %.2g s, %.3g GB), "
        "restart %.0f s\n",
        q->cluster.name, q->cluster.nodes, q->cluster.device.per_node, q->cluster.device.name, q->cluster.spare_nodes,
        g->mtbf_s / 3600, g->interval_s, g->stall_s, g->state_bytes * 1e-9, g->restart_s);
    printf("Not modelled: slow devices, other jobs on the fabric, data loading, unlike exchanges at the same time.\n");
    for (uint32_t i = 0; q->cluster.topology && i < q->cluster.topology->note_count; i++)
        printf("Topology: %s.\n", q->cluster.topology->notes[i]);
    if (q->cluster.device.islands > 1)
        printf("Topology: NVLink joins a node's devices in %u groups: tensor groups are kept within one.\n",
               q->cluster.device.islands);
}

/* ---- placement ---- */

/* Where the best layout goes, and what that gains. `order` (free it) holds the nodes, the first ranks first. */
struct placement {
    struct mu_contention_gain gain;
    uint32_t *order, count;
};

static enum mu_status place(const struct plan_question *q, const struct mu_candidate *best, struct placement *ret,
                            struct mu_error *err)
{
    struct mu_candidate candidate = *best;
    struct plan_site site;
    enum mu_node_way way;
    enum mu_status status = plan_site_init(&site, &q->cluster, err);
    if (status != MU_OK)
        return status;
    uint32_t devices = best->plan.tp * best->plan.pp * best->plan.dp, per_node = q->cluster.device.per_node;
    *ret = (struct placement){.order = malloc(((size_t)q->cluster.nodes + 1) * sizeof *ret->order),
                              .count = (devices + per_node - 1) / per_node};
    status = ret->order ? mu_contention_place(&q->model, &q->cluster, &q->rates, site.map, &candidate, &way, ret->order)
                        : MU_ERR_NO_MEMORY;
    if (status == MU_OK)
        status = mu_contention_compare(&q->model, &q->cluster, &q->rates, site.map, &candidate, way, &ret->gain);
    plan_site_fini(&site);
    if (status == MU_OK)
        return MU_OK;
    free(ret->order);
    return mu_fail(err, status, "out of memory for the flows of %u nodes", q->cluster.nodes);
}

static const char *const way_names[MU_WAY_COUNT] = {
    [MU_WAY_DENSE] = "dense",   [MU_WAY_PACKED] = "packed",   [MU_WAY_FITTED] = "fitted",
    [MU_WAY_ACROSS] = "across", [MU_WAY_BY_NAME] = "by name", [MU_WAY_RANDOM] = "random",
};

static const char *node_name(const struct plan_question *q, uint32_t node)
{
    return q->cluster.topology ? q->cluster.topology->node_names.names[node] : NULL;
}

static void print_placement(const struct plan_question *q, const struct placement *p)
{
    const struct mu_contention_gain *g = &p->gain;
    printf("Placement of the first: %s, %.4g s a step; nodes in the order of their names %.4g s (%+.1f %%), in random "
           "order %.4g s (%+.1f %%).\n",
           way_names[g->way], g->step_s, g->by_name_s, 100 * (g->by_name_s / g->step_s - 1), g->random_s,
           100 * (g->random_s / g->step_s - 1));
    if (!q->cluster.topology)
        return;
    enum { SHOWN = 6 };
    printf("Ranks go to");
    for (uint32_t i = 0; i < p->count && i < SHOWN; i++)
        printf(" %s", node_name(q, p->order[i]));
    printf("%s (-o json has all %u)\n", p->count > SHOWN ? " ..." : "", p->count);
}

static json_t *placement_json(const struct plan_question *q, const struct placement *p)
{
    const struct mu_contention_gain *g = &p->gain;
    json_t *nodes = json_array(), *notes = json_array();
    for (uint32_t i = 0; q->cluster.topology && i < p->count; i++)
        json_array_append_new(nodes, json_string(node_name(q, p->order[i])));
    for (uint32_t i = 0; q->cluster.topology && i < q->cluster.topology->note_count; i++)
        json_array_append_new(notes, json_string(q->cluster.topology->notes[i]));
    return json_pack("{s:s, s:f, s:f, s:f, s:o, s:o}", "way", way_names[g->way], "step_seconds", g->step_s,
                     "step_seconds_by_name", g->by_name_s, "step_seconds_random", g->random_s, "nodes", nodes, "notes",
                     notes);
}

/* ---- changes ---- */

/* All changes are judged before anything is printed. */
static int judge_changes(const struct plan_question *q, const char *text)
{
    char *list = strdup(text), *rest = list, *item;
    int code = list ? MU_EXIT_OK : MU_EXIT_FAILURE;
    while (code == MU_EXIT_OK && (item = strsep(&rest, ",")) != NULL) {
        struct plan_question other = *q;
        code = apply_change(item, &other);
    }
    free(list);
    return code;
}

static json_t *change_json(const char *item, const struct mu_candidate *base, const struct mu_candidate *found,
                           const char *error)
{
    if (error)
        return json_pack("{s:s, s:s}", "change", item, "error", error);
    return json_pack("{s:s, s:f, s:o}", "change", item, "difference", found->tokens_per_day / base->tokens_per_day - 1,
                     "plan", candidate_json(found));
}

static void add_change(struct mu_cli_table *table, const char *item, const struct mu_candidate *base,
                       const struct mu_candidate *found)
{
    char tokens[16];
    mu_cli_table_add(table, "%s", item);
    if (!found) {
        mu_cli_table_add(table, "not possible");
        for (int column = 2; column < CHANGE_COLUMNS; column++)
            mu_cli_table_add(table, "-");
        return;
    }
    mu_cli_count(found->tokens_per_day, tokens);
    mu_cli_table_add(table, "%u x %u x %u", found->plan.tp, found->plan.pp, found->plan.dp);
    mu_cli_table_add(table, "%.3g s", found->forecast.step_s);
    mu_cli_table_add(table, "%.1f %%", 100 * found->goodput.share);
    mu_cli_table_add(table, "%s", tokens);
    mu_cli_table_add(table, "%+.1f %%", 100 * (found->tokens_per_day / base->tokens_per_day - 1));
}

/* One line (of the table, or of the list) for each change, which have been judged: the best layout then, against the
 * best of the question as it is. */
static void what_if(const struct plan_question *q, const struct mu_candidate *base, char *list,
                    struct mu_cli_table *table, json_t *json)
{
    struct mu_candidate found[PLAN_TOP_MAX];
    for (char *rest = list, *item; (item = strsep(&rest, ",")) != NULL;) {
        struct plan_question other = *q;
        struct mu_search_result result;
        struct mu_error err;
        MU_ASSERT(apply_change(item, &other) == MU_EXIT_OK);
        bool fits = plan_ask(&other, found, 1, &result, &err) == MU_OK;
        if (json)
            json_array_append_new(json, change_json(item, base, found, fits ? NULL : err.text));
        else
            add_change(table, item, base, fits ? found : NULL);
    }
}

static void print_json(const struct plan_question *q, const struct mu_candidate *found,
                       const struct mu_search_result *result, const struct placement *placed, char *changes_list)
{
    json_t *plans = json_array(), *others = json_array();
    for (uint32_t i = 0; i < result->count; i++)
        json_array_append_new(plans, candidate_json(&found[i]));
    what_if(q, &found[0], changes_list, NULL, others);
    json_t *all =
        json_pack("{s:s, s:i, s:i, s:i, s:o, s:o, s:o}", "cluster", q->cluster.name, "devices",
                  (int)mu_cluster_devices(&q->cluster), "tried", (int)result->tried, "fitting", (int)result->fitting,
                  "plans", plans, "placement", placement_json(q, placed), "what_if", others);
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(all);
}

static void print_tables(const struct plan_question *q, const struct mu_candidate *found,
                         const struct mu_search_result *result, const struct placement *placed, char *changes_list)
{
    static const char *const names[CHANGE_COLUMNS] = {"WHAT IF", "TP x PP x DP", "STEP",
                                                      "GOODPUT", "TOKENS/DAY",   "DIFFERENCE"};
    struct mu_cli_table *table = mu_cli_table_new(COLUMNS);
    heading(table);
    for (uint32_t i = 0; i < result->count; i++)
        add_row(table, &found[i]);
    mu_cli_table_print_free(table);
    say_notes(q, &found[0]);
    print_placement(q, placed);
    if (!changes_list)
        return;
    printf("\n");
    table = mu_cli_table_new(CHANGE_COLUMNS);
    for (int i = 0; i < CHANGE_COLUMNS; i++)
        mu_cli_table_add(table, "%s", names[i]);
    what_if(q, &found[0], changes_list, table, NULL);
    mu_cli_table_print_free(table);
}

static int answer(struct mu_cli *cli, const struct plan_question *q, uint32_t top, const char *change_text)
{
    struct mu_candidate found[PLAN_TOP_MAX];
    struct mu_search_result result;
    struct placement placed;
    struct mu_error err;
    int code = change_text ? judge_changes(q, change_text) : MU_EXIT_OK;
    if (code != MU_EXIT_OK)
        return code;
    if (plan_ask(q, found, top, &result, &err) != MU_OK || place(q, &found[0], &placed, &err) != MU_OK)
        return mu_cli_fail(&err);
    char *list = change_text ? strdup(change_text) : NULL;
    (cli->json ? print_json : print_tables)(q, found, &result, &placed, list);
    free(placed.order);
    free(list);
    return MU_EXIT_OK;
}

int mu_cmd_plan(struct mu_cli *cli, int argc, char **argv)
{
    const char *change_text = NULL, *measured = NULL, *top_text = "5", *degrees[4] = {"0", "0", "0", "0"};
    bool fp32 = false;
    const struct mu_cli_option options[] = {{"--what-if", &change_text, NULL}, {"--tp", &degrees[0], NULL},
                                            {"--pp", &degrees[1], NULL},       {"--dp", &degrees[2], NULL},
                                            {"--micro", &degrees[3], NULL},    {"--top", &top_text, NULL},
                                            {"--fp32", NULL, &fp32},           {"--measured", &measured, NULL}};
    struct plan_question q;
    struct mu_job_spec spec;
    struct mu_error err;
    uint64_t top;
    if (mu_cli_parse("plan", argc, argv, options, (int)(sizeof options / sizeof options[0]), 2, 2) < 0)
        return MU_EXIT_USAGE;
    mu_search_limits_init(&q.limits);
    if (!plan_read_degrees("plan", degrees, &q.limits) ||
        !mu_cli_number("plan", "--top", top_text, 1, PLAN_TOP_MAX, &top))
        return MU_EXIT_USAGE;
    if (plan_question_read(argv[0], argv[1], &q, &spec, &err) != MU_OK)
        return mu_cli_fail(&err);
    q.limits.bf16 = q.limits.bf16 && !fp32;
    struct plan_measured fit = {.count = 0};
    int code = !measured || plan_calibrate(measured, &q, &fit, &err) == MU_OK ? MU_EXIT_OK : mu_cli_fail(&err);
    if (code == MU_EXIT_OK)
        code = answer(cli, &q, (uint32_t)top, change_text);
    if (code == MU_EXIT_OK && fit.count > 0 && !cli->json)
        printf("Calibrated on %u measured step%s: mean error %.1f %%, before %.1f %%.\n", fit.count,
               fit.count == 1 ? "" : "s", 100 * fit.error_after, 100 * fit.error_before);
    plan_question_fini(&q);
    return code;
}
