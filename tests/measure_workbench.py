"""Measures the workbench in a browser on this machine: `python tests/measure_workbench.py [--out FILE.json]`.

    lag       from the end of a step to the frame in which the chart has drawn it, in ms
    redraw    bytes of a message to the charts, and messages a second
    slowdown  steps a second with the workbench open against without, in alternating stretches of one run
    stop      from the click on Pause or Stop to the end of the last step, in ms, and the length of a step
    start     from `f16lab lab` to the page, to the workbench, and to the first live chart, in s
    long      a log of 100,000 steps against one of 1,000: seconds to open, bytes of a redraw, memory of the kernel

The run is a tiny GPT under f16 with the eyes open (probes and ledger in every step), in a process that writes down when
each step ended. --rounds and --seconds set the stretches (default 5 of 15 s), --only NAME,NAME takes some parts. All of
it takes about six minutes; the machine should have nothing else to do: the load before and after is in the result.
Needs Chromium and JupyterLab, as the browser tests do.
"""
import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

import browser  # noqa: E402
from lab_browser import ARGUMENTS, LabPage, LabServer, end, free_port, isolated, status_of  # noqa: E402
from long_runs import PIECE, long_log  # noqa: E402
from notebook_files import write_notebook  # noqa: E402
from workbench_page import BenchPage, log_of, told  # noqa: E402

from f16lab.events import StepRecord  # noqa: E402
from f16lab.runfile import RunLogError  # noqa: E402
from f16lab.runlog import RunLog, send_command  # noqa: E402

WATCH = """() => {  // notes of each message to the charts: when it was on the screen, the newest step, its bytes
  const app = document.querySelector('.f16-charts:has(.f16-trajectories)').f16, take = app.store.take;
  window.seen = [];
  app.store.take = (frame, buffers) => {
    take(frame, buffers);
    const bytes = JSON.stringify(frame).length + buffers.reduce((sum, b) => sum + b.byteLength, 0);
    const step = app.store.runs[0]?.step ?? -1, painted = new MessageChannel();
    painted.port1.onmessage = () => window.seen.push([Date.now() / 1000, step, bytes]);
    requestAnimationFrame(() => painted.port2.postMessage(0));  // delivered when the frame has been drawn
  };
}"""
CLICK = "(verb) => { const t = Date.now() / 1000; document.querySelector(`button.f16lab-${verb}`).click(); return t; }"


# ---------------------------------------------------------------- a run that knows when its steps ended
def train(folder: Path) -> None:
    """Train until told to stop; writes when each step ended into times.json."""
    from f16lab.fleet import whole_run
    from f16lab.forms import first_recipe

    config = first_recipe().with_(profile="f16", steps=10**6, eval_every=0, save_every=0)
    times = [time.time() for record in whole_run(config, folder) if isinstance(record, StepRecord)]
    (folder / "times.json").write_text(json.dumps(times))


class Run:
    """A run in a process of its own below the runs of a notebook's folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)
        self.process = subprocess.Popen([sys.executable, __file__, "--train", str(folder)], stdin=subprocess.DEVNULL,
                                        stdout=open(folder / "console.txt", "w"), stderr=subprocess.STDOUT)

    def wait_for(self, step: int, seconds: float = 60) -> None:
        """Wait until the log has a step."""
        last = time.monotonic() + seconds
        while self.step() < step:
            assert self.process.poll() is None and time.monotonic() < last, (self.folder / "console.txt").read_text()
            time.sleep(0.1)

    def step(self) -> int:
        """The last step in its log; 0 while that is being made."""
        try:
            return log_of(self.folder).step or 0
        except RunLogError:
            return 0

    def stop(self) -> list[float]:
        """End it, if it is alive; when each of its steps ended."""
        if self.process.poll() is None and self.step() and log_of(self.folder).live: send_command(self.folder / "run.sqlite", "stop")
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return json.loads((self.folder / "times.json").read_text())


@contextmanager
def opened(server: LabServer, codes: Sequence[str]) -> Iterator[tuple[LabPage, BenchPage]]:
    """A notebook with these cells in JupyterLab, not run yet."""
    with tempfile.TemporaryDirectory() as folder:
        lab = server(write_notebook(Path(folder, "workbench.ipynb"), codes))
    with lab:
        yield lab, BenchPage(lab.page, lab.folder)


def cell(folder: Path) -> str:
    """Code that shows the workbench for the runs of a folder."""
    return f"from f16lab.workbench import Workbench\nWorkbench(folder={str(folder)!r})"


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    """Median, 95th percentile and largest of some values, and how many they are."""
    ordered = sorted(values)
    at = {"median": statistics.median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))], "max": ordered[-1]}
    return {**{name: round(value, digits) for name, value in at.items()}, "count": len(ordered)}


# ---------------------------------------------------------------- live: lag, redraws, slow-down, stop
def live(server: LabServer, rounds: int, seconds: float) -> dict[str, Any]:
    """One run, watched and not watched in turn; then paused again and again, and stopped."""
    runs = server.folder / "live"
    run, windows, seen, clicks = Run(runs / "f16"), {"open": [], "closed": []}, [], []
    try:
        run.wait_for(20)
        for i in range(rounds):
            with opened(server, [cell(runs)]) as (lab, bench):
                lab.run_all()
                bench.ready()
                lab.page.evaluate(WATCH)
                lab.page.wait_for_timeout(3000)
                windows["open"].append(stretch(lambda: lab.page.wait_for_timeout(1000 * seconds)))
                seen += [tuple(row) for row in lab.page.evaluate("window.seen")]
                if i + 1 == rounds: clicks = pause_and_stop(bench, run)
            if i + 1 < rounds:
                time.sleep(3)
                windows["closed"].append(stretch(lambda: time.sleep(seconds)))
    finally:
        times = run.stop()
    return {**lags(seen, times, windows["open"]), "slowdown": speeds(windows, times), "stop": stops(clicks, times)}


def stretch(wait: Callable[[], Any]) -> tuple[float, float]:
    """When a wait began and ended."""
    begin = time.time()
    wait()
    return begin, time.time()


def lags(seen: Sequence[tuple], times: Sequence[float], windows: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Milliseconds from the end of each step to its pixels, and what a redraw costs, within the windows."""
    out, redraws, length = [], [], sum(b - a for a, b in windows)
    for a, b in windows:
        inside = [row for row in seen if a <= row[0] <= b]
        redraws += [size for _, _, size in inside]
        before = next(iter(inside), (0, 0, 0))[1]
        for when, step, _ in inside:
            out += [1000 * (when - times[k]) for k in range(before + 1, step + 1)]
            before = max(before, step)
    return {"lag_ms": spread(out), "redraw_bytes": spread(redraws, 0), "redraws_per_s": round(len(redraws) / length, 2)}


def speeds(windows: dict[str, list[tuple[float, float]]], times: Sequence[float]) -> dict[str, Any]:
    """Steps a second in each stretch; an open one is set against the mean of its closed neighbours."""
    rates = {name: [sum(a <= t < b for t in times) / (b - a) for a, b in pairs] for name, pairs in windows.items()}
    closed = rates["closed"]
    beside = [closed[max(0, i - 1): i + 1] for i in range(len(rates["open"]))]
    shares = [100 * (1 - r / statistics.mean(near)) for r, near in zip(rates["open"], beside) if near]
    return {"steps_per_s": {name: [round(r, 2) for r in values] for name, values in rates.items()},
            "percent": [round(s, 1) for s in shares], "percent_median": round(statistics.median(shares or [0]), 1)}


def pause_and_stop(bench: BenchPage, run: Run, times: int = 10) -> list[tuple[str, float, int]]:
    """Click Pause and Resume in turn, then Stop: (verb, when, steps taken when the run stood still)."""
    out = []
    for i in range(times):
        bench.page.wait_for_timeout(700 + 37 * i)  # at another place of a step each time
        when = bench.page.evaluate(CLICK, "pause")
        rows = bench.until(lambda: told(run.folder, "paused")[i:], "the run says that it is paused")
        out.append(("pause", when, int(re.search(r"after (\d+) steps", rows[0][1])[1])))
        bench.page.evaluate(CLICK, "resume")
        bench.until(lambda: len(told(run.folder, "resumed")) > i, "the run goes on")
    bench.page.wait_for_timeout(1000)
    when = bench.page.evaluate(CLICK, "stop")
    bench.until(lambda: log_of(run.folder).status == "stopped", "the run stops")
    return [*out, ("stop", when, log_of(run.folder).step + 1)]


def stops(clicks: Sequence[tuple[str, float, int]], times: Sequence[float]) -> dict[str, Any]:
    """Milliseconds from a click to the end of the last step (0: none ended after it); how many steps ended after it."""
    took: dict[str, list[float]] = {"pause": [], "stop": []}
    for verb, when, taken in clicks: took[verb].append(max(0.0, 1000 * (times[taken - 1] - when)))
    after = [sum(when < t for t in times[:taken]) for _, when, taken in clicks]
    steps = [1000 * (b - a) for a, b in zip(times, times[1:])]
    return {"pause_ms": spread(took["pause"]), "stop_ms": round(took["stop"][0], 1), "steps_after_click": after,
            "step_ms": round(statistics.median(steps), 1)}


# ---------------------------------------------------------------- from the command to the first live chart
def start(chromium: Any, folder: Path) -> dict[str, float]:
    """Seconds from `f16lab lab`, outside a checkout, to what a person sees; Compare is pressed at once."""
    here, lib, port, token = folder / "project", folder / "lib", free_port(), "0" * 32
    here.mkdir(parents=True)
    lib.mkdir()
    (lib / "f16lab").symlink_to(ROOT / "f16lab")
    environment = {**isolated(folder), "PYTHONPATH": str(lib), "JUPYTER_TOKEN": token}
    settings = Path(environment["JUPYTER_CONFIG_DIR"], "jupyter_lab_config.json")
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps({"LabApp": {"expose_app_in_browser": True}}))
    began, out = time.time(), {}
    command = [sys.executable, "-m", "f16lab", "lab", "--no-browser", "--port", str(port)]
    with open(folder / "lab.log", "w") as log:
        process = subprocess.Popen(command, cwd=here, env=environment, stdout=log, stderr=log, start_new_session=True)
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    bench = BenchPage(page, here)
    try:
        bench.until(lambda: status_of(f"http://127.0.0.1:{port}/api/status", token) == 200, "the server answers")
        out["server_s"] = time.time() - began
        page.goto(f"http://127.0.0.1:{port}/lab/tree/f16lab-workbench.ipynb?token={token}")
        ready = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
        page.wait_for_function(f"() => {ready}", timeout=60_000)
        out["kernel_s"] = time.time() - began
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
        bench.ready()
        out["workbench_s"] = time.time() - began
        bench.press("compare")
        bench.until(lambda: max(bench.steps().values(), default=-1) >= 1, "a live chart")
        out["live_chart_s"] = time.time() - began
    finally:
        page.close()
        end(process)
        bench.end()
    return {name: round(value, 2) for name, value in out.items()}


# ---------------------------------------------------------------- long logs
def long(server: LabServer, pieces: int) -> dict[str, Any]:
    """A log of pieces × 1024 steps: time to open it, bytes of a redraw while it goes on, memory of the kernel."""
    folder = server.folder / f"long{pieces}"
    long_log(folder / "run.sqlite", pieces)
    codes = ["import os\nfrom f16lab.workbench import Workbench\nprint('kernel', os.getpid())",
             f"Workbench({str(folder)!r})"]
    with opened(server, codes) as (lab, bench):
        lab.page.locator(".jp-CodeCell").first.click()
        lab.command("notebook:run-cell-and-select-next")
        lab.output("kernel").first.wait_for(timeout=60_000)
        pid, before = int(lab.output("kernel").first.inner_text().split()[1]), time.time()
        rss = [memory(pid)]
        lab.command("notebook:run-cell")
        bench.until(lambda: bench.charts("app?.store.curve(0, 'loss').steps.length"), "the curve")
        took, points = time.time() - before, len(bench.curve(0))
        lab.page.evaluate(WATCH)
        with RunLog(folder / "run.sqlite") as log:
            for k in range(200):
                log(StepRecord(pieces * PIECE + k, 2.0, 2048, 1.0, 1e-3, 65536.0))
                lab.page.wait_for_timeout(50)
            bench.until(lambda: bench.charts("app.store.runs[0].step") == pieces * PIECE + 199, "the newest step")
        seen = lab.page.evaluate("window.seen")
        rss.append(memory(pid))
    return {"steps": pieces * PIECE, "open_s": round(took, 2), "points": points,
            "redraw_bytes": spread([size for _, _, size in seen], 0), "kernel_MB": rss}


def memory(pid: int) -> float:
    """Resident megabytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def main() -> None:
    """Measure what was asked for; the result is printed as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--out", type=Path)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=15.0)
    options.add_argument("--only", default="live,start,long")
    given = options.parse_args()
    if given.train: return train(given.train)
    program, why = browser.find()
    if why: sys.exit(why)
    from playwright.sync_api import sync_playwright

    result: dict[str, Any] = {"when": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count(),
                              "machine": platform.machine(), "python": platform.python_version(),
                              "load_before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        result["browser"] = chromium.version
        parts = given.only.split(",")
        if "start" in parts: result["start"] = [start(chromium, Path(folder, f"start{i}")) for i in range(2)]
        server = LabServer(Path(folder, "lab"), chromium)
        try:
            if "live" in parts: result.update(live(server, given.rounds, given.seconds))
            if "long" in parts: result["long"] = [long(server, pieces) for pieces in (1, 98)]
        finally:
            server.close()
            chromium.close()
    result["load_after"] = os.getloadavg()
    text = json.dumps(result, indent=1)
    if given.out: given.out.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
