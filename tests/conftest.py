"""What every test process needs before torch is imported, and which tests a machine can run."""
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
sys.path.insert(0, str(ROOT / "tests"))


def chromium() -> bool:
    """Whether a browser test can run here."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return False
    return shutil.which("chromium") is not None


NEEDS = {
    "gpu": (lambda: torch.cuda.is_available(), "needs a CUDA device"),
    "gpu2": (lambda: torch.cuda.device_count() > 1, "needs two CUDA devices"),
    "browser": (chromium, "needs playwright and Chromium"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has no hardware or program for; leave out slow tests unless -m speaks of them."""
    missing = {name: why for name, (there, why) in NEEDS.items() if not there()}
    if "slow" not in config.option.markexpr:
        missing["slow"] = "slow: ask for it with -m slow"
    for item in items:
        for name in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[name]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line on the shape of the notebooks."""
    import repo

    terminalreporter.write_line(repo.shape())
