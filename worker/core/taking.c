#include "worker/core/taking.h"

#include <string.h>

#include "common/mutant.h"

static bool is_still(const struct mu_worker_status *status)
{
    return status->phase == MU_PHASE_SPARE || status->phase == MU_PHASE_PARKED;
}

static bool is_fed(const struct mu_worker_status *status)
{
    return status->feed_state == MU_FEED_FILLING || status->feed_state == MU_FEED_LIVE;
}

bool taking_begins(struct mu_worker_status *status, const struct mu_layout *layout, uint64_t generation,
                   const struct mu_feed_order *order)
{
    if (order->number == status->feed)
        return is_fed(status); /* from another giver */
    /* What it holds from before the generation that feeds it makes room. */
    bool free = is_still(status) && (!status->held.has_state || generation > status->generation);
    bool steps = status->phase == MU_PHASE_RUNNING && generation == status->generation &&
                 order->taker == status->rank && mu_layout_equal(&order->layout, layout);
    if (order->taker == MU_LAYOUT_NOBODY ? !free : !steps)
        return false;
    if (order->taker == MU_LAYOUT_NOBODY) {
        memset(&status->held, 0, sizeof status->held);
        status->fed_by = generation;
    }
    status->feed = order->number;
    status->feed_state = MU_FEED_FILLING;
    return true;
}

bool taking_goes_on(struct mu_worker_status *status, uint64_t number, enum mu_feed_state state,
                    const struct mu_held *held, const char text[MU_TEXT_SIZE])
{
    if (number != status->feed || !is_fed(status))
        return false; /* assigned or forgotten meanwhile */
    status->feed_state = state;
    if (state == MU_FEED_WHOLE && is_still(status))
        status->held = *held;
    if (state == MU_FEED_FAILED)
        memcpy(status->text, text, sizeof status->text);
    return true;
}

void taking_is_over(struct mu_worker_status *status)
{
    status->feed = 0;
    status->feed_state = MU_FEED_NONE;
}

void holding_enters_era(struct mu_worker_status *status, uint32_t era)
{
    if (era != status->era && !MU_MUTANT(MU_MUT_KEEP_VOID_STATE))
        memset(&status->held, 0, sizeof status->held);
    status->era = era;
}
