"""The optimizer: groups, steps, skips, write-back, sharding, meters."""
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from torch.nn import Parameter

from f16lab.adamw import AdamWConfig
from f16lab.cast import Ledger, assert_no_casts, cast
from f16lab.grads import BLOCK, LossScale, OutlierDetector, StepGate, clip_factor
from f16lab.groups import block_keys, own_blocks, own_noise, slots_of
from f16lab.optim import AdamW, unique_parameters
from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, bits_of
from f16lab.profile import PRESETS, PrecisionProfile
from f16lab.rounding import Key, Purpose, convert_stochastic, noise

F32_PROFILE = PRESETS["f32"]
STATES = {"f32": dict(optimizer=F32), "bf16": dict(optimizer=BF16), "f16 auto": dict(optimizer=F16),
          "f16 S=1024": dict(optimizer=F16, state_scale="2^10"), "f16 unscaled": dict(optimizer=F16, state_scale="none")}
ALL = {**PRESETS, "kahan f16": PRESETS["f16"].with_(rounding="kahan"), "kahan bf16": PRESETS["bf16_sr"].with_(rounding="kahan"),
       "sr f16 state": PRESETS["all_f16"].with_(rounding_state="stochastic"), "bf16 state": PRESETS["f32"].with_(optimizer=BF16),
       "f64": PrecisionProfile(F64, F64, F64, F64, grad=F64), "e5m2": PRESETS["f16"].with_(param=E5M2, rounding="stochastic"),
       "e4m3 master": PRESETS["f16"].with_(param=E4M3, master=F32)}
SHAPES = {"wte.weight": (50, 64), "blocks.0.ln.weight": (64,), "blocks.0.fc.weight": (96, 64), "blocks.0.fc.bias": (96,), "s": ()}
each_profile = pytest.mark.parametrize("profile", ALL.values(), ids=ALL.keys())


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=gen) * 0.05 for name, shape in SHAPES.items()}


def build(profile, start=None, *, wd=0.0, seed=0, **kwargs) -> AdamW:
    start = weights() if start is None else start
    params = [(name, Parameter(cast(x, slots_of(profile.at(name)).storage))) for name, x in start.items()]
    return AdamW(params, profile.at, start, AdamWConfig(weight_decay=wd), seed, **kwargs)


def set_grads(optimizer: AdamW, step: int, size: float = 1e-3) -> None:
    gen = torch.Generator().manual_seed(1000 + step)
    for p in optimizer.params.values(): p.grad.copy_(torch.randn(p.shape, generator=gen) * size)


def run(optimizer: AdamW, steps, lr: float = 1e-3, size: float = 1e-3) -> AdamW:
    for step in steps:
        set_grads(optimizer, step, size)
        optimizer.step(lr, step)
    return optimizer


def snapshot(optimizer: AdamW) -> dict:
    """Everything a step may change, as bits and plain values."""
    out = {}
    for i, g in enumerate(optimizer.buffers):
        for name in ("flat", "m", "v", "master", "compensation", "S", "S_next", "looks"):
            x = getattr(g, name)
            out[i, name] = None if x is None else bits_of(x).clone()
        out[i, "counters"] = (list(g.t), list(g.key_step))
    return out


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[k]) if isinstance(x, torch.Tensor) else x == b[k] for k, x in a.items())


# ---------------------------------------------------------------- parameters and groups
def test_decay_touches_matrices_once():  # case B22
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.ln = torch.nn.Embedding(10, 4), torch.nn.LayerNorm(4)
            self.head, self.fc = torch.nn.Linear(4, 10, bias=False), torch.nn.Linear(4, 3)
            self.head.weight = self.wte.weight
            for w in self.parameters(): w.data.fill_(1)

    model = Model()
    optimizer = AdamW(model.named_parameters(remove_duplicate=False), F32_PROFILE.at, config=AdamWConfig(lr=0.1, weight_decay=0.1))
    optimizer.step(0.1, 0)
    assert torch.allclose(model.wte.weight, torch.full((10, 4), 0.99)) and torch.allclose(model.fc.weight, torch.full((3, 4), 0.99))
    for w in (model.ln.weight, model.ln.bias, model.fc.bias): assert (w == 1).all()
    assert [(r.decay, r.tensors, r.elements) for r in optimizer.groups()] == [(True, 2, 52), (False, 3, 11)]
    assert sum(r.elements for r in optimizer.groups()) == sum(w.numel() for w in model.parameters())


def test_parameters_are_checked():
    w = Parameter(torch.ones(2))
    frozen = Parameter(torch.ones(2), requires_grad=False)
    assert list(unique_parameters([("a", w), ("b", w), ("c", frozen)])) == ["a"]
    with pytest.raises(ValueError, match="no trainable"): unique_parameters([("c", frozen)])
    with pytest.raises(ValueError, match="cpu, meta"): unique_parameters([("a", w), ("b", Parameter(torch.ones(2, device="meta")))])
    with pytest.raises(ValueError, match="build the model with the same profile"): AdamW([("a", w)], PRESETS["f16"].at)
    with pytest.raises(ValueError, match="initial values"): AdamW([("a", Parameter(torch.ones(2, dtype=BF16.dtype)))], PRESETS["bf16"].at)
    with pytest.raises(ValueError, match="same id"): unique_parameters([("costarring", w), ("liquid", Parameter(torch.ones(2)))])


def test_moved_parameters_are_noticed():
    optimizer = build(F32_PROFILE)
    optimizer.params["blocks.0.fc.bias"].data = torch.zeros(96)
    with pytest.raises(RuntimeError, match="blocks.0.fc.bias.*build the optimizer after"): optimizer.step(1e-3, 0)
    with pytest.raises(ValueError, match="seed"): build(F32_PROFILE, seed=-1)


def test_overrides_make_groups():
    profile = PrecisionProfile.parse("f16;blocks.0.fc:param=f32")
    optimizer = build(profile)
    assert [set(g.params) for g in optimizer.buffers] == [{"wte.weight", "blocks.0.ln.weight", "s"}, {"blocks.0.fc.weight", "blocks.0.fc.bias"}]
    run(optimizer, range(2))
    assert optimizer.stats()[2].name == "blocks.0.fc.weight" and [s.name for s in optimizer.stats()] == list(SHAPES)


@each_profile
def test_parameters_are_views_and_the_model_sees_every_step(profile):
    optimizer = build(profile, wd=0.1)
    before = {name: p.detach().clone() for name, p in optimizer.params.items()}
    run(optimizer, range(2), lr=0.1)
    for group in optimizer.buffers:
        for name, p in group.params.items():
            assert p.data_ptr() == group.layout.view(group.flat, name).data_ptr() and (p != before[name]).any()


# ---------------------------------------------------------------- the update itself
def test_f32_run_is_torchs_adamw_to_rounding():
    start = weights()
    optimizer = build(F32_PROFILE, start, wd=0.1)
    theirs = {name: Parameter(x.clone().double()) for name, x in start.items()}
    other = torch.optim.AdamW([{"params": [p for p in theirs.values() if p.dim() >= 2], "weight_decay": 0.1},
                               {"params": [p for p in theirs.values() if p.dim() < 2], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        set_grads(optimizer, step)
        for name, p in theirs.items(): p.grad = optimizer.params[name].grad.double()
        stats = optimizer.grad_stats()
        factor = clip_factor(stats.norm, 0.05)
        assert factor < 1
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.05)
        other.step()
        optimizer.step(1e-3, step, factor)
    for name, p in theirs.items(): assert torch.allclose(optimizer.params[name].double(), p, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("name", STATES)
def test_first_step_has_length_lr_in_every_state_profile(name):  # case B19
    optimizer = build(F32_PROFILE.with_(**STATES[name]), {"w": torch.zeros(3)})
    optimizer.params["w"].grad.copy_(torch.tensor([300.0, 5e-4, 1e-6]))
    optimizer.step(1e-3, 0)
    moves = optimizer.params["w"].detach().abs() / 1e-3
    assert torch.allclose(moves, torch.tensor([1.0, 1.0, 1 / 1.01]), rtol=1e-2)


@pytest.mark.parametrize("name", ["f32", "f16 auto", "f16 S=1024"])
@pytest.mark.parametrize("g", [0.3, 5e-4, 1e-5])
def test_later_steps_keep_that_length(name, g):
    """A constant gradient moves the weight by lr each step: v neither flushes nor saturates."""
    optimizer = build(F32_PROFILE.with_(**STATES[name]), {"w": torch.zeros(1024)})
    for step in range(30):
        optimizer.params["w"].grad.fill_(g)
        optimizer.step(1e-3, step)
    assert torch.allclose(optimizer.params["w"].detach() / -30e-3, torch.ones(1024), rtol=2e-2)


@pytest.mark.parametrize("profile", [PRESETS["all_f16"], PRESETS["f16"], PRESETS["all_f16"].with_(state_scale="none")], ids=str)
def test_zero_gradients_change_nothing(profile):  # case B17
    optimizer = build(profile, {"w": torch.tensor([1.0, -2.0, 0.5])})
    for step in range(3): optimizer.step(1e-3, step)
    assert optimizer.params["w"].tolist() == [1.0, -2.0, 0.5] and optimizer.config.eps == 1e-8


def test_decay_with_a_master():  # case B15 A
    optimizer = build(PRESETS["bf16"].with_(rounding="nearest"), {"w": torch.ones(1, 8)}, wd=0.1)
    for step in range(1000): optimizer.step(1e-3, step)
    master = optimizer.buffers[0].master[0, :8]
    assert torch.allclose(master, torch.full((8,), 0.904833), atol=3e-5) and (optimizer.params["w"] == cast(master, BF16)).all()


@pytest.mark.parametrize("p", [BF16, F16], ids=str)
def test_decay_without_a_remedy_stands_still_and_says_so(p):  # case B15 B
    optimizer = build(F32_PROFILE.with_(param=p), {"w": torch.ones(1, 8)}, wd=0.1)
    for step in range(1000): optimizer.step(1e-3, step)
    stat, = optimizer.stats()
    assert (optimizer.params["w"] == 1).all() and stat.efficiency == 0 and stat.lost == 1


def test_decay_with_stochastic_rounding():  # case B15 C
    optimizer = build(PRESETS["bf16_sr"], {"w": torch.ones(256, 256)}, wd=0.1, meters_every=0)
    for step in range(1000): optimizer.step(1e-3, step)
    w = optimizer.params["w"].detach().double()
    assert abs(w.mean().item() - 0.9048) < 4e-4 and abs(w.std().item() - 0.018) < 2e-3


def test_constant_gradient_with_skipping_on_but_silent():  # case B20
    optimizer = build(F32_PROFILE, {"w": torch.ones(1)})
    gate = StepGate(LossScale.of("dynamic"), OutlierDetector(6.0), OutlierDetector(6.0), max_norm=0.0)
    for step in range(200):
        optimizer.zero_grad()
        (optimizer.params["w"] * 0.1 * gate.loss_scale.scale).sum().backward()
        decision, gate = gate.decide(optimizer.grad_stats(gate.loss_scale.scale), 1.0)
        assert not decision.skip
        optimizer.step(1e-3, step, decision.factor)
    assert abs(optimizer.params["w"].item() - 0.8000) < 1e-4


# ---------------------------------------------------------------- skips
@each_profile
def test_skipped_steps_are_not_steps(profile):  # case B10
    optimizer = build(profile, wd=0.1)
    start, gate, norms, skipped = snapshot(optimizer), StepGate(LossScale.of("2^4")), [], 0
    for step, bad in ((1, math.inf), (2, math.nan)):
        optimizer.zero_grad()
        set_grads(optimizer, step)
        optimizer.params["blocks.0.fc.bias"].grad[3] = bad
        stats = optimizer.grad_stats(16.0)
        decision, gate = gate.decide(stats, 1.0)
        norms.append(stats.norm)
        skipped += bool(decision.skip)
        assert optimizer.first_nonfinite() == "blocks.0.fc.bias"
    assert skipped == 2 and not any(map(math.isfinite, norms)) and same(start, snapshot(optimizer))
    assert all(t == 0 for g in optimizer.buffers for t in g.t)


@pytest.mark.parametrize("g", [1e-2, 1e-5])
def test_first_real_update_after_skips_has_length_lr(g):  # case B10
    optimizer = build(F32_PROFILE, {"w": torch.ones(4)})
    optimizer.zero_grad()
    optimizer.params["w"].grad.fill_(g)
    optimizer.step(1e-3, 3)  # steps 1 and 2 were skipped
    move = 1 - optimizer.params["w"][0].item()
    assert abs(move / 1e-3 - 1) < 1e-8 / g + 1e-4 and abs(move - 0.6232e-3) > 3e-4
    assert optimizer.buffers[0].t == [1]


def test_a_non_finite_factor_is_refused_before_anything_changes():
    optimizer = run(build(PRESETS["bf16"]), range(2))
    before = snapshot(optimizer)
    for kwargs in (dict(lr=1e-3, factor=math.inf), dict(lr=math.nan, factor=1.0)):
        with pytest.raises(ValueError, match="skipped"): optimizer.step(step=2, **kwargs)
    assert same(before, snapshot(optimizer))


# ---------------------------------------------------------------- same bits whoever does it
@each_profile
def test_padding_stays_zero(profile):
    optimizer = run(build(profile, wd=0.1, multiple=4), range(4))
    for group in optimizer.buffers:
        for x in (group.flat, group.m, group.v, group.master, group.compensation):
            if x is None: continue
            x = bits_of(x)
            inside = sum(group.layout.view(x, name).count_nonzero() for name in group.layout.names)
            assert len(x) % 4 == 0 and x.count_nonzero() == inside


@each_profile
@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_do_not_change_bits(profile, rows):
    want, optimizer = run(build(profile, wd=0.1), range(3)), build(profile, wd=0.1)
    optimizer.scratch = {p: tuple(x[:rows] for x in buffers) for p, buffers in optimizer.scratch.items()}
    assert same(snapshot(want), snapshot(run(optimizer, range(3))))


class Exchange:
    """An all-gather between ranks that are threads of this process."""

    def __init__(self, world: int):
        self.parts, self.barrier = [None] * world, threading.Barrier(world, timeout=60)

    def at(self, rank: int):
        """The `gather` of one rank."""
        def gather(own: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = own.clone()
            self.barrier.wait()
            whole = torch.cat(self.parts)
            self.barrier.wait()
            return whole
        return gather


def on_ranks(world: int, work) -> list:
    """`work(rank, gather)` on as many threads."""
    exchange = Exchange(world)
    with ThreadPoolExecutor(world) as pool: return list(pool.map(lambda rank: work(rank, exchange.at(rank)), range(world)))


@each_profile
@pytest.mark.parametrize("world", [2, 3])
def test_sharing_the_blocks_does_not_change_bits(profile, world):
    def train(optimizer: AdamW) -> tuple:
        norms = []
        for step in range(4):
            set_grads(optimizer, step, 0.3)
            norms.append(optimizer.grad_stats(2.0).norm)
            optimizer.step(1e-3, step, 0.5)
        return optimizer, norms, optimizer.stats()

    whole, norms, stats = train(build(profile, wd=0.1, multiple=world))
    ranks = on_ranks(world, lambda rank, gather: train(build(profile, wd=0.1, rank=rank, world=world, gather=gather)))
    assert all(other == norms and seen == stats for _, other, seen in ranks)
    for i, group in enumerate(whole.buffers):
        parts = [optimizer.buffers[i] for optimizer, _, _ in ranks]
        for name in ("m", "v", "master", "compensation"):
            if (x := getattr(group, name)) is not None:
                assert torch.equal(bits_of(x), torch.cat([bits_of(getattr(part, name)) for part in parts]))
        assert torch.equal(bits_of(group.flat), torch.cat([bits_of(part.flat[part.own]) for part in parts]))
        if group.S_next is not None: assert all(torch.equal(group.S_next, part.S_next) for part in parts)


def test_measuring_changes_no_bit():
    for profile in ALL.values():
        states = [snapshot(run(build(profile, wd=0.1, meters_every=every), range(4))) for every in (0, 1, 3)]
        assert same(states[0], states[1]) and same(states[0], states[2])


def test_listening_changes_no_bit():
    with Ledger(): heard = snapshot(run(build(PRESETS["all_f16"]), range(2)))
    assert same(heard, snapshot(run(build(PRESETS["all_f16"]), range(2))))


@each_profile
def test_gradients_are_only_read(profile):
    optimizer = build(profile)
    set_grads(optimizer, 0)
    before = [g.grads.flat.clone() for g in optimizer.buffers]
    optimizer.step(1e-3, 0, 0.5)
    assert all(torch.equal(a, g.grads.flat) for a, g in zip(before, optimizer.buffers))


# ---------------------------------------------------------------- keyed noise
def test_write_back_noise_is_the_documented_key():
    start = {"a.weight": torch.randn(40, 40, generator=torch.Generator().manual_seed(0)), "b": torch.ones(7)}
    optimizer = build(PRESETS["bf16"], start, seed=42)
    for step in (0, 5):
        set_grads(optimizer, step)
        optimizer.step(1e-3, step)
    group = optimizer.buffers[0]
    for name in start:
        master = group.layout.view(group.master, name)
        want = convert_stochastic(master, BF16, Key.of(42, 5, Purpose.WRITE_BACK, name))
        assert torch.equal(want, optimizer.params[name])


def test_moment_noise_has_its_own_purposes():
    optimizer = build(F32_PROFILE.with_(optimizer=BF16), {"w": torch.zeros(3000)}, seed=7)
    set_grads(optimizer, 0)
    g = optimizer.params["w"].grad.clone()
    optimizer.step(1e-3, 0)
    group = optimizer.buffers[0]
    m, v = (1 - 0.9) * g, (1 - 0.95) * (g * g)
    for name, wide, purpose in (("m", m, Purpose.M), ("v", v, Purpose.V)):
        want = convert_stochastic(wide, BF16, Key.of(7, 0, purpose, "w"))
        assert torch.equal(want, group.layout.view(getattr(group, name), "w"))


def test_other_steps_and_seeds_draw_other_bits():
    patterns = []
    for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
        optimizer = build(PRESETS["bf16_sr"], {"w": torch.ones(65_536)}, seed=seed)
        optimizer.params["w"].grad.fill_(1.0)
        optimizer.step(2.0**-9, step)  # to half way between 1 and the bf16 number below it
        patterns.append(optimizer.params["w"].detach() == 1)
    assert torch.equal(patterns[0], patterns[3])
    for other in patterns[1:3]:
        assert abs(other.double().mean().item() - 0.5) < 0.01
        assert abs((patterns[0] == other).double().mean().item() - 0.5) < 0.01


# ---------------------------------------------------------------- masters, compensation, re-rounding
def test_masters_and_compensation_start_from_unrounded_values():
    start = weights()
    master = build(PRESETS["bf16"], start).buffers[0]
    kahan = build(PRESETS["bf16_sr"].with_(rounding="kahan"), start).buffers[0]
    for name, x in start.items():
        assert torch.equal(master.layout.view(master.master, name), x)
        total = kahan.layout.view(kahan.flat, name).double() + kahan.layout.view(kahan.compensation, name).double()
        assert torch.allclose(total, x.double(), rtol=2.0**-16, atol=1e-12) and not torch.equal(total.float().bfloat16().float(), x)


@pytest.mark.parametrize("p, rounding", [*product((BF16, F16), ("stochastic", "nearest"))])
def test_weights_come_back_from_the_master(p, rounding):
    profile = F32_PROFILE.with_(param=p, master=F32, rounding=rounding)
    optimizer = build(profile, seed=11)
    for steps in ((), (0,), (1, 2, 7)):
        run(optimizer, steps)
        again = optimizer.reround_from_master()
        assert all(torch.equal(bits_of(x), bits_of(optimizer.params[name].detach().reshape(-1))) for name, x in again.items())
        assert set(again) == set(SHAPES)
    assert build(F32_PROFILE).reround_from_master() == {}


def test_update_efficiency_separates_remedy_from_disease():
    """Weights of ordinary size, lr 1e-5, Adam at rest: the meter of each write-back."""
    seen = {}
    for p, rounding in product((BF16, F16), ("nearest", "stochastic", "kahan", "master")):
        profile = F32_PROFILE.with_(param=p, rounding="nearest" if rounding == "master" else rounding, master=F32 if rounding == "master" else None)
        optimizer = build(profile, {"w": torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.1})
        run(optimizer, [0], lr=1e-5, size=1.0)
        seen[p, rounding] = optimizer.stats()[0]
    for p in (BF16, F16):
        for rounding, within in (("stochastic", 0.12), ("kahan", 0.03), ("master", 1e-3)):  # noise: four deviations in bf16
            assert abs(seen[p, rounding].efficiency - 1) < within, (p, rounding)
    assert seen[BF16, "nearest"].efficiency < 0.5 and seen[F16, "nearest"].efficiency < 0.9
    assert min(seen[BF16, r].lost for r in ("nearest", "stochastic", "kahan", "master")) > 0.7


def test_stalled_second_moments_are_seen():  # C.7: bf16 stalls, f16 with S much less
    shares = {}
    for name, slots in (("bf16", dict(optimizer=BF16, rounding_state="nearest")), ("f16", dict(optimizer=F16)), ("f32", dict(optimizer=F32))):
        optimizer = AdamW([("w", Parameter(torch.zeros(32, 32)))], F32_PROFILE.with_(**slots).at, config=AdamWConfig(beta2=0.999))
        run(optimizer, range(601), size=1e-2)
        shares[name] = optimizer.stats()[0].stalled_v
    assert shares["bf16"] > 0.7 and shares["f16"] < 0.4 and shares["f32"] < 0.01


# ---------------------------------------------------------------- 16-bit state
def test_scale_follows_the_gradients_and_is_per_tensor():
    profile = F32_PROFILE.with_(optimizer=F16)
    optimizer = build(profile, {"large": torch.zeros(1024), "small": torch.zeros(1024)})
    gen = torch.Generator().manual_seed(0)
    for step in range(60):
        for name, size in (("large", 0.7), ("small", 1e-8)): optimizer.params[name].grad.copy_(torch.randn(1024, generator=gen) * size)
        optimizer.step(1e-3, step)
    group = optimizer.buffers[0]
    assert group.S[0] < 2**8 and group.S[1] == 2**12
    saturated = (group.layout.view(group.v, "large") == F16.max).sum()
    assert saturated == 0


def test_scale_rises_again_when_gradients_shrink():
    """After a loud start, v' of quiet elements lies among the subnormals, where it would stall without ever reaching zero."""
    optimizer = build(F32_PROFILE.with_(optimizer=F16), {"w": torch.zeros(1024)})
    scales = []
    for step in range(700):
        gen, loud = torch.Generator().manual_seed(step), step < 10
        optimizer.params["w"].grad.copy_(torch.randn(1024, generator=gen) * (3.0 if loud else 1e-5))
        optimizer.step(1e-3, step)
        scales.append(optimizer.buffers[0].S.item())
    assert min(scales) == 64 and scales[-1] >= 1024
    group = optimizer.buffers[0]
    v = group.v[0].double() / group.S.item() ** 2
    assert 0.3e-10 < v.median().item() < 2e-10  # of gradients of 1e-5, not the floor of S = 64


def test_moments_are_scaled_and_rescaled_exactly():
    """m' = S·m and v' = S²·v, with one rounding to f16 per step whatever happens to S."""
    optimizer = build(F32_PROFILE.with_(optimizer=F16), {"w": torch.zeros(1024)})
    group, m, v = optimizer.buffers[0], torch.zeros(1024), torch.zeros(1024)
    for step in range(12):
        g = torch.randn(1024, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step / 3 - 3)
        optimizer.params["w"].grad.copy_(g)
        optimizer.step(1e-3, step)
        S = group.S.item()
        m, v = m * 0.9 + (1 - 0.9) * g, v * 0.95 + (1 - 0.95) * (g * g)
        m, v = (cast(cast(x * k, F16, saturate=True), F32) / k for x, k in ((m, S), (v, S * S)))
        assert torch.equal(group.m.float()[0] / S, m) and torch.equal(group.v.float()[0] / (S * S), v)
    assert group.S.item() < 1024


def test_clamped_and_flushed_moments_are_reported():
    optimizer = build(F32_PROFILE.with_(optimizer=F16, state_scale="2^12"), {"w": torch.zeros(8)})
    optimizer.params["w"].grad.copy_(torch.tensor([1.0, 1.0, 1e-9, 1e-9, 1e-9, 1e-3, 0, 0]))
    optimizer.step(1e-3, 0)
    stat, = optimizer.stats()
    assert (stat.saturated, stat.flushed) == (2, 3)  # v of the large ones; v of the small ones, whose m survives


def test_auto_scale_follows_f32_where_a_fixed_4096_does_not():
    """Gradients up to 0.4 from a heavy-tailed draw: distance of the weights from those of an f32 optimizer."""
    distance = {}
    for name, slots in (("f32", dict(optimizer=F32)), ("auto", dict(optimizer=F16)), ("4096", dict(optimizer=F16, state_scale="2^12"))):
        optimizer = build(F32_PROFILE.with_(**slots), {"w": torch.zeros(4096)})
        for step in range(20):
            gen = torch.Generator().manual_seed(step)
            g = torch.randn(4096, generator=gen) * torch.exp(1.5 * torch.randn(4096, generator=gen)) * 0.03
            optimizer.params["w"].grad.copy_(g.clamp(-0.9, 0.9))
            optimizer.step(1e-3, step)
        distance[name] = optimizer.params["w"].detach().clone()
    rms = {name: (x - distance["f32"]).norm().item() / distance["f32"].norm().item() for name, x in distance.items()}
    assert rms["auto"] < 1e-3 < 20 * rms["auto"] < rms["4096"]


# ---------------------------------------------------------------- ledger and memory
def test_casts_of_an_update():
    def kinds(profile):
        optimizer = build(profile, {"w": torch.zeros(4, 1024)}, meters_every=0)
        with Ledger("optimizer") as ledger: optimizer.step(1e-3, 0)
        assert all(r.op == "adamw" and r.direction == "update" and r.layer == "optimizer.0" for r in ledger.rows())
        return {(r.operand, r.src, r.dst): r.count for r in ledger.rows()}
    with assert_no_casts(): run(build(F32_PROFILE), range(2))
    assert kinds(PRESETS["f16"]) == {("theta", "f16", "f32"): 1, ("theta", "f32", "f16"): 1}
    assert kinds(PRESETS["bf16_llmc"]) == {("grad", "bf16", "f32"): 1, ("theta", "f32", "bf16"): 1}
    assert kinds(PRESETS["all_f16"]) == {("grad", "f16", "f32"): 1, **{(x, a, b): 1 for x in ("theta", "m", "v") for a, b in
                                                                      (("f16", "f32"), ("f32", "f16"))}}


def test_meters_do_not_change_the_ledger():
    rows = []
    for every in (0, 1):
        optimizer = build(PRESETS["all_f16"], meters_every=every)
        with Ledger() as ledger: run(optimizer, range(2))
        rows.append({r: r.count for r in ledger.rows()})
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name, each", [("f32", 16), ("bf16", 18), ("bf16_llmc", 16), ("all_f16", 8), ("f16", 14)])
def test_bytes_per_parameter(name, each):
    optimizer = build(PRESETS[name], {"w": torch.zeros(100 * BLOCK)})
    held = optimizer.bytes()
    assert sum(v for k, v in held.items() if k != "scratch") == each * 100 * BLOCK
    assert set(held) == {"param", "grad", "m", "v", "master", "compensation", "scratch"}


def test_own_blocks_cover_everything_once():
    for world in (1, 2, 4): assert [b for r in range(world) for b in range(8)[own_blocks(8, r, world)]] == list(range(8))
    for bad in ((5, 0, 2), (4, 2, 2), (4, -1, 2)):
        with pytest.raises(ValueError): own_blocks(*bad)


# ---------------------------------------------------------------- GPU
@pytest.mark.gpu
@each_profile
def test_cuda_tensors_give_the_same_bits(profile):
    start = weights()
    params = {d: [(n, Parameter(cast(x, slots_of(profile.at(n)).storage).to(d))) for n, x in start.items()] for d in ("cpu", "cuda")}
    pair = [AdamW(params[d], profile.at, {n: x.to(d) for n, x in start.items()}, AdamWConfig(weight_decay=0.1), 3) for d in ("cpu", "cuda")]
    for step in range(6):
        norms = []
        for optimizer in pair:
            gen = torch.Generator().manual_seed(step)
            for p in optimizer.params.values(): p.grad.copy_((torch.randn(p.shape, generator=gen) * 0.2).to(p.device))
            norms.append(optimizer.grad_stats(4.0).norm)
            optimizer.step(1e-3, step, 0.25)
        assert math.isclose(*norms, rel_tol=1e-13)
    a, b = map(snapshot, pair)
    assert same(a, {k: x.cpu() if isinstance(x, torch.Tensor) else x for k, x in b.items()})
    assert [s.lost for s in pair[0].stats()] == [s.lost for s in pair[1].stats()]


def test_noise_helper_is_the_hash_of_rounding():
    """The per-block keys against the plain per-tensor stream, over a layout of odd sizes."""
    group = build(PRESETS["bf16"], seed=9).buffers[0]
    n = own_noise(group, block_keys(group, 9, [4] * len(group.t), Purpose.M), slice(0, len(group.m)))
    for name in group.layout.names:
        size = math.prod(SHAPES[name])
        assert torch.equal(group.layout.view(n, name).reshape(-1), noise(Key.of(9, 4, Purpose.M, name), 0, size))
