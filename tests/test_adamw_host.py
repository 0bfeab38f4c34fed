"""The AdamW kernel on the CPU stand-in for CUDA has the bits of `update_group`, for strange numbers too."""

import pytest
import torch
from cuda_host import launch_on_host

from f16lab import fused_adamw
from f16lab.adamw import AdamWConfig
from f16lab.fused_adamw import next_scale_on_gpu, update_group_on_gpu
from f16lab.groups import Group, StepNumbers, choose_scale, slots_of, update_group
from f16lab.optim import step_scratch
from f16lab.precision import F32, bits_of, convert
from f16lab.profile import PrecisionProfile

CASES = (  # profile, meters, weight decay: each is one instance of the kernel, built once for all tests
    ("f32", True, 0.1), ("f16", True, 0.1), ("bf16", True, 0.0), ("bf16_llmc", False, 0.1), ("bf16_sr", True, 0.1),
    ("all_f16", True, 0.1), ("f16,rounding=kahan", True, 0.1), ("bf16_sr,optimizer=bf16", True, 0.1),
    ("f16,optimizer=f16,state_scale=2^12", True, 0.1),
    ("f32,param=e4m3", True, 0.1))
ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-42, 1e-38, 3e-30, -2e-20, 2.0**-25, 2.0**-14, -(2.0**-14), 1.0, -1.0, 300.0,
                    65503.0, 65519.0, 65520.0, 1e6, -1e9, 3e19, -1e30, 3.3895e38, torch.inf, -torch.inf, torch.nan])


@pytest.fixture
def on_host(monkeypatch):
    def run(file, name, device, blocks, *rest): launch_on_host(file, name, blocks, *rest)
    monkeypatch.setattr(fused_adamw, "launch", run)
    monkeypatch.setattr(fused_adamw, "blocks_of", lambda device, per_multiprocessor: per_multiprocessor)


def two_groups(profile: PrecisionProfile) -> tuple[Group, Group]:
    """The same group twice: tensors of odd sizes, two that decay and two that do not, weights of every size."""
    g, out = torch.Generator().manual_seed(5), []
    shapes = [(40, 65), (1,), (1025,), (3, 7)]
    sized = lambda s: torch.randn(s, generator=g) * torch.exp2(torch.randint(-24, 4, s, generator=g).float())
    initial = {f"t{i}.w": sized(s) for i, s in enumerate(shapes)}
    for _ in range(2):
        params = {name: torch.nn.Parameter(convert(t, slots_of(profile).storage)) for name, t in initial.items()}
        out.append(Group("g", slots_of(profile), params, initial))
    return tuple(out)


def put(a: Group, b: Group, role: str, x: torch.Tensor) -> None:
    for group in (a, b):
        place = group.grads.flat if role == "grad" else getattr(group, role)
        p = group.slots.grad if role == "grad" else group.slots.optimizer
        place.copy_(convert(x.view(place.shape), p, saturate=role != "grad"))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; of a NaN only that it is one."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(bits_of(a)[~nan], bits_of(b)[~nan])


def compare(a: Group, b: Group, step: int) -> None:
    for role in ("flat", "m", "v", "master", "compensation", "S", "S_next", "looks"):
        x, y = getattr(a, role), getattr(b, role)
        assert (x is None) == (y is None)
        assert x is None or same(x, y), f"{role} differs in step {step}"
    finite = a.meters.isfinite().all(1)
    assert torch.equal(a.meters[finite, 2:], b.meters[finite, 2:])  # a sum of infinite changes has no one value
    assert torch.allclose(a.meters[finite, :2], b.meters[finite, :2], rtol=2**-40, atol=0)


def step_both(a: Group, b: Group, scratch: tuple, numbers: StepNumbers, measure: bool) -> None:
    update_group(a, numbers, scratch, measure)
    update_group_on_gpu(b, numbers, measure)
    compare(a, b, numbers.step)


@pytest.mark.parametrize("text,measure,wd", CASES)
def test_adamw_has_the_bits_of_the_reference(on_host, text, measure, wd):
    a, b = two_groups(PrecisionProfile.parse(text))
    scratch, g, n = step_scratch([a], F32), torch.Generator().manual_seed(9), a.m.numel()
    for step in range(3):
        put(a, b, "grad", torch.randn(n, generator=g) * 2.0 ** (-6 * step))
        step_both(a, b, scratch, StepNumbers(AdamWConfig(weight_decay=wd), 1e-3, step, 0.37, 11), measure)


@pytest.mark.parametrize("text,measure,wd", CASES)
def test_strange_numbers_too(on_host, text, measure, wd):
    a, b = two_groups(PrecisionProfile.parse(text))
    scratch, g, n = step_scratch([a], F32), torch.Generator().manual_seed(2), a.m.numel()
    wide = lambda: torch.randn(n, generator=g) * torch.exp2(torch.randint(-130, 3, (n,), generator=g).float())
    some = lambda: ODD[torch.randint(len(ODD), (n,), generator=g)]
    odd = lambda share: torch.where(torch.rand(n, generator=g) < share, some(), wide())
    state = lambda: odd(0.2).nan_to_num(0.0, 0.0, 0.0).clamp(-1e18, 1e18)
    hard = (({}, 1e-3, 0.0), (dict(beta1=0.0, beta2=0.999, eps=1e-30), 3e-2, 0.3), (dict(beta2=0.9999999), 0.0, 0.1),
            (dict(beta1=0.5), 0.5, 0.05))
    for step, (config, lr, share) in enumerate(hard):
        put(a, b, "m", state())
        put(a, b, "v", state().abs())
        put(a, b, "grad", odd(share))
        numbers = StepNumbers(AdamWConfig(weight_decay=wd, **config), lr, 2**32 - 1 - step, 1.7e-3, 2**32 - 7)
        step_both(a, b, scratch, numbers, measure)
        if a.S is not None: a.S_next = b.S_next = a.S * 2.0 ** torch.tensor([1.0, -2.0, 0.0, 1.0])


@pytest.mark.parametrize("zero", ("grad", "all"))
def test_zeros_take_the_quick_way_and_keep_their_sign(on_host, zero):
    a, b = two_groups(PrecisionProfile.parse("all_f16"))
    scratch, n = step_scratch([a], F32), a.m.numel()
    signs = torch.where(torch.arange(n) % 3 == 0, -0.0, 0.0)
    for role in ("grad",) if zero == "grad" else ("grad", "m", "v"):
        put(a, b, role, signs.abs() if role == "v" else signs)
    step_both(a, b, scratch, StepNumbers(AdamWConfig(weight_decay=0.1), 1e-3, 0, 0.37, 11), True)


def test_the_next_scale_is_the_one_of_the_reference(on_host):
    a, b = two_groups(PrecisionProfile.parse("all_f16"))
    for top in (0.0, 1e-3, 256.0, 257.0, 2.0**14, 2.0**14 + 8, 2.0**16, 2.0**16 + 32, 1e9, 3e38, torch.inf, torch.nan):
        for low, live in ((0, 1024), (15, 1024), (16, 1024), (17, 1024), (1024, 1024), (0, 0)):
            for group in (a, b):
                group.looks.copy_(torch.tensor([top, low, live]).expand(len(group.looks), 3))
                group.S = group.S_next = torch.tensor([2.0**6, 2.0**7, 2.0**10, 2.0**12])
            choose_scale(a, lambda own: own)
            next_scale_on_gpu(b)
            assert torch.equal(a.S_next, b.S_next), (top, low, live)
