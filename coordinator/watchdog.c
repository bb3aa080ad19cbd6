#include "coordinator/watchdog.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

/* What an HTTP/2 client says first (RFC 9113, 3.4), with an empty SETTINGS frame. */
static const char greeting[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";

void mu_watchdog_init(struct mu_watchdog *watchdog, const char *address)
{
    char host[256];
    const char *colon = strrchr(address, ':');
    size_t length = colon ? (size_t)(colon - address) : 0;
    *watchdog = (struct mu_watchdog){.fd = -1};
    if (strncmp(address, "unix:", 5) == 0 || length == 0 || length >= sizeof host)
        return;
    bool bracketed = address[0] == '[';
    memcpy(host, address + bracketed, length);
    host[length - 2 * bracketed] = 0;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *found = NULL;
    if (getaddrinfo(host, colon + 1, &hints, &found) != 0 || !found)
        return;
    memcpy(&watchdog->to, found->ai_addr, found->ai_addrlen);
    watchdog->to_size = found->ai_addrlen;
    freeaddrinfo(found);
}

static void hang_up(struct mu_watchdog *watchdog)
{
    if (watchdog->fd >= 0)
        close(watchdog->fd);
    watchdog->fd = -1;
    watchdog->greeted = false;
}

void mu_watchdog_fini(struct mu_watchdog *watchdog)
{
    hang_up(watchdog);
}

static bool has_descriptor(void)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno != EMFILE && errno != ENFILE;
    close(fd);
    return true;
}

/* Not connected yet is no failure: the listener's queue may be full. */
static void dial(struct mu_watchdog *watchdog, uint64_t now_us)
{
    int fd = socket(watchdog->to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return; /* still none: next time */
    if (connect(fd, (struct sockaddr *)&watchdog->to, watchdog->to_size) != 0 && errno != EINPROGRESS) {
        close(fd);
        return;
    }
    watchdog->fd = fd;
    watchdog->answer_until_us = now_us + MU_WATCHDOG_ANSWER_MS * 1000ull;
}

/* Anything the server says or does with the connection shows that it took it. */
static bool is_answered(struct mu_watchdog *watchdog)
{
    char byte;
    if (!watchdog->greeted)
        watchdog->greeted = send(watchdog->fd, greeting, sizeof greeting - 1, MSG_NOSIGNAL) > 0;
    return watchdog->greeted && (recv(watchdog->fd, &byte, 1, MSG_DONTWAIT) >= 0 || errno == ECONNRESET);
}

bool mu_watchdog_look(struct mu_watchdog *watchdog, uint64_t now_us)
{
    if (now_us < watchdog->next_us || watchdog->to_size == 0)
        return false;
    watchdog->next_us = now_us + MU_WATCHDOG_LOOK_MS * 1000ull;
    if (!watchdog->suspicious) {
        watchdog->suspicious = !has_descriptor();
        return false;
    }
    if (watchdog->fd < 0)
        dial(watchdog, now_us);
    if (watchdog->fd < 0)
        return false;
    if (is_answered(watchdog)) {
        hang_up(watchdog);
        watchdog->suspicious = false;
        return false;
    }
    return now_us >= watchdog->answer_until_us;
}
