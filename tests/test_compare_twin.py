"""The plain PyTorch twin is the same model on the same batches; where it must differ, it says so."""
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from f16lab.config import TrainConfig
from f16lab.events import EvalRecord, StepRecord
from f16lab.inputs import open_source
from f16lab.models import CNNConfig, EncoderConfig, GPTConfig, MLPConfig, build
from f16lab.nn import named_parameters_once
from f16lab.precision import BF16, F16
from f16lab.profile import PRESETS
from f16lab.train import Trainer
from f16lab.twin import CastCounter, Twin, autocast_precision, plain_logits, plain_scores, twin_optimizer, twin_steps

BASE = TrainConfig("f32").with_(data="markov", layers=2, channels=32, heads=2, context=32, batch=4, steps=12, eval_every=6, eval_batches=2)


@pytest.fixture(scope="module")
def source():
    return open_source(BASE.data)


class PlainTwin(Twin):
    """The twin without autocast: f32 all through."""
    def loss(self, inputs, targets):
        logits = plain_logits(self.weights, self.inputs.model, inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("changes", [{}, dict(weight_decay=0.1, schedule="cosine", warmup=4), dict(accumulate=2, clip=0.3, beta2=0.99),
                                     dict(norm="peri", kind="rms"), dict(activation="swiglu", position="rope")])
def test_in_f32_the_twin_trains_as_we_do(source, changes):
    config = BASE.with_(**changes)
    twin, ours = PlainTwin(config, source, "bf16"), Trainer(config, source)  # bf16: no GradScaler
    for _ in range(12):
        a, b = twin.step(), ours.step()
        assert a.loss == pytest.approx(b.loss, rel=2e-5) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
        assert (a.tokens, a.lr, a.step) == (b.tokens, b.lr, b.step) and a.clip == pytest.approx(b.clip, rel=1e-3)
    for name, p in named_parameters_once(ours.model):
        assert torch.allclose(twin.weights[name], p, atol=2e-4), name


@pytest.mark.parametrize("config", [MLPConfig(hidden=(16, 8)), CNNConfig(image=(1, 8, 8), hidden=(16,))])
def test_image_models(config):
    model = build(config, PRESETS["f32"], 1).model
    x = torch.rand(5, *config.image, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(plain_logits(dict(named_parameters_once(model)), config, x), model.logits(x), atol=1e-5)


def test_images_train(source):
    config = TrainConfig().with_(model="mlp", data="digits", batch=32, steps=20, eval_every=0)
    records = [r for r in twin_steps(Twin(config)) if isinstance(r, StepRecord)]
    assert records[-1].loss < records[0].loss


def test_a_token_sees_only_what_came_before():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=g) for _ in range(3))
    changed = v.clone()
    changed[..., 4:, :] = 99.0
    assert torch.equal(plain_scores(q, k, v)[..., :4, :], plain_scores(q, k, changed)[..., :4, :])
    assert torch.allclose(plain_scores(q, k, v)[..., 0, :], v[..., 0, :])


@pytest.mark.parametrize("how, precision, scale", [("f16", F16, 65536.0), ("bf16", BF16, 1.0)])
def test_autocast_precisions(source, how, precision, scale):
    if how == "f16" and autocast_precision(torch.device("cpu")) is not F16:
        pytest.skip("this torch cannot autocast to float16 on a CPU")
    twin, ours = Twin(BASE, source, how), Trainer(BASE, source)
    a, b = twin.step(), ours.step()
    assert twin.precision is precision and a.loss_scale == scale and how in twin.note
    assert 0 < abs(a.loss - b.loss) / b.loss < 3e-3, "autocast must do something, and not much"


def test_an_overflow_is_a_skipped_step(source):
    if autocast_precision(torch.device("cpu")) is not F16:
        pytest.skip("this torch cannot autocast to float16 on a CPU")
    twin = Twin(BASE, source, "f16")
    twin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: p.detach().clone() for name, p in twin.weights.items()}
    record = twin.step()
    assert record.skipped and record.skip_reason == "non-finite" and not math.isfinite(record.grad_norm)
    assert all(torch.equal(before[name], p) for name, p in twin.weights.items())
    assert twin.step().loss_scale == 2.0**39


def test_runs_are_repeatable(source):
    ends = []
    for _ in range(2):
        twin = Twin(BASE.with_(steps=3), source)
        assert [type(r) for r in twin_steps(twin)].count(EvalRecord) == 2
        ends.append(twin.digest())
    assert ends[0] == ends[1]


def test_looking_changes_nothing(source):
    seen, blind = (Twin(BASE.with_(ledger=on, meters_every=1), source) for on in (True, False))
    a, b = ([twin.step() for _ in range(3)] for twin in (seen, blind))
    assert [r.loss for r in a] == [r.loss for r in b] and seen.digest() == blind.digest()
    assert all(r.casts for r in a) and not any(r.casts for r in b)


def test_counted_casts_by_hand():
    w, x = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4)
    with CastCounter() as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, w)
    rows = {(r.shape, r.src, r.dst): (r.count, r.bytes) for r in counter.rows()}
    assert rows == {((2, 4), "f32", "bf16"): (1, 48), ((3, 4), "f32", "bf16"): (1, 72)} and y.dtype is torch.bfloat16
    with CastCounter() as counter:
        x.to(torch.int64), x.to(torch.float32), x.clone()
    assert counter.rows() == (), "only conversions between floating-point types count"


def test_groups_decay_what_we_decay(source):
    twin = Twin(BASE.with_(weight_decay=0.1), source)
    by_decay = {g["weight_decay"]: g["params"] for g in twin_optimizer(twin.weights, twin.config).param_groups}
    assert {p.dim() for p in by_decay[0.1]} == {2} and {p.dim() for p in by_decay[0.0]} == {1}
    assert sum(map(len, by_decay.values())) == len(twin.weights)


def test_what_it_cannot_do_it_says(source):
    with pytest.raises(NotImplementedError, match="dropout=0"):
        Twin(BASE.with_(dropout=0.1), source)
    with pytest.raises(ValueError, match="torch_amp:f16"):
        Twin(BASE, source, "f32")
    with pytest.warns(UserWarning, match="skip_loss_z"):
        Twin(BASE.with_(skip_loss_z=3.0), source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Twin(BASE, source)
    from f16lab.twin import check_twin
    with pytest.raises(NotImplementedError, match="encoder"):
        check_twin(BASE, EncoderConfig(vocab_size=9, layers=1, heads=1, channels=4, ff=8, context=4))


def test_padded_vocabulary_has_no_logits():
    config = GPTConfig(vocab_size=11, padded_vocab=16, layers=1, heads=1, channels=8, ff=16, context=4)
    model = build(config, PRESETS["f32"], 0).model
    logits = plain_logits(dict(named_parameters_once(model)), config, torch.zeros(1, 4, dtype=torch.long))
    assert logits.shape == (1, 4, 11)
