"""Finds the Chromium that browser tests use; `python .ci/browser.py` installs Debian's where there is none.

Only root on a machine with apt installs anything, quietly and within LIMIT seconds. Where that does not work, the tests
that need a browser are skipped, and say why.
"""
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIMIT = 120  # seconds for apt, all in all
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> tuple[str, str]:
    """(the program, ''), or ('', why there is none)."""
    if importlib.util.find_spec("playwright") is None:
        return "", "no playwright: pip install 'f16lab[browser]'"
    if named := os.environ.get("CHROMIUM"):
        return (named, "") if shutil.which(named) else ("", f"no Chromium: CHROMIUM={named} is no program")
    if found := next(filter(None, map(shutil.which, NAMES)), ""):
        return found, ""
    own = playwrights_own()
    return own, "" if own else "no Chromium: none in PATH, in CHROMIUM=… or from `playwright install chromium`"


def playwrights_own() -> str:
    """The Chromium that `playwright install chromium` has brought; '' without."""
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    return next((str(path) for path in sorted(folder.glob("chromium-*/chrome-linux*/chrome"), reverse=True)), "")


def by_apt(limit: float = LIMIT) -> str:
    """Install Debian's Chromium; returns why not, or ''."""
    if not shutil.which("apt-get"):
        return "there is no apt-get"
    if os.geteuid() != 0:
        return "only root may use apt-get"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=20", "-o", "Acquire::Retries=1"]
    steps = ([*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core"])
    for step in steps:
        try:
            done = subprocess.run(step, env=environment, capture_output=True, text=True, timeout=limit / 2,
                                  stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return f"`{step[0]} {step[-1]}` took more than {limit / 2:g} s"
        if done.returncode and step is steps[-1]:
            return (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]
    return ""


def main() -> None:
    """Say which browser there is, after installing one if that is possible."""
    program, why = find()
    if why.startswith("no Chromium") and "CHROMIUM" not in os.environ:
        print("installing Chromium")
        refused = by_apt()
        program, why = find()
        why = f"{why} ({refused})" if why and refused else why
    print(f"browser tests: {program or f'skipped, {why}'}")


if __name__ == "__main__":
    sys.exit(main())
