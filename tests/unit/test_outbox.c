/* links: mu_coordinator */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "coordinator/outbox.h"
#include "coordinator/records.h"

/* A store whose writes wait until they are let through, or fail. */
struct gate {
    struct mu_store store;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    unsigned allowed, written, waiting;
    size_t ops;
    enum mu_status result;
};

static enum mu_status gate_write(struct mu_store *store, const struct mu_store_batch *batch, struct mu_error *err)
{
    struct gate *gate = (struct gate *)store;
    pthread_mutex_lock(&gate->lock);
    gate->waiting++;
    pthread_cond_broadcast(&gate->moved);
    while (gate->written >= gate->allowed)
        pthread_cond_wait(&gate->moved, &gate->lock);
    enum mu_status status = gate->result;
    gate->written++;
    gate->waiting--;
    gate->ops += batch->op_count;
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->lock);
    return status ? mu_fail(err, status, "the disk is gone") : MU_OK;
}

static const struct mu_store_ops gate_ops = {.name = "gate", .write = gate_write};

struct fixture {
    struct gate gate;
    struct mu_outbox *outbox;
    struct mu_wire_arena arena;
    pthread_mutex_t lock; /* guards wakes */
    pthread_cond_t woken;
    unsigned wakes;
    char ran[64]; /* letters of the items that ran */
    unsigned ran_count, dropped_count;
};

static void wake(void *arg)
{
    struct fixture *f = arg;
    pthread_mutex_lock(&f->lock);
    f->wakes++;
    pthread_cond_broadcast(&f->woken);
    pthread_mutex_unlock(&f->lock);
}

static void set_up(struct fixture *f)
{
    struct mu_error err;
    memset(f, 0, sizeof *f);
    f->gate.store.ops = &gate_ops;
    pthread_mutex_init(&f->gate.lock, NULL);
    pthread_cond_init(&f->gate.moved, NULL);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->woken, NULL);
    mu_wire_arena_init(&f->arena);
    assert_int_equal(mu_outbox_new(&f->gate.store, wake, f, f, &f->outbox, &err), MU_OK);
}

static void allow(struct fixture *f, unsigned writes, enum mu_status result)
{
    pthread_mutex_lock(&f->gate.lock);
    f->gate.allowed += writes;
    f->gate.result = result;
    pthread_cond_broadcast(&f->gate.moved);
    pthread_mutex_unlock(&f->gate.lock);
}

/* Until the storage thread stands in a write. */
static void await_writing(struct fixture *f)
{
    pthread_mutex_lock(&f->gate.lock);
    while (f->gate.waiting == 0)
        pthread_cond_wait(&f->gate.moved, &f->gate.lock);
    pthread_mutex_unlock(&f->gate.lock);
}

static void await_wakes(struct fixture *f, unsigned count)
{
    pthread_mutex_lock(&f->lock);
    while (f->wakes < count)
        pthread_cond_wait(&f->woken, &f->lock);
    pthread_mutex_unlock(&f->lock);
}

static void tear_down(struct fixture *f)
{
    allow(f, 1000, f->gate.result);
    mu_outbox_free(f->outbox);
    mu_wire_arena_fini(&f->arena);
    pthread_mutex_destroy(&f->gate.lock);
    pthread_cond_destroy(&f->gate.moved);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->woken);
}

struct letter {
    struct mu_outbox_item item;
    char letter;
};

static void run_letter(void *ctx, struct mu_outbox_item *item, bool drop)
{
    struct fixture *f = ctx;
    if (drop)
        f->dropped_count++;
    else
        f->ran[f->ran_count++] = ((struct letter *)item)->letter;
    free(item);
}

static void hold(struct fixture *f, char letter)
{
    struct letter *item = calloc(1, sizeof *item);
    item->letter = letter;
    mu_outbox_hold(f->outbox, &item->item, run_letter);
}

static void hold_answer(struct fixture *f, char letter)
{
    struct letter *item = calloc(1, sizeof *item);
    item->letter = letter;
    mu_outbox_hold_answer(f->outbox, &item->item, run_letter);
}

static void persist(struct fixture *f, const char *worker)
{
    struct mu_error err;
    struct mu_worker_record record = {.draining = true};
    strcpy(record.name, worker);
    assert_int_equal(
        mu_outbox_persist(f->outbox, &f->arena, &(struct mu_record){.kind = MU_RECORD_WORKER, .worker = &record}, &err),
        MU_OK);
}

static void end_turn(struct fixture *f)
{
    struct mu_error err;
    assert_int_equal(mu_outbox_end_turn(f->outbox, &err), MU_OK);
}

static void test_what_rests_on_nothing_goes_at_once(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    hold(&f, 'a');
    hold(&f, 'b');
    assert_int_equal(mu_outbox_release(f.outbox), 2);
    assert_string_equal(f.ran, "ab");
    assert_true(mu_outbox_idle(f.outbox));
    tear_down(&f);
}

static void test_nothing_goes_before_what_was_persisted_before_it_is_durable(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    hold(&f, 'a');
    persist(&f, "w1");
    hold(&f, 'b');
    hold(&f, 'c');
    assert_int_equal(mu_outbox_release(f.outbox), 1); /* only what came before */
    end_turn(&f);
    await_writing(&f);
    assert_int_equal(mu_outbox_release(f.outbox), 0); /* written is not durable */
    hold(&f, 'd');                                    /* rests on nothing new, but keeps its place */
    assert_int_equal(mu_outbox_release(f.outbox), 0);
    assert_false(mu_outbox_idle(f.outbox));
    allow(&f, 1, MU_OK);
    await_wakes(&f, 1);
    assert_int_equal(mu_outbox_release(f.outbox), 3);
    assert_string_equal(f.ran, "abcd");
    assert_true(mu_outbox_idle(f.outbox));
    tear_down(&f);
}

static void test_turns_become_durable_in_order(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    persist(&f, "w1");
    hold(&f, 'a');
    end_turn(&f);
    await_writing(&f);
    persist(&f, "w2");
    hold(&f, 'b');
    end_turn(&f);
    persist(&f, "w3");
    hold(&f, 'c');
    allow(&f, 1, MU_OK);
    await_wakes(&f, 1);
    assert_int_equal(mu_outbox_release(f.outbox), 1);
    end_turn(&f); /* 'c' was not even submitted */
    allow(&f, 2, MU_OK);
    await_wakes(&f, 2);
    while (!mu_outbox_idle(f.outbox)) {
        mu_outbox_release(f.outbox);
    }
    assert_string_equal(f.ran, "abc");
    assert_int_equal(f.gate.ops, 3);
    tear_down(&f);
}

static void test_turns_merge_while_the_disk_is_behind(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    for (int i = 0; i < 3 * MU_OUTBOX_BATCHES_MAX; i++) {
        persist(&f, "w1");
        end_turn(&f);
        mu_wire_arena_reset(&f.arena);
    }
    hold(&f, 'z');
    allow(&f, 10, MU_OK);
    while (!mu_outbox_idle(f.outbox)) {
        mu_outbox_release(f.outbox);
        end_turn(&f);
    }
    assert_int_equal(f.gate.ops, 3 * MU_OUTBOX_BATCHES_MAX);
    assert_true(f.gate.written <= 10);
    assert_string_equal(f.ran, "z");
    tear_down(&f);
}

static void test_after_a_failed_write_nothing_goes_any_more(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err;
    set_up(&f);
    persist(&f, "w1");
    hold(&f, 'a');
    end_turn(&f);
    assert_int_equal(mu_outbox_failure(f.outbox, &err), MU_OK);
    allow(&f, 1, MU_ERR_IO);
    await_wakes(&f, 1);
    assert_int_equal(mu_outbox_failure(f.outbox, &err), MU_ERR_IO);
    assert_string_equal(err.text, "the disk is gone");
    hold(&f, 'b');
    assert_int_equal(mu_outbox_release(f.outbox), 0);
    assert_int_equal(mu_outbox_held(f.outbox), 2);
    tear_down(&f);
    assert_int_equal(f.ran_count, 0);
    assert_int_equal(f.dropped_count, 2);
}

static void test_answers_pass_while_the_disk_is_full(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    persist(&f, "w1");
    hold(&f, 'a');
    hold_answer(&f, '1');
    hold(&f, 'b');
    hold_answer(&f, '2');
    end_turn(&f);
    allow(&f, 1, MU_ERR_NO_SPACE); /* the storage thread keeps trying */
    await_wakes(&f, 1);
    assert_int_equal(mu_outbox_release(f.outbox), 2);
    assert_string_equal(f.ran, "12");
    hold_answer(&f, '3');
    assert_int_equal(mu_outbox_release(f.outbox), 1);
    hold(&f, 'c'); /* the end of the line is where it was */
    allow(&f, 1, MU_OK);
    while (!mu_outbox_idle(f.outbox))
        mu_outbox_release(f.outbox);
    assert_string_equal(f.ran, "123abc");
    tear_down(&f);
}

/* A disk that stays full while the cluster churns costs a bounded amount of memory, and then the process, which says
 * why. */
static void test_too_much_that_waits_is_a_failure(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err;
    set_up(&f);
    assert_int_equal(mu_outbox_put(f.outbox, "k", 1, "v", 1, &err), MU_OK);
    for (int i = 0; i < MU_OUTBOX_HELD_MAX - 1; i++)
        hold(&f, 'x');
    assert_int_equal(mu_outbox_failure(f.outbox, &err), MU_OK);
    for (int i = 0; i < 3; i++) /* the turn in which it happens goes on to its end */
        hold(&f, 'x');
    assert_int_equal(mu_outbox_failure(f.outbox, &err), MU_ERR_LIMIT);
    assert_non_null(strstr(err.text, "1048576 messages wait for the store"));
    assert_int_equal(mu_outbox_release(f.outbox), 0);
    tear_down(&f);
    assert_int_equal(f.dropped_count, MU_OUTBOX_HELD_MAX + 2);
}

static void test_item_may_hold_another_while_it_runs(void **state)
{
    (void)state;
    struct fixture f;
    set_up(&f);
    for (int i = 0; i < 3; i++) {
        hold(&f, 'x');
        assert_int_equal(mu_outbox_release(f.outbox), 1);
    }
    hold(&f, 'y');
    assert_int_equal(mu_outbox_held(f.outbox), 1);
    assert_int_equal(mu_outbox_release(f.outbox), 1);
    assert_string_equal(f.ran, "xxxy");
    tear_down(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_rests_on_nothing_goes_at_once),
        cmocka_unit_test(test_nothing_goes_before_what_was_persisted_before_it_is_durable),
        cmocka_unit_test(test_turns_become_durable_in_order),
        cmocka_unit_test(test_turns_merge_while_the_disk_is_behind),
        cmocka_unit_test(test_after_a_failed_write_nothing_goes_any_more),
        cmocka_unit_test(test_answers_pass_while_the_disk_is_full),
        cmocka_unit_test(test_too_much_that_waits_is_a_failure),
        cmocka_unit_test(test_item_may_hold_another_while_it_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
