/* Snapshots of the coordinator's store: one file with every record as of one moment, and a store made again from it.
 *
 *    "muster snapshot 1\n"  (key_bytes u32, value_bytes u32, key, value)*  0 u32, 0 u32  XXH3-128 of all before
 *
 * Numbers are little-endian. A snapshot is older than what the workers have: generations, commands, checkpoints and
 * events may have been numbered since. So a restored store begins a new **epoch**: its numbers go on from
 * epoch << MU_EPOCH_SHIFT, above all that any earlier epoch can have used. Each job stands in a generation of that
 * number in which nobody ever steps: its members, and whoever else comes back with newer state, park with what they
 * hold, and the next generation is planned from that.
 *
 * A snapshot contains the secrets of the running generations' data plane: files of it are for their owner alone. */
#ifndef MU_COORDINATOR_SNAPSHOT_H
#define MU_COORDINATOR_SNAPSHOT_H

#include "coordinator/records.h"

enum {
    MU_SNAPSHOT_BYTES_MAX = 1 << 30,
    MU_EPOCH_SHIFT = 40,
    MU_EPOCH_MAX = 8191, /* every number stays below 2^53, which other programs read as doubles */
};

/* Everything that is durable at one moment. Any thread where the store's scan may be called from any (RocksDB). The
 * bytes are from malloc. */
enum mu_status mu_snapshot_take(struct mu_store *store, uint8_t **ret_bytes, size_t *ret_size_bytes,
                                struct mu_error *err) MU_WARN_UNUSED;

struct mu_snapshot_report {
    uint64_t epoch;
    uint64_t records;
};

/* Fills an empty store. `epoch` 0: the one after the snapshot's; else at least that. A store that was filled in part is
 * refused by the coordinator: its format is written last. */
enum mu_status mu_snapshot_restore(const uint8_t *bytes, size_t size_bytes, uint64_t epoch, uint64_t wall_us,
                                   struct mu_store *store, struct mu_snapshot_report *ret_report,
                                   struct mu_error *err) MU_WARN_UNUSED;

#endif
