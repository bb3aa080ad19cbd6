/* Hashes: XXH3-128 for checksums of data (fast, not adversarial), SHA-256 for identities shown to people, HMAC-SHA-256
 * for hand-shakes. Pure; the incremental contexts are heap objects owned by the caller. */
#ifndef MU_COMMON_HASH_H
#define MU_COMMON_HASH_H

#include <stddef.h>
#include <stdint.h>

struct mu_hash128 {
    uint64_t low, high;
};

struct mu_hash128 mu_xxh3_128(const void *data, size_t size_bytes);
uint64_t mu_xxh3_64(const void *data, size_t size_bytes, uint64_t seed);

struct mu_sha256;
struct mu_sha256 *mu_sha256_new(void);
void mu_sha256_update(struct mu_sha256 *ctx, const void *data, size_t size_bytes);
/* Writes 32 bytes and frees ctx. */
void mu_sha256_final_free(struct mu_sha256 *ctx, uint8_t out[32]);

void mu_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t size_bytes, uint8_t out[32]);

/* Lower-case hexadecimal; out holds 2 * size_bytes + 1. */
void mu_hex(const void *data, size_t size_bytes, char *out);
/* Returns 1 and fills `out` (size_bytes) when `text` is exactly 2 * size_bytes hexadecimal digits, else 0. */
int mu_unhex(const char *text, void *out, size_t size_bytes);

#endif
