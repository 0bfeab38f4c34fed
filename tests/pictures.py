"""Makes the pictures of the workbench again: `python tests/pictures.py [FOLDER]`, by default into nbs/images.

JupyterLab is started, three profiles are trained on the built-in text in the workbench, and each page is taken in both
themes. Takes a minute or two; needs Chromium and JupyterLab, as the browser tests do.
"""
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

import browser  # noqa: E402
from lab_browser import ARGUMENTS, LabPage, LabServer  # noqa: E402
from notebook_files import write_notebook  # noqa: E402
from workbench_page import BenchPage  # noqa: E402

CELL = """from f16lab.workbench import Workbench

Workbench(folder="runs", profiles=("f32", "f16", "all_f16"))"""
STEPS, LIVE = 600, 300
PANEL = ".f16lab-views .f16p-panel:visible"
PANELS = (  # file, the page it is on, what is taken
    ("exponents", "Exponents", ".f16-exponents"), ("histogram", "Exponents", PANEL), ("casts", "Casts", PANEL),
    ("lost_updates", "Lost updates", PANEL), ("memory", "Memory", PANEL), ("profiles", "Profiles", ".f16lab-side"))
THEMES = {"": "JupyterLab Light", "_dark": "JupyterLab Dark"}
LIMIT = 200_000  # bytes of a picture


def only_the_notebook(lab: LabPage) -> None:
    """Hide what is not the notebook."""
    lab.calm()
    for name, given in {"application:toggle-side-tabbar": {"side": "left"}, "statusbar:toggle": {},
                        "application:toggle-mode": {}}.items():
        lab.command(name, **given)
    lab.command("application:toggle-side-tabbar", side="right")
    lab.page.wait_for_timeout(300)


def at_the_top(lab: LabPage) -> None:
    """Scroll until the workbench begins at the top, without a cell that is outlined."""
    lab.page.evaluate("document.querySelector('.f16lab-workbench').scrollIntoView()")
    lab.page.evaluate("document.activeElement.blur()")
    lab.page.mouse.move(2, 2)
    lab.page.wait_for_timeout(500)


def keep(lab: LabPage, path: Path, place: str = "") -> None:
    """Take the page, or an element of it; the file must be small."""
    taken = lab.page.locator(place).first if place else lab.page
    path.write_bytes(taken.screenshot(animations="disabled"))
    size = path.stat().st_size
    sys.stdout.write(f"{path.name}: {size / 1000:.0f} kB{', too large' if size > LIMIT else ''}\n")


def take_all(lab: LabPage, out: Path) -> None:
    """Train, and take every picture."""
    bench = BenchPage(lab.page, lab.folder)
    lab.run_all()
    bench.ready()
    only_the_notebook(lab)
    for name, value in {"steps": STEPS, "lr": 0.003}.items():
        field = lab.page.locator(f".f16lab-field-{name} input")
        field.fill(str(value))
        field.blur()
    bench.press("compare")
    try:
        bench.until(lambda: len(bench.steps()) == 3 and max(bench.steps().values()) > LIVE, "enough steps", 300)
        lab.page.get_by_role("button", name="smooth").click()
        lab.page.get_by_label("difference from").select_option("f32")
        for ending, theme in THEMES.items():
            lab.theme(theme)
            at_the_top(lab)
            keep(lab, out / f"workbench{ending}.png")
        bench.until(lambda: lab.page.locator(".f16lab-is-finished").count() == 3, "the end of the runs", 300)
        take_panels(lab, bench, out)
    finally:
        bench.end()


def take_panels(lab: LabPage, bench: BenchPage, out: Path) -> None:
    """The panels over the whole width, and the profile editor."""
    lab.page.set_viewport_size({"width": 1280, "height": 1500})
    side = lab.page.locator(".f16lab-side")
    for file, name, place in PANELS:
        if side.is_visible() is (name != "Profiles"): lab.page.locator("button.f16lab-fold-side").click()
        bench.open(name)
        if file == "histogram": lab.page.locator(".f16p-controls input[type=range]").fill("6")
        for ending, theme in THEMES.items():
            lab.theme(theme)
            at_the_top(lab)
            keep(lab, out / f"panel_{file}{ending}.png", place)


def main() -> None:
    """Start a server and a browser, take the pictures, end both."""
    from playwright.sync_api import sync_playwright

    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "nbs" / "images")
    program, why = browser.find()
    if why: sys.exit(why)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        server = LabServer(Path(folder, "lab"), started)
        try:
            with server(write_notebook(Path(folder, "workbench.ipynb"), [CELL])) as lab: take_all(lab, out)
        finally:
            server.close()
            started.close()


if __name__ == "__main__":
    main()
