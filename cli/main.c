/* muster: the command line. */
#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct command {
    const char *name;
    int (*run)(struct mu_cli *cli, int argc, char **argv);
    const char *words, *help;
};

static const struct command commands[] = {
    {"submit", mu_cmd_submit, "JOB.yaml [--name NAME] [--preflight] [--expected-revision N]",
     "add a job; with --preflight its workers are measured before it begins"},
    {"status", mu_cmd_status, "[JOB]", "all jobs, or one"},
    {"watch", mu_cmd_watch, "JOB [--after EVENT]", "follow a job until it is over: progress and events"},
    {"workers", mu_cmd_workers, "[--job JOB]", "workers that are attached or expected back"},
    {"events", mu_cmd_events, "[-f] [--job JOB] [--after N] [--newest N]", "what happened; -f goes on as it happens"},
    {"timings", mu_cmd_timings, "JOB [--worker W] [--last N]", "where the time of the newest steps went, per worker"},
    {"report", mu_cmd_report, "JOB [--workers N] | hang [REPORT [--threads]]",
     "where the time of a job's workers went, and who lost most; or reports of hangs"},
    {"describe", mu_cmd_describe, "job JOB | worker WORKER", "everything that is known of one"},
    {"diagnose", mu_cmd_diagnose, "JOB", "who of a job waits for whom, and who holds the others up"},
    {"trace", mu_cmd_trace, "JOB --out FILE [--steps FIRST:LAST]",
     "what every rank did in its newest steps, for Perfetto or Chrome"},
    {"logs", mu_cmd_logs, "WORKER [-n N] [-f]", "a worker's newest log lines; -f goes on as they come"},
    {"top", mu_cmd_top, "[--every SECONDS] [--rounds N]", "all jobs, and the workers to look at, again and again"},
    {"checkpoint", mu_cmd_checkpoint, "JOB [--expected-revision N] | verify DIR...",
     "order a checkpoint now; or check one, from its files alone"},
    {"checkpoints", mu_cmd_checkpoints, "JOB", "checkpoints of a job"},
    {"drain", mu_cmd_drain, "WORKER --reason TEXT [--expected-revision N]",
     "a worker leaves at the next boundary, for good"},
    {"undrain", mu_cmd_undrain, "WORKER [--expected-revision N]", "lift a drain, a quarantine or a demotion"},
    {"node", mu_cmd_node,
     "ls | describe NODE | cordon NODE --reason TEXT | drain NODE --reason TEXT [--deadline 30m] | uncordon|resume "
     "NODE [--expected-revision N]",
     "hosts: their states; keep new ranks away from one, empty it, take it back"},
    {"scale", mu_cmd_scale, "JOB [--min N] [--max N] [--spares N] [--expected-revision N]",
     "how many workers a job takes, from now on"},
    {"job", mu_cmd_job,
     "amend JOB [--roll-back K] [CHANGE..] [--expected-revision N] | branch|rebase JOB --checkpoint K NEWNAME [--path "
     "DIR] "
     "[CHANGE..] [--expected-revision N]; rebase also --compute fp32|bf16; CHANGE: --lr X, --min-lr X, --warmup N, "
     "--steps N, --every N|auto, --keep N, "
     "--keep-every N, --skip FIRST:COUNT, --at-step N",
     "change a job that runs, from a step on or back from a checkpoint; begin a new job with one of its checkpoints, "
     "under its numeric identity or another"},
    {"cancel", mu_cmd_cancel, "JOB [--reason TEXT] [--expected-revision N]", "end a job"},
    {"snapshot", mu_cmd_snapshot, "save FILE | restore FILE --data-dir DIR [--epoch N]",
     "the coordinator's records: to a file, or (with the coordinator stopped) from one"},
    {"catalog", mu_cmd_catalog, "rebuild DIR --job JOB --data-dir DIR",
     "a lost job's record, made again from its checkpoints (with the coordinator stopped)"},
    {"debug", mu_cmd_debug, "bundle -O FILE.tar",
     "all that the coordinator tells, in one archive, for a report of a problem"},
    {"up", mu_cmd_up, "JOB.yaml [--workers N] [--threads N] [--data-dir D] [--listen A]",
     "coordinator, workers and live view on this machine"},
    {"launch", mu_cmd_launch,
     "--hosts FILE|LIST [--add] JOB.yaml|JOB [--within S] [--fanout N] [--ssh 'ssh ..'] [--program PATH] [-- OPTION..]",
     "submit, and start workers over ssh on all hosts of node[01-16],..; with --add, more of them for a job that runs"},
    {"generate", mu_cmd_generate,
     "--checkpoint DIR [--prompt TEXT] [--tokens N] [--temperature X] [--top-k N] [--seed N]",
     "text from a checkpoint"},
    {"export", mu_cmd_export, "--checkpoint DIR --format hf-gpt2|hf-llama|llm.c --out DIR|FILE",
     "a checkpoint's parameters for other programs"},
    {"import", mu_cmd_import, "--format hf-gpt2|hf-llama|llm.c --from DIR|FILE --out DIR [--slices T]",
     "a checkpoint from other programs' parameters"},
    {"cert", mu_cmd_cert, "ca DIR | issue DIR ROLE/NAME [--hosts A,B] [--valid 365d]",
     "a CA for mutual TLS, and certificates: coordinator, worker, viewer, operator or admin"},
    {"token", mu_cmd_token, "create [--role worker|viewer] [--worker NAME] [--valid 1h] [--reusable] | ls | revoke ID",
     "tokens: join tokens, for which workers without a certificate get one; of the role viewer, to read over HTTP"},
    {"plan", mu_cmd_plan,
     "CLUSTER.yaml JOB.yaml [--top N] [--tp N] [--pp N] [--dp N] [--micro N] [--fp32] "
     "[--what-if NAME=NUMBER,..] [--measured FILE]",
     "which layout, how fast, what failures cost; before anything runs"},
    {"probe", mu_cmd_probe,
     "[--threads N] [--workers N] [--dir D] [--mib N] | [--job JOB] [--quick] [--mib N] [--out FILE]",
     "what this host can do, as a cluster file for plan and musterd --rates; or, where a coordinator is named, what "
     "the "
     "attached workers that have no rank can do, alone and between each other, and which stands out"},
    {"simulate", mu_cmd_simulate,
     "CLUSTER.yaml JOB.yaml [--days N] [--seed S] [--runs N] [--svg FILE] [--tp N] [--pp N] [--dp N] [--micro N]",
     "weeks of a job on nodes that fail: what is lost to what, with the coordinator's own decisions"},
};
enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

static void help(void)
{
    printf(
        "muster %s: elastic, exact training\n\nusage: muster [--coordinator ADDR] [-o table|json] [--timeout SECONDS]\n"
        "              [--tls-ca FILE --tls-cert FILE --tls-key FILE] COMMAND ...\n\n",
        MU_VERSION);
    for (int i = 0; i < COMMAND_COUNT; i++)
        printf("  %-12s %s\n               %s\n", commands[i].name, commands[i].words, commands[i].help);
    printf("  version\n               this program's version\n\n"
           "--coordinator is 127.0.0.1:7070 unless MUSTER_COORDINATOR says otherwise, --tls-ca and so on are "
           "MUSTER_TLS_CA,\n"
           "MUSTER_TLS_CERT and MUSTER_TLS_KEY. With -o json, lists are one "
           "object per line.\n"
           "exit codes: 0 ok, 1 failure, 2 usage, 3 cannot connect, 4 not found, 5 exists already or not possible in "
           "this state,\n"
           "            6 refused (a limit, a full disk or missing permission)\n");
}

/* Global options may stand before or after the command's name; they are taken out of argv. Returns the new argc, or -1.
 */
static int take_globals(struct mu_cli *cli, int argc, char **argv)
{
    const char *output = "table", *timeout = "10";
    struct {
        const char *name, **value;
    } globals[] = {{"--coordinator", &cli->address},
                   {"-o", &output},
                   {"--output", &output},
                   {"--timeout", &timeout},
                   {"--tls-ca", &cli->tls.ca},
                   {"--tls-cert", &cli->tls.cert},
                   {"--tls-key", &cli->tls.key}};
    int kept = 1;
    bool only_words = false; /* after "--" */
    for (int i = 1; i < argc; i++) {
        const char **value = NULL, *equals = NULL;
        only_words = only_words || strcmp(argv[i], "--") == 0;
        for (size_t k = 0; k < sizeof globals / sizeof globals[0] && !value && !only_words; k++) {
            size_t length = strlen(globals[k].name);
            if (strncmp(argv[i], globals[k].name, length) == 0 && (argv[i][length] == 0 || argv[i][length] == '=')) {
                value = globals[k].value;
                equals = argv[i][length] == '=' ? argv[i] + length + 1 : NULL;
            }
        }
        if (!value) {
            argv[kept++] = argv[i];
        } else if (equals) {
            *value = equals;
        } else if (i + 1 < argc) {
            *value = argv[++i];
        } else {
            fprintf(stderr, "muster: option '%s' needs a value (see: muster help)\n", argv[i]);
            return -1;
        }
    }
    uint64_t seconds;
    if (strcmp(output, "json") != 0 && strcmp(output, "table") != 0) {
        fprintf(stderr, "muster: -o '%s' is not allowed: table or json\n", output);
        return -1;
    }
    if (!mu_cli_number("", "--timeout", timeout, 1, 3600, &seconds))
        return -1;
    cli->json = strcmp(output, "json") == 0;
    cli->timeout_ms = (unsigned)seconds * 1000;
    return kept;
}

/* What was printed and did not arrive (a full disk) is a failure, whatever the command did. */
static int check_output(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    fprintf(stderr, "muster: the output could not be written: %s\n", strerror(errno));
    return code == MU_EXIT_OK ? MU_EXIT_FAILURE : code;
}

int main(int argc, char **argv)
{
    static const char usual[] = "127.0.0.1:7070";
    struct mu_cli cli = {0};
    const char *address = getenv("MUSTER_COORDINATOR");
    cli.address = address && address[0] ? address : usual;
    cli.tls = mu_rpc_tls_files_from_environment();
    mu_wire_arena_init(&cli.arena);
    argc = take_globals(&cli, argc, argv);
    if (argc < 0)
        return MU_EXIT_USAGE;
    cli.is_named = cli.address != usual;
    if (argc < 2) {
        fprintf(stderr, "muster: which command? (see: muster help)\n");
        return MU_EXIT_USAGE;
    }
    if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        help();
        return check_output(MU_EXIT_OK);
    }
    if (strcmp(argv[1], "version") == 0 || strcmp(argv[1], "--version") == 0) {
        printf("muster %s\n", MU_VERSION);
        return check_output(MU_EXIT_OK);
    }
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            int code = commands[i].run(&cli, argc - 2, argv + 2);
            mu_cli_close(&cli);
            return check_output(code);
        }
    }
    fprintf(stderr, "muster: '%s' is not a command (see: muster help)\n", argv[1]);
    return MU_EXIT_USAGE;
}
