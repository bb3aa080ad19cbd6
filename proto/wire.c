#include "proto/wire_pb.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/utf8.h"

enum {
    BLOCK_BYTES_MIN = 64 << 10,
    KEEP_BYTES_MAX = 1 << 20,
    UNPACK_BASE_BYTES = 64 << 10, /* an unpacked message may take so much ... */
    UNPACK_FACTOR = 8, /* ... and so many bytes for each on the wire: twice what dense legitimate ones need */
    SHOWN_SIZE = 64,   /* most of a refused value that an error line repeats */
    WIRE_VARINT = 0,
    WIRE_64 = 1,
    WIRE_BYTES = 2,
    WIRE_32 = 5,
};

/* ---- arena ---- */

struct mu_wire_block {
    struct mu_wire_block *next;
    size_t capacity_bytes, used_bytes;
    _Alignas(16) uint8_t data[];
};

void mu_wire_arena_init(struct mu_wire_arena *arena)
{
    *arena = (struct mu_wire_arena){.keep_bytes = BLOCK_BYTES_MIN};
}

static void free_blocks(struct mu_wire_arena *arena)
{
    while (arena->blocks) {
        struct mu_wire_block *block = arena->blocks;
        arena->blocks = block->next;
        free(block);
    }
}

/* One block that turned out too small is replaced by one for the whole, so that the next round of the same size
 * allocates nothing. */
void mu_wire_arena_reset(struct mu_wire_arena *arena)
{
    size_t total_bytes = 0;
    arena->failed = false;
    for (const struct mu_wire_block *block = arena->blocks; block; block = block->next)
        total_bytes += block->capacity_bytes;
    if (arena->blocks && !arena->blocks->next && total_bytes <= KEEP_BYTES_MAX) {
        arena->blocks->used_bytes = 0;
        return;
    }
    free_blocks(arena);
    if (total_bytes > KEEP_BYTES_MAX)
        total_bytes = BLOCK_BYTES_MIN;
    if (total_bytes > arena->keep_bytes)
        arena->keep_bytes = total_bytes;
}

void mu_wire_arena_fini(struct mu_wire_arena *arena)
{
    free_blocks(arena);
}

static void *raw_alloc(struct mu_wire_arena *arena, size_t size_bytes)
{
    if (size_bytes > SIZE_MAX / 2) {
        arena->failed = true;
        return NULL;
    }
    size_bytes = (size_bytes + 15) & ~(size_t)15;
    struct mu_wire_block *block = arena->blocks;
    if (!block || block->capacity_bytes - block->used_bytes < size_bytes) {
        size_t capacity_bytes = arena->keep_bytes > BLOCK_BYTES_MIN ? arena->keep_bytes : BLOCK_BYTES_MIN;
        if (capacity_bytes < size_bytes)
            capacity_bytes = size_bytes;
        block = malloc(sizeof *block + capacity_bytes);
        if (!block) {
            arena->failed = true;
            return NULL;
        }
        *block = (struct mu_wire_block){.next = arena->blocks, .capacity_bytes = capacity_bytes};
        arena->blocks = block;
    }
    void *memory = block->data + block->used_bytes;
    block->used_bytes += size_bytes;
    return memory;
}

void *mu_wire_arena_alloc(struct mu_wire_arena *arena, size_t size_bytes)
{
    void *memory = raw_alloc(arena, size_bytes ? size_bytes : 1);
    if (memory)
        memset(memory, 0, size_bytes);
    return memory;
}

/* ---- texts ---- */

static bool clean_bytes(const uint8_t *p, size_t size_bytes)
{
    while (size_bytes > 0) {
        size_t length = mu_utf8_clean(p, size_bytes);
        if (length == 0)
            return false;
        p += length;
        size_bytes -= length;
    }
    return true;
}

bool mu_wire_text_ok(const char *text, size_t capacity)
{
    size_t length = strnlen(text, capacity);
    return length < capacity && clean_bytes((const uint8_t *)text, length);
}

void mu_wire_text_clean(const char *text, char *out, size_t capacity)
{
    size_t left = strlen(text), used = 0;
    const uint8_t *p = (const uint8_t *)text;
    MU_ASSERT(capacity > 0);
    while (left > 0) {
        size_t length = mu_utf8_clean(p, left), step = length ? length : 1;
        if (used + step >= capacity)
            break;
        if (length)
            memcpy(out + used, p, length);
        else
            out[used] = '?';
        used += step;
        p += step;
        left -= step;
    }
    out[used] = 0;
}

bool mu_wire_name_ok(const char *name, size_t capacity)
{
    static const char others[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t length = strnlen(name, capacity);
    if (length == 0 || length >= capacity || !memchr(others, name[0], sizeof others - 4))
        return false;
    return strspn(name, others) == length;
}

void mu_wire_name_clean(const char *text, char *out, size_t capacity)
{
    size_t length = 0;
    for (; text[length] && length + 1 < capacity; length++) {
        char c = text[length] >= 'A' && text[length] <= 'Z' ? (char)(text[length] + 32) : text[length];
        bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
        out[length] = plain || (length && (c == '.' || c == '-')) ? c : length ? '_' : 'x';
    }
    if (length == 0)
        out[length++] = 'x';
    out[length] = 0;
}

static bool file_ok(const char *text)
{
    static const char others[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    return text[0] == 0 || (text[0] != '.' && text[0] != '_' && text[0] != '-' && text[strspn(text, others)] == 0);
}

static bool string_ok(const char *text, enum mu_wire_string kind, size_t capacity)
{
    switch (kind) {
    case MU_WIRE_TEXT:
        return mu_wire_text_ok(text, capacity);
    case MU_WIRE_NAME:
        return mu_wire_name_ok(text, capacity);
    case MU_WIRE_NAME_EMPTY:
        return text[0] == 0 || mu_wire_name_ok(text, capacity);
    case MU_WIRE_FILE:
        return strnlen(text, capacity) < capacity && file_ok(text);
    case MU_WIRE_WORD:
        return strnlen(text, capacity) < capacity && text[strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789_-")] == 0;
    }
    return false;
}

static enum mu_status refuse_string(const char *text, enum mu_wire_string kind, const char *field, size_t capacity,
                                    struct mu_error *err)
{
    static const char *const allowed[] = {
        [MU_WIRE_TEXT] = "UTF-8 text without control characters",
        [MU_WIRE_NAME] = "a-z 0-9 . _ - with a letter or digit first, not empty",
        [MU_WIRE_NAME_EMPTY] = "a-z 0-9 . _ - with a letter or digit first",
        [MU_WIRE_FILE] = "a file name of A-Z a-z 0-9 . _ - with a letter or digit first",
        [MU_WIRE_WORD] = "a word of a-z 0-9 _ -",
    };
    char shown[SHOWN_SIZE];
    mu_wire_text_clean(text, shown, sizeof shown);
    return mu_fail(err, MU_ERR_INVALID, "%s: '%s' is not allowed: %s, at most %zu bytes", field, shown, allowed[kind],
                   capacity - 1);
}

enum mu_status mu_wire_get_string(const char *pb, enum mu_wire_string kind, const char *field, char *ret_text,
                                  size_t capacity, struct mu_error *err)
{
    if (!pb)
        pb = "";
    if (!string_ok(pb, kind, capacity))
        return refuse_string(pb, kind, field, capacity, err);
    memcpy(ret_text, pb, strlen(pb) + 1);
    return MU_OK;
}

enum mu_status mu_wire_put_string(const char *text, enum mu_wire_string kind, const char *field, size_t capacity,
                                  char **ret_pb, struct mu_error *err)
{
    if (!string_ok(text, kind, capacity))
        return refuse_string(text, kind, field, capacity, err);
    *ret_pb = (char *)text;
    return MU_OK;
}

char *mu_wire_put_text(struct mu_wire_arena *arena, const char *text, size_t capacity)
{
    if (mu_wire_text_ok(text, capacity))
        return (char *)text;
    char *copy = raw_alloc(arena, capacity);
    if (copy)
        mu_wire_text_clean(text, copy, capacity);
    return copy;
}

/* ---- identities, digests, enums ---- */

static void put_big_endian(uint8_t *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> (56 - 8 * i));
}

static uint64_t get_big_endian(const uint8_t *in)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | in[i];
    return value;
}

static ProtobufCBinaryData put_pair(struct mu_wire_arena *arena, uint64_t high, uint64_t low)
{
    if (high == 0 && low == 0)
        return (ProtobufCBinaryData){0};
    ProtobufCBinaryData pb = {.len = 16, .data = raw_alloc(arena, 16)};
    if (!pb.data)
        return (ProtobufCBinaryData){0}; /* mu_wire_pack sees that the arena has failed */
    put_big_endian(pb.data, high);
    put_big_endian(pb.data + 8, low);
    return pb;
}

static enum mu_status get_pair(ProtobufCBinaryData pb, const char *field, uint64_t *ret_high, uint64_t *ret_low,
                               struct mu_error *err)
{
    if (pb.len != 0 && pb.len != 16)
        return mu_fail(err, MU_ERR_INVALID, "%s: %zu bytes are not allowed: 16, or none", field, pb.len);
    *ret_high = pb.len ? get_big_endian(pb.data) : 0;
    *ret_low = pb.len ? get_big_endian(pb.data + 8) : 0;
    return MU_OK;
}

ProtobufCBinaryData mu_wire_put_id(struct mu_wire_arena *arena, struct mu_id id)
{
    return put_pair(arena, id.high, id.low);
}

ProtobufCBinaryData mu_wire_put_hash(struct mu_wire_arena *arena, struct mu_hash128 hash)
{
    return put_pair(arena, hash.high, hash.low);
}

ProtobufCBinaryData mu_wire_put_bytes32(const uint8_t bytes[32])
{
    static const uint8_t zero[32];
    if (memcmp(bytes, zero, 32) == 0)
        return (ProtobufCBinaryData){0};
    return (ProtobufCBinaryData){.len = 32, .data = (uint8_t *)bytes};
}

enum mu_status mu_wire_get_id(ProtobufCBinaryData pb, const char *field, struct mu_id *ret_id, struct mu_error *err)
{
    return get_pair(pb, field, &ret_id->high, &ret_id->low, err);
}

enum mu_status mu_wire_get_hash(ProtobufCBinaryData pb, const char *field, struct mu_hash128 *ret_hash,
                                struct mu_error *err)
{
    return get_pair(pb, field, &ret_hash->high, &ret_hash->low, err);
}

enum mu_status mu_wire_get_bytes32(ProtobufCBinaryData pb, const char *field, uint8_t ret_bytes[32],
                                   struct mu_error *err)
{
    if (pb.len != 0 && pb.len != 32)
        return mu_fail(err, MU_ERR_INVALID, "%s: %zu bytes are not allowed: 32, or none", field, pb.len);
    memset(ret_bytes, 0, 32);
    if (pb.len)
        memcpy(ret_bytes, pb.data, 32);
    return MU_OK;
}

enum mu_status mu_wire_get_enum(int value, int first, int last, const char *field, int *ret_value, struct mu_error *err)
{
    if (value < first || value > last)
        return mu_fail(err, MU_ERR_INVALID, "%s: value %d is not allowed: %d to %d", field, value, first, last);
    *ret_value = value;
    return MU_OK;
}

/* ---- raw bytes ---- */

struct scan {
    unsigned unknown_count;
    struct mu_error *err;
};

static bool read_varint(const uint8_t **p, const uint8_t *end, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && *p < end; shift += 7) {
        uint8_t byte = *(*p)++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *ret_value = value;
            return true;
        }
    }
    return false;
}

static bool wire_type_fits(const ProtobufCFieldDescriptor *field, unsigned wire_type)
{
    unsigned own;
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        return wire_type == WIRE_BYTES;
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        own = WIRE_64;
        break;
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
        own = WIRE_32;
        break;
    default:
        own = WIRE_VARINT;
        break;
    }
    return wire_type == own || (field->label == PROTOBUF_C_LABEL_REPEATED && wire_type == WIRE_BYTES); /* packed */
}

static enum mu_status malformed(struct scan *scan, const ProtobufCMessageDescriptor *descriptor)
{
    return mu_fail(scan->err, MU_ERR_INVALID,
                   "%s: the bytes are not a message of this type: it is cut short or damaged", descriptor->short_name);
}

static enum mu_status scan_message(struct scan *scan, const ProtobufCMessageDescriptor *descriptor, const uint8_t *p,
                                   const uint8_t *end, unsigned depth);

/* A length-delimited value of a known field. */
static enum mu_status scan_value(struct scan *scan, const ProtobufCMessageDescriptor *descriptor,
                                 const ProtobufCFieldDescriptor *field, const uint8_t *p, size_t size_bytes,
                                 unsigned depth)
{
    if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
        if (depth + 1 >= MU_WIRE_DEPTH_MAX)
            return mu_fail(scan->err, MU_ERR_INVALID, "%s.%s: messages are nested more than %d deep",
                           descriptor->short_name, field->name, MU_WIRE_DEPTH_MAX);
        return scan_message(scan, field->descriptor, p, p + size_bytes, depth + 1);
    }
    if (field->type == PROTOBUF_C_TYPE_STRING && !clean_bytes(p, size_bytes))
        return mu_fail(scan->err, MU_ERR_INVALID,
                       "%s.%s: not allowed: UTF-8 text without NUL and other control characters",
                       descriptor->short_name, field->name);
    return MU_OK;
}

static enum mu_status scan_field(struct scan *scan, const ProtobufCMessageDescriptor *descriptor, const uint8_t **p,
                                 const uint8_t *end, uint64_t *seen, unsigned depth)
{
    uint64_t tag = 0, size_bytes = 0;
    if (!read_varint(p, end, &tag) || tag >> 32 || tag >> 3 == 0)
        return malformed(scan, descriptor);
    unsigned wire_type = (unsigned)(tag & 7);
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(descriptor, (unsigned)(tag >> 3));
    if (!field && ++scan->unknown_count > MU_WIRE_UNKNOWN_MAX)
        return mu_fail(scan->err, MU_ERR_LIMIT, "%s: more than %d fields that this version does not know",
                       descriptor->short_name, MU_WIRE_UNKNOWN_MAX);
    if (field && !wire_type_fits(field, wire_type))
        return mu_fail(scan->err, MU_ERR_INVALID, "%s.%s: has another type on the wire", descriptor->short_name,
                       field->name);
    if (field && field->label != PROTOBUF_C_LABEL_REPEATED) {
        uint64_t bit = 1ull << (field - descriptor->fields);
        if (*seen & bit)
            return mu_fail(scan->err, MU_ERR_INVALID, "%s.%s: is given twice", descriptor->short_name, field->name);
        *seen |= bit;
    }
    switch (wire_type) {
    case WIRE_VARINT:
        return read_varint(p, end, &size_bytes) ? MU_OK : malformed(scan, descriptor);
    case WIRE_BYTES:
        if (!read_varint(p, end, &size_bytes))
            return malformed(scan, descriptor);
        break;
    case WIRE_64:
        size_bytes = 8;
        break;
    case WIRE_32:
        size_bytes = 4;
        break;
    default:
        return malformed(scan, descriptor);
    }
    if (size_bytes > (size_t)(end - *p))
        return malformed(scan, descriptor);
    const uint8_t *value = *p;
    *p += size_bytes;
    return field && wire_type == WIRE_BYTES ? scan_value(scan, descriptor, field, value, (size_t)size_bytes, depth)
                                            : MU_OK;
}

static enum mu_status scan_message(struct scan *scan, const ProtobufCMessageDescriptor *descriptor, const uint8_t *p,
                                   const uint8_t *end, unsigned depth)
{
    uint64_t seen = 0;
    enum mu_status status = MU_OK;
    MU_ASSERT(descriptor->n_fields <= 64);
    while (p < end && status == MU_OK)
        status = scan_field(scan, descriptor, &p, end, &seen, depth);
    return status;
}

/* ---- unpack, pack ---- */

struct budget {
    struct mu_wire_arena *arena;
    size_t left_bytes;
};

static void *budget_alloc(void *data, size_t size_bytes)
{
    struct budget *budget = data;
    if (size_bytes > budget->left_bytes)
        return NULL;
    budget->left_bytes -= size_bytes;
    return raw_alloc(budget->arena, size_bytes);
}

static void budget_free(void *data, void *memory)
{
    (void)data; /* the arena frees everything at once */
    (void)memory;
}

enum mu_status mu_wire_unpack(struct mu_wire_arena *arena, const ProtobufCMessageDescriptor *descriptor,
                              const void *data, size_t size_bytes, size_t size_bytes_max,
                              const ProtobufCMessage **ret_message, struct mu_error *err)
{
    if (size_bytes > size_bytes_max)
        return mu_fail(err, MU_ERR_LIMIT, "%s: %zu bytes are not allowed: at most %zu", descriptor->short_name,
                       size_bytes, size_bytes_max);
    static const uint8_t nothing;
    const uint8_t *bytes = size_bytes ? data : &nothing;
    struct scan scan = {.err = err};
    enum mu_status status = scan_message(&scan, descriptor, bytes, bytes + size_bytes, 0);
    if (status)
        return status;
    struct budget budget = {.arena = arena, .left_bytes = UNPACK_BASE_BYTES + UNPACK_FACTOR * size_bytes};
    ProtobufCAllocator allocator = {.alloc = budget_alloc, .free = budget_free, .allocator_data = &budget};
    const ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, &allocator, size_bytes, bytes);
    if (!message)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: %zu bytes cannot be unpacked: damaged, or more memory than they may take",
                       descriptor->short_name, size_bytes);
    *ret_message = message;
    return MU_OK;
}

enum mu_status mu_wire_pack(struct mu_wire_arena *arena, const ProtobufCMessage *message, size_t size_bytes_max,
                            const void **ret_data, size_t *ret_size_bytes, struct mu_error *err)
{
    size_t size_bytes = protobuf_c_message_get_packed_size(message);
    if (size_bytes > size_bytes_max)
        return mu_fail(err, MU_ERR_LIMIT, "%s: %zu bytes are not allowed: at most %zu", message->descriptor->short_name,
                       size_bytes, size_bytes_max);
    uint8_t *bytes = raw_alloc(arena, size_bytes ? size_bytes : 1);
    if (arena->failed)
        return mu_fail(err, MU_ERR_NO_MEMORY, "%s: no memory for %zu bytes", message->descriptor->short_name,
                       size_bytes);
    size_t packed_bytes = protobuf_c_message_pack(message, bytes);
    MU_ASSERT(packed_bytes == size_bytes);
    *ret_data = bytes;
    *ret_size_bytes = size_bytes;
    return MU_OK;
}
