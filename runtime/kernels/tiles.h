/* Tiles: sums of up to TILE_ROWS rows and one block of BLOCK outputs, over a range of inputs, held in registers.
 *
 * Weights are laid out in blocks. Inside a block, outputs are adjacent for one input (float32), a pair of inputs
 * (bfloat16), four (int8) or eight (int4), as multiply-add instructions read them. A row's products are always added in
 * the same order. Its result therefore has the same bits in every batch and with any number of threads.
 *
 * int8 and int4: activations are rounded to 8 bits. Each WIDE_GROUP of a row has a scale. It is made of groups, each
 * rounded with that scale halved n times, as often as the group's largest value allows. So with groups of GROUP inputs an
 * outlier spoils its own group only. Encoders with int8 weights have one group in a WIDE_GROUP, because their norms are
 * balanced (see balancing.py).
 *
 * The products of a group are summed as integers. Weights are stored with a number added, INT8_ADDED or 8, because many
 * instructions multiply unsigned by signed numbers. The excess, that number times the sum of the group's activations, is
 * subtracted from the start of the sum. The start also has the bits of the float ONE_BY_ONE / 2^n. Read as a float, the
 * finished sum is that float plus sum / 2^n, exactly. So one subtraction converts the sum and halves it n times.
 */
#pragma once

#include <stdbool.h>
#include <string.h>

#include "parallel.h"
#include "vector.h"

#define BLOCK (TILE_VECTORS * LANES) /* outputs */
#define GROUP 32       /* inputs of a group, and of 4-bit weights that share a scale */
#define WIDE_GROUP 128 /* inputs whose activations share a scale */
#define PANEL (BLOCK > WIDE_GROUP ? BLOCK : WIDE_GROUP) /* the most outputs that are finished together */
#define SUMS_APART (PANEL + 16) /* floats from row to row: an odd number of cache lines, for different cache sets */
#define INT4_BYTES (BLOCK * (2 + GROUP / 2)) /* bytes of a group in a block: scales in float16, then pairs of weights */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

/* Activations in the form that a kind of weights reads. */
typedef struct {
    const void *values; /* rows of num_in: float, bfloat16, int8_input_t (INT8) or int8_t (INT4) */
    int64_t stride;     /* elements from row to row */
    /* INT8 and INT4 only: */
    const float *scales;    /* (wide groups, rows) */
    const int32_t *offsets; /* (groups, rows): what integer sums start from */
    const float *bases;     /* (groups, rows): the float whose bits are part of the offset */
    int64_t num_rows, group; /* `group` inputs are summed as integers; for INT4 that is GROUP */
} input_t;

#define ONE_BY_ONE 0x4b400000 /* bits of 1.5 * 2^23: floats around it are 1 apart */
#define HALVING (1 << 23)     /* subtracted from the bits of a float, it halves the float */

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define EACH(i, count) UNROLL for (int i = 0; i < (count); i++)

/* How weights are fetched before they are used: NEAR, `near_bytes` ahead into the L1 cache; or DEEP, 16 KB ahead into the L2
 * cache and 2 KB ahead into the L1 cache. For 4 rows or more, DEEP takes half of the time for 5 rows of int8 on AMD Zen 4,
 * and 1 to 11 % less on a fifth-generation Xeon. A tile that finds its weights in a cache brings those that are read NEXT
 * into the L2 cache, a line in each step: a tile that reads all of them at once waits for memory. On the Xeon, this and
 * larger slabs take 7 to 19 % off 12 to 56 rows in float32, and 4 to 11 % in int8. Prefetching may read beyond the end of
 * the weights; it never faults. */
enum { NEXT = 0, NEAR = 1, DEEP = 2 };
/* 0 on AMD's processors with an L1 cache of 32 KB, which fetch a stream better themselves: 1 to 6 rows of SmolLM2-135M in
 * bfloat16, and 1 to 3 in int8 or int4, take 6 to 15 % less time on Zen 4. At 0, a fetch names the line that is read
 * anyway. */
static int64_t near_bytes = 8192;
#define LINES(vectors) ((vectors) * LANES * 4 / 64)

/* In a step that reads `num_lines` lines of weights; `next` moves on if the tile fetches NEXT. */
ALWAYS_INLINE void fetch_ahead(const int fetch, const int num_lines, const void *weights, const char **next) {
    if (fetch == NEXT) __builtin_prefetch(*next, 0, 2), *next += 64;
    else
        EACH(line, num_lines) {
            const char *at = (const char *)weights + 64 * line;
            if (fetch == DEEP) __builtin_prefetch(at + 16384, 0, 2), __builtin_prefetch(at + 2048, 0, 3);
            else __builtin_prefetch(at + near_bytes, 0, 3);
        }
}

ALWAYS_INLINE void load_sums(const int rows, floats_t sums[TILE_ROWS][TILE_VECTORS], const float *c, bool go_on) {
    EACH(r, rows) EACH(v, TILE_VECTORS) sums[r][v] = go_on ? load(c + r * SUMS_APART + v * LANES) : zeros();
}

ALWAYS_INLINE void store_sums(const int rows, floats_t sums[TILE_ROWS][TILE_VECTORS], float *c) {
    EACH(r, rows) EACH(v, TILE_VECTORS) store(c + r * SUMS_APART + v * LANES, sums[r][v]);
}

/* Tiles return `next`, moved on by what they fetched. */
ALWAYS_INLINE const char *tile_float32(const int fetch, const int rows, const float *a, int64_t stride, const float *w,
                                       int64_t num_in, float *c, bool go_on, const char *next) {
    floats_t sums[TILE_ROWS][TILE_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k++, w += BLOCK) {
        floats_t weights[TILE_VECTORS];
        EACH(v, TILE_VECTORS) weights[v] = load(w + v * LANES);
        fetch_ahead(fetch, LINES(TILE_VECTORS), w, &next);
        EACH(r, rows) {
            floats_t x = splat(a[r * stride + k]);
            EACH(v, TILE_VECTORS) sums[r][v] = times_add(x, weights[v], sums[r][v]);
        }
    }
    store_sums(rows, sums, c);
    return next;
}

#ifdef BFLOAT16_PRODUCTS
#define BFLOAT16_INPUT BFLOAT16 /* the type of activations for weights in bfloat16 */
typedef bfloat16_t bfloat16_input_t;

ALWAYS_INLINE const char *tile_bfloat16(const int fetch, const int rows, const bfloat16_t *a, int64_t stride,
                                        const bfloat16_t *w, int64_t num_in, float *c, bool go_on, const char *next) {
    floats_t sums[TILE_ROWS][TILE_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k += 2, w += 2 * BLOCK) {
        pairs_t weights[TILE_VECTORS];
        EACH(v, TILE_VECTORS) weights[v] = load_pairs(w + 2 * v * LANES);
        fetch_ahead(fetch, LINES(TILE_VECTORS), w, &next);
        EACH(r, rows) {
            int32_t pair;
            memcpy(&pair, a + r * stride + k, 4);
            EACH(v, TILE_VECTORS) sums[r][v] = add_pairs(sums[r][v], splat_pair(pair), weights[v]);
        }
    }
    store_sums(rows, sums, c);
    return next;
}
#else
#define BFLOAT16_INPUT FLOAT32 /* weights are widened */
typedef float bfloat16_input_t;

ALWAYS_INLINE const char *tile_bfloat16(const int fetch, const int rows, const float *a, int64_t stride,
                                        const bfloat16_t *w, int64_t num_in, float *c, bool go_on, const char *next) {
    floats_t sums[TILE_ROWS][TILE_VECTORS];
    load_sums(rows, sums, c, go_on);
    for (int64_t k = 0; k < num_in; k += 2, w += 2 * BLOCK) {
        floats_t weights[TILE_VECTORS];
        EACH(v, TILE_VECTORS) weights[v] = first_of_pairs(w + 2 * v * LANES);
        fetch_ahead(fetch, LINES(TILE_VECTORS), w, &next);
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
    return next;
}
#endif

/* Copies 32 bits of activations to all lanes. */
ALWAYS_INLINE ints_t splat_word(const void *a) {
    int32_t word;
    memcpy(&word, a, 4);
    return splat_ints(word);
}

/* A tile of integers has two sets of sums: integers of a group, and floats of a WIDE_GROUP. MANY_REGISTERS is 1 if both
 * sets of half of a large tile fit into registers. Such a tile computes half of its vectors over a WIDE_GROUP, then the
 * other half. */
#define VECTORS_AT_A_TIME(rows) (MANY_REGISTERS && (rows) > TILE_ROWS / 2 ? TILE_VECTORS / 2 : TILE_VECTORS)

typedef ints_t int_sums_t[TILE_ROWS][TILE_VECTORS];

#ifdef ROW_PAIRS
/* Adds products of eight inputs at a time, where an instruction multiplies two rows with two outputs: `w` are weights of
 * `kind`, of all `vectors`. The last of an odd number of rows is paired with itself. Returns the number of inputs that
 * it computed. A row alone is not computed here, and 4 inputs may be left. Integers are exact in any order. */
ALWAYS_INLINE int64_t add_in_pairs(const int fetch, const int rows, const int vectors, const int kind, int_sums_t sums,
                                   const int8_t *a, int64_t stride, const uint8_t *w, int64_t num_in, const char **next) {
    if (rows == 1) return 0;
    const int num_pairs = (rows + 1) / 2, num_bytes = (kind == INT8 ? 8 : 4) * BLOCK; /* for eight inputs */
    ints_t low[TILE_ROWS / 2][TILE_VECTORS], high[TILE_ROWS / 2][TILE_VECTORS]; /* sums of lower, upper outputs */
    EACH(p, num_pairs) EACH(v, vectors) low[p][v] = high[p][v] = splat_ints(0);
    int64_t k = 0;
    for (; k + 8 <= num_in; k += 8, w += num_bytes) {
        ints_t x[TILE_ROWS / 2];
        EACH(p, num_pairs) x[p] = load_pair(a + 2 * p * stride + k, a + least(2 * p + 1, rows - 1) * stride + k);
        fetch_ahead(fetch, num_bytes / 64, w, next);
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

/* Adds the products of a group of inputs. The loop is not unrolled: with GCC 12 and AVX-512 that is 3 % faster. */
ALWAYS_INLINE void add_int8_products(const int fetch, const int rows, const int vectors, int_sums_t sums,
                                     const int8_input_t *a, int64_t stride, const uint8_t *w, int64_t num_in,
                                     const char **next) {
    int64_t k = add_in_pairs(fetch, rows, vectors, INT8, sums, a, stride, w, num_in, next);
    w += k * BLOCK;
    _Pragma("GCC unroll 1") for (; k < num_in; k += 4, w += 4 * BLOCK) {
        fetch_ahead(fetch, LINES(vectors), w, next);
        EACH(pass, INT8_PASSES) {
            ints_t weights[TILE_VECTORS];
            EACH(v, vectors) weights[v] = int8_weights(w + 4 * v * LANES, pass);
            EACH(r, rows) {
                ints_t x = splat_word(a + r * stride + k + 2 * pass);
                EACH(v, vectors) sums[r][v] = int8_products(sums[r][v], weights[v], x);
            }
        }
    }
}

/* Measured with GCC 12: unrolled, AVX2 is up to 15 % faster, and layers with AVX-512 are 3 % slower. */
#if MANY_REGISTERS
#define INT4_UNROLL
#else
#define INT4_UNROLL UNROLL
#endif

/* As add_int8_products, for a GROUP of inputs. */
ALWAYS_INLINE void add_int4_products(const int fetch, const int rows, const int vectors, int_sums_t sums,
                                     const int8_t *a, int64_t stride, const uint8_t *w, const char **next) {
    int64_t in_pairs = add_in_pairs(fetch, rows, vectors, INT4, sums, a, stride, w, GROUP, next); /* all or none */
    INT4_UNROLL for (int64_t k = in_pairs; k < GROUP; k += 8, w += 4 * BLOCK) {
        ints_t weights[TILE_VECTORS];
        fetch_ahead(fetch, LINES(vectors), w, next);
        EACH(v, vectors) weights[v] = low_halves(w + 4 * v * LANES);
        EACH(r, rows) {
            ints_t x = splat_word(a + r * stride + k);
            EACH(v, vectors) sums[r][v] = int4_products(sums[r][v], weights[v], x);
        }
        EACH(v, vectors) weights[v] = high_halves(w + 4 * v * LANES);
        EACH(r, rows) {
            ints_t x = splat_word(a + r * stride + k + 4);
            EACH(v, vectors) sums[r][v] = int4_products(sums[r][v], weights[v], x);
        }
    }
}

ALWAYS_INLINE void add_to_total(float *total, floats_t sum, float scale, bool go_on) {
    store(total, times_add(sum, splat(scale), go_on ? load(total) : zeros()));
}

/* `vectors` of a tile from `first_vector` on, over a WIDE_GROUP. The sums of each group become floats. For INT4 they are
 * multiplied by the scales of the weights. The scale of the activations is applied once, when the sums are added to the
 * totals in `c`. With few registers, the sums of INT8 are added to the totals group by group, because `scaled` would be
 * in memory too. */
ALWAYS_INLINE void part_of_integers(const int kind, const int fetch, const int rows, const int vectors,
                                    const int first_vector, const void *a, int64_t stride, const float *scales,
                                    const int32_t *offsets, const float *bases, int64_t num_rows, int64_t group,
                                    const uint8_t *w, int64_t num_in, float *c, bool go_on, const char **next) {
    const bool is_scaled_once = kind == INT4 || MANY_REGISTERS;
    floats_t scaled[TILE_ROWS][TILE_VECTORS];
    if (is_scaled_once) EACH(r, rows) EACH(v, vectors) scaled[r][v] = zeros();
    c += first_vector * LANES;
    for (int64_t first = 0; first < num_in; first += group, offsets += num_rows, bases += num_rows) {
        int_sums_t sums;
        if (kind == INT8) {
            EACH(r, rows) EACH(v, vectors) sums[r][v] = splat_ints(offsets[r]);
            add_int8_products(fetch, rows, vectors, sums, (const int8_input_t *)a + first, stride,
                              w + 4 * first_vector * LANES, least(group, num_in - first), next);
            EACH(r, rows) EACH(v, vectors) {
                floats_t sum = subtract(as_floats(sums[r][v]), splat(bases[r]));
                if (is_scaled_once) scaled[r][v] = add(scaled[r][v], sum);
                else add_to_total(c + r * SUMS_APART + v * LANES, sum, scales[r], go_on || first);
            }
            w += group * BLOCK;
        } else {
            EACH(r, rows) EACH(v, vectors) sums[r][v] = int4_start(offsets[r]);
            const uint16_t *float16_scales = (const uint16_t *)w + first_vector * LANES;
            fetch_ahead(fetch, most(1, LINES(vectors) / 2), float16_scales, next);
            add_int4_products(fetch, rows, vectors, sums, (const int8_t *)a + first, stride,
                              w + 2 * BLOCK + 4 * first_vector * LANES, next);
            floats_t weight_scales[TILE_VECTORS];
            EACH(v, vectors) weight_scales[v] = load_float16(float16_scales + v * LANES);
            EACH(r, rows) EACH(v, vectors) {
                floats_t sum = subtract(as_floats(int4_total(sums[r][v], offsets[r])), splat(bases[r]));
                scaled[r][v] = times_add(sum, weight_scales[v], scaled[r][v]);
            }
            w += INT4_BYTES;
        }
    }
    asm volatile("" : "+r"(c)); /* load the totals now: loaded earlier, they take registers from the sums */
    if (is_scaled_once)
        EACH(r, rows) EACH(v, vectors) add_to_total(c + r * SUMS_APART + v * LANES, scaled[r][v], scales[r], go_on);
}

/* A tile for `kind`, INT8 or INT4; `first` of the layer's inputs begins a WIDE_GROUP. */
ALWAYS_INLINE const char *tile_of_integers(const int kind, const int fetch, const int rows, const input_t *input,
                                           int64_t row, int64_t first, int64_t end, const uint8_t *w, float *c,
                                           const char *next) {
    const int vectors = VECTORS_AT_A_TIME(rows), value_bytes = kind == INT8 ? sizeof(int8_input_t) : 1;
    const int wide_bytes = kind == INT8 ? WIDE_GROUP * BLOCK : WIDE_GROUP / GROUP * INT4_BYTES; /* of weights */
    const int64_t group = kind == INT8 ? input->group : GROUP, num_rows = input->num_rows, stride = input->stride;
    const int64_t place = first / group * num_rows + row, places = WIDE_GROUP / group * num_rows;
    const float *scales = input->scales + first / WIDE_GROUP * num_rows + row, *bases = input->bases + place;
    const int32_t *offsets = input->offsets + place;
    const char *a = (const char *)input->values + (row * stride + first) * value_bytes;
    for (int64_t k = first; k < end; k += WIDE_GROUP) {
        EACH(part, TILE_VECTORS / vectors)
            part_of_integers(kind, fetch, rows, vectors, part * vectors, a, stride, scales, offsets, bases, num_rows, group,
                             w, least(WIDE_GROUP, end - k), c, k > 0, &next);
        a += WIDE_GROUP * value_bytes, w += wide_bytes, scales += num_rows, offsets += places, bases += places;
    }
    return next;
}
