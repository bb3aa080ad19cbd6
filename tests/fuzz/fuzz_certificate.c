/* links: mu_rpc PkgConfig::OPENSSL */
/* What strangers send to be given a certificate (PKCS #10), and certificates that peers show: a request that is taken
 * gives its key and nothing else, whatever names and extensions it asks for. Input: kind u8 (request or PEM), bytes. */
#include <openssl/x509v3.h>

#include "rpc/certificate.h"
#include "tests/fuzz/fuzz.h"

static const struct mu_certificate_subject subject = {
    .role = "worker", .name = "h7", .valid_s = MU_CERTIFICATE_DAY_S, .is_renewable = true};

/* The CA of all inputs. */
static const struct mu_certificate_pair *the_ca(void)
{
    static struct mu_certificate_pair ca;
    struct mu_error err = {0};
    if (ca.cert)
        return &ca;
    enum mu_status status = mu_certificate_make(
        &(struct mu_certificate_subject){.name = "CA", .valid_s = MU_CERTIFICATE_DAY_S}, NULL, &ca, &err);
    MU_ASSERT(status == MU_OK);
    return &ca;
}

/* One name, ours; no CA; signed by ours; for the key that asked. */
static void judge_signed(X509 *cert, EVP_PKEY *key)
{
    int64_t begin_s, end_s;
    GENERAL_NAMES *names = X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL);
    MU_ASSERT(names && sk_GENERAL_NAME_num(names) == 1);
    const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, 0);
    MU_ASSERT(name->type == GEN_URI && ASN1_STRING_length(name->d.uniformResourceIdentifier) == 18 &&
              memcmp(ASN1_STRING_get0_data(name->d.uniformResourceIdentifier), "muster://worker/h7", 18) == 0);
    GENERAL_NAMES_free(names);
    MU_ASSERT(X509_check_ca(cert) == 0 && X509_verify(cert, the_ca()->key) == 1);
    MU_ASSERT(X509_check_private_key(cert, key) == 1); /* compares the public halves */
    mu_certificate_span(cert, &begin_s, &end_s);
    MU_ASSERT(mu_certificate_is_renewable(cert) && end_s - begin_s == MU_CERTIFICATE_DAY_S);
}

static void try_request(const uint8_t *data, size_t size_bytes)
{
    struct mu_error err = {0};
    EVP_PKEY *key = NULL;
    X509 *cert = NULL;
    enum mu_status status = mu_certificate_read_request(data, size_bytes, &key, &err);
    fuzz_judge(status, &err);
    if (status != MU_OK)
        return;
    status = mu_certificate_sign(&subject, the_ca(), key, &cert, &err);
    MU_ASSERT(status == MU_OK);
    judge_signed(cert, key);
    X509_free(cert);
    EVP_PKEY_free(key);
}

static void try_pem(const uint8_t *data, size_t size_bytes)
{
    int64_t begin_s, end_s;
    X509 *cert = mu_certificate_from_pem((const char *)data, size_bytes);
    if (!cert)
        return;
    mu_certificate_span(cert, &begin_s, &end_s);
    fuzz_accepted += mu_certificate_is_renewable(cert);
    X509_free(cert);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    if (size_bytes == 0)
        return 0;
    uint8_t *copy = malloc(size_bytes); /* of exactly its size, so that a read beyond its end is seen */
    MU_ASSERT(copy);
    size_bytes--;
    memcpy(copy, data + 1, size_bytes);
    if (data[0] % 2 == 0)
        try_request(copy, size_bytes);
    else
        try_pem(copy, size_bytes);
    free(copy);
    return 0;
}
