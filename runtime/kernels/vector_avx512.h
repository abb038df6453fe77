/* Vectors of AVX-512 (F, BW, VL, DQ, VNNI): 32 registers of 16 floats. AVX512-BF16 is used if the processor has it. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define INSTRUCTION_SET "avx512"
#define LANES 16
#define TILE_ROWS 6    /* with 4 vectors each: 24 of 32 registers hold sums */
#define TILE_VECTORS 4
#define MANY_REGISTERS 1

typedef __m512 floats_t;
typedef __m512i ints_t;
typedef uint16_t bfloat16_t;

static inline __mmask16 lanes_of(int64_t count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

/* ---- floats ---- */

static inline floats_t zeros(void) { return _mm512_setzero_ps(); }
static inline floats_t splat(float x) { return _mm512_set1_ps(x); }
static inline floats_t load(const float *values) { return _mm512_loadu_ps(values); }
static inline void store(float *out, floats_t x) { _mm512_storeu_ps(out, x); }
static inline floats_t load_first(const float *values, int64_t count) {
    return _mm512_maskz_loadu_ps(lanes_of(count), values);
}
static inline floats_t load_first_or(const float *values, int64_t count, float other) {
    return _mm512_mask_loadu_ps(splat(other), lanes_of(count), values);
}
static inline void store_first(float *out, floats_t x, int64_t count) { _mm512_mask_storeu_ps(out, lanes_of(count), x); }
static inline floats_t only_first(floats_t x, int64_t count) { return _mm512_maskz_mov_ps(lanes_of(count), x); }

static inline floats_t add(floats_t a, floats_t b) { return _mm512_add_ps(a, b); }
static inline floats_t subtract(floats_t a, floats_t b) { return _mm512_sub_ps(a, b); }
static inline floats_t times(floats_t a, floats_t b) { return _mm512_mul_ps(a, b); }
static inline floats_t divide(floats_t a, floats_t b) { return _mm512_div_ps(a, b); }
static inline floats_t times_add(floats_t a, floats_t b, floats_t c) { return _mm512_fmadd_ps(a, b, c); }
static inline floats_t minus_times(floats_t c, floats_t a, floats_t b) { return _mm512_fnmadd_ps(a, b, c); }
static inline floats_t smaller(floats_t a, floats_t b) { return _mm512_min_ps(a, b); }
static inline floats_t larger(floats_t a, floats_t b) { return _mm512_max_ps(a, b); }
static inline floats_t magnitude(floats_t x) { return _mm512_abs_ps(x); }
static inline float sum_of(floats_t x) { return _mm512_reduce_add_ps(x); }
static inline float largest_of(floats_t x) { return _mm512_reduce_max_ps(x); }
static inline floats_t nearest(floats_t x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
static inline floats_t times_power_of_two(floats_t x, floats_t n) { return _mm512_scalef_ps(x, n); }
static inline floats_t where_negative(floats_t x, floats_t yes, floats_t no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, zeros(), _CMP_LT_OQ), yes);
}
static inline floats_t where_nan(floats_t x, floats_t yes, floats_t no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), yes);
}

/* ---- bfloat16 and float16 ---- */

static inline floats_t from_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static inline __m256i to_bf16(floats_t x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

static inline floats_t load_bf16(const bfloat16_t *values) { return from_bf16(_mm256_loadu_si256((const __m256i *)values)); }
static inline floats_t load_bf16_first(const bfloat16_t *values, int64_t count) {
    return from_bf16(_mm256_maskz_loadu_epi16(lanes_of(count), values));
}
static inline void store_bf16_first(bfloat16_t *out, floats_t x, int64_t count) {
    _mm256_mask_storeu_epi16(out, lanes_of(count), to_bf16(x));
}

static inline floats_t load_float16(const uint16_t *values) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)values));
}

#ifdef __AVX512BF16__
#define BFLOAT16_PRODUCTS 1 /* of pairs of bfloat16 with pairs of bfloat16 */

typedef __m512bh pairs_t;

static inline pairs_t load_pairs(const bfloat16_t *weights) { return (__m512bh)_mm512_loadu_si512(weights); }
static inline pairs_t splat_pair(int32_t pair) { return (__m512bh)_mm512_set1_epi32(pair); }
static inline floats_t add_pairs(floats_t sums, pairs_t x, pairs_t weights) { return _mm512_dpbf16_ps(sums, x, weights); }
#endif

static inline floats_t add_scaled(floats_t sums, floats_t x, floats_t weights) { return times_add(x, weights, sums); }

/* The first and the second of pairs of bfloat16. */
static inline floats_t first_of_pairs(const bfloat16_t *pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
static inline floats_t second_of_pairs(const bfloat16_t *pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32((int)0xffff0000)));
}

/* ---- integers ---- */

static inline ints_t splat_ints(int32_t x) { return _mm512_set1_epi32(x); }
static inline ints_t to_ints(floats_t x) { return _mm512_cvtps_epi32(x); }
static inline floats_t to_floats(ints_t x) { return _mm512_cvtepi32_ps(x); }
static inline floats_t as_floats(ints_t x) { return _mm512_castsi512_ps(x); }
static inline ints_t add_ints(ints_t a, ints_t b) { return _mm512_add_epi32(a, b); }
static inline int32_t sum_of_ints(ints_t x) { return _mm512_reduce_add_epi32(x); }
static inline void store_int8_first(int8_t *out, ints_t x, int64_t count) {
    _mm_mask_storeu_epi8(out, lanes_of(count), _mm512_cvtsepi32_epi8(x));
}

/* Adds four products of unsigned weights with signed inputs to each sum. It is assembler because GCC 12 otherwise keeps
 * half of a tile's sums in memory, and Clang some of them if it may reorder the instructions. */
static inline ints_t add_products(ints_t sums, ints_t weights, ints_t x) {
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
    return sums;
}

#define INT8_ADDED 128 /* the instruction takes unsigned weights */
#define INT8_PASSES 1
typedef int8_t int8_input_t;

static inline void store_int8_inputs(int8_input_t *out, ints_t x, int64_t count) { store_int8_first(out, x, count); }
static inline ints_t int8_weights(const uint8_t *weights, int pass) { return _mm512_loadu_si512(weights); }
static inline ints_t int8_products(ints_t sums, ints_t weights, ints_t x) { return add_products(sums, weights, x); }

static inline ints_t low_halves(const uint8_t *weights) {
    return _mm512_and_si512(_mm512_loadu_si512(weights), _mm512_set1_epi8(15));
}
static inline ints_t high_halves(const uint8_t *weights) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(weights), 4), _mm512_set1_epi8(15));
}
static inline ints_t int4_products(ints_t sums, ints_t weights, ints_t x) { return add_products(sums, weights, x); }
static inline ints_t int4_start(int32_t offset) { return splat_ints(offset); }
static inline ints_t int4_total(ints_t sums, int32_t offset) { return sums; }
