/* links: mu_plan */
#include "plan/buddies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/rng.h"

enum { RANKS_MAX = 96 };

static uint64_t seed = 20;

static uint32_t below(uint32_t count)
{
    return (uint32_t)(mu_splitmix64(&seed) % count);
}

struct cluster {
    struct mu_layout layout;
    uint32_t hosts[RANKS_MAX], domains[RANKS_MAX];
    bool is_free[RANKS_MAX];
    uint32_t order[RANKS_MAX];
    uint32_t apart, far; /* by the order and the shift that were chosen */
};

static void place(struct cluster *c)
{
    uint32_t working = mu_layout_working(&c->layout), seen[RANKS_MAX] = {0};
    assert_int_equal(mu_buddies_place(&c->layout, c->hosts, c->domains, c->is_free, c->order), MU_OK);
    c->apart = c->far = 0;
    for (uint32_t rank = 0; rank < working; rank++) {
        assert_true(c->order[rank] < working && seen[c->order[rank]]++ == 0);
        if (!c->is_free[rank])
            assert_int_equal(c->order[rank], rank);
        uint32_t buddy = mu_layout_buddy(&c->layout, rank);
        if (buddy == MU_LAYOUT_NOBODY)
            continue;
        c->apart += c->hosts[c->order[rank]] != c->hosts[c->order[buddy]];
        c->far += c->domains[c->order[rank]] != c->domains[c->order[buddy]];
    }
}

/* Tensor groups on hosts of several, in any order: `most` replicas of a stage on one host. */
static void random_cluster(struct cluster *c, uint32_t tp, uint32_t pp, uint32_t dp)
{
    memset(c, 0, sizeof *c);
    c->layout = (struct mu_layout){.tp = tp, .pp = pp, .dp = dp, .sharded = true, .stage_first = {0}};
    for (uint32_t p = 1; p <= pp; p++)
        c->layout.stage_first[p] = (uint16_t)p;
    uint32_t host_count = 2 + below(dp), per_switch = 1 + below(3);
    for (uint32_t unit = 0; unit < dp * pp; unit++) {
        uint32_t host = below(host_count);
        for (uint32_t t = 0; t < tp; t++) {
            c->hosts[unit * tp + t] = host;
            c->domains[unit * tp + t] = host / per_switch;
            c->is_free[unit * tp + t] = true;
        }
    }
}

/* Replicas of a stage on the host that has most of them, over all stages. */
static uint32_t largest_host(const struct cluster *c)
{
    uint32_t most = 0;
    for (uint32_t p = 0; p < c->layout.pp; p++) {
        uint32_t counts[RANKS_MAX] = {0};
        for (uint32_t d = 0; d < c->layout.dp; d++) {
            uint32_t count = ++counts[c->hosts[(p * c->layout.dp + d) * c->layout.tp]];
            most = count > most ? count : most;
        }
    }
    return most;
}

/* An order in which all are apart exists when no host has more than half of a stage's replicas: then it is found,
 * however they stand. With one stage, and one host that has more, as few as possible share it. */
static void test_buddies_are_apart_wherever_any_order_puts_them_apart(void **state)
{
    (void)state;
    uint32_t possible = 0, moved = 0, hopeless = 0;
    for (uint32_t round = 0; round < 3000; round++) {
        struct cluster c;
        random_cluster(&c, 1 + below(2), 1 + below(3), 2 + below(11));
        uint32_t working = mu_layout_working(&c.layout), dp = c.layout.dp, most = largest_host(&c), given = 0;
        (void)mu_layout_buddy_shift(&c.layout, c.hosts, c.domains, &given);
        place(&c);
        assert_true(c.apart >= given);
        if (2 * most <= dp) {
            assert_int_equal(c.apart, working);
            possible++;
            moved += given < working;
        } else if (c.layout.pp == 1) { /* the others can part as many as they are, on either side */
            assert_int_equal(c.apart, 2 * (dp - most) * c.layout.tp);
            hopeless++;
        }
    }
    assert_true(possible > 500 && moved > 100 && hopeless > 100);
}

/* Of the orders that part all hosts, the one that was given and the one by switch and host: the better one counts. */
static void test_buddies_share_no_more_switches_than_in_the_orders_looked_at(void **state)
{
    (void)state;
    uint32_t better = 0;
    for (uint32_t round = 0; round < 2000; round++) {
        struct cluster c;
        random_cluster(&c, 1, 1, 4 + below(9));
        uint32_t working = c.layout.dp, apart = 0, far = 0;
        c.layout.buddy_shift = mu_layout_buddy_shift(&c.layout, c.hosts, c.domains, &apart);
        for (uint32_t rank = 0; rank < working; rank++)
            far += c.domains[rank] != c.domains[mu_layout_buddy(&c.layout, rank)];
        place(&c);
        assert_true(c.apart > apart || (c.apart == apart && c.far >= far));
        better += c.far > far;
        uint32_t largest = 0;
        for (uint32_t domain = 0; domain < RANKS_MAX; domain++) {
            uint32_t count = 0;
            for (uint32_t rank = 0; rank < working; rank++)
                count += c.domains[rank] == domain;
            largest = count > largest ? count : largest;
        }
        if (2 * largest <= working) /* blocks of switches: what holds for hosts holds for them */
            assert_int_equal(c.far, working);
    }
    assert_true(better > 100);
}

/* Who holds something stays where it is, the others stand as well as that allows; with nobody free nothing moves. */
static void test_buddies_who_hold_something_stay(void **state)
{
    (void)state;
    uint32_t helped = 0;
    for (uint32_t round = 0; round < 1000; round++) {
        struct cluster c;
        random_cluster(&c, 1 + below(2), 1 + below(2), 2 + below(9));
        uint32_t given = 0, working = mu_layout_working(&c.layout);
        for (uint32_t rank = 0; rank < working; rank++)
            c.is_free[rank] = round % 4 && below(2);
        (void)mu_layout_buddy_shift(&c.layout, c.hosts, c.domains, &given);
        place(&c); /* checks that they stay */
        assert_true(c.apart >= given);
        helped += c.apart > given;
    }
    assert_true(helped > 50);
}

/* One replica of everything: whole stages change places. Without buddies, or with one host, nothing does. */
static void test_buddies_of_one_replica_and_of_one_host(void **state)
{
    (void)state;
    struct cluster c = {.layout = {.tp = 1, .pp = 6, .dp = 1, .stage_first = {0, 1, 2, 3, 4, 5, 6}}};
    static const uint32_t hosts[6] = {1, 2, 2, 1, 2, 1};
    memcpy(c.hosts, hosts, sizeof hosts);
    memset(c.is_free, true, sizeof c.is_free);
    place(&c);
    assert_int_equal(c.apart, 6);
    c = (struct cluster){.layout = {.tp = 2, .pp = 1, .dp = 4, .sharded = true, .stage_first = {0, 6}}};
    memset(c.is_free, true, sizeof c.is_free);
    place(&c);
    for (uint32_t rank = 0; rank < 8; rank++)
        assert_int_equal(c.order[rank], rank);
    assert_int_equal(c.layout.buddy_shift, 1);
    c.layout.sharded = false;
    place(&c);
    assert_int_equal(c.layout.buddy_shift, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buddies_are_apart_wherever_any_order_puts_them_apart),
        cmocka_unit_test(test_buddies_share_no_more_switches_than_in_the_orders_looked_at),
        cmocka_unit_test(test_buddies_who_hold_something_stay),
        cmocka_unit_test(test_buddies_of_one_replica_and_of_one_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
