/* muster job: changes of a job that runs. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "plan/amend.h"

static bool real(const char *option, const char *text, double *ret_value)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end != text && *end == 0 && isfinite(value)) {
        *ret_value = value;
        return true;
    }
    mu_cli_usage("job amend", "%s '%s' is not allowed: a number", option, text);
    return false;
}

static bool number(const char *option, const char *text, uint64_t least, uint64_t most, uint64_t *ret_value)
{
    return mu_cli_number("job amend", option, text, least, most, ret_value);
}

/* "FIRST:COUNT" */
static bool skip(const char *text, Muster__V1__Amendment *pb)
{
    char first[32] = "";
    const char *colon = strchr(text, ':');
    if (!colon || (size_t)(colon - text) >= sizeof first) {
        mu_cli_usage("job amend", "--skip '%s' is not allowed: FIRST:COUNT, of sequences in the order of training",
                     text);
        return false;
    }
    memcpy(first, text, (size_t)(colon - text));
    return number("--skip", first, 0, 1ull << 60, &pb->skip_first) &&
           number("--skip", colon + 1, 1, 1ull << 60, &pb->skip_count);
}

enum { LR, MIN_LR, WARMUP, STEPS, EVERY, KEEP, KEEP_EVERY, SKIP, FIELDS };

/* What is given, into the message. */
static bool fill(const char *const given[FIELDS], Muster__V1__Amendment *pb)
{
    uint64_t keep = 0;
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
    uint64_t every = 0;
    bool good = (!given[LR] || real("--lr", given[LR], &pb->lr)) &&
                (!given[MIN_LR] || real("--min-lr", given[MIN_LR], &pb->min_lr)) &&
                (!given[WARMUP] || number("--warmup", given[WARMUP], 0, MU_STEPS_MAX, &pb->warmup)) &&
                (!given[STEPS] || number("--steps", given[STEPS], 1, MU_STEPS_MAX, &pb->steps)) &&
                (!given[EVERY] || is_auto || number("--every", given[EVERY], 0, MU_STEPS_MAX, &every)) &&
                (!given[KEEP] || number("--keep", given[KEEP], 1, MU_KEEP_MAX, &keep)) &&
                (!given[KEEP_EVERY] ||
                 number("--keep-every", given[KEEP_EVERY], 0, MU_STEPS_MAX, &pb->checkpoint_keep_every)) &&
                (!given[SKIP] || skip(given[SKIP], pb));
    if (good && given[LR] && pb->lr == 0) {
        mu_cli_usage("job amend", "--lr '%s' is not allowed: more than 0", given[LR]);
        return false;
    }
    if (is_auto)
        pb->checkpoint_every_auto = true;
    else
        pb->checkpoint_every = every;
    pb->checkpoint_keep = (uint32_t)keep;
    return good;
}

static int amend(struct mu_cli *cli, int argc, char **argv)
{
    Muster__V1__AmendJobRequest request = MUSTER__V1__AMEND_JOB_REQUEST__INIT;
    Muster__V1__Amendment amendment = MUSTER__V1__AMENDMENT__INIT;
    const char *given[FIELDS] = {0}, *at = "0", *revision = "0";
    const struct mu_cli_option options[] = {{"--lr", &given[LR], NULL},
                                            {"--min-lr", &given[MIN_LR], NULL},
                                            {"--warmup", &given[WARMUP], NULL},
                                            {"--steps", &given[STEPS], NULL},
                                            {"--every", &given[EVERY], NULL},
                                            {"--keep", &given[KEEP], NULL},
                                            {"--keep-every", &given[KEEP_EVERY], NULL},
                                            {"--skip", &given[SKIP], NULL},
                                            {"--at-step", &at, NULL},
                                            {"--expected-revision", &revision, NULL}};
    if (mu_cli_parse("job amend", argc, argv, options, sizeof options / sizeof options[0], 1, 1) < 0 ||
        !fill(given, &amendment) || !number("--at-step", at, 0, MU_STEPS_MAX, &amendment.at_step) ||
        !number("--expected-revision", revision, 0, INT64_MAX, &request.expected_revision))
        return MU_EXIT_USAGE;
    bool any = false;
    for (int i = 0; i < FIELDS; i++)
        any = any || given[i];
    if (!any)
        return mu_cli_usage("job amend", "give what is to be changed: --lr, --min-lr, --warmup, --steps, --every, "
                                         "--keep, --keep-every or --skip");
    request.job = argv[0];
    request.amendment = &amendment;
    const Muster__V1__AmendJobResponse *reply;
    int code = mu_cli_change_or_exit(cli, "AmendJob", &request.base, &request.request_id,
                                     &muster__v1__amend_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    const Muster__V1__JobSpec *spec = reply->job->spec;
    if (cli->json)
        mu_cli_print_json(&reply->job->base, false);
    else if (spec)
        printf("job %s is amended: amendment %u (revision %" PRIu64 "); see: muster describe job %s\n", argv[0],
               spec->newest_amendment, reply->job->revision, argv[0]);
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
        return mu_cli_usage("job", "which verb? amend");
    if (strcmp(argv[0], "amend") == 0)
        return amend(cli, argc - 1, argv + 1);
    return mu_cli_usage("job", "'%s' is not a verb: amend", argv[0]);
}
