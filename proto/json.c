#include "proto/json.h"

#include <ctype.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/hash.h"

const char *mu_json_enum(const ProtobufCEnumDescriptor *descriptor, int value, char out[MU_JSON_WORD_SIZE])
{
    const ProtobufCEnumValue *entry = protobuf_c_enum_descriptor_get_value(descriptor, value);
    if (!entry)
        return "unknown";
    size_t prefix = 0;
    for (const char *c = descriptor->short_name; *c; c++)
        prefix += isupper((unsigned char)*c) && c != descriptor->short_name ? 2 : 1;
    const char *name = strlen(entry->name) > prefix + 1 ? entry->name + prefix + 1 : entry->name;
    size_t i = 0;
    for (; name[i] && i < MU_JSON_WORD_SIZE - 1; i++)
        out[i] = (char)tolower((unsigned char)name[i]);
    out[i] = 0;
    return out;
}

static json_t *message_to_json(const ProtobufCMessage *message);

/* JSON integers end at 2^63; what is larger (a seed may be) becomes a string. */
static json_t *number_to_json(uint64_t value)
{
    char text[24];
    if (value <= INT64_MAX)
        return json_integer((json_int_t)value);
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return json_string(text);
}

/* JSON has no infinities and no NaN. */
static json_t *real_to_json(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

/* One value at `at`; bytes are hexadecimal. */
static json_t *value_to_json(const ProtobufCFieldDescriptor *field, const void *at)
{
    char word[MU_JSON_WORD_SIZE];
    switch (field->type) {
    case PROTOBUF_C_TYPE_BOOL:
        return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        return json_integer(*(const uint32_t *)at);
    case PROTOBUF_C_TYPE_INT32:
        return json_integer(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_INT64:
        return number_to_json(*(const uint64_t *)at);
    case PROTOBUF_C_TYPE_FLOAT:
        return real_to_json((double)*(const float *)at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return real_to_json(*(const double *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return json_string(mu_json_enum(field->descriptor, *(const int *)at, word));
    case PROTOBUF_C_TYPE_STRING:
        return json_string(*(char *const *)at ? *(char *const *)at : "");
    case PROTOBUF_C_TYPE_BYTES: {
        const ProtobufCBinaryData *bytes = at;
        char hex[129] = "";
        if (bytes->len <= 64)
            mu_hex(bytes->data, bytes->len, hex);
        return json_string(hex);
    }
    case PROTOBUF_C_TYPE_MESSAGE:
        return *(ProtobufCMessage *const *)at ? message_to_json(*(ProtobufCMessage *const *)at) : json_null();
    default:
        return json_null();
    }
}

static size_t element_size(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    default:
        return 4;
    }
}

static json_t *message_to_json(const ProtobufCMessage *message)
{
    json_t *object = json_object();
    const char *base = (const char *)message;
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        const char *at = base + field->offset;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            json_t *array = json_array();
            size_t count = *(const size_t *)(base + field->quantifier_offset);
            for (size_t k = 0; k < count; k++)
                json_array_append_new(array, value_to_json(field, *(char *const *)at + k * element_size(field)));
            json_object_set_new(object, field->name, array);
        } else if (!(field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
                   *(const uint32_t *)(base + field->quantifier_offset) == field->id) {
            json_object_set_new(object, field->name, value_to_json(field, at));
        }
    }
    return object;
}

char *mu_json_of(const ProtobufCMessage *message, bool one_line)
{
    json_t *json = message_to_json(message);
    char *text = json_dumps(json, one_line ? JSON_COMPACT : JSON_INDENT(2));
    json_decref(json);
    return text;
}
