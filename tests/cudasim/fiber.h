/* Stacks that code switches between by itself: one for each CUDA thread that is in the middle of its work. */
#ifndef CUDASIM_FIBER_H
#define CUDASIM_FIBER_H

#include <cstddef>

namespace cudasim
{

struct fiber {
    void *stack_pointer = nullptr; /* while it does not run */
    void *stack = nullptr;         /* lowest usable byte; of the thread's own stack known after the first switch */
    size_t stack_bytes = 0;
    void *context = nullptr;    /* ucontext_t where there is no switch in assembler */
    void *fake_stack = nullptr; /* AddressSanitizer's */
    void *shadow = nullptr;     /* ThreadSanitizer's */
    void (*run)(void *user) = nullptr;
    void *user = nullptr;
};

/* A fiber whose first switch calls run(user), which never returns. Fibers are never freed: they are reused. */
fiber *fiber_new(void (*run)(void *user), void *user);

/* Makes `self` stand for the calling thread's own stack. */
void fiber_adopt(fiber *self);

/* Goes on in `to`; returns when somebody switches back to `from`, the one that runs now. */
void fiber_switch(fiber *from, fiber *to);

} // namespace cudasim

#endif
