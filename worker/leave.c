#include "worker/leave.h"

#include <signal.h>
#include <unistd.h>

static volatile sig_atomic_t exit_code;

static void end_now(int signal_number)
{
    (void)signal_number;
    _exit(exit_code);
}

static void end_at(int signal_number)
{
    struct sigaction action = {.sa_handler = end_now};
    sigemptyset(&action.sa_mask);
    sigaction(signal_number, &action, NULL);
}

void mu_leave_early(void)
{
    end_at(SIGTERM);
    end_at(SIGINT);
}

void mu_leave_within(unsigned seconds, int code)
{
    exit_code = code;
    end_at(SIGALRM);
    alarm(seconds);
}
