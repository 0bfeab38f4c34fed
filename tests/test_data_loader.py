"""The keyed order and the loader: permutations, windows, worlds, positions."""
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from test_data import squirrel

from f16lab import data as data_module
from f16lab.data import (IGNORE_INDEX, KeyedOrder, TokenData, TokenLoader, keyed_order, locate, micro_steps, rank_share,
                         write_shard)
from f16lab.rounding import Key, Purpose, tensor_id


# ---------------------------------------------------------------- the order
def reference_order(count: int, seed: int, epoch: int) -> list[int]:
    """Swap-or-not, one sample at a time, in Python integers."""
    a = squirrel(tensor_id("order"), squirrel(7 << 16, squirrel(epoch, seed)))
    noise = lambda low, high: squirrel(squirrel(low, a), squirrel(high, a))  # noqa: E731
    order = []
    for x in range(count):
        for r in range(32):
            mirror = (noise(2 * r, 1) * 2**32 + noise(2 * r + 1, 1) - x) % count
            if noise(max(x, mirror), 0) >> r & 1:
                x = mirror
        order.append(x)
    return order


@pytest.mark.parametrize("count, seed, epoch", [(1, 0, 0), (2, 9, 3), (17, 42, 0), (100, 2**32 - 1, 70000), (257, 1, 1)])
def test_order_is_swap_or_not(count, seed, epoch):
    assert KeyedOrder(count, seed).samples(epoch, 0, count).tolist() == reference_order(count, seed, epoch)


def test_order_is_a_permutation_for_every_count():
    for count in (*range(1, 130), 4095, 4096, 4097, 50_000, 70_001):
        samples = KeyedOrder(count, seed=3).samples(1, 0, count)
        assert torch.equal(samples.sort().values, torch.arange(count)), count


def test_the_table_of_noise_changes_nothing(monkeypatch):
    table = KeyedOrder(5000, seed=3).samples(1, 0, 5000)
    monkeypatch.setattr(data_module, "TABLE_SAMPLES", 0)
    assert torch.equal(KeyedOrder(5000, seed=3).samples(1, 0, 5000), table)


def test_order_of_four_billion_needs_no_list():
    order = KeyedOrder(2**32 - 1, seed=3)
    samples = order.samples(0, 4_000_000_000, 4096)
    assert len(samples.unique()) == 4096 and 0 <= samples.min() and samples.max() < 2**32 - 1
    assert (samples > 2**31).float().mean() > 0.4  # no sign trouble
    with pytest.raises(ValueError, match="4294967296"):
        KeyedOrder(2**32).samples(0, 0, 1)


def test_any_part_of_the_order_is_the_same():
    whole = KeyedOrder(9000, seed=5).samples(2, 0, 9000)
    walker = KeyedOrder(9000, seed=5)
    for epoch, low, n in [(2, 8990, 10), (1, 0, 5), (2, 0, 5), (2, 4090, 20), (2, 4095, 1), (2, 100, 8000), (2, 5, 5)]:
        if epoch == 2:
            assert torch.equal(walker.samples(2, low, n), whole[low:low + n])
        else:
            assert not torch.equal(walker.samples(1, low, n), whole[low:low + n])
    for low, n in [(-1, 2), (8999, 2), (9001, 0)]:
        with pytest.raises(ValueError, match="8999"):
            walker.samples(0, low, n)


def test_all_orders_are_equally_likely():
    """24 orders of 4 samples, 2400 epochs: chi-square with 23 degrees of freedom stays below its 0.9999 quantile, 55.2."""
    seen = Counter(tuple(KeyedOrder(4, seed).samples(epoch, 0, 4).tolist()) for seed in range(48) for epoch in range(50))
    assert set(seen) == set(itertools.permutations(range(4)))
    assert sum((n - 100) ** 2 / 100 for n in seen.values()) < 55.2


def test_order_has_no_structure_left():
    n = 20_000
    first, second = (KeyedOrder(n, seed=1).samples(epoch, 0, n) for epoch in (0, 1))
    place = torch.arange(n)
    for a, b in ((first, place), (second, place), (first, second)):
        assert int((a == b).sum()) < 10  # a random permutation has 1 fixed point on average
        r = np.corrcoef(a.numpy(), b.numpy())[0, 1]
        assert abs(r) < 5 / n**0.5
    for order in (first, second):
        assert int(((order[1:] - order[:-1]).abs() == 1).sum()) < 15  # neighbours that stay neighbours: 2 on average
        halves = (order[:n // 2] < n // 2).float().mean()
        assert abs(halves - 0.5) < 5 * 0.5 / (n // 2) ** 0.5


def test_order_depends_on_seed_and_epoch_only():
    key = Key(8, 3, Purpose.DATA, tensor_id("order"))
    assert torch.equal(KeyedOrder(50, 8).samples(3, 0, 50), keyed_order(torch.arange(50), 50, key))
    assert not torch.equal(KeyedOrder(50, 9).samples(3, 0, 50), KeyedOrder(50, 8).samples(3, 0, 50))
    with pytest.raises(ValueError, match="seed"):
        KeyedOrder(50, seed=2**32)


# ---------------------------------------------------------------- windows
def tokens(n: int) -> TokenData:
    return TokenData.of(np.arange(n), 65536, "numbers")


def test_targets_are_inputs_shifted_by_one():
    loader = TokenLoader(tokens(1000), batch=3, context=7, seed=1)
    for k in (0, 5, 46, 47, 400):
        batch = loader.batch(k)
        assert batch.inputs.shape == batch.targets.shape == (3, 7) and batch.inputs.dtype == torch.int64
        assert torch.equal(batch.targets, batch.inputs + 1) and batch.index == k
        assert torch.equal(batch.inputs[:, 0], batch.samples * 7)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n, batch, context, step", [(165, 2, 8, 4), (161, 2, 8, 1), (9, 1, 8, 1), (1000, 5, 3, 7)])
def test_each_token_is_a_target_at_most_once_an_epoch(n, batch, context, step, shuffle):
    loader = TokenLoader(tokens(n), batch, context, seed=2, shuffle=shuffle, step_batches=step)
    steps = (n - 1) // (batch * context * step)
    assert loader.steps_per_epoch() == steps and loader.batches_per_epoch() == steps * step
    for epoch in range(3):
        first = epoch * steps * step
        seen = torch.cat([loader.batch(first + j).targets.flatten() for j in range(steps * step)])
        assert len(seen) == len(seen.unique()) == steps * step * batch * context


def test_steps_per_epoch_for_many_sizes():
    sizes = np.random.default_rng(0)
    for _ in range(300):
        n, batch, context, step = (int(sizes.integers(low, high)) for low, high in ((2, 3000), (1, 9), (1, 40), (1, 9)))
        per_step = batch * context * step
        if (n - 1) // per_step:
            assert TokenLoader(tokens(n), batch, context, step_batches=step).steps_per_epoch() == (n - 1) // per_step
        else:
            with pytest.raises(ValueError):
                TokenLoader(tokens(n), batch, context, step_batches=step)


def test_unshuffled_order_is_that_of_llmc():
    """One file of tokens 0..101, B = 2, T = 4, two ranks: the first tokens of llm.c's successive batches."""
    loader = TokenLoader(tokens(102), batch=2, context=4, shuffle=False, step_batches=2)
    firsts = [[loader.batch(k).inputs[0, 0].item() for step in range(6) for k in loader.rank_batches(rank, 2, 2 * step)]
              for rank in (0, 1)]
    assert firsts == [[0, 16, 32, 48, 64, 80], [8, 24, 40, 56, 72, 88]]


@pytest.mark.parametrize("n", [0, 1, 8])
def test_too_few_tokens_for_a_window(n):
    with pytest.raises(ValueError, match=rf"val: {n} tokens, .* context 8 takes 9"):
        TokenLoader(TokenData.of(range(n), 10, "val"), batch=1, context=8)


def test_the_smallest_data_has_one_window():
    loader = TokenLoader(TokenData.of(range(9), 10), batch=1, context=8, seed=11)
    for k in (0, 1, 77):
        assert loader.batch(k).inputs.tolist() == [[*range(8)]] and loader.batch(k).targets.tolist() == [[*range(1, 9)]]


def test_a_step_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match=r"numbers: 20 samples, one step takes 24 \(4 micro-batches of 6\)"):
        TokenLoader(tokens(165), batch=6, context=8, step_batches=4)
    for wrong in (dict(batch=0), dict(context=0), dict(step_batches=-1), dict(batch=2.0), dict(context=True)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TokenLoader(tokens(165), **{"batch": 2, "context": 8, **wrong})
    with pytest.raises(ValueError, match="-1"):
        TokenLoader(tokens(165), 2, 8).batch(-1)


def test_a_batch_is_a_copy():
    loader = TokenLoader(tokens(165), 2, 8, seed=1)
    before = loader.batch(3)
    kept = [t.clone() for t in (before.inputs, before.targets, before.samples)]
    for tensor in (before.inputs, before.targets, before.samples):
        tensor.zero_()
    again = loader.batch(3)
    assert all(torch.equal(a, b) for a, b in zip(kept, (again.inputs, again.targets, again.samples)))


def test_batches_neither_use_nor_move_global_generators():
    loader = TokenLoader(tokens(165), 2, 8, seed=1)
    expected = loader.batch(4).inputs
    torch.manual_seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    assert torch.equal(TokenLoader(tokens(165), 2, 8, seed=1).batch(4).inputs, expected)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()


def test_a_sweep_begins_at_the_start_and_moves_nothing():
    loader = TokenLoader(tokens(165), 2, 8, shuffle=False)
    loader.position = 5
    for _ in range(2):
        assert [batch.samples.tolist() for batch in loader.sweep()] == [[i, i + 1] for i in range(0, 20, 2)]
    assert len([*loader.sweep(3)]) == 3 and len([*loader.sweep(99)]) == 10 and loader.position == 5


# ---------------------------------------------------------------- worlds
def test_every_world_sees_the_same_tokens():
    loader = TokenLoader(tokens(5000), batch=2, context=16, seed=4, step_batches=12)
    for step in range(2 * loader.steps_per_epoch()):
        want = [loader.batch(k).inputs.tolist() for k in range(12 * step, 12 * step + 12)]
        for world in (1, 2, 3, 4, 6, 12):
            parts = [[loader.batch(k).inputs.tolist() for k in loader.rank_batches(rank, world, 12 * step)]
                     for rank in range(world)]
            assert [parts[i % world][i // world] for i in range(12)] == want


def test_a_step_has_the_same_windows_for_any_micro_batch():
    def step_samples(batch: int, step: int) -> list[int]:
        loader = TokenLoader(tokens(5000), batch, 16, seed=4, step_batches=24 // batch)
        return [int(s) for k in loader.rank_batches(first=step * 24 // batch) for s in loader.batch(k).samples]
    for step in range(20):
        assert step_samples(1, step) == step_samples(2, step) == step_samples(8, step) == step_samples(24, step)


def test_ranks_that_cannot_share_are_refused():
    with pytest.raises(ValueError, match="4 micro-batches .* 3 ranks"):
        rank_share(0, 4, 0, 3)
    for rank, world in ((2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=str(rank)):
            rank_share(0, 4, rank, world)


def test_batch_arithmetic():
    assert micro_steps(524288, 16, 1024, 8) == 4 and micro_steps(524288, 16, 1024, 2) == 16
    with pytest.raises(ValueError, match=r"524288 is 10\.67 .*491520 \(10\) or 540672 \(11\)"):
        micro_steps(524288, 16, 1024, 3)
    with pytest.raises(ValueError, match=r"1000 is 0\.06 .*use 16384 \(1\)"):
        micro_steps(1000, 16, 1024)
    with pytest.raises(ValueError, match="batch is an integer of at least 1, got 0"):
        micro_steps(1000, 0, 1024)


# ---------------------------------------------------------------- targets
def test_target_tokens_are_counted_before_the_step():
    loader = TokenLoader(tokens(165), 2, 8, step_batches=4)
    assert loader.target_tokens() == 64 and loader.target_tokens(0, 3) == 48
    ids = np.random.default_rng(1).integers(0, 3, 2000)
    masked = TokenLoader(TokenData.of(ids, 3), 2, 8, seed=5, step_batches=4, ignore_token=0)
    for first in (0, 4, 120, 124):
        masked.position = first
        batches = [masked.batch(k) for k in range(first, first + 4)]
        assert masked.target_tokens() == sum(int((b.targets != IGNORE_INDEX).sum()) for b in batches) < 64
        for b in batches:
            plain = torch.from_numpy(np.stack([ids[s * 8 + 1:s * 8 + 9] for s in b.samples.tolist()]))
            assert torch.equal(b.targets, torch.where(plain == 0, IGNORE_INDEX, plain)) and bool((b.inputs == 0).any())


def test_a_step_without_targets_counts_zero():
    silent = TokenLoader(TokenData.of([0] * 17, 2), 1, 8, step_batches=2, ignore_token=0)
    assert silent.target_tokens() == 0


# ---------------------------------------------------------------- position
def places(loader: TokenLoader, rank: int, world: int, steps: range) -> list[tuple[int, int]]:
    """(shard, offset) of every window a rank reads in these steps."""
    return [locate(loader.data, int(s) * loader.context) for step in steps
            for k in loader.rank_batches(rank, world, step * loader.step_batches) for s in loader.batch(k).samples]


@pytest.mark.parametrize("world", [1, 2])
def test_resume_reads_what_the_unbroken_run_reads(tmp_path, world):
    """4 micro-steps a step and rank, saved after 3 steps, resumed to step 7, across a shard and an epoch edge."""
    for i, n in enumerate((300, 277)):
        write_shard(tmp_path / f"part_{i}.bin", np.arange(n) + 1000 * i)
    def loader() -> TokenLoader:
        return TokenLoader(TokenData.open(tmp_path / "part_*.bin", 65536), 2, 8 // world, seed=3, step_batches=4 * world)
    unbroken, stopped = loader(), loader()
    assert 4 < unbroken.steps_per_epoch() < 10
    for _ in range(3):
        stopped.advance()
    state = json.loads(json.dumps(stopped.state()))
    resumed = loader()
    resumed.load_state(state)
    for rank in range(world):
        local = [k // world for k in resumed.rank_batches(rank, world)]
        assert local[0] == 12
        read = []
        for _ in range(7):
            read += [locate(resumed.data, int(s) * resumed.context)
                     for k in resumed.rank_batches(rank, world) for s in resumed.batch(k).samples]
            resumed.advance()
        assert read == places(unbroken, rank, world, range(3, 10)) and {shard for shard, _ in read} == {0, 1}
        resumed.load_state(state)
    epoch = range(unbroken.steps_per_epoch())
    all_places = [place for rank in range(world) for place in places(unbroken, rank, world, epoch)]
    assert len(all_places) == len(set(all_places))
    again = [place for rank in range(world) for place in places(unbroken, rank, world, range(len(epoch), 2 * len(epoch)))]
    assert again != all_places and len(again) == len(set(again))


def test_a_position_in_other_data_is_refused():
    saved = TokenLoader(tokens(1000), 2, 8, seed=1, step_batches=4)
    saved.advance()
    other = TokenData.of(np.arange(1000)[::-1], 65536)
    for name, loader in {
        "sha256": TokenLoader(other, 2, 8, seed=1, step_batches=4),
        "seed": TokenLoader(tokens(1000), 2, 8, seed=2, step_batches=4),
        "shuffle": TokenLoader(tokens(1000), 2, 8, seed=1, shuffle=False, step_batches=4),
        "samples": TokenLoader(tokens(1000), 2, 4, seed=1, step_batches=4),
    }.items():
        with pytest.raises(ValueError, match=f"saved position is for {name}"):
            loader.load_state(saved.state())
        assert loader.position == 0
    with pytest.raises(ValueError, match="None"):
        saved.load_state({"position": 3})


@pytest.mark.parametrize("epochs, steps", [(0, 3), (2, 3), (1, 0)])
def test_a_position_survives_another_batch(epochs, steps):
    def loader(batch: int, step_batches: int) -> TokenLoader:
        return TokenLoader(tokens(1700), batch, 8, seed=1, step_batches=step_batches)
    old = loader(4, 4)
    old.position = epochs * old.batches_per_epoch() + 4 * steps
    want = [int(s) for k in old.rank_batches() for s in old.batch(k).samples]
    for sizes in ((2, 8), (8, 2), (16, 1), (1, 16)):
        new = loader(*sizes)
        new.load_state(old.state())
        assert [int(s) for k in new.rank_batches() for s in new.batch(k).samples] == want
    larger = loader(8, 4)  # another total batch: same epoch, same place in its order
    larger.load_state(old.state())
    assert [int(s) for k in larger.rank_batches() for s in larger.batch(k).samples][:16] == want


def test_a_position_between_new_batches_is_refused():
    old = TokenLoader(tokens(1700), 4, 8, step_batches=4)
    old.position = 4
    with pytest.raises(ValueError, match="16 samples .* batch 5"):
        TokenLoader(tokens(1700), 5, 8, step_batches=4).load_state(old.state())
