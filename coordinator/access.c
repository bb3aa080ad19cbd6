#include "coordinator/access.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "coordinator/api.h"
#include "proto/wire.h"

enum { LINE_SIZE = 600, DENIED_MAX = 65536 };

/* From VIEWER on each may do what the one before may; a worker may attach and nothing else. */
enum role { ROLE_NONE, ROLE_WORKER, ROLE_VIEWER, ROLE_OPERATOR, ROLE_ADMIN, ROLE_COUNT };

static const char *const role_names[ROLE_COUNT] = {"none", "worker", "viewer", "operator", "admin"};

/* ROLE_NONE: any certificate of the CA will do. */
static const enum role needed[MU_METHOD_COUNT] = {
    [MU_METHOD_ATTACH] = ROLE_WORKER,
    [MU_METHOD_REPORT_EXIT] = ROLE_WORKER,
    [MU_METHOD_SUBMIT_JOB] = ROLE_OPERATOR,
    [MU_METHOD_GET_JOB] = ROLE_VIEWER,
    [MU_METHOD_LIST_JOBS] = ROLE_VIEWER,
    [MU_METHOD_CANCEL_JOB] = ROLE_OPERATOR,
    [MU_METHOD_SCALE_JOB] = ROLE_OPERATOR,
    [MU_METHOD_AMEND_JOB] = ROLE_OPERATOR,
    [MU_METHOD_BRANCH_JOB] = ROLE_OPERATOR,
    [MU_METHOD_LIST_WORKERS] = ROLE_VIEWER,
    [MU_METHOD_DRAIN_WORKER] = ROLE_OPERATOR,
    [MU_METHOD_UNDRAIN_WORKER] = ROLE_OPERATOR,
    [MU_METHOD_LIST_NODES] = ROLE_VIEWER,
    [MU_METHOD_ORDER_NODE] = ROLE_OPERATOR,
    [MU_METHOD_TRIGGER_CHECKPOINT] = ROLE_OPERATOR,
    [MU_METHOD_LIST_CHECKPOINTS] = ROLE_VIEWER,
    [MU_METHOD_GET_TIMINGS] = ROLE_VIEWER,
    [MU_METHOD_GET_GOODPUT] = ROLE_VIEWER,
    [MU_METHOD_PROBE] = ROLE_OPERATOR,
    [MU_METHOD_READ_PROBE] = ROLE_VIEWER,
    [MU_METHOD_WATCH_EVENTS] = ROLE_VIEWER,
    [MU_METHOD_SAVE_SNAPSHOT] = ROLE_ADMIN, /* it holds everything that the coordinator knows */
    [MU_METHOD_HEALTH_CHECK] = ROLE_NONE,
    [MU_METHOD_HEALTH_WATCH] = ROLE_NONE,
    [MU_METHOD_REFLECTION] = ROLE_NONE,
    [MU_METHOD_REFLECTION_ALPHA] = ROLE_NONE,
    [MU_METHOD_CREATE_TOKEN] = ROLE_ADMIN, /* makes workers */
    [MU_METHOD_LIST_TOKENS] = ROLE_ADMIN,
    [MU_METHOD_REVOKE_TOKEN] = ROLE_ADMIN,
    [MU_METHOD_JOIN] = ROLE_NONE,
    [MU_METHOD_RENEW] = ROLE_WORKER,
    [MU_METHOD_RECALL] = ROLE_OPERATOR, /* a log may tell what a viewer need not know */
    [MU_METHOD_READ_RECALL] = ROLE_OPERATOR,
    [MU_METHOD_RECOLLECT] = ROLE_WORKER,
    [MU_METHOD_LIST_HANG_REPORTS] = ROLE_VIEWER,
    [MU_METHOD_GET_HANG_REPORT] = ROLE_VIEWER,
    [MU_METHOD_READ_COORDINATOR] = ROLE_OPERATOR, /* as a worker's log */
};

struct denied {
    char **names;
    size_t count;
};

struct mu_access {
    const char *deny_path;
    struct stat looked_at;
    struct denied denied;
};

static void free_denied(struct denied *denied)
{
    for (size_t i = 0; i < denied->count; i++)
        free(denied->names[i]);
    free(denied->names);
    *denied = (struct denied){0};
}

static enum mu_status add(struct denied *denied, const char *path, unsigned line, const char *text,
                          struct mu_error *err)
{
    if (strncmp(text, "muster://", 9) != 0 && strncmp(text, "dns:", 4) != 0)
        return mu_fail(err, MU_ERR_INVALID, "%s:%u: '%s' is not an identity: muster://ROLE/NAME or dns:HOST", path,
                       line, text);
    if (denied->count == DENIED_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "%s:%u: more than %d identities", path, line, DENIED_MAX);
    char **names = realloc(denied->names, (denied->count + 1) * sizeof *names);
    if (names)
        denied->names = names;
    char *name = names ? strdup(text) : NULL;
    if (!name)
        return mu_fail(err, MU_ERR_NO_MEMORY, "%s: out of memory", path);
    denied->names[denied->count++] = name;
    return MU_OK;
}

static enum mu_status load(struct mu_access *access, struct mu_error *err)
{
    char line[LINE_SIZE];
    struct denied denied = {0};
    enum mu_status status = MU_OK;
    FILE *file = fopen(access->deny_path, "re");
    if (!file)
        return mu_fail_errno(err, errno, "cannot read the list of denied identities '%s'", access->deny_path);
    for (unsigned number = 1; !status && fgets(line, sizeof line, file); number++) {
        if (!strchr(line, '\n') && !feof(file))
            status = mu_fail(err, MU_ERR_INVALID, "%s:%u: the line is too long", access->deny_path, number);
        char *text = line + strspn(line, " \t");
        text[strcspn(text, " \t\r\n#")] = 0;
        if (!status && text[0])
            status = add(&denied, access->deny_path, number, text, err);
    }
    if (!status && ferror(file))
        status = mu_fail(err, MU_ERR_IO, "'%s' cannot be read to its end", access->deny_path);
    fclose(file);
    if (status) {
        free_denied(&denied);
        return status;
    }
    free_denied(&access->denied);
    access->denied = denied;
    return MU_OK;
}

enum mu_status mu_access_new(const char *deny_path, struct mu_access **ret_access, struct mu_error *err)
{
    struct mu_access *access = calloc(1, sizeof *access);
    if (!access)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the list of denied identities");
    access->deny_path = deny_path;
    bool ignored;
    enum mu_status status = mu_access_refresh(access, &ignored, err);
    if (status == MU_OK)
        *ret_access = access;
    else
        mu_access_free(access);
    return status;
}

void mu_access_free(struct mu_access *access)
{
    if (access)
        free_denied(&access->denied);
    free(access);
}

enum mu_status mu_access_refresh(struct mu_access *access, bool *ret_changed, struct mu_error *err)
{
    struct stat now = {0}, *before = &access->looked_at;
    *ret_changed = false;
    if (!access->deny_path)
        return MU_OK;
    if (stat(access->deny_path, &now) != 0)
        now.st_size = -1; /* gone: told once, by load */
    if (now.st_ino == before->st_ino && now.st_size == before->st_size &&
        now.st_mtim.tv_sec == before->st_mtim.tv_sec && now.st_mtim.tv_nsec == before->st_mtim.tv_nsec)
        return MU_OK;
    *before = now;
    *ret_changed = true;
    return load(access, err);
}

bool mu_access_is_denied(const struct mu_access *access, const char *identity)
{
    for (size_t i = 0; i < access->denied.count; i++)
        if (strcmp(access->denied.names[i], identity) == 0)
            return true;
    return false;
}

static const char scheme[] = "muster://";

static enum role role_of(const char *identity)
{
    if (strncmp(identity, scheme, sizeof scheme - 1) != 0)
        return ROLE_NONE;
    const char *text = identity + sizeof scheme - 1;
    for (int role = ROLE_WORKER; role < ROLE_COUNT; role++) {
        size_t length = strlen(role_names[role]);
        if (strncmp(text, role_names[role], length) == 0 && text[length] == '/' && text[length + 1])
            return (enum role)role;
    }
    return ROLE_NONE;
}

enum mu_status mu_access_check(const struct mu_access *access, const char *identity, bool has_certificate,
                               int method_id, struct mu_error *err)
{
    enum role has = role_of(identity), needs = needed[method_id];
    const char *who = identity[0] ? identity : "a certificate without a muster:// URI";
    if (!has_certificate && method_id != MU_METHOD_JOIN)
        return mu_fail(err, MU_ERR_DENIED,
                       "no certificate was shown, and without one nothing is open but joining with a token: give "
                       "--tls-cert and --tls-key");
    if (mu_access_is_denied(access, identity))
        return mu_fail(err, MU_ERR_DENIED, "%s is on the coordinator's list of denied identities", who);
    if (needs == ROLE_NONE || has == needs || (needs >= ROLE_VIEWER && has > needs))
        return MU_OK;
    return mu_fail(err, MU_ERR_DENIED, "%s has the role %s; %s needs the role %s", who, role_names[has],
                   strrchr(mu_api_methods[method_id].path, '/') + 1, role_names[needs]);
}

enum mu_status mu_access_bind_worker(const char *identity, uint64_t random, char name[MU_WORKER_NAME_SIZE],
                                     struct mu_error *err)
{
    enum { SUFFIX_BYTES = 7 }; /* "-" and six digits */
    char own[MU_WORKER_NAME_SIZE];
    MU_ASSERT(role_of(identity) == ROLE_WORKER);
    const char *text = identity + strlen(scheme) + strlen(role_names[ROLE_WORKER]) + 1;
    size_t length = strnlen(text, sizeof own);
    for (size_t i = 0; i < length && i < sizeof own - 1; i++) /* names of workers have no capitals */
        own[i] = text[i] >= 'A' && text[i] <= 'Z' ? (char)(text[i] - 'A' + 'a') : text[i];
    own[length < sizeof own ? length : 0] = 0;
    if (!mu_wire_name_ok(own, sizeof own - (name[0] ? 0 : SUFFIX_BYTES)))
        return mu_fail(err, MU_ERR_DENIED,
                       "the certificate %s names no worker: 1 to %d characters a-z 0-9 . _ -, a letter or digit first",
                       identity, MU_WORKER_NAME_SIZE - 1 - SUFFIX_BYTES);
    if (name[0] == 0) {
        snprintf(name, MU_WORKER_NAME_SIZE, "%.*s-%06x", MU_WORKER_NAME_SIZE - 1 - SUFFIX_BYTES, own,
                 (unsigned)(random & 0xffffff));
        return MU_OK;
    }
    if (strncmp(name, own, length) == 0 && (name[length] == 0 || name[length] == '-' || name[length] == '.'))
        return MU_OK;
    return mu_fail(err, MU_ERR_DENIED, "%s may attach as '%s' or '%s-...', not as '%s': see --name", identity, own, own,
                   name);
}
