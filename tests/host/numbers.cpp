// The device functions of kernels/numbers.cuh over arrays, built for the host so that they can be compared with the reference.
#include "numbers.cuh"
using namespace f16lab;

template <class P> static void narrow_all(const float* x, u32* out, i64 n, int saturate) {
    for (i64 i = 0; i < n; ++i) out[i] = narrow<P>(x[i], saturate != 0);
}
template <class P> static void stochastic_all(const float* x, const u32* noise, u32* out, i64 n, int saturate) {
    for (i64 i = 0; i < n; ++i) out[i] = stochastic<P>(x[i], noise[i], saturate != 0);
}
template <class P> static void widen_all(const u32* codes, float* out, i64 n) {
    for (i64 i = 0; i < n; ++i) out[i] = widen<P>(codes[i]);
}

#define EXPORT(NAME, P) \
    extern "C" void narrow_##NAME(const float* x, u32* out, i64 n, int s) { narrow_all<P>(x, out, n, s); } \
    extern "C" void stochastic_##NAME(const float* x, const u32* k, u32* out, i64 n, int s) { stochastic_all<P>(x, k, out, n, s); } \
    extern "C" void widen_##NAME(const u32* c, float* out, i64 n) { widen_all<P>(c, out, n); }
EXPORT(f16, F16)
EXPORT(bf16, BF16)
EXPORT(e5m2, E5M2)
EXPORT(e4m3, E4M3)

extern "C" void noise_all(u32 ka, u64 start, u32* out, i64 n) {
    for (i64 i = 0; i < n; ++i) out[i] = noise_at(ka, start + (u64)i);
}
extern "C" u32 key(u32 seed, u32 step, u32 purpose, u32 micro, u32 id) { return noise_key(seed, step, purpose, micro, id); }
