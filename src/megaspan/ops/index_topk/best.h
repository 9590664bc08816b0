/* Streaming top-k: the best of the scores that have passed by, exactly, ties to the lowest position. */

/* The best candidates of one token so far, in position order, with room for more before they are thinned out. */
typedef struct {
    float *score;
    int32_t *position;
    int64_t count;
    float threshold; /* topk candidates score at least this much: a later one must beat it */
} Best;

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
        __mmask16 good = _mm512_cmp_ps_mask(score, _mm512_set1_ps(best->threshold), _CMP_GT_OQ);
        good &= 0xffff >> (16 - some);
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
