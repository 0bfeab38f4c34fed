// cast.cu: any precision to any other, to nearest or stochastically, with exponent statistics of the result in the same pass.
//
// Reference  f16lab.precision.convert, f16lab.rounding.convert_stochastic
// Layout     flat arrays, any alignment; element i of the output has the global row-major index start + i
// Launch     grid-stride over groups of 8 elements: blocks of 256 threads, a few blocks per multiprocessor
// Numerics   conversions and integers only: equal to the reference bit for bit, whatever the launch shape
#include "ports.cuh"

using namespace f16lab;

// ---------------------------------------------------------------- statistics
// counts[0..255]: results by the exponent field of their f32 value (0: zeros and f32 subnormals; 255: infinities and NaN),
// counts[256]: zeros, counts[257]: infinities, counts[258]: NaN. amax_bits: f32 bits of the largest finite magnitude.
struct Tally {
    u32* bins;  // 8 copies of 260 in shared memory, one for each warp
    u32 top;
    F16LAB_FN void add(float y) {
#ifdef __CUDA_ARCH__
        u32 a = float_bits(y) & 0x7FFFFFFFu, e = a >> 23;
        atomicAdd(bins + e, 1u);
        if (a == 0) atomicAdd(bins + 256, 1u);
        else if (e == 255) atomicAdd(bins + (a == 0x7F800000u ? 257 : 258), 1u);
        else if (a > top) top = a;
#endif
    }
};

#define TALLY 260
#define WARPS 8

template <class C> using Eight = Pack<C, 8>;

template <class S, class D, bool DRAW>
F16LAB_FN typename D::code one(typename S::code c, u32 ka, u64 index, bool saturate) {
    const float v = Port<S>::read(c);
    return DRAW ? Port<D>::draw(v, noise_at(ka, index), saturate) : Port<D>::write(v, saturate);
}

template <class S, class D, bool DRAW, bool STATS>
__global__ void __launch_bounds__(256) cast(const typename S::code* __restrict__ x, typename D::code* __restrict__ y, i64 n,
                                            u32 ka, u64 start, int saturate, u64* counts, u32* amax_bits) {
    __shared__ u32 shared_bins[STATS ? WARPS * TALLY : 1];
    Tally tally = {shared_bins + (STATS ? threadIdx.x / 32 * TALLY : 0), 0u};
    if (STATS) {
        for (int i = threadIdx.x; i < WARPS * TALLY; i += blockDim.x) shared_bins[i] = 0;
        __syncthreads();
    }
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const bool aligned = ((u64)x % (8 * sizeof(typename S::code)) | (u64)y % (8 * sizeof(typename D::code))) == 0;
    const i64 groups = aligned ? n / 8 : 0;  // an odd alignment goes element by element
    for (i64 g = first; g < groups; g += stride) {
        const Eight<typename S::code> in = ((const Eight<typename S::code>*)x)[g];
        Eight<typename D::code> out;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            out.v[k] = one<S, D, DRAW>(in.v[k], ka, start + (u64)(8 * g + k), saturate != 0);
            if (STATS) tally.add(Port<D>::value(out.v[k]));
        }
        ((Eight<typename D::code>*)y)[g] = out;
    }
    for (i64 i = groups * 8 + first; i < n; i += stride) {
        y[i] = one<S, D, DRAW>(x[i], ka, start + (u64)i, saturate != 0);
        if (STATS) tally.add(Port<D>::value(y[i]));
    }
    if (!STATS) return;
    atomicMax(tally.bins + 259, tally.top);
    __syncthreads();
    for (int b = threadIdx.x; b < 259; b += blockDim.x) {
        u64 sum = 0;
        for (int w = 0; w < WARPS; ++w) sum += shared_bins[w * TALLY + b];
        if (sum) atomicAdd(counts + b, sum);
    }
    if (threadIdx.x < WARPS) atomicMax(amax_bits, shared_bins[threadIdx.x * TALLY + 259]);
}
