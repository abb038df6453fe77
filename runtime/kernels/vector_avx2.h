/* Vectors of AVX2 with FMA and F16C: 16 registers of 8 floats. AVX-VNNI is used if the processor has it. */
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INSTRUCTION_SET "avx2"
#define LANES 8
#define TILE_ROWS 6    /* with 2 vectors each: 12 of 16 registers hold sums */
#define TILE_VECTORS 2
#define MANY_REGISTERS 0

typedef __m256 floats_t;
typedef __m256i ints_t;
typedef uint16_t bfloat16_t;

static inline __m256i lanes_of(int64_t count) {
    static const int32_t ends[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(ends + LANES - (count < LANES ? count : LANES)));
}

/* ---- floats ---- */

static inline floats_t zeros(void) { return _mm256_setzero_ps(); }
static inline floats_t splat(float x) { return _mm256_set1_ps(x); }
static inline floats_t load(const float *values) { return _mm256_loadu_ps(values); }
static inline void store(float *out, floats_t x) { _mm256_storeu_ps(out, x); }
static inline floats_t load_first(const float *values, int64_t count) { return _mm256_maskload_ps(values, lanes_of(count)); }
static inline floats_t load_first_or(const float *values, int64_t count, float other) {
    return _mm256_blendv_ps(splat(other), load_first(values, count), _mm256_castsi256_ps(lanes_of(count)));
}
/* The branch matters: a masked store takes ten times as long on AMD Zen 3. */
static inline void store_first(float *out, floats_t x, int64_t count) {
    if (count >= LANES) store(out, x);
    else _mm256_maskstore_ps(out, lanes_of(count), x);
}
static inline floats_t only_first(floats_t x, int64_t count) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(lanes_of(count)));
}

static inline floats_t add(floats_t a, floats_t b) { return _mm256_add_ps(a, b); }
static inline floats_t subtract(floats_t a, floats_t b) { return _mm256_sub_ps(a, b); }
static inline floats_t times(floats_t a, floats_t b) { return _mm256_mul_ps(a, b); }
static inline floats_t divide(floats_t a, floats_t b) { return _mm256_div_ps(a, b); }
static inline floats_t times_add(floats_t a, floats_t b, floats_t c) { return _mm256_fmadd_ps(a, b, c); }
static inline floats_t minus_times(floats_t c, floats_t a, floats_t b) { return _mm256_fnmadd_ps(a, b, c); }
static inline floats_t smaller(floats_t a, floats_t b) { return _mm256_min_ps(a, b); }
static inline floats_t larger(floats_t a, floats_t b) { return _mm256_max_ps(a, b); }
static inline floats_t magnitude(floats_t x) { return _mm256_andnot_ps(splat(-0.0f), x); }
static inline float sum_of(floats_t x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float largest_of(floats_t x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
static inline floats_t nearest(floats_t x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* n is a whole number in -252..254. Two steps, because 2^n itself may be outside the range of floats. */
static inline floats_t times_power_of_two(floats_t x, floats_t n) {
    __m256i power = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(power, 1), bias = _mm256_set1_epi32(127);
    __m256i rest = _mm256_sub_epi32(power, half);
    floats_t first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    floats_t second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return times(times(x, first), second);
}
static inline floats_t where_negative(floats_t x, floats_t yes, floats_t no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, zeros(), _CMP_LT_OQ));
}
static inline floats_t where_nan(floats_t x, floats_t yes, floats_t no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* ---- bfloat16 and float16 ---- */

static inline floats_t load_bf16(const bfloat16_t *values) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values)), 16));
}
static inline floats_t load_bf16_first(const bfloat16_t *values, int64_t count) {
    if (count >= LANES) return load_bf16(values);
    bfloat16_t some[LANES] = {0};
    copy_few(some, values, count * sizeof *some);
    return load_bf16(some);
}
static inline void store_bf16_first(bfloat16_t *out, floats_t x, int64_t count) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    floats_t kept = where_nan(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_castsi256_ps(rounded));
    __m256i halves = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    if (count < LANES) copy_few(out, &packed, count * sizeof *out);
    else memcpy(out, &packed, sizeof packed);
}

static inline floats_t load_float16(const uint16_t *values) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)values));
}

/* times_add in assembler: if AVX-VNNI is enabled, GCC 12 otherwise keeps sums of a tile in memory, which takes
 * twice as long. */
static inline floats_t add_scaled(floats_t sums, floats_t x, floats_t weights) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(x), "x"(weights));
    return sums;
}

/* The first and the second of pairs of bfloat16. */
static inline floats_t first_of_pairs(const bfloat16_t *pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)pairs), 16));
}
static inline floats_t second_of_pairs(const bfloat16_t *pairs) {
    __m256i bits = _mm256_loadu_si256((const __m256i *)pairs);
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000)));
}

/* ---- integers ---- */

static inline ints_t splat_ints(int32_t x) { return _mm256_set1_epi32(x); }
static inline ints_t to_ints(floats_t x) { return _mm256_cvtps_epi32(x); }
static inline floats_t to_floats(ints_t x) { return _mm256_cvtepi32_ps(x); }
static inline floats_t as_floats(ints_t x) { return _mm256_castsi256_ps(x); }
static inline ints_t add_ints(ints_t a, ints_t b) { return _mm256_add_epi32(a, b); }
static inline int32_t sum_of_ints(ints_t x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
static inline __m128i to_int16(ints_t x) {
    return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
static inline void store_int8_first(int8_t *out, ints_t x, int64_t count) {
    __m128i half = to_int16(x), packed = _mm_packs_epi16(half, half);
    if (count < LANES) copy_few(out, &packed, count);
    else memcpy(out, &packed, LANES);
}
static inline ints_t low_halves(const uint8_t *weights) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)weights), _mm256_set1_epi8(15));
}
static inline ints_t high_halves(const uint8_t *weights) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)weights);
    return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
}

#define INT8_ADDED 128 /* the instructions take unsigned weights */

/* Multiplication and addition are in one assembler statement, because GCC 12 otherwise keeps half of a tile's sums in
 * memory, and Clang some of them if it may reorder the instructions. */

#ifdef __AVXVNNI__

static inline ints_t add_products(ints_t sums, ints_t weights, ints_t x) {
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(x));
    return sums;
}

#define INT8_PASSES 1
typedef int8_t int8_input_t;

static inline void store_int8_inputs(int8_input_t *out, ints_t x, int64_t count) { store_int8_first(out, x, count); }
static inline ints_t int8_weights(const uint8_t *weights, int pass) {
    return _mm256_loadu_si256((const __m256i *)weights);
}
static inline ints_t int8_products(ints_t sums, ints_t weights, ints_t x) { return add_products(sums, weights, x); }
static inline ints_t int4_products(ints_t sums, ints_t weights, ints_t x) { return add_products(sums, weights, x); }
static inline ints_t int4_start(int32_t offset) { return splat_ints(offset); }
static inline ints_t int4_total(ints_t sums, int32_t offset) { return sums; }

#else

/* int8: AVX2 cannot multiply bytes without saturation, so products are computed in 16 bits. The first pass takes inputs
 * 0 and 2 of four, the second pass inputs 1 and 3; inputs are stored in that order. `count` is a multiple of 4. */
#define INT8_PASSES 2
typedef int16_t int8_input_t;

static inline void store_int8_inputs(int8_input_t *out, ints_t x, int64_t count) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    __m128i packed = _mm_shuffle_epi8(to_int16(x), order);
    if (count < LANES) copy_few(out, &packed, count * sizeof *out);
    else memcpy(out, &packed, sizeof packed);
}
static inline ints_t int8_weights(const uint8_t *weights, int pass) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)weights);
    return pass ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
}
static inline ints_t int8_products(ints_t sums, ints_t weights, ints_t x) {
    __m256i products;
    asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weights), "x"(x));
    return sums;
}

/* int4: two products are at most 2 * 15 * 127. A group of 32 inputs adds 8 such pairs to a sum, which fits
 * into 16 bits. */
static inline ints_t int4_products(ints_t sums, ints_t weights, ints_t x) {
    __m256i products;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weights), "x"(x));
    return sums;
}
static inline ints_t int4_start(int32_t offset) { return splat_ints(0); }
static inline ints_t int4_total(ints_t sums, int32_t offset) {
    return add_ints(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)), splat_ints(offset));
}

#endif
