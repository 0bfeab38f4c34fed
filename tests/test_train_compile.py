"""torch.compile changes time, not numbers, where it can; where it cannot, it says so."""
import warnings

import pytest
import torch
from train_runs import small, source, trainer

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
    traced, eager = ({(c.layer, c.op, c.operand, c.src, c.dst) for c in r.casts if c.phase == "train"} for r in (records[0], others[0]))
    assert traced == eager  # the ledger is filled while the loss is traced


def test_compiled_code_is_kept():
    """A changing loss scale, step or position must not compile again and again."""
    t = trainer("master_weights", compile="aot_eager", layers=2)
    t.step()
    torch._dynamo.utils.counters.clear()
    for _ in range(4): t.step()
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == 0


@pytest.mark.parametrize("profile", ["f16", "bf16_sr"])
def test_narrow_parameters_are_warned_of(profile):
    with pytest.warns(UserWarning, match="compile=aot_eager: gradients of .* such as wte.weight"):
        compiled, records = run(profile, "aot_eager")
    plain, others = run(profile, "none")
    assert [r.loss for r in records] == pytest.approx([r.loss for r in others], rel=1e-4)


def test_equal_grad_and_param_need_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Trainer(small("all_f16", compile="aot_eager"), source())


def test_inductor_is_near():
    compiled, records = run("master_weights", "inductor")
    plain, others = run("master_weights", "none")
    assert [r.loss for r in records] == pytest.approx([r.loss for r in others], rel=1e-4)
    assert [r.grad_norm for r in records] == pytest.approx([r.grad_norm for r in others], rel=1e-3)
    again, third = run("master_weights", "inductor")
    assert again.digest() == compiled.digest()
