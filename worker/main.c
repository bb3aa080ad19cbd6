/* muster-worker: options in, exit code out; everything else is in agent.c, and supervisor.c for several of them. */
#include <getopt.h>
#include <stddef.h>
#include <stdio.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/flight.h"
#include "common/log.h"
#include "common/notify.h"
#include "kernels/pool.h"
#include "plan/session.h"
#include "proto/wire.h"
#include "worker/agent.h"
#include "worker/cpus.h"
#include "worker/detach.h"
#include "worker/join.h"
#include "worker/leave.h"
#include "worker/notes.h"
#include "worker/oom.h"
#include "worker/route.h"
#include "worker/stacks.h"
#include "worker/supervisor.h"
#include "worker/vitals.h"

enum {
    GIVE_UP_MAX_S = 7 * 24 * 3600,
    MILLISECONDS_MAX = 3600 * 1000,
    READY_MAX_S = 3600,
    READY_DEFAULT_S = 30,
    NAME_ROOM = 9, /* "-cuda255" */
    GPU_DIGITS = 3,
    ROUTE_SIZE = 192,
};

static const char help[] =
    "usage: muster-worker --job NAME [--coordinator ADDR] [options]\n"
    "\n"
    "Trains a part of a job. Start one per device (or with --device one for all of them), at any time, on any host: "
    "the coordinator gives it work as soon as\n"
    "it can use it. Leaves by itself when the job is over; SIGTERM or SIGINT makes it leave in good order before;\n"
    "SIGUSR2 makes it log what it did last and what its threads are doing.\n"
    "\n"
    "  --job NAME            the job to work for\n"
    "  --coordinator ADDR    host:port, [v6]:port or unix:/path of musterd (default: $MUSTER_COORDINATOR, else "
    "127.0.0.1:7070)\n"
    "  --tls-ca FILE, --tls-cert FILE, --tls-key FILE\n"
    "                        mutual TLS with musterd (default: $MUSTER_TLS_CA, $MUSTER_TLS_CERT, $MUSTER_TLS_KEY)\n"
    "  --join-token-file FILE  a worker without a certificate gets one for the token in FILE (or in "
    "$MUSTER_JOIN_TOKEN; see\n"
    "                        muster token), and writes it to --tls-cert and --tls-key\n"
    "  --name NAME           this worker's name: a-z 0-9 . _ - (default: chosen by the coordinator)\n"
    "  --device all          a supervisor with one worker for every device: every GPU, called NAME-cuda0, ..., or "
    "where "
    "there\n"
    "                        is none, for the processors of each memory node\n"
    "  --device cpu          a supervisor whose workers share the processors of the affinity mask: --slots N of them\n"
    "                        (default: 1). Workers are called NAME-cpu0, NAME-cpu1, ... (default NAME: the host's).\n"
    "                        Those that crash are started again, as often as the coordinator permits\n"
    "  --device cuda:N       one worker, without a supervisor, that computes on this GPU and holds the model there\n"
    "  --detach              with --device: return once all workers are attached; they stay in the background\n"
    "  --ready-within S      with --detach: give up when they are not attached after S seconds (default: 30)\n"
    "  --log FILE            with --detach: where their output goes (default: ~/.local/state/muster/NAME.log)\n"
    "  --threads N           compute threads (default: CPUs of the affinity mask)\n"
    "  --memory MIB          of this host's memory, or of the GPU's, that the workers of the host may use together\n"
    "                        (default: all of it, on the CPU what the cgroup allows); layouts that need more are not "
    "chosen\n"
    "  --data-addr ADDR      address on which peers reach this worker, with or without port (default: the one that "
    "reaches\n"
    "                        the coordinator)\n"
    "  --host-id ID          workers with equal ids talk over Unix sockets (default: derived from the machine)\n"
    "  --unix-dir DIR        directory for the Unix socket (default: none, an abstract name)\n"
    "  --give-up-after S     leave with code 3 when no coordinator has answered for S seconds (default: 0, never)\n"
    "  --backoff-min MS      first pause between attempts to reach the coordinator (default: 50)\n"
    "  --backoff-max MS      longest pause (default: 2000)\n"
    "  --report-every MS     merge step reports that come faster than this (default: 100)\n"
    "  --vitals-every MS     tell how this worker and its host are so often (default: 5000; 0: never)\n"
    "  --no-graphs           on a GPU: launch each kernel by itself, record none as CUDA graphs\n"
    "  --no-flight           no flight recorder: reports of hangs and traces then lack this worker's records\n"
    "  --connect-timeout MS  for the ranks of a new generation to find each other (default: 30000)\n"
    "  --ledger FILE         append a line for every leaf computed and every update applied\n"
    "  --log-level LEVEL     debug, info, warn or error (default: info)\n"
    "  --log-format FORMAT   logfmt or json (default: logfmt)\n"
    "  --version, --help\n"
    "\n"
    "exit codes: 0 the job is over, or this worker was released or left on request\n"
    "            1 failure: refused by the coordinator, data or memory not as the job needs them, ...\n"
    "            2 usage\n"
    "            3 cannot connect: no coordinator answered for --give-up-after seconds\n"
    "          130 interrupted twice\n";

enum option_id {
    OPT_JOB = 256,
    OPT_COORDINATOR,
    OPT_TLS_CA,
    OPT_TLS_CERT,
    OPT_TLS_KEY,
    OPT_NAME,
    OPT_DEVICE,
    OPT_SLOTS,
    OPT_DETACH,
    OPT_READY_WITHIN,
    OPT_LOG,
    OPT_THREADS,
    OPT_MEMORY,
    OPT_DATA_ADDR,
    OPT_HOST_ID,
    OPT_UNIX_DIR,
    OPT_GIVE_UP,
    OPT_BACKOFF_MIN,
    OPT_BACKOFF_MAX,
    OPT_REPORT_EVERY,
    OPT_VITALS_EVERY,
    OPT_NO_FLIGHT,
    OPT_NO_GRAPHS,
    OPT_CONNECT_TIMEOUT,
    OPT_LEDGER,
    OPT_JOIN_TOKEN,
    OPT_LOG_LEVEL,
    OPT_LOG_FORMAT,
    OPT_VERSION,
    OPT_HELP,
};

static const struct option options[] = {
    {"job", required_argument, NULL, OPT_JOB},
    {"coordinator", required_argument, NULL, OPT_COORDINATOR},
    {"tls-ca", required_argument, NULL, OPT_TLS_CA},
    {"tls-cert", required_argument, NULL, OPT_TLS_CERT},
    {"tls-key", required_argument, NULL, OPT_TLS_KEY},
    {"name", required_argument, NULL, OPT_NAME},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"slots", required_argument, NULL, OPT_SLOTS},
    {"detach", no_argument, NULL, OPT_DETACH},
    {"ready-within", required_argument, NULL, OPT_READY_WITHIN},
    {"log", required_argument, NULL, OPT_LOG},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"memory", required_argument, NULL, OPT_MEMORY},
    {"data-addr", required_argument, NULL, OPT_DATA_ADDR},
    {"host-id", required_argument, NULL, OPT_HOST_ID},
    {"unix-dir", required_argument, NULL, OPT_UNIX_DIR},
    {"give-up-after", required_argument, NULL, OPT_GIVE_UP},
    {"backoff-min", required_argument, NULL, OPT_BACKOFF_MIN},
    {"backoff-max", required_argument, NULL, OPT_BACKOFF_MAX},
    {"report-every", required_argument, NULL, OPT_REPORT_EVERY},
    {"vitals-every", required_argument, NULL, OPT_VITALS_EVERY},
    {"no-flight", no_argument, NULL, OPT_NO_FLIGHT},
    {"no-graphs", no_argument, NULL, OPT_NO_GRAPHS},
    {"connect-timeout", required_argument, NULL, OPT_CONNECT_TIMEOUT},
    {"ledger", required_argument, NULL, OPT_LEDGER},
    {"join-token-file", required_argument, NULL, OPT_JOIN_TOKEN},
    {"log-level", required_argument, NULL, OPT_LOG_LEVEL},
    {"log-format", required_argument, NULL, OPT_LOG_FORMAT},
    {"version", no_argument, NULL, OPT_VERSION},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

struct choices {
    struct mu_agent_config agent;
    enum mu_log_level level;
    const char *device, *log; /* device NULL: no supervisor */
    const char *gpu;          /* "cuda:N": computes there, without a supervisor */
    uint32_t slots, ready_s;  /* 0: not given */
    bool detach, no_graphs;
    char **words; /* what the supervisor's workers are given, "--job=kjv" */
    size_t word_count;
};

static bool parse_number(const char *option, const char *text, uint32_t least, uint32_t most, uint32_t *ret_value)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || value < least || value > most) {
        fprintf(stderr, "muster-worker: --%s: '%s' is not allowed: a number from %u to %u\n", option, text, least,
                most);
        return false;
    }
    *ret_value = (uint32_t)value;
    return true;
}

static bool parse_log(int id, const char *text, enum mu_log_level *ret_level)
{
    bool is_level = id == OPT_LOG_LEVEL;
    if (is_level ? mu_log_level_of(text, ret_level) : mu_log_choose_format(text))
        return true;
    fprintf(stderr, "muster-worker: --log-%s: '%s' is not allowed: %s\n", is_level ? "level" : "format", text,
            is_level ? "debug, info, warn or error" : "logfmt or json");
    return false;
}

static bool parse_name(const char *option, const char *text, size_t capacity)
{
    if (mu_wire_name_ok(text, capacity))
        return true;
    fprintf(stderr,
            "muster-worker: --%s: '%s' is not allowed: 1 to %zu characters of a-z 0-9 . _ -, a letter or digit first\n",
            option, text, capacity - 1);
    return false;
}

static bool parse_device(struct choices *choices)
{
    const char *text = choices->device;
    size_t digits = strncmp(text, "cuda:", 5) == 0 ? strspn(text + 5, "0123456789") : 0;
    if (digits > 0 && digits <= GPU_DIGITS && !text[5 + digits]) {
        choices->gpu = text;
        choices->device = NULL;
        return true;
    }
    if (strcmp(text, "all") == 0 || strcmp(text, "cpu") == 0)
        return true;
    fprintf(stderr, "muster-worker: --device: '%s' is not allowed: all, cpu, or cuda:0, cuda:1, ...\n", text);
    return false;
}

/* Options that are taken as they stand. */
static bool take_text(int id, const char *text, struct choices *choices)
{
    struct mu_agent_config *config = &choices->agent;
    const struct {
        int id;
        const char **value;
    } texts[] = {{OPT_COORDINATOR, &config->coordinator},
                 {OPT_TLS_CA, &config->tls.ca},
                 {OPT_TLS_CERT, &config->tls.cert},
                 {OPT_TLS_KEY, &config->tls.key},
                 {OPT_JOIN_TOKEN, &config->join_token_file},
                 {OPT_DATA_ADDR, &config->data_addr},
                 {OPT_HOST_ID, &config->host_id},
                 {OPT_UNIX_DIR, &config->unix_dir},
                 {OPT_LEDGER, &config->ledger},
                 {OPT_LOG, &choices->log},
                 {OPT_JOB, &config->job},
                 {OPT_NAME, &config->name},
                 {OPT_DEVICE, &choices->device}};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i].id == id) {
            *texts[i].value = text;
            return true;
        }
    }
    return false;
}

static bool take_number(int id, const char *text, struct choices *choices)
{
    struct mu_agent_config *config = &choices->agent;
    uint32_t seconds, mib;
    switch (id) {
    case OPT_THREADS:
        return parse_number("threads", text, 1, MU_POOL_THREADS_MAX, &config->threads);
    case OPT_MEMORY:
        if (!parse_number("memory", text, 1, UINT32_MAX, &mib))
            return false;
        config->memory_bytes = (uint64_t)mib << 20;
        return true;
    case OPT_SLOTS:
        return parse_number("slots", text, 1, MU_SLOTS_MAX, &choices->slots);
    case OPT_READY_WITHIN:
        return parse_number("ready-within", text, 1, READY_MAX_S, &choices->ready_s);
    case OPT_GIVE_UP:
        if (!parse_number("give-up-after", text, 0, GIVE_UP_MAX_S, &seconds))
            return false;
        config->give_up_ms = seconds * 1000;
        return true;
    case OPT_BACKOFF_MIN:
        return parse_number("backoff-min", text, 1, MILLISECONDS_MAX, &config->backoff_min_ms);
    case OPT_BACKOFF_MAX:
        return parse_number("backoff-max", text, 1, MILLISECONDS_MAX, &config->backoff_max_ms);
    case OPT_REPORT_EVERY:
        return parse_number("report-every", text, 1, MILLISECONDS_MAX, &config->step_report_ms);
    case OPT_VITALS_EVERY:
        return parse_number("vitals-every", text, 0, MILLISECONDS_MAX, &config->vitals_every_ms);
    default:
        return parse_number("connect-timeout", text, 1, MILLISECONDS_MAX, &config->connect_timeout_ms);
    }
}

/* False: the exit code is in *ret_code. */
static bool take_option(int id, const char *text, struct choices *choices, int *ret_code)
{
    *ret_code = MU_AGENT_EXIT_USAGE;
    switch (id) {
    case '?': /* getopt has said what is wrong */
        fputs("Try 'muster-worker --help'.\n", stderr);
        return false;
    case OPT_VERSION:
        printf("muster-worker %s\n", MU_VERSION);
        *ret_code = MU_AGENT_EXIT_OK;
        return false;
    case OPT_HELP:
        fputs(help, stdout);
        *ret_code = MU_AGENT_EXIT_OK;
        return false;
    case OPT_DETACH:
        choices->detach = true;
        return true;
    case OPT_NO_FLIGHT:
        mu_flight_switch_off();
        return true;
    case OPT_NO_GRAPHS:
        choices->no_graphs = true;
        return true;
    case OPT_LOG_LEVEL:
    case OPT_LOG_FORMAT:
        return parse_log(id, text, &choices->level);
    default:
        if (!take_text(id, text, choices))
            return take_number(id, text, choices);
        return (id != OPT_JOB || parse_name("job", text, MU_JOB_NAME_SIZE)) &&
               (id != OPT_NAME || parse_name("name", text, MU_WORKER_NAME_SIZE)) &&
               (id != OPT_DEVICE || parse_device(choices));
    }
}

/* A worker that has a token and no certificate gets one first. False: the exit code is in *ret_code. */
static bool join(const struct mu_agent_config *config, int *ret_code)
{
    struct mu_error err = {0};
    const struct mu_join_config from = {.coordinator = config->coordinator,
                                        .tls = config->tls,
                                        .token_file = config->join_token_file,
                                        .name = config->name,
                                        .give_up_ms = config->give_up_ms};
    enum mu_status status = mu_join(&from, &err);
    if (status == MU_OK)
        return true;
    MU_LOGE("cannot join: %s", err.text);
    *ret_code =
        status == MU_ERR_UNAVAILABLE || status == MU_ERR_TIMEOUT ? MU_AGENT_EXIT_CANNOT_CONNECT : MU_AGENT_EXIT_FAILURE;
    return false;
}

/* Everything but what the supervisor itself takes or gives. */
static bool keep_word(int id, const char *text, struct choices *choices)
{
    static const int own[] = {OPT_JOIN_TOKEN, OPT_NAME, OPT_DEVICE, OPT_SLOTS, OPT_DETACH, OPT_READY_WITHIN, OPT_LOG};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (own[i] == id)
            return true;
    const struct option *option = options;
    while (option->val != id)
        option++;
    return asprintf(&choices->words[choices->word_count++], "--%s=%s", option->name, text) > 0;
}

/* What is wrong with the options as a whole. */
static bool check_choices(const struct choices *choices)
{
    const struct mu_agent_config *agent = &choices->agent;
    if (!agent->job) {
        fputs("muster-worker: --job is missing: name the job to work for\nTry 'muster-worker --help'.\n", stderr);
        return false;
    }
    if (agent->backoff_min_ms && agent->backoff_max_ms && agent->backoff_min_ms > agent->backoff_max_ms) {
        fprintf(stderr, "muster-worker: --backoff-min %u is not allowed: at most --backoff-max, %u\n",
                agent->backoff_min_ms, agent->backoff_max_ms);
        return false;
    }
    if (!choices->device && (choices->slots || choices->detach)) {
        fprintf(stderr, "muster-worker: --%s needs --device\n", choices->slots ? "slots" : "detach");
        return false;
    }
    if (!choices->detach && (choices->ready_s || choices->log)) {
        fprintf(stderr, "muster-worker: --%s needs --detach\n", choices->log ? "log" : "ready-within");
        return false;
    }
    if (choices->slots && strcmp(choices->device, "all") == 0) {
        fputs("muster-worker: --slots contradicts --device all: give it with --device cpu\n", stderr);
        return false;
    }
    return true;
}

/* ---- with --device ---- */

/* In a process of its own: the supervisor must not have the driver's threads, and its workers start it afresh. */
static uint32_t count_gpus(void)
{
    int code = 0;
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a driver may hang for long */
        if (getppid() != parent)
            _exit(0);
        uint32_t count = mu_device_count_cuda();
        _exit((int)(count < MU_SLOTS_MAX ? count : MU_SLOTS_MAX - 1));
    }
    return pid > 0 && waitpid(pid, &code, 0) == pid && WIFEXITED(code) ? (uint32_t)WEXITSTATUS(code) : 0;
}

static uint32_t count_slots(const struct choices *choices, bool *ret_gpus)
{
    struct mu_cpu *cpus = NULL;
    uint32_t gpus = strcmp(choices->device, "all") == 0 ? count_gpus() : 0;
    *ret_gpus = gpus > 0;
    if (gpus > 0)
        return gpus;
    if (strcmp(choices->device, "cpu") == 0 || !(cpus = malloc(CPU_SETSIZE * sizeof *cpus)))
        return choices->slots ? choices->slots : 1;
    uint32_t nodes = mu_cpus_nodes(cpus, mu_cpus_read(cpus));
    free(cpus);
    return nodes ? nodes : 1;
}

static int supervise(const struct choices *choices)
{
    char host[MU_WORKER_NAME_SIZE] = "localhost", name[MU_WORKER_NAME_SIZE], log[MU_PATH_SIZE] = "";
    const char *log_path = choices->log;
    int code;
    if (gethostname(host, sizeof host - 1) != 0)
        MU_LOGW("the host has no name");
    mu_wire_name_clean(choices->agent.name ? choices->agent.name : host, name, sizeof name - NAME_ROOM);
    if (choices->agent.name && strcmp(name, choices->agent.name) != 0) {
        fprintf(stderr, "muster-worker: --name '%s' is too long with --device: at most %d characters\n",
                choices->agent.name, MU_WORKER_NAME_SIZE - 1 - NAME_ROOM);
        return MU_AGENT_EXIT_USAGE;
    }
    struct mu_supervisor_config config = {
        .coordinator = choices->agent.coordinator,
        .tls = choices->agent.tls,
        .job = choices->agent.job,
        .host = choices->agent.host_id ? choices->agent.host_id : host,
        .name = name,
        .words = choices->words,
        .give_up_ms = choices->agent.give_up_ms,
        .ready_fd = -1,
        .ready_ms = (choices->ready_s ? choices->ready_s : READY_DEFAULT_S) * 1000,
    };
    config.slots = count_slots(choices, &config.gpus);
    if (choices->detach) {
        if (!log_path && mu_detach_default_log(name, log, sizeof log))
            log_path = log;
        if (!log_path) {
            fputs("muster-worker: --detach: there is no $HOME to write a log to: give --log FILE\n", stderr);
            return MU_AGENT_EXIT_USAGE;
        }
        if (!mu_detach(log_path, &config.ready_fd, &code))
            return code;
    }
    return mu_supervise(&config);
}

/* -1: everything is taken. */
static int take_options(int argc, char **argv, struct choices *choices)
{
    int code;
    for (int id; (id = getopt_long(argc, argv, "", options, NULL)) != -1;)
        if (!take_option(id, optarg, choices, &code) || !keep_word(id, optarg, choices))
            return code;
    if (optind < argc) {
        fprintf(stderr, "muster-worker: '%s' is not an option\nTry 'muster-worker --help'.\n", argv[optind]);
        return MU_AGENT_EXIT_USAGE;
    }
    return check_choices(choices) ? -1 : MU_AGENT_EXIT_USAGE;
}

/* One worker, on the CPU or on a GPU. */
static int work(struct choices *choices)
{
    mu_stacks_init();
    struct mu_agent_config *agent = &choices->agent;
    struct mu_error err = {0};
    char route[ROUTE_SIZE] = "";
    int code = MU_AGENT_EXIT_CANNOT_CONNECT;
    agent->note_fd = mu_notes_open();
    agent->route_to = route;
    if (!choices->gpu && agent->memory_bytes == 0 && mu_oom_limit_bytes("") < UINT64_MAX)
        agent->memory_bytes = mu_oom_limit_bytes("");
    enum mu_status status = MU_OK;
    if (!agent->data_addr)
        status = mu_route_find(agent->coordinator, agent->give_up_ms, agent->note_fd, route, sizeof route, &err);
    if (status == MU_OK && choices->gpu) {
        status = mu_device_open_cuda((uint32_t)strtoul(choices->gpu + 5, NULL, 10), 0, &err, &agent->device);
        code = status == MU_ERR_INVALID ? MU_AGENT_EXIT_USAGE : MU_AGENT_EXIT_FAILURE;
        if (status == MU_OK && choices->no_graphs)
            mu_device_set_recording(agent->device, false);
    }
    if (status != MU_OK) {
        MU_LOGE("%s", err.text);
        mu_notes_send(agent->note_fd, MU_NOTE_TROUBLE, (struct mu_id){0}, err.text);
        return code;
    }
    code = mu_agent_run(agent);
    mu_device_close(agent->device);
    return code;
}

int main(int argc, char **argv)
{
    mu_leave_early();
    const char *from_environment = getenv("MUSTER_COORDINATOR");
    struct choices choices = {
        .agent = {.coordinator = from_environment && *from_environment ? from_environment : "127.0.0.1:7070",
                  .vitals_every_ms = MU_VITALS_EVERY_MS,
                  .tls = mu_rpc_tls_files_from_environment()},
        .level = MU_LOG_INFO,
        .words = calloc((size_t)argc + 1, sizeof(char *))};
    if (!choices.words)
        return MU_AGENT_EXIT_FAILURE;
    int code = take_options(argc, argv, &choices);
    if (code < 0) {
        mu_notify_init();
        bool is_one_of_several = getenv(MU_NOTES_VARIABLE) && choices.agent.name; /* their lines stand in one log */
        mu_log_init(choices.device ? "supervisor" : is_one_of_several ? choices.agent.name : "worker", choices.level);
        if (join(&choices.agent, &code))
            code = choices.device ? supervise(&choices) : work(&choices);
    }
    for (size_t i = 0; i < choices.word_count; i++)
        free(choices.words[i]);
    free(choices.words);
    return code;
}
