#include "cli/probe_attached.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "muster/v1/probe.pb-c.h"

#define SERVICE "ProbeService/"

enum { LOOK_NS = 100000000, MATRIX_MAX = 12 };

/* ---- asking ---- */

static int wait_for_end(struct mu_cli *cli, uint64_t number, const Muster__V1__ReadProbeResponse **ret)
{
    Muster__V1__ReadProbeRequest request = MUSTER__V1__READ_PROBE_REQUEST__INIT;
    bool shows = isatty(STDERR_FILENO);
    request.number = number;
    for (;;) {
        mu_wire_arena_reset(&cli->arena);
        int code =
            mu_cli_call_or_exit(cli, SERVICE "ReadProbe", &request, &muster__v1__read_probe_response__descriptor, ret);
        if (shows)
            fprintf(stderr, code || (*ret)->is_over ? "\r\033[K" : "\rstep %u of %u", code ? 0 : (*ret)->step,
                    code ? 0 : (*ret)->steps);
        if (code != MU_EXIT_OK || (*ret)->is_over)
            return code;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
}

static int ask(struct mu_cli *cli, const struct mu_probe_wish *wish, const Muster__V1__ReadProbeResponse **ret)
{
    Muster__V1__ProbeRequest request = MUSTER__V1__PROBE_REQUEST__INIT;
    const Muster__V1__ProbeResponse *begun = NULL;
    request.job = (char *)(uintptr_t)wish->job;
    request.quick = wish->quick;
    request.storage_mib = wish->storage_mib;
    int code = mu_cli_call_or_exit(cli, SERVICE "Probe", &request, &muster__v1__probe_response__descriptor, &begun);
    return code == MU_EXIT_OK ? wait_for_end(cli, begun->number, ret) : code;
}

/* ---- plain values ---- */

static void copy(char *out, size_t size, const char *text)
{
    snprintf(out, size, "%s", text);
}

/* Memory is the caller's to free, with mu_probe_result's members. */
static enum mu_status to_result(const Muster__V1__ReadProbeResponse *pb, struct mu_probe_result *ret,
                                struct mu_error *err)
{
    struct mu_probe_member *members = calloc(pb->n_workers + 1, sizeof *members);
    struct mu_probe_link *links = calloc(pb->n_links + 1, sizeof *links);
    *ret = (struct mu_probe_result){.member_count = (uint32_t)pb->n_workers,
                                    .link_count = (uint32_t)pb->n_links,
                                    .members = members,
                                    .links = links};
    if (!members || !links)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu workers and %zu links", pb->n_workers, pb->n_links);
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < pb->n_workers && status == MU_OK; i++) {
        const Muster__V1__ProbeWorker *from = pb->workers[i];
        struct mu_probe_member *to = &members[i];
        copy(to->name, sizeof to->name, from->name);
        copy(to->host, sizeof to->host, from->host);
        copy(to->backend, sizeof to->backend, from->backend);
        copy(to->text, sizeof to->text, from->text);
        to->out = from->is_out;
        to->has_alone = from->alone != NULL;
        to->write_rate = from->write_rate;
        to->read_rate = from->read_rate;
        to->barrier_s = from->barrier_s;
        to->ring_rate = from->ring_rate;
        if (from->alone)
            status = mu_wire_probe_alone_from_pb(from->alone, &to->alone, err);
    }
    for (size_t i = 0; i < pb->n_links && status == MU_OK; i++) {
        const Muster__V1__ProbeLink *from = pb->links[i];
        if (from->a >= pb->n_workers || from->b >= pb->n_workers)
            return mu_fail(err, MU_ERR_INVALID, "the coordinator told of a link between workers that it did not name");
        links[i].a = from->a;
        links[i].b = from->b;
        links[i].state = from->pair ? MU_PROBE_LINK_GOOD : from->text[0] ? MU_PROBE_LINK_FAILED : MU_PROBE_LINK_UNKNOWN;
        if (from->pair)
            status = mu_wire_probe_pair_from_pb(from->pair, &links[i].pair, err);
    }
    return status;
}

/* ---- showing ---- */

enum { CELL_SIZE = 16 };

static void rate_cell(double rate, char out[CELL_SIZE])
{
    if (rate > 0)
        mu_cli_bytes((uint64_t)rate, out);
    else
        snprintf(out, CELL_SIZE, "-");
}

static void time_cell(double seconds, char out[CELL_SIZE])
{
    if (seconds > 0)
        snprintf(out, CELL_SIZE, seconds < 1e-3 ? "%.0fus" : "%.1fms", seconds < 1e-3 ? seconds * 1e6 : seconds * 1e3);
    else
        snprintf(out, CELL_SIZE, "-");
}

static double rate_of(const struct mu_probe_link *link)
{
    return link->pair.out_rate < link->pair.in_rate ? link->pair.out_rate : link->pair.in_rate;
}

static void add_worker(struct mu_cli_table *table, const struct mu_probe_result *result, uint32_t at, double *scratch)
{
    const struct mu_probe_member *m = &result->members[at];
    char flops[CELL_SIZE] = "-", cells[8][CELL_SIZE];
    double rates = 0, times = 0, least = 0;
    uint32_t count = 0, slowest = at;
    for (uint32_t i = 0; i < result->link_count; i++) {
        const struct mu_probe_link *link = &result->links[i];
        if (link->state != MU_PROBE_LINK_GOOD || (link->a != at && link->b != at))
            continue;
        if (count == 0 || rate_of(link) < least) {
            least = rate_of(link);
            slowest = link->a == at ? link->b : link->a;
        }
        scratch[count++] = rate_of(link);
    }
    rates = mu_probe_median(scratch, count);
    for (uint32_t i = count = 0; i < result->link_count; i++)
        if (result->links[i].a == at || result->links[i].b == at)
            scratch[count++] = result->links[i].pair.round_trip_s;
    times = mu_probe_median(scratch, count);
    if (m->has_alone)
        mu_cli_count(mu_probe_flops(&m->alone), flops);
    rate_cell(m->alone.memory_rate, cells[0]);
    rate_cell(m->alone.to_host_rate, cells[1]);
    rate_cell(m->write_rate, cells[2]);
    rate_cell(m->read_rate, cells[3]);
    time_cell(times, cells[4]);
    rate_cell(rates, cells[5]);
    rate_cell(least, cells[6]);
    rate_cell(m->ring_rate, cells[7]);
    mu_cli_table_add(table, "%s", m->name);
    mu_cli_table_add(table, "%s", m->host);
    mu_cli_table_add(table, "%s", flops);
    for (int i = 0; i < 6; i++)
        mu_cli_table_add(table, "%s", cells[i]);
    mu_cli_table_add(table, slowest == at ? "-" : "%s to %s", cells[6], result->members[slowest].name);
    mu_cli_table_add(table, "%s", cells[7]);
}

static void print_workers(const struct mu_probe_result *result)
{
    static const char *const heading[] = {"WORKER", "HOST",       "FLOP/S", "MEMORY/S", "GPU-HOST/S", "WRITE/S",
                                          "READ/S", "ROUND-TRIP", "PAIR/S", "SLOWEST",  "RING/S"};
    uint32_t most = result->link_count + 1;
    double *scratch = calloc(most, sizeof *scratch);
    struct mu_cli_table *table = mu_cli_table_new(sizeof heading / sizeof heading[0]);
    MU_ASSERT(scratch);
    for (size_t i = 0; i < sizeof heading / sizeof heading[0]; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    for (uint32_t i = 0; i < result->member_count; i++)
        add_worker(table, result, i, scratch);
    mu_cli_table_print_free(table);
    free(scratch);
    for (uint32_t i = 0; i < result->member_count; i++)
        if (result->members[i].text[0] && !result->members[i].out)
            printf("%s: not measured: %s\n", result->members[i].name, result->members[i].text);
}

/* What each gets from each; the lower way of the two. */
static void print_pairs(const struct mu_probe_result *result)
{
    uint32_t count = result->member_count;
    if (count < 3 || count > MATRIX_MAX)
        return;
    struct mu_cli_table *table = mu_cli_table_new((int)count + 1);
    mu_cli_table_add(table, "PAIR/S");
    for (uint32_t i = 0; i < count; i++)
        mu_cli_table_add(table, "%s", result->members[i].name);
    for (uint32_t row = 0; row < count; row++) {
        mu_cli_table_add(table, "%s", result->members[row].name);
        for (uint32_t column = 0; column < count; column++) {
            char cell[CELL_SIZE];
            snprintf(cell, sizeof cell, row == column ? "" : "-");
            for (uint32_t i = 0; i < result->link_count; i++) {
                const struct mu_probe_link *link = &result->links[i];
                if ((link->a == row && link->b == column) || (link->a == column && link->b == row))
                    rate_cell(rate_of(link), cell);
            }
            mu_cli_table_add(table, "%s", cell);
        }
    }
    printf("\n");
    mu_cli_table_print_free(table);
}

static void print_findings(const Muster__V1__ReadProbeResponse *pb)
{
    printf("\nprobe %llu: ", (unsigned long long)pb->number);
    if (pb->n_findings == 0)
        printf("nothing stands out\n");
    else
        printf("%zu thing%s out\n", pb->n_findings, pb->n_findings == 1 ? " stands" : "s stand");
    for (size_t i = 0; i < pb->n_findings; i++)
        printf("  %s\n", pb->findings[i]->text);
}

/* ---- the cluster file ---- */

static enum mu_status write_file(const char *path, const char *text, struct mu_error *err)
{
    FILE *file = fopen(path, "we");
    if (!file)
        return mu_fail_errno(err, errno, "cannot write '%s'", path);
    bool good = fputs(text, file) >= 0;
    good = fclose(file) == 0 && good;
    return good ? MU_OK : mu_fail_errno(err, errno, "cannot write '%s'", path);
}

static enum mu_status write_cluster(const struct mu_probe_result *result, const char *path, struct mu_error *err)
{
    char *text = mu_probe_cluster_file(result, err);
    enum mu_status status = text ? write_file(path, text, err) : err->status;
    free(text);
    return status;
}

int mu_probe_attached(struct mu_cli *cli, const struct mu_probe_wish *wish)
{
    const Muster__V1__ReadProbeResponse *pb = NULL;
    struct mu_probe_result result = {.member_count = 0};
    struct mu_error err;
    int code = ask(cli, wish, &pb);
    if (code != MU_EXIT_OK)
        return code;
    enum mu_status status = to_result(pb, &result, &err);
    if (cli->json)
        mu_cli_print_json(&pb->base, false);
    if (status == MU_OK && !cli->json) {
        print_workers(&result);
        print_pairs(&result);
        print_findings(pb);
    }
    if (status == MU_OK && wish->out)
        status = write_cluster(&result, wish->out, &err);
    free(result.members);
    free(result.links);
    if (status != MU_OK)
        return mu_cli_fail(&err);
    return pb->n_findings == 0 ? MU_EXIT_OK : MU_EXIT_FAILURE;
}
