/* The tensors of a model and where they live: cells and chunks.
 *
 * State is a flat space of fp32 elements, one for parameters and one each for the moments. It is cut into **cells**
 * (layer, slice), one contiguous buffer each, plus one `shared` cell per layer for what is never sliced; a cell is cut
 * into **chunks** of MU_CHUNK_ELEMENTS, the unit of ownership. Cells start at multiples of MU_CELL_ALIGN elements in
 * the flat space; the gap between cells is zero and belongs to nobody. Nothing here depends on workers. Pure: tensors
 * and cells are computed from the index. */
#ifndef MU_PLAN_MODEL_SPEC_H
#define MU_PLAN_MODEL_SPEC_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/job.h"

enum {
    MU_CHUNK_ELEMENTS = 65536, /* 256 KiB of fp32 */
    MU_CELL_ALIGN = 64,        /* elements: 256 bytes */
    MU_NORM_BLOCK = 4096,      /* elements in one block of the gradient norm; divides MU_CHUNK_ELEMENTS */
    MU_TENSOR_NAME_SIZE = 64,
};

enum mu_init_kind { MU_INIT_ZERO, MU_INIT_ONE, MU_INIT_NORMAL };

struct mu_tensor {
    char name[MU_TENSOR_NAME_SIZE]; /* Hugging Face name, e.g. "transformer.h.3.attn.c_attn.weight" */
    uint32_t cell;                  /* index of its cell */
    uint64_t offset;                /* elements from the start of the flat space */
    uint64_t rows, columns;         /* columns = 1 for a vector stored as [rows] */
    uint64_t size;                  /* rows * columns, elements */
    bool decay;                     /* weight decay applies (matrices yes; biases, norms no) */
    enum mu_init_kind init;
    double init_std;
};

struct mu_cell {
    char name[32];                     /* "E.0", "E.shared", "L3.0", "L3.shared", "F.shared" */
    uint64_t offset;                   /* elements from the start of the flat space, a multiple of MU_CELL_ALIGN */
    uint64_t size;                     /* elements */
    uint32_t first_chunk, chunk_count; /* job-wide chunk numbers */
};

/* Tensors of GPT-2, in index order; `mu_gpt2_tensor` finds one by layer and role. */
enum mu_gpt2_role {
    MU_GPT2_WTE,
    MU_GPT2_WPE, /* layer 0 only */
    MU_GPT2_LN1_W,
    MU_GPT2_LN1_B,
    MU_GPT2_QKV_W,
    MU_GPT2_QKV_B,
    MU_GPT2_PROJ_W,
    MU_GPT2_PROJ_B,
    MU_GPT2_LN2_W,
    MU_GPT2_LN2_B,
    MU_GPT2_FC_W,
    MU_GPT2_FC_B,
    MU_GPT2_FCPROJ_W,
    MU_GPT2_FCPROJ_B,
    MU_GPT2_LNF_W,
    MU_GPT2_LNF_B, /* layer 0 only */
};

/* GPT-2's cells, in order: E.0 (wte), E.shared (wpe), then for each layer L<i>.0 (the matrices and the column-parallel
 * biases) and L<i>.shared (norms, row-parallel biases), then F.shared (final norm). Tensors lie packed in their cell,
 * in index order. */
struct mu_model_spec {
    struct mu_model_config config;
    uint32_t tensor_count, cell_count, chunk_count;
    uint64_t parameter_count; /* elements that are real parameters */
    uint64_t flat_size;       /* elements of the flat space, with the gaps; a multiple of MU_CELL_ALIGN */
};

/* `config` must have passed mu_job_spec_check. */
void mu_model_spec_init(struct mu_model_spec *spec, const struct mu_model_config *config);
struct mu_tensor mu_model_tensor(const struct mu_model_spec *spec, uint32_t index);
struct mu_cell mu_model_cell(const struct mu_model_spec *spec, uint32_t index);
struct mu_tensor mu_gpt2_tensor(const struct mu_model_spec *spec, uint32_t layer, enum mu_gpt2_role role);

/* Weight matrices are stored as in Hugging Face's GPT-2: input x output ([C,3C], [C,C], [C,4C], [4C,C]), wte [V,C], wpe
 * [T,C]. */

struct mu_chunk {
    uint32_t cell;
    uint64_t offset; /* elements from the start of the flat space */
    uint64_t size;   /* elements, <= MU_CHUNK_ELEMENTS */
};
struct mu_chunk mu_model_chunk(const struct mu_model_spec *spec, uint32_t chunk);

/* Contiguous chunks owned by `rank` of `world`: [*ret_first, *ret_first + *ret_count). Balanced by chunk count: the
 * first (chunk_count mod world) ranks own one more. Ranks beyond the number of chunks own none. */
void mu_model_owned_chunks(const struct mu_model_spec *spec, uint32_t world, uint32_t rank, uint32_t *ret_first,
                           uint32_t *ret_count);

/* Bytes a worker needs for parameters, two moments, the reduced gradient and `leaf_buffers` gradient buffers of leaves
 * (fp32, replicated optimizer): 4 (4 + leaf_buffers) flat_size. See mu_tree_buffers for how many a leaf range needs,
 * plan/memory.h for the whole worker. */
uint64_t mu_model_state_bytes(const struct mu_model_spec *spec, uint32_t leaf_buffers);
/* FLOPs of forward and backward per token: 6 N + 12 L C T (PaLM, arXiv 2204.02311, appendix B). */
double mu_model_flops_per_token(const struct mu_model_spec *spec, uint32_t length);

#endif
