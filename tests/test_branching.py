"""A branch has the bits of its run up to where they part, and says where it comes from; or nothing is written."""

import json
import shutil
import socket
import sqlite3
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner
from train_runs import small

from f16lab import branching
from f16lab.branching import branch
from f16lab.checkpoint import SaveFailed, damage, done_steps, examine, read_meta
from f16lab.cli import command
from f16lab.config import read_recipe, to_dict
from f16lab.console import open_console
from f16lab.profile import PRESETS
from f16lab.runlog import RunReader, send_command
from f16lab.running import begin, follow, opened_log, train_run
from f16lab.keeping import Keeper
from f16lab.saved_runs import go_on
from f16lab.snapshot import read_saved
from f16lab.state import digest
from f16lab.train import Trainer
from f16lab.travel import travel

CONFIG = small(
    "bf16_sr",
    steps=12,
    save_every=5,
    digest_every=4,
    dropout=0.1,
    accumulate=2,
    ledger=False,
    schedule="cosine",
    warmup=2,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 steps with checkpoints after 5, 10 and 12 (the first is not kept), whose rate is set at step 7."""
    folder, t = tmp_path_factory.mktemp("runs") / "run", Trainer(CONFIG)
    with opened_log(folder, CONFIG) as log:
        begin(t, folder, log, None)
        for record in follow(t, log, Keeper(t, folder, fingerprints=4)):
            if getattr(record, "step", 0) == 6 and hasattr(record, "loss_scale"):
                send_command(folder / "run.sqlite", "set", {"lr": 0.01})
        t.saver.close()
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def losses(folder: Path) -> dict[int, float]:
    with RunReader(folder / "run.sqlite") as reader:
        table = reader.steps()
    return dict(zip(table["step"], table["loss"]))


@pytest.mark.parametrize("step", [0, 3, 7, 9, 10])
def test_a_branch_without_changes_is_the_run(run, tmp_path, step):
    before = bytes_of(run)
    folder = branch(run, step, tmp_path / "branch")
    assert done_steps(folder) == [step] and digest(read_saved(examine(folder, step)).state) == digest(
        travel(run, step).capsule.state
    )
    assert go_on(str(folder), None, 0, {}) == 0
    if step < 7:
        return  # the rate was set at 7; a branch of before has no such command
    assert losses(folder) == {s: loss for s, loss in losses(run).items() if s >= step}
    assert read_meta(folder, 12)["digest"] == read_meta(run, 12)["digest"]
    assert bytes_of(run) == before


def test_a_branch_under_another_profile_is_a_resume(run, tmp_path):
    """At a checkpoint: the bits of the run resumed there under that profile."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    folder = branch(run, 10, tmp_path / "branch", {"profile": "f32", "steps": 14})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert go_on(str(copy), 10, 0, {"profile": "f32", "steps": 14}) == 0 == go_on(str(folder), None, 0, {})
    assert (
        losses(folder) == {s: loss for s, loss in losses(copy).items() if s >= 10}
        and read_meta(folder, 14)["digest"] == read_meta(copy, 14)["digest"]
    )
    assert str(read_recipe(folder / "recipe.toml").profile) == str(PRESETS["f32"])


def test_where_it_comes_from(run, tmp_path):
    folder = branch(run, 8, tmp_path / "branch", {"lr": 1e-4, "keep": 1, "save_every": 2})
    meta = read_meta(folder, 8)
    assert (
        meta["branch"]["run"] == str(run.resolve())
        and meta["branch"]["step"] == 8
        and "proven" in meta["branch"]["proof"]
    )
    assert meta["branch"]["digest"] == digest(travel(run, 8).capsule.state) and "lr was" in meta["history"][0]["text"]
    with RunReader(folder / "run.sqlite") as reader:
        assert (
            "branch" in reader.events()["kind"]
            and reader.status().status == "stopped"
            and reader.sessions()[0]["config"] == json.loads(json.dumps(to_dict(read_recipe(folder / "recipe.toml"))))
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train_run(read_recipe(folder / "recipe.toml"), folder, open_console(), going_on=True) == 0
    assert done_steps(folder) == [8, 12]  # the first stays
    assert all(travel(folder, step).equal and travel(folder, step).start == 8 for step in (8, 9, 11))
    with pytest.raises(ValueError, match="branch that begins at step 8"):
        travel(folder, 5)
    again = branch(folder, 9, tmp_path / "again")  # of a branch
    assert read_meta(again, 9)["branch"]["run"] == str(folder.resolve())


def test_bad_input_is_one_sentence_and_nothing_is_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    new = tmp_path / "new"
    bad = [
        ((run, 99, new), "states before steps 0…12"),
        ((tmp_path / "none", 1, new), "no such folder"),
        ((tmp_path / "full", 1, new), "neither"),
        ((run, 3, tmp_path / "file"), "is a file"),
        ((run, 3, tmp_path / "full"), "not empty"),
        ((run, 3, run), "run itself"),
        ((run, 3, tmp_path / "file/below"), "is a file"),
        ((run, 12, new), "none left"),
        ((run, 3, new, {"steps": 3}), "none left"),
        ((run, 3, new, {"stepz": 3}), "stepz"),
        ((run, 3, new, {"profile": "f17"}), "f17"),
        ((run, 3, new, {"profile": "f16"}), "does not hold"),
        ((run, 3, new, {"seed": 7}), "seed"),
        ((run, 3, new, {"layers": 3}), "another model"),
        ((run, -1, new), "states before"),
    ]
    for call, words in bad:
        with pytest.raises(ValueError, match=words) as error:
            branch(*call)
        assert "\n" not in str(error.value) and not new.exists()


@pytest.mark.parametrize(
    "writes, fault",
    [
        ("write_file", SaveFailed("full")),
        ("RunLog", sqlite3.OperationalError("full")),
        ("write_rank", KeyboardInterrupt()),
        ("write_rest", OSError(28, "full")),
    ],
)
def test_what_cannot_be_written_leaves_nothing_of_a_branch(run, tmp_path, monkeypatch, writes, fault):
    def fail(*args, **more):
        raise fault

    new, there = tmp_path / "new", tmp_path / "there"
    there.mkdir()
    (there / "console.txt").write_text("begun")
    monkeypatch.setattr(branching, writes, fail)
    for folder in (new, there):
        with pytest.raises(KeyboardInterrupt if writes == "write_rank" else SaveFailed):
            branch(run, 10, folder)
    assert not new.exists() and [p.name for p in there.iterdir()] == ["console.txt"]


def test_a_branch_whose_log_lost_something_is_none(run, tmp_path, monkeypatch):
    monkeypatch.setattr(branching.RunLog, "lost", property(lambda log: 1))
    with pytest.raises(SaveFailed, match="disk full"):
        branch(run, 10, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_not_what_it_was_has_no_branch(run, tmp_path):
    """Its log says other losses than come out: refused before anything is written."""
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with sqlite3.connect(copy / "run.sqlite") as db:
        db.execute("UPDATE event SET text = ? WHERE kind = 'fingerprint'", ("0" * 64,))
    with pytest.raises(ValueError, match="NOT that of the run"):
        branch(copy, 7, tmp_path / "new")
    damage(copy / "model_00000010.safetensors", "bit")
    assert not (tmp_path / "new").exists()


def cli(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(command(), [str(w) for w in words])
    return result.exit_code, result.stdout, result.stderr


def test_the_command(run, tmp_path):
    code, out, err = cli(
        "branch", run, "--step", 10, "--out", tmp_path / "a", "--precision-stable", "f32", "--no-train"
    )
    assert (
        code == 0
        and "f16lab resume" in out
        and str(read_recipe(tmp_path / "a/recipe.toml").profile) == str(CONFIG.profile.with_(stable="f32"))
    ), err
    code, out, err = cli("branch", run, "--step", 10, "--out", tmp_path / "b", "--lr", "1e-4")
    assert code == 0 and done_steps(tmp_path / "b") == [10, 12] and [*losses(tmp_path / "b")] == [10, 11], err
    code, out, err = cli("branch", run, "--step", 10, "--out", tmp_path / "b")
    assert code == 2 and "not empty" in err and len(err.splitlines()) == 1


def test_a_port_that_is_taken_is_said_at_once(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        code, _, err = cli(
            "train",
            "--nproc",
            2,
            "--accumulate",
            2,
            "--rendezvous",
            f"tcp://127.0.0.1:{s.getsockname()[1]}",
            "--out",
            tmp_path / "run",
        )
    assert code == 2 and "another process listens" in err and not (tmp_path / "run").exists()
