#include "coordinator/readers.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/status.h"

enum {
    BASIC_CHARACTERS_MAX = 512, /* of base64: names are short */
    SCHEME_BASIC = 5,
    SCHEME_BEARER = 6,
};

struct reader {
    char id[MU_TOKEN_ID_SIZE];
    uint8_t hash[MU_TOKEN_HASH_BYTES];
    uint64_t expires_wall_us;
    struct mu_reader_use use;
};

struct mu_readers {
    pthread_mutex_t lock; /* of what follows */
    struct reader list[MU_READERS_MAX];
    size_t count;
};

struct mu_readers *mu_readers_new(void)
{
    struct mu_readers *readers = calloc(1, sizeof *readers);
    if (readers)
        pthread_mutex_init(&readers->lock, NULL);
    return readers;
}

void mu_readers_free(struct mu_readers *readers)
{
    if (readers)
        pthread_mutex_destroy(&readers->lock);
    free(readers);
}

static struct reader *find(struct mu_readers *readers, const char *id)
{
    for (size_t i = 0; i < readers->count; i++)
        if (strcmp(readers->list[i].id, id) == 0)
            return &readers->list[i];
    return NULL;
}

void mu_readers_add(struct mu_readers *readers, const char *id, const uint8_t hash[MU_TOKEN_HASH_BYTES],
                    uint64_t expires_wall_us)
{
    pthread_mutex_lock(&readers->lock);
    MU_ASSERT(readers->count < MU_READERS_MAX && strlen(id) < MU_TOKEN_ID_SIZE);
    struct reader *reader = &readers->list[readers->count++];
    *reader = (struct reader){.expires_wall_us = expires_wall_us};
    strcpy(reader->id, id);
    memcpy(reader->hash, hash, sizeof reader->hash);
    pthread_mutex_unlock(&readers->lock);
}

void mu_readers_remove(struct mu_readers *readers, const char *id)
{
    pthread_mutex_lock(&readers->lock);
    struct reader *reader = find(readers, id);
    if (reader)
        *reader = readers->list[--readers->count];
    pthread_mutex_unlock(&readers->lock);
}

struct mu_reader_use mu_readers_use(struct mu_readers *readers, const char *id)
{
    pthread_mutex_lock(&readers->lock);
    const struct reader *reader = find(readers, id);
    struct mu_reader_use use = reader ? reader->use : (struct mu_reader_use){0};
    pthread_mutex_unlock(&readers->lock);
    return use;
}

/* ---- what is sent ---- */

static bool is_scheme(const char *header, const char *name, size_t length)
{
    return strncasecmp(header, name, length) == 0 && header[length] == ' ';
}

static const char *skip_spaces(const char *text)
{
    return text + strspn(text, " ");
}

/* What stands behind the name and the first colon. */
static bool read_basic(const char *base64, char id[MU_TOKEN_ID_SIZE], uint8_t hash[MU_TOKEN_HASH_BYTES])
{
    unsigned char text[BASIC_CHARACTERS_MAX / 4 * 3 + 1];
    size_t length = strlen(base64), padding = 0;
    if (length == 0 || length > BASIC_CHARACTERS_MAX || length % 4 != 0)
        return false;
    for (; padding < 2 && base64[length - 1 - padding] == '='; padding++) {
    }
    int bytes = EVP_DecodeBlock(text, (const unsigned char *)base64, (int)length); /* padding becomes zeros */
    text[bytes > 0 ? (size_t)bytes - padding : 0] = 0;
    const char *colon = strchr((const char *)text, ':');
    bool is_token = bytes > 0 && colon && mu_token_text_read(colon + 1, id, hash);
    OPENSSL_cleanse(text, sizeof text);
    return is_token;
}

static bool read_header(const char *header, char id[MU_TOKEN_ID_SIZE], uint8_t hash[MU_TOKEN_HASH_BYTES])
{
    header = skip_spaces(header);
    if (is_scheme(header, "Bearer", SCHEME_BEARER))
        return mu_token_text_read(skip_spaces(header + SCHEME_BEARER), id, hash);
    return is_scheme(header, "Basic", SCHEME_BASIC) && read_basic(skip_spaces(header + SCHEME_BASIC), id, hash);
}

bool mu_readers_admit(struct mu_readers *readers, const char *authorization, uint64_t wall_us)
{
    char id[MU_TOKEN_ID_SIZE];
    uint8_t hash[MU_TOKEN_HASH_BYTES];
    if (!read_header(authorization, id, hash))
        return false;
    pthread_mutex_lock(&readers->lock);
    struct reader *reader = find(readers, id);
    bool is_good = reader && mu_token_hash_is(hash, reader->hash) && wall_us < reader->expires_wall_us;
    if (is_good) {
        reader->use.count++;
        reader->use.wall_us = wall_us;
    }
    pthread_mutex_unlock(&readers->lock);
    return is_good;
}
