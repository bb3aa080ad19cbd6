#include "bench/attach.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_MS = 100, OPENS_AT_ONCE = 256 };

/* What an HTTP/2 client says first (RFC 9113, 3.4), with an empty SETTINGS frame. */
static const char greeting[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";

struct idlers {
    struct attach_shared *shared;
    struct sockaddr_in to;
    struct pollfd *fds; /* fd -1: to be opened (again) */
    uint32_t count;
};

static bool parse_address(const char *text, struct sockaddr_in *ret_to)
{
    char host[64];
    unsigned port = 0;
    *ret_to = (struct sockaddr_in){.sin_family = AF_INET};
    if (sscanf(text, "%63[0-9.]:%u", host, &port) != 2 || inet_pton(AF_INET, host, &ret_to->sin_addr) != 1)
        return false;
    ret_to->sin_port = htons((uint16_t)port);
    return true;
}

/* Blocking: on the loopback a connection is there at once, or the listener's queue is full and the kernel retries. */
static void open_one(struct idlers *idlers, uint32_t i)
{
    struct attach_shared *shared = idlers->shared;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool connected = fd >= 0 && connect(fd, (struct sockaddr *)&idlers->to, sizeof idlers->to) == 0;
    if (connected && i % 2 == 1)
        connected = send(fd, greeting, sizeof greeting - 1, MSG_NOSIGNAL) == (ssize_t)sizeof greeting - 1;
    if (!connected) {
        if (fd >= 0)
            close(fd);
        atomic_fetch_add(&shared->idle_failed, 1);
        return;
    }
    idlers->fds[i] = (struct pollfd){.fd = fd, .events = POLLIN};
    atomic_fetch_add(&shared->idle_opened, 1);
    atomic_fetch_add(&shared->idle_open, 1);
}

/* What the server says is read and ignored; when it has closed, the place is free again. */
static void look_at(struct idlers *idlers, struct pollfd *at)
{
    char ignored[4096];
    ssize_t got = recv(at->fd, ignored, sizeof ignored, MSG_DONTWAIT);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    close(at->fd);
    at->fd = -1;
    atomic_fetch_sub(&idlers->shared->idle_open, 1);
    atomic_fetch_add(&idlers->shared->idle_closed, 1);
}

int attach_idle_main(struct attach_shared *shared, uint32_t process)
{
    struct idlers idlers = {.shared = shared};
    idlers.count = (shared->idle + shared->idle_processes - 1 - process) / shared->idle_processes;
    idlers.fds = calloc(idlers.count, sizeof *idlers.fds);
    if (!idlers.fds || !parse_address(shared->address, &idlers.to)) {
        fprintf(stderr, "bench_attach: idler: cannot start at '%s'\n", shared->address);
        return 1;
    }
    for (uint32_t i = 0; i < idlers.count; i++)
        idlers.fds[i].fd = -1;
    atomic_fetch_add(&shared->ready, 1);
    while (!atomic_load(&shared->stop)) {
        int ready = poll(idlers.fds, idlers.count, LOOK_MS);
        for (uint32_t i = 0; ready > 0 && i < idlers.count; i++) {
            if (idlers.fds[i].fd >= 0 && idlers.fds[i].revents)
                look_at(&idlers, &idlers.fds[i]);
        }
        uint32_t opened = 0;
        for (uint32_t i = 0; atomic_load(&shared->start_idle) && i < idlers.count && opened < OPENS_AT_ONCE; i++) {
            if (idlers.fds[i].fd < 0) {
                open_one(&idlers, i);
                opened++;
            }
        }
    }
    return 0;
}
