/* links: mu_measure */
#include "worker/measure.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include <pthread.h>

#include "common/clock.h"

enum { SIDES_MAX = 6, PATIENCE_US = 120 * 1000000 };

/* ---- several workers, each in a thread with its own data plane ---- */

struct side {
    struct mu_comm *comm;
    struct mu_comm_group_config config;
    struct mu_comm_peer peers[MU_PROBE_NEIGHBOURS_MAX];
    struct mu_measure measure;
    pthread_t thread;
    struct mu_probe_pair pair;
    double seconds, rate;
    enum mu_status status;
    struct mu_error err;
};

static void make(struct side *sides, uint32_t count, bool over_tcp)
{
    memset(sides, 0, count * sizeof *sides);
    for (uint32_t i = 0; i < count; i++) {
        char host[16];
        snprintf(host, sizeof host, "h%u", over_tcp ? i : 0);
        assert_int_equal(mu_comm_new(&(struct mu_comm_config){.host_id = host}, &sides[i].comm, &sides[i].err), MU_OK);
        sides[i].measure.deadline_us = mu_clock_mono_us() + PATIENCE_US;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t ranks[MU_PROBE_NEIGHBOURS_MAX], peers = mu_probe_neighbours(count, i, ranks);
        for (uint32_t k = 0; k < peers; k++)
            sides[i].peers[k] = (struct mu_comm_peer){.rank = ranks[k],
                                                      .incarnation = {.low = ranks[k] + 1},
                                                      .address = mu_comm_address(sides[ranks[k]].comm)};
        sides[i].config = (struct mu_comm_group_config){.generation = MU_COMM_ASIDE | 7,
                                                        .rank = i,
                                                        .world = count,
                                                        .incarnation = {.low = i + 1},
                                                        .peers = sides[i].peers,
                                                        .peer_count = peers,
                                                        .secret = "secret"};
    }
}

static void *pair(void *arg)
{
    struct side *s = arg;
    s->status = mu_measure_pair(&s->measure, s->comm, &s->config, &s->pair, &s->err);
    return NULL;
}

static void *together(void *arg)
{
    struct side *s = arg;
    s->status = mu_measure_together(&s->measure, s->comm, &s->config, 3 << 20, &s->seconds, &s->rate, &s->err);
    return NULL;
}

static void run(struct side *sides, uint32_t count, void *(*work)(void *))
{
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(pthread_create(&sides[i].thread, NULL, work, &sides[i]), 0);
    for (uint32_t i = 0; i < count; i++)
        pthread_join(sides[i].thread, NULL);
}

static void end(struct side *sides, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        mu_comm_free(sides[i].comm);
}

static void test_pair_measures_both_ways_over_unix_and_tcp(void **state)
{
    (void)state;
    for (int over_tcp = 0; over_tcp < 2; over_tcp++) {
        struct side sides[2];
        make(sides, 2, over_tcp);
        run(sides, 2, pair);
        assert_int_equal(sides[0].status, MU_OK);
        assert_int_equal(sides[1].status, MU_OK);
        const struct mu_probe_pair *p = &sides[0].pair;
        assert_true(p->round_trip_s > 1e-7 && p->round_trip_s < 10);
        assert_true(p->out_rate > 1e4 && p->out_rate < 1e12);
        assert_true(p->in_rate > 1e4 && p->in_rate < 1e12);
        assert_true(sides[1].pair.round_trip_s <= 0); /* only the one who leads takes the time */
        end(sides, 2);
    }
}

static void test_pair_again_over_the_same_data_plane(void **state)
{
    (void)state;
    struct side sides[2];
    make(sides, 2, true);
    for (uint64_t round = 0; round < 3; round++) {
        sides[0].config.generation = sides[1].config.generation = MU_COMM_ASIDE | (100 + round);
        run(sides, 2, pair);
        assert_int_equal(sides[0].status, MU_OK);
        assert_int_equal(sides[1].status, MU_OK);
    }
    end(sides, 2);
}

static void test_all_together_measures_each(void **state)
{
    (void)state;
    for (uint32_t count = 2; count <= SIDES_MAX; count++) {
        struct side sides[SIDES_MAX];
        make(sides, count, true);
        run(sides, count, together);
        for (uint32_t i = 0; i < count; i++) {
            assert_int_equal(sides[i].status, MU_OK);
            assert_true(sides[i].seconds > 1e-7 && sides[i].rate > 1e4);
        }
        end(sides, count);
    }
}

/* ---- who does not come, goes, or is told to stop ---- */

static bool stops(void *ctx)
{
    return atomic_load((atomic_bool *)ctx);
}

static void test_who_does_not_come_is_given_up_at_the_deadline(void **state)
{
    (void)state;
    struct side sides[2];
    make(sides, 2, true);
    sides[0].measure.deadline_us = mu_clock_mono_us() + 50000;
    pair(&sides[0]);
    assert_true(sides[0].status == MU_ERR_TIMEOUT || sides[0].status == MU_ERR_UNAVAILABLE); /* whoever looks first */
    end(sides, 2);
}

static void *close_soon(void *arg)
{
    struct side *s = arg;
    struct mu_comm_group *group = NULL;
    struct mu_comm_request request;
    uint64_t word[2];
    assert_int_equal(mu_comm_open(s->comm, &s->config, s->measure.deadline_us, &group, &s->err), MU_OK);
    assert_int_equal(mu_comm_recv(group, 0, 1, word, sizeof word, &request, &s->err), MU_OK);
    assert_int_equal(mu_comm_wait(group, &request, s->measure.deadline_us, &s->err), MU_OK);
    mu_comm_group_close(group);
    mu_comm_free(s->comm);
    s->comm = NULL;
    return NULL;
}

static void test_who_goes_in_the_middle_is_told_at_once(void **state)
{
    (void)state;
    struct side sides[2];
    make(sides, 2, true);
    assert_int_equal(pthread_create(&sides[1].thread, NULL, close_soon, &sides[1]), 0);
    pair(&sides[0]);
    pthread_join(sides[1].thread, NULL);
    assert_int_equal(sides[0].status, MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(sides[0].err.text, "rank 1"));
    end(sides, 1);
}

static void test_stop_ends_a_wait(void **state)
{
    (void)state;
    struct side sides[2];
    atomic_bool stop = false;
    make(sides, 2, true);
    sides[0].measure.stop = stops;
    sides[0].measure.ctx = &stop;
    assert_int_equal(pthread_create(&sides[0].thread, NULL, pair, &sides[0]), 0);
    atomic_store(&stop, true); /* the other one never comes */
    pthread_join(sides[0].thread, NULL);
    assert_int_equal(sides[0].status, MU_ERR_CANCELLED);
    end(sides, 2);
}

/* ---- a link that changes what it carries ---- */

/* Follows, and says of the first burst that it did not arrive as it was sent. */
static void *finds_it_changed(void *arg)
{
    struct side *s = arg;
    struct mu_comm_group *group = NULL;
    struct mu_comm_request request;
    uint64_t order[2], word = 0, exchange = 0, until_us = s->measure.deadline_us;
    uint8_t *burst = malloc(4 << 20);
    assert_int_equal(mu_comm_open(s->comm, &s->config, until_us, &group, &s->err), MU_OK);
    for (bool over = false; !over;) {
        assert_int_equal(mu_comm_recv(group, 0, ++exchange, order, sizeof order, &request, &s->err), MU_OK);
        assert_int_equal(mu_comm_wait(group, &request, until_us, &s->err), MU_OK);
        over = order[0] != 1;
        for (uint64_t i = 0; i < order[1] && !over; i++) {
            assert_int_equal(mu_comm_recv(group, 0, ++exchange, &word, sizeof word, &request, &s->err), MU_OK);
            assert_int_equal(mu_comm_wait(group, &request, until_us, &s->err), MU_OK);
            assert_int_equal(mu_comm_send(group, 0, ++exchange, &word, sizeof word, &request, &s->err), MU_OK);
            assert_int_equal(mu_comm_wait(group, &request, until_us, &s->err), MU_OK);
        }
    }
    assert_int_equal(mu_comm_recv(group, 0, ++exchange, burst, order[1], &request, &s->err), MU_OK);
    assert_int_equal(mu_comm_wait(group, &request, until_us, &s->err), MU_OK);
    word = 0;
    assert_int_equal(mu_comm_send(group, 0, ++exchange, &word, sizeof word, &request, &s->err), MU_OK);
    assert_int_equal(mu_comm_wait(group, &request, until_us, &s->err), MU_OK);
    mu_comm_group_close(group);
    free(burst);
    return NULL;
}

static void test_bytes_that_change_on_the_way_are_told(void **state)
{
    (void)state;
    struct side sides[2];
    make(sides, 2, true);
    assert_int_equal(pthread_create(&sides[1].thread, NULL, finds_it_changed, &sides[1]), 0);
    pair(&sides[0]);
    pthread_join(sides[1].thread, NULL);
    assert_int_equal(sides[0].status, MU_ERR_CORRUPT);
    assert_string_equal(sides[0].err.text, "bytes change on the way there");
    end(sides, 2);
}

/* ---- by itself ---- */

static void test_device_gives_products_and_memory(void **state)
{
    (void)state;
    struct mu_measure m = {.deadline_us = mu_clock_mono_us() + PATIENCE_US};
    struct mu_probe_alone alone = {.memory_rate = 0};
    struct mu_error err;
    assert_int_equal(mu_pool_new(1, &err, &m.pool), MU_OK);
    assert_int_equal(mu_measure_device(&m, &alone, &err), MU_OK);
    assert_true(alone.flops[0] > 0);
    for (int i = 1; i < MU_PROBE_SIZES; i++) /* 0: one that would take too long, under a sanitizer */
        assert_true(alone.flops[i] >= 0 && alone.flops[i] < 1e15);
    assert_true(alone.memory_rate > 1e6 && alone.memory_bytes > 1e8);
    assert_true(alone.to_host_rate <= 0); /* there is no GPU */
    atomic_bool stop = true;
    m.stop = stops;
    m.ctx = &stop;
    struct mu_measured_model measured;
    assert_int_equal(mu_measure_device(&m, &alone, &err), MU_ERR_CANCELLED);
    assert_int_equal(mu_measure_model(&m, NULL, NULL, &measured, &err), MU_ERR_CANCELLED);
    mu_pool_free(m.pool);
}

static uint32_t entries_in(const char *dir)
{
    DIR *list = opendir(dir);
    uint32_t count = 0;
    assert_non_null(list);
    for (struct dirent *entry; (entry = readdir(list));)
        count += entry->d_name[0] != '.' || strlen(entry->d_name) > 2;
    closedir(list);
    return count;
}

static void test_storage_is_written_and_read_and_left_as_it_was(void **state)
{
    (void)state;
    char dir[] = "/tmp/muster-measure-XXXXXX", below[64];
    struct mu_measure m = {.deadline_us = mu_clock_mono_us() + PATIENCE_US};
    double write_rate = 0, read_rate = 0;
    struct mu_error err;
    assert_non_null(mkdtemp(dir));
    snprintf(below, sizeof below, "%s/a/b", dir);
    assert_int_equal(mu_measure_storage(&m, below, false, 4, &write_rate, &read_rate, &err), MU_ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, below));
    assert_int_equal(mu_measure_storage(&m, below, true, 4, &write_rate, &read_rate, &err), MU_OK);
    assert_true(write_rate > 1e3 && read_rate > 1e3);
    assert_int_equal(entries_in(below), 0);
    m.deadline_us = 1;
    assert_int_equal(mu_measure_storage(&m, below, true, 4096, &write_rate, &read_rate, &err), MU_ERR_TIMEOUT);
    rmdir(below);
    snprintf(below, sizeof below, "%s/a", dir);
    rmdir(below);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pair_measures_both_ways_over_unix_and_tcp),
        cmocka_unit_test(test_pair_again_over_the_same_data_plane),
        cmocka_unit_test(test_all_together_measures_each),
        cmocka_unit_test(test_who_does_not_come_is_given_up_at_the_deadline),
        cmocka_unit_test(test_who_goes_in_the_middle_is_told_at_once),
        cmocka_unit_test(test_stop_ends_a_wait),
        cmocka_unit_test(test_bytes_that_change_on_the_way_are_told),
        cmocka_unit_test(test_device_gives_products_and_memory),
        cmocka_unit_test(test_storage_is_written_and_read_and_left_as_it_was),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
