"""Every kernel compiles for the GPUs we name, where there is a compiler; without one the test says so."""

import re
import shutil
import subprocess
from importlib.resources import files

import nvrtc
import pytest

from f16lab.launch import CODES, kernel_source
from f16lab.precision import BF16, E4M3, F16, F32

ADAMW = ("const i64*, const i64*, const Row*, const float*, const float*, " + "float, " * 8 + "double*, float*")
NAMES = list(CODES.values())
RING = [*zip(NAMES, NAMES[1:] + NAMES[:1]), *zip(NAMES[1:] + NAMES[:1], NAMES)]  # each format as source and as target, twice
CAST = [f"template __global__ void cast<{a}, {b}, {draw}, {stats}>(const {a}::code*, {b}::code*, i64, u32, u64, int, u64*, u32*);"
        for (a, b), draw, stats in [*((pair, "true", "true") for pair in RING), ((CODES[F32], CODES[F16]), "false", "true"),
                                    ((CODES[F32], CODES[E4M3]), "false", "true"), ((CODES[F32], CODES[BF16]), "true", "false")]]
STEP = [f"template __global__ void adamw<{p}, {g}, {o}, {mode}, {draw}, {state}, {measure}, {decays}>({p}::code*, const {g}::code*, {o}::code*, "
        f"{o}::code*, float*, {p}::code*, i64, {ADAMW});"
        for p, g, o, mode, draw, state, measure, decays in (
            ("F32", "F32", "F32", 0, "false", "false", "false", "true"), ("BF16", "BF16", "F32", 1, "true", "false", "false", "true"),
            ("F16", "F16", "F16", 0, "true", "false", "true", "true"), ("F16", "F32", "F32", 2, "false", "false", "true", "false"),
            ("BF16", "F32", "BF16", 0, "true", "true", "true", "false"))]
SUMS = {
    "blocksum.cu": [f"template __global__ void blocksum<{p}, {squares}>(const {p}::code*, double*, i64);"
                    for p in ("F16", "BF16", "F32", "F64", "E4M3", "E5M2") for squares in ("true", "false")],
    "stats.cu": [f"template __global__ void stats<{p}>(const {p}::code*, i64, u64*, u32*);" for p in ("F16", "BF16", "F32", "E4M3", "E5M2")] +
                [f"template __global__ void stats_parts<{p}>(const {p}::code*, const Part*, i64, u64*);" for p in ("F16", "BF16", "F32", "E4M3", "E5M2")],
    "accumulate.cu": [f"template __global__ void accumulate<{b}, {g}, {draw}>({b}::code*, const {g}::code*, i64, u32, u64);"
                      for b, g, draw in (("F32", "F16", "false"), ("F32", "BF16", "false"), ("BF16", "BF16", "true"), ("F16", "F16", "true"))],
    "from_master.cu": [f"template __global__ void from_master<{p}, {draw}>(const float*, {p}::code*, i64, const u32*, const i64*, const u8*);"
                       for p in ("F16", "BF16") for draw in ("true", "false")],
    "embedding.cu": [text for g, d, V, draw in (("BF16", "BF16", 8, "true"), ("F16", "F32", 8, "false"), ("F32", "F32", 1, "false")) for text in (
        f"template __global__ void pieces<{g}, {V}>(const {g}::code*, const i64*, const i64*, const i64*, i64, i64, float*);",
        f"template __global__ void rows<{g}, {d}, {V}, {draw}>(const {g}::code*, const i64*, const i64*, const i64*, i64, i64, const float*, "
        f"{d}::code*, u32);")]}
KINDS = ((*["BF16"] * 5,), (*["F16"] * 5,), (*["F32"] * 5,), ("F16", "F16", "F16", "F32", "F32"))
WAYS = ((32, 3, "false", "true"), (128, 3, "false", "true"), (256, 4, "true", "false"))  # lanes a row, packs a lane, long rows, whole packs
ROWS = {
    "gelu.cu": [text for x, y in (("BF16", "BF16"), ("F16", "F16"), ("F32", "F16")) for whole in ("true", "false") for text in (
        f"template __global__ void gelu<{x}, {y}, {whole}>(const {x}::code*, {y}::code*, i64);",
        f"template __global__ void gelu_backward<{y}, {x}, {y}, {whole}>(const {y}::code*, const {x}::code*, {y}::code*, i64);")],
    "layernorm.cu": [text for (x, r, y, w, n), way in zip(KINDS, (*WAYS, WAYS[0])) for both in (("true", "false"), ("false", "true"))
                     for flags in (", ".join(map(str, (*both, *way))),) for text in (
        f"template __global__ void norm_forward<{x}, {r}, {y}, {w}, {n}, {flags}>(const {x}::code*, const {r}::code*, {y}::code*, const {w}::code*, "
        f"const {w}::code*, {n}::code*, float*, float*, i64, int, float);",
        f"template __global__ void norm_backward<{n}, {x}, {w}, {y}, {flags}>(const {n}::code*, const {y}::code*, const {x}::code*, "
        f"const float*, const float*, const {w}::code*, {y}::code*, float*, i64, i64, int);")] + [
        f"template __global__ void norm_finish<{w}, {w}>(const float*, {w}::code*, {w}::code*, i64, int);" for w in ("F16", "BF16", "F32")]}


LOSS = [f"template __global__ void cross_entropy<{z}, {d}, {mode}, {lanes}>(const {z}::code*, {d}::code*, const i64*, float*, float*, i64, int, int, "
        "i64, float, const float*);" for z, d, mode, lanes in (("BF16", "BF16", 1, 8), ("F16", "F16", 2, 8), ("F32", "F32", 3, 4), ("F32", "F16", 3, 1))
        ] + [f"template __global__ void cross_entropy_resident<{z}, {d}, {lanes}>(const {z}::code*, {d}::code*, const i64*, float*, float*, i64, int, "
             "int, i64, float, const float*);" for z, d, lanes in (("BF16", "BF16", 8), ("F16", "F16", 8), ("F32", "F16", 4), ("F32", "F32", 4))]
COLUMNS = [f"template __global__ void column_sums<{p}>(const {p}::code*, float*, i64, i64, i64);" for p in ("F16", "BF16", "F32")]
ALL = {"cast.cu": CAST, "adamw.cu": STEP, **SUMS, **ROWS, "cross_entropy.cu": LOSS, "columns.cu": COLUMNS}
PLAIN = {"columns.cu": ("side_by_side",)}  # kernels that are no templates


def test_every_file_has_its_instances():
    assert {path.name for path in files("f16lab.kernels").iterdir() if path.name.endswith(".cu")} == set(ALL)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
@pytest.mark.parametrize("file", ALL)
def test_kernel_compiles(tmp_path, arch, file):
    """By NVRTC, as on a machine with a GPU, where it is installed; else by nvcc."""
    nvcc = shutil.which("nvcc")
    if nvrtc.library() is not None:
        names = (*(re.match(r"template __global__ void (.*?)\(", text)[1] for text in ALL[file]), *PLAIN.get(file, ()))
        assert nvrtc.compiled(kernel_source(file), names, arch) == ""
    elif nvcc is not None:
        source = tmp_path / file
        source.write_text(kernel_source(file) + "\n" + "\n".join(ALL[file]))
        done = subprocess.run([nvcc, "-std=c++17", f"-arch={arch}", "--fmad=false", "-c", str(source), "-o", str(tmp_path / "out.o")],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else: pytest.skip("neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc is on this machine")


@pytest.mark.skipif(nvrtc.library() is None, reason="no NVRTC on this machine (pip install nvidia-cuda-nvrtc)")
def test_a_broken_kernel_is_named_with_file_and_line():
    text = kernel_source("cast.cu").replace("template <class P> F16LAB_FN u32 narrow(", "template <class P> F16LAB_FN u33 narrow(")
    said = nvrtc.compiled(text, (), "sm_90")
    number = (files("f16lab.kernels") / "numbers.cuh").read_text().splitlines().index(
        next(line for line in (files("f16lab.kernels") / "numbers.cuh").read_text().splitlines() if "F16LAB_FN u32 narrow(" in line)) + 1
    assert f"numbers.cuh({number}): error" in said and "u33" in said
