/* links: mu_fuzz_coordinator */
/* What workers say to the coordinator: unpacked, judged, and given to a core that knows two jobs. Whatever it then
 * orders, stores and says must be sound, and what it has stored must start another one.
 *
 * Input: (how u8, message)*; how: session 1-3 in two bits, 4: the stream breaks first, 8: half a second passes first,
 * 16: a minute. */
#include "tests/fuzz/coordinator.h"

enum { SESSIONS = 4, HAS_BROKEN = 4, HALF_A_SECOND = 8, A_MINUTE = 16 };

struct conversation {
    struct fuzz_coordinator coordinator;
    bool is_open[SESSIONS];
    uint64_t numbers[SESSIONS], last_number;
    struct mu_wire_arena arena;
};

static void on_action(void *ctx, const struct mu_coord_action *action)
{
    struct conversation *conversation = ctx;
    for (int i = 0; i < SESSIONS && action->kind == MU_CA_CLOSE; i++)
        if (conversation->numbers[i] == action->close.session)
            conversation->is_open[i] = false;
}

static void break_stream(struct conversation *conversation, int slot)
{
    if (!conversation->is_open[slot])
        return;
    struct mu_coord_event event = {.kind = MU_CE_DISCONNECTED};
    event.disconnected.session = conversation->numbers[slot];
    event.disconnected.reason = "stream reset";
    conversation->is_open[slot] = false;
    fuzz_coordinator_step(&conversation->coordinator, &event);
}

/* As coordinator/driver.c does: what does not decode, or comes before Hello, ends the stream. */
static void hear(struct conversation *conversation, int slot, const uint8_t *data, size_t size_bytes)
{
    static struct mu_worker_message message;
    struct mu_error err = {0};
    mu_wire_arena_reset(&conversation->arena);
    enum mu_status status = mu_wire_decode_worker(&conversation->arena, data, size_bytes, &message, &err);
    fuzz_judge(status, &err);
    if (status != MU_OK || (!conversation->is_open[slot] && message.kind != MU_WM_HELLO)) {
        break_stream(conversation, slot);
        return;
    }
    if (!conversation->is_open[slot]) {
        conversation->is_open[slot] = true;
        conversation->numbers[slot] = ++conversation->last_number;
    }
    struct mu_coord_event event = {.kind = MU_CE_MESSAGE};
    event.message.session = conversation->numbers[slot];
    event.message.message = &message;
    fuzz_coordinator_step(&conversation->coordinator, &event);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    struct fuzz_input input = {data, size_bytes};
    static struct conversation conversation;
    struct mu_error err = {0};
    memset(&conversation, 0, sizeof conversation);
    mu_wire_arena_init(&conversation.arena);
    bool is_new = fuzz_coordinator_init(&conversation.coordinator, mu_store_memory_new(), &err);
    MU_ASSERT(is_new);
    conversation.coordinator.also = on_action;
    conversation.coordinator.also_ctx = &conversation;
    fuzz_coordinator_submit(&conversation.coordinator, "tiny");
    fuzz_coordinator_submit(&conversation.coordinator, "probed");
    while (input.left > 0) {
        uint8_t how = fuzz_byte(&input);
        size_t part_bytes;
        uint8_t *part = fuzz_part(&input, &part_bytes);
        if (how & HAS_BROKEN)
            break_stream(&conversation, how % SESSIONS);
        if (how & (HALF_A_SECOND | A_MINUTE))
            fuzz_coordinator_pass(&conversation.coordinator, how & A_MINUTE ? 60000000 : 500000);
        if (part_bytes > 0)
            hear(&conversation, how % SESSIONS, part, part_bytes);
        free(part);
    }
    fuzz_coordinator_check_restart(&conversation.coordinator);
    fuzz_coordinator_fini(&conversation.coordinator);
    mu_wire_arena_fini(&conversation.arena);
    return 0;
}
