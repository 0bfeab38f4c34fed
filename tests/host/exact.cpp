// The quotients and roots of kernels/exact.cuh against the processor's own: how many differ. Build with -ffp-contract=off.
#include <cmath>
#include <cstring>
static int seed_off;  // ulp by which every rough seed is off
#define F16LAB_SEED seed_off
#include "exact.cuh"
using namespace f16lab;

static u64 state = 88172645463325252ull;
static u32 draw() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return (u32)(state >> 16); }
// sign, 23 random bits, an exponent in [low, high]
static float number(int low, int high) {
    return bits_float((draw() & 0x807FFFFFu) | (u32)(127 + low + (int)(draw() % (u32)(high - low + 1))) << 23);
}
static bool same(float a, float b) { return float_bits(a) == float_bits(b); }
static bool all_ones(float b) { return (float_bits(b) & 0x7FFFFFu) == 0x7FFFFFu; }
// a refined reciprocal is right whatever the seed, unless b's mantissa is all ones
static i64 wrong(float a, float b) {
    const bool asked = seed_off == 0 || !all_ones(b);
    return !same(divide(a, b, 1.0f / b), a / b) + (asked && !same(quotient(a, b), a / b));
}

extern "C" i64 wrong_roots(int seed, int exponent) {  // all mantissas of 2^exponent and the binade above
    i64 n = 0;
    seed_off = seed;
    for (u32 u = (u32)(127 + exponent) << 23, i = 0; i < 1u << 24; ++i)
        n += !same(root(bits_float(u + i)), sqrtf(bits_float(u + i)));
    return n + !same(root(0.0f), 0.0f);
}
extern "C" i64 wrong_near_two(int seed, int ulp) {  // b just below 2, where it is hardest: all mantissas of a
    i64 n = 0;
    seed_off = seed;
    for (u32 u = 0; u < 1u << 23; ++u) n += wrong(bits_float(0x3F800000u + u), bits_float(0x40000000u - (u32)ulp));
    return n;
}
extern "C" i64 wrong_quotients(int seed, i64 count) {  // anywhere where a step is regular, and signed zeros
    i64 n = 0;
    seed_off = seed;
    for (i64 i = 0; i < count; ++i)
        n += wrong(number(-92, 60), fabsf(number(-20, 32))) + wrong(i % 2 ? -0.0f : 0.0f, fabsf(number(-60, 32)));
    return n;
}
// Operands that have no place in the quick way must not give a finite number by accident.
extern "C" i64 finite_by_accident() {
    const float strange[] = {INFINITY, -INFINITY, NAN};
    i64 n = 0;
    for (float x : strange) {
        n += std::isfinite(divide(x, 0.3f, 1.0f / 0.3f)) + std::isfinite(quotient(x, 0.3f)) + std::isfinite(root(x));
        n += std::isfinite(quotient(1.0f, root(x))) + std::isfinite(quotient(3e38f, 1e-3f));
        n += std::isfinite(divide(-3e38f, 1e-3f, 1.0f / 1e-3f));
    }
    return n;
}
