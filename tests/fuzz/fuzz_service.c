/* links: mu_fuzz_coordinator mu_coordinator PkgConfig::OPENSSL */
/* Requests of other programs: every method's message, unpacked, judged, answered by the real service on a core that
 * knows one job. Each call is answered exactly once, or is a watch that is still open.
 *
 * The RPC layer below is this file: a call is a few fields. Input: (method u8, message)*. */
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/api.h"
#include "coordinator/health.h"
#include "coordinator/reflection.h"
#include "coordinator/hang.h"
#include "coordinator/recall.h"
#include "coordinator/tokens.h"
#include "rpc/certificate.h"
#include "tests/fuzz/coordinator.h"

enum { CALLS_MAX = 64, SENDS_MAX = 6 };

struct mu_rpc_call {
    int method;
    void *user;
    bool is_ended;
    unsigned send_count;
};

static char *worker_pem; /* what callers have shown */

/* ---- the RPC layer, as far as the service sees it ---- */

static void end(struct mu_rpc_call *call)
{
    MU_ASSERT(!call->is_ended);
    call->is_ended = true;
}

void mu_rpc_call_reply(struct mu_rpc_call *call, struct mu_rpc_bytes *reply)
{
    MU_ASSERT(mu_rpc_bytes_size(reply) <= MU_WIRE_REPLY_BYTES_MAX);
    fuzz_accepted++;
    end(call);
}

void mu_rpc_call_fail(struct mu_rpc_call *call, enum mu_rpc_code code, const char *text)
{
    MU_ASSERT(code != MU_RPC_OK && text[0] && mu_wire_text_ok(text, MU_ERROR_TEXT_SIZE));
    end(call);
}

void mu_rpc_call_fail_as(struct mu_rpc_call *call, enum mu_rpc_code code, const struct mu_error *err)
{
    mu_rpc_call_fail(call, code, err->text);
}

void mu_rpc_call_fail_error(struct mu_rpc_call *call, const struct mu_error *err)
{
    mu_rpc_call_fail(call, mu_rpc_code_of_status(err->status), err->text);
}

void mu_rpc_call_finish(struct mu_rpc_call *call, enum mu_rpc_code code, const char *text)
{
    MU_ASSERT(code == MU_RPC_OK || text[0]);
    end(call);
}

/* A stream that is full after a few. */
enum mu_status mu_rpc_call_send(struct mu_rpc_call *call, struct mu_rpc_bytes *message)
{
    MU_ASSERT(!call->is_ended && mu_rpc_bytes_size(message) <= MU_WIRE_REPLY_BYTES_MAX);
    return call->send_count++ < SENDS_MAX ? MU_OK : MU_ERR_LIMIT;
}

void mu_rpc_call_set_user(struct mu_rpc_call *call, void *user)
{
    call->user = user;
}

void *mu_rpc_call_user(const struct mu_rpc_call *call)
{
    return call->user;
}

int mu_rpc_call_method_id(const struct mu_rpc_call *call)
{
    return call->method;
}

const char *mu_rpc_call_identity(struct mu_rpc_call *call)
{
    return call->method == MU_METHOD_RENEW ? "muster://worker/h7" : "muster://admin/ann";
}

/* One that may be renewed. */
char *mu_rpc_call_certificate(const struct mu_rpc_call *call)
{
    (void)call;
    return strdup(worker_pem);
}

const char *mu_rpc_call_peer(struct mu_rpc_call *call)
{
    (void)call;
    return "10.0.0.7:51324";
}

/* ---- a service ---- */

struct service {
    struct fuzz_coordinator coordinator;
    struct mu_events *events;
    struct mu_health *health;
    struct mu_api *api;
    struct mu_tokens *tokens;
    struct mu_sessions *sessions;
    struct mu_recalls *recalls;
    struct mu_hangs *hangs;
    struct mu_wire_arena arena;
    struct mu_rpc_call calls[CALLS_MAX];
    unsigned call_count;
};

/* For all inputs: an outbox has a thread, and making a CA takes a while. Nothing is left in them between two. */
static struct mu_outbox *outbox;
static struct mu_access *access_list;
static char ca_cert[64], ca_key[64];

static void no_wake(void *arg)
{
    (void)arg;
}

static void on_action(void *ctx, const struct mu_coord_action *action)
{
    struct service *service = ctx;
    struct mu_error err = {0};
    if (action->kind == MU_CA_REPLY)
        mu_api_reply(service->api, action);
    if (action->kind != MU_CA_EVENT)
        return;
    struct mu_rpc_bytes *bytes = mu_event_encode(&service->coordinator.arena, action->event, &err);
    MU_ASSERT(bytes);
    mu_events_add(service->events, action->event->number, action->event->job, bytes);
}

static void step(void *ctx, struct mu_coord_event *event)
{
    struct service *service = ctx;
    fuzz_coordinator_step(&service->coordinator, event);
    mu_api_after_step(service->api);
}

static void remove_files(void)
{
    unlink(ca_cert);
    unlink(ca_key);
    ca_key[strlen(ca_key) - strlen("/ca.key")] = 0;
    rmdir(ca_key);
}

static void start_once(void)
{
    const struct mu_certificate_subject subject = {.name = "CA", .valid_s = MU_CERTIFICATE_DAY_S};
    const struct mu_certificate_subject worker = {
        .role = "worker", .name = "h7", .valid_s = 3650u * MU_CERTIFICATE_DAY_S, .is_renewable = true};
    struct mu_certificate_pair ca = {0}, shown = {0};
    struct mu_error err = {0};
    char dir[] = "/tmp/mu-fuzz-XXXXXX";
    bool has_dir = mkdtemp(dir) != NULL;
    MU_ASSERT(has_dir);
    snprintf(ca_cert, sizeof ca_cert, "%s/ca.crt", dir);
    snprintf(ca_key, sizeof ca_key, "%s/ca.key", dir);
    enum mu_status status = MU_OK;
    if ((status = mu_certificate_make(&subject, NULL, &ca, &err)) == MU_OK &&
        (status = mu_certificate_write_pair(ca_cert, ca_key, &ca, &err)) == MU_OK &&
        (status = mu_certificate_make(&worker, &ca, &shown, &err)) == MU_OK &&
        (status = mu_access_new(NULL, &access_list, &err)) == MU_OK)
        status = mu_outbox_new(mu_store_memory_new(), no_wake, NULL, NULL, &outbox, &err);
    MU_ASSERT(status == MU_OK);
    worker_pem = mu_certificate_to_pem(shown.cert);
    MU_ASSERT(worker_pem);
    mu_certificate_pair_free(&shown);
    mu_certificate_pair_free(&ca);
    atexit(remove_files);
    mu_log_init("fuzz", MU_LOG_ERROR);
}

static void start(struct service *service)
{
    struct mu_error err = {0};
    memset(service, 0, sizeof *service);
    mu_wire_arena_init(&service->arena);
    if (!outbox)
        start_once();
    bool is_new = fuzz_coordinator_init(&service->coordinator, mu_store_memory_new(), &err);
    MU_ASSERT(is_new);
    enum mu_status status = mu_events_new(MU_EVENTS_KEPT_MIN, &service->events, &err);
    MU_ASSERT(status == MU_OK);
    status = mu_health_new(&service->health, &err);
    MU_ASSERT(status == MU_OK);
    struct mu_api_config config = {.coord = service->coordinator.core,
                                   .store = service->coordinator.store,
                                   .outbox = outbox,
                                   .events = service->events,
                                   .step = step,
                                   .ctx = service};
    status = mu_api_new(&config, &service->api, &err);
    MU_ASSERT(status == MU_OK);
    const struct mu_tokens_config tokens = {.store = service->coordinator.store,
                                            .outbox = outbox,
                                            .access = access_list,
                                            .ca_cert = ca_cert,
                                            .ca_key = ca_key,
                                            .certificate_s = MU_CERTIFICATE_DAY_S};
    status = mu_tokens_new(&tokens, &service->tokens, &err);
    MU_ASSERT(status == MU_OK);
    if ((status = mu_sessions_new(1, &service->sessions, &err)) ==
        MU_OK) /* nobody can be asked: its workers have no calls */
        status = mu_recalls_new(service->coordinator.core, service->sessions, &service->recalls, &err);
    MU_ASSERT(status == MU_OK);
    status = mu_hangs_new(service->coordinator.core, service->coordinator.store, outbox, service->recalls,
                          &service->hangs, &err);
    MU_ASSERT(status == MU_OK);
    service->coordinator.also = on_action;
    service->coordinator.also_ctx = service;
    fuzz_coordinator_submit(&service->coordinator, "tiny");
}

static void stop(struct service *service)
{
    mu_events_end(service->events);
    mu_health_end(service->health);
    for (unsigned i = 0; i < service->call_count; i++)
        MU_ASSERT(service->calls[i].is_ended || service->calls[i].method == MU_METHOD_REFLECTION ||
                  service->calls[i].method == MU_METHOD_REFLECTION_ALPHA);
    mu_api_free(service->api);
    mu_tokens_free(service->tokens);
    mu_hangs_free(service->hangs);
    mu_recalls_free(service->recalls);
    mu_sessions_free(service->sessions);
    mu_events_free(service->events);
    mu_health_free(service->health);
    fuzz_coordinator_check_restart(&service->coordinator);
    fuzz_coordinator_fini(&service->coordinator);
    mu_wire_arena_fini(&service->arena);
}

/* What tokens store goes through the outbox: the answer waits for its thread. */
static void settle(void)
{
    struct mu_error err = {0};
    enum mu_status status = mu_outbox_end_turn(outbox, &err);
    MU_ASSERT(status == MU_OK);
    do
        mu_outbox_release(outbox);
    while (!mu_outbox_idle(outbox) && sched_yield() == 0);
}

static void ask(struct service *service, int method, const uint8_t *data, size_t size_bytes)
{
    struct mu_rpc_call *call = &service->calls[service->call_count++];
    call->method = method;
    if (method == MU_METHOD_HEALTH_CHECK)
        mu_health_check(service->health, call, data, size_bytes);
    else if (method == MU_METHOD_HEALTH_WATCH)
        mu_health_watch(service->health, call, data, size_bytes);
    else if (method >= MU_METHOD_LIST_HANG_REPORTS)
        mu_hangs_call(service->hangs, call, data, size_bytes);
    else if (method >= MU_METHOD_RECALL)
        mu_recalls_call(service->recalls, call, data, size_bytes);
    else if (method >= MU_METHOD_CREATE_TOKEN)
        mu_tokens_call(service->tokens, call, data, size_bytes);
    else if (method >= MU_METHOD_REFLECTION)
        mu_reflection_message(&service->arena, call, data, size_bytes);
    else
        mu_api_call(service->api, call, data, size_bytes);
    settle();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    struct fuzz_input input = {data, size_bytes};
    static struct service service;
    start(&service);
    while (input.left > 0 && service.call_count < CALLS_MAX) {
        int method = fuzz_byte(&input) % MU_METHOD_COUNT;
        size_t part_bytes;
        uint8_t *part = fuzz_part(&input, &part_bytes);
        if (method != MU_METHOD_ATTACH)
            ask(&service, method, part, part_bytes);
        free(part);
    }
    stop(&service);
    return 0;
}
