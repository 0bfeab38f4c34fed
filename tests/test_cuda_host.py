"""The CPU stand-in for CUDA itself, and the cast and AdamW kernels under it."""

import numpy as np
import pytest
import torch
from cuda_host import launch_on_host

from f16lab import launch
from f16lab.cast import _converters, cast
from f16lab.device import DispatchTable
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, bits_of, convert
from f16lab.rounding import Key, Purpose, convert_stochastic, noise, write_back

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


def mixed(n: int) -> torch.Tensor:
    """f32 [n] in runs of 64: ordinary numbers, some of every size, zeros, and any bits at all."""
    g = torch.Generator().manual_seed(n)
    bits = torch.randint(-2**31, 2**31, (n,), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)
    of_size = lambda lo, hi: torch.randn(n, generator=g) * torch.exp2(torch.randint(lo, hi, (n,), generator=g).float())
    sized, tame = of_size(-30, 18), of_size(-3, 3)
    kind = torch.randint(0, 32, (n // 64 + 1,), generator=g).repeat_interleave(64)[:n]
    return torch.where(kind < 2, bits, torch.where(kind < 8, sized, torch.where(kind < 9, torch.zeros(n), tame)))


def counted(y: torch.Tensor) -> list[int]:
    """What the statistics of a cast to `y` have to say."""
    wide = convert(y, F32)
    bins = torch.bincount((wide.view(torch.int32) & 0x7FFFFFFF) >> 23, minlength=256)
    return [*bins.tolist(), int((wide == 0).sum()), int(wide.isinf().sum()), int(wide.isnan().sum())]


def largest(y: torch.Tensor) -> float: return convert(y, F32).nan_to_num(0, 0, 0).abs().max().item()


@pytest.mark.parametrize("src,dst,drawn,stats", [
    (F32, F16, False, True), (F32, BF16, True, True), (F32, F16, True, False), (BF16, F16, False, False),
    (F16, BF16, True, False), (F32, E5M2, False, True), (E4M3, F32, False, False)], ids=str)
def test_the_cast_kernel_has_the_bits_of_the_reference(src, dst, drawn, stats):
    n, key = 2 * 16384 + 1234, Key.of(1, 2, Purpose.USER, "x")
    x = convert(mixed(n), src)
    for off, start, saturate in ((0, 5, False), (0, 2**32 - 9000, False), (1, 7, False), (0, 0, True)):
        y, part = torch.full((n,), 7.0).to(dst.dtype), x[off:]
        counts, amax = (torch.zeros(259, dtype=torch.int64), torch.zeros(1)) if stats else (None, None)
        flags = f"{str(drawn).lower()}, {str(stats).lower()}"
        launch_on_host("cast.cu", f"cast<{NAMES[src]}, {NAMES[dst]}, {flags}>", 2, part, y[off:], np.int64(len(part)),
                       np.uint32(key.a), np.uint64(start), np.int32(saturate), counts, amax)
        random = noise(key, start, len(part)) if drawn else None
        right = write_back(convert(part, F32), dst, random, saturate) if drawn else convert(part, dst, saturate)
        keep = ~right.isnan() if dst is F32 else ...  # torch's own widening may drop the sign of a NaN
        assert torch.equal(y[off:].isnan(), right.isnan()) and torch.equal(bits_of(y[off:])[keep], bits_of(right)[keep])
        if stats: assert counts.tolist() == counted(right) and amax.item() == largest(right)
        assert off == 0 or y[0].item() == 7


def test_the_door_uses_the_kernel_where_one_is_open(monkeypatch):
    """Run on the CPU stand-in: what `cast` narrows goes through it with the reference's bits, and nothing else does."""
    asked, table = [], DispatchTable((), kernels=True)
    def run(file, name, device, blocks, *rest):
        asked.append(name)
        launch_on_host(file, name, 1, *rest)
    monkeypatch.setattr(launch, "launch", run)
    monkeypatch.setattr(launch, "blocks_of", lambda device, per_multiprocessor: 1)
    monkeypatch.setattr(launch, "check_tensors", lambda name, tensors, written=(): torch.device("cpu"))
    monkeypatch.setattr(launch, "kernels_open", lambda kind: table.kernels)
    monkeypatch.setitem(_converters, "cpu", launch.narrow_on_gpu)
    x, key = mixed(5000), Key.of(1, 2, Purpose.USER, "x")
    assert torch.equal(bits_of(cast(x, F16)), bits_of(convert(x, F16))) and len(asked) == 1
    drawn = cast(x.requires_grad_(), F16, rounding="stochastic", key=key)
    assert torch.equal(bits_of(drawn.detach()), bits_of(convert_stochastic(x.detach(), F16, key))) and len(asked) == 2
    drawn.sum().backward()
    assert x.grad.dtype is torch.float32 and len(asked) == 2  # widening is torch's own copy
    cast(mixed(64).view(8, 8).t(), F16)                         # strided: plain torch
    cast(torch.zeros(3, dtype=torch.float64), F16)              # f64: plain torch
    assert len(asked) == 2
    table = DispatchTable((), kernels=False)
    assert torch.equal(bits_of(cast(x.detach(), F16)), bits_of(convert(x.detach(), F16))) and len(asked) == 2

