"""CUDA kernels against their references: the same bits, whatever the size, alignment, stream and launch shape."""

import itertools

import numpy as np
import pytest
import torch

from f16lab import device as device_module, fused_adamw, launch
from f16lab.adamw import AdamWConfig
from f16lab.cast import cast
from f16lab.device import open_device
from f16lab.fused_adamw import has_kernel, update_group_on_gpu
from f16lab.groups import Group, StepNumbers, slots_of, update_group
from f16lab.launch import cast_on_gpu, check_tensors, kernel_source
from f16lab.optim import step_scratch
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, bits_of, convert
from f16lab.profile import PrecisionProfile
from f16lab.rounding import Key, Purpose, convert_stochastic

FORMATS = (F16, BF16, F32, E4M3, E5M2)
gpu = pytest.mark.gpu


def wild(n: int, seed: int = 0) -> torch.Tensor:
    """f32 [n] of random bit patterns and of numbers of every size around the formats' ranges."""
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-2**31, 2**31, (n,), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)
    sized = torch.randn(n, generator=g) * torch.exp2(torch.randint(-30, 18, (n,), generator=g).float())
    return torch.where(torch.rand(n, generator=g) < 0.5, bits, sized)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits_of(a.cpu()), bits_of(b.cpu()))


@gpu
@pytest.mark.parametrize("src,dst", [(a, b) for a, b in itertools.product(FORMATS, FORMATS) if a is not b and b is not F32], ids=str)
def test_cast_has_the_bits_of_the_reference(src, dst):
    x = convert(wild(100_003), src)
    y, stats = cast_on_gpu(x.cuda(), dst, statistics=True)
    right = convert(x, dst)
    if dst.holds(src):  # widening is torch's own `.to`, which may drop the sign of a NaN; the kernel keeps it
        assert torch.equal(y.isnan().cpu(), right.isnan())
        y, right = y.nan_to_num(posinf=torch.inf, neginf=-torch.inf), right.nan_to_num(posinf=torch.inf, neginf=-torch.inf)
    assert same_bits(y, right)
    y = cast_on_gpu(x.cuda(), dst)[0]
    wide = convert(y.cpu(), F32)
    exponents = torch.bincount((wide.view(torch.int32) & 0x7FFFFFFF) >> 23, minlength=256)
    assert torch.equal(stats.counts[:256].cpu(), exponents)
    assert stats.counts[256:].tolist() == [int((wide == 0).sum()), int(wide.isinf().sum()), int(wide.isnan().sum())]
    assert stats.amax.item() == wide[wide.isfinite()].abs().max().item()


@gpu
@pytest.mark.parametrize("p", (F16, BF16, E4M3, E5M2), ids=str)
@pytest.mark.parametrize("n", (0, 1, 31, 32, 33, 1023, 1_000_007))
def test_stochastic_cast_has_the_bits_of_the_reference_for_any_size_and_alignment(p, n):
    key = Key.of(7, 3, Purpose.USER, "x")
    for offset in (0, 1, 3):
        x = wild(n + offset, n)[offset:]
        on_gpu = torch.cat([torch.zeros(offset), x]).cuda()[offset:]
        assert same_bits(cast_on_gpu(on_gpu, p, key, start=2**32 - 5)[0], convert_stochastic(x, p, key, 2**32 - 5))


@gpu
def test_more_than_2_to_the_31_elements():
    n = 2**31 + 5
    x = torch.full((n,), 1 + 2**-9, device="cuda")
    y, stats = cast_on_gpu(x, BF16, Key.of(1, 0, Purpose.USER, "big"), statistics=True)
    assert stats.counts.sum() == n
    tail = convert_stochastic(x[-1000:].cpu(), BF16, Key.of(1, 0, Purpose.USER, "big"), n - 1000)
    assert same_bits(y[-1000:], tail)


@gpu
def test_a_side_stream_with_a_slow_producer_is_waited_for():
    side, wrong = torch.cuda.Stream(), 0
    a = torch.randn(4096, 4096, device="cuda")
    for i in range(200):
        with torch.cuda.stream(side):
            x = (a @ a)[0] * 0 + float(i)
            y, _ = cast_on_gpu(x, F16)
            wrong += int((y != i).sum().item() > 0)
    assert wrong == 0


@gpu
def test_bad_tensors_are_refused_in_words():
    x = torch.zeros(4, 4, device="cuda")
    with pytest.raises(ValueError, match="not contiguous"): cast_on_gpu(x.t(), F16)
    with pytest.raises(NotImplementedError, match="f64"): cast_on_gpu(x.double(), F16)
    with pytest.raises(ValueError, match="several devices"): check_tensors("k", {"a": x, "b": x.cpu()})


def groups_of(profile: PrecisionProfile) -> tuple[Group, Group]:
    """The same group on the CPU and on the GPU: tensors of odd sizes, random weights, moments, gradients."""
    g = torch.Generator().manual_seed(5)
    initial = {f"t{i}.weight": torch.randn(*shape, generator=g) * 0.1 for i, shape in enumerate([(64, 65), (1,), (1025,), (3, 7)])}
    out, storage = [], slots_of(profile).storage
    for device in ("cpu", "cuda"):
        params = {name: torch.nn.Parameter(convert(t, storage).to(device)) for name, t in initial.items()}
        out.append(Group("g", slots_of(profile), params, {n: t.to(device) for n, t in initial.items()}))
    return tuple(out)


PROFILES = ("f32", "f16", "bf16", "bf16_llmc", "bf16_sr", "all_f16", "f16,rounding=kahan", "bf16,rounding=kahan,master=none", "f16,master=f32",
            "bf16_sr,optimizer=bf16", "f16,optimizer=f16,state_scale=2^12")


@gpu
@pytest.mark.parametrize("text", PROFILES)
@pytest.mark.parametrize("wd", (0.0, 0.1))
def test_adamw_has_the_bits_of_the_reference(text, wd):
    cpu, cuda = groups_of(PrecisionProfile.parse(text))
    assert has_kernel(cuda)
    scratch, g = step_scratch([cpu], cpu.slots.work), torch.Generator().manual_seed(9)
    for step in range(4):
        for name in cpu.params:
            grad = convert(torch.randn(cpu.params[name].shape, generator=g) * 2.0 ** (-6 * step), cpu.slots.grad)
            cpu.params[name].grad.copy_(grad)
            cuda.params[name].grad.copy_(grad)
        numbers = StepNumbers(AdamWConfig(weight_decay=wd), 1e-3, step, 0.37, 11)
        update_group(cpu, numbers, scratch, measure=True)
        update_group_on_gpu(cuda, numbers, measure=True)
        for role in ("flat", "m", "v", "master", "compensation", "S", "S_next", "looks"):
            a, b = getattr(cpu, role), getattr(cuda, role)
            assert (a is None) == (b is None)
            assert a is None or same_bits(a, b), f"{role} differs in step {step}"
        assert torch.equal(cpu.meters[:, 2:], cuda.meters[:, 2:].cpu())
        assert torch.allclose(cpu.meters[:, :2], cuda.meters[:, :2].cpu(), rtol=2**-40, atol=0)


@gpu
@pytest.mark.parametrize("text", ("f32", "bf16_llmc", "all_f16"))
def test_adamw_is_the_same_for_any_grid_and_size(text, monkeypatch):
    """A million elements against the CPU, with more warps than blocks and with one block of threads."""
    profile, g = PrecisionProfile.parse(text), torch.Generator().manual_seed(3)
    initial = {"big.weight": torch.randn(1000, 1001, generator=g) * 0.02, "bias": torch.zeros(1001)}
    groups = []
    for device in ("cpu", "cuda", "cuda"):
        params = {name: torch.nn.Parameter(convert(t, slots_of(profile).storage).to(device)) for name, t in initial.items()}
        groups.append(Group("g", slots_of(profile), params, {n: t.to(device) for n, t in initial.items()}))
    sizes = torch.exp2(torch.randint(-20, 2, groups[0].m.shape, generator=g).float())
    grad = convert(torch.randn(groups[0].m.shape, generator=g) * sizes, groups[0].slots.grad)
    numbers = StepNumbers(AdamWConfig(weight_decay=0.1), 1e-3, 4, 0.5, 11)
    scratch = step_scratch([groups[0]], groups[0].slots.work)
    for group in groups: group.grads.flat.copy_(grad)
    for step in range(2):
        update_group(groups[0], numbers, scratch)
        for group, blocks in zip(groups[1:], (528, 1)):
            monkeypatch.setattr(fused_adamw, "blocks_of", lambda device, per: blocks)
            update_group_on_gpu(group, numbers)
    for group in groups[1:]:
        assert all(same_bits(getattr(groups[0], role), getattr(group, role)) for role in ("flat", "m", "v"))


EXACT = kernel_source("exact.cuh").replace("#pragma once", "") + """
__global__ void roots(float* y) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < 1u << 24; i += gridDim.x * blockDim.x)
        y[i] = f16lab::root(f16lab::bits_float(0x3F800000u + i));
}
__global__ void quotients(float b, float* y) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < 1u << 23; i += gridDim.x * blockDim.x)
        y[i] = f16lab::quotient(f16lab::bits_float(0x3F800000u + i), b);
}
"""


@gpu
def test_roots_and_quotients_are_rounded_once_for_every_mantissa():
    """The seeds are the hardware's: this is where they are looked at, all ones in the divisor first of all."""
    device = torch.device("cuda", torch.cuda.current_device())
    y = torch.empty(1 << 24, device=device)
    launch.launch(EXACT, "roots", device, 264, y)
    right = (torch.arange(1 << 24, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    assert same_bits(y, torch.from_numpy(np.sqrt(right.numpy())))
    for bits in (*range(0x3FFFFFFF, 0x3FFFFFF0, -1), 0x3F800000, 0x3F800001, 0x3FB504F3, 0x3F2AAAAB, 0x322BCC77):
        b = np.uint32(bits).view(np.float32)
        launch.launch(EXACT, "quotients", device, 264, b, y)
        assert same_bits(y[: 1 << 23], torch.from_numpy(right.numpy()[: 1 << 23] / b)), hex(bits)


@gpu
def test_the_door_narrows_by_the_kernel_and_boundary_does_not(monkeypatch):
    asked, real = [], launch.launch
    monkeypatch.setattr(launch, "launch", lambda file, *rest: (asked.append(file), real(file, *rest)))
    open_device("cuda")
    x, key = wild(10_007), Key.of(5, 2, Purpose.USER, "x")
    assert same_bits(cast(x.cuda(), F16), convert(x, F16)) and asked == ["cast.cu"]
    assert same_bits(cast(x.cuda(), BF16, rounding="stochastic", key=key), convert_stochastic(x, BF16, key)) and len(asked) == 2
    with device_module.using_table(device_module.ALL_BOUNDARY, "cuda"):
        assert same_bits(cast(x.cuda(), F16), convert(x, F16)) and len(asked) == 2
    compiled = torch.compile(lambda x: cast(x, F16), fullgraph=True)
    assert same_bits(compiled(x.cuda()), convert(x, F16)) and len(asked) == 2
