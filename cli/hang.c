/* muster report hang: what the members of a job remembered when one of them was given up, or somebody demanded it. */
#include <inttypes.h>
#include <stdio.h>

#include "cli/recall.h"
#include "common/clock.h"
#include "common/flight.h"

/* ---- a table of standings ---- */

void mu_cli_doing(const Muster__V1__Standing *standing, char out[MU_CLI_DOING_SIZE])
{
    if (!standing->has_answered)
        snprintf(out, MU_CLI_DOING_SIZE, "has not answered");
    else if (standing->doing == MUSTER__V1__FLIGHT_KIND__FLIGHT_KIND_UNSPECIFIED)
        snprintf(out, MU_CLI_DOING_SIZE, "nothing of a step");
    else
        snprintf(out, MU_CLI_DOING_SIZE, "%s %" PRIu64, mu_flight_name((unsigned)standing->doing), standing->number);
}

static void add_standing(struct mu_cli_table *table, const Muster__V1__Standing *standing)
{
    char doing[MU_CLI_DOING_SIZE], peers[128] = "-";
    size_t length = 0;
    mu_cli_doing(standing, doing);
    for (size_t i = 0; i < standing->n_waits_for && length + 12 < sizeof peers; i++)
        length += (size_t)snprintf(peers + length, sizeof peers - length, "%s%u", i ? "," : "", standing->waits_for[i]);
    mu_cli_table_add(table, "%u", standing->rank);
    mu_cli_table_add(table, "%s", standing->worker);
    if (standing->has_step)
        mu_cli_table_add(table, "%" PRIu64, standing->step);
    else
        mu_cli_table_add(table, "-");
    mu_cli_table_add(table, "%s", doing);
    if (standing->has_answered)
        mu_cli_table_add(table, "%.1f s", (double)standing->quiet_us * 1e-6);
    else
        mu_cli_table_add(table, "-");
    mu_cli_table_add(table, "%s", peers);
}

void mu_cli_print_standings(Muster__V1__Standing *const *standings, size_t count)
{
    static const char *const heading[] = {"RANK", "WORKER", "STEP", "DOING", "QUIET FOR", "WAITS FOR"};
    struct mu_cli_table *table = mu_cli_table_new(6);
    for (int i = 0; i < 6; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    for (size_t i = 0; i < count; i++)
        add_standing(table, standings[i]);
    mu_cli_table_print_free(table);
}

/* ---- reports ---- */

static int list(struct mu_cli *cli)
{
    const Muster__V1__ListHangReportsRequest request = MUSTER__V1__LIST_HANG_REPORTS_REQUEST__INIT;
    const Muster__V1__ListHangReportsResponse *reply = NULL;
    int code = mu_cli_call_or_exit(cli, "DiagnosticService/ListHangReports", &request,
                                   &muster__v1__list_hang_reports_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    static const char *const heading[] = {"REPORT", "WHEN", "JOB", "STEP", "GIVEN UP", "ANSWERED", "VERDICT"};
    struct mu_cli_table *table = cli->json ? NULL : mu_cli_table_new(7);
    for (int i = 0; table && i < 7; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    for (size_t i = 0; i < reply->n_reports; i++) {
        const Muster__V1__HangReport *report = reply->reports[i];
        if (cli->json) {
            mu_cli_print_json(&report->base, true);
            continue;
        }
        char age[16];
        mu_cli_age(report->wall_us, age);
        mu_cli_table_add(table, "%" PRIu64, report->number);
        mu_cli_table_add(table, "%s", age);
        mu_cli_table_add(table, "%s", report->job);
        mu_cli_table_add(table, "%" PRIu64, report->step);
        mu_cli_table_add(table, "%s", report->worker[0] ? report->worker : "-");
        mu_cli_table_add(table, "%u of %u", report->answered, report->asked);
        mu_cli_table_add(table, "%s", report->verdict);
    }
    mu_cli_table_end(table, MU_EXIT_OK);
    return MU_EXIT_OK;
}

static void print_threads(const Muster__V1__HangReport *report, bool of_all)
{
    size_t others = 0;
    for (size_t i = 0; i < report->n_standings; i++) {
        const Muster__V1__Standing *standing = report->standings[i];
        bool is_shown = of_all || standing->is_culprit;
        for (size_t k = 0; is_shown && k < standing->n_threads; k++)
            printf("  rank %u, thread %s\n", standing->rank, standing->threads[k]);
        others += !is_shown && standing->n_threads > 0;
    }
    if (others)
        printf("threads of %zu more: muster report hang %" PRIu64 " --threads\n", others, report->number);
    if (of_all && report->threads_left_out)
        printf("threads of %u more were not kept: a report has room for 1 MiB of them\n", report->threads_left_out);
}

static void print_report(const Muster__V1__HangReport *report, bool threads_of_all)
{
    char ts[32];
    mu_clock_format(report->wall_us, ts);
    printf("report %" PRIu64 ": job %s, generation %" PRIu64 ", step %" PRIu64 ", at %s, %s%s%s\n", report->number,
           report->job, report->generation, report->step, ts, report->worker[0] ? "before worker " : "on demand",
           report->worker, report->worker[0] ? " was given up" : "");
    mu_cli_print_standings(report->standings, report->n_standings);
    printf("%s\n", report->verdict);
    print_threads(report, threads_of_all);
}

int mu_cli_report_hang(struct mu_cli *cli, const char *which, bool threads_of_all)
{
    Muster__V1__GetHangReportRequest request = MUSTER__V1__GET_HANG_REPORT_REQUEST__INIT;
    const Muster__V1__GetHangReportResponse *reply = NULL;
    if (!which)
        return list(cli);
    if (!mu_cli_number("report", "hang", which, 1, UINT64_MAX, &request.number))
        return MU_EXIT_USAGE;
    int code = mu_cli_call_or_exit(cli, "DiagnosticService/GetHangReport", &request,
                                   &muster__v1__get_hang_report_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json)
        mu_cli_print_json(&reply->report->base, false);
    else
        print_report(reply->report, threads_of_all);
    return MU_EXIT_OK;
}
