"""`f16lab export`: what is missing elsewhere is said here, and what is made runs where only it is."""
import ast
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import repo
from click.testing import CliRunner
from notebook_files import write_notebook
from test_wheel import installed, run, wheel  # noqa: F401  fixtures

from f16lab import __version__, packaging
from f16lab.cli import command
from f16lab.config import TrainConfig, from_dict, to_toml
from f16lab.inputs import open_source
from f16lab.own_model import OwnModel
from f16lab.packaged import packaged_command
from f16lab.packaging import export_experiment
from f16lab.runlog import RunReader
from f16lab.train import Trainer

NET = """#| export
WIDTH = 8

def hidden(): return nn.Linear(64, WIDTH)

def model(): return nn.Sequential(nn.Flatten(), hidden(), nn.ReLU(), nn.Linear(WIDTH, 10))"""
DATA = """#| export
def source(config):
    found = open_source(config.data)
    print("the notebook's own data")
    return found"""
IMPORTS = "#| export\nfrom torch import nn\nfrom f16lab.inputs import open_source"
CODES = ["print('a trial, which stays behind')", IMPORTS, NET, "model()", DATA]
OWN = TrainConfig().with_(model="own", data="digits", batch=16, steps=20, eval_every=0, meters_every=0, device="cpu",
                          profile="f16")
TINY = TrainConfig().with_(data="markov", layers=1, heads=2, channels=16, context=16, batch=4, device="cpu",
                           eval_every=0)


def experiment(folder: Path, codes=CODES, config: TrainConfig | None = OWN, title: str = "") -> Path:
    """A notebook with its recipe beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        (folder / "recipe.toml").write_text(to_toml(config))
    return write_notebook(folder / "digits_net.ipynb", codes, title)


def losses(folder: Path) -> list[float]:
    """The losses of a run, from its log."""
    with RunReader(folder / "run.sqlite") as log:
        return log.steps()["loss"]


def refusal(folder: Path, name: str = "digits_net", **given) -> str:
    """Why an export is refused; nothing is there afterwards that was not there before."""
    before = {p: p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}
    with pytest.raises((ValueError, ImportError)) as error:
        export_experiment(name, given.pop("notebook", folder / "digits_net.ipynb"), out=folder, **given)
    assert {p: p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")} == before
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------- a package alone in the world
one_process = pytest.mark.xdist_group("alone")  # the environment is made once


@pytest.fixture(scope="module")
def alone(installed, tmp_path_factory) -> Path:  # noqa: F811
    """The Python of an environment that has the libraries, f16lab's own wheel, and the wheel of an experiment."""
    folder = tmp_path_factory.mktemp("alone")
    made = export_experiment("digits_net", experiment(folder / "work"), out=folder, wheel=True)
    venv.create(folder / "env", symlinks=True)
    [site] = (folder / "env").glob("lib/python*/site-packages")
    libraries = Path(pytest.__file__).parent.parent
    (site / "paths.pth").write_text(f"{installed}\n{libraries}\n")  # entries alone: no editable install is followed
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
        "--target", str(site), str(made.wheel), folder=folder)
    shutil.rmtree(made.folder)
    shutil.rmtree(folder / "work")
    return folder / "env" / "bin" / "python"


@one_process
def test_a_wheel_trains_where_there_is_no_notebook(alone, installed, tmp_path):  # noqa: F811
    code = "import f16lab, digits_net; print(f16lab.__file__, digits_net.__file__)"
    [package] = alone.parent.parent.glob("lib/python*/site-packages/digits_net/__init__.py")
    places = run(str(alone), "-c", code, folder=tmp_path).split()
    assert places == [str(installed / "f16lab" / "__init__.py"), str(package)]
    text = run(str(alone), "-m", "digits_net", "--steps", "2", "--out", "run", folder=tmp_path)
    assert "finished after 2 steps" in text and "the notebook's own data" in text and "trial" not in text
    space = {}
    exec("\n".join(CODES[1:4]), space)
    trainer = Trainer(OWN.with_(steps=2), OwnModel(space["model"]).source(open_source(OWN.data)))
    assert losses(tmp_path / "run") == [trainer.step().loss for _ in range(2)], "the same run as in the notebook"


@one_process
def test_its_ranks_are_the_package_too(alone, tmp_path):
    words = "-m digits_net --steps 2 --accumulate 2 --nproc 2 --out run".split()
    text = run(str(alone), *words, folder=tmp_path)
    assert "finished after 2 steps" in text and "ranks" in text and len(losses(tmp_path / "run")) == 2


@one_process
def test_its_errors_are_one_sentence_in_its_own_name(alone, tmp_path):
    done = subprocess.run([alone, "-m", "digits_net", "--steps", "0"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("python -m digits_net: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the command of a package
@pytest.fixture
def made(tmp_path, monkeypatch):
    """An exported package on the path; call it with a command line."""
    done = export_experiment("net_in_path", experiment(tmp_path / "work"), out=tmp_path)
    monkeypatch.syspath_prepend(done.folder)
    monkeypatch.chdir(tmp_path)
    yield lambda line: CliRunner().invoke(packaged_command("net_in_path", "experiment"), line.split())
    for name in [name for name in sys.modules if name.startswith("net_in_path")]:
        del sys.modules[name]


def test_options_stand_on_top_of_the_recipe(made):
    assert from_dict(tomllib.loads(made("--print-config").stdout)) == OWN
    changed = from_dict(tomllib.loads(made("--print-config --lr 0.25 --bf16").stdout))
    assert changed == OWN.with_(lr=0.25, profile="bf16")


def test_it_goes_on_from_its_checkpoint_with_the_same_bits(made, tmp_path):
    assert made("--steps 4 --out whole").exit_code == 0
    more = "--save-every 1 --out parts --resume auto"
    assert "finished after 2 steps" in made(f"--steps 2 {more}").output
    text = made(f"--steps 4 {more}").output
    assert "resumed" in text and losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert "the same command with --resume auto --out parts" in made(f"--steps 4 {more}").output


def test_it_takes_every_option_of_train():
    def options(command): return {name for option in command.params for name in option.opts}
    from f16lab.cli import train_command
    assert options(packaged_command("net_in_path", "experiment")) == options(train_command())


def test_another_model_can_be_chosen(made):
    text = made("--model mlp --steps 1 --out run").output
    assert "finished after 1 steps" in text and "mlp" in text


# ---------------------------------------------------------------- what is in the folder
def test_files_of_a_package(tmp_path):
    title = 'A "net" of \\ mine: """quoted"""'
    path = experiment(tmp_path, [*CODES, "#| export\nimport anywidget, rich"], title=title)
    done = export_experiment("digits_net", path, out=tmp_path)
    files = {p.relative_to(done.folder).as_posix() for p in done.folder.rglob("*") if p.is_file()}
    assert files == {"pyproject.toml", "README.md", "digits_net.ipynb",
                     *(f"digits_net/{name}" for name in ("__init__.py", "__main__.py", "experiment.py", "recipe.toml"))}
    for path in done.folder.glob("digits_net/*.py"):
        ast.parse(path.read_text())
    project = tomllib.loads((done.folder / "pyproject.toml").read_text())["project"]
    assert project["dependencies"][0] == f"f16lab=={__version__}" and project["name"] == "digits_net"
    assert [line.partition(">=")[0] for line in project["dependencies"][1:]] == ["anywidget", "scikit-learn"], \
        "what the cells import and what the recipe asks for, but not what f16lab needs itself"
    assert from_dict(tomllib.loads((done.folder / "digits_net" / "recipe.toml").read_text())) == OWN
    module = (done.folder / "digits_net" / "experiment.py").read_text()
    assert "trial" not in module and "../digits_net.ipynb" in module and str(tmp_path) not in module
    assert oct(done.folder.stat().st_mode) == oct((tmp_path / "recipe.toml").parent.stat().st_mode | 0o755)


def test_the_package_does_not_depend_on_the_folder_in_which_it_is_made(tmp_path, monkeypatch):
    texts = []
    for place in (repo.ROOT, tmp_path):  # a checkout of an nbdev project, and a folder without any
        monkeypatch.chdir(place)
        out = tmp_path / f"from-{len(texts)}"
        done = export_experiment("digits_net", experiment(out / "work"), out=out)
        texts.append({p.relative_to(done.folder): p.read_bytes() for p in done.folder.rglob("*") if p.is_file()})
    assert texts[0] == texts[1]


def test_a_name_of_its_own_for_the_module_and_data_without_a_model(tmp_path, monkeypatch):
    data = DATA.replace("#| export", "#|export\n")
    codes = ["#| default_exp tokens", "#| export\nfrom f16lab.inputs import open_source", data]
    done = export_experiment("tokens_net", experiment(tmp_path, codes, TINY), out=tmp_path)
    assert done.experiment.module == "tokens" and done.experiment.hooks == ("source",)
    monkeypatch.syspath_prepend(done.folder)
    words = ["--steps", "1", "--out", str(tmp_path / "run")]
    text = CliRunner().invoke(packaged_command("tokens_net", "tokens"), words).output
    assert "the notebook's own data" in text and "finished after 1 steps" in text


def test_the_verb_takes_what_lies_here_and_says_how_to_go_on(tmp_path, monkeypatch):
    experiment(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command(), ["export", "digits_net"])
    assert done.exit_code == 0 and "pip install ./digits_net" in done.stdout and "python -m digits_net" in done.stdout
    again = CliRunner().invoke(command(), ["export", "digits_net"])
    assert again.exit_code == 2 and again.stderr.startswith("f16lab: digits_net exists already")


# ---------------------------------------------------------------- refusals: one sentence, nothing written
@pytest.mark.parametrize("name, words", [
    ("2nd", "no name"), ("a-b", "no name"), ("a.b", "no name"), ("", "no name"), ("lambda", "no name"),
    ("a_", "no name"), ("ünder", "no name"), ("json", "standard library"), ("Random", "standard library"),
    ("numpy", "Python finds"), ("F16LAB", "this library"), ("taken", "exists already")])
def test_names_that_cannot_be(tmp_path, name, words):
    experiment(tmp_path)
    (tmp_path / "taken").mkdir()
    assert words in refusal(tmp_path, name)


@pytest.mark.parametrize("codes, config, words", [
    (["x = 1"], OWN, "no cell to export"),
    ([], OWN, "no cell to export"),
    (["#| export other\nx = 1"], OWN, "names a module of its own"),
    (["#| default_exp a.b", *CODES], OWN, "`#| default_exp a.b`"),
    ([*CODES, "#| export\ndef broken(:"], OWN, "cell 6 (def broken(:), line 1"),
    ([*CODES, "#| export\nx = 1\n%time x"], OWN, "line 2: invalid syntax: %time x; commands with %"),
    ([*CODES, "#| export\n!ls"], OWN, "not Python's"),
    (CODES[:1] + CODES[2:], OWN, "`nn` is not defined in any exported cell"),
    ([*CODES, "#| export\nimport no_such_library"], OWN, "'no_such_library', which no installed package provides"),
    (CODES, None, "no recipe: there is no recipe.toml beside"),
    (CODES, TINY, "trains 'tiny'"),
    (CODES[1:2], OWN, "no exported cell"),
    ([CODES[1], "#| export\ndef model(width): return nn.Linear(64, width)"], OWN,
     "`model(width)` must work when it is called without"),
    ([CODES[1], NET, "#| export\ndef source(): pass"], OWN, "`source()` must work when it is called with the recipe"),
    ([*CODES, "#| export\nreturn 5"], OWN, "'return' outside function"),
    ([*CODES, "#| export\nx = 1\nawait x"], OWN, "'await' outside function"),
    ([*CODES, "#| export\nbreak"], OWN, "'break' outside loop"),
    ([*CODES, "#| export\nfrom __future__ import annotations"], OWN, "must stand in the first exported cell"),
    ([*CODES, "#| export\nfrom .beside import x"], OWN, "nothing lies beside it"),
    ([*CODES, "#| export\nfrom . import x"], OWN, "nothing lies beside it"),
    (["#| default_exp one", "#| default_exp two", *CODES], OWN, "says one and two"),
])
def test_notebooks_that_would_not_run_elsewhere(tmp_path, codes, config, words):
    experiment(tmp_path, codes, config)
    assert words in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{\"worksheets\": []}", "not JSON", "\x00", '{"cells": [5]}',
                                  '{"cells": [{"cell_type": "code"}]}', '{"cells": [{"source": "x"}]}',
                                  '{"cells": [{"cell_type": "code", "source": [1]}]}'])
def test_files_that_are_no_notebooks(tmp_path, text):
    path = experiment(tmp_path)
    path.write_text(text)
    assert "not a notebook" in refusal(tmp_path)


def test_files_that_are_not_there(tmp_path):
    experiment(tmp_path)
    assert "no such notebook" in refusal(tmp_path, notebook=tmp_path / "else.ipynb")
    assert "no such recipe" in refusal(tmp_path, recipe=tmp_path / "else.toml")
    (tmp_path / "recipe.toml").write_text("[run]\nsteps = 0\n")
    assert "recipe.toml: [run] steps=0" in refusal(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        export_experiment("digits_net", tmp_path / "digits_net.ipynb", out=tmp_path / "nowhere")


@pytest.mark.parametrize("tool, wheel_too", [("nbdev", False), ("build", True)])
def test_a_missing_tool_is_named(tmp_path, monkeypatch, tool, wheel_too):
    experiment(tmp_path)
    there = packaging.importlib.util.find_spec
    monkeypatch.setattr(packaging.importlib.util, "find_spec", lambda name: None if name == tool else there(name))
    assert refusal(tmp_path, wheel=wheel_too) == f"`f16lab export` needs {tool}: pip install 'f16lab[export]'"


def test_a_wheel_that_cannot_be_built_leaves_nothing(tmp_path, monkeypatch):
    experiment(tmp_path)
    monkeypatch.setattr(packaging, "project_text", lambda *given: "[project]\nname = 3\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(packaging.RunFailed, match="the wheel cannot be built: "):
        export_experiment("digits_net", tmp_path / "digits_net.ipynb", out=tmp_path, wheel=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_installed_export_may_be_made_again(tmp_path, monkeypatch):
    """The name is not taken by the package's own earlier version; another package's name is."""
    for name, file in (("mine_again", "recipe.toml"), ("not_mine", "other.toml")):
        info = tmp_path / "site" / f"{name}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "RECORD").write_text(f"{name}/{file},,\n{name}/__init__.py,,\n")
        (tmp_path / "site" / name).mkdir()
        (tmp_path / "site" / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert packaging.taken("mine_again") == "" and packaging.taken("not_mine") == "a module that Python finds here"


# ---------------------------------------------------------------- names
def check(*codes: str) -> None:
    cells = [packaging.Cell(i, code) for i, code in enumerate(codes, 1)]
    packaging.check_names(cells, [packaging.parsed(cell, Path("x")) for cell in cells], Path("x"))


@pytest.mark.parametrize("codes", [
    ("def f(): return g()", "def g(): return len([y for y in range(3)])"),            # order of cells does not matter
    ("import a.b as c\nfrom d import e\nc(e)",),
    ("class A:\n    x = 1\n    y = x + 1\n    def f(self) -> 'A': return __class__",),
    ("def f(x, *y, k=1, **z):\n    def inner(): return x, y, z, k\n    return inner",),
    ("for i in range(3): total = i\nwith open(__file__) as file: text = file", "(n := 3)\ni + total + n"),
    ("try: pass\nexcept ValueError as e: e",),
    ("count = 0\ndef add():\n    global count\n    count += 1",),
    ("def make():\n    global later\n    later = 1", "def use(): return later"),
    ("from math import *", "sqrt(2)"),                                                # anything may come from there
    ("squares = [x * x for x in range(3)]\nf'{squares!r:>{len(squares)}}'\nlambda q: q",),
])
def test_names_that_are_there(codes):
    check(*codes)


@pytest.mark.parametrize("code", [
    "def f(): return missing", "missing()", "class A(missing): pass", "@missing\ndef f(): pass", "def f(x=missing): 1",
    "def f(x: missing): pass", "class A:\n    def f(self): return missing", "[missing for x in range(3)]",
    "f'{missing}'", "lambda: missing", "class A:\n    missing = 1\n    def f(self): return missing",
    "def f():\n    def missing(): pass\ndef g(): return missing"])
def test_names_that_are_missing(code):
    with pytest.raises(ValueError, match="cell 1 .*`missing` is not defined in any exported cell"):
        check(code)


def test_what_only_a_notebook_has_is_missing():
    with pytest.raises(ValueError, match="`display`"):
        check("def f(x): display(x)")
