"""The CPU stand-in for CUDA itself, and the cast and AdamW kernels under it."""

import numpy as np
import pytest
import torch
from cuda_host import launch_on_host

from f16lab.precision import BF16, E4M3, E5M2, F16, F32, bits_of, convert
from f16lab.rounding import Key, Purpose, convert_stochastic

NAMES = {F16: "f16lab::F16", BF16: "f16lab::BF16", E4M3: "f16lab::E4M3", E5M2: "f16lab::E5M2", F32: "f16lab::F32"}
REVERSE = """
__global__ void reverse(const int* x, int* y) {
    __shared__ int s[256];
    s[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
    __syncthreads();
    y[blockIdx.x * 256 + threadIdx.x] = s[255 - threadIdx.x];
    __syncthreads();
}
__global__ void warp_sums(const float* x, float* y) {
    float s = x[threadIdx.x];
    for (int d = 16; d; d /= 2) s += __shfl_down_sync(0xFFFFFFFFu, s, d);
    if (threadIdx.x % 32 == 0) y[threadIdx.x / 32] = s;
    y[8 + threadIdx.x] = __ballot_sync(0xFFFFFFFFu, threadIdx.x % 3 == 0);
}
"""


def test_barriers_and_shuffles_mean_what_they_mean_on_a_gpu():
    x, y = torch.arange(768, dtype=torch.int32), torch.zeros(768, dtype=torch.int32)
    launch_on_host(REVERSE, "reverse", 3, x, y)
    assert torch.equal(y, x.view(3, 256).flip(1).reshape(-1))
    x, y = torch.arange(256.0), torch.zeros(264)
    launch_on_host(REVERSE, "warp_sums", 1, x, y)
    assert torch.equal(y[:8], x.view(8, 32).sum(1))


@pytest.mark.parametrize("p", (F16, BF16, E4M3), ids=str)
def test_the_cast_kernel_has_the_bits_of_the_reference(p):
    x = torch.randn(3001, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 6, 3001)
    y, key = torch.full((3001,), 7, dtype=torch.uint8).to(p.dtype), Key.of(1, 2, Purpose.USER, "x")
    for drawn in (False, True):
        launch_on_host("cast.cu", f"cast<{NAMES[F32]}, {NAMES[p]}, {str(drawn).lower()}, false>", 2, x, y, np.int64(len(x)),
                       np.uint32(key.a), np.uint64(5), np.int32(0), None, None)
        assert torch.equal(bits_of(y), bits_of(convert_stochastic(x, p, key, 5) if drawn else convert(x, p)))
