/* links: mu_engine mu_comm mu_plan */
#include "worker/tensor_comm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "worker/pipeline.h"

/* Tensor groups and stages of a pipeline as threads of this process, each with its own sockets. */

enum { MEMBERS_MAX = 8, PATIENCE_US = 120 * 1000000 };
#define NOBODY UINT32_MAX

static const uint8_t secret[MU_COMM_SECRET_SIZE] = "the secret of this generation..";

struct troupe;

typedef void act_fn(struct troupe *troupe, uint32_t index, struct mu_comm_group *group);

struct troupe {
    uint32_t size, first_rank, stride; /* member i is rank first_rank + i * stride */
    act_fn *act;
    uint32_t absent;         /* this member does nothing, the others are aborted; or NOBODY */
    uint32_t stages_slow;    /* bit set: computes longer than the others */
    pthread_barrier_t begin; /* everybody is connected before anybody acts, or is aborted */
    pthread_barrier_t end;   /* nobody leaves while others still exchange */
    atomic_uint waiting;
    struct member {
        struct troupe *troupe;
        uint32_t index;
        struct mu_id incarnation;
        struct mu_comm *comm;
        pthread_t thread;
        char trouble[256]; /* empty: all was as expected */
    } members[MEMBERS_MAX];
};

static uint32_t rank_of(const struct troupe *troupe, uint32_t index)
{
    return troupe->first_rank + index * troupe->stride;
}

static void note(struct troupe *troupe, uint32_t index, const char *what, const struct mu_error *err)
{
    struct member *member = &troupe->members[index];
    if (!member->trouble[0])
        snprintf(member->trouble, sizeof member->trouble, "%.100s: %.150s", what, err ? err->text : "");
}

static struct mu_comm_group *open_group(struct troupe *troupe, uint32_t index)
{
    struct mu_comm_peer peers[MEMBERS_MAX];
    struct mu_comm_group *group;
    size_t count = 0;
    for (uint32_t i = 0; i < troupe->size; i++)
        if (i != index)
            peers[count++] = (struct mu_comm_peer){rank_of(troupe, i), troupe->members[i].incarnation,
                                                   mu_comm_address(troupe->members[i].comm)};
    struct mu_comm_group_config config = {.generation = 1,
                                          .rank = rank_of(troupe, index),
                                          .world = rank_of(troupe, troupe->size) + 1,
                                          .incarnation = troupe->members[index].incarnation,
                                          .peers = peers,
                                          .peer_count = count};
    memcpy(config.secret, secret, sizeof secret);
    uint64_t deadline_us = mu_clock_mono_us() + PATIENCE_US;
    struct mu_error err;
    if (mu_comm_open(troupe->members[index].comm, &config, deadline_us, &group, &err) != MU_OK)
        return NULL;
    return mu_comm_wait_ready(group, deadline_us, &err) == MU_OK ? group : NULL;
}

/* Ends every act; afterwards nothing of the group is touched any more. */
static void leave(struct troupe *troupe, struct mu_comm_group *group)
{
    pthread_barrier_wait(&troupe->end);
    mu_comm_group_close(group);
}

static void *member_main(void *arg)
{
    struct member *member = arg;
    struct troupe *troupe = member->troupe;
    struct mu_comm_group *group = open_group(troupe, member->index);
    MU_ASSERT(group);
    pthread_barrier_wait(&troupe->begin);
    if (member->index == troupe->absent)
        leave(troupe, group);
    else
        troupe->act(troupe, member->index, group);
    return NULL;
}

/* Once all others wait for the one that is absent, everybody is aborted. */
static void abort_when_all_wait(struct troupe *troupe)
{
    uint64_t deadline_us = mu_clock_mono_us() + PATIENCE_US;
    while (atomic_load(&troupe->waiting) < troupe->size - 1 && mu_clock_mono_us() < deadline_us)
        sched_yield();
    assert_int_equal(atomic_load(&troupe->waiting), troupe->size - 1);
    for (uint32_t i = 0; i < troupe->size; i++)
        mu_comm_abort(troupe->members[i].comm, 1);
}

/* `plan` says size, act, stride, absent, stages_slow. */
static void perform(const struct troupe *plan)
{
    struct troupe *troupe = calloc(1, sizeof *troupe);
    assert_non_null(troupe);
    *troupe = *plan;
    pthread_barrier_init(&troupe->begin, NULL, troupe->size);
    pthread_barrier_init(&troupe->end, NULL, troupe->size);
    for (uint32_t i = 0; i < troupe->size; i++) {
        struct mu_error err;
        troupe->members[i] = (struct member){.troupe = troupe, .index = i, .incarnation = mu_id_random()};
        assert_int_equal(mu_comm_new(&(struct mu_comm_config){.host_id = "host"}, &troupe->members[i].comm, &err),
                         MU_OK);
    }
    for (uint32_t i = 0; i < troupe->size; i++)
        assert_int_equal(pthread_create(&troupe->members[i].thread, NULL, member_main, &troupe->members[i]), 0);
    if (troupe->absent != NOBODY)
        abort_when_all_wait(troupe);
    for (uint32_t i = 0; i < troupe->size; i++)
        pthread_join(troupe->members[i].thread, NULL);
    for (uint32_t i = 0; i < troupe->size; i++)
        mu_comm_free(troupe->members[i].comm);
    pthread_barrier_destroy(&troupe->begin);
    pthread_barrier_destroy(&troupe->end);
    for (uint32_t i = 0; i < troupe->size; i++)
        if (troupe->members[i].trouble[0])
            fail_msg("member %u of %u: %s", i, troupe->size, troupe->members[i].trouble);
    free(troupe);
}

static void on_waiting(void *ctx, bool waiting)
{
    struct troupe *troupe = ctx;
    if (waiting)
        atomic_fetch_add(&troupe->waiting, 1);
    else
        atomic_fetch_sub(&troupe->waiting, 1);
}

/* ---- tensor groups ---- */

/* Byte `i` of the block that goes from one member to another in a round. */
static uint8_t byte_of(uint32_t round, uint32_t from, uint32_t to, size_t i)
{
    return (uint8_t)(round * 37 + from * 101 + to * 59 + i * 7 + (i >> 8) * 3);
}

static void fill(uint8_t *block, size_t bytes, uint32_t round, uint32_t from, uint32_t to)
{
    for (size_t i = 0; i < bytes; i++)
        block[i] = byte_of(round, from, to, i);
}

static bool is_filled(const uint8_t *block, size_t bytes, uint32_t round, uint32_t from, uint32_t to)
{
    for (size_t i = 0; i < bytes; i++)
        if (block[i] != byte_of(round, from, to, i))
            return false;
    return true;
}

static struct mu_tensor_comm *new_tensor(struct troupe *troupe, uint32_t index, struct mu_comm_group *group)
{
    uint32_t ranks[MEMBERS_MAX];
    struct mu_tensor_comm *comm = NULL;
    struct mu_error err;
    for (uint32_t i = 0; i < troupe->size; i++)
        ranks[i] = rank_of(troupe, i);
    struct mu_tensor_comm_config config = {.group = group,
                                           .ranks = ranks,
                                           .size = troupe->size,
                                           .index = index,
                                           .waiting = on_waiting,
                                           .waiting_ctx = troupe};
    if (mu_tensor_comm_new(&config, &comm, &err) != MU_OK)
        note(troupe, index, "new", &err);
    return comm;
}

/* Small, empty and large blocks in turn: eager frames and granted ones. */
static void exchange_blocks(struct troupe *troupe, uint32_t index, struct mu_comm_group *group)
{
    static const size_t sizes[] = {4, 64, 0, 4096, 4097, 1, 300000, 12};
    struct mu_tensor_comm *comm = new_tensor(troupe, index, group);
    uint32_t size = troupe->size;
    for (uint32_t round = 0; comm && round < 24; round++) {
        size_t bytes = sizes[round % 8];
        uint8_t *send = malloc(size * bytes + 1), *recv = malloc(size * bytes + 1);
        memset(recv, 0xee, size * bytes + 1);
        if (round % 3 == 2) {
            fill(recv + index * bytes, bytes, round, index, 0);
            if (mu_tensor_comm_all_gather(comm, recv, bytes) != MU_OK)
                note(troupe, index, "all-gather", mu_tensor_comm_error(comm));
        } else {
            for (uint32_t i = 0; i < size; i++)
                fill(send + i * bytes, bytes, round, index, i);
            if (mu_tensor_comm_all_to_all(comm, send, recv, bytes) != MU_OK)
                note(troupe, index, "all-to-all", mu_tensor_comm_error(comm));
        }
        for (uint32_t i = 0; i < size; i++)
            if (!is_filled(recv + i * bytes, bytes, round, i, round % 3 == 2 ? 0 : index))
                note(troupe, index, "a block differs", NULL);
        if (recv[size * bytes] != 0xee)
            note(troupe, index, "written beyond the blocks", NULL);
        free(send);
        free(recv);
    }
    if (comm && mu_tensor_comm_spent_us(comm) == 0)
        note(troupe, index, "no time was spent", NULL);
    leave(troupe, group);
    mu_tensor_comm_free(comm);
}

static void test_tensor_comm_moves_every_block_to_its_place(void **state)
{
    (void)state;
    for (uint32_t size = 2; size <= 8; size *= 2)
        perform(&(struct troupe){.size = size, .first_rank = 3, .stride = 5, .act = exchange_blocks, .absent = NOBODY});
}

static void exchange_until_aborted(struct troupe *troupe, uint32_t index, struct mu_comm_group *group)
{
    struct mu_tensor_comm *comm = new_tensor(troupe, index, group);
    uint8_t *blocks = calloc(troupe->size, 100000);
    enum mu_status status = mu_tensor_comm_all_gather(comm, blocks, 100000);
    if (status != MU_ERR_CANCELLED)
        note(troupe, index, "not cancelled", mu_tensor_comm_error(comm));
    if (!mu_tensor_comm_error(comm)->text[0])
        note(troupe, index, "no text", NULL);
    leave(troupe, group);
    free(blocks);
    mu_tensor_comm_free(comm);
}

static void test_tensor_comm_abort_ends_the_wait(void **state)
{
    (void)state;
    perform(&(struct troupe){.size = 2, .stride = 1, .act = exchange_until_aborted, .absent = 0});
    perform(&(struct troupe){.size = 4, .stride = 1, .act = exchange_until_aborted, .absent = 2});
}

/* ---- stages ---- */

enum { BLOCKS = 9, BLOCK_FLOATS = 20000 };

static struct mu_pipeline *new_stage(struct troupe *troupe, uint32_t index, struct mu_comm_group *group)
{
    struct mu_pipeline *pipeline = NULL;
    struct mu_error err;
    struct mu_pipeline_config config = {.group = group,
                                        .before = index > 0 ? (int64_t)rank_of(troupe, index - 1) : MU_PIPELINE_NO_RANK,
                                        .after = index + 1 < troupe->size ? (int64_t)rank_of(troupe, index + 1)
                                                                          : MU_PIPELINE_NO_RANK,
                                        .block_floats = BLOCK_FLOATS,
                                        .waiting = on_waiting,
                                        .waiting_ctx = troupe};
    if (mu_pipeline_new(&config, &pipeline, &err) != MU_OK)
        note(troupe, index, "new", &err);
    return pipeline;
}

/* A stage's "computation": its own mark on everything that passes. */
static void work(struct troupe *troupe, uint32_t index, const float *in, float *out, uint32_t block, float mark)
{
    if (troupe->stages_slow >> index & 1) {
        uint64_t until_us = mu_clock_mono_us() + 2000;
        while (mu_clock_mono_us() < until_us)
            ;
    }
    for (uint32_t i = 0; out && i < BLOCK_FLOATS; i++)
        out[i] = (in ? in[i] : (float)(block * 1000 + i % 100)) + mark;
}

static bool is_marked(const float *data, uint32_t block, float marks)
{
    for (uint32_t i = 0; i < BLOCK_FLOATS; i++)
        if (data[i] != (float)(block * 1000 + i % 100) + marks)
            return false;
    return true;
}

static enum mu_status pass(struct troupe *troupe, uint32_t index, struct mu_pipeline *pipeline,
                           enum mu_pipeline_flow flow, uint32_t block, float marks, struct mu_error *err)
{
    const float *in;
    float *out;
    enum mu_status status = mu_pipeline_receive(pipeline, flow, &in, err);
    if (status == MU_OK)
        status = mu_pipeline_block(pipeline, flow, &out, err);
    if (status != MU_OK)
        return status;
    if (in && !is_marked(in, block, marks))
        note(troupe, index, "a block differs", NULL);
    work(troupe, index, in, out, block, 1.0f);
    status = mu_pipeline_send(pipeline, flow, err);
    return status == MU_OK ? mu_pipeline_release(pipeline, flow, err) : status;
}

/* Two phases, one after the other in two portions each: announcements add up. */
static void stage_main(struct troupe *troupe, uint32_t index, struct mu_comm_group *group)
{
    struct mu_pipeline *pipeline = new_stage(troupe, index, group);
    struct mu_error err = {0};
    float before = (float)index, after = (float)(troupe->size - 1 - index);
    enum mu_status status = MU_OK;
    for (uint32_t phase = 0; phase < 2 && status == MU_OK; phase++) {
        status = mu_pipeline_expect(pipeline, MU_PIPELINE_ACTIVATIONS, BLOCKS, &err);
        if (status == MU_OK)
            status = mu_pipeline_expect(pipeline, MU_PIPELINE_GRADIENTS, BLOCKS, &err);
        for (uint32_t i = 0; i < BLOCKS && status == MU_OK; i++)
            status = pass(troupe, index, pipeline, MU_PIPELINE_ACTIVATIONS, i, before, &err);
        for (uint32_t i = 0; i < BLOCKS && status == MU_OK; i++)
            status = pass(troupe, index, pipeline, MU_PIPELINE_GRADIENTS, i, after, &err);
    }
    if (status == MU_OK)
        status = mu_comm_wait_all(group, MU_COMM_FOREVER, &err);
    if (status != MU_OK)
        note(troupe, index, "stage", &err);
    leave(troupe, group);
    mu_pipeline_free(pipeline);
}

static void test_pipeline_passes_blocks_in_order_both_ways(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {2, 3, 5}, slow[] = {0, 2, 0x11};
    for (uint32_t i = 0; i < 3; i++)
        perform(&(struct troupe){
            .size = sizes[i], .stride = 3, .act = stage_main, .absent = NOBODY, .stages_slow = slow[i]});
}

static void stage_until_aborted(struct troupe *troupe, uint32_t index, struct mu_comm_group *group)
{
    struct mu_pipeline *pipeline = new_stage(troupe, index, group);
    struct mu_error err = {0};
    enum mu_status status = mu_pipeline_expect(pipeline, MU_PIPELINE_ACTIVATIONS, 8, &err);
    for (uint32_t i = 0; i < 8 && status == MU_OK; i++)
        status = pass(troupe, index, pipeline, MU_PIPELINE_ACTIVATIONS, i, (float)index, &err);
    if (status != MU_ERR_CANCELLED || !err.text[0])
        note(troupe, index, "not cancelled", &err);
    leave(troupe, group);
    mu_pipeline_free(pipeline);
}

/* Stages before the one that does nothing wait to send, those behind it wait to receive. */
static void test_pipeline_abort_ends_the_wait(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {3, 3, 2}, absent[] = {1, 2, 0};
    for (uint32_t i = 0; i < 3; i++)
        perform(&(struct troupe){.size = sizes[i], .stride = 1, .act = stage_until_aborted, .absent = absent[i]});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensor_comm_moves_every_block_to_its_place),
        cmocka_unit_test(test_tensor_comm_abort_ends_the_wait),
        cmocka_unit_test(test_pipeline_passes_blocks_in_order_both_ways),
        cmocka_unit_test(test_pipeline_abort_ends_the_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
