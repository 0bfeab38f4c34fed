"""Following run logs: bounded, honest about NaN, and never surprised by what happens to a file."""
import math
import os
import random
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from long_runs import long_log

from f16lab import viewing
from f16lab.events import EventRecord, Histogram, RunEnded, RunResumed, RunStarted, StepRecord
from f16lab.runfile import BLOCK, Series
from f16lab.runlog import RunLog, RunReader
from f16lab.viewing import Curve, Difference, Following, WatchLog, follow_all, run_logs, thinned

ODD = (math.nan, math.inf, -math.inf)


def series(first: int, values) -> Series:
    values = np.asarray(values, float)
    return Series(np.arange(first, first + len(values)), values)


def pairs(s: Series) -> set[tuple[int, str]]:
    return set(zip(s.steps.tolist(), map(repr, s.values.tolist())))


def fill(path, steps, **changes) -> None:
    with RunLog(path) as log:
        for k in steps: log(StepRecord(k, float(k), **changes))


def look(run: Following):
    """A poll that asks for the status too."""
    run._looked = -1.0
    return run.poll()


# ---------------------------------------------------------------- curves
def extremes_of(s: Series, width: int) -> set[tuple[int, str]]:
    """What must be kept, the slow way."""
    kept = {0, len(s.steps) - 1}
    groups: dict[int, list[int]] = {}
    for i, step in enumerate(s.steps.tolist()): groups.setdefault(step // width, []).append(i)
    for members in groups.values():
        finite = [i for i in members if math.isfinite(s.values[i])]
        odd = [i for i in members if i not in finite]
        if finite: kept |= {min(finite, key=lambda i: s.values[i]), max(finite, key=lambda i: s.values[i])}
        kept |= set(odd[:1])
    return pairs(Series(s.steps[sorted(kept)], s.values[sorted(kept)]))


@pytest.mark.parametrize("seed", range(6))
def test_a_stretch_keeps_its_extremes_and_what_is_not_finite(seed):
    rng = random.Random(seed)
    steps = np.array(sorted(rng.sample(range(500), 200)))
    values = np.array([rng.choice(ODD) if rng.random() < 0.1 else rng.gauss(0, 1) for _ in steps])
    s, width = Series(steps, values), 2 ** rng.randrange(1, 7)
    got, wanted = thinned(s, width), extremes_of(s, width)
    finite = {(step, v) for step, v in wanted if v not in ("nan", "inf", "-inf")}
    assert finite <= pairs(got) and len(got.steps) <= len(wanted) and (np.diff(got.steps) > 0).all()
    assert {step // width for step, v in wanted - finite} == {step // width for step, v in pairs(got) - finite if v in ("nan", "inf", "-inf")}


@pytest.mark.parametrize("chunk", [1, 7, 1000, 100_000])
def test_a_curve_is_bounded_and_keeps_spikes_however_it_grows(chunk):
    values = np.sin(np.arange(100_000 if chunk > 1 else 20_000) / 50)
    for step, v in ((777, 9.0), (12_345, -8.0), (15_000, math.nan), (16_001, math.inf)): values[step] = v
    curve, most = Curve(500), 0
    for first in range(0, len(values), chunk):
        curve.extend(series(first, values[first:first + chunk]))
        most = max(most, len(curve))
    found = dict(zip(curve.series.steps.tolist(), curve.series.values.tolist()))
    assert most <= 500 and found[777] == 9 and found[12_345] == -8 and math.isnan(found[15_000]) and found[16_001] == math.inf
    assert (np.diff(curve.series.steps) > 0).all() and {0, len(values) - 1} <= set(found)


def test_steps_taken_again_replace_what_was_there():
    curve = Curve(100)
    curve.extend(series(0, np.zeros(50)))
    curve.extend(series(30, np.ones(5)))
    assert curve.last == 34 and curve.series.values[30:].tolist() == [1.0] * 5
    curve.cut(0)
    assert len(curve) == 0 and curve.last is None
    curve.extend(series(3, [1.0]))
    assert curve.last == 3


def test_a_curve_needs_room():
    with pytest.raises(ValueError, match="8 points or more"): Curve(7)


# ---------------------------------------------------------------- which logs
def test_labels_are_short_and_distinct(tmp_path):
    for name in ("20260101-101010-f16", "20260101-101011-f16", "mine"): fill(tmp_path / name / "run.sqlite", range(2))
    fill(tmp_path / "two" / "00_f32.sqlite", range(2)), fill(tmp_path / "two" / "01-bf16.sqlite", range(2))
    folders = [tmp_path / n for n in ("20260101-101010-f16", "20260101-101011-f16", "mine", "two")]
    assert list(run_logs(folders)) == ["f16", "f16 (2)", "mine", "f32", "bf16"]
    assert list(run_logs(str(folders[2]))) == ["mine"]
    with RunReader(folders[2] / "run.sqlite") as reader: assert list(run_logs(reader)) == ["mine"]
    assert run_logs({"a": folders[0], "b": folders[3]}) == {
        "a": folders[0] / "run.sqlite", "b f32": folders[3] / "00_f32.sqlite", "b bf16": folders[3] / "01-bf16.sqlite"}
    assert [f.label for f in follow_all(folders[3])] == ["f32", "bf16"]
    assert len(run_logs([folders[2], folders[2]])) == 1, "the same log twice is one"


@pytest.mark.parametrize("make, words", [
    (lambda p: p / "nowhere", "no such folder"), (lambda p: p, "holds no run log"), (lambda p: [], "no run was named"),
    (lambda p: p / "a" / "b.sqlite", "there is no folder"), (lambda p: p / "text.txt", "is no run log")])
def test_nothing_to_follow_is_one_sentence(tmp_path, make, words):
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(ValueError, match=words) as error: run_logs(make(tmp_path))
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- a run's life
def test_from_nothing_to_the_end(tmp_path):
    path = tmp_path / "run.sqlite"
    run = Following("x", path)
    assert not run.poll() and run.reader is None and run.state == "waiting" and "not there yet" in run.problem
    log = RunLog(path)
    assert run.poll().reset and run.step is None and run.problem == "" and run.state == "running"
    log(RunStarted({"run": {"steps": 30}}))
    for k in range(20): log(StepRecord(k, math.nan if k == 4 else 1.0, grad_norm=math.inf if k == 5 else 1.0, skipped=k == 5))
    log.flush()
    fresh = run.poll()
    assert fresh.step == 19 and fresh.cut is None and not fresh.reset and len(fresh.points["loss"].steps) == 20
    assert math.isnan(run.curves["loss"].series.values[4]) and run.curves["grad_norm"].series.values[5] == math.inf
    assert run.curves["skipped"].series.values.sum() == 1
    assert not run.poll(), "nothing new is nothing"
    log(EventRecord(19, "checkpoint", "saved")), log(EventRecord(19, "distance", "{}")), log(RunEnded(20, "finished"))
    log.close()
    fresh = look(run)
    assert fresh.changed and run.state == "finished" and [e[2] for e in fresh.events] == ["checkpoint"], "no data events"
    run.close()


def test_a_resumed_run_has_one_curve(tmp_path):
    path = tmp_path / "run.sqlite"
    fill(path, range(100))
    run = Following("x", path)
    run.poll()
    with RunLog(path) as log:
        log(EventRecord(70, "skip", "old"))
        log.flush()
        assert [e[3] for e in look(run).events][-1:] == ["old"]
        log(RunResumed(60, "resumed after 60 steps"))
        for k in range(60, 80): log(StepRecord(k, -1.0, extra={"new": 1.0}))
        log.flush()
        fresh = look(run)
        steps, values = run.curves["loss"].series
        assert fresh.cut == 60 and (np.diff(steps) == 1).all() and steps[-1] == 79 and values[60] == -1 and values[59] == 59
        assert [e[2] for e in run.events] == ["resume"], "events of the steps that were taken back are gone"
        assert run.curves["new"].series.steps[0] == 60
    again = Following("y", path)
    again.poll()
    assert pairs(again.curves["loss"].series) == pairs(run.curves["loss"].series)


def test_rising_records_also_within_one_batch():
    records = [StepRecord(k, float(i)) for i, k in enumerate((5, 6, 7, 6, 7, 8, 2, 3))]
    assert [(r.step, r.loss) for r in viewing.rising(records)] == [(2, 6.0), (3, 7.0)]


@pytest.mark.parametrize("how", ["replaced", "moved over"])
def test_another_file_of_the_same_name(tmp_path, how):
    path = tmp_path / "run.sqlite"
    fill(path, range(50))
    run = Following("x", path)
    run.poll()
    if how == "replaced":
        for p in tmp_path.glob("run.sqlite*"): p.unlink()
        assert not run.poll() and "any more" in run.problem and run.curves["loss"].last == 49, "what was seen stays"
        fill(path, range(3))
    else:
        fill(tmp_path / "other.sqlite", range(3))
        os.replace(tmp_path / "other.sqlite", path)
    fresh = run.poll()
    assert fresh.reset and run.curves["loss"].last == 2 and run.problem == ""


def test_a_folder_that_goes_away(tmp_path):
    path = tmp_path / "gone" / "run.sqlite"
    fill(path, range(5))
    run = Following("x", path)
    run.poll()
    shutil.rmtree(tmp_path / "gone")
    assert not look(run) and run.curves["loss"].last == 4


@pytest.mark.parametrize("content", [b"", b"junk" * 500, b"SQLite format 3\0" + bytes(2000)])
def test_what_is_no_run_log_is_a_sentence(tmp_path, content):
    path = tmp_path / "run.sqlite"
    path.write_bytes(content)
    run = Following("x", path)
    assert not run.poll() and run.problem and "\n" not in run.problem and run.state == "waiting"
    path.unlink()
    fill(path, range(3))
    assert run.poll().reset and run.step == 2


DAMAGE = ["UPDATE run SET config = '{bad'", "UPDATE run SET config = NULL", "DELETE FROM run", "DROP TABLE event",
          "DELETE FROM shared", "UPDATE step SET body = NULL", "UPDATE step SET body = x'00'", "UPDATE step SET layout = 99",
          "UPDATE event SET text = CAST(x'91' AS TEXT)"]


@pytest.mark.parametrize("sql", DAMAGE)
def test_a_damaged_log_is_a_sentence(tmp_path, sql):
    path = tmp_path / "run.sqlite"
    fill(path, range(3))
    with RunLog(path) as log: log(EventRecord(1, "overflow", "x"))
    with closing(sqlite3.connect(path)) as db, db: db.execute(sql)
    run = Following("x", path)
    assert not run.poll() and run.problem and "\n" not in run.problem and run.reader is None


@pytest.mark.parametrize("config", ["[1]", "3", '"x"', '{"run": 3}', '{"run": null, "data": []}'])
def test_settings_are_tables_whatever_the_log_says(tmp_path, config):
    path = tmp_path / "run.sqlite"
    fill(path, range(3))
    with closing(sqlite3.connect(path)) as db, db: db.execute("UPDATE run SET config = ?", (config,))
    run = Following("x", path)
    assert run.poll().reset and run.settings == {} and run.step == 2


def test_a_killed_run_died(tmp_path):
    path = tmp_path / "run.sqlite"
    log = RunLog(path)
    log(StepRecord(0, 1.0))
    log.flush()
    run = Following("x", path)
    run.poll()
    assert run.state == "running"
    log._lock.close()  # the lock of a process that is gone
    assert look(run).changed and run.state == "died"
    log.close()


def test_paused_is_said(tmp_path):
    run = Following("x", tmp_path / "run.sqlite")
    with RunLog(run.path) as log:
        log(StepRecord(0, 1.0)), log(EventRecord(0, "paused", "before step 1"))
        log.flush()
        look(run)
        assert run.state == "paused"
        log(EventRecord(0, "resumed", "")), log.flush(), look(run)
        assert run.state == "running"


def test_histograms_are_announced_once(tmp_path):
    h = (Histogram("backward", "a", "weight.grad", "f16", 0, (1,)),)
    with RunLog(tmp_path / "run.sqlite") as log:
        log(StepRecord(0, 1.0, histograms=h)), log.flush()
        run = Following("x", tmp_path / "run.sqlite")
        assert run.poll().histogram_step == 0 and run.poll().histogram_step is None
        log(StepRecord(1, 1.0)), log(StepRecord(2, 1.0, histograms=h)), log.flush()
        assert run.poll().histogram_step == 2


# ---------------------------------------------------------------- long runs
def test_a_long_log_is_opened_with_a_bounded_number_of_queries(tmp_path, monkeypatch):
    "Time is not tested; what is read is: a few queries a scalar, whatever the length, and no row of a step but the last."
    asked = {}
    for n in (2, 97):
        path = tmp_path / f"{n}.sqlite"
        long_log(path, n)
        run, queries = Following("x", path), []
        real = RunReader.__init__
        monkeypatch.setattr(RunReader, "__init__", lambda self, p: (real(self, p), self._db.set_trace_callback(queries.append))[0])
        rows, records = [], RunReader.records
        monkeypatch.setattr(RunReader, "records", lambda self, *a: rows.extend(found := records(self, *a)) or found)
        run.poll()
        monkeypatch.undo()
        asked[n] = len(queries)
        assert len(rows) <= BLOCK, "the past comes from summaries"
        assert sum(map(len, run.curves.values())) <= 2000 * len(run.curves)
        assert run.step == 1024 * n - 1 and run.curves["loss"].series.values.max() == 40
    assert asked[97] == asked[2] < 120


def test_catching_up_is_spread_over_polls(tmp_path, monkeypatch):
    monkeypatch.setattr(viewing, "AT_ONCE", 50)
    run = Following("x", tmp_path / "run.sqlite")
    with RunLog(run.path) as log:
        log.flush(), run.poll()
        for k in range(120): log(StepRecord(k, 1.0))
        log.flush()
        assert [len(run.poll().points.get("loss", series(0, [])).steps) for _ in range(4)] == [50, 50, 20, 0]


# ---------------------------------------------------------------- differences
def test_differences_are_of_every_common_step(tmp_path, monkeypatch):
    monkeypatch.setattr(viewing, "_STRETCH", 256)
    a, b = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    fill(a, range(1000))
    with RunLog(b) as log:
        for k in range(0, 1000, 2): log(StepRecord(k, k + (5.0 if k == 500 else math.nan if k == 600 else 0.0)))
    one, two = Following("a", a), Following("b", b)
    one.poll(), two.poll()
    gap = Difference(one, two, "loss")
    while len(gap.poll(1).steps): pass
    found = dict(zip(gap.curve.series.steps.tolist(), gap.curve.series.values.tolist()))
    assert len(found) == 500 and found[500] == 5 and math.isnan(found[600]) and sum(v for v in found.values() if v == v) == 5
    gap.cut(500)
    assert gap.curve.last == 498 and gap.poll(9).steps[0] == 500


def test_a_difference_waits_for_both(tmp_path):
    fill(tmp_path / "a.sqlite", range(10))
    one, two = Following("a", tmp_path / "a.sqlite"), Following("b", tmp_path / "b.sqlite")
    one.poll(), two.poll()
    gap = Difference(one, two, "loss")
    assert not len(gap.poll().steps)
    fill(two.path, range(4))
    two.poll()
    assert gap.poll().steps.tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- a watch
def test_a_watch_becomes_a_log(tmp_path):
    import torch

    from f16lab.watching import watch
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as w:
        log = WatchLog(w)
        run = Following("w", log.path)
        for k in range(2):
            log.note(loss=7.0 + k)
            model(torch.ones(3, 4)).sum().backward(), optimizer.step()
        w.due = 0.0
        model(torch.ones(3, 4)).sum().backward(), optimizer.step()
    log.close()
    run.poll()
    assert run.settings == {"watch": True} and run.histogram_step is not None
    assert 8.0 in run.curves["loss"].series.values and w.take().steps == 3, "the watch's own taker misses nothing"
    assert {h.layer for h in run.reader.histograms(run.histogram_step)} == {"0"}
    run.close()


@pytest.mark.parametrize("what", [3, None, object(), [None], {"a": 4.5}], ids=lambda what: type(what).__name__)
def test_what_is_no_run_is_told_in_a_sentence(what):
    with pytest.raises(ValueError, match="is no run: give a folder"): run_logs(what)
