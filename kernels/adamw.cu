// adamw.cu: one AdamW step over a flat group of tensors: unscale, clip, update, write back, measure.
//
// Reference  f16lab.groups.update_rows (adamw_change, store_moment, write_plain, write_master, write_kahan, meters),
//            f16lab.groups.choose_scale for the second kernel
// Layout     flat buffers [blocks, 1024]; every tensor starts with a new block, and what differs by tensor is one Row a tensor
// Launch     blocks of 256 threads; each warp takes 1024-element blocks in turn, a few elements a thread at a time, and asks for
//            the next ones before it works on these. One launch a group
// Numerics   + − × ÷ √ and conversions, each rounded on its own (no contraction): equal to the reference bit for bit. The quick way
//            (exact.cuh, lanes.cuh) covers ordinary numbers; a thread that meets others redoes its elements with / and sqrtf.
//            The two sums of the meters are f64 in another order: within 2^-40 of the reference, repeatable.
#include "lanes.cuh"

using namespace f16lab;

#define BLOCK 1024
enum { PLAIN = 0, MASTER = 1, KAHAN = 2 };
enum { DOT, SQUARE, LOST, ASKED, STALLED_M, ASKED_M, STALLED_V, ASKED_V, FLUSHED, SATURATED, METERS };
#define TINY 2.01948391736579e-28f  // 2^-92: a moment that is smaller, and not 0, is no ordinary number
#define LOW 6.103515625e-05f        // 2^-14: below it an f16 moment has fewer and fewer digits

// What the host knows of a tensor: weight decay, bias corrections and their reciprocals (to nearest), keys.
struct alignas(16) Row { float wd, c1, r1, c2, r2; u32 key_theta, key_m, key_v; };

// What all elements of a block share. S: the scale that m and v are stored with; next: this step's.
// beta1, beta2: times the ratio of the scales for m and v, a power of two.
struct Shared { Row t; float gain, eps, ratio, ratio2, beta1, beta2; u32 theta, m, v, theta_b, m_b, v_b, one; bool regular, blind; };
struct Numbers { float lr, beta1, rest1, beta2, rest2, kahan_scale, kahan_back; };
template <class P, class G, class O> struct Arrays {
    typename P::code* theta; const typename G::code* grad; typename O::code *m, *v; float* master; typename P::code* compensation;
};

// What a thread has seen. counts: LOST … SATURATED, a byte each. live, high: v' that are not 0, and not below 2^-14.
struct Seen {
    double dot, square;
    u32 counts[2];
    float highest, live, high;
    F16LAB_FN void add(int meter, bool yes) { counts[(meter - LOST) / 4] += yes ? 1u << (meter - LOST) % 4 * 8 : 0u; }
    F16LAB_FN void take(const Seen& o) {
        dot += o.dot; square += o.square; counts[0] += o.counts[0]; counts[1] += o.counts[1];
        highest = o.highest > highest || o.highest != o.highest ? o.highest : highest;
        live += o.live; high += o.high;
    }
};

F16LAB_FN bool differs(float a, float b) { return a < b || a > b; }
template <class P> F16LAB_FN float top() { return widen<P>((u32)P::TOP); }
template <> F16LAB_FN float top<F32>() { return 3.402823466e38f; }

// ---------------------------------------------------------------- one element, as the reference reads
// A moment as stored: infinite ones are clamped too; counts what vanished and what was clamped.
template <class O, bool DRAW, bool MEASURE> __device__ float keep(typename O::code* at, float x, u32 noise, Seen& seen) {
    if (O::BITS == 32) { *(float*)at = x; return x; }
    const float most = top<O>(), y = fabsf(x) > most ? copysignf(most, x) : x;
    *at = DRAW ? Port<O>::draw(y, noise, true) : Port<O>::write(y, true);
    const float stored = Port<O>::value(*at);
    if (MEASURE) seen.add(FLUSHED, stored == 0 && x != 0);
    if (MEASURE) seen.add(SATURATED, fabsf(x) > most);
    return stored;
}

template <class P, class G, class O, int MODE, bool DRAW, bool DRAW_STATE, bool MEASURE, bool DECAYS>
__device__ void exact_element(const Arrays<P, G, O>& a, i64 at, u32 within, const Shared& s, const Numbers& h, Seen& seen) {
    const float g = __fmul_rn(Port<G>::read(a.grad[at]), s.gain);
    const float old_x = __fmul_rn(Port<O>::read(a.m[at]), s.ratio), old_y = __fmul_rn(Port<O>::read(a.v[at]), s.ratio2);
    const float before = Port<P>::read(a.theta[at]), start = MODE == MASTER ? a.master[at] : before;
    const float x = __fadd_rn(__fmul_rn(old_x, h.beta1), __fmul_rn(g, h.rest1)), gg = __fmul_rn(g, g);
    const float y = __fadd_rn(__fmul_rn(old_y, h.beta2), __fmul_rn(gg, h.rest2));
    const float divisor = __fadd_rn(__fsqrt_rn(__fdiv_rn(y, s.t.c2)), s.eps);
    float change = __fdiv_rn(__fdiv_rn(x, s.t.c1), divisor);
    if (DECAYS) change = __fadd_rn(change, __fmul_rn(start, s.t.wd));
    change = __fmul_rn(change, h.lr);
    auto noise = [&](u32 first, u32 kb) { return squirrel_noise5(noise_fold(noise_mix(first + within * POSITION)), kb); };
    const float new_x = keep<O, DRAW_STATE, MEASURE>(a.m + at, x, DRAW_STATE ? noise(s.m, s.m_b) : 0u, seen);
    const float new_y = keep<O, DRAW_STATE, MEASURE>(a.v + at, y, DRAW_STATE ? noise(s.v, s.v_b) : 0u, seen);
    seen.highest = y > seen.highest || y != y ? y : seen.highest;
    seen.live += differs(y, 0);
    seen.high += differs(y, 0) && !(y < LOW);

    float realised, after;
    if (MODE == KAHAN) {
        const float rest = __fdiv_rn(Port<P>::read(a.compensation[at]), h.kahan_scale), u = __fsub_rn(rest, change);
        a.theta[at] = Port<P>::write(__fadd_rn(start, u), false);
        after = Port<P>::value(a.theta[at]);
        const float left = __fmul_rn(__fadd_rn(u, __fsub_rn(start, after)), h.kahan_scale), most = top<P>();
        a.compensation[at] = Port<P>::write(fabsf(left) > most ? copysignf(most, left) : left, true);
        realised = __fadd_rn(__fsub_rn(after, start), __fsub_rn(__fdiv_rn(Port<P>::value(a.compensation[at]), h.kahan_scale), rest));
    } else {
        const float now = __fsub_rn(start, change);
        if (P::BITS == 32) *(float*)(a.theta + at) = now;
        else a.theta[at] = DRAW ? Port<P>::draw(now, noise(s.theta, s.theta_b), false) : Port<P>::write(now, false);
        if (MODE == MASTER) a.master[at] = now;
        after = Port<P>::value(a.theta[at]);
        realised = __fsub_rn(MODE == MASTER ? now : after, start);
    }
    if (!MEASURE) return;
    seen.dot += (double)__fmul_rn(realised, -change);
    seen.square += (double)__fmul_rn(change, change);
    seen.add(LOST, differs(change, 0) && !differs(after, before));
    seen.add(ASKED, differs(change, 0));
    seen.add(STALLED_M, differs(g, old_x) && !differs(new_x, old_x));
    seen.add(ASKED_M, differs(g, old_x));
    seen.add(STALLED_V, differs(gg, old_y) && !differs(new_y, old_y));
    seen.add(ASKED_V, differs(gg, old_y));
}

// ---------------------------------------------------------------- N elements of a thread, the quick way
template <class P, class G, class O, int MODE, bool MEASURE, int N> struct Loaded {
    Lanes<G, N> g;
    Lanes<O, N> m, v;
    Lanes<F32, MODE == MASTER ? N : 4> master;
    Lanes<P, N> p, k;
    F16LAB_FN void load(const Arrays<P, G, O>& a, i64 at) {
        g = *(const Lanes<G, N>*)(a.grad + at);
        m = *(const Lanes<O, N>*)(a.m + at);
        v = *(const Lanes<O, N>*)(a.v + at);
        if (MODE == MASTER) master = *(const Lanes<F32, MODE == MASTER ? N : 4>*)(a.master + at);
        if (MODE != MASTER || MEASURE) p = *(const Lanes<P, N>*)(a.theta + at);
        if (MODE == KAHAN) k = *(const Lanes<P, N>*)(a.compensation + at);
    }
    F16LAB_FN void store(const Arrays<P, G, O>& a, i64 at) const {
        *(Lanes<O, N>*)(a.m + at) = m;
        *(Lanes<O, N>*)(a.v + at) = v;
        *(Lanes<P, N>*)(a.theta + at) = p;
        if (MODE == MASTER) *(Lanes<F32, MODE == MASTER ? N : 4>*)(a.master + at) = master;
        if (MODE == KAHAN) *(Lanes<P, N>*)(a.compensation + at) = k;
    }
};

F16LAB_FN float in_unit(float x, float y, float z) {  // x·y + z, cut to [0, 1]
#ifdef __CUDA_ARCH__
    float r;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(y), "f"(z));
    return r;
#else
    const float r = fused(x, y, z);
    return r > 1 ? 1 : r > 0 ? r : 0;
#endif
}

// Updates `e`. False: some number was not ordinary, and neither `e` nor `seen` is to be used.
template <class P, class G, class O, int MODE, bool DRAW, bool DRAW_STATE, bool MEASURE, bool DECAYS, int N>
__device__ __forceinline__ bool quick(Loaded<P, G, O, MODE, MEASURE, N>& e, u32 within, const Shared& s, const Numbers& h, Seen& seen) {
    const bool LOOK = Is<O, F16>::YES;                               // f16 moments have a scale to choose
    const bool NEVER_TINY = Is<O, F16>::YES && Is<G, F16>::YES;      // see shared_by
    const float weight = watch_weight<P>(DRAW), weight_k = watch_weight<P>(true), weight_o = watch_weight<O>(true);
    const int Q = MEASURE ? 2 : N;  // elements worked on side by side: the meters keep many numbers of each
    float fine = 0, small = 1, most = 0, x[N], y[N];
#pragma unroll
    for (int i = 0; i < N; i += Q) {
        float now[Q], before[Q], change[Q], g[Q], gg[Q], old_x[Q], old_y[Q], start[Q], rest[Q], u[Q], left[Q];
        u32 n[Q], n_m[Q], n_v[Q];
#pragma unroll
        for (int j = 0; j < Q; ++j) {
            g[j] = times(Lane<G>::get(e.g.w, i + j), s.gain);
            old_x[j] = Lane<O>::get(e.m.w, i + j);
            old_y[j] = Lane<O>::get(e.v.w, i + j);
            gg[j] = times(g[j], g[j]);
            const float a = x[i + j] = times(old_x[j], s.beta1) + times(g[j], h.rest1);
            const float b = y[i + j] = times(old_y[j], s.beta2) + times(gg[j], h.rest2);
            const float divisor = root(divide(b, s.t.c2, s.t.r2)) + s.eps;
            change[j] = quotient(divide(a, s.t.c1, s.t.r1), divisor);
            if (MODE != MASTER || MEASURE) before[j] = Lane<P>::get(e.p.w, i + j);
            start[j] = MODE == MASTER ? bits_float(e.master.w[MODE == MASTER ? i + j : 0]) : before[j];
            if (DECAYS) change[j] = change[j] + times(start[j], s.t.wd);
            change[j] = times(change[j], h.lr);
            small = fminf(small, NEVER_TINY ? b : fminf(fabsf(a), b));
            if (!LOOK) fine = watch(fine, b, 7.737125245533627e25f);  // 2^86: a root stays below 2^32
            if (O::BITS < 32) fine = watch(fine, a, weight_o);
            const u32 at = (within + i + j) * POSITION;
            if (DRAW) n[j] = noise_mix(noise_fold(noise_mix(s.theta + at, s.one)) * POSITION + s.theta_b, s.one);
            if (DRAW_STATE) n_m[j] = noise_mix(noise_fold(noise_mix(s.m + at, s.one)) * POSITION + s.m_b, s.one);
            if (DRAW_STATE) n_v[j] = noise_mix(noise_fold(noise_mix(s.v + at, s.one)) * POSITION + s.v_b, s.one);
            if (MODE == KAHAN) rest[j] = times(Lane<P>::get(e.k.w, i + j), h.kahan_back);
            if (MODE == KAHAN) u[j] = rest[j] - change[j];
            now[j] = MODE == KAHAN ? start[j] + u[j] : start[j] - change[j];
            fine = watch(fine, now[j], weight);
            if (P::BITS == 8) most = fmaxf(most, fabsf(now[j]));  // overflow is near
            if (MODE == MASTER) e.master.w[MODE == MASTER ? i + j : 0] = float_bits(now[j]);
            if (LOOK) {
                seen.highest = fmaxf(seen.highest, b);
                seen.high += in_unit(b, 274877906944.0f, -16777215.0f);  // 2^38: 2^-14 is the first to give 1
            }
        }
#pragma unroll
        for (int j = 0; j < Q; j += 2) {
            const int k = i + j;
            if (DRAW_STATE) Lane<O>::draw(e.m.w, k, x[k], x[k + 1], n_m[j], n_m[j + 1], true);
            else Lane<O>::write(e.m.w, k, x[k], x[k + 1], true);
            if (DRAW_STATE) Lane<O>::draw(e.v.w, k, y[k], y[k + 1], n_v[j], n_v[j + 1], true);
            else Lane<O>::write(e.v.w, k, y[k], y[k + 1], true);
        }
#pragma unroll
        for (int j = 0; j < Q; j += 2) {
            if (DRAW) Lane<P>::draw(e.p.w, i + j, now[j], now[j + 1], n[j], n[j + 1], false);
            else Lane<P>::write(e.p.w, i + j, now[j], now[j + 1], false);
        }
        if (MODE == KAHAN) {
#pragma unroll
            for (int j = 0; j < Q; ++j) {
                left[j] = times(u[j] + (start[j] - Lane<P>::get(e.p.w, i + j)), h.kahan_scale);
                fine = watch(fine, left[j], weight_k);
            }
#pragma unroll
            for (int j = 0; j < Q; j += 2) Lane<P>::write(e.k.w, i + j, left[j], left[j + 1], true);
        }
        if (MEASURE) {
#pragma unroll
            for (int j = 0; j < Q; ++j) {
                if (O::BITS < 32) { old_x[j] = times(old_x[j], s.ratio); old_y[j] = times(old_y[j], s.ratio2); }
                const float after = Lane<P>::get(e.p.w, i + j);
                const float new_x = Lane<O>::get(e.m.w, i + j), new_y = Lane<O>::get(e.v.w, i + j);
                float realised = (MODE == MASTER ? now[j] : after) - start[j];
                if (MODE == KAHAN) realised = realised + (times(Lane<P>::get(e.k.w, i + j), h.kahan_back) - rest[j]);
                seen.dot += (double)times(realised, -change[j]);
                seen.square += (double)times(change[j], change[j]);
                seen.add(LOST, change[j] != 0 && after == before[j]);
                seen.add(ASKED, change[j] != 0);
                seen.add(STALLED_M, g[j] != old_x[j] && new_x == old_x[j]);
                seen.add(ASKED_M, g[j] != old_x[j]);
                seen.add(STALLED_V, gg[j] != old_y[j] && new_y == old_y[j]);
                seen.add(ASKED_V, gg[j] != old_y[j]);
                if (O::BITS < 32) seen.add(FLUSHED, new_x == 0 && x[i + j] != 0);
                if (O::BITS < 32) seen.add(FLUSHED, new_y == 0 && y[i + j] != 0);
            }
        }
    }
    bool ordinary = s.regular && finite(fine) && (!LOOK || seen.highest < 16384.0f) && (P::BITS > 8 || most <= top<P>());
    if (LOOK) seen.live = N;
    if (small < TINY) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            ordinary = ordinary && (s.blind || y[i] == 0 || y[i] >= TINY) && (NEVER_TINY || x[i] == 0 || fabsf(x[i]) >= TINY);
            if (LOOK) seen.live -= y[i] == 0;
        }
    }
    return ordinary;
}

// ---------------------------------------------------------------- a warp's work
// Regular numbers keep what exact.cuh asks for: quotients and roots far from the ends of f32. With f16 gradients and moments they
// also see to it that no m is tiny: a product that is not 0 is at least 2^-67, and a sum at least the last bit of one. blind: a
// v below 2^-102, from where on quotients and roots are exact, has a root below 2^-46, and a sum with eps does not notice that.
template <class G, class O>
__device__ __forceinline__ Shared shared_by(const Row& t, u32 high, float next, float S, float factor, float eps, const Numbers& h) {
    Shared s;
    s.t = t;
    s.gain = __fmul_rn(next, factor);
    s.eps = __fmul_rn(next, eps);
    s.ratio = __fdiv_rn(next, S);
    s.ratio2 = __fmul_rn(s.ratio, s.ratio);
    s.beta1 = O::BITS < 32 ? __fmul_rn(h.beta1, s.ratio) : h.beta1;
    s.beta2 = O::BITS < 32 ? __fmul_rn(h.beta2, s.ratio2) : h.beta2;
    s.theta_b = squirrel_noise5(high, t.key_theta);
    s.m_b = squirrel_noise5(high, t.key_m);
    s.v_b = squirrel_noise5(high, t.key_v);
    s.one = gridDim.y;
    s.regular = t.c1 >= 9.5367431640625e-07f && t.c1 <= 1 && t.c2 >= 9.5367431640625e-07f && t.c2 <= 1  // 2^-20
                && s.eps >= 8.673617379884035e-19f && s.eps < 1073741824.0f;                              // 2^-60, 2^30
    s.blind = s.eps >= 4.76837158203125e-07f && t.c2 >= 9.765625e-04f;  // 2^-21, 2^-10
    if (Is<G, F16>::YES && Is<O, F16>::YES)
        s.regular = s.regular && fabsf(s.gain) * h.rest1 >= 1.1368683772161603e-13f /* 2^-43 */
                    && (h.beta1 == 0 || s.beta1 >= 9.5367431640625e-07f);
    return s;
}

__device__ __forceinline__ double warp_total(double x) {
    for (int d = 16; d; d /= 2) x += __shfl_down_sync(0xFFFFFFFFu, x, d);
    return x;
}
__device__ __forceinline__ u32 warp_total(u32 x) { return __reduce_add_sync(0xFFFFFFFFu, x); }

__device__ void put_meters(double* out, const Seen& seen, bool first) {
    const double dot = warp_total(seen.dot), square = warp_total(seen.square);
    if (first) { out[DOT] = dot; out[SQUARE] = square; }
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // two counts at a time: 1024 elements fit 16 bits
        const u32 two = warp_total(seen.counts[j / 2] >> j % 2 * 8 & 0x00FF00FFu);
        if (first) { out[LOST + j / 2 * 4 + j % 2] = two & 0xFFFFu; out[LOST + j / 2 * 4 + j % 2 + 2] = two >> 16; }
    }
}

__device__ void put_looks(float* out, const Seen& seen, bool first) {
    const float highest = bits_float(__reduce_max_sync(0xFFFFFFFFu, float_bits(seen.highest)));  // of non-negative numbers and NaN
    const u32 live = warp_total((u32)seen.live), high = warp_total((u32)seen.high);
    if (first) { out[0] = highest; out[1] = highest != highest ? highest : (float)(live - high); out[2] = (float)live; }
}

// Elements a thread has in its hands: 16 bytes of the widest array.
template <class P, class G, class O, int MODE> struct Hand {
    enum { N = MODE == MASTER || (int)P::BITS == 32 || (int)G::BITS == 32 || (int)O::BITS == 32 ? 4 : 8 };
};
#ifndef F16LAB_RESIDENT
#define F16LAB_RESIDENT (Hand<P, G, O, MODE>::N == 4 && !MEASURE ? 3 : 2)  // blocks a multiprocessor; `grid_of` knows it too
#endif

template <class P, class G, class O, int MODE, bool DRAW, bool DRAW_STATE, bool MEASURE, bool DECAYS>
__global__ void __launch_bounds__(256, F16LAB_RESIDENT)
adamw(typename P::code* theta, const typename G::code* grad, typename O::code* m, typename O::code* v, float* master,
      typename P::code* compensation, i64 blocks, const i64* tensor, const i64* first, const Row* rows, const float* S,
      const float* S_next, float factor, float eps, float lr, float beta1, float rest1, float beta2, float rest2,
      float kahan_scale, double* meters, float* looks) {
    const int N = Hand<P, G, O, MODE>::N;
    const Arrays<P, G, O> a = {theta, grad, m, v, master, compensation};
    const Numbers h = {lr, beta1, rest1, beta2, rest2, kahan_scale, 1.0f / kahan_scale};
    const u32 lane = threadIdx.x % 32;
    const i64 warps = (i64)gridDim.x * (blockDim.x / 32), start = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    Loaded<P, G, O, MODE, MEASURE, N> now, ahead;
    i64 t = 0, t_ahead = 0, index = 0, index_ahead = 0;
    if (start < blocks) { now.load(a, start * BLOCK + lane * N); t_ahead = tensor[start]; index_ahead = first[start]; }
    for (i64 b = start; b < blocks; b += warps) {
        t = t_ahead; index = index_ahead;
        if (b + warps < blocks) { t_ahead = tensor[b + warps]; index_ahead = first[b + warps]; }
        Shared s = shared_by<G, O>(rows[t], (u32)(index >> 32), S_next ? S_next[t] : 1, S ? S[t] : 1, factor, eps, h);
        s.theta = (u32)index * POSITION + s.t.key_theta;
        s.m = (u32)index * POSITION + s.t.key_m;
        s.v = (u32)index * POSITION + s.t.key_v;
        Seen seen = {};
#pragma unroll 2
        for (u32 within = lane * N; within < BLOCK; within += 32 * N) {
            const i64 at = b * BLOCK + within;
            const bool last = within + 32 * N >= BLOCK;
            if (!last || b + warps < blocks) ahead.load(a, last ? (b + warps) * BLOCK + lane * N : at + 32 * N);
            Seen mine = {};
            if (quick<P, G, O, MODE, DRAW, DRAW_STATE, MEASURE, DECAYS, N>(now, within, s, h, mine)) {
                now.store(a, at);
                seen.take(mine);
            } else {
#pragma unroll 1
                for (int i = 0; i < N; ++i)
                    exact_element<P, G, O, MODE, DRAW, DRAW_STATE, MEASURE, DECAYS>(a, at + i, within + i, s, h, seen);
            }
            now = ahead;
        }
        if (MEASURE) put_meters(meters + b * METERS, seen, lane == 0);
        if (Is<O, F16>::YES && looks) put_looks(looks + b * 3, seen, lane == 0);
    }
}

// ---------------------------------------------------------------- the scale of 16-bit moments
// S of each tensor for its next step, from what its blocks of `looks` [blocks, 3] saw. One block of threads a tensor.
__global__ void __launch_bounds__(256) choose_scale(const float* looks, const i64* starts, const float* S, float* S_next,
                                                    float least, float most, float v_high, float v_low, int low_share) {
    __shared__ u32 tops[8];
    __shared__ u64 lows[8], lives[8];
    u32 top = 0;
    u64 low = 0, live = 0;
#pragma unroll 4
    for (i64 b = starts[blockIdx.x] + threadIdx.x; b < starts[blockIdx.x + 1]; b += blockDim.x) {
        top = max(top, float_bits(looks[b * 3]));  // of non-negative numbers and NaN
        low += (u32)looks[b * 3 + 1];
        live += (u32)looks[b * 3 + 2];
    }
    for (int d = 16; d; d /= 2) {
        top = max(top, __shfl_down_sync(0xFFFFFFFFu, top, d));
        low += __shfl_down_sync(0xFFFFFFFFu, low, d);
        live += __shfl_down_sync(0xFFFFFFFFu, live, d);
    }
    if (threadIdx.x % 32 == 0) { tops[threadIdx.x / 32] = top; lows[threadIdx.x / 32] = low; lives[threadIdx.x / 32] = live; }
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < 8; ++w) { top = max(top, tops[w]); low += lows[w]; live += lives[w]; }
    const float highest = bits_float(top);
    float s = S[blockIdx.x];
    if (highest > v_high && top < 0x7F800000u) {  // halved until S² brings it to v_high or below
        const u32 ratio = float_bits(highest / v_high), exponent = (ratio >> 23) - 126;
        s = s * power(-(int)((exponent + ((ratio & 0x7FFFFFu) != 0)) >> 1));
    } else if (low * (u64)low_share > live && highest <= v_low) s = s * 2;
    S_next[blockIdx.x] = s < least ? least : s > most ? most : s;
}
