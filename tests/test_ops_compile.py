"""Compiled in one graph, every operator has the bits it has without, and the ledger is filled at trace time."""

from functools import partial

import op_cases as t
import pytest
import torch
from f16lab import ops
from f16lab.cast import Ledger, cast, collect_gradient
from f16lab.device import open_device
from f16lab.precision import BF16, F16, F32, convert
from f16lab.rounding import Key, Purpose

open_device("cpu")
compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
each_precision = pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)


@pytest.fixture(autouse=True)
def fresh():
    """No graph of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in xs]


def run(f, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of f (a list) and the gradients of all of them together."""
    xs = leaves(xs)
    ys = f(*xs)
    gs = [
        convert(convert(torch.randn(y.shape, generator=torch.Generator().manual_seed(i)), BF16), F32).to(y.dtype)
        for i, y in enumerate(ys)
    ]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, xs, gs)]


def every_operator(p):
    """One function of the operands of all cases: a single graph is compiled."""
    sizes = [len(case.shapes) for case in t.ALL]

    def f(*xs):
        ys, at = [], 0
        for case, n in zip(t.ALL, sizes):
            ys.append(case.call(*xs[at : at + n], p=p))
            at += n
        return ys

    return f, [x for case in t.ALL for x in case.tensors(case.shapes)]


@each_precision
def test_every_operator_has_the_same_bits(p):
    """Half operands of half operators; and, for F16, f32 operands, whose casts are in the graph too."""
    f, xs = every_operator(p)
    xs = [convert(x, p) for x in xs]
    for mine, right in zip(run(compiled(f), xs), run(f, xs), strict=True):
        assert mine.dtype is right.dtype and torch.equal(mine, right)


@pytest.mark.parametrize("n", (1, 2, 3))
def test_operators_of_any_number_of_tensors_trace_without_gradients(n):
    """torch's tracer counts the parameters of an autograd function's forward where no gradient is wanted."""
    f = (ops.gelu, ops.add, ops.layer_norm)[n - 1]
    xs = [torch.randn(4, 6).half(), *(torch.ones(6).half() for _ in range(n - 1))]
    with torch.no_grad():
        assert torch.equal(compiled(lambda *x: f(*x, p=F16))(*xs), f(*xs, p=F16))


@pytest.mark.parametrize("p, out", [(F16, F32), (BF16, BF16), (F32, F32)], ids=str)
def test_losses_casts_and_keys_have_the_same_bits(p, out):
    g, key = torch.Generator().manual_seed(0), Key.of(3, 1, Purpose.DROPOUT, "layer")
    targets, weight, scale = torch.randint(0, 9, (12,), generator=g), torch.tensor(1 / 12), torch.tensor(64.0)
    targets[3] = -100

    def f(x, w):
        x = cast(ops.dropout(x, 0.25, p=p, key=key, start=7), F32)
        losses = [
            ops.head_cross_entropy(x, w, targets, p=p, out=out, loss_p=F32, weight=weight, scale=scale, chunk=c)
            for c in (None, 5)
        ]
        losses.append(
            ops.cross_entropy(ops.linear(x, w, p=p, out=out), targets, p=out, loss_p=F16, weight=weight, scale=8.0)
        )
        noisy = cast(x, BF16, rounding="stochastic", key=key)
        return [*(loss.value for loss in losses), noisy, *(loss.recorded for loss in losses)]

    xs = [torch.randn(12, 6, generator=g), torch.randn(9, 6, generator=g)]

    def both(f):
        a = leaves(xs)
        *ys, r1, r2, r3 = f(*a)
        gs = [torch.ones_like(y) for y in ys]
        return [*(y.detach() for y in (*ys, r1, r2, r3)), *torch.autograd.grad(ys, a, gs)]

    for mine, right in zip(both(compiled(f)), both(f), strict=True):
        assert mine.dtype is right.dtype and torch.equal(mine, right)


# ---------------------------------------------------------------- the ledger of a compiled model
def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = ops.gelu(ops.linear(x, w, p=F16, layer="fc"), p=F16, layer="gelu")
    return ops.softmax(cast(h, BF16, layer="user"), p=F32, layer="soft")


def step(f, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a, b = leaves([x, w])
    y = f(a, b)
    (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), a.grad, b.grad]


def test_casts_of_a_compiled_model_are_told_once_at_trace_time():
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    with Ledger() as eager:
        right = step(model, x, w)
    f = compiled(model)
    silent = step(f, x, w)  # traced with nobody listening
    with Ledger() as first:
        listened = step(f, x, w)
    with Ledger() as second:
        again = step(f, x, w)
    closed = step(f, x, w)
    for other in (silent, listened, again, closed):
        assert all(torch.equal(a, b) for a, b in zip(other, right, strict=True))
    lines = lambda ledger: sorted(
        (r.layer, r.op, r.operand, r.shape, r.src, r.dst, r.direction, r.reason, r.count) for r in ledger.rows()
    )
    assert lines(first) == lines(eager) and eager.count > 12
    assert second.count == 0  # nothing was traced again: the code that ran is the code that is there


def test_opening_ledgers_does_not_compile_again_and_again():
    """A ledger a step must not run into torch's limit of recompilations: what counts is how many listen."""
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    f = torch.compile(model, fullgraph=True, backend=counting)
    with torch.no_grad():
        for _ in range(20):
            f(x, w)
            with Ledger():
                f(x, w)
    assert len(graphs) == 2


def test_a_listened_model_stays_one_graph_for_many_batch_sizes():
    """torch keeps the batch size variable after the second; a ledger must not pin it, and tells the size it saw."""
    w, seen, f = torch.randn(6, 8), {}, compiled(model)
    for n in range(4, 16):
        with Ledger() as ledger:
            y = step(f, torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), w)
        right = step(model, torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), w)
        assert all(torch.equal(a, b) for a, b in zip(y, right, strict=True))
        seen[n] = {r.shape for r in ledger.rows() if r.operand == "x" and r.op == "linear"}
    assert seen[4] == {(4, 8)} and seen[5] == {(5, 8)}
    assert all(not seen[n] for n in range(6, 16))


# ---------------------------------------------------------------- the known limit
def test_the_gradient_of_a_half_leaf_is_rounded_before_it_is_collected_in_f32():
    """What is traced knows no grad_dtype. A leaf that collects in its own precision, and no leaf at all, are exact."""
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).half()

    def f(w):
        return cast(w, F32) * torch.linspace(1, 2, 8)

    def gradient(f, w):
        f(w).sum().backward()
        return w.grad

    for grad in (F16, F32):
        a, b = (collect_gradient(torch.nn.Parameter(values.clone()), grad) for _ in range(2))
        right, mine = gradient(f, a), gradient(compiled(f), b)
        assert right.dtype is mine.dtype is grad.dtype
        assert torch.equal(mine, right) == (grad is F16)
        assert torch.equal(mine, right.half().to(grad.dtype))  # exactly that rounding, and no other difference
    a, b = (values.float().requires_grad_() for _ in range(2))
    through = lambda w: f(cast(w, F16))
    assert torch.equal(gradient(through, a), gradient(compiled(through), b))
