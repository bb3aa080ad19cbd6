/* muster report: where the time of a job's workers went. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/recall.h"

enum { CLASS_COUNT = (sizeof(Muster__V1__TimeByClass) - sizeof(ProtobufCMessage)) / sizeof(double) };
static const char *const explained[CLASS_COUNT] = {
    "forward, backward, optimizer",
    "exchanges that nothing was computed behind",
    "waits that the pipeline's schedule explains",
    "waits for a slower worker",
    "reading data",
    "copies for checkpoints, and the last one",
    "steps that had been done before",
    "recovery: the step that broke off, until the loss was noticed",
    "recovery: until everybody held still",
    "recovery: planning",
    "recovery: connecting and moving state",
    "planned changes: who joins, leaves or is slow",
    "too few workers for the job",
    "loading the job, its first generation",
    "attached, without a rank that computes",
    "lost, and neither back nor replaced",
    "stepping, not reported yet",
};

struct report {
    struct mu_cli *cli;
    const Muster__V1__GetGoodputResponse *first; /* for the totals */
    const Muster__V1__Account **accounts;
    size_t count, capacity;
};

static const char *class_name(int k)
{
    return muster__v1__time_by_class__descriptor.fields[k].name;
}

static double seconds_in(const Muster__V1__TimeByClass *time, int k)
{
    return (&time->useful)[k];
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

static int fetch(struct report *report, char *job)
{
    Muster__V1__GetGoodputRequest request = MUSTER__V1__GET_GOODPUT_REQUEST__INIT;
    request.job = job;
    request.page_size = 1000;
    do {
        const Muster__V1__GetGoodputResponse *reply;
        int code = mu_cli_call_or_exit(report->cli, "GetGoodput", &request,
                                       &muster__v1__get_goodput_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            return code;
        if (!report->first)
            report->first = reply;
        if (report->count + reply->n_accounts > report->capacity) {
            report->capacity = 2 * (report->count + reply->n_accounts);
            report->accounts = realloc(report->accounts, report->capacity * sizeof(Muster__V1__Account *));
            MU_ASSERT(report->accounts);
        }
        for (size_t i = 0; i < reply->n_accounts; i++)
            report->accounts[report->count++] = reply->accounts[i];
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    return MU_EXIT_OK;
}

static int by_lost(const void *a, const void *b)
{
    const Muster__V1__Account *const *left = a, *const *right = b;
    return ((*left)->lost_seconds < (*right)->lost_seconds) - ((*left)->lost_seconds > (*right)->lost_seconds);
}

static const char *worker_name(const Muster__V1__Account *account)
{
    return account->worker[0] ? account->worker : "(former ones)";
}

static void print_classes(const struct report *report)
{
    const Muster__V1__GetGoodputResponse *total = report->first;
    struct mu_cli_table *table = mu_cli_table_new(5);
    static const char *const heading[] = {"CLASS", "SECONDS", "SHARE", "MOST", "WHAT IT IS"};
    for (int i = 0; i < 5; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    for (int k = 0; k < CLASS_COUNT; k++) {
        const Muster__V1__Account *most = NULL;
        double all = seconds_in(total->total, k);
        for (size_t i = 0; i < report->count; i++) {
            if (!most || seconds_in(report->accounts[i]->seconds, k) > seconds_in(most->seconds, k))
                most = report->accounts[i];
        }
        if (!(all > 0))
            continue;
        mu_cli_table_add(table, "%s", class_name(k));
        mu_cli_table_add(table, "%.1f", all);
        mu_cli_table_add(table, "%.1f %%", percent(all, total->total_seconds));
        mu_cli_table_add(table, "%s %.1f", worker_name(most), seconds_in(most->seconds, k));
        mu_cli_table_add(table, "%s", explained[k]);
    }
    mu_cli_table_print_free(table);
}

/* ---- predicted and measured ---- */

enum { TERM_COUNT = (sizeof(Muster__V1__StepTerms) - sizeof(ProtobufCMessage)) / sizeof(double) };

static double term_in(const Muster__V1__StepTerms *terms, int i)
{
    return (&terms->compute)[i];
}

static double step_of(const Muster__V1__StepTerms *terms)
{
    double sum = 0;
    for (int i = 0; terms && i < TERM_COUNT; i++)
        sum += term_in(terms, i);
    return sum;
}

static void add_term(struct mu_cli_table *table, const char *name, double predicted, const double *measured,
                     double step)
{
    mu_cli_table_add(table, "%s", name);
    mu_cli_table_add(table, "%.2f ms", 1e3 * predicted);
    mu_cli_table_add(table, measured ? "%.2f ms" : "-", measured ? 1e3 * *measured : 0);
    mu_cli_table_add(table, measured ? "%+.1f %%" : "-", measured ? percent(*measured - predicted, step) : 0);
}

static void print_prediction(const Muster__V1__Prediction *p)
{
    static const char *const ways[] = {"none", "none", "selective", "full"}; /* enum Recompute */
    static const char *const heading[] = {"TERM", "PREDICTED", "MEASURED", "OF THE STEP"};
    const Muster__V1__StepTerms *measured = p->steps ? p->measured : NULL;
    double step = step_of(p->predicted), taken = step_of(measured);
    printf("Generation %" PRIu64 ", tp %u x pp %u x dp %u: steps at rank %u (worker %s), predicted %s", p->generation,
           p->layout->tp, p->layout->pp, p->layout->dp, p->rank, p->worker,
           p->calibrated ? "by measured rates" : "by default rates");
    if (measured)
        printf(", measured over %" PRIu64, p->steps);
    printf("\n");
    struct mu_cli_table *table = mu_cli_table_new(4);
    for (int i = 0; i < 4; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    for (int i = 0; i < TERM_COUNT; i++) {
        double now = measured ? term_in(measured, i) : 0, then = term_in(p->predicted, i);
        if (then > 5e-6 || now > 5e-6) /* it shows */
            add_term(table, muster__v1__step_terms__descriptor.fields[i].name, then, measured ? &now : NULL, step);
    }
    add_term(table, "step", step, measured ? &taken : NULL, step);
    mu_cli_table_print_free(table);
    if (measured)
        printf("To recalibrate, a line for muster plan --measured: %u,%u,%u,%u,%s,%.4g\n", p->layout->tp, p->layout->pp,
               p->layout->dp, p->micro, p->recompute <= 3 ? ways[p->recompute] : ways[0], taken);
    printf("\n");
}

static void print_worst(struct report *report, size_t limit)
{
    struct mu_cli_table *table = mu_cli_table_new(6);
    static const char *const heading[] = {"WORKER", "NOW", "SECONDS", "USEFUL", "LOST", "MOST OF IT"};
    qsort(report->accounts, report->count, sizeof *report->accounts, by_lost);
    for (int i = 0; i < 6; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    for (size_t i = 0; i < report->count && i < limit; i++) {
        const Muster__V1__Account *account = report->accounts[i];
        int most = 1;
        for (int k = 1; k < CLASS_COUNT - 1; k++) /* without useful and unreported */
            most = seconds_in(account->seconds, k) > seconds_in(account->seconds, most) ? k : most;
        mu_cli_table_add(table, "%s", worker_name(account));
        mu_cli_table_add(table, "%s", account->now ? class_name((int)account->now - 1) : "gone");
        mu_cli_table_add(table, "%.1f", account->total_seconds);
        mu_cli_table_add(table, "%.1f %%", percent(account->seconds->useful, account->total_seconds));
        mu_cli_table_add(table, "%.1f", account->lost_seconds);
        mu_cli_table_add(table, "%s %.1f", class_name(most), seconds_in(account->seconds, most));
    }
    mu_cli_table_print_free(table);
    if (report->count > limit)
        printf("and %zu more: --workers N shows N of them\n", report->count - limit);
}

static void print_all_json(const struct report *report)
{
    Muster__V1__GetGoodputResponse all = *report->first;
    all.accounts = (Muster__V1__Account **)(uintptr_t)report->accounts;
    all.n_accounts = report->count;
    all.next_page_token = (char *)(uintptr_t) "";
    mu_cli_print_json(&all.base, false);
}

int mu_cmd_report(struct mu_cli *cli, int argc, char **argv)
{
    const char *workers = "10";
    bool threads = false;
    const struct mu_cli_option options[] = {{"--workers", &workers, NULL}, {"--threads", NULL, &threads}};
    struct report report = {.cli = cli};
    uint64_t limit;
    int words = mu_cli_parse("report", argc, argv, options, 2, 1, 2);
    if (words < 0 || !mu_cli_number("report", "--workers", workers, 0, UINT32_MAX, &limit))
        return MU_EXIT_USAGE;
    if (strcmp(argv[0], "hang") == 0)
        return mu_cli_report_hang(cli, words > 1 ? argv[1] : NULL, threads);
    if (threads)
        return mu_cli_usage("report", "--threads goes with 'hang'");
    if (words > 1)
        return mu_cli_usage("report", "'%s' is one word too many", argv[1]);
    int code = fetch(&report, argv[0]);
    if (code == MU_EXIT_OK && cli->json) {
        print_all_json(&report);
    } else if (code == MU_EXIT_OK) {
        const Muster__V1__GetGoodputResponse *total = report.first;
        printf("job %s: %.1f %% of %.1f worker seconds were useful, %.1f were lost\n\n", argv[0],
               percent(total->total->useful, total->total_seconds), total->total_seconds, total->lost_seconds);
        print_classes(&report);
        printf("\n");
        if (total->prediction && total->prediction->predicted && total->prediction->layout)
            print_prediction(total->prediction);
        print_worst(&report, (size_t)limit);
    }
    free(report.accounts);
    return code;
}
