"""Choice of an operator's backend, checks of its tensor arguments, and a context without autocast."""

import contextlib
import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "numba", "torch", "reference")
_DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# imports a backend's modules, the one with `forward` and the one with `backward`; a function, so that Triton and numba
# are imported only where their backend runs. Where states are kept, the first one also has `states_shape`
Load = Callable[[], tuple[ModuleType, ModuleType]]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, statistics and accumulators for activations of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_backend(backend: str) -> None:
    """Raise a ValueError for a name that is none of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")


def choose_backend(
    backend: str, device: torch.device | str, leading: str, load_triton: Load, *sizes: Any, has_loops: bool = False
) -> str:
    """Return the backend that will run for a request: `triton`, `numba`, `torch` or `reference`.

    `auto` takes `triton` on a GPU that can run the operator's Triton kernels at these sizes. On a CPU it takes `numba`
    if the package works and the operator has loops for it. Otherwise it takes `torch`. A machine with a GPU but without
    the compiler that Triton needs gives one warning.

    Args:
        backend: one of `BACKENDS`.
        device: the device of the tensors.
        leading: the name of the argument from which the shapes of the others follow, for messages.
        load_triton: imports the operator's Triton modules, the first of which has `INTERPRETED` and `unsupported`; the
            same function at every call, since answers are kept by it and `sizes`.
        sizes: the arguments of `unsupported`; hashable, which symbolic sizes are not.
        has_loops: whether the operator has loops for `numba` at these sizes.

    Raises:
        ValueError: the backend is unknown, or cannot run there.
    """
    check_backend(backend)
    device = torch.device(device)
    if backend == "numba" or (backend == "auto" and device.type != "cuda"):
        obstacle = loops_obstacle(device, leading, has_loops)
        if obstacle and backend == "numba":
            raise ValueError(f"backend 'numba': {obstacle}; use auto, torch or reference")
        return "torch" if obstacle else "numba"
    if backend in ("auto", "triton"):
        obstacle = package_obstacle(device) or triton_obstacle(device, leading, load_triton, sizes)
        if obstacle and backend == "triton":
            raise ValueError(f"backend 'triton': {obstacle}; use auto, torch or reference")
        return "torch" if obstacle else "triton"
    return backend


def loops_obstacle(device: torch.device, leading: str, has_loops: bool) -> str | None:
    """Return why numba's loops cannot run an operator on a device; None if they can."""
    if not has_loops:
        return "this operator has no loops for it"
    if device.type != "cpu":
        return f"{leading} is on {device}, expected the CPU"
    return numba_obstacle()


@functools.cache
def numba_obstacle() -> str | None:
    """Return why numba cannot be used, or None; numba is imported to find out, as an old one refuses a newer NumPy."""
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    try:
        importlib.import_module("numba")
    except Exception as error:  # an incompatible package can fail with any exception
        return f"the package numba cannot be imported: {str(error).partition(chr(10))[0]}"
    return None


@functools.cache
def package_obstacle(device: torch.device) -> str | None:
    """Return why Triton cannot work on this machine, or None; warn if there is a GPU but no compiler."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if find_gpu(device) is None or (obstacle := compiler_obstacle()) is None:
        return None
    warnings.warn(f"Triton cannot run, and the slower backend torch runs instead: {obstacle}", stacklevel=2)
    return obstacle


def compiler_obstacle() -> str | None:
    """Return why Triton cannot build a kernel's launcher, with the fix, or None.

    Triton needs Python.h and a C compiler; like torch.compile it takes $CC, else gcc, else clang.
    """
    chosen = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if chosen is None:
        return "there is no C compiler, neither $CC nor gcc nor clang: install gcc, or set CC"
    if shutil.which(chosen) is None:
        return f"$CC is {chosen}, which does not exist: install gcc, or set CC"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return f"the C compiler {chosen} finds no Python.h: install python3-dev or python3-devel"
    return None


@functools.cache
def triton_obstacle(device: torch.device, leading: str, load_triton: Load, sizes: tuple) -> str | None:
    """Return why an operator's Triton kernels cannot run on a device at these sizes, or None; see `choose_backend`."""
    triton_fwd, _ = load_triton()
    if device.type != "cuda" and not (device.type == "cpu" and triton_fwd.INTERPRETED):
        return f"{leading} is on {device}, expected a CUDA device (or the CPU, with TRITON_INTERPRET=1 set before Triton is imported)"
    gpu = find_gpu(device)
    if gpu and (torch.version.hip is not None or (gpu.major, gpu.minor) < (8, 0)):
        return f"{leading} is on {gpu.name}, expected an NVIDIA GPU from sm_80 on"
    return triton_fwd.unsupported(*sizes)


def find_gpu(device: torch.device | str) -> Any:
    """Return torch's properties of a GPU; None for another device, or where a fake tensor's GPU does not exist."""
    exists = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device) if exists else None


def has_autocast(device_type: str) -> bool:
    """Tell whether a type of device has autocast; `meta` has none.

    PyTorch is not asked for CPUs and CUDA, since that breaks the graph of its compiler before 2.12.
    """
    return device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Return a context without autocast.

    The context does nothing if autocast is already off, and then leaves no trace in an exported graph.
    """
    if has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def check_are_tensors(op: str, arguments: Mapping[str, object]) -> None:
    """Raise a TypeError that names the first argument that is not a tensor."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} is {type(x).__name__}, expected a tensor")


def check_leading(op: str, name: str, x: Tensor, letters: str, sizes: Sequence[int | None]) -> None:
    """Raise a ValueError or TypeError if the leading argument does not have the expected shape or a known dtype.

    Args:
        op, name: the operator and the argument, for the message.
        x: the argument from which the shapes of the others follow.
        letters: its axes as the operator's docstring writes them, such as `(B,T,2,H,D)`.
        sizes: the size that each axis must have; None for any size of at least 1.
    """
    if x.dim() != len(sizes) or any(
        want is not None and size != want for size, want in zip(x.shape, sizes, strict=True)
    ):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {letters}")
    if any(size < 1 for size in x.shape):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {letters} with every size at least 1")
    if x.dtype not in _DTYPE_NAMES:
        raise TypeError(f"{op}: {name} is {x.dtype}, expected one of {', '.join(_DTYPE_NAMES.values())}")


def check_others(
    op: str,
    leading: str,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple],
    same_dtype: Collection[str],
    **sizes: int,
) -> None:
    """Raise a ValueError or TypeError that names the first tensor that does not fit the leading one.

    Call `check_leading` before it: this one takes the leading tensor's own dtype as right.

    Args:
        op: the operator, for the message.
        leading: the name of the argument from which the shapes of the others follow.
        tensors: all tensors by name, including the leading one.
        shapes: the shape that each tensor must have, by name.
        same_dtype: the names of the tensors that must have the leading one's dtype; the others may also be fp32.
        sizes: further sizes that the shapes depend on, for the message.
    """
    lead = tensors[leading]
    for name, x in tensors.items():
        if tuple(x.shape) != shapes[name]:
            beside = " and ".join(
                [f"{leading} {tuple(lead.shape)}", *(f"{key} {value}" for key, value in sizes.items())]
            )
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {shapes[name]} beside {beside}")
        allowed = (lead.dtype,) if name in same_dtype else (torch.float32, lead.dtype)
        if x.dtype not in allowed:
            wanted = " or ".join(dict.fromkeys(_DTYPE_NAMES[dtype] for dtype in allowed))
            found = _DTYPE_NAMES.get(x.dtype, x.dtype)
            raise TypeError(
                f"{op}: {name} is {found}, expected {wanted} beside {leading} in {_DTYPE_NAMES[lead.dtype]}"
            )
        if x.device != lead.device:
            raise ValueError(f"{op}: {name} is on {x.device}, expected {leading}'s device {lead.device}")
