"""Figures: right numbers, bounded size, nothing hidden, nothing injected."""
import json
import math
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from f16lab.events import CastRow, EvalRecord, StepRecord, TensorStat
from f16lab.plots import (CAST_COLUMNS, COLORS, FIGURES, MAX_POINTS, SMALLEST, cast_color, cast_path, cast_table, cast_tree, cast_treemap, color_of,
                          curve, deviation_figure, distance_figure, distance_map, efficiency_figure, figures, label, loss_figure, lost_shares,
                          mean_casts, memory_figure, norm_figure, smoothed, speed_figure, tensor_rows, top_casts)
from f16lab.verdict import Band, Comparison, Contender, Distances

EVIL = '<img src=x onerror=alert(1)></script><script>alert(1)</script>'
CASTS = (CastRow("train", "blocks.0.attn.qkv", "linear", "w", (8, 4), "f32", "f16", "forward", "operand", 2, 384),
         CastRow("train", "blocks.0.attn.qkv", "linear", "x", (8, 4), "f16", "f32", "backward", "grad", 1, 192),
         CastRow("optimizer", "optimizer.0", "adamw", "theta", (8, 4), "f32", "bf16", "update", "storage", 1, 192),
         CastRow("eval", "blocks.0.attn.qkv", "linear", "w", (8, 4), "f32", "f16", "forward", "operand", 50, 9600),
         CastRow("train", "", "add", "x", (4,), "bf16", "f16", "forward", "operand", 1, 16))


def steps(n=30, off=0.0, casts=(), **more):
    return tuple(StepRecord(s, (2 + math.exp(-s / 9)) * (1 + off), 100, grad_norm=1.0 + s, loss_scale=2.0**16, seconds=0.25, casts=casts,
                            tensors=(TensorStat("a.weight", 0.5, 0.25), TensorStat("a.bias", 1.0, 0.0)), **more) for s in range(n))


def contender(name="f16", off=1e-3, casts=CASTS, **more):
    far = tuple(Distances(s, {"a.weight": 10.0**-s, "a.bias": 0.0, "b.weight": math.inf}, 1.0) for s in (0, 1, 2))
    sizes = {"a.weight": 3000, "a.bias": 1000, "b.weight": 10}
    return Contender(name, name, steps=steps(off=off, casts=casts), evals=(EvalRecord(0, 3.0), EvalRecord(30, 2.0)), distances=far, sizes=sizes,
                     planned=dict(param=2.0, grad=4.0, m=4.0, v=4.0, master=0.0, compensation=0.0), **more)


REF = replace(contender("f32", 0.0, ()), distances=())
PAIR = Comparison((REF, contender()))
BROKEN = replace(contender("nan"), steps=tuple(replace(r, loss=math.nan, grad_norm=math.inf, loss_scale=math.nan, seconds=0.0, tokens=0)
                                               for r in steps()), evals=(EvalRecord(0, math.nan),), planned={}, memory={})
EMPTY = Contender("empty", "f16")
CASES = {"pair": PAIR, "one": Comparison((REF,)), "empty": Comparison((EMPTY,)), "empty beside": Comparison((REF, EMPTY)), "nan": Comparison((REF, BROKEN)),
         "nan reference": Comparison((BROKEN, REF)), "evil": Comparison((replace(REF, name=EVIL), replace(contender(), name=EVIL + "2"))),
         "one step": Comparison((replace(REF, steps=REF.steps[:1]), replace(contender(), steps=contender().steps[:1]))),
         "many": Comparison(tuple(replace(contender(), name=f"c{i}") for i in range(11))),
         "bands": Comparison((REF, contender(band="b")), bands=(Band("b", (1, 2), (tuple(r.loss for r in REF.steps),) * 2),))}


def refuse(word):
    raise ValueError(f"{word} is no JSON")


def traces(fig, **wanted):
    return [t for t in fig.data if all(t[k] == v for k, v in wanted.items())]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_every_case_is_strict_json_and_bounded(name, case):
    fig = FIGURES[name](CASES[case])
    assert isinstance(fig, go.Figure) and fig.layout.title.text
    json.loads(fig.to_json(), parse_constant=refuse)
    for t in fig.data:
        for axis in ("x", "y", "ids"):
            assert len(t[axis] if axis in t and t[axis] is not None else ()) <= MAX_POINTS
    page = fig.to_html(include_plotlyjs=False, full_html=False)
    assert "<img" not in page and page.count("<script") == page.count("</script>")


# ---------------------------------------------------------------- size (a long run costs no more)
def test_a_hundred_thousand_points():
    def drawn(n):
        run = Contender("c", "f16", steps=tuple(StepRecord(s, 2 + math.sin(s), grad_norm=1.0) for s in range(n)))
        return {name: len(fig.to_json()) for name, fig in figures(Comparison((run, replace(run, name="d")))).items()}
    small, large = drawn(1_000), drawn(100_000)
    for name in small:
        assert large[name] <= 3.2 * small[name], name  # 2000 points a trace instead of 1000, with longer step numbers


def test_a_spike_and_a_nan_survive_thinning():
    values = {s: 1.0 for s in range(50_000)}
    values[12_345], values[40_001] = 9.0, -9.0
    values[30_000] = math.nan
    line, cross = curve(values, "c", "#000000")
    assert {9.0, -9.0} <= set(line.y) and list(line.x).count(30_000) == 1 and line.y[list(line.x).index(30_000)] is None
    assert cross.x == (30_000,) and cross.y == (1.0,) and "nan at step 30000" in cross.text[0]


def test_each_gap_has_one_mark():
    values = {0: math.inf, 1: 2.0, 2: math.nan, 3: math.nan, 4: 3.0, 5: -math.inf}
    line, cross = curve(values, "c", "#000000")
    assert line.y == (None, 2.0, None, None, 3.0, None)
    assert cross.x == (0, 2, 5) and cross.y == (2.0, 2.0, 3.0)
    assert [t.split()[0] for t in cross.text] == ["inf", "nan", "-inf"]
    only = curve({0: math.nan}, "c", "#000000")
    assert only[0].y == (None,) and only[1].y == (0,)


# ---------------------------------------------------------------- numbers
def test_loss_figure_shows_the_losses():
    fig = loss_figure(PAIR)
    line = traces(fig, name="f16")[0]
    assert list(line.y) == [r.loss for r in PAIR.contenders[1].steps] and traces(fig, name="f16, held out")[0].y == (3.0, 2.0)


def test_deviation_figure():
    fig = deviation_figure(CASES["bands"])
    thick = [t for t in fig.data if t.line.width == 2.5]
    assert len(thick) == 1 and all(y == pytest.approx(1e-3) for y in thick[0].y)
    assert [t.y[0] for t in fig.data if t.fill] == [SMALLEST] and fig.layout.yaxis.type == "log"
    low, high = fig.layout.yaxis.range
    assert 10**low < 1e-3 < 10**high


def test_smoothed_is_a_running_median():
    assert smoothed({i: float(x) for i, x in enumerate([5, 1, 9, 2, 8])}, 3) == {0: 3.0, 1: 5.0, 2: 2.0, 3: 8.0, 4: 5.0}
    assert smoothed({0: math.nan, 1: 2.0}, 3) == {1: 2.0} and smoothed({}, 3) == {}


def test_skips_are_marked_and_leave_a_gap_in_the_norm():
    rows = tuple(replace(r, skipped=r.step in (3, 7), skip_reason="non-finite" * (r.step in (3, 7)), grad_norm=math.inf if r.step in (3, 7) else 1.0,
                         loss_scale=2.0 ** (16 - (r.step > 3) - (r.step > 7))) for r in steps(10))
    fig = norm_figure(Comparison((replace(REF, steps=rows),)))
    mark, scale = traces(fig, name="f32 skipped")[0], [t for t in fig.data if t.line.shape == "hv"][0]
    assert mark.x == (3, 7) and mark.y == (16, 15) and mark.text == ("non-finite",) * 2
    assert scale.y == (16,) * 4 + (15,) * 4 + (14,) * 2 and 3 not in fig.data[0].x


def test_mean_casts_and_the_tree():
    two = (StepRecord(0, 1.0, casts=CASTS), StepRecord(1, 1.0, casts=CASTS[:1]), StepRecord(2, 1.0))
    means = mean_casts(two)
    assert means["blocks.0.attn.qkv", "linear", "w", "forward", "f32", "f16", "operand"] == (2.0, 384.0), "evaluation is not counted"
    assert means["", "add", "x", "forward", "bf16", "f16", "operand"] == (0.5, 8.0)
    tree = cast_tree(Contender("c", "f16", steps=two))
    size = dict(zip(tree["ids"], tree["values"]))
    assert size["casts"] == pytest.approx(sum(size for _, size in means.values()))
    for at, parent in zip(tree["ids"], tree["parents"]):
        if parent:
            assert at.startswith(parent + "/")
    for at in set(tree["parents"]) - {""}:
        assert size[at] == pytest.approx(sum(v for v, p in zip(tree["values"], tree["parents"]) if p == at)), at
    assert len(set(tree["ids"])) == len(tree["ids"])
    leaf = tree["text"][tree["ids"].index("casts/blocks.0/attn.qkv/linear/w f32→f16")]
    assert "2 casts" in leaf and "f32 → f16" in leaf and "operand" in leaf


@pytest.mark.parametrize("key, path", [
    (("blocks.11.mlp", "linear", "w", "forward", "f32", "f16", "operand"), ("blocks.11", "mlp", "linear", "w f32→f16")),
    (("wte", "gather_rows", "table", "backward", "f16", "f32", "grad"), ("wte", "gather_rows", "∇table f16→f32")),
    (("optimizer.0", "adamw", "m", "update", "f32", "f16", "storage"), ("optimizer.0", "adamw", "m f32→f16")),
    (("", "add", "x", "forward", "f32", "f16", "operand"), ("no layer", "add", "x f32→f16"))])
def test_places_of_casts(key, path):
    assert cast_path(key) == path


def test_cast_colors():
    assert len({cast_color("f32", "f16"), cast_color("f16", "f32"), cast_color("bf16", "f16")}) == 3
    assert cast_color("f64", "f32") == cast_color("f32", "e4m3") == cast_color("f32", "bf16")


def test_treemap_has_a_button_for_each_that_casts():
    three = Comparison((REF, contender(), replace(contender("torch_amp"), steps=contender().steps)))
    fig = cast_treemap(three)
    assert [t.visible for t in fig.data] == [True, False] and [b.label for b in fig.layout.updatemenus[0].buttons] == ["f16", "torch_amp"]
    assert fig.layout.updatemenus[0].buttons[1].args[0] == {"visible": [False, True]}
    assert "no casts" in cast_treemap(Comparison((REF,))).layout.annotations[0].text


def test_top_casts():
    rows = top_casts(contender(), 2)
    assert [row["MB"] for row in rows] == [384e-6, 192e-6] and tuple(rows[0]) == CAST_COLUMNS
    assert top_casts(REF) == [] and cast_table(REF).to_json()
    assert cast_table(contender()).data[0].cells["values"][0][0] == "blocks.0.attn.qkv"


def test_efficiency_figure():
    fig = efficiency_figure(PAIR)
    upper, lower = traces(fig, name="f16")
    assert upper.y[0] == pytest.approx(0.625) and lower.y[0] == pytest.approx(0.1875) and lost_shares(contender())[0] == pytest.approx(0.1875)
    assert [shape.y0 for shape in fig.layout.shapes] == [0.5]


def test_tensor_rows():
    stats = ((TensorStat("b", 0.9), TensorStat("a", 0.2, lost=0.5, flushed=3), TensorStat("n", math.nan)), (TensorStat("a", 0.4, lost=1.0),))
    rows = tensor_rows(Contender("c", "f16", steps=tuple(StepRecord(s, 1.0, tensors=t) for s, t in enumerate(stats))))
    assert [row["tensor"] for row in rows] == ["a", "b", "n"] and rows[0]["efficiency"] == pytest.approx(0.3) and rows[0]["lost"] == 0.75
    assert rows[0]["flushed"] == 1.5 and math.isnan(rows[2]["efficiency"]) and len(tensor_rows(contender(), 1)) == 1


def test_memory_and_speed():
    fig = memory_figure(PAIR)
    assert {t.name: t.x[1] for t in fig.data} == dict(param=2, grad=4, m=4, v=4) and fig.layout.annotations[1].text == "14"
    bar = speed_figure(PAIR).data[0]
    assert bar.x == (400.0, 400.0) and bar.text[0] == "400 tokens/s, 250 ms a step"
    assert speed_figure(Comparison((EMPTY,))).data[0].text == ("not measured",)


def test_distance_map():
    at, layers, z = distance_map(contender(), 60)
    assert (at, layers) == (["0", "1", "2"], ["a", "b"]) and z == [[0.0, -1.0, -2.0], [None] * 3], "the largest tensor speaks for its layer"
    many = replace(contender(), distances=tuple(Distances(s, {"a.weight": 1.0}) for s in range(1000)))
    assert len(distance_map(many, 60)[0]) <= 60
    fig = distance_figure(PAIR)
    assert (fig.data[0].zmin, fig.data[0].zmax) == (-2, 0) and "no distances" in distance_figure(Comparison((REF,))).layout.annotations[0].text


# ---------------------------------------------------------------- colours and names
def test_a_contender_has_one_colour_in_all_figures():
    for c in PAIR.contenders:
        color, found = color_of(PAIR, c), set()
        for name in ("loss", "norm", "efficiency"):
            found |= {t.line.color for t in FIGURES[name](PAIR).data if t.name == c.name and t.mode.startswith("lines")}
        assert found == {color}
    assert len({color_of(CASES["many"], c) for c in CASES["many"].contenders[:8]}) == 8 == len(COLORS)


def test_names_are_escaped_and_cut():
    assert label("<b>&</b>") == "&lt;b&gt;&amp;&lt;/b&gt;" and label("x" * 50, 10) == "x" * 9 + "…"
    for fig in figures(CASES["evil"]).values():
        assert "<img" not in json.dumps([t.name for t in fig.data]) and "<img" not in fig.layout.title.text
