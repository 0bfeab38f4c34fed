"""Verdicts on made-up runs whose right answer is known."""
import math
from dataclasses import replace

import pytest

from f16lab.events import CastRow, EvalRecord, StepRecord, TensorStat
from f16lab.verdict import (MARGIN, OPENING, Band, Comparison, Contender, Distances, band_width, cast_rates, deviations, efficiencies, final_loss,
                            first_layer, flushed_share, largest, late, leaves_at, noise_at_end, outcome_spread, remedy, running_width, seed_words,
                            step_seconds, summary, verdict, verdicts, worst_tensor)

N = 100
TRUE = [2 + 3 * math.exp(-s / 25) for s in range(N)]


def run(name, losses, **more):
    steps = tuple(StepRecord(s, x, 64, grad_norm=1.0, seconds=0.5) for s, x in enumerate(losses))
    return Contender(name, name, steps=steps, **more)


def noisy(size, k):
    """Losses that scatter around the truth, not at step 0, with a scatter of known size."""
    return [x * (1 + size * min(1, s / 5) * math.cos(k * 2.1 + s * (k + 1) * 0.7)) for s, x in enumerate(TRUE)]


def judged(losses, band_size=1e-3, seeds=(2.0, 2.3), repetitions=3):
    band = Band("noise", tuple(range(1, repetitions + 1)), tuple(tuple(noisy(band_size, k)) for k in range(1, repetitions + 1)))
    c = run("c", losses, band="noise")
    return verdict(Comparison((run("f32", TRUE), c), bands=(band,), seed_finals=seeds), c)


# ---------------------------------------------------------------- planted contenders
def test_noise_of_the_same_size_is_inside():
    assert judged(noisy(1e-3, 7)).kind == "inside noise"


@pytest.mark.parametrize("plant", [
    [x * 1.01 for x in TRUE],                                                # off from the start
    [x * (1 + max(0, s - 60) * 2e-4) for s, x in enumerate(TRUE)],           # drifts late
    [x * (0.99 if s == 50 else 1) for s, x in enumerate(TRUE)],              # one bad step
    [TRUE[0]] * N,                                                           # never learns
    [math.nan] * N, [math.inf] * N,
    TRUE[:70] + [math.nan] + TRUE[71:],                                      # one NaN
    [-x for x in TRUE],
], ids=["offset", "drift", "one step", "stuck", "nan", "inf", "one nan", "negative"])
def test_a_planted_wrong_contender_is_never_inside_noise(plant):
    assert judged(plant).kind == "leaves the band"


def test_wild_repetitions_hide_nobody():
    for losses in (noisy(0.1, 7), TRUE):
        assert judged(losses, band_size=0.2).kind == "too noisy"
    assert judged(noisy(4e-3, 7), band_size=4e-3, seeds=(sum(TRUE[-10:]) / 10 * 1.00001,)).kind == "too noisy", "noisier than another seed"


def test_repetitions_with_nan_judge_nobody_good():
    band = Band("noise", (1, 2), (tuple(TRUE), tuple([math.nan] * N)))
    c = run("c", TRUE[:-1] + [TRUE[-1] * 1.0001], band="noise")
    assert verdict(Comparison((run("f32", TRUE), c), bands=(band,)), c).kind != "inside noise"


def test_the_step_and_the_words():
    v = judged([x * (1.02 if s >= 40 else 1) for s, x in enumerate(TRUE)])
    assert v.step == 40 and "at step 40" in v.words and "deviation 2%" in v.words and "3 runs of noise" in v.words


def test_a_short_run_is_judged_by_what_it_has():
    assert judged(noisy(1e-3, 7)[:30]).kind == "inside noise"
    assert judged(TRUE[:10] + [9.0]).step == 10


def test_without_a_band_nothing_is_judged():
    c = run("c", [x * 1.001 for x in TRUE], evals=(EvalRecord(N, 2.1, 9),))
    v = verdict(Comparison((replace(run("f32", TRUE), evals=(EvalRecord(N, 2.0, 9),)), c)), c)
    assert v.kind == "not judged" and "0.1%" in v.words and "not measured" in v.words and "5% off" in v.words
    assert verdict(Comparison((run("f32", TRUE), same := run("same", TRUE))), same).kind == "identical"


def test_runs_in_which_nothing_happened():
    empty, ref = Contender("e", "f16", status="failed", message="boom"), run("f32", TRUE)
    assert verdict(Comparison((ref, empty)), empty).kind == "failed"
    assert [v.kind for v in verdicts(Comparison((Contender("a", "f32"), ref))).values()] == ["no steps", "not judged"]
    blind = verdicts(Comparison((run("f32", [math.nan] * 3), run("c", TRUE[:3]))))
    assert blind["c"].kind == "not judged" and "cannot be compared" in blind["c"].words
    with pytest.raises(ValueError, match="at least one"):
        Comparison(())
    with pytest.raises(ValueError, match="there are f32"):
        Comparison((ref,)).contender("x")


# ---------------------------------------------------------------- widths
def test_running_width():
    width = running_width({0: 0.0, 5: 3.0, OPENING: 1.0, OPENING + 1: math.nan, OPENING + 2: 7.0, OPENING + 3: 2.0})
    assert width == {0: 3 * MARGIN, 5: 3 * MARGIN, OPENING: 3 * MARGIN, OPENING + 1: 3 * MARGIN, OPENING + 2: 7 * MARGIN, OPENING + 3: 7 * MARGIN}
    assert running_width({}) == {} and running_width({3: math.nan}) == {3: 0.0}


def test_band_width_is_the_relative_range_of_the_repetitions():
    ref, band = run("f32", [2.0, 4.0]), Band("b", (1, 2), ((2.0, 4.1), (2.02, 4.0)))
    assert band_width(band, ref) == pytest.approx({0: MARGIN * 0.025, 1: MARGIN * 0.025})
    assert leaves_at(run("c", [2.0, 4.3]), ref, band_width(band, ref)) == 1
    assert noise_at_end(band) == pytest.approx(0.04 / 3.03, rel=1e-6)


def test_first_layer_counts_storage_as_no_drift():
    def walk(*values, floor=0.0):
        return tuple(Distances(40 * s, {"a.w": v, "b.w": 0.0}, v, {"a.w": floor, "b.w": 0.0}) for s, v in enumerate(values))
    band = Band("b", (1,), (), walk(0.0, 1e-3, 1e-3))
    assert first_layer(run("c", TRUE, distances=walk(4e-3, 4e-3, 4e-3, floor=4e-3)), band) is None
    assert first_layer(run("c", TRUE, distances=walk(0.0, 1e-3, 3e-3)), band) == ("a", 80)
    assert first_layer(run("c", TRUE, distances=walk(0.0, math.nan)), band) == ("a", 40)
    assert first_layer(run("c", TRUE), band) is None


def test_seed_words():
    ref, c = run("f32", [2.0]), run("c", [2.1])
    assert seed_words(Comparison((ref, c), seed_finals=(2.2, 2.1)), c) == "; its final loss is 5% off, while 3 f32 seeds differ by 9.5%"
    assert seed_words(Comparison((ref, c)), c) == ""
    assert math.isnan(outcome_spread([1.0, math.nan])) and math.isnan(outcome_spread([])) and outcome_spread([1.0, 3.0]) == 1.0


# ---------------------------------------------------------------- numbers
def test_deviations_and_their_largest():
    d = deviations(run("c", [1.0, 3.0, math.nan, 5.0]), run("f32", [1.0, 2.0, 3.0, math.inf]))
    assert d[0] == 0 and d[1] == 0.5 and math.isnan(d[2]) and math.isnan(d[3])
    assert largest(d) == (0.5, 1)
    value, step = largest({})
    assert math.isnan(value) and step is None


def test_efficiency_is_weighted_by_elements():
    stats = (TensorStat("w", 0.2), TensorStat("b", 1.0), TensorStat("none", math.nan))
    steps = (StepRecord(0, 1.0, tensors=stats), StepRecord(1, 1.0), StepRecord(2, 1.0, tensors=(TensorStat("w", 0.4),)))
    c = Contender("c", "f16", steps=steps, sizes={"w": 3000, "b": 1000, "none": 5})
    assert efficiencies(c) == pytest.approx({0: 0.4, 2: 0.4})
    assert worst_tensor(c) == ("w", pytest.approx(0.3)), "tensors of few elements are not named"
    assert math.isnan(late({})) and late({0: 9.0, 1: 9.0, 2: 9.0, 3: 1.0}) == 1.0


@pytest.mark.parametrize("profile, words", [
    ("bf16_sr,rounding=nearest", "rounding=stochastic"), ("f16", "kahan (+2 bytes"), ("bf16_sr", "too narrow"), ("bf16", "too narrow"),
    ("no profile at all", "more bits"), ("torch_amp", "more bits")])
def test_the_alarm_names_a_remedy_that_is_not_in_use(profile, words):
    assert words in remedy(profile)


def test_alarms():
    stats = (TensorStat("w", 0.1, flushed=500, saturated=2),)
    steps = tuple(StepRecord(s, math.nan if s == 3 else 1.0, skipped=s < 2, skip_reason="non-finite" * (s < 2), tensors=stats) for s in range(4))
    c = Contender("c", "f16", steps=steps, sizes={"w": 2000})
    assert flushed_share(c) == 0.125
    said = " ".join(verdict(Comparison((c,)), c).alarms)
    for words in ("Only 10%", "w: 10%", "not finite at 1 of 4 steps, first at step 3", "2 of 4 steps were skipped (non-finite)", "8 moments were clamped",
                  "12% of the moments became 0"):
        assert words in said
    assert verdict(Comparison((run("f32", TRUE),)), run("f32", TRUE)).alarms == ()


def test_cast_rates_and_time():
    row = CastRow("train", "a", "linear", "w", (2, 2), "f32", "f16", "forward", "operand", 2, 48)
    steps = [StepRecord(0, 1.0), StepRecord(1, 1.0, casts=(row, replace(row, phase="optimizer"), replace(row, phase="eval")))]
    assert cast_rates(steps) == (4, 96)
    assert all(map(math.isnan, cast_rates([])))
    listened = summary(Comparison((run("f32", TRUE),), {"run": {"ledger": True}}), run("f32", TRUE))
    assert (listened.casts, listened.cast_bytes) == (0, 0), "a run that listened and heard nothing cast nothing"
    assert math.isnan(summary(Comparison((run("f32", TRUE),), {"run": {"ledger": False}}), run("f32", TRUE)).casts)
    assert step_seconds([StepRecord(0, 1.0, seconds=9.0), StepRecord(1, 1.0, seconds=1.0), StepRecord(2, 1.0, seconds=2.0)]) == 1.5


def test_final_loss_prefers_the_held_out_one():
    c = run("c", TRUE)
    assert final_loss(c) == pytest.approx(sum(TRUE[-10:]) / 10)
    assert final_loss(replace(c, evals=(EvalRecord(50, 9.0), EvalRecord(N, 7.0)))) == 7.0
    assert final_loss(replace(c, evals=(EvalRecord(50, 9.0),))) == pytest.approx(sum(TRUE[-10:]) / 10), "an old evaluation is not final"
    assert math.isnan(final_loss(Contender("e", "f32")))
