"""Figures of a run in hand: the report's numbers, transparent, in both themes, strict JSON whatever the numbers are."""

import json
import math

import plotly.graph_objects as go
import pytest

from f16lab.events import CastRow, Histogram, StepRecord, TensorStat
from f16lab.live_figures import THEMES, casts_figure, held_figure, history_figure, meters_figure, themed
from f16lab.precision import BF16, E4M3, E5M2, F16
from f16lab.probes import first_overflow

ROWS = (
    CastRow("train", "blocks.0.fc", "linear", "weight", (8, 4), "f32", "f16", "forward", "operand", 4, 768),
    CastRow("train", "blocks.1.fc", "linear", "x", (8, 4), "f16", "f32", "backward", "boundary", 1, 192),
    CastRow("eval", "blocks.1.fc", "linear", "x", (8, 4), "f16", "f32", "forward", "boundary", 9, 9999),
)
METERS = [
    StepRecord(s, math.nan, tensors=(TensorStat("fc.weight", e, 0.5), TensorStat("fc.bias", 1.0, 0.0)))
    for s, e in ((0, 0.9), (10, math.nan), (20, 0.1))
]
PAST = [
    (
        s,
        Histogram(
            "backward", "<b>evil</b>", "output.grad", "f16", -20 + s, (3, 0, 20), zeros=5, infs=s == 2, amax=2.0**-16
        ),
    )
    for s in range(4)
]
EMPTY = [(0, Histogram("backward", "fc", "output.grad", "f16", 0, (), zeros=5))]
FIGURES = {
    "casts": lambda theme: casts_figure(ROWS, "run", theme),
    "no casts": lambda theme: casts_figure((), "run", theme),
    "meters": lambda theme: meters_figure(METERS, {"fc.weight": 96, "fc.bias": 4}, theme=theme),
    "no meters": lambda theme: meters_figure((), {}, theme=theme),
    "held": lambda theme: held_figure({"f32": dict(param=4.0, m=4.0), "f16": dict(param=2.0, m=4.0)}, theme),
    "history": lambda theme: history_figure(PAST, theme=theme),
    "zeros": lambda theme: history_figure(EMPTY, theme=theme),
    "nothing": lambda theme: history_figure((), theme=theme),
}


def refuse(word):
    raise ValueError(f"{word} is no JSON")


@pytest.mark.parametrize("theme", [*THEMES, "auto"])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_transparent_strict_json_in_the_inks_of_their_theme(name, theme):
    fig = FIGURES[name](theme)
    json.loads(fig.to_json(), parse_constant=refuse)
    assert fig.layout.paper_bgcolor == fig.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert fig.layout.font.color == THEMES.get(theme, THEMES["light"])[1]
    assert "<b>evil" not in (fig.layout.title.text or "")


def test_a_treemap_holds_every_byte_but_those_of_evaluations():
    tree = casts_figure(ROWS).data[0]
    assert dict(zip(tree.ids, tree["values"]))["casts"] == 960


def test_meters_are_weighted_by_size_and_gaps_stay_gaps():
    line = meters_figure(METERS, {"fc.weight": 96, "fc.bias": 4}).data[0]
    assert line.y == pytest.approx((0.904, 1.0, 0.136))  # at step 10 only the bias was measured


@pytest.mark.parametrize("p", [F16, BF16, E4M3, E5M2])
@pytest.mark.parametrize("k", [-3, 0, 7])
def test_the_lines_of_a_format_move_against_the_scale(p, k):
    ends = [math.log2(first_overflow(p)), p.emin, p.emin - p.mantissa_bits]
    wide = [(0, Histogram("backward", "fc", "x", "f32", -140, (1,) * 270, amax=1.0))]
    drawn = [s.y0 for s in history_figure(wide, p, 2.0**k).layout.shapes]
    assert drawn == [e - k - 0.5 for e in ends if -144 <= e - k <= 134] and len(drawn) >= 2


def test_a_scale_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="powers of two"):
        history_figure(PAST, scale=3.0)


def test_history_cells_are_shares_of_all_elements():
    z = history_figure(PAST).data[0].z
    assert (
        z[0][0] == pytest.approx(math.log10(3 / 28))
        and z[1][0] is None
        and z[2][0] == pytest.approx(math.log10(20 / 28))
    )


def test_themes_leave_the_traces_alone():
    fig = go.Figure(go.Scatter(x=[1], y=[2], line_color="#123456"))
    assert themed(fig, "dark").data[0].line.color == "#123456"
