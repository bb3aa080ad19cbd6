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
