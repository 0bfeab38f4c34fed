"""The report: one file, no network, nothing injected, and there even when a run came to nothing."""
import contextlib
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from f16lab.archive import closing, log_path, opening
from f16lab.events import (CastRow, EvalRecord, EventRecord, Histogram, HistogramRecord, RunEnded, RunStarted, StepRecord,
                           TensorStat)
from f16lab.report import COLUMNS, EXPLAINED, number, report_html, report_run, table, tag, write_report
from f16lab.runfile import RunLogError
from f16lab.runlog import RunLog
from f16lab.verdict import Comparison, Contender, Distances

EVIL = '"><script>alert(1)</script><b onclick=x>'
ROW = CastRow("train", "blocks.0.mlp", "linear", "w", (8, 4), "f32", "f16", "forward", "operand", 2, 384)


def contender(name, off=0.0, **more):
    steps = tuple(StepRecord(s, (3 - s / 40) * (1 + off), 64, grad_norm=1.0, seconds=0.1, casts=(ROW,) if off else (),
                             tensors=(TensorStat("a.weight", 0.9),)) for s in range(40))
    return Contender(name, "f16", steps=steps, evals=(EvalRecord(40, 2.1, 9),), planned=dict(param=2.0, grad=4.0), sizes={"a.weight": 5000},
                     distances=(Distances(0, {"a.weight": 1e-4}, 1e-4),) if off else (), recipe='[run]\nsteps = 40\n', digest="ab" * 32, **more)


LOOK = Histogram("backward", "a", "weight.grad", "f32", -20, (1, 5, 9, 2), zeros=3, amax=1e-5)
PAIR = Comparison((contender("f32"), contender("f16", 1e-3, note="a note", histograms={39: (LOOK,)})), {"run": {"steps": 40}, "profile": {"param": "f32"}},
                  {"torch": "2.13", "device": "cpu"})


class Checked(HTMLParser):
    """Collects text and tags, and sees that every element is closed."""
    VOID = {"meta", "br", "img", "link", "input", "hr"}

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.words, self.attributes = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += attributes
        if name not in self.VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def own(page):
    """The page without plotly's library."""
    assert page.count(get_plotlyjs()) == 1, "the library is in the page once"
    return page.replace(get_plotlyjs(), "")


def test_the_page_is_whole_and_needs_no_network():
    page = own(report_html(PAIR))
    parsed = Checked(page)
    assert not [v for k, v in parsed.attributes if k in ("src", "href", "action")] and not re.search(r"@import|url\(|https?://", page)
    assert parsed.tags.count("h2") == 9 + 3 and parsed.tags.count("h1") == 1
    assert page.count("Plotly.newPlot") == len(EXPLAINED)


def test_what_a_reader_looks_for_is_there():
    text = Checked(own(report_html(PAIR))).text
    for words in ("Which numbers may be small?", "2 contenders in lockstep", "device cpu", "Deviates from f32 by at most 0.1%", "a note", "steps = 40",
                  "torch", "2.13", "ab" * 32, "run.steps", *COLUMNS, *(head for head, _ in EXPLAINED.values())):
        assert words in text, words


def test_one_run_is_a_report_too():
    parsed = Checked(own(report_html(Comparison((contender("f16", 1e-3),)), "My run")))
    assert parsed.tags.count("h2") == 6 + 3 and "My run" in parsed.text and "Where the weights part" not in parsed.text


@pytest.mark.parametrize("broken", [
    Contender("none", "f16"), Contender("failed", "f16", status="failed", message="boom"),
    replace(contender("nan"), steps=tuple(replace(r, loss=math.nan, grad_norm=math.inf, seconds=math.nan) for r in contender("x").steps)),
    replace(contender("inf"), steps=tuple(replace(r, loss=math.inf, tokens=0, seconds=0.0) for r in contender("x").steps), evals=()),
], ids=lambda c: c.name)
def test_runs_in_which_nothing_went_well(broken):
    for comparison in (Comparison((broken,)), Comparison((contender("f32"), broken)), Comparison((broken, contender("f32")))):
        assert broken.name in Checked(own(report_html(comparison))).text


def test_user_text_is_shown_and_not_run():
    evil = replace(contender(EVIL, 1e-3), note=EVIL, recipe=EVIL, message=EVIL, status="failed", profile=EVIL, digest=EVIL)
    evil = replace(evil, steps=tuple(replace(r, skipped=True, skip_reason=EVIL, casts=(replace(ROW, layer=EVIL, op=EVIL, reason=EVIL),)) for r in evil.steps))
    evil = replace(evil, histograms={39: (replace(LOOK, layer=EVIL, tensor=EVIL),)})
    page = own(report_html(Comparison((contender("f32"), evil), {EVIL: EVIL}, {EVIL: EVIL}), EVIL))
    parsed, plain = Checked(page), Checked(own(report_html(PAIR)))
    assert parsed.tags.count("script") == plain.tags.count("script") and parsed.tags.count("b") == 0
    assert not [value for key, value in parsed.attributes if key == "onclick" and "clipboard" not in value]
    assert parsed.text.count(EVIL) >= 6, "it is shown as it is"


def test_pieces():
    assert tag("a", "x", class_="y", data_name='"') == '<a class="y" data-name="&quot;">x</a>'
    assert [number(x, ".1f") for x in (1.25, math.nan, math.inf, -math.inf, None)] == ["1.2", "–", "∞", "−∞", "–"]
    assert table(["a", "b"], [["1", "2"]]).count('class="n"') == 2


# ---------------------------------------------------------------- from files
def test_report_of_a_single_log(tmp_path):
    path = tmp_path / "deep" / "run.sqlite"
    with RunLog(path) as log:
        log(RunStarted({"profile": "bf16_sr", "run": {"device": "cpu"}, "model": {"name": "tiny"}}, {"torch": "2"}))
        for r in contender("x", 1e-3).steps: log(r)
        log(EvalRecord(40, 2.5, 10))
        log(EventRecord(3, "scale", "loss scale 2 -> 1"))
        log(RunEnded(40, "finished"))
    page = report_run(path)
    text = Checked(own(page.read_text(encoding="utf-8"))).text
    assert page == tmp_path / "deep" / "run.html" and "Run: bf16_sr" in text and "2.5000" in text and "40 steps" in text


def test_report_of_a_log_without_steps(tmp_path):
    with RunLog(tmp_path / "run.sqlite") as log:
        log(RunStarted({"profile": "f16"}))
    assert "Took no step" in Checked(own(report_run(tmp_path / "run.sqlite", tmp_path / "out" / "page.html").read_text(encoding="utf-8"))).text


def test_report_of_a_folder_equals_the_report_of_the_value(tmp_path):
    for i, c in enumerate(PAIR.contenders):
        with RunLog(log_path(tmp_path, i, c.name)) as log:
            log(opening(c, i, PAIR.config, PAIR.versions))
            for r in (*c.steps, *c.evals, *(HistogramRecord(*look) for look in c.histograms.items())): log(r)
            for r in closing(c, PAIR if i == 0 else None): log(r)
    value = Comparison(tuple(replace(c, distances=()) for c in PAIR.contenders), PAIR.config, PAIR.versions)
    assert report_run(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report_html(value)


def test_nothing_to_report(tmp_path):
    with pytest.raises(RunLogError, match="no run log"):
        report_run(tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- in a browser
@pytest.mark.browser
def test_the_page_opens_offline_in_a_browser(tmp_path, chromium):
    broken = replace(contender("nan"), steps=tuple(replace(r, loss=math.nan) for r in contender("x").steps))
    path = write_report(Comparison((*PAIR.contenders, broken, replace(contender("x"), name=EVIL)), PAIR.config, PAIR.versions), tmp_path / "report.html")
    problems, requests = [], []
    with contextlib.closing(chromium.new_context(offline=True, viewport=dict(width=1200, height=900))) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None)
        page.goto(path.as_uri())
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 9")
        boxes = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map(e => [e.id, e.clientWidth, e.clientHeight])")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200, "nothing sticks out"
        page.click("text=The 1 largest of f16")
        assert page.is_visible("td:has-text('blocks.0.mlp')")
        legends = page.evaluate("[...document.querySelectorAll('#figure-loss .legendtext')].map(e => e.textContent)")
    assert (problems, requests) == ([], [])
    assert len(boxes) == 9 and all(width > 600 and height > 100 for _, width, height in boxes)
    assert any(text.startswith(EVIL[:30]) for text in legends), "names are shown as they are"
