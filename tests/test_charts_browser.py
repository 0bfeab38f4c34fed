"""The live charts in a real browser, without JupyterLab: pixels, read-outs, clicks, keys, themes."""
import json
import math
import random

import pytest
from widget_page import WidgetPage, widget_page

from f16lab.charts import CHARTS, LiveCharts, receive
from f16lab.events import EventRecord, Histogram, RunEnded, RunStarted, StepRecord
from f16lab.runlog import RunLog

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("chromium")]
TRAITS = ("charts", "theme", "scalar", "log", "smooth", "reference", "tensor", "map_run", "map_step", "problem")
INK, BLUE, ALERT = (0x3B, 0x3B, 0x3B), (0x00, 0x72, 0xB2), (0xC1, 0x12, 0x1F)
PLOT = ".f16-trajectories canvas"


def histograms(scale: float) -> tuple[Histogram, ...]:
    return tuple(Histogram("backward", f"blocks.{i}.mlp", "weight.grad", "f16", -30 + i, (1, 9, 200, 900, 200, 9, 1), zeros=40 * i, infs=i == 4,
                           amax=scale * 2.0 ** (i - 14)) for i in range(8))


class Live:
    "A widget of the package whose frames go to a page, and whose page's messages come back."

    def __init__(self, folder, page: WidgetPage | None = None):
        self.folder, self.logs, self.seen, self.picks = folder, {}, 0, []
        for name in ("f32", "f16"):
            self.logs[name] = RunLog(folder / name / "run.sqlite")
            self.logs[name](RunStarted({"run": {"steps": 400}}))
        self.widget = LiveCharts({name: folder / name for name in self.logs}, map_run="f16")
        self.widget.on_pick(self.picks.append)

    def state(self, **changes):
        return {**{name: getattr(self.widget, name) for name in TRAITS}, **changes}

    def steps(self, first: int, last: int):
        rng = random.Random(first)
        for k in range(first, last):
            for name, log in self.logs.items():
                skip = name == "f16" and k % 60 == 50
                loss = math.nan if name == "f16" and k == 30 else 2 + 3 * math.exp(-k / 50) + 1e-3 * rng.random()
                loss = 4.9 if name == "f16" and k == 111 else loss
                scale = 2.0 ** (16 - k // 60) if name == "f16" else 1.0
                log(StepRecord(k, loss, 2048, 1.0, 1e-3, scale, skipped=skip, skip_reason="non-finite" * skip,
                               histograms=histograms(scale) if name == "f16" and k % 10 == 0 else ()))
        for log in self.logs.values(): log.flush()

    def pump(self, page: WidgetPage):
        "Both directions until nothing is left."
        while True:
            messages = page.page.evaluate("window.page.sent")
            new, self.seen = messages[self.seen:], len(messages)
            for m in new:
                if m["type"] == "hello": self.widget.publisher._full = True
                else: receive(self.widget, m)
            for name in ("scalar", "log", "smooth", "reference", "tensor", "map_run", "map_step"):
                setattr(self.widget, name, page.state(name))
            self.widget.publisher.send = lambda content, buffers: page.send(content, buffers)
            frame = self.widget.publisher.round()
            page.settle()
            if frame is None and len(page.page.evaluate("window.page.sent")) == self.seen: return

    def close(self):
        self.widget.close()
        for log in self.logs.values(): log.close()


@pytest.fixture
def live(tmp_path):
    made = Live(tmp_path)
    yield made
    made.close()


@pytest.fixture
def mounted(live):
    live.steps(0, 200)
    with widget_page(LiveCharts._esm, LiveCharts._css, live.state(theme="light")) as page:
        live.pump(page)
        yield live, page
        assert page.problems == []


def text(page: WidgetPage, selector: str) -> str: return page.page.locator(selector).inner_text()


def curve(page: WidgetPage, run: int, name: str) -> dict:
    return page.page.evaluate("([run, name]) => { const c = window.page.app().store.curve(run, name); return { steps: c.steps, values: c.values.map(String) }; }", [run, name])


def test_everything_at_once(mounted):
    live, page = mounted
    # ---- pixels: both runs, the gap's mark, the map
    inside = (0.1, 0.1, 0.99, 0.9)
    colors = page.colors(PLOT, inside)
    assert colors.get(INK, 0) > 40 and colors.get(BLUE, 0) > 100, "both traces are there"
    assert colors.get(ALERT, 0) > 4, "NaN is marked"
    assert len(page.colors(".f16-exponents canvas", (0.3, 0.2, 0.9, 0.8))) >= 4, "shades of the map"
    assert page.colors(".f16-loss_scale canvas", inside).get(ALERT, 0) > 20, "overflows are marked"
    legend = text(page, ".f16-legend")
    assert "f32" in legend and "step 199 of 400" in legend and "2.05" in legend
    assert "f16 healthy. Scale 8192" in text(page, ".f16-words")

    # ---- the curve grows
    live.steps(200, 260)
    live.pump(page)
    assert "step 259 of 400" in text(page, ".f16-legend") and len(curve(page, 0, "loss")["steps"]) == 260

    # ---- read-out
    page.move(PLOT, 0.5, 0.4)
    tip = text(page, ".f16-trajectories .f16-tip")
    step = int(tip.splitlines()[0].removeprefix("step "))
    assert 90 < step < 160 and tip.splitlines()[1] == "f32"
    assert abs(float(tip.splitlines()[2]) - 2 - 3 * math.exp(-step / 50)) < 2e-3
    page.page.mouse.move(5, 5)
    page.settle()
    assert not page.page.locator(".f16-trajectories .f16-tip").is_visible()

    # ---- keys: Tab reaches the chart, arrows move the cursor and speak, Enter picks
    page.page.locator(PLOT).focus()
    for key in ("End", "ArrowLeft", "ArrowLeft"): page.page.keyboard.press(key)
    page.settle()
    said = page.page.locator(".f16-trajectories .f16-spoken").text_content()
    assert said.startswith("step 257") and "f16" in said
    page.page.keyboard.press("Enter")
    live.pump(page)
    assert live.picks[-1].kind == "step" and live.picks[-1].step == 257
    assert "Trajectories" in page.page.locator(PLOT).get_attribute("aria-label")

    # ---- zoom by dragging brings the detail, a double click goes back
    box = page.page.locator(PLOT).bounding_box()
    at = lambda x: (box["x"] + box["width"] * x, box["y"] + box["height"] * 0.5)  # noqa: E731
    page.page.mouse.move(*at(0.4)), page.page.mouse.down(), page.page.mouse.move(*at(0.6)), page.page.mouse.up()
    live.pump(page)
    asked = page.messages("range")[-1]["range"]
    assert 80 < asked[0] < asked[1] < 170 and curve(page, 1, "detail")["steps"] == list(range(asked[0], asked[1] + 1))
    page.page.mouse.dblclick(*at(0.5))
    live.pump(page)
    page.page.wait_for_timeout(300)
    assert page.messages("range")[-1]["range"] is None and page.messages("pick")[-1]["step"] == 257, "a double click picks nothing"


def test_clicks_are_picks(mounted):
    live, page = mounted
    page.page.locator(".f16-run", has_text="f16").click()
    live.pump(page)
    assert (live.picks[-1].kind, live.picks[-1].run) == ("run", "f16")
    assert page.page.locator(".f16-run", has_text="f16").get_attribute("aria-pressed") == "true"
    # a skipped step: its mark at the foot of the curves, and on the scale
    x = page.page.evaluate("() => window.page.app().charts[0].x(110) / document.querySelector('.f16-trajectories canvas').clientWidth")
    y = page.page.evaluate("() => { const c = window.page.app().charts[0]; return (c.box.bottom - 3) / c.board.height; }")
    for selector, height in ((PLOT, y), (".f16-loss_scale canvas", 0.3)):
        page.move(selector, x, height)
        page.page.mouse.down(), page.page.mouse.up()
        page.page.wait_for_timeout(300)
        live.pump(page)
        assert (live.picks[-1].kind, live.picks[-1].run, live.picks[-1].step) == ("step", "f16", 110)
    # a row of the map
    page.move(".f16-exponents canvas", 0.6, 0.5)
    assert "weight.grad" in text(page, ".f16-exponents .f16-tip") and "zeros" in text(page, ".f16-exponents .f16-tip")
    page.page.mouse.down(), page.page.mouse.up()
    live.pump(page)
    assert live.picks[-1].kind == "layer" and live.picks[-1].layer.startswith("blocks.") and live.picks[-1].step == 190
    assert live.picks[-1].tensor == page.page.evaluate("window.page.app().store.map.tensor") != ""
    page.page.locator(".f16-exponents canvas").focus()
    for key in (*["ArrowUp"] * 9, "ArrowDown", "Enter"): page.page.keyboard.press(key)
    live.pump(page)
    assert live.picks[-1].layer == "blocks.1.mlp"


def test_controls_and_what_they_change(mounted):
    live, page = mounted
    page.page.get_by_label("difference from").select_option("f32")
    live.pump(page)
    gap = curve(page, 1, "difference")
    assert len(gap["steps"]) == 200 and float(gap["values"][111]) > 2 and page.state("reference") == "f32"
    assert page.colors(PLOT, (0.1, 0.75, 0.99, 0.92)).get(BLUE, 0) > 20, "the strip of differences"
    page.move(PLOT, 0.5, 0.3)
    assert "|Δ|" in text(page, ".f16-trajectories .f16-tip")
    for name in ("log", "smooth"):
        page.page.get_by_role("button", name=name, exact=True).click()
        live.pump(page)
        assert page.state(name) is True
    page.page.get_by_label("quantity").select_option("loss_scale")
    live.pump(page)
    assert text(page, ".f16-trajectories h3") == "Loss scale" and len(curve(page, 1, "loss_scale")["steps"]) == 200
    page.page.get_by_label("quantity").select_option("lr")
    live.pump(page)
    assert page.colors(PLOT).get(BLUE, 0) > 50, "a constant on a logarithmic axis is seen"
    slider = page.page.get_by_label("step of the exponent map")
    slider.fill("3")
    live.pump(page)
    assert page.state("map_step") == 30 and text(page, ".f16-step") == "30"
    page.page.get_by_role("button", name="newest").click()
    live.pump(page)
    assert text(page, ".f16-step") == "190"
    # what was set outlives a reload
    page.page.evaluate("window.page.remount()")
    live.seen = 0
    live.pump(page)
    assert text(page, ".f16-trajectories h3") == "Learning rate" and len(curve(page, 0, "lr")["steps"]) == 200
    assert page.page.evaluate("document.querySelectorAll('.f16-charts').length") == 1


def test_theme_width_and_the_end(mounted):
    live, page = mounted
    paper = lambda: page.page.evaluate("getComputedStyle(document.querySelector('.f16-chart')).backgroundColor")  # noqa: E731
    assert paper() == "rgb(255, 255, 255)"
    page.set("theme", "dark")
    page.settle()
    dark = page.colors(PLOT, (0.1, 0.1, 0.99, 0.9))
    assert paper() == "rgb(21, 24, 28)" and dark.get((0xD7, 0xDA, 0xDF), 0) > 40 and dark.get((0x4D, 0xA9, 0xEA), 0) > 100
    page.set("theme", "auto")
    for lab, wanted in (("true", "rgb(255, 255, 255)"), ("false", "rgb(21, 24, 28)")):
        page.page.evaluate("(lab) => { document.body.dataset.jpThemeLight = lab; }", lab)
        page.settle()
        assert paper() == wanted, f"JupyterLab's data-jp-theme-light={lab}"
    page.page.set_viewport_size(dict(width=420, height=800))
    page.settle(), page.settle()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 420, "nothing sticks out"
    assert page.page.evaluate("document.querySelector('.f16-trajectories canvas').clientWidth") > 340
    # the ends of runs are said in words
    live.logs["f16"](EventRecord(199, "overflow", "blocks.4.mlp")), live.logs["f16"](RunEnded(200, "failed", "TooManySkips: blocks.4.mlp"))
    live.logs["f32"](RunEnded(200, "finished"))
    for log in live.logs.values(): log.flush()
    for feed in live.widget.publisher.frames.feeds: feed.run._looked = -1.0
    live.pump(page)
    assert "failed: TooManySkips" in text(page, ".f16-troubles") and "finished" in text(page, ".f16-legend")
    page.set("problem", "The charts could not be drawn (KeyError).")
    assert "could not be drawn" in text(page, ".f16-banner")
    page.page.evaluate("window.page.close()")
    assert page.page.evaluate("Object.values(window.page.listeners).flat().length") == 0, "all listeners are gone"


def test_before_the_first_step_and_a_long_run(live):
    words = []
    with widget_page(LiveCharts._esm, LiveCharts._css, live.state(charts=list(CHARTS[:1]))) as page:
        page.page.evaluate("""() => { const real = CanvasRenderingContext2D.prototype.fillText; window.words = [];
            CanvasRenderingContext2D.prototype.fillText = function (text, ...more) { window.words.push(text); real.call(this, text, ...more); }; }""")
        live.widget.charts = list(CHARTS[:1])
        live.pump(page)
        words = page.page.evaluate("window.words")
        assert "waiting for the first step" in words
        import numpy as np
        many = 30_000  # one message of many steps, as after a long pause: still at most 2,000 points, and the spike stays
        steps, values = np.arange(many, dtype="<i4"), np.sin(np.arange(many) / 700).astype("<f4")
        values[17_171], values[20_202], values[22_222] = 9, np.nan, np.inf
        for a in range(0, many, 2000):
            content = {"type": "frame", "full": False, "n": 9, "curves": [[0, "loss", 2000, None, int(a == 0)]]}
            page.send(content, (steps[a:a + 2000].tobytes(), values[a:a + 2000].tobytes()))
        kept = curve(page, 0, "loss")
        assert len(kept["steps"]) <= 2000 and kept["steps"] == sorted(kept["steps"])
        got = dict(zip(kept["steps"], kept["values"]))
        assert (got[17_171], got[20_202], got[22_222]) == ("9", "NaN", "Infinity") and {0, many - 1} <= set(kept["steps"])
        assert page.problems == []
    assert json.dumps(words)


def test_a_theme_that_comes_between_two_layouts_is_drawn(mounted):
    live, page = mounted
    page.page.evaluate("""() => {  // for one frame the charts have no width, and no change of size is told
        const place = document.getElementById("place"), shown = (value) => () => { place.style.display = value; };
        requestAnimationFrame(shown("none"));
        document.body.dataset.jpThemeLight = "false";
        page.model.set("theme", "auto");
        Promise.resolve().then(() => requestAnimationFrame(shown("")));
    }""")
    page.page.wait_for_timeout(300)
    assert page.colors(PLOT, (0.1, 0.1, 0.99, 0.9)).get((0x4D, 0xA9, 0xEA), 0) > 100


def test_hello_is_said_until_everything_has_come(live):
    live.steps(0, 20)
    with widget_page(LiveCharts._esm, LiveCharts._css, live.state()) as page:
        page.page.wait_for_function("window.page.sent.length >= 2")  # nobody has answered
        live.pump(page)
        said = len(page.messages("hello"))
        page.page.wait_for_timeout(2200)
        assert len(page.messages("hello")) == said and len(curve(page, 0, "loss")["steps"]) == 20
        page.page.evaluate("() => { window.page.model.send = () => { throw new Error('Cannot send'); }; }")
        live.steps(20, 30)
        live.pump(page)
        page.settle()
        assert len(curve(page, 0, "loss")["steps"]) == 30 and page.problems == []
