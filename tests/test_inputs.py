"""What a recipe names is opened and made to fit, or refused in one sentence before anything starts."""
import warnings

import numpy as np
import pytest
import torch

from f16lab.config import DataSettings, ModelSettings, TrainConfig
from f16lab.corpus import prepare
from f16lab.data import TokenData, TokenLoader, markov_chain
from f16lab.images import ImageLoader
from f16lab.inputs import MARKOV_TOKENS, Source, fit_model, open_inputs, open_source
from f16lab.models import CNNConfig, GPTConfig, MLPConfig

BASE = TrainConfig().with_(data="markov")


@pytest.fixture(scope="module")
def markov() -> Source:
    return open_source(DataSettings("markov"))


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_source(DataSettings("digits"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of five text files."""
    path = tmp_path_factory.mktemp("texts")
    for i in range(5): (path / f"{i}.txt").write_text(f"file number {i}. " * 200, encoding="utf-8")
    return path


# ---------------------------------------------------------------- sources
def test_markov_is_one_chain_cut_in_two(markov):
    chain = markov_chain(32, MARKOV_TOKENS * 11 // 10).data.shards[0]
    assert len(markov.train) == MARKOV_TOKENS and len(markov.val) == MARKOV_TOKENS // 10
    assert (np.concatenate([markov.train.shards[0], markov.val.shards[0]]) == chain).all()
    assert markov.size == 32 and markov.tokenizer is None


def test_digits(digits):
    assert (len(digits.train), len(digits.val), digits.size) == (1500, 297, 10) and digits.tokenizer is None


@pytest.mark.parametrize("source", ["folder", "file"])
def test_text(folder, source):
    s = open_source(DataSettings(str(folder if source == "folder" else folder / "0.txt")))
    assert s.size == s.tokenizer.vocab_size == 257 and len(s.train) > len(s.val) > 0
    assert "file number" in s.tokenizer.decode(s.train.shards[0][:200])


def test_the_limit_is_in_bytes_and_zero_means_all(folder):
    some, everything = (open_source(DataSettings(str(folder), limit=n)) for n in (2000, 0))
    whole = sum(p.stat().st_size for p in folder.glob("*.txt"))
    assert len(some.train) + len(some.val) <= 2100 < whole <= len(everything.train) + len(everything.val) <= whole + 10


def test_a_prepared_folder_is_what_it_was_made_from(folder, tmp_path):
    made = prepare(str(folder), tmp_path / "made")
    s = open_source(DataSettings(str(tmp_path / "made")))
    assert s.train.sha256 == made.data("train").sha256 == open_source(DataSettings(str(folder), limit=0)).train.sha256
    assert s.size == 257 and s.tokenizer.vocab_size == 257
    with pytest.warns(UserWarning, match="tokenizer=bpe has no effect: .* holds tokens already"):
        open_source(DataSettings(str(tmp_path / "made"), tokenizer="bpe"))


@pytest.mark.parametrize("settings, words", [
    (DataSettings("missing/file.txt"), "'missing/file.txt': no such file or folder; use builtin, markov, digits"),
    (DataSettings("markv"), "'markv': no such file or folder")])
def test_sources_that_are_not_there(settings, words):
    with pytest.raises(ValueError, match=words) as e: open_source(settings)
    assert "\n" not in str(e.value)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "x.txt").write_bytes(bytes(range(256)) * 8)
    with pytest.raises(ValueError) as e: open_source(DataSettings(str(tmp_path / "x.txt")))
    assert "x.txt" in str(e.value) and "\n" not in str(e.value)


# ---------------------------------------------------------------- models
def test_vocabulary_and_classes_come_from_the_data(markov, digits, folder):
    text = open_source(DataSettings(str(folder)))
    assert fit_model(ModelSettings("tiny"), markov).vocab_size == 32
    assert fit_model(ModelSettings("tiny"), text).vocab_size == 257
    mlp, cnn = fit_model(ModelSettings("mlp"), digits), fit_model(ModelSettings("cnn", dropout=0.1), digits)
    assert isinstance(mlp, MLPConfig) and (mlp.image, mlp.classes) == ((1, 8, 8), 10)
    assert isinstance(cnn, CNNConfig) and (cnn.dropout, cnn.classes) == (0.1, 10)


def test_changes_reach_the_model(markov):
    changes = dict(layers=3, heads=2, channels=32, ff=100, context=24, norm="peri", kind="rms", activation="swiglu",
                   position="rope", dropout=0.25)
    c = fit_model(ModelSettings("tiny", **changes), markov)
    assert isinstance(c, GPTConfig) and {name: getattr(c, name) for name in changes} == changes
    assert fit_model(ModelSettings("tiny", channels=32), markov).ff == 128  # ff follows channels


@pytest.mark.parametrize("settings, images, words", [
    (ModelSettings("tiny"), True, "'tiny' does not fit data 'digits train': use mlp or cnn"),
    (ModelSettings("mlp"), False, "'mlp' does not fit data 'markov train': use a transformer"),
    (ModelSettings("mlp", layers=2, heads=2), True, "layers, heads: these are settings of a transformer, not of mlp"),
    (ModelSettings("d5"), False, "model 'd5' is not known"), (ModelSettings("tiny", norm="post"), False, "'?pre'?"),
    (ModelSettings("tiny", activation="tanh"), False, "gelu"),
    (ModelSettings("tiny", position="none"), False, "rope"), (ModelSettings("tiny", heads=5), False, "heads")])
def test_models_that_do_not_fit(settings, images, words, markov, digits):
    with pytest.raises(ValueError, match=words) as e: fit_model(settings, digits if images else markov)
    assert "\n" not in str(e.value)


def test_the_encoder_is_built_by_hand(markov):
    with pytest.raises(ValueError, match="model 'encoder' is built by hand"):
        open_inputs(BASE.with_(model="encoder"), markov)


# ---------------------------------------------------------------- loaders
def test_both_sides(markov):
    c = BASE.with_(batch=4, accumulate=3, seed=7, context=32)
    i = open_inputs(c, markov)
    assert isinstance(i.train, TokenLoader) and i.train.data is markov.train and i.val.data is markov.val
    assert (i.train.batch_size, i.train.step_batches, i.train.context) == (4, 3, 32)
    assert (i.val.batch_size, i.val.step_batches) == (4, 1)
    expected = TokenLoader(markov.train, 4, 32, 7, True, 3)
    assert torch.equal(i.train.batch(5).inputs, expected.batch(5).inputs)


def test_evaluation_reads_in_plain_order_training_in_keyed_order(markov):
    i = open_inputs(BASE, markov)
    ids = markov.val.shards[0].astype(np.int64)
    inputs, targets = (x.flatten().numpy() for x in (i.val.batch(0).inputs, i.val.batch(0).targets))
    assert (inputs == ids[:8 * 64]).all() and (targets == ids[1:8 * 64 + 1]).all()
    assert i.train.batch(0).samples.tolist() != list(range(8))
    plain = open_inputs(BASE.with_(shuffle=False), markov)
    assert plain.train.batch(0).samples.tolist() == list(range(8))
    other = open_inputs(BASE.with_(seed=1), markov)
    assert other.train.batch(0).samples.tolist() != i.train.batch(0).samples.tolist()
    assert torch.equal(other.val.batch(1).inputs, i.val.batch(1).inputs)


def test_images_have_loaders_too(digits):
    i = open_inputs(TrainConfig().with_(model="cnn", data="digits", batch=10, accumulate=2), digits)
    assert isinstance(i.train, ImageLoader) and i.train.batch(0).inputs.shape == (10, 1, 8, 8) and i.tokenizer is None
    assert i.train.target_tokens(0) == 20 and i.val.steps_per_epoch() == 29


def test_a_source_may_be_shared(markov):
    a, b = open_inputs(BASE, markov), open_inputs(BASE.with_(profile="f16"), markov)
    a.train.advance()
    assert b.train.position == 0 and a.train.data is b.train.data


@pytest.mark.parametrize("changes, words", [
    (dict(batch=100_000), "6249 samples, one step takes 100000"),
    (dict(batch=1000, accumulate=7), "one step takes 7000 .7 micro-batches of 1000"),
    (dict(context=1_000_000), "one window of context 1000000 takes 1000001"),
    (dict(batch=1000), "markov val.*624 samples")])
def test_data_that_are_too_short(changes, words, markov):
    with pytest.raises(ValueError, match=words) as e: open_inputs(BASE.with_(**changes), markov)
    assert "\n" not in str(e.value)


def test_idle_samples_of_images(digits):
    c = TrainConfig().with_(model="mlp", data="digits", sample_every=5)
    with pytest.warns(UserWarning, match="sample_every=5 has no effect: mlp writes no text"): open_inputs(c, digits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_inputs(c.with_(sample_every=0), digits)


def test_a_source_of_ones_own():
    own = Source(TokenData.of([1, 2, 3] * 100, 5), TokenData.of([1, 2, 3] * 100, 5), 5)
    i = open_inputs(BASE.with_(context=8, batch=2), own)
    assert i.model.vocab_size == 5 and i.model.context == 8 and i.train.batch(0).inputs.max() < 5
