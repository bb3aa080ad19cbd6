#include "rpc/guests.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "rpc/runtime.h"
#include "rpc/tcp_bytes.h"

enum {
    HOST_BYTES = 16,
    TABLE_LEAST = 256,
    PORTS = 65536,
    SWEEP_US = 100000,
    GLANCE_MS = 50,        /* has the process grown? */
    GLANCES_PER_LOOK = 20, /* if not, a look in so many */
    LOOKS_PER_ROUND = 8,   /* that those get one of who are well */
    LOOK_AT_ONCE = 64,     /* guests, before whoever knocks gets his turn */
    STUCK_US = 5000000,
    ANSWER_BYTES = 13, /* what a peer takes to know that a call has ended, at least: a frame that resets its stream */
};
static const size_t GROWN_BYTES = (size_t)32 << 20; /* so much is a reason to look */

/* Who was accepted with that descriptor: an entry may be out of date until its number is given again, or until somebody
 * looks. */
struct guest {
    uint8_t host[HOST_BYTES]; /* IPv4 as ::ffff:a.b.c.d; of IPv6 the network */
    in_port_t port;
    bool is_here, is_well;           /* well: a call or message of his came since the last look, none has ended */
    int next_of_port;                /* MU_RPC_GUEST_NONE: the last one */
    uint64_t received, acknowledged; /* counted from there */
    uint64_t told;                   /* since then */
    uint64_t taken;                  /* what was acknowledged at the last look */
    uint64_t ended, stuck_us;        /* calls of which he cannot know yet; since when, 0: not */
    uint64_t owed;
};

struct mu_rpc_guests {
    pthread_mutex_t *lock;
    size_t max_owed, max_owed_in_all;
    struct guest *table; /* by descriptor */
    size_t capacity;
    int *of_port; /* the first one of each port number, as the network has it */
    uint64_t swept_us, shown_out;
    char last_host[MU_RPC_GUEST_HOST_SIZE];
    unsigned look;
    pthread_t thread;
    pthread_cond_t closing;
    bool has_thread, is_closing;
};

/* ---- who they are ---- */

/* False: not over IP, all alike. */
static bool read_host(const struct sockaddr_storage *from, struct guest *ret_guest)
{
    static const uint8_t mapped[HOST_BYTES] = {[10] = 0xff, [11] = 0xff};
    *ret_guest = (struct guest){.is_here = true};
    if (from->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)from;
        memcpy(ret_guest->host, mapped, HOST_BYTES);
        memcpy(ret_guest->host + 12, &v4->sin_addr, 4);
        ret_guest->port = v4->sin_port;
        return true;
    }
    if (from->ss_family != AF_INET6)
        return false;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)from;
    bool is_mapped = IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr);
    memcpy(ret_guest->host, &v6->sin6_addr, is_mapped ? HOST_BYTES : HOST_BYTES / 2); /* one host has a whole /64 */
    ret_guest->port = v6->sin6_port;
    return true;
}

/* "192.0.2.1:4711", "[2001:db8::1]:4711". */
static bool read_peer(const char *peer, struct guest *ret_guest)
{
    struct sockaddr_storage from = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&from;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&from;
    char host[INET6_ADDRSTRLEN + 32]; /* with the name of an interface */
    const char *colon = strrchr(peer, ':');
    bool is_v6 = peer[0] == '[' && colon && colon[-1] == ']';
    size_t length = colon ? (size_t)(colon - peer) - 2 * is_v6 : 0;
    if (length == 0 || length >= sizeof host)
        return false;
    memcpy(host, peer + is_v6, length);
    host[length] = 0;
    host[strcspn(host, "%")] = 0; /* "fe80::1%eth0" */
    in_port_t port = htons((uint16_t)strtoul(colon + 1, NULL, 10));
    if (is_v6 && inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = port;
    } else if (!is_v6 && inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = port;
    } else {
        return false;
    }
    return read_host(&from, ret_guest);
}

static bool is_same_host(const struct guest *a, const struct guest *b)
{
    return memcmp(a->host, b->host, HOST_BYTES) == 0;
}

static void format_host(const struct guest *guest, char out[MU_RPC_GUEST_HOST_SIZE])
{
    struct in6_addr address;
    memcpy(&address, guest->host, sizeof address);
    bool is_v4 = IN6_IS_ADDR_V4MAPPED(&address);
    inet_ntop(is_v4 ? AF_INET : AF_INET6, is_v4 ? guest->host + 12 : guest->host, out, MU_RPC_GUEST_HOST_SIZE);
}

void mu_rpc_guests_host(const struct sockaddr_storage *from, char out[MU_RPC_GUEST_HOST_SIZE])
{
    struct guest guest;
    out[0] = 0;
    if (read_host(from, &guest))
        format_host(&guest, out);
}

/* ---- the table ---- */

static void forget(struct mu_rpc_guests *guests, int fd)
{
    struct guest *guest = &guests->table[fd];
    if (!guest->is_here)
        return;
    int *link = &guests->of_port[guest->port];
    while (*link != fd)
        link = &guests->table[*link].next_of_port;
    *link = guest->next_of_port;
    guest->is_here = false;
}

static bool is_still_here(const struct mu_rpc_guests *guests, int fd)
{
    const struct guest *guest = &guests->table[fd];
    struct guest now;
    struct sockaddr_storage from;
    socklen_t size = sizeof from;
    return getpeername(fd, (struct sockaddr *)&from, &size) == 0 && read_host(&from, &now) &&
           is_same_host(guest, &now) && guest->port == now.port;
}

static void sweep(struct mu_rpc_guests *guests)
{
    for (size_t fd = 0; fd < guests->capacity; fd++)
        if (guests->table[fd].is_here && !is_still_here(guests, (int)fd))
            forget(guests, (int)fd);
}

static unsigned count_of(const struct mu_rpc_guests *guests, const struct guest *host)
{
    unsigned count = 0;
    for (size_t fd = 0; fd < guests->capacity; fd++)
        count += guests->table[fd].is_here && is_same_host(&guests->table[fd], host);
    return count;
}

bool mu_rpc_guests_crowded(struct mu_rpc_guests *guests, const struct sockaddr_storage *from, unsigned most)
{
    struct guest host;
    if (!read_host(from, &host) || count_of(guests, &host) < most)
        return false;
    uint64_t now_us = mu_clock_mono_us(); /* looking at all of them is not for everyone who knocks */
    if (now_us - guests->swept_us < SWEEP_US)
        return true;
    guests->swept_us = now_us;
    sweep(guests);
    return count_of(guests, &host) >= most;
}

void mu_rpc_guests_add(struct mu_rpc_guests *guests, int fd, const struct sockaddr_storage *from)
{
    struct guest guest;
    if (!read_host(from, &guest))
        return;
    if ((size_t)fd >= guests->capacity) {
        size_t capacity = guests->capacity ? guests->capacity : TABLE_LEAST;
        while (capacity <= (size_t)fd)
            capacity *= 2;
        struct guest *table = realloc(guests->table, capacity * sizeof *table);
        if (!table)
            return; /* not counted */
        memset(table + guests->capacity, 0, (capacity - guests->capacity) * sizeof *table);
        guests->table = table;
        guests->capacity = capacity;
    }
    forget(guests, fd);
    guest.next_of_port = guests->of_port[guest.port];
    guests->of_port[guest.port] = fd;
    guests->table[fd] = guest;
}

/* ---- what they owe ---- */

static size_t resident_bytes(void)
{
    size_t all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file && fscanf(file, "%zu %zu", &all, &resident) != 2)
        resident = 0;
    if (file)
        fclose(file);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* Calls of which he cannot know yet. */
static uint64_t reckon_calls(struct guest *guest, uint64_t acknowledged, uint64_t now_us)
{
    uint64_t known = (acknowledged - guest->taken) / ANSWER_BYTES;
    guest->taken = acknowledged;
    guest->ended -= known < guest->ended ? known : guest->ended;
    if (guest->ended == 0)
        guest->stuck_us = 0;
    else if (guest->stuck_us == 0)
        guest->stuck_us = now_us;
    return guest->stuck_us && now_us - guest->stuck_us >= STUCK_US ? guest->ended : 0;
}

static void reckon(struct mu_rpc_guests *guests, int fd, uint64_t now_us)
{
    struct guest *guest = &guests->table[fd];
    uint64_t received, acknowledged;
    guest->owed = 0;
    guest->is_well = false;
    if (!is_still_here(guests, fd) || !mu_rpc_tcp_bytes(fd, &received, &acknowledged)) {
        forget(guests, fd);
        return;
    }
    uint64_t came = received - guest->received, settled = acknowledged - guest->acknowledged + guest->told;
    if (came > settled) {
        guest->owed = came - settled;
    } else {
        guest->received = received;
        guest->acknowledged = acknowledged;
        guest->told = 0;
    }
    guest->owed += reckon_calls(guest, acknowledged, now_us) * MU_RPC_GUEST_CALL_BYTES;
}

static void show_out(struct mu_rpc_guests *guests, int fd)
{
    const struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    if (is_still_here(guests, fd)) {
        (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once); /* the kernel keeps nothing for him */
        shutdown(fd, SHUT_RDWR); /* the core sees its end, and closes it */
        guests->shown_out++;
        format_host(&guests->table[fd], guests->last_host);
    }
    forget(guests, fd);
}

/* Shows out who owes at least `least`. Returns what the others owe, and how many they are. */
static uint64_t show_out_from(struct mu_rpc_guests *guests, uint64_t least, size_t *ret_count)
{
    uint64_t left = 0;
    *ret_count = 0;
    for (size_t fd = 0; fd < guests->capacity; fd++) {
        const struct guest *guest = &guests->table[fd];
        if (!guest->is_here || guest->owed == 0)
            continue;
        if (guest->owed >= least) {
            show_out(guests, (int)fd);
            continue;
        }
        left += guest->owed;
        (*ret_count)++;
    }
    return left;
}

/* Lock held, but for moments. */
static void look_at_all(struct mu_rpc_guests *guests, uint64_t now_us, bool also_those_who_are_well)
{
    size_t count;
    guests->look++;
    for (size_t fd = 0; fd < guests->capacity && !guests->is_closing; fd++) {
        const struct guest *guest = &guests->table[fd];
        bool is_due = also_those_who_are_well || !guest->is_well || (fd + guests->look) % LOOKS_PER_ROUND == 0;
        if (guest->is_here && is_due)
            reckon(guests, (int)fd, now_us);
        if (fd % LOOK_AT_ONCE == LOOK_AT_ONCE - 1) {
            pthread_mutex_unlock(guests->lock);
            pthread_mutex_lock(guests->lock);
        }
    }
    uint64_t total = show_out_from(guests, guests->max_owed ? guests->max_owed + 1 : UINT64_MAX, &count);
    while (guests->max_owed_in_all && total > guests->max_owed_in_all)
        total = show_out_from(guests, total / count, &count);
}

void mu_rpc_guests_look(struct mu_rpc_guests *guests, uint64_t now_us)
{
    pthread_mutex_lock(guests->lock);
    look_at_all(guests, now_us, true);
    pthread_mutex_unlock(guests->lock);
}

static void wait_a_moment(struct mu_rpc_guests *guests)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += GLANCE_MS * 1000000l;
    until.tv_sec += until.tv_nsec / 1000000000l;
    until.tv_nsec %= 1000000000l;
    pthread_cond_timedwait(&guests->closing, guests->lock, &until);
}

static void *look_main(void *arg)
{
    struct mu_rpc_guests *guests = arg;
    size_t known_bytes = resident_bytes();
    int glances = 0;
    pthread_mutex_lock(guests->lock);
    while (!guests->is_closing) {
        wait_a_moment(guests);
        pthread_mutex_unlock(guests->lock);
        size_t bytes = resident_bytes();
        pthread_mutex_lock(guests->lock);
        bool has_grown = bytes > known_bytes + GROWN_BYTES;
        if (++glances < GLANCES_PER_LOOK && !has_grown)
            continue;
        look_at_all(guests, mu_clock_mono_us(), has_grown);
        known_bytes = bytes;
        glances = 0;
    }
    pthread_mutex_unlock(guests->lock);
    return NULL;
}

/* ---- for calls ---- */

int mu_rpc_guests_find(struct mu_rpc_guests *guests, const char *peer)
{
    struct guest guest;
    if (!read_peer(peer, &guest))
        return MU_RPC_GUEST_NONE;
    pthread_mutex_lock(guests->lock);
    int fd = guests->of_port[guest.port];
    while (fd != MU_RPC_GUEST_NONE && !is_same_host(&guests->table[fd], &guest))
        fd = guests->table[fd].next_of_port;
    pthread_mutex_unlock(guests->lock);
    return fd;
}

/* Should it be another one's number by now, that one gains, or loses, a little. */
void mu_rpc_guests_told(struct mu_rpc_guests *guests, int guest, size_t bytes)
{
    if (guest == MU_RPC_GUEST_NONE)
        return;
    pthread_mutex_lock(guests->lock);
    struct guest *who = &guests->table[guest];
    who->told += bytes;
    who->is_well = who->ended == 0;
    pthread_mutex_unlock(guests->lock);
}

void mu_rpc_guests_ended(struct mu_rpc_guests *guests, int guest)
{
    if (guest == MU_RPC_GUEST_NONE)
        return;
    pthread_mutex_lock(guests->lock);
    struct guest *who = &guests->table[guest];
    who->ended++;
    who->is_well = false;
    pthread_mutex_unlock(guests->lock);
}

uint64_t mu_rpc_guests_shown_out(const struct mu_rpc_guests *guests, char ret_host[MU_RPC_GUEST_HOST_SIZE])
{
    memcpy(ret_host, guests->last_host, sizeof guests->last_host);
    return guests->shown_out;
}

/* ---- life ---- */

enum mu_status mu_rpc_guests_new(pthread_mutex_t *lock, size_t max_owed_bytes, size_t max_owed_bytes_in_all,
                                 struct mu_rpc_guests **ret_guests, struct mu_error *err)
{
    struct mu_rpc_guests *guests = calloc(1, sizeof *guests);
    if (!guests || !(guests->of_port = malloc(PORTS * sizeof *guests->of_port))) {
        free(guests);
        return mu_fail(err, MU_ERR_NO_MEMORY, "server: out of memory");
    }
    for (int i = 0; i < PORTS; i++)
        guests->of_port[i] = MU_RPC_GUEST_NONE;
    guests->lock = lock;
    guests->max_owed = max_owed_bytes;
    guests->max_owed_in_all = max_owed_bytes_in_all;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&guests->closing, &attr);
    pthread_condattr_destroy(&attr);
    enum mu_status status = MU_OK;
    if (max_owed_bytes || max_owed_bytes_in_all)
        status = mu_rpc_thread_start(&guests->thread, look_main, guests, err);
    guests->has_thread = status == MU_OK && (max_owed_bytes || max_owed_bytes_in_all);
    if (status == MU_OK)
        *ret_guests = guests;
    else
        mu_rpc_guests_free(guests);
    return status;
}

void mu_rpc_guests_free(struct mu_rpc_guests *guests)
{
    if (!guests)
        return;
    pthread_mutex_lock(guests->lock);
    guests->is_closing = true;
    pthread_cond_signal(&guests->closing);
    pthread_mutex_unlock(guests->lock);
    if (guests->has_thread)
        pthread_join(guests->thread, NULL);
    pthread_cond_destroy(&guests->closing);
    free(guests->table);
    free(guests->of_port);
    free(guests);
}
