/* muster job: changes of a job that runs, and jobs that begin with another one's checkpoint. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "plan/amend.h"

enum { LR, MIN_LR, WARMUP, STEPS, EVERY, KEEP, KEEP_EVERY, SKIP, FIELDS };

/* What is to be amended, as it was given. */
struct terms {
    const char *command; /* for errors */
    const char *given[FIELDS];
    const char *at_step, *revision;
};

static bool real(const char *command, const char *option, const char *text, double *ret_value)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end != text && *end == 0 && isfinite(value)) {
        *ret_value = value;
        return true;
    }
    mu_cli_usage(command, "%s '%s' is not allowed: a number", option, text);
    return false;
}

static bool number(const struct terms *terms, const char *option, const char *text, uint64_t least, uint64_t most,
                   uint64_t *ret_value)
{
    return mu_cli_number(terms->command, option, text, least, most, ret_value);
}

/* "FIRST:COUNT" */
static bool skip(const struct terms *terms, const char *text, Muster__V1__Amendment *pb)
{
    char first[32] = "";
    const char *colon = strchr(text, ':');
    if (!colon || (size_t)(colon - text) >= sizeof first) {
        mu_cli_usage(terms->command, "--skip '%s' is not allowed: FIRST:COUNT, of sequences in the order of training",
                     text);
        return false;
    }
    memcpy(first, text, (size_t)(colon - text));
    return number(terms, "--skip", first, 0, 1ull << 60, &pb->skip_first) &&
           number(terms, "--skip", colon + 1, 1, 1ull << 60, &pb->skip_count);
}

/* What is given, into the message. */
static bool fill(const struct terms *terms, Muster__V1__Amendment *pb)
{
    const char *const *given = terms->given;
    uint64_t keep = 0, every = 0;
    if (given[MIN_LR])
        pb->optional_min_lr_case = MUSTER__V1__AMENDMENT__OPTIONAL_MIN_LR_MIN_LR;
    if (given[WARMUP])
        pb->optional_warmup_case = MUSTER__V1__AMENDMENT__OPTIONAL_WARMUP_WARMUP;
    if (given[KEEP_EVERY])
        pb->optional_keep_every_case = MUSTER__V1__AMENDMENT__OPTIONAL_KEEP_EVERY_CHECKPOINT_KEEP_EVERY;
    bool is_auto = given[EVERY] && strcmp(given[EVERY], "auto") == 0;
    if (is_auto)
        pb->optional_every_case = MUSTER__V1__AMENDMENT__OPTIONAL_EVERY_CHECKPOINT_EVERY_AUTO;
    else if (given[EVERY])
        pb->optional_every_case = MUSTER__V1__AMENDMENT__OPTIONAL_EVERY_CHECKPOINT_EVERY;
    bool good = (!given[LR] || real(terms->command, "--lr", given[LR], &pb->lr)) &&
                (!given[MIN_LR] || real(terms->command, "--min-lr", given[MIN_LR], &pb->min_lr)) &&
                (!given[WARMUP] || number(terms, "--warmup", given[WARMUP], 0, MU_STEPS_MAX, &pb->warmup)) &&
                (!given[STEPS] || number(terms, "--steps", given[STEPS], 1, MU_STEPS_MAX, &pb->steps)) &&
                (!given[EVERY] || is_auto || number(terms, "--every", given[EVERY], 0, MU_STEPS_MAX, &every)) &&
                (!given[KEEP] || number(terms, "--keep", given[KEEP], 1, MU_KEEP_MAX, &keep)) &&
                (!given[KEEP_EVERY] ||
                 number(terms, "--keep-every", given[KEEP_EVERY], 0, MU_STEPS_MAX, &pb->checkpoint_keep_every)) &&
                (!given[SKIP] || skip(terms, given[SKIP], pb)) &&
                number(terms, "--at-step", terms->at_step, 0, MU_STEPS_MAX, &pb->at_step);
    if (good && given[LR] && pb->lr == 0) {
        mu_cli_usage(terms->command, "--lr '%s' is not allowed: more than 0", given[LR]);
        return false;
    }
    if (is_auto)
        pb->checkpoint_every_auto = true;
    else
        pb->checkpoint_every = every;
    pb->checkpoint_keep = (uint32_t)keep;
    return good;
}

enum { OWN_OPTIONS = 3 };

/* The verb's `words`, its own options, and what is to be amended. */
static bool read_terms(struct terms *terms, int argc, char **argv, const struct mu_cli_option own[OWN_OPTIONS],
                       int own_count, int words, Muster__V1__Amendment *pb, uint64_t *ret_revision)
{
    terms->at_step = terms->revision = "0";
    struct mu_cli_option options[FIELDS + 2 + OWN_OPTIONS] = {{"--lr", &terms->given[LR], NULL},
                                                              {"--min-lr", &terms->given[MIN_LR], NULL},
                                                              {"--warmup", &terms->given[WARMUP], NULL},
                                                              {"--steps", &terms->given[STEPS], NULL},
                                                              {"--every", &terms->given[EVERY], NULL},
                                                              {"--keep", &terms->given[KEEP], NULL},
                                                              {"--keep-every", &terms->given[KEEP_EVERY], NULL},
                                                              {"--skip", &terms->given[SKIP], NULL},
                                                              {"--at-step", &terms->at_step, NULL},
                                                              {"--expected-revision", &terms->revision, NULL}};
    memcpy(&options[FIELDS + 2], own, (size_t)own_count * sizeof *own);
    return mu_cli_parse(terms->command, argc, argv, options, FIELDS + 2 + own_count, words, words) >= 0 &&
           fill(terms, pb) && number(terms, "--expected-revision", terms->revision, 0, INT64_MAX, ret_revision);
}

static bool changes(const struct terms *terms)
{
    bool any = false;
    for (int i = 0; i < FIELDS; i++)
        any = any || terms->given[i];
    return any;
}

static int amend(struct mu_cli *cli, int argc, char **argv)
{
    Muster__V1__AmendJobRequest request = MUSTER__V1__AMEND_JOB_REQUEST__INIT;
    Muster__V1__Amendment amendment = MUSTER__V1__AMENDMENT__INIT;
    struct terms terms = {.command = "job amend"};
    const char *back = NULL;
    char by[192];
    const struct mu_cli_option own[OWN_OPTIONS] = {{"--roll-back", &back, NULL}};
    if (!read_terms(&terms, argc, argv, own, 1, 1, &amendment, &request.expected_revision) ||
        (back && !number(&terms, "--roll-back", back, 1, INT64_MAX, &amendment.roll_back_to)))
        return MU_EXIT_USAGE;
    if (!changes(&terms) && !back)
        return mu_cli_usage("job amend", "give what is to be changed: --lr, --min-lr, --warmup, --steps, --every, "
                                         "--keep, --keep-every or --skip, or a checkpoint to go back to: --roll-back");
    mu_cli_whoami(by, sizeof by);
    request.job = argv[0];
    request.amendment = &amendment;
    request.by = by;
    const Muster__V1__AmendJobResponse *reply;
    int code = mu_cli_change_or_exit(cli, "AmendJob", &request.base, &request.request_id,
                                     &muster__v1__amend_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    const Muster__V1__JobSpec *spec = reply->job->spec;
    if (cli->json)
        mu_cli_print_json(&reply->job->base, false);
    else if (spec && back)
        printf("job %s goes back to checkpoint %s: amendment %u (revision %" PRIu64 "); see: muster describe job %s\n",
               argv[0], back, spec->newest_amendment, reply->job->revision, argv[0]);
    else if (spec)
        printf("job %s is amended: amendment %u (revision %" PRIu64 "); see: muster describe job %s\n", argv[0],
               spec->newest_amendment, reply->job->revision, argv[0]);
    return MU_EXIT_OK;
}

/* Also `rebase`: a branch that leaves the origin's numeric identity. */
static int branch(struct mu_cli *cli, int argc, char **argv, bool rebase)
{
    const char *command = rebase ? "job rebase" : "job branch";
    Muster__V1__BranchJobRequest request = MUSTER__V1__BRANCH_JOB_REQUEST__INIT;
    Muster__V1__Amendment amendment = MUSTER__V1__AMENDMENT__INIT;
    struct terms terms = {.command = command};
    const char *checkpoint = NULL, *path = "", *compute = NULL;
    char by[192];
    const struct mu_cli_option own[OWN_OPTIONS] = {
        {"--checkpoint", &checkpoint, NULL}, {"--path", &path, NULL}, {"--compute", &compute, NULL}};
    if (!read_terms(&terms, argc, argv, own, rebase ? 3 : 2, 2, &amendment, &request.expected_revision))
        return MU_EXIT_USAGE;
    if (!checkpoint)
        return mu_cli_usage(command, "--checkpoint K is required: a number as in: muster checkpoints JOB");
    if (!number(&terms, "--checkpoint", checkpoint, 1, INT64_MAX, &request.checkpoint))
        return MU_EXIT_USAGE;
    if (compute && strcmp(compute, "fp32") != 0 && strcmp(compute, "bf16") != 0)
        return mu_cli_usage(command, "--compute '%s' is not allowed: fp32 or bf16", compute);
    if (compute)
        request.compute =
            strcmp(compute, "bf16") == 0 ? MUSTER__V1__COMPUTE__COMPUTE_BF16 : MUSTER__V1__COMPUTE__COMPUTE_FP32;
    mu_cli_whoami(by, sizeof by);
    request.job = argv[0];
    request.name = argv[1];
    request.amendment = changes(&terms) ? &amendment : NULL;
    request.rebase = rebase;
    request.checkpoint_path = (char *)(uintptr_t)path;
    request.by = by;
    const Muster__V1__BranchJobResponse *reply;
    int code = mu_cli_change_or_exit(cli, "BranchJob", &request.base, &request.request_id,
                                     &muster__v1__branch_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json)
        mu_cli_print_json(&reply->job->base, false);
    else if (reply->job->origin)
        printf("job %s begins at step %" PRIu64 " with checkpoint %s of job %s%s (revision %" PRIu64
               "); start workers for it: muster-worker --job %s\n",
               argv[1], reply->job->origin->step, checkpoint, argv[0],
               rebase ? ", under the numeric identity of its first worker" : "", reply->job->revision, argv[1]);
    return MU_EXIT_OK;
}

void mu_cli_print_amendments(const Muster__V1__JobSpec *spec)
{
    for (size_t i = 0; i < spec->n_amendments; i++) {
        struct mu_amendment one;
        char what[MU_AMENDMENT_TEXT_SIZE];
        mu_wire_amendment_from_pb(spec->amendments[i], &one);
        mu_amend_describe(&one, what);
        printf("amendment %-3" PRIu32 "%s step %" PRIu64 ": %s\n", one.version,
               one.settled ? "from" : "not yet made, not before", one.at_step, what);
    }
}

int mu_cmd_job(struct mu_cli *cli, int argc, char **argv)
{
    if (argc < 1)
        return mu_cli_usage("job", "which verb? amend, branch or rebase");
    if (strcmp(argv[0], "amend") == 0)
        return amend(cli, argc - 1, argv + 1);
    if (strcmp(argv[0], "branch") == 0 || strcmp(argv[0], "rebase") == 0)
        return branch(cli, argc - 1, argv + 1, argv[0][0] == 'r');
    return mu_cli_usage("job", "'%s' is not a verb: amend, branch or rebase", argv[0]);
}
