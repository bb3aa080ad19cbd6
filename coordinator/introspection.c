#include "coordinator/introspection.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/log.h"
#include "coordinator/api_parts.h"
#include "coordinator/metrics.h"
#include "muster/v1/recall.pb-c.h"

static char *metrics_page(const struct mu_question_sources *sources, size_t *ret_size)
{
    struct mu_question_sources brief = *sources;
    char *page = NULL;
    FILE *out = open_memstream(&page, ret_size);
    if (!out)
        return NULL;
    brief.worker_series = 0;
    mu_metrics_write(out, &brief);
    if (fclose(out) == 0)
        return page;
    free(page);
    return NULL;
}

static bool add_lines(struct mu_wire_arena *arena, uint32_t wanted, Muster__V1__ReadCoordinatorResponse *reply)
{
    size_t capacity = wanted < MU_LOG_KEPT ? wanted : MU_LOG_KEPT;
    struct mu_log_line *lines = mu_wire_arena_alloc(arena, capacity * sizeof *lines);
    Muster__V1__LogLine *pb = mu_wire_arena_alloc(arena, capacity * sizeof *pb);
    reply->log = mu_wire_arena_alloc(arena, capacity * sizeof *reply->log);
    if (!lines || !pb || !reply->log)
        return false;
    reply->n_log = mu_log_recent(0, lines, capacity);
    for (size_t i = 0; i < reply->n_log; i++) {
        muster__v1__log_line__init(&pb[i]);
        pb[i].number = lines[i].number;
        pb[i].text = mu_wire_put_text(arena, lines[i].text, sizeof lines[i].text);
        reply->log[i] = &pb[i];
    }
    return true;
}

void mu_introspection_call(struct mu_wire_arena *arena, const struct mu_question_sources *sources,
                           struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    Muster__V1__ReadCoordinatorResponse reply = MUSTER__V1__READ_COORDINATOR_RESPONSE__INIT;
    const ProtobufCMessage *request = NULL;
    struct mu_error err = {0};
    char *page = NULL;
    enum mu_status status = mu_wire_unpack(arena, &muster__v1__read_coordinator_request__descriptor, data, size_bytes,
                                           MU_WIRE_REQUEST_BYTES_MAX, &request, &err);
    if (status == MU_OK &&
        (!(page = metrics_page(sources, &reply.metrics.len)) ||
         !add_lines(arena, ((const Muster__V1__ReadCoordinatorRequest *)request)->log_lines, &reply)))
        status = mu_fail(&err, MU_ERR_NO_MEMORY, "no memory for the answer");
    reply.metrics.data = (uint8_t *)page;
    api_answer_now(arena, call, status, &reply.base, &err);
    free(page);
}
