#include "worker/stacks.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/thread.h"

enum {
    FRAMES_MAX = 24,
    SLOTS = 96,     /* threads asked at a time */
    OWN_FRAMES = 2, /* the handler's, and the one that returns from it */
    LOOK_NS = 200000,
};

/* WANTED -> WRITING -> WRITTEN, by the thread that is asked; back to FREE by who asked, if it was WRITTEN or WANTED. */
enum { FREE, WANTED, WRITING, WRITTEN };

static struct mu_stack {
    atomic_int state;
    atomic_int tid;
    void *frames[FRAMES_MAX];
    int count;
} slots[SLOTS];
static int signal_number; /* 0: there are no stacks */

/* In whatever the thread was doing: touches nothing but its slot. */
static void on_signal(int number)
{
    int saved = errno, tid = gettid();
    (void)number;
    for (int i = 0; i < SLOTS; i++) {
        int wanted = WANTED;
        if (atomic_load(&slots[i].tid) != tid || !atomic_compare_exchange_strong(&slots[i].state, &wanted, WRITING))
            continue;
        slots[i].count = backtrace(slots[i].frames, FRAMES_MAX);
        atomic_store(&slots[i].state, WRITTEN);
        break;
    }
    errno = saved;
}

void mu_stacks_init(void)
{
    void *frames[FRAMES_MAX];
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before;
    int number = mu_thread_stack_signal();
    sigemptyset(&action.sa_mask);
    (void)backtrace(frames, FRAMES_MAX); /* loads the unwinder, which a handler must not */
    if (sigaction(number, NULL, &before) == 0 && before.sa_handler == SIG_DFL && sigaction(number, &action, NULL) == 0)
        signal_number = number;
}

struct mu_stack *mu_stack_ask(pid_t tid)
{
    for (int i = 0; signal_number && i < SLOTS; i++) {
        if (atomic_load(&slots[i].state) != FREE)
            continue;
        atomic_store(&slots[i].tid, tid);
        atomic_store(&slots[i].state, WANTED);
        if (tgkill(getpid(), tid, signal_number) == 0)
            return &slots[i];
        atomic_store(&slots[i].state, FREE);
        return NULL;
    }
    return NULL;
}

/* False: it has not answered. If it is doing so right now, its slot is lost to others. */
static bool await(struct mu_stack *stack, uint64_t until_us)
{
    while (atomic_load(&stack->state) != WRITTEN) {
        int wanted = WANTED;
        if (mu_clock_mono_us() >= until_us)
            return !atomic_compare_exchange_strong(&stack->state, &wanted, FREE) && wanted == WRITTEN;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    return true;
}

static size_t put_frame(char *out, size_t size, void *frame, const char *before)
{
    Dl_info info;
    if (dladdr(frame, &info) == 0)
        return (size_t)snprintf(out, size, "%s%p", before, frame);
    if (info.dli_sname)
        return (size_t)snprintf(out, size, "%s%s", before, info.dli_sname);
    const char *slash = strrchr(info.dli_fname, '/');
    return (size_t)snprintf(out, size, "%s%s+0x%zx", before, slash ? slash + 1 : info.dli_fname,
                            (size_t)((char *)frame - (char *)info.dli_fbase));
}

void mu_stack_take(struct mu_stack *stack, uint64_t until_us, char *out, size_t size)
{
    size_t at = 0;
    out[0] = 0;
    if (!stack || !await(stack, until_us))
        return;
    for (int i = OWN_FRAMES; i < stack->count && at < size; i++)
        at += put_frame(out + at, size - at, stack->frames[i], i > OWN_FRAMES ? " < " : "");
    atomic_store(&stack->state, FREE);
}
