"""Keyed noise, stochastic rounding, Kahan compensation: golden and llm.c's vectors, rational arithmetic, statistics."""
import json
import math
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch

from f16lab import rounding
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, Precision, bits_of, convert, from_bits
from f16lab.rounding import (CHUNK, Key, Purpose, convert_stochastic, kahan_add, kahan_scale, llmc_key, noise,
                             noise_2d, noise_blocks, round_stochastic, squirrel_noise5, tensor_id, tensor_ids,
                             two_sum, write_back)

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "numbers.json").read_text())
LLMC = json.loads((FOLDER / "llmc_rounding.json").read_text())
NARROW = (F16, BF16, E4M3, E5M2)
NAN = {F16: 0x7E00, BF16: 0x7FC0, E5M2: 0x7E, E4M3: 0x7F}
KEY = Key.of(42, 1, Purpose.WRITE_BACK, "wte.weight")
each_narrow = pytest.mark.parametrize("p", NARROW, ids=str)


def unsigned(n: torch.Tensor) -> list[int]:
    return (n.to(torch.int64) & 0xFFFFFFFF).tolist()


def int32(patterns) -> torch.Tensor:
    return torch.as_tensor(patterns, dtype=torch.int64).to(torch.int32)


def f32(patterns) -> torch.Tensor:
    return from_bits(torch.as_tensor(patterns, dtype=torch.int64), F32)


def random_bits(n: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2**32, (n,), generator=torch.Generator().manual_seed(seed))


def special(p: Precision) -> list[float]:
    """Values at which the rule changes: ends of the range, the first subnormals, zeros, inf, NaN."""
    step, small = p.ulp(p.max), p.smallest_subnormal
    ends = [p.max, *(p.max + step * k for k in (0.5, 0.999, 1, 1.01)), 2 * p.max, 3.4e38, math.inf]
    low = [small * k for k in (0.3, 0.5, 1, 1.5, 2.0**-31, 2.0**-32, 2.0**-32 * 1.01, 2.0**-33)]
    normal = [p.smallest_normal * k for k in (1, 1 - 2.0**-12, 1 + 2.0**-12, 1 - 2.0**-24, 1 + 2.0**-23)]
    values = [*ends, *low, *normal, 1.0, 1 + 2.0**-23, 2 - 2.0**-23, 2.0**-149, 0.0, math.nan]
    return values + [-v for v in values]


def inputs(p: Precision, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """f32 values (every special one with several noises, the range of p, all patterns) and int32 noise for each."""
    noises = [0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFF, 0xFFFE, 0x7FFF, 0xFFFFE000, 0xFFF80000, 0x1FFF]
    pairs = list(product(special(p), noises))
    exponent = random_bits(n, seed) % (min(p.emax, 126) - p.emin + p.mantissa_bits + 6) + p.emin - p.mantissa_bits - 4
    mantissa = random_bits(n, seed + 1) % (1 << 23)
    field = (exponent + 127).clamp(0, 254)
    ranged = f32((random_bits(n, seed + 2) % 2 << 31) | field << 23 | mantissa)
    x = torch.cat([torch.tensor([v for v, _ in pairs]), ranged, f32(random_bits(n, seed + 3))])
    return x, torch.cat([int32([k for _, k in pairs]), int32(random_bits(2 * n, seed + 4))])


def rule(x: float, negative: bool, p: Precision, n: int) -> int:
    """The pattern that the definition gives, in rational arithmetic."""
    sign = negative << p.bits - 1
    if math.isnan(x):
        return NAN[p] | sign
    infinite = sign | (0x7F if p is E4M3 else ((1 << p.exponent_bits) - 1) << p.mantissa_bits)
    if math.isinf(x):
        return infinite
    a = abs(Fraction(x))
    exponent = max(math.frexp(x)[1] - 1 if x else -10**6, p.emin)
    step = Fraction(2) ** (exponent - p.mantissa_bits)
    q = a // step
    width = 16 if p is BF16 else 32
    fraction = (a / step - q) * 2**width // 1
    y = (q + (fraction > n % 2**width)) * step
    if a >= Fraction(p.max) + Fraction(p.ulp(p.max)):
        return infinite
    return sign | pattern_of(min(y, Fraction(p.max)), p)


def pattern_of(y: Fraction, p: Precision) -> int:
    """The pattern of a non-negative number of p."""
    field = max(math.frexp(float(y))[1] - 1 - p.emin, 0) if y else 0
    whole = y / Fraction(2) ** (p.emin + field - p.mantissa_bits)
    assert whole.denominator == 1
    return (field << p.mantissa_bits) + int(whole)  # the leading one of a normal number adds one to the field


# ---------------------------------------------------------------- the hash and the keys
def test_hash_vectors():
    for row in LLMC["squirrel_noise5"]:
        position, seed, expected = row["position"], row["seed"], row["noise"]
        assert squirrel_noise5(position, seed) == expected
        as_tensors = [squirrel_noise5(torch.tensor([position]), seed), squirrel_noise5(position, torch.tensor([seed])),
                      squirrel_noise5(int32([position]), int32([seed]))]
        assert all(t.dtype is torch.int32 and unsigned(t) == [expected] for t in as_tensors)
    assert squirrel_noise5(2**32 + 5, -1) == squirrel_noise5(5, 2**32 - 1)
    grid = squirrel_noise5(torch.arange(3)[:, None], torch.arange(4)[None])
    assert [unsigned(row) for row in grid] == [[squirrel_noise5(i, j) for j in range(4)] for i in range(3)]


def test_hash_leaves_its_arguments_alone():
    position, seed = torch.arange(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    squirrel_noise5(position, seed)
    assert position.tolist() == list(range(5)) and seed.tolist() == [0] * 5


def test_llmc_two_dimensional_noise():
    for row in LLMC["get_2d_noise_uint"]:
        assert noise_2d(row["x"], row["y"], row["seed"]) == row["noise"]
        assert unsigned(noise_2d(torch.tensor([row["x"]]), torch.tensor([row["y"]]), row["seed"])) == [row["noise"]]


def test_golden_keys():
    for row in GOLDEN["key"]:
        key = Key.of(row["seed"], row["step"], Purpose(row["purpose"]), row["tensor"], row["micro"])
        assert key == Key(row["seed"], row["step"], row["purpose"], row["tensor_id"], row["micro"])
        assert unsigned(noise(key, row["index"], 1)) == [row["noise"]]
        block, place = row["index"] // 1024, row["index"] % 1024
        blocks = noise_blocks(torch.tensor([key.a]), torch.tensor([block * 1024]))
        assert unsigned(blocks[0])[place] == row["noise"]


def test_tensor_ids():
    assert [tensor_id(s) for s in ("", "a", "foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]  # published vectors
    assert tensor_ids(iter(["w", "b", "w"])) == {"w": tensor_id("w"), "b": tensor_id("b")}
    with pytest.raises(ValueError, match="'declinate' and 'macallums' have the same id"):
        tensor_ids(["x", "declinate", "y", "macallums"])


def test_purposes_never_change():
    assert [p.name for p in sorted(Purpose)] == "WRITE_BACK GRADIENT M V DROPOUT INIT DATA USER".split()
    assert [p.value for p in sorted(Purpose)] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("change,message", [
    ({"seed": -1}, r"Key.seed must be an integer in \[0, 2\^32\), not -1"),
    ({"seed": 2**32}, "Key.seed"), ({"seed": 1.0}, "Key.seed"), ({"seed": "1"}, "Key.seed"),
    ({"step": 2**32}, "Key.step"), ({"step": -1}, "Key.step"), ({"tensor_id": 2**32}, "Key.tensor_id"),
    ({"micro": 2**16}, r"Key.micro must be an integer in \[0, 2\^16\)"), ({"micro": -1}, "Key.micro"),
    ({"purpose": 0}, "Key.purpose must be one of WRITE_BACK, GRADIENT"), ({"purpose": 9}, "Key.purpose"),
])
def test_keys_outside_their_range_are_refused(change, message):
    good = dict(seed=2**32 - 1, step=2**32 - 1, purpose=Purpose.USER, tensor_id=2**32 - 1, micro=2**16 - 1)
    assert 0 <= Key(**good).a < 2**32
    with pytest.raises(ValueError, match=message):
        Key(**{**good, **change})


# ---------------------------------------------------------------- noise
def reference_noise(key: Key, index: int) -> int:
    kb = squirrel_noise5(index // 2**32, key.a)
    return squirrel_noise5(squirrel_noise5(index % 2**32, key.a), kb)


@pytest.mark.parametrize("start", (0, 12345, CHUNK - 3, 2**31 - 4, 2**32 - 5, 2**32, 5 * 2**32 - 2, 2**62 + 17))
def test_noise_is_a_function_of_the_index(start):
    n = noise(KEY, start, 9)
    assert n.dtype is torch.int32 and unsigned(n) == [reference_noise(KEY, start + i) for i in range(9)]


def test_noise_of_any_part_is_the_part_of_the_noise():
    size = 2 * CHUNK + 77
    for offset in (0, 2**32 - size // 2):
        whole = noise(KEY, offset, size)
        for start, n in ((0, 1), (1, 5), (CHUNK - 2, 4), (1000, CHUNK), (size - 1, 1), (3, 0)):
            assert torch.equal(noise(KEY, offset + start, n), whole[start : start + n])


@pytest.mark.parametrize("start,n", ((-1, 3), (0, -1), (2**63, 1), (2**63 - 1, 2)))
def test_noise_outside_the_index_range_is_refused(start, n):
    with pytest.raises(ValueError, match=r"indices in \[0, 2\^63\)"):
        noise(KEY, start, n)


def test_blocks_are_the_noise_of_their_tensors():
    keys = [KEY, Key.of(0, 0, Purpose.V, "b"), Key.of(2**32 - 1, 7, Purpose.M, "c", 3)]
    firsts = [0, 1024, 2**31, 2**32 - 1024, 2**32, 3 * 2**32 + 2048]
    plan = [(k, f) for k in keys for f in firsts] * 12  # more than one chunk of rows
    ka, first = torch.tensor([k.a for k, _ in plan]), torch.tensor([f for _, f in plan])
    blocks = noise_blocks(ka, first)
    assert blocks.dtype is torch.int32 and torch.equal(blocks, noise_blocks(ka.to(torch.int32), first))
    assert torch.equal(blocks, torch.stack([noise(k, f, 1024) for k, f in plan]))
    assert noise_blocks(ka[:0], first[:0]).shape == (0, 1024)
    with pytest.raises(ValueError, match="multiples of 1024"):
        noise_blocks(ka[:2], torch.tensor([0, 1000]))


def test_no_sequence_is_consumed():
    before = torch.get_rng_state()
    convert_stochastic(torch.randn(100, generator=torch.Generator().manual_seed(0)), F16, KEY)
    noise_blocks(torch.tensor([1]), torch.tensor([0]))
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- independence
def rounded_up(key: Key, n: int = 65536, p: Precision = BF16) -> torch.Tensor:
    """Which of n elements, all exactly half-way between two neighbours, went up."""
    half_way = torch.full((n,), 1 + p.ulp(1.0) / 2)
    return convert_stochastic(half_way, p, key) > 1


OTHERS = {
    "tensor": Key.of(42, 1, Purpose.WRITE_BACK, "wpe.weight"),
    "another tensor": Key.of(42, 1, Purpose.WRITE_BACK, "blocks.0.ln1.weight"),
    "next tensor id": Key(42, 1, Purpose.WRITE_BACK, tensor_id("wte.weight") + 1),
    "step": Key.of(42, 2, Purpose.WRITE_BACK, "wte.weight"),
    "far step": Key.of(42, 100_000, Purpose.WRITE_BACK, "wte.weight"),
    "seed": Key.of(43, 1, Purpose.WRITE_BACK, "wte.weight"),
    "seed and step swapped": Key.of(1, 42, Purpose.WRITE_BACK, "wte.weight"),
    "purpose": Key.of(42, 1, Purpose.GRADIENT, "wte.weight"),
    "m": Key.of(42, 1, Purpose.M, "wte.weight"),
    "v": Key.of(42, 1, Purpose.V, "wte.weight"),
    "micro-step": Key.of(42, 1, Purpose.WRITE_BACK, "wte.weight", 1),
    "far micro-step": Key.of(42, 1, Purpose.WRITE_BACK, "wte.weight", 65535),
}


@pytest.mark.parametrize("p", (BF16, F16), ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_two_keys_share_no_coins(name, p):
    a, b = rounded_up(KEY, p=p), rounded_up(OTHERS[name], p=p)
    for up in (a, b):
        assert abs(up.double().mean().item() - 0.5) < 0.01
    assert abs((a == b).double().mean().item() - 0.5) < 0.01


@pytest.mark.parametrize("p", (BF16, F16), ids=str)
@pytest.mark.parametrize("stride", (1, 2, 3, 32, 256, 512, 768, 1024, 4096))
def test_neighbours_rows_and_blocks_share_no_coins(stride, p):
    up = rounded_up(KEY, 65536 + stride, p)
    assert abs((up[stride:] == up[:-stride]).double().mean().item() - 0.5) < 0.01


def test_the_upper_half_of_an_index_counts():
    a = noise(KEY, 0, 65536)
    for high in (1, 2, 2**31 - 1):
        b = noise(KEY, high << 32, 65536)
        for bit in (0, 15, 31):
            assert abs(((a ^ b) >> bit & 1).double().mean().item() - 0.5) < 0.01


def test_streams_are_no_windows_of_one_another():
    """With a single hash, b would be a from the element `shift` on."""
    a, b = KEY, OTHERS["tensor"]
    shift = (b.a - a.a) * pow(0xD2A80A3F, -1, 2**32) % 2**32
    assert squirrel_noise5(shift, a.a) == squirrel_noise5(0, b.a)
    x, y = noise(a, shift, 65536), noise(b, 0, 65536)
    assert not (x == y).any() and abs(((x ^ y) & 1).double().mean().item() - 0.5) < 0.01


def test_every_bit_is_even_and_the_values_are_spread():
    n = noise(KEY, 0, 1 << 20).to(torch.int64) & 0xFFFFFFFF
    for bit in range(32):
        assert abs((n >> bit & 1).double().mean().item() - 0.5) < 0.0025  # five standard errors
    for shift in (0, 13, 24):  # chi-square of 256 cells, mean 255, standard deviation 22.6
        counts = torch.bincount(n >> shift & 255, minlength=256).double()
        chi2 = ((counts - 4096) ** 2 / 4096).sum().item()
        assert 255 - 5 * 22.6 < chi2 < 255 + 5 * 22.6
    pairs = torch.bincount((n[:-1] >> 28) * 16 + (n[1:] >> 28), minlength=256).double()
    assert abs(((pairs - 4096) ** 2 / 4096).sum().item() - 255) < 5 * 22.6


# ---------------------------------------------------------------- the rule
@each_narrow
def test_golden_rounding(p):
    rows = [row for row in GOLDEN["stochastic_round"] if row["format"] == p.tag]
    assert len(rows) >= 83
    x, n = f32([int(row["f32"], 16) for row in rows]), int32([int(row["noise"], 16) for row in rows])
    expected = [int(row["bits"], 16) for row in rows]
    assert bits_of(round_stochastic(x, p, n)).tolist() == expected
    assert [bits_of(round_stochastic(x[i], p, n[i])).item() for i in range(len(x))] == expected


@each_narrow
def test_rational_arithmetic_gives_the_same_bits(p):
    x, n = inputs(p, 10_000, seed=10)
    negative, values = (bits_of(x) >> 31).tolist(), x.tolist()
    expected = [rule(v, s, p, k) for v, s, k in zip(values, negative, unsigned(n))]
    got = bits_of(round_stochastic(x, p, n)).tolist()
    wrong = [(v, hex(k), hex(g), hex(e)) for v, k, g, e in zip(values, unsigned(n), got, expected) if g != e]
    assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_the_fast_way_is_the_rule(p):
    """Chunks with and without rare elements, at chunk borders, zeros included."""
    size = 2 * CHUNK + 1001
    tame = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 0.02
    wild, n = inputs(p, size // 2, seed=20)
    zeros = torch.where(tame > 0, tame, tame * 0)
    for x, k in ((tame, noise(KEY, 0, size)), (zeros, noise(KEY, 1, size)), (wild, n)):
        assert torch.equal(bits_of(round_stochastic(x, p, k)), bits_of(rounding._by_rule(x, p, k)))


@each_narrow
def test_only_the_two_neighbours_occur(p):
    below = torch.randint(0, (1 << p.bits - 1) - 2 * (1 << p.mantissa_bits), (4000,),
                          generator=torch.Generator().manual_seed(4))
    low, high = (convert(from_bits(below + k, p), F64) for k in (0, 1))
    share = torch.rand(4000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = convert(low + share * (high - low), F32)
    inside = (x > low) & (x < high)  # beside the smallest f32 numbers there may be nothing between
    for sign in (1.0, -1.0):
        y = convert(round_stochastic((x * sign)[inside], p, noise(KEY, 0, int(inside.sum()))), F64)
        assert ((y == sign * low[inside]) | (y == sign * high[inside])).all() and inside.sum() > 3500


@each_narrow
@pytest.mark.parametrize("noises", (0, 0xFFFFFFFF, 0x80000000, None))
def test_numbers_of_the_format_never_move(p, noises):
    x = from_bits(torch.arange(1 << p.bits), p)
    wide = convert(x, F32)
    n = noise(KEY, 0, len(x)) if noises is None else int32([noises]).expand(len(x))
    assert torch.equal(bits_of(round_stochastic(wide, p, n)), bits_of(convert(wide, p)))
    number = ~wide.isnan()
    assert torch.equal(bits_of(round_stochastic(wide, p, n))[number], torch.arange(1 << p.bits)[number])


def binomial_bound(share: torch.Tensor, draws: int) -> torch.Tensor:
    """Five standard errors, and one count for shares next to 0 or 1."""
    return 5 * (share * (1 - share) / draws).sqrt() + 1.5 / draws


PLACES = {F16: (2.0**-24, 2.0**-20, 2.0**-15, 2.0**-14, 0.01, 1.0, 1000.0, 65472.0),
          BF16: (2.0**-133, 2.0**-126, 1e-20, 1.0, 1e30), E4M3: (2.0**-9, 1.0, 416.0), E5M2: (2.0**-16, 1.0, 49152.0)}


@pytest.mark.parametrize("p,start", [(p, start) for p, places in PLACES.items() for start in places])
def test_the_share_rounded_up_is_the_fraction(p, start):
    draws = 65536
    low = convert(convert(torch.tensor(start), p), F64)
    step = p.ulp(low.item())
    share = torch.tensor([0.0, 1 / 512, 1 / 16, 0.102, 1 / 3, 0.5, 0.75, 0.99, 1.0], dtype=torch.float64)
    x = convert(low + share * step, F32)
    share = (convert(x, F64) - low) / step  # what f32 could hold of it
    up = convert_stochastic(x.repeat(draws, 1), p, Key.of(9, 0, Purpose.USER, f"{p} {start}"))
    frequency = (convert(up, F64) > low).double().mean(0)
    assert ((frequency - share).abs() <= binomial_bound(share, draws)).all(), (frequency - share)
    negative = convert_stochastic(-x.repeat(draws, 1), p, Key.of(9, 0, Purpose.USER, f"{p} {start}"))
    assert torch.equal(bits_of(negative) ^ bits_of(up), torch.full_like(bits_of(up), 1 << p.bits - 1))


def test_mean_and_spread_of_a_thousand_small_steps():
    """1 + 1000 · 1e-4 in f16: nearest stays at 1; the walk has mean 1.1 and the deviation of a sum of coins."""
    walks = torch.ones(512, dtype=torch.float16)
    nearest = torch.ones((), dtype=torch.float16)
    for step in range(1000):
        key = Key.of(0, step, Purpose.WRITE_BACK, "w")
        walks = convert_stochastic(convert(walks, F32) + 1e-4, F16, key)
        nearest = convert(convert(nearest, F32) + 1e-4, F16)
    p = 1e-4 * 1024
    deviation = math.sqrt(1000 * p * (1 - p)) / 1024
    assert nearest.item() == 1.0
    assert abs(walks.double().mean().item() - 1.1) < 4 * deviation / math.sqrt(512)
    assert 0.85 < walks.double().std().item() / deviation < 1.15


# ---------------------------------------------------------------- the ends of the range
def test_no_finite_number_below_the_last_step_becomes_inf():
    for p, edge in ((F16, 65536.0), (E5M2, 65536.0), (E4M3, 480.0)):
        x = torch.linspace(p.max, edge, 30_001)
        x = torch.cat([x[x < edge], torch.nextafter(torch.tensor([edge]), torch.zeros(1))])
        for n in (noise(KEY, 0, len(x)), int32([0]).expand(len(x)), int32([0xFFFFFFFF]).expand(len(x))):
            y = round_stochastic(torch.cat([x, -x]), p, n.repeat(2)).to(torch.float64)
            assert (y.abs() == p.max).all(), p
        beyond = round_stochastic(torch.tensor([edge, 2 * edge, math.inf, -edge]), p, int32([0xFFFFFFFF] * 4))
        assert torch.equal(bits_of(beyond), bits_of(convert(torch.tensor([math.inf] * 3 + [-math.inf]), p)))
    x = f32([0x7F7F0001, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF])
    assert bits_of(round_stochastic(x, BF16, int32([0] * 4))).tolist() == [0x7F7F, 0x7F7F, 0x7F7F, 0xFF7F]


@each_narrow
def test_nan_and_inf_pass(p):
    patterns = [0x7F800001, 0xFF800001, 0x7FFF8C22, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000]
    for n in (0, 1, 0xFFFF, 0xFFFFFFFF, 0x80000000):
        y = round_stochastic(f32(patterns), p, int32([n] * 7))
        assert torch.equal(bits_of(y), bits_of(convert(f32(patterns), p)))
        assert y.to(torch.float64).isnan().tolist() == [True] * 5 + [p is E4M3] * 2


def test_far_below_the_smallest_number_f16_gives_a_zero_with_its_sign():
    x = torch.tensor([2.0**-57, -(2.0**-57), 1e-45, -1e-45, 0.0, -0.0])
    assert bits_of(round_stochastic(x, F16, int32([0] * 6))).tolist() == [0, 0x8000] * 3
    assert bits_of(round_stochastic(torch.tensor([2.0**-55]), F16, int32([0]))).tolist() == [1]


# ---------------------------------------------------------------- llm.c
ON_PURPOSE = {  # f32, noise: (llm.c, here)
    ("0x7F7FFFFF", "0x00000000"): (0x7F80, 0x7F7F, "the last binade never becomes inf"),
    ("0xFF7FFFFF", "0x00000000"): (0xFF80, 0xFF7F, "the last binade never becomes inf"),
    ("0x7FC00000", "0x00000000"): (0x7FFF, 0x7FC0, "the canonical NaN is 7FC0"),
    ("0x7FFFFFFF", "0x0000FFFF"): (0x7FFF, 0x7FC0, "the canonical NaN is 7FC0"),
    ("0x7F800001", "0x00000000"): (0x7FFF, 0x7FC0, "the canonical NaN is 7FC0"),
    ("0x7F800001", "0x00000001"): (0x7F80, 0x7FC0, "a NaN never becomes inf"),
    ("0xFF800001", "0x0000FFFF"): (0xFF80, 0xFFC0, "a NaN never becomes inf"),
}


def test_bf16_rounds_like_llmc_but_for_nan_and_the_last_binade():
    rows = LLMC["stochastic_round_bf16"]
    y = round_stochastic(f32([int(r["f32"], 16) for r in rows]), BF16, int32([int(r["random"], 16) for r in rows]))
    differ = {}
    for row, here in zip(rows, bits_of(y).tolist()):
        if here != int(row["bf16"], 16):
            differ[row["f32"], row["random"]] = (int(row["bf16"], 16), here)
    assert len(rows) == 36 and differ == {place: reason[:2] for place, reason in ON_PURPOSE.items()}


def test_llmc_element_keys():
    rows = [{k: int(v, 0) for k, v in row.items()} for row in LLMC["llmc_element_key"]]
    assert len(rows) == 12
    for row in rows:
        n = llmc_key(row["element"], row["layer"], row["seed"])
        assert n == row["noise"] and n & 0xFFFF == row["threshold"]
        as_tensor = llmc_key(torch.tensor([row["element"]]), row["layer"], row["seed"])
        assert unsigned(as_tensor) == [row["noise"]]
        assert bits_of(round_stochastic(f32([row["f32"]]), BF16, as_tensor)).item() == row["bf16"]


# ---------------------------------------------------------------- tensors
@each_narrow
def test_cutting_a_tensor_changes_no_bit(p):
    x = torch.randn(50, 103, generator=torch.Generator().manual_seed(6)) * 1e-3
    y = bits_of(convert_stochastic(x, p, KEY))
    for chunk in (33, 1024, 5149, 5150, 10**9):
        assert torch.equal(bits_of(convert_stochastic(x, p, KEY, chunk=chunk)), y)
    assert torch.equal(bits_of(convert_stochastic(x[:2], p, KEY, chunk=1)), y[:2])
    for rows in (1, 17, 33):
        parts = [convert_stochastic(x[i : i + rows], p, KEY, start=103 * i) for i in range(0, 50, rows)]
        assert torch.equal(torch.cat([bits_of(part) for part in parts]), y)
    assert torch.equal(bits_of(convert_stochastic(x.t().contiguous().t(), p, KEY)), y)  # order is logical, not memory
    assert torch.equal(bits_of(round_stochastic(x, p, noise(KEY, 0, x.numel()).view(x.shape))), y)


def test_indices_beyond_32_bits():
    x = torch.full((4000,), 1 + 2.0**-8)
    start = 2**32 - 2000
    whole = convert_stochastic(x, BF16, KEY, start=start)
    parts = [convert_stochastic(x[:2000], BF16, KEY, start), convert_stochastic(x[2000:], BF16, KEY, 2**32)]
    assert torch.equal(whole, torch.cat(parts))
    again = convert_stochastic(x[2000:], BF16, KEY, 0)  # the lower halves are equal, the noise is not
    assert 0.4 < (again == parts[1]).double().mean().item() < 0.6
    assert torch.equal(whole, convert_stochastic(x, BF16, KEY, start=start, chunk=777))


def test_steps_differ_and_repeat():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(7))
    steps = [convert_stochastic(x, BF16, Key.of(1, step, Purpose.WRITE_BACK, "w")) for step in (5, 6, 5)]
    assert torch.equal(steps[0], steps[2]) and 0.1 < (steps[0] != steps[1]).double().mean().item()


def test_sources_narrower_than_f32_and_targets_that_hold_them():
    x = convert(torch.randn(2000, generator=torch.Generator().manual_seed(8)), F16)
    n = noise(KEY, 0, 2000)
    assert torch.equal(round_stochastic(x, BF16, n), round_stochastic(convert(x, F32), BF16, n))
    assert torch.equal(bits_of(round_stochastic(x, E5M2, n)), bits_of(round_stochastic(convert(x, F32), E5M2, n)))
    for p in (F16, F32, F64):
        assert torch.equal(round_stochastic(x, p, n), convert(x, p))
        assert torch.equal(convert_stochastic(x, p, KEY), convert(x, p))
    assert convert_stochastic(torch.zeros(0, 3), F16, KEY).shape == (0, 3)
    assert convert_stochastic(torch.tensor(1.0), E4M3, KEY).shape == ()
    weight = torch.ones(3, requires_grad=True)
    assert not convert_stochastic(weight, BF16, KEY).requires_grad
    assert not round_stochastic(weight, F16, n[:3]).requires_grad


def test_inputs_stay_untouched():
    x, n = inputs(F16, 500, seed=30)
    before = bits_of(x).clone(), n.clone()
    for p in NARROW:
        round_stochastic(x, p, n)
        convert_stochastic(x, p, KEY)
        write_back(x, p, n, saturate=True)
    assert torch.equal(bits_of(x), before[0]) and torch.equal(n, before[1])


@pytest.mark.parametrize("use,message", [
    (lambda: convert_stochastic(torch.ones(2, dtype=torch.float64), F16, KEY), "starts from f32 or less, not f64"),
    (lambda: round_stochastic(torch.ones(2, dtype=torch.int32), F16, noise(KEY, 0, 2)), "torch.int32 is no precision"),
    (lambda: round_stochastic(torch.ones(2), F16, noise(KEY, 0, 3)), "noise must be int32"),
    (lambda: round_stochastic(torch.ones(2), F16, torch.zeros(2, dtype=torch.int64)), "noise must be int32"),
    (lambda: convert_stochastic(torch.ones(2), F16, KEY, chunk=0), "chunk must be at least 1, not 0"),
])
def test_errors_say_what_is_allowed(use, message):
    with pytest.raises(ValueError, match=message):
        use()


# ---------------------------------------------------------------- write-back and Kahan
@each_narrow
def test_write_back(p):
    x, n = inputs(p, 2000, seed=40)
    assert torch.equal(bits_of(write_back(x, p)), bits_of(convert(x, p)))
    assert torch.equal(bits_of(write_back(x, p, saturate=True)), bits_of(convert(x, p, saturate=True)))
    assert torch.equal(bits_of(write_back(x, p, n)), bits_of(round_stochastic(x, p, n)))
    y = write_back(x, p, n, saturate=True).to(torch.float64)
    finite = torch.isfinite(x)
    assert torch.isfinite(y[finite]).all()
    assert torch.equal(bits_of(write_back(x, p, n, saturate=True))[~finite], bits_of(convert(x, p))[~finite])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16, torch.bfloat16))
def test_two_sum_is_exact(dtype):
    g = torch.Generator().manual_seed(9)
    scale = 10.0 ** torch.randint(-3, 3, (2, 2000), generator=g)
    a, b = (torch.randn(2, 2000, generator=g, dtype=torch.float64) * scale).to(dtype)
    s, e = two_sum(a, b)
    assert torch.equal(s, a + b) and (e != 0).any()
    for x, y, t, r in zip(a.tolist(), b.tolist(), s.tolist(), e.tolist()):
        assert Fraction(t) + Fraction(r) == Fraction(x) + Fraction(y)


def follow(p: Precision, start: float, change: float, n: int) -> float:
    """The move of theta + k/scale after n equal changes."""
    theta, k = convert(torch.tensor([start]), p), torch.zeros(1, dtype=p.dtype)
    first = theta.item()
    for _ in range(n):
        theta, k = kahan_add(theta, k, torch.tensor([change]))
    assert theta.dtype is k.dtype is p.dtype
    return theta.item() + k.item() / kahan_scale(p) - first


def test_kahan_follows_the_wide_sum():
    assert (kahan_scale(F16), kahan_scale(BF16), kahan_scale(F32)) == (4096.0, 1.0, 1.0)
    assert abs(follow(F16, 1.0, 1e-4, 1000) - 0.1) < 1e-4
    for change in (1e-6, 1e-7, 3e-8):  # unscaled, all in f16, the last one would be wrong by 99 %
        assert abs(follow(F16, 0.02, change, 2000) / (2000 * change) - 1) < 0.007
    assert abs(follow(BF16, 1.0, 1e-4, 1000) - 0.1) < 5e-3  # eight bits are few for a compensation, too


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_kahan_follows_an_f64_sum_within_the_resolution_of_its_buffer(p):
    g = torch.Generator().manual_seed(11)
    theta = convert(torch.randn(256, generator=g) * 0.1, p)
    k, wide = torch.zeros_like(theta), convert(theta, F64)
    for _ in range(300):
        change = torch.randn(256, generator=g) * 1e-5
        wide = wide + convert(change, F64)
        theta, k = kahan_add(theta, k, change)
    both = convert(theta, F64) + convert(k, F64) / kahan_scale(p)
    half_step = p.ulp(theta) / 2  # the largest k; each of the 300 steps may lose half an ulp of it
    worst = 300 * convert(half_step, F64) * 2.0**-p.mantissa_bits
    assert ((both - wide).abs() < worst).all()
    nearest = convert(theta, F64) - wide
    assert (both - wide).abs().mean() < nearest.abs().mean() / 50
    assert (convert(k, F64).abs() / kahan_scale(p) <= convert(half_step, F64)).all()


def test_kahan_in_f32_keeps_what_one_addition_loses():
    theta, k = kahan_add(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1e-9]))
    assert (theta.item(), k.item()) == (1.0, torch.tensor(1e-9).item())
    assert kahan_add(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.5]))[1].item() == 0.0


# ---------------------------------------------------------------- compiled and on a GPU
def test_compiled_bits_are_the_eager_bits():
    x, n = inputs(F16, 300, seed=50)
    ka, first = torch.tensor([KEY.a, 5]), torch.tensor([2**32, 1024])

    def f(x, n, ka, first):
        rounded = [round_stochastic(x, p, n) for p in NARROW] + [convert_stochastic(x, BF16, KEY, start=2**32 - 5)]
        theta, k = kahan_add(convert(x, F16), convert(x * 0, F16), x * 1e-3)
        return [*rounded, theta, k, write_back(x, F16, n, saturate=True)], [noise_blocks(ka, first), noise(KEY, 3, 500)]

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(x, n, ka, first)
    for a, b in zip(compiled[0], f(x, n, ka, first)[0]):
        assert a.dtype is b.dtype and torch.equal(bits_of(a), bits_of(b))
    for a, b in zip(compiled[1], f(x, n, ka, first)[1]):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_cuda_bits_are_the_cpu_bits():
    assert torch.equal(noise(KEY, 2**32 - 5000, 10_000, "cuda").cpu(), noise(KEY, 2**32 - 5000, 10_000))
    ka, first = torch.tensor([KEY.a, 5] * 200), torch.arange(400) * 2**25
    assert torch.equal(noise_blocks(ka.cuda(), first.cuda()).cpu(), noise_blocks(ka, first))
    for p in NARROW:
        x, n = inputs(p, 200_000, seed=60)
        here = round_stochastic(x, p, n)
        assert torch.equal(bits_of(round_stochastic(x.cuda(), p, n.cuda()).cpu()), bits_of(here))
        assert torch.equal(bits_of(convert_stochastic(x.cuda(), p, KEY, 2**32 - 9).cpu()),
                           bits_of(convert_stochastic(x, p, KEY, 2**32 - 9)))
        theta, k, change = convert(x, p), convert(x * 1e-4, p), x * 1e-3
        for a, b in zip(kahan_add(theta.cuda(), k.cuda(), change.cuda()), kahan_add(theta, k, change)):
            nan = b.to(torch.float64).isnan()  # arithmetic on a NaN may change its sign
            assert torch.equal(bits_of(a.cpu())[~nan], bits_of(b)[~nan])
            assert a.cpu().to(torch.float64)[nan].isnan().all()
