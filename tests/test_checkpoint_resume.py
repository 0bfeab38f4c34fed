"""What is resumed is the run that was not stopped: each preset and boundary, other ranks, other profiles, failures."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import train_runs as runs
from test_optim import build, on_ranks, run as run_optimizer
from train_runs import PROFILES, small, source

from f16lab import checkpoint, saving
from f16lab.checkpoint import Refused, SaveFailed, damage, done_steps, examine, file_name, newest
from f16lab.config import CheckpointSettings
from f16lab.data import TokenData
from f16lab.events import EventRecord, RunEnded, StepRecord
from f16lab.inputs import Source
from f16lab.optim import own_pieces
from f16lab.precision import Precision
from f16lab.profile import PRESETS
from f16lab.resume import keep_in, resume
from f16lab.rounding import kahan_scale
from f16lab.saving import Saver
from f16lab.snapshot import check_rerounded, read_saved, write_rank, write_rest
from f16lab.state import State, digest, generators, set_generators
from f16lab.train import Trainer, evaluate, sample, steps

KEEP = CheckpointSettings(save_every=1, keep=0)
QUICK = dict(channels=16, context=8, batch=2)


def shards() -> Source:
    """Seven shards of odd sizes, so that windows lie across their borders; four optimizer steps an epoch."""
    whole = runs.rich_source()
    ids = np.asarray(whole.train.shards[0])
    cuts = [40, 41, 140, 200, 333, 500]
    pieces = tuple(np.split(ids, cuts))
    return replace(whole, train=TokenData(pieces, 32, whole.train.sha256, "few, in shards"))


def rich(profile: str) -> Trainer:
    """Dropout, micro-steps, warm-up, windows that are soon full, a scale that soon grows, short epochs, many shards."""
    t = Trainer(small(profile, **{**runs.RICH, "steps": 10, "channels": 16}), shards())
    short = {name: replace(getattr(t.gate, name), window=4) for name in ("loss_outlier", "norm_outlier")}
    t.gate = replace(t.gate, **short, loss_scale=replace(t.gate.loss_scale, interval=3))
    return t


def fresh(profile: str) -> Trainer:
    return Trainer(small(profile, **{**runs.RICH, "steps": 10, "channels": 16}), shards())


def trainer(profile: str = "f32", **changes) -> Trainer:
    return Trainer(small(profile, **{**QUICK, **changes}), source())


def saved_run(folder: Path, profile: str = "bf16", last: int = 6, **changes) -> Trainer:
    """A run of some steps with a checkpoint after each second one."""
    t = trainer(profile, **{"save_every": 2, "keep": 0, "steps": 30, **changes})
    keep_in(t, folder)
    while t.step_number < last:
        t.step()
        if t.saver.due(t.step_number, 30):
            t.saver.save(t.state(), "test")
    t.saver.wait()
    return t


# ---------------------------------------------------------------- bit by bit
@pytest.mark.parametrize("profile", PROFILES)
def test_resumed_at_every_boundary(profile, tmp_path):
    t, digests = rich(profile), {}
    saver = Saver(tmp_path, KEEP, saving.about_run(t.config, "cpu"))
    while t.step_number < 10:
        t.step()
        digests[t.step_number] = t.digest()
        saver.save(t.state(), "test")
        if t.step_number % 2:
            evaluate(t), sample(t)
    saver.wait()
    windows = [tuple(examine(tmp_path, s).meta["values"]["gate"]["loss_outlier"]["values"]) for s in digests]
    assert len(windows[5]) == 4 and t.inputs.train.steps_per_epoch() == 4  # edges of windows and epochs are crossed
    for at in digests:
        again = fresh(profile)
        resumed = resume(again, tmp_path, at)
        assert resumed.step == at == again.step_number and resumed.notes == () and again.digest() == digests[at]
        if at < 10:
            again.step()
        assert again.digest() == digests[min(10, at + 1)], at
        if at == 5:  # all the way, through two epochs
            while again.step_number < 10:
                again.step()
            assert again.digest() == digests[10] and again.average.weight == pytest.approx(1 - 0.95**8)
            # the first step of each process is not timed


def test_the_loss_scale_and_its_tracker_come_back(tmp_path):  # in the middle of its interval
    t = trainer("f16")
    t.gate = replace(t.gate, loss_scale=replace(t.gate.loss_scale, scale=1024.0, interval=2))
    saver = Saver(tmp_path, KEEP, saving.about_run(t.config, "cpu"))
    t.step()
    saver.save(t.state(), "test"), saver.wait()
    again = trainer("f16")
    resume(again, tmp_path)
    assert (again.gate.loss_scale.scale, again.gate.loss_scale.tracker) == (1024, 1)
    assert again.step().loss_scale == 1024 and (again.gate.loss_scale.scale, again.gate.loss_scale.tracker) == (2048, 0)


def test_a_learning_rate_set_by_command_goes_on(tmp_path):
    t = trainer(schedule="cosine", steps=100, lr=1e-3)
    keep_in(t, tmp_path)
    commands = iter([[("set", "lr=0.002"), ("checkpoint", "")], *[[]] * 3, [("checkpoint", "")]])
    list(steps(t, lambda: next(commands, [("stop", "")])))
    again = trainer(schedule="cosine", steps=100, lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resume(again, tmp_path).step == 5  # saved when it was stopped
    assert again.step().lr == pytest.approx(2 * 1e-3 * 0.5 * (1 + np.cos(np.pi * 5 / 100)))


def test_the_step_keys_of_weights_are_checked_against_the_model_file(tmp_path):
    """Two intact files of two runs: no hash can see it, the masters do."""
    one, other = saved_run(tmp_path / "a"), saved_run(tmp_path / "b", lr=1e-2)
    mixed = State(
        {
            **other.state().copy().tensors,
            **{k: t for k, t in one.state().copy().tensors.items() if k.startswith("model.")},
        },
        one.state().copy().values,
    )
    files = write_rank(tmp_path / "a", State(mixed.tensors, {**mixed.values, "step": 8}), 0, 1, generators())
    write_rest(
        tmp_path / "a",
        State(mixed.tensors, {**mixed.values, "step": 8}),
        1,
        files,
        **saving.about_run(one.config, "cpu"),
        history=[],
        why="",
        written="",
    )
    again = trainer("bf16")
    resumed = resume(again, tmp_path / "a")
    assert resumed.step == 6 and again.digest() == one.digest()
    assert (
        "checkpoint 8 refused" in resumed.refused[0]
        and "are not what its master rounds to with the key of step 5" in resumed.refused[0]
    )


@pytest.mark.parametrize(
    "profile", ["bf16", "bf16_llmc", "master_weights", "bf16;ln_f:param=f32,master=none,rounding=nearest"]
)
def test_every_flipped_weight_of_a_master_is_seen(profile):
    t = trainer(profile)
    t.step()
    check_rerounded(t.optimizer)
    for group in t.optimizer.buffers:
        if group.master is None:
            continue
        for name in group.layout.names:
            bits = t.optimizer.params[name].data.view(-1).view(torch.int16)
            bits[-1] ^= 1
            with pytest.raises(Refused, match=f"1 of .* weights of {name} are not"):
                check_rerounded(t.optimizer)
            bits[-1] ^= 1
    check_rerounded(t.optimizer)


def test_masters_for_some_tensors_only_resume(tmp_path):
    profile = "bf16;ln_f:param=f32,master=none,rounding=nearest"
    t = saved_run(tmp_path, profile)
    again = trainer(profile)
    resume(again, tmp_path)
    assert again.digest() == t.digest()


def test_tied_weights_are_in_the_file_once(tmp_path):
    t = saved_run(tmp_path)
    held = checkpoint.read_tensors(tmp_path / file_name("model", 6)).tensors
    assert set(held) == set(t.optimizer.params) and not any("lm_head" in name for name in held)
    assert sum(x.nbytes for x in held.values()) == sum(p.nbytes for p in t.optimizer.params.values())


# ---------------------------------------------------------------- other numbers of ranks
def as_state(optimizer, step: int) -> State:
    tensors, plain = optimizer.state()
    weights = {f"model.{n}": p.detach() for n, p in optimizer.params.items()}
    return State(
        {**weights, **{f"optimizer.{k}": t for k, t in tensors.items()}}, dict(step=step, profile="", optimizer=plain)
    )


def write_ranks(folder: Path, optimizers, step: int):
    files, world = {}, len(optimizers)
    folder.mkdir(parents=True, exist_ok=True)
    for rank, optimizer in enumerate(optimizers):
        files |= write_rank(folder, as_state(optimizer, step), rank, world, generators())
    write_rest(folder, as_state(optimizers[0], step), world, files)
    return examine(folder, step)


def go_on_with(profile, state: State, world: int, span: range):
    def one(rank, gather):
        optimizer = build(profile, rank=rank, world=world, gather=gather)
        parts = {k.removeprefix("optimizer."): t for k, t in state.tensors.items() if k.startswith("optimizer.")}
        for name, p in optimizer.params.items():
            p.data.copy_(state.tensors[f"model.{name}"])
        assert optimizer.load_state(parts, state.values["optimizer"]) == ()
        check_rerounded(optimizer)
        return run_optimizer(optimizer, span, size=0.2)

    return gathered(on_ranks(world, one))


def gathered(optimizers):
    """Every rank updates its part of the weights; here they get each other's, as the all-gather of a run does."""
    for optimizer in optimizers:
        for group in optimizer.buffers:
            for name, start, stop, _ in own_pieces(group):
                own = optimizer.params[name].data.view(-1)[start:stop]
                for other in optimizers:
                    other.params[name].data.view(-1)[start:stop] = own
    return optimizers


@pytest.mark.parametrize("name", ["bf16", "all_f16", "bf16_sr", "f32"])
def test_one_to_two_to_four_to_one(name, tmp_path):
    profile, unbroken = PRESETS[name], run_optimizer(build(PRESETS[name]), range(8), size=0.2)
    now = [run_optimizer(build(profile), range(2), size=0.2)]
    for step, world in ((2, 2), (4, 4), (6, 1)):
        now = go_on_with(
            profile, read_saved(write_ranks(tmp_path / str(step), now, step)).state, world, range(step, step + 2)
        )
    whole = read_saved(write_ranks(tmp_path / "end", now, 8)).state
    assert digest(whole) == digest(as_state(unbroken, 8))


def test_missing_and_foreign_rank_files_are_refused(tmp_path):
    profile = PRESETS["bf16"]
    for folder in ("a", "b"):
        ranks = on_ranks(
            3, lambda rank, gather: run_optimizer(build(profile, rank=rank, world=3, gather=gather), range(2))
        )
        found = write_ranks(tmp_path / folder, ranks, 2)
    (tmp_path / "a" / file_name("state", 2, 1)).unlink()
    assert newest(tmp_path / "a") == (None, ("checkpoint 2 refused: state_00000002_00001.safetensors is missing",))
    one, two = (found.path("state", rank) for rank in (1, 2))
    os.replace(one, two.with_suffix(".x")), os.replace(two, one), os.replace(two.with_suffix(".x"), two)
    with pytest.raises(Refused, match=r"is of step, rank, world \(2, 2, 3\), not \(2, 1, 3\)"):
        read_saved(found)


def test_rank_zero_waits_for_every_rank_and_says_whose_file_is_missing(tmp_path):
    profile = PRESETS["bf16"]
    ranks = on_ranks(3, lambda rank, gather: run_optimizer(build(profile, rank=rank, world=3, gather=gather), range(2)))
    savers = [Saver(tmp_path, KEEP, {}, rank=rank, world=3, patience=30.0) for rank in range(3)]
    for rank in (0, 2):
        savers[rank].save(as_state(ranks[rank], 2), "test")
    savers[2].wait()
    time.sleep(0.1)
    assert done_steps(tmp_path) == [] and savers[0].thread.is_alive()  # the file of rank 1 is not there
    savers[1].save(as_state(ranks[1], 2), "test"), savers[1].wait()
    savers[0].wait()
    assert examine(tmp_path, 2).meta["world"] == 3
    savers[0].patience = 0.1
    savers[0].save(as_state(ranks[0], 4), "test")
    with pytest.raises(SaveFailed, match="state_00000004_00001.safetensors was not there after 0.1 s"):
        savers[0].wait()
    savers[0].patience = 600.0
    savers[0].save(as_state(ranks[0], 6), "test")
    start = time.monotonic()
    savers[0].close()  # a run that fails does not wait for ranks that will not come
    assert time.monotonic() - start < 5 and newest(tmp_path)[0].step == 2


def test_ranks_that_hold_everything_save_it_once(tmp_path):
    optimizer = run_optimizer(build(PRESETS["bf16"]), range(2))  # as in stage 0: on each of two ranks
    found = write_ranks(tmp_path, [optimizer, optimizer], 2)
    assert found.path("state", 1).stat().st_size < found.path("state", 0).stat().st_size / 4
    assert digest(read_saved(found).state) == digest(as_state(optimizer, 2))


# ---------------------------------------------------------------- another profile
@pytest.mark.parametrize(
    "old, new",
    [
        ("bf16", "f32"),
        ("bf16", "f16"),
        ("f32", "bf16"),
        ("f32", "f16"),
        ("f16", "master_weights"),
        ("f16", "f32"),
        ("bf16", "bf16_sr"),
        ("bf16_sr", "bf16"),
        ("f32", "bf16_sr,rounding=kahan"),
        ("bf16_sr,rounding=kahan", "f32"),
        ("all_f16", "f16"),
        ("t1_58", "f32"),
    ],
)
def test_resumed_under_another_profile(old, new, tmp_path):
    t = saved_run(tmp_path, old)
    again = trainer(new)
    with pytest.warns(UserWarning, match="profile was .* and is"):
        resumed = resume(again, tmp_path)
    assert "profile was" in resumed.words() and resumed.history[-1]["step"] == 6
    then, now, plain = t.state().tensors, again.state().tensors, t.optimizer.state()[1]["tensors"]
    for name, p in again.optimizer.params.items():
        weight, master = then[f"model.{name}"].reshape(-1), then.get(f"optimizer.master/{name}")
        full = weight.double() if master is None else master.double()
        if (rest := then.get(f"optimizer.compensation/{name}")) is not None:
            full += rest.double() / kahan_scale(Precision.of(rest))
        kept = now.get(f"optimizer.master/{name}", p.reshape(-1))
        if kept.dtype is torch.float32:
            assert torch.equal(kept.double(), full.float().double()), name  # nothing is lost
        else:
            assert torch.equal(kept, full.to(kept.dtype)), name  # rounded once
        assert torch.equal(now[f"optimizer.m/{name}"].double(), then[f"optimizer.m/{name}"].double() / plain[name]["S"])
    check_rerounded(again.optimizer)
    keep_in(again, tmp_path, resumed)
    record = again.step()
    again.saver.save(again.state(), "test"), again.saver.wait()
    assert np.isfinite(record.loss) and examine(tmp_path, 7).meta["history"][0]["text"].startswith("profile was")
    third = trainer(new)
    assert resume(third, tmp_path).step == 7 and third.digest() == again.digest()


@pytest.mark.parametrize(
    "old, new, words",
    [
        (
            "f16",
            "bf16_sr",
            "wte.weight was kept as f16 without a master, and bf16 does not hold every number of f16: "
            "go on with param=f16 or param=f32",
        ),
        ("bf16_sr", "f16", "was kept as bf16 without a master, and f16 does not hold"),
        ("f32", "all_f16", "entries would change when f32 becomes f16 times"),
    ],
)
def test_a_profile_that_would_lose_something_is_refused_in_one_sentence(old, new, words, tmp_path):
    saved_run(tmp_path, old)
    again = trainer(new)
    before = again.digest()
    with pytest.raises(ValueError, match=words) as e:
        resume(again, tmp_path)
    assert "\n" not in str(e.value) and not isinstance(e.value, Refused) and again.digest() == before


def test_what_is_of_another_run_is_an_error_and_no_older_one_is_taken(tmp_path):
    saved_run(tmp_path)
    for changes, words in (
        (dict(seed=3), "saved with seed 0, this run has 3"),
        (dict(layers=2), "it is of another model"),
        (dict(shuffle=False), "saved position is for shuffle"),
    ):
        with pytest.raises(ValueError, match=words) as e:
            resume(trainer("bf16", **changes), tmp_path)
        assert not isinstance(e.value, Refused) and "no checkpoint" not in str(e.value)


# ---------------------------------------------------------------- broken checkpoints
def test_the_next_older_good_one_is_taken_and_no_good_one_is_lost(tmp_path):
    saved_run(tmp_path)
    damage(tmp_path / file_name("state", 6), "bit")
    damage(tmp_path / file_name("meta", 4), "zeros")
    again = trainer("bf16")
    resumed = resume(again, tmp_path)
    assert resumed.step == 2 and [text[:20] for text in resumed.refused] == [
        "checkpoint 6 refused",
        "checkpoint 4 refused",
    ]
    saver = keep_in(again, tmp_path, resumed)
    assert done_steps(tmp_path) == [2] and len(saver.tidied) == 2
    for step in (3, 4):
        again.step(), saver.save(again.state(), "test")
    saver.wait()
    assert done_steps(tmp_path) == [3, 4] and newest(tmp_path)[0].step == 4  # two are kept
    assert (tmp_path / "aside_00000006" / file_name("DONE", 6)).exists()


def test_none_at_all_and_none_that_is_good(tmp_path):
    assert resume(trainer("bf16"), tmp_path) is None and resume(trainer("bf16"), tmp_path / "nowhere") is None
    saved_run(tmp_path, last=2)
    damage(tmp_path / file_name("model", 2), "cut")
    with pytest.raises(
        ValueError,
        match="no checkpoint in .* can be used: checkpoint 2 refused: model_00000002.safetensors has .* bytes instead of",
    ):
        resume(trainer("bf16"), tmp_path)
    with pytest.raises(ValueError, match="checkpoint 9 refused: DONE_00000009 is missing"):
        resume(trainer("bf16"), tmp_path, 9)


def test_a_folder_with_another_runs_checkpoints_is_refused(tmp_path):
    saved_run(tmp_path)
    with pytest.raises(ValueError, match="holds checkpoints of a run .the last after 6 steps.: resume it"):
        keep_in(trainer("bf16"), tmp_path)
    assert done_steps(tmp_path) == [2, 4, 6]


# ---------------------------------------------------------------- saving beside training
def test_training_goes_on_while_a_save_is_written_and_the_next_save_waits(tmp_path, monkeypatch):
    t = trainer("f16", save_every=2)
    keep_in(t, tmp_path)
    gate, real = threading.Event(), saving.write_rank
    monkeypatch.setattr(saving, "write_rank", lambda *args: (gate.wait(30), real(*args))[1])
    t.step(), t.step()
    first = t.digest()
    assert t.saver.save(t.state(), "test") and not t.saver.save(t.state(), "again")
    t.step(), t.step()  # the state has changed, the copy has not
    assert done_steps(tmp_path) == [] and t.saver.news() == []
    threading.Timer(0.2, gate.set).start()
    t.saver.save(t.state(), "test")
    assert done_steps(tmp_path) == [2] and len(t.saver.news()) == 1
    t.saver.wait()
    assert digest(read_saved(examine(tmp_path, 2)).state) == first == examine(tmp_path, 2).meta["digest"]
    assert digest(read_saved(examine(tmp_path, 4)).state) == t.digest()


@pytest.mark.parametrize("where", ["byte_view", "fsync", "replace"])
def test_a_save_that_fails_anywhere_is_an_error_at_the_next_step_and_harms_nothing(where, tmp_path, monkeypatch):
    """A full disk at a random piece, force or rename of the third checkpoint."""
    rng = random.Random(where)
    for trial in range(4):
        folder = tmp_path / str(trial)
        t = trainer("bf16", steps=9, save_every=2, keep=1)
        keep_in(t, folder)
        each = {"byte_view": len(t.state().tensors), "fsync": 8, "replace": 4}[where]  # in a save
        count, fails = [0], rng.randrange(2 * each + 1, 3 * each + 1)
        place = checkpoint if where == "byte_view" else checkpoint.os
        real = getattr(place, where)

        def sometimes(*args):
            count[0] += 1
            if count[0] >= fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(place, where, sometimes)
            with pytest.raises(SaveFailed, match="could not be written: No space left on device"):
                for record in steps(t):
                    t.saver.join()  # so that the failing save is known at the next step
        found, refused = newest(folder)
        assert refused == () and found.step == (
            6 if where == "fsync" and done_steps(folder)[-1] == 6 else 4
        )  # the last
        assert not list(folder.glob("*.tmp")) and t.step_number == 7  # fsync of the folder comes when all is there
        again = trainer("bf16", steps=9, save_every=2, keep=1)
        keep_in(again, folder, resume(again, folder))
        list(steps(again))
        whole = trainer("bf16", steps=9)
        list(steps(whole))
        assert again.digest() == whole.digest()


def tmpfs(place: Path, options: str):
    """A file system of its own at a place; skips where none can be mounted."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here; failing writes are tested without one")
    return place


def test_a_disk_that_is_really_full(tmp_path):
    place = tmpfs(tmp_path / "small", "size=400k")
    try:
        t = trainer("bf16", steps=30, save_every=2, keep=0, channels=32)
        keep_in(t, place)
        with pytest.raises(SaveFailed, match=r"could not be written: No space left on device \(0 MB are free there\)"):
            list(steps(t))
        found, refused = newest(place)
        assert (
            refused == ()
            and found
            and not list(place.glob("*.tmp"))
            and resume(trainer("bf16", steps=30, channels=32), place)
        )
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_folder_that_can_only_be_read(tmp_path):
    place = tmpfs(tmp_path / "fixed", "size=4m")
    try:
        t = saved_run(place, last=2)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        t.step()
        t.saver.save(t.state(), "test")
        with pytest.raises(SaveFailed, match="could not be written: Read-only file system"):
            t.saver.wait()
        assert resume(trainer("bf16"), place).step == 2
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch):
    def held(folder, step):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(saving, "remove", held)
    t = trainer("f32", steps=4, save_every=2, keep=1)
    keep_in(t, tmp_path)
    said = [r.text for r in steps(t) if isinstance(r, EventRecord)]
    assert "removed 2 not (Device or resource busy)" in said[-1] and done_steps(tmp_path) == [2, 4]


# ---------------------------------------------------------------- in training
def test_saves_are_told_and_the_last_one_is_waited_for(tmp_path):
    t, heard = trainer("f16", steps=7, save_every=3, keep=1, major=3), []
    t.bus.subscribe(heard.append)
    keep_in(t, tmp_path)
    seen = list(steps(t))
    events = [r for r in seen if isinstance(r, EventRecord) and r.kind == "checkpoint"]
    assert [e.text.split(" saved")[0] for e in events] == [f"state after {n} steps" for n in (3, 6, 7)]
    assert [e.step for e in events] == [2, 5, 6] and "(end)" in events[-1].text and "(every 3)" in events[0].text
    assert done_steps(tmp_path) == [3, 6, 7] and heard == seen and isinstance(seen[-1], RunEnded)


@pytest.mark.parametrize(
    "changes, left", [(dict(save_every=3), [3, 5]), (dict(save_every=3, save_on_stop=False), [3]), (dict(), [])]
)
def test_a_run_that_is_stopped_saves_where_there_are_checkpoints(changes, left, tmp_path):
    t = trainer(steps=9, keep=0, **changes) if changes else trainer(steps=9)
    keep_in(t, tmp_path)
    for record in steps(t):
        if isinstance(record, StepRecord) and record.step == 4:
            t.stop("SIGTERM")
    assert done_steps(tmp_path) == left


def test_without_a_folder_nothing_is_saved_and_a_command_says_so():
    t, heard = trainer(steps=3, save_every=1), []
    t.bus.subscribe(heard.append)
    commands = iter([[("checkpoint", "")]])
    list(steps(t, lambda: next(commands, [])))
    assert [r.text for r in heard if isinstance(r, EventRecord)] == [
        "no checkpoint: this run has no folder to keep it in"
    ]


def test_a_checkpoint_can_be_asked_for_while_paused(tmp_path):
    t, heard = trainer(steps=4), []
    t.bus.subscribe(heard.append)
    keep_in(t, tmp_path)

    def commands():
        yield [("pause", ""), ("checkpoint", "")]
        while not done_steps(tmp_path):
            yield []
        yield [("checkpoint", "")]
        yield []
        yield [("resume", "")]
        while True:
            yield []

    reads = commands()
    list(steps(t, lambda: next(reads)))
    texts = [r.text for r in heard if isinstance(r, EventRecord)]
    assert texts[0] == "checkpoint 0 is being written" and any("state after 0 steps saved" in text for text in texts)
    assert "checkpoint 0 is there already" in texts and done_steps(tmp_path) == [0]


def test_saving_changes_no_bit(tmp_path):
    a, b = trainer("all_f16", steps=6, dropout=0.1), trainer("all_f16", steps=6, dropout=0.1, save_every=1)
    keep_in(b, tmp_path)
    list(steps(a)), list(steps(b))
    assert a.digest() == b.digest() and done_steps(tmp_path) == [5, 6]


# ---------------------------------------------------------------- generators and the machine
def draws() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


def test_generators_come_back(tmp_path):
    t = trainer("bf16", save_every=1)
    keep_in(t, tmp_path)
    draws()
    t.step(), t.saver.save(t.state(), "test")
    want = draws()
    t.saver.wait(), draws()
    resume(trainer("bf16"), tmp_path)
    assert draws() == want


def test_generators_that_were_not_saved_are_named():
    before = generators()
    assert set_generators({k: v for k, v in before.items() if k != "numpy"}) == (
        "generators of numpy were not saved: what draws from them does not resume exactly",
    )
    assert json.loads(json.dumps(before)) == generators()


def test_another_machine_is_noted(tmp_path, monkeypatch):
    saved_run(tmp_path)
    monkeypatch.setattr("f16lab.resume.written_by", lambda device: {**saving.written_by(device), "torch": "9.9"})
    assert resume(trainer("bf16"), tmp_path).notes == (f"torch was {torch.__version__} and is 9.9",)


def test_a_fresh_process_resumes_the_same_bits(tmp_path):
    t = saved_run(tmp_path, "all_f16", last=4)
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\nfrom test_checkpoint_resume import resume, trainer\n"
        "t = trainer('all_f16')\nresume(t, sys.argv[1])\nt.step()\nprint(t.digest())"
    )
    place = Path(__file__).resolve().parent
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(place), str(place.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    t.step()
    assert out.stdout.strip() == t.digest(), out.stderr[-2000:]
