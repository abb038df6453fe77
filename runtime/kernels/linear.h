/* Linear layers: out = x W^T + bias, for weights in float32, bfloat16, int8 or int4 (see tiles.h).
 *
 * One row reads the weights in one even stream; several rows share what was read.
 */
#pragma once

#include "parallel.h"
#include "tiles.h"

#define SMALL 16384     /* numbers to touch or to multiply, not worth another thread */
#define ROWS_AT_ONCE 96 /* whose sums of one block stay in the nearest cache */
#define SLAB_BYTES (12 * 1024) /* of weights that stay in the nearest cache while all rows pass */
#define GROUP_BYTES (4 << 20)  /* of rows that stay in a farther cache while all weights pass */

typedef struct {
    int32_t kind;
    int64_t num_in, num_out;
    const void *weight; /* packed */
    const float *scale; /* of each output, INT8 only */
    const float *bias;  /* or NULL */
} linear_t;

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

/* Packed, of `num_in` inputs of one block. */
static inline int64_t bytes_of_block(int kind, int64_t num_in) {
    switch (kind) {
        case FLOAT32: return 4 * num_in * BLOCK;
        case BFLOAT16: return 2 * num_in * BLOCK;
        case INT8: return num_in * BLOCK;
        default: return num_in / GROUP * INT4_BYTES;
    }
}

static int64_t packed_bytes(int kind, int64_t num_out, int64_t num_in) {
    return round_up(num_out, BLOCK) / BLOCK * bytes_of_block(kind, num_in);
}

/* ---- packing ----
 *
 * Packed weights are kept in files: another layout is another LAYOUT_VERSION, and runtime/schemes/packed.py unpacks it. */
#define LAYOUT_VERSION 1

typedef struct {
    int kind;
    int64_t num_out, num_in;
    const void *plain;
    const uint16_t *scales; /* float16 (out, in / 32), INT4 only */
    void *packed;
} packing_t;

static void pack_block(const packing_t *self, int64_t block) {
    int depth = self->kind == FLOAT32 ? 1 : self->kind == BFLOAT16 ? 2 : 4; /* inputs side by side */
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
                    ((uint8_t *)self->packed)[place] = (uint8_t)((is_there ? ((const int8_t *)self->plain)[at] : 0) + INT8_ADDED);
            }
}

/* Plain weights have two inputs in a byte, the even one in the low half. Packed, a byte has inputs k and k + 4. */
static void pack_block_of_int4(const packing_t *self, int64_t block) {
    int64_t num_groups = self->num_in / GROUP;
    uint8_t *place = (uint8_t *)self->packed + block * bytes_of_block(INT4, self->num_in);
    for (int64_t group = 0; group < num_groups; group++) {
        for (int64_t row = block * BLOCK; row < (block + 1) * BLOCK; row++, place += 2) {
            uint16_t scale = row < self->num_out ? self->scales[row * num_groups + group] : 0;
            memcpy(place, &scale, 2);
        }
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += 8)
            for (int64_t row = block * BLOCK; row < (block + 1) * BLOCK; row++)
                for (int64_t d = 0; d < 4; d++, place++) {
                    const uint8_t *pair = (const uint8_t *)self->plain + (row * self->num_in + k + d) / 2;
                    int shift = d % 2 * 4;
                    *place = row < self->num_out ? (uint8_t)((pair[0] >> shift & 15) | (pair[2] >> shift & 15) << 4) : 0;
                }
    }
}

static void pack_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const packing_t *self = context;
    for (int64_t block = first; block < end; block++)
        if (self->kind == INT4) pack_block_of_int4(self, block);
        else pack_block(self, block);
}

/* ---- activations ---- */

typedef struct {
    int kind, type; /* of the weights, of x */
    const void *x;
    int64_t stride, num_rows, num_in, num_groups;
    void *values;
    int64_t value_stride;
    float *scales;
    int32_t *offsets;
} conversion_t;

static inline floats_t load_as_float(const void *x, int type, int64_t at) {
    return type == FLOAT32 ? load((const float *)x + at) : load_bf16((const bfloat16_t *)x + at);
}

static inline floats_t load_some(const void *x, int type, int64_t at, int64_t count) {
    if (count >= LANES) return load_as_float(x, type, at);
    return type == FLOAT32 ? load_first((const float *)x + at, count) : load_bf16_first((const bfloat16_t *)x + at, count);
}

static void quantise_group(const conversion_t *self, int64_t row, int64_t group) {
    int64_t first = group * GROUP, end = least(first + GROUP, self->num_in), at = row * self->stride;
    floats_t largest = zeros(), broken = zeros();
    for (int64_t k = first; k < end; k += LANES) {
        floats_t x = load_some(self->x, self->type, at + k, end - k);
        largest = larger(largest, magnitude(x));
        broken = times_add(x, zeros(), broken); /* 0, or no number where x is none or infinite */
    }
    float absmax = largest_of(largest), inverse = absmax > 0 ? 127.0f / absmax : 0.0f;
    /* A subnormal group has an infinite inverse: it is as good as zero. */
    if (!(inverse <= 3.0e38f)) inverse = 0.0f;
    ints_t sum = splat_ints(0);
    for (int64_t k = first; k < end; k += LANES) {
        ints_t rounded = to_ints(times(load_some(self->x, self->type, at + k, end - k), splat(inverse)));
        sum = add_ints(sum, rounded);
        int64_t place = row * self->value_stride + k;
        if (self->kind == INT8) store_int8_inputs((int8_input_t *)self->values + place, rounded, end - k);
        else store_int8_first((int8_t *)self->values + place, rounded, end - k);
    }
    self->scales[row * self->num_groups + group] = absmax / 127.0f + sum_of(broken);
    /* Unsigned, as it may overflow where x is no number. */
    uint32_t added = self->kind == INT8 ? INT8_ADDED : 8;
    self->offsets[row * self->num_groups + group] = (int32_t)(-added * (uint32_t)sum_of_ints(sum));
}

/* The type of activations that weights of a kind take; an integer kind stands for its own form of them. */
static inline int input_type(int kind) { return kind == BFLOAT16 ? BFLOAT16_INPUT : kind; }

static void convert_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const conversion_t *self = context;
    int wanted = input_type(self->kind);
    for (int64_t row = first; row < end; row++) {
        for (int64_t group = 0; group < self->num_groups; group++) quantise_group(self, row, group);
        if (self->num_groups) continue;
        for (int64_t k = 0; k < self->num_in; k += LANES) {
            int64_t place = row * self->value_stride + k, count = self->num_in - k;
            floats_t x = load_some(self->x, self->type, row * self->stride + k, count);
            if (wanted == BFLOAT16) store_bf16_first((bfloat16_t *)self->values + place, x, count);
            else store_first((float *)self->values + place, x, count);
        }
    }
}

static inline int64_t groups_of(int kind, int64_t num_in) {
    return kind == INT8 || kind == INT4 ? round_up(num_in, GROUP) / GROUP : 0;
}

static inline int64_t value_bytes_of(int kind) {
    int64_t each[] = {4, BFLOAT16_INPUT == FLOAT32 ? 4 : 2, sizeof(int8_input_t), 1};
    return each[kind];
}

/* From row to row, in elements: an odd number of cache lines, or rows would compete for few places of the cache. */
static inline int64_t value_stride_of(int kind, int64_t num_in) {
    int64_t each = value_bytes_of(kind), lines = round_up(num_in * each, 64) / 64;
    return (lines | 1) * 64 / each;
}

/* What is made for a layer to read is made in this type, to save converting it where that can be. */
static inline int wanted_type(const linear_t *linear) {
    return input_type(linear->kind) == BFLOAT16 ? BFLOAT16 : FLOAT32;
}

/* Of what convert_input makes. */
static int64_t converted_bytes(const linear_t *linear, int type, int64_t num_rows) {
    if (input_type(linear->kind) == type) return 0;
    int64_t row_bytes = value_stride_of(linear->kind, linear->num_in) * value_bytes_of(linear->kind);
    return num_rows * (row_bytes + 8 * groups_of(linear->kind, linear->num_in));
}

/* x (num_rows, num_in), in a type of its own, as the layer's weights take it; `memory` holds what is made. */
static input_t convert_input(const linear_t *linear, const void *x, int type, int64_t num_rows, char *memory,
                             int num_threads) {
    int kind = linear->kind;
    int64_t num_in = linear->num_in, num_groups = groups_of(kind, num_in);
    if (input_type(kind) == type) return (input_t){x, num_in, NULL, NULL, 0};
    int64_t value_stride = value_stride_of(kind, num_in);
    float *scales = (float *)(memory + num_rows * value_stride * value_bytes_of(kind));
    int32_t *offsets = (int32_t *)(scales + num_rows * num_groups);
    conversion_t job = {kind, type, x, num_in, num_rows, num_in, num_groups, memory, value_stride, scales, offsets};
    run_items(convert_task, &job, num_rows, 1 + SMALL / num_in, num_threads);
    return (input_t){memory, value_stride, scales, offsets, num_groups};
}

/* ---- products ---- */

ALWAYS_INLINE void tile(const int rows, const linear_t *self, const input_t *input, int64_t row, int64_t block,
                        int64_t first, int64_t end, float *c) {
    const char *w = (const char *)self->weight + bytes_of_block(self->kind, self->num_in) * block +
                    bytes_of_block(self->kind, first);
    int64_t at = row * input->stride + first, stride = input->stride, num_in = end - first;
    int64_t group = row * input->num_groups + groups_of(self->kind, first), num_groups = input->num_groups;
    const float *scales = input->scales + group;
    const int32_t *offsets = input->offsets + group;
    bool go_on = first > 0;
    switch (self->kind) {
        case FLOAT32:
            tile_float32(rows, (const float *)input->values + at, stride, (const float *)w, num_in, c, go_on);
            break;
        case BFLOAT16:
            tile_bfloat16(rows, (const bfloat16_input_t *)input->values + at, stride, (const bfloat16_t *)w, num_in, c,
                          go_on);
            break;
        case INT8:
            tile_int8(rows, (const int8_input_t *)input->values + at, stride, scales, offsets, num_groups,
                      (const uint8_t *)w, num_in, c, go_on);
            break;
        default:
            tile_int4(rows, (const int8_t *)input->values + at, stride, scales, offsets, num_groups, (const uint8_t *)w,
                      num_in, c, go_on);
    }
}

/* Sums of rows first_row.. of one block into c (num_rows, BLOCK). */
static void block_sums(const linear_t *self, const input_t *input, int64_t block, int64_t first_row, int64_t num_rows,
                       float *c) {
    int64_t groups_at_once = SLAB_BYTES / bytes_of_block(self->kind, GROUP);
    int64_t depth = num_rows <= TILE_ROWS ? self->num_in : groups_at_once * GROUP;
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

/* The finished values of one row, up to LANES of them: scaled, with bias. */
static inline floats_t finished(const linear_t *self, const float *sums, int64_t output) {
    int64_t count = self->num_out - output;
    floats_t x = load(sums);
    if (self->kind == INT8) x = times(x, load_first(self->scale + output, count));
    return self->bias ? add(x, load_first(self->bias + output, count)) : x;
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

static void put(const product_t *self, int64_t row, int64_t output, floats_t x) {
    int64_t at = row * self->out_stride + output, count = self->linear->num_out - output;
    if (self->how == STORE_BFLOAT16) {
        store_bf16_first((bfloat16_t *)self->out + at, x, count);
        return;
    }
    float *out = (float *)self->out + at;
    if (self->how == ADD_FLOAT32) x = add(x, load_first(out, count));
    store_first(out, x, count);
}

/* Parts of ROWS_AT_ONCE rows that meet a block of weights one after the other. */
static int64_t parts_of_group(const product_t *self) {
    int64_t part_bytes = ROWS_AT_ONCE * self->input.stride * value_bytes_of(self->linear->kind);
    return most(1, GROUP_BYTES / part_bytes);
}

static void product_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const product_t *self = context;
    const linear_t *linear = self->linear, *up = self->up;
    _Alignas(64) float sums[2][ROWS_AT_ONCE * BLOCK];
    int64_t num_parts = (self->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, each = parts_of_group(self);
    int64_t group_items = each * (round_up(linear->num_out, BLOCK) / BLOCK);
    for (int64_t item = first; item < end; item++) {
        int64_t first_part = item / group_items * each, in_group = item % group_items;
        int64_t here = least(each, num_parts - first_part), block = in_group / here;
        int64_t first_row = (first_part + in_group % here) * ROWS_AT_ONCE;
        int64_t num_rows = least(ROWS_AT_ONCE, self->num_rows - first_row);
        block_sums(linear, &self->input, block, first_row, num_rows, sums[0]);
        if (up) block_sums(up, &self->input, block, first_row, num_rows, sums[1]);
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t v = 0; v < TILE_VECTORS; v++) {
                int64_t output = block * BLOCK + v * LANES;
                if (output >= linear->num_out) break;
                floats_t x = finished(linear, sums[0] + r * BLOCK + v * LANES, output);
                if (up) x = times(silu(x), finished(up, sums[1] + r * BLOCK + v * LANES, output));
                else if (self->activation) x = self->activation == QUICK_GELU ? quick_gelu(x) : exact_gelu(x);
                put(self, first_row + r, output, x);
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
