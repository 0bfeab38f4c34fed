"""The operators as a table: how each is called, and what it means in plain torch. A new operator is one line here."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from f16lab import ops
from f16lab.precision import F32, Precision, convert
from f16lab.rounding import Key, Purpose

IDS = torch.tensor([3, 0, 3, 3, 1, 4, 0])
MASK = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])
KEY = Key.of(3, 1, Purpose.DROPOUT, "layer")
KEPT = ops.dropout(torch.ones(4, 5, 7), 0.4, p=F32, key=KEY, start=100) != 0
ROPE = ops.rope_table(5, 6)


@dataclass(frozen=True)
class Case:
    """An operator with its meaning; `plain` takes the same tensors, in f32 or f64, and is torch's own code."""

    name: str
    call: Callable[..., Tensor]  # (*tensors, p=…, layer=…) -> output
    plain: Callable[..., Tensor]  # (*tensors) -> output
    shapes: tuple[tuple[int, ...], ...]  # of the tensors, small: finite differences are taken here
    more: tuple[tuple[tuple[int, ...], ...], ...] = ()  # further shapes: odd, broadcasting, stacked, empty
    positive: bool = False  # domain: numbers in [0.5, 4.5)
    id: str = ""

    @property
    def variants(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return (self.shapes, *self.more)

    def tensors(
        self, shapes: tuple[tuple[int, ...], ...], seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Random operands of these shapes."""
        g = torch.Generator().manual_seed(seed)
        xs = [torch.randn(s, generator=g) for s in shapes]
        if self.positive:
            xs = [x.abs() + 0.5 for x in xs]
        return [x.to(dtype) for x in xs]


def on(x: Tensor, constant: Tensor) -> Tensor:
    """A constant on the device of `x`."""
    return constant.to(x.device)


def rotated(x: Tensor) -> Tensor:
    """RoPE by complex numbers."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.complex(*(t.to(x.dtype) for t in ROPE))
    return torch.cat([z.real, z.imag], -1)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """Softmax by its formula over the visible columns; 0 in a row without any."""
    e = torch.where(mask, torch.exp(torch.where(mask, x, 0) - 2), 0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1, total)


def triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool).tril(x.shape[-1] - x.shape[-2])


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]))
    return torch.softmax(scores.masked_fill(~triangle(scores), -math.inf), -1) @ v


def rms(x: Tensor, *w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], *w, eps=1e-5)


def norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)


def unary(name: str, plain: Callable[[Tensor], Tensor], **options) -> Case:
    return Case(name, getattr(ops, name), plain, ((3, 4),), (((2, 3, 17),), ((65,),), ((0, 5),), ((),)), **options)


def binary(name: str, plain: Callable[[Tensor, Tensor], Tensor], **options) -> Case:
    more = (((2, 1, 17), (3, 1)), ((33,), ()), ((5, 3, 1), (1, 7)), ((4, 65), (4, 65)), ((0, 5), (1, 5)))
    return Case(name, getattr(ops, name), plain, ((3, 4), (3, 4)), more, **options)


CASES = (
    Case(
        "linear",
        ops.linear,
        F.linear,
        ((3, 4), (2, 4), (2,)),
        (((2, 3, 17), (5, 17), (5,)), ((7, 65), (33, 65)), ((1, 1), (1, 1), (1,)), ((0, 4), (2, 4), (2,))),
    ),
    Case(
        "matmul", ops.matmul, torch.matmul, ((3, 4), (4, 2)), (((17, 33), (33, 65)), ((1, 3), (3, 1)), ((0, 3), (3, 2)))
    ),
    Case("matmul", partial(ops.matmul, alpha=0.3), lambda a, b: (a @ b) * 0.3, ((3, 4), (4, 2)), id="matmul-alpha"),
    Case(
        "batched_matmul",
        ops.batched_matmul,
        torch.matmul,
        ((2, 3, 4), (2, 4, 2)),
        (((2, 3, 5, 17), (2, 3, 17, 9)), ((2, 1, 5, 17), (3, 17, 9)), ((0, 3, 4), (0, 4, 2))),
    ),
    Case(
        "batched_matmul",
        partial(ops.batched_matmul, transpose_b=True, alpha=0.25),
        lambda a, b: (a @ b.mT) * 0.25,
        ((2, 3, 4), (2, 2, 4)),
        (((3, 2, 5, 8), (3, 2, 7, 8)),),
        id="batched_matmul-transposed",
    ),
    Case(
        "conv2d",
        partial(ops.conv2d, padding=1, stride=2),
        partial(F.conv2d, padding=1, stride=2),
        ((1, 2, 4, 4), (2, 2, 3, 3), (2,)),
        (((3, 3, 7, 9), (5, 3, 3, 3)), ((0, 2, 4, 4), (2, 2, 3, 3), (2,))),
    ),
    Case("max_pool2d", ops.max_pool2d, partial(F.max_pool2d, kernel_size=2), ((1, 2, 4, 4),), (((3, 2, 7, 9),),)),
    binary("add", torch.add),
    binary("sub", torch.sub),
    binary("mul", torch.mul),
    binary("div", torch.div, positive=True),
    binary("swiglu", lambda x, gate: x * F.silu(gate)),
    Case("scale", lambda x, **p: ops.scale(x, 1 / 3, **p), lambda x: x * (1 / 3), ((3, 4),), (((2, 3, 17),), ((0,),))),
    unary("relu", torch.relu),
    unary("gelu", partial(F.gelu, approximate="tanh")),
    unary("silu", F.silu),
    unary("tanh", torch.tanh),
    unary("sigmoid", torch.sigmoid),
    unary("exp", torch.exp),
    unary("sqrt", torch.sqrt, positive=True),
    Case(
        "dropout",
        lambda x, **p: ops.dropout(x, 0.4, key=KEY, start=100, **p),
        lambda x: x * KEPT * (1 / 0.6),
        ((4, 5, 7),),
    ),
    Case("row_sum", ops.row_sum, lambda x: x.sum(-1), ((3, 4),), (((2, 5, 777),), ((0, 4),))),
    Case("col_sum", ops.col_sum, lambda x: x.flatten(0, -2).sum(0), ((3, 4),), (((2, 5, 777),), ((0, 4),))),
    Case("total", ops.total, torch.sum, ((3, 4),), (((2, 5, 777),), ((0,),))),
    Case("mean", ops.mean, torch.mean, ((3, 4),), (((2, 5, 777),),)),
    Case("cumsum", ops.cumsum, lambda x: x.cumsum(-1), ((3, 4),), (((2, 5, 333),), ((0, 4),))),
    Case(
        "cumsum", lambda x, **p: ops.cumsum(x, 0, **p), lambda x: x.cumsum(0), ((3, 4),), (((65, 3),),), id="cumsum-0"
    ),
    Case("softmax", ops.softmax, lambda x: torch.softmax(x, -1), ((3, 4),), (((2, 3, 65),), ((0, 4),))),
    Case(
        "softmax",
        partial(ops.softmax, causal=True),
        lambda x: torch.softmax(x.masked_fill(~triangle(x), -math.inf), -1),
        ((3, 4),),
        (((2, 2, 17, 17),), ((0, 3, 4),)),
        id="softmax-causal",
    ),
    Case(
        "layer_norm",
        ops.layer_norm,
        norm,
        ((3, 4), (4,), (4,)),
        (((2, 3, 65), (65,), (65,)), ((5, 17),), ((0, 4), (4,), (4,))),
    ),
    Case("rms_norm", ops.rms_norm, rms, ((3, 4), (4,)), (((2, 3, 65), (65,)), ((5, 17),), ((0, 4), (4,)))),
    Case(
        "attention",
        lambda *x, p, **k: ops.attention(*x, p=p, stable=p, **k),
        plain_attention,
        ((1, 2, 3, 4),) * 3,
        (((2, 3, 17, 8),) * 3, ((0, 2, 3, 4),) * 3),
    ),
    Case(
        "gather_rows",
        lambda x, **p: ops.gather_rows(x, on(x, IDS), **p),
        lambda x: F.embedding(on(x, IDS), x),
        ((5, 3),),
        (((9, 17),),),
    ),
    Case(
        "scatter_add_rows",
        lambda x, rows, **p: ops.scatter_add_rows(x, on(x, IDS), rows, **p),
        lambda x, rows: x.index_add(0, on(x, IDS), rows),
        ((5, 3), (7, 3)),
        (((6, 17), (7, 17)),),
    ),
    Case(
        "rope",
        lambda x, **p: ops.rope(x, tuple(on(x, r) for r in ROPE), **p),
        rotated,
        ((2, 5, 6),),
        (((2, 3, 5, 6),), ((0, 5, 6),)),
    ),
)

# Not byte for byte a torch operator of its own, because torch has none: plain is a formula with the same value.
FORMULA = {"rope", "softmax-masked"}
MASKED = Case(
    "softmax",
    lambda x, **p: ops.softmax(x, mask=on(x, MASK), **p),
    partial(masked_softmax, mask=MASK),
    ((2, 3, 5),),
    (((4, 1, 3, 5),),),
    id="softmax-masked",
)
ALL = (*CASES, MASKED)
OPERATORS = {case.name for case in ALL}

# Data movement: the output has the precision and the bits of the source.
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": ops.clone,
    "transpose": ops.transpose,
    "reshape": lambda x: ops.reshape(x, -1),
    "slice_rows": lambda x: ops.slice_rows(x, 1, 3),
    "insert_rows": lambda x: ops.insert_rows(x, 1, x[:2]),
    "transfer": lambda x: ops.transfer(x, "cpu"),
    "split_heads": lambda x: ops.split_heads(x.reshape(1, x.shape[0], -1), 1, 1)[0],
    "merge_heads": lambda x: ops.merge_heads(x.reshape(1, 1, x.shape[0], -1)),
}


class Rounded(torch.autograd.Function):
    """f64 numbers rounded to a precision, gradients rounded to another: where a reference in f64 rounds."""

    @staticmethod
    def forward(ctx, x: Tensor, p: Precision | None, back: Precision | None) -> Tensor:
        ctx.back = back
        return x.clone() if p is None else convert(x, p).double()

    @staticmethod
    def backward(ctx, g: Tensor):
        return g if ctx.back is None else convert(g, ctx.back).double(), None, None


def defined(f: Callable[..., Tensor], p: Precision, *xs: Tensor, out: Precision | None = None) -> Tensor:
    """The definition: operands rounded to p, f in f64, its output rounded once; each gradient rounded once to p."""
    return Rounded.apply(f(*(Rounded.apply(x, p, p) for x in xs)), out or p, p)


def meaning(case: Case, p: Precision) -> Callable[..., Tensor]:
    """What a case computes in f64 with roundings to p; attention is three operators."""
    if case.name != "attention":
        return lambda *xs: defined(case.plain, p, *xs)

    def attention(q, k, v):
        scores = defined(lambda q, k: (q @ k.mT) * (1 / math.sqrt(q.shape[-1])), p, q, k)
        weights = defined(lambda s: torch.softmax(s.masked_fill(~triangle(s), -math.inf), -1), p, scores)
        return defined(torch.matmul, p, weights, v)

    return attention


def with_gradients(f: Callable[..., Tensor], xs: list[Tensor], seed: int = 9) -> tuple[Tensor, list[Tensor]]:
    """f(*leaves) and the gradients of its product with a fixed random tensor; leaves are copies of `xs`."""
    leaves = [x.clone().requires_grad_() for x in xs]
    y = f(*leaves)
    g = torch.randn(
        y.shape, generator=torch.Generator().manual_seed(seed)
    ).half()  # a number of every precision but bf16
    g = convert(convert(g, Precision.parse("bf16")), Precision.of(y))
    return y.detach(), list(torch.autograd.grad(y, leaves, g))
