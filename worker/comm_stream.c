/* Frames over one proved connection: small messages at once, large ones on the receiver's grant, grants first of all.
 */
#include "worker/comm_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/flight.h"

/* ---- tables and queues ---- */

static struct mu_comm_link **bucket_of(const struct table *table, uint64_t exchange)
{
    uint64_t mixed = exchange * 0x9E3779B97F4A7C15u;
    return (struct mu_comm_link **)&table->buckets[(mixed >> 32) & (COMM_BUCKETS - 1)];
}

struct mu_comm_link *mu_comm_table_find(const struct table *table, uint64_t exchange)
{
    struct mu_comm_link *link = *bucket_of(table, exchange);
    while (link && link->exchange != exchange)
        link = link->next;
    return link;
}

void mu_comm_table_insert(struct table *table, struct mu_comm_link *link)
{
    struct mu_comm_link **bucket = bucket_of(table, link->exchange);
    link->next = *bucket;
    *bucket = link;
    table->count++;
}

void mu_comm_table_remove(struct table *table, struct mu_comm_link *link)
{
    struct mu_comm_link **at = bucket_of(table, link->exchange);
    while (*at != link) {
        MU_ASSERT(*at);
        at = &(*at)->next;
    }
    *at = link->next;
    table->count--;
}

static void queue_push(struct queue *queue, struct mu_comm_request *request)
{
    request->next = NULL;
    if (queue->last)
        queue->last->next = request;
    else
        queue->first = request;
    queue->last = request;
}

static struct mu_comm_request *queue_pop(struct queue *queue)
{
    struct mu_comm_request *request = queue->first;
    if (request) {
        queue->first = request->next;
        if (!queue->first)
            queue->last = NULL;
    }
    return request;
}

static void request_done(struct peer *peer, struct mu_comm_request *request)
{
    mu_comm_table_remove(request->kind == REQUEST_SEND ? &peer->sends : &peer->receives, &request->link);
    if (request->ret_hash)
        *request->ret_hash = mu_xxh3_128(request->data, request->size);
    request->state = REQUEST_DONE;
    peer->group->outstanding--;
    mu_flight_note(request->kind == REQUEST_SEND ? MU_FLIGHT_SEND : MU_FLIGHT_RECEIVE, true, request->peer_rank,
                   request->link.exchange, request->size);
}

static bool sizes_differ(struct peer *peer, uint64_t exchange, uint64_t theirs, uint64_t ours)
{
    if (theirs == ours)
        return false;
    mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0,
                      "exchange %llu has %llu bytes there and %llu here; both sides must follow the same plan",
                      (unsigned long long)exchange, (unsigned long long)theirs, (unsigned long long)ours);
    return true;
}

/* ---- small messages that came early ---- */

static struct slot *slot_new(struct peer *peer)
{
    struct slot *slot = peer->free_slots;
    if (slot)
        peer->free_slots = (struct slot *)slot->link.next;
    else
        slot = malloc(sizeof *slot);
    return slot;
}

static void slot_release(struct peer *peer, struct slot *slot)
{
    slot->link.next = (struct mu_comm_link *)peer->free_slots;
    peer->free_slots = slot;
}

static void device_failed(struct peer *peer)
{
    const char *trouble = mu_device_trouble(peer->group->comm->device);
    mu_comm_peer_fail(peer, MU_COMM_FAIL_LOCAL, EIO, "%s", trouble ? trouble : "the device failed");
}

/* Bytes for a request's buffer, wherever that lies. False: the device failed. */
static bool put(struct peer *peer, struct mu_comm_request *request, size_t at, const uint8_t *bytes, size_t size)
{
    if (request->far && mu_device_move(peer->group->comm->device, request->data + at, bytes, size) != MU_OK) {
        device_failed(peer);
        return false;
    }
    if (!request->far && size)
        memcpy(request->data + at, bytes, size);
    return true;
}

static void slot_deliver(struct peer *peer, struct slot *slot, struct mu_comm_request *request)
{
    if (!sizes_differ(peer, request->link.exchange, slot->size, request->size) &&
        put(peer, request, 0, slot->data, slot->size)) {
        request->moved = slot->size;
        request_done(peer, request);
    }
    slot_release(peer, slot);
}

static void unblock(struct peer *peer)
{
    if (peer->in && peer->in->held_back) {
        peer->in->held_back = false;
        peer->in->resume = true;
    }
}

/* ---- posts ---- */

static void send_posted(struct peer *peer, struct mu_comm_request *request)
{
    mu_comm_table_insert(&peer->sends, &request->link);
    if (request->size <= MU_COMM_EAGER_SIZE) {
        queue_push(&peer->small, request);
        return;
    }
    struct grant *grant = (struct grant *)mu_comm_table_find(&peer->grants, request->link.exchange);
    if (!grant)
        return;
    uint64_t total = grant->total;
    mu_comm_table_remove(&peer->grants, &grant->link);
    free(grant);
    if (sizes_differ(peer, request->link.exchange, total, request->size))
        return;
    request->state = REQUEST_GRANTED;
    queue_push(&peer->bulk, request);
}

static void receive_posted(struct peer *peer, struct mu_comm_request *request)
{
    mu_comm_table_insert(&peer->receives, &request->link);
    struct slot *slot = (struct slot *)mu_comm_table_find(&peer->slots, request->link.exchange);
    if (slot) {
        mu_comm_table_remove(&peer->slots, &slot->link);
        slot_deliver(peer, slot, request);
        unblock(peer);
        return;
    }
    if (request->size > MU_COMM_EAGER_SIZE)
        queue_push(&peer->to_grant, request);
    if (peer->in && peer->in->head.exchange == request->link.exchange)
        unblock(peer);
}

/* Small messages move as soon as they are posted: their buffers must be free of the device by then. */
static bool settle(struct peer *peer, struct mu_comm_request *request)
{
    struct mu_device *device = peer->group->comm->device;
    request->far = mu_device_holds(device, request->data);
    if (!request->far)
        return true;
    request->mark = mu_device_mark(device);
    return request->size > MU_COMM_EAGER_SIZE || mu_device_await(device, request->mark) == MU_OK;
}

void mu_comm_stream_posted(struct peer *peer, struct mu_comm_request *request)
{
    if (!settle(peer, request)) {
        device_failed(peer);
        return;
    }
    if (request->kind == REQUEST_SEND)
        send_posted(peer, request);
    else
        receive_posted(peer, request);
    if (peer->state == PEER_LEFT && request->state != REQUEST_DONE)
        mu_comm_peer_fail(peer, MU_COMM_FAIL_LEFT, 0,
                          "it left this generation, and exchange %llu was posted after that",
                          (unsigned long long)request->link.exchange);
}

/* ---- writing ---- */

/* The first request of the queue whose buffer the device has left. Marks ascend: what is behind one that has not passed
 * has not either. */
static struct mu_comm_request *pop_free(struct peer *peer, struct queue *queue)
{
    struct mu_comm *comm = peer->group->comm;
    uint64_t busy_from = UINT64_MAX;
    for (struct mu_comm_request **at = &queue->first, *before = NULL, *request; (request = *at) != NULL;
         before = request, at = &request->next) {
        enum mu_status status = !request->far                ? MU_OK
                                : request->mark >= busy_from ? MU_ERR_BUSY
                                                             : mu_device_passed(comm->device, request->mark);
        if (status == MU_OK) {
            *at = request->next;
            if (queue->last == request)
                queue->last = before;
            return request;
        }
        if (status != MU_ERR_BUSY) {
            device_failed(peer);
            return NULL;
        }
        busy_from = request->mark < busy_from ? request->mark : busy_from;
        comm->device_busy = true;
    }
    return NULL;
}

/* Where the kernel can read the next bytes of a send; NULL: the device failed. */
static uint8_t *reachable(struct peer *peer, const struct mu_comm_request *request, size_t length)
{
    struct outbox *out = peer->out;
    if (!request->far)
        return request->data + request->moved;
    uint8_t *copy = out->staging + out->staged;
    if (mu_device_move(peer->group->comm->device, copy, request->data + request->moved, length) != MU_OK) {
        device_failed(peer);
        return NULL;
    }
    out->staged += length;
    return copy;
}

static struct wire_frame *burst_frame(struct peer *peer, enum wire_kind kind, struct mu_comm_request *request,
                                      uint32_t length)
{
    struct outbox *out = peer->out;
    struct wire_frame *frame = &out->heads[out->frame_count];
    uint8_t *bytes = length ? reachable(peer, request, length) : NULL;
    *frame = (struct wire_frame){
        .prefix = {.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = (uint8_t)kind},
        .generation = peer->group->generation,
        .exchange = request->link.exchange,
        .offset = request->moved,
        .total = request->size,
        .length = length,
    };
    out->iov[out->iov_count++] = (struct iovec){.iov_base = frame, .iov_len = sizeof *frame};
    if (length)
        out->iov[out->iov_count++] = (struct iovec){.iov_base = bytes, .iov_len = length};
    out->requests[out->frame_count] = kind == WIRE_DATA ? request : NULL;
    out->lengths[out->frame_count] = length;
    out->frame_count++;
    return frame;
}

/* Grants before small messages before one piece of a large one, for which the last place is kept. False: nothing to
 * send. */
static bool burst_assemble(struct peer *peer)
{
    struct outbox *out = peer->out;
    struct mu_comm_request *request;
    out->iov_count = out->iov_next = out->staged = 0;
    while (out->frame_count < COMM_BURST_FRAMES - 1 && (request = pop_free(peer, &peer->to_grant))) {
        request->state = REQUEST_GRANTED;
        burst_frame(peer, WIRE_GRANT, request, 0);
    }
    while (out->frame_count < COMM_BURST_FRAMES - 1 && (request = queue_pop(&peer->small)))
        burst_frame(peer, WIRE_DATA, request, (uint32_t)request->size);
    request = pop_free(peer, &peer->bulk);
    if (request) {
        size_t left = request->size - request->moved;
        size_t length = left < MU_COMM_PIECE_SIZE ? left : MU_COMM_PIECE_SIZE;
        burst_frame(peer, WIRE_DATA, request, (uint32_t)length);
        if (length < left)
            queue_push(&peer->bulk, request);
    }
    return out->frame_count > 0 && peer->group->failure_count == 0;
}

static void burst_sent(struct peer *peer)
{
    struct outbox *out = peer->out;
    for (size_t i = 0; i < out->frame_count; i++) {
        struct mu_comm_request *request = out->requests[i];
        if (!request)
            continue;
        request->moved += out->lengths[i];
        peer->traffic.bytes_sent += out->lengths[i];
        peer->group->comm->stats.bytes_sent += out->lengths[i];
        if (request->moved == request->size)
            request_done(peer, request);
    }
    peer->traffic.frames_sent += out->frame_count;
    out->frame_count = 0;
    MU_FAULT("worker.comm.burst.sent");
}

static void burst_advance(struct outbox *out, size_t bytes)
{
    while (bytes > 0) {
        struct iovec *iov = &out->iov[out->iov_next];
        size_t part = bytes < iov->iov_len ? bytes : iov->iov_len;
        iov->iov_base = (uint8_t *)iov->iov_base + part;
        iov->iov_len -= part;
        bytes -= part;
        if (iov->iov_len == 0)
            out->iov_next++;
    }
}

static ssize_t transmit(int fd, struct mu_secure *secure, struct iovec *iov, size_t count)
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
    return secure ? mu_secure_send(secure, iov, count) : sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static bool stream_write(struct peer *peer)
{
    struct outbox *out = peer->out;
    size_t budget = COMM_TURN_SIZE;
    bool moved = false;
    while (peer->source.writable && budget > 0) {
        if (out->frame_count == 0 && !burst_assemble(peer))
            break;
        ssize_t n = transmit(peer->source.fd, peer->secure, out->iov + out->iov_next, out->iov_count - out->iov_next);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            peer->source.writable = false;
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                /* A goodbye may still wait to be read: the reading side decides what this was. */
                peer->write_errno = errno;
                peer->source.readable = peer->source.hung = true;
                moved = true;
            }
            break;
        }
        moved = true;
        budget -= (size_t)n < budget ? (size_t)n : budget;
        burst_advance(out, (size_t)n);
        if (out->iov_next == out->iov_count)
            burst_sent(peer);
    }
    return moved;
}

/* ---- reading ---- */

static void small_begin(struct peer *peer)
{
    struct inbox *in = peer->in;
    uint64_t exchange = in->head.exchange;
    struct mu_comm_request *request = (struct mu_comm_request *)mu_comm_table_find(&peer->receives, exchange);
    if (request) {
        if (sizes_differ(peer, exchange, in->head.total, request->size))
            return;
        in->request = request;
        in->into = request->far ? in->staging : request->data;
    } else if (mu_comm_table_find(&peer->slots, exchange)) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0, "it sent exchange %llu twice", (unsigned long long)exchange);
        return;
    } else if (peer->slots.count >= MU_COMM_EAGER_HELD) {
        in->held_back = true;
        return;
    } else {
        in->slot = slot_new(peer);
        if (!in->slot) {
            mu_comm_peer_fail(peer, MU_COMM_FAIL_LOCAL, ENOMEM, "no memory for a message of %u bytes", in->head.length);
            return;
        }
        in->slot->link.exchange = exchange;
        in->slot->size = in->head.length;
        in->into = in->slot->data;
    }
    in->missing = in->head.length;
    in->in_payload = true;
}

static void large_begin(struct peer *peer)
{
    struct inbox *in = peer->in;
    uint64_t exchange = in->head.exchange;
    struct mu_comm_request *request = (struct mu_comm_request *)mu_comm_table_find(&peer->receives, exchange);
    if (!request || request->state != REQUEST_GRANTED || in->head.offset != request->moved) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0,
                          "it sent a piece of exchange %llu at byte %llu that was not asked for",
                          (unsigned long long)exchange, (unsigned long long)in->head.offset);
        return;
    }
    if (sizes_differ(peer, exchange, in->head.total, request->size))
        return;
    in->request = request;
    in->into = request->far ? in->staging : request->data + request->moved;
    in->missing = in->head.length;
    in->in_payload = true;
}

static void grant_came(struct peer *peer)
{
    uint64_t exchange = peer->in->head.exchange, total = peer->in->head.total;
    struct mu_comm_request *request = (struct mu_comm_request *)mu_comm_table_find(&peer->sends, exchange);
    if (request) {
        if (sizes_differ(peer, exchange, total, request->size))
            return;
        if (request->state == REQUEST_GRANTED) {
            mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0, "it granted exchange %llu twice",
                              (unsigned long long)exchange);
            return;
        }
        request->state = REQUEST_GRANTED;
        queue_push(&peer->bulk, request);
        return;
    }
    if (peer->grants.count >= MU_COMM_REQUESTS_MAX || mu_comm_table_find(&peer->grants, exchange)) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0,
                          "it granted exchange %llu twice, or more than %d exchanges at once",
                          (unsigned long long)exchange, (int)MU_COMM_REQUESTS_MAX);
        return;
    }
    struct grant *grant = malloc(sizeof *grant);
    if (!grant) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_LOCAL, ENOMEM, "no memory for a grant");
        return;
    }
    *grant = (struct grant){.link = {.exchange = exchange}, .total = total};
    mu_comm_table_insert(&peer->grants, &grant->link);
}

static void bye_came(struct peer *peer)
{
    uint8_t reason = peer->in->head.prefix.reason;
    if (reason != MU_COMM_FAIL_NONE) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0, "it gave this connection up because of: %s",
                          mu_comm_failure_name((enum mu_comm_failure_kind)reason));
        return;
    }
    bool wanted = peer->receives.count + peer->sends.count > 0;
    if (wanted) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_LEFT, 0,
                          "it left this generation while %zu receives and %zu sends were outstanding",
                          peer->receives.count, peer->sends.count);
        return;
    }
    mu_comm_source_close(&peer->source);
    peer->state = PEER_LEFT;
}

static bool frame_fits(const struct peer *peer, const struct wire_frame *head)
{
    if (head->prefix.magic != WIRE_MAGIC || head->prefix.version != WIRE_VERSION ||
        head->generation != peer->group->generation)
        return false;
    switch (head->prefix.kind) {
    case WIRE_BYE:
        return head->length == 0;
    case WIRE_GRANT:
        return head->length == 0 && head->total > MU_COMM_EAGER_SIZE && head->total <= SIZE_MAX;
    case WIRE_DATA:
        if (head->total <= MU_COMM_EAGER_SIZE)
            return head->offset == 0 && head->length == head->total;
        return head->length > 0 && head->length <= MU_COMM_PIECE_SIZE && head->offset <= head->total &&
               head->length <= head->total - head->offset;
    default:
        return false;
    }
}

/* Acts on in->head. In a failed group payloads are thrown away and only a goodbye counts. */
static void frame_begin(struct peer *peer)
{
    struct inbox *in = peer->in;
    in->request = NULL;
    in->slot = NULL;
    in->into = NULL;
    if (!frame_fits(peer, &in->head)) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_PROTOCOL, 0, "it sent bytes that are no frame of generation %llu",
                          (unsigned long long)peer->group->generation);
    } else if (in->head.prefix.kind == WIRE_BYE) {
        bye_came(peer);
    } else if (peer->group->failure_count > 0) {
        in->missing = in->head.length;
        in->in_payload = true;
    } else if (in->head.prefix.kind == WIRE_GRANT) {
        grant_came(peer);
    } else if (in->head.total <= MU_COMM_EAGER_SIZE) {
        small_begin(peer);
    } else {
        large_begin(peer);
    }
    peer->traffic.frames_received++;
}

static void frame_end(struct peer *peer)
{
    struct inbox *in = peer->in;
    in->in_payload = false;
    peer->traffic.bytes_received += in->head.length;
    peer->group->comm->stats.bytes_received += in->head.length;
    if (peer->group->failure_count > 0) {
        if (in->slot)
            slot_release(peer, in->slot);
        in->slot = NULL;
        return;
    }
    if (in->slot) {
        struct slot *slot = in->slot;
        in->slot = NULL;
        struct mu_comm_request *request =
            (struct mu_comm_request *)mu_comm_table_find(&peer->receives, slot->link.exchange);
        if (request)
            slot_deliver(peer, slot, request);
        else
            mu_comm_table_insert(&peer->slots, &slot->link);
    } else if (in->request) {
        if (in->request->far && !put(peer, in->request, in->request->moved, in->staging, in->head.length))
            return;
        in->request->moved += in->head.length;
        if (in->request->moved == in->request->size)
            request_done(peer, in->request);
        MU_FAULT("worker.comm.piece.received");
    }
    in->request = NULL;
}

/* Uses up the bytes of the inbox. */
static void inbox_parse(struct peer *peer)
{
    struct inbox *in = peer->in;
    if (in->resume) {
        in->resume = false;
        peer->traffic.frames_received--; /* looked at once already */
        frame_begin(peer);
    }
    while (peer->state == PEER_UP && !in->held_back) {
        size_t have = in->end - in->begin;
        if (in->in_payload) {
            size_t part = have < in->missing ? have : in->missing;
            if (part && in->into && peer->group->failure_count == 0) {
                memcpy(in->into, in->bytes + in->begin, part);
                in->into += part;
            }
            in->begin += part;
            in->missing -= part;
            if (in->missing)
                return;
            frame_end(peer);
        } else {
            if (have < sizeof in->head)
                return;
            memcpy(&in->head, in->bytes + in->begin, sizeof in->head);
            in->begin += sizeof in->head;
            frame_begin(peer);
        }
    }
}

static void reading_failed(struct peer *peer, int errno_value)
{
    int cause = errno_value ? errno_value : peer->write_errno;
    if (cause == 0 || cause == EPIPE)
        mu_comm_peer_fail(peer, MU_COMM_FAIL_EOF, 0, "it closed the connection without goodbye");
    else
        mu_comm_peer_fail(peer, MU_COMM_FAIL_RESET, cause, "the connection broke");
}

/* One readv: the rest of the payload goes straight to its place, what follows into the inbox. */
static ssize_t inbox_fill(struct peer *peer, size_t *ret_wanted)
{
    struct inbox *in = peer->in;
    struct iovec iov[2];
    int count = 0;
    size_t direct = 0;
    if (in->begin > 0) {
        memmove(in->bytes, in->bytes + in->begin, in->end - in->begin);
        in->end -= in->begin;
        in->begin = 0;
    }
    bool discard = !in->into || peer->group->failure_count > 0;
    if (in->in_payload) {
        direct = discard && in->missing > COMM_SCRATCH_SIZE ? COMM_SCRATCH_SIZE : in->missing;
        iov[count++] = (struct iovec){.iov_base = discard ? peer->group->comm->scratch : in->into, .iov_len = direct};
    }
    if (!in->in_payload || direct == in->missing)
        iov[count++] = (struct iovec){.iov_base = in->bytes + in->end, .iov_len = COMM_INBOX_SIZE - in->end};
    *ret_wanted = direct + (iov[count - 1].iov_base == in->bytes + in->end ? iov[count - 1].iov_len : 0);
    ssize_t n = peer->secure ? mu_secure_receive(peer->secure, iov, (size_t)count) : readv(peer->source.fd, iov, count);
    if (n <= 0)
        return n;
    size_t placed = (size_t)n < direct ? (size_t)n : direct;
    in->missing -= in->in_payload ? placed : 0;
    if (in->in_payload && !discard)
        in->into += placed;
    in->end += (size_t)n - placed;
    return n;
}

static bool stream_read(struct peer *peer)
{
    struct inbox *in = peer->in;
    size_t budget = COMM_TURN_SIZE;
    bool moved = in->resume;
    inbox_parse(peer);
    while (peer->state == PEER_UP && peer->source.readable && !in->held_back && budget > 0) {
        size_t wanted;
        ssize_t n = inbox_fill(peer, &wanted);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            peer->source.readable = false;
            /* A write has failed but nothing more can be read: no goodbye will come. */
            if (peer->write_errno)
                reading_failed(peer, peer->write_errno);
            break;
        }
        moved = true;
        if (n <= 0) {
            reading_failed(peer, n < 0 ? errno : 0);
            break;
        }
        budget -= (size_t)n < budget ? (size_t)n : budget;
        /* Less than asked for: drained (but not when TLS gives it out by records). What comes later, an end-of-file
         * too, raises a new edge. */
        if ((size_t)n < wanted && !peer->source.hung && !peer->secure)
            peer->source.readable = false;
        inbox_parse(peer);
    }
    return moved;
}

/* ---- life ---- */

void mu_comm_stream_start(struct peer *peer)
{
    struct mu_device *device = peer->group->comm->device;
    void *staging = NULL;
    peer->in = calloc(1, sizeof *peer->in);
    peer->out = calloc(1, sizeof *peer->out);
    if (!peer->in || !peer->out ||
        (device && mu_device_allocate(device, MU_MEMORY_PINNED, COMM_STAGING_SIZE + MU_COMM_PIECE_SIZE, NULL,
                                      &staging) != MU_OK)) {
        mu_comm_peer_fail(peer, MU_COMM_FAIL_LOCAL, ENOMEM, "no memory for the connection");
        return;
    }
    peer->out->staging = staging;
    peer->in->staging = staging ? peer->out->staging + COMM_STAGING_SIZE : NULL;
    peer->state = PEER_UP;
    peer->source.readable = peer->source.writable = true;
    peer->group->up_count++;
}

static bool has_output(const struct peer *peer)
{
    return peer->out->frame_count || peer->to_grant.first || peer->small.first || peer->bulk.first;
}

bool mu_comm_stream_step(struct peer *peer)
{
    bool moved = false;
    if (peer->group->failure_count > 0) {
        /* Only to tell a goodbye from a death; what is there to read is bounded, as the other end has closed. */
        return peer->source.hung && peer->source.readable && stream_read(peer);
    }
    if (peer->source.writable && has_output(peer))
        moved = stream_write(peer);
    if (peer->source.readable || peer->in->resume)
        moved |= stream_read(peer);
    /* Grants that have just come let large messages go without another turn. */
    if (peer->state == PEER_UP && peer->group->failure_count == 0 && peer->source.writable && has_output(peer))
        moved |= stream_write(peer);
    return moved;
}

/* ---- leaving ---- */

/* True when the frame has gone or never will. */
static bool leaving_push(struct leaving *leaving)
{
    while (leaving->sent < sizeof leaving->bye) {
        struct iovec rest = {.iov_base = (uint8_t *)&leaving->bye + leaving->sent,
                             .iov_len = sizeof leaving->bye - leaving->sent};
        ssize_t n = transmit(leaving->source.fd, leaving->secure, &rest, 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            leaving->source.writable = false;
            return errno != EAGAIN && errno != EWOULDBLOCK;
        }
        leaving->sent += (size_t)n;
    }
    return true;
}

/* A socket closed with unread bytes sends a reset, which may overtake the goodbye. */
static void leaving_free(struct leaving *leaving, uint8_t *scratch)
{
    struct source *source = &leaving->source;
    for (size_t bytes = 0; bytes < COMM_TURN_SIZE; bytes += COMM_SCRATCH_SIZE) {
        if (recv(source->fd, scratch, COMM_SCRATCH_SIZE, MSG_DONTWAIT) <= 0)
            break;
    }
    mu_comm_source_close(source);
    mu_secure_free(leaving->secure);
    free(leaving);
}

void mu_comm_stream_leave(struct peer *peer, enum mu_comm_failure_kind reason)
{
    struct mu_comm *comm = peer->group->comm;
    const struct outbox *out = peer->out;
    bool speaks = peer->state == PEER_UP && peer->source.fd >= 0 && out;
    bool half_sent = speaks && out->frame_count &&
                     (out->iov_next > 0 || out->iov[0].iov_len < sizeof(struct wire_frame) ||
                      (peer->secure && mu_secure_is_midway(peer->secure)));
    struct leaving *leaving = speaks && !half_sent ? calloc(1, sizeof *leaving) : NULL;
    if (!leaving) {
        mu_comm_source_close(&peer->source);
        return;
    }
    leaving->source = (struct source){.kind = SOURCE_LEAVING, .fd = peer->source.fd};
    leaving->deadline_us = mu_clock_mono_us() + COMM_LINGER_US;
    leaving->bye = (struct wire_frame){
        .prefix = {.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = WIRE_BYE, .reason = (uint8_t)reason},
        .generation = peer->group->generation,
    };
    leaving->secure = peer->secure;
    peer->secure = NULL;
    peer->source.fd = -1;
    if (leaving_push(leaving) || mu_comm_watch(comm, &leaving->source) != 0) {
        leaving_free(leaving, comm->scratch);
        return;
    }
    leaving->next = comm->leaving;
    comm->leaving = leaving;
}

void mu_comm_leaving_step(struct mu_comm *comm, uint64_t now_us)
{
    struct leaving **at = &comm->leaving;
    while (*at) {
        struct leaving *leaving = *at;
        bool over = now_us >= leaving->deadline_us || (leaving->source.writable && leaving_push(leaving));
        if (!over) {
            at = &leaving->next;
            continue;
        }
        *at = leaving->next;
        leaving_free(leaving, comm->scratch);
    }
}

/* ---- the end ---- */

static void list_free(struct mu_comm_link *link)
{
    while (link) {
        struct mu_comm_link *next = link->next;
        free(link);
        link = next;
    }
}

void mu_comm_stream_fini(struct peer *peer)
{
    for (size_t i = 0; i < COMM_BUCKETS; i++) {
        list_free(peer->slots.buckets[i]);
        list_free(peer->grants.buckets[i]);
    }
    list_free((struct mu_comm_link *)peer->free_slots);
    if (peer->in)
        free(peer->in->slot);
    if (peer->out)
        mu_device_release(peer->group->comm->device, MU_MEMORY_PINNED, peer->out->staging,
                          COMM_STAGING_SIZE + MU_COMM_PIECE_SIZE);
    free(peer->in);
    free(peer->out);
    mu_secure_free(peer->secure);
}
