"""settings.ini -> pyproject.toml and the version in f16lab/__init__.py. Usage: `python .ci/pyproject.py`."""
import configparser
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Generated from settings.ini by .ci/pyproject.py: edit settings.ini, then run `python .ci/pyproject.py`.\n"


def toml_list(items: list[str], indent: str = "    ") -> str:
    """A TOML array of strings, one a line."""
    return "[\n" + "".join(f"{indent}{json.dumps(item)},\n" for item in items) + "]"


def classifiers(settings: configparser.SectionProxy) -> list[str]:
    """Trove classifiers; the licence is told by its own key."""
    versions = [f"Programming Language :: Python :: {v}" for v in settings["python_versions"].split()]
    return [f"Development Status :: {settings['status']}", "Intended Audience :: Science/Research",
            "Programming Language :: Python :: 3 :: Only", *versions,
            "Topic :: Scientific/Engineering :: Artificial Intelligence"]


def extras(settings: configparser.SectionProxy) -> str:
    """One line of [project.optional-dependencies] for every key `X_requirements`."""
    suffix = "_requirements"
    keys = sorted(key for key in settings if key.endswith(suffix))
    return "\n".join(f"{key.removesuffix(suffix)} = {toml_list(settings[key].split())}" for key in keys)


def scripts(settings: configparser.SectionProxy) -> str:
    """One line of [project.scripts] for every `name=module:function`."""
    pairs = (item.split("=", 1) for item in settings["console_scripts"].split())
    return "\n".join(f"{name} = {json.dumps(target)}" for name, target in pairs)


def pyproject(settings: configparser.SectionProxy) -> str:
    """The text of pyproject.toml."""
    lib = settings["lib_path"]
    return f'''{HEADER}
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = {json.dumps(settings["lib_name"])}
dynamic = ["version"]
description = {json.dumps(settings["description"])}
readme = "README.md"
requires-python = {json.dumps(settings["python_range"])}
license = {json.dumps(settings["license"])}
license-files = ["LICENSE"]
authors = [{{name = {json.dumps(settings["author"])}}}]
keywords = {toml_list(settings["keywords"].split())}
classifiers = {toml_list(classifiers(settings))}
dependencies = {toml_list(settings["requirements"].split())}

[project.optional-dependencies]
{extras(settings)}

[project.scripts]
{scripts(settings)}

[project.entry-points.nbdev]
{lib} = "{lib}._modidx:d"

# The CUDA sources live in kernels/ and are installed as the resource package {lib}.kernels.
[tool.setuptools]
packages = ["{lib}", "{lib}.kernels"]
package-dir = {{"{lib}.kernels" = "kernels"}}

[tool.setuptools.dynamic]
version = {{attr = "{lib}.__version__"}}

[tool.setuptools.package-data]
{lib} = ["py.typed", "static/*", "static/labconfig/*", "templates/*"]
"{lib}.kernels" = ["*.cu", "*.cuh", "*.md"]

[tool.nbdev]
nbs_path = "{settings["nbs_path"]}"
lib_path = "{lib}"
tst_flags = "{settings["tst_flags"]}"
clear_all = true
update_pyproject = false
exec_profile = false
cell_timeout = {settings["cell_timeout"]}

[tool.ruff]
line-length = 120
extend-exclude = ["*.ipynb", "_modidx.py"]

[tool.ruff.lint]
select = ["F"]

[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "-ra"
faulthandler_timeout = 300
markers = [
    "browser: needs Chromium and playwright",
    "gpu: needs one CUDA device",
    "gpu2: needs two CUDA devices",
    "slow: left out unless asked for with -m slow",
]
'''


def with_version(init: str, version: str) -> str:
    """The text of __init__.py with its version line set."""
    line = f'__version__ = "{version}"'
    pattern = re.compile(r'^__version__\s*=.*$', re.MULTILINE)
    return pattern.sub(line, init) if pattern.search(init) else line + "\n" + init


def read_settings(root: Path = ROOT) -> configparser.SectionProxy:
    """The [DEFAULT] section of settings.ini."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string((root / "settings.ini").read_text(encoding="utf-8"))
    return parser["DEFAULT"]


def write(path: Path, text: str) -> None:
    """Write a file if that changes it, so that `make` sees no change where there is none."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write both files."""
    settings = read_settings()
    init = ROOT / settings["lib_path"] / "__init__.py"
    write(ROOT / "pyproject.toml", pyproject(settings))
    write(init, with_version(init.read_text(encoding="utf-8"), settings["version"]))


if __name__ == "__main__":
    main()
