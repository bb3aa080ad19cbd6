/* The process's data plane and its groups: life, the loop of progress, waits. Hand-shakes are in comm_shake.c, frames
 * in comm_stream.c. */
#include "worker/comm_internal.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/flight.h"

enum { EVENTS_PER_CALL = 64, CALLS_PER_TURN = 16, UNIX_BUFFER_SIZE = 1024 * 1024, DEVICE_NAP_NS = 20000 };

/* ---- sources and events ---- */

int mu_comm_watch(struct mu_comm *comm, struct source *source)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = source};
    if (epoll_ctl(comm->epoll_fd, EPOLL_CTL_ADD, source->fd, &event) == 0)
        return 0;
    if (errno == EEXIST && epoll_ctl(comm->epoll_fd, EPOLL_CTL_MOD, source->fd, &event) == 0)
        return 0;
    return errno;
}

void mu_comm_source_close(struct source *source)
{
    if (source->fd >= 0)
        close(source->fd);
    *source = (struct source){.kind = source->kind, .fd = -1};
}

/* Best effort: a socket without these options works, only slower to notice or to send. */
void mu_comm_tune(const struct mu_comm *comm, int fd, bool tcp)
{
    int on = 1;
    if (!tcp) {
        int size = UNIX_BUFFER_SIZE;
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        return;
    }
    int timeout_ms = (int)comm->limits.user_timeout_ms;
    int idle_s = timeout_ms / 3000 > 0 ? timeout_ms / 3000 : 1, probes = 2;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

static void note_event(struct source *source, uint32_t events)
{
    bool hung = events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP);
    if (source->kind == SOURCE_WAKE) {
        uint64_t count;
        ssize_t ignored = read(source->fd, &count, sizeof count);
        (void)ignored;
        return;
    }
    source->readable |= hung || (events & EPOLLIN);
    source->writable |= hung || (events & EPOLLOUT);
    source->hung |= hung;
}

/* Takes all events that are there, sleeping for the first up to timeout_ms. */
static void collect_events(struct mu_comm *comm, int timeout_ms)
{
    struct epoll_event events[EVENTS_PER_CALL];
    for (int call = 0; call < CALLS_PER_TURN; call++) {
        int count = epoll_wait(comm->epoll_fd, events, EVENTS_PER_CALL, call ? 0 : timeout_ms);
        for (int i = 0; i < count; i++)
            note_event(events[i].data.ptr, events[i].events);
        if (count < EVENTS_PER_CALL) /* an interrupted sleep counts as one that is over */
            return;
    }
}

/* For epoll_wait: rounded up, so that the time has come when it returns. */
static int sleep_ms(uint64_t now_us, uint64_t until_us)
{
    if (until_us == UINT64_MAX)
        return -1;
    if (until_us <= now_us)
        return 0;
    uint64_t ms = (until_us - now_us + 999) / 1000;
    return ms < 60000 ? (int)ms : 60000;
}

static uint64_t leaving_deadline(const struct mu_comm *comm)
{
    uint64_t at = UINT64_MAX;
    for (const struct leaving *leaving = comm->leaving; leaving; leaving = leaving->next)
        at = leaving->deadline_us < at ? leaving->deadline_us : at;
    return at;
}

static uint64_t earliest(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t least = a < b ? a : b;
    return least < c ? least : c;
}

/* ---- the process's end ---- */

static void limits_complete(struct mu_comm_limits *limits)
{
    if (limits->handshake_timeout_ms == 0)
        limits->handshake_timeout_ms = 2000;
    if (limits->pending_max == 0)
        limits->pending_max = 256;
    if (limits->user_timeout_ms == 0)
        limits->user_timeout_ms = 6000;
    if (limits->spin_us == 0)
        limits->spin_us = 20;
}

enum mu_status mu_comm_new(const struct mu_comm_config *config, struct mu_comm **ret_comm, struct mu_error *err)
{
    struct mu_comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the data plane");
    comm->epoll_fd = comm->wake.fd = comm->unix_listener.fd = comm->tcp_listener.fd = -1;
    comm->limits = config->limits;
    comm->device = mu_device_is_host(config->device) ? NULL : config->device;
    limits_complete(&comm->limits);
    enum mu_status status;
    if (comm->limits.pending_max > MU_COMM_PENDING_MAX || comm->limits.user_timeout_ms > 3600000 ||
        comm->limits.handshake_timeout_ms > 3600000) {
        status = mu_fail(err, MU_ERR_INVALID,
                         "data plane limits: pending %u (at most %d), user time-out %u ms, hand-shake %u ms (at most "
                         "3600000)",
                         comm->limits.pending_max, (int)MU_COMM_PENDING_MAX, comm->limits.user_timeout_ms,
                         comm->limits.handshake_timeout_ms);
        goto fail;
    }
    comm->pending = calloc(comm->limits.pending_max, sizeof comm->pending[0]);
    comm->scratch = malloc(COMM_SCRATCH_SIZE);
    if (!comm->pending || !comm->scratch) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the data plane");
        goto fail;
    }
    status = mu_comm_listen(comm, config, err);
    if (status != MU_OK)
        goto fail;
    comm->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    comm->wake = (struct source){.kind = SOURCE_WAKE, .fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    if (comm->epoll_fd < 0 || comm->wake.fd < 0 || mu_comm_watch(comm, &comm->wake) != 0 ||
        mu_comm_watch(comm, &comm->unix_listener) != 0 || mu_comm_watch(comm, &comm->tcp_listener) != 0) {
        status = mu_fail_errno(err, errno, "cannot watch the data plane's sockets");
        goto fail;
    }
    *ret_comm = comm;
    return MU_OK;
fail:
    mu_comm_free(comm);
    return status;
}

void mu_comm_free(struct mu_comm *comm)
{
    if (!comm)
        return;
    while (comm->groups)
        mu_comm_group_close(comm->groups);
    while (comm->leaving) { /* each at most COMM_LINGER_US */
        uint64_t now_us = mu_clock_mono_us();
        mu_comm_leaving_step(comm, now_us);
        if (comm->leaving)
            collect_events(comm, sleep_ms(now_us, leaving_deadline(comm)));
    }
    while (comm->pending_count > 0)
        mu_comm_pending_drop(comm, comm->pending_count - 1);
    mu_comm_source_close(&comm->unix_listener);
    mu_comm_source_close(&comm->tcp_listener);
    mu_comm_source_close(&comm->wake);
    if (comm->epoll_fd >= 0)
        close(comm->epoll_fd);
    if (comm->unix_path[0])
        unlink(comm->unix_path);
    free(comm->pending);
    free(comm->scratch);
    free(comm);
}

const char *mu_comm_address(const struct mu_comm *comm)
{
    return comm->address;
}

void mu_comm_stats(const struct mu_comm *comm, struct mu_comm_stats *ret_stats)
{
    *ret_stats = comm->stats;
}

int mu_comm_fd(const struct mu_comm *comm)
{
    return comm->epoll_fd;
}

void mu_comm_abort(struct mu_comm *comm, uint64_t generation)
{
    uint64_t known = atomic_load(&comm->aborted);
    while (known < generation && !atomic_compare_exchange_weak(&comm->aborted, &known, generation))
        ;
    uint64_t one = 1;
    ssize_t ignored = write(comm->wake.fd, &one, sizeof one);
    (void)ignored;
}

bool mu_comm_cancelled(const struct mu_comm *comm, uint64_t generation)
{
    return generation <= atomic_load(&comm->aborted);
}

/* ---- groups ---- */

struct mu_comm_group *mu_comm_find_group(const struct mu_comm *comm, uint64_t generation)
{
    struct mu_comm_group *group = comm->groups;
    while (group && group->generation != generation)
        group = group->next;
    return group;
}

struct peer *mu_comm_find_peer(const struct mu_comm_group *group, uint32_t rank)
{
    size_t low = 0, high = group->peer_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (group->peers[middle].rank < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low < group->peer_count && group->peers[low].rank == rank ? &group->peers[low] : NULL;
}

void mu_comm_peer_fail(struct peer *peer, enum mu_comm_failure_kind kind, int errno_value, const char *fmt, ...)
{
    struct mu_comm_group *group = peer->group;
    if (peer->state == PEER_DOWN)
        return;
    if (kind == MU_COMM_FAIL_PROTOCOL || kind == MU_COMM_FAIL_LOCAL) /* else it would look like a death from there */
        mu_comm_stream_leave(peer, kind);
    mu_comm_source_close(&peer->source);
    peer->state = PEER_DOWN;
    mu_flight_note(MU_FLIGHT_PEER_FAILED, false, peer->rank, peer->group->generation, 0);
    if (group->failure_count == 0) {
        char what[224], reason[64];
        va_list args;
        va_start(args, fmt);
        vsnprintf(what, sizeof what, fmt, args);
        va_end(args);
        snprintf(group->failure_text, sizeof group->failure_text, "rank %u: %s (%s)%s%s", peer->rank, what,
                 mu_comm_failure_name(kind), errno_value ? ": " : "",
                 errno_value ? strerror_r(errno_value, reason, sizeof reason) : "");
    }
    group->failures[group->failure_count++] =
        (struct mu_comm_failure){.peer_rank = peer->rank, .kind = kind, .errno_value = errno_value};
}

const char *mu_comm_group_failure_text(const struct mu_comm_group *group)
{
    return group->failure_text;
}

const char *mu_comm_failure_name(enum mu_comm_failure_kind kind)
{
    static const char *const names[] = {
        [MU_COMM_FAIL_NONE] = "none",       [MU_COMM_FAIL_EOF] = "eof",         [MU_COMM_FAIL_RESET] = "reset",
        [MU_COMM_FAIL_REFUSED] = "refused", [MU_COMM_FAIL_TIMEOUT] = "timeout", [MU_COMM_FAIL_PROTOCOL] = "protocol",
        [MU_COMM_FAIL_STALE] = "stale",     [MU_COMM_FAIL_LEFT] = "left",       [MU_COMM_FAIL_LOCAL] = "local",
    };
    return (size_t)kind < sizeof names / sizeof names[0] ? names[kind] : "unknown";
}

static enum mu_status group_config_check(const struct mu_comm *comm, const struct mu_comm_group_config *config,
                                         struct mu_error *err)
{
    if (config->generation == 0 || config->world == 0 || config->world > MU_COMM_WORLD_MAX ||
        config->rank >= config->world || config->peer_count >= config->world)
        return mu_fail(err, MU_ERR_INVALID,
                       "generation %llu, rank %u of %u with %zu peers is not a group: generation >= 1, rank < world "
                       "<= %d, fewer peers than ranks",
                       (unsigned long long)config->generation, config->rank, config->world, config->peer_count,
                       (int)MU_COMM_WORLD_MAX);
    if (mu_comm_cancelled(comm, config->generation))
        return mu_fail(err, MU_ERR_CANCELLED, "generation %llu is revoked", (unsigned long long)config->generation);
    if (mu_comm_find_group(comm, config->generation))
        return mu_fail(err, MU_ERR_EXISTS, "generation %llu is open already", (unsigned long long)config->generation);
    if (!(config->generation & MU_COMM_ASIDE) && config->generation < comm->newest_generation)
        return mu_fail(err, MU_ERR_STALE, "generation %llu is older than %llu, which was opened before",
                       (unsigned long long)config->generation, (unsigned long long)comm->newest_generation);
    return MU_OK;
}

static int by_rank(const void *a, const void *b)
{
    uint32_t left = ((const struct peer *)a)->rank, right = ((const struct peer *)b)->rank;
    return left < right ? -1 : left > right;
}

static enum mu_status peers_init(struct mu_comm_group *group, const struct mu_comm_group_config *config,
                                 struct mu_error *err)
{
    for (size_t i = 0; i < config->peer_count; i++) {
        struct peer *peer = &group->peers[i];
        peer->source = (struct source){.kind = SOURCE_PEER, .fd = -1};
        peer->group = group;
        peer->rank = config->peers[i].rank;
        peer->incarnation = config->peers[i].incarnation;
        peer->retry_delay_us = COMM_RETRY_FIRST_US;
        peer->state = peer->rank < group->rank ? PEER_RETRYING : PEER_AWAITING;
        snprintf(peer->last_trouble, sizeof peer->last_trouble,
                 peer->state == PEER_AWAITING ? "it has not dialled" : "no answer");
        enum mu_status status = mu_comm_address_parse(config->peers[i].address, &peer->address, err);
        if (status != MU_OK)
            return err ? mu_error_prefix(err, "peer rank %u", peer->rank) : status;
        peer->over_tcp = strcmp(peer->address.host_id, group->comm->host_id) != 0;
    }
    if (config->peer_count > 1)
        qsort(group->peers, group->peer_count, sizeof group->peers[0], by_rank);
    for (size_t i = 0; i < group->peer_count; i++) {
        uint32_t rank = group->peers[i].rank;
        if (rank >= group->world || rank == group->rank || (i > 0 && group->peers[i - 1].rank == rank))
            return mu_fail(err, MU_ERR_INVALID,
                           "peer rank %u of rank %u in a world of %u: own, too large or named twice", rank, group->rank,
                           group->world);
    }
    return MU_OK;
}

enum mu_status mu_comm_open(struct mu_comm *comm, const struct mu_comm_group_config *config, uint64_t deadline_us,
                            struct mu_comm_group **ret_group, struct mu_error *err)
{
    enum mu_status status = group_config_check(comm, config, err);
    if (status != MU_OK)
        return status;
    struct mu_comm_group *group = calloc(1, sizeof *group);
    if (!group)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for generation %llu", (unsigned long long)config->generation);
    group->comm = comm;
    group->generation = config->generation;
    group->deadline_us = deadline_us;
    group->rank = config->rank;
    group->world = config->world;
    group->incarnation = config->incarnation;
    memcpy(group->secret, config->secret, sizeof group->secret);
    group->encrypted = config->encrypted;
    group->peer_count = config->peer_count;
    group->peers = calloc(config->peer_count + 1, sizeof group->peers[0]);
    group->failures = calloc(config->peer_count + 1, sizeof group->failures[0]);
    if (group->peers && group->failures)
        status = peers_init(group, config, err);
    else
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu peers", config->peer_count);
    if (status != MU_OK) {
        free(group->peers);
        free(group->failures);
        explicit_bzero(group->secret, sizeof group->secret);
        free(group);
        return status;
    }
    group->next = comm->groups;
    comm->groups = group;
    if (!(config->generation & MU_COMM_ASIDE))
        comm->newest_generation = config->generation;
    *ret_group = group;
    return MU_OK;
}

void mu_comm_group_close(struct mu_comm_group *group)
{
    if (!group)
        return;
    struct mu_comm_group **at = &group->comm->groups;
    while (*at != group)
        at = &(*at)->next;
    *at = group->next;
    for (size_t i = 0; i < group->peer_count; i++) {
        mu_comm_stream_leave(&group->peers[i], MU_COMM_FAIL_NONE);
        mu_comm_stream_fini(&group->peers[i]);
    }
    explicit_bzero(group->secret, sizeof group->secret);
    free(group->peers);
    free(group->failures);
    free(group);
}

bool mu_comm_group_ready(const struct mu_comm_group *group)
{
    return group->up_count == group->peer_count;
}

uint64_t mu_comm_group_generation(const struct mu_comm_group *group)
{
    return group->generation;
}

size_t mu_comm_group_encrypted(const struct mu_comm_group *group, const char **ret_kernel)
{
    size_t count = 0;
    *ret_kernel = "";
    for (size_t i = 0; i < group->peer_count; i++) {
        const struct peer *peer = &group->peers[i];
        if (peer->state != PEER_UP || !peer->secure)
            continue;
        *ret_kernel = mu_secure_kernel(peer->secure);
        count++;
    }
    return count;
}

size_t mu_comm_group_failures(const struct mu_comm_group *group, struct mu_comm_failure *out, size_t capacity)
{
    for (size_t i = 0; i < group->failure_count && i < capacity; i++)
        out[i] = group->failures[i];
    return group->failure_count;
}

static void traffic_of(const struct peer *peer, struct mu_comm_traffic *ret_traffic)
{
    struct tcp_info info = {.tcpi_rtt = 0};
    socklen_t size = sizeof info;
    *ret_traffic = peer->traffic;
    ret_traffic->rank = peer->rank;
    if (peer->state != PEER_UP || getsockopt(peer->source.fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0)
        return; /* a Unix socket, for instance */
    ret_traffic->latency_us = info.tcpi_rtt;
    ret_traffic->retransmits = info.tcpi_total_retrans;
}

size_t mu_comm_group_traffic(const struct mu_comm_group *group, struct mu_comm_traffic *out, size_t capacity)
{
    for (size_t i = 0; i < group->peer_count && i < capacity; i++)
        traffic_of(&group->peers[i], &out[i]);
    return group->peer_count;
}

enum mu_status mu_comm_peer_traffic(const struct mu_comm_group *group, uint32_t peer_rank,
                                    struct mu_comm_traffic *ret_traffic)
{
    const struct peer *peer = mu_comm_find_peer(group, peer_rank);
    if (!peer)
        return MU_ERR_NOT_FOUND;
    traffic_of(peer, ret_traffic);
    return MU_OK;
}

uint64_t mu_comm_group_wait_us(const struct mu_comm_group *group)
{
    return group->wait_us;
}

/* ---- progress ---- */

static void group_deadline_passed(struct mu_comm_group *group)
{
    for (size_t i = 0; i < group->peer_count; i++) {
        struct peer *peer = &group->peers[i];
        if (peer->state != PEER_UP && peer->state != PEER_LEFT)
            mu_comm_peer_fail(peer, MU_COMM_FAIL_TIMEOUT, 0, "not connected by the deadline, last: %s",
                              peer->last_trouble);
    }
}

static bool group_step(struct mu_comm_group *group, uint64_t now_us)
{
    bool moved = false;
    bool connecting = !mu_comm_group_ready(group) && group->failure_count == 0;
    if (connecting && now_us >= group->deadline_us)
        group_deadline_passed(group);
    for (size_t n = 0; n < group->peer_count; n++) {
        /* Each turn begins with another peer, so that none is always served last. */
        struct peer *peer = &group->peers[(group->turn + n) % group->peer_count];
        if (mu_comm_cancelled(group->comm, group->generation))
            return moved;
        if (peer->state == PEER_UP)
            moved |= mu_comm_stream_step(peer);
        else if (peer->state == PEER_SECURING && group->failure_count == 0)
            moved |= mu_comm_secure_step(peer);
        else if (connecting && group->failure_count == 0 && peer->state < PEER_AWAITING)
            moved |= mu_comm_dial_step(peer, now_us);
    }
    group->turn = group->turn + 1 < group->peer_count ? group->turn + 1 : 0;
    return moved;
}

static bool progress(struct mu_comm *comm, int timeout_ms)
{
    collect_events(comm, timeout_ms);
    comm->device_busy = false;
    uint64_t now_us = mu_clock_mono_us();
    bool moved = mu_comm_accept(comm, now_us);
    moved |= mu_comm_pending_step(comm, now_us);
    mu_comm_leaving_step(comm, now_us);
    for (struct mu_comm_group *group = comm->groups; group; group = group->next)
        moved |= group_step(group, now_us);
    return moved;
}

void mu_comm_progress(struct mu_comm *comm)
{
    (void)progress(comm, 0);
}

static enum mu_status group_state(const struct mu_comm_group *group, struct mu_error *err)
{
    if (mu_comm_cancelled(group->comm, group->generation))
        return mu_fail(err, MU_ERR_CANCELLED, "generation %llu is revoked", (unsigned long long)group->generation);
    if (group->failure_count > 0)
        return mu_fail(err, MU_ERR_UNAVAILABLE, "%s", group->failure_text);
    return MU_OK;
}

enum mu_status mu_comm_group_progress(struct mu_comm_group *group, struct mu_error *err)
{
    progress(group->comm, 0);
    return group_state(group, err);
}

/* ---- posts ---- */

static enum mu_status post(struct mu_comm_group *group, uint32_t peer_rank, struct mu_comm_request *request,
                           struct mu_error *err)
{
    enum mu_status status = group_state(group, err);
    if (status != MU_OK)
        return status;
    struct peer *peer = mu_comm_find_peer(group, peer_rank);
    if (!peer)
        return mu_fail(err, MU_ERR_INVALID, "rank %u is no neighbour of rank %u in generation %llu", peer_rank,
                       group->rank, (unsigned long long)group->generation);
    const struct table *table = request->kind == REQUEST_SEND ? &peer->sends : &peer->receives;
    if (table->count >= MU_COMM_REQUESTS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "%zu requests to rank %u are outstanding, at most %d are allowed",
                       table->count, peer_rank, (int)MU_COMM_REQUESTS_MAX);
    if (mu_comm_table_find(table, request->link.exchange))
        return mu_fail(err, MU_ERR_EXISTS, "exchange %llu with rank %u is outstanding already",
                       (unsigned long long)request->link.exchange, peer_rank);
    group->outstanding++;
    mu_flight_note(request->kind == REQUEST_SEND ? MU_FLIGHT_SEND : MU_FLIGHT_RECEIVE, false, peer_rank,
                   request->link.exchange, request->size);
    mu_comm_stream_posted(peer, request);
    return group_state(group, err);
}

enum mu_status mu_comm_send(struct mu_comm_group *group, uint32_t peer_rank, uint64_t exchange, const void *data,
                            size_t size, struct mu_comm_request *request, struct mu_error *err)
{
    *request = (struct mu_comm_request){.link = {.exchange = exchange},
                                        .data = (uint8_t *)(uintptr_t)data, /* only read from */
                                        .size = size,
                                        .group = group,
                                        .peer_rank = peer_rank,
                                        .kind = REQUEST_SEND,
                                        .state = REQUEST_OUTSTANDING};
    return post(group, peer_rank, request, err);
}

enum mu_status mu_comm_recv(struct mu_comm_group *group, uint32_t peer_rank, uint64_t exchange, void *into, size_t size,
                            struct mu_comm_request *request, struct mu_error *err)
{
    *request = (struct mu_comm_request){.link = {.exchange = exchange},
                                        .data = into,
                                        .size = size,
                                        .group = group,
                                        .peer_rank = peer_rank,
                                        .kind = REQUEST_RECEIVE,
                                        .state = REQUEST_OUTSTANDING};
    return post(group, peer_rank, request, err);
}

void mu_comm_hash(struct mu_comm_request *request, struct mu_hash128 *ret_hash)
{
    MU_ASSERT(!request->far);
    if (mu_comm_done(request)) /* it lay here already */
        *ret_hash = mu_xxh3_128(request->data, request->size);
    else
        request->ret_hash = ret_hash;
}

bool mu_comm_done(const struct mu_comm_request *request)
{
    return request->state == REQUEST_DONE;
}

/* ---- waits ---- */

enum wait_for { WAIT_READY, WAIT_ONE, WAIT_ALL };

static bool wait_over(const struct mu_comm_group *group, enum wait_for what, const struct mu_comm_request *request)
{
    if (what == WAIT_READY)
        return mu_comm_group_ready(group);
    return what == WAIT_ONE ? mu_comm_done(request) : group->outstanding == 0;
}

static void account_idle(struct mu_comm_group *group, uint64_t idle_us)
{
    group->wait_us += idle_us;
    group->comm->stats.wait_us += idle_us;
    for (size_t i = 0; i < group->peer_count; i++) {
        if (group->peers[i].receives.count > 0)
            group->peers[i].traffic.wait_us += idle_us;
    }
}

static enum mu_status wait_missed(const struct mu_comm_group *group, enum wait_for what,
                                  const struct mu_comm_request *request, struct mu_error *err)
{
    if (what == WAIT_ONE)
        return mu_fail(err, MU_ERR_TIMEOUT, "exchange %llu %s rank %u: %zu of %zu bytes by the deadline%s",
                       (unsigned long long)request->link.exchange, request->kind == REQUEST_SEND ? "to" : "from",
                       request->peer_rank, request->moved, request->size,
                       request->kind == REQUEST_SEND && request->state != REQUEST_GRANTED &&
                               request->size > MU_COMM_EAGER_SIZE
                           ? "; it has not posted the receive"
                           : "");
    for (size_t i = 0; i < group->peer_count; i++) {
        const struct peer *peer = &group->peers[i];
        if (what == WAIT_READY && peer->state != PEER_UP && peer->state != PEER_LEFT)
            return mu_fail(err, MU_ERR_TIMEOUT, "rank %u: not connected by the deadline, last: %s", peer->rank,
                           peer->last_trouble);
        if (what == WAIT_ALL && peer->receives.count + peer->sends.count > 0)
            return mu_fail(err, MU_ERR_TIMEOUT,
                           "%zu receives from and %zu sends to rank %u are not done by the deadline",
                           peer->receives.count, peer->sends.count, peer->rank);
    }
    return mu_fail(err, MU_ERR_TIMEOUT, "the deadline has passed");
}

void mu_comm_set_idle(struct mu_comm *comm, bool (*idle)(void *ctx), void *ctx)
{
    comm->idle = idle;
    comm->idle_ctx = ctx;
}

/* Also true when what is waited for has come meanwhile: then no event would tell of it. */
static bool do_other_things(const struct mu_comm_group *group, enum wait_for what,
                            const struct mu_comm_request *request)
{
    struct mu_comm *comm = group->comm;
    bool (*idle)(void *) = comm->idle;
    if (!idle)
        return false;
    comm->idle = NULL;
    bool did = idle(comm->idle_ctx);
    comm->idle = idle;
    return did || wait_over(group, what, request) || group_state(group, NULL) != MU_OK;
}

static enum mu_status wait_until(struct mu_comm_group *group, enum wait_for what, const struct mu_comm_request *request,
                                 uint64_t deadline_us, struct mu_error *err)
{
    struct mu_comm *comm = group->comm;
    uint64_t idle_since_us = 0; /* 0: not idle */
    int timeout_ms = 0;
    enum mu_status status;
    for (;;) {
        bool moved = progress(comm, timeout_ms);
        uint64_t now_us = mu_clock_mono_us();
        if (moved && idle_since_us) {
            account_idle(group, now_us - idle_since_us);
            idle_since_us = 0;
        }
        if (mu_comm_cancelled(comm, group->generation)) {
            status = group_state(group, err);
            break;
        }
        if (wait_over(group, what, request)) {
            status = MU_OK;
            break;
        }
        status = group_state(group, err);
        if (status == MU_OK && now_us >= deadline_us)
            status = wait_missed(group, what, request, err);
        if (status != MU_OK)
            break;
        moved |= do_other_things(group, what, request);
        if (!moved && idle_since_us == 0)
            idle_since_us = now_us;
        bool sleep = !moved && now_us - idle_since_us >= comm->limits.spin_us;
        if (sleep && comm->device_busy) { /* nobody wakes this thread when the device has come further */
            nanosleep(&(struct timespec){.tv_nsec = DEVICE_NAP_NS}, NULL);
            sleep = false;
        }
        timeout_ms =
            sleep ? sleep_ms(now_us, earliest(deadline_us, mu_comm_shake_deadline(comm), leaving_deadline(comm))) : 0;
    }
    if (idle_since_us)
        account_idle(group, mu_clock_mono_us() - idle_since_us);
    return status;
}

enum mu_status mu_comm_wait_ready(struct mu_comm_group *group, uint64_t deadline_us, struct mu_error *err)
{
    return wait_until(group, WAIT_READY, NULL, deadline_us, err);
}

enum mu_status mu_comm_wait(struct mu_comm_group *group, const struct mu_comm_request *request, uint64_t deadline_us,
                            struct mu_error *err)
{
    MU_ASSERT(request->group == group);
    return wait_until(group, WAIT_ONE, request, deadline_us, err);
}

enum mu_status mu_comm_wait_all(struct mu_comm_group *group, uint64_t deadline_us, struct mu_error *err)
{
    return wait_until(group, WAIT_ALL, NULL, deadline_us, err);
}
