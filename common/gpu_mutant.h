/* Deliberate faults of the code for GPUs, for testing their emulation (tests/cudasim), as common/mutant.h has them of
 * the protocol: `if (MU_GPU_MUTANT(MU_GPU_MUT_READ_EARLY)) ...`.
 *
 * tests/unit/test_gpu_mutants.c must notice each of them. Only what is built for the emulation has them
 * (MU_GPU_MUTANTS, cmake/cuda.cmake); in everything that runs on a GPU the macro is the constant 0 and the branch
 * disappears. Set before the code runs, by one thread. */
#ifndef MU_COMMON_GPU_MUTANT_H
#define MU_COMMON_GPU_MUTANT_H

enum mu_gpu_mutant {
    MU_GPU_MUT_NONE,
    MU_GPU_MUT_FOLLOW_NOBODY, /* an exchange on a stream of its own does not wait for what computes its data */
    MU_GPU_MUT_PASS_EARLY,    /* marks count as passed at once: the host reads a copy that the GPU still makes */
    MU_GPU_MUT_READ_EARLY,    /* the host looks at a result that is not computed yet */
    MU_GPU_MUT_KEEP_FRESH,    /* new memory is not zeroed */
    MU_GPU_MUT_NO_BARRIER,    /* threads of a block overwrite what others have not read */
    MU_GPU_MUT_NO_POLL,       /* NCCL is not asked for errors of operations under way */
    MU_GPU_MUT_ABORT_RUNNING, /* an abort does not wait until the GPU has left the buffers */
    MU_GPU_MUT_COUNT
};

#ifdef MU_GPU_MUTANTS
#ifdef __cplusplus
extern "C" {
#endif
extern int mu_gpu_mutant_active;
#ifdef __cplusplus
}
#endif
#define MU_GPU_MUTANT(id) (mu_gpu_mutant_active == (id))
#else
#define MU_GPU_MUTANT(id) 0
#endif

#endif
