/* The index beside the tokens of a Megatron-LM data set: NAME.idx of NAME.bin
 * (megatron/core/datasets/indexed_dataset.py).
 *
 *   "MMIDIDX\0\0" | u64 version 1 | u8 type of a token | u64 sequences S | u64 document boundaries D
 *   | S x i32 tokens in each sequence | S x i64 byte where each begins in NAME.bin | D x i64
 *
 * It is read once and judged: the sequences must follow each other without a gap from the first to the last byte of
 * NAME.bin, so that the tokens are one sequence. Document boundaries are not used. Internal to worker/data.c. */
#ifndef MU_WORKER_DATA_MEGATRON_H
#define MU_WORKER_DATA_MEGATRON_H

#include <stdint.h>

#include "common/status.h"

/* *ret_width: bytes of a stored token, 2 or 4; *ret_count: tokens. */
enum mu_status mu_data_megatron_index(const char *bin_name, uint64_t bin_bytes, uint32_t *ret_width,
                                      uint64_t *ret_count, struct mu_error *err) MU_WARN_UNUSED;

#endif
