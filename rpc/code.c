#include "rpc/code.h"

#include <stdbool.h>
#include <string.h>

static const struct {
    const char *name;
    enum mu_status status;
} codes[] = {
    [MU_RPC_OK] = {"OK", MU_OK},
    [MU_RPC_CANCELLED] = {"CANCELLED", MU_ERR_CANCELLED},
    [MU_RPC_UNKNOWN] = {"UNKNOWN", MU_ERR_INTERNAL},
    [MU_RPC_INVALID_ARGUMENT] = {"INVALID_ARGUMENT", MU_ERR_INVALID},
    [MU_RPC_DEADLINE_EXCEEDED] = {"DEADLINE_EXCEEDED", MU_ERR_TIMEOUT},
    [MU_RPC_NOT_FOUND] = {"NOT_FOUND", MU_ERR_NOT_FOUND},
    [MU_RPC_ALREADY_EXISTS] = {"ALREADY_EXISTS", MU_ERR_EXISTS},
    [MU_RPC_PERMISSION_DENIED] = {"PERMISSION_DENIED", MU_ERR_DENIED},
    [MU_RPC_RESOURCE_EXHAUSTED] = {"RESOURCE_EXHAUSTED", MU_ERR_LIMIT},
    [MU_RPC_FAILED_PRECONDITION] = {"FAILED_PRECONDITION", MU_ERR_CONFLICT},
    [MU_RPC_ABORTED] = {"ABORTED", MU_ERR_STALE},
    [MU_RPC_OUT_OF_RANGE] = {"OUT_OF_RANGE", MU_ERR_INVALID},
    [MU_RPC_UNIMPLEMENTED] = {"UNIMPLEMENTED", MU_ERR_INVALID},
    [MU_RPC_INTERNAL] = {"INTERNAL", MU_ERR_INTERNAL},
    [MU_RPC_UNAVAILABLE] = {"UNAVAILABLE", MU_ERR_UNAVAILABLE},
    [MU_RPC_DATA_LOSS] = {"DATA_LOSS", MU_ERR_CORRUPT},
    [MU_RPC_UNAUTHENTICATED] = {"UNAUTHENTICATED", MU_ERR_DENIED},
};

enum { CODE_COUNT = sizeof codes / sizeof codes[0] };

const char *mu_rpc_code_name(enum mu_rpc_code code)
{
    return (unsigned)code < CODE_COUNT ? codes[code].name : codes[MU_RPC_UNKNOWN].name;
}

enum mu_status mu_rpc_status_of_code(enum mu_rpc_code code)
{
    return (unsigned)code < CODE_COUNT ? codes[code].status : MU_ERR_INTERNAL;
}

enum mu_rpc_code mu_rpc_code_of_status(enum mu_status status)
{
    switch (status) {
    case MU_OK:
        return MU_RPC_OK;
    case MU_ERR_INVALID:
        return MU_RPC_INVALID_ARGUMENT;
    case MU_ERR_NOT_FOUND:
        return MU_RPC_NOT_FOUND;
    case MU_ERR_EXISTS:
        return MU_RPC_ALREADY_EXISTS;
    case MU_ERR_BUSY:
    case MU_ERR_NO_MEMORY:
    case MU_ERR_NO_SPACE:
    case MU_ERR_LIMIT:
        return MU_RPC_RESOURCE_EXHAUSTED;
    case MU_ERR_CORRUPT:
        return MU_RPC_DATA_LOSS;
    case MU_ERR_STALE:
        return MU_RPC_ABORTED;
    case MU_ERR_UNAVAILABLE:
        return MU_RPC_UNAVAILABLE;
    case MU_ERR_TIMEOUT:
        return MU_RPC_DEADLINE_EXCEEDED;
    case MU_ERR_CANCELLED:
        return MU_RPC_CANCELLED;
    case MU_ERR_DENIED:
        return MU_RPC_PERMISSION_DENIED;
    case MU_ERR_CONFLICT:
        return MU_RPC_FAILED_PRECONDITION;
    case MU_ERR_IO:
    case MU_ERR_INTERNAL:
    case MU_STATUS_COUNT:
        break;
    }
    return MU_RPC_INTERNAL;
}

static bool starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* The C core chains causes as "a: b: c"; the last one is what a person can act on. */
static const char *last_cause(const char *text)
{
    const char *last = text;
    for (const char *at = text; (at = strstr(at, ": ")) != NULL; at += 2)
        if (at[2])
            last = at + 2;
    return last;
}

/* What a failed handshake says, and what a person can do about it. */
static const struct {
    const char *cause, *advice;
} handshakes[] = {
    {"Socket closed",
     "it closed the connection at once: does it want TLS, with a certificate of its CA (--tls-ca, --tls-cert, "
     "--tls-key)?"},
    {"certificate verify failed", "its certificate is expired or not of the CA that --tls-ca names"},
    {"is not in peer certificate",
     "its certificate is for other hosts: issue one with --hosts, or use a name that it has"},
    {"wrong version number",
     "it does not speak TLS: start it with --tls-ca, --tls-cert and --tls-key, or leave them out here"},
};

static enum mu_status fail_connect(struct mu_error *err, const char *text, const char *address)
{
    for (size_t i = 0; i < sizeof handshakes / sizeof handshakes[0]; i++)
        if (strstr(text, handshakes[i].cause))
            return mu_fail_for(err, MU_ERR_UNAVAILABLE, MU_REASON_CANNOT_CONNECT, 0, "cannot connect to %s: %s",
                               address, handshakes[i].advice);
    return mu_fail_for(err, MU_ERR_UNAVAILABLE, MU_REASON_CANNOT_CONNECT, 0,
                       "cannot connect to %s: %s; check the address and that musterd runs there", address,
                       last_cause(text));
}

/* UNAVAILABLE has three authors: our channel before it had a connection, our channel that lost it, and the server
 * itself. */
static enum mu_status fail_unavailable(struct mu_error *err, const char *text, const char *address)
{
    static const char *const lost[] = {
        "Socket closed", "recvmsg:",         "Broken pipe", "Connection reset",     "keepalive",      "ping timeout",
        "GOAWAY",        "Transport closed", "sendmsg",     "Connection timed out", "Stream removed", "EOF"};
    if (starts_with(text, "failed to connect") || strstr(text, "Failed to connect") ||
        strstr(text, "connection attempt"))
        return fail_connect(err, text, address);
    if (strstr(text, "DNS resolution failed"))
        return mu_fail_for(err, MU_ERR_UNAVAILABLE, MU_REASON_CANNOT_CONNECT, 0,
                           "cannot connect to %s: the host name does not resolve; use a literal address", address);
    for (size_t i = 0; i < sizeof lost / sizeof lost[0]; i++)
        if (strstr(text, lost[i]))
            return mu_fail_for(err, MU_ERR_UNAVAILABLE, MU_REASON_CONNECTION_LOST, 0, "connection to %s lost: %s",
                               address, last_cause(text));
    return mu_fail(err, MU_ERR_UNAVAILABLE, "%s is unavailable: %s", address, text[0] ? text : "no reason given");
}

enum mu_status mu_rpc_fail(struct mu_error *err, enum mu_rpc_code code, const char *text, const char *address,
                           const char *method)
{
    enum mu_status status = mu_rpc_status_of_code(code);
    switch (code) {
    case MU_RPC_UNAVAILABLE:
        return fail_unavailable(err, text, address);
    case MU_RPC_DEADLINE_EXCEEDED:
        return mu_fail(err, status, "no answer from %s to %s in time%s%s", address, method, text[0] ? ": " : "", text);
    case MU_RPC_UNIMPLEMENTED:
        return mu_fail(err, status, "%s does not know %s: the versions of client and server differ", address, method);
    case MU_RPC_CANCELLED:
        return mu_fail(err, status, "call of %s at %s was cancelled%s%s", method, address, text[0] ? ": " : "", text);
    default:
        break;
    }
    if (text[0])
        return mu_fail(err, status, "%s", text);
    return mu_fail(err, status, "%s at %s failed with %s and no reason", method, address, mu_rpc_code_name(code));
}
