/* A coordinator's core, and a worker's core with an engine that only pretends, for fuzz targets. What the coordinator
 * persists goes into a store in memory; what either orders of other threads is answered after the step that ordered it.
 * Everything that they emit is judged: messages encode, records can be read again. Time and randomness are counters, so
 * that a recorded conversation can be repeated. */
#ifndef TESTS_FUZZ_COORDINATOR_H
#define TESTS_FUZZ_COORDINATOR_H

#include "coordinator/core/core.h"
#include "storage/store.h"
#include "tests/fuzz/fuzz.h"
#include "worker/core/core.h"

enum { FUZZ_ANSWERS_MAX = 32, FUZZ_PLANS_MAX = 4 };

/* A plan that was made and not yet given back. */
struct fuzz_plan {
    uint64_t ticket;
    struct mu_plan plan;
    bool is_made;
};

struct fuzz_coordinator {
    struct mu_coord *core;
    struct mu_store *store;
    struct mu_wire_arena arena;
    struct mu_coord_sink sink;
    uint64_t now_us, random;
    struct fuzz_plan plans[FUZZ_PLANS_MAX];
    struct mu_coord_event answers[FUZZ_ANSWERS_MAX]; /* of checkpoint I/O */
    unsigned answer_count;
    void (*also)(void *ctx, const struct mu_coord_action *action); /* sees every action; NULL: nobody */
    void *also_ctx;
};

/* Fills the embedded struct; `store` may hold records, and belongs to it from now on. False: they are refused (and err
 * says why); fini is still due. */
bool fuzz_coordinator_init(struct fuzz_coordinator *coordinator, struct mu_store *store, struct mu_error *err);
void fuzz_coordinator_fini(struct fuzz_coordinator *coordinator);
/* Steps and answers what the step ordered. */
void fuzz_coordinator_step(struct fuzz_coordinator *coordinator, struct mu_coord_event *event);
/* The job "tiny", which begins as soon as somebody is there, or "probed", whose workers are measured first. */
void fuzz_coordinator_submit(struct fuzz_coordinator *coordinator, const char *job);
void fuzz_coordinator_pass(struct fuzz_coordinator *coordinator, uint64_t us);
/* What is stored now starts a coordinator. */
void fuzz_coordinator_check_restart(struct fuzz_coordinator *coordinator);
struct mu_coord_config fuzz_coordinator_config(void);
void fuzz_job(struct mu_job_spec *ret_spec);

struct fuzz_worker {
    struct mu_worker *core;
    struct mu_wire_arena arena;
    struct mu_worker_sink sink;
    uint64_t now_us, random;
    struct mu_worker_event answers[FUZZ_ANSWERS_MAX];
    unsigned answer_count;
    uint64_t running; /* generation; 0: none */
    uint64_t steps_done;
    struct mu_held held; /* as the newest assignment makes it */
    struct mu_layout layout;
    uint32_t rank;
    bool is_over;
    void (*also)(void *ctx, const struct mu_worker_action *action);
    void *also_ctx;
};

void fuzz_worker_init(struct fuzz_worker *worker, const char *name, const char *job);
void fuzz_worker_fini(struct fuzz_worker *worker);
void fuzz_worker_step(struct fuzz_worker *worker, struct mu_worker_event *event);
/* Where it runs: one training step, whose vote came out as `command` (mu_worker_vote, the least of all ranks). */
void fuzz_worker_train(struct fuzz_worker *worker, uint64_t command);

#endif
