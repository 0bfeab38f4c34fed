"""CUDA kernels against their references: the same bits, whatever the size, alignment, stream and launch shape."""

import itertools

import pytest
import torch

from f16lab.adamw import AdamWConfig
from f16lab.fused_adamw import has_kernel, update_group_on_gpu
from f16lab.groups import Group, StepNumbers, slots_of, update_group
from f16lab.launch import cast_on_gpu, check_tensors
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
