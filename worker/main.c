/* muster-worker: options in, exit code out; everything else is in agent.c. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "kernels/pool.h"
#include "plan/session.h"
#include "proto/wire.h"
#include "worker/agent.h"
#include "worker/join.h"

enum { GIVE_UP_MAX_S = 7 * 24 * 3600, MILLISECONDS_MAX = 3600 * 1000 };

static const char help[] =
    "usage: muster-worker --job NAME [--coordinator ADDR] [options]\n"
    "\n"
    "Trains a part of a job. Start one per device, at any time, on any host: the coordinator gives it work as soon as\n"
    "it can use it. Leaves by itself when the job is over; SIGTERM or SIGINT makes it leave in good order before.\n"
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
    "  --threads N           compute threads (default: CPUs of the affinity mask)\n"
    "  --data-addr ADDR      address on which peers reach this worker, with or without port (default: the one that "
    "reaches\n"
    "                        the coordinator)\n"
    "  --host-id ID          workers with equal ids talk over Unix sockets (default: derived from the machine)\n"
    "  --unix-dir DIR        directory for the Unix socket (default: none, an abstract name)\n"
    "  --give-up-after S     leave with code 3 when no coordinator has answered for S seconds (default: 0, never)\n"
    "  --backoff-min MS      first pause between attempts to reach the coordinator (default: 50)\n"
    "  --backoff-max MS      longest pause (default: 2000)\n"
    "  --report-every MS     merge step reports that come faster than this (default: 100)\n"
    "  --connect-timeout MS  for the ranks of a new generation to find each other (default: 30000)\n"
    "  --ledger FILE         append a line for every leaf computed and every update applied\n"
    "  --log-level LEVEL     debug, info, warn or error (default: info)\n"
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
    OPT_NAME,
    OPT_THREADS,
    OPT_DATA_ADDR,
    OPT_HOST_ID,
    OPT_UNIX_DIR,
    OPT_GIVE_UP,
    OPT_BACKOFF_MIN,
    OPT_BACKOFF_MAX,
    OPT_REPORT_EVERY,
    OPT_CONNECT_TIMEOUT,
    OPT_LEDGER,
    OPT_TLS_CA,
    OPT_TLS_CERT,
    OPT_TLS_KEY,
    OPT_JOIN_TOKEN,
    OPT_LOG_LEVEL,
    OPT_VERSION,
    OPT_HELP
};

static const struct option options[] = {
    {"job", required_argument, NULL, OPT_JOB},
    {"coordinator", required_argument, NULL, OPT_COORDINATOR},
    {"name", required_argument, NULL, OPT_NAME},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"data-addr", required_argument, NULL, OPT_DATA_ADDR},
    {"host-id", required_argument, NULL, OPT_HOST_ID},
    {"unix-dir", required_argument, NULL, OPT_UNIX_DIR},
    {"give-up-after", required_argument, NULL, OPT_GIVE_UP},
    {"backoff-min", required_argument, NULL, OPT_BACKOFF_MIN},
    {"backoff-max", required_argument, NULL, OPT_BACKOFF_MAX},
    {"report-every", required_argument, NULL, OPT_REPORT_EVERY},
    {"connect-timeout", required_argument, NULL, OPT_CONNECT_TIMEOUT},
    {"ledger", required_argument, NULL, OPT_LEDGER},
    {"tls-ca", required_argument, NULL, OPT_TLS_CA},
    {"tls-cert", required_argument, NULL, OPT_TLS_CERT},
    {"tls-key", required_argument, NULL, OPT_TLS_KEY},
    {"join-token-file", required_argument, NULL, OPT_JOIN_TOKEN},
    {"log-level", required_argument, NULL, OPT_LOG_LEVEL},
    {"version", no_argument, NULL, OPT_VERSION},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
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

static bool parse_level(const char *text, enum mu_log_level *ret_level)
{
    static const char *const names[] = {
        [MU_LOG_DEBUG] = "debug", [MU_LOG_INFO] = "info", [MU_LOG_WARN] = "warn", [MU_LOG_ERROR] = "error"};
    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(text, names[i]) == 0) {
            *ret_level = (enum mu_log_level)i;
            return true;
        }
    }
    fprintf(stderr, "muster-worker: --log-level: '%s' is not allowed: debug, info, warn or error\n", text);
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

/* False: the exit code is in *ret_code. */
static bool take_option(int id, const char *text, struct mu_agent_config *config, enum mu_log_level *level,
                        int *ret_code)
{
    bool ok = true;
    uint32_t seconds;
    *ret_code = MU_AGENT_EXIT_USAGE;
    switch (id) {
    case OPT_JOB:
        config->job = text;
        return parse_name("job", text, MU_JOB_NAME_SIZE);
    case OPT_COORDINATOR:
        config->coordinator = text;
        return true;
    case OPT_NAME:
        config->name = text;
        return parse_name("name", text, MU_WORKER_NAME_SIZE);
    case OPT_THREADS:
        return parse_number("threads", text, 1, MU_POOL_THREADS_MAX, &config->threads);
    case OPT_DATA_ADDR:
        config->data_addr = text;
        return true;
    case OPT_HOST_ID:
        config->host_id = text;
        return true;
    case OPT_UNIX_DIR:
        config->unix_dir = text;
        return true;
    case OPT_GIVE_UP:
        ok = parse_number("give-up-after", text, 0, GIVE_UP_MAX_S, &seconds);
        config->give_up_ms = ok ? seconds * 1000 : 0;
        return ok;
    case OPT_BACKOFF_MIN:
        return parse_number("backoff-min", text, 1, MILLISECONDS_MAX, &config->backoff_min_ms);
    case OPT_BACKOFF_MAX:
        return parse_number("backoff-max", text, 1, MILLISECONDS_MAX, &config->backoff_max_ms);
    case OPT_REPORT_EVERY:
        return parse_number("report-every", text, 1, MILLISECONDS_MAX, &config->step_report_ms);
    case OPT_CONNECT_TIMEOUT:
        return parse_number("connect-timeout", text, 1, MILLISECONDS_MAX, &config->connect_timeout_ms);
    case OPT_LEDGER:
        config->ledger = text;
        return true;
    case OPT_TLS_CA:
        config->tls.ca = text;
        return true;
    case OPT_TLS_CERT:
        config->tls.cert = text;
        return true;
    case OPT_TLS_KEY:
        config->tls.key = text;
        return true;
    case OPT_JOIN_TOKEN:
        config->join_token_file = text;
        return true;
    case OPT_LOG_LEVEL:
        return parse_level(text, level);
    case OPT_VERSION:
        printf("muster-worker %s\n", MU_VERSION);
        *ret_code = MU_AGENT_EXIT_OK;
        return false;
    case OPT_HELP:
        fputs(help, stdout);
        *ret_code = MU_AGENT_EXIT_OK;
        return false;
    default: /* getopt has said what is wrong */
        fputs("Try 'muster-worker --help'.\n", stderr);
        return false;
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

int main(int argc, char **argv)
{
    const char *from_environment = getenv("MUSTER_COORDINATOR");
    struct mu_agent_config config = {.coordinator =
                                         from_environment && *from_environment ? from_environment : "127.0.0.1:7070",
                                     .tls = mu_rpc_tls_files_from_environment()};
    enum mu_log_level level = MU_LOG_INFO;
    int code;
    for (int id; (id = getopt_long(argc, argv, "", options, NULL)) != -1;)
        if (!take_option(id, optarg, &config, &level, &code))
            return code;
    if (optind < argc) {
        fprintf(stderr, "muster-worker: '%s' is not an option\nTry 'muster-worker --help'.\n", argv[optind]);
        return MU_AGENT_EXIT_USAGE;
    }
    if (!config.job) {
        fputs("muster-worker: --job is missing: name the job to work for\nTry 'muster-worker --help'.\n", stderr);
        return MU_AGENT_EXIT_USAGE;
    }
    if (config.backoff_min_ms && config.backoff_max_ms && config.backoff_min_ms > config.backoff_max_ms) {
        fprintf(stderr, "muster-worker: --backoff-min %u is not allowed: at most --backoff-max, %u\n",
                config.backoff_min_ms, config.backoff_max_ms);
        return MU_AGENT_EXIT_USAGE;
    }
    mu_log_init("worker", level);
    return join(&config, &code) ? mu_agent_run(&config) : code;
}
