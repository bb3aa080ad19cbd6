#include "worker/core/judge.h"

enum mu_status take_amendments(struct mu_job_spec *spec, const struct mu_amendments *amendments, struct mu_error *err)
{
    const struct mu_amendments before = spec->amendments, none = {0};
    spec->amendments = amendments ? *amendments : none;
    enum mu_status status = mu_job_spec_check(spec, err);
    if (status)
        spec->amendments = before;
    return status;
}

enum mu_status judge_assign(struct mu_job_spec *spec, uint32_t chunk_count, const struct mu_assign *assign,
                            struct mu_error *err)
{
    enum mu_status status = mu_layout_check(&assign->layout, spec, err);
    if (status == MU_OK)
        status = take_amendments(spec, assign->amendments, err);
    for (uint32_t i = 0; i < assign->move_count && status == MU_OK; i++) {
        const struct mu_chunk_run *run = &assign->moves[i].run;
        if (run->count == 0 || run->first >= chunk_count || run->count > chunk_count - run->first)
            status = mu_fail(err, MU_ERR_INVALID, "a move of chunks %u to %u: the model has %u", run->first,
                             run->first + run->count, chunk_count);
    }
    return status;
}
