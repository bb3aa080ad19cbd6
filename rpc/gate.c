#include "rpc/gate.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "rpc/guests.h"

struct mu_rpc_gate {
    struct mu_rpc_gate *next;
    struct mu_rpc_address address;
    unsigned per_peer, silent_s, answer_s;
    struct mu_rpc_guests *guests;
    int reserve; /* a descriptor to give up; -1: it could not be had again yet */
    struct mu_rpc_refusals refusals;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mu_rpc_gate *gates; /* under the lock, as is all that they hold */
static atomic_uint gate_count;    /* processes without one take no lock */

static int plain_accept(int listener, struct sockaddr *from, socklen_t *size, int flags)
{
    return (int)syscall(SYS_accept4, listener, from, size, flags);
}

static struct mu_rpc_gate *gate_of(int listener)
{
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    if (getsockname(listener, (struct sockaddr *)&own, &size) != 0)
        return NULL;
    for (struct mu_rpc_gate *gate = gates; gate; gate = gate->next) {
        bool is_unix = gate->address.kind == MU_RPC_ADDRESS_UNIX;
        in_port_t port = htons(gate->address.port);
        if ((own.ss_family == AF_INET && !is_unix && ((struct sockaddr_in *)&own)->sin_port == port) ||
            (own.ss_family == AF_INET6 && !is_unix && ((struct sockaddr_in6 *)&own)->sin6_port == port) ||
            (own.ss_family == AF_UNIX && is_unix &&
             strcmp(((struct sockaddr_un *)&own)->sun_path, gate->address.host) == 0))
            return gate;
    }
    return NULL;
}

static bool has_room(int fd)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return true;
    rlim_t kept = limit.rlim_cur / 4 < MU_RPC_GATE_FILES_KEPT ? limit.rlim_cur / 4 : MU_RPC_GATE_FILES_KEPT;
    return (rlim_t)fd < limit.rlim_cur - kept; /* numbers are given from the lowest on */
}

static bool admit(struct mu_rpc_gate *gate, int fd, const struct sockaddr_storage *from)
{
    if (!has_room(fd)) {
        gate->refusals.connections_without_file++;
        return false;
    }
    if (gate->per_peer && mu_rpc_guests_crowded(gate->guests, from, gate->per_peer)) {
        gate->refusals.connections_of_peer++;
        mu_rpc_guests_host(from, gate->refusals.last_host);
        return false;
    }
    mu_rpc_guests_add(gate->guests, fd, from);
    return true;
}

/* ---- accepting ---- */

/* No descriptor is left: whoever waits is let in with the reserve, and out again. 0, or errno of that accept. */
static int turn_away(struct mu_rpc_gate *gate, int listener)
{
    if (gate->reserve >= 0)
        close(gate->reserve);
    int fd = plain_accept(listener, NULL, NULL, SOCK_CLOEXEC);
    int reason = fd < 0 ? errno : 0;
    if (fd >= 0)
        close(fd);
    gate->reserve = open("/dev/null", O_RDONLY | O_CLOEXEC);
    gate->refusals.connections_without_file += reason == 0;
    return reason;
}

static bool is_without_file(int reason)
{
    return reason == EMFILE || reason == ENFILE || reason == ENOBUFS || reason == ENOMEM;
}

/* A host that vanished, or the way to it, is noticed although nothing is sent to it; so are bytes that nobody takes. */
static void watch_over(const struct mu_rpc_gate *gate, int fd)
{
    enum { PROBES = 3 };
    const struct {
        int level, name, value;
    } options[] = {
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, (int)gate->silent_s},
        {IPPROTO_TCP, TCP_KEEPINTVL, (int)(gate->answer_s + PROBES - 1) / PROBES},
        {IPPROTO_TCP, TCP_KEEPCNT, PROBES},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, (int)(gate->silent_s + gate->answer_s) * 1000},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) /* best effort */
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof options[i].value);
}

/* What accept(2) passes on of the new connection's own fate: it is gone, and the next may be sound. */
static bool is_of_connection(int reason)
{
    return reason == ECONNABORTED || reason == EPROTO || reason == ENETDOWN || reason == ENOPROTOOPT ||
           reason == EHOSTDOWN || reason == ENONET || reason == EHOSTUNREACH || reason == ENETUNREACH ||
           reason == EPERM || reason == EOPNOTSUPP;
}

static int gated_accept(struct mu_rpc_gate *gate, int listener, struct sockaddr_storage *from, socklen_t *size,
                        int flags)
{
    for (;;) {
        *size = sizeof *from;
        int fd = plain_accept(listener, (struct sockaddr *)from, size, flags);
        if (fd >= 0 && admit(gate, fd, from)) {
            if (from->ss_family != AF_UNIX)
                watch_over(gate, fd);
            return fd;
        }
        int reason = fd < 0 ? errno : 0;
        if (fd >= 0)
            close(fd);
        else if (is_without_file(reason))
            reason = turn_away(gate, listener);
        if (is_without_file(reason)) { /* those who wait are looked at when the next one knocks: the watchdog does */
            gate->refusals.is_stuck = true;
            errno = ECONNABORTED;
            return -1;
        }
        gate->refusals.is_stuck = false;
        if (reason != 0 && !is_of_connection(reason)) {
            errno = reason;
            return -1;
        }
    }
}

/* The C library's, for all who call it in this process. By its name in object files only: the header's declaration has
 * a type of its own. */
int gate_accept4(int listener, struct sockaddr *from, socklen_t *size, int flags) __asm__("accept4");
int gate_accept4(int listener, struct sockaddr *from, socklen_t *size, int flags)
{
    struct sockaddr_storage who = {0};
    socklen_t who_bytes = sizeof who;
    struct mu_rpc_gate *gate = NULL;
    int fd = -1;
    if (atomic_load(&gate_count) > 0) {
        pthread_mutex_lock(&lock);
        gate = gate_of(listener);
        if (gate)
            fd = gated_accept(gate, listener, &who, &who_bytes, flags);
        int reason = errno;
        pthread_mutex_unlock(&lock);
        errno = reason;
    }
    if (!gate)
        return plain_accept(listener, from, size, flags);
    if (fd >= 0 && from && size) {
        memcpy(from, &who, *size < who_bytes ? *size : who_bytes);
        *size = who_bytes;
    }
    return fd;
}

/* ---- life ---- */

enum mu_status mu_rpc_gate_open(const struct mu_rpc_address *address, const struct mu_rpc_server_config *config,
                                struct mu_rpc_gate **ret_gate, struct mu_error *err)
{
    struct mu_rpc_gate *gate = calloc(1, sizeof *gate);
    if (!gate)
        return mu_fail(err, MU_ERR_NO_MEMORY, "server: out of memory");
    gate->address = *address;
    gate->per_peer = config->max_connections_per_host;
    gate->silent_s = config->keepalive_time_s;
    gate->answer_s = config->keepalive_timeout_s;
    bool is_unix = address->kind == MU_RPC_ADDRESS_UNIX; /* its clients are processes of this host */
    enum mu_status status = mu_rpc_guests_new(&lock, is_unix ? 0 : config->max_owed_bytes,
                                              is_unix ? 0 : config->max_owed_bytes_in_all, &gate->guests, err);
    gate->reserve = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (status == MU_OK && gate->reserve < 0)
        status = mu_fail_errno(err, errno, "server: cannot keep a file descriptor in reserve");
    if (status != MU_OK) {
        mu_rpc_guests_free(gate->guests);
        free(gate);
        return status;
    }
    pthread_mutex_lock(&lock);
    gate->next = gates;
    gates = gate;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&gate_count, 1);
    *ret_gate = gate;
    return MU_OK;
}

void mu_rpc_gate_close(struct mu_rpc_gate *gate)
{
    if (!gate)
        return;
    pthread_mutex_lock(&lock);
    struct mu_rpc_gate **link = &gates;
    while (*link != gate)
        link = &(*link)->next;
    *link = gate->next;
    pthread_mutex_unlock(&lock);
    atomic_fetch_sub(&gate_count, 1);
    if (gate->reserve >= 0)
        close(gate->reserve);
    mu_rpc_guests_free(gate->guests);
    free(gate);
}

struct mu_rpc_guests *mu_rpc_gate_guests(struct mu_rpc_gate *gate)
{
    return gate->guests;
}

void mu_rpc_gate_refusals(struct mu_rpc_gate *gate, struct mu_rpc_refusals *refusals)
{
    pthread_mutex_lock(&lock);
    refusals->connections_of_peer = gate->refusals.connections_of_peer;
    refusals->connections_without_file = gate->refusals.connections_without_file;
    refusals->is_stuck = gate->refusals.is_stuck;
    memcpy(refusals->last_host, gate->refusals.last_host, sizeof refusals->last_host);
    refusals->connections_owing = mu_rpc_guests_shown_out(gate->guests, refusals->last_owing);
    pthread_mutex_unlock(&lock);
}
