#include "coordinator/series.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/vitals.h"

/* ---- what is kept ---- */

struct tier {
    uint32_t bucket_s, buckets;
};
enum {
    JOB_TIERS = 3,
    WORKER_TIERS = 2,
    WORKER_TIER_BASE = 16, /* in keys */
    BUCKET_COLUMNS_MAX = 14,
    COLUMNS_MAX = MU_SERIES_WORKER_COLUMNS,
    PHASES = 7,
    JOB_PHASES_AT = 7,
    ROW_VERSION = 1,
    ROW_VERSION_VITALS = 2, /* of workers: vital signs follow */
    ROW_HEAD_BYTES = 5,     /* version, time */
    KEY_SIZE = MU_JOB_NAME_SIZE + 8,
    STEP_BYTES = MU_SERIES_STEP_COLUMNS * 4,
    VITAL_BYTES = MU_VITAL_COUNT * 2,
    WORKER_BYTES_MAX = 1 + MU_WORKER_NAME_SIZE + STEP_BYTES + VITAL_BYTES,
};
static const struct tier job_tiers[JOB_TIERS] = {{2, 1800}, {30, 2880}, {600, 4320}};
static const struct tier worker_tiers[WORKER_TIERS] = {{60, 1440}, {600, 2016}};
static const char *const job_columns[MU_SERIES_JOB_COLUMNS] = {
    "step",   "loss",      "tokens_per_second", "world",         "attached", "wanted",      "useful",
    "data_s", "forward_s", "backward_s",        "communicate_s", "wait_s",   "optimizer_s", "snapshot_s"};
static const char *const step_columns[MU_SERIES_STEP_COLUMNS] = {
    "step", "total_s", "data_s", "forward_s", "backward_s", "communicate_s", "wait_s", "optimizer_s", "snapshot_s"};
_Static_assert((int)MU_SERIES_JOB_COLUMNS <= (int)BUCKET_COLUMNS_MAX &&
                   (int)MU_SERIES_STEP_COLUMNS <= (int)BUCKET_COLUMNS_MAX &&
                   (int)MU_SERIES_JOB_COLUMNS <= (int)COLUMNS_MAX,
               "columns");

static const char *column_name(bool of_worker, int column)
{
    if (!of_worker)
        return job_columns[column];
    return column < MU_SERIES_STEP_COLUMNS ? step_columns[column]
                                           : mu_vital_name((enum mu_vital)(column - MU_SERIES_STEP_COLUMNS));
}

struct cell {
    double sum;
    uint32_t count;
};

/* A bucket being filled. */
struct bucket {
    uint64_t number; /* wall seconds / bucket_s; 0: none */
    bool any;
    struct cell cells[BUCKET_COLUMNS_MAX];
};
struct vital_cells {
    float sums[MU_VITAL_COUNT]; /* NAN: not known in one of them */
    uint32_t count;
};

struct job_series {
    char job[MU_JOB_NAME_SIZE];
    double useful_s, total_s, last_useful_s, last_total_s; /* of its accounts: now, at the last sample */
    struct cell phases[PHASES];                            /* of this sample, over the members */
    struct bucket buckets[JOB_TIERS];
};

struct worker_series {
    char worker[MU_WORKER_NAME_SIZE], job[MU_JOB_NAME_SIZE]; /* empty: the slot is free */
    uint64_t steps_done;                                     /* of the newest report that was sampled */
    uint64_t vitals_us;                                      /* likewise: mono_us of the vital signs */
    struct bucket buckets[WORKER_TIERS];
    struct vital_cells vitals[WORKER_TIERS];
};

struct mu_series {
    uint64_t next_us, flush_us;
    uint32_t job_count, job_capacity, last_found, worker_capacity;
    struct job_series *jobs;
    struct worker_series *workers; /* [worker_capacity], by slot of the core */
    uint8_t *rows;                 /* that wait to be flushed: (u16 key size, u16 value size, key, value) */
    size_t rows_size, rows_capacity;
};

struct mu_series *mu_series_new(uint32_t max_jobs, uint32_t max_workers)
{
    struct mu_series *series = calloc(1, sizeof *series);
    if (!series)
        return NULL;
    series->job_capacity = max_jobs;
    series->worker_capacity = max_workers;
    series->jobs = calloc(max_jobs, sizeof *series->jobs);
    series->workers = calloc(max_workers, sizeof *series->workers); /* untouched pages cost nothing */
    if (series->jobs && series->workers)
        return series;
    mu_series_free(series);
    return NULL;
}

void mu_series_free(struct mu_series *series)
{
    if (!series)
        return;
    free(series->jobs);
    free(series->workers);
    free(series->rows);
    free(series);
}

uint64_t mu_series_next_us(const struct mu_series *series)
{
    return series->next_us;
}

/* ---- rows ---- */

static size_t key_of(const char *job, uint8_t tier, uint16_t group, uint16_t place, uint8_t out[KEY_SIZE])
{
    size_t length = strnlen(job, MU_JOB_NAME_SIZE - 1), size = 0;
    memcpy(out, MU_SERIES_PREFIX, 2);
    memcpy(out + 2, job, length);
    size = 2 + length;
    out[size++] = '/';
    out[size++] = tier;
    out[size++] = (uint8_t)(group >> 8);
    out[size++] = (uint8_t)group;
    out[size++] = (uint8_t)(place >> 8);
    out[size++] = (uint8_t)place;
    return size;
}

static void put_u16(uint8_t *out, size_t value)
{
    out[0] = (uint8_t)value;
    out[1] = (uint8_t)(value >> 8);
}

static size_t get_u16(const uint8_t *in)
{
    return in[0] | (size_t)in[1] << 8;
}

/* Without memory the row is lost. */
static void add_row(struct mu_series *series, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                    size_t value_bytes)
{
    size_t size = series->rows_size + 4 + key_bytes + value_bytes;
    if (size > series->rows_capacity) {
        uint8_t *rows = realloc(series->rows, 2 * size);
        if (!rows)
            return;
        series->rows = rows;
        series->rows_capacity = 2 * size;
    }
    uint8_t *out = series->rows + series->rows_size;
    put_u16(out, key_bytes);
    put_u16(out + 2, value_bytes);
    memcpy(out + 4, key, key_bytes);
    memcpy(out + 4 + key_bytes, value, value_bytes);
    series->rows_size = size;
}

static void flush(struct mu_series *series, mu_series_put_fn *put, void *ctx)
{
    const uint8_t *at = series->rows, *end = at + series->rows_size;
    while (at < end) {
        size_t key_bytes = get_u16(at), value_bytes = get_u16(at + 2);
        if (put(ctx, at + 4, key_bytes, at + 4 + key_bytes, value_bytes) != MU_OK)
            break;
        at += 4 + key_bytes + value_bytes;
    }
    series->rows_size = 0;
}

static size_t put_head(uint8_t *out, uint8_t version, uint64_t time_s)
{
    out[0] = version;
    for (int i = 0; i < 4; i++)
        out[1 + i] = (uint8_t)(time_s >> (8 * i));
    return ROW_HEAD_BYTES;
}

static size_t put_cells(uint8_t *out, const struct cell *cells, int count)
{
    for (int i = 0; i < count; i++) {
        float mean = cells[i].count ? (float)(cells[i].sum / cells[i].count) : NAN;
        memcpy(out + (size_t)i * sizeof mean, &mean, sizeof mean); /* little-endian hosts only, as everywhere */
    }
    return (size_t)count * sizeof(float);
}

/* The upper half of the float, rounded: as many digits as vital signs are worth. */
static size_t put_vitals(uint8_t *out, const struct vital_cells *vitals)
{
    for (int i = 0; i < MU_VITAL_COUNT; i++) {
        float mean = vitals->count ? vitals->sums[i] / (float)vitals->count : NAN;
        uint32_t bits = 0x7fc00000;
        if (isfinite(mean)) {
            memcpy(&bits, &mean, sizeof bits);
            bits += 0x8000;
        }
        put_u16(out + 2 * i, bits >> 16);
    }
    return VITAL_BYTES;
}

static void get_vitals(const uint8_t *in, float *out)
{
    for (int i = 0; i < MU_VITAL_COUNT; i++) {
        uint32_t bits = (uint32_t)get_u16(in + 2 * i) << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

static void add_cells(struct bucket *bucket, const double *values, int count)
{
    for (int i = 0; i < count; i++) {
        if (!isfinite(values[i]))
            continue;
        bucket->cells[i].sum += values[i];
        bucket->cells[i].count++;
        bucket->any = true;
    }
}

/* ---- buckets that are over ---- */

static void end_job_bucket(struct mu_series *series, const struct job_series *job, int tier)
{
    const struct bucket *bucket = &job->buckets[tier];
    uint8_t key[KEY_SIZE], value[ROW_HEAD_BYTES + BUCKET_COLUMNS_MAX * sizeof(float)];
    if (!bucket->any)
        return;
    size_t key_bytes = key_of(job->job, (uint8_t)tier, 0, (uint16_t)(bucket->number % job_tiers[tier].buckets), key);
    size_t size = put_head(value, ROW_VERSION, bucket->number * job_tiers[tier].bucket_s);
    size += put_cells(value + size, bucket->cells, MU_SERIES_JOB_COLUMNS);
    add_row(series, key, key_bytes, value, size);
}

static bool ends(const struct bucket *bucket, uint64_t number)
{
    return bucket->number && bucket->number != number;
}

/* The buckets of a group's workers that are over, one row for each job that it has workers of. */
static void end_group(struct mu_series *series, uint32_t first, uint32_t count, int tier, uint64_t number)
{
    uint8_t key[KEY_SIZE], value[ROW_HEAD_BYTES + MU_SERIES_WORKERS_PER_GROUP * WORKER_BYTES_MAX];
    for (uint32_t i = first; i < first + count; i++) {
        const char *job = series->workers[i].job;
        uint64_t over = series->workers[i].buckets[tier].number;
        size_t size = put_head(value, ROW_VERSION_VITALS, over * worker_tiers[tier].bucket_s);
        if (!job[0] || !ends(&series->workers[i].buckets[tier], number))
            continue;
        for (uint32_t k = i; k < first + count; k++) {
            struct worker_series *worker = &series->workers[k];
            struct bucket *bucket = &worker->buckets[tier];
            if (bucket->number != over || strcmp(worker->job, job) != 0)
                continue;
            if (bucket->any) {
                size_t length = strlen(worker->worker);
                value[size++] = (uint8_t)length;
                memcpy(value + size, worker->worker, length);
                size += length;
                size += put_cells(value + size, bucket->cells, MU_SERIES_STEP_COLUMNS);
                size += put_vitals(value + size, &worker->vitals[tier]);
            }
            *bucket = (struct bucket){.number = 0};
            worker->vitals[tier] = (struct vital_cells){.count = 0};
        }
        if (size == ROW_HEAD_BYTES)
            continue;
        size_t key_bytes =
            key_of(job, (uint8_t)(WORKER_TIER_BASE + tier), (uint16_t)(first / MU_SERIES_WORKERS_PER_GROUP),
                   (uint16_t)(over % worker_tiers[tier].buckets), key);
        add_row(series, key, key_bytes, value, size);
    }
}

static void end_worker_buckets(struct mu_series *series, uint32_t slots, uint64_t wall_s)
{
    for (int tier = 0; tier < WORKER_TIERS; tier++) {
        for (uint32_t first = 0; first < slots; first += MU_SERIES_WORKERS_PER_GROUP) {
            uint32_t count = slots - first < MU_SERIES_WORKERS_PER_GROUP ? slots - first : MU_SERIES_WORKERS_PER_GROUP;
            end_group(series, first, count, tier, wall_s / worker_tiers[tier].bucket_s);
        }
    }
}

/* ---- sampling ---- */

static struct job_series *job_named(struct mu_series *series, const char *name)
{
    if (series->last_found < series->job_count && strcmp(series->jobs[series->last_found].job, name) == 0)
        return &series->jobs[series->last_found];
    for (uint32_t i = 0; i < series->job_count; i++) {
        if (strcmp(series->jobs[i].job, name) == 0) {
            series->last_found = i;
            return &series->jobs[i];
        }
    }
    return NULL;
}

static struct job_series *need_job(struct mu_series *series, const struct mu_coord *coord, const char *name)
{
    struct job_series *job = job_named(series, name);
    if (job)
        return job;
    struct mu_job_view view;
    for (uint32_t i = 0; series->job_count == series->job_capacity && i < series->job_count; i++) {
        if (!mu_coord_job_find(coord, series->jobs[i].job, &view)) /* it is gone: its place is free */
            series->jobs[i] = series->jobs[--series->job_count];
    }
    if (series->job_count == series->job_capacity)
        return NULL;
    job = &series->jobs[series->job_count++];
    *job = (struct job_series){.useful_s = 0};
    snprintf(job->job, sizeof job->job, "%s", name);
    return job;
}

static void sample_steps(struct mu_series *series, struct worker_series *worker, const struct mu_step_report *report,
                         uint64_t wall_s)
{
    struct job_series *job = job_named(series, worker->job);
    const double per_step = 1e-6 / (report->step_count ? report->step_count : 1);
    if (!job || report->steps_done == worker->steps_done)
        return; /* nothing new */
    worker->steps_done = report->steps_done;
    const uint64_t phases_us[PHASES] = {report->data_us,        report->forward_us, report->backward_us,
                                        report->communicate_us, report->wait_us,    report->optimizer_us,
                                        report->snapshot_us};
    double values[MU_SERIES_STEP_COLUMNS] = {(double)report->steps_done, (double)report->total_us * per_step};
    for (int i = 0; i < PHASES; i++) {
        values[2 + i] = (double)phases_us[i] * per_step;
        job->phases[i].sum += values[2 + i];
        job->phases[i].count++;
    }
    for (int tier = 0; tier < WORKER_TIERS; tier++) {
        worker->buckets[tier].number = wall_s / worker_tiers[tier].bucket_s;
        add_cells(&worker->buckets[tier], values, MU_SERIES_STEP_COLUMNS);
    }
}

static void sample_vitals(struct worker_series *worker, const struct mu_vitals_heard *heard, uint64_t wall_s)
{
    if (heard->newest.mono_us == worker->vitals_us || isnan(heard->signs[MU_VITAL_CPU_US]))
        return; /* nothing new, or no rates yet */
    worker->vitals_us = heard->newest.mono_us;
    for (int tier = 0; tier < WORKER_TIERS; tier++) {
        struct vital_cells *vitals = &worker->vitals[tier];
        for (int i = 0; i < MU_VITAL_COUNT; i++)
            vitals->sums[i] += (float)heard->signs[i];
        vitals->count++;
        worker->buckets[tier].number = wall_s / worker_tiers[tier].bucket_s;
        worker->buckets[tier].any = true;
    }
}

static void sample_worker(struct mu_series *series, const struct mu_worker_view *view, uint32_t slot,
                          const struct mu_step_report *report, const struct mu_vitals_heard *heard, uint64_t wall_s)
{
    struct worker_series *worker = &series->workers[slot];
    if (strcmp(worker->worker, view->name) != 0 || strcmp(worker->job, view->job) != 0) {
        *worker = (struct worker_series){.steps_done = report ? report->steps_done : 0}; /* what it says is old */
        snprintf(worker->worker, sizeof worker->worker, "%s", view->name);
        snprintf(worker->job, sizeof worker->job, "%s", view->job);
        return;
    }
    if (report)
        sample_steps(series, worker, report, wall_s);
    if (heard)
        sample_vitals(worker, heard, wall_s);
}

static void sample_workers(struct mu_series *series, const struct mu_coord *coord, struct mu_sessions *sessions,
                           uint64_t wall_s)
{
    uint32_t slots = mu_coord_worker_slots(coord);
    slots = slots < series->worker_capacity ? slots : series->worker_capacity;
    end_worker_buckets(series, slots, wall_s);
    for (uint32_t slot = 0; slot < slots; slot++) {
        struct mu_worker_view view;
        struct mu_timing_view timing;
        if (!mu_coord_worker_view(coord, slot, &view))
            continue;
        bool steps = view.state == MU_WS_MEMBER && mu_coord_timing_view(coord, slot, 0, &timing);
        const struct mu_vitals_heard *heard = mu_vitals_of(sessions, view.session);
        if (steps || heard)
            sample_worker(series, &view, slot, steps ? &timing.report : NULL, heard, wall_s);
    }
}

static void sample_accounts(struct mu_series *series, const struct mu_coord *coord, uint64_t now_us)
{
    for (uint32_t i = 0; i < series->job_count; i++)
        series->jobs[i].useful_s = series->jobs[i].total_s = 0;
    for (uint32_t slot = 0; slot < mu_coord_account_slots(coord); slot++) {
        struct mu_account_record record;
        struct job_series *job =
            mu_coord_account_view(coord, slot, now_us, &record) ? job_named(series, record.job) : NULL;
        for (int k = 0; job && k < MU_TIME_CLASS_COUNT; k++) {
            if (k == MU_TIME_UNREPORTED)
                continue;
            job->total_s += (double)record.us[k] * 1e-6;
            job->useful_s += k == MU_TIME_USEFUL ? (double)record.us[k] * 1e-6 : 0;
        }
    }
}

static void sample_job(struct mu_series *series, struct job_series *job, const struct mu_job_view *view,
                       uint64_t wall_s)
{
    double total_s = job->total_s - job->last_total_s, useful_s = job->useful_s - job->last_useful_s;
    double values[MU_SERIES_JOB_COLUMNS] = {
        (double)view->steps_done,
        view->has_result ? view->result.loss : NAN,
        view->tokens_per_second,
        view->world,
        view->attached,
        view->record.spec.workers.max,
        total_s > 0 && useful_s >= 0 ? useful_s / total_s : NAN,
    };
    job->last_total_s = job->total_s;
    job->last_useful_s = job->useful_s;
    for (int i = 0; i < PHASES; i++) {
        values[JOB_PHASES_AT + i] = job->phases[i].count ? job->phases[i].sum / job->phases[i].count : NAN;
        job->phases[i] = (struct cell){0};
    }
    for (int tier = 0; tier < JOB_TIERS; tier++) {
        uint64_t number = wall_s / job_tiers[tier].bucket_s;
        if (ends(&job->buckets[tier], number)) {
            end_job_bucket(series, job, tier);
            job->buckets[tier] = (struct bucket){0};
        }
        job->buckets[tier].number = number;
        if (view->phase != MU_JP_OVER)
            add_cells(&job->buckets[tier], values, MU_SERIES_JOB_COLUMNS);
    }
}

void mu_series_sample(struct mu_series *series, const struct mu_coord *coord, struct mu_sessions *sessions,
                      uint64_t now_us, uint64_t wall_us, mu_series_put_fn *put, void *ctx)
{
    uint64_t wall_s = wall_us / 1000000;
    if (now_us < series->next_us)
        return;
    series->next_us = now_us + MU_SERIES_SAMPLE_MS * 1000ull;
    struct mu_job_view view;
    for (uint32_t i = 0; mu_coord_job_view(coord, i, &view); i++) {
        if (view.phase != MU_JP_OVER)
            need_job(series, coord, view.record.spec.name);
    }
    sample_workers(series, coord, sessions, wall_s);
    sample_accounts(series, coord, now_us);
    for (uint32_t i = 0; i < series->job_count; i++) {
        if (mu_coord_job_find(coord, series->jobs[i].job, &view))
            sample_job(series, &series->jobs[i], &view, wall_s);
    }
    if (now_us >= series->flush_us) {
        flush(series, put, ctx);
        series->flush_us = now_us + MU_SERIES_FLUSH_MS * 1000ull;
    }
}

/* ---- reading ---- */

struct point {
    uint32_t time_s;
    float values[COLUMNS_MAX];
};

struct reading {
    const struct mu_series_query *query;
    struct point *points;
    size_t count, capacity;
    int columns;
    bool no_memory;
};

/* The values of a job, or of a worker with or without vital signs. */
static void add_point(struct reading *reading, uint32_t time_s, const uint8_t *values, size_t bytes)
{
    if (reading->count == reading->capacity) {
        size_t capacity = reading->capacity ? 2 * reading->capacity : 256;
        struct point *points = realloc(reading->points, capacity * sizeof *points);
        if (!points) {
            reading->no_memory = true;
            return;
        }
        reading->points = points;
        reading->capacity = capacity;
    }
    struct point *point = &reading->points[reading->count++];
    point->time_s = time_s;
    for (int i = 0; i < COLUMNS_MAX; i++)
        point->values[i] = NAN;
    if (bytes == STEP_BYTES + VITAL_BYTES)
        get_vitals(values + STEP_BYTES, point->values + MU_SERIES_STEP_COLUMNS);
    memcpy(point->values, values, bytes == STEP_BYTES + VITAL_BYTES ? (size_t)STEP_BYTES : bytes);
}

/* A row may be of another version, or damaged: it is passed over. */
static bool read_row(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    struct reading *reading = arg;
    const struct mu_series_query *query = reading->query;
    size_t at = ROW_HEAD_BYTES, name = strlen(query->worker);
    (void)key, (void)key_bytes;
    if (value_bytes < ROW_HEAD_BYTES || (value[0] != ROW_VERSION && value[0] != ROW_VERSION_VITALS))
        return true;
    size_t cells = name == 0 ? MU_SERIES_JOB_COLUMNS * sizeof(float)
                             : STEP_BYTES + (value[0] == ROW_VERSION_VITALS ? (size_t)VITAL_BYTES : 0);
    uint32_t time_s = value[1] | (uint32_t)value[2] << 8 | (uint32_t)value[3] << 16 | (uint32_t)value[4] << 24;
    if (time_s + (uint64_t)query->seconds < query->now_wall_us / 1000000 || time_s > query->now_wall_us / 1000000)
        return true;
    if (name == 0 && value[0] == ROW_VERSION && value_bytes == at + cells)
        add_point(reading, time_s, value + at, cells);
    while (name > 0 && at < value_bytes && at + 1 + value[at] + cells <= value_bytes) {
        if (value[at] == name && memcmp(value + at + 1, query->worker, name) == 0)
            add_point(reading, time_s, value + at + 1 + name, cells);
        at += 1 + value[at] + cells;
    }
    return !reading->no_memory;
}

static int by_time(const void *a, const void *b)
{
    const struct point *left = a, *right = b;
    return (left->time_s > right->time_s) - (left->time_s < right->time_s);
}

static void print_points(FILE *out, const struct reading *reading, uint32_t bucket_s)
{
    const struct mu_series_query *query = reading->query;
    fprintf(out, "{\"job\":\"%s\",\"worker\":\"%s\",\"bucket_seconds\":%u,\"columns\":[\"time\"", query->job,
            query->worker, bucket_s);
    for (int i = 0; i < reading->columns; i++)
        fprintf(out, ",\"%s\"", column_name(query->worker[0] != 0, i));
    fputs("],\"rows\":[", out);
    for (size_t k = 0; k < reading->count; k++) {
        fprintf(out, "%s[%u", k ? "," : "", reading->points[k].time_s);
        for (int i = 0; i < reading->columns; i++) {
            if (isfinite(reading->points[k].values[i]))
                fprintf(out, ",%.7g", (double)reading->points[k].values[i]);
            else
                fputs(",null", out);
        }
        fputc(']', out);
    }
    fputs("]}", out);
}

/* The finest tier that reaches so far back. */
static int choose_tier(const struct tier *tiers, int count, uint32_t seconds)
{
    int tier = 0;
    while (tier + 1 < count && (uint64_t)tiers[tier].bucket_s * tiers[tier].buckets < seconds)
        tier++;
    return tier;
}

enum mu_status mu_series_read(struct mu_store *store, const struct mu_series_query *query, char **ret_json,
                              size_t *ret_size_bytes, struct mu_error *err)
{
    bool of_worker = query->worker[0] != 0;
    const struct tier *tiers = of_worker ? worker_tiers : job_tiers;
    int tier = choose_tier(tiers, of_worker ? WORKER_TIERS : JOB_TIERS, query->seconds);
    struct reading reading = {.query = query, .columns = of_worker ? MU_SERIES_WORKER_COLUMNS : MU_SERIES_JOB_COLUMNS};
    uint8_t prefix[KEY_SIZE];
    size_t bytes = key_of(query->job, (uint8_t)(of_worker ? WORKER_TIER_BASE + tier : tier), 0, 0, prefix) - 4;
    enum mu_status status = mu_store_scan(store, prefix, bytes, NULL, 0, 0, read_row, &reading, err);
    FILE *out = NULL;
    *ret_json = NULL;
    if (status == MU_OK && (reading.no_memory || !(out = open_memstream(ret_json, ret_size_bytes))))
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the series");
    if (out) {
        if (reading.count)
            qsort(reading.points, reading.count, sizeof *reading.points, by_time);
        print_points(out, &reading, tiers[tier].bucket_s);
        if (fclose(out) != 0)
            status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the series");
    }
    free(reading.points);
    return status;
}

/* ---- forgetting ---- */

struct forgetting {
    void (*drop)(void *ctx, const void *key, size_t key_bytes);
    void *ctx;
};

static bool drop_row(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    const struct forgetting *forgetting = arg;
    (void)value, (void)value_bytes;
    forgetting->drop(forgetting->ctx, key, key_bytes);
    return true;
}

enum mu_status mu_series_forget(struct mu_store *store, const char *job, size_t limit,
                                void (*drop)(void *ctx, const void *key, size_t key_bytes), void *ctx,
                                struct mu_error *err)
{
    uint8_t prefix[KEY_SIZE];
    struct forgetting forgetting = {.drop = drop, .ctx = ctx};
    return mu_store_scan(store, prefix, key_of(job, 0, 0, 0, prefix) - 5, NULL, 0, limit, drop_row, &forgetting, err);
}
