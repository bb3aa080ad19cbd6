#include "plan/retention.h"

/* Insertion sort: a list holds tens of entries and is nearly in order; no memory is needed. */
static void sort_by_seq_descending(const struct mu_checkpoint_info *list, size_t *order, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t at = i;
        for (; at > 0 && list[order[at - 1]].seq < list[i].seq; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
}

static void reverse(size_t *values, size_t count)
{
    for (size_t i = 0; i < count / 2; i++) {
        size_t swapped = values[i];
        values[i] = values[count - 1 - i];
        values[count - 1 - i] = swapped;
    }
}

size_t mu_retention_select(const struct mu_checkpoint_info *list, size_t count,
                           const struct mu_retention_policy *policy, size_t *ret_delete)
{
    size_t keep_left = policy->keep ? policy->keep : 1,
           verified_left = policy->keep_verified ? policy->keep_verified : 1;
    size_t delete_count = 0;
    sort_by_seq_descending(list, ret_delete, count);
    /* From newest to oldest; the indices to delete gather at the front of the same array, never ahead of what is read.
     */
    for (size_t i = 0; i < count; i++) {
        size_t index = ret_delete[i];
        const struct mu_checkpoint_info *info = &list[index];
        bool is_kept = info->pinned;
        if (info->quarantined) {
            is_kept |= keep_left > 0;
        } else {
            is_kept |= policy->keep_every > 0 && info->step % policy->keep_every == 0;
            if (keep_left > 0) {
                keep_left--;
                is_kept = true;
            }
            if (info->verified && verified_left > 0) {
                verified_left--;
                is_kept = true;
            }
        }
        if (!is_kept)
            ret_delete[delete_count++] = index;
    }
    reverse(ret_delete, delete_count);
    return delete_count;
}
