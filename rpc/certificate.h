/* Certificates that name who may do what (coordinator/access.h): made, asked for, signed. Keys are P-256; their files
 * are never readable by others. No threads. OpenSSL's objects belong to the caller. */
#ifndef MU_RPC_CERTIFICATE_H
#define MU_RPC_CERTIFICATE_H

#include <openssl/x509.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

#define MU_CERTIFICATE_SCHEME "muster://"
enum { MU_CERTIFICATE_NAME_LONGEST = 63, MU_CERTIFICATE_DAY_S = 86400 };

struct mu_certificate_pair {
    X509 *cert;
    EVP_PKEY *key;
};
void mu_certificate_pair_free(struct mu_certificate_pair *pair);

/* Who a certificate is for. Names and hosts are of a plain alphabet: letters, digits, "._-"; hosts also ":*". */
struct mu_certificate_subject {
    const char *role, *name; /* role NULL: a CA */
    const char *hosts;       /* of a coordinator, "a,10.0.0.1"; else NULL */
    uint32_t valid_s;
    bool is_renewable; /* its owner may have another one by showing it: a mark in the subject says so */
};

/* A new key, and its certificate. ca NULL: signs itself. On failure what was made is in *ret_pair, too. */
enum mu_status mu_certificate_make(const struct mu_certificate_subject *subject, const struct mu_certificate_pair *ca,
                                   struct mu_certificate_pair *ret_pair, struct mu_error *err) MU_WARN_UNUSED;
/* A certificate for a key of which only the public half is here. */
enum mu_status mu_certificate_sign(const struct mu_certificate_subject *subject, const struct mu_certificate_pair *ca,
                                   EVP_PKEY *key, X509 **ret_cert, struct mu_error *err) MU_WARN_UNUSED;

bool mu_certificate_is_renewable(const X509 *cert);
/* What its maker meant by valid_s, in seconds since 1970; 0, 0 where the certificate cannot be read so. */
void mu_certificate_span(const X509 *cert, int64_t *ret_begin_s, int64_t *ret_end_s);

/* PKCS #10: what the owner of a key, NULL: of none, sends to be given a certificate for it (*ret_der is from malloc).
 */
enum mu_status mu_certificate_ask(EVP_PKEY *key, uint8_t **ret_der, size_t *ret_size_bytes,
                                  struct mu_error *err) MU_WARN_UNUSED;
EVP_PKEY *mu_certificate_new_key(void); /* NULL: no memory, or no randomness */
/* The public key of such a request, whose sender has proved that he has the other half. What else it says is not
 * looked at. */
enum mu_status mu_certificate_read_request(const void *der, size_t size_bytes, EVP_PKEY **ret_key,
                                           struct mu_error *err) MU_WARN_UNUSED;

/* The certificate among those of `cert_path` that belongs to the private key of `key_path`. */
enum mu_status mu_certificate_read_pair(const char *cert_path, const char *key_path,
                                        struct mu_certificate_pair *ret_pair, struct mu_error *err) MU_WARN_UNUSED;
/* Both files, each whole or not at all. The key first: a program that reads them in between refuses them and keeps the
 * former ones. */
enum mu_status mu_certificate_write_pair(const char *cert_path, const char *key_path,
                                         const struct mu_certificate_pair *pair, struct mu_error *err) MU_WARN_UNUSED;
/* Another certificate for the key that is there: one file takes the place of another, and no crash leaves a pair that
 * does not fit together. */
enum mu_status mu_certificate_write(const char *cert_path, X509 *cert, struct mu_error *err) MU_WARN_UNUSED;

/* From malloc. NULL: no memory. */
char *mu_certificate_to_pem(X509 *cert);
X509 *mu_certificate_from_pem(const char *pem, size_t size_bytes); /* NULL: it is none */

#endif
