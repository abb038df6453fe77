/* Decoders of the LLaMA family with adapter attention, over tokens of any number of rows. Prefill, decode steps and
 * scoring use it. What differs among the families is data: see DecoderConfig of llm/config.py.
 *
 * Tokens of all rows are concatenated without padding. For each token, the batch gives the place of its key and value
 * in the cache, the position for its rotary embedding, and the places that it attends to: 0..shared_end-1 of its row,
 * which are also their positions, and start..its own place. A layer with a window leaves out those whose position is
 * too far back. Query heads are in groups that read one head of keys and values. Everything between the linear layers
 * is float32, for every type of weights.
 */
#pragma once

#include <float.h>
#include <math.h>

#include "linear.h"

#define NO_TOKEN -1 /* as in prediction.py */

typedef struct {
    /* Each may be NULL: */
    const float *attention_norm, *feed_forward_norm; /* of x, before each half of the layer */
    const float *attention_out_norm, *feed_forward_out_norm; /* of what each half adds to x */
    const float *q_norm, *k_norm; /* of each head of queries and keys, or of all heads together */
    const float *rotary_cos, *rotary_sin; /* (positions, head_dim) */
    int64_t window; /* the most positions that a token attends to, its own included; 0: all */
    linear_t qkv, out, gate, up, down;
} layer_t;

typedef struct {
    int64_t dim, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, first_adapter_layer, num_queries;
    float norm_eps, score_cap, logit_cap; /* caps: 0 means none */
    int32_t activation; /* of the gate */
    int32_t norms_all_heads; /* whether q_norm and k_norm are of all heads together */
    int32_t kept_type; /* of cached keys and values: FLOAT32 or BFLOAT16 */
    int32_t embedding_type; /* FLOAT32 or BFLOAT16 */
    const void *embedding;  /* (vocab_size, dim) */
    const layer_t *layers;
    const float *norm;
    linear_t head;
    /* Sums x over the ranks, after attention and after the feed-forward network, if this is one rank's share of
     * a decoder: some of its heads and hidden units. Returns 0, or another number if it failed. NULL for a
     * whole decoder. */
    int64_t (*sum)(float *x, int64_t count);
    int64_t adds_residual; /* 1 on the one rank that adds the residual, the previous x; read if `sum` is not NULL */
} decoder_t;

/* Keys and values (layers, rows, heads, places, head_dim). Strides count elements; places are contiguous. The cache has
 * num_kv_heads heads, the prefix num_heads, because gates are multiplied into its values. With a table, the rows are
 * blocks of `block` places, and row r of the batch has the blocks table[r * blocks], table[r * blocks + 1], ... */
typedef struct {
    void *k, *v;
    int64_t layer_stride, row_stride, head_stride;
    const int64_t *table; /* or NULL: row r has its places in row r */
    int64_t blocks, block;
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
    int64_t first, end;
} span_t;

typedef struct {
    const decoder_t *decoder;
    const batch_t *batch;
    int64_t layer;
    float *qkv, *heads, *scores; /* `scores` has scores_each floats for each of heads_at_once heads of each thread */
    int64_t scores_each, heads_at_once;
    span_t *spans; /* spans_each for each thread */
    int64_t spans_each;
    const int64_t *tokens; /* tokens for which attention is computed, or NULL for all */
    const int64_t *starts; /* (runs + 1): index in `tokens` where each run begins */
} attention_t;

typedef struct {
    const float *x, *weight;
    const int64_t *tokens; /* which rows of x, or NULL for all */
    float *out;
    int64_t dim, stride; /* numbers of a row; and from row to row, of x and of out */
    float eps;
    bool adds; /* to the numbers of out */
} norm_t;

typedef struct {
    float *logits, cap;
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

/* Root mean square norm with a learned scale; out may be x. */
ALWAYS_INLINE void rms_norm(const float *x, const float *weight, int64_t dim, float eps, const bool adds, float *out) {
    floats_t squares = zeros();
    for (int64_t k = 0; k < dim; k += LANES) {
        floats_t part = load_first(x + k, dim - k);
        squares = times_add(part, part, squares);
    }
    floats_t scale = splat(1.0f / sqrtf(sum_of(squares) / dim + eps));
    for (int64_t k = 0; k < dim; k += LANES) {
        int64_t count = dim - k;
        floats_t part = times(times(load_first(x + k, count), scale), load_first(weight + k, count));
        store_first(out + k, adds ? add(load_first(out + k, count), part) : part, count);
    }
}

static void norm_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const norm_t *self = context;
    for (int64_t row = first; row < end; row++) {
        const float *x = self->x + (self->tokens ? self->tokens[row] : row) * self->stride;
        float *out = self->out + row * self->stride;
        if (self->adds) rms_norm(x, self->weight, self->dim, self->eps, true, out);
        else rms_norm(x, self->weight, self->dim, self->eps, false, out);
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

/* Numbers of a token in `qkv`: heads of queries, of keys, of values. */
static inline int64_t qkv_width(const decoder_t *decoder) {
    return (decoder->num_heads + 2 * decoder->num_kv_heads) * decoder->head_dim;
}

/* Cut the places first..end-1 of a row into spans that are contiguous in one head of a layer; returns their number. Spans
 * count places from the head's first one in row 0. */
static int64_t find_spans(const kept_t *kept, int64_t row, int64_t head_dim, int64_t first, int64_t end, span_t *spans) {
    int64_t places_each = kept->row_stride / head_dim, count = 0; /* of all heads of a row or block */
    if (!kept->table) {
        spans[0] = (span_t){row * places_each + first, row * places_each + end};
        return 1;
    }
    while (first < end) {
        int64_t number = first / kept->block, stop = least(end, (number + 1) * kept->block);
        int64_t base = kept->table[row * kept->blocks + number] * places_each - number * kept->block;
        spans[count++] = (span_t){base + first, base + stop};
        first = stop;
    }
    return count;
}

/* Apply norm and rotary embedding to each head of queries and keys, and store key and value in the row's cache. */
static void rotate_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const attention_t *self = context;
    const decoder_t *decoder = self->decoder;
    const layer_t *layer = decoder->layers + self->layer;
    const batch_t *batch = self->batch;
    int64_t head_dim = decoder->head_dim, width = qkv_width(decoder), kv_dim = decoder->num_kv_heads * head_dim;
    int64_t each = decoder->num_heads + decoder->num_kv_heads; /* heads that are rotated */
    for (int64_t item = first; item < end; item++) {
        int64_t run = item / each, head = item % each, kv_head = head - decoder->num_heads;
        const float *norm = decoder->norms_all_heads ? NULL : kv_head < 0 ? layer->q_norm : layer->k_norm;
        int64_t base = self->layer * batch->cache.layer_stride + kv_head * batch->cache.head_stride;
        span_t place;
        for (int64_t token = batch->run_starts[run]; token < batch->run_starts[run + 1]; token++) {
            float *x = self->qkv + token * width + head * head_dim;
            int64_t table = batch->positions[token] * head_dim, own = batch->places[token];
            if (norm) rms_norm(x, norm, head_dim, decoder->norm_eps, false, x);
            if (layer->rotary_cos) rotate(x, layer->rotary_cos + table, layer->rotary_sin + table, head_dim);
            if (kv_head < 0) continue;
            find_spans(&batch->cache, batch->run_rows[run], head_dim, own, own + 1, &place);
            int64_t at = base + place.first * head_dim;
            keep(batch->cache.k, decoder->kept_type, at, x, head_dim);
            keep(batch->cache.v, decoder->kept_type, at, x + kv_dim, head_dim);
        }
    }
}

/* What some query heads of a token see: one head of keys and values. */
typedef struct {
    const float *q; /* (heads, head_dim) */
    const void *k, *v; /* (places, head_dim) */
    int64_t head_dim;
    int64_t num_spans;
    const span_t *spans; /* of places */
    float cap; /* of scores, or 0 */
    float *scores; /* (heads, scores_each): scratch */
    int64_t scores_each;
    float *heads; /* (heads, head_dim): receives the result */
} view_t;

#define HEADS_AT_ONCE 4   /* query heads that use each loaded key and value */
#define VECTORS_AT_ONCE 8 /* vectors of all these heads' values whose sums are held in registers at a time */

/* softmax(q k^T / sqrt(H)) v over the places of the spans, added to `heads`. A head is `vectors` vectors of LANES. */
ALWAYS_INLINE void attend(const int64_t vectors, const int num_heads, const int type, const view_t *self) {
    const float *q = self->q;
    const void *k = self->k, *v = self->v;
    const int64_t num_spans = self->num_spans;
    const span_t *spans = self->spans;
    float *scores = self->scores, *heads = self->heads, inverses[HEADS_AT_ONCE];
    const int64_t scores_each = self->scores_each, head_dim = vectors * LANES;
    int64_t count = 0;
    float scale = 1.0f / sqrtf((float)head_dim);
    for (int64_t s = 0; s < num_spans; s++)
        for (int64_t place = spans[s].first; place < spans[s].end; place++, count++) {
            floats_t sums[HEADS_AT_ONCE];
            EACH(h, num_heads) sums[h] = zeros();
            UNROLL for (int64_t i = 0; i < vectors; i++) __builtin_prefetch(element(v, type, place * head_dim + i * LANES));
            UNROLL for (int64_t i = 0; i < vectors; i++) {
                floats_t key = load_as_float(k, type, place * head_dim + i * LANES);
                EACH(h, num_heads) sums[h] = times_add(load(q + h * head_dim + i * LANES), key, sums[h]);
            }
            EACH(h, num_heads) scores[h * scores_each + count] = sum_of(sums[h]) * scale;
        }
    if (!count) return; /* an adapter without queries adds nothing */
    for (int h = 0; h < num_heads; h++) {
        float *own = scores + h * scores_each;
        if (self->cap > 0)
            for (int64_t i = 0; i < count; i += LANES)
                store_first(own + i, capped(load_first(own + i, count - i), self->cap), count - i);
        floats_t highest = splat(-INFINITY);
        for (int64_t i = 0; i < count; i += LANES) {
            highest = larger(highest, load_first_or(own + i, count - i, -INFINITY));
        }
        float largest = largest_of(highest);
        floats_t total = zeros();
        for (int64_t i = 0; i < count; i += LANES) {
            floats_t part = exponential(subtract(load_first(own + i, count - i), splat(largest)));
            total = add(total, only_first(part, count - i));
            store_first(own + i, part, count - i);
        }
        inverses[h] = 1.0f / sum_of(total);
    }
    const int64_t each = VECTORS_AT_ONCE / num_heads;
    const bool is_whole = vectors % each == 0;
    UNROLL for (int64_t first = 0; first < vectors; first += each) {
        floats_t sums[HEADS_AT_ONCE][VECTORS_AT_ONCE];
        EACH(h, num_heads) EACH(i, each) sums[h][i] = zeros();
        count = 0;
        for (int64_t s = 0; s < num_spans; s++)
            for (int64_t place = spans[s].first; place < spans[s].end; place++, count++) {
                floats_t weights[HEADS_AT_ONCE];
                EACH(h, num_heads) weights[h] = splat(scores[h * scores_each + count]);
                EACH(i, each) if (is_whole || first + i < vectors) {
                    floats_t value = load_as_float(v, type, place * head_dim + (first + i) * LANES);
                    EACH(h, num_heads) sums[h][i] = times_add(weights[h], value, sums[h][i]);
                }
            }
        EACH(h, num_heads) EACH(i, each) if (is_whole || first + i < vectors) {
            float *place = heads + h * head_dim + (first + i) * LANES;
            store(place, times_add(sums[h][i], splat(inverses[h]), load(place)));
        }
    }
}

/* A function for each size and number of heads and type: constants let the compiler keep the sums in registers. Other
 * sizes, such as 80, 96 and 256, are nearly as fast without constants. */
typedef void (*attend_t)(const view_t *self);
#define ATTEND(size, vectors, type, num_heads) \
    static void attend_##size##_##type##_##num_heads(const view_t *self) { attend(vectors, num_heads, type, self); }
#define ATTENDS(size, vectors, type)                                     \
    ATTEND(size, vectors, type, 1) ATTEND(size, vectors, type, 2) \
    ATTEND(size, vectors, type, 3) ATTEND(size, vectors, type, 4)
#define ATTENDS_OF(size, vectors) ATTENDS(size, vectors, FLOAT32) ATTENDS(size, vectors, BFLOAT16)
ATTENDS_OF(32, 32 / LANES)
ATTENDS_OF(64, 64 / LANES)
ATTENDS_OF(128, 128 / LANES)
ATTENDS_OF(any, self->head_dim / LANES)

#define NAMES(name) {name##_1, name##_2, name##_3, name##_4}
#define NAMES_OF(size) {NAMES(attend_##size##_FLOAT32), NAMES(attend_##size##_BFLOAT16)}
static attend_t attend_of(int64_t head_dim, int64_t num_heads, int type) {
    static const attend_t all[][2][HEADS_AT_ONCE] = {NAMES_OF(32), NAMES_OF(64), NAMES_OF(128), NAMES_OF(any)};
    int size = head_dim == 32 ? 0 : head_dim == 64 ? 1 : head_dim == 128 ? 2 : 3;
    return all[size][type][num_heads - 1];
}

/* Items: for each run and each head of keys and values, parts of up to heads_at_once query heads. */
static void attention_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const attention_t *self = context;
    const decoder_t *decoder = self->decoder;
    const batch_t *batch = self->batch;
    int64_t head_dim = decoder->head_dim, type = decoder->kept_type, window = decoder->layers[self->layer].window;
    int64_t qkv_each = qkv_width(decoder), width = decoder->num_heads * head_dim;
    int64_t adapter_layer = self->layer - decoder->first_adapter_layer;
    int64_t group = decoder->num_heads / decoder->num_kv_heads, num_parts = parts_of(group, self->heads_at_once);
    span_t *seen = self->spans + thread * self->spans_each;
    view_t view = {.head_dim = head_dim, .cap = decoder->score_cap, .scores_each = self->scores_each,
                   .scores = self->scores + thread * self->heads_at_once * self->scores_each};
    for (int64_t item = first; item < end; item++) {
        int64_t run = item / (decoder->num_kv_heads * num_parts), row = batch->run_rows[run];
        int64_t kv_head = item / num_parts % decoder->num_kv_heads, part = item % num_parts;
        int64_t head = kv_head * group + group * part / num_parts;
        int64_t num_heads = kv_head * group + group * (part + 1) / num_parts - head;
        int64_t at = self->layer * batch->cache.layer_stride + kv_head * batch->cache.head_stride;
        int64_t prefix_at = adapter_layer * batch->prefix.layer_stride + row * batch->prefix.row_stride +
                            head * batch->prefix.head_stride;
        for (int64_t place = self->starts[run]; place < self->starts[run + 1]; place++) {
            int64_t token = self->tokens ? self->tokens[place] : place, own = batch->places[token];
            int64_t shared_end = batch->shared_ends[token], start = batch->starts[token], shared_start = 0;
            if (window) { /* places from `start` on have consecutive positions */
                shared_start = least(shared_end, most(0, batch->positions[token] - window + 1));
                start = most(start, own - window + 1);
            }
            int64_t num_seen = find_spans(&batch->cache, row, head_dim, shared_start, shared_end, seen);
            num_seen += find_spans(&batch->cache, row, head_dim, start, own + 1, seen + num_seen);
            view.q = self->qkv + token * qkv_each + head * head_dim;
            view.heads = self->heads + place * width + head * head_dim;
            memset(view.heads, 0, 4 * num_heads * head_dim);
            view.k = element(batch->cache.k, type, at), view.v = element(batch->cache.v, type, at);
            view.spans = seen, view.num_spans = num_seen;
            attend_of(head_dim, num_heads, type)(&view);
            if (adapter_layer < 0) continue;
            span_t queries = {0, decoder->num_queries}; /* a separate softmax; the values contain the gate */
            view.spans = &queries, view.num_spans = 1;
            for (int64_t h = 0; h < num_heads; h++, view.q += head_dim, view.heads += head_dim) {
                int64_t its = prefix_at + h * batch->prefix.head_stride;
                view.k = element(batch->prefix.k, type, its), view.v = element(batch->prefix.v, type, its);
                attend_of(head_dim, 1, type)(&view);
            }
        }
    }
}

/* Caps the logits, if there is a cap, and finds the token with the highest logit of each row if `best` is not NULL, the
 * first one of equals. NO_TOKEN if the highest logit is not finite or
 * a logit is NaN. */
static void best_task(const void *context, int64_t first, int64_t end, int64_t thread) {
    const best_t *self = context;
    for (int64_t row = first; row < end; row++) {
        float *logits = self->logits + row * self->vocab_size;
        for (int64_t i = 0; self->cap > 0 && i < self->vocab_size; i += LANES) {
            int64_t count = self->vocab_size - i;
            store_first(logits + i, capped(load_first(logits + i, count), self->cap), count);
        }
        if (!self->best) continue;
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

/* The norm of rows of x, in `normed`; or x itself if there is no norm. `tokens` are the rows of x, or NULL for all. */
static const float *norm_of(const decoder_t *decoder, const float *weight, const float *x, const int64_t *tokens,
                            int64_t num_rows, float *normed, int num_threads) {
    if (!weight) return x;
    norm_t job = {x, weight, tokens, normed, decoder->dim, decoder->dim, decoder->norm_eps, false};
    run_items(norm_task, &job, num_rows, 1 + SMALL / decoder->dim, num_threads);
    return normed;
}

/* x += norm(layer(input)), where the norm may be NULL; with ranks, the sum over all ranks is normed and added. `spare`
 * has as many numbers as x. Returns 0, or -1 if the sum over ranks failed. */
static int64_t add_to_x(const decoder_t *decoder, const linear_t *layer, const float *norm, const input_t *input,
                        int64_t num_tokens, float *x, float *spare, int num_threads) {
    int64_t count = num_tokens * decoder->dim;
    float *out = norm ? spare : x;
    if (!norm && decoder->sum && !decoder->adds_residual) memset(x, 0, 4 * count);
    multiply_into(layer, input, num_tokens, norm ? STORE_FLOAT32 : ADD_FLOAT32, out, num_threads);
    if (decoder->sum && decoder->sum(out, count)) return -1;
    if (!norm) return 0;
    norm_t job = {spare, norm, NULL, x, decoder->dim, decoder->dim, decoder->norm_eps, true};
    run_items(norm_task, &job, num_tokens, 1 + SMALL / decoder->dim, num_threads);
    return 0;
}

/* The norm of each token's queries of all heads together, and of its keys. */
static void norm_all_heads(const decoder_t *decoder, const layer_t *layer, float *qkv, int64_t num_tokens,
                           int num_threads) {
    int64_t width = qkv_width(decoder), q_dim = decoder->num_heads * decoder->head_dim;
    norm_t q = {qkv, layer->q_norm, NULL, qkv, q_dim, width, decoder->norm_eps, false};
    norm_t k = {qkv + q_dim, layer->k_norm, NULL, qkv + q_dim, (width - q_dim) / 2, width, decoder->norm_eps, false};
    run_items(norm_task, &q, num_tokens, 1 + SMALL / width, num_threads);
    run_items(norm_task, &k, num_tokens, 1 + SMALL / width, num_threads);
}

/* The forward pass. Equal runs are computed once up to the first attention that reads a prefix. The last layer stores
 * keys and values of all tokens, and computes the rest only for tokens that need logits.
 *
 * Returns 0; or, if the scratch memory is too small, the bytes that it needs, without any effect; or -1 if a sum over
 * ranks failed. */
static int64_t forward(const decoder_t *decoder, const batch_t *batch, scratch_t scratch, int num_threads) {
    int64_t num_tokens = batch->num_tokens, dim = decoder->dim, most_places = 0;
    int64_t width = decoder->num_heads * decoder->head_dim, group = decoder->num_heads / decoder->num_kv_heads;
    for (int64_t token = 0; token < num_tokens; token++) {
        int64_t seen = batch->shared_ends[token] + batch->places[token] + 1 - batch->starts[token];
        most_places = most(most_places, seen);
    }
    int64_t most_rows = most(num_tokens, batch->num_logits), heads_at_once = least(group, HEADS_AT_ONCE);
    /* Fewer heads at once if threads would have nothing to do. */
    while (heads_at_once > 1 && batch->num_runs * decoder->num_kv_heads * parts_of(group, heads_at_once) < num_threads)
        heads_at_once--;
    int64_t scores_each = round_up(most_places + decoder->num_queries, LANES);
    float *normed = scratch_take(&scratch, 4 * most_rows * dim);
    float *qkv = scratch_take(&scratch, 4 * num_tokens * qkv_width(decoder));
    float *heads = scratch_take(&scratch, 4 * num_tokens * width);
    void *hidden = scratch_take(&scratch, most_hidden_bytes(decoder, batch));
    float *scores = scratch_take(&scratch, 4 * scores_each * heads_at_once * most_threads(num_threads));
    void *converted = scratch_take(&scratch, most_converted_bytes(decoder, batch));
    float *last_x = scratch_take(&scratch, 4 * batch->num_logits * dim);
    int64_t *logit_starts = scratch_take(&scratch, 8 * (batch->num_runs + 1));
    int64_t spans_each = batch->cache.table ? most_places / batch->cache.block + 4 : 2; /* two runs of places, cut */
    span_t *spans = scratch_take(&scratch, sizeof(span_t) * spans_each * most_threads(num_threads));
    if (scratch_is_short(&scratch)) return scratch.num_taken;
    int64_t num_rotated = batch->num_runs * (decoder->num_heads + decoder->num_kv_heads);
    int64_t views_of_run = decoder->num_kv_heads * parts_of(group, heads_at_once);
    int64_t per_head = num_tokens * decoder->head_dim / batch->num_runs, rotate_chunk = 1 + SMALL / per_head;
    int64_t attention_chunk = 1 + SMALL / (per_head * heads_at_once * most_places);
    bool is_shared = batch->equal_runs > 1;
    int64_t distinct_runs = batch->num_runs - (is_shared ? batch->equal_runs - 1 : 0);
    num_tokens = batch->run_starts[distinct_runs];
    if (batch->ids) embed(decoder, batch, num_tokens);
    float *x = batch->x;
    const int64_t *wanted = batch->logit_tokens; /* rows of x */
    for (int64_t index = 0; index < decoder->num_layers; index++) {
        const layer_t *layer = decoder->layers + index;
        const float *read = norm_of(decoder, layer->attention_norm, x, NULL, num_tokens, normed, num_threads);
        apply(&layer->qkv, read, FLOAT32, GROUP, num_tokens, STORE_FLOAT32, qkv, converted, num_threads);
        if (decoder->norms_all_heads) norm_all_heads(decoder, layer, qkv, num_tokens, num_threads);
        if (is_shared) copy_run(batch, qkv, qkv_width(decoder)); /* each row keeps its keys and values */
        if (is_shared && index == decoder->first_adapter_layer) {
            copy_run(batch, batch->x, dim);
            num_tokens = batch->num_tokens;
            is_shared = false;
        }
        attention_t attention = {decoder,       batch, index,      qkv,  heads,            scores, scores_each,
                                 heads_at_once, spans, spans_each, NULL, batch->run_starts};
        run_items(rotate_task, &attention, num_rotated, rotate_chunk, num_threads);
        if (index == decoder->num_layers - 1 && !is_shared && batch->num_logits < num_tokens) {
            find_logits(batch, logit_starts);
            attention.tokens = batch->logit_tokens, attention.starts = logit_starts;
            num_tokens = batch->num_logits;
            for (int64_t row = 0; row < num_tokens; row++)
                memcpy(last_x + row * dim, x + batch->logit_tokens[row] * dim, 4 * dim);
            x = last_x, wanted = NULL;
        }
        int64_t num_views = views_of_run * (is_shared ? distinct_runs : batch->num_runs);
        run_items(attention_task, &attention, num_views, attention_chunk, num_threads);
        input_t input = convert_input(&layer->out, heads, FLOAT32, GROUP, num_tokens, converted, num_threads);
        if (add_to_x(decoder, &layer->out, layer->attention_out_norm, &input, num_tokens, x, normed, num_threads)) return -1;
        read = norm_of(decoder, layer->feed_forward_norm, x, NULL, num_tokens, normed, num_threads);
        input = convert_input(&layer->gate, read, FLOAT32, GROUP, num_tokens, converted, num_threads);
        converted_t next = converted_in(hidden, &layer->down, GROUP, num_tokens);
        multiply_for(&layer->gate, &layer->up, decoder->activation, &input, num_tokens, &next, num_threads);
        input = input_of(&next);
        if (add_to_x(decoder, &layer->down, layer->feed_forward_out_norm, &input, num_tokens, x, normed, num_threads))
            return -1;
    }
    if (is_shared) copy_run(batch, batch->x, dim);
    const float *read = norm_of(decoder, decoder->norm, x, wanted, batch->num_logits, normed, num_threads);
    apply(&decoder->head, read, FLOAT32, GROUP, batch->num_logits, STORE_FLOAT32, batch->logits, converted, num_threads);
    if (!batch->best && !(decoder->logit_cap > 0)) return 0;
    best_t best = {batch->logits, decoder->logit_cap, batch->best, decoder->vocab_size};
    run_items(best_task, &best, batch->num_logits, 1 + SMALL / decoder->vocab_size, num_threads);
    return 0;
}
