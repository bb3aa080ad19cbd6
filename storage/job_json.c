#include "storage/job_json.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storage/json_load.h"

enum kind { KIND_TEXT, KIND_BOOL, KIND_U32, KIND_U64, KIND_U64_TEXT, KIND_EVERY, KIND_F32, KIND_F64, KIND_CHOICE };

struct choice {
    const char *name;
    int value;
};

struct field {
    const char *group; /* NULL: top level */
    const char *key;
    enum kind kind;
    size_t offset;                /* in struct mu_job_spec */
    size_t size;                  /* KIND_TEXT: capacity in bytes */
    const struct choice *choices; /* KIND_CHOICE */
    bool optional;                /* records of earlier versions lack it: the default */
};

static const struct choice families[] = {{"gpt2", MU_FAMILY_GPT2}, {"llama", MU_FAMILY_LLAMA}, {NULL, 0}};
static const struct choice formats[] = {
    {"bytes", MU_TOKENS_BYTES}, {"llmc", MU_TOKENS_LLMC}, {"megatron", MU_TOKENS_MEGATRON}, {NULL, 0}};
static const struct choice kinds[] = {{"shared", MU_CHECKPOINT_SHARED}, {"local", MU_CHECKPOINT_LOCAL}, {NULL, 0}};
static const struct choice recomputes[] = {
    {"none", MU_RECOMPUTE_NONE}, {"selective", MU_RECOMPUTE_SELECTIVE}, {"full", MU_RECOMPUTE_FULL}, {NULL, 0}};
static const struct choice redundancies[] = {{"none", MU_REDUNDANCY_NONE}, {"buddy", MU_REDUNDANCY_BUDDY}, {NULL, 0}};
static const struct choice computes[] = {{"fp32", MU_COMPUTE_FP32}, {"bf16", MU_COMPUTE_BF16}, {NULL, 0}};
static const struct choice numerics[] = {{"exact", MU_NUMERICS_EXACT}, {"fast", MU_NUMERICS_FAST}, {NULL, 0}};

#define AT(member) offsetof(struct mu_job_spec, member), sizeof(((struct mu_job_spec *)0)->member)
/* clang-format off */
#define FIELD(group, key, k)      {#group, #key, k, AT(group.key), NULL, false}
#define CHOICE(group, key, of)    {#group, #key, KIND_CHOICE, AT(group.key), of, false}
#define NEWER(group, key, k, of)  {#group, #key, k, AT(group.key), of, true}
/* clang-format on */

/* Every field of the record, once; test_job_json changes each byte of a record to see that none is forgotten. */
static const struct field fields[] = {
    {NULL, "job", KIND_TEXT, AT(name), NULL, false},
    CHOICE(model, family, families),
    FIELD(model, layers, KIND_U32),
    FIELD(model, heads, KIND_U32),
    FIELD(model, channels, KIND_U32),
    FIELD(model, context, KIND_U32),
    FIELD(model, vocab, KIND_U32),
    FIELD(model, dropout, KIND_F32),
    NEWER(model, kv_heads, KIND_U32, NULL),
    NEWER(model, hidden, KIND_U32, NULL),
    NEWER(model, rope_base, KIND_F64, NULL),
    NEWER(model, slices, KIND_U32, NULL),
    FIELD(data, path, KIND_TEXT),
    CHOICE(data, tokens, formats),
    FIELD(data, holdout, KIND_F64),
    FIELD(batch, sequences, KIND_U32),
    FIELD(batch, micro, KIND_U32),
    FIELD(batch, accumulate, KIND_U32),
    FIELD(batch, length, KIND_U32),
    {NULL, "steps", KIND_U64, AT(steps), NULL, false},
    FIELD(optimizer, lr, KIND_F64),
    FIELD(optimizer, min_lr, KIND_F64),
    FIELD(optimizer, warmup, KIND_U64),
    FIELD(optimizer, beta1, KIND_F64),
    FIELD(optimizer, beta2, KIND_F64),
    FIELD(optimizer, eps, KIND_F64),
    FIELD(optimizer, weight_decay, KIND_F64),
    FIELD(optimizer, clip, KIND_F64),
    NEWER(parallel, tp, KIND_U32, NULL),
    NEWER(parallel, pp, KIND_U32, NULL),
    NEWER(parallel, dp, KIND_U32, NULL),
    NEWER(parallel, optimizer_sharding, KIND_BOOL, NULL),
    NEWER(parallel, recompute, KIND_CHOICE, recomputes),
    NEWER(parallel, redundancy, KIND_CHOICE, redundancies),
    FIELD(workers, min, KIND_U32),
    FIELD(workers, max, KIND_U32),
    FIELD(workers, spares, KIND_U32),
    FIELD(checkpoint, path, KIND_TEXT),
    CHOICE(checkpoint, kind, kinds),
    FIELD(checkpoint, every, KIND_EVERY), /* a number, or "auto" */
    FIELD(checkpoint, keep, KIND_U32),
    FIELD(checkpoint, keep_every, KIND_U64),
    FIELD(eval, every, KIND_U64),
    FIELD(eval, sequences, KIND_U32),
    {NULL, "numerics", KIND_CHOICE, AT(numerics), numerics, false},
    {NULL, "compute", KIND_CHOICE, AT(compute), computes, true},
    {NULL, "data_tls", KIND_BOOL, AT(data_tls), NULL, true},
    {NULL, "seed", KIND_U64_TEXT, AT(seed), NULL, false},
    NEWER(init, path, KIND_TEXT, NULL),
    NEWER(init, sha256, KIND_TEXT, NULL),
};
enum { FIELD_COUNT = sizeof fields / sizeof fields[0] };

static void name_of(const struct field *field, char *out, size_t out_size)
{
    snprintf(out, out_size, "%s%s%s", field->group ? field->group : "", field->group ? "." : "", field->key);
}

/* ---- Writing ---- */

static json_t *value_to_json(const struct field *field, const void *at)
{
    char digits[32];
    switch (field->kind) {
    case KIND_TEXT:
        return json_string(at);
    case KIND_BOOL:
        return json_boolean(*(const bool *)at);
    case KIND_U32:
        return json_integer(*(const uint32_t *)at);
    case KIND_EVERY:
        if (*(const uint64_t *)at == MU_EVERY_AUTO)
            return json_string("auto");
        return json_integer((json_int_t) * (const uint64_t *)at);
    case KIND_U64:
        return json_integer((json_int_t) * (const uint64_t *)at);
    case KIND_U64_TEXT:
        snprintf(digits, sizeof digits, "%" PRIu64, *(const uint64_t *)at);
        return json_string(digits);
    case KIND_F32:
        return json_real((double)*(const float *)at);
    case KIND_F64:
        return json_real(*(const double *)at);
    case KIND_CHOICE:
        break;
    }
    int value;
    memcpy(&value, at, sizeof value);
    for (const struct choice *choice = field->choices; choice->name; choice++)
        if (choice->value == value)
            return json_string(choice->name);
    return NULL;
}

/* Only what it gives. */
static json_t *amendment_to_json(const struct mu_amendment *one)
{
    const struct mu_job_terms *terms = &one->terms;
    const struct {
        uint32_t field;
        const char *key;
        json_t *value;
    } given[] = {{MU_AMEND_LR, "lr", json_real(terms->lr)},
                 {MU_AMEND_MIN_LR, "min_lr", json_real(terms->min_lr)},
                 {MU_AMEND_WARMUP, "warmup", json_integer((json_int_t)terms->warmup)},
                 {MU_AMEND_STEPS, "steps", json_integer((json_int_t)terms->steps)},
                 {MU_AMEND_EVERY, "checkpoint_every",
                  terms->every == MU_EVERY_AUTO ? json_string("auto") : json_integer((json_int_t)terms->every)},
                 {MU_AMEND_KEEP, "checkpoint_keep", json_integer(terms->keep)},
                 {MU_AMEND_KEEP_EVERY, "checkpoint_keep_every", json_integer((json_int_t)terms->keep_every)},
                 {MU_AMEND_SKIP, "skip_first", json_integer((json_int_t)one->skip_first)},
                 {MU_AMEND_SKIP, "skip_count", json_integer((json_int_t)one->skip_count)},
                 {MU_AMEND_ROLL_BACK, "roll_back_to", json_integer((json_int_t)one->back.checkpoint)},
                 {MU_AMEND_ROLL_BACK, "void_before", json_integer((json_int_t)one->back.void_before)},
                 {MU_AMEND_ROLL_BACK, "rolled_back_from_step", json_integer((json_int_t)one->back.from_step)}};
    json_t *json = json_pack("{sI sI sb}", "version", (json_int_t)one->version, "at_step", (json_int_t)one->at_step,
                             "settled", one->settled);
    for (size_t i = 0; i < sizeof given / sizeof given[0]; i++) {
        if (one->fields & given[i].field)
            json_object_set(json, given[i].key, given[i].value);
        json_decref(given[i].value);
    }
    return json;
}

static int add_amendments(json_t *root, const struct mu_amendments *all)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < all->count; i++)
        json_array_append_new(list, amendment_to_json(&all->list[i]));
    return json_object_set_new(root, "amendments",
                               json_pack("{sI so}", "newest", (json_int_t)all->newest, "list", list));
}

json_t *mu_job_spec_to_json(const struct mu_job_spec *given)
{
    struct mu_job_spec resolved = *given, *spec = &resolved;
    json_t *root = json_object();
    mu_model_config_resolve(&resolved.model);
    if (!root)
        return NULL;
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        json_t *group = root;
        if (fields[i].group) {
            group = json_object_get(root, fields[i].group);
            if (!group) {
                group = json_object();
                if (json_object_set_new(root, fields[i].group, group))
                    goto fail;
            }
        }
        if (json_object_set_new(group, fields[i].key, value_to_json(&fields[i], (const char *)spec + fields[i].offset)))
            goto fail;
    }
    if (spec->amendments.newest && add_amendments(root, &spec->amendments))
        goto fail;
    return root;
fail:
    json_decref(root);
    return NULL;
}

char *mu_job_spec_to_text(const struct mu_job_spec *spec)
{
    json_t *root = mu_job_spec_to_json(spec);
    char *text = root ? json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(root);
    return text;
}

/* ---- Reading ---- */

static enum mu_status wrong(const struct field *field, const char *allowed, struct mu_error *err)
{
    char name[64];
    name_of(field, name, sizeof name);
    return mu_fail(err, MU_ERR_INVALID, "%s: not %s; write the record as muster writes it", name, allowed);
}

static enum mu_status integer_from_json(const struct field *field, const json_t *value, uint64_t max,
                                        uint64_t *ret_value, struct mu_error *err)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) > max)
        return wrong(field, max == UINT32_MAX ? "a whole number of 32 bits" : "a whole number", err);
    *ret_value = (uint64_t)json_integer_value(value);
    return MU_OK;
}

/* Decimal, canonical: no sign, no leading zero. */
static enum mu_status digits_from_json(const struct field *field, const json_t *value, uint64_t *ret_value,
                                       struct mu_error *err)
{
    const char *text = json_string_value(value);
    char canonical[32] = "";
    if (text && strspn(text, "0123456789") == strlen(text)) {
        *ret_value = strtoull(text, NULL, 10);
        snprintf(canonical, sizeof canonical, "%" PRIu64, *ret_value);
    }
    return text && strcmp(text, canonical) == 0 ? MU_OK : wrong(field, "a string of digits, below 2^64", err);
}

static enum mu_status text_from_json(const struct field *field, const json_t *value, char *at, struct mu_error *err)
{
    size_t length = json_string_length(value);
    if (!json_is_string(value) || length >= field->size || strlen(json_string_value(value)) != length)
        return wrong(field, "a string of the allowed length", err);
    memcpy(at, json_string_value(value), length + 1);
    return MU_OK;
}

static enum mu_status choice_from_json(const struct field *field, const json_t *value, void *at, struct mu_error *err)
{
    const char *text = json_string_value(value);
    for (const struct choice *choice = field->choices; text && choice->name; choice++) {
        if (strcmp(text, choice->name) == 0) {
            memcpy(at, &choice->value, sizeof choice->value);
            return MU_OK;
        }
    }
    return wrong(field, "one of the known words", err);
}

static enum mu_status value_from_json(const struct field *field, const json_t *value, void *at, struct mu_error *err)
{
    uint64_t number = 0;
    enum mu_status status = MU_OK;
    switch (field->kind) {
    case KIND_TEXT:
        return text_from_json(field, value, at, err);
    case KIND_BOOL:
        if (!json_is_boolean(value))
            return wrong(field, "true or false", err);
        *(bool *)at = json_is_true(value);
        return MU_OK;
    case KIND_U32:
        status = integer_from_json(field, value, UINT32_MAX, &number, err);
        if (status == MU_OK)
            *(uint32_t *)at = (uint32_t)number;
        return status;
    case KIND_EVERY:
        if (json_is_string(value) && strcmp(json_string_value(value), "auto") == 0) {
            *(uint64_t *)at = MU_EVERY_AUTO;
            return MU_OK;
        }
        return integer_from_json(field, value, INT64_MAX, at, err);
    case KIND_U64:
        return integer_from_json(field, value, INT64_MAX, at, err);
    case KIND_U64_TEXT:
        return digits_from_json(field, value, at, err);
    case KIND_F32:
        if (!json_is_number(value) || (double)(float)json_number_value(value) != json_number_value(value))
            return wrong(field, "a number of 32 bits", err);
        *(float *)at = (float)json_number_value(value);
        return MU_OK;
    case KIND_F64:
        if (!json_is_number(value))
            return wrong(field, "a number", err);
        *(double *)at = json_number_value(value);
        return MU_OK;
    case KIND_CHOICE:
        break;
    }
    return choice_from_json(field, value, at, err);
}

/* `group` is NULL at the top level. */
static enum mu_status refuse_other_keys(const json_t *object, const char *group, struct mu_error *err)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        bool known = false;
        for (size_t i = 0; i < FIELD_COUNT && !known; i++) {
            const char *own = fields[i].group;
            if (!group)
                known = strcmp(own ? own : fields[i].key, key) == 0;
            else
                known = own && strcmp(own, group) == 0 && strcmp(fields[i].key, key) == 0;
        }
        if (!known && !group && strcmp(key, "amendments") == 0)
            continue;
        if (!known)
            return mu_fail(err, MU_ERR_INVALID, "%s%s%.40s: unknown key; written by a newer version?",
                           group ? group : "", group ? "." : "", key);
        if (!group && json_is_object(value)) {
            enum mu_status status = refuse_other_keys(value, key, err);
            if (status)
                return status;
        }
    }
    return MU_OK;
}

static bool take_number(const json_t *json, const char *key, uint64_t *ret_value, size_t *ret_taken)
{
    const json_t *value = json_object_get(json, key);
    bool is_auto = json_is_string(value) && strcmp(json_string_value(value), "auto") == 0;
    bool good = is_auto || (json_is_integer(value) && json_integer_value(value) >= 0);
    if (good)
        *ret_value = is_auto ? MU_EVERY_AUTO : (uint64_t)json_integer_value(value);
    *ret_taken += good;
    return good;
}

static bool take_real(const json_t *json, const char *key, double *ret_value, size_t *ret_taken)
{
    const json_t *value = json_object_get(json, key);
    if (json_is_number(value))
        *ret_value = json_number_value(value);
    *ret_taken += json_is_number(value);
    return json_is_number(value);
}

static bool amendment_from_json(const json_t *json, struct mu_amendment *out)
{
    struct mu_job_terms *terms = &out->terms;
    uint64_t version = 0, keep = 0;
    size_t taken = 0;
    bool whole = take_number(json, "version", &version, &taken) &&
                 take_number(json, "at_step", &out->at_step, &taken) &&
                 json_is_boolean(json_object_get(json, "settled"));
    out->version = (uint32_t)version;
    out->settled = json_is_true(json_object_get(json, "settled"));
    out->fields |= take_real(json, "lr", &terms->lr, &taken) ? MU_AMEND_LR : 0;
    out->fields |= take_real(json, "min_lr", &terms->min_lr, &taken) ? MU_AMEND_MIN_LR : 0;
    out->fields |= take_number(json, "warmup", &terms->warmup, &taken) ? MU_AMEND_WARMUP : 0;
    out->fields |= take_number(json, "steps", &terms->steps, &taken) ? MU_AMEND_STEPS : 0;
    out->fields |= take_number(json, "checkpoint_every", &terms->every, &taken) ? MU_AMEND_EVERY : 0;
    out->fields |= take_number(json, "checkpoint_keep", &keep, &taken) ? MU_AMEND_KEEP : 0;
    out->fields |= take_number(json, "checkpoint_keep_every", &terms->keep_every, &taken) ? MU_AMEND_KEEP_EVERY : 0;
    out->fields |= take_number(json, "skip_count", &out->skip_count, &taken) ? MU_AMEND_SKIP : 0;
    whole = whole && (take_number(json, "skip_first", &out->skip_first, &taken) || !(out->fields & MU_AMEND_SKIP));
    out->fields |= take_number(json, "roll_back_to", &out->back.checkpoint, &taken) ? MU_AMEND_ROLL_BACK : 0;
    whole = whole && ((take_number(json, "void_before", &out->back.void_before, &taken) &&
                       take_number(json, "rolled_back_from_step", &out->back.from_step, &taken)) ||
                      !(out->fields & MU_AMEND_ROLL_BACK));
    terms->keep = keep > MU_KEEP_MAX ? MU_KEEP_MAX + 1 : (uint32_t)keep;
    return whole && version <= UINT32_MAX && taken + 1 == json_object_size(json);
}

/* Absent: never amended. */
static enum mu_status amendments_from_json(const json_t *json, struct mu_amendments *out, struct mu_error *err)
{
    const json_t *all = json_object_get(json, "amendments"), *list = json_object_get(all, "list");
    uint64_t newest = 0;
    size_t taken = 0, count = json_array_size(list);
    if (!all)
        return MU_OK;
    bool good = json_is_array(list) && take_number(all, "newest", &newest, &taken) && newest <= UINT32_MAX &&
                json_object_size(all) == 2 && count <= MU_AMENDMENTS_MAX;
    for (size_t i = 0; i < count && good; i++)
        good = amendment_from_json(json_array_get(list, i), &out->list[i]);
    if (!good)
        return mu_fail(err, MU_ERR_INVALID, "amendments: not as muster writes them");
    out->count = (uint32_t)count;
    out->newest = (uint32_t)newest;
    return MU_OK;
}

enum mu_status mu_job_spec_from_json(const json_t *json, struct mu_job_spec *ret_spec, struct mu_error *err)
{
    if (!json_is_object(json))
        return mu_fail(err, MU_ERR_INVALID, "job record: not a JSON object; write the record as muster writes it");
    struct mu_job_spec spec, defaults;
    memset(&spec, 0, sizeof spec);
    mu_job_spec_init(&defaults);
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        const json_t *group = fields[i].group ? json_object_get(json, fields[i].group) : json;
        const json_t *value = json_object_get(group, fields[i].key);
        if (!value && fields[i].optional) {
            memcpy((char *)&spec + fields[i].offset, (const char *)&defaults + fields[i].offset, fields[i].size);
            continue;
        }
        if (!value) {
            char name[64];
            name_of(&fields[i], name, sizeof name);
            return mu_fail(err, MU_ERR_INVALID, "%s: is missing; write the record as muster writes it", name);
        }
        status = value_from_json(&fields[i], value, (char *)&spec + fields[i].offset, err);
        if (status)
            return status;
    }
    mu_model_config_resolve(&spec.model);
    if ((status = refuse_other_keys(json, NULL, err)) || (status = amendments_from_json(json, &spec.amendments, err)) ||
        (status = mu_job_spec_check(&spec, err)))
        return status;
    *ret_spec = spec;
    return MU_OK;
}

enum mu_status mu_job_spec_from_text(const char *text, size_t size_bytes, const char *what,
                                     struct mu_job_spec *ret_spec, struct mu_error *err)
{
    json_t *root = NULL;
    enum mu_status status = mu_json_load(text, size_bytes, what, &root, err);
    if (status)
        return status;
    status = mu_job_spec_from_json(root, ret_spec, err);
    json_decref(root);
    if (status && err)
        return mu_error_prefix(err, "'%s'", what);
    return status;
}
