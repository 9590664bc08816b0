/* Routing: fp32 scores in a fixed order of additions (see product.h), then the best k of each token. */

#include "../product.h"

#include <stdlib.h>

typedef struct {
    const char *hidden; /* [tokens, width], rows token_stride bytes apart */
    const float *weight, *bias; /* [experts, width], [experts] */
    int64_t *expert_ids;        /* [tokens, topk] */
    float *expert_weights;      /* [tokens, topk] */
    int64_t tokens, width, experts, topk, token_stride;
    float scaling;
    int32_t normalise, is_bf16, threads;
} Call;

/* Working memory of one thread. */
typedef struct {
    float *hidden, *scores; /* [TILE, width], [TILE, experts] */
    uint8_t *taken;         /* [experts] */
} Scratch;

/* The token's row in fp32. */
static const char *widened(const Call *c, int64_t token, float *row) {
    const char *hidden = c->hidden + token * c->token_stride;
    if (!c->is_bf16) return hidden;
    for (int64_t i = 0; i < c->width; i += LANES) {
        const int64_t count = smaller(LANES, c->width - i);
        store_floats(row + i, load_floats(hidden + 2 * i, count, 1), 0, LANES, count, 0);
    }
    return (const char *)row;
}

INLINE void score(const Call *c, int64_t first, int tokens, const Scratch *s) {
    const int columns = tile_outputs(tokens);
    const char *states[TILE];
    for (int t = 0; t < tokens; t++) states[t] = widened(c, first + t, s->hidden + t * c->width);
    for (int64_t e = 0; e < c->experts; e += columns) {
        const char *weights = (const char *)(c->weight + e * c->width);
        const int64_t left = c->experts - e;
        const Floats logits = multiply_tile(states, weights, 4 * c->width, left, c->width, tokens, 0);
        const Floats scores = sigmoid(logits);
        for (int t = 0; t < tokens; t++)
            store_floats(s->scores + t * c->experts + e, scores, t * columns, columns, left, 0);
    }
}

/* The best experts by score + bias, best first; of equal ones the lowest. */
static void choose_experts(const Call *c, const float *scores, int64_t *ids, float *weights, uint8_t *taken) {
    float sum = 0;
    memset(taken, 0, c->experts);
    for (int64_t k = 0; k < c->topk; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < c->experts; e++)
            if (!taken[e] && (best < 0 || scores[e] + c->bias[e] > scores[best] + c->bias[best])) best = e;
        taken[best] = 1;
        ids[k] = best;
        weights[k] = scores[best];
        sum += scores[best];
    }
    for (int64_t k = 0; k < c->topk; k++) {
        if (c->normalise) weights[k] /= sum + 1e-20f;
        weights[k] *= c->scaling;
    }
}

/* Returns 1 if there was no memory. */
int route(const Call *c) {
    const int64_t bytes = TILE * (c->width + c->experts) * 4 + c->experts;
    char *memory = malloc(c->threads * bytes + 1);
    if (!memory) return 1;
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1) schedule(static)
    for (int64_t part = 0; part < c->threads; part++) {
        Scratch s = {.hidden = (float *)(memory + part * (bytes - c->experts))};
        s.scores = s.hidden + TILE * c->width;
        s.taken = (uint8_t *)memory + c->threads * (bytes - c->experts) + part * c->experts;
        const int64_t tiles = (c->tokens + TILE - 1) / TILE, last = smaller((part + 1) * tiles / c->threads, tiles);
        for (int64_t tile = part * tiles / c->threads; tile < last; tile++) {
            const int64_t first = tile * TILE;
            const int tokens = (int)smaller(TILE, c->tokens - first);
            if (tokens == 4) score(c, first, 4, &s);
            else if (tokens == 3) score(c, first, 3, &s);
            else if (tokens == 2) score(c, first, 2, &s);
            else score(c, first, 1, &s);
            for (int64_t t = 0; t < tokens; t++)
                choose_experts(c, s.scores + t * c->experts, c->expert_ids + (first + t) * c->topk,
                               c->expert_weights + (first + t) * c->topk, s.taken);
        }
    }
    free(memory);
    return 0;
}
