/* links: mu_plan */
#include "plan/probe.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"

/* ---- rounds ---- */

/* Whom each has met: by bits. */
struct met {
    uint32_t times[MU_PROBE_MEMBERS_MAX];
    bool pairs[40][40];
};

static void check_rounds(uint32_t workers)
{
    static struct met met;
    memset(&met, 0, sizeof met);
    for (uint32_t round = 0; round < mu_probe_rounds(workers); round++) {
        uint32_t resting = 0;
        for (uint32_t i = 0; i < workers; i++) {
            uint32_t other = mu_probe_partner(workers, round, i);
            assert_true(other < workers);
            assert_int_equal(mu_probe_partner(workers, round, other), i); /* so nobody is in two pairs */
            resting += other == i;
            met.times[i] += other != i;
            if (workers <= 40 && i < other) {
                assert_false(met.pairs[i][other]);
                met.pairs[i][other] = true;
            }
        }
        assert_int_equal(resting, workers % 2);
    }
    for (uint32_t i = 0; i < workers; i++) {
        assert_true(met.times[i] + 1 >= mu_probe_rounds(workers));
        for (uint32_t k = i + 1; k < workers && workers <= MU_PROBE_ALL_PAIRS_MAX; k++)
            assert_true(met.pairs[i][k]);
    }
}

static void test_rounds_of_few_workers_are_all_pairs_once(void **state)
{
    (void)state;
    assert_int_equal(mu_probe_rounds(0), 0);
    assert_int_equal(mu_probe_rounds(1), 0);
    for (uint32_t workers = 2; workers <= MU_PROBE_ALL_PAIRS_MAX; workers++) {
        assert_int_equal(mu_probe_rounds(workers), workers % 2 ? workers : workers - 1);
        check_rounds(workers);
    }
}

static void test_rounds_of_many_workers_grow_with_their_logarithm(void **state)
{
    (void)state;
    for (uint32_t workers = MU_PROBE_ALL_PAIRS_MAX + 1; workers <= MU_PROBE_MEMBERS_MAX;
         workers += workers < 40 ? 1 : 41)
        check_rounds(workers);
    assert_int_equal(mu_probe_rounds(17), 10);
    assert_int_equal(mu_probe_rounds(256), 16);
    assert_int_equal(mu_probe_rounds(MU_PROBE_MEMBERS_MAX), 20);
    check_rounds(MU_PROBE_MEMBERS_MAX);
}

static void test_neighbours_are_mutual_and_ascending(void **state)
{
    (void)state;
    for (uint32_t workers = 1; workers <= MU_PROBE_MEMBERS_MAX; workers += workers < 40 ? 1 : 123)
        for (uint32_t i = 0; i < workers; i++) {
            uint32_t ranks[MU_PROBE_NEIGHBOURS_MAX], count = mu_probe_neighbours(workers, i, ranks), others;
            assert_true(workers == 1 ? count == 0 : count >= 1 && count <= MU_PROBE_NEIGHBOURS_MAX);
            for (uint32_t k = 0; k < count; k++) {
                uint32_t back[MU_PROBE_NEIGHBOURS_MAX], at = 0;
                assert_true(ranks[k] < workers && ranks[k] != i && (k == 0 || ranks[k] > ranks[k - 1]));
                others = mu_probe_neighbours(workers, ranks[k], back);
                while (at < others && back[at] != i)
                    at++;
                assert_true(at < others);
            }
        }
}

/* ---- statistics ---- */

/* Workers whose links are what the slower end gives, in all pairs of the rounds. */
struct scene {
    struct mu_probe_result result;
    struct mu_probe_member members[64];
    struct mu_probe_link links[1024];
    struct mu_probe_finding *findings;
    uint32_t count;
};

static double noisy(uint64_t *random, double value, double noise)
{
    double u = (double)(mu_splitmix64(random) >> 11) * 0x1p-52 - 1;
    return value * (1 + noise * u);
}

static void make(struct scene *s, uint32_t workers, uint32_t per_host, double noise, uint64_t seed)
{
    uint64_t random = seed;
    free(s->findings);
    memset(s, 0, sizeof *s);
    s->result = (struct mu_probe_result){.member_count = workers, .members = s->members, .links = s->links};
    for (uint32_t i = 0; i < workers; i++) {
        struct mu_probe_member *m = &s->members[i];
        snprintf(m->name, sizeof m->name, "w%u", i);
        snprintf(m->host, sizeof m->host, "h%u", i / per_host);
        snprintf(m->backend, sizeof m->backend, "cpu");
        m->has_alone = true;
        m->alone.flops[4] = noisy(&random, 2e11, noise);
        m->alone.memory_rate = noisy(&random, 2e10, noise);
        m->write_rate = noisy(&random, 5e8, noise);
    }
    for (uint32_t round = 0; round < mu_probe_rounds(workers); round++)
        for (uint32_t i = 0; i < workers; i++) {
            uint32_t other = mu_probe_partner(workers, round, i);
            bool inside = i / per_host == other / per_host;
            if (i < other)
                s->links[s->result.link_count++] =
                    (struct mu_probe_link){.a = i,
                                           .b = other,
                                           .state = MU_PROBE_LINK_GOOD,
                                           .pair = {.round_trip_s = noisy(&random, inside ? 1e-5 : 5e-5, noise),
                                                    .out_rate = noisy(&random, inside ? 8e9 : 1e9, noise),
                                                    .in_rate = noisy(&random, inside ? 8e9 : 1e9, noise)}};
        }
}

static struct mu_probe_link *link_of(struct scene *s, uint32_t a, uint32_t b)
{
    for (uint32_t i = 0; i < s->result.link_count; i++)
        if (s->links[i].a == a && s->links[i].b == b)
            return &s->links[i];
    return NULL;
}

static void slow_worker(struct scene *s, uint32_t worker, double share)
{
    for (uint32_t i = 0; i < s->result.link_count; i++) {
        struct mu_probe_link *link = &s->links[i];
        if (link->a != worker && link->b != worker)
            continue;
        link->pair.out_rate *= share;
        link->pair.in_rate *= share;
    }
}

static void judge(struct scene *s)
{
    free(s->findings);
    assert_int_equal(mu_probe_judge(&s->result, &s->findings, &s->count), MU_OK);
}

static void assert_only(const struct scene *s, enum mu_probe_finding_kind kind, uint32_t a, uint32_t b)
{
    for (uint32_t i = 0; i < s->count && s->count > 1; i++)
        print_message("%s\n", s->findings[i].text);
    assert_int_equal(s->count, 1);
    assert_int_equal(s->findings[0].kind, kind);
    assert_int_equal(s->findings[0].a, a);
    assert_int_equal(s->findings[0].b, b);
}

static void test_nothing_stands_out_among_equals_however_they_scatter(void **state)
{
    (void)state;
    static const uint32_t counts[] = {1, 2, 3, 4, 5, 8, 16, 17, 31, 64};
    static struct scene s;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        for (uint64_t seed = 1; seed <= 40; seed++)
            for (uint32_t per_host = 1; per_host <= 4; per_host *= 2) {
                make(&s, counts[i], per_host, 0.1, seed);
                judge(&s);
                assert_int_equal(s.count, 0);
                assert_null(s.findings);
            }
}

static void test_one_slow_link_is_named_and_not_its_ends(void **state)
{
    (void)state;
    static struct scene s;
    for (uint32_t workers = 3; workers <= 64; workers += workers < 18 ? 1 : 23)
        for (uint64_t seed = 1; seed <= 20; seed++) {
            make(&s, workers, 1, 0.05, seed);
            struct mu_probe_link *link = &s.links[mu_splitmix64(&seed) % s.result.link_count];
            link->pair.in_rate = 5e7; /* one direction is enough */
            judge(&s);
            assert_only(&s, MU_PROBE_SLOW_LINK, link->a, link->b);
            assert_true(s.findings[0].share > 0.04 && s.findings[0].share < 0.06);
        }
    make(&s, 4, 1, 0, 1);
    link_of(&s, 1, 3)->pair.out_rate = 4.9e6;
    judge(&s);
    assert_string_equal(s.findings[0].text,
                        "link w1 - w3: 4.9 MB/s from w1, 1 GB/s from w3: 0.49 % of the 1 GB/s that both get elsewhere");
    free(s.findings);
}

static void test_a_worker_slow_on_all_its_links_is_named_and_none_of_them(void **state)
{
    (void)state;
    static struct scene s;
    for (uint32_t workers = 3; workers <= 64; workers += workers < 18 ? 1 : 23)
        for (uint64_t seed = 1; seed <= 20; seed++) {
            make(&s, workers, 1, 0.05, seed);
            uint32_t worker = (uint32_t)(seed * 7 % workers);
            slow_worker(&s, worker, 0.3);
            judge(&s);
            assert_only(&s, MU_PROBE_SLOW_WORKER, worker, worker);
            assert_non_null(strstr(s.findings[0].text, "links to other hosts are slow as a whole"));
        }
    free(s.findings);
}

static void test_a_slow_worker_and_a_slow_link_elsewhere_are_both_named(void **state)
{
    (void)state;
    static struct scene s;
    make(&s, 8, 1, 0.05, 3);
    slow_worker(&s, 2, 0.25);
    link_of(&s, 4, 7)->pair.out_rate = 1e8;
    judge(&s);
    assert_int_equal(s.count, 2);
    assert_int_equal(s.findings[0].kind, MU_PROBE_SLOW_LINK); /* the slower comes first */
    assert_int_equal(s.findings[0].a, 4);
    assert_int_equal(s.findings[1].kind, MU_PROBE_SLOW_WORKER);
    assert_int_equal(s.findings[1].a, 2);
    free(s.findings);
}

static void test_links_inside_a_host_and_between_hosts_are_not_compared(void **state)
{
    (void)state;
    static struct scene s;
    make(&s, 12, 4, 0.05, 5);
    link_of(&s, 4, 6)->pair.out_rate = 9e8; /* as good as any between hosts */
    judge(&s);
    assert_only(&s, MU_PROBE_SLOW_LINK, 4, 6);
    free(s.findings);
}

static void test_a_long_round_trip_is_named(void **state)
{
    (void)state;
    static struct scene s;
    make(&s, 6, 1, 0.1, 7);
    link_of(&s, 0, 5)->pair.round_trip_s = 5e-3;
    judge(&s);
    assert_only(&s, MU_PROBE_SLOW_LINK, 0, 5);
    assert_non_null(strstr(s.findings[0].text, "a round trip takes 5 ms"));
    free(s.findings);
}

static void test_slow_products_memory_and_storage_are_named_by_backend(void **state)
{
    (void)state;
    static struct scene s;
    make(&s, 8, 1, 0.05, 11);
    for (uint32_t i = 4; i < 8; i++) {
        snprintf(s.members[i].backend, sizeof s.members[i].backend, "cuda");
        s.members[i].alone.flops[4] *= 300;
        s.members[i].alone.memory_rate *= 100;
        s.members[i].alone.to_host_rate = 5e10;
    }
    judge(&s);
    assert_int_equal(s.count, 0);
    s.members[5].alone.flops[4] *= 0.5;
    s.members[1].alone.memory_rate *= 0.5;
    s.members[6].alone.to_host_rate *= 0.1;
    s.members[0].write_rate *= 0.05;
    judge(&s);
    assert_int_equal(s.count, 4);
    static const uint32_t order[] = {0, 6, 1, 5};
    static const char *const words[] = {"writing to its storage", "copies from its GPU", "memory", "products"};
    for (uint32_t i = 0, at = 0; i < 4; i++) {
        assert_int_equal(s.findings[i].kind, MU_PROBE_SLOW_WORKER);
        for (at = 0; order[at] != s.findings[i].a;)
            at++;
        assert_non_null(strstr(s.findings[i].text, words[at]));
    }
    assert_int_equal(s.findings[0].a, 0);
    free(s.findings);
}

static void test_what_failed_comes_first(void **state)
{
    (void)state;
    static struct scene s;
    make(&s, 4, 1, 0, 1);
    s.members[3].out = true;
    snprintf(s.members[3].text, sizeof s.members[3].text, "its stream ended in round 2 of 3 (stream reset)");
    link_of(&s, 2, 3)->state = MU_PROBE_LINK_UNKNOWN;
    struct mu_probe_link *link = link_of(&s, 0, 1);
    link->state = MU_PROBE_LINK_FAILED;
    snprintf(link->text, sizeof link->text, "not connected within 5 s");
    s.members[1].alone.flops[4] *= 0.5;
    judge(&s);
    assert_int_equal(s.count, 3);
    assert_string_equal(s.findings[0].text,
                        "worker w3 on h3: left out: its stream ended in round 2 of 3 (stream reset)");
    assert_string_equal(s.findings[1].text, "link w0 - w1: not connected within 5 s");
    assert_string_equal(s.findings[2].text, "worker w1 on h1: 100 GFLOP/s of products, 50 % of the usual 200 GFLOP/s");
    free(s.findings);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rounds_of_few_workers_are_all_pairs_once),
        cmocka_unit_test(test_rounds_of_many_workers_grow_with_their_logarithm),
        cmocka_unit_test(test_neighbours_are_mutual_and_ascending),
        cmocka_unit_test(test_nothing_stands_out_among_equals_however_they_scatter),
        cmocka_unit_test(test_one_slow_link_is_named_and_not_its_ends),
        cmocka_unit_test(test_a_worker_slow_on_all_its_links_is_named_and_none_of_them),
        cmocka_unit_test(test_a_slow_worker_and_a_slow_link_elsewhere_are_both_named),
        cmocka_unit_test(test_links_inside_a_host_and_between_hosts_are_not_compared),
        cmocka_unit_test(test_a_long_round_trip_is_named),
        cmocka_unit_test(test_slow_products_memory_and_storage_are_named_by_backend),
        cmocka_unit_test(test_what_failed_comes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
