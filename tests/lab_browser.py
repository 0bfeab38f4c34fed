"""JupyterLab in a real browser, for tests: a server with folders of its own, pages with what a test asks of them.

    def test_x(jupyter_lab):
        with jupyter_lab(path) as lab:      # a copy of the notebook, in a folder of its own
            lab.run_all()
            lab.button("Start").click()
            lab.output("loss").wait_for()
            assert not lab.errors           # of the browser's console
"""
from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the helpers that need no browser work without it
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]
SETTINGS = {"apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            "docmanager-extension/plugin": {"autosave": False}}
KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
HARMLESS = re.compile(r"favicon|/api/me\b|debugger state")  # console errors of JupyterLab itself


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def isolated(folder: Path) -> dict[str, str]:
    """An environment in which Jupyter and IPython read and write below `folder` only."""
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
             "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")
    places = {name: str(folder / name.lower()) for name in names}
    for name, values in SETTINGS.items():
        path = Path(places["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab", f"{name}.jupyterlab-settings")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    return {**kept, **places, "OMP_NUM_THREADS": "1"}


def status_of(url: str, token: str = "", **more: Any) -> int:
    """The HTTP status of an address; 0 if nobody answers."""
    headers = {"Authorization": f"token {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, **more), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def end(process: subprocess.Popen, seconds: float = 15) -> None:
    """End a server that was started in a session of its own, and what it has started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def picture(page: Page, path: Path) -> str:
    """Keep a picture of a page; where it is, or why there is none, in a sentence."""
    try:
        page.screenshot(path=path)
    except Exception as error:
        return f"no picture of the page: {error}"
    return f"the page as it was then: {path}"


class LabServer:
    """A JupyterLab of the test's own; call it with a notebook to get a page."""

    def __init__(self, folder: Path, browser: Browser):
        self.folder, self.browser, self.token, self.count = folder, browser, secrets.token_hex(16), 0
        self.root, self.pages, port = folder / "notebooks", [], free_port()
        self.root.mkdir(parents=True)
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ServerApp.ip=127.0.0.1",
                   f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={self.root}",
                   "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly",
                   "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
        self.log = open(folder / "server.log", "w+")
        self.process = subprocess.Popen(command, cwd=self.root, env={**isolated(folder), "JUPYTER_TOKEN": self.token},
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                                        start_new_session=True)
        self.wait()

    def wait(self, seconds: float = 60) -> None:
        """Until the server answers."""
        last = time.monotonic() + seconds
        while status_of(f"{self.url}/api/status", self.token) != 200:
            if self.process.poll() is not None or time.monotonic() > last:
                end(self.process)
                raise RuntimeError(f"JupyterLab does not start:\n{(self.folder / 'server.log').read_text()}")
            time.sleep(0.1)

    def __call__(self, notebook: Path, width: int = 1280, height: int = 800, dark: bool = False) -> LabPage:
        """A page with a copy of the notebook, its kernel ready."""
        self.count += 1
        place = self.root / f"{self.count}"
        place.mkdir()
        shutil.copy(notebook, place)
        return self.open(f"{self.count}/{notebook.name}", width, height, dark)

    def open(self, path: str, width: int = 1280, height: int = 800, dark: bool = False) -> LabPage:
        """A new page with a notebook that is there already, and its kernel if that is alive."""
        scheme = "dark" if dark else "light"
        page = self.browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        lab = LabPage(self, page, path)
        self.pages.append(lab)
        lab.load()
        if dark:
            lab.theme("JupyterLab Dark")
        return lab

    def close(self) -> None:
        """Close every page, end every kernel and the server."""
        for lab in self.pages[:]:
            lab.close()
        end(self.process)
        self.log.close()


class LabPage:
    """A notebook in a browser. `page` is playwright's; `errors` what the console has complained about."""

    def __init__(self, server: LabServer, page: Page, path: str):
        self.server, self.page, self.path, self.errors = server, page, path, []
        self.folder = (server.root / path).parent   # where the kernel runs
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(f"page error: {error.stack or error}"))

    def _console(self, message: ConsoleMessage) -> None:
        text = f"{message.text} ({message.location.get('url', '')})"
        if message.type == "error" and not HARMLESS.search(text):
            self.errors.append(text)

    def __enter__(self) -> LabPage:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and not self.page.is_closed():
            error.add_note(picture(self.page, self.server.folder / f"failed_{self.path.replace('/', '_')}.png"))
        self.close()

    def load(self) -> None:
        """Open the notebook and wait for its kernel."""
        self.page.goto(f"{self.server.url}/lab/tree/{self.path}?reset&token={self.server.token}")
        self.page.wait_for_function(f"() => {KERNEL}?.connectionStatus === 'connected'", timeout=60_000)
        self.page.wait_for_function(f"() => {KERNEL}.status === 'idle'", timeout=60_000)

    def reload(self) -> None:
        """What a person does with F5: the same kernel, a new page."""
        self.load()

    def save(self) -> None:
        """Save the notebook, its outputs included."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def restart(self) -> None:
        """Restart the kernel, as its menu does, without the question."""
        self.page.evaluate(f"() => {KERNEL}.restart()")
        self.page.wait_for_function(f"() => {KERNEL}?.connectionStatus === 'connected' && {KERNEL}.status === 'idle'")

    def command(self, name: str, **given: Any) -> None:
        """Start one of JupyterLab's commands; does not wait for its end."""
        self.page.evaluate("([name, given]) => { window.jupyterapp.commands.execute(name, given); }", [name, given])

    def run_all(self, wait: bool = True, seconds: float = 60) -> None:
        """Run every cell; by default until all have ended."""
        last = self.page.locator(".jp-CodeCell .jp-InputPrompt").last
        self.command("notebook:run-all-cells")
        if wait:
            last.filter(has_text=re.compile(r"\d")).wait_for(timeout=seconds * 1000)
            self.page.wait_for_function(f"() => {KERNEL}.status === 'idle'", timeout=seconds * 1000)

    def output(self, text: str | re.Pattern = "") -> Locator:
        """Outputs of cells that hold a text; `.first.wait_for()` waits for one. A cell's own text is not an output."""
        found = self.page.locator(".jp-Cell .jp-OutputArea-output")
        return found.filter(has_text=text) if text else found

    def button(self, text: str) -> Locator:
        """A button of a widget, by its text or label, never one of JupyterLab's own."""
        return self.page.locator(".jp-OutputArea").get_by_role("button", name=text)

    def theme(self, name: str) -> None:
        """'JupyterLab Light' or 'JupyterLab Dark'."""
        self.command("apputils:change-theme", theme=name)
        light = "false" if "Dark" in name else "true"
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")  # a second change trips over it

    def kernel(self) -> str:
        """The id of the kernel."""
        return self.page.evaluate(f"() => {KERNEL}?.id ?? ''")

    def calm(self) -> None:
        """Hide what is not the notebook, for pictures."""
        if self.page.locator(".jp-SideBar.jp-mod-left .lm-mod-current").count():
            self.command("application:toggle-left-area")

    def close(self) -> None:
        """Close the page and end its kernel; may be called again."""
        if self.page.is_closed():
            return
        kernel = self.kernel()
        self.page.close()
        if kernel:
            status_of(f"{self.server.url}/api/kernels/{kernel}", self.server.token, method="DELETE")
        self.server.pages.remove(self)
