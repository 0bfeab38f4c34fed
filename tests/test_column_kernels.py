"""Column sums and matrices side by side: the kernels' own text on the CPU, bit for bit, and on a GPU where there is one."""

from dataclasses import replace

import pytest
import torch
from cuda_host import kernels_on_host

from f16lab import column_kernels
from f16lab.column_kernels import column_sums, column_sums_kernel, column_sums_plain, side_by_side, side_by_side_kernel
from f16lab.device import ALL_BOUNDARY, open_device, table_for, using_table
from f16lab.ops import split_heads
from f16lab.precision import BF16, F16, F32, F64

gpu = pytest.mark.gpu
SHAPES = [(1, 8), (7, 8), (8, 16), (511, 24), (512, 256), (513, 264), (1300, 40)]


def numbers(n: int, C: int, p=F32, device="cpu") -> torch.Tensor:
    g = torch.Generator().manual_seed(n * 1000 + C)
    return (torch.randn(n, C, generator=g) * torch.logspace(-3, 3, C)).to(p.dtype).to(device)


@pytest.fixture
def on_host(monkeypatch):
    kernels_on_host(monkeypatch)
    with using_table(replace(table_for("cpu"), kernels=True)): yield


@pytest.mark.parametrize("p", (F32, F16, BF16), ids=str)
@pytest.mark.parametrize("n,C", SHAPES)
def test_the_kernel_has_the_bits_of_the_reference(on_host, n, C, p):
    x = numbers(n, C, p)
    assert torch.equal(column_sums_kernel(x), column_sums_plain(x))


def test_the_reference_is_a_sum_in_f32():
    x = numbers(3000, 16)
    exact = x.double().sum(0)
    assert ((column_sums_plain(x).double() - exact).abs() <= x.double().abs().sum(0) * 2.0**-20).all()
    assert torch.equal(column_sums_plain(torch.zeros(0, 4)), torch.zeros(4))


def test_the_bits_do_not_depend_on_the_number_of_blocks(on_host, monkeypatch):
    x = numbers(1600, 512, BF16)
    first = column_sums_kernel(x)
    monkeypatch.setattr(column_kernels, "blocks_of", lambda device: 1)
    assert torch.equal(first, column_sums_kernel(x))


def test_what_the_kernel_does_not_cover_goes_by_torch(on_host, monkeypatch):
    monkeypatch.setattr(column_kernels, "launch", None)  # would fail if it were called
    odd = numbers(20, 7, F16)
    for x in (odd, numbers(6, 8).double(), numbers(8, 6).t(), numbers(0, 8)):
        assert torch.equal(column_sums(x), x.reshape(-1, x.shape[-1]).sum(0, dtype=F64.dtype if x.dtype is F64.dtype else F32.dtype))


@pytest.mark.parametrize("by", (1, 3, 4, 8))
def test_an_address_that_no_word_begins_at_is_copied_first(on_host, by):
    x = numbers(20, 17, F16).flatten()[by:by + 160].view(10, 16)
    assert torch.equal(column_sums(x), column_sums_plain(x))
    parts = (x, x.clone() + 1, numbers(20, 17, F16).flatten()[by + 7:by + 167].view(10, 16))
    assert torch.equal(side_by_side(parts), torch.cat(parts, -1))


@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 5, 40), (3, 7, 768)])
def test_three_matrices_side_by_side(on_host, shape, p):
    parts = tuple(numbers(shape[0] * shape[1], shape[2], p).view(shape) + i for i in range(3))
    assert torch.equal(side_by_side(parts), torch.cat(parts, -1))


def test_heads_come_back_side_by_side(on_host):
    x = torch.randn(2, 6, 3 * 16, requires_grad=True)
    weights = [torch.randn(2, 6, 4, 4).transpose(1, 2) for _ in range(3)]  # as a fused backward returns them
    mine, = torch.autograd.grad(sum((a * w).sum() for a, w in zip(split_heads(x, 3, 4), weights)), x)
    assert torch.equal(mine, torch.cat([w.transpose(1, 2).flatten(2) for w in weights], -1))


@pytest.mark.parametrize("x,words", [(torch.zeros(4, 8), "runs on CUDA"), (torch.zeros(8, 4).t(), "not contiguous")])
def test_bad_input_is_named(x, words):
    with pytest.raises(ValueError, match=words): column_sums_kernel(x)
    with pytest.raises(ValueError, match=words): side_by_side_kernel(x, x.clone() if x.is_contiguous() else x, x)


@gpu
@pytest.mark.parametrize("p", (F32, F16, BF16), ids=str)
@pytest.mark.parametrize("n,C", [*SHAPES, (65_536, 768), (1_000_007, 8)])
def test_on_a_gpu_the_kernel_has_the_bits_of_the_reference(n, C, p):
    open_device("cuda")
    x = numbers(n, C, p)
    assert torch.equal(column_sums(x.cuda()).cpu(), column_sums_plain(x))
    parts = tuple(x.cuda() + i for i in range(3))
    assert torch.equal(side_by_side(parts), torch.cat(parts, -1))
    with using_table(ALL_BOUNDARY, "cuda"): assert torch.equal(column_sums(x.cuda()), x.cuda().sum(0, dtype=torch.float32))
