#include "coordinator/http_tls.h"

#include <gnutls/x509.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "coordinator/access.h"

enum { LOOK_US = 1000000, IDENTITY_SIZE = 600, NAMES_MAX = 64 };

/* Shared by the connections that began while these were the newest. */
struct credentials {
    gnutls_certificate_credentials_t of_gnutls;
    unsigned references;
};

struct mu_http_tls {
    struct mu_rpc_tls *files;
    struct mu_access *access;
    struct credentials *newest;
    uint64_t looked_us;
};

struct mu_http_tls_peer {
    struct mu_http_tls *tls;
    struct credentials *credentials;
    gnutls_session_t session;
    bool known, has_certificate; /* known: the handshake is over and its outcome is here */
    char identity[IDENTITY_SIZE];
};

/* ---- credentials ---- */

static void release(struct credentials *credentials)
{
    if (!credentials || --credentials->references > 0)
        return;
    gnutls_certificate_free_credentials(credentials->of_gnutls);
    free(credentials);
}

static gnutls_datum_t datum_of(const char *text)
{
    return (gnutls_datum_t){.data = (unsigned char *)(uintptr_t)text, .size = (unsigned)strlen(text)};
}

static enum mu_status take_files(void *ctx, const char *ca, const char *cert, const char *key, struct mu_error *err)
{
    struct mu_http_tls *tls = ctx;
    const gnutls_datum_t ca_pem = datum_of(ca), cert_pem = datum_of(cert), key_pem = datum_of(key);
    struct credentials *made = calloc(1, sizeof *made);
    if (!made || gnutls_certificate_allocate_credentials(&made->of_gnutls) != 0) {
        free(made);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the TLS of --http");
    }
    made->references = 1;
    int code = gnutls_certificate_set_x509_key_mem(made->of_gnutls, &cert_pem, &key_pem, GNUTLS_X509_FMT_PEM);
    if (code >= 0)
        code = gnutls_certificate_set_x509_trust_mem(made->of_gnutls, &ca_pem, GNUTLS_X509_FMT_PEM);
    if (code < 0) {
        release(made);
        return mu_fail(err, MU_ERR_INVALID, "--http: the TLS files cannot be used: %s", gnutls_strerror(code));
    }
    release(tls->newest);
    tls->newest = made;
    return MU_OK;
}

/* Failures leave what was there in use; the service's own listener has the same files and tells of them. */
static void refresh(struct mu_http_tls *tls)
{
    struct mu_error err;
    bool changed = false;
    uint64_t now_us = mu_clock_mono_us();
    if (now_us - tls->looked_us < LOOK_US)
        return;
    tls->looked_us = now_us;
    if (mu_rpc_tls_refresh(tls->files, &changed, &err) == MU_OK && changed &&
        mu_rpc_tls_use(tls->files, take_files, tls, &err) != MU_OK)
        MU_LOGE("%s; the former ones stay in use", err.text);
    if (mu_access_refresh(tls->access, &changed, &err) != MU_OK)
        MU_LOGD("%s", err.text);
}

enum mu_status mu_http_tls_new(const struct mu_rpc_tls_files *files, const char *deny_path,
                               struct mu_http_tls **ret_tls, struct mu_error *err)
{
    struct mu_http_tls *tls = calloc(1, sizeof *tls);
    if (!tls)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the TLS of --http");
    tls->looked_us = mu_clock_mono_us();
    enum mu_status status = mu_rpc_tls_new(files, false, err, &tls->files);
    if (status || (status = mu_access_new(deny_path, &tls->access, err)) ||
        (status = mu_rpc_tls_use(tls->files, take_files, tls, err))) {
        mu_http_tls_free(tls);
        return status;
    }
    *ret_tls = tls;
    return MU_OK;
}

void mu_http_tls_free(struct mu_http_tls *tls)
{
    if (!tls)
        return;
    release(tls->newest);
    mu_access_free(tls->access);
    mu_rpc_tls_free(tls->files);
    free(tls);
}

enum mu_status mu_http_tls_use(struct mu_http_tls *tls, mu_rpc_tls_use_fn *use, void *ctx, struct mu_error *err)
{
    return mu_rpc_tls_use(tls->files, use, ctx, err);
}

/* ---- connections ---- */

struct mu_http_tls_peer *mu_http_tls_begin(struct mu_http_tls *tls, gnutls_session_t session)
{
    refresh(tls);
    struct mu_http_tls_peer *peer = calloc(1, sizeof *peer);
    if (!peer || gnutls_credentials_set(session, GNUTLS_CRD_CERTIFICATE, tls->newest->of_gnutls) != 0) {
        free(peer);
        return NULL;
    }
    gnutls_certificate_server_set_request(session, GNUTLS_CERT_REQUEST);
    tls->newest->references++;
    peer->tls = tls;
    peer->session = session;
    peer->credentials = tls->newest;
    return peer;
}

void mu_http_tls_end(struct mu_http_tls_peer *peer)
{
    if (peer)
        release(peer->credentials);
    free(peer);
}

/* As the service's own listener names them: the first URI "muster://...", else the first DNS name. */
static void name_peer(struct mu_http_tls_peer *peer, gnutls_x509_crt_t certificate)
{
    for (unsigned i = 0; i < NAMES_MAX; i++) {
        char name[IDENTITY_SIZE];
        size_t size = sizeof name - 1;
        int kind = gnutls_x509_crt_get_subject_alt_name(certificate, i, name, &size, NULL);
        if (kind == GNUTLS_E_REQUESTED_DATA_NOT_AVAILABLE)
            return;
        if (kind < 0 || size >= sizeof name || memchr(name, 0, size))
            continue;
        name[size] = 0;
        if (kind == GNUTLS_SAN_URI && strncmp(name, "muster://", 9) == 0) {
            memcpy(peer->identity, name, size + 1);
            return;
        }
        if (kind == GNUTLS_SAN_DNSNAME && !peer->identity[0] && size + 5 < sizeof peer->identity) {
            memcpy(peer->identity, "dns:", 4);
            memcpy(peer->identity + 4, name, size + 1);
        }
    }
}

/* Not every request: once per connection, after its handshake. */
static void look_at_certificate(struct mu_http_tls_peer *peer)
{
    unsigned count = 0, wrong = 1;
    const gnutls_datum_t *shown = gnutls_certificate_get_peers(peer->session, &count);
    gnutls_typed_vdata_st purpose = {.type = GNUTLS_DT_KEY_PURPOSE_OID,
                                     .data = (unsigned char *)(uintptr_t)GNUTLS_KP_TLS_WWW_CLIENT};
    gnutls_x509_crt_t certificate = NULL;
    peer->known = true;
    if (!shown || count == 0 || gnutls_certificate_verify_peers(peer->session, &purpose, 1, &wrong) != 0 || wrong ||
        gnutls_x509_crt_init(&certificate) != 0)
        return;
    peer->has_certificate = gnutls_x509_crt_import(certificate, shown, GNUTLS_X509_FMT_DER) == 0;
    if (peer->has_certificate)
        name_peer(peer, certificate);
    gnutls_x509_crt_deinit(certificate);
}

bool mu_http_tls_has_certificate(struct mu_http_tls_peer *peer)
{
    if (!peer->known)
        look_at_certificate(peer);
    return peer->has_certificate;
}

enum mu_status mu_http_tls_check(struct mu_http_tls_peer *peer, int method_id, struct mu_error *err)
{
    refresh(peer->tls);
    if (!mu_http_tls_has_certificate(peer))
        return mu_fail(err, MU_ERR_DENIED, "there is no certificate of the cluster's CA");
    return mu_access_check(peer->tls->access, peer->identity, true, method_id, err);
}
