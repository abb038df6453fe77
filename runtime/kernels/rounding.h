/* Rounding of weights to 4 bits. For each group, three scales are tried, and the one with the least error is chosen and
 * fitted, as by `choose_scales` in schemes/arrays.py.
 *
 * The results are the same bits as those of numpy, except sums. */
#pragma once

#include <math.h>

#include "linear.h"

typedef struct {
    int type; /* of the plain weights, FLOAT32 or BFLOAT16 */
    const void *plain;
    int64_t num_in, num_groups; /* of a row; the last group is padded with zeros */
    uint8_t *codes;
    float *scales;
    uint8_t *undecided;
} rounding_t;

/* The nearest number of float16, ties to even. Below 2^-14, numbers of float16 are multiples of 2^-24, and so are
 * floats from 0.5 to 1: adding 0.5 rounds to such a multiple. */
static float to_float16(float x) {
    if (fabsf(x) < 0x1p-14f) return copysignf(fabsf(x) + 0.5f - 0.5f, x);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

static float storable(float scale) {
    scale = fminf(fmaxf(to_float16(scale), -65504.0f), 65504.0f);
    return scale == 0.0f ? 1.0f : scale;
}

static inline floats_t levels_of(const float *weights, float scale) {
    return larger(splat(-8.0f), smaller(splat(7.0f), nearest(divide(load(weights), splat(scale)))));
}

/* Returns false and writes nothing if another order of additions might give another scale, or if no scale fits the
 * weights. The caller must then round this group. */
static bool round_group(const rounding_t *self, int64_t row, int64_t group, uint8_t *codes, float *scale) {
    static const float factors[] = {1.0f, 0.9f, -8.0f / 7.0f};
    _Alignas(64) float x[GROUP], costs[GROUP];
    floats_t highest = zeros(), lowest = zeros(), broken = zeros();
    for (int64_t k = 0; k < GROUP; k += LANES) {
        int64_t first = group * GROUP + k, count = self->num_in - first;
        floats_t some = count > 0 ? load_some(self->plain, self->type, row * self->num_in + first, count) : zeros();
        store(x + k, some);
        highest = larger(highest, some);
        lowest = larger(lowest, subtract(zeros(), some)); /* largest of the negated weights */
        broken = times_add(some, zeros(), broken); /* 0, or NaN if a weight is NaN or infinite */
    }
    float above = largest_of(highest), below = largest_of(lowest), widest = above > below ? above : -below;
    for (int64_t k = GROUP; above == below && k-- > 0;) /* in a tie, the first weight's sign counts */
        if (fabsf(x[k]) == above) widest = x[k];
    if (sum_of(broken) != 0.0f || fabsf(widest) >= 8 * 65520.0f) return false;

    for (int64_t k = 0; k < GROUP; k += LANES) {
        floats_t level = divide(load(x + k), splat(storable(widest / -8)));
        store(costs + k, times_add(level, level, splat(32.0f)));
    }
    float best = INFINITY, second = INFINITY, chosen = 1.0f, before = 0.0f;
    for (int f = 0; f < 3; f++) {
        float tried = storable(widest / -8 * factors[f]);
        if (tried == before) continue;
        before = tried;
        floats_t squares = zeros();
        for (int64_t k = 0; k < GROUP; k += LANES) {
            floats_t error = minus_times(load(x + k), levels_of(x + k, tried), splat(tried));
            squares = times_add(times(error, error), load(costs + k), squares);
        }
        float sum = sum_of(squares), worse = sum > best ? sum : best;
        second = worse < second ? worse : second;
        chosen = sum < best ? tried : chosen;
        best = sum < best ? sum : best;
    }
    /* Different orders of addition change a sum by at most 4e-6 of its value, and by subnormal numbers. */
    if (second <= best + (1e-5f * best + 1e-37f)) return false;
    floats_t products = zeros(), squares = zeros();
    for (int64_t k = 0; k < GROUP; k += LANES) {
        floats_t level = levels_of(x + k, chosen), counted = times(level, load(costs + k));
        products = times_add(counted, load(x + k), products);
        squares = times_add(counted, level, squares);
    }
    if (sum_of(squares) > 0.0f) { /* no product is negative for a positive scale, nor positive for a negative one */
        float fitted = sum_of(products) / sum_of(squares);
        chosen = storable(fitted * (1.0f - 4e-6f));
        if (storable(fitted * (1.0f + 4e-6f)) != chosen) return false;
    }
    int8_t values[GROUP];
    for (int64_t k = 0; k < GROUP; k += LANES)
        store_int8_first(values + k, to_ints(add(levels_of(x + k, chosen), splat(8.0f))), LANES);
    for (int64_t k = 0; k < GROUP; k += 8) { /* eight bytes become four */
        uint64_t eight;
        memcpy(&eight, values + k, sizeof eight);
        eight = (eight | eight >> 4) & 0x00ff00ff00ff00ff;
        eight = (eight | eight >> 8) & 0x0000ffff0000ffff;
        uint32_t four = (uint32_t)(eight | eight >> 16);
        memcpy(codes + k / 2, &four, sizeof four);
    }
    *scale = chosen;
    return true;
}

static void round_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const rounding_t *self = context;
    for (int64_t row = first; row < end; row++)
        for (int64_t group = 0; group < self->num_groups; group++) {
            int64_t at = row * self->num_groups + group;
            self->undecided[at] = !round_group(self, row, group, self->codes + at * (GROUP / 2), self->scales + at);
        }
}
