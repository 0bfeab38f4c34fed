"""`f16lab lab` and `f16lab app`: the right page, this machine alone, and nobody without the token."""
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import repo
from click.testing import CliRunner
from lab_browser import end, free_port, isolated, status_of
from notebook_files import write_notebook

from f16lab import lab
from f16lab.cli import command

PAGE = repo.ROOT / "nbs" / lab.PAGE
SHIPPED = repo.ROOT / "f16lab" / "static" / lab.PAGE


def listening(port: int) -> set[str]:
    """The addresses (as the kernel writes them) on which something listens to a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {address for address, number in (line[1].split(":") for line in lines if line[3] == "0A")
            if int(number, 16) == port}


@pytest.fixture
def started(tmp_path):
    """Start a verb in an empty folder on a free port; gives (port, what it has printed until its address was there)."""
    running = []

    def start(verb: str) -> tuple[int, str]:
        write_notebook(tmp_path / lab.COPY, ["print(1)"])
        port, log = free_port(), tmp_path / f"{verb}.log"
        with open(log, "w") as out:
            running.append(subprocess.Popen(
                [sys.executable, "-m", "f16lab", verb, "--no-browser", "--port", str(port)], cwd=tmp_path,
                env=isolated(tmp_path / "jupyter"), stdout=out, stderr=subprocess.STDOUT, start_new_session=True))
        last = time.monotonic() + 40
        while not re.search(rf"http://\S*:{port}/\S*token=\w+|unning at", log.read_text()):
            assert running[-1].poll() is None and time.monotonic() < last, log.read_text()
            time.sleep(0.1)
        return port, log.read_text()
    yield start
    for process in running:
        end(process)


def test_lab_listens_here_alone_and_asks_for_its_token(started):
    pytest.importorskip("jupyterlab")
    port, text = started("lab")
    url = f"http://127.0.0.1:{port}"
    token = re.search(rf"http://127\.0\.0\.1:{port}/lab/tree/\S*workbench\.ipynb\?token=(\w+)", text)
    assert token, text
    assert status_of(f"{url}/api/status") == 403 == status_of(f"{url}/api/status", "0" * 48)
    assert status_of(f"{url}/api/status", token[1]) == 200
    assert listening(port) == {"0100007F"}
    wish = urllib.request.Request(f"{url}/lab/api/settings/@jupyterlab/apputils-extension:notification",
                                  headers={"Authorization": f"token {token[1]}"})
    with urllib.request.urlopen(wish, timeout=10) as answer: settings = json.load(answer)["schema"]["properties"]
    assert settings["fetchNews"]["default"] == "false"  # asks nobody for news, and the person nothing


def test_app_listens_here_alone_and_asks_for_its_token(started):
    pytest.importorskip("voila")
    port, text = started("app")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
        assert "/login" in answer.url and "print(" not in answer.read().decode()
    assert re.search(rf"http://127\.0\.0\.1:{port}/\?token=\w{{32}}", text), text
    assert listening(port) == {"0100007F"}


def test_without_a_checkout_the_page_is_a_copy_that_is_never_overwritten(tmp_path, monkeypatch):
    static = tmp_path / "package" / "static"
    static.mkdir(parents=True)
    write_notebook(static / lab.PAGE, ["page"])
    monkeypatch.setattr(lab, "files", lambda name: tmp_path / "package")
    here = tmp_path / "here"
    here.mkdir()
    page = lab.page_here(here)
    assert page == lab.Page(here / lab.COPY, here) and page.notebook.read_bytes() == (static / lab.PAGE).read_bytes()
    page.notebook.write_text("mine")
    assert lab.page_here(here).notebook.read_text() == "mine"
    (static / lab.PAGE).unlink()
    page.notebook.unlink()
    with pytest.raises(ValueError, match="lacks its page"):
        lab.page_here(here)
    assert list(here.iterdir()) == []


@pytest.mark.skipif(not PAGE.exists(), reason="nbs/workbench.ipynb is not there")
def test_the_page_that_is_installed_is_the_page_of_the_checkout():
    assert lab.checkout_page() == lab.Page(PAGE, repo.ROOT)
    assert SHIPPED.read_bytes() == PAGE.read_bytes(), "run `make tidy`"


@pytest.mark.parametrize("verb, program", [("lab", "jupyterlab"), ("app", "voila")])
def test_what_is_not_installed_is_said_in_one_sentence(verb, program, monkeypatch):
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None if name == program else object())
    monkeypatch.setattr(os, "execv", lambda *words: pytest.fail("it was started"))
    done = CliRunner().invoke(command(), [verb])
    assert done.exit_code == 2
    assert done.stderr == f"f16lab: not installed: {program}; pip install 'f16lab[lab]'\n"


@pytest.mark.parametrize("verb", ["lab", "app"])
def test_a_browser_and_a_port_are_asked_for_as_said(verb, monkeypatch):
    said = []
    monkeypatch.setattr(lab, "checkout_page", lambda: lab.Page(Path("/x/page.ipynb"), Path("/x")))
    monkeypatch.setattr(os, "execv", lambda program, words: said.append(words))
    for line in (f"{verb}", f"{verb} --no-browser --port 8123"):
        assert CliRunner().invoke(command(), line.split()).exit_code == 0
    plain, changed = said
    assert "--no-browser" not in plain and "--no-browser" in changed
    assert not any("port" in word for word in plain) and any(word.endswith("port=8123") for word in changed)
    for ending in ("ip=127.0.0.1", "page.ipynb"):
        assert all(any(word.endswith(ending) for word in words) for words in said)
