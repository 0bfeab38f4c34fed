// gelu.cu: GELU in its tanh form and its derivative, element by element.
//
// Reference  f16lab.pointwise.GELU: x/2 · (1 + tanh u) with u = √(2/π)(x + 0.044715 x³), in f32, one rounding of the output
// Layout     flat arrays, any alignment; WHOLE: n is a multiple of 8 and the addresses suit loads of eight numbers
// Launch     blocks of 256 threads, twice eight elements a thread, grid-stride
// Numerics   (1 + tanh u)/2 is 1/(1 + e^-2u), which does not cancel where tanh u is near -1: the result keeps its digits in the left
//            tail, where the reference loses them. e^-2u = 2^n p(f), p a polynomial; the reciprocal is correctly rounded. No library
//            function: the same bits on every device, and on the host. Errors are measured in nbs/05b_row_kernels.
#include "eight.cuh"

using namespace f16lab;

// 1/d for d >= 1; results below the smallest normal number are 0.
F16LAB_FN float reciprocal(float d) {
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);  // the approximation's last bit mended: rounded to nearest
#else
    const float r = 1.0f / d;
    return r < 1.17549435e-38f ? 0.0f : r;
#endif
}

// s = 1/(1 + e^-2u) and rest = 1 - s, both with all their digits. x is clamped where s leaves the range of f32; a NaN is not seen here.
struct Sigmoid {
    float square, s, rest;
    F16LAB_FN explicit Sigmoid(float x) {
        const float LIMIT = 10.031f;  // there e^-2u is 2^127 or 2^-127
        x = fminf(fmaxf(x, -LIMIT), LIMIT);
        square = x * x;
        const float z = x * fmaf(square, -0.10294324f, -2.3022082f);  // -2u·log2(e)
        const float near = z + 12583039.0f;                           // 1.5·2^23 + 127: the nearest whole number n, biased
        const float f = z - (near - 12583039.0f);                     // in [-1/2, 1/2]
        const float scale = bits_float(float_bits(near) << 23);       // 2^n, 0 for n = -127
        float p = 1.5353362e-4f;                                      // 2^f with relative error 2^-28
        p = fmaf(p, f, 1.3398875e-3f);
        p = fmaf(p, f, 9.618437e-3f);
        p = fmaf(p, f, 5.5503324e-2f);
        p = fmaf(p, f, 0.24022648f);
        p = fmaf(p, f, 0.6931472f);
        p = fmaf(p, f, 1.0f);
        s = reciprocal(fmaf(p, scale, 1.0f));
        rest = p * scale * s;
    }
};

F16LAB_FN float gelu_value(float x) { return x * Sigmoid(x).s; }

// d/dx of x·s: s + x·2u'(x)·s·rest
F16LAB_FN float gelu_slope(float x) {
    const Sigmoid y(x);
    const float twice = fmaf(y.square, 0.21406445f, 1.5957691f);  // 2u' = 2√(2/π)(1 + 3·0.044715 x²)
    return fmaf(y.s, x * twice * y.rest, y.s);
}

#define ROUND 2048  // elements a block handles at once; a block takes two rounds together, so that loads overlap
F16LAB_FN int left(i64 n, i64 at) { return at >= n ? 0 : n - at < 8 ? (int)(n - at) : 8; }

template <class X, class Y, bool WHOLE>
__global__ void __launch_bounds__(256) gelu(const typename X::code* __restrict__ x, typename Y::code* __restrict__ y, i64 n) {
    for (i64 base = (i64)blockIdx.x * 2 * ROUND + threadIdx.x * 8; base < n; base += (i64)gridDim.x * 2 * ROUND) {
        Eight<X> in[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) in[r] = load8<X, WHOLE>(x + base + r * ROUND, left(n, base + r * ROUND));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = gelu_value(number<X>(in[r], k));
            store8<Y, WHOLE>(y + base + r * ROUND, packed<Y>(v), left(n, base + r * ROUND));
        }
    }
}

template <class G, class X, class D, bool WHOLE>
__global__ void __launch_bounds__(256) gelu_backward(const typename G::code* __restrict__ g, const typename X::code* __restrict__ x,
                                                     typename D::code* __restrict__ dx, i64 n) {
    for (i64 base = (i64)blockIdx.x * 2 * ROUND + threadIdx.x * 8; base < n; base += (i64)gridDim.x * 2 * ROUND) {
        Eight<G> up[2];
        Eight<X> in[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            up[r] = load8<G, WHOLE>(g + base + r * ROUND, left(n, base + r * ROUND));
            in[r] = load8<X, WHOLE>(x + base + r * ROUND, left(n, base + r * ROUND));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = number<G>(up[r], k) * gelu_slope(number<X>(in[r], k));
            store8<D, WHOLE>(dx + base + r * ROUND, packed<D>(v), left(n, base + r * ROUND));
        }
    }
}
