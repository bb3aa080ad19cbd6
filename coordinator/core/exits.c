/* Deaths of workers' processes: the crash budget of each name, and what supervisors tell.
 *
 * A supervisor has waited for its child: it knows that the process is gone, and which incarnation it was. That is a
 * witness who cannot be wrong, so a member is lost at once, whether its stream has been reset yet or not. What the
 * answer grants is the other half: when the supervisor may start the name again. */
#include "coordinator/core/internal.h"

#include <string.h>

enum { RESTART_PAUSE_MS = 1000 }; /* for each death within the window but the first */

static uint64_t hash_of(const char *name)
{
    return mu_xxh3_64(name, strlen(name), 1) | 1;
}

/* Within the window. */
static uint32_t recent_deaths(const struct mu_coord *coord, const char *name)
{
    uint64_t hash = hash_of(name), now = lease_now(coord);
    uint64_t window_us = (uint64_t)coord->config.crash_window_ms * 1000;
    uint32_t count = 0;
    for (uint32_t i = 0; i < MU_DEATHS_KEPT; i++)
        count += coord->deaths[i].name_hash == hash && now - coord->deaths[i].lease_us < window_us;
    return count;
}

bool death_is_counted(const struct mu_coord *coord, struct mu_id incarnation)
{
    for (uint32_t i = 0; i < MU_DEATHS_KEPT; i++) {
        if (coord->deaths[i].name_hash && mu_id_equal(coord->deaths[i].incarnation, incarnation))
            return true;
    }
    return false;
}

void count_death(struct mu_coord *coord, const struct job *job, const char *name, const char *host,
                 struct mu_id incarnation, const char *why)
{
    uint64_t hash = hash_of(name);
    uint32_t at = (uint32_t)(coord->death_count % MU_DEATHS_KEPT);
    coord->deaths[at].name_hash = hash;
    coord->deaths[at].lease_us = lease_now(coord);
    coord->deaths[at].incarnation = incarnation;
    persist_death(coord, &(struct mu_death_record){.number = coord->death_count++,
                                                   .name_hash = hash,
                                                   .wall_us = coord->wall_us,
                                                   .incarnation = incarnation});
    uint32_t count = recent_deaths(coord, name);
    if (count <= coord->config.crash_limit)
        return;
    struct mu_worker_record *record = note_worker(coord, name);
    if (!record || record->quarantined)
        return;
    record->quarantined = true;
    record->revision = coord->last_event + 1;
    copy_text(record->host, sizeof record->host, host);
    format_into(record->reason, sizeof record->reason, "lost %u times within %u s, last: %s", count,
                coord->config.crash_window_ms / 1000, why);
    persist_worker(coord, record);
    event_of_name(coord, MU_EVENT_ERROR, "worker_quarantined", job, name,
                  "worker %s quarantined (%s); lift it with: muster undrain %s", name, record->reason, name);
}

/* ---- exits ---- */

static struct worker *find_process(struct mu_coord *coord, const struct mu_process_exit *exit)
{
    if (MU_MUTANT(MU_MUT_EXIT_BY_NAME))
        return find_worker(coord, exit->worker);
    for (uint32_t slot = 0; slot < coord->worker_high; slot++) {
        struct worker *worker = &coord->workers[slot];
        if (worker->used && mu_id_equal(worker->incarnation, exit->incarnation))
            return worker;
    }
    return NULL;
}

static void process_is_gone(struct mu_coord *coord, struct worker *worker, const struct mu_process_exit *exit)
{
    struct job *job = job_of(coord, worker);
    bool had_nothing = worker->rank == NONE && (worker->status.generation == 0 || worker->draining);
    if (worker->session && (is_over(job) || (exit->signal == 0 && had_nothing))) {
        uint64_t session = worker->session;
        on_disconnected(coord, session, MU_STREAM_EXIT, exit->text);
        close_session(coord, session);
    } else if (!worker->lost && !MU_MUTANT(MU_MUT_EXIT_UNHEARD)) {
        declare_lost(coord, worker, "%s, says its supervisor", exit->text);
    }
}

/* May the name be started again? `text` says why not. */
static enum mu_exit_verdict judge(struct mu_coord *coord, const struct job *job, const struct mu_process_exit *exit,
                                  char text[MU_TEXT_SIZE])
{
    const struct mu_worker_record *record = find_worker_record(coord, exit->worker);
    if (job && is_over(job)) {
        format_into(text, MU_TEXT_SIZE, "job '%s' is over", exit->job);
        return MU_EXIT_STAY_AWAY;
    }
    if (record && (record->quarantined || record->draining)) {
        format_into(text, MU_TEXT_SIZE, "%s (%s); lift it with: muster undrain %s",
                    record->quarantined ? "quarantined" : "drained", record->reason, exit->worker);
        return MU_EXIT_ASK_AGAIN;
    }
    const struct mu_node_record *node = find_node(coord, exit->host);
    if (node && node->order == MU_NODE_DRAIN) {
        format_into(text, MU_TEXT_SIZE, "node %s is drained (%s); lift it with: muster node resume %s", node->name,
                    node->reason, node->name);
        return MU_EXIT_ASK_AGAIN;
    }
    if (exit->signal == 0 && !exit->again) {
        format_into(text, MU_TEXT_SIZE, "%s",
                    exit->code == 0 ? "it left in good order" : "what it ended for would only come again");
        return MU_EXIT_STAY_AWAY;
    }
    text[0] = 0;
    return MU_EXIT_START_AGAIN;
}

void on_exited(struct mu_coord *coord, uint64_t cookie, const struct mu_process_exit *exit)
{
    struct worker *worker = exit->again || mu_id_is_zero(exit->incarnation) ? NULL : find_process(coord, exit);
    struct job *job = find_job(coord, exit->job);
    const struct mu_worker_record *record = find_worker_record(coord, exit->worker);
    const struct mu_node_record *node = find_node(coord, exit->host);
    bool drained = (record && record->draining) || (node && node->order == MU_NODE_DRAIN);
    if (worker)
        process_is_gone(coord, worker, exit);
    else if (exit->signal && !exit->again && !drained && !death_is_counted(coord, exit->incarnation))
        count_death(coord, job, exit->worker, exit->host, exit->incarnation, exit->text);

    char text[MU_TEXT_SIZE];
    enum mu_exit_verdict verdict = judge(coord, job, exit, text);
    uint32_t deaths = verdict == MU_EXIT_START_AGAIN ? recent_deaths(coord, exit->worker) : 0;
    if (!exit->again && (exit->signal || exit->code))
        event_of_name(coord, MU_EVENT_WARNING, "worker_exited", job, exit->worker,
                      "worker %s on %s (pid %llu) %s; %s%s", exit->worker, exit->host, (unsigned long long)exit->pid,
                      exit->text, verdict == MU_EXIT_START_AGAIN ? "it is started again" : "it stays away: ", text);
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_REPLY,
                                          .reply = {.cookie = cookie,
                                                    .text = text,
                                                    .verdict = verdict,
                                                    .after_ms = deaths > 1 ? (deaths - 1) * RESTART_PAUSE_MS : 0}});
}
