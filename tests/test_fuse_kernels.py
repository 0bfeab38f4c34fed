"""Generated kernels of fused expressions: on the CPU stand-in against their reference, compiled by nvcc, and on a GPU."""

import ctypes
import math
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_host import built

from f16lab import fuse, ops
from f16lab.cast import assert_no_casts
from f16lab.codegen import NATIVE, VARIANTS, kernel_text, no_native_structure, source
from f16lab.device import ALL_BOUNDARY, table_for, using_table
from f16lab.expression import (
    Draw,
    backward,
    capture,
    col_max,
    col_mean,
    col_sum,
    drop_limit,
    equal,
    evaluate,
    exp,
    log,
    maximum,
    minimum,
    row_max,
    row_mean,
    row_sum,
    rsqrt,
    sqrt,
    tanh,
    where,
)
from f16lab.fuse import ENGINE, Fused, Trace, engine_programs, engine_sources, fused, run
from f16lab.launch import kernel_source
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, bits_of, convert
from f16lab.rounding import Key, Purpose, convert_stochastic, noise

gpu = pytest.mark.gpu
SIZES = (0, 1, 31, 32, 33, 1023)
DRAW = Draw(Key.of(5, 2, Purpose.DROPOUT, "layer"), 2**32 - 40, drop_limit(0.3))


# ---------------------------------------------------------------- expressions beside the engine's
def arithmetic(a, b):
    """+ − × ÷ √, comparisons and choices: every bit is promised."""
    c = where(a < b, maximum(a, 0.5) / b, minimum(b, 3.0) - a * 0.1)
    return where(equal(a, b), sqrt(abs(a)), -c) + (a >= 0.25) * b


EXACT = capture(arithmetic, "element", "element")
PLANE = capture(lambda x, row, column: (x + row) * column - column / (row * row + 1.0), "element", "row", "column")
SMOOTH = capture(lambda x: exp(-x) + tanh(x) + log(abs(x) + 1.0), "element")
DRAWN = fuse.Program(EXACT.inputs, EXACT.steps, EXACT.outputs, (0,), EXACT.constants)
ROWS = capture(lambda x, w: (x / (row_sum(abs(x) * w) + 1.0), row_sum(abs(x) * w)), "element", "row")
ROW_MAX = capture(lambda x: x - row_max(x), "element")
COLS = capture(lambda x, s, w: col_sum(x * s) * 0.5 + w, "element", "column", "row")
COL_MAX = capture(lambda x: (col_max(x), -col_max(x)), "element")
COL_MEAN = capture(lambda x: sqrt(col_mean(x * x)), "element")
RMS = Fused.of(lambda x, w: x * rsqrt(row_mean(x * x) + 1e-5) * w, "element", "row")
OTHERS = {
    "rms": RMS.forward,
    **{f"rms ←{i}": p for i, p in enumerate(RMS.back.programs)},
    "exact": EXACT,
    "plane": PLANE,
    "smooth": SMOOTH,
    "drawn": DRAWN,
    "rows": ROWS,
    "row max": ROW_MAX,
    "cols": COLS,
    "col max": COL_MAX,
    "col mean": COL_MEAN,
}
PROGRAMS = {**engine_programs(), **OTHERS}


@pytest.fixture(scope="module")
def library():
    """All kernels of all programs in one library of the host: (text, kernel name) -> its entry."""
    texts = {
        (source(p, v), k): (v, p)
        for p in PROGRAMS.values()
        for v in VARIANTS
        if v not in NATIVE or not no_native_structure(p)
        for k in ("chain", "chain_finish")
        if f"{k}(" in kernel_text(p, v)
    }
    bodies, names = "", {}
    for i, ((text, k), (v, p)) in enumerate(texts.items()):
        if k == "chain":
            bodies += f"namespace k{i} {{\n{kernel_text(p, v)}}}\n"
        inside = f"k{i}" if k == "chain" else names[text, "chain"][1]
        names[text, k] = (f"run{i}", inside)
        bodies += f'extern "C" void run{i}(int b, void** a) {{ cuda_host::launch(&{inside}::{k}, b, 256, a); }}\n'
    made = built(f"{kernel_source('fuse.cuh')}\nusing namespace f16lab;\n{bodies}", "k0::chain")
    return {key: getattr(made, name) for key, (name, _) in names.items()}


@pytest.fixture
def on_host(library, monkeypatch):
    """fuse launches on the CPU; the number of blocks is what the test says."""

    def launch(text, kernel, device, blocks, *arguments):
        plain = [0 if a is None else a for a in arguments]
        cells = [np.array(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in plain]
        library[text, kernel](ctypes.c_int(blocks), (ctypes.c_void_p * len(cells))(*(c.ctypes.data for c in cells)))

    monkeypatch.setattr(fuse, "launch", launch)
    monkeypatch.setattr(fuse, "check_tensors", lambda name, tensors: torch.device("cpu"))
    monkeypatch.setattr(fuse, "blocks_of", lambda device: on_host_blocks[0])
    on_host_blocks[0] = 3


on_host_blocks = [3]


# ---------------------------------------------------------------- help
def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    """f32 of every size around the formats' ranges, with zeros, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) * torch.exp2(torch.randint(-20, 14, shape, generator=g).float())
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 65504.0])
    pick = torch.randint(0, 60, shape, generator=g)
    return torch.where(pick < 7, special[pick.clamp(max=6)], x)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; any NaN equals any NaN, whose sign the processor chooses."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits_of(a)[~a.isnan()], bits_of(b)[~b.isnan()])


def operands(p: fuse.Program, shape: tuple[int, ...], make=wild, precisions=(F32,)) -> list[torch.Tensor]:
    """Operands for a program in the precisions given, taken in turn."""
    shapes = [fuse._shape_of(axis, torch.Size(shape)) for axis in p.inputs]
    return [convert(make(*s, seed=i), precisions[i % len(precisions)]) for i, s in enumerate(shapes)]


def reference(p, xs, outs, constants, draws, rounded=None):
    """Outputs by plain torch, rounded once."""
    ys = evaluate(p, [convert(x, F32) for x in xs], [float(np.float32(c)) for c in constants], draws, rounded)
    stored = [
        convert_stochastic(y, q, draws[d].key, draws[d].start) if d >= 0 else convert(y, q)
        for y, q, d in zip(ys, outs, p.draws)
    ]
    return stored


def noises(p: fuse.Program, draws) -> list[int]:
    return [n for d in draws for n in (d.key.a, d.start, d.limit)] if p.streams else []


def bounded(program: fuse.Program, mine, right, q) -> bool:
    """Whether outputs differ by no more than a step of their format here and there, or 2^-18 of the largest number."""
    close = torch.allclose(
        mine.double(),
        right.double(),
        rtol=max(2**-18, q.ulp(1.0)),
        atol=1e-5 * float(right.double().abs().nan_to_num().max() if right.numel() else 0),
        equal_nan=True,
    )
    return mine.dtype is right.dtype and mine.shape == right.shape and close


PROMISED = [
    name
    for name, p in PROGRAMS.items()
    if p.reduction is None and not {"exp", "log", "tanh", "sigmoid"} & {s.op for s in p.steps}
]
MIXES = {"f16": (F16,), "bf16": (BF16,), "f32": (F32,), "f16 f32": (F16, F32), "fp8": (E4M3, E5M2, BF16)}


# ---------------------------------------------------------------- on the stand-in
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", PROMISED)
def test_every_bit_is_the_references(on_host, name, mix):
    """Any storage, any size, odd addresses, any number of blocks, noise beyond 2^32: + − × ÷ √, comparisons, conversions."""
    p = PROGRAMS[name]
    for n, blocks in zip(SIZES, (1, 3, 2, 1, 7, 2)):
        on_host_blocks[0] = blocks
        for shape in ((n,),) if p.flat else ((3, n), (n, 3), (5, 8 * n)):
            xs = operands(p, shape, precisions=MIXES[mix])
            if n == 33:
                xs = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in xs]  # odd addresses
            for q in (F16, F32, E4M3):
                outs = [q] * len(p.outputs)
                variant = "" if mix == "f32" and q is F32 else "x"
                ys = run(p, variant, xs, outs, p.constants, noises(p, [DRAW]))
                assert all(same(y, r) for y, r in zip(ys, reference(p, xs, outs, p.constants, [DRAW]), strict=True)), (
                    shape,
                    q,
                )


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("name", [n for n in PROMISED if n != "drawn"])
def test_native_arithmetic_has_the_bits_of_rounding_each_primitive(on_host, name, variant):
    p, q = PROGRAMS[name], NATIVE[variant]
    shape = (2000,) if p.flat else (7, 301)
    xs = operands(p, shape, precisions=(q,))
    ys = run(p, variant, xs, [q] * len(p.outputs), p.constants, noises(p, [DRAW]))
    right = reference(p, xs, [q] * len(p.outputs), p.constants, [DRAW], rounded=q)
    assert all(same(y, r) for y, r in zip(ys, right, strict=True))


@pytest.mark.parametrize("q", (F16, F32), ids=str)
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in PROMISED])
def test_sums_and_functions_stay_within_their_bound_and_repeat_their_bits(on_host, name, q):
    p, results = PROGRAMS[name], []
    for shape in ((5, 33), (1, 1), (600, 8), (3, 520)):
        xs = operands(
            p,
            shape,
            make=lambda *s, seed: torch.rand(*s, generator=torch.Generator().manual_seed(seed)) + 0.1,
            precisions=(q,),
        )
        outs = [q] * len(p.outputs)
        right = reference(p, xs, outs, p.constants, [DRAW])
        for blocks in (1, 5):
            on_host_blocks[0] = blocks
            results.append(run(p, "" if q is F32 else "x", xs, outs, p.constants, []))
            assert all(bounded(p, y, r, q) for y, r in zip(results[-1], right, strict=True)), (
                shape,
                [(y - r).abs().max() for y, r in zip(results[-1], right)],
            )
        assert all(same(a, b) for a, b in zip(*results[-2:]))


def ulps(op: str, n: int, device: str = "cpu") -> float:
    """Largest error of a function over its whole range, in steps of f32."""
    g = torch.Generator().manual_seed(3)
    x = torch.cat(
        [torch.rand(n, generator=g) * 192 - 104, torch.randn(n, generator=g), torch.randn(n, generator=g) * 1e-10]
    )
    (mine,) = run(ENGINE[op].program, "", [x.to(device)], [F32], [])
    right = getattr(torch, op)(x.double())
    return ((mine.cpu().double() - right).abs() / F32.ulp(right.float()).double()).max().item()


@pytest.mark.parametrize("op", ("exp", "tanh", "sigmoid"))
def test_functions_are_within_2_ulp_and_keep_their_limits(on_host, op):
    assert ulps(op, 30_000) <= {"exp": 1.0, "tanh": 1.5, "sigmoid": 1.8}[op]
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 200.0, -200.0])
    (mine,) = run(ENGINE[op].program, "", [x], [F32], [])
    assert torch.allclose(mine, getattr(torch, op)(x.double()).float(), rtol=1e-6, atol=0, equal_nan=True)
    assert op != "tanh" or torch.signbit(mine[1])


def test_a_row_sum_has_one_order_whatever_the_alignment(on_host):
    """Lanes add their groups in order, then halves of the warp: written out in numpy, bit for bit."""
    x, w = torch.randn(4, 1000), torch.rand(1000)
    shifted = torch.cat([torch.zeros(1), x.flatten()])[1:].view(4, 1000)
    a, b = (run(ROWS, "", [t, w], [F32, F32], ROWS.constants)[1] for t in (x, shifted))
    terms = np.zeros((4, 1024), np.float32)
    terms[:, :1000] = (x.abs() * w).numpy()
    lanes = np.zeros((4, 32), np.float32)
    for g in range(4):
        for k in range(8):
            lanes += terms[:, g * 256 : (g + 1) * 256].reshape(4, 32, 8)[:, :, k]
    for d in (16, 8, 4, 2, 1):
        lanes = lanes[:, :d] + lanes[:, d : 2 * d]
    assert same(a, b) and same(a, torch.from_numpy(lanes))


def test_the_maximum_passes_nan_on_and_empty_tensors_pass(on_host):
    x = torch.randn(300, 40)
    x[7, 3] = math.nan
    top, bottom = run(COL_MAX, "", [x], [F32, F32], [])
    assert same(top, x.amax(0)) and same(bottom, -x.amax(0)) and top.isnan().sum() == 1
    assert same(run(ROW_MAX, "", [x], [F32], [])[0], x - x.amax(1, keepdim=True))
    assert run(ROWS, "", [torch.zeros(0, 5), torch.ones(5)], [F32, F32], ROWS.constants)[0].shape == (0, 5)
    assert torch.equal(
        run(COLS, "", [torch.zeros(0, 5), torch.zeros(0, 1), torch.ones(5)], [F32], COLS.constants)[0], torch.ones(5)
    )


@pytest.mark.parametrize("variant", ("", "a", "b"))
def test_an_element_whose_noise_is_the_limit_is_kept(on_host, variant):
    n = noise(DRAW.key, 7, 100).to(torch.int64) & 0xFFFFFFFF
    q, x = NATIVE.get(variant, F32), torch.ones(100)
    for i in (0, 50, 99):
        (y,) = run(ENGINE["dropout"].program, variant, [convert(x, q)], [q], [1.0], [DRAW.key.a, 7, int(n[i])])
        assert torch.equal(y.bool(), n >= n[i]) and y[i] == 1


def test_one_kernel_serves_all_values_of_the_constants(on_host):
    x = wild(100)
    scale = ENGINE["scale"].program
    for c in (0.5, 3e-8, 1e30):
        assert same(run(scale, "x", [convert(x, F16)], [F32], [c])[0], convert(x, F16).float() * torch.tensor(c))


# ---------------------------------------------------------------- the operator under the stand-in
@pytest.fixture
def kernels_on_cpu(on_host, monkeypatch):
    """The CPU's table pretends to have kernels."""
    with using_table(replace(table_for("cpu"), kernels=True)):
        yield


def test_the_fused_operator_takes_the_kernel_and_counts_launches(kernels_on_cpu):
    swiglu = ENGINE["swiglu"]
    x, gate = (
        convert(torch.randn(6, 40, generator=torch.Generator().manual_seed(i)), F16).requires_grad_() for i in range(2)
    )
    with Trace() as trace:
        y = fused(swiglu, x, gate, p=F16)
        y.backward(torch.ones_like(y))
    assert trace.hits == {f"{swiglu.forward.key}#x": 1, f"{swiglu.back.programs[0].key}#x": 1} and not trace.misses
    a, b = (t.detach().double().requires_grad_() for t in (x, gate))
    (a * torch.nn.functional.silu(b)).sum().backward()
    assert torch.allclose(y.detach().double(), (a * torch.nn.functional.silu(b)).detach(), rtol=2**-10, atol=1e-6)
    assert torch.allclose(x.grad.double(), a.grad, rtol=2**-10, atol=1e-6) and torch.allclose(
        gate.grad.double(), b.grad, rtol=2**-10, atol=1e-6
    )


def test_the_lookup_goes_from_native_to_any_storage_to_the_reference_and_names_a_miss(kernels_on_cpu):
    f = Fused(EXACT, EXACT, backward(capture(lambda a, b: a * b, "element", "element")))
    a, b = (torch.randn(4, 30).half() for _ in range(2))
    with Trace() as trace:
        native = fused(f, a, b, arith="native")
        once = fused(f, a, b)
        plain = fused(f, a.float(), b.float())
        tiny = fused(f, a, b, arith="native", constants=[*EXACT.constants[:-1], 3e-8])
        same_tiny = fused(f, a, b, constants=[*EXACT.constants[:-1], 3e-8])
        strided = fused(f, a.t().contiguous().t(), b)
        fused(f, a.double(), b.double())
    key = EXACT.key
    assert trace.hits == {f"{key}#a": 1, f"{key}#x": 3, key: 1}
    assert trace.misses == {(key, "operand 0 is strided"): 1, (key, "operand 0 is f64"): 1}
    assert (
        not torch.equal(native, once)
        and same(tiny, same_tiny)
        and same(strided, once)
        and same(convert(plain, F16), once)
    )
    assert len(trace.rows()) == 5


CALLS = {
    "dropout": lambda x, **o: ops.dropout(x, 0.3, key=DRAW.key, start=2**32 - 40, **o),
    "scale": lambda x, **o: ops.scale(x, 1 / 3, **o),
    "div": ops.div,
    "swiglu": ops.swiglu,
    "silu": ops.silu,
    "sigmoid": ops.sigmoid,
    "tanh": ops.tanh,
    "exp": ops.exp,
    "sqrt": ops.sqrt,
}


def outcome(call, xs, p) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in xs]
    y = call(*leaves, p=p)
    g = convert(convert(torch.rand(y.shape, generator=torch.Generator().manual_seed(9)) + 0.5, F16), p)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_of_the_engine_run_their_kernels_and_mean_the_same(kernels_on_cpu, name):
    """Halves in their own precision, and f16 operands of an f32 operator, which no cast touches then."""
    n = len(ENGINE[name].program.inputs)
    for stored, p in ((F16, F16), (BF16, BF16), (F16, F32), *(((F32, F32),) if name == "dropout" else ())):
        xs = [convert(torch.rand(3, 40, generator=torch.Generator().manual_seed(i)) + 0.25, stored) for i in range(n)]
        with using_table(ALL_BOUNDARY):
            right = outcome(CALLS[name], xs, p)
        with Trace() as trace, assert_no_casts():
            mine = outcome(CALLS[name], xs, p)
        assert trace.hits.total() == 2 and not trace.misses
        for a, b in zip(mine, right, strict=True):
            assert a.dtype is b.dtype
            assert (
                same(a, b)
                if name in ("dropout", "scale", "div")
                else torch.allclose(a.float(), b.float(), rtol=max(2**-20, stored.ulp(1.0)), atol=1e-6)
            )


def test_what_a_kernel_does_not_take_goes_on_as_before(kernels_on_cpu):
    a, b = torch.rand(4, 6).half() + 1, torch.rand(6).half() + 1
    with Trace() as trace:
        outcome(ops.div, [a, b], F16)  # broadcasts
        outcome(ops.div, [a.t().contiguous().t(), a.t().contiguous().t()], F16)  # strided
        outcome(CALLS["scale"], [torch.rand(4, 6)], F32)  # torch's own f32 operator
        outcome(ops.div, [a.double(), a.double()], F64)
        outcome(CALLS["scale"], [torch.rand(4, 6).to(torch.float32)], F16)  # f16 does not hold it: cast first
    assert not trace.hits
    x = torch.rand(4, 6).half().t()
    with using_table(ALL_BOUNDARY):
        right = outcome(CALLS["dropout"], [x], F16)
    assert all(
        same(m, r) for m, r in zip(outcome(CALLS["dropout"], [x], F16), right)
    )  # a strided operand: the mask is made after all


def test_compiled_in_one_graph_the_kernels_are_launched_and_the_bits_are_kept(kernels_on_cpu):
    """Operators of the engine and `fused` itself; the launch is an operator of torch's library in the graph."""
    torch._dynamo.reset()

    def f(x, gate, p):
        return ops.div(ops.swiglu(x, gate, p=p), ops.scale(gate, 0.5, p=p), p=p) + fused(ENGINE["silu"], x, p=p)

    xs = [convert(torch.rand(3, 40, generator=torch.Generator().manual_seed(i)) + 0.25, F16) for i in range(2)]
    with Trace() as eager:
        right = outcome(f, xs, F16)
    with Trace() as graph:
        mine = outcome(torch.compile(f, fullgraph=True, backend="aot_eager"), xs, F16)
    assert eager.hits == graph.hits and eager.hits.total() == 8
    assert all(same(a, b) for a, b in zip(mine, right, strict=True))
    torch._dynamo.reset()


# ---------------------------------------------------------------- text
def test_a_text_does_not_depend_on_other_variants():
    fresh = source(capture(arithmetic, "element", "element"), "")
    for v in VARIANTS[::-1]:
        kernel_text(EXACT, v)
    assert (
        source(EXACT, "") == fresh and "codes" not in kernel_text(EXACT, "") and "h_mul" not in kernel_text(EXACT, "")
    )


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_every_kernel_of_the_engines_expressions_compiles(tmp_path, arch):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine: kernels are compiled where there is one")
    texts = [
        kernel_text(p, v) for p in PROGRAMS.values() for v in VARIANTS if v not in NATIVE or not no_native_structure(p)
    ]
    assert all(text.split("using namespace f16lab;\n")[-1] in texts for *_, text in engine_sources())
    file = tmp_path / "fuse.cu"
    file.write_text(
        kernel_source("fuse.cuh")
        + "\nusing namespace f16lab;\n"
        + "".join(f"namespace k{i} {{\n{t}}}\n" for i, t in enumerate(texts))
    )
    done = subprocess.run(
        [
            nvcc,
            "-std=c++17",
            f"-arch={arch}",
            "--fmad=false",
            "-Xcicc",
            "-O1",
            "-Xptxas",
            "-O0",
            "-cubin",
            str(file),
            "-o",
            str(tmp_path / "out.cubin"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- on a GPU
@gpu
@pytest.mark.parametrize("n", (*SIZES, 1_000_007))
@pytest.mark.parametrize("name", PROMISED)
def test_gpu_every_bit_is_the_references(name, n):
    p = PROGRAMS[name]
    for precisions in MIXES.values():
        shape = (n,) if p.flat else (3, n)
        xs = operands(p, shape, precisions=precisions)
        for q in (F16, BF16, F32, E4M3, E5M2):
            outs, draws = [q] * len(p.outputs), noises(p, [DRAW])
            plain = q is F32 and precisions == (F32,)
            ys = run(p, "" if plain else "x", [x.cuda() for x in xs], outs, p.constants, draws)
            assert all(same(y.cpu(), r) for y, r in zip(ys, reference(p, xs, outs, p.constants, [DRAW]), strict=True))
            if precisions == (q,) and q in NATIVE.values() and name != "drawn":
                ys = run(p, "a" if q is F16 else "b", [x.cuda() for x in xs], outs, p.constants, draws)
                right = reference(p, xs, outs, p.constants, [DRAW], rounded=q)
                assert all(same(y.cpu(), r) for y, r in zip(ys, right, strict=True))


@gpu
@pytest.mark.parametrize("shape", ((5, 33), (1, 1), (4096, 768), (3, 50_304), (70_001, 65)))
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in PROMISED])
def test_gpu_sums_and_functions(name, shape, monkeypatch):
    p = PROGRAMS[name]
    for q in (F16, BF16, F32):
        xs = [
            x.cuda()
            for x in operands(
                p,
                shape,
                make=lambda *s, seed: torch.rand(*s, generator=torch.Generator().manual_seed(seed)) + 0.1,
                precisions=(q,),
            )
        ]
        outs, results = [q] * len(p.outputs), []
        for blocks in (1, 132, 1056):
            monkeypatch.setattr(fuse, "blocks_of", lambda device: blocks)
            results.append(run(p, "" if q is F32 else "x", xs, outs, p.constants))
        assert all(same(a.cpu(), b.cpu()) for other in results[1:] for a, b in zip(results[0], other))
        assert all(
            bounded(p, y, r, q) for y, r in zip(results[0], reference(p, xs, outs, p.constants, [DRAW]), strict=True)
        )


@gpu
def test_gpu_functions_are_within_2_ulp():
    for op in ("exp", "tanh", "sigmoid"):
        assert ulps(op, 3_000_000, "cuda") <= 2
    x = torch.linspace(1e-3, 20, 1_000_007)
    (mine,) = run(capture(log, "element"), "", [x.cuda()], [F32], [])
    assert ((mine.cpu().double() - x.double().log()).abs() / F32.ulp(x.log()).double()).max() <= 2


@gpu
def test_gpu_more_than_2_to_the_31_elements():
    n = 2**31 + 5
    x = torch.full((n,), 1.5, dtype=torch.float16, device="cuda")
    draw = Draw(DRAW.key, 0, DRAW.limit)
    (y,) = run(ENGINE["dropout"].program, "x", [x], [F16], [2.0], [draw.key.a, draw.start, draw.limit])
    tail = evaluate(
        ENGINE["dropout"].program, [x[-1000:].float().cpu()], [2.0], [Draw(DRAW.key, n - 1000, DRAW.limit)]
    )[0]
    assert same(y[-1000:].cpu(), tail.half()) and abs((y[: 10**6] == 0).float().mean().item() - 0.3) < 0.01


@gpu
def test_gpu_a_side_stream_is_waited_for_and_its_tensors_are_held():
    side, wrong, a = torch.cuda.Stream(), 0, torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(side):
        for i in range(200):
            x = (a @ a)[0] * 0 + float(i)
            (y,) = run(ENGINE["scale"].program, "", [x], [F32], [2.0])
            wrong += int((y != 2 * i).sum().item() > 0)
    for i in range(200):  # allocated on the default stream, read on the side stream, given back at once
        x = torch.full((1 << 20,), float(i), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            (a @ a).sum()
            (y,) = run(ENGINE["scale"].program, "", [x], [F32], [1.0])
        del x
        torch.full((1 << 20,), -1.0, device="cuda")
        side.synchronize()
        wrong += int((y != i).sum().item() > 0)
    assert wrong == 0


@gpu
def test_gpu_the_operator_compiles_without_a_graph_break_and_keeps_its_bits():
    table_for("cuda")
    f = ENGINE["swiglu"]
    step = torch.compile(lambda x, g: fused(f, x, g, p=F16), fullgraph=True, backend="aot_eager")
    x, g = (torch.randn(64, 80, device="cuda").half().requires_grad_() for _ in range(2))
    results = []
    for call in (step, lambda x, g: fused(f, x, g, p=F16)):
        y = call(x, g)
        results.append([y, *torch.autograd.grad(y, (x, g), torch.ones_like(y))])
    assert all(same(a.detach().cpu(), b.detach().cpu()) for a, b in zip(*results))


@gpu
def test_gpu_bad_operands_are_refused_in_words():
    p, x = ENGINE["div"].program, torch.zeros(4, 4, device="cuda")
    with pytest.raises(ValueError, match="not contiguous"):
        run(p, "", [x.t(), x], [F32], [])
    with pytest.raises(ValueError, match="several devices"):
        run(p, "", [x, x.cpu()], [F32], [])
    with pytest.raises(ValueError, match="must be"):
        run(p, "", [x, x[0]], [F32], [])
