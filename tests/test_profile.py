"""Profiles: slots, text and TOML round trips, overrides, contradictions, resolve."""
import json
import pickle
import random
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from f16lab.precision import BF16, E4M3, E5M2, F16, F32, F64, Precision, WeightFormat
from f16lab.profile import (MAIN_SLOTS, PRESETS, SLOTS, PrecisionProfile, bytes_per_parameter, check_tied, describe,
                            match_glob, parse_value, preset_name, resolve, scale_exponent, slot_values, static_scale,
                            storage_of, warn_unmatched, without_effect)

GOLDEN = json.loads((Path(__file__).parent / 'golden' / 'promote.json').read_text())
T1_58 = WeightFormat.T1_58
parse = PrecisionProfile.parse


def quiet(text: str) -> PrecisionProfile:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return parse(text)


# The preset table, written out by hand: every slot that is not the plain f32 default.
TABLE = {
    'f32': {},
    'f16': dict(param=F16, compute=F16, loss_scale='dynamic'),
    'master_weights': dict(compute=F16, loss_scale='dynamic'),
    'bf16': dict(param=BF16, compute=BF16, stable=BF16, master=F32, rounding='stochastic'),
    'bf16_llmc': dict(param=BF16, compute=BF16, stable=BF16, master=F32, rounding='stochastic', grad=BF16, reduce=BF16),
    'bf16_sr': dict(param=BF16, compute=BF16, stable=BF16, rounding='stochastic'),
    'all_f16': dict(param=F16, compute=F16, stable=F16, optimizer=F16, accum=F16, grad=F16, loss=F16,
                    rounding='stochastic', loss_scale='dynamic'),
    't1_58': dict(param=T1_58, compute=F16, loss_scale='dynamic')}
PLAIN = dict(param=F32, compute=F32, stable=F32, optimizer=F32, accum=F32, arith='f32', grad=F32, reduce=F32, loss=F32,
             master=None, rounding='nearest', rounding_state='nearest', loss_scale='none', state_scale='auto',
             matmul32='ieee')


@pytest.mark.parametrize('name', TABLE)
def test_preset_table(name):
    assert slot_values(PRESETS[name]) == {**PLAIN, **TABLE[name]}
    assert PRESETS[name].overrides == () and parse(name) == PRESETS[name] and preset_name(PRESETS[name]) == name


def test_preset_names_and_slots_are_complete():
    assert list(PRESETS) == list(TABLE) and list(SLOTS) == list(PLAIN)
    assert MAIN_SLOTS == ('param', 'compute', 'stable', 'optimizer')


def test_presets_make_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for name, profile in PRESETS.items():
            parse(name), parse(str(profile)), PrecisionProfile.from_dict(profile.to_dict()), profile.at('blocks.0')


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError): PRESETS['f32'] = PRESETS['f16']
    with pytest.raises(TypeError): SLOTS['param'] = None
    with pytest.raises(AttributeError): PRESETS['f32'].param = F16


def test_text_of_the_design():
    text = 'param=f16,compute=f16,stable=f32,optimizer=f32;lm_head:compute=f32'
    p = parse(text)
    assert str(p) == text
    assert p.overrides == (('lm_head', (('compute', F32),)),)
    assert str(PRESETS['bf16']) == ('param=bf16,compute=bf16,stable=bf16,optimizer=f32,loss=f32,master=f32,'
                                    'rounding=stochastic')


def random_value(rng, name):
    slot = SLOTS[name]
    if slot.scale and rng.random() < 0.3: return f'2^{rng.randrange(41)}'
    return rng.choice(slot.allowed)


def random_profile(rng) -> PrecisionProfile:
    """Any combination the constructor takes (contradictions are drawn again)."""
    while True:
        values = {name: random_value(rng, name) for name in SLOTS if rng.random() < 0.4}
        globs = rng.sample(['lm_head', 'blocks.*', '**.ln?', 'blocks.0.attn', '**'], rng.randrange(4))
        names = [name for name in SLOTS if name != 'loss_scale']
        overrides = tuple((glob, {n: random_value(rng, n) for n in rng.sample(names, rng.randrange(1, 4))})
                          for glob in globs)
        try: return PrecisionProfile(**values, overrides=overrides, quiet=True)
        except ValueError: continue


def test_round_trips_of_random_profiles():
    rng = random.Random(5)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(500):
            p = random_profile(rng)
            seen.add(p)
            assert parse(str(p)) == p and hash(parse(str(p))) == hash(p)
            assert PrecisionProfile.from_dict(json.loads(json.dumps(p.to_dict()))) == p
            assert pickle.loads(pickle.dumps(p)) == p
            assert str(parse(str(p))) == str(p)
    assert len(seen) > 490


def test_toml_round_trip():
    p = parse('bf16_sr,arith=native;blocks.*:compute=f32;**.ln1:stable=f32,compute=f16')
    table = p.to_dict()
    body = {k: v for k, v in table.items() if k != 'overrides'}
    toml = '\n'.join(f'{k} = "{v}"' for k, v in body.items())
    for row in table['overrides']: toml += '\n[[overrides]]\n' + '\n'.join(f'{k} = "{v}"' for k, v in row.items())
    assert PrecisionProfile.from_dict(tomllib.loads(toml)) == p
    by_hand = tomllib.loads('preset = "f16"\nloss_scale = 1024\n[[overrides]]\npath = "lm_head"\ncompute = "f32"\n')
    assert PrecisionProfile.from_dict(by_hand) == parse('f16,loss_scale=2^10;lm_head:compute=f32')


def test_to_dict_holds_text_only():
    def leaves(x):
        if isinstance(x, dict): return [leaf for v in x.values() for leaf in leaves(v)]
        return [leaf for v in x for leaf in leaves(v)] if isinstance(x, list) else [x]
    assert {type(x) for x in leaves(parse('all_f16;a:master=f32').to_dict())} == {str}


def test_text_starts_from_a_preset_or_from_f32():
    assert parse('f16,stable=f16;blocks.*:compute=f32') == PrecisionProfile(
        F16, F16, F16, F32, loss_scale='dynamic', overrides=(('blocks.*', {'compute': F32}),))
    assert parse('compute=f16') == PrecisionProfile(compute=F16)
    assert parse(' f16 , stable = f16 ; lm_head : compute = f32 ') == parse('f16,stable=f16;lm_head:compute=f32')
    assert parse(PRESETS['f16']) is PRESETS['f16']


# ---------------------------------------------------------------- errors in words

@pytest.mark.parametrize('text, words', [
    ('fp16', "unknown preset 'fp16'.*f32, f16, master_weights.*Did you mean 'f16'"),
    ('', "unknown preset ''"),
    ('f16,stabel=f16', "unknown slot 'stabel'.*param, compute.*Did you mean 'stable'"),
    ('param=float16', "param=float16: param may be f16, bf16, f32, f64, e4m3, e5m2, t1_58.*Did you mean 'f16'"),
    ('f16,bf16', "'bf16': expected slot=value"),
    ('f16,param', "'param': expected slot=value"),
    ('f16,', "expected slot=value"),
    ('param=f16,param=f16', 'param is given twice'),
    ('f16;lm_head', 'expected slot=value'),
    ('f16;', "expected slot=value"),
    ('f16;lm_head:f32', "'f32': expected slot=value"),
    ('f16;a..b:compute=f32', "bad module path 'a..b'"),
    ('f16;a b:compute=f32', "bad module path 'a b'"),
    ('f16;lm_head:compte=f32', "unknown slot 'compte'.*Did you mean 'compute'"),
    ('f16;lm_head:loss_scale=none', 'loss_scale is one value for the whole run'),
    ('compute=t1_58', 'compute may be f16.*weight format, not a storage type'),
    ('f16;lm_head:optimizer=t1_58', 'may stand in param only'),
    ('stable=e4m3', 'stable may be f16, bf16, f32, f64.*8-bit formats are for param .storage. and compute'),
    ('grad=e5m2', '8-bit formats'),
    ('accum=bf16', 'accum may be f32, f16'),
    ('master=f16', 'master may be none, f32'),
    ('loss_scale=1000', r'loss_scale may be none, dynamic, 2\^k'),
    ('loss_scale=0.5', r'2\^k with 0 ≤ k ≤ 40'),
    ('f16,rounding=kahan,master=f32', 'Use rounding=kahan,master=none or rounding=nearest,master=f32'),
    ('bf16,rounding=kahan', 'rounding=kahan,master=none'),
    ('param=e5m2,rounding=kahan', '8-bit compensation'),
])
def test_bad_text_is_an_error_with_words(text, words):
    with pytest.raises(ValueError, match='(?s)' + words): parse(text)


def test_bad_tables():
    with pytest.raises(ValueError, match='no key path'): PrecisionProfile.from_dict({'overrides': [{'compute': 'f16'}]})
    with pytest.raises(ValueError, match='unknown slot'): PrecisionProfile.from_dict({'precision': 'f16'})
    with pytest.raises(ValueError, match='unknown preset'): PrecisionProfile.from_dict({'preset': 'half'})
    with pytest.raises(ValueError, match='changes nothing'): PrecisionProfile(overrides=(('a', {}),))
    with pytest.raises(ValueError, match='param may be'): PrecisionProfile(param=torch.float16)


def test_eight_bit_formats_where_they_are_allowed():
    for p in (E4M3, E5M2):
        assert PrecisionProfile(param=p, compute=p).param is p
        for name in SLOTS:
            if name not in ('param', 'compute'):
                with pytest.raises(ValueError): PrecisionProfile(**{name: p})


def test_t1_58_only_in_param_and_derived_from_f16():
    changed = {n for n in SLOTS if getattr(PRESETS['t1_58'], n) != getattr(PRESETS['f16'], n)}
    assert changed == {'param'} and PRESETS['t1_58'].param is T1_58 and storage_of(T1_58) is F16
    for name in SLOTS:
        if name != 'param':
            with pytest.raises(ValueError, match=name): PrecisionProfile(**{name: T1_58})


# ---------------------------------------------------------------- settings without effect

@pytest.mark.parametrize('text, slot', [
    ('f32,master=f32', 'master'), ('f32,rounding=stochastic', 'rounding'), ('f32,rounding=kahan', 'rounding'),
    ('f32,state_scale=2^12', 'state_scale'), ('f32,state_scale=none', 'state_scale'),
    ('bf16,state_scale=2^10', 'state_scale'), ('f32,rounding_state=stochastic', 'rounding_state'),
    ('f32,accum=f16', 'accum'), ('bf16,accum=f16', 'accum'), ('f32,arith=native', 'arith'),
    ('f32,loss_scale=dynamic', 'loss_scale'), ('bf16,loss_scale=2^10', 'loss_scale'),
    ('compute=f16,stable=f16,matmul32=tf32', 'matmul32'), ('f16;lm_head:compute=f32,accum=f16', 'lm_head:accum'),
    ('f32;lm_head:accum=f16', 'lm_head:accum'), ('f16;lm_head:arith=native,compute=f32', 'lm_head:arith'),
    ('f16;a:param=f32,master=f32;b:compute=f16', 'a:master'),
])
def test_settings_without_effect_warn(text, slot):
    with pytest.warns(UserWarning, match=f'^{slot}=.* has no effect: '): parse(text)


@pytest.mark.parametrize('text', [
    'f32,master=f32;blocks.*:param=f16', 'f32,loss_scale=dynamic;blocks.*:compute=f16', 'f16,accum=f16',
    'f32,rounding=stochastic;lm_head:param=bf16', 'optimizer=f16,state_scale=2^12', 'optimizer=f16,state_scale=none',
    'bf16,matmul32=tf32;lm_head:compute=f32', 'f32,matmul32=tf32', 'bf16,arith=native', 'f16;a:accum=f16',
    'f32;a:accum=f16;a.b:compute=f16',
    'param=t1_58,compute=f16,rounding=stochastic', 'param=e4m3,compute=e4m3,master=f32,loss_scale=dynamic',
])
def test_settings_that_something_uses_do_not_warn(text):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        p = parse(text)
        p.at('blocks.0'), p.at('lm_head'), p.at('other')


def test_without_effect_lists_all():
    p = quiet('f32,master=f32,rounding=stochastic,accum=f16')
    notes = without_effect(slot_values(p), p.overrides)
    assert [note.split('=')[0] for note in notes] == ['master', 'rounding', 'accum']


# ---------------------------------------------------------------- derived values and changes

def test_derived_values():
    assert parse('f16,stable=f16').loss is F16 and parse('f16,stable=f16,loss=f32').loss is F32
    assert parse('optimizer=bf16').rounding_state == 'stochastic'
    assert parse('optimizer=bf16,rounding_state=nearest').rounding_state == 'nearest'
    assert [parse(f'optimizer={t}').rounding_state for t in ('f16', 'f32', 'f64')] == ['nearest'] * 3


def test_with_follows_and_keeps():
    bf16 = PRESETS['bf16']
    assert bf16.with_(stable=F32).loss is F32 and bf16.with_(stable=F64).loss is F32  # set by the preset: stays
    assert PRESETS['f16'].with_(stable=F64).loss is F64  # derived: follows
    assert bf16.with_(loss=None).loss is BF16  # asked to be derived again
    wide = bf16.with_(param=F32)
    assert (wide.master, wide.rounding, wide.compute) == (None, 'nearest', BF16)
    assert PRESETS['all_f16'].with_(compute=F32).accum is F32
    assert parse('optimizer=f16,state_scale=2^12').with_(optimizer=F32).state_scale == 'auto'
    assert PRESETS['f16'].with_(compute=F32).loss_scale == 'none'
    assert bf16.with_(master=None) == PRESETS['bf16_sr'] == bf16.with_(master='none')
    with pytest.warns(UserWarning, match='master=f32 has no effect'): bf16.with_(param=F32, master=F32)
    with pytest.raises(ValueError, match='unknown slot'): bf16.with_(precision=F16)


def test_with_keeps_what_an_override_needs():
    p = quiet('bf16;lm_head:param=bf16').with_(param=F32)
    assert (p.master, p.rounding) == (F32, 'stochastic')
    assert (p.at('lm_head').master, p.at('lm_head').rounding) == (F32, 'stochastic')
    assert (p.at('wte').master, p.at('wte').rounding) == (None, 'nearest')


def test_scales():
    assert [scale_exponent(f'2^{k}') for k in (0, 1, 40)] == [0, 1, 40]
    assert [scale_exponent(t) for t in ('2^41', '2^-1', '2^x', '3', '-4', 'inf', 'nan', '', '1e400')] == [None] * 9
    assert all(parse(f'f16,loss_scale={2 ** k}').loss_scale == f'2^{k}' for k in range(41))
    assert PrecisionProfile(F16, F16, loss_scale=2 ** 15).loss_scale == '2^15' and static_scale('2^15') == 32768.0
    assert [static_scale(t) for t in ('none', 'auto', 'dynamic')] == [None] * 3


# ---------------------------------------------------------------- overrides

@pytest.mark.parametrize('glob, hits, misses', [
    ('lm_head', ['lm_head', 'lm_head.x'], ['lm_heads', 'x.lm_head', '']),
    ('blocks.*', ['blocks.0', 'blocks.11.attn.qkv'], ['blocks', 'blocksx.0']),
    ('blocks.*.attn', ['blocks.0.attn', 'blocks.0.attn.qkv'], ['blocks.0.mlp', 'blocks.0.1.attn', 'blocks.attn']),
    ('**.qkv', ['qkv', 'a.qkv', 'a.b.qkv', 'a.b.qkv.c'], ['a.xqkv', 'qkvx']),
    ('blocks.**.qkv', ['blocks.qkv', 'blocks.0.qkv', 'blocks.0.attn.qkv'], ['qkv', 'blocks.0.attn']),
    ('blocks.**', ['blocks.0', 'blocks.0.a.b'], ['blocks', 'block']),
    ('**', ['', 'a', 'a.b.c'], []),
    ('*', ['a', 'a.b'], ['']),
    ('*.ln?', ['a.ln1', 'a.ln2.x'], ['a.b.ln1', 'a.ln', 'a.ln12', 'ln1']),
    ('ln*', ['ln', 'ln_f', 'ln1.weight'], ['a.ln1']),
    ('x**.y', ['xa.y', 'xa.b.y', 'x.y', 'x.b.y.z'], ['xy', 'ax.y']),
    ('**y', ['y', 'a.xy', 'a.y.b'], ['a.z']),
])
def test_globs(glob, hits, misses):
    assert [path for path in hits if not match_glob(glob, path)] == []
    assert [path for path in misses if match_glob(glob, path)] == []


def test_last_match_wins_slot_by_slot():
    p = parse('f16;blocks:compute=f32,stable=f64;blocks.1:compute=bf16;blocks.1.ln1:stable=f16')
    assert [(p.at(x).compute.tag, p.at(x).stable.tag) for x in ('wte', 'blocks.0', 'blocks.1', 'blocks.1.ln1.weight')] \
        == [('f16', 'f32'), ('f32', 'f64'), ('bf16', 'f64'), ('bf16', 'f16')]
    reverse = parse('f16;blocks.1:compute=bf16;blocks:compute=f32')
    assert reverse.at('blocks.1').compute is F32


def test_at_gives_a_plain_profile():
    p = parse('bf16;lm_head:param=f32')
    assert p.at('wte') == PRESETS['bf16'] and p.at('') == PRESETS['bf16']
    assert p.at('lm_head') == PrecisionProfile(F32, BF16, BF16, F32, loss=F32)
    assert p.at('lm_head').at('lm_head') == p.at('lm_head')
    assert parse('f16;lm_head:compute=f32').at('lm_head').loss_scale == 'dynamic'  # belongs to the whole run
    assert parse('f16;h:stable=f16').at('h').loss is F16 and parse('bf16;h:stable=f16').at('h').loss is F32
    assert parse('f16;h:optimizer=bf16').at('h').rounding_state == 'stochastic'


def test_a_contradiction_at_a_path_names_the_path():
    p = parse('bf16_sr,rounding=kahan;lm_head:master=f32')
    assert p.at('wte').rounding == 'kahan'
    with pytest.raises(ValueError, match="at 'lm_head': rounding=kahan"): p.at('lm_head')
    assert parse('bf16_sr,rounding=kahan;lm_head:param=f32').at('lm_head').rounding == 'nearest'


def test_tied_tensors():
    check_tied(parse('f16;lm_head:compute=f32'), ['wte', 'lm_head'])
    check_tied(parse('f16;lm_head:param=f32;wte:param=f32'), ['wte', 'lm_head'])
    for text in ('f16;lm_head:param=f32', 'f16;wte:param=t1_58'):  # t1_58 is stored as f16, yet another format
        with pytest.raises(ValueError, match='tied tensors need one param precision'):
            check_tied(parse(text), ['wte', 'lm_head'])


def test_unmatched_override_warns():
    p = parse('f16;lmhead:compute=f32;blocks.*:compute=f32')
    with pytest.warns(UserWarning, match="override 'lmhead' has no effect.*Did you mean 'lm_head'"):
        assert warn_unmatched(p, ['lm_head', 'blocks.0']) == ('lmhead',)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert warn_unmatched(p, ['lmhead', 'blocks.0.attn']) == ()


# ---------------------------------------------------------------- resolve

@pytest.mark.parametrize('row', GOLDEN, ids=lambda row: '+'.join(row['operands']))
def test_resolve_meets_the_golden_table(row):
    operands, result = [Precision.parse(t) for t in row['operands']], Precision.parse(row['result'])
    rng = random.Random(1)
    for _ in range(4):
        rng.shuffle(operands)
        assert resolve(None, operands) is result
        assert resolve(None, [1e-8, *operands, 3]) is result  # host scalars never take part
    for explicit in Precision: assert resolve(explicit, operands) is explicit


def test_resolve_of_one_and_of_equal_operands():
    for p in Precision: assert resolve(None, [p]) is p and resolve(None, [p, p, p]) is p
    assert resolve(F16, []) is F16


def test_resolve_errors():
    with pytest.raises(ValueError, match='name p='): resolve(None, [])
    with pytest.raises(ValueError, match='name p='): resolve(None, [1e-5, 2])
    with pytest.raises(ValueError, match='t1_58 is not a storage type'): resolve(T1_58, [F16])
    with pytest.raises(ValueError, match='t1_58 is not a storage type'): resolve(None, [T1_58])
    with pytest.raises(ValueError, match='Precision.of'): resolve(None, [torch.float16])
    with pytest.raises(ValueError, match='is no precision'): resolve('f16', [F16])


# ---------------------------------------------------------------- tables and cost

def test_bytes_per_parameter():
    total = {name: sum(bytes_per_parameter(p).values()) for name, p in PRESETS.items()}
    assert total == {'f32': 16, 'f16': 14, 'master_weights': 16, 'bf16': 18, 'bf16_llmc': 16, 'bf16_sr': 14,
                     'all_f16': 8, 't1_58': 14}
    kahan = bytes_per_parameter(PRESETS['bf16_sr'].with_(rounding='kahan'))
    assert kahan == dict(param=2, grad=4, m=4, v=4, master=0, compensation=2)


def test_describe():
    rows = describe(parse('f16;lm_head:compute=f32'))
    assert len(rows) == len(SLOTS) + 1
    assert [r['slot'] for r in rows if r['origin'] == 'set'] == ['param', 'compute', 'loss_scale']
    assert rows[-1] == dict(path='lm_head', slot='compute', value='f32', origin='override', governs=rows[1]['governs'])


def test_parse_value_takes_values_and_text():
    for name, slot in SLOTS.items():
        for value in slot.allowed:
            text = getattr(value, 'tag', value) if value is not None else 'none'
            assert parse_value(name, value) is value or parse_value(name, value) == value
            assert parse_value(name, text) == value and parse_value(name, f' {text.upper()} ') == value


# ---------------------------------------------------------------- inside torch.compile

def test_slots_are_traced_in_one_graph():
    def f(x, profile):
        y = x * profile.compute.bytes
        if profile.rounding == 'stochastic' and profile.master is None: y = y + 1
        return y.to(profile.param.dtype), y

    g = torch.compile(f, fullgraph=True, backend='eager')
    x = torch.ones(3)
    for name in ('f16', 'bf16_sr', 'f32'):
        want, got = f(x, PRESETS[name]), g(x, PRESETS[name])
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(want, got))
    torch._dynamo.reset()


@pytest.mark.parametrize("odd", [3, "blocks.*", {"path": "a"}, [3], ["x"]], ids=str)
def test_overrides_that_are_no_list_of_tables_are_refused_in_words(odd):
    with pytest.raises(ValueError, match="give a list of tables"):
        PrecisionProfile.from_dict({"preset": "f16", "overrides": odd})
