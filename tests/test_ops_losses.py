"""Cross entropy alone and with the head: value, recorded value, gradients, scale, chunks, padding, ignored targets."""

import math
from dataclasses import replace

import op_cases as t
import pytest
import torch
import torch.nn.functional as F
from f16lab.cast import Ledger, assert_no_casts, collect_gradient
from f16lab.device import ALL_BOUNDARY, open_device, table_for, using_table
from f16lab.losses import LossOptions, weighted
from f16lab.ops import TOLERANCE, cross_entropy, deviation, head_cross_entropy, linear
from f16lab.precision import BF16, F16, F32, F64, Precision, convert

open_device("cpu")
TABLES = pytest.mark.parametrize("table", (table_for("cpu"), ALL_BOUNDARY), ids=("table", "boundary"))
HALVES = pytest.mark.parametrize("p", (F16, BF16), ids=str)
N, C, V = 40, 24, 33


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [N, C], head [V, C], targets [N], every seventh ignored."""
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, V - 3, (N,), generator=g)
    targets[::7] = -100
    return torch.randn(N, C, generator=g), torch.randn(V, C, generator=g) * 0.5, targets


def head(p: Precision, table=None, dtype=None, k: float = 1.0, **options):
    """(value, recorded, dx, dw) of head_cross_entropy on the data in `p` (or `dtype`), value · k differentiated."""
    x, w, targets = data()
    x, w = (convert(a, dtype or p).requires_grad_() for a in (x, w))
    with using_table(table or table_for("cpu")):
        loss = head_cross_entropy(x, w, targets, p=p, weight=1 / N, **options)
        (loss.value * k).backward()
    return loss.value.detach(), loss.recorded, x.grad, w.grad


def exact_head(p: Precision, out: Precision, scale: float = 1.0, k: float = 1.0, classes: int = V):
    """The definition in f64 with its roundings, by hand: logits to `out`, their gradient to `out`, then to `p`."""
    x, w, targets = data()
    x, w = convert(x, p).double(), convert(w, p).double()
    z = convert(x @ w.t(), out).double()[:, :classes]
    seen = targets >= 0
    y = targets.where(seen, 0)
    rows = (torch.logsumexp(z, -1) - z[torch.arange(N), y]) * seen
    d = (torch.softmax(z, -1) - F.one_hot(y, classes)) * (seen[:, None] * scale / N)
    d = F.pad(convert(convert(d, out), p).double(), (0, V - classes))
    return (rows.sum() / N).item(), k * convert(d @ w, p).double(), k * convert(d.t() @ x, p).double()


# ---------------------------------------------------------------- plain f32
def test_f32_is_torch_byte_for_byte():
    x, w, targets = data()
    z = (x @ w.t()).requires_grad_()
    weight = 1 / 34
    with assert_no_casts():
        loss = cross_entropy(z, targets, p=F32, weight=weight)
        loss.value.backward()
    other = z.detach().clone().requires_grad_()
    right = F.cross_entropy(other, targets, reduction="sum") * weight
    right.backward()
    assert torch.equal(loss.value, right) and torch.equal(loss.recorded, right) and torch.equal(z.grad, other.grad)
    assert not loss.recorded.requires_grad
    leaves = [a.clone().requires_grad_() for a in (x, w)]
    with assert_no_casts():
        head_cross_entropy(*leaves, targets, p=F32, weight=weight).value.backward()
    others = [a.clone().requires_grad_() for a in (x, w)]
    (F.cross_entropy(F.linear(*others), targets, reduction="sum") * weight).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, others))


@pytest.mark.parametrize("loss_p", (F16, BF16, F32, F64), ids=str)
def test_own_f32_formulas_agree_with_torch(loss_p):
    """Value in any precision, forced boundary against plain."""
    x, w, targets = data()
    results = []
    for table in (table_for("cpu"), ALL_BOUNDARY):
        z = (x @ w.t()).requires_grad_()
        with using_table(table):
            loss = cross_entropy(z, targets, p=F32, loss_p=loss_p, weight=1 / N, scale=8.0)
            loss.value.backward()
        assert loss.value.dtype is loss_p.dtype and loss.recorded.dtype is torch.float32
        results.append((loss.value, loss.recorded, z.grad))
    assert deviation(results[0][0], results[1][0]) <= TOLERANCE[min(loss_p, F32, key=lambda p: p.mantissa_bits)]
    for a, b in zip(*(r[1:] for r in results)):
        assert deviation(a, b) <= TOLERANCE[F32]


def test_own_gradients_agree_with_finite_differences():
    x, w, targets = data()
    x, w, targets = x[:5, :4].double().requires_grad_(), w[:6, :4].double().requires_grad_(), targets[1:6] % 6
    targets[2] = -100
    options = dict(weight=0.2, loss_p=F64)
    with using_table(ALL_BOUNDARY):
        for chunk in (None, 1, 2, 5):
            assert torch.autograd.gradcheck(
                lambda x, w: head_cross_entropy(x, w, targets, chunk=chunk, **options).value * 3, (x, w)
            )
        assert torch.autograd.gradcheck(
            lambda z: cross_entropy(z, targets, **options).value * 3, (x @ w.t()).detach().requires_grad_()
        )


# ---------------------------------------------------------------- half
@TABLES
@HALVES
@pytest.mark.parametrize("loss_p", (F16, BF16, F32), ids=str)
def test_cross_entropy_is_the_definition(p, loss_p, table):
    x, w, targets = data()
    z = convert(x @ w.t(), p).requires_grad_()
    with using_table(table):
        loss = cross_entropy(z, targets, p=p, loss_p=loss_p, weight=1 / N, scale=64.0)
        loss.value.backward()
    exact = z.detach().double().requires_grad_()
    right = F.cross_entropy(exact, targets, reduction="sum") / N
    (right * 64).backward()
    assert (
        torch.equal(loss.value, convert(right.detach(), loss_p))
        or deviation(loss.value, right.detach()) <= TOLERANCE[F32]
    )
    assert abs(loss.recorded.item() / right.item() - 1) < 1e-6
    assert z.grad.dtype is p.dtype and deviation(z.grad, convert(exact.grad, p)) <= TOLERANCE[p]
    assert (z.grad != convert(exact.grad, p)).double().mean() <= 0.01


@TABLES
@pytest.mark.parametrize("p, out", [(F16, F32), (F16, F16), (BF16, F32), (BF16, BF16), (F32, F16), (F32, F32)], ids=str)
@pytest.mark.parametrize("chunk", (None, 1, 7, 40, 1000))
def test_the_head_is_its_definition_in_any_chunks(p, out, chunk, table):
    value, recorded, dx, dw = head(p, table, out=out, loss_p=F32, chunk=chunk, scale=128.0)
    right, right_dx, right_dw = exact_head(p, out, scale=128.0)
    assert abs(recorded.item() / right - 1) < 1e-6 and deviation(value, recorded) <= TOLERANCE[F32]
    for mine, exact in ((dx, right_dx), (dw, right_dw)):
        assert mine.dtype is p.dtype and deviation(mine, exact) <= max(TOLERANCE[p], TOLERANCE[out])
        if out is F32 and p.bits < 32:  # partial sums of chunks are not rounded
            assert (mine.double() != exact).double().mean() <= 0.02


@pytest.mark.parametrize("p, out", [(F16, F32), (BF16, BF16), (F32, F32)], ids=str)
def test_chunks_change_the_order_of_one_sum_only(p, out):
    """dx is row by row the same; dw differs by the order of an f32 sum; the recorded loss by nothing that matters."""
    whole = head(p, out=out, loss_p=F32, scale=1024.0, table=ALL_BOUNDARY)
    for chunk in (1, 3, 8, 39):
        parts = head(p, out=out, loss_p=F32, scale=1024.0, chunk=chunk, table=ALL_BOUNDARY)
        assert deviation(parts[2], whole[2]) <= TOLERANCE[p] and deviation(parts[3], whole[3]) <= TOLERANCE[p]
        assert (parts[2] != whole[2]).double().mean() <= (0.01 if p.bits < 32 else 1)
        assert abs(parts[1].item() / whole[1].item() - 1) < 1e-6


@HALVES
def test_the_head_means_linear_and_then_cross_entropy(p):
    x, w, targets = data()
    one = head(p, out=F32, loss_p=F32, scale=32.0)
    a, b = (convert(v, p).requires_grad_() for v in (x, w))
    loss = cross_entropy(linear(a, b, p=p, out=F32), targets, p=F32, weight=1 / N, scale=32.0)
    loss.value.backward()
    assert abs(one[1].item() / loss.recorded.item() - 1) < 1e-6
    assert deviation(one[2], a.grad) <= TOLERANCE[p] and deviation(one[3], b.grad) <= TOLERANCE[p]


# ---------------------------------------------------------------- scale and incoming gradient
@TABLES
@HALVES
@pytest.mark.parametrize("loss_p", (F16, F32), ids=str)
def test_the_scale_multiplies_the_gradient_and_nothing_else(p, loss_p, table):
    for scale in (2.0**16, torch.tensor(2.0**16)):
        one, scaled = (head(p, table, out=F32, loss_p=loss_p, scale=s) for s in (1.0, scale))
        assert torch.equal(one[0], scaled[0]) and torch.equal(one[1], scaled[1]) and one[0].dtype is loss_p.dtype
        assert one[0].isfinite() and (loss_p is F32 or torch.isinf(one[0] * 2**16))
        exact = exact_head(p, F32, scale=2.0**16)
        for mine, right in zip(scaled[2:], exact[1:]):
            assert mine.isfinite().all() and deviation(mine, right) <= TOLERANCE[p]
        z = torch.randn(6, V).to(p.dtype).requires_grad_()
        with using_table(table):
            loss = cross_entropy(z, torch.arange(6), p=p, loss_p=loss_p, weight=1 / 6, scale=scale)
            loss.value.backward()
        assert loss.value.isfinite() and z.grad.isfinite().all() and z.grad.abs().max() > 2


@TABLES
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
@pytest.mark.parametrize("k", (-2.0, 0.5, 3.0, 0.1))
def test_gradient_through_a_multiple_of_the_value(p, k, table):
    _, _, dx, dw = head(p, table, out=F32, loss_p=F32, scale=16.0, k=k)
    right = exact_head(p, F32, scale=16.0, k=k)
    assert deviation(dx, right[1]) <= TOLERANCE[p] and deviation(dw, right[2]) <= TOLERANCE[p]
    x, w, targets = data()
    z = convert(x @ w.t(), p).requires_grad_()
    with using_table(table):
        (cross_entropy(z, targets, p=p, loss_p=F32, weight=1 / N, scale=16.0).value * k).backward()
    exact = z.detach().double().requires_grad_()
    (F.cross_entropy(exact, targets, reduction="sum") * (16 * k / N)).backward()
    assert deviation(z.grad, exact.grad) <= TOLERANCE[p]


@pytest.mark.parametrize("p", (F16, F32), ids=str)
def test_weight_and_scale_may_live_on_the_device(p):
    """As tensors: the same bits as the numbers, if these are f32 numbers."""
    x, w, targets = data()
    results = []
    for weight, scale in ((1 / 32, 8.0), (torch.tensor(1 / 32), torch.tensor(8.0))):
        z, *leaves = (convert(a, p).clone().requires_grad_() for a in (x @ w.t(), x, w))
        options = dict(p=p, weight=weight, scale=scale)
        losses = cross_entropy(z, targets, **options), head_cross_entropy(*leaves, targets, **options)
        (losses[0].value + losses[1].value).backward()
        results.append([*(v for loss in losses for v in loss), z.grad, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------- known values
LN = math.log(50257)  # 10.8249: what a token costs that knows nothing
STORED = pytest.mark.parametrize("loss_p, stored", [(F32, 10.8249), (F16, 10.828125), (BF16, 10.8125)], ids=str)


@STORED
def test_8192_row_losses_become_their_mean(loss_p, stored):
    """Their sum, 88 677.6, is no f16 number; the mean of them is, rounded once."""
    rows = torch.full((8192,), LN)
    o = LossOptions(loss_p, 1 / 8192, 1.0, -100, 50257)
    loss = weighted(rows, o, "", "cross_entropy")
    assert loss.value.dtype is loss_p.dtype and loss.value.item() == pytest.approx(stored, abs=5e-5)
    assert loss.recorded.item() == pytest.approx(LN, rel=1e-6)
    total = weighted(rows, replace(o, weight=1.0), "", "cross_entropy")
    assert total.recorded.item() == pytest.approx(88677.6, abs=0.1) and total.value.isinf().item() == (loss_p is F16)


@TABLES
@STORED
@pytest.mark.parametrize("p", (F32, F16, BF16), ids=str)
def test_uniform_tokens_of_50257(p, loss_p, stored, table):
    z = torch.zeros(16, 50257, dtype=p.dtype)
    with using_table(table):
        loss = cross_entropy(z, torch.arange(16), p=p, loss_p=loss_p, weight=1 / 16)
    assert loss.value.item() == pytest.approx(stored, abs=5e-5) and loss.recorded.item() == pytest.approx(LN, rel=1e-6)


def test_8192_uniform_tokens_of_50257_through_the_head():
    """The whole batch at once, in chunks of 256 rows; in f16 throughout."""
    x, w = torch.zeros(8192, 1).half(), torch.zeros(50257, 1).half()
    with torch.no_grad():
        loss = head_cross_entropy(x, w, torch.arange(8192), p=F16, weight=1 / 8192, chunk=256)
    assert loss.value.item() == 10.828125 and loss.recorded.item() == pytest.approx(LN, rel=1e-6)


def test_the_recorded_loss_is_f32_where_the_value_is_coarse():
    """One bf16 step at 2.3 is 0.7 %: recorded keeps what the value cannot."""
    value, recorded, *_ = head(BF16, out=BF16, loss_p=BF16)
    assert recorded.dtype is torch.float32 and recorded.item() != value.item()
    assert abs(recorded.item() / exact_head(BF16, BF16)[0] - 1) < 1e-6


# ---------------------------------------------------------------- ignored, padded, empty
@TABLES
@pytest.mark.parametrize("p", (F16, F32), ids=str)
def test_ignored_targets_cost_nothing_and_have_no_gradient(p, table):
    _, _, dx, _ = head(p, table, out=F32, chunk=7)
    assert (dx[::7] == 0).all() and (dx[1] != 0).any()
    x, w, _ = data()
    x, w = (convert(a, p).requires_grad_() for a in (x, w))
    z = convert(x.detach() @ w.detach().t(), p).requires_grad_()
    nothing = torch.full((N,), 9)
    with using_table(table):
        for loss in (
            head_cross_entropy(x, w, nothing, p=p, weight=1.0, ignore_index=9, chunk=16),
            head_cross_entropy(x, w, nothing, p=p, ignore_index=9),
            cross_entropy(z, nothing, p=p, ignore_index=9),
        ):
            loss.value.backward()
            assert loss.value.item() == 0 and loss.recorded.item() == 0
    assert all((leaf.grad == 0).all() for leaf in (x, w, z))


@TABLES
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
@pytest.mark.parametrize("chunk", (None, 11))
def test_padded_classes_are_never_read_and_get_no_gradient(p, chunk, table):
    classes = V - 3
    value, recorded, dx, dw = head(p, table, out=F32, loss_p=F32, classes=classes, chunk=chunk)
    right = exact_head(p, F32, classes=classes)
    assert abs(recorded.item() / right[0] - 1) < 1e-6
    assert (
        deviation(dx, right[1]) <= TOLERANCE[p]
        and deviation(dw, right[2]) <= TOLERANCE[p]
        and (dw[classes:] == 0).all()
    )
    x, w, targets = data()
    z = convert(x @ w.t(), p)
    z[:, classes:] = float("nan")
    z.requires_grad_()
    with using_table(table):
        loss = cross_entropy(z, targets, p=p, classes=classes, weight=1 / N)
        loss.value.backward()
    assert loss.value.isfinite() and (z.grad[:, classes:] == 0).all() and z.grad.isfinite().all()


@pytest.mark.parametrize("p", (F16, F32), ids=str)
def test_no_rows_at_all(p):
    x, w = torch.zeros(0, C, dtype=p.dtype).requires_grad_(), torch.ones(V, C, dtype=p.dtype).requires_grad_()
    targets = torch.zeros(0, dtype=torch.int64)
    for chunk in (None, 4):
        loss = head_cross_entropy(x, w, targets, p=p, chunk=chunk)
        loss.value.backward()
        assert loss.recorded.item() == 0 and (w.grad == 0).all() and x.grad.shape == (0, C)
    z = torch.zeros(0, V, dtype=p.dtype).requires_grad_()
    cross_entropy(z, targets, p=p).value.backward()
    assert z.grad.shape == (0, V)


def test_stacked_rows_are_rows():
    x, w, targets = data()
    flat = cross_entropy(x @ w.t(), targets, p=F16, weight=1 / N)
    stacked = cross_entropy((x @ w.t()).view(4, 10, V), targets.view(4, 10), p=F16, weight=1 / N)
    assert torch.equal(flat.value, stacked.value) and torch.equal(flat.recorded, stacked.recorded)
    one = cross_entropy(torch.zeros(5), torch.tensor(2), p=F32)
    assert one.recorded.item() == pytest.approx(math.log(5))
    whole, tokens = (
        head_cross_entropy(h, w, y, p=F16, out=F32) for h, y in ((x, targets), (x.view(4, 10, C), targets.view(4, 10)))
    )
    assert torch.equal(whole.recorded, tokens.recorded)


@TABLES
@HALVES
def test_a_nan_logit_makes_the_loss_nan(p, table):
    z = torch.zeros(3, 5, dtype=p.dtype)
    z[1, 2] = float("nan")
    z.requires_grad_()
    with using_table(table):
        loss = cross_entropy(z, torch.tensor([0, 1, 2]), p=p)
        loss.value.backward()
    assert loss.value.isnan() and loss.recorded.isnan() and z.grad[1].isnan().all() and z.grad[0].isfinite().all()


# ---------------------------------------------------------------- precision of what leaves
@pytest.mark.parametrize("grad", (F16, F32), ids=str)
def test_head_gradients_have_the_precision_of_their_leaves(grad):
    x, w, targets = data()
    w = collect_gradient(torch.nn.Parameter(w.half()), grad)
    x = x.half().requires_grad_()
    head_cross_entropy(x, w, targets, p=F16, out=F32, weight=1 / N, scale=4.0).value.backward()
    assert w.grad.dtype is grad.dtype and x.grad.dtype is torch.float16
    assert torch.equal(
        w.grad.half().to(grad.dtype), w.grad
    )  # each operator's gradient is rounded once to its precision


def test_without_p_and_out_the_operands_decide():
    x, w, targets = data()
    assert head_cross_entropy(x.half(), w.half(), targets).value.dtype is torch.float16
    assert head_cross_entropy(x.half(), w.bfloat16(), targets).value.dtype is torch.float32
    assert head_cross_entropy(x.half(), w.half(), targets, out=F32).value.dtype is torch.float32
    assert cross_entropy((x @ w.t()).bfloat16(), targets).value.dtype is torch.bfloat16
    for call in (lambda p: cross_entropy(x @ w.t(), targets, p=p), lambda p: head_cross_entropy(x, w, targets, p=p)):
        for bad in ("f16", 16, torch.float16):
            with pytest.raises(ValueError, match="recision"):
                call(bad)


def test_nothing_is_computed_for_gradients_that_nobody_wants():
    x, w, targets = data()
    with torch.no_grad(), Ledger() as ledger:
        loss = head_cross_entropy(x.half().requires_grad_(), w.half(), targets, p=F16, out=F32)
    assert not loss.value.requires_grad and not [r for r in ledger.rows() if r.direction == "backward"]
    for which in (0, 1):
        leaves = [a.half().requires_grad_(i == which) for i, a in enumerate((x, w))]
        head_cross_entropy(*leaves, targets, p=F16, out=F32, weight=1 / N).value.backward()
        assert leaves[which].grad is not None and leaves[1 - which].grad is None
        assert torch.equal(leaves[which].grad, head(F16, out=F32)[2 + which])


def test_the_f16_accumulator_reaches_all_three_products():
    exact, coarse = head(F16, out=F32), head(F16, out=F32, accum=F16)
    for a, b in zip(exact[2:], coarse[2:]):
        assert not torch.equal(a, b) or a.shape[0] == N  # C = 24 and V = 33 are one chunk: only rounding of the sums
        assert deviation(b, a) < 4 * TOLERANCE[F16]
    assert torch.equal(*(head(F32, accum=a)[3] for a in (F16, F32)))


def test_a_second_derivative_is_refused():
    x, w, targets = data()
    for y, leaf in (
        (cross_entropy(z := (x @ w.t()).half().requires_grad_(), targets, p=F16).value, z),
        (head_cross_entropy(h := x.half().requires_grad_(), w.half(), targets, p=F16).value, h),
    ):
        with pytest.raises(NotImplementedError, match="create_graph"):
            torch.autograd.grad(y, leaf, create_graph=True)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(targets=torch.zeros(3, dtype=torch.int64)), "need targets"),
        (dict(classes=V + 1), "classes=34"),
        (dict(classes=0), "classes=0"),
        (dict(chunk=0), "chunk=0"),
        (dict(chunk=-3), "chunk=-3"),
    ],
)
def test_bad_requests_are_named(options, words):
    x, w, targets = data()
    request = {"targets": targets, "p": F16, **options}
    with pytest.raises(ValueError, match=words):
        head_cross_entropy(x, w, request.pop("targets"), **request)
    if "chunk" not in options:
        with pytest.raises(ValueError, match=words):
            cross_entropy(x @ w.t(), options.get("targets", targets), p=F16, classes=options.get("classes"))


@TABLES
@pytest.mark.parametrize("p", (F16, F32), ids=str)
def test_targets_that_are_no_class_are_an_error(p, table):
    z = torch.zeros(2, 5)
    with using_table(table):
        for bad in (5, -1):
            with pytest.raises((IndexError, RuntimeError)):
                cross_entropy(z, torch.tensor([0, bad]), p=p)
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy(z, torch.tensor([0, 4]), p=p, classes=4)


def test_rounded_reference_is_used():
    """The reference of these tests does round: without it the comparison above would be too kind."""
    assert t.Rounded.apply(torch.tensor(1 + 2**-12, dtype=torch.float64), F16, None).item() == 1
