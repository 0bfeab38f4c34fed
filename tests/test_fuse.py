"""Fused expressions as values and as an operator: structure, meaning, gradients, the predicate of native arithmetic."""

import math

import pytest
import torch

from f16lab import ops
from f16lab.cast import Ledger
from f16lab.device import open_device
from f16lab.expression import (
    Draw,
    backward,
    capture,
    col_mean,
    col_sum,
    drop_limit,
    equal,
    evaluate,
    exp,
    kept,
    kept_mask,
    log,
    maximum,
    minimum,
    parse,
    row_max,
    row_mean,
    row_sum,
    rsqrt,
    saving,
    sigmoid,
    sqrt,
    tanh,
    where,
)
from f16lab.fuse import ENGINE, Fused, Trace, engine_programs, engine_sources, fused, native_refusal
from f16lab.nn import BlockSpec, FeedForward
from f16lab.precision import BF16, F16, F32, F64, Precision, bits_of, convert
from f16lab.profile import PrecisionProfile
from f16lab.rounding import Key, Purpose, noise

open_device("cpu")
DRAW = Draw(Key.of(3, 1, Purpose.DROPOUT, "layer"), 17, drop_limit(0.3))
FORMULAS = {
    "arithmetic": (lambda a, b: (a + b) * a - a / (b * b + 2.0) + abs(a - 0.5) - -b, ("element",) * 2),
    "choices": (
        lambda a, b: where(a < b, maximum(a, 0.1), minimum(b, 2.0)) * where(equal(a, a), b, a) + (a >= b) * a,
        ("element",) * 2,
    ),
    "functions": (
        lambda a: exp(-a) + log(a * a + 1.0) + tanh(a) * sigmoid(a) + sqrt(a * a + 0.5) * rsqrt(a * a + 1.5),
        ("element",),
    ),
    "broadcast": (lambda a, row, column: (a * row + column) / (row * row + 1.0) * column, ("element", "row", "column")),
    "noise": (lambda a: a * a * kept() * 1.5, ("element",)),
    "rms": (lambda a, w: a * rsqrt(row_mean(a * a) + 1e-5) * w, ("element", "row")),
    "normed": (lambda a, w, b: (a * rsqrt(row_mean(a * a) + 1e-5) + b) * w, ("element", "row", "row")),
    "row sum": (lambda a, b: row_sum(a * b) / 3.0, ("element", "element")),
    "shared sum": (lambda a: a * row_sum(exp(a)) + row_sum(exp(a)) * sqrt(row_sum(exp(a))), ("element",)),
    "columns": (lambda a, s: sqrt(col_sum(a * a * abs(s))), ("element", "column")),
    "column mean": (lambda a: col_mean(a * a) * 0.5, ("element",)),
}


def shapes(axes, shape=(2, 5, 7)):
    return [{"element": shape, "row": shape[-1:], "column": (*shape[:-1], 1)}[axis] for axis in axes]


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_those_of_autograd(name):
    f, axes = FORMULAS[name]
    p, back = capture(f, *axes), backward(capture(f, *axes))
    g = torch.Generator().manual_seed(1)
    xs = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes(axes)]
    y, *saved = evaluate(saving(p), xs, draws=[DRAW])
    dy = torch.randn(y.shape, generator=g, dtype=torch.float64)
    right = torch.autograd.grad(y, xs, dy)
    assert back.saves == bool(saved) and sorted(i for wanted in back.wanted for i in wanted) == list(range(len(xs)))
    for made, wanted, numbers in zip(back.programs, back.wanted, back.constants):
        for i, mine in zip(
            wanted, evaluate(made, [x.detach() for x in (*xs, *saved, dy)], [p.constants[k] for k in numbers], [DRAW])
        ):
            assert mine.shape == xs[i].shape and torch.allclose(mine, right[i], rtol=1e-9, atol=1e-9), i


@pytest.mark.parametrize("name", FORMULAS)
def test_a_key_spells_its_program_and_no_constant(name):
    f, axes = FORMULAS[name]
    p = capture(f, *axes)
    for q in (p, saving(p), *backward(p).programs):
        assert parse(q.key) == q and parse(q.key).key == q.key
    assert "1.5" not in p.key and "1e-05" not in p.key


def test_gradients_use_the_constants_of_the_call_not_those_recorded():
    f = Fused.of(lambda x: (x * 3.0 + 7.0) * x * 0.5, "element")
    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    values = [-1.25, 0.75, 11.0]
    fused(f, x, p=F64, constants=values).sum().backward()
    assert torch.allclose(x.grad, (2 * values[0] * x.detach() + values[1]) * values[2])


@pytest.mark.parametrize(
    "bad,words",
    [
        (lambda x: row_sum(x) + row_max(x), "allowed is one"),
        (lambda x: x - col_mean(x), "wait for all rows"),
        (lambda x: (row_sum(x), col_sum(x)), "allowed is one"),
        (lambda x: (x, col_sum(x)), "cut it in two"),
        (lambda x: row_sum(row_sum(x)), "only elements"),
        (lambda x: where(x, 1, 2), "must be a comparison"),
    ],
)
def test_what_no_kernel_can_do_is_refused_in_words(bad, words):
    with pytest.raises(ValueError, match=words):
        capture(bad, "element")


def test_more_of_the_same():
    with pytest.raises(TypeError, match="where"):
        capture(lambda x: x if x > 0 else -x, "element")
    with pytest.raises(ValueError, match="axis 'all'"):
        capture(lambda x: x, "all")
    with pytest.raises(ValueError, match="at least one"):
        capture(lambda x: x, "row")
    with pytest.raises(NotImplementedError, match="no gradient"):
        backward(capture(lambda x: x * row_max(x), "element"))


# ---------------------------------------------------------------- the operator
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_one_rounding_at_the_output_and_one_at_each_gradient(p):
    """+ − × ÷: the chain in f32, every step rounded on its own, then one rounding."""
    f = Fused.of(lambda a, b: (a + b) * a / (b * b + 2.0), "element", "element")
    a, b = (convert(torch.randn(300, generator=torch.Generator().manual_seed(i)), p).requires_grad_() for i in range(2))
    with Ledger() as ledger:
        y = fused(f, a, b)
    x, z = a.detach().float(), b.detach().float()
    assert y.dtype is p.dtype and torch.equal(bits_of(y.detach()), bits_of(convert((x + z) * x / (z * z + 2.0), p)))
    assert {(r.op, r.reason) for r in ledger.rows()} == (set() if p is F32 else {("fused", "boundary")})
    g = convert(torch.randn(300), p)
    y.backward(g)
    for mine, made in zip((a.grad, b.grad), evaluate(f.back.programs[0], [x, z, g.float()])):
        assert mine.dtype is p.dtype and torch.equal(bits_of(mine), bits_of(convert(made, p)))


def test_operands_that_p_does_not_hold_are_cast_on_entry_others_are_read_as_stored():
    f = ENGINE["div"]
    a, b = torch.rand(50) + 1, (torch.rand(50) + 1).half()
    assert fused(f, a, b).dtype is torch.float32
    with Ledger() as ledger:
        y = fused(f, a, b, p=F16)
    assert torch.equal(y, (a.half().float() / b.float()).half())
    assert ("operand 0", "f32", "f16", "operand") in {(r.operand, r.src, r.dst, r.reason) for r in ledger.rows()}


CONSTANTS = {
    3e-8: False,
    1e-5: False,
    7e4: False,
    math.nan: False,
    0.0: True,
    2.0**-24: True,
    -65504.0: True,
    0.044715: True,
    1 / 3: True,
    math.inf: True,
    2.0**-14: True,
    2.0**-14 * 0.99999: False,
}


@pytest.mark.parametrize("c", CONSTANTS)
def test_the_predicate_looks_at_the_actual_constant(c):
    f = Fused.of(lambda x: x / (abs(x) + 0.125), "element")
    x = convert(torch.randn(3000), F16)
    assert (native_refusal(f.program, [c], [F16, F16]) == "") is CONSTANTS[c]
    native, once = fused(f, x, arith="native", constants=[c]), fused(f, x, constants=[c])
    c16 = torch.tensor(c).half().float()
    rounded = convert(
        convert(convert(x.float().abs() + c16, F16).float(), F32).reciprocal() * 0
        + x.float() / convert(x.float().abs() + c16, F16).float(),
        F16,
    )
    right = rounded if CONSTANTS[c] else once
    assert torch.equal(native.isnan(), right.isnan()) and torch.equal(native.nan_to_num(), right.nan_to_num())


def test_native_arithmetic_is_that_of_one_format_and_knows_no_sums():
    f, rms = Fused.of(lambda x: x * x + x, "element"), Fused.of(lambda x: x * rsqrt(row_mean(x * x)), "element")
    assert "f32" in native_refusal(f.program, [], [F32, F32]) and "f16 and f32" in native_refusal(
        f.program, [], [F16, F32]
    )
    assert "sum" in native_refusal(rms.program, [], [F16, F16])
    x = torch.randn(6, 40).half()
    assert torch.equal(fused(rms, x, arith="native"), fused(rms, x)) and not torch.equal(
        fused(f, x, arith="native"), fused(f, x)
    )
    assert torch.equal(fused(f, x, arith="native"), x * x + x)
    assert torch.equal(fused(f, x.bfloat16(), arith="native"), x.bfloat16() * x.bfloat16() + x.bfloat16())
    scale = ENGINE["scale"].program
    assert native_refusal(scale, [3e-8], [BF16, BF16]) == "" and "bf16" in native_refusal(scale, [1e-39], [BF16, BF16])


def test_native_gradients_are_native_too():
    f = Fused.of(lambda a, b: a * b / (a + 3.0), "element", "element")
    a, b = (torch.rand(500, generator=torch.Generator().manual_seed(i)).half().requires_grad_() for i in range(2))
    fused(f, a, b, arith="native").backward(torch.ones(500).half())
    right = evaluate(f.back.programs[0], [a.detach().float(), b.detach().float(), torch.ones(500)], rounded=F16)
    assert torch.equal(a.grad, right[0].half()) and torch.equal(b.grad, right[1].half())


def test_dropout_is_the_operators():
    drop, x = ENGINE["dropout"], torch.randn(8, 50).half()
    draw = Draw(Key.of(1, 2, Purpose.DROPOUT, "d"), 400, drop_limit(0.25))
    mine = fused(drop, x, constants=[1 / 0.75], draws=[draw])
    assert torch.equal(bits_of(mine), bits_of(ops.dropout(x, 0.25, p=F16, key=draw.key, start=400)))
    n = noise(draw.key, 0, 100).to(torch.int64) & 0xFFFFFFFF
    edge = Draw(draw.key, 0, int(n[7]))  # the comparison is ≥
    assert torch.equal(kept_mask(edge, (100,), "cpu"), n >= n[7])


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda f, x: fused(f, x, x), "2 operands for an expression of 1"),
        (lambda f, x: fused(f, x, arith="f16"), "allowed are"),
        (lambda f, x: fused(f, x, constants=[1, 2]), "2 constants"),
        (lambda f, x: fused(f, x, draws=[DRAW]), "1 noise streams"),
        (lambda f, x: fused(FUSED_ROW, x, x), r"operand 1 has shape \[4, 6\]; as row"),
        (lambda f, x: fused(f, x.int()), "no precision"),
    ],
)
def test_bad_calls_are_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call(ENGINE["scale"], torch.randn(4, 6))


FUSED_ROW = Fused.of(lambda x, w: x * w, "element", "row")


@pytest.mark.parametrize(
    "make",
    (
        lambda: torch.zeros(0, 4),
        lambda: torch.full((3, 4), math.nan),
        lambda: torch.randn(4, 3).t(),
        lambda: torch.randn(1, 4).expand(3, 4),
        lambda: torch.randn(4, 4)[1:],
        lambda: torch.randn(()),
    ),
)
def test_empty_nan_strided_expanded_offset_and_scalar_operands(make):
    x = make().half().requires_grad_()
    y = fused(ENGINE["scale"], x, constants=[3.0])
    y.backward(torch.ones_like(y))
    assert (
        y.shape == x.shape
        and torch.equal(y.detach().nan_to_num(), (x.detach() * 3).nan_to_num())
        and (x.grad == 3).all()
    )


def test_a_second_derivative_is_refused_and_nothing_is_counted_on_a_cpu():
    x = torch.randn(4).half().requires_grad_()
    with Trace() as trace:
        y = fused(ENGINE["silu"], x)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert trace.rows() == []


def test_compiled_in_one_graph_it_keeps_its_bits():
    torch._dynamo.reset()
    f = ENGINE["swiglu"]
    x, g = (torch.randn(6, 8, generator=torch.Generator().manual_seed(i)).half().requires_grad_() for i in range(2))
    step = torch.compile(
        lambda a, b: fused(f, a, b, p=F16, arith="native") + fused(f, a, b, p=F16), fullgraph=True, backend="aot_eager"
    )
    results = []
    for call in (step, lambda a, b: fused(f, a, b, p=F16, arith="native") + fused(f, a, b, p=F16)):
        y = call(x, g)
        results.append([y, *torch.autograd.grad(y, (x, g), torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    torch._dynamo.reset()


# ---------------------------------------------------------------- the engine's own
def test_the_engine_lists_every_kernel_text():
    names = {(name, v) for name, v, _ in engine_sources()}
    assert {name for name, _ in names} == set(engine_programs()) and len(names) == len(engine_sources())
    assert {("swiglu", ""), ("swiglu", "x"), ("swiglu", "a"), ("swiglu ←0,1", "x"), ("dropout ←0", "a")} <= names


@pytest.mark.parametrize("name", ("swiglu", "silu", "sigmoid", "tanh", "exp", "sqrt", "div", "gelu"))
def test_the_engines_expressions_mean_what_its_operators_mean(name):
    n = len(ENGINE[name].program.inputs)
    xs = [(torch.rand(400, generator=torch.Generator().manual_seed(i)) + 0.1).requires_grad_() for i in range(n)]
    y, right = fused(ENGINE[name], *xs, p=F32), getattr(ops, name)(*xs, p=F32)
    assert torch.allclose(y, right, rtol=1e-6, atol=1e-7)
    for a, b in zip(torch.autograd.grad(y.sum(), xs), torch.autograd.grad(right.sum(), xs)):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ("gelu", "swiglu"))
def test_the_slot_arith_reaches_the_operators(name):
    xs = [
        convert(torch.randn(2000, generator=torch.Generator().manual_seed(i)), F16)
        for i in range(1 + (name == "swiglu"))
    ]
    native, once = getattr(ops, name)(*xs, p=F16, arith="native"), getattr(ops, name)(*xs, p=F16)
    (right,) = evaluate(ENGINE[name].program, [x.float() for x in xs], rounded=F16)
    assert torch.equal(native, right.half()) and not torch.equal(native, once)
    wide = [x.float() for x in xs]
    assert torch.allclose(
        getattr(ops, name)(*wide, p=F32, arith="native"), getattr(ops, name)(*wide, p=F32), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
@pytest.mark.parametrize("compute", ("f16", "bf16"))
def test_the_profiles_slot_arith_decides_the_bits_of_a_feed_forward_layer(activation, compute):
    outputs = []
    for profile in (f"{compute}", f"{compute},arith=native"):
        layer = FeedForward(BlockSpec(16, 2, 64, activation=activation), PrecisionProfile.parse(profile), "ff")
        for i, w in enumerate(layer.parameters()):
            w.data.copy_(torch.randn(w.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
        x = convert(torch.randn(9, 16, generator=torch.Generator().manual_seed(9)), Precision.parse(compute))
        y = layer(x.requires_grad_())
        y.backward(torch.ones_like(y))
        outputs.append((y.detach(), x.grad))
    (y, g), (native, native_g) = outputs
    assert not torch.equal(y, native) and not torch.equal(g, native_g)
    assert torch.allclose(y.float(), native.float(), atol=0.2) and torch.allclose(g.float(), native_g.float(), atol=0.5)
