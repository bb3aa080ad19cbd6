/* For the few files that handle generated protobuf-c types themselves (the service in coordinator/api.c, the stored
 * records, the command line): unpacking with the same care as wire.h, packing, and conversions of the shared parts.
 *
 * Messages built here borrow: never pass them to a generated free_unpacked function; the arena owns their memory. */
#ifndef MU_PROTO_WIRE_PB_H
#define MU_PROTO_WIRE_PB_H

#include <stdbool.h>

#include <protobuf-c/protobuf-c.h>

#include "common/hash.h"
#include "common/id.h"
#include "muster/v1/job.pb-c.h"
#include "muster/v1/records.pb-c.h"
#include "muster/v1/service.pb-c.h"
#include "muster/v1/session.pb-c.h"
#include "proto/wire.h"

/* Judges the raw bytes and unpacks them into the arena (about 8 times size_bytes at most). Strings of the result are
 * clean UTF-8. Cast the result to the type of `descriptor`, e.g. &muster__v1__get_job_request__descriptor. */
enum mu_status mu_wire_unpack(struct mu_wire_arena *arena, const ProtobufCMessageDescriptor *descriptor,
                              const void *data, size_t size_bytes, size_t size_bytes_max,
                              const ProtobufCMessage **ret_message, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_pack(struct mu_wire_arena *arena, const ProtobufCMessage *message, size_t size_bytes_max,
                            const void **ret_data, size_t *ret_size_bytes, struct mu_error *err) MU_WARN_UNUSED;

/* Job specs. From the wire: absent fields take their defaults, then mu_job_spec_check judges all of it. */
enum mu_status mu_wire_spec_to_pb(struct mu_wire_arena *arena, const struct mu_job_spec *spec,
                                  Muster__V1__JobSpec **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_spec_from_pb(const Muster__V1__JobSpec *pb, struct mu_job_spec *ret_spec,
                                    struct mu_error *err) MU_WARN_UNUSED;

/* Amendments (wire_amend.c). NULL is none. */
enum mu_status mu_wire_amendments_to_pb(struct mu_wire_arena *arena, const struct mu_amendments *amendments,
                                        size_t *ret_count, Muster__V1__Amendment ***ret_pb,
                                        struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_amendments_from_pb(size_t count, Muster__V1__Amendment *const *pb, uint32_t newest,
                                          struct mu_amendments *ret_amendments, struct mu_error *err) MU_WARN_UNUSED;
void mu_wire_amendment_from_pb(const Muster__V1__Amendment *pb, struct mu_amendment *ret_amendment);

/* Strings: how a field must look. `field` names it in errors ("Hello.name"). */
enum mu_wire_string {
    MU_WIRE_TEXT,       /* anything clean, may be empty */
    MU_WIRE_NAME,       /* job or worker name */
    MU_WIRE_NAME_EMPTY, /* the same, or empty */
    MU_WIRE_FILE,       /* [A-Za-z0-9][A-Za-z0-9._-]*, or empty */
    MU_WIRE_WORD,       /* [a-z0-9_-]*, may be empty */
};
enum mu_status mu_wire_get_string(const char *pb, enum mu_wire_string kind, const char *field, char *ret_text,
                                  size_t capacity, struct mu_error *err) MU_WARN_UNUSED;
/* For encoding: `text` if it is of that kind and within capacity, else an error. */
enum mu_status mu_wire_put_string(const char *text, enum mu_wire_string kind, const char *field, size_t capacity,
                                  char **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
/* For encoding free texts: a cleaned copy in the arena when needed. NULL only without memory. */
char *mu_wire_put_text(struct mu_wire_arena *arena, const char *text, size_t capacity);

/* Identities and digests. `get` takes exactly the right number of bytes, or none for zero. */
enum mu_status mu_wire_get_id(ProtobufCBinaryData pb, const char *field, struct mu_id *ret_id,
                              struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_get_hash(ProtobufCBinaryData pb, const char *field, struct mu_hash128 *ret_hash,
                                struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_get_bytes32(ProtobufCBinaryData pb, const char *field, uint8_t ret_bytes[32],
                                   struct mu_error *err) MU_WARN_UNUSED;
/* 16 bytes in the arena, most significant first; empty for zero (and without memory, in which case mu_wire_pack fails
 * too). */
ProtobufCBinaryData mu_wire_put_id(struct mu_wire_arena *arena, struct mu_id id);
ProtobufCBinaryData mu_wire_put_hash(struct mu_wire_arena *arena, struct mu_hash128 hash);
ProtobufCBinaryData mu_wire_put_bytes32(const uint8_t bytes[32]); /* borrows; empty when all are zero */

/* Enums: `value` must be in [first, last]. */
enum mu_status mu_wire_get_enum(int value, int first, int last, const char *field, int *ret_value,
                                struct mu_error *err) MU_WARN_UNUSED;

/* Layouts. From the wire: everything is judged that does not depend on the job; a layout that a core takes from outside
 * must pass mu_layout_check as well. Encoding refuses what decoding would. `field` names it in errors. */
enum mu_status mu_wire_layout_to_pb(struct mu_wire_arena *arena, const struct mu_layout *layout, const char *field,
                                    Muster__V1__Layout **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_layout_from_pb(const Muster__V1__Layout *pb, const char *field, struct mu_layout *ret_layout,
                                      struct mu_error *err) MU_WARN_UNUSED;

/* Checkpoints of kind local (wire_keep.c). */
enum mu_status mu_wire_holders_to_pb(struct mu_wire_arena *arena, const struct mu_holder *holders, uint32_t count,
                                     size_t *ret_count, Muster__V1__Holder ***ret_pb,
                                     struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_holders_from_pb(struct mu_wire_arena *arena, size_t count, Muster__V1__Holder *const *pb,
                                       const struct mu_holder **ret_holders, uint32_t *ret_count,
                                       struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_keep_to_pb(struct mu_wire_arena *arena, const struct mu_keep_order *order,
                                  Muster__V1__Keep **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_keep_from_pb(struct mu_wire_arena *arena, const Muster__V1__Keep *pb, struct mu_keep_order *out,
                                    struct mu_error *err) MU_WARN_UNUSED;

/* Parts of a numeric identity. The encoded ones borrow their names. */
enum mu_status mu_wire_identity_to_pb(struct mu_wire_arena *arena, const struct mu_identity_parts *parts,
                                      size_t *ret_count, Muster__V1__IdentityPart ***ret_pb,
                                      struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_identity_from_pb(size_t count, Muster__V1__IdentityPart *const *pb,
                                        struct mu_identity_parts *ret_parts, struct mu_error *err) MU_WARN_UNUSED;

/* Probes (wire_probe.c). */
enum mu_status mu_wire_probe_to_pb(struct mu_wire_arena *arena, const struct mu_probe_order *order,
                                   Muster__V1__ProbeOrder **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_probe_from_pb(const Muster__V1__ProbeOrder *pb, struct mu_probe_order *out,
                                     struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_probed_to_pb(struct mu_wire_arena *arena, const struct mu_probe_report *report,
                                    Muster__V1__Probed **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_probed_from_pb(const Muster__V1__Probed *pb, struct mu_probe_report *out,
                                      struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_probe_alone_to_pb(struct mu_wire_arena *arena, const struct mu_probe_alone *alone,
                                         Muster__V1__ProbeAlone **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_probe_alone_from_pb(const Muster__V1__ProbeAlone *pb, struct mu_probe_alone *ret_alone,
                                           struct mu_error *err) MU_WARN_UNUSED;
void mu_wire_probe_pair_to_pb(const struct mu_probe_pair *pair, Muster__V1__ProbePair *pb);
enum mu_status mu_wire_probe_pair_from_pb(const Muster__V1__ProbePair *pb, struct mu_probe_pair *ret_pair,
                                          struct mu_error *err) MU_WARN_UNUSED;

/* Health of a GPU (wire_gpu.c). */
enum mu_status mu_wire_gpu_to_pb(struct mu_wire_arena *arena, const struct mu_gpu_sample *sample,
                                 Muster__V1__GpuSigns **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_gpu_from_pb(const Muster__V1__GpuSigns *pb, struct mu_gpu_sample *ret_sample,
                                   struct mu_error *err) MU_WARN_UNUSED;

/* Results. The filled message borrows nothing. */
void mu_wire_result_to_pb(const struct mu_step_result *result, Muster__V1__StepResult *pb);
void mu_wire_result_from_pb(const Muster__V1__StepResult *pb,
                            struct mu_step_result *ret_result); /* NULL pb: all zero */

#endif
