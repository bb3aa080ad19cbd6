/* Numbers of the exchanges of one generation: sequence | kind | index. The data plane matches messages by peer and
 * number, so no number may be used twice; what moves state while a generation is prepared has numbers of its own
 * (MU_TRANSFER_EXCHANGES). */
#ifndef MU_WORKER_EXCHANGE_H
#define MU_WORKER_EXCHANGE_H

#include <stdint.h>

#include "common/status.h"

enum exchange_kind {
    EXCHANGE_MEET = 0, /* ids of NCCL's communicators: index = up or down the tree; once in a generation */
    EXCHANGE_UP = 1,   /* gradients: sequence = step of the generation, index = segment and root */
    EXCHANGE_DOWN,
    EXCHANGE_VOTE_UP, /* small reductions: sequence = step of the generation */
    EXCHANGE_VOTE_DOWN,
    EXCHANGE_EVAL_UP,
    EXCHANGE_EVAL_DOWN,
    EXCHANGE_END_UP,
    EXCHANGE_END_DOWN,
    EXCHANGE_GATHER,     /* updated parameters: sequence = step of the generation, index = segment */
    EXCHANGE_TENSOR,     /* blocks between the ranks of a tensor group: counted */
    EXCHANGE_ACTIVATION, /* from stage to stage: counted */
    EXCHANGE_GRADIENT,
    EXCHANGE_TIED_GRADIENT, /* head chain of the embedding, last stage to first: counted, one for each leaf */
    EXCHANGE_TIED_COPY,     /* parameters of the embedding, first stage to last: counted */
    EXCHANGE_DIGEST,        /* state of the weights' SHA-256 as it goes from rank to rank: index = place in the chain */
};

enum { EXCHANGE_INDEX_BITS = 27, EXCHANGE_KIND_BITS = 4, EXCHANGE_SEQUENCE_BITS = 32 };

static inline uint64_t exchange_number(uint64_t sequence, enum exchange_kind kind, uint64_t index)
{
    MU_ASSERT(sequence < 1ull << EXCHANGE_SEQUENCE_BITS && index < 1ull << EXCHANGE_INDEX_BITS);
    return sequence << (EXCHANGE_INDEX_BITS + EXCHANGE_KIND_BITS) | (uint64_t)kind << EXCHANGE_INDEX_BITS | index;
}

/* The `count`-th exchange of its kind since the generation began. */
static inline uint64_t exchange_counted(enum exchange_kind kind, uint64_t count)
{
    return exchange_number(count >> EXCHANGE_INDEX_BITS, kind, count & ((1ull << EXCHANGE_INDEX_BITS) - 1));
}

#endif
