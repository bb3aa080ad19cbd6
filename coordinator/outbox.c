#include "coordinator/outbox.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "common/fault.h"
#include "common/log.h"
#include "coordinator/records.h"
#include "storage/writer.h"

/* What a batch holds, for the fault points: one bit per class of record. */
enum { HAS_JOB, HAS_ASSIGN, HAS_GO, HAS_INTENT, HAS_COMMIT, HAS_DELETING, HAS_BAD, HAS_WORKER, HAS_EVENT, HAS_FORGET };

struct mu_outbox {
    struct mu_writer *writer;
    void (*wake)(void *arg);
    void *wake_arg, *ctx;

    struct mu_store_batch batch; /* of this turn */
    unsigned classes;            /* in it */
    uint64_t submitted;          /* number of the newest batch given to the writer */
    uint64_t seen_durable;
    unsigned in_flight_classes[MU_OUTBOX_BATCHES_MAX]; /* by number modulo */

    struct mu_outbox_item *first, *last;
    size_t held;

    atomic_uint_fast64_t durable; /* written by the storage thread */
    atomic_bool failed, stalled;
    size_t may_pass_count; /* held ones that may pass */
    pthread_mutex_t lock;  /* guards failure */
    struct mu_error failure;
};

/* ---- storage thread ---- */

static void on_done(void *arg, const uint64_t *cookies, size_t count, enum mu_status status, const struct mu_error *err)
{
    struct mu_outbox *outbox = arg;
    if (status == MU_OK) {
        atomic_store(&outbox->durable, cookies[count - 1]);
    } else if (!atomic_load(&outbox->failed)) {
        pthread_mutex_lock(&outbox->lock);
        outbox->failure = *err;
        pthread_mutex_unlock(&outbox->lock);
        atomic_store(&outbox->failed, true);
    }
    outbox->wake(outbox->wake_arg);
}

static void on_stalled(void *arg, const struct mu_error *err)
{
    struct mu_outbox *outbox = arg;
    atomic_store(&outbox->stalled, err != NULL);
    outbox->wake(outbox->wake_arg);
    if (err)
        MU_LOGE("nothing can be stored and no change is announced until there is space: %s", err->text);
    else
        MU_LOGI("there is space again: writing goes on");
}

/* ---- fault points ---- */

static unsigned class_of(const struct mu_record *record)
{
    switch (record->kind) {
    case MU_RECORD_JOB:
        return 1u << HAS_JOB;
    case MU_RECORD_GENERATION:
        return record->generation->go ? 1u << HAS_GO : 1u << HAS_ASSIGN;
    case MU_RECORD_CHECKPOINT:
        switch (record->checkpoint->state) {
        case MU_CKPT_COMMITTED:
            return 1u << HAS_COMMIT;
        case MU_CKPT_DELETING:
            return 1u << HAS_DELETING;
        case MU_CKPT_BAD:
        case MU_CKPT_VOID:
            return 1u << HAS_BAD;
        default:
            return 1u << HAS_INTENT;
        }
    case MU_RECORD_WORKER:
    case MU_RECORD_NODE:
        return 1u << HAS_WORKER;
    default:
        return 1u << HAS_EVENT;
    }
}

#ifdef MU_FAULTS
static void faults_before(unsigned classes)
{
    if (classes & 1u << HAS_JOB)
        MU_FAULT("coord.persist.job.before");
    if (classes & 1u << HAS_ASSIGN)
        MU_FAULT("coord.persist.assign.before");
    if (classes & 1u << HAS_GO)
        MU_FAULT("coord.persist.go.before");
    if (classes & 1u << HAS_INTENT)
        MU_FAULT("coord.persist.intent.before");
    if (classes & 1u << HAS_COMMIT)
        MU_FAULT("coord.persist.commit.before");
    if (classes & 1u << HAS_DELETING)
        MU_FAULT("coord.persist.deleting.before");
    if (classes & 1u << HAS_BAD)
        MU_FAULT("coord.persist.bad.before");
    if (classes & 1u << HAS_WORKER)
        MU_FAULT("coord.persist.worker.before");
    if (classes & 1u << HAS_EVENT)
        MU_FAULT("coord.persist.event.before");
    if (classes & 1u << HAS_FORGET)
        MU_FAULT("coord.persist.forget.before");
}

static void faults_after(unsigned classes)
{
    if (classes & 1u << HAS_JOB)
        MU_FAULT("coord.persist.job.after");
    if (classes & 1u << HAS_ASSIGN)
        MU_FAULT("coord.persist.assign.after");
    if (classes & 1u << HAS_GO)
        MU_FAULT("coord.persist.go.after");
    if (classes & 1u << HAS_INTENT)
        MU_FAULT("coord.persist.intent.after");
    if (classes & 1u << HAS_COMMIT)
        MU_FAULT("coord.persist.commit.after");
    if (classes & 1u << HAS_DELETING)
        MU_FAULT("coord.persist.deleting.after");
    if (classes & 1u << HAS_BAD)
        MU_FAULT("coord.persist.bad.after");
    if (classes & 1u << HAS_WORKER)
        MU_FAULT("coord.persist.worker.after");
    if (classes & 1u << HAS_EVENT)
        MU_FAULT("coord.persist.event.after");
    if (classes & 1u << HAS_FORGET)
        MU_FAULT("coord.persist.forget.after");
}
#else
static void faults_before(unsigned classes)
{
    (void)classes;
}

static void faults_after(unsigned classes)
{
    (void)classes;
}
#endif

/* ---- core thread ---- */

enum mu_status mu_outbox_new(struct mu_store *store, void (*wake)(void *wake_arg), void *wake_arg, void *ctx,
                             struct mu_outbox **ret_outbox, struct mu_error *err)
{
    struct mu_outbox *outbox = calloc(1, sizeof *outbox);
    if (!outbox)
        return mu_fail(err, MU_ERR_NO_MEMORY, "outbox: no memory");
    *outbox = (struct mu_outbox){.wake = wake, .wake_arg = wake_arg, .ctx = ctx};
    mu_store_batch_init(&outbox->batch);
    pthread_mutex_init(&outbox->lock, NULL);
    struct mu_writer_config config = {.capacity = MU_OUTBOX_BATCHES_MAX,
                                      .retry_ms = MU_WRITER_RETRY_MS_DEFAULT,
                                      .done = on_done,
                                      .stalled = on_stalled,
                                      .arg = outbox};
    enum mu_status status = mu_writer_new(store, &config, &outbox->writer, err);
    if (status) {
        mu_outbox_free(outbox);
        return status;
    }
    *ret_outbox = outbox;
    return MU_OK;
}

void mu_outbox_free(struct mu_outbox *outbox)
{
    if (!outbox)
        return;
    mu_writer_free(outbox->writer);
    while (outbox->first) {
        struct mu_outbox_item *item = outbox->first;
        outbox->first = item->next;
        item->run(outbox->ctx, item, true);
    }
    mu_store_batch_fini(&outbox->batch);
    pthread_mutex_destroy(&outbox->lock);
    free(outbox);
}

enum mu_status mu_outbox_put(struct mu_outbox *outbox, const void *key, size_t key_bytes, const void *value,
                             size_t value_bytes, struct mu_error *err)
{
    enum mu_status status = mu_store_batch_put(&outbox->batch, key, key_bytes, value, value_bytes);
    return status ? mu_fail(err, status, "the records of one turn do not fit into one batch (%zu bytes)", value_bytes)
                  : MU_OK;
}

enum mu_status mu_outbox_delete(struct mu_outbox *outbox, const void *key, size_t key_bytes, struct mu_error *err)
{
    enum mu_status status = mu_store_batch_delete(&outbox->batch, key, key_bytes);
    return status ? mu_fail(err, status, "the records of one turn do not fit into one batch") : MU_OK;
}

enum mu_status mu_outbox_persist(struct mu_outbox *outbox, struct mu_wire_arena *arena, const struct mu_record *record,
                                 struct mu_error *err)
{
    uint8_t key[MU_RECORD_KEY_SIZE];
    size_t key_bytes = mu_record_key(record, key), value_bytes = 0;
    const void *value = NULL;
    enum mu_status status = mu_record_encode(arena, record, &value, &value_bytes, err);
    if (status)
        return status;
    outbox->classes |= class_of(record);
    return mu_outbox_put(outbox, key, key_bytes, value, value_bytes, err);
}

enum mu_status mu_outbox_forget(struct mu_outbox *outbox, const struct mu_record *record, struct mu_error *err)
{
    uint8_t key[MU_RECORD_KEY_SIZE];
    size_t key_bytes = mu_record_key(record, key);
    if (record->kind != MU_RECORD_EVENT) /* the retention of events accompanies everything */
        outbox->classes |= 1u << HAS_FORGET;
    return mu_outbox_delete(outbox, key, key_bytes, err);
}

/* Nothing more is released and the process ends, before the store's disk costs the memory too. Workers go on stepping.
 */
static void give_up(struct mu_outbox *outbox)
{
    pthread_mutex_lock(&outbox->lock);
    mu_fail(&outbox->failure, MU_ERR_LIMIT,
            "%zu messages wait for the store, which has not been written to for long: its disk is full or hangs; make "
            "space and start the coordinator again, the workers go on stepping meanwhile",
            outbox->held);
    pthread_mutex_unlock(&outbox->lock);
    atomic_store(&outbox->failed, true);
}

static void append(struct mu_outbox *outbox, struct mu_outbox_item *item, mu_outbox_fn *run, bool may_pass)
{
    *item = (struct mu_outbox_item){
        .run = run, .batch = outbox->submitted + (outbox->batch.op_count > 0), .may_pass = may_pass};
    if (outbox->first)
        outbox->last->next = item;
    else
        outbox->first = item;
    outbox->last = item;
    outbox->may_pass_count += may_pass;
    if (++outbox->held == MU_OUTBOX_HELD_MAX)
        give_up(outbox);
}

void mu_outbox_hold(struct mu_outbox *outbox, struct mu_outbox_item *item, mu_outbox_fn *run)
{
    append(outbox, item, run, false);
}

void mu_outbox_hold_answer(struct mu_outbox *outbox, struct mu_outbox_item *item, mu_outbox_fn *run)
{
    append(outbox, item, run, true);
}

/* The fault points after a write, once, before anything that waited for it goes out. */
static void note_durable(struct mu_outbox *outbox, uint64_t durable)
{
    while (outbox->seen_durable < durable) {
        outbox->seen_durable++;
        faults_after(outbox->in_flight_classes[outbox->seen_durable % MU_OUTBOX_BATCHES_MAX]);
    }
}

/* While the disk is full: answers to questions leave the line. What they run holds nothing further. */
static size_t release_passing(struct mu_outbox *outbox)
{
    size_t count = 0;
    struct mu_outbox_item *previous = NULL, *next;
    for (struct mu_outbox_item *item = outbox->first; item && outbox->may_pass_count > 0; item = next) {
        next = item->next;
        if (!item->may_pass) {
            previous = item;
            continue;
        }
        if (previous)
            previous->next = next;
        else
            outbox->first = next;
        if (outbox->last == item)
            outbox->last = previous;
        outbox->held--;
        outbox->may_pass_count--;
        count++;
        item->run(outbox->ctx, item, false);
    }
    return count;
}

size_t mu_outbox_release(struct mu_outbox *outbox)
{
    size_t count = 0;
    if (atomic_load(&outbox->failed))
        return 0;
    uint64_t durable = atomic_load(&outbox->durable);
    note_durable(outbox, durable);
    while (outbox->first && outbox->first->batch <= durable) {
        struct mu_outbox_item *item = outbox->first;
        outbox->first = item->next;
        outbox->held--;
        outbox->may_pass_count -= item->may_pass;
        count++;
        item->run(outbox->ctx, item, false);
    }
    return atomic_load(&outbox->stalled) ? count + release_passing(outbox) : count;
}

enum mu_status mu_outbox_end_turn(struct mu_outbox *outbox, struct mu_error *err)
{
    if (outbox->batch.op_count == 0)
        return MU_OK;
    uint64_t number = outbox->submitted + 1;
    if (number - outbox->seen_durable >= MU_OUTBOX_BATCHES_MAX)
        return MU_OK; /* the disk is behind: the next turn joins this one */
    faults_before(outbox->classes);
    enum mu_status status = mu_writer_submit(outbox->writer, &outbox->batch, number);
    if (status == MU_ERR_BUSY)
        return MU_OK;
    if (status)
        return mu_fail(err, status, "the records of one turn are not accepted by the storage thread");
    outbox->in_flight_classes[number % MU_OUTBOX_BATCHES_MAX] = outbox->classes;
    outbox->classes = 0;
    outbox->submitted = number;
    return MU_OK;
}

enum mu_status mu_outbox_failure(struct mu_outbox *outbox, struct mu_error *err)
{
    if (!atomic_load(&outbox->failed))
        return MU_OK;
    pthread_mutex_lock(&outbox->lock);
    struct mu_error failure = outbox->failure;
    pthread_mutex_unlock(&outbox->lock);
    if (err)
        *err = failure;
    return failure.status;
}

bool mu_outbox_idle(const struct mu_outbox *outbox)
{
    return outbox->first == NULL && outbox->batch.op_count == 0 && atomic_load(&outbox->durable) == outbox->submitted;
}

bool mu_outbox_is_behind(const struct mu_outbox *outbox)
{
    return atomic_load(&outbox->stalled) || outbox->batch.size_bytes > MU_OUTBOX_BEHIND_BYTES;
}

void mu_outbox_synced(struct mu_outbox *outbox, struct mu_histogram *ret_synced)
{
    struct mu_writer_stats stats;
    mu_writer_stats(outbox->writer, &stats);
    *ret_synced = stats.synced;
}

size_t mu_outbox_held(const struct mu_outbox *outbox)
{
    return outbox->held;
}
