"""The cross entropy kernel: its own text on the CPU in every test run, and on a GPU where there is one."""

from dataclasses import replace

import pytest
import torch
from cuda_host import kernels_on_host

from f16lab import loss_kernels, losses
from f16lab.device import ALL_BOUNDARY, table_for, using_table
from f16lab.ops import cross_entropy, deviation, head_cross_entropy
from f16lab.precision import BF16, F16, F32, Precision

gpu = pytest.mark.gpu


@pytest.fixture
def on_host(monkeypatch):
    """Launches run on the CPU, and the CPU's dispatch table says that there are kernels."""
    kernels_on_host(monkeypatch)
    with using_table(replace(table_for("cpu"), kernels=True)): yield


def rows_of(n: int, columns: int, p: Precision, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, columns, generator=g) * spread).to(p.dtype)


def both(z, targets, p, o, device="cpu", **kw):
    """(losses' gradient, value) of cross_entropy."""
    z = z.detach().clone().requires_grad_(True)
    loss = cross_entropy(z, targets, p=p, **kw)
    loss.value.backward()
    return z.grad, loss


CASES = [(1, 1, 1), (3, 7, 7), (5, 8, 6), (4, 1024, 1000), (2, 5000, 4999), (3, 2048, 2048)]


@pytest.mark.parametrize("p,out", [(BF16, BF16), (F16, F16), (F32, F32)], ids=str)
@pytest.mark.parametrize("n,columns,classes", CASES)
def test_losses_and_gradients_equal_the_reference_within_its_bound(on_host, p, out, n, columns, classes):
    z, g = rows_of(n, columns, p, columns), torch.Generator().manual_seed(n)
    targets = torch.randint(0, classes, (n,), generator=g)
    targets[n // 2] = -100
    exact = torch.logsumexp(z[:, :classes].double(), -1)
    rows, lse = loss_kernels.cross_entropy_losses(z, targets, classes, -100)
    scale = torch.maximum(exact.abs(), z[:, :classes].double().abs().amax(-1)).clamp(min=1)
    assert ((lse - exact).abs() / scale).max() < 2**-22
    seen = targets != -100
    right = torch.where(seen, exact - z.double().gather(1, targets.where(seen, 0)[:, None])[:, 0], 0.0)
    assert ((rows - right).abs() / scale).max() < 2**-21 and (rows[~seen] == 0).all()
    factor = torch.tensor(0.37)
    d = loss_kernels.cross_entropy_gradients(z, targets, lse, factor, classes, -100, out.dtype)
    exact_d = torch.softmax(z[:, :classes].double(), -1)
    exact_d[torch.arange(n), targets.where(seen, 0)] -= 1
    exact_d = exact_d * factor.double() * seen[:, None]
    assert (d[:, classes:] == 0).all() and (d[~seen] == 0).all()
    assert (d[:, :classes].double() - exact_d).abs().max() <= exact_d.abs().max() * 2.0 ** -(out.mantissa_bits + 1) + 2.0**-22
    again, made = z.clone(), torch.full_like(z, 7, dtype=out.dtype)
    assert torch.equal(loss_kernels.cross_entropy_both(again, None, targets, 0.37, None, classes, -100), rows)
    assert torch.equal(again, d)
    loss_kernels.cross_entropy_both(z, made, targets, 1.0, factor, classes, -100)
    assert torch.equal(made, d)


def test_f16_gradients_of_f32_logits_are_rounded_once(on_host):
    z, targets = rows_of(4, 640, F32), torch.tensor([0, 5, -100, 638])
    lse = torch.logsumexp(z[:, :639], -1)
    d = loss_kernels.cross_entropy_gradients(z, targets, lse, torch.tensor(1024.0), 639, -100, F16.dtype)
    o = losses.LossOptions(F32, 1.0, 1.0, -100, 639)
    right = losses.row_gradients(z, lse, targets, 1024.0, o)
    assert deviation(d, right) <= 2**-11 and (d != right.half()).double().mean() < 0.01
    twice = right.bfloat16().half()
    assert (d != twice).double().mean() > 0.3  # and not by way of another precision


def test_the_bits_do_not_depend_on_the_number_of_blocks(on_host, monkeypatch):
    z, targets = rows_of(7, 3001, BF16), torch.arange(7)
    first = loss_kernels.cross_entropy_losses(z, targets, 3001, -100)
    monkeypatch.setattr(loss_kernels, "blocks_of", lambda device, per=8: 1)
    assert all(map(torch.equal, first, loss_kernels.cross_entropy_losses(z, targets, 3001, -100)))


def test_infinities_and_nan_end_where_the_reference_puts_them(on_host):
    z = torch.zeros(6, 40)
    z[0, 3], z[1, 3], z[2], z[3, 5], z[4, 0], z[4, 1] = torch.inf, torch.nan, -torch.inf, -torch.inf, torch.inf, torch.nan
    z[5] = -3.4e38
    targets = torch.full((6,), 5)
    rows, lse = loss_kernels.cross_entropy_losses(z, targets, 40, -100)
    right = torch.logsumexp(z, -1)
    assert torch.equal(lse.isnan(), right.isnan()) and torch.equal(lse.isinf(), right.isinf())
    assert torch.equal(lse[lse.isinf()], right[right.isinf()]) and torch.isclose(lse[3], right[3])
    assert rows[3] == torch.inf and rows[5].isfinite()
    d = loss_kernels.cross_entropy_gradients(z, targets, lse, torch.tensor(1.0), 40, -100, F16.dtype)
    assert d[1].isnan().all() and d[3].isfinite().all() and d[5].isfinite().all()


@pytest.mark.parametrize("p", (BF16, F16), ids=str)
def test_the_operator_means_the_same_with_and_without_the_kernel(on_host, p):
    z, targets = rows_of(9, 300, p, 5), torch.randint(0, 290, (9,), generator=torch.Generator().manual_seed(2))
    targets[4] = -100
    options = dict(p=p, loss_p=F32, weight=1 / 8, scale=16.0, classes=290)
    d, loss = both(z, targets, o=None, **options)
    with using_table(ALL_BOUNDARY): right, reference = both(z, targets, o=None, **options)
    assert abs(loss.recorded - reference.recorded) < 1e-5 and deviation(d, right) <= 2.0 ** -p.mantissa_bits
    assert (d != right).double().mean() < 0.02


def test_the_head_in_chunks_means_the_same_with_and_without_the_kernel(on_host, monkeypatch):
    wide_mm = lambda total, a, b, accum: total.add_(a.float() @ b.float())  # noqa: E731 (torch has mm(out_dtype=) on CUDA only)
    monkeypatch.setattr(losses, "_add_product", wide_mm)
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(50, 16, generator=g).bfloat16(), (torch.randn(128, 16, generator=g) / 4).bfloat16()
    targets = torch.randint(0, 120, (50,), generator=g)
    def run():
        a, b = (t.clone().requires_grad_(True) for t in (x, w))
        loss = head_cross_entropy(a, b, targets, p=BF16, loss_p=F32, weight=1 / 50, scale=8.0, classes=120, chunk=16)
        loss.value.backward()
        return loss.recorded, a.grad, b.grad
    mine = run()
    with using_table(ALL_BOUNDARY): right = run()
    assert abs(mine[0] - right[0]) < 1e-5
    assert all(deviation(a, b) <= 2**-7 for a, b in zip(mine[1:], right[1:]))


@pytest.mark.parametrize("z,targets,classes,words", [
    (torch.zeros(3), torch.zeros(3, dtype=torch.int64), 1, "need int64 targets"),
    (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), 4, "need int64 targets"),
    (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32), 4, "need int64 targets"),
    (torch.zeros(3, 4).double(), torch.zeros(3, dtype=torch.int64), 4, "no logits in f64"),
    (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), 5, "classes=5 of 4 columns"),
    (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), 4, "runs on CUDA tensors"),
    (torch.zeros(4, 3).t(), torch.zeros(3, dtype=torch.int64), 4, "not contiguous"),
])
def test_bad_input_is_named(z, targets, classes, words):
    with pytest.raises(ValueError, match=words): loss_kernels.cross_entropy_losses(z, targets, classes, -100)


def test_no_rows_are_no_work(on_host):
    rows, lse = loss_kernels.cross_entropy_losses(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 4, -100)
    assert rows.shape == lse.shape == (0,)


# ---------------------------------------------------------------- on a GPU
@gpu
@pytest.mark.parametrize("p", (BF16, F16, F32), ids=str)
@pytest.mark.parametrize("n,columns,classes", [*CASES, (300, 50304, 50257), (1023, 333, 333)])
def test_on_a_gpu_as_on_the_cpu(p, n, columns, classes):
    z, g = rows_of(n, columns, p, columns).cuda(), torch.Generator().manual_seed(n)
    targets = torch.randint(0, classes, (n,), generator=g).cuda()
    targets[n // 2] = -100
    exact = torch.logsumexp(z[:, :classes].double(), -1)
    rows, lse = loss_kernels.cross_entropy_losses(z, targets, classes, -100)
    assert ((lse - exact).abs() / exact.abs().clamp(min=1)).max() < 2**-22
    factor = torch.tensor(0.37, device="cuda")
    d = loss_kernels.cross_entropy_gradients(z, targets, lse, factor, classes, -100, p.dtype)
    exact_d = torch.softmax(z[:, :classes].double(), -1)
    seen = targets != -100
    exact_d[torch.arange(n), targets.where(seen, 0)] -= 1
    exact_d = exact_d * factor.double() * seen[:, None]
    right = exact_d.float().to(p.dtype)
    share = (d[:, :classes] != right).double().mean().item()
    print(f"{p} {n}x{columns}: {share:.2%} of the gradients differ from f64 rounded once")
    if seen.any():  # the log-sum-exp's own error, up to 2^-22 of some 12, is a relative error of every e^(z − lse)
        relative = ((d[:, :classes].double() - exact_d).abs() / exact_d.abs().clamp(min=p.smallest_normal))[seen]
        assert relative.max() <= 2.0 ** -(p.mantissa_bits + 1) + 2.0**-18
    again = z.clone()
    assert torch.equal(loss_kernels.cross_entropy_both(again, None, targets, 0.37, None, classes, -100), rows)
    assert torch.equal(again, d)


@gpu
def test_exponentials_on_a_gpu_are_within_two_ulp():
    x = -torch.rand(1, 2**20, device="cuda") * 80
    lse, factor = torch.zeros(1, device="cuda"), torch.ones((), device="cuda")
    d = loss_kernels.cross_entropy_gradients(x, torch.zeros(1, dtype=torch.int64, device="cuda"), lse, factor, 2**20, -100,
                                             torch.float32)[0, 1:].double()
    exact = x[0, 1:].double().exp()
    ulp = torch.exp2(torch.floor(torch.log2(exact)) - 23)
    worst = ((d - exact).abs() / ulp).max().item()
    print(f"e^x: largest error {worst:.2f} ulp")
    assert worst <= 2.5


@gpu
def test_more_than_two_to_the_31_logits():
    if torch.cuda.mem_get_info()[0] < 24e9: pytest.skip("needs 24 GB of GPU memory")
    z = torch.randn(1, 50304, device="cuda", dtype=torch.bfloat16).repeat(43_000, 1)
    targets = torch.full((43_000,), 5, device="cuda")
    first = loss_kernels.cross_entropy_losses(z[:1].contiguous(), targets[:1], 50257, -100)[0]
    rows = loss_kernels.cross_entropy_both(z, None, targets, 1.0, None, 50257, -100)
    assert z.numel() > 2**31 and (rows == first).all()
    assert torch.equal(z[0], z[-1]) and z[-1].isfinite().all() and (z[:, 50257:] == 0).all() and z[-1, 5] < 0


@gpu
@pytest.mark.parametrize("p,out", [(BF16, BF16), (F16, F32), (F16, F16), (F32, F32)], ids=str)
def test_the_head_on_a_gpu_means_the_same_with_and_without_kernels(p, out):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(500, 64, generator=g).to(p.dtype).cuda(), (torch.randn(1024, 64, generator=g) / 8).to(p.dtype).cuda()
    targets = torch.randint(0, 1000, (500,), generator=g).cuda()
    def run():
        a, b = (t.clone().requires_grad_(True) for t in (x, w))
        loss = head_cross_entropy(a, b, targets, p=p, out=out, loss_p=F32, weight=1 / 500, scale=64.0, classes=1000, chunk=128)
        loss.value.backward()
        return loss.recorded, a.grad, b.grad
    mine = run()
    with using_table(ALL_BOUNDARY, "cuda"): right = run()
    assert abs(mine[0] - right[0]) < 1e-5
    bound = {BF16: 2**-7, F16: 2**-9, F32: 2e-5}[p]
    assert all(deviation(a, b) <= bound for a, b in zip(mine[1:], right[1:]))
