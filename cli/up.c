/* `muster up job.yaml --workers N`: coordinator, workers and a live view in one command, for one machine. The children
 * are in no other process's care: they get SIGKILL should this one die, and are gone, verified, when it ends. A worker
 * or coordinator that dies is started again; one that gives up (exit code not 0) has said why, which is repeated here.
 *
 * Two threads: the main one follows the job; the supervisor starts, watches and ends the children (all of them, because
 * a child's death signal is tied to the thread that started it). */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/job_file.h"
#include "kernels/pool.h"

enum {
    WORKERS_MAX = 256,
    START_LIMIT_MS = 10000,
    STOP_LIMIT_MS = 10000,
    RESPAWN_MAX = 20,
    PATROL_MS = 50,
    GONE_GRACE_MS = 2000, /* after the last worker gave up: the job itself may say that it is over */
    LOG_TAIL_SIZE = 2048,
    REASON_SIZE = MU_PATH_SIZE + 128,
};

struct up {
    struct mu_cli *cli;
    struct mu_job_spec spec;
    char data_dir[MU_PATH_SIZE], address_file[MU_PATH_SIZE + 32], address[128], musterd[MU_PATH_SIZE],
        worker[MU_PATH_SIZE];
    const char *job_path, *threads, *listen;
    unsigned worker_count, respawns;
    pid_t coordinator, workers[WORKERS_MAX];
    /* Between the threads. */
    pthread_t supervisor;
    atomic_bool started, submitted, stop, gave_up; /* the coordinator serves; it has the job; end; a child refused */
    struct mu_error trouble;                       /* why it did not start */
};

static atomic_int interrupted; /* how often; lock-free, so the handler may count */

static void on_signal(int number)
{
    (void)number;
    interrupted++;
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

static void pause_ms(unsigned ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000}, NULL);
}

/* The last line of a child's log, which is its reason when it gave up. */
static void last_line(const struct up *up, const char *log_name, char out[REASON_SIZE])
{
    char log[MU_PATH_SIZE + 64], tail[LOG_TAIL_SIZE + 1];
    snprintf(log, sizeof log, "%s/%s.log", up->data_dir, log_name);
    snprintf(out, REASON_SIZE, "see %s", log);
    int fd = open(log, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    off_t size = lseek(fd, 0, SEEK_END);
    ssize_t length = pread(fd, tail, LOG_TAIL_SIZE, size > LOG_TAIL_SIZE ? size - LOG_TAIL_SIZE : 0);
    close(fd);
    while (length > 0 && tail[length - 1] == '\n')
        length--;
    if (length <= 0)
        return;
    tail[length] = 0;
    const char *line = strrchr(tail, '\n');
    snprintf(out, REASON_SIZE, "%.*s", REASON_SIZE - 1, line ? line + 1 : tail);
}

static pid_t spawn_coordinator(struct up *up, const char *listen)
{
    char store[MU_PATH_SIZE + 16];
    snprintf(store, sizeof store, "%s/store", up->data_dir);
    char *argv[] = {up->musterd,      "--data-dir",     store, "--listen", (char *)(uintptr_t)listen,
                    "--address-file", up->address_file, NULL};
    return spawn(up, "musterd", argv);
}

static enum mu_status start_coordinator(struct up *up, struct mu_error *err)
{
    snprintf(up->address_file, sizeof up->address_file, "%s/address", up->data_dir);
    unlink(up->address_file);
    up->coordinator = spawn_coordinator(up, up->listen);
    for (unsigned waited_ms = 0; waited_ms < START_LIMIT_MS && !interrupted; waited_ms += 10) {
        FILE *file = fopen(up->address_file, "r");
        if (file) {
            bool whole = fscanf(file, "%127s", up->address) == 1;
            fclose(file);
            if (whole)
                return MU_OK;
        }
        if (waitpid(up->coordinator, NULL, WNOHANG) != 0) {
            char reason[REASON_SIZE];
            up->coordinator = 0;
            last_line(up, "musterd", reason);
            return mu_fail(err, MU_ERR_IO, "the coordinator did not start: %s", reason);
        }
        pause_ms(10);
    }
    return interrupted
               ? mu_fail(err, MU_ERR_CANCELLED, "interrupted")
               : mu_fail(err, MU_ERR_UNAVAILABLE, "the coordinator was not ready within %d s; see %s/musterd.log",
                         START_LIMIT_MS / 1000, up->data_dir);
}

/* Ended by a signal: again, a bounded number of times. Exit 0 is in good order: it stays away. Anything else is a
 * refusal that would only come again. */
static bool want_again(struct up *up, const char *name, int status)
{
    char reason[REASON_SIZE];
    if (WIFSIGNALED(status) && up->respawns++ < RESPAWN_MAX)
        return true;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return false;
    last_line(up, name, reason);
    if (WIFSIGNALED(status))
        fprintf(stderr, "muster: %s was ended by signal %d, and %d restarts were enough: %s\n", name, WTERMSIG(status),
                RESPAWN_MAX, reason);
    else
        fprintf(stderr, "muster: %s ended with exit code %d: %s\n", name, WEXITSTATUS(status), reason);
    up->gave_up = true;
    return false;
}

/* Returns how many workers there are. */
static unsigned patrol(struct up *up)
{
    unsigned alive = 0;
    int status;
    if (up->coordinator > 0 && waitpid(up->coordinator, &status, WNOHANG) == up->coordinator)
        up->coordinator = want_again(up, "musterd", status) ? spawn_coordinator(up, up->address) : 0;
    for (unsigned i = 0; i < up->worker_count; i++) {
        char name[32];
        snprintf(name, sizeof name, "worker-%u", i);
        if (up->workers[i] > 0 && waitpid(up->workers[i], &status, WNOHANG) == up->workers[i])
            up->workers[i] = want_again(up, name, status) ? spawn_worker(up, i) : 0;
        alive += up->workers[i] > 0;
    }
    return alive;
}

static void end_process(pid_t pid, unsigned *left_ms)
{
    while (pid > 0 && waitpid(pid, NULL, WNOHANG) == 0) {
        if (*left_ms < 10 || interrupted > 1) {
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            return;
        }
        *left_ms -= 10;
        pause_ms(10);
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

/* `started` is set when the coordinator serves, `stop` before that when it does not. */
static void *supervise(void *arg)
{
    struct up *up = arg;
    unsigned gone_ms = 0;
    bool has_workers = false;
    if (start_coordinator(up, &up->trouble) != MU_OK)
        up->stop = true;
    else
        up->started = true;
    while (!up->stop) {
        if (up->submitted && !has_workers) {
            for (unsigned i = 0; i < up->worker_count; i++)
                up->workers[i] = spawn_worker(up, i);
            has_workers = true;
        }
        unsigned alive = patrol(up);
        bool lonely = up->gave_up && ((has_workers && alive == 0) || up->coordinator == 0);
        gone_ms = lonely ? gone_ms + PATROL_MS : 0;
        if (interrupted || gone_ms > GONE_GRACE_MS)
            up->stop = true;
        pause_ms(PATROL_MS);
    }
    stop_all(up);
    return NULL;
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

static int submit(struct up *up)
{
    struct mu_error err;
    struct mu_cli *cli = up->cli;
    Muster__V1__SubmitJobRequest request = MUSTER__V1__SUBMIT_JOB_REQUEST__INIT;
    if (mu_wire_spec_to_pb(&cli->arena, &up->spec, &request.spec, &err) != MU_OK)
        return mu_cli_fail(&err);
    const Muster__V1__SubmitJobResponse *reply;
    int code = mu_cli_change_or_exit(cli, "SubmitJob", &request.base, &request.request_id,
                                     &muster__v1__submit_job_response__descriptor, &reply);
    if (code == MU_EXIT_OK)
        fprintf(cli->json ? stderr : stdout,
                "coordinator at %s, %u workers, logs in %s; more workers: muster-worker --coordinator %s --job %s\n",
                up->address, up->worker_count, up->data_dir, up->address, up->spec.name);
    fflush(stdout);
    return code;
}

static int run(struct up *up)
{
    if (pthread_create(&up->supervisor, NULL, supervise, up) != 0) {
        fprintf(stderr, "muster: cannot start a thread\n");
        return MU_EXIT_FAILURE;
    }
    while (!up->started && !up->stop)
        pause_ms(10);
    int code = MU_EXIT_FAILURE;
    if (up->started) {
        up->cli->address = up->address;
        code = submit(up);
    }
    if (code == MU_EXIT_OK) {
        up->submitted = true;
        code = mu_cli_follow(up->cli, up->spec.name, 0, &up->stop);
    }
    bool cut_short = up->stop;
    up->stop = true;
    pthread_join(up->supervisor, NULL);
    if (interrupted && cut_short) {
        fprintf(up->cli->json ? stderr : stdout,
                "\ninterrupted; the job goes on where it stopped with: muster up %s --data-dir %s\n", up->job_path,
                up->data_dir);
        return MU_EXIT_FAILURE;
    }
    if (!up->started)
        return mu_cli_fail(&up->trouble);
    if (cut_short && code == MU_EXIT_OK) {
        fprintf(stderr,
                "muster: no worker is left; the job goes on where it stopped with: muster up %s --data-dir %s\n",
                up->job_path, up->data_dir);
        return MU_EXIT_FAILURE;
    }
    return code;
}

static int remove_one(const char *path, const struct stat *facts, int kind, struct FTW *position)
{
    (void)facts;
    (void)kind;
    (void)position;
    return remove(path);
}

static enum mu_status take_options(struct up *up, int argc, char **argv, const char **ret_data_dir)
{
    const char *workers = "2", *threads = NULL;
    static char share[32];
    const struct mu_cli_option options[] = {{"--workers", &workers, NULL},
                                            {"--data-dir", ret_data_dir, NULL},
                                            {"--listen", &up->listen, NULL},
                                            {"--threads", &threads, NULL}};
    uint64_t count, thread_count;
    if (mu_cli_parse("up", argc, argv, options, (int)(sizeof options / sizeof options[0]), 1, 1) < 0 ||
        !mu_cli_number("up", "--workers", workers, 1, WORKERS_MAX, &count) ||
        (threads && !mu_cli_number("up", "--threads", threads, 1, MU_POOL_THREADS_MAX, &thread_count)))
        return MU_ERR_INVALID;
    if (!threads) { /* the machine's processors, shared */
        long processors = sysconf(_SC_NPROCESSORS_ONLN);
        snprintf(share, sizeof share, "%ld", processors > (long)count ? processors / (long)count : 1);
        threads = share;
    }
    up->worker_count = (unsigned)count;
    up->threads = threads;
    return MU_OK;
}

/* Everything is on this machine, and one certificate cannot be the coordinator's, the workers' and the user's. */
static void leave_out_tls(struct mu_cli *cli)
{
    static const char *const names[] = {"MUSTER_TLS_CA", "MUSTER_TLS_CERT", "MUSTER_TLS_KEY"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        unsetenv(names[i]);
    cli->tls = (struct mu_rpc_tls_files){0};
}

int mu_cmd_up(struct mu_cli *cli, int argc, char **argv)
{
    leave_out_tls(cli);
    const char *data_dir = NULL;
    struct up up = {.cli = cli, .listen = "127.0.0.1:0"};
    struct mu_error err;
    if (take_options(&up, argc, argv, &data_dir) != MU_OK)
        return MU_EXIT_USAGE;
    up.job_path = argv[0];
    if (mu_job_file_read(up.job_path, &up.spec, &err) != MU_OK) {
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
    int code = run(&up);
    if (code == MU_EXIT_OK && !data_dir) /* nobody can want it again: the job is over, its checkpoints are elsewhere */
        nftw(up.data_dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return code;
}
