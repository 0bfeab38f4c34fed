"""Compile CUDA text with NVRTC, as CuPy does on a GPU machine: its own headers only, no GPU needed."""

import ctypes
import functools
import importlib.util
import re
from pathlib import Path

from f16lab.launch import OPTIONS

FORMAT = re.compile(r"\b(F16|BF16|F32|F64|E4M3|E5M2)\b")


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC of the system or of the wheel nvidia-cuda-nvrtc; None where there is none."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations) if spec else []
    names += [str(path) for root in roots for path in sorted(Path(root).glob("*/lib/libnvrtc.so.1?"))]
    for name in names:
        try: return ctypes.CDLL(name)
        except OSError: continue
    return None


def compiled(source: str, expressions: tuple[str, ...], arch: str = "sm_90", options: tuple[str, ...] = OPTIONS) -> str:
    """'' if every kernel of `source` compiles, else what the compiler says. Without NVRTC: RuntimeError."""
    rtc = library()
    if rtc is None: raise RuntimeError("no NVRTC: pip install nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    rtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    for name in expressions: rtc.nvrtcAddNameExpression(program, FORMAT.sub(r"f16lab::\1", name.replace("f16lab::", "")).encode())
    words = [o.encode() for o in (f"--gpu-architecture={arch}", *options)]
    status = rtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    size = ctypes.c_size_t()
    rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    rtc.nvrtcGetProgramLog(program, text)
    rtc.nvrtcDestroyProgram(ctypes.byref(program))
    return "" if status == 0 else text.value.decode()
