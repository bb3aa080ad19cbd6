#include "rpc/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static const char unix_prefix[] = "unix:";

static enum mu_status parse_unix(const char *text, struct mu_error *err, struct mu_rpc_address *ret_address)
{
    const char *path = text + sizeof unix_prefix - 1;
    size_t length = strlen(path), max = sizeof((struct sockaddr_un *)0)->sun_path - 1;
    if (length == 0 || length > max)
        return mu_fail(err, MU_ERR_INVALID, "address '%s': the path of a Unix socket has 1 to %zu characters, not %zu",
                       text, max, length);
    ret_address->kind = MU_RPC_ADDRESS_UNIX;
    ret_address->port = 0;
    memcpy(ret_address->host, path, length + 1);
    return MU_OK;
}

static bool parse_port(const char *text, uint16_t *ret_port)
{
    size_t length = strlen(text);
    if (length == 0 || length > 5 || strspn(text, "0123456789") != length)
        return false;
    unsigned long port = strtoul(text, NULL, 10);
    if (port > UINT16_MAX)
        return false;
    *ret_port = (uint16_t)port;
    return true;
}

/* Letters, digits, '-', '.', '_': nothing that means something to the core's own parser of targets. */
static bool is_name(const char *text)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._";
    return text[0] && strspn(text, allowed) == strlen(text);
}

enum mu_status mu_rpc_address_parse(const char *text, struct mu_error *err, struct mu_rpc_address *ret_address)
{
    static const char wanted[] = "expected host:port, [IPv6]:port or unix:/path";
    if (!text || !text[0])
        return mu_fail(err, MU_ERR_INVALID, "the address is empty; %s", wanted);
    if (strncmp(text, unix_prefix, sizeof unix_prefix - 1) == 0)
        return parse_unix(text, err, ret_address);

    struct mu_rpc_address address = {.kind = MU_RPC_ADDRESS_NAME};
    const char *colon = strrchr(text, ':');
    if (!colon)
        return mu_fail(err, MU_ERR_INVALID, "address '%.200s' has no port; %s", text, wanted);
    if (!parse_port(colon + 1, &address.port))
        return mu_fail(err, MU_ERR_INVALID, "address '%.200s': port '%.40s' is not a number from 0 to 65535", text,
                       colon + 1);
    const char *host = text;
    size_t length = (size_t)(colon - text);
    bool bracketed = length >= 2 && text[0] == '[' && text[length - 1] == ']';
    if (bracketed) {
        host++;
        length -= 2;
    }
    if (length == 0 || length >= sizeof address.host)
        return mu_fail(err, MU_ERR_INVALID, "address '%.200s': the host has 1 to %zu characters; %s", text,
                       sizeof address.host - 1, wanted);
    memcpy(address.host, host, length);
    struct in6_addr binary;
    if (bracketed) {
        if (inet_pton(AF_INET6, address.host, &binary) != 1)
            return mu_fail(err, MU_ERR_INVALID, "address '%.200s': '%.60s' is not an IPv6 address", text, address.host);
        address.kind = MU_RPC_ADDRESS_IPV6;
    } else if (inet_pton(AF_INET, address.host, &binary) == 1) {
        address.kind = MU_RPC_ADDRESS_IPV4;
    } else if (!is_name(address.host)) {
        return mu_fail(err, MU_ERR_INVALID, "address '%.200s': '%.60s' is not a host; %s", text, address.host, wanted);
    }
    *ret_address = address;
    return MU_OK;
}

void mu_rpc_address_format(const struct mu_rpc_address *address, char out[MU_RPC_TARGET_SIZE])
{
    if (address->kind == MU_RPC_ADDRESS_UNIX)
        snprintf(out, MU_RPC_TARGET_SIZE, "unix:%s", address->host);
    else
        snprintf(out, MU_RPC_TARGET_SIZE, address->kind == MU_RPC_ADDRESS_IPV6 ? "[%s]:%u" : "%s:%u", address->host,
                 (unsigned)address->port);
}

void mu_rpc_address_dial_target(const struct mu_rpc_address *address, char out[MU_RPC_TARGET_SIZE])
{
    static const char *const formats[] = {[MU_RPC_ADDRESS_IPV4] = "ipv4:%s:%u",
                                          [MU_RPC_ADDRESS_IPV6] = "ipv6:[%s]:%u",
                                          [MU_RPC_ADDRESS_NAME] = "dns:///%s:%u"};
    if (address->kind == MU_RPC_ADDRESS_UNIX)
        mu_rpc_address_format(address, out);
    else
        snprintf(out, MU_RPC_TARGET_SIZE, formats[address->kind], address->host, (unsigned)address->port);
}

static struct sockaddr_un unix_sockaddr(const struct mu_rpc_address *address)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    memcpy(to.sun_path, address->host, strlen(address->host) + 1);
    return to;
}

enum mu_status mu_rpc_address_check_free(const struct mu_rpc_address *address, struct mu_error *err)
{
    if (address->kind != MU_RPC_ADDRESS_UNIX)
        return MU_OK;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return mu_fail_errno(err, errno, "cannot open a socket");
    struct sockaddr_un to = unix_sockaddr(address);
    int failed = connect(fd, (struct sockaddr *)&to, sizeof to) == 0 ? 0 : errno;
    close(fd);
    if (failed == 0 || failed == EAGAIN)
        return mu_fail(err, MU_ERR_BUSY,
                       "cannot listen on unix:%s: another process listens there; stop it or choose another address",
                       address->host);
    return MU_OK;
}

/* Binds as the core does; 0 or errno. */
static int try_bind(int family, const struct sockaddr *to, socklen_t size)
{
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    int on = 1;
    int failed = 0;
    if (family != AF_UNIX && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
        failed = errno;
    else if (bind(fd, to, size) != 0 || listen(fd, 1) != 0)
        failed = errno;
    close(fd);
    return failed;
}

static enum mu_status explain_errno(int failed, const char *text, struct mu_error *err)
{
    switch (failed) {
    case 0:
        return mu_fail(err, MU_ERR_UNAVAILABLE, "cannot listen on %s: the address was in use a moment ago; try again",
                       text);
    case EADDRINUSE:
        return mu_fail(err, MU_ERR_BUSY,
                       "cannot listen on %s: the port is in use by another process; stop it or choose another port (0: "
                       "any free one)",
                       text);
    case EADDRNOTAVAIL:
        return mu_fail(err, MU_ERR_INVALID,
                       "cannot listen on %s: this machine does not have that address (see `ip address`)", text);
    case EACCES:
        return mu_fail(err, MU_ERR_DENIED,
                       "cannot listen on %s: not permitted; choose a port from 1024 on or a directory you may write to",
                       text);
    default:
        return mu_fail_errno(err, failed, "cannot listen on %s", text);
    }
}

enum mu_status mu_rpc_address_explain(const struct mu_rpc_address *address, struct mu_error *err)
{
    char text[MU_RPC_TARGET_SIZE], port[8];
    mu_rpc_address_format(address, text);
    if (address->kind == MU_RPC_ADDRESS_UNIX) {
        struct sockaddr_un to = unix_sockaddr(address);
        int failed = try_bind(AF_UNIX, (const struct sockaddr *)&to, sizeof to);
        if (failed == 0)
            unlink(address->host);
        return explain_errno(failed, text, err);
    }
    snprintf(port, sizeof port, "%u", (unsigned)address->port);
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *found = NULL;
    int unresolved = getaddrinfo(address->host, port, &hints, &found);
    if (unresolved != 0)
        return mu_fail(err, MU_ERR_INVALID, "cannot listen on %s: %s; use a literal address of this machine", text,
                       gai_strerror(unresolved));
    int failed = 0;
    for (const struct addrinfo *at = found; at && failed == 0; at = at->ai_next)
        failed = try_bind(at->ai_family, at->ai_addr, at->ai_addrlen);
    freeaddrinfo(found);
    return explain_errno(failed, text, err);
}

void mu_rpc_address_peer(const char *core_text, char *out, size_t size)
{
    const char *from = core_text;
    if (strncmp(from, "ipv4:", 5) == 0 || strncmp(from, "ipv6:", 5) == 0)
        from += 5;
    size_t used = 0;
    while (*from && used + 1 < size) {
        if (strncmp(from, "%5B", 3) == 0 || strncmp(from, "%5D", 3) == 0) {
            out[used++] = from[2] == 'B' ? '[' : ']';
            from += 3;
        } else {
            out[used++] = *from++;
        }
    }
    out[used] = '\0';
}
