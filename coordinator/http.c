#include "coordinator/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "coordinator/dashboard.h"
#include "coordinator/http_api.h"
#include "coordinator/http_tls.h"
#include "coordinator/question.h"

enum {
    ADDRESS_SIZE = 128,
    HEADER_BYTES_MAX = 8192,
    BLOCK_BYTES = 32768,
    HEADERS = 8,
    OPTIONS_MAX = 4,
    REFUSAL_LOG_US = 10000000
};

struct mu_http {
    struct mu_rpc_server *server;
    struct mu_store *store;
    struct MHD_Daemon *daemon;
    struct mu_http_tls *tls; /* NULL: in the clear */
    struct mu_readers *readers;
    bool needs_reader;
    char url[ADDRESS_SIZE];
    /* The listener's thread. */
    struct mu_http_pages *pages;
    bool may_write; /* as of the newest page of metrics */
    uint64_t refusal_logged_us;
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
    int length = snprintf(key->text + key->size, MU_HTTP_KEY_SIZE - key->size, "&%s=%s", name, value);
    key->fits = length >= 0 && key->size + (size_t)length < MU_HTTP_KEY_SIZE;
    key->size += key->fits ? (size_t)length : 0;
    return key->fits;
}

/* Path and query; false: they are too long. */
static bool make_key(struct MHD_Connection *connection, const char *url, char text[MU_HTTP_KEY_SIZE])
{
    struct key key = {.text = text, .size = strlen(url), .fits = strlen(url) < MU_HTTP_KEY_SIZE};
    if (!key.fits)
        return false;
    memcpy(text, url, key.size + 1);
    if (strcmp(url, metrics_path) != 0)
        each_parameter(connection, add_to_key, &key);
    return key.fits;
}

/* NULL: the core does not answer (or there is no memory). */
static struct mu_http_page *fetch(struct mu_http *http, struct MHD_Connection *connection, const char *url,
                                  const char *key)
{
    uint64_t now_us = mu_clock_mono_us();
    struct mu_http_page *page = mu_http_pages_find(http->pages, key, now_us);
    if (page)
        return page;
    struct mu_http_reply reply = {0};
    struct mu_http_request request = {.path = url + sizeof api_path - 1,
                                      .each = each_parameter,
                                      .parameters = connection,
                                      .until_us = now_us + MU_HTTP_ANSWER_MS * 1000ull};
    if (strcmp(url, metrics_path) == 0)
        make_metrics(http, &reply, request.until_us);
    else
        mu_http_api(http->server, http->store, &request, &reply);
    return reply.body ? mu_http_pages_keep(http->pages, key, &reply, mu_clock_mono_us()) : NULL;
}

/* ---- requests ---- */

static enum MHD_Result respond(struct MHD_Connection *connection, unsigned status, const char *type,
                               struct MHD_Response *response)
{
    static const char *const headers[HEADERS][2] = {
        {MHD_HTTP_HEADER_CACHE_CONTROL, "no-store"},
        {"X-Content-Type-Options", "nosniff"},
        {"Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                    "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"},
        {"Referrer-Policy", "no-referrer"},
        {"Cross-Origin-Resource-Policy", "same-origin"}, /* what a browser knows, other sites may not use */
    };
    if (!response)
        return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    for (int i = 0; i < HEADERS && headers[i][0]; i++)
        MHD_add_response_header(response, headers[i][0], headers[i][1]);
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    if (status == MHD_HTTP_UNAUTHORIZED) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE,
                                "Basic realm=\"muster\", charset=\"UTF-8\"");
        MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer realm=\"muster\"");
    }
    enum MHD_Result result = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result say(struct MHD_Connection *connection, unsigned status, const char *line)
{
    return respond(connection, status, "text/plain; charset=utf-8",
                   MHD_create_response_from_buffer(strlen(line), (void *)(uintptr_t)line, MHD_RESPMEM_MUST_COPY));
}

static ssize_t read_page(void *ctx, uint64_t offset, char *out, size_t most)
{
    ssize_t size = mu_http_page_read(ctx, offset, out, most);
    return size >= 0 ? size : MHD_CONTENT_READER_END_WITH_ERROR;
}

static void release_page(void *ctx)
{
    mu_http_page_release(ctx);
}

/* Takes the reference. */
static enum MHD_Result show(struct MHD_Connection *connection, struct mu_http_page *page)
{
    const struct mu_http_reply *reply = mu_http_page_reply(page);
    struct MHD_Response *response =
        MHD_create_response_from_callback(reply->size_bytes, BLOCK_BYTES, read_page, page, release_page);
    if (!response)
        mu_http_page_release(page);
    return respond(connection, reply->status, reply->type, response);
}

/* /livez and /readyz: whether the core answers at all is seen from the page of metrics. */
static enum MHD_Result probe(struct mu_http *http, struct MHD_Connection *connection, bool asks_ready)
{
    struct mu_http_page *page = fetch(http, connection, metrics_path, metrics_path);
    if (!page)
        return say(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "the core does not answer\n");
    mu_http_page_release(page);
    if (asks_ready && !http->may_write)
        return say(connection, MHD_HTTP_SERVICE_UNAVAILABLE,
                   "changes are refused: too little space for the data directory\n");
    return say(connection, MHD_HTTP_OK, "ok\n");
}

static enum MHD_Result answer(struct mu_http *http, struct MHD_Connection *connection, const char *url)
{
    char key[MU_HTTP_KEY_SIZE];
    if (!make_key(connection, url, key))
        return say(connection, MHD_HTTP_URI_TOO_LONG, "the query is too long\n");
    struct mu_http_page *page = fetch(http, connection, url, key);
    return page ? show(connection, page) : say(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "the core does not answer\n");
}

/* A page in a browser may have made a name of its own point here (DNS rebinding): only literal addresses and localhost
 * are names of this listener, unless a certificate says which names it has. */
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

static enum MHD_Result refuse(struct mu_http *http, struct MHD_Connection *connection, bool has_tried)
{
    uint64_t now_us = mu_clock_mono_us();
    if (has_tried && now_us - http->refusal_logged_us >= REFUSAL_LOG_US) { /* they come as fast as a peer likes */
        char peer[INET6_ADDRSTRLEN] = "?";
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
        if (info && info->client_addr)
            (void)getnameinfo(info->client_addr, sizeof(struct sockaddr_storage), peer, sizeof peer, NULL, 0,
                              NI_NUMERICHOST);
        http->refusal_logged_us = now_us;
        MU_LOGW("HTTP: %s showed a token that is not good: mistyped, revoked, over, or not of the role viewer", peer);
    }
    return say(connection, MHD_HTTP_UNAUTHORIZED,
               has_tried
                   ? "the token is not one of this coordinator's for reading: mistyped, revoked, over, or not of "
                     "the role viewer\n"
                   : "a token of the role viewer is needed (muster token create --role viewer): as Authorization: "
                     "Bearer TOKEN, or in a browser as the password, with any name; or, over HTTPS, a "
                     "certificate of the cluster's CA with that role\n");
}

/* Whether whoever asks may have it; if not, the answer is on its way. */
static bool is_permitted(struct mu_http *http, struct MHD_Connection *connection, enum MHD_Result *ret_result)
{
    struct mu_error err = {0};
    if (!http->tls && !host_is_ours(MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST))) {
        *ret_result =
            say(connection, MHD_HTTP_FORBIDDEN, "this name is not allowed in Host: use the literal address\n");
        return false;
    }
    if (!http->needs_reader)
        return true;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct mu_http_tls_peer *peer = http->tls && info ? info->socket_context : NULL;
    if (peer && mu_http_tls_check(peer, MU_METHOD_LIST_JOBS, &err) == MU_OK)
        return true;
    const char *shown = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
    if (shown && mu_readers_admit(http->readers, shown, mu_clock_wall_us()))
        return true;
    if (shown || !peer || !mu_http_tls_has_certificate(peer)) {
        *ret_result = refuse(http, connection, shown);
        return false;
    }
    char line[sizeof err.text + 2];
    snprintf(line, sizeof line, "%s\n", err.text);
    *ret_result = say(connection, MHD_HTTP_FORBIDDEN, line);
    return false;
}

static enum MHD_Result on_request(void *ctx, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_size, void **state)
{
    struct mu_http *http = ctx;
    enum MHD_Result result = MHD_NO;
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
    bool is_ready = strcmp(url, "/readyz") == 0, is_probe = is_ready || strcmp(url, "/livez") == 0;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return say(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD: this listener changes nothing\n");
    if (is_probe)
        return probe(http, connection, is_ready);
    if (!is_permitted(http, connection, &result))
        return result;
    if (strcmp(url, "/") == 0)
        return respond(connection, MHD_HTTP_OK, "text/html; charset=utf-8",
                       MHD_create_response_from_buffer(mu_dashboard_size(), (void *)(uintptr_t)mu_dashboard,
                                                       MHD_RESPMEM_PERSISTENT));
    if (strcmp(url, metrics_path) == 0 || strncmp(url, api_path, sizeof api_path - 1) == 0)
        return answer(http, connection, url);
    return say(connection, MHD_HTTP_NOT_FOUND, "there are /, /api/v1/, /livez, /readyz and /metrics\n");
}

static void on_connection(void *ctx, struct MHD_Connection *connection, void **state,
                          enum MHD_ConnectionNotificationCode what)
{
    struct mu_http *http = ctx;
    if (what == MHD_CONNECTION_NOTIFY_CLOSED) {
        mu_http_tls_end(*state);
        *state = NULL;
        return;
    }
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    *state = info ? mu_http_tls_begin(http->tls, info->tls_session) : NULL;
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

static void name_url(struct mu_http *http, const char *listen)
{
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_BIND_PORT);
    const char *colon = strrchr(listen, ':');
    snprintf(http->url, sizeof http->url, "%s://%.*s:%u/", http->tls ? "https" : "http", (int)(colon - listen), listen,
             info ? (unsigned)info->port : 0);
}

static bool is_loopback(const struct sockaddr_storage *address)
{
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;
    return address->ss_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)
                                          : ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

/* In the clear on the loopback, where nobody listens in; elsewhere under TLS, or in the clear if that is wanted. */
static enum mu_status open_tls(struct mu_http *http, const struct mu_http_config *config,
                               const struct sockaddr_storage *address, struct mu_error *err)
{
    if (is_loopback(address))
        return MU_OK;
    if (mu_rpc_tls_wanted(&config->tls))
        return mu_http_tls_new(&config->tls, config->tls_deny, &http->tls, err);
    if (config->anywhere)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID,
                   "--http: %s can be reached from other hosts, where anybody could read along: give --tls-ca, "
                   "--tls-cert and --tls-key (see muster cert), or --insecure-listen inside a trusted network",
                   config->listen);
}

static unsigned connections_max(void)
{
    struct rlimit files;
    bool is_known = getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur != RLIM_INFINITY;
    rlim_t part = is_known ? files.rlim_cur / MU_HTTP_PART_OF_FILES : MU_HTTP_CONNECTIONS_MAX;
    return part < MU_HTTP_CONNECTIONS_MAX ? (unsigned)part : MU_HTTP_CONNECTIONS_MAX;
}

struct start {
    struct mu_http *http;
    const char *listen;
    struct sockaddr_storage address;
};

/* With the certificate, if there is one: each connection gets the one that is newest when it begins. */
static enum mu_status start_daemon(void *ctx, const char *ca, const char *cert, const char *key, struct mu_error *err)
{
    struct start *start = ctx;
    struct mu_http *http = start->http;
    (void)ca;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | (start->address.ss_family == AF_INET6 ? MHD_USE_IPv6 : 0) |
                     (http->tls ? MHD_USE_TLS : 0);
    struct MHD_OptionItem of_tls[OPTIONS_MAX] = {{.option = MHD_OPTION_END}};
    if (http->tls) {
        of_tls[0] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_CERT, 0, (void *)(uintptr_t)cert};
        of_tls[1] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_KEY, 0, (void *)(uintptr_t)key};
        of_tls[2] = (struct MHD_OptionItem){MHD_OPTION_HTTPS_PRIORITIES, 0,
                                            (void *)(uintptr_t) "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"};
        of_tls[3] = (struct MHD_OptionItem){.option = MHD_OPTION_END};
    }
    errno = 0;
    http->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, http, MHD_OPTION_SOCK_ADDR, &start->address, MHD_OPTION_CONNECTION_LIMIT,
        connections_max(), MHD_OPTION_PER_IP_CONNECTION_LIMIT, connections_max() / 2, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)MU_HTTP_IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_BYTES_MAX * 2,
        MHD_OPTION_NOTIFY_CONNECTION, http->tls ? on_connection : NULL, http, MHD_OPTION_ARRAY, of_tls, MHD_OPTION_END);
    if (http->daemon)
        return MU_OK;
    if (errno == EADDRINUSE)
        return mu_fail(err, MU_ERR_BUSY, "--http: %s is in use; choose another port, or 0 for any free one",
                       start->listen);
    return mu_fail_errno(err, errno ? errno : EINVAL, "--http: cannot listen on %s", start->listen);
}

enum mu_status mu_http_new(const struct mu_http_config *config, struct mu_http **ret_http, struct mu_error *err)
{
    struct start start = {.listen = config->listen};
    enum mu_status status = parse(config->listen, &start.address, err);
    if (status != MU_OK)
        return status;
    struct mu_http *http = calloc(1, sizeof *http);
    if (http)
        http->pages = mu_http_pages_new();
    if (!http || !http->pages) {
        free(http);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the HTTP listener");
    }
    http->server = config->server;
    http->store = config->store;
    http->readers = config->readers;
    http->needs_reader = config->needs_reader || !is_loopback(&start.address);
    start.http = http;
    status = open_tls(http, config, &start.address, err);
    if (status == MU_OK)
        status = http->tls ? mu_http_tls_use(http->tls, start_daemon, &start, err)
                           : start_daemon(&start, NULL, NULL, NULL, err);
    if (status != MU_OK) {
        mu_http_free(http);
        return status;
    }
    name_url(http, config->listen);
    *ret_http = http;
    return MU_OK;
}

void mu_http_free(struct mu_http *http)
{
    if (!http)
        return;
    if (http->daemon)
        MHD_stop_daemon(http->daemon);
    mu_http_pages_free(http->pages);
    mu_http_tls_free(http->tls);
    free(http);
}

const char *mu_http_url(const struct mu_http *http)
{
    return http->url;
}
