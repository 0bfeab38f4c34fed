"""torch.compile: models trace without a graph break, and the compiled step has the bits of the eager one."""

from dataclasses import replace

import pytest
import torch

from f16lab.models import CNNConfig, build, model_config
from f16lab.nn import named_parameters_once
from f16lab.ops import deviation
from f16lab.profile import PRESETS

SMALLEST = model_config("tiny", layers=1, channels=16, heads=2, ff=32)
PERI = replace(SMALLEST, norm="peri", activation="swiglu", kind="rms", position="rope")
ENCODER = model_config("encoder", layers=1, channels=16, heads=2, ff=32)
slow = pytest.mark.slow


def data(config) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    if isinstance(config, CNNConfig): return torch.rand(3, 1, 8, 8, generator=g), torch.tensor([0, 9, 3])
    ids = torch.randint(0, 32, (3, 41), generator=g)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def step(model, loss_function, config) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(value, recorded, gradients) of one forward and backward."""
    inputs, targets = data(config)
    for p in model.parameters(): p.grad = None
    loss = loss_function(inputs, targets, weight=1 / targets.numel(), scale=64.0)
    loss.value.backward()
    return loss.value.detach(), loss.recorded, {name: p.grad.clone() for name, p in named_parameters_once(model)}


def both(config, preset: str, **options) -> tuple[tuple, tuple]:
    """The eager step and the compiled one of the same model."""
    torch._dynamo.reset()
    model = build(config, PRESETS[preset], seed=0).model
    return step(model, model.loss, config), step(model, torch.compile(model.loss, fullgraph=True, **options), config)


def assert_same(want: tuple, got: tuple) -> None:
    """Equal in every bit."""
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for name, g in want[2].items(): assert got[2][name].dtype == g.dtype and torch.equal(got[2][name], g), name


@pytest.mark.parametrize("config, preset", [
    (SMALLEST, "f16"), pytest.param(SMALLEST, "bf16", marks=slow), pytest.param(SMALLEST, "t1_58", marks=slow),
    pytest.param(PERI, "f16", marks=slow), pytest.param(ENCODER, "f16", marks=slow), pytest.param(CNNConfig(), "f16", marks=slow)])
def test_traced_step_has_the_bits_of_eager(config, preset):
    assert_same(*both(config, preset, backend="eager"))


@pytest.mark.parametrize("preset", ["f32", "master_weights", pytest.param("all_f16", marks=slow)])
def test_aot_step_has_the_bits_of_eager(preset):
    """Where gradients have the precision of their parameters."""
    assert_same(*both(SMALLEST, preset, backend="aot_eager"))


@pytest.mark.parametrize("preset", [pytest.param("f16", marks=slow), pytest.param("bf16", marks=slow)])
def test_aot_step_rounds_wide_gradients_of_half_parameters(preset):
    """AOTAutograd gives each use of a half parameter a half gradient: the loss keeps its bits, a gradient loses one rounding
    for each use."""
    want, got = both(SMALLEST, preset, backend="aot_eager")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    ulp = PRESETS[preset].param.ulp(1.0)
    for name, g in want[2].items(): assert got[2][name].dtype == torch.float32 and deviation(got[2][name], g) <= ulp, name


# largest deviation of a gradient, relative to its largest element, with inductor and emulate_precision_casts
INDUCTOR = {"f32": 1e-5, "f16": 5e-3}


@pytest.mark.parametrize("preset", ["f32", pytest.param("f16", marks=slow)])
def test_inductor_stays_within_tolerance(preset):
    want, got = both(SMALLEST, preset, backend="inductor", options={"emulate_precision_casts": True})
    assert abs(got[1].item() - want[1].item()) < INDUCTOR[preset]
    for name, g in want[2].items(): assert deviation(got[2][name], g) < INDUCTOR[preset], name


@pytest.mark.parametrize("preset", ["f32", pytest.param("f16", marks=slow)])
def test_evaluation_traces_without_gradients(preset):
    torch._dynamo.reset()
    model, ids = build(SMALLEST, PRESETS[preset], seed=0).model, data(SMALLEST)[0]
    with torch.no_grad():
        want = model(ids)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(ids), want)
