"""Dropout is a pure function of key and global index: whole batches, their parts, threads, ranks, recomputation."""

import pytest
import torch
from f16lab import ops
from f16lab.device import ALL_BOUNDARY, open_device, table_for, using_table
from f16lab.precision import BF16, F16, F32, convert
from f16lab.rounding import Key, Purpose, noise

open_device("cpu")


def key(seed: int = 1, step: int = 0, name: str = "blocks.0.mlp", micro: int = 0) -> Key:
    return Key.of(seed, step, Purpose.DROPOUT, name, micro)


def mask(shape: tuple[int, ...], k: Key, start: int = 0, rate: float = 0.25, p=F32) -> torch.Tensor:
    """Which elements are kept."""
    return ops.dropout(torch.ones(shape, dtype=p.dtype), rate, p=p, key=k, start=start) != 0


@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_a_batch_and_its_parts_have_one_mask(p):
    whole, sample = mask((8, 33, 17), key(), p=p), 33 * 17
    for cut in (1, 3, 4):
        parts = [mask((len(x), 33, 17), key(), start=i * cut * sample, p=p) for i, x in enumerate(whole.split(cut))]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole, mask((8, 33, 17), key(), p=F32))  # and the precision has no say
    assert torch.equal(whole.flatten(), mask((8 * sample,), key(), p=p))  # nor the shape


def test_a_batch_far_into_a_long_run_still_has_its_own_mask():
    """Indices beyond 2^32: the high half of the index counts."""
    far = 2**32 + 5
    assert torch.equal(mask((3000,), key(), start=far)[1000:], mask((2000,), key(), start=far + 1000))
    assert not torch.equal(mask((3000,), key(), start=far), mask((3000,), key(), start=5))
    across = mask((4000,), key(), start=2**32 - 2000)
    assert torch.equal(across[2000:], mask((2000,), key(), start=2**32))


def test_the_number_of_threads_has_no_say():
    before, masks = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            masks.append(mask((64, 5000), key()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("rate", (0.01, 0.1, 0.5, 0.9))
def test_the_share_is_the_rate(rate):
    """A binomial count within five standard deviations, and its mean value kept."""
    n = 200_000
    kept = mask((n,), key(), rate=rate).sum().item()
    assert abs(kept - n * (1 - rate)) < 5 * (n * rate * (1 - rate)) ** 0.5
    y = ops.dropout(torch.ones(n), rate, p=F32, key=key())
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - rate)).item()}


STREAMS = {
    "another layer": dict(name="blocks.1.mlp"),
    "another step": dict(step=1),
    "another micro-step": dict(micro=1),
    "another seed": dict(seed=2),
    "a far step": dict(step=100_000),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("shift", (0, 1, 1024))
def test_streams_are_uncorrelated(name, shift):
    n, rate = 100_000, 0.3
    a, b = mask((n + shift,), key(), rate=rate)[shift:].double(), mask((n,), key(**STREAMS[name]), rate=rate).double()
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert abs(correlation) < 5 / n**0.5


@pytest.mark.parametrize("shift", (1, 2, 17, 1024))
def test_a_stream_is_uncorrelated_with_its_own_neighbours(shift):
    x = mask((100_000 + shift,), key(), rate=0.3).double()
    assert abs(torch.corrcoef(torch.stack([x[shift:], x[:-shift]]))[0, 1].item()) < 5 / 100_000**0.5


def test_the_mask_is_the_documented_comparison():
    """Dropped where the unsigned noise is below rate · 2^32."""
    n = noise(key(), 7, 5000).to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(mask((5000,), key(), start=7, rate=0.3), n >= round(0.3 * 2**32))


@pytest.mark.parametrize("table", (table_for("cpu"), ALL_BOUNDARY), ids=("table", "boundary"))
@pytest.mark.parametrize("p", (F16, BF16, F32), ids=str)
def test_the_gradient_passes_where_the_value_does(p, table):
    x = convert(torch.randn(40, 50), p).requires_grad_()
    with using_table(table):
        y = ops.dropout(x, 0.3, p=p, key=key())
        y.backward(torch.ones_like(y))
    kept = mask((40, 50), key(), rate=0.3)
    assert torch.equal(x.grad != 0, kept)
    assert torch.equal(x.grad[kept], torch.full((int(kept.sum()),), 1 / 0.7).to(p.dtype))
    assert torch.equal(y.detach(), convert(x.detach().float() * kept * (1 / 0.7), p))


def test_rate_zero_is_a_cast_and_no_more():
    x = torch.randn(5)
    assert ops.dropout(x, 0.0, p=F32, key=key()) is x
    assert (
        ops.dropout(x, 0, p=F16, key=key()).dtype is torch.float16
        and ops.dropout(x.half(), 0.0, key=key()).dtype is torch.float16
    )


def test_almost_everything_can_be_dropped_and_no_samples_be_given():
    assert not mask((10_000,), key(), rate=1 - 2**-40).any()
    assert mask((0, 5), key()).shape == (0, 5)


@pytest.mark.parametrize("rate", (1, 1.5, -0.1, float("nan")))
def test_rates_that_are_none(rate):
    with pytest.raises(ValueError, match="allowed is 0 ≤ rate < 1"):
        ops.dropout(torch.ones(3), rate, p=F32, key=key())
