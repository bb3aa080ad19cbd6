/* links: mu_model mu_plan mu_kernels */
#include "plan/memory.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/pool.h"
#include "plan/pipeline.h"
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

static struct mu_job_spec sliced(enum mu_model_family family, uint32_t slices, enum mu_recompute recompute)
{
    struct mu_job_spec s = job(6, 8, 256, 128, 1003, 4, 2, 8, 0);
    if (family == MU_FAMILY_LLAMA) {
        s.model.family = family;
        s.model.kv_heads = 4;
        s.model.hidden = 704;
    } else {
        s.model.dropout = 0.1f;
    }
    s.model.slices = slices;
    s.parallel.recompute = recompute;
    struct mu_error err = {0};
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    return s;
}

/* Any stage, any tensor degree, both families, all kinds of recomputation. */
static void test_memory_activations_follow_the_layout_as_the_model_does(void **state)
{
    (void)state;
    const struct mu_layout layouts[] = {
        {.tp = 1, .pp = 1, .dp = 1, .stage_first = {0, 6}},
        {.tp = 2, .pp = 1, .dp = 1, .stage_first = {0, 6}},
        {.tp = 4, .pp = 3, .dp = 1, .stage_first = {0, 1, 4, 6}},
        {.tp = 1, .pp = 3, .dp = 2, .stage_first = {0, 2, 5, 6}},
    };
    for (int family = MU_FAMILY_GPT2; family <= MU_FAMILY_LLAMA; family++)
        for (int recompute = MU_RECOMPUTE_NONE; recompute <= MU_RECOMPUTE_FULL; recompute++)
            for (size_t l = 0; l < sizeof layouts / sizeof layouts[0]; l++) {
                const struct mu_layout *layout = &layouts[l];
                struct mu_job_spec s = sliced(family, 4, recompute);
                struct mu_model_spec model;
                mu_model_spec_init(&model, &s.model);
                const struct mu_tensor_group group = {.size = layout->tp};
                for (uint32_t stage = 0; stage < layout->pp; stage++) {
                    const struct mu_model_options options = {
                        .micro = s.batch.micro,
                        .length = s.batch.length,
                        .accumulate = s.batch.accumulate,
                        .recompute = s.parallel.recompute,
                        .slots = mu_pipeline_slots(layout->pp, stage, 16),
                        .part = {.first_layer = layout->stage_first[stage],
                                 .layer_count = layout->stage_first[stage + 1] - layout->stage_first[stage],
                                 .embedding = stage == 0,
                                 .head = stage + 1 == layout->pp,
                                 .slice_count = 4 / layout->tp},
                        .tensor = layout->tp > 1 ? &group : NULL};
                    double real = (double)mu_model_workspace_bytes(&model, &options);
                    double own = (double)mu_memory_stage_activation_bytes(&s, layout, stage, 16);
                    if (!(own <= real && own > real * 0.99 - 65536))
                        fail_msg("family %d, recompute %d, layout %zu, stage %u: %.0f bytes allocated, model says %.0f",
                                 family, recompute, l, stage, real, own);
                }
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_activations_are_what_the_model_allocates),
        cmocka_unit_test(test_memory_activations_follow_the_layout_as_the_model_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
