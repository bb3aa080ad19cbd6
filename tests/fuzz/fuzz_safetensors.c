/* links: mu_storage */
/* Headers of safetensors files. What is accepted lies within the data, without holes, and can be written again.
 *
 * Input: size of the data u32, then the header's JSON. */
#include "storage/safetensors.h"
#include "tests/fuzz/fuzz.h"

static void judge(struct mu_safetensors *file, uint64_t data_bytes)
{
    uint64_t end = 0;
    size_t count = mu_safetensors_count(file);
    struct mu_safetensors_tensor *tensors = calloc(count ? count : 1, sizeof *tensors);
    MU_ASSERT(tensors);
    for (size_t i = 0; i < count; i++) {
        tensors[i] = *mu_safetensors_at(file, i);
        MU_ASSERT(mu_safetensors_find(file, tensors[i].name));
        MU_ASSERT(tensors[i].offset_bytes == end);
        end += tensors[i].size_bytes;
    }
    MU_ASSERT(end == data_bytes);
    uint8_t *header = NULL;
    size_t header_bytes;
    uint64_t again_bytes;
    struct mu_error err = {0};
    enum mu_status status =
        mu_safetensors_header_encode(tensors, count, NULL, 0, 8, &header, &header_bytes, &again_bytes, &err);
    MU_ASSERT(status == MU_OK && again_bytes == data_bytes);
    free(header);
    free(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    struct fuzz_input input = {data, size_bytes};
    struct mu_safetensors *file = NULL;
    struct mu_error err = {0};
    uint64_t data_bytes = 0;
    for (int i = 0; i < 4; i++)
        data_bytes |= (uint64_t)fuzz_byte(&input) << 8 * i;
    enum mu_status status = mu_safetensors_parse(input.at, input.left, data_bytes, "file", &file, &err);
    fuzz_judge(status, &err);
    if (status != MU_OK)
        return 0;
    judge(file, data_bytes);
    mu_safetensors_close(file);
    return 0;
}
