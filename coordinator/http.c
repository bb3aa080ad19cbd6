#include "coordinator/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/dashboard.h"
#include "coordinator/http_api.h"
#include "coordinator/question.h"

enum { ADDRESS_SIZE = 128, HEADER_BYTES_MAX = 8192, PAGES = 64, KEY_SIZE = 512 };

/* An answer that serves everybody who asks the same for MU_HTTP_PAGE_AGE_MS. */
struct page {
    char key[KEY_SIZE]; /* path and query; empty: none */
    struct mu_http_reply reply;
    uint64_t made_us;
};

struct mu_http {
    struct mu_rpc_server *server;
    struct mu_store *store;
    struct MHD_Daemon *daemon;
    char address[ADDRESS_SIZE];
    /* The listener's thread. */
    struct page pages[PAGES];
    bool may_write; /* as of the newest page of metrics */
};

/* ---- pages ---- */

static const char api_path[] = "/api/v1/", metrics_path[] = "/metrics";

static void make_metrics(struct mu_http *http, struct mu_http_reply *reply, uint64_t until_us)
{
    struct mu_question *question = mu_question_ask(http->server, MU_ASK_METRICS, 0, NULL, 0, until_us);
    if (!question)
        return;
    struct mu_question_answer *answer = mu_question_answer_of(question);
    *reply = (struct mu_http_reply){.status = MHD_HTTP_OK,
                                    .type = "text/plain; version=0.0.4; charset=utf-8",
                                    .body = answer->page,
                                    .size_bytes = answer->page_size};
    http->may_write = answer->may_write;
    answer->page = NULL;
    mu_question_free(question);
}

struct parameters {
    struct MHD_Connection *connection;
    mu_http_parameter_fn *fn;
    void *ctx;
};

static enum MHD_Result each_one(void *ctx, enum MHD_ValueKind kind, const char *name, const char *value)
{
    const struct parameters *parameters = ctx;
    (void)kind;
    return parameters->fn(parameters->ctx, name, value ? value : "") ? MHD_YES : MHD_NO;
}

static void each_parameter(void *connection, mu_http_parameter_fn *fn, void *ctx)
{
    struct parameters parameters = {.fn = fn, .ctx = ctx};
    MHD_get_connection_values(connection, MHD_GET_ARGUMENT_KIND, each_one, &parameters);
}

struct key {
    char *text;
    size_t size;
    bool fits;
};

static bool add_to_key(void *ctx, const char *name, const char *value)
{
    struct key *key = ctx;
    int length = snprintf(key->text + key->size, KEY_SIZE - key->size, "&%s=%s", name, value);
    key->fits = length >= 0 && key->size + (size_t)length < KEY_SIZE;
    key->size += key->fits ? (size_t)length : 0;
    return key->fits;
}

/* The page of that key if it is not too old, else the one whose place it takes. */
static struct page *place_of(struct mu_http *http, const char *key)
{
    struct page *oldest = &http->pages[0];
    for (int i = 0; i < PAGES; i++) {
        struct page *page = &http->pages[i];
        if (strcmp(page->key, key) == 0)
            return page;
        if (page->made_us < oldest->made_us)
            oldest = page;
    }
    return oldest;
}

/* NULL: the core does not answer (or there is no memory). */
static const struct mu_http_reply *fetch(struct mu_http *http, struct MHD_Connection *connection, const char *url)
{
    static const struct mu_http_reply too_long = {
        .status = MHD_HTTP_URI_TOO_LONG, .type = "text/plain", .body = "", .size_bytes = 0};
    char text[KEY_SIZE];
    struct key key = {.text = text, .size = strlen(url), .fits = strlen(url) < KEY_SIZE};
    bool is_metrics = strcmp(url, metrics_path) == 0;
    if (!key.fits)
        return &too_long;
    memcpy(text, url, key.size + 1);
    if (!is_metrics)
        each_parameter(connection, add_to_key, &key);
    if (!key.fits)
        return &too_long;
    uint64_t now_us = mu_clock_mono_us();
    struct page *page = place_of(http, text);
    if (strcmp(page->key, text) == 0 && now_us - page->made_us < MU_HTTP_PAGE_AGE_MS * 1000ull)
        return &page->reply;
    struct mu_http_reply reply = {0};
    struct mu_http_request request = {.path = url + sizeof api_path - 1,
                                      .each = each_parameter,
                                      .parameters = connection,
                                      .until_us = now_us + MU_HTTP_ANSWER_MS * 1000ull};
    if (is_metrics)
        make_metrics(http, &reply, request.until_us);
    else
        mu_http_api(http->server, http->store, &request, &reply);
    if (!reply.body)
        return NULL;
    free(page->reply.body);
    page->reply = reply;
    page->made_us = mu_clock_mono_us();
    memcpy(page->key, text, sizeof text);
    return &page->reply;
}

/* ---- requests ---- */

static enum MHD_Result respond(struct MHD_Connection *connection, unsigned status, const char *type, const char *text,
                               size_t size)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(size, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
    if (!response)
        return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Content-Security-Policy",
                            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                            "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'");
    MHD_add_response_header(response, "Referrer-Policy", "no-referrer");
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    enum MHD_Result result = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result say(struct MHD_Connection *connection, unsigned status, const char *line)
{
    return respond(connection, status, "text/plain; charset=utf-8", line, strlen(line));
}

/* A page in a browser may have made a name of its own point here (DNS rebinding): only literal addresses and localhost
 * are names of this listener. */
static bool host_is_ours(const char *host)
{
    char name[ADDRESS_SIZE];
    unsigned char binary[sizeof(struct in6_addr)];
    if (!host)
        return true; /* HTTP/1.0 */
    size_t length = host[0] == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":");
    if (length >= sizeof name || length == 0)
        return false;
    memcpy(name, host, length);
    name[length] = 0;
    if (name[0] == '[') {
        name[length - 1] = 0;
        return inet_pton(AF_INET6, name + 1, binary) == 1;
    }
    return strcmp(name, "localhost") == 0 || inet_pton(AF_INET, name, binary) == 1;
}

static enum MHD_Result on_request(void *ctx, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_size, void **state)
{
    struct mu_http *http = ctx;
    (void)version;
    (void)upload;
    if (*upload_size > 0) { /* of a body that nobody wants */
        *upload_size = 0;
        return MHD_YES;
    }
    if (!*state) { /* the headers are there; the answer comes with the next call */
        *state = http;
        return MHD_YES;
    }
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return say(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD: this listener changes nothing\n");
    if (!host_is_ours(MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST)))
        return say(connection, MHD_HTTP_FORBIDDEN, "this name is not allowed in Host: use the literal address\n");
    if (strcmp(url, "/") == 0)
        return respond(connection, MHD_HTTP_OK, "text/html; charset=utf-8", mu_dashboard, mu_dashboard_size());
    bool is_probe = strcmp(url, "/livez") == 0 || strcmp(url, "/readyz") == 0,
         is_metrics = strcmp(url, metrics_path) == 0;
    if (!is_probe && !is_metrics && strncmp(url, api_path, sizeof api_path - 1) != 0)
        return say(connection, MHD_HTTP_NOT_FOUND, "there are /, /api/v1/, /livez, /readyz and /metrics\n");
    const struct mu_http_reply *reply = fetch(http, connection, is_probe ? metrics_path : url);
    if (!reply)
        return say(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "the core does not answer\n");
    if (strcmp(url, "/readyz") == 0 && !http->may_write)
        return say(connection, MHD_HTTP_SERVICE_UNAVAILABLE,
                   "changes are refused: too little space for the data directory\n");
    return is_probe ? say(connection, MHD_HTTP_OK, "ok\n")
                    : respond(connection, reply->status, reply->type, reply->body, reply->size_bytes);
}

/* ---- the listener ---- */

static enum mu_status parse(const char *listen, struct sockaddr_storage *ret_address, struct mu_error *err)
{
    char host[ADDRESS_SIZE];
    const char *colon = strrchr(listen, ':');
    size_t length = colon ? (size_t)(colon - listen) : 0;
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE, .ai_socktype = SOCK_STREAM},
                    *found = NULL;
    bool bracketed = length > 2 && listen[0] == '[' && listen[length - 1] == ']';
    bool port_fits =
        colon && strspn(colon + 1, "0123456789") == strlen(colon + 1) && strtoul(colon + 1, NULL, 10) <= 65535;
    if (length > 0 && length < sizeof host && port_fits) {
        memcpy(host, listen + bracketed, length - 2u * bracketed);
        host[length - 2u * bracketed] = 0;
        if (getaddrinfo(host, colon + 1, &hints, &found) != 0)
            found = NULL;
    }
    if (!found)
        return mu_fail(
            err, MU_ERR_INVALID,
            "--http: value '%s' is not allowed: a literal address and a port, as 127.0.0.1:7071 or [::1]:7071", listen);
    memcpy(ret_address, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    return MU_OK;
}

static void name_address(struct mu_http *http, const char *listen)
{
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_BIND_PORT);
    const char *colon = strrchr(listen, ':');
    snprintf(http->address, sizeof http->address, "%.*s:%u", (int)(colon - listen), listen,
             info ? (unsigned)info->port : 0);
}

static bool is_loopback(const struct sockaddr_storage *address)
{
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;
    return address->ss_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)
                                          : ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

enum mu_status mu_http_new(const char *listen, bool anywhere, struct mu_rpc_server *server, struct mu_store *store,
                           struct mu_http **ret_http, struct mu_error *err)
{
    struct sockaddr_storage address = {0};
    enum mu_status status = parse(listen, &address, err);
    if (status == MU_OK && !anywhere && !is_loopback(&address))
        status =
            mu_fail(err, MU_ERR_INVALID,
                    "--http: %s can be reached from other hosts, without encryption: keep it on the loopback, behind a "
                    "proxy, or give --insecure-listen inside a trusted network",
                    listen);
    struct mu_http *http = status == MU_OK ? calloc(1, sizeof *http) : NULL;
    if (!http)
        return status != MU_OK ? status : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the HTTP listener");
    http->server = server;
    http->store = store;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | (address.ss_family == AF_INET6 ? MHD_USE_IPv6 : 0);
    errno = 0;
    http->daemon = MHD_start_daemon(flags, 0, NULL, NULL, on_request, http, MHD_OPTION_SOCK_ADDR, &address,
                                    MHD_OPTION_CONNECTION_LIMIT, (unsigned)MU_HTTP_CONNECTIONS_MAX,
                                    MHD_OPTION_PER_IP_CONNECTION_LIMIT, (unsigned)MU_HTTP_CONNECTIONS_MAX / 2,
                                    MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)MU_HTTP_IDLE_S,
                                    MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_BYTES_MAX * 2, MHD_OPTION_END);
    if (!http->daemon) {
        int reason = errno;
        free(http);
        if (reason == EADDRINUSE)
            return mu_fail(err, MU_ERR_BUSY, "--http: %s is in use; choose another port, or 0 for any free one",
                           listen);
        return mu_fail_errno(err, reason ? reason : EINVAL, "--http: cannot listen on %s", listen);
    }
    name_address(http, listen);
    *ret_http = http;
    return MU_OK;
}

void mu_http_free(struct mu_http *http)
{
    if (!http)
        return;
    MHD_stop_daemon(http->daemon);
    for (int i = 0; i < PAGES; i++)
        free(http->pages[i].reply.body);
    free(http);
}

const char *mu_http_address(const struct mu_http *http)
{
    return http->address;
}
