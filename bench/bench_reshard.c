/* Resharding: how many bytes move when the layout changes, against the least, and how fast, against what the data plane
 * moves between the same ranks without anybody looking at it.
 *
 * usage: bench_reshard [--layers L] [--rounds K] [--tcp yes|no]
 * GPT-2 124M (2 slices), four processes of this machine. For each change: the coordinator's plan (plan/reshard.h), then
 * K rounds in turn of the workers' transfer (worker/transfer.h: checksums, verification) and of bare sends of the same
 * bytes from and to the same memory, with connections of their own. Rates are of all ranks together, medians; what came
 * is compared with what it must be after the first round. Prints rows for bench/run. */
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "kernels/arena.h"
#include "plan/layout.h"
#include "worker/comm.h"
#include "worker/transfer.h"

enum { RANKS = 4, ROUNDS_MAX = 32, FLATS = 3, DEADLINE_US = 120 * 1000000, PIECE_FLOATS = 2 << 20, STEP = 7 };
#define RATE_TARGET 0.8

struct change {
    const char *name;
    uint32_t tp, pp, dp;
    bool sharded;
    uint32_t new_tp, new_pp, new_dp;
    bool new_sharded;
};

static const struct change changes[] = {
    {"tp 2 x dp 2 to dp 4", 2, 1, 2, false, 1, 1, 4, false},
    {"pp 2 x dp 2 to tp 2 x dp 2", 1, 2, 2, false, 2, 1, 2, false},
    {"dp 4 with sharded moments to tp 2 x pp 2", 1, 1, 4, true, 2, 2, 1, false},
};

struct shared {
    pthread_barrier_t barrier;
    char addresses[RANKS][MU_COMM_ADDRESS_SIZE];
    uint64_t commit_us[RANKS], transfer_us[ROUNDS_MAX][RANKS], bare_us[ROUNDS_MAX][RANKS], plan_us;
    uint64_t transfer_cpu_us[RANKS], bare_cpu_us[RANKS]; /* of all rounds */
    uint64_t bytes, minimum_bytes, moves;
};

/* One of the four processes. */
struct rank {
    struct shared *shared;
    uint32_t number, rounds;
    struct mu_model_spec model;
    struct mu_layout before, after;
    struct mu_space *spaces[FLATS];
    float *flats[FLATS];
    struct mu_reshard plan;
    struct mu_comm *comm;
    struct mu_comm_group *group;
};

static void must(enum mu_status status, const struct mu_error *err, const char *what)
{
    if (status != MU_OK) {
        fprintf(stderr, "bench_reshard: %s: %s\n", what, err->text);
        _exit(1);
    }
}

/* ---- layouts and what they hold ---- */

static struct mu_layout layout_of(uint32_t tp, uint32_t pp, uint32_t dp, bool sharded, uint32_t layers)
{
    struct mu_layout layout;
    mu_layout_init(&layout, dp, layers);
    layout.tp = tp;
    layout.pp = pp;
    layout.sharded = sharded;
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(layers * p / pp);
    return layout;
}

/* Elements of the flat space from the run's first chunk to the end of its last one; gaps between cells are inside. */
static void run_range(const struct mu_model_spec *model, struct mu_chunk_run run, uint64_t *ret_offset,
                      uint64_t *ret_size)
{
    struct mu_chunk first = mu_model_chunk(model, run.first), last = mu_model_chunk(model, run.first + run.count - 1);
    *ret_offset = first.offset;
    *ret_size = last.offset + last.size - first.offset;
}

/* What a rank of a layout has in which flat space. */
static const struct {
    enum mu_share share;
    int flat;
} contents[] = {{MU_SHARE_PARAMS, 0}, {MU_SHARE_COPY, 0}, {MU_SHARE_MOMENTS, 1}, {MU_SHARE_MOMENTS, 2}};
enum { CONTENTS = sizeof contents / sizeof contents[0] };

static void commit_share(struct rank *r, const struct mu_layout *layout)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    struct mu_error err = {0};
    for (int k = 0; k < CONTENTS; k++) {
        uint32_t count = mu_layout_runs(&r->model, layout, r->number, contents[k].share, runs);
        for (uint32_t i = 0; i < count; i++) {
            uint64_t offset, size;
            run_range(&r->model, runs[i], &offset, &size);
            must(mu_space_commit(r->spaces[contents[k].flat], offset * sizeof(float), size * sizeof(float), &err), &err,
                 "commit");
        }
    }
}

/* What element `index` of a flat space is, in the whole world. */
static float value_at(int flat, uint64_t index)
{
    uint64_t x = (index * 3 + (uint64_t)flat + 1) * 0x9e3779b97f4a7c15u;
    return (float)(uint32_t)(x >> 40);
}

static void fill_share(struct rank *r)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    for (int k = 0; k < CONTENTS; k++) {
        uint32_t count = mu_layout_runs(&r->model, &r->before, r->number, contents[k].share, runs);
        for (uint32_t i = 0; i < count; i++) {
            uint64_t offset, size;
            run_range(&r->model, runs[i], &offset, &size);
            for (uint64_t at = offset; at < offset + size; at++)
                r->flats[contents[k].flat][at] = value_at(contents[k].flat, at);
        }
    }
}

static void check_chunk(const struct rank *r, int flat, uint32_t index)
{
    struct mu_chunk chunk = mu_model_chunk(&r->model, index);
    for (uint64_t at = chunk.offset; at < chunk.offset + chunk.size; at++) {
        if (r->flats[flat][at] != value_at(flat, at)) {
            fprintf(stderr, "bench_reshard: rank %u: element %llu of flat space %d is wrong\n", r->number,
                    (unsigned long long)at, flat);
            _exit(1);
        }
    }
}

/* Everything that the new share needs is there. */
static void check_share(const struct rank *r)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    for (int k = 0; k < CONTENTS; k++) {
        uint32_t count = mu_layout_runs(&r->model, &r->after, r->number, contents[k].share, runs);
        for (uint32_t i = 0; i < count; i++) {
            for (uint32_t n = 0; n < runs[i].count; n++)
                check_chunk(r, contents[k].flat, runs[i].first + n);
        }
    }
}

static void plan(struct rank *r)
{
    struct mu_held_share shares[RANKS];
    struct mu_reshard_holder holders[RANKS];
    for (uint32_t i = 0; i < RANKS; i++) {
        shares[i] = (struct mu_held_share){.layout = r->before, .rank = i};
        holders[i] = (struct mu_reshard_holder){.shares = &shares[i], .share_count = 1};
    }
    struct mu_error err = {0};
    uint64_t begin_us = mu_clock_mono_us();
    must(mu_reshard_plan(&r->model, &r->after, holders, &r->plan), &err, "plan");
    if (r->number == 0) {
        r->shared->plan_us = mu_clock_mono_us() - begin_us;
        r->shared->bytes = r->plan.bytes;
        r->shared->minimum_bytes = r->plan.minimum_bytes;
        r->shared->moves = r->plan.move_count;
    }
}

/* ---- what is measured ---- */

static void connect_ranks(struct rank *r, uint64_t generation)
{
    struct mu_comm_peer peers[RANKS];
    size_t count = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        if (i != r->number)
            peers[count++] =
                (struct mu_comm_peer){.rank = i, .incarnation = {.low = i + 1}, .address = r->shared->addresses[i]};
    }
    struct mu_comm_group_config config = {.generation = generation,
                                          .rank = r->number,
                                          .world = RANKS,
                                          .incarnation = {.low = r->number + 1},
                                          .peers = peers,
                                          .peer_count = count,
                                          .secret = "bench"};
    struct mu_error err = {0};
    uint64_t deadline_us = mu_clock_mono_us() + DEADLINE_US;
    must(mu_comm_open(r->comm, &config, deadline_us, &r->group, &err), &err, "open");
    must(mu_comm_wait_ready(r->group, deadline_us, &err), &err, "connect");
}

static uint64_t cpu_us(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
           (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static uint64_t transfer(struct rank *r)
{
    atomic_uint_least64_t progress = 0;
    struct mu_transfer_config config = {.model = &r->model,
                                        .group = r->group,
                                        .flats = {r->flats[0], r->flats[1], r->flats[2]},
                                        .step = STEP,
                                        .rank = r->number,
                                        .moves = r->plan.moves,
                                        .move_count = r->plan.move_count,
                                        .progress = &progress};
    struct mu_transfer *transfer;
    struct mu_error err = {0};
    pthread_barrier_wait(&r->shared->barrier);
    uint64_t begin_us = mu_clock_mono_us(), begin_cpu_us = cpu_us();
    must(mu_transfer_new(&config, &transfer, &err), &err, "transfer");
    must(mu_transfer_run(transfer, &err), &err, "transfer");
    uint64_t spent_us = mu_clock_mono_us() - begin_us;
    r->shared->transfer_cpu_us[r->number] += cpu_us() - begin_cpu_us;
    mu_transfer_free(transfer);
    return spent_us;
}

/* One range of one flat space, in pieces; `numbers` counts the messages with each peer, by direction. */
static void bare_post(struct rank *r, const struct mu_move *move, int flat, uint64_t numbers[2][RANKS],
                      struct mu_comm_request **request)
{
    bool incoming = move->to == r->number;
    uint32_t peer = incoming ? move->from : move->to;
    uint64_t offset, size;
    struct mu_error err = {0};
    run_range(&r->model, move->run, &offset, &size);
    for (uint64_t done = 0, piece; done < size; done += piece) {
        piece = size - done < PIECE_FLOATS ? size - done : PIECE_FLOATS;
        float *data = r->flats[flat] + offset + done;
        uint64_t number = numbers[incoming][peer]++;
        enum mu_status status = incoming
                                    ? mu_comm_recv(r->group, peer, number, data, piece * sizeof *data, *request, &err)
                                    : mu_comm_send(r->group, peer, number, data, piece * sizeof *data, *request, &err);
        must(status, &err, "bare exchange");
        (*request)++;
    }
}

/* The same bytes without checksums, all at once. A chunk that is passed on is sent as it is: bits do not matter here.
 */
static uint64_t bare(struct rank *r)
{
    uint64_t numbers[2][RANKS] = {{0}};
    size_t most = ((size_t)(r->model.flat_size / PIECE_FLOATS) + r->plan.move_count + 1) * FLATS * RANKS;
    struct mu_comm_request *requests = calloc(most, sizeof *requests), *next = requests;
    struct mu_error err = {0};
    if (!requests)
        _exit(1);
    pthread_barrier_wait(&r->shared->barrier);
    uint64_t begin_us = mu_clock_mono_us(), begin_cpu_us = cpu_us();
    for (uint32_t i = 0; i < r->plan.move_count; i++) {
        const struct mu_move *move = &r->plan.moves[i];
        if (move->from != r->number && move->to != r->number)
            continue;
        for (int flat = 0; flat < FLATS; flat++) {
            if (move->kinds & (flat == 0 ? MU_MOVE_PARAMS : MU_MOVE_MOMENTS))
                bare_post(r, move, flat, numbers, &next);
        }
    }
    must(mu_comm_wait_all(r->group, mu_clock_mono_us() + DEADLINE_US, &err), &err, "bare exchange");
    uint64_t spent_us = mu_clock_mono_us() - begin_us;
    r->shared->bare_cpu_us[r->number] += cpu_us() - begin_cpu_us;
    free(requests);
    return spent_us;
}

static void close_group(struct rank *r)
{
    pthread_barrier_wait(&r->shared->barrier); /* nobody leaves while somebody waits */
    mu_comm_group_close(r->group);
    r->group = NULL;
}

static void run_rank(struct rank *r, bool tcp)
{
    struct mu_error err = {0};
    char host_id[16];
    for (int flat = 0; flat < FLATS; flat++) {
        must(mu_space_new(r->model.flat_size * sizeof(float), &err, &r->spaces[flat]), &err, "memory");
        r->flats[flat] = mu_space_base(r->spaces[flat]);
    }
    commit_share(r, &r->before);
    fill_share(r);
    plan(r);
    snprintf(host_id, sizeof host_id, "bench-%u", tcp ? r->number : 0);
    must(mu_comm_new(&(struct mu_comm_config){.host_id = host_id}, &r->comm, &err), &err, "listen");
    snprintf(r->shared->addresses[r->number], MU_COMM_ADDRESS_SIZE, "%s", mu_comm_address(r->comm));
    pthread_barrier_wait(&r->shared->barrier);
    uint64_t begin_us = mu_clock_mono_us();
    commit_share(r, &r->after);
    r->shared->commit_us[r->number] = mu_clock_mono_us() - begin_us;
    for (uint32_t round = 0; round < r->rounds; round++) {
        connect_ranks(r, 2 * round + 1);
        r->shared->transfer_us[round][r->number] = transfer(r);
        close_group(r);
        if (round == 0)
            check_share(r);
        connect_ranks(r, 2 * round + 2);
        r->shared->bare_us[round][r->number] = bare(r);
        close_group(r);
    }
    mu_comm_free(r->comm);
    mu_reshard_fini(&r->plan);
    for (int flat = 0; flat < FLATS; flat++)
        mu_space_free(r->spaces[flat]);
}

/* ---- rows ---- */

static int by_value(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static uint64_t slowest(const uint64_t of_ranks[RANKS])
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < RANKS; i++)
        most = of_ranks[i] > most ? of_ranks[i] : most;
    return most;
}

/* GB/s of all ranks together. */
static double median_rate(uint64_t bytes, const uint64_t rounds_us[][RANKS], uint32_t rounds)
{
    double rates[ROUNDS_MAX];
    for (uint32_t i = 0; i < rounds; i++)
        rates[i] = (double)bytes / (double)slowest(rounds_us[i]) * 1e-3;
    qsort(rates, rounds, sizeof rates[0], by_value);
    return rates[rounds / 2];
}

/* Seconds of processor time in one round, all ranks together. */
static double cpu_seconds(const uint64_t of_ranks[RANKS], uint32_t rounds)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < RANKS; i++)
        sum += of_ranks[i];
    return (double)sum / rounds * 1e-6;
}

static bool print_rows(const struct change *change, const struct shared *shared, uint32_t rounds, double parameters)
{
    double rate = median_rate(shared->bytes, shared->transfer_us, rounds),
           bare_rate = median_rate(shared->bytes, shared->bare_us, rounds);
    bool least = shared->bytes == shared->minimum_bytes, fast = rate >= RATE_TARGET * bare_rate;
    printf("| resharding %s, %.0fM parameters: bytes moved | %.1f MB, least possible %.1f MB = %.3f times; %llu moves, "
           "planned in %.1f ms | 1.0 times | %s |\n",
           change->name, parameters * 1e-6, (double)shared->bytes * 1e-6, (double)shared->minimum_bytes * 1e-6,
           (double)shared->bytes / (double)shared->minimum_bytes, (unsigned long long)shared->moves,
           (double)shared->plan_us * 1e-3, least ? "yes" : "**no**");
    printf(
        "| the same: rate, verified | %.2f GB/s = %.0f %% of the same bytes sent bare (%.2f GB/s); processor time %.2f "
        "against %.2f s; memory made ready in %.0f ms | >= 80 %% | %s |\n",
        rate, 100 * rate / bare_rate, bare_rate, cpu_seconds(shared->transfer_cpu_us, rounds),
        cpu_seconds(shared->bare_cpu_us, rounds), (double)slowest(shared->commit_us) * 1e-3, fast ? "yes" : "**no**");
    fflush(stdout);
    return least;
}

/* ---- processes ---- */

/* False when one of them failed; the others are ended then: they would wait for it at the barrier. */
static bool wait_all(pid_t children[RANKS])
{
    bool fine = true;
    for (uint32_t i = 0; i < RANKS; i++) {
        int status = 0;
        pid_t ended = waitpid(-1, &status, 0);
        for (uint32_t k = 0; k < RANKS; k++) {
            if (children[k] == ended)
                children[k] = 0;
            else if (status != 0 && fine && children[k] > 0)
                kill(children[k], SIGKILL);
        }
        fine &= status == 0;
    }
    return fine;
}

static bool measure(const struct change *change, uint32_t layers, uint32_t rounds, bool tcp)
{
    struct mu_model_config config = {.family = MU_FAMILY_GPT2,
                                     .layers = layers,
                                     .heads = 12,
                                     .channels = 768,
                                     .context = 1024,
                                     .vocab = 50257,
                                     .slices = 2};
    struct rank r = {.rounds = rounds};
    mu_model_config_resolve(&config);
    mu_model_spec_init(&r.model, &config);
    r.before = layout_of(change->tp, change->pp, change->dp, change->sharded, layers);
    r.after = layout_of(change->new_tp, change->new_pp, change->new_dp, change->new_sharded, layers);
    r.shared = mmap(NULL, sizeof *r.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attributes;
    if (r.shared == MAP_FAILED || pthread_barrierattr_init(&attributes) != 0 ||
        pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) != 0 ||
        pthread_barrier_init(&r.shared->barrier, &attributes, RANKS) != 0)
        exit(1);
    pid_t children[RANKS];
    for (uint32_t i = 0; i < RANKS; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* a benchmark that is killed leaves nothing */
            r.number = i;
            run_rank(&r, tcp);
            _exit(0);
        }
    }
    bool fine = wait_all(children);
    fine = fine && print_rows(change, r.shared, rounds, (double)r.model.parameter_count);
    munmap(r.shared, sizeof *r.shared);
    return fine;
}

int main(int argc, char **argv)
{
    uint32_t layers = 12, rounds = 3;
    bool tcp = false, known = true;
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--layers") == 0)
            layers = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--rounds") == 0)
            rounds = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--tcp") == 0)
            tcp = strcmp(value, "yes") == 0;
        else
            known = false;
    }
    if (!known || layers < 2 || layers > MU_LAYERS_MAX || rounds < 1 || rounds > ROUNDS_MAX) {
        fprintf(stderr, "usage: bench_reshard [--layers 2..%d] [--rounds 1..%d] [--tcp yes|no]\n", (int)MU_LAYERS_MAX,
                (int)ROUNDS_MAX);
        return 2;
    }
    bool fine = true;
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++)
        fine &= measure(&changes[i], layers, rounds, tcp);
    return fine ? 0 : 1;
}
