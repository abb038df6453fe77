/* Pre-norm transformer blocks without a mask, over whole batches: CLIP's vision tower and the visual-query blocks.
 *
 * x += Attention(LN(x)); x += down(activation(up(LN(x)))). Everything between the linear layers is float32, with one
 * exception: after 8-bit and 4-bit weights, attention multiplies bfloat16 numbers if the instruction set can. Their
 * rounding error is smaller than that of the layers. Attention uses the tiles of tiles.h, or AMX: a head's keys, and then
 * its values, are used as weights, and all tokens are multiplied by them.
 */
#pragma once

#include <math.h>

#include "linear.h"

typedef struct {
    const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
    linear_t qkv, out, up, down;
} block_t;

typedef struct {
    int64_t width, num_heads, hidden_dim, num_blocks;
    int32_t activation;
    float norm_eps;
    const block_t *blocks;
} stack_t;

typedef struct {
    const float *x, *weight, *bias;
    float *rows; /* (threads, width): scratch */
    float eps;
    converted_t next;
} layer_norm_t;

typedef struct {
    int type; /* of the operands of all products: FLOAT32 or BFLOAT16 */
    const void *qkv; /* (pictures * tokens, 3 * width) */
    float *heads;    /* (pictures * kept tokens, width) */
    int64_t num_tokens, num_kept, num_heads, head_dim; /* tokens of a picture, and how many are computed */
    char *memory; /* bytes_each bytes for each thread */
    int64_t bytes_each;
} mixing_t;

static void layer_norm_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const layer_norm_t *self = context;
    int64_t width = self->next.num_in;
    float *out = self->rows + thread * width;
    for (int64_t row = first; row < end; row++) {
        const float *x = self->x + row * width;
        floats_t sums = zeros(), squares = zeros();
        for (int64_t k = 0; k < width; k += LANES)
            sums = add(sums, load_first(x + k, width - k));
        floats_t mean = splat(sum_of(sums) / width);
        for (int64_t k = 0; k < width; k += LANES) {
            int64_t count = width - k;
            floats_t part = only_first(subtract(load_first(x + k, count), mean), count);
            squares = times_add(part, part, squares);
        }
        floats_t scale = splat(1.0f / sqrtf(sum_of(squares) / width + self->eps));
        for (int64_t k = 0; k < width; k += LANES) {
            int64_t count = width - k;
            floats_t part = times(subtract(load_first(x + k, count), mean), scale);
            floats_t weight = load_first(self->weight + k, count), bias = load_first(self->bias + k, count);
            store_first(out + k, times_add(part, weight, bias), count);
        }
        convert(&self->next, row, 1, 0, width, out, FLOAT32, 0, width);
    }
}

/* Rows that are multiplied together: more than TILE_ROWS by AMX, which pads inputs to a GROUP with zeros. What follows a
 * query in its row is then multiplied by zeros, and heads that are narrower than a GROUP could reach into another row. */
#define MOST_AT_ONCE (2 * MATRIX_ROWS > TILE_ROWS ? 2 * MATRIX_ROWS : TILE_ROWS)
static inline int64_t rows_at_once(int type, int64_t head_dim) {
    return has_matrices && type == BFLOAT16 && head_dim >= GROUP ? MOST_AT_ONCE : TILE_ROWS;
}

/* Index of the sum of a row and an output in tiles that are stored one after the other. */
static inline int64_t place_of_sum(int64_t at_once, int64_t row, int64_t output) {
    return (output / PANEL * at_once + row) * SUMS_APART + output % PANEL;
}

/* Softmax before its division: e^(scale (x - largest)) of `count` sums for each of `num_rows` rows. Rows of `out`
 * are `stride` elements apart; the last vector of a row is padded with zeros. `inverses` receives 1 / the total
 * of each row. */
static void soften(const float *sums, int64_t at_once, int64_t num_rows, int64_t count, float scale, int type, void *out,
                   int64_t stride, float *inverses) {
    for (int64_t r = 0; r < num_rows; r++) {
        floats_t largest = splat(-INFINITY), total = zeros();
        for (int64_t t = 0; t < count; t += LANES)
            largest = larger(largest, load_first_or(sums + place_of_sum(at_once, r, t), count - t, -INFINITY));
        floats_t most_of_all = splat(largest_of(largest) * scale);
        for (int64_t t = 0; t < count; t += LANES) {
            floats_t sum = load(sums + place_of_sum(at_once, r, t));
            floats_t exponent = times_add(sum, splat(scale), subtract(zeros(), most_of_all));
            floats_t part = only_first(exponential(exponent), count - t);
            total = add(total, part);
            if (type == BFLOAT16) store_bf16_first((bfloat16_t *)out + r * stride + t, part, LANES);
            else store((float *)out + r * stride + t, part);
        }
        inverses[r] = 1.0f / sum_of(total);
    }
}

ALWAYS_INLINE void mixing_tile(const int rows, int type, const void *a, int64_t stride, const void *weights,
                               int64_t num_in, float *sums) {
#ifdef BFLOAT16_PRODUCTS
    if (type == BFLOAT16) {
        tile_bfloat16(NEAR, rows, a, stride, weights, num_in, sums, false, NULL);
        return;
    }
#endif
    tile_float32(NEAR, rows, a, stride, weights, num_in, sums, false, NULL);
}

/* Products with keys or values as weights: `num_blocks` blocks of `num_in` inputs each, for up to `at_once` rows. */
static void multiply_tiles(int64_t at_once, int64_t num_rows, int type, const void *a, int64_t stride,
                           const void *weights, int64_t num_in, int64_t num_blocks, float *sums) {
    for (int64_t block = 0; block < num_blocks; block++) {
        const void *w = element(weights, type, block * num_in * BLOCK);
        float *c = sums + place_of_sum(at_once, 0, block * BLOCK);
#ifdef MATRICES
        if (at_once > TILE_ROWS) {
            if (num_rows > MATRIX_ROWS) bfloat16_matrices(2, a, stride, w, num_in, c, false, NEXT);
            else bfloat16_matrices(1, a, stride, w, num_in, c, false, NEXT);
            continue;
        }
#endif
        switch (num_rows) {
            case 6: mixing_tile(6, type, a, stride, w, num_in, c); break;
            case 5: mixing_tile(5, type, a, stride, w, num_in, c); break;
            case 4: mixing_tile(4, type, a, stride, w, num_in, c); break;
            case 3: mixing_tile(3, type, a, stride, w, num_in, c); break;
            case 2: mixing_tile(2, type, a, stride, w, num_in, c); break;
            default: mixing_tile(1, type, a, stride, w, num_in, c);
        }
    }
}

/* Memory of one thread for one head: keys and values in the layout of weights, and results for up to `at_once` tokens.
 * `weights` are the attention weights. */
typedef struct {
    void *keys, *values, *weights;
    float *sums, *mixed;
    int64_t stride, num_inputs; /* of `weights`: elements from row to row; tokens rounded up, all multiplied */
    int64_t key_inputs;         /* head_dim rounded up */
    int64_t at_once, num_bytes;
} mixing_memory_t;

static mixing_memory_t mixing_memory(char *memory, int type, int64_t num_tokens, int64_t head_dim) {
    int64_t stride = round_up(num_tokens, PANEL), width = round_up(head_dim, PANEL);
    int64_t each = type == FLOAT32 ? 4 : 2, num_rows = rows_at_once(type, head_dim);
    scratch_t scratch = {memory, 0, 0};
    mixing_memory_t all = {.stride = stride, .at_once = num_rows};
    all.num_inputs = round_up(num_tokens, num_rows > TILE_ROWS ? GROUP : 2);
    all.key_inputs = num_rows > TILE_ROWS ? round_up(head_dim, GROUP) : head_dim;
    all.keys = scratch_take(&scratch, each * stride * all.key_inputs);
    all.values = scratch_take(&scratch, each * width * all.num_inputs);
    all.weights = scratch_take(&scratch, each * num_rows * stride);
    all.sums = scratch_take(&scratch, 4 * num_rows * SUMS_APART * (stride / PANEL));
    all.mixed = scratch_take(&scratch, 4 * num_rows * SUMS_APART * (width / PANEL));
    all.num_bytes = scratch.num_taken;
    return all;
}

/* Copy keys and values (tokens, head_dim) into the layout of weights. A word of 4 bytes holds one float, or two
 * adjacent inputs in bfloat16. */
static void lay_out(const mixing_memory_t *memory, int type, const void *k, const void *v, int64_t row_stride,
                    int64_t num_tokens, int64_t head_dim) {
    int64_t depth = type == FLOAT32 ? 1 : 2, num_words = head_dim / depth, bytes = 4 / depth;
    for (int64_t token = 0; token < num_tokens; token++) {
        uint32_t *key = (uint32_t *)memory->keys + token / BLOCK * (memory->key_inputs / depth) * BLOCK + token % BLOCK;
        const void *from = element(k, type, token * row_stride);
        /* Rows are far apart. Keys are fetched 8 tokens ahead; values are copied only after all keys. */
        for (int64_t at = 0; at < head_dim * bytes; at += 64) {
            __builtin_prefetch((const char *)element(k, type, (token + 8) * row_stride) + at);
            __builtin_prefetch((const char *)element(v, type, token * row_stride) + at);
        }
        for (int64_t i = 0; i < num_words; i++) memcpy(key + i * BLOCK, (const char *)from + 4 * i, 4);
    }
    for (int64_t i = 0; i < head_dim; i += BLOCK) {
        int64_t count = least(BLOCK, head_dim - i);
        for (int64_t token = 0; token < num_tokens; token += depth) {
            uint32_t *words = (uint32_t *)memory->values + (i * memory->num_inputs + token * BLOCK) / depth;
            const void *value = element(v, type, token * row_stride + i);
            if (type == FLOAT32) {
                memcpy(words, value, 4 * count);
            } else {
                const bfloat16_t *one = value, *other = token + 1 < num_tokens ? one + row_stride : NULL;
                for (int64_t o = 0; o < count; o++) words[o] = one[o] | (other ? (uint32_t)other[o] << 16 : 0);
            }
        }
    }
}

static void mixing_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const mixing_t *self = context;
    int type = self->type;
    int64_t num_tokens = self->num_tokens, head_dim = self->head_dim, width = self->num_heads * head_dim;
    int64_t key_blocks = round_up(num_tokens, BLOCK) / BLOCK, value_blocks = round_up(head_dim, BLOCK) / BLOCK;
    mixing_memory_t memory = mixing_memory(self->memory + thread * self->bytes_each, type, num_tokens, head_dim);
    memset(memory.keys, 0, (uintptr_t)memory.sums - (uintptr_t)memory.keys); /* elements of no token */
    int64_t at_once = memory.at_once;
    if (at_once > TILE_ROWS) set_up_matrices(self->num_kept, 64);
    for (int64_t item = first; item < end; item++) {
        int64_t picture = item / self->num_heads, head = item % self->num_heads;
        const void *q = element(self->qkv, type, picture * num_tokens * 3 * width + head * head_dim);
        float *heads = self->heads + picture * self->num_kept * width + head * head_dim;
        lay_out(&memory, type, element(q, type, width), element(q, type, 2 * width), 3 * width, num_tokens, head_dim);
        for (int64_t token = 0; token < self->num_kept; token += at_once) {
            int64_t num_rows = least(at_once, self->num_kept - token);
            float inverses[MOST_AT_ONCE];
            multiply_tiles(at_once, num_rows, type, element(q, type, token * 3 * width), 3 * width, memory.keys,
                           memory.key_inputs, key_blocks, memory.sums);
            soften(memory.sums, at_once, num_rows, num_tokens, 1.0f / sqrtf((float)head_dim), type, memory.weights,
                   memory.stride, inverses);
            multiply_tiles(at_once, num_rows, type, memory.weights, memory.stride, memory.values, memory.num_inputs,
                           value_blocks, memory.mixed);
            for (int64_t r = 0; r < num_rows; r++)
                for (int64_t i = 0; i < head_dim; i += LANES) {
                    floats_t x = times(load(memory.mixed + place_of_sum(at_once, r, i)), splat(inverses[r]));
                    store_first(heads + (token + r) * width + i, x, head_dim - i);
                }
        }
    }
    if (at_once > TILE_ROWS) release_matrices();
}

/* Bytes for the converted input of any layer that reads a norm or the attention heads: the largest of them. */
static int64_t most_converted_bytes_of(const stack_t *stack, int64_t num_rows) {
    int64_t num_bytes = 0;
    for (int64_t index = 0; index < stack->num_blocks; index++) {
        const block_t *block = stack->blocks + index;
        num_bytes = most(num_bytes, converted_bytes(&block->qkv, num_rows));
        num_bytes = most(num_bytes, converted_bytes(&block->out, num_rows));
        num_bytes = most(num_bytes, converted_bytes(&block->up, num_rows));
    }
    return num_bytes;
}

/* Bytes for the converted hidden units that a `down` layer reads: the largest of all blocks. */
static int64_t most_hidden_bytes_of(const stack_t *stack, int64_t num_rows) {
    int64_t num_bytes = 0;
    for (int64_t index = 0; index < stack->num_blocks; index++)
        num_bytes = most(num_bytes, converted_bytes(&stack->blocks[index].down, num_rows));
    return num_bytes;
}

/* LayerNorm(x) in the form that `linear` reads, written to `memory`. */
static input_t normalise(const linear_t *linear, layer_norm_t job, int64_t num_rows, void *memory, int num_threads) {
    job.next = converted_in(memory, linear, WIDE_GROUP, num_rows);
    run_items(layer_norm_task, &job, num_rows, 1 + SMALL / linear->num_in, num_threads);
    return input_of(&job.next);
}

/* The type that attention after this layer computes in. bfloat16 products take pairs of inputs, so they need an
 * even head_dim. */
static int mixing_type(const linear_t *qkv, int64_t head_dim) {
    bool has_few_bits = qkv->kind == INT8 || qkv->kind == INT4;
    return has_few_bits && BFLOAT16_INPUT == BFLOAT16 && head_dim % 2 == 0 ? BFLOAT16 : FLOAT32;
}

/* x (pictures * tokens, width), in place. The last block computes keys and values of all tokens, and the rest only for
 * the first `num_kept` tokens of each picture, which are then at the beginning of x: (pictures * num_kept, width).
 *
 * Returns 0, or the bytes that it needs if the scratch memory is too small; x is then unchanged. */
static int64_t run_blocks(const stack_t *stack, float *x, int64_t num_pictures, int64_t num_tokens, int64_t num_kept,
                          scratch_t scratch, int num_threads) {
    int64_t num_rows = num_pictures * num_tokens, width = stack->width, head_dim = width / stack->num_heads;
    if (!num_rows) return 0; /* the tasks require at least one token */
    /* qkv and hidden share their memory: qkv is no longer read when hidden is written. */
    void *qkv = scratch_take(&scratch, most(4 * num_rows * 3 * width, most_hidden_bytes_of(stack, num_rows)));
    void *hidden = qkv;
    float *heads = scratch_take(&scratch, 4 * num_rows * width);
    float *rows = scratch_take(&scratch, 4 * width * most_threads(num_threads));
    int64_t bytes_each = mixing_memory(NULL, FLOAT32, num_tokens, head_dim).num_bytes;
    bytes_each = most(bytes_each, mixing_memory(NULL, BFLOAT16, num_tokens, head_dim).num_bytes);
    char *mixed = scratch_take(&scratch, bytes_each * most_threads(num_threads));
    void *converted = scratch_take(&scratch, most_converted_bytes_of(stack, num_rows));
    if (scratch_is_short(&scratch)) return scratch.num_taken;
    for (int64_t index = 0; index < stack->num_blocks; index++) {
        const block_t *block = stack->blocks + index;
        int type = mixing_type(&block->qkv, head_dim);
        layer_norm_t norm = {x, block->norm1_weight, block->norm1_bias, rows, stack->norm_eps, {0}};
        input_t normed = normalise(&block->qkv, norm, num_rows, converted, num_threads);
        int how = type == FLOAT32 ? STORE_FLOAT32 : STORE_BFLOAT16;
        multiply_into(&block->qkv, &normed, num_rows, how, qkv, num_threads);
        mixing_t mixing = {type, qkv, heads, num_tokens, num_tokens, stack->num_heads, head_dim, mixed, bytes_each};
        if (index == stack->num_blocks - 1 && num_kept < num_tokens) {
            mixing.num_kept = num_kept, num_rows = num_pictures * num_kept;
            for (int64_t picture = 1; picture < num_pictures; picture++)
                memmove(x + picture * num_kept * width, x + picture * num_tokens * width, 4 * num_kept * width);
        }
        run_items(mixing_task, &mixing, num_pictures * stack->num_heads, 1, num_threads);
        apply(&block->out, heads, FLOAT32, WIDE_GROUP, num_rows, ADD_FLOAT32, x, converted, num_threads);
        norm.weight = block->norm2_weight, norm.bias = block->norm2_bias;
        normed = normalise(&block->up, norm, num_rows, converted, num_threads);
        converted_t next = converted_in(hidden, &block->down, WIDE_GROUP, num_rows);
        multiply_for(&block->up, NULL, stack->activation, &normed, num_rows, &next, num_threads);
        input_t activated = input_of(&next);
        multiply_into(&block->down, &activated, num_rows, ADD_FLOAT32, x, num_threads);
    }
    return 0;
}
