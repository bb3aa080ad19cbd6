/* links: mu_job_file */
/* Job files. What is accepted is a job that the service accepts as well, and that survives the way over the wire. */
#include "cli/job_file.h"
#include "proto/wire_pb.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    static struct mu_job_spec spec, again;
    struct mu_error err = {0};
    enum mu_status status = mu_job_file_parse("job.yaml", "/jobs", data, size_bytes, &spec, &err);
    fuzz_judge(status, &err);
    if (status != MU_OK)
        return 0;
    struct mu_wire_arena arena;
    Muster__V1__JobSpec *pb = NULL;
    mu_wire_arena_init(&arena);
    status = mu_wire_spec_to_pb(&arena, &spec, &pb, &err);
    MU_ASSERT(status == MU_OK);
    status = mu_wire_spec_from_pb(pb, &again, &err);
    MU_ASSERT(status == MU_OK && strcmp(spec.name, again.name) == 0 && spec.steps == again.steps);
    mu_wire_arena_fini(&arena);
    return 0;
}
