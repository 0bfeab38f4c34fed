"""Panels in a real browser: counts in the page are Python's to the bit; dragging, keys, search and picks do what they
say; no errors."""

import base64
import random
from collections.abc import Mapping

import numpy as np
import pytest
from widget_page import widget_page

from f16lab.events import CastRow, EventRecord, Histogram, RunEnded, RunStarted, StepRecord, TensorStat
from f16lab.histories import LADDER_FORMATS, block_of, format_limits
from f16lab.panels import cast_attribution, lost_updates, memory, overflow_histograms, skipped_step
from f16lab.probes import what_if
from f16lab.runlog import RunLog

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("chromium")]
EVIL = "<img src=x onerror=document.title='evil'>"


def plain(value):
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes64": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def shown(panel, theme="light", width=1280, **traits):
    state = {
        k: plain(v)
        for k, v in panel.get_state().items()
        if not k.startswith("_") and k not in ("layout", "tabbable", "tooltip")
    }
    return widget_page(panel._esm, panel._css, {**state, "theme": theme, **traits}, width)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    rng = random.Random(1)
    with RunLog(out / "run.sqlite") as log:
        log(RunStarted({"profile": "f16", "probe": {"probe_every": 1}}))
        for step in range(24):
            hs = tuple(
                Histogram(
                    "backward",
                    f"blocks.{i}.fc",
                    "output.grad",
                    "f16",
                    -28 + i // 4,
                    tuple(rng.randrange(900) for _ in range(9)),
                    zeros=7,
                    infs=step == 20 and i == 3,
                    amax=2.0**-20,
                )
                for i in range(70)
            )
            casts = tuple(
                CastRow(
                    "train",
                    f"blocks.{i}.fc",
                    "linear",
                    EVIL if i == 5 else "weight",
                    (8, 4),
                    "f32",
                    "f16",
                    "forward",
                    "operand",
                    2,
                    400 + i,
                )
                for i in range(70)
            )
            log(
                StepRecord(
                    step,
                    2.0,
                    casts=casts,
                    histograms=hs,
                    tensors=(TensorStat("a.weight", 0.1), TensorStat("b.weight", 0.9)),
                )
            )
        log(EventRecord(20, "skip", "non-finite, gradient norm inf"))
        log(RunEnded(24, "finished"))
    return out


def random_histogram(rng):
    first, width = rng.choice((rng.randrange(-45, 10), rng.randrange(-140, 100))), rng.randrange(0, 50)
    counts = tuple(rng.choice((0, 0, 1, rng.randrange(2**20), rng.randrange(2**44))) for _ in range(width))
    full = [first + i for i, c in enumerate(counts) if c]
    amax = rng.choice((1.0, 1.5, 1.999, 1.75, 1.8125)) * 2.0 ** full[-1] if full else 0.0
    return Histogram("f", "l", "t", "f32", first, counts, *(rng.randrange(5) for _ in range(4)), amax=amax)


def test_what_if_in_the_page_is_what_if_in_python_bit_for_bit(folder):
    rng = random.Random(0)
    hs = [random_histogram(rng) for _ in range(60)]
    for p in LADDER_FORMATS:  # the border itself, and its neighbours
        for amax in (
            p.max,
            format_limits(p)["edge"],
            format_limits(p)["edge"] * (1 - 2**-24),
            format_limits(p)["edge"] * (1 + 2**-20),
        ):
            hs.append(Histogram("f", "l", "t", "f32", p.emax - 1, (3, 5), amax=amax))
    scales = (-40, -9, -1, 0, 1, 7, 40)
    block = block_of(list(enumerate(hs)))
    history = {"steps": list(block.steps), "first": block.first, "width": block.width}
    with shown(overflow_histograms(folder)) as page:
        found = page.page.evaluate(
            """([history, counts, formats, scales]) => {
            const { module } = window.page;
            const view = new DataView(Uint8Array.from(atob(counts), (c) => c.charCodeAt(0)).buffer);
            const past = module.unpacked({ get: (name) => (name === "history" ? history : view) });
            const out = new Float64Array(past.steps.flatMap((_, i) => formats.flatMap((p) => scales.flatMap((k) => {
              const w = module.whatIf(module.histogramAt(past, i), p, k);
              return [w.flushed, w.subnormal, w.overflow, w.overflowMost]; }))));
            return Array.from(new Uint8Array(out.buffer), (b) => b.toString(16).padStart(2, "0")).join("");
        }""",
            [
                history,
                base64.b64encode(block.values.tobytes()).decode(),
                [format_limits(p) for p in LADDER_FORMATS],
                list(scales),
            ],
        )
    page_says = np.frombuffer(bytes.fromhex(found), "<f8")
    python = np.array(
        [
            x
            for h in hs
            for p in LADDER_FORMATS
            for k in scales
            for x in (lambda w: (w.flushed, w.subnormal, w.overflow, w.overflow_most))(what_if(h, p, 2.0**k))
        ]
    )
    assert len(python) == 76 * 4 * 7 * 4 and len(set(python)) > 500
    assert page_says.tobytes() == python.tobytes()


def read(page):
    return page.page.locator(".f16p-readout b").first.inner_text()


def test_the_range_is_dragged_by_pointer_slider_and_keys(folder):
    p = overflow_histograms(folder)
    site = next(s for s in p.sites if s["layer"] == "blocks.40.fc")
    p._hear(p, {"kind": "site", **{k: site[k] for k in ("phase", "layer", "tensor")}}, [])
    with shown(p) as page:
        canvas = page.page.locator(".f16p-picture canvas")
        assert read(page) == "Step 23, × 1, in f16: "
        canvas.focus()
        for key, words in (
            ("ArrowDown", "× 2¹ = 2"),
            ("ArrowDown", "× 2² = 4"),
            ("ArrowUp", "× 2¹ = 2"),
            ("0", "× 1"),
            ("ArrowLeft", "Step 22"),
            ("Home", "Step 0"),
            ("End", "Step 23"),
        ):
            page.page.keyboard.press(key)
            assert words in read(page)
        page.page.locator("input[type=range]").fill("12")
        assert "× 2¹² = 4,096" in read(page)
        page.page.get_by_role("button", name="back to 1").click()
        box = canvas.bounding_box()
        page.page.mouse.move(box["x"] + 300, box["y"] + 200)
        page.page.mouse.down()
        page.page.mouse.move(box["x"] + 300, box["y"] + 260, steps=4)
        page.page.mouse.up()
        k = int(page.page.locator("input[type=range]").input_value())
        assert k >= 5
        h = p.past[2].past[-1][1]
        for tag, name in (("f16", "f16"), ("e4m3", "E4M3")):
            page.page.locator(f"button[data-tag={tag}]").click()
            row = page.page.locator(".f16p-read tbody tr[aria-selected=true] td").all_inner_texts()
            w = what_if(h, next(f for f in LADDER_FORMATS if f.tag == tag), 2.0**k)
            assert row[0] == name and abs(float(row[2].strip(" %<")) - 100 * w.flushed) < 0.1
        page.page.mouse.click(box["x"] + 80, box["y"] + 200)  # a click without a drag chooses a step
        assert read(page).startswith("Step 0,") and page.problems == []


def test_seventy_layers_are_searched_sorted_and_walked(folder):
    with shown(overflow_histograms(folder)) as page:
        options = page.page.locator(".f16p-site")
        assert options.count() == 70
        page.page.get_by_label("search tensors").fill("blocks.6 ")
        assert options.count() == 11
        options.nth(1).click()
        page.page.keyboard.press("ArrowDown")
        sent = [(m["kind"], m["layer"]) for m in page.page.evaluate("window.page.sent")]
        assert sent[-2:] == [("site", "blocks.60.fc"), ("site", "blocks.61.fc")] and page.problems == []


def test_a_new_look_keeps_the_scale_and_follows_the_newest_step(folder):
    p = overflow_histograms(folder)
    with shown(p) as page:
        page.page.locator("input[type=range]").fill("3")
        steps, width = p.history["steps"], p.history["width"]
        for name, value in (("history", {**p.history, "steps": [*steps, 99]}), ("counts", None)):
            if value is not None:
                page.set(name, value)
            else:
                page.page.evaluate(
                    "([n]) => { const m = window.page.model, v = m.get('counts');"
                    " const a = new Uint8Array(v.byteLength + 8 * n);"
                    " a.set(new Uint8Array(v.buffer)); m.set('counts', new DataView(a.buffer)); }",
                    [width + 6],
                )
        assert read(page) == "Step 99, × 2³ = 8, in f16: " and page.problems == []


@pytest.mark.parametrize("make", [cast_attribution, lost_updates, memory, skipped_step, overflow_histograms])
def test_every_panel_draws_in_both_themes_without_an_error(make, folder):
    with shown(make(folder), "dark", 640) as page:
        for theme in ("dark", "light"):
            page.set("theme", theme)
            page.settle()
            assert page.page.evaluate("document.querySelector('.f16p-panel').dataset.theme") == theme
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 640  # nothing sticks out
        page.page.evaluate("window.page.remount()")
        assert page.page.locator(".f16p-title").inner_text() and page.problems == []
        page.page.evaluate("window.page.close()")
        assert page.page.evaluate("Object.values(window.page.listeners).flat().length") == 0


def test_casts_are_searched_sorted_picked_and_entered(folder):
    with shown(cast_attribution(folder)) as page:
        lines = page.page.locator(".f16p-table tbody tr")
        assert lines.count() == 70 and "blocks.69" in lines.first.inner_text()
        page.page.get_by_role("button", name="bytes").click()
        assert "blocks.0." in lines.first.inner_text()
        page.page.get_by_label("search").fill("blocks.1")
        assert lines.count() == 11
        lines.first.focus()
        page.page.keyboard.press("ArrowDown")
        page.page.keyboard.press("Enter")
        assert "mirrors=true" in page.page.locator(".f16p-detail").inner_text()
        page.page.get_by_label("search").fill("")
        page.page.locator(".f16p-group").first.click(position={"x": 8, "y": 6})
        assert page.page.locator(".f16p-crumbs").inner_text().startswith("all layers")
        assert page.page.locator(".f16p-crumbs button").count() == 2 and lines.count() == 1
        page.page.locator(".f16p-map button").first.focus()
        page.page.keyboard.press("Escape")
        assert page.page.locator(".f16p-crumbs button").count() == 1 and page.problems == []
        assert page.page.title() == "widget"  # markup in a name stays text


def test_what_was_typed_survives_a_refresh(folder):
    p = cast_attribution(folder)
    with shown(p) as page:
        page.page.get_by_label("search").fill("blocks.1")
        page.set("body", p.body)
        assert page.page.locator(".f16p-table tbody tr").count() == 11
        assert page.page.evaluate("document.activeElement.className") == "f16p-search"
        page.set("problem", "This panel cannot be drawn: x")
        assert page.page.get_by_role("alert").inner_text().startswith("This panel")
