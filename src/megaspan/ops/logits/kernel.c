/* What a step must know of each row of logits: its best token and the log of its sum of exponentials. A row's
   numbers are added up in an order of their own, whatever other rows there are and whichever thread does it. */

#include "../product.h"

#include <math.h>
#include <omp.h>

typedef double Doubles __attribute__((vector_size(8 * LANES)));

typedef struct {
    const float *logits;         /* [rows, width], rows `stride` numbers apart */
    int64_t *best_ids;           /* [rows] */
    double *best, *log_totals;   /* [rows] */
    uint8_t *failed;             /* [rows] */
    int64_t rows, width, stride, vocabulary;
    int32_t threads;
} Call;

/* LANES numbers from `from`; those beyond `count` are -inf. */
INLINE Floats load_logits(const float *from, int64_t count) {
    Floats x;
    if (count >= LANES) {
        memcpy(&x, from, sizeof x);
        return x;
    }
    for (int i = 0; i < LANES; i++) x[i] = i < count ? from[i] : -INFINITY;
    return x;
}

INLINE float largest(const float *row, int64_t first, int64_t last, Ints *bad, int padding) {
    Floats top = (Floats){} - INFINITY;
    for (int64_t i = first; i < last; i += LANES) {
        const Floats x = load_logits(row + i, last - i);
        top = choose(x > top, x, top);
        /* What is not finite differs from itself when it is taken from itself; -inf is allowed in the padding. */
        Ints wrong = ~((x - x) == (Floats){});
        if (padding || last - i < LANES) wrong &= ~(x == (Floats){} - INFINITY);
        *bad |= wrong;
    }
    float best = top[0];
    for (int i = 1; i < LANES; i++) best = top[i] > best ? top[i] : best;
    return best;
}

static void summarise(const Call *c, int64_t r) {
    const float *row = c->logits + r * c->stride;
    Ints bad = {};
    const float best = largest(row, 0, c->vocabulary, &bad, 0);
    const float padding = largest(row, c->vocabulary, c->width, &bad, 1);
    const float top = padding > best ? padding : best;
    int wrong = best == -INFINITY;
    for (int i = 0; i < LANES; i++) wrong |= bad[i] != 0;
    /* A tail's -inf is let pass above, so those that are part of the row are looked for here. */
    for (int64_t i = c->vocabulary / LANES * LANES; i < c->vocabulary; i++) wrong |= row[i] == -INFINITY;

    int64_t id = 0;
    while (id < c->vocabulary - 1 && row[id] != best) id++;
    Doubles sums = {};
    for (int64_t i = 0; i < c->width; i += LANES) {
        const Floats below = (load_logits(row + i, c->width - i) - top) * 1.442695041f;
        const Floats weights = choose(below > (Floats){} - 125.0f, power_of_2(below), (Floats){});
        sums += __builtin_convertvector(weights, Doubles);
    }
    double total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    c->best_ids[r] = id;
    c->best[r] = best;
    c->log_totals[r] = top + log(total);
    c->failed[r] = wrong;
}

void summarise_logits(const Call *c) {
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1) schedule(static)
    for (int64_t r = 0; r < c->rows; r++) summarise(c, r);
}
