#include "kernels/exact_sum.h"

#include <math.h>
#include <string.h>

enum {
    DIGIT_BITS = 32,
    LOWEST_EXPONENT = -1074,      /* weight of bit 0 */
    MANTISSA_BITS = 52,           /* stored bits of a double */
    PENDING_MAX = 1 << 29,        /* additions that cannot overflow a carried digit: 2^29 * 2^33 < 2^63 */
    TOP = MU_EXACT_SUM_DIGITS - 1 /* the only digit that keeps a sign after carrying */
};

void mu_exact_sum_init(struct mu_exact_sum *sum)
{
    memset(sum, 0, sizeof *sum);
}

/* Brings every digit but the top one into [0, 2^32). */
static void carry(struct mu_exact_sum *sum)
{
    int64_t carried = 0;
    for (int i = 0; i < TOP; i++) {
        int64_t value = sum->digits[i] + carried;
        int64_t low = value & 0xffffffff;
        carried = (value - low) / ((int64_t)1 << DIGIT_BITS);
        sum->digits[i] = low;
    }
    sum->digits[TOP] += carried;
    sum->pending = 0;
}

void mu_exact_sum_add(struct mu_exact_sum *sum, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint64_t mantissa = bits & (((uint64_t)1 << MANTISSA_BITS) - 1);
    uint32_t exponent = (uint32_t)(bits >> MANTISSA_BITS) & 0x7ff;
    bool negative = bits >> 63;
    if (exponent == 0x7ff) {
        sum->flags |= mantissa ? MU_EXACT_NAN : negative ? MU_EXACT_MINUS_INF : MU_EXACT_PLUS_INF;
        return;
    }
    if (exponent)
        mantissa |= (uint64_t)1 << MANTISSA_BITS;
    else
        exponent = 1;
    uint32_t position = exponent - 1, digit = position / DIGIT_BITS, shift = position % DIGIT_BITS;
    uint64_t low = (mantissa & 0xffffffff) << shift, high = (mantissa >> 32) << shift;
    int64_t parts[3] = {(int64_t)(low & 0xffffffff), (int64_t)((low >> 32) + (high & 0xffffffff)),
                        (int64_t)(high >> 32)};
    for (int i = 0; i < 3; i++)
        sum->digits[digit + (uint32_t)i] += negative ? -parts[i] : parts[i];
    if (++sum->pending == PENDING_MAX)
        carry(sum);
}

void mu_exact_sum_merge(struct mu_exact_sum *sum, const struct mu_exact_sum *other)
{
    struct mu_exact_sum copy = *other;
    carry(&copy);
    carry(sum);
    for (int i = 0; i < MU_EXACT_SUM_DIGITS; i++)
        sum->digits[i] += copy.digits[i];
    sum->flags |= other->flags;
    carry(sum);
}

bool mu_exact_sum_finite(const struct mu_exact_sum *sum)
{
    return sum->flags == 0;
}

/* Bits [position, position + 63] of a carried, non-negative sum; positions below 0 read as 0. */
static uint64_t bits_at(const struct mu_exact_sum *sum, int position)
{
    uint64_t value = 0;
    for (int bit = 0; bit < 64; bit++) {
        int p = position + bit;
        if (p < 0 || p >= MU_EXACT_SUM_DIGITS * DIGIT_BITS)
            continue;
        value |= ((uint64_t)(sum->digits[p / DIGIT_BITS] >> (p % DIGIT_BITS)) & 1) << bit;
    }
    return value;
}

static bool any_below(const struct mu_exact_sum *sum, int position)
{
    for (int p = 0; p < position; p += DIGIT_BITS) {
        uint64_t mask = position - p >= DIGIT_BITS ? 0xffffffffu : ((uint64_t)1 << (position - p)) - 1;
        if ((uint64_t)sum->digits[p / DIGIT_BITS] & mask)
            return true;
    }
    return false;
}

double mu_exact_sum_round(const struct mu_exact_sum *sum)
{
    bool both = (sum->flags & MU_EXACT_PLUS_INF) && (sum->flags & MU_EXACT_MINUS_INF);
    if ((sum->flags & MU_EXACT_NAN) || both)
        return (double)NAN;
    if (sum->flags)
        return sum->flags & MU_EXACT_PLUS_INF ? (double)INFINITY : -(double)INFINITY;
    struct mu_exact_sum value = *sum;
    carry(&value);
    bool negative = value.digits[TOP] < 0;
    if (negative) {
        for (int i = 0; i < MU_EXACT_SUM_DIGITS; i++)
            value.digits[i] = -value.digits[i];
        carry(&value);
    }
    int digit = TOP;
    while (digit >= 0 && value.digits[digit] == 0)
        digit--;
    if (digit < 0)
        return 0.0;
    int top_bit = digit * DIGIT_BITS + 63 - __builtin_clzll((uint64_t)value.digits[digit]);
    int lowest = top_bit > MANTISSA_BITS ? top_bit - MANTISSA_BITS : 0; /* weight of the result's last bit */
    uint64_t mantissa = bits_at(&value, lowest) & (((uint64_t)2 << MANTISSA_BITS) - 1);
    if (lowest > 0 && (bits_at(&value, lowest - 1) & 1) && ((mantissa & 1) || any_below(&value, lowest - 1)))
        mantissa++;
    double result = ldexp((double)mantissa, lowest + LOWEST_EXPONENT);
    return negative ? -result : result;
}

void mu_exact_sum_pack(const struct mu_exact_sum *sum, uint8_t out[MU_EXACT_SUM_BYTES])
{
    struct mu_exact_sum value = *sum;
    carry(&value);
    MU_ASSERT(value.digits[TOP] >= INT32_MIN && value.digits[TOP] <= INT32_MAX);
    for (int i = 0; i <= MU_EXACT_SUM_DIGITS; i++) {
        uint32_t word = i < MU_EXACT_SUM_DIGITS ? (uint32_t)value.digits[i] : value.flags;
        for (int byte = 0; byte < 4; byte++)
            out[i * 4 + byte] = (uint8_t)(word >> (8 * byte));
    }
}

enum mu_status mu_exact_sum_unpack(const uint8_t bytes[MU_EXACT_SUM_BYTES], struct mu_exact_sum *ret_sum)
{
    struct mu_exact_sum sum;
    mu_exact_sum_init(&sum);
    for (int i = 0; i <= MU_EXACT_SUM_DIGITS; i++) {
        uint32_t word = 0;
        for (int byte = 0; byte < 4; byte++)
            word |= (uint32_t)bytes[i * 4 + byte] << (8 * byte);
        if (i < TOP)
            sum.digits[i] = word;
        else if (i == TOP)
            sum.digits[i] = (int32_t)word;
        else
            sum.flags = word;
    }
    if (sum.flags & ~(uint32_t)(MU_EXACT_NAN | MU_EXACT_PLUS_INF | MU_EXACT_MINUS_INF))
        return MU_ERR_CORRUPT;
    *ret_sum = sum;
    return MU_OK;
}
