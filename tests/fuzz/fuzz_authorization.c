/* links: mu_coordinator */
/* What strangers send as the header Authorization: only who knows the one token there is gets in. Input: the header. */
#include "coordinator/readers.h"
#include "tests/fuzz/fuzz.h"

#define TOKEN "muster-0123456789abcdef.00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    static struct mu_readers *readers;
    char id[MU_TOKEN_ID_SIZE];
    uint8_t hash[MU_TOKEN_HASH_BYTES];
    if (!readers) {
        readers = mu_readers_new();
        MU_ASSERT(readers && mu_token_text_read(TOKEN, id, hash));
        mu_readers_add(readers, id, hash, 2);
    }
    char *header = malloc(size_bytes + 1); /* of exactly its size, so that a read beyond its end is seen */
    MU_ASSERT(header);
    memcpy(header, data, size_bytes);
    header[size_bytes] = 0;
    bool is_admitted = mu_readers_admit(readers, header, 1);
    MU_ASSERT(!is_admitted || strlen(header) >= strlen(TOKEN));
    MU_ASSERT(!mu_readers_admit(readers, header, 2)); /* its time is over */
    fuzz_accepted += is_admitted;
    free(header);
    return 0;
}
