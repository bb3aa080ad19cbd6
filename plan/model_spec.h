/* The tensors of a model and where they live: cells and chunks.
 *
 * State is a flat space of fp32 elements, one for parameters and one each for the moments. It is cut into **cells**
 * (layer, slice), one contiguous buffer each, plus one `shared` cell per layer for what is never sliced; a cell is cut
 * into **chunks** of MU_CHUNK_ELEMENTS, the unit of ownership. Cells start at multiples of MU_CELL_ALIGN elements in
 * the flat space; the gap between cells is zero and belongs to nobody. Nothing here depends on workers. Pure: tensors
 * and cells are computed from the index, in constant time.
 *
 * With T = config.slices > 1 each sliced tensor is T tensors, one a slice: the query, key and value columns of the
 * slice's heads, its rows of the attention projection, its part of the MLP, its rows of the vocabulary. The flat order
 * of cells: E.0 ... E.(T-1), E.shared (GPT-2: positions), for each layer L<i>.0 ... L<i>.(T-1), L<i>.shared, then
 * F.0 ... F.(T-1) (Llama: the untied head), F.shared (final norm). */
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
    MU_TENSOR_PARTS_MAX = 3, /* q, k, v */
};

enum mu_init_kind { MU_INIT_ZERO, MU_INIT_ONE, MU_INIT_NORMAL };

/* What a tensor is for. The order is that of the tensors of a layer, and of tensors inside a cell. */
enum mu_role {
    MU_ROLE_WTE, /* [V, C] */
    MU_ROLE_WPE, /* [context, C]; gpt2 */
    MU_ROLE_NORM1_W,
    MU_ROLE_NORM1_B, /* biases: gpt2 */
    MU_ROLE_QKV_W,   /* [C, (heads + 2 kv_heads) head_channels]: q | k | v */
    MU_ROLE_QKV_B,
    MU_ROLE_PROJ_W, /* [C, C] */
    MU_ROLE_PROJ_B,
    MU_ROLE_NORM2_W,
    MU_ROLE_NORM2_B,
    MU_ROLE_UP_W, /* gpt2: [C, hidden]; llama: [C, 2 hidden], gate | up */
    MU_ROLE_UP_B,
    MU_ROLE_DOWN_W, /* [hidden, C] */
    MU_ROLE_DOWN_B,
    MU_ROLE_NORMF_W,
    MU_ROLE_NORMF_B,
    MU_ROLE_HEAD_W, /* [V, C]; llama: gpt2's head is wte */
    MU_ROLE_COUNT
};

/* Kinds of cells, in flat order; those of layers come once per layer. */
enum mu_cell_kind { MU_CELL_E, MU_CELL_E_SHARED, MU_CELL_L, MU_CELL_L_SHARED, MU_CELL_F, MU_CELL_F_SHARED };
enum { MU_CELL_KINDS = MU_CELL_F_SHARED + 1 };

/* Weight matrices are stored input x output, as in Hugging Face's GPT-2 (Llama's are the transposes of those there);
 * wte, wpe and the head are [entries, C]. Names are Hugging Face's (Llama: with q, k, v and gate, up fused, as in
 * "qkv_proj", "gate_up_proj"); with T > 1 those of sliced tensors end in "#<slice>". */
struct mu_tensor {
    char name[MU_TENSOR_NAME_SIZE]; /* e.g. "transformer.h.3.attn.c_attn.weight" */
    enum mu_role role;
    uint32_t layer, slice;
    uint32_t cell;          /* index of its cell */
    uint64_t offset;        /* elements from the start of the flat space */
    uint64_t rows, columns; /* columns = 1 for a vector stored as [rows] */
    uint64_t size;          /* rows * columns, elements */
    bool decay;             /* weight decay applies (matrices yes; biases, norms no) */
    enum mu_init_kind init;
    double init_std;
    /* The logical tensor, and where this one lies in it: along `axis` (0 rows, 1 columns) its `parts` follow each
     * other; part i is [part_first[i], part_first[i] + part_size[i]) of the logical axis. The other axis is whole. */
    uint64_t full_rows, full_columns;
    uint32_t axis, parts;
    uint64_t part_first[MU_TENSOR_PARTS_MAX], part_size[MU_TENSOR_PARTS_MAX];
};

struct mu_cell {
    char name[32]; /* "E.0", "E.shared", "L3.0", "L3.shared", "F.0", "F.shared" */
    enum mu_cell_kind kind;
    uint32_t layer, slice;
    uint64_t offset;                   /* elements from the start of the flat space, a multiple of MU_CELL_ALIGN */
    uint64_t size;                     /* elements */
    uint32_t first_chunk, chunk_count; /* job-wide chunk numbers */
};

/* All cells of one kind (of one layer): `count` of them, of `size` elements, the last one of `last_size`. */
struct mu_cell_extent {
    uint32_t count; /* 0, 1 or T */
    uint64_t size, last_size;
};

/* What lies before a cell. */
struct mu_cell_place {
    uint32_t cells, chunks;
    uint64_t flat, elements;
};

struct mu_model_spec {
    struct mu_model_config config; /* resolved: nothing left at 0 that has a default */
    uint32_t tensor_count, cell_count, chunk_count;
    uint64_t parameter_count; /* elements that are real parameters */
    uint64_t flat_size;       /* elements of the flat space, with the gaps; a multiple of MU_CELL_ALIGN */
    struct mu_cell_extent extents[MU_CELL_KINDS];
    struct mu_cell_place starts[MU_CELL_KINDS + 1]; /* of each kind, in layer 0; then of the end */
    struct mu_cell_place layer;                     /* what a layer takes */
};

/* `config` must have passed mu_job_spec_check. */
void mu_model_spec_init(struct mu_model_spec *spec, const struct mu_model_config *config);
struct mu_tensor mu_model_tensor(const struct mu_model_spec *spec, uint32_t index);
struct mu_cell mu_model_cell(const struct mu_model_spec *spec, uint32_t index);

bool mu_model_has(const struct mu_model_config *config, enum mu_role role);
bool mu_model_is_sliced(enum mu_role role);
/* The head is the embedding table itself (gpt2). */
bool mu_model_is_tied(const struct mu_model_config *config);
/* A tensor by what it is for: layer 0 for roles outside layers, slice 0 for those that are not sliced. The model must
 * have the role. */
struct mu_tensor mu_model_role(const struct mu_model_spec *spec, uint32_t layer, uint32_t slice, enum mu_role role);
/* Rows of the vocabulary in a slice (the last one: fewer): ceil(vocab / T). */
uint32_t mu_model_vocab_slice_rows(const struct mu_model_config *config);
/* Where element (row, column) of a tensor lies in its logical tensor, row by row. */
uint64_t mu_tensor_full_index(const struct mu_tensor *tensor, uint64_t row, uint64_t column);

/* A cell by what it holds: layer 0 for E and F, slice 0 for shared ones. The model must have it. */
uint32_t mu_model_cell_index(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer, uint32_t slice);
/* Number of the first chunk of such a cell; slice = the number of slices gives the end of the last one. Kinds that the
 * model lacks have a place too: empty. */
uint32_t mu_model_first_chunk(const struct mu_model_spec *spec, enum mu_cell_kind kind, uint32_t layer, uint32_t slice);

struct mu_chunk {
    uint32_t cell;
    uint64_t offset; /* elements from the start of the flat space */
    uint64_t size;   /* elements, <= MU_CHUNK_ELEMENTS */
};
struct mu_chunk mu_model_chunk(const struct mu_model_spec *spec, uint32_t chunk);
/* Elements of chunks [0, chunk), gaps not counted; chunk <= chunk_count. */
uint64_t mu_model_elements_before(const struct mu_model_spec *spec, uint32_t chunk);

/* Contiguous chunks owned by `rank` of `world`: [*ret_first, *ret_first + *ret_count). Balanced by chunk count: the
 * first (chunk_count mod world) ranks own one more. Ranks beyond the number of chunks own none. */
void mu_model_owned_chunks(const struct mu_model_spec *spec, uint32_t world, uint32_t rank, uint32_t *ret_first,
                           uint32_t *ret_count);

/* FLOPs of forward and backward per token: 6 N + 12 L C T (PaLM, arXiv 2204.02311, appendix B). N leaves out an
 * embedding table that is only looked up (untied). */
double mu_model_flops_per_token(const struct mu_model_spec *spec, uint32_t length);

#endif
