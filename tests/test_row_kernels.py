"""Norms and GELU by kernel against the reference: run on the CPU by `cuda_host`, and on a GPU where there is one."""

import itertools
import math
import re
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from cuda_host import launch_on_host

from f16lab import operators, ops, row_kernels, rows
from f16lab.cast import Ledger, collect_gradient
from f16lab.device import ALL_BOUNDARY, DispatchTable, open_device, using_table
from f16lab.launch import kernel_source
from f16lab.nn import Block, BlockSpec, Norm, initialise, sum_and_norm
from f16lab.ops import deviation
from f16lab.precision import BF16, F16, F32, Precision, bits_of, convert
from f16lab.profile import PRESETS
from f16lab.row_kernels import CHUNKS, chunk_rows, gelu_backward, gelu_forward, norm_backward, norm_forward, tiling

open_device("cpu")
gpu = pytest.mark.gpu
KERNELS = DispatchTable((), kernels=True)
STORED = (F16, BF16, F32)
# largest deviation of an f32 result, relative to the largest of its row or column: sums of f32 numbers in another order
CLOSE = 3e-6


def emulate(monkeypatch) -> list[int]:
    """Launch on the host; what `empty` returns is poisoned. Returns the list in which each launch notes its blocks."""
    blocks = []

    def launch(file, expression, device, n, *arguments, threads=256):
        blocks.append(n)
        launch_on_host(file, expression, n, *arguments, threads=threads)

    def lax(kernel, tensors, written=()):
        for name, t in tensors.items():
            if not t.is_contiguous(): raise ValueError(f"{kernel}: {name} is not contiguous")
            if name in written and t.is_floating_point(): t.fill_(math.nan)
        return torch.device("cpu")

    monkeypatch.setattr(row_kernels, "launch", launch)
    monkeypatch.setattr(row_kernels, "check_tensors", lax)
    return blocks


@pytest.fixture
def emulated(monkeypatch):
    """The kernels run on CPU tensors, and the dispatch table of the CPU has kernels."""
    blocks = emulate(monkeypatch)
    with using_table(KERNELS): yield blocks


@pytest.fixture
def rows_alone(monkeypatch):
    """The same in a model, whose other operators must not look for kernels of theirs."""
    blocks, allowed = emulate(monkeypatch), operators._kernel_allowed
    monkeypatch.setattr(rows, "table_for", lambda kind: KERNELS)
    monkeypatch.setattr(operators, "_kernel_allowed", lambda op, *rest: op.name in ("gelu", "layer_norm") and
                        allowed(op, KERNELS, *rest[1:]))
    return blocks


def normal(*shape: int, seed: int = 0, p=F32) -> torch.Tensor:
    return convert(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), p)


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, `by` elements behind an aligned address."""
    return torch.cat([x.new_zeros(by), x.flatten()])[by:].view(x.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool: return a.dtype is b.dtype and torch.equal(bits_of(a), bits_of(b))


def one_step(a: torch.Tensor, b: torch.Tensor, p, share: float = 0.02) -> None:
    """Numbers of `p` that were f32 and CLOSE: equal, but for a share that was rounded to the neighbour."""
    assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan())
    if a.numel() == 0: return
    apart = (a.double() - b.double()).abs().nan_to_num(0)
    top = max(b.double().abs().nan_to_num(0).max().item(), 0.1)
    assert apart.max() <= (CLOSE if p is F32 else 2 * p.ulp(1.0)) * top
    if p is not F32: assert (apart > 0).sum() <= max(3, share * a.numel())


# ---------------------------------------------------------------- GELU
def exact_gelu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and slope in f64, without the cancellation of 1 + tanh."""
    x, c = x.double(), 2 * math.sqrt(2 / math.pi)
    s, rest = (torch.sigmoid(sign * c * (x + 0.044715 * x**3)) for sign in (1, -1))
    return x * s, s + x * s * rest * c * (1 + 3 * 0.044715 * x * x)


def ulps(y: torch.Tensor, right: torch.Tensor) -> float:
    step = torch.exp2(torch.floor(torch.log2(right.abs())) - 23)
    return ((y.double() - right).abs() / step).max().item()


def check_gelu(device: str) -> None:
    """In f32: ≤ 3 ulp of the value for x ≥ −1; below, e^−2u carries the rounding of u times 2u; slope within 2^-22."""
    for low, high, most in ((0.0, 8.0, 2.6), (-1.0, -1e-3, 3.0), (-2.0, -1.0, 8), (-4.0, -2.0, 20), (-9.0, -4.0, 180)):
        x = torch.linspace(low, high, 40_003)[1:].contiguous()
        value, slope = exact_gelu(x)
        y, d = (t.cpu() for t in (gelu_forward(x.to(device), torch.float32),
                                  gelu_backward(torch.ones_like(x).to(device), x.to(device), torch.float32)))
        assert ulps(y, value) <= most
        assert (d - slope).abs().max() <= 2.0**-22
        tail = F.gelu(x, approximate="tanh")
        if high <= -2: assert ulps(tail, value) > 100 * ulps(y, value)  # what the reference loses there


def test_gelu_is_near_the_exact_value(emulated): check_gelu("cpu")


@gpu
def test_gelu_is_near_the_exact_value_on_a_gpu(): check_gelu("cuda")


def check_special(device: str) -> None:
    """inf, NaN, zeros, subnormal and large numbers as the reference has them."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-40, 1e10, -1e10, 3e38, -3e38, -20.0, 20.0,
                      -10.03, -10.1, 10.02, 1.0])
    for p in STORED:
        a = convert(x, p)
        one = torch.ones_like(a).to(device)
        y, d = gelu_forward(a.to(device), p.dtype).cpu(), gelu_backward(one, a.to(device), p.dtype).cpu()
        right = convert(F.gelu(a.float(), approximate="tanh"), p)
        known = ~right.isnan()  # the sign of a NaN is the processor's affair
        known[:3] = False
        assert torch.equal(y.isnan(), right.isnan()) and torch.equal(y.signbit()[known], right.signbit()[known])
        assert torch.allclose(y.nan_to_num(7), right.nan_to_num(7), rtol=0, atol=1e-36)  # 1e-37 at −10, there 0
        slope = convert(torch.ops.aten.gelu_backward(one.cpu().float(), a.float(), approximate="tanh"), p)
        assert torch.equal(d.isnan(), slope.isnan())
        assert torch.allclose(d.nan_to_num(7), slope.nan_to_num(7), rtol=0, atol=1e-35)


def test_gelu_of_special_numbers(emulated): check_special("cpu")


@gpu
def test_gelu_of_special_numbers_on_a_gpu(): check_special("cuda")


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_gelu_as_an_operator(emulated, p):
    x = normal(100_003, p=p).requires_grad_()
    g = normal(100_003, seed=1, p=p)
    with Ledger() as ledger:
        y = ops.gelu(x, p=p)
        (d,) = torch.autograd.grad(y, x, g)
    assert ledger.count == 0 and len(emulated) == 2
    with using_table(ALL_BOUNDARY):
        right = ops.gelu(x, p=p)
        (right_d,) = torch.autograd.grad(right, x, g)
    one_step(y.detach(), right.detach(), p, 2e-3)
    one_step(d, right_d, p, 2e-3)


def check_sizes(device: str, sizes) -> None:
    """Any length, address and pair of precisions: the f32 result of the aligned whole, rounded."""
    whole = normal(max(sizes))
    for n, by in itertools.product(sizes, (0, 1)):
        x, g = whole[:n].to(device), shifted(whole[:n].to(device), 1)
        half, brain = (shifted(convert(x, p), by) for p in (F16, BF16))
        wide, slope = gelu_forward(convert(half, F32), torch.float32), gelu_backward(g, brain, torch.float32)
        assert same(gelu_forward(half, torch.float16).cpu(), convert(wide.cpu(), F16)), (n, by)
        assert same(gelu_backward(g, brain, torch.bfloat16).cpu(), convert(slope.cpu(), BF16)), (n, by)


def test_gelu_of_any_size_and_address(emulated): check_sizes("cpu", (0, 1, 7, 8, 31, 32, 33, 1023, 4097))


@gpu
def test_gelu_of_any_size_and_address_on_a_gpu(): check_sizes("cuda", (0, 1, 7, 8, 31, 32, 33, 1023, 1_000_007))


# ---------------------------------------------------------------- norms
# shape; compute, stable and out; norms alone, too. Each is another instance of the kernels: rows by 32, 64, 128 or 256
# threads, one to four packs, whole or single loads, longer than registers.
MIXED, BRAIN, HALF = (F16, F32, F16), (BF16, BF16, BF16), (F16, F16, F16)
CASES = (((3, 8), MIXED, True), ((2, 3, 65), BRAIN, True), ((33, 768), BRAIN, False), ((4, 1000), HALF, False),
         ((2, 6200), MIXED, False), ((5, 3072), BRAIN, False), ((2, 8200), MIXED, False),
         ((9, 8), (F16, F32, F32), False), ((0, 16), MIXED, True), ((1, 1), BRAIN, False))
WIDTHS = ((5, 64), (1, 1), (7, 1000), (5, 1600), (1000, 3072), (5, 8192), (3, 12288))
MORE = [(shape, slots, False) for shape in WIDTHS for slots in (MIXED, BRAIN)]
MORE += [((33, 768), slots, True) for slots in (MIXED, HALF, (BF16, F32, BF16))]


def leaves(shape: tuple, p, weights, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
    """x, r, w, b; w and b parameters that collect in f32."""
    x, r = (normal(*shape, seed=seed + k, p=p) + (0.5 if k else 0) for k in (0, 1))
    w, b = (convert(normal(shape[-1], seed=seed + k) * 0.3 + (k == 2), weights) for k in (2, 3))
    w, b = (collect_gradient(torch.nn.Parameter(t.to(device)), F32) for t in (w, b))
    return [x.to(device).requires_grad_(), r.to(device).requires_grad_(), w, b]


def both_ways(f, tensors: list[torch.Tensor], kernels: DispatchTable, device: str) -> tuple[list, list, Ledger]:
    """Outputs and gradients of f(*tensors) with kernels and by the reference, and the casts of the first."""
    out = []
    for table in (kernels, ALL_BOUNDARY):
        with using_table(table, device), Ledger() as ledger:
            ys = f(*tensors)
            gs = [convert(normal(*y.shape, seed=9 + i) * 0.1, Precision.of(y)).to(device) for i, y in enumerate(ys)]
            grads = torch.autograd.grad(ys, tensors, gs, allow_unused=True)
        out.append(([*(y.detach().cpu() for y in ys), *(None if g is None else g.cpu() for g in grads)], ledger))
    return out[0][0], out[1][0], out[0][1]


def agree(mine: list, right: list, rounded: list) -> None:
    """Each result against the reference, in the precision it was rounded to."""
    for a, b, p in zip(mine, right, rounded, strict=True): one_step(a, b, p)


def check_norms(shape: tuple, slots: tuple, device: str, kernels: DispatchTable) -> None:
    """LayerNorm and RMSNorm alone, with all, some and no parameters."""
    compute, stable, out = slots
    if stable is out is F32: return  # torch's own
    x, _, w, b = leaves(shape, compute, compute if stable is F32 else stable, device=device)
    for norm, params in itertools.product((ops.layer_norm, ops.rms_norm), ([w, b], [w], [])):
        if norm is ops.rms_norm and len(params) == 2: continue
        f = lambda x, *p: [norm(x, *p, p=stable, out=out, layer="n")]
        mine, right, ledger = both_ways(f, [x, *params], kernels, device)
        agree(mine, right, [out, compute, *[stable] * len(params)])
        assert {(c.operand, c.reason) for c in ledger.rows()} <= {(o, "storage") for o in ("weight", "bias")}


def check_residual(shape: tuple, slots: tuple, device: str, kernels: DispatchTable) -> None:
    """The sum has the reference's bits: one addition, one rounding. Nothing is cast but what collects elsewhere."""
    compute, stable, out = slots
    tensors = leaves(shape, compute, compute if stable is F32 else stable, device=device)
    where = dict(p=compute, stable=stable, out=out, layer="block", norm_layer="ln")
    f = lambda *xs: ops.residual_layer_norm(*xs, **where)
    mine, right, ledger = both_ways(f, tensors, kernels, device)
    assert same(mine[0], right[0]) and torch.equal(mine[2], mine[3])
    agree(mine[1:], right[1:], [out, compute, compute, stable, stable])
    assert {(c.layer, c.operand, c.reason) for c in ledger.rows()} <= {("ln", o, "storage") for o in ("weight", "bias")}


@pytest.mark.parametrize("shape, slots, alone", CASES, ids=str)
def test_norms_mean_the_same(emulated, shape, slots, alone):
    if alone: check_norms(shape, slots, "cpu", KERNELS)
    check_residual(shape, slots, "cpu", KERNELS)
    assert emulated or shape[0] == 0


@gpu
@pytest.mark.parametrize("shape, slots, alone", [*CASES, *MORE], ids=str)
def test_norms_mean_the_same_on_a_gpu(shape, slots, alone):
    if alone: check_norms(shape, slots, "cuda", KERNELS)
    check_residual(shape, slots, "cuda", KERNELS)


# ---------------------------------------------------------------- what must not matter
def check_launches(device: str, monkeypatch) -> None:
    """The same bits for any number of blocks and any address; a strided operand is read as what it shows."""
    x, g, later = (normal(300, 64, seed=k, p=BF16).to(device) for k in (0, 1, 2))
    w = normal(64, seed=3, p=BF16).to(device)

    def run(blocks: int, by: int) -> list[torch.Tensor]:
        monkeypatch.setattr(row_kernels, "_BLOCKS", blocks)
        a, up, more = (shifted(t, by) for t in (x, g, later))
        out = norm_forward(a, up, w, w, torch.bfloat16, torch.bfloat16, 1e-5, False)
        grads = norm_backward(up, more, a, *out[2:], w, torch.bfloat16, torch.float32, torch.bfloat16, False)
        return [*out, *grads, gelu_forward(a, torch.bfloat16), gelu_backward(up, a, torch.bfloat16)]

    first = run(2**20, 0)
    for blocks, by in ((1, 0), (3, 0), (2**20, 1)):
        for a, b in zip(run(blocks, by), first, strict=True): assert same(a.cpu(), b.cpu())


def test_blocks_and_addresses_do_not_matter(emulated, monkeypatch): check_launches("cpu", monkeypatch)


@gpu
def test_blocks_and_addresses_do_not_matter_on_a_gpu(monkeypatch): check_launches("cuda", monkeypatch)


def test_strided_operands_are_read_as_they_show(emulated):
    x, w = normal(9, 65, p=BF16).t().requires_grad_(), normal(18, seed=1, p=BF16)[::2]
    with using_table(ALL_BOUNDARY): right = ops.layer_norm(x, w, p=BF16), ops.gelu(x, p=BF16)
    for mine, r in zip((ops.layer_norm(x, w, p=BF16), ops.gelu(x, p=BF16)), right):
        one_step(mine.detach(), r.detach(), BF16)
        one_step(*(torch.autograd.grad(y.sum(), x)[0] for y in (mine, r)), BF16)  # the gradient of a sum is expanded


def test_sums_of_parameters_are_cut_by_rows_alone():
    for n in (0, 1, 4, 5, 3168, 3169, 65_536, 10**6 + 7, 2**31):
        size = chunk_rows(n)
        assert size % 4 == 0 and -(-n // size) <= CHUNKS
    assert -(-65_536 // chunk_rows(65_536)) == 781
    for width in range(1, 9000, 7):
        group, packs, long = tiling(width)
        assert long == (width > 8192) and packs <= 4 and (long or 8 * group * packs >= width > 8 * group * (packs - 1))


# ---------------------------------------------------------------- numbers that break norms
def check_hard_rows(device: str) -> None:
    """A mean a thousand times the spread, equal numbers, an overflowing sum; a NaN stays in its row."""
    made = [1000 + 0.25 * normal(768), torch.full((768,), 3.5), normal(768) * 1e4, normal(768), normal(768, seed=4)]
    hard = torch.stack(made)
    hard[3, 100] = math.nan
    x = convert(hard, F16)
    plain = (None, None, None, torch.float16, torch.float32, 1e-5, False)
    _, n, mean, rstd = (t.cpu() for t in norm_forward(x.to(device), *plain))
    wide = x.double()
    assert torch.equal(mean.isnan(), torch.tensor([False] * 3 + [True, False])) and n[3].isnan().all()
    good = [0, 1, 2, 4]
    right = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    assert (n[0] - right[0]).abs().max() <= 4000 * 2**-23  # the mean has 24 bits, the spread is 4000 times smaller
    assert (n[good] - right[good])[1:].abs().max() <= 2e-6 and n[1].eq(0).all()
    assert (mean[good] / wide.mean(1)[good] - 1).abs().max() <= 2e-6 and rstd[1].item() == pytest.approx(1e-5**-0.5)


def test_rows_that_break_norms(emulated): check_hard_rows("cpu")


@gpu
def test_rows_that_break_norms_on_a_gpu(): check_hard_rows("cuda")


# ---------------------------------------------------------------- as parts of a model
def test_f32_stays_with_torch_and_only_one_result_may_be_used(emulated):
    x, r, w, b = leaves((3, 8), F32, F32)
    y, n = ops.residual_layer_norm(x, r, w, b, p=F32)
    assert not emulated and torch.equal(y, x + r) and torch.equal(n, F.layer_norm(x + r, (8,), w, b))
    x, r, w, b = leaves((3, 8), F16, F16)
    y, n = ops.residual_layer_norm(x, r, w, b, p=F16, stable=F32, out=F16)
    g = normal(3, 8, p=F16)
    (alone,) = torch.autograd.grad(y, x, g, retain_graph=True)
    assert same(alone, g)
    dx, dw = torch.autograd.grad(n, (x, w), g)
    with using_table(ALL_BOUNDARY):
        right = torch.autograd.grad(ops.layer_norm(y.detach().requires_grad_(), w, p=F32, out=F16), w, g)[0]
    assert dx.isfinite().all() and deviation(dw, right) <= CLOSE


@pytest.mark.parametrize("norm", ("pre", "peri"))
def test_blocks_of_a_model(rows_alone, monkeypatch, norm):
    """Two blocks by kernels: the reference within f16's tolerance, no cast around norms, sums and GELU."""
    spec = BlockSpec(channels=8, heads=2, ff=16, norm=norm)
    blocks = [Block(spec, PRESETS["f16"], f"blocks.{i}") for i in (0, 1)]
    last = Norm(8, PRESETS["f16"], "ln_f")
    for i, layer in enumerate((*blocks, last)): initialise(layer, i)
    parameters = [p for block in blocks for p in block.parameters()]
    x = normal(2, 4, 8, p=F16).requires_grad_()

    def run() -> list[torch.Tensor]:
        y = x
        for block in blocks: y = block(y, pending=True)
        h = sum_and_norm(last, y, F16)[1]
        return [h.detach(), *torch.autograd.grad(h, (x, *parameters), normal(2, 4, 8, seed=3, p=F16))]

    with Ledger() as ledger: mine = run()
    launched = len(rows_alone)
    monkeypatch.undo()
    right = run()
    assert launched == len(rows_alone) >= 14 and all(deviation(a, b) <= 2**-8 for a, b in zip(mine, right, strict=True))
    ours = {(r.layer, r.op) for r in ledger.rows() if r.op in ("add", "gelu", "layer_norm")}
    assert not ours, ours


# ---------------------------------------------------------------- what keeps them at memory speed
def test_the_kernels_of_16_bit_models_keep_their_rows_in_registers(tmp_path):
    """No spilled register; a GELU is at most 28 instructions a number, its derivative 34 (sm_90)."""
    nvcc, dump = shutil.which("nvcc"), shutil.which("cuobjdump")
    if nvcc is None or dump is None: pytest.skip("no nvcc and cuobjdump here: the kernels' code cannot be looked at")
    code, stats, four = "const u16*, " * 2, "const float*, const float*", "BF16, BF16, BF16, BF16"
    norms = []
    for flags in ("true, false, 32, 3, false, true", "true, false, 128, 3, false, true"):
        norms.append(f"template __global__ void norm_forward<{four}, BF16, {flags}>({code}u16*, {code}u16*, "
                    "float*, float*, i64, int, float);")
        norms.append(f"template __global__ void norm_backward<{four}, {flags}>({code}const u16*, {stats}, "
                    "const u16*, u16*, float*, i64, i64, int);")
    gelu = [f"template __global__ void gelu{name};" for name in (
        "<BF16, BF16, true>(const u16*, u16*, i64)", f"_backward<BF16, BF16, BF16, true>({code}u16*, i64)")]
    for file, instances in (("layernorm.cu", norms), ("gelu.cu", gelu)):
        source, cubin = tmp_path / file, tmp_path / f"{file}.cubin"
        source.write_text(kernel_source(file) + "\n" + "\n".join(instances))
        done = subprocess.run([nvcc, "-std=c++17", "-arch=sm_90", "--fmad=false", "-cubin", "-Xptxas", "-v",
                               str(source), "-o", str(cubin)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        spills = re.findall(r"(\d+) bytes spill stores", done.stderr)
        assert len(spills) == len(instances) and set(spills) == {"0"}, done.stderr
    said = subprocess.run([dump, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    for part in said.split("Function : ")[1:]:
        hot = len(re.findall(r"\b(?:FFMA|FMUL|FADD|FMNMX|MUFU|F2FP|FSETP)\b", part)) / 16  # two times eight numbers
        assert hot + 3 <= (34 if "backward" in part.splitlines()[0] else 28)  # and shift, unpacking


# ---------------------------------------------------------------- bad input
def test_bad_input_is_refused_in_words(emulated, monkeypatch):
    x, w, mean = torch.zeros(4, 8), torch.ones(8), torch.zeros(4)
    norm = lambda x, r=None, w=None, b=None: norm_forward(x, r, w, b, torch.float16, torch.float16, 1e-5, False)
    with pytest.raises(ValueError, match=r"weight is \[7\] for rows of 8"): norm(x, w=torch.ones(7))
    with pytest.raises(ValueError, match=r"what is added \[4, 1\]"): norm(x, torch.zeros(4, 1))
    with pytest.raises(ValueError, match="one dtype"): norm(x, w=w, b=w.half())
    with pytest.raises(ValueError, match="needs rows"): norm(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="not contiguous"): norm(torch.zeros(8, 8).t())
    with pytest.raises(NotImplementedError, match="no f64; there are f16, bf16, f32"): norm(x.double())
    with pytest.raises(NotImplementedError, match="no e4m3"): gelu_forward(x, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="give one shape"): gelu_backward(x, w, torch.float16)
    with pytest.raises(ValueError, match="later gradient is torch.float32"):
        norm_backward(x, x, x, mean, mean, w, torch.float16, None, None, False)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="runs on CUDA tensors"): norm(x)
    with pytest.raises(ValueError, match="runs on CUDA tensors"): gelu_forward(x, torch.float16)


@gpu
def test_wrong_devices_are_refused():
    x = torch.zeros(4, 8, device="cuda")
    with pytest.raises(ValueError, match="several devices"):
        norm_forward(x, None, torch.ones(8), None, torch.float16, torch.float16, 1e-5, False)
    with pytest.raises(ValueError, match="not contiguous"): gelu_forward(x.t(), torch.float16)


# ---------------------------------------------------------------- large, and on streams
@gpu
def test_more_than_2_to_the_31_elements():
    count, width = 2**31 // 768 + 5, 768
    x = torch.randn(count, width, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    _, n, mean, rstd = norm_forward(x, None, w, w, torch.bfloat16, torch.bfloat16, 1e-5, False)
    dx, dw, db = norm_backward(n, None, x, mean, rstd, w, torch.bfloat16, torch.float32, torch.float32, False)
    y = gelu_forward(x, torch.bfloat16)
    tail = slice(-8, None)
    end, up = x[tail].contiguous(), n[tail].contiguous()
    again = norm_forward(end, None, w, w, torch.bfloat16, torch.bfloat16, 1e-5, False)
    assert same(up.cpu(), again[1].cpu()) and same(y[tail].cpu(), gelu_forward(end, torch.bfloat16).cpu())
    few = norm_backward(up, None, end, *again[2:], w, torch.bfloat16, None, None, False)[0]
    assert same(dx[tail].cpu(), few.cpu())
    exact = sum(part.double().sum(0) for part in n.split(2**18))
    assert deviation(db, exact) <= 1e-5 and dw.isfinite().all()


@gpu
def test_a_side_stream_waits_for_its_producer():
    side, wrong = torch.cuda.Stream(), 0
    a = torch.randn(4096, 4096, device="cuda")
    for i in range(50):
        with torch.cuda.stream(side):
            x = ((a @ a)[:64] * 0 + float(i)).half()
            y, _, mean, _ = norm_forward(x, x, None, None, torch.float16, torch.float16, 1e-5, False)
            wrong += int((y != 2 * i).any()) + int((mean != 2 * i).any())
    assert wrong == 0


@gpu
@pytest.mark.parametrize("p", (F16, BF16), ids=str)
@pytest.mark.parametrize("width", (768, 3072))
def test_a_large_batch_and_its_repetition(p, width):
    """65,536 rows: the f64 result within a rounding, parameters' gradients within 2e-6, and the same bits twice."""
    x, g = (normal(65_536, width, seed=k, p=p).cuda() for k in (0, 1))
    w = convert(normal(width, seed=2), p).cuda()
    run = lambda: norm_forward(x, None, w, w, p.dtype, p.dtype, 1e-5, False)[1:]
    n, mean, rstd = run()
    assert all(same(a.cpu(), b.cpu()) for a, b in zip(run(), (n, mean, rstd)))
    back = lambda: norm_backward(g, None, x, mean, rstd, w, p.dtype, torch.float32, torch.float32, False)
    grads = [back(), back()]
    assert all(same(a.cpu(), b.cpu()) for a, b in zip(*grads))
    wide, up = x.double(), g.double()
    unit = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    one_step(n.cpu(), convert((unit * w.double() + w.double()).float(), p).cpu(), p)
    assert deviation(grads[0][1], (up * unit).sum(0)) <= 2e-6 and deviation(grads[0][2], up.sum(0)) <= 2e-6
