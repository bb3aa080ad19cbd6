/* tests/sim: runs seeds, prints the violated invariant and the seed of a failure. Exit codes: 0 all held, 1 a
 * violation, 2 usage. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/sim/sim.h"

int mu_mutant_active = MU_MUT_NONE;

/* Rare in the mixture of all profiles: hunted in the one that is made for them. */
static const char *const mutant_profiles[MU_MUT_COUNT] = {
    [MU_MUT_ACCEPT_STALE_PARK] = "recovery",  [MU_MUT_LOSE_STATUS] = "slow-streams",
    [MU_MUT_FORGET_REQUESTS] = "operators",   [MU_MUT_CHANGE_TWICE] = "operators",
    [MU_MUT_EXIT_BY_NAME] = "supervised",     [MU_MUT_EXIT_UNHEARD] = "supervised",
    [MU_MUT_IGNORE_CORDON] = "nodes",         [MU_MUT_BELIEVE_CONDEMNED] = "poison",
    [MU_MUT_FORGET_CONDEMNED] = "poison",     [MU_MUT_END_SUSPECT] = "poison",
    [MU_MUT_RETAIN_SUSPECT] = "poison",       [MU_MUT_INTERVAL_IGNORES_COST] = "paced",
    [MU_MUT_INTERVAL_ONCE] = "paced",         [MU_MUT_COUNT_VOID_STATE] = "rollbacks",
    [MU_MUT_KEEP_VOID_STATE] = "rollbacks",   [MU_MUT_START_FROM_VOID] = "rollbacks",
    [MU_MUT_KEEP_UNDONE_TERMS] = "rollbacks", [MU_MUT_FORGET_DEMOTED] = "slow",
    [MU_MUT_PREFER_DEMOTED] = "slow",         [MU_MUT_SUBSTITUTE_DEMOTED] = "slow",
    [MU_MUT_RESTORE_UNMEASURED] = "slow",     [MU_MUT_DEMOTE_FASTEST] = "slow",
};

static const char *const mutant_names[MU_MUT_COUNT] = {
    [MU_MUT_NONE] = "none",
    [MU_MUT_SKIP_PERSIST_GENERATION] = "skip-persist-generation",
    [MU_MUT_SKIP_PERSIST_GO] = "skip-persist-go",
    [MU_MUT_SKIP_DURABILITY_WAIT] = "skip-durability-wait",
    [MU_MUT_REUSE_GENERATION] = "reuse-generation",
    [MU_MUT_REUSE_EVENT_NUMBER] = "reuse-event-number",
    [MU_MUT_FORGET_ACCOUNTS] = "forget-accounts",
    [MU_MUT_FORGET_TALLY] = "forget-tally",
    [MU_MUT_FORGET_DEATHS] = "forget-deaths",
    [MU_MUT_FORGET_REQUESTS] = "forget-requests",
    [MU_MUT_CHANGE_TWICE] = "change-twice",
    [MU_MUT_IGNORE_INCARNATION] = "ignore-incarnation",
    [MU_MUT_KEEP_ZOMBIE] = "keep-zombie",
    [MU_MUT_ACCEPT_STALE_PARK] = "accept-stale-park",
    [MU_MUT_EXIT_BY_NAME] = "exit-by-name",
    [MU_MUT_EXIT_UNHEARD] = "exit-unheard",
    [MU_MUT_IGNORE_CORDON] = "ignore-cordon",
    [MU_MUT_GO_BEFORE_ALL_PREPARED] = "go-before-all-prepared",
    [MU_MUT_PLAN_BEFORE_PARKED] = "plan-before-parked",
    [MU_MUT_FORGET_ROLL_FORWARD] = "forget-roll-forward",
    [MU_MUT_START_FROM_SEED] = "start-from-seed",
    [MU_MUT_OVERLAP_LEAVES] = "overlap-leaves",
    [MU_MUT_NO_FORGIVENESS] = "no-forgiveness",
    [MU_MUT_LOSE_STATUS] = "lose-status",
    [MU_MUT_AMEND_NOT_ALL] = "amend-not-all",
    [MU_MUT_AMEND_IN_PASSING] = "amend-in-passing",
    [MU_MUT_FEED_OLD_TERMS] = "feed-old-terms",
    [MU_MUT_FORGET_AMENDMENTS] = "forget-amendments",
    [MU_MUT_COUNT_VOID_STATE] = "count-void-state",
    [MU_MUT_KEEP_VOID_STATE] = "keep-void-state",
    [MU_MUT_START_FROM_VOID] = "start-from-void",
    [MU_MUT_KEEP_UNDONE_TERMS] = "keep-undone-terms",
    [MU_MUT_VOTE_NEWEST] = "vote-newest",
    [MU_MUT_VOTE_BEFORE_GRADIENT] = "vote-before-gradient",
    [MU_MUT_EXECUTE_WITHOUT_VOTE] = "execute-without-vote",
    [MU_MUT_PARK_MID_STEP] = "park-mid-step",
    [MU_MUT_REUSE_COMMAND_NUMBER] = "reuse-command-number",
    [MU_MUT_COMMIT_MISSING_PIECE] = "commit-missing-piece",
    [MU_MUT_ACK_BEFORE_DURABLE] = "ack-before-durable",
    [MU_MUT_DELETE_WITHOUT_RECORD] = "delete-without-record",
    [MU_MUT_RETENTION_DELETES_NEWEST] = "retention-deletes-newest",
    [MU_MUT_RELEASE_EARLY] = "release-early",
    [MU_MUT_RELEASE_LAST_HOLDER] = "release-last-holder",
    [MU_MUT_BELIEVE_CONDEMNED] = "believe-condemned",
    [MU_MUT_FORGET_CONDEMNED] = "forget-condemned",
    [MU_MUT_END_SUSPECT] = "end-suspect",
    [MU_MUT_RETAIN_SUSPECT] = "retain-suspect",
    [MU_MUT_INTERVAL_IGNORES_COST] = "interval-ignores-cost",
    [MU_MUT_INTERVAL_ONCE] = "interval-once",
    [MU_MUT_FORGET_DEMOTED] = "forget-demoted",
    [MU_MUT_PREFER_DEMOTED] = "prefer-demoted",
    [MU_MUT_SUBSTITUTE_DEMOTED] = "substitute-demoted",
    [MU_MUT_RESTORE_UNMEASURED] = "restore-unmeasured",
    [MU_MUT_DEMOTE_FASTEST] = "demote-fastest",
    [MU_MUT_DROP_BEFORE_GO] = "drop-before-go",
    [MU_MUT_GATHER_INCOMPLETE] = "gather-incomplete",
    [MU_MUT_VOTE_BEFORE_STAGE] = "vote-before-stage",
    [MU_MUT_KEEP_STALE_COPY] = "keep-stale-copy",
    [MU_MUT_ROLL_FORWARD_WHOLE] = "roll-forward-whole",
    [MU_MUT_MOVE_FROM_ANYONE] = "move-from-anyone",
    [MU_MUT_IGNORE_PARTIAL] = "ignore-partial",
    [MU_MUT_FREE_IDLE_EARLY] = "free-idle-early",
    [MU_MUT_FORGET_LAYOUT] = "forget-layout",
    [MU_MUT_PIECE_FROM_ANYONE] = "piece-from-anyone",
    [MU_MUT_FORGET_MIRRORS] = "forget-mirrors",
    [MU_MUT_VOTE_BEFORE_MIRROR] = "vote-before-mirror",
    [MU_MUT_MIRROR_STALE] = "mirror-stale",
    [MU_MUT_FEED_REPLAY_TWICE] = "feed-replay-twice",
    [MU_MUT_FEED_FORGET_NORM] = "feed-forget-norm",
    [MU_MUT_FEED_STEP_BEHIND] = "feed-step-behind",
    [MU_MUT_FEED_PART_MISSING] = "feed-part-missing",
    [MU_MUT_FEED_OVER_NEWEST] = "feed-over-newest",
    [MU_MUT_FEED_KEEP_PARAMS] = "feed-keep-params",
    [MU_MUT_FEED_FROM_ANYONE] = "feed-from-anyone",
    [MU_MUT_KEEP_OTHER_STEP] = "keep-other-step",
    [MU_MUT_COMMIT_ONE_COPY] = "commit-one-copy",
    [MU_MUT_FORGET_HOLDERS] = "forget-holders",
    [MU_MUT_COPY_NOTHING] = "copy-nothing",
};

struct options {
    uint64_t seed, seeds;
    uint32_t workers;
    uint64_t steps;
    const char *profile, *seeds_file;
    int mutant;
    bool trace, mutants, quiet;
};

static struct mu_sim_stats total;

static void add_stats(const struct mu_sim_stats *stats)
{
    total.events += stats->events;
    total.histories += stats->histories;
    total.generations += stats->generations;
    total.steps_applied += stats->steps_applied;
    total.coordinator_starts += stats->coordinator_starts;
    total.worker_starts += stats->worker_starts;
    total.commits += stats->commits;
    total.forgotten += stats->forgotten;
    total.fed += stats->fed;
    total.fed_beside += stats->fed_beside;
    total.fed_over += stats->fed_over;
    total.kept += stats->kept;
    total.replayed += stats->replayed;
    total.virtual_us += stats->virtual_us;
    for (int i = 0; i < MU_SIM_FAULT_COUNT; i++)
        total.faults[i] += stats->faults[i];
    for (int i = 0; i < MU_SIM_POINT_COUNT; i++)
        total.points[i] += stats->points[i];
}

/* True when every invariant held. */
static bool run_one(const struct options *options, const struct mu_sim_profile *profile, uint64_t seed, bool report)
{
    struct mu_sim sim;
    mu_sim_override_workers = options->workers;
    mu_sim_override_steps = options->steps;
    mu_sim_init(&sim, seed, profile, options->trace);
    mu_sim_run(&sim);
    bool good = !sim.failed;
    if (!good && report) {
        printf("FAILED seed %" PRIu64 " profile %s at %.6f s: %s\n", seed, profile->name, (double)sim.now_us / 1e6,
               sim.failure);
        printf("  replay: sim --seed %" PRIu64 " --profile %s%s%s --trace\n", seed, profile->name,
               options->mutant ? " --mutation " : "", options->mutant ? mutant_names[options->mutant] : "");
        fflush(stdout);
    }
    add_stats(&sim.stats);
    mu_sim_fini(&sim);
    return good;
}

static const struct mu_sim_profile *profile_of(const struct options *options, uint64_t seed)
{
    return options->profile ? mu_sim_profile_find(options->profile) : mu_sim_profile_for_seed(seed);
}

static void print_stats(void)
{
    printf("%" PRIu64 " histories, %.1f h virtual, %" PRIu64 " events, %" PRIu64 " generations, %" PRIu64
           " updates (%" PRIu64 " steps replayed), %" PRIu64 " coordinator starts, %" PRIu64 " worker starts, %" PRIu64
           " checkpoints committed, %" PRIu64 " fenced, %" PRIu64 " fed (%" PRIu64 " members, %" PRIu64
           " over older state), %" PRIu64 " chunks not moved again\n",
           total.histories, (double)total.virtual_us / 3.6e9, total.events, total.generations, total.steps_applied,
           total.replayed, total.coordinator_starts, total.worker_starts, total.commits, total.forgotten, total.fed,
           total.fed_beside, total.fed_over, total.kept);
    printf("faults:");
    for (int i = 0; i < MU_SIM_FAULT_COUNT; i++)
        printf(" %s %" PRIu64, mu_sim_fault_name((enum mu_sim_fault)i), total.faults[i]);
    printf("\ndeaths at points:");
    for (int i = 0; i < MU_SIM_POINT_COUNT; i++)
        printf(" %s %" PRIu64, mu_sim_point_name((enum mu_sim_point)i), total.points[i]);
    printf("\n");
}

static uint64_t run_seeds(const struct options *options)
{
    uint64_t failures = 0;
    for (uint64_t i = 0; i < options->seeds; i++)
        failures += !run_one(options, profile_of(options, options->seed + i), options->seed + i, true);
    return failures;
}

/* "<profile> <seed>  # what it found", one a line. */
static int run_file(const struct options *options, uint64_t *failures)
{
    char line[512], name[64];
    uint64_t seed;
    FILE *file = fopen(options->seeds_file, "r");
    if (!file) {
        fprintf(stderr, "sim: %s: %s\n", options->seeds_file, strerror(errno));
        return 2;
    }
    while (fgets(line, sizeof line, file)) {
        if (line[0] == '#' || line[0] == '\n')
            continue;
        const struct mu_sim_profile *profile =
            sscanf(line, "%63s %" SCNu64, name, &seed) == 2 ? mu_sim_profile_find(name) : NULL;
        if (!profile) {
            fprintf(stderr, "sim: %s: bad line: %s", options->seeds_file, line);
            fclose(file);
            return 2;
        }
        *failures += !run_one(options, profile, seed, true);
    }
    fclose(file);
    return 0;
}

enum { MUTANT_SEEDS = 2000 };

/* In a child, because a mutated core may also crash. Exit code 1: caught; *at holds the seed. */
static void hunt(const struct options *options, volatile uint64_t *at)
{
    uint64_t end = options->seed + MUTANT_SEEDS;
    for (*at = options->seed; *at < end; ++*at) {
        if (!run_one(options, profile_of(options, *at), *at, !options->quiet))
            _exit(1);
    }
    _exit(0);
}

static bool catch_one(struct options *options, volatile uint64_t *at)
{
    int status = 0;
    fflush(stdout);
    mu_mutant_active = options->mutant;
    if (!options->profile)
        options->profile = mutant_profiles[options->mutant];
    pid_t child = fork();
    if (child == 0)
        hunt(options, at);
    if (child < 0 || waitpid(child, &status, 0) != child) {
        perror("sim: fork");
        return false;
    }
    const char *name = mutant_names[options->mutant];
    bool crashed = WIFSIGNALED(status), caught = crashed || WEXITSTATUS(status) == 1;
    if (caught)
        printf("%-26s caught after %" PRIu64 " seeds (profile %s)%s\n", name, *at - options->seed + 1,
               profile_of(options, *at)->name, crashed ? ": the core crashed" : "");
    else
        printf("%-26s NOT caught within %d seeds\n", name, MUTANT_SEEDS);
    return caught;
}

/* Every mutant must be caught: the simulator itself is tested. */
static int run_mutants(const struct options *options)
{
    int missed = 0;
    volatile uint64_t *at = mmap(NULL, sizeof *at, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        perror("sim: mmap");
        return 2;
    }
    for (int mutant = 1; mutant < MU_MUT_COUNT; mutant++) {
        struct options one = *options;
        one.mutant = mutant;
        if (!options->mutant || mutant == options->mutant)
            missed += !catch_one(&one, at);
    }
    munmap((void *)at, sizeof *at);
    return missed ? 1 : 0;
}

static int usage(const char *problem, const char *value)
{
    fprintf(stderr,
            "sim: %s %s\n"
            "usage: sim [--seed N] [--seeds K] [--profile NAME] [--workers N] [--steps N] [--trace] [--quiet]\n"
            "           [--seeds-file FILE] [--mutation NAME] [--mutants]\nprofiles:\n",
            problem, value);
    for (uint32_t i = 0; i < mu_sim_profile_count; i++)
        fprintf(stderr, "  %-12s %s\n", mu_sim_profiles[i].name, mu_sim_profiles[i].about);
    fprintf(stderr, "mutations:");
    for (int i = 1; i < MU_MUT_COUNT; i++)
        fprintf(stderr, " %s", mutant_names[i]);
    fprintf(stderr, "\n");
    return 2;
}

static int find_mutant(const char *name)
{
    for (int i = 1; i < MU_MUT_COUNT; i++) {
        if (strcmp(mutant_names[i], name) == 0)
            return i;
    }
    return 0;
}

static bool flag(const char *argument, struct options *options)
{
    bool *place = strcmp(argument, "--trace") == 0     ? &options->trace
                  : strcmp(argument, "--mutants") == 0 ? &options->mutants
                  : strcmp(argument, "--quiet") == 0   ? &options->quiet
                                                       : NULL;
    if (place)
        *place = true;
    return place != NULL;
}

/* False: unknown option or bad value. */
static bool option(const char *argument, const char *value, struct options *options)
{
    if (strcmp(argument, "--profile") == 0) {
        options->profile = value;
        return mu_sim_profile_find(value) != NULL;
    }
    if (strcmp(argument, "--seeds-file") == 0) {
        options->seeds_file = value;
        return true;
    }
    if (strcmp(argument, "--mutation") == 0)
        return (options->mutant = find_mutant(value)) != 0;
    char *end;
    uint64_t number = strtoull(value, &end, 10);
    if (*end || !*value)
        return false;
    if (strcmp(argument, "--seed") == 0)
        options->seed = number;
    else if (strcmp(argument, "--seeds") == 0)
        options->seeds = number;
    else if (strcmp(argument, "--workers") == 0)
        options->workers = (uint32_t)number;
    else if (strcmp(argument, "--steps") == 0)
        options->steps = number;
    else
        return false;
    return true;
}

int main(int argc, char **argv)
{
    struct options options = {.seed = 1, .seeds = 1};
    uint64_t failures = 0;
    for (int i = 1; i < argc; i++) {
        if (flag(argv[i], &options))
            continue;
        if (i + 1 == argc || !option(argv[i], argv[i + 1], &options))
            return usage("not understood:", argv[i]);
        i++;
    }
    if (options.mutants)
        return run_mutants(&options);
    mu_mutant_active = options.mutant;
    if (options.seeds_file) {
        int code = run_file(&options, &failures);
        if (code)
            return code;
    }
    failures += run_seeds(&options);
    if (!options.quiet)
        print_stats();
    if (failures)
        printf("%" PRIu64 " of %" PRIu64 " histories failed\n", failures, total.histories);
    return failures ? 1 : 0;
}
