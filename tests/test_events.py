"""Records and the bus: frozen and plain, free when nobody listens, safe when a listener fails."""
import dataclasses
import gc
import math
import pickle
import sys
import threading
import warnings

import pytest

from f16lab import events
from f16lab.events import (Bus, CastRow, EvalRecord, EventRecord, Histogram, HistogramRecord, RunEnded, RunResumed,
                           RunStarted, SampleRecord, StepRecord, TensorStat)

CAST = CastRow('train', 'blocks.0', 'linear', 'w', (4, 8), 'f32', 'f16', 'forward', 'operand', 2, 128)
STAT = TensorStat('wte.weight', 0.5, 0.25, 0.0, 1.0, 3, 4)
HISTOGRAM = Histogram('train', 'blocks.0', 'output', 'f16', -24, (1, 0, 5), zeros=2, subnormals=1, infs=3,
                      nans=4, amax=1.5)
STEP = StepRecord(7, 5.5, tokens=64, grad_norm=1.0, lr=0.1, loss_scale=1024.0, clip=1.0, skipped=True,
                  skip_reason='inf', seconds=0.5, tokens_per_second=128.0, casts=(CAST,), tensors=(STAT,),
                  extra={'ema': 1.0}, histograms=(HISTOGRAM,))
ALL = [CAST, STAT, HISTOGRAM, STEP, EvalRecord(7, 5.0, 10), SampleRecord(7, 'text'), EventRecord(7, 'skip', 'inf'),
       HistogramRecord(7, (HISTOGRAM,)), RunStarted({'a': {'b': 1}}, {'torch': '2'}),
       RunEnded(7, 'stopped', 'by the user'), RunResumed(7, 'checkpoint 7')]


def test_every_record_type_is_in_this_test():
    kinds = {v for v in vars(events).values() if dataclasses.is_dataclass(v)}
    assert kinds == {type(record) for record in ALL}


@pytest.mark.parametrize('record', ALL, ids=lambda r: type(r).__name__)
def test_records_are_frozen_equal_by_value_and_picklable(record):
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError): setattr(record, field.name, None)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(record, protocol)) == record
    assert dataclasses.replace(record) == record


def test_records_are_plain():
    def leaves(x):
        if dataclasses.is_dataclass(x): return [y for f in dataclasses.fields(x) for y in leaves(getattr(x, f.name))]
        if isinstance(x, dict): return [y for pair in x.items() for y in leaves(pair)]
        return [y for item in x for y in leaves(item)] if isinstance(x, tuple) else [x]
    assert {type(x) for record in ALL for x in leaves(record)} <= {int, float, str, bool}


def test_field_order_is_the_contract():
    names = lambda kind: [f.name for f in dataclasses.fields(kind)]
    assert names(CastRow) == 'phase layer op operand shape src dst direction reason count bytes'.split()
    assert names(TensorStat) == 'name efficiency lost stalled_m stalled_v flushed saturated'.split()
    assert names(StepRecord) == ('step loss tokens grad_norm lr loss_scale clip skipped skip_reason seconds '
                                 'tokens_per_second casts tensors extra histograms').split()


def test_two_step_records_do_not_share_extra():
    a, b = StepRecord(0, 1.0), StepRecord(1, 1.0)
    assert a.extra == {} and a.extra is not b.extra and math.isnan(a.grad_norm)


def test_histogram_counts_every_element_once():
    assert HISTOGRAM.elements == 6 + 2 + 3 + 4


# ---------------------------------------------------------------- bus

def test_subscribe_emit_unsubscribe():
    bus, heard = Bus(), []
    assert not bus.active and bus.emit(STEP) is None
    first = bus.subscribe(lambda r: heard.append(('a', r.step)))
    second = bus.subscribe(lambda r: heard.append(('b', r.step)))
    bus.emit(STEP)
    assert heard == [('a', 7), ('b', 7)] and bus.active
    first(), first()
    bus.emit(STEP)
    assert heard[2:] == [('b', 7)]
    second()
    assert not bus.active


def test_the_same_function_may_subscribe_twice():
    bus, heard = Bus(), []
    leave, _ = bus.subscribe(heard.append), bus.subscribe(heard.append)
    bus.emit(1)
    leave()
    bus.emit(2)
    assert heard == [1, 1, 2]


def test_nobody_listening_builds_nothing():
    """The producer's pattern: no record is made, and `emit` itself allocates nothing."""
    bus, built = Bus(), []

    def produce(steps):
        for step in range(steps):
            if bus.active: bus.emit(built.append(step) or StepRecord(step, 0.0))

    produce(1000)
    assert built == []
    bus.subscribe(lambda r: None)
    produce(2)
    assert built == [0, 1]


def test_emit_without_subscribers_leaves_no_objects_behind():
    bus = Bus()
    bus.emit(STEP)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10_000): bus.emit(STEP)
    assert sys.getallocatedblocks() - before < 50


def test_a_failing_subscriber_is_reported_once_and_counted():
    bus, heard, done = Bus(), [], 0

    def display(record): raise RuntimeError(f'no display at {record}')

    bus.subscribe(display), bus.subscribe(heard.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for step in range(100):
            bus.emit(step)
            done += 1
    assert done == 100 and heard == list(range(100))
    assert len(caught) == 1 and 'display' in str(caught[0].message) and 'no display at 0' in str(caught[0].message)
    assert list(bus.failures.values()) == [100] and 'display' in list(bus.failures)[0]


def test_each_failing_subscriber_is_reported():
    bus = Bus()
    bus.subscribe(lambda r: 1 / 0), bus.subscribe(lambda r: [][1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        bus.emit(0), bus.emit(1)
    assert [('ZeroDivisionError' in str(w.message), 'IndexError' in str(w.message)) for w in caught] \
        == [(True, False), (False, True)]
    assert sum(bus.failures.values()) == 4


def test_interrupt_is_no_failure_of_a_subscriber():
    bus = Bus()

    def stop(record): raise KeyboardInterrupt

    bus.subscribe(stop)
    with pytest.raises(KeyboardInterrupt): bus.emit(0)


def test_leaving_during_emit():
    bus, heard = Bus(), []
    leave = bus.subscribe(lambda r: leave())
    bus.subscribe(heard.append)
    bus.emit(0), bus.emit(1)
    assert heard == [0, 1]


def test_not_callable():
    with pytest.raises(ValueError, match='function of one record'): Bus().subscribe(None)


def test_threads_subscribe_while_another_emits():
    bus, counts = Bus(), [0] * 8
    stop = threading.Event()

    def visit(i):
        for _ in range(200):
            leave = bus.subscribe(lambda r: counts.__setitem__(i, counts[i] + 1))
            bus.emit(0)
            leave()

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(8)]
    for t in threads: t.start()
    while any(t.is_alive() for t in threads):
        bus.emit(1)
        stop.wait(0.001)
    for t in threads: t.join()
    assert min(counts) >= 200 and not bus.active and bus.failures == {}
