"""Many ranks as threads of one process: the same data, the same decisions, and the same bits in both stages."""

import hashlib
import math
import threading
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import Parameter
from train_runs import small, source

from f16lab.adamw import AdamWConfig
from f16lab.cast import Ledger, cast
from f16lab.events import EventRecord, RunEnded, StepRecord
from f16lab.grads import BLOCK, FlatLayout
from f16lab.groups import own_blocks
from f16lab.nn import named_parameters_once
from f16lab.optim import AdamW, merge_states
from f16lab.parallel import RankFailed, Ranks, agree, in_threads
from f16lab.precision import BF16, F16, F32, F64
from f16lab.profile import PrecisionProfile
from f16lab.reduction import Reducer, Wire, bytes_per_rank, cuts, plan_buckets, reduce_blocks
from f16lab.resume import keep_in, resume
from f16lab.state import digest
from f16lab.train import Trainer, evaluate, steps

WORLDS = (2, 3, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int16, torch.bool)


def weights(t: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in named_parameters_once(t.model)}


def weights_hash(t: Trainer) -> str:
    return hashlib.sha256(
        b"".join(p.view(-1).view(torch.uint8).numpy().tobytes() for p in weights(t).values())
    ).hexdigest()


def make(ranks: Ranks, profile: str = "f32", stage: int = 0, **changes) -> Trainer:
    """A trainer on 12 micro-batches a step, one window each, in small buckets."""
    shape = dict(batch=1, accumulate=12, ledger=False, zero_stage=stage, bucket=0.01)
    return Trainer(small(profile, **{**shape, **changes}), source(), ranks=ranks)


# ---------------------------------------------------------------- exchanges
@pytest.mark.parametrize("world", WORLDS)
def test_exchanges_carry_every_bit_of_every_type(world):
    def work(ranks):
        out = []
        for dtype in DTYPES:
            bits = (
                torch.arange(ranks.rank, ranks.rank + 16 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(4, 4)
            )
            got = ranks.gather(bits)
            counts = [4 if r == world - 1 else 0 for r in range(world)]  # all to the last rank
            last = ranks.rank == world - 1
            sent = ranks.exchange(
                bits.new_empty(4 * world if last else 0, 4), bits, [4 if last else 0] * world, counts
            )
            out.append((got.view(torch.uint8).clone(), sent.view(torch.uint8).clone()))
        return out

    found = in_threads(world, work)
    for i, dtype in enumerate(DTYPES):
        right = torch.cat([torch.arange(r, r + 16 * dtype.itemsize, dtype=torch.uint8) for r in range(world)])
        assert all(torch.equal(rank[i][0].flatten(), right) for rank in found)
        assert torch.equal(found[-1][i][1].flatten(), right) and not found[0][i][1].numel()


def test_texts_of_any_length_and_alphabet():
    said = ["", "ein Wort", "語" * 1000]
    assert in_threads(3, lambda r: r.texts(said[r.rank])) == [said] * 3


def test_an_error_in_one_thread_is_the_one_that_is_raised():
    def work(ranks):
        if ranks.rank == 1:
            raise KeyError("mine")
        ranks.rows([1.0])

    with pytest.raises(KeyError, match="mine"):
        in_threads(3, work, seconds=1)


# ---------------------------------------------------------------- sums
@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_sums_are_in_rank_order_for_any_cut_stage_and_wire(world):
    """Against the sum by hand; other orders give other bits, so that a change of order would be seen."""
    blocks = 3 * world
    g = [torch.randn(blocks, BLOCK, generator=torch.Generator().manual_seed(r)) for r in range(world)]

    def work(ranks, stage, p, ends):
        flat = g[ranks.rank].clone()
        wire = Wire(p, F32, tuple(torch.empty(blocks, BLOCK, dtype=p.dtype) for _ in range(2)), "test")
        for start, stop in zip(ends, ends[1:]):
            reduce_blocks(flat, start, stop, wire, ranks, stage)
        return ranks.gather(flat[own_blocks(blocks, ranks.rank, world)].clone()) if stage else flat

    for p in (F32, BF16, F16) if world < 5 else (F32,):
        sent = [cast(x, p).float() for x in g]
        total = sent[0].clone()
        for x in sent[1:]:
            total += x
        right = cast(cast(total, p), F32)
        backwards = sum(reversed(sent[:-1]), sent[-1])
        assert p is not F32 or world == 2 or not torch.equal(total, backwards)
        for stage in (0, 1):
            for ends in ([0, blocks], [0, world, blocks]):
                found = in_threads(world, partial(work, stage=stage, p=p, ends=ends))
                assert all(torch.equal(x, right) for x in found), (p, stage, ends)


def test_an_f16_wire_overflows_only_where_one_rank_would():
    """40000 as the mean of four ranks: each sends a quarter of it. 70000 is too much for f16 on one rank as well."""

    def work(ranks, mean):
        flat = torch.full((4, BLOCK), mean / 4)
        reduce_blocks(
            flat, 0, 4, Wire(F16, F32, tuple(torch.empty(4, BLOCK, dtype=F16.dtype) for _ in range(2)), ""), ranks, 0
        )
        return flat

    assert all((x == 40000).all() for x in in_threads(4, partial(work, mean=40000.0)))
    assert all(torch.isinf(x).all() for x in in_threads(4, partial(work, mean=70000.0)))


def test_a_reference_run_is_summed_in_f64():
    def work(ranks):
        flat = torch.full((2, BLOCK), 1.0 if ranks.rank == 0 else 2.0**-40, dtype=torch.float64)
        reduce_blocks(
            flat, 0, 2, Wire(F64, F64, tuple(torch.empty(2, BLOCK, dtype=F64.dtype) for _ in range(2)), ""), ranks, 0
        )
        return flat[0, 0].item()

    assert in_threads(2, work) == [1 + 2.0**-40] * 2


# ---------------------------------------------------------------- buckets
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_buckets_cover_every_block_once_in_multiples_of_the_world(world, limit):
    sizes = (5000, 1, 70_000, 1024, 1025, 3, 40_000)
    layout = FlatLayout(tuple("abcdefg"), tuple((n,) for n in sizes), world)
    found = cuts(layout, world, limit)
    assert found[0] == layout.blocks and found[-1] == 0 and found == sorted(set(found), reverse=True)
    assert all(a % world == 0 for a in found)
    assert all(
        a - b <= 2 * max(limit, world) + max(sizes) // BLOCK // max(1, limit) + world
        for a, b in zip(found, found[1:])
    )


def tensors_of(sizes: tuple[int, ...], profile: str, ranks: Ranks, stage: int) -> AdamW:
    """An optimizer over made-up tensors of these sizes."""
    p = PrecisionProfile.parse(profile)
    values = {f"w{i}": torch.randn(n, generator=torch.Generator().manual_seed(n)) for i, n in enumerate(sizes)}
    params = {name: Parameter(cast(x, p.param)) for name, x in values.items()}
    share = dict(rank=ranks.rank, world=ranks.world, gather=ranks.gather) if stage else {}
    return AdamW(params.items(), p.at, values, AdamWConfig(), multiple=ranks.world, **share)


def test_buckets_leave_in_the_order_of_backward():
    plan = plan_buckets(tensors_of((3000, 3000, 3000), "f32", Ranks(), 0), 1, [3])
    assert [sorted(b.names) for b in plan] == [["w2"], ["w1"], ["w0"]]


def exact_run(
    ranks: Ranks, sizes: tuple[int, ...], stage: int, profile: str = "bf16_sr", n: int = 3
) -> list[torch.Tensor]:
    """Weights after each step on this rank's share of 168 samples with whole numbers, whose sums are exact."""
    optimizer = tensors_of(sizes, profile, ranks, stage)
    reducer, out = Reducer(optimizer, ranks, PrecisionProfile.parse(profile).at, stage, 1), []
    for step in range(n):
        optimizer.zero_grad()
        xs = torch.randint(-1, 2, (168, sum(sizes)), generator=torch.Generator().manual_seed(step)).float()
        mine = xs[ranks.rank :: ranks.world].sum(0).split(sizes)
        with reducer.last():
            sum((p.float() * x).sum() for p, x in zip(optimizer.params.values(), mine)).backward()
        optimizer.step(0.1, step, 1 / max(1.0, optimizer.grad_stats().norm))
        reducer.share_weights()
        out.append(torch.cat([p.detach().clone() for p in optimizer.params.values()]))
    kept = sum(len(group.m) for group in optimizer.buffers)
    assert kept == sum(group.layout.blocks for group in optimizer.buffers) // (ranks.world if stage else 1)
    reducer.close()
    return out


@pytest.mark.parametrize("count", [1, 19, 57, 72])
def test_any_number_of_parameters_on_any_number_of_ranks(count):
    right = exact_run(Ranks(), (count,), 0)
    pieces = (count // 3, 1, count - count // 3 - 1) if count > 2 else (1,)
    apart = exact_run(Ranks(), pieces, 0)
    for world in (2, 3, 4, 7, 8):
        for stage, sizes, expected in ((0, (count,), right), (1, (count,), right), (1, pieces, apart)):
            for rank in in_threads(world, lambda r: exact_run(r, sizes, stage, n=2)):
                assert all(torch.equal(a, b) for a, b in zip(rank, expected)), (world, stage, sizes)


@pytest.mark.parametrize("profile", ["bf16_sr", "bf16", "all_f16", "bf16_sr,rounding=kahan"])
def test_the_same_reduced_gradients_give_the_same_bits_for_any_sharding(profile):
    """Stochastic rounding of weights and moments, scales, norms: all as on one rank."""
    sizes = (5000, 7, 3000, 1024, 2049)

    def work(ranks):
        optimizer = tensors_of(sizes, profile, ranks, 1)
        for step in range(4):
            for group in optimizer.buffers:
                group.grads.flat.copy_(
                    torch.randn(group.grads.flat.shape, generator=torch.Generator().manual_seed(step))
                )
                group.grads.flat[group.layout.starts[-1] :] = 0  # padding depends on the number of ranks
                for name in group.layout.names:
                    group.layout.view(group.grads.flat, name).mul_(0.01)
            stats = optimizer.grad_stats()
            optimizer.step(1e-2, step, 1 / stats.norm)
            for group in optimizer.buffers:
                ranks.gather_into(group.flat, group.flat[group.own])
        tensors, plain = optimizer.state()
        stats = [(s.name, s.efficiency, s.lost) for s in optimizer.stats()]
        return (
            stats,
            {n: p.detach().clone() for n, p in optimizer.params.items()},
            ({n: t.clone() for n, t in tensors.items()}, plain),
        )

    # the same gradient elements whatever the padding: rows are drawn one after the other
    found = {world: in_threads(world, work) for world in (1, 2, 3, 5, 8)}
    stats, params, state = found[1][0]
    for world, ranks in found.items():
        merged = merge_states([r[2] for r in ranks])
        assert all(r[0] == stats for r in ranks)
        assert all(torch.equal(r[1][n], params[n]) for r in ranks for n in params), world
        assert merged[0].keys() == state[0].keys() and all(torch.equal(merged[0][n], state[0][n]) for n in state[0])


# ---------------------------------------------------------------- runs
PER_STEP = ("loss", "grad_norm", "clip", "skipped", "loss_scale")


def recorded(ranks: Ranks, profile: str, stage: int, n: int = 4, **changes) -> dict:
    """A short run: records, a hash of the weights after each step, the whole state, an evaluation."""
    t = make(ranks, profile, stage, **changes)
    records, hashes = [], []
    for _ in range(n):
        records.append(t.step())
        hashes.append(weights_hash(t))
    whole = t.whole_state()
    parts = t.state()
    return dict(
        numbers=[tuple(getattr(r, f) for f in PER_STEP) for r in records],
        hashes=hashes,
        digest=digest(whole),
        whole=whole.copy(),
        part=parts.copy(),
        held_out=evaluate(t).loss,
        records=records,
        weights=weights(t),
    )


@pytest.mark.parametrize("profile", ["f32", "f16", "bf16_llmc", "bf16,reduce=f16", "all_f16"])
def test_replicas_are_equal_at_each_step_and_zero_is_ddp_bit_for_bit(profile):
    changes = dict(dropout=0.1, weight_decay=0.1, clip=0.5, meters_every=2)
    alone = recorded(Ranks(), profile, 0, **changes)
    for world in WORLDS:
        ddp, zero = (in_threads(world, lambda r: recorded(r, profile, stage, **changes)) for stage in (0, 1))
        first = ddp[0]
        for run in (*ddp, *zero):
            assert run["hashes"] == first["hashes"] and run["numbers"] == first["numbers"]
            assert run["digest"] == first["digest"] and run["held_out"] == first["held_out"]
        assert first["numbers"][0][0] == alone["numbers"][0][0]  # the loss of the first step, to the bit
        assert abs(first["numbers"][-1][0] - alone["numbers"][-1][0]) < (1e-5 if profile == "f32" else 2e-2)
        merged = merge_states(
            [
                (
                    {
                        k.removeprefix("optimizer."): t
                        for k, t in r["part"].tensors.items()
                        if k.startswith("optimizer.")
                    },
                    r["part"].values["optimizer"],
                )
                for r in zero
            ]
        )
        whole = zero[0]["whole"]
        assert merged[1] == whole.values["optimizer"]
        assert all(torch.equal(t, whole.tensors[f"optimizer.{k}"]) for k, t in merged[0].items())
        assert {r.tensors for r in zero[0]["records"]} == {r.tensors for r in ddp[0]["records"]}  # meters too


def test_one_two_three_and_four_ranks_see_the_same_samples_and_nearly_the_same_weights():
    seen: dict[tuple[int, int], list[int]] = {}

    def work(ranks):
        t = make(ranks, "f32", 0, lr=1e-3)
        loader, batch = t.inputs.train, t.inputs.train.batch

        def spy(k):
            seen.setdefault((ranks.world, t.step_number), []).append(
                (k, tuple(loader.rows(batch(k).samples)[1].flatten().tolist()))
            )
            return batch(k)

        loader.batch = spy
        for _ in range(5):
            t.step()
        return weights(t)

    found = {world: in_threads(world, work)[0] for world in (1, 2, 3, 4)}
    for step in range(5):
        assert sorted(seen[1, step]) == sorted(seen[2, step]) == sorted(seen[3, step]) == sorted(seen[4, step])
    assert max((found[w][n] - found[1][n]).abs().max() for w in WORLDS for n in found[1]) <= 3e-6


def test_two_ranks_with_four_micro_steps_are_one_process_with_the_whole_batch():
    """2 x 4 x 1 against 1 x 1 x 8, five steps: weights within 1e-6, one set of collectives a step."""

    def work(ranks, batch, accumulate):
        t = make(ranks, batch=batch, accumulate=accumulate, lr=1e-3)
        for _ in range(5):
            t.step()
        return weights(t)

    whole, (shared, replica) = work(Ranks(), 8, 1), in_threads(2, partial(work, batch=1, accumulate=8))
    assert all(torch.equal(shared[n], replica[n]) for n in whole)
    assert max((shared[n] - whole[n]).abs().max() for n in whole) <= 1e-6


def test_the_schedule_runs_on_loop_steps_whatever_the_number_of_ranks():
    """Cosine, 100 steps, no warm-up: the rate of step 25 is 8.5355e-4 on one rank and on four."""
    for world in (1, 4):
        for window in (4, 12):
            t = in_threads(world, lambda r: make(r, lr=1e-3, schedule="cosine", steps=100, accumulate=window))[0]
            assert t.schedule.at(25) == pytest.approx(8.5355e-4, rel=1e-4)


def test_reductions_start_in_the_last_micro_step_only_and_overlap_it():
    def work(ranks):
        t = make(ranks, layers=2, accumulate=8)
        t.reducer.spans, before = [], []
        original = t.reducer.queue.arm
        t.reducer.queue.arm = lambda: (before.append(len(t.reducer.spans)), original())
        for _ in range(3):
            t.step()
        return before, len(t.reducer.queue.buckets), len(t.reducer.spans)

    for before, buckets, spans in in_threads(2, work):
        assert buckets > 3 and before == [0, buckets, 2 * buckets] and spans == 3 * buckets


def test_a_tensor_without_a_gradient_is_reduced_as_zero_and_an_error_leaves_nothing_behind():
    def work(ranks):
        optimizer = tensors_of((3000, 3000), "f32", ranks, 0)
        reducer = Reducer(optimizer, ranks, PrecisionProfile.parse("f32").at, 0, 1)
        used = optimizer.params["w1"]
        with pytest.raises(ZeroDivisionError):
            with reducer.last():
                1 / 0
        optimizer.zero_grad()
        with reducer.last():
            used.sum().backward()
        return [p.grad.sum().item() for p in optimizer.params.values()]

    assert in_threads(2, work) == [[0.0, 6000.0]] * 2


def test_an_optimizer_of_another_stage_is_refused():
    optimizer = tensors_of((10,), "f32", Ranks(), 0)
    with pytest.raises(ValueError, match="stage 2: allowed are 0"):
        Reducer(optimizer, Ranks(), PrecisionProfile.parse("f32").at, 2)

    def work(ranks):
        Reducer(tensors_of((10,), "f32", ranks, 0), ranks, PrecisionProfile.parse("f32").at, 1)

    with pytest.raises(ValueError, match="it with rank="):
        in_threads(2, work)


def test_different_wires_in_one_buffer_take_the_one_that_holds_both():
    def work(ranks):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            t = make(ranks, "f32,reduce=bf16;blocks.**:reduce=f16")
        return t.reducer.wires[0].precision, [str(w.message) for w in heard]

    found = in_threads(2, work)
    assert {p for p, _ in found} == {F32} and any("bf16, f16" in text for _, texts in found for text in texts)


def test_casts_for_the_wire_are_recorded():
    def work(ranks):
        with Ledger() as ledger:
            make(ranks, "f32,reduce=bf16", 1).step()
            ranks.rows([0])
            return [(r.operand, r.src, r.dst, r.reason) for r in ledger.rows() if r.op == "reduce"]

    assert ("grad", "f32", "bf16", "operand") in in_threads(2, work)[0]


# ---------------------------------------------------------------- decisions
def test_the_norm_of_two_shards():
    """Owned squares 20 and 100: norm √120 on both ranks, clip factor 1/√120, in either stage."""

    def work(ranks, stage):
        optimizer = tensors_of((2 * BLOCK,), "f32", ranks, stage)
        flat = optimizer.buffers[0].grads.flat
        flat[0, 0], flat[1, 0] = math.sqrt(20), 10
        if stage:
            flat[1 - ranks.rank] = math.nan  # not its own: must not matter
        return optimizer.grad_stats().norm

    for stage in (0, 1):
        assert in_threads(2, partial(work, stage=stage)) == [pytest.approx(math.sqrt(120), rel=1e-7)] * 2


@pytest.mark.parametrize("stage", [0, 1])
def test_an_overflow_on_one_rank_is_skipped_by_all(stage):
    def work(ranks):
        t = make(ranks, "f16", stage)
        for _ in range(2):
            t.step()
        before, state = weights_hash(t), t.whole_state().copy()
        p = t.optimizer.params["wpe.weight"]
        hook = p.register_hook(lambda g: torch.full_like(g, math.inf) if ranks.rank == ranks.world - 1 else g)
        record = t.step()
        hook.remove()
        same = all(torch.equal(x, state.tensors[n]) for n, x in t.whole_state().tensors.items())
        return (
            record.skipped,
            record.skip_reason,
            weights_hash(t) == before,
            same,
            t.gate.loss_scale.scale / record.loss_scale,
            t.optimizer.first_nonfinite() == "wpe.weight",
            math.isfinite(record.grad_norm),
        )

    assert in_threads(3, work) == [(True, "non-finite", True, True, 0.5, True, False)] * 3


def test_an_outlier_on_one_rank_is_skipped_by_all():
    def work(ranks):
        t = make(ranks, accumulate=4, skip_norm_z=1.2)
        t.gate = replace(t.gate, norm_outlier=replace(t.gate.norm_outlier, window=4))
        for _ in range(4):
            t.step()
        hook = t.optimizer.params["wte.weight"].register_hook(lambda g: g * 1e4 if ranks.rank == 1 else g)
        record = t.step()
        hook.remove()
        return record.skip_reason, digest(t.whole_state())

    found = in_threads(2, work)
    assert found[0] == found[1] and found[0][0] == "outlier"


def test_a_wish_to_stop_on_one_rank_stops_all_after_the_same_step():
    def work(ranks):
        t, seen = make(ranks, steps=50, accumulate=3), []
        for record in steps(t):
            seen.append(record)
            if isinstance(record, StepRecord) and (ranks.rank, record.step) == (2, 4):
                t.stop("SIGTERM")
        return [r.step for r in seen if isinstance(r, StepRecord)], seen[-1]

    found = in_threads(3, work)
    assert found[0] == found[1] == found[2] and found[0][1] == RunEnded(6, "stopped", "SIGTERM on rank 2")


def test_commands_of_rank_0_are_followed_by_all_at_the_same_step():
    """A learning rate, a pause with something told meanwhile, an end."""

    def work(ranks):
        t, seen = make(ranks, steps=50, accumulate=2), []
        script = {
            1: [("set", "lr=0.5")],
            2: [("pause", ""), ("nonsense", "")],
            5: [("set", "lr=0.25"), ("resume", "")],
            7: [("stop", "")],
        }
        asked = iter(range(100))

        def commands():
            return script.get(next(asked), [])

        def forbidden():
            raise AssertionError("only rank 0 reads commands")

        t.bus.subscribe(seen.append)
        records = list(steps(t, commands if ranks.rank == 0 else forbidden))
        return (
            [(r.step, r.lr) for r in records if isinstance(r, StepRecord)],
            records[-1],
            [r.text for r in seen if isinstance(r, EventRecord) and r.kind == "command"],
        )

    found = in_threads(2, work)
    assert found[0] == found[1]
    rates, end, said = found[0]
    assert end.message == "stop command" and [lr for _, lr in rates][:2] == [3e-3, 0.5] and rates[-1][1] == 0.25
    assert len(said) == 3 and "nonsense" in said[1]


def test_a_signal_during_a_pause_ends_it():
    def work(ranks):
        t = make(ranks, steps=50, accumulate=2)
        asked = iter([[("pause", "")]])
        if ranks.rank == 1:
            threading.Timer(0.5, lambda: t.stop("SIGINT")).start()
        return list(steps(t, lambda: next(asked, [])))[-1]

    found = in_threads(2, work)
    assert found[0] == found[1] and found[0].status == "stopped" and found[0].step == 0


@pytest.mark.parametrize("world", WORLDS)
def test_an_evaluation_has_the_same_bits_on_any_number_of_ranks(world):
    def work(ranks, batches):
        return evaluate(make(ranks, eval_batches=batches))

    for batches in (1, 7, 0):
        assert in_threads(world, partial(work, batches=batches)) == [work(Ranks(), batches)] * world


def test_a_step_without_targets_is_no_step_on_any_rank():
    def work(ranks):
        t = make(ranks, accumulate=2)
        t.inputs.train.target_tokens = lambda first=None, count=None: 0
        record = t.step()
        return record.skip_reason, math.isnan(record.loss)

    assert in_threads(2, work) == [("no targets", True)] * 2


def test_memory_and_time_of_each_rank_are_in_the_records():
    records = in_threads(2, lambda r: make(r).step())
    assert all({"rank0.memory", "rank1.memory", "rank0.seconds", "rank1.seconds"} <= r.extra.keys() for r in records)
    assert records[0].extra["rank1.memory"] == records[1].extra["rank1.memory"] > 1e7


# ---------------------------------------------------------------- equal at the start
def test_ranks_that_start_from_other_weights_are_refused():
    def work(ranks):
        given = weights(make(Ranks()))
        if ranks.rank == 1:
            next(iter(given.values())).view(-1)[0] += 1e-6
        Trainer(small(batch=1, accumulate=2), source(), weights=given, ranks=ranks)

    with pytest.raises(ValueError, match="rank 1 differs from rank 0 in the initial weights"):
        in_threads(2, work)


def test_ranks_with_another_recipe_or_other_data_are_refused():
    def recipe(ranks):
        make(ranks, lr=1e-3 * (1 + ranks.rank))

    with pytest.raises(ValueError, match="rank 1 differs from rank 0 in the recipe"):
        in_threads(2, recipe)

    def data(ranks):
        Trainer(small(batch=1, accumulate=2), source(12_000 + ranks.rank), ranks=ranks)

    with pytest.raises(ValueError, match="rank 1 differs from rank 0 in the data"):
        in_threads(2, data)
    with pytest.raises(ValueError, match="rank 2"):
        in_threads(3, lambda r: agree(r, {"x": str(r.rank // 2)}))


def test_micro_batches_that_cannot_be_shared_are_refused_before_anything_is_built():
    with pytest.raises(ValueError, match="4 micro-batches a step cannot be shared by 3 ranks"):
        in_threads(3, lambda r: make(r, accumulate=4))


def test_ranks_in_different_steps_are_told():
    def work(ranks):
        t = make(ranks, accumulate=2)
        t.step_number += ranks.rank
        t.step()

    with pytest.raises(RankFailed, match="rank 1 is in step 1, rank 0 in 0"):
        in_threads(2, work)


# ---------------------------------------------------------------- state
def run_on(world: int, stage: int, profile: str, n: int, state=None):
    """(digest at the start, after n steps, the whole state) of a run that goes on from `state`."""

    def work(ranks):
        t = make(ranks, profile, stage, dropout=0.1)
        if state is not None:
            t.load_state(state)
        start = t.digest()
        for _ in range(n):
            t.step()
        return start, t.digest(), t.whole_state().copy()

    found = in_threads(world, work)
    assert len({f[:2] for f in found}) == 1
    return found[0]


@pytest.mark.parametrize("profile", ["bf16", "all_f16"])
def test_a_state_moves_between_numbers_of_ranks_and_stages_without_a_bit(profile):
    """The digest after loading is that before saving, on every path; on equal ranks the next steps are equal too."""
    _, saved, state = run_on(2, 1, profile, 3)
    straight = {world: run_on(world, 0, profile, 2, state)[1] for world in (1, 2, 3, 4)}
    for world in (1, 2, 4):
        for stage in (0, 1):
            start, end, after = run_on(world, stage, profile, 2, state)
            assert start == saved and end == straight[world], (world, stage)
            assert run_on(4 // world, 1 - stage, profile, 0, after)[0] == end
    assert run_on(2, 0, profile, 5)[1] == straight[2]  # not interrupted


def test_a_part_of_the_state_does_not_pass_for_the_whole():
    def work(ranks):
        t = make(ranks, "bf16", 1)
        t.step()
        return t.state().copy()

    part = in_threads(2, work)[1]
    with pytest.raises(ValueError, match="merge_states"):
        make(Ranks(), "bf16").load_state(part)
    make(Ranks(), "bf16").load_state(in_threads(2, lambda r: make(r, "bf16", 1).whole_state().copy())[1])


def test_bytes_of_a_rank():
    whole, part = (bytes_per_rank(1000, PrecisionProfile.parse("bf16"), 4, stage) for stage in (0, 1))
    assert whole == {"weights": 2000, "gradients": 4000, "state": 12000} and part["state"] == 3000


def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_says_so(tmp_path):
    def work(ranks):
        t = make(ranks, "bf16", 1)
        keep_in(t, tmp_path, None, ranks.rank, ranks.world)
        t.step()
        t.saver.save(t.state(), "test")
        t.saver.close()
        return t.digest()

    saved = in_threads(2, work)
    t = make(Ranks(), "bf16", 1)
    found = resume(t, tmp_path)
    assert found.step == 1 and "ranks was 2 and is 1" in found.notes and [t.digest()] * 2 == saved
