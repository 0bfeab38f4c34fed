"""Exponent histograms: every number is counted once, and a count tells what a cast would do."""
import math

import numpy as np
import pytest
import torch

from f16lab.cast import round_in_register
from f16lab.events import Histogram, HistogramRecord
from f16lab.packing import from_json, pack_histograms, to_json, unpack_histograms
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, Precision
from f16lab.probes import (MANTISSA, ROW, Counts, DeviceTally, Room, Tally, binades_of, compiled_loops, count_room,
                           has_numba, headroom, histogram_of, loops_of, merged, moved, overflows,
                           patterns_of, sampled, what_if)
from f16lab.runlog import RunLog, RunReader
from f16lab.sum_kernels import spans

INF, NAN = math.inf, math.nan
FORMATS = (E4M3, E5M2, F16, BF16, F32)


def every(p: Precision) -> torch.Tensor:
    """Every number of an 8- or 16-bit format."""
    n = 1 << p.bits
    return torch.arange(n).to(torch.uint8 if p.bits == 8 else torch.int16).view(p.dtype)


def ranges(p: Precision) -> torch.Tensor:
    """Numbers of all sizes a format has, its special ones, and what lies at its ends; shuffled."""
    g = torch.Generator().manual_seed(1)
    e = torch.rand(4000, generator=g) * (p.emax - p.emin + p.mantissa_bits + 2) + p.emin - p.mantissa_bits - 1
    special = [0.0, -0.0, p.max, -p.max, p.smallest_normal, p.smallest_subnormal, -p.smallest_subnormal, NAN, INF,
               -INF, 1.0]
    signed = torch.exp2(e.double()) * torch.sign(torch.randn(4000, generator=g))
    x = torch.cat([signed, torch.tensor(special, dtype=torch.float64)])
    return x[torch.randperm(len(x), generator=g)].to(torch.float32).to(p.dtype)


def slowly(x: torch.Tensor) -> Histogram:
    """The same by Python's own numbers, one element at a time."""
    p, counts, zeros, subnormals, infs, nans, amax = Precision.of(x), {}, 0, 0, 0, 0, 0.0
    for v in x.detach().double().reshape(-1).abs().tolist():
        if v != v: nans += 1
        elif v == INF: infs += 1
        elif v == 0: zeros += 1
        else:
            e, amax, subnormals = max(math.frexp(v)[1] - 1, -127), max(amax, v), subnormals + (v < p.smallest_normal)
            counts[e] = counts.get(e, 0) + 1
    first = min(counts, default=0)
    bins = tuple(counts.get(e, 0) for e in range(first, max(counts, default=-1) + 1))
    return Histogram("", "", "tensor", p.tag, first, bins, zeros, subnormals, infs, nans, amax)


# ---------------------------------------------------------------- counting
@pytest.mark.parametrize("p", FORMATS[:4], ids=str)
def test_every_number_of_a_format_is_counted_once(p):
    x = every(p)
    assert histogram_of(x) == slowly(x) and histogram_of(x).elements == len(x)


@pytest.mark.parametrize("p", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4096])
def test_a_tally_of_any_size_counts_the_same(p, rows):
    x, tally = ranges(p), Tally(rows, compiled=False)
    for part in (x[:100], x[100:101], x[101:101], x[101:]): tally.add(("", "", "tensor", p.tag, 0), part)
    assert tally.table()[0] == slowly(x)


@pytest.mark.parametrize("p", FORMATS, ids=str)
def test_the_device_tally_counts_the_same(p):
    tally, x = DeviceTally(), ranges(p)
    for part in (x[:2000], x[2000:]): tally.add(("", "", "tensor", p.tag, 0), part)
    assert tally.table()[0] == slowly(x) and len(tally.table()) == 0


@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
def test_the_compiled_loop_agrees_with_the_room(p):
    """Machine code where numba is there, and the same loop as Python."""
    x, room = ranges(p), Room(64)
    room.put(0, len(x), x)
    b = count_room(room, 1)
    for loops in [PYTHON, *([compiled_loops()] if has_numba() else [])]:
        row, parts = np.zeros(260, np.int64), np.zeros((8, 512), np.int32)
        loops.one(patterns_of(x), MANTISSA[p.dtype], parts, row)
        assert (row == np.concatenate([b.fields[0], b.apart[0], b.top])).all() and not parts.any()
        assert row[:256].sum() == len(x)


@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8, 9])
def test_the_loop_counts_tensors_of_any_length_and_alignment(p, n):
    """It reads eight bytes at a time."""
    x = ranges(p)[1 : n + 1]
    for loops in [PYTHON, *([compiled_loops()] if has_numba() else [])]:
        tally = Tally(64, compiled=False)
        tally.loops = loops
        tally.add(("", "", "tensor", p.tag, 0), x)
        assert tally.table()[0] == slowly(x)


PYTHON = loops_of(lambda loop: loop)  # not compiled


@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
def test_a_buffer_is_counted_at_once_and_a_tally_with_loops_counts_the_same(p):
    x, tallies = ranges(p)[:6000], (Tally(64, compiled=False), Tally(64, compiled=False), DeviceTally())
    tallies[1].loops = compiled_loops() if has_numba() else PYTHON
    labels, places = [("", "", f"t{i}", p.tag, 0) for i in range(70)], [(i * 80, 70 + i % 2, i) for i in range(70)]
    for tally in tallies[1:]:
        tally.add(("", "", "first", p.tag, 0), x)
        tally.add_parts(labels, x, spans(places))
        tally.add(labels[3], x[:5])
    tallies[0].add(("", "", "first", p.tag, 0), x)
    for label, (start, count, _) in zip(labels, places): tallies[0].add(label, x[start : start + count])
    tallies[0].add(labels[3], x[:5])
    for tally in tallies:
        for i in range(80): tally.add(("", "", f"own{i}", p.tag, 0), x[i : 2 * i])
    a, b, c = (tally.table() for tally in tallies)
    assert list(a) == list(b) and len(a) == 151 and not len(tallies[1].table())
    assert list(a) == list(c)


ODD = (torch.zeros(0), torch.zeros(7), torch.full((5,), NAN), torch.full((2, 2), -INF), torch.tensor(3.0),
       torch.full((1000,), 0.1), torch.full((3,), 1e-45), torch.ones(3, 0, 2))


@pytest.mark.parametrize("x", ODD, ids=lambda x: str(x.shape))
def test_odd_tensors(x):
    assert histogram_of(x) == slowly(x)


@pytest.mark.parametrize("shape", ["contiguous", "strided", "transposed", "expanded"])
def test_the_layout_in_memory_does_not_matter(shape):
    x = ranges(F16)[:4000].view(40, 100)
    x = {"contiguous": x, "strided": x[::3, ::7], "transposed": x.t(), "expanded": x[:1].expand(5, 100)}[shape]
    tally = Tally(4, compiled=False)
    tally.add(("", "", "tensor", "f16", 0), x)
    assert tally.table()[0] == slowly(x)


def test_f64_keeps_its_binades_within_those_of_f32():
    x = torch.tensor([0.0, 1.0, -2.0, 1e-300, 1e300, INF, NAN, 3e-39], dtype=torch.float64)
    h = histogram_of(x)
    assert (h.elements, h.zeros, h.infs, h.nans) == (8, 1, 1, 1) and h.first + len(h.counts) - 1 == 127
    assert h.counts[0 - h.first] == h.counts[1 - h.first] == 1


def test_many_sites_share_a_room_and_keep_their_order():
    tally = Tally(8, compiled=False)
    for i in range(300): tally.add(("", f"l{i % 150}", "t", "f32", 0), torch.full((i % 7,), 2.0 ** (i % 150 - 70)))
    table = tally.table()
    assert [h.layer for h in table] == [f"l{i}" for i in range(150)]
    for i, h in enumerate(table):
        assert h.elements == i % 7 + (i + 150) % 7 and (not h.elements or h.amax == 2.0 ** (i - 70))


def test_rows_of_a_flat_buffer_without_their_padding():
    tally, rows = Tally(16, compiled=False), torch.zeros(5, ROW)
    rows[:2] = 1.0
    rows[2].fill_(4.0), rows[3].fill_(4.0), rows[4, :10].fill_(4.0)
    sites = [tally.site(("", name, "w", "f32", 0)) for name in "ab"]
    tally.room.take_rows(sites, (2, 3), (0, 118)).copy_(rows)
    a, b = tally.table()
    assert (a.first, a.counts, a.zeros, b.first, b.counts, b.zeros) == (0, (256,), 0, 2, (266,), 0)


def test_a_table_is_a_sequence_that_packs_like_its_histograms(tmp_path):
    tally = Tally(compiled=False)
    for i, x in enumerate((ranges(F16), torch.zeros(4), ranges(F32), torch.zeros(0))):
        tally.add(("forward", f"l{i}", "output", Precision.of(x).tag, 7 * i), x)
    table = tally.table()
    assert len(table) == 4 and table[1:] == tuple(table)[1:] and table[-1].size == 21
    layout, body = pack_histograms(table)
    assert unpack_histograms(from_json(to_json(layout)), body) == tuple(table)
    assert pack_histograms(tuple(table))[1] == body
    with RunLog(tmp_path / "run.sqlite") as log: log(HistogramRecord(3, table))
    with RunReader(tmp_path / "run.sqlite") as reader: assert reader.histograms(3) == tuple(table)


def test_logs_written_before_samples_had_a_size_are_read():
    h = histogram_of(ranges(F16))
    layout, body = pack_histograms([h])
    assert unpack_histograms([layout[0][:4]], body) == (h,)


def test_nothing_counted_is_nothing():
    assert len(Tally(compiled=False).table()) == 0 and Counts.none(0).fields.shape == (0, 256)


# ---------------------------------------------------------------- what if
@pytest.mark.parametrize("p", (E4M3, E5M2, F16, BF16), ids=str)
@pytest.mark.parametrize("k", [-40, -20, -9, 0, 3, 12, 30])
def test_what_if_says_what_the_cast_does(p, k):
    g = torch.Generator().manual_seed(k + 99)
    x = torch.randn(3000, generator=g) * torch.exp2(torch.randint(-30, 10, (3000,), generator=g).float())
    told, scaled = what_if(histogram_of(x), p, 2.0**k), x.double() * 2.0**k
    y = round_in_register(scaled, p)
    share = lambda mask: mask.double().mean().item()  # noqa: E731
    assert told.flushed == pytest.approx(share((y == 0) & (x != 0)), abs=1e-9)
    small = (scaled.abs() < p.smallest_normal) & (y != 0)
    assert told.subnormal == pytest.approx(share(small), abs=1e-9)
    lost = share(~y.isfinite())
    assert told.overflow - 1e-9 <= lost <= told.overflow_most + 1e-9


@pytest.mark.parametrize("p", (E4M3, E5M2, F16, BF16), ids=str)
def test_headroom_is_how_often_it_can_be_doubled_and_halved(p):
    for numbers in ([1.0], [0.3, -1.99], [p.max], [p.smallest_normal * 1.5, 2.0]):
        x = torch.tensor(numbers)
        room = headroom(histogram_of(x), p)
        y = lambda k: round_in_register(x.double() * 2.0**k, p)  # noqa: E731
        assert y(room.up).isfinite().all() and not y(room.up + 1).isfinite().all()
        assert (y(-room.down) != 0).all()
        assert not (round_in_register(x.double().abs().min() * 2.0 ** (-room.down - 2), p) != 0)
    assert headroom(histogram_of(torch.zeros(3)), p).up == INF
    assert headroom(histogram_of(torch.tensor([INF])), p).up == -INF


def test_headroom_goes_with_the_scale():
    h = histogram_of(torch.tensor([1.0, 0.01]))
    assert headroom(h, F16, 2.0**5).up == headroom(h, F16).up - 5
    assert headroom(h, F16, 2.0**-5).down == headroom(h, F16).down - 5


def test_edges_of_overflow():
    assert not overflows(65519.0, F16) and overflows(65520.0, F16)
    assert not overflows(464.0, E4M3) and overflows(465.0, E4M3)
    assert what_if(histogram_of(torch.tensor([65519.0, 1.0])), F16).overflow_most == 0
    edge = what_if(histogram_of(torch.tensor([40000.0, 65520.0, 1.0])), F16)
    assert edge.overflow == pytest.approx(1 / 3) and edge.overflow_most == pytest.approx(2 / 3)


def test_moving_is_multiplying_and_merging_is_concatenating():
    x = ranges(F16)[:3000]
    h = histogram_of(x.float() * 2.0**-7)
    assert moved(histogram_of(x.float()), 2.0**-7) == h
    assert moved(h, 1.0) == h
    assert merged([histogram_of(x[:17]), histogram_of(x[17:])]) == histogram_of(x)
    with pytest.raises(ValueError, match="at least one"): merged([])
    for wrong in (0.0, -2.0, 3.0, NAN, INF):
        with pytest.raises(ValueError, match="powers of two"): binades_of(wrong)


# ---------------------------------------------------------------- samples
@pytest.mark.parametrize("shape", [(64, 64), (4, 100, 7), (33, 5), (8, 8), (5000,)])
def test_sixteen_samples_are_the_whole(shape):
    x = torch.arange(math.prod(shape)).view(shape)
    parts = [sampled(x, 16, k) for k in range(16)]
    if parts[0] is x: return  # few rows: taken whole
    assert torch.equal(torch.cat([p.reshape(-1) for p in parts]).sort().values, x.reshape(-1))
    assert torch.equal(sampled(x, 16, 35), sampled(x, 16, 3)) and torch.equal(sampled(x, 1, 5), x)


def test_f64_and_f32_agree():
    x = ranges(F32)[:500]
    assert histogram_of(x.double()).counts[-5:] == histogram_of(x).counts[-5:] and Precision.of(x.double()) is F64
