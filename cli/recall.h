/* What workers remember, for the commands that show it: see proto/muster/v1/recall.proto. */
#ifndef MU_CLI_RECALL_H
#define MU_CLI_RECALL_H

#include "cli/cli.h"
#include "muster/v1/recall.pb-c.h"

/* Asks, and waits until all have answered or `wait_ms` are over: then some are not complete. MU_EXIT_OK, or the exit
 * code of the error that was printed. ret_answers[*ret_count] lies in cli->arena. */
int mu_cli_recall(struct mu_cli *cli, const Muster__V1__RecallRequest *request, unsigned wait_ms,
                  const Muster__V1__ReadRecallResponse ***ret_answers, size_t *ret_count);

/* hang.c: where ranks stand. */
enum { MU_CLI_DOING_SIZE = 64 };
void mu_cli_doing(const Muster__V1__Standing *standing, char out[MU_CLI_DOING_SIZE]); /* "forward 3" */
void mu_cli_print_standings(Muster__V1__Standing *const *standings, size_t count);
/* Of one report, or (NULL) the list of them. */
int mu_cli_report_hang(struct mu_cli *cli, const char *which, bool threads_of_all);

/* A time of the worker's clock on the coordinator's, microseconds. */
static inline uint64_t mu_cli_recall_time(const Muster__V1__ReadRecallResponse *answer, uint64_t at_us)
{
    return at_us + (uint64_t)answer->clock_offset_us;
}

#endif
