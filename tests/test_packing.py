"""Bytes and strict JSON for records: every bit comes back."""
import json
import math
import random
import struct
from pathlib import PurePosixPath

import numpy as np
import pytest

from f16lab.events import CastRow, Histogram, StepRecord, TensorStat
from f16lab.packing import (SCALARS, Unpacker, from_json, pack_casts, pack_floats, pack_histograms, pack_ints,
                            pack_step, step_scalars, to_json, unpack_casts, unpack_histograms, unpack_step)

ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 0.1, -5e-324, 1e300, 3.4028234663852886e38, 2.0 ** -149, 1 / 3,
       struct.unpack('<d', bytes.fromhex('010000000000f0ff'))[0]]  # last: a negative signalling NaN with a payload


def refuse(word): raise ValueError(f'{word} is not JSON')


# ---------------------------------------------------------------- JSON

@pytest.mark.parametrize('value, text', [
    (math.nan, '"NaN"'), (math.inf, '"Infinity"'), (-math.inf, '"-Infinity"'), (65536.0, '65536.0'), (-0.0, '-0.0'),
    ('NaN', r'"\\NaN"'), (r'\NaN', r'"\\\\NaN"'), ('NaN ', '"NaN "'), (None, 'null'), (True, 'true'),
    ((1, (2.5,)), '[1,[2.5]]'), ({'a': {1: math.nan}}, '{"a":{"1":"NaN"}}'), (np.float32(0.5), '0.5'),
    (np.float64(math.nan), '"NaN"'), (np.int64(3), '3'), (np.bool_(True), 'true')])
def test_json_text(value, text):
    assert to_json(value) == text
    json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize('value', [ODD[:-1], ['NaN', r'\NaN', r'\\-Infinity', '-Infinity', 'nan', '\\', ''],
                                   {'loss': math.nan, 'norm': math.inf, 'scale': 65536.0, 'text': 'Infinity'}])
def test_json_round_trip(value):
    text = to_json(value)
    json.loads(text, parse_constant=refuse)
    assert repr(from_json(text)) == repr(value)


def test_json_of_other_things_is_their_text():
    class Tagged: tag = 'f16'
    assert from_json(to_json({'p': Tagged(), 'path': PurePosixPath('a/b')})) == {'p': 'f16', 'path': 'a/b'}


# ---------------------------------------------------------------- numbers

@pytest.mark.parametrize('values, size', [
    ([], 5), ([0], 5), ([0] * 99, 5), ([255], 6), ([256], 7), ([65535, 1], 9), ([65536], 9), ([2 ** 32 - 1], 9),
    ([2 ** 32], 13), ([2 ** 63 - 1], 13), ([-1], 6), ([-128, 127], 7), ([-129], 7),
    ([-2 ** 63], 13), ([-2 ** 62, 2 ** 62], 21)])
def test_ints(values, size):
    data = pack_ints(values)
    assert len(data) == size and Unpacker(data).ints() == values


def test_ints_too_large():
    with pytest.raises(OverflowError): pack_ints([2 ** 63])


def test_floats_bit_for_bit():
    assert Unpacker(pack_floats(ODD)).floats().tobytes() == np.array(ODD).tobytes()
    assert Unpacker(pack_floats([])).floats().tolist() == []


def test_floats_take_4_bytes_where_f32_is_enough():
    assert len(pack_floats([0.5] * 16)) == 4 + 2 + 16 * 4
    assert len(pack_floats([0.1] * 16)) == 4 + 2 + 16 * 8
    assert len(pack_floats([math.nan, math.inf, -0.0])) == 4 + 1 + 3 * 4


def test_random_lists_in_a_row():
    rng = random.Random(3)
    lists = []
    for _ in range(200):
        n = rng.randrange(20)
        if rng.random() < 0.5:
            lists.append([rng.getrandbits(rng.randrange(1, 63)) * rng.choice((1, -1)) for _ in range(n)])
        else: lists.append([struct.unpack('<d', rng.randbytes(8))[0] for _ in range(n)])
    kinds = [all(isinstance(x, int) for x in values) for values in lists]
    unpacker = Unpacker(b''.join(pack_ints(v) if ints else pack_floats(v) for v, ints in zip(lists, kinds)))
    for values, ints in zip(lists, kinds):
        if ints: assert unpacker.ints() == values
        else: assert unpacker.floats().tobytes() == np.array(values, 'f8').tobytes()
    assert unpacker.rest() == b''


@pytest.mark.parametrize('data, read', [(pack_ints([1, 2, 300]), Unpacker.ints),
                                        (pack_floats([0.1, 2.0]), Unpacker.floats)], ids=['ints', 'floats'])
def test_cut_data_is_an_error(data, read):
    read(Unpacker(data))
    for cut in range(len(data)):
        with pytest.raises(ValueError, match='ends early'): read(Unpacker(data[:cut]))


# ---------------------------------------------------------------- records

def odd_step(step: int = 3) -> StepRecord:
    stats = tuple(TensorStat(f'w{i}', x, x, -0.0, math.nan, i, 2 ** 40 + i) for i, x in enumerate(ODD[:-1]))
    return StepRecord(step, math.nan, 2 ** 40, math.inf, -0.0, 65536.0, 0.1, True, 'grad_norm is inf: é',
                      0.25, -math.inf, tensors=stats, extra={f'x{i}': x for i, x in enumerate(ODD[:-1])})


@pytest.mark.parametrize('record', [odd_step(), StepRecord(0, 5.5), StepRecord(1, 5.5, extra={'NaN': 1.0})],
                         ids=['odd', 'bare', 'odd name'])
def test_step_round_trip(record):
    layout, body = pack_step(record)
    back = unpack_step(record.step, from_json(to_json(layout)), body)
    assert repr(back) == repr(record)
    assert dict(zip(layout[0], step_scalars(body).tolist()))['loss_scale'] == record.loss_scale
    assert isinstance(hash(layout), int) and layout[0][:len(SCALARS)] == SCALARS


def test_numpy_and_torch_scalars_in_a_record():
    import torch
    record = StepRecord(1, np.float32(0.1), tokens=np.int64(7), grad_norm=torch.tensor(0.5),
                        extra={'a': np.float64(0.2)})
    layout, body = pack_step(record)
    back = unpack_step(1, layout, body)
    assert (back.loss, back.tokens, back.grad_norm, back.extra) == (float(np.float32(0.1)), 7, 0.5, {'a': 0.2})


@pytest.mark.parametrize('name', ['loss', 'step', 'skip_reason', 'tokens'])
def test_extra_may_not_hide_a_field(name):
    with pytest.raises(ValueError, match=f'may not be named {name}'): pack_step(StepRecord(1, 5.0, extra={name: 1.0}))


def test_casts_round_trip():
    rows = tuple(CastRow('train', f'b{i}', 'linear', 'w', (i, 2)[:i % 3], 'f32', 'NaN', 'forward', 'x', i, 2 ** 33 * i)
                 for i in range(50))
    layout, body = pack_casts(rows)
    assert unpack_casts(from_json(to_json(layout)), body) == rows
    assert unpack_casts(*pack_casts(())) == ()
    assert pack_casts(rows)[0] == pack_casts([r for r in rows])[0]


def test_histograms_round_trip():
    rng = random.Random(1)
    hs = tuple(Histogram('train', f'l{i}', 'grad', 'f16', rng.randrange(-149, 120),
                         tuple(rng.randrange(1000) for _ in range(rng.randrange(70))), zeros=i, subnormals=2 * i,
                         infs=2 ** 35, nans=i % 2, amax=ODD[i % 12]) for i in range(60))
    layout, body = pack_histograms(hs)
    assert repr(unpack_histograms(from_json(to_json(layout)), body)) == repr(hs)
    assert unpack_histograms(*pack_histograms(())) == ()
