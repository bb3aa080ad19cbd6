#include "plan/forecast.h"

#include <stddef.h>

#include "common/fmath.h"

enum {
    KERNELS_FORWARD = 8,    /* launched for a layer; twice as many backward */
    TENSORS_OF_LAYER = 12,  /* zero3: exchanged one by one */
    ROW_NUMBERS = 10,       /* read or written for each channel of a row by norms, residuals, dropout ... */
    ROW_NUMBERS_SLICED = 8, /* ... and by what is split over t */
};
#define LINK_HOP        0.25   /* a hop over NVLink against one over the network: 3.4 and 14 us in NCCL's tables */
#define UNKNOWN         0.03   /* for each doubling of the stages, as MU_CHOICE_MARGIN_PERCENT of plan/cost.h */
#define REFERENCE_FLOPS 312e12 /* the device of which flops_half is said */

void mu_forecast_rates_init(struct mu_forecast_rates *rates)
{
    /* Estimates of what libraries reach, not fitted to any run: large products 80 % of peak, half of that at 2 GFLOP
     * (a product of 1000^3), memory 80 %, bus bandwidth of NCCL's tests over link rate: 232 of 300 GB/s in a DGX A100,
     * 192 of 8 x 25 between them; launches of 6 us, hops of 14 us (NCCL's base latency of network rings). */
    *rates = (struct mu_forecast_rates){.flops_share = 0.80,
                                        .flops_half = 2e9,
                                        .memory_share = 0.80,
                                        .link_share = 0.77,
                                        .nic_share = 0.75,
                                        .launch_s = 6e-6,
                                        .hop_s = 14e-6,
                                        .score_passes = 4,
                                        .straggler_share = 1.02};
}

void mu_cost_rates_of_device(struct mu_cost_rates *rates, const struct mu_device_type *device)
{
    struct mu_forecast_rates reached;
    mu_forecast_rates_init(&reached);
    mu_cost_rates_init(rates); /* what slices cost */
    rates->flops = device->flops_bf16 * reached.flops_share;
    rates->memory_bytes_per_second = device->memory_bytes_per_second * reached.memory_share;
    rates->link_bytes_per_second = device->link_bytes_per_second * reached.link_share;
    rates->latency_s = reached.hop_s;
    rates->fixed_s = KERNELS_FORWARD * reached.launch_s;
}

void mu_cost_rates_of_job(struct mu_cost_rates *rates, const struct mu_job_spec *spec)
{
    if (spec->compute == MU_COMPUTE_BF16)
        mu_cost_rates_of_device(rates, mu_device_type_named("h100-sxm"));
    else
        mu_cost_rates_init(rates);
}

/* ---- the model ---- */

static bool gated(const struct mu_model_config *c)
{
    return c->family == MU_FAMILY_LLAMA;
}

/* Weights of a layer's four products. */
struct layer_weights {
    double qkv, projection, up, down;
};

static struct layer_weights weights_of(const struct mu_model_config *c)
{
    double h = c->channels, kv = h * c->kv_heads / c->heads;
    return (struct layer_weights){
        .qkv = h * (h + 2 * kv), .projection = h * h, .up = h * c->hidden * (gated(c) ? 2 : 1), .down = h * c->hidden};
}

static double sum_of(const struct layer_weights *w)
{
    return w->qkv + w->projection + w->up + w->down;
}

static double embedding_parameters(const struct mu_model_config *c)
{
    return (double)c->vocab * c->channels;
}

double mu_forecast_parameters(const struct mu_model_config *c)
{
    struct layer_weights w = weights_of(c);
    double embeddings = embedding_parameters(c) * (gated(c) ? 2 : 1);
    double positions = gated(c) ? 0 : (double)c->context * c->channels;
    double rows = gated(c) ? 2.0 * c->channels : 13.0 * c->channels; /* norms and biases */
    return c->layers * (sum_of(&w) + rows) + embeddings + positions;
}

/* ---- what one device does ---- */

/* Everything that the terms need, worked out once. */
struct site {
    const struct mu_forecast_model *model;
    const struct mu_model_config *config;
    const struct mu_cluster *cluster;
    const struct mu_device_type *device;
    const struct mu_forecast_plan *plan;
    const struct mu_forecast_rates *rates;
    struct mu_forecast_network network; /* zero: the closed form */
    struct layer_weights weights;
    double peak, memory_rate, link_rate, element_bytes;
    double tokens, micros, layers; /* of a micro-batch; in a step; of a stage */
};

/* Micro-batches of the busiest replica when one device is slow: the others take over what they can, whole ones. */
static double busiest_micros(const struct mu_cluster *cluster, const struct mu_forecast_plan *plan, double micros)
{
    double slow = cluster->slow_device;
    if (slow <= 1 || plan->dp == 1)
        return micros * slow;
    double others = plan->dp - 1.0, least = micros * plan->dp / (others + 1 / slow), most = (double)(uint64_t)least;
    while (others * most + (double)(uint64_t)(most / slow) < micros * plan->dp)
        most++;
    return most;
}

static struct site site_of(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                           const struct mu_forecast_plan *plan, const struct mu_forecast_rates *rates)
{
    const struct mu_device_type *device = &cluster->device;
    return (struct site){.model = model,
                         .config = &model->config,
                         .cluster = cluster,
                         .device = device,
                         .plan = plan,
                         .rates = rates,
                         .weights = weights_of(&model->config),
                         .peak = plan->bf16 ? device->flops_bf16 : device->flops_fp32,
                         .memory_rate = device->memory_bytes_per_second * rates->memory_share,
                         .link_rate = device->link_bytes_per_second * rates->link_share,
                         .element_bytes = plan->bf16 ? 2 : 4,
                         .tokens = (double)plan->micro * model->length,
                         .micros = busiest_micros(cluster, plan, model->sequences / ((double)plan->micro * plan->dp)),
                         .layers = (double)model->config.layers / plan->pp};
}

/* One matrix product of `weights` / t weights with the tokens of a micro-batch. */
static double product_s(const struct site *s, double weights)
{
    double flops = 2 * s->tokens * weights / s->plan->tp;
    double half = s->rates->flops_half * s->peak / REFERENCE_FLOPS;
    return (flops + half) / (s->peak * s->rates->flops_share);
}

static double products_s(const struct site *s)
{
    const struct layer_weights *w = &s->weights;
    return product_s(s, w->qkv) + product_s(s, w->projection) + product_s(s, w->up) + product_s(s, w->down) +
           KERNELS_FORWARD * s->rates->launch_s;
}

struct pair {
    double forward, backward;
};

/* Products of scores and values, whose inner lengths are a head's channels: about 0.55 of peak, of the share that large
 * ones reach; fused 0.6, and backward with the scores computed again 2.5 times as much. The causal half of the scores
 * is not saved by unfused kernels. */
static struct pair attention_s(const struct site *s)
{
    double flops = 4 * s->tokens * s->model->length * s->config->channels / s->plan->tp;
    double rate = s->peak * s->rates->flops_share;
    if (s->plan->fused_attention)
        return (struct pair){flops / 2 / (0.6 * rate), 2.5 * flops / 2 / (0.6 * rate)};
    double scores = s->tokens * s->model->length * s->config->heads / s->plan->tp * s->element_bytes;
    double passes = scores * s->rates->score_passes / s->memory_rate;
    return (struct pair){flops / (0.55 * rate) + passes, 2 * flops / (0.55 * rate) + 1.25 * passes};
}

static double rows_s(const struct site *s)
{
    double whole = s->plan->sequence_parallel ? (double)ROW_NUMBERS / s->plan->tp : ROW_NUMBERS;
    return (whole + (double)ROW_NUMBERS_SLICED / s->plan->tp) * s->tokens * s->config->channels * s->element_bytes /
           s->memory_rate;
}

static double head_s(const struct site *s)
{
    double logits = s->tokens * s->config->vocab / s->plan->tp;
    return 3 * product_s(s, embedding_parameters(s->config)) + 2 * 4 * logits / s->memory_rate;
}

static double embedding_s(const struct site *s)
{
    return 6 * s->element_bytes * s->tokens * s->config->channels / s->memory_rate;
}

/* ---- exchanges ---- */

/* One half of an all-reduce (a reduce-scatter or an all-gather) of `bytes` in a ring of n, or a tree where hops cost
 * more. */
static double half_ring_s(double bytes, double n, double rate, double hop_s)
{
    if (n <= 1)
        return 0;
    double ring = n - 1, tree = 2 * mu_fmath_log(n) / mu_fmath_log(2);
    return bytes * (n - 1) / n / rate + (tree < ring ? tree : ring) * hop_s;
}

uint32_t mu_forecast_in_node(const struct mu_device_type *device, uint32_t n, uint32_t inner)
{
    uint32_t joined = device->per_node / (device->islands > 1 ? device->islands : 1);
    uint32_t room = inner < joined ? joined / inner : 1;
    return n < room ? n : room;
}

static uint32_t in_node(const struct site *s, uint32_t n, uint32_t inner)
{
    return mu_forecast_in_node(s->device, n, inner);
}

static uint32_t nodes_of(const struct site *s, uint32_t devices)
{
    return (devices + s->device->per_node - 1) / s->device->per_node;
}

/* `placed`: what contention leaves of it, or 0. */
static double nic_rate(const struct site *s, uint32_t members, uint32_t stride, double placed)
{
    double rate = placed > 0 ? placed : mu_cluster_nic_rate(s->cluster, members, stride > 0 ? stride : 1);
    return rate * s->rates->nic_share;
}

/* From one node to the next of a ring. */
static double hop_s(const struct site *s, uint32_t members, uint32_t stride)
{
    return s->rates->hop_s + mu_cluster_switches_s(s->cluster, members, stride > 0 ? stride : 1);
}

/* An all-reduce of `bytes` over n ranks, `inner` devices apart: inside the nodes, then by rails between them. */
static double all_reduce_s(const struct site *s, double bytes, uint32_t n, uint32_t inner, double placed)
{
    uint32_t inside = in_node(s, n, inner), outside = (n + inside - 1) / inside;
    double links = half_ring_s(bytes, inside, s->link_rate, s->rates->hop_s * LINK_HOP);
    uint32_t stride = nodes_of(s, inner);
    double rails =
        half_ring_s(bytes / inside, outside, nic_rate(s, outside, stride, placed), hop_s(s, outside, stride));
    return 2 * (links + rails);
}

static double tensor_s(const struct site *s)
{
    return 2 * all_reduce_s(s, s->element_bytes * s->tokens * s->config->channels, s->plan->tp, 1, s->network.tensor);
}

/* One boundary of stages, one way: each rank of the tensor group sends its part, the node gathers. */
static double boundary_s(const struct site *s)
{
    const struct mu_forecast_plan *plan = s->plan;
    if (plan->pp == 1)
        return 0;
    double bytes = s->element_bytes * s->tokens * s->config->channels;
    uint32_t parts = in_node(s, plan->tp, 1), apart = plan->tp * plan->dp;        /* devices from stage to stage */
    bool alone = (uint64_t)plan->tp * plan->dp * plan->pp <= s->device->per_node; /* on one node */
    double rate = alone ? s->link_rate : nic_rate(s, 2, nodes_of(s, apart), s->network.stage);
    double hop = alone ? s->rates->hop_s : hop_s(s, 2, nodes_of(s, apart));
    return bytes / parts / rate + bytes * (parts - 1) / parts / s->link_rate + hop;
}

/* ZeRO-3: for each tensor a ring through all devices of the job, twice the parameters and once the gradient. */
static double zero3_s(const struct site *s)
{
    double n = s->plan->dp, bytes = mu_forecast_parameters(s->config) * s->element_bytes;
    double tensors = (double)s->config->layers * TENSORS_OF_LAYER;
    uint32_t nodes = nodes_of(s, s->plan->dp);
    double rate = nodes > 1 ? nic_rate(s, nodes, 1, 0) * s->device->per_node : s->link_rate;
    rate = rate < s->link_rate ? rate : s->link_rate;
    return 3 * (bytes * (n - 1) / n / rate + tensors * (n - 1) * hop_s(s, nodes, 1));
}

/* ---- memory ---- */

/* Parameters of the device that has most: a stage with the embedding. */
static double parameters_here(const struct site *s)
{
    double layer = sum_of(&s->weights);
    double ends = embedding_parameters(s->config) * (s->plan->pp == 1 && gated(s->config) ? 2 : 1);
    return (s->layers * layer + ends) / s->plan->tp / (s->plan->zero3 ? s->plan->dp : 1);
}

/* Bytes that a micro-batch leaves in a layer for its backward pass (Korthikanti et al., table 2, two bytes a number).
 */
static double layer_activation_bytes(const struct site *s)
{
    double sbh = s->tokens * s->config->channels * s->element_bytes / 2, t = s->plan->tp;
    bool spread = s->plan->sequence_parallel;
    if (s->plan->recompute == MU_RECOMPUTE_FULL)
        return 2 * sbh / (spread ? t : 1);
    double scores = s->plan->fused_attention || s->plan->recompute == MU_RECOMPUTE_SELECTIVE
                        ? 0
                        : 5.0 * s->config->heads * s->model->length / (s->config->channels * t);
    return sbh * (spread ? 34 / t + scores : 10 + 24 / t + scores);
}

static void fill_memory(const struct site *s, struct mu_forecast *f)
{
    const struct mu_forecast_plan *plan = s->plan;
    double parameters = parameters_here(s), owned = parameters / (plan->sharded && !plan->zero3 ? plan->dp : 1);
    double held = s->micros < plan->pp ? s->micros : plan->pp; /* by the first stage */
    if (plan->virtual > 1)
        held *= 1 + (plan->pp - 1.0) / ((double)plan->pp * plan->virtual);
    f->parameter_bytes = parameters * s->element_bytes;
    f->gradient_bytes = parameters * 4;
    f->optimizer_bytes = owned * (plan->bf16 ? 12 : 8);
    f->activation_bytes = held * s->layers * layer_activation_bytes(s);
    if (plan->recompute == MU_RECOMPUTE_FULL) /* one layer at a time is whole */
        f->activation_bytes += s->tokens * s->config->channels * s->element_bytes / 2 * (10 + 24.0 / plan->tp);
    f->activation_bytes += plan->pp == 1 ? 4 * s->tokens * s->config->vocab / plan->tp : 0; /* logits */
    f->memory_bytes = f->parameter_bytes + f->gradient_bytes + f->optimizer_bytes + f->activation_bytes;
}

/* ---- the whole ---- */

static void fill_bottleneck(struct mu_forecast *f)
{
    const struct {
        const char *name;
        double seconds;
    } terms[] = {{"attention", f->attention_s},
                 {"rows", f->rows_s},
                 {"recomputation", f->recompute_s},
                 {"head", f->head_s},
                 {"tensor exchange", f->tensor_s},
                 {"stage exchange", f->pipeline_s},
                 {"bubble", f->bubble_s},
                 {"data exchange", f->data_s},
                 {"update", f->update_s}};
    double most = 0;
    for (size_t i = 0; i < sizeof terms / sizeof terms[0]; i++)
        if (terms[i].seconds > most) {
            most = terms[i].seconds;
            f->bottleneck = terms[i].name;
        }
}

/* FLOPs of the model's step: three times forward, causal or not as the paper counts it (Narayanan et al., eq. 3). */
static double step_flops(const struct site *s)
{
    double tokens = (double)s->model->sequences * s->model->length;
    double layer = 2 * sum_of(&s->weights) + 4.0 * s->model->length * s->config->channels;
    return 3 * tokens * (s->config->layers * layer + 2 * embedding_parameters(s->config));
}

static void fill_data(const struct site *s, struct mu_forecast *f)
{
    const struct mu_forecast_plan *plan = s->plan;
    double bytes = parameters_here(s) * s->element_bytes;
    f->data_s = plan->zero3 ? zero3_s(s) : all_reduce_s(s, bytes, plan->dp, plan->tp, s->network.data);
    f->data_s *= 1 - plan->data_overlap;
    double owned = parameters_here(s) / (plan->sharded ? plan->dp : 1);
    f->update_s = owned * (plan->bf16 ? 34 : 28) / s->memory_rate;
    if (plan->pp > 1 && !gated(s->config)) {
        double tied = embedding_parameters(s->config) / plan->tp * s->element_bytes;
        f->tied_s = 2 * tied / nic_rate(s, 2, nodes_of(s, plan->tp * plan->dp), s->network.stage);
    }
}

struct mu_forecast mu_forecast_of(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                  const struct mu_forecast_plan *plan, const struct mu_forecast_rates *rates,
                                  const struct mu_forecast_network *network)
{
    struct site site = site_of(model, cluster, plan, rates), *s = &site;
    if (network)
        site.network = *network;
    struct mu_forecast f = {.bottleneck = "products"};
    struct pair attention = attention_s(s);
    double products = products_s(s), rows = rows_s(s), tensor = tensor_s(s), head = head_s(s);
    double again = plan->recompute == MU_RECOMPUTE_FULL        ? products + attention.forward + rows
                   : plan->recompute == MU_RECOMPUTE_SELECTIVE ? attention.forward
                                                               : 0;
    double tensor_layer = tensor * (plan->recompute == MU_RECOMPUTE_FULL ? 3 : 2);
    double layer = 3 * products + attention.forward + attention.backward + 3 * rows + again + tensor_layer;
    double stage = s->layers * layer, boundary = 2 * boundary_s(s);
    double ends = plan->pp == 1 ? head + embedding_s(s) : head; /* the last of several stages is the fullest */

    f.compute_s = s->micros * s->layers * 3 * products;
    f.attention_s = s->micros * s->layers * (attention.forward + attention.backward);
    f.rows_s = s->micros * s->layers * 3 * rows;
    f.recompute_s = s->micros * s->layers * again;
    f.head_s = s->micros * ends;
    f.tensor_s = s->micros * s->layers * tensor_layer;
    f.pipeline_s = s->micros * boundary * plan->virtual;
    f.bubble_s = (plan->pp - 1) * (stage + boundary) / plan->virtual;
    fill_data(s, &f);
    f.step_s = (f.compute_s + f.attention_s + f.rows_s + f.recompute_s + f.head_s + f.tensor_s + f.pipeline_s +
                f.bubble_s + f.data_s + f.update_s + f.tied_s) *
               rates->straggler_share;
    f.cautious_s = f.step_s * (1 + UNKNOWN * mu_fmath_log(plan->pp) / mu_fmath_log(2));
    f.model_flops = step_flops(s);
    f.mfu = f.model_flops / (f.step_s * s->peak * plan->tp * plan->pp * plan->dp);
    fill_memory(s, &f);
    fill_bottleneck(&f);
    return f;
}

enum mu_status mu_forecast_check(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                 const struct mu_forecast_plan *plan, struct mu_error *err)
{
    const struct mu_model_config *c = &model->config;
    uint64_t devices = (uint64_t)plan->tp * plan->pp * plan->dp, replica = (uint64_t)plan->micro * plan->dp;
    if (plan->tp == 0 || plan->pp == 0 || plan->dp == 0 || plan->micro == 0 || plan->virtual == 0)
        return mu_fail(err, MU_ERR_INVALID, "tp, pp, dp, micro, virtual: 0 is not allowed: at least 1");
    if (devices > mu_cluster_devices(cluster))
        return mu_fail(err, MU_ERR_INVALID, "tp x pp x dp = %llu is not allowed: the cluster has %u devices",
                       (unsigned long long)devices, mu_cluster_devices(cluster));
    if (plan->pp * plan->dp > mu_cluster_groups(cluster, plan->tp))
        return mu_fail(err, MU_ERR_INVALID,
                       "%u tensor groups of %u are not allowed: whole ones on nodes of %u devices are %u",
                       plan->pp * plan->dp, plan->tp, cluster->device.per_node, mu_cluster_groups(cluster, plan->tp));
    if (c->kv_heads % plan->tp != 0 || c->hidden % plan->tp != 0)
        return mu_fail(err, MU_ERR_INVALID, "tp %u is not allowed: it must divide %u heads of keys and an MLP of %u",
                       plan->tp, c->kv_heads, c->hidden);
    if (c->layers % (plan->pp * plan->virtual) != 0 && (plan->virtual > 1 || plan->pp > c->layers))
        return mu_fail(err, MU_ERR_INVALID, "pp %u, virtual %u is not allowed: %u layers", plan->pp, plan->virtual,
                       c->layers);
    if (model->sequences % replica != 0)
        return mu_fail(err, MU_ERR_INVALID, "micro %u x dp %u is not allowed: it must divide a batch of %u sequences",
                       plan->micro, plan->dp, model->sequences);
    if (plan->zero3 && plan->tp * plan->pp != 1)
        return mu_fail(err, MU_ERR_INVALID, "zero3 with tp %u, pp %u is not allowed: both must be 1", plan->tp,
                       plan->pp);
    return MU_OK;
}

/* ---- calibration ---- */

enum { KNOBS = 9, ROUNDS = 60 };
#define OUTLIER 0.4
#define PENALTY 0.01

/* Rates as a list: where they are, how far they are expected to move (in ln), the most they may be. */
struct knob {
    size_t offset;
    double spread, most;
};
#define KNOB(field, spread_, most_)                                                                                    \
    {                                                                                                                  \
        offsetof(struct mu_forecast_rates, field), spread_, most_                                                      \
    }
static const struct knob knobs[KNOBS] = {
    KNOB(flops_share, 0.1, 1), KNOB(flops_half, 0.7, 1e12),  KNOB(memory_share, 0.7, 1),
    KNOB(link_share, 0.7, 1),  KNOB(nic_share, 0.7, 1),      KNOB(launch_s, 0.7, 1),
    KNOB(hop_s, 0.7, 1),       KNOB(score_passes, 0.7, 100), KNOB(straggler_share, 0.1, 2)};

static double *knob_of(struct mu_forecast_rates *rates, uint32_t i)
{
    return (double *)((char *)rates + knobs[i].offset);
}

static double misfit(const struct mu_forecast_sample *samples, uint32_t count, struct mu_forecast_rates *rates,
                     struct mu_forecast_rates *given)
{
    double off = 0, moved = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct mu_forecast f = mu_forecast_of(&samples[i].model, samples[i].cluster, &samples[i].plan, rates, NULL);
        double ln = mu_fmath_log(f.step_s / samples[i].step_s);
        ln = ln < 0 ? -ln : ln;
        off += ln < OUTLIER ? ln : OUTLIER;
    }
    for (uint32_t i = 0; i < KNOBS; i++) {
        double ln = mu_fmath_log(*knob_of(rates, i) / *knob_of(given, i)) / knobs[i].spread;
        moved += ln * ln;
    }
    return off / count + PENALTY * moved / KNOBS;
}

void mu_forecast_calibrate(const struct mu_forecast_sample *samples, uint32_t count, struct mu_forecast_rates *rates)
{
    MU_ASSERT(count > 0);
    struct mu_forecast_rates given = *rates;
    double best = misfit(samples, count, rates, &given), step[KNOBS];
    for (uint32_t i = 0; i < KNOBS; i++)
        step[i] = knobs[i].spread * 0.7;
    for (uint32_t round = 0; round < ROUNDS; round++)
        for (uint32_t i = 0; i < KNOBS; i++) {
            double here = *knob_of(rates, i), up = mu_fmath_exp(step[i]);
            const double tries[2] = {here * up, here / up};
            bool better = false;
            for (uint32_t k = 0; k < 2 && !better; k++) {
                if (tries[k] > knobs[i].most ||
                    (knobs[i].offset == offsetof(struct mu_forecast_rates, straggler_share) && tries[k] < 1))
                    continue;
                *knob_of(rates, i) = tries[k];
                double now = misfit(samples, count, rates, &given);
                better = now < best;
                best = better ? now : best;
            }
            if (better)
                continue;
            *knob_of(rates, i) = here;
            step[i] *= 0.7;
        }
}
