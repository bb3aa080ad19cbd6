/* muster cert: a certificate authority for a cluster that has none, and certificates that name who may do what. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli.h"
#include "rpc/certificate.h"

enum { PATH_SIZE = 4096 };

static const char *const roles[] = {"coordinator", "worker", "viewer", "operator", "admin"};
enum { ROLE_COUNT = sizeof roles / sizeof roles[0] };

static enum mu_status path_of(const char *dir, const char *name, const char *suffix, char out[PATH_SIZE],
                              struct mu_error *err)
{
    if (snprintf(out, PATH_SIZE, "%s/%s%s", dir, name, suffix) < PATH_SIZE)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "the directory's name is too long: at most %d bytes", PATH_SIZE - 128);
}

static enum mu_status write_pair(const char *dir, const char *name, const struct mu_certificate_pair *pair,
                                 struct mu_error *err)
{
    char cert[PATH_SIZE], key[PATH_SIZE];
    enum mu_status status;
    if ((status = path_of(dir, name, ".crt", cert, err)) || (status = path_of(dir, name, ".key", key, err)) ||
        (status = mu_certificate_write_pair(cert, key, pair, err)))
        return status;
    printf("%s\n%s\n", cert, key);
    return MU_OK;
}

static enum mu_status read_ca(const char *dir, struct mu_certificate_pair *ret_ca, struct mu_error *err)
{
    char cert[PATH_SIZE], key[PATH_SIZE];
    enum mu_status status;
    if ((status = path_of(dir, "ca", ".crt", cert, err)) || (status = path_of(dir, "ca", ".key", key, err)))
        return status;
    if (access(cert, F_OK) != 0)
        return mu_fail(err, MU_ERR_NOT_FOUND, "there is no CA certificate '%s': make one with muster cert ca", cert);
    return mu_certificate_read_pair(cert, key, ret_ca, err);
}

/* ---- the command ---- */

static bool is_plain(const char *text, const char *also)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t length = 0;
    while (text[length] && (strchr(letters, text[length]) || strchr(also, text[length])))
        length++;
    return length > 0 && text[length] == 0;
}

/* Splits "ROLE/NAME" in place. */
static bool take_identity(char *word, struct mu_certificate_subject *request)
{
    char *slash = strchr(word, '/');
    if (slash)
        *slash = 0;
    for (int i = 0; i < ROLE_COUNT && slash && !request->role; i++)
        request->role = strcmp(word, roles[i]) == 0 ? roles[i] : NULL;
    request->name = slash ? slash + 1 : "";
    if (!request->role || !is_plain(request->name, "") || strlen(request->name) > MU_CERTIFICATE_NAME_LONGEST) {
        mu_cli_usage("cert",
                     "'%s%s%s' is not allowed: coordinator, worker, viewer, operator or admin, a slash, and a "
                     "name of 1 to %d characters a-z A-Z 0-9 . _ -",
                     word, slash ? "/" : "", request->name, MU_CERTIFICATE_NAME_LONGEST);
        return false;
    }
    bool is_server = request->role == roles[0];
    if (is_server != (request->hosts != NULL) || (is_server && !is_plain(request->hosts, ",:*"))) {
        mu_cli_usage("cert", "--hosts NAME,ADDRESS,.. is needed for a coordinator, and for nobody else");
        return false;
    }
    return true;
}

static enum mu_status make_ca(const char *dir, const struct mu_certificate_subject *request,
                              struct mu_certificate_pair *own, struct mu_error *err)
{
    char path[PATH_SIZE];
    enum mu_status status = path_of(dir, "ca", ".key", path, err);
    if (status)
        return status;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return mu_fail_errno(err, errno, "cannot make the directory '%s'", dir);
    if (access(path, F_OK) == 0)
        return mu_fail(err, MU_ERR_EXISTS, "'%s' exists: a new CA would cut off everybody with its certificates", path);
    status = mu_certificate_make(request, NULL, own, err);
    return status ? status : write_pair(dir, "ca", own, err);
}

static enum mu_status issue(const char *dir, const struct mu_certificate_subject *request,
                            struct mu_certificate_pair *own, struct mu_error *err)
{
    struct mu_certificate_pair ca = {0};
    char name[2 * MU_CERTIFICATE_NAME_LONGEST];
    enum mu_status status = read_ca(dir, &ca, err);
    if (status == MU_OK)
        status = mu_certificate_make(request, &ca, own, err);
    snprintf(name, sizeof name, "%s-%s", request->role, request->name);
    if (status == MU_OK)
        status = write_pair(dir, name, own, err);
    mu_certificate_pair_free(&ca);
    return status;
}

int mu_cmd_cert(struct mu_cli *cli, int argc, char **argv)
{
    (void)cli;
    const char *valid = NULL;
    struct mu_certificate_subject request = {.name = "Muster CA"};
    struct mu_cli_option options[] = {{"--valid", &valid, NULL}, {"--hosts", &request.hosts, NULL}};
    int words = mu_cli_parse("cert", argc, argv, options, 2, 2, 3);
    if (words < 0)
        return MU_EXIT_USAGE;
    bool is_ca = strcmp(argv[0], "ca") == 0 && words == 2 && !request.hosts;
    if (!is_ca && (strcmp(argv[0], "issue") != 0 || words != 3))
        return mu_cli_usage("cert", "either 'ca DIR' or 'issue DIR ROLE/NAME' is allowed");
    if (!valid)
        valid = is_ca ? "3650d" : "365d";
    if ((!is_ca && !take_identity(argv[2], &request)) ||
        !mu_cli_duration("cert", "--valid", valid, 36500u * MU_CERTIFICATE_DAY_S, &request.valid_s))
        return MU_EXIT_USAGE;
    struct mu_certificate_pair own = {0};
    struct mu_error err = {0};
    enum mu_status status = is_ca ? make_ca(argv[1], &request, &own, &err) : issue(argv[1], &request, &own, &err);
    mu_certificate_pair_free(&own);
    return status ? mu_cli_fail(&err) : MU_EXIT_OK;
}
