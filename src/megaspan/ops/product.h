/* Sums of products whose order is fixed: an output has the same bits whatever tile, token or thread makes it.

   The lanes of a vector are inputs. Each output has sixteen partial sums, one a lane, that are folded at the
   end: lanes 8 apart, then 4, 2 and 1. So one token alone and one among many meet the same additions, on any
   processor with the same instructions. Include this before anything else: the compiler must not reorder. */

#ifdef __clang__
#pragma clang fp contract(off) reassociate(off)
#else
#pragma GCC optimize("no-associative-math", "fp-contract=off")
#endif

enum { LANES = 16, TILE = 4 }; /* partial sums of an output; tokens that share a read of the weights */

#include "vectors.h"

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

/* With AVX512-BF16 a vector of 32-bit words holds 32 bf16, and a lane adds two products at a time. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
enum { PAIRED = 1 };
#else
enum { PAIRED = 0 };
#endif

INLINE Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    __m256 parts[3][2];
    memcpy(parts[0], &a, sizeof a), memcpy(parts[1], &b, sizeof b), memcpy(parts[2], &sum, sizeof sum);
    for (int i = 0; i < 2; i++) parts[2][i] = _mm256_fmadd_ps(parts[0][i], parts[1][i], parts[2][i]);
    memcpy(&sum, parts[2], sizeof sum);
    return sum;
#else
    return a * b + sum;
#endif
}

/* ---- numbers from memory and back; `count` of them, the other lanes are zero ---- */

INLINE Words load_words(const void *from, int64_t bytes) {
    Words words = {0};
    if (bytes >= 64) memcpy(&words, from, 64);
#if defined(__AVX512BW__)
    else words = (Words)_mm512_maskz_loadu_epi8(((__mmask64)1 << bytes) - 1, from);
#else
    else memcpy(&words, from, bytes);
#endif
    return words;
}

INLINE Floats load_floats(const void *from, int64_t count, int is_bf16) {
    if (!is_bf16) return (Floats)load_words(from, 4 * count);
    Halves halves = {0};
    if (count >= LANES) memcpy(&halves, from, sizeof halves);
    else memcpy(&halves, from, 2 * count);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

/* `columns` lanes from `first`, or the `left` ones that there is room for, rounded to the dtype. */
INLINE void store_floats(void *to, Floats x, int first, int columns, int64_t left, int is_bf16) {
    const Words bits = (Words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words known = (Words)(x == x);
    const Halves halves = __builtin_convertvector((rounded & known) | (~known & 0x7fc0), Halves);
    const int bytes = is_bf16 ? 2 : 4;
    const char *from = (is_bf16 ? (const char *)&halves : (const char *)&x) + bytes * first;
    if (left >= columns) memcpy(to, from, bytes * columns); /* of constant size: a move, not a call */
    else memcpy(to, from, bytes * left);
}

/* ---- elementwise functions, the same for every lane ---- */

INLINE Floats sigmoid(Floats x) {
    const Floats size = choose(x < 0, -x, x), power = power_of_2(-1.442695041f * size);
    return choose(x < 0, power, (Floats){0} + 1) / (1 + power);
}

INLINE Floats silu(Floats x) { return x * sigmoid(x); }

/* ---- products ---- */

/* One stage of folding: of every 2 * span lanes, the sums of a's halves and then those of b's. */
INLINE Floats fold(Floats a, Floats b, int span) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints low = lane - ((lane & span) != 0) * (LANES - span);
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + span);
}

/* Lane i of the result is the sum of the lanes of sums[i]. */
INLINE Floats fold_all(Floats sums[LANES]) {
#pragma GCC unroll 4
    for (int span = LANES / 2; span; span /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < span; i++) sums[i] = fold(sums[i], sums[i + span], span);
    return sums[0];
}

INLINE Floats multiply_words(Words a, Words b, Floats sum, int is_bf16) {
    (void)is_bf16;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if (is_bf16) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    return multiply_add((Floats)a, (Floats)b, sum);
}

/* Read once into a register: left alone, the compiler reads the same state again for every weight. */
INLINE Words keep(Words x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

/* The numbers that one step takes from a row: 32 where bf16 are paired, else 16. */
INLINE Words load_step(const char *row, int64_t count, int is_bf16) {
    return is_bf16 && !PAIRED ? (Words)load_floats(row, count, 1) : load_words(row, count * (is_bf16 ? 2 : 4));
}

/* Outputs of a tile of `tokens` tokens: as many as fill the sixteen lanes of the result. */
INLINE int tile_outputs(int tokens) { return tokens == 3 ? 4 : LANES / tokens; }

INLINE Floats sums_of_tile(const char *const *states, const char *weights, int64_t stride, int64_t outputs,
                           int64_t inputs, int tokens, int is_bf16) {
    const int columns = tile_outputs(tokens), step = is_bf16 && PAIRED ? 2 * LANES : LANES;
    const int64_t bytes = is_bf16 ? 2 : 4;
    Floats sums[LANES] = {0};
    const char *rows[LANES];
#pragma GCC unroll 16
    for (int o = 0; o < columns; o++) rows[o] = weights + smaller(o, outputs - 1) * stride;
    int64_t i = 0;
    for (; i + step <= inputs; i += step) {
        Words state[TILE];
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) state[t] = keep(load_step(states[t] + i * bytes, step, is_bf16));
#pragma GCC unroll 16
        for (int o = 0; o < columns; o++) {
            Words weight = load_step(rows[o] + i * bytes, step, is_bf16);
            if (tokens > 1) weight = keep(weight);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++)
                sums[t * columns + o] = multiply_words(state[t], weight, sums[t * columns + o], is_bf16);
        }
    }
    if (i < inputs)
#pragma GCC unroll 16
        for (int o = 0; o < columns; o++) {
            const Words weight = load_step(rows[o] + i * bytes, inputs - i, is_bf16);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                const Words state = load_step(states[t] + i * bytes, inputs - i, is_bf16);
                sums[t * columns + o] = multiply_words(state, weight, sums[t * columns + o], is_bf16);
            }
        }
    return fold_all(sums);
}

/* A function for each kind of tile, not inlined: only then do all sums stay in registers. */
#define TILE_FUNCTION(name, tokens, is_bf16)                                                             \
    __attribute__((noinline, unused)) static Floats name(const char *const *states, const char *weights, \
                                                         int64_t stride, int64_t outputs, int64_t inputs) { \
        return sums_of_tile(states, weights, stride, outputs, inputs, tokens, is_bf16);                  \
    }
TILE_FUNCTION(tile_1, 1, 0)
TILE_FUNCTION(tile_2, 2, 0)
TILE_FUNCTION(tile_3, 3, 0)
TILE_FUNCTION(tile_4, 4, 0)
TILE_FUNCTION(tile_1_bf16, 1, 1)
TILE_FUNCTION(tile_2_bf16, 2, 1)
TILE_FUNCTION(tile_3_bf16, 3, 1)
TILE_FUNCTION(tile_4_bf16, 4, 1)
#undef TILE_FUNCTION

/* Lane t * tile_outputs(tokens) + o: token t times weight row o. Rows beyond the `outputs` that exist repeat
   the last one. States and weights are rows of `inputs` numbers; weight rows are `stride` bytes apart. */
INLINE Floats multiply_tile(const char *const *states, const char *weights, int64_t stride, int64_t outputs,
                            int64_t inputs, int tokens, int is_bf16) {
#define CALL(name) (is_bf16 ? name##_bf16(states, weights, stride, outputs, inputs) \
                            : name(states, weights, stride, outputs, inputs))
    return tokens == 1 ? CALL(tile_1) : tokens == 2 ? CALL(tile_2) : tokens == 3 ? CALL(tile_3) : CALL(tile_4);
#undef CALL
}
