"""The command as a process of its own: signals, exit codes, a pipe, a terminal, a full disk."""
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import repo

from f16lab import __version__
from f16lab.runlog import RunReader

SMALL = "train --data TEXT --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --eval-every 0 --every 1 --out run".split()
FOREVER = [*SMALL, "--steps", "1000000"]
QUIET = [*FOREVER, "--every", "1000000"]  # a line for the first step only


@pytest.fixture
def start(tmp_path):
    """Start `f16lab WORDS` in a folder with a text; whatever still runs at the end of the test is killed."""
    (tmp_path / "TEXT").write_text("".join(f"line {i} of a text\n" for i in range(900)))
    started = []

    def call(words, **more):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{repo.ROOT}", "COLUMNS": "100"}
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | more
        started.append(subprocess.Popen([sys.executable, "-m", "f16lab", *words], cwd=tmp_path, env=environment, **options))
        return started[-1]
    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for_step(process, number: int) -> None:
    """Read lines until a step is done."""
    for line in process.stdout:
        if re.match(rf"step +{number}/", line):
            return
    pytest.fail(f"it ended before step {number}: {process.stderr.read()}")


def status(tmp_path):
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        return log.status()


def test_module_and_version(start):
    done = start(["--version"])
    assert done.communicate()[0] == f"f16lab {__version__}\n" and done.returncode == 0


def test_help_imports_no_torch():
    code = ("import sys\nfrom f16lab.cli import main\nsys.argv = ['f16lab', '--help']\n"
            "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, 'numpy' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo.ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "False False" and "Commands:" in done.stdout


def test_threads_are_told_not_to_spin_before_torch_is_loaded():
    code = "import os, sys\nfrom f16lab.cli import main\nsys.argv = ['f16lab', '--version']\ntry: main()\nexcept SystemExit: pass\n"
    code += "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo.ROOT, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "1000 False"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_stops_after_the_step_in_hand(start, tmp_path, number):
    process = start(QUIET)
    wait_for_step(process, 1)
    if number is signal.SIGINT:  # meanwhile, a second run into the same folder
        second = start(FOREVER)
        assert "is in use by a run that is alive" in second.communicate()[1] and second.returncode == 2
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (128 + number, "")
    end = status(tmp_path)
    steps = int(re.search(r"stopped after (\d+) steps", out)[1])
    assert (end.status, end.message, end.live) == ("stopped", number.name, False)
    assert steps == end.step + 1 >= 1


def test_a_signal_cuts_a_comparison_short(start, tmp_path):
    words = [*FOREVER, "--profiles", "f32,f16"]
    process = start(["compare", *words[1:]])
    wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "") and "run/report.html" in out
    for name in ("00_f32", "01_f16"):
        with RunReader(tmp_path / "run" / f"{name}.sqlite") as log:
            assert log.status().status == "stopped" and log.status().step >= 2


@pytest.mark.parametrize("error", ["ImportError('libcuda is not here')", "RuntimeError('driver too old')"])
def test_the_doctor_survives_a_broken_cupy(start, tmp_path, error):
    (tmp_path / "cupy.py").write_text(f"raise {error}\n")
    process = start(["doctor", "--json"])
    findings = {f["subject"]: f for f in json.loads(process.communicate()[0])}
    assert process.returncode == 0 and findings["cupy"]["status"] == "problem" and error[:11] in findings["cupy"]["text"]


def test_a_second_signal_acts_at_once(start, tmp_path):
    (tmp_path / "TEXT").write_text("".join(f"line {i} of a text\n" for i in range(20_000)))
    process = start([*FOREVER, "--accumulate", "4000"])  # seconds a step
    for _ in range(600):  # until the run log is there, so that the first step has begun
        if (tmp_path / "run" / "recipe.toml").exists():
            break
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    assert status(tmp_path).status == "stopped" and not status(tmp_path).live


def test_a_killed_run_can_be_read_and_reported(start, tmp_path):
    process = start(FOREVER)
    wait_for_step(process, 40)
    process.kill()
    process.wait()
    assert status(tmp_path).status == "died" and status(tmp_path).step >= 5
    done = start(["report", "run"])
    assert "run/report.html" in done.communicate()[0] and done.returncode == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000


def test_a_stop_command_is_a_wish_fulfilled(start, tmp_path):
    process = start(FOREVER)
    wait_for_step(process, 3)
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        log.send("set", {"lr": 0.5})
        log.send("stop")
    out, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (0, "") and "stopped after" in out
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        assert "lr set to 0.5" in log.events()["text"][0] and log.status().status == "stopped"


def test_a_full_disk_fails_in_words(start, tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (220_000, 220_000))
    process = start([*FOREVER, "--f16"], preexec_fn=limit)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in error
    assert "cannot be written any more (is the disk full?)" in error.splitlines()[-1]
    with RunReader(tmp_path / "run" / "run.sqlite") as log:
        assert len(log.steps()["step"]) > 0


def test_a_reader_that_goes_away_ends_the_run(start, tmp_path):
    process = start(FOREVER)
    wait_for_step(process, 3)
    process.stdout.close()
    process.wait(timeout=30)
    assert process.returncode == 1 and "Traceback" not in process.stderr.read()
    assert status(tmp_path).status == "stopped"


def read_all(fd: int) -> str:
    """What a terminal got."""
    out = b""
    while True:
        try: piece = os.read(fd, 65536)
        except OSError: return out.decode()
        if not piece: return out.decode()
        out += piece


def test_a_terminal_gets_a_bar_and_a_pipe_does_not(start):
    master, terminal = pty.openpty()
    process = start([*SMALL, "--steps", "30"], stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    shown = read_all(master)
    os.close(master)
    assert process.wait() == 0 and "\x1b[" in shown and "30/30" in shown and "finished after 30 steps" in shown
    plain = start([*SMALL[:-1], "other", "--steps", "30"]).communicate()[0]
    assert "\x1b" not in plain and "\r" not in plain
    assert plain.count("\nstep ") == 30
