#include "common/fault.h"

#ifdef MU_FAULTS
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void leave_a_trace(const char *name)
{
    const char *path = getenv("MU_FAULT_LOG");
    if (!path)
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    char line[160];
    int n = snprintf(line, sizeof line, "%s pid=%d\n", name, (int)getpid());
    ssize_t ignored = write(fd, line, (size_t)n);
    (void)ignored;
    close(fd);
}

void mu_fault_reached(const char *name)
{
    static atomic_long hits;
    const char *armed = getenv("MU_FAULT_AT");
    size_t length = strlen(name);
    if (!armed || strncmp(armed, name, length) != 0 || (armed[length] && !strchr(":,", armed[length])))
        return;
    long wanted = armed[length] == ':' ? strtol(armed + length + 1, NULL, 10) : 1;
    if (atomic_fetch_add(&hits, 1) + 1 != wanted)
        return;
    leave_a_trace(name);
    const char *action = strchr(armed, ',');
    if (action && strncmp(action, ",sleep=", 7) == 0) {
        long ms = strtol(action + 7, NULL, 10);
        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
    } else {
        raise(action && strcmp(action, ",stop") == 0 ? SIGSTOP : SIGKILL);
    }
}
#endif
