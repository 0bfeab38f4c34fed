"""Rules of the house that a linter does not know. Every message names notebook and cell."""
import ast

import notebooks as nb
import pytest
import repo

MODULES = repo.modules()
ids = {"ids": lambda value: getattr(value, "name", None)}
each_module = pytest.mark.parametrize("module", MODULES, **ids)
each_notebook = pytest.mark.parametrize("path", nb.paths(), ids=lambda path: path.stem)

MAX_CELLS, MAX_LINES, MAX_CELL_LINES, WIDTH = 90, 400, 40, 120
WIDGETS = ("charts", "panels", "editor", "forms", "workbench")
ONLY_IN = {"torch.distributed": "parallel", "cupy": "device", "plotly": "plots", "ipywidgets": WIDGETS,
           "anywidget": WIDGETS}  # the family of one module, or these modules alone
EXPLICIT_PRECISION = ("nn", "optim", "train")
NO_CONVERSION = (*EXPLICIT_PRECISION, "cli")
NAMED = {"half", "float", "bfloat16", "double", "type"}  # tensor methods that convert


def nodes(module: repo.Module, *kinds: type) -> list[ast.AST]:
    return [node for node in ast.walk(module.tree) if isinstance(node, kinds)]


def complain(rule: str, problems: list[str]) -> None:
    """Fail with every problem on a line of its own, if there is one."""
    if problems:
        pytest.fail("\n  ".join([rule, *problems]), pytrace=False)


def none_of(module: repo.Module, found: list[ast.AST], rule: str) -> None:
    complain(rule, [f"{repo.where(module, node)}: {ast.unparse(node).splitlines()[0][:90]}" for node in found])


# ---------------------------------------------------------------- names and order
@each_notebook
def test_module_name_is_notebook_name(path):
    name, numbered = nb.module_name(nb.load(path)), repo.NUMBERED.match(path.stem)
    if name:
        assert numbered, f"{nb.shown(path)} exports {name} but has no number"
        assert name == numbered[3], f"{nb.shown(path)} exports to {name}"
        assert (repo.ROOT / repo.LIB / f"{name}.py").exists(), f"{nb.shown(path)} is not exported: run `make tidy`"


def test_every_module_has_a_notebook():
    stems = {path.stem for path in (repo.ROOT / repo.LIB).glob("*.py")} - repo.NOT_EXPORTED
    assert stems == {module.name for module in MODULES}


def test_no_two_notebooks_share_a_number():
    orders = [module.order for module in MODULES]
    assert len(set(orders)) == len(orders), orders


@each_module
def test_a_module_imports_only_modules_above_it(module):
    above = {other.name for other in MODULES if other.order < module.order} | {"kernels", "__version__"}
    below = [(name.split(".")[1], node) for name, node in repo.imported(module.tree)
             if name.startswith(f"{repo.LIB}.") and name.split(".")[1] not in above]
    complain("import only what an earlier notebook exports",
             [f"{repo.where(module, node)}: {module.name} imports {name}" for name, node in below])


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_used_in_one_module_only(package):
    owner = ONLY_IN[package]
    allowed = {module.name for module in repo.family(owner)} if isinstance(owner, str) else set(owner)
    for module in MODULES:
        if module.name not in allowed:
            none_of(module, repo.uses(module.tree, package), f"{package} belongs to {owner} alone")


@each_module
def test_no_star_imports(module):
    stars = [n for n in nodes(module, ast.ImportFrom) if any(alias.name == "*" for alias in n.names)]
    none_of(module, stars, "import names, not *")


@each_module
def test_no_hidden_paths(module):
    def hidden(node):
        if isinstance(node, ast.FunctionDef):
            return node.name in ("__getattr__", "__getattribute__")
        return repo.called(node) in ("globals", "exec", "eval", "torch.set_default_dtype")
    none_of(module, [n for n in nodes(module, ast.FunctionDef, ast.Call) if hidden(n)], "what runs must be greppable")


@each_module
def test_only_the_command_line_prints(module):
    if module not in repo.family("cli"):
        none_of(module, [n for n in nodes(module, ast.Call) if repo.called(n) == "print"], "the engine does not print")


# ---------------------------------------------------------------- precision at the call site
def device_like(node: ast.AST) -> bool:
    """Whether an argument of `.to` can only be a device."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or "device" in name or (isinstance(node, ast.Call) and repo.called(node) == "torch.device")


def converts(node: ast.Call) -> bool:
    """Whether a call changes a precision without an operator: `.half()`, `.to(dtype)`, `cast(…)`."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Attribute) and name == "to":
        plain = all(keyword.arg in ("device", "non_blocking", "copy") for keyword in node.keywords)
        return not (plain and all(map(device_like, node.args)))
    return name == "cast" or (isinstance(node.func, ast.Attribute) and name in NAMED)


@pytest.mark.parametrize("module", repo.family(*NO_CONVERSION), **ids)
def test_no_conversions_in_layers_optimizer_loop_and_command_line(module):
    none_of(module, [n for n in nodes(module, ast.Call) if converts(n)], "precision is an argument of an operator")


@pytest.mark.parametrize("module", repo.family(*EXPLICIT_PRECISION), **ids)
def test_every_operator_call_names_its_precision(module):
    found = [node for node in nodes(module, ast.Call) if unnamed(node, repo.local_names(module.tree), repo.operators())]
    none_of(module, found, "name p= in every operator call")


def unnamed(node: ast.Call, names: dict[str, str], operators: set[str]) -> bool:
    """Whether a call reaches one of the package's operators without naming its precision."""
    first, _, rest = repo.called(node).partition(".")
    operator = f"{names.get(first, '')}.{rest}".rstrip(".").rpartition(".")[2]
    return first in names and operator in operators and "p" not in {keyword.arg for keyword in node.keywords}


def test_one_door_for_conversions():
    doors = {module.name for module in repo.family("precision", "rounding", "cast")}
    for module in MODULES:
        found = [node for name, node in repo.imported(module.tree) if name == f"{repo.LIB}.precision.convert"]
        if module.name not in doors:
            none_of(module, found, "convert through cast, which records it")


# ---------------------------------------------------------------- size and shape
@each_notebook
def test_notebook_is_of_readable_size(path):
    notebook = nb.load(path)
    cells = nb.exported(notebook)
    total, count = sum(map(repo.exported_lines, cells)), len(notebook["cells"])
    assert count <= MAX_CELLS and total <= MAX_LINES, f"{count} cells, {total} exported lines: split it by idea"
    long = [(cell["id"], repo.exported_lines(cell)) for cell in cells]
    complain(f"an exported cell has at most {MAX_CELL_LINES} lines",
             [f"{nb.shown(path)}, cell #{name}: {lines} lines" for name, lines in long if lines > MAX_CELL_LINES])
    complain(f"lines are at most {WIDTH} columns wide",
             [f"{nb.shown(path)}, cell #{cell['id']}: {line.strip()}" for cell in cells
              for line in nb.source(cell).splitlines() if len(line) > WIDTH])


@each_notebook
def test_public_names_are_defined_once(path):
    names = [(name, cell["id"]) for cell in nb.exported(nb.load(path)) for node in ast.parse(nb.code(cell)).body
             for name in defined(node)]
    first = dict(reversed(names))
    complain("give an earlier draft a name of its own",
             [f"{nb.shown(path)}, cell #{place}: {name} is defined in cell #{first[name]} already"
              for i, (name, place) in enumerate(names) if name in {n for n, _ in names[:i]}])


def defined(node: ast.stmt) -> list[str]:
    """The public names a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        patched = any(repo.dotted(d).split(".")[-1] in ("patch", "overload") for d in node.decorator_list)
        names = [] if patched else [node.name]
    else:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        targets = targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else []
        names = [n.id for target in targets for n in ast.walk(target)
                 if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [name for name in names if not name.startswith("_")]


@each_notebook
def test_exported_imports_stand_alone(path):
    for cell in nb.exported(nb.load(path)):
        body = ast.parse(nb.code(cell)).body
        imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
        assert all(imports) or not any(imports), f"{nb.shown(path)}, cell #{cell['id']}: imports in a cell of their own"


@each_module
def test_public_functions_are_documented_and_typed(module):
    def public(body):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                yield node
                yield from public(node.body) if isinstance(node, ast.ClassDef) else ()
    found = list(public(module.tree.body))
    none_of(module, [node for node in found if not ast.get_docstring(node)], "without a docstring")
    none_of(module, [node for node in found if isinstance(node, ast.FunctionDef) and node.returns is None],
            "without a return type")


# ---------------------------------------------------------------- the rules see what they forbid
@pytest.mark.parametrize("text, expected", [
    ("x.half()", True), ("x.float()", True), ("x.to(torch.float16)", True), ("x.to(p.dtype)", True), ("x.to(d)", True),
    ("x.to(device)", False), ("x.to('cuda')", False), ("x.to(y.device)", False), ("x.to(device, dtype=d)", True),
    ("x.to(self.device, non_blocking=True)", False), ("cast(x, p)", True), ("casting.cast(x, p)", True),
    ("float(x)", False), ("type(x)", False), ("x.type(t)", True), ("broadcast(x)", False),
    ("x.to(torch.device('cpu'))", False),
])
def test_conversions_are_recognised(text, expected):
    assert converts(ast.parse(text).body[0].value) == expected


@pytest.mark.parametrize("text, expected", [
    ("linear(x, w)", True), ("linear(x, w, p=p)", False), ("o.linear(x)", True), ("o.linear(x, p=p)", False),
    ("self.linear(x)", False), ("other(x)", False),
])
def test_operator_calls_are_recognised(text, expected):
    tree = ast.parse("from .ops import linear, other\nfrom . import ops as o\nfrom torch import linear as t")
    names = repo.local_names(tree)
    assert names == {"linear": "f16lab.ops.linear", "other": "f16lab.ops.other", "o": "f16lab.ops"}
    assert unnamed(ast.parse(text).body[0].value, names, {"linear"}) == expected


@pytest.mark.parametrize("text", ["import torch.distributed as dist", "from torch import distributed",
                                  "from torch.distributed import all_reduce", "torch.distributed.barrier()",
                                  "def f():\n    import torch.distributed"])
def test_uses_are_recognised(text):
    assert repo.uses(ast.parse(text), "torch.distributed")


def test_lazy_imports_are_recognised():
    lazy = 'import importlib\nm = importlib.import_module("cupy.cuda")\n'
    tree = ast.parse(lazy + "from . import ops\nfrom .nn import GPT")
    names = [name for name, _ in repo.imported(tree)]
    assert sorted(names) == ["cupy.cuda", "f16lab.nn.GPT", "f16lab.ops", "importlib"]
    assert repo.uses(tree, "cupy") and not repo.uses(tree, "cup")


def test_definitions_are_recognised():
    text = "def f(): pass\nclass C: pass\na, (b, _c) = 1, (2, 3)\nd: int = 4\nimport e\n@overload\ndef g(): ..."
    tree = ast.parse(text)
    assert [name for node in tree.body for name in defined(node)] == ["f", "C", "a", "b", "d"]
