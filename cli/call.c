#include "cli/cli.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"

enum { RETRY_MS = 100 };

int mu_cli_exit_of(enum mu_status status)
{
    switch (status) {
    case MU_OK:
        return MU_EXIT_OK;
    case MU_ERR_UNAVAILABLE:
    case MU_ERR_TIMEOUT:
        return MU_EXIT_CONNECT;
    case MU_ERR_NOT_FOUND:
        return MU_EXIT_NOT_FOUND;
    case MU_ERR_EXISTS:
    case MU_ERR_CONFLICT:
    case MU_ERR_STALE:
        return MU_EXIT_CONFLICT;
    case MU_ERR_LIMIT:
    case MU_ERR_BUSY:
    case MU_ERR_NO_SPACE:
    case MU_ERR_DENIED:
        return MU_EXIT_REFUSED;
    default:
        return MU_EXIT_FAILURE;
    }
}

int mu_cli_fail(const struct mu_error *err)
{
    fprintf(stderr, "muster: %s\n", err->text);
    return mu_cli_exit_of(err->status);
}

int mu_cli_refused(const struct mu_cli *cli, const struct mu_error *err)
{
    char field[MU_ERROR_FIELD_SIZE];
    const char *reason = mu_reason_name(err->reason), *value_name = mu_reason_value_name(err->reason);
    if (!cli->json)
        return mu_cli_fail(err);
    json_t *error =
        json_pack("{s:s, s:s*, s:s}", "status", mu_status_name(err->status), "reason", reason, "text", err->text);
    if (err->reason == MU_REASON_FIELD_INVALID && mu_error_field(err, field))
        json_object_set_new(error, "field", json_string(field));
    if (value_name)
        json_object_set_new(error, value_name, json_integer((json_int_t)err->value));
    if (mu_reason_advice(err->reason)[0])
        json_object_set_new(error, "advice", json_string(mu_reason_advice(err->reason)));
    json_t *whole = json_pack("{s:o}", "error", error);
    json_dumpf(whole, stderr, JSON_COMPACT);
    fputc('\n', stderr);
    json_decref(whole);
    return mu_cli_exit_of(err->status);
}

int mu_cli_usage(const char *command, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "muster %s: ", command);
    vfprintf(stderr, fmt, args);
    fprintf(stderr, " (see: muster help)\n");
    va_end(args);
    return MU_EXIT_USAGE;
}

int mu_cli_open(struct mu_cli *cli)
{
    struct mu_error err;
    if (cli->client)
        return MU_EXIT_OK;
    if (!cli->pool && mu_rpc_pool_new(1, &err, &cli->pool) != MU_OK)
        return mu_cli_fail(&err);
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.address = cli->address;
    config.tls = cli->tls;
    if (mu_rpc_client_new(cli->pool, &config, &err, &cli->client) != MU_OK)
        return mu_cli_fail(&err);
    return MU_EXIT_OK;
}

void mu_cli_close(struct mu_cli *cli)
{
    mu_rpc_client_free(cli->client);
    mu_rpc_pool_free(cli->pool);
    mu_wire_arena_fini(&cli->arena);
    cli->client = NULL;
    cli->pool = NULL;
}

static enum mu_status pack(struct mu_wire_arena *arena, const ProtobufCMessage *request,
                           struct mu_rpc_bytes **ret_bytes, struct mu_error *err)
{
    const void *data;
    size_t size_bytes;
    enum mu_status status = mu_wire_pack(arena, request, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, err);
    if (status == MU_OK)
        *ret_bytes = mu_rpc_bytes_copy(data, size_bytes);
    return status;
}

enum mu_status mu_cli_call(struct mu_cli *cli, const char *method, const void *request,
                           const ProtobufCMessageDescriptor *reply_type, const ProtobufCMessage **ret_reply,
                           struct mu_error *err)
{
    char path[96];
    struct mu_rpc_bytes *bytes = NULL, *reply = NULL;
    snprintf(path, sizeof path, "/muster.v1.%s%s", strchr(method, '/') ? "" : "MusterService/", method);
    enum mu_status status = pack(&cli->arena, request, &bytes, err);
    if (status == MU_OK)
        status = mu_rpc_client_call(cli->client, path, bytes, cli->timeout_ms, err, &reply);
    if (status == MU_OK)
        status = mu_wire_unpack(&cli->arena, reply_type, mu_rpc_bytes_data(reply), mu_rpc_bytes_size(reply),
                                MU_WIRE_REPLY_BYTES_MAX, ret_reply, err);
    mu_rpc_bytes_unref(bytes);
    mu_rpc_bytes_unref(reply);
    return status;
}

static int call_or_exit(struct mu_cli *cli, const char *method, const void *request, bool again,
                        const ProtobufCMessageDescriptor *reply_type, const void *ret_reply_pointer)
{
    struct mu_error err = {0};
    const ProtobufCMessage *reply;
    uint64_t until_us = mu_clock_mono_us() + cli->timeout_ms * 1000ull;
    int code = mu_cli_open(cli);
    if (code != MU_EXIT_OK)
        return code;
    enum mu_status status = mu_cli_call(cli, method, request, reply_type, &reply, &err);
    again = again && err.reason != MU_REASON_CANNOT_CONNECT;
    while (status == MU_ERR_UNAVAILABLE && again && mu_clock_mono_us() + RETRY_MS * 1000 < until_us) {
        nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000l}, NULL);
        status = mu_cli_call(cli, method, request, reply_type, &reply, &err);
    }
    if (status != MU_OK)
        return mu_cli_refused(cli, &err);
    memcpy((void *)(uintptr_t)ret_reply_pointer, &reply, sizeof reply); /* the caller's typed pointer */
    return MU_EXIT_OK;
}

int mu_cli_call_or_exit(struct mu_cli *cli, const char *method, const void *request,
                        const ProtobufCMessageDescriptor *reply_type, const void *ret_reply_pointer)
{
    return call_or_exit(cli, method, request, false, reply_type, ret_reply_pointer);
}

int mu_cli_change_or_exit(struct mu_cli *cli, const char *method, const void *request, ProtobufCBinaryData *request_id,
                          const ProtobufCMessageDescriptor *reply_type, const void *ret_reply_pointer)
{
    *request_id = mu_wire_put_id(&cli->arena, mu_id_random());
    return call_or_exit(cli, method, request, true, reply_type, ret_reply_pointer);
}

enum mu_status mu_cli_watch_events(struct mu_cli *cli, const Muster__V1__WatchEventsRequest *request,
                                   struct mu_rpc_reader **ret_reader, struct mu_error *err)
{
    struct mu_rpc_bytes *bytes = NULL;
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    enum mu_status status = pack(&arena, &request->base, &bytes, err);
    if (status == MU_OK)
        status = mu_rpc_reader_new(cli->client, "/muster.v1.MusterService/WatchEvents", bytes, err, ret_reader);
    mu_rpc_bytes_unref(bytes);
    mu_wire_arena_fini(&arena);
    return status;
}

static const struct mu_cli_option *find_option(const struct mu_cli_option *options, int count, const char *word)
{
    for (int i = 0; i < count; i++) {
        size_t length = strlen(options[i].name);
        if (strncmp(word, options[i].name, length) == 0 && (word[length] == 0 || word[length] == '='))
            return &options[i];
    }
    return NULL;
}

int mu_cli_parse(const char *command, int argc, char **argv, const struct mu_cli_option *options, int option_count,
                 int least, int most)
{
    int words = 0;
    bool only_words = false;
    for (int i = 0; i < argc; i++) {
        char *word = argv[i];
        if (only_words || word[0] != '-' || word[1] == 0) {
            argv[words++] = word;
            continue;
        }
        if (strcmp(word, "--") == 0) {
            only_words = true;
            continue;
        }
        const struct mu_cli_option *option = find_option(options, option_count, word);
        char *equals = option ? strchr(word, '=') : NULL;
        if (!option || (option->flag && equals)) {
            mu_cli_usage(command, "option '%s' is not known here", word);
            return -1;
        }
        if (option->flag) {
            *option->flag = true;
        } else if (equals) {
            *option->value = equals + 1;
        } else if (i + 1 < argc) {
            *option->value = argv[++i];
        } else {
            mu_cli_usage(command, "option '%s' needs a value", word);
            return -1;
        }
    }
    if (words < least || words > most) {
        if (words > most)
            mu_cli_usage(command, "'%s' is one word too many", argv[most]);
        else
            mu_cli_usage(command, "a word is missing");
        return -1;
    }
    return words;
}

bool mu_cli_number(const char *command, const char *option, const char *text, uint64_t least, uint64_t most,
                   uint64_t *ret_value)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < least || value > most) {
        mu_cli_usage(command, "%s '%s' is not allowed: a whole number from %llu to %llu", option, text,
                     (unsigned long long)least, (unsigned long long)most);
        return false;
    }
    *ret_value = value;
    return true;
}

bool mu_cli_duration(const char *command, const char *option, const char *text, uint32_t most_s, uint32_t *ret_seconds)
{
    static const struct {
        char unit;
        uint32_t seconds;
    } units[] = {{'d', 86400}, {'h', 3600}, {'m', 60}, {'s', 1}};
    char *end;
    errno = 0;
    unsigned long count = strtoul(text, &end, 10);
    for (size_t i = 0; i < sizeof units / sizeof units[0] && errno == 0 && text[0] >= '0' && text[0] <= '9'; i++) {
        if (*end == units[i].unit && end[1] == 0 && count >= 1 && count <= most_s / units[i].seconds) {
            *ret_seconds = (uint32_t)count * units[i].seconds;
            return true;
        }
    }
    mu_cli_usage(command, "%s '%s' is not allowed: a number with d, h, m or s, up to %ud", option, text,
                 most_s / units[0].seconds);
    return false;
}

void mu_cli_whoami(char *out, size_t size)
{
    char host[64] = "?";
    const char *user = getenv("USER");
    if (gethostname(host, sizeof host - 1) != 0)
        strcpy(host, "?");
    if (user && user[0])
        snprintf(out, size, "%s@%s", user, host);
    else
        snprintf(out, size, "uid%u@%s", (unsigned)getuid(), host);
}
