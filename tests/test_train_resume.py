"""State, digest, replay: a run that was interrupted is the run that was not."""
import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_runs as runs
from train_runs import PROFILES, STOP, load, save, small, source, trainer

from f16lab.data import TokenData
from f16lab.events import StepRecord
from f16lab.grads import LossScale
from f16lab.nn import named_parameters_once
from f16lab.train import State, Trainer, digest, evaluate, replay, steps


@pytest.fixture(scope="module")
def unbroken() -> dict:
    """Each profile's rich run to its end: the trainer, its records, a copy of the state after STOP steps."""
    out = {}
    for profile in PROFILES:
        t = runs.rich(profile)
        first = runs.go_on(t, STOP, look=True)
        saved = t.state().copy()
        out[profile] = t, first + runs.go_on(t, t.config.run.steps, look=True), saved
    return out


# ---------------------------------------------------------------- interrupted and resumed
def test_the_run_exercises_what_it_should(unbroken):
    """Else the test below proves little."""
    t, records, _ = unbroken["f16"]
    assert any(r.skipped and r.skip_reason == "outlier" for r in records[STOP:]), [r.skip_reason for r in records]
    assert len({r.loss_scale for r in records}) > 1 and len({r.lr for r in records}) > 4
    epoch = t.inputs.train.steps_per_epoch()
    assert epoch == 4 and STOP % epoch and STOP // epoch < t.step_number // epoch
    saved = unbroken["f16"][2].values
    assert saved["gate"]["loss_scale"]["tracker"] and len(saved["gate"]["loss_outlier"]["values"]) == 4
    assert saved["data"]["position"] == 2 * STOP and saved["times"]["weight"] > 0


def test_a_fresh_process_goes_on_bit_by_bit(unbroken, tmp_path):
    for profile, (_, _, saved) in unbroken.items(): save(saved, tmp_path, profile)
    command = [sys.executable, str(Path(runs.__file__)), "resume", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    resumed = json.loads(done.stdout.splitlines()[-1])
    for profile, (t, records, _) in unbroken.items():
        skipped = [r.step for r in records if r.skipped and r.step >= STOP]
        assert resumed[profile][:2] == [t.digest(), skipped], profile
        averaged = t.config.run.steps - 2  # the first step of each process is left out
        assert resumed[profile][2] == pytest.approx(1 - 0.95**averaged), profile


@pytest.mark.parametrize("profile", PROFILES)
def test_saving_and_loading_keeps_the_digest(unbroken, profile, tmp_path):
    _, _, saved = unbroken[profile]
    save(saved, tmp_path, "state")
    again = load(tmp_path, "state")
    assert digest(again) == digest(saved)
    t = Trainer(small(profile, **runs.RICH), runs.rich_source())
    assert t.load_state(again) == () and t.digest() == digest(saved) and t.step_number == STOP


def test_loss_scale_and_tracker_come_back():
    t = trainer("f16")
    t.gate = replace(t.gate, loss_scale=LossScale("dynamic", 1024.0, interval=2))
    t.step()
    saved = State(t.state().copy().tensors, json.loads(json.dumps(t.state().values)))
    other = trainer("f16")
    other.load_state(saved)
    assert (other.gate.loss_scale.scale, other.gate.loss_scale.tracker) == (1024, 1)
    assert other.step().loss_scale == 1024
    assert (other.gate.loss_scale.scale, other.gate.loss_scale.tracker) == (2048, 0)
    t.step()
    assert other.digest() == t.digest()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_learning_rate_goes_on_where_it_was(accumulate):
    c = small(accumulate=accumulate, schedule="cosine", lr=1e-3, steps=100, channels=16, context=8, batch=2)
    t = Trainer(c, source())
    for _ in range(40): t.step()
    other = Trainer(c, source())
    other.load_state(t.state())
    assert other.step().lr == pytest.approx(6.5451e-4, rel=1e-4)


def test_dropout_without_keys_would_be_seen():
    """Dropout matters in the rich run: with another seed the losses differ from the first step on."""
    a, b = trainer(dropout=0.1), trainer(dropout=0.1)
    real = b.loss
    b.loss = lambda *args, draw, **k: real(*args, draw=replace(draw, seed=1), **k)
    assert a.step().loss != b.step().loss


def test_loading_is_a_copy():
    t, other = trainer("bf16"), trainer("bf16")
    t.step()
    saved = t.state()
    other.load_state(saved)
    before = other.digest()
    t.step()
    assert other.digest() == before != t.digest()


# ---------------------------------------------------------------- what does not fit is refused
def test_states_of_other_runs_are_refused_in_one_sentence():
    saved = trainer("f16").state().copy()
    cases = {"profile": (trainer("f16,compute=bf16,loss_scale=none"),
                         "saved with profile param=f16.*this run has param=f16,compute=bf16"),
             "seed": (trainer("f16", seed=1), "saved with seed 0, this run has 1"),
             "layers": (trainer("f16", layers=2), "blocks.1.*the state holds nothing"),
             "channels": (trainer("f16", channels=16), r"\[128, 32\], this run needs torch.float16 \[128, 16\]"),
             "data": (Trainer(small("f16"), replace(source(), train=source(13_000).train)),
                      "saved position is for sha256"),
             "order": (trainer("f16", shuffle=False), "saved position is for shuffle True")}
    for name, (t, words) in cases.items():
        before = t.digest()
        with pytest.raises(ValueError, match=words) as e: t.load_state(saved)
        assert "\n" not in str(e.value) and t.digest() == before, name  # and nothing was written


def test_a_larger_state_is_refused():
    saved = trainer("f16", layers=2).state().copy()
    with pytest.raises(ValueError, match="blocks.1.*this run needs nothing"): trainer("f16").load_state(saved)


def test_damaged_states_are_refused():
    t = trainer("bf16")
    t.step()
    saved, other = t.state().copy(), trainer("bf16")
    before = other.digest()
    for name in ("optimizer.m/ln_f.weight", "optimizer.master/wte.weight", "model.ln_f.bias"):
        with pytest.raises(ValueError, match=f"{name}: the state holds nothing"):
            other.load_state(State({k: x for k, x in saved.tensors.items() if k != name}, saved.values))
    for name in saved.values:
        with pytest.raises(ValueError, match=f"lacks '{name}'"):
            other.load_state(State(saved.tensors, {k: x for k, x in saved.values.items() if k != name}))
    with pytest.raises(ValueError, match="version 99"):
        other.load_state(State(saved.tensors, {**saved.values, "version": 99}))
    halves = {**saved.tensors, "optimizer.m/ln_f.weight": saved.tensors["optimizer.m/ln_f.weight"].half()}
    with pytest.raises(ValueError, match="torch.float16, this run needs torch.float32"):
        other.load_state(State(halves, saved.values))
    with pytest.raises(ValueError): other.load_state(State(saved.tensors, {**saved.values, "gate": {}}))
    assert other.digest() == before


@pytest.mark.parametrize("change, words", [
    (dict(clip=0.5), "clip was 1 and is 0.5"), (dict(skip_loss_z=3.0), "skip_loss_z was 0 and is 3"),
    (dict(beta2=0.99), "beta2 was 0.95 and is 0.99"), (dict(weight_decay=0.2), "weight_decay was 0.0 and is 0.2"),
    (dict(steps=60), "schedule steps was 30 and is 60.*learning rate of step 2 becomes"),
    (dict(lr=1e-3), "schedule lr was 0.003 and is 0.001")])
def test_a_changed_recipe_wins_and_is_reported(change, words):
    c = small("f32", schedule="cosine")
    t = Trainer(c, source())
    t.step(), t.step()
    other = Trainer(c.with_(**change), source())
    with pytest.warns(UserWarning, match=f"resumed at step 2 with another recipe.*{words}"):
        notes = other.load_state(t.state())
    assert notes
    record = other.step()
    assert record.lr == other.schedule.at(2) and other.schedule.steps == other.config.run.steps
    o = other.config.optimizer
    assert (other.gate.max_norm, other.gate.loss_outlier.threshold) == (o.clip, o.skip_loss_z)


def test_the_same_recipe_is_no_news():
    t, other = trainer("f16", schedule="cosine", warmup=4), trainer("f16", schedule="cosine", warmup=4)
    t.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other.load_state(t.state()) == ()


def test_another_batch_size_keeps_the_place():
    t = trainer("f32", batch=4)
    for _ in range(4): t.step()
    other = trainer("f32", batch=8)
    other.load_state(t.state())
    assert other.inputs.train.position == 2 and other.step().tokens == 2 * 64


# ---------------------------------------------------------------- replay
@pytest.mark.parametrize("profile", ["f32", "bf16_sr", "all_f16"])
def test_replay_from_the_start_and_from_a_snapshot(profile):
    t = trainer(profile, dropout=0.1, schedule="cosine")
    records, snapshots = [], []
    for _ in range(6):
        snapshots.append(t.state().copy())
        records.append(t.step())
        evaluate(t)
    final = t.digest()
    for start in (None, snapshots[0], snapshots[3], snapshots[5]):
        record, state = replay(t.config, 5, start, source())
        assert digest(state) == final
        seen, first = ((r.step, r.loss, r.grad_norm, r.casts) for r in (record, records[5]))
        assert seen == first and record.step == 5
    assert digest(replay(t.config, 3, snapshots[2], source())[1]) == digest(snapshots[4])


def test_replay_out_of_reach():
    t = trainer(steps=5)
    t.step(), t.step()
    saved = t.state().copy()
    for step in (1, 5):
        words = f"replay of step {step}: the snapshot stands at step 2, the run has steps 0…4"
        with pytest.raises(ValueError, match=words):
            replay(t.config, step, saved, source())
    with pytest.raises(ValueError, match="step -1"): replay(t.config, -1, None, source())


def test_replay_of_a_skipped_step():
    t = trainer("f16")
    t.gate = replace(t.gate, loss_scale=LossScale("dynamic", 2.0**24))
    saved = t.state().copy()
    record = t.step()
    again, state = replay(t.config, 0, saved, source())
    assert record.skipped and again.skipped and digest(state) == t.digest()
    assert math.isnan(record.grad_norm) or record.grad_norm == again.grad_norm


# ---------------------------------------------------------------- state and digest as values
def test_state_is_views_and_copy_is_not():
    t = trainer("f16")
    view, copy = t.state(), t.state().copy()
    same = digest(view)
    t.step()
    assert digest(copy) == same != digest(State(view.tensors, copy.values))


def test_digest_sees_every_bit_and_every_name():
    w = torch.arange(6, dtype=torch.float32)
    base = State({"a": w, "b": w + 1}, {"x": 1, "times": {"total": 1}})
    assert digest(base) == digest(State({"b": w + 1, "a": w.clone()}, {"times": 7, "x": 1}))
    bit = (w.view(torch.int32) ^ torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.int32)).view(torch.float32)
    others = [State({"a": bit, "b": w + 1}, base.values), State({"a": w + 1, "b": w}, base.values),
              State({"a": w.view(2, 3), "b": w + 1}, base.values),
              State({"a": w.view(torch.int32), "b": w + 1}, base.values),
              State({"a": w}, base.values), State(base.tensors, {"x": 2}), State(base.tensors, {"x": 1, "y": 1}),
              State({"a": -0.0 * w, "b": w + 1}, base.values), State({"a": 0.0 * w, "b": w + 1}, base.values)]
    assert len({digest(s) for s in (base, *others)}) == len(others) + 1
    strided = torch.stack([w, w + 1]).t()
    assert digest(State({"a": strided}, {})) == digest(State({"a": strided.contiguous()}, {}))
    assert digest(State({"a": w[:0]}, {})) != digest(State({}, {}))


def test_the_state_names_everything_once():
    t = trainer("bf16")
    names = [n for n, _ in named_parameters_once(t.model)]
    expected = {f"model.{n}" for n in names} | {f"optimizer.{role}/{n}" for n in names for role in ("m", "v", "master")}
    assert t.state().tensors.keys() == expected
    json.dumps(t.state().values, allow_nan=False)


def test_a_state_from_steps_is_the_state_of_steps(tmp_path):
    """The generator and single steps are one loop, also across a state that went through files."""
    c = small("f16", steps=8, eval_every=2)
    whole = Trainer(c, source())
    list(steps(whole))
    t, n = Trainer(c, source()), 0
    for record in steps(t):
        n += isinstance(record, StepRecord)
        if n == 3: break
    save(t.state(), tmp_path, "half")
    resumed = Trainer(c, source())
    resumed.load_state(load(tmp_path, "half"))
    list(steps(resumed))
    assert resumed.digest() == whole.digest()


def test_whole_numbers_for_floats_are_the_same_run():
    a, b = (trainer("f32", weight_decay=w, clip=c, dropout=w) for w, c in ((0, 1), (0.0, 1.0)))
    assert a.digest() == b.digest()


def test_empty_data_are_no_state():
    with pytest.raises(ValueError, match="tokens"):
        Trainer(small(), replace(source(), train=TokenData.of([1] * 10, 32)))
