"""The profile editor: what it offers, what it refuses and how it says so, what it forecasts."""
import random
import re
import warnings

import pytest

from f16lab.accounts import held_bytes
from f16lab.config import DataSettings, ModelSettings, TrainConfig
from f16lab.corpus import META
from f16lab.editor import MOST, Contenders, Draft, Lineup, ProfileEditor, differences
from f16lab.forecast import GROUPS, choices, forecast, forecast_words, matched, matched_words, shape_of, vocabulary, ways
from f16lab.profile import PRESETS, SLOTS, PrecisionProfile, parse_value, slot_values, value_text
from f16lab.train import Trainer

TINY = shape_of(ModelSettings())


def test_each_slot_offers_what_the_table_allows_and_nothing_else():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SLOTS)
    form = ProfileEditor("f32", TINY)
    for name, slot in SLOTS.items():
        offered = list(form.slots[name].options)
        assert {value_text(x) for x in slot.allowed} <= set(offered) and form.slots[name].tooltip == slot.governs
        for text in offered:
            parse_value(name, text)
    assert choices("loss_scale", "2^11")[-1] == "2^11" and len(choices("loss_scale", "2^8")) == len(choices("loss_scale"))


@pytest.mark.filterwarnings("ignore:.*has no effect")
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_clicked_controls_text_and_profile_agree(seed):
    draw, form, heard = random.Random(seed), ProfileEditor("f16", TINY), []
    form.on_change(heard.append)
    for _ in range(60):
        name = draw.choice(list(SLOTS))
        before, count = form.profile, len(heard)
        form.slots[name].value = draw.choice(form.slots[name].options)
        if form.draft.problem:
            assert form.profile == before and len(heard) == count  # the last valid one stands, nobody was told
            assert form.problem.value and form.problem.layout.display is None
            assert any("f16lab-wrong" in control._dom_classes for control in form.slots.values())
            continue
        assert not form.problem.value and form.problem.layout.display == "none"
        assert PrecisionProfile.parse(form.text.value) == form.profile
        shown = {name: control.value for name, control in form.slots.items()}
        assert shown == {name: value_text(value) for name, value in slot_values(form.profile).items()}
        assert not any("f16lab-wrong" in control._dom_classes for control in form.slots.values())
        if form.profile != before:
            assert heard[-1] == form.profile


@pytest.mark.parametrize("start, edits, words, marked", [
    ("bf16", [("rounding", "kahan")], "keeps what rounding loses", {"rounding"}),
    ("bf16_sr,rounding=kahan", [("master", "f32")], "keeps what rounding loses", {"master"}),
    ("bf16_sr,rounding=kahan", [("param", "e4m3")], "too few bits", {"param"}),
])
def test_a_contradiction_is_the_profiles_own_sentence_at_the_control(start, edits, words, marked):
    form = ProfileEditor(start, TINY)
    for name, value in edits:
        form.slots[name].value = value
    with pytest.raises(ValueError) as own:
        form.profile.with_(**dict(edits))
    assert words in str(own.value) and form.draft.problem == str(own.value)
    assert {name for name, c in form.slots.items() if "f16lab-wrong" in c._dom_classes} == marked
    form.preset.value = "f32"  # a way out
    assert form.profile == PRESETS["f32"] and not form.problem.value


def test_two_settings_can_change_places_through_a_refused_state():
    draft = Draft("bf16")
    assert not draft.edit(rounding="kahan") and draft.edit(master=None)
    assert (draft.profile.rounding, draft.profile.master) == ("kahan", None)
    assert not draft.edit(master="f32") and draft.edit(rounding="nearest")
    assert value_text(draft.profile.master) == "f32"


def test_a_setting_without_effect_is_told_as_the_profile_tells_it():
    form = ProfileEditor("f32", TINY)
    with warnings.catch_warnings(record=True) as told:
        form.slots["accum"].value = "f16"
    assert not told  # a warning of Python would come up in some cell
    assert "accum=f16 has no effect" in form.notes.value and form.notes.layout.display is None


@pytest.mark.parametrize("text", [*PRESETS, "f16;lm_head:compute=f32",
                                  "bf16;blocks.*.mlp:compute=f32,stable=f32;**.ln1:stable=f32"])
def test_text_goes_both_ways_overrides_included(text):
    form = ProfileEditor("f32", TINY)
    form.text.value = text
    assert form.profile == PrecisionProfile.parse(text)
    again = ProfileEditor("f32", TINY)
    again.text.value = form.text.value
    assert again.profile == form.profile and [r.pair for r in again.rows] == [r.pair for r in form.rows]


def test_wrong_text_is_told_and_changes_nothing():
    form = ProfileEditor("f16", TINY)
    for text in ("f61", "param=f15", "f16;:compute=f32", "f16;x:loss_scale=dynamic"):
        form.text.value = text
        assert form.problem.value and form.profile == PRESETS["f16"] and form.draft.problem
    form.text.value = "f16"
    assert not form.problem.value


def test_overrides_say_what_they_match():
    form = ProfileEditor("f16", TINY)
    form.add.click()
    row, = form.rows
    assert "write a module path" in row.hint.value and not form.profile.overrides
    row.glob.value = "blocks.*.mpl"
    assert "matches nothing" in row.hint.value and "Did you mean" in row.hint.value and "f16lab-warn" in row.hint._dom_classes
    row.glob.value = "blocks.*.mlp"
    assert "blocks.0.mlp" in row.hint.value and "1 more" in row.hint.value and "f16lab-warn" not in row.hint._dom_classes
    row.slot.value, row.choice.value = "param", "f32"
    assert form.profile.overrides == (("blocks.*.mlp", (("param", parse_value("param", "f32")),)),)
    row.glob.value = "no good!"
    assert "bad module path" in form.problem.value
    row.remove.click()
    assert form.profile == PRESETS["f16"] and not form.rows and not form.problem.value
    assert matched("lm_head", TINY.paths) == (["lm_head"], True) and matched("x", TINY.paths) == ([], False)
    assert "0 parameters" in matched_words("lm_head", TINY)  # tied: its matrix is the table's


@pytest.mark.parametrize("text", ["f32", "bf16", "bf16_sr,rounding=kahan", "all_f16", "t1_58",
                                  "f16;blocks.*.mlp:param=f32"])
@pytest.mark.parametrize("more", [dict(data="markov"), dict(model="cnn", data="digits")])
def test_the_forecast_is_what_a_trainer_plans(text, more):
    config = TrainConfig(text).with_(batch=2, device="cpu", eval_every=0, **more)
    trainer, shape = Trainer(config), shape_of(config.model, config.data)
    planned = {h.role: h.planned for h in held_bytes(trainer)}
    told = {role: n for role, n in forecast(config.profile, shape).items() if n}
    assert told == {role: n for role, n in planned.items() if n}


def test_the_vocabulary_is_known_or_said_to_be_assumed(tmp_path):
    assert vocabulary(DataSettings()) == (257, "") and vocabulary(DataSettings("markov")) == (32, "")
    size, note = vocabulary(DataSettings(str(tmp_path), tokenizer="bpe"))
    assert size == 50257 and "assumed" in note
    (tmp_path / META).write_text('{"vocab_size": 300}')
    assert vocabulary(DataSettings(str(tmp_path), tokenizer="bpe")) == (300, "")


def test_the_forecast_is_told_against_f32_and_follows_the_edit():
    form = ProfileEditor("f32", TINY)
    assert "as in f32" in form.cost.value
    form.slots["param"].value = "f16"
    assert "12.5 % less than f32" in form.cost.value and "weights 2 B" in form.cost.value
    assert "12.5 % more" in forecast_words(PRESETS["bf16"].with_(grad="f32", master="f32"), TINY)
    assert "linear f32 native" in ways(PRESETS["f32"], "cpu") and "boundary" in ways(PRESETS["f16"], "cpu")


def test_a_billion_parameters_are_forecast_without_being_made():
    assert shape_of(ModelSettings("d48")).parameters > 1.4e9


def test_up_to_four_contenders_have_names_of_their_own():
    parts, changes = Contenders(["f32", "f16"], TINY), []
    parts.on_change(lambda: changes.append(list(parts.lineup.chosen)))
    for _ in range(5):
        parts.plus.click()
    assert len(parts.lineup.contenders) == MOST and parts.plus.disabled
    assert list(parts.lineup.chosen) == ["f32", "f16", "f16 2", "f16 3"]
    assert [tab.description for tab in parts.tabs] == ["f32", "f16", "f16 2", "f16 3"]
    parts.tabs[1].click()
    parts.form.preset.value = "bf16"
    assert list(parts.lineup.chosen) == ["f32", "bf16", "f16", "f16 2"] and parts.lineup.chosen["bf16"] == PRESETS["bf16"]
    parts.name.value = "<b>mine</b>"
    parts.form.preset.value = "all_f16"  # a name that a person gave stays
    assert list(parts.lineup.chosen)[1] == "<b>mine</b>" and "&lt;b&gt;mine" in parts.table.value
    for _ in range(5):
        parts.minus.click()
    assert len(parts.lineup.contenders) == 1 and parts.minus.disabled and not parts.table.value
    assert changes


def test_differences_name_only_what_differs():
    html = differences({"a": PRESETS["f16"], "b": PRESETS["f16"].with_(overrides=[("lm_head", {"compute": "f32"})])})
    assert re.findall(r"<tr><th>(\w+)</th>", html) == ["layers"] and "lm_head:compute=f32" in html
    assert "equal in every slot" in differences({"a": PRESETS["f16"], "b": PRESETS["f16"]})
    assert Lineup(["f32"]).now.name == "f32"


def test_a_slot_that_an_edit_took_away_comes_back_with_it():
    draft = Draft("f16")
    assert draft.edit(compute="bf16") and draft.profile.loss_scale == "none"
    assert draft.edit(stable="bf16") and draft.profile.loss_scale == "none"  # not yet: it would have no effect
    assert draft.edit(stable="f32") and draft.edit(compute="f16") and str(draft.profile) == str(Draft("f16").profile)
    assert draft.edit(compute="bf16") and draft.edit(loss_scale="none") and draft.edit(compute="f16")
    assert draft.profile.loss_scale == "none"  # what a person chose stays
