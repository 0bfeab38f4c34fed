"""Looking changes nothing: runs with probes, and what probes see of them."""
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from train_runs import KAHAN, small, source, trainer

from f16lab.cast import Ledger, assert_no_casts, convert_recorded
from f16lab.config import PROBED, TrainConfig
from f16lab.grads import FlatLayout
from f16lab.ledgers import bill, cast_budget, check_budget, compared, hints, timed_casts, tree
from f16lab.hooks import ModuleHooks
from f16lab.looking import FlatSample, Look, RunProbe, SampleTaker, find, looking_cost
from f16lab.mirror import Mirrors, as_operand
from f16lab.nn import named_parameters_once
from f16lab.origin import Explained, Traced, find_origin, probed
from f16lab.precision import F16, F32, Precision
from f16lab.probes import ROW, DeviceTally, Tally, histogram_of, sampled, what_if
from f16lab.profile import PRESETS
from f16lab.strict import ImplicitPromotion, strict
from f16lab.train import Trainer, evaluate, steps

STEPS = 50
EXACT, SAMPLED = Look(share=1, every_micro=True), Look()


def hooked(model: nn.Module) -> list[str]:
    """Modules that still have a hook."""
    return [path for path, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]


# ---------------------------------------------------------------- not one bit
@pytest.mark.parametrize("profile", ["f32", "f16", "bf16", "all_f16", "master_weights", KAHAN])
def test_fifty_steps_with_and_without_probes_are_the_same_bits(profile):
    changes = dict(accumulate=2, dropout=0.1, steps=STEPS, meters_every=7)
    plain, looked = trainer(profile, **changes), trainer(profile, **changes)
    rest = [plain.step() for _ in range(STEPS)]
    with RunProbe(looked, SAMPLED): records = [looked.step() for _ in range(STEPS // 2)]
    with RunProbe(looked, replace(EXACT, every=4)): records += [looked.step() for _ in range(STEPS - STEPS // 2)]
    assert looked.digest() == plain.digest() and not hooked(looked.model) and looked.probe is None
    same = lambda rs: [(r.loss, r.grad_norm, r.loss_scale, r.skipped, r.casts) for r in rs]  # noqa: E731
    assert repr(same(records)) == repr(same(rest))


def test_probes_go_away_even_when_a_step_fails():
    t = trainer("f16")
    t.loss = None
    with pytest.raises(TypeError), RunProbe(t): t.step()
    assert not hooked(t.model) and t.probe is None
    with RunProbe(t), pytest.raises(ValueError, match="has a probe already"): RunProbe(t).__enter__()


def test_a_compiled_model_is_left_as_it_is():
    t = trainer("f32", compile="aot_eager")
    with pytest.warns(UserWarning, match="left as it is"): probe = RunProbe(t)
    with probe:
        assert not hooked(t.model)
        names = {h.tensor for _ in range(4) for h in t.step().histograms}
    assert "weight.grad" in names and not any(name.startswith("output") for name in names)


# ---------------------------------------------------------------- what is seen
@pytest.mark.parametrize("changes", [{}, dict(data="digits", model="mlp"), dict(data="digits", model="cnn")],
                         ids=["gpt", "mlp", "cnn"])
def test_every_layer_in_two_steps_every_weight_in_four_every_output_in_eight(changes):
    images = dict(batch=16, device="cpu", eval_every=0, steps=20, lr=1e-3)
    if changes: t = Trainer(TrainConfig("f16").with_(**changes, **images))
    else: t = trainer("f16", layers=2)
    with RunProbe(t): seen = [{(h.layer, h.tensor) for h in t.step().histograms} for _ in range(16)]
    layers = {name.rpartition(".")[0] for name, _ in named_parameters_once(t.model)}
    for a, b in zip(seen, seen[1:]): assert layers <= {layer for layer, _ in a | b}
    for i in range(9): assert set().union(*seen[i : i + 8]) == set().union(*seen), "nothing is seen more rarely"
    for i in range(5):
        four = set().union(*seen[i : i + 4])
        for name, _ in named_parameters_once(t.model):
            layer, _, tensor = name.rpartition(".")
            assert {(layer, tensor + end) for end in ("", ".grad", ".update", ".m", ".v")} <= four


def test_exact_counts_are_those_of_the_tensors():
    t = trainer("f16", accumulate=2)
    before = {name: p.detach().clone() for name, p in t.optimizer.params.items()}
    with RunProbe(t, EXACT): record = t.step()
    found = {(h.layer, h.tensor): replace(h, phase="", layer="", tensor="tensor") for h in record.histograms}
    assert all(h.size == 0 for h in found.values())
    for name, p in t.optimizer.params.items():
        layer, _, tensor = name.rpartition(".")
        assert found[layer, tensor] == histogram_of(before[name])
        assert found[layer, f"{tensor}.grad"] == histogram_of(p.grad)
        assert found[layer, f"{tensor}.update"].counts == histogram_of(p.detach().float() - before[name].float()).counts
    for group in t.optimizer.buffers:
        for name in group.layout.names:
            layer, _, tensor = name.rpartition(".")
            for role in ("m", "v"):
                assert found[layer, f"{tensor}.{role}"] == histogram_of(group.layout.view(getattr(group, role), name))


def test_outputs_of_the_last_micro_step_or_of_all():
    t, c = trainer("f32", accumulate=3), small()
    with RunProbe(t, Look(("output", "output_grad"), share=1)): last = t.step().histograms
    with RunProbe(t, EXACT): every = t.step().histograms
    tokens = c.data.batch * c.model.context
    for layer, width in (("blocks.0.attn.qkv", 96), ("blocks.0.mlp.fc", 128)):
        for tensor in ("output", "output.grad"):
            assert find(last, layer, tensor)[0].elements == tokens * width
            assert find(every, layer, tensor)[0].elements == 3 * tokens * width
    with RunProbe(t, EXACT):
        evaluate(t)
        again = find(t.step().histograms, "blocks.0.mlp.fc", "output")[0]
    assert again.elements == 3 * tokens * 128, "evaluation is not in it"


def test_samples_are_keyed_by_the_step_and_never_overlap_with_padding():
    tables = []
    for _ in range(2):
        t = trainer("f16")
        with RunProbe(t): tables.append([tuple(t.step().histograms) for _ in range(3)])
    assert tables[0] == tables[1]
    sizes = {name.rpartition(".")[0]: p.numel() for name, p in t.optimizer.params.items() if name.endswith("weight")}
    for h in (h for table in tables[0] for h in table if h.tensor == "weight"):
        assert h.elements <= sizes[h.layer] and h.size in (0, sizes[h.layer])
        assert (h.size or h.elements == sizes[h.layer])


@pytest.mark.parametrize("sizes", [(1, 127, 128, 129, 2047, 2048, 2049, 5000), (1024,) * 9])
def test_sixteen_keys_see_every_number_once(sizes):
    layout = FlatLayout(tuple(f"t{i}" for i in range(len(sizes))), tuple((n,) for n in sizes))
    sample, rows, seen = FlatSample(layout, 16, turns=1), [], [0] * len(sizes)
    for key in range(16):
        pick = sample.pick(key + 160, 0)
        rows += pick.rows.tolist()
        for i, n, padding in zip(pick.tensors, pick.counts, pick.padding): seen[i] += n * ROW - padding
    small_ones = [n for n in sizes if -(-n // 128) < 16]
    assert seen == [n * (16 if n in small_ones else 1) for n in sizes]
    assert len(set(rows)) == sum(-(-n // 128) for n in sizes)


def test_an_exact_look_counts_as_many_numbers_in_every_step():
    t = Trainer(small("f16", accumulate=2), source())
    with RunProbe(t, EXACT): records = [t.step() for _ in range(4)]
    counted = [{(h.phase, h.layer, h.tensor): h.elements for h in r.histograms} for r in records]
    assert counted[0] == counted[1] == counted[2] == counted[3] and not any(r.skipped for r in records)


def test_the_tally_of_a_device_counts_the_same():
    """Its kernels count as their reference does, which counts here."""
    tables = []
    for tally in (Tally(compiled=False), DeviceTally()):
        t = Trainer(small("f16", accumulate=2), source())
        with RunProbe(t, EXACT) as probe:
            probe.tally, probe.direct = tally, False
            tables.append([{(h.phase, h.layer, h.tensor): h for h in t.step().histograms} for _ in range(3)])
    assert tables[0] == tables[1]


def test_a_skipped_step_has_no_update():
    t = trainer("f16,loss_scale=2^24", lr=1e-3)
    with RunProbe(t, Look(share=1)): record = t.step()
    assert record.skipped and not any(h.tensor.endswith("update") for h in record.histograms)
    assert any(h.infs or h.nans for h in record.histograms if h.tensor.endswith("grad"))


def test_lost_updates_are_zeros_of_the_update():
    t = trainer("bf16_sr,rounding=nearest", lr=1e-6, meters_every=1)
    with RunProbe(t, Look(("update",), share=1)): record = t.step()
    stats = {s.name: s for s in record.tensors}
    for h in record.histograms:
        name = f"{h.layer}.{h.tensor.removesuffix('.update')}"
        assert math.isnan(stats[name].lost) or h.zeros / h.elements >= stats[name].lost - 1e-9


def test_cadence_and_kinds_of_a_recipe():
    t = Trainer(small("f16", probe_every=3, probe_kinds="grad, v", probe_share=1), source())
    with probed(t): records = [t.step() for _ in range(7)]
    assert [bool(r.histograms) for r in records] == [True, False, False] * 2 + [True]
    assert {h.tensor.rpartition(".")[2] for h in records[0].histograms} == {"grad", "v"}
    with pytest.raises(ValueError, match="probe_kinds='grads'"): small(probe_every=1, probe_kinds="grads")
    with pytest.warns(UserWarning, match="probe_share=4 has no effect"): small(probe_share=4)
    with pytest.warns(UserWarning, match="probe_every has no effect here"):
        next(steps(Trainer(small(probe_every=1, steps=1), source())))
    assert set(Look().kinds) == set(PROBED)


def test_hooks_see_any_module_and_every_container():
    class Odd(nn.Module):
        def forward(self, x): return {"a": x * 2, "b": [x + 1, torch.arange(3)]}
    net, seen = nn.Sequential(nn.Linear(3, 3), Odd()), []
    with ModuleHooks(net, lambda *what: seen.append(what[:3])):
        out = net(torch.ones(2, 3))
        (out["a"].sum() + out["b"][0].sum()).backward()
        with torch.no_grad(): net(torch.ones(2, 3))
    of_odd = {name for _, path, name in seen if path == "1"}
    assert of_odd == {"output.a", "output.b.0", "output.a.grad", "output.b.0.grad"}
    assert len([1 for what in seen if what[2] == "output"]) == 1 and not hooked(net)


class Changing(nn.Module):
    """Returns another container, or another kind of tensor, each time."""

    def __init__(self):
        super().__init__()
        self.returned = iter(())

    def forward(self, x): return next(self.returned)(x)


def test_a_module_that_returns_something_else_later_is_seen_all_the_same():
    class Turns:
        def turn(self, number): return True, True
        def taker(self, phase, path, name, x): return lambda x: seen.append((phase, name))
    net, seen = nn.Sequential(Changing()), []
    ways = [lambda x: (x * 2, x * 3), lambda x: x * 2, lambda x: (x * 2,), lambda x: {"a": x * 2},
            lambda x: (x * 2, x * 3, x * 4), lambda x: (x * 2, torch.arange(3)), lambda x: (x * 3, x * 2)]
    told = [[("forward", "output.0"), ("forward", "output.1"), ("backward", "output.0.grad"),
             ("backward", "output.1.grad")], ["output"], ["output.0"], ["output.a"],
            ["output.0", "output.1", "output.2"], ["output.0"], ["output.0", "output.1"]]
    net[0].returned = iter(ways)
    with ModuleHooks(net, lambda phase, path, name, x: seen.append((phase, name)), turns=Turns()) as hooks:
        for names in told:
            seen.clear()
            hooks.attend(True)
            leaves = torch.utils._pytree.tree_leaves(net(torch.ones(2, 3, requires_grad=True)))
            sum(x.sum() for x in leaves if x.is_floating_point()).backward()
            hooks.settle()
            both = [] if isinstance(names[0], tuple) else [pair for n in names for pair in (("forward", n), ("backward", f"{n}.grad"))]
            assert sorted(seen) == sorted(both or names)
    assert not hooked(net)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_module_that_is_called_often_is_counted_as_often(calls):
    class Turns:
        def turn(self, number): return True, True
        def taker(self, phase, path, name, x): return lambda x: seen.append((phase, name))
    class Often(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            for _ in range(calls): x = self.layer(x)
            return x * 2
    net, seen = Often(), []
    with ModuleHooks(net, lambda phase, path, name, x: seen.append((phase, name)), turns=Turns()) as hooks:
        for _ in range(3):
            seen.clear()
            for _ in range(2):  # micro-steps
                hooks.attend(True)
                net(torch.ones(2, 3)).sum().backward()
            hooks.settle()
            assert sorted(seen) == [("backward", "output.grad")] * 2 * calls + [("forward", "output")] * 2 * calls


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.bfloat16(), lambda x: x[:7], lambda x: x.transpose(0, 1),
                                    lambda x: x[3:][:, :, ::2], lambda x: torch.cat([x, x])[1:65]])
@pytest.mark.parametrize("key", [0, 5, 16**5 + 3])
def test_a_taker_takes_the_rows_that_a_sample_has(key, change):
    def see(phase, path, name, x): tally.add((phase, path, name, Precision.of(x).tag, 0), sampled(x, 16, key + len(path)))
    tally, label = Tally(compiled=False), ("forward", "blocks.0", "output", "f32", 64 * 6 * 8)
    probe = SimpleNamespace(look=Look(), key=key, tally=tally, see=see)
    taker, x = SampleTaker(probe, label, torch.empty(64, 6, 8)), change(torch.randn(64, 6, 8))
    taker(x)
    (got,), n = tally.table(), x.numel()
    see(*label[:3], x)
    assert replace(got, size=0) == tally.table()[0] and (got.elements < n / 8 or n < 2 * 16 * x.shape[-1])


@pytest.mark.parametrize("inplace", [False, True])
def test_a_tensor_is_counted_as_it_was_when_it_was_made(inplace):
    net, tally = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace)), Tally(compiled=False)
    x = torch.randn(64, 4)
    with torch.no_grad(): expected = net[0](x)
    with ModuleHooks(net, lambda phase, path, name, t: tally.add((phase, path, name, "f32", 0), t)):
        net(x).sum().backward()
    seen = {(h.layer, h.tensor): h for h in tally.table()}
    assert seen["0", "output"].counts == histogram_of(expected).counts and seen["0", "output"].zeros == 0


def test_a_cost_is_a_share_of_a_step():
    costs = looking_cost(small(), [None, Look()], steps=3, source=source(), warm=1)
    assert len(costs) == 2 and all(c.seconds > 0 and c.added > -1 for c in costs)


# ---------------------------------------------------------------- who overflowed
@pytest.mark.parametrize("layer, phase", [("blocks.0.attn.qkv", "forward"), ("blocks.0.mlp.fc", "forward"),
                                          ("blocks.0.mlp.proj", "backward")])
def test_the_layer_whose_product_overflows_is_named(layer, phase):
    t, events = trainer("f16"), []
    with torch.no_grad(): dict(named_parameters_once(t.model))[f"{layer}.weight"].fill_(3e4)[:, ::2].neg_()
    t.bus.subscribe(events.append)
    before = {name: x.clone() for name, x in t.state().tensors.items()}
    with Explained(t): record = t.step()
    assert record.skipped and all(torch.equal(x, before[name]) for name, x in t.state().tensors.items())
    words = [e.text for e in events if getattr(e, "kind", "") == "overflow"]
    assert len(words) == 1 and f"made by {layer}" in words[0] and phase in words[0]
    grads = [p.grad.clone() for p in t.optimizer.params.values()]
    find_origin(t, record)
    assert all(torch.equal(a.isfinite(), p.grad.isfinite()) for a, p in zip(grads, t.optimizer.params.values()))
    assert not hooked(t.model)


def test_an_origin_between_modules_and_none_at_all():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x): return self.b(self.a(x) / 0)
    with Traced(Between()) as seen: seen.model(torch.ones(1, 2))
    assert seen.origin().producer == "code before b in the model"
    with Traced(nn.Sequential(nn.Linear(2, 2))) as seen: seen.model(torch.ones(1, 2)).sum().backward()
    assert seen.origin() is None and not hooked(seen.model)


def test_a_gradient_that_nobody_asked_for_is_no_trouble():
    """A backward may hand over None: autograd then calls hooks with it."""
    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, a, b): return a * 2

    class Halves(nn.Module):
        def forward(self, x): return Split.apply(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.halves = nn.Linear(2, 2), Halves()

        def forward(self, x): return self.halves(self.a(x))[0]
    with Traced(Model()) as seen: seen.model(torch.full((1, 2), 1e38) * 10).sum().backward()
    assert seen.origin({"a.weight": seen.model.a.weight.grad, "a.bias": None}).producer == "code before a in the model"


# ---------------------------------------------------------------- ledgers
def run_casts(mirrors: bool, n: int = 4):
    t = Trainer(small("master_weights", accumulate=n, mirrors=mirrors), source())
    records = [t.step() for _ in range(3)]
    return t, [r for r in records[-1].casts if r.phase == "train"]


def test_a_bill_and_a_tree_lose_nothing():
    _, rows = run_casts(False)
    lines, root = bill(rows), tree(rows)
    assert sum(line.row.bytes for line in lines) == root.bytes == sum(r.bytes for r in rows)
    assert root.count == sum(r.count for r in rows) == sum(n.count for n in root.below.values())
    assert [line.running for line in lines] == sorted(line.running for line in lines)
    assert lines[-1].running == pytest.approx(1)
    timed = bill(rows, timed_casts(rows, repeats=1))
    assert all(line.seconds > 0 for line in timed) and timed[0].seconds == max(line.seconds for line in timed)


def test_hints_are_about_casts_that_are_there():
    _, rows = run_casts(False)
    found = hints(rows)
    assert {h.kind for h in found} >= {"weight cast again", "round trip", "widened to be narrowed"}
    assert [h.saves for h in found] == sorted((h.saves for h in found), reverse=True)
    assert all(0 < h.saves <= sum(r.bytes for r in rows) for h in found)
    again = [h for h in found if h.kind == "weight cast again"]
    inside = {f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")}
    assert {h.layer for h in again} == {*inside, "lm_head"}
    assert hints([]) == []


def test_mirrors_change_the_bill_and_no_bit():
    (plain, before), (mirrored, after) = run_casts(False), run_casts(True)
    mend = compared(before, after)
    assert plain.digest() == mirrored.digest() and mend.weights == (20, 5) and mend.bytes[1] < mend.bytes[0]
    assert not [h for h in hints(after) if h.kind == "weight cast again"] and mirrored.mirrors.kept == {}


def test_a_mirror_never_outlives_a_change():
    w, record = nn.Parameter(torch.ones(4)), ("l", "linear", "weight", "forward", "operand")
    with Mirrors() as mirrors:
        a = as_operand(w, F16, *record)
        assert as_operand(w, F16, *record) is a and mirrors.reused == 1
        with torch.no_grad(): w.add_(1)
        assert as_operand(w, F16, *record)[0] == 2 and mirrors.reused == 1
    with Ledger() as ledger: as_operand(w, F16, *record), as_operand(w, F16, *record)
    assert ledger.count == 2, "closed: every use casts"


@pytest.mark.parametrize("changes", [dict(profile="f16"), dict(profile="master_weights", accumulate=1)])
def test_mirrors_without_effect_warn(changes):
    with pytest.warns(UserWarning, match="mirrors=True has no effect"):
        TrainConfig().with_(mirrors=True, **{"accumulate": 2, **changes})


def test_a_budget_names_the_offenders():
    def casts(n):
        for i in range(n): convert_recorded(torch.ones(8), F16, f"l{i}", "linear", "x", "forward", "operand")

    with cast_budget(casts=3, bytes=3 * 48): casts(3)
    with pytest.raises(AssertionError, match="3 casts, allowed are 2(.|\n)*l0 linear"), cast_budget(casts=2): casts(3)
    with Ledger() as ledger: casts(2)
    with pytest.raises(AssertionError, match="96 bytes, allowed are 95"): check_budget(ledger.rows(), bytes=95)
    with pytest.raises(ZeroDivisionError), cast_budget(casts=0): casts(1), 1 / 0
    with assert_no_casts(): convert_recorded(torch.ones(2), F32, "", "x", "x", "forward", "user")


# ---------------------------------------------------------------- strict
@pytest.mark.parametrize("profile", PRESETS)
def test_the_engine_promotes_nothing_by_accident(profile):
    t = trainer(profile, accumulate=2, meters_every=1, steps=3)
    with warnings.catch_warnings(), strict():
        warnings.simplefilter("ignore")
        t.step(), evaluate(t), t.step()


def test_strict_names_the_line_and_leaves_the_rest_alone():
    x, y = torch.ones(3).half(), torch.ones(3)
    for mix in (lambda: x + y, lambda: torch.where(x > 0, x, y), lambda: x.mul_(y), lambda: torch.cat([x, y])):
        with pytest.raises(ImplicitPromotion, match="test_probes_run.py:[0-9]+: .* mixes f16 and f32"), strict(): mix()
    with strict():
        assert (x + 1.5 * x * torch.tensor(2.0)).dtype is torch.float16
        y.add_(x), y.copy_(x), x.copy_(y), torch.arange(3) + x
    assert (x + y).dtype is torch.float32


def test_what_if_of_a_run_answers_for_another_scale():
    t = trainer("f16")
    with RunProbe(t, Look(("grad",), share=1)): record = t.step()
    h = next(h for h in record.histograms if h.tensor == "weight.grad")
    unscaled = t.optimizer.params[f"{h.layer}.weight"].grad / record.loss_scale
    told = what_if(h, F16, 1 / record.loss_scale)
    assert told.flushed == pytest.approx(((unscaled.half() == 0) & (unscaled != 0)).double().mean().item(), abs=1e-9)
    assert Precision.parse(h.precision) is F32
