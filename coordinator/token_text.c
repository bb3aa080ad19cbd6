#include "coordinator/token_text.h"

#include <openssl/crypto.h>
#include <stdio.h>
#include <string.h>

#include "common/hash.h"
#include "common/id.h"

#define WORD "muster-"
enum { WORD_LENGTH = sizeof WORD - 1, ID_LENGTH = MU_TOKEN_ID_SIZE - 1, SECRET_BYTES = 32 };

static void hash_secret(const uint8_t secret[SECRET_BYTES], uint8_t hash[MU_TOKEN_HASH_BYTES])
{
    struct mu_sha256 *sha = mu_sha256_new();
    mu_sha256_update(sha, secret, SECRET_BYTES);
    mu_sha256_final_free(sha, hash);
}

void mu_token_text_make(char id[MU_TOKEN_ID_SIZE], char text[MU_TOKEN_TEXT_SIZE], uint8_t hash[MU_TOKEN_HASH_BYTES])
{
    uint8_t secret[SECRET_BYTES];
    char hex[2 * SECRET_BYTES + 1];
    snprintf(id, MU_TOKEN_ID_SIZE, "%016llx", (unsigned long long)mu_id_random().low);
    for (int i = 0; i < SECRET_BYTES; i += 16) {
        struct mu_id random = mu_id_random();
        memcpy(secret + i, &random.high, 8);
        memcpy(secret + i + 8, &random.low, 8);
    }
    mu_hex(secret, sizeof secret, hex);
    snprintf(text, MU_TOKEN_TEXT_SIZE, WORD "%s.%s", id, hex);
    hash_secret(secret, hash);
    OPENSSL_cleanse(secret, sizeof secret);
    OPENSSL_cleanse(hex, sizeof hex);
}

bool mu_token_text_read(const char *text, char id[MU_TOKEN_ID_SIZE], uint8_t hash[MU_TOKEN_HASH_BYTES])
{
    uint8_t secret[SECRET_BYTES] = {0};
    if (strncmp(text, WORD, WORD_LENGTH) != 0 || strlen(text) != MU_TOKEN_TEXT_SIZE - 1 ||
        text[WORD_LENGTH + ID_LENGTH] != '.')
        return false;
    memcpy(id, text + WORD_LENGTH, ID_LENGTH);
    id[ID_LENGTH] = 0;
    bool is_hex = mu_unhex(text + WORD_LENGTH + ID_LENGTH + 1, secret, sizeof secret);
    hash_secret(secret, hash);
    OPENSSL_cleanse(secret, sizeof secret);
    return is_hex;
}

bool mu_token_hash_is(const uint8_t hash[MU_TOKEN_HASH_BYTES], const uint8_t wanted[MU_TOKEN_HASH_BYTES])
{
    return CRYPTO_memcmp(hash, wanted, MU_TOKEN_HASH_BYTES) == 0;
}
