/* Threads that take no signals but one: the others belong to the shell's threads. */
#ifndef MU_COMMON_THREAD_H
#define MU_COMMON_THREAD_H

#include <pthread.h>
#include <signal.h>

/* As pthread_create with default attributes. */
int mu_thread_start(pthread_t *thread, void *(*main)(void *), void *arg);

/* The one signal that they do take: it asks a thread where it is (worker/stacks.h). */
int mu_thread_stack_signal(void);

/* For the caller: threads that it starts now take no others. pthread_sigmask(SIG_SETMASK, before, NULL) ends it. */
void mu_thread_block_signals(sigset_t *ret_before);

#endif
