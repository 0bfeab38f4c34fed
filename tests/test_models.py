"""Whole models: against a plain-torch twin, in every preset, compiled, sampled, and refused when impossible."""

import gc
import hashlib
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from f16lab import models
from f16lab.cast import Ledger
from f16lab.models import (
    CNN, GPT, MLP, Built, CNNConfig, Encoder, EncoderConfig, GPTConfig, MLPConfig, build, generate, model_config,
)
from f16lab.nn import BitLinear, Draw, Linear, named_parameters_once
from f16lab.ops import TOLERANCE, deviation
from f16lab.precision import BF16, F16, F32, F64
from f16lab.profile import PRESETS, PrecisionProfile

TINY = model_config("tiny")
SMALL = GPTConfig(vocab_size=13, layers=2, heads=2, channels=8, ff=12, context=6)
F64_PROFILE = PrecisionProfile(param=F64, compute=F64, stable=F64, optimizer=F64, grad=F64, loss=F64)


def batch(vocab: int = 32, rows: int = 3, length: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def stepped(model, inputs, targets, **options) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(value, recorded, gradients) of one forward and backward."""
    for p in model.parameters(): p.grad = None
    loss = model.loss(inputs, targets, weight=1 / targets.numel(), **options)
    loss.value.backward()
    return loss.value.detach(), loss.recorded, {name: p.grad.clone() for name, p in named_parameters_once(model)}


# ---------------------------------------------------------------- the plain twin

def plain_gpt(w: dict[str, torch.Tensor], config: GPTConfig, ids: torch.Tensor, head: torch.Tensor | None = None) -> torch.Tensor:
    """GPT-2's logits with torch.nn.functional alone, attention written out."""
    B, T = ids.shape
    D = config.channels // config.heads

    def norm(x, name): return F.layer_norm(x, (config.channels,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name): return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = F.embedding(ids, w["wte.weight"]) + F.embedding(torch.arange(T), w["wpe.weight"])
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    for i in range(config.layers):
        name = f"blocks.{i}"
        qkv = linear(norm(x, f"{name}.ln1"), f"{name}.attn.qkv")
        q, k, v = (t.view(B, T, config.heads, D).transpose(1, 2) for t in qkv.split(config.channels, -1))
        scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(D))
        y = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v
        x = x + linear(y.transpose(1, 2).reshape(B, T, config.channels), f"{name}.attn.proj")
        h = F.gelu(linear(norm(x, f"{name}.ln2"), f"{name}.mlp.fc"), approximate="tanh")
        x = x + linear(h, f"{name}.mlp.proj")
    return F.linear(norm(x, "ln_f"), w["wte.weight"] if head is None else head)


def test_f32_gpt_is_byte_identical_to_plain_torch():
    model, initial = (built := build(TINY, PRESETS["f32"], seed=1)).model, built.initial
    inputs, targets = batch()
    w = {name: initial[name].requires_grad_() for name in initial}
    logits = plain_gpt(w, TINY, inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") * (1 / targets.numel())
    loss.backward()
    value, recorded, grads = stepped(model, inputs, targets)
    assert torch.equal(model.logits(inputs), logits)
    assert torch.equal(value, loss.detach()) and torch.equal(recorded, value)
    assert list(grads) == list(w)
    for name, g in grads.items(): assert torch.equal(g, w[name].grad), name


def test_tied_gradient_is_the_sum_of_both_uses():
    built = build(TINY, PRESETS["f32"], seed=1)
    inputs, targets = batch()
    w = {name: built.initial[name].requires_grad_() for name in built.initial}
    head = built.initial["wte.weight"].requires_grad_()
    logits = plain_gpt(w, TINY, inputs, head)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").mul(1 / targets.numel()).backward()
    grads = stepped(built.model, inputs, targets)[2]
    assert w["wte.weight"].grad.abs().max() > 1e-4 and head.grad.abs().max() > 1e-4  # both uses count
    assert torch.allclose(grads["wte.weight"], w["wte.weight"].grad + head.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name, p", [("f16", F16), ("master_weights", F16), ("bf16", BF16), ("all_f16", F16)])
@pytest.mark.parametrize("norm", ["pre", "peri"])
def test_half_models_stay_near_f32(name, p, norm):
    """Loss, logits and gradients within a few roundings of the format; the recorded loss is an f32 number."""
    config, (inputs, targets) = replace(TINY, norm=norm), batch()
    reference = stepped(build(config, PRESETS["f32"], seed=2).model, inputs, targets)
    model = build(config, PRESETS[name], seed=2).model
    value, recorded, grads = stepped(model, inputs, targets, scale=256.0)
    assert recorded.dtype == torch.float32 and value.dtype == PRESETS[name].loss.dtype
    assert abs(recorded.item() - reference[1].item()) < 2 * TOLERANCE[p] * reference[1].item()
    assert value.item() == pytest.approx(recorded.item(), rel=float(2 * TOLERANCE[p]))
    for parameter, g in grads.items():
        assert g.isfinite().all() and deviation(g.float() / 256, reference[2][parameter]) < 40 * TOLERANCE[p], parameter


# ---------------------------------------------------------------- gradients

@pytest.mark.parametrize("config", [
    SMALL, replace(SMALL, norm="peri", activation="swiglu"), replace(SMALL, position="rope", kind="rms", heads=2),
    replace(SMALL, padded_vocab=16, dropout=0.25),
    EncoderConfig(vocab_size=13, layers=1, heads=2, channels=8, ff=12, context=6, pad_id=0)], ids=str)
def test_gradient_of_the_whole_model_in_f64(config):
    """Directional derivatives by central differences, one direction per parameter."""
    model = build(config, F64_PROFILE, seed=3).model
    inputs, targets = batch(13, 2, 6)
    inputs[1, 4:] = 0
    draw = Draw(1, 2) if config.dropout else None

    def value(): return model.loss(inputs, targets, weight=1 / 12, draw=draw).value

    assert value().dtype == torch.float64
    for p in model.parameters(): p.data.mul_(3)  # larger weights, larger second derivatives: a sharper check
    value().backward()
    g = torch.Generator().manual_seed(0)
    for name, p in named_parameters_once(model):
        direction, eps = torch.randn(p.shape, generator=g, dtype=torch.float64), 1e-6
        with torch.no_grad():
            p += eps * direction; up = value()
            p -= 2 * eps * direction; down = value()
            p += eps * direction
        want = ((up - down) / (2 * eps)).item()
        assert (p.grad * direction).sum().item() == pytest.approx(want, rel=1e-6, abs=1e-9), name


def test_loss_scale_multiplies_the_gradient_only():
    inputs, targets = batch()
    for name in ("f32", "f16"):
        model = build(TINY, PRESETS[name], seed=0).model
        one, eight = stepped(model, inputs, targets), stepped(model, inputs, targets, scale=8.0)
        assert torch.equal(one[0], eight[0]) and torch.equal(one[1], eight[1])
        assert deviation(eight[2]["wpe.weight"], one[2]["wpe.weight"] * 8) < 2e-3


def test_weight_and_ignored_targets():
    model = build(TINY, PRESETS["f32"], seed=0).model
    inputs, targets = batch()
    halves = [model.loss(inputs[:, :20], targets[:, :20].clone(), weight=0.5).recorded]
    masked = targets.clone()
    masked[:, 20:] = -100
    assert torch.allclose(model.loss(inputs, masked, weight=0.5).recorded, halves[0], rtol=1e-5)
    assert model.loss(inputs, torch.full_like(targets, -100), weight=1.0).recorded == 0


# ---------------------------------------------------------------- starting points

def test_every_profile_starts_from_the_same_f32_values():
    reference = build(TINY, PRESETS["f32"], seed=4)
    for name, profile in PRESETS.items():
        built = build(TINY, profile, seed=4)
        assert isinstance(built, Built) and list(built.initial) == list(reference.initial)
        for parameter, p in named_parameters_once(built.model):
            start = built.initial[parameter]
            assert start.dtype == torch.float32 and torch.equal(start, reference.model.get_parameter(parameter))
            assert torch.equal(p, start.to(p.dtype)), (name, parameter)


def test_initial_values_are_pinned():
    """The bits of a tiny GPT's initial values, all tensors in order: the same on every machine, whatever was built before."""
    build(TINY, PRESETS["f16"], seed=7)
    torch.manual_seed(99)
    h = hashlib.sha256()
    for name, value in build(TINY, PRESETS["bf16"], seed=0).initial.items(): h.update(name.encode() + value.numpy().tobytes())
    assert h.hexdigest() == "22304ef7379708e567b76629232802d333854261a6317bb735747449aa271e08"


def test_initial_sizes_follow_gpt2():
    initial = build(replace(TINY, layers=8), PRESETS["f32"], seed=0).initial
    for name, x in initial.items():
        if name.endswith("bias"): assert x.eq(0).all()
        elif ".ln" in f".{name}": assert x.eq(1).all()
        else:
            want = 0.02 / math.sqrt(16) if name.endswith("proj.weight") else 0.02
            assert x.std().item() == pytest.approx(want, rel=5 / math.sqrt(2 * x.numel())), name


def test_padding_the_vocabulary_changes_nothing():
    inputs, targets = batch()
    for name in ("f32", "f16", "bf16"):
        plain, padded = (build(replace(TINY, padded_vocab=n), PRESETS[name], seed=5).model for n in (32, 128))
        a, b = stepped(plain, inputs, targets), stepped(padded, inputs, targets)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        assert b[2]["wte.weight"][32:].eq(0).all()
        for parameter in a[2]:
            got = b[2][parameter][:32] if parameter == "wte.weight" else b[2][parameter]
            assert deviation(got, a[2][parameter]) <= (2e-6 if name == "f32" else TOLERANCE[PRESETS[name].compute]), parameter
        padded.wte.weight.data[32:] = 100.0  # even then they cannot win
        assert padded.logits(inputs).shape == (3, 40, 32) and generate(padded, [1], 20, temperature=9.0).max() < 32


# ---------------------------------------------------------------- every preset, every model

IMAGES = torch.linspace(0, 1, 4 * 64).view(4, 1, 8, 8)
CASES = {
    "gpt": (replace(TINY, layers=2), *batch()),
    "peri-swiglu-rms-rope": (replace(TINY, layers=2, norm="peri", activation="swiglu", kind="rms", position="rope"), *batch()),
    "encoder": (model_config("encoder", layers=2, norm="peri"), *batch()),
    "mlp": (MLPConfig(hidden=(32, 16)), IMAGES, torch.tensor([0, 9, 3, -100])),
    "cnn": (CNNConfig(channels=(4, 8), hidden=(16,)), IMAGES, torch.tensor([0, 9, 3, 1])),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES)
def test_every_preset_runs_every_model(case, preset):
    config, inputs, targets = CASES[case]
    profile = PRESETS[preset]
    model = build(config, profile, seed=0).model
    value, recorded, grads = stepped(model, inputs, targets, scale=64.0)
    assert value.isfinite() and recorded.isfinite() and 0.5 < recorded < 5
    assert all(g.isfinite().all() and g.dtype == profile.grad.dtype for g in grads.values())
    assert all(g.abs().max() > 0 for name, g in grads.items() if name.endswith("weight"))
    assert model.logits(inputs).dtype == profile.stable.dtype == model(inputs).dtype


def test_t1_58_makes_the_inner_linears_ternary():
    for config, classes in ((TINY, {"qkv", "proj", "fc"}), (MLPConfig(hidden=(8, 8)), {"0", "1"})):
        model = build(config, PRESETS["t1_58"]).model
        kinds = {name.rpartition(".")[2]: type(m) for name, m in model.named_modules() if isinstance(m, Linear)}
        assert {name for name, kind in kinds.items() if kind is BitLinear} == classes
        assert all(p.dtype == torch.float16 for p in model.parameters())


def test_fp8_parameters_train_too():
    profile = PrecisionProfile.parse("param=e4m3,compute=f16,stable=f32,optimizer=f32")
    model = build(replace(TINY, layers=1), profile, seed=0).model
    assert model.wte.weight.dtype == torch.float8_e4m3fn
    value, _, grads = stepped(model, *batch())
    assert value.isfinite() and all(g.dtype == torch.float32 and g.isfinite().all() for g in grads.values())


def test_overrides_by_path():
    profile = PrecisionProfile.parse("f16;lm_head:compute=f32;blocks.1.mlp:compute=f32")
    model = build(TINY, profile).model
    assert model.lm_head.p_.compute is F32 and model.wte.p_.compute is F16
    assert [b.mlp.fc.p_.compute for b in model.blocks] == [F16, F32, F16, F16]
    assert stepped(model, *batch())[0].isfinite()
    with pytest.raises(ValueError, match="one tied matrix.*f16 and as f32.*same slot"):
        build(TINY, PrecisionProfile.parse("f16;lm_head:param=f32"))


# ---------------------------------------------------------------- memory

def test_no_second_copy_of_the_weights():
    """After a step in f16 there is no f32 tensor of any weight's shape, but for the gradients."""
    config = replace(TINY, channels=96, ff=416, context=56, vocab_size=31, padded_vocab=31)
    built = build(config, PRESETS["f16"], seed=0)
    stepped(built.model, *batch(31))
    shapes = {p.shape for p in built.model.parameters() if p.dim() > 1}
    grads = {id(p.grad) for p in built.model.parameters()}
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.float32 and x.dim() == 2]
    assert not [x.shape for x in tensors if id(x) not in grads and {x.shape, x.mT.shape} & shapes]
    assert sum(p.numel() * p.itemsize for p in built.model.parameters()) == 2 * built.model.num_parameters()
    assert not list(built.model.buffers())


# ---------------------------------------------------------------- prefix and sampling

@pytest.mark.parametrize("name, tolerance", [("f32", 1e-6), ("f16", 2e-3), ("bf16", 2e-2)])
def test_a_prefix_gives_the_same_logits(name, tolerance):
    model = build(TINY, PRESETS[name], seed=0).model
    inputs, _ = batch(length=64)
    full = model.logits(inputs)
    for length in (1, 5, 33, 63): assert torch.allclose(model.logits(inputs[:, :length]), full[:, :length], atol=tolerance)
    changed = inputs.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 32
    assert torch.equal(model.logits(changed)[:, :40], full[:, :40])  # no look ahead, to the last bit
    assert not torch.equal(model.logits(changed)[:, 40:], full[:, 40:])


def test_sampling_is_keyed_and_passes_the_context():
    model = build(TINY, PRESETS["f16"], seed=0).model
    text = generate(model, [1, 2, 3], 80, seed=5)  # context is 64
    assert text.shape == (83,) and text[:3].tolist() == [1, 2, 3] and text.min() >= 0 and text.max() < 32
    assert torch.equal(text, generate(model, torch.tensor([[1, 2, 3]]), 80, seed=5)[0])
    assert not torch.equal(text, generate(model, [1, 2, 3], 80, seed=6))
    assert torch.equal(text[:43], generate(model, [1, 2, 3], 40, seed=5))  # the step number is in the key, the length is not
    rows = generate(model, torch.tensor([[1, 2], [1, 2]]), 10, seed=5)
    assert not torch.equal(rows[0], rows[1])  # each row draws for itself


def test_the_oldest_tokens_drop_out_of_sight():
    model = build(TINY, PRESETS["f32"], seed=0).model
    prompt = batch(length=90, rows=1)[0]
    text = generate(model, prompt, 2, temperature=0)[0]
    for end in (90, 91): assert text[end] == model.logits(text[None, end - 64:end])[0, -1].argmax()
    assert text[90] != model.logits(prompt[:, :64])[0, -1].argmax()  # the first 64 tokens say something else


def test_sampling_follows_the_distribution():
    """Frequencies of one token over 4000 rows against the softmax of the logits."""
    model = build(replace(TINY, layers=1), PRESETS["f32"], seed=0).model
    model.wte.weight.data.mul_(20)
    prompt = torch.ones(4000, 1, dtype=torch.int64)
    shares = torch.softmax(model.logits(prompt[:1])[0, -1].double() / 2, -1)
    got = generate(model, prompt, 1, temperature=2.0, seed=1)[:, 1].bincount(minlength=32) / 4000
    assert ((got - shares).abs() < 4.5 * torch.sqrt(shares * (1 - shares) / 4000) + 1e-4).all()


def test_temperature():
    model = build(TINY, PRESETS["f32"], seed=0).model
    greedy = generate(model, [3], 12, temperature=0)
    assert greedy[1] == model.logits(torch.tensor([[3]]))[0, -1].argmax()
    assert torch.equal(greedy, generate(model, [3], 12, temperature=1e-6, seed=9))
    with pytest.raises(ValueError, match="must be 0 or more"): generate(model, [3], 1, temperature=-1)
    with pytest.raises(ValueError, match="1/temperature.*becomes inf in f32"): generate(model, [3], 1, temperature=1e-40)
    with pytest.raises(ValueError, match="not empty"): generate(model, [], 1)


def test_sampling_leaves_no_gradient_and_no_trace():
    model = build(TINY, PRESETS["f32"], seed=0).model
    state = torch.random.get_rng_state()
    generate(model, [3], 3)
    assert all(p.grad is None for p in model.parameters()) and torch.equal(state, torch.random.get_rng_state())


# ---------------------------------------------------------------- encoder

@pytest.mark.parametrize("name", ["f32", "f16"])
def test_padding_is_never_seen(name):
    model = build(model_config("encoder", layers=2), PRESETS[name], seed=0).model
    ids = torch.tensor([[4, 5, 6, 7, 8, 9], [3, 2, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    logits = model.logits(ids)
    alone = model.logits(ids[1:2, :3])
    assert torch.allclose(logits[1, :3], alone[0], atol=1e-6 if name == "f32" else 1e-2)
    targets = torch.where(ids == 0, -100, ids)
    value, _, grads = stepped(model, ids, targets)
    assert logits.isfinite().all() and value.isfinite() and all(g.isfinite().all() for g in grads.values())


def test_encoder_sees_both_sides():
    model = build(model_config("encoder", layers=1), PRESETS["f32"], seed=0).model
    ids = torch.tensor([[4, 5, 6, 7]])
    other = torch.tensor([[4, 5, 6, 8]])
    assert not torch.equal(model.logits(ids)[0, 0], model.logits(other)[0, 0])
    assert isinstance(model, Encoder) and not isinstance(model, GPT)


# ---------------------------------------------------------------- images

def test_cnn_is_conv_relu_pool():
    built = build(CNNConfig(channels=(3, 5), hidden=(7,)), PRESETS["f32"], seed=0)
    m, x = built.model, IMAGES
    for conv in m.conv: x = F.max_pool2d(F.relu(F.conv2d(x, conv.weight, conv.bias, padding=1)), 2)
    x = F.relu(F.linear(x.flatten(1), m.fc[0].weight, m.fc[0].bias))
    assert torch.equal(m.logits(IMAGES), F.linear(x, m.head.weight, m.head.bias)) and isinstance(m, CNN)


def test_mlp_is_linear_relu_linear_and_takes_any_layout():
    m = build(MLPConfig(hidden=(16,)), PRESETS["f32"], seed=0).model
    want = F.linear(F.relu(F.linear(IMAGES.flatten(1), m.fc[0].weight, m.fc[0].bias)), m.head.weight, m.head.bias)
    for shape in ((4, 1, 8, 8), (4, 8, 8), (4, 64)): assert torch.equal(m.logits(IMAGES.view(shape)), want)
    assert isinstance(m, MLP)


def test_initial_image_models_know_nothing():
    for config in (MLPConfig(image=(1, 28, 28)), CNNConfig(image=(1, 28, 28))):
        model = build(config, PRESETS["f32"], seed=0).model
        x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        assert model.loss(x, torch.arange(16) % 10, weight=1 / 16).recorded.item() == pytest.approx(math.log(10), abs=0.25)


# ---------------------------------------------------------------- counting

def test_names_and_decay_set():
    """Two dimensions and more decay, and each storage is there once (the tied matrix is not listed as a head)."""
    model = build(replace(TINY, layers=1), PRESETS["f32"]).model
    decay = [name for name, p in named_parameters_once(model) if p.dim() >= 2]
    rest = [name for name, p in named_parameters_once(model) if p.dim() < 2]
    assert decay == ["wte.weight", "wpe.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight",
                     "blocks.0.mlp.fc.weight", "blocks.0.mlp.proj.weight"]
    assert rest == ["blocks.0.ln1.weight", "blocks.0.ln1.bias", "blocks.0.attn.qkv.bias", "blocks.0.attn.proj.bias",
                    "blocks.0.ln2.weight", "blocks.0.ln2.bias", "blocks.0.mlp.fc.bias", "blocks.0.mlp.proj.bias",
                    "ln_f.weight", "ln_f.bias"]
    assert len({p.data_ptr() for p in model.parameters()}) == len(decay) + len(rest)


# parameters of llm.c's descriptors: 12·C² + 13·C a layer, (padded vocabulary + context + 2)·C around them
@pytest.mark.parametrize("name, layers, channels, context", [
    ("d4", 4, 256, 1024), ("d6", 6, 384, 1024), ("d12", 12, 768, 1024), ("gpt2:d24", 24, 1024, 1024), ("d36", 36, 1280, 1024),
    ("d48", 48, 1600, 1024), ("d84", 84, 3456, 1024), ("gpt3:c384", 6, 384, 2048), ("gpt3:c2560", 32, 2560, 2048),
    ("gpt3:c12288", 96, 12288, 2048)])
def test_descriptors(name, layers, channels, context):
    config = model_config(name)
    with torch.device("meta"): model = GPT(config, PRESETS["bf16_llmc"])
    count = layers * (12 * channels**2 + 13 * channels) + (50304 + context + 2) * channels
    assert model.num_parameters() == count and config.vocab_size == 50257
    assert model.flops_per_token() == 6 * count + 6 * layers * channels * context


def test_figures_of_llm_c():
    with torch.device("meta"): model = GPT(model_config("d12"), PRESETS["f32"])
    assert model.num_parameters() == 124_475_904 and model.flops_per_token() == 803_478_528
    assert build(TINY, PRESETS["f32"]).model.num_parameters() == 206_208


def test_changes_to_descriptors():
    c = model_config("d4", vocab_size=257, context=128)
    assert (c.vocab_size, c.padded_vocab, c.context, c.ff, c.heads) == (257, 384, 128, 1024, 4)
    assert model_config("tiny").padded_vocab == 32 and model_config("tiny", vocab_size=257).padded_vocab == 384
    assert model_config("tiny", channels=32).ff == 128 and model_config("tiny", channels=32, ff=100).ff == 100
    assert model_config("cnn", image=(3, 32, 32)).image == (3, 32, 32)
    assert isinstance(model_config("encoder"), EncoderConfig)


@pytest.mark.parametrize("name", ["d5", "gpt3:c5140", "gpt2:tiny", "", "D12"])
def test_unknown_descriptors(name):
    with pytest.raises(ValueError, match=f"model '{name}' is not known: allowed are tiny, d4, d6, .*gpt3:c12288.*mlp, cnn"):
        model_config(name)


def test_flops_of_image_models():
    mlp = build(MLPConfig(hidden=(16,)), PRESETS["f32"]).model
    assert mlp.flops_per_token() == 6 * (64 * 16 + 16 + 16 * 10 + 10) == 6 * mlp.num_parameters()
    cnn = build(CNNConfig(channels=(2, 3), hidden=()), PRESETS["f32"]).model
    assert cnn.flops_per_token() == 6 * (64 * (18 + 2) + 16 * (54 + 3) + 12 * 10 + 10)


# ---------------------------------------------------------------- errors before work

@pytest.mark.parametrize("changes, words", [
    (dict(vocab_size=0), "vocab_size=0"), (dict(layers=0), "layers=0"), (dict(heads=5), "heads=5"), (dict(context=0), "context=0"),
    (dict(padded_vocab=31), "padding only adds rows"), (dict(position="alibi"), "allowed are 'learned' and 'rope'"),
    (dict(norm="post"), "allowed are 'pre' and 'peri'"), (dict(position="rope", heads=64), "a head has 1 of them")])
def test_impossible_configurations(changes, words):
    with pytest.raises(ValueError, match=words): replace(TINY, **changes)


def test_impossible_image_configurations():
    with pytest.raises(ValueError, match="multiples of 4"): CNNConfig(image=(1, 9, 8))
    with pytest.raises(ValueError, match="two convolutions"): CNNConfig(channels=(1, 2, 3))
    with pytest.raises(ValueError, match="channels, height, width"): MLPConfig(image=(8, 8))
    with pytest.raises(ValueError, match="size=0"): MLPConfig(hidden=(0,))
    with pytest.raises(ValueError, match="pad_id=32"): EncoderConfig(**{**vars(TINY), "pad_id": 32})
    with pytest.raises(ValueError, match="no model configuration"): build("tiny", PRESETS["f32"])


def test_wrong_inputs_in_words(monkeypatch):
    model = build(TINY, PRESETS["f32"]).model
    monkeypatch.setattr(models.ops, "gather_rows", lambda *a, **k: pytest.fail("work had started"))
    inputs, targets = batch()
    bad = inputs.clone()
    bad[1, 3] = 32
    for call, words in (
            (lambda: model.logits(bad), r"inputs: id 32 at position \(1, 3\) is outside 0 … 31"),
            (lambda: model.logits(-inputs - 1), "outside 0 … 31"),
            (lambda: model.loss(inputs, bad, weight=1), r"targets: id 32 at position \(1, 3\)"),
            (lambda: model.loss(inputs, targets[:2], weight=1), "one each"),
            (lambda: model.logits(torch.zeros(2, 65, dtype=torch.int64)), "65 tokens long, the model's context is 64"),
            (lambda: model.logits(inputs[0]), r"\[batch, length\]"),
            (lambda: model.logits(inputs.float()), "must be integers")):
        with pytest.raises(ValueError, match=words): call()


def test_wrong_images_in_words():
    model = build(MLPConfig(), PRESETS["f32"]).model
    with pytest.raises(ValueError, match="divide by 255"): model.logits(torch.zeros(1, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[2, 63\], the model was built for \['batch', 1, 8, 8\]"): model.logits(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="id 10 at position"): model.loss(IMAGES, torch.tensor([1, 2, 3, 10]), weight=1)
    with pytest.raises(ValueError, match="one each"): model.loss(IMAGES, torch.tensor([1, 2, 3]), weight=1)


# ---------------------------------------------------------------- dropout through the model

def test_dropout_is_the_same_for_any_split_of_the_batch():
    model = build(replace(TINY, dropout=0.2), PRESETS["f32"], seed=0).model
    inputs, targets = batch(rows=4)
    whole = model.loss(inputs, targets, weight=1.0, draw=Draw(0, 7)).recorded
    parts = [model.loss(inputs[i:i + 1], targets[i:i + 1], weight=1.0, draw=Draw(0, 7, sample0=i)).recorded for i in range(4)]
    assert torch.allclose(whole, sum(parts), rtol=1e-5)
    assert model.loss(inputs, targets, weight=1.0).recorded != whole
    plain = build(TINY, PRESETS["f32"], seed=0).model
    assert torch.equal(model.loss(inputs, targets, weight=1.0).recorded, plain.loss(inputs, targets, weight=1.0).recorded)


def test_dropout_of_image_models():
    model = build(MLPConfig(dropout=0.5), PRESETS["f16"], seed=0).model
    a, b = (model.loss(IMAGES, torch.tensor([0, 1, 2, 3]), weight=0.25, draw=Draw(0, s)).recorded for s in (1, 2))
    assert a != b


# ---------------------------------------------------------------- where master_weights casts

def test_master_weights_casts_where_it_should():
    """Storage f32, matmuls f16, softmax, norms and loss f32, the loss gradient cast down for the backward's matmul."""
    model = build(replace(TINY, layers=1), PRESETS["master_weights"], seed=0).model
    inputs, targets = batch()
    with Ledger() as ledger: stepped(model, inputs, targets, scale=1024.0)
    rows = {(r.direction, r.layer, r.op, r.operand, r.src, r.dst, r.reason): r for r in ledger.rows()}

    def has(*row): return row in rows

    assert rows["forward", "wte", "gather_rows", "rows", "f32", "f16", "operand"].shape == (3, 40, 64)
    for layer in ("blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc", "blocks.0.mlp.proj"):
        assert has("forward", layer, "linear", "weight", "f32", "f16", "operand")
        assert has("backward", layer, "linear", "weight", "f16", "f32", "storage")
    assert has("forward", "blocks.0.attn", "softmax", "x", "f16", "f32", "operand")
    assert has("forward", "blocks.0.attn", "batched_matmul", "a", "f32", "f16", "operand")  # the probabilities, for A·V
    for norm in ("blocks.0.ln1", "blocks.0.ln2", "ln_f"): assert has("forward", norm, "layer_norm", "x", "f16", "f32", "operand")
    assert has("backward", "lm_head", "head_cross_entropy", "grad", "f32", "f16", "operand")
    assert not any(r.operand == "logits" for r in ledger.rows())
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_f32_models_cast_nothing():
    model = build(TINY, PRESETS["f32"], seed=0).model
    with Ledger() as ledger: stepped(model, *batch())
    assert ledger.count == 0
