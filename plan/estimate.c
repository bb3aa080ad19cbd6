#include "plan/estimate.h"

#include "plan/cost.h"
#include "plan/forecast.h"
#include "plan/memory.h"
#include "plan/text.h"

static double percent_more(double with, double without)
{
    return without > 0 ? 100 * (with / without - 1) : 0;
}

static double step_seconds(const struct mu_job_spec *spec, const struct mu_layout *layout,
                           const struct mu_cost_rates *rates)
{
    return mu_cost_of_layout(spec, layout, rates).step_s;
}

/* What T costs where nothing is gained by it: on one worker. */
static double slices_percent(const struct mu_job_spec *spec, const struct mu_cost_rates *rates)
{
    struct mu_job_spec whole = *spec;
    struct mu_layout one;
    whole.model.slices = 1;
    mu_layout_init(&one, 1, spec->model.layers);
    return percent_more(step_seconds(spec, &one, rates), step_seconds(&whole, &one, rates));
}

static uint32_t fewest_workers(const struct mu_job_spec *spec)
{
    uint32_t tp = spec->parallel.tp, pp = spec->parallel.pp, dp = spec->parallel.dp;
    uint32_t given = (tp ? tp : 1) * (pp ? pp : 1) * (dp ? dp : 1);
    return given > spec->workers.min ? given : spec->workers.min;
}

void mu_estimate_of(const struct mu_job_spec *given, struct mu_estimate *ret)
{
    struct mu_job_spec spec = *given, plain;
    struct mu_cost_rates rates;
    char text[128];
    mu_model_config_resolve(&spec.model);
    mu_cost_rates_of_job(&rates, &spec);
    uint32_t rows = mu_model_vocab_slice_rows(&spec.model), slices = spec.model.slices;
    *ret = (struct mu_estimate){.slices = slices,
                                .tp_max = spec.parallel.tp ? spec.parallel.tp : slices,
                                .tp_given = spec.parallel.tp > 0,
                                .slices_percent = slices_percent(&spec, &rates),
                                .vocab_rows = rows,
                                .vocab_rows_last = spec.model.vocab - (slices - 1) * rows,
                                .workers = fewest_workers(&spec)};
    if (mu_layout_choose(&spec, &rates, ret->workers, 0, 1, NULL, &ret->layout, text, sizeof text))
        return;
    ret->fits = true;
    ret->step_s = step_seconds(&spec, &ret->layout, &rates);
    ret->memory_bytes = mu_memory_of_layout(&spec, &ret->layout, 1, NULL).total_bytes;
    plain = spec;
    plain.parallel.recompute = MU_RECOMPUTE_NONE;
    ret->recompute_percent = percent_more(ret->step_s, step_seconds(&plain, &ret->layout, &rates));
    plain = spec;
    plain.parallel.redundancy = MU_REDUNDANCY_NONE;
    ret->redundancy_percent = percent_more(ret->step_s, step_seconds(&plain, &ret->layout, &rates));
    struct mu_layout replicated = ret->layout;
    replicated.sharded = false;
    uint64_t bytes = mu_memory_of_layout(&spec, &replicated, 1, NULL).total_bytes;
    ret->sharding_saved_bytes = bytes > ret->memory_bytes ? bytes - ret->memory_bytes : 0;
}

/* ---- lines ---- */

static void put_tenths(struct mu_text *text, double value)
{
    uint64_t tenths = value > 0 ? (uint64_t)(value * 10 + 0.5) : 0;
    mu_text_put_uint(text, tenths / 10);
    mu_text_put(text, ".");
    mu_text_put_uint(text, tenths % 10);
}

static void put_number(struct mu_text *text, const char *before, uint64_t value, const char *after)
{
    mu_text_put(text, before);
    mu_text_put_uint(text, value);
    mu_text_put(text, after);
}

static void put_percent(struct mu_text *text, const char *what, double percent)
{
    if (percent < 0.05)
        return;
    mu_text_put(text, what);
    put_tenths(text, percent);
    mu_text_put(text, " %");
}

void mu_estimate_slices_line(const struct mu_estimate *e, char out[MU_ESTIMATE_LINE_SIZE])
{
    struct mu_text text;
    mu_text_init(&text, out, MU_ESTIMATE_LINE_SIZE);
    put_number(&text, "slices ", e->slices, "");
    if (e->slices == 1) {
        mu_text_put(&text, ": cost nothing; tp can only be 1");
        return;
    }
    mu_text_put(&text, ": add ");
    put_tenths(&text, e->slices_percent);
    mu_text_put(&text, e->tp_given ? " % to a step at tp 1; tp is " : " % to a step at tp 1; tp can be 1");
    if (e->tp_given)
        mu_text_put_uint(&text, e->tp_max);
    for (uint32_t tp = 2; !e->tp_given && tp <= e->tp_max; tp *= 2)
        put_number(&text, tp * 2 > e->tp_max ? " or " : ", ", tp, "");
    if (e->vocab_rows_last != e->vocab_rows) {
        put_number(&text, "; vocabulary: ", e->vocab_rows, " rows a slice, ");
        put_number(&text, "", e->vocab_rows_last, " in the last");
    }
}

void mu_estimate_layout_line(const struct mu_estimate *e, char out[MU_ESTIMATE_LINE_SIZE])
{
    struct mu_text text;
    mu_text_init(&text, out, MU_ESTIMATE_LINE_SIZE);
    put_number(&text, "layout with ", e->workers, e->workers == 1 ? " worker: " : " workers: ");
    if (!e->fits) {
        mu_text_put(&text, "none");
        return;
    }
    put_number(&text, "tp ", e->layout.tp, "");
    put_number(&text, " x pp ", e->layout.pp, "");
    put_number(&text, " x dp ", e->layout.dp, ", ");
    mu_text_put_uint(&text, (uint64_t)(e->step_s * 1e3 + 0.5));
    put_number(&text, " ms a step and ", (e->memory_bytes + (1 << 20) - 1) >> 20, " MiB a worker expected");
    put_percent(&text, "; recomputation adds ", e->recompute_percent);
    put_percent(&text, "; buddies add ", e->redundancy_percent);
    if (e->layout.sharded)
        put_number(&text, "; sharding saves ", e->sharding_saved_bytes >> 20, " MiB a worker");
}
