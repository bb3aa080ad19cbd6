/* links: mu_model mu_test_kernels */
#include "worker/model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/fmath.h"
#include "common/rng.h"
#include "tests/lib/kernel_testing.h"

enum { MICRO = 2, LENGTH = 20, ACCUMULATE = 3, TOKENS = MICRO * LENGTH, CELLS_MAX = 16 };

static const struct mu_model_config small = {
    .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 24, .context = 32, .vocab = 61};

/* One leaf of ACCUMULATE micro-batches. */
struct leaf {
    struct mu_model_spec spec;
    struct mu_model_options options;
    float *params;
    int32_t *tokens, *targets;
    uint64_t samples[ACCUMULATE * MICRO];
    uint64_t step;
};

static struct leaf leaf_of(float dropout)
{
    struct leaf t = {.options = {.micro = MICRO, .length = LENGTH, .accumulate = ACCUMULATE}, .step = 5};
    struct mu_model_config config = small;
    config.dropout = dropout;
    mu_model_spec_init(&t.spec, &config);
    t.params = kt_alloc((size_t)t.spec.flat_size, sizeof *t.params);
    assert_int_equal(mu_model_init_parameters(&t.spec, kt_pool(0), 1, NULL, 0, t.params), MU_OK);
    uint64_t random = 2;
    for (uint32_t i = 0; i < t.spec.tensor_count; i++) {
        struct mu_tensor tensor = mu_model_tensor(&t.spec, i);
        for (uint64_t j = 0; j < tensor.size; j++)
            t.params[tensor.offset + j] +=
                0.1f * (float)((int64_t)(mu_splitmix64(&random) >> 40) - (1 << 23)) * 0x1p-23f;
    }
    t.tokens = kt_alloc(ACCUMULATE * TOKENS, sizeof *t.tokens);
    t.targets = kt_alloc(ACCUMULATE * TOKENS, sizeof *t.targets);
    for (uint32_t i = 0; i < ACCUMULATE * TOKENS; i++) {
        t.tokens[i] = (int32_t)(mu_splitmix64(&random) % small.vocab);
        t.targets[i] = i % 11 == 5 ? -1 : (int32_t)(mu_splitmix64(&random) % small.vocab);
    }
    for (uint32_t i = 0; i < ACCUMULATE * MICRO; i++)
        t.samples[i] = 1000 + 7 * i;
    return t;
}

static void free_leaf(struct leaf *t)
{
    free(t->params);
    free(t->tokens);
    free(t->targets);
}

static struct mu_micro_batch batch_of(const struct leaf *t, uint32_t index, uint32_t count)
{
    return (struct mu_micro_batch){.tokens = t->tokens + index * TOKENS,
                                   .targets = t->targets + index * TOKENS,
                                   .samples = t->samples + index * MICRO,
                                   .seed = 9,
                                   .step = t->step,
                                   .loss_divisor = ACCUMULATE * TOKENS,
                                   .index = index,
                                   .count = count};
}

static struct mu_model *model_of(const struct leaf *t, struct mu_pool *pool)
{
    struct mu_model *model = NULL;
    struct mu_error err = {0};
    if (mu_model_new(&t->spec, &t->options, pool, &err, &model) != MU_OK)
        fail_msg("%s", err.text);
    return model;
}

/* Gradients of the leaf, then the sum of losses (bits). */
static void run_leaf(void *ctx, struct mu_pool *pool, float *out)
{
    const struct leaf *t = ctx;
    struct mu_model *model = model_of(t, pool);
    double total = 0;
    memset(out, 0, (size_t)t->spec.flat_size * sizeof *out); /* the gaps */
    for (size_t i = 0; i < t->spec.flat_size; i++)
        out[i] = 7.0f; /* index 0 overwrites whatever is there */
    for (uint32_t i = 0; i < t->spec.cell_count; i++) {
        struct mu_cell cell = mu_model_cell(&t->spec, i);
        uint64_t end = i + 1 < t->spec.cell_count ? mu_model_cell(&t->spec, i + 1).offset : t->spec.flat_size;
        for (uint64_t j = cell.offset + cell.size; j < end; j++)
            out[j] = 0.0f;
    }
    for (uint32_t i = 0; i < ACCUMULATE; i++) {
        struct mu_micro_batch batch = batch_of(t, i, ACCUMULATE);
        double loss = 0;
        assert_int_equal(mu_model_forward_backward(model, &batch, t->params, out, &loss), MU_OK);
        total += loss;
    }
    memcpy(out + t->spec.flat_size, &total, sizeof total);
    mu_model_free(model);
}

static void test_leaf_has_the_same_bits_whatever_runs_it(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.0f);
    kt_expect_same_bits("leaf", run_leaf, &t, (size_t)t.spec.flat_size + 2);
    free_leaf(&t);
    t = leaf_of(0.2f);
    kt_expect_same_bits("leaf with dropout", run_leaf, &t, (size_t)t.spec.flat_size + 2);
    free_leaf(&t);
}

/* What jobs without slices have computed since the first version: these numbers must never change. */
static void test_leaf_keeps_its_bits_for_good(void **state)
{
    (void)state;
    const struct {
        float dropout;
        uint64_t hash;
    } known[] = {{0.0f, 0x92db266e772c6d92}, {0.2f, 0xe643e02f1fc7b450}};
    for (enum mu_recompute r = MU_RECOMPUTE_NONE; r <= MU_RECOMPUTE_FULL; r++)
        for (int i = 0; i < 2; i++) {
            struct leaf t = leaf_of(known[i].dropout);
            size_t size = (size_t)t.spec.flat_size + 2;
            float *out = kt_alloc(size, sizeof *out);
            t.options.recompute = r;
            run_leaf(&t, kt_pool(1), out);
            assert_int_equal(mu_xxh3_64(out, size * sizeof *out, 0), known[i].hash);
            free(out);
            free_leaf(&t);
        }
}

static double leaf_loss(struct leaf *t, struct mu_model *model, float *grads)
{
    double total = 0;
    for (uint32_t i = 0; i < ACCUMULATE; i++) {
        struct mu_micro_batch batch = batch_of(t, i, ACCUMULATE);
        double loss = 0;
        assert_int_equal(mu_model_forward_backward(model, &batch, t->params, grads, &loss), MU_OK);
        total += loss;
    }
    return total;
}

/* With dropout too, the gradient is the derivative of the loss along a direction: forward and backward drop the same
 * elements. */
/* numerics: fast: a leaf of more micro-batches than are kept has the same sum in another order, and the same bits as
 * what adds its look-ups as often. */
static void test_long_leaf_is_the_same_sum_in_another_order(void **state)
{
    (void)state;
    for (uint32_t slices = 1; slices <= 2; slices++)
        for (uint32_t accumulate = 1; accumulate < ACCUMULATE; accumulate++) {
            struct leaf t = leaf_of(0.2f);
            struct mu_model_config config = t.spec.config;
            config.slices = slices;
            mu_model_spec_init(&t.spec, &config);
            free(t.params);
            t.params = kt_alloc((size_t)t.spec.flat_size, sizeof *t.params);
            assert_int_equal(mu_model_init_parameters(&t.spec, kt_pool(0), 1, NULL, 0, t.params), MU_OK);
            size_t size = (size_t)t.spec.flat_size + 2;
            float *whole = kt_alloc(size, sizeof *whole), *longer = kt_alloc(size, sizeof *longer),
                  *again = kt_alloc(size, sizeof *again);
            run_leaf(&t, kt_pool(0), whole);
            t.options.accumulate = accumulate;
            run_leaf(&t, kt_pool(0), longer);
            run_leaf(&t, kt_pool(1), again);
            assert_memory_equal(longer, again, size * sizeof *longer);
            double difference = 0, norm = 0;
            for (size_t i = 0; i < t.spec.flat_size; i++) {
                difference += ((double)longer[i] - whole[i]) * ((double)longer[i] - whole[i]);
                norm += (double)whole[i] * whole[i];
            }
            assert_true(norm > 0 && sqrt(difference / norm) < 1e-6);
            assert_memory_equal(longer + t.spec.flat_size, whole + t.spec.flat_size, sizeof(double)); /* the loss */
            free(whole);
            free(longer);
            free(again);
            free_leaf(&t);
        }
}

static void test_gradient_is_the_slope_of_the_loss(void **state)
{
    (void)state;
    const float rates[] = {0.0f, 0.3f};
    for (int r = 0; r < 2; r++) {
        struct leaf t = leaf_of(rates[r]);
        size_t flat = (size_t)t.spec.flat_size;
        struct mu_model *model = model_of(&t, kt_pool(1));
        float *grads = kt_alloc(flat, sizeof *grads), *other = kt_alloc(flat, sizeof *other),
              *saved = kt_copy(t.params, flat);
        leaf_loss(&t, model, grads);
        double square = 0;
        for (size_t i = 0; i < flat; i++)
            square += (double)grads[i] * (double)grads[i];
        const double step = 0.01 / mu_fmath_sqrt(square); /* along the gradient */
        double side[2];
        for (int s = 0; s < 2; s++) {
            for (size_t i = 0; i < flat; i++)
                t.params[i] = (float)((double)saved[i] + (s ? -step : step) * (double)grads[i]);
            side[s] = leaf_loss(&t, model, other) / (ACCUMULATE * TOKENS);
        }
        double slope = (side[0] - side[1]) / (2 * step);
        if (fabs(slope - square) > 2e-3 * square)
            fail_msg("dropout %.1f: slope %.9g, squared gradient %.9g", (double)rates[r], slope, square);
        free(grads);
        free(other);
        free(saved);
        mu_model_free(model);
        free_leaf(&t);
    }
}

static void test_dropout_depends_on_sample_and_step_only(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.3f);
    size_t flat = (size_t)t.spec.flat_size;
    struct mu_model *model = model_of(&t, kt_pool(1));
    float *grads = kt_alloc(flat, sizeof *grads);
    struct mu_micro_batch batch = batch_of(&t, 0, 1);
    double first = 0, again = 0, other = 0;
    assert_int_equal(mu_model_forward_backward(model, &batch, t.params, grads, &first), MU_OK);
    batch.count = ACCUMULATE; /* the same samples elsewhere in a leaf */
    batch.index = 1;
    assert_int_equal(mu_model_forward_backward(model, &batch, t.params, grads, &again), MU_OK);
    assert_true(first == again);
    batch.step++;
    assert_int_equal(mu_model_forward_backward(model, &batch, t.params, grads, &other), MU_OK);
    assert_true(first != other);
    free(grads);
    mu_model_free(model);
    free_leaf(&t);
}

struct cells {
    uint32_t order[CELLS_MAX], count;
    const float *grads;
    uint64_t hash[CELLS_MAX];
    const struct mu_model_spec *spec;
};

static void cell_done(void *ctx, uint32_t cell)
{
    struct cells *c = ctx;
    assert_true(c->count < CELLS_MAX);
    struct mu_cell info = mu_model_cell(c->spec, cell);
    c->order[c->count] = cell;
    c->hash[c->count++] = mu_xxh3_64(c->grads + info.offset, (size_t)info.size * sizeof(float), 0);
}

static void test_cells_are_reported_complete_in_backward_order(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.0f);
    struct mu_model *model = model_of(&t, kt_pool(2));
    float *grads = kt_alloc((size_t)t.spec.flat_size, sizeof *grads);
    struct cells cells = {.grads = grads, .spec = &t.spec};
    for (uint32_t i = 0; i < ACCUMULATE; i++) {
        struct mu_micro_batch batch = batch_of(&t, i, ACCUMULATE);
        double loss;
        batch.cell_done = cell_done;
        batch.hooks_ctx = &cells;
        assert_int_equal(cells.count, 0);
        assert_int_equal(mu_model_forward_backward(model, &batch, t.params, grads, &loss), MU_OK);
    }
    static const char *const names[] = {"F.shared", "L1.0", "L1.shared", "L0.0", "L0.shared", "E.shared", "E.0"};
    assert_int_equal(cells.count, sizeof names / sizeof names[0]);
    for (uint32_t i = 0; i < cells.count; i++) {
        struct mu_cell cell = mu_model_cell(&t.spec, cells.order[i]);
        assert_string_equal(cell.name, names[i]);
        assert_true(cells.hash[i] == mu_xxh3_64(grads + cell.offset, (size_t)cell.size * sizeof(float), 0));
    }
    free(grads);
    mu_model_free(model);
    free_leaf(&t);
}

static void test_evaluation_gives_the_training_loss(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.0f);
    struct mu_model *model = model_of(&t, kt_pool(1)), *forward = NULL;
    struct mu_model_options options = {.micro = MICRO, .length = LENGTH, .forward_only = true};
    assert_int_equal(mu_model_new(&t.spec, &options, kt_pool(0), NULL, &forward), MU_OK);
    assert_true(mu_model_workspace_bytes(&t.spec, &options) < mu_model_workspace_bytes(&t.spec, &t.options));
    float *grads = kt_alloc((size_t)t.spec.flat_size, sizeof *grads);
    struct mu_micro_batch batch = batch_of(&t, 0, 1);
    double training = 0, evaluation = 0, other = 0;
    assert_int_equal(mu_model_forward_backward(model, &batch, t.params, grads, &training), MU_OK);
    assert_int_equal(mu_model_loss(model, &batch, t.params, NULL, NULL, &evaluation), MU_OK);
    assert_int_equal(mu_model_loss(forward, &batch, t.params, NULL, NULL, &other), MU_OK);
    assert_true(training == evaluation && training == other && training > 0);
    free(grads);
    mu_model_free(model);
    mu_model_free(forward);
    free_leaf(&t);
}

/* log-softmax of the last logits must be the loss of a sequence in which only the last target counts. */
static void test_last_logits_agree_with_the_loss(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.0f);
    float logits[61];
    for (uint32_t count = 1; count <= LENGTH; count += 6) {
        struct mu_model *model = NULL;
        struct mu_model_options options = {.micro = 1, .length = LENGTH, .forward_only = true};
        assert_int_equal(mu_model_new(&t.spec, &options, kt_pool(1), NULL, &model), MU_OK);
        assert_int_equal(mu_model_logits_last(model, t.tokens, count, t.params, logits, NULL), MU_OK);
        int32_t targets[LENGTH];
        for (uint32_t i = 0; i < LENGTH; i++)
            targets[i] = i == count - 1 ? 17 : -1;
        struct mu_micro_batch batch = {.tokens = t.tokens, .targets = targets};
        double loss = 0, sum = 0;
        assert_int_equal(mu_model_loss(model, &batch, t.params, NULL, NULL, &loss), MU_OK);
        for (uint32_t i = 0; i < 61; i++)
            sum += exp((double)logits[i]);
        assert_true(fabs(loss - (log(sum) - (double)logits[17])) < 1e-5);
        struct mu_error err = {0};
        assert_int_equal(mu_model_logits_last(model, t.tokens, LENGTH + 1, t.params, logits, &err), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, "1 to 20"));
        mu_model_free(model);
    }
    free_leaf(&t);
}

static void test_cancel_stops_at_once_and_the_leaf_can_be_redone(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.1f);
    size_t flat = (size_t)t.spec.flat_size;
    atomic_bool cancel = true;
    struct mu_model *model = model_of(&t, kt_pool(1));
    float *grads = kt_alloc(flat, sizeof *grads), *again = kt_alloc(flat, sizeof *again), logits[61];
    double loss = -1;
    leaf_loss(&t, model, grads);
    mu_pool_set_cancel(kt_pool(1), &cancel);
    struct mu_micro_batch batch = batch_of(&t, 0, ACCUMULATE);
    assert_int_equal(mu_model_forward_backward(model, &batch, t.params, again, &loss), MU_ERR_CANCELLED);
    assert_int_equal(mu_model_loss(model, &batch, t.params, NULL, NULL, &loss), MU_ERR_CANCELLED);
    assert_int_equal(mu_model_logits_last(model, t.tokens, 3, t.params, logits, NULL), MU_ERR_CANCELLED);
    assert_true(loss == -1);
    mu_pool_set_cancel(kt_pool(1), NULL);
    leaf_loss(&t, model, again);
    assert_memory_equal(grads, again, flat * sizeof *grads);
    free(grads);
    free(again);
    mu_model_free(model);
    free_leaf(&t);
}

static void test_update_in_pieces_equals_update_in_one(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.0f);
    size_t flat = (size_t)t.spec.flat_size;
    float *grads = kt_floats(flat, 3, 1.0);
    float *p[2], *m[2], *v[2];
    for (int i = 0; i < 2; i++) {
        p[i] = kt_copy(t.params, flat);
        m[i] = kt_alloc(flat, sizeof(float));
        v[i] = kt_alloc(flat, sizeof(float));
    }
    struct mu_adamw adamw = mu_adamw_at(0.1, 0.9, 0.95, 1e-8, 0.5, 0.0, 1.0, 1);
    assert_int_equal(mu_model_update(&t.spec, kt_pool(1), &adamw, 0, flat, p[0], m[0], v[0], grads), MU_OK);
    for (uint64_t offset = 0; offset < flat; offset += 777)
        assert_int_equal(mu_model_update(&t.spec, kt_pool(2), &adamw, offset, flat - offset < 777 ? flat - offset : 777,
                                         p[1], m[1], v[1], grads),
                         MU_OK);
    assert_memory_equal(p[0], p[1], flat * sizeof(float));
    assert_memory_equal(m[0], m[1], flat * sizeof(float));
    assert_memory_equal(v[0], v[1], flat * sizeof(float));
    /* first update from zero moments: lr * (sign of the gradient + decay * p), decay for matrices only */
    struct mu_tensor matrix = mu_model_role(&t.spec, 1, 0, MU_ROLE_UP_W),
                     bias = mu_model_role(&t.spec, 1, 0, MU_ROLE_UP_B);
    float x = t.params[matrix.offset], y = t.params[bias.offset];
    float sign_x = grads[matrix.offset] > 0 ? 1 : -1, sign_y = grads[bias.offset] > 0 ? 1 : -1;
    assert_true(fabsf(p[0][matrix.offset] - (x - 0.1f * (sign_x + 0.5f * x))) < 1e-5f);
    assert_true(fabsf(p[0][bias.offset] - (y - 0.1f * sign_y)) < 1e-5f);
    for (int i = 0; i < 2; i++) {
        free(p[i]);
        free(m[i]);
        free(v[i]);
    }
    free(grads);
    free_leaf(&t);
}

static void test_initial_parameters_follow_the_spec_and_clear_gaps(void **state)
{
    (void)state;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &small);
    float *params = kt_floats((size_t)spec.flat_size, 1, 1.0), *other = kt_floats((size_t)spec.flat_size, 1, 1.0);
    uint8_t *covered = kt_alloc((size_t)spec.flat_size, 1);
    assert_int_equal(mu_model_init_parameters(&spec, kt_pool(1), 42, NULL, 0, params), MU_OK);
    assert_int_equal(mu_model_init_parameters(&spec, kt_pool(2), 43, NULL, 0, other), MU_OK);
    for (uint32_t i = 0; i < spec.tensor_count; i++) {
        struct mu_tensor tensor = mu_model_tensor(&spec, i);
        double square = 0;
        for (uint64_t j = tensor.offset; j < tensor.offset + tensor.size; j++) {
            covered[j] = 1;
            square += (double)params[j] * (double)params[j] / (double)tensor.size;
            if (tensor.init != MU_INIT_NORMAL)
                assert_true(params[j] == (tensor.init == MU_INIT_ONE ? 1.0f : 0.0f));
        }
        if (tensor.init == MU_INIT_NORMAL) {
            assert_true(fabs(sqrt(square) / tensor.init_std - 1) < 0.15);
            assert_true(memcmp(params + tensor.offset, other + tensor.offset, (size_t)tensor.size * sizeof(float)) !=
                        0);
        }
    }
    for (uint64_t j = 0; j < spec.flat_size; j++)
        assert_true(covered[j] || params[j] == 0.0f);
    free(params);
    free(other);
    free(covered);
}

static void test_bad_options_and_tokens_are_named(void **state)
{
    (void)state;
    struct leaf t = leaf_of(0.0f);
    struct mu_model *model = NULL;
    struct mu_error err = {0};
    const struct mu_model_options bad[] = {{.micro = 0, .length = LENGTH, .accumulate = 1},
                                           {.micro = 1, .length = 33, .accumulate = 1},
                                           {.micro = 1, .length = LENGTH, .accumulate = 0},
                                           {.micro = 1, .length = 0, .accumulate = 1, .forward_only = true}};
    static const char *const says[] = {"micro 0", "length 33", "accumulate 0", "length 0"};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(mu_model_new(&t.spec, &bad[i], kt_pool(0), &err, &model), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, says[i]));
    }
    model = model_of(&t, kt_pool(0));
    struct mu_micro_batch batch = batch_of(&t, 0, 1);
    assert_int_equal(mu_model_check_batch(model, &batch, &err), MU_OK);
    t.tokens[LENGTH + 3] = 61;
    assert_int_equal(mu_model_check_batch(model, &batch, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "sequence 1, token 3: 61"));
    t.tokens[LENGTH + 3] = 60;
    t.targets[2] = -2;
    assert_int_equal(mu_model_check_batch(model, &batch, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "target 2: -2"));
    mu_model_free(model);
    free_leaf(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_leaf_has_the_same_bits_whatever_runs_it),
        cmocka_unit_test(test_leaf_keeps_its_bits_for_good),
        cmocka_unit_test(test_long_leaf_is_the_same_sum_in_another_order),
        cmocka_unit_test(test_gradient_is_the_slope_of_the_loss),
        cmocka_unit_test(test_dropout_depends_on_sample_and_step_only),
        cmocka_unit_test(test_cells_are_reported_complete_in_backward_order),
        cmocka_unit_test(test_evaluation_gives_the_training_loss),
        cmocka_unit_test(test_last_logits_agree_with_the_loss),
        cmocka_unit_test(test_cancel_stops_at_once_and_the_leaf_can_be_redone),
        cmocka_unit_test(test_update_in_pieces_equals_update_in_one),
        cmocka_unit_test(test_initial_parameters_follow_the_spec_and_clear_gaps),
        cmocka_unit_test(test_bad_options_and_tokens_are_named),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
