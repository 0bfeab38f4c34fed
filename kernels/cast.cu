// cast.cu: any precision to any other, to nearest or stochastically, with exponent statistics of the result in the same pass.
//
// Reference  f16lab.precision.convert, f16lab.rounding.convert_stochastic
// Layout     flat arrays, any alignment; element i of the output has the global row-major index start + i
// Launch     grid-stride over tiles: blocks of 256 threads, a few blocks per multiprocessor. A thread takes 16 bytes of the wider
//            array at a time and has a few such loads in flight
// Numerics   conversions and integers only: equal to the reference bit for bit, whatever the launch shape. The quick way
//            (lanes.cuh) covers finite numbers that do not overflow; a thread that meets others takes them one by one
#include "lanes.cuh"

using namespace f16lab;

#define WARPS 8

template <class S, class D, bool DRAW>
F16LAB_FN typename D::code one(typename S::code c, u32 ka, u64 index, bool saturate) {
    const float v = Port<S>::read(c);
    return DRAW ? Port<D>::draw(v, noise_at(ka, index), saturate) : Port<D>::write(v, saturate);
}

// ---------------------------------------------------------------- statistics
// counts[0..255]: results by the exponent field of their f32 value (0: zeros and f32 subnormals; 255: infinities and NaN),
// counts[256]: zeros, counts[257]: infinities, counts[258]: NaN. amax_bits: f32 bits of the largest finite magnitude.
// A warp has 256 bins of its own; what is rare is counted by the thread and subtracted in the end.
struct Tally {
    u32* bins;           // all warps' bins, in shared memory
    u32 warp;            // 256 · number of the warp
    float top;           // largest finite magnitude so far
    u32 subnormal, inf;
    __device__ __forceinline__ void note(u32 exponent) { atomicAdd(bins + (warp | exponent), 1u); }
    __device__ __forceinline__ void add(float y) {
        const u32 a = float_bits(y) & 0x7FFFFFFFu;
        note(a >> 23);
        subnormal += a - 1 < 0x007FFFFFu;
        inf += a == 0x7F800000u;
        top = a < 0x7F800000u && bits_float(a) > top ? bits_float(a) : top;
    }
};

// The exponents of two finite results, and the largest of them.
template <class D> struct Exponents {
    enum { SUBNORMAL = 0 };  // whether a result can be subnormal as an f32 number
    static __device__ __forceinline__ void note(Tally& t, const u32* w, int i) {
        const float lo = Lane<D>::get(w, i), hi = Lane<D>::get(w, i + 1);
        t.note(float_bits(lo) >> 23 & 255u);
        t.note(float_bits(hi) >> 23 & 255u);
        t.top = fmaxf(fmaxf(t.top, fabsf(lo)), fabsf(hi));
    }
};
template <> struct Exponents<F32> {
    enum { SUBNORMAL = 1 };
    static __device__ __forceinline__ void note(Tally& t, const u32* w, int i) {
        for (int j = i; j < i + 2; ++j) { t.note(w[j] >> 23 & 255u); t.top = fmaxf(t.top, fabsf(bits_float(w[j]))); }
    }
};
template <> struct Exponents<BF16> {
    enum { SUBNORMAL = 1 };
    static __device__ __forceinline__ void note(Tally& t, const u32* w, int i) {
        const u32 up = w[i / 2] * 2;  // the exponents fill bytes 1 and 3
#ifdef __CUDA_ARCH__
        atomicAdd(t.bins + __byte_perm(up, t.warp, 0x7651), 1u);
        atomicAdd(t.bins + __byte_perm(up, t.warp, 0x7653), 1u);
#else
        t.note(up >> 8 & 255u);
        t.note(up >> 24);
#endif
        // the other number's bits below do not matter: they are cut off in the end
        t.top = fmaxf(fmaxf(t.top, fabsf(bits_float(w[i / 2]))), fabsf(bits_float(w[i / 2] << 16)));
    }
};

template <class D> F16LAB_FN float cut(float top) { return top; }
template <> F16LAB_FN float cut<BF16>(float top) { return bits_float(float_bits(top) & 0xFFFF0000u); }

// ---------------------------------------------------------------- N elements of a thread
template <class S, class D, bool DRAW> struct Hand {
    enum { WIDE = (int)S::BITS > (int)D::BITS ? (int)S::BITS : (int)D::BITS, N = 128 / WIDE };
    enum { TURNS = N == 16 || (D::BITS == 8 && DRAW) ? 1 : 4, TILE = 256 * TURNS * N };
};
template <class D> F16LAB_FN float largest() { return D::BITS == 8 ? widen<D>((u32)D::TOP) : 0; }
template <> F16LAB_FN float largest<F32>() { return 0; }

// Rounds `in` into `out`; true unless a number was large, infinite or NaN: then `out` is not to be used. m: first product of the hash.
template <class S, class D, bool DRAW, bool STATS, int N>
__device__ __forceinline__ bool quick(const Lanes<S, N>& in, Lanes<D, N>& out, u32 m, u32 kb, float weight, bool saturate,
                                      u32 one, Tally& tally) {
    float fine = 0, small = 1, most = 0;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const float lo = Lane<S>::get(in.w, i), hi = Lane<S>::get(in.w, i + 1);
        fine = watch(watch(fine, lo, weight), hi, weight);
        if (D::BITS == 8) most = fmaxf(most, fmaxf(fabsf(lo), fabsf(hi)));
        if (DRAW) {
            const u32 a = noise_mix(noise_fold(noise_mix(m + i * POSITION, one)) * POSITION + kb, one);
            const u32 b = noise_mix(noise_fold(noise_mix(m + (i + 1) * POSITION, one)) * POSITION + kb, one);
            Lane<D>::draw(out.w, i, lo, hi, a, b, saturate);
        } else Lane<D>::write(out.w, i, lo, hi, saturate);
        if (STATS && Exponents<D>::SUBNORMAL) small = fminf(small, fminf(fabsf(lo), fabsf(hi)));
    }
    if (!finite(fine) || (D::BITS == 8 && !saturate && most > largest<D>())) return false;
    if (STATS) {
#pragma unroll
        for (int i = 0; i < N; i += 2) Exponents<D>::note(tally, out.w, i);
        if (Exponents<D>::SUBNORMAL && small < 1.1754943508e-38f)
            for (int i = 0; i < N; ++i) tally.subnormal += (float_bits(Lane<D>::get(out.w, i)) & 0x7FFFFFFFu) - 1 < 0x007FFFFFu;
    }
    return true;
}

template <class S, class D, bool DRAW, bool STATS>
__global__ void __launch_bounds__(256, 5) cast(const typename S::code* __restrict__ x, typename D::code* __restrict__ y, i64 n,
                                            u32 ka, u64 start, int saturate, u64* counts, u32* amax_bits) {
    const int N = Hand<S, D, DRAW>::N, TURNS = Hand<S, D, DRAW>::TURNS;
    const i64 TILE = Hand<S, D, DRAW>::TILE;
    __shared__ u32 bins[STATS ? WARPS * 256 : 1];
    __shared__ u32 rare[3];  // f32 subnormals, infinities; bits of the largest magnitude
    Tally tally = {bins, threadIdx.x / 32 * 256, 0, 0, 0};
    if (STATS) {
        for (int i = threadIdx.x; i < WARPS * 256; i += blockDim.x) bins[i] = 0;
        if (threadIdx.x < 3) rare[threadIdx.x] = 0;
        __syncthreads();
    }
    const float weight = watch_weight<D>(DRAW || STATS || saturate);
    const u32 unit = gridDim.y;  // 1, which the compiler does not know
    const bool aligned = ((u64)x % sizeof(Lanes<S, N>) | (u64)y % sizeof(Lanes<D, N>)) == 0;
    const i64 tiles = aligned ? n / TILE : 0;  // an odd alignment goes element by element
    u32 high = (u32)(start >> 32), kb = squirrel_noise5(high, ka);
    for (i64 t = blockIdx.x; t < tiles; t += gridDim.x) {
        const i64 at = t * TILE + threadIdx.x * N;
        Lanes<S, N> in[TURNS];
#pragma unroll
        for (int k = 0; k < TURNS; ++k) in[k] = *(const Lanes<S, N>*)(x + at + k * 256 * N);
        const u64 index = start + (u64)(t * TILE);
        const bool crosses = DRAW && (u32)index > 0xFFFFFFFFu - (u32)(TILE - 1);  // the upper half of the index changes in here
        if (DRAW && (u32)(index >> 32) != high) { high = (u32)(index >> 32); kb = squirrel_noise5(high, ka); }
        const u32 m = ((u32)index + threadIdx.x * N) * POSITION + ka;
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
            const i64 from = at + k * 256 * N;
            Lanes<D, N> out = {};
            if (!crosses && quick<S, D, DRAW, STATS, N>(in[k], out, m + k * 256 * N * POSITION, kb, weight, saturate != 0, unit, tally)) {
                *(Lanes<D, N>*)(y + from) = out;
                continue;
            }
#pragma unroll 1
            for (i64 i = from; i < from + N; ++i) {
                y[i] = one<S, D, DRAW>(x[i], ka, start + (u64)i, saturate != 0);
                if (STATS) tally.add(Port<D>::value(y[i]));
            }
        }
    }
    for (i64 i = tiles * TILE + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        y[i] = one<S, D, DRAW>(x[i], ka, start + (u64)i, saturate != 0);
        if (STATS) tally.add(Port<D>::value(y[i]));
    }
    if (!STATS) return;
    atomicAdd(rare, tally.subnormal);
    atomicAdd(rare + 1, tally.inf);
    atomicMax(rare + 2, float_bits(cut<D>(tally.top)));
    __syncthreads();
    u64 sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += bins[w * 256 + threadIdx.x];
    if (sum) atomicAdd(counts + threadIdx.x, sum);
    if (threadIdx.x == 0) {
        atomicAdd(counts + 256, sum - rare[0]);
        atomicMax(amax_bits, rare[2]);
    }
    if (threadIdx.x == 255 && sum) {
        atomicAdd(counts + 257, (u64)rare[1]);
        atomicAdd(counts + 258, sum - rare[1]);
    }
}
