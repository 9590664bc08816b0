/* Rotary embedding: x * cos + mirrored x * sin, each product and the sum rounded once. */

#include "../product.h"

#include <math.h>

/* output [tokens, 2, 2 pairs]: cos, cos of each pair, then -sin, sin. The angle is taken in double. */
void turns(const int64_t *positions, const double *frequencies, float *output, int64_t tokens, int64_t pairs) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t pair = 0; pair < pairs; pair++) {
            const double angle = (double)positions[t] * frequencies[pair];
            float *cosines = output + (2 * t * pairs + pair) * 2, *sines = cosines + 2 * pairs;
            cosines[0] = cosines[1] = (float)cos(angle);
            sines[1] = (float)sin(angle);
            sines[0] = -sines[1];
        }
}

/* The first `rotary` numbers of a row are rotated, the rest is copied. */
INLINE void rotate_row(const char *row, const float *turn, char *output, int64_t width, int64_t rotary,
                       int is_bf16) {
    const Ints mirror = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const int64_t bytes = is_bf16 ? 2 : 4;
    for (int64_t i = 0; i < rotary; i += LANES) {
        const int64_t count = smaller(LANES, rotary - i);
        const Floats x = load_floats(row + i * bytes, count, is_bf16);
        const Floats cosines = load_floats(turn + i, count, 0), sines = load_floats(turn + rotary + i, count, 0);
        const Floats turned = x * cosines + __builtin_shuffle(x, mirror) * sines;
        store_floats(output + i * bytes, turned, 0, LANES, count, is_bf16);
    }
    memcpy(output + rotary * bytes, row + rotary * bytes, (width - rotary) * bytes);
}

/* states [tokens, heads, width], the last dimension contiguous, strides in bytes; output contiguous. */
void rotate(const char *states, const float *turn, char *output, int64_t tokens, int64_t heads, int64_t width,
            int64_t rotary, int64_t token_stride, int64_t head_stride, int32_t is_bf16, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const char *row = states + t * token_stride + (heads > 1 ? h * head_stride : 0);
            char *to = output + (t * heads + h) * width * (is_bf16 ? 2 : 4);
            if (is_bf16) rotate_row(row, turn + 2 * t * rotary, to, width, rotary, 1);
            else rotate_row(row, turn + 2 * t * rotary, to, width, rotary, 0);
        }
}
