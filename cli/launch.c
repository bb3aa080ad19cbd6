/* `muster launch`: workers on many hosts, over ssh. Each host is asked to start a supervisor in the background
 * (`muster-worker --device ... --detach`), which answers when its workers are attached, or why they are not; so what is
 * printed here is known, not hoped. One thread: the ssh clients are children, at most `fanout` at a time. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/hosts.h"
#include "cli/job_file.h"
#include "common/clock.h"

enum {
    FANOUT_DEFAULT = 64,
    FANOUT_MAX = 1024,
    WITHIN_DEFAULT_S = 30,
    WITHIN_MAX_S = 3600,
    CONNECT_MAX_S = 15,
    TAIL_SIZE = 2048,
    COMMAND_SIZE = 16384,
    SSH_WORDS_MAX = 32,
    NAME_ROOM = 9,         /* the supervisor puts "-cuda255" behind it */
    EXIT_NO_PROGRAM = 127, /* a shell's */
    EXIT_NO_PERMISSION = 126,
    EXIT_SSH = 255, /* ssh itself failed */
};

struct launch {
    struct mu_cli *cli;
    struct mu_hosts hosts;
    char job[MU_JOB_NAME_SIZE];
    const char *program;
    char **words; /* for every worker */
    int word_count;
    uint64_t fanout, within_s;
    char *ssh_words[SSH_WORDS_MAX + 8]; /* the program with its options; the host and the command come behind them */
    int ssh_word_count;
    char connect[32];
    size_t failed;
};

/* One ssh. */
struct run {
    const char *host; /* NULL: free */
    pid_t pid;
    int fd; /* what it says on either output */
    uint64_t until_us;
    bool late;
    char tail[TAIL_SIZE]; /* the end of that */
    size_t tail_length;
};

/* ---- the command ---- */

/* Puts one word of a shell's command line behind what is there. False: it does not fit. */
static bool put_word(char command[COMMAND_SIZE], const char *word)
{
    size_t at = strlen(command);
    for (const char *c = word; at + 8 < COMMAND_SIZE; c++) {
        if (c == word)
            at += (size_t)snprintf(command + at, COMMAND_SIZE - at, "%s'", at ? " " : "");
        if (*c == 0) {
            snprintf(command + at, COMMAND_SIZE - at, "'");
            return true;
        }
        at += (size_t)snprintf(command + at, COMMAND_SIZE - at, *c == '\'' ? "'\\''" : "%c", *c);
    }
    return false;
}

/* Ours stand last: they count where both are given. */
static bool make_command(const struct launch *launch, const char *host, char command[COMMAND_SIZE])
{
    const char *at = strrchr(host, '@');
    char name[MU_WORKER_NAME_SIZE], within[16];
    bool has_device = false, fits = true;
    mu_wire_name_clean(at ? at + 1 : host, name, sizeof name - NAME_ROOM);
    snprintf(within, sizeof within, "%llu", (unsigned long long)launch->within_s);
    command[0] = 0;
    fits = put_word(command, launch->program);
    for (int i = 0; i < launch->word_count; i++) {
        has_device = has_device || strncmp(launch->words[i], "--device", 8) == 0;
        fits = fits && put_word(command, launch->words[i]);
    }
    const char *const ours[] = {"--coordinator", launch->cli->address, "--job", launch->job, "--name", name,
                                "--detach",      "--ready-within",     within};
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        fits = fits && put_word(command, ours[i]);
    return fits && (has_device || (put_word(command, "--device") && put_word(command, "all")));
}

/* In the child: it goes when this program goes, and with it what it has started. */
static void become_ssh(const struct launch *launch, pid_t parent, const char *host, char *command, int fd)
{
    char *words[SSH_WORDS_MAX + 11];
    int count = launch->ssh_word_count;
    memcpy(words, launch->ssh_words, (size_t)count * sizeof words[0]);
    words[count++] = (char *)(uintptr_t)host;
    words[count++] = command;
    words[count] = NULL;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setpgid(0, 0);
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (getppid() != parent || nothing < 0 || dup2(nothing, STDIN_FILENO) < 0 || dup2(fd, STDOUT_FILENO) < 0 ||
        dup2(fd, STDERR_FILENO) < 0)
        _exit(EXIT_SSH);
    execvp(words[0], words);
    dprintf(STDERR_FILENO, "cannot run '%s': %s\n", words[0], strerror(errno));
    _exit(EXIT_SSH);
}

static bool start(struct launch *launch, struct run *run, const char *host, struct mu_error *err)
{
    char command[COMMAND_SIZE];
    int fds[2];
    if (!make_command(launch, host, command)) {
        mu_fail(err, MU_ERR_LIMIT, "the command for a host is longer than %d characters", COMMAND_SIZE);
        return false;
    }
    if (pipe2(fds, O_CLOEXEC) != 0) {
        mu_fail_errno(err, errno, "cannot make a pipe");
        return false;
    }
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        become_ssh(launch, parent, host, command, fds[1]);
    int reason = errno;
    close(fds[1]);
    if (pid < 0) {
        mu_fail_errno(err, reason, "cannot start a process");
        close(fds[0]);
        return false;
    }
    setpgid(pid, pid);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    uint64_t limit_s = launch->within_s + (launch->within_s < CONNECT_MAX_S ? launch->within_s : CONNECT_MAX_S) + 1;
    *run = (struct run){.host = host, .pid = pid, .fd = fds[0], .until_us = mu_clock_mono_us() + limit_s * 1000000};
    return true;
}

/* ---- what comes back ---- */

/* The last line that says something; the others are banners and warnings. */
static const char *last_line(struct run *run)
{
    size_t length = run->tail_length;
    while (length > 0 && (unsigned char)run->tail[length - 1] <= ' ')
        length--;
    run->tail[length] = 0;
    char *newline = strrchr(run->tail, '\n');
    char *line = newline ? newline + 1 : run->tail;
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < ' ')
            *c = ' ';
    return line;
}

static void tell(struct launch *launch, const char *host, bool ok, const char *text)
{
    launch->failed += !ok;
    if (launch->cli->json) {
        json_t *object = json_pack("{s:s, s:b, s:s}", "host", host, "ok", ok, "text", text);
        if (object && json_dumpf(object, stdout, JSON_COMPACT) == 0)
            putchar('\n');
        json_decref(object);
    } else if (!ok) {
        fprintf(stderr, "muster: %s: %s\n", host, text);
    }
}

static void judge(struct launch *launch, struct run *run, int status)
{
    char text[TAIL_SIZE + 256];
    const char *said = last_line(run), *prefix = "muster-worker: ";
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_SSH;
    if (strncmp(said, prefix, strlen(prefix)) == 0)
        said += strlen(prefix);
    if (run->late)
        snprintf(text, sizeof text, "no answer in time%s%s", said[0] ? "; the last it said: " : "", said);
    else if (code == EXIT_NO_PROGRAM || code == EXIT_NO_PERMISSION)
        snprintf(text, sizeof text, "answers, but %s '%s' there: install it, or name it with --program PATH (%s)",
                 code == EXIT_NO_PROGRAM ? "there is no program" : "nobody may run", launch->program, said);
    else if (code == EXIT_SSH)
        snprintf(text, sizeof text, "%s%s",
                 strncmp(said, "ssh: ", 5) == 0 ? "" : "ssh: ", said[0] ? said : "failed without a word");
    else if (said[0])
        snprintf(text, sizeof text, "%s", said);
    else
        snprintf(text, sizeof text, "ended with exit code %d", code);
    tell(launch, run->host, code == 0 && !run->late, text);
}

/* False: it has said everything. */
static bool read_more(struct run *run)
{
    char piece[1024];
    ssize_t got;
    while ((got = read(run->fd, piece, sizeof piece)) > 0) {
        size_t size = (size_t)got, room = TAIL_SIZE - 1 - run->tail_length;
        if (size > room) { /* the oldest goes */
            size_t gone = size - room;
            memmove(run->tail, run->tail + gone, run->tail_length - gone);
            run->tail_length -= gone;
        }
        memcpy(run->tail + run->tail_length, piece, size);
        run->tail_length += size;
    }
    return got < 0 && (errno == EAGAIN || errno == EINTR);
}

static bool has_ended(const struct run *run)
{
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)run->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == run->pid;
}

static void finish(struct launch *launch, struct run *run)
{
    int status = 0;
    while (waitpid(run->pid, &status, 0) < 0 && errno == EINTR)
        continue;
    close(run->fd);
    judge(launch, run, status);
    run->host = NULL;
}

/* Waits for one of them to say something, or for the first limit. */
static void serve(struct launch *launch, struct run *runs)
{
    struct pollfd *fds = calloc(launch->fanout, sizeof *fds);
    uint64_t until_us = UINT64_MAX, now_us = mu_clock_mono_us();
    for (size_t i = 0; fds && i < launch->fanout; i++) {
        fds[i] = (struct pollfd){.fd = runs[i].host ? runs[i].fd : -1, .events = POLLIN};
        if (runs[i].host && runs[i].until_us < until_us)
            until_us = runs[i].until_us;
    }
    uint64_t left_us = until_us > now_us ? until_us - now_us : 0;
    if (fds)
        poll(fds, launch->fanout, until_us == UINT64_MAX ? -1 : (int)(left_us / 1000 + 1));
    free(fds);
    now_us = mu_clock_mono_us();
    for (size_t i = 0; i < launch->fanout; i++) {
        struct run *run = &runs[i];
        if (!run->host)
            continue;
        bool over = !read_more(run);
        if (!over && now_us >= run->until_us) {
            run->late = !has_ended(run);
            kill(-run->pid, SIGKILL);
            over = true; /* what it has started may hold the pipe open */
        }
        if (over)
            finish(launch, run);
    }
}

static bool run_all(struct launch *launch, struct mu_error *err)
{
    struct run *runs = calloc(launch->fanout, sizeof *runs);
    size_t next = 0, running = 0;
    bool ok = runs != NULL || (mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu hosts", launch->hosts.count), false);
    while (ok && (next < launch->hosts.count || running)) {
        for (size_t i = 0; ok && i < launch->fanout && next < launch->hosts.count; i++) {
            if (!runs[i].host && (ok = start(launch, &runs[i], launch->hosts.names[next], err)))
                next++;
        }
        if (ok)
            serve(launch, runs);
        running = 0;
        for (size_t i = 0; i < launch->fanout; i++)
            running += runs[i].host != NULL;
    }
    free(runs);
    return ok;
}

/* ---- words ---- */

static int prepare_ssh(struct launch *launch, char *ssh)
{
    char *save = NULL;
    for (char *word = strtok_r(ssh, " \t", &save); word; word = strtok_r(NULL, " \t", &save)) {
        if (launch->ssh_word_count == SSH_WORDS_MAX)
            return mu_cli_usage("launch", "--ssh has more than %d words", SSH_WORDS_MAX);
        launch->ssh_words[launch->ssh_word_count++] = word;
    }
    if (launch->ssh_word_count == 0)
        return mu_cli_usage("launch", "--ssh is empty: a program with its options, as in --ssh 'ssh -p 2222'");
    snprintf(launch->connect, sizeof launch->connect, "ConnectTimeout=%llu",
             (unsigned long long)(launch->within_s < CONNECT_MAX_S ? launch->within_s : CONNECT_MAX_S));
    char *const ours[] = {(char *)(uintptr_t) "-o", (char *)(uintptr_t) "BatchMode=yes", (char *)(uintptr_t) "-o",
                          launch->connect};
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        launch->ssh_words[launch->ssh_word_count++] = ours[i];
    return MU_EXIT_OK;
}

/* The job is there and not over. */
static int check_job(struct launch *launch, const char *name)
{
    Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
    const Muster__V1__GetJobResponse *reply;
    if (!mu_wire_name_ok(name, sizeof launch->job))
        return mu_cli_usage("launch", "'%s' is not the name of a job: with --add, name one that runs", name);
    request.name = (char *)(uintptr_t)name;
    int code = mu_cli_call_or_exit(launch->cli, "GetJob", &request, &muster__v1__get_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (reply->job->state > MUSTER__V1__JOB_STATE__JOB_STATE_RUNNING) {
        fprintf(stderr, "muster: job '%s' is over (%s): it takes no workers\n", name,
                mu_cli_enum(&muster__v1__job_state__descriptor, (int)reply->job->state));
        return MU_EXIT_CONFLICT;
    }
    snprintf(launch->job, sizeof launch->job, "%s", name);
    return MU_EXIT_OK;
}

static int submit_job(struct launch *launch, char *path)
{
    struct mu_job_spec spec;
    struct mu_error err;
    int code = mu_cmd_submit(launch->cli, 1, &path);
    if (code != MU_EXIT_OK)
        return code;
    if (mu_job_file_read(path, &spec, &err) != MU_OK)
        return mu_cli_fail(&err);
    snprintf(launch->job, sizeof launch->job, "%s", spec.name);
    return MU_EXIT_OK;
}

static int report(const struct launch *launch)
{
    size_t started = launch->hosts.count - launch->failed;
    bool own = strncmp(launch->cli->address, "127.", 4) == 0 || strncmp(launch->cli->address, "[::1]", 5) == 0 ||
               strncmp(launch->cli->address, "localhost:", 10) == 0;
    if (!launch->cli->json)
        printf("%zu of %zu hosts work for job %s%s%s%s\n", started, launch->hosts.count, launch->job,
               launch->failed && own ? "; each host was given the coordinator " : "",
               launch->failed && own ? launch->cli->address : "",
               launch->failed && own ? ", which for it means itself" : "");
    return launch->failed ? MU_EXIT_FAILURE : MU_EXIT_OK;
}

static int run_launch(struct launch *launch, const char *hosts, char *ssh, bool add, char *job)
{
    struct mu_error err;
    int code = prepare_ssh(launch, ssh);
    if (code == MU_EXIT_OK && mu_hosts_read(hosts, &launch->hosts, &err) != MU_OK)
        code = mu_cli_fail(&err);
    if (code == MU_EXIT_OK)
        code = add ? check_job(launch, job) : submit_job(launch, job);
    if (code != MU_EXIT_OK)
        return code;
    return run_all(launch, &err) ? report(launch) : mu_cli_fail(&err);
}

int mu_cmd_launch(struct mu_cli *cli, int argc, char **argv)
{
    const char *hosts = NULL, *fanout = NULL, *within = NULL, *ssh = getenv("MUSTER_SSH");
    bool add = false;
    struct launch launch = {
        .cli = cli, .program = "muster-worker", .fanout = FANOUT_DEFAULT, .within_s = WITHIN_DEFAULT_S};
    const struct mu_cli_option options[] = {{"--hosts", &hosts, NULL},   {"--add", NULL, &add},
                                            {"--fanout", &fanout, NULL}, {"--within", &within, NULL},
                                            {"--ssh", &ssh, NULL},       {"--program", &launch.program, NULL}};
    int words = mu_cli_parse("launch", argc, argv, options, (int)(sizeof options / sizeof options[0]), 1, argc);
    if (words < 0 || (fanout && !mu_cli_number("launch", "--fanout", fanout, 1, FANOUT_MAX, &launch.fanout)) ||
        (within && !mu_cli_number("launch", "--within", within, 1, WITHIN_MAX_S, &launch.within_s)))
        return MU_EXIT_USAGE;
    if (!hosts)
        return mu_cli_usage("launch", "--hosts is missing: a file or a list as in node[01-16]");
    if (words > 1 && argv[1][0] != '-')
        return mu_cli_usage("launch", "'%s' is one word too many; options for the workers stand behind --", argv[1]);
    if (strncmp(cli->address, "unix:", 5) == 0)
        return mu_cli_usage("launch", "other hosts cannot reach the coordinator at %s: give --coordinator HOST:PORT",
                            cli->address);
    launch.words = argv + 1;
    launch.word_count = words - 1;
    char *copy = strdup(ssh && ssh[0] ? ssh : "ssh");
    int code = copy ? run_launch(&launch, hosts, copy, add, argv[0]) : MU_EXIT_FAILURE;
    free(copy);
    mu_hosts_fini(&launch.hosts);
    return code;
}
