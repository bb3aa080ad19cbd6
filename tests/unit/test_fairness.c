/* links: mu_plan */
#include "plan/fairness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

#include "common/rng.h"

enum { FLOWS_MAX = 24, LINKS_MAX = 10, CROSSINGS_MAX = FLOWS_MAX * LINKS_MAX };

struct net {
    double capacities[LINKS_MAX];
    struct mu_fair_flow flows[FLOWS_MAX];
    uint32_t links[CROSSINGS_MAX], link_count, flow_count;
};

static double uniform(uint64_t *random)
{
    return (double)(mu_splitmix64(random) >> 11) * 0x1p-53;
}

static struct net random_net(uint64_t seed)
{
    struct net n = {.link_count = 1 + (uint32_t)(seed % LINKS_MAX), .flow_count = 1 + (uint32_t)(seed / 7 % FLOWS_MAX)};
    uint64_t random = seed;
    uint32_t crossings = 0;
    for (uint32_t i = 0; i < n.link_count; i++)
        n.capacities[i] = 0.1 + 10 * uniform(&random);
    for (uint32_t i = 0; i < n.flow_count; i++) {
        n.flows[i] = (struct mu_fair_flow){crossings, 0, 0.5 + (double)(mu_splitmix64(&random) % 4),
                                           0.2 + (seed % 3 ? 5 : 100) * uniform(&random)};
        for (uint32_t k = 0; k < n.link_count; k++)
            if (mu_splitmix64(&random) % 3 == 0) {
                n.links[crossings++] = k;
                n.flows[i].link_count++;
            }
    }
    return n;
}

static bool crosses(const struct net *n, uint32_t flow, uint32_t link)
{
    for (uint32_t i = 0; i < n->flows[flow].link_count; i++)
        if (n->links[n->flows[flow].first_link + i] == link)
            return true;
    return false;
}

/* ---- another solver: by the definition, with bisection ---- */

/* Fixed flows at their rate, the others at `level`: does it fit? `one`: this flow gets `more` instead. */
static bool feasible(const struct net *n, const bool *fixed, const double *rates, double level, uint32_t one,
                     double more)
{
    for (uint32_t link = 0; link < n->link_count; link++) {
        double load = 0;
        for (uint32_t i = 0; i < n->flow_count; i++)
            if (crosses(n, i, link))
                load += i == one ? more : fixed[i] ? rates[i] : level * n->flows[i].weight;
        if (load > n->capacities[link] * (1 + 1e-12))
            return false;
    }
    for (uint32_t i = 0; i < n->flow_count; i++)
        if (!fixed[i] && (i == one ? more : level * n->flows[i].weight) > n->flows[i].most * (1 + 1e-12))
            return false;
    return true;
}

/* The highest level that all flows which are not fixed can have together; those that alone cannot have more are fixed
 * there; again. */
static void solve_exactly(const struct net *n, double *rates)
{
    bool fixed[FLOWS_MAX] = {false};
    for (uint32_t left = n->flow_count; left > 0;) {
        double low = 0, high = 1e6;
        for (int i = 0; i < 200; i++) {
            double middle = (low + high) / 2;
            *(feasible(n, fixed, rates, middle, UINT32_MAX, 0) ? &low : &high) = middle;
        }
        bool stuck[FLOWS_MAX];
        for (uint32_t i = 0; i < n->flow_count; i++) {
            double here = low * n->flows[i].weight;
            stuck[i] = !fixed[i] && !feasible(n, fixed, rates, low * (1 - 1e-9), i, here * (1 + 1e-6));
        }
        for (uint32_t i = 0; i < n->flow_count; i++)
            if (stuck[i]) {
                fixed[i] = true;
                rates[i] = low * n->flows[i].weight;
                left--;
            }
    }
}

static void test_fair_rates_are_those_of_an_exact_solver(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        struct net n = random_net(seed);
        double rates[FLOWS_MAX], exact[FLOWS_MAX];
        assert_int_equal(mu_fair_rates(n.capacities, n.link_count, n.flows, n.flow_count, n.links, rates), MU_OK);
        solve_exactly(&n, exact);
        for (uint32_t i = 0; i < n.flow_count; i++)
            if (!(rates[i] > 0.99 * exact[i] && rates[i] < 1.01 * exact[i]))
                fail_msg("seed %u flow %u: %g, exactly %g", (unsigned)seed, i, rates[i], exact[i]);
    }
}

/* Every flow has what it can use, or crosses a full link on which nobody has more for his weight: that is max-min. */
static void test_every_flow_has_a_bottleneck(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        struct net n = random_net(seed);
        double rates[FLOWS_MAX], loads[LINKS_MAX] = {0}, highest[LINKS_MAX] = {0};
        assert_int_equal(mu_fair_rates(n.capacities, n.link_count, n.flows, n.flow_count, n.links, rates), MU_OK);
        for (uint32_t i = 0; i < n.flow_count; i++)
            for (uint32_t k = 0; k < n.flows[i].link_count; k++) {
                uint32_t link = n.links[n.flows[i].first_link + k];
                double level = rates[i] / n.flows[i].weight;
                loads[link] += rates[i];
                highest[link] = level > highest[link] ? level : highest[link];
            }
        for (uint32_t i = 0; i < n.link_count; i++)
            assert_true(loads[i] <= n.capacities[i] * (1 + 1e-9)); /* never above the link */
        for (uint32_t i = 0; i < n.flow_count; i++) {
            bool held = rates[i] >= n.flows[i].most * (1 - 1e-9);
            for (uint32_t k = 0; k < n.flows[i].link_count && !held; k++) {
                uint32_t link = n.links[n.flows[i].first_link + k];
                held = loads[link] >= n.capacities[link] * (1 - 1e-9) &&
                       rates[i] / n.flows[i].weight >= highest[link] * (1 - 1e-9);
            }
            assert_true(held);
        }
    }
}

/* The classic example: link 0 (capacity 1) shared by A and B, link 1 (capacity 2) by A and C. */
static void test_a_flow_that_is_held_elsewhere_leaves_room(void **state)
{
    (void)state;
    const double capacities[] = {1, 2};
    const uint32_t links[] = {0, 1, 0, 1};
    const struct mu_fair_flow flows[] = {{0, 2, 1, 9}, {2, 1, 1, 9}, {3, 1, 1, 9}};
    double rates[3];
    assert_int_equal(mu_fair_rates(capacities, 2, flows, 3, links, rates), MU_OK);
    assert_true(rates[0] == 0.5 && rates[1] == 0.5 && rates[2] == 1.5);
    assert_int_equal(mu_fair_rates(capacities, 2, flows, 0, links, rates), MU_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fair_rates_are_those_of_an_exact_solver),
        cmocka_unit_test(test_every_flow_has_a_bottleneck),
        cmocka_unit_test(test_a_flow_that_is_held_elsewhere_leaves_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
