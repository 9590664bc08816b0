/* FP8 rows of the cache, bit by bit those of latent_rows.py and index_rows.py, in one pass over each row. */

/* The rotation adds in a fixed order, as the PyTorch version does. */
#ifdef __clang__
#pragma clang fp contract(off) reassociate(off)
#else
#pragma GCC optimize("no-associative-math", "fp-contract=off")
#endif

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 128, LEAST_EXPONENT = -126 };
#define E4M3_MAX 448.0f
#define LARGEST 0x1p127f

typedef struct {
    const char *rows;         /* [count, width], contiguous */
    uint8_t *packed;          /* [count, bytes of a row]; of index rows the pages */
    const int64_t *places;    /* [count], where index rows go */
    const float *weights;     /* [count], of queries */
    float *folded;            /* [count], weights times scales */
    int64_t count, width;
    int64_t latent_rank;      /* of latent rows */
    int64_t page_size, storage_rows; /* of the storage of index rows */
    int32_t is_bf16, rotates; /* the dtype of the rows; whether index rows and queries are rotated */
    int32_t threads;
} Call;

typedef union {
    float value;
    uint32_t bits;
} Number;

static void load(const Call *call, int64_t row, int64_t first, int64_t count, float *to) {
    const int64_t start = row * call->width + first;
    if (!call->is_bf16) {
        memcpy(to, (const float *)call->rows + start, count * sizeof *to);
        return;
    }
    const uint16_t *halves = (const uint16_t *)call->rows + start;
    for (int64_t i = 0; i < count; i++) to[i] = (Number){.bits = (uint32_t)halves[i] << 16}.value;
}

static inline uint16_t round_to_bf16(float value) {
    const uint32_t bits = (Number){value}.bits, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value == value ? rounded : bits >> 16 | 0x40;
}

/* The nearest e4m3 of a number within 448, ties to even. */
static inline uint8_t round_to_e4m3(float value) {
    const uint32_t bits = (Number){value}.bits, size = bits & 0x7fffffff;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t tiny = (Number){(Number){.bits = size}.value + 0x1p14f}.bits - (Number){0x1p14f}.bits;
    const uint32_t rounded = size < 121u << 23 ? tiny : normal; /* below 2^-6 steps are 2^-9, as those at 2^14 */
    return (size > 0x7f800000 ? 0x7f : rounded) | (bits >> 24 & 0x80);
}

static inline float clamped(float value) { /* NaN stays NaN */
    return value > E4M3_MAX ? E4M3_MAX : value < -E4M3_MAX ? -E4M3_MAX : value;
}

/* The largest magnitude that is not NaN. */
static float largest_of(const float *values, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
    return largest;
}

/* ---- latent rows ---- */

static void encode_latent(const Call *call, int64_t row) {
    const int64_t rank = call->latent_rank, groups = (rank + GROUP - 1) / GROUP, rope = call->width - rank;
    uint8_t *packed = call->packed + row * (rank + 4 * groups + 2 * rope), *scales = packed + rank;
    float values[GROUP];
    for (int64_t first = 0; first < rank; first += GROUP) {
        const int64_t count = rank - first < GROUP ? rank - first : GROUP;
        load(call, row, first, count, values);
        float largest = largest_of(values, count), scale = 1;
        if (largest > LARGEST) largest = LARGEST;
        if (largest > 0) scale = fmaxf(largest / E4M3_MAX, FLT_MIN);
        for (int64_t i = 0; i < count; i++) packed[first + i] = round_to_e4m3(clamped(values[i] / scale));
        memcpy(scales + first / GROUP * 4, &scale, sizeof scale);
    }
    for (int64_t first = 0; first < rope; first += GROUP) {
        const int64_t count = rope - first < GROUP ? rope - first : GROUP;
        uint16_t halves[GROUP];
        load(call, row, rank + first, count, values);
        for (int64_t i = 0; i < count; i++) halves[i] = round_to_bf16(values[i]);
        memcpy(scales + 4 * groups + 2 * first, halves, 2 * count);
    }
}

int encode_latent_rows(const Call *call) {
#pragma omp parallel for num_threads(call->threads) if (call->threads > 1)
    for (int64_t row = 0; row < call->count; row++) encode_latent(call, row);
    return 0;
}

/* ---- index rows and queries ---- */

static void rotate(float *values, int64_t width) {
    const float unit = pow(width, -0.5);
    for (int64_t i = 0; i < width; i++) values[i] *= unit;
    for (int64_t half = 1; half < width; half *= 2)
        for (int64_t block = 0; block < width; block += 2 * half)
            for (int64_t i = block; i < block + half; i++) {
                const float left = values[i], right = values[i + half];
                values[i] = left + right, values[i + half] = left - right;
            }
}

/* The least 2^k with largest <= 448 * 2^k, where 448 is 0.875 * 2^9; 1 for 0. */
static float power_of_two_scale(float largest) {
    if (largest == 0) return 1;
    int exponent;
    const float mantissa = frexpf(largest > FLT_MAX ? LARGEST : largest, &exponent);
    exponent -= mantissa <= 0.875f ? 9 : 8;
    return ldexpf(1, exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent);
}

/* Leave in `values` what a row is in e4m3 before rounding; return its scale. */
static float scaled(const Call *call, int64_t row, float *values) {
    load(call, row, 0, call->width, values);
    if (call->rotates) rotate(values, call->width);
    const float scale = power_of_two_scale(largest_of(values, call->width));
    for (int64_t i = 0; i < call->width; i++) values[i] = clamped(values[i] / scale);
    return scale;
}

/* Returns 1 if there was no memory. */
static int for_each_row(const Call *call, void (*finish)(const Call *, int64_t, float *)) {
    int failed = 0;
#pragma omp parallel num_threads(call->threads) reduction(| : failed) if (call->threads > 1)
    {
        float *values = malloc(call->width * sizeof *values);
        failed = !values;
#pragma omp for
        for (int64_t row = 0; row < call->count; row++)
            if (values) finish(call, row, values);
        free(values);
    }
    return failed;
}

/* In each page the values of all its rows, then their scales. */
static void finish_key(const Call *call, int64_t row, float *values) {
    const int64_t page = call->places[row] / call->page_size, slot = call->places[row] % call->page_size;
    uint8_t *start = call->packed + page * call->page_size * (call->width + 4), *packed = start + slot * call->width;
    const float scale = scaled(call, row, values);
    for (int64_t i = 0; i < call->width; i++) packed[i] = round_to_e4m3(values[i]);
    memcpy(start + call->page_size * call->width + slot * sizeof scale, &scale, sizeof scale);
}

/* A query's e4m3 values are kept in bf16, which has them exactly. */
static void finish_query(const Call *call, int64_t row, float *values) {
    uint16_t *halves = (uint16_t *)call->packed + row * call->width;
    call->folded[row] = call->weights[row] * scaled(call, row, values);
    for (int64_t i = 0; i < call->width; i++) {
        const float size = fabsf(values[i]), step = 0x1p14f; /* as in round_to_e4m3 */
        Number rounded = {size}, sign = {values[i]};
        rounded.bits = (rounded.bits + 0x7ffff + (rounded.bits >> 20 & 1)) & 0xfff00000;
        if (size < 0x1p-6f) rounded.value = (size + step) - step;
        halves[i] = size == size ? (rounded.bits | (sign.bits & 0x80000000)) >> 16 : 0x7fc0;
    }
}

/* Returns 2 if a place is outside the storage. */
int store_index_rows(const Call *call) {
    for (int64_t row = 0; row < call->count; row++)
        if (call->places[row] < 0 || call->places[row] >= call->storage_rows) return 2;
    return for_each_row(call, finish_key);
}

int quantize_index_queries(const Call *call) { return for_each_row(call, finish_query); }
