/* Feeds state to who lacks it in the next generation, while this one steps: see struct mu_feed_order (plan/session.h).
 *
 * One connection, one way, one stream of items:
 *
 *   CHUNK   the next chunk, as it is between two updates, with its XXH3-128: parameters, moments, or both
 *   UPDATE  the result of a step's vote, and the reduced gradient of the chunks sent before it whose moments are fed
 *   PARAMS  after it: the new parameters of the others
 *   END     nothing more comes: the giver has parked
 *
 * So the giver keeps no copy of anything, and the taker, which makes each update as it comes, is never more than one
 * step behind. A chunk is copied to the kernel before the update that would change it, and a gradient before the next
 * backward pass overwrites it; the giver waits for that at most MU_FEED_PATIENCE_MS, then it lets the feed fail. Every
 * step at least a window of chunks goes out, so a feed becomes whole after a bounded number of steps whatever the
 * speeds are. Engine's thread. */
#ifndef MU_WORKER_FEED_H
#define MU_WORKER_FEED_H

#include "plan/session.h"
#include "worker/comm.h"

enum { MU_FEED_PATIENCE_MS = 2000 };

struct mu_feed_config {
    const struct mu_model_spec *model;
    struct mu_comm *comm;
    bool encrypted; /* as in struct mu_comm_group_config */
    const struct mu_feed_order *order;
    struct mu_id incarnation;    /* own */
    const struct mu_move *moves; /* what is fed, ascending (plan/feeding.h); must stay */
    uint32_t move_count;
    float *flats[3];          /* flat spaces of parameters, first and second moments */
    float *gradient;          /* of the reduced gradient */
    struct mu_device *device; /* where these lie, no operation writing to them while a feed looks; NULL: the host */
    uint64_t deadline_us;
    /* Taker, before a chunk is received: memory for it. NULL: it is there. */
    enum mu_status (*reserve)(void *ctx, const struct mu_chunk *chunk, uint32_t kinds, struct mu_error *err);
    void *reserve_ctx;
};

struct mu_feed;

enum mu_status mu_feed_new(const struct mu_feed_config *config, struct mu_feed **ret_feed,
                           struct mu_error *err) MU_WARN_UNUSED;
/* Closes the connection. NULL is fine. */
void mu_feed_free(struct mu_feed *feed);

/* ---- the giver's side: after an error the feed is good for nothing but mu_feed_free ---- */

/* Between two updates, once mu_feed_params was called, as often as there is time: sends further chunks of `step`. Never
 * waits. */
enum mu_status mu_feed_pump(struct mu_feed *feed, uint64_t step, struct mu_error *err) MU_WARN_UNUSED;
/* Before the update is made: waits until the chunks under way have left, and sends the update. */
enum mu_status mu_feed_update(struct mu_feed *feed, const struct mu_step_result *result,
                              struct mu_error *err) MU_WARN_UNUSED;
/* After the update, once all parameters that it made are here. */
enum mu_status mu_feed_params(struct mu_feed *feed, struct mu_error *err) MU_WARN_UNUSED;
/* Before the gradient is overwritten: waits until it has left. */
enum mu_status mu_feed_drain(struct mu_feed *feed, struct mu_error *err) MU_WARN_UNUSED;
/* Parked at `step`. The feed must stay until the taker has closed its side. */
enum mu_status mu_feed_end(struct mu_feed *feed, uint64_t step, struct mu_error *err) MU_WARN_UNUSED;

/* ---- the taker's side ---- */

enum mu_feed_event {
    MU_FEED_EV_NONE,
    MU_FEED_EV_MORE,   /* one more chunk is here, verified, or new parameters are */
    MU_FEED_EV_LIVE,   /* the last chunk is */
    MU_FEED_EV_UPDATE, /* make the update of `result` on the ranges with moments (mu_feed_range), then mu_feed_applied;
                          told again until then */
    MU_FEED_EV_END,    /* `result.step` is the one that is held */
};
/* What has happened next; never waits. MU_ERR_CORRUPT: a chunk does not match its checksum, or an item does not
 * follow from those before it. */
enum mu_status mu_feed_take(struct mu_feed *feed, enum mu_feed_event *ret_event, struct mu_step_result *ret_result,
                            struct mu_error *err) MU_WARN_UNUSED;
/* Ranges [offset, + size) of the flat spaces that are here; each is fed as its `kinds` say. False: `index` is past the
 * last one. */
struct mu_feed_range {
    uint32_t kinds;
    uint64_t offset, size;
};
bool mu_feed_range(const struct mu_feed *feed, uint32_t index, struct mu_feed_range *ret_range);
void mu_feed_applied(struct mu_feed *feed);
/* Grows with everything that is begun or finished. */
uint64_t mu_feed_turns(const struct mu_feed *feed);

#endif
