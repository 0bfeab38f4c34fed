"""Rows: sums that overflow elsewhere, masks, norms, tables; blocksum; what moves data and what refuses to."""

import math

import numpy as np
import op_cases as t
import pytest
import torch
from f16lab import ops
from f16lab.cast import Ledger, assert_no_casts, collect_gradient
from f16lab.device import ALL_BOUNDARY, DispatchTable, Path, open_device, table_for, using_table
from f16lab.ops import TOLERANCE, deviation
from f16lab.precision import BF16, E4M3, F16, F32, F64, convert

open_device("cpu")
HALVES = pytest.mark.parametrize("p", (F16, BF16), ids=str)
TABLES = pytest.mark.parametrize("table", (table_for("cpu"), ALL_BOUNDARY), ids=("table", "boundary"))


@pytest.fixture(params=(1, 2), ids=("1 thread", "2 threads"))
def threads(request):
    """Number of threads for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# ---------------------------------------------------------------- sums
@TABLES
@HALVES
def test_sums_and_means_overflow_only_if_the_result_does(p, table, threads):
    with using_table(table):
        assert ops.mean(torch.ones(70_000, dtype=p.dtype), p=p).item() == 1
        assert ops.total(torch.tensor([32000.0] * 4 + [-32000.0] * 4, dtype=p.dtype), p=p).item() == 0
        long = torch.tensor([32000.0] * 100_000 + [-32000.0] * 100_000).to(p.dtype)
        assert ops.total(long, p=p).item() == 0 and ops.mean(long, p=p).item() == 0
        assert ops.row_sum(long[None], p=p).item() == 0 and ops.col_sum(long[:, None], p=p).item() == 0
        assert (
            ops.mean(torch.full((9,), 60000.0, dtype=p.dtype), p=p).item()
            == torch.tensor(60000.0, dtype=p.dtype).item()
        )
        assert (ops.total(torch.full((3,), 60000.0, dtype=p.dtype), p=p).isinf().item()) == (p is F16)
        ones = torch.ones(4096, 3, dtype=p.dtype)
        assert (ops.col_sum(ones, p=p) == 4096).all() and (ops.row_sum(ones.t(), p=p) == 4096).all()
        assert ops.cumsum(torch.ones(4096, dtype=p.dtype), p=p)[-1].item() == 4096


@HALVES
def test_a_long_sum_is_rounded_once_whatever_the_threads(p, threads):
    x = convert(torch.randn(300_001, generator=torch.Generator().manual_seed(2)) * 3, p)
    for f, exact in (
        (ops.total, x.double().sum()),
        (ops.mean, x.double().mean()),
        (lambda x, p: ops.row_sum(x[None], p=p)[0], x.double().sum()),
    ):
        assert torch.equal(f(x, p=p), convert(exact, p))


@HALVES
def test_a_bias_gradient_of_one_output_is_rounded_once_whatever_the_threads(p, threads):
    """One output: its sum over 100 000 rows is the one that torch shares between threads."""
    g = convert(torch.randn(100_000, 1, generator=torch.Generator().manual_seed(2)) * 3, p)
    x, w, b = (
        torch.ones(100_000, 1, dtype=p.dtype),
        torch.ones(1, 1, dtype=p.dtype),
        torch.zeros(1, dtype=p.dtype, requires_grad=True),
    )
    ops.linear(x, w, b, p=p).backward(g)
    assert torch.equal(b.grad[0], convert(g.double().sum(), p))


# ---------------------------------------------------------------- softmax and masks
SCORES = torch.tensor([-16.0, -15.9, -3.0, 0.0])


@TABLES
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_a_row_that_sees_nothing_is_zero_with_zero_gradient(p, table):
    """Causal and padding masks together: the first row's only key is padding."""
    x = convert(SCORES.repeat(2, 3, 4, 1), p).requires_grad_()
    padding = torch.tensor([False, True, True, True]).expand(2, 1, 1, 4)
    with using_table(table):
        y = ops.softmax(x, p=p, causal=True, mask=padding)
        y.backward(convert(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), p))
    assert (y[:, :, 0] == 0).all() and (y[:, :, 1, 1] == 1).all() and (y[:, :, 1, [0, 2, 3]] == 0).all()
    sums = y.double().sum(-1)[:, :, 1:]
    assert (sums - 1).abs().max() <= 3 * TOLERANCE[p]
    assert x.grad.isfinite().all() and (x.grad[:, :, :2] == 0).all() and (x.grad[:, :, 3, 1:] != 0).all()
    assert (x.grad[..., 0] == 0).all()


@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_masks_stack_and_equal_softmax_of_what_is_visible(p):
    g = torch.Generator().manual_seed(1)
    x = convert(torch.randn(2, 5, 7, generator=g) * 8 - 8, p)
    mask = torch.rand(2, 5, 7, generator=g) < 0.4
    mask[0, 2] = False
    y = ops.softmax(x, p=p, mask=mask, causal=True)
    for b in range(2):
        for row in range(5):
            seen = mask[b, row] & (torch.arange(7) <= row + 2)  # 7 − 5 earlier columns
            assert (y[b, row][~seen] == 0).all()
            if seen.any():
                assert deviation(y[b, row][seen], torch.softmax(x[b, row][seen].double(), 0)) <= TOLERANCE[p]


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_scores_at_the_end_of_the_range_are_no_mask(p):
    """The arithmetic that breaks masks made of numbers: lowest − 16 is −inf in f16, twice the lowest in bf16."""
    lowest = torch.tensor(-p.max, dtype=p.dtype)
    assert (lowest + torch.tensor(-16.0, dtype=p.dtype)).isinf().item() == (p is F16)
    assert torch.tensor(-15.9).half() + torch.tensor(-65504.0).half() == -65504
    assert (lowest + lowest).isinf()
    x = torch.full((1, 3), -p.max, dtype=p.dtype)
    assert torch.equal(
        ops.softmax(x, p=p, mask=torch.tensor([[True, False, False]])), torch.tensor([[1.0, 0, 0]]).to(p.dtype)
    )
    third = ops.softmax(x, p=p)
    assert torch.equal(third, torch.full((1, 3), 1 / 3).to(p.dtype))


@TABLES
@pytest.mark.parametrize("p", (F16, F32), ids=str)
@pytest.mark.parametrize("junk", (float("nan"), float("inf"), -float("inf")))
def test_what_is_hidden_has_no_influence(junk, p, table):
    """An overflow in the scores of later tokens must not reach earlier ones; causal alone, and with a mask."""
    clean = convert(torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)), p)
    future = torch.ones(4, 6, dtype=torch.bool).triu(3)
    dirty = clean.masked_fill(future, junk)
    g = convert(torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)), p)
    for options in (dict(causal=True), dict(mask=~future), dict(causal=True, mask=~future)):
        results = []
        for x in (clean, dirty):
            leaf = x.clone().requires_grad_()
            with using_table(table):
                y = ops.softmax(leaf, p=p, **options)
                y.backward(g)
            results.append((y.detach(), leaf.grad))
        assert torch.equal(*(y for y, _ in results)) and torch.equal(*(grad for _, grad in results))
        assert (results[0][0][:, future] == 0).all() and (results[0][1][:, future] == 0).all()


def test_more_rows_than_columns_and_an_all_false_mask():
    x = torch.randn(2, 4, 2).half().requires_grad_()
    y = ops.softmax(x, p=F16, causal=True)  # row t sees columns ≤ t − 2
    assert (y[:, :2] == 0).all() and (y[:, 2, 0] == 1).all()
    ops.softmax(x, p=F16, mask=torch.tensor(False)).sum().backward()
    assert (x.grad == 0).all()
    assert ops.softmax(torch.zeros(3, 0).half(), p=F16).shape == (3, 0)


@pytest.mark.parametrize(
    "mask", (torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.uint8), torch.full((3, 3), -math.inf))
)
def test_a_mask_of_numbers_is_refused(mask):
    for call in (
        lambda: ops.softmax(torch.zeros(3, 3), p=F32, mask=mask),
        lambda: ops.attention(*[torch.zeros(1, 1, 3, 4)] * 3, p=F32, stable=F32, mask=mask),
    ):
        with pytest.raises(ValueError, match="bool tensor, True = visible"):
            call()


@TABLES
@pytest.mark.parametrize("p, stable", [(F16, F32), (F16, F16), (BF16, F32), (BF16, BF16), (F32, F32)], ids=str)
def test_attention_with_padding(p, stable, table):
    """Against f64 with a rounding where each of the three operators has one; blind rows are 0 with 0 gradients."""
    q, k, v = (
        convert(x, p) for x in (torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    )
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., :2] = False
    with using_table(table):
        y, grads = t.with_gradients(lambda *x: ops.attention(*x, p=p, stable=stable, mask=mask), [q, k, v])
    visible = mask & torch.ones(5, 5, dtype=torch.bool).tril()

    def exact(q, k, v):
        scores = t.defined(lambda q, k: (q @ k.mT) / math.sqrt(8), p, q, k)
        weights = t.defined(lambda s: t.masked_softmax(s, visible), stable, scores)
        return t.defined(torch.matmul, p, weights, v)

    right, right_grads = t.with_gradients(exact, [x.double() for x in (q, k, v)])
    assert (y[1, :, :2] == 0).all() and (grads[0][1, :, :2] == 0).all() and (grads[1][1, :, :2] == 0).all()
    for mine, other in zip((y, *grads), (right, *right_grads), strict=True):
        assert mine.dtype is p.dtype and deviation(mine, other) <= TOLERANCE[p]


# ---------------------------------------------------------------- norms
@TABLES
@HALVES
def test_norms_at_the_ends_of_the_range(p, table):
    with using_table(table):
        assert (ops.layer_norm(torch.zeros(2, 64).to(p.dtype), p=p, eps=1e-12) == 0).all()
        bias = torch.randn(64).to(p.dtype)
        assert torch.equal(
            ops.layer_norm(torch.zeros(2, 64).to(p.dtype), torch.ones(64).to(p.dtype), bias, p=p, eps=1e-12)[1], bias
        )
        assert (ops.layer_norm(torch.full((1, 64), 300.0).to(p.dtype), p=p, eps=1e-12) == 0).all()
        assert (ops.rms_norm(torch.full((1, 64), 300.0).to(p.dtype), p=p) == 1).all()
        pair = torch.tensor([[1e4, -1e4] * 32]).to(p.dtype)
        assert torch.equal(ops.layer_norm(pair, p=p), torch.tensor([[1.0, -1.0] * 32]).to(p.dtype))
        assert torch.equal(ops.layer_norm(pair * 6, p=p), torch.tensor([[1.0, -1.0] * 32]).to(p.dtype))


@HALVES
def test_the_statistics_of_a_norm_are_f32_also_in_its_gradient(p):
    """1000 + small: a mean held in half would be off by the size of the signal."""
    x = convert(1000 + torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) * 4, p)
    y, (g,) = t.with_gradients(lambda x: ops.layer_norm(x, p=p), [x])
    right, (exact,) = t.with_gradients(lambda x: t.defined(t.norm, p, x), [x.double()])
    assert deviation(y, right) <= TOLERANCE[p] and deviation(g, exact) <= TOLERANCE[p]


# ---------------------------------------------------------------- tables
@TABLES
@pytest.mark.parametrize("grad", (None, F32), ids=("own", "f32"))
@HALVES
def test_the_gradient_of_4096_ones_is_4096(p, grad, table):
    table_parameter = torch.nn.Parameter(torch.zeros(5, 2, dtype=p.dtype))
    if grad:
        collect_gradient(table_parameter, grad)
    with using_table(table):
        ops.gather_rows(table_parameter, torch.zeros(4096, dtype=torch.int64), p=p).sum().backward()
    assert (table_parameter.grad[0] == 4096).all() and (table_parameter.grad[1:] == 0).all()


@pytest.mark.parametrize("p", (F16, BF16, F32, F64), ids=str)
@pytest.mark.parametrize("storage", (F16, BF16, F32, F64), ids=str)
def test_a_table_in_one_precision_read_in_another(storage, p):
    """Rows are cast, never the table; the gradient is a sum of the rows' gradients, rounded once to the table's."""
    values = convert(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), storage)
    leaf, ids = (
        values.clone().requires_grad_(),
        torch.randint(0, 7, (3, 40), generator=torch.Generator().manual_seed(1)),
    )
    with Ledger() as ledger:
        rows = ops.gather_rows(leaf, ids, p=p)
        g = convert(torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(2)), p)
        rows.backward(g)
    assert torch.equal(rows, convert(values[ids], p))
    exact = torch.zeros(50, 8, dtype=torch.float64).index_add(0, ids.flatten(), g.double().flatten(0, 1))
    assert leaf.grad.dtype is storage.dtype and deviation(leaf.grad, convert(exact, storage)) <= TOLERANCE[storage]
    assert ledger.count == 0 if storage is p and p.bits > 16 else True
    assert all(r.shape != (50, 8) for r in ledger.rows() if r.direction == "forward")


def test_a_half_table_read_in_f32_keeps_its_gradients_unrounded():
    table = collect_gradient(torch.nn.Parameter(torch.ones(3, 1, dtype=torch.float16)), F32)
    ops.gather_rows(table, torch.tensor([1, 1]), p=F32).backward(torch.tensor([[1 + 2**-20], [2**-18]]))
    assert table.grad[1].item() == 1 + 2**-20 + 2**-18


def test_a_tied_table_adds_both_uses_in_f32():
    """As embedding and as head: 2048 from one, 1 from the other."""
    table = collect_gradient(torch.nn.Parameter(torch.ones(2, 1, dtype=torch.float16)), F32)
    rows = ops.gather_rows(table, torch.zeros(2048, dtype=torch.int64), p=F16)
    head = ops.linear(torch.ones(1, 1).half(), table, p=F16)
    (rows.float().sum() + head.float().sum()).backward()
    assert table.grad.flatten().tolist() == [2049.0, 1.0]


@HALVES
def test_the_native_table_gradient_is_used_where_the_device_adds_in_f32(p):
    """Forced on this CPU, whose operator adds in half, to see that the path is the one that is taken."""
    native = DispatchTable(((("gather_rows", "backward", p), Path.NATIVE),))
    leaf = torch.zeros(2, 1, dtype=p.dtype, requires_grad=True)
    with using_table(native), assert_no_casts():
        ops.gather_rows(leaf, torch.zeros(4096, dtype=torch.int64), p=p).sum().backward()
    assert leaf.grad[0].item() == (2048 if p is F16 else 256)
    wide = collect_gradient(torch.nn.Parameter(torch.zeros(2, 1, dtype=p.dtype)), F32)
    with using_table(native):  # another gradient precision: not the native operator's
        ops.gather_rows(wide, torch.zeros(4096, dtype=torch.int64), p=p).sum().backward()
    assert wide.grad[0].item() == 4096


@TABLES
@HALVES
def test_scatter_adds_in_f32_and_rounds_once(p, table):
    with using_table(table):
        hits = ops.scatter_add_rows(
            torch.zeros(2, 1, dtype=p.dtype),
            torch.zeros(4096, dtype=torch.int64),
            torch.ones(4096, 1, dtype=p.dtype),
            p=p,
        )
    assert hits.flatten().tolist() == [4096.0, 0.0]


def test_ids_outside_a_table_are_an_error():
    for ids in (torch.tensor([5]), torch.tensor([-1])):
        for p in (F32, F16):
            with pytest.raises((IndexError, RuntimeError)):
                ops.gather_rows(torch.zeros(5, 2), ids, p=p)


# ---------------------------------------------------------------- blocksum
@pytest.mark.parametrize("p", (F16, BF16, F32, F64, E4M3), ids=str)
@pytest.mark.parametrize("n", (0, 1, 1023, 1024, 1025, 10_000, 300_000))
def test_blocksum_is_the_sum(n, p):
    x = convert(torch.randn(n, generator=torch.Generator().manual_seed(n)) * 5 + 1, p)
    exact = math.fsum(x.double().tolist())
    assert ops.blocksum(x).dtype is torch.float64 and ops.blocksum(x).shape == ()
    assert abs(ops.blocksum(x).item() - exact) <= 1e-15 * math.fsum(x.double().abs().tolist())
    sums = ops.block_sums(x)
    assert sums.shape == (-(-n // 1024),)
    for k in range(0, len(sums), 37):
        block = x.double()[1024 * k : 1024 * (k + 1)]
        assert abs(sums[k].item() - math.fsum(block.tolist())) <= 1e-15 * math.fsum(block.abs().tolist())


@pytest.mark.parametrize("p", (F16, F32), ids=str)
def test_blocksum_has_the_same_bits_for_any_threads_and_shards(p):
    x = convert(torch.randn(1024 * 300 + 77, generator=torch.Generator().manual_seed(0)), p)
    results, before = set(), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.add(ops.blocksum(x).item())
            for shards in (2, 3, 4, 7, 300):
                cut = 1024 * -(-301 // shards)
                parts = torch.cat([ops.block_sums(piece) for piece in x.split(cut)])
                results.add(ops.blocksum(parts).item())
            results.add(ops.blocksum(torch.cat([ops.block_sums(b) for b in x.split(1024)])).item())
            results.add(ops.blocksum(x.view(7, -1) if x.numel() % 7 == 0 else x[None]).item())
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


def test_blocksum_of_a_strided_tensor_follows_its_own_index():
    x = torch.randn(64, 65)
    assert ops.blocksum(x.t()).item() == ops.blocksum(x.t().contiguous()).item()


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("other", (F32, BF16), ids=str)
def test_inserting_rows_of_another_precision_is_refused(other):
    x = torch.zeros(4, 2, dtype=torch.float16)
    with assert_no_casts(), pytest.raises(ValueError, match=f"rows are {other.tag}, the tensor is f16; cast first"):
        ops.insert_rows(x, 0, torch.ones(2, 2, dtype=other.dtype))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.insert_rows(x, 3, x[:2]),
        lambda x: ops.insert_rows(x, -1, x[:2]),
        lambda x: ops.slice_rows(x, 2, 9),
        lambda x: ops.slice_rows(x, -1, 2),
        lambda x: ops.slice_rows(x, 3, 2),
    ],
)
def test_rows_outside_are_refused(call):
    with pytest.raises(ValueError, match="rows"):
        call(torch.zeros(4, 2))


def test_insert_writes_a_copy():
    x = torch.arange(8.0).view(4, 2)
    y = ops.insert_rows(x, 1, torch.full((2, 2), 9.0))
    assert y.tolist() == [[0, 1], [9, 9], [9, 9], [6, 7]] and x[1, 0] == 2
    assert torch.equal(ops.insert_rows(x, 4, x[:0]), x)


def test_reading_at_another_precision_is_refused():
    x = torch.tensor([1.5, 2.5], dtype=torch.float16, requires_grad=True)
    with assert_no_casts():
        assert ops.to_numpy(x, F16).dtype == np.float16 and ops.to_numpy(x, F16).tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match="the tensor is f16, asked for f32; cast first"):
        ops.to_numpy(x, F32)
    for p in (BF16, E4M3):
        with pytest.raises(ValueError, match=f"numpy has no {p.tag}"):
            ops.to_numpy(torch.ones(2).to(p.dtype), p)


# ---------------------------------------------------------------- rope
def test_rope_tables_are_f64_angles_rounded_once():
    cos, sin = ops.rope_table(100, 8)
    angle = np.outer(np.arange(100.0), 10000.0 ** (-np.arange(0, 8, 2) / 8))
    assert np.abs(cos.numpy() - np.cos(angle)).max() <= 2**-24 and np.abs(sin.numpy() - np.sin(angle)).max() <= 2**-24
    assert cos.dtype is sin.dtype is torch.float32
    with pytest.raises(ValueError, match="even"):
        ops.rope_table(4, 7)


def test_rope_turns_by_relative_position():
    """⟨rope(q)_i, rope(k)_j⟩ depends on i − j alone."""
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    table = tuple(x.double() for x in ops.rope_table(12, 8))
    scores = ops.rope(q.expand(12, 8), table) @ ops.rope(k.expand(12, 8), table).t()
    for offset in (-3, 0, 2):
        diagonal = scores.diagonal(offset)
        assert (diagonal - diagonal[0]).abs().max() < 1e-5


def test_a_rope_table_of_another_size_is_refused():
    for shape in ((2, 5, 8), (2, 7, 8), (2, 6, 6)):
        with pytest.raises(ValueError, match="rope"):
            ops.rope(torch.zeros(shape), ops.rope_table(6, 8), p=F32)
