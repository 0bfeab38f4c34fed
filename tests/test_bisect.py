"""The first operator at fault is named, whichever it is; and a sound step has none.

Every position (all operators of a GPT of four layers, both passes) takes minutes: `python tests/test_bisect.py f16 bf16 …`
prints the table; here a keyed sample of it is tried."""
import sys
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch

from f16lab import optim, pointwise
from f16lab.attention import meant_attention
from f16lab.bisect import Bisection, Counted, Place, bisect, twin_outputs
from f16lab.capsule import Capsule, capsule_of, restored
from f16lab.config import TrainConfig
from f16lab.error_model import judge, to_bits
from f16lab.nn import named_parameters_once
from f16lab.operators import Seen, derivatives, watch_operators
from f16lab.precision import BF16, F16, F32, F64
from f16lab.ops import add, layer_norm, linear, softmax
from f16lab.profile import PRESETS
from f16lab.train import Trainer

KAHAN = "bf16_sr,rounding=kahan"
OTHERS = (KAHAN, "f16,rounding=kahan", "bf16_sr,optimizer=bf16", "bf16,grad=bf16", "f16,accum=f16", "f16;blocks.0:compute=bf16")


def config(profile: str, layers: int = 4, **changes) -> TrainConfig:
    shape = dict(channels=32, heads=2, layers=layers, context=16, batch=4, steps=20, lr=3e-3, device="cpu", data="markov", eval_every=0)
    return TrainConfig(profile).with_(**{**shape, **changes})


@cache
def boxed(profile: str, layers: int = 4, steps: int = 5, **changes) -> Capsule:
    """The capsule of an early step that updates."""
    run = Trainer(config(profile, layers, **changes))
    while run.step_number < steps: run.step()
    return capsule_of(run)


@cache
def positions(profile: str, **changes) -> tuple[Place, ...]:
    """Where a fault can be planted: each output of each operator, in both passes."""
    found = bisect(boxed(profile, **changes), twin=None)
    assert found.first is None and not found.record.skipped, found.words
    return tuple(row.place for row in found.rows if row.place.phase != "optimizer")


def planted(profile: str, place: Place, bits: int = 5, **changes) -> tuple[Bisection, bool]:
    """The search while the output at a place is rounded to five bits, and whether that changed it.

    The rule: where five bits hold the output exactly, nothing was planted, and the position is left out."""
    count, changed = Counted(), [False]
    count.micro_step = 0

    def fault(seen):
        places = count(seen)
        if place not in places: return None
        i, outputs = places.index(place), list(seen.outputs)
        outputs[i] = to_bits(seen.outputs[i], bits)
        changed[0] = not torch.equal(outputs[i], seen.outputs[i])
        return outputs

    with watch_operators(fault): return bisect(boxed(profile, **changes), twin=None, only_first=True), changed[0]


def named(profile: str, places: tuple[Place, ...], **changes) -> tuple[int, list[str]]:
    """How many planted faults were named right, and the others in words."""
    right, wrong = 0, []
    for place in places:
        found, changed = planted(profile, place, **changes)
        if not changed: continue
        if found.first is not None and found.first.place == place: right += 1
        else: wrong.append(f"{place.words} → {found.first and found.first.place.words}")
    return right, wrong


@pytest.mark.parametrize("profile", ["f16", "bf16"])
def test_a_planted_fault_is_named(profile):
    places = positions(profile)
    sample = places[len(profile) % 5 :: 41]
    right, wrong = named(profile, sample)
    assert right >= 3 and not wrong, wrong


@pytest.mark.parametrize("i, profile", list(enumerate([*PRESETS, *OTHERS])))
def test_a_sound_step_has_no_fault(i, profile):
    changes = (dict(dropout=0.1, accumulate=2), dict(norm="peri", kind="rms", activation="swiglu", position="rope"))[i % 2]
    found = bisect(boxed(profile, 1, 4, **changes), twin=None)
    phases = {row.place.phase for row in found.rows}
    assert found.first is None or found.record.skipped, found.words
    assert phases == {"forward", "backward", "optimizer"} or found.record.skipped


def test_watching_changes_no_bit():
    capsule = boxed("f16", 1, 3, dropout=0.1)
    plain, _ = restored(capsule)
    seen, _ = restored(capsule)
    plain.step()
    with watch_operators(lambda call: judge(call) and None): seen.step()
    assert plain.digest() == seen.digest()


# ---------------------------------------------------------------- the optimizer
@pytest.mark.parametrize("profile, role", [("f16", "theta"), ("f16", "m"), ("bf16", "master"), ("bf16", "theta"), ("bf16_sr", "v"),
                                           (KAHAN, "compensation"), ("all_f16", "m"), ("all_f16", "v"), ("f32", "theta")])
def test_a_fault_of_the_optimizer_is_named(profile, role, monkeypatch):
    capsule, update = boxed(profile, 1, 4), optim.update_one
    name = "blocks.0.mlp.fc.weight"

    def spoiled(optimizer, group, numbers, measure):
        update(optimizer, group, numbers, measure)
        for own, _, _, place in optim.own_pieces(group):
            if own == name:
                held = group.flat if role == "theta" else getattr(group, role)
                held.view(-1)[place] = to_bits(held.view(-1)[place], 4)

    monkeypatch.setattr(optim, "update_one", spoiled)
    first = bisect(capsule, twin=None).first
    assert first.place.phase == "optimizer" and first.place.layer == name and first.place.name == role, first.place


def test_a_wrong_backward_formula_is_an_error_like_any_other(monkeypatch):
    wrong = replace(pointwise.GELU, backward=lambda g, xs, *_: (g * 0.99,))
    monkeypatch.setattr(pointwise, "GELU", wrong)
    first = bisect(boxed("f16", 2, 3), twin=None).first
    assert (first.place.op, first.place.layer, first.place.phase) == ("gelu", "blocks.1.mlp", "backward")


# ---------------------------------------------------------------- twins, overflow, NaN
def test_the_twin_shows_what_came_in_with_the_inputs():
    capsule = boxed("f16", 2, 3)
    found = bisect(capsule, "f64")
    by = {row.place: row.judged for row in found.rows}
    first = next(row.judged for row in found.rows if row.place.op == "gather_rows")
    last = next(j for place, j in by.items() if place.op == "layer_norm" and place.layer == "ln_f" and place.phase == "forward")
    assert first.inherited == 0 and 1e-5 < last.inherited < 1e-2
    coarse = bisect(capsule, "f32")
    assert all(abs(a.judged.inherited - b.judged.inherited) < 1e-4 for a, b in zip(found.rows, coarse.rows) if a.place.phase != "optimizer")
    exact = bisect(boxed("f32", 2, 3), "f64")
    assert max(row.judged.inherited for row in exact.rows if row.place.phase != "optimizer") < 1e-4
    with pytest.raises(ValueError, match="f64, f32, or None"): bisect(capsule, "bf16")


def test_places_mean_the_same_in_any_precision():
    keys = [set(twin_outputs(boxed(profile, 2, 3), p)) for profile in ("f16", "bf16") for p in (F32, F64)]
    assert all(one == keys[0] for one in keys)


def test_an_overflow_is_named_with_its_operator():
    run = Trainer(config("f16,loss_scale=2^24"))
    capsule = capsule_of(run)
    assert run.step().skipped
    found = bisect(capsule)
    assert found.first.judged.overflowed and found.first.place.op == "head_cross_entropy" and found.record.skipped
    assert all(row.judged.overflowed == 0 for row in found.rows if row.place.phase == "forward")


def test_weights_that_are_not_finite_are_told_and_nobody_is_accused():
    run = Trainer(config("bf16_sr", 1))
    dict(named_parameters_once(run.model))["blocks.0.mlp.fc.weight"].detach()[0, 0] = float("nan")
    found = bisect(capsule_of(run))
    assert any("blocks.0.mlp.fc.weight is not finite" in note for note in found.notes) and found.first is None


# ---------------------------------------------------------------- the error model
def judged(call) -> list:
    """What the model says of the calls in `call()`."""
    kept = []
    with watch_operators(lambda seen: kept.extend(judge(seen)) and None): call()
    return kept


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e3])
@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
def test_no_false_alarm_on_hard_numbers(p, scale):
    g = torch.Generator().manual_seed(3)
    x, w = (torch.randn(48, 300, generator=g) * scale).to(p.dtype), torch.randn(64, 300, generator=g).to(p.dtype)
    cancel, bias = torch.cat([x, -x], 1), torch.randn(64, generator=g).to(p.dtype)
    w = w / 16
    calls = [lambda: linear(x, w, bias, p=p), lambda: linear(cancel, torch.cat([w, w], 1), p=p), lambda: softmax(x, p=p),
             lambda: layer_norm(x + 100, p=p), lambda: add(x, -x, p=p), lambda: linear(torch.ones(2, 20_000).to(p.dtype), torch.ones(3, 20_000).to(p.dtype) / 8, p=p)]
    for call in calls: assert not any(j.faulty for j in judged(call)), judged(call)


def tiled_backward(g, q, k, v, p):
    """Gradients of causal attention with the roundings of a fused backward, and its rounded output."""
    def low(x): return x.to(p.dtype).double()
    past = torch.ones(q.shape[-2], k.shape[-2]).tril() > 0
    scale = q.shape[-1] ** -0.5
    exact = torch.softmax((q @ k.mT * scale).masked_fill(~past, -torch.inf), -1)
    out = low(low(exact) @ v)
    ds = low(exact * (g @ v.mT - (g * out).sum(-1, keepdim=True)))
    return tuple(x.to(p.dtype) for x in (ds @ k * scale, ds.mT @ q * scale, low(exact).mT @ g)), out.to(p.dtype)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 30.0])
@pytest.mark.parametrize("p", [F16, BF16], ids=str)
def test_a_fused_backward_is_sound_and_a_coarser_one_is_not(p, scale):
    draw = torch.Generator().manual_seed(6)
    g, q, k, v = ((torch.randn(2, 3, 40, 16, generator=draw) * s).to(p.dtype) for s in (scale, 1, 1, 1))
    wide = tuple(x.double() for x in (g, q, k, v))

    def formula(xs, inner):
        return derivatives(lambda *a: (meant_attention(*a, True, p, inner),), xs[:1], xs[1:], (True,) * 3)

    def verdict(grads):
        return judge(Seen("attention", "", "backward", p, ("q", "k", "v"), (g, q, k, v), grads, formula, rounds=True))
    grads, out = tiled_backward(*wide, p)
    assert not any(j.faulty for j in verdict(grads)), verdict(grads)
    assert all(j.faulty for j in verdict(tuple(to_bits(x, p.mantissa_bits - 3) for x in grads)))


@pytest.mark.parametrize("p, lost", [(F16, 2), (BF16, 2), (F32, 9)])
def test_bits_too_few_are_seen(p, lost):
    g = torch.Generator().manual_seed(4)
    x, w = torch.randn(64, 256, generator=g).to(p.dtype), torch.randn(64, 256, generator=g).to(p.dtype)
    with watch_operators(lambda seen: [to_bits(seen.outputs[0], p.mantissa_bits - lost)]):
        assert all(j.faulty for j in judged(lambda: linear(x, w, p=p)))


@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
def test_one_wrong_element_is_seen(p):
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(64, 256, generator=g).to(p.dtype), torch.randn(64, 256, generator=g).to(p.dtype)

    def one(seen):
        y = seen.outputs[0].clone()
        y[7, 9] = y[7, 9] * 1.02
        return [y]

    with watch_operators(one): found, = judged(lambda: linear(x, w, p=p))
    assert found.worst > 1 and (found.rms < found.limit or p is F32)


if __name__ == "__main__":  # the whole table
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for text in sys.argv[1:] or PRESETS:
        right, wrong = named(text, positions(text))
        left_out = len(positions(text)) - right - len(wrong)
        print(f"{text:<16} {len(positions(text))} positions, {left_out} exact in five bits, {right} of {right + len(wrong)} named", *wrong[:5],
              sep="\n    ", flush=True)


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("profile", [*PRESETS, "f16,accum=f16"])
def test_a_sound_step_on_a_gpu_has_no_fault(profile):
    found = bisect(boxed(profile, 2, 4, device="cuda", channels=64, context=64), twin=None)
    assert found.first is None or found.record.skipped, found.words


@pytest.mark.gpu
@pytest.mark.parametrize("profile", ["f16", "bf16"])
def test_a_planted_fault_on_a_gpu_is_named(profile):
    right, wrong = named(profile, positions(profile, device="cuda")[::17], device="cuda")
    assert right >= 5 and not wrong, wrong
