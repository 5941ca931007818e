/* The recovery of repack/grid.py in plain C: the yardstick of benchmarks/recovery.py.
 *
 * One group of 32 at a time, straight from the definition: try peak levels until one fits, divide
 * for the interval of steps, decode to prove. The inner loops are over 32 values so that the
 * compiler vectorises them; maxima are over bit patterns, which order as the magnitudes do.
 * Tiny peaks (below 2^-110) are not handled; statuses are those of qatpack.repack.grid.Status.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { GROUP = 32 };
enum { ZERO, CERTIFIED, OFF_GRID, NEEDS_NEGATIVE_STEP, NON_FINITE };

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static uint32_t nearest_bf16(uint32_t bits) { return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; }

/* How many of the values decode to their own bits, signs aside. */
static int reproduced(const uint32_t *magnitude, const float *level, float step) {
    int count = 0;
    for (int i = 0; i < GROUP; i++)
        count += nearest_bf16(to_bits(step * level[i])) == magnitude[i];
    return count;
}

static int fits(const uint32_t *magnitude, float per_level) {
    int32_t worst = 0;
    for (int i = 0; i < GROUP; i++) {
        float r = from_bits(magnitude[i] << 16) * per_level;
        int32_t off = to_bits(r - rintf(r)) & 0x7fffffff;
        worst = off > worst ? off : worst;
    }
    return from_bits(worst) <= 0.0625f;
}

static float squared_error(const uint32_t *magnitude, const float *level, float step) {
    float sum = 0;
    for (int i = 0; i < GROUP; i++) {
        float off = step * level[i] - from_bits(magnitude[i] << 16);
        sum += off * off;
    }
    return sum;
}

/* The bfloat16 scale around `mid`, which itself reproduces the group and is no bfloat16. */
static float choose(const uint32_t *magnitude, const float *level, float mid) {
    float below = from_bits(to_bits(mid) & 0xffff0000);
    float above = from_bits(to_bits(below) + 0x10000);
    int lower = reproduced(magnitude, level, below), upper = reproduced(magnitude, level, above);
    if (lower != upper)
        return lower > upper ? below : above;
    return squared_error(magnitude, level, above) < squared_error(magnitude, level, below) ? above
                                                                                           : below;
}

static uint8_t recover_group(const uint16_t *bits, uint8_t *packed, float *scale, int bfloat16) {
    uint32_t magnitude[GROUP];
    float level[GROUP];
    int16_t positive = 0;
    uint16_t negative = 0x8000; /* as unsigned numbers the negative values are the largest */
    for (int i = 0; i < GROUP; i++)
        positive = (int16_t)bits[i] > positive ? (int16_t)bits[i] : positive;
    for (int i = 0; i < GROUP; i++)
        negative = bits[i] > negative ? bits[i] : negative;
    negative &= 0x7fff;
    for (int i = 0; i < GROUP; i++)
        magnitude[i] = bits[i] & 0x7fff;
    uint32_t peak = positive > negative ? positive : negative;
    if (peak >= 0x7f80)
        return NON_FINITE;
    if (peak == 0) {
        memset(packed, 0x88, GROUP / 2);
        *scale = 1;
        return ZERO;
    }
    float value = from_bits(peak << 16);
    int eight = fits(magnitude, 8 / value);
    int plus_8 = from_bits((uint32_t)positive << 16) >= 0.9375f * value;
    int minus_8 = from_bits((uint32_t)negative << 16) >= 0.9375f * value;
    float m = 8;
    if (!eight || plus_8)
        m = fits(magnitude, 4 / value)   ? 4
            : fits(magnitude, 7 / value) ? 7
            : fits(magnitude, 6 / value) ? 6
            : eight                      ? 8
                                         : 5;

    float per_level = m / value;
    int32_t lo_bits = 0, hi_bits = 0x7f800000;
    for (int i = 0; i < GROUP; i++) {
        uint32_t wide = magnitude[i] << 16;
        level[i] = rintf(from_bits(wide) * per_level);
        wide = level[i] == 0 ? peak << 16 : wide;
        float divisor = level[i] == 0 ? m : level[i];
        int32_t lo = to_bits(from_bits(wide - 0x8000) / divisor);
        int32_t hi = to_bits(from_bits(wide + 0x8000) / divisor);
        lo_bits = lo > lo_bits ? lo : lo_bits;
        hi_bits = hi < hi_bits ? hi : hi_bits;
    }
    float lo = from_bits(lo_bits), hi = from_bits(hi_bits), mid = lo + 0.5f * (hi - lo);
    float nearest = from_bits(nearest_bf16(to_bits(mid)) << 16);
    if (reproduced(magnitude, level, nearest) == GROUP)
        *scale = nearest;
    else if (reproduced(magnitude, level, mid) == GROUP)
        *scale = bfloat16 ? choose(magnitude, level, mid) : mid;
    else
        return OFF_GRID;
    if (m == 8 && plus_8)
        return minus_8 ? OFF_GRID : NEEDS_NEGATIVE_STEP;

    uint8_t nibble[GROUP];
    for (int i = 0; i < GROUP; i++) {
        int32_t q = (int32_t)level[i];
        nibble[i] = (uint8_t)(8 + (bits[i] & 0x8000 ? -q : q));
    }
    for (int i = 0; i < GROUP / 2; i++)
        packed[i] = (uint8_t)(nibble[2 * i] | nibble[2 * i + 1] << 4);
    return CERTIFIED;
}

/* bits[groups][32] to packed[groups][16], scale (bfloat16 or float32 bits), status[groups]. */
void recover(const uint16_t *bits, int64_t groups, int bfloat16, uint8_t *packed, void *scale,
             uint8_t *status) {
    for (int64_t g = 0; g < groups; g++) {
        float step = 1;
        status[g] = recover_group(bits + g * GROUP, packed + g * GROUP / 2, &step, bfloat16);
        if (bfloat16)
            ((uint16_t *)scale)[g] = (uint16_t)(to_bits(step) >> 16);
        else
            ((float *)scale)[g] = step;
    }
}
