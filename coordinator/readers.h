/* Who may read over HTTP by a token: what the listener's thread looks at of the tokens that the core thread makes,
 * keeps and ends (tokens.h). Any thread.
 *
 * Programs send "Authorization: Bearer TOKEN"; browsers ask their user, and send "Basic base64(NAME:TOKEN)" with any
 * name. */
#ifndef MU_COORDINATOR_READERS_H
#define MU_COORDINATOR_READERS_H

#include "coordinator/token_text.h"

enum { MU_READERS_MAX = 1024 };

struct mu_readers;
struct mu_readers *mu_readers_new(void);          /* NULL: no memory */
void mu_readers_free(struct mu_readers *readers); /* NULL is fine */

/* There must be fewer than MU_READERS_MAX. Wall time in microseconds. */
void mu_readers_add(struct mu_readers *readers, const char *id, const uint8_t hash[MU_TOKEN_HASH_BYTES],
                    uint64_t expires_wall_us);
void mu_readers_remove(struct mu_readers *readers, const char *id);

/* Whether the value of that header proves a token that is good now. Secrets are compared in constant time. */
bool mu_readers_admit(struct mu_readers *readers, const char *authorization, uint64_t wall_us);

/* How often that token was admitted here, and when last; zeros: never. */
struct mu_reader_use {
    uint32_t count;
    uint64_t wall_us;
};
struct mu_reader_use mu_readers_use(struct mu_readers *readers, const char *id);

#endif
