// fuse.cuh: what the generated kernels of fused expressions are made of.
//
// Purpose    reading and writing groups of 8 elements of any storage precision, walking rows and columns, one f32 function for
//            each primitive, and the same primitives on pairs of 16-bit numbers
// Reference  f16lab.expression.evaluate
// Layout     operands: element [rows, cols], row [cols], column [rows]; contiguous, any alignment
// Numerics   + - * / sqrt, comparisons, conversions and noise have the bits of the reference; exp, tanh, sigmoid (polynomials, no
//            library functions) are within 2 ulp of f32, as is log. A sum along a row: 32 lanes, each adds its groups in
//            order, then a tree of fixed shape. A sum down the columns: pieces of 256 rows, 8 warps each, added in order. So a
//            launch shape never changes a bit.
#include "eight.cuh"
#include "exact.cuh"

namespace f16lab {

// ---------------------------------------------------------------- one element
template <class P> F16LAB_FN float read(typename P::code c) { return Port<P>::read(c); }
template <class P> F16LAB_FN typename P::code write(float x) { return Port<P>::write(x, false); }
template <> F16LAB_FN float read<F16>(u16 c) { return f16_value(c); }
template <> F16LAB_FN u16 write<F16>(float x) {
#ifdef __CUDA_ARCH__
    u16 c; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(c) : "f"(x));
    return x != x ? (u16)(float_bits(x) >> 31 << 15 | 0x7E00u) : c;
#else
    return Port<F16>::write(x, false);
#endif
}
template <> F16LAB_FN u16 write<BF16>(float x) {
#ifdef __CUDA_ARCH__
    u16 c; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(c) : "f"(x));
    return x != x ? (u16)(float_bits(x) >> 31 << 15 | 0x7FC0u) : c;
#else
    return Port<BF16>::write(x, false);
#endif
}

// ---------------------------------------------------------------- groups of 8
F16LAB_FN bool aligned(const void* p) { return (u64)p % 32 == 0; }

// v[k] = element at + k for k < n, 0 beyond; `whole`: the group may be read in one piece
template <class P> F16LAB_FN void take(float (&v)[8], const void* p, i64 at, int n, bool whole) {
    const typename P::code* q = (const typename P::code*)p + at;
    const Eight<P> e = whole && n == 8 ? load8<P, true>(q, 8) : load8<P, false>(q, n);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = number<P>(e, k);
}
template <class P> F16LAB_FN void put(const float (&v)[8], void* p, i64 at, int n, bool whole, const u32* noise) {
    typename P::code* q = (typename P::code*)p + at;
    if (noise) {
#pragma unroll
        for (int k = 0; k < 8; ++k) if (k < n) q[k] = Port<P>::draw(v[k], noise[k], false);
        return;
    }
    const Eight<P> e = packed<P>(v);
    if (whole && n == 8) store8<P, true>(q, e, 8);
    else store8<P, false>(q, e, n);
}

// eight bits: rare, the general way
template <class P> F16LAB_FN void take_bytes(float (&v)[8], const void* p, i64 at, int n) {
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = k < n ? Port<P>::read(((const u8*)p)[at + k]) : 0.0f;
}
template <class P> F16LAB_FN void put_bytes(const float (&v)[8], void* p, i64 at, int n, const u32* noise) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
        if (k < n) ((u8*)p)[at + k] = noise ? Port<P>::draw(v[k], noise[k], false) : Port<P>::write(v[k], false);
}

// The storage of operand j is the 4-bit number j of `codes`: 0 f32, 1 f16, 2 bf16, 3 e4m3, 4 e5m2.
F16LAB_FN int storage(u64 codes, int j) { return (int)(codes >> 4 * j & 15); }

F16LAB_FN void take_any(float (&v)[8], const void* p, i64 at, int n, bool whole, int code) {
    switch (code) {
        case 0: take<F32>(v, p, at, n, whole); break;
        case 1: take<F16>(v, p, at, n, whole); break;
        case 2: take<BF16>(v, p, at, n, whole); break;
        case 3: take_bytes<E4M3>(v, p, at, n); break;
        default: take_bytes<E5M2>(v, p, at, n);
    }
}
F16LAB_FN void put_any(const float (&v)[8], void* p, i64 at, int n, bool whole, const u32* noise, int code) {
    switch (code) {
        case 0: put<F32>(v, p, at, n, whole, noise); break;
        case 1: put<F16>(v, p, at, n, whole, noise); break;
        case 2: put<BF16>(v, p, at, n, whole, noise); break;
        case 3: put_bytes<E4M3>(v, p, at, n, noise); break;
        default: put_bytes<E5M2>(v, p, at, n, noise);
    }
}

F16LAB_FN float one(const void* p, i64 at) { return ((const float*)p)[at]; }
F16LAB_FN float one_any(const void* p, i64 at, int code) {
    float v[8];
    take_any(v, p, at, 1, false, code);
    return v[0];
}

template <class P> F16LAB_FN void put_one(float x, void* p, i64 at, const u32* noise) {
    ((typename P::code*)p)[at] = noise ? Port<P>::draw(x, *noise, false) : write<P>(x);
}
F16LAB_FN void put_one_any(float x, void* p, i64 at, const u32* noise, int code) {
    switch (code) {
        case 0: put_one<F32>(x, p, at, noise); break;
        case 1: put_one<F16>(x, p, at, noise); break;
        case 2: put_one<BF16>(x, p, at, noise); break;
        case 3: put_one<E4M3>(x, p, at, noise); break;
        default: put_one<E5M2>(x, p, at, noise);
    }
}

// ---------------------------------------------------------------- noise
// of the elements first … first + 7; the half of the hash that they share is computed once
F16LAB_FN void noise8(u32* n, u32 ka, u64 first) {
    const u32 high = (u32)(first >> 32);
    if ((u32)((first + 7) >> 32) == high) {
        const u32 kb = squirrel_noise5(high, ka), base = (u32)first * POSITION + ka;
#pragma unroll
        for (int k = 0; k < 8; ++k) n[k] = squirrel_noise5(noise_fold(noise_mix(base + k * POSITION)), kb);
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) n[k] = noise_at(ka, first + k);
    }
}

// ---------------------------------------------------------------- functions
// e^x = (one + rest)·2^n for |x| < 150: one + rest is the sum of 1 and a polynomial (Cephes), to twice the digits of f32 or nearly
struct Exp {
    float one, rest;
    int n;
    F16LAB_FN explicit Exp(float x) {
        const float k = fused(x, 1.44269504f, 12582912.0f);  // 1.5·2^23: the nearest whole number stands in the low bits
        n = (int)(float_bits(k) - 0x4B400000u);
        const float whole = k - 12582912.0f, r = fused(whole, -1.42860677e-6f, fused(whole, -0.693145752f, x));
        float p = fused(1.9875691500e-4f, r, 1.3981999507e-3f);
        p = fused(p, r, 8.3334519073e-3f);
        p = fused(p, r, 4.1665795894e-2f);
        p = fused(p, r, 1.6666665459e-1f);
        p = fused(p, r, 5.0000001201e-1f);
        const float q = fused(p, r * r, r);
        one = q + 1.0f;
        rest = q - (one - 1.0f);
    }
};

// 1/(1 + e^x) for -40 <= x <= 80
F16LAB_FN float over_one_plus_exp(float x) {
    const Exp e(x);
    const float scale = power(e.n), d = fused(e.one, scale, 1.0f), s = rough_reciprocal(d);
    return fused(s, fused(e.rest * scale, -s, fused(-d, s, 1.0f)), s);
}

F16LAB_FN float f_exp(float x) {
    if (!(x > -104.0f)) return x != x ? x : 0.0f;
    if (x > 89.0f) return bits_float(0x7F800000u);
    const Exp e(x);
    const int half = e.n / 2;
    return e.one * power(half) * power(e.n - half);  // the last product alone may round
}
F16LAB_FN float f_sigmoid(float x) { return x > -80.0f ? over_one_plus_exp(-fminf(x, 40.0f)) : f_exp(x); }
F16LAB_FN float f_tanh(float x) {
    const float a = bits_float(float_bits(x) & 0x7FFFFFFFu);
    float y = 1.0f;
    if (a < 0.625f) {
        const float z = a * a;
        float p = fused(-5.70498872745e-3f, z, 2.06390887954e-2f);
        p = fused(p, z, -5.37397155531e-2f);
        p = fused(p, z, 1.33314422036e-1f);
        p = fused(p, z, -3.33332819422e-1f);
        y = fused(p * z, a, a);
    } else if (a < 10.0f) {
        y = fused(-2.0f, over_one_plus_exp(2.0f * a), 1.0f);
    } else if (a != a) {
        return x;
    }
    return bits_float(float_bits(y) | (float_bits(x) & 0x80000000u));
}

// ---------------------------------------------------------------- primitives in f32
F16LAB_FN float f_add(float a, float b) { return a + b; }
F16LAB_FN float f_sub(float a, float b) { return a - b; }
F16LAB_FN float f_mul(float a, float b) { return a * b; }
F16LAB_FN float f_div(float a, float b) { return a / b; }
F16LAB_FN float f_neg(float a) { return bits_float(float_bits(a) ^ 0x80000000u); }
F16LAB_FN float f_abs(float a) { return bits_float(float_bits(a) & 0x7FFFFFFFu); }
F16LAB_FN float f_max(float a, float b) { return a > b || a != a ? a : b; }
F16LAB_FN float f_min(float a, float b) { return a < b || a != a ? a : b; }
F16LAB_FN float f_sqrt(float a) { return sqrtf(a); }
F16LAB_FN float f_rsqrt(float a) { return 1.0f / sqrtf(a); }
F16LAB_FN float f_log(float a) { return logf(a); }
F16LAB_FN bool f_lt(float a, float b) { return a < b; }
F16LAB_FN bool f_le(float a, float b) { return a <= b; }
F16LAB_FN bool f_eq(float a, float b) { return a == b; }
F16LAB_FN bool f_kept(u32 noise, u32 limit) { return noise >= limit; }
F16LAB_FN float f_number(bool c) { return c ? 1.0f : 0.0f; }
F16LAB_FN float f_where(bool c, float a, float b) { return c ? a : b; }

// ---------------------------------------------------------------- primitives on two 16-bit numbers in one register
// Each result is rounded to P (f16 or bf16). A truth value is a mask: 0xFFFF in the half where it holds.
template <class P> F16LAB_FN float low(u32 h) { return read<P>((u16)h); }
template <class P> F16LAB_FN float high(u32 h) { return read<P>((u16)(h >> 16)); }
template <class P> F16LAB_FN u32 pair(float a, float b) { return write<P>(a) | (u32)write<P>(b) << 16; }
F16LAB_FN u32 mask(bool a, bool b) { return (a ? 0xFFFFu : 0u) | (b ? 0xFFFF0000u : 0u); }

#define F16LAB_PAIR1(NAME, F) \
    template <class P> F16LAB_FN u32 NAME(u32 a) { return pair<P>(F(low<P>(a)), F(high<P>(a))); }
#define F16LAB_PAIR2(NAME, F) \
    template <class P> F16LAB_FN u32 NAME(u32 a, u32 b) { \
        return pair<P>(F(low<P>(a), low<P>(b)), F(high<P>(a), high<P>(b))); \
    }
#define F16LAB_PAIR_TRUTH(NAME, F) \
    template <class P> F16LAB_FN u32 NAME(u32 a, u32 b) { \
        return mask(F(low<P>(a), low<P>(b)), F(high<P>(a), high<P>(b))); \
    }
F16LAB_PAIR2(h_add, f_add) F16LAB_PAIR2(h_sub, f_sub) F16LAB_PAIR2(h_mul, f_mul) F16LAB_PAIR2(h_div, f_div)
F16LAB_PAIR2(h_max, f_max) F16LAB_PAIR2(h_min, f_min)
F16LAB_PAIR1(h_sqrt, f_sqrt) F16LAB_PAIR1(h_rsqrt, f_rsqrt) F16LAB_PAIR1(h_exp, f_exp) F16LAB_PAIR1(h_log, f_log)
F16LAB_PAIR1(h_tanh, f_tanh) F16LAB_PAIR1(h_sigmoid, f_sigmoid)
F16LAB_PAIR_TRUTH(h_lt, f_lt) F16LAB_PAIR_TRUTH(h_le, f_le) F16LAB_PAIR_TRUTH(h_eq, f_eq)
#ifdef __CUDA_ARCH__  // one instruction for both halves; .rn keeps it from being contracted
template <> F16LAB_FN u32 h_add<F16>(u32 a, u32 b) { u32 y; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
template <> F16LAB_FN u32 h_sub<F16>(u32 a, u32 b) { u32 y; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
template <> F16LAB_FN u32 h_mul<F16>(u32 a, u32 b) { u32 y; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
#endif
template <class P> F16LAB_FN u32 h_neg(u32 a) { return a ^ 0x80008000u; }
template <class P> F16LAB_FN u32 h_abs(u32 a) { return a & 0x7FFF7FFFu; }
template <class P> F16LAB_FN u32 h_kept(u32 n0, u32 n1, u32 limit) { return mask(n0 >= limit, n1 >= limit); }
template <class P> F16LAB_FN u32 h_number(u32 m) { return m & (u32)(P::BIAS << P::MANT) * 0x10001u; }
template <class P> F16LAB_FN u32 h_where(u32 m, u32 a, u32 b) { return (m & a) | (~m & b); }
template <class P> F16LAB_FN u32 h_const(float c) { return pair<P>(c, c); }
// the one NaN that is written, sign kept
template <class P> F16LAB_FN u32 h_quiet(u32 a) {
    const u32 nan = P::NAN_CODE, inf = P::BEYOND, m = mask((a & 0x7FFFu) > inf, (a >> 16 & 0x7FFFu) > inf);
    return (m & ((a & 0x80008000u) | nan | nan << 16)) | (~m & a);
}
F16LAB_FN void take_pairs(u32* h, const void* p, i64 at, int n, bool whole) {
    const u16* q = (const u16*)p + at;
    if (whole && n == 8) {
        const Pack<u32, 4> in = *(const Pack<u32, 4>*)q;
#pragma unroll
        for (int k = 0; k < 4; ++k) h[k] = in.v[k];
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) h[k] = (2 * k < n ? (u32)q[2 * k] : 0u) | (2 * k + 1 < n ? (u32)q[2 * k + 1] << 16 : 0u);
    }
}
template <class P> F16LAB_FN void put_pairs(const u32* h, void* p, i64 at, int n, bool whole) {
    u16* q = (u16*)p + at;
    if (whole && n == 8) {
        Pack<u32, 4> out;
#pragma unroll
        for (int k = 0; k < 4; ++k) out.v[k] = h_quiet<P>(h[k]);
        *(Pack<u32, 4>*)q = out;
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) if (k < n) q[k] = (u16)(h_quiet<P>(h[k / 2]) >> (k % 2 ? 16 : 0));
    }
}
F16LAB_FN u32 one_pair(const void* p, i64 at) { const u32 c = ((const u16*)p)[at]; return c | c << 16; }

// ---------------------------------------------------------------- walking
// Groups of 8 columns, row by row, grid-stride: r, c of the group, the index of its first element, how many it has.
struct Walk {
    i64 r, c, rows, cols, step_rows, step_groups, groups;
    F16LAB_FN Walk(i64 rows, i64 cols, i64 first, i64 stride) : rows(rows), cols(cols) {
        groups = (cols + 7) / 8;
        if (groups == 0) { r = rows; c = step_rows = step_groups = 0; return; }
        if (rows == 1) { r = first < groups ? 0 : 1; c = first; step_rows = 0; step_groups = stride; return; }
        r = first / groups; c = first - r * groups;
        step_rows = stride / groups; step_groups = stride - step_rows * groups;
    }
    F16LAB_FN bool inside() const { return r < rows; }
    F16LAB_FN i64 column() const { return 8 * c; }
    F16LAB_FN i64 at() const { return r * cols + 8 * c; }
    F16LAB_FN int count() const { const i64 n = cols - 8 * c; return n < 8 ? (int)n : 8; }
    F16LAB_FN void next() {
        r += step_rows; c += step_groups;
        if (c >= groups) { c -= groups; ++r; }
    }
};

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define F16LAB_DEVICE __device__ __forceinline__
#else
#define F16LAB_DEVICE inline
#endif
// One number from the 32 of a warp: halves are added (compared) in a fixed order, all lanes get lane 0's result.
#define F16LAB_WARP(NAME, F) \
    F16LAB_DEVICE float NAME(float x) { \
        for (int d = 16; d; d /= 2) x = F(x, __shfl_down_sync(0xFFFFFFFFu, x, d)); \
        return __shfl_sync(0xFFFFFFFFu, x, 0); \
    }
F16LAB_WARP(warp_add, f_add)
F16LAB_WARP(warp_max, f_max)

}  // namespace f16lab
