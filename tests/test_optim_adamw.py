"""The arithmetic of one update: AdamW against torch, state scaling, write-back, compensation, meters."""
import math
from itertools import product

import pytest
import torch

from f16lab.adamw import (METERS, S_MAX, S_MIN, AdamWConfig, adamw_change, adamw_update, bias_corrections, count_low, meter_update,
                          next_scale, nonzero, square_root_, store, store_moment, tensor_stats, write_kahan, write_master, write_plain)
from f16lab.cast import Ledger, cast
from f16lab.grads import FlatLayout
from f16lab.precision import BF16, F16, F32, F64, bits_of
from f16lab.rounding import Key, Purpose, kahan_add, kahan_scale, noise

HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, wd=0.1)


def state(n: int = 4096, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    theta, g, m, v = (torch.randn(n, generator=gen, dtype=torch.float64) * torch.exp(3 * torch.randn(n, generator=gen, dtype=torch.float64))
                      for _ in range(4))
    return [x.to(dtype) for x in (theta, g * 1e-3, m * 1e-3, (v * 1e-3) ** 2)]


# ---------------------------------------------------------------- AdamW
def test_matches_torch_adamw_in_f64():
    theta, g, m, v = state(dtype=torch.float64)
    ours, m, v = theta.clone(), torch.zeros_like(m), torch.zeros_like(v)
    theirs = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for t in range(1, 21):
        theirs.grad = g * math.cos(t)
        optimizer.step()
        c1, c2 = bias_corrections(t, 0.9, 0.95)
        ours, m, v = adamw_update(ours, g * math.cos(t), m, v, c1=c1, c2=c2, **HYPER)
    assert torch.allclose(ours, theirs.detach(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("decay", [True, False])
def test_in_place_version_has_the_bits_of_the_formula(seed, decay):
    theta, g, m, v = (x.view(4, 1024) for x in state(seed=seed))
    wd = torch.tensor([[0.1], [0.0], [0.2], [0.1]]) if decay else None
    c1, c2 = torch.full((4, 1), 0.271), torch.full((4, 1), 0.142625)
    hyper = {**HYPER, "wd": wd if decay else 0.0}
    want = adamw_update(theta, g, m, v, c1=c1, c2=c2, **hyper)
    kept_g, kept_theta = g.clone(), theta.clone()
    change = adamw_change(theta, g, m, v, torch.empty_like(g), torch.empty_like(g), c1=c1, c2=c2, **{**hyper, "wd": wd})
    assert all(torch.equal(a, b) for a, b in zip(want, (theta - change, m, v)))
    assert torch.equal(g, kept_g) and torch.equal(theta, kept_theta)


def test_every_operation_is_rounded_on_its_own():
    """Against f64 arithmetic rounded to f32 after each operation: no contraction anywhere."""
    theta, g, m, v = state(20_000)
    r = lambda x: x.to(torch.float32).to(torch.float64)  # noqa: E731
    T, G, M, V = (x.double() for x in (theta, g, m, v))
    k = {n: r(torch.tensor(x, dtype=torch.float64)) for n, x in dict(b1=0.9, a1=1 - 0.9, b2=0.95, a2=1 - 0.95, eps=1e-8, lr=1e-3, wd=0.1,
                                                                   c1=0.19, c2=0.0975).items()}
    M2 = r(r(k["b1"] * M) + r(k["a1"] * G))
    V2 = r(r(k["b2"] * V) + r(k["a2"] * r(G * G)))
    q = r(r(M2 / k["c1"]) / r(r(r(V2 / k["c2"]).sqrt()) + k["eps"]))
    T2 = r(T - r(k["lr"] * r(q + r(k["wd"] * T))))
    got = adamw_update(theta, g, m, v, c1=0.19, c2=0.0975, **HYPER)
    for want, x in zip((T2, M2, V2), got): assert torch.equal(want, x.double())


def test_square_root_is_correctly_rounded():
    """All f32 numbers in two binades (the root of 4x is twice that of x), and some subnormals, against f64."""
    for lo in range(0x3F800000, 0x40800000, 1 << 21):
        x = torch.arange(lo, lo + (1 << 21), 3, dtype=torch.int32).view(torch.float32)
        assert torch.equal(square_root_(x.clone()), x.double().sqrt().float())
    tiny = torch.arange(0, 1 << 23, 997, dtype=torch.int32).view(torch.float32)
    assert torch.equal(square_root_(tiny.clone()), tiny.double().sqrt().float())
    for n in (1, 5, 17, 1000):
        x = torch.rand(n + 3)[3:]
        assert torch.equal(square_root_(x.clone()), x.double().sqrt().float())


def test_bias_corrections_and_config_limits():
    assert bias_corrections(3, 0.9, 0.95) == (1 - 0.9**3, 1 - 0.95**3)
    with pytest.raises(ValueError): bias_corrections(0, 0.9, 0.95)
    for bad in (dict(eps=0.0), dict(eps=-1.0), dict(beta1=1.0), dict(beta2=-0.1), dict(lr=-1.0), dict(weight_decay=-1.0), dict(eps=math.inf),
                dict(lr=math.nan)):
        with pytest.raises(ValueError): AdamWConfig(**bad)


@pytest.mark.parametrize("frozen, end", [(False, 0.8000), (True, 0.5487)])
def test_constant_gradient_for_200_steps(frozen, end):  # case B20
    w, m, v = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0)
    for t in range(1, 201):
        c1, c2 = bias_corrections(1 if frozen else t, 0.9, 0.95)
        w, m, v = adamw_update(w, torch.tensor(0.1), m, v, c1=c1, c2=c2, **{**HYPER, "wd": 0.0})
    assert abs(w.item() - end) < 1e-4


# ---------------------------------------------------------------- state scaling
@pytest.mark.parametrize("k", range(-20, 21, 4))
def test_any_power_of_two_gives_the_same_update_in_f64(k):
    theta, g, m, v = state(dtype=torch.float64)
    S = 2.0**k
    c = dict(c1=0.19, c2=0.0975)
    plain = adamw_update(theta, g, m, v, **HYPER, **c)
    scaled = adamw_update(theta, S * g, S * m, S * S * v, **{**HYPER, "eps": S * 1e-8}, **c)
    assert torch.equal(plain[0], scaled[0]) and torch.equal(S * plain[1], scaled[1]) and torch.equal(S * S * plain[2], scaled[2])


@pytest.mark.parametrize("S", [2.0**6, 2.0**10, 2.0**12])
def test_scaling_in_f32_is_within_one_ulp(S):
    theta, g, m, v = state()
    c = dict(c1=0.19, c2=0.0975)
    plain, _, _ = adamw_update(theta, g, m, v, **HYPER, **c)
    scaled, _, _ = adamw_update(theta, S * g, S * m, S * S * v, **{**HYPER, "eps": S * 1e-8}, **c)
    assert (bits_of(plain) - bits_of(scaled)).abs().max() <= 1


def test_an_unscaled_eps_shifts_small_steps():
    g, zero = torch.tensor([1e-8]), torch.zeros(1)
    c = dict(c1=0.1, c2=0.05)
    right, _, _ = adamw_update(zero, 4096 * g, zero, zero, **{**HYPER, "eps": 4096e-8}, **c)
    wrong, _, _ = adamw_update(zero, 4096 * g, zero, zero, **HYPER, **c)
    assert abs(right.item() + 0.5e-3) < 1e-9 and wrong.item() < -0.99e-3


@pytest.mark.parametrize("S, beta2, limit", [(4096.0, None, 65520**0.5 / 4096), (4096.0, 0.95, (65520 / 0.05) ** 0.5 / 4096),
                                             (4096.0, 0.999, (65520 / 0.001) ** 0.5 / 4096), (1.0, 0.95, 1144.7)])
def test_where_v_saturates(S, beta2, limit):
    """A steady gradient (beta2 None) or one spike from rest, from both sides of the limit."""
    weight = 1.0 if beta2 is None else 1 - beta2
    below, above = (torch.tensor([[weight * (g * S) ** 2]]) for g in (limit * 0.9999, limit * 1.0001))
    meters = torch.zeros(1, len(METERS), dtype=torch.float64)
    assert below.item() < 65520 < above.item()
    assert store_moment(below, F16, "", "v", meters=meters).item() <= F16.max and meters[0, -1] <= 1
    assert store_moment(above, F16, "", "v", meters=meters).item() == F16.max and meters[0, -1] >= 1


@pytest.mark.parametrize("beta2, limit", [(0.95, 7.7e-4), (0.999, 5.5e-3)])
def test_where_unscaled_v_flushes(beta2, limit):  # case B19, known limits
    below, above = (torch.tensor([(1 - beta2) * (limit * f) ** 2]) for f in (0.98, 1.02))
    assert store(below, F16, "", "v").item() == 0 and store(above, F16, "", "v").item() > 0


def test_next_scale_over_the_whole_range():
    for S, e, share in product([2.0**k for k in range(6, 13)], range(-30, 34), (0.0, 0.5)):
        for top in (2.0**e, 1.75 * 2.0**e):
            new = next_scale(torch.tensor([S]), torch.tensor([top]), torch.tensor([share * 1000]), torch.tensor([1000.0])).item()
            assert S_MIN <= new <= S_MAX and math.log2(new).is_integer()
            after = top * (new / S) ** 2
            if top > 2.0**14: assert (after <= 2.0**14 or new == S_MIN) and new <= S
            elif share and top <= 2.0**8: assert new == min(S_MAX, 2 * S) and after <= 2.0**10
            else: assert new == S


def test_next_scale_is_per_tensor_and_quiet_on_zeros():
    S = next_scale(torch.tensor([1024.0, 1024.0, 1024.0]), torch.tensor([2.0**16, 0.0, 100.0]), torch.tensor([0, 0, 1]), torch.tensor([9, 0, 1000]))
    assert S.tolist() == [512, 1024, 1024]


def test_low_second_moments_are_counted_below_the_smallest_normal_number():
    below = torch.nextafter(torch.tensor(2.0**-14), torch.tensor(0.0)).item()
    v = torch.tensor([[0.0, 1e-40, 2.0**-25, below, 2.0**-14, 1.0, 7e4]])
    assert count_low(v).tolist() == [3]


def test_flushed_and_saturated_are_counted():
    x = torch.zeros(2, 1024)
    x[0, :5] = torch.tensor([1e-9, -1e-9, 1e6, 3e4, 0.0])
    x[1, 7] = -7e4
    meters = torch.zeros(2, len(METERS), dtype=torch.float64)
    y = store_moment(x.clone(), F16, "", "m", meters=meters)
    assert meters[:, -2:].tolist() == [[2, 1], [0, 1]] and y[0, 2] == F16.max and y[1, 7] == -F16.max
    store_moment(x, F16, "", "v", meters=meters)
    assert meters[:, -2:].tolist() == [[4, 2], [0, 2]]


# ---------------------------------------------------------------- write-back
@pytest.mark.parametrize("p", [BF16, F16], ids=str)
def test_sr_uses_other_bits_in_each_tensor_element_and_block(p):  # case B12
    half = 1 + 2.0 ** -(p.mantissa_bits + 1)
    ups = []
    for name in ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"):
        n = noise(Key.of(0, 3, Purpose.WRITE_BACK, name), 0, 65_536)
        ups.append(store(torch.full((65_536,), half), p, "", "theta", n) > 1)
    agree = lambda a, b: (a == b).double().mean().item()  # noqa: E731
    for up in ups: assert abs(up.double().mean() - 0.5) < 0.01
    pairs = [(ups[0], ups[1]), (ups[0][1:], ups[0][:-1]), *((ups[0][stride:], ups[0][:-stride]) for stride in (256, 512, 1024, 4096))]
    for a, b in pairs: assert abs(agree(a, b) - 0.5) < 0.01


def test_sr_drift():  # 1.0 + 1000 · 1e-4 in f16: theory 1.1 ± 0.0094
    copies, steps = 4096, 1000
    w = torch.ones(copies, dtype=torch.float16)
    for t in range(steps):
        write_plain(w, cast(w, F32), torch.full((copies,), -1e-4), "", noise(Key.of(0, t, Purpose.WRITE_BACK, "w"), 0, copies))
    x = w.double()
    p = 1e-4 / 2**-10
    sd = 2**-10 * math.sqrt(steps * p * (1 - p))
    assert abs(x.mean().item() - 1.1) < 5 * sd / math.sqrt(copies) and abs(x.std().item() / sd - 1) < 0.06
    nearest = torch.ones(1, dtype=torch.float16)
    for _ in range(steps): write_plain(nearest, cast(nearest, F32), torch.tensor([-1e-4]), "")
    assert nearest.item() == 1.0


@pytest.mark.parametrize("change", [1e-6, 1e-7, 3e-8])
def test_kahan_in_f16_follows_small_changes(change):
    theta = cast(torch.tensor([0.02]), F16)
    start, k = theta.double().item(), torch.zeros(1, dtype=torch.float16)
    for _ in range(2000): write_kahan(theta, k, cast(theta, F32), torch.tensor([change]), "")
    moved = start - (theta.double() + k.double() / 4096).item()
    assert abs(moved / (2000 * change) - 1) < 0.007


def test_kahan_drift_in_f16():
    theta, k = torch.ones(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)
    for _ in range(1000): write_kahan(theta, k, cast(theta, F32), torch.tensor([-1e-4]), "")
    assert abs((theta.double() + k.double() / 4096).item() - 1.1) < 1e-4  # 1000 roundings of k, each at most 2^-23


@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
def test_kahan_writer_is_rounding_kahan_add(p):
    gen = torch.Generator().manual_seed(1)
    theta = cast(torch.randn(4096, generator=gen), p)
    k = cast(torch.randn(4096, generator=gen) * p.ulp(1.0) * 0.25 * kahan_scale(p), p)
    change = torch.randn(4096, generator=gen) * p.ulp(1.0)
    want = kahan_add(theta, k, -change)
    stored, compensation, spare = theta.clone(), k.clone(), torch.empty(4096)
    write_kahan(stored, compensation, cast(theta, F32), change, "", spare)
    assert torch.equal(stored, want[0]) and torch.equal(compensation, want[1])
    wide = lambda a, b: a.double() + b.double() / kahan_scale(p)  # noqa: E731
    moved = wide(stored, compensation) - wide(theta, k)
    assert torch.allclose(spare.double(), moved, rtol=1e-5, atol=p.ulp(1.0) * 2**-10)
    assert ((moved + change).abs() <= p.ulp(1.0) ** 2 * theta.double().abs().clamp(min=1) * 4).all()  # all but the rounding of k


def test_kahan_compensation_saturates_instead_of_overflowing():
    theta, k = torch.full((1,), 65_472.0, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)
    write_kahan(theta, k, cast(theta, F32), torch.tensor([15.999]), "")
    assert theta.item() == 65_472.0 and k.item() == -F16.max


def test_master_moves_where_the_weight_cannot():
    stored, master, spare = torch.ones(4, dtype=torch.bfloat16), torch.ones(4), torch.empty(4)
    write_master(stored, master, master, torch.full((4,), 1e-4), "", spare=spare)
    assert (stored == 1).all() and torch.equal(master, torch.ones(4) - 1e-4) and torch.equal(spare, master - 1)


@pytest.mark.parametrize("n", [None, 0], ids=["nearest", "stochastic"])
def test_realised_change_is_what_happened(n):
    gen = torch.Generator().manual_seed(2)
    stored = cast(torch.randn(2048, generator=gen), BF16)
    change = torch.randn(2048, generator=gen) * 1e-2
    before, spare = stored.clone(), torch.empty(2048)
    drawn = None if n is None else noise(Key.of(0, 0, Purpose.WRITE_BACK, "w"), 0, 2048)
    write_plain(stored, cast(stored, F32), change, "", drawn, spare)
    assert torch.equal(spare.double(), stored.double() - before.double()) and spare.any()


# ---------------------------------------------------------------- the door and the meters
def test_each_narrowing_is_recorded_stochastic_or_not():
    x, n = torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.int32)
    with Ledger() as ledger:
        store(x, F16, "g", "theta")
        store(x, BF16, "g", "m", n)
        assert store(x, F32, "g", "v", n) is x
    assert [(r.layer, r.op, r.operand, r.src, r.dst, r.direction, r.count) for r in ledger.rows()] == [
        ("g", "adamw", "theta", "f32", "f16", "update", 1), ("g", "adamw", "m", "f32", "bf16", "update", 1)]


@pytest.mark.parametrize("p", [F16, BF16, F32], ids=str)
def test_nonzero_sees_subnormals_and_both_zeros(p):
    x = cast(torch.tensor([0.0, -0.0, 1.0, -2.0]), p)
    tiny = torch.tensor([p.smallest_subnormal, -p.smallest_subnormal], dtype=p.dtype)
    assert nonzero(torch.cat([x, tiny])).tolist() == [0, 0, 1, 1, 1, 1]


def test_meter_against_the_formula():
    gen = torch.Generator().manual_seed(4)
    intended, realised = torch.randn(3, 1024, generator=gen), torch.randn(3, 1024, generator=gen)
    intended[0, :100] = 0
    kept = torch.rand(3, 1024, generator=gen) < 0.3
    meters = torch.zeros(3, len(METERS), dtype=torch.float64)
    meter_update(meters, intended, realised, (~kept).float())
    a, b = tensor_stats(FlatLayout(("a", "b"), ((2048,), (1000,))), meters)
    i, r = intended.double(), realised.double()
    assert a.efficiency == pytest.approx(((i * r)[:2].sum() / (i * i)[:2].sum()).item(), rel=1e-6)
    assert b.efficiency == pytest.approx(((i * r)[2].sum() / (i * i)[2].sum()).item(), rel=1e-6)
    assert a.lost == (kept & (intended != 0))[:2].sum().item() / (2048 - 100)
    assert math.isnan(a.stalled_m) and a.flushed == 0


def test_f64_registers_stay_f64():
    theta, g, m, v = state(64, dtype=torch.float64)
    out = adamw_update(theta, g, m, v, c1=0.1, c2=0.05, **HYPER)
    assert all(x.dtype is torch.float64 for x in out)
    assert store(out[0], F64, "", "theta") is out[0] and store(out[0], F16, "", "theta").dtype is torch.float16
