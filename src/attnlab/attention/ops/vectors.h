// Vectors of floats.
#pragma once
#include <math.h>
#include <stddef.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { WIDTH = 16 };
#else
enum { WIDTH = 8 };
#endif
typedef float V __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int I __attribute__((vector_size(4 * WIDTH)));
#define INLINE static inline __attribute__((always_inline))

INLINE float total(V v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps(v);
#else
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += v[i];
    return sum;
#endif
}

// e^x to two units in the last place.
INLINE V exponential(V x) {
    x = x < -87.0f ? V{} - 87.0f : x > 88.0f ? V{} + 88.0f : x;
    const V n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const I power = (__builtin_convertvector(n, I) + 127) << 23;
    return p * (V)power;
}
