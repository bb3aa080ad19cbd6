/* Versions and unique ids over the sockets: up the binomial tree of the working ranks, whose edges are connected in
 * every layout (plan/layout.h), and down again. A message is a head and all ids; on the way up those that are not known
 * yet are zero. */
#include "worker/comm_nccl_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/layout.h"
#include "worker/exchange.h"

enum { MEET_UP, MEET_DOWN, MEET_RELATIVES_MAX = 33 };

struct version {
    uint32_t number, rank;
    char host[MU_NCCL_HOST_SIZE];
};

struct message {
    struct version least, most;
    struct mu_nccl_id ids[];
};

/* The ranks above and below this one, and what comes from them. */
struct mu_nccl_meeting {
    struct mu_comm_group *group;
    uint32_t rank, id_count, ranks_per_id;
    char host[MU_NCCL_HOST_SIZE];
    uint64_t deadline_us;
    uint32_t children[MEET_RELATIVES_MAX], child_count;
    int64_t parent; /* -1: rank 0 */
    size_t message_bytes;
    struct message *own, *theirs;
    struct mu_comm_request requests[MEET_RELATIVES_MAX];
};

static uint64_t number(uint64_t direction)
{
    return exchange_number(0, EXCHANGE_MEET, direction);
}

static void find_relatives(struct mu_nccl_meeting *meeting, uint32_t world)
{
    uint32_t around[MEET_RELATIVES_MAX], count = mu_layout_binomial(world, meeting->rank, around);
    meeting->parent = -1;
    for (uint32_t i = 0; i < count; i++) {
        if (around[i] < meeting->rank)
            meeting->parent = around[i];
        else
            meeting->children[meeting->child_count++] = around[i];
    }
}

static enum mu_status describe_self(struct mu_nccl_meeting *meeting, struct mu_error *err)
{
    int version = 0;
    ncclResult_t result = ncclGetVersion(&version);
    meeting->own->least = (struct version){.number = (uint32_t)version, .rank = meeting->rank};
    memcpy(meeting->own->least.host, meeting->host, sizeof meeting->host);
    meeting->own->most = meeting->own->least;
    ncclUniqueId id;
    if (result == ncclSuccess && meeting->rank % meeting->ranks_per_id == 0) {
        result = ncclGetUniqueId(&id);
        memcpy(&meeting->own->ids[meeting->rank / meeting->ranks_per_id], &id, sizeof id);
    }
    if (result == ncclSuccess)
        return MU_OK;
    return mu_fail(err, MU_ERR_UNAVAILABLE,
                   "NCCL makes no id on rank %u: %s, %s (NCCL_SOCKET_IFNAME names the interface to use)", meeting->rank,
                   ncclGetErrorString(result), ncclGetLastError(NULL));
}

static void merge(struct message *into, const struct message *from, uint32_t id_count)
{
    if (from->least.number < into->least.number)
        into->least = from->least;
    if (from->most.number > into->most.number)
        into->most = from->most;
    for (size_t i = 0; i < id_count * sizeof from->ids[0]; i++)
        into->ids[0].bytes[i] |= from->ids[0].bytes[i];
}

static enum mu_status receive(struct mu_nccl_meeting *meeting, uint32_t from, uint64_t direction, void *into,
                              struct mu_error *err)
{
    enum mu_status status =
        mu_comm_recv(meeting->group, from, number(direction), into, meeting->message_bytes, &meeting->requests[0], err);
    return status == MU_OK ? mu_comm_wait(meeting->group, &meeting->requests[0], meeting->deadline_us, err) : status;
}

static enum mu_status climb(struct mu_nccl_meeting *meeting, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < meeting->child_count && status == MU_OK; i++) {
        status = receive(meeting, meeting->children[i], MEET_UP, meeting->theirs, err);
        if (status == MU_OK)
            merge(meeting->own, meeting->theirs, meeting->id_count);
    }
    if (status != MU_OK || meeting->parent < 0)
        return status;
    status = mu_comm_send(meeting->group, (uint32_t)meeting->parent, number(MEET_UP), meeting->own,
                          meeting->message_bytes, &meeting->requests[0], err);
    if (status == MU_OK)
        status = mu_comm_wait(meeting->group, &meeting->requests[0], meeting->deadline_us, err);
    return status == MU_OK ? receive(meeting, (uint32_t)meeting->parent, MEET_DOWN, meeting->own, err) : status;
}

static enum mu_status pass_down(struct mu_nccl_meeting *meeting, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < meeting->child_count && status == MU_OK; i++)
        status = mu_comm_send(meeting->group, meeting->children[i], number(MEET_DOWN), meeting->own,
                              meeting->message_bytes, &meeting->requests[i], err);
    for (uint32_t i = 0; i < meeting->child_count && status == MU_OK; i++)
        status = mu_comm_wait(meeting->group, &meeting->requests[i], meeting->deadline_us, err);
    return status;
}

static enum mu_status check_versions(const struct message *all, struct mu_error *err)
{
    const struct version *least = &all->least, *most = &all->most;
    if (least->number == most->number)
        return MU_OK;
    return mu_fail(err, MU_ERR_CONFLICT,
                   "NCCL versions differ: %u.%u.%u on rank %u [host %.63s], %u.%u.%u on rank %u [host %.63s]; install "
                   "the same libnccl.so.2 on all hosts",
                   least->number / 10000, least->number / 100 % 100, least->number % 100, least->rank, least->host,
                   most->number / 10000, most->number / 100 % 100, most->number % 100, most->rank, most->host);
}

enum mu_status mu_nccl_meeting_new(const struct mu_nccl_meeting_config *config, struct mu_nccl_meeting **ret_meeting,
                                   struct mu_error *err)
{
    struct mu_nccl_meeting *meeting = calloc(1, sizeof *meeting);
    if (!meeting)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a meeting of %u ranks", config->world);
    meeting->group = config->group;
    meeting->rank = config->rank;
    meeting->ranks_per_id = config->ranks_per_id > 0 ? config->ranks_per_id : MU_NCCL_RANKS_PER_ID;
    meeting->id_count = (config->world + meeting->ranks_per_id - 1) / meeting->ranks_per_id;
    meeting->message_bytes = sizeof(struct message) + meeting->id_count * sizeof(struct mu_nccl_id);
    snprintf(meeting->host, sizeof meeting->host, "%s", config->host);
    find_relatives(meeting, config->world);
    meeting->own = calloc(1, meeting->message_bytes);
    meeting->theirs = calloc(1, meeting->message_bytes);
    if (!meeting->own || !meeting->theirs) {
        mu_nccl_meeting_free(meeting);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a meeting of %u ranks", config->world);
    }
    *ret_meeting = meeting;
    return MU_OK;
}

void mu_nccl_meeting_free(struct mu_nccl_meeting *meeting)
{
    if (!meeting)
        return;
    free(meeting->own);
    free(meeting->theirs);
    free(meeting);
}

enum mu_status mu_nccl_meeting_run(struct mu_nccl_meeting *meeting, uint64_t deadline_us, struct mu_error *err)
{
    meeting->deadline_us = deadline_us;
    enum mu_status status = describe_self(meeting, err);
    if (status == MU_OK)
        status = climb(meeting, err);
    if (status == MU_OK)
        status = pass_down(meeting, err);
    return status == MU_OK ? check_versions(meeting->own, err) : status;
}

const struct mu_nccl_id *mu_nccl_meeting_ids(const struct mu_nccl_meeting *meeting, uint32_t *ret_count)
{
    *ret_count = meeting->id_count;
    return meeting->own->ids;
}
