// accumulate.cu: buffer += gradient, each sum rounded once to the precision of the buffer.
//
// Reference  f16lab.sum_kernels.accumulate_plain
// Layout     buffer, g: flat, n elements each, any alignment (8 elements at a time where it allows); element i has the
//            row-major index start + i in its tensor
// Launch     grid-stride over groups of 8 elements; any grid of blocks of 256 threads
// Numerics   one f32 addition, then to nearest or stochastically: the bits of the reference
#include "sums.cuh"

using namespace f16lab;

template <class B, class G, bool DRAW>
F16LAB_FN typename B::code plus(typename B::code b, typename G::code g, Noise& noise, u64 index) {
    return rounded<B, DRAW>(Wide<B>::read(b) + Wide<G>::read(g), noise, index);
}

template <class B, class G, bool DRAW>
__global__ void __launch_bounds__(256, 8) accumulate(typename B::code* __restrict__ buffer, const typename G::code* __restrict__ g,
                                                  i64 n, u32 ka, u64 start) {
    typedef Pack<typename B::code, 8> Sums;
    typedef Pack<typename G::code, 8> Grads;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const i64 packs = aligned_to<sizeof(Sums)>(buffer) && aligned_to<sizeof(Grads)>(g) ? n / 8 : 0;
    Noise noise = {0, 0, 0};
    if (DRAW) noise.start(ka, start);
    for (i64 i = first; i < packs; i += stride) {
        Sums sums = ((const Sums*)buffer)[i];
        const Grads more = ((const Grads*)g)[i];
#pragma unroll
        for (int k = 0; k < 8; ++k) sums.v[k] = plus<B, G, DRAW>(sums.v[k], more.v[k], noise, start + (u64)(8 * i + k));
        ((Sums*)buffer)[i] = sums;
    }
    for (i64 i = packs * 8 + first; i < n; i += stride) buffer[i] = plus<B, G, DRAW>(buffer[i], g[i], noise, start + (u64)i);
}
