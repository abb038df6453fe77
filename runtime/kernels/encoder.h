/* Pre-norm transformer blocks without a mask, as CLIP's tower and the visual-query blocks have them, over whole batches.
 *
 * x += Attention(LN(x)); x += down(activation(up(LN(x)))). Everything between the linear layers is float32. Attention is
 * computed by the tiles of linear.h: a head's keys, and then its values, are weights that all tokens pass through.
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
    float *out;
    int64_t width;
    float eps;
} layer_norm_t;

typedef struct {
    const float *qkv; /* (pictures * tokens, 3 * width) */
    float *heads;     /* (pictures * tokens, width) */
    int64_t num_tokens, num_heads, head_dim;
    float *memory; /* floats_each of them for every thread */
    int64_t floats_each;
} mixing_t;

static void layer_norm_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const layer_norm_t *self = context;
    for (int64_t row = first; row < end; row++) {
        const float *x = self->x + row * self->width;
        float *out = self->out + row * self->width;
        floats_t sums = zeros(), squares = zeros();
        for (int64_t k = 0; k < self->width; k += LANES)
            sums = add(sums, load_first(x + k, self->width - k));
        floats_t mean = splat(sum_of(sums) / self->width);
        for (int64_t k = 0; k < self->width; k += LANES) {
            int64_t count = self->width - k;
            floats_t part = only_first(subtract(load_first(x + k, count), mean), count);
            squares = times_add(part, part, squares);
        }
        floats_t scale = splat(1.0f / sqrtf(sum_of(squares) / self->width + self->eps));
        for (int64_t k = 0; k < self->width; k += LANES) {
            int64_t count = self->width - k;
            floats_t part = times(subtract(load_first(x + k, count), mean), scale);
            floats_t weight = load_first(self->weight + k, count), bias = load_first(self->bias + k, count);
            store_first(out + k, times_add(part, weight, bias), count);
        }
    }
}

/* e^(scale (x - largest)) over `count` sums of each of `num_rows` rows, from the blocks of a tile into rows of `stride`;
 * `inverses` are those of the rows' totals. */
static void soften(const float *sums, int64_t num_rows, int64_t count, float scale, float *out, int64_t stride,
                   float *inverses) {
    for (int64_t r = 0; r < num_rows; r++) {
        floats_t largest = splat(-INFINITY), total = zeros();
        for (int64_t t = 0; t < count; t += LANES) {
            const float *place = sums + t / BLOCK * TILE_ROWS * BLOCK + r * BLOCK + t % BLOCK;
            largest = larger(largest, load_first_or(place, count - t, -INFINITY));
        }
        floats_t most_of_all = splat(largest_of(largest) * scale);
        for (int64_t t = 0; t < count; t += LANES) {
            const float *place = sums + t / BLOCK * TILE_ROWS * BLOCK + r * BLOCK + t % BLOCK;
            floats_t part = exponential(times_add(load(place), splat(scale), subtract(zeros(), most_of_all)));
            total = add(total, only_first(part, count - t));
            store_first(out + r * stride + t, part, count - t);
        }
        inverses[r] = 1.0f / sum_of(total);
    }
}

/* Tiles of float32 weights that are no layer's: `num_blocks` blocks of `num_in` inputs each, for up to 6 rows. */
static void multiply_tiles(int64_t num_rows, const float *a, int64_t stride, const float *weights, int64_t num_in,
                           int64_t num_blocks, float *sums) {
    for (int64_t block = 0; block < num_blocks; block++, weights += num_in * BLOCK, sums += TILE_ROWS * BLOCK)
        switch (num_rows) {
            case 6: tile_float32(6, a, stride, weights, num_in, sums, false); break;
            case 5: tile_float32(5, a, stride, weights, num_in, sums, false); break;
            case 4: tile_float32(4, a, stride, weights, num_in, sums, false); break;
            case 3: tile_float32(3, a, stride, weights, num_in, sums, false); break;
            case 2: tile_float32(2, a, stride, weights, num_in, sums, false); break;
            default: tile_float32(1, a, stride, weights, num_in, sums, false);
        }
}

/* What a thread needs for one head: its keys and values as weights, and what becomes of up to 6 tokens. */
static int64_t mixing_floats(int64_t num_tokens, int64_t head_dim) {
    int64_t stride = round_up(num_tokens, BLOCK), mixed = round_up(head_dim, BLOCK);
    return stride * head_dim + mixed * num_tokens + TILE_ROWS * (stride + stride + mixed);
}

static void mixing_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const mixing_t *self = context;
    int64_t num_tokens = self->num_tokens, head_dim = self->head_dim, width = self->num_heads * head_dim;
    int64_t key_blocks = round_up(num_tokens, BLOCK) / BLOCK, value_blocks = round_up(head_dim, BLOCK) / BLOCK;
    int64_t stride = key_blocks * BLOCK;
    float *keys = self->memory + thread * self->floats_each;
    float *values = keys + key_blocks * BLOCK * head_dim, *sums = values + value_blocks * BLOCK * num_tokens;
    float *weights = sums + TILE_ROWS * stride, *mixed = weights + TILE_ROWS * stride;
    for (int64_t item = first; item < end; item++) {
        int64_t picture = item / self->num_heads, head = item % self->num_heads;
        const float *q = self->qkv + picture * num_tokens * 3 * width + head * head_dim;
        float *heads = self->heads + picture * num_tokens * width + head * head_dim;
        memset(keys + (key_blocks - 1) * BLOCK * head_dim, 0, 4 * BLOCK * head_dim);
        memset(values, 0, 4 * value_blocks * BLOCK * num_tokens);
        for (int64_t token = 0; token < num_tokens; token++) {
            const float *k = q + token * 3 * width + width, *v = k + width;
            for (int64_t i = 0; i < head_dim; i++) keys[(token / BLOCK * head_dim + i) * BLOCK + token % BLOCK] = k[i];
            for (int64_t i = 0; i < head_dim; i += LANES)
                store_first(values + (i / BLOCK * num_tokens + token) * BLOCK + i % BLOCK,
                            load_first(v + i, head_dim - i), head_dim - i);
        }
        for (int64_t token = 0; token < num_tokens; token += TILE_ROWS) {
            int64_t num_rows = least(TILE_ROWS, num_tokens - token);
            float inverses[TILE_ROWS];
            multiply_tiles(num_rows, q + token * 3 * width, 3 * width, keys, head_dim, key_blocks, sums);
            soften(sums, num_rows, num_tokens, 1.0f / sqrtf((float)head_dim), weights, stride, inverses);
            multiply_tiles(num_rows, weights, stride, values, num_tokens, value_blocks, mixed);
            for (int64_t r = 0; r < num_rows; r++)
                for (int64_t i = 0; i < head_dim; i += LANES) {
                    const float *place = mixed + i / BLOCK * TILE_ROWS * BLOCK + r * BLOCK + i % BLOCK;
                    store_first(heads + (token + r) * width + i, times(load(place), splat(inverses[r])), head_dim - i);
                }
        }
    }
}

/* Of what is made for the most demanding of all linear layers. */
static int64_t most_converted_bytes_of(const stack_t *stack, int64_t num_rows) {
    int64_t num_bytes = 0;
    for (int64_t index = 0; index < stack->num_blocks; index++) {
        const block_t *block = stack->blocks + index;
        num_bytes = most(num_bytes, converted_bytes(&block->qkv, FLOAT32, num_rows));
        num_bytes = most(num_bytes, converted_bytes(&block->out, FLOAT32, num_rows));
        num_bytes = most(num_bytes, converted_bytes(&block->up, FLOAT32, num_rows));
        num_bytes = most(num_bytes, converted_bytes(&block->down, wanted_type(&block->down), num_rows));
    }
    return num_bytes;
}

/* x (pictures * tokens, width), in place. Returns as forward of decoder.h. */
static int64_t run_blocks(const stack_t *stack, float *x, int64_t num_pictures, int64_t num_tokens, scratch_t scratch,
                          int num_threads) {
    int64_t num_rows = num_pictures * num_tokens, width = stack->width, head_dim = width / stack->num_heads;
    if (!num_rows) return 0; /* the tasks count on a token */
    float *normed = scratch_take(&scratch, 4 * num_rows * most(width, stack->hidden_dim)), *hidden = normed;
    float *qkv = scratch_take(&scratch, 4 * num_rows * 3 * width), *heads = scratch_take(&scratch, 4 * num_rows * width);
    int64_t floats_each = round_up(mixing_floats(num_tokens, head_dim), LANES);
    float *mixed = scratch_take(&scratch, 4 * floats_each * most_threads(num_threads));
    void *converted = scratch_take(&scratch, most_converted_bytes_of(stack, num_rows));
    if (scratch_is_short(&scratch)) return scratch.num_taken;
    for (int64_t index = 0; index < stack->num_blocks; index++) {
        const block_t *block = stack->blocks + index;
        layer_norm_t norm = {x, block->norm1_weight, block->norm1_bias, normed, width, stack->norm_eps};
        run_items(layer_norm_task, &norm, num_rows, 1 + SMALL / width, num_threads);
        apply(&block->qkv, NULL, NONE, normed, FLOAT32, num_rows, qkv, STORE_FLOAT32, converted, num_threads);
        mixing_t mixing = {qkv, heads, num_tokens, stack->num_heads, head_dim, mixed, floats_each};
        run_items(mixing_task, &mixing, num_pictures * stack->num_heads, 1, num_threads);
        apply(&block->out, NULL, NONE, heads, FLOAT32, num_rows, x, ADD_FLOAT32, converted, num_threads);
        norm.weight = block->norm2_weight, norm.bias = block->norm2_bias, norm.out = heads;
        run_items(layer_norm_task, &norm, num_rows, 1 + SMALL / width, num_threads);
        int type = wanted_type(&block->down);
        apply(&block->up, NULL, stack->activation, heads, FLOAT32, num_rows, hidden,
              type == BFLOAT16 ? STORE_BFLOAT16 : STORE_FLOAT32, converted, num_threads);
        apply(&block->down, NULL, NONE, hidden, type, num_rows, x, ADD_FLOAT32, converted, num_threads);
    }
    return 0;
}
