#include "kernels/cpu/isa.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *const isa_names[] = {[MU_ISA_SCALAR] = "scalar", [MU_ISA_AVX2] = "avx2", [MU_ISA_AVX512] = "avx512"};

static const struct mu_isa_ops *const tables[] = {
    [MU_ISA_SCALAR] = &mu_isa_ops_scalar,
#if defined(__x86_64__)
    [MU_ISA_AVX2] = &mu_isa_ops_avx2,
    [MU_ISA_AVX512] = &mu_isa_ops_avx512,
#endif
};

static atomic_int active = -1; /* enum mu_isa, or not chosen yet; racing first uses choose the same */

static bool cpu_has(enum mu_isa isa)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == MU_ISA_AVX2)
        return avx2;
    if (isa == MU_ISA_AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return isa == MU_ISA_SCALAR;
}

/* The environment can only lower the choice, and no choice shows in the bits. */
static enum mu_isa environment_limit(void)
{
    const char *own = getenv("MU_CPU_ISA"), *dnnl = getenv("DNNL_MAX_CPU_ISA");
    for (int isa = MU_ISA_SCALAR; own && isa <= MU_ISA_AVX512; isa++)
        if (strcasecmp(own, isa_names[isa]) == 0)
            return (enum mu_isa)isa;
    if (dnnl && (strncasecmp(dnnl, "AVX2", 4) == 0 || strcasecmp(dnnl, "AVX") == 0 || strcasecmp(dnnl, "SSE41") == 0))
        return MU_ISA_AVX2;
    return MU_ISA_AVX512;
}

enum mu_isa mu_isa_active(void)
{
    int isa = atomic_load_explicit(&active, memory_order_relaxed);
    if (isa < 0) {
        isa = environment_limit();
        while (!cpu_has((enum mu_isa)isa))
            isa--;
        atomic_store_explicit(&active, isa, memory_order_relaxed);
    }
    return (enum mu_isa)isa;
}

const char *mu_isa_name(enum mu_isa isa)
{
    return isa_names[isa];
}

enum mu_status mu_isa_select(enum mu_isa isa, struct mu_error *err)
{
    if (!cpu_has(isa))
        return mu_fail(err, MU_ERR_INVALID, "instruction set %s: this CPU does not have it", isa_names[isa]);
    atomic_store_explicit(&active, (int)isa, memory_order_relaxed);
    return MU_OK;
}

const struct mu_isa_ops *mu_isa_ops(void)
{
    return tables[mu_isa_active()];
}
