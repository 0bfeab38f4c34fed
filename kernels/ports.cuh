// ports.cuh: how an array of each precision is read into f32 registers and written back.
//
// Reference  f16lab.cast.convert_recorded, f16lab.rounding.write_back
// Layout     a narrow element is its code (numbers.cuh), an f32 element is itself
// Numerics   as numbers.cuh: the bits of the reference
#pragma once
#include "numbers.cuh"

namespace f16lab {

struct F32 { typedef float code; enum { BITS = 32 }; };
template <class P> struct Port {
    static F16LAB_FN float read(typename P::code c) { return widen<P>(c); }
    static F16LAB_FN typename P::code write(float x, bool s) { return (typename P::code)narrow<P>(x, s); }
    static F16LAB_FN typename P::code draw(float x, u32 n, bool s) { return (typename P::code)stochastic<P>(x, n, s); }
    static F16LAB_FN float value(typename P::code c) { return widen<P>(c); }
};
template <> struct Port<F32> {
    static F16LAB_FN float quiet(float x) {
        u32 b = float_bits(x);
        return (b & 0x7FFFFFFFu) > 0x7F800000u ? bits_float((b & 0x80000000u) | 0x7FC00000u) : x;
    }
    static F16LAB_FN float read(float x) { return x; }
    static F16LAB_FN float write(float x, bool) { return quiet(x); }
    static F16LAB_FN float draw(float x, u32, bool) { return quiet(x); }
    static F16LAB_FN float value(float x) { return x; }
};

template <class C, int N> struct alignas(N * sizeof(C)) Pack { C v[N]; };

}  // namespace f16lab
