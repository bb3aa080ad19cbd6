/* The stored records: keys, values, and reading all of them back.
 *
 *    m/format            version of the layout              g/<job>                generation
 *    m/epoch             see snapshot.h; absent: 0          t/<job>                tally
 *    d/<slot>            death (8 bytes, the most           r/<slot>               request (likewise)
 *                        significant first)
 *    a/<job>/<worker>    account of a worker's time
 *    j/<job>             job                                c/<job>/<number>       checkpoint (likewise)
 *    w/<worker>          worker                             e/<number>             event (likewise)
 *    k/<id>              join token (muster.v1.TokenRecord; see tokens.h)
 *
 * Values are muster.v1.StoredRecord. What is read back is judged like anything from outside: a damaged or contradictory
 * record is an error that names its key, never a crash. Not thread-safe; pointers of a decoded record lie in the arena.
 */
#ifndef MU_COORDINATOR_RECORDS_H
#define MU_COORDINATOR_RECORDS_H

#include "coordinator/core/core.h"
#include "proto/wire_pb.h"
#include "storage/store.h"

enum {
    MU_RECORD_VERSION = 1,
    MU_STORE_FORMAT = 5, /* of all records together: "muster 5". 4: without roll backs and branches; 3: without
                            amendments; 2: without requests and accounts; 1: without tallies, deaths and epochs, too */
    MU_RECORD_KEY_SIZE = 136,
};

#define MU_FORMAT_KEY       "m/format"
#define MU_EPOCH_KEY        "m/epoch"
#define MU_TOKEN_KEY_PREFIX "k/"

extern const char mu_record_prefixes[MU_RECORD_KIND_COUNT][3]; /* of the keys of each kind */

/* Writes the key of the record and returns its size. Only the fields that make the key are looked at. */
size_t mu_record_key(const struct mu_record *record, uint8_t out[MU_RECORD_KEY_SIZE]);

enum mu_status mu_record_encode(struct mu_wire_arena *arena, const struct mu_record *record, const void **ret_data,
                                size_t *ret_size_bytes, struct mu_error *err) MU_WARN_UNUSED;
/* The key must be the one of the value. MU_ERR_CORRUPT otherwise. */
enum mu_status mu_record_decode(struct mu_wire_arena *arena, const void *key, size_t key_bytes, const void *data,
                                size_t size_bytes, struct mu_record *ret_record, struct mu_error *err) MU_WARN_UNUSED;

/* Calls `fn` for every record: jobs, generations, checkpoints, workers, then events, each in order of the keys. The
 * record is valid during the call. An empty store is given its format version; one of an older version is
 * raised to this one, one of a newer version is refused. */
typedef enum mu_status (*mu_record_fn)(void *arg, const struct mu_record *record, struct mu_error *err);
enum mu_status mu_records_load(struct mu_store *store, mu_record_fn fn, void *arg, struct mu_error *err) MU_WARN_UNUSED;

/* MU_ERR_CORRUPT with one line: not written by a coordinator, or by a newer one. */
enum mu_status mu_records_check_format(const char *value, size_t value_bytes, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_records_write_format(struct mu_store *store, struct mu_error *err) MU_WARN_UNUSED;
bool mu_records_read_epoch(const char *value, size_t value_bytes, uint64_t *ret_epoch);

/* An event on the wire; it borrows from `event` (text cleaned into the arena when needed). */
enum mu_status mu_event_to_pb(struct mu_wire_arena *arena, const struct mu_event_record *event, Muster__V1__Event *pb,
                              struct mu_error *err) MU_WARN_UNUSED;

/* NULL: the job began by itself; else `pb`, filled. */
Muster__V1__Origin *mu_origin_to_pb(struct mu_wire_arena *arena, const struct mu_job_record *job,
                                    Muster__V1__Origin *pb);

#endif
