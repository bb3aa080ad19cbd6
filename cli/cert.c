/* muster cert: a certificate authority for a cluster that has none, and certificates that name who may do what
 * (coordinator/access.h). Keys are P-256 and never readable by others. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_SIZE = 4096, SANS_SIZE = 2048, SERIAL_BYTES = 16, NAME_LONGEST = 63, SLACK_S = 300, DAY_S = 86400 };

static const char *const roles[] = {"coordinator", "worker", "viewer", "operator", "admin"};
enum { ROLE_COUNT = sizeof roles / sizeof roles[0] };

struct pair {
    X509 *cert;
    EVP_PKEY *key;
};

struct request {
    const char *role, *name; /* role NULL: a CA */
    const char *hosts;       /* of a coordinator, "a,10.0.0.1"; else NULL */
    long valid_s;
};

static void free_pair(struct pair *pair)
{
    X509_free(pair->cert);
    EVP_PKEY_free(pair->key);
}

/* ---- files ---- */

static enum mu_status path_of(const char *dir, const char *name, const char *suffix, char out[PATH_SIZE],
                              struct mu_error *err)
{
    if (snprintf(out, PATH_SIZE, "%s/%s%s", dir, name, suffix) < PATH_SIZE)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "the directory's name is too long: at most %d bytes", PATH_SIZE - 128);
}

static enum mu_status read_pair(const char *dir, struct pair *ret_pair, struct mu_error *err)
{
    char path[PATH_SIZE];
    enum mu_status status = path_of(dir, "ca", ".crt", path, err);
    FILE *file = status ? NULL : fopen(path, "re");
    ret_pair->cert = file ? PEM_read_X509(file, NULL, NULL, NULL) : NULL;
    if (file)
        fclose(file);
    if (!status && !ret_pair->cert)
        return mu_fail(err, MU_ERR_NOT_FOUND, "there is no CA certificate '%s': make one with muster cert ca", path);
    status = status ? status : path_of(dir, "ca", ".key", path, err);
    file = status ? NULL : fopen(path, "re");
    ret_pair->key = file ? PEM_read_PrivateKey(file, NULL, NULL, "") : NULL;
    if (file)
        fclose(file);
    if (status)
        return status;
    if (!ret_pair->key || X509_check_private_key(ret_pair->cert, ret_pair->key) != 1)
        return mu_fail(err, MU_ERR_INVALID, "'%s' is not the readable private key of ca.crt beside it", path);
    return MU_OK;
}

/* Under a temporary name first: whoever reads the final one finds all of it. */
static enum mu_status write_pem(const char *path, const struct pair *pair, bool is_key, struct mu_error *err)
{
    char temporary[PATH_SIZE + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    unlink(temporary);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, is_key ? 0600 : 0644);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    bool is_written = file && (is_key ? PEM_write_PKCS8PrivateKey(file, pair->key, NULL, NULL, 0, NULL, NULL)
                                      : PEM_write_X509(file, pair->cert)) == 1;
    is_written = is_written && fflush(file) == 0 && fsync(fd) == 0;
    if (file && fclose(file) != 0)
        is_written = false;
    if (is_written && rename(temporary, path) == 0)
        return MU_OK;
    enum mu_status status = mu_fail_errno(err, errno, "cannot write '%s'", path);
    unlink(temporary);
    return status;
}

/* The key first: a program that reads the files in between refuses them and keeps the former ones. */
static enum mu_status write_pair(const char *dir, const char *name, const struct pair *pair, struct mu_error *err)
{
    char cert[PATH_SIZE], key[PATH_SIZE];
    enum mu_status status;
    if ((status = path_of(dir, name, ".crt", cert, err)) || (status = path_of(dir, name, ".key", key, err)) ||
        (status = write_pem(key, pair, true, err)) || (status = write_pem(cert, pair, false, err)))
        return status;
    printf("%s\n%s\n", cert, key);
    return MU_OK;
}

/* ---- certificates ---- */

/* "URI:muster://coordinator/c1,DNS:localhost,IP:127.0.0.1"; names are of a plain alphabet (check_words). */
static bool format_sans(const struct request *request, char out[SANS_SIZE])
{
    int used = snprintf(out, SANS_SIZE, "URI:muster://%s/%s", request->role, request->name);
    for (const char *at = request->hosts; at && *at && used < SANS_SIZE;) {
        int length = (int)strcspn(at, ",");
        char host[256];
        snprintf(host, sizeof host, "%.*s", length, at);
        ASN1_OCTET_STRING *ip = a2i_IPADDRESS(host);
        used += snprintf(out + used, (size_t)(SANS_SIZE - used), ",%s:%s", ip ? "IP" : "DNS", host);
        ASN1_OCTET_STRING_free(ip);
        at += length + (at[length] == ',');
    }
    return used < SANS_SIZE;
}

static bool add_extension(X509 *cert, X509 *issuer, int id, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer, cert, NULL, NULL, 0);
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &context, id, value);
    bool is_added = extension && X509_add_ext(cert, extension, -1) == 1;
    X509_EXTENSION_free(extension);
    return is_added;
}

/* Only a coordinator's certificate can be shown by a server: no other one can pose as the coordinator. */
static bool add_extensions(X509 *cert, X509 *issuer, const struct request *request)
{
    char sans[SANS_SIZE];
    if (!request->role)
        return add_extension(cert, issuer, NID_basic_constraints, "critical,CA:TRUE,pathlen:0") &&
               add_extension(cert, issuer, NID_key_usage, "critical,keyCertSign,cRLSign") &&
               add_extension(cert, issuer, NID_subject_key_identifier, "hash");
    bool is_server = strcmp(request->role, roles[0]) == 0;
    return format_sans(request, sans) && add_extension(cert, issuer, NID_basic_constraints, "critical,CA:FALSE") &&
           add_extension(cert, issuer, NID_key_usage, "critical,digitalSignature") &&
           add_extension(cert, issuer, NID_ext_key_usage, is_server ? "serverAuth" : "clientAuth") &&
           add_extension(cert, issuer, NID_subject_key_identifier, "hash") &&
           add_extension(cert, issuer, NID_authority_key_identifier, "keyid:always") &&
           add_extension(cert, issuer, NID_subject_alt_name, sans);
}

static bool set_serial(X509 *cert)
{
    unsigned char bytes[SERIAL_BYTES];
    if (RAND_bytes(bytes, sizeof bytes) != 1)
        return false;
    bytes[0] = (unsigned char)((bytes[0] & 0x7f) | 0x40); /* positive, and of full length */
    BIGNUM *number = BN_bin2bn(bytes, sizeof bytes, NULL);
    bool is_set = number && BN_to_ASN1_INTEGER(number, X509_get_serialNumber(cert));
    BN_free(number);
    return is_set;
}

/* ca NULL: signs itself. */
static enum mu_status make(const struct request *request, const struct pair *ca, struct pair *ret_pair,
                           struct mu_error *err)
{
    X509 *cert = ret_pair->cert = X509_new();
    EVP_PKEY *key = ret_pair->key = EVP_EC_gen("P-256");
    X509 *issuer = ca ? ca->cert : cert;
    X509_NAME *name = cert ? X509_get_subject_name(cert) : NULL;
    bool ok =
        cert && key && X509_set_version(cert, X509_VERSION_3) == 1 && set_serial(cert) &&
        X509_gmtime_adj(X509_getm_notBefore(cert), -SLACK_S) && /* clocks differ */
        X509_gmtime_adj(X509_getm_notAfter(cert), request->valid_s) && X509_set_pubkey(cert, key) == 1 &&
        X509_NAME_add_entry_by_txt(name, "O", MBSTRING_UTF8, (const unsigned char *)"muster", -1, -1, 0) == 1 &&
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8, (const unsigned char *)request->name, -1, -1, 0) == 1 &&
        X509_set_issuer_name(cert, X509_get_subject_name(issuer)) == 1 && add_extensions(cert, issuer, request) &&
        X509_sign(cert, ca ? ca->key : key, EVP_sha256()) > 0;
    return ok ? MU_OK
              : mu_fail(err, MU_ERR_INVALID, "the certificate of '%s' cannot be made: are the --hosts valid?",
                        request->name);
}

/* ---- the command ---- */

/* "90d", "12h", "30m", "5s" */
static bool parse_valid(const char *text, long *ret_seconds)
{
    static const struct {
        char unit;
        long seconds;
    } units[] = {{'d', DAY_S}, {'h', 3600}, {'m', 60}, {'s', 1}};
    char *end;
    long count = strtol(text, &end, 10);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (*end == units[i].unit && end[1] == 0 && count >= 1 && count <= 36500L * DAY_S / units[i].seconds) {
            *ret_seconds = count * units[i].seconds;
            return true;
        }
    }
    mu_cli_usage("cert", "--valid '%s' is not allowed: a number with d, h, m or s, up to 36500d", text);
    return false;
}

static bool is_plain(const char *text, const char *also)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t length = 0;
    while (text[length] && (strchr(letters, text[length]) || strchr(also, text[length])))
        length++;
    return length > 0 && text[length] == 0;
}

/* Splits "ROLE/NAME" in place. */
static bool take_identity(char *word, struct request *request)
{
    char *slash = strchr(word, '/');
    if (slash)
        *slash = 0;
    for (int i = 0; i < ROLE_COUNT && slash && !request->role; i++)
        request->role = strcmp(word, roles[i]) == 0 ? roles[i] : NULL;
    request->name = slash ? slash + 1 : "";
    if (!request->role || !is_plain(request->name, "") || strlen(request->name) > NAME_LONGEST) {
        mu_cli_usage("cert",
                     "'%s%s%s' is not allowed: coordinator, worker, viewer, operator or admin, a slash, and a "
                     "name of 1 to %d characters a-z A-Z 0-9 . _ -",
                     word, slash ? "/" : "", request->name, NAME_LONGEST);
        return false;
    }
    bool is_server = request->role == roles[0];
    if (is_server != (request->hosts != NULL) || (is_server && !is_plain(request->hosts, ",:*"))) {
        mu_cli_usage("cert", "--hosts NAME,ADDRESS,.. is needed for a coordinator, and for nobody else");
        return false;
    }
    return true;
}

static enum mu_status make_ca(const char *dir, const struct request *request, struct pair *own, struct mu_error *err)
{
    char path[PATH_SIZE];
    enum mu_status status = path_of(dir, "ca", ".key", path, err);
    if (status)
        return status;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return mu_fail_errno(err, errno, "cannot make the directory '%s'", dir);
    if (access(path, F_OK) == 0)
        return mu_fail(err, MU_ERR_EXISTS, "'%s' exists: a new CA would cut off everybody with its certificates", path);
    status = make(request, NULL, own, err);
    return status ? status : write_pair(dir, "ca", own, err);
}

static enum mu_status issue(const char *dir, const struct request *request, struct pair *own, struct mu_error *err)
{
    struct pair ca = {0};
    char name[2 * NAME_LONGEST];
    enum mu_status status = read_pair(dir, &ca, err);
    if (status == MU_OK)
        status = make(request, &ca, own, err);
    snprintf(name, sizeof name, "%s-%s", request->role, request->name);
    if (status == MU_OK)
        status = write_pair(dir, name, own, err);
    free_pair(&ca);
    return status;
}

int mu_cmd_cert(struct mu_cli *cli, int argc, char **argv)
{
    (void)cli;
    const char *valid = NULL;
    struct request request = {.name = "Muster CA"};
    struct mu_cli_option options[] = {{"--valid", &valid, NULL}, {"--hosts", &request.hosts, NULL}};
    int words = mu_cli_parse("cert", argc, argv, options, 2, 2, 3);
    if (words < 0)
        return MU_EXIT_USAGE;
    bool is_ca = strcmp(argv[0], "ca") == 0 && words == 2 && !request.hosts;
    if (!is_ca && (strcmp(argv[0], "issue") != 0 || words != 3))
        return mu_cli_usage("cert", "either 'ca DIR' or 'issue DIR ROLE/NAME' is allowed");
    if ((!is_ca && !take_identity(argv[2], &request)) || !parse_valid(valid   ? valid
                                                                      : is_ca ? "3650d"
                                                                              : "365d",
                                                                      &request.valid_s))
        return MU_EXIT_USAGE;
    struct pair own = {0};
    struct mu_error err = {0};
    enum mu_status status = is_ca ? make_ca(argv[1], &request, &own, &err) : issue(argv[1], &request, &own, &err);
    free_pair(&own);
    return status ? mu_cli_fail(&err) : MU_EXIT_OK;
}
