/* `muster probe`; where no coordinator is named, on this host: what it can do, as `muster plan` wants to know it:
 * matrix products with the kernels of the CPU worker, memory, messages between two threads over the data plane, a
 * directory's writing and reading. */
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>

#include "cli/cli.h"
#include "cli/probe_attached.h"
#include "cli/probe_worker.h"
#include "common/clock.h"
#include "worker/measure.h"

enum { MESSAGES_US = 30000000, DISK_MIB_MAX = 65536 };

struct probe {
    uint32_t threads;
    struct mu_probe_alone device;
    double link_rate, hop_s, write_rate, read_rate;
    struct mu_probed_worker worker;
};

/* ---- messages ---- */

/* Two workers' data planes, one in each thread. */
struct side {
    struct mu_comm *comm;
    struct mu_comm_group_config config;
    struct mu_comm_peer other;
    struct mu_probe_pair pair;
    enum mu_status status;
    struct mu_error err;
};

static void *talk(void *arg)
{
    struct side *side = arg;
    const struct mu_measure measure = {.deadline_us = mu_clock_mono_us() + MESSAGES_US};
    side->status = mu_measure_pair(&measure, side->comm, &side->config, &side->pair, &side->err);
    return NULL;
}

static enum mu_status talk_to_each_other(struct side sides[2], struct mu_error *err)
{
    pthread_t thread;
    int reason = pthread_create(&thread, NULL, talk, &sides[1]);
    if (reason)
        return mu_fail_errno(err, reason, "no second thread");
    talk(&sides[0]);
    pthread_join(thread, NULL);
    for (int i = 0; i < 2; i++)
        if (sides[i].status != MU_OK)
            return *err = sides[i].err, sides[i].status;
    return MU_OK;
}

static enum mu_status probe_link(struct probe *p, struct mu_error *err)
{
    struct side sides[2] = {{.comm = NULL}, {.comm = NULL}};
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < 2 && status == MU_OK; i++)
        status = mu_comm_new(&(struct mu_comm_config){.host_id = "probe"}, &sides[i].comm, err);
    for (uint32_t i = 0; i < 2 && status == MU_OK; i++) {
        sides[i].other = (struct mu_comm_peer){
            .rank = 1 - i, .incarnation = {.low = 2 - i}, .address = mu_comm_address(sides[1 - i].comm)};
        sides[i].config = (struct mu_comm_group_config){.generation = 1,
                                                        .rank = i,
                                                        .world = 2,
                                                        .incarnation = {.low = i + 1},
                                                        .peers = &sides[i].other,
                                                        .peer_count = 1,
                                                        .secret = "probe"};
    }
    if (status == MU_OK)
        status = talk_to_each_other(sides, err);
    mu_comm_free(sides[0].comm);
    mu_comm_free(sides[1].comm);
    const struct mu_probe_pair *pair = &sides[0].pair;
    p->hop_s = pair->round_trip_s / 2;
    p->link_rate = pair->out_rate < pair->in_rate ? pair->out_rate : pair->in_rate;
    return status;
}

static enum mu_status probe_device(struct probe *p, struct mu_error *err)
{
    struct mu_measure measure = {.deadline_us = UINT64_MAX};
    enum mu_status status = mu_pool_new(p->threads, err, &measure.pool);
    if (status != MU_OK)
        return status;
    p->threads = mu_pool_threads(measure.pool);
    status = mu_measure_device(&measure, &p->device, err);
    mu_pool_free(measure.pool);
    return status;
}

/* ---- output ---- */

static void print_cluster(const struct probe *p)
{
    const struct mu_cost_rates *r = &p->worker.rates;
    const struct mu_probe_alone *d = &p->device;
    double flops = mu_probe_flops(d);
    printf(
        "# Measured by muster probe: one worker of %u thread%s. For muster plan; nic_rate is what processes on this "
        "host "
        "get.\n"
        "device: {per_node: 1, flops_bf16: %.3e, flops_fp32: %.3e, memory: %.3e, memory_rate: %.3e, link_rate: %.3e, "
        "nic_rate: %.3e, host_rate: %.3e}\n"
        "nodes: 1\n"
        "storage: {write_rate: %.3e, read_rate: %.3e}\n"
        "worker: {flops: %.4g, memory_rate: %.4g, rows_rate: %.4g, link_rate: %.4g, latency_s: %.4g, fixed_s: %.4g, "
        "slice_cost: %.4g}\n",
        p->threads, p->threads == 1 ? "" : "s", flops, flops, d->memory_bytes, d->memory_rate, p->link_rate,
        p->link_rate, d->memory_rate / 2, p->write_rate, p->read_rate, r->flops, r->memory_bytes_per_second,
        r->rows_bytes_per_second, r->link_bytes_per_second, r->latency_s, r->fixed_s, r->slice_cost);
    for (uint32_t i = 0; i < MU_PROBE_SIZES && d->flops[i] > 0; i++)
        printf("# products of %u: %.3g GFLOP/s, %.0f %% of the best\n", MU_PROBE_SIZE_FIRST << i, d->flops[i] * 1e-9,
               100 * d->flops[i] / flops);
    printf("# one message between threads: %.1f us\n", p->hop_s * 1e6);
    printf("# worker: %u at a time, for musterd --rates; %.1f %% off on average for the %u micro-batches it was taken "
           "from\n",
           p->worker.workers, 100 * p->worker.apart, p->worker.samples);
}

static void print_json(const struct probe *p)
{
    json_t *products = json_array();
    for (uint32_t i = 0; i < MU_PROBE_SIZES; i++)
        json_array_append_new(products,
                              json_pack("{s:i, s:f}", "size", MU_PROBE_SIZE_FIRST << i, "flops", p->device.flops[i]));
    json_t *all =
        json_pack("{s:i, s:o, s:f, s:f, s:f, s:f, s:f, s:f}", "threads", (int)p->threads, "products", products,
                  "memory", p->device.memory_bytes, "memory_rate", p->device.memory_rate, "link_rate", p->link_rate,
                  "message_seconds", p->hop_s, "write_rate", p->write_rate, "read_rate", p->read_rate);
    const struct mu_cost_rates *r = &p->worker.rates;
    json_object_set_new(all, "worker",
                        json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "workers", (int)p->worker.workers,
                                  "flops", r->flops, "memory_rate", r->memory_bytes_per_second, "rows_rate",
                                  r->rows_bytes_per_second, "link_rate", r->link_bytes_per_second, "latency_s",
                                  r->latency_s, "fixed_s", r->fixed_s, "slice_cost", r->slice_cost, "mean_error",
                                  p->worker.apart));
    json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(all);
}

static int probe_here(struct mu_cli *cli, uint32_t threads, uint32_t crew, const char *dir, uint64_t mib)
{
    struct probe p = {.threads = threads};
    struct mu_error err;
    const struct mu_measure storage = {.deadline_us = UINT64_MAX};
    if (probe_device(&p, &err) != MU_OK || probe_link(&p, &err) != MU_OK ||
        mu_measure_storage(&storage, dir, false, mib, &p.write_rate, &p.read_rate, &err) != MU_OK ||
        mu_probe_worker(crew, p.threads, &p.worker, &err) != MU_OK)
        return mu_cli_fail(&err);
    (cli->json ? print_json : print_cluster)(&p);
    return MU_EXIT_OK;
}

int mu_cmd_probe(struct mu_cli *cli, int argc, char **argv)
{
    const char *threads = NULL, *dir = NULL, *mib_text = NULL, *workers = NULL, *job = NULL, *out = NULL;
    bool quick = false;
    const struct mu_cli_option options[] = {{"--threads", &threads, NULL}, {"--dir", &dir, NULL},
                                            {"--mib", &mib_text, NULL},    {"--workers", &workers, NULL},
                                            {"--job", &job, NULL},         {"--quick", NULL, &quick},
                                            {"--out", &out, NULL}};
    uint64_t count, mib, crew;
    if (mu_cli_parse("probe", argc, argv, options, (int)(sizeof options / sizeof options[0]), 0, 0) < 0)
        return MU_EXIT_USAGE;
    bool here = threads || dir || workers, attached = job || quick || out;
    if (here && attached)
        return mu_cli_usage("probe", "--threads, --workers and --dir are of this host; --job, --quick and --out of "
                                     "attached workers");
    attached = attached || (cli->is_named && !here);
    const char *usual_mib = quick ? "0" : attached ? "64" : "256";
    if (!mu_cli_number("probe", "--threads", threads ? threads : "0", 0, MU_POOL_THREADS_MAX, &count) ||
        !mu_cli_number("probe", "--mib", mib_text ? mib_text : usual_mib, attached ? 0 : 1, DISK_MIB_MAX, &mib) ||
        !mu_cli_number("probe", "--workers", workers ? workers : "1", 1, MU_PROBE_WORKERS_MAX, &crew))
        return MU_EXIT_USAGE;
    if (attached)
        return mu_probe_attached(
            cli,
            &(struct mu_probe_wish){.job = job ? job : "", .quick = quick, .storage_mib = (uint32_t)mib, .out = out});
    return probe_here(cli, (uint32_t)count, (uint32_t)crew, dir ? dir : ".", mib);
}
