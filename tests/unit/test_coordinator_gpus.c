/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* Workers on GPUs: each has one of its own, and those of a job exchange by one version of NCCL. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core_testing.h"

static void begin(struct box *box)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    box_init(box, &spec);
    box->nccl_version = 22809;
    box->gpu = "GPU-a";
    box_add_worker(box, 0);
    box_settle(box);
    box_advance(box, 300);
    assert_true(box_train(box, 4));
}

static void add(struct box *box, uint32_t index, const char *gpu, uint32_t nccl_version)
{
    box->reject.seen = false;
    box->gpu = gpu;
    box->nccl_version = nccl_version;
    box_add_worker(box, index);
    box_settle(box);
}

static void test_a_gpu_is_one_workers_until_that_is_lost(void **state)
{
    (void)state;
    static struct box box;
    begin(&box);
    add(&box, 1, "GPU-a", 22809);
    assert_true(box.reject.seen);
    assert_int_equal(box.reject.reason, MU_REJECT_BUSY); /* who had it may be gone soon */
    assert_non_null(strstr(box.reject.text, "GPU-a of host1 is in use by the live worker w0"));
    assert_int_equal(box_view(&box).attached, 1);
    box_kill_worker(&box, 1);
    add(&box, 2, "GPU-b", 22809);
    assert_false(box.reject.seen);
    box_advance(&box, 300);
    assert_int_equal(box_view(&box).attached, 2);
    box_kill_worker(&box, 0);
    box_advance(&box, 20000); /* until it is lost, and the generation that it belonged to is replaced */
    add(&box, 3, "GPU-a", 22809);
    assert_false(box.reject.seen);
    box_fini(&box);
}

static void test_a_restarted_coordinator_knows_again_whose_gpu_it_is(void **state)
{
    (void)state;
    static struct box box;
    begin(&box);
    box_kill_coord(&box);
    box_start_coord(&box);
    box_advance(&box, 5000); /* w0 attaches again */
    assert_int_equal(box_view(&box).attached, 1);
    add(&box, 1, "GPU-a", 22809);
    assert_true(box.reject.seen && box.reject.reason == MU_REJECT_BUSY);
    box_fini(&box);
}

static void test_another_version_of_nccl_is_refused_for_good(void **state)
{
    (void)state;
    static struct box box;
    begin(&box);
    add(&box, 1, "GPU-b", 22707);
    assert_true(box.reject.seen);
    assert_int_equal(box.reject.reason, MU_REJECT_IDENTITY);
    assert_non_null(strstr(box.reject.text, "has NCCL 2.27.7, but w0 on host0 has 2.28.9"));
    assert_int_equal(box_view(&box).attached, 1);
    add(&box, 2, NULL, 0); /* on the CPU: then all go over sockets */
    assert_false(box.reject.seen);
    add(&box, 3, "GPU-c", 22809);
    assert_false(box.reject.seen);
    box_fini(&box);
}

static void test_a_job_in_bf16_is_for_those_who_compute_in_it(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.compute = MU_COMPUTE_BF16;
    box_init(&box, &spec);
    for (uint32_t i = 0; i < 2; i++) { /* the second time it is no news */
        add(&box, 0, NULL, 0);
        assert_true(box.reject.seen && box.reject.reason == MU_REJECT_IDENTITY);
        assert_non_null(strstr(box.reject.text, "is in bf16, which the device of worker 'w0' on host0 (cpu) cannot"));
        assert_int_equal(box_view(&box).attached, 0);
        assert_int_equal(box_said(&box, "worker_refused: compute: job"), i == 0);
        box.events[0] = 0;
    }
    box.computes_bf16 = true;
    add(&box, 1, "GPU-a", 22809);
    assert_false(box.reject.seen);
    box_advance(&box, 300);
    assert_true(box_train(&box, 4));
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_job_in_bf16_is_for_those_who_compute_in_it),
        cmocka_unit_test(test_a_gpu_is_one_workers_until_that_is_lost),
        cmocka_unit_test(test_a_restarted_coordinator_knows_again_whose_gpu_it_is),
        cmocka_unit_test(test_another_version_of_nccl_is_refused_for_good),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
