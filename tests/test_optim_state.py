"""The optimizer's state: complete, plain, mergeable, exact when loaded; and how loads are refused."""
import json
import math

import pytest
import safetensors.torch
import torch
from test_optim import ALL, SHAPES, build, each_profile, on_ranks, run, same, set_grads, snapshot, weights
from torch.nn import Parameter

from f16lab.adamw import AdamWConfig
from f16lab.cast import cast
from f16lab.grads import LossScale, OutlierDetector, StepGate, gate_from_state, gate_state
from f16lab.optim import AdamW, exactly, merge_states
from f16lab.precision import BF16, F16, F32, bits_of
from f16lab.profile import PRESETS

F32_PROFILE = PRESETS["f32"]


def saved(optimizer: AdamW) -> tuple[dict, dict]:
    """The state as it comes back from a file."""
    tensors, plain = optimizer.state()
    raw = safetensors.torch.save({key: x.clone() for key, x in tensors.items()})
    return safetensors.torch.load(raw), json.loads(json.dumps(plain, allow_nan=False))


def with_weights(optimizer: AdamW, source: AdamW) -> AdamW:
    for name, p in optimizer.params.items(): p.data.copy_(source.params[name].detach())
    return optimizer


@each_profile
def test_a_resumed_run_is_the_unbroken_one(profile):  # cases B38, B13
    straight = run(build(profile, wd=0.1, seed=5), range(7), size=0.2)
    half = run(build(profile, wd=0.1, seed=5), range(3), size=0.2)
    resumed = with_weights(build(profile, weights(seed=1), wd=0.1, seed=5), half)
    assert resumed.load_state(*saved(half)) == ()
    assert same(snapshot(half), snapshot(resumed) | {k: v for k, v in snapshot(half).items() if k[1] == "looks"})
    assert same(snapshot(straight), snapshot(run(resumed, range(3, 7), size=0.2)))


def test_state_holds_dtypes_and_no_padding():
    optimizer = run(build(PRESETS["bf16"], {"w": torch.full((3, 5), 1.001), "b": torch.ones(2)}), range(2))
    tensors, plain = optimizer.state()
    assert {k: (x.dtype, tuple(x.shape)) for k, x in tensors.items()} == {
        f"{role}/{name}": (torch.float32, (n,)) for role in ("m", "v", "master") for name, n in (("w", 15), ("b", 2))}
    assert plain["tensors"]["w"] == dict(start=0, stop=15, size=15, t=2, key_step=1, S=1.0, S_next=1.0)
    assert plain["version"] == 1 and plain["config"]["beta2"] == 0.95 and plain["seed"] == 0
    assert set(build(PRESETS["bf16_sr"].with_(rounding="kahan")).state()[0]) == {f"{r}/{n}" for r in ("m", "v", "compensation") for n in SHAPES}


def test_counters_follow_applied_updates_and_their_steps():
    optimizer = build(PRESETS["bf16"])
    for step in (0, 3, 4, 9):  # others were skipped
        set_grads(optimizer, step)
        optimizer.step(1e-3, step)
    entry = optimizer.state()[1]["tensors"]["wte.weight"]
    assert (entry["t"], entry["key_step"]) == (4, 9)
    resumed = with_weights(build(PRESETS["bf16"]), optimizer)
    resumed.load_state(*saved(optimizer))
    again = resumed.reround_from_master()
    assert all(torch.equal(bits_of(x), bits_of(optimizer.params[name].detach().reshape(-1))) for name, x in again.items())


# ---------------------------------------------------------------- ranks
@pytest.mark.parametrize("profile", [PRESETS["bf16"], PRESETS["all_f16"]], ids=["bf16", "all_f16"])
@pytest.mark.parametrize("old, new", [(1, 2), (2, 1), (2, 3), (3, 4), (4, 2)])
def test_state_moves_between_numbers_of_ranks(profile, old, new):  # case B35
    one = run(build(profile), range(3), size=0.2)
    before = on_ranks(old, lambda rank, gather: run(build(profile, rank=rank, world=old, gather=gather), range(3), size=0.2))
    merged = merge_states([saved(o) for o in before])
    want = saved(one)
    assert merged[0].keys() == want[0].keys() and all(torch.equal(x, merged[0][k]) for k, x in want[0].items())
    assert merged[1]["tensors"] == want[1]["tensors"]

    def go_on(rank, gather):
        optimizer = with_weights(build(profile, weights(seed=2), rank=rank, world=new, gather=gather), one)
        assert optimizer.load_state(*merged) == ()
        return run(optimizer, range(3, 5), size=0.2)

    after = merge_states([saved(o) for o in on_ranks(new, go_on)])
    want = saved(run(one, range(3, 5), size=0.2))
    assert all(torch.equal(x, after[0][k]) for k, x in want[0].items()) and after[1]["tensors"] == want[1]["tensors"]


def test_wrong_sets_of_ranks_are_refused():
    states = [saved(o) for o in on_ranks(3, lambda rank, gather: run(build(PRESETS["bf16"], rank=rank, world=3, gather=gather), range(2)))]
    with pytest.raises(ValueError, match=r"ranks \[0, 2\].*3 ranks"): merge_states([states[0], states[2]])
    later = json.loads(json.dumps(states[1][1]))
    for entry in later["tensors"].values(): entry["t"] = 9
    with pytest.raises(ValueError, match="do not fit"): merge_states([states[0], (states[1][0], later), states[2]])
    with pytest.raises(ValueError, match="merge_states"): build(PRESETS["bf16"]).load_state(*states[0])
    tensors, plain = merge_states(states)
    with pytest.raises(ValueError, match="no second moments|no v"): build(PRESETS["bf16"]).load_state({k: x for k, x in tensors.items() if k[0] != "v"}, plain)


# ---------------------------------------------------------------- refusals and notes
def test_foreign_states_are_refused():
    optimizer = build(F32_PROFILE)
    tensors, plain = saved(optimizer)
    with pytest.raises(ValueError, match="version 7"): optimizer.load_state(tensors, {**plain, "version": 7})
    with pytest.raises(ValueError, match="another model.*other"): optimizer.load_state(*saved(build(F32_PROFILE, {"other": torch.ones(3)})))
    with pytest.raises(ValueError, match="another model.*w"): build(F32_PROFILE, {"w": torch.ones(4)}).load_state(
        *saved(build(F32_PROFILE, {"w": torch.ones(5)})))


def test_a_refused_load_leaves_everything_alone():
    source, target = run(build(F32_PROFILE), range(3)), run(build(F32_PROFILE.with_(optimizer=F16)), range(1))
    before = snapshot(target)
    with pytest.raises(ValueError, match="entries would change"): target.load_state(*saved(source))
    assert same(before, snapshot(target))


def test_changed_hyper_parameters_and_seeds_are_reported():
    source = run(build(F32_PROFILE, wd=0.1, seed=3), range(2))
    notes = build(F32_PROFILE, wd=0.0, seed=4).load_state(*saved(source))
    assert notes == ("seed was 3 and is 4", "weight_decay was 0.1 and is 0.0")


# ---------------------------------------------------------------- other precisions
@pytest.mark.parametrize("old", ["all_f16", "f16 state", "bf16 state"])
def test_moments_widen_exactly(old):
    profile = {"all_f16": PRESETS["all_f16"].with_(param=F32), "f16 state": F32_PROFILE.with_(optimizer=F16), "bf16 state": ALL["bf16 state"]}[old]
    source = run(build(profile), range(4), size=0.2)
    wide = with_weights(build(F32_PROFILE), source)
    wide.load_state(*saved(source))
    narrow, group = source.buffers[0], wide.buffers[0]
    for name in SHAPES:
        S = 1.0 if narrow.S is None else narrow.S[narrow.layout.index[name]].double()
        for role, k in (("m", S), ("v", S * S)):
            a, b = (g.layout.view(getattr(g, role), name).double() for g in (narrow, group))
            assert torch.equal(a / k, b)


def test_another_scale_is_exact_or_refused_with_the_count():
    auto = F32_PROFILE.with_(optimizer=F16)
    source = build(auto, {"w": torch.zeros(8)})
    source.params["w"].grad.fill_(0.01)
    source.step(1e-3, 0)
    for scale in (2.0**8, 2.0**11):
        target = with_weights(build(auto.with_(state_scale=f"2^{int(math.log2(scale))}"), {"w": torch.zeros(8)}), source)
        target.load_state(*saved(source))
        assert target.buffers[0].S.item() == scale
        assert torch.equal(target.buffers[0].v[0, :8].double() / scale**2, source.buffers[0].v[0, :8].double() / 2.0**20)
    source.buffers[0].v[0, :8] = 1.0
    source.buffers[0].v[0, 1], source.buffers[0].v[0, 2] = 2.0**-24, 3.0e-5
    with pytest.raises(ValueError, match="v/w: 2 of 8 entries"): build(auto.with_(state_scale="none"), {"w": torch.zeros(8)}).load_state(*saved(source))


def test_a_scale_chosen_by_the_rule_goes_on_where_it_was():
    auto = F32_PROFILE.with_(optimizer=F16)
    source = run(build(auto), range(6), size=0.7)
    assert (source.buffers[0].S < 1024).any()
    target = with_weights(build(auto), source)
    target.load_state(*saved(source))
    assert torch.equal(target.buffers[0].S, source.buffers[0].S) and torch.equal(target.buffers[0].S_next, source.buffers[0].S_next)


def test_a_master_may_be_gained_and_lost():
    sr, kahan, master = PRESETS["bf16_sr"], PRESETS["bf16_sr"].with_(rounding="kahan"), PRESETS["bf16"]
    source = run(build(kahan), range(3), lr=1e-5)
    target = with_weights(build(master), source)
    assert target.load_state(*saved(source)) == ("master made from the weights and their compensation", "saved compensation not used")
    a, b = source.buffers[0], target.buffers[0]
    assert torch.equal(b.master, cast(a.flat, F32) + cast(a.compensation, F32))
    plain = with_weights(build(master), run(build(sr), range(3)))
    assert plain.load_state(*saved(run(build(sr), range(3)))) == ("master made from the weights",)
    source = run(build(master.with_(rounding="nearest")), range(3), lr=1e-5)
    target = with_weights(build(kahan), source)
    assert target.load_state(*saved(source)) == ("compensation made from the master", "saved master not used")
    a, b = source.buffers[0], target.buffers[0]
    total = cast(b.flat, F32).double() + cast(b.compensation, F32).double()
    assert torch.allclose(total, a.master.double(), rtol=2.0**-16, atol=1e-12)
    fresh = with_weights(build(kahan), run(build(sr), range(1)))
    assert fresh.load_state(*saved(run(build(sr), range(1)))) == ("compensation starts at zero",) and not fresh.buffers[0].compensation.any()


def test_exactly_counts_what_would_change():
    x = torch.tensor([1.0, 1 + 2.0**-11, 70_000.0, -0.0])
    assert torch.equal(exactly(x[[0, 3]], F16, 1.0, "x"), cast(x[[0, 3]], F16))
    with pytest.raises(ValueError, match="2 of 4 entries"): exactly(x, F16, 1.0, "x")
    assert exactly(cast(x[:1], BF16), BF16, 1.0, "x").dtype is torch.bfloat16


# ---------------------------------------------------------------- a whole loop, with skips, resumed in the middle
def test_gate_and_optimizer_resume_together():
    def loop(optimizer, gate, steps):
        losses = []
        for step in steps:
            optimizer.zero_grad()
            w, target = optimizer.params["w"], torch.linspace(-1, 1, 256).view(16, 16)
            loss = ((cast(w, F32) - target) ** 2).mean() * (1 + step % 3)
            if step == 9: loss = loss * math.inf
            (loss * gate.loss_scale.scale).backward()
            decision, gate = gate.decide(optimizer.grad_stats(gate.loss_scale.scale), min(loss.item(), 1e9))
            if not decision.skip: optimizer.step(1e-2, step, decision.factor)
            losses.append((decision.skip, loss.item()))
        return losses, gate

    def fresh():
        start = {"w": torch.zeros(16, 16)}
        return AdamW([("w", Parameter(cast(start["w"], F16)))], PRESETS["all_f16"].at, start, AdamWConfig(), 1)

    start = StepGate(LossScale("dynamic", 2.0**10, interval=4), OutlierDetector(window=8), OutlierDetector(window=8))
    straight = fresh()
    whole, _ = loop(straight, start, range(16))
    broken = fresh()
    first, gate = loop(broken, start, range(7))
    resumed = with_weights(fresh(), broken)
    resumed.load_state(*saved(broken))
    second, _ = loop(resumed, gate_from_state(json.loads(json.dumps(gate_state(gate)))), range(7, 16))
    assert first + second == whole and same(snapshot(straight), snapshot(resumed))
    assert [skip for skip, _ in whole].count("non-finite") == 1
