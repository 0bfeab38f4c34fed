"""The live charts without a browser: what is sent, how much, when, and that nothing of it can hurt a run."""
import json
import math
import sqlite3
import struct
import threading
import time
import warnings
from contextlib import closing

import numpy as np
import pytest
from long_runs import long_log

from f16lab import charts as module
from f16lab.charts import (CHARTS, Feed, Frames, LiveCharts, Pick, Publisher, View, exponent_map, loss_scale, narrowed, receive,
                           static_text, trajectories)
from f16lab.events import EventRecord, Histogram, RunEnded, RunResumed, StepRecord
from f16lab.exponents import LADDER, binades_of_layers, cell_bytes, margin_of, model_order, recent
from f16lab.runlog import RunLog
from f16lab.viewing import Following, follow_all


def histograms(layers: int = 3, scale: int = 0, infs: int = 0) -> tuple[Histogram, ...]:
    return tuple(Histogram("backward", f"blocks.{i}.mlp", "weight.grad", "f16", -20 + i + scale, (1, 5, 30, 5, 1), zeros=2, infs=infs,
                           amax=2.0 ** (-16 + i + scale)) for i in range(layers))


def fill(log: RunLog, steps, **changes) -> None:
    for k in steps: log(StepRecord(k, **{"loss": 1 + math.sin(k / 9), "grad_norm": 1.0, "lr": 1e-3, **changes}))
    log.flush()


def run_of(folder, name: str, steps, **changes):
    path = folder / name / "run.sqlite"
    with RunLog(path) as log: fill(log, steps, **changes)
    return path


def refuse(word): raise ValueError(f"{word} is not JSON")


class Browser:
    "What a browser does with frames, and a fake comm: counts, measures, checks that all is strict JSON."

    def __init__(self): self.curves, self.frames, self.bytes, self.heads = {}, 0, [], {}

    def take(self, content, buffers):
        text = json.dumps(content, allow_nan=False)
        json.loads(text, parse_constant=refuse)
        self.bytes.append(len(text) + sum(map(len, buffers)))
        self.frames += 1
        if content["full"]: self.curves = {}
        steps, values = np.frombuffer(buffers[0], "<i4"), np.frombuffer(buffers[1], "<f4")
        at = 0
        for run, name, count, cut, whole in content["curves"]:
            curve = {} if whole else self.curves.setdefault((run, name), {})
            if cut is not None: curve = {k: v for k, v in curve.items() if k < cut}
            curve.update(zip(steps[at:at + count].tolist(), values[at:at + count].tolist()))
            self.curves[run, name], at = curve, at + count
            assert count <= 2000
        assert at == len(steps) == len(values)
        self.heads.update({k: v for k, v in content.items() if k not in ("curves", "full", "type")})
        if "map" in content:
            cells = np.frombuffer(buffers[2], np.uint8).reshape(len(content["map"]["layers"]), content["map"]["width"])
            self.heads["cells"], self.heads["apart"] = cells, np.frombuffer(buffers[3], "<f4").reshape(len(cells), 4)

    def drain(self, frames: Frames, view: View, full: bool = False) -> int:
        "Takes frames until there are no more; how many."
        count = 0
        while (frame := frames.frame(view, full)) is not None:
            self.take(frame.content, frame.buffers)
            count, full = count + 1, False
            assert count < 200
        return count


def patient(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def log(tmp_path):
    with RunLog(tmp_path / "f16" / "run.sqlite") as log: yield log


# ---------------------------------------------------------------- exponents
def test_layers_come_in_the_order_of_the_model():
    names = ["head", "ln_f", "blocks.11.mlp.fc", "blocks.2.attn", "wte", "blocks.2.mlp", "", "embeddings.position"]
    assert sorted(names, key=model_order) == ["", "embeddings.position", "wte", "blocks.2.attn", "blocks.2.mlp", "blocks.11.mlp.fc", "head", "ln_f"]


def test_bytes_are_logarithms_of_shares():
    cells = cell_bytes(np.array([[1e6, 1.0, 0.0, 1000.0, 1e-3]]), np.array([1e6]))[0].tolist()
    assert cells == [255, 1, 0, 128, 1]


@pytest.mark.parametrize("first, amount", [(-140, 200), (-30, 5), (20, 40), (-140, 20), (60, 5), (0, 0)])
def test_no_element_is_lost_at_the_edge_of_a_map(first, amount):
    b = binades_of_layers("x", {"a": Histogram("forward", "a", "x", "f32", first, (3,) * amount)})
    shares = np.where(b.cells[0] > 0, 10 ** (((b.cells[0] - 1.0) / 254 - 1) * 6), 0)
    assert abs(shares.sum() - (amount > 0)) < 0.03 and b.first >= -64 and b.first + b.cells.shape[1] <= 40
    assert b.first <= LADDER[0].zero and b.first + b.cells.shape[1] > 16


def test_a_map_is_of_the_last_looks():
    looks = {k: (Histogram("backward", f"l{k % 3}", "weight.grad", "f16", 0, (k + 1,)), Histogram("forward", "a", "weight", "f16", 0, (1,))) for k in range(9)}
    assert {layer: h.counts[0] for layer, h in recent(looks.get, list(looks))["weight.grad"].items()} == {"l2": 9, "l1": 8, "l0": 7}
    assert list(recent(looks.get, list(looks), 1)) == ["weight.grad", "weight"] and recent(looks.get, [], 3) == {}


def test_margin_of_gradients():
    assert margin_of(histograms()) - margin_of(histograms(scale=4)) == 4
    assert margin_of(histograms(infs=1)) == -math.inf or margin_of(histograms(infs=1)) < 40
    assert math.isnan(margin_of(()))


# ---------------------------------------------------------------- frames
def test_the_first_frame_holds_all_and_the_next_what_is_new(tmp_path, log):
    fill(log, range(100))
    frames, browser, view = Frames([Following("f16", log.path)]), Browser(), View()
    browser.drain(frames, view, full=True)
    assert len(browser.curves[0, "loss"]) == 100 and frames.frame(view) is None, "nothing new, nothing sent"
    fill(log, range(100, 103))
    assert browser.drain(frames, view) == 1 and browser.bytes[-1] < 1500
    assert list(browser.curves[0, "loss"])[-3:] == [100, 101, 102]
    assert browser.heads["runs"][0]["step"] == 102 and browser.heads["runs"][0]["state"] == "running"


def test_one_message_for_all_traces(tmp_path):
    logs = [RunLog(tmp_path / f"r{i}" / "run.sqlite") for i in range(4)]
    frames, browser = Frames([Following(f"r{i}", log.path) for i, log in enumerate(logs)]), Browser()
    view = View(reference="r0")
    for log in logs: fill(log, range(50), histograms=histograms())
    browser.drain(frames, view, full=True)
    for log in logs: fill(log, range(50, 52), histograms=histograms())
    first = frames.frame(view)
    rows = [(run, name) for run, name, *_ in first.content["curves"]]
    assert {(i, "loss") for i in range(4)} | {(i, "loss_scale") for i in range(4)} | {(i, "difference") for i in (1, 2, 3)} <= set(rows)
    for log in logs: log.close()


def test_only_what_a_view_shows_is_sent(tmp_path, log):
    fill(log, range(10), extra={"mfu": 0.3})
    frames, browser = Frames([Following("f16", log.path)]), Browser()
    browser.drain(frames, View(("trajectories",)), full=True)
    assert set(browser.curves) == {(0, "loss")} and "map" not in browser.heads and "words" not in browser.heads
    assert {"loss", "grad_norm", "lr", "mfu"} <= set(browser.heads["scalars"]) and "skipped" not in browser.heads["scalars"]
    browser.drain(frames, View(("trajectories",), "mfu"))
    assert set(browser.curves[0, "mfu"].values()) == {np.float32(0.3)}
    fill(log, range(10, 12), extra={"mfu": 0.4})
    browser.drain(frames, View(("trajectories",), "loss"))
    assert len(browser.curves[0, "loss"]) == 12, "a curve that comes back is sent whole"


def test_odd_numbers_arrive_and_json_is_strict(tmp_path, log):
    odd = [1.0, math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-300, 0.0]
    for k, v in enumerate(odd): log(StepRecord(k, v, lr=math.nan))
    log(EventRecord(3, "overflow", "NaN")), log.flush()
    frames, browser = Frames([Following("f16", log.path)]), Browser()
    browser.drain(frames, View(), full=True)
    got = list(browser.curves[0, "loss"].values())
    assert math.isnan(got[1]) and got[2:4] == [math.inf, -math.inf] and np.isfinite(got[4:]).all() and got[4] > 3e38 and got[7] == 0
    assert "lr" not in browser.heads["scalars"], "a scalar without any number is not offered"
    assert narrowed(np.array([math.nan]))[0] != 0


def test_skipped_steps_are_marked_once(tmp_path, log):
    for k in range(40): log(StepRecord(k, 1.0, skipped=k in (5, 30), skip_reason="non-finite" * (k in (5, 30)), loss_scale=2.0 ** (16 - (k > 5))))
    log.flush()
    frames, browser = Frames([Following("f16", log.path)]), Browser()
    browser.drain(frames, View(), full=True)
    assert list(browser.curves[0, "skipped"]) == [5, 30]
    assert "2 of 40 steps" in browser.heads["words"]["f16"]
    fill(log, range(40, 42), skipped=True)
    browser.drain(frames, View())
    assert list(browser.curves[0, "skipped"]) == [5, 30, 40, 41]


def test_a_resumed_run_is_corrected_in_the_browser(tmp_path):
    path, base = run_of(tmp_path, "f16", range(50)), run_of(tmp_path, "f32", range(80))
    frames, browser, view = Frames([Following("f32", base), Following("f16", path)]), Browser(), View(reference="f32")
    browser.drain(frames, view, full=True)
    assert max(browser.curves[1, "difference"].values()) == 0
    with RunLog(path) as log:
        log(RunResumed(30)), fill(log, range(30, 40), loss=9.0)
        for f in frames.feeds: f.run._looked = -1.0
        browser.drain(frames, view)
    curve = browser.curves[1, "loss"]
    assert browser.heads["events_again"] == [1] and [row[2] for row in browser.heads["events"]] == ["resume"]
    assert list(curve) == list(range(40)) and curve[30] == 9 and max(browser.curves[1, "difference"]) == 39
    assert min(v for k, v in browser.curves[1, "difference"].items() if k >= 30) > 5 and max(v for k, v in browser.curves[1, "difference"].items() if k < 30) == 0


def test_a_reference_that_goes_back_voids_differences(tmp_path):
    path, base = run_of(tmp_path, "f16", range(50)), run_of(tmp_path, "f32", range(50))
    frames, browser, view = Frames([Following("f32", base), Following("f16", path)]), Browser(), View(reference="f32")
    browser.drain(frames, view, full=True)
    with RunLog(base) as log:
        log(RunResumed(20)), fill(log, range(20, 25), loss=9.0)
        browser.drain(frames, view)
    assert max(browser.curves[1, "difference"]) == 24 and browser.curves[1, "difference"][22] > 5


def test_a_reset_file_is_sent_whole(tmp_path):
    path = run_of(tmp_path, "f16", range(50))
    frames, browser = Frames([Following("f16", path)]), Browser()
    browser.drain(frames, View(), full=True)
    for p in path.parent.glob("run.sqlite*"): p.unlink()
    run_of(tmp_path, "f16", range(3), loss=7.0)
    browser.drain(frames, View())
    assert list(browser.curves[0, "loss"].values()) == [7.0] * 3


def test_the_map_is_sent_when_it_changes(tmp_path, log):
    for k in range(0, 40): log(StepRecord(k, 1.0, loss_scale=2.0, histograms=histograms(scale=k % 3) if k % 10 == 0 else ()))
    log.flush()
    frames, browser, view = Frames([Following("f16", log.path)]), Browser(), View(("exponents",))
    browser.drain(frames, view, full=True)
    m = browser.heads["map"]
    assert (m["run"], m["step"], m["tensor"], browser.heads["map_steps"]) == ("f16", 30, "weight.grad", [0, 10, 20, 30])
    assert [name for name, _ in m["layers"]] == [f"blocks.{i}.mlp" for i in range(3)] and browser.heads["cells"].any()
    assert [rung["name"] for rung in m["ladder"]] == ["f16", "bf16", "e5m2", "e4m3"]
    fill(log, range(40, 45))
    frame = frames.frame(view)
    assert "map" not in frame.content, "no new look, no map"
    browser.drain(frames, View(("exponents",), map_step=10))
    assert browser.heads["map"]["step"] == 10
    browser.drain(frames, View(("exponents",), map_step=10, tensor="no such"))
    assert browser.heads["map"]["tensor"] == "weight.grad"
    fill(log, [50], histograms=histograms(5))
    frame = frames.frame(View(("exponents",)))
    assert frame.content["map_steps_new"] == [50] and len(frame.content["map"]["layers"]) == 5


def test_zooming_brings_the_detail(tmp_path):
    path = run_of(tmp_path, "f16", range(6000))
    frames, browser, view = Frames([Following("f16", path)]), Browser(), View(("trajectories",))
    browser.drain(frames, view, full=True)
    assert len(browser.curves[0, "loss"]) <= 2000
    frames.zoom((1000, 1100))
    browser.drain(frames, view)
    assert list(browser.curves[0, "detail"]) == list(range(1000, 1101)) and frames.frame(view) is None
    frames.zoom(None)
    assert frames.frame(view) is None


@pytest.mark.parametrize("sql", ["UPDATE histogram SET body = x'00'", "UPDATE histogram SET layout = 99",
                                 "UPDATE stretch SET body = x'00'", "UPDATE run SET config = '[1]'"])
def test_a_damaged_log_does_not_take_the_others_away(tmp_path, sql):
    """What is damaged is met where it is read: by the poll, the margin, the zoom or the map."""
    paths = {name: run_of(tmp_path, name, range(600), loss_scale=2.0, histograms=histograms()) for name in "ab"}
    with closing(sqlite3.connect(paths["a"])) as db, db: assert db.execute(sql).rowcount
    frames, browser = Frames(follow_all(paths)), Browser()
    for view in (View(), View(reference="a"), View(map_run="a", map_step=3), View(map_run="b")):
        frames.zoom((0, 511))
        browser.drain(frames, view, full=True)
    assert browser.curves[1, "loss"].keys() == set(range(600)) and browser.heads["map"]["run"] == "b"
    assert ("config" in sql) == (not frames.feeds[0].run.problem) and not frames.feeds[1].run.problem
    frames.close()


def test_a_run_that_is_waited_for(tmp_path):
    frames, browser = Frames([Following("f16", tmp_path / "run.sqlite")]), Browser()
    browser.drain(frames, View(), full=True)
    assert browser.heads["runs"][0]["state"] == "waiting" and browser.curves == {}
    with RunLog(tmp_path / "run.sqlite") as log: fill(log, range(3))
    browser.drain(frames, View())
    assert len(browser.curves[0, "loss"]) == 3


def test_the_end_is_told(tmp_path):
    path = run_of(tmp_path, "f16", range(3))
    with RunLog(path) as log: log(RunEnded(3, "failed", "TooManySkips: wte overflowed first"))
    frames, browser = Frames([Following("f16", path)]), Browser()
    browser.drain(frames, View(), full=True)
    assert (browser.heads["runs"][0]["state"], browser.heads["runs"][0]["message"]) == ("failed", "TooManySkips: wte overflowed first")


# ---------------------------------------------------------------- length does not matter
def test_bytes_of_a_redraw_do_not_grow_with_the_run(tmp_path):
    "At step 100,000 a redraw costs at most twice what it costs at 1,000, and so does the first frame's every trace."
    sizes, whole, points = {}, {}, {}
    for n in (1024, 98 * 1024):
        path = tmp_path / f"{n}" / "run.sqlite"
        long_log(path, n // 1024, histograms())
        with RunLog(path) as log:
            frames, browser, view = Frames([Following("f16", log.path)]), Browser(), View()
            browser.drain(frames, view, full=True)
            whole[n], points[n] = browser.bytes[0], sum(len(f.run.curves["loss"]) for f in frames.feeds)
            browser.bytes.clear()
            for k in range(n, n + 20):
                fill(log, [k], loss_scale=65536.0, histograms=histograms())
                browser.drain(frames, view)
            sizes[n] = np.mean(browser.bytes)
    long, short = max(sizes), min(sizes)
    assert sizes[long] <= 2 * sizes[short] and points[long] <= 2000 and whole[long] <= 4 * whole[short], (sizes, whole)


# ---------------------------------------------------------------- the publisher
def publishing(tmp_path, send, steps=range(5), **changes):
    path = run_of(tmp_path, "f16", steps)
    problems = []
    publisher = Publisher(send, lambda: View(("trajectories",)), problems.append, hz=25, **changes)
    publisher.follow([Following("f16", path)])
    return publisher, problems, path


def test_nothing_happens_before_hello_and_all_after_it(tmp_path):
    browser = Browser()
    publisher, _, _ = publishing(tmp_path, browser.take)
    assert publisher.thread is None and browser.frames == 0
    publisher.hello()
    patient(lambda: browser.frames == 1)
    publisher.confirm(1)
    time.sleep(0.15)
    assert browser.frames == 1, "nothing new, nothing sent"
    browser.curves = {}
    publisher.hello()  # the page was reloaded
    patient(lambda: browser.frames == 2)
    assert len(browser.curves[0, "loss"]) == 5
    publisher.stop()


def test_the_rate_is_limited_and_a_slow_browser_is_waited_for(tmp_path):
    browser = Browser()
    publisher, _, path = publishing(tmp_path, browser.take)
    publisher.hello()
    patient(lambda: browser.frames == 1)
    with RunLog(path) as log:
        for k in range(5, 45):
            fill(log, [k])
            time.sleep(0.005)
        assert browser.frames <= 3, "frame 1 was not confirmed"
        publisher.confirm(publisher.sent)
        patient(lambda: len(browser.curves[0, "loss"]) == 45)
    publisher.stop()


def test_an_error_is_shown_once_and_the_thread_goes_on(tmp_path):
    browser, broken = Browser(), [True]

    def send(content, buffers):
        if broken[0]: raise RuntimeError("no way to the browser")
        browser.take(content, buffers)

    publisher, problems, _ = publishing(tmp_path, send)
    publisher.hello()
    time.sleep(0.3)
    assert len(problems) == 1 and "no way to the browser" in problems[0] and "no run is affected" in problems[0]
    broken[0] = False
    patient(lambda: browser.frames >= 1)
    assert len(browser.curves[0, "loss"]) == 5, "after an error all is sent again"
    publisher.stop()


def test_an_error_of_the_display_does_not_reach_the_training(tmp_path):
    def send(content, buffers): raise RuntimeError("always")

    path = tmp_path / "f16" / "run.sqlite"
    path.parent.mkdir()
    publisher = Publisher(send, View, lambda text: (_ for _ in ()).throw(RuntimeError("even this")), hz=25)
    publisher.follow([Following("f16", path)])
    publisher.hello()
    with RunLog(path) as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(50): fill(log, [k])
        assert log.lost == 0 and publisher.thread.is_alive()
    publisher.stop()


def test_a_closed_widget_ends_the_thread(tmp_path):
    gone = threading.Event()
    publisher, _, _ = publishing(tmp_path, lambda *a: None, closed=gone.is_set)
    publisher.hello()
    thread = publisher.thread
    gone.set()
    thread.join(5)
    assert not thread.is_alive()
    publisher.stop(), publisher.stop()
    publisher.hello()
    assert publisher.thread is None, "what was closed stays closed"


@pytest.mark.parametrize("hz", [0, -1, 1000, math.nan])
def test_odd_rates_are_refused(hz):
    with pytest.raises(ValueError, match="redraws a second"): Publisher(print, View, print, hz=hz)


def test_without_answers_it_slows_down(tmp_path, monkeypatch):
    publisher, _, path = publishing(tmp_path, lambda *a: None)
    with RunLog(path) as log:
        fill(log, range(5, 8))
        publisher.round()
        assert publisher.pause() == 1 / 25 and not publisher.due()
        publisher._drawn_at -= 2 * module.QUIET
        assert publisher.pause() == 4 * module.SLOW
    publisher.stop()


# ---------------------------------------------------------------- the widget
@pytest.fixture
def widget(tmp_path):
    made = LiveCharts(run_of(tmp_path, "f16", range(5), histograms=histograms()), hz=25)
    made.sent, made.browser = [], Browser()
    made.publisher.send = lambda content, buffers: (made.sent.append(content), made.browser.take(content, buffers))
    yield made
    made.close()


def test_clicks_are_answered(widget):
    picked = []
    forget = widget.on_pick(picked.append)
    receive(widget, {"type": "pick", "kind": "layer", "run": "f16", "layer": "blocks.1", "step": 4,
                     "tensor": "weight.m"})
    receive(widget, {"type": "pick", "kind": "step", "run": "f16", "step": 3})
    assert picked == [Pick("layer", "f16", "blocks.1", 4, "weight.m"), Pick("step", "f16", "", 3)]
    widget.on_pick(lambda pick: 1 / 0)
    receive(widget, {"type": "pick", "kind": "run", "run": "f16", "step": 3})
    assert "ZeroDivisionError" in widget.problem and len(picked) == 3
    forget(), forget()
    receive(widget, {"type": "nonsense"}), receive(widget, {})
    assert len(picked) == 3


def test_hello_over_the_comm_starts_it_and_traits_steer_it(widget):
    widget._handle_custom_msg({"type": "hello"}, [])
    patient(lambda: widget.sent)
    assert widget.sent[0]["full"] and widget.sent[0]["n"] == 1
    widget._handle_custom_msg({"type": "drawn", "n": widget.publisher.sent}, [])
    widget.scalar = "grad_norm"
    patient(lambda: (0, "grad_norm") in widget.browser.curves)
    widget._handle_custom_msg({"type": "drawn", "n": widget.publisher.sent}, [])
    widget._handle_custom_msg({"type": "range", "range": [1, 3]}, [])
    patient(lambda: list(widget.browser.curves.get((0, "detail"), ())) == [1, 2, 3])
    thread = widget.publisher.thread
    widget.close()
    assert not thread.is_alive() and widget.publisher.frames.feeds[0].run.reader is None


def test_other_runs_can_be_shown(widget, tmp_path):
    widget._handle_custom_msg({"type": "hello"}, [])
    patient(lambda: widget.sent)
    other = run_of(tmp_path, "other", range(9))
    widget.follow({"another": other})
    receive(widget, {"type": "drawn", "n": widget.publisher.sent})
    patient(lambda: len(widget.browser.curves.get((0, "loss"), ())) == 9)
    assert widget.browser.heads["runs"][0]["label"] == "another"
    widget.follow(None)
    patient(lambda: widget.browser.heads["runs"] == [])
    with pytest.raises(ValueError, match="no such folder"): widget.follow(tmp_path / "nowhere")


def test_functions_for_a_notebook(tmp_path):
    path = run_of(tmp_path, "f16", range(3))
    for make, name in ((trajectories, "trajectories"), (loss_scale, "loss_scale"), (exponent_map, "exponents")):
        w = make(path.parent, theme="dark")
        assert (w.charts, w.theme) == ([name], "dark")
        w.close()
    with pytest.raises(ValueError, match="no chart"): LiveCharts(path, charts=("pie",))
    assert trajectories(path, "lr").scalar == "lr"


def test_a_watch_is_live(tmp_path):
    import torch

    from f16lab.watching import watch
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as w:
        shown = exponent_map(w)
        model(torch.ones(3, 4)).sum().backward(), optimizer.step()
        shown._watched._log.flush()
        frame = shown.publisher.frames.frame(shown.view(), full=True)
    assert frame.content["map"]["layers"][0][0] == "0" and frame.content["map"]["tensor"] == "weight.grad"
    trajectory = Frames([Following("w", shown._watched.path)]).frame(View(("trajectories",)), full=True)
    assert "loss" not in [row[1] for row in trajectory.content["curves"]], "a watch knows no loss"
    shown.close()


def test_static_files_are_there_and_joined():
    text = static_text(*module.MODULE)
    assert text.count("export default") == 1 and "watchTheme" in text
    assert LiveCharts._esm == text and ".f16-charts" in LiveCharts._css
    with pytest.raises(FileNotFoundError): static_text("none.js")
    assert set(CHARTS) == {"trajectories", "loss_scale", "exponents"}


def test_the_words_of_a_scale_are_not_asked_too_often(tmp_path, log):
    fill(log, range(5), loss_scale=1024.0)
    feed = Feed(Following("f16", log.path))
    feed.poll(True)
    said = module.judge(feed)
    assert "1024" in said
    fill(log, range(5, 9), loss_scale=2048.0), feed.poll(True)
    assert module.judge(feed) is said
    feed.judged -= 2
    assert "2048" in module.judge(feed)
    assert struct.calcsize("<i") == 4
