"""A recipe is a value: it goes through TOML unchanged, and what is wrong, unknown or idle in it is said at once."""
import dataclasses
import json
import tomllib
import warnings

import pytest

from f16lab.config import (SECTIONS, DataSettings, ModelSettings, OptimizerSettings, RunSettings, TrainConfig,
                           from_dict, read_recipe, settings_of, to_dict, to_toml, with_settings)
from f16lab.profile import PRESETS

OTHER = dict(  # a value that is allowed and not the default, for every setting
    profile="bf16,grad=bf16;blocks.*.attn:stable=f32", model="d4", layers=3, heads=8, channels=96, ff=100, context=48,
    norm="peri", kind="rms", activation="swiglu", position="rope", dropout=0.25, data="some/file.txt", tokenizer="bpe",
    limit=12345, batch=3, accumulate=5, shuffle=False, lr=3.7e-4, beta1=0.85, beta2=0.999, eps=1e-6, weight_decay=0.1,
    clip=0.7, schedule="wsd", warmup=17, final_fraction=0.05, skip_loss_z=4.5, skip_norm_z=5.5, steps=321,
    seed=2**32 - 1, device="cuda:1", eval_every=7, eval_batches=9, sample_every=11, sample_tokens=13, meters_every=3,
    ledger=False, compile="aot_eager", deterministic=False, threads=2, mfu=True, mirrors=True,
    probe_every=5, probe_kinds="grad,v", probe_share=8, probe_micro=True,
    save_every=50, keep=3, major=100, save_at_end=False, save_on_stop=False, capsule_at=7, digest_every=3,
    zero_stage=1, zero_fallback=True, rendezvous="tcp://node1:29500", timeout=20.0, start_timeout=60.0, bucket=1.0)
OPTIONS = {name: (section, f) for name, section, f in settings_of()}


def value(config: TrainConfig, option: str):
    section, f = OPTIONS[option]
    return config.profile if not section else getattr(getattr(config, section), f.name)


def quietly(**changes) -> TrainConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainConfig().with_(**changes)


# ---------------------------------------------------------------- settings
def test_every_setting_has_one_name_a_default_and_a_line_of_help():
    names = [name for name, _, _ in settings_of()]
    assert len(names) == len(set(names)) == len(OTHER) and set(names) == set(OTHER)
    for name, section, f in settings_of():
        text = f.metadata["help"]
        assert text and "\n" not in text and len(text) < 100, name
        assert section in ("", *SECTIONS)


def test_defaults():
    c = TrainConfig()
    assert c.profile == PRESETS["f32"] and (c.model.name, c.data.source, c.run.steps) == ("tiny", "builtin", 200)
    assert (c.optimizer.beta1, c.optimizer.beta2, c.optimizer.eps, c.optimizer.clip) == (0.9, 0.95, 1e-8, 1.0)


@pytest.mark.parametrize("option", OTHER)
def test_a_setting_goes_through_toml_alone(option):
    c = quietly(**{option: OTHER[option]})
    assert value(c, option) != value(TrainConfig(), option)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = from_dict(tomllib.loads(to_toml(c)))
    assert back == c and hash(back) == hash(c) and value(back, option) == value(c, option)
    assert [o for o in OTHER if value(c, o) != value(TrainConfig(), o)] == [option]


@pytest.mark.filterwarnings("ignore:mirrors=True has no effect")
def test_all_settings_at_once():
    c = quietly(**OTHER)
    assert from_dict(tomllib.loads(to_toml(c))) == c == from_dict(json.loads(json.dumps(to_dict(c))))
    assert all(str(value(c, o)) == str(OTHER[o]) for o in OTHER if o != "profile")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_go_through_toml(preset):
    c = TrainConfig(preset)
    assert from_dict(tomllib.loads(to_toml(c))) == c and c.profile == PRESETS[preset]


def test_a_recipe_may_leave_things_out():
    assert from_dict({}) == TrainConfig()
    c = from_dict(tomllib.loads("profile = 'f16'\n[run]\nsteps = 3\n[optimizer]\nlr = 1"))
    assert c == TrainConfig("f16").with_(steps=3, lr=1.0) and c.profile == PRESETS["f16"]
    table = from_dict(tomllib.loads("[profile]\npreset = 'f16'\ncompute = 'bf16'\nloss_scale = 'none'"))
    assert table.profile == PRESETS["f16"].with_(compute="bf16", loss_scale="none")


def test_floats_are_floats():
    """Else lr=1 and lr=1.0 would be equal recipes with unequal text."""
    for option, (section, f) in OPTIONS.items():
        if isinstance(f.default, float):
            whole = quietly(schedule="cosine", **{option: 1 if option not in ("beta1", "beta2", "dropout") else 0})
            assert isinstance(value(whole, option), float), option
    assert to_toml(TrainConfig().with_(lr=1)) == to_toml(TrainConfig().with_(lr=1.0))


def test_equal_recipes_are_equal_keys():
    a, b, c = TrainConfig("f16"), TrainConfig(PRESETS["f16"]), TrainConfig().with_(profile="f16")
    assert len({a, b, c, TrainConfig("bf16")}) == 2


def test_frozen():
    c = TrainConfig()
    sections = (c.run, "steps"), (c.model, "layers"), (c.data, "batch"), (c.optimizer, "lr")
    for target, name in ((c, "profile"), (c, "run"), *sections):
        with pytest.raises(dataclasses.FrozenInstanceError): setattr(target, name, 1)


# ---------------------------------------------------------------- changes
def test_with_replaces_by_name_and_keeps_the_rest():
    c = TrainConfig("f16").with_(steps=10, lr=1e-4, model="d4", data="markov")
    d = c.with_(batch=3)
    assert (d.run.steps, d.optimizer.lr, d.model.name, d.data.source, d.data.batch) == (10, 1e-4, "d4", "markov", 3)
    assert c.data.batch == 8 and c.with_() == c and with_settings(c, {}) == c


def test_with_takes_whole_sections_too():
    c = TrainConfig().with_(run=RunSettings(steps=5), lr=1e-4)
    assert c.run == RunSettings(steps=5) and c.optimizer.lr == 1e-4
    both = TrainConfig().with_(model=ModelSettings("d4", layers=2), heads=8)
    assert both.model == ModelSettings("d4", layers=2, heads=8)
    assert TrainConfig().with_(data=DataSettings("markov")).data.source == "markov"


def test_changes_of_a_section_are_one_change():
    """In any order: a warm-up together with its schedule is not idle."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = TrainConfig().with_(warmup=10, final_fraction=0.1, schedule="cosine")
        b = TrainConfig().with_(schedule="cosine", final_fraction=0.1, warmup=10)
    assert a == b and a.optimizer.warmup == 10


def test_model_changes_are_those_that_are_not_as_named():
    assert ModelSettings().changes() == {} and ModelSettings("d4", layers=2, norm="peri", dropout=0.1).changes() == \
        dict(layers=2, norm="peri", dropout=0.1)


# ---------------------------------------------------------------- what is wrong
@pytest.mark.parametrize("changes, words", [
    (dict(steps=0), "steps=0: it must be a whole number of at least 1"),
    (dict(steps=2.0), "steps=2.0: expected int"),
    (dict(steps="9"), "steps='9': expected int"),
    (dict(steps=True), "steps=True: expected int"),
    (dict(seed=-1), "seed=-1"),
    (dict(seed=2**32), r"below 2\^32"),
    (dict(lr=-1e-3), "lr=-0.001: it must be a number of at least 0"),
    (dict(lr=float("nan")), "lr=nan"),
    (dict(lr=float("inf")), "lr=inf"),
    (dict(lr="fast"), "lr='fast': expected float"),
    (dict(lr=None), "lr=None: expected float"),
    (dict(beta1=1.0), "beta1=1.0: it must be below 1"),
    (dict(beta2=1.5), "beta2"),
    (dict(eps=0.0), "eps=0.0: it must be above 0"),
    (dict(final_fraction=1.5, schedule="cosine"), "at most 1"),
    (dict(clip=-1.0), "clip=-1.0"),
    (dict(weight_decay=-0.1), "weight_decay"),
    (dict(dropout=1.0), "dropout=1.0: it must be below 1"),
    (dict(dropout=-0.1), "dropout"),
    (dict(skip_loss_z=12.0), "skip_loss_z=12.0: from 11.27 on it never acts"),
    (dict(batch=0), "batch=0"),
    (dict(accumulate=0), "accumulate=0"),
    (dict(shuffle=1), "shuffle=1: expected bool"),
    (dict(shuffle="no"), "shuffle='no'"),
    (dict(data=""), "give builtin, markov"),
    (dict(data=5), "expected str"),
    (dict(model=5), "expected str"),
    (dict(layers=-1), "layers=-1"),
    (dict(norm=1), "norm=1: expected str"),
    (dict(schedule="cosin"), "allowed are cosine, linear, constant, wsd. Did you mean 'cosine'"),
    (dict(compile="inductr"), "none, aot_eager, inductor. Did you mean 'inductor'"),
    (dict(sample_tokens=0), "sample_tokens=0"),
    (dict(profile="f17"), "unknown preset 'f17'"),
    (dict(profile="f16,compute=f99"), "compute=f99"),
    (dict(threads=-1), "threads=-1"),
    (dict(ledger="yes"), "ledger='yes': expected bool"),
    (dict(learning_rate=1.0), "no setting 'learning_rate'"),
    (dict(step=1), "Did you mean 'steps'"),
    (dict(profile=3), "profile=3: give a preset"),
    (dict(profile=None), "profile=None"),
    (dict(run=5), "no setting 'run'")])
def test_wrong_values_are_refused(changes, words):
    with pytest.raises(ValueError, match=words) as e: TrainConfig().with_(**changes)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text, words", [
    ("[run]\nstep = 3", r"\[run\] has no setting 'step'; it has steps, .*Did you mean 'steps'"),
    ("[optimiser]\nlr = 1", "section='optimiser': a recipe has profile, model, .*Did you mean 'optimizer'"),
    ("[run]\nsteps = 'many'", r"\[run\] steps='many': expected int"),
    ("[run]\nsteps = 1.5", r"\[run\] steps=1.5"),
    ("[data]\nshuffle = 1", r"\[data\] shuffle=1: expected bool"),
    ("run = 3", r"\[run\] must be a table"),
    ("profile = 3", "profile=3: give a preset, the text"),
    ("[optimizer]\nlr = inf", r"\[optimizer\] lr=inf"),
    ("profile = 'f17'", "unknown preset"),
    ("lr = 1", "section='lr'"),
    ("[profile]\ncomputer = 'f16'", "'computer'"),
    ("[model]\nlearning = 1", r"\[model\] has no setting")])
def test_wrong_recipes_are_refused_by_place(text, words):
    with pytest.raises(ValueError, match=words) as e: from_dict(tomllib.loads(text))
    assert "\n" not in str(e.value)


def test_sections_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="run=ModelSettings.*it must be RunSettings"): TrainConfig(run=ModelSettings())


def test_reading_a_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    c = TrainConfig("all_f16").with_(steps=7, data="markov")
    path.write_text(to_toml(c), encoding="utf-8")
    assert read_recipe(path) == read_recipe(str(path)) == c
    for content, words in (("a = = 1", "is not TOML"), ("[run]\nsteps = 0", "steps=0")):
        path.write_text(content)
        with pytest.raises(ValueError, match=words) as e: read_recipe(path)
        assert str(path) in str(e.value) and "\n" not in str(e.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not TOML"): read_recipe(path)
    for missing in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ValueError, match="no such recipe"): read_recipe(missing)


# ---------------------------------------------------------------- what has no effect
@pytest.mark.parametrize("changes, words", [
    (dict(warmup=10), "warmup=10 has no effect: the schedule is constant"),
    (dict(final_fraction=0.1), "final_fraction=0.1 has no effect"),
    (dict(data="markov", tokenizer="bpe"), "tokenizer=bpe has no effect: markov is not text"),
    (dict(data="digits", limit=10), "limit=10 has no effect: digits is not text"),
    (dict(profile="f32,master=f32"), "master=f32 has no effect")])
def test_idle_settings_warn(changes, words):
    with pytest.warns(UserWarning, match=words): TrainConfig().with_(**changes)


def test_the_warning_points_at_the_caller():
    for make in (lambda: OptimizerSettings(warmup=3), lambda: DataSettings("markov", tokenizer="bpe")):
        with pytest.warns(UserWarning) as heard: make()
        assert heard[0].filename == __file__


def test_what_acts_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainConfig().with_(warmup=10, schedule="linear", data="markov", sample_every=5, skip_loss_z=3.0)
        TrainConfig().with_(data="text.txt", tokenizer="bpe", limit=10)
        for preset in PRESETS: TrainConfig(preset)
