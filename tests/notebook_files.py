"""Notebooks made by tests."""
import json
from collections.abc import Iterable
from pathlib import Path

KERNEL = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}


def write_notebook(path: Path, codes: Iterable[str], title: str = "") -> Path:
    """A notebook with these code cells, below a title if there is one."""
    def cell(i: int, code: str) -> dict:
        lines = code.splitlines(True)
        return dict(cell_type="code", id=f"c{i}", metadata={}, execution_count=None, outputs=[], source=lines)
    head = [dict(cell_type="markdown", id="title", metadata={}, source=[f"# {title}"])] if title else []
    cells = [*head, *(cell(i, code) for i, code in enumerate(codes))]
    path.write_text(json.dumps(dict(cells=cells, metadata=KERNEL, nbformat=4, nbformat_minor=5)), encoding="utf-8")
    return path
