/* muster top: all jobs, and the workers that want to be looked at, anew every few seconds. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "common/clock.h"

enum { ROWS_DEFAULT = 40, ROWS_BESIDE_WORKERS = 7, WORKERS_LEAST = 5 };

struct list {
    const Muster__V1__Worker **workers;
    size_t count, capacity;
};

static int fetch(struct mu_cli *cli, struct list *list)
{
    Muster__V1__ListWorkersRequest request = MUSTER__V1__LIST_WORKERS_REQUEST__INIT;
    request.page_size = 1000;
    do {
        const Muster__V1__ListWorkersResponse *reply;
        int code =
            mu_cli_call_or_exit(cli, "ListWorkers", &request, &muster__v1__list_workers_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            return code;
        if (list->count + reply->n_workers > list->capacity) {
            list->capacity = 2 * (list->count + reply->n_workers);
            list->workers = realloc(list->workers, list->capacity * sizeof(Muster__V1__Worker *));
            MU_ASSERT(list->workers);
        }
        for (size_t i = 0; i < reply->n_workers; i++)
            list->workers[list->count++] = reply->workers[i];
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    return MU_EXIT_OK;
}

/* Those that are not as they should be first, then the slowest. */
static int by_trouble(const void *a, const void *b)
{
    static const int trouble[] = {[MUSTER__V1__WORKER_STATE__WORKER_STATE_ATTACHING] = 1,
                                  [MUSTER__V1__WORKER_STATE__WORKER_STATE_DRAINING] = 2,
                                  [MUSTER__V1__WORKER_STATE__WORKER_STATE_SUSPECT] = 3,
                                  [MUSTER__V1__WORKER_STATE__WORKER_STATE_LOST] = 4};
    const Muster__V1__Worker *left = *(const Muster__V1__Worker *const *)a,
                             *right = *(const Muster__V1__Worker *const *)b;
    int order = trouble[right->state] - trouble[left->state];
    if (order == 0)
        order = (left->seconds_per_leaf < right->seconds_per_leaf) - (left->seconds_per_leaf > right->seconds_per_leaf);
    return order ? order : strcmp(left->name, right->name);
}

static void print_workers(struct list *list, size_t rows)
{
    static const char *const heading[] = {"WORKER", "JOB",  "HOST",    "STATE", "PHASE", "RANK",
                                          "LEAVES", "STEP", "MS/LEAF", "SEEN",  "REASON"};
    enum { COLUMNS = sizeof heading / sizeof heading[0] };
    struct mu_cli_table *table = mu_cli_table_new(COLUMNS);
    for (int i = 0; i < COLUMNS; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    if (list->count)
        qsort(list->workers, list->count, sizeof *list->workers, by_trouble);
    for (size_t i = 0; i < list->count && i < rows; i++) {
        const Muster__V1__Worker *w = list->workers[i];
        mu_cli_table_add(table, "%s", w->name);
        mu_cli_table_add(table, "%s", w->job);
        mu_cli_table_add(table, "%s", w->host);
        mu_cli_table_add(table, "%s", mu_cli_enum(&muster__v1__worker_state__descriptor, (int)w->state));
        mu_cli_table_add(table, "%s", mu_cli_enum(&muster__v1__worker_phase__descriptor, (int)w->phase));
        mu_cli_table_add(table, w->coordinates ? "%u" : "-", w->rank);
        mu_cli_table_add(table, "%u", w->leaves);
        mu_cli_table_add(table, "%" PRIu64, w->step);
        mu_cli_table_add(table, "%.2f", w->seconds_per_leaf * 1e3);
        mu_cli_table_add(table, "%.1fs", (double)w->age_us * 1e-6);
        mu_cli_table_add(table, "%s", w->reason);
    }
    mu_cli_table_print_free(table);
    if (list->count > rows)
        printf("and %zu more, faster ones\n", list->count - rows);
}

static size_t rows_for_workers(bool terminal)
{
    struct winsize size;
    size_t rows = ROWS_DEFAULT;
    if (terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0)
        rows = size.ws_row;
    return rows > ROWS_BESIDE_WORKERS + WORKERS_LEAST ? rows - ROWS_BESIDE_WORKERS : WORKERS_LEAST;
}

static int show(struct mu_cli *cli, bool terminal)
{
    struct list list = {0};
    char ts[32];
    mu_wire_arena_reset(&cli->arena);
    int code = fetch(cli, &list);
    if (code == MU_EXIT_OK) {
        mu_clock_format(mu_clock_wall_us(), ts);
        printf("%s%s  %s  %zu workers\n\n", terminal ? "\033[H\033[2J" : "", cli->address, ts, list.count);
        code = mu_cmd_status(cli, 0, NULL);
    }
    if (code == MU_EXIT_OK) {
        printf("\n");
        print_workers(&list, rows_for_workers(terminal));
        fflush(stdout);
    }
    free(list.workers);
    return code;
}

int mu_cmd_top(struct mu_cli *cli, int argc, char **argv)
{
    const char *every = "2", *rounds = "0";
    const struct mu_cli_option options[] = {{"--every", &every, NULL}, {"--rounds", &rounds, NULL}};
    uint64_t seconds, left;
    if (mu_cli_parse("top", argc, argv, options, 2, 0, 0) < 0 ||
        !mu_cli_number("top", "--every", every, 1, 3600, &seconds) ||
        !mu_cli_number("top", "--rounds", rounds, 0, UINT32_MAX, &left))
        return MU_EXIT_USAGE;
    if (cli->json)
        return mu_cli_usage("top", "-o json is for muster status and muster workers");
    bool terminal = isatty(STDOUT_FILENO), once = !terminal && left == 0;
    for (;;) {
        int code = show(cli, terminal);
        if (code != MU_EXIT_OK || once || (left > 0 && --left == 0))
            return code;
        nanosleep(&(struct timespec){.tv_sec = (time_t)seconds}, NULL);
    }
}
