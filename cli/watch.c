/* Following one job: events as they happen, one plain line each, and its progress (a live line on a terminal, one line
 * per interval into a file). A second thread reads the event stream; both outlive restarts of the coordinator. */
#include "cli/event_stream.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/hash.h"

enum { POLL_MS = 200, GIVE_UP_MS = MU_EVENT_STREAM_GIVE_UP_MS };

struct follower {
    struct mu_cli *cli;
    const char *job;
    const atomic_bool *stop;
    bool terminal;
    uint64_t start_us;
    pthread_mutex_t lock; /* of the output and `line` */
    char line[256];       /* the live line as it stands */
    struct mu_event_stream events;
    pthread_t thread; /* that reads them */
    bool joined;
    struct mu_error trouble; /* why the events thread gave up, when `failed` */
    atomic_bool failed;
};

static void pause_ms(unsigned ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000}, NULL);
}

static void print_line(struct follower *follower, const char *text)
{
    double seconds = (double)(mu_clock_mono_us() - follower->start_us) * 1e-6;
    pthread_mutex_lock(&follower->lock);
    if (follower->terminal)
        printf("\r\033[K");
    printf("[%7.2f s] %s\n", seconds, text);
    if (follower->terminal)
        printf("%s", follower->line);
    fflush(stdout);
    pthread_mutex_unlock(&follower->lock);
}

static void show_event(void *ctx, const Muster__V1__Event *event)
{
    struct follower *follower = ctx;
    if (follower->cli->json)
        mu_cli_print_json(&event->base, true);
    else
        print_line(follower, event->text);
}

static void *events_thread(void *arg)
{
    struct follower *follower = arg;
    struct mu_error err;
    if (mu_event_stream_run(&follower->events, &err) != MU_OK) {
        follower->trouble = err;
        atomic_store(&follower->failed, true);
    }
    return NULL;
}

static void format_progress(const Muster__V1__Job *job, char *out, size_t size)
{
    char tokens[16] = "-", loss[16] = "-", ckpt[32] = "-", step[24] = "-", layout[MU_CLI_LAYOUT_SIZE],
         cut[MU_CLI_LAYOUT_SIZE + 4] = "";
    const Muster__V1__Layout *l = job->layout;
    mu_cli_layout(l, layout);
    if (l && (l->tp * l->pp > 1 || l->sharded || l->idle)) /* else the number of workers says it all */
        snprintf(cut, sizeof cut, " (%s)", layout);
    if (job->tokens_per_second > 0)
        mu_cli_count(job->tokens_per_second, tokens);
    if (job->has_result)
        snprintf(loss, sizeof loss, "%.4f", job->result->loss);
    if (job->has_result || job->world == 0) /* else what is recorded is old: a coordinator just started */
        snprintf(step, sizeof step, "%" PRIu64, job->steps_done);
    if (job->last_checkpoint)
        snprintf(ckpt, sizeof ckpt, "%" PRIu64, job->last_checkpoint_step);
    snprintf(out, size,
             "%s step %s/%" PRIu64 "  loss %s  %s tokens/s  %u workers%s  generation %" PRIu64 "  checkpoint %s",
             job->name, step, job->steps, loss, tokens, job->world, cut, job->generation, ckpt);
}

static void show_progress(struct follower *follower, const Muster__V1__Job *job, uint64_t *next_line_us,
                          uint64_t interval_us)
{
    char text[sizeof follower->line];
    if (follower->cli->json)
        return;
    format_progress(job, text, sizeof text);
    if (follower->terminal) {
        pthread_mutex_lock(&follower->lock);
        memcpy(follower->line, text, sizeof text);
        printf("\r\033[K%s", text);
        fflush(stdout);
        pthread_mutex_unlock(&follower->lock);
    } else if (mu_clock_mono_us() >= *next_line_us) {
        *next_line_us = mu_clock_mono_us() + interval_us;
        print_line(follower, text);
    }
}

static bool is_over(const Muster__V1__Job *job)
{
    return job->state == MUSTER__V1__JOB_STATE__JOB_STATE_FINISHED ||
           job->state == MUSTER__V1__JOB_STATE__JOB_STATE_FAILED ||
           job->state == MUSTER__V1__JOB_STATE__JOB_STATE_CANCELLED;
}

static void show_end(struct follower *follower, const Muster__V1__Job *job)
{
    if (follower->terminal) {
        printf("\r\033[K");
        follower->line[0] = 0;
    }
    if (follower->cli->json) {
        mu_cli_print_json(&job->base, true);
    } else if (job->weights_sha256.len == 32) {
        char hex[65];
        mu_hex(job->weights_sha256.data, 32, hex);
        printf("weights sha256 %s\n", hex);
    }
    fflush(stdout);
    if (job->state != MUSTER__V1__JOB_STATE__JOB_STATE_FINISHED) /* why the exit code is not 0 */
        fprintf(stderr, "muster: job %s %s%s\n", job->name,
                job->state == MUSTER__V1__JOB_STATE__JOB_STATE_FAILED ? "failed: " : "", job->text);
}

/* All events up to the end of the job come before the last lines. */
static void join_events(struct follower *follower)
{
    if (!follower->joined)
        pthread_join(follower->thread, NULL);
    follower->joined = true;
}

static int poll_job(struct follower *follower, uint64_t interval_us)
{
    uint64_t next_line_us = mu_clock_mono_us() + interval_us, heard_us = mu_clock_mono_us();
    for (;;) {
        if (follower->stop && atomic_load(follower->stop))
            return MU_EXIT_OK;
        if (atomic_load(&follower->failed))
            return mu_cli_fail(&follower->trouble);
        struct mu_error err;
        Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
        request.name = (char *)(uintptr_t)follower->job;
        const ProtobufCMessage *reply;
        mu_wire_arena_reset(&follower->cli->arena);
        enum mu_status status =
            mu_cli_call(follower->cli, "GetJob", &request, &muster__v1__get_job_response__descriptor, &reply, &err);
        if (status == MU_OK) {
            const Muster__V1__Job *job = ((const Muster__V1__GetJobResponse *)reply)->job;
            heard_us = mu_clock_mono_us();
            if (is_over(job)) {
                mu_event_stream_finish(&follower->events);
                join_events(follower);
                if (atomic_load(&follower->failed))
                    return mu_cli_fail(&follower->trouble);
                show_end(follower, job);
                return job->state == MUSTER__V1__JOB_STATE__JOB_STATE_FINISHED ? MU_EXIT_OK : MU_EXIT_FAILURE;
            }
            show_progress(follower, job, &next_line_us, interval_us);
        } else if (status != MU_ERR_UNAVAILABLE && status != MU_ERR_TIMEOUT) {
            return mu_cli_fail(&err);
        } else if (mu_clock_mono_us() - heard_us > GIVE_UP_MS * 1000ull) {
            return mu_cli_fail(&err); /* a restart takes a second, not a minute */
        }
        pause_ms(POLL_MS);
    }
}

int mu_cli_follow(struct mu_cli *cli, const char *job, uint64_t after_event, const atomic_bool *stop)
{
    enum { INTERVAL_US = 5000000 };
    struct follower follower = {.cli = cli,
                                .job = job,
                                .stop = stop,
                                .terminal = isatty(STDOUT_FILENO) && !cli->json,
                                .start_us = mu_clock_mono_us(),
                                .lock = PTHREAD_MUTEX_INITIALIZER};
    mu_event_stream_init(&follower.events);
    follower.events.cli = cli;
    follower.events.request.job = (char *)(uintptr_t)job;
    follower.events.request.after_event = after_event;
    follower.events.request.follow = true;
    follower.events.show = show_event;
    follower.events.ctx = &follower;
    if (pthread_create(&follower.thread, NULL, events_thread, &follower) != 0) {
        fprintf(stderr, "muster: cannot start a thread\n");
        return MU_EXIT_FAILURE;
    }
    int code = poll_job(&follower, INTERVAL_US);
    mu_event_stream_stop(&follower.events);
    join_events(&follower);
    return code;
}

int mu_cmd_watch(struct mu_cli *cli, int argc, char **argv)
{
    const char *after = "0";
    const struct mu_cli_option options[] = {{"--after", &after, NULL}};
    uint64_t after_event;
    if (mu_cli_parse("watch", argc, argv, options, 1, 1, 1) < 0 ||
        !mu_cli_number("watch", "--after", after, 0, INT64_MAX, &after_event))
        return MU_EXIT_USAGE;
    Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
    request.name = argv[0];
    const Muster__V1__GetJobResponse
        *reply; /* fails at once, with its own exit code, when there is no such job or no coordinator */
    int code = mu_cli_call_or_exit(cli, "GetJob", &request, &muster__v1__get_job_response__descriptor, &reply);
    return code == MU_EXIT_OK ? mu_cli_follow(cli, argv[0], after_event, NULL) : code;
}
