"""The training loop: every preset learns, looking changes nothing, a skipped step is none, tokens weigh alike."""
import json
import math
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import train_runs as runs
from train_runs import KAHAN, PROFILES, small, source, trainer

from f16lab.data import IGNORE_INDEX, TokenData
from f16lab.events import Bus, EvalRecord, EventRecord, RunEnded, SampleRecord, StepRecord
from f16lab.grads import LossScale, TooManySkips
from f16lab.inputs import Source, open_source
from f16lab.models import CNNConfig
from f16lab.nn import named_parameters_once
from f16lab.ops import Loss
from f16lab.profile import PRESETS
from f16lab.throughput import Average, Peak
from f16lab.train import Trainer, accuracy, clock, due, evaluate, sample, start_from, steps

INF = float("inf")


def losses(t: Trainer, n: int) -> list[float]:
    return [t.step().loss for _ in range(n)]


def tensors(t: Trainer) -> dict[str, torch.Tensor]:
    return t.state().copy().tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype is b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def numbers(t: Trainer) -> dict:
    """t, key steps and S of each tensor."""
    return json.loads(json.dumps(t.state().values["optimizer"]["tensors"]))


# ---------------------------------------------------------------- it trains
@pytest.mark.parametrize("profile", PROFILES)
def test_every_preset_learns(profile):
    t = trainer(profile, lr=1e-2)
    record = losses(t, 30)
    first, last = sum(record[:5]) / 5, sum(record[-5:]) / 5
    assert abs(record[0] - math.log(32)) < 0.2 and last < first - 0.25, record
    assert t.step_number == 30 and abs(evaluate(t).loss - last) < 0.2


def test_the_same_run_in_three_fresh_processes():
    command = [sys.executable, str(Path(runs.__file__)), "digests"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    first, second, third = (json.loads(p.communicate()[0]) for p in processes)
    assert first == second == third and len(set(first.values())) == len(PROFILES)
    assert first == runs.digests()  # nor does it matter what this process has done before


@pytest.mark.parametrize("profile", ["f32", "f16", "bf16_sr", "all_f16"])
def test_looking_changes_no_bit(profile):
    seen = []
    looking = trainer(profile, meters_every=1, ledger=True)
    looking.bus.subscribe(seen.append)
    blind = trainer(profile, meters_every=0, ledger=False)
    a, b = [], []
    for step in range(50):
        a.append(looking.step())
        b.append(blind.step())
        if step % 10 == 3: evaluate(looking), sample(looking)
    assert looking.digest() == blind.digest()
    assert [(r.loss, r.grad_norm) for r in a] == [(r.loss, r.grad_norm) for r in b]
    assert seen == a and all(r.tensors for r in a) and not any(r.tensors or r.casts for r in b)
    assert bool(a[0].casts) is (profile != "f32")


@pytest.mark.parametrize("part", ["seed", "profile", "data", "batch", "lr", "dropout"])
def test_what_matters_is_in_the_digest(part):
    changes = dict(seed=1, profile="master_weights", batch=2, lr=1e-3, dropout=0.1)
    a = trainer("f16")
    b = Trainer(a.config.with_(**{name: value for name, value in changes.items() if name == part}),
                replace(source(), train=source(13_000).train) if part == "data" else source())
    losses(a, 1), losses(b, 1)
    assert a.digest() != b.digest()


def test_dropout_noise_belongs_to_the_place_in_the_step():
    """However micro-batches are shared, the same is dropped: the noise knows the place in the step, not who works."""
    t = trainer("f32", accumulate=2, dropout=0.5)
    seen, real = [], t.loss
    t.loss = lambda *a, draw, **k: (seen.append(draw), real(*a, draw=draw, **k))[1]
    t.step(), t.step()
    places = [(d.seed, d.step, d.micro, d.sample0) for d in seen]
    assert places == [(0, 0, 0, 0), (0, 0, 1, 4), (0, 1, 0, 0), (0, 1, 1, 4)]


# ---------------------------------------------------------------- a skipped step
def spoil(t: Trainer, name: str, at) -> None:
    """Gradients of the parameter `name` are inf in the steps `at`."""
    p = dict(named_parameters_once(t.model))[name]
    p.register_hook(lambda g: torch.full_like(g, INF) if t.step_number in at else g)


@pytest.mark.parametrize("profile", ["f32", "f16", "master_weights", "bf16", "all_f16", KAHAN])
def test_a_skipped_step_is_a_no_op(profile):
    t = trainer(profile, schedule="linear", weight_decay=0.1)
    spoil(t, "blocks.0.mlp.fc.weight", at=(1, 2))
    t.step()
    before, at, scale = tensors(t), numbers(t), t.gate.loss_scale.scale
    records = [t.step(), t.step()]
    assert same(before, tensors(t)) and numbers(t) == at
    assert all(r.skipped and r.skip_reason == "non-finite" and not math.isfinite(r.grad_norm) for r in records)
    assert all(math.isfinite(r.loss) for r in records)
    assert [r.lr for r in records] == [t.schedule.at(1), t.schedule.at(2)]  # the clocks of rate and data run on
    assert t.step_number == t.inputs.train.position == 3
    factor = 4 if t.gate.loss_scale.mode == "dynamic" else 1
    assert t.gate.loss_scale.scale == scale / factor and t.gate.loss_scale.skips == 2
    after = t.step()
    assert not after.skipped and after.lr == t.schedule.at(3) and not same(before, tensors(t))
    assert {entry["t"] for entry in numbers(t).values()} == {2} and t.gate.loss_scale.skips == 0


def test_the_state_of_each_profile_holds_what_a_skip_must_keep():
    """So that the test above looks at something."""
    names = {p: tensors(trainer(p)) for p in ("f32", "bf16", KAHAN)}
    kinds = {p: {n.split("/")[0] for n in held if n.startswith("optimizer")} for p, held in names.items()}
    assert kinds == {"f32": {"optimizer.m", "optimizer.v"}, "bf16": {"optimizer.m", "optimizer.v", "optimizer.master"},
                     KAHAN: {"optimizer.m", "optimizer.v", "optimizer.compensation"}}
    assert {entry["S"] for entry in numbers(trainer("all_f16")).values()} == {1024.0}


def test_the_first_update_after_skips_is_the_first():
    t = trainer("f32", lr=1e-2, clip=0.0, beta1=0.9, beta2=0.95)
    spoil(t, "wte.weight", at=(0, 1))
    w = t.model.blocks[0].mlp.fc.weight
    before = w.detach().clone()
    t.step(), t.step()
    assert torch.equal(before, w)
    t.step()
    g = w.grad.abs()
    moved = (w.detach() - before).abs()[g > 1e-4]
    assert len(moved) > 100 and ((moved - 1e-2).abs() < 1e-5).all()  # lr at t = 1; 0.62 lr had the skips been counted


def test_an_overflow_of_f16_itself():
    """No planted inf: a loss scale that f16 cannot carry is found, and halved until it can."""
    t = trainer("f16")
    t.gate = replace(t.gate, loss_scale=LossScale("dynamic", 2.0**24))
    records = [t.step() for _ in range(12)]
    skipped = [r.skipped for r in records]
    assert skipped == sorted(skipped, reverse=True) and skipped[0] and not skipped[-1]
    assert t.gate.loss_scale.scale == 2.0 ** (24 - sum(skipped))
    assert all(r.loss < 3.7 for r in records)  # the scale is never in the loss


def test_hopeless_overflow_ends_the_run_by_name():
    t, heard = trainer("f16"), []
    t.bus.subscribe(heard.append)
    spoil(t, "blocks.0.attn.qkv.weight", at=range(1000))
    before, yielded = tensors(t), []
    with pytest.raises(TooManySkips, match=r"20 steps in a row .* blocks\.0\.attn\.qkv\.weight") as error:
        for record in steps(t): yielded.append(record)
    scales = [r.loss_scale for r in yielded if isinstance(r, StepRecord)]
    assert scales == [2.0 ** max(0, 16 - k) for k in range(20)]  # the floor 1 after 16 halvings, then it stays
    assert same(before, tensors(t)) and t.step_number == 20 and error.value.skips == 20
    assert [r for r in heard if isinstance(r, StepRecord)] == [r for r in yielded if isinstance(r, StepRecord)]
    assert heard[-1] == RunEnded(20, "failed", f"TooManySkips: {error.value}")
    assert sum(isinstance(r, EventRecord) and r.kind == "skip" for r in heard) == 20
    assert sum(isinstance(r, EventRecord) and r.kind == "scale" for r in heard) == 16


def test_without_a_loss_scale_the_run_ends_too():
    t = trainer("bf16")
    spoil(t, "wte.weight", at=range(1000))
    for _ in range(19): t.step()
    with pytest.raises(TooManySkips, match="wte.weight"): t.step()


def test_a_failure_is_told_and_raised():
    t, heard = trainer(), []
    t.bus.subscribe(heard.append)
    t.loss = lambda *a, **k: 1 / 0
    with pytest.raises(ZeroDivisionError): list(steps(t))
    assert heard == [RunEnded(0, "failed", "ZeroDivisionError: division by zero")]


# ---------------------------------------------------------------- norm, unscale, clip
def planted(t: Trainer, gradient: list[float], micros: int) -> None:
    """The gradient of ln_f.weight is `gradient` over all micro-steps, that of everything else 0."""
    w = t.model.ln_f.weight
    def loss(inputs, targets, *, weight, scale, draw):
        value = sum(g * x for g, x in zip(gradient, w)) / micros
        return Loss(value * scale, value.detach())
    t.loss = loss


@pytest.mark.parametrize("micros", [1, 4])
def test_norm_is_unscaled_and_clip_comes_after(micros):
    t = trainer("f32,compute=f16,loss_scale=2^16", accumulate=micros, beta1=0.0)
    planted(t, [3.0, 4.0], micros)
    r = t.step()
    assert r.grad_norm == 5.0 and r.loss_scale == 65536 and r.clip == pytest.approx(0.2)
    m = t.state().tensors["optimizer.m/ln_f.weight"]
    assert torch.allclose(m[:2], torch.tensor([0.6, 0.8]), rtol=1e-6) and not m[2:].any()


def test_a_step_after_an_outlier_skip_runs():
    t = trainer("f32,compute=f16,loss_scale=2^16", skip_norm_z=1.5, beta1=0.0)
    t.gate = replace(t.gate, norm_outlier=replace(t.gate.norm_outlier, window=4))
    for gradient in ([3.0, 4.0], [3.1, 4.0], [3.0, 4.1], [3.1, 4.1]): planted(t, gradient, 1), t.step()
    before, at = tensors(t), numbers(t)
    planted(t, [30.0, 40.0], 1)
    bad = t.step()
    assert bad.skipped and bad.skip_reason == "outlier" and bad.grad_norm == 50.0 and bad.extra["norm_z"] > 1.5
    assert same(before, tensors(t)) and numbers(t) == at and t.gate.loss_scale.scale == 65536
    planted(t, [3.0, 4.0], 1)
    good = t.step()
    assert not good.skipped and good.grad_norm == 5.0 and {e["t"] for e in numbers(t).values()} == {5}


def test_no_clipping():
    t = trainer("f32", clip=0.0, beta1=0.0)
    planted(t, [30.0, 40.0], 1)
    assert t.step().clip == 1 and t.state().tensors["optimizer.m/ln_f.weight"][:2].tolist() == [30.0, 40.0]


# ---------------------------------------------------------------- micro-batches and tokens
UNEVEN = 3  # the token that has no loss


def uneven_data() -> TokenData:
    """The chain; of every third window nearly all tokens are replaced by the one without a loss."""
    ids = source().train.shards[0].copy()
    for start in range(0, len(ids), 48): ids[start:start + 15] = UNEVEN
    return TokenData.of(ids, 32, "uneven")


def accumulated(batch: int, micros: int) -> tuple[Trainer, StepRecord]:
    t = runs.ignoring(trainer("f32", batch=batch, accumulate=micros, lr=0.0), UNEVEN, uneven_data())
    return t, t.step()


def test_micro_batches_weigh_by_tokens():
    (whole, one), *others = (accumulated(b, 8 // b) for b in (8, 4, 2))
    grads = {n: p.grad.clone() for n, p in named_parameters_once(whole.model)}
    for t, r in others:
        assert r.tokens == one.tokens < 8 * 16
        assert r.loss == pytest.approx(one.loss, rel=1e-6) and r.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        for name, p in named_parameters_once(t.model):
            assert torch.allclose(p.grad, grads[name], rtol=1e-4, atol=1e-7), name
    # the mean of means, which this must not be, is another number
    t = others[-1][0]
    parts = [t.inputs.train.batch(k) for k in range(4)]
    counts = [int((b.targets != IGNORE_INDEX).sum()) for b in parts]
    means = [t.model.loss(b.inputs, b.targets, weight=1 / n).recorded.item() for b, n in zip(parts, counts)]
    assert max(counts) > 1.5 * min(counts) and abs(sum(means) / 4 - one.loss) > 1e-4
    assert sum(m * n for m, n in zip(means, counts)) / sum(counts) == pytest.approx(one.loss, rel=1e-6)


def test_the_loss_is_the_mean_over_targets():
    t = runs.ignoring(trainer("f32", lr=0.0), UNEVEN)
    b = t.inputs.train.batch(0)
    with torch.no_grad(): expected = F.cross_entropy(t.model.logits(b.inputs).flatten(0, 1), b.targets.flatten())
    assert t.step().loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("profile", ["f16", "all_f16"])
def test_a_step_without_targets_updates_nothing(profile):
    empty = TokenData.of([UNEVEN] * 400, 32, "nothing to learn")
    t = runs.ignoring(trainer(profile, weight_decay=0.1), UNEVEN, empty)
    before, at, gate = tensors(t), numbers(t), t.gate
    r = t.step()
    assert r.skipped and r.skip_reason == "no targets" and r.tokens == 0 and math.isnan(r.loss)
    assert same(before, tensors(t)) and numbers(t) == at and t.gate == gate and t.step_number == 1


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_schedule_counts_steps_of_the_loop(accumulate):
    t = trainer("f32", accumulate=accumulate, schedule="cosine", lr=1e-3, steps=100, channels=16, context=8, batch=2)
    spoil(t, "wte.weight", at=(3, 11))
    records = [t.step() for _ in range(26)]
    assert records[25].lr == pytest.approx(8.5355e-4, rel=1e-4) and sum(r.skipped for r in records) == 2
    assert {entry["t"] for entry in numbers(t).values()} == {24}


# ---------------------------------------------------------------- the stream of records, stop and commands
def kinds(records: list) -> str:
    letters = {StepRecord: "s", EvalRecord: "e", SampleRecord: "t", EventRecord: "i", RunEnded: "!"}
    return "".join(letters[type(r)] for r in records)


def test_the_order_of_records():
    t, heard = trainer(steps=7, eval_every=3, sample_every=5, sample_tokens=4), []
    t.bus.subscribe(heard.append)
    yielded = list(steps(t))
    assert kinds(yielded) == "e" + "ssse" + "sst" + "se" + "set!"
    assert heard == yielded and yielded[-1] == RunEnded(7, "finished", "")
    assert [r.step for r in yielded if isinstance(r, EvalRecord)] == [0, 3, 6, 7]
    assert list(steps(t)) == [RunEnded(7, "finished", "")]  # nothing is left to do


def test_due():
    assert [s for s in range(11) if due(s, 4, 10)] == [0, 4, 8, 10] and not any(due(s, 0, 10) for s in range(11))


def test_a_recipe_is_enough():
    records = list(steps(small(steps=2)))
    assert kinds(records) == "ss!"


def test_stop_ends_after_the_step_in_hand():
    t, seen = trainer("f16", steps=12), []
    for record in steps(t):
        seen.append(record)
        if record.step == 4 and isinstance(record, StepRecord): t.stop("enough")
    assert seen[-1] == RunEnded(5, "stopped", "enough") and kinds(seen) == "sssss!"
    list(steps(t))  # and it can go on
    unbroken = trainer("f16", steps=12)
    losses(unbroken, 12)
    assert t.step_number == 12 and t.digest() == unbroken.digest()


def test_stop_from_another_thread():
    t, seen, enough = trainer("f32", steps=2000), [], threading.Event()
    def press():
        enough.wait()
        t.stop("button")
    presser = threading.Thread(target=press)
    presser.start()
    for record in steps(t):
        seen.append(record)
        if len(seen) == 5: enough.set()
    presser.join()
    assert seen[-1] == RunEnded(t.step_number, "stopped", "button") and 5 <= t.step_number < 2000


def test_a_stop_in_the_last_step_comes_too_late():
    t = trainer(steps=2)
    ended = [r for r in steps(t) if isinstance(r, StepRecord) and r.step == 1 and t.stop() or isinstance(r, RunEnded)]
    assert ended == [RunEnded(2, "finished", "")]


def polls(*answers):
    """Commands as an engine reads them: one answer a poll, nothing after the last."""
    left, count = list(answers), []
    def read():
        count.append(len(count))
        return left.pop(0) if left else []
    read.count = count
    return read


def test_pause_and_resume():
    read = polls([], [("pause", "")], [], [], [("resume", "")])
    t, plain = trainer("f16", steps=4), trainer("f16", steps=4)
    records = list(steps(t, read))
    losses(plain, 4)
    assert kinds(records) == "siisss!" and len(read.count) == 7 and t.digest() == plain.digest()


@pytest.mark.parametrize("answers, taken", [([[("stop", "")]], 0), ([[], [], [("stop", "")]], 2),
                                            ([[], [("pause", "")], [], [("stop", "")]], 1),
                                            ([[("pause", ""), ("resume", "")], [("resume", "")], [("stop", "")]], 2)])
def test_stop_command(answers, taken):
    t = trainer(steps=5)
    records = list(steps(t, polls(*answers)))
    assert records[-1] == RunEnded(taken, "stopped", "stop command") and t.step_number == taken


def test_a_paused_run_can_be_stopped():
    t = trainer(steps=5)
    timer = threading.Timer(0.3, t.stop, ["signal"])
    timer.start()
    assert list(steps(t, polls([("pause", "")])))[-1] == RunEnded(0, "stopped", "signal")
    timer.join()


def test_set_lr():
    t, heard = trainer(steps=4, lr=1e-3, schedule="linear"), []
    t.bus.subscribe(heard.append)
    records = [r for r in steps(t, polls([], [("set", "lr=5e-4")])) if isinstance(r, StepRecord)]
    assert [r.lr for r in records] == pytest.approx([1e-3, 5e-4 * 0.75, 5e-4 * 0.5, 5e-4 * 0.25])
    assert EventRecord(1, "command", "lr set to 0.0005 from step 1 on") in heard
    fresh = Trainer(t.config, source())
    assert fresh.load_state(t.state()) == () and fresh.digest() == t.digest() and fresh.schedule.lr == 5e-4


@pytest.mark.parametrize("argument, words", [
    ("lr=fast", "refused"), ("lr=-1", "refused"), ("lr=nan", "finite"), ("lr=inf", "finite"), ("lr", "refused"),
    ("clip=2", "lr, profile, and the slots"), ("", "lr, profile, and the slots")])
def test_a_bad_value_is_refused_and_the_run_goes_on(argument, words):
    t, heard = trainer(steps=2), []
    t.bus.subscribe(heard.append)
    before = t.schedule
    assert kinds(list(steps(t, polls([("set", argument)])))) == "iss!" and t.schedule == before
    [event] = [r for r in heard if isinstance(r, EventRecord)]
    assert event.kind == "command" and words in event.text


def test_an_unknown_command_is_answered():
    t, heard = trainer(steps=2), []
    t.bus.subscribe(heard.append)
    list(steps(t, polls([("fly", "home")])))
    [event] = [r for r in heard if isinstance(r, EventRecord)]
    assert "'fly'" in event.text and "pause, resume, step, stop, checkpoint, capsule, evaluate, sample, set NAME=VALUE" in event.text


def test_a_display_that_fails_does_not_touch_the_run():
    t, plain = trainer("f16", steps=5), trainer("f16", steps=5)
    t.bus.subscribe(lambda record: 1 / 0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        records = list(steps(t))
    losses(plain, 5)
    assert kinds(records) == "sssss!" and len(heard) == 1 and "ZeroDivisionError" in str(heard[0].message)
    assert t.digest() == plain.digest()


# ---------------------------------------------------------------- two at once
SIDE_BY_SIDE = ("f16", "bf16_sr")


def alone(profile: str) -> tuple[str, list]:
    t = trainer(profile, dropout=0.1)
    records = [t.step() for _ in range(8)]
    return t.digest(), [r.casts for r in records]


def test_two_trainers_in_lockstep_share_nothing():
    pair = [trainer(p, dropout=0.1) for p in SIDE_BY_SIDE]
    casts = [[], []]
    for _ in range(8):
        for t, rows in zip(pair, casts): rows.append(t.step().casts)
    assert [(t.digest(), rows) for t, rows in zip(pair, casts)] == [alone(p) for p in SIDE_BY_SIDE]
    assert casts[0][1] == casts[0][2] and {row.phase for row in casts[0][1]} == {"train", "optimizer"}


def test_two_trainers_in_two_threads_do_not_change_each_other():
    """Weights and losses stay apart. Ledgers are open to the whole process, so cast counts may hold the other's too."""
    pair, barrier, seen = [trainer(p, dropout=0.1) for p in SIDE_BY_SIDE], threading.Barrier(2), {}
    def work(t, name):
        barrier.wait()
        seen[name] = [t.step().loss for _ in range(8)]
    threads = [threading.Thread(target=work, args=args) for args in zip(pair, SIDE_BY_SIDE)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert [t.digest() for t in pair] == [alone(p)[0] for p in SIDE_BY_SIDE] and len(seen) == 2


# ---------------------------------------------------------------- evaluation, accuracy, samples
def test_evaluation_weighs_by_tokens():
    t = runs.ignoring(trainer("f32", eval_batches=3, batch=2), UNEVEN)
    batches = list(t.inputs.val.sweep(3))
    with torch.no_grad():
        logits = torch.cat([t.model.logits(b.inputs).flatten(0, 1) for b in batches])
    targets = torch.cat([b.targets.flatten() for b in batches])
    record = evaluate(t)
    assert record.tokens == int((targets != IGNORE_INDEX).sum()) < 3 * 2 * 16
    assert record.loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)


def test_evaluation_sees_the_whole_side_if_asked_and_no_dropout():
    t = trainer("f32", eval_batches=0, dropout=0.5)
    assert evaluate(t).tokens == t.inputs.val.steps_per_epoch() * 4 * 16 and evaluate(t) == evaluate(t)


def test_evaluation_without_targets():
    t = runs.ignoring(trainer(), UNEVEN)
    t.inputs.val.data = TokenData.of([UNEVEN] * 1000, 32)
    assert math.isnan(evaluate(t).loss) and evaluate(t).tokens == 0 and math.isnan(accuracy(t))


@pytest.mark.parametrize("profile", ["f16", "bf16_sr", "t1_58"])
def test_neither_evaluation_nor_samples_change_a_bit(profile):
    looking, blind = (trainer(profile, dropout=0.1, sample_tokens=8, eval_batches=2) for _ in range(2))
    accuracy(looking)
    for _ in range(6):
        evaluate(looking), sample(looking)
        looking.step(), blind.step()
    assert looking.digest() == blind.digest()


def test_accuracy_of_tokens_counts_tokens():
    t = trainer("f32", steps=60)
    losses(t, 60)
    loader = t.inputs.val
    rows = [loader.rows(torch.tensor([i])) for i in range(loader.order.count)]  # every window, the last ones too
    with torch.no_grad(): hits = [(t.model.logits(x).argmax(-1) == y).float().mean().item() for x, y in rows]
    assert accuracy(t) == pytest.approx(sum(hits) / len(hits)) and 0.1 < accuracy(t) < 0.9


@pytest.fixture(scope="module")
def images() -> Source:
    return open_source(small(data="digits").data)


def image_run(profile: str, images: Source, **changes) -> Trainer:
    shape = dict(model="cnn", data="digits", layers=0, heads=0, channels=0, context=0, batch=25, lr=3e-3)
    return Trainer(small(profile, **{**shape, **changes}), images)


def test_images_train_and_all_of_them_are_judged(images):
    t = image_run("f16", images)
    assert isinstance(t.inputs.model, CNNConfig)
    before = accuracy(t)
    assert before < 0.5 and math.isclose(before * 297, round(before * 297), abs_tol=1e-9)  # of all, not of 11 batches
    first, *_, last = losses(t, 30)
    assert last < first - 0.5 and accuracy(t) > before


def test_images_have_no_samples(images):
    with pytest.warns(UserWarning, match="sample_every=1 has no effect"):
        t = image_run("f32", images, sample_every=1, steps=2)
    assert kinds(list(steps(t))) == "ss!"


def test_a_sample_of_bytes_is_text(tmp_path):
    for name in "ab": (tmp_path / f"{name}.txt").write_text("so it goes, and then it goes on. " * 60)
    t = Trainer(small("f16", data=str(tmp_path), sample_tokens=20, lr=1e-2))
    losses(t, 5)
    text = sample(t).text
    assert isinstance(text, str) and text and t.inputs.tokenizer.vocab_size == 257 and sample(t).text == text
    assert set(sample(trainer(sample_tokens=9)).text.split()) <= set(map(str, range(32)))  # ids, where there is no text


# ---------------------------------------------------------------- speed
def test_the_average_is_right_from_its_first_value_and_after_a_resume():
    t = trainer()
    assert [clock(t, 9.0), t.average.weight] == [9.0, 0.0]  # the first step of a process warms up
    clock(t, 2.0)
    assert t.average.value == pytest.approx(2.0)
    clock(t, 4.0)
    assert t.average.value == pytest.approx((0.95 * 2 + 4) / 1.95)
    other = trainer()
    other.load_state(t.state())
    assert other.average == t.average and other.digest() == t.digest()
    clock(other, 100.0)
    assert other.average == t.average  # its first step warms up, too
    t.average = Average()
    assert other.digest() == t.digest()  # times are no numbers of the run


def test_speed_and_utilisation():
    t = trainer("f16")
    t.peak = Peak(1e9, "made up")
    records = [t.step() for _ in range(3)]
    for r in records:
        assert r.tokens_per_second == pytest.approx(64 / r.seconds)
        assert r.extra["mfu"] == pytest.approx(t.model.flops_per_token() * r.tokens_per_second / 1e9)
    assert "seconds_average" not in records[0].extra
    assert records[1].extra["seconds_average"] == pytest.approx(records[1].seconds)
    assert "mfu" not in trainer().step().extra


def test_a_measured_peak_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    t = trainer(mfu=True)
    assert t.peak.flops > 1e7 and "measured" in t.peak.source and torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------- from given weights
def trained() -> dict[str, torch.Tensor]:
    t = trainer("f32")
    losses(t, 10)
    return {n: p.detach().clone() for n, p in named_parameters_once(t.model)}


def test_start_from_keeps_what_rounding_loses():
    w = trained()
    runs_ = {p: start_from(small(p), w, source()) for p in ("f32", "f16", "bf16", KAHAN, "all_f16", "t1_58")}
    for profile, t in runs_.items():
        assert t.step_number == 0 and {e["t"] for e in numbers(t).values()} == {0}
        for name, p in named_parameters_once(t.model):
            assert torch.equal(p, w[name].to(p.dtype)), (profile, name)
    masters = tensors(runs_["bf16"])
    rest = tensors(runs_[KAHAN])
    for name, x in w.items():
        assert torch.equal(masters[f"optimizer.master/{name}"], x.flatten())
        whole = x.bfloat16().double().flatten() + rest[f"optimizer.compensation/{name}"].double()
        assert torch.allclose(whole, x.double().flatten(), rtol=2**-15, atol=0), name
    assert any((x.bfloat16().float() != x).any() for x in w.values())


def test_start_from_its_own_initial_values_is_the_ordinary_start():
    t = trainer("bf16")
    initial = {n: t.state().tensors[f"optimizer.master/{n}"].view_as(p) for n, p in named_parameters_once(t.model)}
    again = start_from(small("bf16"), initial, source(), Bus())
    assert again.digest() == t.digest()
    losses(again, 3), losses(t, 3)
    assert again.digest() == t.digest()


def test_start_from_copies():
    w = trained()
    t = start_from(small("f32"), w, source())
    losses(t, 1)
    assert all(torch.equal(a, b) for a, b in zip(w.values(), trained().values()))


def test_start_from_wrong_weights():
    w = trained()
    for bad, words in (({k: v for k, v in w.items() if k != "ln_f.weight"}, "ln_f.weight: given is nothing"),
                       ({**w, "more.weight": torch.ones(1)}, "more.weight: .* starts from nothing"),
                       ({**w, "ln_f.weight": torch.ones(5)}, r"ln_f.weight: given is torch.float32 \[5\]"),
                       ({**w, "ln_f.weight": w["ln_f.weight"].half()}, "ln_f.weight: given is torch.float16")):
        with pytest.raises(ValueError, match=words) as e: start_from(small(), bad, source())
        assert "\n" not in str(e.value)


def test_presets_are_all_here():
    assert set(PRESETS) < set(PROFILES)
