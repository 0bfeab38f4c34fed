"""Run a CUDA kernel on the CPU: its text is built with g++ against `host/cuda_host.h`, a thread of a block being a fiber."""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from f16lab.launch import THREADS, kernel_source

HOST = Path(__file__).parent / "host"
CPU = torch.device("cpu")
SCRATCH = Path(tempfile.mkdtemp(prefix="f16lab-host-"))


@functools.cache
def built(source: str, expression: str) -> ctypes.CDLL:
    """The library with one kernel of `source` (CUDA C++); skips where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None: pytest.skip("no C++ compiler: kernels cannot be built for the host")
    stem = SCRATCH / hashlib.sha256(f"{source}\n{expression}".encode()).hexdigest()[:20]
    entry = f'\nextern "C" void entry(int blocks, int threads, void** a) {{ cuda_host::launch(&{expression}, blocks, threads, a); }}\n'
    stem.with_suffix(".cpp").write_text(f'#include "cuda_host.h"\n{source}{entry}')
    done = subprocess.run([compiler, "-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", f"-I{HOST}",
                           str(stem.with_suffix(".cpp")), "-o", str(stem.with_suffix(".so"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(stem.with_suffix(".so")))


def launch_on_host(file_or_source: str, expression: str, blocks: int, *arguments, threads: int = THREADS) -> None:
    """As `f16lab.launch.launch`, for CPU tensors: `file_or_source` is a file in kernels/ or CUDA text, `expression` the kernel
    (`cast<f16lab::F16, …>`). Tensors go as pointers, None as a null one, numbers as numpy scalars of the exact width."""
    source = kernel_source(file_or_source) if file_or_source.endswith(".cu") else file_or_source
    cells = [np.array(0 if a is None else a.data_ptr(), np.uint64) if a is None or isinstance(a, Tensor) else np.array(a) for a in arguments]
    pointers = (ctypes.c_void_p * max(1, len(cells)))(*(c.ctypes.data for c in cells))
    built(source, expression).entry(ctypes.c_int(blocks), ctypes.c_int(threads), pointers)


def kernels_on_host(monkeypatch: pytest.MonkeyPatch, blocks: int = 3) -> None:
    """Every wrapper of the package launches on the CPU, with at most `blocks` blocks, and takes CPU tensors."""
    def launch(file, expression, device, count, *arguments, threads=THREADS, shared=0):
        launch_on_host(file, expression, min(count, blocks), *arguments, threads=threads)
    new = {"launch": launch, "blocks_of": lambda device, per=8: blocks, "check_tensors": lambda name, tensors, written=(): CPU,
           "shared_memory": lambda device: 227 * 1024}
    for name, module in list(sys.modules.items()):
        if not name.startswith("f16lab.") or name == "f16lab.launch": continue
        for attribute, value in new.items():
            if callable(getattr(module, attribute, None)): monkeypatch.setattr(module, attribute, value)
