/* The coordinator at scale: thousands of attached workers on one musterd, over real gRPC, one TCP connection each.
 *
 *   bench_attach [--workers N = 10000] [--seconds S = 20] [--step-ms M = 1000] [--musterd PATH]
 *                [--only spares|members|assign]
 *   bench_attach --idle N [--workers 100] ...
 *
 * The workers are the real worker core on the real RPC client, in as many processes as needed; only their engine is
 * pretended (it answers at once, and makes a step every M ms, all members at the same instant). Three runs, each with a
 * coordinator of its own whose store is on disk:
 *
 *   spares    one small job (8 ranks), all others are spares that send heartbeats at 1 Hz
 *   members   all workers in one job: heartbeats and step reports at 1 Hz each (musterd runs with --heartbeat-ms 500
 * for that: a worker that has just sent a report owes no heartbeat) assign    the second at a hundredth and a tenth of
 * N: does `Assign` grow?
 *
 * Measured: /metrics with numbers of each worker, scraped each second; time to join; CPU time of musterd per second
 * over S seconds, and resident memory a worker; SIGKILL and restart of musterd: time until the last worker is back.
 * Nobody may be refused, fenced or lost. --idle instead: N idle connections (half of them silent, half after HTTP/2's
 * greeting) beside a running job of few workers. Ends by itself; exit code 1 when anything went wrong, also when a
 * target was missed by workers lost or refused (a slow machine is no failure). */
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench/attach.h"
#include "bench/attach_musterd.h"
#include "common/clock.h"
#include "coordinator/core/core.h"

enum {
    WORKERS_OF_A_PROCESS = 1000,
    IDLERS_OF_A_PROCESS = 8000,
    RANKS_OF_SMALL_JOB = 8,
    MEMBERS_HEARTBEAT_MS = 500,
    WAIT_LIMIT_S = 120, /* for any single phase */
    END_LIMIT_US = 10000000,
    LOOK_NS = 5000000,
    CALLS = 400,
    CALL_PAUSE_NS = 5000000,
    FRESH_CALLS = 20,
    SCRAPES = 10,
    CLIENT_NICE = 5, /* elsewhere, clients would not compete with the coordinator for its cores */
    LOG_LINES = 12,  /* shown after a failure */
};

static const double TARGET_CORE = 0.60, TARGET_KIB = 64;

struct settings {
    uint32_t workers, seconds, step_ms, idle;
    const char *musterd;
    const char *only; /* "spares", "members", "assign"; NULL: all */
};

enum mode { SPARES, MEMBERS };

struct run {
    const struct settings *settings;
    enum mode mode;
    uint32_t workers;
    struct musterd musterd;
    struct attach_shared *shared;
    int shared_fd;
    pid_t children[MU_ATTACH_PROCESSES_MAX];
    uint32_t child_count;
    uint64_t rss_before; /* of musterd without workers */
};

struct steady {
    double cores, messages_per_s, reports_per_s, us_per_message;
    uint32_t least_attached;
    unsigned long long refused, lost;
};

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
}

/* ---- processes ---- */

static enum mu_status make_shared(struct run *run, struct mu_error *err)
{
    struct attach_shared *shared;
    run->shared_fd = memfd_create("bench-attach", 0);
    if (run->shared_fd < 0 || ftruncate(run->shared_fd, sizeof *shared) != 0)
        return mu_fail(err, MU_ERR_NO_MEMORY, "cannot make shared memory");
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, run->shared_fd, 0);
    if (shared == MAP_FAILED)
        return mu_fail(err, MU_ERR_NO_MEMORY, "cannot map shared memory");
    run->shared = shared;
    snprintf(shared->job, sizeof shared->job, "bench");
    shared->workers = run->workers;
    shared->processes = (run->workers + WORKERS_OF_A_PROCESS - 1) / WORKERS_OF_A_PROCESS;
    if (shared->processes < 2 && run->workers > 1)
        shared->processes = 2;
    shared->idle = run->settings->idle;
    shared->idle_processes = (shared->idle + IDLERS_OF_A_PROCESS - 1) / IDLERS_OF_A_PROCESS;
    shared->step_us = run->settings->step_ms * 1000;
    return MU_OK;
}

static enum mu_status start_child(struct run *run, const char *role, uint32_t index, struct mu_error *err)
{
    char fd[16], number[16];
    snprintf(fd, sizeof fd, "%d", run->shared_fd);
    snprintf(number, sizeof number, "%u", index);
    MU_ASSERT(run->child_count < MU_ATTACH_PROCESSES_MAX);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl("/proc/self/exe", "bench_attach", role, fd, number, (char *)NULL);
        _exit(127);
    }
    if (pid < 0)
        return mu_fail(err, MU_ERR_UNAVAILABLE, "cannot start a client process");
    run->children[run->child_count++] = pid;
    return MU_OK;
}

/* True: it ended by itself and well. */
static bool end_child(pid_t pid, uint64_t until_us)
{
    int status = 1;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (mu_clock_mono_us() > until_us)
            kill(pid, SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    return status == 0;
}

/* False: one of them had failed. */
static bool end_children(struct run *run)
{
    bool good = true;
    uint64_t until_us = mu_clock_mono_us() + END_LIMIT_US;
    if (run->shared)
        atomic_store(&run->shared->stop, true);
    for (uint32_t i = 0; i < run->child_count; i++)
        good = end_child(run->children[i], until_us) && good;
    run->child_count = 0;
    return good;
}

/* ---- waiting ---- */

typedef bool condition_fn(struct run *run, uint64_t base);

static enum mu_status await(struct run *run, condition_fn *condition, uint64_t base, const char *what,
                            struct mu_error *err)
{
    const struct attach_shared *shared = run->shared;
    uint64_t until_us = mu_clock_mono_us() + WAIT_LIMIT_S * 1000000ull;
    while (!condition(run, base)) {
        if (interrupted)
            return mu_fail(err, MU_ERR_CANCELLED, "interrupted");
        if (mu_clock_mono_us() > until_us)
            return mu_fail(err, MU_ERR_TIMEOUT,
                           "%s: not within %d s: %u of %u attached (%llu times, %llu streams broke, %llu attempts "
                           "failed, the last of a client: %s), %u running",
                           what, WAIT_LIMIT_S, atomic_load(&shared->attached), run->workers,
                           atomic_load(&shared->welcomes), atomic_load(&shared->breaks),
                           atomic_load(&shared->failed_connects), shared->trouble[0], atomic_load(&shared->running));
        for (uint32_t i = 0; i < run->child_count; i++)
            if (waitpid(run->children[i], &(int){0}, WNOHANG) == run->children[i]) {
                run->children[i] = run->children[--run->child_count];
                return mu_fail(err, MU_ERR_INTERNAL, "%s: a client process ended", what);
            }
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    return MU_OK;
}

static bool are_ready(struct run *run, uint64_t base)
{
    (void)base;
    return atomic_load(&run->shared->ready) == run->child_count;
}

static uint32_t ranks(const struct run *run)
{
    return run->mode == MEMBERS || run->workers < RANKS_OF_SMALL_JOB ? run->workers : RANKS_OF_SMALL_JOB;
}

static bool are_attached(struct run *run, uint64_t base)
{
    return atomic_load(&run->shared->welcomes) - base >= run->workers &&
           atomic_load(&run->shared->attached) == run->workers;
}

static bool are_running(struct run *run, uint64_t base)
{
    (void)base;
    return atomic_load(&run->shared->running) == ranks(run);
}

/* musterd keeps the last reports of each member: memory is what it is when that many have come. */
static bool are_timings_full(struct run *run, uint64_t base)
{
    (void)base;
    return atomic_load(&run->shared->step_reports) >= (unsigned long long)(MU_TIMINGS_KEPT + 1) * ranks(run);
}

static bool is_idle_open(struct run *run, uint64_t base)
{
    (void)base;
    return atomic_load(&run->shared->idle_open) >= run->shared->idle;
}

/* ---- the run's parts ---- */

static void fill_spec(const struct run *run, struct mu_job_spec *spec)
{
    mu_job_spec_init(spec);
    snprintf(spec->name, sizeof spec->name, "%s", run->shared->job);
    spec->model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 64, .context = 64, .vocab = 256};
    snprintf(spec->data.path, sizeof spec->data.path, "/bench/no-data");
    spec->batch.sequences = ranks(run);
    spec->batch.micro = spec->batch.accumulate = 1;
    spec->batch.length = 64;
    spec->steps = MU_STEPS_MAX;
    spec->workers.min = spec->workers.max = ranks(run); /* pretended engines have no state to feed to newcomers */
}

static enum mu_status start(struct run *run, struct mu_error *err)
{
    struct mu_job_spec spec;
    enum mu_status status = make_shared(run, err);
    snprintf(run->musterd.program, sizeof run->musterd.program, "%s", run->settings->musterd);
    run->musterd.max_workers = run->workers;
    run->musterd.heartbeat_ms = run->mode == MEMBERS ? MEMBERS_HEARTBEAT_MS : 0;
    if (status || (status = musterd_make_dir(&run->musterd, err)) || (status = musterd_start(&run->musterd, err)))
        return status;
    snprintf(run->shared->address, sizeof run->shared->address, "%s", run->musterd.address);
    fill_spec(run, &spec);
    status = musterd_submit(&run->musterd, &spec, err);
    for (uint32_t i = 0; status == MU_OK && i < run->shared->processes; i++)
        status = start_child(run, "--client", i, err);
    for (uint32_t i = 0; status == MU_OK && i < run->shared->idle_processes; i++)
        status = start_child(run, "--idler", i, err);
    if (status == MU_OK)
        status = await(run, are_ready, 0, "client processes", err);
    run->rss_before = musterd_rss_bytes(&run->musterd);
    return status;
}

static bool end(struct run *run)
{
    bool good = end_children(run);
    musterd_end(&run->musterd);
    if (run->shared)
        munmap(run->shared, sizeof *run->shared);
    if (run->shared_fd >= 0)
        close(run->shared_fd);
    return good;
}

static unsigned long long refusals(const struct attach_shared *shared)
{
    unsigned long long sum = atomic_load(&shared->forgets) + atomic_load(&shared->exits);
    for (int i = 0; i < MU_ATTACH_REJECTS; i++)
        sum += atomic_load(&shared->rejects[i]);
    return sum;
}

static enum mu_status join(struct run *run, double *ret_attach_s, double *ret_run_s, struct mu_error *err)
{
    uint64_t begin_us = mu_clock_mono_us();
    atomic_store(&run->shared->start, true);
    enum mu_status status = await(run, are_attached, 0, "attach", err);
    if (status == MU_OK)
        status = await(run, are_running, 0, "run", err);
    *ret_attach_s = (double)(atomic_load(&run->shared->last_welcome_us) - begin_us) * 1e-6;
    *ret_run_s = (double)(atomic_load(&run->shared->last_run_us) - begin_us) * 1e-6;
    return status;
}

static void measure(struct run *run, struct steady *ret)
{
    const struct attach_shared *shared = run->shared;
    unsigned long long messages = atomic_load(&shared->messages), reports = atomic_load(&shared->step_reports);
    unsigned long long refused = refusals(shared), breaks = atomic_load(&shared->breaks);
    double cpu_s = musterd_cpu_s(&run->musterd);
    uint64_t begin_us = mu_clock_mono_us(), until_us = begin_us + run->settings->seconds * 1000000ull;
    ret->least_attached = run->workers;
    while (mu_clock_mono_us() < until_us && !interrupted) {
        uint32_t attached = atomic_load(&shared->attached);
        ret->least_attached = attached < ret->least_attached ? attached : ret->least_attached;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    double seconds = (double)(mu_clock_mono_us() - begin_us) * 1e-6, sent = (double)(shared->messages - messages);
    cpu_s = musterd_cpu_s(&run->musterd) - cpu_s;
    ret->cores = cpu_s / seconds;
    ret->messages_per_s = sent / seconds;
    ret->reports_per_s = (double)(atomic_load(&shared->step_reports) - reports) / seconds;
    ret->us_per_message = sent > 0 ? 1e6 * cpu_s / sent : 0;
    ret->refused = refusals(shared) - refused;
    ret->lost = atomic_load(&shared->breaks) - breaks;
}

struct restart {
    double serving_s, back_s; /* from SIGKILL */
    double cpu_s;             /* of the new musterd, until all are back */
    uint64_t generation_before, generation_after;
    unsigned long long lost, refused;
};

static enum mu_status restart(struct run *run, struct restart *ret, struct mu_error *err)
{
    struct attach_shared *shared = run->shared;
    const Muster__V1__Job *job;
    unsigned long long welcomes = atomic_load(&shared->welcomes), refused = refusals(shared);
    enum mu_status status = musterd_get_job(&run->musterd, shared->job, &job, err);
    if (status)
        return status;
    ret->generation_before = job->generation;
    uint64_t begin_us = mu_clock_mono_us();
    musterd_kill(&run->musterd);
    if ((status = musterd_start(&run->musterd, err)))
        return status;
    ret->serving_s = (double)(mu_clock_mono_us() - begin_us) * 1e-6;
    if ((status = await(run, are_attached, welcomes, "attach again", err)))
        return status;
    ret->cpu_s = musterd_cpu_s(&run->musterd);
    ret->back_s = (double)(atomic_load(&shared->last_welcome_us) - begin_us) * 1e-6;
    if ((status = await(run, are_running, 0, "run again", err)) ||
        (status = musterd_get_job(&run->musterd, shared->job, &job, err)))
        return status;
    ret->generation_after = job->generation;
    ret->lost = job->workers_lost;
    ret->refused = refusals(shared) - refused;
    return MU_OK;
}

/* ---- what is said ---- */

static const char *verdict(bool reached)
{
    return reached ? "yes" : "**no**";
}

static void say_row(const char *what, const char *measured, const char *target, const char *reached)
{
    printf("| %s | %s | %s | %s |\n", what, measured, target, reached);
    fflush(stdout);
}

static double kib_per_worker(const struct run *run)
{
    return ((double)musterd_rss_bytes(&run->musterd) - (double)run->rss_before) / run->workers / 1024;
}

static void say_steady(const struct run *run, const struct steady *s, double kib)
{
    char what[160], measured[160];
    const char *mode = run->mode == MEMBERS ? "members of one job" : "spares beside a job of 8";
    snprintf(what, sizeof what, "coordinator, %u workers, %s: %.0f messages/s (%.0f step reports/s)", run->workers,
             mode, s->messages_per_s, s->reports_per_s);
    snprintf(measured, sizeof measured, "%.1f %% of a core, %.1f us a message", 100 * s->cores, s->us_per_message);
    say_row(what, measured, "< 60 %", verdict(s->cores < TARGET_CORE));
    snprintf(what, sizeof what, "the same: memory of musterd a worker");
    snprintf(measured, sizeof measured, "%.1f KiB", kib);
    say_row(what, measured, "< 64 KiB", verdict(kib < TARGET_KIB));
}

static void say_restart(const struct run *run, const struct restart *r)
{
    char what[160], measured[200];
    snprintf(what, sizeof what, "SIGKILL and restart of musterd, %u workers, until the last is back", run->workers);
    snprintf(measured, sizeof measured,
             "%.2f s (serves again after %.2f s, %.2f s of CPU time); generation %s, %llu lost, %llu refused",
             r->back_s, r->serving_s, r->cpu_s, r->generation_before == r->generation_after ? "kept" : "CHANGED",
             r->lost, r->refused);
    say_row(what, measured, "0 lost, 0 refused, generation kept",
            verdict(r->lost == 0 && r->refused == 0 && r->generation_before == r->generation_after));
}

/* ---- the page for Prometheus ---- */

static bool have_told(struct run *run, uint64_t base)
{
    (void)base;
    return atomic_load(&run->shared->vitals_told) >= run->workers;
}

static int by_value(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* With numbers of every single worker on it. */
static enum mu_status scrape(struct run *run, struct mu_error *err)
{
    double seconds[SCRAPES];
    size_t bytes = 0;
    char what[160], measured[160];
    atomic_store(&run->shared->tell_vitals, true);
    enum mu_status status = await(run, have_told, 0, "vital signs", err);
    double cpu_s = musterd_cpu_s(&run->musterd);
    for (int i = 0; i < SCRAPES && status == MU_OK; i++) {
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL); /* what was answered is old by then */
        status = musterd_scrape(&run->musterd, &seconds[i], &bytes, err);
    }
    if (status)
        return status;
    qsort(seconds, SCRAPES, sizeof seconds[0], by_value);
    snprintf(what, sizeof what, "/metrics, %u workers, %s, scraped each second", run->workers,
             run->mode == MEMBERS ? "members of one job" : "spares");
    snprintf(measured, sizeof measured, "%.2f MB, median %.0f ms, worst %.0f ms; %.1f %% of a core in all",
             (double)bytes * 1e-6, 1e3 * seconds[SCRAPES / 2], 1e3 * seconds[SCRAPES - 1],
             100 * (musterd_cpu_s(&run->musterd) - cpu_s) / SCRAPES);
    say_row(what, measured, "< 5 MB, < 100 ms", verdict(bytes < 5000000 && seconds[SCRAPES / 2] < 0.1));
    return MU_OK;
}

/* ---- modes ---- */

static bool run_mode(const struct settings *settings, enum mode mode, uint32_t workers)
{
    struct run run = {.settings = settings, .mode = mode, .workers = workers, .shared_fd = -1};
    struct steady steady = {0}, after = {0};
    struct restart again = {0};
    struct mu_error err = {0};
    double attach_s = 0, run_s = 0;
    enum mu_status status = start(&run, &err);
    if (status == MU_OK)
        status = join(&run, &attach_s, &run_s, &err);
    if (status == MU_OK) {
        char measured[160];
        snprintf(measured, sizeof measured,
                 "all attached %.2f s, all ranks stepping %.2f s (%.2f s of CPU time of musterd); %llu refused",
                 attach_s, run_s, musterd_cpu_s(&run.musterd), refusals(run.shared));
        say_row(mode == MEMBERS ? "join, all in one job" : "join, as spares", measured, "0 refused",
                verdict(refusals(run.shared) == 0));
        measure(&run, &steady);
        status = await(&run, are_timings_full, 0, "step reports", &err);
        say_steady(&run, &steady, kib_per_worker(&run));
    }
    if (status == MU_OK)
        status = scrape(&run, &err);
    if (status == MU_OK)
        status = restart(&run, &again, &err);
    if (status == MU_OK) {
        say_restart(&run, &again);
        measure(&run, &after);
    }
    bool clean = steady.refused + steady.lost + after.refused + after.lost + again.lost + again.refused == 0 &&
                 steady.least_attached == workers && after.least_attached == workers;
    if (status == MU_OK) {
        char measured[160];
        snprintf(measured, sizeof measured, "%llu streams broke, %llu refused (least attached %u and %u)",
                 steady.lost + after.lost, steady.refused + after.refused, steady.least_attached, after.least_attached);
        say_row("while measured, before and after the restart", measured, "0, 0", verdict(clean));
    } else {
        fprintf(stderr, "bench_attach: %s\n", err.text);
    }
    if (status != MU_OK || !clean)
        musterd_show_log(&run.musterd, LOG_LINES);
    return end(&run) && status == MU_OK && clean;
}

/* Bytes of Assign for one job of so many workers. */
static bool run_assign(const struct settings *settings, uint32_t workers)
{
    struct run run = {.settings = settings, .mode = MEMBERS, .workers = workers, .shared_fd = -1};
    struct mu_error err = {0};
    double attach_s, run_s;
    enum mu_status status = start(&run, &err);
    if (status == MU_OK)
        status = join(&run, &attach_s, &run_s, &err);
    if (status == MU_OK) {
        char what[160], measured[160];
        snprintf(what, sizeof what, "bytes of Assign, %u workers", workers);
        snprintf(measured, sizeof measured, "%.0f on average, %llu at most (join %.2f s)",
                 (double)run.shared->assign_bytes / (double)run.shared->assigns,
                 (unsigned long long)run.shared->assign_bytes_max, run_s);
        say_row(what, measured, "does not grow", "see rows");
    } else {
        fprintf(stderr, "bench_attach: %s\n", err.text);
    }
    return end(&run) && status == MU_OK;
}

/* Milliseconds of GetJob, sorted. */
static enum mu_status time_calls(struct run *run, double ms[CALLS], struct mu_error *err)
{
    const Muster__V1__Job *job;
    enum mu_status status = MU_OK;
    for (int i = 0; i < CALLS && status == MU_OK; i++) {
        uint64_t begin_us = mu_clock_mono_us();
        status = musterd_get_job(&run->musterd, run->shared->job, &job, err);
        ms[i] = (double)(mu_clock_mono_us() - begin_us) * 1e-3;
        nanosleep(&(struct timespec){.tv_nsec = CALL_PAUSE_NS}, NULL);
    }
    qsort(ms, CALLS, sizeof ms[0], by_value);
    return status;
}

/* Milliseconds for a new client to connect and be answered, sorted. */
static enum mu_status time_fresh(struct run *run, double ms[FRESH_CALLS], struct mu_error *err)
{
    const Muster__V1__Job *job;
    enum mu_status status = MU_OK;
    struct mu_rpc_client *own = run->musterd.client;
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.address = run->musterd.address;
    for (int i = 0; i < FRESH_CALLS && status == MU_OK; i++) {
        uint64_t begin_us = mu_clock_mono_us();
        if ((status = mu_rpc_client_new(run->musterd.pool, &config, err, &run->musterd.client)))
            break;
        status = musterd_get_job(&run->musterd, run->shared->job, &job, err);
        ms[i] = (double)(mu_clock_mono_us() - begin_us) * 1e-3;
        mu_rpc_client_free(run->musterd.client);
    }
    run->musterd.client = own;
    qsort(ms, FRESH_CALLS, sizeof ms[0], by_value);
    return status;
}

struct idle_result {
    double before_ms[CALLS], during_ms[CALLS], fresh_ms[FRESH_CALLS], open_s, kib_per_idle;
    struct steady steady;
    uint64_t generation_before, generation_during, steps;
    unsigned long long lost;
};

static enum mu_status watch_idle(struct run *run, struct idle_result *r, struct mu_error *err)
{
    const Muster__V1__Job *job;
    double attach_s, run_s;
    enum mu_status status = join(run, &attach_s, &run_s, err);
    if (status || (status = time_calls(run, r->before_ms, err)) ||
        (status = musterd_get_job(&run->musterd, run->shared->job, &job, err)))
        return status;
    r->generation_before = job->generation;
    r->steps = job->steps_done;
    uint64_t rss = musterd_rss_bytes(&run->musterd), begin_us = mu_clock_mono_us();
    atomic_store(&run->shared->start_idle, true);
    if ((status = await(run, is_idle_open, 0, "idle connections", err)))
        return status;
    r->open_s = (double)(mu_clock_mono_us() - begin_us) * 1e-6;
    measure(run, &r->steady);
    r->kib_per_idle = ((double)musterd_rss_bytes(&run->musterd) - (double)rss) / run->shared->idle / 1024;
    if ((status = time_calls(run, r->during_ms, err)) || (status = time_fresh(run, r->fresh_ms, err)) ||
        (status = musterd_get_job(&run->musterd, run->shared->job, &job, err)))
        return status;
    r->generation_during = job->generation;
    r->steps = job->steps_done - r->steps;
    r->lost = job->workers_lost;
    return MU_OK;
}

static bool run_idle(const struct settings *settings)
{
    struct run run = {.settings = settings, .mode = MEMBERS, .workers = settings->workers, .shared_fd = -1};
    struct idle_result r = {0};
    struct mu_error err = {0};
    char what[160], measured[256];
    enum mu_status status = start(&run, &err);
    if (status == MU_OK)
        status = watch_idle(&run, &r, &err);
    bool clean = status == MU_OK && r.lost + r.steady.lost + r.steady.refused + run.shared->exits == 0 &&
                 r.generation_before == r.generation_during && r.steady.least_attached == run.workers;
    if (status == MU_OK) {
        snprintf(what, sizeof what, "%u idle connections beside a job of %u workers", settings->idle, run.workers);
        snprintf(measured, sizeof measured,
                 "%llu workers lost, %llu streams broke, generation %s, %llu steps meanwhile; opened in %.1f s, %llu "
                 "closed by musterd, %.1f KiB each, %.1f %% of a core",
                 r.lost, r.steady.lost, r.generation_before == r.generation_during ? "kept" : "CHANGED",
                 (unsigned long long)r.steps, r.open_s, (unsigned long long)run.shared->idle_closed, r.kib_per_idle,
                 100 * r.steady.cores);
        say_row(what, measured, "0, 0, kept", verdict(clean));
        snprintf(measured, sizeof measured,
                 "median %.2f, 99 %% %.2f ms (before: %.2f, %.2f); by a new client: median %.1f, worst %.1f ms",
                 r.during_ms[CALLS / 2], r.during_ms[CALLS * 99 / 100], r.before_ms[CALLS / 2],
                 r.before_ms[CALLS * 99 / 100], r.fresh_ms[FRESH_CALLS / 2], r.fresh_ms[FRESH_CALLS - 1]);
        say_row("the same: GetJob", measured, "", "");
    } else {
        fprintf(stderr, "bench_attach: %s\n", err.text);
    }
    return end(&run) && clean;
}

/* ---- main ---- */

static void stop_usage(const char *what)
{
    fprintf(stderr,
            "bench_attach: %s\nusage: bench_attach [--workers N] [--seconds S] [--step-ms M] [--idle N] "
            "[--musterd PATH] [--only spares|members|assign]\n",
            what);
    exit(2);
}

static uint32_t parse_number(const char *option, const char *text, uint32_t most)
{
    char *end_of_text, what[128];
    unsigned long value = strtoul(text, &end_of_text, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end_of_text == 0 && value >= 1 && value <= most)
        return (uint32_t)value;
    snprintf(what, sizeof what, "%s: '%.40s' is not allowed: 1 to %u", option, text, most);
    stop_usage(what);
    return 0;
}

static void parse(int argc, char **argv, struct settings *settings)
{
    for (int i = 1; i < argc; i += 2) {
        const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(option, "--workers") == 0)
            settings->workers = parse_number(option, value, MU_ATTACH_WORKERS_MAX);
        else if (strcmp(option, "--seconds") == 0)
            settings->seconds = parse_number(option, value, 600);
        else if (strcmp(option, "--step-ms") == 0)
            settings->step_ms = parse_number(option, value, 60000);
        else if (strcmp(option, "--idle") == 0)
            settings->idle = parse_number(option, value, MU_ATTACH_IDLE_MAX);
        else if (strcmp(option, "--musterd") == 0 && *value)
            settings->musterd = value;
        else if (strcmp(option, "--only") == 0 && *value)
            settings->only = value;
        else
            stop_usage("unknown option");
    }
    if (settings->workers == 0)
        settings->workers = settings->idle ? 100 : 10000;
}

/* Beside this program, in the build folder. */
static const char *default_musterd(char *path, size_t size)
{
    ssize_t length = readlink("/proc/self/exe", path, size - 1);
    path[length > 0 ? length : 0] = 0;
    char *slash = strrchr(path, '/');
    snprintf(slash ? slash : path, size - (size_t)(slash ? slash - path : 0), "/../coordinator/musterd");
    return path;
}

static bool wanted(const struct settings *settings, const char *part)
{
    return !settings->only || strcmp(settings->only, part) == 0;
}

static int run_child(char **argv)
{
    int fd = atoi(argv[2]);
    struct attach_shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED)
        return 1;
    uint32_t process = (uint32_t)atoi(argv[3]);
    if (nice(CLIENT_NICE) == -1) /* -1 is not a niceness that adding can give */
        return 1;
    return strcmp(argv[1], "--client") == 0 ? attach_workers_main(shared, process) : attach_idle_main(shared, process);
}

int main(int argc, char **argv)
{
    char path[4096];
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    signal(SIGPIPE, SIG_IGN);
    if (argc == 4 && (strcmp(argv[1], "--client") == 0 || strcmp(argv[1], "--idler") == 0))
        _exit(run_child(argv)); /* without the libraries' own ends: the kernel is faster with thousands of sockets */
    struct settings settings = {.seconds = 20, .step_ms = 1000, .musterd = default_musterd(path, sizeof path)};
    parse(argc, argv, &settings);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (settings.idle)
        return run_idle(&settings) ? 0 : 1;
    bool good = !wanted(&settings, "spares") || run_mode(&settings, SPARES, settings.workers);
    good = (!wanted(&settings, "members") || run_mode(&settings, MEMBERS, settings.workers)) && good;
    for (uint32_t divisor = 100; wanted(&settings, "assign") && divisor >= 1; divisor /= 10)
        good = (settings.workers < divisor || run_assign(&settings, settings.workers / divisor)) && good;
    return good ? 0 : 1;
}
