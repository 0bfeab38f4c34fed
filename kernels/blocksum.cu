// blocksum.cu: f64 sums of values or squares over consecutive blocks of 1024 elements, in one fixed order of addition.
//
// Reference  f16lab.sum_kernels.fold_blocks
// Layout     x: flat, n elements, any alignment (16-byte loads where it allows); sums: one f64 a block; the last block is
//            filled up with zeros
// Launch     one warp a block of elements, grid-stride; any grid. The sums of a large tensor are summed by the same kernel
//            (F64) until one is left
// Numerics   values and squares exact in f64 (squares of up to 24-bit numbers), sums by halves: x[i] + x[i + 512], of these
//            i + 256, … down to 1. A tree that depends on n alone, so the bits are the reference's, NaN payloads aside. A sum
//            is finite exactly when all its elements are: squares of f32 cannot overflow f64.
#include "sums.cuh"

using namespace f16lab;

#define BLOCK 1024
#define WARPS 8

template <class P, bool SQUARE> F16LAB_FN double term(typename P::code c) {
    const double x = (double)Wide<P>::read(c);
    return SQUARE ? x * x : x;
}

// Halving of J packs that lie 1024/J elements apart: packs j, j + STEP, j + 2·STEP, … of element k
template <class P, bool SQUARE, int V, int J, int STEP> struct Halves {
    static F16LAB_FN double sum(const Pack<typename P::code, V>* in, int j, int k) {
        return Halves<P, SQUARE, V, J, 2 * STEP>::sum(in, j, k) + Halves<P, SQUARE, V, J, 2 * STEP>::sum(in, j + STEP, k);
    }
};
template <class P, bool SQUARE, int V, int J> struct Halves<P, SQUARE, V, J, J> {
    static F16LAB_FN double sum(const Pack<typename P::code, V>* in, int j, int k) { return term<P, SQUARE>(in[j].v[k]); }
};

// Halving of the 32·V sums of a warp, element V·lane + k being s[k] of a lane. While a lane has several, it gives half of
// them away and gets as many; in the end the bits of k sit in the upper bits of the lane.
template <int V> __device__ __forceinline__ double across(double* s, int lane) {
    int bit = 16;
#pragma unroll
    for (int c = V / 2; c; c /= 2, bit /= 2) {
        const bool upper = lane & bit;
#pragma unroll
        for (int k = 0; k < c; ++k) {
            const double mine = upper ? s[k + c] : s[k], other = upper ? s[k] : s[k + c];
            s[k] = mine + __shfl_xor_sync(0xFFFFFFFFu, other, bit);
        }
    }
    double x = s[0];
#pragma unroll
    for (; bit; bit /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, bit);
    bit = 16;
#pragma unroll
    for (int c = V / 2; c; c /= 2, bit /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, bit);
    return x;
}

template <class P, bool SQUARE>
__global__ void __launch_bounds__(256, 4) blocksum(const typename P::code* __restrict__ x, double* __restrict__ sums, i64 n) {
    typedef typename P::code code;
    enum { V = 16 / sizeof(code), J = BLOCK / (32 * V) };
    const int lane = threadIdx.x % 32;
    const i64 blocks = (n + BLOCK - 1) / BLOCK, stride = (i64)gridDim.x * WARPS;
    const bool packed = aligned_to<16>(x);
    for (i64 b = (i64)blockIdx.x * WARPS + threadIdx.x / 32; b < blocks; b += stride) {
        const i64 at = b * BLOCK + lane * V;
        Pack<code, V> in[J];
        if (packed && (b + 1) * BLOCK <= n) {
#pragma unroll
            for (int j = 0; j < J; ++j) in[j] = *(const Pack<code, V>*)(x + at + j * 32 * V);
        } else {
#pragma unroll
            for (int j = 0; j < J; ++j)
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const i64 i = at + j * 32 * V + k;
                    in[j].v[k] = i < n ? x[i] : (code)0;
                }
        }
        double s[V];
#pragma unroll
        for (int k = 0; k < V; ++k) s[k] = Halves<P, SQUARE, V, J, 1>::sum(in, 0, k);
        const double total = across<V>(s, lane);
        if (lane == 0) sums[b] = total;
    }
}
