/* What server and client share of the gRPC C core: its life, channel arguments, credentials. Internal to rpc/. */
#ifndef MU_RPC_RUNTIME_H
#define MU_RPC_RUNTIME_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include "common/status.h"
#include "rpc/tls_internal.h"

/* Every server and every pool holds the core up between these two. Thread-safe. The core's own log is silenced
 * (libraries return, they do not log) unless GRPC_VERBOSITY is set in the environment. */
void mu_rpc_runtime_acquire(void);
void mu_rpc_runtime_release(void);

/* A thread with all signals blocked: signals belong to the threads of the program. */
enum mu_status mu_rpc_thread_start(pthread_t *thread, void *(*main)(void *), void *arg,
                                   struct mu_error *err) MU_WARN_UNUSED;

/* The one place where credentials are chosen (tls NULL: plaintext). The caller releases them. */
grpc_server_credentials *mu_rpc_server_credentials(struct mu_rpc_tls *tls, bool takes_strangers);
grpc_channel_credentials *mu_rpc_channel_credentials(struct mu_rpc_tls *tls);

enum { MU_RPC_ARGS_MAX = 32 };

/* Channel arguments under construction; strings are borrowed until the channel or server exists. */
struct mu_rpc_args {
    grpc_channel_args args;
    grpc_arg items[MU_RPC_ARGS_MAX];
};

void mu_rpc_args_init(struct mu_rpc_args *args);
void mu_rpc_args_int(struct mu_rpc_args *args, const char *key, uint64_t value); /* clamped to INT_MAX */
void mu_rpc_args_pointer(struct mu_rpc_args *args, const char *key, void *value,
                         const grpc_arg_pointer_vtable *vtable); /* borrowed */
/* What holds for both sides: message and metadata limits, no compression (a small message may inflate to gigabytes), no
 * bandwidth probing (a ping for every heartbeat). */
void mu_rpc_args_common(struct mu_rpc_args *args, size_t max_receive_bytes);
/* HTTP/2 pings on a silent connection; INT_MAX: none. Every message that is received sets the timer anew. */
void mu_rpc_args_keepalive(struct mu_rpc_args *args, unsigned time_ms, unsigned timeout_ms);

/* Tag of one operation that the core may have in progress. The flag catches a tag used twice. The core orders what we
 * wrote before the start with what the poller does after the completion, but by synchronisation that the thread
 * sanitizer does not see: it is told. */
struct mu_rpc_tag {
    bool armed;
};

static inline void mu_rpc_tag_arm(struct mu_rpc_tag *tag)
{
    MU_ASSERT(!tag->armed);
    tag->armed = true;
#ifdef __SANITIZE_THREAD__
    __tsan_release(tag);
#endif
}

static inline void mu_rpc_tag_fire(struct mu_rpc_tag *tag)
{
#ifdef __SANITIZE_THREAD__
    __tsan_acquire(tag);
#endif
    MU_ASSERT(tag->armed);
    tag->armed = false;
}

/* Starts one batch; anything but success is a fault of this program. */
void mu_rpc_start(grpc_call *call, const grpc_op *ops, size_t op_count, struct mu_rpc_tag *tag);

/* Header by which a server says at once that it accepted a bidi stream. */
#define MU_RPC_OPEN_MARK "muster-open"

/* Copies a slice as text, control characters replaced, cut at size - 1. */
void mu_rpc_slice_text(grpc_slice slice, char *text, size_t size);

#endif
