"""Sums, counts, accumulation, weights from masters, gradients of tables: kernels against their references in bits."""

import math
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cuda_host import launch_on_host

from f16lab import ops, sum_kernels
from f16lab.cast import Ledger, collect_gradient
from f16lab.device import table_for, using_table
from f16lab.grads import GradBuffer, first_nonfinite, grad_stats
from f16lab.groups import Group, reround, slots_of
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, bits_of, convert
from f16lab.profile import PrecisionProfile
from f16lab.rounding import Key, Purpose
from f16lab.sum_kernels import (COUNTS, PIECE, accumulate, accumulate_plain, below_normal, block_sums, block_sums_kernel,
                                blocksum, count_into, count_parts_into, count_plain, exponent_counts, exponent_counts_kernel, fold_blocks, halved,
                                reround_blocks, reround_plain, spans, table_gradient, table_gradient_kernel,
                                table_gradient_plain, token_order)

gpu = pytest.mark.gpu
KEY = Key.of(7, 3, Purpose.GRADIENT, "wte.weight", 2)
SIZES = (0, 1, 31, 32, 33, 1023, 1024, 1025, 5000)


def wild(n: int, seed: int = 0) -> torch.Tensor:
    """f32 [n] of random bit patterns (NaN and inf among them) and of numbers around the formats' ranges, zeros too."""
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-2**31, 2**31, (n,), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)
    sized = torch.randn(n, generator=g) * torch.exp2(torch.randint(-30, 18, (n,), generator=g).float())
    kind = torch.rand(n, generator=g)
    return torch.where(kind < 0.4, bits, torch.where(kind < 0.9, sized, torch.where(kind < 0.95, 0.0, -0.0)))


def uneven(n: int, p=F32, seed: int = 0) -> torch.Tensor:
    """Finite numbers whose sums round in f64, so that the order of addition shows."""
    g, spread = torch.Generator().manual_seed(seed), 30 if p.bits > 16 else 4
    x = torch.exp2(torch.randn(n, generator=g, dtype=torch.float64) * spread)
    return x * torch.where(torch.arange(n) % 3 == 0, -1, 1) if p is F64 else convert(x.float() * 1.1, p)


def moved(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values at another alignment."""
    return torch.cat([x.new_zeros(offset), x])[offset:]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN for NaN (which NaN an addition gives is the processor's affair)."""
    a, b = a.cpu(), b.cpu()
    if a.dtype is not b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()): return False
    return torch.equal(*(bits_of(x[~a.isnan()]) for x in (a, b)))


@contextmanager
def kernels(blocks: int = 3):
    """Our kernels on CPU tensors: launched on the host in so many blocks, into memory full of NaN."""
    def poisoned(*shape, **options):
        out = real(*shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(77)
    real = torch.empty
    with pytest.MonkeyPatch.context() as patch, using_table(replace(table_for("cpu"), kernels=True)):
        patch.setattr(sum_kernels, "launch", lambda file, kernel, device, n, *a: launch_on_host(file, kernel, n, *a))
        patch.setattr(sum_kernels, "check_tensors", lambda name, tensors, written=(): torch.device("cpu"))
        patch.setattr(sum_kernels, "blocks_of", lambda device, most=8: blocks)
        patch.setattr(torch, "empty", poisoned)
        yield


# ---------------------------------------------------------------- block sums
def test_halving_is_the_tree_it_says():
    x = uneven(1024, F64).tolist()
    while len(x) > 1: x = [a + b for a, b in zip(x[: len(x) // 2], x[len(x) // 2 :])]
    assert halved(uneven(1024, F64)).item() == x[0] == fold_blocks(uneven(1024, F64)).item()
    assert halved(uneven(1024, F64)).item() != uneven(1024, F64).cumsum(0)[-1].item()


@pytest.mark.parametrize("squares", (False, True), ids=("values", "squares"))
@pytest.mark.parametrize("p", (F16, BF16, F32, F64, E4M3, E5M2), ids=str)
def test_block_sums_kernel_has_the_bits_of_the_reference(p, squares):
    for n, offset in [*((n, 0) for n in SIZES), (5000, 1), (1024, 3)]:
        x = moved(uneven(n, p, n), offset)
        right = fold_blocks(x, squares)
        for blocks in (1, 3):
            with kernels(blocks): assert same(block_sums(x, squares), right)
        assert same(fold_blocks(x, squares, rows=1), right)


@pytest.mark.parametrize("p", (F16, F32), ids=str)
def test_a_total_is_the_same_for_any_shards_threads_and_device(p):
    x = uneven(1024 * 300 + 77, p)
    right, before = blocksum(x, squares=True), torch.get_num_threads()
    assert math.isclose(right.item(), math.fsum(x.double().square().tolist()), rel_tol=1e-14)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for cut in (1, 7, 100):
                assert torch.equal(blocksum(torch.cat([block_sums(s, True) for s in x.split(1024 * cut)])), right)
    finally: torch.set_num_threads(before)
    with kernels(2): assert torch.equal(blocksum(x, squares=True), right)
    assert torch.equal(blocksum(torch.cat([block_sums(x, True), torch.zeros(3000, dtype=torch.float64)])), right)


def test_a_million_blocks_take_three_rounds():
    sums = uneven(1_100_000, F64)
    assert math.isclose(blocksum(sums).item(), math.fsum(sums.tolist()), rel_tol=1e-12)


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_a_sum_is_finite_exactly_when_all_elements_are(bad):
    x = torch.full((3000,), 3.4e38)
    with kernels(): assert blocksum(x, squares=True).isfinite()
    for at in (0, 1023, 1024, 2999):
        with kernels(): assert not blocksum(x.index_fill(0, torch.tensor([at]), bad), squares=True).isfinite()


def test_blocksum_is_differentiable_where_it_was():
    x = torch.randn(2000, requires_grad=True)
    with kernels(): blocksum(x, squares=True).backward()
    assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_the_norm_of_gradients_comes_from_the_kernel(p):
    params = {"a": torch.nn.Parameter(torch.zeros(3000)), "b": torch.nn.Parameter(torch.zeros(7))}
    buffers = [GradBuffer(params, p)]
    buffers[0].flat.view(-1)[:3000] = uneven(3000, p)
    right = grad_stats(buffers, 2.0)
    with kernels():
        assert grad_stats(buffers, 2.0) == right and right.finite
        buffers[0].views[1][3] = math.inf
        assert not grad_stats(buffers).finite and first_nonfinite(buffers) == "b"


# ---------------------------------------------------------------- exponents
@pytest.mark.parametrize("p", (F16, BF16, F32, E4M3, E5M2), ids=str)
def test_exponent_counts_kernel_has_the_counts_of_the_reference(p):
    for n, offset in ((0, 0), (1, 0), (33, 0), (1023, 1), (4099, 0), (30_000, 0), (9001, 3)):
        x = moved(convert(wild(n, n), p), offset)
        right = count_plain(x)
        for blocks in (1, 2):
            with kernels(blocks): seen = exponent_counts(x)
            assert torch.equal(seen.counts, right.counts) and torch.equal(seen.amax, right.amax)
        assert right.counts[:256].sum() == n and right.counts[255] == right.counts[257:].sum()


@pytest.mark.parametrize("p", (F16, BF16, E4M3, E5M2), ids=str)
def test_every_code_is_counted_where_it_belongs(p):
    codes = torch.arange(1 << p.bits, dtype=torch.int32).to(torch.int16 if p.bits == 16 else torch.uint8)
    x = codes.view(p.dtype)
    with kernels(): seen = exponent_counts(x)
    wide = x.double()
    finite = wide[wide.isfinite()]
    assert seen.counts[256:].tolist() == [(wide == 0).sum(), wide.isinf().sum(), wide.isnan().sum()]
    assert seen.amax.item() == finite.abs().max() == p.max
    exponents = torch.frexp(finite[finite.abs() >= 2.0**-126].abs()).exponent - 1
    assert torch.equal(seen.counts[1:255], torch.bincount(exponents + 126, minlength=254))
    for q in (E4M3, F16, BF16):
        assert below_normal(seen, q) == ((finite.abs() < q.smallest_normal) & (finite != 0)).sum()


@pytest.mark.parametrize("value", (0.0, -0.0, math.inf, math.nan, 1e-40, 1.0))
def test_a_tensor_of_one_value_falls_into_one_bin(value):
    with kernels(): seen = exponent_counts(torch.full((5000,), value))
    assert torch.equal(seen.counts, count_plain(torch.full((5000,), value)).counts) and seen.counts[:256].max() == 5000


@pytest.mark.parametrize("p", (F16, BF16, F32, E4M3, E5M2), ids=str)
def test_tensors_of_a_buffer_are_counted_in_one_launch(p):
    flat, places = convert(wild(150_000, 5), p), [(0, 70_001, 2), (71_680, 5, 0), (72_704, 70_000, 3), (72_704, 0, 1)]
    right = torch.zeros(4, COUNTS, dtype=torch.int64)
    for start, count, row in places:
        seen = count_plain(flat[start : start + count])
        right[row, :259], right[row, 259] = seen.counts, seen.amax.view(torch.int32)
    for blocks in (1, 3):
        rows, again = torch.zeros(2, 4, COUNTS, dtype=torch.int64)
        with kernels(blocks): count_parts_into(flat, spans(places), rows)
        for start, count, row in places:
            with kernels(blocks): count_into(flat[start : start + count], again[row])
        assert torch.equal(rows, right) and torch.equal(again, right)
        count_parts_into(flat, spans(places), rows)  # the reference, onto what is there
        assert torch.equal(rows[:, :259], 2 * right[:, :259]) and torch.equal(rows[:, 259], right[:, 259])


# ---------------------------------------------------------------- accumulation
ACCUMULATED = [(F32, F16, None), (F32, BF16, None), (F32, F32, KEY), (BF16, BF16, None), (BF16, BF16, KEY),
               (F16, F16, KEY), (F16, F32, None)]


@pytest.mark.parametrize("p,q,key", ACCUMULATED, ids=str)
def test_accumulate_kernel_has_the_bits_of_the_reference(p, q, key):
    cases = ((0, 0, 0), (1, 0, 5), (33, 0, 0), (1023, 1, 2**32 - 500), (2048, 0, 2**32 - 9), (3001, 0, 2**40))
    for n, offset, start in cases:
        buffer, g = convert(wild(n, n), p), moved(convert(wild(n, n + 1), q), offset)
        right = accumulate_plain(buffer.clone(), g, key, start)
        for blocks in (1, 2):
            mine = moved(buffer, offset)
            with kernels(blocks): assert accumulate(mine, g, key, start) is mine
            assert same(mine, right)


def test_small_gradients_reach_a_bf16_buffer_on_average():
    buffer, g = torch.ones(20_000, dtype=torch.bfloat16), torch.full((20_000,), 2.0**-11, dtype=torch.bfloat16)
    stuck = buffer.clone()
    for micro in range(16):
        accumulate(buffer, g, Key.of(1, 0, Purpose.GRADIENT, "w", micro))
        accumulate(stuck, g)
    rise, sigma = buffer.double().mean() - 1, math.sqrt(16 * 2**-7 * 2**-11 / 20_000)
    assert (stuck == 1).all() and abs(rise - 16 * 2**-11) < 4 * sigma


def test_accumulate_refuses_in_words():
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"buffer \[4, 4\] and gradient \[4\]"): accumulate(x, x[0])
    with pytest.raises(NotImplementedError, match="f64"): accumulate(x.double(), x)
    with using_table(replace(table_for("cpu"), kernels=True)):
        with pytest.raises(ValueError, match="not contiguous"): accumulate(x.t()[:2], x[:2])
        with pytest.raises(ValueError, match="overlaps"): accumulate(x, x)
        with pytest.raises(ValueError, match="runs on CUDA tensors"): accumulate(x, x.clone())


# ---------------------------------------------------------------- weights from masters
def a_group(text: str, device: str = "cpu") -> Group:
    g = torch.Generator().manual_seed(5)
    shapes = (64, 65), (1,), (1025,), (3, 7)
    initial = {f"t{i}.weight": torch.randn(*shape, generator=g) for i, shape in enumerate(shapes)}
    slots = slots_of(PrecisionProfile.parse(text))
    params = {n: torch.nn.Parameter(convert(t, slots.storage).to(device)) for n, t in initial.items()}
    return Group("g", slots, params, {n: t.to(device) for n, t in initial.items()})


@pytest.mark.parametrize("text", ("bf16", "bf16_llmc", "f16,master=f32", "f16,master=f32,rounding=stochastic"))
def test_weights_from_masters_have_the_bits_of_the_reference(text):
    group = a_group(text)
    group.key_step = [4, 2**32 - 1, -1, 0]
    right = reround(group, 11)
    for blocks in (1, 3):
        with kernels(blocks): assert same(reround(group, 11), right)


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_rerounding_blocks_anywhere_in_a_tensor(p):
    master = wild(5 * 1024).view(5, 1024)
    given = torch.tensor([1, -2, 3, 3, 5], dtype=torch.int32), torch.tensor([0, 2**32 - 1024, 2**32, 2**40, 1024])
    fresh = torch.tensor([False, False, True, False, False])
    right = reround_plain(master, p, *given, fresh)
    with kernels(): assert same(reround_blocks(master, p, *given, fresh), right)
    assert same(right[2], convert(master[2], p)) and not same(right, reround_plain(master, p, None, given[1], fresh))


# ---------------------------------------------------------------- tables
def tokens(kind: str, n: int, rows: int) -> torch.Tensor:
    """Ids of n tokens."""
    g = torch.Generator().manual_seed(n + rows)
    if kind == "one row": return torch.full((n,), rows - 1)
    if kind == "positions": return torch.arange(n) % rows
    if kind == "uniform": return torch.randint(0, rows, (n,), generator=g)
    return (torch.rand(n, generator=g) ** -1.2 - 1).clamp(max=rows - 1).long()  # as words in a text


def row_gradients(n: int, C: int, p) -> torch.Tensor:
    """[n, C] of both signs."""
    sign = torch.tensor([1, -1], dtype=p.dtype)[torch.arange(n) % 2, None]
    return uneven(n * C, p).view(n, C) * sign


TABLES = [("words", 1500, 300, 40), ("one row", 200, 3, 8), ("positions", 260, 4, 7), ("uniform", 300, 200, 264),
          ("words", 0, 5, 8), ("words", 700, 1, 33), ("uniform", 64, 2, 1), ("one row", 65, 1, 16),
          ("positions", 33, 40, 600)]
ROUNDED = [(F32, F32, None), (BF16, BF16, KEY), (F16, F32, None), (F16, F16, None)]


@pytest.mark.parametrize("kind,n,rows,C", TABLES)
@pytest.mark.parametrize("p,out,key", ROUNDED, ids=str)
def test_table_gradient_kernel_has_the_bits_of_the_reference(p, out, key, kind, n, rows, C):
    ids, g = tokens(kind, n, rows), row_gradients(n, C, p)
    right = table_gradient_plain(g, ids, rows, out, key)
    for blocks in (1, 4):
        with kernels(blocks): assert same(table_gradient(g, ids, rows, out, key), right)
    assert not right[torch.bincount(ids, minlength=rows) == 0].any()


def test_table_gradient_at_an_odd_alignment():
    ids, g = tokens("words", 300, 50), moved(uneven(300 * 8, BF16), 1).view(300, 8)
    with kernels(): assert same(table_gradient(g, ids, 50, F32), table_gradient_plain(g, ids, 50, F32))


def test_the_order_is_the_tokens_of_a_row_by_index_in_pieces_of_64():
    ids, g = tokens("words", 3000, 40), uneven(3000)
    got = table_gradient_plain(g[:, None], ids, 40, F32)[:, 0]
    for row in range(40):
        mine, total = g[ids == row], torch.zeros(())
        for piece in mine.split(PIECE):
            part = torch.zeros(())
            for x in piece: part = part + x
            total = total + part
        assert torch.equal(got[row], total)
    assert torch.bincount(ids).max() > 10 * PIECE


def test_rows_of_at_most_64_tokens_have_the_bits_of_the_cpu_operator():
    ids, g = tokens("positions", 64 * 30, 30), row_gradients(64 * 30, 8, F32)
    assert torch.equal(table_gradient(g, ids, 30, F32), torch.ops.aten.embedding_dense_backward(g, ids, 30, -1, False))


def test_table_gradient_error_is_bounded():
    ids, g = torch.zeros(65_536, dtype=torch.int64), torch.rand(65_536, 2, generator=torch.Generator().manual_seed(0))
    exact = g.double().sum(0)
    assert ((table_gradient(g, ids, 1, F32)[0] - exact).abs() <= (64 + 1024) * 2**-24 * exact).all()
    sequential = torch.ops.aten.embedding_dense_backward(g, ids, 1, -1, False)[0]
    assert (table_gradient(g, ids, 1, F32)[0] - exact).abs().sum() < (sequential - exact).abs().sum()


def test_stochastic_table_gradients_are_right_on_average():
    g = torch.full((1, 20_000), 1 + 2**-10)
    y = table_gradient(g, torch.tensor([1]), 2, BF16, KEY).double()
    assert not y[0].any() and set(y[1].tolist()) == {1.0, 1 + 2**-7}
    assert abs(y[1].mean() - 1 - 2**-10) < 4 * 2**-7 / math.sqrt(8 * 20_000)


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
@pytest.mark.parametrize("grad", (None, F32), ids=("own", "f32"))
def test_gather_rows_goes_back_through_the_kernel_without_a_cast(p, grad):
    table = torch.nn.Parameter(convert(torch.randn(50, 24), p))
    if grad: collect_gradient(table, grad)
    ids = tokens("words", 600, 50).view(20, 30)[:, :-1]  # a strided view, as a shifted batch is
    g = uneven(20 * 29 * 24, p).view(20, 29, 24)
    with kernels(), Ledger() as ledger:
        rows = ops.gather_rows(table, ids, p=p)
        rows.backward(g)
    assert ledger.count == 0 and same(table.grad, table_gradient_plain(g, ids, 50, grad or p))
    table.grad = None
    with kernels(): ops.gather_rows(table, torch.zeros(4096, dtype=torch.int64), p=p).sum().backward()  # g is expanded
    assert (table.grad[0] == 4096).all() and not table.grad[1:].any()


def test_the_gradient_of_a_table_compiles_into_one_graph():
    table, ids = torch.nn.Parameter(convert(torch.randn(50, 8), BF16)), tokens("words", 300, 50)
    loss = lambda t, i: ops.gather_rows(t, i, p=BF16).sum()
    with kernels():
        torch.compile(loss, fullgraph=True, backend="aot_eager")(table, ids).backward()
    assert same(table.grad, table_gradient_plain(torch.ones(300, 8).bfloat16(), ids, 50, BF16))


def test_the_operators_say_the_same_shapes_when_traced():
    x, ids = torch.randn(3000), torch.zeros(375, dtype=torch.int64)
    table = table_gradient_kernel, (x.view(375, 8), ids, 9, torch.bfloat16, 5, True)
    with kernels():
        for op, inputs in ((block_sums_kernel, (x, True)), (exponent_counts_kernel, (x,)), table):
            torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_faketensor"))


def test_tables_refuse_in_words():
    g = torch.zeros(4, 2)
    for bad in (-1, 3):
        ids = torch.tensor([0, 1, 2, bad])
        with pytest.raises(RuntimeError, match="outside 0 … 2"): table_gradient(g, ids, 3, F32)
        with kernels(), pytest.raises(RuntimeError, match="outside 0 … 2"): table_gradient(g, ids, 3, F32)
    with pytest.raises(ValueError, match=r"give integer ids \[4\]"): table_gradient(g, ids[:3], 3, F32)
    with pytest.raises(ValueError, match="give integer ids"): table_gradient(g, torch.zeros(4), 3, F32)
    with pytest.raises(NotImplementedError, match="f64"): table_gradient(g, torch.zeros(4, dtype=torch.int64), 3, F64)
    with pytest.raises(NotImplementedError, match="not of f64"): exponent_counts(g.double())


def test_nothing_to_add_is_nothing():
    with kernels():
        assert table_gradient(torch.zeros(4, 0), torch.zeros(4, dtype=torch.int64), 3, F32).shape == (3, 0)
        assert not table_gradient(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), 3, F32).any()
        assert block_sums(torch.zeros(0)).shape == (0,) and blocksum(torch.zeros(0, 5)) == 0
        assert exponent_counts(torch.zeros(0)).counts.sum() == 0
    assert token_order(torch.zeros(0, dtype=torch.int64), 2).starts.tolist() == [0, 0, 0]


# ---------------------------------------------------------------- on a GPU
@pytest.fixture
def grids(monkeypatch):
    """Launches of one block, of few, of as many as there is work for: a loop to run a test's kernels in."""
    def each():
        for blocks in (1, 5, 100_000):
            monkeypatch.setattr(sum_kernels, "blocks_of", lambda device, most=8: blocks)
            yield blocks
    return each


@gpu
@pytest.mark.parametrize("p", (F16, BF16, F32, F64, E4M3, E5M2), ids=str)
def test_sums_and_counts_on_the_gpu(p, grids):
    for n, offset in [*((n, 0) for n in SIZES), (1_000_007, 0), (1_000_007, 3)]:
        x, y = uneven(n, p, n), convert(wild(n, n), p)
        sums, total = [fold_blocks(x, squares) for squares in (False, True)], blocksum(x, True)
        right = None if p is F64 else count_plain(y)
        for _ in grids():
            for squares in (False, True): assert same(block_sums(moved(x.cuda(), offset), squares), sums[squares])
            assert same(blocksum(x.cuda(), True), total)
            if right is None: continue
            seen = exponent_counts(moved(y.cuda(), offset))
            assert torch.equal(seen.counts.cpu(), right.counts) and torch.equal(seen.amax.cpu(), right.amax)
            rows = torch.zeros(2, COUNTS, dtype=torch.int64, device="cuda")
            count_parts_into(moved(y.cuda(), offset), spans([(0, n // 2, 0), (n // 2, n - n // 2, 1)], "cuda"), rows)
            assert torch.equal(rows[:, :259].sum(0).cpu(), right.counts)


@gpu
@pytest.mark.parametrize("p,q,key", ACCUMULATED, ids=str)
def test_accumulation_on_the_gpu(p, q, key, grids):
    for n, offset in ((0, 0), (33, 1), (1_000_007, 0), (100_003, 3)):
        buffer, g = convert(wild(n, n), p), convert(wild(n, n + 1), q)
        right = accumulate_plain(buffer.clone(), g, key, 2**32 - 1000)
        for _ in grids():
            assert same(accumulate(moved(buffer.cuda(), offset), moved(g.cuda(), offset), key, 2**32 - 1000), right)


@gpu
@pytest.mark.parametrize("text", ("bf16", "bf16_llmc", "f16,master=f32", "f16,master=f32,rounding=stochastic"))
def test_weights_from_masters_on_the_gpu(text, grids):
    groups = a_group(text), a_group(text, "cuda")
    for group in groups: group.key_step = [4, 2**32 - 1, -1, 0]
    for _ in grids(): assert same(*(reround(group, 11) for group in groups))


@gpu
@pytest.mark.parametrize("kind,n,rows,C", [*TABLES, ("words", 65_536, 50_304, 64), ("one row", 65_536, 3, 128),
                                           ("positions", 65_536, 1024, 96)])
@pytest.mark.parametrize("p,out,key", [*ROUNDED, (BF16, BF16, None), (F16, F16, KEY)], ids=str)
def test_table_gradients_on_the_gpu(p, out, key, kind, n, rows, C, grids):
    ids, g = tokens(kind, n, rows), row_gradients(n, C, p)
    right = table_gradient_plain(g, ids, rows, out, key)
    for _ in grids(): assert same(table_gradient(g.cuda(), ids.cuda(), rows, out, key), right)


@gpu
def test_gather_rows_on_the_gpu_casts_nothing_and_equals_the_reference():
    values, ids, g = convert(torch.randn(500, 64), BF16), tokens("words", 8000, 500), row_gradients(8000, 64, BF16)
    table = torch.nn.Parameter(values.cuda())
    with Ledger() as ledger: ops.gather_rows(table, ids.cuda(), p=BF16).backward(g.cuda())
    assert ledger.count == 0 and same(table.grad, table_gradient_plain(g, ids, 500, BF16))


@gpu
def test_more_than_2_to_the_31_elements_on_the_gpu():
    n = 2**31 + 5
    x = torch.full((n,), 1.5, device="cuda", dtype=torch.bfloat16)
    x[-1] = 3.0
    assert block_sums(x)[-1] == 4 * 1.5 + 3 and blocksum(x) == 1.5 * n + 1.5
    seen = exponent_counts(x)
    assert seen.counts[127] == n - 1 and seen.counts[128] == 1 and seen.amax == 3
    x[-1000:] = uneven(1000, BF16).cuda()
    tail = x[-1000:].cpu()
    accumulate(x, x.roll(1), KEY)
    shifted = torch.cat([torch.full((1,), 1.5, dtype=torch.bfloat16), tail[:-1]])
    assert same(x[-1000:], accumulate_plain(tail, shifted, KEY, n - 1000))
    del x
    rows, C = 2**22, 520  # 2^31 channels and more
    g = uneven(90 * C, BF16).view(90, C)
    out = table_gradient(g.cuda(), torch.full((90,), rows - 1, device="cuda"), rows, BF16)
    assert same(out[-1], table_gradient_plain(g, torch.zeros(90, dtype=torch.int64), 1, BF16)[0]) and not out[-2].any()


@gpu
def test_a_side_stream_is_waited_for():
    side, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for i in range(50):
        with torch.cuda.stream(side):
            x = (a @ a)[0] * 0 + float(i)
            sums, seen = block_sums(x), exponent_counts(x)
            table = table_gradient(x.view(512, 8), torch.zeros(512, dtype=torch.int64, device="cuda"), 2, F32)
            assert (sums == 1024.0 * i).all() and seen.amax == i and (table[0] == 512.0 * i).all()


@gpu
def test_a_norm_takes_one_read_of_the_gpu():
    params = {f"w{i}": torch.nn.Parameter(torch.zeros(5000 + i, device="cuda")) for i in range(3)}
    buffer = GradBuffer(params, BF16)
    buffer.flat.normal_()
    grad_stats([buffer])
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            grad_stats([buffer])
    finally: torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in said if "synchroniz" in str(w.message)]) == 1


@gpu
def test_gpu_tensors_that_cannot_be_taken_are_refused_in_words():
    x = torch.zeros(4, 4, device="cuda")
    with pytest.raises(ValueError, match="several devices"): accumulate(x, torch.zeros(4, 4))
    with pytest.raises(ValueError, match="not contiguous"): accumulate(x.t(), x.clone())
    with pytest.raises(ValueError, match="overlaps"): accumulate(x, x)
