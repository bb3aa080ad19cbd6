/* /metrics: what workers tell of their GPUs. */
#include <math.h>

#include "coordinator/metrics.h"

enum fold { SUM, MOST, LEAST };

struct gpu_metric {
    const char *name, *help;
    enum fold fold;
    double (*of)(const struct mu_gpu_sample *gpu); /* NULL: the reading, in its unit */
    double unit;
    enum mu_gpu_reading reading;
};

enum {
    STALE_US = 10 * 1000 * 1000,
    LINE_BYTES = MU_JOB_NAME_SIZE + MU_WORKER_NAME_SIZE + 96, /* of a worker, at most */
};

static double watched(const struct mu_gpu_sample *gpu)
{
    return gpu->watch == MU_GPU_WATCHED;
}
static double unwatched(const struct mu_gpu_sample *gpu)
{
    return gpu->watch == MU_GPU_UNWATCHED || gpu->age_us > STALE_US;
}
static double memory_ratio(const struct mu_gpu_sample *gpu)
{
    double total = (double)gpu->values[MU_GPU_MEMORY_TOTAL_BYTES];
    return total > 0 ? (double)gpu->values[MU_GPU_MEMORY_USED_BYTES] / total : NAN;
}
static double throttled(const struct mu_gpu_sample *gpu)
{
    return (gpu->values[MU_GPU_THROTTLE_REASONS] & MU_GPU_THROTTLE_FAULTS) != 0;
}
static double rows_bad(const struct mu_gpu_sample *gpu)
{
    return (double)(gpu->values[MU_GPU_ROW_REMAP_PENDING] + gpu->values[MU_GPU_ROW_REMAP_FAILED]);
}
static double link_errors(const struct mu_gpu_sample *gpu)
{
    return (double)(gpu->values[MU_GPU_NVLINK_CRC_ERRORS] + gpu->values[MU_GPU_NVLINK_REPLAYS] +
                    gpu->values[MU_GPU_NVLINK_RECOVERIES]);
}

static const struct gpu_metric job_metrics[] = {
    {"muster_gpu_count", "GPUs that the job's workers compute on and drivers tell of.", SUM, .of = watched},
    {"muster_gpu_unwatched", "GPUs whose driver tells nothing, or nothing any more.", SUM, .of = unwatched},
    {"muster_gpu_utilisation_ratio", "Share of the time in which a kernel ran, of the GPU where that is least.", LEAST,
     NULL, 0.01, MU_GPU_UTILISATION_PERCENT},
    {"muster_gpu_memory_ratio", "Used share of the memory, of the fullest GPU.", MOST, .of = memory_ratio},
    {"muster_gpu_power_watts", "Power of the job's GPUs in all.", SUM, NULL, 1e-3, MU_GPU_POWER_MW},
    {"muster_gpu_temperature_celsius", "Of the hottest GPU.", MOST, NULL, 1, MU_GPU_TEMPERATURE_C},
    {"muster_gpu_memory_temperature_celsius", "Of the GPU with the hottest memory.", MOST, NULL, 1,
     MU_GPU_MEMORY_TEMPERATURE_C},
    {"muster_gpu_throttled", "GPUs that are slowed down by heat, power brake or a fault.", SUM, .of = throttled},
    {"muster_gpu_ecc_uncorrected", "Memory errors that were not corrected, since drivers were loaded.", SUM, NULL, 1,
     MU_GPU_ECC_UNCORRECTED},
    {"muster_gpu_rows_bad", "GPUs with a memory row to be remapped at the next reset, or that could not be.", SUM,
     .of = rows_bad},
    {"muster_gpu_nvlink_errors", "NVLink: checksum errors, replays and recoveries.", SUM, .of = link_errors},
    {"muster_gpu_pcie_replays", "PCIe: packets sent again.", SUM, NULL, 1, MU_GPU_PCIE_REPLAYS},
};
static const struct gpu_metric worker_metrics[] = {
    {"muster_worker_gpu_utilisation_ratio", "Share of the time in which a kernel ran.", SUM, NULL, 0.01,
     MU_GPU_UTILISATION_PERCENT},
    {"muster_worker_gpu_memory_bytes", "Used memory of the worker's GPU.", SUM, NULL, 1, MU_GPU_MEMORY_USED_BYTES},
    {"muster_worker_gpu_power_watts", "Power of the worker's GPU.", SUM, NULL, 1e-3, MU_GPU_POWER_MW},
    {"muster_worker_gpu_temperature_celsius", "Of the worker's GPU.", SUM, NULL, 1, MU_GPU_TEMPERATURE_C},
    {"muster_worker_gpu_clock_hertz", "Of the processors of the worker's GPU.", SUM, NULL, 1e6, MU_GPU_SM_CLOCK_MHZ},
    {"muster_worker_gpu_throttled", "1: slowed down by heat, power brake or a fault.", SUM, .of = throttled},
    {"muster_worker_gpu_ecc_uncorrected", "Memory errors that were not corrected.", SUM, NULL, 1,
     MU_GPU_ECC_UNCORRECTED},
};

/* NAN: not known. */
static double value_of(const struct gpu_metric *metric, const struct mu_gpu_sample *gpu)
{
    if (metric->of)
        return metric->of(gpu);
    return mu_gpu_knows(gpu, metric->reading) ? (double)gpu->values[metric->reading] * metric->unit : NAN;
}

static double fold(enum fold how, double sum, double value)
{
    if (isnan(value) || isnan(sum))
        return isnan(value) ? sum : value;
    return how == SUM ? sum + value : (how == MOST) == (value > sum) ? value : sum;
}

static void write_job_metric(FILE *out, const struct gpu_metric *metric, const struct mu_told *told, uint32_t count)
{
    double sum = NAN;
    mu_metrics_head(out, metric->name, "gauge", metric->help);
    for (uint32_t i = 0; i < count; i++) {
        const struct mu_gpu_sample *gpu = told[i].heard->newest.gpu;
        if (gpu)
            sum = fold(metric->fold, sum, value_of(metric, gpu));
        if (i + 1 < count && told[i + 1].job == told[i].job)
            continue;
        if (!isnan(sum))
            fprintf(out, "%s{job=\"%s\"} %.9g\n", metric->name, told[i].job, sum);
        sum = NAN;
    }
}

static void write_worker_metric(FILE *out, const struct gpu_metric *metric, const struct mu_told *told, uint32_t count)
{
    mu_metrics_head(out, metric->name, "gauge", metric->help);
    for (uint32_t i = 0; i < count; i++) {
        const struct mu_gpu_sample *gpu = told[i].heard->newest.gpu;
        double value = gpu ? value_of(metric, gpu) : NAN;
        if (!isnan(value))
            fprintf(out, "%s{job=\"%s\",worker=\"%s\"} %.12g\n", metric->name, told[i].job, told[i].worker, value);
    }
}

void mu_metrics_gpus(FILE *out, const struct mu_told *told, uint32_t count)
{
    for (size_t m = 0; m < sizeof job_metrics / sizeof job_metrics[0]; m++)
        write_job_metric(out, &job_metrics[m], told, count);
}

int mu_metrics_worker_gpus(FILE *out, const struct mu_told *told, uint32_t count, uint32_t most, size_t bytes_max)
{
    int left_out = 0;
    size_t gpus = 0;
    for (uint32_t i = 0; i < count; i++)
        gpus += told[i].heard->newest.gpu != NULL;
    for (size_t m = 0; m < sizeof worker_metrics / sizeof worker_metrics[0]; m++) {
        bool fits = gpus == 0 || (count <= most && (size_t)ftello(out) + gpus * LINE_BYTES <= bytes_max);
        write_worker_metric(out, &worker_metrics[m], told, fits ? count : 0);
        left_out += !fits;
    }
    return left_out;
}
