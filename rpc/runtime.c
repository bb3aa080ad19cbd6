#include "rpc/runtime.h"

#include <dlfcn.h>
#include <grpc/byte_buffer.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/log.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "common/thread.h"

static void drop_log(gpr_log_func_args *args)
{
    (void)args;
}

/* Debian builds Abseil without NDEBUG, and with that its search for lock-order cycles: every lock that is taken is
 * looked up in one table of all mutexes, under one global lock. With 10,000 connections that is an eighth of the
 * coordinator's time. A build that does not have this switch (Abseil's inline namespace is part of its name) does
 * without. */
static void stop_deadlock_search(void)
{
    enum { ON_CYCLE_IGNORE = 0 };
    static const char name[] = "_ZN4absl7debian329SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE";
    void (*set_mode)(int);
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found)
        return;
    memcpy(&set_mode, &found, sizeof set_mode);
    set_mode(ON_CYCLE_IGNORE);
}

void mu_rpc_runtime_acquire(void)
{
    sigset_t before; /* grpc_init starts threads, and these start others: they must not take the program's signals */
    mu_thread_block_signals(&before);
    if (!getenv("GRPC_VERBOSITY"))
        gpr_set_log_function(drop_log);
    stop_deadlock_search();
    grpc_init();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void mu_rpc_runtime_release(void)
{
    grpc_shutdown();
}

enum mu_status mu_rpc_thread_start(pthread_t *thread, void *(*main)(void *), void *arg, struct mu_error *err)
{
    int failed = mu_thread_start(thread, main, arg);
    return failed ? mu_fail_errno(err, failed, "cannot start a thread for network input (see ulimit -u)") : MU_OK;
}

grpc_server_credentials *mu_rpc_server_credentials(struct mu_rpc_tls *tls, bool takes_strangers)
{
    return tls ? mu_rpc_tls_server_credentials(tls, takes_strangers) : grpc_insecure_server_credentials_create();
}

grpc_channel_credentials *mu_rpc_channel_credentials(struct mu_rpc_tls *tls)
{
    return tls ? mu_rpc_tls_channel_credentials(tls) : grpc_insecure_credentials_create();
}

void mu_rpc_args_init(struct mu_rpc_args *args)
{
    args->args.num_args = 0;
    args->args.args = args->items;
}

void mu_rpc_args_int(struct mu_rpc_args *args, const char *key, uint64_t value)
{
    MU_ASSERT(args->args.num_args < MU_RPC_ARGS_MAX);
    grpc_arg *arg = &args->items[args->args.num_args++];
    arg->type = GRPC_ARG_INTEGER;
    arg->key = (char *)(uintptr_t)key;
    arg->value.integer = value < INT_MAX ? (int)value : INT_MAX;
}

void mu_rpc_args_pointer(struct mu_rpc_args *args, const char *key, void *value, const grpc_arg_pointer_vtable *vtable)
{
    MU_ASSERT(args->args.num_args < MU_RPC_ARGS_MAX);
    grpc_arg *arg = &args->items[args->args.num_args++];
    arg->type = GRPC_ARG_POINTER;
    arg->key = (char *)(uintptr_t)key;
    arg->value.pointer.p = value;
    arg->value.pointer.vtable = vtable;
}

void mu_rpc_args_keepalive(struct mu_rpc_args *args, unsigned time_ms, unsigned timeout_ms)
{
    mu_rpc_args_int(args, GRPC_ARG_KEEPALIVE_TIME_MS, time_ms);
    mu_rpc_args_int(args, GRPC_ARG_KEEPALIVE_TIMEOUT_MS, timeout_ms);
}

void mu_rpc_args_common(struct mu_rpc_args *args, size_t max_receive_bytes)
{
    mu_rpc_args_int(args, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, max_receive_bytes);
    mu_rpc_args_int(args, GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    mu_rpc_args_int(args, GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    mu_rpc_args_int(args, GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1u << GRPC_COMPRESS_NONE);
    mu_rpc_args_int(args, GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
    mu_rpc_args_int(args, GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
    mu_rpc_args_int(args, GRPC_ARG_HTTP2_BDP_PROBE, 0);
    mu_rpc_args_int(args, GRPC_ARG_ENABLE_CHANNELZ, 0);
}

void mu_rpc_start(grpc_call *call, const grpc_op *ops, size_t op_count, struct mu_rpc_tag *tag)
{
    mu_rpc_tag_arm(tag);
    grpc_call_error error = grpc_call_start_batch(call, ops, op_count, tag, NULL);
    MU_ASSERT(error == GRPC_CALL_OK);
}

void mu_rpc_slice_text(grpc_slice slice, char *text, size_t size)
{
    size_t length = GRPC_SLICE_LENGTH(slice);
    if (length > size - 1)
        length = size - 1;
    memcpy(text, GRPC_SLICE_START_PTR(slice), length);
    text[length] = '\0';
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            text[i] = ' ';
}
