/* links: mu_model mu_plan mu_kernels */
#include "plan/memory.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/pool.h"
#include "worker/engine.h"
#include "worker/model.h"

_Static_assert(MU_MEMORY_EAGER_BYTES == (unsigned long long)MU_ENGINE_EAGER_BYTES, "the model follows the engine");
_Static_assert(MU_MEMORY_STAGING_BYTES == (unsigned long long)MU_ENGINE_STAGING_BYTES, "the model follows the engine");
_Static_assert(MU_MEMORY_SCRATCH_BYTES == (unsigned long long)MU_LANE_SCRATCH_BYTES, "the model follows the pool");

static struct mu_job_spec job(uint32_t layers, uint32_t heads, uint32_t channels, uint32_t length, uint32_t vocab,
                              uint32_t micro, uint32_t accumulate, uint32_t leaves, float dropout)
{
    struct mu_job_spec s;
    mu_job_spec_init(&s);
    strcpy(s.name, "a");
    strcpy(s.data.path, "/a");
    s.data.tokens = vocab < 256 ? MU_TOKENS_LLMC : MU_TOKENS_BYTES;
    s.model = (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                       .layers = layers,
                                       .heads = heads,
                                       .channels = channels,
                                       .context = length + 1,
                                       .vocab = vocab,
                                       .dropout = dropout};
    s.batch.micro = micro;
    s.batch.accumulate = accumulate;
    s.batch.length = length;
    s.batch.sequences = leaves * micro * accumulate;
    s.steps = 1;
    struct mu_error err = {0};
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    return s;
}

static void test_memory_activations_are_what_the_model_allocates(void **state)
{
    (void)state;
    const struct mu_job_spec jobs[] = {
        job(12, 12, 768, 256, 50257, 4, 1, 8, 0), job(12, 12, 768, 1024, 50257, 1, 2, 8, 0),
        job(4, 4, 128, 128, 256, 4, 1, 8, 0.1f),  job(6, 6, 384, 256, 256, 2, 2, 8, 0),
        job(2, 2, 64, 64, 300, 8, 16, 4, 0.2f),   job(24, 16, 1024, 512, 50304, 8, 1, 64, 0),
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++) {
        struct mu_model_spec model;
        mu_model_spec_init(&model, &jobs[i].model);
        const struct mu_model_options options = {
            .micro = jobs[i].batch.micro, .length = jobs[i].batch.length, .accumulate = jobs[i].batch.accumulate};
        double real = (double)mu_model_workspace_bytes(&model, &options),
               own = (double)mu_memory_activation_bytes(&jobs[i]);
        print_message("job %zu: %.1f MiB allocated, model says %.1f\n", i, real / 0x1p20, own / 0x1p20);
        /* The difference is rounding of each buffer up to 256 bytes. */
        assert_true(own <= real && own > real * 0.99 - 65536);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_activations_are_what_the_model_allocates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
