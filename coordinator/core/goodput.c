#include "coordinator/core/goodput.h"

#include "coordinator/core/internal.h"

#include <string.h>

enum {
    FLUSH_US = 10000000, /* what was added is recorded so often */
    FLUSH_ACCOUNTS = 256 /* of them in one tick */
};
static const uint64_t DOWN_KEPT_US = 24ull * 3600 * 1000000; /* who is not back by then is not coming */

const char *const mu_time_class_names[MU_TIME_CLASS_COUNT] = {
    "useful",          "communication", "bubble",        "straggler",        "data",   "checkpoint", "replayed",
    "recovery_detect", "recovery_park", "recovery_plan", "recovery_prepare", "change", "waiting",    "starting",
    "spare",           "down",          "unreported"};

bool mu_time_class_is_lost(enum mu_time_class class)
{
    return class != MU_TIME_USEFUL && class != MU_TIME_UNREPORTED;
}

/* ---- dividing what a report explains ---- */

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

void mu_goodput_split(const struct mu_step_report *report, uint64_t us, uint32_t replayed, uint64_t bubble_us,
                      uint64_t floor_us, uint64_t ret_us[MU_TIME_CLASS_COUNT])
{
    uint64_t bubble = smaller(report->wait_us, bubble_us), floor = smaller(report->wait_us - bubble, floor_us);
    const struct {
        enum mu_time_class class;
        uint64_t us;
    } parts[] = {
        {MU_TIME_COMMUNICATION, report->communicate_us + floor},
        {MU_TIME_BUBBLE, bubble},
        {MU_TIME_STRAGGLER, report->wait_us - bubble - floor},
        {MU_TIME_DATA, report->data_us},
        {MU_TIME_CHECKPOINT, report->snapshot_us},
    };
    enum { PARTS = sizeof parts / sizeof parts[0] };
    uint64_t told_us = report->forward_us + report->backward_us + report->optimizer_us;
    memset(ret_us, 0, MU_TIME_CLASS_COUNT * sizeof ret_us[0]);
    for (int i = 0; i < PARTS; i++)
        told_us += parts[i].us;
    if (replayed && report->step_count)
        ret_us[MU_TIME_REPLAYED] =
            (uint64_t)((double)us * (double)smaller(replayed, report->step_count) / report->step_count);
    us -= smaller(us, ret_us[MU_TIME_REPLAYED]);
    uint64_t left = us;
    for (int i = 0; i < PARTS && told_us > 0; i++) {
        ret_us[parts[i].class] = smaller(left, (uint64_t)((double)us * (double)parts[i].us / (double)told_us));
        left -= ret_us[parts[i].class];
    }
    ret_us[MU_TIME_USEFUL] = left;
}

/* ---- accounts ---- */

static uint64_t account_key(const struct mu_coord *coord, const struct job *job, const char *name)
{
    return mu_xxh3_64(name, strlen(name), 2 + (uint64_t)(job - coord->jobs)) | 1;
}

static struct account *find_account(const struct mu_coord *coord, const struct job *job, const char *name)
{
    uint32_t slot = map_get(&coord->by_account, account_key(coord, job, name));
    struct account *account = slot == NONE ? NULL : &coord->accounts[slot];
    return account && strcmp(account->record.worker, name) == 0 ? account : NULL;
}

static bool belongs_to(const struct mu_coord *coord, const struct account *account, const struct job *job)
{
    return account->used && account->job == (uint32_t)(job - coord->jobs);
}

/* Its time up to now, in the class where it is. */
static void charge(const struct mu_coord *coord, struct account *account)
{
    if (!account->record.open)
        return;
    account->record.us[account->record.now] += coord->now_us - account->since_us;
    account->since_us = coord->now_us;
    account->record.wall_us = coord->wall_us;
    account->record.mono_us = coord->now_us;
    account->dirty = true;
}

static void persist_account(struct mu_coord *coord, struct account *account)
{
    account->dirty = false;
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_PERSIST,
                                          .record = {.kind = MU_RECORD_ACCOUNT, .account = &account->record}});
}

static void drop_account(struct mu_coord *coord, struct account *account)
{
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_FORGET,
                                          .record = {.kind = MU_RECORD_ACCOUNT, .account = &account->record}});
    map_remove(&coord->by_account, account_key(coord, &coord->jobs[account->job], account->record.worker));
    account->used = false;
    if ((uint32_t)(account - coord->accounts) < coord->free_account)
        coord->free_account = (uint32_t)(account - coord->accounts);
}

static struct account *take_slot(struct mu_coord *coord)
{
    while (coord->free_account < coord->account_capacity && coord->accounts[coord->free_account].used)
        coord->free_account++;
    if (coord->free_account == coord->account_capacity)
        return NULL;
    if (coord->free_account == coord->account_high)
        coord->account_high++;
    return &coord->accounts[coord->free_account];
}

static struct account *add_account(struct mu_coord *coord, const struct job *job, const char *name);

/* The table is full: who left longest ago becomes part of its job's account of former workers (the one without a
 * name), so that no second is lost. */
static bool make_room(struct mu_coord *coord)
{
    struct account *oldest = NULL;
    for (uint32_t i = 0; i < coord->account_high; i++) {
        struct account *account = &coord->accounts[i];
        if (account->used && !account->record.open && account->record.worker[0] &&
            (!oldest || account->record.wall_us < oldest->record.wall_us))
            oldest = account;
    }
    if (!oldest)
        return false;
    struct account moved = *oldest;
    struct job *job = &coord->jobs[moved.job];
    drop_account(coord, oldest);
    struct account *former = find_account(coord, job, "");
    if (!former)
        former = add_account(coord, job, "");
    for (int k = 0; k < MU_TIME_CLASS_COUNT; k++)
        former->record.us[k] += moved.record.us[k];
    former->record.began_wall_us = smaller(former->record.began_wall_us, moved.record.began_wall_us);
    former->record.wall_us = moved.record.wall_us;
    persist_account(coord, former);
    return true;
}

/* NULL: everybody in the table is attached, and this one's time is not counted. */
static struct account *add_account(struct mu_coord *coord, const struct job *job, const char *name)
{
    struct account *account = take_slot(coord);
    if (!account)
        return NULL;
    *account = (struct account){.used = true, .job = (uint32_t)(job - coord->jobs)};
    account->record.job_uid = job->record.uid;
    account->record.began_wall_us = account->record.wall_us = coord->wall_us;
    memcpy(account->record.job, job->record.spec.name, sizeof account->record.job);
    copy_text(account->record.worker, sizeof account->record.worker, name);
    map_put(&coord->by_account, account_key(coord, job, name), (uint32_t)(account - coord->accounts));
    return account;
}

/* ---- which class ---- */

static enum mu_time_class class_of_member(const struct job *job, const struct worker *worker)
{
    bool recovers = job->revoked || job->broken_us;
    switch (job->phase) {
    case MU_JP_STEPPING: /* who has finished waits for who has not */
        return worker->status.phase == MU_PHASE_PARKED ? MU_TIME_STRAGGLER : MU_TIME_UNREPORTED;
    case MU_JP_FINALIZING:
        return MU_TIME_CHECKPOINT;
    case MU_JP_WAITING:
        return MU_TIME_WAITING;
    case MU_JP_PARKING:
        if (!job->revoked && !worker->arrived)
            return MU_TIME_UNREPORTED; /* steps on to the boundary of the command */
        return !job->reformed ? MU_TIME_STARTING : recovers ? MU_TIME_PARK : MU_TIME_CHANGE;
    case MU_JP_PLANNING:
        return !job->reformed ? MU_TIME_STARTING : recovers ? MU_TIME_PLAN : MU_TIME_CHANGE;
    case MU_JP_PREPARING:
        return !job->reformed ? MU_TIME_STARTING : recovers ? MU_TIME_PREPARE : MU_TIME_CHANGE;
    case MU_JP_OVER:
    case MU_JP_COUNT:
        break;
    }
    return MU_TIME_SPARE;
}

static enum mu_time_class class_of(const struct job *job, const struct worker *worker)
{
    if (worker->lost)
        return MU_TIME_DOWN;
    bool member = worker->rank != NONE && job->has_generation;
    if (member)
        return mu_layout_is_idle(&job->layout, worker->rank) ? MU_TIME_SPARE : class_of_member(job, worker);
    if (!worker->ready)
        return MU_TIME_STARTING;
    return job->phase == MU_JP_WAITING ? MU_TIME_WAITING : MU_TIME_SPARE;
}

/* ---- changes ---- */

static void close_account(struct mu_coord *coord, struct account *account)
{
    charge(coord, account);
    if (account->record.open && account->record.now == MU_TIME_DOWN)
        coord->jobs[account->job].down_count--;
    account->record.open = false;
}

/* One more worker is there: the one that has been down longest is replaced. */
static void replace_down(struct mu_coord *coord, const struct job *job)
{
    struct account *oldest = NULL;
    for (uint32_t i = 0; i < coord->account_high; i++) {
        struct account *account = &coord->accounts[i];
        if (belongs_to(coord, account, job) && account->record.open && account->record.now == MU_TIME_DOWN &&
            (!oldest || account->entered_us < oldest->entered_us))
            oldest = account;
    }
    if (oldest)
        close_account(coord, oldest);
}

static void enter(struct mu_coord *coord, struct job *job, struct account *account, enum mu_time_class class)
{
    struct mu_account_record *record = &account->record;
    bool was_open = record->open;
    enum mu_time_class before = record->now;
    if (was_open && before == class)
        return;
    charge(coord, account);
    if (was_open && before == MU_TIME_UNREPORTED) { /* no report explains the rest: it went into what ended it */
        bool broke = class == MU_TIME_PARK || class == MU_TIME_DOWN;
        account->detect_us = broke ? record->us[MU_TIME_UNREPORTED] : 0;
        record->us[broke ? MU_TIME_DETECT : class] += record->us[MU_TIME_UNREPORTED];
        record->us[MU_TIME_UNREPORTED] = 0;
    }
    record->open = true;
    record->now = class;
    record->wall_us = coord->wall_us;
    record->mono_us = account->since_us = account->entered_us = coord->now_us;
    account->dirty = true;
    if (class == MU_TIME_DOWN)
        job->down_count++;
    if (was_open && before == MU_TIME_DOWN)
        job->down_count--;
    if (!was_open && class != MU_TIME_DOWN && job->down_count > 0)
        replace_down(coord, job);
}

/* Somebody else may have its name by now. */
static bool owns_its_name(struct mu_coord *coord, const struct worker *worker)
{
    return !worker->lost || find_worker(coord, worker->name) == worker;
}

void goodput_note(struct mu_coord *coord, const struct worker *worker)
{
    struct job *job = job_of(coord, worker);
    if (!worker->used || job->phase == MU_JP_OVER || !owns_its_name(coord, worker))
        return;
    struct account *account = find_account(coord, job, worker->name);
    if (!account) {
        account = add_account(coord, job, worker->name);
        while (!account && make_room(coord))
            account = add_account(coord, job, worker->name);
    }
    if (account)
        enter(coord, job, account, class_of(job, worker));
}

void goodput_heard(struct mu_coord *coord, uint64_t session, const struct mu_worker_message *message)
{
    uint32_t slot = map_get(&coord->by_session, session);
    if (slot != NONE && (message->kind == MU_WM_HELLO || message->kind == MU_WM_STATUS))
        goodput_note(coord, &coord->workers[slot]);
}

void goodput_note_job(struct mu_coord *coord, struct job *job)
{
    if (job->phase == MU_JP_STEPPING)
        job->wait_floor = (struct wait_floor){0};
    for (struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w))
        goodput_note(coord, w);
    if (job->phase != MU_JP_OVER)
        return;
    for (uint32_t i = 0; i < coord->account_high; i++) {
        struct account *account = &coord->accounts[i];
        if (!belongs_to(coord, account, job))
            continue;
        close_account(coord, account);
        if (account->dirty)
            persist_account(coord, account);
    }
}

void goodput_left(struct mu_coord *coord, const struct worker *worker)
{
    struct account *account = worker->lost ? NULL : find_account(coord, job_of(coord, worker), worker->name);
    if (account)
        close_account(coord, account);
}

void goodput_forget_job(struct mu_coord *coord, struct job *job)
{
    for (uint32_t i = 0; i < coord->account_high; i++) {
        if (belongs_to(coord, &coord->accounts[i], job))
            drop_account(coord, &coord->accounts[i]);
    }
}

/* ---- reports ---- */

/* The least wait of a step, beside bubbles, among the newest reports of all members: what nobody is to blame for. */
static uint64_t wait_floor(struct job *job, uint64_t wait_us)
{
    struct wait_floor *floor = &job->wait_floor;
    if (floor->reports == 0 || wait_us < floor->least_us)
        floor->least_us = wait_us;
    if (floor->reports == 0 && !floor->known)
        floor->before_us = wait_us;
    uint64_t least_us = smaller(floor->least_us, floor->before_us);
    if (++floor->reports >= job->world) {
        floor->before_us = floor->least_us;
        floor->known = true;
        floor->reports = 0;
    }
    return least_us;
}

/* A stage is idle while the first micro-batch comes down to it and the last one goes up: pp - 1 of them. */
static uint64_t schedule_bubble_us(const struct job *job, const struct mu_step_report *report)
{
    uint64_t micros = (uint64_t)report->leaf_count * job->record.spec.batch.accumulate;
    if (job->layout.pp < 2 || micros == 0)
        return 0;
    return (uint64_t)((double)(report->forward_us + report->backward_us) * (job->layout.pp - 1) * report->step_count /
                      (double)micros);
}

void goodput_report(struct mu_coord *coord, struct job *job, const struct worker *worker,
                    const struct mu_step_report *report)
{
    struct account *account = find_account(coord, job, worker->name);
    if (!account || report->step_count == 0)
        return;
    charge(coord, account);
    bool stepping = account->record.now == MU_TIME_UNREPORTED;
    enum mu_time_class from = stepping ? MU_TIME_UNREPORTED : MU_TIME_DETECT;
    /* Stepping broke off before this report was heard: it explains part of what was put down to noticing. */
    uint64_t us = stepping ? account->record.us[from] : smaller(account->detect_us, report->total_us);
    uint64_t before = report->steps_done - smaller(report->steps_done, report->step_count);
    uint64_t again = smaller(job->replay_until, report->steps_done);
    uint64_t bubble_us = smaller(schedule_bubble_us(job, report), report->wait_us), parts[MU_TIME_CLASS_COUNT];
    uint64_t floor_us = wait_floor(job, (report->wait_us - bubble_us) / report->step_count) * report->step_count;
    mu_goodput_split(report, us, again > before ? (uint32_t)(again - before) : 0, bubble_us, floor_us, parts);
    account->record.us[from] -= us;
    account->detect_us -= stepping ? 0 : us;
    for (int k = 0; k < MU_TIME_CLASS_COUNT; k++)
        account->record.us[k] += parts[k];
}

/* ---- what survives ---- */

void goodput_restore(struct mu_coord *coord, const struct mu_account_record *record)
{
    struct job *job = find_job(coord, record->job);
    if (!job || !mu_id_equal(job->record.uid, record->job_uid) || MU_MUTANT(MU_MUT_FORGET_ACCOUNTS))
        return; /* of an earlier job of that name */
    struct account *account = add_account(coord, job, record->worker);
    if (!account)
        return;
    account->record = *record;
    job->down_count += record->open && record->now == MU_TIME_DOWN;
}

/* Since it was recorded. The monotonic clock is not the same one after a reboot, then the wall clock alone says it. */
static uint64_t away_us(const struct mu_coord *coord, const struct mu_account_record *record)
{
    uint64_t wall_us = coord->wall_us > record->wall_us ? coord->wall_us - record->wall_us : 0;
    return coord->now_us >= record->mono_us ? smaller(wall_us, coord->now_us - record->mono_us) : wall_us;
}

/* The time that the coordinator was away is in the class where it found everybody at its end; a member's next report
 * explains it. */
void goodput_start(struct mu_coord *coord)
{
    for (uint32_t i = 0; i < coord->account_high; i++) {
        struct account *account = &coord->accounts[i];
        struct mu_account_record *record = &account->record;
        account->since_us = account->entered_us = coord->now_us;
        if (account->used && record->open && is_over(&coord->jobs[account->job]))
            record->open = false; /* its end was not recorded */
        if (account->used && record->open)
            record->us[record->now] += away_us(coord, record);
        record->wall_us = coord->wall_us;
        record->mono_us = coord->now_us;
    }
    coord->flush_us = coord->now_us + FLUSH_US;
    for (uint32_t i = 0; i < coord->job_count; i++)
        goodput_note_job(coord, &coord->jobs[i]);
}

/* Who was attached before a restart and never came again, and who has been down for too long. */
static bool is_gone(struct mu_coord *coord, const struct account *account)
{
    if (account->record.now == MU_TIME_DOWN)
        return coord->now_us - account->entered_us > DOWN_KEPT_US;
    const struct worker *worker = find_worker(coord, account->record.worker);
    uint64_t grace_us = (uint64_t)coord->config.lost_ms * 1000;
    return (!worker || worker->job != account->job) && lease_now(coord) - coord->started_us > grace_us;
}

void goodput_tick(struct mu_coord *coord)
{
    if (coord->now_us < coord->flush_us)
        return;
    for (uint32_t done = 0; done < FLUSH_ACCOUNTS && coord->flush_next < coord->account_high; coord->flush_next++) {
        struct account *account = &coord->accounts[coord->flush_next];
        if (!account->used)
            continue;
        if (account->record.open && is_gone(coord, account))
            close_account(coord, account);
        if (!account->dirty)
            continue;
        charge(coord, account);
        persist_account(coord, account);
        done++;
    }
    if (coord->flush_next < coord->account_high)
        return;
    coord->flush_next = 0;
    coord->flush_us = coord->now_us + FLUSH_US;
}

/* ---- views ---- */

uint32_t mu_coord_account_slots(const struct mu_coord *coord)
{
    return coord->account_high;
}

bool mu_coord_account_view(const struct mu_coord *coord, uint32_t slot, uint64_t now_us, struct mu_account_record *ret)
{
    if (slot >= coord->account_high || !coord->accounts[slot].used)
        return false;
    const struct account *account = &coord->accounts[slot];
    *ret = account->record;
    if (ret->open && now_us > account->since_us)
        ret->us[ret->now] += now_us - account->since_us;
    return true;
}
