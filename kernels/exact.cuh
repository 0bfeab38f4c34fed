// exact.cuh: quotients and roots with one rounding, made of a rough seed and fused steps.
//
// Purpose    what `/` and sqrtf give, without their branches: several of them can be in flight at once
// Reference  IEEE division and square root in f32, to nearest
// Numerics   equal bit for bit where the comments say so; outside of it the result may be wrong, but an infinite or NaN operand and
//            an overflow give NaN or infinity, never a finite number. A kernel looks at its result and takes `/` and sqrtf then.
//            Checked: roots for all 2^24 mantissas and seeds 3 ulp off; see tests/test_exact_host.py.
#pragma once
#include "numbers.cuh"

#ifndef F16LAB_SEED
#define F16LAB_SEED 0  // tests put the host's seeds off by so many ulp: a GPU's are up to 1 ulp off
#endif

namespace f16lab {

F16LAB_FN float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return ::fmaf(a, b, c);
#endif
}

F16LAB_FN float times(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

F16LAB_FN float rough_reciprocal(float b) {
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    return r;
#else
    return bits_float(float_bits(1.0f / b) + F16LAB_SEED);
#endif
}

F16LAB_FN float rough_reciprocal_root(float w) {
#ifdef __CUDA_ARCH__
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(w));
    return r;
#else
    return bits_float(float_bits((float)(1.0 / sqrt((double)w))) + F16LAB_SEED);
#endif
}

// One step from q towards a/b, r being 1/b. The remainder is taken with its sign turned so that the quotient of a -0 stays -0.
F16LAB_FN float nearer(float q, float a, float b, float r) { return fused(fused(q, b, -a), -r, q); }

// a/b with r = 1/b rounded to nearest (Brisebarre, Muller and Raina 2004: always the rounded quotient).
// For b in [2^-60, 2^60] and a = 0 or 2^-92 <= |a|, unless the quotient is below 2^-125.
F16LAB_FN float divide(float a, float b, float r) { return nearer(times(a, r), a, b, r); }

// a/b, as above. Two Newton steps give 1/b rounded, but for a b whose mantissa bits are all ones, where the seed must be right already;
// a GPU's is, as its own division goes the same way from it.
F16LAB_FN float quotient(float a, float b) {
    float r = rough_reciprocal(b);
    r = fused(fused(-b, r, 1.0f), r, r);
    r = fused(fused(-b, r, 1.0f), r, r);
    return divide(a, b, r);
}

// √w for w = 0 or 2^-92 <= w < 2^126
F16LAB_FN float root(float w) {
    float r = rough_reciprocal_root(w + 1.1754943508e-38f);  // + 2^-126: 0 gets a finite seed, all else stays what it is
    float g = times(w, r), h = times(0.5f, r);
    const float e = fused(-h, g, 0.5f);
    h = fused(h, e, h);
    g = fused(g, e, g);
    return fused(fused(-g, g, w), h, g);
}

}  // namespace f16lab
