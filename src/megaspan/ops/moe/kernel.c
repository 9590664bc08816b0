/* Routed SwiGLU experts. The tokens of an expert are brought together, so that a tile of four reads its
   weights once. Each number is made in a fixed order of additions (see product.h), so a token's result depends
   neither on the other tokens nor on the number of threads. */

#include "../product.h"

#include <omp.h>
#include <stdlib.h>

enum { ROWS = 16 };                     /* outputs that are one piece of work */
enum { SCRATCH_BYTES = 32 << 20 };      /* bound on working memory, unless sixteen tokens need more */

/* gate and up: [E, I, D] with `expert_stride` numbers from one expert to the next; down: [E, D, I]. */
typedef struct {
    const char *hidden, *gate, *up, *down;
    const int64_t *expert_ids;
    const float *expert_weights;
    char *output;
    int64_t tokens, slots, experts, width, inner, expert_stride;
    int32_t is_bf16, threads;
} Call;

/* A block of tokens; a pair is a token and one of its slots. */
typedef struct {
    int64_t first, tokens; /* of the call's tokens */
    int64_t used;          /* experts that any of them goes to */
    int64_t *starts;       /* [experts + 1] places in `order` */
    int64_t *experts;      /* [experts], the used ones come first */
    int64_t *order;        /* [pairs], sorted by expert */
    char *active;          /* [pairs, inner] in the dtype */
    float *results;        /* [pairs, width] */
} Block;

static void sort_by_expert(const Call *c, Block *b) {
    const int64_t *ids = c->expert_ids + b->first * c->slots, pairs = b->tokens * c->slots;
    memset(b->starts, 0, (c->experts + 1) * sizeof *b->starts);
    for (int64_t pair = 0; pair < pairs; pair++) b->starts[ids[pair] + 1]++;
    b->used = 0;
    for (int64_t e = 0; e < c->experts; e++) {
        if (b->starts[e + 1]) b->experts[b->used++] = e;
        b->starts[e + 1] += b->starts[e];
    }
    for (int64_t pair = 0; pair < pairs; pair++) b->order[b->starts[ids[pair]]++] = pair;
    memmove(b->starts + 1, b->starts, c->experts * sizeof *b->starts); /* each start had moved to its end */
    b->starts[0] = 0;
}

/* silu(gate) * up of rows first .. first + ROWS - 1 for `tokens` pairs of one expert. */
INLINE void activate(const Call *c, const Block *b, const int64_t *pairs, int64_t expert, int64_t first,
                     int tokens, int is_bf16) {
    const int64_t bytes = is_bf16 ? 2 : 4, stride = c->width * bytes;
    const int columns = tile_outputs(tokens);
    const char *states[TILE];
    for (int t = 0; t < tokens; t++) states[t] = c->hidden + (b->first + pairs[t] / c->slots) * stride;
    for (int64_t row = first; row < smaller(first + ROWS, c->inner); row += columns) {
        const int64_t at = (expert * c->expert_stride + row * c->width) * bytes, left = c->inner - row;
        const Floats gate = multiply_tile(states, c->gate + at, stride, left, c->width, tokens, is_bf16);
        const Floats up = multiply_tile(states, c->up + at, stride, left, c->width, tokens, is_bf16);
        const Floats active = silu(gate) * up;
        for (int t = 0; t < tokens; t++)
            store_floats(b->active + (pairs[t] * c->inner + row) * bytes, active, t * columns, columns, left,
                         is_bf16);
    }
}

/* Rows first .. first + ROWS - 1 of down times the active states of `tokens` pairs of one expert. */
INLINE void project(const Call *c, const Block *b, const int64_t *pairs, int64_t expert, int64_t first,
                    int tokens, int is_bf16) {
    const int64_t stride = c->inner * (is_bf16 ? 2 : 4);
    const int columns = tile_outputs(tokens);
    const char *states[TILE];
    for (int t = 0; t < tokens; t++) states[t] = b->active + pairs[t] * stride;
    for (int64_t row = first; row < smaller(first + ROWS, c->width); row += columns) {
        const char *weights = c->down + (expert * c->width + row) * stride;
        const int64_t left = c->width - row;
        const Floats result = multiply_tile(states, weights, stride, left, c->inner, tokens, is_bf16);
        for (int t = 0; t < tokens; t++)
            store_floats(b->results + pairs[t] * c->width + row, result, t * columns, columns, left, 0);
    }
}

/* Either step for all pairs of the used expert `number`, and ROWS of its rows. */
INLINE void piece(const Call *c, const Block *b, int64_t number, int64_t first, int projects, int is_bf16) {
    const int64_t expert = b->experts[number], *pairs = b->order + b->starts[expert];
    int64_t left = b->starts[expert + 1] - b->starts[expert];
#define STEP(tokens)                                                                     \
    (projects ? project(c, b, pairs, expert, first, tokens, is_bf16)                     \
              : activate(c, b, pairs, expert, first, tokens, is_bf16))
    for (; left >= 4; left -= 4, pairs += 4) STEP(4);
    if (left == 3) STEP(3);
    if (left == 2) STEP(2);
    if (left == 1) STEP(1);
#undef STEP
}

/* The token's k results, added in the order of its slots. */
INLINE void add_slots(const Call *c, const Block *b, int64_t token, int is_bf16) {
    const float *weights = c->expert_weights + (b->first + token) * c->slots;
    char *output = c->output + (b->first + token) * c->width * (is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < c->width; i += LANES) {
        const int64_t count = smaller(LANES, c->width - i);
        Floats sum = {0};
        for (int64_t slot = 0; slot < c->slots; slot++) {
            const float *result = b->results + (token * c->slots + slot) * c->width + i;
            sum = multiply_add((Floats){0} + weights[slot], load_floats(result, count, 0), sum);
        }
        store_floats(output + i * (is_bf16 ? 2 : 4), sum, 0, LANES, count, is_bf16);
    }
}

INLINE void run(const Call *c, const Block *b, int is_bf16) {
    const int64_t inner = (c->inner + ROWS - 1) / ROWS, width = (c->width + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(c->threads) if (c->threads > 1)
    {
#pragma omp for schedule(dynamic, 2)
        for (int64_t task = 0; task < b->used * inner; task++)
            piece(c, b, task / inner, task % inner * ROWS, 0, is_bf16);
#pragma omp for schedule(dynamic, 2)
        for (int64_t task = 0; task < b->used * width; task++)
            piece(c, b, task / width, task % width * ROWS, 1, is_bf16);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < b->tokens; token++) add_slots(c, b, token, is_bf16);
    }
}

/* Returns 0, 1 if there was no memory, 2 if an expert does not exist. */
int moe(const Call *c) {
    for (int64_t pair = 0; pair < c->tokens * c->slots; pair++)
        if ((uint64_t)c->expert_ids[pair] >= (uint64_t)c->experts) return 2;
    const int64_t bytes = c->is_bf16 ? 2 : 4;
    const int64_t token_bytes = c->slots * (8 + 4 * c->width + bytes * c->inner);
    int64_t most = SCRATCH_BYTES / (token_bytes + 1);
    most = smaller(most < LANES ? LANES : most, c->tokens);
    const int64_t pairs = most * c->slots, numbers = 2 * c->experts + 1;
    char *memory = malloc(numbers * 8 + most * token_bytes + 8);
    if (!memory) return 1;
    Block b = {.starts = (int64_t *)memory};
    b.experts = b.starts + c->experts + 1;
    b.order = b.experts + c->experts;
    b.results = (float *)(b.order + pairs);
    b.active = (char *)(b.results + pairs * c->width);
    for (; b.first < c->tokens; b.first += b.tokens) {
        b.tokens = smaller(most, c->tokens - b.first);
        sort_by_expert(c, &b);
        if (c->is_bf16) run(c, &b, 1);
        else run(c, &b, 0);
    }
    free(memory);
    return 0;
}
