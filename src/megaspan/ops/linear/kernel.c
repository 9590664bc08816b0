/* Matrix-vector products for the few tokens of a decoding step, where reading the weights is all the time
   there is. H independent matrices a call: one for a plain linear layer, one a head for the products that
   absorb latent attention. Each output is summed in a fixed order whatever the other tokens and the threads. */

#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 32, WIDEST = 1024 }; /* outputs that are one piece of work; columns that `combine` sums at once */

typedef struct {
    const void *states, *weights; /* [T, H, in] and [H, rows, columns], the last dimension contiguous */
    void *output;                 /* [T, H, out], contiguous */
    int64_t tokens, heads, inputs, outputs, state_token_stride, state_head_stride;
    int64_t weight_head_stride, weight_row_stride;
    int32_t is_bf16, threads;
} Call;

INLINE float widen(uint16_t bf16) {
    const uint32_t bits = (uint32_t)bf16 << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float load(const void *base, int64_t at, int is_bf16) {
    return is_bf16 ? widen(((const uint16_t *)base)[at]) : ((const float *)base)[at];
}

INLINE void store(void *base, int64_t at, float x, int is_bf16) {
    if (!is_bf16) {
        ((float *)base)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    ((uint16_t *)base)[at] = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

/* output[t, h, o] = sum over i of states[t, h, i] * weights[h, o, i], for BLOCK outputs from `first`. */
INLINE void multiply(const Call *c, int64_t h, int64_t first, int is_bf16) {
    const int64_t last = first + BLOCK < c->outputs ? first + BLOCK : c->outputs;
    for (int64_t o = first; o < last; o++) {
        const int64_t row = h * c->weight_head_stride + o * c->weight_row_stride;
        for (int64_t t = 0; t < c->tokens; t++) {
            const int64_t state = t * c->state_token_stride + h * c->state_head_stride;
            float sum = 0;
            for (int64_t i = 0; i < c->inputs; i++)
                sum += load(c->states, state + i, is_bf16) * load(c->weights, row + i, is_bf16);
            store(c->output, (t * c->heads + h) * c->outputs + o, sum, is_bf16);
        }
    }
}

/* output[t, h, o] = sum over i of states[t, h, i] * weights[h, i, o]. */
INLINE void combine(const Call *c, int64_t h, int is_bf16) {
    float sums[WIDEST];
    for (int64_t t = 0; t < c->tokens; t++) {
        const int64_t state = t * c->state_token_stride + h * c->state_head_stride;
        memset(sums, 0, c->outputs * sizeof(float));
        for (int64_t i = 0; i < c->inputs; i++) {
            const float x = load(c->states, state + i, is_bf16);
            const int64_t row = h * c->weight_head_stride + i * c->weight_row_stride;
            for (int64_t o = 0; o < c->outputs; o++) sums[o] += x * load(c->weights, row + o, is_bf16);
        }
        for (int64_t o = 0; o < c->outputs; o++)
            store(c->output, (t * c->heads + h) * c->outputs + o, sums[o], is_bf16);
    }
}

/* weights [H, out, in] */
void head_linear(const Call *c) {
    const int64_t blocks = (c->outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1) schedule(static)
    for (int64_t piece = 0; piece < c->heads * blocks; piece++) {
        if (c->is_bf16) multiply(c, piece / blocks, piece % blocks * BLOCK, 1);
        else multiply(c, piece / blocks, piece % blocks * BLOCK, 0);
    }
}

/* weights [H, in, out], out <= WIDEST */
void head_combine(const Call *c) {
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1) schedule(static)
    for (int64_t h = 0; h < c->heads; h++) {
        if (c->is_bf16) combine(c, h, 1);
        else combine(c, h, 0);
    }
}

/* output[t] = states[t] / rms(states[t]) * weights, the norm rounded to the dtype before it is weighed. */
void rms_norm(const void *states, const void *weights, void *output, int64_t tokens, int64_t width,
              int64_t token_stride, float eps, int32_t is_bf16) {
    for (int64_t t = 0; t < tokens; t++) {
        float squares = 0;
        for (int64_t i = 0; i < width; i++) {
            const float x = load(states, t * token_stride + i, is_bf16);
            squares += x * x;
        }
        const float scale = 1 / __builtin_sqrtf(squares / width + eps);
        for (int64_t i = 0; i < width; i++) {
            store(output, t * width + i, load(states, t * token_stride + i, is_bf16) * scale, is_bf16);
            const float rounded = load(output, t * width + i, is_bf16);
            store(output, t * width + i, rounded * load(weights, i, is_bf16), is_bf16);
        }
    }
}
