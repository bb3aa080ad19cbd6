#include "common/thread.h"

int mu_thread_stack_signal(void)
{
    return SIGRTMAX - 1;
}

void mu_thread_block_signals(sigset_t *ret_before)
{
    sigset_t blocked;
    sigfillset(&blocked);
    sigdelset(&blocked, mu_thread_stack_signal());
    pthread_sigmask(SIG_SETMASK, &blocked, ret_before);
}

int mu_thread_start(pthread_t *thread, void *(*main)(void *), void *arg)
{
    sigset_t before;
    mu_thread_block_signals(&before);
    int failed = pthread_create(thread, NULL, main, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}
