/* links: mu_storage */
/* Manifests of checkpoints, with the checksum in their first line put right, so that what lies behind it is reached.
 * What is accepted can be written and read again, and the job record within is judged likewise.
 *
 * Input: all of the file but its first line. */
#include <stdio.h>

#include "common/hash.h"
#include "storage/job_json.h"
#include "storage/manifest.h"
#include "storage/piece_format.h"
#include "tests/fuzz/fuzz.h"

#define FIRST_LINE "{\"format\":\"muster-checkpoint-%d\",\"xxh3\":\"%s\",\"manifest\":\n"

static void judge(const struct mu_manifest *manifest)
{
    static struct mu_job_spec spec;
    struct mu_error err = {0};
    char *text = NULL;
    size_t size_bytes;
    struct mu_manifest *again = NULL;
    fuzz_judge(mu_manifest_check_tiling(manifest, NULL, &err), &err);
    enum mu_status status = mu_manifest_encode(manifest, &text, &size_bytes, &err);
    MU_ASSERT(status == MU_OK);
    status = mu_manifest_decode(text, size_bytes, "again", &again, &err);
    MU_ASSERT(status == MU_OK && again->piece_count == manifest->piece_count);
    mu_manifest_free(again);
    free(text);
    status = mu_job_spec_from_text(manifest->job_record, strlen(manifest->job_record), "job record of a manifest",
                                   &spec, &err);
    fuzz_judge(status, &err);
    if (status == MU_OK)
        fuzz_judge(mu_manifest_check_model(manifest, &spec.model, "/ckpt/x", &err), &err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    char hash[MU_HASH_TEXT_SIZE], head[128];
    struct mu_error err = {0};
    struct mu_manifest *manifest = NULL;
    mu_hash128_text(mu_xxh3_128(data, size_bytes), hash);
    size_t head_bytes = (size_t)snprintf(head, sizeof head, FIRST_LINE, MU_MANIFEST_FORMAT_VERSION, hash);
    char *text = malloc(head_bytes + size_bytes);
    MU_ASSERT(text);
    memcpy(text, head, head_bytes);
    if (size_bytes)
        memcpy(text + head_bytes, data, size_bytes);
    enum mu_status status = mu_manifest_decode(text, head_bytes + size_bytes, "manifest", &manifest, &err);
    free(text);
    fuzz_judge(status, &err);
    if (status == MU_OK)
        judge(manifest);
    mu_manifest_free(manifest);
    return 0;
}
