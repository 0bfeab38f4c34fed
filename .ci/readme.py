"""README.md from nbs/index.ipynb: `python .ci/readme.py`. Hidden cells and `#|` lines are left out."""
import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent


def readme(root: Path = ROOT) -> str:
    """The text of README.md; links lead into nbs/."""
    nb = nbformat.read(root / "nbs" / "index.ipynb", as_version=4)
    nb.cells = [c for c in nb.cells if not c.source.startswith(("#| hide", "#| default_exp"))]
    for cell in nb.cells:
        cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|"))
    nb.metadata["language_info"] = {"name": "python"}
    text, _ = MarkdownExporter().from_notebook_node(nb)
    return re.sub(r"\]\((?=images/|\w+\.ipynb)", "](nbs/", text).strip() + "\n"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
