/* Any message as JSON, by its descriptor: fields by their names, enums as words, bytes in hexadecimal, numbers beyond
 * 2^63 as strings, what is not finite as null. */
#ifndef MU_PROTO_JSON_H
#define MU_PROTO_JSON_H

#include <stdbool.h>

#include <protobuf-c/protobuf-c.h>

enum { MU_JSON_WORD_SIZE = 48 };

/* "JOB_STATE_RUNNING" of enum JobState -> "running": the type's own prefix goes, the rest in lower case. */
const char *mu_json_enum(const ProtobufCEnumDescriptor *descriptor, int value, char out[MU_JSON_WORD_SIZE]);
/* From malloc; NULL: no memory. */
char *mu_json_of(const ProtobufCMessage *message, bool one_line);

#endif
