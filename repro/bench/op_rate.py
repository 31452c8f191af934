"""Memory bandwidth of the other families' scans, as a share of a copy's bandwidth on the same machine."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernels.bi_wkv import bi_wkv
from kernels.selective_scan import selective_scan, selective_scan_bidir, selective_scan_routes

from ..core.runtime import torch_dtype
from .speed import time_in_turn

_TOKENS = 6400  # 1280 x 1280 pixels
_REPEATS = 7
_COPY_BYTES = 2**28  # far beyond any cache
_Case = tuple[Callable[[], Any], int]  # (a call of the operator, the bytes that it must at least read and write)


def measure_share(family: str, *, batch_size: int, device: str, dtype: str) -> float:
    """Measure the bandwidth of a family's operator (a key of `RATED_OPERATORS`) in percent of a copy's.

    The operator's forward pass at 6400 tokens and the copy are timed in turn, so a busy machine slows both. Each tensor
    of the operator counts once; the copy counts as read and written. Rates follow from the median times.
    """
    op_bytes, samples_ms = _time_case(family, batch_size, device, dtype)
    if device == "cuda":
        torch.cuda.empty_cache()  # rows are measured by other processes, which need the memory
    op_rate = op_bytes / statistics.median(samples_ms["op"])
    return 100 * op_rate / (2 * _COPY_BYTES / statistics.median(samples_ms["copy"]))


def _time_case(family: str, batch_size: int, device: str, dtype: str) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of the operator's case, and the milliseconds of the operator and of the copy.

    Its tensors are freed when it returns, so that `measure_share` can give their memory back.
    """
    step, op_bytes = RATED_OPERATORS[family](batch_size, device, torch_dtype(dtype))
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.inference_mode():
        return op_bytes, time_in_turn({"op": step, "copy": lambda: target.copy_(source)}, device, _REPEATS)


def _selective_scan_case(batch_size: int, device: str, dtype: torch.dtype) -> _Case:
    """Make the case of Vim-T: E = 384, N = 16, both directions."""
    width, states = 384, 16
    draw = _make_draw(device)
    u, delta = (draw(batch_size, _TOKENS, 2, width, dtype=dtype) for _ in range(2))
    B, C = (draw(batch_size, _TOKENS, 2, states, dtype=dtype) for _ in range(2))
    z = draw(batch_size, _TOKENS, width, dtype=dtype)
    A = -torch.arange(1.0, states + 1, device=device).expand(2, width, states).contiguous()
    D, bias = torch.ones(2, width, device=device), torch.full((2, width), -4.0, device=device)
    # the second u stands for the output, which has the same size
    return lambda: selective_scan_bidir(u, delta, A, B, C, D, z, bias), sum(x.nbytes for x in (u, delta, B, C, z, u))


def _bi_wkv_case(batch_size: int, device: str, dtype: torch.dtype) -> _Case:
    """Make the case of VRWKV-T: C = 192."""
    draw = _make_draw(device)
    k, v = (draw(batch_size, _TOKENS, 192, dtype=dtype) for _ in range(2))
    w, u = (draw(192) / _TOKENS for _ in range(2))
    return lambda: bi_wkv(w, u, k, v), 3 * k.nbytes  # k, v and the output


def _routes_case(batch_size: int, device: str, dtype: torch.dtype) -> _Case:
    """Make the case of VMamba-T's third stage: E = 384, N = 1, four routes over two sequences, with an fp32 output."""
    width, routes, sequences = 384, 4, 2
    draw = _make_draw(device)
    u, delta = (draw(batch_size, _TOKENS, count, width, dtype=dtype) for count in (sequences, routes))
    B, C = (draw(batch_size, _TOKENS, routes, 1, dtype=dtype) for _ in range(2))
    A = torch.full((routes, width, 1), -1.0, device=device)
    D, bias = torch.ones(routes, width, device=device), torch.full((routes, width), -4.0, device=device)
    moved = sum(x.nbytes for x in (u, delta, B, C)) + 4 * delta.numel()
    options = {"reverse": (False, False, True, True), "full_precision": True}
    return lambda: selective_scan_routes(u, delta, A, B, C, D, None, bias, **options), moved


def _windows_case(batch_size: int, device: str, dtype: torch.dtype) -> _Case:
    """Make the case of MambaVision-T's third stage: E = 160, N = 8, in windows of 14x14 tokens."""
    width, states, window = 160, 8, 14**2
    windows = batch_size * (_TOKENS // window)
    draw = _make_draw(device)
    u, delta = (draw(windows, window, width, dtype=dtype) for _ in range(2))
    B, C = (draw(windows, window, states, dtype=dtype) for _ in range(2))
    A = -torch.arange(1.0, states + 1, device=device).expand(width, states).contiguous()
    D, bias = torch.ones(width, device=device), torch.full((width,), -4.0, device=device)
    # the second u stands for the output
    return lambda: selective_scan(u, delta, A, B, C, D, None, bias), sum(x.nbytes for x in (u, delta, B, C, u))


# family whose operator this project implements -> a case of it with `_TOKENS` tokens, at the width of size T
RATED_OPERATORS: Mapping[str, Callable[[int, str, torch.dtype], _Case]] = {
    "vim": _selective_scan_case,
    "vrwkv": _bi_wkv_case,
    "vmamba": _routes_case,
    "mambavision": _windows_case,
}


def _make_draw(device: str) -> Callable[..., torch.Tensor]:
    """Return a function that draws normal tensors on the CPU and moves them, so all devices get the same values."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw
