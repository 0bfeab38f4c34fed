// columns.cu: sums of the columns of a matrix, and three matrices side by side.
//
// Reference  f16lab.column_kernels.column_sums_plain, f16lab.column_kernels.side_by_side_plain
// Layout     x [rows, columns], columns a multiple of 8; parts [rows, words] of 16-byte words
// Launch     blocks of 256 threads. column_sums: 256 columns and `chunk` rows at a time; a second launch adds the chunks.
// Numerics   f32. Of a chunk warp w adds rows w, w + 8, w + 16 … in order, then the eight warps are added in order, then the chunks:
//            one order for any number of blocks, that of the reference, with its bits. side_by_side moves bytes.
#include "eight.cuh"
#include "ports.cuh"

using namespace f16lab;

#define WARPS 8

template <class P>
__global__ void __launch_bounds__(256) column_sums(const typename P::code* x, float* out, i64 rows, i64 columns, i64 chunk) {
    __shared__ float shared[WARPS][256];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 tiles = (columns + 255) / 256, chunks = (rows + chunk - 1) / chunk;
    for (i64 job = blockIdx.x; job < tiles * chunks; job += gridDim.x) {
        const i64 column = job % tiles * 256, first = job / tiles * chunk, mine = column + lane * 8;
        const i64 end = first + chunk < rows ? first + chunk : rows;
        float sum[8] = {0};
        if (mine < columns) {
            const typename P::code* p = x + (first + warp) * columns + mine;
#pragma unroll 4
            for (i64 r = first + warp; r < end; r += WARPS, p += WARPS * columns) {
                const Eight<P> v = load8<P, true>(p, 8);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += number<P>(v, i);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) shared[warp][lane * 8 + i] = sum[i];
        __syncthreads();
        if (column + threadIdx.x < columns) {
            float total = shared[0][threadIdx.x];
            for (int w = 1; w < WARPS; ++w) total += shared[w][threadIdx.x];
            out[job / tiles * columns + column + threadIdx.x] = total;
        }
        __syncthreads();
    }
}

// out[row] = a[row], b[row], c[row]; a warp takes a row.
__global__ void __launch_bounds__(256) side_by_side(const Pack<u32, 4>* a, const Pack<u32, 4>* b, const Pack<u32, 4>* c, Pack<u32, 4>* out,
                                                    i64 rows, int words) {
    const int lane = threadIdx.x % 32;
    for (i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32; row < rows; row += (i64)gridDim.x * WARPS) {
        const i64 from = row * words, to = row * 3 * words;
#pragma unroll 4
        for (int j = lane; j < 3 * words; j += 32) {
            const int part = (j >= words) + (j >= 2 * words);
            const Pack<u32, 4>* p = part == 0 ? a : part == 1 ? b : c;
            out[to + j] = p[from + j - part * words];
        }
    }
}
