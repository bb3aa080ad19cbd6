/* Threads that take no signals: those belong to the shell's threads. */
#ifndef MU_COMMON_THREAD_H
#define MU_COMMON_THREAD_H

#include <pthread.h>

/* As pthread_create with default attributes. */
int mu_thread_start(pthread_t *thread, void *(*main)(void *), void *arg);

/* The one signal that they do take: it asks a thread where it is (worker/stacks.h). */
int mu_thread_stack_signal(void);

#endif
