"""A profile for foreign layers: f32 keeps every bit, 16 bits mean what they mean in our layers, nothing is hidden."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from f16lab.applying import apply_profile, find_head
from f16lab.cast import Ledger
from f16lab.intercept import CastWatch
from f16lab.nn import Draw
from f16lab.ops import deviation
from f16lab.precision import F16, F32
from f16lab.profile import PRESETS, PrecisionProfile
from f16lab.stand_ins import DropoutIn

HALF = ("f16", "bf16", "all_f16", "master_weights", "bf16_sr", "bf16_llmc")
X, IMAGES, VOLUME = (torch.randn(shape, generator=torch.Generator().manual_seed(3))
                     for shape in ((3, 5, 8), (2, 4, 8, 8), (2, 4, 3, 4, 4)))
IDS = torch.tensor([[0, 3, 3], [1, 0, 2]])


def gpt2(layers=2, dropout=0.0):
    t = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'f16lab[lab]'")
    config = t.GPT2Config(n_embd=16, n_layer=layers, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0,
                          eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    return t.GPT2LMHeadModel(config)


def llama():
    t = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'f16lab[lab]'")
    return t.LlamaForCausalLM(t.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=20,
                                            num_attention_heads=4, num_key_value_heads=2, bos_token_id=0,
                                            eos_token_id=0))


class Own(nn.Module):
    """Code of its own, a parameter of its own, a layer nobody knows."""

    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.full((8,), 1.1))

        def forward(self, x):
            return x * self.gain

    def __init__(self):
        super().__init__()
        self.first, self.gain, self.act, self.last = nn.Linear(8, 8), self.Gain(), nn.Hardswish(), nn.Linear(8, 4)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.last(x + self.act(self.gain(self.first(x))) + self.shift)


LAYERS = {
    "linear": (lambda: nn.Linear(8, 4), X), "no bias": (lambda: nn.Linear(8, 4, bias=False), X),
    "embedding": (lambda: nn.Embedding(6, 8), IDS), "padding_idx": (lambda: nn.Embedding(6, 8, padding_idx=0), IDS),
    "max_norm": (lambda: nn.Embedding(6, 8, max_norm=0.5), IDS),
    "scaled": (lambda: nn.Embedding(6, 8, scale_grad_by_freq=True), IDS),
    "layer norm": (lambda: nn.LayerNorm(8), X), "norm 2 axes": (lambda: nn.LayerNorm((5, 8)), X),
    "norm no affine": (lambda: nn.LayerNorm(8, elementwise_affine=False), X),
    "norm no bias": (lambda: nn.LayerNorm(8, bias=False), X),
    "rms norm": (lambda: nn.RMSNorm(8), X), "rms no weight": (lambda: nn.RMSNorm(8, elementwise_affine=False), X),
    "conv": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), IMAGES),
    "conv groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), IMAGES),
    "conv same": (lambda: nn.Conv2d(4, 4, 3, padding="same", dilation=2), IMAGES),
    "conv oblong": (lambda: nn.Conv2d(4, 4, (1, 3), padding=(0, 1), bias=False), IMAGES),
    "conv circular": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), IMAGES),
    "conv1d": (lambda: nn.Conv1d(5, 4, 3), X), "conv3d": (lambda: nn.Conv3d(4, 2, 2), VOLUME),
    "transposed": (lambda: nn.ConvTranspose2d(4, 2, 2, stride=2), IMAGES),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGES), "group norm": (lambda: nn.GroupNorm(2, 4), IMAGES),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES),
    "gelu": (lambda: nn.GELU(), X), "gelu tanh": (lambda: nn.GELU(approximate="tanh"), X),
    "relu in place": (lambda: nn.Sequential(nn.SiLU(), nn.ReLU(inplace=True)), X + X.sign() / 8),  # not at its kink
    "silu": (lambda: nn.SiLU(), X),
    "tanh": (lambda: nn.Tanh(), X), "sigmoid": (lambda: nn.Sigmoid(), X), "elu": (lambda: nn.ELU(), X),
    "prelu": (lambda: nn.PReLU(), X), "softmax": (lambda: nn.Softmax(-1), X),
    "softmax axis 1": (lambda: nn.Softmax(1), X),
    "log softmax": (lambda: nn.LogSoftmax(-1), X), "max pool": (lambda: nn.MaxPool2d(2), IMAGES),
    "average pool": (lambda: nn.AdaptiveAvgPool2d(1), IMAGES), "flatten": (lambda: nn.Flatten(), IMAGES),
    "dropout": (lambda: nn.Dropout(0.3), X), "identity": (lambda: nn.Identity(), X),
    "gru": (lambda: nn.GRU(8, 8, batch_first=True), X), "lstm": (lambda: nn.LSTM(8, 4, 2, bidirectional=True), X),
    "bilinear": (lambda: nn.Bilinear(8, 8, 3), (X, X)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X)),
    "attention with dropout": (lambda: nn.MultiheadAttention(8, 2, dropout=0.2), (X, X, X)),
    "attention other keys": (lambda: nn.MultiheadAttention(8, 2, kdim=8, vdim=8, add_zero_attn=True), (X, X, X)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2), X),
    "encoder norm first": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, norm_first=True), X),
    "decoder": (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), (X, X)),
    "own": (Own, X), "gpt2": (gpt2, IDS), "llama": (llama, IDS),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def made(name):
    torch.manual_seed(1)
    module, inputs = LAYERS[name][0](), LAYERS[name][1]
    return module, tuple(t.clone() for t in (inputs if isinstance(inputs, tuple) else (inputs,)))


def ran(module, inputs, dtype=None):
    """Floating-point outputs and the gradients of inputs and parameters, of one call."""
    inputs = [(t.to(dtype) if dtype else t).requires_grad_() if t.is_floating_point() else t for t in inputs]
    torch.manual_seed(2)
    out = module(*inputs)
    out = getattr(out, "logits", out)
    outs = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    with_grad = [t for t in outs if t.requires_grad]
    sum((t.double() * torch.linspace(-1, 1, t.numel()).reshape(t.shape)).sum() for t in with_grad).backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return outs, {**grads, **{f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}}


# ---------------------------------------------------------------- f32: not a bit
@each_layer
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_f32_keeps_every_bit(name, mode):
    (plain, inputs), (module, again) = made(name), made(name)
    converted = apply_profile(getattr(module, mode)(), "f32").module
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for a, b in zip(ran(getattr(plain, mode)(), inputs), ran(converted, again)):
        pairs = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        assert all(torch.equal(x, y) and x.dtype is y.dtype for x, y in pairs)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), converted.buffers()))
    with torch.no_grad():
        ours, theirs = (getattr(m(*inputs), "logits", None) if name in ("gpt2", "llama") else m(*inputs)
                        for m in (converted.eval(), plain.eval()))
    for x, y in zip(*map(torch.utils._pytree.tree_leaves, (ours, theirs))):
        assert x is None or torch.equal(x, y)


# ---------------------------------------------------------------- 16 bits
@each_layer
@pytest.mark.parametrize("profile", HALF)
def test_sixteen_bits_stay_near_and_gradients_lie_where_the_profile_says(name, profile):
    (plain, inputs), (module, again) = made(name), made(name)
    p = PrecisionProfile.parse(profile)
    converted = apply_profile(module, p).module
    if "dropout" in name:
        plain.eval(), converted.eval()
    expected, got = ran(plain, inputs), ran(converted, again)
    deep = name in ("gpt2", "llama", "decoder") or "encoder" in name
    bound = (2**-6 if "bf16" in profile else 2**-9) * (8 if deep else 2)
    for a, b in zip(expected[0], got[0]):
        assert a.shape == b.shape and deviation(b, a) < bound
    assert expected[1].keys() == got[1].keys()
    for key, g in got[1].items():
        own = dict(converted.named_parameters()).get(key)
        if own is not None:
            assert own.dtype is p.param.dtype and g.dtype is p.grad.dtype, key
        assert torch.isfinite(g).all() and deviation(g, expected[1][key]) < 4 * bound, key
    assert all(b.dtype is a.dtype for a, b in zip(plain.buffers(), converted.buffers()))


@each_layer
def test_half_and_f32_inputs_are_both_taken(name):
    module, inputs = made(name)
    converted = apply_profile(module, "f16").module.eval()
    with torch.no_grad():
        outs = [converted(*(t.to(dtype) if t.is_floating_point() else t for t in inputs))
                for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert all(o is not None for o in outs)


def test_slots_decide_the_precision_of_each_operator():
    profile = "param=f32,compute=f16,stable=bf16,optimizer=f32,loss=f32;3:compute=f32"
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8))
    kinds, handles = {}, []
    apply_profile(module, profile)
    for i, m in enumerate(module):
        handles.append(m.register_forward_hook(lambda m, given, out, i=i: kinds.update({i: out.dtype})))
    module(X)
    assert kinds == {0: torch.float16, 1: torch.bfloat16, 2: torch.float16, 3: torch.float32, 4: torch.bfloat16}


def test_what_a_converted_layer_means_is_what_our_own_mean():
    from f16lab import ops
    layer = nn.Linear(8, 4)
    converted = apply_profile(copy.deepcopy(layer), "f16", head="").module
    expected = ops.linear(X, layer.weight.half(), layer.bias.half(), p=F16)
    assert torch.equal(converted(X), expected)
    exact = apply_profile(nn.GELU(), "f16").module
    assert torch.equal(exact(X), F.gelu(X.half().float()).half())  # operand rounded, f32 inside, output rounded once


def test_the_door_sees_every_cast_of_a_converted_model():
    for name in ("gpt2", "llama", "encoder", "own"):
        (module, inputs), (_, again) = made(name), made(name)
        converted = apply_profile(module, "f16").module
        ran(converted, again)  # the device is probed once
        with Ledger() as ledger, CastWatch() as all_casts:
            ran(converted, inputs)
        rows = [r for r in all_casts.rows() if r.reason != "promotion" and "f64" not in (r.src, r.dst)]
        rotary = 2 if name == "llama" else 0  # cos and sin, in the model's own code
        assert sum(r.count for r in rows) == ledger.count + rotary > 30, name


def test_ternary_weights_reach_linear_layers_but_not_the_head():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    applied = apply_profile(module, "t1_58")
    assert applied.head == "1" and module[0].weight.dtype is torch.float16
    eye = torch.eye(8)
    assert len(module[0](eye).abs().unique()) == 2  # 0 and one size
    assert len((module[1](eye) - module[1].bias).unique()) > 4


# ---------------------------------------------------------------- ties, names, what is left
def test_tied_weights_stay_tied_and_names_stay():
    model = gpt2()
    names = list(model.state_dict())
    apply_profile(model, "f16")
    assert model.lm_head.weight is model.transformer.wte.weight and list(model.state_dict()) == names
    assert model.lm_head.weight.dtype is torch.float16
    with pytest.raises(ValueError, match="tied tensors need one param precision"):
        apply_profile(gpt2(), "f16;lm_head:param=f32")


@each_layer
def test_every_module_is_in_exactly_one_list(name):
    module, _ = made(name)
    paths = [path for path, _ in module.named_modules()]
    applied = apply_profile(module, "f16")
    listed = [row.path for row in (*applied.converted, *applied.left)]
    assert sorted(listed) == sorted(paths) and all(row.reason for row in applied.left)
    assert sum(n for *_, n in applied.summary()) == len(paths)


def test_unknown_layers_are_computed_in_f32_and_said_to_be():
    applied = apply_profile(Own(), "f16")
    left = {row.path: row.reason for row in applied.left}
    assert "unknown layer: computed in f32 as written" in left["gain"] and "shift" in left[""]
    assert applied.module.gain(X.half()).dtype is torch.float32
    told = apply_profile(Own(), "f16", slots={Own.Gain: "compute"})
    assert told.module.gain(X.half()).dtype is torch.float16 and "gain" in [row.path for row in told.converted]
    with pytest.raises(ValueError, match="fast is no slot"):
        apply_profile(Own(), "f16", slots={Own.Gain: "fast"})


def test_subclasses_and_replaced_forwards():
    class Named(nn.Linear):
        """Has no forward of its own."""

    class Lora(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.a = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return super().forward(x) + x * self.a

    class Drop(nn.Dropout):
        pass

    module = nn.Sequential(Named(8, 8), Lora(), Drop(0.5), nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(
        nn.Linear(8, 8)), nn.Linear(8, 8))
    module[3].forward = lambda x: x * 2
    plain = copy.deepcopy(module).eval()
    applied = apply_profile(module, "f16")
    module.eval()
    done, left = ({row.path: row for row in rows} for rows in (applied.converted, applied.left))
    assert done["0"].what == "linear in f16" and isinstance(module[2], DropoutIn) and isinstance(module[2], Drop)
    assert "unknown layer" in left["1"].reason and "replaced on the object" in left["3"].reason
    assert deviation(module(X), plain(X)) < 4e-3
    assert module[4].parametrizations.weight.original0.dtype is torch.float16
    module(X).sum().backward()


def test_autocast_around_a_converted_model_is_refused():
    for name in ("linear", "conv", "conv groups", "batch norm", "attention", "gpt2"):
        module, inputs = made(name)
        converted = apply_profile(module, "f16").module
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="outside of torch.autocast"):
            converted(*inputs)


@pytest.mark.parametrize("kind", ["T5EncoderModel", "Gemma2ForCausalLM", "BertForMaskedLM"])
def test_what_a_model_tells_its_attention_is_not_lost(kind):
    """A position bias, a cap on the scores, a padding mask: each reaches the numbers."""
    t = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'f16lab[lab]'")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    five = dict(d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, vocab_size=20)
    config = {"T5EncoderModel": lambda: t.T5Config(**five),
              "Gemma2ForCausalLM": lambda: t.Gemma2Config(num_key_value_heads=1, head_dim=8, **sizes),
              "BertForMaskedLM": lambda: t.BertConfig(**sizes)}[kind]()
    torch.manual_seed(0)
    plain = getattr(t, kind)(config).eval()
    ids, seen = torch.arange(12).reshape(2, 6) + 2, torch.ones(2, 6, dtype=torch.int64)
    seen[1, 4:] = 0

    def out(m):
        made = m(input_ids=ids, attention_mask=seen)
        return (made.last_hidden_state if kind.startswith("T5") else made.logits)[seen.bool()]

    assert torch.equal(out(apply_profile(copy.deepcopy(plain), "f32").module), out(plain))
    assert deviation(out(apply_profile(copy.deepcopy(plain), "f16").module), out(plain)) < 6e-3


def test_overrides_that_match_nothing_are_told():
    with pytest.warns(UserWarning, match="'frist' has no effect.*first"):
        apply_profile(Own(), "f16;frist:compute=f32")


def test_the_head_is_found_or_given():
    assert find_head(gpt2()) == "lm_head" and find_head(Own()) == "last"
    assert find_head(nn.TransformerEncoderLayer(8, 2)) == "linear2"
    applied = apply_profile(Own(), "f16", head="first")
    assert applied.module.first(X).dtype is torch.float32 and applied.module.last(X).dtype is torch.float16
    with pytest.raises(ValueError, match="head='nowhere': no such module"):
        apply_profile(Own(), "f16", head="nowhere")


def refused(build):
    module = build()
    made = [(n, p) for n, p in module.named_parameters() if not isinstance(p, nn.UninitializedParameter)]
    before = [(n, p.detach().clone()) for n, p in made]
    with pytest.raises(ValueError) as e:
        apply_profile(module, "f16")
    for n, p in before:
        now = module.get_parameter(n)
        assert now.dtype is p.dtype and torch.equal(now, p)
    return str(e.value)


def test_what_cannot_be_converted_is_refused_before_anything_changes():
    def with_compiled():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].compile(backend="eager")
        return module

    def twice():
        return nn.Sequential(nn.Linear(2, 2), apply_profile(nn.Linear(2, 2), "f16").module)

    assert "apply the profile before torch.compile" in refused(with_compiled)
    assert "precisions are set already" in refused(twice)
    assert "call the model once" in refused(lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="not function"):
        apply_profile(refused, "f16")


def test_frozen_parameters_and_other_precisions_are_stored_alike():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).double())
    module[0].weight.requires_grad_(False)
    applied = apply_profile(module, "f16")
    assert {p.dtype for p in module.parameters()} == {torch.float16} and not module[0].weight.requires_grad
    assert {t.dtype for t in applied.initial.values()} == {torch.float32}
    assert all(torch.equal(applied.initial[n].half(), p) for n, p in module.named_parameters())
    module(X).sum().backward()


def test_a_copy_and_a_state_dict_of_a_converted_model_work():
    module, inputs = made("encoder")
    converted = apply_profile(module, "f16").module
    again = copy.deepcopy(converted)
    assert torch.equal(again(*inputs), converted(*inputs)) and again.layers[0].linear1.where_.path == "layers.0.linear1"
    again.load_state_dict(converted.state_dict())
    fresh, _ = made("encoder")
    fresh.load_state_dict(converted.state_dict())  # the names are those of the model


def test_models_of_one_configuration_do_not_disturb_each_other():
    model = gpt2()
    other = type(model)(model.config)
    apply_profile(model, "f16")
    assert other.transformer.h[0].attn.config._attn_implementation == "sdpa"
    assert other(IDS).logits.dtype is torch.float32


# ---------------------------------------------------------------- attention
@pytest.mark.parametrize("seed", range(6))
def test_masks_mean_what_they_mean_to_torch(seed):
    g = torch.Generator().manual_seed(seed)
    def flip(): return bool(torch.randint(2, (1,), generator=g))

    first, same, batched, bool_mask, pad = (flip() for _ in range(5))
    m = nn.MultiheadAttention(8, 2, batch_first=first, bias=flip()).eval()
    q = torch.randn((3, 5, 8) if batched else (5, 8), generator=g)
    k = q if same else torch.randn((3, 7, 8) if batched else (7, 8), generator=g)
    keys = k.shape[-2]
    hide = torch.rand(6 if batched and flip() else 1, 5, keys, generator=g) > 0.6
    hide[..., 0] = False
    hide = hide if len(hide) > 1 else hide[0]
    mask = hide if bool_mask else torch.randn(hide.shape, generator=g)
    padding = torch.zeros((3, keys) if batched else (keys,), dtype=torch.bool)
    padding[..., -1] = pad
    if batched and not first:
        q, k = q.transpose(0, 1), (q if same else k).transpose(0, 1)
    k = q if same else k
    rest = dict(attn_mask=mask, key_padding_mask=padding, average_attn_weights=flip())
    expected = m(q, k, k, **rest)
    half = apply_profile(m, "param=f32,compute=f16,stable=f32,optimizer=f32").module
    for need in (True, False):
        out, shares = half(q, k, k, **rest, need_weights=need)
        assert out.shape == expected[0].shape and deviation(out, expected[0]) < 4e-3
        assert shares.shape == expected[1].shape and deviation(shares, expected[1]) < 4e-3 if need else shares is None


@pytest.mark.parametrize("profile", ["f32", "f16"])
@pytest.mark.parametrize("make", [lambda: nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
                                  lambda: gpt2(1, 0.5), lambda: sharp_llama()], ids=["torch", "gpt2", "llama"])
def test_attention_drops_by_key_in_any_precision(make, profile):
    torch.manual_seed(0)
    module = apply_profile(make(), profile).module.train()
    drops = [m for m in module.modules() if isinstance(m, DropoutIn)]
    inputs = (X, X, X) if isinstance(module, nn.MultiheadAttention) else (IDS,)

    def run(step):
        for m in drops:
            m.hand(Draw(seed=1, step=step))
        out = module(*inputs)
        return out[0] if isinstance(out, tuple) else out.logits

    once, again, other = run(0), run(0), run(1)
    assert torch.equal(once, again) and not torch.equal(once, other)
    module.eval()
    assert torch.equal(run(0), run(1)) and not torch.equal(run(0), once)


def sharp_llama():
    model = llama()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


def test_padding_gives_nothing_to_an_encoder_in_evaluation():
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2).eval()
    half = apply_profile(copy.deepcopy(plain), "f16").module.eval()
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():  # torch takes its fused kernel and nested tensors here
        expected, got = (m(X, src_key_padding_mask=padding) for m in (plain, half))
    assert deviation(got[~padding], expected[~padding]) < 4e-3


# ---------------------------------------------------------------- dropout
def test_dropout_follows_its_key_and_refuses_to_be_drawn_again():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    apply_profile(module, "f16")
    drop = module[1]
    assert isinstance(drop, DropoutIn)
    drop.hand(Draw(seed=1, step=3))
    whole = drop(X.half())
    drop.hand(Draw(seed=1, step=3, sample0=1))
    assert torch.equal(drop(X[1:].half()), whole[1:])  # noise belongs to the sample, wherever the batch is cut
    x = X.clone().requires_grad_()
    drop.hand(Draw(seed=1, step=3))
    y = checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(NotImplementedError, match="1: dropout is drawn again in the backward pass"):
        y.sum().backward()


def test_presets_all_convert():
    for name in PRESETS:
        apply_profile(Own(), name).module(X)
    assert apply_profile(Own(), "f32").module(X).dtype is F32.dtype
