/* cmocka checks and short-cuts on top of rpc_fixture.h. Header-only; include after cmocka.h. */
#ifndef TESTS_LIB_RPC_CHECKS_H
#define TESTS_LIB_RPC_CHECKS_H

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/lib/rpc_fixture.h"

static inline enum mu_status unary(struct mu_rpc_client *client, const char *method, const void *data,
                                   size_t size_bytes, unsigned timeout_ms, struct mu_error *err,
                                   struct mu_rpc_bytes **ret_reply)
{
    struct mu_rpc_bytes *request = mu_rpc_bytes_copy(data, size_bytes);
    enum mu_status status = mu_rpc_client_call(client, method, request, timeout_ms, err, ret_reply);
    mu_rpc_bytes_unref(request);
    return status;
}

static inline void assert_echo(struct mu_rpc_client *client, const void *data, size_t size_bytes)
{
    struct mu_rpc_bytes *reply = NULL;
    struct mu_error err = {0};
    enum mu_status status = unary(client, "/t/Echo", data, size_bytes, 10000, &err, &reply);
    if (status != MU_OK)
        fail_msg("echo: %s", err.text);
    assert_int_equal(mu_rpc_bytes_size(reply), size_bytes);
    assert_memory_equal(mu_rpc_bytes_data(reply), data, size_bytes);
    mu_rpc_bytes_unref(reply);
}

static inline int connect_raw(uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

static inline struct mu_rpc_reader *open_reader(struct mu_rpc_client *client, const char *method, const char *request)
{
    struct mu_error err = {0};
    struct mu_rpc_reader *reader = NULL;
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(request, strlen(request));
    assert_int_equal(mu_rpc_reader_new(client, method, bytes, &err, &reader), MU_OK);
    mu_rpc_bytes_unref(bytes);
    return reader;
}

/* --- HTTP/2 by hand, for what a gRPC client never sends --- */

static inline void put_frame(int fd, unsigned type, unsigned flags, unsigned stream, const void *payload, size_t size)
{
    uint8_t head[9] = {
        (uint8_t)(size >> 16), (uint8_t)(size >> 8), (uint8_t)size, (uint8_t)type, (uint8_t)flags, 0, 0, 0,
        (uint8_t)stream};
    assert_int_equal(write(fd, head, sizeof head), sizeof head);
    assert_int_equal(write(fd, payload, size), size);
}

static inline size_t put_string(uint8_t *to, const char *text)
{
    to[0] = (uint8_t)strlen(text);
    memcpy(to + 1, text, strlen(text));
    return strlen(text) + 1;
}

/* A connection with stream 1 open on `path`; HPACK without indexing. `flags`: 4, END_HEADERS, or 0 when more follows.
 */
static inline int open_raw_head(uint16_t port, const char *path, const char *encoding, unsigned flags)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    int fd = connect_raw(port);
    assert_int_equal(write(fd, preface, sizeof preface - 1), sizeof preface - 1);
    put_frame(fd, 4, 0, 0, "", 0); /* SETTINGS */
    uint8_t block[200];
    size_t used = 0;
    block[used++] = 0x83; /* :method POST */
    block[used++] = 0x86; /* :scheme http */
    block[used++] = 0x04; /* :path */
    used += put_string(block + used, path);
    block[used++] = 0x01; /* :authority */
    used += put_string(block + used, "t");
    block[used++] = 0x0f; /* content-type: 31 = 15 + 16 */
    block[used++] = 0x10;
    used += put_string(block + used, "application/grpc");
    block[used++] = 0x00;
    used += put_string(block + used, "te");
    used += put_string(block + used, "trailers");
    block[used++] = 0x00;
    used += put_string(block + used, "grpc-encoding");
    used += put_string(block + used, encoding);
    put_frame(fd, 1, flags, 1, block, used); /* HEADERS */
    return fd;
}

static inline int open_raw_stream(uint16_t port, const char *path, const char *encoding)
{
    return open_raw_head(port, path, encoding, 4);
}

#endif
