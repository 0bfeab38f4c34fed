// from_master.cu: 16-bit weights made again from their f32 masters, with the noise of each tensor's last update.
//
// Reference  f16lab.groups.reround, f16lab.sum_kernels.reround_plain
// Layout     master, out: flat buffers [blocks, 1024], every tensor starting with a new block; a block has its key, the index
//            of its first element in its tensor, and whether its tensor is fresh (never updated: rounded to nearest)
// Launch     blocks of 256 threads, four elements a thread; grid-stride over the 1024-element blocks, one launch a group
// Numerics   conversions and integers: the bits of the reference
#include "sums.cuh"

using namespace f16lab;

template <class P, bool DRAW>
__global__ void __launch_bounds__(256) from_master(const float* __restrict__ master, typename P::code* __restrict__ out, i64 blocks,
                                                   const u32* keys, const i64* first, const u8* fresh) {
    for (i64 b = blockIdx.x; b < blocks; b += gridDim.x) {
        const i64 at = b * 1024 + threadIdx.x * 4;
        const Pack<float, 4> x = *(const Pack<float, 4>*)(master + at);
        Pack<typename P::code, 4> y;
        const bool draw = DRAW && !fresh[b];
        const u64 index = draw ? (u64)(first[b] + threadIdx.x * 4) : 0;
        Noise noise = {0, 0, 0};
        if (draw) noise.start(keys[b], index);
#pragma unroll
        for (int k = 0; k < 4; ++k) y.v[k] = draw ? rounded<P, DRAW>(x.v[k], noise, index + k) : Port<P>::write(x.v[k], false);
        *(Pack<typename P::code, 4>*)(out + at) = y;
    }
}
