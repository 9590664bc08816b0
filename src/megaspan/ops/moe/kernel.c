/* Routed SwiGLU experts for a few tokens: every weight that is needed is read once per token, which is all
   the time there is. Each number is one dot product in a fixed order, so a token's result depends neither on
   the other tokens nor on the number of threads. The loops are written for the compiler to vectorise. */

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 16 }; /* rows of the inner width that are one piece of work */

/* gate and up: [E, I, D] with `expert_stride` numbers from one expert to the next; down: [E, D, I]. */
typedef struct {
    const void *hidden, *gate, *up, *down;
    const int64_t *expert_ids;
    const float *expert_weights;
    void *output;
    int64_t tokens, slots, experts, width, inner, expert_stride;
    int32_t is_bf16, threads;
} Call;

INLINE float widen(uint16_t bf16) {
    const uint32_t bits = (uint32_t)bf16 << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint16_t round_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

/* 2^x for x <= 0, to 1e-7 relative: the polynomial interpolates 2^r at the Chebyshev nodes of [-1/2, 1/2]. */
INLINE float power_of_2(float x) {
    x = x < -126 ? -126 : x;
    const int32_t whole = (int32_t)(x - 0.5f); /* to nearest, as x is not positive */
    const float r = x - (float)whole;
    const int32_t bits = (whole + 127) << 23;
    float scale, y = r * 1.546144468e-4f + 1.340042818e-3f;
    memcpy(&scale, &bits, sizeof scale);
    y = y * r + 9.618056679e-3f;
    y = y * r + 5.550327227e-2f;
    y = y * r + 2.402265092e-1f;
    y = y * r + 6.931472067e-1f;
    return (y * r + 1) * scale;
}

INLINE float silu(float x) {
    const float size = x < 0 ? -x : x, power = power_of_2(-1.442695041f * size);
    return x * (x < 0 ? power : 1) / (1 + power);
}

/* Row `row` of a matrix of `length` columns, times x. */
INLINE float dot(const void *matrix, int64_t row, const float *x, int64_t length, int is_bf16) {
    float sum = 0;
    const uint16_t *halves = (const uint16_t *)matrix + row * length;
    const float *floats = (const float *)matrix + row * length;
    for (int64_t i = 0; i < length; i++) sum += (is_bf16 ? widen(halves[i]) : floats[i]) * x[i];
    return sum;
}

/* The address `numbers` numbers of 2 or 4 bytes further on. */
INLINE const void *skip(const void *start, int64_t numbers, int is_bf16) {
    return (const char *)start + numbers * (is_bf16 ? 2 : 4);
}

/* silu(gate) * up for rows first..last-1 of the expert of one pair of token and slot. */
INLINE void activate(const Call *call, int64_t pair, int64_t first, int64_t last, const float *hidden,
                     float *active, int is_bf16) {
    const int64_t expert = call->expert_ids[pair] * call->expert_stride;
    const float *x = hidden + pair / call->slots * call->width;
    float up[BLOCK];
    for (int64_t row = first; row < last; row++) {
        active[row] = dot(skip(call->gate, expert, is_bf16), row, x, call->width, is_bf16);
        up[row - first] = dot(skip(call->up, expert, is_bf16), row, x, call->width, is_bf16);
    }
    for (int64_t row = first; row < last; row++) active[row] = silu(active[row]) * up[row - first];
}

INLINE void experts(const Call *call, float *hidden, float *active, int is_bf16) {
    const int64_t width = call->width, inner = call->inner, pairs = call->tokens * call->slots;
    const int64_t blocks = (inner + BLOCK - 1) / BLOCK;
    for (int64_t i = 0; i < call->tokens * width; i++)
        hidden[i] = is_bf16 ? widen(((const uint16_t *)call->hidden)[i]) : ((const float *)call->hidden)[i];
#pragma omp parallel num_threads(call->threads)
    {
#pragma omp for
        for (int64_t task = 0; task < pairs * blocks; task++) {
            const int64_t pair = task / blocks, first = task % blocks * BLOCK;
            const int64_t last = first + BLOCK < inner ? first + BLOCK : inner;
            activate(call, pair, first, last, hidden, active + pair * inner, is_bf16);
        }
#pragma omp for
        for (int64_t i = 0; i < call->tokens * width; i++) {
            float sum = 0;
            for (int64_t pair = i / width * call->slots; pair < (i / width + 1) * call->slots; pair++) {
                const int64_t row = call->expert_ids[pair] * width + i % width;
                const float *x = active + pair * inner;
                sum += call->expert_weights[pair] * dot(call->down, row, x, inner, is_bf16);
            }
            if (is_bf16)
                ((uint16_t *)call->output)[i] = round_to_bf16(sum);
            else
                ((float *)call->output)[i] = sum;
        }
    }
}

/* Returns 0, 1 if there was no memory, 2 if an expert does not exist. */
int moe(const Call *call) {
    const int64_t pairs = call->tokens * call->slots;
    for (int64_t pair = 0; pair < pairs; pair++)
        if ((uint64_t)call->expert_ids[pair] >= (uint64_t)call->experts) return 2;
    float *memory = malloc((call->tokens * call->width + pairs * call->inner) * sizeof(float));
    if (!memory) return 1;
    float *active = memory + call->tokens * call->width;
    if (call->is_bf16)
        experts(call, memory, active, 1);
    else
        experts(call, memory, active, 0);
    free(memory);
    return 0;
}
