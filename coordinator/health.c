#include "coordinator/health.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "proto/wire_pb.h"

#define STATUS(name) GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__##name
typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;

static const char *const services[] = {
    "", /* the server as a whole */
    "muster.v1.MusterService",
    "muster.v1.WorkerService",
    "muster.v1.TokenService",
    "muster.v1.DiagnosticService",
    "muster.v1.ProbeService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
};

struct watcher {
    struct watcher *next, *previous;
    struct mu_rpc_call *call;
    bool is_known; /* the service */
    serving_status told;
};

struct mu_health {
    struct mu_wire_arena arena;
    struct watcher *watchers;
    bool is_serving;
};

enum mu_status mu_health_new(struct mu_health **ret_health, struct mu_error *err)
{
    struct mu_health *health = calloc(1, sizeof *health);
    if (!health)
        return mu_fail(err, MU_ERR_NO_MEMORY, "health: no memory");
    mu_wire_arena_init(&health->arena);
    health->is_serving = true;
    *ret_health = health;
    return MU_OK;
}

void mu_health_free(struct mu_health *health)
{
    if (!health)
        return;
    while (health->watchers) {
        struct watcher *watcher = health->watchers;
        health->watchers = watcher->next;
        free(watcher);
    }
    mu_wire_arena_fini(&health->arena);
    free(health);
}

/* Fails the call itself when the request cannot be read. */
static bool read_request(struct mu_health *health, struct mu_rpc_call *call, const void *data, size_t size_bytes,
                         const char **ret_service)
{
    struct mu_error err = {0};
    const ProtobufCMessage *base = NULL;
    mu_wire_arena_reset(&health->arena);
    if (mu_wire_unpack(&health->arena, &grpc__health__v1__health_check_request__descriptor, data, size_bytes,
                       MU_WIRE_REQUEST_BYTES_MAX, &base, &err) != MU_OK) {
        mu_rpc_call_fail_error(call, &err);
        return false;
    }
    *ret_service = ((const Grpc__Health__V1__HealthCheckRequest *)base)->service;
    return true;
}

static bool is_known(const char *service)
{
    for (size_t i = 0; i < sizeof services / sizeof services[0]; i++)
        if (strcmp(service, services[i]) == 0)
            return true;
    return false;
}

static struct mu_rpc_bytes *encode(serving_status status)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    uint8_t packed[16];
    response.status = status;
    MU_ASSERT(protobuf_c_message_get_packed_size(&response.base) <= sizeof packed);
    return mu_rpc_bytes_copy(packed, protobuf_c_message_pack(&response.base, packed));
}

static serving_status status_now(const struct mu_health *health)
{
    return health->is_serving ? STATUS(SERVING) : STATUS(NOT_SERVING);
}

void mu_health_check(struct mu_health *health, struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    const char *service = NULL;
    if (!read_request(health, call, data, size_bytes, &service))
        return;
    if (!is_known(service)) {
        char text[200];
        snprintf(text, sizeof text, "service: there is no '%.100s' here", service);
        mu_rpc_call_fail(call, MU_RPC_NOT_FOUND, text);
        return;
    }
    struct mu_rpc_bytes *bytes = encode(status_now(health));
    mu_rpc_call_reply(call, bytes);
    mu_rpc_bytes_unref(bytes);
}

/* What is told is the present, not the history: when a stream takes nothing now, it is told when it does. */
static void tell(const struct mu_health *health, struct watcher *watcher)
{
    serving_status status = watcher->is_known ? status_now(health) : STATUS(SERVICE_UNKNOWN);
    if (status == watcher->told)
        return;
    struct mu_rpc_bytes *bytes = encode(status);
    if (mu_rpc_call_send(watcher->call, bytes) == MU_OK)
        watcher->told = status;
    mu_rpc_bytes_unref(bytes);
}

void mu_health_watch(struct mu_health *health, struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    const char *service = NULL;
    if (!read_request(health, call, data, size_bytes, &service))
        return;
    struct watcher *watcher = calloc(1, sizeof *watcher);
    if (!watcher) {
        mu_rpc_call_finish(call, MU_RPC_RESOURCE_EXHAUSTED, "no memory for another watcher");
        return;
    }
    *watcher = (struct watcher){
        .call = call, .is_known = is_known(service), .told = STATUS(UNKNOWN), .next = health->watchers};
    if (health->watchers)
        health->watchers->previous = watcher;
    health->watchers = watcher;
    mu_rpc_call_set_user(call, watcher);
    tell(health, watcher);
}

void mu_health_writable(struct mu_health *health, void *user)
{
    if (user)
        tell(health, user);
}

static void end_watch(struct mu_health *health, struct watcher *watcher, enum mu_rpc_code code, const char *text)
{
    if (watcher->previous)
        watcher->previous->next = watcher->next;
    else
        health->watchers = watcher->next;
    if (watcher->next)
        watcher->next->previous = watcher->previous;
    mu_rpc_call_set_user(watcher->call, NULL);
    mu_rpc_call_finish(watcher->call, code, text);
    free(watcher);
}

void mu_health_closed(struct mu_health *health, void *user)
{
    if (user)
        end_watch(health, user, MU_RPC_OK, NULL);
}

void mu_health_set(struct mu_health *health, bool is_serving)
{
    if (is_serving == health->is_serving)
        return;
    health->is_serving = is_serving;
    for (struct watcher *watcher = health->watchers; watcher; watcher = watcher->next)
        tell(health, watcher);
}

void mu_health_end(struct mu_health *health)
{
    mu_health_set(health, false);
    while (health->watchers)
        end_watch(health, health->watchers, MU_RPC_UNAVAILABLE, "the coordinator is stopping");
}
