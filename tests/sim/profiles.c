/* What goes wrong in which history. Every profile starts from `ordinary` and draws its sizes from the seed. */
#include <string.h>

#include "tests/sim/sim.h"

#define W(fault) weight[MU_SIM_FAULT_##fault]

static void columns(struct mu_sim *sim, struct mu_sim_params *p, uint32_t tp, uint32_t pp);

static void ordinary(struct mu_sim *sim, struct mu_sim_params *p)
{
    p->workers = (uint32_t)mu_sim_between(sim, 2, 6);
    p->slots = p->workers + 3;
    p->min_workers = mu_sim_below(sim, 3) ? 1 : (uint32_t)mu_sim_between(sim, 1, p->workers);
    p->max_workers = mu_sim_below(sim, 4) ? 64 : p->workers;
    p->spares = mu_sim_below(sim, 4) ? 0 : 1;
    if (p->min_workers + p->spares > p->workers)
        p->spares = 0;
    p->leaves = (uint32_t)mu_sim_between(sim, p->workers + 2, 24);
    p->steps = mu_sim_between(sim, 25, 60);
    p->checkpoints = mu_sim_below(sim, 4) != 0;
    p->checkpoint_every = mu_sim_between(sim, 3, 12);
    p->keep = mu_sim_between(sim, 1, 3);
    p->keep_every = mu_sim_below(sim, 4) ? 0 : p->checkpoint_every * 2;
    p->eval_every = mu_sim_below(sim, 2) ? 0 : 5;
    p->leaf_us = mu_sim_between(sim, 5, 60) * MU_SIM_MS;
    p->optimizer_us = mu_sim_below(sim, 3) ? 4 * MU_SIM_MS : mu_sim_between(sim, 20, 300) * MU_SIM_MS;
    p->net_us = mu_sim_below(sim, 4) ? 300 : 8 * MU_SIM_MS;
    p->stream_us = p->net_us;
    p->io_us = mu_sim_between(sim, 5, 300) * MU_SIM_MS;
    p->load_us = 60 * MU_SIM_MS;
    p->stall_us = 2 * MU_SIM_MS;
    p->sync_us = mu_sim_below(sim, 4) ? 600 : 15 * MU_SIM_MS;
    p->clock_ppm = mu_sim_below(sim, 2) ? 100 : 20000;
    p->fault_mean_us = mu_sim_between(sim, 500, 4000) * MU_SIM_MS;
    p->faults_start_us = mu_sim_below(sim, 3) ? MU_SIM_S : 0;
    p->faults_end_us = mu_sim_between(sim, 15, 60) * MU_SIM_S;
    p->restart_us = mu_sim_between(sim, 300, 6000) * MU_SIM_MS;
    p->horizon_us = p->faults_end_us + 400 * MU_SIM_S;
    p->same_names = mu_sim_below(sim, 2);
    p->no_names = mu_sim_below(sim, 2);
    p->mixed_hosts = mu_sim_below(sim, 2);
    p->crash_limit = 1000; /* quarantine has its own profile */
    p->layers = p->slices = p->tp = p->pp = 1;
    p->channels = 8; /* the smallest model: five cells of one chunk each */
    p->vocab = 256;
    p->memory_bytes = 1 << 30;
}

/* Begins as one of other profiles, drawn by the seed. */
#define ONE_OF(sim, p, ...)                                                                                            \
    static void (*const setups[])(struct mu_sim *, struct mu_sim_params *) = {__VA_ARGS__};                            \
    setups[mu_sim_below(sim, sizeof setups / sizeof setups[0])](sim, p)

static void calm(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->fault_mean_us = 0;
    p->faults_end_us = 5 * MU_SIM_S;
    p->crash_limit = 0;
    p->undisturbed = p->nobody_lost = true;
}

static void crashes(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(KILL_WORKER) = 10;
    p->W(ADD_WORKER) = 2;
    p->hosts_vanish = mu_sim_below(sim, 3) == 0;
}

static void pairs(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(KILL_TWO) = 10;
    p->W(KILL_WORKER) = 3;
}

/* Deaths at named places: of the one who is there, of another one, of the coordinator. */
static void points(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->fault_mean_us = 0;
    p->point_kill_ppm = (uint32_t)mu_sim_between(sim, 500, 12000);
    p->point_coord_ppm = mu_sim_below(sim, 2) ? 0 : (uint32_t)mu_sim_between(sim, 200, 6000);
    p->restart_us = mu_sim_between(sim, 100, 2000) * MU_SIM_MS;
    p->hosts_vanish = mu_sim_below(sim, 6) == 0;
}

static void storms(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->sync_crash_ppm = (uint32_t)mu_sim_between(sim, 5000, 100000);
    p->W(KILL_COORD) = 10;
    p->W(KILL_WORKER) = mu_sim_below(sim, 2) ? 3 : 0;
    p->W(CHECKPOINT) = 2;
    p->slow_sync_ppm = mu_sim_below(sim, 3) ? 0 : 30000;
    p->hosts_vanish = mu_sim_below(sim, 4) == 0;
}

/* One crash of the coordinator, at the n-th sync. */
static void sync_crash(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->fault_mean_us = 0;
    p->sync_crash_at = 1 + mu_sim_below(sim, 120);
    p->W(KILL_WORKER) = mu_sim_below(sim, 2) ? 5 : 0;
    if (p->W(KILL_WORKER))
        p->fault_mean_us = 4 * MU_SIM_S;
}

static void partitions(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(CUT_STREAM) = 8;
    p->W(CUT_LINK) = 6;
    p->W(LOSE_STREAM) = 5;
    p->W(HALF_OPEN) = 5;
    p->W(KILL_WORKER) = 2;
    p->W(KILL_COORD) = 1;
    p->connect_fail_ppm = 100000;
}

/* Streams as slow as everything else: what is said crosses what is told. */
static void slow_streams(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->stream_us = mu_sim_between(sim, 50, 500) * MU_SIM_MS;
    p->restart_us = mu_sim_between(sim, 100, 1500) * MU_SIM_MS;
    p->sync_us = mu_sim_between(sim, 1, 80) * MU_SIM_MS;
    p->W(KILL_WORKER) = 8;
    p->W(STOP_WORKER) = 4;
    p->W(RESET_LINK) = 6;
    p->W(ADD_WORKER) = 4;
    p->W(LOSE_STREAM) = 10;
    p->W(KILL_COORD) = 4;
    p->W(CHECKPOINT) = 2;
    p->fault_mean_us = mu_sim_between(sim, 300, 2500) * MU_SIM_MS;
}

/* Losses while the job recovers from a loss; long updates, so that ranks often stand one step apart. */
static void recovery(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->workers = (uint32_t)mu_sim_between(sim, 4, 6);
    p->slots = p->workers + 3;
    p->leaves = (uint32_t)mu_sim_between(sim, p->slots, 24);
    p->min_workers = 1;
    p->spares = 0;
    p->leaf_us = mu_sim_between(sim, 1, 10) * MU_SIM_MS;
    p->optimizer_us = mu_sim_between(sim, 50, 400) * MU_SIM_MS;
    p->stream_us = mu_sim_between(sim, 20, 400) * MU_SIM_MS;
    p->io_us = mu_sim_between(sim, 5, 40) * MU_SIM_MS;
    p->restart_us = mu_sim_between(sim, 100, 1000) * MU_SIM_MS;
    p->W(KILL_WORKER) = 4;
    p->W(RESET_LINK) = 8;
    p->W(STOP_WORKER) = 1;
    p->fault_mean_us = mu_sim_between(sim, 300, 1500) * MU_SIM_MS;
    p->faults_end_us = 60 * MU_SIM_S;
    p->horizon_us = p->faults_end_us + 400 * MU_SIM_S;
    p->prepare_kill_ppm = (uint32_t)mu_sim_between(sim, 10000, 150000);
    p->point_coord_ppm = mu_sim_below(sim, 3) ? 0 : 1000;
}

static void links(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(RESET_LINK) = 10;
    p->W(CUT_LINK) = 6;
    p->W(KILL_WORKER) = 2;
}

static void pauses(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(PAUSE_COORD) = 10;
    p->W(JUMP_WALL) = 3;
    p->W(KILL_WORKER) = mu_sim_below(sim, 2) ? 2 : 0;
    p->slow_sync_ppm = mu_sim_below(sim, 2) ? 0 : 50000;
    p->clock_ppm = 20000;
}

/* Nothing but pauses of the coordinator: nobody may be lost. */
static void only_pauses(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(PAUSE_COORD) = 10;
    p->W(JUMP_WALL) = 1;
    p->nobody_lost = true;
}

static void zombies(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(STOP_WORKER) = 10;
    p->W(HALF_OPEN) = 2;
    p->W(RESET_LINK) = 3;
    p->W(KILL_WORKER) = mu_sim_below(sim, 2) ? 3 : 0;
    p->W(CHECKPOINT) = 2;
    p->W(KILL_COORD) = mu_sim_below(sim, 2) ? 1 : 0;
}

static void hangs(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(HANG_ENGINE) = 4;
    p->W(KILL_WORKER) = 1;
    p->fault_mean_us = 12 * MU_SIM_S;
    p->faults_end_us = 60 * MU_SIM_S;
}

static void resumes(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->checkpoints = true;
    p->W(KILL_ALL) = 4;
    p->W(KILL_WORKER) = 2;
    p->W(CHECKPOINT) = 2;
    p->fault_mean_us = 6 * MU_SIM_S;
}

static void damaged(struct mu_sim *sim, struct mu_sim_params *p)
{
    resumes(sim, p);
    p->W(CORRUPT) = 3;
    p->keep = mu_sim_between(sim, 2, 4);
    p->may_fail = true;
}

static void growth(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->slots = p->workers + 6;
    p->leaves = (uint32_t)mu_sim_between(sim, p->slots, 32);
    p->max_workers = 64;
    p->W(ADD_WORKER) = 10;
    p->W(TERM_WORKER) = 6;
    p->W(KILL_WORKER) = 1;
    p->strangers = true;
    p->restart_us = mu_sim_below(sim, 2) ? 0 : p->restart_us;
}

static void drains(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(DRAIN) = 6;
    p->W(TERM_WORKER) = 5;
    p->W(ADD_WORKER) = 6;
    p->W(KILL_COORD) = 2;
    p->W(KILL_WORKER) = 1;
}

static void checkpoints(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->checkpoints = true;
    p->checkpoint_every = mu_sim_between(sim, 1, 6);
    p->keep_every = mu_sim_below(sim, 2) ? 0 : p->checkpoint_every * 3;
    p->io_error_ppm = (uint32_t)mu_sim_between(sim, 0, 200000);
    p->W(CHECKPOINT) = 8;
    p->W(FULL_DISK) = 4;
    p->W(KILL_WORKER) = 3;
    p->W(KILL_COORD) = 2;
    p->W(STOP_WORKER) = 1;
}

/* Checkpoints that can be read and cannot be trained from, with and without other trouble. */
static void poison(struct mu_sim *sim, struct mu_sim_params *p)
{
    bool alone = mu_sim_below(sim, 3) == 0;
    if (mu_sim_below(sim, 2))
        ordinary(sim, p);
    else
        columns(sim, p, 1u << mu_sim_below(sim, 2), 1u << mu_sim_below(sim, 2));
    for (int fault = 0; fault < MU_SIM_FAULT_COUNT; fault++)
        p->weight[fault] = 0;
    p->steps = mu_sim_between(sim, 40, 80);
    p->checkpoints = true;
    p->checkpoint_every = mu_sim_between(sim, 1, 5);
    p->keep = mu_sim_between(sim, 2, 4);
    p->keep_every = 0;
    p->io_us = mu_sim_between(sim, 5, 60) * MU_SIM_MS;
    p->restart_us = mu_sim_between(sim, 100, 1000) * MU_SIM_MS;
    p->fault_mean_us = mu_sim_between(sim, 1500, 5000) * MU_SIM_MS;
    p->W(POISON) = 4;
    if (alone)
        return;
    p->W(KILL_WORKER) = 2;
    p->W(KILL_COORD) = 3;
    p->W(ADD_WORKER) = 2;
    p->W(STOP_WORKER) = 1;
    p->W(TERM_WORKER) = 1;
    p->W(LOSE_STREAM) = 1;
    p->sync_crash_ppm = mu_sim_below(sim, 2) ? 0 : (uint32_t)mu_sim_below(sim, 30000);
}

/* Checkpoints as often as it pays: workers die rarely or often, a snapshot takes long or not. */
static void paced(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->checkpoints = p->every_auto = true;
    p->keep_every = 0;
    p->steps = mu_sim_between(sim, 100, 300);
    p->leaf_us = mu_sim_between(sim, 50, 300) * MU_SIM_MS;
    if (p->leaf_us > 2 * MU_SIM_S / p->leaves) /* ten times as long as usual, a step is still no hang */
        p->leaf_us = 2 * MU_SIM_S / p->leaves;
    p->stall_us = mu_sim_between(sim, 5, 400) * MU_SIM_MS;
    p->io_us = mu_sim_between(sim, 50, 3000) * MU_SIM_MS;
    p->restart_us = mu_sim_between(sim, 300, 3000) * MU_SIM_MS;
    p->fault_mean_us = mu_sim_between(sim, 4, 60) * MU_SIM_S;
    p->faults_end_us = mu_sim_between(sim, 60, 300) * MU_SIM_S;
    p->horizon_us = p->faults_end_us + 2400 * MU_SIM_S;
    p->W(KILL_WORKER) = 6;
    p->W(KILL_TWO) = 1;
    p->W(KILL_ALL) = mu_sim_below(sim, 2) ? 0 : 2;
    p->W(KILL_COORD) = 2;
    p->W(ADD_WORKER) = 2;
}

static void cancels(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->W(CANCEL) = 2;
    p->W(KILL_WORKER) = 4;
    p->W(KILL_COORD) = 2;
    p->W(CHECKPOINT) = 2;
    p->W(LOSE_STREAM) = 2;
}

static void quarantine(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->same_names = true;
    p->crash_limit = 2;
    p->W(KILL_WORKER) = 10;
    p->fault_mean_us = MU_SIM_S;
    p->restart_us = 300 * MU_SIM_MS;
}

static void everything(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    for (int fault = 0; fault < MU_SIM_FAULT_POISON; fault++)
        p->weight[fault] = (uint32_t)mu_sim_below(sim, 5);
    p->W(CANCEL) = p->W(CORRUPT) = p->W(HANG_ENGINE) = p->W(KILL_ALL) = 0;
    p->W(KILL_ALL) = mu_sim_below(sim, 8) == 0;
    p->sync_crash_ppm = (uint32_t)mu_sim_below(sim, 20000);
    p->point_kill_ppm = (uint32_t)mu_sim_below(sim, 2000);
    p->point_coord_ppm = (uint32_t)mu_sim_below(sim, 1000);
    p->io_error_ppm = (uint32_t)mu_sim_below(sim, 60000);
    p->connect_fail_ppm = (uint32_t)mu_sim_below(sim, 100000);
    p->slow_sync_ppm = (uint32_t)mu_sim_below(sim, 20000);
    p->hosts_vanish = mu_sim_below(sim, 4) == 0;
}

/* ---- layouts ---- */

/* A model that can be cut: a few layers, slices, cells of one chunk or several. */
static void deep_model(struct mu_sim *sim, struct mu_sim_params *p)
{
    p->layers = (uint32_t)mu_sim_between(sim, 2, 4);
    p->slices = 1u << mu_sim_below(sim, 3);
    p->channels = mu_sim_below(sim, 2) ? 64 : 128;
    p->vocab = mu_sim_below(sim, 2) ? 256 : 1100;
}

/* As ordinary, for a job of tp x pp columns, with two or three replicas of each when all are there. */
static void columns(struct mu_sim *sim, struct mu_sim_params *p, uint32_t tp, uint32_t pp)
{
    ordinary(sim, p);
    deep_model(sim, p);
    p->slices = p->slices < tp ? tp : p->slices;
    p->layers = p->layers < pp ? pp : p->layers;
    p->tp = tp;
    p->pp = pp;
    uint32_t least = tp * pp;
    p->workers = (uint32_t)mu_sim_between(sim, least, 3 * least + 1);
    p->slots = p->workers + 3;
    p->leaves = (uint32_t)mu_sim_between(sim, p->workers + 2, 24);
    p->min_workers = mu_sim_below(sim, 2) ? 1 : least;
    p->max_workers = mu_sim_below(sim, 4) ? 64 : p->workers;
    p->spares = p->workers > least && mu_sim_below(sim, 4) == 0;
    p->sharded = mu_sim_below(sim, 3) == 0;
    p->leaf_us = mu_sim_between(sim, 5, 40) * MU_SIM_MS;
    p->W(KILL_WORKER) = 6;
    p->W(ADD_WORKER) = 3;
    p->W(CHECKPOINT) = 2;
}

static void tensor(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 1u << mu_sim_between(sim, 1, 2), 1);
    p->W(KILL_TWO) = 3;
    p->W(RESET_LINK) = 2;
}

static void pipeline(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 1, (uint32_t)mu_sim_between(sim, 2, 3));
    p->W(KILL_TWO) = 3;
    p->W(RESET_LINK) = 2;
}

/* tp 2, pp 2: losses of single replicas, of whole stages, and of the only holders of something. */
static void grid(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 2, 2);
    p->checkpoints = true;
    p->W(KILL_STAGE) = 4;
    p->W(STOP_WORKER) = 1;
    p->hosts_vanish = mu_sim_below(sim, 4) == 0;
}

static void sharded(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 1, mu_sim_below(sim, 3) ? 1 : 2);
    p->sharded = true;
    p->checkpoints = true;
    p->checkpoint_every = mu_sim_between(sim, 1, 6);
    p->keep_every = mu_sim_below(sim, 4) ? 0 : p->checkpoint_every * 2;
    p->optimizer_us = mu_sim_between(sim, 20, 300) * MU_SIM_MS;
    p->W(KILL_WORKER) = 3;
    p->W(RESET_LINK) = 6;
    p->W(TERM_WORKER) = 3;
}

/* The planner chooses: one worker cannot hold the model, or can. */
static void automatic(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 1, 2);
    p->tp = p->pp = 0;
    p->restless = mu_sim_below(sim, 4) != 0;
    p->W(KILL_TWO) = 2;
    p->W(TERM_WORKER) = 2;
    p->W(KILL_COORD) = 1;
}

/* Who leaves is the only one who has something: the others copy it first. */
static void holders(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 1u << mu_sim_below(sim, 2), 1u << mu_sim_below(sim, 2));
    p->max_workers = 64;
    p->restart_us = mu_sim_between(sim, 300, 2000) * MU_SIM_MS;
    p->restless = mu_sim_below(sim, 2);
    p->W(KILL_WORKER) = 1;
    p->W(ADD_WORKER) = 6;
    p->W(TERM_WORKER) = 5;
    p->W(DRAIN) = 4;
    p->W(DRAIN_STAGE) = 4;
    p->W(KILL_COORD) = 1;
}

/* The coordinator, or a worker, dies in the middle of a change of layout. */
static void reshard(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 1u << mu_sim_below(sim, 2), 2);
    p->max_workers = 64;
    p->restless = mu_sim_below(sim, 2);
    if (mu_sim_below(sim, 2))
        p->tp = p->pp = 0;
    p->io_us = mu_sim_between(sim, 5, 40) * MU_SIM_MS;
    p->restart_us = mu_sim_between(sim, 100, 1000) * MU_SIM_MS;
    p->prepare_coord_ppm = (uint32_t)mu_sim_between(sim, 5000, 60000);
    p->prepare_kill_ppm = mu_sim_below(sim, 2) ? 0 : (uint32_t)mu_sim_between(sim, 5000, 80000);
    p->W(ADD_WORKER) = 8;
    p->W(TERM_WORKER) = 5;
    p->W(KILL_WORKER) = 5;
    p->fault_mean_us = mu_sim_between(sim, 500, 2500) * MU_SIM_MS;
}

/* Everything at once, in a layout of several columns. */
static void grid_everything(struct mu_sim *sim, struct mu_sim_params *p)
{
    columns(sim, p, 1u << mu_sim_below(sim, 2), 1u << mu_sim_below(sim, 2));
    for (int fault = 0; fault < MU_SIM_FAULT_POISON; fault++)
        p->weight[fault] = (uint32_t)mu_sim_below(sim, 4);
    p->W(CANCEL) = p->W(CORRUPT) = p->W(HANG_ENGINE) = p->W(KILL_ALL) = 0;
    p->restless = mu_sim_below(sim, 2);
    if (mu_sim_below(sim, 2))
        p->tp = p->pp = 0;
    p->sync_crash_ppm = (uint32_t)mu_sim_below(sim, 10000);
    p->point_kill_ppm = (uint32_t)mu_sim_below(sim, 1500);
    p->point_coord_ppm = (uint32_t)mu_sim_below(sim, 800);
    p->io_error_ppm = (uint32_t)mu_sim_below(sim, 40000);
    p->connect_fail_ppm = (uint32_t)mu_sim_below(sim, 50000);
    p->hosts_vanish = mu_sim_below(sim, 4) == 0;
}

/* What one worker alone would hold is mirrored. */
static void buddies(struct mu_sim *sim, struct mu_sim_params *p)
{
    bool shard = mu_sim_below(sim, 2);
    columns(sim, p, 1u << mu_sim_below(sim, 2), 1u << mu_sim_below(sim, 2));
    p->sharded = shard;
    if (!shard && mu_sim_below(sim, 4))
        p->dp = 1;
    if (p->dp == 1 && p->tp * p->pp == 1)
        p->pp = 2;
    p->layers = p->layers < p->pp ? p->pp : p->layers;
    uint32_t least = p->tp * p->pp;
    p->workers = p->workers < least + 1 ? least + 1 : p->workers;
    p->slots = p->workers + 3;
    p->leaves = p->leaves < p->workers + 2 ? p->workers + 2 : p->leaves;
    p->min_workers = p->dp == 1 ? least : least < 2 || mu_sim_below(sim, 2) ? 2 : 1;
    p->max_workers = 64;
    p->spares = 0;
    p->buddies = true;
    p->checkpoints = true;
    p->optimizer_us = mu_sim_between(sim, 20, 300) * MU_SIM_MS;
    p->W(KILL_TWO) = 2;
    p->W(RESET_LINK) = 3;
    p->W(TERM_WORKER) = 2;
    p->W(KILL_COORD) = 1;
    p->hosts_vanish = mu_sim_below(sim, 3) == 0;
}

/* One loss at any instant: nobody goes back. */
static void buddy_one(struct mu_sim *sim, struct mu_sim_params *p)
{
    buddies(sim, p);
    for (int fault = 0; fault < MU_SIM_FAULT_COUNT; fault++)
        p->weight[fault] = 0;
    p->W(KILL_WORKER) = 1;
    p->one_fault = true;
    p->faults_start_us = mu_sim_between(sim, 200, 3000) * MU_SIM_MS;
    p->fault_mean_us = 4 * MU_SIM_S;
}

/* Operators and programs that ask again and again, over crashes of the coordinator. */
static void operators(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->repeats = p->checkpoints = true;
    p->restart_us = mu_sim_between(sim, 100, 2000) * MU_SIM_MS;
    p->sync_crash_ppm = (uint32_t)mu_sim_below(sim, 50000);
    p->W(CHECKPOINT) = 8;
    p->W(DRAIN) = 3;
    p->W(KILL_COORD) = 6;
    p->W(KILL_WORKER) = 2;
    p->W(ADD_WORKER) = 3;
    p->W(CANCEL) = mu_sim_below(sim, 8) == 0;
}

/* Learning rate, steps and skipped sequences change, in the middle of crashes of both sides, of growth and of feeds. */
static void amended(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->amends = true;
    p->repeats = mu_sim_below(sim, 2);
    p->restart_us = mu_sim_between(sim, 100, 2000) * MU_SIM_MS;
    p->sync_crash_ppm = mu_sim_below(sim, 2) ? 0 : (uint32_t)mu_sim_below(sim, 50000);
    p->W(CHECKPOINT) = 6;
    p->W(KILL_WORKER) = 4;
    p->W(KILL_ALL) = mu_sim_below(sim, 3) == 0;
    p->W(KILL_COORD) = 3;
    p->W(ADD_WORKER) = 4;
    p->W(DRAIN) = 1;
    p->W(STOP_WORKER) = mu_sim_below(sim, 2) == 0;
    p->W(CUT_STREAM) = mu_sim_below(sim, 2) == 0;
}

/* ... and goes back to a checkpoint, while others commit, generations prepare, state is fed, everybody dies. */
static void rollbacks(struct mu_sim *sim, struct mu_sim_params *p)
{
    ONE_OF(sim, p, ordinary, grid, sharded, reshard, growth);
    p->amends = p->rolls_back = p->checkpoints = true;
    p->repeats = mu_sim_below(sim, 2);
    p->checkpoint_every = mu_sim_between(sim, 2, 8);
    p->keep = (uint32_t)mu_sim_between(sim, 2, 6);
    p->keep_every = 0;
    p->restart_us = mu_sim_between(sim, 100, 2000) * MU_SIM_MS;
    p->sync_crash_ppm = mu_sim_below(sim, 2) ? 0 : (uint32_t)mu_sim_below(sim, 50000);
    p->W(CHECKPOINT) = 8;
    p->W(KILL_WORKER) = 3;
    p->W(KILL_ALL) = mu_sim_below(sim, 3) == 0;
    p->W(KILL_COORD) = 3;
    p->W(ADD_WORKER) = 4;
    p->W(STOP_WORKER) = mu_sim_below(sim, 2) == 0;
    p->W(CUT_STREAM) = mu_sim_below(sim, 2) == 0;
}

/* More workers than a mesh takes: the binomial tree. */
static void wide(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->workers = (uint32_t)mu_sim_between(sim, 34, 90);
    p->slots = p->workers + 6;
    p->min_workers = p->workers / 2;
    p->max_workers = 1000;
    p->spares = (uint32_t)mu_sim_below(sim, 3);
    p->leaves = (uint32_t)mu_sim_between(sim, p->slots, 256);
    p->steps = mu_sim_between(sim, 8, 20);
    p->leaf_us = 100 * MU_SIM_MS;
    p->W(KILL_WORKER) = 6;
    p->W(KILL_TWO) = 3;
    p->W(ADD_WORKER) = 3;
    p->W(KILL_COORD) = 1;
    p->W(STOP_WORKER) = 1;
    p->W(RESET_LINK) = 1;
    p->fault_mean_us = 4 * MU_SIM_S;
}

/* Shard groups: a sharded optimizer over more replicas than a mesh takes. */
static void wide_sharded(struct mu_sim *sim, struct mu_sim_params *p)
{
    wide(sim, p);
    deep_model(sim, p);
    p->tp = p->pp = 1;
    p->sharded = true;
    p->checkpoints = true;
}

/* More than a mesh of ranks in columns: votes along the tree, sums in the mesh of a column or along its tree. */
static void wide_grid(struct mu_sim *sim, struct mu_sim_params *p)
{
    wide(sim, p);
    deep_model(sim, p);
    p->tp = p->pp = 2;
    p->slices = p->slices < 2 ? 2 : p->slices;
    p->workers = (uint32_t)mu_sim_between(sim, 36, 150);
    p->slots = p->workers + 6;
    p->min_workers = 4;
    p->leaves = (uint32_t)mu_sim_between(sim, p->slots, 256);
    p->sharded = mu_sim_below(sim, 3) == 0;
    p->checkpoints = true;
    p->W(KILL_STAGE) = 1;
    p->W(TERM_WORKER) = 1;
}

/* One worker or two on a host. */
static void local(struct mu_sim *sim, struct mu_sim_params *p)
{
    checkpoints(sim, p);
    p->local = p->checkpoints = p->may_fail = true;
    p->point_kill_ppm = p->point_coord_ppm = 3000;
    p->mixed_hosts = mu_sim_below(sim, 2);
    p->W(KILL_WORKER) = 4;
    p->W(KILL_TWO) = 1;
    p->W(KILL_ALL) = 2;
    p->W(KILL_COORD) = 3;
    p->W(LOSE_STREAM) = 2;
    p->W(TERM_WORKER) = 1;
    p->W(ADD_WORKER) = 2;
    p->W(LOSE_DISK) = 2;
    p->W(CORRUPT) = 1;
}

static void big(struct mu_sim *sim, struct mu_sim_params *p)
{
    ordinary(sim, p);
    p->workers = (uint32_t)mu_sim_between(sim, 1000, 4000);
    p->slots = p->workers + 20;
    p->min_workers = p->workers / 2;
    p->max_workers = MU_WORKERS_MAX;
    p->spares = 4;
    p->leaves = 4096;
    p->steps = mu_sim_between(sim, 3, 5);
    p->leaf_us = 200 * MU_SIM_MS;
    p->checkpoints = true;
    p->W(KILL_WORKER) = 6;
    p->W(KILL_TWO) = 2;
    p->W(KILL_COORD) = 1;
    p->fault_mean_us = 8 * MU_SIM_S;
    p->faults_start_us = 5 * MU_SIM_S;
    p->faults_end_us = 30 * MU_SIM_S;
}

/* Ordinary trouble of several kinds, with a supervisor on every host. */
static void supervised(struct mu_sim *sim, struct mu_sim_params *p)
{
    ONE_OF(sim, p, crashes, pairs, points, storms, recovery, growth, drains, checkpoints, quarantine, grid, buddies);
    p->supervised = true;
    p->same_names = p->same_names || mu_sim_below(sim, 2);
}

/* The same with an operator who cordons, drains and resumes hosts. */
static void nodes(struct mu_sim *sim, struct mu_sim_params *p)
{
    supervised(sim, p);
    p->node_orders = true;
}

/* Whoever has nothing to do is measured, again and again, and often before the job begins. */
static void probes(struct mu_sim *sim, struct mu_sim_params *p)
{
    ONE_OF(sim, p, calm, crashes, storms, growth, drains, grid, nodes);
    p->probes = true;
    p->preflight = mu_sim_below(sim, 2);
}

/* Leaves and layers follow the speeds, spares relieve slow workers, in the middle of any trouble. */
static void speeds(struct mu_sim *sim, struct mu_sim_params *p)
{
    ONE_OF(sim, p, calm, crashes, storms, growth, drains, grid, sharded);
    p->rebalance_ms = 400;
    p->slow_workers = (uint32_t)mu_sim_between(sim, 1, 3);
    p->W(CHANGE_SPEED) = p->undisturbed ? 0 : (uint32_t)mu_sim_below(sim, 3);
    p->steps = mu_sim_between(sim, 100, 200);
    p->horizon_us += 600 * MU_SIM_S; /* of two slow workers */
}

/* More workers than the job may have, and several of them slow, or so for a time: spares take their places. */
static void slow(struct mu_sim *sim, struct mu_sim_params *p)
{
    bool alone = mu_sim_below(sim, 4) == 0;
    ordinary(sim, p);
    p->workers = (uint32_t)mu_sim_between(sim, 4, 7);
    p->slots = p->workers + 2;
    p->min_workers = 1;
    p->max_workers = p->workers - (uint32_t)mu_sim_between(sim, 1, 2);
    p->spares = 0;
    p->leaves = (uint32_t)mu_sim_between(sim, 3 * p->max_workers, 30);
    p->leaf_us = 400 * MU_SIM_MS / p->leaves; /* five times, and ten times as long as usual, a step is still no hang */
    p->steps = mu_sim_between(sim, 300, 600);
    p->rebalance_ms = 400;
    p->slow_workers = 3;
    p->fault_mean_us = mu_sim_between(sim, 4, 30) * MU_SIM_S;
    p->faults_end_us = mu_sim_between(sim, 60, 240) * MU_SIM_S;
    p->horizon_us = p->faults_end_us + 2400 * MU_SIM_S;
    p->restart_us = mu_sim_between(sim, 1000, 60000) * MU_SIM_MS;
    p->W(CHANGE_SPEED) = 3;
    if (alone)
        return;
    p->W(KILL_WORKER) = 3;
    p->W(KILL_COORD) = 4;
    p->W(ADD_WORKER) = 2;
    p->W(LOSE_STREAM) = 2;
    p->W(DRAIN) = mu_sim_below(sim, 2) ? 0 : 1;
    p->sync_crash_ppm = mu_sim_below(sim, 2) ? 0 : (uint32_t)mu_sim_below(sim, 5000);
}

const struct mu_sim_profile mu_sim_profiles[] = {
    {"calm", "nothing goes wrong", 4, calm},
    {"crashes", "workers are killed", 10, crashes},
    {"pairs", "two workers die at the same instant", 8, pairs},
    {"points", "deaths at named places of a step, a transfer, a checkpoint", 14, points},
    {"storms", "the coordinator crashes again and again, often around a sync", 12, storms},
    {"sync-crash", "one crash of the coordinator, at the n-th sync", 10, sync_crash},
    {"partitions", "streams and links cut, one way or both, half-open streams", 10, partitions},
    {"slow-streams", "messages to and from the coordinator take long, deaths in between", 20, slow_streams},
    {"recovery", "deaths while the job recovers from another death", 14, recovery},
    {"links", "connections between living workers fail", 6, links},
    {"pauses", "the coordinator is stopped for up to 20 s; slow disk; wall clock jumps", 6, pauses},
    {"only-pauses", "as pauses, and nobody may be declared lost", 4, only_pauses},
    {"zombies", "workers are stopped, longer than the lost timeout, and go on", 8, zombies},
    {"hangs", "an engine makes no progress although its process lives", 3, hangs},
    {"resumes", "everything is killed and resumes from a checkpoint", 8, resumes},
    {"damaged", "a committed checkpoint is damaged, then everything is killed", 5, damaged},
    {"growth", "workers come and go, some of them strangers", 8, growth},
    {"drains", "drains, SIGTERM, growth, coordinator crashes", 7, drains},
    {"checkpoints", "many checkpoints, full disk, I/O errors, deaths", 10, checkpoints},
    {"poison", "checkpoints with values that are not finite, alone or in the middle of other trouble", 6, poison},
    {"paced", "checkpoints as often as it pays, while workers die rarely or often", 4, paced},
    {"cancels", "the job is cancelled in the middle of trouble", 4, cancels},
    {"operators", "changes (checkpoints, drains, scaling) are asked for again and again, by their ids", 8, operators},
    {"amended", "the job is amended, over deaths, growth and coordinator crashes", 8, amended},
    {"rollbacks", "the job is amended and rolled back, over deaths, growth and coordinator crashes", 6, rollbacks},
    {"quarantine", "workers crash too often and are kept out", 3, quarantine},
    {"everything", "all of it together", 12, everything},
    {"wide", "34 to 90 workers, tree exchange", 3, wide},
    {"wide-sharded", "34 to 90 workers, optimizer sharded over groups of replicas", 3, wide_sharded},
    {"wide-grid", "36 to 150 workers in layouts of tp 2, pp 2", 3, wide_grid},
    {"tensor", "tp 2 or 4: deaths, growth", 6, tensor},
    {"pipeline", "pp 2 or 3: deaths, growth", 6, pipeline},
    {"grid", "tp 2, pp 2: deaths of replicas and of whole stages", 8, grid},
    {"sharded", "optimizer sharded over replicas", 8, sharded},
    {"auto", "the planner chooses tp and pp", 5, automatic},
    {"holders", "the only holders of something leave", 8, holders},
    {"reshard", "the coordinator dies in the middle of a change of layout", 8, reshard},
    {"grid-all", "all of it together, in layouts of several columns", 8, grid_everything},
    {"buddies", "mirrors of what one worker alone would hold: deaths of one or two, growth, departures", 8, buddies},
    {"buddy-one", "with mirrors, one death at any instant: no step is replayed", 8, buddy_one},
    {"supervised", "who is killed is told to the coordinator by its supervisor", 8, supervised},
    {"nodes", "hosts are cordoned, drained and resumed, with and without a deadline", 8, nodes},
    {"probes", "workers that have nothing to do are measured, often before the job begins", 6, probes},
    {"local", "checkpoints on the hosts' own disks: deaths, coordinator crashes, one disk lost", 8, local},
    {"speeds", "some workers take three times as long: leaves and layers follow, spares relieve them", 6, speeds},
    {"slow", "more workers than are needed, several of them slow for a time: spares take their places", 6, slow},
    {"big", "1,000 to 4,000 workers, few steps, tree exchange", 0, big},
};
const uint32_t mu_sim_profile_count = sizeof mu_sim_profiles / sizeof mu_sim_profiles[0];

const struct mu_sim_profile *mu_sim_profile_find(const char *name)
{
    for (uint32_t i = 0; i < mu_sim_profile_count; i++)
        if (strcmp(mu_sim_profiles[i].name, name) == 0)
            return &mu_sim_profiles[i];
    return NULL;
}

const struct mu_sim_profile *mu_sim_profile_for_seed(uint64_t seed)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < mu_sim_profile_count; i++)
        total += mu_sim_profiles[i].share;
    const struct mu_sim_profile *at = mu_sim_profiles;
    for (uint64_t draw = seed % total; draw >= at->share; at++)
        draw -= at->share;
    return at;
}
