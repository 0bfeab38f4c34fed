"""Learning-rate schedules against llm.c's figures, and the clock they run on."""
import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

from f16lab.schedule import KINDS, Schedule, plan_changes

TABLE = json.loads((Path(__file__).parent / "golden" / "llmc_training.json").read_text())["schedule"]


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: f"step {row[0]}, f {row[1]}")
def test_llmc_figures(row):
    step, fraction, *rates = row
    for kind, rate in zip(("cosine", "linear", "wsd"), rates):
        ours = Schedule(kind, TABLE["lr"], TABLE["warmup"], TABLE["steps"], fraction).at(step)
        assert ours == pytest.approx(rate, rel=1e-6, abs=5e-11)  # theirs is f32 arithmetic


def test_the_rate_of_step_25_of_100():  # case B49
    schedule = Schedule("cosine", 1e-3, steps=100)
    assert schedule.at(25) == pytest.approx(8.5355e-4, abs=5e-9) and schedule.at(100) == 0.0


def test_the_rate_after_a_resume_at_40():  # case B50
    saved = asdict(Schedule("cosine", 1e-3, steps=100))
    again = Schedule(**json.loads(json.dumps(saved)))
    assert again.at(40) == pytest.approx(6.5451e-4, abs=5e-9)
    assert again.at(80) == pytest.approx(9.549e-5, abs=5e-9) and again.at(39) == pytest.approx(6.6937e-4, abs=5e-9)
    assert plan_changes(saved, again, 40) == ()
    changes = plan_changes(saved, Schedule("cosine", 1e-3, steps=200), 40)
    assert any("steps was 100 and is 200" in line for line in changes) and "step 40" in changes[-1]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
def test_shape(kind, fraction):
    schedule = Schedule(kind, 2.0, warmup=10, steps=100, final_fraction=fraction)
    assert [schedule.at(s) for s in range(10)] == pytest.approx([2.0 * (s + 1) / 10 for s in range(10)])
    after = [schedule.at(s) for s in range(10, 300)]
    assert after[0] == 2.0 and all(a >= b for a, b in zip(after, after[1:])) and all(0 <= x <= 2.0 for x in after)
    assert after[90:] == [pytest.approx(2.0 * fraction)] * 200
    if kind == "wsd": assert all(x == 2.0 for x in after[:70]) and (fraction == 1.0 or after[71] < 2.0)


def test_corners():
    assert Schedule("linear", 1.0, warmup=5, steps=5).at(5) == 1.0 and Schedule("linear", 1.0, warmup=5, steps=5).at(6) == 0.0
    assert Schedule("cosine", 1.0, steps=1).at(0) == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {Schedule("constant", 0.3, steps=10).at(s) for s in (0, 5, 10, 99)} == {0.3}
    with pytest.warns(UserWarning, match="no effect"): Schedule("constant", warmup=3)


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="cosine, linear, constant, wsd.*Did you mean 'cosine'"): Schedule("cosin")
    for bad in (dict(lr=-1.0), dict(lr=math.nan), dict(warmup=-1), dict(steps=0), dict(final_fraction=1.5)):
        with pytest.raises(ValueError): Schedule("linear", **bad)
    with pytest.raises(ValueError, match="from 0"): Schedule().at(-1)
    assert set(KINDS) == {"cosine", "linear", "constant", "wsd"}
