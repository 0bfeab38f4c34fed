"""Quotients and roots made of a rough seed have the bits of / and √, also when the seed is one ulp off."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None: pytest.skip("no C++ compiler: exact.cuh cannot be built for the host")
    library = tmp_path_factory.mktemp("host") / "exact.so"
    flags = ("-O2", "-march=native", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT / 'kernels'}")
    subprocess.run([compiler, *flags, str(ROOT / "tests/host/exact.cpp"), "-o", str(library)], check=True)
    out = ctypes.CDLL(str(library))
    for name in ("wrong_roots", "wrong_near_two", "wrong_quotients", "finite_by_accident"):
        getattr(out, name).restype = ctypes.c_int64
    return out


@pytest.mark.parametrize("seed", (-1, 0, 1))
def test_all_mantissas_have_their_root(host, seed):
    assert host.wrong_roots(seed, 0) == 0


@pytest.mark.parametrize("seed", (-1, 0, 1))
def test_quotients_are_rounded_once(host, seed):
    assert host.wrong_quotients(seed, ctypes.c_int64(1_000_000)) == 0
    assert host.wrong_near_two(seed, 1) == 0 and host.wrong_near_two(seed, 3) == 0


def test_infinity_nan_and_overflow_do_not_end_in_a_finite_number(host):
    assert host.finite_by_accident() == 0
