// cross_entropy.cu: row losses, log-sum-exps and gradients of logits in one visit to each row.
//
// Reference  f16lab.losses.row_losses, f16lab.losses.row_gradients
// Layout     logits [rows, stride], of which `classes` columns count and the rest is padding; targets int64 [rows]. `d` may be `z`
//            itself when both have one precision: a row is read again from the cache, not from memory.
// Launch     blocks of 1024 threads, a row at a time. cross_entropy: few enough blocks that their rows stay in the cache between the
//            two reads. cross_entropy_resident: the row waits in shared memory (ceil(stride / (1024·LANES))·16 KiB, asked for at launch),
//            and the next one is fetched while this one is written.
// Numerics   f32 inside, exp and log of the CUDA library (≤ 2 ulp; inside the sum a shorter exp), one rounding of the gradient. A thread
//            adds its columns in order, threads are combined by a fixed tree: repeatable, the same bits for any number of blocks.
#include "ports.cuh"

using namespace f16lab;

enum { LOSSES = 1, GRADIENTS = 2 };
#define LOWEST -2e38f  // below any logit that matters; LOWEST · log2(e) is still finite
#define INFINITE bits_float(0x7F800000u)
#define LOG2E 1.44269502f

struct Sum { float top, sum; };  // sum · 2^(top · log2 e), the product rounded to f32

// 2^x by the special function unit: relative error 2^-22, results below 2^-126 are 0
F16LAB_FN float exp2_unit(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// Sums of the lanes of a warp as one, the same value in each.
__device__ __forceinline__ Sum warp_sum(Sum x) {
    float top = x.top;
    for (int s = 16; s; s /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, s));
    float sum = x.sum * exp2_unit(x.top * LOG2E - top * LOG2E);
    for (int s = 16; s; s /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
    return {top, sum};
}

// Σ e^z of a row over all threads of the block, the same value in each.
__device__ __forceinline__ Sum block_sum(Sum x, Sum* shared) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : Sum{LOWEST, 0});
    __syncthreads();
    return x;
}

template <class Z> __device__ __forceinline__ float word_value(u32 word, int half) {
    return Port<Z>::read((typename Z::code)(half ? word >> 16 : word & 0xFFFFu));
}
template <> __device__ __forceinline__ float word_value<F32>(u32 word, int) { return bits_float(word); }

// LANES must divide the stride and the address; 1 always does.
template <int LANES> __device__ __forceinline__ void add_terms(Sum& mine, const float (&x)[LANES]) {
    float top = x[0];
#pragma unroll
    for (int i = 1; i < LANES; ++i) top = fmaxf(top, x[i]);
    if (top > mine.top) { mine.sum *= exp2_unit(mine.top * LOG2E - top * LOG2E); mine.top = top; }
    const float scaled = mine.top * LOG2E;
#pragma unroll
    for (int i = 0; i < LANES; ++i) mine.sum += exp2_unit(fmaf(x[i], LOG2E, -scaled));
}

// LANES numbers at once. 16-bit ones travel in pairs of a 32-bit word, the first in the low half.
template <class Z, int LANES> __device__ __forceinline__ void fetch(const typename Z::code* z, float (&x)[LANES]) {
    if (LANES == 1) x[0] = Port<Z>::read(*z);
    else {
        const Pack<u32, 4> words = *(const Pack<u32, 4>*)z;
#pragma unroll
        for (int i = 0; i < LANES; ++i) x[i] = word_value<Z>(words.v[LANES == 8 ? i / 2 : i], i & 1);
    }
}

template <class Z, int LANES> __device__ __forceinline__ Sum row_sum(const typename Z::code* z, int classes) {
    Sum mine = {LOWEST, 0};
    float x[LANES];
    const int step = blockDim.x * LANES;
    int at = threadIdx.x * LANES;
    for (const typename Z::code* p = z + at; at + LANES <= classes; at += step, p += step) {
        fetch<Z, LANES>(p, x);
        add_terms(mine, x);
    }
    if (at < classes) {
        for (int i = 0; i < LANES; ++i) x[i] = at + i < classes ? Port<Z>::read(z[at + i]) : -INFINITE;
        add_terms(mine, x);
    }
    return mine;
}

// log Σ e^z. Where the sum says nothing (an infinite logit, or all of them out of reach) the row is read again.
template <class Z> __device__ __forceinline__ float log_sum(Sum s, const typename Z::code* z, int classes) {
    const float scaled = s.top * LOG2E;
    if (s.top < INFINITE && s.sum != 0) return fmaf(scaled, 0.693147182f, fmaf(scaled, -1.90465421e-9f, logf(s.sum)));
    float top = -INFINITE, sum = 0;
    for (int i = 0; i < classes; ++i) {
        const float x = Port<Z>::read(z[i]);
        if (x != x) return x;
        top = fmaxf(top, x);
    }
    if (fabsf(top) == INFINITE) return top;
    for (int i = 0; i < classes; ++i) sum += expf(Port<Z>::read(z[i]) - top);
    return top + logf(sum);
}

// Two f32 numbers, neither NaN, as neighbours in D.
template <class D> F16LAB_FN u32 pair(float a, float b) {
    return (u32)Port<D>::write(a, false) | (u32)Port<D>::write(b, false) << 16;
}
#ifdef __CUDA_ARCH__
template <> F16LAB_FN u32 pair<BF16>(float a, float b) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}
template <> F16LAB_FN u32 pair<F16>(float a, float b) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}
#endif

// Whole words in one store; left to itself the compiler may cut it into four, each of which touches every sector.
__device__ __forceinline__ void put(void* at, const Pack<u32, 4>& w) {
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(w.v[0]), "r"(w.v[1]), "r"(w.v[2]), "r"(w.v[3]) : "memory");
#else
    *(Pack<u32, 4>*)at = w;
#endif
}
__device__ __forceinline__ void put(void* at, const Pack<u32, 2>& w) {
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(w.v[0]), "r"(w.v[1]) : "memory");
#else
    *(Pack<u32, 2>*)at = w;
#endif
}

// LANES f32 numbers, none NaN, rounded to D and written.
template <class D, int LANES> __device__ __forceinline__ void store(typename D::code* d, const float (&x)[LANES]) {
    Pack<u32, LANES / 2> words;
#pragma unroll
    for (int i = 0; i < LANES; i += 2) words.v[i / 2] = pair<D>(x[i], x[i + 1]);
    put(d, words);
}
template <> __device__ __forceinline__ void store<F32, 4>(float* d, const float (&x)[4]) {
    put(d, Pack<u32, 4>{{float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])}});
}
template <> __device__ __forceinline__ void store<F32, 1>(float* d, const float (&x)[1]) { *d = x[0]; }
template <> __device__ __forceinline__ void store<F16, 1>(u16* d, const float (&x)[1]) { *d = Port<F16>::write(x[0], false); }
template <> __device__ __forceinline__ void store<BF16, 1>(u16* d, const float (&x)[1]) { *d = Port<BF16>::write(x[0], false); }

// (e^(z − lse) − [column = target]) · factor for the columns [at, at + LANES), 0 beyond `classes`; any value of lse and factor
template <class Z, class D> __device__ __forceinline__ typename D::code one_gradient(typename Z::code z, int at, int classes, int target,
                                                                                     float lse, float factor) {
    if (at >= classes) return Port<D>::write(0.0f, false);
    return Port<D>::write((expf(Port<Z>::read(z) - lse) - (at == target ? 1.0f : 0.0f)) * factor, false);
}

template <class Z, class D, int LANES>
__device__ __forceinline__ void write_row(const typename Z::code* z, typename D::code* d, int stride, int classes, int target, float lse,
                                          float factor) {
    const bool tame = fabsf(lse) < INFINITE && fabsf(factor) < INFINITE && target >= 0;  // then no NaN can arise
    const int step = blockDim.x * LANES;
    int at = threadIdx.x * LANES;
    const typename Z::code* p = z + at;
    typename D::code* q = d + at;
    for (; at < stride; at += step, p += step, q += step) {
        if (tame && at + LANES <= classes && (unsigned)(target - at) >= LANES) {
            float x[LANES];
            fetch<Z, LANES>(p, x);
#pragma unroll
            for (int i = 0; i < LANES; ++i) x[i] = expf(x[i] - lse) * factor;
            store<D, LANES>(q, x);
        } else {
            typename D::code out[LANES];
            for (int i = 0; i < LANES; ++i)
                out[i] = target < 0 ? Port<D>::write(0.0f, false) : one_gradient<Z, D>(p[i], at + i, classes, target, lse, factor);
            for (int i = 0; i < LANES; ++i) q[i] = out[i];
        }
    }
}

template <class Z, class D, int MODE, int LANES>
__global__ void __launch_bounds__(1024, 2) cross_entropy(const typename Z::code* z, typename D::code* d, const i64* targets, float* losses,
                                                      float* lses, i64 rows, int stride, int classes, i64 ignore, float factor,
                                                      const float* factor_at) {
    __shared__ Sum shared[32];
    if (factor_at) factor *= *factor_at;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const typename Z::code* mine = z + row * stride;
        const int target = targets[row] == ignore ? -1 : (int)targets[row];
        float lse;
        if (MODE & LOSSES) {
            const float hit = target < 0 ? 0.0f : Port<Z>::read(mine[target]);  // before the row is overwritten
            lse = log_sum<Z>(block_sum(row_sum<Z, LANES>(mine, classes), shared), mine, classes);
            if (MODE & GRADIENTS) __syncthreads();
            if (threadIdx.x == 0) {
                lses[row] = lse;
                losses[row] = target < 0 ? 0.0f : lse - hit;
            }
        } else lse = lses[row];
        if (MODE & GRADIENTS) write_row<Z, D, LANES>(mine, d + row * stride, stride, classes, target, lse, factor);
    }
}

// ---------------------------------------------------------------- the row in shared memory
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define DYNAMIC_SHARED(name) extern __shared__ Pack<u32, 4> name[]
#else
#define DYNAMIC_SHARED(name) static Pack<u32, 4> name[16 * 1024]
#endif

// 16 bytes from memory to shared memory, behind the back of the thread; there when `arrived` returns.
__device__ __forceinline__ void fetch_later(Pack<u32, 4>* shared, const void* from) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(from));
#else
    *shared = *(const Pack<u32, 4>*)from;
#endif
}
__device__ __forceinline__ void arrived() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <class Z, int LANES> __device__ __forceinline__ void unpack(const Pack<u32, 4>& words, float (&x)[LANES]) {
#pragma unroll
    for (int i = 0; i < LANES; ++i) x[i] = word_value<Z>(words.v[LANES == 8 ? i / 2 : i], i & 1);
}

// One pack of gradients: the common case in few instructions, the rest number by number.
template <class Z, class D, int LANES>
__device__ __forceinline__ void write_pack(Pack<u32, 4> words, typename D::code* d, int at, int classes, int target, float lse, float factor,
                                           bool tame) {
    float x[LANES];
    unpack<Z, LANES>(words, x);
    if (tame && at + LANES <= classes && (unsigned)(target - at) >= LANES) {
#pragma unroll
        for (int i = 0; i < LANES; ++i) x[i] = expf(x[i] - lse) * factor;
        store<D, LANES>(d, x);
    } else {
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            const float y = at + i >= classes || target < 0 ? 0.0f : (expf(x[i] - lse) - (at + i == target ? 1.0f : 0.0f)) * factor;
            d[i] = Port<D>::write(y, false);
        }
    }
}

template <class Z, class D, int LANES>
__global__ void __launch_bounds__(1024, LANES == 8 ? 2 : 1)
    cross_entropy_resident(const typename Z::code* z, typename D::code* d, const i64* targets, float* losses, float* lses, i64 rows,
                           int stride, int classes, i64 ignore, float factor, const float* factor_at) {
    __shared__ Sum shared[32];
    DYNAMIC_SHARED(row_packs);
    Pack<u32, 4>* mine = row_packs + threadIdx.x;
    const int first = threadIdx.x * LANES, step = blockDim.x * LANES;
    if (factor_at) factor *= *factor_at;
    if ((i64)blockIdx.x < rows) {
        Pack<u32, 4>* slot = mine;
        for (int at = first; at < stride; at += step, slot += blockDim.x) fetch_later(slot, z + blockIdx.x * (i64)stride + at);
    }
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const int target = targets[row] == ignore ? -1 : (int)targets[row];
        const float hit = target < 0 || threadIdx.x ? 0.0f : Port<Z>::read(z[row * stride + target]);
        arrived();
        Sum sum = {LOWEST, 0};
        const Pack<u32, 4>* slot = mine;
        for (int at = first; at < classes; at += step, slot += blockDim.x) {
            float x[LANES];
            unpack<Z, LANES>(*slot, x);
            if (at + LANES > classes)
                for (int i = 0; i < LANES; ++i) if (at + i >= classes) x[i] = -INFINITE;
            add_terms(sum, x);
        }
        const float lse = log_sum<Z>(block_sum(sum, shared), z + row * stride, classes);
        __syncthreads();  // an infinite logit was looked for in memory: nobody may have written there yet
        if (threadIdx.x == 0) {
            lses[row] = lse;
            losses[row] = target < 0 ? 0.0f : lse - hit;
        }
        const bool tame = fabsf(lse) < INFINITE && fabsf(factor) < INFINITE && target >= 0, more = row + gridDim.x < rows;
        const typename Z::code* next = z + (row + gridDim.x) * stride;
        typename D::code* out = d + row * stride;
        Pack<u32, 4>* place = mine;
        for (int at = first; at < stride; at += step, place += blockDim.x) {
            write_pack<Z, D, LANES>(*place, out + at, at, classes, target, lse, factor, tame);
            if (more) fetch_later(place, next + at);
        }
    }
}
