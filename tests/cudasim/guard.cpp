/* Device memory is closed to the host: its pages have no access until a stream's thread needs them, and are closed
 * again when the stream has nothing more to do. So code of the host that touches device memory faults, as it would on a
 * machine with a GPU. Blocks too small for pages of their own stay open (memory.cpp says which). */
#include "tests/cudasim/runtime.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace cudasim
{

static constexpr size_t page = 4096, handler_stack_bytes = 64 << 10;

static struct sigaction before;

/* Regions that this stream's thread has opened. */
static thread_local std::vector<uintptr_t> *opened;
static thread_local void *handler_stack; /* nullptr: somebody else's */

static void protect(const region &r, int access)
{
    if (mprotect(reinterpret_cast<void *>(r.start), (r.size + page - 1) / page * page, access) != 0) {
        perror("cudasim: device memory");
        abort();
    }
}

static bool is_guarded(const region &r)
{
    return r.kind == region_kind::device && r.mapped;
}

static void on_fault(int, siginfo_t *info, void *)
{
    const region r = region_of(info->si_addr);
    if (is_guarded(r) && inside_stream) {
        opened->push_back(r.start);
        protect(r, PROT_READ | PROT_WRITE);
        return;
    }
    if (is_guarded(r))
        fprintf(stderr, "cudasim: code of the host touches device memory: byte %zu of %zu at %p\n",
                reinterpret_cast<uintptr_t>(info->si_addr) - r.start, r.size, reinterpret_cast<void *>(r.start));
    sigaction(SIGSEGV, &before, nullptr); /* the access is made again, and ends the program as it used to */
}

/* Faults of this thread are told, whatever signals it has blocked. */
static void unblock(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGSEGV);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

/* Test frameworks install handlers of their own, later than this one: theirs gets what is not for this one. */
void guard_install()
{
    static std::mutex lock;
    struct sigaction now;
    std::lock_guard<std::mutex> hold(lock);
    if (sigaction(SIGSEGV, nullptr, &now) != 0 || now.sa_sigaction == on_fault)
        return;
    before = now;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
}

void guard_host_thread()
{
    guard_install();
    unblock();
}

void guard_stream_thread()
{
    stack_t stack = {};
    guard_host_thread();
    opened = new std::vector<uintptr_t>;
    opened->reserve(1024);
    sigaltstack(nullptr, &stack);
    if (!(stack.ss_flags & SS_DISABLE))
        return; /* a sanitizer has one */
    stack = {};
    stack.ss_sp = handler_stack = malloc(handler_stack_bytes); /* fibers have little */
    stack.ss_size = handler_stack_bytes;
    sigaltstack(&stack, nullptr);
}

void guard_stream_end()
{
    stack_t none = {};
    none.ss_flags = SS_DISABLE;
    if (handler_stack)
        sigaltstack(&none, nullptr);
    free(handler_stack);
    delete opened;
}

void guard_region(const region &r)
{
    if (is_guarded(r))
        protect(r, PROT_NONE);
}

void guard_close()
{
    for (const uintptr_t start : *opened) {
        const region r = region_of(reinterpret_cast<const void *>(start));
        if (is_guarded(r) && r.start == start)
            protect(r, PROT_NONE);
    }
    opened->clear();
}

} // namespace cudasim
