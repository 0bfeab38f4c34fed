"""Every operator, forward and backward: torch's own in f32, one rounding in half, the same meaning on every path."""

import op_cases as t
import pytest
import torch
from f16lab import ops
from f16lab.cast import assert_no_casts
from f16lab.device import ALL_BOUNDARY, Path, open_device, table_for, using_table
from f16lab.ops import TOLERANCE, deviation
from f16lab.precision import BF16, E5M2, F16, F32, F64, Precision, convert

open_device("cpu")
HALVES = (F16, BF16)
OTHER_TESTS = {
    "cross_entropy",
    "head_cross_entropy",
    "Loss",  # test_ops_losses.py
    "blocksum",
    "block_sums",
    "to_numpy",
    "rope_table",  # test_ops_rows.py
    "residual_layer_norm",  # two results: test_row_kernels.py
    "add_",
    "scale_",
    "TOLERANCE",
    "deviation",
}  # below
each_case = pytest.mark.parametrize("case", t.ALL, ids=lambda case: case.id or case.name)
each_half = pytest.mark.parametrize("p", HALVES, ids=str)


def variants(case: t.Case) -> list[list[torch.Tensor]]:
    """Operands of every shape of a case."""
    return [case.tensors(shapes, seed) for seed, shapes in enumerate(case.variants)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and numbers, NaN like NaN."""
    return a.dtype is b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def close(a: torch.Tensor, b: torch.Tensor, p: Precision, share: float = 0.01) -> None:
    """Within the one tolerance of `p`, and, of many elements, all but `share` equal in every bit."""
    assert a.shape == b.shape
    assert deviation(a, b) <= TOLERANCE[p], deviation(a, b)
    if p.bits < 32:
        differ = (convert(a.double(), p) != convert(b.double(), p)).sum().item()
        assert differ <= max(1, share * a.numel()), f"{differ} of {a.numel()} differ"


def test_every_exported_operator_has_a_case():
    assert set(ops.__all__) - OTHER_TESTS == t.OPERATORS | set(t.MOVES)


# ---------------------------------------------------------------- f32 is torch
@each_case
def test_f32_is_torch_byte_for_byte(case):
    if case.id in t.FORMULA or case.name in t.FORMULA:
        pytest.skip("torch has no such operator; its value is compared in f64")
    for xs in variants(case):
        (y, grads), (right, right_grads) = (
            t.with_gradients(f, xs) for f in (lambda *x: case.call(*x, p=F32), case.plain)
        )
        assert torch.equal(y, right) and y.dtype is torch.float32
        assert all(torch.equal(a, b) for a, b in zip(grads, right_grads, strict=True))


@each_case
def test_f32_casts_nothing(case):
    with assert_no_casts():
        t.with_gradients(lambda *x: case.call(*x, p=F32), case.tensors(case.shapes))


@each_case
def test_own_f32_formulas_agree_with_torch(case):
    for xs in variants(case):
        with using_table(ALL_BOUNDARY):
            y, grads = t.with_gradients(lambda *x: case.call(*x, p=F32), xs)
        right, right_grads = t.with_gradients(case.plain, xs)
        for a, b in zip((y, *grads), (right, *right_grads), strict=True):
            assert deviation(a, b) <= TOLERANCE[F32]


@each_case
def test_own_backward_agrees_with_finite_differences(case):
    leaves = [x.requires_grad_() for x in case.tensors(case.shapes, dtype=torch.float64)]
    with using_table(ALL_BOUNDARY):
        assert torch.autograd.gradcheck(lambda *x: case.call(*x, p=F64), leaves)


# ---------------------------------------------------------------- half is one rounding
@each_half
@each_case
def test_half_is_the_exact_result_rounded_once(case, p):
    for xs in variants(case):
        y, grads = t.with_gradients(lambda *x: case.call(*x, p=p), [convert(x, p) for x in xs])
        right, right_grads = t.with_gradients(t.meaning(case, p), [x.double() for x in xs])
        assert y.dtype is p.dtype and all(g.dtype is p.dtype for g in grads)
        for a, b in zip((y, *grads), (right, *right_grads), strict=True):
            close(a, b, p)


@each_half
@each_case
def test_paths_mean_the_same(case, p):
    """Native where the table allows it against the boundary everywhere: only the order of f32 sums may differ."""
    for xs in variants(case):
        xs = [convert(x, p) for x in xs]
        native = t.with_gradients(lambda *x: case.call(*x, p=p), xs)
        with using_table(ALL_BOUNDARY):
            boundary = t.with_gradients(lambda *x: case.call(*x, p=p), xs)
        for a, b in zip((native[0], *native[1]), (boundary[0], *boundary[1]), strict=True):
            close(a, b, p)


@each_half
@each_case
def test_f32_operands_of_a_half_operator(case, p):
    """Operands are cast on entry; a gradient is rounded once to the operator's precision, then widened."""
    xs = [x for x in case.tensors(case.variants[-2 if len(case.variants) > 2 else 0], seed=5)]
    y, grads = t.with_gradients(lambda *x: case.call(*x, p=p), xs)
    right, right_grads = t.with_gradients(lambda *x: case.call(*x, p=p), [convert(x, p) for x in xs])
    assert torch.equal(y, right) and y.dtype is p.dtype
    for g, r in zip(grads, right_grads, strict=True):
        assert g.dtype is torch.float32
        if case.name == "gather_rows":  # a sum of rows: rounded once, straight to the table's own precision
            close(g, r, p)
        else:
            assert same(g, r.float())


@each_case
def test_mixed_operands(case):
    """f16, bf16, f32 operands together in F16: as if each had been cast; gradients in the operands' precisions."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    xs = [x.to(d) for x, d in zip(case.tensors(case.shapes), dtypes)]
    y, grads = t.with_gradients(lambda *x: case.call(*x, p=F16), xs)
    assert torch.equal(y, case.call(*(convert(x, F16) for x in xs), p=F16))
    assert [g.dtype for g in grads] == [x.dtype for x in xs]


# ---------------------------------------------------------------- which precision
@each_case
def test_without_p_the_operands_decide(case):
    if case.name == "attention":
        pytest.skip("attention has no default precision")
    xs = case.tensors(case.shapes)
    for p in (F16, BF16, F32, F64):
        assert case.call(*(convert(x, p) for x in xs)).dtype is p.dtype
    if len(xs) > 1:
        mixed = [convert(x, (F16, BF16)[k % 2]) for k, x in enumerate(xs)]
        assert case.call(*mixed).dtype is torch.float32
        assert torch.equal(case.call(*mixed), case.call(*mixed, p=F32))


@each_case
def test_what_is_no_precision_is_refused(case):
    xs = case.tensors(case.shapes)
    for bad in ("f16", torch.float16, 16):
        with pytest.raises(ValueError, match="precision|Precision"):
            case.call(*xs, p=bad)


@pytest.mark.parametrize("table", (None, ALL_BOUNDARY), ids=("table", "boundary"))
@pytest.mark.parametrize("out", (F32, BF16, F64), ids=str)
def test_linear_has_a_second_slot_for_its_output(out, table):
    x, w = (torch.randn(5, 33).half() for _ in range(2))
    with using_table(table or table_for("cpu")):
        y, (gx, gw) = t.with_gradients(lambda x, w: ops.linear(x, w, p=F16, out=out), [x, w])
    right, right_grads = t.with_gradients(
        lambda x, w: t.defined(lambda a, b: a @ b.t(), F16, x, w, out=out), [x.double(), w.double()]
    )
    assert y.dtype is out.dtype and gx.dtype is gw.dtype is torch.float16
    assert deviation(y, right) <= max(TOLERANCE[F32], TOLERANCE[out])
    for a, b in zip((gx, gw), right_grads):
        close(a, b, F16)


# ---------------------------------------------------------------- special values and shapes
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
@pytest.mark.parametrize("special", (float("nan"), float("inf"), -float("inf")))
@each_case
def test_nan_and_inf_pass(case, special, p):
    """Where the exact result is NaN or infinite, so is ours, on both paths."""
    xs = [convert(x, p) for x in case.tensors(case.shapes)]
    xs[0].view(-1)[1] = special
    right = convert(t.meaning(case, p)(*(x.double() for x in xs)), p)
    for table in (table_for("cpu"), ALL_BOUNDARY):
        with using_table(table):
            y = case.call(*xs, p=p)
        assert torch.equal(y.isnan(), right.isnan())
        assert torch.equal(y[y.isinf()], right[right.isinf()])


@pytest.mark.parametrize("p", (F16, F32), ids=str)
@pytest.mark.parametrize("table", (table_for("cpu"), ALL_BOUNDARY), ids=("table", "boundary"))
def test_overflowed_gradients_are_dropped_where_relu_is_flat(table, p):
    """inf · 0 would be NaN; and a NaN input lets the gradient through, as in torch."""
    x = convert(torch.tensor([-1.0, 2.0, 0.0, float("nan")]), p).requires_grad_()
    with using_table(table):
        ops.relu(x, p=p).backward(torch.full((4,), float("inf"), dtype=p.dtype))
    assert x.grad.tolist() == [0.0, float("inf"), 0.0, float("inf")]


@each_half
@each_case
def test_strided_operands_and_expanded_gradients(case, p):
    """A transposed operand and the gradient of a sum, which is one number expanded, are no other meaning."""
    xs = [convert(x, p) for x in case.tensors(case.shapes)]
    strided = [x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(2)[::2] for x in xs]
    y = case.call(*xs, p=p)
    close(case.call(*strided, p=p), y, p)
    leaves, others = ([x.detach().requires_grad_() for x in which] for which in (xs, strided))
    case.call(*leaves, p=p).sum().backward()
    case.call(*others, p=p).backward(torch.ones_like(y))
    for a, b in zip(leaves, others, strict=True):
        close(a.grad, b.grad, p)


@each_case
def test_unneeded_gradients_are_none_and_needed_ones_unchanged(case):
    xs = [convert(x, F16) for x in case.tensors(case.shapes)]
    _, all_grads = t.with_gradients(lambda *x: case.call(*x, p=F16), xs)
    for k in range(len(xs)):
        leaves = [x.clone().requires_grad_(i == k) for i, x in enumerate(xs)]
        y = case.call(*leaves, p=F16)
        y.backward(convert(convert(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).half(), BF16), F16))
        assert torch.equal(leaves[k].grad, all_grads[k])
        assert all(leaf.grad is None for i, leaf in enumerate(leaves) if i != k)


def test_a_second_derivative_is_refused():
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    for y in (ops.mul(x, x, p=F16), ops.mul(x, x, p=F32), ops.gather_rows(x[:, None], torch.tensor([1]))):
        with pytest.raises(NotImplementedError, match="create_graph"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    f32 = torch.ones(3, requires_grad=True)  # in f32 it is torch's operator, twice differentiable too
    (slope,) = torch.autograd.grad(ops.mul(f32, f32, p=F32).sum(), f32, create_graph=True)
    slope.sum().backward()
    assert (f32.grad == 2).all()


@pytest.mark.parametrize("p", (Precision.parse("e4m3"), E5M2), ids=str)
@each_case
def test_eight_bit_compute_is_emulated(case, p):
    """No library operator exists; ours is f32 on rounded operands, rounded once."""
    xs = [convert(x, p) for x in case.tensors(case.shapes)]
    y = case.call(*xs, p=p)
    assert y.dtype is p.dtype
    close(y, t.meaning(case, p)(*(x.double() for x in xs)), p)


# ---------------------------------------------------------------- host numbers
def test_host_numbers_are_never_rounded_to_the_precision():
    big = torch.tensor([60000.0], dtype=torch.float16)
    for table in (table_for("cpu"), ALL_BOUNDARY):
        with using_table(table):
            assert ops.scale(big, 1e-8, p=F16).item() == torch.tensor(60000e-8).half().item() > 0
            q = torch.full((1, 1, 64), 40.0).half()  # 102400 · 1/8 fits, 102400 does not
            assert ops.batched_matmul(q, q, p=F16, transpose_b=True, alpha=1 / 8).item() == 12800
            zeros = torch.zeros(2, 8, dtype=torch.float16)
            assert (ops.layer_norm(zeros, p=F16, eps=1e-12) == 0).all()
            assert (ops.rms_norm(zeros, p=F16, eps=1e-12) == 0).all()


@each_half
def test_a_broadcast_gradient_is_summed_in_f32_and_rounded_once(p):
    """5000 products of a native half operator would be rounded before they are added."""
    g = convert(torch.randn(5000, 3), p)
    a, b = convert(torch.randn(5000, 3), p), convert(torch.randn(3), p).requires_grad_()
    ops.mul(a, b, p=p).backward(g)
    close(b.grad, (g.double() * a.double()).sum(0), p)
    a, b = convert(torch.randn(64, 3, 5), p), convert(torch.randn(5, 2), p).requires_grad_()
    g = convert(torch.randn(64, 3, 2), p)
    ops.batched_matmul(a, b.expand(1, 5, 2), p=p).backward(g)
    right = (a.double().mT @ g.double()).sum(0)
    assert torch.equal(b.grad, convert(right, p)) or deviation(b.grad, right) <= TOLERANCE[p] / 2


# ---------------------------------------------------------------- native bf16 products
def test_a_limit_of_bf16_products_is_written_down_where_it_holds():
    tiny = torch.zeros(64, 64).fill_diagonal_(1e-39).bfloat16()
    eye = torch.eye(64).bfloat16()
    told = {name for name, _ in table_for("cpu").notes}
    kept = torch.equal(ops.matmul(tiny, eye, p=BF16), tiny)
    assert kept != ("matmul forward bf16" in told)
    with using_table(ALL_BOUNDARY):
        assert torch.equal(ops.matmul(tiny, eye, p=BF16), tiny)


def test_native_paths_are_used_where_the_table_says_so():
    from f16lab.cast import Ledger

    x = torch.randn(4, 4).half().requires_grad_()
    native = table_for("cpu").path("gelu", "forward", F16) is Path.NATIVE
    with Ledger() as ledger:
        ops.gelu(x, p=F16)
    assert (ledger.count == 0) == native
    with using_table(ALL_BOUNDARY), Ledger() as ledger:
        ops.gelu(x, p=F16).sum().backward()
    assert [(r.operand, r.src, r.dst, r.direction) for r in ledger.rows()] == [
        ("x", "f16", "f32", "forward"),
        ("output", "f32", "f16", "forward"),
        ("grad", "f16", "f32", "backward"),
        ("x", "f16", "f32", "backward"),
        ("x", "f32", "f16", "backward"),
    ]


# ---------------------------------------------------------------- data movement, in place
@pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn), ids=str
)
@pytest.mark.parametrize("name", t.MOVES)
def test_moving_data_converts_nothing(name, dtype):
    x = torch.tensor([[1.5, float("nan"), -0.0], [float("-inf"), 3.0, 2.0**-9], [7.0, 8.0, 9.0], [0.0, 1.0, 2.0]]).to(
        dtype
    )
    with assert_no_casts():
        y = t.MOVES[name](x)
    assert y.dtype is dtype
    before, after = (set(v.contiguous().view(torch.uint8).flatten().tolist()) for v in (x, y))
    assert after <= before
    if dtype is torch.float32:
        leaf = x.nan_to_num(0, 0, 0).requires_grad_()
        with assert_no_casts():
            t.MOVES[name](leaf).sum().backward()
        assert leaf.grad is not None


@pytest.mark.parametrize("storage", (F16, BF16, F32), ids=str)
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_in_place_the_storage_stays(storage, p):
    a, b = torch.randn(65), torch.randn(65)
    target = convert(a, storage).clone()
    same_tensor = ops.add_(target, b, p=p)
    assert same_tensor is target and target.dtype is storage.dtype
    right = convert(convert(convert(convert(a, storage), p).double() + convert(b, p).double(), p), storage)
    close(target, right, storage if storage.bits < p.bits else p)
    target = convert(a, storage).clone()
    assert ops.scale_(target, 1 / 3, p=p) is target
    right = convert(convert(convert(convert(a, storage), p).float() * (1 / 3), p), storage)
    assert torch.equal(target, right)


def test_in_place_without_p_the_operands_decide():
    target = torch.ones(3, dtype=torch.float16)
    ops.add_(target, torch.full((3,), 2.0**-12))  # f32 sum 1 + 2^-12, then stored as f16
    assert target.dtype is torch.float16 and (target == 1).all()
    assert ops.scale_(torch.tensor([60000.0]).half(), 1e-8).item() > 0


def test_deviation():
    assert deviation(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
    assert deviation(torch.zeros(3), torch.zeros(3)) == 0 and deviation(torch.zeros(0), torch.zeros(0)) == 0
    assert not deviation(torch.tensor([float("nan")]), torch.ones(1)) <= 1
    with pytest.raises(ValueError, match="shapes"):
        deviation(torch.zeros(1), torch.zeros(2))
    assert set(TOLERANCE) == set(Precision)
