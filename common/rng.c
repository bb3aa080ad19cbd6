#include "common/rng.h"

#include "common/status.h"

void mu_philox4x32(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4])
{
    uint32_t k0 = key[0], k1 = key[1];
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

uint64_t mu_splitmix64(uint64_t *state)
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t feistel(const uint32_t key[2], uint32_t epoch_low, uint64_t value, unsigned half_bits)
{
    uint64_t mask = (1ull << half_bits) - 1;
    uint64_t left = value >> half_bits, right = value & mask;
    for (uint32_t round = 0; round < 6; round++) {
        uint32_t counter[4] = {(uint32_t)right, (uint32_t)(right >> 32), epoch_low, round};
        uint32_t random[4];
        mu_philox4x32(key, counter, random);
        uint64_t mixed = left ^ (((uint64_t)random[1] << 32 | random[0]) & mask);
        left = right;
        right = mixed;
    }
    return left << half_bits | right;
}

uint64_t mu_permute(uint64_t seed, uint64_t epoch, uint64_t index, uint64_t count)
{
    MU_ASSERT(count >= 1 && index < count);
    unsigned half_bits = 1;
    while (half_bits < 32 && (1ull << (2 * half_bits)) < count)
        half_bits++;
    uint32_t key[2] = {(uint32_t)seed ^ (uint32_t)(epoch >> 32), (uint32_t)(seed >> 32)};
    uint64_t value = index;
    do
        value = feistel(key, (uint32_t)epoch, value, half_bits);
    while (value >= count);
    return value;
}
