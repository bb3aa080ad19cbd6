/* How a test steers the emulation beyond its environment variables (tests/cudasim/README.md lists those). */
#ifndef CUDASIM_CONTROL_H
#define CUDASIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The call number `nth` from now (1: the next one) of `function` fails with `code`; 0: the usual error of that
 * function. Names are those of the interface; "kernel" is the execution of a kernel: its error is asynchronous and
 * sticky. */
void cudasim_fail(const char *function, unsigned nth, int code);
/* Forgets all failures that were ordered and not met. */
void cudasim_fail_none(void);

/* Order of threads, blocks and graph nodes, delays of streams. */
void cudasim_seed(uint64_t seed);

/* 1: NCCL does not notice peers that die; what waits for them waits until it is aborted. */
void cudasim_nccl_deaf(int deaf);

/* Bytes of device memory now in use by this process. */
size_t cudasim_device_bytes(int device);

#ifdef __cplusplus
}
#endif
#endif
