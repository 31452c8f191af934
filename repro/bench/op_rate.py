"""How fast operators run, as a share of what the same machine does at the same moment: a matrix product, or a copy."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernels import selected_backend, ttt_linear, ttt_linear_bidir
from kernels.bi_wkv import bi_wkv
from kernels.selective_scan import selective_scan, selective_scan_bidir, selective_scan_routes
from kernels.ttt_linear.reference import ttt_linear_dual

from ..core.runtime import torch_dtype
from ..models.ttt_mixer import ttt_linear_macs
from .speed import median_interval, time_in_turn

OP_SIZES = ("batch_size", "tokens", "heads", "head_dim", "chunk_size", "matmul_side")
TOKENS = 6400  # 1280 x 1280 pixels
REPEATS = 7
# the share of a copy's bandwidth that a family's operator must reach before a ratio against the family is given
REQUIRED_SHARE_PERCENT = {"cpu": 20, "cuda": 30}
_COPY_BYTES = 2**28  # far beyond any cache
Case = tuple[str, Callable[[], Any], int]  # name of the operator, its step, bytes that it must read and write


def op_rate(sizes: Mapping[str, int], *, repeats: int, device: str, dtype: str, backend: str) -> dict[str, Any]:
    """Time `ttt_linear_bidir` and a square matrix product in turn, so that a drifting clock or other work affects both.

    Args:
        sizes: `batch_size`, `tokens`, `heads`, `head_dim` and `chunk_size` of the operator, of which both directions
            run, and `matmul_side`, the n of the n x n x n product.
        dtype: fp32 (PyTorch's default for products, without TF32), bf16 or fp16.

    Returns:
        {matmul_gflop_per_s, op_gflop_per_s, share_of_matmul_rate, share_ci95, op_ms, matmul_ms, op_samples_ms,
        matmul_samples_ms, sizes, backend}: rates from median times, with 2 FLOPs per MAC and the MACs of
        `ttt_mixer.ttt_linear_macs`; `share_ci95` is the interval of the median over the shares of the single turns.
    """
    draw = _make_draw(device)
    cast = torch_dtype(dtype)
    batch_size, tokens, heads, head_dim, chunk_size, matmul_side = (sizes[name] for name in OP_SIZES)
    q, k, v = (draw(batch_size, tokens, 2, heads, head_dim, dtype=cast) for _ in range(3))
    lr = torch.sigmoid(draw(batch_size, tokens, heads)) / head_dim
    scale = (1 / torch.arange(1, chunk_size + 1, device=device)).repeat(2, 1)
    W0 = 0.02 * draw(2, heads, head_dim, head_dim)
    b0, bias = (torch.zeros(2, heads, head_dim, device=device) for _ in range(2))
    weight = torch.ones_like(b0)
    a, b = (draw(matmul_side, matmul_side, dtype=cast) for _ in range(2))
    steps = {
        "matmul": lambda: a @ b,
        "op": lambda: ttt_linear_bidir(
            q, k, v, lr, scale, W0, b0, weight, bias, chunk_size=chunk_size, backend=backend
        ),
    }
    with torch.inference_mode():
        samples_ms = time_in_turn(steps, device, repeats)
    median_ms = {name: statistics.median(samples) for name, samples in samples_ms.items()}
    macs = {"matmul": matmul_side**3, "op": 2 * batch_size * ttt_linear_macs(tokens, heads, head_dim, chunk_size)}
    gflop = {name: 2 * count / 1e9 for name, count in macs.items()}
    rate = {name: gflop[name] / (median_ms[name] / 1e3) for name in steps}
    turns = zip(samples_ms["op"], samples_ms["matmul"], strict=True)
    interval = median_interval([(gflop["op"] / op_ms) / (gflop["matmul"] / matmul_ms) for op_ms, matmul_ms in turns])
    return {
        **{f"{name}_gflop_per_s": rate[name] for name in steps},
        "share_of_matmul_rate": rate["op"] / rate["matmul"],
        "share_ci95": interval,
        **{f"{name}_ms": median_ms[name] for name in steps},
        **{f"{name}_samples_ms": [round(sample, 3) for sample in samples_ms[name]] for name in steps},
        "backend": selected_backend(backend, device, head_dim=head_dim, chunk_size=chunk_size, dtype=cast),
        "sizes": dict(sizes),
    }


def kept_for_backward(sizes: Mapping[str, int], *, device: str, backend: str) -> dict[str, float]:
    """The memory that autograd keeps between passes for one image and direction, by the equations and the operator.

    The equations keep a state per chunk and everything computed from it; the operator keeps its inputs and recomputes
    the rest, by the fusion and recomputation of Appendix B.2. For the arguments, see `op_rate`.

    Returns:
        {kept_reference_mib, kept_kernel_mib, memory_reference_over_kernel}: sizes of distinct storages in fp32.
    """
    draw = _make_draw(device)
    tokens, heads, head_dim, chunk_size = (sizes[name] for name in ("tokens", "heads", "head_dim", "chunk_size"))
    q, k, v = (draw(1, tokens, heads, head_dim).requires_grad_() for _ in range(3))
    lr = (torch.sigmoid(draw(1, tokens, heads)) / head_dim).requires_grad_()
    scale = 1 / torch.arange(1, chunk_size + 1, device=device)
    W0 = (0.02 * draw(heads, head_dim, head_dim)).requires_grad_()
    b0, bias = (torch.zeros(heads, head_dim, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(heads, head_dim, device=device, requires_grad=True)
    inputs = q, k, v, lr, scale, W0, b0, weight, bias
    reference_mib = _saved_mib(lambda: ttt_linear_dual(*inputs, chunk_size=chunk_size))
    kernel_mib = _saved_mib(lambda: ttt_linear(*inputs, chunk_size=chunk_size, backend=backend))
    return {
        "kept_reference_mib": reference_mib,
        "kept_kernel_mib": kernel_mib,
        "memory_reference_over_kernel": reference_mib / kernel_mib,
    }


def measure_gate(family: str, *, batch_size: int, device: str, dtype: str) -> dict[str, Any]:
    """Whether the operator of a family (a key of `OPERATORS`) is fast enough, against a copy, for a fair comparison.

    The operator's forward pass at 6400 tokens and the copy are timed in turn.

    Returns:
        {family, batch_size, dtype, operator, share_of_copy_percent, op_gb_per_s, copy_gb_per_s, at_least_percent,
        holds}: rates from median times; the operator's tensors count once, the copy as read and written.
    """
    operator, step, op_bytes = OPERATORS[family](batch_size, device, torch_dtype(dtype))
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.inference_mode():
        samples_ms = time_in_turn({"op": step, "copy": lambda: target.copy_(source)}, device, REPEATS)
    op_gb_per_s = op_bytes / statistics.median(samples_ms["op"]) / 1e6
    copy_gb_per_s = 2 * _COPY_BYTES / statistics.median(samples_ms["copy"]) / 1e6
    share_percent, required_percent = 100 * op_gb_per_s / copy_gb_per_s, REQUIRED_SHARE_PERCENT[device]
    gate = {"family": family, "batch_size": batch_size, "dtype": dtype, "operator": operator}
    gate |= {"share_of_copy_percent": share_percent, "op_gb_per_s": op_gb_per_s, "copy_gb_per_s": copy_gb_per_s}
    return gate | {"at_least_percent": required_percent, "holds": share_percent >= required_percent}


def _selective_scan_case(batch_size: int, device: str, dtype: torch.dtype) -> Case:
    """Vim-T: E 384, N 16, both directions."""
    width, states = 384, 16
    draw = _make_draw(device)
    u, delta = (draw(batch_size, TOKENS, 2, width, dtype=dtype) for _ in range(2))
    B, C = (draw(batch_size, TOKENS, 2, states, dtype=dtype) for _ in range(2))
    z = draw(batch_size, TOKENS, width, dtype=dtype)
    A = -torch.arange(1.0, states + 1, device=device).expand(2, width, states).contiguous()
    D, bias = torch.ones(2, width, device=device), torch.full((2, width), -4.0, device=device)
    # the second u is as large as the output
    moved = sum(x.numel() * x.element_size() for x in (u, delta, B, C, z, u))
    return "selective_scan_bidir", lambda: selective_scan_bidir(u, delta, A, B, C, D, z, bias), moved


def _bi_wkv_case(batch_size: int, device: str, dtype: torch.dtype) -> Case:
    """VRWKV-T: C 192."""
    draw = _make_draw(device)
    k, v = (draw(batch_size, TOKENS, 192, dtype=dtype) for _ in range(2))
    w, u = (draw(192) / TOKENS for _ in range(2))
    return "bi_wkv", lambda: bi_wkv(w, u, k, v), 3 * k.numel() * k.element_size()


def _routes_case(batch_size: int, device: str, dtype: torch.dtype) -> Case:
    """VMamba-T's third stage: E 384, N 1, four routes over two sequences, with an fp32 output."""
    width, routes, sequences = 384, 4, 2
    draw = _make_draw(device)
    u, delta = (draw(batch_size, TOKENS, count, width, dtype=dtype) for count in (sequences, routes))
    B, C = (draw(batch_size, TOKENS, routes, 1, dtype=dtype) for _ in range(2))
    A = torch.full((routes, width, 1), -1.0, device=device)
    D, bias = torch.ones(routes, width, device=device), torch.full((routes, width), -4.0, device=device)
    moved = sum(x.numel() * x.element_size() for x in (u, delta, B, C)) + 4 * delta.numel()
    options = {"reverse": (False, False, True, True), "full_precision": True}
    return "selective_scan_routes", lambda: selective_scan_routes(u, delta, A, B, C, D, None, bias, **options), moved


def _windows_case(batch_size: int, device: str, dtype: torch.dtype) -> Case:
    """MambaVision-T's third stage: E 160, N 8, in windows of 14x14 tokens."""
    width, states, window = 160, 8, 14**2
    windows = batch_size * (TOKENS // window)
    draw = _make_draw(device)
    u, delta = (draw(windows, window, width, dtype=dtype) for _ in range(2))
    B, C = (draw(windows, window, states, dtype=dtype) for _ in range(2))
    A = -torch.arange(1.0, states + 1, device=device).expand(width, states).contiguous()
    D, bias = torch.ones(width, device=device), torch.full((width,), -4.0, device=device)
    moved = sum(x.numel() * x.element_size() for x in (u, delta, B, C, u))
    return "selective_scan", lambda: selective_scan(u, delta, A, B, C, D, None, bias), moved


# family with an operator of this project's -> that operator at the smallest width of its layers, with `TOKENS` tokens
OPERATORS: Mapping[str, Callable[[int, str, torch.dtype], Case]] = {
    "vim": _selective_scan_case,
    "vrwkv": _bi_wkv_case,
    "vmamba": _routes_case,
    "mambavision": _windows_case,
}


def _saved_mib(step: Callable[[], Any]) -> float:
    """Run a step and return the size of the distinct storages that autograd saves for its backward pass."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(storage.nbytes() for storage in storages.values()) / 2**20


def _make_draw(device: str) -> Callable[..., torch.Tensor]:
    """A function that draws normal random tensors of a shape, the same ones on every device."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw
