"""Small runs for several test files, in this process or a fresh one: `python tests/train_runs.py resume FOLDER`."""
import json
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from f16lab.config import TrainConfig
from f16lab.data import TokenData, TokenLoader, markov_chain
from f16lab.grads import StepGate
from f16lab.inputs import Source
from f16lab.profile import PRESETS
from f16lab.train import State, Trainer, evaluate, sample

KAHAN = "bf16_sr,rounding=kahan"
PROFILES = (*PRESETS, KAHAN)


@cache
def source(tokens: int = 12_000) -> Source:
    """A short Markov chain, the last 1000 tokens held out."""
    ids = markov_chain(32, tokens).data.shards[0]
    return Source(TokenData.of(ids[:-1000], 32, "chain"), TokenData.of(ids[-1000:], 32, "chain, held out"), 32)


def small(profile: str = "f32", **changes) -> TrainConfig:
    """One block of 32 channels on 4 windows of 16 tokens, 30 steps."""
    shape = dict(data="markov", device="cpu", layers=1, heads=2, channels=32, context=16, batch=4, steps=30, lr=3e-3,
                 eval_every=0)
    return TrainConfig(profile).with_(**{**shape, **changes})


def trainer(profile: str = "f32", **changes) -> Trainer:
    """A trainer of such a run."""
    return Trainer(small(profile, **changes), source())


def ignoring(t: Trainer, token: int, data: TokenData | None = None) -> Trainer:
    """The same trainer, whose targets equal to `token` have no loss."""
    c, data = t.config, data or t.inputs.train.data
    sides = [TokenLoader(d, c.data.batch, c.model.context, c.run.seed, shuffle, steps, token)
             for d, shuffle, steps in ((data, c.data.shuffle, c.data.accumulate), (t.inputs.val.data, False, 1))]
    t.inputs = replace(t.inputs, train=sides[0], val=sides[1])
    return t


def save(state: State, folder: Path, name: str) -> None:
    """A state in two files: tensors and plain values."""
    save_file({key: t.contiguous() for key, t in state.copy().tensors.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(state.values), encoding="utf-8")


def load(folder: Path, name: str) -> State:
    """The state again."""
    return State(load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text()))


# ---------------------------------------------------------------- a run with everything that has a state
RICH = dict(dropout=0.1, accumulate=2, schedule="cosine", warmup=3, final_fraction=0.1, skip_loss_z=1.2,
            skip_norm_z=1.2, weight_decay=0.1, meters_every=3, steps=14, sample_tokens=4)
STOP = 6  # the run is interrupted after so many steps
FEW_TOKENS = 1 + 16 * 4 * 2 * 4  # four optimizer steps an epoch


def rich_source() -> Source:
    """The data of `rich`."""
    whole = source()
    return replace(whole, train=TokenData.of(whole.train.shards[0][:FEW_TOKENS], 32, "few"))


def rich(profile: str) -> Trainer:
    """Dropout, two micro-steps, warm-up, outlier windows that are soon full, a scale that soon grows, short epochs."""
    t = Trainer(small(profile, **RICH), rich_source())
    short = {name: replace(getattr(t.gate, name), window=4) for name in ("loss_outlier", "norm_outlier")}
    t.gate = replace(t.gate, **short, loss_scale=replace(t.gate.loss_scale, interval=4))
    return t


def go_on(t: Trainer, last: int, look: bool) -> list:
    """Steps up to `last`, with an evaluation and a sample every second step if asked for; the records."""
    records = []
    while t.step_number < last:
        records.append(t.step())
        if look and t.step_number % 2 == 0: evaluate(t), sample(t)
    return records


# ---------------------------------------------------------------- in a fresh process
def digests(steps: int = 4) -> dict[str, str]:
    """The digest of each profile after a few steps."""
    return {profile: _after(profile, steps) for profile in PROFILES}


def _after(profile: str, steps: int) -> str:
    t = trainer(profile, dropout=0.1, meters_every=2)
    for _ in range(steps): t.step()
    return t.digest()


def resumed(folder: Path) -> dict[str, list]:
    """Goes on with each saved run of a folder in a trainer made for it alone: digest, skips, averaged steps."""
    out = {}
    for profile in PROFILES:
        t = Trainer(small(profile, **RICH), rich_source())
        assert isinstance(t.gate, StepGate) and t.gate.loss_outlier.window == 128  # the saved window must come back
        t.load_state(load(folder, profile))
        records = go_on(t, t.config.run.steps, look=False)
        out[profile] = [t.digest(), [r.step for r in records if r.skipped], t.average.weight]
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    print(json.dumps(resumed(Path(sys.argv[2])) if sys.argv[1] == "resume" else digests()))
