/* musterd: the coordinator. Options, signals, exit codes; everything else is in driver.c. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cli/cluster_file.h"
#include "cli/topology_file.h"
#include "common/log.h"
#include "common/notify.h"
#include "coordinator/driver.h"
#include "coordinator/tokens.h"
#include "plan/forecast.h"

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };
enum { FILES_BESIDE_WORKERS = 512, FILES_GENEROUS = 16384, FILES_GENEROUS_FACTOR = 2 };

static const char usage_text[] =
    "usage: musterd --data-dir DIR [options]\n"
    "\n"
    "The coordinator of a Muster cluster: assigns ranks, watches liveness, commits checkpoints.\n"
    "\n"
    "  --data-dir DIR           database of jobs, generations, checkpoints and events; made when absent\n"
    "  --volatile               keep everything in memory instead: all is lost when it stops\n"
    "  --listen ADDR            address for workers and clients (default 127.0.0.1:7070; port 0: any free one)\n"
    "  --http ADDR              also serve the dashboard, /api/v1/ and /metrics over HTTP there, over HTTPS elsewhere\n"
    "                           than on the loopback; there readers need the role viewer: a certificate, or a token\n"
    "                           (muster token create --role viewer) (default: not)\n"
    "  --http-auth              on the loopback, too, readers need a token\n"
    "  --tls-ca FILE, --tls-cert FILE, --tls-key FILE\n"
    "                           mutual TLS: clients need a certificate of that CA, its role says what they may do\n"
    "                           (default: $MUSTER_TLS_CA, $MUSTER_TLS_CERT, $MUSTER_TLS_KEY; see muster cert)\n"
    "  --tls-deny FILE          identities (muster://ROLE/NAME, one a line) that are shut out; re-read when it "
    "changes\n"
    "  --ca-key FILE            private key of a CA in --tls-ca: workers that bring a join token (muster token) get a\n"
    "                           certificate\n"
    "  --certificate-valid-s N  such a certificate is good for so long; workers renew theirs in time (default %u)\n"
    "  --insecure-listen        listen where other hosts can reach it although there is no TLS; --http, too\n"
    "  --topology FILE          which host is under which switch (topology.conf, topology.yaml, topograph's .json): "
    "who is\n"
    "                           new gets ranks by it, and a buddy is under another switch (default: not known)\n"
    "  --rates FILE             what muster probe printed: how fast a worker here is, before any has reported\n"
    "  --address-file FILE      write the address that was bound into FILE, once it can be used\n"
    "\n"
    "  --heartbeat-ms N         workers give a sign of life at least this often (default %u)\n"
    "  --suspect-ms N           a worker silent for so long is a suspect (default %u)\n"
    "  --lost-ms N              a worker silent for so long is lost (default %u)\n"
    "  --reattach-grace-ms N    a worker whose stream broke may come back for so long (default %u)\n"
    "  --settle-ms N            wait so long for further changes before planning a new generation (default %u)\n"
    "  --rebalance-ms N         look so often whether layers and leaves should move from slow workers, 0: never\n"
    "                           (default %u)\n"
    "  --prepare-limit-ms N     a worker that makes no progress while preparing is lost after (default %u)\n"
    "  --hang-floor-ms N        a running worker without progress is never called hanging before (default %u)\n"
    "  --link-retry-ms N        a link that failed between living workers is tried again after (default %u)\n"
    "  --scrub-again-s N        a checkpoint that was re-read is re-read again after (default %u)\n"
    "  --crash-limit N          more deaths of one worker than this within the window: quarantine (default %u)\n"
    "  --crash-window-ms N      that window (default %u)\n"
    "  --max-workers N          most workers attached at a time (default %u)\n"
    "  --max-jobs N             most jobs known at a time (default %u)\n"
    "\n"
    "  --events-kept N          newest events that can still be watched (default %u)\n"
    "  --reserve-mib N          refuse changes while less is free below DIR (default %u)\n"
    "  --worker-series N        in /metrics numbers of single workers, while there are at most so many (default %u)\n"
    "  --connections-per-host N most connections of one host, 0: no limit (default %u)\n"
    "  --calls-per-client N     most open calls and streams of one client, workers' streams apart, 0: no limit\n"
    "                           (default %u)\n"
    "  --questions-per-second N of one client; more are refused, 0: no limit (default %u)\n"
    "  --pollers N              threads of the RPC server (default %u)\n"
    "  --log-level LEVEL        debug, info, warn or error (default info)\n"
    "  --log-format FORMAT      logfmt or json (default logfmt)\n"
    "  --version, --help\n"
    "\n"
    "SIGTERM and SIGINT stop it in good order; workers keep training and attach again when it is back.\n"
    "SIGUSR2 makes it report where the members of every job stand (muster report hang).\n"
    "Exit status: 0 stopped in good order, 1 failure, 2 usage.\n";

struct options {
    struct mu_driver_config driver;
    const char *address_file, *topology, *rates;
    enum mu_log_level log_level;
    bool is_volatile;
    bool is_insecure_wanted; /* reachable by others, without TLS */
    int exit_code;           /* of parsing; -1: go on */
};

struct number_option {
    const char *name;
    uint32_t *value;
    uint32_t min, max;
};

enum {
    OPT_TEXT = 1000,
    OPT_DATA_DIR,
    OPT_RATES,
    OPT_LISTEN,
    OPT_HTTP,
    OPT_HTTP_AUTH,
    OPT_TLS_CA,
    OPT_TLS_CERT,
    OPT_TLS_KEY,
    OPT_TLS_DENY,
    OPT_CA_KEY,
    OPT_INSECURE_LISTEN,
    OPT_ADDRESS_FILE,
    OPT_TOPOLOGY,
    OPT_LOG_LEVEL,
    OPT_LOG_FORMAT,
    OPT_VOLATILE,
    OPT_VERSION,
    OPT_HELP
};
enum { NUMBER_OPTIONS = 22, TEXT_OPTIONS = 18, MS_MAX = 24 * 3600 * 1000 };

static void print_usage(const struct options *options, FILE *to)
{
    const struct mu_driver_config *d = &options->driver;
    const struct mu_coord_config *c = &d->core;
    fprintf(to, usage_text, d->certificate_s, c->heartbeat_ms, c->suspect_ms, c->lost_ms, c->reattach_grace_ms,
            c->settle_ms, c->rebalance_ms, c->prepare_limit_ms, c->hang_floor_ms, c->link_retry_ms, c->scrub_again_s,
            c->crash_limit, c->crash_window_ms, c->max_workers, c->max_jobs, d->events_kept,
            (unsigned)(d->reserve_bytes >> 20), d->worker_series, d->connections_per_host, d->calls_per_client,
            d->questions_per_second, d->pollers);
}

static bool parse_number(const struct number_option *option, const char *text)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == 0 && errno == 0 && value >= option->min && value <= option->max) {
        *option->value = (uint32_t)value;
        return true;
    }
    fprintf(stderr, "musterd: --%s: value '%s' is not allowed: a whole number, %u to %u\n", option->name, text,
            option->min, option->max);
    return false;
}

static bool parse_log(struct options *options, int choice)
{
    bool is_level = choice == OPT_LOG_LEVEL;
    if (is_level ? mu_log_level_of(optarg, &options->log_level) : mu_log_choose_format(optarg))
        return true;
    fprintf(stderr, "musterd: --log-%s: value '%s' is not allowed: %s\n", is_level ? "level" : "format", optarg,
            is_level ? "debug, info, warn or error" : "logfmt or json");
    return false;
}

static void parse_one(struct options *options, int choice, const struct number_option *numbers)
{
    if (choice < OPT_TEXT) {
        if (!parse_number(&numbers[choice], optarg))
            options->exit_code = EXIT_USAGE;
        return;
    }
    switch (choice) {
    case OPT_DATA_DIR:
        options->driver.data_dir = optarg;
        break;
    case OPT_LISTEN:
        options->driver.listen = optarg;
        break;
    case OPT_HTTP:
        options->driver.http = optarg;
        break;
    case OPT_HTTP_AUTH:
        options->driver.http_auth = true;
        break;
    case OPT_TLS_CA:
        options->driver.tls.ca = optarg;
        break;
    case OPT_TLS_CERT:
        options->driver.tls.cert = optarg;
        break;
    case OPT_TLS_KEY:
        options->driver.tls.key = optarg;
        break;
    case OPT_TLS_DENY:
        options->driver.tls_deny = optarg;
        break;
    case OPT_CA_KEY:
        options->driver.ca_key = optarg;
        break;
    case OPT_INSECURE_LISTEN:
        options->is_insecure_wanted = options->driver.http_anywhere = true;
        break;
    case OPT_ADDRESS_FILE:
        options->address_file = optarg;
        break;
    case OPT_TOPOLOGY:
        options->topology = optarg;
        break;
    case OPT_RATES:
        options->rates = optarg;
        break;
    case OPT_LOG_LEVEL:
    case OPT_LOG_FORMAT:
        if (!parse_log(options, choice))
            options->exit_code = EXIT_USAGE;
        break;
    case OPT_VOLATILE:
        options->is_volatile = true;
        break;
    case OPT_VERSION:
        printf("musterd %s\n", MU_VERSION);
        options->exit_code = EXIT_OK;
        break;
    case OPT_HELP:
        print_usage(options, stdout);
        options->exit_code = EXIT_OK;
        break;
    default: /* getopt has said what is wrong */
        fprintf(stderr, "musterd: see musterd --help\n");
        options->exit_code = EXIT_USAGE;
        break;
    }
}

/* Literal addresses and "localhost" alone: "127.example.org" is a name, and may be any host. */
static bool is_local(const char *listen)
{
    struct in_addr v4;
    char host[64] = "";
    const char *colon = strrchr(listen, ':');
    if (colon && (size_t)(colon - listen) < sizeof host)
        memcpy(host, listen, (size_t)(colon - listen));
    return strncmp(listen, "unix:", 5) == 0 || strcmp(host, "[::1]") == 0 || strcmp(host, "localhost") == 0 ||
           (inet_pton(AF_INET, host, &v4) == 1 && ntohl(v4.s_addr) >> 24 == IN_LOOPBACKNET);
}

/* What is wrong with the options as a whole. */
static void check_options(struct options *options)
{
    struct mu_error err;
    if (!options->is_volatile && (!options->driver.data_dir || options->driver.data_dir[0] == 0)) {
        fprintf(stderr, "musterd: --data-dir DIR is needed (or --volatile); see musterd --help\n");
        options->exit_code = EXIT_USAGE;
    } else if (options->is_volatile && options->driver.data_dir) {
        fprintf(stderr, "musterd: --volatile and --data-dir contradict each other: give one of them\n");
        options->exit_code = EXIT_USAGE;
    } else if (mu_coord_config_check(&options->driver.core, &err) != MU_OK) {
        fprintf(stderr, "musterd: %s\n", err.text);
        options->exit_code = EXIT_USAGE;
    } else if (options->driver.tls_deny && !mu_rpc_tls_wanted(&options->driver.tls)) {
        fprintf(stderr, "musterd: --tls-deny names certificates: it needs --tls-ca, --tls-cert and --tls-key\n");
        options->exit_code = EXIT_USAGE;
    } else if (options->driver.ca_key && !mu_rpc_tls_wanted(&options->driver.tls)) {
        fprintf(stderr, "musterd: --ca-key signs certificates: it needs --tls-ca, --tls-cert and --tls-key\n");
        options->exit_code = EXIT_USAGE;
    } else if (!options->is_insecure_wanted && !mu_rpc_tls_wanted(&options->driver.tls) &&
               !is_local(options->driver.listen)) {
        fprintf(stderr,
                "musterd: --listen %s can be reached from other hosts, where anybody could command it: give --tls-ca, "
                "--tls-cert and --tls-key (see muster cert), or --insecure-listen inside a trusted network\n",
                options->driver.listen);
        options->exit_code = EXIT_USAGE;
    }
}

static void parse_options(struct options *options, int argc, char **argv)
{
    struct mu_coord_config *core = &options->driver.core;
    uint32_t reserve_mib = (uint32_t)(options->driver.reserve_bytes >> 20);
    const struct number_option numbers[NUMBER_OPTIONS] = {
        {"certificate-valid-s", &options->driver.certificate_s, 1, MU_TOKEN_CERTIFICATE_S_MAX},
        {"heartbeat-ms", &core->heartbeat_ms, 1, MS_MAX},
        {"suspect-ms", &core->suspect_ms, 1, MS_MAX},
        {"lost-ms", &core->lost_ms, 1, MS_MAX},
        {"reattach-grace-ms", &core->reattach_grace_ms, 0, MS_MAX},
        {"settle-ms", &core->settle_ms, 0, MS_MAX},
        {"rebalance-ms", &core->rebalance_ms, 0, MS_MAX},
        {"prepare-limit-ms", &core->prepare_limit_ms, 1, MS_MAX},
        {"hang-floor-ms", &core->hang_floor_ms, 1, MS_MAX},
        {"link-retry-ms", &core->link_retry_ms, 0, MS_MAX},
        {"scrub-again-s", &core->scrub_again_s, 1, 100000000},
        {"crash-limit", &core->crash_limit, 1, 1000000},
        {"crash-window-ms", &core->crash_window_ms, 1, MS_MAX},
        {"max-workers", &core->max_workers, 1, MU_WORKERS_MAX},
        {"max-jobs", &core->max_jobs, 1, 1024},
        {"events-kept", &options->driver.events_kept, MU_EVENTS_KEPT_MIN, MU_EVENTS_KEPT_MAX},
        {"reserve-mib", &reserve_mib, 0, 1 << 20},
        {"worker-series", &options->driver.worker_series, 0, MU_WORKERS_MAX},
        {"connections-per-host", &options->driver.connections_per_host, 0, 1 << 20},
        {"calls-per-client", &options->driver.calls_per_client, 0, 1 << 20},
        {"questions-per-second", &options->driver.questions_per_second, 0, 1000000},
        {"pollers", &options->driver.pollers, 1, MU_RPC_POLLERS_MAX},
    };
    struct option table[NUMBER_OPTIONS + TEXT_OPTIONS + 1] = {0};
    for (int i = 0; i < NUMBER_OPTIONS; i++)
        table[i] = (struct option){numbers[i].name, required_argument, NULL, i};
    static const struct option texts[TEXT_OPTIONS] = {
        {"data-dir", required_argument, NULL, OPT_DATA_DIR},
        {"listen", required_argument, NULL, OPT_LISTEN},
        {"http", required_argument, NULL, OPT_HTTP},
        {"http-auth", no_argument, NULL, OPT_HTTP_AUTH},
        {"tls-ca", required_argument, NULL, OPT_TLS_CA},
        {"tls-cert", required_argument, NULL, OPT_TLS_CERT},
        {"tls-key", required_argument, NULL, OPT_TLS_KEY},
        {"tls-deny", required_argument, NULL, OPT_TLS_DENY},
        {"ca-key", required_argument, NULL, OPT_CA_KEY},
        {"insecure-listen", no_argument, NULL, OPT_INSECURE_LISTEN},
        {"address-file", required_argument, NULL, OPT_ADDRESS_FILE},
        {"topology", required_argument, NULL, OPT_TOPOLOGY},
        {"rates", required_argument, NULL, OPT_RATES},
        {"log-level", required_argument, NULL, OPT_LOG_LEVEL},
        {"log-format", required_argument, NULL, OPT_LOG_FORMAT},
        {"volatile", no_argument, NULL, OPT_VOLATILE},
        {"version", no_argument, NULL, OPT_VERSION},
        {"help", no_argument, NULL, OPT_HELP},
    };
    memcpy(table + NUMBER_OPTIONS, texts, sizeof texts);
    int choice;
    while (options->exit_code < 0 && (choice = getopt_long(argc, argv, "", table, NULL)) != -1)
        parse_one(options, choice == '?' ? OPT_TEXT : choice, numbers);
    if (options->exit_code < 0 && optind < argc) {
        fprintf(stderr, "musterd: argument '%s' is not allowed; see musterd --help\n", argv[optind]);
        options->exit_code = EXIT_USAGE;
    }
    core->max_members = core->max_workers;
    if (options->exit_code < 0)
        check_options(options);
    options->driver.reserve_bytes = (uint64_t)reserve_mib << 20;
    if (reserve_mib == 0)
        options->driver.ballast_bytes = 0;
}

/* ---- process ---- */

/* Each connection is a file, and a listener that once found none left accepts nobody any more. So as many as one may
 * have: after a restart thousands come at once, some of them twice, and others may connect and say nothing. */
static void raise_file_limit(uint32_t max_workers)
{
    struct rlimit limit;
    rlim_t wanted = (rlim_t)max_workers + max_workers / 8 + FILES_BESIDE_WORKERS;
    struct rlimit generous = {.rlim_cur = FILES_GENEROUS_FACTOR * wanted + FILES_GENEROUS,
                              .rlim_max = FILES_GENEROUS_FACTOR * wanted + FILES_GENEROUS};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    if (limit.rlim_max < generous.rlim_max && setrlimit(RLIMIT_NOFILE, &generous) == 0)
        return; /* privileged */
    if (limit.rlim_max < wanted)
        MU_LOGW("at most %llu open files are allowed, --max-workers %u may need %llu: raise the limit (ulimit -Hn)",
                (unsigned long long)limit.rlim_max, max_workers, (unsigned long long)wanted);
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        MU_LOGW("the limit of open files cannot be raised: %s", strerror(errno));
}

/* Readers must never see half of it. */
static bool write_address(const char *path, const char *address)
{
    char temporary[4096], line[512];
    int length = snprintf(line, sizeof line, "%s\n", address);
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp", path) >= sizeof temporary)
        return false;
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return false;
    bool written = write(fd, line, (size_t)length) == length;
    close(fd);
    if (written && rename(temporary, path) == 0)
        return true;
    unlink(temporary);
    return false;
}

static sigset_t our_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGUSR2);
    return set;
}

static void *signal_thread(void *arg)
{
    struct mu_driver *driver = arg;
    sigset_t set = our_signals();
    int number = 0;
    bool is_stopping = false;
    while (sigwait(&set, &number) == 0) {
        if (number == SIGUSR2) {
            mu_driver_examine(driver);
            continue;
        }
        if (is_stopping)
            _exit(EXIT_FAILED); /* asked again: at once. What was acknowledged is on the disk. */
        MU_LOGI("%s: stopping in good order; workers keep training", number == SIGTERM ? "SIGTERM" : "SIGINT");
        is_stopping = true;
        mu_driver_stop(driver);
    }
    return NULL;
}

struct network {
    struct mu_topology *topology;
    struct mu_node_map *nodes;
};

static enum mu_status read_network(const char *path, struct network *network, struct mu_error *err)
{
    enum mu_status status = path ? mu_topology_file_load(path, &network->topology, err) : MU_OK;
    if (status != MU_OK || !path)
        return status;
    for (uint32_t i = 0; i < network->topology->note_count; i++)
        MU_LOGW("%s: %s", path, network->topology->notes[i]);
    network->nodes = mu_node_map_new(network->topology);
    return network->nodes ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "%s: out of memory", path);
}

/* Sections worker and device of a cluster file: what workers do in fp32, and in bf16. */
static enum mu_status read_rates(const char *path, struct mu_cost_rates *ret_rates, struct mu_cost_rates *ret_bf16,
                                 struct mu_error *err)
{
    struct mu_cluster cluster;
    enum mu_status status = mu_cluster_file_read(path, &cluster, err);
    if (status != MU_OK)
        return status;
    bool has_worker = cluster.has_worker;
    *ret_rates = cluster.worker;
    mu_cost_rates_of_device(ret_bf16, &cluster.device);
    mu_cluster_fini(&cluster);
    return has_worker ? MU_OK : mu_fail(err, MU_ERR_INVALID, "%s: worker is missing: muster probe prints it", path);
}

static int run(const struct options *options, struct mu_driver *driver)
{
    pthread_t signals;
    struct mu_error err = {0};
    if (options->address_file && !write_address(options->address_file, mu_driver_address(driver))) {
        MU_LOGE("cannot write the address file '%s': %s", options->address_file, strerror(errno));
        return EXIT_FAILED;
    }
    int reason = pthread_create(&signals, NULL, signal_thread, driver);
    if (reason) {
        MU_LOGE("cannot start the signal thread: %s", strerror(reason));
        return EXIT_FAILED;
    }
    MU_LOGI("musterd %s listens on %s, data in %s", MU_VERSION, mu_driver_address(driver),
            options->driver.data_dir ? options->driver.data_dir : "memory");
    const char *url = mu_driver_http_url(driver);
    if (url)
        MU_LOGI("HTTP: the dashboard at %s, %sapi/v1/, %smetrics", url, url, url);
    if (options->is_insecure_wanted && !mu_rpc_tls_wanted(&options->driver.tls) && !is_local(options->driver.listen))
        MU_LOGW("%s can be reached from other hosts, without encryption or authentication: keep it inside a trusted "
                "network",
                mu_driver_address(driver));
    mu_notify("READY=1\nSTATUS=listens on %s", mu_driver_address(driver));
    enum mu_status status = mu_driver_run(driver, &err);
    pthread_cancel(signals);
    pthread_join(signals, NULL);
    if (status != MU_OK)
        MU_LOGE("the coordinator cannot go on: %s; start it again, nothing that was acknowledged is lost", err.text);
    return status == MU_OK ? EXIT_OK : EXIT_FAILED;
}

int main(int argc, char **argv)
{
    struct options options = {.log_level = MU_LOG_INFO, .exit_code = -1};
    mu_driver_config_init(&options.driver);
    options.driver.tls = mu_rpc_tls_files_from_environment();
    parse_options(&options, argc, argv);
    if (options.exit_code >= 0)
        return options.exit_code;
    mu_notify_init();
    mu_log_init("musterd", options.log_level);

    /* Before any thread starts, so that all of them inherit it: only the signal thread takes these. */
    sigset_t set = our_signals();
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    raise_file_limit(options.driver.core.max_workers);

    struct mu_driver *driver = NULL;
    struct network network = {NULL, NULL};
    struct mu_cost_rates rates, rates_bf16;
    struct mu_error err = {0};
    enum mu_status status = read_network(options.topology, &network, &err);
    options.driver.core.nodes = network.nodes;
    if (status == MU_OK && options.rates) {
        status = read_rates(options.rates, &rates, &rates_bf16, &err);
        options.driver.core.rates = &rates;
        options.driver.core.rates_bf16 = &rates_bf16;
    }
    if (status == MU_OK)
        status = mu_driver_new(&options.driver, &driver, &err);
    if (status != MU_OK)
        fprintf(stderr, "musterd: %s\n", err.text);
    int code = status == MU_OK ? run(&options, driver) : EXIT_FAILED;
    mu_driver_free(driver);
    mu_node_map_free(network.nodes);
    mu_topology_free(network.topology);
    return code;
}
