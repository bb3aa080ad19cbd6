#include "coordinator/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/metrics.h"

enum { ADDRESS_SIZE = 128, HEADER_BYTES_MAX = 8192 };

/* Shared by the reader's thread, which asks and may give up, and the core thread, which answers or drops: whoever comes
 * last frees it. */
struct mu_http_question {
    struct mu_posted posted; /* first */
    pthread_mutex_t lock;
    pthread_cond_t answered;
    bool done, forgotten;
    char *page; /* NULL: dropped, or out of memory */
    size_t page_size;
    bool may_write;
};

struct mu_http {
    struct mu_rpc_server *server;
    struct MHD_Daemon *daemon;
    char address[ADDRESS_SIZE];
    /* The reader's thread: the last answer. */
    char *page;
    size_t page_size;
    bool may_write;
    uint64_t page_us;
};

/* ---- questions ---- */

static void question_free(struct mu_http_question *q)
{
    pthread_cond_destroy(&q->answered);
    pthread_mutex_destroy(&q->lock);
    free(q->page);
    free(q);
}

static struct mu_http_question *question_new(void)
{
    struct mu_http_question *q = calloc(1, sizeof *q);
    pthread_condattr_t monotonic;
    if (!q)
        return NULL;
    q->posted.kind = MU_POSTED_QUESTION;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->answered, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return q;
}

static void finish(struct mu_http_question *q)
{
    pthread_mutex_lock(&q->lock);
    bool forgotten = q->forgotten;
    q->done = true;
    pthread_cond_signal(&q->answered);
    pthread_mutex_unlock(&q->lock);
    if (forgotten)
        question_free(q);
}

void mu_http_answer(struct mu_http_question *q, const struct mu_coord *coord, const struct mu_rpc_refusals *refusals,
                    bool may_write)
{
    FILE *out = open_memstream(&q->page, &q->page_size);
    if (out) {
        mu_metrics_write(out, coord, refusals);
        if (fclose(out) != 0) {
            free(q->page);
            q->page = NULL;
        }
    }
    q->may_write = may_write;
    finish(q);
}

void mu_http_drop(struct mu_http_question *q)
{
    finish(q);
}

/* Reader's thread: a page that is not too old, from the core if need be. False: the core does not answer. */
static bool refresh(struct mu_http *http)
{
    uint64_t now_us = mu_clock_mono_us();
    if (http->page && now_us - http->page_us < MU_HTTP_PAGE_AGE_MS * 1000ull)
        return true;
    struct mu_http_question *q = question_new();
    if (!q)
        return false;
    uint64_t until_us = now_us + MU_HTTP_ANSWER_MS * 1000ull;
    struct timespec until = {.tv_sec = (time_t)(until_us / 1000000), .tv_nsec = (long)(until_us % 1000000 * 1000)};
    mu_rpc_server_post(http->server, &q->posted.item);
    pthread_mutex_lock(&q->lock);
    while (!q->done && pthread_cond_timedwait(&q->answered, &q->lock, &until) == 0) {
    }
    bool done = q->done;
    q->forgotten = !done;
    pthread_mutex_unlock(&q->lock);
    if (!done)
        return false;
    bool good = q->page != NULL;
    if (good) {
        free(http->page);
        http->page = q->page;
        http->page_size = q->page_size;
        http->may_write = q->may_write;
        http->page_us = mu_clock_mono_us();
        q->page = NULL;
    }
    question_free(q);
    return good;
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
    if (strcmp(url, "/livez") == 0)
        return refresh(http) ? say(connection, MHD_HTTP_OK, "ok\n")
                             : say(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "the core does not answer\n");
    if (strcmp(url, "/readyz") == 0) {
        if (!refresh(http))
            return say(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "the core does not answer\n");
        return http->may_write ? say(connection, MHD_HTTP_OK, "ok\n")
                               : say(connection, MHD_HTTP_SERVICE_UNAVAILABLE,
                                     "changes are refused: too little space for the data directory\n");
    }
    if (strcmp(url, "/metrics") == 0)
        return refresh(http) ? respond(connection, MHD_HTTP_OK, "text/plain; version=0.0.4; charset=utf-8", http->page,
                                       http->page_size)
                             : say(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "the core does not answer\n");
    return say(connection, MHD_HTTP_NOT_FOUND, "there are /livez, /readyz and /metrics\n");
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

enum mu_status mu_http_new(const char *listen, bool anywhere, struct mu_rpc_server *server, struct mu_http **ret_http,
                           struct mu_error *err)
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
    free(http->page);
    free(http);
}

const char *mu_http_address(const struct mu_http *http)
{
    return http->address;
}
