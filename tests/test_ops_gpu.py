"""The operators on a GPU against the CPU: one meaning, one table of tolerances; and the same bits from run to run."""

import itertools

import op_cases as t
import pytest
import torch
from f16lab import ops
from f16lab.device import ALL_BOUNDARY, ask_device, exact_products, open_device, using_table
from f16lab.ops import TOLERANCE, deviation
from f16lab.precision import BF16, F16, F32, bits_of, convert

pytestmark = pytest.mark.gpu
each_case = pytest.mark.parametrize("case", t.ALL, ids=lambda case: case.id or case.name)
each_precision = pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)


@pytest.fixture(autouse=True)
def switches():
    """IEEE products, as a training step has them."""
    open_device("cuda")
    with exact_products():
        yield


def on_gpu(case: t.Case, xs: list[torch.Tensor], p) -> list[torch.Tensor]:
    """Output and gradients of a case, computed on the GPU with the gradient that `with_gradients` uses on the CPU."""
    leaves = [x.cuda().requires_grad_() for x in xs]
    y = case.call(*leaves, p=p)
    g = convert(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).half(), BF16)
    return [y.detach(), *torch.autograd.grad(y, leaves, convert(g, p).cuda())]


@each_precision
@each_case
def test_cpu_and_gpu_mean_the_same(case, p):
    for seed, shapes in enumerate(case.variants):
        xs = [convert(x, p) for x in case.tensors(shapes, seed)]
        with using_table(ALL_BOUNDARY):
            y, grads = t.with_gradients(lambda *x: case.call(*x, p=p), xs)
        for mine, right in zip(on_gpu(case, xs, p), (y, *grads), strict=True):
            assert mine.dtype is right.dtype and deviation(mine.cpu(), right) <= TOLERANCE[p]


@each_precision
@each_case
def test_the_gpu_repeats_itself_bit_for_bit(case, p):
    xs = [convert(x, p) for x in case.tensors(case.variants[min(1, len(case.variants) - 1)])]
    once, again = on_gpu(case, xs, p), on_gpu(case, xs, p)
    assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("p", (F16, BF16), ids=str)
def test_forcing_the_boundary_on_the_gpu_changes_no_meaning(p):
    for case in t.ALL:
        xs = [convert(x, p) for x in case.tensors(case.shapes)]
        native = on_gpu(case, xs, p)
        with using_table(ALL_BOUNDARY, "cuda"):
            boundary = on_gpu(case, xs, p)
        assert all(deviation(a, b) <= TOLERANCE[p] for a, b in zip(native, boundary, strict=True)), case


@each_precision
def test_a_large_product(p):
    a, b = (
        convert(torch.randn(s, generator=torch.Generator().manual_seed(k)), p)
        for k, s in enumerate(((64, 8192), (8192, 96)))
    )
    y = ops.matmul(a.cuda(), b.cuda(), p=p)
    assert deviation(y.cpu(), convert(a.double() @ b.double(), p)) <= TOLERANCE[p]


@pytest.mark.parametrize("p, out", [(F16, F32), (BF16, BF16), (F32, F32)], ids=str)
def test_the_head(p, out):
    x, w, targets = torch.randn(50, 32), torch.randn(70, 32), torch.randint(0, 64, (50,))
    results = []
    for device in ("cpu", "cuda"):
        leaves = [convert(a, p).detach().clone().to(device).requires_grad_() for a in (x, w)]
        loss = ops.head_cross_entropy(
            *leaves, targets.to(device), p=p, out=out, weight=1 / 50, scale=64.0, classes=64, chunk=16
        )
        loss.value.backward()
        results.append([loss.recorded.cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    assert abs(results[0][0] / results[1][0] - 1) < 1e-6
    assert all(deviation(a, b) <= TOLERANCE[p] for a, b in zip(results[1][1:], results[0][1:]))


def test_products_are_native_on_a_gpu_or_refused_with_a_reason():
    table = ask_device("cuda")
    paths, refused = {key for key, _ in table.paths}, " ".join(name for name, why in table.why if why)
    for op, side, p in itertools.product(("linear", "matmul", "batched_matmul"), ("forward", "backward"), (F16, BF16)):
        assert (op, side, p) in paths or op in refused
    assert {("linear", side, p) for side in ("forward", "backward") for p in (F16, BF16)} <= paths
