#include "common/notify.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

static struct {
    struct sockaddr_un address;
    socklen_t address_size; /* 0: nobody listens */
    uint64_t period_us;     /* between signs of life; 0: none are wanted */
    uint64_t due_us;
} manager;

/* 0: not a number, or none. */
static uint64_t number_of(const char *name)
{
    const char *text = getenv(name);
    char *end = NULL;
    unsigned long long value = text && text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    return end && *end == 0 ? value : 0;
}

void mu_notify_init(void)
{
    const char *path = getenv("NOTIFY_SOCKET");
    size_t length = path ? strlen(path) : 0;
    uint64_t pid = number_of("WATCHDOG_PID");
    memset(&manager, 0, sizeof manager);
    if (length > 1 && length < sizeof manager.address.sun_path && (path[0] == '/' || path[0] == '@')) {
        manager.address.sun_family = AF_UNIX;
        memcpy(manager.address.sun_path, path, length);
        if (path[0] == '@') /* an abstract name */
            manager.address.sun_path[0] = 0;
        manager.address_size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    }
    if (pid == 0 || pid == (uint64_t)getpid())
        manager.period_us = number_of("WATCHDOG_USEC") / 2;
    static const char *const names[] = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"};
    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++)
        unsetenv(names[i]);
}

void mu_notify(const char *fmt, ...)
{
    char text[1024];
    if (manager.address_size == 0)
        return;
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || length < 0)
        return;
    size_t size = (size_t)length < sizeof text ? (size_t)length : sizeof text - 1;
    struct timeval patience = {.tv_sec = 1}; /* a manager that is busy has a full queue for a moment */
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    ssize_t ignored =
        sendto(fd, text, size, MSG_NOSIGNAL, (const struct sockaddr *)&manager.address, manager.address_size);
    (void)ignored; /* one that does not listen is not this service's trouble */
    close(fd);
}

uint64_t mu_notify_alive(uint64_t now_us)
{
    if (manager.address_size == 0 || manager.period_us == 0)
        return UINT64_MAX;
    if (now_us >= manager.due_us) {
        mu_notify("WATCHDOG=1");
        manager.due_us = now_us + manager.period_us;
    }
    return manager.due_us;
}
