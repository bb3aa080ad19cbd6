#include <inttypes.h>
#include <string.h>

#include "storage/job_json.h"
#include "storage/manifest.h"

static enum mu_status differs(const char *field, uint64_t value, uint64_t allowed, struct mu_error *err)
{
    return mu_fail(err, MU_ERR_INVALID,
                   "%s: value %" PRIu64 " is not allowed: %" PRIu64
                   ", as the checkpoint of init.path has it; use that, or "
                   "another checkpoint",
                   field, value, allowed);
}

static const char *family_name(enum mu_model_family family)
{
    return family == MU_FAMILY_LLAMA ? "llama" : "gpt2";
}

static enum mu_status compare(const struct mu_model_config *model, const struct mu_model_config *theirs,
                              struct mu_error *err)
{
    const struct {
        const char *field;
        uint32_t value, allowed;
    } numbers[] = {
        {"model.layers", model->layers, theirs->layers},       {"model.heads", model->heads, theirs->heads},
        {"model.kv_heads", model->kv_heads, theirs->kv_heads}, {"model.channels", model->channels, theirs->channels},
        {"model.hidden", model->hidden, theirs->hidden},       {"model.vocab", model->vocab, theirs->vocab},
    };
    if (model->family != theirs->family)
        return mu_fail(err, MU_ERR_INVALID,
                       "model.family: value %s is not allowed: %s, as the checkpoint of init.path has it; use that, or "
                       "another checkpoint",
                       family_name(model->family), family_name(theirs->family));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].value != numbers[i].allowed)
            return differs(numbers[i].field, numbers[i].value, numbers[i].allowed, err);
    if (model->family == MU_FAMILY_GPT2 && model->context != theirs->context) /* has a parameter for each position */
        return differs("model.context", model->context, theirs->context, err);
    if (model->rope_base != theirs->rope_base)
        return mu_fail(
            err, MU_ERR_INVALID,
            "model.rope_base: value %.10g is not allowed: %.10g, as the checkpoint of init.path has it; use that, "
            "or another checkpoint",
            model->rope_base, theirs->rope_base);
    if (model->slices != theirs->slices)
        return mu_fail(err, MU_ERR_INVALID,
                       "parallel.slices: value %" PRIu32 " is not allowed: %" PRIu32
                       ", as the checkpoint of init.path is cut; use that, or import with --slices %" PRIu32,
                       model->slices, theirs->slices, model->slices);
    return MU_OK;
}

enum mu_status mu_manifest_check_model(const struct mu_manifest *manifest, const struct mu_model_config *given,
                                       const char *dir, struct mu_error *err)
{
    struct mu_job_spec spec;
    struct mu_model_config model = *given;
    enum mu_status status = mu_job_spec_from_text(manifest->job_record, strlen(manifest->job_record), dir, &spec, err);
    mu_model_config_resolve(&model);
    return status == MU_OK ? compare(&model, &spec.model, err) : status;
}
