"""Where browser tests find a browser, and what is said when there is none."""
import os
import time

import browser
import pytest


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An empty PATH to put programs into, and a home without a browser of playwright."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "playwright"))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(browser.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def program(name: str, text: str = "exit 0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
        return str(tmp_path / name)
    return program


def test_where_it_is_found_and_what_comes_first(path, monkeypatch):
    assert browser.find() == ("", "no Chromium: none in PATH, in CHROMIUM=… or from `playwright install chromium`")
    own = path("playwright/chromium-1200/chrome-linux/chrome")
    assert browser.find() == (own, "")
    debian = path("chromium")
    assert browser.find() == (debian, "")
    monkeypatch.setenv("CHROMIUM", own)
    assert browser.find() == (own, "")
    monkeypatch.setenv("CHROMIUM", "/no/such")
    assert browser.find() == ("", "no Chromium: CHROMIUM=/no/such is no program")
    monkeypatch.setattr(browser.importlib.util, "find_spec", lambda name: None)
    assert browser.find() == ("", "no playwright: pip install 'f16lab[browser]'")


def test_apt_brings_one(path, tmp_path, capsys):
    program = tmp_path / "chromium"
    path("apt-get", f'for last; do :; done; [ "$last" = update ] || {{ echo > {program}; /bin/chmod +x {program}; }}')
    browser.main()
    assert capsys.readouterr().out == f"installing Chromium\nbrowser tests: {tmp_path}/chromium\n"


@pytest.mark.parametrize("script, words", [
    ("echo 'E: Unable to locate package chromium' >&2; exit 100", "(E: Unable to locate package chromium)"),
    ("exec /bin/sleep 30", "took more than 0.2 s"), ("exit 1", "(apt-get failed)"), (None, "there is no apt-get")])
def test_apt_that_does_not_is_said_and_does_not_hang(path, capsys, monkeypatch, script, words):
    if script:
        path("apt-get", script)
    plain = browser.by_apt
    monkeypatch.setattr(browser, "by_apt", lambda: plain(0.4))
    start = time.monotonic()
    browser.main()
    said = capsys.readouterr().out
    assert words in said and "browser tests: skipped, no Chromium: " in said and time.monotonic() - start < 5


def test_only_root_installs(path, monkeypatch):
    path("apt-get", "exit 0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert browser.by_apt() == "only root may use apt-get"
