// layernorm.cu: LayerNorm and RMSNorm of rows, alone or of a residual sum that is taken on the way, and their backward.
//
// Reference  f16lab.rows.LAYER_NORM, RMS_NORM, residual_layer_norm
// Layout     x, r, y, n, g [rows, width], row after row, any alignment; w, b [width]; mean, rstd f32 [rows];
//            parts f32 [chunks, 2, width]: the sums of g·(x - mean)·rstd and of g over the rows of a chunk
// Launch     GROUP threads share a row and keep it in registers, PACKS times eight numbers each: width <= 8·GROUP·PACKS, or with
//            LONG any width, read again in each pass. Blocks of 256 threads stride over the rows; in the backward blocks of 128 (256
//            for GROUP 256) over the chunks. WHOLE: width and addresses suit loads of eight numbers.
// Numerics   f32 inside. y = x + r is rounded to its precision, and the norm is that of the rounded sum. Mean first, then the sum of
//            squared distances. A thread adds its numbers in order, threads by a tree of fixed shape, so a row's sums depend on
//            nothing but the row. dw and db: threads add the rows of a chunk in order, then row groups in order, then chunks in a
//            fixed order; chunks are cut by the number of rows alone. One rounding of each output, but where a later gradient of y
//            is added: dx is rounded to the precision of y first, as autograd does, then the sum.
#include "eight.cuh"

using namespace f16lab;

// The sum of x over the threads of a row, in each of them. shared: one number for each warp of the block.
template <int GROUP> __device__ __forceinline__ float row_total(float x, float* shared) {
#pragma unroll
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, d);
    if (GROUP == 32) return x;
    const int warp = threadIdx.x / 32;
    __syncthreads();  // what was there has been read
    if (threadIdx.x % 32 == 0) shared[warp] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int i = 0; i < GROUP / 32; ++i) x += shared[warp / (GROUP / 32) * (GROUP / 32) + i];
    return x;
}

// Two sums at once.
template <int GROUP> __device__ __forceinline__ float2 row_totals(float2 x, float2* shared) {
#pragma unroll
    for (int d = 16; d; d /= 2) {
        x.x += __shfl_xor_sync(0xFFFFFFFFu, x.x, d);
        x.y += __shfl_xor_sync(0xFFFFFFFFu, x.y, d);
    }
    if (GROUP == 32) return x;
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[warp] = x;
    __syncthreads();
    x.x = x.y = 0;
#pragma unroll
    for (int i = 0; i < GROUP / 32; ++i) {
        const float2 part = shared[warp / (GROUP / 32) * (GROUP / 32) + i];
        x.x += part.x;
        x.y += part.y;
    }
    return x;
}

// Where a thread's packs of eight lie in a row of which `width` numbers count (0: a row beyond the last).
template <int GROUP> struct Place {
    int lane, width;
    F16LAB_FN int column(int pack) const { return (pack * GROUP + lane) * 8; }
    F16LAB_FN int count(int pack) const {
        const int left = width - column(pack);
        return left < 0 ? 0 : left < 8 ? left : 8;
    }
};

// n = (x - mean)·rstd·w + b, or with SUM that of y = x + r. RMS: mean = 0.
template <class X, class R, class Y, class W, class N, bool SUM, bool RMS, int GROUP, int PACKS, bool LONG, bool WHOLE>
__global__ void __launch_bounds__(256)
    norm_forward(const typename X::code* __restrict__ x, const typename R::code* __restrict__ r, typename Y::code* y,
                 const typename W::code* __restrict__ w, const typename W::code* __restrict__ b, typename N::code* __restrict__ n,
                 float* __restrict__ means, float* __restrict__ rstds, i64 rows, int width, float eps) {
    enum { ROWS = 256 / GROUP };
    __shared__ float shared[8];
    const int lane = threadIdx.x % GROUP, sheets = LONG ? (width + 8 * GROUP * PACKS - 1) / (8 * GROUP * PACKS) : 1;
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / GROUP, at = row * width;
        const Place<GROUP> place = {lane, row < rows ? width : 0};
        float v[PACKS][8], sum = 0, square = 0;

        const auto read = [&](int sheet, bool add) {
#pragma unroll
            for (int j = 0; j < PACKS; ++j) {
                const int pack = sheet * PACKS + j, c = place.column(pack), count = place.count(pack);
                if (SUM && !add) {
                    const Eight<Y> in = load8<Y, WHOLE>(y + at + c, count);
#pragma unroll
                    for (int k = 0; k < 8; ++k) v[j][k] = number<Y>(in, k);
                    continue;
                }
                const Eight<X> in = load8<X, WHOLE>(x + at + c, count);
#pragma unroll
                for (int k = 0; k < 8; ++k) v[j][k] = number<X>(in, k);
                if (!SUM) continue;
                const Eight<R> more = load8<R, WHOLE>(r + at + c, count);
#pragma unroll
                for (int k = 0; k < 8; ++k) v[j][k] += number<R>(more, k);
                const Eight<Y> out = packed<Y>(v[j]);
                store8<Y, WHOLE>(y + at + c, out, count);
#pragma unroll
                for (int k = 0; k < 8; ++k) v[j][k] = number<Y>(out, k);
            }
        };

        for (int s = 0; s < sheets; ++s) {
            read(s, true);
#pragma unroll
            for (int j = 0; j < PACKS; ++j)
#pragma unroll
                for (int k = 0; k < 8; ++k) sum += v[j][k];
        }
        const float mean = RMS ? 0.0f : row_total<GROUP>(sum, shared) / (float)width;
        for (int s = 0; s < sheets; ++s) {
            if (LONG) read(s, false);
#pragma unroll
            for (int j = 0; j < PACKS; ++j) {
                const int count = place.count(s * PACKS + j);
                if (count < 8) {  // what is no number of the row has no distance
#pragma unroll
                    for (int k = 0; k < 8; ++k) if (k >= count) v[j][k] = mean;
                }
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const float d = v[j][k] - mean;
                    square += d * d;
                }
            }
        }
        const float rstd = 1.0f / sqrtf(row_total<GROUP>(square, shared) / (float)width + eps);
        for (int s = 0; s < sheets; ++s) {
            if (LONG) read(s, false);
#pragma unroll
            for (int j = 0; j < PACKS; ++j) {
                const int pack = s * PACKS + j, c = place.column(pack), count = place.count(pack);
                const Eight<W> scale = load8<W, WHOLE>(w + c, w ? count : 0), shift = load8<W, WHOLE>(b + c, b ? count : 0);
                float out[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    out[k] = (v[j][k] - mean) * rstd;
                    if (w) out[k] *= number<W>(scale, k);
                    if (b) out[k] += number<W>(shift, k);
                }
                store8<N, WHOLE>(n + at + c, packed<N>(out), count);
            }
        }
        if (lane == 0 && row < rows) {
            if (!RMS) means[row] = mean;
            rstds[row] = rstd;
        }
    }
}

// ---------------------------------------------------------------- backward
// What a thread holds of a row: its numbers of x and g, still packed, and the row's statistics.
template <class X, class G, int PACKS> struct Held {
    Eight<X> x[PACKS];
    Eight<G> g[PACKS];
    float mean, rstd;
    F16LAB_FN void know(const float* means, const float* rstds, i64 row, bool live, bool rms) {
        mean = live && !rms ? means[row] : 0.0f;
        rstd = live ? rstds[row] : 0.0f;
    }
    F16LAB_FN float unit(int j, int k) const { return (number<X>(x[j], k) - mean) * rstd; }
};

template <class X, class G, int GROUP, bool WHOLE, int PACKS>
F16LAB_FN void hold(Held<X, G, PACKS>& h, const typename X::code* x, const typename G::code* g, i64 row, i64 end, int sheet, int lane,
                    int width) {
    const Place<GROUP> place = {lane, row < end ? width : 0};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int pack = sheet * PACKS + j, c = place.column(pack), count = place.count(pack);
        h.x[j] = load8<X, WHOLE>(x + row * width + c, count);
        h.g[j] = load8<G, WHOLE>(g + row * width + c, count);
    }
}

template <int PACKS> struct Sums { float w[PACKS][8], b[PACKS][8]; };

// Adds a row to the sums of a chunk.
template <class X, class G, int PACKS> F16LAB_FN void gather(Sums<PACKS>& sums, const Held<X, G, PACKS>& h) {
#pragma unroll
    for (int j = 0; j < PACKS; ++j)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float g = number<G>(h.g[j], k);
            sums.w[j][k] = fmaf(g, h.unit(j, k), sums.w[j][k]);
            sums.b[j][k] += g;
        }
}

// Adds the sums of the block's row groups, in their order, and stores them as one part.
template <int GROUP, int BLOCK, bool WHOLE, int PACKS>
__device__ __forceinline__ void keep(Sums<PACKS>& sums, float* shared, float* part, int sheet, int lane, int width) {
    enum { ROWS = BLOCK / GROUP };
    const int group = threadIdx.x / GROUP;
#pragma unroll
    for (int q = 0; q < ROWS; ++q) {
        if (group == q) {
#pragma unroll
            for (int j = 0; j < PACKS; ++j)
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    float *w = shared + (j * 8 + k) * GROUP + lane, *b = w + 8 * PACKS * GROUP;
                    if (q > 0) { sums.w[j][k] = *w + sums.w[j][k]; sums.b[j][k] = *b + sums.b[j][k]; }
                    if (q < ROWS - 1) { *w = sums.w[j][k]; *b = sums.b[j][k]; }
                }
        }
        if (ROWS > 1) __syncthreads();
    }
    if (group < ROWS - 1) return;
    const Place<GROUP> place = {lane, width};
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
        const int pack = sheet * PACKS + j, c = place.column(pack), count = place.count(pack);
        store8<F32, WHOLE>(part + c, packed<F32>(sums.w[j]), count);
        store8<F32, WHOLE>(part + width + c, packed<F32>(sums.b[j]), count);
    }
}

// dx = rstd·(g·w - mean(g·w) - unit·mean(g·w·unit)), unit = (x - mean)·rstd; LATER: dx + later, the gradient of y from elsewhere.
// dx or parts may be null.
template <class G, class X, class W, class D, bool LATER, bool RMS, int GROUP, int PACKS, bool LONG, bool WHOLE>
__global__ void __launch_bounds__(GROUP > 128 ? GROUP : 128, GROUP > 128 || PACKS > 3 ? 1 : 3)
    norm_backward(const typename G::code* __restrict__ g, const typename D::code* __restrict__ later,
                  const typename X::code* __restrict__ x, const float* __restrict__ means, const float* __restrict__ rstds,
                  const typename W::code* __restrict__ w, typename D::code* __restrict__ dx, float* __restrict__ parts, i64 rows,
                  i64 chunk_rows, int width) {
    enum { BLOCK = GROUP > 128 ? GROUP : 128, ROWS = BLOCK / GROUP };
    __shared__ float2 shared[BLOCK / 32];
    __shared__ float chunk_sums[ROWS > 1 ? 16 * GROUP * PACKS : 1];
    const int lane = threadIdx.x % GROUP, sheets = LONG ? (width + 8 * GROUP * PACKS - 1) / (8 * GROUP * PACKS) : 1;
    const i64 chunks = (rows + chunk_rows - 1) / chunk_rows;
    for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const i64 begin = chunk * chunk_rows, end = begin + chunk_rows < rows ? begin + chunk_rows : rows;
        Sums<PACKS> sums = {};
        Held<X, G, PACKS> h;
        if (!LONG) hold<X, G, GROUP, WHOLE>(h, x, g, begin + threadIdx.x / GROUP, end, 0, lane, width);
        for (i64 first = begin; first < end; first += ROWS) {
            const i64 row = first + threadIdx.x / GROUP;
            const Place<GROUP> place = {lane, row < end ? width : 0};
            h.know(means, rstds, row, row < end, RMS);
            Held<X, G, PACKS> next;  // is on its way while this row is worked on
            if (!LONG) hold<X, G, GROUP, WHOLE>(next, x, g, row + ROWS, end, 0, lane, width);
            Eight<D> more[PACKS];
            if (LATER && !LONG)
#pragma unroll
                for (int j = 0; j < PACKS; ++j)
                    more[j] = load8<D, WHOLE>(later + row * width + place.column(j), place.count(j));
            float2 total = {0, 0};
            for (int s = 0; s < sheets; ++s) {
                if (LONG) hold<X, G, GROUP, WHOLE>(h, x, g, row, end, s, lane, width);
#pragma unroll
                for (int j = 0; j < PACKS; ++j) {
                    const int pack = s * PACKS + j;
                    const Eight<W> scale = load8<W, WHOLE>(w + place.column(pack), w ? place.count(pack) : 0);
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        const float gw = w ? number<G>(h.g[j], k) * number<W>(scale, k) : number<G>(h.g[j], k);
                        if (!RMS) total.x += gw;
                        total.y = fmaf(gw, h.unit(j, k), total.y);
                    }
                }
            }
            if (!LONG && parts) gather(sums, h);
            total = row_totals<GROUP>(total, shared);
            const float mean_g = total.x / (float)width, mean_gu = total.y / (float)width;
            for (int s = 0; s < sheets; ++s) {
                if (!dx) break;
                if (LONG) hold<X, G, GROUP, WHOLE>(h, x, g, row, end, s, lane, width);
#pragma unroll
                for (int j = 0; j < PACKS; ++j) {
                    const int pack = s * PACKS + j, c = place.column(pack), count = place.count(pack);
                    const i64 at = row * width + c;
                    const Eight<W> scale = load8<W, WHOLE>(w + c, w ? count : 0);
                    float d[8];
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        const float gw = w ? number<G>(h.g[j], k) * number<W>(scale, k) : number<G>(h.g[j], k);
                        d[k] = fmaf(-mean_gu, h.unit(j, k), RMS ? gw : gw - mean_g) * h.rstd;
                    }
                    Eight<D> out = packed<D>(d);
                    if (LATER) {
                        if (LONG) more[j] = load8<D, WHOLE>(later + at, count);
#pragma unroll
                        for (int k = 0; k < 8; ++k) d[k] = number<D>(out, k) + number<D>(more[j], k);
                        out = packed<D>(d);
                    }
                    store8<D, WHOLE>(dx + at, out, count);
                }
            }
#pragma unroll
            for (int j = 0; j < PACKS && !LONG; ++j) { h.x[j] = next.x[j]; h.g[j] = next.g[j]; }
        }
        if (!parts) continue;
        float* part = parts + chunk * 2 * width;
        if (!LONG) { keep<GROUP, BLOCK, WHOLE>(sums, chunk_sums, part, 0, lane, width); continue; }
        for (int s = 0; s < sheets; ++s) {
            sums = {};
            for (i64 row = begin; row < end; ++row) {  // LONG: all threads of a block share a row
                hold<X, G, GROUP, WHOLE>(h, x, g, row, end, s, lane, width);
                h.know(means, rstds, row, true, RMS);
                gather(sums, h);
            }
            keep<GROUP, BLOCK, WHOLE>(sums, chunk_sums, part, s, lane, width);
        }
    }
}

// dw and db from the parts: 32 threads a column take every 32nd chunk, in order, and are added in order. Each may be null.
template <class W, class B>
__global__ void __launch_bounds__(256) norm_finish(const float* __restrict__ parts, typename W::code* __restrict__ dw,
                                                       typename B::code* __restrict__ db, i64 chunks, int width) {
    __shared__ float shared[32][8];
    const int slot = threadIdx.x / 8;
    for (i64 first = (i64)blockIdx.x * 8; first < 2 * (i64)width; first += (i64)gridDim.x * 8) {
        const i64 column = first + threadIdx.x % 8;
        float sum = 0;
        if (column < 2 * (i64)width) {
#pragma unroll 8
            for (i64 chunk = slot; chunk < chunks; chunk += 32) sum += parts[chunk * 2 * width + column];
        }
        __syncthreads();  // what was there has been read
        shared[slot][threadIdx.x % 8] = sum;
        __syncthreads();
        if (slot > 0 || column >= 2 * (i64)width) continue;
        sum = 0;
        for (int i = 0; i < 32; ++i) sum += shared[i][threadIdx.x];
        if (column < width && dw) dw[column] = Port<W>::write(sum, false);
        if (column >= width && db) db[column - width] = Port<B>::write(sum, false);
    }
}
