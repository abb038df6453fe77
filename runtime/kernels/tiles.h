/* Tiles: sums of up to TILE_ROWS rows and one block of BLOCK outputs, over a range of inputs, held in registers.
 *
 * Weights are laid out in blocks; inside a block, outputs stand side by side for one input (float32), a pair of inputs
 * (bfloat16), four (int8) or eight (int4), as multiply-add instructions take them. A row's sums are always taken in the
 * same order, so its result is the same, to the bit, alone or among others, and with any number of threads.
 *
 * int8 and int4: activations are rounded to int8 too, for each row in groups that have a scale each. The products are
 * summed as integers. Weights are stored with a number added, INT8_ADDED or 8, because many instructions multiply
 * unsigned with signed numbers. That many times the sum of a group's activations, its offset, is taken away.
 */
#pragma once

#include <stdbool.h>
#include <string.h>

#include "parallel.h"
#include "vector.h"

#define BLOCK (TILE_VECTORS * LANES) /* outputs */
#define GROUP 32 /* inputs that share a scale of 8-bit activations, and one of 4-bit weights */
#define WIDE_GROUP 128 /* the same of the encoder's activations for 8-bit weights: its norms are balanced, see balancing.py */
#define PANEL (BLOCK > WIDE_GROUP ? BLOCK : WIDE_GROUP) /* outputs that are finished together, as a group may be made of them */
#define INT4_BYTES (BLOCK * (2 + GROUP / 2)) /* of a group in a block: scales in float16, then pairs of weights */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

/* Activations in the form that a kind of weights takes. */
typedef struct {
    const void *values; /* rows of num_in: float, bfloat16, int8_input_t (INT8) or int8_t (INT4) */
    int64_t stride;     /* elements from row to row */
    const float *scales;    /* (rows, groups), INT8 and INT4 only */
    const int32_t *offsets; /* (rows, groups): minus INT8_ADDED or 8 times the sum of the group */
    int64_t group, num_groups; /* inputs that share a scale; for INT4 it is GROUP */
} input_t;

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define EACH(i, count) UNROLL for (int i = 0; i < (count); i++)

#define AHEAD 8192 /* bytes: the memory answers by then, and they fit into the nearest cache */

static inline void fetch_ahead(const void *weights) { __builtin_prefetch((const char *)weights + AHEAD, 0, 3); }

ALWAYS_INLINE void load_sums(const int rows, floats_t sums[TILE_ROWS][TILE_VECTORS], const float *c, bool go_on) {
    EACH(r, rows) EACH(v, TILE_VECTORS) sums[r][v] = go_on ? load(c + r * PANEL + v * LANES) : zeros();
}

ALWAYS_INLINE void store_sums(const int rows, floats_t sums[TILE_ROWS][TILE_VECTORS], float *c) {
    EACH(r, rows) EACH(v, TILE_VECTORS) store(c + r * PANEL + v * LANES, sums[r][v]);
}

ALWAYS_INLINE void tile_float32(const int rows, const float *a, int64_t stride, const float *w, int64_t num_in, float *c,
                                bool go_on) {
    floats_t sums[TILE_ROWS][TILE_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k++, w += BLOCK) {
        floats_t weights[TILE_VECTORS];
        EACH(v, TILE_VECTORS) {
            weights[v] = load(w + v * LANES);
            fetch_ahead(w + v * LANES);
        }
        EACH(r, rows) {
            floats_t x = splat(a[r * stride + k]);
            EACH(v, TILE_VECTORS) sums[r][v] = times_add(x, weights[v], sums[r][v]);
        }
    }
    store_sums(rows, sums, c);
}

#ifdef BFLOAT16_PRODUCTS
#define BFLOAT16_INPUT BFLOAT16 /* the type of activations for weights in bfloat16 */
typedef bfloat16_t bfloat16_input_t;

ALWAYS_INLINE void tile_bfloat16(const int rows, const bfloat16_t *a, int64_t stride, const bfloat16_t *w, int64_t num_in,
                                 float *c, bool go_on) {
    floats_t sums[TILE_ROWS][TILE_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k += 2, w += 2 * BLOCK) {
        pairs_t weights[TILE_VECTORS];
        EACH(v, TILE_VECTORS) {
            weights[v] = load_pairs(w + 2 * v * LANES);
            fetch_ahead(w + 2 * v * LANES);
        }
        EACH(r, rows) {
            int32_t pair;
            memcpy(&pair, a + r * stride + k, 4);
            EACH(v, TILE_VECTORS) sums[r][v] = add_pairs(sums[r][v], splat_pair(pair), weights[v]);
        }
    }
    store_sums(rows, sums, c);
}
#else
#define BFLOAT16_INPUT FLOAT32 /* weights are widened */
typedef float bfloat16_input_t;

ALWAYS_INLINE void tile_bfloat16(const int rows, const float *a, int64_t stride, const bfloat16_t *w, int64_t num_in,
                                 float *c, bool go_on) {
    floats_t sums[TILE_ROWS][TILE_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k += 2, w += 2 * BLOCK) {
        floats_t weights[TILE_VECTORS];
        EACH(v, TILE_VECTORS) {
            weights[v] = first_of_pairs(w + 2 * v * LANES);
            fetch_ahead(w + 2 * v * LANES);
        }
        EACH(r, rows) {
            floats_t x = splat(a[r * stride + k]);
            EACH(v, TILE_VECTORS) sums[r][v] = times_add(x, weights[v], sums[r][v]);
        }
        asm volatile("" : "+r"(w)); /* read the weights again: to keep them takes registers from the sums */
        EACH(v, TILE_VECTORS) weights[v] = second_of_pairs(w + 2 * v * LANES);
        EACH(r, rows) {
            floats_t x = splat(a[r * stride + k + 1]);
            EACH(v, TILE_VECTORS) sums[r][v] = times_add(x, weights[v], sums[r][v]);
        }
    }
    store_sums(rows, sums, c);
}
#endif

/* 32 bits of activations for all outputs. */
ALWAYS_INLINE ints_t splat_word(const void *a) {
    int32_t word;
    memcpy(&word, a, 4);
    return splat_ints(word);
}

/* Of integers, the sums of a group are integers, and those of all groups so far are floats. Where both fit into the
 * registers, a tile of many rows is computed in two parts: half of the vectors over a stretch of inputs, then the other
 * half, whose weights are in the nearest cache by then. Elsewhere the floats are in memory. */
#define VECTORS_AT_A_TIME(rows) (TOTALS_IN_REGISTERS && (rows) > TILE_ROWS / 2 ? TILE_VECTORS / 2 : TILE_VECTORS)
#define STRETCH (2 * GROUP) /* inputs */

typedef floats_t totals_t[TILE_ROWS][TILE_VECTORS];

ALWAYS_INLINE void load_totals(const int rows, const int vectors, totals_t totals, const float *c, bool go_on) {
    if (TOTALS_IN_REGISTERS)
        EACH(r, rows) EACH(v, vectors) totals[r][v] = go_on ? load(c + r * PANEL + v * LANES) : zeros();
}

/* Sums of a group as floats, added to the totals. */
ALWAYS_INLINE void add_to_total(floats_t *total, ints_t sums, floats_t scale, float *c, bool go_on) {
    if (TOTALS_IN_REGISTERS) *total = times_add(to_floats(sums), scale, *total);
    else store(c, times_add(to_floats(sums), scale, go_on ? load(c) : zeros()));
}

ALWAYS_INLINE void store_totals(const int rows, const int vectors, totals_t totals, float *c) {
    if (TOTALS_IN_REGISTERS) EACH(r, rows) EACH(v, vectors) store(c + r * PANEL + v * LANES, totals[r][v]);
}

/* `vectors` of a tile from its vector `first_vector` on; the first of them fetch the weights of all. */
ALWAYS_INLINE void part_int8(const int rows, const int vectors, const int first_vector, const int8_input_t *a,
                             int64_t stride, const float *scales, const int32_t *offsets, int64_t group, int64_t num_groups,
                             const uint8_t *w, int64_t num_in, float *c, bool go_on) {
    totals_t totals;
    c += first_vector * LANES, w += 4 * first_vector * LANES;
    load_totals(rows, vectors, totals, c, go_on);
    for (int64_t first = 0; first < num_in; first += group, scales++, offsets++) {
        ints_t sums[TILE_ROWS][TILE_VECTORS];
        EACH(r, rows) EACH(v, vectors) sums[r][v] = splat_ints(offsets[r * num_groups]);
        int64_t end = least(first + group, num_in);
        for (int64_t k = first; k < end; k += 4, w += 4 * BLOCK) {
            if (!first_vector) EACH(v, TILE_VECTORS) fetch_ahead(w + 4 * v * LANES);
            EACH(pass, INT8_PASSES) {
                ints_t weights[TILE_VECTORS];
                EACH(v, vectors) weights[v] = int8_weights(w + 4 * v * LANES, pass);
                EACH(r, rows) {
                    ints_t x = splat_word(a + r * stride + k + 2 * pass);
                    EACH(v, vectors) sums[r][v] = int8_products(sums[r][v], weights[v], x);
                }
            }
        }
        EACH(r, rows) EACH(v, vectors)
            add_to_total(&totals[r][v], sums[r][v], splat(scales[r * num_groups]), c + r * PANEL + v * LANES,
                         go_on || first);
    }
    store_totals(rows, vectors, totals, c);
}

ALWAYS_INLINE void tile_int8(const int rows, const int8_input_t *a, int64_t stride, const float *scales,
                             const int32_t *offsets, int64_t group, int64_t num_groups, const uint8_t *w, int64_t num_in,
                             float *c, bool go_on) {
    const int vectors = VECTORS_AT_A_TIME(rows);
    int64_t stretch = vectors < TILE_VECTORS ? most(STRETCH, group) : num_in;
    for (int64_t first = 0; first < num_in; first += stretch)
        EACH(part, TILE_VECTORS / vectors)
            part_int8(rows, vectors, part * vectors, a + first, stride, scales + first / group, offsets + first / group,
                      group, num_groups, w + first * BLOCK, least(stretch, num_in - first), c, go_on || first);
}

ALWAYS_INLINE void part_int4(const int rows, const int vectors, const int first_vector, const int8_t *a, int64_t stride,
                             const float *scales, const int32_t *offsets, int64_t num_groups, const uint8_t *w,
                             int64_t num_in, float *c, bool go_on) {
    totals_t totals;
    c += first_vector * LANES;
    load_totals(rows, vectors, totals, c, go_on);
    for (int64_t first = 0; first < num_in; first += GROUP, scales++, offsets++, w += INT4_BYTES) {
        ints_t sums[TILE_ROWS][TILE_VECTORS];
        EACH(r, rows) EACH(v, vectors) sums[r][v] = splat_ints(0);
        const uint8_t *eight = w + 2 * BLOCK + 4 * first_vector * LANES;
        for (int64_t k = first; k < first + GROUP; k += 8, eight += 4 * BLOCK) {
            ints_t weights[TILE_VECTORS];
            if (!first_vector) EACH(v, TILE_VECTORS) fetch_ahead(eight + 4 * v * LANES);
            EACH(v, vectors) weights[v] = low_halves(eight + 4 * v * LANES);
            EACH(r, rows) {
                ints_t x = splat_word(a + r * stride + k);
                EACH(v, vectors) sums[r][v] = int4_products(sums[r][v], weights[v], x);
            }
            EACH(v, vectors) weights[v] = high_halves(eight + 4 * v * LANES);
            EACH(r, rows) {
                ints_t x = splat_word(a + r * stride + k + 4);
                EACH(v, vectors) sums[r][v] = int4_products(sums[r][v], weights[v], x);
            }
        }
        EACH(v, vectors) {
            floats_t weight_scale = load_float16((const uint16_t *)w + (first_vector + v) * LANES);
            EACH(r, rows) {
                ints_t total = add_ints(int4_total(sums[r][v]), splat_ints(offsets[r * num_groups]));
                add_to_total(&totals[r][v], total, times(weight_scale, splat(scales[r * num_groups])),
                             c + r * PANEL + v * LANES, go_on || first);
            }
        }
    }
    store_totals(rows, vectors, totals, c);
}

ALWAYS_INLINE void tile_int4(const int rows, const int8_t *a, int64_t stride, const float *scales, const int32_t *offsets,
                             int64_t num_groups, const uint8_t *w, int64_t num_in, float *c, bool go_on) {
    const int vectors = VECTORS_AT_A_TIME(rows);
    int64_t stretch = vectors < TILE_VECTORS ? STRETCH : num_in;
    for (int64_t first = 0; first < num_in; first += stretch)
        EACH(part, TILE_VECTORS / vectors)
            part_int4(rows, vectors, part * vectors, a + first, stride, scales + first / GROUP, offsets + first / GROUP,
                      num_groups, w + first / GROUP * INT4_BYTES, least(stretch, num_in - first), c, go_on || first);
}
