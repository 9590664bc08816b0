/* Vectors of LANES numbers and functions of each lane. Define LANES first: those of a register, or more. */

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), may_alias));

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE Floats choose(Ints mask, Floats yes, Floats no) {
    return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no));
}

/* 2^x for x <= 0, to 1e-7 relative: the polynomial interpolates 2^r at the Chebyshev nodes of [-1/2, 1/2].
   Below -126 as at -126; NaN stays NaN. */
INLINE Floats power_of_2(Floats x) {
    x = choose(x < -126, (Floats){0} - 126, x);
    const Ints whole = __builtin_convertvector(x - 0.5f, Ints); /* to nearest, as x is not positive */
    const Floats r = x - __builtin_convertvector(whole, Floats);
    Floats y = r * 1.546144468e-4f + 1.340042818e-3f;
    y = y * r + 9.618056679e-3f;
    y = y * r + 5.550327227e-2f;
    y = y * r + 2.402265092e-1f;
    y = y * r + 6.931472067e-1f;
    return (y * r + 1) * (Floats)((Words)(whole + 127) << 23);
}

/* e4m3, a byte in each word, to fp32: exactly, without subnormal floats, which a process may flush to zero. */
INLINE Floats widen_e4m3(Words bits) {
    const Words size = bits & 0x7f, tiny = (Words)(size < 8);
    const Words number = (size << 20) + ((120u << 23) + (tiny & (1u << 23)));
    const Floats value = (Floats)number - (Floats)(tiny & (121u << 23)); /* 2^-6 (1 + m/8) - 2^-6 */
    return (Floats)((Words)value | ((Words)(size == 0x7f) & 0x7fc00000u) | (bits & 0x80) << 24);
}
