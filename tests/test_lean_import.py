"""`import f16lab` is cheap, and the engine needs no GPU library, plots or widgets."""
import json
import os
import subprocess
import sys

import pytest
import repo

HEAVY = ("cupy", "plotly", "ipywidgets", "anywidget", "jupyterlab", "jupyter_client", "IPython", "nbdev", "fastcore",
         "torch._dynamo", "torch._inductor", "sklearn", "tokenizers", "numba")
ENGINE = [module.name for module in repo.engine()]


def python(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo.ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(statement: str, **environment: str) -> set[str]:
    """The heavy packages a fresh process holds after `statement`."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    names = json.loads(python(code, **environment).splitlines()[-1])
    return {heavy for heavy in HEAVY if any(name == heavy or name.startswith(f"{heavy}.") for name in names)}


def test_the_probe_sees_a_heavy_import():
    assert loaded("import plotly") == {"plotly"}


def test_importing_the_package_loads_nothing_heavy():
    assert loaded("import f16lab") == set()


def test_importing_the_engine_loads_no_plots_and_no_widgets():
    assert loaded("\n".join(f"import f16lab.{name}" for name in ENGINE)) == set()


@pytest.mark.parametrize("error", ["ImportError('no CUDA library')", "RuntimeError('driver too old')"])
def test_a_broken_cupy_does_not_hurt(error, tmp_path):
    (tmp_path / "cupy.py").write_text(f"raise {error}\n")
    (tmp_path / "cupyx.py").write_text(f"raise {error}\n")
    lines = [f"import f16lab.{name}" for name in ENGINE]
    if "device" in ENGINE:
        lines.append("from f16lab.device import open_device; open_device('cpu')")
    assert loaded("\n".join(lines), PYTHONPATH=str(tmp_path)) <= {"cupy"}
    with pytest.raises(AssertionError, match=error.split("(")[0]):
        python("import cupy", PYTHONPATH=str(tmp_path))
