"""Panels without a browser: what is sent, how much, when; what is said where there is nothing; and that nothing is
ever raised into who asks for a look."""

import gc
import json
import math
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from f16lab import panels
from f16lab.config import TrainConfig
from f16lab.console import open_console
from f16lab.events import CastRow, EventRecord, Histogram, RunEnded, RunResumed, RunStarted, StepRecord, TensorStat
from f16lab.origin import Origin
from f16lab.packing import to_json
from f16lab.panel_views import read_origin, skip_words
from f16lab.panels import Panel, cast_attribution, lost_updates, memory, overflow_histograms, run_views, skipped_step
from f16lab.runlog import RunLog
from f16lab.running import train_run
from f16lab.watching import watch

EVIL = "<img src=x onerror=alert(1)>"
ALL = (cast_attribution, overflow_histograms, lost_updates, memory, skipped_step)
ORIGIN = Origin("backward", "blocks.1.fc", "output.grad", "blocks.1.act", "output.grad of blocks.1.proj", 12)


class Comm:
    """Stands in for the wire: messages and their sizes."""

    comm_id = "test"

    def __init__(self):
        self.messages, self.kernel = [], True

    def send(self, data=None, metadata=None, buffers=None):
        json.dumps(data, allow_nan=False)
        self.messages.append((data, sum(len(bytes(b)) for b in buffers or ())))

    def close(self, *_, **__):
        pass

    on_msg = on_close = close

    @property
    def states(self):
        return [m["state"] for m, _ in self.messages if m["method"] == "update"]


def wired(panel):
    panel.comm = Comm()
    return panel.comm


def histograms(step, layers=3):
    out = []
    for i in range(layers):
        out += [
            Histogram(
                "forward", f"blocks.{i}.fc", "weight", "f16", -8, (step + 1, 2, 3), zeros=i, amax=0.02, size=4096
            ),
            Histogram(
                "backward", f"blocks.{i}.fc", "output.grad", "f16", -20, (1, 5), subnormals=6, amax=math.ldexp(1.5, -19)
            ),
        ]
    return tuple(out)


def record(step, **more):
    casts = tuple(
        CastRow("train", f"blocks.{i}.fc", "linear", "weight", (8, 4), "f32", "f16", "forward", "operand", 2, 384)
        for i in range(3)
    )
    tensors = (
        tuple(TensorStat(f"blocks.{i}.fc.weight", (0.2, 0.9, math.nan)[i], 0.3) for i in range(3))
        if step % 5 == 0
        else ()
    )
    return StepRecord(
        step,
        **{
            **dict(
                loss=math.nan if step == 2 else 2.0,
                loss_scale=1024.0,
                grad_norm=math.inf,
                casts=casts,
                tensors=tensors,
                histograms=histograms(step),
            ),
            **more,
        },
    )


def skip_events(step):
    return [
        EventRecord(step, "overflow", ORIGIN.words),
        EventRecord(step, "skip", "non-finite, gradient norm inf"),
        EventRecord(step, "scale", "loss scale 1024 -> 512"),
    ]


def write(folder, steps=12, name="run", end=True, skips=(7,), recipe=None, make=record):
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder / f"{name}.sqlite")
    log(RunStarted(recipe or {"profile": "f16", "probe": {"probe_every": 1}, "run": {"steps": steps}}))
    for step in range(steps):
        log(make(step))
        for e in skip_events(step) if step in skips else ():
            log(e)
    if end:
        log(RunEnded(steps, "finished"))
        log.close()
    else:
        log.flush()
    return log


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    write(folder)
    return folder


def state(panel):
    return {k: v for k, v in panel.get_state().items() if not k.startswith("_")}


# ---------------------------------------------------------------- what is there
@pytest.mark.parametrize("make", ALL)
def test_a_finished_run(make, run):
    p = make(run)
    assert p.problem == "" and p.head["empty"] is None and p.head["status"] == "finished, step 11"
    sent = {k: v for k, v in state(p).items() if not isinstance(v, bytes)}
    json.dumps(sent, allow_nan=False)  # NaN and inf of the log never reach the page as numbers


def test_casts_add_up_and_a_pick_needs_no_python(run):
    p = cast_attribution(run)
    rows = p.body[1]["rows"]
    assert sum(r["size"] for r in rows) == 3 * 384 and rows[-1]["cells"][-1][1] == 1.0
    assert all(r["reason"] in p.body[1]["reasons"] and [p.body[1]["hints"][i]["kind"] for i in r["hints"]] == ["weight cast again"] for r in rows)
    assert sum(r["saves"] for r in rows) == 3 * 192


def test_meters_alarm_and_remedy(run):
    p = lost_updates(run)
    rows = {r["key"]: r for r in p.body[1]["rows"]}
    assert (
        "rounding=stochastic" in rows["blocks.0.fc.weight"]["paragraphs"][0]
        and not rows["blocks.1.fc.weight"]["paragraphs"]
    )
    assert rows["blocks.0.fc.weight"]["cells"][3][2]["spark"] == [0.2, 0.2, 0.2]
    assert rows["blocks.2.fc.weight"]["cells"][2][:2] == ["–", None]  # NaN: a dash, sorted last


def test_memory_counts_parameters_from_what_probes_saw(run):
    bar = memory(run).body[1]["items"][0]
    assert bar["total"] == 14 and bar["text"] == f"14 bytes a parameter = {14 * 3 * 4096 / 1e3:.3g} kB"


def test_the_block_holds_the_counts(run):
    p = overflow_histograms(run)
    p._hear(p, {"kind": "site", "phase": "forward", "layer": "blocks.1.fc", "tensor": "weight"}, [])
    values = np.frombuffer(p.counts, "<f8").reshape(len(p.history["steps"]), p.history["width"] + 6)
    assert p.history["first"] == -8 and values[:, 0].tolist() == [float(s + 1) for s in range(12)]
    assert values[3].tolist() == [4, 2, 3, 1, 0, 0, 0, 0.02, 10]
    assert {s["layer"] for s in p.sites} == {f"blocks.{i}.fc" for i in range(3)}


def test_a_skipped_step_names_maker_propagators_and_margin(run):
    p = skipped_step(run)
    text = " ".join(p.detail["blocks"][0]["paragraphs"])
    assert (
        p.detail["key"] == "7"
        and "Made by blocks.1.act" in text
        and "12 later tensors" in text
        and "1024 → 512" in text
    )
    assert "At step 6 its largest number was still 2.861e-06, 34 binades below the largest number of f16" in text
    assert p.job["refused"] and "not kept" in p.job["words"]


@pytest.mark.parametrize(
    "origin",
    [
        ORIGIN,
        Origin("forward", "", "output", "", "", 0),
        Origin("weights", "wte", "weight.grad", "wte", "output.grad of wte", 0),
        Origin("backward", "a", "input.0.1.grad", "what reads a in the model", "x of y", 3),
    ],
)
def test_the_words_of_an_origin_are_read_back(origin):
    assert read_origin(origin.words) == origin
    assert skip_words(1, {"overflow": [origin.words]}, "", None)[0].startswith("First to overflow")


def test_sizes_are_read_until_every_tensor_had_its_turn(tmp_path):
    turns = lambda step: record(step, histograms=histograms(0, 4)[2 * (step % 4) : 2 * (step % 4) + 1])  # noqa: E731
    log = write(tmp_path, steps=1, end=False, skips=(), make=turns)
    p, q = lost_updates(tmp_path, live=False), memory(tmp_path, live=False)
    assert len(p.sizes[0].found) == 1
    for step in range(1, 20):
        log(turns(step))
    log.flush()
    for panel in (p, q):
        panel.refresh(now=True)
    assert p.sizes[0].found == q.sizes[0].found == {f"blocks.{i}.fc.weight": 4096 for i in range(4)} and p.sizes[0].whole
    log.close()


# ---------------------------------------------------------------- where there is nothing
def test_a_run_without_casts_histograms_and_meters_says_which_option_fills_it(tmp_path):
    write(tmp_path, make=lambda s: StepRecord(s, 1.0), skips=(), recipe={"profile": "f16"})
    how = [make(tmp_path).head["empty"] for make in ALL]
    assert ["--ledger" in how[0]["how"], "--probe-every" in how[1]["how"], "--meters-every" in how[2]["how"]] == [
        True
    ] * 3
    assert how[3] is None and "No step of this run was skipped" in how[4]["words"]


@pytest.mark.parametrize("make", ALL)
def test_a_run_that_has_just_begun_and_one_that_is_not_there_yet(make, tmp_path):
    p = make(tmp_path / "run.sqlite", live=False)
    assert p.problem == "" and "just beginning" in p.head["empty"]["words"]
    log = write(tmp_path, steps=0, end=False)
    p.refresh(now=True)
    if make is not memory:
        assert "first step is not done" in p.head["empty"]["words"]
    for step in range(3):
        log(record(step))
    for e in skip_events(2):
        log(e)
    log.flush()
    p.refresh(now=True)
    assert p.head["empty"] is None and p.problem == "" and "step 2" in p.head["status"]
    log.close()


@pytest.mark.parametrize("make", ALL)
def test_a_file_that_is_no_log_is_a_sentence_in_the_panel(make, tmp_path):
    (tmp_path / "run.sqlite").write_bytes(b"this is no database at all, but long enough" * 100)
    p = make(tmp_path)
    assert "is not a run log" in p.problem and "The run is not affected" in p.problem


@pytest.mark.parametrize("make", ALL)
def test_nothing_is_a_value_error(make, tmp_path):
    with pytest.raises(ValueError):
        make(tmp_path / "nowhere")


# ---------------------------------------------------------------- what is sent
@pytest.mark.parametrize("make", ALL)
def test_no_news_no_message_and_no_look(make, run, monkeypatch):
    p = make(run)
    comm = wired(p)
    monkeypatch.setattr(panels, "looked", lambda panel: pytest.fail("nothing is new"))
    assert [p.refresh() for _ in range(5)] == [False] * 5 and comm.messages == []


def test_news_is_one_message_of_what_changed(tmp_path):
    log = write(tmp_path, end=False)
    ps = [make(tmp_path, live=False) for make in (cast_attribution, overflow_histograms, lost_updates, skipped_step)]
    comms = [wired(p) for p in ps]
    log(record(12))
    log.flush()
    for p in ps:
        p.refresh(now=True)
    assert [len(c.messages) for c in comms] == [1, 1, 1, 1]
    assert [sorted(c.states[0]) for c in comms] == [["head"], ["head", "history"], ["head"], ["head"]]
    assert [c.messages[0][1] for c in comms] == [0, len(ps[1].counts), 0, 0]  # counts travel as bytes
    log.close()


def test_at_most_two_looks_a_second(tmp_path):
    log = write(tmp_path, end=False)
    p, looks = cast_attribution(tmp_path, live=False), 0
    end = time.monotonic() + 1.2
    for step in range(12, 10**6):
        if time.monotonic() > end:
            break
        log(record(step))
        log.flush()
        looks += p.refresh()
    assert 2 <= looks <= 3
    log.close()


def test_bytes_of_a_redraw_do_not_grow_with_the_run(tmp_path):
    def sent(folder, n):
        log = write(folder, steps=n, end=False, skips=())
        p = overflow_histograms(folder, live=False)
        comm = wired(p)
        log(record(n))
        log.flush()
        p.refresh(now=True)
        log.close()
        return sum(len(json.dumps(m)) + size for m, size in comm.messages), len(p.history["steps"])

    (small, _), (large, columns) = sent(tmp_path / "a", 300), sent(tmp_path / "b", 3000)
    assert large <= 2 * small and columns <= 300


# ---------------------------------------------------------------- nothing is raised
@pytest.mark.parametrize("make", ALL)
def test_an_error_in_a_look_is_said_and_the_next_look_mends_it(make, run, monkeypatch):
    p = make(run)
    real = type(p).look
    monkeypatch.setattr(type(p), "look", lambda self, reader: 1 / 0)
    assert p.refresh(now=True) and "ZeroDivisionError" in p.problem
    monkeypatch.setattr(type(p), "look", real)
    p.refresh(now=True)
    assert p.problem == ""


@pytest.mark.parametrize(
    "message",
    [
        None,
        {},
        {"kind": "run"},
        {"kind": "run", "index": 10**9},
        {"kind": "pick", "key": "x"},
        {"kind": "site"},
        {"kind": "job"},
        {"kind": "job", "option": EVIL},
        {"kind": EVIL},
        "run",
        {"kind": "site", "phase": 1, "layer": [], "tensor": {}},
    ],
)
@pytest.mark.parametrize("make", ALL[:3] + ALL[4:])
def test_no_message_from_the_page_raises(make, message, run):
    p = make(run)
    p._hear(p, message, [])
    p.show(label="unknown", layer="unknown", step=-5, tensor="unknown")
    p.show(step=10**9)


def test_a_click_on_a_layer_shows_the_tensor_that_was_clicked(run):
    p = overflow_histograms(run, live=False)
    assert len(p.sites) == 6
    for line in p.sites:
        p.show(layer=line["layer"], tensor=line["tensor"])
        assert (p.chosen["layer"], p.chosen["tensor"]) == (line["layer"], line["tensor"])
    p.show(layer="blocks.0.fc", tensor="nonsense")
    assert (p.chosen["layer"], p.chosen["tensor"]) == ("blocks.0.fc", "output.grad")


def test_threads_may_ask_at_once(tmp_path):
    log, errors = write(tmp_path, end=False), []
    p = overflow_histograms([tmp_path], live=False)

    def ask(n):
        try:
            for i in range(8):
                if n % 2:
                    p.refresh(now=True)
                else:
                    p.show(layer=f"blocks.{i % 3}.fc", step=i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for step in range(12, 30):
        log(record(step))
    for t in threads:
        t.join()
    log.close()
    assert errors == [] and p.problem == ""
    assert len(p.counts) == 8 * len(p.history["steps"]) * (p.history["width"] + 6)


# ---------------------------------------------------------------- several runs, a resumed one
def test_runs_are_chosen_by_click_and_by_name(tmp_path):
    for name in ("01_a", "02_b"):
        write(tmp_path, name=name, steps=3 if name == "01_a" else 9, skips=())
    p = cast_attribution(tmp_path)
    assert p.head["runs"] == ["a", "b"] and p.head["status"] == "finished, step 2"
    p._hear(p, {"kind": "run", "index": 1}, [])
    assert p.head["run"] == 1 and p.head["status"] == "finished, step 8"
    p.show(label="a")
    assert p.head["run"] == 0
    assert [b["label"] for b in memory(tmp_path).body[1]["items"]] == ["a", "b"]


def test_memory_of_a_comparison_is_what_was_measured(tmp_path):
    recipe = {"profile": "f32", "comparison": {"index": 0, "name": "x", "profile": "f16", "sizes": {"fc.weight": 1000}}}
    log = write(tmp_path, steps=1, end=False, recipe=recipe, make=lambda s: StepRecord(s, 1.0), skips=())
    log(EventRecord(1, "memory", to_json({"param": 2.0, "m": 3.5})))
    log.close()
    assert memory(tmp_path).body[1]["items"][0]["text"] == "5.5 bytes a parameter = 5.5 kB"


def test_a_resumed_run_takes_steps_back(tmp_path):
    write(tmp_path, steps=12, end=True, skips=())
    p, q = overflow_histograms(tmp_path, live=False), lost_updates(tmp_path, live=False)
    assert p.history["steps"][-1] == 11 and q.known[0][1][-1].step == 10
    log = RunLog(tmp_path / "run.sqlite")
    log(RunStarted({"profile": "f16", "probe": {"probe_every": 1}}))
    log(RunResumed(4))
    log(record(4))
    log.flush()
    for panel in (p, q):
        panel.refresh(now=True)
    assert p.history["steps"] == [0, 1, 2, 3, 4] and [r.step for r in q.known[0][1]] == [0]
    log.close()


# ---------------------------------------------------------------- live
def test_a_panel_follows_its_run_and_ends_with_it(tmp_path):
    log = write(tmp_path, end=False, steps=2, skips=())
    p = cast_attribution(tmp_path)
    log(record(2))
    log.flush()
    deadline = time.monotonic() + 5
    while "step 2" not in p.head["status"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "running, step 2" == p.head["status"]
    log(RunEnded(3, "stopped"))
    log.close()
    while any(t.name == "panel" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(t.name == "panel" for t in threading.enumerate()) and p.head["status"] == "stopped, step 2"


def test_a_panel_nobody_holds_ends_its_thread(tmp_path):
    log = write(tmp_path, end=False, steps=2, skips=())
    p = cast_attribution(tmp_path)
    p.close()
    deadline = time.monotonic() + 5
    while any(t.name == "panel" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(t.name == "panel" for t in threading.enumerate())
    log.close()


def test_a_watched_module_is_looked_at_while_it_trains_and_take_loses_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) as w:
        ps = [make(w, live=False) for make in ALL]
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(4, 8)).float().sum().backward()
            opt.step()
    for p in ps:
        p.refresh(now=True)
    seen = w.take()
    assert [p.problem for p in ps] == [""] * 5 and seen.steps == 4 and seen.find("0", "output")[0].elements == 4 * 32
    casts, hist, meters, held, skips = ps
    assert casts.head["empty"] is None and any("autocast" in r["reason"] for r in casts.body[1]["rows"])
    assert {s["tensor"] for s in hist.sites} >= {"weight", "weight.grad", "output", "output.grad"} and len(
        hist.history["steps"]
    ) >= 1
    assert (
        "watched module has no meters" in meters.head["empty"]["words"]
        and "watched module" in skips.head["empty"]["words"]
    )
    parts = held.body[1]["items"][0]["parts"]
    assert [(part["name"], part["value"]) for part in parts] == [("weights", 4.0), ("gradients", 4.0)]


def test_a_panel_that_fails_does_not_end_the_training_it_watches(monkeypatch):
    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setattr(panels.WatchView, "_see", lambda *_: 1 / 0)
    with watch(model) as w:
        cast_attribution(w, live=False)
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            opt.step()
    assert w.take().steps == 3 and "ZeroDivisionError" in w.take().notes[0]


# ---------------------------------------------------------------- jobs
def wait(panel):
    deadline = time.monotonic() + 30
    while panel.job.get("state") == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    return panel.job


def test_a_kept_step_is_taken_again_from_the_panel(tmp_path):
    config = TrainConfig("f16").with_(
        channels=16,
        heads=2,
        layers=1,
        context=8,
        batch=2,
        steps=4,
        device="cpu",
        data="markov",
        eval_every=0,
        probe_every=1,
        lr=300.0,
        clip=0.0,
        capsule_at=0,
    )
    try:
        train_run(config, tmp_path / "run", open_console(), every=100)
    except Exception:
        pass  # it may fail: that is the point of it
    p = skipped_step(tmp_path / "run", live=False)
    kept = [r for r in p.body[0]["rows"] if r["tags"] == ["kept"]]
    assert kept and p.detail["key"] == kept[0]["key"] and not p.job["refused"]
    p._hear(p, {"kind": "job", "option": "f32"}, [])
    job = wait(p)
    assert job["state"] == "done", job["words"]
    proof, table = job["blocks"]
    assert "every bit" in proof["paragraphs"][0] and [r["cells"][0][0] for r in table["rows"]] == ["f16", "f32"]
    p.refresh(now=True)
    assert p.job["state"] == "done"  # a look does not take the answer away


def test_a_job_that_fails_says_so_and_one_at_a_time(run):
    p, gate = memory(run), threading.Event()
    panels.start_job(p, "waiting", lambda: gate.wait(5) and 1 / 0)
    panels.start_job(p, "second", lambda: pytest.fail("one at a time"))
    assert p.job["words"] == "waiting"
    gate.set()
    assert wait(p)["state"] == "failed" and "ZeroDivisionError" in p.job["words"]


# ---------------------------------------------------------------- the base
def test_views_are_told_apart(run):
    (view,) = run_views(run)
    assert run_views(view) == [view] and run_views([view]) == [view]


def test_panels_are_freed(run):
    p = weakref.ref(cast_attribution(run))
    p().close()
    gc.collect()
    assert p() is None
    assert issubclass(panels.Histograms, Panel)
