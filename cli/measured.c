#include "cli/measured.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/topology_file.h"
#include "cli/yaml_reader.h"

enum { FIELDS = 6, FIELD_SIZE = 32 };

static const char *const field_names[FIELDS] = {"tp", "pp", "dp", "micro", "recompute", "seconds"};

static enum mu_status bad(struct mu_error *err, uint32_t line, const char *field, const char *value,
                          const char *allowed)
{
    return mu_fail(err, MU_ERR_INVALID, "%u: %s: value %s is not allowed: %s", line, field,
                   value[0] ? value : "(empty)", allowed);
}

static enum mu_status split(const char *text, size_t length, uint32_t line, char fields[FIELDS][FIELD_SIZE],
                            struct mu_error *err)
{
    uint32_t count = 0;
    for (const char *at = text, *end = text + length; at <= end && count <= FIELDS; count++) {
        size_t size = 0;
        while (at + size < end && at[size] != ',')
            size++;
        const char *next = at + size + 1;
        for (; size > 0 && strchr(" \t\r", *at); size--)
            at++;
        while (size > 0 && strchr(" \t\r", at[size - 1]))
            size--;
        if (count < FIELDS) {
            size_t kept = size < FIELD_SIZE ? size : FIELD_SIZE - 1;
            memcpy(fields[count], at, kept);
            fields[count][kept] = 0;
        }
        at = next;
    }
    if (count == FIELDS)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "%u: six values are expected: tp,pp,dp,micro,recompute,seconds", line);
}

static enum mu_status read_sample(char fields[FIELDS][FIELD_SIZE], uint32_t line, const struct plan_question *q,
                                  struct mu_forecast_sample *ret_sample, struct mu_error *err)
{
    static const char *const ways[] = {"none", "selective", "full"};
    uint32_t numbers[4];
    char *end;
    for (int i = 0; i < 4; i++) {
        unsigned long value = strtoul(fields[i], &end, 10);
        if (strspn(fields[i], "0123456789") != strlen(fields[i]) || value == 0 || value > MU_CLUSTER_DEVICES_MAX)
            return bad(err, line, field_names[i], fields[i], "a whole number of at least 1");
        numbers[i] = (uint32_t)value;
    }
    int way = 0;
    while (way < 3 && strcmp(fields[4], ways[way]) != 0)
        way++;
    double seconds = strtod(fields[5], &end);
    if (way == 3)
        return bad(err, line, field_names[4], fields[4], "none, selective or full");
    if (end == fields[5] || *end || !(seconds > 1e-6 && seconds < 1e6))
        return bad(err, line, field_names[5], fields[5], "seconds of a step");
    struct mu_forecast_plan plan =
        mu_search_plan(&q->limits, numbers[0], numbers[1], numbers[2], numbers[3], (enum mu_recompute)(way + 1));
    *ret_sample =
        (struct mu_forecast_sample){.model = q->model, .cluster = &q->cluster, .plan = plan, .step_s = seconds};
    enum mu_status status = mu_forecast_check(&q->model, &q->cluster, &plan, err);
    char why[MU_ERROR_TEXT_SIZE];
    if (status == MU_OK)
        return MU_OK;
    snprintf(why, sizeof why, "%.400s", err->text);
    return mu_fail(err, status, "%u: %s", line, why);
}

static enum mu_status read_all(const char *text, const struct plan_question *q, struct mu_forecast_sample *samples,
                               uint32_t *ret_count, struct mu_error *err)
{
    uint32_t count = 0, line = 0;
    for (const char *at = text; *at;) {
        char fields[FIELDS][FIELD_SIZE];
        size_t length = strcspn(at, "\n"), blank = strspn(at, " \t\r");
        const char *begin = at;
        line++;
        at += length + (at[length] == '\n');
        if (blank >= length || begin[blank] == '#' || strncmp(begin + blank, "tp", 2) == 0)
            continue;
        if (count == PLAN_MEASURED_MAX)
            return mu_fail(err, MU_ERR_LIMIT, "%u: more than %d steps are not allowed", line, PLAN_MEASURED_MAX);
        enum mu_status status = split(begin, length, line, fields, err);
        if (status == MU_OK)
            status = read_sample(fields, line, q, &samples[count], err);
        if (status != MU_OK)
            return status;
        count++;
    }
    if (count == 0)
        return mu_fail(err, MU_ERR_INVALID, "0: no measured step; lines of tp,pp,dp,micro,recompute,seconds");
    *ret_count = count;
    return MU_OK;
}

static double mean_error(const struct mu_forecast_sample *samples, uint32_t count,
                         const struct mu_forecast_rates *rates)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct mu_forecast_sample *s = &samples[i];
        double off = mu_forecast_of(&s->model, s->cluster, &s->plan, rates, NULL).step_s / s->step_s - 1;
        sum += off < 0 ? -off : off;
    }
    return sum / count;
}

enum mu_status plan_calibrate_by(const char *name, const char *text, struct plan_question *q,
                                 struct plan_measured *ret_measured, struct mu_error *err)
{
    struct plan_measured m = {.count = 0};
    struct mu_forecast_sample *samples = calloc(PLAN_MEASURED_MAX, sizeof *samples);
    enum mu_status status =
        samples ? read_all(text, q, samples, &m.count, err) : mu_fail(err, MU_ERR_NO_MEMORY, "0: out of memory");
    if (status == MU_OK) {
        m.error_before = mean_error(samples, m.count, &q->rates);
        mu_forecast_calibrate(samples, m.count, &q->rates);
        m.error_after = mean_error(samples, m.count, &q->rates);
        *ret_measured = m;
    }
    free(samples);
    return status == MU_OK ? MU_OK : topology_located(name, err);
}

enum mu_status plan_calibrate(const char *path, struct plan_question *q, struct plan_measured *ret_measured,
                              struct mu_error *err)
{
    static const struct mu_yaml_kind kind = {.noun = "file of measured steps", .size_max = PLAN_MEASURED_SIZE_MAX};
    char *directory, *text;
    size_t size;
    enum mu_status status = mu_yaml_read_file(path, &kind, &directory, &text, &size, err);
    if (status != MU_OK)
        return status;
    if (size > PLAN_MEASURED_SIZE_MAX || memchr(text, 0, size)) {
        status = mu_fail(err, MU_ERR_INVALID, "%s: is larger than %d bytes, or no text", path, PLAN_MEASURED_SIZE_MAX);
    } else {
        text[size] = 0; /* there is room for one more */
        status = plan_calibrate_by(path, text, q, ret_measured, err);
    }
    free(directory);
    free(text);
    return status;
}
