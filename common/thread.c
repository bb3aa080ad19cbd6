#include "common/thread.h"

#include <signal.h>

int mu_thread_stack_signal(void)
{
    return SIGRTMAX - 1;
}

int mu_thread_start(pthread_t *thread, void *(*main)(void *), void *arg)
{
    sigset_t blocked, before;
    sigfillset(&blocked);
    sigdelset(&blocked, mu_thread_stack_signal());
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int failed = pthread_create(thread, NULL, main, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}
