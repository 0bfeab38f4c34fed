"""llm.c's model files and Hugging Face's state dicts: layout to the byte, numbers to the bit, the same model."""
import numpy as np
import pytest
import torch

from f16lab.gpt2_files import (check_gpt2, file_bytes, file_order, from_hugging_face, gpt2_shapes, read_llmc,
                               to_hugging_face, write_llmc)
from f16lab.models import GPTConfig, build, model_config
from f16lab.nn import named_parameters_once
from f16lab.precision import BF16, F32
from f16lab.profile import PrecisionProfile

TINY = model_config("tiny", layers=3, vocab_size=50)
OFFSETS = (0, 38633472, 39419904, 39429120, 39438336, 60672000, 60699648, 67777536, 67786752, 67795968, 67805184,
           96116736, 96153600, 124465152, 124474368, 124475136)  # of the 16 tensors of GPT-2 124M, in elements


def weights(profile="f32", config=TINY, seed=1):
    return {n: p.detach() for n, p in named_parameters_once(build(config, PrecisionProfile.parse(profile), seed).model)}


def test_offsets_and_sizes_of_gpt2_124m():
    config = model_config("d12")
    shapes, at, starts = gpt2_shapes(config), 0, []
    for name in file_order(config):
        if not name.startswith("blocks.") or name.startswith("blocks.0."):
            starts.append(at)
        at += torch.Size(shapes[name]).numel()
    assert tuple(starts) == OFFSETS
    assert (file_bytes(config, BF16), file_bytes(config, F32)) == (248952832, 497904640)


@pytest.mark.parametrize("profile, version, kind", [("f32", 3, "<f4"), ("bf16", 5, "<u2")])
def test_the_file_is_header_and_tensors_in_order(tmp_path, profile, version, kind):
    tensors, path = weights(profile), tmp_path / "model.bin"
    write_llmc(path, TINY, tensors)
    header = np.fromfile(path, "<i4", 256)
    assert header.tolist() == [20240326, version, 64, 50, 3, 4, 64, 128] + [0] * 248
    numbers = np.fromfile(path, kind, offset=1024)
    qkv = [tensors[f"blocks.{i}.attn.qkv.weight"] for i in range(3)]
    start = 128 * 64 + 64 * 64 + 2 * 3 * 64
    found = torch.from_numpy(numbers[start : start + 3 * 192 * 64].view(np.int16 if kind == "<u2" else np.int32))
    assert torch.equal(found.view(tensors["wte.weight"].dtype).view(3, 192, 64), torch.stack(qkv))
    config, back = read_llmc(path)
    assert config == TINY and list(back) == list(gpt2_shapes(TINY))
    assert all(torch.equal(back[n], t) and back[n].dtype is t.dtype for n, t in tensors.items())
    again = tmp_path / "again.bin"
    write_llmc(again, config, back)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.bin", "model.bin"]


def test_damaged_and_foreign_files_are_told_apart(tmp_path):
    path = tmp_path / "model.bin"
    write_llmc(path, TINY, weights())
    whole = path.read_bytes()
    for text, change in (("no model file of llm.c", b"\0" * 2000), ("no model file of llm.c", whole[:100]),
                         ("it is not whole", whole[:-1]), ("it is not whole", whole + b"\0"),
                         ("version 4; known are 3 .f32. and 5 .bf16.", whole[:4] + b"\4\0\0\0" + whole[8:])):
        path.write_bytes(change)
        with pytest.raises(ValueError, match=text):
            read_llmc(path)
    with pytest.raises(ValueError, match="no such file"):
        read_llmc(tmp_path / "nothing.bin")


def test_what_the_file_cannot_hold_is_refused(tmp_path):
    tensors = weights()
    for words, given in (("these weights are f16: cast them first", {n: t.half() for n, t in tensors.items()}),
                         ("of several precisions", {**tensors, "ln_f.bias": tensors["ln_f.bias"].bfloat16()}),
                         (r"ln_f.bias: given is nothing, this GPT-2 has \[64\]", {**tensors, "ln_f.bias": None}),
                         (r"more: given is \[64\], this GPT-2 has nothing", {**tensors, "more": tensors["ln_f.bias"]})):
        with pytest.raises(ValueError, match=words):
            write_llmc(tmp_path / "x.bin", TINY, {n: t for n, t in given.items() if t is not None})
    for changed in (dict(position="rope"), dict(kind="rms"), dict(ff=64)):
        with pytest.raises(ValueError, match="hold GPT-2 as published"):
            check_gpt2(model_config("tiny", **changed))
    assert not list(tmp_path.iterdir())


def hugging_face(config):
    t = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'f16lab[lab]'")
    return t.GPT2LMHeadModel(t.GPT2Config(n_embd=config.channels, n_layer=config.layers, n_head=config.heads,
                                          vocab_size=config.vocab_size, n_positions=config.context, bos_token_id=0,
                                          eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()


def test_a_hugging_face_model_and_ours_compute_the_same():
    ids, theirs = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0)), hugging_face(TINY)
    ours = build(TINY, PrecisionProfile()).model
    for name, t in from_hugging_face(TINY, theirs.state_dict()).items():
        ours.get_parameter(name).data.copy_(t)
    assert (ours.logits(ids) - theirs(ids).logits).abs().max() < 1e-5
    fresh = hugging_face(TINY)
    fresh.load_state_dict(to_hugging_face(TINY, {n: p.detach() for n, p in named_parameters_once(ours)}))
    assert torch.equal(fresh(ids).logits, theirs(ids).logits)
    assert torch.equal(from_hugging_face(TINY, fresh.transformer.state_dict())["wpe.weight"], ours.wpe.weight)


def test_state_dicts_that_do_not_fit_are_refused():
    state = to_hugging_face(TINY, weights())
    with pytest.raises(ValueError, match="lm_head.weight differs from wte.weight"):
        from_hugging_face(TINY, {**state, "lm_head.weight": state["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match=r"blocks.0.ln1.weight: given is \[3\], this GPT-2 has \[64\]"):
        from_hugging_face(TINY, {**state, "transformer.h.0.ln_1.weight": torch.ones(3)})
    with pytest.raises(ValueError, match="transformer.h.7.ln_1.weight: given is .64., this GPT-2 has nothing"):
        from_hugging_face(TINY, {**state, "transformer.h.7.ln_1.weight": torch.ones(64)})
    old = {**state, "transformer.h.0.attn.bias": torch.ones(1), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    assert from_hugging_face(TINY, old).keys() == gpt2_shapes(TINY).keys()


def test_training_goes_on_from_a_file(tmp_path):
    from f16lab.config import TrainConfig
    from f16lab.train import start_from
    config = TrainConfig().with_(data="markov", layers=3, steps=1, eval_every=0, batch=2)
    shape = GPTConfig(32, 3, 4, 64, 256, 64, padded_vocab=128)
    write_llmc(tmp_path / "m.bin", shape, weights(config=shape))
    _, tensors = read_llmc(tmp_path / "m.bin")
    assert start_from(config, tensors).step().loss > 0
