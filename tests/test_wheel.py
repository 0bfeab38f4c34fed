"""The wheel holds the package, its kernels and nothing else, and runs without the source tree."""
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import repo

SOURCES = ("settings.ini", "pyproject.toml", "README.md", "LICENSE", "f16lab", "kernels")
COMMAND_LINE = (repo.ROOT / "f16lab" / "cli.py").exists()


def run(*command: str, folder: Path, **environment: str) -> str:
    """A command's output; it must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        source = repo.ROOT / name
        shutil.copytree(source, folder / name, ignore=ignore) if source.is_dir() else shutil.copy(source, folder / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", folder=folder)
    [built] = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel installed and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
        "--target", str(target), str(wheel), folder=target)
    return target


def tracked(folder: str, *suffixes: str) -> set[str]:
    """The files of a source folder that users need."""
    found = (p for p in (repo.ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(repo.ROOT / folder).as_posix() for p in found if p.suffix in suffixes or p.name in suffixes}


def test_wheel_holds_package_kernels_and_licence_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {f"f16lab/{name}" for name in tracked("f16lab", ".py", "py.typed", ".html", ".js", ".css", ".ipynb", ".json")}
    kernels = {f"f16lab/kernels/{name}" for name in tracked("kernels", ".py", ".cu", ".cuh", ".md")}
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == package | kernels
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_wheel_tells_its_needs_and_commands(wheel):
    archive = zipfile.ZipFile(wheel)
    text = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "f16lab = f16lab.cli:main" in text["entry_points.txt"]
    assert "Requires-Python: <3.14,>=3.11" in text["METADATA"]
    core = [line for line in text["METADATA"].splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert sorted(line.split()[1].split(">")[0] for line in core) == [
        "click", "numpy", "plotly", "rich", "safetensors", "tomli-w", "torch"]


def test_installed_package_imports_without_the_source_tree(installed, tmp_path):
    modules = ", ".join(["f16lab", "f16lab.kernels", *(f"f16lab.{module.name}" for module in repo.engine())])
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); import {modules}"
    code += "\nfrom importlib.resources import files"
    code += "\nprint({sys.modules[m].__file__ for m in sys.modules if m.startswith('f16lab.')})"
    code += "\nprint((files('f16lab.kernels') / 'README.md').read_text().splitlines()[0])"
    output = run(sys.executable, "-I", "-c", code, folder=tmp_path)
    assert str(repo.ROOT) not in output and str(installed) in output
    assert output.splitlines()[-1] == "# CUDA kernels"


@pytest.mark.skipif(not COMMAND_LINE, reason="f16lab/cli.py is not there yet")
def test_installed_command_line_answers_in_an_empty_folder(installed, tmp_path):
    output = run(sys.executable, "-m", "f16lab", "--help", folder=tmp_path, PYTHONPATH=str(installed))
    assert "train" in output and "doctor" in output
    assert not list(tmp_path.iterdir())
