"""Flat layouts, gradient buffers, the global norm, clipping, loss scale, outlier detector and the decision of a step."""
import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from f16lab.cast import cast
from f16lab.data import micro_steps
from f16lab.grads import (BLOCK, FlatLayout, GradBuffer, GradStats, LossScale, OutlierDetector, StepGate, TooManySkips,
                          block_square_sums, clip_factor, f32, first_nonfinite, gate_from_state, gate_state, grad_stats,
                          in_order, power_of_two)
from f16lab.precision import BF16, F16, F32, F64

GOLDEN = json.loads((Path(__file__).parent / "golden" / "llmc_training.json").read_text())


def random_layout(seed: int, multiple: int = 1) -> FlatLayout:
    draw = random.Random(seed)
    shapes = [tuple(draw.choice((1, 2, 3, 17, 64)) for _ in range(draw.randrange(0, 4))) for _ in range(draw.randrange(1, 9))]
    return FlatLayout(tuple(f"t{i}" for i in range(len(shapes))), tuple(shapes), multiple)


def buffer_of(values: torch.Tensor, p=F32, name: str = "w") -> GradBuffer:
    """A buffer over one parameter with this gradient."""
    buffer = GradBuffer({name: Parameter(torch.zeros(values.shape))}, p)
    buffer.params[name].grad.copy_(values)
    return buffer


# ---------------------------------------------------------------- layout
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("multiple", [1, 3, 4])
def test_layout_agrees_with_counting_by_hand(seed, multiple):
    layout = random_layout(seed, multiple)
    owner, first = [], []
    for i, shape in enumerate(layout.shapes):
        for start in range(0, math.prod(shape), BLOCK):
            owner.append(i)
            first.append(start)
    assert layout.block_tensor.tolist()[: len(owner)] == owner and layout.block_first.tolist()[: len(first)] == first
    assert layout.blocks % multiple == 0 and 0 <= layout.blocks - len(owner) < max(multiple, 2)
    values = torch.arange(1.0, len(layout.names) + 1)
    assert layout.column(values).squeeze(1).tolist()[: len(owner)] == [values[i] for i in owner]


@pytest.mark.parametrize("seed", range(10))
def test_tensors_survive_padding_and_padding_is_zero(seed):
    layout = random_layout(seed, multiple=2)
    tensors = {name: torch.randn(shape) for name, shape in zip(layout.names, layout.shapes)}
    flat = layout.pad(tensors, layout.zeros(F32))
    assert all(torch.equal(layout.view(flat, name), x) for name, x in tensors.items())
    assert flat.count_nonzero() == sum(x.count_nonzero() for x in tensors.values())
    for name in layout.names: layout.view(flat, name).zero_()
    assert not flat.any()


def test_collect_sums_and_maxima_per_tensor():
    layout = FlatLayout(("a", "b", "c"), ((2000,), (1,), (3000,)), multiple=4)
    values = torch.arange(8, dtype=torch.float64)
    assert layout.blocks == 8 and layout.collect(values).tolist() == [0 + 1, 2, 3 + 4 + 5 + 6 + 7]
    assert layout.collect_max(values.flip(0).contiguous()).tolist() == [7, 5, 4]
    assert layout.collect(torch.ones(8, 2)).shape == (3, 2)


@pytest.mark.parametrize("names, shapes, multiple", [((), (), 1), (("a", "a"), ((1,), (1,)), 1), (("a",), ((1,), (2,)), 1),
                                                     (("a",), ((1,),), 0)])
def test_bad_layouts_are_refused(names, shapes, multiple):
    with pytest.raises(ValueError): FlatLayout(names, shapes, multiple)


def test_pad_refuses_other_precisions_and_shapes():
    layout = FlatLayout(("a",), ((4,),))
    for wrong in (torch.ones(4, dtype=torch.float16), torch.ones(1), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="its place is"): layout.pad({"a": wrong}, layout.zeros(F32))
    with pytest.raises(ValueError, match="no tensor 'b'.*a"): layout.view(layout.zeros(F32), "b")


# ---------------------------------------------------------------- gradient buffers
@pytest.mark.parametrize("param", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("grad", [F16, BF16, F32, F64], ids=str)
def test_autograd_adds_in_place_in_the_slot_precision(param, grad):
    w = Parameter(torch.ones(3, 5, dtype=param.dtype))
    buffer = GradBuffer({"w": w}, grad)
    for k in range(3): (cast(w, F32) * (k + 1)).sum().backward()
    assert w.grad is buffer.views[0] and w.grad.dtype is grad.dtype
    assert buffer.flat.view(-1)[:15].tolist() == [6.0] * 15 and not buffer.flat.view(-1)[15:].any()
    buffer.check()


@pytest.mark.parametrize("grad, total", [(F32, 4096.0), (F16, 2048.0)], ids=str)
def test_accumulation_precision_is_the_slots(grad, total):
    w = Parameter(torch.ones(1, dtype=torch.float16))
    buffer = GradBuffer({"w": w}, grad)
    for _ in range(4096): cast(w, F32).sum().backward()
    assert buffer.flat[0, 0] == total


def test_a_replaced_gradient_is_noticed_and_repaired_by_zero():
    w = Parameter(torch.ones(4))
    buffer = GradBuffer({"layer.w": w}, F32)
    w.grad = None
    (w * 2).sum().backward()
    with pytest.raises(RuntimeError, match="layer.w"): grad_stats([buffer])
    buffer.zero()
    (w * 2).sum().backward()
    assert grad_stats([buffer]).norm == 4.0


# ---------------------------------------------------------------- norm
@pytest.mark.parametrize("p", [F16, F32], ids=str)
def test_norm_of_large_halves_does_not_overflow(p):  # case B23
    assert grad_stats([buffer_of(torch.tensor([300.0]), p)]).norm == 300.0
    stats = grad_stats([buffer_of(torch.full((1_000_000,), 100.0), p)])
    assert stats.norm == 100_000.0 and stats.finite
    clipped = cast(torch.full((1_000_000,), 100.0) * clip_factor(stats.norm, 1.0), F16)
    assert (clipped == cast(torch.tensor(0.001), F16)).all() and (clipped.double() - 0.0010004).abs().max() < 1e-7


def test_norm_holds_the_largest_floats_and_ignores_padding():
    stats = grad_stats([buffer_of(torch.full((3,), 3e38)), buffer_of(torch.full((1,), 1e-30))])
    assert stats.finite and math.isclose(stats.norm, 3e38 * math.sqrt(3), rel_tol=1e-6)
    buffer = buffer_of(torch.ones(5))
    assert grad_stats([buffer]).norm == math.sqrt(5)


def test_norm_is_the_f64_norm_and_reported_unscaled():
    g = torch.randn(10_000, dtype=torch.float64) * 1e-3
    stats = grad_stats([buffer_of(g * 2**16)], scale=2.0**16)
    assert math.isclose(stats.norm, (g * 2**16).float().double().norm().item() / 2**16, rel_tol=1e-14)


def test_norm_has_the_same_bits_for_any_sharing_chunk_and_thread_count():
    flat = torch.randn(96, BLOCK)
    want = block_square_sums(flat)
    total = in_order(want)
    for shards in (2, 3, 4): assert torch.equal(want, torch.cat([block_square_sums(x) for x in flat.chunk(shards)]))
    for rows in (1, 7, 96): assert torch.equal(want, block_square_sums(flat, rows))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(want, block_square_sums(flat)) and torch.equal(in_order(want), total)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("multiple", (1, 3, 8, 1500))
def test_padding_for_the_ranks_changes_no_bit_of_the_norm(multiple):
    g = torch.Generator().manual_seed(0)
    params = [{f"{k}{i}": Parameter(torch.zeros(n)) for i, n in enumerate((3000, 1, 70_001))} for k in "ab"]
    buffers = [[GradBuffer(some, F32, m) for some in params] for m in (1, multiple)]
    for one, other in zip(*buffers):
        for x, y in zip(one.views, other.views): y.copy_(x.copy_(torch.randn(x.shape, generator=g)))
    for buffer in buffers[0]: buffer.attach()
    alone = grad_stats(buffers[0])
    for buffer in buffers[1]: buffer.attach()
    assert grad_stats(buffers[1]) == alone and alone.norm > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
def test_one_bad_element_anywhere_is_seen(bad, p):
    for at in (0, 1023, 1024, 2999):
        g = torch.zeros(3000)
        g[at] = bad
        stats = grad_stats([buffer_of(torch.ones(10)), buffer_of(g, p)])
        assert not stats.finite and not math.isfinite(stats.norm)


def test_one_read_of_the_device_per_step(monkeypatch):
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _f=original, _n=name: (reads.append(_n), _f(self, *a))[1])
    grad_stats([buffer_of(torch.ones(5000)), buffer_of(torch.ones(7), F16)])
    assert reads == ["item"]


def test_shards_gather_to_the_same_norm():  # case B29: squares 20 and 100
    g = torch.zeros(2048)
    g[0], g[1024] = math.sqrt(20), 10.0
    buffer, world = buffer_of(g), 2
    own = [block_square_sums(buffer.flat.chunk(world)[rank]) for rank in range(world)]
    for rank in range(world):
        stats = grad_stats([buffer], 1.0, lambda flat: flat.chunk(world)[rank], lambda x: torch.cat(own))
        assert math.isclose(stats.norm, 10.954451, abs_tol=1e-6)
        assert math.isclose(clip_factor(stats.norm, 1.0), 0.0912871, abs_tol=1e-7)


def test_first_nonfinite_is_the_last_in_forward_order():
    buffers = [GradBuffer({n: Parameter(torch.ones(2000)) for n in names}, p) for names, p in ((("a", "c"), F32), (("b", "d"), F16))]
    grads = {n: p.grad for b in buffers for n, p in b.params.items()}
    order = ["a", "b", "c", "d"]
    assert first_nonfinite(buffers, order) is None
    grads["a"][1999] = math.inf
    assert first_nonfinite(buffers, order) == "a"
    grads["b"][0] = math.nan
    assert first_nonfinite(buffers, order) == "b" and first_nonfinite(buffers, ["b", "a", "c", "d"]) == "a"


# ---------------------------------------------------------------- clip
@pytest.mark.parametrize("micro", [1, 4])
def test_clip_after_unscale(micro):  # case B09
    scale = 65536.0
    w = Parameter(torch.zeros(2))
    buffer = GradBuffer({"w": w}, F32)
    for _ in range(micro): (w * torch.tensor([3.0, 4.0]) * (scale / micro)).sum().backward()
    stats = grad_stats([buffer], scale)
    assert stats.norm == 5.0
    assert torch.allclose(w.grad * clip_factor(stats.norm, 1.0, scale), torch.tensor([0.6, 0.8]), rtol=1e-6)
    assert w.grad.tolist() == [3 * scale, 4 * scale]  # the buffer is only read


def test_clip_factor_rounds_once_and_refuses_what_is_no_norm():
    assert clip_factor(0.5, 1.0) == 1.0 and clip_factor(7.0, 0.0) == 1.0 and clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(3.0, 1.0, 1024.0) == f32(1 / 3 / 1024)
    for bad in (math.inf, math.nan):
        with pytest.raises(ValueError, match="skip"): clip_factor(bad, 1.0)


# ---------------------------------------------------------------- loss scale
def test_scale_halves_to_the_floor_and_stops():  # case B07
    scale, seen = LossScale.of("dynamic"), []
    for _ in range(300):
        scale = scale.update(overflow=True)
        seen.append(scale.scale)
    assert seen.index(1.0) == 15 and min(seen) == 1.0 and math.isfinite(1 / seen[-1])
    twenty = replace(scale, skips=20)
    assert twenty.exhausted and not replace(scale, skips=19).exhausted
    error = TooManySkips(twenty, "blocks.0.mlp.fc.weight")
    assert isinstance(error, RuntimeError) and "20 steps" in str(error) and "blocks.0.mlp.fc.weight" in str(error)


def test_scale_resumes_with_its_tracker():  # case B08
    saved = gate_state(StepGate(LossScale("dynamic", 1024.0, tracker=1, interval=2)))
    again = gate_from_state(json.loads(json.dumps(saved))).loss_scale
    assert (again.scale, again.tracker) == (1024.0, 1)
    after = again.update(overflow=False)
    assert (after.scale, after.tracker) == (2048.0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_scale_follows_pytorchs_rule_inside_floor_and_cap(seed):
    draw, interval = random.Random(seed), 3
    ours, theirs = LossScale("dynamic", 2.0**16, interval=interval, cap=2.0**40), torch.tensor(2.0**16)
    tracker = torch.zeros((), dtype=torch.int32)
    for _ in range(200):
        overflow = draw.random() < 0.25
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(overflow)), 2.0, 0.5, interval)
        ours = ours.update(overflow)
        assert ours.scale == max(1.0, theirs.item()) and ours.tracker == tracker.item()
        if theirs.item() < 1: break


def test_scale_start_cap_and_modes():
    assert LossScale.of("dynamic", 1).scale == 2.0**16 and LossScale.of("dynamic", 1).cap == 2.0**24
    big = LossScale.of("dynamic", 524_288)
    assert big.scale == 2.0**25 and big.cap == 2.0**31
    odd = LossScale.of("dynamic", 100_000)  # 6.4e6 and 4.1e8: rounded down to powers of two
    assert odd.scale == 2.0**22 and odd.cap == 2.0**28
    at_cap = replace(big, scale=big.cap, tracker=1999)
    assert at_cap.update(False) == replace(at_cap, tracker=0)
    static = LossScale.of("2^10")
    assert static.update(True) == replace(static, skips=1) and static.update(True).update(False).skips == 0
    assert LossScale.of("none").update(True).scale == 1 and LossScale.of("none").update(True).skips == 1
    with pytest.raises(ValueError, match="none, dynamic"): LossScale.of("1000")
    for bad in (dict(mode="auto"), dict(mode="dynamic", scale=3.0), dict(mode="dynamic", scale=0.5), dict(mode="none", scale=2.0),
                dict(interval=0)):
        with pytest.raises(ValueError): LossScale(**bad)


def test_power_of_two_is_the_largest_below():
    for x in (1.0, 1.5, 2.0, 3.999, 2.0**31, 0.3): assert power_of_two(x) <= x < 2 * power_of_two(x)


# ---------------------------------------------------------------- outliers
def series() -> list[float]:
    xs = [3 + (37 * i % 101) / 101 for i in range(200)]
    xs[150], xs[170] = 10.0, -5.0
    return xs


def test_detector_vectors():
    detector, zs = OutlierDetector(), []
    for x in series():
        zs.append(detector.z(x))
        detector = detector.update(x)
    assert all(math.isnan(z) for z in zs[:128])
    for step, z in GOLDEN["detector"]["z"].items(): assert zs[int(step)] == pytest.approx(z, abs=1e-9)


def test_nan_never_enters_the_window():
    clean = dirty = OutlierDetector()
    for i, x in enumerate(series()):
        clean = clean.update(x)
        if i % 7 == 0: dirty = dirty.update(math.nan).update(math.inf)
        assert math.isnan(dirty.z(math.nan)) and not dirty.rejects(math.nan)
        dirty = dirty.update(x)
    assert dirty == clean and len(clean.values) == 128


def test_rejected_values_are_not_stored_and_a_level_shift_is_let_in():
    detector = OutlierDetector(threshold=6.0, values=tuple(series()[:128]))
    for k in range(3):
        assert detector.rejects(50.0)
        after = detector.update(50.0)
        assert after.values == detector.values and after.rejected == k + 1
        detector = after
    assert not detector.rejects(50.0)
    detector = detector.update(50.0)
    assert detector.values[-1] == 50.0 and detector.rejected == 0 and detector.rejects(100.0)
    assert OutlierDetector(6.0, tuple(series()[:128]), rejected=2).update(3.3).rejected == 0


def test_z_of_a_flat_window_and_bounds():
    flat = OutlierDetector(threshold=1.0, values=(2.0,) * 128)
    assert flat.z(2.0) == 0.0 and flat.z(1e30) == pytest.approx(math.sqrt(127))
    assert not OutlierDetector(values=flat.values).rejects(1e30)  # off by default
    assert not flat.rejects(1.0)  # only large values
    for bad in (dict(threshold=11.3), dict(threshold=-1.0), dict(threshold=math.nan), dict(window=1), dict(patience=0)):
        with pytest.raises(ValueError): OutlierDetector(**bad)


# ---------------------------------------------------------------- decision
def good(norm: float = 0.5, scale: float = 65536.0) -> GradStats:
    return GradStats(norm, True, scale)


def test_decision_updates_scales_and_clips():
    gate = StepGate(LossScale.of("dynamic"), max_norm=1.0)
    decision, after = gate.decide(good(5.0), 2.0)
    assert decision.skip == "" and decision.clip == f32(0.2) and decision.factor == f32(0.2 / 65536)
    assert after.loss_scale.tracker == 1 and after.loss_outlier.values == (2.0,) and after.norm_outlier.values == (5.0,)
    assert gate.decide(good(0.5), 2.0)[0].factor == 1 / 65536


@pytest.mark.parametrize("stats, loss", [(GradStats(math.inf, False, 1.0), 2.0), (GradStats(math.nan, False, 1.0), 2.0), (good(), math.nan)])
def test_non_finite_is_a_skip_and_never_stored(stats, loss):
    gate = StepGate(LossScale.of("dynamic"))
    decision, after = gate.decide(stats, loss)
    assert decision.skip == "non-finite" and after.loss_scale.scale == 2.0**15 and after.loss_scale.skips == 1
    assert after.loss_outlier == gate.loss_outlier and after.norm_outlier == gate.norm_outlier


def test_outlier_skip_then_normal_step():  # case B09, third part
    window = tuple(series()[:128])
    gate = StepGate(LossScale.of("dynamic"), OutlierDetector(6.0, window), OutlierDetector(6.0, window))
    decision, after = gate.decide(good(3.4), 50.0)
    assert decision.skip == "outlier" and decision.loss_z > 6 and after.loss_scale.tracker == 1 and after.loss_scale.skips == 0
    assert after.loss_outlier.values == window and after.norm_outlier.values == window
    decision, after = after.decide(good(3.4), 3.4)
    assert decision.skip == "" and after.loss_outlier.values[-1] == 3.4 and after.loss_outlier.rejected == 0
    by_norm, after = gate.decide(good(50.0), 3.4)
    assert by_norm.skip == "outlier" and after.norm_outlier.rejected == 1 and after.loss_outlier.values == window


def test_a_true_level_shift_of_the_loss_gets_through():
    gate = StepGate(loss_outlier=OutlierDetector(6.0, tuple(series()[:128])))
    skips = []
    for _ in range(8):
        decision, gate = gate.decide(good(0.5, 1.0), 50.0)
        skips.append(bool(decision.skip))
    assert skips == [True, True, True, False] * 2


def test_a_step_without_targets_changes_nothing():
    gate = StepGate(LossScale.of("dynamic"))
    decision, after = gate.decide(GradStats(math.nan, False, 1.0), math.nan, tokens=0)
    assert decision.skip == "no targets" and after == gate


def test_gate_state_is_plain_and_complete():
    gate = StepGate(LossScale("dynamic", 512.0, 7, 2, 100, 2.0**30, 9), OutlierDetector(5.0, (1.0, 2.0), 1, 64, 2),
                    OutlierDetector(0.0, (0.1,) * 128), 0.25)
    assert gate_from_state(json.loads(json.dumps(gate_state(gate), allow_nan=False))) == gate
    for broken in ({}, {**gate_state(gate), "loss_scale": {"scale": 2.0}}, {**gate_state(gate), "norm_outlier": {"values": [], "x": 1}}):
        with pytest.raises(ValueError, match="step gate"): gate_from_state(broken)
    assert set(asdict(gate)) == set(gate_state(gate))


# ---------------------------------------------------------------- micro-steps
def test_batch_arithmetic():  # case B37
    assert [micro_steps(524_288, 16, 1024, world) for world in (1, 2, 8)] == [32, 16, 4]
    with pytest.raises(ValueError, match="10.67"): micro_steps(524_288, 16, 1024, 3)
    with pytest.raises(ValueError): micro_steps(0, 16, 1024)


def test_a_partial_window_is_weighted_by_its_tokens():  # case B37
    w = Parameter(torch.zeros(1))
    buffer = GradBuffer({"w": w}, F32)
    tokens = (64, 64)  # planned four micro-batches, two are left
    for n, gradient in zip(tokens, (1.0, 3.0)): (w * gradient * n / sum(tokens)).sum().backward()
    assert buffer.flat[0, 0] == 2.0
