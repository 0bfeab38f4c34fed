"""Products against f64 rounded once, within the one tolerance table; the f16 accumulator against its definition."""

import numpy as np
import pytest
import torch
from f16lab import ops
from f16lab.device import ALL_BOUNDARY, open_device, table_for, using_table
from f16lab.ops import TOLERANCE, deviation
from f16lab.precision import BF16, F16, F32, F64, convert

open_device("cpu")
TABLES = pytest.mark.parametrize("table", (table_for("cpu"), ALL_BOUNDARY), ids=("table", "boundary"))
each_precision = pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
ODD = (1, 3, 17, 33, 65)
SIZES = [(m, k, n) for m in ODD for k in ODD for n in ODD] + [
    (256, 320, 192),
    (24, 8192, 40),
    (1, 8192, 65),
    (130, 1, 257),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()).item()


# ---------------------------------------------------------------- conformance
@TABLES
@each_precision
def test_products_of_all_sizes(p, table):
    with using_table(table):
        for m, k, n in SIZES:
            a, b, bias = convert(random(m, k), p), convert(random(k, n, seed=1), p), convert(random(n, seed=2), p)
            exact = a.double() @ b.double()
            assert deviation(ops.matmul(a, b, p=p), convert(exact, p)) <= TOLERANCE[p], (m, k, n)
            y = ops.linear(a, b.t(), bias, p=p)
            assert deviation(y, convert(exact + bias.double(), p)) <= TOLERANCE[p], (m, k, n)


@TABLES
@each_precision
def test_gradients_of_products_of_all_sizes(p, table):
    with using_table(table):
        for m, k, n in SIZES[::3] + SIZES[-4:]:
            x, w, bias = (convert(random(*s, seed=i), p).requires_grad_() for i, s in enumerate(((m, k), (n, k), (n,))))
            g = convert(random(m, n, seed=4), p)
            ops.linear(x, w, bias, p=p).backward(g)
            for grad, exact in (
                (x.grad, g.double() @ w.double()),
                (w.grad, g.double().t() @ x.double()),
                (bias.grad, g.double().sum(0)),
            ):
                assert deviation(grad, convert(exact.detach(), p)) <= TOLERANCE[p], (m, k, n)


@TABLES
@each_precision
@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3, 17, 33), (4, 3, 33, 65)),
        ((7, 1, 65), (7, 65, 3)),
        ((2, 1, 5, 8192), (3, 8192, 4)),
        ((1, 33, 17), (5, 17, 1)),
    ],
)
def test_stacks_of_products(p, shapes, table):
    a, b = (convert(random(*s, seed=i), p).requires_grad_() for i, s in enumerate(shapes))
    with using_table(table):
        y = ops.batched_matmul(a, b, p=p, alpha=0.125)
        transposed = ops.batched_matmul(a, b.mT, p=p, alpha=0.125, transpose_b=True)
        g = convert(random(*y.shape, seed=3), p)
        y.backward(g)
    assert torch.equal(y, transposed)
    exact = a.double() @ b.double() * 0.125
    exact_a, exact_b = torch.autograd.grad(exact, (a, b), g.double())  # in f64, then cast to the leaves' precision
    assert deviation(y.detach(), convert(exact.detach(), p)) <= TOLERANCE[p]
    assert deviation(a.grad, exact_a) <= TOLERANCE[p] and deviation(b.grad, exact_b) <= TOLERANCE[p]


@TABLES
@each_precision
@pytest.mark.parametrize("stride, padding", [(1, 0), (2, 1), (3, 2)])
def test_convolutions(p, stride, padding, table):
    x, w, b = (
        convert(random(*s, seed=i), p).requires_grad_() for i, s in enumerate(((3, 5, 11, 9), (7, 5, 3, 3), (7,)))
    )
    with using_table(table):
        y = ops.conv2d(x, w, b, p=p, stride=stride, padding=padding)
        g = convert(random(*y.shape, seed=5), p)
        y.backward(g)
    leaves = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.nn.functional.conv2d(*leaves, stride=stride, padding=padding)
    exact.backward(g.double())
    for mine, right in ((y.detach(), exact.detach()), *((t.grad, leaf.grad) for t, leaf in zip((x, w, b), leaves))):
        assert deviation(mine, convert(right, p)) <= TOLERANCE[p]


def test_pooling_is_exact_in_every_precision():
    for p in (F16, BF16, F32):
        x = convert(random(2, 3, 7, 9), p).requires_grad_()
        y = ops.max_pool2d(x, 3, p=p)
        assert torch.equal(y.double(), torch.nn.functional.max_pool2d(x.double(), 3))
        y.sum().backward()
        assert x.grad.sum() == y.numel() and set(x.grad.flatten().tolist()) == {0.0, 1.0}


# ---------------------------------------------------------------- the f16 accumulator
def chunked(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The definition, in numpy: sums of 64 products, each rounded to f16; a running sum in f16."""
    total = None
    for k in range(0, a.shape[-1], 64):
        part = (a[..., k : k + 64].astype(np.float64) @ b[..., k : k + 64, :].astype(np.float64)).astype(np.float16)
        total = part if total is None else (total + part).astype(np.float16)
    return total


def agrees(mine: torch.Tensor, right: np.ndarray, p=F16) -> None:
    """All but 2 in 100 in every bit (an f32 sum of 64 may cross a tie that the f64 sum does not), the rest close."""
    right = convert(torch.from_numpy(right), p)
    assert mine.dtype is p.dtype and deviation(mine, right) <= TOLERANCE[p]
    assert (mine != right).double().mean() <= 0.02


@pytest.mark.parametrize("m, k, n", [(5, 1, 3), (3, 63, 5), (17, 64, 9), (17, 65, 9), (33, 200, 17), (16, 4096, 24)])
def test_f16_accumulation_is_its_definition(m, k, n):
    a, b = random(m, k).half(), random(k, n, seed=1).half()
    agrees(ops.matmul(a, b, p=F16, accum=F16), chunked(a.numpy(), b.numpy()))
    agrees(ops.linear(a, b.t(), p=F16, accum=F16), chunked(a.numpy(), b.numpy()))
    stacked = ops.batched_matmul(torch.stack([a, -a]), b.mT.expand(2, n, k), p=F16, accum=F16, transpose_b=True)
    agrees(stacked[1], -chunked(a.numpy(), b.numpy()))


def test_f16_accumulation_on_the_way_back():
    x, w, b = (
        random(200, 70).half().requires_grad_(),
        random(130, 70, seed=1).half().requires_grad_(),
        torch.zeros(130).half().requires_grad_(),
    )
    g = random(200, 130, seed=2).half()
    ops.linear(x, w, b, p=F16, accum=F16).backward(g)
    agrees(x.grad, chunked(g.numpy(), w.detach().numpy()))
    agrees(w.grad, chunked(g.t().numpy(), x.detach().numpy()))
    assert deviation(b.grad, g.double().sum(0)) <= TOLERANCE[F16]  # a bias gradient is no product


def test_the_bias_is_added_before_the_last_rounding():
    x, w = torch.ones(1, 64).half(), torch.full((1, 64), 2.0).half()
    y = ops.linear(x, w, torch.tensor([0.07]).half(), p=F16, accum=F16)
    assert y.item() == (torch.tensor(128.0) + torch.tensor(0.07).half().float()).half().item()


def test_error_of_the_f16_accumulator_at_4096():
    """A sequential f16 sum is off by 4e-3 of the RMS and more, chunks of 64 by less than 1.5e-3, f32 by 2e-4."""
    a, b = random(48, 4096).half(), random(4096, 48, seed=1).half()
    exact = a.double() @ b.double()
    run = torch.zeros(48, 48, dtype=torch.float16)
    for k in range(4096):
        run = run + a[:, k : k + 1] * b[k : k + 1]
    assert rms(run, exact) >= 4e-3
    assert 3e-4 < rms(ops.matmul(a, b, p=F16, accum=F16), exact) <= 1.5e-3
    assert rms(ops.matmul(a, b, p=F16), exact) <= 2.5e-4


def test_the_accumulator_is_seen_also_without_p_and_ignored_above_16_bits():
    a, b = random(16, 4096), random(4096, 16, seed=1)
    h, k = a.half(), b.half()
    assert torch.equal(ops.matmul(h, k, accum=F16), ops.matmul(h, k, p=F16, accum=F16))
    assert not torch.equal(ops.matmul(h, k, accum=F16), ops.matmul(h, k))
    for p in (F32, F64):
        assert torch.equal(ops.matmul(a, b, p=p, accum=F16), ops.matmul(a, b, p=p))
    assert torch.equal(ops.matmul(h, b, accum=F16), ops.matmul(h, b))  # f16 with f32: an f32 operator
    with pytest.raises(ValueError, match="allowed are F32 and F16|accum"):
        ops.matmul(a, b, p=F16, accum=BF16)


def test_an_f16_accumulator_overflows_where_f32_does_not():
    a = torch.tensor([[600.0] * 64 + [600.0] * 64 + [-600.0] * 128]).half()
    b = torch.ones(256, 1).half()
    assert ops.matmul(a, b, p=F16).item() == 0
    assert not ops.matmul(a * 2, b, p=F16, accum=F16).isfinite().item()  # 64 · 1200 is no f16 number


def test_no_terms_give_zeros():
    for accum in (F32, F16):
        assert torch.equal(
            ops.matmul(torch.ones(2, 0).half(), torch.ones(0, 3).half(), p=F16, accum=accum), torch.zeros(2, 3).half()
        )
        x, w = torch.ones(0, 4).half().requires_grad_(), torch.ones(3, 4).half().requires_grad_()
        ops.linear(x, w, p=F16, accum=accum).sum().backward()
        assert (w.grad == 0).all() and x.grad.shape == (0, 4)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.linear(torch.ones(2, 3), torch.ones(4, 5), p=F32),
        lambda: ops.matmul(torch.ones(2, 3), torch.ones(4, 5), p=F32),
        lambda: ops.matmul(torch.ones(1, 2, 3), torch.ones(3, 5), p=F32),
        lambda: ops.batched_matmul(torch.ones(2, 3), torch.ones(3, 2), p=F32),
        lambda: ops.batched_matmul(torch.ones(1, 2, 3), torch.ones(1, 2, 3), p=F32),
        lambda: ops.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 4, 3, 3), p=F32),
        lambda: ops.conv2d(torch.ones(2, 5, 5), torch.ones(3, 2, 3, 3), p=F32),
    ],
)
def test_shapes_that_do_not_fit_are_named(call):
    with pytest.raises(ValueError, match=r"\(.*\d.*\)"):
        call()
