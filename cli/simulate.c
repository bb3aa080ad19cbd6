/* `muster simulate cluster.yaml job.yaml`: weeks of a job on a cluster whose nodes fail, with the coordinator's own
 * decisions. No coordinator is asked. */
#include "simulate/outlook.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/plan_question.h"
#include "cli/simulate.h"

enum { RUNS_MAX = 100 };

struct runs {
    struct mu_outlook list[RUNS_MAX];
    uint32_t count;
    uint64_t seed; /* of the first, the others follow */
    double days;
};

/* ---- the layout ---- */

/* The first of the best that the core can be given. */
static enum mu_status choose(const struct plan_question *q, struct mu_candidate *ret_candidate, uint32_t *ret_nodes,
                             struct mu_error *err)
{
    struct mu_candidate found[PLAN_TOP_MAX];
    struct mu_search_result result;
    enum mu_status status = plan_ask(q, found, PLAN_TOP_MAX, &result, err), first = MU_OK;
    for (uint32_t i = 0; status == MU_OK && i < result.count; i++) {
        struct mu_error other, *why = i == 0 ? err : &other;
        enum mu_status able = mu_outlook_check(&q->cluster, &q->model, &found[i], ret_nodes, why);
        if (able == MU_OK) {
            *ret_candidate = found[i];
            return MU_OK;
        }
        first = i == 0 ? able : first;
    }
    return status == MU_OK ? first : status;
}

/* ---- output ---- */

struct spread {
    double mean, least, most;
};

static struct spread spread_of(const struct runs *runs, enum mu_outlook_class class)
{
    struct spread s = {0, 1e300, -1e300};
    for (uint32_t i = 0; i < runs->count; i++) {
        double share = runs->list[i].seconds[class] / (runs->days * 86400);
        s.mean += share / runs->count;
        s.least = share < s.least ? share : s.least;
        s.most = share > s.most ? share : s.most;
    }
    return s;
}

static void print_header(const struct plan_question *q, const struct mu_candidate *c, uint32_t nodes,
                         const struct runs *runs)
{
    const struct mu_outlook *o = &runs->list[0];
    printf("%s: %u of %u nodes work, tp %u x pp %u x dp %u, %.3g s a step, ", q->cluster.name, nodes, q->cluster.nodes,
           c->plan.tp, c->plan.pp, c->plan.dp, o->step_s);
    if (o->interval_steps)
        printf("a checkpoint every %" PRIu64 " steps (stall %.2g s, written in %.3g s)\n", o->interval_steps,
               c->goodput.stall_s, c->goodput.write_s);
    else
        printf("no checkpoints\n");
    printf("%.6g days, seed%s %" PRIu64, runs->days, runs->count > 1 ? "s" : "", runs->seed);
    if (runs->count > 1)
        printf(" to %" PRIu64, runs->seed + runs->count - 1);
    printf("\n\n");
}

static void print_shares(const struct mu_candidate *c, const struct runs *runs)
{
    struct mu_cli_table *table = mu_cli_table_new(4);
    static const char *const names[] = {"SHARE OF TIME", "MEAN", "LEAST", "MOST"};
    for (int i = 0; i < 4; i++)
        mu_cli_table_add(table, "%s", names[i]);
    for (int class = 0; class < MU_OUTLOOK_CLASSES; class ++) {
        struct spread s = spread_of(runs, (enum mu_outlook_class) class);
        mu_cli_table_add(table, "%s", class == MU_OUTLOOK_PROGRESS ? "goodput" : mu_outlook_class_names[class]);
        mu_cli_table_add(table, "%.2f %%", 100 * s.mean);
        mu_cli_table_add(table, "%.2f %%", 100 * s.least);
        mu_cli_table_add(table, "%.2f %%", 100 * s.most);
    }
    mu_cli_table_add(table, "closed form");
    mu_cli_table_add(table, "%.2f %%", 100 * c->goodput.share);
    mu_cli_table_add(table, "-");
    mu_cli_table_add(table, "-");
    mu_cli_table_print_free(table);
}

static void print_counts(const struct runs *runs)
{
    double lost = 0, interruptions = 0, planned = 0, sources[MU_FLEET_SOURCES] = {0};
    uint64_t messages = 0;
    for (uint32_t i = 0; i < runs->count; i++) {
        const struct mu_outlook *o = &runs->list[i];
        lost += (double)o->nodes_lost / runs->count;
        interruptions += (double)o->interruptions / runs->count;
        planned += (double)o->planned_changes / runs->count;
        messages += o->messages;
        for (int k = 0; k < MU_FLEET_SOURCES; k++)
            sources[k] += (double)o->recoveries[k] / runs->count;
    }
    printf("\nOn average %.4g nodes lost, %.4g interruptions, %.4g planned changes; recoveries from", lost,
           interruptions, planned);
    for (int k = 0; k < MU_FLEET_SOURCES; k++)
        printf("%s %s %.4g", k ? "," : "", mu_outlook_source_names[k], sources[k]);
    printf(".\nThe coordinator's core handled %" PRIu64 " events.\n", messages);
    for (uint32_t i = 0; i < runs->count; i++)
        if (runs->list[i].failed)
            printf("With seed %" PRIu64 " the job FAILED on day %.1f: %s\n", runs->seed + i, runs->list[i].failed_day,
                   runs->list[i].text);
    printf(
        "The closed form knows checkpoints alone: every failure goes back to the last one, and spares are at hand.\n");
}

static json_t *run_json(const struct mu_outlook *o, uint64_t seed)
{
    json_t *seconds = json_object(), *recoveries = json_object();
    for (int i = 0; i < MU_OUTLOOK_CLASSES; i++)
        json_object_set_new(seconds, mu_outlook_class_names[i], json_real(o->seconds[i]));
    for (int i = 0; i < MU_FLEET_SOURCES; i++)
        json_object_set_new(recoveries, mu_outlook_source_names[i], json_integer(o->recoveries[i]));
    return json_pack("{s:I, s:f, s:o, s:o, s:i, s:i, s:i, s:I, s:I, s:b, s:s}", "seed", (json_int_t)seed, "goodput",
                     o->goodput, "seconds", seconds, "recoveries", recoveries, "nodes_lost", (int)o->nodes_lost,
                     "interruptions", (int)o->interruptions, "planned_changes", (int)o->planned_changes, "steps",
                     (json_int_t)o->steps, "events", (json_int_t)o->messages, "failed", o->failed, "text", o->text);
}

static void print_json(const struct plan_question *q, const struct mu_candidate *c, uint32_t nodes,
                       const struct runs *runs)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < runs->count; i++)
        json_array_append_new(list, run_json(&runs->list[i], runs->seed + i));
    json_t *all = json_pack("{s:s, s:i, s:i, s:i, s:i, s:f, s:f, s:I, s:f, s:o}", "cluster", q->cluster.name, "nodes",
                            (int)nodes, "tp", (int)c->plan.tp, "pp", (int)c->plan.pp, "dp", (int)c->plan.dp, "days",
                            runs->days, "step_seconds", runs->list[0].step_s, "checkpoint_every",
                            (json_int_t)runs->list[0].interval_steps, "closed_form", c->goodput.share, "runs", list);
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(all);
}

/* ---- the command ---- */

static enum mu_status run_all(const struct plan_question *q, const struct mu_job_spec *spec,
                              const struct mu_candidate *candidate, struct runs *runs, uint32_t wanted,
                              struct mu_error *err)
{
    struct plan_site site;
    enum mu_status status = plan_site_init(&site, &q->cluster, err);
    if (status != MU_OK)
        return status;
    for (uint32_t i = 0; i < wanted && status == MU_OK; i++) {
        const struct mu_outlook_question question = {.cluster = &q->cluster,
                                                     .map = site.map,
                                                     .spec = spec,
                                                     .model = &q->model,
                                                     .candidate = candidate,
                                                     .days = runs->days,
                                                     .seed = runs->seed + i};
        status = mu_outlook_run(&question, &runs->list[i], err);
        runs->count += status == MU_OK;
    }
    plan_site_fini(&site);
    return status;
}

static int answer(struct mu_cli *cli, const struct plan_question *q, const struct mu_job_spec *spec, struct runs *runs,
                  uint32_t wanted, const char *picture)
{
    struct mu_candidate candidate;
    struct mu_error err;
    uint32_t nodes;
    enum mu_status status = choose(q, &candidate, &nodes, &err);
    if (status == MU_OK)
        status = run_all(q, spec, &candidate, runs, wanted, &err);
    if (status == MU_OK && picture)
        status = mu_simulate_picture(picture, q->cluster.name, &runs->list[0], nodes, runs->days, &err);
    if (status != MU_OK)
        return mu_cli_fail(&err);
    if (cli->json) {
        print_json(q, &candidate, nodes, runs);
        return MU_EXIT_OK;
    }
    print_header(q, &candidate, nodes, runs);
    print_shares(&candidate, runs);
    print_counts(runs);
    return MU_EXIT_OK;
}

int mu_cmd_simulate(struct mu_cli *cli, int argc, char **argv)
{
    const char *days = "54", *seed = "1", *count = "3", *picture = NULL, *degrees[4] = {"0", "0", "0", "0"};
    const struct mu_cli_option options[] = {{"--days", &days, NULL},     {"--seed", &seed, NULL},
                                            {"--runs", &count, NULL},    {"--tp", &degrees[0], NULL},
                                            {"--pp", &degrees[1], NULL}, {"--dp", &degrees[2], NULL},
                                            {"--svg", &picture, NULL},   {"--micro", &degrees[3], NULL}};
    struct plan_question q;
    struct mu_job_spec spec;
    struct mu_error err;
    struct runs runs = {.count = 0};
    uint64_t day_count, wanted;
    if (mu_cli_parse("simulate", argc, argv, options, (int)(sizeof options / sizeof options[0]), 2, 2) < 0)
        return MU_EXIT_USAGE;
    mu_search_limits_init(&q.limits);
    if (!plan_read_degrees("simulate", degrees, &q.limits) ||
        !mu_cli_number("simulate", "--days", days, 1, 3650, &day_count) ||
        !mu_cli_number("simulate", "--seed", seed, 0, UINT64_MAX - RUNS_MAX, &runs.seed) ||
        !mu_cli_number("simulate", "--runs", count, 1, RUNS_MAX, &wanted))
        return MU_EXIT_USAGE;
    runs.days = (double)day_count;
    if (plan_question_read(argv[0], argv[1], &q, &spec, &err) != MU_OK)
        return mu_cli_fail(&err);
    int code = answer(cli, &q, &spec, &runs, (uint32_t)wanted, picture);
    plan_question_fini(&q);
    for (uint32_t i = 0; i < runs.count; i++)
        mu_outlook_fini(&runs.list[i]);
    return code;
}
