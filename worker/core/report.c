#include "worker/core/report.h"

void step_report_add(struct mu_step_report *sum, const struct mu_step_report *step)
{
    sum->steps_done = step->steps_done;
    sum->result = step->result;
    sum->step_count += step->step_count;
    sum->leaf_count += step->leaf_count;
    sum->tokens += step->tokens;
    sum->total_us += step->total_us;
    sum->data_us += step->data_us;
    sum->forward_us += step->forward_us;
    sum->backward_us += step->backward_us;
    sum->communicate_us += step->communicate_us;
    sum->wait_us += step->wait_us;
    sum->optimizer_us += step->optimizer_us;
    sum->snapshot_us += step->snapshot_us;
    sum->tensor_us += step->tensor_us;
    sum->pipeline_us += step->pipeline_us;
    sum->replicas_us += step->replicas_us;
    sum->vote_us += step->vote_us;
}

/* The oldest of too many can only belong to a checkpoint given up long ago. */
void pieces_add(struct pending_pieces *pending, const struct mu_piece_report *piece)
{
    if (pending->count == PENDING_PIECES_MAX)
        memmove(&pending->reports[0], &pending->reports[1], sizeof pending->reports[0] * --pending->count);
    pending->reports[pending->count++] = *piece;
}

void pieces_acknowledged(struct pending_pieces *pending, uint64_t checkpoint, uint32_t piece)
{
    for (uint32_t i = 0; i < pending->count; i++) {
        if (pending->reports[i].checkpoint == checkpoint && pending->reports[i].piece == piece)
            pending->reports[i--] = pending->reports[--pending->count];
    }
}
