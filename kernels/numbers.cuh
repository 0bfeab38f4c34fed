// numbers.cuh: precisions, roundings and keyed noise on bit patterns.
//
// Purpose    one definition of each number rule for all kernels, usable on the device and, for tests, on the host
// Reference  f16lab.precision.convert, f16lab.rounding.round_stochastic, f16lab.rounding.noise
// Numerics   integers, comparisons and exact scalings by powers of two only: equal to the reference bit for bit
//
// A narrow number is carried as its code (unsigned, sign in the top bit of the format), a wide one as a float.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define F16LAB_FN __host__ __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define F16LAB_FN inline
#endif

namespace f16lab {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

F16LAB_FN u32 float_bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    u32 u; memcpy(&u, &x, 4); return u;
#endif
}

F16LAB_FN float bits_float(u32 u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float x; memcpy(&x, &u, 4); return x;
#endif
}

// ---------------------------------------------------------------- formats
// MANT: stored mantissa bits. BITS: width. BIAS: of the exponent; the smallest normal exponent is 1 - BIAS.
// TOP: code of the largest finite number. BEYOND: what lies above it (infinity, or NaN where there is none).
// NAN_CODE: the one NaN that is written. NOISE: how many bits of noise a stochastic rounding compares.
struct F16  { enum { MANT = 10, BITS = 16, BIAS = 15,  TOP = 0x7BFF, BEYOND = 0x7C00, NAN_CODE = 0x7E00, NOISE = 32 }; typedef u16 code; };
struct BF16 { enum { MANT = 7,  BITS = 16, BIAS = 127, TOP = 0x7F7F, BEYOND = 0x7F80, NAN_CODE = 0x7FC0, NOISE = 16 }; typedef u16 code; };
struct E5M2 { enum { MANT = 2,  BITS = 8,  BIAS = 15,  TOP = 0x7B,   BEYOND = 0x7C,   NAN_CODE = 0x7E,   NOISE = 32 }; typedef u8 code; };
struct E4M3 { enum { MANT = 3,  BITS = 8,  BIAS = 7,   TOP = 0x7E,   BEYOND = 0x7F,   NAN_CODE = 0x7F,   NOISE = 32 }; typedef u8 code; };

// 2^e for -126 <= e <= 127
F16LAB_FN float power(int e) { return bits_float((u32)(e + 127) << 23); }

// |x| in units of the format's subnormal step, exact because it only moves the exponent; for magnitudes below 2^(2 - BIAS)
template <class P> F16LAB_FN float in_steps(float a) { return a * power(P::BIAS - 1 + P::MANT); }

template <class P> F16LAB_FN u32 signed_code(u32 bits, u32 code) { return code | (bits >> 31) << (P::BITS - 1); }

// Smallest normal number of the format, as f32 bits. bf16 has the exponents of f32: all its patterns are cut alike.
template <class P> F16LAB_FN u32 first_normal() { return P::BIAS == 127 ? 0u : (u32)(128 - P::BIAS) << 23; }

// ---------------------------------------------------------------- widening, exact
template <class P> F16LAB_FN float widen(u32 code) {
    u32 sign = (code >> (P::BITS - 1)) << 31, a = code & ((1u << (P::BITS - 1)) - 1);
    if (P::BIAS == 127) return bits_float(code << 16);
    if (a > (u32)P::TOP) return bits_float(sign | (a == (u32)P::BEYOND && P::BEYOND != P::NAN_CODE ? 0x7F800000u : 0x7FC00000u));
    if (a < (1u << P::MANT)) return bits_float(float_bits((float)a * power(1 - P::BIAS - P::MANT)) | sign);
    return bits_float(sign | ((a << (23 - P::MANT)) + ((u32)(127 - P::BIAS) << 23)));
}

// An f16 code as a float by the processor's own instruction: as `widen`, but a NaN keeps its payload.
F16LAB_FN float f16_value(u16 code) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(code));
    return x;
#else
    return widen<F16>(code);
#endif
}

// ---------------------------------------------------------------- rounding to nearest, ties to even
template <class P> F16LAB_FN u32 nearest_magnitude(u32 a) {
    if (a >= first_normal<P>()) {
        const int cut = 23 - P::MANT;
        u32 r = (a + (1u << (cut - 1)) - 1 + (a >> cut & 1)) >> cut;
        return r - ((u32)(127 - P::BIAS) << P::MANT);
    }
    return (u32)rintf(in_steps<P>(bits_float(a)));
}

// x in P, one rounding; saturate: finite overflow ends at the largest finite number
template <class P> F16LAB_FN u32 narrow(float x, bool saturate = false) {
    u32 bits = float_bits(x), a = bits & 0x7FFFFFFFu;
    if (a > 0x7F800000u) return signed_code<P>(bits, P::NAN_CODE);
    if (a == 0x7F800000u) return signed_code<P>(bits, P::BEYOND);
    u32 r = nearest_magnitude<P>(a);
    if (r > (u32)P::TOP) r = saturate ? (u32)P::TOP : (u32)P::BEYOND;
    return signed_code<P>(bits, r);
}

// ---------------------------------------------------------------- stochastic rounding
// The part below the lower neighbour, as a fraction of the step in NOISE bits, against as many bits of noise.
template <class P> F16LAB_FN u32 stochastic_magnitude(u32 a, u32 noise) {
    if (a >= first_normal<P>()) {
        const int cut = 23 - P::MANT;
        u32 low = a & ((1u << cut) - 1), q = (a >> cut) - ((u32)(127 - P::BIAS) << P::MANT);
        return q + (P::NOISE == 16 ? (low << (16 - cut)) > (noise & 0xFFFFu) : (low << (32 - cut)) > noise);
    }
    float steps = in_steps<P>(bits_float(a)), q = floorf(steps);
    u32 fraction = (u32)((steps - q) * 4294967296.0f);
    return (u32)q + (fraction > noise);
}

// x in P, up or down to a neighbour with the odds that keep the mean; below max + step(max) it never leaves the finite range
template <class P> F16LAB_FN u32 stochastic(float x, u32 noise, bool saturate = false) {
    u32 bits = float_bits(x), a = bits & 0x7FFFFFFFu;
    if (a >= 0x7F800000u) return narrow<P>(x, saturate);
    u32 r = stochastic_magnitude<P>(a, noise);
    if (r <= (u32)P::TOP) return signed_code<P>(bits, r);
    // the lower neighbour is still finite exactly when a < max + step(max)
    bool below = stochastic_magnitude<P>(a, 0xFFFFFFFFu) <= (u32)P::TOP;
    return below || saturate ? signed_code<P>(bits, P::TOP) : narrow<P>(x);
}

// ---------------------------------------------------------------- keyed noise
// Squirrel Eiserloh's SquirrelNoise5, all arithmetic modulo 2^32, in three parts: the product with the position, which grows by
// POSITION from one position to the next; the mixing; the last fold, which leaves the upper 17 bits alone. A `one` that the compiler
// does not know to be 1 moves the additions to the multipliers, which have less to do.
enum : u32 { POSITION = 0xD2A80A3Fu };
F16LAB_FN u32 upper_product(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
#ifndef F16LAB_HIGH
#define F16LAB_HIGH 0  // how many of the four shifts go to the multipliers too, as the upper half of a product; tune by measuring
#endif
template <int SHIFT, bool HIGH> F16LAB_FN u32 noise_shift(u32 m, u32 one) { return HIGH ? upper_product(m, one << (32 - SHIFT)) : m >> SHIFT; }
F16LAB_FN u32 noise_mix(u32 m, u32 one = 1) {
    m ^= noise_shift<9, (F16LAB_HIGH > 0)>(m, one);  m = m * one + 0xA884F197u;
    m ^= noise_shift<11, (F16LAB_HIGH > 1)>(m, one); m *= 0x6C736F4Bu;
    m ^= noise_shift<13, (F16LAB_HIGH > 2)>(m, one); m = m * one + 0xB79F3ABBu;
    m ^= noise_shift<15, (F16LAB_HIGH > 3)>(m, one); return m * 0x1B56C4F5u;
}
F16LAB_FN u32 noise_fold(u32 m) { return m ^ (m >> 17); }
F16LAB_FN u32 squirrel_noise5(u32 position, u32 seed) { return noise_fold(noise_mix(position * POSITION + seed)); }

// kA of a tensor in one step, for one purpose and micro-step
F16LAB_FN u32 noise_key(u32 seed, u32 step, u32 purpose, u32 micro, u32 tensor_id) {
    return squirrel_noise5(tensor_id, squirrel_noise5((purpose << 16) + micro, squirrel_noise5(step, seed)));
}

// 32 random bits for the element with this row-major index in the whole tensor
F16LAB_FN u32 noise_at(u32 ka, u64 index) {
    return squirrel_noise5(squirrel_noise5((u32)index, ka), squirrel_noise5((u32)(index >> 32), ka));
}

}  // namespace f16lab
