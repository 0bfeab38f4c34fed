"""The workbench in JupyterLab and as an app, in a real browser, with runs in processes: what a person does and sees."""
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import repo
from lab_browser import end, free_port, isolated, picture
from notebook_files import write_notebook
from workbench_page import BLUE, INK, TINY, BenchPage, log_of, told

from f16lab.config import TrainConfig
from f16lab.inspecting import verify

pytestmark = pytest.mark.browser
NOTEBOOK = repo.ROOT / "nbs" / "workbench.ipynb"
RECIPE = TrainConfig().with_(**TINY)
LOSS = ".f16-trajectories canvas"
ELSEWHERE = re.compile(r"https://cdn\.|labextensions/jupyterlab-jupytext/|favicon")  # what voila looks up


@contextmanager
def opened(lab):
    """The notebook's workbench after its cells have run; no run is left behind."""
    bench = BenchPage(lab.page, lab.folder)
    with lab:
        try:
            lab.theme("JupyterLab Light")  # whatever another test left behind
            lab.run_all()
            bench.ready()
            yield bench
        finally:
            bench.end()


def both_grow(bench: BenchPage) -> None:
    """Wait until both curves are there, and until both are longer."""
    bench.until(lambda: list(bench.steps()) == ["f32", "f16"] and min(bench.steps().values()) > 10, "two curves")
    before = [len(bench.curve(run)) for run in (0, 1)]
    bench.until(lambda: all(len(bench.curve(run)) > before[run] for run in (0, 1)), "both curves grow")


def pause(bench: BenchPage) -> int:
    """Pause f16 and see that it takes no further step; the number of steps it has taken."""
    bench.choose("f16")
    bench.press("pause")
    folder = bench.folder("f16")
    (_, text), = bench.until(lambda: told(folder, "paused"), "the run says that it is paused")
    at, other = int(re.search(r"after (\d+) steps", text)[1]), bench.done("f32")
    bench.until(lambda: bench.done("f32") > other + 20, "the other run goes on")
    assert bench.done("f16") == at, "no step after the pause"
    return at


def edit(bench: BenchPage, slot: str, value: str) -> None:
    """Change a slot of the profile in hand and send it to the run."""
    bench.open("Profiles")
    bench.page.locator(f".f16lab-slot-{slot} select").select_option(value)
    bench.press("apply")


def look_at_panels(bench: BenchPage) -> None:
    """Each page of the right column shows something."""
    page = bench.page
    bench.open("Exponents")
    bench.until(lambda: len(bench.colors(".f16-exponents canvas")) > 6, "shades in the exponent map")
    said = page.locator(".f16p-readout")
    before = said.inner_text()
    page.locator(".f16p-controls input[type=range]").fill("12")
    assert "2¹²" in said.inner_text() != before, "what if ×2¹²"
    bench.open("Casts")
    page.locator(".f16p-map button").first.wait_for()
    assert page.locator(".f16p-table:visible tbody tr").count() > 5
    bench.open("Lost updates")
    page.locator(".f16p-table:visible tbody tr").first.wait_for()
    bench.open("Memory")
    page.locator(".f16p-bar:visible").first.wait_for()
    assert page.locator(".f16p-bar:visible").count() == 2, "a bar for each run"
    bench.open("Trajectories")
    problems = page.locator(".f16p-problem:not([hidden]), .f16-banner:not([hidden])")
    assert [text for text in problems.all_text_contents() if text] == []


def change_theme(lab, bench: BenchPage) -> None:
    """Pictures that nothing else redraws any more follow JupyterLab's theme."""
    bench.open("Exponents")
    for theme in ("Dark", "Light", "Dark", "Light"):
        lab.theme(f"JupyterLab {theme}")
        bench.until(lambda: bench.shades(".f16p-picture canvas") == theme, f"the histogram in {theme}", 10)


def test_compare_pause_edit_step_reload_and_stop(jupyter_lab):
    lab = jupyter_lab(NOTEBOOK)
    with opened(lab) as bench:
        bench.recipe(RECIPE)
        bench.press("compare")
        both_grow(bench)
        at, f16 = pause(bench), bench.folder("f16")
        edit(bench, "stable", "f16")
        (_, text), = bench.until(lambda: [e for e in told(f16, "command") if "profile set" in e[1]], "the edit")
        assert "stable=f16" in text and f"from step {at} on" in text, text
        bench.press("step")
        bench.until(lambda: len(told(f16, "paused")) == 2, "one step, then paused again")
        assert bench.done("f16") == at + 1
        assert min(bench.drawn(LOSS, ink) for ink in (INK, BLUE)) > 40, "both runs are drawn over each other"
        bench.press("resume")
        bench.until(lambda: bench.done("f16") > at + 20, "it goes on")
        look_at_panels(bench)

        lab.save()
        lab.reload()
        bench.ready()
        bench.until(lambda: all(bench.curve(run)[:1] == [0] for run in (0, 1)), "the curves back from their first step")
        both_grow(bench)
        bench.choose("all")
        bench.press("stop")
        bench.until(lambda: bench.stopped() == 2, "both say where they stopped")
        for folder in bench.folders():
            status = log_of(folder)
            assert status.status == "stopped" and f"stopped at step {status.step + 1}" in bench.words()
            assert verify(folder, 2).equal, "what is saved goes on with equal bits"
        change_theme(lab, bench)
        assert lab.errors == []


def test_a_run_outlives_its_tab_and_its_kernel(jupyter_lab):
    lab = jupyter_lab(NOTEBOOK)
    with opened(lab) as bench:
        bench.recipe(RECIPE)
        bench.press("start")
        bench.until(lambda: bench.steps().get("f16", -1) > 10, "a curve")
        assert lab.errors == []
        lab.page.close()
        run, = bench.folders()
        lab.server.pages.remove(lab)
        again = jupyter_lab.open(lab.path)
        with opened(again) as bench:
            assert "f16" in bench.words() and "running" in bench.words(), "found again"
            seen = bench.until(lambda: bench.done("f16"), "steps")
            again.restart()
            bench.until(lambda: bench.done("f16") > seen + 20, "it goes on without the kernel that started it")
            again.run_all()
            bench.ready()
            bench.until(lambda: bench.steps().get("f16", -1) > seen, "the curve goes on")
            bench.until(lambda: bench.curve(0)[:1] == [0], "the curve is back from its first step")
            assert log_of(run).session == 1, "the same run"
            bench.press("stop")
            bench.until(lambda: bench.stopped() == 1, "it says where it stopped")
            assert log_of(run).status == "stopped" and again.errors == []


DRIVEN = f"""from pathlib import Path
from f16lab.config import TrainConfig
from f16lab.train import steps
from f16lab.workbench import Workbench

taken = []

def broken(record):
    if type(record).__name__ == "StepRecord": taken.append(record.step)
    raise RuntimeError("no such figure")

bench = Workbench(steps(TrainConfig("f16").with_(**{TINY})), "runs/1-1-here", on_record=[broken])
bench.tools["stop"].on_click(lambda _: Path("stop").write_text(str(len(taken))))
bench"""


def test_a_run_in_the_notebook_stops_within_a_step_and_survives_its_display(jupyter_lab, tmp_path):
    lab = jupyter_lab(write_notebook(tmp_path / "driven.ipynb", [DRIVEN]))
    with opened(lab) as bench:
        assert not bench.tool("compare").is_visible()
        bench.press("start")
        bench.until(lambda: bench.steps().get("f16", -1) > 10, "a curve")
        assert bench.words().count("no such figure") == 1, "told once"
        bench.press("start")
        bench.until(lambda: "under way" in bench.words(), "a second Start is refused")
        bench.press("stop")
        bench.until(lambda: bench.stopped() == 1, "it says where it stopped")
        clicked, status = int((lab.folder / "stop").read_text()), log_of(bench.folder("here"))
        assert status.status == "stopped" and clicked <= status.step + 1 <= clicked + 2, "the step in hand, no more"
        assert verify(bench.folder("here"), 2).equal and lab.errors == []


@pytest.fixture
def app(chromium, tmp_path):
    """`f16lab app` where there is no checkout: (the address with its token, the folder)."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "f16lab").symlink_to(repo.ROOT / "f16lab")
    here, log = tmp_path / "here", tmp_path / "app.log"
    here.mkdir()
    command = [sys.executable, "-m", "f16lab", "app", "--no-browser", "--port", str(free_port())]
    environment = {**isolated(tmp_path / "jupyter"), "PYTHONPATH": str(tmp_path / "lib")}
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=here, env=environment, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    yield process, log, here
    end(process)


def test_the_same_page_as_an_app(app, chromium, tmp_path):
    pytest.importorskip("voila")
    process, log, here = app
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    errors, bench = [], BenchPage(page, here)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(f"{m.text} ({m.location['url']})") if m.type == "error" else None)
    try:
        found = bench.until(lambda: re.search(r"http://127\S+token=\w+", log.read_text()), "the address")
        page.goto(found[0])
        bench.ready()
        bench.recipe(RECIPE)
        bench.press("compare")
        both_grow(bench)
        bench.press("stop")
        bench.until(lambda: bench.stopped() == 2, "both say where they stopped")
        assert [error for error in errors if not ELSEWHERE.search(error)] == []
    except BaseException as error:
        error.add_note(picture(page, tmp_path / "failed.png"))
        raise
    finally:
        page.close()
        bench.end()
