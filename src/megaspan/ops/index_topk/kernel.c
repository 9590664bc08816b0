/* Exact, deterministic top-k of the lightning indexer: score, ReLU, weight, sum and select in one pass.

   The lanes of a vector are keys. Keys are gathered through the page table and transposed, a block at a
   time, into groups of 3 vectors; the tokens of a tile then share the block while it lies in the cache.
   Eight heads by one group stay in registers, so ReLU, weights and the sum over heads need no shuffle.
   A pair's score is the same operations in the same order wherever the pair falls, and the answer
   is unique given the scores: so it depends on no tile, no split and no number of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, HEADS = 8 };
#elif defined(__AVX__)
enum { LANES = 8, HEADS = 4 };
#else
enum { LANES = 4, HEADS = 8 };
#endif
enum { VECTORS = 3, GROUP = VECTORS * LANES, ALIGN = 64 };

/* With AVX512-BF16 a 32-bit word holds two neighbouring bf16; elsewhere bf16 is widened to fp32. */
#ifdef __AVX512BF16__
enum { PAIRED = 1 };
#else
enum { PAIRED = 0 };
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(PAIRED ? 2 * LANES : LANES)));

/* Mirrored by Problem in native.py. */
typedef struct {
    const char *query;           /* [tokens, heads, width], contiguous */
    const float *weights;        /* [tokens, heads] */
    const char *keys;            /* [rows, width], rows key_stride bytes apart */
    const int64_t *starts;       /* [sequences, pages], first row of each page */
    const int64_t *sequence_ids; /* [tokens] */
    const int64_t *visible;      /* [tokens] */
    int32_t *selected;           /* [tokens, topk], the result */
    char *workspace;             /* index_topk_workspace() bytes, aligned to 64 */
    int64_t tokens, heads, width, rows, key_stride, sequences, pages, page_size, topk;
    int64_t is_bf16, is_fp8; /* the dtype of the query; whether the keys are e4m3 values and an fp32 scale instead */
    int64_t tile, groups, splits, chunk, threads; /* tokens a tile, groups a block, splits of `chunk` keys */
} Problem;

/* The best candidates of one token so far, in position order, with room for more before they are thinned out. */
typedef struct {
    float *score;
    int32_t *position;
    int64_t count;
    float threshold; /* topk candidates score at least this much: a later one must beat it */
} Best;

/* Working memory of one thread. */
typedef struct {
    uint32_t *keys;    /* [groups][steps][GROUP] */
    float *scales;     /* [groups * GROUP], of FP8 keys */
    float *scores;     /* [groups * GROUP] */
    uint32_t *queries; /* [tile][head groups][steps][heads of the group] */
    Best *best;        /* [tile] */
    float *candidates; /* [tile][capacity] scores, each followed by its [capacity] positions */
} Scratch;

static int64_t steps_of(const Problem *p) { return p->is_bf16 && PAIRED ? (p->width + 1) / 2 : p->width; }
static int64_t capacity_of(const Problem *p) { return p->topk + (p->topk > 256 ? p->topk : 256) + LANES; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- keys and queries into the kernel's order ---- */

static inline uint32_t load_word(const Problem *p, const char *row, int64_t step) {
    if (!p->is_bf16) return ((const uint32_t *)row)[step];
    const uint16_t *half = (const uint16_t *)row;
    if (!PAIRED) return (uint32_t)half[step] << 16;
    uint32_t high = 2 * step + 1 < p->width ? half[2 * step + 1] : 0;
    return half[2 * step] | high << 16;
}

/* e4m3 to bf16 or fp32, exactly and without subnormal floats, which a process may flush to zero. */
static inline Words widen_e4m3(Bytes bytes) {
#ifdef __AVX512BF16__
    const Halves bits = (Halves)_mm512_cvtepu8_epi16((__m256i)bytes), size = bits & 0x7f;
    const Halves tiny = {0, 118 << 7, 119 << 7, 239 << 6, 120 << 7, 481 << 5, 241 << 6, 483 << 5}; /* m * 2^-9 */
    const Halves is_tiny = size < 8, nan = (size == 0x7f) & 0x7fc0;
    const Halves number = (is_tiny & __builtin_shuffle(tiny, size)) | (~is_tiny & ((size << 4) + (120 << 7)));
    return (Words)(number | nan | (bits & 0x80) << 8);
#else
    const Words bits = __builtin_convertvector(bytes, Words), size = bits & 0x7f, is_tiny = size < 8;
    const Words number = (size << 20) + ((120u << 23) + (is_tiny & (1u << 23)));
    const Floats value = (Floats)number - (Floats)(is_tiny & (121u << 23)); /* 2^-6 (1 + m/8) - 2^-6 */
    return (Words)value | ((size == 0x7f) & 0x7fc00000u) | (bits & 0x80) << 24;
#endif
}

static inline Words load_e4m3(const char *values, int64_t count) {
    Bytes bytes = {0};
    if (count < (int64_t)sizeof bytes) {
        memcpy(&bytes, values, count);
        return widen_e4m3(bytes);
    }
    memcpy(&bytes, values, sizeof bytes);
    return widen_e4m3(bytes);
}

static inline Words load_words(const Problem *p, const char *row, int64_t step, int64_t steps) {
    Words words = {0};
    if (p->is_fp8) {
        const int64_t first = PAIRED ? 2 * step : step;
        return load_e4m3(row + first, p->width - first);
    }
    if ((step + LANES) * (p->is_bf16 && PAIRED ? 2 : 1) > p->width)
        for (int64_t i = step; i < smaller(steps, step + LANES); i++) words[i - step] = load_word(p, row, i);
    else if (p->is_bf16 && !PAIRED)
        for (int i = 0; i < LANES; i++) words[i] = (uint32_t)((const uint16_t *)row)[step + i] << 16;
    else
        memcpy(&words, row + 4 * step, sizeof words);
    return words;
}

static inline __attribute__((always_inline)) void shuffle_pairs(Words rows[LANES], int span, Words low, Words high) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & span)) {
            Words a = rows[i], b = rows[i | span];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i | span] = __builtin_shuffle(a, b, high);
        }
}

/* Words inside each 128 bits by two interleavings, then the 128-bit parts by splitting even from odd. */
static inline __attribute__((always_inline)) void transpose(Words rows[LANES]) {
    Words lane, half = {0};
    for (int i = 0; i < LANES; i++) lane[i] = i, half[i] = i & LANES / 2;
    Words zip = (lane & ~3u) + (lane & 3) / 2 + (lane & 1) * LANES;
    Words part = (lane - half) / 4 * 8 + lane % 4 + half * 2;
    shuffle_pairs(rows, 2, zip, zip + 2);
    shuffle_pairs(rows, 1, zip, zip + 2);
    if (LANES > 4) shuffle_pairs(rows, 4, part, part + 4);
    if (LANES > 8) shuffle_pairs(rows, 8, part, part + 4);
}

/* Gather keys begin .. end - 1 of a sequence into groups; return 0 if the table points outside the rows. */
static int pack_keys(const Problem *p, int64_t sequence, int64_t begin, int64_t end, uint32_t *packed, float *scales) {
    const int64_t steps = steps_of(p), row_bytes = p->key_stride;
    const int64_t *starts = p->starts + sequence * p->pages;
    int64_t page = begin / p->page_size, offset = begin % p->page_size;
    for (int64_t first = begin; first < end; first += LANES) {
        const char *row[LANES];
        for (int i = 0; i < LANES; i++) {
            if (first + i < end) {
                int64_t number = starts[page] + offset;
                if (number < 0 || number >= p->rows) return 0;
                row[i] = p->keys + number * row_bytes;
                for (int64_t line = 0; line < row_bytes; line += 64)
                    __builtin_prefetch(row[i] + GROUP * row_bytes + line); /* read while this group is scored */
                if (++offset == p->page_size) page++, offset = 0;
            } else
                row[i] = row[0]; /* a lane whose score nobody reads */
        }
        int64_t lane = first - begin;
        for (int i = 0; p->is_fp8 && i < LANES; i++) memcpy(scales + lane + i, row[i] + p->width, sizeof *scales);
        uint32_t *target = packed + lane / GROUP * GROUP * steps + lane % GROUP;
        for (int64_t step = 0; step < steps; step += LANES) {
            Words rows[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) rows[i] = load_words(p, row[i], step, steps);
            transpose(rows);
            for (int64_t i = 0; i < smaller(LANES, steps - step); i++)
                memcpy(target + (step + i) * GROUP, &rows[i], sizeof rows[i]);
        }
    }
    return 1;
}

static int64_t heads_at_once(int64_t remaining) { return remaining >= HEADS ? HEADS : remaining >= 4 ? 4 : 1; }

static void pack_query(const Problem *p, int64_t token, uint32_t *packed) {
    const int64_t steps = steps_of(p), size = p->is_bf16 ? 2 : 4;
    for (int64_t head = 0, together; head < p->heads; head += together) {
        together = heads_at_once(p->heads - head);
        for (int64_t h = 0; h < together; h++) {
            const char *row = p->query + ((token * p->heads + head + h) * p->width) * size;
            for (int64_t step = 0; step < steps; step++)
                packed[(head * steps) + step * together + h] = load_word(p, row, step);
        }
    }
}

/* ---- scores ---- */

static inline __attribute__((always_inline)) Floats multiply_add(Floats sum, Words key, uint32_t query, int paired) {
#ifdef __AVX512BF16__
    if (paired)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)key, (__m512bh)_mm512_set1_epi32((int)query));
#endif
    (void)paired;
    float value;
    memcpy(&value, &query, sizeof value);
    return sum + (Floats)key * value;
}

static inline Floats relu(Floats x) { /* NaN stays NaN */
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps(_mm512_setzero_ps(), (__m512)x);
#else
    return (Floats)((Words)x & ~(Words)(x < 0));
#endif
}

/* scores[GROUP] += the sum over `heads` heads of weight * relu(query . key). */
static inline __attribute__((always_inline)) void score_heads(
    const uint32_t *query, const float *weights, const uint32_t *keys, int64_t steps, Floats *scores,
    const int heads, const int paired) {
    Floats sum[HEADS][VECTORS] = {0};
    for (int64_t step = 0; step < steps; step++, query += heads, keys += GROUP) {
        Words key[VECTORS];
        memcpy(key, keys, sizeof key);
#pragma GCC unroll 8
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) sum[h][v] = multiply_add(sum[h][v], key[v], query[h], paired);
    }
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) scores[v] += weights[h] * relu(sum[h][v]);
}

static inline __attribute__((always_inline)) void score_group(
    const Problem *p, const uint32_t *query, const float *weights, const uint32_t *keys, const float *scales, float *out,
    const int paired) {
    const int64_t steps = steps_of(p);
    Floats scores[VECTORS] = {0};
    for (int64_t head = 0, together; head < p->heads; head += together) {
        together = heads_at_once(p->heads - head);
        const uint32_t *some = query + head * steps;
        if (together == HEADS)
            score_heads(some, weights + head, keys, steps, scores, HEADS, paired);
        else if (together == 4)
            score_heads(some, weights + head, keys, steps, scores, 4, paired);
        else
            score_heads(some, weights + head, keys, steps, scores, 1, paired);
    }
    if (p->is_fp8) {
        Floats scale[VECTORS];
        memcpy(scale, scales, sizeof scale);
        for (int v = 0; v < VECTORS; v++) scores[v] *= scale[v];
    }
    for (int v = 0; v < VECTORS; v++) {
        Words sound = (Words)(scores[v] == scores[v]), lowest = (Words)((Floats){0} - INFINITY);
        scores[v] = (Floats)((sound & (Words)scores[v]) | (~sound & lowest)); /* NaN counts as -inf */
    }
    memcpy(out, scores, sizeof scores);
}

/* ---- streaming top-k ---- */

/* Floats as integers of the same order, and back. */
static int64_t order_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

static float value_of(int64_t order) {
    int32_t bits = (int32_t)order ^ (((int32_t)order >> 31) & INT32_MAX);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Keep the topk best by (score, lower position), in position order. The cut is found by bisection on its bits:
   topk candidates or more beat `low`, no more than topk beat `high`. */
static void keep_best(Best *best, int64_t topk) {
    if (best->count <= topk) return;
    int64_t low = order_of(best->threshold) - 1, high = order_of(INFINITY), above = 0;
    while (high - low > 1 && above < topk) {
        int64_t middle = low + (high - low) / 2;
        float cut = value_of(middle);
        int32_t count = 0;
        for (int64_t i = 0; i < best->count; i++) count += best->score[i] > cut;
        if (count > topk)
            low = middle;
        else
            high = middle, above = count;
    }
    const float cut = value_of(high);
    int64_t kept = 0, ties = topk - above;
    for (int64_t i = 0; i < best->count; i++) {
        float score = best->score[i];
        int tie = score == cut && ties > 0;
        best->score[kept] = score, best->position[kept] = best->position[i];
        kept += tie || score > cut;
        ties -= tie;
    }
    best->count = kept, best->threshold = cut;
}

/* Offer the scores of positions first .. first + count - 1, which are later than all seen before. */
static void offer(Best *best, const float *scores, int64_t first, int64_t count, int64_t topk, int64_t capacity) {
    int64_t i = 0;
    for (; i < count && best->count < topk; i++, best->count++)
        best->score[best->count] = scores[i], best->position[best->count] = (int32_t)(first + i);
    for (; i < count; i += LANES) {
        if (best->count + LANES > capacity) keep_best(best, topk);
        int64_t n = best->count, some = smaller(LANES, count - i);
#ifdef __AVX512F__
        __m512 score = _mm512_maskz_loadu_ps(0xffff >> (16 - some), scores + i);
        __mmask16 good = _mm512_cmp_ps_mask(score, _mm512_set1_ps(best->threshold), _CMP_GT_OQ) & (0xffff >> (16 - some));
        if (!good) continue;
        __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i position = _mm512_add_epi32(lane, _mm512_set1_epi32((int)(first + i)));
        _mm512_storeu_ps(best->score + n, _mm512_maskz_compress_ps(good, score));
        _mm512_storeu_si512(best->position + n, _mm512_maskz_compress_epi32(good, position));
        n += __builtin_popcount(good);
#else
        for (int64_t j = i; j < i + some; j++)
            if (scores[j] > best->threshold) best->score[n] = scores[j], best->position[n++] = (int32_t)(first + j);
#endif
        best->count = n;
    }
}

/* ---- the whole ---- */

static void *take(char **memory, int64_t bytes) {
    char *start = *memory;
    *memory += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return start;
}

static Scratch take_scratch(const Problem *p, char **memory) {
    const int64_t steps = steps_of(p);
    Scratch s;
    s.keys = take(memory, p->groups * GROUP * steps * 4);
    s.scales = take(memory, p->is_fp8 ? p->groups * GROUP * 4 : 0);
    s.scores = take(memory, p->groups * GROUP * 4);
    s.queries = take(memory, p->tile * p->heads * steps * 4);
    s.best = take(memory, p->tile * (int64_t)sizeof(Best));
    s.candidates = take(memory, p->tile * capacity_of(p) * 8);
    return s;
}

int64_t index_topk_workspace(const Problem *p) {
    char *memory = 0;
    take_scratch(p, &memory);
    int64_t scratch = memory - (char *)0, shared = (p->tokens + 1) * 8 + ALIGN;
    if (p->splits > 1) shared += p->tokens * p->splits * (p->topk * 8 + 8) + 3 * ALIGN;
    return p->threads * scratch + shared;
}

/* Cut the tokens into tiles of one sequence each; return how many, or -1 where an argument is out of range. */
static int64_t cut_tiles(const Problem *p, int64_t *tiles) {
    int64_t count = 0;
    for (int64_t t = 0; t < p->tokens; t++) {
        int64_t sequence = p->sequence_ids[t], visible = p->visible[t];
        if (sequence < 0 || sequence >= p->sequences || visible < 0 || visible > p->pages * p->page_size) return -1;
        if (!count || t - tiles[count - 1] == p->tile || sequence != p->sequence_ids[t - 1]) tiles[count++] = t;
    }
    tiles[count] = p->tokens;
    return count;
}

/* Leave in s->best the best of keys begin .. end - 1 for each token of a tile. */
static int search(const Problem *p, Scratch *s, int64_t first, int64_t last, int64_t begin, int64_t end) {
    const int64_t steps = steps_of(p), capacity = capacity_of(p), block = p->groups * GROUP;
    int64_t longest = 0;
    for (int64_t t = first; t < last; t++) {
        float *candidates = s->candidates + (t - first) * capacity * 2;
        s->best[t - first] = (Best){candidates, (int32_t *)(candidates + capacity), 0, -INFINITY};
        if (p->visible[t] <= p->topk || p->visible[t] <= begin) continue; /* all are chosen, or none is here */
        if (p->visible[t] > longest) longest = p->visible[t];
        pack_query(p, t, s->queries + (t - first) * p->heads * steps);
    }
    end = smaller(end, longest);
    for (int64_t start = begin; start < end; start += block) {
        int64_t stop = smaller(start + block, end);
        if (!pack_keys(p, p->sequence_ids[first], start, stop, s->keys, s->scales)) return 0;
        for (int64_t t = first; t < last; t++) {
            int64_t count = smaller(stop, p->visible[t]) - start;
            if (p->visible[t] <= p->topk || count <= 0) continue;
            const uint32_t *query = s->queries + (t - first) * p->heads * steps;
            for (int64_t key = 0; key < count; key += GROUP) {
                const float *weights = p->weights + t * p->heads, *scales = s->scales + key;
                if (PAIRED && p->is_bf16)
                    score_group(p, query, weights, s->keys + key * steps, scales, s->scores + key, 1);
                else
                    score_group(p, query, weights, s->keys + key * steps, scales, s->scores + key, 0);
            }
            offer(s->best + t - first, s->scores, start, count, p->topk, capacity);
        }
    }
    for (int64_t t = first; t < last; t++) keep_best(s->best + t - first, p->topk);
    return 1;
}

static void write(const Problem *p, int64_t token, const Best *best) {
    int32_t *selected = p->selected + token * p->topk;
    const int64_t visible = p->visible[token];
    for (int64_t i = 0; i < p->topk; i++)
        selected[i] = visible > p->topk ? best->position[i] : i < visible ? (int32_t)i : -1;
}

/* Return 0, or 1 where a sequence, a length or a row number is out of range. */
int index_topk(const Problem *p) {
    char *memory = p->workspace;
    int64_t *tiles = take(&memory, (p->tokens + 1) * 8);
    const int64_t slots = p->splits > 1 ? p->tokens * p->splits : 0;
    float *scores = take(&memory, slots * p->topk * 4); /* [tokens, splits, topk], used when keys are split */
    int32_t *positions = take(&memory, slots * p->topk * 4);
    int64_t *counts = take(&memory, slots * 8);
    const int64_t tile_count = cut_tiles(p, tiles);
    int wrong = tile_count < 0;
    char *scratches = memory;
    take_scratch(p, &memory);
    const int64_t scratch_bytes = memory - scratches, units = tile_count * p->splits;

#pragma omp parallel for schedule(dynamic) num_threads((int)p->threads) reduction(| : wrong) if (units > 1)
    for (int64_t unit = 0; unit < units; unit++) {
        char *mine = scratches + omp_get_thread_num() * scratch_bytes;
        Scratch s = take_scratch(p, &mine);
        int64_t split = unit % p->splits, begin = split * p->chunk;
        int64_t first = tiles[unit / p->splits], last = tiles[unit / p->splits + 1];
        wrong |= !search(p, &s, first, last, begin, begin + p->chunk);
        for (int64_t t = first; t < last && !wrong; t++) {
            const Best *best = s.best + t - first;
            if (p->splits == 1) {
                write(p, t, best);
                continue;
            }
            int64_t slot = t * p->splits + split;
            memcpy(scores + slot * p->topk, best->score, best->count * 4);
            memcpy(positions + slot * p->topk, best->position, best->count * 4);
            counts[slot] = best->count;
        }
    }
    if (wrong || p->splits == 1) return wrong;

#pragma omp parallel for num_threads((int)p->threads) if (p->tokens > 1)
    for (int64_t t = 0; t < p->tokens; t++) { /* join a token's splits, in place and in position order */
        Best all = {scores + t * p->splits * p->topk, positions + t * p->splits * p->topk, 0, -INFINITY};
        for (int64_t split = 0; split < p->splits; split++) {
            int64_t from = split * p->topk, count = counts[t * p->splits + split];
            memmove(all.score + all.count, all.score + from, count * 4);
            memmove(all.position + all.count, all.position + from, count * 4);
            all.count += count;
        }
        keep_best(&all, p->topk);
        write(p, t, &all);
    }
    return 0;
}
