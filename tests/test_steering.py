"""Runs as processes of their own: they outlive who started them, say how they stand, and are never ended silently."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from f16lab.config import TrainConfig
from f16lab.runlog import RunLogError, RunReader
from f16lab.steering import (
    CONSOLE, PROCESS, Steered, found_runs, launch, live_runs, project_runs, resume_run, start_run, started_in,
)

SHAPE = dict(data="markov", device="cpu", layers=1, heads=2, channels=32, context=16, batch=4, steps=10**6, eval_every=0,
             threads=1)


def tiny(profile: str = "f32", **more) -> TrainConfig:
    return TrainConfig(profile).with_(**{**SHAPE, **more})


def until(run: Steered, wanted, seconds: float = 40.0):
    """The first look that is as wanted; the last one if none is in time."""
    end = time.monotonic() + seconds
    while not wanted(look := run.look()) and time.monotonic() < end:
        time.sleep(0.03)
    return look


@pytest.fixture
def runs():
    """A list for started runs; whatever the test does, none of them is left."""
    started = []
    yield started
    for run in started:
        if run.alive:
            os.kill(run.pid, signal.SIGKILL)
        if run.child is not None:
            run.child.wait()


def test_a_run_outlives_the_process_that_started_it_and_is_found_again(tmp_path):
    code = (f"import sys, time\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_steering import start_run, tiny\n"
            f"run = start_run(tiny('f16'), {str(tmp_path / 'r')!r})\nprint(run.pid, flush=True)\ntime.sleep(600)\n")
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    pid = int(kernel.stdout.readline())
    os.killpg(kernel.pid, signal.SIGKILL)  # what a restart of the kernel does to its process group
    kernel.wait()
    assert live_runs(tmp_path) == [tmp_path / "r"]  # it may still be starting
    run = Steered(live_runs(tmp_path)[0])
    assert run.started.pid == pid and run.started.child is None
    before = until(run, lambda look: look.done > 0).done
    look = until(run, lambda look: look.done > before + 3)
    assert look.state == "running" and look.done > before + 3 and look.steps == 10**6 and run.label == "f16"
    run.send("pause")
    paused = until(run, lambda look: look.state == "paused" or any(kind == "paused" for _, kind, _ in look.events), 10)
    run.stop()
    end = until(run, lambda look: not look.alive)
    assert end.state == "stopped" and f"stopped at step {end.done}" in end.words
    with RunReader(run.log) as reader:
        assert reader.histograms(1) and reader.casts(1)  # eyes open by default
    gone = time.monotonic() + 10
    assert paused is not None
    while live_runs(tmp_path) and time.monotonic() < gone:  # the process ends a moment after its log
        time.sleep(0.05)
    assert not live_runs(tmp_path)
    run.close()


def test_a_start_that_fails_is_told_with_exit_code_and_last_words(tmp_path, runs):
    runs.append(start_run(tiny(data="no/such/corpus"), tmp_path / "r"))
    look = until(Steered(tmp_path / "r", runs[0]), lambda look: look.state == "failed")
    assert look.state == "failed" and "exit code 2" in look.words and "no such file or folder" in look.words
    later = Steered(tmp_path / "r").look()  # from another kernel: the code is not known any more, the words are
    assert later.state == "failed" and "not known" in later.words and "no such file or folder" in later.words
    again = start_run(tiny(steps=2), tmp_path / "r")  # the folder is not spoilt
    runs.append(again)
    assert until(Steered(tmp_path / "r", again), lambda look: look.state == "finished").state == "finished"


def test_a_second_start_in_a_folder_is_refused_from_the_first_moment_on(tmp_path, runs):
    runs.append(start_run(tiny(), tmp_path))
    with pytest.raises(ValueError, match="is alive here"):
        start_run(tiny(), tmp_path)
    with pytest.raises(ValueError, match="is alive here"):
        resume_run(tmp_path)
    run = Steered(tmp_path)
    until(run, lambda look: look.done > 0)
    with pytest.raises(ValueError, match="is alive here"):
        start_run(tiny(), tmp_path)
    run.stop()
    assert until(run, lambda look: not look.alive).state == "stopped"
    runs[0].child.wait()
    with pytest.raises(ValueError, match="holds a run already"):
        start_run(tiny(), tmp_path)


def test_a_run_that_does_not_answer_gets_a_signal_after_the_stated_time_and_a_kill_is_only_spoken_of(tmp_path, runs):
    runs.append(start_run(tiny(save_every=5), tmp_path))
    run = Steered(tmp_path, runs[0])
    until(run, lambda look: look.done > 6)
    os.kill(runs[0].pid, signal.SIGSTOP)  # it hangs
    assert "SIGTERM if there is no answer within 1 s" in run.stop(patience=0.6)
    assert not run.look().notes and run.look().state == "stopping"
    noted = until(run, lambda look: look.notes, 10).notes
    assert len(noted) == 1 and "no answer to stop" in noted[0] and f"SIGTERM sent to process {runs[0].pid}" in noted[0]
    told = until(run, lambda look: look.notes, 10).notes
    assert "still alive" in told[0] and f"kill -9 {runs[0].pid}" in told[0]
    time.sleep(0.5)
    assert runs[0].alive and not run.look().notes  # nothing more is done, and nothing is said twice
    os.kill(runs[0].pid, signal.SIGCONT)
    end = until(run, lambda look: not look.alive)
    assert end.state == "stopped", end.words
    runs[0].child.wait()
    assert list(tmp_path.glob("DONE_*"))
    resumed = resume_run(tmp_path, steps=end.done + 4)  # and it goes on from there
    runs.append(resumed)
    run = Steered(tmp_path, resumed)
    assert run.look().state == "starting"  # not the end of the session before
    look = until(run, lambda look: look.state == "finished")
    assert look.done == end.done + 4, look.words


def test_stop_before_the_log_is_there_is_a_signal_at_once(tmp_path, runs):
    runs.append(start_run(tiny(), tmp_path))
    run = Steered(tmp_path, runs[0])
    assert "SIGTERM sent" in run.stop() and run.look().state in ("stopping", "stopped")
    look = until(run, lambda look: not look.alive)
    assert look.state == "stopped" and "before it began" in look.words


def test_a_killed_run_died_and_a_stop_says_that_there_is_nothing_to_stop(tmp_path, runs):
    runs.append(start_run(tiny(), tmp_path))
    run = Steered(tmp_path, runs[0])
    until(run, lambda look: look.done > 0)
    os.kill(runs[0].pid, signal.SIGKILL)
    look = until(run, lambda look: not look.alive)
    assert look.state == "died" and "without a word" in look.words
    with pytest.raises(RunLogError, match="nothing to stop: no run is writing"):
        run.stop()


def test_a_run_started_by_hand_is_seen_and_commanded_but_gets_no_signal(tmp_path, runs):
    words = ["train", "--out", str(tmp_path), *(w for k, v in SHAPE.items() for w in (f"--{k.replace('_', '-')}", str(v)))]
    hand = subprocess.Popen([sys.executable, "-m", "f16lab", *words], stdout=subprocess.DEVNULL)
    try:
        run = Steered(tmp_path)
        assert run.look().state == "absent"
        until(run, lambda look: look.done > 0)
        assert run.started is None and live_runs(tmp_path.parent) == [tmp_path]
        os.kill(hand.pid, signal.SIGSTOP)
        run.stop(patience=0.2)
        assert "not started from a workbench" in until(run, lambda look: look.notes, 10).notes[0]
        os.kill(hand.pid, signal.SIGCONT)
        assert until(run, lambda look: not look.alive).state == "stopped" and hand.wait() == 0
    finally:
        hand.kill()
        hand.wait()


def test_ranks_are_started_and_stopped_together(tmp_path, runs):
    runs.append(start_run(tiny(accumulate=2), tmp_path, nproc=2))
    run = Steered(tmp_path, runs[0])
    assert until(run, lambda look: look.done > 0, 60).state == "running"
    run.stop()
    assert until(run, lambda look: not look.alive).state == "stopped" and runs[0].child.wait(30) == 0


def test_a_number_that_was_given_away_anew_is_not_our_process(tmp_path):
    other = launch(["doctor"], tmp_path)
    note = json.loads((tmp_path / PROCESS).read_text())
    assert started_in(tmp_path).pid == other.pid
    other.child.wait()
    assert not started_in(tmp_path).alive and "torch" in (tmp_path / CONSOLE).read_text()
    (tmp_path / PROCESS).write_text(json.dumps({**note, "pid": os.getpid()}))  # alive, with another birth
    assert not started_in(tmp_path).alive
    (tmp_path / PROCESS).write_text("{")
    assert started_in(tmp_path) is None


def test_runs_are_found_from_anywhere_in_a_checkout_and_listed_with_what_cannot_be_read(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "nbs/deep").mkdir(parents=True)
    for here in (tmp_path, tmp_path / "nbs/deep"):
        assert project_runs(here) == tmp_path / "data/runs"
    (tmp_path / "nbs/deep/pyproject.toml").touch()
    assert project_runs(tmp_path / "nbs/deep") == tmp_path / "nbs/deep/runs"
    assert found_runs(tmp_path / "nowhere") == [] and live_runs(tmp_path / "nowhere") == []
    broken = tmp_path / "data/runs/broken"
    broken.mkdir(parents=True)
    (broken / "run.sqlite").write_text("no database")
    assert [seen.state.split(":")[0] for seen in found_runs(tmp_path / "data/runs")] in (["absent"], ["unreadable"])


def test_a_run_whose_log_is_locked_gets_its_signal_all_the_same(tmp_path, monkeypatch):
    from f16lab.runlog import LogBusy
    run = Steered(tmp_path)

    def busy(kind, value=None): raise LogBusy("locked")
    monkeypatch.setattr(run, "send", busy)
    assert "SIGTERM if there is no answer within 1 s" in run.stop(patience=0.6) and run.asked.command is None
    assert "no signal was sent" in run.stop()  # asked again: at once, if its process is known
