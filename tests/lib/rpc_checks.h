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

#endif
