/* Linear layers: out = x W^T + bias, for weights in float32, bfloat16 or int8.
 *
 * Weights are laid out in blocks of 64 outputs; inside a block, outputs stand side by side for one input (float32), a
 * pair of inputs (bfloat16) or four (int8), as the processor's multiply-add instructions take them. One row reads the
 * weights in one even stream; several rows share what was read. A row's sums are always taken in the same order, so its
 * result is the same, to the bit, alone or among others, and with any number of threads.
 *
 * int8: activations are rounded to int8 too, for each row in groups of 128 inputs that have a scale each. The products
 * are summed as integers. The instruction multiplies unsigned with signed numbers: weights are stored with 128 added,
 * and 128 times the sum of a group's activations is taken away.
 */
#pragma once

#include <string.h>

#include "parallel.h"
#include "vector.h"

#define SMALL 16384          /* numbers to touch or to multiply, not worth another thread */
#define BLOCK 64             /* outputs */
#define BLOCK_VECTORS 4      /* of 16 outputs */
#define TILE_ROWS 6          /* with 4 vectors each: 24 of 32 registers hold sums */
#define GROUP 128            /* inputs that share an activation scale */
#define ROWS_AT_ONCE 96      /* whose sums of one block stay in the nearest cache */
#define BLOCK_BYTES (256 * 1024) /* of weights that stay in the second cache while all rows pass */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

typedef struct {
    int32_t kind;
    int64_t num_in, num_out;
    const void *weight; /* packed */
    const float *scale; /* of each output, INT8 only */
    const float *bias;  /* or NULL */
} linear_t;

/* Activations in the form that a kind of weights takes. */
typedef struct {
    const void *values; /* rows of num_in: float, bfloat16 or int8 */
    int64_t stride;     /* elements from row to row */
    const float *scales;       /* (rows, groups), INT8 only */
    const int32_t *offsets;    /* (rows, groups): -128 times the sum of the group */
} input_t;

/* What becomes of the sums. */
enum { NONE = 0, QUICK_GELU = 1, EXACT_GELU = 2 };
enum { STORE_FLOAT32 = 0, STORE_BFLOAT16 = 1, ADD_FLOAT32 = 2 };

/* Memory that a call computes in, given by its caller. All pieces are taken before anything is computed: then
 * `num_taken` says how much it must be, and where it is less the call ends with nothing done. So no thread of the crew
 * ever lacks memory. */
typedef struct {
    void *memory; /* a multiple of 64 */
    int64_t num_bytes, num_taken;
} scratch_t;

static void *scratch_take(scratch_t *scratch, int64_t num_bytes) {
    uintptr_t piece = (uintptr_t)scratch->memory + scratch->num_taken;
    scratch->num_taken += round_up(num_bytes, 64);
    return (void *)piece;
}

static bool scratch_is_short(const scratch_t *scratch) { return scratch->num_taken > scratch->num_bytes; }

static inline int64_t weights_of_block(int kind, int64_t num_in) {
    return num_in * BLOCK * (kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1);
}

static int64_t packed_bytes(int kind, int64_t num_out, int64_t num_in) {
    return round_up(num_out, BLOCK) / BLOCK * weights_of_block(kind, num_in);
}

/* ---- packing ---- */

typedef struct {
    int kind;
    int64_t num_out, num_in;
    const void *plain;
    void *packed;
} packing_t;

static void pack_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const packing_t *self = context;
    int depth = self->kind == FLOAT32 ? 1 : self->kind == BFLOAT16 ? 2 : 4; /* inputs side by side */
    for (int64_t block = first; block < end; block++) {
        int64_t place = block * self->num_in * BLOCK;
        for (int64_t k = 0; k < self->num_in; k += depth)
            for (int64_t lane = 0; lane < BLOCK; lane++)
                for (int64_t d = 0; d < depth; d++, place++) {
                    int64_t row = block * BLOCK + lane, at = row * self->num_in + k + d;
                    bool is_there = row < self->num_out;
                    if (self->kind == FLOAT32)
                        ((float *)self->packed)[place] = is_there ? ((const float *)self->plain)[at] : 0.0f;
                    else if (self->kind == BFLOAT16)
                        ((bfloat16_t *)self->packed)[place] = is_there ? ((const bfloat16_t *)self->plain)[at] : 0;
                    else
                        ((uint8_t *)self->packed)[place] = (uint8_t)((is_there ? ((const int8_t *)self->plain)[at] : 0) + 128);
                }
    }
}

/* ---- activations ---- */

typedef struct {
    int kind, type; /* wanted by the weights, given */
    const void *x;
    int64_t stride, num_rows, num_in, num_groups;
    void *values;
    float *scales;
    int32_t *offsets;
} conversion_t;

static inline __m512 load_as_float(const void *x, int type, int64_t at) {
    return type == FLOAT32 ? _mm512_loadu_ps((const float *)x + at) : load_bf16((const bfloat16_t *)x + at);
}

static inline __m512 load_some(const void *x, int type, int64_t at, int64_t count) {
    if (count >= LANES) return load_as_float(x, type, at);
    __mmask16 lanes = first_lanes(count);
    if (type == FLOAT32) return _mm512_maskz_loadu_ps(lanes, (const float *)x + at);
    __m256i half = _mm256_maskz_loadu_epi16(lanes, (const bfloat16_t *)x + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static void quantise_group(const conversion_t *self, int64_t row, int64_t group) {
    int64_t first = group * GROUP, end = least(first + GROUP, self->num_in), at = row * self->stride;
    __m512 largest = _mm512_setzero_ps(), broken = _mm512_setzero_ps();
    for (int64_t k = first; k < end; k += LANES) {
        __m512 x = load_some(self->x, self->type, at + k, end - k);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        broken = _mm512_fmadd_ps(x, _mm512_setzero_ps(), broken); /* 0, or no number where x is none or infinite */
    }
    float absmax = _mm512_reduce_max_ps(largest), inverse = absmax > 0 ? 127.0f / absmax : 0.0f;
    /* A subnormal group has an infinite inverse: it is as good as zero. */
    if (!(inverse <= 3.0e38f)) inverse = 0.0f;
    int8_t *out = (int8_t *)self->values + row * self->num_in;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = first; k < end; k += LANES) {
        __m512i rounded = _mm512_cvtps_epi32(
            _mm512_mul_ps(load_some(self->x, self->type, at + k, end - k), _mm512_set1_ps(inverse)));
        sum = _mm512_add_epi32(sum, rounded);
        _mm_mask_storeu_epi8(out + k, first_lanes(end - k), _mm512_cvtsepi32_epi8(rounded));
    }
    self->scales[row * self->num_groups + group] = absmax / 127.0f + _mm512_reduce_add_ps(broken);
    /* Unsigned, as it may overflow where x is no number. */
    self->offsets[row * self->num_groups + group] = (int32_t)(-128u * (uint32_t)_mm512_reduce_add_epi32(sum));
}

static void convert_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const conversion_t *self = context;
    for (int64_t row = first; row < end; row++) {
        if (self->kind == INT8) {
            for (int64_t group = 0; group < self->num_groups; group++) quantise_group(self, row, group);
            continue;
        }
        bfloat16_t *out = (bfloat16_t *)self->values + row * self->num_in;
        for (int64_t k = 0; k < self->num_in; k += LANES) {
            __m512 x = load_some(self->x, self->type, row * self->stride + k, self->num_in - k);
            _mm256_mask_storeu_epi16(out + k, first_lanes(self->num_in - k), to_bf16(x));
        }
    }
}

static inline int64_t groups_of(int64_t num_in) { return round_up(num_in, GROUP) / GROUP; }

static inline int64_t value_bytes_of(int kind, int64_t num_rows, int64_t num_in) {
    return round_up(num_rows * num_in * (kind == INT8 ? 1 : 2) + 64, 64);
}

/* What is made for a layer to read is made in this type, to save converting it where that can be. */
static inline int wanted_type(const linear_t *linear) { return linear->kind == BFLOAT16 ? BFLOAT16 : FLOAT32; }

/* Of what convert_input makes. */
static int64_t converted_bytes(const linear_t *linear, int type, int64_t num_rows) {
    if (linear->kind == type) return 0;
    return value_bytes_of(linear->kind, num_rows, linear->num_in) + 8 * num_rows * groups_of(linear->num_in);
}

/* x (num_rows, num_in), in a type of its own, as the layer's weights take it; `memory` holds what is made. */
static input_t convert_input(const linear_t *linear, const void *x, int type, int64_t num_rows, char *memory,
                             int num_threads) {
    int64_t num_in = linear->num_in;
    if (linear->kind == type) return (input_t){x, num_in, NULL, NULL};
    int64_t num_groups = groups_of(num_in), value_bytes = value_bytes_of(linear->kind, num_rows, num_in);
    conversion_t job = {linear->kind, type, x, num_in, num_rows, num_in, num_groups, memory,
                        (float *)(memory + value_bytes),
                        (int32_t *)(memory + value_bytes + 4 * num_rows * num_groups)};
    run_items(convert_task, &job, num_rows, 1 + SMALL / num_in, num_threads);
    return (input_t){memory, num_in, job.scales, job.offsets};
}

/* ---- tiles: sums of up to 6 rows and one block of outputs, over a range of inputs ---- */

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

ALWAYS_INLINE void load_sums(const int rows, __m512 sums[TILE_ROWS][BLOCK_VECTORS], const float *c, bool go_on) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++)
            sums[r][v] = go_on ? _mm512_load_ps(c + r * BLOCK + v * LANES) : _mm512_setzero_ps();
}

ALWAYS_INLINE void store_sums(const int rows, __m512 sums[TILE_ROWS][BLOCK_VECTORS], float *c) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) _mm512_store_ps(c + r * BLOCK + v * LANES, sums[r][v]);
}

ALWAYS_INLINE void tile_float32(const int rows, const float *a, int64_t stride, const float *w, int64_t num_in, float *c,
                                bool go_on) {
    __m512 sums[TILE_ROWS][BLOCK_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k++, w += BLOCK) {
        __m512 weights[BLOCK_VECTORS];
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) {
            weights[v] = _mm512_loadu_ps(w + v * LANES);
            _mm_prefetch((const char *)(w + v * LANES) + 2048, _MM_HINT_T0);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m512 x = _mm512_set1_ps(a[r * stride + k]);
            UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) sums[r][v] = _mm512_fmadd_ps(x, weights[v], sums[r][v]);
        }
    }
    store_sums(rows, sums, c);
}

#ifdef __AVX512BF16__
ALWAYS_INLINE void tile_bfloat16(const int rows, const bfloat16_t *a, int64_t stride, const bfloat16_t *w, int64_t num_in,
                                 float *c, bool go_on) {
    __m512 sums[TILE_ROWS][BLOCK_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k += 2, w += 2 * BLOCK) {
        __m512bh weights[BLOCK_VECTORS];
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) {
            weights[v] = (__m512bh)_mm512_loadu_si512(w + 2 * v * LANES);
            _mm_prefetch((const char *)(w + 2 * v * LANES) + 2048, _MM_HINT_T0);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, a + r * stride + k, 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, weights[v]);
        }
    }
    store_sums(rows, sums, c);
}
#endif

#ifdef __AVX512VNNI__
/* Four products each, unsigned times signed, added to the sums. In assembler: as an intrinsic, GCC 12 keeps half of the
 * sums in memory. */
ALWAYS_INLINE __m512i add_products(__m512i sums, __m512i weights, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
    return sums;
}

ALWAYS_INLINE void tile_int8(const int rows, const int8_t *a, int64_t stride, const float *scales, const int32_t *offsets,
                             int64_t num_groups, const uint8_t *w, int64_t num_in, float *c, bool go_on) {
    for (int64_t first = 0; first < num_in; first += GROUP, scales++, offsets++) {
        __m512i sums[TILE_ROWS][BLOCK_VECTORS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) sums[r][v] = _mm512_set1_epi32(offsets[r * num_groups]);
        int64_t end = least(first + GROUP, num_in);
        for (int64_t k = first; k < end; k += 4, w += 4 * BLOCK) {
            __m512i weights[BLOCK_VECTORS];
            UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) {
                weights[v] = _mm512_loadu_si512(w + 4 * v * LANES);
                _mm_prefetch((const char *)(w + 4 * v * LANES) + 2048, _MM_HINT_T0);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, a + r * stride + k, 4);
                __m512i x = _mm512_set1_epi32(four);
                UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) sums[r][v] = add_products(sums[r][v], weights[v], x);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m512 scale = _mm512_set1_ps(scales[r * num_groups]);
            UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) {
                float *place = c + r * BLOCK + v * LANES;
                __m512 before = go_on || first ? _mm512_load_ps(place) : _mm512_setzero_ps();
                _mm512_store_ps(place, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][v]), scale, before));
            }
        }
    }
}
#endif

ALWAYS_INLINE void tile(const int rows, const linear_t *self, const input_t *input, int64_t row, int64_t block,
                        int64_t first, int64_t end, float *c) {
    int64_t at = row * input->stride + first;
    int64_t weight = block * self->num_in * BLOCK + first * BLOCK;
    if (self->kind == FLOAT32)
        tile_float32(rows, (const float *)input->values + at, input->stride, (const float *)self->weight + weight,
                     end - first, c, first > 0);
#ifdef __AVX512BF16__
    else if (self->kind == BFLOAT16)
        tile_bfloat16(rows, (const bfloat16_t *)input->values + at, input->stride,
                      (const bfloat16_t *)self->weight + weight, end - first, c, first > 0);
#endif
#ifdef __AVX512VNNI__
    else {
        int64_t num_groups = groups_of(self->num_in), group = row * num_groups + first / GROUP;
        tile_int8(rows, (const int8_t *)input->values + at, input->stride, input->scales + group,
                  input->offsets + group, num_groups, (const uint8_t *)self->weight + weight, end - first, c, first > 0);
    }
#endif
}

/* Sums of rows first_row.. of one block into c (num_rows, 64). */
static void block_sums(const linear_t *self, const input_t *input, int64_t block, int64_t first_row, int64_t num_rows,
                       float *c) {
    int64_t per_input = weights_of_block(self->kind, 1);
    int64_t depth = num_rows <= TILE_ROWS ? self->num_in : BLOCK_BYTES / per_input / GROUP * GROUP;
    for (int64_t first = 0; first < self->num_in; first += depth) {
        int64_t end = least(first + depth, self->num_in), r = 0;
        for (; r + TILE_ROWS <= num_rows; r += TILE_ROWS)
            tile(TILE_ROWS, self, input, first_row + r, block, first, end, c + r * BLOCK);
        float *rest = c + r * BLOCK;
        switch (num_rows - r) {
            case 5: tile(5, self, input, first_row + r, block, first, end, rest); break;
            case 4: tile(4, self, input, first_row + r, block, first, end, rest); break;
            case 3: tile(3, self, input, first_row + r, block, first, end, rest); break;
            case 2: tile(2, self, input, first_row + r, block, first, end, rest); break;
            case 1: tile(1, self, input, first_row + r, block, first, end, rest); break;
        }
    }
}

/* The 16 finished values of one row: scaled, with bias. */
static inline __m512 finished(const linear_t *self, const float *sums, int64_t output, __mmask16 lanes) {
    __m512 x = _mm512_load_ps(sums);
    if (self->kind == INT8) x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(lanes, self->scale + output));
    return self->bias ? _mm512_add_ps(x, _mm512_maskz_loadu_ps(lanes, self->bias + output)) : x;
}

typedef struct {
    const linear_t *linear, *up; /* with `up`: silu(linear) * up */
    int activation;              /* of the linear, without `up` */
    input_t input;
    int64_t num_rows;
    void *out;
    int64_t out_stride;
    int how;
} product_t;

static void put(const product_t *self, int64_t row, int64_t output, __m512 x, __mmask16 lanes) {
    int64_t at = row * self->out_stride + output;
    if (self->how == STORE_BFLOAT16) {
        _mm256_mask_storeu_epi16((bfloat16_t *)self->out + at, lanes, to_bf16(x));
        return;
    }
    float *out = (float *)self->out + at;
    if (self->how == ADD_FLOAT32) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(lanes, out));
    _mm512_mask_storeu_ps(out, lanes, x);
}

static void product_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const product_t *self = context;
    const linear_t *linear = self->linear, *up = self->up;
    _Alignas(64) float sums[2][ROWS_AT_ONCE * BLOCK];
    int64_t num_parts = (self->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int64_t item = first; item < end; item++) {
        int64_t block = item / num_parts, first_row = item % num_parts * ROWS_AT_ONCE;
        int64_t num_rows = least(ROWS_AT_ONCE, self->num_rows - first_row);
        block_sums(linear, &self->input, block, first_row, num_rows, sums[0]);
        if (up) block_sums(up, &self->input, block, first_row, num_rows, sums[1]);
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t v = 0; v < BLOCK_VECTORS; v++) {
                int64_t output = block * BLOCK + v * LANES;
                if (output >= linear->num_out) break;
                __mmask16 lanes = first_lanes(linear->num_out - output);
                __m512 x = finished(linear, sums[0] + r * BLOCK + v * LANES, output, lanes);
                if (up) x = _mm512_mul_ps(silu(x), finished(up, sums[1] + r * BLOCK + v * LANES, output, lanes));
                else if (self->activation) x = self->activation == QUICK_GELU ? quick_gelu(x) : exact_gelu(x);
                put(self, first_row + r, output, x, lanes);
            }
    }
}

static void multiply(const product_t *job, int num_threads) {
    if (!job->num_rows) return;
    int64_t num_blocks = round_up(job->linear->num_out, BLOCK) / BLOCK;
    int64_t num_parts = (job->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    int64_t per_item = least(job->num_rows, ROWS_AT_ONCE) * job->linear->num_in * BLOCK;
    run_items(product_task, job, num_blocks * num_parts, 1 + SMALL / per_item, num_threads);
}

/* out = activation(x W^T), or silu(x W^T) * (x up^T); stored or added. `converted` has converted_bytes of the layer. */
static void apply(const linear_t *linear, const linear_t *up, int activation, const void *x, int type, int64_t num_rows,
                  void *out, int how, void *converted, int num_threads) {
    input_t input = convert_input(linear, x, type, num_rows, converted, num_threads);
    product_t job = {linear, up, activation, input, num_rows, out, linear->num_out, how};
    multiply(&job, num_threads);
}
