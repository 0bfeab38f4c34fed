// stats.cu: exponents of a tensor counted in one pass: a histogram of binades, zeros, infinities, NaN, the largest magnitude.
//
// Reference  f16lab.sum_kernels.count_plain
// Layout     x: flat, n elements, any alignment (16-byte loads where it allows). counts[0..255]: elements by the exponent field
//            of their f32 value (0: zeros and f32 subnormals; 255: infinities and NaN), counts[256]: zeros, [257]: infinities,
//            [258]: NaN, as in cast.cu; added to what is there. amax_bits: f32 bits of the largest finite magnitude.
//            stats_parts: parts [K] of a flat buffer, each counted in a row of 260: counts, and the bits of the largest
// Launch     grid-stride, four packs of 16 bytes a thread in flight; any grid of blocks of 256 threads, best six a multiprocessor,
//            which all run at once
// Numerics   integers: the counts of the reference for any grid, below 2^32 elements a block
//
// Each warp counts in bins of its own in shared memory: an increment by 1 of which the hardware merges equal addresses. An
// fp8 tensor is counted by its 256 codes, which are turned into values at the end.
#include "sums.cuh"

using namespace f16lab;

#define WARPS 8
#define AHEAD 4

struct Seen { u32 live, infinities, nans, top; };  // live: not zero

// Where the bins of a warp begin: a shared address, on the host an offset. They are aligned to their 1024 bytes.
__device__ __forceinline__ u32 bins_at(const u32* bins, u32 warp) {
#ifdef __CUDA_ARCH__
    return (u32)__cvta_generic_to_shared(bins) | warp << 10;
#else
    return warp << 10;
#endif
}

// Adds 1 to a bin; place: bins_at | 4·bin
__device__ __forceinline__ void bump(u32* bins, u32 place) {
#ifdef __CUDA_ARCH__
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(place) : "memory");
#else
    atomicAdd((u32*)((char*)bins + place), 1u);
#endif
}

template <class P, int V>
__device__ __forceinline__ void count(const Pack<typename P::code, V>& in, u32* bins, u32 at, Seen& seen) {
    if (P::BITS == 8) {
#pragma unroll
        for (int k = 0; k < V; ++k) bump(bins, (u32)in.v[k] << 2 | at);
        return;
    }
    u32 most = 0;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const u32 a = float_bits(Wide<P>::read(in.v[k])) & 0x7FFFFFFFu;
        bump(bins, (a >> 21 & 0x3FCu) | at);
        seen.live += a < 1 ? a : 1;
        most = a > most ? a : most;
    }
    if (most < 0x7F800000u) { seen.top = most > seen.top ? most : seen.top; return; }
#pragma unroll
    for (int k = 0; k < V; ++k) {  // rare: something in here is not finite
        const u32 a = float_bits(Wide<P>::read(in.v[k])) & 0x7FFFFFFFu;
        seen.infinities += a == 0x7F800000u;
        seen.nans += a > 0x7F800000u;
        if (a < 0x7F800000u && a > seen.top) seen.top = a;
    }
}

__device__ __forceinline__ void give(u64* counts, int bin, u64 more) { if (more) atomicAdd(counts + bin, more); }

// What the codes of an fp8 tensor mean: thread c speaks for code c.
template <class P> __device__ __forceinline__ void spell(u64 times, u64* counts, u32* amax_bits) {
    const u32 a = float_bits(Port<P>::value((typename P::code)threadIdx.x)) & 0x7FFFFFFFu;
    if (times == 0) return;
    give(counts, a >> 23, times);
    if (a == 0) give(counts, 256, times);
    if (a >= 0x7F800000u) give(counts, a == 0x7F800000u ? 257 : 258, times);
    else atomicMax(amax_bits, a);
}

// What a block of 256 threads counts in.
struct Room { u32 bins[WARPS * 256], all[4], counted; };  // all: live; infinities; NaN; the largest. counted: all elements

__device__ __forceinline__ void clear(Room& room) {
    for (int i = threadIdx.x; i < WARPS * 256; i += blockDim.x) room.bins[i] = 0;
    if (threadIdx.x < 4) room.all[threadIdx.x] = 0;
    if (threadIdx.x == 0) room.counted = 0;
    __syncthreads();
}

// Counts x[0 … n): this thread takes every stride-th pack, from its first one on.
template <class P>
__device__ __forceinline__ void sweep(const typename P::code* __restrict__ x, i64 n, i64 first, i64 stride, u32* bins, Seen& seen) {
    typedef typename P::code code;
    enum { V = 16 / sizeof(code) };
    const u32 at = bins_at(bins, threadIdx.x / 32);
    const i64 packs = aligned_to<16>(x) ? n / V : 0;
    i64 g = first;
    for (; g + (AHEAD - 1) * stride < packs; g += AHEAD * stride) {
        Pack<code, V> in[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) in[u] = ((const Pack<code, V>*)x)[g + u * stride];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) count<P, V>(in[u], bins, at, seen);
    }
    for (; g < packs; g += stride) count<P, V>(((const Pack<code, V>*)x)[g], bins, at, seen);
    for (i64 i = packs * V + first; i < n; i += stride) count<P, 1>(*(const Pack<code, 1>*)(x + i), bins, at, seen);
}

// Adds what the block has counted to the counts of its tensor.
template <class P> __device__ __forceinline__ void settle(Room& room, const Seen& seen, u64* counts, u32* amax_bits) {
    atomicAdd(room.all, seen.live);
    atomicAdd(room.all + 1, seen.infinities);
    atomicAdd(room.all + 2, seen.nans);
    atomicMax(room.all + 3, seen.top);
    __syncthreads();
    u64 times = 0;
    for (int w = 0; w < WARPS; ++w) times += room.bins[w * 256 + threadIdx.x];
    if (P::BITS == 8) { spell<P>(times, counts, amax_bits); return; }
    give(counts, threadIdx.x, times);
    atomicAdd(&room.counted, (u32)times);
    __syncthreads();
    if (threadIdx.x == 0) give(counts, 256, room.counted - room.all[0]);
    if (threadIdx.x == 1 || threadIdx.x == 2) give(counts, 256 + threadIdx.x, room.all[threadIdx.x]);
    if (threadIdx.x == 3 && room.all[3]) atomicMax(amax_bits, room.all[3]);
}

template <class P>
__global__ void __launch_bounds__(256, 6) stats(const typename P::code* __restrict__ x, i64 n, u64* counts, u32* amax_bits) {
    alignas(1024) __shared__ Room room;
    clear(room);
    Seen seen = {0, 0, 0, 0};
    sweep<P>(x, n, (i64)blockIdx.x * blockDim.x + threadIdx.x, (i64)gridDim.x * blockDim.x, room.bins, seen);
    settle<P>(room, seen, counts, amax_bits);
}

struct Part { i64 start, count, row; };  // elements start … start + count of the buffer belong to a tensor with this row

// Many tensors of one flat buffer in one launch, a part a block: parts of a tensor may come in any order.
template <class P>
__global__ void __launch_bounds__(256, 6) stats_parts(const typename P::code* __restrict__ x, const Part* __restrict__ parts, i64 K,
                                                      u64* rows) {
    alignas(1024) __shared__ Room room;
    for (i64 k = blockIdx.x; k < K; k += gridDim.x) {
        const Part part = parts[k];
        clear(room);
        Seen seen = {0, 0, 0, 0};
        sweep<P>(x + part.start, part.count, threadIdx.x, blockDim.x, room.bins, seen);
        u64* counts = rows + 260 * part.row;
        settle<P>(room, seen, counts, (u32*)(counts + 259));
        __syncthreads();
    }
}
