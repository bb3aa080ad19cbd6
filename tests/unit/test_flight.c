/* links: mu_common mu_wire mu_proto */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/log.h"
#include "common/verdict.h"
#include "proto/standing.h"

/* ---- the ring ---- */

static void test_the_newest_records_are_kept_in_order(void **state)
{
    (void)state;
    struct mu_flight_record *records = calloc(MU_FLIGHT_RECORDS, sizeof *records);
    uint64_t base = mu_flight_next();
    for (uint64_t i = 0; i < MU_FLIGHT_RECORDS + 100; i++)
        mu_flight_note(MU_FLIGHT_SEND, i & 1, (uint32_t)(i * 3), i, i * 7);
    assert_int_equal(mu_flight_next(), base + MU_FLIGHT_RECORDS + 100);
    size_t count = mu_flight_read(0, UINT64_MAX, records, MU_FLIGHT_RECORDS);
    assert_int_equal(count, MU_FLIGHT_RECORDS);
    for (size_t i = 0; i < count; i++) {
        uint64_t number = i + 100;
        assert_int_equal(records[i].number, number);
        assert_int_equal(records[i].bytes, number * 7);
        assert_int_equal(records[i].peer, number * 3);
        assert_int_equal(records[i].kind, MU_FLIGHT_SEND);
        assert_int_equal(records[i].is_end, number & 1);
        assert_true(i == 0 || records[i].at_us >= records[i - 1].at_us);
    }
    assert_int_equal(mu_flight_read(base + MU_FLIGHT_RECORDS + 90, UINT64_MAX, records, MU_FLIGHT_RECORDS), 10);
    assert_int_equal(records[0].number, MU_FLIGHT_RECORDS + 90);
    assert_int_equal(mu_flight_read(0, UINT64_MAX, records, 7), 7);
    assert_int_equal(mu_flight_read(base + 200, base + 203, records, 7), 3);
    free(records);
}

static atomic_bool over;

/* Every field says the same number, so a mixture of two records would show. */
static void *write_many(void *arg)
{
    uint64_t tag = *(const uint32_t *)arg;
    for (uint64_t i = 0; i < 200000; i++) {
        uint64_t value = tag << 32 | i;
        mu_flight_note(MU_FLIGHT_RECEIVE, false, (uint32_t)i, value, value);
    }
    return NULL;
}

static void *read_many(void *arg)
{
    struct mu_flight_record *records = malloc(MU_FLIGHT_RECORDS * sizeof *records);
    size_t *seen = arg;
    bool last;
    do {
        last = atomic_load(&over); /* when all is written it is read once more */
        size_t count = mu_flight_read(0, UINT64_MAX, records, MU_FLIGHT_RECORDS);
        for (size_t i = 0; i < count; i++) {
            if (records[i].kind != MU_FLIGHT_RECEIVE)
                continue;
            assert_int_equal(records[i].number, records[i].bytes);
            assert_int_equal((uint32_t)records[i].number, records[i].peer);
            *seen += 1;
        }
    } while (!last);
    free(records);
    return NULL;
}

static void test_writers_and_readers_do_not_mix_records(void **state)
{
    (void)state;
    pthread_t writers[3], reader;
    uint32_t tags[3] = {1, 2, 3};
    size_t seen = 0;
    assert_int_equal(pthread_create(&reader, NULL, read_many, &seen), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&writers[i], NULL, write_many, &tags[i]), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(writers[i], NULL);
    atomic_store(&over, true);
    pthread_join(reader, NULL);
    assert_true(seen > 0);
}

/* ---- lines ---- */

static void test_the_newest_lines_are_kept(void **state)
{
    (void)state;
    struct mu_log_line lines[MU_LOG_KEPT];
    char text[32];
    mu_log_init("test", MU_LOG_ERROR);
    uint64_t before = 0;
    size_t count = mu_log_recent(0, lines, MU_LOG_KEPT);
    if (count)
        before = lines[count - 1].number;
    MU_LOGI("not written, so not kept");
    for (int i = 0; i < 3; i++)
        MU_LOGE("line %d", i);
    assert_int_equal(mu_log_recent(before, lines, MU_LOG_KEPT), 3);
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "msg=\"line %d\"", i);
        assert_int_equal(lines[i].number, before + 1 + (uint64_t)i);
        assert_non_null(strstr(lines[i].text, text));
        assert_null(strchr(lines[i].text, '\n'));
    }
    assert_int_equal(mu_log_recent(before, lines, 2), 2);
    assert_int_equal(lines[0].number, before + 2);
    assert_int_equal(mu_log_recent(before + 3, lines, MU_LOG_KEPT), 0);
}

/* ---- verdicts ---- */

#define BEGIN(kind, number)                                                                                            \
    {                                                                                                                  \
        1, number, 0, 0, kind, false                                                                                   \
    }
#define END(kind, number)                                                                                              \
    {                                                                                                                  \
        2, number, 0, 0, kind, true                                                                                    \
    }
#define POST(kind, peer, number)                                                                                       \
    {                                                                                                                  \
        3, number, 8, peer, kind, false                                                                                \
    }
#define DONE(kind, peer, number)                                                                                       \
    {                                                                                                                  \
        4, number, 8, peer, kind, true                                                                                 \
    }
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static struct mu_standing stand(uint32_t rank, const struct mu_flight_record *records, size_t count)
{
    struct mu_standing standing = {.rank = rank, .has_answered = true};
    mu_standing_of(records, count, &standing);
    return standing;
}

static void test_a_standing_is_what_is_open(void **state)
{
    (void)state;
    static const struct mu_flight_record records[] = {
        END(MU_FLIGHT_FORWARD, 9), /* its beginning is no longer held */
        BEGIN(MU_FLIGHT_STEP, 40),   POST(MU_FLIGHT_RECEIVE, 3, 1), POST(MU_FLIGHT_RECEIVE, 1, 1),
        BEGIN(MU_FLIGHT_FORWARD, 0), END(MU_FLIGHT_FORWARD, 0),     POST(MU_FLIGHT_SEND, 1, 1),
        DONE(MU_FLIGHT_SEND, 1, 1),  DONE(MU_FLIGHT_RECEIVE, 1, 1), POST(MU_FLIGHT_RECEIVE, 3, 2),
        BEGIN(MU_FLIGHT_REDUCE, 40),
    };
    struct mu_standing standing = stand(0, records, COUNT(records));
    assert_int_equal(standing.step, 40);
    assert_int_equal(standing.doing, MU_FLIGHT_REDUCE);
    assert_true(standing.is_waiting);
    assert_int_equal(standing.peer_count, 1);
    assert_int_equal(standing.peers[0], 3);
    /* The end of a generation ends all of it. */
    struct mu_flight_record more[COUNT(records) + 1];
    memcpy(more, records, sizeof records);
    more[COUNT(records)] = (struct mu_flight_record){.at_us = 5, .kind = MU_FLIGHT_PARKED, .number = 40};
    standing = stand(0, more, COUNT(more));
    assert_int_equal(standing.doing, MU_FLIGHT_NONE);
    assert_int_equal(standing.peer_count, 0);
    assert_false(standing.is_waiting);
    assert_int_equal(standing.last_us, 5);
    /* An exchange number comes again in the next generation. */
    static const struct mu_flight_record again[] = {POST(MU_FLIGHT_RECEIVE, 1, 1), DONE(MU_FLIGHT_RECEIVE, 1, 1),
                                                    BEGIN(MU_FLIGHT_STEP, 1), POST(MU_FLIGHT_RECEIVE, 1, 1)};
    assert_int_equal(stand(0, again, COUNT(again)).peer_count, 1);
    assert_int_equal(stand(0, NULL, 0).doing, MU_FLIGHT_NONE);
}

static void test_who_computes_while_others_wait_is_named(void **state)
{
    (void)state;
    static const struct mu_flight_record waits_for_1[] = {BEGIN(MU_FLIGHT_STEP, 7), POST(MU_FLIGHT_RECEIVE, 1, 4),
                                                          BEGIN(MU_FLIGHT_REDUCE, 7)};
    static const struct mu_flight_record waits_for_0[] = {BEGIN(MU_FLIGHT_STEP, 7), POST(MU_FLIGHT_RECEIVE, 0, 4),
                                                          BEGIN(MU_FLIGHT_VOTE, 7)};
    static const struct mu_flight_record computes[] = {BEGIN(MU_FLIGHT_STEP, 7), POST(MU_FLIGHT_RECEIVE, 0, 4),
                                                       BEGIN(MU_FLIGHT_BACKWARD, 2)};
    static const struct mu_flight_record in_layer[] = {BEGIN(MU_FLIGHT_STEP, 7), BEGIN(MU_FLIGHT_FORWARD, 2),
                                                       POST(MU_FLIGHT_RECEIVE, 0, 4)};
    struct mu_standing standings[] = {stand(0, waits_for_1, 3), stand(1, computes, 3), stand(2, waits_for_0, 3),
                                      stand(3, in_layer, 3)};
    size_t culprits[4];
    assert_false(standings[1].is_waiting);
    assert_true(standings[3].is_waiting); /* a tensor exchange */
    assert_int_equal(mu_verdict(standings, 4, culprits, 4), 1);
    assert_int_equal(culprits[0], 1);
    /* Who has not answered is blamed if somebody waits for it, and only then. */
    standings[1] = (struct mu_standing){.rank = 1};
    assert_int_equal(mu_verdict(standings, 4, culprits, 4), 1);
    assert_int_equal(culprits[0], 1);
    assert_int_equal(mu_verdict(&standings[1], 1, culprits, 4), 0);
    /* A circle has no end. */
    struct mu_standing circle[] = {stand(0, waits_for_1, 3), stand(1, waits_for_0, 3)};
    assert_int_equal(mu_verdict(circle, 2, culprits, 4), 0);
}

/* The last one: nothing switches it on again. */
/* What a report shows is how it was before the loss was heard of, not what followed from it. */
static void test_a_standing_before_a_loss(void **state)
{
    (void)state;
    static const struct mu_flight_record happened[] = {
        {.at_us = 1, .kind = MU_FLIGHT_STEP, .number = 4},
        {.at_us = 2, .kind = MU_FLIGHT_PEER_FAILED, .peer = 7}, /* of one who was fed: the step went on */
        {.at_us = 3, .kind = MU_FLIGHT_STEP, .number = 4, .is_end = true},
        {.at_us = 4, .kind = MU_FLIGHT_STEP, .number = 5},
        {.at_us = 5, .kind = MU_FLIGHT_REDUCE, .number = 5},
        {.at_us = 6, .kind = MU_FLIGHT_RECEIVE, .number = 9, .peer = 1},
        {.at_us = 7, .kind = MU_FLIGHT_PEER_FAILED, .peer = 1},
        {.at_us = 8, .kind = MU_FLIGHT_RECEIVE, .number = 9, .peer = 1, .is_end = true},
        {.at_us = 9, .kind = MU_FLIGHT_PARKED, .number = 5},
    };
    enum { COUNT = sizeof happened / sizeof happened[0] };
    Muster__V1__FlightRecord records[COUNT], *pointers[COUNT];
    for (int i = 0; i < COUNT; i++) {
        muster__v1__flight_record__init(&records[i]);
        records[i].at_us = happened[i].at_us;
        records[i].kind = (Muster__V1__FlightKind)happened[i].kind;
        records[i].number = happened[i].number;
        records[i].peer = happened[i].peer;
        records[i].is_end = happened[i].is_end;
        pointers[i] = &records[i];
    }
    Muster__V1__ReadRecallResponse answer = MUSTER__V1__READ_RECALL_RESPONSE__INIT;
    answer.rank = 3;
    answer.is_complete = true;
    answer.records = pointers;
    answer.n_records = COUNT;
    struct mu_standing standing = mu_standing_of_answer(&answer);
    assert_true(standing.has_answered && !standing.is_waiting);
    assert_int_equal(standing.doing, MU_FLIGHT_NONE);
    for (uint64_t until_us = 6; until_us <= 10; until_us++) {
        standing = mu_standing_before(&answer, until_us);
        assert_true(standing.is_waiting && standing.rank == 3);
        assert_int_equal(standing.doing, MU_FLIGHT_REDUCE);
        assert_int_equal(standing.step, 5);
        assert_int_equal(standing.peer_count, 1);
        assert_int_equal(standing.peers[0], 1);
    }
    standing = mu_standing_before(&answer, 5);
    assert_true(standing.doing == MU_FLIGHT_REDUCE && !standing.is_waiting);
}

static void test_switched_off_nothing_is_recorded(void **state)
{
    struct mu_flight_record record;
    (void)state;
    mu_flight_begin(MU_FLIGHT_STEP, 1);
    uint64_t next = mu_flight_next();
    mu_flight_switch_off();
    mu_flight_begin(MU_FLIGHT_STEP, 2);
    mu_flight_note(MU_FLIGHT_SEND, true, 1, 2, 3);
    assert_true(mu_flight_next() == next);
    assert_int_equal(mu_flight_read(next - 1, next + 2, &record, 1), 1);
    assert_true(record.number == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_newest_records_are_kept_in_order),
        cmocka_unit_test(test_writers_and_readers_do_not_mix_records),
        cmocka_unit_test(test_the_newest_lines_are_kept),
        cmocka_unit_test(test_a_standing_is_what_is_open),
        cmocka_unit_test(test_who_computes_while_others_wait_is_named),
        cmocka_unit_test(test_a_standing_before_a_loss),
        cmocka_unit_test(test_switched_off_nothing_is_recorded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
