/* Tokens as text: "muster-<id>.<secret>". The id is public and names the token in lists and logs; of the secret, 32
 * random bytes, only its SHA-256 is kept. */
#ifndef MU_COORDINATOR_TOKEN_TEXT_H
#define MU_COORDINATOR_TOKEN_TEXT_H

#include <stdbool.h>
#include <stdint.h>

enum {
    MU_TOKEN_ID_SIZE = 17, /* 16 hexadecimal digits */
    MU_TOKEN_HASH_BYTES = 32,
    MU_TOKEN_TEXT_SIZE = 7 + 16 + 1 + 64 + 1,
};

/* A new one. Whoever holds `text` wipes it. */
void mu_token_text_make(char id[MU_TOKEN_ID_SIZE], char text[MU_TOKEN_TEXT_SIZE], uint8_t hash[MU_TOKEN_HASH_BYTES]);
/* False: it is no token. */
bool mu_token_text_read(const char *text, char id[MU_TOKEN_ID_SIZE], uint8_t hash[MU_TOKEN_HASH_BYTES]);
/* In constant time. */
bool mu_token_hash_is(const uint8_t hash[MU_TOKEN_HASH_BYTES], const uint8_t wanted[MU_TOKEN_HASH_BYTES]);

#endif
