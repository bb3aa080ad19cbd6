#include "worker/detach.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LINE_SIZE = 1024, FAILURE = 1 };

bool mu_detach_default_log(const char *name, char *out, size_t size)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int length = -1;
    if (state && state[0] == '/')
        length = snprintf(out, size, "%s/muster/%s.log", state, name);
    else if (home && home[0] == '/')
        length = snprintf(out, size, "%s/.local/state/muster/%s.log", home, name);
    return length > 0 && (size_t)length < size;
}

/* What is there already is fine; what cannot be made shows when the file is opened. */
static void make_folders(const char *path)
{
    char folder[4096];
    if (snprintf(folder, sizeof folder, "%s", path) >= (int)sizeof folder)
        return;
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(folder, 0755);
        *slash = '/';
    }
}

/* Another user's link must not lead the output somewhere else. */
static int open_log(const char *path)
{
    make_folders(path);
    return open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
}

/* The line from the background: without its newline, empty when all is well. False: it ended without one. */
static bool read_line(int fd, char line[LINE_SIZE])
{
    size_t used = 0;
    for (;;) {
        ssize_t got = read(fd, line + used, LINE_SIZE - 1 - used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        used += (size_t)got;
        char *end = memchr(line, '\n', used);
        if (end) {
            *end = 0;
            return true;
        }
    }
    line[used] = 0;
    return false;
}

static int wait_for_line(int fd, pid_t pid, const char *log)
{
    char line[LINE_SIZE];
    int status = 0;
    bool said = read_line(fd, line);
    if (said && line[0] == 0) {
        printf("muster-worker: attached, in the background as pid %d, output in %s\n", (int)pid, log);
        return 0;
    }
    waitpid(pid, &status, 0);
    fprintf(stderr, "muster-worker: %s (output in %s)\n", said ? line : "it did not start", log);
    return WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : FAILURE;
}

static bool enter_background(int log_fd)
{
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    bool ok = nothing >= 0 && setsid() >= 0 && dup2(nothing, STDIN_FILENO) >= 0 && dup2(log_fd, STDOUT_FILENO) >= 0 &&
              dup2(log_fd, STDERR_FILENO) >= 0;
    if (nothing >= 0)
        close(nothing);
    return ok;
}

bool mu_detach(const char *log, int *ret_ready_fd, int *ret_code)
{
    int fds[2] = {-1, -1}, log_fd = open_log(log);
    *ret_code = FAILURE;
    if (log_fd < 0 || pipe2(fds, O_CLOEXEC) != 0) {
        fprintf(stderr, "muster-worker: --log: cannot write '%s': %s\n", log, strerror(errno));
        if (log_fd >= 0)
            close(log_fd);
        return false;
    }
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        if (!enter_background(log_fd))
            _exit(FAILURE);
        close(log_fd);
        *ret_ready_fd = fds[1];
        return true;
    }
    close(fds[1]);
    close(log_fd);
    signal(SIGTERM, SIG_DFL); /* what is in the background sees its reader go, and does not stay */
    signal(SIGINT, SIG_DFL);
    if (pid < 0)
        fprintf(stderr, "muster-worker: cannot start a process: %s\n", strerror(errno));
    else
        *ret_code = wait_for_line(fds[0], pid, log);
    close(fds[0]);
    return false;
}
