"""The workbench without a browser: clicks, words, and runs that know nothing of the display."""
import os
import re
import signal
import time
import tomllib
import warnings

import pytest

from f16lab.config import TrainConfig, read_recipe
from f16lab.events import StepRecord
from f16lab.fleet import Driven, Fleet, recipe_of
from f16lab.forms import EventTable, RecipeForm, beside_a_browser, headless
from f16lab.resume import resume
from f16lab.steering import start_run
from f16lab.train import Trainer, steps
from f16lab.workbench import Workbench

SHAPE = dict(data="markov", device="cpu", layers=1, heads=2, channels=32, context=16, batch=4, steps=1000, eval_every=0,
             threads=1, lr=1e-3)


def tiny(profile: str = "f32", **more) -> TrainConfig:
    return TrainConfig(profile).with_(**{**SHAPE, **more})


def until(bench: Workbench, wanted, seconds: float = 40.0):
    """Looks of the runs when they are as wanted; the last ones if they are not in time."""
    end = time.monotonic() + seconds
    bench.tick()
    while not wanted([m.look for m in bench.fleet.members]) and time.monotonic() < end:
        time.sleep(0.01)
        bench.tick()
    return [m.look for m in bench.fleet.members]


def text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


@pytest.fixture
def benches():
    """A list for workbenches; whatever the test does, none of their processes is left."""
    made = []
    yield made
    for bench in made:
        for m in bench.fleet.members:
            if m.run.started is not None and m.run.started.alive:
                os.kill(m.run.started.pid, signal.SIGKILL)
            if m.run.started is not None and m.run.started.child is not None:
                m.run.started.child.wait()
        bench.close()


# ---------------------------------------------------------------- a run in this process
def test_stop_ends_a_run_in_this_process_within_a_step_and_what_is_saved_goes_on(tmp_path, benches):
    seen = []

    def draws(record):
        if isinstance(record, StepRecord):
            seen.append(record.step)
        raise RuntimeError("no such figure")

    bench = Workbench(steps(tiny("f16", save_every=20)), tmp_path / "run", on_record=[draws])
    benches.append(bench)
    assert bench.fleet.members[0].look.state == "ready" and "Compare" not in [
        b.description for b in bench.tools.values() if b.layout.display != "none"]
    bench.tools["start"].click()
    until(bench, lambda looks: len(seen) > 50)
    bench.tools["start"].click()
    assert "under way" in bench.said.value  # a second start
    bench.tools["stop"].click()
    at_click = len(seen)
    look, = until(bench, lambda looks: not looks[0].alive)
    assert len(seen) - at_click <= 2  # the step in hand, and one that began while the click was counted
    assert look.state == "stopped" and look.words.startswith(f"stopped at step {len(seen)}") and look.done < 1000
    assert f"stopped at step {len(seen)} of 1000" in text(bench.status.value)
    assert bench.driven.callbacks.errors > len(seen) and bench.driven.callbacks.problem.count("no such figure") == 1
    assert bench.driven.wait(20)
    trainer = Trainer(tiny("f16", save_every=20))
    found = resume(trainer, tmp_path / "run")
    assert found.step == look.done and trainer.step().step == look.done
    bench.tools["start"].click()
    assert "has ended" in bench.said.value


def test_what_a_display_raises_is_told_once(tmp_path, benches):
    bench = Workbench(steps(tiny(steps=30)), tmp_path / "run", on_record=[lambda record: 1 / 0])
    benches.append(bench)
    said = []
    bench.said.observe(lambda change: said.append(text(change["new"])), "value")
    bench.tools["start"].click()
    look, = until(bench, lambda looks: looks[0].state == "finished")
    bench.tick()
    assert look.state == "finished" and look.done == 30
    assert len([words for words in said if "ZeroDivisionError" in words]) == 1


def test_pause_step_set_and_resume_in_this_process(tmp_path, benches):
    bench = Workbench(Trainer(tiny("f16", steps=100_000)), tmp_path / "run")
    benches.append(bench)
    bench.tools["start"].click()
    until(bench, lambda looks: looks[0].done > 3)
    bench.tools["pause"].click()
    paused, = until(bench, lambda looks: looks[0].state == "paused")
    bench.count.value = 2
    bench.tools["step"].click()
    stepped, = until(bench, lambda looks: looks[0].done == paused.done + 2 and looks[0].state == "paused")
    assert (stepped.done, stepped.state) == (paused.done + 2, "paused")
    bench.contenders.form.slots["stable"].value = "f16"
    bench.apply.click()
    until(bench, lambda looks: "stable=f16" in bench.fleet.members[0].run.profile)
    assert "stable=f16" in bench.fleet.members[0].run.profile
    bench.tools["resume"].click()
    assert until(bench, lambda looks: looks[0].done > stepped.done + 2)[0].state == "running"
    bench.tools["stop"].click()
    assert until(bench, lambda looks: not looks[0].alive)[0].state == "stopped"


def test_a_generator_from_elsewhere_is_driven_and_its_error_is_shown_with_a_command(tmp_path, benches):
    def theirs():
        for i in range(100_000):
            yield StepRecord(step=i, loss=1.0)
            if i == 400:
                raise ValueError("their <own> bug")

    bench = Workbench(theirs(), tmp_path / "run")
    benches.append(bench)
    assert recipe_of(theirs()) is None
    bench.tools["start"].click()
    look, = until(bench, lambda looks: not looks[0].alive)
    assert look.state == "failed" and look.done == 401
    shown = bench.status.value
    assert "f16lab-is-failed" in shown and "their &lt;own&gt; bug" in shown and "f16lab travel" in shown

    def endless():
        i = 0
        while True:
            yield StepRecord(step=i, loss=1.0)
            time.sleep(0.001)
            i += 1

    bench = Workbench(endless(), tmp_path / "other")
    benches.append(bench)
    bench.tools["start"].click()
    until(bench, lambda looks: looks[0].done > 20)
    bench.tools["pause"].click()
    paused, = until(bench, lambda looks: looks[0].state == "paused")
    bench.count.value = 5
    bench.tools["step"].click()
    look, = until(bench, lambda looks: looks[0].done == paused.done + 5)
    assert look.done == paused.done + 5
    bench.tools["checkpoint"].click()
    until(bench, lambda looks: "checkpoint refused" in "".join(bench.views.events.rows))
    assert "checkpoint refused" in "".join(bench.views.events.rows)
    bench.tools["stop"].click()
    assert until(bench, lambda looks: not looks[0].alive)[0].state == "stopped"


def test_steps_that_have_begun_or_have_commands_of_their_own_are_driven_from_outside(tmp_path):
    begun = steps(tiny(steps=5))
    next(begun)
    assert recipe_of(begun) is None and recipe_of(steps(tiny(), lambda: [])) is None
    assert recipe_of(steps(tiny())) == tiny()
    run = Driven(begun, tmp_path / "begun")
    run.start()
    assert run.wait(20) and run.look().state == "finished" and run.look().done == 5
    with pytest.raises(ValueError, match="cannot be driven"):
        Driven({"loss": 1}, tmp_path / "none")


# ---------------------------------------------------------------- runs in processes
def test_profiles_are_compared_steered_closed_and_found_again(tmp_path, benches):
    bench = Workbench(folder=tmp_path, config=tiny(steps=100_000, save_every=10), profiles=("f32", "f16"))
    benches.append(bench)
    assert "No run yet" in bench.status.value and bench.tools["stop"].disabled
    bench.tools["stop"].click()
    assert "no run is alive" in bench.said.value
    bench.tools["compare"].click()
    assert bench.fleet.labels == ["f32", "f16"] and tuple(bench.target.options) == ("all", "f32", "f16")
    bench.tools["compare"].click()
    assert "stop them before you start again" in bench.said.value
    until(bench, lambda looks: all(look.done > 12 for look in looks))
    bench.target.value = "f16"
    bench.tools["pause"].click()
    paused = until(bench, lambda looks: looks[1].state == "paused")[1]
    assert paused.state == "paused" and bench.fleet.members[0].look.state == "running"
    time.sleep(0.3)
    bench.tick()
    assert bench.fleet.members[1].look.done == paused.done  # it stays there
    form = bench.contenders.form
    form.slots["param"].value = "e4m3"  # would lose numbers: the run refuses, and goes on unchanged
    bench.target.value = "f16"
    bench.apply.click()
    until(bench, lambda looks: "refused" in "".join(bench.views.events.rows))
    assert "refused" in "".join(bench.views.events.rows) and "param=f16" in bench.fleet.members[1].run.profile
    bench.target.value = "f32"
    bench.tools["stop"].click()
    assert until(bench, lambda looks: not looks[0].alive)[0].state == "stopped"
    bench.close()

    again = Workbench(folder=tmp_path)  # one is alive: it is attached by itself
    benches.append(again)
    assert again.fleet.labels == ["f16"] and "it was running already" in again.said.value
    assert until(again, lambda looks: looks[0].state == "paused")[0].done == paused.done
    assert again.form.config.with_(profile="f32") == read_recipe(again.fleet.members[0].run.folder / "recipe.toml").with_(
        profile="f32") and list(again.contenders.lineup.chosen) == ["f16"]  # the forms are those of the run
    again.tools["resume"].click()
    assert until(again, lambda looks: looks[0].done > paused.done)[0].state == "running"
    again.runs.refresh()
    assert [seen.state for seen in again.runs.found] == ["live", "stopped"] and again.runs.list.index == (0,)
    again.runs.list.index = (1,)
    again.runs.attach.click()
    assert again.fleet.labels == ["f16", "f32"] and again.fleet.members[1].look.state in ("starting", "stopped")
    again.tools["stop"].click()
    looks = until(again, lambda looks: not any(look.alive for look in looks))
    assert [look.state for look in looks] == ["stopped", "stopped"]
    report = again.away.write_page()
    assert report.is_file() and "f16" in report.read_text(encoding="utf-8")

    again.fleet.members[0].run.started.child or time.sleep(1)
    again.target.value, again.at_step.value = "f32", 5
    again.contenders.form.preset.value = "bf16"
    again.tools["branch"].click()
    assert again.fleet.labels[-1] == "bf16 from 5", again.said.value
    look = until(again, lambda looks: looks[-1].done > 8)[-1]
    assert look.done > 8, look.words
    again.target.value = "bf16 from 5"
    again.tools["stop"].click()
    assert until(again, lambda looks: not looks[-1].alive)[-1].state == "stopped"
    again.fleet.members[-1].run.started.child.wait(20)
    again.tools["resume"].click()
    assert "going on from the newest checkpoint" in again.said.value
    assert until(again, lambda looks: looks[-1].state == "running")[-1].state == "running"
    again.tools["stop"].click()
    until(again, lambda looks: not looks[-1].alive)


def test_a_start_that_fails_is_red_with_its_words(tmp_path, benches):
    bench = Workbench(folder=tmp_path, config=tiny(), profiles=("f16",))
    benches.append(bench)
    bench.form.fields["data"].value = "no/such/corpus"
    bench.tools["start"].click()
    look, = until(bench, lambda looks: looks[0].state == "failed")
    assert "f16lab-is-failed" in bench.status.value and "exit code 2" in bench.status.value
    assert "no such file or folder" in bench.status.value and "console.txt" in bench.status.value


def test_a_wrong_form_starts_nothing_and_says_why(tmp_path, benches):
    bench = Workbench(folder=tmp_path, config=tiny(), profiles=("bf16",))
    benches.append(bench)
    bench.form.fields["lr"].value = -1.0
    bench.tools["start"].click()
    assert "not started: lr=-1.0" in bench.said.value and not bench.fleet.members
    bench.form.fields["lr"].value = 0.1
    bench.contenders.form.slots["rounding"].value = "kahan"
    bench.tools["start"].click()
    assert "not started: rounding=kahan" in bench.said.value and not list(tmp_path.iterdir())


def test_several_live_runs_are_attached_again_and_more_than_fit_are_offered(tmp_path, benches):
    started = [start_run(tiny(steps=10**6), tmp_path / name) for name in ("b", "a")]
    try:
        bench = Workbench(folder=tmp_path)
        benches.append(bench)
        assert [m.run.folder.name for m in bench.fleet.members] == ["b", "a"]  # as they were begun
        assert "they were running already" in bench.said.value
        started += [start_run(tiny(steps=10**6), tmp_path / name) for name in ("c", "d", "e")]
        bench = Workbench(folder=tmp_path)
        benches.append(bench)
        assert not bench.fleet.members and bench.side.current == "Runs" and "5 runs are alive" in bench.said.value
        bench.runs.attach.click()
        assert len(bench.fleet.members) == 4  # the newest are chosen already
    finally:
        for run in started:
            os.kill(run.pid, signal.SIGKILL)
            run.child.wait()


def test_runs_in_turn_wait_begin_paused_and_are_taken_out_of_the_queue(tmp_path, benches):
    bench = Workbench(folder=tmp_path, config=tiny(), profiles=("f32", "f16", "bf16"))
    benches.append(bench)
    bench.form.in_turn.value = bench.form.paused.value = True
    bench.tools["compare"].click()
    assert [m.look.state for m in bench.fleet.members] == ["starting", "waiting", "waiting"]
    looks = until(bench, lambda looks: looks[0].state == "paused")
    assert (looks[0].done, [look.state for look in looks]) == (0, ["paused", "waiting", "waiting"])
    bench.count.value = 2
    bench.tools["step"].click()
    assert until(bench, lambda looks: looks[0].done == 2 and looks[0].state == "paused")[0].done == 2
    bench.target.value = "bf16"
    bench.tools["stop"].click()
    assert "bf16: taken out of the queue" in bench.said.value
    bench.target.value = "f32"
    bench.tools["stop"].click()
    looks = until(bench, lambda looks: looks[1].state == "paused")  # its turn has come
    assert [look.state for look in looks] == ["stopped", "paused", "stopped"]
    bench.target.value = "all"
    bench.tools["stop"].click()
    assert until(bench, lambda looks: not any(look.alive for look in looks))[1].state == "stopped"


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tmp_path, benches):
    bench = Workbench(folder=tmp_path, config=tiny(steps=6, save_every=3), profiles=("f16",))
    benches.append(bench)
    bench.tools["start"].click()
    assert until(bench, lambda looks: looks[0].state == "finished")[0].done == 6
    bench.fleet.members[0].run.started.child.wait(20)
    bench.tools["resume"].click()
    assert "f16 has all its 6 steps" in bench.said.value
    bench.form.fields["steps"].value = 9
    bench.tools["resume"].click()
    assert until(bench, lambda looks: looks[0].done == 9 and not looks[0].alive)[0].state == "finished"


# ---------------------------------------------------------------- parts
def test_an_error_of_the_display_is_told_once_and_looking_goes_on(tmp_path, benches):
    bench = Workbench(folder=tmp_path, config=tiny(steps=60, threads=1), profiles=("f32",))
    benches.append(bench)
    said, calls = [], []
    bench.said.observe(lambda change: said.append(text(change["new"])), "value")

    def broken():
        calls.append(1)
        raise KeyError("figure")

    bench.views.refresh = broken
    bench.tools["start"].click()
    end = time.monotonic() + 20
    while len(calls) < 6 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(calls) >= 6 and len([words for words in said if "the display has a problem" in words]) == 1
    bench.fleet.look()
    assert until_finished(bench.fleet)


def until_finished(fleet: Fleet) -> bool:
    end = time.monotonic() + 30
    while any(m.look.alive for m in fleet.look()) and time.monotonic() < end:
        time.sleep(0.05)
    return all(m.look.state == "finished" for m in fleet.members)


def test_clicks_in_charts_choose_runs_layers_and_steps(tmp_path, benches):
    log = tmp_path / "r"
    run = Driven(tiny("f16", steps=4), log)
    run.start()
    assert run.wait(30)
    bench = Workbench(log, folder=tmp_path)
    benches.append(bench)
    assert bench.fleet.labels == ["f16"] and bench.fleet.members[0].look.state == "finished"
    bench.views.charts._receive(None, {"type": "pick", "kind": "step", "run": "f16", "step": 3}, [])
    assert bench.at_step.value == 3 and "step 3 of f16" in bench.said.value
    bench.views.map._receive(None, {"type": "pick", "kind": "layer", "run": "f16", "layer": "blocks.0.mlp.fc"}, [])
    histograms, = bench.views.panels["Exponents"]
    assert bench.views.pages.current == "Exponents" and histograms.chosen["layer"] == "blocks.0.mlp.fc"
    assert not bench.views.charts.problem and not bench.views.map.problem
    for name in bench.views.pages.pages:
        bench.views.pages.show(name)
    assert not any(panel.problem for panel in bench.views.made), [p.problem for p in bench.views.made]
    with pytest.raises(ValueError):
        Workbench({"no": "run"})
    bench.runs.path.value = str(tmp_path / "nowhere")
    assert "no run log" in bench.said.value


def test_what_is_exported_is_the_choice(tmp_path, benches):
    bench = Workbench(folder=tmp_path, config=tiny(steps=7), profiles=("f32", "f16"))
    benches.append(bench)
    bench.contenders.form.text.value = "f16;lm_head:compute=f32"
    bench.away.write.click()
    config = read_recipe(tmp_path / "recipe.toml")
    assert config == tiny("f16;lm_head:compute=f32", steps=7)
    assert bench.away.write_recipe() == tmp_path / "recipe.toml"  # the same again
    bench.form.fields["steps"].value = 8
    assert bench.away.write_recipe() == tmp_path / "recipe-2.toml" and read_recipe(tmp_path / "recipe.toml") == config
    bench.form.fields["steps"].value = 7
    bench.away.write_recipe()
    html = bench.away.recipe.value
    link = re.search(r'href="data:application/toml;charset=utf-8,([^"]+)"', html)[1]
    from urllib.parse import unquote
    assert tomllib.loads(unquote(link))["run"]["steps"] == 7
    assert headless(tmp_path / "my runs" / "recipe.toml", 2).endswith("my runs/recipe.toml' --nproc 2")
    bench.away.report.click()
    assert "no run to report on" in bench.away.page.value


def test_the_recipe_form_is_the_recipe():
    form = RecipeForm(tiny())
    form.unfold.value = True
    form.toml.value = form.toml.value.replace('channels = 32', 'channels = 48')
    assert form.config == tiny(channels=48)
    form.toml.value = "steps = ["
    assert form.problem.value and form.config == tiny(channels=48)
    with warnings.catch_warnings(record=True) as told:
        form.toml.value = "[optimizer]\nwarmup = 5\n"
    assert "warmup=5 has no effect" in form.note.value and not told
    assert beside_a_browser(2) == {"threads": 1} and beside_a_browser(64) == {}


def test_events_are_bounded_and_escaped():
    table = EventTable(most=50)
    for i in range(300):
        table.add(9, "<run>", [(i, "skip", "<script>")])
    table.refresh()
    assert len(table.rows) == 50 and "<script>" not in table.value and "&lt;run&gt;" in table.value


def test_differences_are_shown_from_f32_or_the_first_of_several():
    from f16lab.workbench import base_of
    assert [base_of(labels, chosen) for labels, chosen in (
        ([], ""), (["f16"], ""), (["f16", "f32"], ""), (["f16", "bf16"], ""), (["f16", "f32"], "f16"),
        (["f16", "bf16"], "f32"), (["f32"], "f32"))] == ["", "", "f32", "f16", "f16", "f16", "f32"]
