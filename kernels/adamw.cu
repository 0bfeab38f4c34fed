// adamw.cu: one AdamW step over a flat group of tensors: unscale, clip, update, write back, measure.
//
// Reference  f16lab.groups.update_rows (adamw_change, store_moment, write_plain, write_master, write_kahan, meters)
// Layout     flat buffers [blocks, 1024]; every tensor starts with a new block, so what differs by tensor is a number per block
// Launch     blocks of 256 threads, four elements a thread; a grid-stride loop over the 1024-element blocks, one launch a group
// Numerics   + − × ÷ √ and conversions, each rounded on its own (no contraction): equal to the reference bit for bit.
//            The two sums of the meters are f64 in another order: within 2^-40 of the reference, repeatable.
#include "ports.cuh"

using namespace f16lab;

#define BLOCK 1024
#define LANES 4
enum { PLAIN = 0, MASTER = 1, KAHAN = 2 };
enum { DOT, SQUARE, LOST, ASKED, STALLED_M, ASKED_M, STALLED_V, ASKED_V, FLUSHED, SATURATED, METERS };

// One number a block each. gain: unscale · clip · S; eps: eps · S; ratio: this step's S over the S that m and v are stored with.
struct Columns { const float *gain, *eps, *wd, *c1, *c2, *ratio; const u32 *key_theta, *key_m, *key_v; const i64* first; };
struct Numbers { float lr, beta1, rest1, beta2, rest2, kahan_scale; };

template <class P> F16LAB_FN float top() { return P::BITS == 32 ? 3.402823466e38f : widen<P>((u32)P::TOP); }
template <> F16LAB_FN float top<F32>() { return 3.402823466e38f; }

// A moment as stored: rounded, saturated; counts what vanished and what was clamped.
template <class O, bool DRAW>
F16LAB_FN typename O::code keep(float x, u32 ka, u64 index, float& flushed, float& saturated) {
    typename O::code c = DRAW ? Port<O>::draw(x, noise_at(ka, index), true) : Port<O>::write(x, true);
    if (O::BITS < 32) {
        flushed += Port<O>::value(c) == 0 && x != 0;
        saturated += fabsf(x) > top<O>();
    }
    return c;
}

// Sum of one value over the 256 threads of a block, valid in thread 0; the same order every time.
__device__ __forceinline__ double block_total(double x, double* shared) {
    for (int s = 16; s; s /= 2) x += __shfl_down_sync(0xFFFFFFFFu, x, s);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    if (threadIdx.x == 0) for (int w = 0; w < 8; ++w) sum += shared[w];
    __syncthreads();
    return sum;
}

template <class P, class G, class O, int MODE, bool DRAW, bool DRAW_STATE, bool MEASURE>
__global__ void __launch_bounds__(256) adamw(typename P::code* theta, const typename G::code* grad, typename O::code* m,
                                             typename O::code* v, float* master, typename P::code* compensation, i64 blocks,
                                             const float* gain_, const float* eps_, const float* wd_, const float* c1_,
                                             const float* c2_, const float* ratio_, const u32* key_theta_, const u32* key_m_,
                                             const u32* key_v_, const i64* first_, float lr, float beta1, float rest1, float beta2,
                                             float rest2, float kahan_scale, double* meters, float* looks) {
    const Columns c = {gain_, eps_, wd_, c1_, c2_, ratio_, key_theta_, key_m_, key_v_, first_};
    const Numbers h = {lr, beta1, rest1, beta2, rest2, kahan_scale};
    __shared__ double shared[8];
    for (i64 b = blockIdx.x; b < blocks; b += gridDim.x) {
        const i64 at = b * BLOCK + threadIdx.x * LANES;
        const u64 index = (u64)(c.first[b] + threadIdx.x * LANES);
        const float gain = c.gain[b], eps = c.eps[b], c1 = c.c1[b], c2 = c.c2[b];
        const u32 key_theta = DRAW ? c.key_theta[b] : 0, key_m = DRAW_STATE ? c.key_m[b] : 0, key_v = DRAW_STATE ? c.key_v[b] : 0;
        Pack<typename P::code, LANES> p = *(Pack<typename P::code, LANES>*)(theta + at), k;
        const Pack<typename G::code, LANES> gs = *(const Pack<typename G::code, LANES>*)(grad + at);
        Pack<typename O::code, LANES> ms = *(Pack<typename O::code, LANES>*)(m + at), vs = *(Pack<typename O::code, LANES>*)(v + at);
        Pack<float, LANES> wide;
        if (MODE == MASTER) wide = *(Pack<float, LANES>*)(master + at);
        if (MODE == KAHAN) k = *(Pack<typename P::code, LANES>*)(compensation + at);
        float seen[METERS] = {0}, highest = 0, low = 0, live = 0;
        double dot = 0, square = 0;
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            const float g = __fmul_rn(Port<G>::read(gs.v[i]), gain);
            float x = Port<O>::read(ms.v[i]), y = Port<O>::read(vs.v[i]);
            if (c.ratio) { const float r = c.ratio[b]; x = __fmul_rn(x, r); y = __fmul_rn(y, __fmul_rn(r, r)); }
            const float old_x = x, old_y = y, before = Port<P>::read(p.v[i]), start = MODE == MASTER ? wide.v[i] : before;
            x = __fadd_rn(__fmul_rn(x, h.beta1), __fmul_rn(g, h.rest1));
            const float gg = __fmul_rn(g, g);
            y = __fadd_rn(__fmul_rn(y, h.beta2), __fmul_rn(gg, h.rest2));
            const float root = __fadd_rn(__fsqrt_rn(__fdiv_rn(y, c2)), eps);
            float change = __fdiv_rn(__fdiv_rn(x, c1), root);
            if (c.wd) change = __fadd_rn(change, __fmul_rn(start, c.wd[b]));
            change = __fmul_rn(change, h.lr);
            float gone_m = 0, gone_v = 0, clamped = 0;
            ms.v[i] = keep<O, DRAW_STATE>(x, key_m, index + i, gone_m, clamped);
            vs.v[i] = keep<O, DRAW_STATE>(y, key_v, index + i, gone_v, clamped);
            highest = y > highest || y != y ? y : highest;
            low += y != 0 && y < 6.103515625e-05f;  // 2^-14: below it an f16 moment has fewer and fewer digits
            live += y != 0;

            float realised;
            if (MODE == KAHAN) {
                const float rest = __fdiv_rn(Port<P>::read(k.v[i]), h.kahan_scale), u = __fsub_rn(rest, change);
                p.v[i] = Port<P>::write(__fadd_rn(start, u), false);
                const float now = Port<P>::value(p.v[i]), left = __fadd_rn(u, __fsub_rn(start, now));
                k.v[i] = Port<P>::write(__fmul_rn(left, h.kahan_scale), true);
                realised = __fadd_rn(__fsub_rn(now, start), __fsub_rn(__fdiv_rn(Port<P>::value(k.v[i]), h.kahan_scale), rest));
            } else {
                const float now = __fsub_rn(start, change);
                p.v[i] = DRAW ? Port<P>::draw(now, noise_at(key_theta, index + i), false) : Port<P>::write(now, false);
                if (MODE == MASTER) wide.v[i] = now;
                realised = __fsub_rn(MODE == MASTER ? now : Port<P>::value(p.v[i]), start);
            }
            if (MEASURE) {
                const bool asked = change != 0;
                dot += (double)__fmul_rn(realised, -change);
                square += (double)__fmul_rn(change, change);
                seen[LOST] += asked && Port<P>::value(p.v[i]) == before;
                seen[ASKED] += asked;
                seen[STALLED_M] += g != old_x && Port<O>::value(ms.v[i]) == old_x;
                seen[ASKED_M] += g != old_x;
                seen[STALLED_V] += gg != old_y && Port<O>::value(vs.v[i]) == old_y;
                seen[ASKED_V] += gg != old_y;
                seen[FLUSHED] += gone_m + gone_v;
                seen[SATURATED] += clamped;
            }
        }
        *(Pack<typename P::code, LANES>*)(theta + at) = p;
        *(Pack<typename O::code, LANES>*)(m + at) = ms;
        *(Pack<typename O::code, LANES>*)(v + at) = vs;
        if (MODE == MASTER) *(Pack<float, LANES>*)(master + at) = wide;
        if (MODE == KAHAN) *(Pack<typename P::code, LANES>*)(compensation + at) = k;
        if (MEASURE) {
            double* out = meters + b * METERS;
            const double d = block_total(dot, shared), s = block_total(square, shared);
            if (threadIdx.x == 0) { out[DOT] = d; out[SQUARE] = s; }
            for (int j = LOST; j < METERS; ++j) {
                const double total = block_total(seen[j], shared);
                if (threadIdx.x == 0) out[j] = total;
            }
        }
        if (looks) {
            for (int s = 16; s; s /= 2) {
                const float other = __shfl_down_sync(0xFFFFFFFFu, highest, s);
                highest = other > highest || other != other ? other : highest;
            }
            __shared__ float tops[8];
            if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = highest;
            const double few = block_total(low, shared), alive = block_total(live, shared);
            if (threadIdx.x == 0) {
                float most = 0;
                for (int w = 0; w < 8; ++w) most = tops[w] > most || tops[w] != tops[w] ? tops[w] : most;
                looks[b * 3] = most; looks[b * 3 + 1] = (float)few; looks[b * 3 + 2] = (float)alive;
            }
            __syncthreads();
        }
    }
}
