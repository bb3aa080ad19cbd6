#include "cli/recall.h"

#include <stdio.h>
#include <time.h>

#include "common/clock.h"

#define SERVICE "DiagnosticService/"

enum { LOOK_NS = 20000000 };

static int read_one(struct mu_cli *cli, uint64_t number, uint32_t index, const Muster__V1__ReadRecallResponse **ret)
{
    Muster__V1__ReadRecallRequest request = MUSTER__V1__READ_RECALL_REQUEST__INIT;
    request.number = number;
    request.index = index;
    return mu_cli_call_or_exit(cli, SERVICE "ReadRecall", &request, &muster__v1__read_recall_response__descriptor, ret);
}

int mu_cli_recall(struct mu_cli *cli, const Muster__V1__RecallRequest *request, unsigned wait_ms,
                  const Muster__V1__ReadRecallResponse ***ret_answers, size_t *ret_count)
{
    const Muster__V1__RecallResponse *asked = NULL;
    int code = mu_cli_call_or_exit(cli, SERVICE "Recall", request, &muster__v1__recall_response__descriptor, &asked);
    if (code != MU_EXIT_OK)
        return code;
    const Muster__V1__ReadRecallResponse **answers =
        mu_wire_arena_alloc(&cli->arena, asked->n_workers * sizeof *answers);
    if (!answers) {
        fprintf(stderr, "muster: no memory for the answers of %zu workers\n", asked->n_workers);
        return MU_EXIT_FAILURE;
    }
    uint64_t until_us = mu_clock_mono_us() + wait_ms * 1000ull;
    for (bool waiting = true; waiting;) {
        bool late = mu_clock_mono_us() >= until_us;
        waiting = false;
        for (uint32_t i = 0; i < asked->n_workers; i++) {
            if (answers[i] && answers[i]->is_complete)
                continue;
            if ((code = read_one(cli, asked->number, i, &answers[i])))
                return code;
            waiting = waiting || (!answers[i]->is_complete && !late);
        }
        if (waiting)
            nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    *ret_answers = answers;
    *ret_count = asked->n_workers;
    return MU_EXIT_OK;
}
