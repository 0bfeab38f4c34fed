"""The run log: every bit comes back, also from a run that is alive, was killed, or was resumed."""
import json
import math
import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing

import numpy as np
import pytest

from f16lab import runfile, runlog
from f16lab.events import (Bus, CastRow, EvalRecord, EventRecord, Histogram, HistogramRecord, RunEnded, RunResumed, RunStarted,
                           SampleRecord, StepRecord, TensorStat)
from f16lab.packing import SCALARS, from_json
from f16lab.runfile import (BLOCK, FORMAT, RunLogError, Series, Store, WRITERS, decimate, extremes, is_live,
                            open_for_writing, take_lock)
from f16lab.runlog import COMMANDS, Command, RunLog, RunReader, send_command

ODD = [math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324, 1e300]


def bits(values) -> list[bytes]: return [struct.pack('<d', v) for v in values]


def refuse(word): raise ValueError(f'{word} is not JSON')


def casts(count: int, rows: int = 20) -> tuple[CastRow, ...]:
    return tuple(CastRow('train', f'blocks.{i}.attn', 'linear', 'w', (64, 192), 'f32', 'f16', 'forward', 'operand',
                         count + i % 3, 24576 * count) for i in range(rows))


def histogram(rng: random.Random, layer: str, bins: int = 64, elements: int = 4096) -> Histogram:
    """Binades of normal numbers: what a layer's output looks like."""
    counts = [0] * bins
    for _ in range(elements): counts[math.frexp(rng.gauss(0, 0.02))[1] + bins - 5] += 1
    return Histogram('train', layer, 'output', 'f16', 4 - bins, tuple(counts), zeros=rng.randrange(9),
                     subnormals=rng.randrange(99), amax=rng.random())


def full_step(step: int, rng: random.Random) -> StepRecord:
    stats = tuple(TensorStat(f'w{i}', rng.random(), rng.random(), math.nan, 0.0, i, 0) for i in range(5))
    return StepRecord(step, rng.choice(ODD), 2048, rng.choice(ODD), 1e-3, 65536.0, 1.0, step % 2 == 1,
                      'inf' * (step % 2), 0.01, 2e5, casts(1), stats, {f'x{i}': v for i, v in enumerate(ODD)},
                      tuple(histogram(rng, f'l{i}', elements=64) for i in range(3)))


def fill(path, steps, **changes) -> None:
    with RunLog(path) as log:
        for step in steps: log(StepRecord(step, loss=float(step), **changes))


def run_python(program: str, *args, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, '-c', program, *map(str, args)], **kwargs)


# ---------------------------------------------------------------- every record comes back

def test_every_record_comes_back(tmp_path):
    rng = random.Random(1)
    records = [full_step(step, rng) for step in range(40)]
    with RunLog(tmp_path / 'a.sqlite') as log:
        log(RunStarted({'profile': 'f16', 'train': {'clip': math.inf, 'name': 'NaN'}}, {'torch': '2'}))
        for record in records: log(record)
        for step, loss in enumerate(ODD): log(EvalRecord(step, loss, 2 ** 40))
        log(SampleRecord(3, 'def f(\n')), log(EventRecord(4, 'skip', 'inf')), log(EventRecord(4, 'scale', '2^15'))
        log(RunEnded(39, 'finished', 'ok'))
    with RunReader(tmp_path / 'a.sqlite') as reader:
        assert [repr(reader.record(r.step)) for r in records] == [repr(r) for r in records]
        columns = reader.steps()
        assert {len(column) for column in columns.values()} == {40}
        for name in (*SCALARS, *records[0].extra):
            want = [getattr(r, name) if name in SCALARS else r.extra[name] for r in records]
            assert bits(columns[name]) == bits(want)
        assert bits(reader.evals()['loss']) == bits(ODD) and set(reader.evals()['tokens']) == {2 ** 40}
        assert reader.samples() == {'step': [3], 'text': ['def f(\n']}
        events = reader.events()
        assert (events['step'], events['kind'], events['text']) == ([4, 4], ['skip', 'scale'], ['inf', '2^15'])
        assert reader.events(since=events['seq'][0])['kind'] == ['scale']
        session, = reader.sessions()
        assert session['config'] == {'profile': 'f16', 'train': {'clip': math.inf, 'name': 'NaN'}}
        assert (session['versions'], session['status'], session['message']) == ({'torch': '2'}, 'finished', 'ok')
        assert reader.names() == [*SCALARS, *records[0].extra]


def test_columns_may_differ_from_step_to_step(tmp_path):
    with RunLog(tmp_path / 'a') as log:
        for step, extra in enumerate(({'a': 1.0}, {'b': 2.0, 'a': 3.0}, {})): log(StepRecord(step, 5.0, extra=extra))
    with RunReader(tmp_path / 'a') as reader:
        columns = reader.steps()
        assert repr(columns['a']) == '[1.0, 3.0, nan]' and repr(columns['b']) == '[nan, 2.0, nan]'
        assert reader.series('b').steps.tolist() == [1] and reader.series('a').values.tolist() == [1.0, 3.0]
        assert reader.names() == [*SCALARS, 'a', 'b'] and reader.record(1).extra == {'b': 2.0, 'a': 3.0}


def test_histograms_from_probes_join_those_of_the_step(tmp_path):
    h = [Histogram('train', f'l{i}', 'output', 'f16', -3, (i, 1)) for i in range(4)]
    with RunLog(tmp_path / 'a') as log:
        log(HistogramRecord(7, (h[0],)))  # before its step
        log(StepRecord(7, 5.0, histograms=(h[1],)))
        log(HistogramRecord(7, (h[2],)))  # after it
        log(HistogramRecord(8, (h[3],)))
    with RunReader(tmp_path / 'a') as reader:
        assert reader.histograms(7) == tuple(h[:3]) and reader.histograms(8) == (h[3],) and reader.histograms(9) == ()
        assert reader.histogram_steps() == [7, 8]


# ---------------------------------------------------------------- size

def size_per_step(path, records) -> float:
    with RunLog(path) as log:
        for record in records: log(record)
    return path.stat().st_size / len(records)


def test_a_step_of_100_scalars_and_60_histograms_takes_6_kB_or_less(tmp_path):
    rng = random.Random(7)
    layers = [histogram(rng, f'blocks.{i // 5}.part{i % 5}') for i in range(120)]

    def record(step):  # scalars are full doubles, histograms differ from step to step
        return StepRecord(step, rng.random(), 2048, rng.random(), casts=casts(4, rows=60),
                          extra={f'scalar{i}': rng.gauss(0, 1) for i in range(100 - len(SCALARS))},
                          histograms=tuple(layers[(step * 7 + i) % 120] for i in range(60)))

    size = size_per_step(tmp_path / 'a', [record(step) for step in range(300)])
    print(f'{size:.0f} bytes a step')
    assert size <= 6000


def test_equal_cast_tables_are_stored_once(tmp_path):
    plain = size_per_step(tmp_path / 'a', [StepRecord(step, 5.0) for step in range(500)])
    with_casts = size_per_step(tmp_path / 'b', [StepRecord(step, 5.0, casts=casts(4, rows=200)) for step in range(500)])
    assert with_casts - plain < 40
    with RunReader(tmp_path / 'b') as reader:
        assert reader.casts(0) == reader.casts(499) == casts(4, rows=200)
        assert reader._db.execute("SELECT count(*) FROM shared WHERE kind LIKE 'cast%'").fetchone() == (2,)


def test_cast_tables_that_change_keep_their_names_once(tmp_path):
    with RunLog(tmp_path / 'a') as log:
        for step in range(1500): log(StepRecord(step, 5.0, casts=casts(1 + step)))
    with RunReader(tmp_path / 'a') as reader:
        assert all(reader.casts(step) == casts(1 + step) for step in (0, 600, 1499))
        tables = dict(reader._db.execute('SELECT kind, count(*) FROM shared GROUP BY kind').fetchall())
        assert tables['casts'] == 1500 and tables['cast layout'] <= 4
        assert reader.casts(77) == casts(78)


# ---------------------------------------------------------------- resumed runs

def test_the_last_write_of_a_step_counts(tmp_path):
    fill(tmp_path / 'a', range(50))
    with RunReader(tmp_path / 'a') as reader:
        cursor, first = reader.follow()
        assert first['step'] == list(range(50))
        assert reader.follow(cursor)[0] == cursor and not reader.follow(cursor)[1]['step']
        with RunLog(tmp_path / 'a') as log:
            for step in range(40, 45): log(StepRecord(step, loss=-1.0))
            log(EvalRecord(3, 1.0)), log(EvalRecord(3, 2.0))
        assert reader.steps()['step'] == list(range(50))
        assert reader.steps(38, 46)['loss'] == [38.0, 39.0, -1.0, -1.0, -1.0, -1.0, -1.0, 45.0, 46.0]
        assert reader.follow(cursor)[1]['step'] == [40, 41, 42, 43, 44]  # a view that looked before hears of them
        assert reader.evals()['loss'] == [2.0]
        assert [s['session'] for s in reader.sessions()] == [1, 2] and reader.status().step == 44


def test_follow_in_pieces(tmp_path):
    fill(tmp_path / 'a', range(100))
    with RunReader(tmp_path / 'a') as reader:
        cursor, seen = 0, []
        while True:
            cursor, new = reader.follow(cursor, limit=7)
            assert len(new['step']) <= 7
            if not new['step']: break
            seen += new['step']
        assert seen == list(range(100))


def test_relogging_a_summarised_block_is_seen_by_series(tmp_path):
    fill(tmp_path / 'a', range(40 * BLOCK))
    with RunLog(tmp_path / 'a') as log:
        for step in range(5 * BLOCK + 7, 7 * BLOCK): log(StepRecord(step, loss=1e6 + step))
    with RunReader(tmp_path / 'a') as reader:
        curve = reader.series('loss', max_points=100)
        assert curve.values.max() == 1e6 + 7 * BLOCK - 1 and len(curve.steps) <= 100
        middle = reader.series('loss', max_points=100, first=6 * BLOCK, last=6 * BLOCK + 50)
        assert middle.values.tolist() == [1e6 + step for step in middle.steps]


# ---------------------------------------------------------------- long runs

def spiky(n: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    out = rng.normal(size=n)
    out[n // 3], out[n // 2], out[n // 5: n // 5 + 9] = 1e3, -1e3, math.nan
    out[n - 5] = math.inf
    return out


def test_series_of_a_long_run_keeps_extremes_and_reads_few_rows(tmp_path, monkeypatch):
    n, curve = 60 * BLOCK + 100, spiky(60 * BLOCK + 100)
    with RunLog(tmp_path / 'a') as log:
        for step in range(n): log(StepRecord(step, loss=curve[step]))
    read = []
    monkeypatch.setattr(runlog, 'step_scalars', lambda body, f=runlog.step_scalars: read.append(1) or f(body))
    with RunReader(tmp_path / 'a') as reader:
        for points in (50, 300, 2000):
            read.clear()
            got = reader.series('loss', max_points=points)
            finite = got.values[np.isfinite(got.values)]
            assert len(got.steps) <= points and (np.diff(got.steps) > 0).all()
            assert (finite.max(), finite.min()) == (1e3, -1e3)
            assert np.isnan(got.values).any() and np.isinf(got.values).any()
            assert curve[got.steps].tobytes() == got.values.tobytes()
            assert len(got.steps) >= points // 3 and len(read) <= 2 * BLOCK
        part = reader.series('loss', max_points=100, first=1000, last=1050)
        assert part.steps.tolist() == list(range(1000, 1051)) and part.values.tobytes() == curve[1000:1051].tobytes()
        part = reader.series('loss', max_points=100, first=1000, last=9000)
        assert np.nanmax(part.values) == curve[1000:9001][np.isfinite(curve[1000:9001])].max()
        assert 1000 <= part.steps.min() and part.steps.max() <= 9000


@pytest.mark.parametrize('blocks, first, last, gaps', [
    ([], 3, 9, [(3, 9)]), ([0], 0, BLOCK - 1, []), ([0, 1], 0, 2 * BLOCK, [(2 * BLOCK, 2 * BLOCK)]),
    ([1, 3], 5, 5 * BLOCK, [(5, BLOCK - 1), (2 * BLOCK, 3 * BLOCK - 1), (4 * BLOCK, 5 * BLOCK)])])
def test_gaps_between_blocks(blocks, first, last, gaps):
    assert list(runlog._gaps(blocks, first, last)) == gaps


def test_series_of_a_scalar_that_few_steps_have(tmp_path, monkeypatch):
    with RunLog(tmp_path / 'a') as log:
        for step in range(20 * BLOCK):
            log(StepRecord(step, 5.0, extra={'rare': float(step)} if step % 1000 == 5 else {}))
    ranges = []  # stretches of the run that are read row by row
    monkeypatch.setattr(runlog, '_raw_series', lambda *args, f=runlog._raw_series: ranges.append(args[2:]) or f(*args))
    with RunReader(tmp_path / 'a') as reader:
        for points in (8, 2000):  # from extremes, from stretches
            got = reader.series('rare', max_points=points)
            assert got.steps.tolist() == got.values.tolist() == [5, 1005, 2005, 3005, 4005, 5005]
    assert {first for first, _ in ranges} == {19 * BLOCK}  # the block that is not complete


def test_series_of_a_run_that_logs_every_thousandth_step(tmp_path):
    with RunLog(tmp_path / 'a') as log:
        for step in range(0, 600_000, 1000): log(StepRecord(step, float(step)))
    with RunReader(tmp_path / 'a') as reader:
        got = reader.series('loss', max_points=100)
        assert len(got.steps) <= 100 and got.steps[[0, -1]].tolist() == [0, 599_000] and (got.values == got.steps).all()
        assert reader.series('loss', 100, 500_000, 520_000).steps.tolist() == list(range(500_000, 520_001, 1000))


def test_following_costs_the_same_at_any_length(tmp_path):
    """Work is counted in instructions of the database's machine, not in seconds."""
    def work(reader, call) -> int:
        count = [0]
        reader._db.set_progress_handler(lambda: count.__setitem__(0, count[0] + 1), 1)
        call()
        reader._db.set_progress_handler(None, 0)
        return count[0]

    costs = []
    for n in (1000, 8000):
        fill(tmp_path / str(n), range(n))
        with RunReader(tmp_path / str(n)) as reader:
            cursor = reader.follow(limit=10 ** 9)[0]
            costs.append([work(reader, lambda: reader.follow(cursor - 20)), work(reader, lambda: reader.record(n // 2)),
                          work(reader, reader.status)])
    assert all(late <= 2 * early for early, late in zip(*costs)), costs


def test_extremes_and_decimate():
    values = np.array([1.0, -math.inf, 3.0, math.nan, -2.0])
    assert extremes(values) == [1, 2, 4] and extremes(np.array([math.nan, math.nan])) == [0]
    assert extremes(np.array([2.0])) == [0] and extremes(np.array([])) == []
    short = Series(np.arange(5), values)
    assert decimate(short, 8) is short
    with pytest.raises(ValueError, match='8 points or more'): decimate(short, 7)


@pytest.mark.parametrize('n', [9, 100, 2000, 12345])
@pytest.mark.parametrize('points', [8, 9, 100, 2000])
def test_decimate_is_bounded_and_keeps_what_matters(n, points):
    series = Series(np.arange(n) * 3, spiky(n))
    got = decimate(series, points)
    assert len(got.steps) <= points and got.steps[0] == 0 and got.steps[-1] == 3 * (n - 1)
    finite = series.values[np.isfinite(series.values)]
    assert np.nanmax(got.values[np.isfinite(got.values)]) == finite.max()
    assert got.values[np.isfinite(got.values)].min() == finite.min()
    assert not np.isfinite(got.values).all()


def test_histograms_thin_out_with_age(tmp_path):
    db = open_for_writing(tmp_path / 'a')
    store, h = Store(db, 1, keep=64), Histogram('train', 'l', 'output', 'f16', 0, (1,))
    db.execute('BEGIN')
    for step in range(6000): WRITERS[HistogramRecord](store, HistogramRecord(step * 10, (h,)))  # every tenth step
    db.execute('COMMIT')
    left = [step // 10 for step, in db.execute('SELECT step FROM histogram ORDER BY step')]
    assert left[-64:] == list(range(6000 - 64, 6000))
    for k in range(1, 7):  # of each doubling of age about half of keep is left, evenly spread groups of eight
        young, old = 6000 - 64 * 2 ** (k - 1), 6000 - 64 * 2 ** k
        part = [step for step in left if old + 64 <= step < young - 64]
        assert set(np.diff(part)) <= {1, 8 * 2 ** k - 7}, (k, part)
    assert {step % 8 for step in left[:64]} == set(range(8))  # tensors that take turns all keep a past
    assert len(left) <= 64 + 32 * 9
    db.close()


# ---------------------------------------------------------------- files that are something else

def test_wrong_files(tmp_path):
    (tmp_path / 'empty').touch()
    (tmp_path / 'text').write_text('{"loss": 1}\n' * 100)
    other = sqlite3.connect(tmp_path / 'other')
    other.execute('CREATE TABLE step(step, loss)')
    other.close()
    expected = {'missing': 'there is no run log at', 'empty': 'is empty: no run was logged', 'text': 'is not a run log',
                'other': 'database of another program', '.': 'there is no run log at'}
    for name, words in expected.items():
        with pytest.raises(RunLogError, match=words): RunReader(tmp_path / name)
    assert not (tmp_path / 'missing').exists()
    for name in ('text', 'other'):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(RunLogError): RunLog(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
        take_lock(tmp_path / name).close()  # the refusal left no lock behind
    fill(tmp_path / 'empty', range(3))  # an empty file may become a log
    with RunReader(tmp_path / 'empty') as reader: assert reader.steps()['step'] == [0, 1, 2]


@pytest.mark.parametrize('version, words', [(FORMAT + 6, 'format 7, this f16lab reads format 1.*or a later one'),
                                            (0, 'format 0, this f16lab reads')])
def test_unknown_format(tmp_path, version, words):
    fill(tmp_path / 'a', range(3))
    db = sqlite3.connect(tmp_path / 'a')
    db.execute(f'PRAGMA user_version = {version}')
    db.close()
    for kind in (RunReader, RunLog):
        with pytest.raises(RunLogError, match=words): kind(tmp_path / 'a')


def test_a_cut_file_is_an_error_in_words(tmp_path):
    fill(tmp_path / 'a', range(2000))
    data = (tmp_path / 'a').read_bytes()
    (tmp_path / 'b').write_bytes(data[:60])
    with pytest.raises(RunLogError, match='not a run log'): RunReader(tmp_path / 'b')


def test_paths_with_odd_characters(tmp_path):
    path = tmp_path / 'a folder?' / 'run #1 100%.sqlite'
    fill(str(path), range(2))
    with RunReader(str(path)) as reader: assert reader.steps()['step'] == [0, 1]


def test_reading_where_nothing_may_be_written(tmp_path, monkeypatch):
    fill(tmp_path / 'a', range(3))
    monkeypatch.setattr(os, 'access', lambda path, mode: mode != os.W_OK)
    with RunReader(tmp_path / 'a') as reader: assert reader.steps()['step'] == [0, 1, 2]
    assert not (tmp_path / 'a-wal').exists()


def test_readers_cannot_write(tmp_path):
    fill(tmp_path / 'a', range(3))
    with RunReader(tmp_path / 'a') as reader, pytest.raises(sqlite3.OperationalError):
        reader._db.execute('DELETE FROM step')


def test_unknown_step_and_scalar(tmp_path):
    fill(tmp_path / 'a', range(2, 5))
    with RunReader(tmp_path / 'a') as reader:
        with pytest.raises(RunLogError, match='step 9 is not in .*; it has steps 2 … 4'): reader.record(9)
        with pytest.raises(RunLogError, match="no scalar 'los'.*'loss'"): reader.series('los')
    RunLog(tmp_path / 'new').close()
    with RunReader(tmp_path / 'new') as reader:
        assert reader.steps()['loss'] == [] and reader.names() == [] and reader.status().step is None
        with pytest.raises(RunLogError, match='no steps yet'): reader.record(0)


# ---------------------------------------------------------------- strict JSON

def test_json_is_strict_and_comes_back(tmp_path):
    rng = random.Random(2)
    records = [full_step(step, rng) for step in range(12)]
    with RunLog(tmp_path / 'a') as log:
        log(RunStarted({'clip': math.inf}))
        for record in records: log(record)
        log(EvalRecord(1, math.nan, 5)), log(SampleRecord(1, 'NaN')), log(EventRecord(1, 'note', '"é\n'))
    with RunReader(tmp_path / 'a') as reader: short, full = reader.to_json(), reader.to_json(full=True)
    for text in (short, full):
        json.loads(text, parse_constant=refuse)
        for line in text[1:-1].split(',\n'): json.loads(line, parse_constant=refuse)
        rows = from_json(text)
        steps = [row for row in rows if row['record'] == 'step']
        assert bits(row['loss'] for row in steps) == bits(r.loss for r in records)
        assert [bits(row['extra'].values()) for row in steps] == [bits(r.extra.values()) for r in records]
        by_kind = {row['record']: row for row in rows}
        assert by_kind['run']['config'] == {'clip': math.inf} and by_kind['sample']['text'] == 'NaN'
        assert math.isnan(by_kind['eval']['loss']) and by_kind['event']['text'] == '"é\n'
    assert 'casts' not in from_json(short)[-1]
    assert from_json(full)[-1]['casts'][1]['layer'] == 'blocks.1.attn'
    assert len(from_json(full)[-1]['histograms']) == 3


# ---------------------------------------------------------------- live, killed, left behind

WRITE = '''
import sys, time
from f16lab.events import StepRecord, CastRow
from f16lab.runlog import RunLog
log = RunLog(sys.argv[1])
print('ready', flush=True)
step = 0
while True:
    log(StepRecord(step, loss=float(step), extra={'twice': 2.0 * step}))
    step += 1
    if step % 5 == 0: time.sleep(0.002)
'''


def test_reading_a_live_run_of_another_process_then_kill_and_resume(tmp_path):
    path = tmp_path / 'a'
    writer = run_python(WRITE, path, stdout=subprocess.PIPE)
    try:
        writer.stdout.readline()
        with RunReader(path) as reader:
            cursor, seen, deadline = 0, [], time.time() + 60
            while len(seen) < 400 and time.time() < deadline:
                cursor, new = reader.follow(cursor)
                seen += new['step']
                assert new['twice' if new['step'] else 'loss'] == [2.0 * step for step in new['step']]
                assert (reader.status().status, reader.status().live) == ('running', True)
                time.sleep(0.01)
            assert seen == list(range(len(seen))) and len(seen) >= 400
            with pytest.raises(RunLogError, match='a run that is alive'): RunLog(path)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    with RunReader(path) as reader:
        steps = reader.steps()['step']
        assert steps == list(range(len(steps))) and len(steps) >= len(seen)
        assert (reader.status().status, reader.status().live) == ('died', False)
        assert reader._db.execute('PRAGMA integrity_check').fetchone() == ('ok',)
    fill(path, range(len(steps) - 20, len(steps) + 20))
    with RunReader(path) as reader:
        assert reader.steps()['step'] == list(range(len(steps) + 20))
        assert (reader.status().status, reader.status().session) == ('closed', 2)


@pytest.mark.parametrize('seed', range(4))
def test_killed_at_a_random_moment(tmp_path, seed):
    """Whatever the moment, a gapless prefix of the run is in the file and the file is whole."""
    writer = run_python(WRITE, tmp_path / 'a', stdout=subprocess.PIPE)
    writer.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.0, 0.6))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with RunReader(tmp_path / 'a') as reader:
        columns = reader.steps()
        assert columns['step'] == list(range(len(columns['step'])))
        assert columns['loss'] == [float(step) for step in columns['step']]
        assert reader._db.execute('PRAGMA integrity_check').fetchone() == ('ok',)
        assert reader.status().status == 'died'


def test_a_program_that_forgets_to_close_loses_nothing(tmp_path):
    program = '''
import sys
from f16lab.events import StepRecord
from f16lab.runlog import RunLog
log = RunLog(sys.argv[1])
for step in range(7): log(StepRecord(step, loss=5.0))
'''
    assert run_python(program, tmp_path / 'a').wait() == 0
    with RunReader(tmp_path / 'a') as reader:
        assert reader.steps()['step'] == list(range(7)) and reader.status().status == 'closed'


def test_a_second_writer_in_the_same_process_is_refused(tmp_path):
    log = RunLog(tmp_path / 'a')
    assert is_live(tmp_path / 'a') and not is_live(tmp_path / 'b')
    with pytest.raises(RunLogError, match='a run that is alive'): RunLog(tmp_path / 'a')
    log.close(), log.close()
    assert not is_live(tmp_path / 'a')
    RunLog(tmp_path / 'a').close()
    assert not any(thread.name == 'runlog' for thread in threading.enumerate())


def test_status_words(tmp_path):
    path = tmp_path / 'a'
    log = RunLog(path)
    reader = RunReader(path)
    assert (reader.status().status, reader.status().live, reader.status().ended) == ('running', True, None)
    log.close()
    assert (reader.status().status, reader.status().live) == ('closed', False) and reader.status().ended is not None
    with RunLog(path) as log: log(RunEnded(3, 'stopped', 'by the user'))
    assert (reader.status().status, reader.status().message, reader.status().session) == ('stopped', 'by the user', 2)
    reader.close()


# ---------------------------------------------------------------- commits and trouble

def test_commits_after_ten_steps_or_a_while(tmp_path):
    log = RunLog(tmp_path / 'a', commit_seconds=3600.0)
    with RunReader(tmp_path / 'a') as reader:
        for step in range(9): log(StepRecord(step, 5.0))
        time.sleep(0.2)
        assert reader.steps()['step'] == []
        log(StepRecord(9, 5.0))
        deadline = time.time() + 30
        while not reader.steps()['step'] and time.time() < deadline: time.sleep(0.01)
        assert reader.steps()['step'] == list(range(10))
    log.close()
    with RunLog(tmp_path / 'b', commit_seconds=0.05) as log, RunReader(tmp_path / 'b') as reader:
        log(StepRecord(0, 5.0))
        deadline = time.time() + 30
        while not reader.steps()['step'] and time.time() < deadline: time.sleep(0.01)
        assert reader.steps()['step'] == [0]


def test_bad_records_are_counted_and_their_neighbours_written(tmp_path):
    bad = [StepRecord(1, loss='five'), StepRecord('two', 5.0), StepRecord(3, 5.0, extra={'loss': 1.0}),
           StepRecord(4, None), EvalRecord(5, 'x'), StepRecord(6, 5.0, casts=(None,))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        with RunLog(tmp_path / 'a') as log:
            log(StepRecord(0, 5.0))
            for record in bad: log(record)
            log(StepRecord(9, 4.0))
            log.flush()
            assert log.lost == len(bad)
    assert len([w for w in caught if 'could not write' in str(w.message)]) == 1
    with RunReader(tmp_path / 'a') as reader: assert reader.steps()['loss'] == [5.0, 4.0]


def test_a_full_disk_is_survived(tmp_path):
    """SQLite's own limit on the number of pages stands in for the disk."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        log = RunLog(tmp_path / 'a')
        for step in range(20): log(StepRecord(step, 5.0))
        log.flush()
        pages, = log._db.execute('PRAGMA page_count').fetchone()
        log._db.execute(f'PRAGMA max_page_count = {pages + 2}')
        for step in range(20, 1000):
            log(StepRecord(step, 5.0, extra={f'x{step}-{i}': random.random() for i in range(40)}))
        log.flush()
        lost = log.lost
        log._db.execute('PRAGMA max_page_count = 1000000')
        for step in range(1000, 1010): log(StepRecord(step, 5.0))
        log.close()
    assert lost >= 900 and log.lost == lost
    assert len([w for w in caught if 'full' in str(w.message)]) == 1
    with RunReader(tmp_path / 'a') as reader:
        steps = reader.steps()['step']
        assert steps[:20] == list(range(20)) and steps[-10:] == list(range(1000, 1010)) and len(steps) == 1010 - lost
        assert reader._db.execute('PRAGMA integrity_check').fetchone() == ('ok',)


def test_a_batch_that_fails_is_undone_as_a_whole_and_the_next_one_is_written(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with RunLog(tmp_path / 'a') as log:
            log(StepRecord(0, 5.0))
            log.flush()
            # a scalar, a cast table and a histogram that the file has not seen: all their shared rows are undone
            news = dict(extra={'new': 1.0}, casts=casts(9), histograms=(Histogram('a', 'b', 'c', 'f16', 0, (1,)),))
            log._db.execute("CREATE TEMP TRIGGER trouble BEFORE INSERT ON event BEGIN SELECT RAISE(FAIL, 'trouble'); END")
            for record in (StepRecord(1, 4.0, **news), EventRecord(1, 'note'), StepRecord(2, 3.0)): log(record)
            log.flush()
            assert log.lost == 3
            log._db.execute('DROP TRIGGER trouble')
            log(StepRecord(3, 2.0, **news))
    with RunReader(tmp_path / 'a') as reader:
        assert reader.steps()['step'] == [0, 3] and reader.names() == [*SCALARS, 'new']
        assert repr(reader.record(3)) == repr(StepRecord(3, 2.0, **news))


def test_a_locked_file_delays_and_loses_nothing(tmp_path):
    with RunLog(tmp_path / 'a', commit_seconds=0.01) as log:
        other = sqlite3.connect(tmp_path / 'a', isolation_level=None)
        other.execute('BEGIN IMMEDIATE')
        for step in range(4000): log(StepRecord(step, 5.0))
        other.execute('ROLLBACK')
        for step in range(4000, 5000): log(StepRecord(step, 5.0))
        log.flush()
        assert log.lost == 0
        other.close()
    with RunReader(tmp_path / 'a') as reader: assert reader.steps()['step'] == list(range(5000))


def test_on_the_bus(tmp_path):
    bus = Bus()
    with RunLog(tmp_path / 'a') as log:
        leave = bus.subscribe(log)
        bus.emit(StepRecord(0, 5.0))
        with pytest.warns(UserWarning, match='RunLog failed.*a run log takes StepRecord'): bus.emit('a word')
        leave()
    bus.subscribe(log)
    with pytest.warns(UserWarning, match='is closed'): bus.emit(StepRecord(1, 5.0))
    with RunReader(tmp_path / 'a') as reader: assert reader.steps()['step'] == [0]


def test_many_threads_may_emit(tmp_path):
    with RunLog(tmp_path / 'a') as log:
        def emit(i): [log(StepRecord(8 * s + i, 5.0)) for s in range(100)]
        threads = [threading.Thread(target=emit, args=(i,)) for i in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
    with RunReader(tmp_path / 'a') as reader: assert reader.steps()['step'] == list(range(800))


# ---------------------------------------------------------------- commands

def test_commands_arrive_once_in_order(tmp_path):
    path = tmp_path / 'a'
    with RunLog(path) as log, RunReader(path) as reader:
        assert log.commands() == ()
        values = [None, 3, 0.5, math.nan, 'text', [1, {'lr': 1e-4}], {'optimizer.lr': -0.0}, True]
        numbers = [reader.send(kind, value) for kind, value in zip(COMMANDS, values)]
        assert [c.state for c in reader.commands()] == ['waiting'] * 8
        got = log.commands()
        assert [c.id for c in got] == numbers == sorted(numbers)
        assert [(c.kind, repr(c.value)) for c in got] == [(k, repr(v)) for k, v in zip(COMMANDS, values)]
        assert log.commands() == ()
        log.flush()
        assert [c.state for c in reader.commands()] == ['taken'] * 8
        send_command(str(path), 'stop')
        assert [c.kind for c in log.commands()] == ['stop']


def test_commands_to_nobody(tmp_path):
    path = tmp_path / 'a'
    with pytest.raises(RunLogError, match='nobody would read'): send_command(path, 'stop')
    with RunLog(path), pytest.raises(ValueError, match="unknown command 'halt'; commands are pause, resume"):
        send_command(path, 'halt')
    with RunReader(path) as reader, pytest.raises(RunLogError, match='nobody would read'): reader.send('stop')
    log = RunLog(path)
    send_command(path, 'stop')  # never read: the run ends first
    log.close()
    with RunLog(path) as log, RunReader(path) as reader:
        assert log.commands() == () and [c.state for c in reader.commands()] == ['dropped']
        assert log.dropped == tuple(reader.commands())
        number = reader.send('pause')
        assert log.commands() == (Command(number, 'pause', None, 'taken'),)


def test_a_command_that_comes_in_the_moment_of_the_end_is_refused(tmp_path, monkeypatch):
    path = tmp_path / 'a'
    log = RunLog(path)
    monkeypatch.setattr(runlog, 'connect', lambda *args: (log.close(), runfile.connect(*args))[1])
    with pytest.raises(RunLogError, match='has just ended'): send_command(path, 'stop')


def test_a_log_that_another_program_holds_is_not_called_something_else(tmp_path, monkeypatch):
    RunLog(path := tmp_path / 'a').close()
    real = runfile.connect
    monkeypatch.setattr(runfile, "connect", lambda path, mode: real(path, mode, 0.0))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute('PRAGMA journal_mode = DELETE')
        db.execute('BEGIN EXCLUSIVE')
        with pytest.raises(RunLogError, match='in the hands of another program'): RunReader(path)


def test_a_command_from_another_process_while_the_log_is_busy(tmp_path):
    path, stop = tmp_path / 'a', threading.Event()
    sender = ('import sys\nfrom f16lab.runlog import send_command\n'
              'for i in range(5): send_command(sys.argv[1], "set", {"i": i})\nsend_command(sys.argv[1], "stop")')
    with RunLog(path, commit_seconds=0.01) as log:
        process, step, got = run_python(sender, path), 0, []
        deadline = time.time() + 60
        while not stop.is_set() and time.time() < deadline:
            log(StepRecord(step, 5.0))
            step += 1
            got += log.commands()
            if got and got[-1].kind == 'stop': stop.set()
            if step % 10 == 0: time.sleep(0.001)
        assert process.wait() == 0
    assert [c.value for c in got[:-1]] == [{'i': i} for i in range(5)] and got[-1].kind == 'stop'


# ---------------------------------------------------------------- going on from a checkpoint

def test_what_was_synced_is_in_the_file_itself(tmp_path):
    """Not only in the journal beside it, which may be lost in a power cut."""
    log = RunLog(tmp_path / 'a')
    for step in range(20): log(StepRecord(step, loss=step / 2))
    log.sync()
    (tmp_path / 'b').write_bytes((tmp_path / 'a').read_bytes())
    log.close()
    log.sync()  # harmless
    with RunReader(tmp_path / 'b') as reader: assert reader.steps()['loss'] == [step / 2 for step in range(20)]


def test_a_resumed_run_takes_back_what_it_will_do_again(tmp_path):
    path, at = tmp_path / 'a', 2 * BLOCK + 7
    with RunLog(path) as log:
        for step in range(3 * BLOCK + 5):
            log(StepRecord(step, loss=1.0, histograms=(Histogram('train', 'l', 'weight', 'f16', 0, (1,)),)))
            if step % 3 == 0: log(EventRecord(step, 'skip', 'non-finite'))
            if step % 50 == 0: log(EvalRecord(step, 1.0)), log(SampleRecord(step, 'old'))
        log(EventRecord(3 * BLOCK, 'command', 'lr set'))
    with RunReader(path) as reader:
        cursor, _ = reader.follow(limit=10**6)
        with RunLog(path) as log:
            log(RunResumed(at, 'from a checkpoint'))
            for step in range(at, at + 20): log(StepRecord(step, loss=2.0))
        assert reader.follow(cursor)[1]['step'] == list(range(at, at + 20))  # a view that was there hears of the new rows
        assert reader.steps()['step'] == list(range(at + 20)) and reader.status().step == at + 19
        assert reader.steps()['loss'] == [1.0] * at + [2.0] * 20
        assert reader.series('loss', 10**5).values.tolist() == [1.0] * at + [2.0] * 20
        assert reader.series('loss', 20).values.max() == 2.0 and len(reader.series('loss', 20).steps) <= 20
        assert max(reader.histogram_steps()) < at and max(reader.evals()['step']) <= at and max(reader.samples()['step']) <= at
        events = reader.events()
        skips = [step for step, kind in zip(events['step'], events['kind']) if kind == 'skip']
        assert max(skips) < at and 'lr set' in events['text']  # what people did stays
        [text] = [text for kind, text in zip(events['kind'], events['text']) if kind == 'resume']
        assert text == f'from a checkpoint; {BLOCK - 2} steps up to {3 * BLOCK + 5} were logged and are taken again'


def test_a_run_that_starts_again_has_an_empty_log(tmp_path):
    fill(tmp_path / 'a', range(BLOCK + 3))
    with RunLog(tmp_path / 'a') as log: log(RunResumed(0, 'from the beginning'))
    with RunReader(tmp_path / 'a') as reader: assert reader.steps()['step'] == [] and len(reader.sessions()) == 2


def test_a_command_to_a_run_that_hangs_in_a_write_is_refused_in_words(tmp_path, monkeypatch):
    import f16lab.runlog as module
    from f16lab.runfile import connect
    from f16lab.runlog import LogBusy, send_command
    with RunLog(tmp_path / 'a') as log:
        log.flush()
        holder = connect(tmp_path / 'a', 'rw')
        holder.execute('BEGIN IMMEDIATE')
        monkeypatch.setattr(module, 'connect', lambda path, mode: connect(path, mode, 0.05))
        with pytest.raises(LogBusy, match="does not answer, and 'stop' was not sent"): send_command(tmp_path / 'a', 'stop')
        holder.execute('ROLLBACK')
        holder.close()
        assert send_command(tmp_path / 'a', 'stop') == 1
