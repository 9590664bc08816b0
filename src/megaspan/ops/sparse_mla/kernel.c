/* Sparse latent attention: every token reads its own few rows of the cache, straight from where they lie.

   A token's rows are cut into parts, a part into blocks that fit in the nearest cache. A block is copied,
   scored against up to HEADS heads, and added to the part's running softmax; at the end the parts are
   merged. FP8 rows become fp32 as they are copied. The cuts depend on nothing but the token's own count of
   rows, so its result depends neither on the other tokens of the call nor on the number of threads. */

#if defined(__AVX512F__)
#define LANES 16
#define LOW {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}
#define HIGH {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}
#elif defined(__AVX__)
#define LANES 8
#define LOW {0, 8, 1, 9, 2, 10, 3, 11}
#define HIGH {4, 12, 5, 13, 6, 14, 7, 15}
#else
#define LANES 4
#define LOW {0, 4, 1, 5}
#define HIGH {2, 6, 3, 7}
#endif

#include "../vectors.h"

#include <omp.h>
#include <stdlib.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#define DOTS_OF_BF16 1
#else
#define DOTS_OF_BF16 0
#endif

#define UNROLL _Pragma("GCC unroll 16")

enum { HEADS = 8, TILE = 4, BLOCK = 32, PARTS = 4, LINE = 64, SCALED = 128 /* values of FP8 with one scale */ };
#define LEAST -1e30f /* below any score */

typedef struct {
    const char *query, *rows;
    const int64_t *selected;
    char *output;
    int64_t tokens, heads, width, row_count, slots, value_width;
    int64_t row_bytes;
    float scale;
    int32_t is_bf16, is_fp8, threads; /* the dtype of query and output; whether rows are FP8 instead */
} Call;

/* Sizes in vectors: what a row or a query takes in dots, the distance of two rows, the values of one head. */
typedef struct {
    long dots, stride, values;
} Shape;

/* The running softmax of one part: powers of 2 relative to `maximum`, their sum, and the weighted values. */
typedef struct {
    float maximum[16]; /* of HEADS heads; the rest aligns what follows */
    Floats sum[HEADS], values[];
} Part;

INLINE Floats larger(Floats a, Floats b) { return choose(a < b, b, a); } /* NaN where a is NaN */

/* Add the halves of v[i] and v[i + count] to one another, in turns of lanes, for each i. */
INLINE void fold(Floats *v, int count) {
    UNROLL for (int i = 0; i < count; i++)
        v[i] = __builtin_shuffle(v[i], v[i + count], (Ints)LOW)
             + __builtin_shuffle(v[i], v[i + count], (Ints)HIGH);
}

/* Lane i of the result is the sum of the lanes of v[i]; v is used up. */
INLINE Floats sum_each(Floats *v) {
    if (LANES >= 16) fold(v, 8);
    if (LANES >= 8) fold(v, 4);
    fold(v, 2);
    fold(v, 1);
    return v[0];
}

/* Hold a vector in a register: tuned for some processors, GCC would load it again for every use. */
INLINE Floats hold(Floats x) {
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

/* Add a * b, where a vector holds LANES floats or, for bf16, 2 * LANES of them in pairs. */
INLINE Floats multiply_add(Floats sum, Floats a, Floats b, int bf16) {
    (void)bf16;
#if DOTS_OF_BF16
    if (bf16) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    return sum + a * b;
}

/* The first or second halves of two rows of bf16, as pairs of one column. */
INLINE Floats interleave(Floats a, Floats b, int second) {
#if DOTS_OF_BF16
    typedef int16_t shorts __attribute__((vector_size(64)));
    const shorts first = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                          8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return (Floats)__builtin_shuffle((shorts)a, (shorts)b, first + (int16_t)(second ? 16 : 0));
#else
    return second ? b : a;
#endif
}

INLINE Ints round_to_bf16(Floats x) {
    Ints bits = (Ints)x;
    return (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000;
}

/* The scores of TILE rows for TILE heads, whose own scores are BLOCK apart. */
INLINE void score_tile(const Floats *query, const Floats *rows, Shape shape, float scale, float *scores,
                       int bf16) {
    Floats sums[TILE * TILE] = {};
    for (long c = 0; c < shape.dots; c++) {
        Floats row[TILE];
        UNROLL for (int r = 0; r < TILE; r++) row[r] = hold(rows[r * shape.stride + c]);
        UNROLL for (int h = 0; h < TILE; h++) {
            const Floats part = hold(query[h * shape.dots + c]);
            UNROLL for (int r = 0; r < TILE; r++)
                sums[h * TILE + r] = multiply_add(sums[h * TILE + r], part, row[r], bf16);
        }
    }
    UNROLL for (int i = 0; i < TILE * TILE; i += LANES) {
        Floats total = sum_each(sums + i) * scale;
        UNROLL for (int j = 0; j < LANES; j += TILE)
            memcpy(scores + (i + j) / TILE * BLOCK, (float *)&total + j, TILE * sizeof(float));
    }
}

/* Add weighted rows to a few vectors of the values of some heads. Weights of bf16 rows come in pairs. */
INLINE void value_tile(const Floats *rows, Shape shape, const float *weights, const float *correction,
                       Floats *values, int count, int heads, int columns, int bf16) {
    Floats sums[16];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < columns; c++)
            sums[h * columns + c] = values[h * shape.values + c] * correction[h];
    for (int r = 0; r < count; r += 1 + bf16) {
        const Floats *row = rows + r * shape.stride;
        Floats value[4];
        UNROLL for (int c = 0; c < columns; c++)
            value[c] = hold(bf16 ? interleave(row[c / 2], row[c / 2 + shape.stride], c % 2) : row[c]);
        UNROLL for (int h = 0; h < heads; h++) {
            Floats weight = (Floats){} + weights[(h * BLOCK + r) >> bf16];
            UNROLL for (int c = 0; c < columns; c++)
                sums[h * columns + c] = multiply_add(sums[h * columns + c], value[c], weight, bf16);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < columns; c++)
            values[h * shape.values + c] = sums[h * columns + c];
}

INLINE void add_values(const Floats *rows, Shape shape, const float *weights, const float *correction,
                       Floats *values, int count, int heads, int bf16) {
    for (int h = 0; h < heads; h += TILE) {
        const float *tile_weights = weights + (h * BLOCK >> bf16);
        long c = 0;
        for (; c + 4 <= shape.values; c += 4)
            value_tile(rows + (c >> bf16), shape, tile_weights, correction + h, values + h * shape.values + c,
                       count, TILE, 4, bf16);
        if (c < shape.values)
            value_tile(rows + (c >> bf16), shape, tile_weights, correction + h, values + h * shape.values + c,
                       count, TILE, 2, bf16);
    }
}

/* Turn scores into weights relative to the new maximum, and find what earlier sums must be multiplied by. */
INLINE void soften(float *scores, Part *part, float *correction, int count, int heads, int bf16) {
    for (int h = 0; h < heads; h++) {
        Floats *row = (Floats *)(scores + h * BLOCK), largest = (Floats){} + part->maximum[h], total = {};
        for (int r = count; r < BLOCK; r++) scores[h * BLOCK + r] = LEAST;
        UNROLL for (int i = 0; i < BLOCK / LANES; i++) largest = larger(row[i], largest);
        UNROLL for (int width = LANES; width > 1; width /= 2)
            largest = larger(__builtin_shuffle(largest, largest, (Ints)LOW),
                             __builtin_shuffle(largest, largest, (Ints)HIGH));
        correction[h] = power_of_2((Floats){} + part->maximum[h] - largest)[0];
        part->maximum[h] = largest[0];
        UNROLL for (int i = 0; i < BLOCK / LANES; i++) {
            Floats weight = power_of_2(row[i] - largest);
            if (bf16) {
                weight = (Floats)round_to_bf16(weight);
                Halves packed = __builtin_convertvector((Ints)weight >> 16, Halves);
                memcpy((uint16_t *)scores + h * BLOCK + i * LANES, &packed, sizeof packed);
            } else {
                row[i] = weight;
            }
            total += weight;
        }
        part->sum[h] = part->sum[h] * correction[h] + total;
    }
}

/* As memcpy, whose calls, or string instructions, take long to start for so few bytes. */
INLINE void copy(char *to, const char *from, long bytes) {
    const long step = sizeof(Floats);
    if (bytes < step) {
        memcpy(to, from, bytes);
        return;
    }
    for (long i = 0; i + step <= bytes; i += step) memcpy(to + i, from + i, step);
    memcpy(to + bytes - step, from + bytes - step, step);
}

/* Bring `width` numbers to scratch memory: as they are, or as floats where bf16 has no dot product. */
INLINE void fetch(Floats *to, const char *from, long width, int is_bf16, int bf16) {
    if (is_bf16 && !bf16)
        for (long i = 0; i < width; i++) ((uint32_t *)to)[i] = (uint32_t)((const uint16_t *)from)[i] << 16;
    else
        copy((char *)to, from, width * (is_bf16 ? 2 : 4));
}

/* Bring an FP8 row to scratch memory: `rank` e4m3 values, their scales, and `rope` numbers in bf16. */
INLINE void fetch_fp8(float *to, const char *from, long rank, long rope) {
    const char *scales = from + rank, *rotary = scales + (rank + SCALED - 1) / SCALED * 4;
    for (long first = 0; first < rank; first += SCALED, scales += 4) {
        float scale;
        memcpy(&scale, scales, sizeof scale);
        const long count = rank - first < SCALED ? rank - first : SCALED;
        uint32_t bytes[SCALED] __attribute__((aligned(64)));
        for (long i = 0; i < count; i++) bytes[i] = (uint8_t)from[first + i];
        for (long i = 0; i < count; i += LANES) {
            const Floats values = widen_e4m3(*(const Words *)(bytes + i)) * scale;
            if (count - i >= LANES) memcpy(to + first + i, &values, sizeof values);
            else memcpy(to + first + i, &values, (count - i) * sizeof *to);
        }
    }
    for (long i = 0; i < rope; i++) {
        uint16_t half;
        memcpy(&half, rotary + 2 * i, sizeof half);
        ((uint32_t *)to)[rank + i] = (uint32_t)half << 16;
    }
}

/* A token's slots first..last-1. */
typedef struct {
    long first, last;
} Span;

static Span slots_of_part(const Call *call, long token, long part) {
    long slots = call->slots;
    while (slots && call->selected[token * call->slots + slots - 1] < 0) slots--;
    const long size = ((slots + PARTS - 1) / PARTS + BLOCK - 1) / BLOCK * BLOCK;
    return (Span){part * size, (part + 1) * size < slots ? (part + 1) * size : slots};
}

/* Attend from up to HEADS heads of a token to the rows of one part. Returns 1 if a row number is wrong. */
INLINE int attend(const Call *call, Shape shape, long token, long head, Span span, Part *part, Floats *scratch,
                  int bf16) {
    const long query_bytes = call->width * (call->is_bf16 ? 2 : 4), row_bytes = call->row_bytes;
    const int64_t *selected = call->selected + token * call->slots;
    const int used = call->heads - head < HEADS ? call->heads - head : HEADS;
    const int heads = (used + TILE - 1) / TILE * TILE;
    Floats *query = scratch, *rows = scratch + HEADS * shape.dots;
    float scores[HEADS * BLOCK] __attribute__((aligned(64))), correction[HEADS];
    int wrong = 0;

    for (int h = 0; h < used; h++)
        fetch(query + h * shape.dots, call->query + (token * call->heads + head + h) * query_bytes, call->width,
              call->is_bf16, bf16);
    for (int h = used; h < heads; h++) memset(query + h * shape.dots, 0, shape.dots * sizeof(Floats));
    for (int h = 0; h < HEADS; h++) part->maximum[h] = LEAST, part->sum[h] = (Floats){};
    memset(part->values, 0, HEADS * shape.values * sizeof(Floats));

    for (long start = span.first; start < span.last; start += BLOCK) {
        const int count = span.last - start < BLOCK ? span.last - start : BLOCK;
        const int padded = (count + TILE - 1) / TILE * TILE;
        for (int r = 0; r < padded; r++) {
            const uint64_t number = r < count ? (uint64_t)selected[start + r] : 0;
            Floats *row = rows + r * shape.stride;
            if (r < count && number < (uint64_t)call->row_count && call->is_fp8) {
                fetch_fp8((float *)row, call->rows + number * row_bytes, call->value_width,
                          call->width - call->value_width);
            } else if (r < count && number < (uint64_t)call->row_count) {
                fetch(row, call->rows + number * row_bytes, call->width, call->is_bf16, bf16);
            } else {
                memset(row, 0, shape.stride * sizeof(Floats));
                wrong |= r < count;
            }
        }
        for (int r = 0; r < padded; r += TILE) {
            for (int h = 0; h < heads; h += TILE)
                score_tile(query + h * shape.dots, rows + r * shape.stride, shape, call->scale,
                           scores + h * BLOCK + r, bf16);
            for (long next = start + BLOCK + r; next < start + BLOCK + r + TILE && next < call->slots; next++)
                for (long byte = 0; byte < row_bytes; byte += LINE)
                    __builtin_prefetch(call->rows + selected[next] * row_bytes + byte);
        }
        soften(scores, part, correction, count, heads, bf16);
        add_values(rows, shape, scores, correction, part->values, padded, heads, bf16);
    }
    return wrong;
}

/* Combine the parts of a token's heads and write them, in the dtype of the query; zeros if all are empty. */
static void merge(const Call *call, Shape shape, long token, long head, const Part *const parts[PARTS]) {
    for (long h = 0; h < HEADS && head + h < call->heads; h++) {
        Floats maximum = (Floats){} + LEAST, sums = {}, weights[PARTS];
        float sum = 0;
        for (int p = 0; p < PARTS; p++) maximum = larger((Floats){} + parts[p]->maximum[h], maximum);
        for (int p = 0; p < PARTS; p++) {
            weights[p] = power_of_2(parts[p]->maximum[h] - maximum);
            sums += weights[p] * parts[p]->sum[h];
        }
        for (int i = 0; i < LANES; i++) sum += sums[i];
        if (sum == 0) sum = 1;
        const long offset = (token * call->heads + head + h) * call->value_width;
        for (long c = 0; c * LANES < call->value_width; c++) {
            Floats value = {};
            for (int p = 0; p < PARTS; p++) value += weights[p] * parts[p]->values[h * shape.values + c];
            value /= sum;
            const long left = call->value_width - c * LANES, size = left < LANES ? left : LANES;
            if (call->is_bf16) {
                Halves packed = __builtin_convertvector(round_to_bf16(value) >> 16, Halves);
                memcpy(call->output + (offset + c * LANES) * 2, &packed, size * 2);
            } else {
                memcpy(call->output + (offset + c * LANES) * 4, &value, size * 4);
            }
        }
    }
}

/* Returns 0, 1 if there was no memory, 2 if a row number was outside the cache. */
int sparse_mla(const Call *call) {
    const int bf16 = call->is_bf16 && !call->is_fp8 && DOTS_OF_BF16;
    const long in_vector = LANES << bf16, groups = (call->heads + HEADS - 1) / HEADS;
    Shape shape = {.dots = (call->width + in_vector - 1) / in_vector,
                   .values = (call->value_width + 2 * LANES - 1) / (2 * LANES) * 2};
    shape.stride = shape.dots > shape.values >> bf16 ? shape.dots : shape.values >> bf16;

    /* Of many tokens a thread does all parts; of few it does one, and the parts are merged later. */
    const long items = call->tokens * groups, few = items < 4 * call->threads, pieces = few ? PARTS : 1;
    const long part_bytes = (sizeof(Part) + HEADS * shape.values * sizeof(Floats) + LINE - 1) / LINE * LINE;
    const long scratch_bytes =
        ((HEADS * shape.dots + BLOCK * shape.stride) * sizeof(Floats) + LINE - 1) / LINE * LINE;
    const long all_scratch = call->threads * scratch_bytes;
    char *memory = aligned_alloc(LINE, all_scratch + (few ? items : call->threads) * PARTS * part_bytes);
    if (!memory) return 1;
    memset(memory, 0, all_scratch);
    int wrong = 0;

#pragma omp parallel num_threads(call->threads) reduction(| : wrong)
    {
        const long thread = omp_get_thread_num();
        Floats *scratch = (Floats *)(memory + thread * scratch_bytes);
        Part *parts[PARTS];
#pragma omp for schedule(dynamic)
        for (long task = 0; task < items * pieces; task++) {
            const long item = task / pieces, token = item / groups, head = item % groups * HEADS;
            for (long p = task % pieces; p < PARTS; p += pieces) {
                const Span span = slots_of_part(call, token, p);
                parts[p] = (Part *)(memory + all_scratch + ((few ? item : thread) * PARTS + p) * part_bytes);
                wrong |= bf16 ? attend(call, shape, token, head, span, parts[p], scratch, 1)
                              : attend(call, shape, token, head, span, parts[p], scratch, 0);
            }
            if (!few) merge(call, shape, token, head, (const Part *const *)parts);
        }
#pragma omp for
        for (long item = 0; item < (few ? items : 0); item++) {
            for (long p = 0; p < PARTS; p++)
                parts[p] = (Part *)(memory + all_scratch + (item * PARTS + p) * part_bytes);
            merge(call, shape, item / groups, item % groups * HEADS, (const Part *const *)parts);
        }
    }
    free(memory);
    return wrong ? 2 : 0;
}
