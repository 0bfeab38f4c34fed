"""A capsule: the step in it is the step that was, wherever it is opened, and no byte of it may change unnoticed."""
import json
import warnings
from dataclasses import replace

import pytest
from train_runs import PROFILES, ignoring, trainer

from f16lab.capsule import (BATCHES, NAME, capsule_of, folder_of, is_capsule, load_capsule, note_after, recorded, restored,
                            save_capsule, save_state)
from f16lab.checkpoint import Refused, damage, examine
from f16lab.config import TrainConfig
from f16lab.data import TokenData, markov_chain
from f16lab.inputs import Source
from f16lab.keeping import AFTER, MOST, Keeper
from f16lab.replaying import replay_step, take
from f16lab.state import digest
from f16lab.train import Trainer

RICH = dict(dropout=0.1, accumulate=2)


def boxed(t: Trainer, steps: int):
    """The capsule of step number `steps`, what came of it, and the digest after it."""
    while t.step_number < steps: t.step()
    capsule = capsule_of(t)
    record = t.step()
    return capsule, record, t.digest()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_capsule_on_disk_gives_the_step_again_without_the_data(tmp_path, profile):
    capsule, record, after = boxed(trainer(profile, **RICH), 3)
    save_capsule(replace(capsule, after=after, record=recorded(record)), tmp_path)
    again, _ = restored(load_capsule(tmp_path))
    now = again.step()
    assert (now.loss, now.grad_norm, again.digest()) == (record.loss, record.grad_norm, after)
    with pytest.raises(ValueError, match="holds one step"): again.step()


@pytest.mark.parametrize("profile", ["f16", "bf16_llmc"])
def test_twenty_steps_are_replayed_with_equal_digests(profile):
    t = trainer(profile, dropout=0.1)
    for _ in range(20):
        capsule, record, after = boxed(t, t.step_number)
        found = replay_step(replace(capsule, after=after, record=recorded(record)))
        assert found.equal and found.own.digest == after and found.own.loss == record.loss


def test_images_and_ignored_targets_travel_along(tmp_path):
    run = Trainer(TrainConfig("f16").with_(model="mlp", data="digits", batch=8, steps=9, device="cpu", eval_every=0))
    capsule, record, after = boxed(run, 2)
    back = load_capsule(save_capsule(capsule, tmp_path / "images"))
    assert take(back).digest == after
    gaps = ignoring(trainer("bf16"), 3)
    capsule, record, after = boxed(gaps, 2)
    back = load_capsule(save_capsule(capsule, tmp_path / "gaps"))
    assert take(back).record.tokens == record.tokens < 4 * 16 and take(back).digest == after


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "zeros", "bit"])
def test_damage_of_any_file_is_found(tmp_path, how):
    capsule, _, _ = boxed(trainer("f16"), 1)
    names = [p.name for p in save_capsule(capsule, tmp_path / "whole").iterdir()]
    assert {NAME, BATCHES} < set(names) and len(names) == 6
    for name in names:
        folder = save_capsule(capsule, tmp_path / f"{how}-{name}")
        damage(folder / name, how)
        with pytest.raises(ValueError): load_capsule(folder)


def test_a_state_that_is_not_the_one_is_refused(tmp_path):
    capsule, _, _ = boxed(trainer("f16"), 2)
    other, _, _ = boxed(trainer("f16", seed=1), 2)
    save_state(other.state, other.config, tmp_path, "of another run")
    with pytest.raises(ValueError, match="is not the state before step 2"):
        save_capsule(capsule, tmp_path / "small", examine(tmp_path, 2))
    save_capsule(capsule, tmp_path / "whole")
    save_state(other.state, other.config, tmp_path / "whole", "of another run")  # intact, but not what was put there
    with pytest.raises(Refused, match="does not have the digest"): load_capsule(tmp_path / "whole")


def test_a_pointer_to_a_checkpoint_is_enough_and_moves_with_the_folder(tmp_path):
    capsule, _, after = boxed(trainer("f16"), 2)
    (tmp_path / "run").mkdir()
    save_state(capsule.state, capsule.config, tmp_path / "run", "every 2")
    folder = save_capsule(capsule, folder_of(tmp_path / "run", 2), examine(tmp_path / "run", 2))
    assert {p.name for p in folder.iterdir()} == {NAME, BATCHES} and is_capsule(folder) and is_capsule(folder / NAME)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert take(load_capsule(folder_of(tmp_path / "elsewhere", 2))).digest == after


def test_unknown_versions_and_no_capsule_are_told(tmp_path):
    with pytest.raises(ValueError, match="holds no capsule"): load_capsule(tmp_path)
    capsule, record, after = boxed(trainer("f16"), 1)
    save_capsule(capsule, tmp_path)
    note_after(tmp_path, after, recorded(record))
    assert load_capsule(tmp_path).after == after and load_capsule(tmp_path).record["loss"] == record.loss
    outer = json.loads((tmp_path / NAME).read_text())
    outer["body"] = outer["body"].replace('"step":1', '"step":2', 1)
    (tmp_path / NAME).write_text(json.dumps(outer))
    with pytest.raises(Refused, match="is damaged"): load_capsule(tmp_path)


def test_nothing_is_taken_from_a_model_of_ones_own():
    capsule, _, _ = boxed(trainer("f32"), 1)
    with pytest.raises(ValueError, match="a model of your own"): restored(replace(capsule, size=0))
    ids = markov_chain(32, 4000, seed=3).data.shards[0]
    other = TokenData.of(ids, 32, "other")
    assert take(replace(capsule, size=0), source=Source(other, other, 32)).digest == take(capsule).digest


# ---------------------------------------------------------------- replay
def test_replay_compares_with_the_runs_own_profile():
    capsule, record, after = boxed(trainer("f32"), 4)
    found = replay_step(replace(capsule, after=after), {"half": "f16", "coarse": "bf16", "same": "f32"})
    own, half, coarse, same = found.rows
    assert found.equal and own.grad_cosine == pytest.approx(1) and own.update_ratio == pytest.approx(1)
    assert 1 - 1e-4 < half.grad_cosine < 1 and coarse.grad_cosine < half.grad_cosine - 1e-6
    assert (same.digest, same.loss) == (own.digest, own.loss) and half.digest != own.digest
    assert {t.name for t in half.tensors} == set(trainer("f32").optimizer.params)
    assert half.lost > own.lost and coarse.worst.grad_cosine <= min(t.grad_cosine for t in coarse.tensors)


def test_replay_says_what_it_cannot_and_what_differs():
    capsule, record, after = boxed(trainer("bf16_sr"), 2)
    found = replay_step(capsule, ["f16", "f32"])
    assert found.rows[1].refused and not found.rows[2].refused and "taken twice" in found.proof and found.equal
    wrong = replay_step(replace(capsule, after="0" * 64, record={**recorded(record), "loss": 9.0}))
    assert not wrong.equal and "loss 9.0 →" in wrong.proof


def test_replay_of_a_skipped_step():
    t = trainer("f16,loss_scale=2^24")
    capsule, record, after = boxed(t, 0)
    found = replay_step(replace(capsule, after=after), ["f32"])
    assert record.skipped and found.equal and found.own.skip_reason == "non-finite" and found.rows[1].skip_reason == ""


# ---------------------------------------------------------------- keeping
def followed(t: Trainer, keeper: Keeper, steps: int) -> list:
    """Take steps with a keeper; its events."""
    events = []
    for _ in range(steps):
        events += keeper.before_step()
        events += keeper.before_step()  # as a paused run does
        events += keeper.after_step(t.step())
    return events


@pytest.mark.parametrize("profile", ["f16,loss_scale=2^24", "f16,rounding=kahan,loss_scale=2^24", "all_f16,loss_scale=2^24"])
def test_the_first_bad_step_is_kept_after_the_fact(tmp_path, profile):
    t = trainer(profile, dropout=0.1)
    start, keeper = digest(t.state()), Keeper(t, tmp_path)
    events = followed(t, keeper, AFTER + 3)
    assert [e.kind for e in events] == ["capsule"] and "f16lab bisect" in events[0].text
    capsule = load_capsule(folder_of(tmp_path, 0))
    assert digest(capsule.state) == start and replay_step(capsule).equal
    assert str(folder_of(tmp_path, 0)) in keeper.last_words()


def test_capsules_of_bad_steps_are_few_and_good_runs_have_none(tmp_path):
    good = trainer("f16")
    assert followed(good, Keeper(good, tmp_path), 8) == [] and not list(tmp_path.iterdir())
    t = trainer("f16")
    keeper, weight = Keeper(t, tmp_path), next(iter(t.optimizer.params.values())).detach()
    for i in range(MOST + 2):
        kept = weight.clone()
        weight.fill_(float("nan"))  # one step whose loss is NaN, then a good one
        followed(t, keeper, 1)
        weight.copy_(kept)
        followed(t, keeper, 1)
    assert len(list(tmp_path.iterdir())) == MOST


def test_a_step_that_was_asked_for(tmp_path):
    t = trainer("bf16_sr")
    keeper = Keeper(t, tmp_path, at=3, fingerprints=2)
    events = followed(t, keeper, 6)
    assert [e.kind for e in events] == ["fingerprint", "capsule", "fingerprint", "fingerprint"]
    assert load_capsule(folder_of(tmp_path, 3)).after and replay_step(load_capsule(folder_of(tmp_path, 3))).equal
    assert events[-1].text == t.digest() and "capsule of step 6" in keeper.ask()


def test_a_keeper_changes_no_bit_and_a_full_disk_stops_nothing(tmp_path, monkeypatch):
    alone, kept = trainer("f16", dropout=0.1), trainer("f16", dropout=0.1)
    for _ in range(4): alone.step()
    followed(kept, Keeper(kept, tmp_path, at=1, fingerprints=1), 4)
    assert alone.digest() == kept.digest()
    def full(*_): raise OSError(28, "No space left on device")
    monkeypatch.setattr("f16lab.keeping.save_capsule", full)
    t = trainer("f16")
    events = followed(t, Keeper(t, tmp_path, at=1), 3)
    assert t.step_number == 3 and "not written" in events[0].text


def test_ranks_that_share_state_are_told(tmp_path):
    t = trainer("f16")
    t.optimizer.world = 2
    with pytest.warns(UserWarning, match="no effect"): Keeper(t, tmp_path, at=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "no capsule" in Keeper(t, tmp_path).ask()

