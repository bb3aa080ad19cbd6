/* links: mu_fuzz_coordinator */
/* What the coordinator says to a worker: unpacked, judged, and given to a worker whose engine answers at once.
 *
 * Input: (how u8, message)*; how: 1: a training step first, 2: the stream breaks first, 4: a second passes first. */
#include "tests/fuzz/coordinator.h"

enum { TRAINS = 1, HAS_BROKEN = 2, A_SECOND = 4 };

static void hear(struct fuzz_worker *worker, struct mu_wire_arena *arena, const uint8_t *data, size_t size_bytes)
{
    static struct mu_coord_message message;
    struct mu_error err = {0};
    mu_wire_arena_reset(arena);
    enum mu_status status = mu_wire_decode_coord(arena, data, size_bytes, &message, &err);
    fuzz_judge(status, &err);
    if (status == MU_OK)
        fuzz_worker_step(worker, &(struct mu_worker_event){.kind = MU_WE_MESSAGE, .message = &message});
    else
        fuzz_worker_step(worker, &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "cancelled"});
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    struct fuzz_input input = {data, size_bytes};
    static struct fuzz_worker worker;
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    fuzz_worker_init(&worker, "a", "tiny");
    fuzz_worker_step(&worker, &(struct mu_worker_event){.kind = MU_WE_START});
    while (input.left > 0 && !worker.is_over) {
        uint8_t how = fuzz_byte(&input);
        size_t part_bytes;
        uint8_t *part = fuzz_part(&input, &part_bytes);
        if (how & TRAINS)
            fuzz_worker_train(&worker, mu_worker_vote(worker.core, worker.running));
        if (how & HAS_BROKEN)
            fuzz_worker_step(&worker, &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "stream reset"});
        if (how & A_SECOND) {
            worker.now_us += 1000000;
            fuzz_worker_step(&worker, &(struct mu_worker_event){.kind = MU_WE_TICK});
        }
        if (part_bytes > 0)
            hear(&worker, &arena, part, part_bytes);
        free(part);
    }
    fuzz_worker_fini(&worker);
    mu_wire_arena_fini(&arena);
    return 0;
}
