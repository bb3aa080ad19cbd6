/* Output: any message as JSON, tables for people, numbers and ages. */
#include "cli/cli.h"

#include <ctype.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/hash.h"

/* "JOB_STATE_RUNNING" of enum JobState -> "running": the type's own prefix goes, the rest in lower case. */
const char *mu_cli_enum(const ProtobufCEnumDescriptor *descriptor, int value)
{
    static char texts[4][48]; /* a few may be in use in one printf */
    static int next;
    char *out = texts[next++ % 4];
    const ProtobufCEnumValue *entry = protobuf_c_enum_descriptor_get_value(descriptor, value);
    if (!entry)
        return "unknown";
    size_t prefix = 0;
    for (const char *c = descriptor->short_name; *c; c++)
        prefix += isupper((unsigned char)*c) && c != descriptor->short_name ? 2 : 1;
    const char *name = strlen(entry->name) > prefix + 1 ? entry->name + prefix + 1 : entry->name;
    size_t i = 0;
    for (; name[i] && i < 47; i++)
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

/* One value at `at`; bytes are hexadecimal. */
static json_t *value_to_json(const ProtobufCFieldDescriptor *field, const void *at)
{
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
        return json_real((double)*(const float *)at);
    case PROTOBUF_C_TYPE_DOUBLE:
        return json_real(*(const double *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return json_string(mu_cli_enum(field->descriptor, *(const int *)at));
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

void mu_cli_print_json(const ProtobufCMessage *message, bool one_line)
{
    json_t *json = message_to_json(message);
    json_dumpf(json, stdout, one_line ? JSON_COMPACT : JSON_INDENT(2));
    putchar('\n');
    fflush(stdout);
    json_decref(json);
}

/* ---- tables ---- */

struct mu_cli_table {
    int columns, count, capacity;
    char **cells;
};

struct mu_cli_table *mu_cli_table_new(int columns)
{
    struct mu_cli_table *table = calloc(1, sizeof *table);
    MU_ASSERT(table);
    table->columns = columns;
    return table;
}

void mu_cli_table_add(struct mu_cli_table *table, const char *fmt, ...)
{
    if (table->count == table->capacity) {
        table->capacity = table->capacity ? 2 * table->capacity : 64;
        table->cells = realloc(table->cells, (size_t)table->capacity * sizeof table->cells[0]);
        MU_ASSERT(table->cells);
    }
    va_list args;
    va_start(args, fmt);
    MU_ASSERT(vasprintf(&table->cells[table->count++], fmt, args) >= 0);
    va_end(args);
}

static void print_table(const struct mu_cli_table *table)
{
    for (int row = 0; row * table->columns < table->count; row++) {
        for (int column = 0; column < table->columns; column++) {
            size_t width = 0;
            for (int i = column; i < table->count; i += table->columns) {
                size_t length = strlen(table->cells[i]);
                width = length > width ? length : width;
            }
            const char *cell = table->cells[row * table->columns + column];
            if (column + 1 == table->columns)
                printf("%s\n", cell);
            else
                printf("%-*s  ", (int)width, cell);
        }
    }
}

void mu_cli_table_end(struct mu_cli_table *table, int code)
{
    if (!table)
        return;
    if (code == MU_EXIT_OK)
        print_table(table);
    for (int i = 0; i < table->count; i++)
        free(table->cells[i]);
    free(table->cells);
    free(table);
}

void mu_cli_table_print_free(struct mu_cli_table *table)
{
    mu_cli_table_end(table, MU_EXIT_OK);
}

void mu_cli_count(double value, char out[16])
{
    static const char *const units[] = {"", "k", "M", "G", "T", "P"};
    int unit = 0;
    for (; value >= 1000 && unit < 5; unit++)
        value /= 1000;
    snprintf(out, 16, unit == 0 || value >= 100 ? "%.0f%s" : value >= 10 ? "%.1f%s" : "%.2f%s", value, units[unit]);
}

void mu_cli_bytes(uint64_t bytes, char out[16])
{
    char count[16];
    mu_cli_count((double)bytes, count);
    snprintf(out, 16, "%.13sB", count);
}

void mu_cli_age(uint64_t wall_us, char out[16])
{
    uint64_t now = mu_clock_wall_us();
    uint64_t seconds = wall_us == 0 || wall_us > now ? 0 : (now - wall_us) / 1000000;
    if (wall_us == 0)
        snprintf(out, 16, "-");
    else if (seconds < 120)
        snprintf(out, 16, "%llus", (unsigned long long)seconds);
    else if (seconds < 7200)
        snprintf(out, 16, "%llum", (unsigned long long)(seconds / 60));
    else if (seconds < 172800)
        snprintf(out, 16, "%lluh", (unsigned long long)(seconds / 3600));
    else
        snprintf(out, 16, "%llud", (unsigned long long)(seconds / 86400));
}

void mu_cli_layout(const Muster__V1__Layout *layout, char out[MU_CLI_LAYOUT_SIZE])
{
    char degrees[32], idle[20] = "";
    if (!layout) {
        snprintf(out, MU_CLI_LAYOUT_SIZE, "-");
        return;
    }
    if (layout->tp * layout->pp > 1)
        snprintf(degrees, sizeof degrees, "tp%u pp%u dp%u", layout->tp, layout->pp, layout->dp);
    else
        snprintf(degrees, sizeof degrees, "dp%u", layout->dp);
    if (layout->idle)
        snprintf(idle, sizeof idle, " +%u idle", layout->idle);
    snprintf(out, MU_CLI_LAYOUT_SIZE, "%s%s%s%s", degrees, layout->sharded ? " sharded" : "",
             layout->buddy_shift ? " buddies" : "", idle);
}
