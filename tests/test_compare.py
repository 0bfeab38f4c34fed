"""Contenders in lockstep: same start, same batches, nobody disturbed, every word of a verdict backed by numbers."""
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from f16lab.archive import read_comparison
from f16lab.compare import (Entry, Racer, band_entries, band_name, compare, distances, entries, entry, measured_bytes, planned_bytes, run_comparison,
                            short_text, weights, widest_gap)
from f16lab.config import TrainConfig
from f16lab.events import EvalRecord, StepRecord
from f16lab.inputs import open_source
from f16lab.profile import PRESETS, PrecisionProfile
from f16lab.runfile import RunLogError
from f16lab.train import Trainer
from f16lab.verdict import verdicts

BASE = TrainConfig("f32").with_(data="markov", layers=1, channels=32, heads=2, context=32, batch=4, steps=6, eval_every=3, eval_batches=2,
                                meters_every=2)


@pytest.fixture(scope="module")
def source():
    return open_source(BASE.data)


def run_out(racer: Racer) -> Racer:
    while racer.status == "running":
        list(racer.advance())
    return racer


def losses(racer: Racer) -> list[float]:
    return [r.loss for r in racer.kept[StepRecord]]


# ---------------------------------------------------------------- lockstep
@pytest.mark.parametrize("names", [["f32", "all_f16", "bf16_sr"], ["bf16_sr", "f32", "torch_amp"]])
def test_taking_part_changes_no_bit(source, names):
    made = run_comparison(BASE, names, source=source, distance_every=2)
    for name in names:
        alone = run_out(Racer(entry(name, name), BASE, source))
        assert alone.machine.digest() == made.contender(name).digest, name
        assert losses(alone) == [r.loss for r in made.contender(name).steps]


def test_a_contender_is_the_run_that_train_would_do(source):
    made = run_comparison(BASE, ["f16"], source=source)
    trainer = Trainer(BASE.with_(profile="f16"), source)
    for _ in range(6):
        trainer.step()
    assert made.reference.digest == trainer.digest()


def test_nobody_is_a_step_ahead(source):
    taken, seen = {}, []
    def follow(p):
        if isinstance(p.record, StepRecord):
            taken[p.contender] = p.record.step + 1
            assert max(taken.values()) - min(taken.get(n, 0) for n in ("f32", "f16", "torch_amp")) <= 1
        seen.append((p.done, p.total))
    run_comparison(BASE, ["f32", "f16", "torch_amp"], source=source, on_progress=follow)
    assert taken == {"f32": 6, "f16": 6, "torch_amp": 6}
    assert seen == sorted(seen) and seen[-1] == (18, 18)


def test_what_is_kept_of_a_contender(source):
    c = run_comparison(BASE, ["f32", "f16"], source=source, distance_every=3).contender("f16")
    assert [r.step for r in c.steps] == list(range(6)) and [e.step for e in c.evals] == [0, 3, 6] and [d.step for d in c.distances] == [0, 3, 6]
    assert c.status == "finished" and len(c.digest) == 64 and [r.step for r in c.steps if r.tensors] == [0, 2, 4]
    assert all(r.casts for r in c.steps) and "compute = \"f16\"" in c.recipe
    assert len({id(r.casts) for r in c.steps}) == len({r.casts for r in c.steps}), "equal cast tables are kept once"


def test_bytes_per_parameter(source):
    known = dict(f32=16, f16=14, bf16=18, bf16_llmc=16, bf16_sr=14, all_f16=8, master_weights=16, torch_amp=16)
    for name, total in known.items():
        racer = run_out(Racer(entry(name, name), BASE.with_(steps=1, eval_every=0), source))
        assert sum(planned_bytes(racer).values()) == total, name
        sizes = [w.numel() for w in weights(racer).values()]
        padded = sizes if name == "torch_amp" else [-(-n // 1024) * 1024 for n in sizes]  # our buffers are whole blocks
        assert sum(measured_bytes(racer).values()) == pytest.approx(total * sum(padded) / sum(sizes)), name


def test_a_failing_contender_fails_alone(source):
    hot = "all_f16,state_scale=none,loss_scale=2^40"
    made = run_comparison(BASE.with_(steps=22, eval_every=0), {"f32": "f32", "hot": hot, "f16": "f16"}, source=source)
    assert [c.status for c in made.contenders] == ["finished", "failed", "finished"]
    assert "TooManySkips" in made.contender("hot").message
    words = verdicts(made)["hot"]
    assert words.kind == "failed" and any("skipped" in alarm for alarm in words.alarms)
    reference_fails = run_comparison(BASE.with_(steps=22, eval_every=0), {"hot": hot, "f32": "f32"}, source=source)
    assert reference_fails.contender("f32").status == "finished" and verdicts(reference_fails)["hot"].kind == "failed"


# ---------------------------------------------------------------- contenders
def test_entries_accept_names_profiles_and_mappings():
    assert entries("f16")[0].profile == PRESETS["f16"]
    assert [e.name for e in entries([PRESETS["bf16"], "f16,stable=f16"])] == ["bf16", "f16,stable=f16"]
    assert entries({"a": "torch_amp:bf16"})[0] == Entry("a", None, "bf16")
    assert entries({"a": "torch_amp:bf16"})[0].text == "torch_amp:bf16"


@pytest.mark.parametrize("wrong, words", [([], "at least one"), (["f16", "f16"], "twice"), (["f61"], "f61"), ([""], "preset")])
def test_wrong_contenders(wrong, words):
    with pytest.raises(ValueError, match=words):
        entries(wrong)


@pytest.mark.parametrize("bad", [dict(bands=-1), dict(distance_every=-1)])
def test_wrong_options(source, bad):
    with pytest.raises(ValueError, match="at least 0"):
        run_comparison(BASE, ["f32"], source=source, **bad)


@pytest.mark.parametrize("text", ["f16", "bf16_sr", "f16,rounding=stochastic", "f32,optimizer=f16", "all_f16,accum=f32", "f16;blocks.0:compute=f32",
                                  "bf16_sr,rounding=kahan;lm_head:compute=f32;blocks.*.mlp:stable=f32"])
def test_short_text_is_the_same_profile(text):
    p = PrecisionProfile.parse(text)
    assert PrecisionProfile.parse(short_text(p)) == p and len(short_text(p)) <= len(str(p))


# ---------------------------------------------------------------- distances
def test_distances_against_numpy():
    g = torch.Generator().manual_seed(3)
    ref = {"a.weight": torch.randn(37, 61, generator=g), "b.bias": torch.randn(5, generator=g), "zero": torch.zeros(3)}
    w = {name: (t + 1e-3 * torch.randn(t.shape, generator=g)).half() for name, t in ref.items()}
    d = distances(7, w, ref)
    square = {n: (np.sum((w[n].numpy().astype(np.float64) - t.numpy()) ** 2), np.sum(t.numpy().astype(np.float64) ** 2)) for n, t in ref.items()}
    for name in ("a.weight", "b.bias"):
        assert d.values[name] == pytest.approx(math.sqrt(square[name][0] / square[name][1]), rel=1e-12)
        assert 0 < d.floor[name] < 2**-11
    assert d.step == 7 and d.values["zero"] == math.inf and d.floor["zero"] == 0
    assert d.total == pytest.approx(math.sqrt(sum(a for a, _ in square.values()) / sum(b for _, b in square.values())), rel=1e-12)


def test_distance_before_the_first_step_is_storage_alone(source):
    made = run_comparison(BASE.with_(steps=1), ["f32", "f16", "bf16_sr", "master_weights"], source=source, distance_every=1)
    for name, bound in (("f16", 2**-11), ("bf16_sr", 2**-8)):
        d = made.contender(name).distances[0]
        assert d.values == d.floor and 0 < d.values["wte.weight"] < bound
    assert set(made.contender("master_weights").distances[0].values.values()) == {0.0}


def test_widest_gap():
    a, b, c = ({"w": torch.tensor([1.0, x])} for x in (0.0, 0.5, 2.0))
    assert widest_gap(0, [a, b, c]).values["w"] == pytest.approx(2 / math.sqrt(5))  # a against c
    assert widest_gap(0, [b, b]).total == 0


# ---------------------------------------------------------------- noise bands
def test_another_rounding_seed_changes_rounding_only(source):
    for name, changes in (("bf16_sr", True), ("bf16", True), ("all_f16", True), ("f16", False), ("f32", False)):
        a, b = (run_out(Racer(Entry(name, PRESETS[name], noise=n), BASE, source)) for n in (0, 1))
        same = all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values()))
        assert losses(a)[0] == losses(b)[0] and same is not changes, name


@pytest.mark.parametrize("profile, band", [
    ("f32", ""), ("f32,matmul32=tf32", ""), ("f16", "f16,rounding=stochastic"), ("master_weights", "f16,rounding=stochastic"), ("bf16_sr", "bf16_sr"),
    ("bf16_sr,rounding=nearest", "bf16_sr"), ("bf16_sr,rounding=kahan", "bf16_sr"), ("bf16", "bf16"), ("all_f16", "all_f16"),
    ("torch_amp:f16", "f16,rounding=stochastic"), ("torch_amp:bf16", "bf16_sr")])
def test_what_shows_the_noise_of_a_profile(profile, band):
    assert band_name(entry("x", profile)) == band


def test_each_band_has_at_least_two_runs():
    for profiles in (["f32", "f16", "torch_amp:f16"], ["f32", "bf16_sr"], ["bf16_sr", "bf16_sr,rounding=nearest"]):
        for bands in (1, 2, 3):
            found = entries(profiles)
            extra = band_entries(found, bands)
            for name in {e.name for e in extra}:
                own = sum(str(e.profile) == str(extra[0].profile) for e in found)
                noises = [e.noise for e in extra if e.name == name]
                assert len(noises) + own >= 2 and len(set(noises)) == len(noises) and 0 not in noises
    assert band_entries(entries(["f32", "f16"]), 0) == () == band_entries(entries(["f16", "f32"]), 2)


def test_a_planted_wrong_contender_is_not_inside_noise(source):
    """Rounding to nearest at a small learning rate: the loss is off by less than a percent, the updates are lost."""
    config = BASE.with_(steps=24, lr=3e-5, eval_every=0, meters_every=4, channels=64, context=64)
    made = run_comparison(config, {"f32": "f32", "wrong": "bf16_sr,rounding=nearest", "right": "bf16_sr"}, bands=2, source=source)
    found = verdicts(made)
    assert found["wrong"].kind == "leaves the band" and found["wrong"].step is not None and found["wrong"].layer
    assert any("intended update" in alarm and "rounding=stochastic" in alarm for alarm in found["wrong"].alarms)
    assert found["right"].kind == "inside noise" and not found["right"].alarms
    assert len(made.seed_finals) == 2 and len(made.bands) == 1 and len(made.bands[0].losses) == 3


@pytest.mark.parametrize("seed", [0, 2])
def test_a_planted_bf16_stable_slot_does_not_pass_as_noise(seed):
    """Norms, softmax and logits in bf16, in runs that are f16 otherwise: the noise they are held to is that of f16."""
    config = BASE.with_(layers=2, heads=4, batch=8, steps=30, lr=1e-3, seed=seed, eval_every=0, meters_every=0)
    made = run_comparison(config, {"f32": "f32", "planted": "f16,stable=bf16", "planted, f32 weights": "master_weights,stable=bf16",
                                   "sound": "master_weights"}, bands=2, distance_every=5)
    found = verdicts(made)
    for name in ("planted", "planted, f32 weights"): assert found[name].kind == "leaves the band" and found[name].layer, found[name].words
    assert found["sound"].kind == "inside noise" and {c.band for c in made.contenders[1:]} == {"f16,rounding=stochastic"}


def test_bands_change_nobody(source):
    plain, banded = (run_comparison(BASE, ["f32", "bf16_sr"], bands=n, source=source) for n in (0, 1))
    assert [c.digest for c in plain.contenders] == [c.digest for c in banded.contenders]


# ---------------------------------------------------------------- files
def test_files_give_the_comparison_back(source, tmp_path):
    made = run_comparison(BASE, ["f32", "bf16_sr", "torch_amp"], bands=1, source=source, folder=tmp_path, distance_every=2)
    read = read_comparison(tmp_path)
    assert repr(read) == repr(made)  # by text: NaN is not equal to itself
    assert verdicts(read) == verdicts(made)


def refuse(word: str):
    raise ValueError(word)


def test_summary_file_is_strict_json(source, tmp_path):
    run_comparison(BASE.with_(steps=2), {"f32": "f32", "inf": "f16,loss_scale=2^40"}, source=source, folder=tmp_path)
    table = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert [c["name"] for c in table["contenders"]] == ["f32", "inf"] and table["contenders"][1]["skipped"] == 2
    assert table["contenders"][1]["verdict"]["alarms"]


def test_a_comparison_that_is_cut_short_can_be_read(source, tmp_path):
    running = compare(BASE, ["f32", "f16"], source=source, folder=tmp_path)
    while not (isinstance((p := next(running)).record, StepRecord) and p.contender == "f32" and p.record.step == 3):
        pass
    running.close()
    read = read_comparison(tmp_path)
    assert [len(c.steps) for c in read.contenders] == [4, 3] and {c.status for c in read.contenders} == {"stopped"}
    assert all(c.digest for c in read.contenders) and verdicts(read)["f16"].kind == "not judged"


def test_a_folder_is_used_once(source, tmp_path):
    run_comparison(BASE.with_(steps=1), ["f32"], source=source, folder=tmp_path)
    with pytest.raises(ValueError, match="folder of its own"):
        run_comparison(BASE.with_(steps=1), ["f32"], source=source, folder=tmp_path)


def test_nothing_to_read(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "missing.sqlite"):
        with pytest.raises(RunLogError, match="no run log"):
            read_comparison(path)


def test_names_become_safe_files(source, tmp_path):
    run_comparison(BASE.with_(steps=1, eval_every=0), {"../../a <b>": "f32", "x" * 200: "f16"}, source=source, folder=tmp_path / "in")
    assert all(p.parent == tmp_path / "in" for p in tmp_path.rglob("*")if p.is_file())
    assert [c.name for c in read_comparison(tmp_path / "in").contenders] == ["../../a <b>", "x" * 200]


def test_evaluations_are_recorded_for_all(source):
    made = run_comparison(BASE, ["f32", "torch_amp"], source=source)
    a, b = (c.evals for c in made.contenders)
    assert all(isinstance(e, EvalRecord) for e in a) and [e.tokens for e in a] == [e.tokens for e in b]
    assert a[0].loss == pytest.approx(b[0].loss, rel=1e-3)
    assert replace(a[0], loss=0) == replace(b[0], loss=0)
