"""The checks that keep the notebooks and the package one thing: `python .ci/notebooks.py clean|export|imports|run`.

clean    every notebook is as `nbdev-clean` would leave it
export   the package is what the notebooks export
imports  every module imports in a fresh process
run      every notebook runs alone, top to bottom, away from its own folder
docs     run them and render HTML with their pictures into a folder

No check writes into the working tree, so all of them hold with uncommitted changes too.
"""
import argparse
import copy
import difflib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIB = "f16lab"
JOBS = 2
TIMEOUT = 300  # seconds a notebook
RENDERER = "plotly_mimetype"  # figures that need no browser
HAND_WRITTEN = {"__init__.py", "__main__.py"}
CELL_MARK = re.compile(r"^# %% (?:\S+ )?#(\S+)$", re.MULTILINE)


# ---------------------------------------------------------------- reading notebooks
def paths(root: Path = ROOT) -> list[Path]:
    """The notebooks, in reading order."""
    hidden = re.compile(r"^[._]")
    found = (p for p in (root / "nbs").rglob("*.ipynb"))
    return sorted(p for p in found if not any(hidden.match(part) for part in p.relative_to(root).parts))


def load(path: Path) -> dict:
    """A notebook as plain values."""
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell: dict) -> str:
    """A cell's text."""
    return "".join(cell["source"])


def directives(cell: dict) -> dict[str, str]:
    """The `#| name value` lines that open a code cell."""
    found = {}
    for line in source(cell).splitlines() if cell["cell_type"] == "code" else []:
        if not line.startswith("#|"):
            break
        name, _, value = line[2:].strip().partition(" ")
        found[name.rstrip(":")] = value.strip()
    return found


def code(cell: dict) -> str:
    """A cell's text without its directives."""
    return "\n".join(line for line in source(cell).splitlines() if not line.startswith("#|"))


def exported(notebook: dict) -> list[dict]:
    """The cells that go into the module."""
    return [c for c in notebook["cells"] if {"export", "exports", "exporti"} & directives(c).keys()]


def module_name(notebook: dict) -> str | None:
    """What `#| default_exp` says."""
    return next((d["default_exp"] for d in map(directives, notebook["cells"]) if "default_exp" in d), None)


def shown(path: Path, root: Path = ROOT) -> str:
    """A path as messages print it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


# ---------------------------------------------------------------- clean
def unclean(path: Path, root: Path = ROOT) -> list[str]:
    """What `nbdev-clean` would change in a notebook, one line a cell."""
    from fastcore.nbio import nb2str
    from nbdev.clean import clean_nb

    before = load(path)
    after = copy.deepcopy(before)
    clean_nb(after, clear_all=True)
    pairs = zip(before["cells"], after["cells"])
    found = [f"{shown(path, root)}, cell #{new.get('id')}: {_dirt(old, new)}" for old, new in pairs if old != new]
    if len(before["cells"]) != len(after["cells"]):
        found.append(f"{shown(path, root)}: nbdev-clean drops or adds cells")
    if before["metadata"] != after["metadata"]:
        found.append(f"{shown(path, root)}: notebook metadata {_dirt(before['metadata'], after['metadata'])}")
    if not found and nb2str(after) != path.read_text(encoding="utf-8"):
        found.append(f"{shown(path, root)}: the JSON layout differs from what nbdev-clean writes")
    return found


def _dirt(old: dict, new: dict) -> str:
    """Which fields of a cell, or of the notebook's metadata, are not clean."""
    return ", ".join(sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k)))


# ---------------------------------------------------------------- export
def export_into(folder: Path, root: Path = ROOT) -> Path:
    """A copy of the configuration and the notebooks, exported there; returns the package folder."""
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(root / name, folder / name)
    for notebook in paths(root):
        target = folder / notebook.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(notebook, target)
    (folder / LIB).mkdir()
    for name in HAND_WRITTEN:
        shutil.copy(root / LIB / name, folder / LIB / name)
    environment = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    command = "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()"
    done = subprocess.run([sys.executable, "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"nbdev-export failed:\n{done.stdout}{done.stderr}")
    return folder / LIB


def differences(root: Path = ROOT) -> list[str]:
    """Where the package is not what the notebooks export, naming notebook and cell."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {p.name: p.read_text(encoding="utf-8") for p in export_into(Path(folder), root).glob("*.py")}
    here = {p.name: p.read_text(encoding="utf-8") for p in (root / LIB).glob("*.py")}
    found = [f"{LIB}/{name}: no notebook exports it" for name in sorted(here.keys() - fresh.keys())]
    found += [f"{LIB}/{name}: missing; a notebook exports it" for name in sorted(fresh.keys() - here.keys())]
    return found + [_difference(name, here[name], fresh[name]) for name in sorted(here.keys() & fresh.keys())
                    if here[name] != fresh[name]]


def _difference(name: str, here: str, fresh: str) -> str:
    """The first line in which a module differs, with the notebook and the cell it belongs to."""
    notebook = re.search(r"^# AUTOGENERATED!.*File to edit: \.\./(\S+?)\.?$", fresh, re.MULTILINE)
    old, new = here.splitlines(), fresh.splitlines()
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    _, i, i_end, j, j_end = next((step for step in steps if step[0] != "equal"), ("", 0, 0, 0, 0))
    cells = CELL_MARK.findall("\n".join(new[:j + 1]))
    where = f"{notebook[1] if notebook else 'its notebook'}, cell #{cells[-1] if cells else 'first'}"
    return (f"{LIB}/{name} differs from {where}\n    in the package:  {' | '.join(old[i:i_end][:3])}\n"
            f"    in the notebook: {' | '.join(new[j:j_end][:3])}")


# ---------------------------------------------------------------- fresh processes
@dataclass(frozen=True)
class Outcome:
    """How a subprocess ended: what it was, whether it succeeded, seconds, what it wrote."""
    name: str
    ok: bool
    seconds: float
    text: str


def _environment(root: Path) -> dict[str, str]:
    """One thread a process, the package importable by children too."""
    python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "PLOTLY_RENDERER": RENDERER}
    return {**os.environ, **fixed}


def in_process(name: str, command: list[str], root: Path = ROOT, timeout: float = TIMEOUT) -> Outcome:
    """Run a command in an empty folder and a process group of its own, which ends with it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        child = subprocess.Popen(command, cwd=folder, env=_environment(root), stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        late = ""
        try:
            code_ = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code_, late = 1, f"{name}: stopped after {timeout:g} s\n"
        finally:
            _end_group(child.pid)
            child.wait()
        out.seek(0)
        return Outcome(name, code_ == 0, time.monotonic() - start, late + out.read())


def _end_group(pid: int) -> None:
    """End what a child has left running, and the child."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def side_by_side(tasks: Iterable[Callable[[], Outcome]], jobs: int = JOBS) -> Iterator[Outcome]:
    """Outcomes as they come, at most `jobs` processes at once, in the order given."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda task: task(), tasks)


# A process that holds torch, which is what takes long to import, and nothing of ours, forks for each module.
FORKS = """
import os, sys
import torch
assert not any(name.startswith("f16lab") for name in sys.modules)
for name in sys.argv[1:]:
    if not (child := os.fork()):
        try: __import__(name)
        except BaseException: os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0: print("imported", name, flush=True)
"""


def import_modules(root: Path = ROOT) -> Iterator[Outcome]:
    """Import each module of the package alone; what fails in a fork is imported again in a process that tells why."""
    skip = {"__main__", "_modidx"}
    names = [LIB if p.stem == "__init__" else f"{LIB}.{p.stem}" for p in sorted((root / LIB).glob("*.py"))
             if p.stem not in skip]
    command = [sys.executable, "-c"]
    forked = in_process("forks", [*command, FORKS, *names], root).text.split("\n") if hasattr(os, "fork") else []
    good = {line.removeprefix("imported ") for line in forked if line.startswith("imported ")}
    yield from (Outcome(name, True, 0.0, "") for name in names if name in good)
    yield from side_by_side(lambda n=n: in_process(n, [*command, f"import {n}"], root) for n in names if n not in good)


# ---------------------------------------------------------------- running a notebook
FORK = multiprocessing.get_context("forkserver")  # from a process that holds what takes long to import, and no more
FORK.set_forkserver_preload(["torch", "execnb.shell", "nbdev.test", "nbformat", "plotly.io._renderers"])


def in_fork(name: str, do: Callable, args: tuple, root: Path = ROOT, timeout: float = TIMEOUT) -> Outcome:
    """Call a function as `in_process` runs a command; whatever it raises is written down."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("r", encoding="utf-8") as out:
        child = FORK.Process(target=_alone, args=(do, args, folder, out.name, _environment(root)))
        child.start()
        child.join(timeout)
        late = "" if child.exitcode is not None else f"{name}: stopped after {timeout:g} s\n"
        _end_group(child.pid)
        child.join()
        return Outcome(name, child.exitcode == 0, time.monotonic() - start, late + out.read())


def _alone(do: Callable, args: tuple, folder: str, out: str, environment: dict[str, str]) -> None:
    """In a fork: a process group, a folder, an output and an environment of its own."""
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2): os.dup2(os.open(out, os.O_WRONLY | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ.update(environment)
    do(*args)


def run_notebooks(notebooks: Iterable[Path], root: Path = ROOT, flags: str = "", save: Path | None = None,
                  timeout: float = TIMEOUT, jobs: int = JOBS) -> Iterator[Outcome]:
    """Run each notebook in a process of its own; `flags` names kinds of cells to run that are left out otherwise."""
    def task(path: Path) -> Outcome:
        return in_fork(shown(path, root), execute, (path, root, flags, save), root, timeout)

    yield from side_by_side((lambda p=p: task(p) for p in notebooks), jobs)


def execute(path: Path, root: Path, flags: str, save: Path | None) -> None:
    """Run a notebook's cells in this process; stop at the first that fails and name it."""
    import plotly.io
    from execnb.shell import CaptureShell
    from nbdev.config import get_config
    from nbdev.test import nb_test_cells

    plotly.io.renderers.default = RENDERER  # a fork has read another environment
    os.environ["IN_TEST"] = "1"
    sys.path.insert(0, str(root))
    if absent := lacking(path):
        print(f"skipped: {absent} is not installed")
        return
    config = get_config(root)
    cells = nb_test_cells(path, skip_flags=config.tst_flags.split(), force_flags=flags.split())
    shell = CaptureShell(path, profile=False)
    for cell in cells:
        shell.cell(cell, timeout=config.cell_timeout)
        if shell.exc:
            raise SystemExit(_failure(path, root, cell, shell.exc))
    if save:
        _save(path, cells, save)


def lacking(path: Path) -> str:
    """The packages that a notebook needs (a cell says `#| needs NAME …`) and that are not installed."""
    needed = [name for cell in load(path)["cells"] for name in directives(cell).get("needs", "").split()]
    return " ".join(name for name in needed if importlib.util.find_spec(name) is None)


def _failure(path: Path, root: Path, cell: dict, error: BaseException) -> str:
    """The notebook, the cell, its text, and the error without the runner's own frames."""
    import traceback

    lines = traceback.format_exception(error)
    first = next((i for i, line in enumerate(lines) if "ipython-input" in line or "<ipython" in line), 1)
    text = "\n".join(f"    {line}" for line in source(cell).splitlines())
    return f"{shown(path, root)}, cell #{cell['id']}:\n{text}\n{''.join(lines[:1] + lines[first:])}"


def _save(path: Path, cells: list[dict], folder: Path) -> None:
    """Write a notebook with the outputs of this run; a shown figure leaves an empty result behind, dropped here."""
    from fastcore.nbio import write_nb

    notebook = load(path)
    outputs = {cell["id"]: [o for o in cell.get("outputs", []) if o.get("data") != {}] for cell in cells}
    for cell in notebook["cells"]:
        if cell["id"] in outputs:
            cell["outputs"] = outputs[cell["id"]]
    write_nb(notebook, folder / path.name)


# ---------------------------------------------------------------- documentation
def render(notebook: Path, folder: Path) -> Path:
    """HTML of an executed notebook, without hidden cells and directives; plotly.js is shared by all pages."""
    import nbformat
    from nbconvert import HTMLExporter

    nb = nbformat.read(notebook, as_version=4)
    nb.cells = [c for c in nb.cells if not {"hide", "default_exp"} & directives(c).keys()]
    for cell in nb.cells:
        cell.source = code(cell) if cell.cell_type == "code" else cell.source
        for output in cell.get("outputs", []):
            _figure(output)
    html, _ = HTMLExporter().from_notebook_node(nb)
    page = folder / f"{notebook.stem}.html"
    page.write_text(html, encoding="utf-8")
    return page


def _figure(output: dict) -> None:
    """Turn a plotly figure into HTML that loads plotly.min.js from the page's folder."""
    import plotly.io

    figure = output.get("data", {}).pop("application/vnd.plotly.v1+json", None)
    if figure:
        figure = {key: figure[key] for key in ("data", "layout")}
        output["data"]["text/html"] = plotly.io.to_html(figure, full_html=False, include_plotlyjs="directory",
                                                        validate=False)


def docs(folder: Path, root: Path = ROOT) -> list[Outcome]:
    """Run the notebooks and write their pages, pictures and plotly.min.js into `folder`."""
    from plotly.offline import get_plotlyjs

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    shutil.copytree(root / "nbs" / "images", folder / "images", dirs_exist_ok=True)
    with tempfile.TemporaryDirectory() as executed:
        outcomes = report(run_notebooks(paths(root), root, save=Path(executed)))
        for notebook in sorted(Path(executed).glob("*.ipynb")):
            render(notebook, folder)
    return outcomes


# ---------------------------------------------------------------- command line
def report(outcomes: Iterable[Outcome], failures_only: bool = False) -> list[Outcome]:
    """Print a line for each outcome as it comes, and what a failed one wrote."""
    seen = []
    for outcome in outcomes:
        if not (outcome.ok and failures_only):
            print(f"  {outcome.seconds:6.1f} s  {'ok    ' if outcome.ok else 'FAILED'}  {outcome.name}", flush=True)
        if not outcome.ok or outcome.text.startswith("skipped: "):
            print("\n".join(f"    {line}" for line in outcome.text.splitlines()), flush=True)
        seen.append(outcome)
    return seen


def fail(problems: list[str], advice: str) -> None:
    """End with the problems and what to do, if there are any."""
    if problems:
        raise SystemExit("\n".join([*problems, advice]))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["clean", "export", "imports", "run", "docs"])
    parser.add_argument("notebooks", nargs="*", type=Path, help="for run: these only")
    parser.add_argument("--flags", default="", help="for run: kinds of cells to run as well, such as gpu")
    parser.add_argument("--jobs", default=JOBS, type=int, help="processes at once")
    return parser.parse_args()


def main() -> None:
    """Run one action; the exit status tells whether all is well."""
    given, start = options(), time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
    count = len(paths())
    if given.action == "clean":
        fail([line for path in paths() for line in unclean(path)], "notebooks are not clean: run `make tidy`")
    elif given.action == "export":
        fail(differences(), "package and notebooks disagree: edit the notebook, then run `make tidy`")
    else:
        chosen = [path.resolve() for path in given.notebooks] or paths()
        outcomes = {"imports": lambda: report(import_modules(), failures_only=True),
                    "run": lambda: report(run_notebooks(chosen, flags=given.flags, jobs=given.jobs)),
                    "docs": lambda: docs(ROOT / "_docs")}[given.action]()
        count = len(outcomes)
        fail([o.name for o in outcomes if not o.ok], f"failed: {sum(not o.ok for o in outcomes)} of {count}")
    print(f"{given.action}: {count} ok, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
