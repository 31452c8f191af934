"""What the operators share: backends and how one is chosen, the checks of tensor arguments, the context that they run in."""

import contextlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "torch", "reference")
DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, statistics and accumulators for activations of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_backend(backend: str) -> None:
    """Raise a ValueError for a name that is no backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")


def choose_backend(backend: str, device: torch.device | str, triton_obstacle: Callable[[torch.device], str | None]) -> str:
    """The backend that will run for a request, `triton`, `torch` or `reference`.

    `auto` takes `triton` on a GPU where nothing stands in its way, else `torch`.

    Args:
        backend: the request.
        device: where the tensors are.
        triton_obstacle: says of a device what keeps the operator's Triton kernels from running there, or None.

    Raises:
        ValueError: an unknown backend, or one that cannot run there.
    """
    check_backend(backend)
    device = torch.device(device)
    if backend == "auto" and device.type != "cuda":
        return "torch"
    if backend in ("auto", "triton"):
        obstacle = triton_obstacle(device)
        if obstacle and backend == "triton":
            raise ValueError(f"backend 'triton': {obstacle}; use auto, torch or reference")
        return "torch" if obstacle else "triton"
    return backend


def package_obstacle() -> str | None:
    """Why Triton cannot be imported, or None: to be asked before an operator's Triton files are."""
    return "the package triton is not installed" if importlib.util.find_spec("triton") is None else None


def device_obstacle(name: str, device: torch.device, interpreted: bool) -> str | None:
    """What keeps any Triton kernel from running where the argument `name` is, or None.

    `interpreted` says whether Triton runs its kernels in its interpreter.
    """
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
        return f"{name} is on {device}, expected a CUDA device (or the CPU, with TRITON_INTERPRET=1 set before Triton is imported)"
    properties = device_properties(device)
    if properties and (torch.version.hip is not None or (properties.major, properties.minor) < (8, 0)):
        return f"{name} is on {properties.name}, expected an NVIDIA GPU from sm_80 on"
    return None


def device_properties(device: torch.device):
    """torch's description of a GPU, or None: a fake tensor's GPU need not exist."""
    there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device) if there else None


def no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Off where it is on; nothing at all where it is not, so that an exported graph holds no trace of it."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def check_are_tensors(op: str, arguments: Mapping[str, object]) -> None:
    """Raise a TypeError that names the first argument that is no tensor."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} is {type(x).__name__}, expected a tensor")


def check_leading(op: str, name: str, x: Tensor, letters: str, sizes: Sequence[int | None]) -> None:
    """Raise a ValueError or TypeError that says how x, the argument that all others are measured by, is wrong.

    Args:
        letters: its axes as the docstring has them, such as `(B,T,2,H,D)`.
        sizes: what each axis must be, None for any size from 1 on.
    """
    if x.dim() != len(sizes) or any(want is not None and size != want for size, want in zip(x.shape, sizes, strict=True)):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {letters}")
    if any(size < 1 for size in x.shape):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {letters} with every size at least 1")
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} is {x.dtype}, expected one of {', '.join(DTYPES.values())}")


def check_others(
    op: str, leading: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple], same_dtype: Collection[str], beside: str = ""
) -> None:
    """Raise a ValueError or TypeError that names the first tensor that does not fit the leading one.

    Args:
        leading: the name of the argument that the others are measured by.
        tensors: by name, the leading one among them.
        shapes: the shape that each must have.
        same_dtype: those that must have the leading one's dtype; the rest may also be fp32.
        beside: what else than the leading shape the shapes follow from, such as ` and chunk_size 16`.
    """
    lead = tensors[leading]
    for name, x in tensors.items():
        if tuple(x.shape) != shapes[name]:
            beside = f"{leading} {tuple(lead.shape)}{beside}"
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {shapes[name]} beside {beside}")
        allowed = (lead.dtype,) if name in same_dtype else (torch.float32, lead.dtype)
        if x.dtype not in allowed:
            wanted = " or ".join(dict.fromkeys(DTYPES[dtype] for dtype in allowed))
            found = DTYPES.get(x.dtype, x.dtype)
            raise TypeError(f"{op}: {name} is {found}, expected {wanted} beside {leading} in {DTYPES[lead.dtype]}")
        if x.device != lead.device:
            raise ValueError(f"{op}: {name} is on {x.device}, expected {leading}'s device {lead.device}")
