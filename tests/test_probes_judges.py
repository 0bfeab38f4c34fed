"""Alarms, the loss scale's verdict, constants and bytes: what is judged, and that a healthy run is left in peace."""
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from train_runs import small, source, trainer

from f16lab.accounts import LiveBytes, constant, held_bytes, model_constants, passing_bytes, recipe_constants
from f16lab.cockpit import (SAFE, ScaleLook, cockpit, forecast, meter_alarms, safe_scale, scale_look, scale_story,
                            tensor_alarms, trend)
from f16lab.events import Histogram, StepRecord, TensorStat
from f16lab.looking import Look, RunProbe
from f16lab.precision import BF16, E4M3, F16, F32, F64
from f16lab.profile import PRESETS, PrecisionProfile
from f16lab.train import Trainer

NAN, INF = math.nan, math.inf


def gradient(amax: float, low: int = 0, precision: str = "f16") -> Histogram:
    """Gradients around a largest one, `low` of 1000 of them in f16's subnormal range."""
    e = math.frexp(amax)[1] - 1
    counts = {e: 1, -20: low, e - 3: 999 - low}
    first = min(counts)
    bins = tuple(counts.get(first + i, 0) for i in range(e - first + 1))
    return Histogram("backward", "l", "output.grad", precision, first, bins, amax=amax)


def record(step: int, scale: float = 2.0**16, amax: float = 8.0, low: int = 0, skipped: bool = False) -> StepRecord:
    """A step with one histogram of gradients, scaled."""
    return StepRecord(step, 2.0, loss_scale=scale, skipped=skipped, skip_reason="non-finite" if skipped else "",
                      histograms=(gradient(amax, low),))


# ---------------------------------------------------------------- updates and moments
@pytest.mark.parametrize("text, words", [("bf16_sr,rounding=nearest", "rounding=stochastic"), ("bf16", "too narrow")])
def test_lost_updates_come_with_a_remedy_that_fits_the_profile(text, words):
    stat = TensorStat("a.weight", 0.2, lost=0.8)
    alarm, = tensor_alarms(stat, 100_000, PrecisionProfile.parse(text))
    assert alarm.kind == "lost updates" and words in alarm.words and "20% of the intended" in alarm.words


def test_stochastic_rounding_of_a_few_elements_is_not_judged():
    p = PRESETS["bf16_sr"]
    assert not tensor_alarms(TensorStat("ln.weight", 0.0, lost=1.0), 64, p)
    assert tensor_alarms(TensorStat("ln.weight", 0.0, lost=1.0), 64, p.with_(rounding="nearest"))
    assert tensor_alarms(TensorStat("wte.weight", 0.3, lost=0.5), 10_000, p)


def test_moments_that_stand_still_or_reach_the_ends():
    p, stat = PRESETS["all_f16"], TensorStat("a.weight", 1.0)
    assert tensor_alarms(stat, 1000, p) == [] == tensor_alarms(replace(stat, efficiency=NAN, stalled_v=NAN), 1000, p)
    found = tensor_alarms(replace(stat, stalled_m=0.6, stalled_v=0.9, flushed=100, saturated=30), 1000, p)
    assert [a.kind for a in found] == ["stalled moments", "stalled moments", "flushed moments", "clamped moments"]
    assert "v stands still" in found[1].words and all("use " in a.words for a in found)


def test_a_real_run_is_judged_and_its_cure_is_left_in_peace():
    sick, well = (trainer(text, lr=1e-6, meters_every=1) for text in ("bf16_sr,rounding=nearest", "bf16"))
    sizes = {name: p.numel() for name, p in sick.optimizer.params.items()}
    found = [meter_alarms(t.step(), t.config.profile, sizes) for t in (sick, well)]
    assert found[0][0].kind == "lost updates" and not [a for a in found[1] if a.kind == "lost updates"]
    values = [a.value for a in found[0] if a.kind == "lost updates"]
    assert values == sorted(values)


# ---------------------------------------------------------------- the loss scale
@pytest.mark.parametrize("amax", [1.0, 1.5, 4096.0, 4097.0, 2.0**-20, 3e-9])
def test_the_safe_scale_is_the_largest_power_of_two_that_keeps_the_largest_at_2_to_12(amax):
    look = ScaleLook(0, 1.0, amax, 5, 0.0)
    safe = safe_scale([replace(look, largest=amax / 7), look])
    assert math.log2(safe).is_integer() and amax * safe <= 2.0**SAFE < amax * safe * 2
    assert math.isnan(safe_scale([])) and math.isnan(safe_scale([replace(look, largest=0.0)]))


def test_a_look_takes_the_scale_out_and_counts_its_margin():
    look = scale_look(record(3, scale=1024.0, amax=2048.0, low=100))
    assert (look.largest, look.margin, look.low) == (2.0, 4, 0.1)
    assert scale_look(replace(record(0), histograms=())) is None
    assert scale_look(replace(record(0), histograms=(gradient(8.0, precision="bf16"),))).margin > 100


def test_trend_and_forecast_do_not_mind_a_spike():
    looks = [ScaleLook(i, 1.0, 2.0 ** (i / 4), 12 - i / 4, 0.0) for i in range(20)]
    spiked = [*looks[:9], replace(looks[9], largest=2.0**40), *looks[10:]]
    assert trend([(x.step, math.log2(x.largest)) for x in spiked]) == pytest.approx(0.25)
    assert forecast(looks) == pytest.approx((12 - 19 / 4) * 4)
    assert forecast(looks[::-1][:1]) == INF and math.isnan(trend([(0, 1.0)]))


@pytest.mark.parametrize("verdict, records", [
    ("healthy", [record(i) for i in range(60)]),
    ("healthy", [record(0, skipped=True), record(1, 2.0**15), *(record(i, 2.0**15) for i in range(2, 60))]),
    ("wasteful", [record(i, low=300) for i in range(60)]),
    ("wasteful", [record(i, skipped=i % 12 == 0) for i in range(50)]),
    ("sick", [record(i, scale=2.0 ** max(0, 16 - i), skipped=True, amax=2.0**15) for i in range(20)]),
    ("sick", [record(i, scale=1.0, low=300) for i in range(60)]),
    ("sick", [record(i, amax=65520.0) for i in range(60)]),
], ids=lambda x: x if isinstance(x, str) else "")
def test_verdicts(verdict, records):
    seat = cockpit(records)
    assert seat.verdict == verdict and len(seat.words) > 20
    assert seat.scales[records[-1].step] == records[-1].loss_scale


def test_a_cockpit_without_histograms_and_without_steps():
    seat = cockpit([replace(record(i), histograms=()) for i in range(5)])
    assert seat.verdict == "healthy" and math.isnan(seat.safe) and seat.looks == () and math.isnan(seat.margin)
    with pytest.raises(ValueError, match="at least one step"): cockpit([])
    events = scale_story([record(0, skipped=True), record(1, 2.0**15)])
    assert events == ((0, "overflow, step skipped"), (1, "scale 65536 → 32768"))


def test_a_real_run_at_three_scales():
    found = {}
    for scale in ("2^4", "dynamic", "2^24"):
        t = trainer(f"f16,loss_scale={scale}", lr=1e-3)
        with RunProbe(t, Look(("output_grad", "grad"))): found[scale] = cockpit([t.step() for _ in range(10)])
    assert [seat.verdict for seat in found.values()] == ["wasteful", "healthy", "sick"]
    assert 2.0**10 < found["2^4"].safe < 2.0**24 and len(found["2^24"].events) == 10


# ---------------------------------------------------------------- constants
@pytest.mark.parametrize("value, p, decay, problem", [
    (1e-8, F16, False, "becomes 0"), (1e-8, BF16, False, ""), (1e-8, F32, False, ""), (1e-12, F16, False, "becomes 0"),
    (-1e9, F16, False, "overflows"), (-1e9, BF16, False, ""), (-65504.0, F16, False, ""),
    (-INF, F16, False, ""), (0.0, F16, False, ""),
    (0.999, BF16, True, "becomes 1"), (0.99, BF16, True, "instead of"), (0.95, BF16, True, ""),
    (0.999, F16, True, ""), (0.9, F16, True, ""), (0.0, F16, True, ""),
    (0.9997, F16, True, "instead of"), (0.9999, F16, True, "becomes 1"),
    (1e9, E4M3, False, "overflows"), (1e-300, F32, False, "becomes 0"), (1e-300, F64, False, "")])
def test_constants(value, p, decay, problem):
    found = constant("c", value, p, decay).problem
    assert problem in found and bool(found) == bool(problem)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_recipe_of_ours_loses_a_constant(preset):
    t = trainer(preset)
    found = recipe_constants(t.config, t.model)
    assert {c.name for c in found} >= {"optimizer.eps", "optimizer.beta2", "blocks.0.ln1.eps"}
    assert not [c for c in found if c.problem]


def test_constants_of_any_module():
    net = nn.TransformerEncoderLayer(8, 2, 16, layer_norm_eps=1e-12).half()
    net.register_buffer("mask", torch.full((2, 2), -65504.0).half())
    assert not [c for c in model_constants(net, F16) if c.problem]
    net.eps = 1e-12
    assert [c.name for c in model_constants(net, F16) if c.problem] == []  # torch's own class: its arithmetic is f32

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.eps, self.weight = 1e-12, nn.Parameter(torch.ones(2).half())
    assert [c.name for c in model_constants(Own(), F32) if c.problem] == ["eps"]


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_held_is_what_was_planned_and_its_padding(preset):
    t = trainer(preset)
    tensors = len(t.optimizer.params)
    for line in held_bytes(t):
        if line.role in ("scratch", "compensation"): continue
        assert line.planned <= line.measured <= line.planned + 4 * 1024 * tensors, line


def test_live_bytes_follow_births_and_deaths():
    with LiveBytes() as seen:
        a = torch.ones(256)
        b = [a + i for i in range(3)]
        view = b[0][:2]
        assert seen.now == 4 * 1024
        del b
        assert seen.now == 2 * 1024, "a view keeps its storage"
        del view, a
        assert seen.now == 0 and seen.peaks["forward"][0] == 4 * 1024 == sum(seen.peaks["forward"][1].values())
    with LiveBytes() as seen:
        x = torch.ones(100, 100, requires_grad=True)
        y = (x * 2).exp().sum()
        assert seen.now >= 2 * 40_000, "saved for the backward pass"
        y.backward()
        assert seen.now <= 2 * 40_000 + 8, "weights and gradients"


@pytest.mark.parametrize("profile", ["f32", "f16"])
def test_a_step_that_is_weighed_is_a_step(profile):
    plain, weighed = trainer(profile, accumulate=2), trainer(profile, accumulate=2)
    plain.step(), weighed.step()
    peaks = passing_bytes(weighed)
    plain.step()
    assert plain.digest() == weighed.digest() and {p.phase for p in peaks} >= {"forward", "backward", "update"}
    for p in peaks: assert 0 < sum(size for _, size in p.places) <= p.peak and p.allocator is None
    assert any("blocks.0" in place for p in peaks for place, _ in p.places)


def test_more_tokens_are_more_passing_bytes_and_the_same_held_ones():
    def of(batch):
        t = Trainer(small("f32", batch=batch), source())
        t.step()
        peak = max(p.peak for p in passing_bytes(t))
        return peak, [line.measured for line in held_bytes(t) if line.role != "scratch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (few, held), (many, same) = of(2), of(16)
    assert many > 3 * few and held == same


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("profile", ["f32", "f16", "bf16", "all_f16"])
def test_fifty_steps_on_a_gpu_with_and_without_probes(profile):
    runs = [Trainer(small(profile, device="cuda", steps=50, accumulate=2), source()) for _ in range(2)]
    for _ in range(50): runs[0].step()
    with RunProbe(runs[1], Look(share=1)): records = [runs[1].step() for _ in range(50)]
    assert runs[0].digest() == runs[1].digest() and all(len(r.histograms) > 20 for r in records)


@pytest.mark.gpu
def test_a_gpu_counts_what_a_cpu_counts():
    from f16lab.probes import histogram_of
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.cat([torch.randn(100_003) * 1e-5, torch.tensor([0.0, INF, NAN, 1e-40, 7e4])]).to(dtype)
        assert histogram_of(x.cuda()) == histogram_of(x)


@pytest.mark.gpu
def test_bytes_of_a_step_on_a_gpu():
    t = Trainer(small("f16", device="cuda"), source())
    t.step()
    assert all(p.allocator and p.allocator >= p.peak // 2 for p in passing_bytes(t))
