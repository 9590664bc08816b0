/* Keys and queries of a Problem brought into the order in which kernel.c scores them. */

static int64_t steps_of(const Problem *p) { return p->is_bf16 && PAIRED ? (p->width + 1) / 2 : p->width; }

static inline uint32_t load_word(const Problem *p, const char *row, int64_t step) {
    if (!p->is_bf16) return ((const uint32_t *)row)[step];
    const uint16_t *half = (const uint16_t *)row;
    if (!PAIRED) return (uint32_t)half[step] << 16;
    uint32_t high = 2 * step + 1 < p->width ? half[2 * step + 1] : 0;
    return half[2 * step] | high << 16;
}

/* A step's e4m3 values as pairs of bf16 or as fp32. */
#ifdef __AVX512BF16__
typedef uint8_t Bytes __attribute__((vector_size(2 * LANES)));
typedef uint16_t Pairs __attribute__((vector_size(4 * LANES)));

static inline Words widen_bytes(Bytes bytes) {
    const Pairs bits = (Pairs)_mm512_cvtepu8_epi16((__m256i)bytes), size = bits & 0x7f;
    const Pairs tiny = {0, 118 << 7, 119 << 7, 239 << 6, 120 << 7, 481 << 5, 241 << 6, 483 << 5}; /* m * 2^-9 */
    const Pairs is_tiny = size < 8, nan = (size == 0x7f) & 0x7fc0;
    const Pairs number = (is_tiny & __builtin_shuffle(tiny, size)) | (~is_tiny & ((size << 4) + (120 << 7)));
    return (Words)(number | nan | (bits & 0x80) << 8);
}
#else
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

static inline Words widen_bytes(Bytes bytes) { return (Words)widen_e4m3(__builtin_convertvector(bytes, Words)); }
#endif

static inline Words load_e4m3(const char *values, int64_t count) {
    Bytes bytes = {0};
    if (count < (int64_t)sizeof bytes) {
        memcpy(&bytes, values, count);
        return widen_bytes(bytes);
    }
    memcpy(&bytes, values, sizeof bytes);
    return widen_bytes(bytes);
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

INLINE void shuffle_pairs(Words rows[LANES], int span, Words low, Words high) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & span)) {
            Words a = rows[i], b = rows[i | span];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i | span] = __builtin_shuffle(a, b, high);
        }
}

/* Words inside each 128 bits by two interleavings, then the 128-bit parts by splitting even from odd. */
INLINE void transpose(Words rows[LANES]) {
    Words lane, half = {0};
    for (int i = 0; i < LANES; i++) lane[i] = i, half[i] = i & LANES / 2;
    Words zip = (lane & ~3u) + (lane & 3) / 2 + (lane & 1) * LANES;
    Words part = (lane - half) / 4 * 8 + lane % 4 + half * 2;
    shuffle_pairs(rows, 2, zip, zip + 2);
    shuffle_pairs(rows, 1, zip, zip + 2);
    if (LANES > 4) shuffle_pairs(rows, 4, part, part + 4);
    if (LANES > 8) shuffle_pairs(rows, 8, part, part + 4);
}

/* Gather keys begin .. end - 1 of a sequence into groups; return 0 if the table points outside the rows, or, where
   these are FP8, not at whole pages. */
static int pack_keys(const Problem *p, int64_t sequence, int64_t begin, int64_t end, uint32_t *packed, float *scales) {
    const int64_t steps = steps_of(p), key_bytes = p->is_fp8 ? p->width : p->key_stride;
    const int64_t *starts = p->starts + sequence * p->pages;
    int64_t page = begin / p->page_size, offset = begin % p->page_size;
    for (int64_t first = begin; first < end; first += LANES) {
        const char *row[LANES];
        for (int i = 0; i < LANES; i++) {
            if (first + i < end) {
                int64_t start = starts[page], number = start + offset;
                if (number < 0 || number >= p->rows) return 0;
                const char *first_key = p->keys + start * p->key_stride;
                row[i] = first_key + offset * key_bytes;
                for (int64_t line = 0; line < key_bytes; line += 64)
                    __builtin_prefetch(row[i] + GROUP * key_bytes + line); /* read while this group is scored */
                if (p->is_fp8) {
                    if ((!offset || first + i == begin) && start % p->page_size) return 0;
                    memcpy(scales + first - begin + i, first_key + p->page_size * key_bytes + offset * 4, 4);
                }
                if (++offset == p->page_size) page++, offset = 0;
            } else
                row[i] = row[0]; /* a lane whose score nobody reads */
        }
        int64_t lane = first - begin;
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
