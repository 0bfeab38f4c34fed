"""The workbench in a browser, as its tests, pictures and measurements use it: buttons, charts, panels, and the runs.

    bench = BenchPage(lab.page, lab.folder)
    bench.recipe(TrainConfig().with_(**TINY))
    bench.press("compare")
    bench.until(lambda: min(bench.steps().values()) > 20, "both runs take steps")
"""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f16lab.config import TrainConfig, to_toml
from f16lab.runlog import RunReader, RunStatus
from f16lab.steering import started_in

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

INK, BLUE = (0x3B, 0x3B, 0x3B), (0x00, 0x72, 0xB2)  # the first two runs on light paper
TINY = dict(data="markov", device="cpu", layers=1, heads=2, channels=32, context=16, batch=4, steps=10**6, eval_every=0,
            threads=1, lr=1e-3, save_every=100, meters_every=5)


class BenchPage:
    """A workbench in a page; `folder` is where its kernel runs."""

    def __init__(self, page: Page, folder: Path):
        self.page, self.runs = page, folder / "runs"

    # ---------------------------------------------------------------- waiting
    def until(self, true: Callable[[], Any], what: str, seconds: float = 40) -> Any:
        """Wait for something; AssertionError that says for what, if it does not come."""
        last = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < last, f"not within {seconds:g} s: {what}; the workbench says {self.words()!r}"
            self.page.wait_for_timeout(60)
        return found

    def ready(self, seconds: float = 40) -> None:
        """Wait until the workbench is there and its charts have heard from the kernel."""
        self.page.locator(".f16lab-workbench").wait_for(timeout=1000 * seconds)
        self.until(lambda: self.charts("app !== undefined && app.store.frames > 0"), "charts that know something")

    def words(self) -> str:
        """What the workbench says of its runs."""
        found = self.page.locator(".f16lab-said, .f16lab-status").all_inner_texts()
        return " ".join(" ".join(found).split())

    def stopped(self) -> int:
        """How many runs are shown as stopped at a step."""
        return self.page.locator(".f16lab-run", has_text="stopped at").count()

    # ---------------------------------------------------------------- controls
    def tool(self, verb: str) -> Locator:
        """A button of the row at the top, by its verb."""
        return self.page.locator(f"button.f16lab-{verb}")

    def press(self, verb: str) -> None:
        """Click a button of that row."""
        self.tool(verb).click()

    def choose(self, label: str) -> None:
        """The run that the buttons act on."""
        self.page.locator(".f16lab-target").get_by_role("button", name=label, exact=True).click()

    def open(self, name: str) -> None:
        """Open a page of the left or the right column."""
        self.page.locator(".f16lab-strip").get_by_role("button", name=name, exact=True).click()

    def recipe(self, config: TrainConfig) -> None:
        """Type a whole recipe."""
        self.page.locator("button.f16lab-fold").click()
        field = self.page.locator(".f16lab-toml textarea")
        self.until(field.input_value, "the recipe that was there before")
        field.fill(to_toml(config))
        field.blur()

    # ---------------------------------------------------------------- what is drawn
    def charts(self, code: str) -> Any:
        """A value of the trajectories' state; `app` in JavaScript."""
        found = "document.querySelector('.f16-charts:has(.f16-trajectories)')?.f16"
        return self.page.evaluate(f"() => {{ const app = {found}; return {code}; }}")

    def steps(self) -> dict[str, int]:
        """Run → the newest step that the charts know, −1 before the first."""
        return self.charts("Object.fromEntries((app?.store.runs ?? []).map((run) => [run.label, run.step ?? -1]))")

    def curve(self, run: int) -> list[int]:
        """The steps of a run's loss curve."""
        return self.charts(f"app.store.curve({run}, 'loss').steps")

    def colors(self, canvas: str) -> dict[tuple[int, int, int], int]:
        """How many pixels of a canvas have which colour."""
        pairs = self.page.evaluate("""(canvas) => {
            const c = document.querySelector(canvas), seen = new Map();
            const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
            for (let i = 0; i < data.length; i += 4) {
                const key = data.slice(i, i + 3).join();
                if (data[i + 3] > 250) seen.set(key, (seen.get(key) ?? 0) + 1);
            }
            return [...seen]; }""", canvas)
        return {tuple(map(int, key.split(","))): count for key, count in pairs}

    def drawn(self, canvas: str, ink: tuple[int, int, int]) -> int:
        """How many pixels are of a colour on white paper, or of its soft edges."""
        def is_ink(pixel: tuple[int, int, int]) -> bool:
            shares = [(255 - p) / (255 - c) for p, c in zip(pixel, ink)]
            return min(shares) > 0.4 and max(shares) - min(shares) < 0.08
        return sum(count for pixel, count in self.colors(canvas).items() if is_ink(pixel))

    def shades(self, canvas: str) -> str:
        """Whether the blues of a heat map are those of the 'Light' theme, deep for many, or of the 'Dark' one, pale."""
        blues = [(red, count) for (red, _, blue), count in self.colors(canvas).items() if blue > red + 60]
        mean = sum(red * count for red, count in blues) / max(1, sum(count for _, count in blues))
        return "Light" if mean < 80 else "Dark"

    # ---------------------------------------------------------------- the runs themselves
    def folders(self) -> list[Path]:
        """Folders of runs, the oldest first."""
        return sorted(path for path in self.runs.glob("*") if path.is_dir())

    def folder(self, name: str) -> Path:
        """The folder of the run of this name."""
        return next(path for path in self.folders() if path.name.split("-", 2)[2] == name)

    def done(self, name: str) -> int:
        """Steps in the log of a run."""
        step = log_of(self.folder(name)).step
        return 0 if step is None else step + 1

    def end(self) -> None:
        """End what is still alive of the runs; for the end of a test."""
        for run in filter(None, map(started_in, self.folders())):
            if run.alive:
                os.kill(run.pid, signal.SIGKILL)


def log_of(folder: Path) -> RunStatus:
    """How a run stands, by its log."""
    with closing(RunReader(folder / "run.sqlite")) as log:
        return log.status()


def told(folder: Path, kind: str) -> list[tuple[int, str]]:
    """(step, text) of the events of a kind in a run's log."""
    with closing(RunReader(folder / "run.sqlite")) as log:
        rows = log.events()
        return [(step, text) for step, k, text in zip(rows["step"], rows["kind"], rows["text"]) if k == kind]
