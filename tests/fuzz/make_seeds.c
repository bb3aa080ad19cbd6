/* Writes seeds for the fuzz targets whose inputs are binary: `make_seeds DIR`. They come from the real encoders and
 * from conversations of a coordinator with two workers, from the first Hello to the last step. */
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "coordinator/records.h"
#include "storage/job_json.h"
#include "storage/manifest.h"
#include "storage/safetensors.h"
#include "tests/fuzz/coordinator.h"

enum { WORKERS = 2, ROUNDS = 40, INBOX_MAX = 256, PATH_SIZE = 4096, METHODS = 40 };
enum { HALF_A_SECOND = 8, TRAINS = 1 }; /* as in the targets */

/* ---- files ---- */

struct bytes {
    uint8_t *data;
    size_t size_bytes;
};

static const char *seeds;

static void put(struct bytes *bytes, const void *data, size_t size_bytes)
{
    bytes->data = realloc(bytes->data, bytes->size_bytes + size_bytes + 1);
    MU_ASSERT(bytes->data);
    if (size_bytes)
        memcpy(bytes->data + bytes->size_bytes, data, size_bytes);
    bytes->size_bytes += size_bytes;
}

static void put_part(struct bytes *bytes, const void *data, size_t size_bytes)
{
    MU_ASSERT(size_bytes <= UINT16_MAX);
    uint8_t length[2] = {(uint8_t)size_bytes, (uint8_t)(size_bytes >> 8)};
    put(bytes, length, sizeof length);
    put(bytes, data, size_bytes);
}

static void put_turn(struct bytes *bytes, unsigned how, const void *data, size_t size_bytes)
{
    uint8_t byte = (uint8_t)how;
    put(bytes, &byte, 1);
    put_part(bytes, data, size_bytes);
}

static void write_seed(const char *target, const char *name, struct bytes *bytes)
{
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "%s/%s", seeds, target);
    if (mkdir(path, 0755) != 0 && errno != EEXIST)
        perror(path);
    snprintf(path, sizeof path, "%s/%s/good-%s", seeds, target, name);
    FILE *file = fopen(path, "we");
    if (!file || fwrite(bytes->data, 1, bytes->size_bytes, file) != bytes->size_bytes || fclose(file) != 0) {
        perror(path);
        exit(1);
    }
    free(bytes->data);
    *bytes = (struct bytes){0};
}

/* ---- the conversation ---- */

struct line {
    uint8_t data[MU_WIRE_COORD_BYTES_MAX];
    size_t size_bytes;
};

struct inbox {
    struct line *lines[INBOX_MAX];
    unsigned count;
};

struct table {
    struct fuzz_coordinator coordinator;
    struct fuzz_worker workers[WORKERS];
    struct inbox up[WORKERS], down[WORKERS];
    uint64_t sessions[WORKERS], last_session;
    struct bytes said, heard[WORKERS];
    unsigned trained[WORKERS];
    struct mu_wire_arena arena;
};

static void push(struct inbox *inbox, const void *data, size_t size_bytes)
{
    MU_ASSERT(inbox->count < INBOX_MAX);
    struct line *line = malloc(sizeof *line);
    MU_ASSERT(line);
    memcpy(line->data, data, size_bytes);
    line->size_bytes = size_bytes;
    inbox->lines[inbox->count++] = line;
}

static struct line *pop(struct inbox *inbox)
{
    struct line *line = inbox->lines[0];
    inbox->count--;
    memmove(&inbox->lines[0], &inbox->lines[1], inbox->count * sizeof(void *));
    return line;
}

static struct table table;

static void on_worker(void *ctx, const struct mu_worker_action *action)
{
    struct fuzz_worker *worker = ctx;
    const void *data;
    size_t size_bytes;
    struct mu_error err;
    if (action->kind != MU_WA_SEND)
        return;
    mu_wire_arena_reset(&table.arena);
    enum mu_status status = mu_wire_encode_worker(&table.arena, action->message, &data, &size_bytes, &err);
    MU_ASSERT(status == MU_OK);
    push(&table.up[worker - table.workers], data, size_bytes);
}

static void on_coordinator(void *ctx, const struct mu_coord_action *action)
{
    (void)ctx;
    const void *data;
    size_t size_bytes;
    struct mu_error err;
    if (action->kind != MU_CA_SEND)
        return;
    mu_wire_arena_reset(&table.arena);
    enum mu_status status = mu_wire_encode_coord(&table.arena, action->send.message, &data, &size_bytes, &err);
    MU_ASSERT(status == MU_OK);
    for (int i = 0; i < WORKERS; i++)
        if (table.sessions[i] == action->send.session)
            push(&table.down[i], data, size_bytes);
}

static void deliver_up(int i, unsigned how)
{
    static struct mu_worker_message message;
    struct mu_error err;
    struct line *line = pop(&table.up[i]);
    put_turn(&table.said, how | (unsigned)(i + 1), line->data, line->size_bytes);
    if (how & HALF_A_SECOND)
        fuzz_coordinator_pass(&table.coordinator, 500000);
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    enum mu_status status = mu_wire_decode_worker(&arena, line->data, line->size_bytes, &message, &err);
    MU_ASSERT(status == MU_OK);
    if (table.sessions[i] == 0)
        table.sessions[i] = ++table.last_session;
    struct mu_coord_event event = {.kind = MU_CE_MESSAGE};
    event.message.session = table.sessions[i];
    event.message.message = &message;
    fuzz_coordinator_step(&table.coordinator, &event);
    mu_wire_arena_fini(&arena);
    free(line);
}

static void deliver_down(int i)
{
    static struct mu_coord_message message;
    struct mu_error err;
    struct mu_wire_arena arena;
    struct line *line = pop(&table.down[i]);
    put_turn(&table.heard[i], table.trained[i] > 0 ? TRAINS : 0, line->data, line->size_bytes);
    table.trained[i] = 0;
    mu_wire_arena_init(&arena);
    enum mu_status status = mu_wire_decode_coord(&arena, line->data, line->size_bytes, &message, &err);
    MU_ASSERT(status == MU_OK);
    fuzz_worker_step(&table.workers[i], &(struct mu_worker_event){.kind = MU_WE_MESSAGE, .message = &message});
    mu_wire_arena_fini(&arena);
    free(line);
}

static void train_all(void)
{
    uint64_t command = UINT64_MAX;
    for (int i = 0; i < WORKERS; i++) {
        struct fuzz_worker *worker = &table.workers[i];
        uint64_t vote = worker->running ? mu_worker_vote(worker->core, worker->running) : UINT64_MAX;
        command = vote < command ? vote : command;
    }
    for (int i = 0; i < WORKERS; i++) {
        if (!table.workers[i].running)
            continue;
        if (table.trained[i]++ > 0)
            put_turn(&table.heard[i], TRAINS, "", 0);
        fuzz_worker_train(&table.workers[i], command);
    }
}

/* ---- what is stored ---- */

static bool put_pair(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    put_part(arg, key, key_bytes);
    put_part(arg, value, value_bytes);
    return true;
}

static void write_records(const char *name)
{
    struct bytes bytes = {0};
    struct mu_error err;
    enum mu_status status = mu_store_scan(table.coordinator.store, "", 0, NULL, 0, 0, put_pair, &bytes, &err);
    MU_ASSERT(status == MU_OK);
    write_seed("records", name, &bytes);
}

static void converse(const char *job)
{
    static const char *const names[WORKERS] = {"a", "b"};
    struct mu_error err;
    bool is_first = strcmp(job, "tiny") == 0;
    memset(&table, 0, sizeof table);
    mu_wire_arena_init(&table.arena);
    bool is_new = fuzz_coordinator_init(&table.coordinator, mu_store_memory_new(), &err);
    MU_ASSERT(is_new);
    table.coordinator.also = on_coordinator;
    fuzz_coordinator_submit(&table.coordinator, "tiny");
    fuzz_coordinator_submit(&table.coordinator, "probed");
    for (int i = 0; i < WORKERS; i++) {
        fuzz_worker_init(&table.workers[i], names[i], job);
        table.workers[i].also = on_worker;
        table.workers[i].also_ctx = &table.workers[i];
        fuzz_worker_step(&table.workers[i], &(struct mu_worker_event){.kind = MU_WE_START});
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < WORKERS; i++) {
            table.workers[i].now_us += 1000000; /* so that it gives a sign of life */
            fuzz_worker_step(&table.workers[i], &(struct mu_worker_event){.kind = MU_WE_TICK});
        }
        for (int i = 0; i < WORKERS; i++)
            for (unsigned k = 0; table.up[i].count > 0; k++)
                deliver_up(i, k == 0 && round % 2 ? HALF_A_SECOND : 0);
        for (int i = 0; i < WORKERS; i++)
            while (table.down[i].count > 0)
                deliver_down(i);
        train_all();
        if (is_first && round == 8)
            write_records("prepared");
        if (is_first && round == 14)
            write_records("running");
    }
    if (is_first)
        write_records("over");
    write_seed("worker_stream", is_first ? "conversation" : job, &table.said);
    for (int i = 0; i < WORKERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%s%s%s", is_first ? "" : job, is_first ? "" : "-", names[i]);
        write_seed("coordinator_stream", name, &table.heard[i]);
    }
    for (int i = 0; i < WORKERS; i++)
        fuzz_worker_fini(&table.workers[i]);
    fuzz_coordinator_fini(&table.coordinator);
    mu_wire_arena_fini(&table.arena);
}

/* ---- the rest ---- */

/* Every method, whatever its number, gets a message that many of them take. */
static void write_requests(void)
{
    static const uint8_t named[] = "\x0a\x04tiny";
    static struct mu_job_spec spec;
    struct bytes bytes = {0};
    struct mu_error err;
    const void *data;
    size_t size_bytes;
    Muster__V1__SubmitJobRequest request = MUSTER__V1__SUBMIT_JOB_REQUEST__INIT;
    mu_wire_arena_init(&table.arena);
    fuzz_job(&spec);
    spec.name[0] = 'f';
    enum mu_status status = mu_wire_spec_to_pb(&table.arena, &spec, &request.spec, &err);
    if (status == MU_OK)
        status = mu_wire_pack(&table.arena, &request.base, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, &err);
    MU_ASSERT(status == MU_OK);
    for (unsigned method = 0; method < METHODS; method++)
        put_turn(&bytes, method, named, sizeof named - 1);
    write_seed("service", "named", &bytes);
    for (unsigned method = 0; method < METHODS; method++)
        put_turn(&bytes, method, data, size_bytes);
    write_seed("service", "submit", &bytes);
    for (unsigned method = 0; method < METHODS; method++)
        put_turn(&bytes, method, "", 0);
    write_seed("service", "empty", &bytes);
    mu_wire_arena_fini(&table.arena);
}

static void write_manifest(void)
{
    static struct mu_job_spec spec;
    static struct mu_model_spec model;
    struct mu_error err;
    struct bytes bytes = {0};
    char *text = NULL;
    size_t size_bytes;
    struct mu_manifest *manifest = mu_manifest_new();
    fuzz_job(&spec);
    char *record = mu_job_spec_to_text(&spec);
    mu_model_spec_init(&model, &spec.model);
    MU_ASSERT(manifest && record);
    strcpy(manifest->identity.job, "tiny");
    manifest->identity.seq = 3, manifest->identity.step = 10, manifest->identity.generation = 2;
    manifest->nonce = (struct mu_id){1, 2};
    manifest->chunk_count = model.chunk_count;
    enum mu_status status;
    if ((status = mu_manifest_set_job_record(manifest, record)) == MU_OK)
        status = mu_manifest_add_chunks(manifest, &model, "piece-0.safetensors", 1000, (struct mu_hash128){1, 2}, 0,
                                        model.chunk_count);
    if (status == MU_OK)
        status = mu_manifest_encode(manifest, &text, &size_bytes, &err);
    MU_ASSERT(status == MU_OK);
    char *body = memchr(text, '\n', size_bytes);
    put(&bytes, body + 1, size_bytes - (size_t)(body + 1 - text));
    write_seed("manifest", "one-piece", &bytes);
    free(text);
    free(record);
    mu_manifest_free(manifest);
}

static void write_header(void)
{
    struct mu_safetensors_tensor tensors[] = {
        {.name = "p.0", .dtype = MU_ST_F32, .rank = 2, .shape = {4, 8}},
        {.name = "m.0", .dtype = MU_ST_BF16, .rank = 1, .shape = {16}},
        {.name = "scalar", .dtype = MU_ST_I64, .rank = 0},
    };
    const struct mu_safetensors_pair metadata[] = {{"format", "pt"}, {"step", "10"}};
    struct bytes bytes = {0};
    struct mu_error err;
    uint8_t *header = NULL, length[4];
    size_t header_bytes;
    uint64_t data_bytes;
    enum mu_status status =
        mu_safetensors_header_encode(tensors, 3, metadata, 2, 64, &header, &header_bytes, &data_bytes, &err);
    MU_ASSERT(status == MU_OK);
    for (int i = 0; i < 4; i++)
        length[i] = (uint8_t)(data_bytes >> 8 * i);
    put(&bytes, length, 4);
    put(&bytes, header + 8, header_bytes - 8);
    write_seed("safetensors", "three", &bytes);
    free(header);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make_seeds DIR\n");
        return 2;
    }
    seeds = argv[1];
    converse("tiny");
    converse("probed");
    write_requests();
    write_manifest();
    write_header();
    return 0;
}
