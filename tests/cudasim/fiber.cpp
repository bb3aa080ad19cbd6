#include "tests/cudasim/fiber.h"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cudasim
{

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static constexpr size_t stack_size = 512 << 10; /* sanitizers spread variables out */
#else
static constexpr size_t stack_size = 128 << 10;
#endif

/* Who switched: the new fiber tells AddressSanitizer where it came from. */
static __thread fiber *came_from;

static void __attribute__((noinline)) arrived(fiber *self)
{
#if defined(__SANITIZE_ADDRESS__)
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(self->fake_stack, &bottom, &size);
    came_from->stack = const_cast<void *>(bottom);
    came_from->stack_bytes = size;
#else
    (void)self;
    (void)came_from;
#endif
}

#if defined(__x86_64__)

extern "C" void cudasim_switch(void **save, void *load);
/* Callee-saved registers are all that a function call preserves; the control words never change in device code. */
__asm__(".text\n.globl cudasim_switch\n.type cudasim_switch, @function\ncudasim_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n    ret\n"
        ".size cudasim_switch, .-cudasim_switch\n"
        ".globl cudasim_start\n.type cudasim_start, @function\ncudasim_start:\n"
        "    movq %r12, %rdi\n    xorl %ebp, %ebp\n    callq cudasim_begin\n    ud2\n"
        ".size cudasim_start, .-cudasim_start\n");
extern "C" void cudasim_start(void);

extern "C" __attribute__((used)) void cudasim_begin(void *self_)
{
    fiber *self = static_cast<fiber *>(self_);
    arrived(self);
    self->run(self->user);
    abort();
}

static void prepare(fiber *f)
{
    void **top = reinterpret_cast<void **>(static_cast<char *>(f->stack) + f->stack_bytes);
    *--top = nullptr; /* keeps the stack aligned to 16 at the call */
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(cudasim_start);
    void *registers[] = {nullptr /* r15 */, nullptr, nullptr, f /* r12 */, nullptr, nullptr /* rbp */};
    for (int i = 5; i >= 0; i--)
        *--top = registers[i];
    f->stack_pointer = top;
}

static void change(fiber *from, fiber *to)
{
    cudasim_switch(&from->stack_pointer, to->stack_pointer);
}

void fiber_adopt(fiber *self)
{
#if defined(__SANITIZE_THREAD__)
    self->shadow = __tsan_get_current_fiber();
#endif
    (void)self;
}

#else

static void begin(unsigned high, unsigned low)
{
    fiber *self = reinterpret_cast<fiber *>(static_cast<uintptr_t>(high) << 32 | low);
    arrived(self);
    self->run(self->user);
    abort();
}

static void prepare(fiber *f)
{
    ucontext_t *context = new ucontext_t();
    const uintptr_t self = reinterpret_cast<uintptr_t>(f);
    getcontext(context);
    context->uc_stack.ss_sp = f->stack;
    context->uc_stack.ss_size = f->stack_bytes;
    makecontext(context, reinterpret_cast<void (*)()>(begin), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
    f->context = context;
}

static void change(fiber *from, fiber *to)
{
    swapcontext(static_cast<ucontext_t *>(from->context), static_cast<ucontext_t *>(to->context));
}

void fiber_adopt(fiber *self)
{
    if (!self->context)
        self->context = new ucontext_t();
}

#endif

fiber *fiber_new(void (*run)(void *user), void *user)
{
    const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void *memory = mmap(nullptr, guard + stack_size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
        perror("cudasim: stack of a CUDA thread");
        abort();
    }
    fiber *f = new fiber;
    f->stack = static_cast<char *>(memory) + guard;
    f->stack_bytes = stack_size;
    f->run = run;
    f->user = user;
#if defined(__SANITIZE_THREAD__)
    f->shadow = __tsan_create_fiber(0);
#endif
    prepare(f);
    return f;
}

void fiber_switch(fiber *from, fiber *to)
{
    came_from = from;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to->shadow, 0);
#endif
    change(from, to);
    arrived(from);
}

} // namespace cudasim
