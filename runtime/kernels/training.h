/* The operations of training that are not matrix products: RMS norm and SwiGLU, forward and backward, row by row.
 *
 * Rows are FLOAT32 or BFLOAT16. All arithmetic is float32.
 */
#pragma once

#include <math.h>

#include "linear.h"

static inline void store_some(void *out, int type, int64_t at, floats_t x, int64_t count) {
    if (type == BFLOAT16) store_bf16_first((bfloat16_t *)out + at, x, count);
    else if (count >= LANES) store((float *)out + at, x);
    else store_first((float *)out + at, x, count);
}

/* ---- silu(gate) * up ---- */

typedef struct {
    int type;
    int64_t width;
    const void *gate_up; /* (rows, 2 width) */
    const void *grad;    /* (rows, width): gradient of the result, backward only */
    void *out;           /* forward (rows, width), backward (rows, 2 width) */
} swiglu_t;

static void swiglu_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const swiglu_t *self = context;
    int64_t width = self->width;
    for (int64_t row = first; row < end; row++)
        for (int64_t k = 0; k < width; k += LANES) {
            int64_t count = width - k, at = 2 * row * width + k;
            floats_t gate = load_some(self->gate_up, self->type, at, count);
            floats_t up = load_some(self->gate_up, self->type, at + width, count);
            store_some(self->out, self->type, row * width + k, times(silu(gate), up), count);
        }
}

static void swiglu_back_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const swiglu_t *self = context;
    int64_t width = self->width;
    floats_t one = splat(1.0f);
    for (int64_t row = first; row < end; row++)
        for (int64_t k = 0; k < width; k += LANES) {
            int64_t count = width - k, at = 2 * row * width + k;
            floats_t gate = load_some(self->gate_up, self->type, at, count);
            floats_t up = load_some(self->gate_up, self->type, at + width, count);
            floats_t grad = load_some(self->grad, self->type, row * width + k, count);
            floats_t sigmoid = divide(one, add(one, exponential(subtract(zeros(), gate))));
            floats_t activated = times(gate, sigmoid);
            /* silu' = sigmoid + silu (1 - sigmoid) */
            floats_t slope = times_add(activated, subtract(one, sigmoid), sigmoid);
            store_some(self->out, self->type, at, times(times(grad, up), slope), count);
            store_some(self->out, self->type, at + width, times(grad, activated), count);
        }
}

/* ---- root mean square norm ---- */

typedef struct {
    int type;
    int64_t width;
    float eps;
    const void *x, *grad; /* (rows, width); `grad` backward only */
    const float *weight;
    float *inverse; /* (rows): 1 / sqrt(mean(x^2) + eps), written by forward, read by backward */
    void *out;      /* (rows, width) */
} rms_norm_t;

static void rms_norm_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const rms_norm_t *self = context;
    int64_t width = self->width;
    for (int64_t row = first; row < end; row++) {
        floats_t squares = zeros();
        for (int64_t k = 0; k < width; k += LANES) {
            floats_t x = load_some(self->x, self->type, row * width + k, width - k);
            squares = times_add(x, x, squares);
        }
        self->inverse[row] = 1.0f / sqrtf(sum_of(squares) / width + self->eps);
        floats_t inverse = splat(self->inverse[row]);
        for (int64_t k = 0; k < width; k += LANES) {
            floats_t x = load_some(self->x, self->type, row * width + k, width - k);
            floats_t weight = load_first(self->weight + k, width - k);
            store_some(self->out, self->type, row * width + k, times(times(x, inverse), weight), width - k);
        }
    }
}

static void rms_norm_back_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const rms_norm_t *self = context;
    int64_t width = self->width;
    for (int64_t row = first; row < end; row++) {
        floats_t inverse = splat(self->inverse[row]), along = zeros();
        for (int64_t k = 0; k < width; k += LANES) {
            floats_t normed = times(load_some(self->x, self->type, row * width + k, width - k), inverse);
            floats_t grad = load_some(self->grad, self->type, row * width + k, width - k);
            along = times_add(times(grad, load_first(self->weight + k, width - k)), normed, along);
        }
        floats_t mean = splat(sum_of(along) / width);
        for (int64_t k = 0; k < width; k += LANES) {
            floats_t normed = times(load_some(self->x, self->type, row * width + k, width - k), inverse);
            floats_t grad = load_some(self->grad, self->type, row * width + k, width - k);
            grad = minus_times(times(grad, load_first(self->weight + k, width - k)), normed, mean);
            store_some(self->out, self->type, row * width + k, times(grad, inverse), width - k);
        }
    }
}
