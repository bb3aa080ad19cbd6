/* Invariants of what becomes durable: jobs, generations, checkpoints, events. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "plan/amend.h"

#include "tests/sim/oracle.h"

bool mu_sim_oracle_job_over(const struct mu_sim *sim)
{
    enum mu_job_state state = sim->oracle->state;
    return state == MU_JOB_FINISHED || state == MU_JOB_FAILED || state == MU_JOB_CANCELLED;
}

static bool over(enum mu_job_state state)
{
    return state == MU_JOB_FINISHED || state == MU_JOB_FAILED || state == MU_JOB_CANCELLED;
}

/* ---- jobs ---- */

/* The job goes back: what took effect later goes with what is undone, checkpoints and all. */
static void rolled_back(struct mu_sim *sim, const struct mu_amendment *back)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    struct mu_amendments *law = &sim->law.amendments;
    uint32_t count = 0;
    for (uint32_t i = 0; i < law->count; i++) {
        if (law->list[i].at_step <= back->at_step)
            law->list[count++] = law->list[i];
    }
    law->count = count;
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        const struct mu_checkpoint_record *one = record->kind == MU_RECORD_CHECKPOINT ? record->checkpoint : NULL;
        if (!one)
            continue;
        if (one->number > back->back.checkpoint && (one->state == MU_CKPT_COMMITTED || one->state == MU_CKPT_INTENT))
            mu_sim_violate(sim, "checkpoint %" PRIu64 " is still good although the job went back to %" PRIu64,
                           one->number, back->back.checkpoint);
        if (one->number <= back->back.checkpoint && one->state == MU_CKPT_VOID)
            mu_sim_violate(sim, "checkpoint %" PRIu64 " is void although the job went back only to %" PRIu64,
                           one->number, back->back.checkpoint);
        if (one->number == back->back.checkpoint && one->step != back->at_step)
            mu_sim_violate(sim, "the job goes back to checkpoint %" PRIu64 ", which is not of step %" PRIu64,
                           one->number, back->at_step);
    }
    oracle->newest_step = back->at_step;
    oracle->known = oracle->known < back->at_step ? oracle->known : back->at_step;
}

/* The newest roll back that the law does not have yet. */
static const struct mu_amendment *new_roll_back(const struct mu_sim *sim, const struct mu_amendments *all)
{
    uint32_t era = mu_amend_era(all), i = 0;
    if (era == mu_amend_era(&sim->law.amendments))
        return NULL;
    while (i < all->count && all->list[i].version != era)
        i++;
    return i < all->count ? &all->list[i] : NULL;
}

/* What is settled stays, and what is newly settled takes effect where nobody that counts has passed. A roll back holds
 * from its record on. */
static void amendments_durable(struct mu_sim *sim, const struct mu_job_record *job)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    const struct mu_amendments *all = &job->spec.amendments;
    const struct mu_amendment *back = new_roll_back(sim, all);
    struct mu_amendments settled = {.newest = all->newest};
    uint64_t first = UINT64_MAX;
    uint32_t kept = 0;
    if (back)
        rolled_back(sim, back);
    oracle->rolls_back = mu_amend_rolls_back(&job->spec);
    for (uint32_t i = 0; i < all->count; i++) {
        struct mu_amendment one = all->list[i];
        if (!one.settled && !(one.fields & MU_AMEND_ROLL_BACK))
            continue;
        one.settled = true;
        settled.list[settled.count++] = one;
        bool old = false;
        for (uint32_t k = 0; k < sim->law.amendments.count; k++)
            old = old || memcmp(&sim->law.amendments.list[k], &one, sizeof one) == 0;
        kept += old;
        if (back && one.at_step > back->at_step)
            mu_sim_violate(sim, "amendment %u of step %" PRIu64 " stays although the job went back to step %" PRIu64,
                           one.version, one.at_step, back->at_step);
        if (!old && one.at_step < first)
            first = one.at_step;
    }
    if (kept != sim->law.amendments.count)
        mu_sim_violate(sim, "an amendment that was settled is changed or forgotten");
    if (first == UINT64_MAX)
        return;
    sim->law.amendments = settled;
    oracle->known = oracle->known < first ? oracle->known : first;
    if (back)
        return; /* what was computed before is of another era */
    oracle->amended_generation = job->generation;
    oracle->amended_step = first;
}

/* The newest committed checkpoint with a number above this one whose values, of those in `what`, are finite; NULL:
 * there is none. */
static const struct mu_checkpoint_record *newest_finite(struct mu_sim *sim, uint64_t above, struct mu_sim_mask what)
{
    const struct mu_checkpoint_record *newest = NULL;
    struct mu_sim_values values;
    uint64_t step;
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        bool committed = record->kind == MU_RECORD_CHECKPOINT && record->checkpoint->state == MU_CKPT_COMMITTED;
        if (committed && record->checkpoint->number > above &&
            mu_sim_files_load(sim, record->checkpoint->dir, &step, &values) && !mu_sim_has_nan(&values, what)) {
            newest = record->checkpoint;
            above = newest->number;
        }
    }
    return newest;
}

static const struct mu_checkpoint_record *newest_sound(struct mu_sim *sim, uint64_t above)
{
    return newest_finite(sim, above, (struct mu_sim_mask){sim->all_chunks, sim->all_chunks});
}

/* Its result is the weights. (Moments that are not finite spoil them with the first update, but there may have been
 * none since they were loaded: all steps that were left may have been skipped.) */
static bool final_weights_are_finite(struct mu_sim *sim)
{
    const struct mu_checkpoint_record *newest = newest_finite(sim, 0, (struct mu_sim_mask){sim->all_chunks, 0});
    return newest && newest->step == mu_job_end(&sim->law);
}

static void job_durable(struct mu_sim *sim, const struct mu_job_record *job, const struct mu_job_record *before)
{
    uint8_t expected[32];
    if (before) {
        if (job->generation < before->generation)
            mu_sim_violate(sim, "the job's generation goes back from %" PRIu64 " to %" PRIu64, before->generation,
                           job->generation);
        if (job->next_checkpoint < before->next_checkpoint)
            mu_sim_violate(sim, "the next checkpoint number goes back from %" PRIu64 " to %" PRIu64,
                           before->next_checkpoint, job->next_checkpoint);
        if (job->command.number < before->command.number)
            mu_sim_violate(sim, "the command number goes back from %" PRIu64 " to %" PRIu64, before->command.number,
                           job->command.number);
        if (before->checkpoint_seen && !job->checkpoint_seen)
            mu_sim_violate(sim, "the job record forgets that there was a checkpoint");
        if (over(before->state) && job->state != before->state)
            mu_sim_violate(sim, "an ended job comes back (state %d to %d)", (int)before->state, (int)job->state);
    }
    sim->oracle->state = job->state;
    amendments_durable(sim, job);
    if (job->state == MU_JOB_FINISHED && !(before && before->state == MU_JOB_FINISHED)) {
        mu_sim_hash_weights(mu_sim_oracle_values(sim, mu_job_end(&sim->law))->params, expected);
        if (memcmp(expected, job->weights_sha256, 32) != 0)
            mu_sim_violate(sim, "the final weights differ from the undisturbed run's");
        if (job->steps_done != mu_job_end(&sim->law))
            mu_sim_violate(sim, "the job is finished after %" PRIu64 " of %" PRIu64 " steps", job->steps_done,
                           mu_job_end(&sim->law));
        if (sim->stats.faults[MU_SIM_FAULT_POISON] > 0 && !final_weights_are_finite(sim))
            mu_sim_violate(sim, "the job is finished, and the weights in its newest checkpoint are not finite");
        if (sim->params.checkpoints && mu_sim_oracle_committed_step(sim) != mu_job_end(&sim->law))
            mu_sim_violate(sim, "the job is finished, but its newest checkpoint is of step %" PRIu64,
                           mu_sim_oracle_committed_step(sim));
    }
}

/* What was counted goes on over restarts. */
static void tally_durable(struct mu_sim *sim, const struct mu_tally_record *tally, const struct mu_tally_record *before)
{
    if (!before || !mu_id_equal(before->job_uid, tally->job_uid))
        return;
    if (tally->workers_lost < before->workers_lost || tally->generations < before->generations ||
        tally->replayed_steps < before->replayed_steps || tally->hung_count < before->hung_count ||
        tally->interval.worker_us < before->interval.worker_us)
        mu_sim_violate(
            sim, "the job's tally goes back: lost %" PRIu64 " to %" PRIu64 ", generations %" PRIu64 " to %" PRIu64,
            before->workers_lost, tally->workers_lost, before->generations, tally->generations);
}

/* Seconds of an account are moved between classes, but never lost and never counted twice. */
static void account_durable(struct mu_sim *sim, const struct mu_account_record *account,
                            const struct mu_account_record *before)
{
    uint64_t sum_us = 0, before_us = 0, passed_us = account->wall_us - account->began_wall_us;
    for (int k = 0; k < MU_TIME_CLASS_COUNT; k++) {
        sum_us += account->us[k];
        before_us += before ? before->us[k] : 0;
    }
    if (before && mu_id_equal(before->job_uid, account->job_uid) && sum_us < before_us)
        mu_sim_violate(sim, "the account of %s goes back: %" PRIu64 " us after %" PRIu64, account->worker, sum_us,
                       before_us);
    uint64_t drift_us = passed_us * sim->params.clock_ppm / 1000000; /* seconds are counted by the monotonic clock */
    if (account->worker[0] && sim->coord.wall_jump_us == 0 && sum_us > passed_us + drift_us + MU_SIM_S)
        mu_sim_violate(sim, "the account of %s has %" PRIu64 " us in %" PRIu64, account->worker, sum_us, passed_us);
}

static void death_durable(struct mu_sim *sim, const struct mu_death_record *death, const struct mu_death_record *before)
{
    if (before)
        mu_sim_violate(sim, "death %" PRIu64 " overwrites death %" PRIu64 ", and there is room", death->number,
                       before->number);
}

/* No change is made twice, and none is forgotten while there is room. */
static void request_durable(struct mu_sim *sim, const struct mu_request_record *request,
                            const struct mu_request_record *before)
{
    if (before)
        mu_sim_violate(sim, "request %" PRIu64 " overwrites request %" PRIu64 ", and there is room", request->number,
                       before->number);
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_REQUEST && mu_id_equal(record->request->id, request->id))
            mu_sim_violate(sim, "the change of request %" PRIu64 " is made again as %" PRIu64, record->request->number,
                           request->number);
    }
}

/* ---- generations ---- */

/* What those held together who are attached all the while from the decision to Go is not left behind. */
static void check_start(struct mu_sim *sim, const struct mu_sim_generation *generation, uint64_t start_step)
{
    struct mu_sim_union u = {0};
    uint64_t newest = 0;
    for (uint32_t slot = 0; slot < sim->params.slots && sim->params.slots < 200; slot++) {
        const struct mu_sim_ghost *before = &generation->before[slot];
        if (before->session && before->session == sim->workers[slot].session && mu_sim_oracle_attached(sim, slot) &&
            !mu_sim_oracle_is_void(sim, before->era))
            mu_sim_union_add(&u, &before->held);
    }
    if (mu_sim_union_newest(sim, &u, &newest) && newest > start_step)
        mu_sim_violate(sim,
                       "generation %" PRIu64 " starts at step %" PRIu64
                       " although the attached workers together held step %" PRIu64,
                       generation->number, start_step, newest);
    free(u.held);
}

static bool is_member(const struct mu_generation_record *record, struct mu_id incarnation)
{
    for (uint32_t i = 0; record && i < record->world; i++) {
        if (mu_id_equal(record->members[i].incarnation, incarnation))
            return true;
    }
    return false;
}

/* Who holds nothing and is new in this generation may not be of a cordoned node. */
static void cordons_hold(struct mu_sim *sim, const struct mu_generation_record *record,
                         const struct mu_generation_record *before)
{
    for (uint32_t i = 0; i < record->world; i++) {
        uint32_t slot;
        uint64_t life;
        struct mu_node_record key = {0};
        if (is_member(before, record->members[i].incarnation) ||
            !mu_sim_worker_address(sim, record->members[i].address, &slot, &life) || !mu_sim_worker_alive(sim, slot) ||
            sim->nodes[MU_SIM_NODE_WORKER + slot].life != life || sim->workers[slot].engine.held.has_state)
            continue;
        snprintf(key.name, sizeof key.name, "h%u", sim->workers[slot].host);
        const struct mu_record *found =
            mu_sim_store_find(sim->store, &(struct mu_record){.kind = MU_RECORD_NODE, .node = &key});
        if (found && found->node->order == MU_NODE_CORDON)
            mu_sim_violate(sim, "generation %" PRIu64 " takes in a worker of node %s, which is cordoned",
                           record->generation, key.name);
    }
}

static void generation_durable(struct mu_sim *sim, const struct mu_generation_record *record,
                               const struct mu_generation_record *before)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    struct mu_sim_generation *generation = mu_sim_oracle_generation(sim, record->generation);
    if (generation && memcmp(generation->secret, record->secret, 32) != 0) {
        mu_sim_violate(sim, "generation number %" PRIu64 " is used twice", record->generation);
        return;
    }
    if (record->generation < oracle->newest_generation)
        mu_sim_violate(sim, "generation %" PRIu64 " becomes durable after %" PRIu64, record->generation,
                       oracle->newest_generation);
    if (!generation) {
        cordons_hold(sim, record, before);
        mu_sim_oracle_check_layout(sim, record->generation, &record->layout);
        if (record->world != mu_layout_world(&record->layout))
            mu_sim_violate(sim, "generation %" PRIu64 " has %u members, its layout %u ranks", record->generation,
                           record->world, mu_layout_world(&record->layout));
        generation = mu_sim_oracle_add_generation(sim, record->generation, &record->layout, record->secret);
        oracle->newest_generation = record->generation;
    }
    if (!record->go || generation->go)
        return;
    generation->go = true;
    oracle->newest_go = record->generation;
    if (oracle->nan_steps > 0)
        oracle->nan_unheard += MU_SIM_UNHEARD;
    check_start(sim, generation, record->start_step);
    mu_sim_pace_go(sim, record->world);
    if (oracle->newest_step > record->start_step)
        sim->stats.replayed += oracle->newest_step - record->start_step;
    oracle->newest_step = record->start_step;
    for (uint32_t rank = 0; rank < record->world; rank++) {
        if (!generation->ranks[rank].prepared) {
            mu_sim_violate(sim, "generation %" PRIu64 " may go although rank %u never was prepared", record->generation,
                           rank);
            return;
        }
    }
}

/* ---- checkpoints ---- */

static uint32_t count_committed(const struct mu_sim *sim, uint64_t above)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_CHECKPOINT && record->checkpoint->state == MU_CKPT_COMMITTED &&
            record->checkpoint->number > above)
            count++;
    }
    return count;
}

uint64_t mu_sim_oracle_committed_step(const struct mu_sim *sim)
{
    uint64_t number = 0, step = 0;
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_CHECKPOINT && record->checkpoint->state == MU_CKPT_COMMITTED &&
            record->checkpoint->number > number) {
            number = record->checkpoint->number;
            step = record->checkpoint->step;
        }
    }
    return step;
}

static void committed(struct mu_sim *sim, const struct mu_checkpoint_record *record)
{
    const char *why = "";
    struct mu_sim_values values = {{0}, {0}};
    uint64_t step = 0;
    if (sim->oracle->committed_turn == 0)
        sim->oracle->committed_turn = sim->coord.judged_turn;
    sim->stats.commits++;
    bool reported = true; /* false: found after a restart, by its manifest */
    for (uint32_t i = 0; i < record->piece_count; i++)
        reported = reported && record->pieces[i].done;
    if (reported && !mu_sim_files_complete(sim, record, false, &why))
        mu_sim_violate(sim, "checkpoint %" PRIu64 " is committed, but %s", record->number, why);
    else if (!mu_sim_files_load(sim, record->dir, &step, &values) && sim->disk_lost && record->holder_count == 1)
        mu_sim_oracle_damaged(sim); /* the only host that there was, and its disk went at this moment */
    else if (!mu_sim_files_load(sim, record->dir, &step, &values))
        mu_sim_violate(sim, "checkpoint %" PRIu64 " is committed without a manifest", record->number);
    else if (step != record->step || step > mu_job_end(&sim->law) || !mu_sim_oracle_values_right(sim, &values, step))
        mu_sim_violate(sim, "checkpoint %" PRIu64 " of step %" PRIu64 " differs from the undisturbed run",
                       record->number, record->step);
}

/* What nobody knows to be spoiled counts as good when older ones are deleted, and a job is promised only that one
 * spoiled checkpoint at a time leaves a good one to go back to. So the newest is spoiled only while the one just before
 * it (by number: the store keeps no order) can be trained from. */
struct mu_sim_directory *mu_sim_oracle_to_poison(struct mu_sim *sim)
{
    const struct mu_checkpoint_record *newest = newest_sound(sim, 0), *older = NULL;
    for (uint32_t i = 0; newest && i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind != MU_RECORD_CHECKPOINT || record->checkpoint->state != MU_CKPT_COMMITTED)
            continue;
        if (record->checkpoint->number > newest->number)
            return NULL; /* which is spoiled already */
        if (record->checkpoint->number < newest->number && (!older || record->checkpoint->number > older->number))
            older = record->checkpoint;
    }
    if (!older || newest->step >= mu_job_end(&sim->law)) /* from that one no step follows */
        return NULL;
    struct mu_sim_values values;
    uint64_t step;
    const struct mu_sim_mask all = {sim->all_chunks, sim->all_chunks};
    bool sound = mu_sim_files_load(sim, older->dir, &step, &values) && !mu_sim_has_nan(&values, all);
    if (sound)
        sim->oracle->nan_steps = 0;
    return sound ? mu_sim_files_find(&sim->files, newest->dir) : NULL;
}

static void retired(struct mu_sim *sim, const struct mu_checkpoint_record *record)
{
    uint64_t step;
    struct mu_sim_values values;
    struct mu_sim_mask all = {sim->all_chunks, sim->all_chunks};
    bool good = mu_sim_files_load(sim, record->dir, &step, &values) && !mu_sim_has_nan(&values, all);
    if (record->state == MU_CKPT_BAD) {
        sim->oracle->nan_steps = 0;
        if (good)
            mu_sim_violate(sim, "checkpoint %" PRIu64 " is whole and is declared bad", record->number);
        return;
    }
    uint32_t newer = count_committed(sim, record->number);
    if (newer < sim->params.keep)
        mu_sim_violate(sim, "checkpoint %" PRIu64 " is deleted although only %u newer ones exist (keep %" PRIu64 ")",
                       record->number, newer, sim->params.keep);
    if (good && sim->stats.faults[MU_SIM_FAULT_POISON] > 0 && !newest_sound(sim, record->number))
        mu_sim_violate(sim, "checkpoint %" PRIu64 " is deleted, and no newer one can be trained from", record->number);
    if (sim->params.keep_every && record->step % sim->params.keep_every == 0 && good)
        mu_sim_violate(sim,
                       "checkpoint %" PRIu64 " of step %" PRIu64 " is deleted although every %" PRIu64 "th is kept",
                       record->number, record->step, sim->params.keep_every);
}

static void checkpoint_durable(struct mu_sim *sim, const struct mu_checkpoint_record *record,
                               const struct mu_checkpoint_record *before)
{
    bool was_committed = before && before->state == MU_CKPT_COMMITTED;
    if (record->state == MU_CKPT_COMMITTED && !was_committed) {
        if (before && before->state != MU_CKPT_INTENT)
            mu_sim_violate(sim, "checkpoint %" PRIu64 " comes back from state %d", record->number, (int)before->state);
        committed(sim, record);
    }
    if (before && before->state == MU_CKPT_VOID && sim->oracle->rolls_back)
        mu_sim_violate(sim, "checkpoint %" PRIu64 " is void and deleted before a generation has gone", record->number);
    if (record->state == MU_CKPT_INTENT && !before)
        mu_sim_pace_ordered(sim, record);
    if (was_committed && record->state == MU_CKPT_INTENT)
        mu_sim_violate(sim, "checkpoint %" PRIu64 " was committed and is an intent again", record->number);
    if (was_committed && (record->state == MU_CKPT_DELETING || record->state == MU_CKPT_BAD))
        retired(sim, record);
    if (before && strcmp(before->dir, record->dir) != 0)
        mu_sim_violate(sim, "checkpoint %" PRIu64 " moves from %s to %s", record->number, before->dir, record->dir);
}

/* %h in a record's path stands for any host. */
static bool is_path_of(const char *dir, const char *path)
{
    const char *at = strstr(dir, "%h");
    if (!at)
        return strcmp(dir, path) == 0;
    const char *rest = strstr(path, at + 2);
    return strcmp(dir, path) == 0 || (strncmp(dir, path, (size_t)(at - dir)) == 0 && rest && strcmp(rest, at + 2) == 0);
}

bool mu_sim_oracle_lists(const struct mu_sim *sim, const char *path)
{
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_CHECKPOINT && record->checkpoint->state == MU_CKPT_COMMITTED &&
            is_path_of(record->checkpoint->dir, path))
            return true;
    }
    return false;
}

/* A directory is about to go: no durable record may still list it. */
void mu_sim_oracle_deleted(struct mu_sim *sim, const char *path)
{
    if (mu_sim_oracle_lists(sim, path))
        mu_sim_violate(sim, "the directory of a committed checkpoint is removed: %s", path);
}

bool mu_sim_oracle_all_whole(struct mu_sim *sim)
{
    struct mu_sim_values values;
    uint64_t step;
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_CHECKPOINT && record->checkpoint->state == MU_CKPT_COMMITTED &&
            !mu_sim_files_load(sim, record->checkpoint->dir, &step, &values))
            return false;
    }
    return true;
}

void mu_sim_oracle_damaged(struct mu_sim *sim)
{
    sim->oracle->restore_lost = true;
}

/* ---- events ---- */

/* Who is taken for hanging did hang, or its messages were held up: else the coordinator has missed something. */
static void judge_hang(struct mu_sim *sim, const struct mu_event_record *event)
{
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        const struct mu_sim_node *node = &sim->nodes[MU_SIM_NODE_WORKER + slot];
        bool it = node->alive && strcmp(mu_worker_name(sim->workers[slot].core), event->worker) == 0;
        if (it && !node->stopped && !sim->workers[slot].engine.was_hung && sim->partition_count == 0)
            mu_sim_violate(sim, "worker %u is taken for hanging and does not: %s", slot, event->text);
    }
}

static void event_durable(struct mu_sim *sim, const struct mu_event_record *event)
{
    if (event->number <= sim->oracle->newest_event)
        mu_sim_violate(sim, "event number %" PRIu64 " is written after %" PRIu64, event->number,
                       sim->oracle->newest_event);
    sim->oracle->newest_event = event->number;
    if (sim->params.nobody_lost && strcmp(event->kind, "worker_lost") == 0)
        mu_sim_violate(sim, "%s is declared lost although only the coordinator slept: %s", event->worker, event->text);
    if (strcmp(event->kind, "worker_lost") == 0 && strstr(event->text, "no progress"))
        judge_hang(sim, event);
}

void mu_sim_oracle_event(struct mu_sim *sim, const struct mu_event_record *event)
{
    mu_sim_trace(sim, "event %" PRIu64 " %s %s: %s", event->number, event->kind, event->worker, event->text);
    if (event->number <= sim->oracle->newest_watched)
        mu_sim_violate(sim, "event number %" PRIu64 " is shown after %" PRIu64, event->number,
                       sim->oracle->newest_watched);
    if (event->number > sim->oracle->newest_event)
        mu_sim_violate(sim, "event %" PRIu64 " is shown before it is durable", event->number);
    sim->oracle->newest_watched = event->number;
    if (strcmp(event->kind, "worker_demoted") == 0)
        mu_sim_client_demoted(sim, event->worker);
}

void mu_sim_oracle_durable(struct mu_sim *sim, const struct mu_record *record, const struct mu_record *before)
{
    switch (record->kind) {
    case MU_RECORD_JOB:
        job_durable(sim, record->job, before ? before->job : NULL);
        break;
    case MU_RECORD_GENERATION:
        generation_durable(sim, record->generation, before ? before->generation : NULL);
        break;
    case MU_RECORD_CHECKPOINT:
        checkpoint_durable(sim, record->checkpoint, before ? before->checkpoint : NULL);
        break;
    case MU_RECORD_TALLY:
        mu_sim_pace_tally(sim, record->tally);
        tally_durable(sim, record->tally, before ? before->tally : NULL);
        break;
    case MU_RECORD_DEATH:
        death_durable(sim, record->death, before ? before->death : NULL);
        break;
    case MU_RECORD_REQUEST:
        request_durable(sim, record->request, before ? before->request : NULL);
        break;
    case MU_RECORD_ACCOUNT:
        account_durable(sim, record->account, before ? before->account : NULL);
        break;
    case MU_RECORD_EVENT:
        event_durable(sim, record->event);
        break;
    case MU_RECORD_WORKER:
    case MU_RECORD_NODE:
    case MU_RECORD_KIND_COUNT:
        break;
    }
}

/* ---- views ---- */

/* What was said before an Assign does not count after it: over one stream nobody goes back to an older generation. */
static void workers_viewed(struct mu_sim *sim)
{
    struct mu_sim_oracle *oracle = sim->oracle;
    struct mu_worker_view view;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sim->coord.core); slot++) {
        oracle->seen = mu_sim_grow(oracle->seen, slot, &oracle->seen_capacity, sizeof *oracle->seen);
        struct mu_sim_seen *seen = &oracle->seen[slot];
        if (!mu_coord_worker_view(sim->coord.core, slot, &view) || view.session == 0)
            continue;
        bool same = mu_id_equal(seen->incarnation, view.incarnation) && seen->session == view.session;
        if (same && view.generation < seen->generation)
            mu_sim_violate(
                sim, "the coordinator believes that %s, which was assigned generation %" PRIu64 ", stands in %" PRIu64,
                view.name, seen->generation, view.generation);
        *seen = (struct mu_sim_seen){view.incarnation, view.session, view.generation};
    }
}

/* The catalog that users see never lists what is not whole. */
void mu_sim_oracle_views(struct mu_sim *sim)
{
    if (sim->params.slots < 200)
        workers_viewed(sim);
    struct mu_checkpoint_record shown;
    uint64_t last = 0;
    for (uint32_t i = 0; mu_coord_checkpoint_view(sim->coord.core, sim->spec.name, i, &shown); i++) {
        if (shown.number <= last)
            mu_sim_violate(sim, "the list of checkpoints is not in order at %" PRIu64, shown.number);
        last = shown.number;
        if (sim->params.local) /* a host's disk may be lost */
            continue;
        struct mu_sim_directory *directory = mu_sim_files_find(&sim->files, shown.dir);
        if (shown.state == MU_CKPT_COMMITTED && (!directory || !directory->manifest))
            mu_sim_violate(sim, "checkpoint %" PRIu64 " is listed as committed, but it is not there", shown.number);
    }
}

/* ---- what supervisors tell ---- */

struct mu_sim_present {
    uint32_t count;
    struct mu_id incarnations[]; /* of all that are counted on */
};

static bool is_counted_on(const struct mu_sim *sim, uint32_t slot, struct mu_id *ret_incarnation)
{
    struct mu_worker_view view;
    if (!mu_coord_worker_view(sim->coord.core, slot, &view) || view.state == MU_WS_LOST)
        return false;
    *ret_incarnation = view.incarnation;
    return true;
}

struct mu_sim_present *mu_sim_oracle_before_exit(struct mu_sim *sim)
{
    uint32_t slots = mu_coord_worker_slots(sim->coord.core);
    struct mu_sim_present *present = mu_sim_alloc(sizeof *present + slots * sizeof present->incarnations[0]);
    for (uint32_t slot = 0; slot < slots; slot++)
        present->count += is_counted_on(sim, slot, &present->incarnations[present->count]);
    return present;
}

void mu_sim_oracle_after_exit(struct mu_sim *sim, struct mu_sim_present *before, const struct mu_process_exit *exit)
{
    struct mu_sim_present *after = mu_sim_oracle_before_exit(sim);
    for (uint32_t i = 0, at = 0; i < before->count; i++) { /* in order of their slots, before and after */
        struct mu_id incarnation = before->incarnations[i];
        bool stays = at < after->count && mu_id_equal(after->incarnations[at], incarnation);
        at += stays;
        if (mu_id_equal(incarnation, exit->incarnation) == stays)
            mu_sim_violate(sim,
                           stays ? "worker %s is gone, says its supervisor, and is still counted on"
                                 : "because of the end of a process of %s another one is taken for lost",
                           exit->worker);
    }
    free(after);
    free(before);
}
