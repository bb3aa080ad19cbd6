#include "worker/stacks.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/thread.h"

enum {
    FRAMES_MAX = 24,
    SLOTS = MU_STACKS_THREADS_MAX + 64, /* threads asked at a time, by all that ask */
    OWN_FRAMES = 2,                     /* the handler's, and the one that returns from it */
    LOOK_NS = 200000,
    PATH_SIZE = 64,
};

/* FREE -> CLAIMED -> WANTED by who asks; -> WRITING -> WRITTEN by the thread that is asked; back to FREE by who asked,
 * if it was WRITTEN or WANTED. One that is WRITING when the time is over becomes LATE, and is freed by its writer. */
enum { FREE, CLAIMED, WANTED, WRITING, WRITTEN, LATE };

struct slot {
    atomic_int state;
    atomic_int tid;
    void *frames[FRAMES_MAX];
    int count;
};

static struct slot slots[SLOTS];
static int signal_number; /* 0: there are no stacks */

/* ---- the thread that is asked ---- */

/* In whatever the thread was doing: touches nothing but its slot. */
static void on_signal(int number)
{
    int saved = errno, tid = gettid();
    (void)number;
    for (int i = 0; i < SLOTS; i++) {
        int wanted = WANTED, writing = WRITING;
        if (atomic_load(&slots[i].tid) != tid || !atomic_compare_exchange_strong(&slots[i].state, &wanted, WRITING))
            continue;
        slots[i].count = backtrace(slots[i].frames, FRAMES_MAX);
        if (!atomic_compare_exchange_strong(&slots[i].state, &writing, WRITTEN))
            atomic_store(&slots[i].state, FREE);
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

/* ---- who asks ---- */

struct thread {
    pid_t tid;
    struct slot *slot; /* NULL: it was not asked */
    const char *why;   /* it was not */
};

static void ask(struct thread *thread)
{
    thread->slot = NULL;
    thread->why = "too many are asked at a time";
    for (int i = 0; i < SLOTS; i++) {
        int free_state = FREE;
        if (!atomic_compare_exchange_strong(&slots[i].state, &free_state, CLAIMED))
            continue;
        atomic_store(&slots[i].tid, thread->tid);
        atomic_store(&slots[i].state, WANTED);
        if (tgkill(getpid(), thread->tid, signal_number) == 0) {
            thread->slot = &slots[i];
            return;
        }
        atomic_store(&slots[i].state, FREE);
        thread->why = errno == ESRCH ? "it has ended" : "it has too many signals";
        return;
    }
}

/* False: it has not answered, and its slot is not the caller's any more. */
static bool await(struct slot *slot, uint64_t until_us)
{
    while (atomic_load(&slot->state) != WRITTEN) {
        int wanted = WANTED, writing = WRITING;
        if (mu_clock_mono_us() >= until_us && (atomic_compare_exchange_strong(&slot->state, &wanted, FREE) ||
                                               atomic_compare_exchange_strong(&slot->state, &writing, LATE)))
            return false;
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

/* ---- what the kernel says ---- */

static void read_proc(pid_t tid, const char *name, char *out, size_t size)
{
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", tid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, out, size - 1) : -1;
    out[length > 0 ? length : 0] = 0;
    if (fd >= 0)
        close(fd);
}

static void put_stack(const struct thread *thread, uint64_t until_us, char *out, size_t size)
{
    struct slot *slot = thread->slot;
    size_t at = 0;
    if (!slot)
        snprintf(out, size, "no stack: %s", thread->why);
    else if (!await(slot, until_us))
        snprintf(out, size, "no stack: it does not answer");
    else {
        for (int i = OWN_FRAMES; i < slot->count && at < size; i++)
            at += put_frame(out + at, size - at, slot->frames[i], i > OWN_FRAMES ? " < " : "");
        atomic_store(&slot->state, FREE);
    }
}

/* Signals would only pile up there. */
static bool blocks_signal(pid_t tid)
{
    char status[2048];
    read_proc(tid, "status", status, sizeof status);
    const char *line = strstr(status, "\nSigBlk:");
    return line && strtoull(line + 8, NULL, 16) >> (signal_number - 1) & 1;
}

/* False: it has ended. */
static bool put_state(pid_t tid, char line[MU_STACKS_LINE_SIZE])
{
    char name[32], place[64], call[128], stat[512], state = '?';
    unsigned long long user = 0, system = 0;
    read_proc(tid, "comm", name, sizeof name);
    read_proc(tid, "wchan", place, sizeof place);
    read_proc(tid, "syscall", call, sizeof call);
    read_proc(tid, "stat", stat, sizeof stat);
    name[strcspn(name, "\n")] = 0;
    call[strcspn(call, " \n")] = 0;
    const char *rest = strrchr(stat, ')'); /* the name before it may hold anything */
    if (rest)
        (void)sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &state, &user, &system);
    bool waits = place[0] && strcmp(place, "0") != 0;
    snprintf(line, MU_STACKS_LINE_SIZE, "%d %s: %c%s%s, system call %.16s, %llu ms of processor time; ", tid, name,
             state, waits ? " in " : "", waits ? place : "", call[0] ? call : "unknown",
             (user + system) * 1000 / (unsigned long long)sysconf(_SC_CLK_TCK));
    return rest;
}

static size_t list(struct thread threads[MU_STACKS_THREADS_MAX], size_t capacity)
{
    DIR *dir = opendir("/proc/self/task");
    size_t count = 0;
    for (struct dirent *entry; dir && count < capacity && (entry = readdir(dir));)
        if (entry->d_name[0] != '.')
            threads[count++].tid = (pid_t)strtol(entry->d_name, NULL, 10);
    if (dir)
        closedir(dir);
    return count;
}

/* States come first: who answers does not wait any more where it waited. */
size_t mu_stacks_describe(char (*lines)[MU_STACKS_LINE_SIZE], size_t capacity)
{
    struct thread threads[MU_STACKS_THREADS_MAX];
    size_t listed = list(threads, capacity < MU_STACKS_THREADS_MAX ? capacity : MU_STACKS_THREADS_MAX), count = 0;
    for (size_t i = 0; i < listed; i++)
        if (put_state(threads[i].tid, lines[count])) {
            bool is_asked = signal_number && !blocks_signal(threads[i].tid);
            threads[count++] = (struct thread){.tid = threads[i].tid,
                                               .why = is_asked        ? NULL
                                                      : signal_number ? "it blocks the signal"
                                                                      : "the signal is taken"};
        }
    for (size_t i = 0; i < count; i++)
        if (!threads[i].why)
            ask(&threads[i]);
    uint64_t until_us = mu_clock_mono_us() + MU_STACKS_WAIT_MS * 1000ull;
    for (size_t i = 0; i < count; i++) {
        size_t length = strlen(lines[i]);
        put_stack(&threads[i], until_us, lines[i] + length, MU_STACKS_LINE_SIZE - length);
    }
    return count;
}
