#include "rpc/peers.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/status.h"

enum { BUCKETS = 1024, PART_OF_ASK = 1000000 }; /* credit grows by asks_per_second of these parts in a microsecond */

struct mu_rpc_peer {
    struct mu_rpc_peer *next; /* in its bucket */
    struct mu_rpc_peer *idle_previous, *idle_next;
    size_t open_count; /* 0: in the idle list */
    uint64_t credit, counted_us;
    uint32_t bucket;
    char name[];
};

struct mu_rpc_peers {
    size_t max_open;
    unsigned asks_per_second;
    struct mu_rpc_peer *buckets[BUCKETS];
    struct mu_rpc_peer *idle_first, *idle_last; /* longest idle first */
    size_t idle_count;
};

struct mu_rpc_peers *mu_rpc_peers_new(size_t max_open, unsigned asks_per_second)
{
    struct mu_rpc_peers *peers = calloc(1, sizeof *peers);
    if (peers)
        *peers = (struct mu_rpc_peers){.max_open = max_open ? max_open : SIZE_MAX, .asks_per_second = asks_per_second};
    return peers;
}

void mu_rpc_peers_free(struct mu_rpc_peers *peers)
{
    for (size_t i = 0; peers && i < BUCKETS; i++) {
        for (struct mu_rpc_peer *peer = peers->buckets[i], *next; peer; peer = next) {
            next = peer->next;
            free(peer);
        }
    }
    free(peers);
}

static void leave_idle(struct mu_rpc_peers *peers, struct mu_rpc_peer *peer)
{
    if (peer->idle_previous)
        peer->idle_previous->idle_next = peer->idle_next;
    else
        peers->idle_first = peer->idle_next;
    if (peer->idle_next)
        peer->idle_next->idle_previous = peer->idle_previous;
    else
        peers->idle_last = peer->idle_previous;
    peer->idle_previous = peer->idle_next = NULL;
    peers->idle_count--;
}

static void join_idle(struct mu_rpc_peers *peers, struct mu_rpc_peer *peer)
{
    peer->idle_previous = peers->idle_last;
    if (peers->idle_last)
        peers->idle_last->idle_next = peer;
    else
        peers->idle_first = peer;
    peers->idle_last = peer;
    peers->idle_count++;
}

static void forget(struct mu_rpc_peers *peers, struct mu_rpc_peer *peer)
{
    struct mu_rpc_peer **link = &peers->buckets[peer->bucket];
    while (*link != peer)
        link = &(*link)->next;
    *link = peer->next;
    leave_idle(peers, peer);
    free(peer);
}

/* A new one is idle at first. */
static struct mu_rpc_peer *find(struct mu_rpc_peers *peers, const char *name)
{
    size_t length = strlen(name);
    uint32_t bucket = (uint32_t)(mu_xxh3_128(name, length).low % BUCKETS);
    for (struct mu_rpc_peer *peer = peers->buckets[bucket]; peer; peer = peer->next)
        if (strcmp(peer->name, name) == 0)
            return peer;
    struct mu_rpc_peer *peer = calloc(1, sizeof *peer + length + 1);
    MU_ASSERT(peer);
    memcpy(peer->name, name, length + 1);
    peer->bucket = bucket;
    peer->next = peers->buckets[bucket];
    peers->buckets[bucket] = peer;
    peer->credit = UINT64_MAX; /* cut to what it may be when it first asks */
    join_idle(peers, peer);
    if (peers->idle_count > MU_RPC_PEERS_IDLE_MAX)
        forget(peers, peers->idle_first);
    return peer;
}

struct mu_rpc_peer *mu_rpc_peers_open(struct mu_rpc_peers *peers, const char *name)
{
    struct mu_rpc_peer *peer = find(peers, name);
    if (peer->open_count >= peers->max_open)
        return NULL;
    if (peer->open_count++ == 0)
        leave_idle(peers, peer);
    return peer;
}

void mu_rpc_peers_close(struct mu_rpc_peers *peers, struct mu_rpc_peer *peer)
{
    MU_ASSERT(peer->open_count > 0);
    if (--peer->open_count > 0)
        return;
    join_idle(peers, peer);
    if (peers->idle_count > MU_RPC_PEERS_IDLE_MAX)
        forget(peers, peers->idle_first);
}

bool mu_rpc_peers_ask(struct mu_rpc_peers *peers, struct mu_rpc_peer *peer, uint64_t now_us)
{
    uint64_t most = (uint64_t)peers->asks_per_second * MU_RPC_PEERS_BURST_S * PART_OF_ASK;
    uint64_t since_us = now_us - peer->counted_us, full_us = MU_RPC_PEERS_BURST_S * 1000000ull;
    if (peers->asks_per_second == 0)
        return true;
    peer->counted_us = now_us;
    uint64_t grown = (since_us < full_us ? since_us : full_us) * peers->asks_per_second;
    peer->credit = peer->credit < most - grown ? peer->credit + grown : most;
    if (peer->credit < PART_OF_ASK)
        return false;
    peer->credit -= PART_OF_ASK;
    return true;
}

void mu_rpc_peer_host(const char *address, char out[MU_RPC_PEER_NAME_SIZE])
{
    struct in6_addr v6;
    const char *end = strrchr(address, ':');
    bool is_v6 = address[0] == '[' && end && end > address + 1;
    if (!end || strncmp(address, "unix:", 5) == 0)
        end = address + strlen(address);
    snprintf(out, MU_RPC_PEER_NAME_SIZE, "%.*s", (int)(end - address - 2 * is_v6), address + is_v6);
    if (!is_v6 || inet_pton(AF_INET6, out, &v6) != 1 || IN6_IS_ADDR_V4MAPPED(&v6))
        return;
    memset(v6.s6_addr + 8, 0, 8);
    inet_ntop(AF_INET6, &v6, out, MU_RPC_PEER_NAME_SIZE);
    strcat(out, "/64");
}
