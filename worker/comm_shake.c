/* Who is there? Four messages before a connection belongs to a group:
 *
 *   dialler (higher rank)                         acceptor (lower rank)
 *     HELLO generation, ranks, incarnations, nonce  -->  does a group of that generation expect exactly this one? (held
 * until it opens)
 *     <--  CHALLENGE nonce, HMAC(secret, "acceptor", hello, nonce)       or REFUSE reason
 *     RESPONSE HMAC(secret, "dialler", hello, nonce)  -->
 *     <--  WELCOME                                                       or REFUSE reason
 *
 * Both prove the generation's secret over both nonces; the labels keep one from echoing the other. Until then a
 * connection is a `pending` of bounded number and time, so strangers cost little and never stand in the way of a peer.
 * A hand-shake that breaks is tried again until the group's deadline; only a refusal by the peer, or a port where
 * nobody listens, ends it at once.
 *
 * Messages are far smaller than the buffer of a fresh socket, so writes are not continued: a short one breaks the
 * attempt. Reads ask for exactly one message, so that no byte of a later frame is taken.
 *
 * Where the group is encrypted and the connection leaves the host, the hand-shake of TLS follows (worker/secure.h); its
 * key is HMAC(secret, "tls key", hello, nonce of the hello), known to these two alone. */
#include "worker/comm_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/hash.h"

static struct wire_prefix prefix_of(enum wire_kind kind, uint8_t reason)
{
    return (struct wire_prefix){.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = (uint8_t)kind, .reason = reason};
}

static void random_bytes(uint8_t out[32])
{
    ssize_t n;
    do
        n = getrandom(out, 32, 0);
    while (n < 0 && errno == EINTR);
    MU_ASSERT(n == 32); /* for up to 256 bytes the kernel promises all or EINTR */
}

static void prove(const uint8_t secret[MU_COMM_SECRET_SIZE], const char label[8], const struct wire_hello *hello,
                  const uint8_t nonce[32], uint8_t out[32])
{
    uint8_t text[8 + sizeof *hello + 32];
    memcpy(text, label, 8);
    memcpy(text + 8, hello, sizeof *hello);
    memcpy(text + 8 + sizeof *hello, nonce, 32);
    mu_hmac_sha256(secret, MU_COMM_SECRET_SIZE, text, sizeof text, out);
}

/* In constant time. */
static bool macs_equal(const uint8_t a[32], const uint8_t b[32])
{
    unsigned difference = 0;
    for (size_t i = 0; i < 32; i++)
        difference |= (unsigned)(a[i] ^ b[i]);
    return difference == 0;
}

static bool send_whole(int fd, const void *data, size_t size)
{
    ssize_t n;
    do
        n = send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)size;
}

enum read_result { READ_WHOLE, READ_PART, READ_CLOSED };

static enum read_result read_up_to(struct source *source, void *into, size_t *have, size_t size)
{
    while (*have < size) {
        ssize_t n = recv(source->fd, (uint8_t *)into + *have, size - *have, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            source->readable = false;
            return READ_PART;
        }
        if (n <= 0)
            return READ_CLOSED;
        *have += (size_t)n;
    }
    return READ_WHOLE;
}

/* ---- what follows WELCOME ---- */

/* From here on a trouble of the connection is one of the peer's: there is no other attempt. */
static void connected(struct peer *peer, const struct wire_hello *hello)
{
    uint8_t key[MU_SECURE_KEY_SIZE];
    if (!peer->group->encrypted || !peer->over_tcp) {
        mu_comm_stream_start(peer);
        return;
    }
    prove(peer->group->secret, "tls key\0", hello, hello->nonce, key);
    peer->secure = mu_secure_new(peer->source.fd, peer->rank > peer->group->rank, key);
    explicit_bzero(key, sizeof key);
    if (!peer->secure) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_LOCAL, ENOMEM, "no memory for an encrypted connection");
        return;
    }
    peer->state = PEER_SECURING;
    peer->source.readable = peer->source.writable = true;
    snprintf(peer->last_trouble, sizeof peer->last_trouble, "the TLS hand-shake is not over");
}

bool mu_comm_secure_step(struct peer *peer)
{
    if (!peer->source.readable && !peer->source.writable)
        return false;
    int reason = mu_secure_shake(peer->secure);
    if (reason == EAGAIN) { /* whatever it waits for, an event tells of it */
        peer->source.readable = peer->source.writable = false;
        return false;
    }
    if (reason == 0)
        mu_comm_stream_start(peer);
    else if (reason == EPROTO)
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0,
                          "the TLS hand-shake failed: it has another key, or somebody else answers");
    else if (reason == ECONNRESET)
        mu_comm_peer_fail(peer, MU_COMM_FAIL_EOF, 0, "it closed the connection in the TLS hand-shake");
    else
        mu_comm_peer_fail(peer, MU_COMM_FAIL_RESET, reason, "the connection broke in the TLS hand-shake");
    return true;
}

/* ---- the accepting side ---- */

void mu_comm_pending_drop(struct mu_comm *comm, size_t index)
{
    struct pending *pending = comm->pending[index];
    mu_comm_source_close(&pending->source);
    free(pending);
    comm->pending_count--;
    memmove(&comm->pending[index], &comm->pending[index + 1], (comm->pending_count - index) * sizeof comm->pending[0]);
}

/* The oldest one that has not even said hello; if all have, the oldest. Real peers dial again. */
static void make_room(struct mu_comm *comm)
{
    size_t victim = 0;
    for (size_t i = 0; i < comm->pending_count; i++) {
        if (comm->pending[i]->state == PENDING_HELLO) {
            victim = i;
            break;
        }
    }
    comm->stats.refused_full++;
    mu_comm_pending_drop(comm, victim);
}

static void pending_add(struct mu_comm *comm, int fd, bool tcp, uint64_t now_us)
{
    comm->stats.accepted++;
    if (comm->pending_count == comm->limits.pending_max)
        make_room(comm);
    struct pending *pending = calloc(1, sizeof *pending);
    if (!pending) {
        close(fd);
        comm->stats.refused_full++;
        return;
    }
    mu_comm_tune(comm, fd, tcp);
    pending->source = (struct source){.kind = SOURCE_PENDING, .fd = fd, .readable = true, .writable = true};
    pending->tcp = tcp;
    pending->deadline_us = now_us + 1000ull * comm->limits.handshake_timeout_ms;
    if (mu_comm_watch(comm, &pending->source) != 0) {
        mu_comm_source_close(&pending->source);
        free(pending);
        comm->stats.refused_full++;
        return;
    }
    comm->pending[comm->pending_count++] = pending;
}

static bool accept_from(struct mu_comm *comm, struct source *listener, bool tcp, uint64_t now_us)
{
    bool any = false;
    for (int i = 0; i < COMM_ACCEPTS_PER_TURN && listener->readable; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            pending_add(comm, fd, tcp, now_us);
            any = true;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            listener->readable = false;
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            /* The connection waits in the backlog. Strangers make room for it first. */
            comm->accept_again_us = now_us + COMM_ACCEPT_RETRY_US;
            if (comm->pending_count > 0)
                make_room(comm);
            break;
        } /* else the connection broke before it was taken: look at the next one */
    }
    return any;
}

bool mu_comm_accept(struct mu_comm *comm, uint64_t now_us)
{
    if (comm->accept_again_us > now_us)
        return false;
    comm->accept_again_us = 0;
    bool any = accept_from(comm, &comm->unix_listener, false, now_us);
    if (comm->accept_again_us == 0)
        any |= accept_from(comm, &comm->tcp_listener, true, now_us);
    return any;
}

enum verdict { VERDICT_WAIT, VERDICT_DROP, VERDICT_ADMIT };

static enum verdict refuse(struct pending *pending, enum wire_refusal reason, uint64_t *counter)
{
    struct wire_prefix message = prefix_of(WIRE_REFUSE, (uint8_t)reason);
    (void)send_whole(pending->source.fd, &message, sizeof message);
    (*counter)++;
    return VERDICT_DROP;
}

/* The peer that this hello may become, or NULL with a verdict. */
static struct peer *expected_peer(struct mu_comm *comm, struct pending *pending, enum verdict *ret_verdict)
{
    const struct wire_hello *hello = &pending->hello;
    struct mu_comm_group *group = mu_comm_find_group(comm, hello->generation);
    if (mu_comm_cancelled(comm, hello->generation) || (!group && hello->generation <= comm->newest_generation)) {
        *ret_verdict = refuse(pending, WIRE_REFUSE_STALE, &comm->stats.refused_stale);
        return NULL;
    }
    if (!group) { /* the dialler has heard of it first */
        *ret_verdict = VERDICT_WAIT;
        return NULL;
    }
    if (!mu_id_equal(hello->to_incarnation, group->incarnation)) {
        *ret_verdict = refuse(pending, WIRE_REFUSE_INCARNATION, &comm->stats.refused_stale);
        return NULL;
    }
    struct peer *peer = mu_comm_find_peer(group, hello->from_rank);
    if (!peer || hello->to_rank != group->rank || hello->world != group->world || hello->from_rank <= group->rank ||
        !mu_id_equal(hello->from_incarnation, peer->incarnation)) {
        *ret_verdict = refuse(pending, WIRE_REFUSE_STRANGER, &comm->stats.refused_stranger);
        return NULL;
    }
    if (peer->state != PEER_AWAITING || group->failure_count > 0) {
        *ret_verdict = refuse(pending, WIRE_REFUSE_STALE, &comm->stats.refused_stale);
        return NULL;
    }
    return peer;
}

static enum verdict pending_greet(struct mu_comm *comm, struct pending *pending)
{
    enum verdict verdict = VERDICT_DROP;
    struct peer *peer = expected_peer(comm, pending, &verdict);
    if (!peer)
        return verdict;
    struct wire_challenge challenge = {.prefix = prefix_of(WIRE_CHALLENGE, 0)};
    random_bytes(challenge.nonce);
    prove(peer->group->secret, "acceptor", &pending->hello, challenge.nonce, challenge.mac);
    prove(peer->group->secret, "dialler\0", &pending->hello, challenge.nonce, pending->expected_mac);
    if (!send_whole(pending->source.fd, &challenge, sizeof challenge))
        return VERDICT_DROP;
    pending->state = PENDING_RESPONSE;
    pending->have = 0;
    return VERDICT_WAIT;
}

static enum verdict pending_hello(struct mu_comm *comm, struct pending *pending)
{
    const struct wire_prefix *prefix = &pending->hello.prefix;
    enum read_result result = read_up_to(&pending->source, &pending->hello, &pending->have, sizeof pending->hello);
    if (pending->have >= sizeof *prefix) { /* judged as soon as it can be: garbage does not wait for its deadline */
        if (prefix->magic != WIRE_MAGIC || prefix->kind != WIRE_HELLO) {
            comm->stats.refused_garbage++;
            return VERDICT_DROP;
        }
        if (prefix->version != WIRE_VERSION)
            return refuse(pending, WIRE_REFUSE_VERSION, &comm->stats.refused_garbage);
    }
    if (result == READ_PART)
        return VERDICT_WAIT;
    if (result == READ_CLOSED) {
        comm->stats.refused_garbage++;
        return VERDICT_DROP;
    }
    pending->state = PENDING_HELD;
    return pending_greet(comm, pending);
}

static enum verdict pending_response(struct mu_comm *comm, struct pending *pending, struct peer **ret_peer)
{
    enum read_result result =
        read_up_to(&pending->source, &pending->response, &pending->have, sizeof pending->response);
    if (result == READ_PART)
        return VERDICT_WAIT;
    if (result == READ_CLOSED)
        return VERDICT_DROP;
    const struct wire_prefix *prefix = &pending->response.prefix;
    if (prefix->magic != WIRE_MAGIC || prefix->kind != WIRE_RESPONSE) {
        comm->stats.refused_garbage++;
        return VERDICT_DROP;
    }
    if (!macs_equal(pending->response.mac, pending->expected_mac))
        return refuse(pending, WIRE_REFUSE_SECRET, &comm->stats.refused_stranger);
    enum verdict verdict = VERDICT_DROP;
    struct peer *peer = expected_peer(comm, pending, &verdict); /* again: the group may have gone meanwhile */
    if (!peer)
        return VERDICT_DROP;
    struct wire_prefix welcome = prefix_of(WIRE_WELCOME, 0);
    if (!send_whole(pending->source.fd, &welcome, sizeof welcome))
        return VERDICT_DROP;
    *ret_peer = peer;
    return VERDICT_ADMIT;
}

/* The socket changes hands; its events carry the peer's source from now on. */
static void admit(struct mu_comm *comm, size_t index, struct peer *peer)
{
    struct pending *pending = comm->pending[index];
    struct wire_hello hello = pending->hello;
    peer->source = (struct source){.kind = SOURCE_PEER, .fd = pending->source.fd, .hung = pending->source.hung};
    peer->over_tcp = pending->tcp;
    pending->source.fd = -1;
    mu_comm_pending_drop(comm, index);
    int error = mu_comm_watch(comm, &peer->source);
    if (error) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_LOCAL, error, "cannot watch the connection");
        return;
    }
    comm->stats.admitted++;
    connected(peer, &hello);
    MU_FAULT("worker.comm.welcome.sent");
}

bool mu_comm_pending_step(struct mu_comm *comm, uint64_t now_us)
{
    bool any = false;
    for (size_t i = 0; i < comm->pending_count;) {
        struct pending *pending = comm->pending[i];
        struct peer *peer = NULL;
        enum verdict verdict = VERDICT_WAIT;
        int before = pending->state;
        if (pending->state == PENDING_HELD)
            verdict = pending->source.hung ? VERDICT_DROP : pending_greet(comm, pending);
        else if (pending->source.readable && pending->state == PENDING_HELLO)
            verdict = pending_hello(comm, pending);
        else if (pending->source.readable)
            verdict = pending_response(comm, pending, &peer);
        if (verdict == VERDICT_WAIT && now_us >= pending->deadline_us) {
            comm->stats.refused_timeout++;
            verdict = VERDICT_DROP;
        }
        any |= verdict != VERDICT_WAIT || (int)pending->state != before;
        if (verdict == VERDICT_ADMIT)
            admit(comm, i, peer);
        else if (verdict == VERDICT_DROP)
            mu_comm_pending_drop(comm, i);
        else
            i++;
    }
    return any;
}

/* ---- the dialling side ---- */

static void dial_again(struct peer *peer, uint64_t now_us, const char *trouble, int errno_value)
{
    mu_comm_source_close(&peer->source);
    if (errno_value) {
        char reason[64];
        snprintf(peer->last_trouble, sizeof peer->last_trouble, "%s: %s", trouble,
                 strerror_r(errno_value, reason, sizeof reason));
    } else {
        snprintf(peer->last_trouble, sizeof peer->last_trouble, "%s", trouble);
    }
    peer->state = PEER_RETRYING;
    peer->retry_at_us = now_us + peer->retry_delay_us;
    peer->retry_delay_us =
        peer->retry_delay_us * 2 < COMM_RETRY_LAST_US ? peer->retry_delay_us * 2 : COMM_RETRY_LAST_US;
}

/* Nobody listens there. Equal host ids but no common namespace of Unix sockets would look the same, so TCP has the last
 * word. */
static void dial_refused(struct peer *peer, uint64_t now_us, int errno_value)
{
    if (!peer->over_tcp) {
        dial_again(peer, now_us, "nobody listens on its Unix socket", errno_value);
        peer->over_tcp = true;
        peer->retry_at_us = now_us;
        return;
    }
    mu_comm_peer_fail(peer, MU_COMM_FAIL_REFUSED, errno_value, "nobody listens at its address any more");
}

static void dial_connect_failed(struct peer *peer, uint64_t now_us, int errno_value)
{
    if (errno_value == ECONNREFUSED || (errno_value == ENOENT && !peer->over_tcp)) {
        dial_refused(peer, now_us, errno_value);
        return;
    }
    dial_again(peer, now_us, "cannot connect", errno_value);
    if (!peer->over_tcp)
        return;
    char address[MU_COMM_TCP_TEXT_SIZE], reason[64];
    mu_comm_tcp_text(&peer->address.tcp, address);
    snprintf(peer->last_trouble, sizeof peer->last_trouble,
             "cannot connect to %s: %s; start it with a --data-addr that this host reaches", address,
             strerror_r(errno_value, reason, sizeof reason));
}

static void dial_greet(struct peer *peer, uint64_t now_us)
{
    const struct mu_comm_group *group = peer->group;
    peer->hello = (struct wire_hello){
        .prefix = prefix_of(WIRE_HELLO, 0),
        .generation = group->generation,
        .from_rank = group->rank,
        .to_rank = peer->rank,
        .world = group->world,
        .from_incarnation = group->incarnation,
        .to_incarnation = peer->incarnation,
    };
    random_bytes(peer->hello.nonce);
    peer->reply_have = 0;
    if (!send_whole(peer->source.fd, &peer->hello, sizeof peer->hello)) {
        dial_again(peer, now_us, "the connection broke before the hand-shake", 0);
        return;
    }
    peer->state = PEER_GREETING;
    MU_FAULT("worker.comm.hello.sent");
}

static void dial_begin(struct peer *peer, uint64_t now_us)
{
    struct mu_comm *comm = peer->group->comm;
    const struct literal_address *to = &peer->address;
    const struct sockaddr *address =
        peer->over_tcp ? (const struct sockaddr *)&to->tcp : (const struct sockaddr *)&to->local;
    comm->stats.redials += peer->dialled_before;
    peer->dialled_before = true;
    peer->attempt_deadline_us = now_us + 1000ull * comm->limits.handshake_timeout_ms;
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        dial_again(peer, now_us, "cannot make a socket", errno);
        return;
    }
    peer->source = (struct source){.kind = SOURCE_PEER, .fd = fd};
    mu_comm_tune(comm, fd, peer->over_tcp);
    int error = connect(fd, address, peer->over_tcp ? to->tcp_size : to->local_size) == 0 ? 0 : errno;
    if (error == EINTR) /* goes on in the background, like EINPROGRESS */
        error = EINPROGRESS;
    if (error && error != EINPROGRESS) { /* EAGAIN: the backlog of a Unix listener is full */
        dial_connect_failed(peer, now_us, error);
        return;
    }
    peer->state = PEER_CONNECTING;
    int watch_error = mu_comm_watch(comm, &peer->source);
    if (watch_error)
        dial_again(peer, now_us, "cannot watch the connection", watch_error);
    else if (error == 0)
        dial_greet(peer, now_us);
}

static void dial_connected(struct peer *peer, uint64_t now_us)
{
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(peer->source.fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
        error = errno;
    if (error)
        dial_connect_failed(peer, now_us, error);
    else
        dial_greet(peer, now_us);
}

static void dial_was_refused(struct peer *peer, uint8_t reason)
{
    switch (reason) {
    case WIRE_REFUSE_STALE:
        mu_comm_peer_fail(peer, MU_COMM_FAIL_STALE, 0, "it has left generation %llu or knows a newer one",
                          (unsigned long long)peer->group->generation);
        break;
    case WIRE_REFUSE_INCARNATION:
        mu_comm_peer_fail(peer, MU_COMM_FAIL_STALE, 0, "another process has its address now");
        break;
    case WIRE_REFUSE_SECRET:
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0, "it holds another secret for generation %llu",
                          (unsigned long long)peer->group->generation);
        break;
    case WIRE_REFUSE_VERSION:
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0,
                          "it speaks another version of the data plane than %d; run one version of muster-worker",
                          (int)WIRE_VERSION);
        break;
    default:
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0,
                          "its plan of generation %llu does not expect rank %u from here",
                          (unsigned long long)peer->group->generation, peer->group->rank);
    }
}

static void dial_challenged(struct peer *peer, uint64_t now_us)
{
    struct wire_challenge challenge;
    uint8_t expected[32];
    memcpy(&challenge, peer->reply, sizeof challenge);
    prove(peer->group->secret, "acceptor", &peer->hello, challenge.nonce, expected);
    if (!macs_equal(expected, challenge.mac)) {
        dial_again(peer, now_us, "whoever answers there does not hold the generation's secret", 0);
        return;
    }
    struct wire_response response = {.prefix = prefix_of(WIRE_RESPONSE, 0)};
    prove(peer->group->secret, "dialler\0", &peer->hello, challenge.nonce, response.mac);
    peer->reply_have = 0;
    if (send_whole(peer->source.fd, &response, sizeof response))
        peer->state = PEER_PROVING;
    else
        dial_again(peer, now_us, "the connection broke in the hand-shake", 0);
}

/* Reads the prefix, then the rest that its kind asks for. */
static void dial_reply(struct peer *peer, uint64_t now_us)
{
    struct wire_prefix prefix;
    enum read_result result = READ_WHOLE;
    if (peer->reply_have < sizeof prefix)
        result = read_up_to(&peer->source, peer->reply, &peer->reply_have, sizeof prefix);
    if (result == READ_WHOLE) {
        memcpy(&prefix, peer->reply, sizeof prefix);
        bool ours = prefix.magic == WIRE_MAGIC;
        if (ours && prefix.kind == WIRE_REFUSE) {
            dial_was_refused(peer, prefix.reason);
            return;
        }
        if (ours && prefix.kind == WIRE_WELCOME && peer->state == PEER_PROVING) {
            connected(peer, &peer->hello);
            return;
        }
        if (!ours || prefix.kind != WIRE_CHALLENGE || peer->state != PEER_GREETING) {
            dial_again(peer, now_us, "whoever answers there is no muster-worker", 0);
            return;
        }
        result = read_up_to(&peer->source, peer->reply, &peer->reply_have, sizeof(struct wire_challenge));
    }
    if (result == READ_CLOSED)
        dial_again(peer, now_us, "it closed the connection in the hand-shake", 0);
    else if (result == READ_WHOLE)
        dial_challenged(peer, now_us);
}

bool mu_comm_dial_step(struct peer *peer, uint64_t now_us)
{
    enum peer_state before = peer->state;
    if (peer->state == PEER_RETRYING && now_us >= peer->retry_at_us)
        dial_begin(peer, now_us);
    if (peer->state == PEER_CONNECTING && (peer->source.writable || peer->source.hung))
        dial_connected(peer, now_us);
    if ((peer->state == PEER_GREETING || peer->state == PEER_PROVING) && peer->source.readable)
        dial_reply(peer, now_us);
    bool trying = peer->state == PEER_CONNECTING || peer->state == PEER_GREETING || peer->state == PEER_PROVING;
    if (trying && now_us >= peer->attempt_deadline_us)
        dial_again(peer, now_us, "no answer to the hand-shake in time", 0);
    return peer->state != before;
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint64_t mu_comm_shake_deadline(const struct mu_comm *comm)
{
    uint64_t at = comm->accept_again_us ? comm->accept_again_us : UINT64_MAX;
    for (size_t i = 0; i < comm->pending_count; i++)
        at = earlier(at, comm->pending[i]->deadline_us);
    for (const struct mu_comm_group *group = comm->groups; group; group = group->next) {
        if (mu_comm_cancelled(comm, group->generation) || group->failure_count > 0 ||
            group->up_count == group->peer_count)
            continue;
        at = earlier(at, group->deadline_us);
        for (size_t i = 0; i < group->peer_count; i++) {
            const struct peer *peer = &group->peers[i];
            if (peer->state == PEER_RETRYING)
                at = earlier(at, peer->retry_at_us);
            else if (peer->state == PEER_CONNECTING || peer->state == PEER_GREETING || peer->state == PEER_PROVING)
                at = earlier(at, peer->attempt_deadline_us);
        }
    }
    return at;
}
