#include "rpc/tls_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PEM_BYTES_MAX = 1 << 20, FILE_COUNT = 3 };

/* What tells one content of a file from the next. */
struct stamp {
    ino_t inode;
    off_t size_bytes;
    struct timespec changed;
};

struct pems {
    char *ca, *cert, *key;
};

struct mu_rpc_tls {
    char *paths[FILE_COUNT];         /* ca, cert, key */
    int file_count;                  /* a stranger has the first one only */
    pthread_mutex_t lock;            /* everything below */
    struct stamp stamps[FILE_COUNT]; /* of what was read last, good or not */
    struct pems pems;                /* the last good ones */
    uint64_t end_s;                  /* of their certificate */
    unsigned generation, handed_out; /* of pems: which one it is, and which one the server's listener has */
};

struct mu_rpc_tls_files mu_rpc_tls_files_from_environment(void)
{
    const char *ca = getenv("MUSTER_TLS_CA"), *cert = getenv("MUSTER_TLS_CERT"), *key = getenv("MUSTER_TLS_KEY");
    return (struct mu_rpc_tls_files){
        .ca = ca && *ca ? ca : NULL, .cert = cert && *cert ? cert : NULL, .key = key && *key ? key : NULL};
}

bool mu_rpc_tls_wanted(const struct mu_rpc_tls_files *files)
{
    return files->ca || files->cert || files->key;
}

/* ---- reading ---- */

static void free_secret(char *text)
{
    if (text)
        OPENSSL_clear_free(text, strlen(text) + 1);
}

static void free_pems(struct pems *pems)
{
    free_secret(pems->ca);
    free_secret(pems->cert);
    free_secret(pems->key);
    *pems = (struct pems){0};
}

static void look(const char *path, struct stamp *ret_stamp)
{
    struct stat facts;
    *ret_stamp = (struct stamp){0};
    if (stat(path, &facts) == 0)
        *ret_stamp = (struct stamp){facts.st_ino, facts.st_size, facts.st_mtim};
}

static enum mu_status read_file(const char *path, bool is_secret, char **ret_text, struct mu_error *err)
{
    struct stat facts;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &facts) != 0) {
        enum mu_status status = mu_fail_errno(err, errno, "TLS: cannot read '%s'", path);
        if (fd >= 0)
            close(fd);
        return status;
    }
    enum mu_status status = MU_OK;
    if (facts.st_size == 0 || facts.st_size > PEM_BYTES_MAX || !S_ISREG(facts.st_mode))
        status = mu_fail(err, MU_ERR_INVALID, "TLS: '%s' is not a PEM file of 1 byte to 1 MiB", path);
    else if (is_secret && (facts.st_mode & (S_IRWXG | S_IRWXO) & ~(mode_t)S_IRGRP))
        status = mu_fail(err, MU_ERR_DENIED, "TLS: others may use the private key '%s' (mode %o): chmod 600 it", path,
                         (unsigned)facts.st_mode & 0777);
    char *text = status ? NULL : OPENSSL_zalloc((size_t)facts.st_size + 1);
    if (!status && (!text || read(fd, text, (size_t)facts.st_size) != facts.st_size))
        status = mu_fail(err, MU_ERR_IO, "TLS: '%s' changed while it was read", path);
    close(fd);
    if (status)
        free_secret(text);
    else
        *ret_text = text;
    return status;
}

static X509 *parse_cert(const char *pem)
{
    BIO *bio = BIO_new_mem_buf(pem, -1);
    X509 *cert = bio ? PEM_read_bio_X509(bio, NULL, NULL, NULL) : NULL;
    BIO_free(bio);
    return cert;
}

static uint64_t end_of(const char *pem)
{
    struct tm tm;
    X509 *cert = parse_cert(pem);
    time_t end_s = cert && ASN1_TIME_to_tm(X509_get0_notAfter(cert), &tm) == 1 ? timegm(&tm) : 0;
    X509_free(cert);
    return end_s > 0 ? (uint64_t)end_s : 0;
}

static int no_password(char *buffer, int size, int is_write, void *ctx)
{
    (void)buffer, (void)size, (void)is_write, (void)ctx;
    return -1;
}

/* The library underneath says nothing of what is wrong with them, so all of it is looked at here. */
static enum mu_status judge_own(const struct mu_rpc_tls *tls, const struct pems *pems, struct mu_error *err)
{
    BIO *bio = BIO_new_mem_buf(pems->key, -1);
    EVP_PKEY *key = bio ? PEM_read_bio_PrivateKey(bio, NULL, no_password, NULL) : NULL;
    X509 *cert = parse_cert(pems->cert);
    enum mu_status status = MU_OK;
    if (!cert)
        status = mu_fail(err, MU_ERR_INVALID, "TLS: '%s' holds no PEM certificate", tls->paths[1]);
    else if (!key)
        status =
            mu_fail(err, MU_ERR_INVALID, "TLS: '%s' holds no private key in PEM without a password", tls->paths[2]);
    else if (X509_check_private_key(cert, key) != 1)
        status = mu_fail(err, MU_ERR_INVALID, "TLS: '%s' is not the private key of the certificate '%s'", tls->paths[2],
                         tls->paths[1]);
    else if (X509_cmp_current_time(X509_get0_notAfter(cert)) <= 0)
        status = mu_fail(err, MU_ERR_INVALID,
                         "TLS: the certificate '%s' has expired: issue a new one (muster cert issue)", tls->paths[1]);
    X509_free(cert);
    EVP_PKEY_free(key);
    BIO_free(bio);
    ERR_clear_error();
    return status;
}

static enum mu_status judge(const struct mu_rpc_tls *tls, const struct pems *pems, struct mu_error *err)
{
    X509 *ca = parse_cert(pems->ca);
    bool has_ca = ca != NULL;
    X509_free(ca);
    ERR_clear_error();
    if (!has_ca)
        return mu_fail(err, MU_ERR_INVALID, "TLS: '%s' holds no PEM certificate of a CA", tls->paths[0]);
    return tls->file_count == FILE_COUNT ? judge_own(tls, pems, err) : MU_OK;
}

/* Under the lock. */
static enum mu_status load(struct mu_rpc_tls *tls, struct mu_error *err)
{
    struct pems pems = {0};
    char **const into[FILE_COUNT] = {&pems.ca, &pems.cert, &pems.key};
    enum mu_status status = MU_OK;
    for (int i = 0; i < tls->file_count; i++)
        look(tls->paths[i], &tls->stamps[i]);
    for (int i = 0; i < tls->file_count && status == MU_OK; i++)
        status = read_file(tls->paths[i], into[i] == &pems.key, into[i], err);
    if (status || (status = judge(tls, &pems, err))) {
        free_pems(&pems);
        return status;
    }
    free_pems(&tls->pems);
    tls->pems = pems;
    tls->end_s = end_of(pems.cert);
    tls->generation++;
    return MU_OK;
}

uint64_t mu_rpc_tls_end_s(struct mu_rpc_tls *tls)
{
    pthread_mutex_lock(&tls->lock);
    uint64_t end_s = tls->end_s;
    pthread_mutex_unlock(&tls->lock);
    return end_s;
}

/* ---- life ---- */

enum mu_status mu_rpc_tls_new(const struct mu_rpc_tls_files *files, bool is_stranger, struct mu_error *err,
                              struct mu_rpc_tls **ret_tls)
{
    if (!files->ca || (!is_stranger && (!files->cert || !files->key)))
        return mu_fail(err, MU_ERR_INVALID,
                       "TLS: the %s is missing: a CA, a certificate and its key are needed together",
                       !files->ca     ? "CA"
                       : !files->cert ? "certificate"
                                      : "key");
    struct mu_rpc_tls *tls = calloc(1, sizeof *tls);
    if (!tls)
        return mu_fail(err, MU_ERR_NO_MEMORY, "TLS: out of memory");
    pthread_mutex_init(&tls->lock, NULL);
    const char *const paths[FILE_COUNT] = {files->ca, files->cert, files->key};
    tls->file_count = is_stranger ? 1 : FILE_COUNT;
    for (int i = 0; i < tls->file_count; i++) {
        tls->paths[i] = strdup(paths[i]);
        MU_ASSERT(tls->paths[i]);
    }
    /* Keys are copied into the memory of libraries, where no single page can be kept out of a dump. */
    prctl(PR_SET_DUMPABLE, 0);
    enum mu_status status = load(tls, err);
    if (status) {
        mu_rpc_tls_free(tls);
        return status;
    }
    *ret_tls = tls;
    return MU_OK;
}

void mu_rpc_tls_free(struct mu_rpc_tls *tls)
{
    if (!tls)
        return;
    free_pems(&tls->pems);
    for (int i = 0; i < FILE_COUNT; i++)
        free(tls->paths[i]);
    pthread_mutex_destroy(&tls->lock);
    free(tls);
}

static bool is_same(const struct stamp *a, const struct stamp *b)
{
    return a->inode == b->inode && a->size_bytes == b->size_bytes && a->changed.tv_sec == b->changed.tv_sec &&
           a->changed.tv_nsec == b->changed.tv_nsec;
}

enum mu_status mu_rpc_tls_refresh(struct mu_rpc_tls *tls, bool *ret_changed, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    *ret_changed = false;
    pthread_mutex_lock(&tls->lock);
    for (int i = 0; i < tls->file_count; i++) {
        struct stamp now;
        look(tls->paths[i], &now);
        *ret_changed = *ret_changed || !is_same(&now, &tls->stamps[i]);
    }
    if (*ret_changed)
        status = load(tls, err);
    pthread_mutex_unlock(&tls->lock);
    return status;
}

enum mu_status mu_rpc_tls_use(struct mu_rpc_tls *tls, mu_rpc_tls_use_fn *use, void *ctx, struct mu_error *err)
{
    pthread_mutex_lock(&tls->lock);
    enum mu_status status = use(ctx, tls->pems.ca, tls->pems.cert, tls->pems.key, err);
    pthread_mutex_unlock(&tls->lock);
    return status;
}

/* ---- credentials ---- */

/* Before each handshake: whether there is something newer than what the listener has. */
static grpc_ssl_certificate_config_reload_status fetch(void *user, grpc_ssl_server_certificate_config **ret_config)
{
    struct mu_rpc_tls *tls = user;
    grpc_ssl_certificate_config_reload_status status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    pthread_mutex_lock(&tls->lock);
    if (tls->handed_out != tls->generation) {
        grpc_ssl_pem_key_cert_pair pair = {tls->pems.key, tls->pems.cert};
        *ret_config = grpc_ssl_server_certificate_config_create(tls->pems.ca, &pair, 1);
        tls->handed_out = tls->generation;
        status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
    }
    pthread_mutex_unlock(&tls->lock);
    return status;
}

grpc_server_credentials *mu_rpc_tls_server_credentials(struct mu_rpc_tls *tls, bool takes_strangers)
{
    return grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            takes_strangers ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY
                            : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY,
            fetch, tls));
}

grpc_channel_credentials *mu_rpc_tls_channel_credentials(struct mu_rpc_tls *tls)
{
    pthread_mutex_lock(&tls->lock);
    grpc_ssl_pem_key_cert_pair pair = {tls->pems.key, tls->pems.cert};
    grpc_channel_credentials *credentials =
        grpc_ssl_credentials_create_ex(tls->pems.ca, tls->file_count == FILE_COUNT ? &pair : NULL, NULL, NULL);
    pthread_mutex_unlock(&tls->lock);
    return credentials;
}
