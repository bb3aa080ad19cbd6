/* The oracle's own data, shared by its two files. */
#ifndef MU_TESTS_SIM_ORACLE_H
#define MU_TESTS_SIM_ORACLE_H

#include "tests/sim/sim.h"

enum { MU_SIM_UNHEARD = 4 }; /* steps that a change of generation swallows, or that one report sums up with others */

struct mu_sim_rank {
    bool assigned, prepared, running;
    uint32_t slot, runner;
    uint64_t life;
};

/* What one generation decided about one step: every rank must decide the same. */
struct mu_sim_decision {
    bool set, boundary_set, park;
    struct mu_step_result result;
    uint64_t checkpoint;
};

/* A process that is dead, which the coordinator cannot know yet: for all it knows, the state is still there. */
struct mu_sim_ghost {
    uint64_t session, died_us;
    struct mu_held held;
    uint32_t era;
};

struct mu_sim_generation {
    uint64_t number;
    uint32_t world;
    struct mu_layout layout;
    uint8_t secret[32];
    bool go; /* durable */
    struct mu_sim_rank *ranks;
    struct mu_sim_ghost *before;         /* [slots] what everybody held when it was decided */
    struct mu_sim_decision decisions[2]; /* by parity of the step: ranks are at most one step apart */
};

/* Where the coordinator sees a worker that speaks to it over one stream. */
struct mu_sim_seen {
    struct mu_id incarnation;
    uint64_t session, generation;
};

/* Of checkpoint.every: auto; see oracle_pace.c. */
struct mu_sim_pace {
    uint64_t generation, decided_us, step; /* the newest step that was decided: in which generation, when */
    uint64_t begun_us;                     /* that generation's first one, or since nothing was being written */
    uint64_t *step_us;                     /* [steps] how long each took when it was done last */
    uint32_t world;
    struct mu_tally_record tally; /* the newest durable one */
    double interval_s;            /* that pays, when it was to be chosen last; 0: nothing was committed yet */
};

/* Of slow workers; see oracle_slow.c. */
struct mu_sim_slow {
    uint32_t count; /* as the coordinator said it last; after its restart: as it is durable */
    struct mu_id demoted[MU_DEMOTED_KEPT];
    int change; /* 1: one more, -1: one fewer, and its event has not followed yet */
    struct mu_id changed;
    struct mu_id *offered; /* who was there when the newest plan was asked for */
    uint32_t offered_count, offered_capacity;
    uint64_t due_generation, due_us; /* a spare is to take a slow worker's place: since when, in this one */
};

struct mu_sim_oracle {
    struct mu_sim_seen *seen; /* by the coordinator's slots */
    uint32_t seen_capacity;
    struct mu_sim_ghost *ghosts;
    uint32_t ghost_count, ghost_capacity;
    struct mu_sim_values *values; /* [steps + 2] state after so many updates */
    uint64_t *gradients;
    uint64_t known;                        /* values up to here are computed */
    struct mu_sim_generation *generations; /* whose record was durable at some time, in that order */
    uint32_t generation_count, generation_capacity;
    uint64_t newest_generation, newest_assigned, newest_go, newest_step;
    uint64_t newest_event, newest_watched;
    enum mu_job_state state;                   /* durable */
    uint64_t committed_turn;                   /* in which a checkpoint was committed for the first time; 0: none */
    uint64_t amended_generation, amended_step; /* the newest one that settled something, and from where on */
    bool rolls_back;                           /* durable, and no generation has gone since */
    struct mu_sim_pace pace;
    struct mu_sim_slow slow;
    uint64_t nan_steps, nan_since_us; /* in a row, because of what was loaded; when they became enough to tell */
    uint64_t nan_unheard;             /* of them, at most: their reports were swallowed as generations changed */
    bool restore_lost; /* a committed checkpoint was damaged by a fault: going back further is legitimate */
};

struct mu_sim_generation *mu_sim_oracle_generation(struct mu_sim *sim, uint64_t number);
struct mu_sim_generation *mu_sim_oracle_add_generation(struct mu_sim *sim, uint64_t number,
                                                       const struct mu_layout *layout, const uint8_t secret[32]);
/* Computed before the job was rolled back: nobody may use it any more. */
bool mu_sim_oracle_is_void(const struct mu_sim *sim, uint32_t era);
uint32_t mu_sim_oracle_era(const struct mu_sim *sim, uint32_t slot); /* of what it holds */
/* Has been attached for a while: the coordinator certainly knows what it holds. */
bool mu_sim_oracle_attached(struct mu_sim *sim, uint32_t slot);
bool mu_sim_oracle_values_right(struct mu_sim *sim, const struct mu_sim_values *values, uint64_t step);
/* oracle_pace.c */
void mu_sim_pace_decided(struct mu_sim *sim, uint64_t generation, uint64_t step); /* by the first rank that knows */
void mu_sim_slow_decided(struct mu_sim *sim, uint64_t generation, uint64_t step); /* likewise */
void mu_sim_pace_go(struct mu_sim *sim, uint32_t world);
void mu_sim_pace_tally(struct mu_sim *sim, const struct mu_tally_record *tally);
void mu_sim_pace_ordered(struct mu_sim *sim, const struct mu_checkpoint_record *record);
/* oracle_plan.c */
void mu_sim_oracle_check_layout(struct mu_sim *sim, uint64_t number, const struct mu_layout *layout);

#endif
