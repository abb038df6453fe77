/* Vectors of LANES floats: operations of the instruction set, and functions that are the same for all of them.
 *
 * One header vector_*.h describes each instruction set: its registers, the size of a tile of sums, and how products of
 * narrow numbers are added. `larger` and `smaller` return their second operand if either operand is NaN.
 */
#pragma once

#include <stdint.h>
#include <string.h>

/* Copies fewer than 16 bytes without a function call. With a call in a loop, Clang keeps the loop's
 * vectors in memory. */
static inline void copy_few(void *out, const void *values, int64_t num_bytes) {
    char *to = out;
    const char *from = values;
    if (num_bytes & 8) memcpy(to, from, 8), to += 8, from += 8;
    if (num_bytes & 4) memcpy(to, from, 4), to += 4, from += 4;
    if (num_bytes & 2) memcpy(to, from, 2), to += 2, from += 2;
    if (num_bytes & 1) memcpy(to, from, 1);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "vector_neon.h"
#else
#error "the kernels need AVX2 with FMA and F16C, AVX-512 (F, BW, VL, DQ, VNNI), or NEON of AArch64"
#endif

/* e^x to about 2 units in the last place: 2^n times a polynomial of the remainder (Cody and Waite's range
 * reduction). */
static inline floats_t exponential(floats_t x) {
    /* With this order of operands, NaN is passed on. */
    x = smaller(splat(89.0f), larger(splat(-105.0f), x));
    floats_t n = nearest(times(x, splat(1.44269504f)));
    floats_t r = minus_times(x, n, splat(0.693359375f));
    r = minus_times(r, n, splat(-2.12194440e-4f));
    floats_t p = splat(1.0f / 720);
    p = times_add(p, r, splat(1.0f / 120));
    p = times_add(p, r, splat(1.0f / 24));
    p = times_add(p, r, splat(1.0f / 6));
    p = times_add(p, r, splat(0.5f));
    p = times_add(p, r, splat(1.0f));
    p = times_add(p, r, splat(1.0f));
    return times_power_of_two(p, n);
}

/* x * sigmoid(x) */
static inline floats_t silu(floats_t x) { return divide(x, add(splat(1.0f), exponential(subtract(zeros(), x)))); }

/* CLIP's activation, x * sigmoid(1.702 x) */
static inline floats_t quick_gelu(floats_t x) {
    return divide(x, add(splat(1.0f), exponential(times(x, splat(-1.702f)))));
}

/* x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) */
static inline floats_t tanh_gelu(floats_t x) {
    floats_t factor = times_add(times(x, x), splat(-0.07135482f), splat(-1.5957691f));
    return divide(x, add(splat(1.0f), exponential(times(x, factor))));
}

/* cap * tanh(x / cap) */
static inline floats_t capped(floats_t x, float cap) {
    floats_t one_more = add(splat(1.0f), exponential(times(x, splat(2.0f / cap))));
    return subtract(splat(cap), divide(splat(2.0f * cap), one_more));
}

/* x * (1 + erf(x / sqrt(2))) / 2; erf within 1.5e-7, by formula 7.1.26 of Abramowitz and Stegun. */
static inline floats_t exact_gelu(floats_t x) {
    floats_t one = splat(1.0f), z = times(magnitude(x), splat(0.70710678f));
    floats_t t = divide(one, times_add(z, splat(0.3275911f), one));
    floats_t p = splat(1.061405429f);
    p = times_add(p, t, splat(-1.453152027f));
    p = times_add(p, t, splat(1.421413741f));
    p = times_add(p, t, splat(-0.284496736f));
    p = times_add(p, t, splat(0.254829592f));
    floats_t rest = times(times(p, t), exponential(minus_times(zeros(), z, z)));
    /* (1 + erf) / 2 is rest / 2 below 0 and 1 - rest / 2 above */
    floats_t half = times(rest, splat(0.5f));
    return times(x, where_negative(x, half, subtract(one, half)));
}
