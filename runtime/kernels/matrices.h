/* Products by AMX, whose registers hold matrices of 16 rows (see amx.h).
 *
 * AMX reads weights in the layout of tiles.h: 16 outputs of 32 inputs in bfloat16, or of 64 inputs in 8 bits, are a matrix
 * whose rows are 4 * BLOCK bytes apart. Weights in 4 bits are widened to 8 bits first.
 *
 * Sums of integers are exact, so INT8 and INT4 have the bits that vectors give, and few rows are left to vectors. Sums of
 * bfloat16 are added in an order of their own, 32 inputs at a time, so AMX computes them for any number of rows. Inputs
 * after the last whole GROUP, or WIDE_GROUP of integers, are left to vectors.
 */
#pragma once

#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(BFLOAT16_PRODUCTS)
#define MATRICES 1

/* Shapes of the registers of AMX, as `ldtilecfg` reads them. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} matrix_shapes_t;

#include "amx.h"

#define MATRIX_ROWS 16
/* Of integers; for fewer, vectors are as fast. */
#define FEWEST_ROWS(kind) ((kind) == INT4 ? 12 : 10)

static bool has_matrices;
__attribute__((constructor)) static void look_up_matrices(void) { has_matrices = may_use_matrices(); }

static inline bool uses_matrices(int kind, int64_t num_rows) {
    return has_matrices && (kind == BFLOAT16 || (kind != FLOAT32 && num_rows >= FEWEST_ROWS(kind)));
}

/* Registers 0 to 3 hold sums and 4 and 5 activations, of 16 rows or `num_rows` if these are fewer; 6 and 7 hold weights.
 * Without rows they have one: none is an error of the instruction. A product adds up `bytes` bytes of a row of
 * activations: 64, or 32 if that is a group. Each job sets this up, because other libraries do so too. */
static void set_up_matrices(int64_t num_rows, int64_t bytes) {
    matrix_shapes_t shapes = {.palette = 1};
    for (int n = 0; n < 8; n++) {
        shapes.row_bytes[n] = n == 4 || n == 5 ? bytes : 64;
        shapes.num_rows[n] = n > 5 ? bytes / 4 : most(1, least(MATRIX_ROWS, num_rows));
    }
    set_shapes(&shapes);
}

ALWAYS_INLINE void fetch_into_l2(const uint8_t *at, int64_t num_bytes) {
    for (int64_t line = 0; line < num_bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
}

#define EACH_OF_FOUR(f) {f(0); f(1); f(2); f(3);}

/* Sums of a block for up to 16 rows (`halves` 1) or 32 (2). `num_in` is a multiple of GROUP. `fetch` is NEXT if the weights
 * are in a cache. */
ALWAYS_INLINE void bfloat16_matrices(const int halves, const bfloat16_t *a, int64_t stride, const bfloat16_t *w,
                                     int64_t num_in, float *c, bool go_on, int fetch) {
    const int64_t row_bytes = 2 * stride, num_steps = num_in / GROUP, step = GROUP * BLOCK;
#define SUMS(n) (c + (halves == 1 ? n * LANES : n / 2 * MATRIX_ROWS * SUMS_APART + n % 2 * LANES))
#define LOAD_SUMS(n) LOAD(n, SUMS(n), 4 * SUMS_APART)
#define STORE_SUMS(n) STORE(n, SUMS(n), 4 * SUMS_APART)
    const int at_once = halves == 1 ? TILE_VECTORS : 2; /* vectors of outputs */
    for (int v = 0; v < TILE_VECTORS; v += at_once, c += at_once * LANES) {
        const bfloat16_t *inputs = a, *weights = w + 2 * v * LANES;
        if (go_on) EACH_OF_FOUR(LOAD_SUMS)
        else EACH_OF_FOUR(CLEAR)
        for (int64_t k = 0; k < num_steps; k++, inputs += GROUP, weights += step) {
            if (fetch == NEAR && !v) fetch_ahead(NEAR, 2 * step / 64, weights, NULL);
            if (fetch == DEEP && !v) fetch_ahead(DEEP, 2 * step / 64, weights, NULL);
            LOAD(4, inputs, row_bytes);
            LOAD(6, weights, 4 * BLOCK);
            LOAD(7, weights + 2 * LANES, 4 * BLOCK);
            ADD_BFLOAT16(0, 4, 6);
            ADD_BFLOAT16(1, 4, 7);
            if (halves == 1) {
                LOAD(6, weights + 4 * LANES, 4 * BLOCK);
                LOAD(7, weights + 6 * LANES, 4 * BLOCK);
                ADD_BFLOAT16(2, 4, 6);
                ADD_BFLOAT16(3, 4, 7);
            } else {
                LOAD(5, inputs + MATRIX_ROWS * stride, row_bytes);
                ADD_BFLOAT16(2, 5, 6);
                ADD_BFLOAT16(3, 5, 7);
            }
        }
        EACH_OF_FOUR(STORE_SUMS)
    }
}

/* Weights of a WIDE_GROUP in 8 bits, from 4 bits; `scales` receives those of each group. */
static void widen(const uint8_t *w, uint8_t *widened, floats_t scales[WIDE_GROUP / GROUP][TILE_VECTORS]) {
    for (int g = 0; g < WIDE_GROUP / GROUP; g++) {
        EACH(v, TILE_VECTORS) scales[g][v] = load_float16((const uint16_t *)w + v * LANES);
        w += 2 * BLOCK;
        for (int k = 0; k < GROUP; k += 8, w += 4 * BLOCK, widened += 8 * BLOCK)
            EACH(v, TILE_VECTORS) {
                _mm512_store_si512(widened + 4 * v * LANES, low_halves(w + 4 * v * LANES));
                _mm512_store_si512(widened + 4 * BLOCK + 4 * v * LANES, high_halves(w + 4 * v * LANES));
            }
    }
}

typedef int32_t integer_sums_t[WIDE_GROUP / GROUP][2 * MATRIX_ROWS][2 * LANES];

/* Integer sums of each group of a WIDE_GROUP, for two vectors of outputs and 16 rows (`halves` 1) or 32 (2). Of the weights
 * `next`, `fetched` bytes are fetched. */
ALWAYS_INLINE void sum_groups(const int halves, const int64_t group, const int8_t *a, int64_t stride, const uint8_t *w,
                              integer_sums_t sums, const uint8_t *next, int64_t fetched) {
    const int64_t step = least(64, group), each = fetched * step / WIDE_GROUP;
#define STORE_INTEGERS(n) STORE(n, out + n / 2 * MATRIX_ROWS * 2 * LANES + n % 2 * LANES, 8 * LANES)
    for (int64_t k = 0; k < WIDE_GROUP; k += step, next += each) {
        fetch_into_l2(next, each);
        if (k % group == 0) EACH_OF_FOUR(CLEAR)
        LOAD(4, a + k, stride);
        LOAD(6, w + k * BLOCK, 4 * BLOCK);
        LOAD(7, w + k * BLOCK + 4 * LANES, 4 * BLOCK);
        ADD_INTEGERS(0, 4, 6);
        ADD_INTEGERS(1, 4, 7);
        if (halves == 2) {
            LOAD(5, a + MATRIX_ROWS * stride + k, stride);
            ADD_INTEGERS(2, 5, 6);
            ADD_INTEGERS(3, 5, 7);
        }
        if ((k + step) % group) continue;
        int32_t *out = sums[k / group][0];
        STORE_INTEGERS(0);
        STORE_INTEGERS(1);
        if (halves == 1) continue;
        STORE_INTEGERS(2);
        STORE_INTEGERS(3);
    }
}

/* Sums of one block for `num_rows` rows from first_row on, over whole WIDE_GROUPs of inputs, as tile_of_integers. */
ALWAYS_INLINE void integer_matrices(const int kind, const int64_t group, const input_t *input, int64_t first_row,
                                    int64_t num_rows, int64_t num_in, const uint8_t *w, float *c) {
    const int64_t wide_bytes = kind == INT8 ? WIDE_GROUP * BLOCK : WIDE_GROUP / GROUP * INT4_BYTES;
    const int64_t stride = input->stride, apart = input->num_rows; /* of activations; of what their groups have */
    _Alignas(64) uint8_t widened[WIDE_GROUP * BLOCK];
    _Alignas(64) integer_sums_t sums;
    floats_t weight_scales[WIDE_GROUP / GROUP][TILE_VECTORS];
    for (int64_t k = 0; k < num_in; k += WIDE_GROUP, w += wide_bytes) {
        if (kind == INT4) widen(w, widened, weight_scales);
        for (int64_t begin = 0; begin < num_rows; begin += 2 * MATRIX_ROWS) {
            int64_t row = first_row + begin, count = least(2 * MATRIX_ROWS, num_rows - begin);
            const int8_t *a = (const int8_t *)input->values + row * stride + k;
            const float *scales = input->scales + k / WIDE_GROUP * apart + row;
            const float *bases = input->bases + k / group * apart + row;
            const int32_t *offsets = input->offsets + k / group * apart + row;
            /* The next WIDE_GROUP is fetched step by step and row by row: the processor waits for few lines at a time. */
            const int64_t half = begin ? 0 : wide_bytes / 4, fetched = round_up(parts_of(half, count), 64);
            for (int v = 0; v < TILE_VECTORS; v += 2) {
                const uint8_t *weights = (kind == INT8 ? w : widened) + 4 * v * LANES;
                const uint8_t *next = w + wide_bytes + wide_bytes / TILE_VECTORS * v;
                float *total = c + begin * SUMS_APART + v * LANES;
                if (count > MATRIX_ROWS) sum_groups(2, group, a, stride, weights, sums, next, half);
                else sum_groups(1, group, a, stride, weights, sums, next, half);
                next += half;
                for (int64_t r = 0; r < count; r++, total += SUMS_APART, next += fetched) {
                    floats_t scaled[2] = {zeros(), zeros()};
                    fetch_into_l2(next, fetched);
                    EACH(g, WIDE_GROUP / group) {
                        ints_t offset = splat_ints(offsets[g * apart + r]);
                        floats_t base = splat(bases[g * apart + r]);
                        EACH(i, 2) {
                            ints_t sum = add_ints(_mm512_load_si512(sums[g][r] + i * LANES), offset);
                            floats_t exact = subtract(as_floats(sum), base);
                            if (kind == INT8) scaled[i] = add(scaled[i], exact);
                            else scaled[i] = times_add(exact, weight_scales[g][v + i], scaled[i]);
                        }
                    }
                    EACH(i, 2) add_to_total(total + i * LANES, scaled[i], scales[r], k > 0);
                }
            }
        }
    }
}

#else
#define MATRIX_ROWS 1
#define has_matrices false
#define uses_matrices(kind, num_rows) false
#define set_up_matrices(num_rows, bytes) ((void)0)
#define release_matrices() ((void)0)
#endif
