#include "coordinator/reflection.h"

#include <string.h>

#include "grpc/reflection/v1/reflection.pb-c.h"
#include "proto/served.h"
#include "proto/wire_pb.h"

/* ---- the descriptors, read where they lie: google/protobuf/descriptor.proto says what the numbers are ---- */

enum {
    SET_FILE = 1,
    FILE_NAME = 1,
    FILE_PACKAGE = 2,
    FILE_IMPORT = 3,
    FILE_MESSAGE = 4,
    FILE_ENUM = 5,
    FILE_SERVICE = 6,
    ANY_NAME = 1, /* of messages, enums, services, methods */
    MESSAGE_NESTED = 3,
    MESSAGE_ENUM = 4,
    SERVICE_METHOD = 2,
    FILES_MAX = 16,
};

struct piece {
    const uint8_t *data;
    size_t size_bytes;
};

static uint64_t read_varint(struct piece *rest)
{
    uint64_t value = 0;
    for (unsigned shift = 0; rest->size_bytes > 0; shift += 7) {
        uint8_t byte = *rest->data++;
        rest->size_bytes--;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            break;
    }
    return value;
}

/* Steps over one field of a message that protoc wrote (so it is well formed); *ret_value is empty for a number. False
 * at its end. */
static bool next_field(struct piece *rest, unsigned *ret_number, struct piece *ret_value)
{
    if (rest->size_bytes == 0)
        return false;
    uint64_t key = read_varint(rest);
    *ret_number = (unsigned)(key >> 3);
    *ret_value = (struct piece){0};
    if ((key & 7) == 2) {
        size_t size_bytes = (size_t)read_varint(rest);
        MU_ASSERT(size_bytes <= rest->size_bytes);
        *ret_value = (struct piece){rest->data, size_bytes};
        rest->data += size_bytes;
        rest->size_bytes -= size_bytes;
    } else {
        MU_ASSERT((key & 7) == 0);
        read_varint(rest);
    }
    return true;
}

/* The `index`-th field of that number; false: there are fewer. */
static bool find_field(struct piece message, unsigned number, size_t index, struct piece *ret_value)
{
    unsigned found = 0;
    while (next_field(&message, &found, ret_value))
        if (found == number && index-- == 0)
            return true;
    return false;
}

static struct piece the_set(void)
{
    return (struct piece){mu_served_set, mu_served_set_bytes()};
}

static bool equals(struct piece piece, const char *text)
{
    return piece.size_bytes == strlen(text) && memcmp(piece.data, text, piece.size_bytes) == 0;
}

static bool find_file(const char *name, struct piece *ret_file)
{
    struct piece own;
    for (size_t i = 0; find_field(the_set(), SET_FILE, i, ret_file); i++)
        if (find_field(*ret_file, FILE_NAME, 0, &own) && equals(own, name))
            return true;
    return false;
}

/* Takes "name" or "name." off the front of *symbol. */
static bool take_name(const char **symbol, struct piece name)
{
    const char *text = *symbol;
    if (strncmp(text, (const char *)name.data, name.size_bytes) != 0)
        return false;
    text += name.size_bytes;
    if (*text != 0 && *text != '.')
        return false;
    *symbol = *text == '.' ? text + 1 : text;
    return true;
}

/* Is `symbol` (without the package) declared in this list of a file or message? Messages nest. */
static bool declares(struct piece scope, unsigned number, const char *symbol)
{
    struct piece item, name;
    for (size_t i = 0; find_field(scope, number, i, &item); i++) {
        const char *rest = symbol;
        if (!find_field(item, ANY_NAME, 0, &name) || !take_name(&rest, name))
            continue;
        if (*rest == 0)
            return true;
        if (number == FILE_SERVICE)
            return declares(item, SERVICE_METHOD, rest);
        return number != FILE_ENUM && number != SERVICE_METHOD &&
               (declares(item, MESSAGE_NESTED, rest) || declares(item, MESSAGE_ENUM, rest));
    }
    return false;
}

static bool find_symbol(const char *symbol, struct piece *ret_file)
{
    struct piece package;
    for (size_t i = 0; find_field(the_set(), SET_FILE, i, ret_file); i++) {
        const char *rest = symbol;
        if (find_field(*ret_file, FILE_PACKAGE, 0, &package) && take_name(&rest, package) &&
            (declares(*ret_file, FILE_MESSAGE, rest) || declares(*ret_file, FILE_ENUM, rest) ||
             declares(*ret_file, FILE_SERVICE, rest)))
            return true;
    }
    return false;
}

/* ---- answers ---- */

typedef Grpc__Reflection__V1__ServerReflectionResponse response;
#define CASE(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##name

static void fail(struct mu_wire_arena *arena, response *out, enum mu_rpc_code code, const char *text)
{
    out->error_response = mu_wire_arena_alloc(arena, sizeof *out->error_response);
    if (!out->error_response)
        return;
    grpc__reflection__v1__error_response__init(out->error_response);
    out->error_response->error_code = code;
    out->error_response->error_message = (char *)(uintptr_t)text;
    out->message_response_case = CASE(ERROR_RESPONSE);
}

/* A file with all that it imports, each once. */
static void give_file(struct mu_wire_arena *arena, response *out, struct piece file)
{
    Grpc__Reflection__V1__FileDescriptorResponse *files = mu_wire_arena_alloc(arena, sizeof *files);
    if (!files)
        return;
    grpc__reflection__v1__file_descriptor_response__init(files);
    files->file_descriptor_proto = mu_wire_arena_alloc(arena, FILES_MAX * sizeof *files->file_descriptor_proto);
    if (!files->file_descriptor_proto)
        return;
    files->file_descriptor_proto[files->n_file_descriptor_proto++] =
        (ProtobufCBinaryData){file.size_bytes, (uint8_t *)(uintptr_t)file.data};
    for (size_t done = 0; done < files->n_file_descriptor_proto; done++) {
        struct piece from = {files->file_descriptor_proto[done].data, files->file_descriptor_proto[done].len};
        struct piece name, candidate, own;
        for (size_t i = 0; find_field(from, FILE_IMPORT, i, &name); i++) {
            for (size_t k = 0; find_field(the_set(), SET_FILE, k, &candidate); k++) {
                bool is_it = find_field(candidate, FILE_NAME, 0, &own) && own.size_bytes == name.size_bytes &&
                             memcmp(own.data, name.data, name.size_bytes) == 0;
                for (size_t j = 0; is_it && j < files->n_file_descriptor_proto; j++)
                    is_it = files->file_descriptor_proto[j].data != candidate.data;
                if (!is_it)
                    continue;
                MU_ASSERT(files->n_file_descriptor_proto < FILES_MAX);
                files->file_descriptor_proto[files->n_file_descriptor_proto++] =
                    (ProtobufCBinaryData){candidate.size_bytes, (uint8_t *)(uintptr_t)candidate.data};
            }
        }
    }
    out->file_descriptor_response = files;
    out->message_response_case = CASE(FILE_DESCRIPTOR_RESPONSE);
}

static char *full_name(struct mu_wire_arena *arena, struct piece package, struct piece name)
{
    char *text = mu_wire_arena_alloc(arena, package.size_bytes + name.size_bytes + 2);
    if (!text)
        return NULL;
    memcpy(text, package.data, package.size_bytes);
    text[package.size_bytes] = '.';
    memcpy(text + package.size_bytes + 1, name.data, name.size_bytes);
    text[package.size_bytes + 1 + name.size_bytes] = 0;
    return text;
}

static void list_services(struct mu_wire_arena *arena, response *out)
{
    Grpc__Reflection__V1__ListServiceResponse *list = mu_wire_arena_alloc(arena, sizeof *list);
    if (!list)
        return;
    grpc__reflection__v1__list_service_response__init(list);
    list->service = mu_wire_arena_alloc(arena, FILES_MAX * sizeof *list->service);
    struct piece file, package, service, name;
    for (size_t i = 0; list->service && find_field(the_set(), SET_FILE, i, &file); i++) {
        if (!find_field(file, FILE_PACKAGE, 0, &package))
            continue;
        for (size_t k = 0; find_field(file, FILE_SERVICE, k, &service); k++) {
            Grpc__Reflection__V1__ServiceResponse *one = mu_wire_arena_alloc(arena, sizeof *one);
            if (!one || !find_field(service, ANY_NAME, 0, &name))
                return;
            grpc__reflection__v1__service_response__init(one);
            if (!(one->name = full_name(arena, package, name)))
                return;
            MU_ASSERT(list->n_service < FILES_MAX);
            list->service[list->n_service++] = one;
        }
    }
    out->list_services_response = list;
    out->message_response_case = CASE(LIST_SERVICES_RESPONSE);
}

static void answer(struct mu_wire_arena *arena, const Grpc__Reflection__V1__ServerReflectionRequest *request,
                   response *out)
{
    struct piece file;
    switch (request->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        if (find_file(request->file_by_filename, &file))
            give_file(arena, out, file);
        else
            fail(arena, out, MU_RPC_NOT_FOUND, "there is no such file here");
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        if (find_symbol(request->file_containing_symbol, &file))
            give_file(arena, out, file);
        else
            fail(arena, out, MU_RPC_NOT_FOUND, "there is no such service, method, message or enum here");
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        fail(arena, out, MU_RPC_NOT_FOUND, "no message here has extensions");
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        list_services(arena, out);
        break;
    default:
        fail(arena, out, MU_RPC_INVALID_ARGUMENT, "message_request: nothing is asked");
        break;
    }
}

void mu_reflection_message(struct mu_wire_arena *arena, struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    struct mu_error err = {0};
    const ProtobufCMessage *base = NULL;
    response out = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    const void *packed = NULL;
    size_t packed_bytes = 0;
    mu_wire_arena_reset(arena);
    enum mu_status status = mu_wire_unpack(arena, &grpc__reflection__v1__server_reflection_request__descriptor, data,
                                           size_bytes, MU_WIRE_REQUEST_BYTES_MAX, &base, &err);
    if (status == MU_OK) {
        out.original_request = (Grpc__Reflection__V1__ServerReflectionRequest *)(uintptr_t)base;
        out.valid_host = out.original_request->host;
        answer(arena, out.original_request, &out);
        status = mu_wire_pack(arena, &out.base, MU_WIRE_REPLY_BYTES_MAX, &packed, &packed_bytes, &err);
    }
    if (status == MU_OK) {
        struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(packed, packed_bytes);
        status = mu_rpc_call_send(call, bytes);
        mu_rpc_bytes_unref(bytes);
        if (status == MU_ERR_LIMIT)
            mu_fail(&err, MU_ERR_LIMIT, "this stream asks faster than it reads its answers");
    }
    if (status != MU_OK && status != MU_ERR_CANCELLED) /* when cancelled, CLOSED comes */
        mu_rpc_call_fail_error(call, &err);
}
