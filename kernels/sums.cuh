// sums.cuh: what the summing kernels share: reading, noise of neighbouring elements, packed loads.
//
// Reference  f16lab.precision.convert (widening), f16lab.rounding.noise
// Numerics   exact widenings and integers: the bits of the reference; of a NaN only that it is one
#pragma once
#include "ports.cuh"

namespace f16lab {

struct F64 { typedef double code; enum { BITS = 64 }; };

// An element in the registers it is summed in.
template <class P> struct Wide {
    typedef float type;
    static F16LAB_FN float read(typename P::code c) { return Port<P>::read(c); }
};
template <> struct Wide<F64> {
    typedef double type;
    static F16LAB_FN double read(double x) { return x; }
};
template <> struct Wide<F16> {
    typedef float type;
    static F16LAB_FN float read(u16 c) { return f16_value(c); }
};

// noise_at for many indices under one key: the hash of the high half is kept while it stays the same.
struct Noise {
    u32 ka, high, kb;
    F16LAB_FN void start(u32 key, u64 index) { ka = key; high = (u32)(index >> 32); kb = squirrel_noise5(high, ka); }
    F16LAB_FN u32 at(u64 index) {
        if ((u32)(index >> 32) != high) start(ka, index);
        return squirrel_noise5(squirrel_noise5((u32)index, ka), kb);
    }
};

// x in P, to nearest or, with DRAW, by the noise of its index
template <class P, bool DRAW> F16LAB_FN typename P::code rounded(float x, Noise& noise, u64 index) {
    return DRAW ? Port<P>::draw(x, noise.at(index), false) : Port<P>::write(x, false);
}

template <int N> F16LAB_FN bool aligned_to(const void* p) { return (u64)p % N == 0; }

}  // namespace f16lab
