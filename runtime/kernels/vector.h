/* Sixteen floats at a time: conversions, the exponential, sums. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define LANES 16

typedef uint16_t bfloat16_t;

static inline __m512 load_bf16(const bfloat16_t *values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values)), 16));
}

/* Round to nearest even; what is not a number stays none. */
static inline __m256i to_bf16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

static inline void store_bf16(bfloat16_t *out, __m512 x) { _mm256_storeu_si256((__m256i *)out, to_bf16(x)); }

/* e^x to about 2 units in the last place: 2^n times a polynomial of the rest (Cody and Waite's reduction). */
static inline __m512 exponential(__m512 x) {
    /* In this order of operands, what is not a number comes through. */
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-105.0f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* x * sigmoid(x) */
static inline __m512 silu(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* CLIP's activation, x * sigmoid(1.702 x) */
static inline __m512 quick_gelu(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_mul_ps(x, _mm512_set1_ps(-1.702f)))));
}

/* x * (1 + erf(x / sqrt(2))) / 2; erf within 1.5e-7, by formula 7.1.26 of Abramowitz and Stegun. */
static inline __m512 exact_gelu(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f), z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f));
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), one));
    __m512 p = _mm512_set1_ps(1.061405429f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    __m512 rest = _mm512_mul_ps(_mm512_mul_ps(p, t), exponential(_mm512_fnmadd_ps(z, z, _mm512_setzero_ps())));
    /* (1 + erf) / 2 is rest / 2 below 0 and 1 - rest / 2 above */
    __m512 half = _mm512_mul_ps(rest, _mm512_set1_ps(0.5f));
    __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mul_ps(x, _mm512_mask_mov_ps(_mm512_sub_ps(one, half), is_negative, half));
}

static inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}
