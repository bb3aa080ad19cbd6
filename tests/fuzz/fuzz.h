/* What fuzz targets share. A target is one function over any bytes: it returns, or the process dies (an assert, a
 * sanitizer). It is linked with libFuzzer (MU_FUZZ), or with replay.c, which runs the seeds.
 *
 * Inputs of more than one part are cut by lengths within them, so that a fuzzer can grow and swap the parts. */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"
#include "proto/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes);

struct fuzz_input {
    const uint8_t *at;
    size_t left;
};

static inline uint8_t fuzz_byte(struct fuzz_input *input)
{
    if (input->left == 0)
        return 0;
    input->left--;
    return *input->at++;
}

/* The next part, in memory of exactly its size, so that a read beyond its end is seen; the caller frees it. */
static inline uint8_t *fuzz_part(struct fuzz_input *input, size_t *ret_size_bytes)
{
    size_t size_bytes = fuzz_byte(input);
    size_bytes |= (size_t)fuzz_byte(input) << 8;
    if (size_bytes > input->left)
        size_bytes = input->left;
    uint8_t *part = malloc(size_bytes ? size_bytes : 1);
    MU_ASSERT(part);
    if (size_bytes)
        memcpy(part, input->at, size_bytes);
    input->at += size_bytes;
    input->left -= size_bytes;
    *ret_size_bytes = size_bytes;
    return part;
}

/* What was taken so far: replay.c wants seeds that are called good to be taken. */
__attribute__((weak)) unsigned fuzz_accepted;

/* A refusal is one clean line. */
static inline void fuzz_judge(enum mu_status status, const struct mu_error *err)
{
    if (status == MU_OK)
        fuzz_accepted++;
    else
        MU_ASSERT(err->status == status && err->text[0] && mu_wire_text_ok(err->text, sizeof err->text));
}

#endif
