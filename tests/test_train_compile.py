"""torch.compile changes time, not numbers, where it can; where it cannot, it says so."""
import warnings
from dataclasses import replace

import pytest
import torch
from train_runs import small, source, trainer

from f16lab.grads import LossScale
from f16lab.train import Trainer, evaluate, sample


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No compiled code of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(profile: str, how: str, n: int = 3, **changes) -> tuple[Trainer, list]:
    t = trainer(profile, compile=how, layers=2, **changes)
    return t, [t.step() for _ in range(n)]


@pytest.mark.parametrize("profile", ["f32", "master_weights"])
def test_aot_eager_is_equal_in_every_bit(profile):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled, records = run(profile, "aot_eager")
    plain, others = run(profile, "none")
    assert compiled.digest() == plain.digest() and [r.loss for r in records] == [r.loss for r in others]
    evaluate(compiled), sample(compiled)
    assert compiled.digest() == plain.digest()
    traced, eager = ({(c.layer, c.op, c.operand, c.src, c.dst) for c in r.casts if c.phase == "train"}
                     for r in (records[0], others[0]))
    assert traced == eager  # the ledger is filled while the loss is traced


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before torch 2.13 dynamo makes a graph for each new loss scale")
def test_a_changing_loss_scale_compiles_once_more_and_no_step_does():
    pair = [trainer("master_weights", compile=how) for how in ("aot_eager", "none")]
    torch._dynamo.utils.counters.clear()
    for k in (16, 16, 15, 14, 17):
        for t in pair: t.gate = replace(t.gate, loss_scale=LossScale("dynamic", 2.0**k))
        losses = [t.step().loss for t in pair]
    assert pair[0].digest() == pair[1].digest() and losses[0] == losses[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("profile", ["f16", pytest.param("bf16_sr", marks=pytest.mark.slow)])
def test_narrow_parameters_are_warned_of(profile):
    """The gradient of each use is rounded to the parameter's precision, its sum is still taken in the wider buffer."""
    with pytest.warns(UserWarning, match="compile=aot_eager: gradients of .* such as wte.weight"):
        compiled, records = run(profile, "aot_eager")
    plain, others = run(profile, "none")
    assert [r.loss for r in records] == pytest.approx([r.loss for r in others], rel=1e-4)
    assert [r.grad_norm for r in records] == pytest.approx([r.grad_norm for r in others], rel=1e-2)
    assert compiled.model.wte.weight.grad.dtype is torch.float32 and compiled.digest() != plain.digest()


def test_dropout_is_refused_before_the_start():
    with pytest.raises(NotImplementedError, match="use dropout=0 or compile=none"):
        trainer(compile="aot_eager", dropout=0.1)


def test_equal_grad_and_param_need_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Trainer(small("all_f16", compile="aot_eager"), source())


@pytest.mark.slow
def test_inductor_is_near():
    compiled, records = run("master_weights", "inductor")
    plain, others = run("master_weights", "none")
    assert [r.loss for r in records] == pytest.approx([r.loss for r in others], rel=1e-4)
    assert [r.grad_norm for r in records] == pytest.approx([r.grad_norm for r in others], rel=1e-3)
    again, third = run("master_weights", "inductor")
    assert again.digest() == compiled.digest()
