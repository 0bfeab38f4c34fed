// cuda_host.h: CUDA C++ on a CPU, for tests of what a kernel computes.
//
// Each thread of a block is a fiber; blocks run one after the other. __syncthreads and the warp functions wait until all threads
// they name have arrived, so a kernel that forgets one gets a wrong answer here as on a GPU. Build with -ffp-contract=off.
// Not covered: races between blocks, memory order, inline PTX (keep it behind #ifdef __CUDA_ARCH__), extern __shared__.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 { unsigned x = 1, y = 1, z = 1; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace cuda_host {

struct Fiber { ucontext_t at; std::vector<char> stack; bool done = false; unsigned thread = 0; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned now;
static unsigned block_arrived, block_round;
static unsigned warp_arrived[32], warp_round[32];
static uint64_t slots[1024];
static void (*body)(void*);
static void* argument;

inline void pause() {
    unsigned me = now;
    swapcontext(&fibers[me].at, &scheduler);
    now = me;
    threadIdx.x = me;
}
inline void wait_block() {
    unsigned round = block_round;
    if (++block_arrived == fibers.size()) { block_arrived = 0; ++block_round; return; }
    while (round == block_round) pause();
}
inline unsigned members(unsigned mask) { return (unsigned)__builtin_popcount(mask); }
inline void wait_warp(unsigned mask) {
    unsigned w = now / 32, round = warp_round[w], in_warp = std::min<unsigned>(32, fibers.size() - w * 32);
    unsigned all = in_warp == 32 ? 0xFFFFFFFFu : (1u << in_warp) - 1;
    if (++warp_arrived[w] == members(mask & all)) { warp_arrived[w] = 0; ++warp_round[w]; return; }
    while (round == warp_round[w]) pause();
}
template <class T> T exchange(unsigned mask, T value, unsigned lane) {
    static_assert(sizeof(T) <= 8, "shuffles carry up to 8 bytes");
    unsigned w = now / 32 * 32;
    memcpy(&slots[now], &value, sizeof(T));
    wait_warp(mask);
    T out;
    memcpy(&out, &slots[w + lane], sizeof(T));
    wait_warp(mask);
    return out;
}
inline void enter() {
    threadIdx.x = now;
    body(argument);
    fibers[now].done = true;
    swapcontext(&fibers[now].at, &scheduler);
}
inline void run_block(unsigned threads) {
    fibers.resize(threads);
    block_arrived = 0;
    std::fill(warp_arrived, warp_arrived + 32, 0u);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& f = fibers[i];
        f.done = false;
        if (f.stack.empty()) f.stack.resize(1 << 16);
        getcontext(&f.at);
        f.at.uc_stack.ss_sp = f.stack.data();
        f.at.uc_stack.ss_size = f.stack.size();
        f.at.uc_link = &scheduler;
        makecontext(&f.at, (void (*)())enter, 0);
    }
    for (unsigned live = threads, idle = 0; live;) {
        unsigned before = block_round, finished = 0, warps = 0;
        for (unsigned w = 0; w < 32; ++w) warps += warp_round[w];
        for (unsigned i = 0; i < threads; ++i) {
            if (fibers[i].done) continue;
            now = i;
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].at);
            finished += fibers[i].done;
        }
        unsigned after = 0;
        for (unsigned w = 0; w < 32; ++w) after += warp_round[w];
        live -= finished;
        idle = before == block_round && warps == after && !finished ? idle + 1 : 0;
        if (idle > 2) { fprintf(stderr, "cuda_host: threads wait for one another for ever\n"); abort(); }
    }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** a, std::index_sequence<I...>) { kernel(*(A*)a[I]...); }

template <class... A> struct Job { void (*kernel)(A...); void** a; };
template <class... A> void trampoline(void* p) {
    Job<A...>* j = (Job<A...>*)p;
    call(j->kernel, j->a, std::index_sequence_for<A...>{});
}
template <class... A> void launch(void (*kernel)(A...), int blocks, int threads, void** a) {
    Job<A...> job{kernel, a};
    body = trampoline<A...>;
    argument = &job;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (int b = 0; b < blocks; ++b) { blockIdx.x = b; run_block(threads); }
}

}  // namespace cuda_host

inline void __syncthreads() { cuda_host::wait_block(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cuda_host::wait_warp(mask); }
inline void __threadfence() {}
template <class T> T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
    int me = threadIdx.x % 32;
    return cuda_host::exchange(mask, x, (unsigned)(me / width * width + lane % width));
}
template <class T> T __shfl_down_sync(unsigned mask, T x, int by, int width = 32) {
    int me = threadIdx.x % 32, to = me + by;
    return cuda_host::exchange(mask, x, (unsigned)(to / width == me / width ? to : me));
}
template <class T> T __shfl_up_sync(unsigned mask, T x, int by, int width = 32) {
    int me = threadIdx.x % 32, to = me - by;
    return cuda_host::exchange(mask, x, (unsigned)(to >= me / width * width ? to : me));
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
    int me = threadIdx.x % 32, to = me ^ bits;
    return cuda_host::exchange(mask, x, (unsigned)(to / width == me / width ? to : me));
}
inline unsigned __ballot_sync(unsigned mask, int p) {
    unsigned out = 0;
    for (int lane = 0; lane < 32; ++lane) if (mask >> lane & 1) out |= (__shfl_sync(mask, (unsigned)(p != 0), lane) & 1) << lane;
    return out;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) {
    unsigned out = 0;
    for (int lane = 0; lane < 32; ++lane) out += mask >> lane & 1 ? __shfl_sync(mask, x, lane) : 0;
    return out;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
    unsigned out = 0;
    for (int lane = 0; lane < 32; ++lane) if (mask >> lane & 1) out = std::max(out, __shfl_sync(mask, x, lane));
    return out;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }

// One thread runs at a time, so a plain update is atomic.
template <class T, class U> T atomicAdd(T* p, U x) { T old = *p; *p = old + (T)x; return old; }
template <class T, class U> T atomicMax(T* p, U x) { T old = *p; *p = std::max(old, (T)x); return old; }
template <class T, class U> T atomicMin(T* p, U x) { T old = *p; *p = std::min(old, (T)x); return old; }
template <class T, class U> T atomicOr(T* p, U x) { T old = *p; *p = old | (T)x; return old; }
template <class T, class U> T atomicExch(T* p, U x) { T old = *p; *p = (T)x; return old; }
template <class T, class U, class V> T atomicCAS(T* p, U expected, V x) { T old = *p; if (old == (T)expected) *p = (T)x; return old; }

// Each operation rounded on its own.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float rsqrtf(float a) { return (float)(1.0 / sqrt((double)a)); }
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T x) { *p = x; }
using std::max;
using std::min;
