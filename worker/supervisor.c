#include "worker/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/notify.h"
#include "worker/agent.h"
#include "worker/cpus.h"
#include "worker/herald.h"
#include "worker/leave.h"
#include "worker/notes.h"
#include "worker/oom.h"
#include "worker/renew.h"

enum {
    ASK_AGAIN_US = 2000000,  /* a drained or quarantined name: may it come back? */
    TELL_AGAIN_US = 1000000, /* the coordinator did not answer; or no process could be started */
    OWN_FDS = 3,             /* that are waited for, before those of the slots */
};

enum slot_state { SLOT_WAITING, SLOT_RUNNING, SLOT_TELLING, SLOT_HELD, SLOT_OVER };

struct slot {
    enum slot_state state;
    uint64_t due_us; /* WAITING: start then; TELLING, HELD: tell or ask then */
    char name[MU_WORKER_NAME_SIZE];
    cpu_set_t cpus;
    pid_t pid;
    int pid_fd, note_fd; /* -1: not running */
    bool attached, was_attached, stuck;
    struct mu_id incarnation;
    char trouble[MU_TEXT_SIZE];
    struct mu_exit_letter letter; /* how it ended */
    uint64_t ended_us;
    int exit_code; /* OVER */
};

struct supervisor {
    const struct mu_supervisor_config *config;
    struct slot slots[MU_SLOTS_MAX];
    struct mu_herald *herald;
    struct mu_renewer *renewer; /* NULL: nothing is to be renewed */
    struct mu_oom oom;
    uint32_t telling; /* the slot whose letter the herald has; UINT32_MAX: none */
    int signal_fd, wake_fd;
    int ready_fd;           /* -1: nobody waits until all are attached */
    uint32_t attached_told; /* to the service manager */
    unsigned stops;         /* SIGTERM and SIGINT so far */
    sigset_t signals;
    uint64_t ready_until_us; /* UINT64_MAX: nobody waits for that */
    bool unready;            /* it was not reached */
    char told[MU_TEXT_SIZE]; /* why the coordinator could not be told: each reason once in a row */
};

/* ---- starting ---- */

/* The command line and the environment of one worker. */
struct birth {
    char **words, **environment;
    char variable[48], device[16];
};

static size_t count_words(char *const *words)
{
    size_t count = 0;
    while (words[count])
        count++;
    return count;
}

static bool prepare_birth(const struct supervisor *self, struct slot *slot, int note_fd, struct birth *ret_birth)
{
    size_t words = count_words(self->config->words), variables = count_words(environ);
    ret_birth->words = calloc(words + 6, sizeof(char *));
    ret_birth->environment = calloc(variables + 2, sizeof(char *));
    if (!ret_birth->words || !ret_birth->environment)
        return false;
    ret_birth->words[0] = (char *)(uintptr_t) "muster-worker";
    memcpy(ret_birth->words + 1, self->config->words, words * sizeof(char *));
    ret_birth->words[words + 1] = (char *)(uintptr_t) "--name";
    ret_birth->words[words + 2] = slot->name;
    if (self->config->gpus) {
        snprintf(ret_birth->device, sizeof ret_birth->device, "cuda:%u", (uint32_t)(slot - self->slots));
        ret_birth->words[words + 3] = (char *)(uintptr_t) "--device";
        ret_birth->words[words + 4] = ret_birth->device;
    }
    memcpy(ret_birth->environment, environ, variables * sizeof(char *));
    snprintf(ret_birth->variable, sizeof ret_birth->variable, MU_NOTES_VARIABLE "=%d", note_fd);
    ret_birth->environment[variables] = ret_birth->variable;
    return true;
}

static void free_birth(struct birth *birth)
{
    free(birth->words);
    free(birth->environment);
}

/* In the child, of a process that may have threads: nothing but system calls. */
static void become_worker(const struct supervisor *self, const struct slot *slot, pid_t parent, int note_fd,
                          const struct birth *birth)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(MU_AGENT_EXIT_FAILURE);
    setpgid(0, 0); /* Ctrl-C is the supervisor's to handle, in order */
    if (CPU_COUNT(&slot->cpus) > 0)
        sched_setaffinity(0, sizeof slot->cpus, &slot->cpus);
    sigset_t ends = self->signals;
    sigdelset(&ends, SIGUSR2); /* one that comes early waits until the worker listens */
    sigprocmask(SIG_UNBLOCK, &ends, NULL);
    fcntl(note_fd, F_SETFD, 0);
    execve("/proc/self/exe", birth->words, birth->environment);
    _exit(MU_AGENT_EXIT_FAILURE);
}

static enum mu_status fork_worker(const struct supervisor *self, struct slot *slot, int note_fd, struct mu_error *err)
{
    struct birth birth;
    if (!prepare_birth(self, slot, note_fd, &birth)) {
        free_birth(&birth);
        return mu_fail(err, MU_ERR_NO_MEMORY, "%s: no memory for its command line", slot->name);
    }
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        become_worker(self, slot, parent, note_fd, &birth);
    int reason = errno;
    free_birth(&birth);
    if (pid < 0)
        return mu_fail_errno(err, reason, "%s: cannot start a process", slot->name);
    setpgid(pid, pid); /* also here: whoever comes first */
    slot->pid = pid;
    slot->pid_fd = pidfd_open(pid, 0);
    if (slot->pid_fd >= 0)
        return MU_OK;
    reason = errno;
    kill(-pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return mu_fail_errno(err, reason, "%s: cannot watch the process (pidfd_open needs Linux 5.3)", slot->name);
}

static enum mu_status start(const struct supervisor *self, struct slot *slot, struct mu_error *err)
{
    int notes[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, notes) != 0)
        return mu_fail_errno(err, errno, "%s: cannot make a socket", slot->name);
    slot->attached = slot->stuck = false;
    slot->incarnation = (struct mu_id){0};
    slot->trouble[0] = 0;
    enum mu_status status = fork_worker(self, slot, notes[1], err);
    close(notes[1]);
    if (status) {
        close(notes[0]);
        return status;
    }
    slot->note_fd = notes[0];
    slot->state = SLOT_RUNNING;
    MU_LOGI("%s started: pid %d, %d processors", slot->name, (int)slot->pid, CPU_COUNT(&slot->cpus));
    return MU_OK;
}

static void start_due(struct supervisor *self, uint64_t now_us)
{
    struct mu_error err;
    for (uint32_t i = 0; i < self->config->slots; i++) {
        struct slot *slot = &self->slots[i];
        if (slot->state != SLOT_WAITING || now_us < slot->due_us)
            continue;
        if (start(self, slot, &err) == MU_OK)
            continue;
        MU_LOGE("%s; tried again", err.text); /* no memory or no processes left: both come back */
        snprintf(slot->trouble, sizeof slot->trouble, "%.*s", (int)sizeof slot->trouble - 1, err.text);
        slot->due_us = now_us + TELL_AGAIN_US;
    }
}

/* ---- ends ---- */

/* After the signal: what it means, where that is known. */
static const char *meaning(const siginfo_t *info, struct mu_oom *oom)
{
    if (info->si_code == CLD_DUMPED)
        return ", core dumped";
    if (info->si_status != SIGKILL || !mu_oom_explains(oom))
        return "";
    return oom->whole_machine ? ": the machine was out of memory" : ": its cgroup was out of memory (memory.max)";
}

static void describe(const siginfo_t *info, struct slot *slot, struct mu_oom *oom)
{
    struct mu_exit_letter *letter = &slot->letter;
    bool exited = info->si_code == CLD_EXITED;
    *letter = (struct mu_exit_letter){.incarnation = slot->incarnation,
                                      .pid = (uint64_t)slot->pid,
                                      .signal = exited ? 0 : (uint32_t)info->si_status,
                                      .code = exited ? (uint32_t)info->si_status : 0};
    const char *name = exited ? NULL : sigabbrev_np(info->si_status);
    if (exited)
        snprintf(letter->text, sizeof letter->text, "exited with code %d%s%.*s", info->si_status,
                 info->si_status && slot->trouble[0] ? ": " : "", (int)sizeof letter->text - 40,
                 info->si_status ? slot->trouble : "");
    else if (slot->stuck)
        snprintf(letter->text, sizeof letter->text, "was killed, for it was stuck: %.*s", (int)sizeof letter->text - 40,
                 slot->trouble);
    else
        snprintf(letter->text, sizeof letter->text, "was killed by signal %d (SIG%s)%s", info->si_status,
                 name ? name : "?", meaning(info, oom));
}

static void over(struct slot *slot, int exit_code)
{
    slot->state = SLOT_OVER;
    slot->exit_code = exit_code;
}

static void take_notes(struct slot *slot)
{
    struct mu_note note;
    while (slot->note_fd >= 0 && mu_notes_take(slot->note_fd, &note)) {
        slot->attached = note.kind == MU_NOTE_ATTACHED || (slot->attached && note.kind == MU_NOTE_INCARNATION);
        slot->was_attached = slot->was_attached || slot->attached;
        if (note.kind == MU_NOTE_INCARNATION)
            slot->incarnation = note.incarnation;
        memcpy(slot->trouble, note.text, sizeof slot->trouble);
        if (note.kind != MU_NOTE_STUCK)
            continue;
        slot->stuck = true;
        kill(-slot->pid, SIGKILL);
    }
}

/* Once it was asked to leave. SIGTERM and SIGINT end one that is just being started. */
static int how_it_left(const struct mu_exit_letter *letter)
{
    bool as_asked = letter->signal == SIGTERM || letter->signal == SIGINT;
    return as_asked ? MU_AGENT_EXIT_OK : letter->signal ? MU_AGENT_EXIT_INTERRUPTED : (int)letter->code;
}

/* What it left behind in its group goes with it: until it is waited for, the group's number is nobody else's. */
static void reap(struct supervisor *self, struct slot *slot)
{
    siginfo_t info = {0};
    take_notes(slot);
    kill(-slot->pid, SIGKILL);
    if (waitid(P_PIDFD, (id_t)slot->pid_fd, &info, WEXITED) != 0)
        MU_LOGE("%s: waitid: %s", slot->name, strerror(errno));
    close(slot->pid_fd);
    close(slot->note_fd);
    slot->pid_fd = slot->note_fd = -1;
    slot->attached = false;
    describe(&info, slot, &self->oom);
    mu_log(slot->letter.signal || slot->letter.code ? MU_LOG_WARN : MU_LOG_INFO, NULL, "%s (pid %d) %s", slot->name,
           (int)slot->pid, slot->letter.text);
    slot->state = SLOT_TELLING;
    slot->due_us = 0;
    slot->ended_us = mu_clock_mono_us();
    if (self->stops)
        over(slot, how_it_left(&slot->letter));
    else if (slot->letter.code == MU_AGENT_EXIT_CANNOT_CONNECT)
        over(slot, MU_AGENT_EXIT_CANNOT_CONNECT); /* there is nobody to tell */
}

/* ---- the coordinator's answers ---- */

static void take_answer(struct supervisor *self, uint64_t now_us)
{
    struct mu_exit_answer answer;
    if (self->telling == UINT32_MAX || !mu_herald_answer(self->herald, &answer))
        return;
    struct slot *slot = &self->slots[self->telling];
    self->telling = UINT32_MAX;
    if (slot->state == SLOT_OVER)
        return; /* stopped meanwhile */
    const char *text = answer.text;
    if (answer.failed) {
        if (strcmp(text, self->told) != 0)
            MU_LOGW("%s: the coordinator cannot be asked: %s; tried again", slot->name, text);
        snprintf(self->told, sizeof self->told, "%s", text);
        slot->due_us = now_us + TELL_AGAIN_US;
        if (self->config->give_up_ms && now_us - slot->ended_us > self->config->give_up_ms * 1000ull)
            over(slot, MU_AGENT_EXIT_CANNOT_CONNECT);
        return;
    }
    self->told[0] = 0;
    slot->ended_us = now_us; /* it is there: its patience begins anew */
    bool is_news = !slot->letter.again;
    slot->letter.again = true;
    switch (answer.verdict) {
    case MU_HERALD_START:
        slot->state = SLOT_WAITING;
        slot->due_us = now_us + answer.after_ms * 1000ull;
        return;
    case MU_HERALD_ASK_AGAIN:
        if (is_news)
            MU_LOGW("%s waits: %s", slot->name, text);
        snprintf(slot->trouble, sizeof slot->trouble, "%s", text);
        slot->state = SLOT_HELD;
        slot->due_us = now_us + ASK_AGAIN_US;
        return;
    case MU_HERALD_STAY_AWAY:
        MU_LOGI("%s is not started again: %s", slot->name, text);
        over(slot, (int)slot->letter.code);
        return;
    }
}

static void tell_due(struct supervisor *self, uint64_t now_us)
{
    for (uint32_t i = 0; i < self->config->slots && self->telling == UINT32_MAX; i++) {
        struct slot *slot = &self->slots[i];
        if ((slot->state != SLOT_TELLING && slot->state != SLOT_HELD) || now_us < slot->due_us)
            continue;
        self->telling = i;
        mu_herald_tell(self->herald, slot->name, &slot->letter);
    }
}

/* ---- signals ---- */

/* The workers log what they did last. */
static void pass_on(const struct supervisor *self, int signal_number)
{
    for (uint32_t i = 0; i < self->config->slots; i++)
        if (self->slots[i].state == SLOT_RUNNING)
            kill(self->slots[i].pid, signal_number);
}

static void on_signals(struct supervisor *self)
{
    struct signalfd_siginfo info;
    while (read(self->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGUSR2) {
            pass_on(self, SIGUSR2);
            continue;
        }
        bool kill_now = self->stops++ > 0;
        MU_LOGI("SIG%s: %s", sigabbrev_np((int)info.ssi_signo),
                kill_now ? "all workers are killed" : "all workers leave in good order (again to kill them)");
        if (!kill_now)
            mu_notify("STOPPING=1");
        for (uint32_t i = 0; i < self->config->slots; i++) {
            struct slot *slot = &self->slots[i];
            if (slot->state == SLOT_RUNNING)
                kill(-slot->pid, kill_now ? SIGKILL : SIGTERM);
            else if (slot->state != SLOT_OVER)
                over(slot, MU_AGENT_EXIT_OK);
        }
    }
}

/* ---- all of them are attached, for who waits for that ---- */

static void close_ready(struct supervisor *self)
{
    close(self->ready_fd);
    self->ready_fd = -1;
    self->ready_until_us = UINT64_MAX;
}

static void say_ready(struct supervisor *self, const char *text)
{
    ssize_t ignored = write(self->ready_fd, text, strlen(text));
    (void)ignored; /* nobody waits any more */
    ignored = write(self->ready_fd, "\n", 1);
    (void)ignored;
    close_ready(self);
}

/* Who waited is gone (interrupted, or its connection broke) and believes that nothing was started. */
static void lose_starter(struct supervisor *self)
{
    MU_LOGW("who started this in the background has not waited until all are attached");
    close_ready(self);
    self->unready = true;
    kill(getpid(), SIGTERM);
}

static void look_at_readiness(struct supervisor *self, uint64_t now_us)
{
    char text[MU_WORKER_NAME_SIZE + 2 * MU_TEXT_SIZE + 8];
    const struct slot *missing = NULL;
    if (self->ready_until_us == UINT64_MAX)
        return;
    for (uint32_t i = 0; i < self->config->slots && !missing; i++)
        missing = self->slots[i].was_attached ? NULL : &self->slots[i];
    if (!missing) {
        say_ready(self, "");
        return;
    }
    bool ended = missing->state == SLOT_OVER || missing->state == SLOT_HELD;
    if (!ended && now_us < self->ready_until_us)
        return;
    const char *how = missing->state == SLOT_OVER ? missing->letter.text : ended ? "waits" : "is not attached in time";
    const char *why = missing->state == SLOT_OVER ? "" : missing->trouble;
    snprintf(text, sizeof text, "%s %s%s%s", missing->name, how, why[0] ? ": " : "", why);
    say_ready(self, text);
    self->unready = true;
    kill(getpid(), SIGTERM); /* it does not stay behind, trying for ever */
}

/* ---- the loop ---- */

static bool all_over(const struct supervisor *self)
{
    for (uint32_t i = 0; i < self->config->slots; i++) {
        if (self->slots[i].state != SLOT_OVER)
            return false;
    }
    return true;
}

static uint64_t next_due(const struct supervisor *self)
{
    uint64_t due_us = self->ready_until_us;
    for (uint32_t i = 0; i < self->config->slots; i++) {
        const struct slot *slot = &self->slots[i];
        bool asks = slot->state == SLOT_TELLING || slot->state == SLOT_HELD;
        bool counts = slot->state == SLOT_WAITING || (asks && self->telling == UINT32_MAX);
        if (counts && slot->due_us < due_us)
            due_us = slot->due_us;
    }
    return due_us;
}

static void wait_for_something(struct supervisor *self, uint64_t until_us, bool ret_ended[MU_SLOTS_MAX])
{
    struct pollfd fds[OWN_FDS + 2 * MU_SLOTS_MAX] = {
        {.fd = self->signal_fd, .events = POLLIN}, {.fd = self->wake_fd, .events = POLLIN}, {.fd = self->ready_fd}};
    uint32_t slots = self->config->slots;
    for (uint32_t i = 0; i < slots; i++) { /* poll passes over those that are -1 */
        fds[OWN_FDS + 2 * i] = (struct pollfd){.fd = self->slots[i].pid_fd, .events = POLLIN};
        fds[OWN_FDS + 1 + 2 * i] = (struct pollfd){.fd = self->slots[i].note_fd, .events = POLLIN};
    }
    uint64_t now_us = mu_clock_mono_us(), left_us = until_us > now_us ? until_us - now_us : 0;
    struct timespec timeout = {.tv_sec = (time_t)(left_us / 1000000), .tv_nsec = (long)(left_us % 1000000) * 1000};
    int count = ppoll(fds, OWN_FDS + 2 * slots, until_us == UINT64_MAX ? NULL : &timeout, NULL);
    if (count < 0 && errno != EINTR)
        MU_LOGE("poll: %s", strerror(errno));
    for (uint32_t i = 0; i < slots; i++)
        ret_ended[i] = count > 0 && fds[OWN_FDS + 2 * i].revents != 0;
    if (count > 0 && (fds[2].revents & POLLERR))
        lose_starter(self);
    uint64_t drained;
    ssize_t ignored = read(self->wake_fd, &drained, sizeof drained);
    (void)ignored;
}

static void tell_manager(struct supervisor *self)
{
    uint32_t attached = 0;
    for (uint32_t i = 0; i < self->config->slots; i++)
        attached += self->slots[i].attached;
    if (attached == self->attached_told)
        return;
    self->attached_told = attached;
    mu_notify("STATUS=%u of %u workers attached to job %s", attached, self->config->slots, self->config->job);
}

static void main_loop(struct supervisor *self)
{
    bool ended[MU_SLOTS_MAX];
    start_due(self, mu_clock_mono_us());
    mu_notify("READY=1");
    while (!all_over(self)) {
        uint64_t now_us = mu_clock_mono_us(), until_us = next_due(self), alive_us = mu_notify_alive(now_us);
        wait_for_something(self, alive_us < until_us ? alive_us : until_us, ended);
        on_signals(self);
        now_us = mu_clock_mono_us();
        for (uint32_t i = 0; i < self->config->slots; i++) {
            if (ended[i])
                reap(self, &self->slots[i]);
            else
                take_notes(&self->slots[i]);
        }
        take_answer(self, now_us);
        start_due(self, now_us);
        tell_due(self, now_us);
        look_at_readiness(self, now_us);
        tell_manager(self);
    }
}

/* ---- start and end ---- */

static void wake(void *arg)
{
    struct supervisor *self = arg;
    uint64_t one = 1;
    ssize_t ignored = write(self->wake_fd, &one, sizeof one);
    (void)ignored; /* a full counter wakes as well */
}

static void init_slots(struct supervisor *self)
{
    struct mu_cpu *cpus = malloc(CPU_SETSIZE * sizeof *cpus);
    uint32_t count = cpus ? mu_cpus_read(cpus) : 0;
    for (uint32_t i = 0; i < self->config->slots; i++) {
        struct slot *slot = &self->slots[i];
        slot->pid_fd = slot->note_fd = -1;
        snprintf(slot->name, sizeof slot->name, "%s-%s%u", self->config->name, self->config->gpus ? "cuda" : "cpu", i);
        mu_cpus_share(cpus, count, self->config->slots, i, &slot->cpus);
    }
    free(cpus);
}

static enum mu_status init(struct supervisor *self, struct mu_error *err)
{
    mu_oom_init(&self->oom, "");
    sigemptyset(&self->signals);
    sigaddset(&self->signals, SIGTERM);
    sigaddset(&self->signals, SIGINT);
    sigaddset(&self->signals, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &self->signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    self->signal_fd = signalfd(-1, &self->signals, SFD_NONBLOCK | SFD_CLOEXEC);
    self->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->signal_fd < 0 || self->wake_fd < 0)
        return mu_fail_errno(err, errno, "cannot wait for signals");
    struct mu_herald_config herald = {.coordinator = self->config->coordinator,
                                      .tls = self->config->tls,
                                      .job = self->config->job,
                                      .host = self->config->host,
                                      .answered = wake,
                                      .ctx = self};
    enum mu_status status = mu_herald_new(&herald, &self->herald, err);
    if (status == MU_OK)
        status = mu_renewer_new(&(struct mu_renewer_config){herald.coordinator, herald.tls}, &self->renewer, err);
    return status;
}

static int exit_code_of(const struct supervisor *self)
{
    if (self->unready)
        return MU_AGENT_EXIT_CANNOT_CONNECT;
    for (uint32_t i = 0; i < self->config->slots; i++) {
        if (self->slots[i].exit_code)
            return self->slots[i].exit_code;
    }
    return MU_AGENT_EXIT_OK;
}

int mu_supervise(const struct mu_supervisor_config *config)
{
    struct supervisor *self = calloc(1, sizeof *self);
    struct mu_error err = {0};
    if (!self) {
        MU_LOGE("no memory for the supervisor");
        return MU_AGENT_EXIT_FAILURE;
    }
    self->config = config;
    self->telling = UINT32_MAX;
    self->signal_fd = self->wake_fd = -1;
    self->ready_fd = config->ready_fd;
    self->ready_until_us = config->ready_fd < 0 ? UINT64_MAX : mu_clock_mono_us() + config->ready_ms * 1000ull;
    init_slots(self);
    int code = MU_AGENT_EXIT_FAILURE;
    if (init(self, &err) == MU_OK) {
        main_loop(self);
        code = exit_code_of(self);
    } else {
        MU_LOGE("%s", err.text);
    }
    mu_leave_within(MU_AGENT_STOP_S, code); /* a call to the coordinator may be under way */
    mu_renewer_free(self->renewer);
    mu_herald_free(self->herald);
    int fds[] = {self->signal_fd, self->wake_fd};
    for (unsigned i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    free(self);
    return code;
}
