"""What a device may do natively is asked, and wrong answers are refused; the doctor survives every CuPy."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path as File

import pytest
import torch
import torch.nn.functional as F
from f16lab import device
from f16lab.device import (
    ALL_BOUNDARY,
    Candidate,
    DispatchTable,
    Path,
    ask_device,
    ask_elements,
    ask_linear,
    ask_linear_back,
    ask_product,
    ask_rows_added,
    ask_sum,
    candidates,
    doctor,
    exact_products,
    flush_note,
    open_device,
    table_for,
    using_table,
)
from f16lab.precision import BF16, F16, F32, F64

ROOT = File(__file__).resolve().parent.parent
aten = torch.ops.aten


def python(code: str, *arguments: str, folder: File | None = None, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter that sees `folder` before all else."""
    path = os.pathsep.join(str(p) for p in (folder, ROOT) if p)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, timeout=120
    )


# ---------------------------------------------------------------- impostors
def half_running_sum(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for k in range(x.shape[-1]):
        total = total + x[..., k]
    return total


def two_threads(x: torch.Tensor) -> torch.Tensor:
    """Each half of a row is rounded before the halves are added."""
    a, b = x.float().chunk(2, -1)
    return a.sum(-1).to(x.dtype) + b.sum(-1).to(x.dtype)


def half_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Partial products of 64 terms, rounded, added in half."""
    total = torch.zeros(len(a), len(b), dtype=a.dtype)
    for k in range(0, a.shape[1], 64):
        total = total + (a[:, k : k + 64].float() @ b[:, k : k + 64].float().t()).to(a.dtype)
    return total


def without_nan(f):
    return lambda *xs: f(*(x.nan_to_num(0.0, float("inf"), float("-inf")) for x in xs))


def rounded_weight_gradient(g, x, w):
    """gᵀx over two blocks of rows, each rounded to half."""
    k = len(g) // 2
    return g @ w, g[:k].t() @ x[:k] + g[k:].t() @ x[k:], g.float().sum(0).to(g.dtype)


good_linear = lambda x, w, b: F.linear(x.float(), w.float(), b.float()).to(x.dtype)
good_product = lambda a, b: (a.float() @ b.float().t()).to(a.dtype)
good_linear_back = lambda g, x, w: tuple(
    y.to(g.dtype) for y in (g.float() @ w.float(), g.float().t() @ x.float(), g.float().sum(0))
)
good_rows = lambda g, ids, n: torch.zeros(n, g.shape[1]).index_add(0, ids, g.float()).to(g.dtype)

IMPOSTORS = {
    "an embedding gradient added up in half": (
        ask_rows_added,
        lambda g, ids, n: aten.embedding_dense_backward(g, ids, n, -1, False),
        "4096 ones give",
    ),
    "a table gradient that forgets NaN": (
        ask_rows_added,
        lambda g, ids, n: good_rows(g.nan_to_num(0.0), ids, n),
        "NaN",
    ),
    "a linear layer that rounds before its bias": (ask_linear, lambda x, w, b: good_product(x, w) + b, "rounded once"),
    "a linear gradient in two rounded blocks": (ask_linear_back, rounded_weight_gradient, "rounded once"),
    "a bias gradient added up in half": (
        ask_linear_back,
        lambda g, x, w: (*good_linear_back(g, x, w)[:2], half_running_sum(g.t())),
        "rounded once",
    ),
    "a product with a half accumulator": (ask_product, half_products, "give|rounded once|overflow"),
    "a product that flushes NaN": (ask_product, without_nan(good_product), "NaN"),
    "a sum in half": (partial(ask_sum, False), half_running_sum, "4096 ones give"),
    "a sum rounded per thread": (partial(ask_sum, False), two_threads, "overflow|rounded once"),
    "a mean of a half sum": (
        partial(ask_sum, True),
        lambda x: x.float().sum(-1).to(x.dtype) / x.shape[-1],
        "overflows|rounded once",
    ),
    "a mean that divides first": (
        partial(ask_sum, True),
        lambda x: (x / x.shape[-1]).float().sum(-1).to(x.dtype),
        "rounded once",
    ),
    "tanh's gradient from a rounded output": (
        partial(ask_elements, lambda g, x: aten.tanh_backward(g, torch.tanh(x)), 2),
        lambda g, x: aten.tanh_backward(g, torch.tanh(x)),
        "rounded once",
    ),
    "a gelu by its formula in half": (
        partial(ask_elements, partial(F.gelu, approximate="tanh"), 1),
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))),
        "rounded once|NaN",
    ),
    "a sum with a rounded factor": (
        partial(ask_elements, lambda a, b: a + 0.3 * b, 2),
        lambda a, b: a + (0.3 * b),
        "rounded once",
    ),
    "an exp that truncates": (
        partial(ask_elements, torch.exp, 1),
        lambda x: (x.float().exp() * (1 - 2**-9)).to(x.dtype),
        "rounded once",
    ),
}
HONEST = {
    "rows": (ask_rows_added, good_rows),
    "linear": (ask_linear, good_linear),
    "linear back": (ask_linear_back, good_linear_back),
    "product": (ask_product, good_product),
    "sum": (partial(ask_sum, False), lambda x: x.float().sum(-1).to(x.dtype)),
    "mean": (partial(ask_sum, True), lambda x: x.float().mean(-1).to(x.dtype)),
    "gelu": (
        partial(ask_elements, partial(F.gelu, approximate="tanh"), 1),
        lambda x: F.gelu(x.float(), approximate="tanh").to(x.dtype),
    ),
    "tanh back": (
        partial(ask_elements, lambda g, x: aten.tanh_backward(g, torch.tanh(x)), 2),
        lambda g, x: aten.tanh_backward(g.float(), torch.tanh(x.float())).to(g.dtype),
    ),
}


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
@pytest.mark.parametrize("name", IMPOSTORS)
def test_an_impostor_is_refused_with_its_reason(name, p):
    question, native, words = IMPOSTORS[name]
    table = ask_device("cpu", (Candidate("it", "forward", native, question, (p,)),))
    assert table.paths == () and len(table.why) == 1
    named, reason = table.why[0]
    assert named == f"it forward {p.tag}"
    assert any(word in reason for word in words.split("|")), reason
    assert table.path("it", "forward", p) is Path.BOUNDARY


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_the_boundary_itself_would_be_accepted(name, p):
    question, native = HONEST[name]
    table = ask_device("cpu", (Candidate("it", "backward", native, question, (p,)),))
    assert table.why == () and table.path("it", "backward", p) is Path.NATIVE
    assert table.path("it", "forward", p) is Path.BOUNDARY


def test_each_precision_is_decided_alone():
    """A sum that is right in bf16 and not in f16."""
    native = lambda x: x.float().sum(-1).to(x.dtype) if x.dtype is torch.bfloat16 else half_running_sum(x)
    table = ask_device("cpu", (Candidate("row_sum", "forward", native, partial(ask_sum, False)),))
    assert (
        table.path("row_sum", "forward", BF16) is Path.NATIVE and table.path("row_sum", "forward", F16) is Path.BOUNDARY
    )


def test_flushing_subnormals_is_noted_and_not_refused():
    flush = lambda a, b: good_product(torch.where(a.abs() < BF16.smallest_normal, 0, a), b)
    table = ask_device("cpu", (Candidate("matmul", "forward", flush, ask_product, (BF16,), note=flush_note),))
    assert table.path("matmul", "forward", BF16) is Path.NATIVE
    assert table.notes == (("matmul forward bf16", "numbers below 2^-126 count as 0"),)
    assert (
        ask_device("cpu", (Candidate("matmul", "forward", good_product, ask_product, (BF16,), note=flush_note),)).notes
        == ()
    )


def test_every_question_of_every_kind_can_be_asked_here():
    """CUDA's candidates, asked on this CPU: the answers differ, the questions run."""
    table = ask_device("cpu", candidates("cuda"))
    assert len(table.paths) + len(table.why) == sum(len(c.precisions) for c in candidates("cuda"))
    assert candidates("cpu") and candidates("mps") == ()


# ---------------------------------------------------------------- the table
def test_a_table_is_a_value():
    entry = (("gelu", "forward", F16), Path.NATIVE)
    a, b = DispatchTable((entry,)), DispatchTable((entry,))
    assert a == b and hash(a) == hash(b) and a != ALL_BOUNDARY
    with pytest.raises(FrozenInstanceError):
        a.paths = ()
    assert a.path("gelu", "forward", F16) is Path.NATIVE and a.path("gelu", "forward", BF16) is Path.BOUNDARY
    assert a.path("gelu", "backward", F16) is Path.BOUNDARY and a.path("anything", "forward", F32) is Path.NATIVE
    assert ALL_BOUNDARY.path("linear", "forward", F64) is Path.BOUNDARY


def test_this_cpu():
    """On every CPU build of torch the embedding gradient adds in half; f16 products are not asked."""
    table = ask_device("cpu")
    refused = dict(table.why)
    assert (
        refused["gather_rows backward f16"] == "4096 ones give 2048.0"
        and refused["gather_rows backward bf16"] == "4096 ones give 256.0"
    )
    assert "tanh backward f16" in refused
    for op in ("softmax", "layer_norm", "cross_entropy", "row_sum", "mean", "total"):
        assert table.path(op, "forward", F16) is table.path(op, "backward", BF16) is Path.BOUNDARY
    assert table.path("matmul", "forward", F16) is Path.BOUNDARY


def test_using_a_table_ends_with_the_block_also_after_an_exception():
    before = table_for("cpu")
    with using_table(ALL_BOUNDARY):
        assert table_for("cpu") is ALL_BOUNDARY
        with using_table(before):
            assert table_for("cpu") is before
        assert table_for("cpu") is ALL_BOUNDARY
    with pytest.raises(KeyError), using_table(ALL_BOUNDARY):
        raise KeyError
    assert table_for("cpu") is before


def test_the_switches_of_torch_are_restored():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    state = lambda: (*(getattr(matmul, n) for n in names), cudnn.allow_tf32)
    before = state()
    try:
        for n in names:
            setattr(matmul, n, True)
        cudnn.allow_tf32 = True
        with pytest.raises(KeyError), exact_products():
            assert state() == (False,) * 5
            raise KeyError
        assert state() == (True,) * 5
    finally:
        for n, value in zip(names, before):
            setattr(matmul, n, value)
        cudnn.allow_tf32 = before[-1]


def test_the_switches_survive_the_newer_names_of_torch():
    done = python(
        "import torch; from f16lab.device import exact_products\n"
        "m, c = torch.backends.cuda.matmul, torch.backends.cudnn.conv\n"
        "m.allow_tf32 = False; m.fp32_precision = 'tf32'\n"  # now reading allow_tf32 raises
        "with exact_products(): print(m.fp32_precision, torch.backends.cudnn.allow_tf32)\n"
        "print(m.fp32_precision, c.fp32_precision)"
    )
    assert done.stdout.split() == ["ieee", "False", "tf32", "tf32"], done.stderr


# ---------------------------------------------------------------- opening a device
def test_open_device():
    assert open_device("cpu") == torch.device("cpu")
    assert open_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for bad, words in {
        "tpu": "is not known",
        "cuda:x": "is not known",
        "cuda:": "is not known",
        "": "is not known",
        "cpu:0:1": "is not known",
    }.items():
        with pytest.raises(ValueError, match=words):
            open_device(bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_why_and_what_to_do():
    with pytest.raises(ValueError, match="CPU build|no usable GPU.*--device cpu") as caught:
        open_device("cuda")
    assert "--device cpu" in str(caught.value)


def test_an_unknown_kind_of_device_goes_by_the_boundary():
    table = ask_device("mps")
    assert (
        table.paths == ()
        and table.path("relu", "forward", F16) is Path.BOUNDARY
        and table.path("relu", "forward", F32) is Path.NATIVE
    )


FORCED = """
import torch
from f16lab import ops
from f16lab.cast import Ledger
from f16lab.device import ALL_BOUNDARY, Path, open_device, table_for
from f16lab.precision import F16, F32
open_device("cpu")
assert table_for("cpu") == ALL_BOUNDARY and table_for("cpu").path("gelu", "forward", F32) is Path.BOUNDARY
with Ledger() as ledger: ops.relu(torch.ones(3).half(), p=F16)
print(ledger.count)
x = torch.randn(5, 7, requires_grad=True)
y = ops.gelu(x, p=F32)
print(type(y.grad_fn).__name__)
"""


def test_forcing_the_boundary_by_the_environment():
    done = python(FORCED, F16LAB_FORCE_BOUNDARY="1")
    assert done.stdout.split() == ["2", "_ApplyBackward"], done.stdout + done.stderr


@pytest.mark.parametrize("value", ("0", ""))
def test_the_environment_asks_only_with_a_one(value, monkeypatch):
    monkeypatch.setenv("F16LAB_FORCE_BOUNDARY", value)
    assert ask_device("cpu").paths
    monkeypatch.setenv("F16LAB_FORCE_BOUNDARY", "1")
    assert ask_device("cpu") is ALL_BOUNDARY


# ---------------------------------------------------------------- doctor and CuPy
ADVICE = """raise ImportError('''
====================
Failed to import CuPy.

If you installed CuPy via wheels ...

Original error:
  ImportError: libcuda.so.1: cannot open shared object file
====================
''')"""
VERSION = "class cuda:\n class runtime:\n  @staticmethod\n  def runtimeGetVersion(): "
UNUSABLE = "problem | CuPy is installed but unusable ({}"
CUPYS = {
    "advises": (ADVICE, UNUSABLE.format("ImportError: ImportError: libcuda.so.1: cannot open shared object file)")),
    "raises RuntimeError": ("raise RuntimeError('driver\\n  too old')", UNUSABLE.format("RuntimeError: driver too")),
    "says a lot": ("raise ImportError('long ' * 500)", UNUSABLE.format("ImportError: long long")),
    "is a torso": ("x = 1", UNUSABLE.format("AttributeError")),
    "fails later": (VERSION + "raise OSError('no device')", UNUSABLE.format("OSError: no device)")),
    "works": ("__version__ = '14.1'\n" + VERSION + "return 13000", "" if torch.version.cuda else "ok | CuPy 14.1"),
}
DOCTOR = """
import importlib, importlib.util, sys
import f16lab.device as device
assert "cupy" not in sys.modules
for folder in sys.argv[1:] or [None]:
    if folder: sys.path.insert(0, folder)
    importlib.invalidate_caches()
    sys.modules.pop("cupy", None)
    for f in device.doctor():
        if f.subject == "cupy": print(f.status, "|", f.text)
"""


def test_doctor_with_every_kind_of_broken_cupy(tmp_path):
    """One line each, whatever CuPy does at import or later."""
    for name, (text, _) in CUPYS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cupy.py").write_text(text)
    done = python(DOCTOR, *(str(tmp_path / name) for name in CUPYS))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(CUPYS) and all(len(line) < 300 for line in lines)
    for line, (name, (_, expected)) in zip(lines, CUPYS.items()):
        assert line.startswith(expected), (name, line)


def test_doctor_without_cupy(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "cupy" else find(name, *rest))
    found = device.cupy_finding()
    assert (
        found.status == "missing" and found.text.startswith("CuPy is not installed") and "f16lab[cuda13]" in found.text
    )


def test_importing_and_training_on_the_cpu_never_import_cupy(tmp_path):
    (tmp_path / "cupy.py").write_text("raise SystemExit('cupy was imported')")
    code = (
        "import sys, torch, f16lab.device, f16lab.ops as ops\nfrom f16lab.precision import F16\n"
        "f16lab.device.open_device('cpu')\nops.relu(torch.ones(2, requires_grad=True), p=F16).sum().backward()\n"
        "print('cupy' in sys.modules)"
    )
    done = python(code, folder=tmp_path)
    assert done.stdout.strip() == "False", done.stderr


def test_doctor_lists_paths_refusals_and_limits():
    findings = doctor()
    subjects = [f.subject for f in findings]
    assert subjects[:3] == ["python", "torch", "threads"] and {"cuda", "cupy", "cpu f16", "cpu bf16"} <= set(subjects)
    assert {f.status for f in findings} <= {"ok", "missing", "problem", "info"}
    assert all(f.text and "\n" not in f.text for f in findings)
    assert any(f.subject == "cpu refused" and "gather_rows backward f16" in f.text for f in findings)
    told = [f.text for f in findings if f.subject == "cpu limit"]
    assert len(told) == len(table_for("cpu").notes)
    native = next(f.text for f in findings if f.subject == "cpu f16")
    assert ("gelu" in native) == (device.table_for("cpu").path("gelu", "forward", F16) is Path.NATIVE)
