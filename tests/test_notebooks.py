"""Notebooks are committed clean, survive a round trip through text, and agree with the package.

That they run is a step of its own (`python .ci/notebooks.py run`); here the runner itself is tested.
"""
import json
import re
import shutil
import subprocess
import time

import notebooks as nb
import pytest
import readme
import repo

each_notebook = pytest.mark.parametrize("path", nb.paths(), ids=lambda path: path.stem)
MAX_BYTES = 200_000
KERNEL = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}


def complain(advice: str, problems: list[str]) -> None:
    """Fail with every problem on a line of its own, if there is one."""
    if problems:
        pytest.fail("\n  ".join([advice, *problems]), pytrace=False)


# ---------------------------------------------------------------- committed notebooks
@each_notebook
def test_notebook_is_clean(path):
    complain("run `make tidy`", nb.unclean(path))
    notebook = nb.load(path)
    assert "widgets" not in notebook["metadata"]
    assert path.stat().st_size < MAX_BYTES
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None, f"cell #{cell['id']} has output"


@each_notebook
def test_notebook_opens_with_its_module_or_its_title(path):
    first = nb.load(path)["cells"][0]
    titled = first["cell_type"] == "markdown" and nb.source(first).startswith("# ")
    assert titled or "default_exp" in nb.directives(first)


@each_notebook
def test_cell_ids_are_there_and_differ(path):
    cells = nb.load(path)["cells"]
    ids = [cell.get("id", "") for cell in cells]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in ids)
    assert len(set(ids)) == len(ids)


@each_notebook
def test_an_unchanged_cell_keeps_its_committed_id(path):
    done = subprocess.run(["git", "show", f"HEAD:{nb.shown(path)}"], cwd=nb.ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not committed yet")
    before, now = ids_by_text(json.loads(done.stdout)), ids_by_text(nb.load(path))
    changed = [f"{now[text]} was {before[text]}: {text[:60]!r}" for text in before.keys() & now.keys()
               if before[text] != now[text]]
    complain("write notebooks with `make nb` (jupytext --update): new ids change every exported module", changed)


def ids_by_text(notebook: dict) -> dict[str, str]:
    """The id of each cell whose text is unique in the notebook."""
    texts = [nb.source(cell) for cell in notebook["cells"]]
    return {text: cell["id"] for text, cell in zip(texts, notebook["cells"]) if texts.count(text) == 1}


# ---------------------------------------------------------------- text and back
@pytest.fixture
def jupytext(tmp_path, monkeypatch):
    """jupytext's command, kept away from the user's folders."""
    for kind in ("DATA", "CONFIG"):
        monkeypatch.setenv(f"JUPYTER_{kind}_DIR", str(tmp_path / kind))
    from jupytext.cli import jupytext as command
    return lambda *arguments: command(["--quiet", *map(str, arguments)])


def through_text(path, folder, jupytext, edit=lambda text: text) -> dict:
    """A notebook after `make py` and `make nb`, with its text edited in between."""
    copy, text = folder / path.name, folder / f"{path.stem}.py"
    shutil.copy(path, copy)
    jupytext("--to", "py:percent", "--output", text, copy)
    text.write_text(edit(text.read_text(encoding="utf-8")), encoding="utf-8")
    jupytext("--to", "ipynb", "--update", "--output", copy, text)
    return nb.load(copy)


@each_notebook
def test_round_trip_through_text_changes_nothing(path, tmp_path, jupytext):
    before, after = nb.load(path), through_text(path, tmp_path, jupytext)
    changed = [f"{nb.shown(path)}, cell #{old['id']} becomes #{new['id']}: {nb.source(old)[:60]!r}"
               for old, new in zip(before["cells"], after["cells"])
               if (old["id"], nb.source(old)) != (new["id"], nb.source(new))]
    complain("cells that jupytext cannot carry (a line `# %%` inside a cell? a trailing newline?)", changed)
    assert len(before["cells"]) == len(after["cells"])
    assert before["metadata"] == after["metadata"]


def test_round_trip_keeps_ids_of_edited_cells(project, tmp_path, jupytext):
    path = project("def double(x):\n    return 2 * x", lesson="assert double(2) == 4")
    before = nb.load(path)
    after = through_text(path, tmp_path, jupytext, lambda text: text.replace("2 * x", "x + x") + "\n# %%\nnew = 1\n")
    assert [c["id"] for c in after["cells"]][:-1] == [c["id"] for c in before["cells"]]
    assert "x + x" in nb.source(after["cells"][2])


# ---------------------------------------------------------------- package and README
def test_package_is_what_the_notebooks_export():
    complain("edit the notebook, then run `make tidy`", nb.differences())


def test_readme_is_the_index_notebook():
    text = (nb.ROOT / "README.md").read_text(encoding="utf-8")
    assert text == readme.readme(), "run `make readme`"


def test_the_map_in_the_index_lists_every_module():
    index = "\n".join(map(nb.source, nb.load(nb.ROOT / "nbs" / "index.ipynb")["cells"]))
    mapped = re.findall(r"^\| \[?(\d+[a-z]?_\w+)\]?[^|]*\| `(\w+)` \|", index, re.MULTILINE)
    there = {(module.notebook.stem, module.name) for module in repo.modules()}
    complain("the table in nbs/index.ipynb", [f"lacks {stem}" for stem, _ in sorted(there - set(mapped))]
             + [f"lists {stem} -> {name}, which is not there" for stem, name in sorted(set(mapped) - there)])


def test_export_depends_neither_on_the_run_nor_on_the_order_of_notebooks(tmp_path):
    from nbdev.export import nb_export

    for name, order in (("a", nb.paths()), ("b", nb.paths()[::-1])):
        (tmp_path / name).mkdir()
        for path in order:
            nb_export(path, lib_path=tmp_path / name)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "ab")
    assert one == two
    assert one.keys() == {f"{module.name}.py" for module in repo.modules()}


# ---------------------------------------------------------------- the checks themselves, on a small project
def cell(text: str, kind: str = "code", name: str = "") -> dict:
    extra = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True), **extra}


@pytest.fixture
def project(tmp_path):
    """Makes a project with one notebook in a folder of its own; gives the notebook's path."""
    root = tmp_path / "project"

    def make(exported: str, lesson: str = "1 + 1", **more: str):
        for folder in ("nbs", "f16lab"):
            (root / folder).mkdir(parents=True)
        for name in ("settings.ini", "pyproject.toml", "f16lab/__init__.py", "f16lab/__main__.py"):
            shutil.copy(nb.ROOT / name, root / name)
        cells = [cell("#| default_exp mini", name="first"), cell("# Mini\n\n> A claim.", "markdown", "title"),
                 cell(f"#| export\n{exported}", name="made"), cell(lesson, name="lesson")]
        cells += [cell(text, name=name) for name, text in more.items()]
        path = root / "nbs" / "00_mini.ipynb"
        notebook = {"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}
        path.write_text(json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path
    return make


def run(path, **options) -> nb.Outcome:
    [outcome] = nb.run_notebooks([path], path.parent.parent, **options)
    return outcome


def test_dirt_is_named_by_notebook_and_cell(project):
    path = project("a = 1")
    root = path.parent.parent
    assert nb.unclean(path, root) == []
    notebook = nb.load(path)
    notebook["cells"][3]["execution_count"] = 7
    notebook["metadata"]["widgets"] = {}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    assert nb.unclean(path, root)[0] == "nbs/00_mini.ipynb, cell #lesson: execution_count"


def test_a_package_out_of_step_is_named_by_notebook_and_cell(project, tmp_path):
    path = project("def double(x):\n    return 2 * x")
    root = path.parent.parent
    assert nb.differences(root) == ["f16lab/_modidx.py: missing; a notebook exports it",
                                    "f16lab/mini.py: missing; a notebook exports it"]
    (tmp_path / "export").mkdir()
    exported = nb.export_into(tmp_path / "export", root)
    shutil.copytree(exported, root / "f16lab", dirs_exist_ok=True)
    assert nb.differences(root) == []
    module = root / "f16lab" / "mini.py"
    module.write_text(module.read_text().replace("2 * x", "3 * x"))
    (root / "f16lab" / "orphan.py").write_text("")
    orphan, changed = nb.differences(root)
    assert orphan == "f16lab/orphan.py: no notebook exports it"
    assert "nbs/00_mini.ipynb, cell #made" in changed and "3 * x" in changed and "2 * x" in changed


def test_runner_runs_away_from_the_notebook_and_honours_flags(project):
    lesson = "import os\nassert os.environ['IN_TEST'] == '1' and not os.listdir('.')"
    path = project("a = 1", lesson, gpu="#| gpu\nassert False, 'gpu cell ran'", off="#| eval: false\nassert False")
    outcome = run(path)
    assert outcome.ok, outcome.text
    assert not run(path, flags="gpu").ok


def test_runner_skips_a_notebook_whose_packages_are_not_installed_and_says_so(project, capsys):
    path = project("a = 1", "assert False, 'it ran'", first_lesson="#| needs json no_such_package\nimport no_such_package")
    outcome = run(path)
    assert outcome.ok and outcome.text.strip() == "skipped: no_such_package is not installed"
    nb.report([outcome])
    assert "skipped: no_such_package is not installed" in capsys.readouterr().out


def test_runner_names_the_cell_that_fails(project):
    outcome = run(project("a = 1", "b = a + 1\nassert b == 3, f'{b} is not 3'", later="print('never')"))
    assert not outcome.ok and outcome.name == "nbs/00_mini.ipynb"
    assert "nbs/00_mini.ipynb, cell #lesson:" in outcome.text and "AssertionError: 2 is not 3" in outcome.text
    assert "assert b == 3" in outcome.text and "never" not in outcome.text


def test_runner_stops_a_notebook_that_hangs_and_what_it_started(project, tmp_path):
    mark = tmp_path / "mark"
    start = f"subprocess.Popen([sys.executable, '-c', {late_write(mark)!r}])"
    outcome = run(project("a = 1", f"import subprocess, sys, time\n{start}\ntime.sleep(60)"), timeout=5)
    assert not outcome.ok and outcome.seconds < 30 and "stopped after 5 s" in outcome.text
    time.sleep(max(0, 9 - outcome.seconds))
    assert not mark.exists()


def late_write(mark) -> str:
    """Python text that leaves a mark if it lives for another 8 seconds."""
    return f"import time; time.sleep(8); open({str(mark)!r}, 'w').close()"


def test_executed_notebook_becomes_a_page_without_hidden_cells(project, tmp_path):
    figure = "import plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 2, 3]))"
    path = project("a = 1", figure, secret="#| hide\nhidden = 'do not show'")
    [outcome] = nb.run_notebooks([path], path.parent.parent, save=tmp_path)
    assert outcome.ok, outcome.text
    page = nb.render(tmp_path / path.name, tmp_path).read_text(encoding="utf-8")
    assert "Plotly.newPlot" in page and 'src="plotly.min.js"' in page and len(page) < 1_000_000
    assert "do not show" not in page and "#| export" not in page
