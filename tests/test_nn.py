"""Layers and initial values: what each layer computes, in which precision, and that weights are the same bits everywhere."""

import ast
import hashlib
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

import f16lab
from f16lab import nn
from f16lab.cast import Ledger
from f16lab.nn import (
    ZEROS, BitLinear, Block, BlockSpec, Conv2d, Draw, Dropout, Embedding, FeedForward, Init, InitialValues, Linear, Norm,
    SelfAttention, absmean_ternary, block_linear, check_constant, initialise, inverse_normal, keyed_normal,
    named_parameters_once,
)
from f16lab.precision import BF16, E4M3, F16, F32, F64, Precision
from f16lab.profile import PRESETS, PrecisionProfile
from f16lab.rounding import Key, Purpose, noise

KEY = Key.of(3, 0, Purpose.INIT, "w")
SPEC = BlockSpec(channels=32, heads=4, ff=64)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def made(layer: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    initialise(layer, seed)
    return layer


def normal(*shape: int, name: str = "x") -> torch.Tensor:
    return keyed_normal(Key.of(0, 0, Purpose.USER, name), math.prod(shape)).view(shape)


# ---------------------------------------------------------------- normal values

def test_inverse_normal_against_the_standard_library():
    """Every region (middle, both tails, the seam between them) against Wichura's AS241, to the stated 1.2e-9."""
    edges = [-2**31, -2**31 + 1, -1, 0, 1, 2**31 - 1]
    seam = [round(s * 0.47575 * 2**32) + d for s in (1, -1) for d in (-1, 0, 1)]
    ints = edges + seam + noise(KEY, 0, 20_000).tolist()
    got = inverse_normal(torch.tensor(ints, dtype=torch.int32)).tolist()
    exact = NormalDist()
    for n, z in zip(ints, got):
        want = exact.inv_cdf((n + 0.5) / 2**32 + 0.5)
        assert abs(z - want) <= 1.2e-9 * max(abs(want), 0.1), (n, z, want)


def scalar_inverse_normal(n: int) -> float:
    """The same formula in Python floats: one IEEE operation at a time, no vectors, no fused multiply-add."""
    def polynomial(c, x):
        y = c[-1]
        for a in c[-2::-1]: y = y * x + a
        return y
    q = (n + 0.5) * 2.0**-32
    if abs(q) <= nn._EDGE: return polynomial(nn._MIDDLE[0], q * q) * q / polynomial(nn._MIDDLE[1], q * q)
    m, e = math.frexp(0.5 - abs(q))
    if m < math.sqrt(0.5): m, e = m * 2, e - 1
    s = (m - 1) / (m + 1)
    t = math.sqrt((e * math.log(2) + s * 2 * polynomial(nn._ARTANH, s * s)) * -2)
    return math.copysign(polynomial(nn._TAIL[0], t) / polynomial(nn._TAIL[1], t), q)


def test_inverse_normal_has_the_bits_of_scalar_arithmetic():
    n = torch.cat([noise(KEY, 0, 20_000), torch.tensor([-2**31, 2**31 - 1, 0, -1], dtype=torch.int32)])
    assert inverse_normal(n).tolist() == [scalar_inverse_normal(i) for i in n.tolist()]


def test_inverse_normal_is_odd_and_increasing():
    n = torch.arange(-2**31, 2**31, 2**31 // 5000, dtype=torch.int64).to(torch.int32)
    z = inverse_normal(n)
    assert torch.equal(inverse_normal(-1 - n), -z)
    assert (z[1:] > z[:-1]).all() and z.isfinite().all()


def test_keyed_normal_is_normal():
    """Moments and the Kolmogorov-Smirnov distance of two million values, each within four standard errors."""
    n = 2_000_000
    x = keyed_normal(KEY, n).double()
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    cdf = torch.special.ndtr(x.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max((cdf - steps[:-1]).max(), (steps[1:] - cdf).max()).item()
    assert distance * math.sqrt(n) < 1.95  # probability 0.001 for a right distribution
    assert abs((x[1:] * x[:-1]).mean()) < 4 / math.sqrt(n)  # neighbours are uncorrelated


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_keyed_normal_does_not_depend_on_pieces(piece):
    n = 50 if piece == 1 else 3000
    assert torch.equal(keyed_normal(KEY, n, piece=piece), keyed_normal(KEY, n))


def test_keyed_normal_window_across_2_to_32():
    start = 2**32 - 5
    whole = keyed_normal(KEY, 10, start=start)
    assert torch.equal(whole[5:], keyed_normal(KEY, 5, start=2**32))
    assert not torch.equal(whole[5:], keyed_normal(KEY, 5))  # the upper half of the index counts


def test_keyed_normal_rounds_once():
    z = inverse_normal(noise(KEY, 0, 1000)) * 0.02
    assert torch.equal(keyed_normal(KEY, 1000, std=0.02), torch.from_numpy(z.numpy().astype(np.float32)))


def test_keyed_normal_bits_are_pinned():
    """The same on every machine; thread count and default dtype play no part."""
    want = "3083a50b24d27c3fe3a64e23b170ca85388e5f3ff296a95bf1992d712db1f129"
    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    try:
        for n, dtype in ((1, torch.float32), (2, torch.float64), (1, torch.float16)):
            torch.set_num_threads(n)
            torch.set_default_dtype(dtype)
            assert digest(keyed_normal(KEY, 300_000)) == want
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(default)


# ---------------------------------------------------------------- initial values

def test_init_kinds():
    assert Init(1.0).draw("ln.weight", torch.Size([3]), 0).tolist() == [1, 1, 1]
    assert ZEROS.draw("b", torch.Size([2, 2]), 0).eq(0).all()
    w = Init(std=0.02).draw("w", torch.Size([500, 100]), 5)
    assert w.dtype == torch.float32 and abs(w.std().item() / 0.02 - 1) < 0.015 and abs(w.mean().item()) < 4e-4
    assert torch.equal(w.flatten(), keyed_normal(Key.of(5, 0, Purpose.INIT, "w"), 50_000, 0.02))
    shifted = Init(1.0, 0.5).draw("w", torch.Size([10_000]), 5)
    assert abs(shifted.mean().item() - 1) < 0.02


def test_padding_rows_start_at_zero_and_do_not_move_the_others():
    rows = Init(std=0.02, rows=7).draw("wte.weight", torch.Size([16, 8]), 1)
    assert rows[7:].eq(0).all()
    assert torch.equal(rows[:7], Init(std=0.02).draw("wte.weight", torch.Size([7, 8]), 1))
    assert Init(1.0, rows=1).draw("w", torch.Size([2, 2]), 0).tolist() == [[1, 1], [0, 0]]


def test_seed_and_name_matter():
    shape = torch.Size([64])
    draws = [Init(std=1.0).draw(name, shape, seed) for name in ("a", "b") for seed in (0, 1)]
    assert len({digest(d) for d in draws}) == 4


def test_initialise_rounds_each_value_once_and_keeps_nothing():
    for name in ("f32", "f16", "bf16"):
        layer = Linear(40, 30, PRESETS[name], "fc")
        with Ledger() as ledger: values = initialise(layer, 9)
        p = PRESETS[name].param
        assert isinstance(values, InitialValues) and list(values) == ["weight", "bias"] and len(values) == 2
        assert all(v.dtype == torch.float32 for v in values.values())
        assert torch.equal(layer.weight, values["weight"].to(p.dtype))
        assert values["weight"] is not values["weight"] and torch.equal(values["weight"], values["weight"])
        assert {(r.op, r.dst) for r in ledger.rows()} == (set() if name == "f32" else {("init", p.tag)})


def test_uint32_seeds_only():
    with pytest.raises(ValueError, match="seed"): initialise(Linear(4, 4, PRESETS["f32"], "fc"), 2**32)


# ---------------------------------------------------------------- constants

@pytest.mark.parametrize("value, p, becomes", [
    (-1e9, F16, "-inf"), (1e-12, F16, "0.0"), (65520.0, F16, "inf"), (1e39, BF16, "inf"), (1e-46, F32, "0.0"),
    (500.0, E4M3, "nan"), (math.nan, F32, "nan"), (math.inf, F64, "inf")])
def test_check_constant_refuses(value, p, becomes):
    with pytest.raises(ValueError, match=f"^mask=.* becomes {becomes} in {p.tag}.*wider precision"):
        check_constant(value, p, "mask")


@pytest.mark.parametrize("value, p", [(0.0, F16), (-0.0, E4M3), (65519.0, F16), (6e-8, F16), (1e-40, F32), (-1e9, BF16)])
def test_check_constant_passes(value, p):
    assert check_constant(value, p, "x") is value


def test_constants_are_checked_against_the_precision_they_meet():
    assert Norm(8, PRESETS["all_f16"], "n", eps=1e-12).eps == 1e-12  # statistics are f32, where 1e-12 is a number
    with pytest.raises(ValueError, match="n.eps"): Norm(8, PRESETS["all_f16"], "n", eps=1e-60)
    with pytest.raises(ValueError, match="initial value of fc.weight"): Linear(8, 8, PRESETS["f16"], "fc", std=1e-9)


# ---------------------------------------------------------------- layers

SLOTS = PrecisionProfile(param=F16, compute=BF16, stable=F32, optimizer=F32)


def test_parameters_live_in_slot_param_and_collect_in_slot_grad():
    for profile, stored, grad in ((PRESETS["f16"], F16, F32), (PRESETS["bf16_llmc"], BF16, BF16), (PRESETS["f32"], F32, F32),
                                  (PRESETS["t1_58"], F16, F32), (PRESETS["all_f16"], F16, F16)):
        layer = made(Linear(8, 8, profile, "fc"))
        layer(normal(3, 8)).sum().backward()
        assert layer.weight.dtype == stored.dtype and layer.weight.grad.dtype == grad.dtype == layer.bias.grad.dtype


def test_each_layer_answers_in_its_slot():
    x, image = normal(2, 5, 32), normal(2, 3, 8, 8)
    compute, stable = torch.bfloat16, torch.float32
    assert made(Linear(32, 8, SLOTS, "a"))(x).dtype == compute
    assert made(Linear(32, 8, SLOTS, "a"))(x, out=F32).dtype == stable
    assert made(Embedding(9, 8, SLOTS, "a"))(torch.tensor([1, 8])).dtype == compute
    assert made(Norm(32, SLOTS, "a"))(x).dtype == stable and made(Norm(32, SLOTS, "a", kind="rms"))(x).dtype == stable
    assert Dropout(0.5, SLOTS, "a")(x, Draw(0, 0)).dtype == compute
    assert made(Conv2d(3, 4, 3, SLOTS, "a"))(image).dtype == compute
    for module in (SelfAttention, FeedForward, Block): assert made(module(SPEC, SLOTS, "a"))(x).dtype == compute


def test_gather_casts_the_rows_and_not_the_table():
    table = made(Embedding(1000, 8, PRESETS["master_weights"], "wte"))
    with Ledger() as ledger: table(torch.tensor([[1, 2, 3]])).float().sum().backward()
    assert {r.shape for r in ledger.rows()} == {(1, 3, 8)}
    assert table.weight.grad.dtype == torch.float32


def test_linear_equals_plain_torch():
    layer, x = made(Linear(12, 7, PRESETS["f32"], "fc")), normal(4, 12)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    no_bias = made(Linear(12, 7, PRESETS["f32"], "fc", bias=False))
    assert no_bias.bias is None and torch.equal(no_bias(x), torch.nn.functional.linear(x, no_bias.weight))


def test_norms_in_half():
    """A constant row, squares past the end of f16, and a large alternating row (mean and scale are never f16)."""
    layer, rms = (made(Norm(64, PRESETS["all_f16"], "n", kind=kind, eps=1e-5)) for kind in ("layer", "rms"))
    assert layer(torch.zeros(1, 64).half()).eq(0).all()
    assert rms(torch.full((1, 64), 300.0).half()).eq(1).all()
    alternating = torch.tensor([10000.0, -10000.0]).repeat(32)[None].half()
    assert torch.equal(layer(alternating), alternating / 10000)


def test_accum_slot_reaches_the_matmul():
    x = torch.ones(1, 4096)
    wide, narrow = (Linear(4096, 1, PRESETS["f16"].with_(accum=a), "fc", bias=False) for a in (F32, F16))
    for layer in (wide, narrow): layer.weight.data.fill_(1.0001220703125)  # rounds to 1 in f16; the sums differ below
    assert wide(x).item() == 4096
    steps = torch.full((1, 4096), 1.0)
    steps[0, 64:] = 2**-6  # 63 chunks of 1 on a running sum of 64 … in f16 steps of 1/16
    assert narrow(steps).item() == wide(steps).item() == 127
    steps[0, 64:] = 2**-12  # chunks of 1/64 do not move a running f16 sum of 64
    assert narrow(steps).item() == 64 and wide(steps).item() == pytest.approx(64.98, abs=0.05)


def test_override_reaches_the_subtree():
    profile = PrecisionProfile.parse("f16;blocks.0.mlp:compute=f32;blocks.*.attn.proj:compute=bf16")
    block = Block(SPEC, profile, "blocks.0")
    assert block.mlp.fc.p_.compute is F32 and block.mlp.proj.p_.compute is F32
    assert block.attn.proj.p_.compute is BF16 and block.attn.qkv.p_.compute is F16 and block.p_.compute is F16


# ---------------------------------------------------------------- dropout

def test_dropout_depends_on_place_and_not_on_batches():
    drop, x = Dropout(0.3, PRESETS["f32"], "blocks.0.drop1"), torch.ones(8, 5, 7)
    whole = drop(x, Draw(1, 2, 3))
    parts = torch.cat([drop(x[i:i + 2], Draw(1, 2, 3, sample0=i)) for i in range(0, 8, 2)])
    assert torch.equal(whole, parts)
    others = [drop(x, Draw(*args)) for args in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
    others.append(Dropout(0.3, PRESETS["f32"], "blocks.1.drop1")(x, Draw(1, 2, 3)))
    assert all(not torch.equal(whole, o) for o in others)


def test_dropout_keeps_the_mean_and_is_off_without_a_draw():
    drop, x = Dropout(0.3, PRESETS["f32"], "d"), torch.ones(100, 1000)
    y = drop(x, Draw(0, 0))
    kept = y.ne(0)
    assert abs(kept.double().mean().item() - 0.7) < 4 * math.sqrt(0.21 / 100_000)
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / 0.7))
    assert drop(x) is x and Dropout(0.0, PRESETS["f32"], "d")(x, Draw(0, 0)) is x


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, math.nan])
def test_dropout_rates(rate):
    with pytest.raises(ValueError, match="at least 0 and below 1"): Dropout(rate, PRESETS["f32"], "d")


# ---------------------------------------------------------------- attention

@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "all_f16"])
def test_query_without_keys_gives_zero_and_no_gradient(name):
    attention = made(SelfAttention(replace(SPEC, causal=False), PRESETS[name], "attn"))
    x = normal(2, 6, 32).requires_grad_()
    visible = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    visible[1] = False
    y = attention(x, visible)
    y.float().sum().backward()
    assert y[1].eq(0).all() and x.grad[1].eq(0).all()  # the biases are 0
    assert y[0].ne(0).any() and x.grad[0].ne(0).any() and y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_causal_with_padding_in_front(name):
    """Causal and padding masks together: the first two queries see nothing, the third only itself, with weight 1."""
    attention = made(SelfAttention(SPEC, PRESETS[name], "attn"))
    x = normal(1, 5, 32) * 30
    visible = torch.tensor([False, False, True, True, True])[None, None, None]
    y = attention(x, visible)
    assert y[0, :2].eq(0).all() and y.isfinite().all()
    p = PRESETS[name].compute
    v = attention.qkv(x)[0, 2, 64:]
    want = torch.nn.functional.linear(v.float(), attention.proj.weight.float()).to(p.dtype)
    assert torch.allclose(y[0, 2].float(), want.float(), rtol=float(p.ulp(1.0)), atol=1e-6)


def test_rope_changes_with_distance_only():
    from f16lab import ops

    attention = made(SelfAttention(replace(SPEC, causal=False), PRESETS["f32"], "attn"))
    cos, sin = ops.rope_table(12, 8)
    x = normal(1, 4, 32)
    near, far = (attention(x, None, (cos[i:i + 4], sin[i:i + 4])) for i in (0, 8))
    assert torch.allclose(near, far, atol=1e-5) and not torch.allclose(near, attention(x), atol=1e-5)


@pytest.mark.parametrize("changes, words", [
    (dict(heads=5), "heads=5: choose heads that divide channels"), (dict(heads=0), "heads=0"), (dict(channels=-8), "channels=-8"),
    (dict(ff=2.5), "ff=2.5"), (dict(norm="post"), "allowed are 'pre' and 'peri'"),
    (dict(activation="relu"), "allowed are 'gelu' and 'swiglu'")])
def test_impossible_blocks(changes, words):
    with pytest.raises(ValueError, match=words): replace(SPEC, **changes)


def test_impossible_layers():
    with pytest.raises(ValueError, match="outputs=0"): Linear(4, 0, PRESETS["f32"], "fc")
    with pytest.raises(ValueError, match="rows=-1"): Embedding(-1, 4, PRESETS["f32"], "wte")
    with pytest.raises(ValueError, match="allowed are 'layer' and 'rms'"): Norm(4, PRESETS["f32"], "n", kind="batch")
    with pytest.raises(ValueError, match="kernel=0"): Conv2d(1, 1, 0, PRESETS["f32"], "c")


# ---------------------------------------------------------------- ternary weights

def ternary_by_hand(w: np.ndarray) -> np.ndarray:
    """In f64: digits and scale written out element by element."""
    scale = np.abs(w).mean()
    return np.array([[scale * max(-1, min(1, round(x / scale))) for x in row] for row in w])


def test_ternary_values():
    w = normal(20, 30).half()
    t = absmean_ternary(w, p=F16)
    want = ternary_by_hand(w.double().numpy())
    assert t.dtype == torch.float16
    assert np.abs(t.double().numpy() - want).max() < 2**-11 and t.abs().unique().numel() == 2
    assert (np.sign(want) == t.double().numpy() / t.abs().max().item()).all()


def test_ternary_gradient_goes_straight_through():
    w = normal(20, 30).half().requires_grad_()
    g = normal(20, 30, name="g").half()
    absmean_ternary(w, p=F16).backward(g)
    assert torch.equal(w.grad, g)


def test_ternary_of_zeros_and_of_large_weights():
    assert absmean_ternary(torch.zeros(3, 3).half(), p=F16).eq(0).all()
    big = torch.full((64, 64), 60000.0).half()  # the sum of these is far past the end of f16
    assert absmean_ternary(big, p=F16).eq(big).all()


def test_bit_linear_is_a_linear_with_ternary_weights():
    layer = made(block_linear(30, 20, PRESETS["t1_58"], "fc", std=0.02))
    assert type(layer) is BitLinear and layer.weight.dtype == torch.float16
    x = normal(4, 30).half().requires_grad_()
    want = torch.nn.functional.linear(x.float(), absmean_ternary(layer.weight, p=F16).float()).half()
    y = layer(x)
    assert torch.equal(y, want)
    y.sum().backward()
    assert torch.equal(layer.weight.grad.half(), torch.ones(4, 20).T.half() @ x.detach()) and layer.weight.grad.dtype == torch.float32


def test_ternary_only_where_the_profile_says_so():
    half = PrecisionProfile.parse("f16;blocks.0.mlp:param=t1_58")
    block = Block(SPEC, half, "blocks.0")
    assert [type(m) for m in (block.mlp.fc, block.mlp.proj, block.attn.qkv)] == [BitLinear, BitLinear, Linear]
    ternary = Block(SPEC, PRESETS["t1_58"], "blocks.0")
    assert {type(m) for n, m in ternary.named_modules() if n.endswith(("qkv", "proj", "fc"))} == {BitLinear}
    assert ternary.ln1.weight.dtype == torch.float16


# ---------------------------------------------------------------- blocks

def test_pre_and_peri_blocks_are_what_they_say():
    x = normal(2, 6, 32)
    for norm in ("pre", "peri"):
        b = made(Block(replace(SPEC, norm=norm), PRESETS["f32"], "b"))
        assert (b.ln1_out is None) == (b.ln2_out is None) == (norm == "pre")
        outer = (lambda y: y, lambda y: y) if norm == "pre" else (b.ln1_out, b.ln2_out)
        y = x + outer[0](b.attn(b.ln1(x)))
        assert torch.equal(b(x), y + outer[1](b.mlp(b.ln2(y))))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_peri_branch_has_the_size_of_its_gain(kind):
    block = made(Block(replace(SPEC, norm="peri", kind=kind, std=0.5, residual_std=0.5), PRESETS["f32"], "b"))
    block.ln1_out.weight.data.fill_(3.0)
    branch = block.ln1_out(block.attn(block.ln1(normal(2, 6, 32))))
    assert torch.allclose(branch.pow(2).mean(-1).sqrt(), torch.full((2, 6), 3.0), rtol=1e-3)


def test_residual_stream_of_peri_grows_like_the_square_root_of_depth():
    """Branches are independent and of size 1, so after L blocks the mean square is 1 + 2L; pre-LN follows its weights."""
    def sizes(norm):
        x, out = normal(4, 16, 32), []
        for i in range(16):
            spec = replace(SPEC, norm=norm, activation="swiglu", std=1.0, residual_std=1.0)
            block = made(Block(spec, PRESETS["f32"], f"blocks.{i}"), seed=i)
            with torch.no_grad(): x = block(x)
            out.append(x.pow(2).mean().item())
        return out
    peri, pre = sizes("peri"), sizes("pre")
    assert all(0.6 < m / (1 + 2 * (i + 1)) < 1.6 for i, m in enumerate(peri))
    assert pre[-1] > 1000 * peri[-1]


def test_swiglu_is_a_gate():
    ff, x = made(FeedForward(replace(SPEC, activation="swiglu"), PRESETS["f32"], "mlp")), normal(3, 32)
    want = ff.proj(ff.fc(x) * torch.nn.functional.silu(ff.gate(x)))
    assert torch.allclose(ff(x), want, atol=1e-7)


def test_dropout_of_a_block_is_on_both_branches():
    block, x = made(Block(replace(SPEC, dropout=0.5), PRESETS["f32"], "blocks.0")), normal(2, 6, 32)
    assert torch.equal(block(x), made(Block(SPEC, PRESETS["f32"], "blocks.0"))(x))
    y = x + block.drop1(block.attn(block.ln1(x)), Draw(0, 1))
    assert torch.equal(block(x, None, Draw(0, 1)), y + block.drop2(block.mlp(block.ln2(y)), Draw(0, 1)))


def test_names_once():
    block = Block(SPEC, PRESETS["f32"], "")
    block.twin = block.ln1
    names = [name for name, _ in named_parameters_once(block)]
    assert "ln1.weight" in names and not any(name.startswith("twin") for name in names)


# ---------------------------------------------------------------- the rules of the house

@pytest.mark.parametrize("module", ["nn", "models"])
def test_no_hidden_precision_changes(module):
    """Precision changes happen in operators that name it, never by a conversion in these modules."""
    source = Path(f16lab.__file__).with_name(f"{module}.py").read_text()
    tree = ast.parse(source)
    operators = 0
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        assert name not in ("to", "half", "float", "bfloat16", "double", "type", "cast") or (name, module) == ("type", "models"), \
            f"line {call.lineno}: {ast.unparse(call)}"
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "ops":
            if name in ("rope_table", "split_heads", "merge_heads"): continue  # constants, and views
            operators += 1
            assert {"p", "layer"} <= {k.arg for k in call.keywords}, f"line {call.lineno}: {ast.unparse(call)}"
    assert operators >= 8


def test_precisions_of_every_layer_are_precisions():
    for layer in Block(SPEC, PRESETS["all_f16"], "b").modules():
        if hasattr(layer, "p_"): assert all(isinstance(layer.p_.__dict__[s], Precision) for s in ("compute", "stable", "accum"))
