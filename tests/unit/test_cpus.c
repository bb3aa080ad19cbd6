/* links: mu_supervisor */
/* Shares of the processors: disjoint, complete, near each other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "worker/cpus.h"

enum { CPUS_MAX = 37, SLOTS_MAX = 41 };

/* Numbered as Linux does it: siblings of a core are far apart. */
static uint32_t fill(struct mu_cpu cpus[CPUS_MAX], uint32_t count, uint32_t nodes)
{
    for (uint32_t i = 0; i < count; i++)
        cpus[i] = (struct mu_cpu){.cpu = (i / 2 + i % 2 * 18) * 3, .core = i / 2, .node = i * nodes / count};
    return count;
}

static void test_shares_are_disjoint_complete_and_even(void **state)
{
    (void)state;
    struct mu_cpu cpus[CPUS_MAX];
    for (uint32_t count = 1; count <= CPUS_MAX - 1; count++) {
        fill(cpus, count, 1);
        for (uint32_t slots = 1; slots <= count; slots++) {
            cpu_set_t all, share, common;
            CPU_ZERO(&all);
            for (uint32_t slot = 0; slot < slots; slot++) {
                mu_cpus_share(cpus, count, slots, slot, &share);
                uint32_t size = (uint32_t)CPU_COUNT(&share);
                assert_true(size == count / slots || size == (count + slots - 1) / slots);
                CPU_AND(&common, &all, &share);
                assert_int_equal(CPU_COUNT(&common), 0);
                CPU_OR(&all, &all, &share);
            }
            assert_int_equal(CPU_COUNT(&all), count);
        }
    }
}

static void test_more_slots_than_processors_share_them(void **state)
{
    (void)state;
    struct mu_cpu cpus[CPUS_MAX];
    cpu_set_t share, all;
    fill(cpus, 3, 1);
    CPU_ZERO(&all);
    for (uint32_t slot = 0; slot < SLOTS_MAX; slot++) {
        mu_cpus_share(cpus, 3, SLOTS_MAX, slot, &share);
        assert_int_equal(CPU_COUNT(&share), 1);
        CPU_OR(&all, &all, &share);
    }
    assert_int_equal(CPU_COUNT(&all), 3);
    mu_cpus_share(cpus, 0, 4, 3, &share);
    assert_int_equal(CPU_COUNT(&share), 0);
}

static void test_siblings_stay_together(void **state)
{
    (void)state;
    struct mu_cpu cpus[CPUS_MAX];
    cpu_set_t share;
    fill(cpus, 16, 2);
    assert_int_equal(mu_cpus_nodes(cpus, 16), 2);
    for (uint32_t slot = 0; slot < 4; slot++) {
        mu_cpus_share(cpus, 16, 4, slot, &share);
        for (uint32_t i = slot * 4; i < slot * 4 + 4; i++)
            assert_true(CPU_ISSET(cpus[i].cpu, &share));
    }
    assert_int_equal(mu_cpus_nodes(cpus, 0), 0);
}

static void test_this_machine_is_read_in_order(void **state)
{
    (void)state;
    static struct mu_cpu cpus[CPU_SETSIZE];
    cpu_set_t mask, read;
    uint32_t count = mu_cpus_read(cpus);
    CPU_ZERO(&read);
    assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
    for (uint32_t i = 0; i < count; i++) {
        CPU_SET(cpus[i].cpu, &read);
        assert_true(i == 0 || cpus[i - 1].node <= cpus[i].node);
    }
    assert_true(CPU_EQUAL(&mask, &read));
    assert_true(mu_cpus_nodes(cpus, count) >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares_are_disjoint_complete_and_even),
        cmocka_unit_test(test_more_slots_than_processors_share_them),
        cmocka_unit_test(test_siblings_stay_together),
        cmocka_unit_test(test_this_machine_is_read_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
