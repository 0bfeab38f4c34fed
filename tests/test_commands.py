"""A running trainer obeys: it pauses, steps, looks, stops, and changes its profile as a resume would, or not at all."""

import json
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest
from train_runs import small, source

from f16lab import saving
from f16lab.archive import read_comparison
from f16lab.capsule import folder_of, load_capsule
from f16lab.checkpoint import Refused, SaveFailed, done_steps, examine, read_meta
from f16lab.commands import SETTABLE, VERBS, Control, wanted_profile, wishes
from f16lab.config import read_recipe
from f16lab.console import RunFailed
from f16lab.diary import profiles_held, read_diary
from f16lab.events import EvalRecord, EventRecord, RunEnded, SampleRecord, StepRecord
from f16lab.inspecting import verify
from f16lab.keeping import Keeper
from f16lab.origin import probed
from f16lab.parallel import Ranks, in_threads
from f16lab.profile import PRESETS, PrecisionProfile
from f16lab.replaying import replay_step
from f16lab.resume import resume
from f16lab.runlog import COMMANDS, RunLog, RunReader, send_command
from f16lab.running import begin, follow, opened_log
from f16lab.saved_runs import go_on, saved_config
from f16lab.snapshot import read_saved
from f16lab.state import digest
from f16lab.train import Trainer, steps
from f16lab.travel import travel

RICH = dict(dropout=0.1, accumulate=2, batch=2, schedule="cosine", warmup=3, steps=10, ledger=False)
CHANGES = [
    ("f32", "f16"),
    ("bf16", "bf16_sr,stable=f32"),
    ("bf16_sr", "f32"),
    ("f16", "f16;lm_head:compute=f32"),
    ("bf16_sr,rounding=kahan", "f16"),
]


def play(
    folder: Path, config, sent: dict = {}, going_on: bool = False, fingerprints: int = 0, seen: list | None = None
) -> Trainer:
    """A run in a folder; the commands of `sent[k]` come when k steps are taken."""
    t, path = Trainer(config), folder / "run.sqlite"
    resumed = resume(t, folder) if going_on else None
    with opened_log(folder, config, going_on) as log, probed(t):
        begin(t, folder, log, resumed)
        for kind, value in sent.get(0, ()):
            send_command(path, kind, value)
        for record in follow(t, log, Keeper(t, folder, fingerprints=fingerprints)):
            if seen is not None:
                seen.append(record)
            for kind, value in sent.get(record.step + 1, ()) if isinstance(record, StepRecord) else ():
                send_command(path, kind, value)
        t.saver.close()
    return t


def heard(config, sent: dict, ranks: Ranks | None = None) -> tuple[Trainer, list]:
    """A run without a folder, and its records; `sent[k]`: verbs and arguments at step k."""
    t = Trainer(config, source(), ranks=ranks)
    waiting = {step: list(some) for step, some in sent.items()}
    return t, list(steps(t, lambda: waiting.pop(t.step_number, [])))


def texts(records: list, kind: str = "command") -> list[str]:
    return [r.text for r in records if isinstance(r, EventRecord) and r.kind == kind]


def events(folder: Path, kind: str = "command") -> list[str]:
    with RunReader(folder / "run.sqlite") as reader:
        table = reader.events()
    return [text for name, text in zip(table["kind"], table["text"]) if name == kind]


# ---------------------------------------------------------------- pause and step
def test_every_command_of_a_run_log_has_its_verb():
    assert {verb.partition(" ")[0] for verb in VERBS} == set(COMMANDS)


@pytest.mark.parametrize(
    "words, left",
    [
        (["pause"], 0),
        (["pause", "resume"], None),
        (["step"], 1),
        (["pause", "step 3"], 3),
        (["step 2", "pause"], 0),
        (["step 0"], None),
        (["step -1"], None),
        (["step x"], None),
        (["pause", "step 1.5"], 0),
        (["step 2", "resume"], None),
    ],
)
def test_steps_that_are_left(words, left):
    control = Control()
    for verb, _, argument in (word.partition(" ") for word in words):
        control.ask(verb, argument)
    assert control.left == left


def test_single_steps_from_the_start():
    polls = iter(
        [
            [("step", "2")],
            [],
            [],
            [("evaluate", ""), ("sample", ""), ("step", "")],
            [],
            [("pause", ""), ("resume", "")],
            [("stop", "")],
        ]
    )
    records = list(steps(Trainer(small(steps=20), source()), lambda: next(polls)))
    marks = [(r.step + 1, r.kind) for r in records if isinstance(r, EventRecord) and r.kind != "command"]
    assert marks == [(2, "paused"), (2, "resumed"), (3, "paused"), (3, "resumed")] and texts(records) == [
        "the run is paused already"
    ]
    assert [type(r).__name__ for r in records if isinstance(r, EvalRecord | SampleRecord)] == [
        "EvalRecord",
        "SampleRecord",
    ]
    assert sum(isinstance(r, StepRecord) for r in records) == 4 and records[-1] == RunEnded(
        4, "stopped", "stop command"
    )


def test_looking_on_command_changes_no_bit():
    plain, _ = heard(small(**RICH), {})
    looked, _ = heard(
        small(**RICH), {k: [("evaluate", ""), ("sample", ""), ("pause", ""), ("step", "")] for k in range(10)}
    )
    assert plain.digest() == looked.digest()


def live(folder: Path, nproc: int = 0) -> subprocess.Popen:
    """A run in a process of its own that waits in front of its first step."""
    words = [
        "train",
        "--data",
        "markov",
        "--layers",
        "1",
        "--channels",
        "32",
        "--heads",
        "2",
        "--context",
        "16",
        "--steps",
        "1000000",
        "--eval-every",
        "0",
        "--no-ledger",
        "--paused",
        "--save-every",
        "1000000",
        "--device",
        "cpu",
        "--timeout",
        "3",
        "--probe-micro",
        "--out",
        str(folder),
    ]
    ranks = ["--nproc", str(nproc), "--accumulate", str(nproc), "--zero-stage", "1"] if nproc else []
    return subprocess.Popen(
        [sys.executable, "-m", "f16lab", *words, *ranks], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def wait_for(folder: Path, kind: str, count: int = 1) -> list[str]:
    """The texts of the events of a kind, as soon as there are so many."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (folder / "run.sqlite").is_file():
            try:
                found = events(folder, kind)
            except ValueError:
                found = []  # it is just being made
            if len(found) >= count:
                return found
        time.sleep(0.02)
    raise AssertionError(f"no {kind} in {folder}")


def test_a_paused_process_steps_and_ends_at_once(tmp_path):
    one, two = live(tmp_path / "one"), live(tmp_path / "two", nproc=2)
    try:
        assert wait_for(tmp_path / "one", "paused") == ["after 0 steps: resume, step or stop"]
        send_command(tmp_path / "one/run.sqlite", "step", 3)
        assert wait_for(tmp_path / "one", "paused", 2)[1].startswith("after 3 steps")
        start = time.monotonic()
        one.send_signal(signal.SIGTERM)
        assert one.wait(30) == 128 + signal.SIGTERM and time.monotonic() - start < 5  # 0.2 s, and what ends a process
        assert done_steps(tmp_path / "one") == [3]
        wait_for(tmp_path / "two", "paused")
        time.sleep(4)  # longer than a rank may be late
        for kind, value in (("step", 2), ("set", {"profile": "f16", "lr": 1e-4}), ("evaluate", None)):
            send_command(tmp_path / "two/run.sqlite", kind, value)
        wait_for(tmp_path / "two", "paused", 2)
        send_command(tmp_path / "two/run.sqlite", "stop")
        assert two.wait(30) == 0, two.stderr.read()
        said = two.stderr.read()
        assert (
            said.count("warning:") == 1 and "probe_micro" in said
        )  # by the process that was started, not by its ranks again
    finally:
        for process in (one, two):
            process.kill() if process.poll() is None else None
    with RunReader(tmp_path / "two/run.sqlite") as reader:
        assert reader.status().step == 1 and profiles_held(reader)[0] == str(PRESETS["f16"])
    meta = read_meta(tmp_path / "two", 2)
    assert meta["world"] == 2 and meta["profile"] == str(PRESETS["f16"]) and len(meta["history"]) == 2


def test_a_stop_is_followed_within_a_step(tmp_path):
    """Sent from another thread while steps are taken: the step in hand is the last, or the one behind it."""
    config, done = small(steps=10**6, ledger=False), []
    t, path = Trainer(config, source()), tmp_path / "run/run.sqlite"

    def send() -> None:
        time.sleep(0.5)
        send_command(path, "stop")
        done.append(t.step_number)

    with opened_log(tmp_path / "run", config) as log:
        begin(t, tmp_path / "run", log, None)
        sender = threading.Thread(target=send)
        sender.start()
        records = list(follow(t, log, Keeper(t, tmp_path / "run")))
        sender.join()
        t.saver.close()
    assert records[-1].status == "stopped" and 0 <= t.step_number - done[0] <= 1


# ---------------------------------------------------------------- set
@pytest.mark.parametrize("before, after", CHANGES)
def test_a_profile_that_is_set_is_a_resume(tmp_path, before, after):
    """Ten steps with another profile from step 5 on: the bits of a run that was stopped at 5 and resumed with it."""
    config = small(before, **RICH, save_every=100)
    t = play(tmp_path / "set", config, {5: [("set", {"profile": after})]})
    play(tmp_path / "resumed", config, {5: [("stop", None)]})
    assert done_steps(tmp_path / "resumed") == [5]
    with pytest.warns(UserWarning, match="with another recipe"):
        u = play(tmp_path / "resumed", config.with_(profile=after), going_on=True)
    assert t.step_number == u.step_number == 10 and t.digest() == u.digest()
    assert str(t.config.profile) == str(PrecisionProfile.parse(after))


REFUSED = [
    ({"profile": "bf16"}, "does not hold every number"),
    ({"profile": "all_f16"}, "would change"),
    ({"lr": 0.1, "profile": "bf16"}, "does not hold"),
    ({"lr": "nan", "compute": "bf16"}, "finite number"),
    ({"lr": -1}, "finite number"),
    ({"compute": "f15"}, "f15"),
    ({"profile": "f17"}, "f17"),
    ({"steps": 3}, "lr, profile, and the slots"),
    ("lr", "finite number"),
    ("", "lr, profile"),
    ("{", "JSON"),
    ({}, "lr, profile"),
    ({"profile": "f16;nowhere:compute=f31"}, "f31"),
    ({"lr": True}, "finite number"),
    ("comptue=f16", "compute"),
]


def test_what_is_refused_has_not_happened(tmp_path):
    plain = play(tmp_path / "plain", small("f16", **RICH))
    asked = play(tmp_path / "asked", small("f16", **RICH), {4: [("set", value) for value, _ in REFUSED]})
    said = events(tmp_path / "asked")
    assert (
        asked.digest() == plain.digest()
        and str(asked.config.profile) == str(PRESETS["f16"])
        and len(said) == len(REFUSED)
    )
    for text, (_, words) in zip(said, REFUSED):
        assert "refused" in text and words in text and "\n" not in text, text


def test_what_may_be_set():
    f16 = PRESETS["f16"]
    assert str(wanted_profile(f16, wishes('{"compute": "bf16", "profile": "f32"}'))) == str(
        PRESETS["f32"].with_(compute="bf16")
    )
    assert str(wanted_profile(f16, {"profile": f16.to_dict()})) == str(f16) and "lr" in SETTABLE
    assert wishes("profile=f16;lm_head:compute=f32") == {"profile": "f16;lm_head:compute=f32"}


def test_the_folder_says_which_profile_held(tmp_path):
    """Events, recipe, checkpoints, capsules, sessions; and who resumes goes on with the profile that was set."""
    config, folder = small("bf16", **RICH, save_every=4, keep=0, probe_every=1, probe_share=1), tmp_path / "run"
    records: list = []
    t = play(
        folder,
        config,
        {5: [("set", {"profile": "f16", "lr": 1e-4}), ("capsule", None)], 9: [("stop", None)]},
        fingerprints=3,
        seen=records,
    )
    changed = str(PRESETS["f16"])
    assert any(
        f"profile set to {changed} from step 5 on" in text for text in events(folder)
    ) and "lr set to 0.0001 from step 5 on" in events(folder)
    assert str(read_recipe(folder / "recipe.toml").profile) == changed == str(saved_config(folder, None).profile)
    assert read_meta(folder, 4)["profile"] == str(config.profile) and read_meta(folder, 4)["history"] == []
    assert read_meta(folder, 9)["profile"] == changed and [e["step"] for e in read_meta(folder, 9)["history"]] == [5, 5]
    with RunReader(folder / "run.sqlite") as reader:
        assert profiles_held(reader) == {0: str(config.profile), 5: changed}
    found = {
        (r.step, h.precision)
        for r in records
        if isinstance(r, StepRecord)
        for h in r.histograms
        if h.tensor == "weight"
    }
    assert {p for step, p in found if step < 5} == {"bf16"} and {p for step, p in found if step >= 5} == {"f16"}, found
    again = replay_step(load_capsule(folder_of(folder, 5)))
    assert again.equal and "every bit" in again.proof and again.own.profile == changed
    assert go_on(str(folder), None, 0, {}) == 0
    with RunReader(folder / "run.sqlite") as reader:
        assert reader.status().status == "finished" and profiles_held(reader) == {0: str(config.profile), 5: changed}
    assert t.step_number == 9 and travel(folder, 10).equal
    assert "from step 5 on f16" in read_comparison(folder / "run.sqlite").contenders[0].note  # the report says it


@pytest.mark.parametrize("broken", ["write_rank", "write_rest"])
def test_until_its_successor_is_whole_a_checkpoint_that_made_room_is_kept(tmp_path, monkeypatch, broken):
    """The disk is full, or the process dies, after a checkpoint made room: what it held is there to resume from."""
    config, folder = small("bf16_sr", **RICH, save_every=4, keep=1), tmp_path / "run"
    real = getattr(saving, broken)

    def fail(*args, **more):
        if done_steps(folder / "aside_00000004"):
            raise SaveFailed("no space left")
        return real(*args, **more)

    monkeypatch.setattr(saving, broken, fail)
    with pytest.raises(RunFailed, match="no space left"):
        play(folder, config, {4: [("pause", None), ("set", {"lr": 0.5}), ("checkpoint", None), ("step", 1)]})
    assert done_steps(folder) == [] and examine(folder / "aside_00000004", 4).meta["history"] == []
    t = Trainer(config)
    assert resume(t, folder / "aside_00000004").step == 4


def test_no_checkpoint_makes_room_where_none_will_be_written(tmp_path):
    """Nothing is saved when the run stops: what is there stays, and what was set is void, which the next one says."""
    config, folder = small("bf16_sr", **RICH, save_every=4, save_on_stop=False), tmp_path / "run"
    play(folder, config, {4: [("pause", None), ("set", {"lr": 0.5}), ("stop", None)]})
    assert done_steps(folder) == [4] and not [*folder.glob("aside*")]
    assert play(folder, config, going_on=True).step_number == 10
    assert "lr 0.5 was set at step 4" in events(folder, "resume")[-1]


def test_a_checkpoint_of_before_the_change_makes_room(tmp_path):
    """Set between two steps at a step that was saved, then stopped there: the change is not lost."""
    config = small("bf16_sr", **RICH, save_every=4)
    for name, more in (("asked", [("checkpoint", None), ("stop", None)]), ("stopped", [("stop", None)])):
        t = play(tmp_path / name, config, {4: [("pause", None), ("set", {"profile": "f32", "lr": 0.5}), *more]})
        found = examine(tmp_path / name, 4)
        assert (
            found.meta["profile"] == str(PRESETS["f32"])
            and digest(read_saved(found).state) == t.digest() == found.meta["digest"]
            and not [*(tmp_path / name).glob("aside*")]
        )
        u = play(tmp_path / name, saved_config(tmp_path / name, None), going_on=True)
        assert (
            u.schedule.lr == 0.5 and str(u.config.profile) == str(PRESETS["f32"]) and travel(tmp_path / name, 7).equal
        )


# ---------------------------------------------------------------- the way back
def test_travel_follows_what_was_set(tmp_path):
    config, folder = small("bf16_sr", **RICH, save_every=6, keep=0), tmp_path / "run"
    play(
        folder,
        config,
        {3: [("set", {"profile": "f32"})], 5: [("set", "lr=0.01")], 7: [("set", {"profile": "f16", "lr": 2e-3})]},
        fingerprints=1,
    )
    diary = read_diary(folder, 0, 0)
    assert [*diary.recipes] == [0, 3, 7] and diary.rates == {5: "0.01", 7: "0.002"}
    for step in range(11):
        there = travel(folder, step)
        assert there.equal and len(there.proofs) >= 1, there.words
        held = max(s for s in diary.recipes if s <= step)
        assert str(there.capsule.config.profile) == str(diary.recipes[held].profile)
    assert replay_step(travel(folder, 6).capsule).equal and replay_step(travel(folder, 2).capsule).equal
    assert "was changed" in " ".join(verify(folder, 1).notes)


def test_there_and_back_at_one_step_is_a_change(tmp_path):
    """From f32 to f16 and to f32 again: the profile is the same, the weights have been rounded."""
    config, folder = small("f32", **RICH, save_every=20), tmp_path / "run"
    config = config.with_(steps=20)
    play(folder, config, {4: [("set", {"profile": "f16"}), ("set", {"profile": "f32"})], 10: [("stop", None)]})
    assert travel(folder, 7).equal and travel(folder, 4).equal and travel(folder, 2).equal
    assert travel(folder, 7).words != "" and digest(travel(folder, 10).capsule.state) == read_meta(folder, 10)["digest"]


def test_what_was_set_behind_the_step_of_a_resume_never_happened(tmp_path):
    config, folder = small("bf16_sr", **RICH, save_every=4, keep=0), tmp_path / "run"
    play(folder, config, {2: [("set", "lr=0.004")], 6: [("set", {"profile": "f32", "lr": 0.5})]}, fingerprints=1)
    for step in (8, 10):
        (folder / f"DONE_{step:08d}").unlink()
    play(folder, config.with_(steps=12), going_on=True)  # from 4
    assert read_diary(folder, 0, 0).rates == {2: "0.004"} and {
        s: c.run.steps for s, c in read_diary(folder, 0, 0).recipes.items()
    } == {0: 10, 4: 12}
    for path in folder.glob("*_00000004*"):
        path.unlink()
    assert all(travel(folder, step).equal for step in (1, 3, 4, 5, 9, 12)) and travel(folder, 5).start == 0


def test_what_is_void_or_came_too_late_is_said(tmp_path):
    """Set behind the checkpoint, then killed: the run goes on without it, and says so. So do commands nobody read."""
    config, folder = small("bf16_sr", **RICH, save_every=4, keep=0), tmp_path / "run"
    play(folder, config, {6: [("set", {"profile": "f32", "lr": 0.5})]})
    for step in (8, 10):
        (folder / f"DONE_{step:08d}").unlink()
    log = RunLog(folder / "run.sqlite")
    for command in (("set", {"lr": 1}), ("pause",)):
        send_command(log.path, *command)
    log.close()
    play(folder, config, going_on=True)  # from 4
    said = events(folder, "resume")[-1]
    assert said.startswith("goes on after 4 steps") and "lr 0.5 was set at step 6" in said
    assert "profile param=f32" in said and events(folder)[-2:] == [
        f"{words} was not read: the run had ended; send it again" for words in ('set {"lr": 1}', "pause")
    ]
    play(folder, config.with_(steps=12), going_on=True)
    assert "was set" not in events(folder, "resume")[-1]  # it is known now


@pytest.mark.parametrize(
    "value", [" 2e-3 ", "2e-3\n", "0.00_2", "٠.002", 10**400, -(10**400), "1" * 5000, {"a": 1}, [2e-3], None]
)
def test_every_rate_is_taken_as_the_number_it_is_or_refused(tmp_path, value):
    config, folder = small("bf16_sr", **RICH, save_every=4), tmp_path / "run"
    t = play(folder, config, {3: [("set", {"lr": value})]}, fingerprints=1)
    taken = isinstance(value, str) and len(value) < 20
    assert t.step_number == 10 and t.schedule.lr == (0.002 if taken else config.optimizer.lr)
    assert read_diary(folder, 0, 0).rates == ({3: "0.002"} if taken else {}) and travel(folder, 6).equal


def test_a_wrong_diary_is_found_out(tmp_path):
    """A change that the log does not know of: the way back says that it is not the run."""
    config, folder = small("bf16_sr", **RICH, save_every=10), tmp_path / "run"
    t = Trainer(config)
    with opened_log(folder, config) as log:
        begin(t, folder, log, None)
        for record in follow(t, log, Keeper(t, folder)):
            if isinstance(record, StepRecord) and record.step == 4:
                t.gate = type(t.gate)(t.gate.loss_scale, t.gate.loss_outlier, t.gate.norm_outlier, 0.01)
        t.saver.close()
    assert not travel(folder, 7).equal and "NOT that of the run" in travel(folder, 7).words


# ---------------------------------------------------------------- several ranks
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_change_together_or_not_at_all(stage):
    config = small("bf16", accumulate=2, batch=2, steps=8, zero_stage=stage, ledger=False)
    sent = {
        2: [("pause", ""), ("set", '{"profile": "f16", "lr": 0.001}'), ("evaluate", ""), ("sample", ""), ("step", "3")],
        5: [("set", "profile=bf16"), ("resume", "")],
    }
    got = in_threads(
        2,
        lambda ranks: [
            f(x)
            for x in [heard(config, sent, ranks)]
            for f in (lambda x: x[0].digest(), lambda x: x[1], lambda x: x[0].schedule.lr)
        ],
    )
    assert got[0][0] == got[1][0] and got[0][2] == 0.001
    said = texts(got[0][1])
    assert (
        said[0].startswith("profile set to")
        and said[1].startswith("lr set to 0.001")
        and "refused" in said[2]
        and texts(got[1][1]) == said
    )
    assert [sum(isinstance(r, SampleRecord) for r in records) for _, records, _ in got] == [1, 0]
    assert [sum(isinstance(r, EvalRecord) for r in records) for _, records, _ in got] == [1, 1]


def test_one_rank_that_refuses_is_enough(monkeypatch):
    """Memory that only one rank lacks: nobody changes, all go on."""
    config, beside = small("bf16", accumulate=2, batch=2, steps=6, ledger=False), Trainer.beside

    def short(self, *args):
        if self.ranks.rank == 1:
            raise RuntimeError("out of memory on this rank")
        return beside(self, *args)

    plain = in_threads(2, lambda ranks: heard(config, {}, ranks)[0].digest())
    monkeypatch.setattr(Trainer, "beside", short)
    got = in_threads(
        2,
        lambda ranks: [
            f(x)
            for x in [heard(config, {2: [("set", "profile=f16")]}, ranks)]
            for f in (lambda x: x[0].digest(), lambda x: texts(x[1]))
        ],
    )
    assert [g[0] for g in got] == plain and all("out of memory on this rank" in g[1][0] for g in got)


# ---------------------------------------------------------------- what is wrong is one sentence
def test_other_models_and_words():
    config = small().with_(model="mlp", data="digits", layers=0, heads=0, channels=0, context=0, steps=2, batch=8)
    t = Trainer(config)
    waiting = [[("sample", ""), ("dance", ""), ("capsule", ""), ("checkpoint", "")]]
    said = texts(list(steps(t, lambda: waiting.pop() if waiting else [])))
    assert (
        "writes no text" in said[0]
        and all(verb in said[1] for verb in VERBS)
        and "no folder" in said[2]
        and "no folder" in said[3]
    )


@pytest.mark.parametrize("name", ["config", "history", "versions", "values", "profile"])
def test_a_meta_file_that_lacks_something_is_refused_in_words(tmp_path, name):
    folder = tmp_path / "run"
    play(folder, small(steps=2, save_every=2))
    path = folder / "meta_00000002.json"
    meta = json.loads(path.read_text())
    del meta[name]
    path.write_text(json.dumps(meta))
    (folder / "DONE_00000002").write_text(sha256(path.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match=name if name != "values" else "gate"):
        resume(Trainer(small(steps=4)), folder)
    out = (
        subprocess.run(
            [sys.executable, "-c", f"from f16lab.cli import command; command().main(['inspect', {str(folder)!r}])"],
            capture_output=True,
            text=True,
        )
        if name == "config"
        else None
    )
    assert out is None or (
        out.returncode == 1 and "lacks config" in out.stderr and len(out.stderr.splitlines()) == 1
    ), out
    with pytest.raises((ValueError, Refused)):
        verify(folder)


def test_a_folder_in_the_place_of_the_log(tmp_path):
    for name in ("run.sqlite", "run.sqlite-lock"):
        folder = tmp_path / name.replace(".", "_")
        (folder / name).mkdir(parents=True)
        with pytest.raises(ValueError, match="is a folder"):
            opened_log(folder, small(), True)


@pytest.mark.parametrize("kind", ["pause", "resume", "checkpoint", "capsule", "evaluate", "sample"])
def test_a_value_that_a_command_has_no_use_for_is_told(tmp_path, kind):
    """Nobody is left to believe that `checkpoint {"keep": 3}` did what it says."""
    plain = play(tmp_path / "a", small("f16", steps=3))
    seen: list = []
    told = play(tmp_path / "b", small("f16", steps=3), {1: [(kind, {"a": 1})]}, seen=seen)
    assert [text for text in texts(seen) if f"{kind} takes no value" in text], texts(seen)
    assert told.digest() == plain.digest() and not done_steps(tmp_path / "b") and not texts(seen, "paused")
