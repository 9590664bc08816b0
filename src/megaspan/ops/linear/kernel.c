/* Products with weight matrices, and the norm between them, each number in a fixed order of additions: see
   product.h. H independent matrices a call: one for a plain linear layer, one a head for the products that
   absorb latent attention. A tile of four tokens reads a row of weights once. */

#include "../product.h"

enum { OUTPUTS = 16, TOKENS = 64, VECTORS = 4 }; /* a piece of work is 16 or 64 outputs of 64 tokens */

typedef struct {
    const char *states, *weights; /* [T, H, in] and [H, rows, columns], the last dimension contiguous */
    char *output;                 /* [T, H, out], contiguous */
    int64_t tokens, heads, inputs, outputs, state_token_stride, state_head_stride;
    int64_t weight_head_stride, weight_row_stride; /* strides are in bytes */
    int32_t is_bf16, threads;
} Call;

INLINE char *output_of(const Call *c, int64_t t, int64_t h, int64_t o, int is_bf16) {
    return c->output + ((t * c->heads + h) * c->outputs + o) * (is_bf16 ? 2 : 4);
}

/* output[t, h, o] = sum over i of states[t, h, i] * weights[h, o, i], for `tokens` tokens and OUTPUTS outputs. */
INLINE void multiply(const Call *c, int64_t t, int64_t h, int64_t first, int tokens, int is_bf16) {
    const char *states[TILE];
    for (int i = 0; i < tokens; i++)
        states[i] = c->states + (t + i) * c->state_token_stride + h * c->state_head_stride;
    const int columns = tile_outputs(tokens);
    const int64_t last = smaller(first + OUTPUTS, c->outputs);
    for (int64_t o = first; o < last; o += columns) {
        const char *weights = c->weights + h * c->weight_head_stride + o * c->weight_row_stride;
        const Floats sums =
            multiply_tile(states, weights, c->weight_row_stride, last - o, c->inputs, tokens, is_bf16);
        for (int i = 0; i < tokens; i++)
            store_floats(output_of(c, t + i, h, o, is_bf16), sums, i * columns, columns, last - o, is_bf16);
    }
}

/* One number in every lane. */
INLINE Floats repeat(const char *at, int is_bf16) {
    uint16_t half;
    float x;
    memcpy(&half, at, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    memcpy(&x, is_bf16 ? (const char *)&bits : at, sizeof x);
    return (Floats){0} + x;
}

/* output[t, h, o] = sum over i of states[t, h, i] * weights[h, i, o]: the lanes are outputs, i is in order. */
INLINE void combine(const Call *c, int64_t t, int64_t h, int64_t first, int tokens, int full, int is_bf16) {
    Floats sums[TILE][VECTORS] = {0};
    int64_t counts[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const int64_t left = c->outputs - first - v * LANES;
        counts[v] = full || left > LANES ? LANES : left < 0 ? 0 : left;
    }
    const int64_t bytes = is_bf16 ? 2 : 4;
    for (int64_t i = 0; i < c->inputs; i++) {
        const char *row = c->weights + h * c->weight_head_stride + i * c->weight_row_stride + first * bytes;
        Floats states[TILE];
#pragma GCC unroll 4
        for (int n = 0; n < tokens; n++) {
            const char *at = c->states + (t + n) * c->state_token_stride + h * c->state_head_stride + i * bytes;
            states[n] = repeat(at, is_bf16);
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            if (!counts[v]) continue;
            const Floats weight = load_floats(row + v * LANES * bytes, full ? LANES : counts[v], is_bf16);
#pragma GCC unroll 4
            for (int n = 0; n < tokens; n++) sums[n][v] = multiply_add(states[n], weight, sums[n][v]);
        }
    }
    for (int n = 0; n < tokens; n++)
        for (int v = 0; v < VECTORS; v++)
            store_floats(output_of(c, t + n, h, first + v * LANES, is_bf16), sums[n][v], 0, LANES, counts[v],
                         is_bf16);
}

INLINE void linear_piece(const Call *c, int64_t begin, int64_t end, int64_t h, int64_t first, int is_bf16) {
    int64_t t = begin;
    for (; t + 4 <= end; t += 4) multiply(c, t, h, first, 4, is_bf16);
    if (end - t == 3) multiply(c, t, h, first, 3, is_bf16);
    if (end - t == 2) multiply(c, t, h, first, 2, is_bf16);
    if (end - t == 1) multiply(c, t, h, first, 1, is_bf16);
}

INLINE void combine_piece(const Call *c, int64_t begin, int64_t end, int64_t h, int64_t first, int is_bf16) {
    const int full = first + VECTORS * LANES <= c->outputs;
    int64_t t = begin;
    for (; t + 4 <= end; t += 4)
        if (full) combine(c, t, h, first, 4, 1, is_bf16);
        else combine(c, t, h, first, 4, 0, is_bf16);
    for (; t < end; t++)
        if (full) combine(c, t, h, first, 1, 1, is_bf16);
        else combine(c, t, h, first, 1, 0, is_bf16);
}

/* One block of outputs of one head, for up to TOKENS tokens. */
INLINE void piece(const Call *c, int64_t number, int64_t blocks, int combines, int is_bf16) {
    const int64_t begin = number / blocks / c->heads * TOKENS, end = smaller(begin + TOKENS, c->tokens);
    const int64_t h = number / blocks % c->heads, block = number % blocks;
    if (combines) combine_piece(c, begin, end, h, block * VECTORS * LANES, is_bf16);
    else linear_piece(c, begin, end, h, block * OUTPUTS, is_bf16);
}

/* Not inlined into the parallel loop, where compilers lose track of so many vectors. */
__attribute__((noinline)) static void run_piece(const Call *c, int64_t number, int64_t blocks, int combines) {
    if (combines && c->is_bf16) piece(c, number, blocks, 1, 1);
    else if (combines) piece(c, number, blocks, 1, 0);
    else if (c->is_bf16) piece(c, number, blocks, 0, 1);
    else piece(c, number, blocks, 0, 0);
}

static void run(const Call *c, int64_t width, int combines) {
    const int64_t blocks = (c->outputs + width - 1) / width, spans = (c->tokens + TOKENS - 1) / TOKENS;
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1) schedule(static)
    for (int64_t number = 0; number < spans * c->heads * blocks; number++) run_piece(c, number, blocks, combines);
}

/* weights [H, out, in] */
void head_linear(const Call *c) { run(c, OUTPUTS, 0); }

/* weights [H, in, out] */
void head_combine(const Call *c) { run(c, VECTORS * LANES, 1); }

INLINE void norm(const char *states, const char *weights, char *output, int64_t width, float eps, int is_bf16) {
    const int64_t bytes = is_bf16 ? 2 : 4;
    Floats sums[LANES] = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats x = load_floats(states + i * bytes, smaller(LANES, width - i), is_bf16);
        sums[0] = multiply_add(x, x, sums[0]);
    }
    const float scale = 1 / __builtin_sqrtf(fold_all(sums)[0] / width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t count = smaller(LANES, width - i);
        char *to = output + i * bytes;
        store_floats(to, load_floats(states + i * bytes, count, is_bf16) * scale, 0, LANES, count, is_bf16);
        const Floats rounded = load_floats(to, count, is_bf16);
        store_floats(to, rounded * load_floats(weights + i * bytes, count, is_bf16), 0, LANES, count, is_bf16);
    }
}

/* output[t] = states[t] / rms(states[t]) * weights, the norm rounded to the dtype before it is weighed. */
void rms_norm(const char *states, const char *weights, char *output, int64_t tokens, int64_t width,
              int64_t stride, float eps, int32_t is_bf16, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        if (is_bf16) norm(states + t * stride, weights, output + t * width * 2, width, eps, 1);
        else norm(states + t * stride, weights, output + t * width * 4, width, eps, 0);
    }
}
