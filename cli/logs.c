/* muster logs: what a worker has written into its log, through the coordinator. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cli/recall.h"

enum { LINES_DEFAULT = 100, LINES_MAX = 512, WAIT_MS = 5000, FOLLOW_NS = 500000000 };

struct tail {
    Muster__V1__RecallRequest request;
    uint8_t incarnation[16]; /* whose lines they are */
};

/* Another process under the same name numbers its lines from the beginning. */
static bool is_another(struct tail *tail, const Muster__V1__ReadRecallResponse *answer)
{
    if (answer->incarnation.len != sizeof tail->incarnation ||
        memcmp(answer->incarnation.data, tail->incarnation, sizeof tail->incarnation) == 0)
        return false;
    memcpy(tail->incarnation, answer->incarnation.data, sizeof tail->incarnation);
    return true;
}

static int print_new(struct mu_cli *cli, struct tail *tail)
{
    const Muster__V1__ReadRecallResponse **answers;
    size_t count;
    bool first = tail->request.log_after == 0;
    int code = mu_cli_recall(cli, &tail->request, WAIT_MS, &answers, &count);
    if (code != MU_EXIT_OK)
        return code;
    if (!answers[0]->is_complete) {
        fprintf(stderr, "muster: worker '%s' has not answered within %d s\n", tail->request.worker, WAIT_MS / 1000);
        return MU_EXIT_CONNECT;
    }
    if (is_another(tail, answers[0]) && !first) {
        tail->request.log_after = 0;
        return print_new(cli, tail);
    }
    for (size_t i = 0; i < answers[0]->n_log; i++) {
        if (cli->json)
            mu_cli_print_json(&answers[0]->log[i]->base, true);
        else
            printf("%s\n", answers[0]->log[i]->text);
        tail->request.log_after = answers[0]->log[i]->number;
    }
    fflush(stdout);
    return MU_EXIT_OK;
}

int mu_cmd_logs(struct mu_cli *cli, int argc, char **argv)
{
    const char *lines = NULL;
    bool follow = false;
    uint64_t count = LINES_DEFAULT;
    const struct mu_cli_option options[] = {
        {.name = "-n", .value = &lines}, {.name = "-f", .flag = &follow}, {.name = "--follow", .flag = &follow}};
    if (mu_cli_parse("logs", argc, argv, options, 3, 1, 1) < 0 ||
        (lines && !mu_cli_number("logs", "-n", lines, 1, LINES_MAX, &count)))
        return MU_EXIT_USAGE;
    struct tail tail = {.request = MUSTER__V1__RECALL_REQUEST__INIT};
    tail.request.worker = argv[0];
    tail.request.log_lines = (uint32_t)count;
    int code = print_new(cli, &tail);
    while (code == MU_EXIT_OK && follow) {
        tail.request.log_lines = LINES_MAX;
        nanosleep(&(struct timespec){.tv_nsec = FOLLOW_NS}, NULL);
        mu_wire_arena_reset(&cli->arena);
        code = print_new(cli, &tail);
    }
    return code;
}
