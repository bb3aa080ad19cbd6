/* Deliberate faults of the protocol, for testing the simulator: `if (MU_MUTANT(MU_MUT_SKIP_PERSIST_GO)) ...`.
 *
 * Every simulated history must notice each of them (`tests/sim --mutants`). In every build but the simulator's the
 * macro is the constant 0 and the branch disappears. Only tests/sim/CMakeLists.txt defines MU_MUTANTS. One thread. */
#ifndef MU_COMMON_MUTANT_H
#define MU_COMMON_MUTANT_H

enum mu_mutant {
    MU_MUT_NONE,
    /* persistence and fencing */
    MU_MUT_SKIP_PERSIST_GENERATION, /* a generation is assigned without a record */
    MU_MUT_SKIP_PERSIST_GO,         /* Go is sent without a record */
    MU_MUT_SKIP_DURABILITY_WAIT,    /* the shell sends at once what should wait for a sync */
    MU_MUT_REUSE_GENERATION,        /* the number of a generation that never went is used again */
    MU_MUT_REUSE_EVENT_NUMBER,      /* event numbers start again after a restart */
    MU_MUT_FORGET_ACCOUNTS,         /* a restarted coordinator does not know where its workers' time went */
    MU_MUT_FORGET_TALLY,            /* a restarted coordinator counts from zero again: losses, suspicions, intervals */
    MU_MUT_FORGET_DEATHS,           /* likewise the deaths of a crash budget */
    MU_MUT_FORGET_REQUESTS,         /* likewise which changes were made already */
    MU_MUT_CHANGE_TWICE,            /* a request that comes again is carried out again */
    MU_MUT_IGNORE_INCARNATION,      /* a restarted worker passes for the process it replaces */
    MU_MUT_KEEP_ZOMBIE,             /* a fenced worker's engine goes on */
    MU_MUT_ACCEPT_STALE_PARK,       /* a status sent before the worker got its Assign is believed */
    MU_MUT_EXIT_BY_NAME,            /* who exited is looked up by its name, whoever has that now */
    MU_MUT_IGNORE_CORDON,           /* workers of a cordoned node get ranks */
    MU_MUT_EXIT_UNHEARD,            /* a supervisor's word that a process is gone is not believed */
    /* generations */
    MU_MUT_GO_BEFORE_ALL_PREPARED, /* Go when all but one are prepared */
    MU_MUT_PLAN_BEFORE_PARKED,     /* planned without waiting until everybody holds still */
    MU_MUT_FORGET_ROLL_FORWARD,    /* who lacks the last update is told to hold it */
    MU_MUT_START_FROM_SEED,        /* initialises although a checkpoint was committed */
    MU_MUT_OVERLAP_LEAVES,         /* the second rank starts at a leaf of the first */
    MU_MUT_NO_FORGIVENESS,         /* leases run on while the coordinator sleeps */
    MU_MUT_LOSE_STATUS,            /* a status that changes between Hello and Welcome is not told */
    /* amendments */
    MU_MUT_AMEND_NOT_ALL,     /* one rank alone is told of them */
    MU_MUT_AMEND_IN_PASSING,  /* they take effect at a step that was passed */
    MU_MUT_FEED_OLD_TERMS,    /* a taker makes its updates by the record that was submitted */
    MU_MUT_FORGET_AMENDMENTS, /* a restarted coordinator knows the record that was submitted */
    /* roll backs */
    MU_MUT_COUNT_VOID_STATE,  /* what was computed before a roll back counts as held */
    MU_MUT_KEEP_VOID_STATE,   /* a worker that is told of one keeps what it held */
    MU_MUT_START_FROM_VOID,   /* later checkpoints stay as good as they were */
    MU_MUT_KEEP_UNDONE_TERMS, /* amendments that took effect later stay */
    /* votes and commands */
    MU_MUT_VOTE_NEWEST,          /* the largest command number wins */
    MU_MUT_VOTE_BEFORE_GRADIENT, /* a rank votes before it holds the whole gradient */
    MU_MUT_EXECUTE_WITHOUT_VOTE, /* a command is executed at the next boundary, whatever the vote says */
    MU_MUT_PARK_MID_STEP,        /* an abort stops in the middle of the update */
    MU_MUT_REUSE_COMMAND_NUMBER, /* a new command takes the number of an old one */
    /* checkpoints and the end */
    MU_MUT_COMMIT_MISSING_PIECE,     /* published when all but one piece are there */
    MU_MUT_ACK_BEFORE_DURABLE,       /* a piece report is acknowledged at once, before anything of it is durable */
    MU_MUT_DELETE_WITHOUT_RECORD,    /* the directory goes while the record still lists it */
    MU_MUT_RETENTION_DELETES_NEWEST, /* the newest checkpoint goes first */
    MU_MUT_RELEASE_EARLY,       /* workers are released when they finish, not when the last checkpoint is committed */
    MU_MUT_RELEASE_LAST_HOLDER, /* who wants to leave may go although nobody else has its state */
    /* states that are not finite */
    MU_MUT_BELIEVE_CONDEMNED, /* what members hold counts although their checkpoint was found bad */
    MU_MUT_FORGET_CONDEMNED,  /* likewise after a restart of the coordinator */
    MU_MUT_END_SUSPECT,       /* the job finishes with weights whose last steps were not finite */
    MU_MUT_RETAIN_SUSPECT,    /* checkpoints of a state in doubt push older ones out */
    /* checkpoint.every: auto */
    MU_MUT_INTERVAL_IGNORES_COST, /* a checkpoint at every step, whatever one takes */
    MU_MUT_INTERVAL_ONCE,         /* chosen after a commit only, whoever is lost in between */
    /* slow workers */
    MU_MUT_FORGET_DEMOTED,     /* a restarted coordinator does not know whose places spares have taken */
    MU_MUT_PREFER_DEMOTED,     /* a plan puts them before everybody else */
    MU_MUT_SUBSTITUTE_DEMOTED, /* one of them is to take the place of another slow worker */
    MU_MUT_RESTORE_UNMEASURED, /* one of them counts as well again as soon as it has a rank */
    MU_MUT_DEMOTE_FASTEST,     /* the fastest worker is taken for the slowest */
    /* layouts and shares */
    MU_MUT_DROP_BEFORE_GO,     /* what lies outside the new share goes when a rank is prepared */
    MU_MUT_GATHER_INCOMPLETE,  /* parameters that others have updated count before they are here */
    MU_MUT_VOTE_BEFORE_STAGE,  /* a stage votes when its forward is done */
    MU_MUT_KEEP_STALE_COPY,    /* the tied embedding of the step before is read again */
    MU_MUT_ROLL_FORWARD_WHOLE, /* after a sharded update, a rank counts as holder of all parameters */
    MU_MUT_MOVE_FROM_ANYONE,   /* chunks are to come from a rank that does not hold them */
    MU_MUT_IGNORE_PARTIAL,     /* only whole states count when the start is chosen */
    MU_MUT_FREE_IDLE_EARLY,    /* who leaves is let go before the others have copied from it */
    MU_MUT_FORGET_LAYOUT,      /* a restarted coordinator takes every generation for plain data parallelism */
    MU_MUT_PIECE_FROM_ANYONE,  /* a piece of a lost writer goes to somebody who does not hold it */
    MU_MUT_FORGET_MIRRORS,     /* what a buddy holds for others does not count */
    MU_MUT_VOTE_BEFORE_MIRROR, /* a buddy votes before it has the gradient of what it guards */
    MU_MUT_MIRROR_STALE,       /* a buddy counts its mirror as updated and did not update it */
    /* state to who lacks it while others step */
    MU_MUT_FEED_REPLAY_TWICE, /* a taker makes each update twice */
    MU_MUT_FEED_FORGET_NORM,  /* a taker makes the update without the norm of the vote */
    MU_MUT_FEED_STEP_BEHIND,  /* a taker counts as whole although the last updates are missing */
    MU_MUT_FEED_PART_MISSING, /* a taker counts as whole when its first giver has ended */
    MU_MUT_FEED_KEEP_PARAMS,  /* parameters that a taker has no moments of are fed once */
    MU_MUT_FEED_OVER_NEWEST,  /* a spare's state makes room although nobody has come past it */
    MU_MUT_FEED_FROM_ANYONE,  /* moments are to come from a replica that does not own them */
    MU_MUT_KEEP_OTHER_STEP,   /* chunks of a transfer that broke off count whatever step they are of */
    /* checkpoints of kind local */
    MU_MUT_COMMIT_ONE_COPY, /* committed when the first of its hosts has answered */
    MU_MUT_FORGET_HOLDERS,  /* a restarted coordinator does not know which hosts have a checkpoint */
    MU_MUT_COPY_NOTHING,    /* a holder answers without having copied */
    MU_MUT_COUNT
};

#ifdef MU_MUTANTS
extern int mu_mutant_active;
#define MU_MUTANT(id) (mu_mutant_active == (id))
#else
#define MU_MUTANT(id) 0
#endif

#endif
