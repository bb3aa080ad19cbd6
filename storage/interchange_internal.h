/* Shared by interchange.c (checkpoints), interchange_hf.c and interchange_llmc.c (the other programs' files). */
#ifndef MU_STORAGE_INTERCHANGE_INTERNAL_H
#define MU_STORAGE_INTERCHANGE_INTERNAL_H

#include "plan/model_spec.h"
#include "storage/interchange.h"

/* All parameters in the flat space of a model. */
struct interchange_model {
    struct mu_model_spec spec;
    float *parameters;
};

/* The model that a foreign file describes: judged like that of a job, then its flat space, zeroed. `what` names the
 * file in errors. */
enum mu_status interchange_model_new(struct interchange_model *model, const struct mu_model_config *config,
                                     const char *what, struct mu_error *err) MU_WARN_UNUSED;

static inline bool interchange_is_layered(enum mu_role role)
{
    return role >= MU_ROLE_NORM1_W && role <= MU_ROLE_DOWN_B;
}

/* How often a role comes: once per layer, or once. */
static inline uint32_t interchange_layers(const struct mu_model_config *config, enum mu_role role)
{
    return interchange_is_layered(role) ? config->layers : 1;
}

/* One tensor of another program: columns [first, first + columns) of the logical tensor of a role, [rows, columns] or,
 * transposed, [columns, rows]. A vector is [rows, 1]. */
struct interchange_part {
    enum mu_role role;
    uint32_t layer;
    uint64_t rows, first, columns;
    bool is_transposed;
};
static inline uint64_t interchange_part_elements(const struct interchange_part *part)
{
    return part->rows * part->columns;
}
/* Copies between the slices in the flat space and the foreign tensor. */
void interchange_put(struct interchange_model *model, const struct interchange_part *part, const float *foreign);
void interchange_get(const struct interchange_model *model, const struct interchange_part *part, float *foreign);

/* bf16 and fp16 to fp32, exactly. */
void interchange_widen_bf16(const uint16_t *from, uint64_t count, float *to);
void interchange_widen_f16(const uint16_t *from, uint64_t count, float *to);

/* Read: the config is found, model made (interchange_model_new), all parameters filled. Write: `out` is made. */
enum mu_status interchange_hf_read(const char *dir, enum mu_model_family family, uint32_t slices,
                                   struct interchange_model *model, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status interchange_hf_write(const struct interchange_model *model, const char *dir,
                                    struct mu_error *err) MU_WARN_UNUSED;
enum mu_status interchange_llmc_read(const char *path, uint32_t slices, struct interchange_model *model,
                                     struct mu_error *err) MU_WARN_UNUSED;
enum mu_status interchange_llmc_write(const struct interchange_model *model, const char *path,
                                      struct mu_error *err) MU_WARN_UNUSED;

#endif
