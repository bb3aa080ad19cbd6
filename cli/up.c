/* `muster up job.yaml --workers N`: coordinator, workers and a live view in one command, for one machine. The children
 * are in no other process's care: they get SIGKILL should this one die, and are gone, verified, when it ends. A worker
 * that dies is started again. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/job_file.h"
#include "common/clock.h"

enum { WORKERS_MAX = 256, START_LIMIT_MS = 10000, STOP_LIMIT_MS = 10000, RESPAWN_MAX = 20 };

struct up {
    struct mu_cli *cli;
    struct mu_job_spec spec;
    char data_dir[MU_PATH_SIZE], address_file[MU_PATH_SIZE + 32], address[128], musterd[MU_PATH_SIZE],
        worker[MU_PATH_SIZE];
    const char *threads;
    unsigned worker_count, respawns;
    pid_t coordinator, workers[WORKERS_MAX];
    volatile bool stop;
    pthread_t supervisor;
};

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
}

/* The other two programs stand beside this one: installed in one folder, or in the build tree. */
static bool find_program(const char *name, const char *build_folder, char out[MU_PATH_SIZE])
{
    char self[MU_PATH_SIZE];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0)
        return false;
    self[length] = 0;
    *strrchr(self, '/') = 0;
    if (snprintf(out, MU_PATH_SIZE, "%s/%s", self, name) < MU_PATH_SIZE && access(out, X_OK) == 0)
        return true;
    return snprintf(out, MU_PATH_SIZE, "%s/../%s/%s", self, build_folder, name) < MU_PATH_SIZE &&
           access(out, X_OK) == 0;
}

static pid_t spawn(const struct up *up, const char *log_name, char *const argv[])
{
    char log[MU_PATH_SIZE + 64];
    snprintf(log, sizeof log, "%s/%s.log", up->data_dir, log_name);
    pid_t parent = getpid(), pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    setpgid(0, 0); /* Ctrl-C is this program's to handle, in order */
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
    }
    execv(argv[0], argv);
    _exit(127);
}

static pid_t spawn_worker(const struct up *up, unsigned index)
{
    char log_name[32];
    snprintf(log_name, sizeof log_name, "worker-%u", index);
    char *argv[] = {(char *)(uintptr_t)up->worker,    "--coordinator",
                    (char *)(uintptr_t)up->address,   "--job",
                    (char *)(uintptr_t)up->spec.name, up->threads ? "--threads" : NULL,
                    (char *)(uintptr_t)up->threads,   NULL};
    return spawn(up, log_name, argv);
}

static enum mu_status start_coordinator(struct up *up, const char *listen, struct mu_error *err)
{
    snprintf(up->address_file, sizeof up->address_file, "%s/address", up->data_dir);
    unlink(up->address_file);
    char store[MU_PATH_SIZE + 16];
    snprintf(store, sizeof store, "%s/store", up->data_dir);
    char *argv[] = {up->musterd,      "--data-dir",     store, "--listen", (char *)(uintptr_t)listen,
                    "--address-file", up->address_file, NULL};
    up->coordinator = spawn(up, "musterd", argv);
    for (unsigned waited_ms = 0; waited_ms < START_LIMIT_MS; waited_ms += 10) {
        FILE *file = fopen(up->address_file, "r");
        if (file) {
            bool whole = fscanf(file, "%127s", up->address) == 1;
            fclose(file);
            if (whole)
                return MU_OK;
        }
        if (waitpid(up->coordinator, NULL, WNOHANG) != 0) {
            up->coordinator = 0;
            break;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return mu_fail(err, MU_ERR_UNAVAILABLE, "the coordinator did not start; its reason is at the end of %s/musterd.log",
                   up->data_dir);
}

/* Starts dead workers again, a bounded number of times; one that left in good order (exit 0) stays away. */
static void *supervise(void *arg)
{
    struct up *up = arg;
    while (!up->stop) {
        for (unsigned i = 0; i < up->worker_count; i++) {
            int status;
            if (up->workers[i] <= 0 || waitpid(up->workers[i], &status, WNOHANG) != up->workers[i])
                continue;
            bool crashed = WIFSIGNALED(status);
            up->workers[i] = crashed && up->respawns++ < RESPAWN_MAX ? spawn_worker(up, i) : 0;
        }
        if (interrupted)
            up->stop = true;
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    return NULL;
}

static void end_process(pid_t pid, unsigned *left_ms)
{
    while (pid > 0 && waitpid(pid, NULL, WNOHANG) == 0) {
        if (*left_ms < 10) {
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            return;
        }
        *left_ms -= 10;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
}

static void stop_all(struct up *up)
{
    unsigned left_ms = STOP_LIMIT_MS;
    for (unsigned i = 0; i < up->worker_count; i++) {
        if (up->workers[i] > 0)
            kill(up->workers[i], SIGTERM);
    }
    for (unsigned i = 0; i < up->worker_count; i++)
        end_process(up->workers[i], &left_ms);
    if (up->coordinator > 0) {
        kill(up->coordinator, SIGTERM);
        left_ms = STOP_LIMIT_MS;
        end_process(up->coordinator, &left_ms);
    }
}

static enum mu_status prepare_folder(struct up *up, const char *data_dir, struct mu_error *err)
{
    if (data_dir) {
        if (strlen(data_dir) >= sizeof up->data_dir - 64)
            return mu_fail(err, MU_ERR_INVALID, "--data-dir is longer than %zu characters", sizeof up->data_dir - 65);
        strcpy(up->data_dir, data_dir);
        if (mkdir(up->data_dir, 0755) != 0 && errno != EEXIST)
            return mu_fail_errno(err, errno, "cannot make the data directory %s", data_dir);
        return MU_OK;
    }
    strcpy(up->data_dir, "/tmp/muster-up-XXXXXX");
    if (!mkdtemp(up->data_dir))
        return mu_fail_errno(err, errno, "cannot make a data directory in /tmp");
    return MU_OK;
}

static int run(struct up *up, const char *listen)
{
    struct mu_error err;
    struct mu_cli *cli = up->cli;
    if (start_coordinator(up, listen, &err) != MU_OK)
        return mu_cli_fail(&err);
    cli->address = up->address;
    int code = mu_cli_open(cli);
    if (code != MU_EXIT_OK)
        return code;
    Muster__V1__SubmitJobRequest request = MUSTER__V1__SUBMIT_JOB_REQUEST__INIT;
    if (mu_wire_spec_to_pb(&cli->arena, &up->spec, &request.spec, &err) != MU_OK)
        return mu_cli_fail(&err);
    const Muster__V1__SubmitJobResponse *reply;
    code = mu_cli_call_or_exit(cli, "SubmitJob", &request, &muster__v1__submit_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    printf("coordinator at %s, %u workers, logs in %s; more workers: muster-worker --coordinator %s --job %s\n",
           up->address, up->worker_count, up->data_dir, up->address, up->spec.name);
    fflush(stdout);
    for (unsigned i = 0; i < up->worker_count; i++)
        up->workers[i] = spawn_worker(up, i);
    if (pthread_create(&up->supervisor, NULL, supervise, up) != 0)
        return MU_EXIT_FAILURE;
    code = mu_cli_follow(cli, up->spec.name, 0, &up->stop);
    up->stop = true;
    pthread_join(up->supervisor, NULL);
    if (interrupted) {
        printf("\ninterrupted; the job goes on where it stopped with: muster up JOB --data-dir %s\n", up->data_dir);
        code = MU_EXIT_FAILURE;
    }
    return code;
}

int mu_cmd_up(struct mu_cli *cli, int argc, char **argv)
{
    const char *workers = "2", *data_dir = NULL, *listen = "127.0.0.1:0", *threads = NULL;
    const struct mu_cli_option options[] = {{"--workers", &workers, NULL},
                                            {"--data-dir", &data_dir, NULL},
                                            {"--listen", &listen, NULL},
                                            {"--threads", &threads, NULL}};
    struct up up = {.cli = cli};
    struct mu_error err;
    uint64_t count, thread_count;
    if (mu_cli_parse("up", argc, argv, options, (int)(sizeof options / sizeof options[0]), 1, 1) < 0 ||
        !mu_cli_number("up", "--workers", workers, 1, WORKERS_MAX, &count) ||
        (threads && !mu_cli_number("up", "--threads", threads, 1, 1024, &thread_count)))
        return MU_EXIT_USAGE;
    up.worker_count = (unsigned)count;
    char share[32];
    if (!threads) { /* the machine's processors, shared */
        long processors = sysconf(_SC_NPROCESSORS_ONLN);
        snprintf(share, sizeof share, "%ld", processors > (long)count ? processors / (long)count : 1);
        threads = share;
    }
    up.threads = threads;
    if (mu_job_file_read(argv[0], &up.spec, &err) != MU_OK) {
        fprintf(stderr, "muster: %s\n", err.text);
        return err.status == MU_ERR_NOT_FOUND ? MU_EXIT_NOT_FOUND : MU_EXIT_FAILURE;
    }
    if (!find_program("musterd", "coordinator", up.musterd) || !find_program("muster-worker", "worker", up.worker)) {
        fprintf(stderr,
                "muster: musterd and muster-worker are not beside this program: install all three in one folder\n");
        return MU_EXIT_FAILURE;
    }
    if (prepare_folder(&up, data_dir, &err) != MU_OK)
        return mu_cli_fail(&err);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    int code = run(&up, listen);
    stop_all(&up);
    return code;
}
