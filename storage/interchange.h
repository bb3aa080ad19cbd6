/* Models to and from other programs: Hugging Face directories (config.json and safetensors) and llm.c's model files.
 *
 * An import makes a checkpoint directory of its own: step 0, moments zero, a valid job record of which only the model
 * says something. An export takes the parameters of any checkpoint. Both convert exactly: what other
 * programs store in 16 bits is widened, nothing is rounded. Llama: q, k, v and gate, up are fused here and apart there,
 * and matrices are transposed; the rotary convention is the same. Files may be hostile: every error is one line, and
 * nothing is left in the place of the result. Memory: about twice the parameters. No threads. */
#ifndef MU_STORAGE_INTERCHANGE_H
#define MU_STORAGE_INTERCHANGE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"
#include "plan/job.h"

enum mu_interchange_format {
    MU_INTERCHANGE_HF_GPT2,  /* directory: config.json, model.safetensors or shards with model.safetensors.index.json */
    MU_INTERCHANGE_HF_LLAMA, /* the same */
    MU_INTERCHANGE_LLMC,     /* one file: 20240326, version 3 (fp32) or, for reading, 5 (bf16) */
    MU_INTERCHANGE_COUNT
};
/* "hf-gpt2", "hf-llama", "llm.c"; MU_INTERCHANGE_COUNT: another name. */
enum mu_interchange_format mu_interchange_format_named(const char *name);

/* Writes the parameters of a checkpoint, all of it verified, as fp32. `out` is made: a directory for Hugging Face,
 * which must be empty or not there, a file for llm.c. */
enum mu_status mu_interchange_export(const char *checkpoint_dir, enum mu_interchange_format format, const char *out,
                                     struct mu_error *err) MU_WARN_UNUSED;

struct mu_interchange_model {
    struct mu_model_config config;
    uint64_t parameter_count;
};
/* Makes the checkpoint directory `out`, which must be empty or not there, cut into `slices` (parallel.slices of the job
 * that will start from it). ret_model may be NULL. */
enum mu_status mu_interchange_import(const char *from, enum mu_interchange_format format, uint32_t slices,
                                     const char *out, struct mu_interchange_model *ret_model,
                                     struct mu_error *err) MU_WARN_UNUSED;

#endif
