/* links: mu_plan */
#include "plan/pipeline.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

static void expect_order(uint32_t stages, uint32_t stage, uint32_t micros, const char *order)
{
    for (uint32_t i = 0; i < 2 * micros; i++, order += 2) {
        struct mu_pipeline_op op = mu_pipeline_op_at(stages, stage, micros, i);
        assert_int_equal(op.backward ? 'b' : 'f', order[0]);
        assert_int_equal(op.micro, order[1] - '0');
    }
    assert_int_equal(*order, 0);
}

/* Figure 4 of Narayanan et al. (arXiv 2104.04473): 4 stages, 8 micro-batches. */
static void test_pipeline_order_is_one_forward_one_backward(void **state)
{
    (void)state;
    expect_order(4, 0, 8, "f0f1f2f3b0f4b1f5b2f6b3f7b4b5b6b7");
    expect_order(4, 1, 8, "f0f1f2b0f3b1f4b2f5b3f6b4f7b5b6b7");
    expect_order(4, 2, 8, "f0f1b0f2b1f3b2f4b3f5b4f6b5f7b6b7");
    expect_order(4, 3, 8, "f0b0f1b1f2b2f3b3f4b4f5b5f6b6f7b7");
    expect_order(1, 0, 3, "f0b0f1b1f2b2");
    expect_order(4, 0, 2, "f0f1b0b1");
    expect_order(4, 1, 1, "f0b0");
}

/* What has been done by the stages so far. */
struct progress {
    uint32_t next[64];                  /* operation of each stage */
    uint32_t forward[64], backward[64]; /* micro-batches done */
    uint32_t most_held[64];
};

/* An operation can run when the stage before has done its forward, or the stage after its backward. */
static bool can_run(const struct progress *p, uint32_t stages, uint32_t stage, struct mu_pipeline_op op)
{
    if (!op.backward)
        return stage == 0 || p->forward[stage - 1] > op.micro;
    return p->forward[stage] > op.micro && (stage + 1 == stages || p->backward[stage + 1] > op.micro);
}

static void run_one(struct progress *p, uint32_t stage, struct mu_pipeline_op op)
{
    uint32_t *done = op.backward ? p->backward : p->forward;
    assert_int_equal(op.micro, done[stage]); /* ascending: gradients of a leaf are a chain in this order */
    done[stage]++;
    uint32_t held = p->forward[stage] - p->backward[stage];
    p->most_held[stage] = held > p->most_held[stage] ? held : p->most_held[stage];
    p->next[stage]++;
}

static void test_pipeline_every_order_runs_to_the_end(void **state)
{
    (void)state;
    for (uint32_t stages = 1; stages <= 20; stages++)
        for (uint32_t micros = 1; micros <= 33; micros++) {
            struct progress p = {0};
            for (uint32_t left = 2 * stages * micros; left > 0;) {
                uint32_t ran = 0;
                for (uint32_t stage = 0; stage < stages; stage++) {
                    if (p.next[stage] == 2 * micros)
                        continue;
                    struct mu_pipeline_op op = mu_pipeline_op_at(stages, stage, micros, p.next[stage]);
                    if (!can_run(&p, stages, stage, op))
                        continue;
                    run_one(&p, stage, op);
                    ran++;
                }
                assert_true(ran > 0); /* else a deadlock */
                left -= ran;
            }
            for (uint32_t stage = 0; stage < stages; stage++) {
                assert_int_equal(p.forward[stage], micros);
                assert_int_equal(p.backward[stage], micros);
                uint32_t slots = mu_pipeline_slots(stages, stage, micros);
                assert_int_equal(p.most_held[stage], slots);
                assert_int_equal(slots, stages - stage < micros ? stages - stage : micros);
            }
        }
}

/* Unit times: the whole takes m + p - 1 slots of one forward and one backward, the bubble of the paper. */
static void test_pipeline_bubble_is_stages_minus_one(void **state)
{
    (void)state;
    enum { STAGES = 5, MICROS = 12 };
    uint64_t forward_end[STAGES][MICROS], backward_end[STAGES][MICROS], free_at[STAGES] = {0};
    struct progress p = {0};
    uint64_t end = 0;
    for (uint32_t left = 2 * STAGES * MICROS; left > 0;) {
        for (uint32_t stage = 0; stage < STAGES; stage++) {
            if (p.next[stage] == 2 * MICROS)
                continue;
            struct mu_pipeline_op op = mu_pipeline_op_at(STAGES, stage, MICROS, p.next[stage]);
            if (!can_run(&p, STAGES, stage, op))
                continue;
            uint64_t ready = op.backward ? (stage + 1 < STAGES ? backward_end[stage + 1][op.micro] : 0)
                                         : (stage > 0 ? forward_end[stage - 1][op.micro] : 0);
            uint64_t start = ready > free_at[stage] ? ready : free_at[stage];
            free_at[stage] = start + (op.backward ? 2 : 1);
            (op.backward ? backward_end : forward_end)[stage][op.micro] = free_at[stage];
            end = free_at[stage] > end ? free_at[stage] : end;
            run_one(&p, stage, op);
            left--;
        }
    }
    assert_int_equal(end, 3 * (MICROS + STAGES - 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pipeline_order_is_one_forward_one_backward),
        cmocka_unit_test(test_pipeline_every_order_runs_to_the_end),
        cmocka_unit_test(test_pipeline_bubble_is_stages_minus_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
