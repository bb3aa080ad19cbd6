#include "worker/core/probing.h"

static const char *reason_against(const struct mu_worker_status *status, bool loaded)
{
    if (!loaded)
        return "it has not loaded its job";
    if (status->phase != MU_PHASE_SPARE && status->phase != MU_PHASE_PARKED)
        return "it has a rank";
    if (status->feed_state == MU_FEED_FILLING || status->feed_state == MU_FEED_LIVE)
        return "it gets state for its next rank";
    return NULL;
}

bool probing_begins(const struct mu_worker_status *status, bool loaded, const struct mu_probe_order *order,
                    struct mu_probe_report *ret_refusal)
{
    const char *against = order->kind == 0 ? NULL : reason_against(status, loaded);
    if (!against)
        return true;
    *ret_refusal = (struct mu_probe_report){.number = order->number, .kind = order->kind, .status = MU_ERR_CONFLICT};
    memcpy(ret_refusal->text, against, strlen(against) + 1);
    return false;
}
