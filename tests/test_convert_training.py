"""Foreign models in our trainer: every profile, and the engine's promises."""
import math

import pytest
import torch
from test_convert import gpt2, llama
from torch import nn

from f16lab.applying import apply_profile
from f16lab.config import TrainConfig
from f16lab.inputs import open_source
from f16lab.looking import Look, RunProbe
from f16lab.own_model import OwnModel, logits_of
from f16lab.profile import PRESETS, PrecisionProfile
from f16lab.state import digest
from f16lab.train import Trainer, accuracy, evaluate, replay, sample, start_from, steps


class Digits(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 16, 10))


class Words(nn.Module):
    def __init__(self, words=32, width=16):
        super().__init__()
        self.table, self.place = nn.Embedding(words, width), nn.Parameter(torch.randn(8, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(width, words)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.table(ids) + self.place[: ids.shape[1]], mask, is_causal=True))


IMAGE = TrainConfig().with_(model="own", data="digits", batch=16, steps=4, eval_every=0, eval_batches=2, lr=1e-2)
TEXT = IMAGE.with_(data="markov", batch=4, accumulate=2)
RUNS = {"digits": (OwnModel(Digits), IMAGE), "words": (OwnModel(Words, 8), TEXT),
        "gpt2": (OwnModel(lambda: sized(gpt2), 16), TEXT), "llama": (OwnModel(lambda: sized(llama), 16), TEXT)}


def sized(make):
    model = make()
    model.resize_token_embeddings(32)
    return model


@pytest.fixture(scope="module")
def sources():
    return {"digits": open_source(IMAGE.data), "markov": open_source(TEXT.data)}


def trainer_of(name, sources, profile="f32", **changes):
    model, config = RUNS[name]
    return Trainer(config.with_(profile=profile, **changes), model.source(sources[config.data.source]))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("profile", PRESETS)
def test_every_profile_trains_every_model(name, profile, sources):
    if name in ("gpt2", "llama"):
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'f16lab[lab]'")
    trainer = trainer_of(name, sources, profile)
    records = [trainer.step() for _ in range(4)]
    assert all(r.grad_norm > 0 for r in records) and not any(r.skipped for r in records)
    plain = trainer_of(name, sources)
    expected = [plain.step().loss for _ in range(4)]
    bound = 0.5 if profile == "t1_58" else 2e-2 if "bf16" in profile or profile == "all_f16" else 3e-3
    assert all(abs(r.loss - e) < bound * e for r, e in zip(records, expected))
    assert (sum(row.count for r in records for row in r.casts) == 0) is (profile == "f32")


@pytest.mark.parametrize("name", ["digits", "words"])
@pytest.mark.parametrize("profile", ["f32", "bf16_sr"])
def test_steps_repeat_and_replay_and_resume_bit_for_bit(name, profile, sources):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trainer = trainer_of(name, sources, profile)
    digests = []
    for _ in range(3):
        trainer.step()
        digests.append(trainer.digest())
    model, config = RUNS[name]
    source = model.source(sources[config.data.source])
    record, state = replay(config.with_(profile=profile), 2, source=source)
    assert digest(state) == digests[2]
    again = trainer_of(name, sources, profile)
    again.step()
    saved = again.state().copy()
    later = trainer_of(name, sources, profile)
    later.load_state(saved)
    assert later.digest() == digests[0]
    later.step()  # a batch norm's running statistics are part of the state, too
    assert later.digest() == digests[1] and ("model.1.running_var" in state.tensors) is (name == "digits")
    assert torch.equal(torch.get_rng_state(), before)  # torch's generator is not ours


def test_micro_batches_weigh_by_targets_and_draw_their_own_dropout(sources):
    one, two = (trainer_of("words", sources, "f32", batch=b, accumulate=a) for b, a in ((8, 1), (4, 2)))
    a, b = one.step(), two.step()
    assert a.tokens == b.tokens and abs(a.grad_norm - b.grad_norm) < 0.2 * a.grad_norm
    dry = OwnModel(lambda: nodrop(Words()), 8)
    runs = [Trainer(TEXT.with_(batch=n, accumulate=k), dry.source(sources["markov"])) for n, k in ((8, 1), (4, 2))]
    a, b = (t.step() for t in runs)
    assert abs(a.loss - b.loss) < 1e-6 and abs(a.grad_norm - b.grad_norm) < 1e-5


def nodrop(model):
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        if isinstance(m, nn.MultiheadAttention):
            m.dropout = 0.0
    return model


def test_f32_is_plain_pytorch(sources):
    """The same batches through the module itself, its gradients by autograd."""
    own, plain = OwnModel.of(nodrop(Words()), 8), nodrop(Words())
    trainer = Trainer(TEXT.with_(accumulate=1), own.source(sources["markov"]))
    plain.load_state_dict(trainer.model.module.state_dict())
    batch = trainer.inputs.train.batch(0)
    loss = nn.functional.cross_entropy(plain.train()(batch.inputs).flatten(0, 1), batch.targets.flatten())
    loss.backward()
    record = trainer.step()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm().item()
    assert abs(record.loss - loss.item()) < 1e-6 and abs(record.grad_norm - norm) < 1e-5 * norm


def test_evaluation_draws_nothing_and_accuracy_and_samples_work(sources):
    trainer = trainer_of("words", sources, sample_tokens=4)
    assert evaluate(trainer) == evaluate(trainer)
    assert len(sample(trainer).text.split()) == 4
    digits = trainer_of("digits", sources)
    before = accuracy(digits)
    for _ in range(4):
        digits.step()
    assert accuracy(digits) > before and digits.model.flops_per_token() > 6 * 8 * 9 * 64


def test_the_engine_loop_and_its_probe_take_an_own_model(sources):
    trainer = trainer_of("words", sources, "f16", steps=2)
    with RunProbe(trainer, Look(share=1)):
        records = [r for r in steps(trainer) if hasattr(r, "histograms")]
    layers = {h.layer for h in records[0].histograms}
    assert len(records) == 2 and {"body.layers.0.linear1", "head"} <= layers


def test_profiles_are_compared_on_an_own_model_but_not_with_torch_amp(sources):
    from f16lab.compare import run_comparison
    model, config = RUNS["words"]
    source, short = model.source(sources["markov"]), config.with_(steps=2)
    result = run_comparison(short, ["f32", "f16"], source=source)
    assert {c.name for c in result.contenders} == {"f32", "f16"}
    with pytest.raises(NotImplementedError, match="torch_amp trains our models"):
        run_comparison(short, ["f32", "torch_amp"], source=source)


def test_weights_and_seeds_start_a_run(sources):
    model, config = RUNS["words"]
    source = model.source(sources["markov"])
    a, b = (Trainer(config.with_(seed=s), source) for s in (0, 1))
    assert not torch.equal(a.model.module.head.weight, b.model.module.head.weight)
    weights = {n: torch.zeros_like(p) for n, p in a.model.named_parameters()}
    assert start_from(config, weights, source).step().loss == pytest.approx(math.log(32), abs=1e-5)
    kept = OwnModel.of(Words(), 8)
    c, d = (Trainer(config.with_(seed=s), kept.source(sources["markov"])) for s in (0, 1))
    assert torch.equal(c.model.module.head.weight, d.model.module.head.weight)  # a module is what it is


def test_masters_start_from_the_unrounded_values(sources):
    trainer = trainer_of("words", sources, "bf16")
    group = next(g for g in trainer.optimizer.buffers if g.master is not None)
    expected = OwnModel(Words, 8).build(PrecisionProfile(), TEXT.run.seed, "cpu").initial
    view = group.layout.view(group.master, "head.weight")
    assert view.dtype is torch.float32 and torch.equal(view, expected["head.weight"])


def test_own_models_are_named_own_and_come_with_data(sources):
    model, config = RUNS["words"]
    source = model.source(sources["markov"])
    with pytest.raises(ValueError, match="write model='own' instead of 'tiny'"):
        Trainer(config.with_(model="tiny"), source)
    with pytest.raises(ValueError, match="hand it over in Python"):
        Trainer(config, sources["markov"])
    with pytest.raises(ValueError, match="layers: settings of our models"):
        Trainer(config.with_(layers=3), source)
    with pytest.raises(NotImplementedError, match="compile=aot_eager: a model of one's own is not compiled"):
        Trainer(config.with_(compile="aot_eager"), source)


def test_outputs_without_logits_are_refused():
    class Odd(nn.Module):
        def forward(self, x):
            return {"scores": x}

    with pytest.raises(ValueError, match="Odd returns dict, in which there are no logits: pass logits="):
        logits_of(Odd(), torch.ones(1))
    applied = apply_profile(nn.Linear(2, 2), "f16")
    assert applied.head == "" or applied.module is not None
