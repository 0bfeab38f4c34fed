// embedding.cu: the gradient of a table of rows from the gradients of the rows that were looked up.
//
// Reference  f16lab.sum_kernels.table_gradient_plain
// Layout     g [N, C], out [rows, C], row-major. order [N]: positions in g sorted by row, stable, so that the tokens of a row
//            come in index order; starts [rows + 1]: where a row's tokens begin in it. A row of more than 64 tokens is cut into
//            pieces of 64; piece_starts [rows + 1]: where the pieces of a row begin among all of them (rows of at most 64 have
//            none); partials [pieces, C] in f32
// Launch     `pieces`, then `rows`: one warp for 32·V channels of a piece or row, grid-stride; any grid of 256-thread blocks
// Numerics   f32 sums that start from 0: the tokens of a piece in index order, the pieces of a row in index order, rounded once
//            to nearest or stochastically (index: row·C + channel): the bits of the reference
#include "sums.cuh"

using namespace f16lab;

#define PIECE 64
#define WARPS 8

// sums[k] += channel c + k of tokens from…to (at most 64), in order. Every lane of the warp takes part; several rows are on
// their way at a time (AHEAD), and where none is left the last is read again and not added.
template <class G, int V, int AHEAD>
__device__ __forceinline__ void add_tokens(const typename G::code* __restrict__ g, const i64* __restrict__ order, i64 from, i64 to,
                                           i64 C, i64 c, float* sums) {
    typedef Pack<typename G::code, V> In;
    const int lane = threadIdx.x % 32;
    for (i64 at = from; at < to; at += 32) {
        const int many = to - at < 32 ? (int)(to - at) : 32;
        const i64 mine = order[at + (lane < many ? lane : many - 1)] * C;
        for (int j = 0; j < many; j += AHEAD) {
            In in[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)  // lanes from `many` on name the last row
                in[u] = *(const In*)(g + __shfl_sync(0xFFFFFFFFu, mine, (j + u) % 32) + c);
#pragma unroll
            for (int u = 0; u < AHEAD; ++u)
                if (j + u < many)
#pragma unroll
                    for (int k = 0; k < V; ++k) sums[k] = __fadd_rn(sums[k], Wide<G>::read(in[u].v[k]));
        }
    }
}

// sums[k] += channel c + k of pieces from…to, in order
template <int V>
__device__ __forceinline__ void add_pieces(const float* __restrict__ partials, i64 from, i64 to, i64 C, i64 c, float* sums) {
    for (i64 piece = from; piece < to; piece += 4) {
        Pack<float, V> in[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) in[u] = *(const Pack<float, V>*)(partials + (piece + u < to ? piece + u : to - 1) * C + c);
#pragma unroll
        for (int u = 0; u < 4; ++u)
            if (piece + u < to)
#pragma unroll
                for (int k = 0; k < V; ++k) sums[k] = __fadd_rn(sums[k], in[u].v[k]);
    }
}

// The row that piece p belongs to: the last one whose pieces begin at p or before it, and that has some.
__device__ __forceinline__ i64 row_of(const i64* __restrict__ piece_starts, i64 rows, i64 p) {
    i64 low = 0, high = rows;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (piece_starts[middle] <= p) low = middle; else high = middle;
    }
    return low;
}

template <class G, int V>
__global__ void __launch_bounds__(256) pieces(const typename G::code* __restrict__ g, const i64* __restrict__ order,
                                              const i64* __restrict__ starts, const i64* __restrict__ piece_starts, i64 rows, i64 C,
                                              float* __restrict__ partials) {
    const i64 parts = (C + 32 * V - 1) / (32 * V), items = piece_starts[rows] * parts;
    for (i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32; item < items; item += (i64)gridDim.x * WARPS) {
        const i64 piece = item / parts, channel = (item % parts * 32 + threadIdx.x % 32) * V, c = channel < C ? channel : 0;
        const i64 row = row_of(piece_starts, rows, piece);
        const i64 from = starts[row] + (piece - piece_starts[row]) * PIECE, end = starts[row + 1];
        Pack<float, V> sums;
#pragma unroll
        for (int k = 0; k < V; ++k) sums.v[k] = 0.0f;
        enum { AHEAD = V * sizeof(typename G::code) > 16 ? 4 : 8 };
        add_tokens<G, V, AHEAD>(g, order, from, from + PIECE < end ? from + PIECE : end, C, c, sums.v);
        if (channel < C) *(Pack<float, V>*)(partials + piece * C + c) = sums;
    }
}

template <class G, class D, int V, bool DRAW>
__global__ void __launch_bounds__(256, 4) rows(const typename G::code* __restrict__ g, const i64* __restrict__ order,
                                               const i64* __restrict__ starts, const i64* __restrict__ piece_starts, i64 rows, i64 C,
                                               const float* __restrict__ partials, typename D::code* __restrict__ out, u32 ka) {
    const i64 parts = (C + 32 * V - 1) / (32 * V), items = rows * parts;
    for (i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32; item < items; item += (i64)gridDim.x * WARPS) {
        const i64 row = item / parts, channel = (item % parts * 32 + threadIdx.x % 32) * V, c = channel < C ? channel : 0;
        const i64 begin = piece_starts[row], end = piece_starts[row + 1], from = starts[row], to = starts[row + 1];
        float sums[V];
#pragma unroll
        for (int k = 0; k < V; ++k) sums[k] = 0.0f;
        if (begin == end) add_tokens<G, V, 4>(g, order, from, to, C, c, sums);
        else add_pieces<V>(partials, begin, end, C, c, sums);
        if (channel >= C) continue;  // a lane beyond the row's end has only kept company
        Pack<typename D::code, V> y;
        const u64 index = (u64)(row * C + c);
        Noise noise = {0, 0, 0};
        if (DRAW) noise.start(ka, index);
#pragma unroll
        for (int k = 0; k < V; ++k) y.v[k] = rounded<D, DRAW>(sums[k], noise, index + k);
        *(Pack<typename D::code, V>*)(out + row * C + c) = y;
    }
}
