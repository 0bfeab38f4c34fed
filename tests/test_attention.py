"""Fused attention against attention in three operators, and what decides between them."""

from dataclasses import replace

import pytest
import torch

from f16lab import ops
from f16lab.attention import deterministic_algorithms, fused_attention, fused_backend
from f16lab.cast import Ledger
from f16lab.device import ALL_BOUNDARY, Path, open_device, table_for, using_table
from f16lab.ops import deviation
from f16lab.precision import BF16, F16, F32

gpu = pytest.mark.gpu


def operands(p=F32, B=2, H=3, T=64, d=64, device="cpu", seed=0) -> list[torch.Tensor]:
    """q, k, v as views of one product, as a layer makes them."""
    x = torch.randn(B, T, 3 * H * d, generator=torch.Generator().manual_seed(seed)).to(p.dtype).to(device)
    return list(ops.split_heads(x, 3, H))


def test_a_cpu_runs_the_three_operators():
    q, k, v = operands(F16)
    open_table = replace(table_for("cpu"), paths=(*table_for("cpu").paths, (("attention", "forward", F16), Path.NATIVE)))
    with using_table(open_table): assert fused_backend(q, k, v, F16, True, None) == ""
    with Ledger() as ledger: ops.attention(q, k, v, p=F16, stable=F32)
    assert {row.op for row in ledger.rows()} == {"batched_matmul", "softmax"}


def test_switches_are_put_back_also_after_an_error():
    memory = torch.utils.deterministic
    for filled in (True, False):
        memory.fill_uninitialized_memory = filled
        with pytest.raises(RuntimeError, match="stop"), deterministic_algorithms(True):
            assert torch.are_deterministic_algorithms_enabled() and not memory.fill_uninitialized_memory
            raise RuntimeError("stop")
        assert not torch.are_deterministic_algorithms_enabled() and memory.fill_uninitialized_memory is filled
    memory.fill_uninitialized_memory = True


def test_heads_without_a_gradient_get_zeros():
    x = torch.randn(2, 4, 12, requires_grad=True)
    q, _, v = ops.split_heads(x, 3, 2)
    (q.sum() + 2 * v.sum()).backward()
    assert torch.equal(x.grad.view(2, 4, 3, 4), torch.tensor([1.0, 0, 2]).view(3, 1).expand(2, 4, 3, 4))


# ---------------------------------------------------------------- on a GPU
def gradients(call, xs, g):
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g.to(y.dtype))]


@gpu
@pytest.mark.parametrize("deterministic", (True, False))
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_each_fused_kernel_means_what_the_three_operators_mean(p, causal, deterministic):
    open_device("cuda")
    xs, g = operands(p, device="cuda"), torch.randn(2, 3, 64, 64, device="cuda")
    run = lambda *x: ops.attention(*x, p=p, stable=F32, causal=causal)  # noqa: E731
    with using_table(replace(table_for("cuda"), deterministic=deterministic), "cuda"):
        backend = fused_backend(*xs, p, causal, None)
        assert backend == ("efficient" if p is F32 else "flash" if deterministic else "cudnn")
        with Ledger() as ledger: mine = gradients(run, xs, g)
        assert ledger.count == 0
    with using_table(ALL_BOUNDARY, "cuda"): right = gradients(run, xs, g)
    bound = {F16: 2**-9, BF16: 2**-6, F32: 1e-5}[p]
    assert all(deviation(a, b) <= bound for a, b in zip(mine, right, strict=True))


@gpu
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_deterministic_attention_repeats_itself_bit_for_bit(p):
    xs, g = operands(p, B=8, T=512, device="cuda"), torch.randn(8, 3, 512, 64, device="cuda")
    first = gradients(lambda *x: ops.attention(*x, p=p, stable=F32), xs, g)
    for _ in range(10):
        again = gradients(lambda *x: ops.attention(*x, p=p, stable=F32), xs, g)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


@gpu
def test_what_a_fused_kernel_does_not_cover_goes_by_the_three_operators():
    q, k, v = operands(F16, device="cuda")
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
    assert fused_backend(q, k, v, F16, True, mask) == ""
    assert fused_backend(q[:, :, :9], k, v, F16, True, None) == "" and fused_backend(q[:, :, :9], k, v, F16, False, None)
    assert fused_backend(q.float(), k, v, F16, True, None) == ""
    odd = [t[..., :12].contiguous() for t in (q, k, v)]
    assert fused_backend(*odd, F16, True, None) == ""
    masked = ops.attention(q, k, v, p=F16, stable=F32, mask=mask)
    assert deviation(masked, ops.attention(q, k, v, p=F16, stable=F32)) <= 2**-9


@gpu
@pytest.mark.parametrize("backend", ("flash", "cudnn", "efficient"))
def test_shapes_told_to_the_compiler_are_the_real_ones(backend):
    q, k, v = operands(F32 if backend == "efficient" else BF16, T=96, device="cuda")
    real = fused_attention(q, k, v, True, backend)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = fused_attention(*(mode.from_tensor(t) for t in (q, k, v)), True, backend)
    for a, b in zip(real, fake, strict=True): assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@gpu
@pytest.mark.parametrize("p", (F16, F32), ids=str)
def test_an_expanded_gradient_is_a_gradient(p):
    xs = operands(p, device="cuda")
    all_ones = torch.ones(2, 3, 64, 64, device="cuda")
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    one = torch.autograd.grad(ops.attention(*leaves, p=p, stable=F32).sum(), leaves)
    right = gradients(lambda *x: ops.attention(*x, p=p, stable=F32), xs, all_ones)[1:]
    assert all(map(torch.equal, one, right))
