"""Every kernel compiles for the GPUs we name, where there is a compiler; without one the test says so."""

import itertools
import shutil
import subprocess

import pytest

from f16lab.launch import CODES, kernel_source
from f16lab.precision import BF16, F16, F32

ADAMW = ("const float*, " * 6 + "const u32*, " * 3 + "const i64*, " + "float, " * 6 + "double*, float*")
CAST = [f"template __global__ void cast<{a}, {b}, {draw}, {stats}>(const {a}::code*, {b}::code*, i64, u32, u64, int, u64*, u32*);"
        for (a, b), draw, stats in [*((pair, "true", "true") for pair in itertools.permutations(CODES.values(), 2)),
                                        ((CODES[F32], CODES[F16]), "false", "true"), ((CODES[F32], CODES[BF16]), "true", "false")]]
STEP = [f"template __global__ void adamw<{p}, {g}, {o}, {mode}, {draw}, {state}, {measure}>({p}::code*, const {g}::code*, {o}::code*, "
        f"{o}::code*, float*, {p}::code*, i64, {ADAMW});"
        for p, g, o, mode, draw, state, measure in (
            ("F32", "F32", "F32", 0, "false", "false", "true"), ("F16", "F32", "F32", 0, "false", "false", "true"),
            ("BF16", "F32", "F32", 1, "true", "false", "false"), ("BF16", "BF16", "F32", 1, "true", "false", "true"),
            ("BF16", "F32", "F32", 0, "true", "false", "false"), ("F16", "F16", "F16", 0, "true", "false", "true"),
            ("F16", "F32", "F32", 2, "false", "false", "true"), ("BF16", "F32", "BF16", 0, "true", "true", "true"))]


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
@pytest.mark.parametrize("file,instances", (("cast.cu", CAST), ("adamw.cu", STEP)), ids=("cast", "adamw"))
def test_kernel_compiles(tmp_path, arch, file, instances):
    nvcc = shutil.which("nvcc")
    if nvcc is None: pytest.skip("no nvcc on this machine: kernels are compiled where there is one")
    source = tmp_path / file
    source.write_text(kernel_source(file) + "\n" + "\n".join(instances))
    done = subprocess.run([nvcc, "-std=c++17", f"-arch={arch}", "--fmad=false", "-c", str(source), "-o", str(tmp_path / "out.o")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
