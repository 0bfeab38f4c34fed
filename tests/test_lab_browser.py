"""The browser harness itself: a notebook runs in JupyterLab, a widget answers a click, a reload keeps the kernel."""
import pytest
from notebook_files import write_notebook

pytestmark = pytest.mark.browser
LABEL = """import ipywidgets
label = ipywidgets.Label("untouched")
button = ipywidgets.Button(description="Touch")
button.on_click(lambda _: setattr(label, "value", f"touched by {button.description}"))
display(button, label)"""


def test_a_notebook_runs_and_a_widget_answers(jupyter_lab, tmp_path):
    path = write_notebook(tmp_path / "small.ipynb", ["print('answer', 6 * 7)", LABEL, "import os; print(os.getcwd())"])
    with jupyter_lab(path) as lab:
        lab.run_all()
        assert lab.output("answer 42").count() == 1
        assert lab.output(str(lab.folder)).count() == 1, "the kernel runs beside the copy"
        lab.button("Touch").click()
        lab.output("touched by Touch").first.wait_for()
        assert lab.errors == []
        before = lab.kernel()
        lab.reload()
        assert lab.kernel() == before != ""
        lab.theme("JupyterLab Dark")
        lab.page.evaluate("() => console.error('a mistake of the page')")
        assert len(lab.errors) == 1 and "a mistake of the page" in lab.errors[0]
    assert jupyter_lab.pages == [] and path.read_text().count("42") == 0


def test_an_error_in_a_cell_is_seen(jupyter_lab, tmp_path):
    path = write_notebook(tmp_path / "broken.ipynb", ["1 / 0"])
    with jupyter_lab(path) as lab:
        lab.run_all()
        lab.output("ZeroDivisionError").first.wait_for()
