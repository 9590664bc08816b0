"""Compile the CUDA C++ file beside an operation with NVRTC, which comes with PyTorch, and launch its kernels.

For kernels that need what Triton does not offer. The machine code is kept in the cache folder of `native`,
under a name that holds the source with its headers, the options and the compiler's version.
"""

import ctypes
import functools
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops.native import cache_folder, texts

ARCHITECTURE = "sm_90a"  # Hopper: wgmma and the bulk copies of its tensor memory accelerator
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
UINT8 = 0  # of CUtensorMapDataType
HASH_BYTES = 32


@functools.cache
def can_run(device: torch.device, *sources: Path) -> bool:
    """Whether the device is a Hopper GPU and the files build here. Says once why they do not."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        for source in sources:
            _machine_code(source)
    except (OSError, RuntimeError) as error:
        names = ", ".join(f"{source.parent.name}/{source.name}" for source in sources)
        warnings.warn(f"using the slower Triton version of {names}: {error}", stacklevel=2)
        return False
    return True


def kernel(source: Path, name: str) -> "Kernel":
    """The kernel `name` of a file, on the current device. RuntimeError with the compiler's log."""
    _enter_context()
    return _module(source, torch.cuda.current_device()).kernel(name)


@functools.cache
def _module(source: Path, device: int) -> "Module":
    return Module(source)


class Module:
    """The kernels of one source file; `kernel` finds one of its extern "C" functions."""

    def __init__(self, source: Path):
        self._handle = ctypes.c_void_p()
        code = _machine_code(source)
        _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), code), "cuModuleLoadData")
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> "Kernel":
        if name not in self._kernels:
            function = ctypes.c_void_p()
            found = _driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode())
            _check(found, f"cuModuleGetFunction({name})")
            self._kernels[name] = Kernel(function)
        return self._kernels[name]


class Kernel:
    """Launches on PyTorch's current stream, so that a CUDA graph that is being captured takes it up."""

    def __init__(self, function: ctypes.c_void_p):
        self._function, self._shared = function, 48 << 10

    def __call__(self, grid: Sequence[int], threads: int, shared_bytes: int, *arguments: object) -> None:
        """arguments: tensors (None: no tensor), int (as int32), float (as fp32), ctypes values."""
        if shared_bytes > self._shared:
            attribute = _driver().cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes)
            _check(attribute, "cuFuncSetAttribute")
            self._shared = shared_bytes
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (*grid, *(1,) * (3 - len(grid)), threads, 1, 1)
        launched = _driver().cuLaunchKernel(self._function, *sizes, shared_bytes, stream, pointers, None)
        _check(launched, "cuLaunchKernel")


class TensorMap(ctypes.Structure):
    """CUtensorMap: how the copy engine cuts boxes out of a tensor. Passed by value, aligned to 64."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


def tensor_map(
    tensor: Tensor,
    kind: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 128,
) -> TensorMap:
    """Describe memory from the tensor's first element on.

    sizes: from the innermost dimension. strides: bytes, of the other dimensions. swizzle: bytes of shared
    memory over which the 16-byte pieces of a row are permuted as wgmma expects (0: none).
    """
    room = (ctypes.c_uint64 * 24)()  # the driver wants 64-byte alignment
    aligned = (ctypes.addressof(room) + 63) // 64 * 64
    rank = len(sizes)
    encoded = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        kind,
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,
        {0: 0, 32: 1, 64: 2, 128: 3}[swizzle],
        3,  # read 256 bytes into the L2 at a time
        0,
    )
    _check(encoded, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))


def _value(argument: object) -> ctypes._SimpleCData | ctypes.Structure:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    assert isinstance(argument, (ctypes._SimpleCData, ctypes.Structure))
    return argument


def _enter_context() -> None:
    """Make the device's context current in a thread whose first CUDA work this is."""
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        _check(
            _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device()),
            "a context",
        )
        _check(_driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The library that PyTorch has loaded or would load, or the one of a CUDA toolkit."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [Path(folder) / "nvidia" for folder in sys.path if folder]
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / name
    for place in (
        name,
        *(path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))),
        toolkit,
    ):
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    raise OSError(f"there is no {name}, which comes with PyTorch for CUDA")


@functools.cache
def _machine_code(source: Path) -> bytes:
    """What the file compiles to, from the cache folder if it is there."""
    nvrtc = _nvrtc()
    options = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "-default-device")
    version = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    parts = (*texts(source), *options, f"{version[0].value}.{version[1].value}")
    fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    file = cache_folder() / f"{source.parent.name}-{source.stem}-{fingerprint}.cubin"
    kept = _read(file)
    if kept is not None:
        return kept
    code = _compile(nvrtc, source, (*options, f"-I{source.parent}"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            (Path(folder) / file.name).write_bytes(hashlib.sha256(code).digest() + code)
            (Path(folder) / file.name).replace(file)  # atomic: another process sees a whole file or none
    except OSError as error:
        warnings.warn(f"{file.name} is not kept for the next start: {error}", stacklevel=2)
    return code


def _read(file: Path) -> bytes | None:
    """The code in a file of the cache, which begins with its hash; None if it is not there, or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    code = content[HASH_BYTES:]
    return code if content[:HASH_BYTES] == hashlib.sha256(code).digest() else None


def _compile(nvrtc: ctypes.CDLL, source: Path, options: tuple[str, ...]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text, name = source.read_bytes(), source.name.encode()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
    if created:
        raise RuntimeError(f"NVRTC cannot read {source.name}: error {created}")
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source.parent.name}/{source.name} did not compile:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _check(result: int, call: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"{call}: {(text.value or b'unknown error').decode()}")
