#include "plan/pipeline.h"

#include "common/status.h"

static uint32_t warm_up(uint32_t stages, uint32_t stage, uint32_t micros)
{
    MU_ASSERT(stage < stages && micros > 0);
    uint32_t behind = stages - stage - 1;
    return behind < micros ? behind : micros;
}

uint32_t mu_pipeline_slots(uint32_t stages, uint32_t stage, uint32_t micros)
{
    uint32_t warm = warm_up(stages, stage, micros);
    return warm < micros ? warm + 1 : micros;
}

struct mu_pipeline_op mu_pipeline_op_at(uint32_t stages, uint32_t stage, uint32_t micros, uint32_t index)
{
    uint32_t warm = warm_up(stages, stage, micros);
    MU_ASSERT(index / 2 < micros);
    if (index < warm)
        return (struct mu_pipeline_op){.micro = index};
    uint32_t pairs = micros - warm, steady = index - warm;
    if (steady >= 2 * pairs)
        return (struct mu_pipeline_op){.backward = true, .micro = index - micros};
    return (struct mu_pipeline_op){.backward = steady % 2, .micro = steady % 2 ? steady / 2 : warm + steady / 2};
}
