"""A watch sees every cast and tensor of foreign code, changes no bit of it, and leaves nothing behind."""
import gc
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from f16lab.events import CastRow
from f16lab.intercept import CastCounts, CastWatch, Trail, is_written
from f16lab.ledgers import bill, tree
from f16lab.precision import F16
from f16lab.probes import histogram_of
from f16lab.strict import ImplicitPromotion
from f16lab.watching import is_compiled, range_rows, watch

HERE = f"tests/{Path(__file__).name}"


class Net(nn.Module):
    """A tied table, own code between layers, and a branch that is called twice."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.table, self.norm = nn.Embedding(20, width), nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for _ in range(2):
            x = x + self.body(self.norm(x))
        return self.head(x)


IDS = torch.arange(24).reshape(4, 6) % 20


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def losses(model, steps=20, dtype=torch.bfloat16, scale=1.0, clip=False):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=dtype is torch.float16)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        out.append(loss.item())
    return out


def global_hooks():
    m, o = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called")
    found = [dict(getattr(m, name)) for name in names]
    return [*found, *(dict(getattr(o, f"_global_optimizer_{w}_hooks")) for w in ("pre", "post"))]


def nothing_left(*modules):
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    parts = [m for root in modules for m in root.modules()]
    own = [h for m in parts for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    grads = [p._backward_hooks for root in modules for p in root.parameters()]
    return not modes and not any(global_hooks()) and not any(own) and not any(grads)


# ---------------------------------------------------------------- bits
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("settings", [{}, {"share": 4, "every": 3}, {"histograms": False}, {"ledger": False}], ids=str)
def test_twenty_steps_end_in_the_same_bits(dtype, settings):
    alone, seen = net(), net()
    expected = losses(alone, dtype=dtype, scale=2.0**10, clip=True)
    with watch(seen, **settings) as w:
        got = losses(seen, dtype=dtype, scale=2.0**10, clip=True)
    assert got == expected and w.take().steps == 20
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), seen.parameters()))
    assert nothing_left(seen)


def test_the_fast_path_of_an_encoder_layer_stays():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = layer(x)
        with watch(layer) as w:
            assert torch.equal(layer(x), expected)
    assert {h.layer for h in w.take().find(tensor="output")} == {""}  # torch's kernel ran past the parts


def test_generators_are_not_touched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    runs = []
    for watched in (False, True):
        torch.manual_seed(3)
        if watched:
            with watch(model):
                runs.append(model(torch.ones(8, 4)))
        else:
            runs.append(model(torch.ones(8, 4)))
    assert torch.equal(*runs)


# ---------------------------------------------------------------- nothing is left behind
class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.fc(x)
        raise RuntimeError("in the model")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_all_is_removed_after_an_error(error):
    model = net()
    with pytest.raises(error), watch(model):
        losses(model, 1)
        raise error("in the loop")
    assert nothing_left(model)


def test_a_module_that_fails_does_not_shift_the_paths():
    fails, model = Fails(), nn.Linear(4, 4)
    both = nn.ModuleDict({"fails": fails, "good": model})
    with watch(both, histograms=False) as w, torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="in the model"):
            fails(torch.ones(1, 4))
        model(torch.ones(2, 4))
    layers = [(r.layer, r.shape) for r in w.take().casts if r.operand == "mat1"]
    assert layers == [("fails.fc", (1, 4)), ("good", (2, 4))]


def test_a_pass_that_was_interrupted_does_not_shift_the_paths():
    class Stops(nn.Linear):
        def forward(self, x):
            if x.numel() == 3:
                raise KeyboardInterrupt
            return super().forward(x)

    model = nn.Sequential(nn.Linear(3, 3), Stops(3, 3))
    with watch(model, histograms=False) as w:
        with pytest.raises(KeyboardInterrupt), torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 3))
        w.take()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.ones(2, 3))
        y.sum().backward()
    found = {(r.layer, r.direction) for r in w.take().casts if r.shape == (3, 3)}
    assert found == {(layer, d) for layer in "01" for d in ("forward", "backward")}


def test_nothing_is_kept_alive():
    model, kept = net(), []
    model.body[1].register_forward_hook(lambda m, given, out: kept.append(weakref.ref(out)))
    watcher = watch(model)
    with watcher as w:
        losses(model, 2)
        gc.collect()
        assert kept and not any(r() is not None for r in kept), "an activation outlives its step"
        w.take()
    parts = [weakref.ref(m) for m in model.modules()] + [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert not any(r() is not None for r in parts), "a watch that is over keeps the model"


def test_a_backward_after_the_end_is_not_counted():
    model = nn.Linear(3, 3)
    with watch(model) as w:
        y = model(torch.ones(2, 3)).sum()
        w.take()
    y.backward()
    assert not w.take().histograms


# ---------------------------------------------------------------- histograms
def test_histograms_are_those_of_the_tensors():
    model, outputs = net(), {}
    for name, m in model.named_modules():
        m.register_forward_hook(lambda m, given, out, name=name: outputs.update({name: out.detach().clone()}))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with watch(model) as w:
        loss = F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
        loss.backward()
    seen = w.take()
    for name, p in weights.items():
        layer, _, own = name.rpartition(".")
        expected = histogram_of(p, layer, own, "forward")
        assert seen.find(layer, own) == [expected]
        grad, = seen.find(layer, f"{own}.grad")
        assert grad == histogram_of(dict(model.named_parameters())[name].grad, layer, f"{own}.grad", "backward")
    single = [h for h in seen.find(tensor="output") if h.layer in ("table", "head", "")]
    assert {h.layer for h in single} == {"table", "head"}  # what the root hands on is the head's output
    for h in single:
        assert h == histogram_of(outputs[h.layer], h.layer, "output", "forward")
    twice, = seen.find("body.1", "output")
    assert twice.elements == 2 * outputs["body.1"].numel()  # two calls, added up
    assert len({(h.layer, h.tensor) for h in seen.histograms}) == len(seen.histograms)


def test_a_tied_weight_is_counted_once_and_micro_steps_add_up():
    model = net()
    with watch(model) as w:
        for _ in range(3):
            F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
    seen = w.take()
    table, = [h for h in seen.histograms if h.elements == model.table.weight.numel() and not h.tensor.endswith("grad")]
    assert (table.layer, table.tensor) == ("table", "weight") and not seen.find("head", "weight")
    grad, = seen.find("table", "weight.grad")
    assert grad.elements == 3 * model.table.weight.numel()


def test_odd_values_and_types_are_counted_in_their_bins():
    class Odd(nn.Module):
        def forward(self, x):
            return {"a": x, "b": (x.half(), torch.tensor(3), None), "c": x.double()}

    x = torch.tensor([1.0, 0.0, -0.0, float("inf"), float("nan"), 1e-40])
    odd = Odd()
    with watch(odd) as w:
        odd(x), odd(torch.empty(0))
    seen = w.take()
    half, = seen.find(tensor="output.b.0")
    assert (half.zeros, half.infs, half.nans, half.elements, half.precision) == (3, 1, 1, 6, "f16")
    double, = seen.find(tensor="output.c")
    assert double.precision == "f64" and double.zeros == 2
    assert not seen.find(tensor="output.a")  # handed on untouched


def test_a_share_is_marked_as_one_and_every_skips_steps():
    model = net()
    with watch(model, share=4, every=2) as w:
        losses(model, 1)
        first = w.take()
        losses(model, 1)
        second = w.take()
    h, = first.find("body.0", "weight")
    assert h.size == model.body[0].weight.numel() and h.elements == h.size // 4
    assert first.casts and not second.casts and not second.histograms and second.steps == 1


def test_skipped_steps_run_without_a_mode_and_modes_of_others_stay_where_they_are():
    model, other = net(), CastWatch()
    depth = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, every=3) as w:
        seen = []
        for k in range(7):
            seen.append(len(depth()))
            if k == 3:  # in the middle of a mode of somebody else's
                with other:
                    optimizer.step()
                    assert depth()[-1] is other
            else:
                optimizer.step()
        assert seen == [1, 0, 0, 1, 1, 0, 1]
    assert nothing_left(model) and w.take().steps == 7


def test_the_loss_scale_is_taken_off_exactly():
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    with watch(model, scaler=scaler) as w:
        scaler.scale(F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())).backward()
    seen, plain = w.take(), net()
    with watch(plain) as w:
        F.cross_entropy(plain(IDS).flatten(0, 1), IDS.flatten()).backward()
    assert seen.scales == (128.0,)
    for a, b in zip(seen.unscaled(), w.take().histograms):
        assert (a.layer, a.tensor, a.first, a.counts, a.amax) == (b.layer, b.tensor, b.first, b.counts, b.amax)
    scaler._scale.fill_(64.0)
    with watch(model, scaler=scaler) as w:
        model(IDS)
        scaler._scale.fill_(32.0)
        model(IDS)
    with pytest.raises(ValueError, match="64.0, 32.0.*after each step"):
        w.take().unscaled()


def test_range_rows_put_overflow_first():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1e5)
        model.bias.fill_(1e-9)
    with watch(model) as w:
        model(torch.ones(1, 2))
    rows = range_rows(w.take().histograms, F16)
    assert [(r.tensor, r.overflow, r.flushed) for r in rows][-1] == ("bias", 0.0, 1.0)
    assert rows[0].overflow == 1.0 and rows[0].up < 0


# ---------------------------------------------------------------- the ledger
def counted_by_profiler(call):
    """Casts by torch's own profiler: an independent witness."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        call()
    return sum(e.count for e in p.key_averages() if e.key == "aten::_to_copy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_as_many_casts_as_the_profiler_counts(dtype):
    def step(model):
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
        loss.backward()

    expected, model = counted_by_profiler(lambda: step(net())), net()
    with watch(model) as w:
        step(model)
    assert sum(r.count for r in w.take().casts) == expected > 10  # a promotion, too, makes a tensor on a CPU


def test_rows_are_ledger_rows_with_layer_operator_and_line():
    model = net()
    with watch(model) as w:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(IDS)  # the line of no layer
        y.float().sum().backward()
    rows = w.take().casts
    assert all(isinstance(r, CastRow) for r in rows) and bill(rows)[0].row.bytes and tree(rows).count
    by = {(r.layer, r.op, r.operand, r.direction): r for r in rows}
    weight = by["body.0", "addmm", "mat2", "forward"]
    assert (weight.src, weight.dst, weight.shape, weight.reason) == ("f32", "bf16", (32, 16), "autocast")
    assert weight.bytes == weight.count * 32 * 16 * 6 and weight.count == 1  # autocast keeps the cast weight
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "x = x + self.body" in text)
    assert weight.line == f"{HERE}:{line}"
    back = by["body.0", "addmm", "mat2", "backward"]
    assert (back.src, back.dst, back.line, back.reason) == ("bf16", "f32", weight.line, "autocast")
    widened = [r for r in rows if r.op == "add" and r.reason == "promotion" and r.direction == "forward"]
    assert [(r.layer, r.src, r.dst, r.count) for r in widened] == [("", "bf16", "f32", 2)]


def test_a_written_cast_is_the_users_wherever_it_stands():
    x = torch.ones(3, 4)
    with CastWatch() as w, torch.autocast("cpu", torch.bfloat16):
        x.half().relu()
        x.to(
            torch.float16).abs()
        F.softmax(x.half(), dim=-1, dtype=torch.float64).sum()
        torch.mm(x.half(), x.half().t())
        with torch.autocast("cpu", enabled=False):
            x.bfloat16().neg()
    rows = w.rows()
    assert {r.reason for r in rows if r.dst == "f16"} == {"user"}
    narrow = {(r.reason, r.op, r.src) for r in rows if r.dst == "bf16"}
    assert narrow == {("autocast", "mm", "f16"), ("user", "neg", "f32")}


@pytest.mark.parametrize("text, expected", [
    ("x.half()", True), ("x.to(torch.float16)", True), ("f(\n x).type_as(\n y)", True), ("a.sum(dtype=d)", True),
    ("F.linear(x.half(), w)", False), ("half(x)", False), ("x.halves()", False), ("", False), ("x.float", False),
])
def test_written_casts_are_recognised(text, expected):
    assert is_written(text) is expected


def test_promotions_by_operator_and_none_for_numbers():
    half, single = torch.ones(2, 3, dtype=torch.float16), torch.ones(3)
    with CastWatch() as w:
        half + single, half * 2.0, half + torch.tensor(1.0), torch.where(half > 0, half, single)
        torch.cat([single.expand(2, 3), half]), torch.tensor(1.0, dtype=torch.float64) * half
    assert [(r.op, r.operand, r.src, r.dst) for r in w.rows() if r.reason == "promotion"] == [
        ("add", "self", "f16", "f32"), ("where", "self", "f16", "f32"), ("cat", "tensors.1", "f16", "f32")]


def test_a_copy_into_another_precision_is_a_cast():
    with CastWatch() as w:
        torch.zeros(4, dtype=torch.float16).copy_(torch.ones(4))
        torch.zeros(4).copy_(torch.ones(4))
        torch.zeros(4, dtype=torch.int32).copy_(torch.ones(4))
    assert [(r.op, r.reason, r.src, r.dst) for r in w.rows()] == [("copy", "storage", "f32", "f16")]


def test_strict_names_the_line():
    model = nn.Linear(3, 3)
    with pytest.raises(ImplicitPromotion, match=rf"{HERE}:\d+: add widens its f16 operand of shape \[1, 3\] to f32"):
        with watch(model, strict=True):
            model(torch.ones(1, 3)) + torch.ones(1, 3, dtype=torch.float16)
    assert nothing_left(model)
    with pytest.raises(ValueError, match="strict=True needs ledger=True"):
        watch(model, strict=True, ledger=False)


def test_recomputed_activations_count_as_forward_of_their_module():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    x = torch.ones(2, 4, requires_grad=True)
    with watch(model) as w:
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(lambda t: model[1](model[0](t)), x, use_reentrant=False)
        y.float().sum().backward()
    counts = {}
    for r in w.take().casts:
        if r.shape == (4, 4):  # the weights
            counts[r.layer, r.direction] = counts.get((r.layer, r.direction), 0) + r.count
    assert counts == {(layer, d): n for layer in "01" for d, n in (("forward", 2), ("backward", 1))}


def test_the_optimizer_is_a_phase_of_its_own():
    class Casts(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.copy_(p.data.half())

    model = nn.Linear(2, 2)
    with watch(model) as w:
        model(torch.ones(1, 2)).sum().backward()
        Casts(model.parameters(), 0.1).step()
        model.eval()(torch.ones(1, 2).half().float())
    phases = {(r.phase, r.dst) for r in w.take().casts}
    assert {("optimizer", "f16"), ("optimizer", "f32")} <= phases


def test_tensors_that_cannot_be_counted_are_told_and_disturb_nothing():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)

        def forward(self, ids):
            x = self.fc(self.table(ids))
            return torch.view_as_complex(x.reshape(-1, 2).contiguous()), x

    def grads(model):
        z, x = model(torch.tensor([1, 2]))
        (x.sum() + z.abs().sum()).backward()
        return model.table.weight.grad.to_dense(), model.fc.weight.grad

    torch.manual_seed(0)
    plain, seen = Odd(), None
    model = Odd()
    model.load_state_dict(plain.state_dict())
    with watch(model) as w:
        got = grads(model)
        with torch.inference_mode():
            model(torch.tensor([3]))
        model.fc(torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]))
        torch.func.vmap(model.fc)(torch.ones(3, 4))
        torch.func.grad(lambda x: model.fc(x).sum())(torch.ones(4))
    assert all(torch.equal(a, b) for a, b in zip(got, grads(plain)))
    seen = w.take()
    for words in ("nested and sparse tensors were not counted, such as table's weight.grad", "torch.func transforms"):
        assert any(words in note for note in seen.notes), seen.notes
    assert seen.find("fc", "weight.grad") and nothing_left(model)


def test_a_module_made_anew_in_each_step_keeps_one_name():
    model = nn.Linear(3, 3)
    with watch() as w:
        for _ in range(5):
            nn.MSELoss()(model(torch.ones(1, 3)), torch.ones(1, 3)).backward()
    assert {h.layer for h in w.take().find(tensor="output")} == {"Linear", "MSELoss"}


def test_what_is_kept_stays_bounded(monkeypatch):
    monkeypatch.setattr(CastCounts, "LIMIT", 10)
    model = nn.Linear(4, 4)
    with watch(model) as w:
        for n in range(1, 40):
            model(torch.ones(n, 4).half().float())
        assert len(w.mode.seen.counts) <= 10 and len(w.mode.seen.notes) <= 11 and len(w.mode.seen.waiting) <= 9
    assert any("casts are not listed" in note for note in w.take().notes)
    monkeypatch.setattr(Trail, "LIMIT", 5)
    trail = Trail()
    for n in range(100):
        trail.enter(str(n))
        y = torch.ones(1, requires_grad=True) * 2
        assert trail.of(y.grad_fn._sequence_nr()) == str(n)
        trail.leave()
    assert len(trail.starts) <= 11


# ---------------------------------------------------------------- which modules
def test_a_watch_without_modules_takes_every_root():
    model, second = net(), nn.Linear(4, 4)
    with watch() as w:
        losses(model, 1)
        with torch.autocast("cpu", torch.bfloat16):
            second(torch.ones(1, 4)), nn.Linear(4, 4)(torch.ones(1, 4))
    seen = w.take()
    assert seen.find("Net.body.0", "weight") and seen.find("Linear", "weight") and seen.find("Linear_2", "weight")
    assert {r.layer for r in seen.casts} >= {"Net.body.0", "Linear"} and seen.find("Net.body.0", "weight.grad")
    assert nothing_left(model, second)


def test_two_watches_see_their_own_modules():
    a, b = nn.Linear(2, 2), nn.Linear(3, 3)
    with watch(a) as wa, watch(b) as wb:
        a(torch.ones(1, 2)), b(torch.ones(1, 3))
    assert {h.elements for h in wa.take().find(tensor="weight")} == {4}
    assert {h.elements for h in wb.take().find(tensor="weight")} == {9}


def test_compiled_modules_are_refused_in_words():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(backend="eager")
    with pytest.raises(NotImplementedError, match="^1 is compiled by torch.compile.*before it is compiled"):
        watch(model)
    assert is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))
    with watch() as w, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remark about global hooks
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert any("compiled" in note for note in w.take().notes)


def test_what_is_no_module_and_bad_settings_are_refused():
    with pytest.raises(ValueError, match="not into function"):
        watch(net)
    for bad in ({"every": 0}, {"share": -1}):
        with pytest.raises(ValueError, match="give 1 or more"):
            watch(net(), **bad)


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
def test_a_gpu_run_keeps_its_bits_and_its_backward_casts_have_owners():
    def run(watched):
        torch.manual_seed(0)
        model, ids = Net(64).cuda(), IDS.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)

        def steps():
            for _ in range(20):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16):
                    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        if not watched:
            return steps(), model, None
        with watch(model, scaler=scaler) as w:
            steps()
        return None, model, w.take()

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        (_, plain, _), (_, model, seen) = run(False), run(True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))
    back = {r.layer for r in seen.casts if r.direction == "backward"}
    assert {"body.0", "body.2"} <= back and seen.steps == 20
    weight, = seen.find("body.0", "weight")
    assert weight.elements == model.body[0].weight.numel()
    grad, = seen.find("body.0", "weight.grad")
    assert grad.elements == 20 * weight.elements and nothing_left(model)
