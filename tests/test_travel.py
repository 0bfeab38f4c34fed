"""Any step of a run comes back, with its bits, proven; and what is not that run is found out."""
import json
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner
from train_runs import small

from f16lab.capsule import folder_of, load_capsule
from f16lab.checkpoint import damage
from f16lab.cli import command
from f16lab.console import open_console
from f16lab.keeping import Keeper
from f16lab.running import begin, follow, opened_log, train_run
from f16lab.runlog import RunReader, send_command
from f16lab.state import digest
from f16lab.train import Trainer
from f16lab.travel import capsule_from, travel


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 24 steps with checkpoints after 8, 16 and 24 and a digest every 5."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = small("bf16_sr", steps=24, save_every=8, keep=0, digest_every=5, capsule_at=11, dropout=0.1, accumulate=2, ledger=False)
    assert train_run(config, folder, open_console()) == 0
    return folder


def alone(folder: Path, step: int) -> str:
    """Digest of the state before a step in a run that is taken step by step."""
    t = Trainer(small("bf16_sr", steps=24, dropout=0.1, accumulate=2))
    while t.step_number < step: t.step()
    return t.digest()


def copy(run: Path, to: Path, *, without: str = "") -> Path:
    """A run's folder without the files whose names match."""
    shutil.copytree(run, to)
    for path in list(to.iterdir()):
        if without and re.search(without, path.name): shutil.rmtree(path) if path.is_dir() else path.unlink()
    return to


@pytest.mark.parametrize("step, start", [(0, 0), (3, 0), (8, 8), (9, 8), (15, 8), (23, 16), (24, 24)])
def test_any_step_comes_back_with_its_bits(run, step, start):
    found = travel(run, step)
    assert found.equal and found.start == start, found.proofs
    assert digest(found.capsule.state) == alone(run, step)


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path):
    folder = copy(run, tmp_path / "run")
    damage(folder / "model_00000008.safetensors", "bit")
    found = travel(folder, 10)
    assert found.equal and found.start == 0 and "checkpoint 8 refused" in found.notes[0]


def test_without_digests_nothing_is_claimed(run, tmp_path):
    folder = copy(run, tmp_path / "run", without=r"DONE|meta|sqlite|capsule")
    found = travel(folder, 4)
    assert not found.equal and "no digest is known" in found.words and digest(found.capsule.state) == alone(run, 4)


def test_another_recipe_is_found_out(run, tmp_path):
    folder = copy(run, tmp_path / "run", without=r"000000(08|16)|sqlite")  # the log would know better
    meta = json.loads((folder / "meta_00000024.json").read_text())
    meta["config"]["optimizer"]["beta2"] = 0.9
    (folder / "meta_00000024.json").write_text(json.dumps(meta))
    (folder / "DONE_00000024").write_text(sha256((folder / "meta_00000024.json").read_bytes()).hexdigest())
    found = travel(folder, 6)
    assert not any(p.equal for p in found.proofs) and "NOT that of the run" in found.words
    with pytest.raises(ValueError, match="NOT that of the run"): capsule_from(folder, 6)


def test_a_learning_rate_that_was_set_is_set_again(tmp_path):
    config, folder = small("f16", steps=12, save_every=12), tmp_path / "run"
    t = Trainer(config)
    with opened_log(folder, config) as log:
        begin(t, folder, log, None)
        for record in follow(t, log, Keeper(t, folder, fingerprints=4)):
            if getattr(record, "step", None) == 4 and hasattr(record, "loss_scale"):
                send_command(folder / "run.sqlite", "set", {"lr": 1e-4})
                send_command(folder / "run.sqlite", "capsule")
        t.saver.close()
    with RunReader(folder / "run.sqlite") as reader: said = " ".join(reader.events()["text"])
    assert "lr set to 0.0001 from step 5" in said and "capsule of step 5" in said
    assert travel(folder, 9).equal and load_capsule(folder_of(folder, 5)).after


def test_bad_requests_are_one_sentence(run, tmp_path):
    for call, words in ((lambda: travel(run, 99), "states before steps 0…24"), (lambda: travel(tmp_path / "none", 1), "no such folder"),
                        (lambda: capsule_from(run), "name a step"), (lambda: travel(tmp_path, 1), "neither a checkpoint nor recipe"),
                        (lambda: capsule_from(folder_of(run, 11), 4), "capsule of step 11")):
        with pytest.raises(ValueError, match=words): call()


# ---------------------------------------------------------------- commands
def cli(*words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `f16lab …`."""
    result = CliRunner().invoke(command(), [str(w) for w in words])
    return result.exit_code, result.stdout, result.stderr


def test_the_commands(run, tmp_path):
    folder = copy(run, tmp_path / "run")
    code, out, _ = cli("travel", folder, "--step", 13, "--html", tmp_path / "t.html")
    assert code == 0 and "proven by digest" in out and (tmp_path / "t.html").stat().st_size > 1e6
    code, out, _ = cli("replay", folder_of(folder, 13), "--profile", "f32", "--html", tmp_path / "r.html")
    assert code == 0 and "updates" in out and (tmp_path / "r.html").exists()
    code, out, _ = cli("replay", folder_of(folder, 11), "--json")
    assert code == 0 and json.loads(out)["equal"] and "every bit" in json.loads(out)["proof"]
    code, out, _ = cli("bisect", folder, "--step", 11, "--count", 3, "--html", tmp_path / "b.html")
    assert code == 0 and "as good as their precision allows" in out
    code, out, err = cli("travel", folder, "--step", 13)
    assert code == 2 and "holds a capsule already" in err
    assert cli("replay", folder)[0] == 2 and cli("bisect", tmp_path)[0] == 2


def test_a_run_that_fails_leaves_a_capsule_and_says_so(tmp_path):
    code, _, err = cli("train", "--profile", "f16,loss_scale=2^24", "--layers", 1, "--channels", 32, "--context", 16, "--batch", 4, "--data", "markov",
                       "--steps", 30, "--eval-every", 0, "--device", "cpu", "--out", tmp_path / "run")
    place = folder_of(tmp_path / "run", 0)
    assert code == 1 and f"f16lab bisect {place}" in err
    code, out, _ = cli("bisect", place, "--json")
    found = json.loads(out)
    assert code == 1 and found["rows"][found["first"]]["overflowed"] > 0
    with RunReader(tmp_path / "run" / "run.sqlite") as reader:
        assert "capsule" in reader.events()["kind"] and str(place) in reader.status().message
