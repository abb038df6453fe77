/* Linear layers: out = x W^T + bias, for weights in float32, bfloat16, int8 or int4 (see tiles.h).
 *
 * With one row, the weights are read once, as one continuous stream. Several rows share the weights that were read.
 */
#pragma once

#include "matrices.h"
#include "parallel.h"
#include "tiles.h"

#define SMALL 16384     /* this many numbers to read or multiply are too few for another thread */
#define ROWS_AT_ONCE 66 /* rows whose sums of one block stay in the L1 cache */
#define LEAST_PANEL 64 /* least number of outputs that are finished together */
#define GROUP_BYTES (4 << 20) /* bytes of rows that stay in an outer cache while all weights are read */

static inline bool is_integer(int kind) { return kind == INT8 || kind == INT4; }

typedef struct {
    int32_t kind;
    int64_t num_in, num_out;
    const void *weight; /* packed */
    const float *scale; /* of each output, INT8 only */
    const float *bias;  /* or NULL */
    float input_scale;  /* of all inputs, INT8 only; 0: each row has its own */
} linear_t;

/* Activation functions, and how the results are stored. CONVERT stores them in the form that the next layer reads. */
enum { NONE = 0, QUICK_GELU = 1, EXACT_GELU = 2, TANH_GELU = 3, SILU = 4 };
enum { STORE_FLOAT32 = 0, STORE_BFLOAT16 = 1, ADD_FLOAT32 = 2, CONVERT = 3 };

/* Scratch memory, provided by the caller. A function takes all its pieces before it computes anything: `num_taken` is
 * then the size that it needs, and if the memory is smaller, the function returns without any effect. So a job never
 * runs out of memory in the middle. */
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

/* Bytes of packed weights for `num_in` inputs of one block. */
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
 * Packed weights are stored in files. Increase LAYOUT_VERSION when the layout changes, and change the unpacking in
 * runtime/schemes/packed.py too. */
#define LAYOUT_VERSION 1

typedef struct {
    int kind;
    int64_t num_out, num_in;
    const void *plain;
    const uint16_t *scales; /* float16 (out, in / 32), INT4 only */
    void *packed;
} packing_t;

static void pack_block(const packing_t *self, int64_t block) {
    int depth = self->kind == FLOAT32 ? 1 : self->kind == BFLOAT16 ? 2 : 4; /* adjacent inputs of one output */
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

/* A byte of plain weights holds two adjacent inputs, the even one in the low half. A packed byte holds inputs
 * k and k + 4. */
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

/* Writable activations for a layer: rows in the form that its weights take. Fields are as in input_t. */
typedef struct {
    int kind; /* of the weights */
    int64_t num_in, num_rows, group; /* GROUP or WIDE_GROUP */
    void *values;
    int64_t value_stride;
    float *scales;
    int32_t *offsets;
    float *bases;
    float scale; /* of all inputs, or 0 */
} converted_t;

static inline const void *element(const void *base, int type, int64_t at) {
    return (const char *)base + at * (type == FLOAT32 ? 4 : 2);
}

static inline floats_t load_as_float(const void *x, int type, int64_t at) {
    return type == FLOAT32 ? load((const float *)x + at) : load_bf16((const bfloat16_t *)x + at);
}

static inline floats_t load_some(const void *x, int type, int64_t at, int64_t count) {
    if (count >= LANES) return load_as_float(x, type, at);
    return type == FLOAT32 ? load_first((const float *)x + at, count) : load_bf16_first((const bfloat16_t *)x + at, count);
}

/* `count` inputs of a row, a WIDE_GROUP or the rest of one, and what is measured of them before they are rounded: the
 * largest magnitudes of all and of each group, and whether one is `broken`: NaN if so, else 0. */
typedef struct {
    int64_t row, first, at, count; /* input `first` of the row is element `at` of x */
    float absmax, largest[WIDE_GROUP / GROUP], broken;
} wide_group_t;

ALWAYS_INLINE void measure(wide_group_t *self, const void *x, int type, int64_t count, int64_t group) {
    floats_t broken = zeros();
    self->absmax = 0.0f;
    for (int64_t first = 0; first < count; first += group) {
        floats_t largest = zeros();
        int64_t end = least(count, first + group);
        for (int64_t k = first; k < end; k += LANES) {
            floats_t some = load_some(x, type, self->at + k, end - k);
            largest = larger(largest, magnitude(some));
            broken = times_add(some, zeros(), broken); /* NaN from NaN and from infinity */
        }
        float group_max = largest_of(largest);
        self->largest[first / group] = group_max;
        self->absmax = self->absmax > group_max ? self->absmax : group_max;
    }
    self->broken = sum_of(broken);
}

/* How often `whole` can be halved without becoming smaller than `part`; at most 30. */
static inline int32_t halvings_of(float whole, float part) {
    int32_t bits_of_whole, bits_of_part;
    memcpy(&bits_of_whole, &whole, sizeof whole);
    memcpy(&bits_of_part, &part, sizeof part);
    return (int32_t)least(30, most(0, (bits_of_whole - bits_of_part) / HALVING)); /* negative for NaN */
}

/* Rounds what was measured. `kind` is known at compile time. */
ALWAYS_INLINE void quantise(const int kind, const converted_t *self, const wide_group_t *found, const void *x, int type,
                            int64_t count, int64_t group) {
    int64_t place = found->first / self->group * self->num_rows + found->row;
    bool is_static = self->scale > 0;
    float absmax = is_static ? 127.0f * self->scale : found->absmax; /* larger inputs saturate */
    self->scales[found->first / WIDE_GROUP * self->num_rows + found->row] = absmax / 127.0f + found->broken;
    float widest = absmax > 0 ? 127.0f / absmax : 0.0f;
    for (int64_t begin = 0; begin < count; begin += group, place += self->num_rows) {
        int32_t halvings = is_static ? 0 : halvings_of(absmax, found->largest[begin / group]);
        float inverse = widest * (float)(1 << halvings);
        /* The inverse may be infinite if all numbers of the group are subnormal. They are then rounded to 0. */
        if (!(inverse <= 3.0e38f)) inverse = 0.0f;
        ints_t sum = splat_ints(0);
        int64_t end = least(count, begin + group);
        for (int64_t k = begin; k < end; k += LANES) {
            floats_t levels = times(load_some(x, type, found->at + k, end - k), splat(inverse));
            if (is_static) levels = smaller(splat(127.0f), larger(splat(-127.0f), levels));
            ints_t rounded = to_ints(levels);
            sum = add_ints(sum, rounded);
            int64_t to = found->row * self->value_stride + found->first + k;
            if (kind == INT8) store_int8_inputs((int8_input_t *)self->values + to, rounded, end - k);
            else store_int8_first((int8_t *)self->values + to, rounded, end - k);
        }
        /* Unsigned, because the sum may overflow if x has NaN. */
        uint32_t base = ONE_BY_ONE - halvings * HALVING, added = kind == INT8 ? INT8_ADDED : 8;
        memcpy(self->bases + place, &base, sizeof base);
        self->offsets[place] = (int32_t)(base - added * (uint32_t)sum_of_ints(sum));
    }
}

/* Loops with constant bounds, except for the rest of a WIDE_GROUP. */
#define WITH_CONSTANTS(f, count, group, ...)                                    \
    ((count) < WIDE_GROUP ? f(__VA_ARGS__, count, group)                         \
     : (group) == GROUP   ? f(__VA_ARGS__, WIDE_GROUP, GROUP)                    \
                          : f(__VA_ARGS__, WIDE_GROUP, WIDE_GROUP))

#define MEASURED_AT_ONCE 8

/* Rounds inputs first..end-1 of `num_rows` rows, which have fewer than 2^32 groups together. Some groups are measured
 * before the first of them is rounded: one group alone would wait for its largest number. */
ALWAYS_INLINE void quantise_rows(const int kind, const converted_t *self, int64_t first_row, int64_t num_rows,
                                 int64_t first, int64_t end, const void *x, int type, int64_t at, int64_t row_step) {
    wide_group_t found[MEASURED_AT_ONCE];
    uint32_t each = parts_of(end - first, WIDE_GROUP), num_groups = num_rows * each; /* 32 bits: divisions are fast */
    for (uint32_t begin = 0; begin < num_groups; begin += MEASURED_AT_ONCE) {
        uint32_t here = least(MEASURED_AT_ONCE, num_groups - begin);
        for (uint32_t i = 0; i < here; i++) {
            int64_t row = (begin + i) / each, k = (begin + i) % each * WIDE_GROUP, count = least(WIDE_GROUP, end - first - k);
            found[i] = (wide_group_t){first_row + row, first + k, at + row * row_step + k, count};
            WITH_CONSTANTS(measure, count, self->group, found + i, x, type);
        }
        for (uint32_t i = 0; i < here; i++)
            WITH_CONSTANTS(quantise, found[i].count, self->group, kind, self, found + i, x, type);
    }
}

/* The type of activations that weights of a kind take. For INT8 and INT4, this is the kind itself. */
static inline int input_type(int kind) { return kind == BFLOAT16 ? BFLOAT16_INPUT : kind; }

/* Converts inputs first..end-1 of `num_rows` rows. They are read from x, beginning at its element `at`; rows of x are
 * `row_step` elements apart. `first` begins a WIDE_GROUP. */
static void convert(const converted_t *self, int64_t first_row, int64_t num_rows, int64_t first, int64_t end,
                    const void *x, int type, int64_t at, int64_t row_step) {
    if (self->kind == INT8) quantise_rows(INT8, self, first_row, num_rows, first, end, x, type, at, row_step);
    else if (self->kind == INT4) quantise_rows(INT4, self, first_row, num_rows, first, end, x, type, at, row_step);
    else
        for (int64_t row = first_row; row < first_row + num_rows; row++, at += row_step)
            for (int64_t k = first; k < end; k += LANES) {
                int64_t place = row * self->value_stride + k;
                floats_t some = load_some(x, type, at + k - first, end - k);
                if (input_type(self->kind) == BFLOAT16) store_bf16_first((bfloat16_t *)self->values + place, some, end - k);
                else store_first((float *)self->values + place, some, end - k);
            }
}

typedef struct {
    const void *x; /* (rows, num_in) */
    int type;
    converted_t made;
} conversion_t;

static void convert_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const conversion_t *self = context;
    int64_t num_in = self->made.num_in;
    convert(&self->made, first, end - first, 0, num_in, self->x, self->type, first * num_in, num_in);
}

/* Number of groups of `group` inputs in a row of activations; 0 for weights in floats. */
static inline int64_t groups_of(const linear_t *linear, int64_t group) {
    return is_integer(linear->kind) ? parts_of(linear->num_in, group) : 0;
}

static inline int64_t value_bytes_of(int kind) {
    int64_t each[] = {4, BFLOAT16_INPUT == FLOAT32 ? 4 : 2, sizeof(int8_input_t), 1};
    return each[kind];
}

/* Elements from row to row: an odd number of cache lines, so that rows do not fall into the same few cache sets. */
static inline int64_t value_stride_of(int kind, int64_t num_in) {
    int64_t each = value_bytes_of(kind), lines = round_up(num_in * each, 64) / 64;
    return (lines | 1) * 64 / each;
}

/* Matrices have 16 rows. Of the last one, those after `num_rows` are read, and their sums are not used. */
static inline int64_t rows_in_memory(int64_t num_rows) {
    return has_matrices && num_rows > MATRIX_ROWS ? round_up(num_rows, MATRIX_ROWS) : num_rows;
}

/* The activations that a layer reads, not yet written, in `memory` of converted_bytes. */
static converted_t converted_in(void *memory, const linear_t *linear, int64_t group, int64_t num_rows) {
    int kind = linear->kind;
    if (kind == INT4) group = GROUP;
    int64_t stride = value_stride_of(kind, linear->num_in);
    float *scales = (float *)((char *)memory + rows_in_memory(num_rows) * stride * value_bytes_of(kind));
    int32_t *offsets = (int32_t *)(scales + num_rows * groups_of(linear, WIDE_GROUP));
    float *bases = (float *)(offsets + num_rows * groups_of(linear, group));
    return (converted_t){kind, linear->num_in, num_rows, group, memory, stride, scales, offsets, bases,
                         linear->input_scale};
}

/* Bytes of a layer's activations; enough for groups of GROUP inputs or more. */
static int64_t converted_bytes(const linear_t *linear, int64_t num_rows) {
    int64_t value_bytes = value_stride_of(linear->kind, linear->num_in) * value_bytes_of(linear->kind);
    int64_t group_bytes = 4 * groups_of(linear, WIDE_GROUP) + 8 * groups_of(linear, GROUP);
    return rows_in_memory(num_rows) * value_bytes + num_rows * group_bytes;
}

static inline input_t input_of(const converted_t *made) {
    return (input_t){made->values, made->value_stride, made->scales, made->offsets, made->bases, made->num_rows,
                     made->group};
}

/* Whether a layer reads x as it is. Matrices also read rows after the last one, so they read copies. */
static inline bool reads_directly(const linear_t *linear, int type) {
    return input_type(linear->kind) == type && !(has_matrices && type == BFLOAT16);
}

/* x (num_rows, num_in) of any type, in the form that the layer's weights take. If x already has that form it is used
 * directly, else it is converted into `memory`, which has converted_bytes. */
static input_t convert_input(const linear_t *linear, const void *x, int type, int64_t group, int64_t num_rows,
                             void *memory, int num_threads) {
    if (reads_directly(linear, type)) return (input_t){x, linear->num_in, NULL, NULL, NULL, num_rows, group};
    conversion_t job = {x, type, converted_in(memory, linear, group, num_rows)};
    run_items(convert_task, &job, num_rows, 1 + SMALL / linear->num_in, num_threads);
    return input_of(&job.made);
}

/* ---- products ---- */

/* A tile of `rows` rows from `row` on, over inputs first..end-1 of a block. `w` are the weights from `first` on. */
ALWAYS_INLINE const char *tile(const int kind, const int fetch, const int rows, const input_t *input, int64_t row,
                               int64_t first, int64_t end, const void *w, float *c, const char *next) {
    int64_t at = row * input->stride + first, stride = input->stride, num_in = end - first;
    const float *floats = (const float *)input->values + at;
    const bfloat16_input_t *bfloats = (const bfloat16_input_t *)input->values + at;
    if (kind == FLOAT32) return tile_float32(fetch, rows, floats, stride, w, num_in, c, first > 0, next);
    if (kind == BFLOAT16) return tile_bfloat16(fetch, rows, bfloats, stride, w, num_in, c, first > 0, next);
    return tile_of_integers(kind, fetch, rows, input, row, first, end, w, c, next);
}

/* A function for each kind and number of rows. In one large function, GCC 12 keeps vectors of tiles in memory. */
typedef const char *(*tile_t)(const input_t *input, int64_t row, int64_t first, int64_t end, const void *w, float *c,
                              const char *next);
#define TILE(kind, fetch, rows)                                                                                      \
    static __attribute__((noinline)) const char *kind##_##fetch##_##rows(const input_t *input, int64_t row,           \
                                                                         int64_t first, int64_t end, const void *w,   \
                                                                         float *c, const char *next) {                \
        return tile(kind, fetch, rows, input, row, first, end, w, c, next);                                           \
    }
#define TILES(kind)                                                                                              \
    TILE(kind, NEAR, 1) TILE(kind, NEAR, 2) TILE(kind, NEAR, 3) TILE(kind, NEAR, 4) TILE(kind, NEAR, 5)          \
    TILE(kind, NEAR, 6) TILE(kind, DEEP, 4) TILE(kind, DEEP, 5) TILE(kind, DEEP, 6) TILE(kind, NEXT, 6)
TILES(FLOAT32)
TILES(BFLOAT16)
TILES(INT8)
TILES(INT4)

#define FIRST_THREE(kind) kind##_NEAR_1, kind##_NEAR_2, kind##_NEAR_3
#define TILES_OF(kind)                                                     \
    {{FIRST_THREE(kind), kind##_NEAR_4, kind##_NEAR_5, kind##_NEXT_6}, \
     {FIRST_THREE(kind), kind##_NEAR_4, kind##_NEAR_5, kind##_NEAR_6},     \
     {FIRST_THREE(kind), kind##_DEEP_4, kind##_DEEP_5, kind##_DEEP_6}}
static const tile_t tiles[][3][TILE_ROWS] = {TILES_OF(FLOAT32), TILES_OF(BFLOAT16), TILES_OF(INT8), TILES_OF(INT4)};

static bool is_amd;
/* Bytes of weights that many rows use one after the other, in the L2 cache: at most a quarter of it. The larger they are,
 * the more rarely sums are stored and loaded. On AMD Zen 4, 128 KB are 3 % faster than the 16 KB that fit the L1 cache, and
 * more gain less than 1 %; on a fifth-generation Xeon, 256 KB are 1 to 4 % faster than 128 KB. */
static int64_t slab_bytes = 16 * 1024;
__attribute__((constructor)) static void look_up_processor(void) {
#ifdef _SC_LEVEL1_DCACHE_SIZE
    long l1_bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE), l2_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    slab_bytes = least(256 * 1024, most(slab_bytes, l2_bytes / 4));
#ifdef __x86_64__
    __builtin_cpu_init();
    is_amd = __builtin_cpu_is("amd");
    if (is_amd && l1_bytes > 0 && l1_bytes <= 32768) near_bytes = 0;
#endif
#endif
}

#ifdef MATRICES
/* As block_sums, for as many inputs as matrices take. Returns their number. */
static int64_t matrix_sums(const linear_t *self, const input_t *input, const char *weights, int64_t first_row,
                           int64_t num_rows, float *c) {
    const uint8_t *w = (const uint8_t *)weights;
    if (self->kind == BFLOAT16) {
        int64_t end = self->num_in / GROUP * GROUP, slab = most(1, slab_bytes / (2 * GROUP * BLOCK)) * GROUP;
        int64_t depth = num_rows <= MATRIX_ROWS ? end : slab, both = 2 * MATRIX_ROWS;
        int first_fetch = input->num_rows <= 2 * both ? DEEP : NEAR; /* many rows find weights of a panel in a cache */
        for (int64_t first = 0; first < end; first += depth)
            for (int64_t r = 0; r < num_rows; r += both) {
                const bfloat16_t *a = (const bfloat16_t *)input->values + (first_row + r) * input->stride + first;
                const bfloat16_t *part = (const bfloat16_t *)weights + first * BLOCK;
                int64_t num_in = least(depth, end - first);
                float *to = c + r * SUMS_APART;
                int fetch = r ? NEXT : first_fetch;
                if (num_rows - r > MATRIX_ROWS) bfloat16_matrices(2, a, input->stride, part, num_in, to, first, fetch);
                else bfloat16_matrices(1, a, input->stride, part, num_in, to, first, fetch);
            }
        return end;
    }
    int64_t end = self->num_in / WIDE_GROUP * WIDE_GROUP;
    if (self->kind == INT4) integer_matrices(INT4, GROUP, input, first_row, num_rows, end, w, c);
    else if (input->group == GROUP) integer_matrices(INT8, GROUP, input, first_row, num_rows, end, w, c);
    else integer_matrices(INT8, WIDE_GROUP, input, first_row, num_rows, end, w, c);
    return end;
}
#endif

static inline const char *weights_of(const linear_t *self, int64_t output) {
    return (const char *)self->weight + bytes_of_block(self->kind, self->num_in) * (output / BLOCK);
}

/* Sums of a block with these weights for `num_rows` rows, beginning with first_row, into c; rows of c are SUMS_APART floats
 * apart. `after` are the weights that the thread reads next. */
static void block_sums(const linear_t *self, const input_t *input, const char *weights, int64_t first_row,
                       int64_t num_rows, bool by_matrices, float *c, const char *after) {
    int64_t step = is_integer(self->kind) ? WIDE_GROUP : GROUP; /* inputs that tiles compute whole */
    int64_t slab = step * most(1, slab_bytes / bytes_of_block(self->kind, step));
    int64_t depth = num_rows <= TILE_ROWS ? self->num_in : slab;
    /* A single tile of floats on AMD Zen 4 only waits for memory: DEEP costs 3 to 7 % there. */
    bool is_deep = !is_amd || num_rows > TILE_ROWS || is_integer(self->kind) || BFLOAT16_INPUT == FLOAT32;
    int first_fetch = is_deep ? DEEP : NEAR;
    int64_t begin = 0;
#ifdef MATRICES
    if (by_matrices) begin = matrix_sums(self, input, weights, first_row, num_rows, c);
#endif
    for (int64_t first = begin; first < self->num_in; first += depth) {
        const char *w = weights + bytes_of_block(self->kind, first);
        int64_t end = least(first + depth, self->num_in);
        int64_t num_bytes = bytes_of_block(self->kind, end - first), fetched = 0;
        const char *next = end < self->num_in ? w + num_bytes : after;
        for (int64_t r = 0; r < num_rows; r += TILE_ROWS) {
            const char *from = fetched < num_bytes ? next + fetched : w;
            tile_t tile = tiles[self->kind][r ? NEXT : first_fetch][least(TILE_ROWS, num_rows - r) - 1];
            fetched += tile(input, first_row + r, first, end, w, c + r * SUMS_APART, from) - from;
        }
    }
}

typedef struct {
    const linear_t *linear, *up; /* if `up` is not NULL, a layer of the same kind: activation(linear) * up */
    int activation;              /* of `linear` */
    input_t input;
    int how;
    void *out; /* (num_rows, num_out) */
    const converted_t *next; /* CONVERT: the input of the layer that reads the result; replaces `out` */
    int64_t num_rows;
    int64_t rows_of_part, parts_of_group, panel; /* `multiply` sets these */
    bool by_matrices;                            /* and this */
} product_t;

/* Number of rows that are multiplied together, a multiple of `step`. Parts are equal, and every thread has the same number
 * of them, as far as `step` allows. So a thread computes the same rows in all layers, and finds them in the cache of its
 * core. */
static int64_t rows_of_part(int64_t num_rows, int64_t step, int num_threads) {
    int64_t num_parts = parts_of(num_rows, ROWS_AT_ONCE / step * step);
    if (num_threads > 1 && num_rows >= num_threads * ROWS_AT_ONCE / 2) num_parts = round_up(num_parts, num_threads);
    return round_up(parts_of(num_rows, most(1, num_parts)), step);
}

static inline floats_t activated(int activation, floats_t x) {
    switch (activation) {
        case QUICK_GELU: return quick_gelu(x);
        case EXACT_GELU: return exact_gelu(x);
        case TANH_GELU: return tanh_gelu(x);
        case SILU: return silu(x);
        default: return x;
    }
}

/* LANES of x W^T + bias, from the sums of these outputs. */
static inline floats_t outputs_of(const linear_t *self, int64_t output, const float *sums) {
    int64_t count = self->num_out - output;
    floats_t scale = self->kind == INT8 ? load_first(self->scale + output, count) : splat(1.0f);
    return times_add(load(sums), scale, self->bias ? load_first(self->bias + output, count) : zeros());
}

/* Stores a row's outputs panel..end-1; CONVERT keeps them in `sums`, which are those of `linear`. `up_sums` are those of
 * `up`. `how` is known at compile time. */
ALWAYS_INLINE void put(const int how, const product_t *self, int64_t row, int64_t panel, int64_t end, float *sums,
                       const float *up_sums) {
    int64_t at = row * self->linear->num_out;
    for (int64_t o = panel; o < end; o += LANES, sums += LANES, up_sums += LANES) {
        floats_t x = activated(self->activation, outputs_of(self->linear, o, sums));
        if (self->up) x = times(x, outputs_of(self->up, o, up_sums));
        if (how == CONVERT) {
            store(sums, x);
        } else if (how == STORE_BFLOAT16) {
            store_bf16_first((bfloat16_t *)self->out + at + o, x, end - o);
        } else {
            float *out = (float *)self->out + at + o;
            store_first(out, how == ADD_FLOAT32 ? add(x, load_first(out, end - o)) : x, end - o);
        }
    }
}

static void put_rows(const product_t *self, int64_t first_row, int64_t num_rows, int64_t panel, int64_t end, float *sums,
                     const float *up_sums) {
    for (int64_t row = first_row, at = 0; row < first_row + num_rows; row++, at += SUMS_APART)
        switch (self->how) {
            case STORE_FLOAT32: put(STORE_FLOAT32, self, row, panel, end, sums + at, up_sums + at); break;
            case STORE_BFLOAT16: put(STORE_BFLOAT16, self, row, panel, end, sums + at, up_sums + at); break;
            case ADD_FLOAT32: put(ADD_FLOAT32, self, row, panel, end, sums + at, up_sums + at); break;
            default: put(CONVERT, self, row, panel, end, sums + at, up_sums + at);
        }
    if (self->how == CONVERT) convert(self->next, first_row, num_rows, panel, end, sums, FLOAT32, 0, SUMS_APART);
}

/* Number of parts that a panel of weights is multiplied by in succession, while the rows of these parts stay in a
 * cache. If there is a part for every thread, a group is no larger than one thread's share. */
static int64_t parts_of_group(const product_t *self, int num_threads) {
    int64_t part_bytes = self->rows_of_part * self->input.stride * value_bytes_of(self->linear->kind);
    int64_t num_parts = parts_of(self->num_rows, self->rows_of_part), at_once = most(1, GROUP_BYTES / part_bytes);
    if (num_threads <= 1) return at_once;
    if (num_parts < num_threads) return num_parts;
    return least(most(1, at_once / num_threads), parts_of(num_parts, num_threads));
}

/* Brings the memory of a panel's results into the cache while its sums are computed. That of few rows is there already. */
static void fetch_results(const product_t *self, int64_t first_row, int64_t num_rows, int64_t panel) {
    int64_t each = self->how == STORE_BFLOAT16 ? 2 : 4, row_bytes = self->linear->num_out * each;
    const char *out = (const char *)self->out + first_row * row_bytes + panel * each;
    for (int64_t r = 0; r < num_rows; r++, out += row_bytes)
        for (int64_t at = 0; at < self->panel * each; at += 64) __builtin_prefetch(out + at, 1, 2);
}

static void product_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const product_t *self = context;
    const linear_t *linear = self->linear, *up = self->up;
    _Alignas(64) float sums[2][ROWS_AT_ONCE * SUMS_APART];
    int64_t num_parts = parts_of(self->num_rows, self->rows_of_part), each = self->parts_of_group;
    int64_t group_items = each * parts_of(linear->num_out, self->panel);
    if (self->by_matrices) set_up_matrices(self->num_rows, is_integer(linear->kind) ? least(64, self->input.group) : 64);
    for (int64_t item = first; item < end; item++) {
        int64_t first_part = item / group_items * each, in_group = item % group_items;
        int64_t here = least(each, num_parts - first_part), panel = in_group / here * self->panel;
        int64_t next_panel = (in_group + 1) / here * self->panel;
        int64_t first_row = (first_part + in_group % here) * self->rows_of_part;
        int64_t stop = least(panel + self->panel, linear->num_out);
        int64_t num_rows = least(self->rows_of_part, self->num_rows - first_row);
        if (self->how != CONVERT && num_rows > TILE_ROWS) fetch_results(self, first_row, num_rows, panel);
        for (int64_t output = panel; output < stop; output += BLOCK) {
            int64_t to = output - panel, next = output + BLOCK < stop ? output + BLOCK : next_panel;
            const char *weights = weights_of(linear, output), *after = weights_of(linear, next);
            const char *others = up ? weights_of(up, output) : after;
            block_sums(linear, &self->input, weights, first_row, num_rows, self->by_matrices, sums[0] + to, others);
            if (up) block_sums(up, &self->input, others, first_row, num_rows, self->by_matrices, sums[1] + to, after);
        }
        put_rows(self, first_row, num_rows, panel, stop, sums[0], sums[1]);
    }
    if (self->by_matrices) release_matrices();
}

/* Number of outputs that are finished together. If they are converted for the next layer, a panel must hold a whole
 * group of its inputs. A larger panel reads rows more rarely: many rows take 2 to 18 % less time with AMX, and 4 to 6 % less
 * in float32, on one thread of a fifth-generation Xeon. A smaller panel keeps more threads busy. */
static int64_t panel_of(const product_t *self, int num_threads) {
    int64_t num_large = parts_of(self->linear->num_out, PANEL) * parts_of(self->num_rows, self->rows_of_part);
    int64_t few_rows = self->by_matrices ? 2 * MATRIX_ROWS : ROWS_AT_ONCE;
    if (self->num_rows > few_rows && num_large >= 2 * num_threads) return PANEL;
    return most(most(BLOCK, LEAST_PANEL), self->how == CONVERT && is_integer(self->next->kind) ? WIDE_GROUP : 0);
}

static void multiply(product_t *job, int num_threads) {
    if (!job->num_rows) return;
    job->by_matrices = uses_matrices(job->linear->kind, job->num_rows);
    job->rows_of_part = rows_of_part(job->num_rows, job->by_matrices ? MATRIX_ROWS : TILE_ROWS, num_threads);
    job->panel = panel_of(job, num_threads);
    job->parts_of_group = parts_of_group(job, num_threads);
    int64_t num_panels = parts_of(job->linear->num_out, job->panel), num_parts = parts_of(job->num_rows, job->rows_of_part);
    int64_t per_item = least(job->num_rows, job->rows_of_part) * job->linear->num_in * job->panel;
    run_items(product_task, job, num_panels * num_parts, 1 + SMALL / per_item, num_threads);
}

/* out = x W^T + bias, or out += x W^T + bias if `how` is ADD_FLOAT32. */
static void multiply_into(const linear_t *linear, const input_t *input, int64_t num_rows, int how, void *out,
                          int num_threads) {
    product_t job = {linear, NULL, NONE, *input, how, out, NULL, num_rows, 0, 0, 0, false};
    multiply(&job, num_threads);
}

/* activation(x W^T + bias), times x up^T + its bias if `up` is not NULL, in the form that the next layer reads. */
static void multiply_for(const linear_t *linear, const linear_t *up, int activation, const input_t *input,
                         int64_t num_rows, const converted_t *next, int num_threads) {
    product_t job = {linear, up, activation, *input, CONVERT, NULL, next, num_rows, 0, 0, 0, false};
    multiply(&job, num_threads);
}

/* As multiply_into, for x of any type; `memory` has converted_bytes of the layer. */
static void apply(const linear_t *linear, const void *x, int type, int64_t group, int64_t num_rows, int how, void *out,
                  void *memory, int num_threads) {
    input_t input = convert_input(linear, x, type, group, num_rows, memory, num_threads);
    multiply_into(linear, &input, num_rows, how, out, num_threads);
}
