/* Where this process listens, and how that is written down: "host=<id>;unix=@<name>;tcp=<literal address>:<port>". */
#include "worker/comm_internal.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/hash.h"

enum { BACKLOG = 4096 /* the kernel caps it at net.core.somaxconn */ };

/* ---- literal TCP addresses ---- */

/* "A", "A:port", "[A]:port"; splits into host and port text ("0" when absent). Returns false when it is neither. */
static bool split_host_port(const char *text, char *host, size_t host_size, char *port, size_t port_size)
{
    const char *end = text + strlen(text);
    const char *host_begin = text, *host_end, *port_begin = NULL;
    if (*text == '[') {
        host_begin = text + 1;
        host_end = strchr(text, ']');
        if (!host_end || (host_end[1] && host_end[1] != ':'))
            return false;
        if (host_end[1] == ':')
            port_begin = host_end + 2;
    } else {
        const char *colon = strchr(text, ':');
        bool bare_ipv6 = colon && strchr(colon + 1, ':');
        host_end = colon && !bare_ipv6 ? colon : end;
        if (colon && !bare_ipv6)
            port_begin = colon + 1;
    }
    size_t host_length = (size_t)(host_end - host_begin);
    size_t port_length = port_begin ? (size_t)(end - port_begin) : 0;
    if (host_length == 0 || host_length >= host_size || port_length >= port_size || (port_begin && port_length == 0))
        return false;
    memcpy(host, host_begin, host_length);
    host[host_length] = 0;
    snprintf(port, port_size, "%s", port_begin ? port_begin : "0");
    return strspn(port, "0123456789") == strlen(port) && strtoul(port, NULL, 10) <= 65535;
}

static bool resolve(const char *text, int flags, int type, struct sockaddr_storage *ret_address, socklen_t *ret_size)
{
    char host[MU_COMM_TCP_TEXT_SIZE], port[8];
    if (!split_host_port(text, host, sizeof host, port, sizeof port))
        return false;
    struct addrinfo hints = {.ai_flags = flags | AI_NUMERICSERV, .ai_family = AF_UNSPEC, .ai_socktype = type};
    struct addrinfo *found = NULL;
    if (getaddrinfo(host, port, &hints, &found) != 0)
        return false;
    memcpy(ret_address, found->ai_addr, found->ai_addrlen);
    *ret_size = found->ai_addrlen;
    freeaddrinfo(found);
    return true;
}

static bool is_dialable(const struct sockaddr_storage *address)
{
    if (address->ss_family == AF_INET) {
        uint32_t ip = ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr);
        return ip != INADDR_ANY && (ip >> 28) != 14;
    }
    const struct in6_addr *ip = &((const struct sockaddr_in6 *)address)->sin6_addr;
    return !IN6_IS_ADDR_UNSPECIFIED(ip) && !IN6_IS_ADDR_MULTICAST(ip) && !IN6_IS_ADDR_LINKLOCAL(ip);
}

void mu_comm_tcp_text(const struct sockaddr_storage *address, char out[MU_COMM_TCP_TEXT_SIZE])
{
    char host[INET6_ADDRSTRLEN] = "";
    if (address->ss_family == AF_INET) {
        const struct sockaddr_in *in4 = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &in4->sin_addr, host, sizeof host);
        snprintf(out, MU_COMM_TCP_TEXT_SIZE, "%s:%u", host, (unsigned)ntohs(in4->sin_port));
    } else {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;
        inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof host);
        snprintf(out, MU_COMM_TCP_TEXT_SIZE, "[%s]:%u", host, (unsigned)ntohs(in6->sin6_port));
    }
}

/* The local address from which packets to `to` leave; no packet is sent. */
static enum mu_status route_address(const char *to, struct sockaddr_storage *ret_address, socklen_t *ret_size,
                                    struct mu_error *err)
{
    struct sockaddr_storage target, local;
    socklen_t target_size, local_size = sizeof local;
    if (!resolve(to, 0, SOCK_DGRAM, &target, &target_size))
        return mu_fail(err, MU_ERR_INVALID,
                       "coordinator address \"%s\" cannot be resolved; give host:port, or set --data-addr", to);
    if (target.ss_family == AF_INET && ((struct sockaddr_in *)&target)->sin_port == 0)
        ((struct sockaddr_in *)&target)->sin_port = htons(9);
    if (target.ss_family == AF_INET6 && ((struct sockaddr_in6 *)&target)->sin6_port == 0)
        ((struct sockaddr_in6 *)&target)->sin6_port = htons(9);
    int fd = socket(target.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return mu_fail_errno(err, errno, "cannot make a socket to find the route to %s", to);
    enum mu_status status = MU_OK;
    if (connect(fd, (struct sockaddr *)&target, target_size) != 0 ||
        getsockname(fd, (struct sockaddr *)&local, &local_size) != 0)
        status =
            mu_fail_errno(err, errno, "no route to the coordinator at %s; check the network or set --data-addr", to);
    close(fd);
    if (status != MU_OK)
        return status;
    if (local.ss_family == AF_INET)
        ((struct sockaddr_in *)&local)->sin_port = 0;
    else
        ((struct sockaddr_in6 *)&local)->sin6_port = 0;
    *ret_address = local;
    *ret_size = local_size;
    return MU_OK;
}

static enum mu_status choose_address(const struct mu_comm_config *config, struct sockaddr_storage *ret_address,
                                     socklen_t *ret_size, struct mu_error *err)
{
    if (!config->data_addr && config->route_to && config->route_to[0]) {
        enum mu_status status = route_address(config->route_to, ret_address, ret_size, err);
        if (status != MU_OK)
            return status;
    } else {
        const char *text = config->data_addr ? config->data_addr : "127.0.0.1";
        if (!resolve(text, AI_NUMERICHOST, SOCK_STREAM, ret_address, ret_size))
            return mu_fail(
                err, MU_ERR_INVALID,
                "data address \"%s\" is not a literal address; write 192.0.2.1, 192.0.2.1:4711 or [2001:db8::1]:4711",
                text);
    }
    char text[MU_COMM_TCP_TEXT_SIZE];
    mu_comm_tcp_text(ret_address, text);
    if (!is_dialable(ret_address))
        return mu_fail(err, MU_ERR_INVALID,
                       "data address %s cannot be dialled by other hosts (wildcard, multicast or link-local); give "
                       "--data-addr one of "
                       "this host's addresses",
                       text);
    return MU_OK;
}

/* ---- listening ---- */

static enum mu_status listen_tcp(struct mu_comm *comm, const struct mu_comm_config *config,
                                 char out[MU_COMM_TCP_TEXT_SIZE], struct mu_error *err)
{
    struct sockaddr_storage address;
    socklen_t size;
    enum mu_status status = choose_address(config, &address, &size, err);
    if (status != MU_OK)
        return status;
    mu_comm_tcp_text(&address, out);
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return mu_fail_errno(err, errno, "cannot make a TCP socket for %s", out);
    comm->tcp_listener = (struct source){.kind = SOURCE_LISTENER, .fd = fd};
    int on = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on,
                     sizeof on); /* without it a fixed port stays busy for a minute */
    if (address.ss_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, size) != 0)
        return mu_fail_errno(
            err, errno, "cannot listen on %s; --data-addr must be an address of this host and a free port (or port 0)",
            out);
    size = sizeof address;
    if (listen(fd, BACKLOG) != 0 || getsockname(fd, (struct sockaddr *)&address, &size) != 0)
        return mu_fail_errno(err, errno, "cannot listen on %s", out);
    mu_comm_tcp_text(&address, out);
    return MU_OK;
}

/* "@name" is abstract; anything else is a path. False: too long. */
static bool unix_address(const char *text, struct sockaddr_un *ret_address, socklen_t *ret_size)
{
    size_t length = strlen(text);
    memset(ret_address, 0, sizeof *ret_address);
    ret_address->sun_family = AF_UNIX;
    if (length < 2 || length >= sizeof ret_address->sun_path)
        return false;
    memcpy(ret_address->sun_path, text, length);
    if (*text == '@')
        ret_address->sun_path[0] = 0;
    *ret_size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length + (*text == '@' ? 0 : 1));
    return true;
}

static enum mu_status listen_unix(struct mu_comm *comm, const struct mu_comm_config *config, char *out, size_t out_size,
                                  struct mu_error *err)
{
    struct mu_id id = mu_id_random();
    char name[33];
    struct sockaddr_un address;
    socklen_t size;
    mu_hex(&id, sizeof id, name);
    int length = config->unix_dir ? snprintf(out, out_size, "%s/muster-%.16s.sock", config->unix_dir, name)
                                  : snprintf(out, out_size, "@muster-%s", name);
    if (length < 0 || (size_t)length >= out_size || strchr(out, ';') || !unix_address(out, &address, &size))
        return mu_fail(err, MU_ERR_INVALID,
                       "directory \"%s\" cannot hold the data plane's socket: at most %zu characters, without \";\"",
                       config->unix_dir, sizeof address.sun_path - sizeof "/muster-0123456789abcdef.sock");
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return mu_fail_errno(err, errno, "cannot make a Unix socket");
    comm->unix_listener = (struct source){.kind = SOURCE_LISTENER, .fd = fd};
    if (bind(fd, (struct sockaddr *)&address, size) != 0)
        return mu_fail_errno(err, errno, "cannot listen on Unix socket %s", out);
    if (config->unix_dir)
        snprintf(comm->unix_path, sizeof comm->unix_path, "%s", out);
    if (listen(fd, BACKLOG) != 0)
        return mu_fail_errno(err, errno, "cannot listen on Unix socket %s", out);
    return MU_OK;
}

/* ---- host identity ---- */

static bool host_id_fits(const char *id)
{
    size_t length = strlen(id);
    return length > 0 && length < MU_COMM_HOST_ID_SIZE &&
           strspn(id, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == length;
}

/* Abstract names are seen within one network namespace, files by everybody who sees the directory. */
static enum mu_status derive_host_id(struct mu_comm *comm, bool abstract, struct mu_error *err)
{
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    char boot[40] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, boot, sizeof boot - 1);
    int error = errno;
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return mu_fail_errno(err, error, "cannot read %s to tell hosts apart; give the host id explicitly", path);
    boot[strcspn(boot, "\n")] = 0;
    struct stat space = {0};
    if (abstract && stat("/proc/self/ns/net", &space) != 0)
        return mu_fail_errno(err, errno,
                             "cannot look at /proc/self/ns/net to tell hosts apart; give the host id explicitly");
    snprintf(comm->host_id, sizeof comm->host_id, "%.36s-%lx", boot, abstract ? (unsigned long)space.st_ino : 0ul);
    return MU_OK;
}

enum mu_status mu_comm_listen(struct mu_comm *comm, const struct mu_comm_config *config, struct mu_error *err)
{
    char tcp[MU_COMM_TCP_TEXT_SIZE], local[sizeof comm->unix_path];
    enum mu_status status = MU_OK;
    if (config->host_id && !host_id_fits(config->host_id))
        return mu_fail(err, MU_ERR_INVALID, "host id \"%s\" is not allowed: 1 to %d of [A-Za-z0-9._-]", config->host_id,
                       (int)MU_COMM_HOST_ID_SIZE - 1);
    if (config->host_id)
        snprintf(comm->host_id, sizeof comm->host_id, "%s", config->host_id);
    else
        status = derive_host_id(comm, !config->unix_dir, err);
    if (status == MU_OK)
        status = listen_tcp(comm, config, tcp, err);
    if (status == MU_OK)
        status = listen_unix(comm, config, local, sizeof local, err);
    if (status != MU_OK)
        return status;
    int length = snprintf(comm->address, sizeof comm->address, "host=%s;unix=%s;tcp=%s", comm->host_id, local, tcp);
    if (length < 0 || (size_t)length >= sizeof comm->address)
        return mu_fail(err, MU_ERR_LIMIT,
                       "the data plane's address has %d characters, at most %d are allowed; shorten the Unix directory",
                       length, (int)MU_COMM_ADDRESS_SIZE - 1);
    return MU_OK;
}

/* ---- parsing ---- */

/* Copies the value of `key` ("host=") into out. */
static bool field(const char *text, const char *key, char *out, size_t out_size)
{
    size_t key_length = strlen(key);
    while (text) {
        if (strncmp(text, key, key_length) == 0) {
            size_t length = strcspn(text + key_length, ";");
            if (length == 0 || length >= out_size)
                return false;
            memcpy(out, text + key_length, length);
            out[length] = 0;
            return true;
        }
        text = strchr(text, ';');
        text = text ? text + 1 : NULL;
    }
    return false;
}

enum mu_status mu_comm_address_parse(const char *text, struct literal_address *ret_address, struct mu_error *err)
{
    struct literal_address address = {0};
    char local[sizeof address.local.sun_path], tcp[MU_COMM_TCP_TEXT_SIZE];
    if (!text || strlen(text) >= MU_COMM_ADDRESS_SIZE ||
        !field(text, "host=", address.host_id, sizeof address.host_id) || !host_id_fits(address.host_id) ||
        !field(text, "unix=", local, sizeof local) || !field(text, "tcp=", tcp, sizeof tcp) ||
        !unix_address(local, &address.local, &address.local_size) ||
        !resolve(tcp, AI_NUMERICHOST, SOCK_STREAM, &address.tcp, &address.tcp_size))
        return mu_fail(err, MU_ERR_INVALID,
                       "data plane address \"%.128s\" is malformed; it must read host=<id>;unix=@<name>;tcp=<literal "
                       "address>:<port>",
                       text ? text : "");
    *ret_address = address;
    return MU_OK;
}

enum mu_status mu_comm_route_to(const char *coordinator, char *out, size_t size, struct mu_error *err)
{
    char host[256], literal[128];
    const char *colon = strrchr(coordinator, ':'), *port = colon ? colon + 1 : "";
    size_t length = colon ? (size_t)(colon - coordinator) : 0;
    out[0] = 0;
    if (strncmp(coordinator, "unix:", 5) == 0 || length == 0 || length >= sizeof host || !*port ||
        strspn(port, "0123456789") != strlen(port) || strtoul(port, NULL, 10) > 65535)
        return MU_OK;
    bool bracketed = coordinator[0] == '[' && colon[-1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(length - 2 * bracketed), coordinator + bracketed);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    int reason = getaddrinfo(host, port, &hints, &found);
    if (reason == 0) {
        reason = getnameinfo(found->ai_addr, found->ai_addrlen, literal, sizeof literal, NULL, 0, NI_NUMERICHOST);
        if (reason == 0)
            snprintf(out, size, found->ai_family == AF_INET6 ? "[%s]:%s" : "%s:%s", literal, port);
        freeaddrinfo(found);
    }
    return reason == 0 ? MU_OK
                       : mu_fail(err, MU_ERR_UNAVAILABLE, "the name in '%s' cannot be resolved: %s", coordinator,
                                 reason == EAI_SYSTEM ? strerror(errno) : gai_strerror(reason));
}
