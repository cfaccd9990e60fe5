/* Vectors of 16 floats, of 8 without AVX-512, for what is compiled on the machine that it runs on (library.py), by GCC's or
   Clang's extensions. Numbers in memory are float32, or bfloat16 where `bf16` says so. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
/* FIRST: of 16 numbers, one for each lane. GCC takes vectors wider than the processor's apart, in memory. */
#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#define FIRST(...) __VA_ARGS__
#else
#define LANES 8
#define FIRST(...) FIRST_8(__VA_ARGS__)
#define FIRST_8(a, b, c, d, e, f, g, h, ...) a, b, c, d, e, f, g, h
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static const Ints LANE = {FIRST(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};

INLINE Vec all(float x) { return x - (Vec){}; }

INLINE Vec choose(Ints where, Vec yes, Vec no) { return (Vec)((where & (Ints)yes) | (~where & (Ints)no)); }

/* `count` numbers, and zeros after them. Whole vectors are not copied by memcpy, which GCC splits: to read one that was written
   in two parts takes several times as long. */
INLINE Vec load(const void *from, size_t at, int bf16, int64_t count) {
    Vec x = {};
    Halves h = {};
    const void *source = (const char *)from + at * (bf16 ? 2 : 4);
    if (count < LANES)
        bf16 ? memcpy(&h, source, 2 * count) : memcpy(&x, source, 4 * count);
    else if (bf16)
        h = *(const Halves *)source;
    else
        x = *(const Vec *)source;
#ifdef __AVX512F__ /* one instruction in place of five */
    if (bf16) return (Vec)((Words)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#endif
    return bf16 ? (Vec)(__builtin_convertvector(h, Words) << 16) : x;
}

/* The nearest bfloat16, ties to even, as a float. */
INLINE Vec rounded(Vec x) {
#ifdef __AVX512BF16__
    return (Vec)((Words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)) << 16);
#endif
    Words bits = (Words)x;
    Words near = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return choose(x == x, (Vec)near, (Vec)(Words)(bits | 0x400000u));
}

INLINE void store(void *to, size_t at, Vec x, int bf16, int64_t count) {
#ifdef __AVX512BF16__
    Halves h = (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    Halves h = __builtin_convertvector((Words)rounded(x) >> 16, Halves);
#endif
    void *target = (char *)to + at * (bf16 ? 2 : 4);
    if (count < LANES)
        bf16 ? memcpy(target, &h, 2 * count) : memcpy(target, &x, 4 * count);
    else if (bf16)
        *(Halves *)target = h;
    else
        *(Vec *)target = x;
}

/* e^x for x <= 88, to within 2 units in the last place; 0 from -87 on down, NaN stays. Cody and Waite's reduction, and a
   Taylor polynomial for what is left, at most ln 2 / 2. */
INLINE Vec exponential(Vec x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    Vec n = (x * 1.44269504f + shift) - shift;
    Vec f = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = f * (1.0f / 5040) + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    Vec power = (Vec)((__builtin_convertvector(n, Ints) + 127) << 23);
    return choose(x < -87.0f, (Vec){}, choose(x == x, p * power, x));
}

/* The given lanes of two vectors. GCC has the other function since version 12 only. */
#ifdef __clang__
#define PAIR(a, b, ...) (__builtin_shufflevector(a, b, FIRST(__VA_ARGS__)))
#else
#define PAIR(a, b, ...) (__builtin_shuffle(a, b, (Ints){FIRST(__VA_ARGS__)}))
#endif
INLINE Vec greater(Vec a, Vec b) { return choose(a > b, a, b); }

/* `join` of all lanes, halving their number each time. */
#define OVER_LANES(name, join) \
    INLINE float name(Vec x) { \
        if (LANES > 8) x = join(x, PAIR(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
        x = join(x, PAIR(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
        x = join(x, PAIR(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
        x = join(x, PAIR(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)); \
        return x[0]; \
    }
#define PLUS(a, b) (a + b)
OVER_LANES(sum, PLUS)
OVER_LANES(largest, greater)

