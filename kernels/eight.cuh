// eight.cuh: eight neighbouring numbers of a row, kept packed in registers until they are needed.
//
// Purpose    what kernels at memory speed share: loads and stores of 16 bytes (32 for f32), two numbers rounded by one instruction
// Reference  f16lab.precision.convert
// Layout     Eight<P>: eight numbers of F16, BF16 or F32 as they lie in memory, in 4 or 8 words
// Numerics   the bits of Port<P>; the device's own conversions round to nearest even and keep subnormals, and a NaN is mended after
#pragma once
#include "ports.cuh"

namespace f16lab {

template <class P> struct alignas(P::BITS) Eight { u32 w[P::BITS / 4]; };  // eight numbers of BITS bits are BITS bytes

// Number k in f32; k is a constant once the loop around it is unrolled.
template <class P> F16LAB_FN float number(const Eight<P>& e, int k) {
    if (P::BITS == 32) return bits_float(e.w[k]);
    const u32 word = e.w[k / 2];
    if (P::BIAS == 15) return f16_value((u16)(k % 2 ? word >> 16 : word));
    return bits_float(k % 2 ? word & 0xFFFF0000u : word << 16);
}
template <> F16LAB_FN float number<F32>(const Eight<F32>& e, int k) { return bits_float(e.w[k]); }

// The numbers v rounded to P.
template <class P> F16LAB_FN Eight<P> packed(const float (&v)[8]) {
    Eight<P> e;
#ifdef __CUDA_ARCH__
    bool strange = false;  // a NaN, whose code the instruction below does not write as we do
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (P::BIAS == 15) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(e.w[k]) : "f"(v[2 * k + 1]), "f"(v[2 * k]));
        else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(e.w[k]) : "f"(v[2 * k + 1]), "f"(v[2 * k]));
        strange |= !(v[2 * k] <= v[2 * k + 1] || v[2 * k] > v[2 * k + 1]);
    }
    if (!strange) return e;
#endif
    for (int k = 0; k < 4; ++k) e.w[k] = narrow<P>(v[2 * k]) | narrow<P>(v[2 * k + 1]) << 16;
    return e;
}
template <> F16LAB_FN Eight<F32> packed<F32>(const float (&v)[8]) {
    Eight<F32> e;
#pragma unroll
    for (int k = 0; k < 8; ++k) e.w[k] = float_bits(Port<F32>::quiet(v[k]));
    return e;
}

// `count` numbers from p on, zeros behind them. WHOLE: the address suits a packed load, and count is 0 or 8.
template <class P, bool WHOLE> F16LAB_FN Eight<P> load8(const typename P::code* p, int count) {
    Eight<P> e;
#pragma unroll
    for (int k = 0; k < P::BITS / 4; ++k) e.w[k] = 0;
    if (WHOLE) {
        if (count > 0) e = *(const Eight<P>*)p;
        return e;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k)
        if (k < count) {
            if (P::BITS == 32) e.w[k] = ((const u32*)p)[k];
            else e.w[k / 2] |= (u32)((const u16*)p)[k] << (k % 2 ? 16 : 0);
        }
    return e;
}

template <class P, bool WHOLE> F16LAB_FN void store8(typename P::code* p, const Eight<P>& e, int count) {
    if (WHOLE) {
        if (count > 0) *(Eight<P>*)p = e;
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k)
        if (k < count) {
            if (P::BITS == 32) ((u32*)p)[k] = e.w[k];
            else ((u16*)p)[k] = (u16)(e.w[k / 2] >> (k % 2 ? 16 : 0));
        }
}

}  // namespace f16lab
