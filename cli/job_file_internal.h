/* What the two halves of the job file's reader share: job_file.c has the schema, job_file_fields.c turns the texts of
 * fields into values. */
#ifndef MU_CLI_JOB_FILE_INTERNAL_H
#define MU_CLI_JOB_FILE_INTERNAL_H

#include <stdint.h>

#include "cli/job_file.h"
#include "cli/yaml_reader.h"

/* ---- The document as libcyaml loads it: every value a string, NULL when absent. ---- */

struct model_text {
    char *family, *layers, *heads, *kv_heads, *channels, *hidden, *context, *vocab, *dropout, *rope_base;
};
struct data_text {
    char *path, *tokens, *holdout;
};
struct batch_text {
    char *sequences, *micro, *accumulate, *length;
};
struct optimizer_text {
    char *kind, *lr, *min_lr, *warmup, *eps, *weight_decay, *clip;
    char **betas;
    uint32_t betas_count;
};
struct parallel_text {
    char *tp, *pp, *dp, *slices, *optimizer_sharding, *recompute, *redundancy;
};
struct workers_text {
    char *min, *max, *spares;
};
struct checkpoint_text {
    char *path, *kind, *every, *keep, *keep_every;
};
struct eval_text {
    char *every, *sequences;
};
struct init_text {
    char *path;
};
struct job_text {
    char *job, *steps, *numerics, *compute, *data_tls, *seed;
    struct model_text *model;
    struct data_text *data;
    struct batch_text *batch;
    struct optimizer_text *optimizer;
    struct parallel_text *parallel;
    struct workers_text *workers;
    struct checkpoint_text *checkpoint;
    struct eval_text *eval;
    struct init_text *init;
};

/* The document as a record; what mu_job_spec_check says of it is not asked here. */
enum mu_status job_file_read_fields(struct mu_yaml_reader *r, const struct job_text *document,
                                    struct mu_job_spec *ret_spec);

#endif
