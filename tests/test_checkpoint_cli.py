"""Checkpoints from the command line: stopped, killed, resumed, looked into, proven."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import repo
from test_cli import complaint, shell, text  # noqa: F401  fixtures

from f16lab.checkpoint import damage, done_steps, examine, file_name
from f16lab.config import read_recipe
from f16lab.resume import resume
from f16lab.runlog import RunReader
from f16lab.snapshot import read_saved
from f16lab.state import digest
from f16lab.train import Trainer

TINY = (
    "--data markov --layers 1 --heads 2 --channels 16 --context 8 --batch 2 --eval-every 0 --save-every 4 --device cpu"
)


@pytest.fixture
def start(tmp_path):
    """Start `f16lab WORDS`; whatever still runs at the end of the test is killed."""
    started = []

    def call(words: str, **more):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo.ROOT), "COLUMNS": "100"}
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | more
        started.append(
            subprocess.Popen([sys.executable, "-m", "f16lab", *words.split()], cwd=tmp_path, env=environment, **options)
        )
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def times(folder) -> dict[str, int]:
    """When each file of a run was last written (a log notes its readers, so it does not count)."""
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir() if "sqlite" not in p.name}


def losses(folder) -> tuple[list[int], list[float]]:
    with RunReader(folder / "run.sqlite") as log:
        found = log.steps()
    return found["step"], found["loss"]


def unbroken(folder, steps: int) -> tuple[list[float], str]:
    """Losses and digest of the run in a folder, had it never been stopped."""
    t = Trainer(read_recipe(folder / "recipe.toml"))
    return [t.step().loss for _ in range(steps)], t.digest()


def test_killed_stopped_and_resumed_is_one_run(start, tmp_path):
    """A crash loop in small: kill -9, SIGTERM, and the same words each time."""
    run, words = tmp_path / "run", f"train {TINY} --f16 --steps 4000 --out run --resume auto --every 1000000"
    first = start(words)
    for _ in range(600):  # nothing is there at first: it starts
        if len(done_steps(run)) > 1:
            break
        time.sleep(0.05)
    first.kill(), first.wait()
    before = done_steps(run)[-1]
    assert losses(run)[0] == list(range(len(losses(run)[0]))) and len(losses(run)[0]) >= before
    second = start(words)
    for _ in range(600):
        if done_steps(run)[-1] > before + 8:
            break
        time.sleep(0.05)
    busy = start("resume run")
    assert "is in use by a run that is alive" in busy.communicate()[1] and busy.returncode == 2
    second.send_signal(signal.SIGTERM)
    out, error = second.communicate(timeout=60)
    assert second.returncode == 143 and error == "" and "resumed" in out and f"after {before} steps" in out
    stopped = int(re.search(r"stopped after (\d+) steps", out)[1])
    assert done_steps(run)[-1] == stopped and f"f16lab resume run (from step {stopped})" in out  # saved when stopped
    last = start(f"resume run --steps {stopped + 7}")
    out, error = last.communicate(timeout=60)
    assert last.returncode == 0 and "finished" in out and "schedule steps was 4000 and is" in out
    want, last_digest = unbroken(run, stopped + 7)
    assert losses(run) == (list(range(stopped + 7)), want)
    assert examine(run, stopped + 7).meta["digest"] == last_digest
    with RunReader(run / "run.sqlite") as log:
        assert [s["status"] for s in log.sessions()] == ["running", "stopped", "finished"]  # the first could not say
        events = log.events()
    resumes = [t for kind, t in zip(events["kind"], events["text"]) if kind == "resume"]
    assert len(resumes) == 2 and resumes[0].startswith(f"goes on after {before} steps")
    assert [h["text"] for h in examine(run, stopped + 7).meta["history"]] == [resumes[1].partition("; ")[2]]


def test_a_finished_run_has_nothing_left(shell, tmp_path):  # noqa: F811
    assert shell(f"train {TINY} --steps 6 --out run").exit_code == 0
    before = times(tmp_path / "run")
    for words in ("resume run", f"train {TINY} --steps 6 --out run --resume auto"):
        done = shell(words)
        assert done.exit_code == 0 and "it has all its 6 steps" in done.stdout and "--steps N" in done.stdout
    assert times(tmp_path / "run") == before
    done = shell("resume run --steps 9")
    assert done.exit_code == 0 and done_steps(tmp_path / "run") == [8, 9]


@pytest.mark.parametrize(
    "words, said",
    [
        ("resume nowhere", "nowhere: no such folder"),
        ("resume empty", "empty holds no checkpoint: it has none; save some with --save-every N"),
        ("resume run --at 5", "run holds no checkpoint after 5 steps: it has 4, 6"),
        ("resume run --seed 5", "saved with seed 0, this run has 5"),
        ("resume run --layers 2", "it is of another model"),
        (f"train {TINY} --resume auto", "--resume auto needs --out DIR"),
        (f"train {TINY} --out run", "holds a run already: choose another folder, or go on with `f16lab resume`"),
        ("inspect nowhere", "nowhere: no such file or folder"),
        ("inspect empty", "empty holds no checkpoint"),
        ("verify empty", "empty holds no checkpoint"),
        ("resume run --all-f16", "entries would change when f32 becomes f16"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_changes_nothing(shell, tmp_path, words, said):  # noqa: F811
    (tmp_path / "empty").mkdir()
    assert shell(f"train {TINY} --steps 6 --out run").exit_code == 0
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert said in complaint(shell(words))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before and not (tmp_path / "nowhere").exists()


def test_resuming_at_an_earlier_step_moves_the_later_ones_aside(shell, tmp_path):  # noqa: F811
    shell(f"train {TINY} --steps 10 --out run --keep 0")
    done = shell("resume run --at 4 --lr 0.01")
    assert done.exit_code == 0 and "lr was 0.001 and is 0.01" in done.stdout.replace("\n", " ")
    assert done_steps(tmp_path / "run") == [4, 8, 10] and {"aside_00000008", "aside_00000010"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    assert (
        losses(tmp_path / "run")[0] == list(range(10))
        and read_recipe(tmp_path / "run" / "recipe.toml").optimizer.lr == 0.01
    )


def test_resumed_under_another_profile_and_recorded(shell, tmp_path):  # noqa: F811
    shell(f"train {TINY} --steps 6 --out run --bf16")
    done = shell("resume run --profile f32 --steps 9")
    assert done.exit_code == 0 and "profile was param=bf16" in done.stdout.replace("\n", " ")
    assert (
        examine(tmp_path / "run", 9).meta["profile"].startswith("param=f32")
        and "profile was" in examine(tmp_path / "run", 9).meta["history"][0]["text"]
    )
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        events = log.events()
    assert any(kind == "resume" and "profile was param=bf16" in t for kind, t in zip(events["kind"], events["text"]))
    shown = shell("inspect run").stdout
    assert "changed" in shown and "at step 6: profile was param=bf16" in " ".join(shown.split())


def test_inspect(shell, tmp_path):  # noqa: F811
    shell(f"train {TINY} --steps 6 --out run --all-f16")
    done = shell("inspect run")
    flat = " ".join(done.stdout.split())
    assert done.exit_code == 0 and examine(tmp_path / "run", 6).meta["digest"] in flat and "torch 2" in flat
    assert re.search(r"wte.weight 128×16 f16 f16 f16 1024 [\d.]+ kB [0-9a-f]{12}", flat)
    plain = json.loads(shell("inspect run/DONE_00000004 --json").stdout)
    assert (
        plain["meta"]["step"] == 4
        and {f["state"] for f in plain["files"]} == {"ok"}
        and plain["tensors"][0]["S"] == 1024
    )
    damage(tmp_path / "run" / file_name("state", 6), "cut")
    done = shell("inspect run")
    assert done.exit_code == 1 and "bytes instead of" in done.stdout
    assert "f16" in shell(f"inspect run/{file_name('model', 4)}").stdout
    other = tmp_path / "foreign.safetensors"
    other.write_bytes((tmp_path / "run" / file_name("model", 4)).read_bytes())
    assert "wte.weight" in shell("inspect foreign.safetensors").stdout


def test_verify(shell, tmp_path, monkeypatch):  # noqa: F811
    shell(f"train {TINY} --steps 9 --out run --bf16-sr")
    done = shell("verify run --steps 2")
    assert done.exit_code == 0 and "every bit is the same" in done.stdout and done.stdout.count("equal") == 3
    before = times(tmp_path / "run")
    real = Trainer.load_state

    def forgetful(self, state, other_profile=False):
        notes = real(self, state, other_profile)
        if state.values["step"] == 8:
            self.inputs.train.position += 1
        return notes

    monkeypatch.setattr(Trainer, "load_state", forgetful)
    done = shell("verify run --steps 2")
    assert "DIFFERENT" in done.stdout and "the digests differ, from step 9 on" in complaint(done, code=1)
    assert times(tmp_path / "run") == before


def test_a_run_that_can_save_no_more_fails_in_words(start, tmp_path):
    import resource

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    process = start(f"train {TINY} --channels 64 --steps 400 --out run", preexec_fn=limit)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in error
    assert re.search(
        r"the run failed at step \d+: .*(model|state)_00000004.*could not be written: File too large",
        error.splitlines()[-1],
    )
    assert done_steps(tmp_path / "run") == [] and not list((tmp_path / "run").glob("*.tmp"))
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        assert log.status().status == "failed" and "could not be written" in log.status().message


def test_a_checkpoint_on_command(start, tmp_path):
    process = start(f"train {TINY} --save-every 0 --steps 1000000 --out run --every 1")
    for line in process.stdout:
        if re.match(r"step +3/", line):
            break
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        log.send("checkpoint")
    for _ in range(600):
        if done_steps(tmp_path / "run"):
            break
        time.sleep(0.05)
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        log.send("stop")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "") and "saved (command)" in out and "saved (stop command)" in out
    assert len(done_steps(tmp_path / "run")) == 2


def test_a_comparison_says_that_it_keeps_no_checkpoints(shell, tmp_path):  # noqa: F811
    (tmp_path / "recipe.toml").write_text(shell(f"train {TINY} --steps 2 --print-config").stdout)
    done = shell("compare recipe.toml --profiles f32 --out both")
    assert done.exit_code == 0 and "save_every=4 has no effect: a comparison keeps no checkpoints" in done.stderr
    assert not done_steps(tmp_path / "both") and "--save-every" not in shell("compare --help").stdout


def test_two_ranks_save_and_one_and_four_go_on(start, tmp_path):
    """ZeRO-1 on processes: the digest of the whole state is the same before, and after it was cut into other pieces."""

    def done(words):
        process = start(words)
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, out + error
        return out

    more = "--bf16 --accumulate 4 --zero-stage 1"
    done(f"train {TINY} {more} --steps 6 --out run --nproc 2")
    assert (tmp_path / "run" / file_name("state", 6, 1)).exists() and examine(tmp_path / "run", 6).meta["world"] == 2
    before = digest(read_saved(examine(tmp_path / "run", 6)).state)
    t = Trainer(read_recipe(tmp_path / "run" / "recipe.toml"))
    assert resume(t, tmp_path / "run").step == 6 and t.digest() == before
    done(f"train {TINY} {more} --steps 8 --out run --nproc 4 --resume auto")
    assert examine(tmp_path / "run", 8).meta["world"] == 4 and losses(tmp_path / "run")[0] == list(range(8))
    again = Trainer(read_recipe(tmp_path / "run" / "recipe.toml"))
    assert resume(again, tmp_path / "run").step == 8 and again.digest() == digest(
        read_saved(examine(tmp_path / "run", 8)).state
    )


@pytest.mark.parametrize("kind, how", [("meta", "bit"), ("DONE", "empty"), ("state", "cut"), ("model", "missing")])
def test_inspect_of_a_damaged_checkpoint_ends_with_1_and_says_what(shell, tmp_path, kind, how):  # noqa: F811
    shell(f"train {TINY} --steps 6 --out run")
    damage(tmp_path / "run" / file_name(kind, 6), how)
    done = shell("inspect run")
    assert done.exit_code == 1 and f"{kind}_00000006" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_every_deciding_setting_that_a_resume_changes_is_noted(shell, tmp_path):  # noqa: F811
    shell(f"train {TINY} --steps 6 --out run")
    done = shell("resume run --steps 9 --dropout 0.5 --accumulate 2 --eps 1e-6 --every 3")
    told = examine(tmp_path / "run", 9).meta["history"][0]["text"]
    for said in ("dropout was 0.0 and is 0.5", "accumulate was 1 and is 2", "eps was 1e-08 and is 1e-06"):
        assert told.count(said) == 1 and said in " ".join(done.stdout.split())
    assert shell("resume run --steps 12").exit_code == 0  # what has not changed since is not said again
    assert "dropout" not in examine(tmp_path / "run", 12).meta["history"][1]["text"]


def test_fewer_steps_than_there_are_and_help_without_wrong_defaults(shell, tmp_path):  # noqa: F811
    shell(f"train {TINY} --steps 6 --out run")
    done = shell("resume run --steps 4")
    assert done.exit_code == 0 and "it has 6 steps already" in done.stdout
    told = " ".join(shell("resume --help").stdout.split())
    assert "[default: 200]" not in told and "what is not given stays as it is there" in told
    assert "nowhere: no such folder" in complaint(shell("verify nowhere"))


def test_a_checkpoint_that_was_to_be_replaced_is_pointed_at(tmp_path):
    """A kill between the old one's leaving and the new one's arrival, where there is no other."""
    from f16lab.inspecting import chosen_step
    (tmp_path / "aside_00000005").mkdir()
    (tmp_path / "aside_00000005" / "DONE_00000005").write_text("x")
    with pytest.raises(ValueError, match="aside_00000005 holds one .* move its files back"): chosen_step(tmp_path, None)
