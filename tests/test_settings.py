"""settings.ini is the one configuration file: what is generated from it must be in step."""
import tomllib
from importlib.metadata import version

import pyproject as generator
import pytest
import repo

import f16lab

SETTINGS = generator.read_settings()
TEXT = (repo.ROOT / "pyproject.toml").read_text(encoding="utf-8")
ADVICE = "run `make settings`"


def test_pyproject_is_what_the_generator_writes():
    assert TEXT == generator.pyproject(SETTINGS), ADVICE


def test_version_is_the_same_everywhere():
    init = (repo.ROOT / "f16lab" / "__init__.py").read_text(encoding="utf-8")
    assert generator.with_version(init, SETTINGS["version"]) == init, ADVICE
    assert f16lab.__version__ == SETTINGS["version"] == version("f16lab"), ADVICE


def test_every_requirements_key_is_an_extra():
    extras = tomllib.loads(TEXT)["project"]["optional-dependencies"]
    wanted = {key.removesuffix("_requirements") for key in SETTINGS if key.endswith("_requirements")}
    assert extras.keys() == wanted
    assert {"lab", "export", "cuda12", "cuda13", "browser", "fast", "bpe", "dev"} <= wanted
    assert all(extras.values())


def test_a_new_key_becomes_an_extra_and_text_is_escaped():
    import configparser

    parser = configparser.ConfigParser(interpolation=None)
    parser.read_dict({"DEFAULT": {**SETTINGS, "moon_requirements": "green>=1 cheese[old]>=2",
                                  "description": 'a "quoted" \\ text'}})
    project = tomllib.loads(generator.pyproject(parser["DEFAULT"]))["project"]
    assert project["optional-dependencies"]["moon"] == ["green>=1", "cheese[old]>=2"]
    assert project["description"] == 'a "quoted" \\ text'


def test_the_notebook_tools_are_pinned_and_stay_out_of_the_core():
    project = tomllib.loads(TEXT)["project"]
    tools = ("nbdev", "execnb", "fastcore", "ghapi", "fastgit", "jupytext")
    pinned = {item.split("==")[0] for item in project["optional-dependencies"]["dev"] if "==" in item}
    assert set(tools) <= pinned
    core = " ".join(project["dependencies"])
    for absent in (*tools, "cupy", "jupyter", "ipywidgets", "anywidget", "tokenizers", "scikit-learn"):
        assert absent not in core


def test_export_has_the_notebook_tools_of_the_tests():
    extras = tomllib.loads(TEXT)["project"]["optional-dependencies"]
    assert set(extras["export"]) <= set(extras["dev"]), "one exporter for the package and for experiments"


@pytest.mark.parametrize("text, expected", [
    ("", '__version__ = "9.9.9"\n'),
    ('"""Doc."""\n\n__version__ = "0.1.0"\n', '"""Doc."""\n\n__version__ = "9.9.9"\n'),
])
def test_version_line_is_set_or_replaced(text, expected):
    assert generator.with_version(text, "9.9.9") == expected
