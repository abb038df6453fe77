/* Tiles: sums of up to TILE_ROWS rows and one block of BLOCK outputs, over a range of inputs, held in registers.
 *
 * Weights are laid out in blocks. Inside a block, outputs are adjacent for one input (float32), a pair of inputs
 * (bfloat16), four (int8) or eight (int4), as multiply-add instructions read them. A row's products are always added in
 * the same order. Its result therefore has the same bits in every batch and with any number of threads.
 *
 * int8 and int4: activations are rounded to int8 too. Each row is divided into groups, and each group has a scale. The
 * products are summed as integers. Many instructions multiply unsigned with signed numbers, so weights are stored with
 * a number added, INT8_ADDED or 8. The offset of a group corrects its sum: it is minus that number times the sum of the
 * group's activations.
 *
 * int4: weights have a scale for each GROUP of inputs, activations one for each WIDE_GROUP. A GROUP of activations is
 * rounded with that scale halved n times. n is as large as the GROUP's largest magnitude allows, so an outlier makes
 * the rounding of its own GROUP coarser, and of no other. An integer sum starts from the offset plus the bits of the
 * float base = ONE_BY_ONE / 2^n. The bits of the result, read as a float, are exactly base + sum / 2^n. So one
 * subtraction replaces both the conversion to float and the halving.
 */
#pragma once

#include <stdbool.h>
#include <string.h>

#include "parallel.h"
#include "vector.h"

#define BLOCK (TILE_VECTORS * LANES) /* outputs */
#define GROUP 32 /* inputs that share a scale: of activations for 8-bit weights, and of 4-bit weights */
/* Inputs that share a scale of activations for 4-bit weights, and for 8-bit weights of an encoder, whose activations
 * have fewer outliers because its norms are balanced (schemes/balancing.py). */
#define WIDE_GROUP 128
#define PANEL (BLOCK > WIDE_GROUP ? BLOCK : WIDE_GROUP) /* the most outputs that are finished together */
#define SUMS_APART (PANEL + 16) /* floats from row to row: an odd number of cache lines, for different cache sets */
#define INT4_BYTES (BLOCK * (2 + GROUP / 2)) /* bytes of a group in a block: scales in float16, then pairs of weights */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

/* Activations in the form that a kind of weights reads. */
typedef struct {
    const void *values; /* rows of num_in: float, bfloat16, int8_input_t (INT8) or int8_t (INT4) */
    int64_t stride;     /* elements from row to row */
    const float *scales;    /* (rows, num_groups), INT8 and INT4 only */
    const int32_t *offsets; /* (rows, num_offsets): offsets of groups; for INT4 with the bits of `bases` added */
    const float *bases;     /* (rows, num_offsets), INT4 only: base, see above */
    int64_t group, num_groups, num_offsets; /* `group` inputs share a scale */
} input_t;

#define ONE_BY_ONE 0x4b400000 /* bits of 1.5 * 2^23: floats around it are 1 apart */
#define HALVING (1 << 23)     /* subtracted from the bits of a float, it halves the float */

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define EACH(i, count) UNROLL for (int i = 0; i < (count); i++)

#define AHEAD 8192 /* bytes: enough to hide the latency of memory, and few enough to fit into the L1 cache */

static inline void fetch_ahead(const void *weights) { __builtin_prefetch((const char *)weights + AHEAD, 0, 3); }

ALWAYS_INLINE void load_sums(const int rows, floats_t sums[TILE_ROWS][TILE_VECTORS], const float *c, bool go_on) {
    EACH(r, rows) EACH(v, TILE_VECTORS) sums[r][v] = go_on ? load(c + r * SUMS_APART + v * LANES) : zeros();
}

ALWAYS_INLINE void store_sums(const int rows, floats_t sums[TILE_ROWS][TILE_VECTORS], float *c) {
    EACH(r, rows) EACH(v, TILE_VECTORS) store(c + r * SUMS_APART + v * LANES, sums[r][v]);
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
            EACH(v, TILE_VECTORS) sums[r][v] = add_scaled(sums[r][v], x, weights[v]);
        }
        asm volatile("" : "+r"(w)); /* makes the compiler read the weights again: keeping them would take registers */
        EACH(v, TILE_VECTORS) weights[v] = second_of_pairs(w + 2 * v * LANES);
        EACH(r, rows) {
            floats_t x = splat(a[r * stride + k + 1]);
            EACH(v, TILE_VECTORS) sums[r][v] = add_scaled(sums[r][v], x, weights[v]);
        }
    }
    store_sums(rows, sums, c);
}
#endif

/* Copies 32 bits of activations to all lanes. */
ALWAYS_INLINE ints_t splat_word(const void *a) {
    int32_t word;
    memcpy(&word, a, 4);
    return splat_ints(word);
}

/* For int8 and int4 weights, the sums of one group are integers, and the totals of all groups so far are floats. If
 * both fit into registers, a tile of many rows is computed in two parts: half of the vectors over a STRETCH of inputs,
 * then the other half, whose weights are in the L1 cache by then. Otherwise the totals are in memory. */
#define VECTORS_AT_A_TIME(rows) (TOTALS_IN_REGISTERS && (rows) > TILE_ROWS / 2 ? TILE_VECTORS / 2 : TILE_VECTORS)
#define STRETCH (2 * GROUP) /* inputs */

typedef floats_t totals_t[TILE_ROWS][TILE_VECTORS];

ALWAYS_INLINE void load_totals(const int rows, const int vectors, totals_t totals, const float *c, bool go_on) {
    if (TOTALS_IN_REGISTERS)
        EACH(r, rows) EACH(v, vectors) totals[r][v] = go_on ? load(c + r * SUMS_APART + v * LANES) : zeros();
}

/* Converts sums of a group to floats, multiplies them by its scale, and adds them to the totals. */
ALWAYS_INLINE void add_to_total(floats_t *total, ints_t sums, floats_t scale, float *c, bool go_on) {
    if (TOTALS_IN_REGISTERS) *total = times_add(to_floats(sums), scale, *total);
    else store(c, times_add(to_floats(sums), scale, go_on ? load(c) : zeros()));
}

ALWAYS_INLINE void store_totals(const int rows, const int vectors, totals_t totals, float *c) {
    if (TOTALS_IN_REGISTERS) EACH(r, rows) EACH(v, vectors) store(c + r * SUMS_APART + v * LANES, totals[r][v]);
}

#ifdef ROW_PAIRS
/* Adds products of eight inputs at a time, by an instruction that multiplies two rows with two outputs. `w` are weights
 * of `kind`, for all `vectors`. The last of an odd number of rows is paired with itself. Returns the number of inputs
 * that were added; 4 inputs may be left, and a single row is not computed here. Integer sums are exact in any order. */
ALWAYS_INLINE int64_t add_in_pairs(const int rows, const int vectors, const int kind, ints_t sums[TILE_ROWS][TILE_VECTORS],
                                   const int8_t *a, int64_t stride, const uint8_t *w, int64_t num_in) {
    if (rows == 1) return 0;
    const int num_pairs = (rows + 1) / 2, num_bytes = (kind == INT8 ? 8 : 4) * BLOCK; /* for eight inputs */
    ints_t low[TILE_ROWS / 2][TILE_VECTORS], high[TILE_ROWS / 2][TILE_VECTORS]; /* sums of lower, upper outputs */
    EACH(p, num_pairs) EACH(v, vectors) low[p][v] = high[p][v] = splat_ints(0);
    int64_t k = 0;
    for (; k + 8 <= num_in; k += 8, w += num_bytes) {
        ints_t x[TILE_ROWS / 2];
        EACH(p, num_pairs) x[p] = load_pair(a + 2 * p * stride + k, a + least(2 * p + 1, rows - 1) * stride + k);
        for (int line = 0; line < num_bytes; line += 64) fetch_ahead(w + line);
        EACH(v, vectors) {
            const uint8_t *at = w + 4 * v * LANES;
            ints_t four = kind == INT8 ? int8_weights(at, 0) : low_halves(at);
            ints_t next = kind == INT8 ? int8_weights(at + 4 * BLOCK, 0) : high_halves(at);
            ints_t lower = lower_outputs(four, next), upper = upper_outputs(four, next);
            EACH(p, num_pairs) {
                low[p][v] = pair_products(low[p][v], x[p], lower);
                high[p][v] = pair_products(high[p][v], x[p], upper);
            }
        }
    }
    EACH(r, rows) EACH(v, vectors) sums[r][v] = add_ints(sums[r][v], row_of_pair(low[r / 2][v], high[r / 2][v], r % 2));
    return k;
}
#else
#define add_in_pairs(...) 0
#endif

/* Computes `vectors` vectors of a tile, beginning with `first_vector`. The part with vector 0 prefetches
 * all weights. */
ALWAYS_INLINE void part_int8(const int rows, const int vectors, const int first_vector, const int8_input_t *a,
                             int64_t stride, const float *scales, const int32_t *offsets, int64_t group, int64_t num_groups,
                             const uint8_t *w, int64_t num_in, float *c, bool go_on) {
    totals_t totals;
    c += first_vector * LANES, w += 4 * first_vector * LANES;
    load_totals(rows, vectors, totals, c, go_on);
    for (int64_t first = 0; first < num_in; first += group, scales++, offsets++) {
        ints_t sums[TILE_ROWS][TILE_VECTORS];
        EACH(r, rows) EACH(v, vectors) sums[r][v] = splat_ints(INT8_ADDED ? offsets[r * num_groups] : 0);
        int64_t end = least(first + group, num_in);
        int64_t in_pairs = add_in_pairs(rows, vectors, INT8, sums, a + first, stride, w, end - first);
        w += in_pairs * BLOCK;
        for (int64_t k = first + in_pairs; k < end; k += 4, w += 4 * BLOCK) {
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
            add_to_total(&totals[r][v], sums[r][v], splat(scales[r * num_groups]), c + r * SUMS_APART + v * LANES,
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

/* Measured with GCC 12: unrolled, AVX2 is up to 15 % faster, and layers with AVX-512 are 3 % slower. */
#if TOTALS_IN_REGISTERS
#define INT4_UNROLL
#else
#define INT4_UNROLL UNROLL
#endif

/* As part_int8, over inputs that share a scale of activations. The integer sums of each GROUP are multiplied by
 * the weights' scales and added as floats. The result is multiplied by the scale of activations and added to the
 * totals in memory. */
ALWAYS_INLINE void part_int4(const int rows, const int vectors, const int first_vector, const int8_t *a, int64_t stride,
                             const float *scales, int64_t num_groups, const int32_t *offsets, const float *bases,
                             int64_t num_offsets, const uint8_t *w, int64_t num_in, float *c, bool go_on) {
    floats_t scaled[TILE_ROWS][TILE_VECTORS];
    EACH(r, rows) EACH(v, vectors) scaled[r][v] = zeros();
    for (int64_t first = 0; first < num_in; first += GROUP, offsets++, bases++, w += INT4_BYTES) {
        ints_t sums[TILE_ROWS][TILE_VECTORS];
        EACH(r, rows) EACH(v, vectors) sums[r][v] = int4_start(offsets[r * num_offsets]);
        const uint8_t *eight = w + 2 * BLOCK + 4 * first_vector * LANES;
        if (!first_vector) for (int byte = 0; byte < 2 * BLOCK; byte += 64) fetch_ahead(w + byte);
        int64_t in_pairs = add_in_pairs(rows, vectors, INT4, sums, a + first, stride, eight, GROUP); /* all or none */
        INT4_UNROLL for (int64_t k = first + in_pairs; k < first + GROUP; k += 8, eight += 4 * BLOCK) {
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
        floats_t weight_scales[TILE_VECTORS];
        EACH(v, vectors) weight_scales[v] = load_float16((const uint16_t *)w + (first_vector + v) * LANES);
        EACH(r, rows) {
            floats_t base = splat(bases[r * num_offsets]);
            EACH(v, vectors) scaled[r][v] =
                times_add(subtract(as_floats(int4_total(sums[r][v], offsets[r * num_offsets])), base), weight_scales[v],
                          scaled[r][v]);
        }
    }
    c += first_vector * LANES;
    EACH(r, rows) EACH(v, vectors) {
        float *total = c + r * SUMS_APART + v * LANES;
        store(total, times_add(scaled[r][v], splat(scales[r * num_groups]), go_on ? load(total) : zeros()));
    }
}

ALWAYS_INLINE void tile_int4(const int rows, const int8_t *a, int64_t stride, const float *scales, int64_t num_groups,
                             const int32_t *offsets, const float *bases, int64_t num_offsets, const uint8_t *w,
                             int64_t num_in, float *c, bool go_on) {
    const int vectors = VECTORS_AT_A_TIME(rows);
    for (int64_t first = 0; first < num_in; first += WIDE_GROUP)
        EACH(part, TILE_VECTORS / vectors)
            part_int4(rows, vectors, part * vectors, a + first, stride, scales + first / WIDE_GROUP, num_groups,
                      offsets + first / GROUP, bases + first / GROUP, num_offsets, w + first / GROUP * INT4_BYTES,
                      least(WIDE_GROUP, num_in - first), c, go_on || first);
}
