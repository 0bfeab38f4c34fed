"""What every test process needs before torch is imported, and which tests a machine can run."""
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
sys.path.insert(0, str(ROOT / "tests"))

import browser  # noqa: E402


ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
NO_BROWSER = browser.find()[1]  # '' if there is one
NEEDS = {
    "gpu": (lambda: torch.cuda.is_available(), "needs a CUDA device"),
    "gpu2": (lambda: torch.cuda.device_count() > 1, "needs two CUDA devices"),
    "browser": (lambda: not NO_BROWSER, NO_BROWSER),
}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has no hardware or program for; leave out slow tests unless -m speaks of them."""
    if named_by_address := [item.nodeid for item in items if ADDRESS.search(item.nodeid)]:
        raise pytest.UsageError(f"a test's name holds an address, another one in every process: {named_by_address[:3]}")
    missing = {name: why for name, (there, why) in NEEDS.items() if not there()}
    if "slow" not in config.option.markexpr:
        missing["slow"] = "slow: ask for it with -m slow"
    for item in items:
        if item.get_closest_marker("browser"):  # one server and one browser for all of them
            item.add_marker(pytest.mark.xdist_group("browser"))
        elif shares_a_fixture(item):  # which two workers would make twice
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
        for name in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[name]))
    order = {"browser": 0}  # what one worker must do alone comes first
    items.sort(key=lambda item: min((order.get(mark.args[0], 1) for mark in item.iter_markers("xdist_group")), default=2))


def shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of its module."""
    known = item._fixtureinfo.name2fixturedefs if hasattr(item, "_fixtureinfo") else {}
    return any(definition.scope == "module" for definitions in known.values() for definition in definitions)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """A test draws the same numbers whatever ran before it."""
    torch.manual_seed(0), np.random.seed(0), random.seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line on the shape of the notebooks."""
    import repo

    terminalreporter.write_line(repo.shape())


# ---------------------------------------------------------------- browser tests
@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """Chromium, started by playwright without a window."""
    from lab_browser import ARGUMENTS
    from playwright.sync_api import sync_playwright
    from widget_page import BROWSER

    program, why = browser.find()
    if why:
        pytest.skip(why)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        BROWSER.append(started)
        yield started
        BROWSER.remove(started)
        started.close()


@pytest.fixture(scope="session")
def jupyter_lab(chromium, tmp_path_factory) -> Iterator:
    """JupyterLab with folders of its own; `jupyter_lab(path)` opens a copy of a notebook, see lab_browser."""
    pytest.importorskip("jupyterlab", reason="no JupyterLab: pip install 'f16lab[lab]'")
    from lab_browser import LabServer

    server = LabServer(tmp_path_factory.mktemp("lab"), chromium)
    yield server
    server.close()
