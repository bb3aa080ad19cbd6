/* The job record: everything that decides the bits of a job's result, plus its operational policy (workers,
 * checkpoints).
 *
 * A plain value (no pointers), the same in the coordinator, the workers, the command line and the simulator. The YAML
 * reader (cli/job_file.c) and the wire format both produce it; `mu_job_spec_check` is the one place where values are
 * judged. Pure. */
#ifndef MU_PLAN_JOB_H
#define MU_PLAN_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum {
    MU_JOB_NAME_SIZE = 64, /* with the terminating 0; [a-z0-9][a-z0-9._-]* */
    MU_PATH_SIZE = 512,    /* any path in a job record, with the terminating 0 */
    MU_SHA256_TEXT_SIZE = 65,
    MU_LAYERS_MAX = 512,
    MU_LEAVES_MAX = 65536,
    MU_SLICES_MAX = 64,
    MU_WORKERS_MAX = 65536, /* upper bound of workers.max */
    MU_HEADS_MAX = 1024,
    MU_CHANNELS_MAX = 65536,
    MU_HIDDEN_MAX = 1 << 20,
    MU_CONTEXT_MAX = 1 << 20, /* tokens */
    MU_VOCAB_MAX = 1 << 24,
    MU_HEAD_CHANNELS_MAX = 256,          /* channels / heads: what the attention kernels hold in scratch memory ... */
    MU_ATTENTION_AREA_MAX = 1 << 18,     /* ... and so for length * (channels / heads), rounded up to 64 and 16 */
    MU_MICRO_MAX = 4096,                 /* sequences in a micro-batch */
    MU_MICRO_BATCH_TOKENS_MAX = 1 << 20, /* micro * length */
    MU_ACCUMULATE_STEPS_MAX = 4096,      /* micro-batches in a leaf */
    MU_SEQUENCES_MAX = 1 << 24,          /* global batch, evaluation set */
    MU_KEEP_MAX = 100000,                /* checkpoints kept */
    MU_AMENDMENTS_MAX = 64,              /* of one job */
};
#define MU_STEPS_MAX  (1ull << 40) /* also the bound of warmup and of every `every` */
#define MU_EVERY_AUTO UINT64_MAX   /* checkpoint.every: the coordinator chooses it */

enum mu_model_family { MU_FAMILY_GPT2 = 1, MU_FAMILY_LLAMA = 2 };
enum mu_token_format { MU_TOKENS_BYTES = 1, MU_TOKENS_LLMC = 2, MU_TOKENS_MEGATRON = 3 };
enum mu_checkpoint_kind { MU_CHECKPOINT_SHARED = 1, MU_CHECKPOINT_LOCAL = 2 };
enum mu_numerics { MU_NUMERICS_EXACT = 1, MU_NUMERICS_FAST = 2 };
enum mu_compute { MU_COMPUTE_FP32 = 1, MU_COMPUTE_BF16 = 2 };
enum mu_recompute { MU_RECOMPUTE_NONE = 1, MU_RECOMPUTE_SELECTIVE = 2, MU_RECOMPUTE_FULL = 3 };
enum mu_redundancy { MU_REDUNDANCY_NONE = 1, MU_REDUNDANCY_BUDDY = 2 };

/* kv_heads, hidden (gpt2), rope_base and slices may be 0: not given. mu_model_config_resolve fills them in; the readers
 * of job files, messages and records do so, and mu_model_spec.config always has them. */
struct mu_model_config {
    enum mu_model_family family;
    uint32_t layers, heads, channels, context, vocab;
    uint32_t kv_heads; /* llama: heads of keys and values, divides heads (grouped-query attention); gpt2: = heads */
    uint32_t hidden;   /* width of the MLP; gpt2: 4 channels; llama: any */
    float dropout;     /* [0, 1); llama: 0 */
    double rope_base;  /* llama: base of the rotary angles, default 10000; gpt2: 0 */
    uint32_t slices;   /* T: sliced tensors are cut into so many parts; a power of two up to MU_SLICES_MAX */
};

/* What of a job may be amended while it runs. */
struct mu_job_terms {
    double lr, min_lr;
    uint64_t warmup, steps;
    uint64_t every, keep_every; /* of checkpoints: these three are policy and change no bit of the result */
    uint32_t keep;
};

enum mu_amend_field {
    MU_AMEND_LR = 1,
    MU_AMEND_MIN_LR = 2,
    MU_AMEND_WARMUP = 4,
    MU_AMEND_STEPS = 8,
    MU_AMEND_EVERY = 16,
    MU_AMEND_KEEP = 32,
    MU_AMEND_KEEP_EVERY = 64,
    MU_AMEND_SKIP = 128,
    MU_AMEND_ROLL_BACK = 256, /* what was done after its step is undone: see plan/amend.h */
    MU_AMEND_ALL = 511,
    MU_AMEND_POLICY = MU_AMEND_EVERY | MU_AMEND_KEEP | MU_AMEND_KEEP_EVERY, /* what workers need not know */
};

/* From the boundary at_step on, the fields that it gives hold. */
struct mu_amendment {
    uint32_t version; /* 1, 2, ...: in which they were made */
    uint32_t fields;  /* enum mu_amend_field */
    bool settled;     /* at_step is final: a generation steps by it; until then it may become later */
    uint64_t at_step;
    struct mu_job_terms terms;       /* what `fields` does not have is 0 */
    uint64_t skip_first, skip_count; /* of the order of training, these sequences are left out */
    struct {
        uint64_t checkpoint;  /* number of the one that the job went back to */
        uint64_t void_before; /* those with numbers from the next one on and below this are of what was undone */
        uint64_t from_step;   /* where the job was, for people */
    } back;
};

/* Ascending by at_step, then version. */
struct mu_amendments {
    uint32_t count;
    uint32_t newest; /* version given last */
    struct mu_amendment list[MU_AMENDMENTS_MAX];
};

struct mu_job_spec {
    char name[MU_JOB_NAME_SIZE];
    struct mu_model_config model;
    struct {
        char path[MU_PATH_SIZE]; /* absolute; a glob when tokens are not bytes */
        enum mu_token_format tokens;
        double holdout; /* [0, 0.5]: last part of the data, used for evaluation only */
    } data;
    struct {
        uint32_t sequences;  /* global batch B, sequences a step */
        uint32_t micro;      /* sequences in one micro-batch */
        uint32_t accumulate; /* micro-batches in one leaf; leaves M = sequences / (micro * accumulate) */
        uint32_t length;     /* tokens in a sequence, <= model.context */
    } batch;
    uint64_t steps;
    struct {
        double lr, min_lr;
        uint64_t warmup; /* steps of linear warm-up, then cosine from lr to min_lr at `steps` */
        double beta1, beta2, eps, weight_decay;
        double clip; /* largest global gradient norm; 0 = no clipping */
    } optimizer;
    struct {
        uint32_t tp, pp, dp; /* 0: auto */
        bool optimizer_sharding;
        enum mu_recompute recompute;
        enum mu_redundancy redundancy;
    } parallel;
    struct mu_worker_policy {
        uint32_t min, max, spares;
    } workers;
    struct {
        char path[MU_PATH_SIZE]; /* absolute directory; empty = no checkpoints */
        enum mu_checkpoint_kind kind;
        uint64_t every;      /* steps between checkpoints; 0 = only on request and at the end; MU_EVERY_AUTO */
        uint32_t keep;       /* newest N are kept (>= 1) */
        uint64_t keep_every; /* also keep those whose step is a multiple; 0 = none */
    } checkpoint;
    struct {
        uint64_t every;     /* steps between evaluations; 0 = none */
        uint32_t sequences; /* held-out sequences used, the first ones in data order; rounded up to whole evaluation
                               leaves */
    } eval;
    enum mu_numerics numerics;
    enum mu_compute compute; /* type of the operands of matrix products and attention; all else is fp32 */
    bool data_tls; /* what workers of different hosts send to each other is encrypted; NCCL is not used then */
    uint64_t seed;
    struct {
        char path[MU_PATH_SIZE]; /* absolute directory of the checkpoint whose parameters the job starts with, moments
                                    zero; empty = random ones */
        char sha256[MU_SHA256_TEXT_SIZE]; /* of its manifest.json, in lower-case hexadecimal; empty when path is */
    } init;
    struct mu_amendments amendments; /* all other fields stay as they were submitted: see plan/amend.h */
};

/* Fills in what is 0: slices 1, kv_heads = heads, hidden = 4 channels (gpt2), rope_base 10000 (llama). */
void mu_model_config_resolve(struct mu_model_config *config);

/* All defaults; name, model, data.path, batch.sequences, batch.micro, batch.length (the YAML reader sets it to
 * model.context when absent) and steps stay empty (the caller must give them). Defaults: dropout 0, tokens bytes,
 * holdout 0, accumulate 1; slices 1, degrees auto, no optimizer sharding, no recomputation, no redundancy; lr 6e-4,
 * min_lr 6e-5, warmup 0, betas 0.9 and 0.95, eps 1e-8, weight_decay 0.1, clip 1; workers 1 to MU_WORKERS_MAX, no
 * spares; no checkpoint path, kind shared, every 0, keep 5, keep_every 0; eval off; numerics exact; compute fp32; no
 * encryption; seed 1337; random initial values. */
void mu_job_spec_init(struct mu_job_spec *spec);

/* Judges every field and their combinations. On error: one line "field.name: value N is not allowed: <what is>; <what
 * to do>". Every spec that entered the process from outside (YAML, wire, disk) passes here before anything else uses
 * it. */
enum mu_status mu_job_spec_check(const struct mu_job_spec *spec, struct mu_error *err) MU_WARN_UNUSED;

/* "fp32", "bf16". */
const char *mu_compute_name(enum mu_compute compute);

/* Leaves of a step: sequences / (micro * accumulate). The spec must have passed the check. */
uint32_t mu_job_leaves(const struct mu_job_spec *spec);

/* The terms at the boundary `step`: those of the spec, and on them the amendments up to there, in their order. */
struct mu_job_terms mu_job_terms(const struct mu_job_spec *spec, uint64_t step);

/* The boundary at which the job ends: the first one at which it has as many steps as it is to have. */
uint64_t mu_job_end(const struct mu_job_spec *spec);

/* The position in the order of training of the n-th sequence that is trained on: n, and what is skipped before it. */
uint64_t mu_job_position(const struct mu_job_spec *spec, uint64_t n);

/* Learning rate of the update that makes step `step` + 1 (0-based), by the terms at `step` as if they had always held:
 * linear warm-up lr * (step + 1) / warmup, then min_lr + (lr - min_lr) * (1 + cos(pi * t)) / 2 with t = (step - warmup)
 * / (steps - warmup); min_lr from `steps` on (Loshchilov and Hutter, arXiv 1608.03983, one cycle). Uses the portable
 * cosine. */
double mu_job_learning_rate(const struct mu_job_spec *spec, uint64_t step);

/* The identity of the numeric part (model, data without its path, batch, steps, optimizer, eval, numerics, compute,
 * seed, what it starts from without its path), as it was submitted: XXH3-64 of a canonical text. Two specs that differ
 * only in name, paths, workers or checkpoint policy have the same hash. */
uint64_t mu_job_spec_hash(const struct mu_job_spec *spec);

#endif
