"""The repository as data: notebooks, modules, and what the structure tests ask of them."""
import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import notebooks as nb

ROOT = nb.ROOT
LIB = nb.LIB
NUMBERED = re.compile(r"^(\d+)([a-z]?)_(\w+)$")
NOT_EXPORTED = {"__init__", "__main__", "_modidx"}


@dataclass(frozen=True)
class Module:
    """A module of the package with its notebook: 07a_fused gives name fused, number 7, order (7, 'a')."""
    name: str
    number: int
    order: tuple[int, str]
    notebook: Path
    path: Path

    @property
    def tree(self) -> ast.Module:
        return parse(self.path)


@cache
def parse(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def modules() -> tuple[Module, ...]:
    """The exported modules in the order of their notebooks."""
    found = []
    for notebook in nb.paths():
        name, numbered = nb.module_name(nb.load(notebook)), NUMBERED.match(notebook.stem)
        path = ROOT / LIB / f"{name}.py"
        if name and numbered and path.exists():
            found.append(Module(name, int(numbered[1]), (int(numbered[1]), numbered[2]), notebook, path))
    return tuple(sorted(found, key=lambda module: module.order))


def family(*names: str) -> list[Module]:
    """The modules with these names, and those split off from them (same number, another letter)."""
    numbers = {module.number for module in modules() if module.name in names}
    return [module for module in modules() if module.number in numbers]


def engine() -> list[Module]:
    """The modules up to and with `train`, which must work without plots, widgets and GPU libraries."""
    last = next((module.number for module in modules() if module.name == "train"), 14)
    return [module for module in modules() if module.number <= last]


def where(module: Module, node: ast.AST) -> str:
    """The place of a piece of a module: notebook and cell, then the line of the module."""
    lines = module.path.read_text(encoding="utf-8").splitlines()[:node.lineno]
    cells = nb.CELL_MARK.findall("\n".join(lines))
    return f"{nb.shown(module.notebook)}, cell #{cells[-1] if cells else '?'} ({LIB}/{module.path.name}:{node.lineno})"


# ---------------------------------------------------------------- imports and calls
def imported(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Every dotted name a module imports, at any depth, also by import_module("…"), with its place.

    `from .ops import linear` gives `f16lab.ops.linear`; `from . import ops` gives `f16lab.ops`.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [LIB if node.level else "", node.module]))
            found += [(f"{base}.{alias.name}", node) for alias in node.names]
        elif isinstance(node, ast.Call) and called(node).split(".")[-1] in ("import_module", "__import__"):
            found += [(arg.value, node) for arg in node.args if isinstance(arg, ast.Constant)]
    return found


def dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes of a name; '' for anything else in front."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.Call) -> str:
    """What a call calls, dotted."""
    return dotted(node.func)


def uses(tree: ast.Module, package: str) -> list[ast.AST]:
    """Where a module imports `package` or names `torch.distributed`-like paths without importing them."""
    inside = (package, f"{package}.")
    found = [node for name, node in imported(tree) if name == package or name.startswith(inside[1])]
    spelled = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and dotted(node) == package]
    return found + (spelled if "." in package else [])


def operators() -> set[str]:
    """The public functions of the package that take a keyword `p`: the operators."""
    return {node.name for module in modules() for node in module.tree.body if isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_") and "p" in {arg.arg for arg in node.args.kwonlyargs}}


def local_names(tree: ast.Module) -> dict[str, str]:
    """What names imported from the package stand for: `from .ops import linear as f` gives f: f16lab.ops.linear."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias, (full, _) in zip(node.names, imported(ast.Module([node], []))):
                if full.startswith(f"{LIB}."):
                    names[alias.asname or alias.name] = full
    return names


# ---------------------------------------------------------------- shape
def exported_lines(cell: dict) -> int:
    """Non-blank lines of a cell, without directives."""
    return sum(bool(line.strip()) for line in nb.code(cell).splitlines())


def shown_soon(cells: list[dict]) -> list[bool]:
    """For each exported cell that is more than imports, whether one of the next three cells is a lesson that runs."""
    def lesson(cell: dict) -> bool:
        return cell["cell_type"] == "code" and cell not in exported and nb.directives(cell).get("eval") != "false"

    exported = [c for c in cells if {"export", "exports", "exporti"} & nb.directives(c).keys()]
    return [any(map(lesson, cells[i + 1:i + 4])) for i, cell in enumerate(cells)
            if cell in exported and not re.match(r"(from|import) ", nb.code(cell).lstrip())]


def shape() -> str:
    """The size of the exported cells, the share of them that is shown at work, and of prose, in one line."""
    loaded = [nb.load(path) for path in nb.paths()]
    loaded = [notebook for notebook in loaded if nb.exported(notebook)]
    sizes = sorted(exported_lines(cell) for notebook in loaded for cell in nb.exported(notebook))
    words = sum(len(nb.source(c).split()) for n in loaded for c in n["cells"] if c["cell_type"] == "markdown")
    lessons = [soon for notebook in loaded for soon in shown_soon(notebook["cells"])]
    if not lessons:
        return "no exported cells"
    p50, p90 = (sizes[min(len(sizes) - 1, int(len(sizes) * q))] for q in (0.5, 0.9))
    return (f"{len(loaded)} exporting notebooks, {len(sizes)} exported cells of {sum(sizes)} lines: "
            f"p50 {p50}, p90 {p90}, max {sizes[-1]}; {sum(lessons) / len(lessons):.0%} soon shown at work; "
            f"{words / sum(sizes):.1f} words of prose a line")
