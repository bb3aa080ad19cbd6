#include "coordinator/refusals.h"

#include "common/log.h"

void mu_refusals_tell(const struct mu_rpc_refusals *before, const struct mu_rpc_refusals *now)
{
    if (now->connections_of_peer > before->connections_of_peer)
        MU_LOGW("refused %llu connections of hosts that have too many, the last of %s (--connections-per-host)",
                (unsigned long long)(now->connections_of_peer - before->connections_of_peer), now->last_host);
    if (now->connections_without_file > before->connections_without_file)
        MU_LOGW("refused %llu connections because hardly a file may be opened: raise the limit of open files "
                "(ulimit -Hn, LimitNOFILE=)",
                (unsigned long long)(now->connections_without_file - before->connections_without_file));
    if (now->connections_owing > before->connections_owing)
        MU_LOGW("closed %llu connections that sent what never became a call, or took no answers, the last of %s",
                (unsigned long long)(now->connections_owing - before->connections_owing), now->last_owing);
    if (now->calls_of_peer + now->questions_of_peer > before->calls_of_peer + before->questions_of_peer)
        MU_LOGW("refused %llu calls of clients that have too many open (--calls-per-client) and %llu of clients that "
                "ask too often (--questions-per-second)",
                (unsigned long long)(now->calls_of_peer - before->calls_of_peer),
                (unsigned long long)(now->questions_of_peer - before->questions_of_peer));
    if (now->answers_untaken > before->answers_untaken)
        MU_LOGW("withdrew %llu answers because clients took too few of them",
                (unsigned long long)(now->answers_untaken - before->answers_untaken));
    if (now->requests_awaited > before->requests_awaited)
        MU_LOGW("cut off %llu calls whose request did not come, or that were too many to wait for their turn",
                (unsigned long long)(now->requests_awaited - before->requests_awaited));
}
