#include "common/hash.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>

#include "common/status.h"
#include "common/xxh3.h"

struct mu_hash128 mu_xxh3_128(const void *data, size_t size_bytes)
{
    XXH128_hash_t h = XXH3_128bits(data, size_bytes);
    return (struct mu_hash128){.low = h.low64, .high = h.high64};
}

uint64_t mu_xxh3_64(const void *data, size_t size_bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, size_bytes, seed);
}

/* OpenSSL's digests fail only when memory is out or the library is broken: neither leaves anything sensible to continue
 * with. */
struct mu_sha256 *mu_sha256_new(void)
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    MU_ASSERT(ctx && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) == 1);
    return (struct mu_sha256 *)ctx;
}

void mu_sha256_update(struct mu_sha256 *ctx, const void *data, size_t size_bytes)
{
    MU_ASSERT(EVP_DigestUpdate((EVP_MD_CTX *)ctx, data, size_bytes) == 1);
}

void mu_sha256_final_free(struct mu_sha256 *ctx, uint8_t out[32])
{
    unsigned length = 32;
    MU_ASSERT(EVP_DigestFinal_ex((EVP_MD_CTX *)ctx, out, &length) == 1 && length == 32);
    EVP_MD_CTX_free((EVP_MD_CTX *)ctx);
}

void mu_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t size_bytes, uint8_t out[32])
{
    unsigned length = 32;
    MU_ASSERT(HMAC(EVP_sha256(), key, (int)key_bytes, data, size_bytes, out, &length) && length == 32);
}

void mu_hex(const void *data, size_t size_bytes, char *out)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size_bytes; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * size_bytes] = 0;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

int mu_unhex(const char *text, void *out, size_t size_bytes)
{
    uint8_t *bytes = out;
    if (strlen(text) != 2 * size_bytes)
        return 0;
    for (size_t i = 0; i < size_bytes; i++) {
        int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return 0;
        bytes[i] = (uint8_t)(high << 4 | low);
    }
    return 1;
}
