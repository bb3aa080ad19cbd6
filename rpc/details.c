#include "rpc/details.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "muster/v1/error.pb-c.h"

#define TYPE_URL "type.googleapis.com/google.rpc."

static const char domain[] = "muster.v1";

enum { DETAIL_BYTES_MAX = 1024, DETAILS_MAX = 3, PAIRS_MAX = 2 };

/* The details of one failure while they are put together. Generated messages point to texts without const. */
struct details {
    Muster__V1__ErrorDetail all[DETAILS_MAX], *pointers[DETAILS_MAX];
    uint8_t values[DETAILS_MAX][DETAIL_BYTES_MAX];
    size_t count;
};

static char *text_of(const char *text)
{
    return (char *)(uintptr_t)text;
}

static void add(struct details *details, const char *type_url, const ProtobufCMessage *message)
{
    size_t i = details->count++;
    MU_ASSERT(i < DETAILS_MAX && protobuf_c_message_get_packed_size(message) <= DETAIL_BYTES_MAX);
    muster__v1__error_detail__init(&details->all[i]);
    details->all[i].type_url = text_of(type_url);
    details->all[i].value.data = details->values[i];
    details->all[i].value.len = protobuf_c_message_pack(message, details->values[i]);
    details->pointers[i] = &details->all[i];
}

static void add_info(struct details *details, enum mu_rpc_code code, enum mu_reason reason, uint64_t value)
{
    Muster__V1__ErrorInfo info = MUSTER__V1__ERROR_INFO__INIT;
    Muster__V1__ErrorMetadata pairs[PAIRS_MAX], *pointers[PAIRS_MAX] = {&pairs[0], &pairs[1]};
    char number[24];
    const char *name = mu_reason_name(reason), *advice = mu_reason_advice(reason);
    const char *value_name = mu_reason_value_name(reason);
    info.reason = text_of(name ? name : mu_rpc_code_name(code));
    info.domain = text_of(domain);
    info.metadata = pointers;
    for (int i = 0; i < PAIRS_MAX; i++)
        muster__v1__error_metadata__init(&pairs[i]);
    if (advice[0]) {
        pairs[info.n_metadata].key = text_of("advice");
        pairs[info.n_metadata++].value = text_of(advice);
    }
    if (value_name) {
        snprintf(number, sizeof number, "%" PRIu64, value);
        pairs[info.n_metadata].key = text_of(value_name);
        pairs[info.n_metadata++].value = number;
    }
    add(details, TYPE_URL "ErrorInfo", &info.base);
}

static void add_field(struct details *details, const char *field, const char *description)
{
    Muster__V1__ErrorFields fields = MUSTER__V1__ERROR_FIELDS__INIT;
    Muster__V1__ErrorField one = MUSTER__V1__ERROR_FIELD__INIT, *pointer = &one;
    one.field = text_of(field);
    one.description = text_of(description);
    fields.n_field_violations = 1;
    fields.field_violations = &pointer;
    add(details, TYPE_URL "BadRequest", &fields.base);
}

static void add_retry(struct details *details, uint32_t retry_ms)
{
    Muster__V1__ErrorRetry retry = MUSTER__V1__ERROR_RETRY__INIT;
    Muster__V1__ErrorDelay delay = MUSTER__V1__ERROR_DELAY__INIT;
    delay.seconds = retry_ms / 1000;
    delay.nanos = (int32_t)(retry_ms % 1000) * 1000000;
    retry.retry_delay = &delay;
    add(details, TYPE_URL "RetryInfo", &retry.base);
}

size_t mu_rpc_details_encode(enum mu_rpc_code code, const struct mu_error *err, uint8_t out[MU_RPC_DETAILS_BYTES_MAX])
{
    Muster__V1__ErrorStatus status = MUSTER__V1__ERROR_STATUS__INIT;
    struct details details = {.count = 0};
    char field[MU_ERROR_FIELD_SIZE];
    enum mu_reason reason = err->reason;
    bool has_field = err->status == MU_ERR_INVALID && mu_error_field(err, field);
    if (has_field && reason == MU_REASON_NONE)
        reason = MU_REASON_FIELD_INVALID;
    add_info(&details, code, reason, err->value);
    if (has_field)
        add_field(&details, field, err->text + strlen(field) + 2);
    if (mu_reason_retry_ms(reason))
        add_retry(&details, mu_reason_retry_ms(reason));
    status.code = (int32_t)code;
    status.message = text_of(err->text);
    status.n_details = details.count;
    status.details = details.pointers;
    MU_ASSERT(protobuf_c_message_get_packed_size(&status.base) <= MU_RPC_DETAILS_BYTES_MAX);
    return protobuf_c_message_pack(&status.base, out);
}

static void read_info(const Muster__V1__ErrorInfo *info, struct mu_error *err)
{
    enum mu_reason reason = mu_reason_find(info->reason);
    const char *value_name = mu_reason_value_name(reason);
    if (strcmp(info->domain, domain) != 0)
        return;
    err->reason = reason;
    err->value = 0;
    for (size_t i = 0; value_name && i < info->n_metadata; i++)
        if (strcmp(info->metadata[i]->key, value_name) == 0)
            err->value = strtoull(info->metadata[i]->value, NULL, 10);
}

void mu_rpc_details_decode(const void *data, size_t size_bytes, struct mu_error *err)
{
    Muster__V1__ErrorStatus *status = NULL;
    if (size_bytes <= MU_RPC_DETAILS_BYTES_MAX) /* more is not from us; and bounds what unpacking takes */
        status = muster__v1__error_status__unpack(NULL, size_bytes, data);
    for (size_t i = 0; status && i < status->n_details; i++) {
        const Muster__V1__ErrorDetail *detail = status->details[i];
        if (strcmp(detail->type_url, TYPE_URL "ErrorInfo") != 0)
            continue;
        Muster__V1__ErrorInfo *info = muster__v1__error_info__unpack(NULL, detail->value.len, detail->value.data);
        if (info)
            read_info(info, err);
        muster__v1__error_info__free_unpacked(info, NULL);
    }
    muster__v1__error_status__free_unpacked(status, NULL);
}
