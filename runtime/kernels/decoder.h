/* The LLaMA decoder with adapter attention, over tokens of any number of rows. Prefill, decode steps and
 * scoring use it.
 *
 * Tokens of all rows are concatenated without padding. For each token, the batch gives the place of its key and value
 * in the cache, the position for its rotary embedding, and the places that it attends to: 0..shared_end-1 of its row,
 * and start..its own place. Everything between the linear layers is float32, for every type of weights.
 */
#pragma once

#include <float.h>
#include <math.h>

#include "linear.h"

#define NO_TOKEN -1 /* as in prediction.py */

typedef struct {
    const float *attention_norm, *feed_forward_norm;
    linear_t qkv, out, gate, up, down;
} layer_t;

typedef struct {
    int64_t dim, num_layers, num_heads, head_dim, ffn_dim, vocab_size, first_adapter_layer, num_queries;
    float norm_eps;
    int32_t kept_type; /* of cached keys and values: FLOAT32 or BFLOAT16 */
    int32_t embedding_type; /* FLOAT32 or BFLOAT16 */
    const void *embedding;  /* (vocab_size, dim) */
    const float *rotary_cos, *rotary_sin; /* (positions, head_dim) */
    const layer_t *layers;
    const float *norm;
    linear_t head;
    /* Sums x over the ranks, after attention and after the feed-forward network, if this is one rank's share of
     * a decoder: some of its heads and hidden units. Returns 0, or another number if it failed. NULL for a
     * whole decoder. */
    int64_t (*sum)(float *x, int64_t count);
    int64_t adds_residual; /* 1 on the one rank that adds the residual, the previous x; read if `sum` is not NULL */
} decoder_t;

/* Keys and values (layers, rows, heads, places, head_dim). Strides count elements; places are contiguous. */
typedef struct {
    void *k, *v;
    int64_t layer_stride, row_stride, head_stride;
} kept_t;

typedef struct {
    int64_t num_tokens, num_runs;
    int64_t equal_runs;        /* number of runs at the end with equal tokens; only their rows' prefixes differ */
    const int64_t *ids;        /* (tokens); or NULL if x has the embeddings */
    float *x;                  /* (tokens, dim): overwritten */
    const int64_t *run_rows;   /* (runs): a run is the consecutive tokens of one row */
    const int64_t *run_starts; /* (runs + 1): first token of each run */
    const int64_t *places, *positions, *shared_ends, *starts; /* (tokens) */
    kept_t cache, prefix;
    int64_t num_logits;
    const int64_t *logit_tokens; /* (num_logits): tokens that need logits, in the order of their runs */
    float *logits;               /* (num_logits, vocab_size) */
    int64_t *best;               /* (num_logits): the token with the highest logit; or NULL */
} batch_t;

typedef struct {
    const decoder_t *decoder;
    const batch_t *batch;
    int64_t layer;
    float *qkv, *heads, *scores; /* `scores` has scores_each floats for each thread */
    int64_t scores_each;
    const int64_t *tokens; /* tokens for which attention is computed, or NULL for all */
    const int64_t *starts; /* (runs + 1): index in `tokens` where each run begins */
} attention_t;

typedef struct {
    const float *x, *weight;
    const int64_t *tokens; /* which rows of x, or NULL for all */
    float *out;
    int64_t dim;
    float eps;
} norm_t;

typedef struct {
    const float *logits;
    int64_t *best, vocab_size;
} best_t;

static void embed(const decoder_t *decoder, const batch_t *batch, int64_t num_tokens) {
    int64_t dim = decoder->dim;
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t k = 0; k < dim; k += LANES) {
            floats_t part = load_some(decoder->embedding, decoder->embedding_type, batch->ids[token] * dim + k, dim - k);
            store_first(batch->x + token * dim + k, part, dim - k);
        }
}

static void norm_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const norm_t *self = context;
    for (int64_t row = first; row < end; row++) {
        const float *x = self->x + (self->tokens ? self->tokens[row] : row) * self->dim;
        float *out = self->out + row * self->dim;
        floats_t squares = zeros();
        for (int64_t k = 0; k < self->dim; k += LANES) {
            floats_t part = load_first(x + k, self->dim - k);
            squares = times_add(part, part, squares);
        }
        floats_t scale = splat(1.0f / sqrtf(sum_of(squares) / self->dim + self->eps));
        for (int64_t k = 0; k < self->dim; k += LANES) {
            int64_t count = self->dim - k;
            floats_t part = times(load_first(x + k, count), scale);
            store_first(out + k, times(part, load_first(self->weight + k, count)), count);
        }
    }
}

/* Store a key or a value of one head at index `at`. `count`, its number of elements, is a multiple of 16. */
static void keep(void *kept, int type, int64_t at, const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        floats_t x = load(values + i);
        if (type == FLOAT32) store((float *)kept + at + i, x);
        else store_bf16_first((bfloat16_t *)kept + at + i, x, LANES);
    }
}

static void rotate(float *x, const float *cos, const float *sin, int64_t head_dim) {
    int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        floats_t first = load_first(x + i, count), second = load_first(x + half + i, count);
        floats_t c = load_first(cos + i, count), s = load_first(sin + i, count);
        store_first(x + i, minus_times(times(first, c), second, s), count);
        store_first(x + half + i, times_add(first, s, times(second, c)), count);
    }
}

/* Apply the rotary embedding to query and key of each token, and store key and value in the row's cache. */
static void rotate_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const attention_t *self = context;
    const decoder_t *decoder = self->decoder;
    const batch_t *batch = self->batch;
    int64_t head_dim = decoder->head_dim, width = decoder->num_heads * head_dim;
    for (int64_t item = first; item < end; item++) {
        int64_t run = item / decoder->num_heads, head = item % decoder->num_heads;
        int64_t base = self->layer * batch->cache.layer_stride + batch->run_rows[run] * batch->cache.row_stride +
                       head * batch->cache.head_stride;
        for (int64_t token = batch->run_starts[run]; token < batch->run_starts[run + 1]; token++) {
            float *q = self->qkv + 3 * token * width + head * head_dim;
            float *k = q + width, *v = k + width;
            const float *cos = decoder->rotary_cos + batch->positions[token] * head_dim;
            const float *sin = decoder->rotary_sin + batch->positions[token] * head_dim;
            rotate(q, cos, sin, head_dim);
            rotate(k, cos, sin, head_dim);
            keep(batch->cache.k, decoder->kept_type, base + batch->places[token] * head_dim, k, head_dim);
            keep(batch->cache.v, decoder->kept_type, base + batch->places[token] * head_dim, v, head_dim);
        }
    }
}

typedef struct {
    int64_t first, end;
} span_t;

#define VECTORS_AT_ONCE 8 /* vectors of a head's values whose sums are held in registers at a time */

/* softmax(q k^T / sqrt(H)) v over the places of the spans, added to `heads`. A head is `vectors` vectors of LANES. */
ALWAYS_INLINE void attend(const int64_t vectors, const float *q, const void *k, const void *v, int type,
                          const span_t *spans, int num_spans, float *scores, float *heads) {
    int64_t head_dim = vectors * LANES, count = 0;
    float scale = 1.0f / sqrtf((float)head_dim);
    for (int s = 0; s < num_spans; s++)
        for (int64_t place = spans[s].first; place < spans[s].end; place++) {
            floats_t sums = zeros();
            UNROLL for (int64_t i = 0; i < vectors; i++) __builtin_prefetch(element(v, type, place * head_dim + i * LANES));
            UNROLL for (int64_t i = 0; i < vectors; i++) sums = times_add(
                load(q + i * LANES), load_as_float(k, type, place * head_dim + i * LANES), sums);
            scores[count++] = sum_of(sums) * scale;
        }
    if (!count) return; /* an adapter without queries adds nothing */
    floats_t highest = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) {
        highest = larger(highest, load_first_or(scores + i, count - i, -INFINITY));
    }
    float largest = largest_of(highest);
    floats_t total = zeros();
    for (int64_t i = 0; i < count; i += LANES) {
        floats_t part = exponential(subtract(load_first(scores + i, count - i), splat(largest)));
        total = add(total, only_first(part, count - i));
        store_first(scores + i, part, count - i);
    }
    floats_t inverse = splat(1.0f / sum_of(total));
    UNROLL for (int64_t first = 0; first < vectors; first += VECTORS_AT_ONCE) {
        int64_t end = least(vectors, first + VECTORS_AT_ONCE);
        floats_t sums[VECTORS_AT_ONCE];
        EACH(i, VECTORS_AT_ONCE) sums[i] = zeros();
        count = 0;
        for (int s = 0; s < num_spans; s++)
            for (int64_t place = spans[s].first; place < spans[s].end; place++) {
                floats_t weight = splat(scores[count++]);
                UNROLL for (int64_t i = first; i < end; i++) sums[i - first] =
                    times_add(weight, load_as_float(v, type, place * head_dim + i * LANES), sums[i - first]);
            }
        UNROLL for (int64_t i = first; i < end; i++) {
            float *place = heads + i * LANES;
            store(place, times_add(sums[i - first], inverse, load(place)));
        }
    }
}

static void attend_any(int64_t vectors, const float *q, const void *k, const void *v, int type, const span_t *spans,
                       int num_spans, float *scores, float *heads) {
    switch (vectors) { /* constants let the compiler keep the sums in registers */
        case 2: attend(2, q, k, v, type, spans, num_spans, scores, heads); break;
        case 4: attend(4, q, k, v, type, spans, num_spans, scores, heads); break;
        case 16: attend(16, q, k, v, type, spans, num_spans, scores, heads); break;
        case 8: attend(8, q, k, v, type, spans, num_spans, scores, heads); break;
        case 32: attend(32, q, k, v, type, spans, num_spans, scores, heads); break;
        default: attend(vectors, q, k, v, type, spans, num_spans, scores, heads);
    }
}

static void attention_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const attention_t *self = context;
    const decoder_t *decoder = self->decoder;
    const batch_t *batch = self->batch;
    int64_t head_dim = decoder->head_dim, vectors = head_dim / LANES, type = decoder->kept_type;
    int64_t width = decoder->num_heads * head_dim;
    int64_t adapter_layer = self->layer - decoder->first_adapter_layer;
    float *scores = self->scores + thread * self->scores_each;
    for (int64_t item = first; item < end; item++) {
        int64_t run = item / decoder->num_heads, head = item % decoder->num_heads, row = batch->run_rows[run];
        int64_t at = self->layer * batch->cache.layer_stride + row * batch->cache.row_stride + head * batch->cache.head_stride;
        int64_t prefix_at = adapter_layer * batch->prefix.layer_stride + row * batch->prefix.row_stride +
                            head * batch->prefix.head_stride;
        for (int64_t place = self->starts[run]; place < self->starts[run + 1]; place++) {
            int64_t token = self->tokens ? self->tokens[place] : place;
            const float *q = self->qkv + 3 * token * width + head * head_dim;
            float *heads = self->heads + place * width + head * head_dim;
            memset(heads, 0, 4 * head_dim);
            span_t seen[2] = {{0, batch->shared_ends[token]}, {batch->starts[token], batch->places[token] + 1}};
            attend_any(vectors, q, element(batch->cache.k, type, at), element(batch->cache.v, type, at), type, seen, 2,
                       scores, heads);
            if (adapter_layer < 0) continue;
            span_t queries = {0, decoder->num_queries}; /* a separate softmax; the values contain the gate */
            attend_any(vectors, q, element(batch->prefix.k, type, prefix_at), element(batch->prefix.v, type, prefix_at),
                       type, &queries, 1, scores, heads);
        }
    }
}

/* The token with the highest logit of each row, the first one of equals. NO_TOKEN if the highest logit is not finite or
 * a logit is NaN. */
static void best_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const best_t *self = context;
    for (int64_t row = first; row < end; row++) {
        const float *logits = self->logits + row * self->vocab_size;
        floats_t largest = splat(-INFINITY), broken = zeros();
        for (int64_t i = 0; i < self->vocab_size; i += LANES) {
            floats_t part = load_first_or(logits + i, self->vocab_size - i, -INFINITY);
            largest = larger(largest, part);
            broken = where_nan(part, part, broken);
        }
        float highest = largest_of(largest);
        bool is_finite = highest <= FLT_MAX && highest >= -FLT_MAX && sum_of(broken) == 0.0f;
        self->best[row] = NO_TOKEN;
        for (int64_t i = 0; is_finite && i < self->vocab_size; i++)
            if (logits[i] == highest) {
                self->best[row] = i;
                break;
            }
    }
}

/* Bytes for the converted input of any layer that reads a norm or the attention heads: the largest of them. */
static int64_t most_converted_bytes(const decoder_t *decoder, const batch_t *batch) {
    int64_t num_bytes = converted_bytes(&decoder->head, batch->num_logits);
    for (int64_t index = 0; index < decoder->num_layers; index++) {
        const layer_t *layer = decoder->layers + index;
        num_bytes = most(num_bytes, converted_bytes(&layer->qkv, batch->num_tokens));
        num_bytes = most(num_bytes, converted_bytes(&layer->out, batch->num_tokens));
        num_bytes = most(num_bytes, converted_bytes(&layer->gate, batch->num_tokens));
    }
    return num_bytes;
}

/* Bytes for the converted hidden units that a `down` layer reads: the largest of all layers. */
static int64_t most_hidden_bytes(const decoder_t *decoder, const batch_t *batch) {
    int64_t num_bytes = 0;
    for (int64_t index = 0; index < decoder->num_layers; index++)
        num_bytes = most(num_bytes, converted_bytes(&decoder->layers[index].down, batch->num_tokens));
    return num_bytes;
}

/* Copy the `width` numbers of each token of the first equal run to the other equal runs, which have the same length. */
static void copy_run(const batch_t *batch, float *values, int64_t width) {
    const int64_t *starts = batch->run_starts + batch->num_runs - batch->equal_runs;
    float *first = values + starts[0] * width;
    int64_t count = (starts[1] - starts[0]) * width;
    for (int64_t run = 1; run < batch->equal_runs; run++) memcpy(first + run * count, first, 4 * count);
}

/* Write to `starts` (runs + 1) the index in `logit_tokens` where each run begins. */
static void find_logits(const batch_t *batch, int64_t *starts) {
    int64_t logit = 0;
    for (int64_t run = 0; run < batch->num_runs; run++) {
        starts[run] = logit;
        while (logit < batch->num_logits && batch->logit_tokens[logit] < batch->run_starts[run + 1]) logit++;
    }
    starts[batch->num_runs] = batch->num_logits;
}

/* x += layer(input); with ranks, the sum of this over all ranks. Returns 0, or -1 if the sum over ranks failed. */
static int64_t add_to_x(const decoder_t *decoder, const linear_t *layer, const input_t *input, int64_t num_tokens,
                        float *x, int num_threads) {
    int64_t count = num_tokens * decoder->dim;
    if (decoder->sum && !decoder->adds_residual) memset(x, 0, 4 * count);
    multiply_into(layer, input, num_tokens, ADD_FLOAT32, x, num_threads);
    return decoder->sum && decoder->sum(x, count) ? -1 : 0;
}

/* The forward pass. Equal runs are computed once up to the first attention that reads a prefix. The last layer stores
 * keys and values of all tokens, and computes the rest only for tokens that need logits.
 *
 * Returns 0; or, if the scratch memory is too small, the bytes that it needs, without any effect; or -1 if a sum over
 * ranks failed. */
static int64_t forward(const decoder_t *decoder, const batch_t *batch, scratch_t scratch, int num_threads) {
    int64_t num_tokens = batch->num_tokens, dim = decoder->dim, most_places = 0;
    int64_t width = decoder->num_heads * decoder->head_dim;
    for (int64_t token = 0; token < num_tokens; token++) {
        int64_t seen = batch->shared_ends[token] + batch->places[token] + 1 - batch->starts[token];
        most_places = most(most_places, seen);
    }
    int64_t most_rows = most(num_tokens, batch->num_logits);
    int64_t scores_each = round_up(most_places + decoder->num_queries, LANES);
    float *normed = scratch_take(&scratch, 4 * most_rows * dim);
    float *qkv = scratch_take(&scratch, 4 * num_tokens * 3 * width);
    float *heads = scratch_take(&scratch, 4 * num_tokens * width);
    void *hidden = scratch_take(&scratch, most_hidden_bytes(decoder, batch));
    float *scores = scratch_take(&scratch, 4 * scores_each * most_threads(num_threads));
    void *converted = scratch_take(&scratch, most_converted_bytes(decoder, batch));
    float *last_x = scratch_take(&scratch, 4 * batch->num_logits * dim);
    int64_t *logit_starts = scratch_take(&scratch, 8 * (batch->num_runs + 1));
    if (scratch_is_short(&scratch)) return scratch.num_taken;
    int64_t num_heads = batch->num_runs * decoder->num_heads, per_head = num_tokens * decoder->head_dim / batch->num_runs;
    int64_t norm_chunk = 1 + SMALL / dim, rotate_chunk = 1 + SMALL / per_head;
    int64_t attention_chunk = 1 + SMALL / (per_head * most_places);
    bool is_shared = batch->equal_runs > 1;
    int64_t distinct_runs = batch->num_runs - (is_shared ? batch->equal_runs - 1 : 0);
    num_tokens = batch->run_starts[distinct_runs];
    if (batch->ids) embed(decoder, batch, num_tokens);
    float *x = batch->x;
    const int64_t *wanted = batch->logit_tokens; /* rows of x */
    for (int64_t index = 0; index < decoder->num_layers; index++) {
        const layer_t *layer = decoder->layers + index;
        norm_t norm = {x, layer->attention_norm, NULL, normed, dim, decoder->norm_eps};
        run_items(norm_task, &norm, num_tokens, norm_chunk, num_threads);
        apply(&layer->qkv, normed, FLOAT32, GROUP, num_tokens, STORE_FLOAT32, qkv, converted, num_threads);
        if (is_shared) copy_run(batch, qkv, 3 * width); /* each row keeps its keys and values */
        if (is_shared && index == decoder->first_adapter_layer) {
            copy_run(batch, batch->x, dim);
            num_tokens = batch->num_tokens;
            is_shared = false;
        }
        attention_t attention = {decoder, batch, index, qkv, heads, scores, scores_each, NULL, batch->run_starts};
        run_items(rotate_task, &attention, num_heads, rotate_chunk, num_threads);
        if (index == decoder->num_layers - 1 && !is_shared && batch->num_logits < num_tokens) {
            find_logits(batch, logit_starts);
            attention.tokens = batch->logit_tokens, attention.starts = logit_starts;
            num_tokens = batch->num_logits;
            for (int64_t row = 0; row < num_tokens; row++)
                memcpy(last_x + row * dim, x + batch->logit_tokens[row] * dim, 4 * dim);
            norm.x = x = last_x, wanted = NULL;
        }
        int64_t num_seeing = is_shared ? distinct_runs * decoder->num_heads : num_heads;
        run_items(attention_task, &attention, num_seeing, attention_chunk, num_threads);
        input_t input = convert_input(&layer->out, heads, FLOAT32, GROUP, num_tokens, converted, num_threads);
        if (add_to_x(decoder, &layer->out, &input, num_tokens, x, num_threads)) return -1;
        norm.weight = layer->feed_forward_norm;
        run_items(norm_task, &norm, num_tokens, norm_chunk, num_threads);
        input = convert_input(&layer->gate, normed, FLOAT32, GROUP, num_tokens, converted, num_threads);
        converted_t next = converted_in(hidden, &layer->down, GROUP, num_tokens);
        multiply_for(&layer->gate, &layer->up, NONE, &input, num_tokens, &next, num_threads);
        input = input_of(&next);
        if (add_to_x(decoder, &layer->down, &input, num_tokens, x, num_threads)) return -1;
    }
    if (is_shared) copy_run(batch, batch->x, dim);
    norm_t norm = {x, decoder->norm, wanted, normed, dim, decoder->norm_eps};
    run_items(norm_task, &norm, batch->num_logits, norm_chunk, num_threads);
    apply(&decoder->head, normed, FLOAT32, GROUP, batch->num_logits, STORE_FLOAT32, batch->logits, converted, num_threads);
    if (!batch->best) return 0;
    best_t best = {batch->logits, batch->best, decoder->vocab_size};
    run_items(best_task, &best, batch->num_logits, 1 + SMALL / decoder->vocab_size, num_threads);
    return 0;
}
