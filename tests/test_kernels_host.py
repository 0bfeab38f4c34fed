"""The device functions that round, widen and key, built for the host and compared with the reference bit for bit."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from f16lab.precision import BF16, E4M3, E5M2, F16, F32, Precision, bits_of, convert, from_bits
from f16lab.rounding import Key, Purpose, noise, round_stochastic

ROOT = Path(__file__).parents[1]
NARROW = (F16, BF16, E5M2, E4M3)
SPECIAL = (0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001,
           0x7FFF8C22, 0xFFFFFFFF, 0x7FC00000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x47800000, 0x43E80000, 0x43E80001,
           0x43EFFFFF, 0x43F00000, 0x476FFFFF, 0x47700000, 0x477FFFFE, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x33000000, 0x33000001)


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None: pytest.skip("no C++ compiler: the device functions cannot be built for the host")
    library = tmp_path_factory.mktemp("host") / "numbers.so"
    subprocess.run([compiler, "-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT / 'kernels'}",
                    str(ROOT / "tests/host/numbers.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(a: np.ndarray) -> ctypes.c_void_p: return ctypes.c_void_p(a.ctypes.data)


def patterns(p: Precision) -> torch.Tensor:
    """f32: every number of `p`, the midpoints between neighbours and their neighbours, special and random patterns."""
    codes = torch.arange(2**p.bits, dtype=torch.int64)
    exact = convert(from_bits(codes, p), F32)
    finite = exact[exact.isfinite()].unique()
    middle = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    near = [middle, torch.nextafter(middle, torch.tensor(9e38)), torch.nextafter(middle, torch.tensor(-9e38))]
    draw = torch.randint(-2**31, 2**31, (200_000,), generator=torch.Generator().manual_seed(p.bits), dtype=torch.int64)
    bits = torch.cat([draw, torch.tensor(SPECIAL)]).to(torch.int32)
    window = torch.exp2(torch.linspace(-60, -24, 50_000, dtype=torch.float64)).float()
    return torch.cat([exact, -exact, *near, bits.view(torch.float32), window, -window]).contiguous()


def codes(x: torch.Tensor) -> np.ndarray:
    mask = 0xFFFF if x.element_size() == 2 else 0xFF
    return (bits_of(x).to(torch.int64) & mask).numpy().astype(np.uint32)


@pytest.mark.parametrize("p", NARROW, ids=str)
@pytest.mark.parametrize("saturate", (False, True))
def test_narrowing_equals_the_reference(host, p, saturate):
    x = patterns(p)
    out = np.full(len(x), 0xDEAD, np.uint32)
    getattr(host, f"narrow_{p.tag}")(pointer(x.numpy()), pointer(out), ctypes.c_int64(len(x)), int(saturate))
    assert np.array_equal(out, codes(convert(x, p, saturate)))


@pytest.mark.parametrize("p", NARROW, ids=str)
def test_widening_equals_the_reference(host, p):
    patterns_ = np.arange(2**p.bits, dtype=np.uint32)
    out = np.full(len(patterns_), np.float32(7))
    getattr(host, f"widen_{p.tag}")(pointer(patterns_), pointer(out), ctypes.c_int64(len(out)))
    right = convert(from_bits(torch.from_numpy(patterns_.astype(np.int64)), p), F32).numpy()
    nan = np.isnan(right)
    assert np.array_equal(np.isnan(out), nan) and np.array_equal(np.signbit(out), np.signbit(right))
    assert np.array_equal(out[~nan].view(np.uint32), right[~nan].view(np.uint32))


@pytest.mark.parametrize("p", NARROW, ids=str)
def test_stochastic_rounding_equals_the_reference(host, p):
    x = patterns(p)
    random = noise(Key.of(3, 1, Purpose.USER, p.tag), 0, len(x))
    for n in (random, torch.zeros_like(random), torch.full_like(random, -1), torch.full_like(random, 0x7FFF), random.roll(1)):
        out = np.full(len(x), 0xDEAD, np.uint32)
        getattr(host, f"stochastic_{p.tag}")(pointer(x.numpy()), pointer(n.numpy()), pointer(out), ctypes.c_int64(len(x)), 0)
        assert np.array_equal(out, codes(round_stochastic(x, p, n)))


def test_keys_and_noise_equal_the_reference(host):
    host.key.restype = ctypes.c_uint32
    for key in (Key.of(0, 0, Purpose.WRITE_BACK, "wte.weight"), Key.of(42, 18864, Purpose.V, "blocks.0.attn.qkv.weight", 3)):
        assert host.key(key.seed, key.step, int(key.purpose), key.micro, key.tensor_id) == key.a
        for start in (0, 2**32 - 500, 5 * 2**32 + 7):
            out = np.zeros(1000, np.uint32)
            host.noise_all(ctypes.c_uint32(key.a), ctypes.c_uint64(start), pointer(out), ctypes.c_int64(1000))
            assert np.array_equal(out, noise(key, start, 1000).numpy().view(np.uint32))
