#include "rpc/certificate.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define RENEWABLE_UNIT "given for a join token" /* OU of the subject */
enum { PATH_SIZE = 4096, SANS_SIZE = 2048, SERIAL_BYTES = 16, SLACK_S = 300, REQUEST_BYTES_MAX = 8192 };

void mu_certificate_pair_free(struct mu_certificate_pair *pair)
{
    X509_free(pair->cert);
    EVP_PKEY_free(pair->key);
    *pair = (struct mu_certificate_pair){0};
}

/* ---- certificates ---- */

/* "URI:muster://coordinator/c1,DNS:localhost,IP:127.0.0.1" */
static bool format_sans(const struct mu_certificate_subject *subject, char out[SANS_SIZE])
{
    int used = snprintf(out, SANS_SIZE, "URI:" MU_CERTIFICATE_SCHEME "%s/%s", subject->role, subject->name);
    for (const char *at = subject->hosts; at && *at && used < SANS_SIZE;) {
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
static bool add_extensions(X509 *cert, X509 *issuer, const struct mu_certificate_subject *subject)
{
    char sans[SANS_SIZE];
    if (!subject->role)
        return add_extension(cert, issuer, NID_basic_constraints, "critical,CA:TRUE,pathlen:0") &&
               add_extension(cert, issuer, NID_key_usage, "critical,keyCertSign,cRLSign") &&
               add_extension(cert, issuer, NID_subject_key_identifier, "hash");
    bool is_server = strcmp(subject->role, "coordinator") == 0;
    return format_sans(subject, sans) && add_extension(cert, issuer, NID_basic_constraints, "critical,CA:FALSE") &&
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

/* ca NULL: `key` signs. */
static enum mu_status sign(const struct mu_certificate_subject *subject, const struct mu_certificate_pair *ca,
                           EVP_PKEY *key, X509 **ret_cert, struct mu_error *err)
{
    X509 *cert = X509_new();
    X509 *issuer = ca ? ca->cert : cert;
    X509_NAME *name = cert ? X509_get_subject_name(cert) : NULL;
    bool ok =
        cert && key && X509_set_version(cert, X509_VERSION_3) == 1 && set_serial(cert) &&
        X509_gmtime_adj(X509_getm_notBefore(cert), -SLACK_S) && /* clocks differ */
        X509_gmtime_adj(X509_getm_notAfter(cert), subject->valid_s) && X509_set_pubkey(cert, key) == 1 &&
        X509_NAME_add_entry_by_txt(name, "O", MBSTRING_UTF8, (const unsigned char *)"muster", -1, -1, 0) == 1 &&
        (!subject->is_renewable || X509_NAME_add_entry_by_txt(name, "OU", MBSTRING_UTF8,
                                                              (const unsigned char *)RENEWABLE_UNIT, -1, -1, 0) == 1) &&
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8, (const unsigned char *)subject->name, -1, -1, 0) == 1 &&
        X509_set_issuer_name(cert, X509_get_subject_name(issuer)) == 1 && add_extensions(cert, issuer, subject) &&
        X509_sign(cert, ca ? ca->key : key, EVP_sha256()) > 0;
    ERR_clear_error();
    *ret_cert = cert;
    return ok ? MU_OK
              : mu_fail(err, MU_ERR_INVALID, "the certificate of '%s' cannot be made: are the --hosts valid?",
                        subject->name);
}

enum mu_status mu_certificate_sign(const struct mu_certificate_subject *subject, const struct mu_certificate_pair *ca,
                                   EVP_PKEY *key, X509 **ret_cert, struct mu_error *err)
{
    X509 *cert = NULL;
    enum mu_status status = sign(subject, ca, key, &cert, err);
    if (status == MU_OK)
        *ret_cert = cert;
    else
        X509_free(cert);
    return status;
}

EVP_PKEY *mu_certificate_new_key(void)
{
    return EVP_EC_gen("P-256");
}

enum mu_status mu_certificate_make(const struct mu_certificate_subject *subject, const struct mu_certificate_pair *ca,
                                   struct mu_certificate_pair *ret_pair, struct mu_error *err)
{
    ret_pair->key = mu_certificate_new_key();
    return sign(subject, ca, ret_pair->key, &ret_pair->cert, err);
}

/* ---- renewal ---- */

bool mu_certificate_is_renewable(const X509 *cert)
{
    const X509_NAME *name = X509_get_subject_name(cert);
    int at = X509_NAME_get_index_by_NID(name, NID_organizationalUnitName, -1);
    const ASN1_STRING *unit = at < 0 ? NULL : X509_NAME_ENTRY_get_data(X509_NAME_get_entry(name, at));
    return unit && ASN1_STRING_length(unit) == (int)strlen(RENEWABLE_UNIT) &&
           memcmp(ASN1_STRING_get0_data(unit), RENEWABLE_UNIT, strlen(RENEWABLE_UNIT)) == 0;
}

void mu_certificate_span(const X509 *cert, int64_t *ret_begin_s, int64_t *ret_end_s)
{
    struct tm begin, end;
    bool is_told =
        ASN1_TIME_to_tm(X509_get0_notBefore(cert), &begin) == 1 && ASN1_TIME_to_tm(X509_get0_notAfter(cert), &end) == 1;
    *ret_begin_s = is_told ? timegm(&begin) + SLACK_S : 0;
    *ret_end_s = is_told ? timegm(&end) : 0;
}

/* ---- requests ---- */

enum mu_status mu_certificate_ask(EVP_PKEY *key, uint8_t **ret_der, size_t *ret_size_bytes, struct mu_error *err)
{
    unsigned char *der = NULL;
    X509_REQ *request = X509_REQ_new();
    int size_bytes = -1;
    if (request && key && X509_REQ_set_pubkey(request, key) == 1 && X509_REQ_sign(request, key, EVP_sha256()) > 0)
        size_bytes = i2d_X509_REQ(request, &der);
    X509_REQ_free(request);
    uint8_t *copy = size_bytes > 0 ? malloc((size_t)size_bytes) : NULL;
    if (copy)
        memcpy(copy, der, (size_t)size_bytes);
    OPENSSL_free(der);
    if (!copy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no key could be made: no memory or no randomness");
    *ret_der = copy;
    *ret_size_bytes = (size_t)size_bytes;
    return MU_OK;
}

enum mu_status mu_certificate_read_request(const void *der, size_t size_bytes, EVP_PKEY **ret_key, struct mu_error *err)
{
    const unsigned char *at = der;
    char group[32] = "";
    size_t length = 0;
    X509_REQ *request = size_bytes <= REQUEST_BYTES_MAX ? d2i_X509_REQ(NULL, &at, (long)size_bytes) : NULL;
    EVP_PKEY *key = request ? X509_REQ_get_pubkey(request) : NULL;
    bool is_p256 = key && EVP_PKEY_get_base_id(key) == EVP_PKEY_EC &&
                   EVP_PKEY_get_group_name(key, group, sizeof group, &length) == 1 && strcmp(group, "prime256v1") == 0;
    bool is_good = is_p256 && at == (const unsigned char *)der + size_bytes && X509_REQ_verify(request, key) == 1;
    X509_REQ_free(request);
    ERR_clear_error();
    if (is_good) {
        *ret_key = key;
        return MU_OK;
    }
    EVP_PKEY_free(key);
    return mu_fail(err, MU_ERR_INVALID,
                   "certificate_request: it is no PKCS #10 request (DER) that a key of curve P-256 signed");
}

/* ---- files ---- */

static int no_password(char *buffer, int size, int is_write, void *ctx)
{
    (void)buffer, (void)size, (void)is_write, (void)ctx;
    return -1;
}

static FILE *open_private(const char *path, bool *ret_is_open_to_others)
{
    struct stat facts;
    FILE *file = fopen(path, "re");
    *ret_is_open_to_others =
        file && fstat(fileno(file), &facts) == 0 && (facts.st_mode & (S_IRWXG | S_IRWXO) & ~(mode_t)S_IRGRP);
    return file;
}

enum mu_status mu_certificate_read_pair(const char *cert_path, const char *key_path,
                                        struct mu_certificate_pair *ret_pair, struct mu_error *err)
{
    bool is_open_to_others;
    FILE *file = fopen(cert_path, "re");
    if (!file)
        return mu_fail_errno(err, errno, "cannot read the certificate '%s'", cert_path);
    FILE *key_file = open_private(key_path, &is_open_to_others);
    if (!key_file || is_open_to_others) {
        int reason = errno;
        fclose(file);
        if (!key_file)
            return mu_fail_errno(err, reason, "cannot read the private key '%s'", key_path);
        fclose(key_file);
        return mu_fail(err, MU_ERR_DENIED, "others may use the private key '%s': chmod 600 it", key_path);
    }
    EVP_PKEY *key = PEM_read_PrivateKey(key_file, NULL, no_password, NULL);
    X509 *cert = PEM_read_X509(file, NULL, NULL, NULL);
    while (key && cert && X509_check_private_key(cert, key) != 1) {
        X509_free(cert);
        cert = PEM_read_X509(file, NULL, NULL, NULL);
    }
    fclose(file);
    fclose(key_file);
    ERR_clear_error();
    if (key && cert) {
        *ret_pair = (struct mu_certificate_pair){cert, key};
        return MU_OK;
    }
    X509_free(cert);
    EVP_PKEY_free(key);
    return mu_fail(err, MU_ERR_INVALID,
                   "'%s' is not the private key (PEM, without a password) of a certificate in '%s'", key_path,
                   cert_path);
}

/* Under a temporary name first, which no other process uses: whoever reads the final one finds all of it. */
static enum mu_status write_pem(const char *path, const struct mu_certificate_pair *pair, bool is_key,
                                struct mu_error *err)
{
    char temporary[PATH_SIZE];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.%d.tmp", path, (int)getpid()) >= sizeof temporary)
        return mu_fail(err, MU_ERR_INVALID, "the path '%.64s...' is too long", path);
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

enum mu_status mu_certificate_write_pair(const char *cert_path, const char *key_path,
                                         const struct mu_certificate_pair *pair, struct mu_error *err)
{
    enum mu_status status = write_pem(key_path, pair, true, err);
    return status ? status : write_pem(cert_path, pair, false, err);
}

enum mu_status mu_certificate_write(const char *cert_path, X509 *cert, struct mu_error *err)
{
    return write_pem(cert_path, &(struct mu_certificate_pair){.cert = cert}, false, err);
}

char *mu_certificate_to_pem(X509 *cert)
{
    char *text = NULL;
    BIO *bio = BIO_new(BIO_s_mem());
    const char *data = NULL;
    long size_bytes = bio && PEM_write_bio_X509(bio, cert) == 1 ? BIO_get_mem_data(bio, (char **)&data) : 0;
    if (size_bytes > 0)
        text = strndup(data, (size_t)size_bytes);
    BIO_free(bio);
    return text;
}

X509 *mu_certificate_from_pem(const char *pem, size_t size_bytes)
{
    BIO *bio = size_bytes <= INT32_MAX ? BIO_new_mem_buf(pem, (int)size_bytes) : NULL;
    X509 *cert = bio ? PEM_read_bio_X509(bio, NULL, no_password, NULL) : NULL;
    BIO_free(bio);
    ERR_clear_error();
    return cert;
}
