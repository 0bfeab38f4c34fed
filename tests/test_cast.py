"""The door and its ledger: what is recorded, what is not, and that listening changes no bit."""

import pytest
import torch
from f16lab import cast as door
from f16lab import ops
from f16lab.cast import (
    Ledger,
    assert_no_casts,
    cast,
    collect_gradient,
    convert_recorded,
    grad_dtype_of,
    round_in_register,
)
from f16lab.device import open_device
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, Precision, bits_of, convert
from f16lab.rounding import Key, Purpose, convert_stochastic

open_device("cpu")
KEY = Key.of(7, 3, Purpose.USER, "demo")
each_precision = pytest.mark.parametrize("p", Precision, ids=str)


def rows(ledger: Ledger) -> list[tuple]:
    """A ledger without shapes and bytes."""
    return [(r.layer, r.op, r.operand, r.src, r.dst, r.direction, r.reason, r.count) for r in ledger.rows()]


# ---------------------------------------------------------------- value and gradient
@each_precision
@pytest.mark.parametrize("q", Precision, ids=str)
def test_forward_is_convert_and_backward_casts_back(p, q):
    x = convert(torch.tensor([[1.0, 1 / 3, -7e4], [2.0**-9, 0.0, 448.0]], dtype=torch.float64), p).requires_grad_()
    y = cast(x, q)
    assert torch.equal(bits_of(y.detach()), bits_of(convert(x.detach(), q)))
    g = convert(torch.tensor([[1.1, -3.0, 0.7], [100.0, 1e-3, 5.0]], dtype=torch.float64), q)
    y.backward(g)
    assert x.grad.dtype is p.dtype and torch.equal(bits_of(x.grad), bits_of(convert(g, p)))


@each_precision
def test_a_cast_to_the_same_precision_is_the_same_object(p):
    x = torch.ones(3, dtype=p.dtype, requires_grad=True)
    with assert_no_casts():
        assert (
            cast(x, p) is x
            and convert_recorded(x, p, "", "", "", "forward", "user") is x
            and round_in_register(x, p) is x
        )


def test_saturate_clamps_finite_overflow_only():
    x = torch.tensor([1e6, -1e6, float("inf"), float("nan"), 1.0], requires_grad=True)
    assert cast(x, F16, saturate=True).tolist()[:3] == [65504.0, -65504.0, float("inf")]
    assert cast(x, F16).tolist()[:3] == [float("inf"), -float("inf"), float("inf")]
    cast(x, E4M3, saturate=True)[:2].float().sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_accumulator_in_f16_is_rounded_and_widened_but_is_no_cast():
    with assert_no_casts():
        y = round_in_register(torch.tensor([1 + 2**-12, 70000.0]), F16)
    assert y.dtype is torch.float32 and y.tolist() == [1.0, float("inf")]


@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(p="f16"), "Precision.parse"),
        (dict(p=torch.float16), "must be a Precision"),
        (dict(rounding="up"), "allowed are"),
        (dict(rounding="stochastic"), "needs key"),
        (dict(key=KEY), "takes none"),
        (dict(x=torch.ones(2, dtype=torch.int32)), "int32"),
        (dict(x=torch.ones(2, dtype=torch.bool)), "bool"),
    ],
)
def test_bad_requests_are_refused_in_words(bad, words):
    request = {"x": torch.ones(2), "p": F16, **bad}
    with assert_no_casts(), pytest.raises(ValueError, match=words):
        cast(request.pop("x"), request.pop("p"), **request)


def test_integers_never_pass_the_door():
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.bool):
        with pytest.raises(ValueError, match="no precision"):
            convert_recorded(torch.ones(2, dtype=dtype), F64, "", "", "", "forward", "user")


# ---------------------------------------------------------------- stochastic
@pytest.mark.parametrize("p", (F16, BF16, E4M3, E5M2), ids=str)
def test_stochastic_rounding_is_keyed_and_its_gradient_is_not_rounded_so(p):
    x = torch.randn(4097, generator=torch.Generator().manual_seed(0))
    once = cast(x, p, rounding="stochastic", key=KEY)
    assert torch.equal(bits_of(once), bits_of(convert_stochastic(x, p, KEY)))
    with Ledger() as ledger:
        listened = cast(x, p, rounding="stochastic", key=KEY)
    assert torch.equal(bits_of(once), bits_of(listened)) and ledger.count == 1
    other = cast(x, p, rounding="stochastic", key=Key.of(7, 4, Purpose.USER, "demo"))
    assert not torch.equal(bits_of(once), bits_of(other))
    g = convert(torch.randn(4097), p)
    leaf = x.bfloat16().requires_grad_() if p is not BF16 else x.requires_grad_()
    cast(leaf, p, rounding="stochastic", key=KEY).backward(g)
    assert torch.equal(leaf.grad, convert(g, Precision.of(leaf)))


# ---------------------------------------------------------------- gradients of leaves
@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_a_half_leaf_collects_an_unrounded_f32_gradient(p):
    w = collect_gradient(torch.nn.Parameter(torch.ones(3, dtype=p.dtype)), F32)
    assert grad_dtype_of(w) is torch.float32 and grad_dtype_of(w * 1) is p.dtype
    for _ in range(3):
        (cast(w, F32) * (1 + 2**-20)).sum().backward()
    assert w.grad.dtype is torch.float32 and w.grad[0].item() == 3 * (1 + 2**-20)


def test_a_tied_leaf_adds_its_uses_in_its_gradient_precision():
    """2048 and 1 from two operators: an f16 sum would stay 2048."""
    w = collect_gradient(torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float16)), F32)
    x = torch.ones(1, 1, dtype=torch.float16)
    (ops.linear(x * 2048, w, p=F16) + ops.linear(x, w, p=F16)).sum().backward()
    assert w.grad.item() == 2049
    without = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float16))
    (ops.linear(x * 2048, without, p=F16) + ops.linear(x, without, p=F16)).sum().backward()
    assert without.grad.dtype is torch.float16 and without.grad.item() == 2048


def test_the_gradient_of_a_rounding_has_no_derivative():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(cast(x, F16).sum(), x, create_graph=True)


# ---------------------------------------------------------------- the ledger
def test_a_row_says_all_of_a_cast():
    x = torch.randn(2, 8, requires_grad=True)
    with Ledger(phase="eval") as ledger:
        cast(x, F16, layer="blocks.0.attn", op="linear", operand="weight", reason="operand").sum().backward()
    forward, backward = ledger.rows()
    assert (forward.phase, forward.layer, forward.op, forward.operand) == ("eval", "blocks.0.attn", "linear", "weight")
    assert (forward.shape, forward.src, forward.dst, forward.direction, forward.reason) == (
        (2, 8),
        "f32",
        "f16",
        "forward",
        "operand",
    )
    assert forward.count == backward.count == 1 and forward.bytes == backward.bytes == 16 * (4 + 2)
    assert (backward.shape, backward.src, backward.dst, backward.direction) == ((2, 8), "f16", "f32", "backward")


def test_equal_casts_are_one_row_and_phases_are_apart():
    x = torch.randn(4)
    with Ledger() as ledger:
        for phase in ("train", "optimizer", "train"):
            ledger.phase = phase
            cast(x, F16)
            cast(x, BF16)
    assert [(r.phase, r.dst, r.count) for r in ledger.rows()] == [
        ("train", "f16", 2),
        ("train", "bf16", 2),
        ("optimizer", "f16", 1),
        ("optimizer", "bf16", 1),
    ]
    assert ledger.count == 6 and ledger.bytes == 6 * 4 * 6
    ledger.clear()
    assert ledger.count == ledger.bytes == 0 and ledger.rows() == ()


def test_ledgers_nest_and_each_counts_for_itself():
    x = torch.randn(4)
    with Ledger() as outer:
        cast(x, F16)
        with Ledger("eval") as inner:
            cast(x, BF16)
        cast(x, F16)
    cast(x, F16)
    assert [(r.phase, r.dst, r.count) for r in outer.rows()] == [("train", "f16", 2), ("train", "bf16", 1)]
    assert [(r.phase, r.dst, r.count) for r in inner.rows()] == [("eval", "bf16", 1)]


def test_a_ledger_can_be_opened_again_and_goes_on():
    ledger, x = Ledger(), torch.randn(4)
    for _ in range(2):
        with ledger:
            cast(x, F16)
    assert ledger.count == 2


def test_nobody_listening_keeps_nothing(monkeypatch):
    """The bookkeeping is not even entered; and an exception inside a block closes the ledger too."""

    def never(*_):
        raise AssertionError("somebody was told")

    monkeypatch.setattr(door, "_tell", never)
    x = torch.randn(4, requires_grad=True)
    cast(x, F16).sum().backward()
    cast(x, F16, rounding="stochastic", key=KEY)
    monkeypatch.undo()
    with pytest.raises(KeyError), Ledger() as ledger:
        cast(x, F16)
        raise KeyError
    cast(x, F16)
    assert ledger.count == 1 and door._listeners == ()


def test_a_backward_in_another_thread_names_its_layer():
    """Layer and operator travel with the operator, not with the thread that happens to run."""
    import threading

    x = torch.randn(3, 4, dtype=torch.float16, requires_grad=True)
    y = ops.softmax(x, p=F16, layer="blocks.1.attn").sum()
    with Ledger() as ledger:
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert ledger.count and {(r.layer, r.op, r.direction) for r in ledger.rows()} == {
        ("blocks.1.attn", "softmax", "backward")
    }


def test_what_a_half_linear_layer_casts():
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((5, 3), (4, 3), (4,)))
    with Ledger() as ledger:
        ops.linear(x, w, b, p=F16, out=F32, layer="mlp.fc").backward(torch.ones(5, 4))
    here = ("mlp.fc", "linear")
    assert rows(ledger) == [
        *((*here, n, "f32", "f16", "forward", "operand", 1) for n in ("x", "weight", "bias")),
        *((*here, n, "f16", "f32", "forward", "boundary", 1) for n in ("x", "weight", "bias")),
        (*here, "grad", "f32", "f16", "backward", "operand", 1),
        (*here, "grad", "f16", "f32", "backward", "boundary", 1),
        *((*here, n, "f16", "f32", "backward", "boundary", 1) for n in ("x", "weight")),
        *(
            (*here, n, *way, 1)
            for n in ("x", "weight", "bias")
            for way in (("f32", "f16", "backward", "boundary"), ("f16", "f32", "backward", "storage"))
        ),
    ]
    by_operand = {(r.operand, r.direction): r.shape for r in ledger.rows()}
    assert by_operand["weight", "backward"] == (4, 3) and by_operand["grad", "backward"] == (5, 4)


def test_the_gate_lists_offenders_and_lets_other_errors_pass():
    with assert_no_casts() as ledger:
        cast(torch.ones(2), F32)
    assert ledger.count == 0
    with pytest.raises(AssertionError) as caught, assert_no_casts():
        for _ in range(3):
            cast(torch.ones(3, 4), F16, layer="blocks.2.attn", op="softmax", operand="scores", reason="operand")
    text = str(caught.value)
    assert text.startswith("3 casts") and "3× blocks.2.attn softmax(scores) f32→f16 [3, 4] forward, operand" in text
    with pytest.raises(KeyError), assert_no_casts():
        cast(torch.ones(2), F16)
        raise KeyError
    assert door._listeners == ()


# ---------------------------------------------------------------- looking changes nothing
def train(p: Precision, steps: int = 50, listen: bool = False) -> list[torch.Tensor]:
    """A small language model, `steps` of gradient descent: every weight and loss it passed through."""
    g, dtype = torch.Generator().manual_seed(0), p.dtype
    shapes = {"wte": (11, 8), "qkv": (24, 8), "proj": (8, 8), "fc": (16, 8), "back": (8, 16), "ln": (8,)}
    w = {
        n: collect_gradient(torch.nn.Parameter((torch.randn(s, generator=g) * 0.3).to(dtype)), F32)
        for n, s in shapes.items()
    }
    seen = []
    for _ in range(steps):
        ids = torch.randint(0, 11, (2, 7), generator=g)
        ledger = Ledger()
        if listen:
            ledger.__enter__()
        x = ops.gather_rows(w["wte"], ids[:, :-1], p=p)
        h = ops.layer_norm(x, w["ln"], p=F32)
        q, k, v = ops.linear(h, w["qkv"], p=p).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = ops.attention(q, k, v, p=p, stable=F32).transpose(1, 2).flatten(2)
        x = ops.add(x, ops.linear(y, w["proj"], p=p), p=p)
        x = ops.add(x, ops.linear(ops.gelu(ops.linear(x, w["fc"], p=p), p=p), w["back"], p=p), p=p)
        loss = ops.head_cross_entropy(x, w["wte"], ids[:, 1:], p=p, out=F32, weight=1 / 12, scale=64.0)
        loss.value.backward()
        for parameter in w.values():
            with torch.no_grad():
                parameter.copy_(convert(parameter.float() - parameter.grad / 640, p))
            parameter.grad = None
        if listen:
            ledger.__exit__()
            assert bool(ledger.count) == (p is not F32)
        seen += [loss.recorded, *(parameter.detach().clone() for parameter in w.values())]
    return seen


@pytest.mark.parametrize("p", (F32, F16, BF16), ids=str)
def test_fifty_steps_are_the_same_bits_with_and_without_a_ledger(p):
    alone, watched = train(p), train(p, listen=True)
    assert len(alone) == 50 * 7 and all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert alone[-7] < 0.98 * alone[0]  # it did learn
