/* Exact, deterministic top-k of the lightning indexer: score, ReLU, weight, sum and select in one pass.

   The lanes of a vector are keys. Keys are gathered through the page table and transposed, a block at a
   time, into groups of 3 vectors; the tokens of a tile then share the block while it lies in the cache.
   Eight heads by one group stay in registers, so ReLU, weights and the sum over heads need no shuffle.
   A pair's score is the same operations in the same order wherever the pair falls, and the answer
   is unique given the scores: so it depends on no tile, no split and no number of threads. */

#if defined(__AVX512F__)
enum { LANES = 16, HEADS = 8 };
#elif defined(__AVX__)
enum { LANES = 8, HEADS = 4 };
#else
enum { LANES = 4, HEADS = 8 };
#endif
#include "../vectors.h"

#include <math.h>
#include <omp.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { VECTORS = 3, GROUP = VECTORS * LANES, ALIGN = 64 };

/* With AVX512-BF16 a 32-bit word holds two neighbouring bf16; elsewhere bf16 is widened to fp32. */
#ifdef __AVX512BF16__
enum { PAIRED = 1 };
#else
enum { PAIRED = 0 };
#endif

/* Mirrored by Problem in native.py. */
typedef struct {
    const char *query;           /* [tokens, heads, width], contiguous */
    const float *weights;        /* [tokens, heads] */
    const char *keys;            /* [rows, width], rows key_stride bytes apart; FP8 keys lie page by page */
    const int64_t *starts;       /* [sequences, pages], first row of each page */
    const int64_t *sequence_ids; /* [tokens] */
    const int64_t *visible;      /* [tokens] */
    int32_t *selected;           /* [tokens, topk], the result */
    char *workspace;             /* index_topk_workspace() bytes, aligned to 64 */
    int64_t tokens, heads, width, rows, key_stride, sequences, pages, page_size, topk;
    int64_t is_bf16, is_fp8; /* the dtype of the query; whether the keys are instead e4m3 values, and after those
                                of a page's keys their fp32 scales */
    int64_t tile, groups, splits, chunk, threads; /* tokens a tile, groups a block, splits of `chunk` keys */
} Problem;

#include "best.h"
#include "keys.h"

/* Working memory of one thread. */
typedef struct {
    uint32_t *keys;    /* [groups][steps][GROUP] */
    float *scales;     /* [groups * GROUP], of FP8 keys */
    float *scores;     /* [groups * GROUP] */
    uint32_t *queries; /* [tile][head groups][steps][heads of the group] */
    Best *best;        /* [tile] */
    float *candidates; /* [tile][capacity] scores, each followed by its [capacity] positions */
} Scratch;

static int64_t capacity_of(const Problem *p) { return p->topk + (p->topk > 256 ? p->topk : 256) + LANES; }

/* ---- scores ---- */

INLINE Floats multiply_add(Floats sum, Words key, uint32_t query, int paired) {
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
INLINE void score_heads(const uint32_t *query, const float *weights, const uint32_t *keys, int64_t steps,
                        Floats *scores, const int heads, const int paired) {
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

INLINE void score_group(const Problem *p, const uint32_t *query, const float *weights, const uint32_t *keys,
                        const float *scales, float *out, const int paired) {
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
