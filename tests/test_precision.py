"""Formats and exact narrowing, against references that share no code with them: tables of all numbers of a format
decoded by hand, rational arithmetic, numpy's float16 and ml_dtypes."""
import json
import math
import pickle
from bisect import bisect_right
from fractions import Fraction
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from f16lab.precision import (BF16, E4M3, E5M2, F16, F32, F64, Precision, WeightFormat, accumulator, bits_of, convert,
                              from_bits, parse_weight, promote)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "numbers.json").read_text())
EVERY = tuple(Precision)
NARROW = (F16, BF16, E4M3, E5M2)
WIDTHS = {F16: (5, 10), BF16: (8, 7), E4M3: (4, 3), E5M2: (5, 2)}  # exponent and mantissa bits, stated independently
INF = {F16: 0x7C00, BF16: 0x7F80, E5M2: 0x7C, E4M3: None}
NAN = {F16: 0x7E00, BF16: 0x7FC0, E5M2: 0x7E, E4M3: 0x7F}
NAN_F32 = (0x7F800001, 0xFF800001, 0x7FFF8C22, 0xFFFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F80FFFF, 0xFFBFFFFF)
REFERENCE = {F16: np.float16, BF16: ml_dtypes.bfloat16, E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
each_narrow = pytest.mark.parametrize("p", NARROW, ids=str)


# ---------------------------------------------------------------- an independent idea of a format
def decode(pattern: int, p: Precision) -> Fraction:
    """The value of a non-negative finite pattern, from the definition."""
    e, m = WIDTHS[p]
    field, mantissa, bias = pattern >> m, pattern & (1 << m) - 1, 2 ** (e - 1) - 1
    if field == 0:
        return Fraction(mantissa) * Fraction(2) ** (1 - bias - m)
    return (Fraction(mantissa, 1 << m) + 1) * Fraction(2) ** (field - bias)


def last_finite(p: Precision) -> int:
    return 0x7E if p is E4M3 else INF[p] - 1


TABLE = {p: [decode(i, p) for i in range(last_finite(p) + 2)] for p in NARROW}  # and the number that would come next
TABLE64 = {p: np.array([float(v) for v in TABLE[p]]) for p in NARROW}  # exact: all have few bits


def nearest(x: np.ndarray, p: Precision) -> np.ndarray:
    """Patterns of finite f64 `x` in p: search the table, compare with the midpoint (exact in f64), ties to even.

    The pattern after the last finite one is inf, in E4M3 NaN, so overflow needs no case of its own."""
    table, a = TABLE64[p], np.abs(x)
    i = np.minimum(np.searchsorted(table, a, "right") - 1, len(table) - 2)
    middle = (table[i] + table[i + 1]) / 2
    up = (a > middle) | ((a == middle) & (i % 2 == 1))
    return np.where(np.signbit(x), 1 << p.bits - 1, 0) + i + up


def nearest_fraction(x: Fraction, negative: bool, p: Precision) -> int:
    """The same in rational arithmetic, one number at a time."""
    table, a = TABLE[p], abs(x)
    i = min(bisect_right(table, a) - 1, len(table) - 2)
    twice = 2 * a - table[i] - table[i + 1]
    return (negative << p.bits - 1) + i + (twice > 0 or (twice == 0 and i % 2 == 1))


def f32(patterns) -> np.ndarray:
    return np.asarray(patterns, np.uint32).view(np.float32)


def around(values: np.ndarray, kind: type) -> np.ndarray:
    """`values` as `kind`, their two neighbours in `kind`, and all of that negated."""
    with np.errstate(over="ignore", under="ignore"):
        v = values.astype(kind)
        v = np.concatenate([v, np.nextafter(v, kind(np.inf)), np.nextafter(v, kind(-np.inf))])
    v = v[np.isfinite(v)]
    return np.concatenate([v, -v])


def critical(p: Precision, kind: type) -> np.ndarray:
    """All numbers of p, all midpoints between neighbours, the overflow edge, each with its neighbours in `kind`."""
    table = TABLE64[p]
    edges = np.array([p.max, table[-1], (p.max + table[-1]) / 2, 2 * p.max, 1e38, 0.0])
    return around(np.concatenate([table[:-1], (table[:-1] + table[1:]) / 2, edges]), kind)


def window() -> np.ndarray:
    """A dense window 2^-60 … 2^-24, and random patterns from everywhere."""
    rng = np.random.default_rng(0)
    fine = (0x21800000 + rng.integers(0, 37 << 23, 200_000)).astype(np.uint32)
    regular = np.arange(0x21800000, 0x21800000 + (37 << 23), 1 << 13, dtype=np.uint32)
    everywhere = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    values = f32(np.concatenate([fine, regular, regular + 1, everywhere]))
    values = values[np.isfinite(values)]
    return np.concatenate([values, -values])


def same(y: torch.Tensor, patterns: np.ndarray, x) -> None:
    """Fails with the first differing element."""
    got = bits_of(y).numpy()
    wrong = np.flatnonzero(got != patterns)
    assert not len(wrong), [(repr(x[i]), hex(got[i]), hex(patterns[i])) for i in wrong[:5]] + [len(wrong)]


# ---------------------------------------------------------------- the formats
@pytest.mark.parametrize("p,reference", [*REFERENCE.items(), (F32, np.float32), (F64, np.float64)])
def test_limits_are_those_of_numpy_ml_dtypes_and_torch(p, reference):
    info = ml_dtypes.finfo(reference)
    assert p.max == float(info.max) == torch.finfo(p.dtype).max
    assert p.smallest_normal == float(info.smallest_normal) == torch.finfo(p.dtype).smallest_normal
    assert p.smallest_subnormal == float(info.smallest_subnormal)
    assert p.ulp(1.0) == float(info.eps) == torch.finfo(p.dtype).eps
    assert (p.bits, p.exponent_bits, p.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    assert p.bytes == np.dtype(reference).itemsize == p.dtype.itemsize
    assert p.emin == info.minexp
    assert 2.0**p.emax <= p.max and p.max / 2 < 2.0**p.emax


def test_tags_are_the_values_and_survive_pickling():
    assert [p.tag for p in Precision] == ["e4m3", "e5m2", "f16", "bf16", "f32", "f64"]
    for p in Precision:
        assert str(p) == p.tag == p.value == f"{p}" and Precision.parse(p.tag) is Precision.parse(p) is p
        assert pickle.loads(pickle.dumps(p)) is p and Precision(p.tag) is p


@each_narrow
def test_ulp_is_the_distance_to_the_next_number(p):
    table = TABLE64[p]
    steps = table[1:] - table[:-1]
    assert [p.ulp(v) for v in table[:-1:7]] == steps[::7].tolist()
    assert p.ulp(torch.from_numpy(-table[:-1])).tolist() == steps.tolist()
    assert p.ulp(torch.from_numpy(table[:-1]).to(F32.dtype)).tolist() == steps.tolist()


def test_ulp_of_wide_formats_and_of_odd_values():
    for x in (0.0, -1.0, 3.0, 1e-310, 5e-324, 1e300):
        assert F64.ulp(x) == math.ulp(x) and F64.ulp(torch.tensor(x, dtype=torch.float64)).item() == math.ulp(x)
    for x in (0.0, 1.0, 1e-40, 3e38):
        assert F32.ulp(x) == F32.ulp(torch.tensor(x)).item() == np.spacing(np.float32(x))
    assert all(math.isnan(p.ulp(x)) for p in Precision for x in (math.nan, math.inf))
    assert torch.isnan(F16.ulp(torch.tensor([math.nan, -math.inf]))).all()
    assert F16.ulp(1e30) == F16.ulp(65504.0) == F16.ulp(torch.tensor(1e30)).item() == 32.0
    assert BF16.ulp(convert(torch.tensor(1.0), F16)).item() == 2.0**-7


@pytest.mark.parametrize("row", GOLDEN["promote"], ids=lambda row: "-".join(row["operands"]))
def test_promotion(row):
    operands = [Precision.parse(tag) for tag in row["operands"]]
    assert promote(*operands).tag == promote(*reversed(operands)).tag == row["result"]


def test_promotion_holds_every_number_of_both():
    for p, q in product(NARROW, NARROW):
        r = promote(p, q)
        for s in (p, q):
            x = from_bits(torch.arange(1 << s.bits), s)
            wide = x.to(torch.float64)
            y = convert(x, r).to(torch.float64)
            assert torch.equal(y[~wide.isnan()], wide[~wide.isnan()]), (p, q, r)
    assert [promote(p) for p in Precision] == list(Precision)
    assert [accumulator(p).tag for p in Precision] == ["f32"] * 5 + ["f64"]


def test_ternary_is_no_precision():
    t = parse_weight("t1_58")
    assert t is WeightFormat.T1_58 is parse_weight(t) and (t.tag, str(t), t.storage) == ("t1_58", "t1_58", F16)
    assert [parse_weight(p.tag) for p in Precision] == list(Precision) == [parse_weight(p) for p in Precision]
    number_needed = (lambda: Precision.parse("t1_58"), lambda: Precision.parse(t), lambda: convert(torch.ones(2), t),
                     lambda: promote(t), lambda: promote(t, t), lambda: promote(F32, t), lambda: accumulator(t))
    for use in (*number_needed, lambda: t.dtype):
        with pytest.raises(ValueError, match="t1_58 is not a storage type"):
            use()


@pytest.mark.parametrize("use,message", [
    (lambda: Precision.parse("fp16"), "unknown precision 'fp16'; give one of e4m3, e5m2, f16, bf16, f32, f64"),
    (lambda: Precision.parse(None), "unknown precision None"),
    (lambda: parse_weight("t2"), "unknown precision 't2'"),
    (lambda: Precision.of(torch.int32), "torch.int32 is no precision"),
    (lambda: Precision.of(torch.zeros(1, dtype=torch.bool)), "torch.bool is no precision"),
    (lambda: convert(torch.zeros(1, dtype=torch.complex64), F16), "torch.complex64 is no precision"),
    (lambda: promote(), "at least one precision"),
    (lambda: from_bits([0x100], E4M3), "a pattern of e4m3 is an integer in"),
    (lambda: from_bits(torch.tensor([-1]), F16), "a pattern of f16 is an integer in"),
])
def test_errors_say_what_is_allowed(use, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        use()


# ---------------------------------------------------------------- bits
@pytest.mark.parametrize("p", Precision, ids=str)
def test_bits_are_those_of_the_format(p):
    patterns = [0, 1, (1 << p.bits - 1) - 1, 1 << p.bits - 1, (1 << p.bits) - 1]
    x = from_bits(patterns, p)
    assert x.dtype is p.dtype
    assert [b % (1 << p.bits) for b in bits_of(x).tolist()] == patterns
    assert torch.equal(bits_of(from_bits(bits_of(x), p)), bits_of(x))
    assert from_bits(1, p).item() == p.smallest_subnormal and from_bits([[0, 1]], p).shape == (1, 2)


@each_narrow
def test_decoding(p):
    patterns = torch.arange(last_finite(p) + 1)
    assert convert(from_bits(patterns, p), F64).tolist() == TABLE64[p][:-1].tolist()
    assert convert(from_bits(patterns + (1 << p.bits - 1), p), F32).tolist() == (-TABLE64[p][:-1]).tolist()


@each_narrow
@pytest.mark.parametrize("wide", (F32, F64), ids=str)
def test_all_patterns_survive_the_way_through_a_wider_format(p, wide):
    every = torch.arange(1 << p.bits)
    x = from_bits(every, p)
    is_nan = x.to(torch.float64).isnan()
    expected = torch.where(is_nan, NAN[p] | (every & 1 << p.bits - 1), every)
    assert torch.equal(bits_of(convert(convert(x, wide), p)), expected)
    assert is_nan.sum() == {F16: 2046, BF16: 254, E5M2: 6, E4M3: 2}[p]
    assert convert(x, p) is x


# ---------------------------------------------------------------- narrowing
def test_golden_narrowing():
    for row in GOLDEN["narrow"]:
        x = from_bits([int(row["bits"], 16)], Precision.parse(row["source"]))
        assert bits_of(convert(x, Precision.parse(row["format"]))).item() == int(row["result"], 16), row
    assert {p.tag: f"{NAN[p]:X}" for p in NARROW} == {k: v for k, v in GOLDEN["nan"].items() if k != "note"}


@each_narrow
@pytest.mark.parametrize("kind", (np.float32, np.float64))
def test_every_number_and_every_midpoint_with_their_neighbours(p, kind):
    x = critical(p, kind)
    assert len(x) >= 6 * len(TABLE[p])
    same(convert(torch.from_numpy(x), p), nearest(x.astype(np.float64), p), x)


@each_narrow
@pytest.mark.parametrize("kind", (np.float32, np.float64))
def test_dense_window_and_random_patterns(p, kind):
    x = window().astype(kind)
    same(convert(torch.from_numpy(x), p), nearest(x.astype(np.float64), p), x)


@each_narrow
def test_rational_arithmetic_agrees(p):
    """The table search above trusts f64 for midpoints; this one trusts nothing."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.choice(critical(p, np.float32), 3000), rng.choice(window(), 2000)])
    expected = [nearest_fraction(Fraction(float(v)), math.copysign(1, v) < 0, p) for v in x]
    same(convert(torch.from_numpy(x), p), np.array(expected), x)
    wide = rng.choice(critical(p, np.float64), 3000)
    expected = [nearest_fraction(Fraction(v), math.copysign(1, v) < 0, p) for v in wide.tolist()]
    same(convert(torch.from_numpy(wide), p), np.array(expected), wide)


@pytest.mark.parametrize("p,reference", REFERENCE.items())
def test_numpy_and_ml_dtypes_agree_from_f32(p, reference):
    """They differ in one place only: numpy keeps the payload of a NaN in float16 (7F800001 → 7C01, ours 7E00)."""
    nans = f32(NAN_F32)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([critical(p, np.float32), window(), f32([0x7F800000, 0xFF800000])])
        theirs = x.astype(reference).view(f"u{p.bytes}").astype(np.int64)
        their_nans = nans.astype(reference).view(f"u{p.bytes}").astype(np.int64)
    same(convert(torch.from_numpy(x), p), theirs, x)
    ours = [NAN[p] | (b >> 31) << p.bits - 1 for b in NAN_F32]
    assert bits_of(convert(torch.from_numpy(nans), p)).tolist() == ours
    if p is F16:
        assert their_nans[:2].tolist() == [0x7C01, 0xFC01] and np.isnan(nans.astype(reference)).all()
    else:
        assert their_nans.tolist() == ours


def test_numpy_agrees_from_f64_and_ml_dtypes_rounds_twice():
    x = critical(F16, np.float64)
    with np.errstate(over="ignore"):
        same(convert(torch.from_numpy(x), F16), x.astype(np.float16).view(np.uint16).astype(np.int64), x)
    above_a_tie = np.array([1 + 2.0**-8 + 2.0**-40])
    assert above_a_tie.astype(ml_dtypes.bfloat16).astype(float) == 1.0  # by way of f32
    assert convert(torch.from_numpy(above_a_tie), BF16).item() == 1 + 2.0**-7


@each_narrow
def test_f64_rounds_once(p):
    """Just beside each midpoint, closer to it than f32 can tell: through f32 every second one would go wrong."""
    table = TABLE64[p]
    middle = (table[:-1] + table[1:]) / 2
    x = np.concatenate([middle * (1 + 2.0**-45), middle * (1 - 2.0**-45)])
    x = x[np.abs(x) >= 2.0**-140]
    expected = nearest(x, p)
    same(convert(torch.from_numpy(x), p), expected, x)
    twice = convert(convert(torch.from_numpy(x), F32), p)
    assert 0.4 < (bits_of(twice).numpy() != expected).mean() < 0.6


def test_f64_to_f32():
    rng = np.random.default_rng(2)
    v = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    v = v[np.isfinite(v)].astype(np.float64)
    ends = np.array([3.4028235677973366e38, 1e300, -0.0, 5e-324])
    x = np.concatenate([ends, *(v * (1 + k * 2.0**-25) for k in (-2, -1, 0, 1, 2))])
    with np.errstate(over="ignore"):
        same(convert(torch.from_numpy(x), F32), x.astype(np.float32).view(np.uint32).astype(np.int64), x)
    nans = from_bits([0x7FF0000000000001, 0xFFF8000000000123, 0xFFFFFFFFFFFFFFFF], F64)
    for p, nan in {**NAN, F32: 0x7FC00000}.items():
        sign = 1 << p.bits - 1
        assert bits_of(convert(nans, p)).tolist() == [nan, nan | sign, nan | sign]


@pytest.mark.parametrize("source,p", [(s, p) for s, p in product(NARROW, NARROW) if s is not p],
                         ids=lambda p: str(p))
@pytest.mark.parametrize("saturate", (False, True), ids=("overflow", "saturate"))
def test_every_pattern_of_every_small_format_into_every_other(source, p, saturate):
    every = np.arange(1 << source.bits)
    x = from_bits(torch.from_numpy(every), source)
    value = x.to(torch.float64).numpy()
    sign = every >> source.bits - 1 << p.bits - 1
    with np.errstate(invalid="ignore"):
        finite = np.clip(value, -p.max, p.max) if saturate else value
    infinite = NAN[p] if INF[p] is None else INF[p]
    expected = np.where(np.isfinite(value), nearest(np.where(np.isfinite(value), finite, 0.0), p), infinite | sign)
    expected = np.where(np.isnan(value), NAN[p] | sign, expected)
    y = convert(x, p, saturate=saturate)
    if p.holds(source):  # widening is exact; a NaN stays one, its payload is not looked at
        assert np.array_equal(np.isnan(y.to(torch.float64).numpy()), np.isnan(value))
        keep = ~np.isnan(value)
        same(y[torch.from_numpy(keep)], expected[keep], value[keep])
    else:
        same(y, expected, value)


@each_narrow
@pytest.mark.parametrize("kind", (torch.float32, torch.float64))
def test_saturation_clamps_finite_overflow_only(p, kind):
    half = TABLE64[p][-1] / 2 + p.max / 2
    x = torch.tensor([p.max, half, F32.max, 3.4e38, -F32.max, math.inf, -math.inf, math.nan, 1.0, -0.0], dtype=kind)
    y = bits_of(convert(x, p, saturate=True)).tolist()
    sign, top = 1 << p.bits - 1, last_finite(p)
    infinite = INF[p] or NAN[p]
    one = bits_of(convert(torch.ones(1), p)).item()
    assert y == [top] * 4 + [sign | top, infinite, sign | infinite, NAN[p], one, sign]
    assert bits_of(convert(x[2:5], p)).tolist() == [infinite, infinite, sign | infinite]


# ---------------------------------------------------------------- failures of other projects
@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_a_nan_never_becomes_inf_or_zero(p):
    """Cutting off the low half gives 7F80 and FF80, adding the rounding constant first 8000 and 0000."""
    y = convert(from_bits([0x7F800001, 0xFF800001, 0x7FFF8C22, 0xFFFFFFFF, 0x7FC00000], F32), p)
    assert [f"{b:04X}" for b in bits_of(y).tolist()] == {F16: ["7E00", "FE00", "7E00", "FE00", "7E00"],
                                                         BF16: ["7FC0", "FFC0", "7FC0", "FFC0", "7FC0"]}[p]


def test_one_nan_among_many_is_found_and_infs_of_both_signs_do_not_confuse_the_search():
    x = torch.full((5000,), 1.0)
    x[[7, 11]] = torch.tensor([math.inf, -math.inf])
    assert bits_of(convert(x, BF16)[[6, 7, 11]]).tolist() == [0x3F80, 0x7F80, 0xFF80]
    x[4999] = from_bits(0xFF800001, F32)
    assert bits_of(convert(x, BF16)[[6, 7, 11, 4999]]).tolist() == [0x3F80, 0x7F80, 0xFF80, 0xFFC0]
    assert convert(torch.full((4,), 3e38), F64).sum().item() > 1e39  # a sum that overflows is no NaN either
    assert bits_of(convert(torch.full((4,), 3e38), F16)).tolist() == [0x7C00] * 4


def test_subnormals_and_the_sign_of_zero_survive():
    steps = torch.tensor([0.5, 0.50001, 1, 1.5, 2.5, 3.5, 1023.5], dtype=torch.float64) * 2.0**-24
    for x in (steps, steps.to(torch.float32)):
        assert [f"{b:04X}" for b in bits_of(convert(x, F16)).tolist()] == "0000 0001 0001 0002 0002 0004 0400".split()
    tiny = torch.tensor([-0.0, -(2.0**-25), -1e-10, 1.14e-12, 8.44e-11])
    assert [f"{b:04X}" for b in bits_of(convert(tiny, F16)).tolist()] == "8000 8000 8000 0000 0000".split()
    assert bits_of(convert(from_bits([0x8000, 0x8001, 0x18000], F32), BF16)).tolist() == [0, 1, 2]


def test_ties_go_to_even():
    ties = from_bits([0x34200000, 0x34600000, 0x40001000, 0x40003000, 0x3F801000, 0x3F803000], F32)
    assert [f"{b:04X}" for b in bits_of(convert(ties, F16)).tolist()] == "0002 0004 4000 4002 3C00 3C02".split()
    ties = from_bits([0x3F808000, 0x3F818000, 0x3F808001], F32)
    assert [f"{b:04X}" for b in bits_of(convert(ties, BF16)).tolist()] == "3F80 3F82 3F81".split()
    assert convert(torch.tensor(0.2691408770292272), BF16).item() == 0.26953125


# ---------------------------------------------------------------- as a tensor function
def test_shape_layout_and_gradient():
    x = torch.randn(4, 6).t()
    assert torch.equal(convert(x, F16), convert(x.contiguous(), F16)) and convert(x, E4M3).shape == (6, 4)
    assert convert(torch.zeros(0, 3), BF16).shape == (0, 3) and convert(torch.tensor(1.0), E5M2).shape == ()
    w = torch.ones(3, requires_grad=True)
    assert not any(convert(w, p).requires_grad for p in Precision if p is not F32) and convert(w, F32) is w
    before = x.clone()
    convert(x, F16, saturate=True)
    assert torch.equal(x, before)


def everything(source: Precision) -> torch.Tensor:
    """Numbers of `source` that reach each branch of every conversion."""
    ends = (0, 0x80000000, 0x7F800000, 0xFF800000, 0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 0x33000001)
    special = from_bits([*NAN_F32, *ends], F32)
    scales = torch.tensor([1e-40, 1e-8, 1e-5, 1e-2, 1.0, 1e3, 1e5, 1e30])[:, None]
    ordinary = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * scales
    return convert(torch.cat([special, ordinary.view(-1)]), source)


@pytest.mark.parametrize("source", Precision, ids=str)
def test_compiled_bits_are_the_eager_bits(source):
    x = everything(source)

    def all_targets(x):
        return [convert(x, p, saturate=s) for p in EVERY for s in (False, True)]

    torch._dynamo.reset()
    for a, b in zip(torch.compile(all_targets, fullgraph=True, backend="aot_eager")(x), all_targets(x)):
        assert a.dtype is b.dtype and torch.equal(bits_of(a), bits_of(b))


def test_attributes_and_promotion_are_traced_without_a_break():
    def f(x, p):
        q = promote(Precision.of(x), p, Precision.parse("bf16"))
        limits = q.max / 2 + q.smallest_normal + q.smallest_subnormal + q.bits + q.bytes + q.emin + q.emax + q.ulp(1.0)
        widths = q.exponent_bits * q.mantissa_bits + len(q.tag) + len(str(q))
        if q.has_inf and q is F32 and p is not q and accumulator(p).holds(p) and q.dtype is torch.float32:
            return convert(x, q) * widths + limits
        return x

    torch._dynamo.reset()
    x = torch.ones(3, dtype=torch.float16)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for p in (F16, BF16, E5M2):
        assert torch.equal(compiled(x, p), f(x, p)) and f(x, p).dtype is torch.float32


def test_a_precision_that_is_an_argument_leaves_no_numbers_in_the_graph():
    """Limits that became inputs of the graph would cost a host read for each, and a generic kernel."""
    graphs = []

    def keep(graph, _):
        graphs.append([node.name for node in graph.graph.nodes if node.op == "placeholder"])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(convert, fullgraph=True, backend=keep)
    x = torch.ones(3, dtype=torch.float64)
    for p in EVERY[:-1]:
        assert compiled(x, p, True).dtype is p.dtype
    assert graphs == [["l_x_"]] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("source", Precision, ids=str)
def test_cuda_bits_are_the_cpu_bits(source):
    x = everything(source)
    if source in NARROW:
        x = from_bits(torch.arange(1 << source.bits), source)
    if source in (F32, F64):
        numbers = [critical(p, np.float32 if source is F32 else np.float64) for p in NARROW]
        x = torch.cat([x, torch.from_numpy(np.concatenate(numbers))])
    for p in Precision:
        for saturate in (False, True):
            here, there = convert(x, p, saturate), convert(x.cuda(), p, saturate).cpu()
            if p.holds(source) and p is not source:  # a widened NaN keeps whatever payload the device gives it
                nan = here.to(torch.float64).isnan()
                assert torch.equal(nan, there.to(torch.float64).isnan())
                here, there = here[~nan], there[~nan]
            assert torch.equal(bits_of(here), bits_of(there)), (source, p, saturate)
    assert torch.equal(F16.ulp(x.cuda()).cpu().nan_to_num(), F16.ulp(x).nan_to_num())
