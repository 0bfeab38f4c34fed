"""Compiled kernels on disk: found again, compiled again when damaged, and no obstacle where nothing can be written."""

import os

import pytest

from f16lab.launch import KernelFolder, built, kernel_source

KEY = ("code", "kernel<float>", "sm_90", "kernel.cu", "nvrtc 13.2")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Calls of a stand-in for the compiler."""
    monkeypatch.setenv("F16LAB_CACHE_DIR", str(tmp_path / "kernels"))
    calls = []
    def make(code, expression, arch, name):
        calls.append((code, expression, arch, name))
        return f"machine code of {code}".encode() + b"\n\0", f"_Z{len(calls)}"
    return make, calls, tmp_path / "kernels"


def test_a_kernel_is_compiled_once_for_each_source_expression_architecture_and_compiler(made):
    make, calls, _ = made
    first = built(*KEY, make)
    assert built(*KEY, make) == first and len(calls) == 1
    for i, other in ((0, "code2"), (1, "kernel<int>"), (2, "sm_80"), (4, "nvrtc 12.0")):
        changed = tuple(other if k == i else x for k, x in enumerate(KEY))
        assert built(*changed, make) != first
    assert len(calls) == 5


@pytest.mark.parametrize("damage", (lambda b: b[:-1], lambda b: b"", lambda b: b[:70] + bytes([b[70] ^ 1]) + b[71:], lambda b: b + b"x"))
def test_a_damaged_file_is_compiled_again(made, damage):
    make, calls, folder = made
    first = built(*KEY, make)
    file, = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert built(*KEY, make)[0] == first[0] and len(calls) == 2 and built(*KEY, make)[0] == first[0] and len(calls) == 2


def test_a_folder_that_cannot_be_written_is_said_and_costs_nothing_else(made):
    make, calls, folder = made
    folder.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be kept in .*F16LAB_CACHE_DIR"): built(*KEY, make)
    with pytest.warns(UserWarning): built(*KEY, make)
    assert len(calls) == 2 and folder.read_text().startswith("a file")


def test_where_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("F16LAB_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KernelFolder.usual().path == tmp_path / "f16lab" / "kernels"
    monkeypatch.setenv("F16LAB_CACHE_DIR", str(tmp_path / "own"))
    assert KernelFolder.usual().path == tmp_path / "own" and not os.path.exists(tmp_path / "own")


def test_compilers_name_the_line_of_our_own_file():
    text, lines = kernel_source("cast.cu"), []
    at = None
    for line in text.splitlines():
        if line.startswith("#line"): at = (line.split('"')[1], int(line.split()[1]) - 1)
        else:
            at = (at[0], at[1] + 1)
            lines.append((at, line))
    from importlib.resources import files
    for (name, number), line in lines:
        original = (files("f16lab.kernels") / name).read_text().splitlines()
        assert number <= len(original) + 1 and (not line or original[number - 1] == line), (name, number, line)
