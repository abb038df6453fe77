/* Vectors of NEON on AArch64: 32 registers of 4 floats. Dot products (DotProd), matrix products of bytes (I8MM) and
 * BF16 are used if the processor has them. */
#pragma once

/* sdot, smmla and bfdot are assembler: GCC 12 has their intrinsics only with -march, and zig accepts only -mcpu. */
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define INSTRUCTION_SET "neon"
#define LANES 4
#define TILE_ROWS 6    /* with 4 vectors each: 24 of 32 registers hold sums */
#define TILE_VECTORS 4
#define MANY_REGISTERS 0

typedef float32x4_t floats_t;
typedef int32x4_t ints_t;
#define bfloat16_t uint16_t /* arm_neon.h has a type of this name, which other numbers cannot be converted to */

static inline uint32x4_t lanes_of(int64_t count) {
    static const int32_t numbers[LANES] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(numbers), vdupq_n_s32(count < LANES ? (int32_t)count : LANES));
}

/* ---- floats ---- */

static inline floats_t zeros(void) { return vdupq_n_f32(0.0f); }
static inline floats_t splat(float x) { return vdupq_n_f32(x); }
static inline floats_t load(const float *values) { return vld1q_f32(values); }
static inline void store(float *out, floats_t x) { vst1q_f32(out, x); }
static inline floats_t load_first(const float *values, int64_t count) {
    if (count >= LANES) return load(values);
    float some[LANES] = {0};
    copy_few(some, values, count * sizeof *some);
    return load(some);
}
static inline floats_t load_first_or(const float *values, int64_t count, float other) {
    return vbslq_f32(lanes_of(count), load_first(values, count), splat(other));
}
static inline void store_first(float *out, floats_t x, int64_t count) {
    if (count < LANES) copy_few(out, &x, count * sizeof *out);
    else store(out, x);
}
static inline floats_t only_first(floats_t x, int64_t count) { return vbslq_f32(lanes_of(count), x, zeros()); }

static inline floats_t add(floats_t a, floats_t b) { return vaddq_f32(a, b); }
static inline floats_t subtract(floats_t a, floats_t b) { return vsubq_f32(a, b); }
static inline floats_t times(floats_t a, floats_t b) { return vmulq_f32(a, b); }
static inline floats_t divide(floats_t a, floats_t b) { return vdivq_f32(a, b); }
static inline floats_t times_add(floats_t a, floats_t b, floats_t c) { return vfmaq_f32(c, a, b); }
static inline floats_t minus_times(floats_t c, floats_t a, floats_t b) { return vfmsq_f32(c, a, b); }
static inline floats_t smaller(floats_t a, floats_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline floats_t larger(floats_t a, floats_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline floats_t magnitude(floats_t x) { return vabsq_f32(x); }
static inline float sum_of(floats_t x) { return vaddvq_f32(x); }
static inline float largest_of(floats_t x) { return vmaxvq_f32(x); }
static inline floats_t nearest(floats_t x) { return vrndnq_f32(x); }
/* n is a whole number in -252..254. Two steps, because 2^n itself may be outside the range of floats. */
static inline floats_t times_power_of_two(floats_t x, floats_t n) {
    int32x4_t power = vcvtnq_s32_f32(n), half = vshrq_n_s32(power, 1), bias = vdupq_n_s32(127);
    int32x4_t rest = vsubq_s32(power, half);
    floats_t first = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    floats_t second = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23));
    return times(times(x, first), second);
}
static inline floats_t where_negative(floats_t x, floats_t yes, floats_t no) { return vbslq_f32(vcltzq_f32(x), yes, no); }
static inline floats_t where_nan(floats_t x, floats_t yes, floats_t no) { return vbslq_f32(vceqq_f32(x, x), no, yes); }

/* ---- bfloat16 and float16 ---- */

static inline floats_t load_bf16(const bfloat16_t *values) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(values), 16)); }
static inline floats_t load_bf16_first(const bfloat16_t *values, int64_t count) {
    if (count >= LANES) return load_bf16(values);
    bfloat16_t some[LANES] = {0};
    copy_few(some, values, count * sizeof *some);
    return load_bf16(some);
}
static inline void store_bf16_first(bfloat16_t *out, floats_t x, int64_t count) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    floats_t kept = where_nan(x, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000)), vreinterpretq_f32_u32(rounded));
    uint16x4_t packed = vshrn_n_u32(vreinterpretq_u32_f32(kept), 16);
    if (count < LANES) copy_few(out, &packed, count * sizeof *out);
    else memcpy(out, &packed, sizeof packed);
}

static inline floats_t load_float16(const uint16_t *values) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(values))); }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define BFLOAT16_PRODUCTS 1 /* of pairs of bfloat16 with pairs of bfloat16 */

typedef uint16x8_t pairs_t;

static inline pairs_t load_pairs(const bfloat16_t *weights) { return vld1q_u16(weights); }
static inline pairs_t splat_pair(int32_t pair) { return vreinterpretq_u16_s32(vdupq_n_s32(pair)); }
static inline floats_t add_pairs(floats_t sums, pairs_t x, pairs_t weights) {
    asm volatile(".arch armv8.2-a+bf16\n\tbfdot %0.4s, %1.8h, %2.8h" : "+w"(sums) : "w"(x), "w"(weights));
    return sums;
}
#endif

static inline floats_t add_scaled(floats_t sums, floats_t x, floats_t weights) { return times_add(x, weights, sums); }

/* The first and the second of pairs of bfloat16. */
static inline floats_t first_of_pairs(const bfloat16_t *pairs) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(pairs)), 16));
}
static inline floats_t second_of_pairs(const bfloat16_t *pairs) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(pairs)), vdupq_n_u32(0xffff0000)));
}

/* ---- integers ---- */

static inline ints_t splat_ints(int32_t x) { return vdupq_n_s32(x); }
static inline ints_t to_ints(floats_t x) { return vcvtnq_s32_f32(x); }
static inline floats_t to_floats(ints_t x) { return vcvtq_f32_s32(x); }
static inline floats_t as_floats(ints_t x) { return vreinterpretq_f32_s32(x); }
static inline ints_t add_ints(ints_t a, ints_t b) { return vaddq_s32(a, b); }
static inline int32_t sum_of_ints(ints_t x) { return vaddvq_s32(x); }
static inline void store_int8_first(int8_t *out, ints_t x, int64_t count) {
    int16x4_t half = vqmovn_s32(x);
    int8x8_t packed = vqmovn_s16(vcombine_s16(half, half));
    if (count < LANES) copy_few(out, &packed, count);
    else memcpy(out, &packed, LANES);
}

/* Adds four products of signed weights with signed inputs to each sum. */
static inline ints_t add_products(ints_t sums, ints_t weights, ints_t x) {
#ifdef __ARM_FEATURE_DOTPROD
    asm volatile(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(weights), "w"(x));
    return sums;
#else
    int8x16_t a = vreinterpretq_s8_s32(weights), b = vreinterpretq_s8_s32(x);
    int16x8_t first = vmull_s8(vget_low_s8(a), vget_low_s8(b)), second = vmull_high_s8(a, b);
    return vpadalq_s16(sums, vpaddq_s16(first, second)); /* two products are at most 2 * 128 * 127, which 16 bits hold */
#endif
}

#define INT8_ADDED 0
#define INT8_PASSES 1
typedef int8_t int8_input_t;

static inline void store_int8_inputs(int8_input_t *out, ints_t x, int64_t count) { store_int8_first(out, x, count); }
static inline ints_t int8_weights(const uint8_t *weights, int pass) { return vreinterpretq_s32_u8(vld1q_u8(weights)); }
static inline ints_t int8_products(ints_t sums, ints_t weights, ints_t x) { return add_products(sums, weights, x); }

static inline ints_t low_halves(const uint8_t *weights) {
    return vreinterpretq_s32_u8(vandq_u8(vld1q_u8(weights), vdupq_n_u8(15)));
}
static inline ints_t high_halves(const uint8_t *weights) { return vreinterpretq_s32_u8(vshrq_n_u8(vld1q_u8(weights), 4)); }
static inline ints_t int4_products(ints_t sums, ints_t weights, ints_t x) { return add_products(sums, weights, x); }
static inline ints_t int4_start(int32_t offset) { return splat_ints(offset); }
static inline ints_t int4_total(ints_t sums, int32_t offset) { return sums; }

#ifdef __ARM_FEATURE_MATMUL_INT8
#define ROW_PAIRS 1 /* an instruction multiplies eight inputs of two rows with the weights of two outputs */

static inline ints_t load_pair(const int8_t *row, const int8_t *next) {
    return vreinterpretq_s32_s8(vcombine_s8(vld1_s8(row), vld1_s8(next)));
}
/* The weights of eight inputs for two of the LANES outputs, from the weights of four inputs and of the next four. */
static inline ints_t lower_outputs(ints_t four, ints_t next) { return vzip1q_s32(four, next); }
static inline ints_t upper_outputs(ints_t four, ints_t next) { return vzip2q_s32(four, next); }
/* Adds products to the sums of two rows: those of the first row, then those of the second. */
static inline ints_t pair_products(ints_t sums, ints_t x, ints_t weights) {
    asm volatile(".arch armv8.2-a+i8mm\n\tsmmla %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(x), "w"(weights));
    return sums;
}
/* The sums of one row for LANES outputs. */
static inline ints_t row_of_pair(ints_t low, ints_t high, int row) {
    int64x2_t a = vreinterpretq_s64_s32(low), b = vreinterpretq_s64_s32(high);
    return vreinterpretq_s32_s64(row ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
}
#endif
