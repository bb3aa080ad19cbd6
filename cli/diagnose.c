/* muster diagnose: who of a job waits for whom, and who holds them all up. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/recall.h"
#include "proto/standing.h"

enum { WAIT_MS = 3000, CULPRITS_SHOWN = 8, STUCK_US = 1000000 };

struct diagnosis {
    const Muster__V1__ReadRecallResponse **answers; /* of the members */
    struct mu_standing *standings;
    size_t count;
    uint64_t now_us; /* coordinator's clock: it was asked */
};

/* ---- from answers to standings ---- */

static int by_rank(const void *a, const void *b)
{
    const Muster__V1__ReadRecallResponse *x = *(const Muster__V1__ReadRecallResponse *const *)a;
    const Muster__V1__ReadRecallResponse *y = *(const Muster__V1__ReadRecallResponse *const *)b;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static bool fill(struct diagnosis *diagnosis, const Muster__V1__ReadRecallResponse **answers, size_t count)
{
    diagnosis->answers = answers;
    diagnosis->standings = calloc(count + 1, sizeof *diagnosis->standings);
    for (size_t i = 0; i < count; i++)
        if (answers[i]->is_member)
            answers[diagnosis->count++] = answers[i];
    qsort(answers, diagnosis->count, sizeof *answers, by_rank);
    for (size_t i = 0; diagnosis->standings && i < diagnosis->count; i++) {
        diagnosis->standings[i] = mu_standing_of_answer(answers[i]);
        diagnosis->now_us = answers[i]->asked_us > diagnosis->now_us ? answers[i]->asked_us : diagnosis->now_us;
    }
    return diagnosis->standings != NULL;
}

static double quiet_s(const struct diagnosis *diagnosis, size_t i)
{
    uint64_t last_us = mu_cli_recall_time(diagnosis->answers[i], diagnosis->standings[i].last_us);
    return last_us < diagnosis->now_us ? (double)(diagnosis->now_us - last_us) * 1e-6 : 0;
}

/* ---- showing ---- */

static Muster__V1__Standing shown(const struct diagnosis *diagnosis, size_t at)
{
    Muster__V1__Standing pb = mu_standing_shown(&diagnosis->standings[at]);
    pb.worker = diagnosis->answers[at]->worker;
    pb.quiet_us = (uint64_t)(quiet_s(diagnosis, at) * 1e6);
    return pb;
}

static bool print_table(const struct diagnosis *diagnosis)
{
    Muster__V1__Standing *standings = malloc((diagnosis->count + 1) * sizeof *standings);
    Muster__V1__Standing **pointers = malloc((diagnosis->count + 1) * sizeof *pointers);
    bool enough = standings && pointers;
    for (size_t i = 0; enough && i < diagnosis->count; i++) {
        standings[i] = shown(diagnosis, i);
        pointers[i] = &standings[i];
    }
    if (enough)
        mu_cli_print_standings(pointers, diagnosis->count);
    free(standings);
    free(pointers);
    return enough;
}

static void print_culprit(const struct diagnosis *diagnosis, size_t at)
{
    const Muster__V1__ReadRecallResponse *answer = diagnosis->answers[at];
    Muster__V1__Standing standing = shown(diagnosis, at);
    char doing[MU_CLI_DOING_SIZE];
    mu_cli_doing(&standing, doing);
    printf("held up by rank %u (worker %s on %s): %s\n", standing.rank, answer->worker, answer->host, doing);
    for (size_t i = 0; i < answer->n_threads; i++)
        printf("  thread %s\n", answer->threads[i]);
}

/* A moment of a job that runs well looks like this, too: somebody always waits for somebody. It is stuck when nobody
 * has done anything for a while. */
static void print_verdict(const struct diagnosis *diagnosis)
{
    size_t culprits[CULPRITS_SHOWN],
        count = mu_verdict(diagnosis->standings, diagnosis->count, culprits, CULPRITS_SHOWN);
    double least_s = 1e9;
    bool silent = false;
    for (size_t i = 0; i < diagnosis->count; i++) {
        silent = silent || !diagnosis->standings[i].has_answered;
        if (diagnosis->standings[i].has_answered && quiet_s(diagnosis, i) < least_s)
            least_s = quiet_s(diagnosis, i);
    }
    if (!silent && least_s * 1e6 < STUCK_US)
        printf("the job moves: the newest record is %.0f ms old\n", least_s * 1e3);
    if (count == 0 && !silent && least_s * 1e6 >= STUCK_US)
        printf("all wait, and for each other: a message was lost, or the ranks disagree about what comes next\n");
    for (size_t i = 0; (silent || least_s * 1e6 >= STUCK_US) && i < count && i < CULPRITS_SHOWN; i++)
        print_culprit(diagnosis, culprits[i]);
    if (count > CULPRITS_SHOWN)
        printf("and %zu more\n", count - CULPRITS_SHOWN);
}

int mu_cmd_diagnose(struct mu_cli *cli, int argc, char **argv)
{
    if (mu_cli_parse("diagnose", argc, argv, NULL, 0, 1, 1) < 0)
        return MU_EXIT_USAGE;
    Muster__V1__RecallRequest request = MUSTER__V1__RECALL_REQUEST__INIT;
    const Muster__V1__ReadRecallResponse **answers;
    struct diagnosis diagnosis = {0};
    size_t count;
    request.job = argv[0];
    request.flight_records = MU_FLIGHT_RECORDS;
    request.threads = true;
    int code = mu_cli_recall(cli, &request, WAIT_MS, &answers, &count);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json) {
        for (size_t i = 0; i < count; i++)
            mu_cli_print_json(&answers[i]->base, true);
        return MU_EXIT_OK;
    }
    bool enough = fill(&diagnosis, answers, count);
    if (enough && diagnosis.count == 0)
        printf("job %s has no generation: none of its %zu workers is a member\n", argv[0], count);
    else if (enough && (enough = print_table(&diagnosis)))
        print_verdict(&diagnosis);
    free(diagnosis.standings);
    if (enough)
        return MU_EXIT_OK;
    fprintf(stderr, "muster: no memory for %zu workers\n", count);
    return MU_EXIT_FAILURE;
}
