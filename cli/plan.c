/* `muster plan cluster.yaml job.yaml`: which layout, how fast, what failures cost; before anything runs. No
 * coordinator. */
#include "cli/cli.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cluster_file.h"
#include "cli/job_file.h"
#include "plan/search.h"

enum { TOP_MAX = 100 };

/* Mean error against published runs, untuned (tests/unit/test_forecast.c): what a forecast may be off by. */
#define FORECAST_ERROR 0.12

struct question {
    struct mu_forecast_model model;
    struct mu_cluster cluster;
    struct mu_search_limits limits;
    struct mu_forecast_rates rates;
};

/* ---- --what-if name=value,... ---- */

struct change {
    const char *name;
    double most; /* of a whole number; 0: any number, judged with the cluster */
    void (*apply)(struct question *q, double value);
};

static void change_oversubscription(struct question *q, double value)
{
    if (q->cluster.level_count == 0)
        q->cluster.levels[q->cluster.level_count++].nodes = 1;
    q->cluster.levels[0].oversubscription = value;
}
static void change_nodes(struct question *q, double value)
{
    q->cluster.nodes = (uint32_t)value;
}
static void change_spares(struct question *q, double value)
{
    q->cluster.spare_nodes = (uint32_t)value;
}
static void change_nic(struct question *q, double value)
{
    q->cluster.device.nic_bytes_per_second = value;
}
static void change_flops(struct question *q, double value)
{
    q->cluster.device.flops_bf16 = value;
}
static void change_memory(struct question *q, double value)
{
    q->cluster.device.memory_bytes = value;
}
static void change_mtbf(struct question *q, double value)
{
    q->cluster.device_mtbf_hours = value;
}
static void change_restart(struct question *q, double value)
{
    q->cluster.restart_s = value;
}
static void change_batch(struct question *q, double value)
{
    q->model.sequences = (uint32_t)value;
}
static void change_storage(struct question *q, double value)
{
    q->cluster.storage_write_bytes_per_second = q->cluster.storage_read_bytes_per_second = value;
}

static const struct change changes[] = {{"oversubscription", 0, change_oversubscription},
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
static int apply_change(const char *item, struct question *q)
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

static void say_notes(const struct question *q, const struct mu_candidate *best)
{
    const struct mu_goodput *g = &best->goodput;
    printf(
        "\n%s: %u nodes of %u %s, %u spare; a failure every %.3g h; checkpoints every %.0f s (stall %.2g s, %.3g GB), "
        "restart %.0f s\n",
        q->cluster.name, q->cluster.nodes, q->cluster.device.per_node, q->cluster.device.name, q->cluster.spare_nodes,
        g->mtbf_s / 3600, g->interval_s, g->stall_s, g->state_bytes * 1e-9, g->restart_s);
    printf("Not modelled: slow devices, other jobs on the fabric, data loading, congestion between unlike groups.\n");
}

/* ---- the command ---- */

static enum mu_status ask(const struct question *q, struct mu_candidate *found, uint32_t capacity,
                          struct mu_search_result *ret_result, struct mu_error *err)
{
    return mu_search(&q->model, &q->cluster, &q->rates, &q->limits, found, capacity, ret_result, err);
}

/* All changes are judged before anything is printed. */
static int judge_changes(const struct question *q, const char *text)
{
    char *list = strdup(text), *rest = list, *item;
    int code = list ? MU_EXIT_OK : MU_EXIT_FAILURE;
    while (code == MU_EXIT_OK && (item = strsep(&rest, ",")) != NULL) {
        struct question other = *q;
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
static void what_if(const struct question *q, const struct mu_candidate *base, char *list, struct mu_cli_table *table,
                    json_t *json)
{
    for (char *rest = list, *item; (item = strsep(&rest, ",")) != NULL;) {
        struct question other = *q;
        struct mu_candidate found;
        struct mu_search_result result;
        struct mu_error err;
        MU_ASSERT(apply_change(item, &other) == MU_EXIT_OK);
        bool fits = ask(&other, &found, 1, &result, &err) == MU_OK;
        if (json)
            json_array_append_new(json, change_json(item, base, &found, fits ? NULL : err.text));
        else
            add_change(table, item, base, fits ? &found : NULL);
    }
}

static void print_json(const struct question *q, const struct mu_candidate *found,
                       const struct mu_search_result *result, char *changes_list)
{
    json_t *plans = json_array(), *others = json_array();
    for (uint32_t i = 0; i < result->count; i++)
        json_array_append_new(plans, candidate_json(&found[i]));
    what_if(q, &found[0], changes_list, NULL, others);
    json_t *all = json_pack("{s:s, s:i, s:i, s:i, s:o, s:o}", "cluster", q->cluster.name, "devices",
                            (int)mu_cluster_devices(&q->cluster), "tried", (int)result->tried, "fitting",
                            (int)result->fitting, "plans", plans, "what_if", others);
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(all);
}

static void print_tables(const struct question *q, const struct mu_candidate *found,
                         const struct mu_search_result *result, char *changes_list)
{
    static const char *const names[CHANGE_COLUMNS] = {"WHAT IF", "TP x PP x DP", "STEP",
                                                      "GOODPUT", "TOKENS/DAY",   "DIFFERENCE"};
    struct mu_cli_table *table = mu_cli_table_new(COLUMNS);
    heading(table);
    for (uint32_t i = 0; i < result->count; i++)
        add_row(table, &found[i]);
    mu_cli_table_print_free(table);
    say_notes(q, &found[0]);
    if (!changes_list)
        return;
    printf("\n");
    table = mu_cli_table_new(CHANGE_COLUMNS);
    for (int i = 0; i < CHANGE_COLUMNS; i++)
        mu_cli_table_add(table, "%s", names[i]);
    what_if(q, &found[0], changes_list, table, NULL);
    mu_cli_table_print_free(table);
}

static void fill_question(const struct mu_job_spec *spec, struct question *q)
{
    q->model = (struct mu_forecast_model){
        .config = spec->model, .sequences = spec->batch.sequences, .length = spec->batch.length};
    mu_forecast_rates_init(&q->rates);
    mu_search_limits_init(&q->limits);
}

int mu_cmd_plan(struct mu_cli *cli, int argc, char **argv)
{
    const char *top_text = "5", *change_text = NULL, *tp = "0", *pp = "0", *dp = "0", *micro = "0";
    bool fp32 = false;
    const struct mu_cli_option options[] = {
        {"--top", &top_text, NULL}, {"--what-if", &change_text, NULL}, {"--tp", &tp, NULL},    {"--pp", &pp, NULL},
        {"--dp", &dp, NULL},        {"--micro", &micro, NULL},         {"--fp32", NULL, &fp32}};
    struct question q;
    struct mu_job_spec spec;
    struct mu_candidate found[TOP_MAX];
    struct mu_search_result result;
    struct mu_error err;
    uint64_t top, degrees[4];
    const char *const names[] = {"--tp", "--pp", "--dp", "--micro"};
    if (mu_cli_parse("plan", argc, argv, options, (int)(sizeof options / sizeof options[0]), 2, 2) < 0)
        return MU_EXIT_USAGE;
    const char *const given[] = {tp, pp, dp, micro};
    if (!mu_cli_number("plan", "--top", top_text, 1, TOP_MAX, &top))
        return MU_EXIT_USAGE;
    for (int i = 0; i < 4; i++)
        if (!mu_cli_number("plan", names[i], given[i], 0, UINT32_MAX, &degrees[i]))
            return MU_EXIT_USAGE;
    if (mu_cluster_file_read(argv[0], &q.cluster, &err) != MU_OK || mu_job_file_read(argv[1], &spec, &err) != MU_OK)
        return mu_cli_fail(&err);
    fill_question(&spec, &q);
    q.limits.bf16 = !fp32;
    q.limits.tp = (uint32_t)degrees[0];
    q.limits.pp = (uint32_t)degrees[1];
    q.limits.dp = (uint32_t)degrees[2];
    q.limits.micro = (uint32_t)degrees[3];
    int code = change_text ? judge_changes(&q, change_text) : MU_EXIT_OK;
    if (code != MU_EXIT_OK)
        return code;
    if (ask(&q, found, (uint32_t)top, &result, &err) != MU_OK)
        return mu_cli_fail(&err);
    char *list = change_text ? strdup(change_text) : NULL;
    (cli->json ? print_json : print_tables)(&q, found, &result, list);
    free(list);
    return MU_EXIT_OK;
}
