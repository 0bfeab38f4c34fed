// lanes.cuh: a few neighbouring numbers of a thread, packed in 32-bit words as they lie in memory, and their quick roundings.
//
// Purpose    one or two instructions an element where the general functions of numbers.cuh take ten
// Reference  f16lab.precision.convert, f16lab.rounding.round_stochastic
// Layout     N elements of P in N·BITS/32 words; N is even, and a multiple of 4 for eight-bit formats
// Numerics   the bits of Port<P>, unless a value is large, infinite or NaN: `watch` tells, and then the kernel takes Port<P>.
//            Eight-bit formats overflow soon: there a kernel compares with the largest number itself
#pragma once
#include "exact.cuh"
#include "ports.cuh"

namespace f16lab {

template <class A, class B> struct Is { enum { YES = 0 }; };
template <class A> struct Is<A, A> { enum { YES = 1 }; };

template <class P, int N> struct alignas(N * P::BITS / 8) Lanes { u32 w[N * P::BITS / 32]; };

F16LAB_FN u32 upper_halves(u32 lo, u32 hi) {
#ifdef __CUDA_ARCH__
    return __byte_perm(lo, hi, 0x7632);
#else
    return lo >> 16 | (hi & 0xFFFF0000u);
#endif
}

// Adds value·weight, which keeps `seen` finite as long as no |value|·weight reaches 2^127; at 2^129 it surely does not.
F16LAB_FN float watch(float seen, float value, float weight) { return fused(value, weight, seen); }
F16LAB_FN bool finite(float x) { return fabsf(x) < 3.402823466e38f; }  // below the largest number: true for no NaN either
// The weight that finds all that a rounding to P must not meet: overflow, or beyond f32's last binades
template <class P> F16LAB_FN float watch_weight(bool overflow) {
    return P::BITS == 16 && overflow && P::NOISE == 32 ? 20769187434139310514121985316880384.0f /* 2^114 */ : 4.0f;
}
template <> F16LAB_FN float watch_weight<F32>(bool) { return 4.0f; }

// ---------------------------------------------------------------- reading
// Two codes of an eight-bit format; finite overflow ends at the largest number: whoever does not want that looks before.
template <class P> F16LAB_FN u32 two_codes(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
    u16 two;
    if (P::MANT == 3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(hi), "f"(lo));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(hi), "f"(lo));
    return two;
#else
    return narrow<P>(lo, true) | narrow<P>(hi, true) << 8;
#endif
}
template <class P> struct Lane {  // eight-bit formats
    static F16LAB_FN float get(const u32* w, int i) {
        const u32 c = w[i / 4] >> i % 4 * 8 & 0xFFu;
#if __CUDA_ARCH__ >= 890
        u32 two;
        float x;
        if (P::MANT == 3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((u16)c));
        else two = c << 8;  // E5M2 is the upper half of an f16 number
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)two));
        return x;
#else
        return widen<P>(c);
#endif
    }
    static F16LAB_FN void set(u32* w, int i, u32 codes) {  // numbers i and i + 1; the two others of the word stay
        w[i / 4] = i % 4 ? (w[i / 4] & 0xFFFFu) | codes << 16 : (w[i / 4] & 0xFFFF0000u) | codes;
    }
    static F16LAB_FN void write(u32* w, int i, float lo, float hi, bool) { set(w, i, two_codes<P>(lo, hi)); }
    static F16LAB_FN void draw(u32* w, int i, float lo, float hi, u32 mlo, u32 mhi, bool s) {
        set(w, i, stochastic<P>(lo, noise_fold(mlo), s) | stochastic<P>(hi, noise_fold(mhi), s) << 8);
    }
};
template <> struct Lane<F32> {
    static F16LAB_FN float get(const u32* w, int i) { return bits_float(w[i]); }
    static F16LAB_FN void write(u32* w, int i, float lo, float hi, bool) { w[i] = float_bits(lo); w[i + 1] = float_bits(hi); }
    static F16LAB_FN void draw(u32* w, int i, float lo, float hi, u32, u32, bool) { write(w, i, lo, hi, false); }
};
template <> struct Lane<BF16> {
    static F16LAB_FN float get(const u32* w, int i) { return bits_float(i % 2 ? w[i / 2] & 0xFFFF0000u : w[i / 2] << 16); }
    static F16LAB_FN void write(u32* w, int i, float lo, float hi, bool) {
#ifdef __CUDA_ARCH__
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i / 2]) : "f"(hi), "f"(lo));
#else
        w[i / 2] = narrow<BF16>(lo) | narrow<BF16>(hi) << 16;
#endif
    }
    // low half > noise: a carry out of low half + (2^16 - 1 - noise)
    static F16LAB_FN u32 carry(float x, u32 m) { return float_bits(x) + (~noise_fold(m) & 0xFFFFu); }
    static F16LAB_FN void draw(u32* w, int i, float lo, float hi, u32 mlo, u32 mhi, bool) {
        w[i / 2] = upper_halves(carry(lo, mlo), carry(hi, mhi));
    }
};
template <> struct Lane<F16> {
    static F16LAB_FN float get(const u32* w, int i) {
        return f16_value((u16)(i % 2 ? w[i / 2] >> 16 : w[i / 2]));
    }
    static F16LAB_FN void write(u32* w, int i, float lo, float hi, bool) {
#ifdef __CUDA_ARCH__
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[i / 2]) : "f"(hi), "f"(lo));
#else
        w[i / 2] = narrow<F16>(lo) | narrow<F16>(hi) << 16;
#endif
    }
    // Above 2^-14: the 13 bits that go against the upper 13 of the noise, then cut. Below, where the step is fixed: the rule as it reads.
    static F16LAB_FN float carry(float x, u32 m) { return bits_float(float_bits(x) + 0x1FFFu - (m >> 19)); }
    static F16LAB_FN float below(float x, u32 m) {
        const float steps = fabsf(x) * 16777216.0f;
        const u32 q = (u32)steps, fraction = (u32)((steps - (float)q) * 4294967296.0f);
        return bits_float(float_bits((float)(q + (fraction > noise_fold(m))) * 5.9604644775390625e-08f) | (float_bits(x) & 0x80000000u));
    }
    static F16LAB_FN void draw(u32* w, int i, float lo, float hi, u32 mlo, u32 mhi, bool) {
        float a = carry(lo, mlo), b = carry(hi, mhi);
        if (fminf(fabsf(lo), fabsf(hi)) < 6.103515625e-05f) {
            a = fabsf(lo) < 6.103515625e-05f ? below(lo, mlo) : a;
            b = fabsf(hi) < 6.103515625e-05f ? below(hi, mhi) : b;
        }
#ifdef __CUDA_ARCH__
        asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(w[i / 2]) : "f"(b), "f"(a));
#else
        w[i / 2] = narrow<F16>(bits_float(float_bits(a) & ~0x1FFFu)) | narrow<F16>(bits_float(float_bits(b) & ~0x1FFFu)) << 16;
#endif
    }
};

}  // namespace f16lab
