/* A small model and a piece of it, shared by the tests of reading and of writing pieces. Included by one file per
 * executable. */
#ifndef MU_TESTS_PIECES_TESTING_H
#define MU_TESTS_PIECES_TESTING_H

#include "storage_testing.h"

#include "common/rng.h"
#include "storage/pieces.h"

static const struct mu_checkpoint_identity identity = {
    .job = "kjv", .seq = 12, .step = 1200, .generation = (7ull << 40) + 3};

struct model {
    struct mu_model_spec spec;
    float *flat[3];
};

static MAYBE_UNUSED void model_init(struct model *model)
{
    const struct mu_model_config config = {
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 96, .context = 32, .vocab = 256};
    mu_model_spec_init(&model->spec, &config);
    assert_true(model->spec.chunk_count > model->spec.cell_count); /* some cell has several chunks */
    uint64_t random = 5;
    for (int kind = 0; kind < 3; kind++) {
        model->flat[kind] = calloc(model->spec.flat_size, sizeof(float));
        for (uint64_t i = 0; i < model->spec.flat_size; i++)
            model->flat[kind][i] = (float)(mu_splitmix64(&random) >> 40) * 1e-3f;
    }
}

static MAYBE_UNUSED void model_fini(struct model *model)
{
    for (int kind = 0; kind < 3; kind++)
        free(model->flat[kind]);
}

struct written {
    struct mu_piece_entry *entries;
    size_t count;
    struct mu_piece_result result;
    char path[512];
};

static MAYBE_UNUSED struct mu_piece_entry *entries_of(const struct model *model, uint32_t first, uint32_t chunks,
                                                      size_t *ret_count)
{
    size_t count = mu_piece_entries_of_chunks(&model->spec, first, chunks, NULL, NULL, NULL, NULL, 0);
    struct mu_piece_entry *entries = calloc(count, sizeof *entries);
    assert_int_equal(mu_piece_entries_of_chunks(&model->spec, first, chunks, model->flat[0], model->flat[1],
                                                model->flat[2], entries, count),
                     count);
    *ret_count = count;
    return entries;
}

static MAYBE_UNUSED struct written write_piece(const struct model *model, const char *dir)
{
    struct written written;
    struct mu_error err;
    written.entries = entries_of(model, 1, model->spec.chunk_count - 1, &written.count);
    assert_ok(mu_piece_write(dir, "piece-1.safetensors", &identity, written.entries, written.count, NULL,
                             &written.result, &err),
              &err);
    path_join(written.path, dir, "piece-1.safetensors");
    return written;
}

#endif
